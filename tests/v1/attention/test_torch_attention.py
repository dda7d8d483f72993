"""Paged attention against attention written out in fp64: groups, windows, soft-cap, partitions, sharing."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from vllm.model_executor.backends.interface import PARTITION, ForwardBatch
from vllm.model_executor.spec import AttentionSpec
from vllm.v1.attention.torch_attention import PagedCache, attend, make_plan, slot_mapping

CPU = torch.device("cpu")


def mixer(heads=4, kv_heads=2, dim=16, window=None, softcap=None):
    return AttentionSpec(heads, kv_heads, dim, dim**-0.5, None, window, softcap)


def oracle(q, k, v, positions, kind: AttentionSpec):
    """q [T, H, D] at `positions` over k, v [L, KV, D], in fp64, one query at a time."""
    group = kind.num_heads // kind.num_kv_heads
    out = np.zeros(q.shape)
    for t, position in enumerate(positions):
        first = 0 if kind.window is None else max(0, position - kind.window + 1)
        for head in range(kind.num_heads):
            keys = k[first : position + 1, head // group].astype(np.float64)
            scores = keys @ q[t, head].astype(np.float64) * kind.scale
            if kind.softcap is not None:
                scores = kind.softcap * np.tanh(scores / kind.softcap)
            weights = np.exp(scores - scores.max())
            out[t, head] = weights @ v[first : position + 1, head // group].astype(np.float64) / weights.sum()
    return out.reshape(len(q), -1)


class Case:
    """Sequences of given (context before this step, tokens of this step), in a shuffled cache; optional sharing."""

    def __init__(self, rows, kind, block_size=16, shared=(), dtype=torch.float32, seed=0):
        rng = np.random.default_rng(seed)
        self.kind, self.rows = kind, rows
        lengths = [before + new for before, new in rows]
        needed = sum(-(-length // block_size) for length in lengths)
        num_blocks = needed + 3
        ids = iter(rng.permutation(num_blocks).tolist())
        tables = np.full((len(rows), max(lengths) // block_size + 2), -(2**30), np.int32)
        for row, length in enumerate(lengths):
            for place in range(-(-length // block_size)):
                tables[row, place] = next(ids)
        self.k = [
            rng.standard_normal((length, kind.num_kv_heads, kind.head_dim)).astype(np.float32) for length in lengths
        ]
        self.v = [
            rng.standard_normal((length, kind.num_kv_heads, kind.head_dim)).astype(np.float32) for length in lengths
        ]
        for first, count, blocks in shared:
            for row in range(first + 1, first + count):
                tables[row, :blocks] = tables[first, :blocks]
                self.k[row][: blocks * block_size] = self.k[first][: blocks * block_size]
                self.v[row][: blocks * block_size] = self.v[first][: blocks * block_size]
        if dtype != torch.float32:
            self.k = [torch.from_numpy(x).to(dtype).float().numpy() for x in self.k]
            self.v = [torch.from_numpy(x).to(dtype).float().numpy() for x in self.v]
        self.cache = PagedCache(kind, num_blocks, block_size, dtype, CPU)
        for row, length in enumerate(lengths):
            places = np.arange(length)
            slots = tables[row, places // block_size].astype(np.int64) * block_size + places % block_size
            self.cache.write(torch.from_numpy(slots), torch.from_numpy(self.k[row]), torch.from_numpy(self.v[row]))
        tokens = [new for _, new in rows]
        self.q = rng.standard_normal((sum(tokens), kind.num_heads, kind.head_dim)).astype(np.float32)
        self.batch = ForwardBatch(
            token_ids=np.zeros(sum(tokens), np.int32),
            positions=np.concatenate([np.arange(before, before + new) for before, new in rows]).astype(np.int32),
            query_start=np.concatenate([[0], np.cumsum(tokens)]).astype(np.int32),
            seq_lens=np.array(lengths, np.int32),
            block_tables=tables,
            hidden_rows=np.zeros(0, np.int32),
            shared_rows=np.array([entry[:2] for entry in shared], np.int32).reshape(-1, 2),
            shared_blocks=np.array([entry[2] for entry in shared], np.int32),
        )
        self.plan = make_plan(self.batch, kind, block_size, num_blocks, CPU)

    def run(self):
        return attend(torch.from_numpy(self.q), self.cache, self.plan, self.kind).numpy()

    def expected(self):
        parts = []
        for row in range(len(self.rows)):
            tokens = slice(self.batch.query_start[row], self.batch.query_start[row + 1])
            parts.append(oracle(self.q[tokens], self.k[row], self.v[row], self.batch.positions[tokens], self.kind))
        return np.concatenate(parts)


ROWS = [(0, 5), (255, 1), (256, 1), (0, 300), (511, 2), (700, 1), (0, 1), (130, 200)]
MIXERS = {
    "groups": mixer(),
    "nine over three": mixer(9, 3, 8),
    "one kv head": mixer(4, 1, 32),
    "no groups": mixer(3, 3, 8),
    "window": mixer(window=40),
    "window of one": mixer(window=1),
    "window of a partition": mixer(window=PARTITION),
    "wide window": mixer(window=600),
    "soft-cap": mixer(softcap=1.5),
    "soft-cap and window": mixer(softcap=1.5, window=300),
}


@pytest.mark.parametrize("name", MIXERS)
def test_equals_the_oracle(name):
    case = Case(ROWS, MIXERS[name])
    np.testing.assert_allclose(case.run(), case.expected(), atol=2e-6)


@pytest.mark.parametrize("block_size", [1, 7, 16, 48, 256, 300, 512])
def test_block_sizes(block_size):
    case = Case(ROWS, mixer(), block_size)
    np.testing.assert_allclose(case.run(), case.expected(), atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_caches_are_read_back_rounded(dtype):
    case = Case(ROWS, mixer(), dtype=dtype)
    assert case.cache.k.dtype == dtype
    np.testing.assert_allclose(case.run(), case.expected(), atol=2e-6)


@pytest.mark.parametrize("window", [None, 100, 400])
@pytest.mark.parametrize(("blocks", "first"), [(32, 0), (39, 1), (48, 2), (10, 0)])
def test_sharing_is_the_oracle_and_the_same_bits(blocks, first, window):
    rows = [(800, 1)] * 7 + [(810, 3), (800, 1)]
    shared = [(first, 5, blocks)]
    case = Case(rows, mixer(window=window), shared=shared)
    together = case.run()
    np.testing.assert_allclose(together, case.expected(), atol=2e-6)
    num_blocks = case.cache.k.shape[1] // 16
    unshared = ForwardBatch(*(getattr(case.batch, name) for name in ForwardBatch.__slots__))
    unshared.shared_rows, unshared.shared_blocks = np.zeros((0, 2), np.int32), np.zeros(0, np.int32)
    case.plan = make_plan(unshared, case.kind, 16, num_blocks, CPU)
    assert np.array_equal(case.run(), together)


def test_sharing_reads_a_partition_once():
    rows = [(800, 1)] * 32
    shared = Case(rows, mixer(), shared=[(0, 32, 48)]).plan
    alone = Case(rows, mixer()).plan
    # 32 rows of 2 heads are one tile of 64: 3 shared partitions, then one of each row's own.
    assert sum(call.count for call in shared.calls) == 3 + 32
    assert sum(call.count for call in alone.calls) == 4 * 32


def test_windows_skip_what_they_cannot_see():
    plan = Case([(5000, 1)], mixer(window=100)).plan
    assert len(plan.calls) == 1


@given(st.data())
def test_any_batch(data):
    rows = data.draw(st.lists(st.tuples(st.integers(0, 300), st.integers(1, 40)), min_size=1, max_size=6))
    kind = mixer(
        *data.draw(st.sampled_from([(2, 1, 8), (6, 2, 4), (3, 3, 2)])),
        window=data.draw(st.none() | st.integers(1, 320)),
        softcap=data.draw(st.none() | st.just(2.0)),
    )
    case = Case(rows, kind, data.draw(st.sampled_from([4, 16, 24])), seed=data.draw(st.integers(0, 99)))
    np.testing.assert_allclose(case.run(), case.expected(), atol=3e-6)


def test_extreme_scores_do_not_overflow():
    case = Case([(300, 2)], mixer())
    case.q *= 1e6
    out = case.run()
    assert np.isfinite(out).all()
    np.testing.assert_allclose(out, case.expected(), atol=1e-3)


def test_slot_mapping():
    batch = Case([(14, 4), (0, 2)], mixer()).batch
    tables = batch.block_tables
    expected = [tables[0, 0] * 16 + 14, tables[0, 0] * 16 + 15, tables[0, 1] * 16, tables[0, 1] * 16 + 1]
    expected += [tables[1, 0] * 16, tables[1, 0] * 16 + 1]
    assert slot_mapping(batch, 16).tolist() == expected


def test_copy_blocks_copies_whole_blocks():
    kind = mixer(2, 1, 4)
    cache = PagedCache(kind, 4, 8, torch.bfloat16, CPU)
    values = torch.arange(32 * 4, dtype=torch.float32).view(32, 1, 4)
    cache.write(torch.arange(32), values, -values)
    cache.copy_blocks(torch.tensor([2, 2]), torch.tensor([0, 3]))
    blocks = cache.k.view(4, 8, 4)
    assert torch.equal(blocks[0], blocks[2])
    assert torch.equal(blocks[3], blocks[2])
    assert not torch.equal(blocks[1], blocks[2])
    assert torch.equal(cache.v, -cache.k)
    assert math.prod(cache.k.shape) == 4 * 8 * 4
