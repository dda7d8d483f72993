"""The process a core runs in, as its parent sees it: start, messages, death, end.

The child is a fresh interpreter (no fork, no pickle, the parent's main module is not imported). Both sides talk over
two zmq sockets in a folder that only this user can enter; the folder is removed as soon as both are connected. A socket
pair is the lifeline: the kernel closes an end when its process ends, however it ends, and the other side sees it.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import socket as sockets
import subprocess
import sys
import tempfile
import time
import weakref

import zmq

from vllm import envs
from vllm.config import VllmConfig
from vllm.exceptions import EngineDeadError, EngineStartError
from vllm.v1.engine.serial import (
    CoreInfo,
    Decoder,
    Encoder,
    Failed,
    FromCore,
    Hello,
    Ready,
    Shutdown,
    ToCore,
    dump_config,
    revive_error,
)

SHUTDOWN_GRACE = 5.0
"""Seconds a process gets to end by itself."""

_LIFELINES: weakref.WeakSet[sockets.socket] = weakref.WeakSet()
"""This process's ends. A process that it makes by a bare fork must not hold them open."""


def _close_lifelines() -> None:
    for lifeline in list(_LIFELINES):
        lifeline.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_lifelines)

_START = (
    "import sys; sys.path[:] = {path!r}; from vllm.v1.engine.core_proc import main; "
    "main({inbox!r}, {outbox!r}, {lifeline!r})"
)


class CoreProcess:
    """A running core in a child process. Raises from the constructor what the child raised while starting."""

    info: CoreInfo

    def __init__(self, config: VllmConfig) -> None:
        self._encoder = Encoder()
        self._decoder: Decoder[FromCore] = Decoder(FromCore)
        folder = tempfile.mkdtemp(prefix="vllm-")
        self._context = zmq.Context()
        self._to_core, self._from_core = self._context.socket(zmq.PUSH), self._context.socket(zmq.PULL)
        ours, theirs = sockets.socketpair()
        self._lifeline = ours
        _LIFELINES.add(ours)
        try:
            for socket in (self._to_core, self._from_core):
                socket.set_hwm(0)
                socket.setsockopt(zmq.LINGER, 0)
            # Whoever sends connects: what it sends waits in its queue, and `send` never blocks, also without a peer.
            self._to_core.setsockopt(zmq.RECONNECT_IVL, 10)
            self._to_core.connect(f"ipc://{folder}/to")
            self._from_core.bind(f"ipc://{folder}/from")
            with theirs:
                self._process = self._launch(folder, theirs.fileno())
        except BaseException:
            self._close_sockets()
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self._finalizer = weakref.finalize(self, _end_process, self._process, ours, self._context)
        try:
            self.send(Hello(dump_config(config)))
            self.info = self._await_ready()
        except BaseException:
            self.shutdown()
            raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    @staticmethod
    def _launch(folder: str, lifeline: int) -> subprocess.Popen[bytes]:
        code = _START.format(
            path=sys.path, inbox=f"ipc://{folder}/to", outbox=f"ipc://{folder}/from", lifeline=str(lifeline)
        )
        options = [f"-W{option}" for option in sys.warnoptions]
        return subprocess.Popen(
            [sys.executable, *options, "-c", code], pass_fds=(lifeline,), stdin=subprocess.DEVNULL, close_fds=True
        )

    def _await_ready(self) -> CoreInfo:
        limit = envs.VLLM_ENGINE_READY_TIMEOUT_S
        message = self._poll(time.monotonic() + limit)
        if message is None:
            raise EngineStartError(
                f"the engine core did not come up within {limit:g} s (VLLM_ENGINE_READY_TIMEOUT_S sets the limit)"
            )
        if isinstance(message, Failed):
            raise revive_error(message.error)
        assert isinstance(message, Ready)
        return message.info

    # ---- messages

    def send(self, message: ToCore) -> None:
        """Hand a message over; never waits."""
        self._to_core.send(self._encoder.encode(message))

    def receive(self) -> FromCore:
        """Wait for the next message. A dead process is a `Failed` with its exit code."""
        message = self._poll(None)
        assert message is not None
        return message

    def receive_nowait(self) -> FromCore | None:
        """The next message, if there is one."""
        try:
            return self._decoder.decode(self._from_core.recv(zmq.NOBLOCK))
        except zmq.Again:
            return None

    def _poll(self, deadline: float | None) -> FromCore | None:
        poller = zmq.Poller()
        poller.register(self._from_core, zmq.POLLIN)
        poller.register(self._lifeline.fileno(), zmq.POLLIN)
        while (message := self.receive_nowait()) is None:
            left = None if deadline is None else max(0, math.ceil((deadline - time.monotonic()) * 1000))
            if left == 0:
                return None
            ready = dict(poller.poll(left))
            if self._lifeline.fileno() in ready and self._from_core not in ready:
                last = self.receive_nowait()
                return last if last is not None else Failed(("EngineDeadError", str(self.death())))
        return message

    @property
    def readable_fd(self) -> int:
        """Tells an event loop that messages may have come (edge-triggered: read until there are none)."""
        return int(self._from_core.getsockopt(zmq.FD))

    @property
    def lifeline(self) -> int:
        """Becomes readable when the process has gone."""
        return self._lifeline.fileno()

    def death(self) -> EngineDeadError:
        """What is to be said of a process that has gone."""
        try:
            code = self._process.wait(0.5)
        except subprocess.TimeoutExpired:
            return EngineDeadError("the engine core's process has closed its connection")
        how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        return EngineDeadError(f"the engine core's process (pid {self._process.pid}) has ended: {how}")

    # ---- the end

    def shutdown(self) -> None:
        """End the process, and wait for that; also when it has ended already, and also twice."""
        if not self._finalizer.alive:
            return
        with contextlib.suppress(zmq.ZMQError):
            self.send(Shutdown())
        self._finalizer.detach()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(SHUTDOWN_GRACE)
        self._close_sockets()
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def _close_sockets(self) -> None:
        self._to_core.close(linger=0)
        self._from_core.close(linger=0)
        self._context.term()
        self._lifeline.close()


def _end_process(process: subprocess.Popen[bytes], lifeline: sockets.socket, context: zmq.Context) -> None:  # type: ignore[type-arg]
    """For a client that was dropped without `shutdown`, and at the interpreter's exit."""
    lifeline.close()  # the child ends when its end of the pair closes
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(SHUTDOWN_GRACE)
    if process.poll() is None:
        process.kill()
        process.wait()
    context.destroy(linger=0)
