"""Matrix products whose rows do not know of each other: one tile and one order of K, whatever the number of rows."""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm.kernels.triton.runtime import INTERPRETED, dot
from vllm.kernels.triton.tiles import Tile, tile_for


@triton.jit
def _gemm(
    x_ptr, w_ptr, bias_ptr, out_ptr, m, n, k, part_k,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """out[part, m, n] = x [m, part of k] w [n, part of k]^T (+ bias in part 0); part = program 2."""
    row_block = tl.program_id(1)
    part = tl.program_id(2)
    rows = row_block * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside_rows = (rows < m)[:, None]
    inside_columns = (columns < n)[None, :]
    x_rows = x_ptr + rows.to(tl.int64)[:, None] * k
    w_columns = w_ptr + columns.to(tl.int64)[None, :] * k
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    begin = part * part_k
    end = tl.minimum(k, begin + part_k)
    for first in range(begin, end, DEPTH):
        depth = first + tl.arange(0, DEPTH)
        live = depth < end
        x = tl.load(x_rows + depth[None, :], mask=inside_rows & live[None, :], other=0.0)
        w = tl.load(w_columns + depth[:, None], mask=inside_columns & live[:, None], other=0.0)
        total += dot(x, w)
    if HAS_BIAS:  # noqa: SIM102 - decided when it is compiled
        if part == 0:
            total += tl.load(bias_ptr + columns, mask=columns < n, other=0.0)[None, :]
    places = (part.to(tl.int64) * m + rows.to(tl.int64))[:, None] * n + columns[None, :]
    tl.store(out_ptr + places, total, mask=inside_rows & inside_columns)


@triton.jit
def _add_parts(parts_ptr, out_ptr, size, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """out[i] = parts[0, i] + parts[1, i] + …, in that order."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = places < size
    total = tl.load(parts_ptr + places, mask=live)
    for part in tl.static_range(1, PARTS):
        total += tl.load(parts_ptr + part * size + places, mask=live)
    tl.store(out_ptr + places, total, mask=live)


@functools.cache
def card_of(device: torch.device) -> str:
    """The name under which a card's tiles are stored; "" for the interpreter."""
    return "" if INTERPRETED else torch.cuda.get_device_name(device)


def linear(x: Tensor, w: Tensor, bias: Tensor | None = None, tile: Tile | None = None) -> Tensor:
    """x [m, k] times w [n, k]^T (both of one dtype, contiguous) plus bias [n] (fp32) -> fp32 [m, n].

    `tile` is for tuning; otherwise it is the card's for (n, k)."""
    (m, k), n = x.shape, len(w)
    out = torch.empty(m, n, dtype=torch.float32, device=x.device)
    if m == 0:
        return out
    if tile is None:
        tile = tile_for(n, k, x.element_size(), card_of(x.device))
    parts = out if tile.splits == 1 else out.new_empty(tile.splits, m, n)
    # K is cut at multiples of the depth, whatever the rows: [0, part_k), [part_k, 2 part_k), …
    part_k = -(-k // (tile.splits * tile.depth)) * tile.depth
    grid = (triton.cdiv(n, tile.columns), triton.cdiv(m, tile.rows), tile.splits)
    _gemm[grid](
        x, w, x if bias is None else bias, parts, m, n, k, part_k,
        tile.rows, tile.columns, tile.depth, bias is not None,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if tile.splits > 1:
        _add_parts[(triton.cdiv(m * n, 1024),)](parts, out, m * n, tile.splits, 1024)
    return out
