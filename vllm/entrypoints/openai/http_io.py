"""Bodies in, JSON and event streams out, and the end of a request whose client has gone."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from vllm.entrypoints.openai.errors import CLIENT_GONE, HTTPError
from vllm.exceptions import BadRequestError

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

T = TypeVar("T")

BODY_TIMEOUT = 60.0
"""Seconds within which the next piece of a body must come."""
LARGE_BODY = 64 * 1024
"""Bodies above this are parsed in another thread."""

encode_json = msgspec.json.Encoder().encode
_decoder = msgspec.json.Decoder()


def json_response(value: Any, status: int = 200) -> Response:
    return Response(encode_json(value), status, media_type="application/json")


async def read_json(request: Request, limit: int) -> Any:
    """The body of a request as JSON. Raises HTTPError 413 above `limit` bytes, and 400 for what is no JSON (NaN,
    invalid UTF-8, and nesting that is too deep, are none)."""
    body = await _read(request, limit)
    if not body.strip():
        raise BadRequestError("the body is empty: a JSON object is expected")
    if len(body) <= LARGE_BODY:
        return parse_json(body)
    return await asyncio.get_running_loop().run_in_executor(None, parse_json, body)


def parse_json(body: bytes) -> Any:
    """The value of a JSON text; what would take the interpreter for long is refused before it is read."""
    if len(body) > LARGE_BODY:
        _check_size(body)
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, ValueError) as error:
        raise BadRequestError(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise BadRequestError("the body is not acceptable JSON: it is nested too deeply") from None


_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_REST = re.compile(rb'(?:[^"\\]|\\.)*"', re.DOTALL)
_MOST = ((b"[{", 65_536, "lists and objects"), (b":", 262_144, "fields"), (b",", 4_194_304, "entries"))
_PIECE = 65_536


def _check_size(body: bytes) -> None:
    """Objects cost far more than their bytes, and while they are made nothing else runs."""
    outside = body
    for marks, most, what in _MOST:
        if _count(outside, marks) > most:
            if outside is body:
                outside = b"".join(_outside_strings(body))
            count = _count(outside, marks)
            if count > most:
                raise BadRequestError(f"the body has {count} {what}; at most {most} are taken")


def _count(text: bytes, marks: bytes) -> int:
    return sum(text.count(mark) for mark in marks)


def _outside_strings(body: bytes) -> Iterator[bytes]:
    """What of a JSON text stands outside its strings, piece by piece, so that other threads get their turns."""
    start, inside = 0, False
    while start < len(body):
        end = min(start + _PIECE, len(body))
        while end < len(body) and body[end - 1 : end] == b"\\":  # an escape is not cut in two
            end += 1
        piece, start = body[start:end], end
        if inside:
            rest = _REST.match(piece)
            if rest is None:
                continue
            piece = piece[rest.end() :]
        piece = _STRING.sub(b"", piece)
        quote = piece.find(b'"')
        inside = quote >= 0
        yield piece[:quote] if inside else piece


async def _read(request: Request, limit: int) -> bytes:
    too_large = HTTPError(413, f"the body must be at most {limit} bytes")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > limit:
        raise too_large
    pieces: list[bytes] = []
    size = 0
    while True:
        try:
            message = await asyncio.wait_for(request.receive(), BODY_TIMEOUT)
        except (TimeoutError, asyncio.TimeoutError):
            raise HTTPError(408, "the body did not come in time") from None
        if message["type"] == "http.disconnect":
            raise HTTPError(CLIENT_GONE, "the client has gone")
        piece = message.get("body", b"")
        size += len(piece)
        if size > limit:
            raise too_large
        pieces.append(piece)
        if not message.get("more_body", False):
            return b"".join(pieces)


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled as soon as the client goes away. The body must have been read."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise HTTPError(CLIENT_GONE, "the client has gone")
        return task.result()
    finally:
        for own in (task, watch):
            own.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await asyncio.wait((task,))


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A body of server-sent events, each piece from an iterator of bytes. The iterator is closed when the client goes
    away, however long it takes to its next piece."""

    media_type = "text/event-stream"

    def __init__(self, pieces: AsyncIterator[bytes]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        task = asyncio.ensure_future(self._send(send))
        watch = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        finally:
            done = task.done()
            for own in (task, watch):
                own.cancel()
            await asyncio.wait((task,))
        if done:
            task.result()

    async def _send(self, send: Send) -> None:
        pieces = self._pieces
        try:
            async for piece in pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            with contextlib.suppress(RuntimeError):
                await pieces.aclose()  # type: ignore[attr-defined]
