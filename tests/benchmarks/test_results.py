"""Results: written whole, read back, shown."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from vllm.benchmarks import results
from vllm.exceptions import BadRequestError


def test_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "new" / "r.json"
    results.write(path, {"a": 1, "b": [math.inf, 2.5], "c": {"d": math.nan}})
    assert json.loads(path.read_text()) == {"a": 1, "b": ["inf", 2.5], "c": {"d": "nan"}}
    assert results.read(path)["a"] == 1
    assert list(path.parent.iterdir()) == [path]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    results.write(path, {"a": 1})
    with pytest.raises(TypeError):
        results.write(path, {"a": object()})
    assert results.read(path) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_appended(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    results.write(path, {"a": 1}, append=True)
    results.write(path, {"a": 2}, append=True)
    assert results.read(path) == {"a": 2}


@pytest.mark.parametrize("text", ["", "[1]", "nonsense", "{"])
def test_what_is_no_result(tmp_path: Path, text: str) -> None:
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(BadRequestError, match="not a benchmark's result"):
        results.read(tmp_path / "r.json")


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadRequestError, match="cannot write"):
        results.write(tmp_path / "file" / "r.json", {})


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    results.show(
        {
            "completed": 1234,
            "output_throughput": 5678.91,
            "bandwidth_fraction": 0.5,
            "bandwidth_limit": 31e9,
            "peak_memory_bytes": 3 << 20,
            "mean_ttft_ms": 1.5,
            "median_ttft_ms": 1.25,
            "p99_ttft_ms": 9.0,
            "p99.9_ttft_ms": 10.0,
        },
        "a title",
    )
    out = capsys.readouterr().out
    for text in ("a title", "1,234", "5,678.9", "50.0%", "31 GB/s", "time to first token", "1.25", "p99.9"):
        assert text in out
    assert "between two tokens" not in out


def test_the_stamp() -> None:
    stamp = results.stamp("kind")
    assert stamp["benchmark"] == "kind"
    assert stamp["machine"]
    assert stamp["cores"] >= 1


def test_markdown() -> None:
    assert results.markdown(["a", "b"], [["1", "2"]]) == "| a | b |\n|---|---|\n| 1 | 2 |\n"
