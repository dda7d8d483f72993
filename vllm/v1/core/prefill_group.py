"""Prefill groups: live children with one prompt, which is computed once for all of them.

The invariant, for a prompt of 37 tokens, block size 16, children a, b and c:

    group.blocks   [full 0][full 1][5 of 16]          one reference each, from the first computed token
                      |       |       |                until the group's last member ends, or it drops its prompt
    a (RUNNING)    [full 0][full 1][  same ][ own ]   `group.writer`: the first one in goes on in the partial block
    b (RUNNING)    [full 0][full 1][ copy  ][ own ]   every other one writes into a copy of it, made as it enters a slot
    c (READY)      no blocks: its first token is known, it waits for a slot

    every RUNNING child's table begins with the same full prompt blocks, and holds a reference on each of them;
    positions 0 .. 36 of group.blocks never change: the writer only ever writes behind them, so that the partial block
    can be copied at any time, also while the writer goes on in it. There is at most one writer, and a child becomes it
    only if nobody but the group refers to the block; when memory is short and the writer has left, the copy of a
    running child takes the place of the group's block, and that child becomes the writer. So a request of one child
    costs no copy and no extra block, and one running child never needs more blocks than its own tokens fill, however
    many siblings wait.

The way of a group and of its members:

    WAITING ---- slot, blocks ---> PREFILL ---- last prompt token ---> COMPLETE (holds its prompt)
       ^                              |                                   |
       +------- preempted: all blocks, all members -------+--- drops it --+  (memory pressure, nobody RUNNING)

    PENDING --- drawn from the hidden row ---> READY <--- slot / preemption ---> RUNNING ---> ENDED

While it is WAITING or in PREFILL the group as a whole is one entity of the scheduler: it stands in one slot and one
row, under the name of a member (the leader). The leader has no part of its own in that, so when it is aborted the next
member simply leads. When the last prompt token is computed all PENDING members draw their first tokens from that hidden
row, with or without a slot, and the slot becomes free; only a member that is alone in its group and stood in the slot
stays there and draws as a row of its own.

The hidden row is kept, under the group's number, while there may be members who need it later: members that are not
ready, and, where strangers may join, as long as the group lives. That keeps the count of computed prompt tokens exact
(64 duplicates of a 1,024-token prompt compute 1,024 tokens, whenever they come) at the price of one row of hidden
state per live prompt; the prompt's blocks need not even be held for it. A group that dropped its prompt
computes it again before a READY member can run, and nobody draws then.
"""

from __future__ import annotations

import enum
import heapq
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from vllm.lora.request import LoRARequest
from vllm.model_executor.backends.interface import Int32s, LogprobColumns
from vllm.v1.core.request import Child, ChildState, Key, Request


class GroupState(enum.IntEnum):
    WAITING = 0
    PREFILL = 1
    COMPLETE = 2


@dataclass(slots=True)
class PromptLogprobs:
    """Log-probabilities of a prompt, by chunks, as the chunks are computed."""

    num_logprobs: int
    request: Request
    chunks: list[LogprobColumns] = field(default_factory=list)
    complete: bool = False


class PrefillGroup:
    """See the module's docstring. The scheduler moves its members and its state, the KV cache manager its blocks."""

    __slots__ = (
        "blocks",
        "digests",
        "drawn",
        "epoch",
        "full_blocks",
        "kept",
        "key",
        "leader",
        "lora_request",
        "num_computed",
        "num_done",
        "num_drawing",
        "num_live",
        "num_running",
        "number",
        "pending",
        "prompt",
        "prompt_bytes",
        "prompt_len",
        "prompt_logprobs",
        "queued",
        "reads_cache",
        "ready",
        "root",
        "slot",
        "source",
        "state",
        "unstarted",
        "writer",
    )

    def __init__(
        self, number: int, prompt: Int32s, key: tuple[object, ...] | None, lora_request: LoRARequest | None
    ) -> None:
        self.number = number
        """Serial number: the key of its hidden row, and the order of its rows among others."""
        self.prompt = prompt
        self.prompt_len = len(prompt)
        self.prompt_bytes = prompt.data.cast("B")
        self.key = key
        """By which strangers find it; None when they may not join."""
        self.lora_request = lora_request
        self.root = b""
        """Digest before the first token: LoRA, cache salt, weights version. Empty without prefix caching."""
        self.digests: list[bytes] = []
        """Of the prompt's leading full blocks, as far as they were needed."""
        self.reads_cache = False
        self.state = GroupState.WAITING
        self.drawn = False
        """The prompt was complete once: whoever is PENDING now draws from the kept row."""
        self.blocks: list[int] = []
        self.full_blocks: npt.NDArray[np.intp] = np.empty(0, np.intp)
        """blocks without a partial one, while COMPLETE."""
        self.num_computed = 0
        """Prompt tokens whose KV is in `blocks`, once the steps that are under way have run."""
        self.num_done = 0
        """The same, of the steps that have been reported."""
        self.epoch = 0
        """Counts the times the blocks were given up; a report of an earlier epoch is about other blocks."""
        self.writer: Child | None = None
        self.source: PrefillGroup | None = None
        """Group that this one continues, until it starts: its partial block is copied in place of being computed."""
        self.slot = -1
        self.leader: Child | None = None
        """In PREFILL: under whose name it stands in the slot (also after that one was aborted)."""
        self.kept = False
        """The runner keeps the hidden row."""
        self.num_live = 0
        self.num_running = 0
        self.num_drawing = 0
        self.pending: list[tuple[Key, Child]] = []  # heap, with ended ones
        self.ready: list[tuple[Key, Child]] = []  # heap, with ended ones
        self.unstarted: list[Request] = []
        """Requests that joined before it ran."""
        self.queued: Key | None = None
        """Its key in the wait queue."""
        self.prompt_logprobs: PromptLogprobs | None = None

    @property
    def is_idle(self) -> bool:
        """Holds blocks and nobody uses them now."""
        return self.state == GroupState.COMPLETE and not self.num_running and not self.num_drawing

    def add(self, request: Request) -> None:
        """The request's children become members, PENDING."""
        self.num_live += request.num_live
        entries = [(child.key, child) for child in request.children]
        if self.pending:
            for entry in entries:
                heapq.heappush(self.pending, entry)
        else:
            self.pending = entries  # sorted, so a heap

    def add_ready(self, child: Child) -> None:
        child.state = ChildState.READY
        heapq.heappush(self.ready, (child.key, child))

    def best_pending(self) -> Child | None:
        return _best(self.pending, ChildState.PENDING)

    def best_ready(self) -> Child | None:
        return _best(self.ready, ChildState.READY)

    def pop_ready(self) -> Child:
        """Take out the one that `best_ready` named."""
        return heapq.heappop(self.ready)[1]

    def take_drawable(self) -> list[Child]:
        """Take out the PENDING members that can draw, in order."""
        live = sorted((entry for entry in self.pending if entry[1].state == ChildState.PENDING), key=_entry_key)
        self.pending = [entry for entry in live if entry[1].waits]
        return [child for _, child in live if not child.waits]

    @property
    def best_key(self) -> Key | None:
        """Of the members that are not RUNNING and can do something, or None: the group's priority."""
        ready = self.best_ready()
        pending = None if self.drawn else self.best_pending()
        if ready is None or (pending is not None and pending.key < ready.key):
            return None if pending is None else pending.key
        return ready.key


def _entry_key(entry: tuple[Key, Child]) -> Key:
    return entry[0]


def _best(heap: list[tuple[Key, Child]], state: ChildState) -> Child | None:
    """The first live one of a heap. Those in another state have ended."""
    while heap:
        child = heap[0][1]
        if child.state == state:
            return child
        heapq.heappop(heap)
    return None


class WaitQueue:
    """Groups with members to be served, best key first. Entries are left behind when a key changes, and skipped."""

    def __init__(self) -> None:
        self._heap: list[tuple[Key, int, PrefillGroup]] = []

    def update(self, group: PrefillGroup) -> None:
        """Put `group` where its best key belongs, or nowhere."""
        key = None if group.state == GroupState.PREFILL else group.best_key
        if key != group.queued:
            group.queued = key
            if key is not None:
                heapq.heappush(self._heap, (key, group.number, group))

    def remove(self, group: PrefillGroup) -> None:
        group.queued = None

    def peek(self) -> PrefillGroup | None:
        heap = self._heap
        while heap:
            key, _, group = heap[0]
            if group.queued == key:
                return group
            heapq.heappop(heap)
        return None

    def groups(self) -> set[PrefillGroup]:
        return {group for key, _, group in self._heap if group.queued == key}
