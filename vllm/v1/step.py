"""What the scheduler hands to the model runner for one step, and what comes back. Plain data.

The scheduler gives every running sequence a *slot* (0 .. max_num_seqs - 1); the runner's persistent arrays are indexed
by it, so nothing moves when sequences come and go. A sequence is a child, or — while a shared prompt is being computed
— a whole prefill group standing in its leader's slot.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from vllm.lora.request import LoRARequest
from vllm.model_executor.backends.interface import Int32s, LogprobColumns
from vllm.sampling_params import SamplingParams


@dataclass(slots=True)
class NewSequence:
    """A sequence enters a slot: at its start, at the decode after its prompt's prefill, or again after a preemption."""

    slot: int
    handle: int
    params: SamplingParams
    seed: int
    """Philox key of this child, in 0 .. 2**63 - 1."""
    prompt_token_ids: Int32s
    output_token_ids: list[int]
    """Tokens generated so far. The list object is the core's own: the runner reads it now and does not keep it."""
    num_computed_tokens: int
    block_ids: list[int]
    lora_request: LoRARequest | None = None


@dataclass(slots=True)
class ForkSample:
    """First token of one member of a prefill group, drawn from the hidden row of `source`."""

    handle: int
    seed: int
    params: SamplingParams


@dataclass(slots=True)
class Fork:
    """The prompt of a group is complete: draw the members' first tokens from one hidden row.

    `row` is the index into SchedulerOutput.slots of the row that completes the prompt in this step, or -1 when the row
    was kept in an earlier step under `keep_key`. With `keep`, the row is kept afterwards under that key for later
    members (until it appears in `dropped_keys`)."""

    row: int
    prompt_token_ids: Int32s
    members: list[ForkSample]
    keep_key: int = 0
    keep: bool = False


@dataclass(slots=True)
class SchedulerOutput:
    """One step. Row r of the step is the sequence in slots[r], which computes num_tokens[r] tokens after the
    num_computed[r] that its cache holds.

    A row draws a token when it is a decode row, that is, when samples[r] is True; a row that completes a group's
    prompt draws nothing itself: its members do, through `forks`. Order of execution: freed_slots, new_sequences,
    block_updates, copies, forward, draws (rows in order, then forks in order, members in order).
    """

    slots: Int32s  # [R]
    num_tokens: Int32s  # [R]
    num_computed: Int32s  # [R]
    samples: npt.NDArray[np.bool_]  # [R]
    handles: npt.NDArray[np.int64]  # [R], for the results
    new_sequences: list[NewSequence] = field(default_factory=list)
    freed_slots: list[int] = field(default_factory=list)
    block_updates: list[tuple[int, int, list[int]]] = field(default_factory=list)
    """(slot, start, ids): block_table[slot, start : start + len(ids)] = ids; a copied partial block is one too."""
    copies: list[tuple[int, int]] = field(default_factory=list)
    """(source block, target block), all before the forward pass; no target is a source."""
    forks: list[Fork] = field(default_factory=list)
    dropped_keys: list[int] = field(default_factory=list)
    finished_handles: list[int] = field(default_factory=list)
    """Children that ended since the last step, running or not, in any way: the runner forgets what it keeps by handle
    (the state of a child's own logits processors, which must survive a preemption and the wait for a slot)."""
    shared: list[tuple[int, int, int]] = field(default_factory=list)
    """(first row, row count, leading full blocks in common), for attention that reads a shared prefix once; rows of a
    set are consecutive."""
    prompt_logprobs: list[tuple[int, int]] = field(default_factory=list)
    """(row, number asked for besides the token itself): these rows' prompt tokens want log-probabilities. Entry i of
    the result is the log-probability of prompt token num_computed + i + 1 given what precedes it; the last prompt
    token has none."""

    @property
    def is_empty(self) -> bool:
        return not (len(self.slots) or self.forks)


@dataclass(slots=True)
class RunnerOutput:
    """Draws of one step in their order: sampling rows first, then the forks' members."""

    handles: npt.NDArray[np.int64]  # [S]
    token_ids: Int32s  # [S]
    logprobs: LogprobColumns | None = None  # S entries
    prompt_logprobs: dict[int, LogprobColumns] = field(default_factory=dict)
    """By row of the step, this chunk's entries."""
    errors: dict[int, str] = field(default_factory=dict)
    """Handle -> what went wrong for that child alone (a logits processor raised); its token is invalid."""
