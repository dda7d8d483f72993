"""Drives a backend directly through `ForwardBatch`: a paged cache with shuffled blocks, sequences, forks."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from vllm.model_executor.backends.interface import ForwardBatch


@dataclass(eq=False)
class Sequence:
    tokens: list[int]
    computed: int = 0
    blocks: list[int] = field(default_factory=list)


class Driver:
    """`backend` has its weights. Blocks are handed out in random order, so that tables are never in sequence."""

    def __init__(self, backend, num_blocks: int = 128, block_size: int = 16, seed: int = 0):
        self.backend = backend
        self.block_size = block_size
        backend.init_cache(num_blocks, block_size)
        self.free = [int(block) for block in np.random.default_rng(seed).permutation(num_blocks)]

    def add(self, tokens) -> Sequence:
        return Sequence([int(token) for token in tokens])

    def fork(self, parent: Sequence) -> Sequence:
        """A sequence that shares the parent's full blocks and has a copy of the partial one."""
        full = parent.computed // self.block_size
        child = Sequence(list(parent.tokens), parent.computed, parent.blocks[:full])
        if parent.computed % self.block_size:
            child.blocks.append(self.free.pop())
            pairs = np.array([[parent.blocks[full], child.blocks[full]]], np.int32)
            self.backend.copy_blocks(pairs)
        return child

    def step(self, work, shared=(), rows: str = "last") -> np.ndarray:
        """Compute `count` more tokens of each (sequence, count); logits of each one's last token, or of "all" tokens.

        `shared` lists (first row, rows, leading blocks)."""
        counts = [count for _, count in work]
        for sequence, count in work:
            while len(sequence.blocks) * self.block_size < sequence.computed + count:
                sequence.blocks.append(self.free.pop())
        query_start = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        width = max(len(sequence.blocks) for sequence, _ in work) + 1
        tables = np.full((len(work), width), 2**30, np.int32)  # undefined entries must never be followed
        for row, (sequence, _) in enumerate(work):
            tables[row, : len(sequence.blocks)] = sequence.blocks
        last = query_start[1:] - 1
        batch = ForwardBatch(
            token_ids=np.concatenate([s.tokens[s.computed : s.computed + n] for s, n in work]).astype(np.int32),
            positions=np.concatenate([np.arange(s.computed, s.computed + n) for s, n in work]).astype(np.int32),
            query_start=query_start,
            seq_lens=np.array([s.computed + n for s, n in work], np.int32),
            block_tables=tables,
            hidden_rows=np.arange(query_start[-1], dtype=np.int32) if rows == "all" else last.astype(np.int32),
            shared_rows=np.array([entry[:2] for entry in shared], np.int32).reshape(-1, 2),
            shared_blocks=np.array([entry[2] for entry in shared], np.int32),
        )
        self.hidden = self.backend.forward(batch)
        for sequence, count in work:
            sequence.computed += count
        return self.backend.logits(self.hidden, np.arange(len(batch.hidden_rows), dtype=np.int32))

    def prefill(self, sequence: Sequence, chunk: int | None = None) -> np.ndarray:
        """Compute all tokens of a sequence, `chunk` at a time; logits [V] of the last."""
        logits = None
        while sequence.computed < len(sequence.tokens):
            left = len(sequence.tokens) - sequence.computed
            logits = self.step([(sequence, min(left, chunk or left))])
        assert logits is not None
        return logits[0]

    def greedy(self, sequence: Sequence, steps: int, chunk: int | None = None) -> np.ndarray:
        """Append `steps` most likely tokens; logits [steps, V] they came from."""
        rows = [self.prefill(sequence, chunk)]
        for _ in range(steps - 1):
            sequence.tokens.append(int(rows[-1].argmax()))
            rows.append(self.step([(sequence, 1)])[0])
        sequence.tokens.append(int(rows[-1].argmax()))
        return np.stack(rows)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
