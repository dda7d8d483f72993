"""The sampler's cases: one table for its correctness tests, its invariance tests and its speed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm.model_executor.backends.interface import Float32s, Ragged, Sampled, SamplingBatch


@dataclass(frozen=True)
class SamplingCase:
    """Settings of all draws of a batch. `columns` overrides SamplingBatch's columns (a float in 0..1 of "top_k" is that
    part of the vocabulary, `num_logprobs` of -2 is the whole of it); `edits` makes the optional fields."""

    name: str
    columns: dict[str, Any] = field(default_factory=dict)
    edits: Callable[[np.random.Generator, int, int], dict[str, Any]] | None = None
    per_row: int = 1  # draws from each row

    def batch(self, rows: int, vocab: int, seed: int = 0) -> SamplingBatch:
        rng = np.random.default_rng(seed)
        size = rows * self.per_row
        columns = dict(self.columns)
        mode = columns.pop("logprobs_mode", "raw_logprobs")
        if isinstance(columns.get("top_k"), float):
            columns["top_k"] = max(1, int(columns["top_k"] * vocab))
        if columns.get("num_logprobs") == -2:
            columns["num_logprobs"] = vocab

        def column(name: str, default: Any, dtype: Any) -> npt.NDArray[Any]:
            return np.broadcast_to(np.asarray(columns.get(name, default)), size).astype(dtype)

        return SamplingBatch(
            rows=np.repeat(np.arange(rows, dtype=np.int32), self.per_row),
            temperature=column("temperature", 1.0, np.float32),
            top_k=column("top_k", 0, np.int32),
            top_p=column("top_p", 1.0, np.float32),
            min_p=column("min_p", 0.0, np.float32),
            seeds=rng.integers(0, 2**63, size).astype(np.uint64),
            positions=rng.integers(0, 4096, size),
            num_logprobs=column("num_logprobs", -1, np.int32),
            logprobs_mode=mode,
            **(self.edits(rng, size, vocab) if self.edits is not None else {}),
        )


def logits_for(rows: int, vocab: int, seed: int = 0) -> Float32s:
    """Rows like a language model's: a broad body, and some tokens that stand out."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((rows, vocab)) * 2.5
    for row in logits:
        row[rng.integers(0, vocab, 40)] += rng.gamma(2.0, 3.0, 40)
    return logits.astype(np.float32)


def random_lists(
    rng: np.random.Generator, size: int, vocab: int, longest: int, values: bool = False, empty: float = 0.2
) -> Ragged:
    """A list of 0 .. longest ids with repeats for each draw."""
    lengths = np.where(rng.random(size) < empty, 0, rng.integers(1, longest + 1, size))
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    count = int(offsets[-1])
    ids = rng.integers(0, vocab, count).astype(np.int32)
    return Ragged(offsets, ids, rng.normal(0, 4, count).astype(np.float32) if values else None)


def _penalties(rng: np.random.Generator, size: int, vocab: int) -> dict[str, Any]:
    penalties = np.tile(np.array([1.2, 0.4, 0.3], np.float32), (size, 1))
    lists = {"output_tokens": random_lists(rng, size, vocab, 200), "prompt_tokens": random_lists(rng, size, vocab, 500)}
    return {"penalties": penalties, **lists}


def _lists(rng: np.random.Generator, size: int, vocab: int) -> dict[str, Any]:
    few = max(1, min(4, vocab // 4))
    return {
        "banned": random_lists(rng, size, vocab, few, empty=0.5 if vocab > 1 else 1.0),
        "bias": random_lists(rng, size, vocab, 30, values=True),
    }


def _grammar(rng: np.random.Generator, size: int, vocab: int) -> dict[str, Any]:
    words = rng.integers(0, 2**32, (size, -(-vocab // 32)), dtype=np.uint32)
    words &= rng.integers(0, 2**32, words.shape, dtype=np.uint32)
    words[:, 0] |= 1
    words[size // 2 :] = 2**32 - 1  # draws without a grammar
    return {"allowed": words}


CASES = (
    SamplingCase("greedy", {"temperature": 0.0}),
    SamplingCase("temperature 1"),
    SamplingCase("temperature 0.7", {"temperature": 0.7}),
    SamplingCase("min-p 0.05", {"min_p": 0.05}),
    SamplingCase("top-k 1", {"top_k": 1}),
    SamplingCase("top-k 50", {"top_k": 50}),
    SamplingCase("top-k 2 %", {"top_k": 0.02}),
    SamplingCase("top-k 40 %", {"top_k": 0.4}),
    SamplingCase("top-p 0.9", {"top_p": 0.9}),
    SamplingCase("top-p 0.9, flat", {"top_p": 0.9, "temperature": 5.0}),
    SamplingCase("top-p 0.001", {"top_p": 0.001}),
    SamplingCase("top-k 50, top-p 0.9, min-p 0.01", {"top_k": 50, "top_p": 0.9, "min_p": 0.01, "temperature": 0.8}),
    SamplingCase("top-k 40 %, top-p 0.99", {"top_k": 0.4, "top_p": 0.99, "temperature": 3.0}),
    SamplingCase("logprobs 0", {"num_logprobs": 0}),
    SamplingCase("logprobs 5", {"num_logprobs": 5}),
    SamplingCase("logprobs 5, temperature 0.7", {"num_logprobs": 5, "temperature": 0.7}),
    SamplingCase("logprobs 20, greedy", {"num_logprobs": 20, "temperature": 0.0}),
    SamplingCase("logprobs of all", {"num_logprobs": -2}),
    SamplingCase("raw logits 5", {"num_logprobs": 5, "logprobs_mode": "raw_logits"}),
    SamplingCase(
        "processed logprobs 5", {"num_logprobs": 5, "top_p": 0.9, "top_k": 40, "logprobs_mode": "processed_logprobs"}
    ),
    SamplingCase(
        "processed logits 9", {"num_logprobs": 9, "temperature": 0.5, "top_k": 6, "logprobs_mode": "processed_logits"}
    ),
    SamplingCase(
        "processed logprobs 5, greedy", {"num_logprobs": 5, "temperature": 0.0, "logprobs_mode": "processed_logprobs"}
    ),
    SamplingCase("penalties", {}, _penalties),
    SamplingCase("penalties, greedy, logprobs 2", {"temperature": 0.0, "num_logprobs": 2}, _penalties),
    SamplingCase("banned and bias", {}, _lists),
    SamplingCase("grammar", {"top_p": 0.95}, _grammar),
    SamplingCase("fork of 64", {}, None, 64),
    SamplingCase("fork of 64, logprobs 5", {"num_logprobs": 5}, None, 64),
    SamplingCase("fork of 64, top-k 50, top-p 0.9", {"top_k": 50, "top_p": 0.9}, None, 64),
    SamplingCase("fork of 64, banned and bias", {}, _lists, 64),
    SamplingCase("fork of 10,000", {}, None, 10_000),
)


def measure(
    sample: Callable[[Float32s, SamplingBatch], Sampled], vocab: int = 49_152, repeats: int = 7
) -> Iterator[tuple[SamplingCase, int, float]]:
    """(case, rows, seconds per row), the best of `repeats`: `sample` may be any implementation."""
    for case in CASES:
        rows = 1 if case.per_row > 1 else 16
        logits, batch = logits_for(rows, vocab), case.batch(rows, vocab)
        best = float("inf")
        for _ in range(repeats):
            start = time.perf_counter()
            sample(logits, batch)
            best = min(best, time.perf_counter() - start)
        yield case, rows, best / rows
