"""What crosses between the front end and the engine core, in process or over a socket. Plain data, columns, no text.

Between the two sides a child is a 64-bit *handle* chosen by the front end: client index in the top 16 bits, a counter
that never repeats below (`make_handle`). User ids, prompts' text and output text stay in the front end.
"""

from __future__ import annotations

import enum

import msgspec
import numpy as np
import numpy.typing as npt

from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams

HANDLE_CLIENT_SHIFT = 48


def make_handle(client_index: int, counter: int) -> int:
    return (client_index << HANDLE_CLIENT_SHIFT) | counter


class FinishReason(enum.IntEnum):
    """Why a child ended. NONE marks a child that goes on. `str()` gives the API's word."""

    NONE = 0
    STOP = 1
    LENGTH = 2
    ABORT = 3
    ERROR = 4

    def __str__(self) -> str:
        return self.name.lower()


class EngineCoreRequest(msgspec.Struct, array_like=True, gc=False):
    """One user request, with all its children: accepted into the waiting queue as a whole or not at all.

    Child i is handles[i]; it samples with Philox key (seed + i) mod 2**63 where `seed` is params.seed, or a number that
    the core draws for this request when that is None.
    """

    handles: list[int]
    prompt_token_ids: npt.NDArray[np.int32]
    params: SamplingParams
    """Shared by the children, already validated and with max_tokens filled in. Callables only in process."""
    arrival_time: float
    """time.monotonic() of the front end."""
    stream: bool
    """True: every token is reported in the step that made it (DELTA, CUMULATIVE, or stop strings to look for).
    False: a child's tokens are reported once, when it ends."""
    eos_token_ids: list[int] = []
    """End-of-sequence ids of the model; empty when params.ignore_eos."""
    priority: int = 0
    """Lower runs earlier."""
    lora_request: LoRARequest | None = None
    cache_salt: str | None = None
    finish_after: int | None = None
    """Abort the remaining children once this many have ended with STOP or LENGTH. The core counts those it ends itself;
    the front end counts those it stops (stop strings) and reports them by `stop_children`."""
    index_offset: int = 0
    """Child index of handles[0], for a request that is submitted in several messages."""
    hold: bool = False
    """Its children never draw. They keep the prompt's blocks, which others compute, until they are aborted."""
    continues: int = -1
    """Handle of a live child whose whole prompt this prompt begins with: what that one's group has computed is taken
    over, its partial block by a copy. -1, or a handle that is not live any more: what the prefix cache has."""


class LogprobColumnsMsg(msgspec.Struct, array_like=True, gc=False):
    """`LogprobColumns` of the backend interface, as it travels. Entry e belongs to token e of the message."""

    offsets: npt.NDArray[np.int32]
    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    ranks: npt.NDArray[np.int32]


class ChildTimes(msgspec.Struct, array_like=True, gc=False):
    """Columns beside the finished children of a message, in seconds of the core's time.monotonic(); 0 for never."""

    scheduled: npt.NDArray[np.float64]
    first_token: npt.NDArray[np.float64]
    last_token: npt.NDArray[np.float64]
    num_preemptions: npt.NDArray[np.int32]


class SchedulerStats(msgspec.Struct, array_like=True, gc=False):
    """State and counts after a step; counts are totals since the engine started."""

    step: int = 0
    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    prompt_tokens: int = 0
    """Prompt tokens of the requests taken in (once per request, whatever n)."""
    prompt_tokens_computed: int = 0
    """Prompt tokens that went through the model."""
    generation_tokens: int = 0
    prefix_cache_queries: int = 0
    """Tokens looked up in the prefix cache."""
    prefix_cache_hits: int = 0
    num_preemptions: int = 0


class EngineCoreOutputs(msgspec.Struct, array_like=True, gc=False):
    """One step's news, in columns. Child h of the message is handles[h]; its new tokens are
    token_ids[offsets[h] : offsets[h + 1]] (several after speculation, none for an abort with nothing unsent)."""

    handles: npt.NDArray[np.int64]  # [H]
    offsets: npt.NDArray[np.int32]  # [H + 1]
    token_ids: npt.NDArray[np.int32]  # [offsets[-1]]
    finish_reasons: npt.NDArray[np.uint8]  # [H], FinishReason
    stop_reasons: npt.NDArray[np.int64]  # [H], the stop token's id, -1 for none
    num_cached_tokens: npt.NDArray[np.int32]  # [H]
    logprobs: LogprobColumnsMsg | None = None  # entry per token, empty entries for children that asked for none
    finished_times: ChildTimes | None = None  # a row per child with finish_reasons != 0, in their order
    prompt_logprobs: dict[int, LogprobColumnsMsg] = {}
    """By the handle of a request's first child, complete (prompt_len - 1 entries), sent once with its first report."""
    errors: dict[int, str] = {}
    """Handle -> message, beside FinishReason.ERROR."""
    first_token_handles: npt.NDArray[np.int64] | None = None
    """Children whose first token came in this step, also those that are not reported yet (for metrics)."""
    new_tokens: int = 0
    """Tokens generated in this step, reported or not (for progress bars)."""
    stats: SchedulerStats | None = None
    timestamp: float = 0.0
