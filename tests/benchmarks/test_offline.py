"""Throughput and latency, run for real on a tiny model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.models_util import tiny_config, tiny_folder
from vllm.benchmarks import BENCHMARKS
from vllm.entrypoints.cli.main import main

ROOT = Path(__file__).resolve().parents[2]


def bench(kind: str, folder: Path, *words: str) -> dict[str, Any]:
    file = folder / "r.json"
    given = ["bench", kind, "--model", str(tiny_folder()), "--max-num-seqs", "16", "--num-gpu-blocks-override", "200"]
    assert main([*given, "--disable-limits", "--output-json", str(file), *words]) == 0
    result: dict[str, Any] = json.loads(file.read_text())
    return result


def test_throughput(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--input-len", "20", "--output-len", "6", "--num-prompts", "5", "--n", "3")
    result = bench("throughput", tmp_path, *words)
    assert result["completed"] == 5
    assert result["total_input_tokens"] == result["prompt_tokens_computed"] == 100
    assert result["total_output_tokens"] == 90
    assert result["requests_per_second"] == result["request_throughput"] == 5 / result["duration"]
    assert result["steps"] >= 6
    assert result["peak_memory_bytes"] > 0
    assert result["mean_request_ttft_ms"] <= result["mean_request_e2el_ms"] <= result["duration"] * 1000
    assert "mean_itl_ms" not in result  # children are not timed where nothing is streamed
    assert "bandwidth_fraction" not in result
    assert "Throughput: " in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["--stream", "--async-engine"])
def test_streamed_throughput(tmp_path: Path, flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    words = ("--input-len", "20", "--output-len", "6", "--num-prompts", "4", "--n", "2", flag)
    result = bench("throughput", tmp_path, *words)
    assert result["total_output_tokens"] == 48
    assert result["prompt_tokens_computed"] == 80
    names = ["ttft", "e2el", "first_child", "last_child", "child_spread"]
    if flag == "--stream":  # the other way a slow reader may get all tokens at once, which leaves no time between them
        names += ["tpot", "itl"]
    for name in names:
        assert result[f"p99_{name}_ms"] >= 0
    assert result["mean_first_child_ms"] <= result["mean_last_child_ms"]


def test_limits_and_our_own_texts(tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    words = ["bench", "throughput", "--model", str(tiny_folder()), "--num-prompts", "2", "--output-len", "3"]
    words += ["--num-gpu-blocks-override", "200", "--backend", "vllm", "--output-json", str(file)]
    assert main(words) == 0
    result = json.loads(file.read_text())
    assert result["dataset"] == "conversations"
    assert 0 < result["bandwidth_fraction"] < 1
    assert 0 < result["flops_fraction"] < 1


def test_a_config_alone(tmp_path: Path) -> None:
    """Dummy weights need no tokenizer as long as prompts are random ids."""
    config = tmp_path / "shape.json"
    config.write_text(json.dumps(tiny_config("qwen3")))
    file = tmp_path / "r.json"
    words = ["--model", str(config), "--load-format", "dummy", "--output-len", "3", "--disable-limits"]
    words += ["--num-gpu-blocks-override", "50", "--output-json", str(file)]
    assert main(["bench", "throughput", *words, "--num-prompts", "2", "--input-len", "5"]) == 0
    assert json.loads(file.read_text())["total_output_tokens"] == 6
    assert main(["bench", "latency", *words, "--input-len", "5", "--batch-size", "1", "--num-iters", "1"]) == 0


def test_latency(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--input-len", "20", "--output-len", "6", "--batch-size", "2", "--n", "3", "--num-iters", "4")
    result = bench("latency", tmp_path, *words, "--num-iters-warmup", "0")
    assert len(result["latencies"]) == 4
    assert result["avg_latency"] == pytest.approx(sum(result["latencies"]) / 4)
    assert result["percentiles"]["99"] <= max(result["latencies"])
    assert result["prompt_tokens_computed"] == 4 * 2 * 20  # new prompts in every batch
    assert result["total_output_tokens"] == 4 * 2 * 3 * 6
    assert result["mean_ttft_ms"] > 0
    out = capsys.readouterr().out
    assert "Avg latency: " in out
    assert "99% percentile latency: " in out
    assert "mean_ttft_ms" not in bench("latency", tmp_path, *words, "--disable-stream")


@pytest.mark.parametrize(
    ("kind", "words", "message"),
    [
        ("throughput", ["--dataset-path", "/nonexistent.json"], "no such file"),
        ("throughput", ["--input-len", "2000", "--output-len", "1"], "the limit is max_model_len, 1024"),
        ("throughput", ["--n", "2", "--temperature", "0"], "temperature"),
        ("throughput", ["--n", "0"], "n must be"),
        ("throughput", ["--lora-path", "x"], "lora_path is not built"),
        ("throughput", ["--num-warmups", "-1"], "num_warmups"),
        ("throughput", ["--model", "/nonexistent"], "no model"),
        ("latency", ["--batch-size", "0"], "batch_size must be at least 1"),
        ("latency", ["--num-iters", "0"], "num_iters must be at least 1"),
        ("latency", ["--input-len", "2000"], "the limit is max_model_len"),
        ("latency", ["--use-beam-search"], "use_beam_search is not built"),
    ],
)
def test_bad_calls(capsys: pytest.CaptureFixture[str], kind: str, words: list[str], message: str) -> None:
    given = ["bench", kind, "--model", str(tiny_folder()), "--num-gpu-blocks-override", "200", "--num-iters", "1"]
    assert main([*(given if kind == "latency" else given[:-2]), *words]) in (1, 2)
    assert message in capsys.readouterr().err


def test_texts_without_a_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "shape.json"
    config.write_text(json.dumps(tiny_config("llama")))
    assert main(["bench", "throughput", "--model", str(config), "--load-format", "dummy"]) == 2
    assert "has no tokenizer" in capsys.readouterr().err


def test_a_baseline_beside_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--input-len", "20", "--output-len", "6", "--num-prompts", "2")
    bench("throughput", tmp_path, *words)
    old = tmp_path / "old.json"
    (tmp_path / "r.json").rename(old)
    bench("throughput", tmp_path, *words, "--baseline", str(old), "--plot", str(tmp_path / "a.png"))
    assert (tmp_path / "a.png").stat().st_size > 1000
    capsys.readouterr()
    bench("throughput", tmp_path, *words, "--baseline", str(old))
    assert "b / a" in capsys.readouterr().out


@pytest.mark.parametrize("name", sorted(BENCHMARKS))
def test_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", name, "--help"])
    assert caught.value.code == 0
    assert "usage: vllm bench" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["throughput", "latency", "serving"])
def test_the_scripts_under_upstreams_names(name: str, tmp_path: Path) -> None:
    script = str(ROOT / "benchmarks" / f"benchmark_{name}.py")
    environment = {**os.environ, "VLLM_USE_V1": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    words = [sys.executable, script, "--model", str(tiny_folder()), "--output-len", "4"]
    if name == "serving":
        words += ["--port", "1", "--num-prompts", "1"]
    else:
        words += ["--input-len", "8", "--disable-limits", "--num-gpu-blocks-override", "100"]
        words += ["--num-prompts", "2"] if name == "throughput" else ["--num-iters", "1"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=100, env=environment)
    if name == "serving":
        assert done.returncode == 2
        assert "http://127.0.0.1:1/v1/completions refuses" in done.stderr
    else:
        assert done.returncode == 0, done.stderr
        assert {"throughput": "Throughput: ", "latency": "Avg latency: "}[name] in done.stdout


@pytest.mark.parametrize("path", sorted((ROOT / "examples" / "configs").glob("*.json")), ids=lambda path: path.stem)
def test_example_shapes(path: Path) -> None:
    """Each can be opened, and the table beside them says how large it is."""
    from vllm.model_executor.loader import open_checkpoint

    with open_checkpoint(path, "dummy") as checkpoint:
        count = 0
        for shape in checkpoint.spec.parameters().values():
            size = 1
            for axis in shape:
                size *= axis
            count += size
    page = (ROOT / "examples" / "configs" / "README.md").read_text()
    assert f"| {path.stem} | {count / 1e9:.2f} |" in page
