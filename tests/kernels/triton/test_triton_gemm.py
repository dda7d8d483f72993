"""The Triton matrix product: against fp64, and a row's bits whatever stands beside it."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.kernels.triton.interpreted import DTYPES, on_device, torch  # isort: skip
from benchmarks.kernel_cases import GEMM_CASES, TOLERANCE, GemmCase
from vllm.kernels.triton import tiles
from vllm.kernels.triton.gemm import linear
from vllm.kernels.triton.tiles import Tile

SMALL = [case for case in GEMM_CASES if case.n * case.k < 200_000]
ROWS = (1, 2, 13, 64, 130)


def inputs(case: GemmCase, dtype: str, m: int):
    bias = case.bias_values()
    x, w = (on_device(values).to(DTYPES[dtype]) for values in (case.rows(m), case.weights()))
    return x, w, None if bias is None else on_device(bias)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_against_fp64(case: GemmCase, dtype: str) -> None:
    x, w, bias = inputs(case, dtype, 130)
    a, b = x.double(), w.double()
    sums = a @ b.T if bias is None else a @ b.T + bias.double()
    found = linear(x, w, bias).double()
    sizes = ((a * a) @ (b * b).T).sqrt()
    tolerance = TOLERANCE["float32" if dtype == "float32" else "bfloat16"]
    assert ((found - sums).abs() < tolerance * case.k**0.5 * (sizes + sums.abs()) + 1e-7).all()


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_any_company(dtype: str, splits: int) -> None:
    case = GemmCase("company", 65, 300, bias=True)
    x, w, bias = inputs(case, dtype, max(ROWS))
    tile = Tile(16, 64, 32, splits, 4, 1)
    whole = linear(x, w, bias, tile)
    for m in ROWS:
        assert torch.equal(linear(x[:m], w, bias, tile), whole[:m])
    for place in (7, 77, 129):
        assert torch.equal(linear(x[place : place + 1], w, bias, tile)[0], whole[place])


@pytest.mark.parametrize("splits", [1, 2, 4])
def test_parts_of_k_add_up(splits: int) -> None:
    case = GemmCase("parts", 20, 333, bias=True)
    x, w, bias = inputs(case, "float32", 3)
    found = linear(x, w, bias, Tile(16, 16, 32, splits, 4, 1))
    torch.testing.assert_close(found.double(), x.double() @ w.double().T + bias.double(), rtol=1e-5, atol=1e-5)


def test_no_rows() -> None:
    x, w, _ = inputs(SMALL[0], "float32", 1)
    assert linear(x[:0], w).shape == (0, len(w))


def test_a_table_of_tiles_is_kept_per_card(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(tiles, "TABLES", tmp_path / "tuned")
    tiles.load.cache_clear()
    card = "NVIDIA H200"
    assert tiles.tile_for(3072, 3072, 2, card) == tiles.default_tile(3072, 2)
    tile = Tile(64, 32, 128, 2, 4, 4)
    path = tiles.save(card, {(3072, 3072, 2): tile})
    assert path.name == "NVIDIA_H200.json"
    assert json.loads(path.read_text()) == {"3072,3072,2": [64, 32, 128, 2, 4, 4]}
    assert tiles.tile_for(3072, 3072, 2, card) == tile
    assert tiles.tile_for(3072, 3072, 4, card) == tiles.default_tile(3072, 4)
    assert tiles.tile_for(3072, 3072, 2, "") == tiles.INTERPRETED
    tiles.load.cache_clear()


def test_a_tile_does_not_know_the_rows() -> None:
    """What the invariance rests on."""
    assert "rows" not in tiles.tile_for.__annotations__
    assert all(isinstance(np.int64(tile.depth).item(), int) and tile.rows >= 16 for tile in tiles.CANDIDATES)
