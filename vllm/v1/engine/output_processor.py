"""From the core's columns to what users read: the one loop over a step's outputs.

A child has a state here, by handle, from submission until its last report. It gets exactly one last report: from the
core when that ended it (also by abort), or from here when a stop string was found in its text; then the core is told to
stop it, and says nothing more about it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from vllm.exceptions import DuplicateRequestError, EngineGenerateError, IntegrityError
from vllm.outputs import RequestOutput
from vllm.v1.engine.children import Child, Shared, child_class
from vllm.v1.engine.logprobs import LogprobReader, TokenTexts, prompt_logprobs
from vllm.v1.engine.parallel_sampling import SamplingRequest, Sink, Submission, fan_out
from vllm.v1.messages import EngineCoreOutputs, FinishReason, LogprobColumnsMsg, make_handle
from vllm.v1.metrics.stats import FinishedRequest, IterationStats

if TYPE_CHECKING:
    from vllm.tokenizers import Tokenizer


class Processed(msgspec.Struct, gc=False):
    """What one message of the core led to."""

    outputs: list[RequestOutput]
    """Of requests without a sink."""
    stops: list[int]
    """Handles in whose text a stop string was found, for the core."""
    aborts: list[int]
    """Handles that were ended here because enough of their siblings have finished, for the core."""
    stats: IterationStats


class OutputProcessor:
    """States of all live requests and children of one front end.

    Args:
        tokenizer: None leaves every text empty.
        client_index: this front end's number among those of one core; stands in the top bits of its handles.
    """

    def __init__(self, tokenizer: Tokenizer | None, client_index: int = 0) -> None:
        self._tokenizer = tokenizer
        self._texts = TokenTexts(None if tokenizer is None else tokenizer.token_text)
        self._requests: dict[str, SamplingRequest] = {}
        """By the user's id: live, and not aborted."""
        self._children: dict[int, Child] = {}
        """By handle: whoever still gets a report."""
        self._opened: list[SamplingRequest] = []
        """Parents with something to say at the end of this step."""
        self._client_index = client_index
        self._next_handle = 1

    # ---- in

    def add(self, submission: Submission, sink: Sink | None = None) -> SamplingRequest:
        """Fan a submission out and keep its states. The core request has its handles afterwards.

        Raises DuplicateRequestError if a live request has the id; the first is untouched.
        """
        self.check_id(submission.request_id)
        request = fan_out(submission, self.new_handles, self._opened)
        request.sink = sink
        params = submission.params
        shared = Shared(
            params, request.prompt_token_ids, submission.core_request.lora_request, self._tokenizer, self._texts
        )
        kind = child_class(submission.kind, params)
        children = self._children
        for index, handle in enumerate(request.handles):
            children[handle] = kind(index, request, shared)
        self._requests[submission.request_id] = request
        return request

    def check_id(self, request_id: str) -> None:
        """Raise DuplicateRequestError if a live request has the id."""
        if request_id in self._requests:
            raise DuplicateRequestError(f"a request with id {request_id!r} is running already", "request_id")

    def withdraw(self, request: SamplingRequest) -> None:
        """Undo `add` for a request that the core did not take."""
        self._requests.pop(request.request_id, None)
        for handle in request.handles:
            self._children.pop(handle, None)

    def abort(self, request_ids: Iterable[str]) -> list[int]:
        """Handles of the children that are to be aborted in the core, whose answers end the requests. Unknown ids are
        passed over. The ids are free at once."""
        handles: list[int] = []
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                handles += self.abort_request(request)
        return handles

    def abort_request(self, request: SamplingRequest) -> list[int]:
        """The same for a request that is known itself."""
        if self._requests.get(request.request_id) is request:
            del self._requests[request.request_id]
        return [handle for handle in request.handles if handle in self._children]

    def fail_all(self, error: Exception) -> None:
        """The core is gone: tell every sink, and forget everything."""
        requests = {id(child.request): child.request for child in self._children.values()}
        self._children.clear()
        self._requests.clear()
        self._opened.clear()
        for request in requests.values():
            if request.sink is not None:
                request.sink.fail(error)

    def new_handles(self, count: int) -> list[int]:
        """Handles that were never used. Reports about one without a child here are passed over."""
        first = make_handle(self._client_index, self._next_handle)
        self._next_handle += count
        return list(range(first, first + count))

    # ---- state

    @property
    def num_requests(self) -> int:
        """Live requests of users; an aborted one does not count."""
        return len(self._requests)

    @property
    def num_children(self) -> int:
        """Children that still get a report."""
        return len(self._children)

    def check_idle(self) -> None:
        """Raise IntegrityError with the numbers unless every table is empty."""
        requests, children, opened = len(self._requests), len(self._children), len(self._opened)
        if requests or children or opened:
            raise IntegrityError(
                f"output processor is not idle: {requests} requests, {children} children, {opened} open parents"
            )

    # ---- out

    def process(self, message: EngineCoreOutputs, step_ends: bool = True) -> Processed:
        """The one loop. Outputs go to their request's sink, or are returned. With `step_ends` false more slices of the
        step's message follow."""
        outputs: list[RequestOutput] = []
        stops: list[int] = []
        aborts: list[int] = []
        stats = IterationStats(message.timestamp or time.monotonic(), message.new_tokens)
        children = self._children
        reader = None if message.logprobs is None else LogprobReader(message.logprobs)
        errors = message.errors
        if message.first_token_handles is not None:
            self._note_first_tokens(message, stats)
        if message.prompt_logprobs:
            self._take_prompt_logprobs(message.prompt_logprobs)
        tokens: list[int] = message.token_ids.tolist()
        ends: list[int] = message.offsets[1:].tolist()
        start = ended = 0
        for handle, end, reason, stop, num_cached in zip(
            message.handles.tolist(),
            ends,
            message.finish_reasons.tolist(),
            message.stop_reasons.tolist(),
            message.num_cached_tokens.tolist(),
            strict=True,
        ):
            first, start = start, end
            if reason:
                ended += 1
            child = children.get(handle)
            if child is None:
                continue
            request = child.request
            if errors and handle in errors:
                stop = request.error = errors[handle]
            request.num_cached_tokens = num_cached
            completion = child.advance(tokens[first:end], first, reason, stop, reader)
            if completion is None:
                continue
            if completion.finish_reason is not None:
                del children[handle]
                if not reason:
                    stops.append(handle)
                self._child_ended(child, completion.finish_reason, message, ended - 1 if reason else -1, stats)
            output = request.collect(child.index, completion)
            if output is None:
                continue
            if request.sink is None and not output.finished:  # the common output, without detours
                outputs.append(output)
            else:
                self._emit(request, output, outputs, stats)
        if self._opened:
            opened = self._opened[:]
            self._opened.clear()
            for request in opened:
                if request.has_enough:
                    if not step_ends:
                        self._opened.append(request)
                        continue
                    self._end_rest(request, message, aborts, outputs, stats)
                output = request.close()
                if output is not None:
                    self._emit(request, output, outputs, stats)
        return Processed(outputs, stops, aborts, stats)

    def _emit(
        self, request: SamplingRequest, output: RequestOutput, outputs: list[RequestOutput], stats: IterationStats
    ) -> None:
        if output.finished:
            if self._requests.get(request.request_id) is request:
                del self._requests[request.request_id]
            stats.finished.append(_finished(request, output, stats.timestamp))
        sink = request.sink
        if sink is None:
            outputs.append(output)
        elif request.error is None:
            sink.put(output)
        elif output.finished:
            sink.fail(EngineGenerateError(f"request {request.request_id!r} failed: {request.error}"), output)

    def _end_rest(
        self,
        request: SamplingRequest,
        message: EngineCoreOutputs,
        aborts: list[int],
        outputs: list[RequestOutput],
        stats: IterationStats,
    ) -> None:
        """Enough children have finished, which the core cannot know yet: the others end with what they have."""
        for handle in request.handles:
            child = self._children.pop(handle, None)
            if child is None:
                continue
            aborts.append(handle)
            completion = child.advance([], 0, int(FinishReason.ABORT), -1, None)
            assert completion is not None  # it has ended
            self._child_ended(child, "abort", message, -1, stats)
            output = request.collect(child.index, completion)
            if output is not None:
                self._emit(request, output, outputs, stats)

    def _child_ended(
        self, child: Child, reason: str, message: EngineCoreOutputs, row: int, stats: IterationStats
    ) -> None:
        stats.num_children_finished += 1
        reasons, times = child.request.finish_reasons, message.finished_times
        reasons[reason] = reasons.get(reason, 0) + 1
        if row >= 0 and times is not None:
            child.request.times.child_ended(
                child.num_tokens,
                float(times.scheduled[row]),
                float(times.first_token[row]),
                float(times.last_token[row]),
                int(times.num_preemptions[row]),
            )
        else:
            child.request.times.child_ended(child.num_tokens, 0.0, 0.0, stats.timestamp, 0)

    def _note_first_tokens(self, message: EngineCoreOutputs, stats: IterationStats) -> None:
        assert message.first_token_handles is not None
        for handle in message.first_token_handles.tolist():
            child = self._children.get(handle)
            if child is not None and child.request.times.saw_first_token(stats.timestamp):
                stats.time_to_first_tokens.append(stats.timestamp - child.request.times.arrival)
                stats.num_prompt_tokens += len(child.request.prompt_token_ids)

    def _take_prompt_logprobs(self, entries: dict[int, LogprobColumnsMsg]) -> None:
        for handle, columns in entries.items():
            child = self._children.get(handle)
            if child is not None:
                child.request.prompt_logprobs = prompt_logprobs(columns, self._texts, child.shared.flat)


def _finished(request: SamplingRequest, output: RequestOutput, end: float) -> FinishedRequest:
    times = request.times
    return FinishedRequest(
        request.n,
        len(request.prompt_token_ids),
        request.num_cached_tokens,
        output.metrics or times.snapshot(),
        times.max_tokens,
        request.finish_reasons,
        request.submission.params.max_tokens,
        end,
    )


def slices(message: EngineCoreOutputs, size: int) -> Iterator[tuple[EngineCoreOutputs, bool]]:
    """Cut a message into messages of at most `size` children, for a front end that must not be kept busy for long; with
    each, whether it is the last.

    What belongs to the step as a whole stands in the first (what is needed before) or in the last (counts and state).
    """
    total = len(message.handles)
    if total <= size:
        yield message, True
        return
    ended = 0
    for low in range(0, total, size):
        high = min(low + size, total)
        first, last = int(message.offsets[low]), int(message.offsets[high])
        reasons = message.finish_reasons[low:high]
        rows = slice(ended, ended + int(np.count_nonzero(reasons)))
        ended = rows.stop
        begins, is_last = low == 0, high == total
        columns, times = message.logprobs, message.finished_times
        piece = EngineCoreOutputs(
            handles=message.handles[low:high],
            offsets=message.offsets[low : high + 1] - first,
            token_ids=message.token_ids[first:last],
            finish_reasons=reasons,
            stop_reasons=message.stop_reasons[low:high],
            num_cached_tokens=message.num_cached_tokens[low:high],
            logprobs=None if columns is None else _cut(columns, first, last),
            finished_times=None if times is None else type(times)(*(getattr(times, name)[rows] for name in _TIMES)),
            prompt_logprobs=message.prompt_logprobs if begins else {},
            errors=message.errors,
            first_token_handles=message.first_token_handles if begins else None,
            new_tokens=message.new_tokens if is_last else 0,
            stats=message.stats if is_last else None,
            timestamp=message.timestamp,
        )
        yield piece, is_last


_TIMES = ("scheduled", "first_token", "last_token", "num_preemptions")


def _cut(columns: LogprobColumnsMsg, first: int, last: int) -> LogprobColumnsMsg:
    low, high = int(columns.offsets[first]), int(columns.offsets[last])
    return LogprobColumnsMsg(
        columns.offsets[first : last + 1] - low,
        columns.token_ids[low:high],
        columns.logprobs[low:high],
        columns.ranks[first:last],
    )
