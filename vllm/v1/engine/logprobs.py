"""Log-probability columns of the core, as the lists that clients read.

An entry becomes a dict from token id to `Logprob`: the entry's own token first with its true rank, then the most likely
ones as ranks 1, 2, … (the own token is not listed twice). With `flat_logprobs` the same goes into a `FlatLogprobs`.
"""

from __future__ import annotations

from collections.abc import Callable

from vllm.logprobs import FlatLogprobs, Logprob, LogprobsOnePosition, PromptLogprobs, SampleLogprobs
from vllm.v1.messages import LogprobColumnsMsg


class TokenTexts(dict[int, str | None]):
    """`decoded_token` by id, decoded when first asked for. `decode` takes one id; None without a tokenizer."""

    def __init__(self, decode: Callable[[int], str] | None) -> None:
        super().__init__()
        self._decode = decode

    def __missing__(self, token_id: int) -> str | None:
        text = self[token_id] = None if self._decode is None else self._decode(token_id)
        return text


class LogprobReader:
    """The columns of one message as Python lists. Entry e of the message belongs to its token e."""

    __slots__ = ("_logprobs", "_offsets", "_ranks", "_token_ids")

    def __init__(self, columns: LogprobColumnsMsg) -> None:
        self._offsets: list[int] = columns.offsets.tolist()
        self._token_ids: list[int] = columns.token_ids.tolist()
        self._logprobs: list[float] = columns.logprobs.tolist()
        self._ranks: list[int] = columns.ranks.tolist()

    def __len__(self) -> int:
        return len(self._ranks)

    def dicts(self, first: int, last: int, texts: TokenTexts) -> list[LogprobsOnePosition]:
        """Entries first .. last - 1, each a new dict."""
        offsets, token_ids, logprobs = self._offsets, self._token_ids, self._logprobs
        entries: list[LogprobsOnePosition] = []
        for index in range(first, last):
            at, end = offsets[index], offsets[index + 1]
            own = token_ids[at]
            entry = {own: Logprob(logprobs[at], self._ranks[index], texts[own])}
            for rank, position in enumerate(range(at + 1, end), start=1):
                token_id = token_ids[position]
                if token_id != own:
                    entry[token_id] = Logprob(logprobs[position], rank, texts[token_id])
            entries.append(entry)
        return entries

    def flat(self, first: int, last: int, texts: TokenTexts, into: FlatLogprobs) -> None:
        """Append entries first .. last - 1 to `into` without making dicts."""
        for index in range(first, last):
            at, end = self._offsets[index], self._offsets[index + 1]
            token_ids, logprobs = self._token_ids[at:end], self._logprobs[at:end]
            ranks = list(range(end - at))
            ranks[0] = self._ranks[index]
            if token_ids[0] in token_ids[1:]:
                twin = token_ids.index(token_ids[0], 1)
                del token_ids[twin], logprobs[twin], ranks[twin]
            into.append_columns(token_ids, logprobs, ranks, [texts[token_id] for token_id in token_ids])

    def total(self, first: int, last: int) -> float:
        """Sum of the own tokens' log-probabilities of entries first .. last - 1."""
        offsets, logprobs = self._offsets, self._logprobs
        total = 0.0
        for index in range(first, last):
            total += logprobs[offsets[index]]
        return total

    def entries(self, first: int, last: int, texts: TokenTexts, flat: bool) -> SampleLogprobs:
        """Entries first .. last - 1 as a client gets them."""
        if not flat:
            return self.dicts(first, last, texts)
        columns = FlatLogprobs()
        self.flat(first, last, texts, columns)
        return columns


def prompt_logprobs(columns: LogprobColumnsMsg, texts: TokenTexts, flat: bool) -> PromptLogprobs:
    """A prompt's list: one entry per prompt token, the first None."""
    reader = LogprobReader(columns)
    if flat:
        result = FlatLogprobs([None])
        reader.flat(0, len(reader), texts, result)
        return result
    return [None, *reader.dicts(0, len(reader), texts)]


def extend(target: SampleLogprobs, more: SampleLogprobs) -> None:
    """Append the entries of `more` to `target`, which has the same form."""
    if isinstance(target, FlatLogprobs) and isinstance(more, FlatLogprobs):
        base = len(target.token_ids)
        target.token_ids += more.token_ids
        target.logprobs += more.logprobs
        target.ranks += more.ranks
        target.decoded_tokens += more.decoded_tokens
        target.starts.extend(base + start for start in more.starts[1:])
    elif isinstance(target, list) and isinstance(more, list):
        target += more
    else:
        raise TypeError("flat log-probabilities cannot be joined with lists of dicts")


def snapshot(entries: SampleLogprobs) -> SampleLogprobs:
    """A copy that later additions to `entries` do not reach."""
    if isinstance(entries, list):
        return entries[:]
    copy = FlatLogprobs()
    extend(copy, entries)
    return copy
