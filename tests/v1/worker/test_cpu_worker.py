"""The worker and the one-process executor, on a fake backend and a checkpoint of invented weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.v1.worker.runner_fakes import Child, Driver, FakeBackend
from vllm.config import CacheConfig, DeviceConfig, LoRAConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
from vllm.exceptions import ConfigError, EngineError, ModelLoadError, UnsupportedError, WeightError
from vllm.sampling_params import SamplingParams
from vllm.v1.executor.uniproc import UniProcExecutor
from vllm.v1.worker.cpu_worker import CPUWorker

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 67,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "eos_token_id": [2, 3],
}
GEMMA = {
    **LLAMA,
    "architectures": ["Gemma3ForCausalLM"],
    "head_dim": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 8,
    "query_pre_attn_scalar": 4,
}


class Made(list[FakeBackend]):
    """The backends made, in order."""


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    backends = Made()

    def create_backend(name: str, spec: Any, dtype: str, device: DeviceConfig, quantization: str | None) -> FakeBackend:
        assert (name, dtype, quantization) == ("auto", "float32", None)
        backends.append(FakeBackend(spec.vocab_size))
        return backends[-1]

    monkeypatch.setattr("vllm.model_executor.backends.create_backend", create_backend)
    return backends


def config_of(folder: Path, values: dict[str, Any] | None = None, **model: Any) -> VllmConfig:
    (folder / "config.json").write_text(json.dumps(values or LLAMA))
    return VllmConfig(
        ModelConfig("m", str(folder), max_model_len=64, dtype="float32", load_format="dummy", **model),
        CacheConfig(block_size=4, num_blocks=64),
        SchedulerConfig(max_num_seqs=4),
    )


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


# Weights


def test_load_weights_by_hugging_face_names(made: Made, tmp_path: Path) -> None:
    executor = UniProcExecutor(config_of(tmp_path))
    version = executor.weights_version
    q = np.random.default_rng(0).standard_normal((16, 16)).astype(np.float16)
    embed = np.ones((67, 16), np.float64)
    taken = executor.driver_worker.model_runner.model.load_weights(  # the path that trl takes
        [("model.layers.1.self_attn.q_proj.weight", q), ("model.embed_tokens.weight", embed), ("lm_head.weight", embed)]
    )
    assert taken == {"model.layers.1.self_attn.q_proj.weight", "model.embed_tokens.weight"}
    np.testing.assert_array_equal(made[0].weights["layers.1.q"], q.astype(np.float32))
    assert made[0].weights["embed"].dtype == np.float32
    assert executor.weights_version > version
    assert executor.load_weights(iter([])) == set()


def test_gemmas_norms_get_their_one(made: Made, tmp_path: Path) -> None:
    executor = UniProcExecutor(config_of(tmp_path, GEMMA))
    executor.load_weights([("model.norm.weight", np.full(16, 0.5, np.float32))])
    np.testing.assert_array_equal(made[0].weights["final_norm"], np.full(16, 1.5, np.float32))


@pytest.mark.parametrize(
    ("pair", "text"),
    [
        (("model.layers.9.mlp.up_proj.weight", np.zeros((24, 16), np.float32)), "layers.9"),
        (("model.norm.weight", np.zeros(17, np.float32)), r"\(17,\).*\(16,\)"),
        (("model.norm.weight", np.zeros(16, np.int32)), "int32"),
    ],
)
def test_a_wrong_weight_is_named(made: Made, tmp_path: Path, pair: tuple[str, Any], text: str) -> None:
    executor = UniProcExecutor(config_of(tmp_path))
    version = executor.weights_version
    with pytest.raises(WeightError, match=text):
        executor.load_weights([pair])
    assert executor.weights_version > version


def test_weights_are_not_replaced_while_requests_run(made: Made, tmp_path: Path) -> None:
    executor = UniProcExecutor(config_of(tmp_path))
    executor.is_busy = lambda: True
    version = executor.weights_version
    pair = ("model.norm.weight", np.ones(16, np.float32))
    for load in (executor.load_weights, executor.driver_worker.model.load_weights):
        with pytest.raises(EngineError, match="unfinished"):
            load([pair])
    with pytest.raises(EngineError, match="unfinished"):
        executor.sleep()
    assert executor.weights_version == version
    executor.is_busy = lambda: False
    assert executor.load_weights([pair]) == {"model.norm.weight"}


# Sleep


def test_sleep_level_1_drops_the_cache(made: Made, tmp_path: Path) -> None:
    executor = UniProcExecutor(config_of(tmp_path))
    executor.sleep(1)
    assert executor.is_sleeping
    assert made[0].cache is None
    assert not made[0].closed
    with pytest.raises(EngineError, match="asleep"):
        executor.execute(None)  # type: ignore[arg-type]
    executor.sleep(1)
    executor.wake_up()
    assert not executor.is_sleeping
    assert made[0].cache is not None
    executor.wake_up()
    assert len(made) == 1


def test_sleep_level_2_drops_the_weights_and_wakes_by_parts(made: Made, tmp_path: Path) -> None:
    executor = UniProcExecutor(config_of(tmp_path))
    version = executor.weights_version
    executor.sleep(2)
    assert made[0].closed
    pair = ("model.norm.weight", np.full(16, 3.0, np.float32))
    with pytest.raises(EngineError, match="sleep"):
        executor.load_weights([pair])
    with pytest.raises(ConfigError, match="before the weights"):
        executor.wake_up(["kv_cache"])
    executor.wake_up(["weights"])
    assert executor.is_sleeping
    assert executor.weights_version > version
    executor.load_weights([pair])
    executor.wake_up(["kv_cache"])
    assert not executor.is_sleeping
    assert len(made) == 2
    assert executor.driver_worker.model_runner.backend is made[1]
    assert made[1].weights["final_norm"][0] == 3.0
    assert set(made[1].weights) == set(executor.driver_worker.model.spec.parameters())
    child = Child(1, SamplingParams(max_tokens=3), 5, np.array([1, 2], np.int32), 3)
    assert len(Driver(executor.driver_worker.model_runner, num_blocks=64).run(child)) == 3


def test_sleep_deepens(made: Made, tmp_path: Path) -> None:
    executor = UniProcExecutor(config_of(tmp_path))
    executor.sleep(1)
    executor.sleep(2)
    assert made[0].closed
    executor.wake_up()
    assert not executor.is_sleeping


@pytest.mark.parametrize("level", [0, 3])
def test_unknown_levels_and_tags(made: Made, tmp_path: Path, level: int) -> None:
    executor = UniProcExecutor(config_of(tmp_path))
    with pytest.raises(ConfigError, match="level"):
        executor.sleep(level)
    with pytest.raises(ConfigError, match="lunch"):
        executor.wake_up(["lunch"])


# Calls


def test_collective_rpc(made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    executor = UniProcExecutor(config_of(tmp_path))
    assert executor.collective_rpc("apply_model", args=(lambda model: model.spec.vocab_size,)) == [67]
    assert executor.collective_rpc(lambda worker, a, b: (worker.num_blocks, a, b), None, (1,), {"b": 2}) == [(64, 1, 2)]
    assert executor.collective_rpc("load_weights", kwargs={"weights": []}) == [set()]
    for name in ("nothing", "_load", "num_blocks"):
        with pytest.raises(ConfigError, match=name):
            executor.collective_rpc(name)
    with pytest.raises(ZeroDivisionError):
        executor.collective_rpc(lambda worker: 1 / 0)
    assert executor.collective_rpc("apply_model", timeout=1.0, args=(lambda model: 1,)) == [1]


def test_shutdown_twice(made: Made, tmp_path: Path) -> None:
    executor = UniProcExecutor(config_of(tmp_path))
    executor.shutdown()
    executor.shutdown()
    assert made[0].closed
