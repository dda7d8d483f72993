"""Where the outputs of one request wait for a consumer that may be slow.

Without back-pressure every output passes through as it is. Outputs that have to wait are merged per index: deltas are
joined, cumulative completions are replaced, so that nothing is lost and memory is bounded by the request's own text.
"""

from __future__ import annotations

import asyncio

from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.logprobs import extend


class RequestOutputCollector:
    """A queue of length one for one consumer, in one event loop. An error wakes the consumer too, after what came
    before it."""

    __slots__ = ("_delta", "_error", "_outputs", "_ready", "_waiting")

    def __init__(self, kind: RequestOutputKind) -> None:
        self._delta = kind is RequestOutputKind.DELTA
        self._waiting: RequestOutput | None = None
        self._outputs: dict[int, CompletionOutput] | None = None
        """By index, once outputs have been merged into `_waiting`."""
        self._error: Exception | None = None
        self._ready = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        """Take an output; the collector owns it from now on."""
        waiting = self._waiting
        if waiting is None:
            self._waiting = output
            self._ready.set()
        else:
            self._merge(waiting, output)

    def fail(self, error: Exception, output: RequestOutput | None = None) -> None:  # noqa: ARG002
        """Nothing more will come; the first error stays, and is all that the consumer gets."""
        if self._error is None:
            self._error = error
        self._ready.set()

    def get_nowait(self) -> RequestOutput | None:
        """What waits, or None. Raises the error once there is nothing else."""
        output = self._waiting
        if output is not None:
            self._waiting = self._outputs = None
            if self._error is None:
                self._ready.clear()
            return output
        if self._error is not None:
            raise self._error
        return None

    async def get(self) -> RequestOutput:
        """Wait for an output, or for the error."""
        while (output := self.get_nowait()) is None:
            await self._ready.wait()
        return output

    def _merge(self, waiting: RequestOutput, output: RequestOutput) -> None:
        by_index = self._outputs
        if by_index is None:
            by_index = self._outputs = {completion.index: completion for completion in waiting.outputs}
        for completion in output.outputs:
            earlier = by_index.get(completion.index)
            if earlier is None or not self._delta:
                by_index[completion.index] = completion
            else:
                _join(earlier, completion)
        waiting.outputs = list(by_index.values())
        waiting.finished = output.finished
        waiting.metrics = output.metrics
        waiting.num_cached_tokens = output.num_cached_tokens
        if waiting.prompt_logprobs is None:
            waiting.prompt_logprobs = output.prompt_logprobs


def _join(target: CompletionOutput, more: CompletionOutput) -> None:
    """Append a delta to an earlier one that nobody has seen."""
    target.text += more.text
    target.token_ids += more.token_ids
    target.cumulative_logprob = more.cumulative_logprob
    if more.logprobs is not None:
        if target.logprobs is None:
            target.logprobs = more.logprobs
        else:
            extend(target.logprobs, more.logprobs)
    target.finish_reason = more.finish_reason
    target.stop_reason = more.stop_reason
