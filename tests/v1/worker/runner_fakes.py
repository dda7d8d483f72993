"""A backend without a model, and a scheduler without policy, for tests of the runner.

`FakeBackend` keeps what a real one would: a paged cache. It holds token ids and positions in place of K and V, reads a
sequence's whole context back through its block table, and derives the logits from it. So a wrong block table, a missed
copy, a wrong position or a token that was not fed back gives other logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.model_executor.backends.interface import ForwardBatch, SamplingBatch
from vllm.sampling_params import SamplingParams
from vllm.v1.sample import reference
from vllm.v1.sample.philox import philox4x32
from vllm.v1.step import Fork, ForkSample, NewSequence, RunnerOutput, SchedulerOutput

VOCAB = 67
EOS = 2


def config(max_num_seqs: int = 8, max_model_len: int = 128, block_size: int = 4, **model: Any) -> VllmConfig:
    return VllmConfig(
        model=ModelConfig(model="fake", path="", max_model_len=max_model_len, dtype="float32", **model),
        cache=CacheConfig(block_size=block_size, num_blocks=256),
        scheduler=SchedulerConfig(max_num_seqs=max_num_seqs),
    )


def context_logits(tokens: Any, vocab: int = VOCAB) -> np.ndarray:
    """Logits [vocab] as a function of a whole context."""
    state = 0xCBF29CE484222325
    for token in np.asarray(tokens).tolist():
        state = ((state ^ (token + 1)) * 0x100000001B3) & (2**64 - 1)
    counter = np.zeros((vocab, 4), np.uint64)
    counter[:, 0] = np.arange(vocab)
    words = philox4x32(counter, np.array([state & 0xFFFFFFFF, state >> 32], np.uint64))
    return ((words[:, 0] >> 8).astype(np.float32) / np.float32(2**24) * 6 - 3).astype(np.float32)


class FakeBackend:
    name = "fake"

    def __init__(self, vocab: int = VOCAB) -> None:
        self.vocab = vocab
        self.calls: list[str] = []
        self.batches: list[SamplingBatch] = []
        self.weights: dict[str, np.ndarray] = {}
        self.closed = False
        self.cache: np.ndarray | None = None
        self.last_forward: ForwardBatch | None = None

    def load_weights(self, weights: Any) -> None:
        for weight in weights:
            self.weights[weight.name] = weight.read()

    def init_cache(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.cache = np.full((num_blocks, block_size, 2), -1, np.int64)

    def drop_cache(self) -> None:
        self.cache = None

    def copy_blocks(self, pairs: np.ndarray) -> None:
        assert pairs.dtype == np.int32
        assert pairs.ndim == 2
        assert pairs.shape[1] == 2
        assert not set(pairs[:, 0].tolist()) & set(pairs[:, 1].tolist())
        assert self.cache is not None
        self.calls.append("copy")
        self.cache[pairs[:, 1]] = self.cache[pairs[:, 0]]

    def forward(self, batch: ForwardBatch) -> Any:
        self.calls.append("forward")
        self.last_forward = batch
        assert self.cache is not None
        flat = self.cache.reshape(-1, 2)
        for name in ("token_ids", "positions", "query_start", "seq_lens", "block_tables", "hidden_rows"):
            assert getattr(batch, name).dtype == np.int32, name
        contexts: dict[int, np.ndarray] = {}
        rows = len(batch.seq_lens)
        for row in range(rows):
            first, stop = batch.query_start[row : row + 2]
            length = int(batch.seq_lens[row])
            where = np.arange(length)
            slots = batch.block_tables[row, where // self.block_size] * self.block_size + where % self.block_size
            new = np.arange(length - (stop - first), length)
            assert batch.positions[first:stop].tolist() == new.tolist()
            assert len(set(slots.tolist())) == length, "a block stands twice in one table"
            flat[slots[new], 0] = batch.token_ids[first:stop]
            flat[slots[new], 1] = new
        for row in range(rows):  # after all writes: a row that writes into another's block is seen
            first, stop = batch.query_start[row : row + 2]
            length = int(batch.seq_lens[row])
            where = np.arange(length)
            slots = batch.block_tables[row, where // self.block_size] * self.block_size + where % self.block_size
            assert flat[slots, 1].tolist() == where.tolist(), "the cache does not hold this sequence's positions"
            for token in range(first, stop):
                contexts[token] = flat[slots[: length - (stop - token) + 1], 0]
        assert (np.diff(batch.hidden_rows) > 0).all()
        return [context_logits(contexts[token], self.vocab) for token in batch.hidden_rows.tolist()]

    def keep(self, hidden: Any, rows: np.ndarray) -> Any:
        self.calls.append("keep")
        return [hidden[row].copy() for row in rows]

    def sample(self, hidden: Any, batch: SamplingBatch) -> Any:
        self.calls.append("sample")
        self.batches.append(batch)
        return reference.sample(np.stack(hidden), batch)

    def token_logprobs(self, hidden: Any, rows: Any, targets: Any, num_logprobs: int, mode: Any) -> Any:
        self.calls.append("token_logprobs")
        return reference.token_logprobs(np.stack([hidden[row] for row in rows]), targets, num_logprobs, mode)

    def close(self) -> None:
        self.closed = True


@dataclass
class Child:
    """What the test's scheduler knows of one sequence."""

    handle: int
    params: SamplingParams
    seed: int
    prompt: np.ndarray
    length: int
    """Tokens to generate."""
    output: list[int] = field(default_factory=list)
    logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    error: str | None = None

    @property
    def done(self) -> bool:
        return self.error is not None or len(self.output) >= self.length


class Driver:
    """Makes steps for a ModelRunner: whatever a test asks of it, with a pool of blocks handed out in random order."""

    def __init__(self, runner: Any, num_blocks: int = 256, seed: int = 0) -> None:
        self.runner = runner
        self.block_size = runner.batch.block_size
        self.rng = np.random.default_rng(seed)
        self.free_blocks = self.rng.permutation(num_blocks).tolist()
        self.free_slots = list(range(len(runner.batch.num_prompt)))
        self.new: list[NewSequence] = []
        self.freed: list[int] = []
        self.finished: list[int] = []
        self.updates: list[tuple[int, int, list[int]]] = []

    def take_blocks(self, tokens: int) -> list[int]:
        return [self.free_blocks.pop() for _ in range(-(-tokens // self.block_size))]

    def enter(self, child: Child) -> None:
        """Give the child a slot; its cache is empty unless the caller gave it blocks and a computed length."""
        child.slot = self.free_slots.pop(int(self.rng.integers(len(self.free_slots))))
        self.new.append(
            NewSequence(
                child.slot,
                child.handle,
                child.params,
                child.seed,
                child.prompt,
                list(child.output),
                child.computed,
                list(child.blocks),
            )
        )

    def leave(self, child: Child) -> None:
        """Preempt or end."""
        self.freed.append(child.slot)
        self.free_slots.append(child.slot)
        self.free_blocks = child.blocks + self.free_blocks
        child.slot, child.blocks, child.computed = -1, [], 0
        if child.done:
            self.finished.append(child.handle)

    def step(
        self,
        children: list[tuple[Child, int]],
        forks: Callable[[list[Child]], list[Fork]] | None = None,
        **fields: Any,
    ) -> RunnerOutput:
        """One step in which each child computes that many tokens; a child draws when it has caught up with its tokens,
        unless it is the source of a fork."""
        rows = [child for child, _ in children]
        made = forks(rows) if forks else []
        sources = {fork.row for fork in made}
        counts, samples = [], []
        for row, (child, count) in enumerate(children):
            total = len(child.prompt) + len(child.output)
            count = min(count, total - child.computed)
            counts.append(count)
            end = child.computed + count
            missing = -(-end // self.block_size) - len(child.blocks)
            if missing > 0:
                fresh = [self.free_blocks.pop() for _ in range(missing)]
                self.updates.append((child.slot, len(child.blocks), fresh))
                child.blocks += fresh
            samples.append(end == total and row not in sources)
        step = SchedulerOutput(
            slots=np.array([child.slot for child in rows], np.int32),
            num_tokens=np.array(counts, np.int32),
            num_computed=np.array([child.computed for child in rows], np.int32),
            samples=np.array(samples, bool),
            handles=np.array([child.handle for child in rows], np.int64),
            new_sequences=self.new,
            freed_slots=self.freed,
            finished_handles=self.finished,
            block_updates=self.updates,
            forks=made,
            **fields,
        )
        self.new, self.freed, self.finished, self.updates = [], [], [], []
        out = self.runner.execute(step)
        drawing = [child for child, draws in zip(rows, samples, strict=True) if draws]
        by_handle = {child.handle: child for child in drawing}
        for child, count in zip(rows, counts, strict=True):
            child.computed += count
        self.take(out, by_handle)
        return out

    def take(self, out: RunnerOutput, by_handle: dict[int, Child]) -> None:
        for draw, handle in enumerate(out.handles.tolist()):
            child = by_handle.get(handle)
            if child is None:
                continue
            if handle in out.errors:
                child.error = out.errors[handle]
                continue
            child.output.append(int(out.token_ids[draw]))
            if out.logprobs is not None:
                first, stop = out.logprobs.offsets[draw : draw + 2]
                ids = out.logprobs.token_ids[first:stop].tolist()
                child.logprobs.append(list(zip(ids, out.logprobs.logprobs[first:stop].tolist(), strict=True)))

    def run(self, child: Child, chunk: int = 1000) -> list[int]:
        """The child alone, to its end."""
        self.enter(child)
        while not child.done:
            self.step([(child, chunk)])
        self.leave(child)
        return child.output


def fork_of(row: int, prompt: np.ndarray, children: list[Child], **fields: Any) -> Fork:
    members = [ForkSample(child.handle, child.seed, child.params) for child in children]
    return Fork(row, prompt, members, **fields)
