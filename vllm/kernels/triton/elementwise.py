"""What stands between the matrix products, by row: norms with the residual, rope with the cache write, the gate.

Values are fp32; what goes into a matrix product or the cache is rounded to the model's dtype on the way out. Every sum
is over one row in one program, so no row knows of another. `EXACT` forbids fused multiply-adds, so that a value does
not depend on which kernel made it.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm.kernels.triton.runtime import INTERPRETED, power_of_2

EXACT: dict[str, Any] = {"enable_fp_fusion": False}
"""Launch option: every `*` and `+` rounds by itself."""
_ROWS = 128 if INTERPRETED else 1
"""Rows per program: the interpreter's time goes by the number of programs."""


@triton.jit
def tanh(x):
    """By exp, without overflow; its error is that of one rounding at 1."""
    e = tl.exp(-2.0 * tl.abs(x))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -t, t)


@triton.jit
def _rms(x, weight, size, eps):
    """x [ROWS, BLOCK], weight [BLOCK]."""
    root = tl.math.sqrt_rn(tl.sum(x * x, 1) / size + eps)
    return tl.math.div_rn(x, root[:, None] + tl.zeros_like(x)) * weight[None, :]


@triton.jit
def _add_norm(
    x_ptr, add_ptr, add_weight_ptr, weight_ptr, out_ptr, rows, size, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, ADD_NORM: tl.constexpr,
):  # fmt: skip
    """x += add (or rms(add, add_weight)); out = rms(x, weight). ROWS rows per program."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    live = (row < rows)[:, None] & inside[None, :]
    places = row.to(tl.int64)[:, None] * size + columns[None, :]
    x = tl.load(x_ptr + places, mask=live, other=0.0)
    if ADD:
        add = tl.load(add_ptr + places, mask=live, other=0.0)
        if ADD_NORM:
            add = _rms(add, tl.load(add_weight_ptr + columns, mask=inside, other=0.0), size, eps)
        x += add
        tl.store(x_ptr + places, x, mask=live)
    out = _rms(x, tl.load(weight_ptr + columns, mask=inside, other=0.0), size, eps)
    tl.store(out_ptr + places, out.to(out_ptr.dtype.element_ty), mask=live)


def add_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    dtype: torch.dtype,
    add: Tensor | None = None,
    add_weight: Tensor | None = None,
) -> Tensor:
    """x [T, D] (fp32, changed in place) += add, or += rms(add, add_weight); returns rms(x, weight) in `dtype`."""
    rows, size = x.shape
    out = torch.empty(rows, size, dtype=dtype, device=x.device)
    if rows:
        _add_norm[(triton.cdiv(rows, _ROWS),)](
            x, x if add is None else add, weight if add_weight is None else add_weight, weight, out, rows, size, eps,
            _ROWS, power_of_2(size), add is not None, add_weight is not None,
            num_warps=4 if size <= 4096 else 8, **EXACT,
        )  # fmt: skip
    return out


@triton.jit
def _rope_cache(
    qkv_ptr, q_ptr, k_cache_ptr, v_cache_ptr, positions_ptr, slots_ptr, cos_ptr, sin_ptr, q_weight_ptr, k_weight_ptr,
    tokens, eps,
    ROWS: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    HALF: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Program (ROWS tokens, head of q, k or v). Heads stand in a row of qkv as q | k | v. Of q and k, a head is normed
    over its DIM values, and its first 2 * HALF are rotated, i with i + HALF."""
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    slot = tl.load(slots_ptr + token, mask=token < tokens, other=-1).to(tl.int64)
    token = token.to(tl.int64)
    real = (slot >= 0)[:, None]  # the others are padding
    i = tl.arange(0, BLOCK)
    live = real & (i < DIM)[None, :]
    base = qkv_ptr + ((token * (HEADS + 2 * KV_HEADS) + head) * DIM)[:, None]
    x = tl.load(base + i[None, :], mask=live, other=0.0)
    if head < HEADS + KV_HEADS:
        weight_ptr = q_weight_ptr
        if head >= HEADS:
            weight_ptr = k_weight_ptr
        if NORM:
            root = tl.math.sqrt_rn(tl.sum(x * x, 1) / DIM + eps)[:, None] + tl.zeros_like(x)
            x = tl.math.div_rn(x, root) * tl.load(weight_ptr + i, mask=i < DIM, other=0.0)[None, :]
        if HALF > 0:
            turned = i < 2 * HALF
            partner = tl.where(i < HALF, i + HALF, i - HALF)
            y = tl.load(base + partner[None, :], mask=real & turned[None, :], other=0.0)
            if NORM:
                y = tl.math.div_rn(y, root) * tl.load(weight_ptr + partner, mask=turned, other=0.0)[None, :]
            position = tl.load(positions_ptr + token, mask=slot >= 0, other=0).to(tl.int64)
            angle = position[:, None] * HALF + tl.where(i < HALF, i, i - HALF)[None, :]
            cosine = tl.load(cos_ptr + angle, mask=real & turned[None, :], other=1.0)
            sine = tl.load(sin_ptr + angle, mask=real & turned[None, :], other=0.0)
            y = tl.where((i < HALF)[None, :], -y, y)
            x = tl.where(turned[None, :], x * cosine + y * sine, x)
    if head < HEADS:
        tl.store(q_ptr + ((token * HEADS + head) * DIM)[:, None] + i[None, :], x.to(q_ptr.dtype.element_ty), mask=live)
    else:
        cache_ptr = k_cache_ptr
        kv_head = head - HEADS
        if kv_head >= KV_HEADS:
            cache_ptr = v_cache_ptr
            kv_head -= KV_HEADS
        places = ((slot * KV_HEADS + kv_head) * DIM)[:, None] + i[None, :]
        tl.store(cache_ptr + places, x.to(cache_ptr.dtype.element_ty), mask=live)


def rope_cache(
    qkv: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    positions: Tensor,
    slots: Tensor,
    heads: int,
    rope: tuple[Tensor, Tensor] | None,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
) -> Tensor:
    """qkv [T, (heads + 2 kv) * hd] (fp32) -> q [T, heads, hd] in the cache's dtype; k and v go to `slots` of the caches
    [slots, kv, hd]. A token with slot -1 is padding. `rope` is (cos, sin), each [positions, rotary_dim / 2]; `norms`
    the weights of q and k's norms."""
    kv_heads, dim = k_cache.shape[1:]
    q = torch.zeros(len(qkv), heads, dim, dtype=k_cache.dtype, device=qkv.device)
    if len(qkv):
        cos, sin = (qkv, qkv) if rope is None else rope
        q_weight, k_weight = (qkv, qkv) if norms is None else norms
        _rope_cache[(triton.cdiv(len(qkv), _ROWS), heads + 2 * kv_heads)](
            qkv, q, k_cache, v_cache, positions, slots, cos, sin, q_weight, k_weight, len(qkv), eps,
            _ROWS, heads, kv_heads, dim, power_of_2(dim), 0 if rope is None else cos.shape[1], norms is not None,
            num_warps=1, **EXACT,
        )  # fmt: skip
    return q


@triton.jit
def _gate(x_ptr, out_ptr, rows, size, ROWS: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    live = (row < rows)[:, None] & (columns < size)
    row = row.to(tl.int64)[:, None]
    g = tl.load(x_ptr + row * 2 * size + columns, mask=live, other=0.0)
    u = tl.load(x_ptr + row * 2 * size + size + columns, mask=live, other=0.0)
    if ACTIVATION == "silu":
        g = tl.math.div_rn(g, tl.exp(-g) + 1.0)
    elif ACTIVATION == "gelu":
        g = g * 0.5 * (tl.erf(g * 0.7071067811865476) + 1.0)
    else:
        g = g * 0.5 * (tanh((g * g * g * 0.044715 + g) * 0.7978845608028654) + 1.0)
    tl.store(out_ptr + row * size + columns, (g * u).to(out_ptr.dtype.element_ty), mask=live)


ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


def gate(x: Tensor, activation: str, dtype: torch.dtype) -> Tensor:
    """x [T, 2 I] (fp32, gates then ups) -> act(gate) * up [T, I] in `dtype`."""
    rows, size = len(x), x.shape[1] // 2
    out = torch.empty(rows, size, dtype=dtype, device=x.device)
    if rows:
        block = min(1024, power_of_2(size))
        _gate[(triton.cdiv(rows, _ROWS), triton.cdiv(size, block))](
            x, out, rows, size, _ROWS, activation, block, num_warps=4, **EXACT
        )
    return out
