"""The GPU's worker as far as no GPU is needed: its refusal, its budget, and the step that it is profiled with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.v1.worker.runner_fakes import FakeBackend
from tests.v1.worker.worker_fakes import Made, config_of
from vllm.config import CacheConfig, DeviceConfig
from vllm.exceptions import ConfigError, UnsupportedError
from vllm.v1.executor.uniproc import WORKERS
from vllm.v1.worker import cuda_worker
from vllm.v1.worker.cuda_worker import CUDAWorker, cache_budget, largest_step


def test_without_a_card_it_is_refused_by_name(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_worker, "_no_card", lambda: "torch finds no CUDA device here")
    with pytest.raises(UnsupportedError, match="device='cuda': torch finds no CUDA device"):
        WORKERS["cuda"](replace(config_of(tmp_path), device=DeviceConfig(device="cuda")))
    assert not made


def test_with_a_card_it_is_the_same_worker(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_worker, "_no_card", lambda: None)
    worker = CUDAWorker(replace(config_of(tmp_path), device=DeviceConfig(device="cuda")))
    assert worker.num_blocks == 64
    with pytest.raises(UnsupportedError, match="device='cpu': this worker runs on 'cuda'"):
        CUDAWorker(config_of(tmp_path))


def test_the_budget_is_a_share_of_the_card() -> None:
    assert cache_budget(None, 1000, 300) == 600
    assert cache_budget(0.5, 1000, 300) == 200
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization=0.3 of 1,000 bytes is less than the 300"):
        cache_budget(0.3, 1000, 300)


def test_the_profile_is_the_largest_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = FakeBackend(67)
    seen = []
    forward, sample = backend.forward, backend.sample
    monkeypatch.setattr(backend, "forward", lambda batch: (seen.append(batch), forward(batch))[1])
    monkeypatch.setattr(backend, "sample", lambda hidden, batch: (seen.append(batch), sample(hidden, batch))[1])
    config = replace(config_of(tmp_path), cache=CacheConfig(block_size=4))
    largest_step(backend, config)
    step, draws = seen
    assert len(step.token_ids) == config.model.max_model_len
    assert step.block_tables.shape == (1, 16)
    assert draws.size == config.scheduler.max_num_seqs
    np.testing.assert_array_equal(np.unique(step.block_tables), np.arange(16))
    assert backend.cache is None
