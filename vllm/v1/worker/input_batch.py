"""The runner's persistent arrays, one row per slot, and a step's batch made from them.

    slot s   token_ids[s]     prompt | output | (the token drawn this step goes here)
                              0      num_prompt[s]  num_tokens[s]
             block_tables[s]  blocks of its KV cache, in order
             temperature[s], seeds[s], …            what a draw needs

Nothing moves when sequences come and go. The scheduler never tells token values of a running sequence: the runner feeds
its own draws (`append`). All arrays are numpy; memory of the two big ones is touched only as far as it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from vllm.config import VllmConfig
from vllm.exceptions import UnsupportedError
from vllm.model_executor.backends.interface import Float32s, ForwardBatch, Int32s, Int64s
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.draws import Draws, DrawSettings, Edit
from vllm.v1.sample.processors import ChildProcessors
from vllm.v1.step import Fork, NewSequence, SchedulerOutput
from vllm.v1.structured_output.manager import GrammarManager


class InputBatch:
    """See the module's docstring. A method that takes a SchedulerOutput reads it and keeps none of it."""

    def __init__(self, config: VllmConfig, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        slots, length = config.scheduler.max_num_seqs, config.model.max_model_len
        self.block_size = config.cache.block_size
        self.vocab_size = vocab_size
        self.eos_token_ids = list(eos_token_ids)
        self.token_ids = np.zeros((slots, length + 1), np.int32)
        self.block_tables = np.zeros((slots, -(-(length + 1) // self.block_size)), np.int32)
        self.num_prompt = np.zeros(slots, np.int32)
        self.num_tokens = np.zeros(slots, np.int32)
        self.handles = np.full(slots, -1, np.int64)
        self.seeds = np.zeros(slots, np.uint64)
        self.temperature = np.zeros(slots, np.float32)
        self.top_k = np.zeros(slots, np.int32)
        self.top_p = np.zeros(slots, np.float32)
        self.min_p = np.zeros(slots, np.float32)
        self.num_logprobs = np.zeros(slots, np.int32)
        self.min_tokens = np.zeros(slots, np.int32)
        self.edits = np.zeros(slots, np.bool_)
        self.settings: list[DrawSettings | None] = [None] * slots
        self.processors: dict[int, ChildProcessors] = {}
        """By handle, from a child's first token to its end: they outlive a preemption and the wait for a slot."""
        self._has_processors = np.zeros(slots, np.bool_)
        self.grammars: GrammarManager | None = None
        """Set by the worker, if it takes constraints."""
        self._shared: dict[tuple[int, int], tuple[SamplingParams, Int32s, DrawSettings]] = {}
        self._count = np.arange(max(slots, config.scheduler.max_num_batched_tokens) + 1, dtype=np.int32)

    # What the scheduler changed

    def apply(self, step: SchedulerOutput) -> None:
        """Slots freed, sequences entered, blocks added, children ended."""
        self._shared.clear()
        for handle in step.finished_handles:
            self.processors.pop(handle, None)
        if self.grammars is not None:
            self.grammars.end(step.finished_handles)
        for slot in step.freed_slots:
            self.settings[slot] = None
            self.handles[slot] = -1
        for sequence in step.new_sequences:
            self._enter(sequence)
        tables = self.block_tables
        for slot, start, ids in step.block_updates:
            if len(ids) == 1:
                tables[slot, start] = ids[0]
            else:
                tables[slot, start : start + len(ids)] = ids

    def _enter(self, sequence: NewSequence) -> None:
        if sequence.lora_request is not None:
            raise UnsupportedError("LoRA adapters (lora_request) are not built yet")
        slot = sequence.slot
        prompt, output = sequence.prompt_token_ids, sequence.output_token_ids
        length = len(prompt)
        self.token_ids[slot, :length] = prompt
        if output:
            self.token_ids[slot, length : length + len(output)] = output
        self.num_prompt[slot] = length
        self.num_tokens[slot] = length + len(output)
        self.block_tables[slot, : len(sequence.block_ids)] = sequence.block_ids
        self.handles[slot] = sequence.handle
        settings = self._settings_of(sequence.params, prompt)
        self.settings[slot] = settings
        self.seeds[slot] = sequence.seed
        self.temperature[slot] = settings.temperature
        self.top_k[slot] = settings.top_k
        self.top_p[slot] = settings.top_p
        self.min_p[slot] = settings.min_p
        self.num_logprobs[slot] = settings.num_logprobs
        self.min_tokens[slot] = settings.min_tokens
        processors = self._processors_of(sequence.handle, sequence.params)
        self._has_processors[slot] = processors is not None
        self.edits[slot] = settings.edits or processors is not None or settings.constrained is not None

    def _settings_of(self, params: SamplingParams, prompt: Int32s) -> DrawSettings:
        """Siblings that come in one step share one, known by their params and prompt objects. Not longer than that
        step: params are mutable, and the caller's own object may come again, changed."""
        key = (id(params), id(prompt))
        entry = self._shared.get(key)
        if entry is None:
            settings = DrawSettings(params, prompt, self.vocab_size, self.eos_token_ids)
            self._shared[key] = entry = (params, prompt, settings)
        return entry[2]

    def _processors_of(self, handle: int, params: SamplingParams) -> ChildProcessors | None:
        if not params.logits_processors:
            return None
        found = self.processors.get(handle)
        if found is None:
            found = ChildProcessors(params.logits_processors, own_copies=params.num_children > 1)
            self.processors[handle] = found
        return found

    # The step's tokens

    def forward_batch(self, step: SchedulerOutput) -> tuple[ForwardBatch, Int32s, dict[int, tuple[int, int]]]:
        """The batch; per row the index among `hidden_rows` of its last token (where it is needed); and per row that
        wants prompt log-probabilities the range of its tokens among `hidden_rows`."""
        slots, counts, computed = step.slots, step.num_tokens, step.num_computed
        rows = len(slots)
        lengths = computed + counts
        total = int(counts.sum())
        if total == rows and int(counts.max()) == 1:  # decode: a token each
            query_start = self._count[: rows + 1]
            positions = computed
            token_ids = self.token_ids[slots, computed]
        else:
            query_start = np.zeros(rows + 1, np.int32)
            np.cumsum(counts, out=query_start[1:])
            positions = np.repeat(computed - query_start[:-1], counts)
            positions += self._arange(total)
            token_ids = self.token_ids[np.repeat(slots, counts), positions]
        width = -(-int(lengths.max()) // self.block_size)
        hidden_rows, last, ranges = self._hidden_rows(step, query_start, total)
        batch = ForwardBatch(
            token_ids=token_ids,
            positions=positions,
            query_start=query_start,
            seq_lens=lengths,
            block_tables=self.block_tables[slots, :width],
            hidden_rows=hidden_rows,
            shared_rows=np.array([(first, count) for first, count, _ in step.shared], np.int32).reshape(-1, 2),
            shared_blocks=np.array([blocks for _, _, blocks in step.shared], np.int32),
        )
        return batch, last, ranges

    def _hidden_rows(
        self, step: SchedulerOutput, query_start: Int32s, total: int
    ) -> tuple[Int32s, Int32s, dict[int, tuple[int, int]]]:
        if not step.forks and not step.prompt_logprobs and step.samples.all():
            return query_start[1:] - np.int32(1), self._arange(len(step.slots)), {}
        needed = step.samples.copy()
        for fork in step.forks:
            if fork.row >= 0:
                needed[fork.row] = True
        last_tokens = query_start[1:] - np.int32(1)
        if not step.prompt_logprobs:
            return last_tokens[needed], (np.cumsum(needed) - 1).astype(np.int32), {}
        mark = np.zeros(total, np.bool_)
        mark[last_tokens[needed]] = True
        spans = {}
        for row, _ in step.prompt_logprobs:
            start, computed = int(query_start[row]), int(step.num_computed[row])
            prompt = int(self.num_prompt[step.slots[row]])
            count = max(0, min(int(step.num_tokens[row]), prompt - 1 - computed))
            spans[row] = (start, start + count)
            mark[start : start + count] = True
        before = np.zeros(total + 1, np.int32)
        np.cumsum(mark, out=before[1:])
        ranges = {row: (int(before[start]), int(before[stop])) for row, (start, stop) in spans.items()}
        return np.flatnonzero(mark).astype(np.int32), before[last_tokens], ranges

    def prompt_targets(self, step: SchedulerOutput, row: int, count: int) -> Int32s:
        """The prompt tokens that follow the first `count` tokens that row `row` computes in this step."""
        start = int(step.num_computed[row]) + 1
        return self.token_ids[step.slots[row], start : start + count]

    def _arange(self, count: int) -> Int32s:
        return self._count[:count] if count < len(self._count) else np.arange(count, dtype=np.int32)

    # The step's draws

    def row_draws(self, slots: Int32s, hidden: Int32s) -> Draws:
        """One draw for each of `slots`, from `hidden`'s rows."""
        positions: Int64s = (self.num_tokens[slots] - self.num_prompt[slots]).astype(np.int64)
        draws = Draws(
            rows=hidden,
            temperature=self.temperature[slots],
            top_k=self.top_k[slots],
            top_p=self.top_p[slots],
            min_p=self.min_p[slots],
            seeds=self.seeds[slots],
            positions=positions,
            num_logprobs=self.num_logprobs[slots],
        )
        edited = self.edits[slots] | (positions < self.min_tokens[slots])
        for draw in np.flatnonzero(edited).tolist():
            slot = int(slots[draw])
            settings = self.settings[slot]
            assert settings is not None
            output = self.token_ids[slot, self.num_prompt[slot] : self.num_tokens[slot]]
            handle = int(self.handles[slot])
            own = self.processors[handle] if self._has_processors[slot] else None
            draws.edits.append(self._edit(draw, handle, settings, output, own))
        return draws

    def fork_draws(self, fork: Fork, hidden: int) -> Draws:
        """The first token of each member, all from one row."""
        nothing = np.zeros(0, np.int32)
        parts = []
        members = fork.members
        start = 0
        while start < len(members):
            params = members[start].params
            stop = start + 1
            while stop < len(members) and members[stop].params is params:
                stop += 1
            settings = self._settings_of(params, fork.prompt_token_ids)
            seeds = np.array([member.seed for member in members[start:stop]], np.uint64)
            part = Draws.repeat(settings, hidden, seeds)
            if settings.edits or settings.min_tokens or params.logits_processors or settings.constrained:
                for draw, member in enumerate(members[start:stop]):
                    own = self._processors_of(member.handle, params)
                    part.edits.append(self._edit(draw, member.handle, settings, nothing, own))
            parts.append(part)
            start = stop
        return Draws.join(parts)

    def _edit(
        self, draw: int, handle: int, settings: DrawSettings, output: Int32s, own: ChildProcessors | None
    ) -> Edit:
        processor = own.bind(settings.prompt_ids, output) if own is not None else None
        edit = Edit(draw, settings, output, processor)
        if settings.constrained is not None:
            try:
                edit.mask = self._mask(handle, settings, output)
            except Exception as error:  # noqa: BLE001 - raised by the draw, where it ends this child's request alone
                edit.processor = _raising(error)
        return edit

    def _mask(self, handle: int, settings: DrawSettings, output: Int32s) -> npt.NDArray[np.uint32]:
        """What the child's grammar allows next, with what must not come now taken out. Raises if nothing is left."""
        if self.grammars is None or settings.constrained is None:
            raise UnsupportedError("structured_outputs: this worker takes no constraints")
        mask = self.grammars.state(handle, settings.constrained).mask(output)
        left = mask if settings.allowed is None else mask & settings.allowed
        banned = settings.banned(output)
        if len(banned):
            left = left.copy()
            np.bitwise_and.at(left, banned >> 5, ~(np.uint32(1) << (banned & 31).astype(np.uint32)))
        if not left.any():
            raise ValueError(
                "structured_outputs: nothing is left to generate: what the constraint allows is excluded by "
                "min_tokens, bad_words or allowed_token_ids"
            )
        return left

    def append(self, slots: Int32s, token_ids: Int32s) -> None:
        """Drawn tokens become the next step's input."""
        ends = self.num_tokens[slots]
        self.token_ids[slots, ends] = token_ids
        self.num_tokens[slots] = ends + np.int32(1)

    def occupied(self) -> npt.NDArray[np.int64]:
        """Slots that hold a sequence (for tests)."""
        return np.flatnonzero(self.handles >= 0)


def _raising(error: Exception) -> Callable[[Float32s], Float32s]:
    def processor(_: Float32s) -> Float32s:
        raise error

    return processor
