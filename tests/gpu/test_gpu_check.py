"""The script for the card, rehearsed with tiny sizes: where no card is, in Triton's interpreter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from tools import gpu_check

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")  # interpreter's


@pytest.mark.timeout(280)
def test_a_rehearsal_runs_every_part(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    assert gpu_check.main(["--small", "--minutes", "60", "--out", str(out)]) == 0
    parts = json.loads(out.read_text())["parts"]
    assert list(parts) == ["kernels", "engine", "products", "serving"]
    assert all(entry["same_bits"] for entry in parts["kernels"]["gemm"].values())
    assert all(entry["chunks_and_decode_same_bits"] for entry in parts["kernels"]["decoder"].values())
    assert all(entry["equal"] == entry["draws"] for entry in parts["kernels"]["sampling"].values())
    assert parts["engine"]["greedy_equal_to_cpu"] == parts["engine"]["greedy_requests"]
    assert parts["engine"]["seeded_alone_equal_in_a_crowd"] == parts["engine"]["seeded_requests"]
    assert parts["serving"]["throughput"]["requests_per_s"] > 0


def test_a_part_that_fails_does_not_stop_the_next(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(_: gpu_check.Check) -> None:
        raise RuntimeError("on purpose")

    monkeypatch.setattr(gpu_check.Check, "kernels", broken)
    monkeypatch.setattr(gpu_check.Check, "engine", lambda _: {"fine": 1})
    out = tmp_path / "gpu.json"
    assert gpu_check.main(["--small", "--parts", "kernels,engine", "--out", str(out)]) == 1
    parts = json.loads(out.read_text())["parts"]
    assert "on purpose" in parts["kernels"]["error"]
    assert parts["engine"]["fine"] == 1


def test_out_of_time_is_said() -> None:
    assert gpu_check.main(["--small", "--parts", "products", "--minutes", "-1"]) == 1


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gpu_check, "NEEDED", ("numpy", "no_such_package"))
    assert gpu_check.main([]) == 2
    assert "no_such_package" in capsys.readouterr().err
