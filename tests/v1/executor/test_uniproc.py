"""The one-process executor: weights, sleep, calls; on a fake backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.v1.worker.runner_fakes import Child, Driver
from tests.v1.worker.worker_fakes import GEMMA, Made, config_of
from vllm.exceptions import ConfigError, EngineError, WeightError
from vllm.sampling_params import SamplingParams
from vllm.v1.executor.uniproc import UniProcExecutor


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
