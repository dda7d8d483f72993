"""One request, n children: the seam between what a user asked for and what the core runs.

`fan_out` turns a submission into a `SamplingRequest`, whose children the core sees as handles. The output processor
hands every completion of a child to `collect`, and gets back what the user is to see, if it is time. Whether a request
has one child or ten thousand is known in this module only.

                        collect(index, completion)                    close()
    Singular   any      the request's output                          never opened
    Parent     FINAL    None … the output with all n, when the last   never opened
    Parent     others   None; the parent is "open" until the end      one output with the children that moved
                        of the core's step                            in this step

`finish_after` is counted in the core, which ends the others in the same step. Stop strings are found here, later: then
the parent counts, and at the end of the step the output processor ends the others with what they have.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Protocol

from vllm.exceptions import BadRequestError
from vllm.logprobs import PromptLogprobs
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.messages import EngineCoreRequest
from vllm.v1.metrics.stats import RequestTimes

NEVER_RANKED = float("-inf")
_by_index = operator.attrgetter("index")


class Submission:
    """A validated, tokenized request on its way to the core. Made by the processor."""

    __slots__ = ("core_request", "kind", "params", "prompt", "request_id")

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        params: SamplingParams,
        kind: RequestOutputKind,
        core_request: EngineCoreRequest,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.params = params
        """As the caller gave them."""
        self.kind = kind
        self.core_request = core_request
        """Its `handles` are filled in by `fan_out`; its params may ask for more than the caller did."""


class Sink(Protocol):
    """Takes the outputs of one request as they come."""

    def put(self, output: RequestOutput) -> None: ...

    def fail(self, error: Exception, output: RequestOutput | None = None) -> None:
        """No more outputs will come; `output` is what there is, if the request failed and not the engine."""


class SamplingRequest(Protocol):
    """What the output layer knows of a user's request."""

    request_id: str
    handles: list[int]
    """Child i is handles[i]."""
    submission: Submission
    prompt_token_ids: list[int]
    times: RequestTimes
    num_cached_tokens: int
    """Set by the output processor with every report of the core."""
    prompt_logprobs: PromptLogprobs | None
    """Set by the output processor once, with the first report."""
    error: str | None
    """Set by the output processor when a child failed inside the engine."""
    finish_reasons: dict[str, int]
    """Children that ended, by reason; kept by the output processor."""

    @property
    def n(self) -> int:
        """Completions that the user gets."""

    sink: Sink | None
    """Where outputs go; None: they are returned from the step. Set by whoever submits."""

    @property
    def finished(self) -> bool:
        """All children have ended, and the last output has been made."""

    def collect(self, index: int, completion: CompletionOutput) -> RequestOutput | None:
        """Take what child `index` has to say; the user's output, if one is due now."""

    @property
    def has_enough(self) -> bool:
        """`finish_after` children have ended by themselves, and others have not. True only in a step that opened it."""

    def close(self) -> RequestOutput | None:
        """The step is over: the output with the children that moved in it, if that is how this request reports."""


class _Request:
    """What both kinds of request hold: everything that is there once per prompt, and nothing per child."""

    __slots__ = (
        "_prompt", "error", "finish_reasons", "handles", "lora_request", "num_cached_tokens", "prompt_logprobs",
        "prompt_token_ids", "request_id", "sink", "submission", "times",
    )  # fmt: skip

    def __init__(self, submission: Submission, handles: list[int]) -> None:
        self.submission = submission
        self.request_id = submission.request_id
        self._prompt = submission.prompt
        self.prompt_token_ids: list[int] = submission.core_request.prompt_token_ids.tolist()
        """One list for all outputs of the request."""
        self.handles = handles
        self.lora_request: LoRARequest | None = submission.core_request.lora_request
        self.times = RequestTimes(submission.core_request.arrival_time)
        self.num_cached_tokens = 0
        self.prompt_logprobs: PromptLogprobs | None = None
        self.error: str | None = None
        self.finish_reasons: dict[str, int] = {}
        self.sink: Sink | None = None


class SingularSamplingRequest(_Request):
    """One child, whose completions are the request's."""

    __slots__ = ("_delta", "finished")
    n = 1
    has_enough = False

    def __init__(self, submission: Submission, handles: list[int]) -> None:
        super().__init__(submission, handles)
        self.finished = False
        self._delta = submission.kind is RequestOutputKind.DELTA

    def collect(self, index: int, completion: CompletionOutput) -> RequestOutput | None:  # noqa: ARG002
        if completion.finish_reason is None:
            output = RequestOutput(
                self.request_id, self._prompt, self.prompt_token_ids, self.prompt_logprobs, [completion], False,
                None, self.lora_request, self.num_cached_tokens,
            )  # fmt: skip
        else:
            self.finished = True
            output = RequestOutput(
                self.request_id, self._prompt, self.prompt_token_ids, self.prompt_logprobs, [completion], True,
                self.times.snapshot(), self.lora_request, self.num_cached_tokens,
            )  # fmt: skip
        if self._delta:
            self.prompt_logprobs = None
        return output

    def close(self) -> RequestOutput | None:
        return None


class ParentRequest(_Request):
    """n children (or `best_of`), aggregated by kind.

    `opened` is the output processor's list of the parents that have something to say at the end of the step.
    """

    __slots__ = ("_completions", "_delta", "_live", "_missing", "_moved", "_opened", "_ranked", "finished", "n")

    def __init__(self, submission: Submission, handles: list[int], opened: list[SamplingRequest]) -> None:
        super().__init__(submission, handles)
        self.finished = False
        self.n: int = submission.params.n
        self._live = len(handles)
        self._opened = opened
        self._delta = submission.kind is RequestOutputKind.DELTA
        self._ranked = submission.params.best_of is not None
        self._missing = submission.params.finish_after or 0
        """Children that are still to end by themselves before the others are ended; 0: no such limit."""
        self._completions: list[CompletionOutput | None] | None = None
        """FINAL_ONLY: by index, what has ended."""
        self._moved: list[CompletionOutput] | None = None
        """The other kinds: what this step brought so far."""
        if submission.kind is RequestOutputKind.FINAL_ONLY:
            self._completions = [None] * len(handles)

    def collect(self, index: int, completion: CompletionOutput) -> RequestOutput | None:
        if completion.finish_reason is not None:
            self._live -= 1
            if self._missing and completion.finish_reason in ("stop", "length"):
                self._missing -= 1
                if not self._missing and self._moved is None:
                    self._open()
        if self._completions is not None:
            self._completions[index] = completion
            return self._output(self._final(self._completions)) if self._live == 0 else None
        if self._moved is None:
            self._open()
        self._moved.append(completion)  # type: ignore[union-attr]  # it is open
        return None

    def _open(self) -> None:
        self._moved = []
        self._opened.append(self)

    @property
    def has_enough(self) -> bool:
        return self._live > 0 and not self._missing and self.submission.params.finish_after is not None

    def close(self) -> RequestOutput | None:
        moved, self._moved = self._moved, None
        if not moved:
            return None
        moved.sort(key=_by_index)
        return self._output(moved)

    def _final(self, completions: list[CompletionOutput | None]) -> list[CompletionOutput]:
        ended = [completion for completion in completions if completion is not None]
        if not self._ranked:
            return ended
        ended.sort(key=_mean_logprob, reverse=True)
        del ended[self.n :]
        for index, completion in enumerate(ended):
            completion.index = index
            if self.submission.params.logprobs is None:
                completion.logprobs = completion.cumulative_logprob = None
        return ended

    def _output(self, outputs: list[CompletionOutput]) -> RequestOutput:
        self.finished = self._live == 0
        output = RequestOutput(
            self.request_id, self._prompt, self.prompt_token_ids, self.prompt_logprobs, outputs, self.finished,
            self.times.snapshot() if self.finished else None, self.lora_request, self.num_cached_tokens,
        )  # fmt: skip
        if self._delta:
            self.prompt_logprobs = None
        return output


def _mean_logprob(completion: CompletionOutput) -> float:
    """Rank of one of best_of's children: failed and empty ones last. Equal ones keep their order (stable sort)."""
    if not completion.token_ids or completion.cumulative_logprob is None:
        return NEVER_RANKED
    return completion.cumulative_logprob / len(completion.token_ids)


def core_params(params: SamplingParams, logprobs_mode: str) -> SamplingParams:
    """The params that the core runs with: the caller's own object, but for best_of without log-probabilities.

    Raises BadRequestError where ranking is impossible.
    """
    if params.best_of is None:
        return params
    if not logprobs_mode.endswith("logprobs"):
        raise BadRequestError(
            f"best_of ranks by log-probability, but this engine's logprobs_mode is {logprobs_mode}", "best_of"
        )
    if params.logprobs is not None:
        return params
    ranked = params.clone()
    ranked.logprobs = 0
    return ranked


def fan_out(
    submission: Submission, next_handles: Callable[[int], list[int]], opened: list[SamplingRequest]
) -> SamplingRequest:
    """Give the submission's children their handles; the core request is complete afterwards.

    `next_handles(count)` gives fresh handles; `opened` is where parents announce an output at the end of a step.
    """
    count = submission.params.num_children
    handles = next_handles(count)
    submission.core_request.handles = handles
    if count == 1:
        return SingularSamplingRequest(submission, handles)
    return ParentRequest(submission, handles, opened)
