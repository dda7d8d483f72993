"""Plain ASGI middleware: the key, the request id, the log line of a request."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm.entrypoints.openai.errors import HTTPError, error_response, retry_later
from vllm.logger import init_logger

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from vllm.entrypoints.openai.service import EngineService

logger = init_logger("vllm.access")

OPEN_PATHS = frozenset(("/", "/health", "/ping", "/version", "/metrics", "/favicon.ico"))
"""Need no key: what monitors ask for, and the page, which has a field for it."""
OPEN_PREFIX = "/page/"

_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
"""Ids from a client's header are kept if they are printable and short, so that they can stand in headers and logs."""


class RequestId:
    """Every HTTP request has an id, the client's own (X-Request-Id) or a random one; it is sent back."""

    def __init__(self, app: ASGIApp, access_log: bool = True) -> None:
        self.app = app
        self.access_log = access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        request_id = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16).encode()
        state = scope.setdefault("state", {})
        state["request_id"] = request_id.decode()
        state["own_request_id"] = request_id is given
        start = time.monotonic()
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        finally:
            if self.access_log and scope["path"] not in OPEN_PATHS:
                logger.info(
                    "%s %s %s in %.3f s (%s)",
                    scope["method"],
                    scope["path"][:200].encode("ascii", "backslashreplace").decode(),
                    status or "cut",
                    time.monotonic() - start,
                    request_id.decode(),
                )


class Gate:
    """Counts the requests that generate, and refuses new ones while the server is about to stop."""

    def __init__(self, app: ASGIApp, service: EngineService) -> None:
        self.app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        service = self._service
        if service.draining:
            headers = {"Connection": "close", **retry_later()}
            response = error_response(HTTPError(503, "the server is stopping", headers=headers))
            await response(scope, receive, send)
            return
        service.num_open += 1
        try:
            await self.app(scope, receive, send)
        finally:
            service.num_open -= 1


class ApiKey:
    """Refuses requests without one of the keys. Keys are compared in constant time, by their digests."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], root_path: str = "") -> None:
        self.app = app
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]
        self._root_path = root_path.rstrip("/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] != "OPTIONS" and not self._is_open(scope["path"]):
            header = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
            if not self._known(header):
                response = error_response(
                    HTTPError(401, "a valid API key is needed: Authorization: Bearer KEY", headers=_CHALLENGE)
                )
                await response(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _is_open(self, path: str) -> bool:
        if self._root_path and path.startswith(self._root_path + "/"):
            path = path[len(self._root_path) :]
        return path in OPEN_PATHS or path.startswith(OPEN_PREFIX)

    def _known(self, header: bytes) -> bool:
        scheme, _, key = header.partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        found = False
        for own in self._digests:  # all of them, always
            found |= hmac.compare_digest(digest, own)
        return found and scheme.lower() == b"bearer"


_CHALLENGE = {"WWW-Authenticate": "Bearer"}
