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


FIXED = ("prompt_len", "max_outputs", "min_outputs", "num_cached", "shared_blocks", "group")
_SHARED_BLOCKS = FIXED.index("shared_blocks")


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
        self._fixed = np.zeros((size, len(FIXED) + STOP_COLUMNS), np.int64)
        """What does not change while a child is in the slot: one row, written at once."""
        self.prompt_len = self._column("prompt_len")
        self.max_outputs = self._column("max_outputs")
        self.min_outputs = self._column("min_outputs")
        self.num_cached = self._column("num_cached")
        self.shared_blocks = self._column("shared_blocks")
        """Full prompt blocks, the same for all children of a group."""
        self.group = self._column("group")
        self.stop = self._fixed[:, len(FIXED) :]
        """Stop ids, -1 where there are no more of them."""
        self.many_stops: set[int] = set()
        """Slots with more than STOP_COLUMNS stop ids; theirs are not in `stop`."""
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
        self._fixed[slot] = self._fixed_row(child)
        if len(request.stop_token_ids) > STOP_COLUMNS:
            self.many_stops.add(slot)
        self.last_token[slot] = child.time_last
        self.stream[slot] = request.stream
        self.has_logprobs[slot] = request.has_logprobs

    def _fixed_row(self, child: Child) -> npt.NDArray[np.int64]:
        """The same for all children of a request while their group's prompt stays where it is."""
        request, group = child.request, child.group
        row = request.slot_row
        if row is None or row[_SHARED_BLOCKS] != len(group.full_blocks):
            stops = sorted(request.stop_token_ids) if len(request.stop_token_ids) <= STOP_COLUMNS else []
            fixed = {
                "prompt_len": request.prompt_len,
                "max_outputs": request.max_outputs,
                "min_outputs": request.min_outputs,
                "num_cached": request.num_cached,
                "shared_blocks": len(group.full_blocks),
                "group": group.number,
            }
            values = [*(fixed[name] for name in FIXED), *stops, *[-1] * (STOP_COLUMNS - len(stops))]
            row = request.slot_row = np.array(values, np.int64)
        return row

    def _column(self, name: str) -> npt.NDArray[np.int64]:
        return self._fixed[:, FIXED.index(name)]

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
