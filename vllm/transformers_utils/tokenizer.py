"""`get_tokenizer` under the path that lighteval and other programs import."""

from __future__ import annotations

from vllm.tokenizers import get_tokenizer

__all__ = ["get_tokenizer"]
