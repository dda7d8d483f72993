"""One streamed request to an OpenAI-compatible server, noted token by token."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from vllm.benchmarks.measures import RequestRecord
from vllm.exceptions import BadRequestError

if TYPE_CHECKING:
    import aiohttp

_LONGEST_EVENT = 1 << 26


def client(headers: dict[str, str], timeout: float | None) -> aiohttp.ClientSession:
    """A session without a limit on connections. Raises BadRequestError where aiohttp is missing."""
    try:
        import aiohttp
    except ImportError:
        raise BadRequestError("benchmarking a server needs aiohttp: pip install 'vllm[bench]'") from None
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=timeout),
        headers=headers,
        trust_env=False,
    )


async def post_streaming(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any], record: RequestRecord, *, chat: bool
) -> None:
    """Send, and read until [DONE]. What goes wrong becomes `record.error`; nothing is raised but cancellation."""
    import aiohttp

    usage: dict[str, Any] = {}
    done = False
    record.start = record.end = time.perf_counter()
    try:
        async with session.post(url, json=body) as response:
            if response.status != 200:
                record.error = f"HTTP {response.status}: {_message(await response.text())}"
                return
            async for data in _events(response):
                moment = time.perf_counter()
                if data == "[DONE]":
                    done = True
                    break
                event = json.loads(data)
                if "error" in event:
                    record.error = f"in the stream: {_message(data)}"
                    return
                usage = event.get("usage") or usage
                for choice in event.get("choices", ()):
                    _note(record, choice, moment, chat=chat)
        if not done:
            record.error = "the stream ended before [DONE]"
        elif any(child.finish_reason is None for child in record.children.values()):
            record.error = "the stream ended before every choice had a finish_reason"
        elif not record.children:
            record.error = "the stream had no choices"
    except (
        aiohttp.ClientError,
        OSError,
        ValueError,
        asyncio.TimeoutError,
        KeyError,
        TypeError,
        AttributeError,
    ) as error:
        record.error = f"{type(error).__name__}: {error}"
    finally:
        _settle(record, usage)


def _note(record: RequestRecord, choice: dict[str, Any], moment: float, *, chat: bool) -> None:
    delta = choice.get("delta") or {} if chat else choice
    text = (delta.get("content") if chat else delta.get("text")) or ""
    if chat and not text:
        text = delta.get("reasoning_content") or ""
    reason = choice.get("finish_reason")
    # A chunk with no text can be a token too (half a character), unless it only opens or closes the choice.
    is_token = bool(text) or (reason is None and "role" not in delta)
    record.saw(choice.get("index", 0), int(is_token), moment, text, reason)


def _settle(record: RequestRecord, usage: dict[str, Any]) -> None:
    """The server's own counts, where it sends them: a chunk may carry several tokens, or the last one no text."""
    if type(usage.get("prompt_tokens")) is int:
        record.prompt_tokens = usage["prompt_tokens"]
    counted, total = record.output_tokens, usage.get("completion_tokens")
    if type(total) is not int or total == counted or not counted:
        return
    left = total
    children = list(record.children.values())
    for place, child in enumerate(children):
        share = left if place == len(children) - 1 else round(child.tokens * total / counted)
        child.tokens = max(0, min(share, left))
        left -= child.tokens


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[str]:
    """The data of each server-sent event."""
    waiting = b""
    async for piece in response.content.iter_any():
        waiting += piece
        *lines, waiting = waiting.split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip().decode("utf-8")
        if len(waiting) > _LONGEST_EVENT:
            raise ValueError("an event of the stream is too long")


def _message(text: str) -> str:
    """The server's own words, short."""
    try:
        body = json.loads(text)
        error = body.get("error", body)
        text = error.get("message", text) if isinstance(error, dict) else str(error)
    except (ValueError, AttributeError):
        pass
    return " ".join(str(text).split())[:500]


async def get_text(session: aiohttp.ClientSession, url: str) -> str | None:
    """A page's text; None if the server has it not."""
    import aiohttp

    try:
        async with session.get(url, timeout=aiohttp.ClientTimeout(total=10)) as response:
            return await response.text() if response.status == 200 else None
    except (aiohttp.ClientError, OSError, ValueError, asyncio.TimeoutError):
        return None
