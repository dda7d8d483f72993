"""The reference decoder: any `DecoderSpec`, in torch, written to be read.

All values between matrix products are fp32. A matrix's input is rounded to the model's dtype, its weights are kept in
it, and its sums are fp32; K and V are rounded when they are written to the cache. Norm weights and biases are fp32.

Shapes: T tokens of the step (padded to a multiple of MIN_TILE), D = hidden_size. A row's bits depend on no other row:
matrix products go through `torch_products`, attention through `torch_attention`, and all else is made of elementwise
operations and sums over one row. (`silu` and `gelu` are spelled out: torch's own differ in the last bit between the
vector and the scalar part of a loop, that is, by position.)
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from vllm.model_executor.backends.torch_products import Matrix, linear
from vllm.model_executor.spec import AttentionSpec, DecoderSpec, DenseFFNSpec, RopeSpec

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [T, H, hd], k [T, KV, hd], v [T, KV, hd]) -> [T, H * hd]: writes K and V, then attends."""

_ROPE_BLOCK = 1024


class TorchDecoder:
    """Weights and the forward pass. `matrices` and `vectors` hold the canonical parameters."""

    def __init__(self, spec: DecoderSpec, dtype: torch.dtype, device: torch.device) -> None:
        self.spec = spec
        self.dtype = dtype
        self.device = device
        self.matrices: dict[str, Matrix] = {}
        self.vectors: dict[str, Tensor] = {}
        self._rope_tables: dict[RopeSpec, RopeTable] = {}

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Token ids [T] at positions [T] to the last layer's output [T, D], before the final norm."""
        x = self.matrices["embed"].rows(token_ids) * self.spec.embed_scale  # [T, D]
        for index, layer in enumerate(self.spec.layers):
            name = f"layers.{index}."
            h = self.norm(x, name + "input_norm")
            a = self.attention(h, index, layer.mixer, positions, attend)
            x = x + (self.norm(a, name + "post_mixer_norm") if layer.post_mixer_norm else a)
            h = self.norm(x, name + "ffn_norm")
            f = self.feed_forward(h, name, layer.ffn)
            x = x + (self.norm(f, name + "post_ffn_norm") if layer.post_ffn_norm else f)
        return x

    def attention(self, h: Tensor, index: int, mixer: AttentionSpec, positions: Tensor, attend: Attend) -> Tensor:
        name, dim = f"layers.{index}.", mixer.head_dim
        q = self.linear(h, name + "q").view(-1, mixer.num_heads, dim)  # [T, H, hd]
        k = self.linear(h, name + "k").view(-1, mixer.num_kv_heads, dim)  # [T, KV, hd]
        v = self.linear(h, name + "v").view(-1, mixer.num_kv_heads, dim)
        if mixer.qk_norm:
            q, k = self.norm(q, name + "q_norm"), self.norm(k, name + "k_norm")
        if mixer.rope is not None:
            cos, sin = self.rope_table(mixer.rope).at(positions)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        a = attend(index, self.round(q), k, v)  # [T, H * hd]
        return self.linear(a, name + "o")

    def feed_forward(self, h: Tensor, name: str, ffn: DenseFFNSpec) -> Tensor:
        gate = ACTIVATIONS[ffn.activation](self.linear(h, name + "gate"))  # [T, intermediate]
        return self.linear(gate * self.linear(h, name + "up"), name + "down")

    def final_norm(self, x: Tensor) -> Tensor:
        return self.norm(x, "final_norm")

    def logits(self, hidden: Tensor) -> Tensor:
        """Final, normed hidden rows [n, D] (n a multiple of MIN_TILE) to logits [n, V]."""
        logits = self.linear(hidden, "embed" if self.spec.tie_word_embeddings else "head")
        if self.spec.logits_scale != 1.0:
            logits *= self.spec.logits_scale
        if self.spec.logits_softcap is not None:
            logits = torch.tanh(logits / self.spec.logits_softcap) * self.spec.logits_softcap
        return logits

    def linear(self, x: Tensor, name: str) -> Tensor:
        return linear(self.round(x), self.matrices[name], self.vectors.get(name + "_bias"))

    def norm(self, x: Tensor, name: str) -> Tensor:
        """Root mean square norm over the last dimension."""
        mean_square = (x * x).sum(dim=-1, keepdim=True) / x.shape[-1]
        return x / torch.sqrt(mean_square + self.spec.norm_eps) * self.vectors[name]

    def round(self, x: Tensor) -> Tensor:
        """fp32 values rounded to the model's dtype."""
        return x if self.dtype == torch.float32 else x.to(self.dtype).float()

    def rope_table(self, rope: RopeSpec) -> RopeTable:
        table = self._rope_tables.get(rope)
        if table is None:
            table = self._rope_tables[rope] = RopeTable(rope, self.device)
        return table


class RopeTable:
    """Cosines and sines by position, made in blocks of 1,024 positions when one of them is first met."""

    def __init__(self, rope: RopeSpec, device: torch.device) -> None:
        self.inv_freq = torch.tensor(rope.inv_freq, dtype=torch.float32, device=device)
        self.factor = rope.attention_factor
        self.cos = self.sin = torch.empty(0, len(rope.inv_freq), device=device)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Positions [T] to cos, sin [T, 1, rotary_dim / 2]."""
        if len(positions):
            self._reach(int(positions.max()) + 1)
        return self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)

    def _reach(self, length: int) -> None:
        blocks = []
        for start in range(len(self.cos), length, _ROPE_BLOCK):
            positions = torch.arange(start, start + _ROPE_BLOCK, dtype=torch.float32, device=self.cos.device)
            angles = positions[:, None] * self.inv_freq
            blocks.append((torch.cos(angles) * self.factor, torch.sin(angles) * self.factor))
        if blocks:
            self.cos = torch.cat([self.cos, *(cos for cos, _ in blocks)])
            self.sin = torch.cat([self.sin, *(sin for _, sin in blocks)])


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split rotation: pairs (x[i], x[i + half]) turn by the angle of i. x [T, heads, hd]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def silu(x: Tensor) -> Tensor:
    return x / (torch.exp(-x) + 1.0)


def gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (torch.erf(x * math.sqrt(0.5)) + 1.0)


def gelu_tanh(x: Tensor) -> Tensor:
    inner = (x * x * x * 0.044715 + x) * math.sqrt(2.0 / math.pi)
    return x * 0.5 * (torch.tanh(inner) + 1.0)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": silu, "gelu": gelu, "gelu_tanh": gelu_tanh}
