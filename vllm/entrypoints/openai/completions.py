"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from vllm.entrypoints.openai.http_io import EventStream, read_json, unless_gone
from vllm.entrypoints.openai.logprobs import LogprobWriter, prompt_logprobs
from vllm.entrypoints.openai.params import sampling_params
from vllm.entrypoints.openai.protocol import CompletionBody, read_body
from vllm.entrypoints.openai.service import EngineService, Running
from vllm.entrypoints.openai.serving import (
    Head,
    Usage,
    as_engine_prompt,
    check_stream_options,
    guarded,
    in_batches,
    log_request,
    logprob_writer,
    request_id,
    respond,
    tokenize,
)
from vllm.exceptions import BadRequestError, UnsupportedError
from vllm.inputs import PromptType
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.processor import TokenizedPrompt

MAX_PROMPTS = 16_384


async def create_completion(service: EngineService, request: Request) -> Response:
    body = read_body(CompletionBody, await read_json(request, service.args.max_body_size))
    service.check_model(body.model)
    check_stream_options(body)
    if body.suffix:
        raise UnsupportedError("suffix (filling in the middle) is not built here")
    prompts = split_prompts(body.prompt)
    kind = RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY
    params = sampling_params(body, service.defaults, kind)
    await service.check_params(params)
    service.admit(len(prompts) * params.num_children)
    add_special_tokens = True if body.add_special_tokens is None else body.add_special_tokens
    tokenized = await tokenize(service, prompts, params, add_special_tokens)
    own_id = request_id(request, body, "cmpl")
    for prompt in tokenized:
        log_request(service, own_id, prompt.text, params, len(prompt.token_ids))
    call = _Call(service, body, params, tokenized, own_id)
    running = await service.submit(
        own_id,
        [as_engine_prompt(prompt, body.cache_salt) for prompt in tokenized],
        [params] * len(prompts),
        body.priority or 0,
        request.headers,
    )
    if body.stream:
        return EventStream(guarded(call.stream(running)))
    outputs = await unless_gone(request, running.final())
    return await respond(service, outputs, params.logprobs, lambda: call.answer(outputs))


def split_prompts(prompt: Any) -> list[PromptType]:
    """A string, a list of ids, or a list of those. Raises BadRequestError."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        raise BadRequestError(
            "prompt must be a string, a list of strings, a list of token ids, or a list of those", "prompt"
        )
    if not prompt:
        raise BadRequestError("prompt is an empty list", "prompt")
    if isinstance(prompt[0], int) and not isinstance(prompt[0], bool):
        return [prompt]
    if len(prompt) > MAX_PROMPTS:
        raise BadRequestError(f"prompt holds {len(prompt)} prompts; at most {MAX_PROMPTS} are taken", "prompt")
    for index, entry in enumerate(prompt):
        if not isinstance(entry, (str, list)):
            raise BadRequestError(f"prompt[{index}] must be a string or a list of token ids", "prompt")
    return prompt


class _Call:
    """One request on its way, after its prompts have been tokenized."""

    def __init__(
        self,
        service: EngineService,
        body: CompletionBody,
        params: SamplingParams,
        prompts: list[TokenizedPrompt],
        own_id: str,
    ) -> None:
        self._body = body
        self._params = params
        self._prompts = prompts
        self._tokenizer = service.engine.tokenizer
        self._head = Head(service, own_id, "text_completion", body)
        self._usage = Usage(service, sum(len(prompt.token_ids) for prompt in prompts), len(prompts))
        self._logprobs: LogprobWriter | None = None
        if params.logprobs is not None:
            self._logprobs = logprob_writer(service, body, params)
        self._only_echo = bool(body.echo) and body.max_tokens == 0

    # ---- not streamed

    def answer(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        choices = []
        for index, output in enumerate(outputs):
            if not self._only_echo:
                self._usage.saw(index, output)
            choices += [self._choice(index, output, completion) for completion in output.outputs]
        return self._head.answer(choices, self._usage)

    def _choice(self, index: int, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
        text, token_ids = completion.text, completion.token_ids
        entries: list[Any] = list(completion.logprobs or [])
        finish_reason, stop_reason = completion.finish_reason, completion.stop_reason
        offset = 0
        if self._only_echo:
            text, token_ids, entries, finish_reason, stop_reason = "", [], [], "length", None
        logprobs = None
        if self._body.echo:
            text = self._prompt_text(index) + text
            if self._logprobs is not None:
                own = self._prompts[index].token_ids.tolist()
                logprobs, _ = self._logprobs.completion(
                    [*own, *token_ids], [*(output.prompt_logprobs or [None] * len(own)), *entries], 0
                )
        elif self._logprobs is not None:
            logprobs, _ = self._logprobs.completion(token_ids, entries, offset)
        choice: dict[str, Any] = {
            "index": index * self._params.n + completion.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
            "prompt_logprobs": prompt_logprobs(output.prompt_logprobs),
        }
        if self._body.return_token_ids:
            choice["token_ids"] = token_ids
            choice["prompt_token_ids"] = self._prompts[index].token_ids.tolist()
        return choice

    def _prompt_text(self, index: int) -> str:
        prompt = self._prompts[index]
        if prompt.text is not None and self._params.truncate_prompt_tokens is None:
            return prompt.text
        if self._tokenizer is None:
            return ""
        return self._tokenizer.decode(prompt.token_ids.tolist(), skip_special_tokens=False)

    # ---- streamed

    async def stream(self, running: Running) -> AsyncIterator[bytes]:
        """One event per child that moved; those of one step in one piece."""
        offsets: dict[int, int] = {}
        try:
            async for index, output in running.stream():
                if not self._only_echo:
                    self._usage.saw(index, output)
                write = partial(self._chunk, index, output, offsets)
                async for piece in in_batches(output.outputs, write):
                    yield piece
            yield self._head.last(self._usage)
        finally:
            running.close()

    def _chunk(self, index: int, output: RequestOutput, offsets: dict[int, int], completion: CompletionOutput) -> bytes:
        number = index * self._params.n + completion.index
        first = number not in offsets
        text, token_ids = completion.text, completion.token_ids
        entries: list[Any] = completion.logprobs or []  # type: ignore[assignment]
        if self._only_echo:
            text, token_ids, entries = "", [], []
        if first:
            offsets[number] = 0
        if first and self._body.echo:
            text = self._prompt_text(index) + text
        logprobs = None
        if self._logprobs is not None:
            ids, shown = token_ids, entries
            if first and self._body.echo:
                own = self._prompts[index].token_ids.tolist()
                ids, shown = [*own, *token_ids], [*(output.prompt_logprobs or [None] * len(own)), *entries]
            logprobs, offsets[number] = self._logprobs.completion(ids, shown, offsets[number])
        choice: dict[str, Any] = {
            "index": number,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = token_ids
            if first:
                choice["prompt_token_ids"] = self._prompts[index].token_ids.tolist()
        if output.prompt_logprobs is not None and not self._body.echo:
            choice["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        return self._head.chunk(choice, self._usage)
