"""The engine core: scheduler and executor, joined by `step`. No strings, no text, no transport.

Whoever owns a core (a client in the same thread, a loop in a thread or process of its own) calls it from one thread.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from vllm.config import VllmConfig
from vllm.exceptions import ConfigError, EngineError, UnsupportedError
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.serial import CoreInfo
from vllm.v1.executor.abstract import Executor
from vllm.v1.messages import EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.structured_output.manager import GrammarManager

GRAMMAR_WAIT = 0.002
"""Seconds a step waits for a grammar when there is nothing else to do; then messages get their turn."""


class EngineCore:
    """Requests in, columns out.

    Args:
        config: everything.
        executor: runs the steps; None makes the one that the config names.
    """

    def __init__(self, config: VllmConfig, executor: Executor | None = None) -> None:
        self.config = config
        self.executor = make_executor(config) if executor is None else executor
        self.scheduler = Scheduler(config, self.executor.num_blocks)
        self.executor.is_busy = self._is_busy
        self._weights_version = self.executor.weights_version
        self._grammars: GrammarManager | None = None
        """From the first request with a constraint on."""

    # ---- requests

    def add_request(self, request: EngineCoreRequest) -> None:
        """All children or none. Raises BadRequestError for what can never run, EngineError while asleep."""
        if self.executor.is_sleeping:
            raise EngineError("the engine is asleep: call wake_up() first")
        if self.executor.weights_version != self._weights_version:  # changes only while idle
            self._weights_version = self.executor.weights_version
            self.scheduler.set_weights_version(self._weights_version)
        self.scheduler.add_request(request, self._grammar_is_ready(request))

    def _grammar_is_ready(self, request: EngineCoreRequest) -> bool:
        """False while the request's constraint is being compiled: the prompt can be computed, nothing be drawn."""
        if request.params.constraint is None:
            return True
        if self.executor.grammars is None:
            raise UnsupportedError("structured_outputs: this executor takes no constraints")
        self._grammars = self.executor.grammars
        return self._grammars.begin(request.handles, request.params)

    def abort(self, handles: Sequence[int]) -> None:
        """End children; the next outputs carry their last tokens. Unknown handles are passed over."""
        self.scheduler.abort(handles)

    def stop_children(self, handles: Sequence[int]) -> None:
        """The front end found a stop string: end children without an answer."""
        self.scheduler.stop_children(handles)

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do or to tell."""
        return self.scheduler.has_unfinished()

    def step(self) -> EngineCoreOutputs | None:
        """Schedule, execute, update. None when there is nothing to tell."""
        self._take_grammars(0.0)
        step = self.scheduler.schedule()
        if step.is_empty:
            self._take_grammars(GRAMMAR_WAIT)  # perhaps everybody waits for one
            return self.scheduler.take_outputs()
        return self.scheduler.update(step, self.executor.execute(step))

    def _take_grammars(self, seconds: float) -> None:
        """Let those draw whose grammars are ready; wait that long for one."""
        if self._grammars is not None:
            self.scheduler.set_ready(self._grammars.take_ready(seconds))

    def _is_busy(self) -> bool:
        """Whether any child lives: weights must not change, and memory must not be given back."""
        stats = self.scheduler.stats()
        return stats.num_running + stats.num_waiting > 0

    # ---- everything else; what a front end may call by name

    def info(self) -> CoreInfo:
        return CoreInfo(os.getpid(), self.executor.num_blocks, self.scheduler.max_prompt_len)

    def stats(self) -> dict[str, Any]:
        """State and totals now, as `SchedulerStats` has them."""
        return msgspec.structs.asdict(self.scheduler.stats())

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> set[str]:
        """Replace weights by (Hugging Face name, array or tensor) pairs; EngineError while requests are unfinished."""
        return self.executor.load_weights(weights)

    def reset_prefix_cache(self) -> bool:
        """Forget cached prompts. False while blocks are in use."""
        return self.scheduler.reset_prefix_cache()

    def check_integrity(self) -> None:
        """Raise IntegrityError with the numbers if a table contradicts another."""
        self.scheduler.check_integrity()

    def sleep(self, level: int = 1) -> None:
        """Give memory back: 1 the KV cache, 2 the weights too. Raises EngineError while requests are unfinished."""
        if not self.config.model.enable_sleep_mode:
            raise ConfigError("sleep() needs an engine with enable_sleep_mode=True", "enable_sleep_mode")
        self.executor.sleep(level)
        self.scheduler.reset_prefix_cache()

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Take the memory again; `tags` (weights, kv_cache) for a part of it."""
        self.executor.wake_up(tags)

    def is_sleeping(self) -> bool:
        return self.executor.is_sleeping

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a worker's method by name, or a function of the worker, on every worker."""
        return self.executor.collective_rpc(method, timeout, tuple(args), kwargs)

    def shutdown(self) -> None:
        self.executor.shutdown()


CALLABLE_BY_NAME = frozenset(
    ("check_integrity", "collective_rpc", "info", "is_sleeping", "reset_prefix_cache", "sleep", "stats", "wake_up")
)
"""Methods that a `Call` message may name."""


def make_executor(config: VllmConfig) -> Executor:
    """The executor that `distributed_executor_backend` names: "uni", or an import path "module:Class"."""
    name = config.parallel.distributed_executor_backend
    if name == "uni":
        from vllm.v1.executor.uniproc import UniProcExecutor

        return UniProcExecutor(config)
    module, separator, attribute = name.partition(":")
    if not separator:
        raise UnsupportedError(f"distributed_executor_backend={name!r} is not built here")
    executor: Executor = getattr(importlib.import_module(module), attribute)(config)
    return executor


def refusal(handles: Sequence[int], message: str) -> EngineCoreOutputs:
    """The answer to a request that the core could not take."""
    count = len(handles)
    return EngineCoreOutputs(
        handles=np.array(handles, np.int64),
        offsets=np.zeros(count + 1, np.int32),
        token_ids=np.empty(0, np.int32),
        finish_reasons=np.full(count, FinishReason.ERROR, np.uint8),
        stop_reasons=np.full(count, -1, np.int64),
        num_cached_tokens=np.zeros(count, np.int32),
        errors=dict.fromkeys(handles, message),
    )
