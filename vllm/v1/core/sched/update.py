"""Taking in what a step drew: tokens to their children, ends, and the news for the front ends.

Children in slots are handled as columns, but for the few that have news of their own: a first token, a filled block,
an end. Forked members are handled one by one, once in their lives; so are children that were preempted while the step
was under way, whose tokens are as good as any.

In this order: what was computed; draws and the ends that follow from them; failures; `finish_after`. So all children
that end in one step keep their reasons.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vllm.exceptions import IntegrityError
from vllm.model_executor.backends.interface import LogprobColumns
from vllm.v1.core.prefill_group import PrefillGroup
from vllm.v1.core.request import Child, ChildState, LogprobStore, Request
from vllm.v1.core.sched.outputs import NO_SINGLES, Singles, join_columns, times_of
from vllm.v1.core.sched.plan import Chunk, Step
from vllm.v1.core.sched.state import State
from vllm.v1.messages import FinishReason
from vllm.v1.step import RunnerOutput


class Updater:
    def __init__(self, state: State) -> None:
        self.state = state

    def update(self, step: Step, result: RunnerOutput, now: float) -> None:
        """Bring the state and the output builder up to date; the caller builds the message."""
        computed = step.output.num_computed + step.output.num_tokens
        for index, chunk in enumerate(step.chunks):
            self._computed(chunk, result.prompt_logprobs.get(step.num_decodes + index))
        draws = _Draws(self.state, result, now)
        draws.rows(step, computed)
        draws.forks(step.forked)
        self.state.outputs.singles = Singles.join(draws.row_singles, draws.more_singles())
        self.state.stats.generation_tokens += self.state.outputs.new_tokens
        for handle, message in result.errors.items():
            self._fail(handle, message)
        for request in draws.counting:
            self.state.check_finish_after(request)

    def _computed(self, chunk: Chunk, logprobs: LogprobColumns | None) -> None:
        """A chunk has been computed."""
        kv = self.state.kv
        end = chunk.start + chunk.count
        group = chunk.entity
        if isinstance(group, Child):
            return  # like the decode rows
        self.state.stats.prompt_tokens_computed += chunk.count
        if group.epoch != chunk.epoch:
            return  # it has given up those blocks
        group.num_done = end
        kv.register_prompt(group, chunk.start, end)
        wanted = group.prompt_logprobs
        if wanted is not None and not wanted.complete:
            if logprobs is not None:
                wanted.chunks.append(logprobs)
            if end == group.prompt_len:
                wanted.complete = True
                self.state.carry(wanted.request, join_columns(wanted.chunks))
                wanted.chunks.clear()

    def _fail(self, handle: int, message: str) -> None:
        """A child's own processing failed: its request ends, and no other."""
        child = self.state.children.get(handle)
        if child is not None:
            request = child.request
            self.state.outputs.errors[handle] = message
            self.state.abort(child, FinishReason.ERROR)
            self.state.abort_rest(request)


class _Draws:
    """The draws of one step."""

    def __init__(self, state: State, result: RunnerOutput, now: float) -> None:
        self.state = state
        self.result = result
        self.now = now
        self.row_singles = NO_SINGLES
        self.counting: dict[Request, None] = {}
        """Requests with `finish_after` of which a child has ended."""
        self._drawn = 0
        """Draws taken in so far."""
        self._handles: list[int] = []
        self._tokens: list[int] = []
        self._reasons: list[int] = []
        self._stops: list[int] = []
        self._cached: list[int] = []
        self._entries: list[int] = []
        """Columns of those that stream and were not taken in as columns."""
        self._times: dict[int, tuple[float, float, float, int]] = {}
        columns = result.logprobs
        if columns is not None:
            self._offsets = columns.offsets
            self._entry_tokens = np.ascontiguousarray(columns.token_ids, np.int32).data.cast("B")
            self._entry_logprobs = np.ascontiguousarray(columns.logprobs, np.float32).data.cast("B")
            self._ranks = columns.ranks

    # Children in slots

    def rows(self, step: Step, computed: npt.NDArray[np.int32]) -> None:
        state, slots, result = self.state, self.state.slots, self.result
        output = step.output
        rows, handles = output.slots, output.handles
        if len(rows) > step.num_decodes:
            self._register_chunks(step, computed)
            if not output.samples.all():
                rows, handles, computed = rows[output.samples], handles[output.samples], computed[output.samples]
        count = self._drawn = len(rows)
        tokens = result.token_ids[:count]
        if not np.array_equal(handles, result.handles[:count]):
            raise IntegrityError(f"the runner drew for {result.handles[:count].tolist()}, not {handles.tolist()}")
        entries: npt.NDArray[np.intp] = np.arange(count)
        live = slots.handle[rows] == handles
        if result.errors or np.count_nonzero(live) < count:
            for index in (~live).nonzero()[0].tolist():
                child = state.children.get(int(handles[index]))
                if child is not None and child.handle not in result.errors:
                    self._drew(child, int(tokens[index]), index)  # preempted while this step was under way
            live &= ~np.isin(handles, list(result.errors))
            rows, handles, computed, tokens, entries = (
                column[live] for column in (rows, handles, computed, tokens, entries)
            )
        if not len(rows):
            return
        state.outputs.new_tokens += len(rows)
        append = slots.append
        for slot, token in zip(rows.tolist(), tokens.tolist(), strict=True):
            append[slot](token)
        slots.last_token[rows] = self.now
        outputs = computed - slots.prompt_len[rows] + 1
        for index in (outputs == 1).nonzero()[0].tolist():
            self._first_token(_child(slots.owner[rows[index]]))
        if state.kv.enable_prefix_caching:
            for index in (computed % state.kv.block_size == 0).nonzero()[0].tolist():
                state.kv.register_output(_child(slots.owner[rows[index]]), int(computed[index]))
        stream = slots.stream[rows]
        if result.logprobs is not None:
            for index in (slots.has_logprobs[rows] & ~stream).nonzero()[0].tolist():
                self._store(_child(slots.owner[rows[index]]), int(entries[index]))
        stopped = (slots.stop[rows] == tokens[:, None]).any(axis=1)
        if slots.many_stops:
            for index, slot in enumerate(rows.tolist()):
                if slot in slots.many_stops:
                    stopped[index] = int(tokens[index]) in _child(slots.owner[slot]).request.stop_token_ids
        stopped &= outputs >= slots.min_outputs[rows]
        ended = (stopped | (outputs >= slots.max_outputs[rows])).nonzero()[0]
        reasons = np.zeros(len(rows), np.uint8)
        stop_reasons = np.full(len(rows), -1, np.int64)
        num_cached = slots.num_cached[rows].astype(np.int32)
        ended_times = {}
        for index in ended.tolist():
            child = _child(slots.owner[rows[index]])
            child.time_last = self.now
            reason, stop_reason = FinishReason.LENGTH, -1
            if stopped[index]:
                reason, stop_reason = FinishReason.STOP, child.request.stop_reason(int(tokens[index]))
            if stream[index]:
                reasons[index] = reason
                stop_reasons[index] = stop_reason
                ended_times[index] = times_of(child)
            else:
                state.outputs.end(child, reason, stop_reason)
            self._ended(child)
        singles = Singles(handles, tokens, reasons, stop_reasons, num_cached, entries)
        streams = np.count_nonzero(stream)
        if streams == len(rows):
            self.row_singles = singles
            state.outputs.single_times = ended_times
        elif streams:
            self.row_singles = singles.where(stream)
            place = np.cumsum(stream) - 1
            state.outputs.single_times = {int(place[index]): times for index, times in ended_times.items()}

    def _register_chunks(self, step: Step, computed: npt.NDArray[np.int32]) -> None:
        """Children's own tokens, computed again: rows of several tokens, which may draw or not."""
        kv, slots = self.state.kv, self.state.slots
        if kv.enable_prefix_caching:
            for index, chunk in enumerate(step.chunks):
                if isinstance(chunk.entity, Child) and slots.handle[chunk.slot] == chunk.handle:
                    kv.register_output(chunk.entity, int(computed[step.num_decodes + index]))

    # Forked members

    def forks(self, forked: list[list[Child]]) -> None:
        handles = self.result.handles.tolist()
        if len(handles) != self._drawn + sum(map(len, forked)):
            raise IntegrityError(f"the runner made {len(handles)} draws, not {self._drawn + sum(map(len, forked))}")
        tokens = self.result.token_ids.tolist()
        for members in forked:
            groups: dict[PrefillGroup, None] = {}
            for child in members:
                index = self._drawn
                self._drawn += 1
                if handles[index] != child.handle:
                    raise IntegrityError(f"the runner drew for {handles[index]}, not {child.handle}")
                if child.state == ChildState.DRAWING and child.handle not in self.result.errors:
                    child.group.num_drawing -= 1
                    child.group.add_ready(child)
                    groups[child.group] = None
                    self._drew(child, tokens[index], index)
            for group in groups:
                if group.num_live:
                    self.state.queue.update(group)

    # One by one

    def _drew(self, child: Child, token: int, index: int) -> None:
        """Take in a token of a READY child."""
        request = child.request
        outputs = self.state.outputs
        outputs.new_tokens += 1
        child.tokens.append(token)
        child.time_last = self.now
        count = len(child.tokens)
        if count == 1:
            self._first_token(child)
        reason, stop_reason = FinishReason.NONE, -1
        if token in request.stop_token_ids and count >= request.min_outputs:
            reason, stop_reason = FinishReason.STOP, request.stop_reason(token)
        elif count >= request.max_outputs:
            reason = FinishReason.LENGTH
        if request.stream:
            if reason:
                self._times[len(self._handles)] = times_of(child)
            self._handles.append(child.handle)
            self._tokens.append(token)
            self._reasons.append(reason)
            self._stops.append(stop_reason)
            self._cached.append(request.num_cached)
            self._entries.append(index)
        elif request.has_logprobs and self.result.logprobs is not None:
            self._store(child, index)
        if reason:
            if not request.stream:
                outputs.end(child, reason, stop_reason)
            self._ended(child)

    def more_singles(self) -> Singles:
        if not self._handles:
            return NO_SINGLES
        before = len(self.row_singles.handles)
        for index, times in self._times.items():
            self.state.outputs.single_times[before + index] = times
        return Singles(
            np.array(self._handles, np.int64),
            np.array(self._tokens, np.int32),
            np.array(self._reasons, np.uint8),
            np.array(self._stops, np.int64),
            np.array(self._cached, np.int32),
            np.array(self._entries, np.intp),
        )

    # Both

    def _first_token(self, child: Child) -> None:
        child.time_first = self.now
        self.state.outputs.first_token_handles.append(child.handle)

    def _store(self, child: Child, entry: int) -> None:
        """Keep the log-probabilities of a child that is reported when it ends."""
        if child.logprobs is None:
            child.logprobs = LogprobStore()
        start, end = 4 * int(self._offsets[entry]), 4 * int(self._offsets[entry + 1])
        child.logprobs.append(self._entry_tokens[start:end], self._entry_logprobs[start:end], int(self._ranks[entry]))

    def _ended(self, child: Child) -> None:
        self.state.end(child, by_itself=True)
        if child.request.finish_after is not None:
            self.counting[child.request] = None


def _child(owner: Child | PrefillGroup | None) -> Child:
    assert isinstance(owner, Child)
    return owner
