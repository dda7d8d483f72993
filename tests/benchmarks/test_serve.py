"""The serving benchmark against a server that streams made-up tokens, and one that fails."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.fake_server import FakeServer
from tests.models_util import tiny_folder
from vllm.benchmarks import serve
from vllm.entrypoints.cli.main import main
from vllm.utils.network_utils import get_open_port


@pytest.fixture
def make_server() -> Iterator[Callable[..., FakeServer]]:
    made: list[FakeServer] = []

    def make(**options: Any) -> FakeServer:
        made.append(FakeServer(**options))
        return made[-1]

    yield make
    for server in made:
        server.stop()


def bench(url: str, folder: Path, *words: str) -> tuple[int, dict[str, Any]]:
    """Exit code and saved result."""
    given = ["bench", "serve", "--base-url", url, "--model", str(tiny_folder()), "--disable-tqdm"]
    given += ["--result-dir", str(folder), "--result-filename", "r.json", "--input-len", "8", "--output-len", "4"]
    code = main([*given, *words])
    file = folder / "r.json"
    return code, json.loads(file.read_text()) if file.exists() else {}


@pytest.mark.parametrize("backend", ["vllm", "openai-chat"])
def test_counts_and_times(make_server: Callable[..., FakeServer], tmp_path: Path, backend: str) -> None:
    server = make_server()
    code, result = bench(
        server.url, tmp_path, "--num-prompts", "5", "--n", "3", "--backend", backend, "--save-detailed",
        "--temperature", "0.5", "--extra-body", '{"min_tokens": 4}', "--header", "X-Test=yes",
    )  # fmt: skip
    assert code == 0
    assert result["completed"] == 5
    assert result["failed"] == 0
    assert result["total_output_tokens"] == 5 * 3 * 4
    assert result["total_input_tokens"] == 5 * 11  # the server's own count
    assert result["prompt_tokens_computed"] == 50  # the warm-up is not among them
    assert result["errors"] == {}
    assert result["request_rate"] == "inf"
    for name in ("ttft", "tpot", "itl", "e2el", "request_e2el", "first_child", "last_child", "child_spread"):
        assert result[f"mean_{name}_ms"] >= 0
        assert result[f"p90_{name}_ms"] <= result[f"p99_{name}_ms"]
    assert result["mean_ttft_ms"] <= result["mean_e2el_ms"]
    assert len(result["requests"]) == 5
    for request in result["requests"]:
        assert [child["text"] for child in request["children"]] == ["ä " * 4] * 3
        assert [child["finish_reason"] for child in request["children"]] == ["length"] * 3
        assert [len(child["arrivals"]) for child in request["children"]] == [4, 4, 4]
    body = server.bodies[-1]
    assert body["stream"] is True
    assert body["n"] == 3
    assert body["temperature"] == 0.5
    assert body["min_tokens"] == 4
    assert body["ignore_eos"] is True
    assert ("messages" in body) == (backend == "openai-chat")
    assert server.headers[-1]["X-Test"] == "yes"


def test_warm_ups_key_and_model(
    make_server: Callable[..., FakeServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    server = make_server()
    code, result = bench(
        server.url, tmp_path, "--num-prompts", "2", "--num-warmups", "3", "--served-model-name", "other"
    )  # fmt: skip
    assert code == 0
    assert len(server.bodies) == 5
    warm_up, *_, last = (body["prompt"] for body in server.bodies)
    assert warm_up.startswith("Warm-up")  # no prompt of the run: the server's cache must not know those
    assert not last.startswith("Warm-up")
    assert {body["model"] for body in server.bodies} == {"other"}
    assert server.headers[0]["Authorization"] == "Bearer secret"
    assert result["prompt_tokens_computed"] == 20
    server = make_server()
    given = ["bench", "serve", "--base-url", server.url, "--tokenizer", str(tiny_folder()), "--disable-tqdm"]
    assert main([*given, "--num-prompts", "1", "--skip-initial-test"]) == 0
    assert [body["model"] for body in server.bodies] == ["fake"]  # the first that it lists


def test_concurrency_and_goodput(make_server: Callable[..., FakeServer], tmp_path: Path) -> None:
    server = make_server(delay=0.003)
    code, result = bench(
        server.url, tmp_path, "--num-prompts", "8", "--max-concurrency", "2", "--goodput", "ttft:0.001", "e2el:1e9"
    )  # fmt: skip
    assert code == 0
    assert server.most <= 2
    assert result["max_concurrent_requests"] == 2
    assert result["request_goodput"] == 0
    code, result = bench(server.url, tmp_path, "--num-prompts", "4", "--goodput", "e2el:1e9")
    assert result["request_goodput"] == result["request_throughput"] > 0


def test_results_are_appended(make_server: Callable[..., FakeServer], tmp_path: Path) -> None:
    server = make_server()
    for rate in ("500", "1000"):
        words = ("--num-prompts", "2", "--append-result", "--request-rate", rate, "--metadata", "who=me")
        given = ["bench", "serve", "--base-url", server.url, "--model", str(tiny_folder()), "--disable-tqdm"]
        assert main([*given, *words, "--result-dir", str(tmp_path), "--result-filename", "r.json"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "r.json").read_text().splitlines()]
    assert [line["request_rate"] for line in lines] == [500.0, 1000.0]
    assert lines[0]["who"] == "me"


# Bad input, and servers that fail


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--request-rate", "0"], "request_rate must be above 0"),
        (["--request-rate", "-1"], "request_rate must be above 0"),
        (["--request-rate", "nan"], "request_rate must be above 0"),
        (["--burstiness", "0"], "burstiness must be above 0"),
        (["--n", "0"], "n must be at least 1"),
        (["--max-concurrency", "0"], "max_concurrency"),
        (["--num-prompts", "0"], "num_prompts"),
        (["--goodput", "speed:1"], "goodput"),
        (["--metric-percentiles", "101"], "metric_percentiles"),
        (["--percentile-metrics", "speed"], "percentile_metrics"),
        (["--header", "x"], "header must be KEY=VALUE"),
        (["--dataset-path", "/nonexistent.json"], "no such file"),
        (["--tokenizer", "/nonexistent"], "no tokenizer"),
        (["--profile"], "profile is not built"),
    ],
)
def test_bad_flags(
    capsys: pytest.CaptureFixture[str],
    make_server: Callable[..., FakeServer],
    tmp_path: Path,
    words: list[str],
    message: str,
) -> None:
    server = make_server()
    code, result = bench(server.url, tmp_path, *words)
    assert code != 0
    assert result == {}
    assert message in capsys.readouterr().err
    assert server.bodies == []


def test_no_server(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{get_open_port()}"
    code, _ = bench(url, tmp_path, "--num-prompts", "1")
    assert code == 2
    assert "refuses the first request" in capsys.readouterr().err
    code, result = bench(url, tmp_path, "--num-prompts", "3", "--skip-initial-test")
    assert code == 1
    assert result["completed"] == 0
    assert result["failed"] == sum(result["errors"].values()) == 3
    assert main(["bench", "serve", "--base-url", url, "--num-prompts", "1"]) == 2
    assert "lists no model" in capsys.readouterr().err


def test_a_server_that_comes_up_late(tmp_path: Path) -> None:
    late: list[FakeServer] = []
    port = get_open_port()
    timer = threading.Timer(0.4, lambda: late.append(FakeServer(port=port)))
    timer.start()
    url = f"http://127.0.0.1:{port}"
    try:
        code, result = bench(url, tmp_path, "--num-prompts", "2", "--ready-check-timeout-sec", "60")
    finally:
        timer.join(30)
        late[0].stop()
    assert code == 0
    assert result["completed"] == 2


def test_n_beyond_the_servers_limit(
    capsys: pytest.CaptureFixture[str], make_server: Callable[..., FakeServer], tmp_path: Path
) -> None:
    server = make_server(max_n=4)
    code, _ = bench(server.url, tmp_path, "--num-prompts", "3", "--n", "5", "--ready-check-timeout-sec", "60")
    assert code == 2
    assert "HTTP 400: n must be at most 4, got 5" in capsys.readouterr().err
    code, result = bench(server.url, tmp_path, "--num-prompts", "3", "--n", "5", "--skip-initial-test")
    assert code == 1
    assert result["errors"] == {"HTTP 400: n must be at most 4, got 5": 3}


@pytest.mark.parametrize(
    ("options", "message"), [({"die_after": 3}, "Client"), ({"no_done": True}, "ended before [DONE]")]
)
def test_a_server_that_dies_midway(
    capsys: pytest.CaptureFixture[str],
    make_server: Callable[..., FakeServer],
    tmp_path: Path,
    options: dict[str, Any],
    message: str,
) -> None:
    server = make_server(**options)
    words = ("--num-prompts", "8", "--max-concurrency", "1", "--skip-initial-test", "--save-detailed")
    code, result = bench(server.url, tmp_path, *words)
    assert code == 1
    good = 3 if "die_after" in options else 0
    assert result["completed"] == good
    assert result["failed"] == 8 - good
    assert result["total_output_tokens"] == 4 * good
    assert all(message in text for text in result["errors"])
    assert sum(request["error"] is None for request in result["requests"]) == good
    assert f"{8 - good} of 8 requests failed" in capsys.readouterr().err


def test_ctrl_c_keeps_what_there_is(make_server: Callable[..., FakeServer], tmp_path: Path) -> None:
    server = make_server(delay=0.01)
    words = [sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--base-url", server.url]
    words += ["--model", str(tiny_folder()), "--disable-tqdm", "--result-dir", str(tmp_path), "--result-filename", "r"]
    words += ["--input-len", "8", "--output-len", "4", "--num-prompts", "500", "--max-concurrency", "2"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while len(server.bodies) < 12 and process.poll() is None:
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    result = json.loads((tmp_path / "r").read_text())
    assert result["interrupted"] is True
    assert 5 <= result["completed"] < 500
    assert result["completed"] + result["failed"] == 500


# When requests are sent


async def test_arrivals_keep_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    moments: dict[tuple[float, int], list[float]] = {}
    for burstiness in (0.2, 1.0, 5.0):
        for seed in (0, 1):
            clock = [0.0]

            async def sleep(seconds: float, clock: list[float] = clock) -> None:
                clock[0] += seconds

            with monkeypatch.context() as patch:
                patch.setattr(serve.asyncio, "sleep", sleep)
                patch.setattr(serve.time, "perf_counter", lambda clock=clock: clock[0])
                moments[burstiness, seed] = [clock[0] async for _ in serve.arrivals(4000, 50.0, burstiness, seed)]
        own = moments[burstiness, 0]
        assert own[0] == 0.0
        assert 4000 / own[-1] == pytest.approx(50, rel=0.15)
        assert own != moments[burstiness, 1]

    def spread(own: list[float]) -> float:
        gaps = [b - a for a, b in itertools.pairwise(own)]
        mean = sum(gaps) / len(gaps)
        return (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 / mean

    # The coefficient of variation of a gamma distribution is shape ** -0.5.
    for burstiness in (0.2, 1.0, 5.0):
        assert spread(moments[burstiness, 0]) == pytest.approx(burstiness**-0.5, rel=0.15)


async def test_arrivals_all_at_once() -> None:
    assert [index async for index in serve.arrivals(5, float("inf"), 1.0, 0)] == [0, 1, 2, 3, 4]
