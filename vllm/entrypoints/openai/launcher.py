"""The server's process: socket, engine, signals, exit code.

Exit codes: 0 asked to stop (SIGTERM, SIGINT), 1 it could not start, 2 wrong arguments, 3 the engine died.

SIGTERM and SIGINT: nothing new is taken (503); what runs may go on for `shutdown_grace` seconds and is then aborted,
which its clients see as finish_reason "abort". A second signal aborts at once, a third one cuts the connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator

import uvicorn

from vllm.config import VllmConfig
from vllm.entrypoints.openai.api_server import build_app
from vllm.entrypoints.openai.server_args import ServerArgs, refuse_unbuilt
from vllm.entrypoints.openai.service import EngineService
from vllm.exceptions import ConfigError
from vllm.logger import init_logger
from vllm.v1.engine.async_llm import AsyncLLM

logger = init_logger(__name__)

EXIT_ENGINE_DIED = 3
DEATH_GRACE = 2.0
"""Seconds after the engine's death in which clients still get answers (503)."""
ABORT_GRACE = 3.0
"""Seconds for the answers of aborted requests to go out."""
KEEP_ALIVE = 60
BACKLOG = 2048


def run_server(config: VllmConfig, args: ServerArgs) -> int:
    """Serve until told to stop; the exit code. Raises ConfigError, and what starting the engine raises."""
    refuse_unbuilt(args)
    own = None if args.uds else bind(args)
    engine = AsyncLLM(config, multiprocessing=True)
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) if sys.version_info >= (3, 11) else _Runner() as runner:
            return runner.run(_serve(engine, config, args, own))
    finally:
        engine.shutdown()
        if own is not None:
            own.close()


def bind(args: ServerArgs) -> socket.socket:
    """The socket to listen on. Raises ConfigError if it cannot be had."""
    host = args.host or "0.0.0.0"
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    own = socket.socket(family, socket.SOCK_STREAM)
    try:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        own.bind((host, args.port))
        own.listen(BACKLOG)
    except OSError as error:
        own.close()
        raise ConfigError(f"cannot listen on {host}, port {args.port}: {error.strerror}", "port") from None
    own.setblocking(False)
    return own


def _loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.Loop


class _Runner:
    """`asyncio.Runner` for Python 3.10."""

    def __enter__(self) -> _Runner:  # noqa: PYI034 - typing_extensions is no dependency
        factory = _loop_factory()
        self._loop = asyncio.new_event_loop() if factory is None else factory()
        return self

    def run(self, main: object) -> int:
        asyncio.set_event_loop(self._loop)
        code: int = self._loop.run_until_complete(main)  # type: ignore[arg-type]
        return code

    def __exit__(self, *_: object) -> None:
        asyncio.set_event_loop(None)
        self._loop.close()


class _Server(uvicorn.Server):
    """Signals are ours."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Stopping:
    """What signals lead to."""

    def __init__(self, service: EngineService, server: _Server, grace: float) -> None:
        self.exit_code = 0
        self._service = service
        self._server = server
        self._grace = grace
        self._signals = 0
        self._deadline = 0.0
        self._tasks: list[asyncio.Task[None]] = []

    def signalled(self, name: str) -> None:
        self._signals += 1
        if self._signals == 1:
            logger.info("%s: stopping; %d requests may go on for %g s", name, self._service.num_open, self._grace)
            self._deadline = time.monotonic() + self._grace
            self._service.draining = True
            self._tasks.append(asyncio.create_task(self._drain()))
        elif self._signals == 2:
            logger.info("%s again: aborting what runs", name)
            self._deadline = 0.0
        else:
            self._server.should_exit = self._server.force_exit = True

    async def _drain(self) -> None:
        await self._until(lambda: self._deadline)
        if self._service.num_open:
            logger.warning("aborting %d requests", self._service.num_open)
            with contextlib.suppress(Exception):
                await self._service.abort_all()
            last = time.monotonic() + ABORT_GRACE
            await self._until(lambda: last)
        self._server.should_exit = True

    async def _until(self, deadline: Callable[[], float]) -> None:
        while self._service.num_open and time.monotonic() < deadline():  # noqa: ASYNC110 - a deadline that may move
            await asyncio.sleep(0.02)

    def engine_ended(self) -> None:
        self.exit_code = EXIT_ENGINE_DIED
        self._tasks.append(asyncio.create_task(self._after_death()))

    async def _after_death(self) -> None:
        await asyncio.sleep(DEATH_GRACE)
        self._server.should_exit = True


async def _serve(engine: AsyncLLM, config: VllmConfig, args: ServerArgs, own: socket.socket | None) -> int:
    stopping: _Stopping | None = None

    def on_end() -> None:
        assert stopping is not None
        stopping.engine_ended()

    def restart() -> AsyncLLM:
        return AsyncLLM(config, multiprocessing=True)

    service = EngineService(engine, args, restart if args.restart_engine else None, on_end)
    _quiet_libraries()
    # What is there now stays: the collector need not look at it again, nor often at what requests leave.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    server = _Server(
        uvicorn.Config(
            build_app(service),
            uds=args.uds,
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=2,
            backlog=BACKLOG,
            ssl_keyfile=args.ssl_keyfile,
            ssl_certfile=args.ssl_certfile,
            ws="none",
        )
    )
    stopping = _Stopping(service, server, args.shutdown_grace)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.signalled, number.name)
    service.start()
    logger.info("serving %s at %s (pid %d)", service.model_names[0], _address(args, own), os.getpid())
    try:
        await server.serve(sockets=None if own is None else [own])
    finally:
        service.shutdown()
    return stopping.exit_code


def _address(args: ServerArgs, own: socket.socket | None) -> str:
    if own is None:
        return f"unix:{args.uds}"
    host, port = own.getsockname()[:2]
    return f"http{'s' if args.ssl_certfile else ''}://{f'[{host}]' if ':' in host else host}:{port}"


def _quiet_libraries() -> None:
    """uvicorn's own lines only where something is wrong; they go where ours go."""
    for name in ("uvicorn", "uvicorn.error", "uvicorn.asgi"):
        logging.getLogger(name).setLevel(logging.WARNING)
