"""The slots as columns: what every step asks of every running sequence, one array per question, indexed by slot.

A slot is free, or a child's, or a group's in PREFILL (and for the rest of the step in which its prompt becomes
complete). Rows of a step are made from these arrays without a loop over the sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm.v1.core.prefill_group import PrefillGroup
from vllm.v1.core.request import Child

STOP_COLUMNS = 8
"""Stop ids that are compared as columns; a child with more of them is looked at alone."""


@dataclass(slots=True)
class Rows:
    """Decode rows in the order of a step, members of one group side by side. Never changed once made."""

    slots: npt.NDArray[np.int32]
    handles: npt.NDArray[np.int64]
    shared: list[tuple[int, int, int]]
    """(first row, rows, leading full blocks in common)"""
    ones: npt.NDArray[np.int32]
    samples: npt.NDArray[np.bool_]


class SlotTable:
    def __init__(self, size: int) -> None:
        self.size = size
        self.handle = np.full(size, -1, np.int64)
        """-1: nobody's. A report about another handle is about a sequence that has left the slot."""
        self.computed = np.zeros(size, np.int32)
        """Tokens whose KV is in the cache once the steps under way have run."""
        self.outputs = np.zeros(size, np.int32)
        """Tokens generated, those being drawn in the steps under way included."""
        self.blocks = np.zeros(size, np.int32)
        """Length of the block table."""
        self.prompt_len = np.zeros(size, np.int32)
        self.max_outputs = np.zeros(size, np.int32)
        self.min_outputs = np.zeros(size, np.int32)
        self.num_cached = np.zeros(size, np.int32)
        self.stop = np.full((size, STOP_COLUMNS), -1, np.int32)
        self.many_stops: set[int] = set()
        """Slots with more than STOP_COLUMNS stop ids; theirs are not in `stop`."""
        self.group = np.zeros(size, np.int64)
        self.shared_blocks = np.zeros(size, np.int32)
        """Full prompt blocks, the same for all children of a group."""
        self.last_token = np.zeros(size, np.float64)
        self.stream = np.zeros(size, np.bool_)
        self.has_logprobs = np.zeros(size, np.bool_)
        self.decodes = np.zeros(size, np.bool_)
        """A child that lacks the KV of its last token only: one token a step, one draw."""
        self.owner: list[Child | PrefillGroup | None] = [None] * size
        self.append: list[Callable[[int], None]] = [_nobody] * size
        """Takes the child's next token."""
        self._free = list(range(size - 1, -1, -1))
        self._rows: Rows | None = None

    @property
    def num_free(self) -> int:
        return len(self._free)

    def enter_group(self, group: PrefillGroup, leader: Child) -> int:
        slot = self._free.pop()
        self.owner[slot] = group
        self.handle[slot] = leader.handle
        self.blocks[slot] = len(group.blocks)
        return slot

    def enter_child(self, child: Child, slot: int, computed: int, outputs: int) -> None:
        """Fill in a slot; `outputs` counts the draw of this step if it makes one."""
        request = child.request
        self.owner[slot] = child
        self.append[slot] = child.tokens.append
        self.handle[slot] = child.handle
        self.computed[slot] = computed
        self.outputs[slot] = outputs
        self.blocks[slot] = len(child.blocks)
        self.prompt_len[slot] = request.prompt_len
        self.max_outputs[slot] = request.max_outputs
        self.min_outputs[slot] = request.min_outputs
        self.num_cached[slot] = request.num_cached
        self.stop[slot] = -1
        if len(request.stop_token_ids) > STOP_COLUMNS:
            self.many_stops.add(slot)
        elif request.stop_token_ids:
            self.stop[slot, : len(request.stop_token_ids)] = list(request.stop_token_ids)
        self.group[slot] = child.group.number
        self.shared_blocks[slot] = len(child.group.full_blocks)
        self.last_token[slot] = child.time_last
        self.stream[slot] = request.stream
        self.has_logprobs[slot] = request.has_logprobs

    def take(self) -> int:
        return self._free.pop()

    def close(self, slot: int) -> None:
        """Nobody's from now on, but not to be given out before `give_back`."""
        self.handle[slot] = -1
        self.owner[slot] = None
        self.append[slot] = _nobody
        self.many_stops.discard(slot)
        if self.decodes[slot]:
            self.set_decodes(slot, False)

    def give_back(self, slot: int) -> None:
        self._free.append(slot)

    def set_decodes(self, slot: int, value: bool) -> None:
        self.decodes[slot] = value
        self._rows = None

    def rows(self) -> Rows:
        """All decode rows. The same object until a child enters or leaves."""
        if self._rows is None:
            self._rows = self.arrange(np.flatnonzero(self.decodes).astype(np.int32))
        return self._rows

    def arrange(self, slots: npt.NDArray[np.int32]) -> Rows:
        """Rows of some of the slots that decode, members of one group side by side."""
        groups = self.group[slots]
        order = np.argsort(groups, kind="stable")
        slots = slots[order]
        groups = groups[order]
        shared: list[tuple[int, int, int]] = []
        if len(slots) > 1:
            first = np.flatnonzero(np.concatenate(([True], groups[1:] != groups[:-1])))
            counts = np.diff(np.append(first, len(slots)))
            blocks = self.shared_blocks[slots[first]]
            sets = np.flatnonzero((counts > 1) & (blocks > 0))
            shared = list(zip(first[sets].tolist(), counts[sets].tolist(), blocks[sets].tolist(), strict=True))
        return Rows(
            slots=slots,
            handles=self.handle[slots],
            shared=shared,
            ones=np.ones(len(slots), np.int32),
            samples=np.ones(len(slots), np.bool_),
        )


def _nobody(token: int) -> None:
    raise AssertionError(f"token {token} for a slot without a child")
