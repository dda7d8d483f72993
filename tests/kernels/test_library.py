"""Which library is loaded, and with how many threads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.isas import ISAS, NOT_BUILT
from vllm.kernels import library
from vllm.kernels.library import KernelError, KernelLibraryError

needs_library = pytest.mark.skipif(not ISAS, reason=NOT_BUILT)


@needs_library
def test_the_fastest_variant_is_chosen_and_any_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_CPU_ISA", raising=False)
    assert library.choose_isa() == ISAS[-1]
    for isa in ISAS:
        monkeypatch.setenv("VLLM_CPU_ISA", isa)
        assert library.choose_isa() == isa
        assert library.load().vllm_isa().decode() == isa
    assert library.load("generic").vllm_isa() == b"generic"


@needs_library
def test_a_variant_the_machine_lacks_is_an_error_not_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "supported_isas", lambda: ("generic", "avx2"))
    monkeypatch.setenv("VLLM_CPU_ISA", "avx512bf16")
    with pytest.raises(KernelLibraryError, match="runs only generic, avx2"):
        library.choose_isa()
    with pytest.raises(KernelLibraryError, match="only generic, avx2"):
        library.load("avx512")
    monkeypatch.setenv("VLLM_CPU_ISA", "mmx")
    with pytest.raises(KernelLibraryError, match="mmx"):
        library.choose_isa()


def test_nothing_built_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VLLM_CPU_LIBRARY_DIR", str(tmp_path))
    with pytest.raises(KernelLibraryError, match="not built"):
        library.choose_isa()
    monkeypatch.setattr(library, "supported_isas", lambda: ("generic",))
    with pytest.raises(KernelLibraryError, match="no CPU kernel library"):
        library.choose_isa()
    monkeypatch.setenv("VLLM_CPU_ISA", "generic")
    with pytest.raises(KernelLibraryError, match="not built"):
        library.choose_isa()
    with pytest.raises(KernelLibraryError, match="not built"):
        library.load("generic")


@needs_library
def test_a_return_code_becomes_an_error() -> None:
    handle = library.load("generic")
    library.check(handle, 0)
    with pytest.raises(KernelError):
        library.check(handle, -1)


def _cgroup(monkeypatch: pytest.MonkeyPatch, root: Path, groups: str, files: dict[str, str]) -> None:
    """A machine of eight cores whose cgroup files stand under `root`."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "self").write_text(groups)

    def moved(path: str) -> Path:
        if path == "/proc/self/cgroup":
            return root / "self"
        return (
            root / path.removeprefix("/sys/fs/cgroup").lstrip("/") if path.startswith("/sys/fs/cgroup") else Path(path)
        )

    monkeypatch.setattr(library, "Path", moved)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)


@pytest.mark.parametrize(
    ("groups", "files", "threads"),
    [
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000"}, 8),
        ("0::/a/b\n", {"a/b/cpu.max": "200000 100000"}, 2),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "350000 100000"}, 4),
        ("0::/a/b\n", {"a/b/cpu.max": "50000 100000"}, 1),
        ("0::/\n", {}, 8),
        ("0::/a\n", {"a/cpu.max": "nonsense"}, 8),
        ("4:cpu,cpuacct:/x\n", {"cpu/x/cpu.cfs_quota_us": "300000", "cpu/x/cpu.cfs_period_us": "100000"}, 3),
        ("4:cpu:/x\n", {"cpu/x/cpu.cfs_quota_us": "-1", "cpu/x/cpu.cfs_period_us": "100000"}, 8),
    ],
)
def test_threads_follow_the_quota(
    groups: str, files: dict[str, str], threads: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _cgroup(monkeypatch, tmp_path, groups, files)
    assert library.available_threads() == threads


def test_threads_follow_the_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3}, raising=False)
    assert library.available_threads() == 1


@needs_library
def test_idle_workers_sleep() -> None:
    """Between steps the pool costs nothing: a quarter of a second after a step, its threads have used no time."""
    code = """
import os, time
import numpy as np
from vllm.kernels.matrix import PackedMatrix
matrix = PackedMatrix(64, 64, "float32", threads=4)
matrix.pack(np.ones((64, 64), np.float32))
matrix.multiply(np.ones((200, 64), np.float32))
time.sleep(0.05)
before = time.process_time()
time.sleep(0.25)
assert time.process_time() - before < 0.02, time.process_time() - before
assert len(os.listdir("/proc/self/task")) >= 4
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
