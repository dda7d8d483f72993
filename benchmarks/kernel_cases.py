"""The matrix product's and the decoder's cases: one table each for correctness, invariance and speed."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm.model_executor.backends.interface import Float32s, ForwardBatch, Int32s, WeightTensor
from vllm.model_executor.spec import AttentionSpec, DecoderSpec, DenseFFNSpec, LayerSpec, RopeSpec

Float64s = npt.NDArray[np.float64]


def to_bf16(values: npt.ArrayLike) -> Float32s:
    """Rounded to bf16 (nearest even), as fp32."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


# Matrix product


@dataclass(frozen=True)
class GemmCase:
    """out [m, n] = a [m, k] w [n, k]^T, for several m; with an activation n counts gates and ups."""

    name: str
    n: int
    k: int
    activation: str | None = None
    bias: bool = False
    speed: bool = False
    """Measured by the benchmark (the shapes of SmolLM2); the others are there for their edges."""

    def weights(self, seed: int = 0) -> Float32s:
        rng = np.random.default_rng(seed)
        return (rng.standard_normal((self.n, self.k)) / np.sqrt(self.k)).astype(np.float32)

    def rows(self, m: int, seed: int = 1) -> Float32s:
        return np.random.default_rng(seed).standard_normal((m, self.k)).astype(np.float32)

    def bias_values(self) -> Float32s | None:
        return np.random.default_rng(2).standard_normal(self.n).astype(np.float32) if self.bias else None


GEMM_CASES = (
    GemmCase("qkv", 960, 576, speed=True),
    GemmCase("out", 576, 576, speed=True),
    GemmCase("gate_up", 3072, 576, activation="silu", speed=True),
    GemmCase("down", 576, 1536, speed=True),
    GemmCase("head", 49152, 576, speed=True),
    GemmCase("one_by_two", 1, 2),
    GemmCase("small_odd", 33, 7),
    GemmCase("narrow", 31, 130, bias=True),
    GemmCase("two_panels_and_one", 65, 200, bias=True),
    GemmCase("long", 40, 4100),
    GemmCase("gated_odd", 2 * 23, 66, activation="gelu_tanh", bias=True),
    GemmCase("gated_erf", 2 * 32, 48, activation="gelu"),
)
GEMM_ROWS = (1, 2, 5, 12, 13, 32, 64, 130)
SPEED_ROWS = (1, 4, 32, 64, 512)

TOLERANCE = {"float32": 2.5e-7, "bfloat16": 4e-7, "int8": 4e-7}
"""Of a sum of k terms against fp64 on the same rounded inputs: times the root of k, times the root of the squares
of the terms (what rounding each of k partial sums to fp32 adds up to, with room)."""


# Decoder


def rope(half: int, base: float = 10000.0, factor: float = 1.0) -> RopeSpec:
    return RopeSpec(tuple(float(base ** (-i / half)) for i in range(half)), factor)


def _layer(heads: int, kv_heads: int, dim: int, inner: int, **options: object) -> LayerSpec:
    names = {field.name for field in dataclasses.fields(LayerSpec)}
    ffn_names = {"activation": "activation", "ffn_bias": "bias"}
    layer = {key: value for key, value in options.items() if key in names}
    ffn = {ffn_names[key]: value for key, value in options.items() if key in ffn_names}
    mixer = {key: value for key, value in options.items() if key not in names and key not in ffn_names}
    mixer.setdefault("rope", rope(dim // 2))
    mixer.setdefault("scale", dim**-0.5)
    ffn.setdefault("activation", "silu")
    return LayerSpec(
        AttentionSpec(heads, kv_heads, dim, **mixer),  # type: ignore[arg-type]
        DenseFFNSpec(inner, **ffn),  # type: ignore[arg-type]
        **layer,  # type: ignore[arg-type]
    )


@dataclass(frozen=True)
class DecoderCase:
    """A small decoder with random weights."""

    name: str
    spec: DecoderSpec

    def weights(self, seed: int = 0) -> dict[str, Float32s]:
        rng = np.random.default_rng(seed)
        out = {}
        for name, shape in self.spec.parameters().items():
            values = rng.standard_normal(shape)
            if name.endswith("norm"):
                values = 1.0 + 0.2 * values
            elif len(shape) == 2:
                values = values / np.sqrt(shape[1])
            else:
                values = 0.3 * values
            out[name] = values.astype(np.float32)
        return out

    def tensors(self, seed: int = 0) -> list[WeightTensor]:
        return [tensor(name, values) for name, values in self.weights(seed).items()]


def tensor(name: str, values: Float32s) -> WeightTensor:
    return WeightTensor(name, values.shape, "float32", lambda: values)


def _spec(vocab: int, hidden: int, *layers: LayerSpec, **options: object) -> DecoderSpec:
    settings: dict[str, object] = {"norm_eps": 1e-5, "max_position": 4096, "tie_word_embeddings": True}
    settings.update(options)
    return DecoderSpec("Case", vocab, hidden, layers, **settings)  # type: ignore[arg-type]


DECODER_CASES = (
    DecoderCase("llama", _spec(101, 96, *[_layer(6, 2, 32, 160)] * 2)),
    DecoderCase("many_heads_of_one", _spec(64, 64, _layer(16, 1, 16, 96), _layer(13, 1, 8, 40))),
    DecoderCase("head_256", _spec(70, 128, _layer(2, 1, 256, 64), _layer(4, 4, 128, 64))),
    DecoderCase(
        "gemma",
        _spec(
            90,
            80,
            *[
                _layer(
                    4,
                    1,
                    64,
                    128,
                    activation="gelu_tanh",
                    qk_norm=True,
                    post_mixer_norm=True,
                    post_ffn_norm=True,
                    window=window,
                    softcap=20.0,
                    rope=rope(32, base),
                )
                for window, base in ((40, 1e4), (None, 1e6), (300, 1e4))
            ],
            embed_scale=80**0.5,
            logits_softcap=15.0,
        ),
    ),
    DecoderCase(
        "biases",
        _spec(
            77,
            50,
            *[_layer(3, 3, 24, 46, qkv_bias=True, out_bias=True, ffn_bias=True, activation="gelu")] * 2,
            tie_word_embeddings=False,
            logits_scale=0.5,
        ),
    ),
    DecoderCase(
        "no_rope_partial_rope", _spec(40, 32, _layer(2, 1, 20, 30, rope=None), _layer(2, 2, 32, 48, rope=rope(8)))
    ),
)

SMOLLM2 = DecoderCase("smollm2", _spec(49152, 576, *[_layer(9, 3, 64, 1536)] * 30))
"""The shapes of the bundled model, for speed."""


@dataclass(frozen=True)
class StepCase:
    """A decode or prefill step of `rows` sequences of `context` tokens, of which the last `tokens` are computed."""

    name: str
    rows: int
    tokens: int
    context: int
    shared: int = 0
    """Leading tokens that all rows have in common."""


STEP_CASES = (
    StepCase("decode 1 x 96", 1, 1, 96),
    StepCase("decode 1 x 2000", 1, 1, 2000),
    StepCase("decode 32 x 192", 32, 1, 192),
    StepCase("decode 64 x 1056, apart", 64, 1, 1056),
    StepCase("decode 64 x 1056, 1024 shared", 64, 1, 1056, shared=1024),
    StepCase("decode 32 x 576, 4 sets of 512", 8, 1, 576, shared=512),
    StepCase("prefill 512", 1, 512, 512),
    StepCase("prefill 1024", 1, 1024, 1024),
    StepCase("prefill 4 x 512", 4, 512, 512),
)


def int32s(values: npt.ArrayLike) -> Int32s:
    return np.asarray(values, np.int32)


def batch(
    tokens: list[list[int]],
    starts: list[int],
    tables: npt.NDArray[np.int32],
    hidden: list[int] | None = None,
    sets: list[tuple[int, int, int]] | None = None,
) -> ForwardBatch:
    """Rows of tokens that begin at `starts`; hidden rows default to all; sets are (first row, rows, shared blocks)."""
    counts = [len(row) for row in tokens]
    total = sum(counts)
    sets = sets or []
    return ForwardBatch(
        token_ids=int32s([token for row in tokens for token in row]),
        positions=int32s([start + i for start, row in zip(starts, tokens, strict=True) for i in range(len(row))]),
        query_start=int32s(np.concatenate(([0], np.cumsum(counts)))),
        seq_lens=int32s([start + len(row) for start, row in zip(starts, tokens, strict=True)]),
        block_tables=int32s(tables),
        hidden_rows=int32s(range(total) if hidden is None else hidden),
        shared_rows=int32s([entry[:2] for entry in sets]).reshape(len(sets), 2),
        shared_blocks=int32s([entry[2] for entry in sets]),
    )


def oracle(spec: DecoderSpec, weights: dict[str, Float32s], tokens: list[int], bf16: bool = False) -> Float64s:
    """fp64 logits [T, V] of a sequence, computed whole: the decoder as spec.py writes it. `bf16` rounds weights,
    inputs of the matrix products, q, k and v, as the kernels do (all sums stay fp64)."""

    def rounded(x: Float64s) -> Float64s:
        return to_bf16(x).astype(np.float64) if bf16 else x

    def matrix(name: str) -> Float64s:
        return rounded(weights[name].astype(np.float64))

    def rms(x: Float64s, name: str) -> Float64s:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + spec.norm_eps) * weights[name]

    def linear(x: Float64s, name: str) -> Float64s:
        out = rounded(x) @ matrix(name).T
        return out + weights[name + "_bias"] if name + "_bias" in weights else out

    count = len(tokens)
    positions = np.arange(count)
    x = matrix("embed")[tokens] * spec.embed_scale
    for index, layer in enumerate(spec.layers):
        mixer, p = layer.mixer, f"layers.{index}."
        h = rms(x, p + "input_norm")
        q, k, v = (linear(h, p + name).reshape(count, -1, mixer.head_dim) for name in "qkv")
        if mixer.qk_norm:
            q, k = rms(q, p + "q_norm"), rms(k, p + "k_norm")
        if mixer.rope is not None:
            half = mixer.rope.rotary_dim // 2
            angles = positions.astype(np.float32)[:, None] * np.array(mixer.rope.inv_freq, np.float32)
            cosine, sine = (
                f(angles.astype(np.float64))[:, None] * mixer.rope.attention_factor for f in (np.cos, np.sin)
            )
            q, k = (
                np.concatenate(
                    [
                        y[..., :half] * cosine - y[..., half : 2 * half] * sine,
                        y[..., half : 2 * half] * cosine + y[..., :half] * sine,
                        y[..., 2 * half :],
                    ],
                    -1,
                )
                for y in (q, k)
            )
        q, k, v = rounded(q), rounded(k), rounded(v)
        group = mixer.num_heads // mixer.num_kv_heads
        scores = np.einsum("qhd,khd->hqk", q, k.repeat(group, 1)) * mixer.scale
        if mixer.softcap:
            scores = mixer.softcap * np.tanh(scores / mixer.softcap)
        seen = positions[None, :] <= positions[:, None]
        if mixer.window:
            seen &= positions[None, :] > positions[:, None] - mixer.window
        scores = np.where(seen, scores, -np.inf)
        p_ij = np.exp(scores - scores.max(-1, keepdims=True))
        p_ij /= p_ij.sum(-1, keepdims=True)
        a = linear(np.einsum("hqk,khd->qhd", p_ij, v.repeat(group, 1)).reshape(count, -1), p + "o")
        x = x + (rms(a, p + "post_mixer_norm") if layer.post_mixer_norm else a)
        h = rms(x, p + "ffn_norm")
        f = linear(activation(layer.ffn.activation, linear(h, p + "gate")) * linear(h, p + "up"), p + "down")
        x = x + (rms(f, p + "post_ffn_norm") if layer.post_ffn_norm else f)
    logits = rounded(rms(x, "final_norm")) @ matrix("embed" if spec.tie_word_embeddings else "head").T
    logits = logits * spec.logits_scale
    return spec.logits_softcap * np.tanh(logits / spec.logits_softcap) if spec.logits_softcap else logits


def activation(name: str, x: Float64s) -> Float64s:
    """silu, gelu_tanh or gelu in fp64."""
    if name == "silu":
        return x / (1.0 + np.exp(-x))
    if name == "gelu_tanh":
        return 0.5 * x * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (x + 0.044715 * x**3)))
    from math import erf

    return 0.5 * x * (1.0 + np.vectorize(erf)(x / np.sqrt(2.0)))
