"""What both completions APIs do alike: tokenize without holding up the loop, count tokens, frame a stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from vllm.entrypoints.openai.errors import as_http_error, error_object
from vllm.entrypoints.openai.http_io import encode_json, json_response
from vllm.entrypoints.openai.logprobs import LogprobWriter
from vllm.entrypoints.openai.protocol import SamplingBody, StreamOptions
from vllm.entrypoints.openai.service import EngineService
from vllm.exceptions import BadRequestError
from vllm.inputs import PromptType
from vllm.logger import init_logger
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.processor import TokenizedPrompt

logger = init_logger(__name__)

T = TypeVar("T")

INLINE_CHARACTERS = 2_000
"""More text than this (or more ids) is tokenized in another thread."""
DONE = b"data: [DONE]\n\n"


async def tokenize(
    service: EngineService, prompts: Sequence[PromptType], params: SamplingParams, add_special_tokens: bool
) -> list[TokenizedPrompt]:
    """All prompts of a request. Raises BadRequestError."""
    processor = service.engine.processor
    each = [params] * len(prompts)
    if sum(map(len, prompts)) <= INLINE_CHARACTERS and len(prompts) <= 8:
        return [processor.tokenize(prompt, params, add_special_tokens) for prompt in prompts]
    return await service.in_thread(processor.tokenize_batch, prompts, each, add_special_tokens)


def as_engine_prompt(prompt: TokenizedPrompt, cache_salt: str | None) -> PromptType:
    """For the engine, which need not tokenize it again."""
    own: dict[str, Any] = {"prompt_token_ids": prompt.token_ids.tolist()}
    if prompt.text is not None:
        own["prompt"] = prompt.text
    if cache_salt is not None:
        own["cache_salt"] = cache_salt
    return own  # type: ignore[return-value]


def request_id(request: Request, body: SamplingBody, prefix: str) -> str:
    """The id that answers carry, and under which a request can be aborted: the client's own where it gave one."""
    own = body.request_id
    if own is not None:
        if not 1 <= len(own) <= 128 or not own.isprintable():
            raise BadRequestError("request_id must be a printable string of 1 to 128 characters", "request_id")
    else:
        own = request.state.request_id
    return f"{prefix}-{own}"


def logprob_writer(service: EngineService, body: SamplingBody, params: SamplingParams) -> LogprobWriter:
    as_ids = body.return_tokens_as_token_ids
    if as_ids is None:
        as_ids = service.args.return_tokens_as_token_ids
    return LogprobWriter(service.engine.tokenizer, params.logprobs or 0, as_ids)


class Usage:
    """Tokens of one HTTP request, as they come. A prompt counts once, whatever n."""

    def __init__(self, service: EngineService, num_prompt_tokens: int, num_prompts: int) -> None:
        self.prompt_tokens = num_prompt_tokens
        self.completion_tokens = 0
        self._details = service.args.enable_prompt_tokens_details
        self._cached = [0] * num_prompts

    def saw(self, index: int, output: RequestOutput) -> None:
        """Take in an output that carries new tokens (a delta, or the final one)."""
        self._cached[index] = output.num_cached_tokens or 0
        for completion in output.outputs:
            self.completion_tokens += len(completion.token_ids)

    def as_dict(self) -> dict[str, Any]:
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }
        if self._details:
            usage["prompt_tokens_details"] = {"cached_tokens": sum(self._cached)}
        return usage


class Head:
    """Fields that every answer and every chunk of one request has."""

    def __init__(self, service: EngineService, own_id: str, kind: str, body: SamplingBody) -> None:
        self.id = own_id
        self.kind = kind
        self.created = int(time.time())
        self.model = body.model or service.model_names[0]
        options = body.stream_options or StreamOptions()
        self.include_usage = bool(options.include_usage) or service.args.enable_force_include_usage
        self.continuous = self.include_usage and bool(options.continuous_usage_stats)
        self._start = {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def answer(self, choices: list[dict[str, Any]], usage: Usage, **more: Any) -> dict[str, Any]:
        return {
            **self._start, "choices": choices, "usage": usage.as_dict(), "system_fingerprint": None,
            "service_tier": None, **more,
        }  # fmt: skip

    def chunk(self, choice: dict[str, Any], usage: Usage, **more: Any) -> bytes:
        """One event with one choice."""
        value = {**self._start, "choices": [choice], **more}
        if self.include_usage:
            value["usage"] = usage.as_dict() if self.continuous else None
        return b"data: " + encode_json(value) + b"\n\n"

    def last(self, usage: Usage) -> bytes:
        """The event with the usage, if it was asked for, and the end."""
        if not self.include_usage:
            return DONE
        return b"data: " + encode_json({**self._start, "choices": [], "usage": usage.as_dict()}) + b"\n\n" + DONE


LARGE_ANSWER = 20_000
"""Tokens (a log-probability counts as one) above which an answer is put together in another thread."""
BATCH = 128
"""Completions of one step that are written before the event loop gets a turn."""


async def respond(
    service: EngineService, outputs: Sequence[RequestOutput], num_logprobs: int | None, build: Callable[[], Any]
) -> Response:
    """The answer that `build` makes of these outputs."""
    tokens = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    tokens += sum(len(output.prompt_logprobs or ()) for output in outputs)
    if tokens * (1 if num_logprobs is None else 2 + abs(num_logprobs)) <= LARGE_ANSWER:
        return json_response(build())
    return await service.in_thread(lambda: json_response(build()))


async def in_batches(completions: list[T], write: Callable[[T], bytes]) -> AsyncIterator[bytes]:
    """The events of one step, in one piece, or in several with a turn for others between them."""
    if len(completions) <= BATCH:
        yield b"".join(map(write, completions))
        return
    for start in range(0, len(completions), BATCH):
        yield b"".join(map(write, completions[start : start + BATCH]))
        await asyncio.sleep(0)


async def guarded(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """A stream whose failure is its last event but [DONE]; the status has been sent long ago."""
    try:
        async for piece in pieces:
            yield piece
    except Exception as error:  # noqa: BLE001 - the client is told, and the server goes on
        told = as_http_error(error)
        yield b"data: " + encode_json(error_object(told.status, str(told), told.param)) + b"\n\n" + DONE
    finally:
        await pieces.aclose()  # type: ignore[attr-defined]


def check_stream_options(body: SamplingBody) -> None:
    if body.stream_options is not None and not body.stream:
        raise BadRequestError("stream_options is for requests with stream=true", "stream_options")


def log_request(service: EngineService, own_id: str, prompt: str | None, params: SamplingParams, tokens: int) -> None:
    if service.args.enable_log_requests:
        shown = (prompt or "")[: service.args.max_log_len]
        logger.info("request %s: %d prompt tokens, %r, prompt %r", own_id, tokens, params, shown)
