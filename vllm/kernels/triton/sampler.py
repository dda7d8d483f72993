"""Sampling on the device: `SamplingBatch` in, `Sampled` out, and one wait for the device per call.

Draws become *distributions* (one set of settings on one row of logits; a fork is one distribution with many draws), the
kernels of `sampling_kernels` make each one's weights, and every draw is a search in them. Results stay on the device
(`Pending`) until `result` fetches them. Only logits processors, which are Python, fetch rows in between.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vllm.kernels.triton import sampling_kernels as kernels
from vllm.kernels.triton.elementwise import EXACT
from vllm.kernels.triton.runtime import INTERPRETED, power_of_2, to_device
from vllm.model_executor.backends.interface import (
    Int32s,
    LogprobColumns,
    LogprobsMode,
    Ragged,
    Sampled,
    SamplingBatch,
)
from vllm.v1.sample.columns import concatenate, empty_columns, offsets_of
from vllm.v1.sample.reference import ERROR_NAN, ERROR_NONE, LOG2_E, edited_draws, slice_batch

LogitsOf = Callable[[Int32s], Tensor]
"""Hidden rows -> logits [len(rows), V] (fp32, on the device)."""
_BLOCK = 1024
_LONG = 8192  # ids that a program which walks over a row takes at once
_LANES = 256 if INTERPRETED else 32
_FLOAT_MAX = float(np.finfo(np.float32).max)
_IS_NAN = 1
_ERRORS = {1: ERROR_NAN, 2: ERROR_NONE}


def sample(logits_of: LogitsOf, batch: SamplingBatch, max_rows: int) -> Sampled:
    """All draws, in tiles of at most `max_rows` distributions."""
    return submit(logits_of, batch, max_rows).result()


def submit(logits_of: LogitsOf, batch: SamplingBatch, max_rows: int) -> Pending:
    """Starts all draws; nothing waits for the device, unless a draw has a logits processor."""
    pending = Pending(batch.size)
    first = 0
    for stop in _tile_ends(batch, max_rows):
        pending.tiles.append(_Tile(logits_of, slice_batch(batch, first, stop)))
        first = stop
    return pending


@dataclass
class Pending:
    """Draws whose results are still on the device."""

    size: int
    tiles: list[_Tile] = field(default_factory=list)

    @property
    def tokens(self) -> Tensor:
        """[S] int32 on the device, to be the next step's input."""
        return torch.cat([tile.tokens for tile in self.tiles])

    def result(self) -> Sampled:
        """Waits for the device."""
        if not self.size:
            return Sampled(np.zeros(0, np.int32), None)
        parts = [tile.result() for tile in self.tiles]
        errors: dict[int, str] = {}
        start = 0
        for part in parts:
            errors.update({start + draw: text for draw, text in part.errors.items()})
            start += len(part.token_ids)
        logprobs = None
        if any(part.logprobs is not None for part in parts):
            logprobs = concatenate([part.logprobs or empty_columns(len(part.token_ids)) for part in parts])
        return Sampled(np.concatenate([part.token_ids for part in parts]), logprobs, errors)


def token_logprobs(
    logits_of: LogitsOf,
    rows: Int32s,
    targets: Int32s,
    num_logprobs: int,
    mode: LogprobsMode,
    vocab_size: int,
    max_rows: int,
) -> LogprobColumns:
    """Values of targets[i] under row rows[i]; see `reference.token_logprobs`."""
    raw: LogprobsMode = "raw_logits" if mode.endswith("logits") else "raw_logprobs"
    k = min(num_logprobs, vocab_size)
    parts = []
    for first in range(0, max(len(rows), 1), max_rows):
        part = slice(first, first + max_rows)
        logits = logits_of(rows[part])
        count = len(logits)
        if not count:
            return empty_columns(0)
        values, status = _raw_values(logits, raw)
        tokens = to_device(targets[part], logits.device)
        everyone = torch.arange(count, dtype=torch.int32, device=logits.device)
        own, ranks, ids, top = _entries(values, everyone, tokens, k)
        bad = np.flatnonzero(status.cpu().numpy() != 0)
        columns = _columns(np.full(count, k, np.int32), targets[part], own, ranks, ids, top, np.arange(count))
        for row in bad.tolist():
            entry = slice(row * (k + 1) + 1, (row + 1) * (k + 1))
            columns.token_ids[entry] = np.arange(k)
            columns.logprobs[row * (k + 1) : (row + 1) * (k + 1)] = np.nan
            columns.ranks[row] = 0
        parts.append(columns)
    return concatenate(parts)


class _Tile:
    """Some draws. `tokens` [S] stands on the device."""

    def __init__(self, logits_of: LogitsOf, batch: SamplingBatch) -> None:
        self._batch = batch
        rows, row_of = np.unique(batch.rows, return_inverse=True)
        raw = logits_of(rows.astype(np.int32))
        self.device = raw.device
        starts, edited = _distributions(batch)
        count = len(starts)
        self._draws = np.repeat(np.arange(count, dtype=np.int32), np.diff(np.r_[starts, batch.size]))
        self._raw_row = row_of.reshape(-1).astype(np.int32)[starts]  # of each distribution
        self._errors: dict[int, str] = {}  # by distribution
        logits, row = raw, self._tensor(self._raw_row)
        if edited.any():
            logits = raw.index_select(0, row)
            row = torch.arange(count, dtype=torch.int32, device=self.device)
            self._edit(logits, starts, edited)
        temperature = batch.temperature[starts]
        self._build(logits, row, starts, temperature)
        self._logprobs = self._start_logprobs(raw, logits, row, temperature)

    def _tensor(self, array: npt.NDArray[Any]) -> Tensor:
        return to_device(array, self.device)

    # Step 0

    def _edit(self, logits: Tensor, starts: npt.NDArray[np.int64], edited: npt.NDArray[np.bool_]) -> None:
        """Edits logits [D, V] in place. An edited draw is a distribution of its own; the others have no lists."""
        batch, (count, size) = self._batch, logits.shape
        grid = (count, -(-size // _BLOCK))
        if batch.allowed is not None:
            words = self._tensor(np.ascontiguousarray(batch.allowed[starts]).view(np.int32))
            kernels.edit_mask[grid](logits, words, size, words.shape[1], _BLOCK)
        if batch.banned is not None:
            offsets, ids = self._lists(batch.banned, starts, edited)
            kernels.edit_banned[(count,)](logits, offsets, ids, size, 64, num_warps=1)
        if batch.bias is not None:
            offsets, ids = self._lists(batch.bias, starts, edited)
            assert batch.bias.values is not None
            kernels.edit_bias[(count,)](
                logits, offsets, ids, self._tensor(batch.bias.values), size, num_warps=1, **EXACT
            )
        for draw, processor in batch.processors.items():
            d = int(self._draws[draw])
            changed = self._process(processor, logits[d].cpu().numpy(), d)
            if changed is not None:
                logits[d] = self._tensor(changed)
        if batch.penalties is not None:
            prompt, output = (torch.zeros(count, size, dtype=torch.int32, device=self.device) for _ in range(2))
            for counts, ragged in ((prompt, batch.prompt_tokens), (output, batch.output_tokens)):
                if ragged is not None:
                    offsets, ids = self._lists(ragged, starts, edited)
                    kernels.count_ids[(count,)](counts, offsets, ids, size, 64, num_warps=1)
            penalties = self._tensor(np.ascontiguousarray(batch.penalties[starts]))
            kernels.penalize[grid](logits, penalties, prompt, output, size, _BLOCK, **EXACT)

    def _lists(
        self, ragged: Ragged, starts: npt.NDArray[np.int64], edited: npt.NDArray[np.bool_]
    ) -> tuple[Tensor, Tensor]:
        """Offsets by distribution, and ids. A draw that is not edited has an empty list, and so have those after it."""
        offsets = np.append(ragged.offsets[starts], ragged.offsets[-1]).astype(np.int32)
        assert not np.diff(offsets)[~edited].any()
        ids = ragged.token_ids if len(ragged.token_ids) else np.zeros(1, np.int32)
        return self._tensor(offsets), self._tensor(ids)

    def _process(
        self, processor: Callable[..., Any], logits: npt.NDArray[np.float32], d: int
    ) -> npt.NDArray[np.float32] | None:
        shape = logits.shape
        try:
            result = np.array(processor(logits.copy()), np.float32)
        except Exception as error:  # noqa: BLE001 - whatever a caller's function raises ends its own draw alone
            self._errors[d] = f"logits processor raised {type(error).__name__}: {error}"
            return None
        if result.shape != shape:
            self._errors[d] = f"logits processor returned shape {result.shape} instead of {shape}"
            return None
        return result

    # Steps 1 to 6

    def _build(
        self, logits: Tensor, row: Tensor, starts: npt.NDArray[np.int64], temperature: npt.NDArray[np.float32]
    ) -> None:
        batch = self._batch
        drawn = temperature != 0  # settings of a greedy draw do not count
        top_k = np.where(drawn, batch.top_k[starts], 0).astype(np.int32)
        top_p = np.where(drawn, batch.top_p[starts], 1).astype(np.float32)
        min_p = np.where(drawn, batch.min_p[starts], 0).astype(np.float32)
        self._weights = _Weights(logits, row, temperature, top_k, top_p, min_p)
        weights, count = self._weights, batch.size
        if not drawn.any():
            self.tokens = weights.argmax[self._tensor(self._draws)]
            return
        self.tokens = torch.empty(count, dtype=torch.int32, device=self.device)
        kernels.search[(-(-count // _LANES),)](
            weights.weights, weights.sums, weights.argmax, self._tensor((~drawn).astype(np.int32)),
            self._tensor(self._draws), self._tensor(batch.seeds.view(np.int64)), self._tensor(batch.positions),
            self.tokens, count, min(logits.shape[1], _BLOCK), weights.weights.shape[1], weights.sums.shape[1], _LANES,
            num_warps=1, **EXACT,
        )  # fmt: skip

    # Step 7

    def _start_logprobs(
        self, raw: Tensor, logits: Tensor, row: Tensor, temperature: npt.NDArray[np.float32]
    ) -> tuple[Tensor, ...] | None:
        """(own, ranks, ids, top, status of the raw rows) on the device, for the draws that asked."""
        batch = self._batch
        asked = np.flatnonzero(batch.num_logprobs >= 0)
        if not len(asked):
            return None
        mode = batch.logprobs_mode
        chosen = self._draws[asked]
        if mode.startswith("raw"):
            values, status = _raw_values(raw, mode)
            value_row = self._raw_row[chosen]
        else:
            values, status = self._processed_values(logits, row, temperature, mode), self._weights.status
            value_row = chosen
        most = min(int(batch.num_logprobs.max()), logits.shape[1])
        entries = _entries(values, self._tensor(value_row), self.tokens[self._tensor(asked)], most)
        return (*entries, status[self._tensor(value_row.astype(np.int64))])

    def _processed_values(
        self, logits: Tensor, row: Tensor, temperature: npt.NDArray[np.float32], mode: LogprobsMode
    ) -> Tensor:
        weights = self._weights
        heat = self._tensor(np.where(temperature == 0, np.float32(1), temperature))[:, None]  # x / 1 is x
        own = logits.index_select(0, row)
        if mode == "processed_logits":
            values = own / heat
        else:
            values = (_finite(own, weights.maximum) - _origin(weights.maximum)) / heat - weights.log_totals()
        removed = weights.weights[:, : own.shape[1]] < 0
        return values.masked_fill_(removed, -torch.inf)

    def result(self) -> Sampled:
        batch = self._batch
        tokens = self.tokens.cpu().numpy()
        status = self._weights.status.cpu().numpy()[self._draws]
        errors = {int(s): _ERRORS[int(status[s])] for s in np.flatnonzero(status)}
        errors.update({int(s): text for d, text in self._errors.items() for s in np.flatnonzero(self._draws == d)})
        logprobs = None
        if self._logprobs is not None:
            own, ranks, ids, top, raw_status = self._logprobs
            asked = np.flatnonzero(batch.num_logprobs >= 0)
            for s in asked[raw_status.cpu().numpy() == _IS_NAN].tolist():
                errors.setdefault(s, ERROR_NAN)
            for s in asked[raw_status.cpu().numpy() == 2].tolist():
                if batch.logprobs_mode != "raw_logits":
                    errors.setdefault(s, ERROR_NONE)
            wanted = np.minimum(batch.num_logprobs, self._weights.vocab_size).astype(np.int32)
            wanted[list(errors)] = -1
            place = np.zeros(batch.size, np.int64)
            place[asked] = np.arange(len(asked))
            logprobs = _columns(wanted, tokens, own, ranks, ids, top, place)
        if errors:
            tokens = tokens.copy()
            tokens[list(errors)] = 0
        return Sampled(tokens, logprobs, errors)


class _Weights:
    """Steps 1 to 6 for D distributions: distribution d has row `row[d]` of the logits."""

    def __init__(
        self,
        logits: Tensor,
        row: Tensor,
        temperature: npt.NDArray[np.float32],
        top_k: npt.NDArray[np.int32],
        top_p: npt.NDArray[np.float32],
        min_p: npt.NDArray[np.float32],
    ) -> None:
        count, size, device = len(row), logits.shape[1], logits.device
        self.vocab_size = size
        blocks = -(-size // _BLOCK)
        padded = blocks * _BLOCK
        self.maximum = torch.empty(count, device=device)
        self.argmax = torch.empty(count, dtype=torch.int32, device=device)
        self.status = torch.empty_like(self.argmax)
        self.weights = torch.empty(count, padded, device=device)
        self.sums = torch.empty(count, blocks, device=device)
        # In fp64, from the fp32 temperature, as the reference does it.
        heat = np.where(temperature == 0, 1.0, temperature.astype(np.float64))
        scale = np.minimum(LOG2_E / heat, _FLOAT_MAX).astype(np.float32)
        long = min(_LONG, max(16, power_of_2(size)))
        kernels.row_stats[(count,)](logits, row, self.maximum, self.argmax, self.status, size, long, num_warps=8)
        step = padded if INTERPRETED and power_of_2(padded) == padded else _BLOCK
        kernels.weigh[(count, padded // step)](
            logits,
            row,
            self.maximum,
            to_device(scale, device),
            to_device(min_p, device),
            self.weights,
            size,
            padded,
            step,
            **EXACT,
        )
        if ((top_k > 0) & (top_k < size)).any():
            kernels.keep_top_k[(count,)](
                logits, row, self.maximum, to_device(top_k, device), self.weights, size, padded, long, num_warps=8
            )
        if (top_p < 1).any():
            kernels.keep_top_p[(count,)](
                to_device(top_p, device), self.weights, size, padded, long, num_warps=8, **EXACT
            )
        several = min(8, power_of_2(blocks))
        kernels.sum_blocks[(count, -(-blocks // several))](
            self.weights, self.sums, padded, blocks, several, num_warps=4, **EXACT
        )
        kernels.accumulate[(-(-count // _LANES),)](self.sums, count, blocks, _LANES, num_warps=1, **EXACT)

    def log_totals(self) -> Tensor:
        """logS [D, 1]."""
        return self.sums[:, -1:].double().log().float()


def _finite(logits: Tensor, maximum: Tensor) -> Tensor:
    """Step 1's case of a maximum of +inf."""
    infinite = torch.where(logits == torch.inf, 0.0, -torch.inf)
    return torch.where(maximum[:, None] == torch.inf, infinite, logits)


def _origin(maximum: Tensor) -> Tensor:
    return torch.where(maximum == torch.inf, 0.0, maximum)[:, None]


def _raw_values(logits: Tensor, mode: LogprobsMode) -> tuple[Tensor, Tensor]:
    """v of step 7 for the raw modes [R, V], and each row's status."""
    count = len(logits)
    rows = torch.arange(count, dtype=torch.int32, device=logits.device)
    one = np.ones(count, np.float32)
    weights = _Weights(logits, rows, one, np.zeros(count, np.int32), one, np.zeros(count, np.float32))
    if mode == "raw_logits":
        return logits, weights.status
    return _finite(logits, weights.maximum) - _origin(weights.maximum) - weights.log_totals(), weights.status


def _entries(values: Tensor, rows: Tensor, tokens: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of each (row, token): its value and rank [E], and the ids and values of the k largest [E, k]."""
    size = values.shape[1]
    values = values.contiguous()
    own = torch.empty(len(rows), device=values.device)
    ranks = torch.empty(len(rows), dtype=torch.int32, device=values.device)
    long = min(_LONG, max(16, power_of_2(size)))
    kernels.rank[(len(rows),)](values, rows, tokens.to(torch.int32), own, ranks, size, long, num_warps=4)
    # The order (value descending, id ascending) as one integer per id, so that no two are equal.
    bits = torch.where(values == 0, 0.0, values).view(torch.int32).long()
    keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    ids = torch.arange(size, device=values.device)
    keys = keys * 2**31 + (2**31 - 1 - ids)
    best = keys.topk(k, dim=1).indices
    top = values.gather(1, best)
    where = rows.long()
    return own, ranks, best.to(torch.int32)[where], top[where]


def _columns(
    wanted: Int32s,
    tokens: Int32s,
    own: Tensor,
    ranks: Tensor,
    ids: Tensor,
    top: Tensor,
    place: npt.NDArray[np.int64],
) -> LogprobColumns:
    """Columns of len(wanted) entries: wanted[e] besides the own token (-1: an empty entry), from row place[e]."""
    own_host, ranks_host, ids_host, top_host = (part.cpu().numpy() for part in (own, ranks, ids, top))
    lengths = wanted + 1
    offsets = offsets_of(lengths)
    filled = lengths > 0
    starts = offsets[:-1][filled]
    token_ids = np.empty(offsets[-1], np.int32)
    logprobs = np.empty(offsets[-1], np.float32)
    rows = place[filled]
    token_ids[starts] = tokens[filled]
    logprobs[starts] = own_host[rows]
    for length in np.unique(wanted[filled]).tolist():
        same = wanted[filled] == length
        target = starts[same][:, None] + 1 + np.arange(length)
        token_ids[target] = ids_host[rows[same], :length]
        logprobs[target] = top_host[rows[same], :length]
    entry_ranks = np.zeros(len(wanted), np.int32)
    entry_ranks[filled] = ranks_host[rows]
    return LogprobColumns(offsets, token_ids, logprobs, entry_ranks)


def _distributions(batch: SamplingBatch) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """First draw of each distribution (draws that follow each other with one row and settings), and which are edited;
    an edited draw stands alone."""
    edited = edited_draws(batch)
    same = ~(edited[1:] | edited[:-1])
    for column in (batch.rows, batch.temperature, batch.top_k, batch.top_p, batch.min_p):
        same &= column[1:] == column[:-1]
    starts = np.flatnonzero(np.r_[True, ~same])
    return starts, edited[starts]


def _tile_ends(batch: SamplingBatch, max_rows: int) -> list[int]:
    if not batch.size:
        return []
    starts, _ = _distributions(batch)
    return [int(edge) for edge in np.r_[starts[max_rows::max_rows], batch.size]]
