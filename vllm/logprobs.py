"""Log-probabilities as clients read them.

A position's entry is a dict from token id to `Logprob`: the sampled (or the prompt's) token first, then the most likely
ones in order. `FlatLogprobs` keeps the same content in flat columns and makes the dicts when they are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import overload

import msgspec


class Logprob(msgspec.Struct, gc=False):
    """Log-probability of one token at one position."""

    logprob: float
    rank: int | None = None
    """1 for the most likely token of the vocabulary."""
    decoded_token: str | None = None


LogprobsOnePosition = dict[int, Logprob]


class FlatLogprobs(Sequence[LogprobsOnePosition | None]):
    """Entries of many positions in flat columns; entry i is columns[starts[i] : starts[i + 1]].

    Reads like a list of dicts (each made anew when read); an empty entry reads as None (the first of a prompt's).
    For many positions this keeps 5 lists alive instead of a dict and several objects per position.
    """

    __slots__ = ("decoded_tokens", "logprobs", "ranks", "starts", "token_ids")

    def __init__(self, entries: Iterable[LogprobsOnePosition | None] = ()) -> None:
        self.starts: list[int] = [0]
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.ranks: list[int | None] = []
        self.decoded_tokens: list[str | None] = []
        for entry in entries:
            self.append(entry)

    def append(self, entry: LogprobsOnePosition | None) -> None:
        """Add one position."""
        if entry:
            self.token_ids.extend(entry)
            for value in entry.values():
                self.logprobs.append(value.logprob)
                self.ranks.append(value.rank)
                self.decoded_tokens.append(value.decoded_token)
        self.starts.append(len(self.token_ids))

    def append_columns(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        ranks: Sequence[int | None],
        decoded_tokens: Sequence[str | None],
    ) -> None:
        """Add one position without making a dict; the four have one length, and no token id stands twice."""
        self.token_ids.extend(token_ids)
        self.logprobs.extend(logprobs)
        self.ranks.extend(ranks)
        self.decoded_tokens.extend(decoded_tokens)
        self.starts.append(len(self.token_ids))

    def __len__(self) -> int:
        return len(self.starts) - 1

    @overload
    def __getitem__(self, index: int) -> LogprobsOnePosition | None: ...
    @overload
    def __getitem__(self, index: slice) -> FlatLogprobs: ...
    def __getitem__(self, index: int | slice) -> LogprobsOnePosition | FlatLogprobs | None:
        if isinstance(index, slice):
            return FlatLogprobs(self[position] for position in range(*index.indices(len(self))))
        if index < 0:
            index += len(self)
        if not 0 <= index < len(self):
            raise IndexError("position out of range")
        first, last = self.starts[index], self.starts[index + 1]
        if first == last:
            return None
        return {
            self.token_ids[at]: Logprob(self.logprobs[at], self.ranks[at], self.decoded_tokens[at])
            for at in range(first, last)
        }

    def __eq__(self, other: object) -> bool:
        if isinstance(other, (FlatLogprobs, list, tuple)):
            return len(self) == len(other) and all(mine == theirs for mine, theirs in zip(self, other, strict=True))
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"FlatLogprobs({len(self)} positions, {len(self.token_ids)} entries)"


SampleLogprobs = list[LogprobsOnePosition] | FlatLogprobs
"""One entry per generated token."""
PromptLogprobs = list[LogprobsOnePosition | None] | FlatLogprobs
"""One entry per prompt token; the first is None."""
