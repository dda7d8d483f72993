"""One server for all tests of a session, with a tiny random model; it is found idle, and left so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.entrypoints.openai.server import Server, tiny_server
from tests.models_util import tiny_folder


@pytest.fixture(scope="session")
def _server() -> Iterator[Server]:
    server = tiny_server(tiny_folder(), "--max-num-seqs", "64", "--max-n", "512", "--max-queue-size", "2000")
    yield server
    code = server.stop()
    log = "".join(server.log)
    server.kill()
    assert code == 0, log
    assert "Traceback" not in log, log


@pytest.fixture
def server(_server: Server) -> Iterator[Server]:
    yield _server
    _server.wait_idle()


@pytest.fixture
def make_server() -> Iterator[Callable[..., Server]]:
    """Servers of the test's own."""
    servers: list[Server] = []

    def make(*words: str, **environment: Any) -> Server:
        server = tiny_server(tiny_folder(), *words, **environment)
        servers.append(server)
        return server

    yield make
    for server in servers:
        server.kill()
