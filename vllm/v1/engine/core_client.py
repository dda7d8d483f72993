"""The front end's end of the core: one interface for a core in the same thread, in another thread, or in a process.

    InprocClient       the caller's thread runs the steps (LLM, LLMEngine)
    SyncMPClient       a process of its own; `get_outputs` waits for the next message
    and in `async_client`
    AsyncMPClient      a process of its own; outputs are handed to a callback in an event loop
    AsyncThreadClient  a thread of this process; the same callbacks

A core that has died raises EngineDeadError from every method of its client, for ever. An in-process engine imports
neither asyncio nor zmq: they would be a tenth of its start.
"""

from __future__ import annotations

import itertools
from collections import deque
from typing import Any, Protocol

from vllm.config import VllmConfig
from vllm.exceptions import EngineDeadError, UnsupportedError
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.serial import (
    Abort,
    Add,
    Call,
    CoreInfo,
    Failed,
    FromCore,
    Outputs,
    Result,
    StopChildren,
    ToCore,
    revive_error,
)
from vllm.v1.executor.abstract import Executor
from vllm.v1.messages import EngineCoreOutputs, EngineCoreRequest


class EngineCoreClient(Protocol):
    """What every client offers."""

    info: CoreInfo
    in_process: bool
    """Whether callables can reach the core."""

    def add_requests(self, requests: list[EngineCoreRequest]) -> None:
        """In one message. In process a refusal is raised, and those after it are not added; else it is an answer."""

    def abort(self, handles: list[int]) -> None: ...
    def stop_children(self, handles: list[int]) -> None: ...
    def shutdown(self) -> None: ...

    @property
    def error(self) -> EngineDeadError | None:
        """Why the core is dead; None while it lives."""


class SyncClient(EngineCoreClient, Protocol):
    """For callers that wait."""

    def get_outputs(self) -> EngineCoreOutputs | None:
        """The next message. In process this runs a step, and None means that it had nothing to tell."""

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the core by name, and wait for its result."""

    @property
    def executor(self) -> Executor:
        """In process only; else UnsupportedError."""


class InprocClient:
    """The core in the caller's thread."""

    in_process = True

    def __init__(self, config: VllmConfig, executor: Executor | None = None) -> None:
        self._core: EngineCore | None = EngineCore(config, executor)
        self.info = self._core.info()
        self.error: EngineDeadError | None = None

    @property
    def core(self) -> EngineCore:
        if self.error is not None:
            raise self.error
        if self._core is None:
            raise EngineDeadError("the engine was shut down")
        return self._core

    @property
    def executor(self) -> Executor:
        return self.core.executor

    def add_requests(self, requests: list[EngineCoreRequest]) -> None:
        for request in requests:
            self.core.add_request(request)

    def abort(self, handles: list[int]) -> None:
        self.core.abort(handles)

    def stop_children(self, handles: list[int]) -> None:
        self.core.stop_children(handles)

    def get_outputs(self) -> EngineCoreOutputs | None:
        core = self.core
        if not core.has_work:
            self.error = EngineDeadError("the engine core lost a request: it has no work, but answers are awaited")
            raise self.error
        try:
            return core.step()
        except BaseException as error:  # a step that was cut short leaves tables that cannot be trusted
            self.error = EngineDeadError(f"the engine core failed: {type(error).__name__}: {error}")
            if isinstance(error, Exception):
                raise self.error from error
            raise

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.core, method)(*args, **kwargs)

    def shutdown(self) -> None:
        core, self._core = self._core, None
        if core is not None:
            core.shutdown()


class SyncMPClient:
    """The core in a process of its own, for a caller that waits."""

    in_process = False

    def __init__(self, config: VllmConfig) -> None:
        from vllm.v1.engine.mp_process import CoreProcess

        self._process = CoreProcess(config)
        self.info = self._process.info
        self._waiting: deque[EngineCoreOutputs] = deque()
        self._call_ids = itertools.count()
        self.error: EngineDeadError | None = None

    @property
    def executor(self) -> Executor:
        raise UnsupportedError("model_executor needs the in-process core (VLLM_ENABLE_V1_MULTIPROCESSING=0)")

    def _send(self, message: ToCore) -> None:
        if self.error is not None:
            raise self.error
        self._process.send(message)

    def add_requests(self, requests: list[EngineCoreRequest]) -> None:
        self._send(Add(requests))

    def abort(self, handles: list[int]) -> None:
        self._send(Abort(handles))

    def stop_children(self, handles: list[int]) -> None:
        self._send(StopChildren(handles))

    def get_outputs(self) -> EngineCoreOutputs | None:
        if self._waiting:
            return self._waiting.popleft()
        message = self._receive()
        return message.outputs if isinstance(message, Outputs) else None

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        call_id = next(self._call_ids)
        self._send(Call(call_id, method, list(args), kwargs))
        while True:
            message = self._receive()
            if isinstance(message, Outputs):
                self._waiting.append(message.outputs)
            elif isinstance(message, Result) and message.call_id == call_id:
                if message.error is not None:
                    raise revive_error(message.error)
                return message.value

    def _receive(self) -> FromCore:
        if self.error is not None:
            raise self.error
        message = self._process.receive()
        if isinstance(message, Failed):
            self.error = EngineDeadError("the engine core failed: {}: {}".format(*message.error))
            self._process.shutdown()
            raise self.error
        return message

    def shutdown(self) -> None:
        if self.error is None:
            self.error = EngineDeadError("the engine was shut down")
        self._process.shutdown()


def make_sync_client(
    config: VllmConfig, multiprocessing: bool | None = None, executor: Executor | None = None
) -> SyncClient:
    """A core for a caller that waits: in a process of its own if so told, or if the configuration says so."""
    if multiprocessing is None:
        multiprocessing = config.multiprocessing and executor is None
    if multiprocessing:
        if executor is not None:
            raise UnsupportedError("an executor object cannot be given to a core in its own process: name its class")
        return SyncMPClient(config)
    return InprocClient(config, executor)
