"""The Triton sampler: equal to the reference in every bit, and a draw the same in other company."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.kernels.triton.interpreted import on_device  # isort: skip
from benchmarks.sampling_cases import CASES, SamplingCase, logits_for
from vllm.kernels.triton import sampler
from vllm.model_executor.backends.interface import LogprobColumns, Sampled, SamplingBatch
from vllm.v1.sample import reference

# A fork's draws are alike: 9 say what 64 or 10,000 do.
pytestmark = pytest.mark.filterwarnings(
    "ignore:(overflow|invalid value) encountered:RuntimeWarning"
)  # of the interpreter
SHORT = [dataclasses.replace(case, per_row=min(case.per_row, 9)) for case in CASES if case.per_row <= 64]
WIDE = [SHORT[2], *(case for case in SHORT if "top-k 40 %, top-p" in case.name or case.name == "penalties")]


def assert_same_columns(found: LogprobColumns | None, expected: LogprobColumns | None) -> None:
    assert (found is None) == (expected is None)
    if found is None or expected is None:
        return
    for name in ("offsets", "token_ids", "logprobs", "ranks"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), err_msg=name)


def assert_same(found: Sampled, expected: Sampled) -> None:
    np.testing.assert_array_equal(found.token_ids, expected.token_ids)
    assert found.errors == expected.errors
    assert_same_columns(found.logprobs, expected.logprobs)


def sample(logits: np.ndarray, batch: SamplingBatch, max_rows: int = 64) -> Sampled:
    return sampler.sample(lambda rows: on_device(logits[rows]), batch, max_rows)


@pytest.mark.parametrize("vocab", [1, 37])
@pytest.mark.parametrize("case", SHORT, ids=lambda case: case.name)
def test_equals_reference(case: SamplingCase, vocab: int) -> None:
    logits, batch = logits_for(2, vocab, seed=vocab), case.batch(2, vocab, seed=vocab)
    assert_same(sample(logits, batch), reference.sample(logits, batch))


@pytest.mark.parametrize("case", WIDE, ids=lambda case: case.name)
def test_equals_reference_in_several_blocks(case: SamplingCase) -> None:
    logits, batch = logits_for(2, 10_000), case.batch(2, 10_000)
    assert_same(sample(logits, batch), reference.sample(logits, batch))


@pytest.mark.parametrize("kind", ["ties", "equal", "one", "holes", "huge", "infinite", "nan", "none", "zeros"])
def test_strange_logits(kind: str) -> None:
    rng = np.random.default_rng(5)
    body = rng.standard_normal((3, 50)) * 10
    if kind == "ties":
        body = np.round(body / 10)
    elif kind == "equal":
        body[:] = 0.3
    elif kind == "one":
        body[:] = -np.inf
        body[:, 17] = 2
    elif kind == "holes":
        body[rng.random(body.shape) < 0.7] = -np.inf
    elif kind == "huge":
        body = np.clip(body * 1e37, -3e38, 3e38)
    elif kind == "infinite":
        body[1, [3, 30]] = np.inf
    elif kind == "nan":
        body[1, 30] = np.nan
    elif kind == "none":
        body[1] = -np.inf
    else:
        body = np.where(rng.random(body.shape) < 0.5, 0.0, -0.0)
    logits = body.astype(np.float32)
    for mode in ("raw_logprobs", "processed_logprobs"):
        settings = {"top_k": 7, "top_p": 0.8, "num_logprobs": 3, "logprobs_mode": mode}
        batch = SamplingCase("strange", settings).batch(3, 50)
        assert_same(sample(logits, batch), reference.sample(logits, batch))


def test_a_mixed_batch_and_its_tiles() -> None:
    """Greedy and drawn, asked and not, several draws per row, in any cut into tiles."""
    vocab, rng = 60, np.random.default_rng(3)
    logits = logits_for(4, vocab)
    batch = SamplingCase("mixed", per_row=3).batch(4, vocab)
    size = batch.size
    batch.temperature = rng.choice(np.array([0, 0.5, 1], np.float32), size)
    batch.top_k = rng.choice(np.array([0, 3, 200], np.int32), size)
    batch.top_p = rng.choice(np.array([0.5, 1], np.float32), size)
    batch.num_logprobs = rng.choice(np.array([-1, 0, 4], np.int32), size)
    expected = reference.sample(logits, batch)
    for max_rows in (64, 5, 1):
        assert_same(sample(logits, batch, max_rows), expected)


def test_logits_processors_end_their_own_draw_alone() -> None:
    def doubled(logits):
        return logits * 2

    def broken(logits):
        raise ValueError("no")

    logits, batch = logits_for(3, 40), SamplingCase("processors", per_row=2).batch(3, 40)
    batch.processors = {1: doubled, 2: broken, 5: lambda logits: logits[:3]}
    batch.num_logprobs[:] = 2
    found = sample(logits, batch)
    assert_same(found, reference.sample(logits, batch))
    assert set(found.errors) == {2, 5}


def test_nothing_to_draw() -> None:
    batch = SamplingCase("none").batch(0, 10)
    assert len(sample(np.zeros((0, 10), np.float32), batch).token_ids) == 0


@pytest.mark.parametrize("mode", ["raw_logprobs", "raw_logits", "processed_logprobs"])
def test_prompt_logprobs_equal_the_reference(mode) -> None:
    logits = logits_for(5, 90)
    logits[3, 7] = np.nan
    targets = np.array([4, 4, 89, 1, 0], np.int32)
    expected = reference.token_logprobs(logits, targets, 3, mode)
    for max_rows in (2, 64):
        rows = np.arange(5, dtype=np.int32)
        found = sampler.token_logprobs(lambda rows: on_device(logits[rows]), rows, targets, 3, mode, 90, max_rows)
        assert_same_columns(found, expected)


def test_tokens_stay_on_the_device_until_they_are_fetched() -> None:
    logits, batch = logits_for(3, 30), SamplingCase("pending", per_row=2).batch(3, 30)
    pending = sampler.submit(lambda rows: on_device(logits[rows]), batch, max_rows=2)
    assert pending.tokens.device.type == on_device(logits).device.type
    np.testing.assert_array_equal(pending.tokens.cpu().numpy(), reference.sample(logits, batch).token_ids)
    assert_same(pending.result(), reference.sample(logits, batch))
