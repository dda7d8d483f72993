"""The sampling kernel against the reference (equal in every bit), against fp64, and against itself in other company."""

from __future__ import annotations

import ctypes
import dataclasses
import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.sampling_cases import CASES, SamplingCase, logits_for, random_lists
from vllm.kernels import library, sampling
from vllm.kernels.library import KernelError
from vllm.model_executor.backends.interface import LogprobColumns, Ragged, Sampled, SamplingBatch
from vllm.v1.sample import reference


def built_isas() -> list[str]:
    try:
        return [isa for isa in library.supported_isas() if library.library_path(isa).is_file()]
    except library.KernelLibraryError:
        return []


ISAS = built_isas()
pytestmark = pytest.mark.skipif(not ISAS, reason="the CPU kernels are not built (no compiler here)")

PLAIN = SamplingCase("plain")
ALL_MODES = ("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits")


@pytest.fixture(params=ISAS or ["none"])
def lib(request: pytest.FixtureRequest) -> ctypes.CDLL:
    return library.load(request.param)


def assert_same_columns(found: LogprobColumns | None, expected: LogprobColumns | None) -> None:
    assert (found is None) == (expected is None)
    if found is None or expected is None:
        return
    np.testing.assert_array_equal(found.offsets, expected.offsets)
    np.testing.assert_array_equal(found.token_ids, expected.token_ids)
    np.testing.assert_array_equal(found.logprobs, expected.logprobs)
    np.testing.assert_array_equal(found.ranks, expected.ranks)


def assert_same(found: Sampled, expected: Sampled) -> None:
    np.testing.assert_array_equal(found.token_ids, expected.token_ids)
    assert found.errors == expected.errors
    assert_same_columns(found.logprobs, expected.logprobs)


def batch_of(size: int, case: SamplingCase = PLAIN, **columns: Any) -> SamplingBatch:
    """`size` draws from row 0 with the case's settings; columns may be scalars."""
    batch = dataclasses.replace(case, columns=case.columns | columns, per_row=size).batch(1, 1, seed=size)
    batch.positions = np.arange(size, dtype=np.int64)
    return batch


def entry(columns: LogprobColumns | None, index: int) -> tuple[list[int], list[float], int]:
    assert columns is not None
    part = slice(columns.offsets[index], columns.offsets[index + 1])
    return columns.token_ids[part].tolist(), columns.logprobs[part].tolist(), int(columns.ranks[index])


def ragged(lists: list[list[int]], values: list[list[float]] | None = None) -> Ragged:
    offsets = np.cumsum([0, *map(len, lists)]).astype(np.int32)
    flat = np.array([token for one in lists for token in one], np.int32)
    numbers = None if values is None else np.array([x for one in values for x in one], np.float32)
    return Ragged(offsets, flat, numbers)


# Equal to the reference


@pytest.mark.parametrize("vocab", [1, 5, 16, 1000, 1024, 1025, 5003])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_reference(lib: ctypes.CDLL, case: SamplingCase, vocab: int) -> None:
    rows = 1 if case.per_row > 100 else 3
    logits, batch = logits_for(rows, vocab, seed=vocab), case.batch(rows, vocab, seed=vocab)
    assert_same(sampling.sample(lib, logits, batch, 2), reference.sample(logits, batch))


@pytest.mark.parametrize("case", [case for case in CASES if case.per_row == 1], ids=lambda case: case.name)
@pytest.mark.parametrize("vocab", [49_152, 262_144])
def test_equals_reference_large(case: SamplingCase, vocab: int) -> None:
    logits, batch = logits_for(2, vocab), case.batch(2, vocab)
    assert_same(sampling.sample(library.load(), logits, batch, 2), reference.sample(logits, batch))


def random_logits(rng: np.random.Generator, kind: str, rows: int, vocab: int) -> np.ndarray:
    body = rng.standard_normal((rows, vocab)) * rng.choice([0.1, 2.0, 10.0, 200.0])
    if kind == "ties":
        body = np.round(body)
    elif kind == "equal":
        body[:] = rng.normal()
    elif kind == "one":
        body[:] = -np.inf
        body[np.arange(rows), rng.integers(0, vocab, rows)] = rng.normal()
    elif kind == "holes":
        body[rng.random((rows, vocab)) < 0.7] = -np.inf
    elif kind == "sorted":
        body.sort(axis=1)
    elif kind == "huge":
        body *= 1e36
        body = np.clip(body, -3e38, 3e38)
    elif kind == "infinite":
        body[rng.random((rows, vocab)) < 0.01] = np.inf
    elif kind == "nan":
        body[rng.random((rows, vocab)) < 0.3 / vocab] = np.nan
    elif kind == "zeros":
        body = np.where(rng.random((rows, vocab)) < 0.5, 0.0, -0.0)
    return body.astype(np.float32)


KINDS = ("normal", "ties", "equal", "one", "holes", "sorted", "huge", "infinite", "nan", "zeros")


@settings(max_examples=250)
@given(
    seed=st.integers(0, 2**32 - 1),
    kind=st.sampled_from(KINDS),
    vocab=st.sampled_from([1, 2, 15, 33, 300, 1024, 1500, 4100, 9000]),
    mode=st.sampled_from(ALL_MODES),
    edits=st.sets(st.sampled_from(["allowed", "banned", "bias", "penalties", "processors"])),
    logprobs=st.booleans(),
    mixed=st.booleans(),
)
def test_equals_reference_anywhere(
    seed: int, kind: str, vocab: int, mode: Any, edits: set[str], logprobs: bool, mixed: bool
) -> None:
    """Every combination of settings, edits and shapes of logits, on every variant: 8 draws each."""
    rng = np.random.default_rng(seed)
    size, rows = 8, 3
    logits = random_logits(rng, kind, rows, vocab)

    def column(choices: list[Any], dtype: Any) -> np.ndarray:
        return rng.choice(choices, size).astype(dtype) if mixed else np.full(size, rng.choice(choices), dtype)

    batch = SamplingBatch(
        rows=rng.integers(0, rows, size).astype(np.int32),
        temperature=column([0.0, 1.0, 0.5, 3.0, 1e-4, 1e-38, 50.0], np.float32),
        top_k=column([0, -1, 1, 2, 7, 50, vocab // 2, vocab - 1, vocab, 10**6], np.int32),
        top_p=column([1.0, 1.0, 0.9, 0.5, 1e-6, 0.999999], np.float32),
        min_p=column([0.0, 0.0, 0.1, 1e-6, 1.0], np.float32),
        seeds=rng.integers(0, 2**64, size, dtype=np.uint64),
        positions=rng.integers(0, 2**40, size),
        num_logprobs=column([-1, 0, 1, 5, vocab, vocab + 3] if logprobs else [-1], np.int32),
        logprobs_mode=mode,
    )
    if "allowed" in edits:
        words = -(-vocab // 32)
        batch.allowed = rng.integers(0, 2**32, (size, words), dtype=np.uint32)
        batch.allowed[::3] = 2**32 - 1
    if "banned" in edits:
        batch.banned = random_lists(rng, size, vocab, 3)
    if "bias" in edits:
        batch.bias = random_lists(rng, size, vocab, 6, values=True)
    if "penalties" in edits:
        batch.penalties = rng.choice(np.array([1.0, 1.0, 0.5, 1.3], np.float32), (size, 3))
        batch.penalties[:, 1:] -= 1
        batch.output_tokens = random_lists(rng, size, vocab, 12)
        batch.prompt_tokens = random_lists(rng, size, vocab, 12)
    if "processors" in edits:
        batch.processors = {2: lambda row: row * np.float32(0.5), 5: lambda row: 1 / 0}
    expected = reference.sample(logits, batch)
    for isa in ISAS:
        assert_same(sampling.sample(library.load(isa), logits, batch, 2), expected)


def test_thousands_of_plain_draws(lib: ctypes.CDLL) -> None:
    logits = logits_for(4, 3000, seed=5)
    for seed in range(4):
        batch = SamplingCase("", {"temperature": 0.5 + seed}, None, 1000).batch(4, 3000, seed)
        assert_same(sampling.sample(lib, logits, batch, 2), reference.sample(logits, batch))


# Selection on shapes that are hard for it


@pytest.mark.parametrize(
    "shape",
    ["ascending", "descending", "two values", "geometric", "one peak", "tail of ties", "close together"],
)
@pytest.mark.parametrize("setting", [("top_k", 5), ("top_k", 1500), ("top_k", 19_999), ("top_p", 0.3), ("top_p", 0.99)])
def test_selection_on_hard_shapes(lib: ctypes.CDLL, shape: str, setting: tuple[str, float]) -> None:
    vocab = 20_000
    steps = np.arange(vocab)
    logits = {
        "ascending": steps / 1000,
        "descending": -steps / 1000,
        "two values": np.where(steps % 7 == 0, 1.0, 0.5),
        "geometric": -np.log1p(steps),
        "one peak": np.where(steps == 777, 30.0, 0.0),
        "tail of ties": np.where(steps < 100, steps / 10, 0.0),
        "close together": np.float32(1) + (steps % 5) * np.finfo(np.float32).eps,
    }[shape].astype(np.float32)[None]
    batch = batch_of(40, **{setting[0]: setting[1]}, num_logprobs=3, logprobs_mode="processed_logprobs")
    assert_same(sampling.sample(lib, logits, batch, 1), reference.sample(logits, batch))


def test_equal_logits_keep_exactly_k_lowest_ids(lib: ctypes.CDLL) -> None:
    logits = np.zeros((1, 5000), np.float32)
    found = sampling.sample(lib, logits, batch_of(400, top_k=7), 1)
    assert set(found.token_ids.tolist()) == set(range(7))


# Against fp64, and as statistics


@pytest.mark.parametrize("vocab", [7, 1000, 49_152])
@pytest.mark.parametrize("scale", [0.5, 3.0, 30.0])
def test_logprobs_against_fp64(lib: ctypes.CDLL, vocab: int, scale: float) -> None:
    logits = (np.random.default_rng(vocab).standard_normal((2, vocab)) * scale).astype(np.float32)
    batch = SamplingCase("", {"num_logprobs": -2}).batch(2, vocab)
    found = sampling.sample(lib, logits, batch, 1)
    for row in range(2):
        ids, values, rank = entry(found.logprobs, row)
        wide = logits[row].astype(np.float64)
        exact = wide - wide.max() - math.log(np.exp(wide - wide.max()).sum())
        np.testing.assert_allclose(values, exact[ids], rtol=2e-7, atol=2e-6)
        assert ids[0] == found.token_ids[row]
        assert sorted(ids[1:]) == list(range(vocab))
        assert values[1:] == sorted(values[1:], reverse=True)
        assert rank == 1 + sum(value > values[0] for value in values[1:])
        assert ids[1 + values[1:].index(values[0]) :].count(ids[0]) == 1


@pytest.mark.parametrize(
    "columns",
    [
        {},
        {"temperature": 0.5},
        {"top_k": 10},
        {"top_p": 0.7},
        {"min_p": 0.05},
        {"temperature": 1.5, "top_k": 20, "top_p": 0.8},
    ],
    ids=str,
)
def test_chi_square(lib: ctypes.CDLL, columns: dict[str, float]) -> None:
    """20,000 draws from one row have the frequencies of the exact distribution (fixed seeds: never flaky)."""
    vocab, draws = 60, 20_000
    logits = np.random.default_rng(3).standard_normal((1, vocab)).astype(np.float32)
    found = sampling.sample(lib, logits, batch_of(draws, **columns), 2).token_ids
    scaled = logits[0].astype(np.float64) / columns.get("temperature", 1.0)
    weights = np.exp(scaled - scaled.max())
    weights[weights < columns.get("min_p", 0)] = 0
    order = np.argsort(-weights, kind="stable")
    weights[order[int(columns.get("top_k", vocab)) :]] = 0
    before = np.cumsum(weights[order]) - weights[order]
    weights[order[before >= columns.get("top_p", 1.0) * weights.sum()]] = 0
    expected = weights / weights.sum() * draws
    counts = np.bincount(found, minlength=vocab)
    assert (counts[expected == 0] == 0).all()
    alive = expected > 0
    statistic = ((counts[alive] - expected[alive]) ** 2 / expected[alive]).sum()
    freedom = alive.sum() - 1
    assert statistic < freedom + 4 * math.sqrt(2 * freedom) + 4


# In other company


def take(batch: SamplingBatch, draws: np.ndarray) -> SamplingBatch:
    """The given draws of a batch without optional fields."""
    names = ("rows", "temperature", "top_k", "top_p", "min_p", "seeds", "positions", "num_logprobs")
    return dataclasses.replace(batch, **{name: getattr(batch, name)[draws] for name in names})


def test_alone_and_in_a_crowd(lib: ctypes.CDLL) -> None:
    rng = np.random.default_rng(0)
    logits = logits_for(5, 3001)
    size = 60
    crowd = SamplingBatch(
        rows=rng.integers(0, 5, size).astype(np.int32),
        temperature=rng.choice([0, 0.5, 1, 2], size).astype(np.float32),
        top_k=rng.choice([0, 3, 900], size).astype(np.int32),
        top_p=rng.choice([1, 0.9], size).astype(np.float32),
        min_p=rng.choice([0, 0.02], size).astype(np.float32),
        seeds=rng.integers(0, 2**63, size).astype(np.uint64),
        positions=rng.integers(0, 99, size),
        num_logprobs=rng.choice([-1, 0, 4], size).astype(np.int32),
    )
    together = sampling.sample(lib, logits, crowd, 2)
    for draw in range(size):
        alone = sampling.sample(lib, logits, take(crowd, np.array([draw])), 1)
        assert alone.token_ids[0] == together.token_ids[draw]
        if crowd.num_logprobs[draw] >= 0:
            assert entry(alone.logprobs, 0) == entry(together.logprobs, draw)
    shuffled = rng.permutation(size)
    np.testing.assert_array_equal(
        sampling.sample(lib, logits, take(crowd, shuffled), 2).token_ids, together.token_ids[shuffled]
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_any_number_of_threads(lib: ctypes.CDLL, case: SamplingCase) -> None:
    rows = 1 if case.per_row > 100 else 7
    logits, batch = logits_for(rows, 2050), case.batch(rows, 2050)
    one = sampling.sample(lib, logits, batch, 1)
    for threads in (2, 5):
        assert_same(sampling.sample(lib, logits, batch, threads), one)


def test_fork_of_ten_thousand_equals_each_alone(lib: ctypes.CDLL) -> None:
    logits = logits_for(1, 5000)
    batch = batch_of(10_000, num_logprobs=1)
    found = sampling.sample(lib, logits, batch, 2)
    assert_same(found, reference.sample(logits, batch))
    for draw in range(0, 10_000, 997):
        alone = sampling.sample(lib, logits, take(batch, np.array([draw])), 1)
        assert alone.token_ids[0] == found.token_ids[draw]
        assert entry(alone.logprobs, 0) == entry(found.logprobs, draw)


def test_buffers_of_an_earlier_call_do_not_show(lib: ctypes.CDLL) -> None:
    """Vocabularies, edits and errors alternate on the same thread."""
    cases = {case.name: case for case in CASES}
    for round_ in range(3):
        for vocab, name in ((4000, "penalties"), (50, "logprobs 5"), (2500, "banned and bias"), (1100, "grammar")):
            logits = logits_for(2, vocab, seed=round_)
            batch = cases[name].batch(2, vocab, seed=round_)
            if round_ == 1:
                logits[0, 3] = np.nan
            assert_same(sampling.sample(lib, logits, batch, 1), reference.sample(logits, batch))


def test_several_python_threads(lib: ctypes.CDLL) -> None:
    logits = logits_for(4, 3000)
    batches = [case.batch(4, 3000, seed=1) for case in CASES if case.per_row == 1]
    expected = [sampling.sample(lib, logits, batch, 1) for batch in batches]
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for batch, result in zip(batches, expected, strict=True):
                assert_same(sampling.sample(lib, logits, batch, 2), result)
        except BaseException as error:  # noqa: BLE001  handed to the test's thread
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_rows_apart_in_memory(lib: ctypes.CDLL) -> None:
    wide = logits_for(6, 1200)
    view = wide[::2, :1001]
    batch = SamplingCase("", {"num_logprobs": 2}).batch(3, 1001)
    assert_same(sampling.sample(lib, view, batch, 2), reference.sample(np.ascontiguousarray(view), batch))


def test_many_rows_in_any_order(lib: ctypes.CDLL) -> None:
    """More rows than a tile, named backwards and with gaps."""
    logits = logits_for(700, 70)
    batch = SamplingCase("", {"num_logprobs": 1}).batch(300, 70)
    batch.rows = np.arange(699, 99, -2, dtype=np.int32)
    assert_same(sampling.sample(lib, logits, batch, 2), reference.sample(logits, batch))


# Edges and errors


def test_empty_batch(lib: ctypes.CDLL) -> None:
    batch = take(batch_of(1), np.zeros(0, np.int64))
    found = sampling.sample(lib, np.zeros((0, 7), np.float32), batch, 2)
    assert found.token_ids.shape == (0,)
    assert found.logprobs is None


@pytest.mark.parametrize("temperature", [0.0, 1.0, 1e-30])
def test_one_token_left(lib: ctypes.CDLL, temperature: float) -> None:
    logits = np.full((1, 3000), -np.inf, np.float32)
    logits[0, 2047] = -1e30
    found = sampling.sample(lib, logits, batch_of(50, temperature=temperature, num_logprobs=2), 1)
    assert set(found.token_ids.tolist()) == {2047}
    assert entry(found.logprobs, 0) == ([2047, 2047, 0], [0.0, 0.0, -math.inf], 1)


def test_errors_are_of_one_draw(lib: ctypes.CDLL) -> None:
    logits = logits_for(3, 500)
    logits[1, 77] = np.nan
    batch = SamplingCase("", {"num_logprobs": 2}).batch(3, 500)
    words = np.full((3, 16), 2**32 - 1, np.uint32)
    words[2] = 0
    batch.allowed = words
    found = sampling.sample(lib, logits, batch, 2)
    assert found.errors == {1: reference.ERROR_NAN, 2: reference.ERROR_NONE}
    assert found.token_ids.tolist()[1:] == [0, 0]
    assert entry(found.logprobs, 1) == ([], [], 0) == entry(found.logprobs, 2)
    assert len(entry(found.logprobs, 0)[0]) == 3
    assert_same(found, reference.sample(logits, batch))


def test_banned_nan_may_be_drawn_around(lib: ctypes.CDLL) -> None:
    logits = logits_for(1, 300)
    logits[0, 5] = np.nan
    batch = batch_of(1)
    batch.banned = ragged([[5]])
    found = sampling.sample(lib, logits, batch, 1)
    assert not found.errors
    batch.num_logprobs[:] = 1  # its raw log-probabilities do not exist
    assert sampling.sample(lib, logits, batch, 1).errors == {0: reference.ERROR_NAN}


def test_greedy_takes_the_lowest_of_equals(lib: ctypes.CDLL) -> None:
    logits = np.zeros((1, 2000), np.float32)
    logits[0, [1999, 1300, 700]] = 1.0
    assert sampling.sample(lib, logits, batch_of(1, temperature=0.0), 1).token_ids.tolist() == [700]


def test_penalties_by_hand(lib: ctypes.CDLL) -> None:
    logits = np.array([[2.0, -2.0, 1.0, 0.5]], np.float32)
    batch = batch_of(1, num_logprobs=4, logprobs_mode="processed_logits", temperature=0.0)
    batch.penalties = np.array([[2.0, 0.25, 0.125]], np.float32)
    batch.output_tokens = ragged([[0, 0, 1]])
    batch.prompt_tokens = ragged([[0, 2]])
    ids, values, _ = entry(sampling.sample(lib, logits, batch, 1).logprobs, 0)
    assert dict(zip(ids[1:], values[1:], strict=True)) == {0: 0.375, 1: -4.375, 2: 0.5, 3: 0.5}
    assert ids[0] == 2  # the lowest of two equal ones


def test_logits_processor_sees_edited_logits(lib: ctypes.CDLL) -> None:
    logits = np.array([[2.0, -2.0, 1.0, 0.5]] * 2, np.float32)
    seen: list[list[float]] = []

    def processor(row: np.ndarray) -> np.ndarray:
        seen.append(row.tolist())
        row[:] = -np.inf
        row[3] = 0
        return row

    batch = batch_of(2, temperature=0.0)
    batch.rows = np.array([0, 1], np.int32)
    batch.processors = {1: processor}
    batch.banned = ragged([[], [0]])
    batch.bias = ragged([[], [1]], [[], [7.0]])
    assert sampling.sample(lib, logits, batch, 2).token_ids.tolist() == [0, 3]
    assert seen == [[-math.inf, 5.0, 1.0, 0.5]]
    assert logits.tolist() == [[2.0, -2.0, 1.0, 0.5]] * 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda batch: batch.rows.__setitem__(1, 3), "row out of range"),
        (lambda batch: batch.rows.__setitem__(1, -1), "row out of range"),
        (lambda batch: batch.temperature.__setitem__(0, np.nan), "temperature"),
        (lambda batch: batch.temperature.__setitem__(0, -1), "temperature"),
        (lambda batch: batch.top_p.__setitem__(0, np.nan), "top_p"),
        (lambda batch: batch.min_p.__setitem__(0, 1.5), "min_p"),
        (lambda batch: setattr(batch, "banned", ragged([[1], [100], []])), "banned id"),
        (lambda batch: setattr(batch, "bias", ragged([[1], [-1], []], [[1.0], [1.0], []])), "biased id"),
        (lambda batch: setattr(batch, "bias", ragged([[1], [], []])), "bias without values"),
        (lambda batch: setattr(batch, "output_tokens", ragged([[100], [], []])), "output token"),
        (lambda batch: setattr(batch, "prompt_tokens", ragged([[], [], [-5]])), "prompt token"),
    ],
)
def test_wrong_arguments_are_refused(lib: ctypes.CDLL, change: Callable[[SamplingBatch], None], message: str) -> None:
    batch = PLAIN.batch(3, 100)
    batch.penalties = np.array([[1.5, 0, 0]] * 3, np.float32)
    change(batch)
    with pytest.raises(KernelError, match=message):
        sampling.sample(lib, logits_for(3, 100), batch, 1)


@pytest.mark.parametrize("name", ["temperature", "seeds", "penalties", "allowed", "banned"])
def test_arrays_of_another_length_are_refused(lib: ctypes.CDLL, name: str) -> None:
    batch = PLAIN.batch(3, 100)
    short: Any = {
        "temperature": np.ones(2, np.float32),
        "seeds": np.ones(4, np.uint64),
        "penalties": np.ones((3, 2), np.float32),
        "allowed": np.ones((3, 3), np.uint32),
        "banned": Ragged(np.array([0, 0, 1, 2], np.int32), np.zeros(1, np.int32)),
    }[name]
    setattr(batch, name, short)
    with pytest.raises(ValueError, match="sampling: "):
        sampling.sample(lib, logits_for(3, 100), batch, 1)


# Prompt log-probabilities


@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize("k", [0, 1, 5, 1001, 5000])
def test_token_logprobs_equal_reference(lib: ctypes.CDLL, mode: Any, k: int) -> None:
    rng = np.random.default_rng(k)
    logits = logits_for(6, 1001)
    logits[2, 9] = np.nan
    logits[3] = -np.inf
    logits[4, 5] = np.inf
    rows = np.array([0, 1, 1, 2, 3, 4, 5, 0], np.int32)
    targets = rng.integers(0, 1001, len(rows)).astype(np.int32)
    found = sampling.token_logprobs(lib, logits, rows, targets, k, mode, 2)
    assert_same_columns(found, reference.token_logprobs(logits[rows], targets, k, mode))


def test_token_logprobs_of_nothing(lib: ctypes.CDLL) -> None:
    none = np.zeros(0, np.int32)
    found = sampling.token_logprobs(lib, np.zeros((0, 9), np.float32), none, none, 3, "raw_logprobs", 2)
    assert found.offsets.tolist() == [0]


@pytest.mark.parametrize(("row", "target", "message"), [(2, 0, "row"), (0, 9, "target"), (0, -1, "target")])
def test_token_logprobs_refuses(lib: ctypes.CDLL, row: int, target: int, message: str) -> None:
    one, other = np.array([row], np.int32), np.array([target], np.int32)
    with pytest.raises(KernelError, match=f"{message} out of range"):
        sampling.token_logprobs(lib, np.zeros((2, 9), np.float32), one, other, 1, "raw_logprobs", 1)
