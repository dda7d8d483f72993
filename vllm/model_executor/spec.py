"""A decoder as a description: what a family file produces and every backend runs.

A `DecoderSpec` is plain, frozen data. It has no forward pass and no tensors. A backend reads it and either runs all of
it or refuses the part it cannot run, by name (`UnsupportedSpecError`).

The residual stream of one layer, with shapes beside the values (T tokens, D = hidden_size):

    x                               [T, D]
    h = rms(x, input_norm)          [T, D]
    q = h Wq^T (+ bq)               [T, num_heads, head_dim]       k, v alike with num_kv_heads
    q, k = rms(q, q_norm), rms(k, k_norm)          when mixer.qk_norm, over head_dim
    q, k = rope(q), rope(k)                        when mixer.rope
    a = attention(q, K, V)          [T, num_heads * head_dim]      K and V read back from the paged cache
    a = a Wo^T (+ bo)               [T, D]
    x = x + (rms(a, post_mixer_norm) if post_mixer_norm else a)
    h = rms(x, ffn_norm)
    f = (act(h Wg^T) * (h Wu^T)) Wd^T
    x = x + (rms(f, post_ffn_norm) if post_ffn_norm else f)

and around the layers: x = embed[token] * embed_scale; logits = softcap(rms(x, final_norm) head^T).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Activation = Literal["silu", "gelu_tanh", "gelu"]


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding in the half-split ("neox") layout: dimension i is rotated with i + head_dim / 2.

    `inv_freq` holds the rotary_dim / 2 inverse frequencies after scaling (linear, llama3 and yarn are already applied
    by the family file), so that no backend knows about scaling kinds. Cosine and sine are multiplied by
    `attention_factor` (yarn; 1.0 otherwise). Angles are position * inv_freq, computed in fp32 from fp32 `inv_freq`.
    """

    inv_freq: tuple[float, ...]
    attention_factor: float = 1.0

    @property
    def rotary_dim(self) -> int:
        return 2 * len(self.inv_freq)


@dataclass(frozen=True)
class AttentionSpec:
    """Softmax attention over the paged cache, with grouped heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """Factor on q·k before the soft-cap and the softmax (usually head_dim ** -0.5)."""
    rope: RopeSpec | None
    window: int | None = None
    """A query at position p sees keys at positions p - window + 1 .. p. None: all keys up to p."""
    softcap: float | None = None
    """scores = softcap * tanh(scores / softcap) before the mask. None: no cap."""
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    tag: Literal["attention"] = "attention"


@dataclass(frozen=True)
class DenseFFNSpec:
    """Gated feed-forward layer: down(act(gate(x)) * up(x))."""

    intermediate_size: int
    activation: Activation
    bias: bool = False
    tag: Literal["dense"] = "dense"


@dataclass(frozen=True)
class LayerSpec:
    """One layer: a tagged mixer and a tagged feed-forward part, and which of the optional norms stand in it."""

    mixer: AttentionSpec
    ffn: DenseFFNSpec
    post_mixer_norm: bool = False
    post_ffn_norm: bool = False


@dataclass(frozen=True)
class DecoderSpec:
    """A decoder-only language model. See the module's docstring for what the fields mean in the forward pass."""

    architecture: str
    """The checkpoint's own name, such as "LlamaForCausalLM"; for messages only."""
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    max_position: int
    """Longest context the checkpoint was made for; bounds max_model_len."""
    tie_word_embeddings: bool
    embed_scale: float = 1.0
    logits_softcap: float | None = None
    logits_scale: float = 1.0
    lora_targets: tuple[str, ...] = field(
        default=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    )

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Every parameter by its canonical name with its shape; a matrix is [out_features, in_features].

        Norm weights are the factor itself (Gemma's `1 + w` is applied by the loader) and stay fp32 in every backend.
        The head is absent when it is tied to the embedding.
        """
        hidden = self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {"embed": (self.vocab_size, hidden)}
        for index, layer in enumerate(self.layers):
            mixer, ffn = layer.mixer, layer.ffn
            prefix = f"layers.{index}."
            q_size, kv_size = mixer.num_heads * mixer.head_dim, mixer.num_kv_heads * mixer.head_dim
            shapes[prefix + "input_norm"] = (hidden,)
            for name, size in (("q", q_size), ("k", kv_size), ("v", kv_size)):
                shapes[prefix + name] = (size, hidden)
                if mixer.qkv_bias:
                    shapes[prefix + name + "_bias"] = (size,)
            if mixer.qk_norm:
                shapes[prefix + "q_norm"] = shapes[prefix + "k_norm"] = (mixer.head_dim,)
            shapes[prefix + "o"] = (hidden, q_size)
            if mixer.out_bias:
                shapes[prefix + "o_bias"] = (hidden,)
            if layer.post_mixer_norm:
                shapes[prefix + "post_mixer_norm"] = (hidden,)
            shapes[prefix + "ffn_norm"] = (hidden,)
            for name in ("gate", "up"):
                shapes[prefix + name] = (ffn.intermediate_size, hidden)
                if ffn.bias:
                    shapes[prefix + name + "_bias"] = (ffn.intermediate_size,)
            shapes[prefix + "down"] = (hidden, ffn.intermediate_size)
            if ffn.bias:
                shapes[prefix + "down_bias"] = (hidden,)
            if layer.post_ffn_norm:
                shapes[prefix + "post_ffn_norm"] = (hidden,)
        shapes["final_norm"] = (hidden,)
        if not self.tie_word_embeddings:
            shapes["head"] = (self.vocab_size, hidden)
        return shapes

    def kv_bytes_per_token(self, element_size: int) -> int:
        """Bytes of K and V that one token takes in the cache over all layers."""
        return sum(2 * layer.mixer.num_kv_heads * layer.mixer.head_dim for layer in self.layers) * element_size
