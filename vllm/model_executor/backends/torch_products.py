"""Matrix products in torch whose rows do not know of each other.

A BLAS may add up a row's terms in another order when the matrix has another number of rows, so that a sequence's bits
would depend on its neighbours. Here rows are cut into tiles of a few fixed sizes, the last one padded, and each size
has to prove, for every shape of weights and number of threads it is used with, that a row comes out the same whatever
its place in the tile and whatever the size. Sizes that fail are not used; the last resort is one row at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vllm.logger import init_logger

logger = init_logger(__name__)

ROW_TILES = (128, 32, 8)
MIN_TILE = 8
PANEL = 4096
"""Output features made at once: bounds the fp32 copy of 16-bit weights."""
BATCH_SIZES = (16, 4, 1)
ATTENTION_TILES = (64, 8)
_POSITION_DEPENDENT = "a row's bits depend on its place in this torch's matrix products: using single rows, slowly"


class Matrix:
    """A weight [out, in] as it is kept, and fp32 panels of it as they are used."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, int8: bool) -> None:
        self.data = torch.empty(shape, dtype=torch.int8 if int8 else dtype, device=device)
        self.scale = torch.empty(shape[0], 1, device=device) if int8 else None

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    def set_rows(self, start: int, values: Tensor) -> None:
        """Rows start .. from fp32 values, rounded to the kept dtype; int8: one scale per row, largest value 127."""
        rows = self.data[start : start + len(values)]
        if self.scale is None:
            rows.copy_(values)
            return
        scale = values.abs().amax(dim=1, keepdim=True) / 127
        self.scale[start : start + len(values)] = scale
        rows.copy_(torch.round(values / torch.where(scale > 0, scale, 1.0)))

    def rows(self, index: Tensor | slice) -> Tensor:
        """Some rows in fp32, [n, in]."""
        part = self.data[index].float()
        return part if self.scale is None else part * self.scale[index]


def linear(x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
    """x [T, in] (fp32, T a multiple of MIN_TILE) times weight^T -> fp32 [T, out]. Sums are fp32."""
    rows, (features, inner) = len(x), weight.shape
    out = x.new_empty(rows, features)
    for start in range(0, features, PANEL):
        stop = min(start + PANEL, features)
        panel = weight.rows(slice(start, stop)).t()
        for first, size in cut(rows, row_tiles(stop - start, inner, torch.get_num_threads(), x.device)):
            torch.mm(x[first : first + size], panel, out=out[first : first + size, start:stop])
    return out if bias is None else out.add_(bias)


def cut(count: int, sizes: Sequence[int]) -> list[tuple[int, int]]:
    """(first, size) pieces of 0 .. count, the largest sizes first; `sizes` descends and its last divides count."""
    pieces, first = [], 0
    for size in sizes:
        while count - first >= size:
            pieces.append((first, size))
            first += size
    return pieces


@functools.cache
def row_tiles(features: int, inner: int, _threads: int, device: torch.device) -> tuple[int, ...]:
    """Sizes of row tiles for weights [features, inner], descending: those that give a row the same bits."""
    generator = torch.Generator().manual_seed(features * 31 + inner)
    weight = torch.randn(features, inner, generator=generator).to(device).t()
    x = torch.randn(ROW_TILES[0], inner, generator=generator).to(device)
    small = torch.cat([x[first : first + MIN_TILE] @ weight for first in range(0, len(x), MIN_TILE)])

    def agrees(size: int) -> bool:
        for shift in (0, 1, 2, MIN_TILE // 2 + 1):
            rolled = torch.roll(x, shift, 0)[:size] @ weight
            if not torch.equal(rolled, torch.roll(small, shift, 0)[:size]):
                return False
        return True

    sizes = tuple(size for size in ROW_TILES if agrees(size))
    if MIN_TILE not in sizes:
        logger.warning("%s", _POSITION_DEPENDENT)
        return (1,)
    return sizes


class BatchedShapes(NamedTuple):
    """Which shapes attention may use, both descending."""

    tiles: tuple[int, ...]
    """Query rows per product."""
    batches: tuple[int, ...]
    """Products per call, in units of K/V heads."""


@functools.cache
def batched_shapes(heads: int, head_dim: int, keys: int, _threads: int, device: torch.device) -> BatchedShapes:
    """Shapes that give a query row the same bits in q [b, tile, head_dim] times k [b, keys, head_dim]^T and in
    p [b, tile, keys] times v [b, keys, head_dim], b a multiple of `heads`."""
    generator = torch.Generator().manual_seed(heads * 31 + head_dim)
    (large, small), count = ATTENTION_TILES, heads * BATCH_SIZES[0]
    q = torch.randn(count, large, head_dim, generator=generator).to(device)
    k = torch.randn(count, keys, head_dim, generator=generator).to(device)
    p = torch.rand(count, large, keys, generator=generator).to(device)

    def products(tile: int, first: int, last: int, shift: int = 0) -> tuple[Tensor, Tensor]:
        """Products first .. last - 1 in one call per tile, with the rows rolled by `shift` and back."""
        queries, weights = torch.roll(q[first:last], shift, 1), torch.roll(p[first:last], shift, 1)
        tiles = [slice(start, start + tile) for start in range(0, large, tile)]
        scores = [torch.bmm(queries[:, rows].contiguous(), k[first:last].transpose(1, 2)) for rows in tiles]
        outputs = [torch.bmm(weights[:, rows].contiguous(), k[first:last]) for rows in tiles]
        return torch.roll(torch.cat(scores, 1), -shift, 1), torch.roll(torch.cat(outputs, 1), -shift, 1)

    expected = [
        torch.cat(parts) for parts in zip(*(products(small, i, i + heads) for i in range(0, count, heads)), strict=True)
    ]

    def agrees(tile: int, batch: int) -> bool:
        made = [products(tile, 0, batch * heads, shift) for shift in (0, 3)]
        return all(
            torch.equal(one, whole[: len(one)]) for pair in made for one, whole in zip(pair, expected, strict=True)
        )

    if not agrees(small, 1):
        logger.warning("%s", _POSITION_DEPENDENT)
        return BatchedShapes((1,), (1,))
    batches = tuple(batch for batch in BATCH_SIZES if agrees(small, batch))
    tiles = (large, small) if all(agrees(large, batch) for batch in batches) else (small,)
    return BatchedShapes(tiles, batches)
