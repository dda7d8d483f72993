"""Building `LogprobColumns`: selections in a fixed order, and joining columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm.model_executor.backends.interface import Float32s, Int32s, LogprobColumns


def largest(values: Float32s, k: int) -> npt.NDArray[np.int64]:
    """Ids of the k largest values by (value descending, id ascending); sorts k of them, not all."""
    size = len(values)
    if k >= size:
        order: npt.NDArray[np.int64] = np.argsort(-values, kind="stable")
        return order
    if k == 1:
        return np.array([np.argmax(values)], np.int64)
    if k <= 0:
        return np.zeros(0, np.int64)
    threshold = np.partition(values, size - k)[size - k]
    above = np.flatnonzero(values > threshold)
    level = np.flatnonzero(values == threshold)[: k - len(above)]
    ids = np.concatenate((above, level))
    order = np.lexsort((ids, -values[ids]))
    return ids[order]


def own_and_largest(values: Float32s, tokens: npt.NDArray[Any], k: int) -> LogprobColumns:
    """Entries for `tokens`, all under the same `values` [V]: the token itself, then the k largest (k may exceed V).

    rank = 1 + number of ids with a greater value.
    """
    k = min(k, len(values))
    count = len(tokens)
    top = largest(values, k)
    ids = np.empty((count, k + 1), np.int32)
    ids[:, 0] = tokens
    ids[:, 1:] = top
    numbers = np.empty((count, k + 1), np.float32)
    own = values[tokens]
    numbers[:, 0] = own
    numbers[:, 1:] = values[top]
    if count <= 16:
        ranks = np.array([1 + np.count_nonzero(values > value) for value in own], np.int32)
    else:
        ascending = np.sort(values)
        ranks = (1 + len(values) - np.searchsorted(ascending, own, side="right")).astype(np.int32)
    offsets = np.arange(count + 1, dtype=np.int32) * np.int32(k + 1)
    return LogprobColumns(offsets, ids.reshape(-1), numbers.reshape(-1), ranks)


def empty_columns(entries: int) -> LogprobColumns:
    """Entries that asked for nothing."""
    return LogprobColumns(
        np.zeros(entries + 1, np.int32), np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(entries, np.int32)
    )


def concatenate(parts: Sequence[LogprobColumns]) -> LogprobColumns:
    """The entries of `parts`, one after the other."""
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return empty_columns(0)
    lengths = np.concatenate([np.diff(part.offsets) for part in parts])
    return LogprobColumns(
        offsets_of(lengths),
        np.concatenate([part.token_ids for part in parts]),
        np.concatenate([part.logprobs for part in parts]),
        np.concatenate([part.ranks for part in parts]),
    )


def offsets_of(lengths: npt.NDArray[Any]) -> Int32s:
    """[0, l0, l0 + l1, …]; raises OverflowError when the sum does not fit 32 bits."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    if offsets[-1] > np.iinfo(np.int32).max:
        raise OverflowError(f"{offsets[-1]} log-probabilities in one step are more than a message can hold")
    return offsets.astype(np.int32)
