"""How much memory this process may still take, and how large the KV cache gets from it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from vllm.config import VllmConfig
from vllm.exceptions import ConfigError
from vllm.logger import init_logger
from vllm.model_executor.spec import DecoderSpec

logger = init_logger(__name__)

DEFAULT_FRACTION = 0.4
"""Of the memory left, for the KV cache on a CPU."""
_NO_LIMIT = 2**60
"""cgroup v1 writes "no limit" as a number near 2**63."""


def available_bytes(root: str = "/") -> int:
    """Memory that can still be taken: what the machine has available, less what the control groups (v1 or v2) above
    this process do not allow. Page cache that a group could give back counts as available. `root` is for tests."""
    base = Path(root)
    left = [_machine_available(base), *_group_rooms(base)]
    return max(0, min(left))


def kv_cache_blocks(config: VllmConfig, spec: DecoderSpec, available: int) -> int:
    """Number of KV cache blocks: the configured one, or what all sequences need at full length, bounded by memory.

    The bound is `memory_bytes` if given, else the fraction (0.4) of `available` bytes; with both given, the smaller.
    The memory is touched as blocks are first used. Raises ConfigError when not one block fits.
    """
    cache = config.cache
    if cache.num_blocks is not None:
        if cache.num_blocks < 1:
            raise ConfigError(f"num_blocks must be at least 1, got {cache.num_blocks}", "num_blocks")
        return cache.num_blocks
    size = cache.block_size
    dtype = config.model.dtype if cache.kv_dtype == "auto" else cache.kv_dtype
    block_bytes = size * spec.kv_bytes_per_token(4 if dtype == "float32" else 2)
    bound = available if cache.memory_bytes is None else min(available, cache.memory_bytes)
    if cache.memory_bytes is None or cache.memory_fraction is not None:
        fraction = DEFAULT_FRACTION if cache.memory_fraction is None else cache.memory_fraction
        bound = min(bound, int(available * fraction))
    length = config.model.max_model_len
    wanted = config.scheduler.max_num_seqs * -(-length // size)
    blocks = min(wanted, bound // block_bytes)
    if blocks < 1:
        raise ConfigError(
            f"no KV cache: one block takes {block_bytes:,} bytes, and {bound:,} of the {available:,} available bytes "
            "may be used; raise gpu_memory_utilization or kv_cache_memory_bytes, or free memory",
            "gpu_memory_utilization",
        )
    if blocks * size < length:
        logger.warning(
            "The KV cache holds %d tokens, less than max_model_len=%d: longer requests are refused. "
            "Raise gpu_memory_utilization (the fraction of free memory for the cache) to take them.",
            blocks * size,
            length,
        )
    logger.info("KV cache: %d blocks of %d tokens, at most %.2f GiB", blocks, size, blocks * block_bytes / 2**30)
    return int(blocks)


def _machine_available(root: Path) -> int:
    for line in _text(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _group_rooms(root: Path) -> Iterator[int]:
    """For each control group with a memory limit that this process is in, what its limit leaves."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # v2
            names = ("memory.max", "memory.current", "inactive_file")
            mount = root / "sys/fs/cgroup"
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            mount = root / "sys/fs/cgroup/memory"
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        # Inside a container the path is the host's: then the mount's own files are the group's.
        for depth in range(len(parts), -1, -1):
            room = _room(mount.joinpath(*parts[:depth]), *names)
            if room is not None:
                yield room


def _room(group: Path, limit_name: str, usage_name: str, cache_name: str) -> int | None:
    limit, usage = _number(group / limit_name), _number(group / usage_name)
    if limit is None or usage is None or limit >= _NO_LIMIT:
        return None
    cached = 0
    for line in _text(group / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name == cache_name and value.isdigit():
            cached = int(value)
    return limit - max(0, usage - cached)


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None  # "max" is no limit


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
