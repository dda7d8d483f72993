"""What `generate` returns.

Outputs handed out are never changed by the engine afterwards. They are msgspec structs: slots, cheap to make with
positional arguments, picklable, comparable.
"""

from __future__ import annotations

import msgspec

from vllm.logprobs import PromptLogprobs, SampleLogprobs
from vllm.lora.request import LoRARequest


class RequestStateStats(msgspec.Struct, gc=False):
    """Times and counts of one request. For n > 1: the earliest arrival, schedule and first token, the latest last
    token, and sums over the children. `arrival_time` is seconds since the epoch, the `_ts` are of time.monotonic(),
    0.0 for never."""

    num_generation_tokens: int = 0
    arrival_time: float = 0.0
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    first_token_latency: float = 0.0
    """Seconds from arrival to the first token of the first child."""
    num_preemptions: int = 0


class CompletionOutput(msgspec.Struct, gc=False):
    """One of the n completions of a request."""

    index: int
    """0 .. n-1."""
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    """Sum of the log-probabilities of the generated tokens; None unless log-probabilities were asked for."""
    logprobs: SampleLogprobs | None = None
    """One entry per id in token_ids, the sampled token first in each."""
    finish_reason: str | None = None
    """"stop", "length", "abort" or "error"; None while it goes on."""
    stop_reason: int | str | None = None
    """The stop string, or the stop token's id; None for end-of-sequence and for every other reason."""
    lora_request: LoRARequest | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


class RequestOutput(msgspec.Struct, gc=False):
    """One request's completions: all of them (FINAL_ONLY), or those that moved since the last output."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int] | None
    prompt_logprobs: PromptLogprobs | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestStateStats | None = None
    lora_request: LoRARequest | None = None
    num_cached_tokens: int | None = None
    """Prompt tokens whose keys and values were in the cache before this request came."""
