"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from vllm.entrypoints.chat_utils import render
from vllm.entrypoints.openai.http_io import EventStream, read_json, unless_gone
from vllm.entrypoints.openai.logprobs import LogprobWriter, prompt_logprobs
from vllm.entrypoints.openai.params import sampling_params
from vllm.entrypoints.openai.parsers import AnswerParser, Delta, ParserChoice, shows_special_tokens
from vllm.entrypoints.openai.protocol import ChatBody, TokenizeBody, read_body
from vllm.entrypoints.openai.service import EngineService, Running
from vllm.entrypoints.openai.serving import (
    INLINE_CHARACTERS,
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
from vllm.entrypoints.openai.tools import ToolUse, read_tools
from vllm.exceptions import BadRequestError
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.processor import TokenizedPrompt


async def create_chat_completion(service: EngineService, request: Request) -> Response:
    body = read_body(ChatBody, await read_json(request, service.args.max_body_size))
    service.check_model(body.model)
    check_stream_options(body)
    tools = read_tools(body)
    kind = RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY
    params = sampling_params(body, service.defaults, kind)
    tools.constrain(params)
    parsers = service_parsers(service, tools, body)
    if shows_special_tokens(service.args.tool_call_parser, service.tokenizer.chat_template, tools):
        params.skip_special_tokens = False
    await service.check_params(params)
    service.admit(params.num_children)
    text = await render_chat(service, body, tools.for_template, body.documents)
    (prompt,) = await tokenize(service, [text], params, bool(body.add_special_tokens))
    own_id = request_id(request, body, "chatcmpl")
    log_request(service, own_id, prompt.text, params, len(prompt.token_ids))
    call = _Call(service, body, params, prompt, own_id, parsers, tools)
    running = await service.submit(
        own_id, [as_engine_prompt(prompt, body.cache_salt)], [params], body.priority or 0, request.headers
    )
    if body.stream:
        return EventStream(guarded(call.stream(running)))
    (output,) = await unless_gone(request, running.final())
    return await respond(service, [output], params.logprobs, lambda: call.answer(output))


async def render_chat(
    service: EngineService, body: ChatBody | TokenizeBody, tools: Any = None, documents: Any = None
) -> str:
    """The prompt of a conversation. Raises BadRequestError."""
    args = service.args
    template = args.chat_template
    if body.chat_template is not None:
        if not args.trust_request_chat_template:
            raise BadRequestError(
                "chat_template: this server takes no templates from requests (--trust-request-chat-template)",
                "chat_template",
            )
        template = body.chat_template
    if isinstance(body.messages, list) and len(body.messages) > service.max_model_len:
        raise BadRequestError(
            f"messages has {len(body.messages)} entries; the maximum context length is {service.max_model_len} tokens",
            "messages",
        )
    variables: Any = body.chat_template_kwargs
    if variables is None:
        variables = {}
    elif not isinstance(variables, dict):
        raise BadRequestError("chat_template_kwargs must be an object", "chat_template_kwargs")
    if "chat_template" in variables or "tokenizer" in variables:
        raise BadRequestError("chat_template_kwargs cannot set chat_template or tokenizer", "chat_template_kwargs")
    if documents is not None and not (isinstance(documents, list) and all(isinstance(d, dict) for d in documents)):
        raise BadRequestError("documents must be a list of objects", "documents")
    effort = getattr(body, "reasoning_effort", None)
    if effort is not None:
        variables = {"reasoning_effort": effort, **variables}
    continue_final = bool(body.continue_final_message)
    begin = body.add_generation_prompt if body.add_generation_prompt is not None else not continue_final
    tokenizer = service.tokenizer

    def work() -> str:
        own = {name: value for name, value in variables.items() if name not in _TAKEN}
        if len(own) != len(variables):
            raise BadRequestError(
                f"chat_template_kwargs cannot set {', '.join(sorted(variables.keys() & _TAKEN))}",
                "chat_template_kwargs",
            )
        return render(
            tokenizer,
            body.messages,
            template,
            begin,
            continue_final,
            tools,
            content_format=args.chat_template_content_format,
            documents=documents,
            **own,
        )

    if _size(body.messages) <= INLINE_CHARACTERS and not args.trust_request_chat_template:
        return work()
    return await service.in_thread(work)


_TAKEN = frozenset(
    ("messages", "tools", "add_generation_prompt", "continue_final_message", "content_format", "documents")
)


def _size(messages: Any) -> int:
    """About how long a conversation is; long ones are not measured to their end."""
    if not isinstance(messages, list) or len(messages) > 100:
        return INLINE_CHARACTERS + 1
    total = 0
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        total += len(content) if isinstance(content, str) else INLINE_CHARACTERS * (content is not None)
    return total


def service_parsers(service: EngineService, tools: ToolUse, body: ChatBody) -> ParserChoice:
    return ParserChoice.of(service.args, service.tokenizer.chat_template, tools, body)


class _Call:
    """One request on its way, after its prompt has been tokenized."""

    def __init__(
        self,
        service: EngineService,
        body: ChatBody,
        params: SamplingParams,
        prompt: TokenizedPrompt,
        own_id: str,
        parsers: ParserChoice,
        tools: ToolUse,
    ) -> None:
        self._body = body
        self._params = params
        self._prompt = prompt
        self._parsers = parsers
        self._tools = tools
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        self._head = Head(service, own_id, kind, body)
        self._usage = Usage(service, len(prompt.token_ids), 1)
        self._role = service.args.response_role
        self._logprobs: LogprobWriter | None = None
        if params.logprobs is not None:
            self._logprobs = logprob_writer(service, body, params)
        self._echo = ""
        if body.echo:
            last = body.messages[-1]
            if last.get("role") == self._role and isinstance(last.get("content"), str):
                self._echo = last["content"]

    # ---- not streamed

    def answer(self, output: RequestOutput) -> dict[str, Any]:
        self._usage.saw(0, output)
        more: dict[str, Any] = {"prompt_logprobs": prompt_logprobs(output.prompt_logprobs)}
        if self._body.return_token_ids:
            more["prompt_token_ids"] = self._prompt.token_ids.tolist()
        return self._head.answer([self._choice(completion) for completion in output.outputs], self._usage, **more)

    def _choice(self, completion: CompletionOutput) -> dict[str, Any]:
        message: dict[str, Any] = {"role": self._role, "content": completion.text, "refusal": None}
        finish_reason = completion.finish_reason
        parser = self._parsers.new()
        if parser is not None:
            found = parser.push(completion.text).merged(parser.finish())
            message["content"] = found.content or (None if found.calls else "")
            if self._parsers.reasoning:
                message["reasoning"] = message["reasoning_content"] = found.reasoning
            if found.calls:
                message["tool_calls"] = [call.as_dict() for call in found.calls]
            finish_reason = self._reason(parser, finish_reason)
        if self._echo:
            message["content"] = self._echo + (message["content"] or "")
        choice: dict[str, Any] = {
            "index": completion.index,
            "message": message,
            "logprobs": None,
            "finish_reason": finish_reason,
            "stop_reason": completion.stop_reason,
        }
        if self._logprobs is not None:
            choice["logprobs"] = self._logprobs.chat(completion.token_ids, completion.logprobs or [])
        if self._body.return_token_ids:
            choice["token_ids"] = completion.token_ids
        return choice

    def _reason(self, parser: AnswerParser, reason: str | None) -> str | None:
        return "tool_calls" if reason == "stop" and parser.num_calls and not self._tools.is_named else reason

    # ---- streamed

    async def stream(self, running: Running) -> AsyncIterator[bytes]:
        """One event per child that moved; those of one step in one piece."""
        parsers: dict[int, AnswerParser | None] = {}
        try:
            async for _, output in running.stream():
                self._usage.saw(0, output)
                async for piece in in_batches(output.outputs, partial(self._chunk, output, parsers)):
                    yield piece
            yield self._head.last(self._usage)
        finally:
            running.close()

    def _chunk(
        self, output: RequestOutput, parsers: dict[int, AnswerParser | None], completion: CompletionOutput
    ) -> bytes:
        index = completion.index
        first = index not in parsers
        if first:
            parsers[index] = self._parsers.new()
        parser = parsers[index]
        delta: dict[str, Any]
        finish_reason = completion.finish_reason
        if parser is None:
            delta = {"content": completion.text}
        else:
            found = parser.push(completion.text)
            if finish_reason is not None:
                found = found.merged(parser.finish())
                finish_reason = self._reason(parser, finish_reason)
            delta = self._delta(found)
        if first:
            if self._echo:
                delta["content"] = self._echo + (delta.get("content") or "")
            delta = {"role": self._role, **delta}
        choice: dict[str, Any] = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        if finish_reason is not None:
            choice["stop_reason"] = completion.stop_reason
        if self._logprobs is not None:
            choice["logprobs"] = self._logprobs.chat(completion.token_ids, completion.logprobs or [])
        if self._body.return_token_ids:
            choice["token_ids"] = completion.token_ids
        more: dict[str, Any] = {}
        if len(parsers) == 1 and first:
            if self._body.return_token_ids:
                more["prompt_token_ids"] = self._prompt.token_ids.tolist()
            if output.prompt_logprobs is not None:
                more["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        return self._head.chunk(choice, self._usage, **more)

    def _delta(self, found: Delta) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        if found.content or not (found.reasoning or found.calls):
            delta["content"] = found.content
        if found.reasoning:
            delta["reasoning"] = delta["reasoning_content"] = found.reasoning
        if found.calls:
            delta["tool_calls"] = [call.as_delta() for call in found.calls]
        return delta
