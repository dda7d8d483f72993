"""The worker, on a fake backend and a checkpoint of invented weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.v1.worker.runner_fakes import Child, Driver
from tests.v1.worker.worker_fakes import Made, config_of
from vllm.config import CacheConfig, DeviceConfig, LoRAConfig, ParallelConfig
from vllm.exceptions import ConfigError, ModelLoadError, UnsupportedError
from vllm.sampling_params import SamplingParams
from vllm.v1.executor.uniproc import UniProcExecutor
from vllm.v1.worker.cpu_worker import CPUWorker


def test_a_worker_loads_everything_and_runs(made: Made, tmp_path: Path) -> None:
    worker = CPUWorker(config_of(tmp_path))
    (backend,) = made
    assert set(backend.weights) == set(worker.model.spec.parameters())
    assert backend.cache is not None
    assert backend.cache.shape == (64, 4, 2)
    assert worker.num_blocks == 64
    assert worker.model_runner.batch.eos_token_ids == [2, 3]
    child = Child(1, SamplingParams(max_tokens=3), 5, np.array([1, 2], np.int32), 3)
    assert len(Driver(worker.model_runner, num_blocks=64).run(child)) == 3


def test_the_cache_is_sized_from_memory(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.v1.worker.cpu_worker.available_bytes", lambda: 100_000)
    config = replace(config_of(tmp_path), cache=CacheConfig(block_size=4))
    assert CPUWorker(config).num_blocks == min(64, 40_000 // (4 * 2 * 2 * 2 * 4 * 4))


def test_a_failure_after_the_weights_closes_the_backend(made: Made, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="num_blocks"):
        CPUWorker(replace(config_of(tmp_path), cache=CacheConfig(num_blocks=0)))
    assert made[0].closed


def test_a_missing_checkpoint_is_a_load_error(made: Made, tmp_path: Path) -> None:
    config = config_of(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ModelLoadError):
        CPUWorker(config)
    assert not made


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"parallel": ParallelConfig(tensor_parallel_size=2)}, "tensor_parallel_size=2"),
        ({"parallel": ParallelConfig(pipeline_parallel_size=2)}, "pipeline_parallel_size=2"),
        ({"parallel": ParallelConfig(data_parallel_size=3)}, "data_parallel_size=3"),
        ({"device": DeviceConfig(device="cuda")}, "cuda"),
        ({"cache": CacheConfig(kv_dtype="bfloat16")}, "kv_cache_dtype"),
        ({"lora": LoRAConfig(enable_lora=True)}, "enable_lora"),
    ],
)
def test_what_is_not_built_is_refused_by_name(made: Made, tmp_path: Path, change: dict[str, Any], text: str) -> None:
    with pytest.raises(UnsupportedError, match=text):
        UniProcExecutor(replace(config_of(tmp_path), **change))
    with pytest.raises(NotImplementedError):
        CPUWorker(replace(config_of(tmp_path), **change))
    assert not made
