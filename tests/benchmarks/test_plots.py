"""Pictures: what is drawn, and what cannot be."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from vllm.benchmarks import plots, results
from vllm.entrypoints.cli.main import main
from vllm.exceptions import BadRequestError

PNG = b"\x89PNG"


def offline(n: int, rate: float) -> dict[str, Any]:
    return {"benchmark": "throughput", "model": "m", "n": n, "output_throughput": rate}


def served(rate: Any, ttft: float) -> dict[str, Any]:
    times = {f"{what}_{name}_ms": ttft for what in ("median", "p99") for name in ("ttft", "tpot", "e2el")}
    return {"benchmark": "serve", "model": "m", "request_rate": rate, **times}


def test_throughput_over_n(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    axes: list[Any] = []
    drawn = plots._panel
    monkeypatch.setattr(plots, "_panel", lambda place, *rest: (axes.append(place), drawn(place, *rest)))
    plots.draw([offline(8, 50.0), offline(1, 10.0)], tmp_path / "new" / "a.png", [offline(1, 9.0)])
    assert (tmp_path / "new" / "a.png").read_bytes().startswith(PNG)
    (place,) = axes
    lines = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in place.lines}
    assert lines == {"this": ([1.0, 8.0], [10.0, 50.0]), "baseline": ([1.0], [9.0])}
    assert [label.get_text() for label in place.get_xticklabels()] == ["1", "8"]


def test_latency_over_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    axes: list[Any] = []
    drawn = plots._panel
    monkeypatch.setattr(plots, "_panel", lambda place, *rest: (axes.append(place), drawn(place, *rest)))
    plots.draw([served(1.0, 5.0), served("inf", 9.0), served(4.0, 6.0)], tmp_path / "a.svg")
    assert b"<svg" in (tmp_path / "a.svg").read_bytes()
    assert len(axes) == 3
    line = axes[0].lines[0]
    assert list(line.get_xdata()) == [1.0, 4.0, 8.0]  # "inf" stands beyond the largest rate
    assert list(line.get_ydata()) == [5.0, 6.0, 9.0]
    assert [label.get_text() for label in axes[0].get_xticklabels()] == ["1.0", "4.0", "inf"]


def test_the_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for n in (1, 4):
        results.write(tmp_path / f"{n}.json", offline(n, 10.0 * n))
    files = [str(tmp_path / f"{n}.json") for n in (1, 4)]
    assert main(["bench", "plot", *files, "--baseline", files[0], "-o", str(tmp_path / "a.png")]) == 0
    assert (tmp_path / "a.png").read_bytes().startswith(PNG)
    assert "a.png" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ([], "no result"),
        ([offline(1, 1.0), served(1.0, 1.0)], "one kind of result"),
        ([{"benchmark": "compare"}], "no picture is made of 'compare'"),
    ],
)
def test_what_cannot_be_drawn(tmp_path: Path, made: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(BadRequestError, match=message):
        plots.draw(made, tmp_path / "a.png")


def test_an_unknown_format(tmp_path: Path) -> None:
    with pytest.raises(BadRequestError, match="cannot draw"):
        plots.draw([offline(1, 1.0)], tmp_path / "a.nonsense")


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(BadRequestError, match="pip install"):
        plots.draw([offline(1, 1.0)], tmp_path / "a.png")
