"""From requests to the sampler's columns: what a request's params mean for its draws, and draws as arrays.

`DrawSettings` is read from the params once per request and shared by its children. `Draws` are some draws of a step,
in order: columns for everything that is a number, and a short list of those draws that edit logits. What a child must
remember from token to token (its output, for penalties and bad words; its count, for min_tokens) is read from its
tokens when it draws, so that a preemption, a resume or a fork cannot get it wrong; only logits processors have state.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm.model_executor.backends.interface import (
    Float32s,
    Int32s,
    Int64s,
    LogprobsMode,
    Ragged,
    SamplingBatch,
    UInt64s,
)
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.columns import offsets_of

EDITED_DRAWS_PER_CALL = 1024
"""Draws that edit logits carry lists and masks of their own: a step of more than this is cut into several calls."""

_NO_IDS = np.zeros(0, np.int32)
_NO_PENALTIES = (1.0, 0.0, 0.0)


class DrawSettings:
    """A request's params as the sampler takes them. Token ids past the vocabulary are left out: the front end refuses
    them where they matter, and elsewhere (stop ids) they can never be drawn."""

    __slots__ = (
        "allowed",
        "bad_words",
        "bias_ids",
        "bias_values",
        "constrained",
        "min_p",
        "min_tokens",
        "num_logprobs",
        "penalties",
        "prompt_ids",
        "stop_ids",
        "temperature",
        "top_k",
        "top_p",
        "unique_prompt_ids",
    )

    def __init__(
        self, params: SamplingParams, prompt_ids: Int32s, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        self.temperature = params.temperature
        self.top_k = max(params.top_k, 0)
        self.top_p = params.top_p
        self.min_p = params.min_p
        if params.logprobs is None:
            self.num_logprobs = -1
        else:
            self.num_logprobs = vocab_size if params.logprobs < 0 else min(params.logprobs, vocab_size)
        self.prompt_ids = prompt_ids
        self.penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        self.unique_prompt_ids = np.unique(prompt_ids) if self.penalties[0] != 1 else _NO_IDS
        bias = {i: value for i, value in (params.logit_bias or {}).items() if 0 <= i < vocab_size}
        self.bias_ids = np.fromiter(bias.keys(), np.int32, len(bias))
        self.bias_values = np.fromiter(bias.values(), np.float32, len(bias))
        self.allowed: npt.NDArray[np.uint32] | None = None
        if params.allowed_token_ids is not None:
            bits = np.zeros(mask_words(vocab_size) * 32, np.bool_)
            bits[_inside(params.allowed_token_ids, vocab_size)] = True
            self.allowed = np.packbits(bits, bitorder="little").view(np.uint32)
        self.constrained = params if params.constraint is not None else None
        """The params, if they have a constraint: every child has a grammar of its own, which lives elsewhere."""
        self.min_tokens = params.min_tokens
        stops = list(params.stop_token_ids or [])
        if not params.ignore_eos:
            stops += eos_token_ids
        self.stop_ids = np.unique(_inside(stops, vocab_size)) if params.min_tokens else _NO_IDS
        self.bad_words = [
            (np.array(word[:-1], np.int32), word[-1])
            for word in params.bad_words_token_ids or []
            if word and 0 <= word[-1] < vocab_size
        ]

    @property
    def edits(self) -> bool:
        """Whether every draw edits the logits (min_tokens aside, which does so for the first tokens only)."""
        return bool(self.penalties != _NO_PENALTIES or len(self.bias_ids) or self.allowed is not None or self.bad_words)

    def banned(self, output_ids: Int32s) -> Int32s:
        """Ids that must not come next after `output_ids`."""
        ids = self.stop_ids if len(output_ids) < self.min_tokens else _NO_IDS
        if self.bad_words:
            last = [
                token
                for prefix, token in self.bad_words
                if len(prefix) <= len(output_ids)
                and np.array_equal(prefix, output_ids[len(output_ids) - len(prefix) :])
            ]
            if last:
                ids = np.union1d(ids, np.array(last, np.int32)).astype(np.int32)
        return ids


@dataclass(slots=True)
class Edit:
    """Draw `draw` edits its logits."""

    draw: int
    settings: DrawSettings
    output_ids: Int32s
    processor: Callable[[Float32s], Float32s] | None
    mask: npt.NDArray[np.uint32] | None = None
    """Tokens that the child's grammar allows."""


@dataclass(slots=True)
class Draws:
    """S draws in order; `edits` ascend by draw."""

    rows: Int32s
    temperature: Float32s
    top_k: Int32s
    top_p: Float32s
    min_p: Float32s
    seeds: UInt64s
    positions: Int64s
    num_logprobs: Int32s
    edits: list[Edit] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.rows)

    @classmethod
    def repeat(cls, settings: DrawSettings, row: int, seeds: UInt64s) -> Draws:
        """First tokens of children with the same settings, drawn from one hidden row."""
        count = len(seeds)
        return cls(
            rows=np.full(count, row, np.int32),
            temperature=np.full(count, settings.temperature, np.float32),
            top_k=np.full(count, settings.top_k, np.int32),
            top_p=np.full(count, settings.top_p, np.float32),
            min_p=np.full(count, settings.min_p, np.float32),
            seeds=seeds,
            positions=np.zeros(count, np.int64),
            num_logprobs=np.full(count, settings.num_logprobs, np.int32),
        )

    @classmethod
    def join(cls, parts: Sequence[Draws]) -> Draws:
        if len(parts) == 1:
            return parts[0]
        edits = []
        starts = itertools.accumulate((len(part) for part in parts), initial=0)
        for start, part in zip(starts, parts, strict=False):
            edits += [replace(e, draw=start + e.draw) for e in part.edits]
        columns: list[Any] = [np.concatenate([getattr(part, name) for part in parts]) for name in _COLUMNS]
        joined = cls(*columns)
        joined.edits = edits
        return joined

    def batches(self, vocab_size: int, mode: LogprobsMode) -> Iterator[SamplingBatch]:
        """The draws for the backend: one batch, or several when many draws edit logits."""
        if len(self.edits) <= EDITED_DRAWS_PER_CALL:
            yield self._batch(slice(0, len(self)), self.edits, vocab_size, mode)
            return
        for first in range(0, len(self.edits), EDITED_DRAWS_PER_CALL):
            edits = self.edits[first : first + EDITED_DRAWS_PER_CALL]
            start = 0 if first == 0 else edits[0].draw
            following = first + EDITED_DRAWS_PER_CALL
            stop = self.edits[following].draw if following < len(self.edits) else len(self)
            moved = [replace(e, draw=e.draw - start) for e in edits]
            yield self._batch(slice(start, stop), moved, vocab_size, mode)

    def _batch(self, cut: slice, edits: list[Edit], vocab_size: int, mode: LogprobsMode) -> SamplingBatch:
        columns: list[Any] = [getattr(self, name)[cut] for name in _COLUMNS]
        batch = SamplingBatch(*columns)
        batch.logprobs_mode = mode
        if edits:
            _fill(batch, edits, vocab_size)
        return batch


_COLUMNS = ("rows", "temperature", "top_k", "top_p", "min_p", "seeds", "positions", "num_logprobs")


def mask_words(vocab_size: int) -> int:
    """32-bit words of an allowed mask."""
    return -(-vocab_size // 32)


def _fill(batch: SamplingBatch, edits: list[Edit], vocab_size: int) -> None:
    """The optional fields of `batch`, each only if a draw needs it."""
    size = batch.size
    banned = [edit.settings.banned(edit.output_ids) for edit in edits]
    draws = [edit.draw for edit in edits]
    settings = [edit.settings for edit in edits]
    if any(len(ids) for ids in banned):
        batch.banned = _ragged(size, draws, banned)
    if any(len(one.bias_ids) for one in settings):
        batch.bias = _ragged(size, draws, [one.bias_ids for one in settings])
        batch.bias.values = np.concatenate([one.bias_values for one in settings])
    if any(edit.settings.allowed is not None or edit.mask is not None for edit in edits):
        batch.allowed = np.full((size, mask_words(vocab_size)), 0xFFFFFFFF, np.uint32)
        for edit in edits:
            if edit.settings.allowed is not None:
                batch.allowed[edit.draw] = edit.settings.allowed
            if edit.mask is not None:
                batch.allowed[edit.draw] &= edit.mask
    if any(one.penalties != _NO_PENALTIES for one in settings):
        batch.penalties = np.tile(np.array(_NO_PENALTIES, np.float32), (size, 1))
        batch.penalties[draws] = [one.penalties for one in settings]
        outputs = [edit.output_ids if edit.settings.penalties != _NO_PENALTIES else _NO_IDS for edit in edits]
        batch.output_tokens = _ragged(size, draws, outputs)
        if any(one.penalties[0] != 1 for one in settings):
            batch.prompt_tokens = _ragged(size, draws, [one.unique_prompt_ids for one in settings])
    batch.processors = {edit.draw: edit.processor for edit in edits if edit.processor is not None}


def _ragged(size: int, draws: list[int], lists: list[Int32s]) -> Ragged:
    lengths = np.zeros(size, np.int64)
    lengths[draws] = [len(ids) for ids in lists]
    return Ragged(offsets_of(lengths), np.concatenate(lists).astype(np.int32, copy=False))


def _inside(ids: Sequence[int], vocab_size: int) -> Int32s:
    array = np.array(ids, np.int64)
    return array[(array >= 0) & (array < vocab_size)].astype(np.int32)
