"""Log-probabilities as the two completions APIs show them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from vllm.logprobs import LogprobsOnePosition

if TYPE_CHECKING:
    from vllm.tokenizers import Tokenizer

LOWEST = -9999.0
"""In place of minus infinity, which JSON does not have."""


class LogprobWriter:
    """For one request.

    Args:
        tokenizer: None shows tokens by id.
        count: most likely tokens asked for.
        as_ids: show tokens as token_id:ID.
    """

    def __init__(self, tokenizer: Tokenizer | None, count: int, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._count = count
        self._as_ids = as_ids or tokenizer is None

    def _text(self, token_id: int, decoded: str | None) -> str:
        return f"token_id:{token_id}" if self._as_ids or decoded is None else decoded

    def completion(
        self, token_ids: Sequence[int], entries: Sequence[LogprobsOnePosition | None], offset: int
    ) -> tuple[dict[str, Any], int]:
        """The completions API's object, and where the next token's text begins."""
        tokens: list[str] = []
        values: list[float | None] = []
        offsets: list[int] = []
        tops: list[dict[str, float] | None] = []
        for token_id, entry in zip(token_ids, entries, strict=True):
            own = entry.get(token_id) if entry else None
            decoded = own.decoded_token if own is not None else self._decode(token_id)
            tokens.append(self._text(token_id, decoded))
            values.append(None if own is None else max(own.logprob, LOWEST))
            offsets.append(offset)
            offset += len(decoded or "")
            tops.append(
                {self._text(key, value.decoded_token): max(value.logprob, LOWEST) for key, value in self._top(entry)}
                if entry
                else None
            )
        found = {"text_offset": offsets, "token_logprobs": values, "tokens": tokens, "top_logprobs": tops}
        return found, offset

    def chat(self, token_ids: Sequence[int], entries: Sequence[LogprobsOnePosition | None]) -> dict[str, Any]:
        """The chat API's object."""
        content = []
        for token_id, entry in zip(token_ids, entries, strict=True):
            own = entry[token_id] if entry else None
            shown = self._shown(token_id, None if own is None else own.decoded_token, own.logprob if own else LOWEST)
            shown["top_logprobs"] = [
                self._shown(key, value.decoded_token, value.logprob)
                for key, value in (self._top(entry) if self._count and entry else ())
            ]
            content.append(shown)
        return {"content": content}

    def _shown(self, token_id: int, decoded: str | None, logprob: float) -> dict[str, Any]:
        data = None if self._tokenizer is None else self._tokenizer.token_bytes(token_id)
        return {
            "token": self._text(token_id, decoded),
            "logprob": max(logprob, LOWEST),
            "bytes": list((decoded or "").encode("utf-8", "replace") if data is None else data),
        }

    def _top(self, entry: LogprobsOnePosition) -> Iterable[tuple[int, Any]]:
        """The most likely ones, best first; with none asked for, the sampled one."""
        if self._count == 0:
            return list(entry.items())[:1]
        ranked = sorted(entry.items(), key=lambda item: (-item[1].logprob, item[1].rank or 0))
        own = next(iter(entry))  # the sampled one, which is told even if it is not among the most likely
        if self._count < 0:
            return ranked
        return [item for item in ranked if item[0] == own or (item[1].rank or 0) <= self._count]

    def _decode(self, token_id: int) -> str | None:
        return None if self._tokenizer is None else self._tokenizer.token_text(token_id)


def prompt_logprobs(entries: Iterable[LogprobsOnePosition | None] | None) -> list[dict[str, Any] | None] | None:
    """vLLM's extra field: one entry per prompt token, the first null."""
    if entries is None:
        return None
    return [
        None
        if not entry
        else {
            str(token_id): {
                "logprob": max(value.logprob, LOWEST), "rank": value.rank, "decoded_token": value.decoded_token
            }
            for token_id, value in entry.items()
        }
        for entry in entries
    ]  # fmt: skip
