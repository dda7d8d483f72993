"""One step of the engine: apply the scheduler's changes, copy blocks, run the model, draw."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm.config import VllmConfig
from vllm.model_executor.backends.interface import Backend, Hidden, Int32s, LogprobColumns, Sampled
from vllm.v1.sample.columns import concatenate, empty_columns
from vllm.v1.sample.draws import Draws
from vllm.v1.step import RunnerOutput, SchedulerOutput
from vllm.v1.worker.input_batch import InputBatch
from vllm.v1.worker.served_model import ServedModel


class ModelRunner:
    """Executes scheduler outputs, in order, on one backend. Holds no tensor and knows no device."""

    def __init__(
        self, config: VllmConfig, backend: Backend, vocab_size: int, eos_token_ids: Sequence[int] = ()
    ) -> None:
        self.backend = backend
        self.batch = InputBatch(config, vocab_size, eos_token_ids)
        self.model: ServedModel | None = None
        """The weights as clients see them, set by the worker."""
        self._mode = config.model.logprobs_mode
        self._kept: dict[int, Hidden] = {}

    def execute(self, step: SchedulerOutput) -> RunnerOutput:
        batch = self.batch
        batch.apply(step)
        if step.copies:
            self.backend.copy_blocks(np.array(step.copies, np.int32))
        rows = np.flatnonzero(step.samples)
        draws: list[tuple[Hidden, Draws]] = []
        prompt_logprobs: dict[int, LogprobColumns] = {}
        fresh = set()
        if len(step.slots):
            inputs, last, ranges = batch.forward_batch(step)
            hidden = self.backend.forward(inputs)
            if len(rows):
                draws.append((hidden, batch.row_draws(step.slots[rows], last[rows])))
            prompt_logprobs = self._prompt_logprobs(step, hidden, ranges)
        for fork in step.forks:
            source, row = (hidden, int(last[fork.row])) if fork.row >= 0 else (self._kept[fork.keep_key], 0)
            if fork.members:
                draws.append((source, batch.fork_draws(fork, row)))
            if fork.keep and fork.row >= 0:
                self._kept[fork.keep_key] = self.backend.keep(hidden, last[fork.row : fork.row + 1])
                fresh.add(fork.keep_key)
        sampled = self._sample(draws)
        if len(rows):
            batch.append(step.slots[rows], sampled.token_ids[: len(rows)])
        for key in step.dropped_keys:
            if key not in fresh:
                self._kept.pop(key, None)
        handles = step.handles[rows]
        if step.forks:
            members = [member.handle for fork in step.forks for member in fork.members]
            handles = np.concatenate((handles, np.array(members, np.int64)))
        errors = {int(handles[draw]): text for draw, text in sampled.errors.items()}
        return RunnerOutput(handles, sampled.token_ids, sampled.logprobs, prompt_logprobs, errors)

    def forget(self) -> None:
        """Drop the kept rows: the cache is about to go (while no request is unfinished)."""
        self._kept.clear()

    def _sample(self, draws: list[tuple[Hidden, Draws]]) -> Sampled:
        """All draws in order; neighbours from the same hidden rows in one call."""
        parts: list[Sampled] = []
        first = 0
        while first < len(draws):
            hidden = draws[first][0]
            stop = first + 1
            while stop < len(draws) and draws[stop][0] is hidden:
                stop += 1
            joined = Draws.join([part for _, part in draws[first:stop]])
            batches = joined.batches(self.batch.vocab_size, self._mode)
            parts += [self.backend.sample(hidden, batch) for batch in batches]
            first = stop
        return join_sampled(parts)

    def _prompt_logprobs(
        self, step: SchedulerOutput, hidden: Hidden, ranges: dict[int, tuple[int, int]]
    ) -> dict[int, LogprobColumns]:
        found = {}
        for row, asked in step.prompt_logprobs:
            start, stop = ranges[row]
            if stop > start:
                count = self.batch.vocab_size if asked < 0 else min(asked, self.batch.vocab_size)
                indices: Int32s = np.arange(start, stop, dtype=np.int32)
                targets = self.batch.prompt_targets(step, row, stop - start)
                found[row] = self.backend.token_logprobs(hidden, indices, targets, count, self._mode)
        return found


def join_sampled(parts: list[Sampled]) -> Sampled:
    """Several results as one, in order."""
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return Sampled(np.zeros(0, np.int32), None)
    errors: dict[int, str] = {}
    start = 0
    for part in parts:
        errors.update({start + draw: text for draw, text in part.errors.items()})
        start += len(part.token_ids)
    logprobs = None
    if any(part.logprobs is not None for part in parts):
        logprobs = concatenate([part.logprobs or empty_columns(len(part.token_ids)) for part in parts])
    return Sampled(np.concatenate([part.token_ids for part in parts]), logprobs, errors)
