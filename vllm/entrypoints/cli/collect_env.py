"""What a bug report needs to say about this machine and installation."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from importlib import metadata
from pathlib import Path

from vllm.exceptions import ConfigError
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.version import __version__

_PACKAGES = ("numpy", "tokenizers", "msgspec", "pyzmq", "gguf", "torch", "transformers", "safetensors", "triton")
_CPU_FLAGS = ("avx2", "fma", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "amx_bf16", "asimd", "bf16", "i8mm")


def add_arguments(parser: FlexibleArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="As a JSON object")


def run(args: argparse.Namespace) -> int:
    facts = collect()
    if args.json:
        print(json.dumps(facts, indent=2))
    else:
        for name, value in facts.items():
            print(f"{name:<14} {value if value is not None else '-'}")
    return 0


def collect() -> dict[str, str | None]:
    """Facts by name; nothing is imported for them that the engine would not import."""
    cpu = _cpu()
    facts: dict[str, str | None] = {
        "vllm": __version__,
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "executable": sys.executable,
        "system": platform.platform(),
        "libc": " ".join(platform.libc_ver()).strip() or None,
        "cpu": cpu.get("model name") or platform.processor() or platform.machine(),
        "cpu flags": " ".join(flag for flag in _CPU_FLAGS if flag in cpu.get("flags", cpu.get("Features", "")).split()),
        "cores": f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}",
        "memory": _memory(),
        "kernels": _kernels(),
    }
    facts |= {name: _version(name) for name in _PACKAGES}
    facts["CUDA"] = "a driver is loaded" if Path("/proc/driver/nvidia/version").exists() else None
    for name in sorted(os.environ):
        if name.startswith(("VLLM_", "OMP_", "CUDA_", "TRITON_")):
            secret = any(word in name for word in ("KEY", "TOKEN", "SECRET", "PASSWORD"))
            facts[name] = "(hidden)" if secret else os.environ[name]
    return facts


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _read(path: str) -> str:
    """A file of /proc or /sys; "" where there is none."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _cpu() -> dict[str, str]:
    """Fields of the first processor in /proc/cpuinfo."""
    pairs = (line.partition(":") for line in _read("/proc/cpuinfo").split("\n\n", 1)[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _memory() -> str | None:
    total = next((line for line in _read("/proc/meminfo").splitlines() if line.startswith("MemTotal:")), None)
    if total is None:
        return None
    text = f"{int(total.split()[1]) / 2**20:.1f} GiB"
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        limit = _read(path).strip()
        if limit.isdigit() and int(limit) < 2**60:
            return f"{text}, limited to {int(limit) / 2**30:.1f} GiB"
    return text


def _kernels() -> str:
    from vllm.kernels import library

    try:
        return library.choose_isa()
    except (library.KernelLibraryError, ConfigError) as error:
        return str(error)
