"""The sampler in numpy: the definition that every kernel reproduces bit for bit.

All numbers are fp32 and every `*` and `+` rounds by itself (no FMA), unless said otherwise. For draw s let `l` be the
row logits[rows[s]].

0. Edits, in this order: ids outside the allowed mask and banned ids become -inf; l[id] += bias (list order, repeats add
   up); the logits processor gets a copy and returns the new logits; repetition penalty r != 1 for each id of the prompt
   or the output: l / r where l > 0, else l * r; then l -= frequency * count and l -= presence for the output's ids.
1. m = max l. NaN in l, or m = -inf, is an error of this draw alone: token 0, no log-probabilities, a text in `errors`.
   If m is +inf, the ids that have it count as 0 and all others as -inf. Greedy (temperature 0): the lowest id with
   l = m.
2. Weights in base 2: r = fp32(log2(e) / temperature in fp64), at most the largest fp32; y = (l - m) * r;
   w = 0 where y < -126; otherwise n = rint(y), f = y - n,
   w = 2**n * (((((C5 f + C4) f + C3) f + C2) f + C1) f + 1), Horner's order, 2**n by adding n to the exponent's bits.
   The maximum has weight 1 exactly.
3. min-p removes ids with w < min_p.
4. top-k keeps the k largest of the remaining ids by `l`, among equal ones the lowest ids: exactly k stay.
5. top-p works on integers, so that no order of additions matters: q = trunc(w * 2**44), Q = sum of the remaining,
   need = max(1, trunc(fp64(top_p) * fp64(Q))). Through the remaining ids by (w descending, id ascending), an id stays
   while the sum of q before it is < need: the smallest set whose mass reaches p.
6. The draw. Removed ids have w = 0. Block b holds ids 1024 b .. 1024 b + 1023, padded with zeros. Its sum: lane j of 16
   adds w[1024 b + 16 i + j] for i = 0 .. 63 in order, then lanes fold: j += j + 8, j += j + 4, j += j + 2, j += j + 1.
   c[b] = c[b - 1] + sum[b] in order. With u from Philox and t = u * c[last] (always < c[last]): the block is the first
   with c[b] > t; inside it, with t' = t - c[b - 1], the token is the first id whose running sum (from 0, in id order)
   exceeds t'. If rounding leaves none, it is the block's last id with w > 0.
7. Log-probabilities. A value v per id, by mode:
     raw_logits        l before step 0
     raw_logprobs      (l - m) - logS, l and m before step 0 (+inf as in step 1), S = c[last] of step 6 at temperature 1
     processed_logits  l after step 0 (greedy), or l / temperature, removed ids -inf
     processed_logprobs  greedy: as raw, of l after step 0; else (l - m) / temperature - logS with the draw's own S
   logS = fp32(log(fp64(S))). rank = 1 + number of ids with a greater v. The list after the own token is ordered by
   (v descending, id ascending). NaN in the raw row is an error of the draw too if raw log-probabilities are asked for.

Nothing of one draw depends on another: each is computed from its own row by one-dimensional operations whose order of
additions is written out here, so a draw is the same alone and in any crowd. Draws that follow each other with the same
row and parameters and no edits (a fork) share steps 1 to 6 up to the search.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm.model_executor.backends.interface import (
    Float32s,
    Int32s,
    LogprobColumns,
    LogprobsMode,
    Ragged,
    Sampled,
    SamplingBatch,
)
from vllm.v1.sample.columns import concatenate, empty_columns, largest, own_and_largest
from vllm.v1.sample.philox import uniforms

BLOCK = 1024
LANES = 16
LOG2_E = 1.4426950408889634
C1, C2, C3, C4, C5 = (
    np.float32(float.fromhex(text))
    for text in ("0x1.62e42ap-1", "0x1.ebf9bcp-3", "0x1.c6b752p-5", "0x1.3cea88p-7", "0x1.5bba14p-10")
)
ERROR_NAN = "logits contain NaN"
ERROR_NONE = "no token is allowed"

_F = np.float32
_FLOAT_MAX = float(np.finfo(np.float32).max)
_MASS = 2.0**44


class DrawError(Exception):
    """One draw cannot be made; its text goes into `Sampled.errors`."""


def sample(logits: Float32s, batch: SamplingBatch) -> Sampled:
    """Draw `batch.size` tokens; draw s uses logits[batch.rows[s]] of [rows, V], as the docstring above defines."""
    size = batch.size
    tokens = np.zeros(size, np.int32)
    errors: dict[int, str] = {}
    if not size:
        return Sampled(tokens, None)
    numbers = uniforms(batch.seeds, batch.positions)
    columns: list[LogprobColumns] = []
    raw: _RawRow | None = None
    last_key: tuple[Any, ...] | None = None
    last: _Distribution | None = None
    with np.errstate(all="ignore"):
        for first, stop, edited in _runs(batch):
            row, asked = int(batch.rows[first]), int(batch.num_logprobs[first])
            if raw is None or raw.row != row:
                raw = _RawRow(row, np.ascontiguousarray(logits[row], dtype=np.float32))
            settings = tuple(
                float(column[first]) for column in (batch.temperature, batch.top_k, batch.top_p, batch.min_p)
            )
            try:
                if edited:
                    distribution = _Distribution(_edit(raw.logits, batch, first), *settings)
                elif last is not None and last_key == (row, settings):
                    distribution = last
                else:
                    distribution = last = _Distribution(raw.logits, *settings)
                    last_key = (row, settings)
                drawn = distribution.draw(numbers[first:stop])
                if asked >= 0:
                    mode = batch.logprobs_mode
                    values = raw.values(mode) if mode.startswith("raw") else distribution.values(mode)
                    entries = own_and_largest(values, drawn, asked)
            except DrawError as error:
                errors.update(dict.fromkeys(range(first, stop), str(error)))
                columns.append(empty_columns(stop - first))
                continue
            tokens[first:stop] = drawn
            columns.append(entries if asked >= 0 else empty_columns(stop - first))
    wanted = bool((batch.num_logprobs >= 0).any())
    return Sampled(tokens, concatenate(columns) if wanted else None, errors)


def sample_in_tiles(logits_of: Callable[[Int32s], Float32s], batch: SamplingBatch, max_rows: int) -> Sampled:
    """`sample` with logits made `max_rows` distinct rows at a time: `logits_of(rows)` gives [len(rows), V].

    Draws that name one row one after the other (a fork) have their logits made once.
    """
    size = batch.size
    if not size:
        return Sampled(np.zeros(0, np.int32), None)
    starts = np.flatnonzero(np.r_[True, batch.rows[1:] != batch.rows[:-1]])
    edges = [int(edge) for edge in np.r_[starts[::max_rows], size]]
    parts, errors = [], {}
    for first, stop in itertools.pairwise(edges):
        rows, local = np.unique(batch.rows[first:stop], return_inverse=True)
        tile = replace(slice_batch(batch, first, stop), rows=local.astype(np.int32))
        part = sample(logits_of(rows), tile)
        errors.update({first + draw: text for draw, text in part.errors.items()})
        parts.append(part)
    if len(parts) == 1:
        return parts[0]
    lists = None
    if any(part.logprobs is not None for part in parts):
        lists = concatenate([part.logprobs or empty_columns(len(part.token_ids)) for part in parts])
    return Sampled(np.concatenate([part.token_ids for part in parts]), lists, errors)


def token_logprobs(
    logits: Float32s, targets: Int32s, num_logprobs: int, mode: LogprobsMode = "raw_logprobs"
) -> LogprobColumns:
    """Values of targets[i] under logits[i], with the `num_logprobs` largest: for prompt log-probabilities.

    A prompt is not processed, so that the processed modes mean the raw ones. A row with NaN gives NaN and rank 0.
    """
    mode = "raw_logits" if mode.endswith("logits") else "raw_logprobs"
    parts = []
    with np.errstate(all="ignore"):
        for row, target in enumerate(targets):
            token = np.array([target])
            try:
                values = _RawRow(row, np.ascontiguousarray(logits[row], dtype=np.float32)).values(mode)
                parts.append(own_and_largest(values, token, num_logprobs))
            except DrawError:
                k = min(num_logprobs, logits.shape[1])
                ids = np.concatenate((token, np.arange(k))).astype(np.int32)
                nan = np.full(k + 1, np.nan, np.float32)
                parts.append(LogprobColumns(np.array([0, k + 1], np.int32), ids, nan, np.zeros(1, np.int32)))
    return concatenate(parts)


def slice_batch(batch: SamplingBatch, first: int, stop: int) -> SamplingBatch:
    """Draws first .. stop - 1 as a batch of their own (views)."""
    cut = slice(first, stop)
    return SamplingBatch(
        rows=batch.rows[cut],
        temperature=batch.temperature[cut],
        top_k=batch.top_k[cut],
        top_p=batch.top_p[cut],
        min_p=batch.min_p[cut],
        seeds=batch.seeds[cut],
        positions=batch.positions[cut],
        num_logprobs=batch.num_logprobs[cut],
        allowed=None if batch.allowed is None else batch.allowed[cut],
        banned=_slice_ragged(batch.banned, first, stop),
        bias=_slice_ragged(batch.bias, first, stop),
        penalties=None if batch.penalties is None else batch.penalties[cut],
        output_tokens=_slice_ragged(batch.output_tokens, first, stop),
        prompt_tokens=_slice_ragged(batch.prompt_tokens, first, stop),
        processors={draw - first: call for draw, call in batch.processors.items() if first <= draw < stop},
        logprobs_mode=batch.logprobs_mode,
    )


def weights(logits: Float32s, maximum: np.float32, temperature: float = 1.0) -> Float32s:
    """Step 2: [V] logits to [V] weights, in a buffer padded with zeros to whole blocks."""
    size = len(logits)
    padded = np.zeros(-(-size // BLOCK) * BLOCK, np.float32)
    out = padded[:size]
    y = logits - maximum
    y *= _F(min(LOG2_E / temperature, _FLOAT_MAX))
    n = np.rint(y)
    f = y - n
    np.multiply(f, C5, out=out)
    for coefficient in (C4, C3, C2, C1):
        out += coefficient
        out *= f
    out += _F(1)
    dead = ~(y >= _F(-126))
    n[dead] = 0
    exponent = n.astype(np.int32)
    exponent <<= 23
    out.view(np.int32)[...] += exponent
    out[dead] = 0
    return padded


def block_sums(padded: Float32s) -> Float32s:
    """Step 6: sums of blocks of 1,024, 16 lanes and a fold, in the order that the docstring fixes."""
    lanes = np.ascontiguousarray(padded.reshape(-1, BLOCK // LANES, LANES).swapaxes(0, 1))
    total = lanes[0].copy()
    for part in lanes[1:]:
        total += part
    for half in (8, 4, 2, 1):
        total = total[:, :half] + total[:, half : 2 * half]
    sums: Float32s = total[:, 0]
    return sums


class _RawRow:
    """One row as the model gave it, with its values for the raw modes made when asked for."""

    def __init__(self, row: int, logits: Float32s) -> None:
        self.row = row
        self.logits = logits
        self._values: Float32s | None = None

    def values(self, mode: LogprobsMode) -> Float32s:
        if self._values is None:
            if mode == "raw_logits":
                if np.isnan(self.logits).any():
                    raise DrawError(ERROR_NAN)
                self._values = self.logits
            else:
                self._values = _Distribution(self.logits, 0.0).values("processed_logprobs")
        return self._values


@dataclass
class _Distribution:
    """What a draw chooses from: edited logits and the four settings. Raises DrawError when nothing can be drawn."""

    logits: Float32s
    temperature: float
    top_k: float = 0
    top_p: float = 1
    min_p: float = 0

    def __post_init__(self) -> None:
        self.maximum = self.logits.max()
        self.kept: npt.NDArray[np.bool_] | None = None
        if np.isnan(self.maximum):
            raise DrawError(ERROR_NAN)
        if self.maximum == -np.inf:
            raise DrawError(ERROR_NONE)
        self.finite = self.logits
        if self.maximum == np.inf:
            self.finite = np.where(self.logits == np.inf, _F(0), _F(-np.inf))
            self.maximum = _F(0)
        self._sums: Float32s | None = None
        self._weights: Float32s | None = None

    def draw(self, numbers: Float32s) -> npt.NDArray[np.int64]:
        """One token per number u."""
        if self.temperature == 0:
            return np.full(len(numbers), np.argmax(self.logits), np.int64)
        sums = self.cumulative()
        assert self._weights is not None
        target = numbers * sums[-1]
        blocks = np.searchsorted(sums, target, side="right")
        target = target - np.where(blocks > 0, sums[blocks - 1], _F(0))
        tokens = np.empty(len(numbers), np.int64)
        for block in np.unique(blocks):
            chosen = blocks == block
            inside = self._weights[block * BLOCK : (block + 1) * BLOCK]
            index = np.searchsorted(np.add.accumulate(inside), target[chosen], side="right")
            if (index == BLOCK).any():
                index = np.where(index == BLOCK, np.flatnonzero(inside)[-1], index)
            tokens[chosen] = block * BLOCK + index
        return tokens

    def cumulative(self) -> Float32s:
        """c of step 6, after steps 2 to 5."""
        if self._sums is None:
            self._weights = self._remaining(weights(self.finite, self.maximum, self.temperature or 1.0))
            self._sums = np.add.accumulate(block_sums(self._weights))
        return self._sums

    def values(self, mode: LogprobsMode) -> Float32s:
        """v of step 7 for the processed modes."""
        if mode == "processed_logits":
            values = self.logits if self.temperature == 0 else self.logits / _F(self.temperature)
            self.cumulative()
        else:
            log_total = _F(math.log(float(self.cumulative()[-1])))
            values = self.finite - self.maximum
            if self.temperature != 0:
                values /= _F(self.temperature)
            values -= log_total
        return values if self.kept is None else np.where(self.kept, values, _F(-np.inf))

    def _remaining(self, padded: Float32s) -> Float32s:
        """Steps 3 to 5: removed ids get weight 0, and `kept` says which stay (None for all)."""
        if self.temperature == 0:
            return padded
        size = len(self.finite)
        inside = padded[:size]
        kept: npt.NDArray[np.bool_] | None = None
        if self.min_p > 0:
            kept = inside >= _F(self.min_p)
        if 0 < self.top_k < size:
            logits = self.finite if kept is None else np.where(kept, self.finite, _F(-np.inf))
            k = int(self.top_k)
            threshold = np.partition(logits, size - k)[size - k]
            if threshold > -np.inf:  # otherwise fewer than k remain
                above = logits > threshold
                level = np.flatnonzero(logits == threshold)[: k - np.count_nonzero(above)]
                above[level] = True
                kept = above
        if kept is not None:
            inside[~kept] = 0
        if self.top_p < 1:
            ids = _nucleus(inside, self.top_p)
            kept = np.zeros(size, np.bool_)
            kept[ids] = True
            inside[~kept] = 0
        self.kept = kept
        return padded


def _nucleus(mass: Float32s, top_p: float) -> npt.NDArray[np.int64]:
    """Step 5: the ids that stay. Sorts as many of the largest as the nucleus needs."""
    whole = (mass.astype(np.float64) * _MASS).astype(np.int64)
    need = max(1, int(float(_F(top_p)) * float(whole.sum())))
    count = 1024
    while True:
        ids = largest(mass, count)
        sums = np.cumsum(whole[ids])
        if sums[-1] >= need or count >= len(mass):
            return ids[: int(np.searchsorted(sums, need, side="left")) + 1]
        count *= 8


def edited_draws(batch: SamplingBatch) -> npt.NDArray[np.bool_]:
    """[S]: the draws whose logits are changed before the distribution is made."""
    edited = np.zeros(batch.size, np.bool_)
    if batch.allowed is not None:
        edited[:] = True
    for ragged in (batch.banned, batch.bias):
        if ragged is not None:
            edited |= np.diff(ragged.offsets) > 0
    if batch.penalties is not None:
        edited |= (batch.penalties != np.array([1, 0, 0], np.float32)).any(axis=1)
    for draw in batch.processors:
        edited[draw] = True
    return edited


def _runs(batch: SamplingBatch) -> list[tuple[int, int, bool]]:
    """(first, stop, edited): draws that may share their work; an edited one stands alone."""
    edited = edited_draws(batch)
    same = ~(edited[1:] | edited[:-1])
    for column in (batch.rows, batch.temperature, batch.top_k, batch.top_p, batch.min_p, batch.num_logprobs):
        same &= column[1:] == column[:-1]
    starts = np.flatnonzero(np.r_[True, ~same]).tolist()
    return [(first, stop, bool(edited[first])) for first, stop in zip(starts, [*starts[1:], batch.size], strict=True)]


def edit_and_process(raw: Float32s, batch: SamplingBatch, draw: int) -> Float32s:
    """Step 0 up to the logits processor, on a copy. Raises DrawError when the processor fails."""
    logits = raw.copy()
    if batch.allowed is not None:
        bits = np.unpackbits(np.ascontiguousarray(batch.allowed[draw]).view(np.uint8), bitorder="little")
        logits[bits[: len(logits)] == 0] = -np.inf
    if batch.banned is not None:
        logits[_ids(batch.banned, draw)] = -np.inf
    if batch.bias is not None:
        assert batch.bias.values is not None
        first, stop = batch.bias.offsets[draw], batch.bias.offsets[draw + 1]
        np.add.at(logits, batch.bias.token_ids[first:stop], batch.bias.values[first:stop])
    processor = batch.processors.get(draw)
    return logits if processor is None else _process(processor, logits)


def _edit(raw: Float32s, batch: SamplingBatch, draw: int) -> Float32s:
    """Step 0 on a copy."""
    logits = edit_and_process(raw, batch, draw)
    if batch.penalties is not None:
        repetition, frequency, presence = batch.penalties[draw]
        output, counts = np.unique(_ids(batch.output_tokens, draw), return_counts=True)
        if repetition != 1:
            ids = np.union1d(_ids(batch.prompt_tokens, draw), output)
            old = logits[ids]
            logits[ids] = np.where(old > 0, old / repetition, old * repetition)
        if frequency != 0:
            logits[output] -= frequency * counts.astype(np.float32)
        if presence != 0:
            logits[output] -= presence
    return logits


def _process(processor: Callable[[Float32s], Float32s], logits: Float32s) -> Float32s:
    shape = logits.shape
    try:
        result = np.array(processor(logits), np.float32)
    except Exception as error:
        raise DrawError(f"logits processor raised {type(error).__name__}: {error}") from error
    if result.shape != shape:
        raise DrawError(f"logits processor returned shape {result.shape} instead of {shape}")
    return result


def _ids(ragged: Ragged | None, draw: int) -> Int32s:
    if ragged is None:
        return np.zeros(0, np.int32)
    ids: Int32s = ragged.token_ids[ragged.offsets[draw] : ragged.offsets[draw + 1]]
    return ids


def _slice_ragged(ragged: Ragged | None, first: int, stop: int) -> Ragged | None:
    if ragged is None:
        return None
    begin, end = ragged.offsets[first], ragged.offsets[stop]
    return Ragged(
        ragged.offsets[first : stop + 1] - begin,
        ragged.token_ids[begin:end],
        None if ragged.values is None else ragged.values[begin:end],
    )
