"""Paged attention: one kernel family for prefill chunks, decode rows and shared prefixes.

Query rows (a token and one of the heads of a K/V head's group) stand in tiles of `tile_rows`; a *task* is a tile, the
block table it reads, and a range of partitions of 256 absolute positions.

    tokens of a chunk     [t0 t1 t2 t3 t4] [t5 t6 …        each tile over its partitions 0 .. its last one
    decode rows           [a] [b] [c]                      a tile each
    a sharing set a b c   [a b c] over the shared partitions, then [a] [b] [c] over their own

A partition gives a row (m, l, o); these are merged in ascending order, as `v1/attention/torch_attention.py` defines:

    fused   a program walks over its task's partitions and merges as it goes (chunks of prompts)
    split   a program per partition stores (m, l, o), and a second kernel merges them (decode, so that a long context is
            read by many processors, and a shared prefix once)

Both are made of `_partition` and `_merge` on tiles of one shape, without fused multiply-adds, and a masked key or
partition merges as an exact no-op: so who computes a partition, and in which company, changes no bit.
"""

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm.kernels.triton.elementwise import EXACT, tanh
from vllm.kernels.triton.runtime import INTERPRETED, PARTITION, dot, power_of_2
from vllm.model_executor.backends.interface import PARTITION as SIZE
from vllm.model_executor.backends.interface import ForwardBatch, Int32s
from vllm.model_executor.spec import AttentionSpec

KEYS = 128 if INTERPRETED else 64
"""Keys per product, in ascending order within a partition."""
FIELDS = 6
"""Of a task: first token, tokens (0: nothing to do), row of the block table, keys that exist, first partition, end."""


@triton.jit
def _merge(m, l, o, new_m, new_l, new_o):
    """Two parts of a softmax; the first comes before the second."""
    largest = tl.maximum(m, new_m)
    origin = tl.where(largest == float("-inf"), 0.0, largest)
    keep = tl.exp(m - origin)
    add = tl.exp(new_m - origin)
    return largest, l * keep + new_l * add, o * keep[:, None] + new_o * add[:, None]


@triton.jit
def _partition(
    q, positions, k_ptr, v_ptr, table_ptr, length, partition, head, scale, softcap, window,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr,
    ROWS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """(m [ROWS], l [ROWS], o [ROWS, DIM_BLOCK]) of 256 keys; keys at `length` and after do not exist."""
    m = tl.full((ROWS,), float("-inf"), tl.float32)
    l = tl.zeros((ROWS,), tl.float32)
    o = tl.zeros((ROWS, DIM_BLOCK), tl.float32)
    columns = tl.arange(0, DIM_BLOCK)
    for first in range(0, tl.minimum(PARTITION, length - partition * PARTITION), KEYS):
        keys = partition * PARTITION + first + tl.arange(0, KEYS)
        exists = keys < length
        block = tl.load(table_ptr + keys // BLOCK_SIZE, mask=exists, other=0).to(tl.int64)
        places = ((block * BLOCK_SIZE + keys % BLOCK_SIZE) * KV_HEADS + head) * DIM
        live = exists[:, None] & (columns < DIM)[None, :]
        k = tl.load(k_ptr + places[:, None] + columns[None, :], mask=live, other=0.0)
        scores = dot(q, tl.trans(k)) * scale
        if HAS_SOFTCAP:
            scores = tanh(scores / softcap) * softcap
        seen = exists[None, :] & (keys[None, :] <= positions[:, None])
        if HAS_WINDOW:
            seen &= keys[None, :] > positions[:, None] - window
        scores = tl.where(seen, scores, float("-inf"))
        largest = tl.maximum(m, tl.max(scores, 1))
        origin = tl.where(largest == float("-inf"), 0.0, largest)
        p = tl.exp(scores - origin[:, None])
        keep = tl.exp(m - origin)
        v = tl.load(v_ptr + places[:, None] + columns[None, :], mask=live, other=0.0)
        l = l * keep + tl.sum(p, 1)
        o = o * keep[:, None] + dot(p.to(v.dtype), v)
        m = largest
    return m, l, o


@triton.jit
def _attend(
    q_ptr, k_ptr, v_ptr, out_ptr, m_ptr, l_ptr, o_ptr, positions_ptr, tables_ptr, tasks_ptr,
    tokens, table_width, scale, softcap, window,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """Program (task, K/V head, and with SPLIT the partition within the task's range)."""
    task = tasks_ptr + tl.program_id(0) * 6
    head = tl.program_id(1)
    first = tl.load(task)
    count = tl.load(task + 1)
    table = tl.load(task + 2).to(tl.int64)
    length = tl.load(task + 3)
    begin = tl.load(task + 4)
    end = tl.load(task + 5)
    if SPLIT:
        begin += tl.program_id(2)
        end = tl.minimum(end, begin + 1)
    if (count == 0) | (begin >= end):
        return
    GROUP: tl.constexpr = HEADS // KV_HEADS
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, DIM_BLOCK)
    live = rows < count * GROUP
    token = first + rows // GROUP
    place = (token * HEADS + head * GROUP + rows % GROUP).to(tl.int64)  # of [tokens, heads]
    inside = live[:, None] & (columns < DIM)[None, :]
    q = tl.load(q_ptr + place[:, None] * DIM + columns[None, :], mask=inside, other=0.0)
    positions = tl.load(positions_ptr + token, mask=live, other=-1)
    m = tl.full((ROWS,), float("-inf"), tl.float32)
    l = tl.zeros((ROWS,), tl.float32)
    o = tl.zeros((ROWS, DIM_BLOCK), tl.float32)
    for partition in range(begin, end):
        new_m, new_l, new_o = _partition(
            q, positions, k_ptr, v_ptr, tables_ptr + table * table_width, length, partition, head, scale, softcap,
            window, KV_HEADS, DIM, DIM_BLOCK, BLOCK_SIZE, KEYS, ROWS, HAS_SOFTCAP, HAS_WINDOW,
        )  # fmt: skip
        if SPLIT:
            part = partition * (tokens * HEADS) + place
            tl.store(m_ptr + part, new_m, mask=live)
            tl.store(l_ptr + part, new_l, mask=live)
            tl.store(o_ptr + part[:, None] * DIM + columns[None, :], new_o, mask=inside)
        else:
            m, l, o = _merge(m, l, o, new_m, new_l, new_o)
    if not SPLIT:
        out = tl.math.div_rn(o, tl.where(l == 0.0, 1.0, l)[:, None] + tl.zeros_like(o))
        tl.store(out_ptr + place[:, None] * DIM + columns[None, :], out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _merge_parts(
    m_ptr, l_ptr, o_ptr, out_ptr, positions_ptr, merged_ptr, tokens, window,
    HEADS: tl.constexpr, HEADS_BLOCK: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """Program i: the partitions of token merged[i], ascending, for all its heads."""
    token = tl.load(merged_ptr + tl.program_id(0))
    if token < 0:
        return
    position = tl.load(positions_ptr + token)
    heads = tl.arange(0, HEADS_BLOCK)
    columns = tl.arange(0, DIM_BLOCK)
    live = heads < HEADS
    inside = live[:, None] & (columns < DIM)[None, :]
    place = token.to(tl.int64) * HEADS + heads
    m = tl.full((HEADS_BLOCK,), float("-inf"), tl.float32)
    l = tl.zeros((HEADS_BLOCK,), tl.float32)
    o = tl.zeros((HEADS_BLOCK, DIM_BLOCK), tl.float32)
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(position - window + 1, 0) // PARTITION
    for partition in range(begin, position // PARTITION + 1):
        part = partition * (tokens * HEADS) + place
        new_m = tl.load(m_ptr + part, mask=live, other=0.0)
        new_l = tl.load(l_ptr + part, mask=live, other=1.0)
        new_o = tl.load(o_ptr + part[:, None] * DIM + columns[None, :], mask=inside, other=0.0)
        m, l, o = _merge(m, l, o, new_m, new_l, new_o)
    out = tl.math.div_rn(o, tl.where(l == 0.0, 1.0, l)[:, None] + tl.zeros_like(o))
    tl.store(out_ptr + place[:, None] * DIM + columns[None, :], out.to(out_ptr.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class Kind:
    """Layers that attend by the same tasks."""

    group: int
    window: int | None

    @classmethod
    def of(cls, mixer: AttentionSpec) -> "Kind":
        return cls(mixer.num_heads // mixer.num_kv_heads, mixer.window)

    @property
    def tile_rows(self) -> int:
        """16 is the fewest rows a tensor core takes: a decode row's tile is that high too, so all tiles are."""
        return max(256 if INTERPRETED else 16, power_of_2(self.group))

    @property
    def tile_tokens(self) -> int:
        return self.tile_rows // self.group


@dataclass
class Tasks:
    """Tasks of one kind of layer in one step."""

    fused: Int32s  # [F, 6]
    split: Int32s  # [S, 6]
    merged: Int32s  # [M], tokens whose partitions were computed apart
    partitions: int  # most of them in a split task
    span: int  # partitions of the longest row that is split


def plan(batch: ForwardBatch, kind: Kind, block_size: int) -> Tasks:
    """Cuts a step into tasks: rows of one token are split, longer chunks fused."""
    counts = np.diff(batch.query_start)
    lengths = batch.seq_lens
    shared = np.zeros(len(lengths), np.int32)  # leading partitions that a set computes for the row
    sets: list[tuple[int, int, int]] = []
    for (first, rows), blocks in zip(batch.shared_rows.tolist(), batch.shared_blocks.tolist(), strict=True):
        whole = blocks * block_size // SIZE
        if whole and (counts[first : first + rows] == 1).all():
            shared[first : first + rows] = whole
            sets.append((first, rows, whole))

    def seen_from(positions: Int32s) -> Int32s:
        """First partition that a query at these positions sees."""
        if kind.window is None:
            return np.zeros_like(positions)
        begin: Int32s = np.maximum(positions - np.int32(kind.window - 1), 0) // np.int32(SIZE)
        return begin

    single = np.flatnonzero(counts == 1).astype(np.int32)
    tokens = batch.query_start[single]
    limits = lengths[single]
    own = np.stack(
        [
            tokens,
            np.ones_like(tokens),
            single,
            limits,
            np.maximum(seen_from(limits - np.int32(1)), shared[single]),
            (limits + np.int32(SIZE - 1)) // np.int32(SIZE),
        ],
        axis=1,
    )
    tiles: list[tuple[int, ...]] = []
    for first, rows, whole in sets:
        for start in range(first, first + rows, kind.tile_tokens):
            stop = min(start + kind.tile_tokens, first + rows)
            begin = int(seen_from(lengths[start:stop] - np.int32(1)).min())
            if begin < whole:
                tiles.append((int(batch.query_start[start]), stop - start, first, whole * SIZE, begin, whole))
    fused: list[tuple[int, ...]] = []
    for row in np.flatnonzero(counts > 1).tolist():
        start, stop = int(batch.query_start[row]), int(batch.query_start[row + 1])
        for token in range(start, stop, kind.tile_tokens):
            count = min(kind.tile_tokens, stop - token)
            last = int(batch.positions[token + count - 1])
            begin = int(seen_from(batch.positions[token : token + 1])[0])
            fused.append((token, count, row, last + 1, begin, last // SIZE + 1))
    split = np.concatenate([_table(tiles), own.astype(np.int32)])
    ranges = split[:, 5] - split[:, 4]
    return Tasks(_table(fused), split, tokens, int(ranges.max(initial=0)), int(own[:, 5].max(initial=0)))


def _table(tasks: list[tuple[int, ...]]) -> Int32s:
    return np.array(tasks, np.int32).reshape(-1, FIELDS)


class Scratch:
    """(m, l, o) of split partitions; grown when a step needs more, and shared by all layers."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._flat = torch.empty(0, dtype=torch.float32, device=device)

    def parts(self, span: int, tokens: int, heads: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
        rows = span * tokens * heads
        if self._flat.numel() < rows * (dim + 2):
            self._flat = torch.empty(rows * (dim + 2), dtype=torch.float32, device=self._device)
        return self._flat[:rows], self._flat[rows : 2 * rows], self._flat[2 * rows : rows * (dim + 2)]


@dataclass
class DeviceTasks:
    """`Tasks` on the device."""

    fused: Tensor
    split: Tensor
    merged: Tensor
    partitions: int
    span: int


def attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    positions: Tensor,
    tables: Tensor,
    tasks: DeviceTasks,
    mixer: AttentionSpec,
    block_size: int,
    scratch: Scratch,
) -> Tensor:
    """q [T, heads, hd] over the caches [slots, kv heads, hd] -> [T, heads * hd], in their dtype."""
    tokens, heads, dim = q.shape
    kv_heads = mixer.num_kv_heads
    kind = Kind.of(mixer)
    out = torch.zeros(tokens, heads * dim, dtype=q.dtype, device=q.device)
    softcap, window = mixer.softcap or 1.0, mixer.window or 0
    shape = (heads, kv_heads, dim, max(16, power_of_2(dim)), block_size, KEYS, kind.tile_rows)
    flags = (mixer.softcap is not None, mixer.window is not None)
    if len(tasks.fused):
        _attend[(len(tasks.fused), kv_heads)](
            q, k_cache, v_cache, out, q, q, q, positions, tables, tasks.fused, tokens, tables.shape[1], mixer.scale,
            softcap, window, *shape, False, *flags, num_warps=4, num_stages=2, **EXACT,
        )  # fmt: skip
    if len(tasks.split):
        m, l, o = scratch.parts(tasks.span, tokens, heads, dim)
        _attend[(len(tasks.split), kv_heads, tasks.partitions)](
            q, k_cache, v_cache, out, m, l, o, positions, tables, tasks.split, tokens, tables.shape[1], mixer.scale,
            softcap, window, *shape, True, *flags, num_warps=4, num_stages=2, **EXACT,
        )  # fmt: skip
        _merge_parts[(len(tasks.merged),)](
            m,
            l,
            o,
            out,
            positions,
            tasks.merged,
            tokens,
            window,
            heads,
            power_of_2(heads),
            dim,
            shape[3],
            flags[1],
            num_warps=4,
            **EXACT,
        )
    return out
