"""What the front end keeps of one live child, by the kind of output it was asked for.

    FinalChild        FINAL_ONLY without stop strings: one report at its end, detokenized once.
    GatheredChild     FINAL_ONLY with stop strings: every token is looked at, nothing is shown before the end.
    DeltaChild        what is new, every time.
    CumulativeChild   everything so far, every time.

The detokenizer is made with a child's first report, so that one that waits costs next to nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.logprobs import FlatLogprobs, SampleLogprobs
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.detokenizer import IncrementalDetokenizer, make_detokenizer
from vllm.v1.engine.logprobs import LogprobReader, TokenTexts, extend, snapshot
from vllm.v1.engine.parallel_sampling import SamplingRequest
from vllm.v1.messages import FinishReason

if TYPE_CHECKING:
    from vllm.tokenizers import Tokenizer

REASONS: tuple[str | None, ...] = (None, "stop", "length", "abort", "error")
"""The API's word by FinishReason."""
_STOP = int(FinishReason.STOP)


class Shared:
    """What the children of one request have in common."""

    __slots__ = ("_decoder", "flat", "hide_stop", "lora", "params", "prompt_token_ids", "tokenizer", "tokens", "wants")

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: list[int],
        lora: LoRARequest | None,
        tokenizer: Tokenizer | None,
        tokens: TokenTexts,
    ) -> None:
        self.params = params
        self.prompt_token_ids = prompt_token_ids
        self.lora = lora
        self.tokenizer = tokenizer
        self.tokens = tokens
        self.flat = params.flat_logprobs
        self.hide_stop = not params.include_stop_str_in_output
        self.wants = params.logprobs is not None or params.best_of is not None
        """Whether the core sends log-probabilities for these children."""
        self._decoder: IncrementalDetokenizer | None = None

    def detokenizer(self) -> IncrementalDetokenizer:
        """A new one, for one child."""
        return make_detokenizer(self.tokenizer, self.prompt_token_ids, self.params)

    def decode_all(self, ids: list[int]) -> str:
        """The text of a whole output; keeps no state between calls."""
        if self._decoder is None:
            self._decoder = self.detokenizer()
        return self._decoder.decode_all(ids)

    def no_logprobs(self) -> SampleLogprobs:
        return FlatLogprobs() if self.flat else []


class Child:
    """Base of the kinds. Children of a request are separate objects in everything that changes."""

    __slots__ = ("cumulative_logprob", "detokenizer", "index", "num_tokens", "request", "shared")

    def __init__(self, index: int, request: SamplingRequest, shared: Shared) -> None:
        self.index = index
        self.request = request
        self.shared = shared
        self.detokenizer: IncrementalDetokenizer | None = None
        self.num_tokens = 0
        self.cumulative_logprob = 0.0

    def advance(
        self, ids: list[int], first: int, reason: int, stop: int | str, reader: LogprobReader | None
    ) -> CompletionOutput | None:
        """Take one report of the core.

        Args:
            ids: new token ids; the list is this child's from now on.
            first: number of the first of them among the message's tokens.
            reason: FinishReason; 0 while the child goes on.
            stop: id of the stop token, or the text of an error; -1 for neither.
            reader: the message's log-probabilities, if it has any.

        Returns what is to be shown now; its finish_reason is set exactly if the child has ended.
        """
        raise NotImplementedError

    def _logprobs(self, first: int, count: int, reader: LogprobReader | None) -> SampleLogprobs | None:
        """New entries, also added to the sum; None unless they were asked for."""
        shared = self.shared
        if not shared.wants:
            return None
        if reader is None or not count:
            return shared.no_logprobs()
        self.cumulative_logprob += reader.total(first, first + count)
        return reader.entries(first, first + count, shared.tokens, shared.flat)

    def _read(self, ids: list[int], reason: int, stop: int | str) -> tuple[str | None, int | str | None]:
        """Detokenize a report; (finish reason, stop reason). What came after a stop string is removed from `ids`."""
        detokenizer = self.detokenizer
        if detokenizer is None:
            detokenizer = self.detokenizer = self.shared.detokenizer()
        finish: str | None = None
        stop_reason: int | str | None = None
        if reason:
            detokenizer.update(ids[:-1] if reason == _STOP and self.shared.hide_stop else ids, True)
            finish, stop_reason = REASONS[reason], None if stop == -1 else stop
        else:
            detokenizer.update(ids)
        if detokenizer.stop is not None:
            return self._stopped(ids, detokenizer)
        self.num_tokens += len(ids)
        return finish, stop_reason

    def _stopped(self, ids: list[int], detokenizer: IncrementalDetokenizer) -> tuple[str, str | None]:
        del ids[detokenizer.num_tokens_used - self.num_tokens :]
        self.num_tokens += len(ids)
        return "stop", detokenizer.stop


class FinalChild(Child):
    __slots__ = ()

    def advance(
        self, ids: list[int], first: int, reason: int, stop: int | str, reader: LogprobReader | None
    ) -> CompletionOutput | None:
        shared = self.shared
        self.num_tokens = len(ids)
        text = shared.decode_all(ids[:-1] if reason == _STOP and shared.hide_stop else ids)
        logprobs = self._logprobs(first, len(ids), reader)
        total = None if logprobs is None else self.cumulative_logprob
        stop_reason = None if stop == -1 else stop
        return CompletionOutput(self.index, text, ids, total, logprobs, REASONS[reason], stop_reason, shared.lora)


class DeltaChild(Child):
    __slots__ = ()

    def advance(
        self, ids: list[int], first: int, reason: int, stop: int | str, reader: LogprobReader | None
    ) -> CompletionOutput | None:
        detokenizer, shared = self.detokenizer, self.shared
        if reason or shared.wants or detokenizer is None:
            finish, stop_reason = self._read(ids, reason, stop)
            logprobs = self._logprobs(first, len(ids), reader)
            total = None if logprobs is None else self.cumulative_logprob
        else:  # the common report, without detours
            detokenizer.update(ids)
            if detokenizer.stop is None:
                self.num_tokens += len(ids)
                return CompletionOutput(self.index, detokenizer.delta(), ids, None, None, None, None, shared.lora)
            finish, stop_reason = self._stopped(ids, detokenizer)
            logprobs = total = None
        text = self.detokenizer.delta()  # type: ignore[union-attr]  # made by the first report
        return CompletionOutput(self.index, text, ids, total, logprobs, finish, stop_reason, shared.lora)


class GatheredChild(Child):
    __slots__ = ("logprobs", "token_ids")

    def __init__(self, index: int, request: SamplingRequest, shared: Shared) -> None:
        super().__init__(index, request, shared)
        self.token_ids: list[int] = []
        self.logprobs: SampleLogprobs | None = None

    def advance(
        self, ids: list[int], first: int, reason: int, stop: int | str, reader: LogprobReader | None
    ) -> CompletionOutput | None:
        finish, stop_reason = self._gather(ids, first, reason, stop, reader)
        if finish is None:
            return None
        return self._completion(self.token_ids, self.logprobs, finish, stop_reason)

    def _gather(
        self, ids: list[int], first: int, reason: int, stop: int | str, reader: LogprobReader | None
    ) -> tuple[str | None, int | str | None]:
        finish, stop_reason = self._read(ids, reason, stop)
        logprobs = self._logprobs(first, len(ids), reader)
        self.token_ids += ids
        if logprobs is not None:
            if self.logprobs is None:
                self.logprobs = logprobs
            else:
                extend(self.logprobs, logprobs)
        return finish, stop_reason

    def _completion(
        self, token_ids: list[int], logprobs: SampleLogprobs | None, finish: str | None, stop_reason: Any
    ) -> CompletionOutput:
        total = None if logprobs is None else self.cumulative_logprob
        text = self.detokenizer.output_text  # type: ignore[union-attr]  # made by the first report
        return CompletionOutput(self.index, text, token_ids, total, logprobs, finish, stop_reason, self.shared.lora)


class CumulativeChild(GatheredChild):
    __slots__ = ()

    def advance(
        self, ids: list[int], first: int, reason: int, stop: int | str, reader: LogprobReader | None
    ) -> CompletionOutput | None:
        detokenizer, shared = self.detokenizer, self.shared
        if reason or shared.wants or detokenizer is None:
            finish, stop_reason = self._gather(ids, first, reason, stop, reader)
        else:  # the common report, without detours
            detokenizer.update(ids)
            if detokenizer.stop is None:
                self.num_tokens += len(ids)
                self.token_ids += ids
                return CompletionOutput(
                    self.index, detokenizer.output_text, self.token_ids[:], None, None, None, None, shared.lora
                )
            finish, stop_reason = self._stopped(ids, detokenizer)
            self.token_ids += ids
        if finish is not None:
            return self._completion(self.token_ids, self.logprobs, finish, stop_reason)
        return self._completion(
            self.token_ids[:], None if self.logprobs is None else snapshot(self.logprobs), None, None
        )


def child_class(kind: RequestOutputKind, params: SamplingParams) -> type[Child]:
    """The class for a kind of output."""
    if kind is RequestOutputKind.DELTA:
        return DeltaChild
    if kind is RequestOutputKind.CUMULATIVE:
        return CumulativeChild
    return GatheredChild if params.stop else FinalChild
