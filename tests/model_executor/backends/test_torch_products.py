"""Row-invariant matrix products: what is checked before a shape is used, and the way out where the check fails."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tests.model_executor.driver import Driver
from tests.models_util import tiny_folder
from vllm.model_executor.backends import torch_products
from vllm.model_executor.backends.torch_backend import TorchBackend
from vllm.model_executor.backends.torch_products import (
    MIN_TILE,
    ROW_TILES,
    BatchedShapes,
    Matrix,
    batched_shapes,
    cut,
    linear,
    row_tiles,
)
from vllm.model_executor.loader import open_checkpoint

CPU = torch.device("cpu")


def matrix(values, dtype=torch.float32, int8=False):
    made = Matrix(tuple(values.shape), dtype, CPU, int8)
    made.set_rows(0, values)
    return made


@pytest.mark.parametrize("shape", [(5, 7), (64, 64), (300, 33), (4100, 40)])
@pytest.mark.parametrize("rows", [8, 24, 160, 296])
def test_linear(shape, rows):
    generator = torch.Generator().manual_seed(rows)
    weight, x = torch.randn(shape, generator=generator), torch.randn(rows, shape[1], generator=generator)
    bias = torch.randn(shape[0], generator=generator)
    made = linear(x, matrix(weight), bias)
    expected = x.double() @ weight.double().t() + bias
    assert made.dtype == torch.float32
    assert (made - expected).abs().max() < 1e-4
    order = torch.randperm(rows, generator=generator)
    assert torch.equal(linear(x[order], matrix(weight), bias), made[order])
    for first in range(0, rows, MIN_TILE):
        tile = slice(first, first + MIN_TILE)
        assert torch.equal(linear(x[tile], matrix(weight), bias), made[tile])


def test_sixteen_bit_weights_are_widened_exactly():
    weight = torch.randn(20, 30)
    assert torch.equal(matrix(weight, torch.bfloat16).rows(slice(0, 20)), weight.bfloat16().float())
    x = torch.randn(8, 30)
    rounded = matrix(weight.bfloat16().float())
    assert torch.equal(linear(x, matrix(weight, torch.bfloat16)), linear(x, rounded))


def test_cut():
    assert cut(0, (4, 2, 1)) == []
    assert cut(11, (4, 2, 1)) == [(0, 4), (4, 4), (8, 2), (10, 1)]
    assert cut(16, (8,)) == [(0, 8), (8, 8)]


def test_shapes_pass_their_own_check_here():
    """Not a promise about every BLAS; but if this fails, the backend has become slow."""
    assert MIN_TILE in row_tiles(576, 576, 1, CPU)
    shapes = batched_shapes(3, 64, 256, 1, CPU)
    assert shapes.batches[-1] == 1
    assert shapes.tiles[-1] == 8


def test_sizes_that_differ_are_not_used(monkeypatch):
    """A product that treats 32 rows differently from 8: only the small size is left."""
    row_tiles.cache_clear()
    matmul = torch.Tensor.__matmul__

    def product(x, y):
        made = matmul(x, y)
        return made * (1 + 1e-5) if x.dim() == 2 and len(x) >= 32 else made

    monkeypatch.setattr(torch.Tensor, "__matmul__", product)
    assert row_tiles(48, 64, 1, CPU) == (8,)
    row_tiles.cache_clear()


def test_places_that_differ_leave_single_rows(monkeypatch, log):
    row_tiles.cache_clear()
    matmul = torch.Tensor.__matmul__

    def product(x, y):
        made = matmul(x, y)
        made[0] *= 1 + 1e-5
        return made

    monkeypatch.setattr(torch.Tensor, "__matmul__", product)
    assert row_tiles(48, 64, 1, CPU) == (1,)
    assert "using single rows" in log.text
    row_tiles.cache_clear()


@pytest.mark.parametrize(
    ("spoils", "expected"),
    [
        (lambda q: q.shape[0] >= 64, BatchedShapes((64, 8), (16, 4, 1))),
        (lambda q: q.shape[0] > 8, BatchedShapes((64, 8), (4, 1))),
        (lambda q: q.shape[1] == 64, BatchedShapes((8,), (16, 4, 1))),
        (None, BatchedShapes((1,), (1,))),
    ],
)
def test_batched_shapes_that_differ_are_not_used(monkeypatch, spoils, expected):
    batched_shapes.cache_clear()
    bmm = torch.bmm

    def product(q, k):
        made = bmm(q, k)
        if spoils is None:
            made[:, 0] *= 1 + 1e-5
        elif spoils(q):
            made *= 1 + 1e-5
        return made

    monkeypatch.setattr(torch, "bmm", product)
    assert batched_shapes(2, 16, 256, 1, CPU) == expected
    batched_shapes.cache_clear()


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_the_last_resort_computes_the_same_model(family, monkeypatch):
    """Single rows everywhere: other bits, the same numbers, and still invariant."""
    with open_checkpoint(tiny_folder(family)) as checkpoint:
        backend = TorchBackend(checkpoint.spec, "float32")
        backend.load_weights(checkpoint.weights())
    tokens = np.random.default_rng(0).integers(0, 256, 280)
    driver = Driver(backend)
    usual = driver.step([(driver.add(tokens), 280)], rows="all")
    monkeypatch.setattr(torch_products, "row_tiles", lambda *_: (1,))
    monkeypatch.setattr(
        "vllm.v1.attention.torch_attention.batched_shapes", lambda *_: BatchedShapes(tiles=(1,), batches=(1,))
    )
    single = driver.step([(driver.add(tokens), 280)], rows="all")
    np.testing.assert_allclose(single, usual, atol=2e-4)
    chunked = driver.add(tokens)
    parts = [driver.step([(chunked, 270)], rows="all")] + [driver.step([(chunked, 1)]) for _ in range(10)]
    assert np.array_equal(np.concatenate(parts), single)


def test_tiles_descend():
    assert list(ROW_TILES) == sorted(ROW_TILES, reverse=True)
    assert ROW_TILES[-1] == MIN_TILE
