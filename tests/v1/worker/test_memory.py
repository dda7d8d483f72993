"""The KV cache's size, from memory as the machine and the control groups leave it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.exceptions import ConfigError
from vllm.model_executor.spec import AttentionSpec, DecoderSpec, DenseFFNSpec, LayerSpec
from vllm.v1.worker.memory import available_bytes, kv_cache_blocks

MIB = 2**20


def machine(root: Path, available: int, groups: str, files: dict[str, Any]) -> str:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 99999999 kB\nMemFree: 1 kB\nMemAvailable: {available // 1024} kB\n")
    (root / "proc/self/cgroup").write_text(groups)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return str(root)


def test_without_groups_the_machine_counts(tmp_path: Path) -> None:
    assert available_bytes(machine(tmp_path, 700 * MIB, "0::/\n", {})) == 700 * MIB


def test_v2_takes_the_tightest_of_nested_groups_and_counts_page_cache_as_free(tmp_path: Path) -> None:
    files = {
        "memory.max": "max",
        "memory.current": 10,
        "a/memory.max": 500 * MIB,
        "a/memory.current": 300 * MIB,
        "a/memory.stat": f"anon 5\ninactive_file {100 * MIB}\nactive_file 7",
        "a/b/memory.max": 400 * MIB,
        "a/b/memory.current": 10 * MIB,
    }
    assert available_bytes(machine(tmp_path, 700 * MIB, "0::/a/b\n", files)) == 300 * MIB


def test_v2_in_a_container_where_the_path_is_the_hosts(tmp_path: Path) -> None:
    files = {"memory.max": 256 * MIB, "memory.current": 56 * MIB}
    assert available_bytes(machine(tmp_path, 700 * MIB, "0::/kubepods/pod7\n", files)) == 200 * MIB


@pytest.mark.parametrize(("limit", "expected"), [(300 * MIB, 250), (2**63 - 4096, 700)])
def test_v1(tmp_path: Path, limit: int, expected: int) -> None:
    files = {
        "memory/job/memory.limit_in_bytes": limit,
        "memory/job/memory.usage_in_bytes": 90 * MIB,
        "memory/job/memory.stat": f"cache 1\ntotal_inactive_file {40 * MIB}",
        "memory/memory.limit_in_bytes": 2**63 - 4096,
        "memory/memory.usage_in_bytes": 95 * MIB,
    }
    groups = "5:cpu,cpuacct:/job\n4:memory:/job\n1:name=systemd:/x\n"
    assert available_bytes(machine(tmp_path, 700 * MIB, groups, files)) == expected * MIB


def test_a_group_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    files = {"memory.max": 10 * MIB, "memory.current": 12 * MIB}
    assert available_bytes(machine(tmp_path, 700 * MIB, "0::/\n", files)) == 0


def test_this_machine_has_memory() -> None:
    assert available_bytes() > MIB


ATTENTION = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8, scale=1.0, rope=None)
SPEC = DecoderSpec("T", 100, 32, (LayerSpec(ATTENTION, DenseFFNSpec(64, "silu")),) * 3, 1e-5, 512, True)
TOKEN_BYTES = 3 * 2 * 2 * 8 * 4
"""In fp32."""


def blocks(available: int, seqs: int = 4, length: int = 100, dtype: Any = "float32", **cache: Any) -> int:
    model = ModelConfig(model="m", path="", max_model_len=length, dtype=dtype)
    config = VllmConfig(model, CacheConfig(**cache), SchedulerConfig(max_num_seqs=seqs))
    return kv_cache_blocks(config, SPEC, available)


def test_enough_for_all_sequences_at_full_length() -> None:
    assert blocks(10**9) == 4 * 7  # 100 tokens are 7 blocks of 16
    assert blocks(10**9, block_size=32) == 4 * 4


@pytest.mark.parametrize(
    ("cache", "bytes_used"),
    [
        ({}, 0.4 * 100_000),
        ({"memory_fraction": 0.9}, 0.9 * 100_000),
        ({"memory_bytes": 50_000}, 50_000),
        ({"memory_bytes": 10**9}, 100_000),
        ({"memory_bytes": 50_000, "memory_fraction": 0.2}, 20_000),
    ],
)
def test_bounded_by_memory(cache: dict[str, Any], bytes_used: float) -> None:
    assert blocks(100_000, 100, **cache) == int(bytes_used) // (16 * TOKEN_BYTES)
    assert blocks(100_000, 100, dtype="bfloat16", **cache) == int(bytes_used) // (16 * TOKEN_BYTES // 2)


def test_a_fixed_number_needs_no_memory() -> None:
    assert blocks(0, num_blocks=5) == 5
    with pytest.raises(ConfigError, match="num_blocks"):
        blocks(0, num_blocks=0)


def test_not_one_block_is_an_error_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"6,144 bytes.*gpu_memory_utilization"):
        blocks(10_000)


def test_a_cache_below_the_context_is_said(log: pytest.LogCaptureFixture) -> None:
    assert blocks(100_000, length=1000) == 6
    assert "holds 96 tokens" in log.text
    assert "max_model_len=1000" in log.text
