"""Environment variables, read when they are asked for: `envs.VLLM_X` looks at `os.environ` each time.

A value that cannot be understood raises `ConfigError` naming the variable. `is_set` tells an explicit setting from the
default. To add a variable: one entry in `_VARIABLES`, one annotation above it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    VLLM_API_KEY: str | None
    VLLM_CACHE_ROOT: str
    VLLM_CONFIGURE_LOGGING: bool
    VLLM_CPU_ISA: str | None
    VLLM_CPU_KVCACHE_SPACE: float | None
    VLLM_CPU_LIBRARY_DIR: str | None
    VLLM_CPU_NUM_THREADS: int | None
    VLLM_ENABLE_V1_MULTIPROCESSING: bool
    VLLM_ENGINE_READY_TIMEOUT_S: float
    VLLM_HOST_IP: str | None
    VLLM_LOGGING_LEVEL: str
    VLLM_SERVER_DEV_MODE: bool
    VLLM_USE_V1: bool


class Variable(NamedTuple):
    """One environment variable: how its text is read, its default, and what it is for."""

    parse: Callable[[str], Any]
    default: Callable[[], Any]
    help: str


def _bool(text: str) -> bool:
    lowered = text.strip().lower()
    if lowered in ("1", "true", "yes", "on"):
        return True
    if lowered in ("0", "false", "no", "off"):
        return False
    raise ValueError("expected 0 or 1")


def _positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError("expected a whole number of at least 1")
    return value


def _positive_float(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError("expected a positive number")
    return value


def _level(text: str) -> str:
    level = text.strip().upper()
    if level not in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"):
        raise ValueError("expected DEBUG, INFO, WARNING, ERROR or CRITICAL")
    return level


def _isa(text: str) -> str:
    return text.strip().lower()


def _cache_root() -> str:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return os.path.join(base, "vllm")


def _none() -> None:
    return None


_VARIABLES: dict[str, Variable] = {
    "VLLM_API_KEY": Variable(str, _none, "Key that clients of `vllm serve` need, as --api-key."),
    "VLLM_CACHE_ROOT": Variable(
        os.path.expanduser, _cache_root, "Folder for converted tokenizers and assembled models."
    ),
    "VLLM_CONFIGURE_LOGGING": Variable(_bool, lambda: True, "0 leaves the logging set-up to the program."),
    "VLLM_CPU_ISA": Variable(_isa, _none, "Force one variant of the CPU kernels: avx512bf16, avx512, avx2 or generic."),
    "VLLM_CPU_KVCACHE_SPACE": Variable(_positive_float, _none, "Upper bound of the KV cache on a CPU, in GiB."),
    "VLLM_CPU_LIBRARY_DIR": Variable(str, _none, "Folder of the CPU kernels, in place of the package's own."),
    "VLLM_CPU_NUM_THREADS": Variable(_positive_int, _none, "Threads of the CPU backends; default: the usable cores."),
    "VLLM_ENABLE_V1_MULTIPROCESSING": Variable(
        _bool, lambda: False, "1 runs the engine core in a process of its own, 0 in the caller's."
    ),
    "VLLM_ENGINE_READY_TIMEOUT_S": Variable(
        _positive_float, lambda: 600.0, "Longest wait for an engine process to start."
    ),
    "VLLM_HOST_IP": Variable(str, _none, "Address of this machine as others reach it; default: the default route's."),
    "VLLM_LOGGING_LEVEL": Variable(_level, lambda: "INFO", "DEBUG, INFO, WARNING, ERROR or CRITICAL."),
    "VLLM_SERVER_DEV_MODE": Variable(
        _bool, lambda: False, "1 adds paths to the server that are for development: sleep, wake_up, check_integrity."
    ),
    "VLLM_USE_V1": Variable(
        _bool, lambda: True, "Accepted for old scripts; there is no other engine, so 0 is refused."
    ),
}

_HARMLESS = frozenset(
    {"VLLM_WORKER_MULTIPROC_METHOD", "VLLM_NO_USAGE_STATS", "VLLM_DO_NOT_TRACK", "VLLM_TARGET_DEVICE"}
)
"""Set by existing programs; without meaning here, and without effect on results."""


def is_set(name: str) -> bool:
    """Whether the user set this variable (to anything but the empty string)."""
    if name not in _VARIABLES:
        raise AttributeError(f"module {__name__!r} has no variable {name!r}")
    return bool(os.environ.get(name))


def unknown() -> list[str]:
    """Names in the environment that begin with VLLM_ and mean nothing here."""
    return sorted(
        key for key in os.environ if key.startswith("VLLM_") and key not in _VARIABLES and key not in _HARMLESS
    )


def describe() -> dict[str, str]:
    """Every variable with its help text."""
    return {name: variable.help for name, variable in _VARIABLES.items()}


def __getattr__(name: str) -> Any:
    variable = _VARIABLES.get(name)
    if variable is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    text = os.environ.get(name)
    if not text:
        return variable.default()
    try:
        return variable.parse(text)
    except ValueError as error:
        from vllm.exceptions import ConfigError

        raise ConfigError(f"environment variable {name}={text!r}: {error}", parameter=name) from None


def __dir__() -> list[str]:
    return sorted([*globals(), *_VARIABLES])
