"""What clients may send: OpenAI's two completions APIs, with the extra fields of vLLM's server.

Types are checked strictly here ("2", 2.0 and true are no ints); what must hold beyond the type (ranges, the form of
lists) is checked where the value is used, by `SamplingParams`, the processor and the chat template. Containers that a
client can make long stand here as `Any` for that reason: they are looked at once, and the first wrong entry is named. A
field given as null means its default; an unknown field is passed over.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema

from vllm.exceptions import BadRequestError
from vllm.logger import init_logger

logger = init_logger(__name__)

_TOKENS: dict[str, Any] = {"type": "array", "items": {"type": "integer"}}
_STRINGS: dict[str, Any] = {"type": "array", "items": {"type": "string"}}
_OBJECTS: dict[str, Any] = {"type": "array", "items": {"type": "object"}}


def _shown(*kinds: dict[str, Any]) -> WithJsonSchema:
    """How a container that is checked elsewhere stands in the OpenAPI document."""
    return WithJsonSchema({"anyOf": [*kinds, {"type": "null"}]})


Strings = Annotated[Any, _shown({"type": "string"}, _STRINGS)]
TokenIds = Annotated[Any, _shown(_TOKENS)]
Objects = Annotated[Any, _shown(_OBJECTS)]
Object = Annotated[Any, _shown({"type": "object"})]
Biases = Annotated[Any, _shown({"type": "object", "additionalProperties": {"type": "number"}})]
Schema = Annotated[Any, _shown({"type": "string"}, {"type": "object"})]


class Body(BaseModel):
    """Common to all request bodies."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingBody(Body):
    """What both completions APIs have."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    best_of: int | None = None
    finish_after: int | None = None
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: Strings = None
    stop_token_ids: TokenIds = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    logit_bias: Biases = None
    allowed_token_ids: TokenIds = None
    bad_words: Strings = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    response_format: Object = None
    structured_outputs: Object = None
    guided_json: Schema = None
    guided_regex: str | None = None
    guided_choice: Strings = None
    guided_grammar: str | None = None
    priority: int | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    user: str | None = None


class CompletionBody(SamplingBody):
    """POST /v1/completions"""

    prompt: Annotated[
        Any,
        WithJsonSchema({"anyOf": [{"type": "string"}, _STRINGS, _TOKENS, {"type": "array", "items": _TOKENS}]}),
    ]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None


class ChatBody(SamplingBody):
    """POST /v1/chat/completions"""

    messages: Annotated[Any, WithJsonSchema(_OBJECTS | {"minItems": 1})]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    tools: Objects = None
    tool_choice: Schema = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    echo: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: Object = None
    documents: Objects = None


class TokenizeBody(Body):
    """POST /tokenize: of a prompt, or of a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Objects = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: Object = None
    tools: Objects = None


class DetokenizeBody(Body):
    """POST /detokenize"""

    model: str | None = None
    tokens: Annotated[Any, WithJsonSchema(_TOKENS)]


class AbortBody(Body):
    """POST /abort_requests"""

    request_ids: list[str] = Field(max_length=10_000)


B = TypeVar("B", bound=Body)


def read_body(kind: type[B], value: Any) -> B:
    """The body as its model. Raises BadRequestError naming the field."""
    if not isinstance(value, dict):
        raise BadRequestError(f"the body must be a JSON object, got {_kind(value)}")
    unknown = value.keys() - kind.model_fields.keys()
    if unknown:
        logger.debug("fields passed over: %s", ", ".join(sorted(map(str, unknown)))[:500])
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise _refusal(error) from None


def _refusal(error: ValidationError) -> BadRequestError:
    """The first wrong field, with everything that is said about it."""
    problems = error.errors(include_url=False, include_context=False, include_input=True)
    field = str(problems[0]["loc"][0]) if problems[0]["loc"] else "body"
    texts: list[str] = []
    for problem in problems:
        if str(problem["loc"][0] if problem["loc"] else "body") == field:
            path = ".".join(map(str, problem["loc"]))
            if problem["type"] == "missing":
                texts.append(f"{path} is required")
            else:
                texts.append(f"{path}: {problem['msg']}, got {_kind(problem['input'])}")
    return BadRequestError("; ".join(texts[:3]), field)


def _kind(value: Any) -> str:
    """A value for a message: scalars as they are, cut; containers by their kind only."""
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "a list"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
