"""Builds the message to the front ends from a step's draws and from what ended between steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from vllm.model_executor.backends.interface import LogprobColumns
from vllm.v1.core.request import Child, LogprobStore
from vllm.v1.messages import ChildTimes, EngineCoreOutputs, FinishReason, LogprobColumnsMsg, SchedulerStats

Times = tuple[float, float, float, int]
Int32s = npt.NDArray[np.int32]


@dataclass(slots=True)
class Singles:
    """Streaming children that got one token in the step. `entries[i]` is the draw that child i's token was."""

    handles: npt.NDArray[np.int64]
    tokens: Int32s
    reasons: npt.NDArray[np.uint8]
    stop_reasons: npt.NDArray[np.int64]
    num_cached: Int32s
    entries: npt.NDArray[np.intp]

    @classmethod
    def join(cls, first: Singles, second: Singles) -> Singles:
        if not len(second.handles):
            return first
        if not len(first.handles):
            return second
        return cls(
            np.concatenate((first.handles, second.handles)),
            np.concatenate((first.tokens, second.tokens)),
            np.concatenate((first.reasons, second.reasons)),
            np.concatenate((first.stop_reasons, second.stop_reasons)),
            np.concatenate((first.num_cached, second.num_cached)),
            np.concatenate((first.entries, second.entries)),
        )

    def where(self, mask: npt.NDArray[np.bool_]) -> Singles:
        return Singles(
            self.handles[mask],
            self.tokens[mask],
            self.reasons[mask],
            self.stop_reasons[mask],
            self.num_cached[mask],
            self.entries[mask],
        )


NO_SINGLES = Singles(
    np.empty(0, np.int64),
    np.empty(0, np.int32),
    np.empty(0, np.uint8),
    np.empty(0, np.int64),
    np.empty(0, np.int32),
    np.empty(0, np.intp),
)


@dataclass(slots=True)
class Bundle:
    """A child that ends, with all its tokens that have not been reported."""

    child: Child
    reason: FinishReason
    stop_reason: int
    tokens: Int32s
    logprobs: LogprobStore | None
    times: Times


@dataclass(slots=True)
class OutputBuilder:
    """Collects between two messages; a handle stands at most once in a message."""

    singles: Singles = field(default_factory=lambda: NO_SINGLES)
    single_times: dict[int, Times] = field(default_factory=dict)
    """By index, of the singles that ended."""
    bundles: list[Bundle] = field(default_factory=list)
    errors: dict[int, str] = field(default_factory=dict)
    first_token_handles: list[int] = field(default_factory=list)
    new_tokens: int = 0
    carried: dict[int, LogprobColumnsMsg] = field(default_factory=dict)
    """Prompt log-probabilities, by the handle with whose first report they go out. Outlives a message."""

    @property
    def has_news(self) -> bool:
        return bool(len(self.singles.handles) or self.bundles or self.new_tokens)

    def end(self, child: Child, reason: FinishReason, stop_reason: int = -1) -> None:
        """Report the end of a child that is not among the singles that end."""
        if child.request.stream:
            index = np.flatnonzero(self.singles.handles == child.handle)
            if index.size:  # it got a token in this step, and is ended for another reason than that
                self.singles.reasons[index[0]] = reason
                self.single_times[int(index[0])] = times_of(child)
                return
            tokens = np.empty(0, np.int32)
        else:
            tokens = np.array(child.tokens, np.int32)
        self.bundles.append(Bundle(child, reason, stop_reason, tokens, child.logprobs, times_of(child)))

    def build(
        self, logprobs: LogprobColumns | None, stats: SchedulerStats | None, now: float
    ) -> EngineCoreOutputs | None:
        """The message, and a fresh start; None when there is nothing to tell. `logprobs`: of the step's draws."""
        singles, bundles = self.singles, self.bundles
        if not self.has_news:
            return None
        handles, tokens, reasons, stops, cached = (
            singles.handles,
            singles.tokens,
            singles.reasons,
            singles.stop_reasons,
            singles.num_cached,
        )
        offsets = np.arange(len(handles) + 1, dtype=np.int32)
        if bundles:
            ends = np.cumsum([len(b.tokens) for b in bundles], dtype=np.int32) + offsets[-1]
            offsets = np.concatenate((offsets, ends.astype(np.int32)))
            handles = np.concatenate((handles, np.array([b.child.handle for b in bundles], np.int64)))
            tokens = np.concatenate((tokens, *[b.tokens for b in bundles]))
            reasons = np.concatenate((reasons, np.array([b.reason for b in bundles], np.uint8)))
            stops = np.concatenate((stops, np.array([b.stop_reason for b in bundles], np.int64)))
            cached = np.concatenate((cached, np.array([b.child.request.num_cached for b in bundles], np.int32)))
        prompt_logprobs: dict[int, LogprobColumnsMsg] = {}
        if self.carried:
            for handle in set(self.carried).intersection(handles.tolist()):
                prompt_logprobs[handle] = self.carried.pop(handle)
        message = EngineCoreOutputs(
            handles=handles,
            offsets=offsets,
            token_ids=tokens,
            finish_reasons=reasons,
            stop_reasons=stops,
            num_cached_tokens=cached,
            logprobs=self._logprobs(logprobs),
            finished_times=self._times(),
            prompt_logprobs=prompt_logprobs,
            errors=self.errors,
            first_token_handles=np.array(self.first_token_handles, np.int64) if self.first_token_handles else None,
            new_tokens=self.new_tokens,
            stats=stats,
            timestamp=now,
        )
        self.singles = NO_SINGLES
        self.single_times = {}
        self.bundles = []
        self.errors = {}
        self.first_token_handles = []
        self.new_tokens = 0
        return message

    def _times(self) -> ChildTimes | None:
        rows = [self.single_times[index] for index in sorted(self.single_times)]
        rows.extend(bundle.times for bundle in self.bundles)
        if not rows:
            return None
        scheduled, first, last, preemptions = zip(*rows, strict=True)
        return ChildTimes(
            scheduled=np.array(scheduled, np.float64),
            first_token=np.array(first, np.float64),
            last_token=np.array(last, np.float64),
            num_preemptions=np.array(preemptions, np.int32),
        )

    def _logprobs(self, drawn: LogprobColumns | None) -> LogprobColumnsMsg | None:
        parts: list[LogprobColumnsMsg] = []
        if len(self.singles.entries):
            if drawn is not None:
                parts.append(_pick(drawn, self.singles.entries))
            else:
                parts.append(_no_entries(len(self.singles.entries)))
        for bundle in self.bundles:
            store = bundle.logprobs
            if store is None:
                parts.append(_no_entries(len(bundle.tokens)))
            else:
                parts.append(
                    LogprobColumnsMsg(
                        offsets=np.concatenate(([0], np.cumsum(store.lengths))).astype(np.int32),
                        token_ids=np.array(store.token_ids, np.int32),
                        logprobs=np.array(store.logprobs, np.float32),
                        ranks=np.array(store.ranks, np.int32),
                    )
                )
        if not any(len(part.token_ids) for part in parts):
            return None
        return join_columns(parts)


def times_of(child: Child) -> Times:
    return (child.request.time_scheduled, child.time_first, child.time_last, child.num_preemptions)


def join_columns(parts: Sequence[LogprobColumnsMsg | LogprobColumns]) -> LogprobColumnsMsg:
    """Entries of all parts, one after the other."""
    if not parts:
        return _no_entries(0)
    sizes = [int(part.offsets[-1]) for part in parts]
    starts = np.cumsum([0, *sizes[:-1]])
    offsets = [part.offsets[1:] + start for part, start in zip(parts, starts, strict=True)]
    return LogprobColumnsMsg(
        offsets=np.concatenate((np.zeros(1, np.int32), *offsets)).astype(np.int32),
        token_ids=np.concatenate([part.token_ids[:size] for part, size in zip(parts, sizes, strict=True)]),
        logprobs=np.concatenate([part.logprobs[:size] for part, size in zip(parts, sizes, strict=True)]),
        ranks=np.concatenate([part.ranks for part in parts]),
    )


def _no_entries(count: int) -> LogprobColumnsMsg:
    return LogprobColumnsMsg(
        offsets=np.zeros(count + 1, np.int32),
        token_ids=np.empty(0, np.int32),
        logprobs=np.empty(0, np.float32),
        ranks=np.zeros(count, np.int32),
    )


def _pick(columns: LogprobColumns, entries: npt.NDArray[np.intp]) -> LogprobColumnsMsg:
    """Some entries of `columns`, in the order given."""
    count = len(columns.offsets) - 1
    if len(entries) == count and np.array_equal(entries, np.arange(count)):
        return LogprobColumnsMsg(columns.offsets, columns.token_ids, columns.logprobs, columns.ranks)
    starts = columns.offsets[entries]
    lengths = columns.offsets[entries + 1] - starts
    offsets = np.zeros(len(entries) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    items = np.repeat(starts - offsets[:-1], lengths) + np.arange(offsets[-1], dtype=np.int32)
    return LogprobColumnsMsg(offsets, columns.token_ids[items], columns.logprobs[items], columns.ranks[entries])
