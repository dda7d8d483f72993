"""Tokenizers: text to ids and back, from GGUF files and Hugging Face folders, without torch and without transformers.

`get_tokenizer` gives clients a transformers tokenizer and is the only part that imports that package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.tokenizers.hf import get_tokenizer
    from vllm.tokenizers.loading import load_tokenizer, open_tokenizer
    from vllm.tokenizers.tokenizer import Tokenizer

_PLACES = {
    "Tokenizer": "vllm.tokenizers.tokenizer",
    "get_tokenizer": "vllm.tokenizers.hf",
    "load_tokenizer": "vllm.tokenizers.loading",
    "open_tokenizer": "vllm.tokenizers.loading",
}

__all__ = ["Tokenizer", "get_tokenizer", "load_tokenizer", "open_tokenizer"]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_PLACES[name]), name)
