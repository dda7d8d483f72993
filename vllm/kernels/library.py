"""Finds and loads the shared library of the CPU kernels that fits this machine.

The package holds one library per instruction set (`vllm/_lib/libvllm_cpu_<isa>.so`). A small probe, compiled for the
architecture's baseline, says which of them the processor and the operating system can run; `VLLM_CPU_ISA` forces one.
"""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

from vllm import envs
from vllm.exceptions import VLLMError

ISAS = ("generic", "avx2", "avx512", "avx512bf16")
"""From the one that runs anywhere to the fastest; bit i of the probe's answer stands for ISAS[i]."""

LIBRARY_DIR = Path(__file__).resolve().parent.parent / "_lib"


class KernelLibraryError(VLLMError, RuntimeError):
    """The kernels cannot be loaded: not built, or not for this machine. The message says which."""


class KernelError(VLLMError, RuntimeError):
    """A kernel refused its arguments; the message is the library's."""


def library_dir() -> Path:
    """Where the libraries are: beside the package, or where VLLM_CPU_LIBRARY_DIR says (sanitized and test builds)."""
    override = envs.VLLM_CPU_LIBRARY_DIR
    return Path(override) if override else LIBRARY_DIR


def library_path(isa: str) -> Path:
    return library_dir() / f"libvllm_cpu_{isa}.so"


@functools.cache
def _probe(path: Path) -> int:
    probe = ctypes.CDLL(str(path)).vllm_cpu_probe
    probe.restype = ctypes.c_int
    return int(probe())


def supported_isas() -> tuple[str, ...]:
    """The variants this machine can run, built or not, slowest first. Raises KernelLibraryError if nothing is built."""
    path = library_dir() / "libvllm_cpu_probe.so"
    if not path.is_file():
        raise KernelLibraryError(f"the CPU kernels are not built: {path} does not exist (a C++17 compiler is needed)")
    mask = _probe(path)
    return tuple(isa for bit, isa in enumerate(ISAS) if mask & (1 << bit))


def choose_isa() -> str:
    """The variant to load: VLLM_CPU_ISA where it is set, otherwise the fastest that is built and runs here."""
    supported = supported_isas()
    forced = envs.VLLM_CPU_ISA
    if forced is not None:
        if forced not in supported:
            raise KernelLibraryError(f"VLLM_CPU_ISA={forced}: this machine runs only {', '.join(supported)}")
        if not library_path(forced).is_file():
            raise KernelLibraryError(f"VLLM_CPU_ISA={forced}: {library_path(forced)} is not built")
        return forced
    for isa in reversed(supported):
        if library_path(isa).is_file():
            return isa
    raise KernelLibraryError(f"no CPU kernel library for this machine in {library_dir()}")


@functools.cache
def _open(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    library.vllm_last_error.restype = ctypes.c_char_p
    library.vllm_isa.restype = ctypes.c_char_p
    return library


def load(isa: str | None = None) -> ctypes.CDLL:
    """The kernel library, opened once per variant. `isa` overrides the choice, and is checked like VLLM_CPU_ISA."""
    if isa is None:
        isa = choose_isa()
    elif isa not in supported_isas():
        raise KernelLibraryError(f"this machine cannot run the {isa!r} kernels, only {', '.join(supported_isas())}")
    path = library_path(isa)
    if not path.is_file():
        raise KernelLibraryError(f"the CPU kernels are not built: {path} does not exist")
    return _open(path)


def check(library: ctypes.CDLL, rc: int) -> None:
    """Turn a kernel's return code into KernelError with the library's message."""
    if rc != 0:
        raise KernelError(library.vllm_last_error().decode("utf-8", "replace"))


def available_threads() -> int:
    """The cores this process may use: its affinity, bounded by the cgroup's CPU quota (rounded up)."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:
        cores = os.cpu_count() or 1
    quota = _cgroup_quota()
    if quota is not None:
        cores = min(cores, max(1, -(-int(quota * 100) // 100)))
    return max(1, cores)


def _cgroup_quota() -> float | None:
    """CPU quota in cores of the closest cgroup (v2, then v1) that sets one; None without a limit."""
    quotas: list[float] = []
    try:
        groups = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # v2: every ancestor may set a limit
            folder = Path("/sys/fs/cgroup") / path.lstrip("/")
            for place in (folder, *folder.parents):
                if place == Path("/sys/fs"):
                    break
                quotas += _read_v2(place / "cpu.max")
        elif "cpu" in controllers.split(","):
            for root in (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup/cpu,cpuacct")):
                for place in (root / path.lstrip("/"), root):
                    quotas += _read_v1(place)
    return min(quotas) if quotas else None


def _read_v2(file: Path) -> list[float]:
    try:
        quota, period = file.read_text().split()
        return [] if quota == "max" else [int(quota) / int(period)]
    except (OSError, ValueError):
        return []


def _read_v1(folder: Path) -> list[float]:
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        period = int((folder / "cpu.cfs_period_us").read_text())
        return [quota / period] if quota > 0 and period > 0 else []
    except (OSError, ValueError):
        return []
