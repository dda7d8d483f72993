"""The reference sampler: its definition against a slow oracle in fp64, its statistics, its independence of a crowd."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.model_executor.backends.interface import LogprobColumns, Ragged, SamplingBatch
from vllm.v1.sample import reference
from vllm.v1.sample.columns import concatenate, largest
from vllm.v1.sample.philox import uniforms
from vllm.v1.sample.reference import block_sums, sample, sample_in_tiles, token_logprobs, weights


def make(size: int, **columns: Any) -> SamplingBatch:
    """`size` draws at temperature 1 from rows 0, 1, …; a scalar stands for a whole column."""
    defaults: dict[str, tuple[Any, Any]] = {
        "rows": (np.arange(size), np.int32),
        "temperature": (1.0, np.float32),
        "top_k": (0, np.int32),
        "top_p": (1.0, np.float32),
        "min_p": (0.0, np.float32),
        "seeds": (np.arange(size), np.uint64),
        "positions": (0, np.int64),
        "num_logprobs": (-1, np.int32),
    }
    given_columns = {
        name: np.broadcast_to(np.asarray(columns.pop(name, value)), size).astype(dtype)
        for name, (value, dtype) in defaults.items()
    }
    return SamplingBatch(**given_columns, **columns)


def ragged(lists: list[list[int]], values: list[list[float]] | None = None) -> Ragged:
    offsets = np.cumsum([0, *map(len, lists)]).astype(np.int32)
    flat = np.array([token for one in lists for token in one], np.int32)
    numbers = None if values is None else np.array([x for one in values for x in one], np.float32)
    return Ragged(offsets, flat, numbers)


def entry(columns: LogprobColumns | None, index: int) -> tuple[list[int], list[float], int]:
    assert columns is not None
    first, stop = columns.offsets[index], columns.offsets[index + 1]
    return (
        columns.token_ids[first:stop].tolist(),
        columns.logprobs[first:stop].tolist(),
        int(columns.ranks[index]),
    )


def logits_of(rows: int, vocab: int, seed: int = 0, scale: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((rows, vocab)) * scale).astype(np.float32)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    top = wide.max()
    return wide - top - math.log(np.exp(wide - top).sum())


# Building blocks


@pytest.mark.parametrize("temperature", [1.0, 0.3, 2.5, 0.01])
def test_weights_are_exp(temperature: float) -> None:
    logits = logits_of(1, 5000)[0]
    top = logits.max()
    found = weights(logits, top, temperature)[:5000]
    exact = np.exp((logits.astype(np.float64) - top) / temperature)
    y = (logits.astype(np.float64) - top) / temperature * reference.LOG2_E
    alive = y >= -125
    np.testing.assert_allclose(found[alive], exact[alive], rtol=3e-5)
    near = y > -16
    np.testing.assert_allclose(found[near], exact[near], rtol=1.5e-6)
    assert (found[y < -127] == 0).all()
    assert found[np.argmax(logits)] == 1


@np.errstate(all="ignore")
def test_weights_flush_and_never_overflow() -> None:
    logits = np.array([0, -1e-30, -87, -88, -1000, -np.inf, -3e38], np.float32)
    found = weights(logits, np.float32(0), 1e-30)[:7]
    assert found[0] == 1
    assert (found[2:] == 0).all()
    assert (weights(logits, np.float32(0), 1e-45)[:7] >= 0).all()


def test_block_sums_follow_the_written_order() -> None:
    padded = np.random.default_rng(1).random(3 * 1024, np.float32)
    expected = []
    for block in padded.reshape(3, 64, 16):
        lanes = [np.float32(0)] * 16
        lanes = list(block[0])
        for part in block[1:]:
            lanes = [a + b for a, b in zip(lanes, part, strict=True)]
        for half in (8, 4, 2, 1):
            lanes = [lanes[j] + lanes[j + half] for j in range(half)]
        expected.append(lanes[0])
    assert block_sums(padded).tolist() == [float(x) for x in expected]


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=60), st.integers(0, 70))
def test_largest_orders_by_value_then_id(values: list[int], k: int) -> None:
    array = np.array(values, np.float32)
    expected = sorted(range(len(values)), key=lambda i: (-values[i], i))[:k]
    assert largest(array, k).tolist() == expected


# The draw


def slow_draw(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float, u: float) -> list[int]:
    """Tokens that an exact computation in fp64 could give for u: several when u falls within rounding of an edge."""
    scaled = logits.astype(np.float64) / temperature
    mass = np.exp(scaled - scaled.max())
    order = sorted(range(len(mass)), key=lambda i: (-logits[i], i))
    alive = [i for i in order if logits[i] > -np.inf and mass[i] >= np.float32(min_p)]
    if top_k:
        alive = alive[:top_k]
    if top_p < 1:
        need, before, kept = np.float32(top_p) * mass[alive].sum(), 0.0, []
        for i in alive:
            if before >= need and kept:
                break
            kept.append(i)
            before += mass[i]
        alive = kept
    probabilities = np.zeros_like(mass)
    probabilities[alive] = mass[alive] / mass[alive].sum()
    edges = np.cumsum(probabilities)
    return sorted({int(np.searchsorted(edges, min(max(u + d, 0), 1 - 1e-12), side="right")) for d in (-2e-6, 0, 2e-6)})


@settings(max_examples=150, deadline=None)
@given(
    vocab=st.sampled_from([1, 2, 5, 16, 100, 1000, 1024, 1025, 3000]),
    seed=st.integers(0, 2**32),
    temperature=st.sampled_from([0.2, 0.7, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 2, 7, 50, 5000]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.02, 0.5, 1.0]),
)
def test_draws_equal_the_oracle(
    vocab: int, seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = logits_of(1, vocab, seed)
    batch = make(8, rows=0, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seeds=seed + np.arange(8))
    numbers = uniforms(batch.seeds, batch.positions)
    edge = top_p < 1 or min_p > 0  # an id within rounding of the nucleus' edge moves every later one: draw from either
    for token, u in zip(sample(logits, batch).token_ids.tolist(), numbers.tolist(), strict=True):
        allowed = set(slow_draw(logits[0], temperature, top_k, top_p, min_p, u))
        if edge:
            for change in (1 - 1e-6, 1 + 1e-6):
                p, m = min(top_p * change, 1) if top_p < 1 else 1.0, min(min_p * change, 1)
                allowed |= set(slow_draw(logits[0], temperature, top_k, p, m, u))
        assert token in allowed


@pytest.mark.parametrize(
    ("u", "token"), [(0.0, 1), (0.25 - 2**-24, 1), (0.25, 2000), (0.5, 2001), (0.75, 4999), (1 - 2**-24, 4999)]
)
def test_an_edge_belongs_to_the_next_token(monkeypatch: pytest.MonkeyPatch, u: float, token: int) -> None:
    """Four equal weights among zeros, in three blocks: the token is the first whose sum *exceeds* u * total."""
    monkeypatch.setattr(reference, "uniforms", lambda seeds, positions: np.full(len(seeds), u, np.float32))
    logits = np.full((1, 5000), -np.inf, np.float32)
    logits[0, [1, 2000, 2001, 4999]] = 0
    assert sample(logits, make(1)).token_ids.tolist() == [token]


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    logits = logits_of(3, 2000)
    logits[0, [700, 30, 1999]] = 50
    logits[1] = 0
    batch = make(3, temperature=0, top_k=5, top_p=0.1, min_p=0.9)
    assert sample(logits, batch).token_ids.tolist() == [30, 0, int(np.argmax(logits[2]))]


@pytest.mark.parametrize(("top_k", "kept"), [(1, {3}), (2, {3, 7}), (3, {3, 7, 1}), (4, {3, 7, 1, 2}), (50, None)])
def test_top_k_keeps_exactly_k_and_the_lowest_of_equals(top_k: int, kept: set[int] | None) -> None:
    logits = np.zeros((1, 12), np.float32)
    logits[0, [3, 7]] = 1
    logits[0, 0] = -1
    logits[0, [1, 2, 4, 5]] = 0.5
    drawn = set(sample(logits, make(600, rows=0, top_k=top_k)).token_ids.tolist())
    assert drawn == (kept if kept is not None else set(range(12)))


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(1e-6, {2}), (0.25, {2}), (0.26, {2, 5}), (0.5, {2, 5}), (0.51, {2, 5, 6}), (0.99, {2, 5, 6, 9})],
)
def test_top_p_keeps_the_smallest_set_that_reaches_p(top_p: float, kept: set[int]) -> None:
    logits = np.full((1, 10), -np.inf, np.float32)
    logits[0, [2, 5, 6, 9]] = 0.0
    assert set(sample(logits, make(400, rows=0, top_p=top_p)).token_ids.tolist()) == kept


def test_top_p_looks_past_its_first_guess() -> None:
    logits = logits_of(1, 20000, scale=0.01)  # nearly flat: the nucleus is most of the vocabulary
    drawn = sample(logits, make(500, rows=0, top_p=0.9)).token_ids
    order = np.argsort(-logits[0], kind="stable")
    mass = np.exp(log_softmax(logits[0])[order]).cumsum()
    inside = set(order[: int(np.searchsorted(mass, 0.9)) + 2].tolist())
    assert set(drawn.tolist()) <= inside
    assert len(inside) > 15000
    assert len(set(drawn.tolist()) - set(order[:8192].tolist())) > 100


def test_min_p_is_relative_to_the_maximum() -> None:
    logits = np.log(np.array([[0.5, 0.26, 0.24, 1e-9]], np.float32))
    assert set(sample(logits, make(300, rows=0, min_p=0.5)).token_ids.tolist()) == {0, 1}
    assert set(sample(logits, make(300, rows=0, min_p=1.0)).token_ids.tolist()) == {0}


def test_filters_apply_in_order() -> None:
    """min-p, then top-k of what remains, then top-p of that: 0.9 of {8, 4} needs both, of {8, 4, 2, 1} three."""
    logits = np.log(np.array([[8, 4, 2, 1]], np.float32))
    assert set(sample(logits, make(300, rows=0, top_k=2, top_p=0.9)).token_ids.tolist()) == {0, 1}
    assert set(sample(logits, make(300, rows=0, top_p=0.9)).token_ids.tolist()) == {0, 1, 2}
    assert set(sample(logits, make(300, rows=0, min_p=0.5, top_p=0.66)).token_ids.tolist()) == {0}


@pytest.mark.parametrize("case", ["plain", "hot", "cold", "top_k", "top_p", "min_p"])
def test_frequencies_are_the_distribution(case: str) -> None:
    """Chi-square over fixed seeds against the exact probabilities (about 1 in 10,000 for other seeds to fail)."""
    logits = logits_of(1, 1500, seed=3, scale=2.0)
    kinds: dict[str, dict[str, float]] = {
        "plain": {},
        "hot": {"temperature": 2.0},
        "cold": {"temperature": 0.5},
        "top_k": {"top_k": 20},
        "top_p": {"top_p": 0.6},
        "min_p": {"min_p": 0.1},
    }
    options = kinds[case]
    draws = 40_000
    tokens = sample(logits, make(draws, rows=0, seeds=12345, positions=np.arange(draws), **options)).token_ids
    scaled = logits[0].astype(np.float64) / options.get("temperature", 1.0)
    mass = np.exp(scaled - scaled.max())
    order = np.argsort(-mass)
    keep = np.ones(1500, bool)
    if "top_k" in options:
        keep[order[20:]] = False
    if "top_p" in options:
        keep[order[int(np.searchsorted(np.cumsum(mass[order]) / mass.sum(), 0.6)) + 1 :]] = False
    if "min_p" in options:
        keep = mass >= 0.1
    expected = np.where(keep, mass, 0) / mass[keep].sum() * draws
    counts = np.bincount(tokens, minlength=1500)
    assert not counts[~keep].any()
    big = expected >= 20
    observed, wanted = np.append(counts[big], counts[~big].sum()), np.append(expected[big], expected[~big].sum())
    if wanted[-1] < 20:
        observed, wanted = observed[:-1], wanted[:-1]
    degrees = len(wanted) - 1
    statistic = float(((observed - wanted) ** 2 / wanted).sum())
    assert statistic < degrees + 3.8 * math.sqrt(2 * degrees) + 6


def test_successive_positions_and_neighbouring_seeds_are_independent() -> None:
    logits = np.zeros((1, 4), np.float32)
    tokens = sample(
        logits, make(16_000, rows=0, seeds=np.repeat(np.arange(4000), 4), positions=np.tile(np.arange(4), 4000))
    )
    table = tokens.token_ids.reshape(4000, 4)
    for first, second in [(table[:, 0], table[:, 1]), (table[:-1, 0], table[1:, 0])]:
        pairs = np.bincount(first * 4 + second, minlength=16)
        expected = len(first) / 16
        assert float(((pairs - expected) ** 2 / expected).sum()) < 37.7  # 15 degrees of freedom, p = 0.001


# Edges


def test_a_draw_without_a_token_is_an_error_of_its_own() -> None:
    logits = logits_of(4, 50)
    logits[1] = -np.inf
    logits[2, 7] = np.nan
    result = sample(logits, make(4, num_logprobs=2, temperature=[1, 1, 0, 0]))
    assert result.errors == {1: "no token is allowed", 2: "logits contain NaN"}
    assert result.token_ids[1] == result.token_ids[2] == 0
    assert entry(result.logprobs, 1) == ([], [], 0)
    assert entry(result.logprobs, 3)[0][0] == result.token_ids[3] == np.argmax(logits[3])


def test_all_but_one_banned() -> None:
    logits = np.full((1, 3000), -np.inf, np.float32)
    logits[0, 2047] = -1e30
    result = sample(logits, make(20, rows=0, num_logprobs=0, top_p=0.5))
    assert set(result.token_ids.tolist()) == {2047}
    assert entry(result.logprobs, 0) == ([2047], [0.0], 1)


def test_plus_infinity_wins() -> None:
    logits = logits_of(1, 100)
    logits[0, [40, 60]] = np.inf
    drawn = sample(logits, make(100, rows=0, num_logprobs=1)).token_ids
    assert set(drawn.tolist()) == {40, 60}
    assert sample(logits, make(1, temperature=0)).token_ids.tolist() == [40]


def test_no_draws() -> None:
    result = sample(logits_of(1, 10), make(0))
    assert result.token_ids.shape == (0,)
    assert result.logprobs is None
    assert not result.errors


def test_extreme_temperatures() -> None:
    logits = logits_of(1, 1000)
    best = int(np.argmax(logits))
    assert set(sample(logits, make(50, rows=0, temperature=1e-4)).token_ids.tolist()) == {best}
    flat = sample(logits, make(2000, rows=0, temperature=1e30)).token_ids
    assert len(set(flat.tolist())) > 800


# Edits


def test_allowed_banned_and_bias() -> None:
    logits = np.zeros((3, 70), np.float32)
    allowed = np.full((3, 3), 0xFFFFFFFF, np.uint32)
    allowed[0] = [1 << 5, 1 << 31, 1 << 3]  # 5, 63, 67
    batch = make(
        3,
        allowed=allowed,
        banned=ragged([[5], [], [3]]),
        bias=ragged([[], [69, 4, 4], [3, 8]], [[], [5.0, 3.0, 3.0], [100.0, 1.0]]),
        temperature=0,
        num_logprobs=70,
        logprobs_mode="processed_logits",
    )
    result = sample(logits, batch)
    assert result.token_ids.tolist() == [63, 4, 8]
    ids, values, _ = entry(result.logprobs, 0)
    assert ids[1:3] == [63, 67]
    assert values[3:] == [-np.inf] * 68
    assert entry(result.logprobs, 1)[1][:3] == [6.0, 6.0, 5.0]
    assert dict(zip(*entry(result.logprobs, 2)[:2], strict=True))[3] == -np.inf


def test_penalties_are_upstreams() -> None:
    logits = np.array([[2.0, -2.0, 1.0, 0.5, 3.0]], np.float32)
    batch = make(
        1,
        temperature=0,
        penalties=np.array([[2.0, 0.25, 0.125]], np.float32),
        prompt_tokens=ragged([[0, 1, 1]]),
        output_tokens=ragged([[4, 4, 2]]),
        num_logprobs=5,
        logprobs_mode="processed_logits",
    )
    ids, values, _ = entry(sample(logits, batch).logprobs, 0)
    assert dict(zip(ids, values, strict=True)) == {
        0: 1.0,
        1: -4.0,
        2: 0.5 - 0.25 - 0.125,
        3: 0.5,
        4: 1.5 - 0.5 - 0.125,
    }


def test_frequency_penalty_counts_only_the_output() -> None:
    logits = np.array([[1.0, 1.0]], np.float32)
    batch = make(
        1,
        penalties=np.array([[1.0, 0.5, 0]], np.float32),
        prompt_tokens=ragged([[0, 0]]),
        output_tokens=ragged([[1]]),
        temperature=0,
        num_logprobs=1,
        logprobs_mode="processed_logits",
    )
    assert entry(sample(logits, batch).logprobs, 0)[:2] == ([0, 0], [1.0, 1.0])


def test_processors_work_on_a_copy_and_after_the_bias() -> None:
    logits = logits_of(2, 20)
    before = logits.copy()
    seen = []

    def only_seven(values: np.ndarray) -> np.ndarray:
        seen.append(values.copy())
        values[:] = -np.inf
        values[7] = 0
        return values

    batch = make(2, rows=[1, 1], processors={1: only_seven}, bias=ragged([[], [3]], [[], [9.0]]))
    result = sample(logits, batch)
    assert result.token_ids[1] == 7
    assert seen[0][3] == before[1, 3] + np.float32(9)
    np.testing.assert_array_equal(logits, before)


def test_penalties_follow_the_processor() -> None:
    logits = np.zeros((1, 4), np.float32)
    batch = make(
        1,
        temperature=0,
        processors={0: lambda values: values + np.float32(4)},
        penalties=np.array([[4.0, 0, 0]], np.float32),
        prompt_tokens=ragged([[0]]),
        output_tokens=ragged([[]]),
        num_logprobs=4,
        logprobs_mode="processed_logits",
    )
    ids, values, rank = entry(sample(logits, batch).logprobs, 0)
    assert (ids[0], values[0], rank) == (1, 4.0, 1)
    assert dict(zip(ids, values, strict=True))[0] == 1.0


@pytest.mark.parametrize(
    ("processor", "text"),
    [
        (lambda values: 1 / 0, "ZeroDivisionError"),
        (lambda values: values[:3], "shape"),
        (lambda values: "text", "ValueError"),
        (lambda values: values * np.nan, "NaN"),
        (lambda values: values - np.inf, "no token is allowed"),
    ],
)
def test_a_bad_processor_ends_its_own_draw(processor: Any, text: str) -> None:
    logits = logits_of(1, 30)
    alone = sample(logits, make(2, rows=0))
    result = sample(logits, make(3, rows=0, seeds=[0, 9, 1], processors={1: processor}))
    assert list(result.errors) == [1]
    assert text in result.errors[1]
    assert result.token_ids[[0, 2]].tolist() == alone.token_ids.tolist()


# Log-probabilities


@pytest.mark.parametrize("k", [0, 1, 5, 299, 300, 10_000])
def test_raw_logprobs(k: int) -> None:
    logits = logits_of(2, 300)
    result = sample(logits, make(2, num_logprobs=k, temperature=0.7, top_k=3, bias=ragged([[1], [2]], [[9.0], [9.0]])))
    for row in range(2):
        exact = log_softmax(logits[row])
        ids, values, rank = entry(result.logprobs, row)
        assert len(ids) == min(k, 300) + 1
        assert ids[0] == result.token_ids[row]
        np.testing.assert_allclose(values, exact[ids], atol=2e-6, rtol=1e-6)
        assert ids[1:] == sorted(range(300), key=lambda i: (-logits[row, i], i))[:k]
        assert rank == 1 + int((exact > exact[ids[0]]).sum())


def test_rank_can_be_recounted_from_the_whole_vocabulary() -> None:
    logits = np.round(logits_of(1, 2000), 1)
    result = sample(logits, make(40, rows=0, num_logprobs=2000))
    for draw in range(40):
        ids, values, rank = entry(result.logprobs, draw)
        assert sorted(ids[1:]) == list(range(2000))
        assert rank == 1 + sum(value > values[0] for value in values[1:])


def test_logprob_modes() -> None:
    logits = logits_of(1, 200)
    options: dict[str, Any] = {"temperature": 0.5, "top_k": 4, "num_logprobs": 6, "bias": ragged([[9]], [[3.0]])}
    edited = logits[0].copy()
    edited[9] += 3
    kept = largest(edited, 4)
    exact = {
        "raw_logits": logits[0],
        "raw_logprobs": log_softmax(logits[0]),
        "processed_logits": np.full(200, -np.inf),
        "processed_logprobs": np.full(200, -np.inf),
    }
    exact["processed_logits"][kept] = edited[kept] / 0.5
    exact["processed_logprobs"][kept] = log_softmax(edited[kept] / 0.5)
    tokens = set()
    for mode, values in exact.items():
        result = sample(logits, make(1, logprobs_mode=mode, **options))
        ids, found, _ = entry(result.logprobs, 0)
        np.testing.assert_allclose(found, values[ids], rtol=2e-6, atol=2e-6)
        assert len(ids) == 7
        tokens.add(ids[0])
    assert len(tokens) == 1


def test_processed_modes_of_a_greedy_draw() -> None:
    """Edits count, the filters and the temperature do not."""
    logits = logits_of(1, 50)
    options: dict[str, Any] = {"temperature": 0, "top_k": 1, "top_p": 0.1, "num_logprobs": 50, "banned": ragged([[3]])}
    edited = logits[0].copy()
    edited[3] = -np.inf
    ids, found, rank = entry(sample(logits, make(1, logprobs_mode="processed_logprobs", **options)).logprobs, 0)
    np.testing.assert_allclose(found[:-1], log_softmax(edited)[ids[:-1]], atol=2e-6)
    assert rank == 1
    assert ids[-1] == 3
    assert found[-1] == -np.inf
    ids, found, _ = entry(sample(logits, make(1, logprobs_mode="processed_logits", **options)).logprobs, 0)
    assert found == edited[ids].tolist()


def test_draws_that_ask_for_different_counts() -> None:
    logits = logits_of(1, 40)
    result = sample(logits, make(5, rows=0, num_logprobs=[-1, 0, 3, -1, 40]))
    assert np.diff(result.logprobs.offsets).tolist() == [0, 1, 4, 0, 41]
    assert result.logprobs.ranks[[0, 3]].tolist() == [0, 0]
    for draw in (1, 2, 4):
        assert entry(result.logprobs, draw)[0][0] == result.token_ids[draw]


def test_token_logprobs() -> None:
    logits = logits_of(3, 90)
    targets = np.array([5, 89, 0], np.int32)
    columns = token_logprobs(logits, targets, 3)
    for row, target in enumerate(targets):
        exact = log_softmax(logits[row])
        ids, values, rank = entry(columns, row)
        assert ids == [target, *largest(logits[row], 3).tolist()]
        np.testing.assert_allclose(values, exact[ids], atol=2e-6)
        assert rank == 1 + int((logits[row] > logits[row, target]).sum())
    assert entry(token_logprobs(logits, targets, 2, "processed_logits"), 1)[1][0] == logits[1, 89]
    assert entry(token_logprobs(logits[:1], targets[:1], 200), 0)[0][1:] == largest(logits[0], 90).tolist()


def test_token_logprobs_of_nothing_and_of_nan() -> None:
    logits = logits_of(1, 9)
    assert len(token_logprobs(logits[:0], np.zeros(0, np.int32), 3).ranks) == 0
    logits[0, 2] = np.nan
    ids, values, rank = entry(token_logprobs(logits, np.array([4], np.int32), 2), 0)
    assert ids == [4, 0, 1]
    assert np.isnan(values).all()
    assert rank == 0


# One draw is the same in any company


def random_batch(rng: np.random.Generator, draws: int, rows: int, vocab: int) -> SamplingBatch:
    def lists(most: int) -> list[list[int]]:
        return [rng.integers(0, vocab, rng.integers(0, most)).tolist() for _ in range(draws)]

    options: dict[str, Any] = {
        "rows": rng.integers(0, rows, draws) if rng.random() < 0.5 else np.sort(rng.integers(0, rows, draws)),
        "temperature": rng.choice([0, 0.5, 1.0, 1.3], draws),
        "top_k": rng.choice([0, 0, 1, 10], draws),
        "top_p": rng.choice([1.0, 1.0, 0.9, 0.3], draws),
        "min_p": rng.choice([0, 0, 0.05], draws),
        "seeds": rng.integers(0, 2**63, draws),
        "positions": rng.integers(0, 5000, draws),
        "num_logprobs": rng.choice([-1, 0, 3, vocab], draws),
        "logprobs_mode": rng.choice(["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"]),
    }
    if rng.random() < 0.3:
        options["allowed"] = rng.integers(0, 2**32, (draws, -(-vocab // 32)), dtype=np.uint32)
    if rng.random() < 0.4:
        options["banned"] = ragged(lists(4))
    if rng.random() < 0.4:
        ids = lists(4)
        options["bias"] = ragged(ids, [rng.normal(size=len(one)).tolist() for one in ids])
    if rng.random() < 0.4:
        numbers = [rng.choice([1, 1.5], draws), rng.choice([0, 0.4], draws), rng.choice([0, 1], draws)]
        options["penalties"] = np.stack(numbers, 1).astype(np.float32)
        options["output_tokens"], options["prompt_tokens"] = ragged(lists(9)), ragged(lists(9))
    if rng.random() < 0.3:
        options["processors"] = {int(rng.integers(draws)): lambda values: -values}
    return make(draws, **options)


@pytest.mark.parametrize("seed", range(60))
def test_a_draw_is_the_same_alone_and_in_a_crowd(seed: int) -> None:
    rng = np.random.default_rng(seed)
    vocab = int(rng.choice([1, 7, 33, 1000, 2500]))
    rows, draws = int(rng.integers(1, 6)), int(rng.integers(1, 14))
    logits = logits_of(rows, vocab, seed)
    if rng.random() < 0.3:
        logits = np.round(logits)  # ties
    batch = random_batch(rng, draws, rows, vocab)
    crowd = sample(logits, batch)
    tiled = sample_in_tiles(lambda chosen: logits[chosen], batch, int(rng.integers(1, 4)))
    np.testing.assert_array_equal(crowd.token_ids, tiled.token_ids)
    assert crowd.errors == tiled.errors
    for draw in range(draws):
        alone = sample(logits.copy(), reference.slice_batch(batch, draw, draw + 1))
        assert alone.token_ids[0] == crowd.token_ids[draw]
        assert (0 in alone.errors) == (draw in crowd.errors)
        if crowd.logprobs is not None:
            assert tiled.logprobs is not None
            expected = ([], [], 0) if alone.logprobs is None else entry(alone.logprobs, 0)
            assert repr(entry(crowd.logprobs, draw)) == repr(expected) == repr(entry(tiled.logprobs, draw))


def test_tiles_make_the_logits_of_a_row_once() -> None:
    logits = logits_of(5, 40)
    asked: list[list[int]] = []

    def logits_rows(rows: np.ndarray) -> np.ndarray:
        asked.append(rows.tolist())
        return logits[rows]

    rows = np.repeat([0, 1, 2, 3, 4], [3, 1000, 1, 2, 2])
    result = sample_in_tiles(logits_rows, make(len(rows), rows=rows), 2)
    assert asked == [[0, 1], [2, 3], [4]]
    assert result.token_ids.tolist() == sample(logits, make(len(rows), rows=rows)).token_ids.tolist()


def test_concatenate_refuses_more_than_a_message_holds() -> None:
    huge = LogprobColumns(
        np.array([0, 2**31 - 1], np.int32), np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(1, np.int32)
    )
    with pytest.raises(OverflowError, match="log-probabilities"):
        concatenate([huge, huge])
