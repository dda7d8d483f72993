"""The front end's end of the core for an event loop: see `core_client`."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from vllm.config import VllmConfig
from vllm.exceptions import EngineDeadError, UnsupportedError
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.engine.core_proc import CoreLoop, QueueInbox
from vllm.v1.engine.mp_process import CoreProcess
from vllm.v1.engine.serial import (
    Abort,
    Add,
    Call,
    Failed,
    FromCore,
    Outputs,
    Result,
    Shutdown,
    StopChildren,
    ToCore,
    revive_error,
)
from vllm.v1.executor.abstract import Executor
from vllm.v1.messages import EngineCoreOutputs, EngineCoreRequest


class AsyncClient(EngineCoreClient, Protocol):
    """For an event loop. `on_outputs` and `on_death` are called in the loop given to `attach`."""

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Deliver in this loop from now on; the loop before it must have been closed."""

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the core by name."""


class _AsyncBase:
    """Calls and their results, and what a dead core means, for both asynchronous clients."""

    def __init__(
        self, on_outputs: Callable[[EngineCoreOutputs], None], on_death: Callable[[EngineDeadError], None]
    ) -> None:
        self._on_outputs = on_outputs
        self._on_death = on_death
        self._call_ids = itertools.count()
        self._results: dict[int, asyncio.Future[Any]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self.error: EngineDeadError | None = None

    def _send(self, message: ToCore) -> None:
        if self.error is not None:
            raise self.error
        self._transmit(message)

    def _transmit(self, message: ToCore) -> None:
        raise NotImplementedError

    def add_requests(self, requests: list[EngineCoreRequest]) -> None:
        self._send(Add(requests))

    def abort(self, handles: list[int]) -> None:
        self._send(Abort(handles))

    def stop_children(self, handles: list[int]) -> None:
        self._send(StopChildren(handles))

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        call_id = next(self._call_ids)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._results[call_id] = future
        try:
            self._send(Call(call_id, method, list(args), kwargs))
            return await future
        finally:
            self._results.pop(call_id, None)

    def _take(self, message: FromCore) -> None:
        """In the loop."""
        if isinstance(message, Outputs):
            self._on_outputs(message.outputs)
        elif isinstance(message, Result):
            future = self._results.get(message.call_id)
            if future is not None and not future.done():
                if message.error is None:
                    future.set_result(message.value)
                else:
                    future.set_exception(revive_error(message.error))
        elif isinstance(message, Failed):
            self._die(EngineDeadError("the engine core failed: {}: {}".format(*message.error)))

    def _die(self, error: EngineDeadError) -> None:
        if self.error is not None:
            return
        self.error = error
        for future in self._results.values():
            if not future.done():
                future.set_exception(error)
        self._on_death(error)

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        if loop is self._loop:
            return
        if self._loop is not None and not self._loop.is_closed() and self._loop.is_running():
            raise RuntimeError("this engine serves another event loop that is still running")
        self._detach()
        self._loop = loop
        self._attached(loop)

    def _attached(self, loop: asyncio.AbstractEventLoop) -> None:
        """A new loop: register with it."""

    def _detach(self) -> None:
        """Unregister from the loop there was."""


class AsyncMPClient(_AsyncBase):
    """The core in a process of its own, for an event loop."""

    in_process = False

    def __init__(
        self,
        config: VllmConfig,
        on_outputs: Callable[[EngineCoreOutputs], None],
        on_death: Callable[[EngineDeadError], None],
    ) -> None:
        super().__init__(on_outputs, on_death)
        self._process = CoreProcess(config)
        self._watched = False
        """The loop watches the process's descriptors, which are gone after its shutdown."""
        self.info = self._process.info

    def _transmit(self, message: ToCore) -> None:
        self._process.send(message)

    def _attached(self, loop: asyncio.AbstractEventLoop) -> None:
        self._watched = True
        loop.add_reader(self._process.readable_fd, self._readable)
        loop.add_reader(self._process.lifeline, self._lost)
        loop.call_soon(self._readable)  # the descriptor tells of changes only: look once at what is there

    def _detach(self) -> None:
        loop, self._loop = self._loop, None
        watched, self._watched = self._watched, False
        if watched and loop is not None and not loop.is_closed():
            loop.remove_reader(self._process.readable_fd)
            loop.remove_reader(self._process.lifeline)

    def _readable(self) -> None:
        if self.error is not None:
            return
        for _ in range(8):  # then let others have a turn
            message = self._process.receive_nowait()
            if message is None:
                return
            self._take(message)
            if self.error is not None:
                return
        if self._loop is not None:
            self._loop.call_soon(self._readable)

    def _lost(self) -> None:
        """The process has gone; what it said before is still to be read."""
        with contextlib.suppress(EngineDeadError):
            while self.error is None and (message := self._process.receive_nowait()) is not None:
                self._take(message)
        loop = self._loop
        self._detach()
        self._loop = loop
        self._die(self._process.death())
        self._process.shutdown()

    def shutdown(self) -> None:
        self._detach()
        self._die(EngineDeadError("the engine was shut down"))
        self._process.shutdown()


class AsyncThreadClient(_AsyncBase):
    """The core in a thread of this process, for an event loop."""

    in_process = True

    def __init__(
        self,
        config: VllmConfig,
        on_outputs: Callable[[EngineCoreOutputs], None],
        on_death: Callable[[EngineDeadError], None],
        executor: Executor | None = None,
    ) -> None:
        super().__init__(on_outputs, on_death)
        self._core = EngineCore(config, executor)
        self.info = self._core.info()
        self._inbox = QueueInbox()
        self._early: deque[FromCore] = deque()
        """Said while there was no loop to say it in."""
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="vllm-core", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        # A failure has been logged and sent to whoever waits.
        with contextlib.suppress(Exception):
            CoreLoop(self._core, self._inbox, self._deliver).run()

    def _deliver(self, message: FromCore) -> None:
        """In the core's thread."""
        with self._lock:
            if self._loop is not None and not self._loop.is_closed():
                with contextlib.suppress(RuntimeError):  # closed in between
                    self._loop.call_soon_threadsafe(self._take, message)
                    return
            self._early.append(message)

    def _transmit(self, message: ToCore) -> None:
        self._inbox.put(message)

    def _attached(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            while self._early:
                loop.call_soon(self._take, self._early.popleft())

    def shutdown(self) -> None:
        self._die(EngineDeadError("the engine was shut down"))
        self._inbox.put(Shutdown())
        self._thread.join()
        self._core.shutdown()


def make_async_client(
    config: VllmConfig,
    on_outputs: Callable[[EngineCoreOutputs], None],
    on_death: Callable[[EngineDeadError], None],
    multiprocessing: bool,
    executor: Executor | None = None,
) -> AsyncClient:
    """A core for an event loop."""
    if multiprocessing:
        if executor is not None:
            raise UnsupportedError("an executor object cannot be given to a core in its own process: name its class")
        return AsyncMPClient(config, on_outputs, on_death)
    return AsyncThreadClient(config, on_outputs, on_death, executor)
