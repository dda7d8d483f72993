"""Prompts in the forms that `generate` takes."""

from __future__ import annotations

from typing import TypedDict


class _Options(TypedDict, total=False):
    cache_salt: str
    """Requests share prefix cache entries only with requests of the same salt."""


class TextPrompt(_Options):
    """A prompt as text."""

    prompt: str


class _TokensOptions(_Options, total=False):
    prompt: str
    """The text these ids stand for, if known; it is only handed back."""


class TokensPrompt(_TokensOptions):
    """A prompt as token ids."""

    prompt_token_ids: list[int]


SingletonPrompt = str | TextPrompt | TokensPrompt
PromptType = str | list[int] | TextPrompt | TokensPrompt
"""One prompt. `LLM.generate` takes one of these or a list of them."""
