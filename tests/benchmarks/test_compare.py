"""Two results, two environments, two servers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.fake_server import FakeServer
from tests.models_util import tiny_folder
from vllm.benchmarks import compare, portable, results
from vllm.entrypoints.cli.main import main
from vllm.exceptions import BadRequestError

FAKE_PACKAGE = """
import os, sys, time
__version__ = "fake"
print("a banner that must not disturb")
assert not any("vllm/benchmarks" in place for place in sys.path), sys.path
class SamplingParams:
    def __init__(self, n, temperature, max_tokens, ignore_eos):
        self.n, self.max_tokens = n, max_tokens
class Thing:
    def __init__(self, **fields):
        self.__dict__.update(fields)
class LLM:
    def __init__(self, model, **keywords):
        if "explode" in keywords:
            raise ValueError("no such engine")
    def generate(self, batch, params, use_tqdm):
        if len(batch) == 13:
            raise ValueError("unlucky")
        if len(batch) == 14:
            os._exit(7)
        time.sleep(0.01)
        child = Thing(token_ids=[1] * params.max_tokens)
        return [Thing(outputs=[child] * params.n) for _ in batch]
"""


@pytest.fixture
def python(tmp_path: Path) -> str:
    """An interpreter with another vllm."""
    (tmp_path / "site" / "vllm").mkdir(parents=True)
    (tmp_path / "site" / "vllm" / "__init__.py").write_text(FAKE_PACKAGE)
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path / "site"}" exec "{sys.executable}" "$@"\n')
    wrapper.chmod(0o755)
    return str(wrapper)


def save(path: Path, **fields: Any) -> str:
    results.write(path, {"benchmark": "throughput", **fields})
    return str(path)


# Files


def test_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    a = save(tmp_path / "a.json", output_throughput=100.0, p99_ttft_ms=10.0, mean_itl_ms=5.0, n=4)
    b = save(tmp_path / "b.json", output_throughput=150.0, p99_ttft_ms=12.0, mean_itl_ms=5.0, n=8)
    assert main(["bench", "compare", a, b]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = {words[1]: words[-2] for line in lines if len(words := line.replace("│", " | ").split()) > 5}
    assert found["output_throughput"] == "better"
    assert found["p99_ttft_ms"] == "worse"
    assert found["mean_itl_ms"] == "alike"
    assert any("1.500" in line for line in lines)
    assert any("not alike: n: 4 and 8" in line for line in lines)


def test_rows_leave_out_what_only_one_has() -> None:
    assert compare.rows({"steps": 4, "avg_latency": 1.0, "n": 3}, {"steps": 6}) == [("steps", 4.0, 6.0)]
    with pytest.raises(BadRequestError, match="no figure in common"):
        compare.rows({"steps": 0}, {"steps": 6})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give two result files"),
        (["a.json"], "two result files, not 1"),
        (["a.json", "b.json", "--against", "x"], "give two result files, or"),
        (["/nonexistent/a.json", "b.json"], "cannot be read"),
        (["--against", "x"], "needs --model"),
        (["--against", "/nonexistent/python", "--model", "."], "/nonexistent/python: cannot be run"),
        (["--url", "http://x"], "need --url and --against-url"),
        (["--against", "x", "--model", "m", "--case", "4x8"], "case must be"),
        (["--against", "x", "--model", "m", "--case", "0x8:1:1"], "case must be"),
        (["--against", "x", "--model", "m", "--pairs", "0"], "pairs must be"),
    ],
)
def test_bad_calls(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: list[str], message: str
) -> None:
    class NoSide(compare.Side):
        """This environment's side is not started for a call that is refused."""

        def __init__(self, name: str, python: str, engine: dict[str, Any]) -> None:
            if python != sys.executable:
                super().__init__(name, python, engine)

        def close(self) -> None:
            pass

    monkeypatch.setattr(compare, "Side", NoSide)
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "compare", *words]) == 2
    assert message in capsys.readouterr().err


# Pairs


def test_pairs_alternate_and_the_first_is_thrown_away() -> None:
    calls: list[tuple[str, int]] = []

    def side(name: str, figure: float) -> Any:
        def measure(case: str, seed: int) -> float:
            assert case == "c"
            calls.append((name, seed))
            return figure + seed

        return measure

    assert compare.alternate("c", 3, side("own", 10.0), side("other", 20.0)) == [(11, 21), (12, 22), (13, 23)]
    expected = [("own", 0), ("other", 0), ("other", 1), ("own", 1), ("own", 2), ("other", 2), ("other", 3), ("own", 3)]
    assert calls == expected


def test_the_ratio_is_quoted_pair_by_pair(capsys: pytest.CaptureFixture[str]) -> None:
    shown = compare.show_pairs("c", [(10.0, 5.0), (9.0, 3.0), (8.0, 8.0)])
    assert shown["median_ratio"] == 2.0
    assert "median ratio 2.000, from 1.000 to 3.000" in capsys.readouterr().out


# Environments


def test_a_side(python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(python).parent)
    side = compare.Side("other", "./python", {"model": "m"})  # from here, though it runs elsewhere
    try:
        assert side.version == "fake"
        assert 0 < side.measure("2x3:4:50", 1) < 2 * 3 * 50 / 0.01
        with pytest.raises(compare.RunError, match="other: ValueError: unlucky"):
            side.measure("13x1:1:1", 1)
        assert side.measure("1x1:1:1", 1) > 0  # it goes on
        with pytest.raises(compare.RunError, match="other ended with code 7"):
            side.measure("14x1:1:1", 1)
    finally:
        side.close()
    with pytest.raises(compare.RunError, match="no such engine"):
        compare.Side("other", python, {"model": "m", "explode": True})


def test_two_environments(capsys: pytest.CaptureFixture[str], python: str, tmp_path: Path) -> None:
    """This environment's engine, with a tiny model, against another package of the same name."""
    out = tmp_path / "out.json"
    model = tiny_folder(vocab_size=40_000)  # the cases' random ids are those of real vocabularies
    words = ["--against", python, "--model", str(model), "--case", "2x2:8:3", "--pairs", "2"]
    words += ["--engine", '{"max_model_len": 64, "num_gpu_blocks_override": 50}', "--output-json", str(out)]
    assert main(["bench", "compare", *words]) == 0
    printed = capsys.readouterr().out
    assert "other: fake" in printed
    assert "2x2:8:3: median ratio" in printed
    case = json.loads(out.read_text())["cases"]["2x2:8:3"]
    assert all(own > 0 and other > 0 for own, other in case["pairs"])
    assert case["ratios"] == [own / other for own, other in case["pairs"]]


def test_cases() -> None:
    assert portable.parse_case("4x8:512:128") == (4, 8, 512, 128)
    for case in ("", "4:5:6", "4x8:512", "4x8:512:128:1", "ax1:1:1", "4x8:0:1"):
        with pytest.raises(ValueError):  # noqa: PT011 - whatever int() says
            portable.parse_case(case)


# Servers


def test_two_servers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    servers = [FakeServer(delay=0.001), FakeServer(delay=0.02)]
    try:
        words = ["--url", servers[0].url, "--against-url", servers[1].url, "--model", str(tiny_folder())]
        words += ["--case", "2x3:8:5", "--pairs", "2", "--output-json", str(tmp_path / "out.json")]
        assert main(["bench", "compare", *words]) == 0
    finally:
        for server in servers:
            server.stop()
    case = json.loads((tmp_path / "out.json").read_text())["cases"]["2x3:8:5"]
    assert len(case["pairs"]) == len(case["ratios"]) == 2
    assert case["median_ratio"] > 1
    assert [len(server.bodies) for server in servers] == [6, 6]
    assert {body["n"] for body in servers[0].bodies} == {3}
    assert "median ratio" in capsys.readouterr().out


def test_a_server_that_fails(capsys: pytest.CaptureFixture[str]) -> None:
    server = FakeServer(max_n=2)
    try:
        words = ["--url", server.url, "--against-url", server.url, "--model", str(tiny_folder()), "--case", "1x3:8:2"]
        assert main(["bench", "compare", *words]) == 1
    finally:
        server.stop()
    assert "n must be at most 2" in capsys.readouterr().err
