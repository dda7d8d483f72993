"""What the core knows of a request and of its children.

Tokens of a child: the prompt is its group's; `tokens` holds what it generated. While it is in a slot, how far its cache
reaches stands in the slot's arrays (`sched.slots`), not here.
"""

from __future__ import annotations

import enum
import hashlib
import secrets
from array import array
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from vllm.v1.messages import EngineCoreRequest

if TYPE_CHECKING:
    from vllm.v1.core.prefill_group import PrefillGroup

SEED_RANGE = 2**63

Rank = tuple[int, float, int]
"""(priority, arrival time, order of submission): smaller is served earlier."""
Key = tuple[Rank, int]
"""(rank of the request, index of the child): the order of all children."""


class ChildState(enum.IntEnum):
    PENDING = 0
    """Waits for the prompt, or for its turn at the kept row: has no token yet."""
    DRAWING = 1
    """Its first token is being drawn in a step that has not been reported yet."""
    READY = 2
    """Has at least one token and no slot."""
    RUNNING = 3
    """Has a slot."""
    ENDED = 4


class SeedSource:
    """Base seeds of requests that bring none: repeatable by order of submission when the engine has a seed."""

    def __init__(self, engine_seed: int | None) -> None:
        self._engine_seed = engine_seed
        self._count = 0

    def next(self) -> int:
        self._count += 1
        if self._engine_seed is None:
            return secrets.randbits(63)
        text = f"{self._engine_seed}:{self._count}".encode()
        return int.from_bytes(hashlib.sha256(text).digest()[:8], "little") % SEED_RANGE


class LogprobStore:
    """Log-probabilities of a child's tokens that have not been reported yet, flat and compact."""

    __slots__ = ("lengths", "logprobs", "ranks", "token_ids")

    def __init__(self) -> None:
        self.lengths = array("i")
        self.token_ids = array("i")
        self.logprobs = array("f")
        self.ranks = array("i")

    def append(self, token_ids: memoryview, logprobs: memoryview, rank: int) -> None:
        """One entry; both views are bytes of 4-byte items."""
        self.lengths.append(len(token_ids) >> 2)
        self.token_ids.frombytes(token_ids)
        self.logprobs.frombytes(logprobs)
        self.ranks.append(rank)


class Request:
    """An accepted EngineCoreRequest: what its children share. Set at submission unless a comment says otherwise."""

    __slots__ = (
        "base_seed",
        "children",
        "eos_token_ids",
        "finish_after",
        "has_logprobs",
        "hold",
        "index_offset",
        "max_outputs",
        "min_outputs",
        "num_cached",
        "num_ended",
        "num_live",
        "params",
        "prompt_len",
        "rank",
        "slot_row",
        "stop_token_ids",
        "stream",
        "time_scheduled",
    )

    def __init__(self, message: EngineCoreRequest, rank: Rank, base_seed: int, max_outputs: int) -> None:
        params = message.params
        self.params = params
        self.rank = rank
        self.base_seed = base_seed
        self.index_offset = message.index_offset
        self.stream = message.stream
        self.prompt_len = len(message.prompt_token_ids)
        self.eos_token_ids = frozenset(message.eos_token_ids)
        self.stop_token_ids = frozenset(params.stop_token_ids or ()) | self.eos_token_ids
        self.min_outputs = params.min_tokens
        self.max_outputs = max_outputs
        self.has_logprobs = params.logprobs is not None
        self.finish_after = message.finish_after
        self.hold = message.hold
        self.num_ended = 0
        """Children that ended by themselves (stop or length, or a stop string the front end saw)."""
        self.num_live = len(message.handles)
        self.num_cached = 0
        """Prompt tokens that were in the cache before this request came; set when its group first runs."""
        self.time_scheduled = 0.0
        """When its group first ran."""
        self.children: list[Child] = []
        self.slot_row: npt.NDArray[np.int64] | None = None
        """Kept by `sched.slots`."""

    def stop_reason(self, token: int) -> int:
        """What to report for a stop at `token`: the id, or -1 for an end of sequence."""
        return -1 if token in self.eos_token_ids else token


class Child:
    """One completion."""

    __slots__ = (
        "blocks",
        "digest",
        "group",
        "handle",
        "index",
        "key",
        "logprobs",
        "num_hashed",
        "num_preemptions",
        "request",
        "slot",
        "state",
        "time_first",
        "time_last",
        "tokens",
        "waits",
    )

    def __init__(self, handle: int, request: Request, index: int, group: PrefillGroup, waits: bool) -> None:
        self.handle = handle
        self.request = request
        self.index = index
        self.key: Key = (request.rank, index)
        self.group = group
        self.state = ChildState.PENDING
        self.waits = waits
        """Not ready to draw its first token (a grammar still compiling): `Scheduler.set_ready` clears it."""
        self.slot = -1
        self.tokens = array("i")
        self.blocks: list[int] = []
        """Block table while RUNNING; the group's full prompt blocks come first."""
        self.digest = b""
        """Of the last of its blocks that was hashed, and how many those are; set on entering a slot."""
        self.num_hashed = 0
        self.logprobs: LogprobStore | None = None
        self.num_preemptions = 0
        self.time_first = 0.0
        self.time_last = 0.0
        """Of its last token, brought up to date when it leaves its slot."""

    @property
    def seed(self) -> int:
        return (self.request.base_seed + self.index) % SEED_RANGE

    @property
    def num_tokens(self) -> int:
        return self.request.prompt_len + len(self.tokens)
