"""Paged attention in torch: the reference, and the definition of the order in which attention is added up.

Keys stand in fixed partitions of 256 absolute positions. A query row (one token, one head) takes from each partition
that it sees

    m = max(scores)    l = sum(exp(scores - m))    o = exp(scores - m) V        (scores masked outside its context)

and merges them in ascending order of partitions:

    M' = max(M, m)    L = L exp(M - M') + l exp(m - M')    O = O exp(M - M') + o exp(m - M')        result = O / L

    positions   0 .... 255 | 256 .... 511 | 512 .... 700
    row A       m l o      + m l o        + m l o (masked after its own position)
    row B       m l o      + m l o            <- A and B share the first 512 positions: one product serves both

Query rows are computed in tiles, a tile against one partition at a time. Which rows stand in a tile (a chunk of one
sequence's prompt, a decode row alone, all rows of a sharing set) and which tiles go into one call changes no row's
bits: a partition that is wholly masked for a row merges as an exact no-op, and the products are made in shapes for
which that was checked (`torch_products`). K and V are read back from the cache, also those written in this step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vllm.model_executor.backends.interface import PARTITION, ForwardBatch
from vllm.model_executor.backends.torch_products import BatchedShapes, batched_shapes, cut
from vllm.model_executor.spec import AttentionSpec

Int64s = npt.NDArray[np.int64]
_ZERO = np.float32(0)


class PagedCache:
    """K and V of one layer: [kv_heads, num_blocks * block_size, head_dim] each, zero at first."""

    def __init__(
        self, mixer: AttentionSpec, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ):
        shape = (mixer.num_kv_heads, num_blocks * block_size, mixer.head_dim)
        self.k, self.v = _zeros(shape, dtype, device), _zeros(shape, dtype, device)
        self.block_size = block_size

    def write(self, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """k, v [T, kv_heads, head_dim], rounded to the cache's dtype, into slots [T]."""
        self.k.index_copy_(1, slots, k.transpose(0, 1).to(self.k.dtype))
        self.v.index_copy_(1, slots, v.transpose(0, 1).to(self.v.dtype))

    def copy_blocks(self, sources: Tensor, targets: Tensor) -> None:
        for cache in (self.k, self.v):
            blocks = cache.view(cache.shape[0], -1, self.block_size, cache.shape[2])
            blocks.index_copy_(1, targets, blocks.index_select(1, sources))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On a CPU, memory that is not touched before it is written (`torch.zeros` writes all of it)."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(size, np.uint8)).view(dtype).view(shape)


@dataclass
class Call:
    """Some tiles against one partition, in one batched product of fixed shape."""

    tile: int
    count: int
    rows: Tensor  # [count * tile], query rows; the row past the last stands for padding
    granules: Tensor  # [kv_heads * count * 256 / granule], rows of the cache seen as granules of positions
    mask: Tensor | None  # [count, tile, 256], -inf where a row does not see a position, else 0; None: all see all
    stale: Tensor | None  # places in [count * 256] that a cache block has after its sequence's last position


@dataclass
class Plan:
    """The calls of one step for one kind of layer (heads, window), in ascending order of partitions."""

    num_rows: int
    calls: list[Call]


@dataclass
class _Tile:
    first: int  # query row
    count: int
    size: int
    table: int  # row of the block table
    length: int  # positions written
    begin: int  # first partition
    end: int  # after the last partition


def slot_mapping(batch: ForwardBatch, block_size: int) -> Int64s:
    """Cache slot of each token [T]."""
    rows = np.repeat(np.arange(len(batch.seq_lens)), np.diff(batch.query_start))
    positions = batch.positions.astype(np.int64)
    return batch.block_tables[rows, positions // block_size].astype(np.int64) * block_size + positions % block_size


def make_plan(
    batch: ForwardBatch, mixer: AttentionSpec, block_size: int, num_blocks: int, device: torch.device
) -> Plan:
    """Which tiles meet which partitions. Query row t * group + g is token t's g-th head of each K/V head."""
    group = mixer.num_heads // mixer.num_kv_heads
    shapes = batched_shapes(mixer.num_kv_heads, mixer.head_dim, PARTITION, torch.get_num_threads(), device)
    tiles = _tiles(batch, group, mixer.window, block_size, shapes)
    row_positions = np.repeat(batch.positions.astype(np.int64), group)
    num_rows = len(row_positions)
    row_positions = np.append(row_positions, -1)  # padding sees nothing
    calls = []
    for partition in range(max((tile.end for tile in tiles), default=0)):
        for size in shapes.tiles:
            active = [tile for tile in tiles if tile.size == size and tile.begin <= partition < tile.end]
            for first, count in cut(len(active), shapes.batches):
                calls.append(
                    _call(
                        active[first : first + count],
                        partition,
                        row_positions,
                        batch.block_tables,
                        mixer,
                        block_size,
                        num_blocks,
                        device,
                    )
                )
    return Plan(num_rows, calls)


def _tiles(batch: ForwardBatch, group: int, window: int | None, block_size: int, shapes: BatchedShapes) -> list[_Tile]:
    """Cuts the query rows into tiles: the rows of a sharing set together for the partitions that lie wholly within the
    shared blocks, each sequence's rows by themselves for the rest."""
    starts = batch.query_start.tolist()
    lengths = batch.seq_lens.tolist()
    own_begin = [0] * len(lengths)
    tiles: list[_Tile] = []

    def add(first_token: int, last_token: int, table: int, length: int, begin: int, end: int | None) -> None:
        first, last = first_token * group, last_token * group
        while first < last:
            size = next((s for s in shapes.tiles if 2 * (last - first) > s), shapes.tiles[-1])
            count = min(size, last - first)
            positions = batch.positions[first // group : (first + count - 1) // group + 1]
            tile_begin = begin
            if window is not None:
                tile_begin = max(begin, (int(positions.min()) - window + 1) // PARTITION)
            tile_end = int(positions.max()) // PARTITION + 1
            if end is not None:
                tile_end = min(end, tile_end)
            if tile_begin < tile_end:
                tiles.append(_Tile(first, count, size, table, length, tile_begin, tile_end))
            first += count

    for (first_row, num_rows), num_blocks in zip(batch.shared_rows.tolist(), batch.shared_blocks.tolist(), strict=True):
        shared = num_blocks * block_size // PARTITION
        if shared:
            own_begin[first_row : first_row + num_rows] = [shared] * num_rows
            add(starts[first_row], starts[first_row + num_rows], first_row, shared * PARTITION, 0, shared)
    for row, length in enumerate(lengths):
        add(starts[row], starts[row + 1], row, length, own_begin[row], None)
    return tiles


def _call(
    tiles: list[_Tile],
    partition: int,
    row_positions: Int64s,
    block_tables: npt.NDArray[np.int32],
    mixer: AttentionSpec,
    block_size: int,
    num_blocks: int,
    device: torch.device,
) -> Call:
    size, count = tiles[0].size, len(tiles)
    first = np.array([tile.first for tile in tiles])[:, None]
    rows_in_tile = np.array([tile.count for tile in tiles])[:, None]
    offsets = np.arange(size)
    rows = np.where(offsets < rows_in_tile, first + offsets, len(row_positions) - 1)  # [count, size]
    seen_by = row_positions[rows][:, :, None]  # [count, size, 1]
    keys = partition * PARTITION + np.arange(PARTITION)
    hidden = keys > seen_by
    if mixer.window is not None:
        hidden |= keys <= seen_by - mixer.window
    lengths = np.array([tile.length for tile in tiles])[:, None]
    granule = math.gcd(block_size, PARTITION)
    positions = keys[::granule]
    # Table entries past the sequence's end are undefined: its first block is read there, and masked.
    index = np.where(positions < lengths, positions // block_size, 0)
    blocks = block_tables[np.array([tile.table for tile in tiles])[:, None], index].astype(np.int64)
    places = blocks * (block_size // granule) + positions % block_size // granule  # [count, granules]
    heads = np.arange(mixer.num_kv_heads)[:, None, None] * (num_blocks * block_size // granule)
    stale = np.flatnonzero((keys >= lengths) & (keys < -(-lengths // granule) * granule))
    return Call(
        tile=size,
        count=count,
        rows=torch.from_numpy(rows.reshape(-1)).to(device),
        granules=torch.from_numpy((heads + places).reshape(-1)).to(device),
        mask=torch.from_numpy(np.where(hidden, np.float32(-np.inf), _ZERO)).to(device) if hidden.any() else None,
        stale=torch.from_numpy(stale).to(device) if len(stale) else None,
    )


def attend(q: Tensor, cache: PagedCache, plan: Plan, mixer: AttentionSpec) -> Tensor:
    """q [T, num_heads, head_dim] (fp32) over the cache -> [T, num_heads * head_dim] (fp32)."""
    kv_heads, dim = mixer.num_kv_heads, mixer.head_dim
    tokens, group = len(q), mixer.num_heads // mixer.num_kv_heads
    # Query rows, head by head, with one more row of zeros for padding: [kv_heads, R + 1, dim]
    queries = q.new_zeros(kv_heads, tokens * group + 1, dim)
    queries[:, :-1] = (q * mixer.scale).view(tokens, kv_heads, group, dim).transpose(0, 1).reshape(kv_heads, -1, dim)
    largest = q.new_full((kv_heads, tokens * group + 1, 1), -math.inf)
    total = torch.zeros_like(largest)
    output = torch.zeros_like(queries)
    granule = math.gcd(cache.block_size, PARTITION)
    k_granules, v_granules = cache.k.view(-1, granule * dim), cache.v.view(-1, granule * dim)
    for call in plan.calls:
        batch, tile = kv_heads * call.count, call.tile
        rows = queries.index_select(1, call.rows)  # [kv_heads, count * tile, dim]
        k = k_granules.index_select(0, call.granules).float().view(kv_heads, -1, dim)
        v = v_granules.index_select(0, call.granules).float().view(kv_heads, -1, dim)
        if call.stale is not None:  # masked, which does not stop a NaN that another sequence left there
            k.index_fill_(1, call.stale, 0.0)
            v.index_fill_(1, call.stale, 0.0)
        k, v = k.view(batch, PARTITION, dim), v.view(batch, PARTITION, dim)
        scores = torch.bmm(rows.view(batch, tile, dim), k.transpose(1, 2)).view(kv_heads, call.count, tile, PARTITION)
        if mixer.softcap is not None:
            scores = torch.tanh(scores / mixer.softcap) * mixer.softcap
        if call.mask is not None:
            scores += call.mask
        m = scores.amax(dim=-1, keepdim=True)  # [kv_heads, count, tile, 1], -inf where a row sees nothing
        p = scores.sub_(torch.where(m == -math.inf, 0.0, m)).exp_()
        l = p.sum(dim=-1, keepdim=True)
        o = torch.bmm(p.view(batch, tile, PARTITION), v).view(kv_heads, -1, dim)
        # Merge with what the earlier partitions gave these rows.
        m, l = m.view(kv_heads, -1, 1), l.view(kv_heads, -1, 1)
        old = largest.index_select(1, call.rows)
        new = torch.maximum(old, m)
        origin = torch.where(new == -math.inf, 0.0, new)
        keep, add = torch.exp(old - origin), torch.exp(m - origin)
        largest.index_copy_(1, call.rows, new)
        total.index_copy_(1, call.rows, total.index_select(1, call.rows) * keep + l * add)
        output.index_copy_(1, call.rows, output.index_select(1, call.rows) * keep + o * add)
    result = output[:, :-1] / total[:, :-1]
    return result.view(kv_heads, tokens, group, dim).transpose(0, 1).reshape(tokens, mixer.num_heads * dim)
