"""From a request's fields to `SamplingParams`."""

from __future__ import annotations

import copy
from typing import Any

from vllm.entrypoints.openai.protocol import ChatBody, CompletionBody, SamplingBody
from vllm.exceptions import BadRequestError
from vllm.sampling_params import MAX_LOGIT_BIAS, RequestOutputKind, SamplingParams, StructuredOutputsParams

_SAME_NAME = (
    "n", "best_of", "finish_after", "seed", "temperature", "top_p", "top_k", "min_p", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos",
    "max_tokens", "min_tokens", "allowed_token_ids", "bad_words", "prompt_logprobs", "skip_special_tokens",
    "spaces_between_special_tokens", "truncate_prompt_tokens",
)  # fmt: skip
MAX_TOP_LOGPROBS = 2**20
COMPLETION_TOKENS = 16
"""Default of max_tokens in the completions API."""


def sampling_params(body: SamplingBody, defaults: SamplingParams, kind: RequestOutputKind) -> SamplingParams:
    """Checked parameters for one request. `defaults` are the model's own, and stay as they are.

    Raises BadRequestError naming the field.
    """
    params = copy.copy(defaults)
    for name in _SAME_NAME:
        value = getattr(body, name)
        if value is not None:
            setattr(params, name, value)
    if body.logit_bias is not None:
        params.logit_bias = _biases(body.logit_bias)
    params.output_kind = kind
    params.structured_outputs = structured_outputs(body)
    if isinstance(body, ChatBody):
        if body.max_completion_tokens is not None:
            params.max_tokens = body.max_completion_tokens
        params.logprobs = _chat_logprobs(body)
    elif isinstance(body, CompletionBody):
        if body.max_tokens is None:
            params.max_tokens = COMPLETION_TOKENS
        params.logprobs = body.logprobs
        if body.echo and params.max_tokens == 0:
            params.max_tokens = 1  # the prompt alone is wanted: what is drawn is left out of the answer
        if body.echo and body.logprobs is not None and body.prompt_logprobs is None:
            params.prompt_logprobs = body.logprobs
    try:
        params.verify(kind)
    except BadRequestError as error:
        name = _NAMES.get(error.parameter or "", "")
        if isinstance(body, ChatBody) and name and getattr(body, name, None) is not None:
            raise BadRequestError(str(error).replace(str(error.parameter), name, 1), name) from None
        raise
    return params


_NAMES = {"max_tokens": "max_completion_tokens", "logprobs": "top_logprobs"}


def _chat_logprobs(body: ChatBody) -> int | None:
    if body.top_logprobs is not None and body.top_logprobs != 0 and not body.logprobs:
        raise BadRequestError("top_logprobs needs logprobs to be true", "top_logprobs")
    if not body.logprobs:
        return None
    count = body.top_logprobs or 0
    if count < -1 or count > MAX_TOP_LOGPROBS:
        raise BadRequestError(f"top_logprobs must be at least 0, got {count}", "top_logprobs")
    return count


def _biases(value: Any) -> dict[int, float]:
    """Keys are token ids as strings in JSON."""
    if not isinstance(value, dict):
        raise BadRequestError(f"logit_bias must be an object of token id to number, got {value!r:.80}", "logit_bias")
    if len(value) > MAX_LOGIT_BIAS:
        raise BadRequestError(f"logit_bias must hold at most {MAX_LOGIT_BIAS} entries, got {len(value)}", "logit_bias")
    try:
        return {int(key): number for key, number in value.items()}
    except ValueError:
        wrong = next(key for key in value if not key.strip().lstrip("-").isdecimal())
        raise BadRequestError(f"logit_bias: {wrong!r:.80} is not a token id", "logit_bias") from None


# ---- constraints


def structured_outputs(body: SamplingBody) -> StructuredOutputsParams | None:
    """The constraint that the body asks for, by any of the names that clients use."""
    found: dict[str, StructuredOutputsParams] = {}
    if body.structured_outputs is not None:
        found["structured_outputs"] = _constraint("structured_outputs", body.structured_outputs)
    for form in ("json", "regex", "choice", "grammar"):
        value = getattr(body, f"guided_{form}")
        if value is not None:
            found[f"guided_{form}"] = _constraint(f"guided_{form}", {form: value})
    if body.response_format is not None:
        constraint = _response_format(body.response_format)
        if constraint is not None:
            found["response_format"] = constraint
    if len(found) > 1:
        raise BadRequestError(f"give only one of {', '.join(found)}", next(iter(found)))
    return next(iter(found.values()), None)


_FORMS = frozenset(StructuredOutputsParams.__struct_fields__)


def _constraint(name: str, value: Any) -> StructuredOutputsParams:
    if not isinstance(value, dict):
        raise BadRequestError(f"{name} must be an object, got {value!r:.80}", name)
    given = {key: entry for key, entry in value.items() if key in _FORMS and entry is not None}
    try:
        return StructuredOutputsParams(**given)
    except BadRequestError as error:
        raise BadRequestError(str(error).replace("structured_outputs", name), name) from None


def _response_format(value: Any) -> StructuredOutputsParams | None:
    name = "response_format"
    if not isinstance(value, dict):
        raise BadRequestError(f"{name} must be an object, got {value!r:.80}", name)
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    if kind == "json_schema":
        inner = value.get("json_schema")
        schema = inner.get("schema") if isinstance(inner, dict) else None
        if not isinstance(schema, dict):
            raise BadRequestError(f"{name}.json_schema.schema must be an object", name)
        return StructuredOutputsParams(json=schema)
    raise BadRequestError(f"{name}.type must be text, json_object or json_schema, got {kind!r:.80}", name)
