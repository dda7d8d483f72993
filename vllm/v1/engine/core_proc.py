"""A core that runs by itself: the loop around it, and the process that the loop may stand in.

The loop takes messages from an inbox and hands messages to an outbox; whether those are queues of another thread or
sockets of another process it does not know. It blocks when the core has nothing to do.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

from vllm.config import VllmConfig
from vllm.exceptions import EngineError
from vllm.logger import init_logger
from vllm.v1.engine.core import CALLABLE_BY_NAME, EngineCore, refusal
from vllm.v1.engine.serial import (
    Abort,
    Add,
    Call,
    Decoder,
    Encoder,
    Failed,
    FromCore,
    Hello,
    Outputs,
    Ready,
    Result,
    Shutdown,
    StopChildren,
    ToCore,
    describe_error,
    load_config,
)

logger = init_logger(__name__)


class Inbox(Protocol):
    def receive(self, block: bool) -> list[ToCore]:
        """What has come; with `block` at least one message. [Shutdown()] when the other side is gone."""


class CoreLoop:
    """Takes messages between steps, and steps while there is work."""

    def __init__(self, core: EngineCore, inbox: Inbox, send: Callable[[FromCore], None]) -> None:
        self._core = core
        self._inbox = inbox
        self._send = send

    def run(self) -> None:
        """Until `Shutdown`. An exception of a step is the end of the core: it goes out as `Failed`, and is raised."""
        core = self._core
        try:
            while True:
                for message in self._inbox.receive(block=not core.has_work):
                    if isinstance(message, Shutdown):
                        return
                    self._handle(message)
                if core.has_work:
                    outputs = core.step()
                    if outputs is not None:
                        self._send(Outputs(outputs))
        except Exception as error:
            logger.exception("the engine core failed")
            self._send(Failed(describe_error(error)))
            raise

    def _handle(self, message: ToCore) -> None:
        if isinstance(message, Add):
            for request in message.requests:
                try:
                    self._core.add_request(request)
                except Exception as error:  # noqa: BLE001 - the request is answered, and the core goes on
                    self._send(Outputs(refusal(request.handles, str(error))))
        elif isinstance(message, Abort):
            self._core.abort(message.handles)
        elif isinstance(message, StopChildren):
            self._core.stop_children(message.handles)
        elif isinstance(message, Call):
            self._send(self._call(message))

    def _call(self, message: Call) -> Result:
        try:
            if message.method not in CALLABLE_BY_NAME:
                raise EngineError(f"the engine core has no method {message.method!r} to be called by name")
            value = getattr(self._core, message.method)(*message.args, **message.kwargs)
        except Exception as error:  # noqa: BLE001 - raised where the call was made
            return Result(message.call_id, error=describe_error(error))
        return Result(message.call_id, value)


class QueueInbox:
    """Messages from other threads of this process."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[ToCore] = queue.SimpleQueue()

    def put(self, message: ToCore) -> None:
        self._queue.put(message)

    def receive(self, block: bool) -> list[ToCore]:
        messages = [self._queue.get()] if block else []
        with contextlib.suppress(queue.Empty):
            while True:
                messages.append(self._queue.get_nowait())
        return messages


class SocketInbox:
    """Messages from another process; its death is a `Shutdown`.

    Args:
        socket: a zmq PULL socket.
        lifeline: file descriptor that becomes readable when the other process has gone.
    """

    def __init__(self, socket: Any, lifeline: int) -> None:
        import zmq

        self._socket = socket
        self._lifeline = lifeline
        self._decoder: Decoder[ToCore] = Decoder(ToCore)
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(lifeline, zmq.POLLIN)
        self._again = zmq.Again
        self._no_block = zmq.NOBLOCK

    def receive(self, block: bool) -> list[ToCore]:
        if not block:
            messages = self._drain()
            return [Shutdown()] if not messages and self._is_orphan() else messages
        while True:
            ready = dict(self._poller.poll())
            messages = self._drain()
            if messages:
                return messages
            if self._lifeline in ready:
                return [Shutdown()]

    def _drain(self) -> list[ToCore]:
        messages: list[ToCore] = []
        with contextlib.suppress(self._again):
            while True:
                messages.append(self._decoder.decode(self._socket.recv(self._no_block)))
        return messages

    def _is_orphan(self) -> bool:
        return bool(select.select([self._lifeline], [], [], 0)[0])


def run_process(inbox_address: str, outbox_address: str, lifeline: int) -> None:
    """A core's process, from its start to its end: take `Hello`, answer `Ready` or `Failed`, run the loop.

    Exit codes: 0 asked to end (or orphaned), 1 it failed.
    """
    import zmq

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the front end, which aborts and goes on
    signal.signal(signal.SIGTERM, _exit_quietly)
    context = zmq.Context()
    source, target = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    for socket in (source, target):
        socket.set_hwm(0)
    source.bind(inbox_address)
    target.connect(outbox_address)
    encoder = Encoder()

    def send(message: FromCore) -> None:
        target.send(encoder.encode(message))

    code = 0
    core: EngineCore | None = None
    try:
        inbox = SocketInbox(source, lifeline)
        hello = inbox.receive(block=True)
        if isinstance(hello[0], Hello):
            core = _start(hello[0], send)
            CoreLoop(core, inbox, send).run()
    except Exception:  # noqa: BLE001 - it has been logged and sent
        code = 1
    finally:
        if core is not None:
            core.shutdown()
        source.close(linger=0)
        target.close(linger=2000 if code else 0)
        context.term()
    sys.exit(code)


def _start(hello: Hello, send: Callable[[FromCore], None]) -> EngineCore:
    try:
        core = EngineCore(load_config(VllmConfig, hello.config))
        send(Ready(core.info()))
    except Exception as error:
        logger.debug("the engine core did not come up", exc_info=True)
        send(Failed(describe_error(error)))
        raise
    return core


def _exit_quietly(*_: object) -> NoReturn:
    raise SystemExit(0)


def main(inbox_address: str, outbox_address: str, lifeline: str) -> None:
    """Entry point of the process that `mp_client` starts."""
    os.set_inheritable(int(lifeline), False)
    run_process(inbox_address, outbox_address, int(lifeline))
