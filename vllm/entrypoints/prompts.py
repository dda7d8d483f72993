"""What `LLM.generate` takes as prompts, as a list of single prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from vllm.exceptions import BadRequestError
from vllm.inputs import PromptType

T = TypeVar("T")


def split_prompts(prompts: Any, prompt_token_ids: Any = None) -> list[PromptType]:
    """Single prompts, unchecked: a string, a list of ids and a dict are one prompt, any other list is several.

    `prompt_token_ids` is the legacy keyword: ids of one prompt or of several, beside their texts or alone.
    """
    if prompt_token_ids is None:
        if prompts is None:
            raise BadRequestError("generate() needs prompts", "prompts")
        return _split(prompts)
    ids = _split(prompt_token_ids)
    if prompts is None:
        return ids
    texts = _split(prompts)
    if len(texts) != len(ids):
        raise BadRequestError(
            f"prompts and prompt_token_ids must have one length, got {len(texts)} and {len(ids)}", "prompt_token_ids"
        )
    paired: list[Any] = []
    for text, own in zip(texts, ids, strict=True):
        fields = dict(text) if isinstance(text, dict) else {"prompt": text}
        paired.append(fields | {"prompt_token_ids": own})
    return paired


def _split(prompts: Any) -> list[PromptType]:
    if isinstance(prompts, (str, dict)):
        return [prompts]  # type: ignore[list-item]
    if isinstance(prompts, np.ndarray) and prompts.ndim == 1 and prompts.dtype != object:
        return [prompts]  # type: ignore[list-item]
    if isinstance(prompts, (bytes, bytearray)) or not isinstance(prompts, (Sequence, np.ndarray)):
        raise BadRequestError(
            f"prompts must be a string, a list of token ids, a dict, or a list of those, got {type(prompts).__name__}",
            "prompts",
        )
    if len(prompts) and isinstance(prompts[0], (int, np.integer)):
        return [list(prompts)]
    return list(prompts)


def one_each(name: str, value: Any, count: int, default: T) -> list[T]:
    """`value` for each of `count` prompts: a list as it is, anything else repeated (the same object), None: default."""
    if value is None:
        return [default] * count
    if isinstance(value, (list, tuple)):
        if len(value) != count:
            raise BadRequestError(f"{name} must be one, or one per prompt: got {len(value)} for {count} prompts", name)
        return [default if entry is None else entry for entry in value]
    return [value] * count
