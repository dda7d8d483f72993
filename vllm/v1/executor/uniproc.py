"""One worker in the core's own process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from vllm.config import VllmConfig
from vllm.exceptions import ConfigError
from vllm.logger import init_logger, warn_once
from vllm.v1.executor.abstract import Executor
from vllm.v1.step import RunnerOutput, SchedulerOutput
from vllm.v1.structured_output.manager import GrammarManager
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.cuda_worker import CUDAWorker

logger = init_logger(__name__)

WORKERS: dict[str, type[CPUWorker]] = {"cpu": CPUWorker, "cuda": CUDAWorker}


class UniProcExecutor(Executor):
    """`driver_worker` is the worker, by the name that clients use."""

    def __init__(self, config: VllmConfig) -> None:
        super().__init__(config)
        self.driver_worker = WORKERS[config.device.device](config)

    @property
    def num_blocks(self) -> int:
        return self.driver_worker.num_blocks

    @property
    def weights_version(self) -> int:
        return self.driver_worker.model.version

    @property
    def is_sleeping(self) -> bool:
        return self.driver_worker.is_sleeping

    @property
    def grammars(self) -> GrammarManager | None:
        return self.driver_worker.grammars

    @property
    def is_busy(self) -> Callable[[], bool]:
        return self.driver_worker.model.is_busy

    @is_busy.setter
    def is_busy(self, value: Callable[[], bool]) -> None:
        self.driver_worker.model.is_busy = value

    def execute(self, step: SchedulerOutput) -> RunnerOutput:
        return self.driver_worker.execute(step)

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> set[str]:
        return self.driver_worker.load_weights(weights)

    def sleep(self, level: int = 1) -> None:
        self.driver_worker.sleep(level)

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        self.driver_worker.wake_up(tags)

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        if timeout is not None:
            warn_once(logger, "collective_rpc: a call in the same process cannot be cut short; timeout has no effect")
        if callable(method):
            return [method(self.driver_worker, *args, **(kwargs or {}))]
        call = None if method.startswith("_") else getattr(self.driver_worker, method, None)
        if not callable(call):
            raise ConfigError(f"collective_rpc: {type(self.driver_worker).__name__} has no method {method!r}", "method")
        return [call(*args, **(kwargs or {}))]

    def shutdown(self) -> None:
        self.driver_worker.shutdown()
