"""Every kernel compiles for the cards' generations, which needs Triton's compiler and no card: what the interpreter
lets pass (types, shapes of loop variables) fails here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[3]
SHARED_LIMIT = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""Bytes of shared memory that a program may have."""


def compiled(capability: int, cache: Path, *names: str) -> list[list[str]]:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, str(Path(__file__).with_name("compile_all.py")), str(capability), *names]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    return [line.split() for line in done.stdout.splitlines()]


@pytest.mark.timeout(280)
def test_all_kernels_for_hopper(tmp_path: Path) -> None:
    rows = compiled(90, tmp_path)
    assert len(rows) >= 27
    assert max(int(shared) for _, shared, _ in rows) < SHARED_LIMIT[90]
    # A product of fp32 is made of them, in one order; nowhere else may they change what a kernel gives.
    assert {name for name, _, fused in rows if fused == "True"} == {"_gemm"}


@pytest.mark.parametrize("capability", [80, 100])
def test_the_largest_kernels_for_the_neighbours(capability: int, tmp_path: Path) -> None:
    rows = compiled(capability, tmp_path, "_gemm", "_attend", "search")
    assert len(rows) == 7
    assert max(int(shared) for _, shared, _ in rows) < SHARED_LIMIT[capability]
