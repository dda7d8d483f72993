"""What a family file is made of, and the names that most checkpoints give their weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vllm.exceptions import CheckpointError
from vllm.model_executor.spec import DecoderSpec

MAX_LAYERS = 10_000
MAX_HEAD_DIM = 8192
"""Bounds on what a config can make this process allocate before any weight is seen."""


class WeightName(NamedTuple):
    """Which parameter a checkpoint's weight fills, and what is done to it on the way."""

    canonical: str
    add_one: bool = False
    """The checkpoint stores a norm's factor minus one."""


class Config:
    """Reads a config dict with checks. `null` counts as absent. Raises `CheckpointError` naming the key."""

    def __init__(self, values: Mapping[str, Any], source: str = "config.json") -> None:
        self.values = values
        self.source = source

    def fail(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.source}: {message}")

    def get(self, key: str) -> Any:
        return self.values.get(key)

    def integer(self, key: str, default: int | None = None, minimum: int = 1, maximum: int = 2**31 - 1) -> int:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.fail(f"{key} is missing")
        if type(value) is float and value.is_integer():
            value = int(value)
        if type(value) is not int or not minimum <= value <= maximum:
            raise self.fail(f"{key} must be a whole number from {minimum} to {maximum}, not {value!r}")
        return value

    def number(self, key: str, default: float | None = None, positive: bool = True) -> float:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.fail(f"{key} is missing")
        if type(value) not in (int, float) or not math.isfinite(value) or (positive and value <= 0):
            raise self.fail(f"{key} must be a {'positive ' if positive else ''}number, not {value!r}")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        return None if self.values.get(key) is None else self.number(key)

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key)
        if value is None:
            return default
        if type(value) is not bool:
            raise self.fail(f"{key} must be true or false, not {value!r}")
        return value

    def text(self, key: str, default: str) -> str:
        value = self.values.get(key)
        if value is None:
            return default
        if type(value) is not str:
            raise self.fail(f"{key} must be a string, not {value!r}")
        return value

    def activation(self, key: str, default: str) -> Any:
        """One of `spec.Activation`."""
        value = self.text(key, default)
        known = {
            "silu": "silu",
            "swish": "silu",
            "gelu": "gelu",
            "gelu_pytorch_tanh": "gelu_tanh",
            "gelu_new": "gelu_tanh",
        }
        if value not in known:
            raise self.fail(f"{key} is {value!r}; these activations are known: {', '.join(known)}")
        return known[value]

    def heads(self) -> tuple[int, int, int]:
        """(query heads, K/V heads, head size)."""
        hidden, heads = self.integer("hidden_size"), self.integer("num_attention_heads")
        kv_heads = self.integer("num_key_value_heads", heads)
        if heads % kv_heads:
            raise self.fail(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
        if self.values.get("head_dim") is None and hidden % heads:
            raise self.fail(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
        head_dim = self.integer("head_dim", hidden // heads, maximum=MAX_HEAD_DIM)
        if head_dim % 2:
            raise self.fail(f"head_dim {head_dim} is odd")
        return heads, kv_heads, head_dim

    def num_layers(self) -> int:
        return self.integer("num_hidden_layers", maximum=MAX_LAYERS)

    def layer_windows(self, num_layers: int, default: Callable[[int], bool]) -> list[int | None]:
        """The sliding window of each layer (None: full attention), from `layer_types` or, without it, where
        `default` of the layer's index says so."""
        types = self.values.get("layer_types")
        if types is None:
            sliding = [default(index) for index in range(num_layers)]
        else:
            known = ("full_attention", "sliding_attention")
            if not isinstance(types, list) or len(types) != num_layers or any(kind not in known for kind in types):
                raise self.fail(f"layer_types must list {num_layers} of {', '.join(known)}, not {types!r}")
            sliding = [kind == "sliding_attention" for kind in types]
        return [self.integer("sliding_window") if slides else None for slides in sliding]


HF_LAYER_NAMES = {
    "input_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "o_bias": "self_attn.o_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "ffn_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
    "gate_bias": "mlp.gate_proj.bias",
    "up_bias": "mlp.up_proj.bias",
    "down_bias": "mlp.down_proj.bias",
}
HF_TOP_NAMES = {"embed": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "head": "lm_head.weight"}

GGUF_LAYER_NAMES = {
    "input_norm": "attn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "o": "attn_output.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "o_bias": "attn_output.bias",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "post_mixer_norm": "post_attention_norm.weight",
    "ffn_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
    "gate_bias": "ffn_gate.bias",
    "up_bias": "ffn_up.bias",
    "down_bias": "ffn_down.bias",
    "post_ffn_norm": "post_ffw_norm.weight",
}
GGUF_TOP_NAMES = {"embed": "token_embd.weight", "final_norm": "output_norm.weight", "head": "output.weight"}


@dataclass(frozen=True)
class Family:
    """One family of checkpoints."""

    architectures: tuple[str, ...]
    """Names in config.json's `architectures`; the first stands for a GGUF file of the family."""
    model_type: str
    """`model_type` in config.json, for configs that name no architecture."""
    gguf_architecture: str | None
    """`general.architecture` of its GGUF files; None where another family's files serve."""
    spec: Callable[[Config], DecoderSpec]
    hf_layer_names: Mapping[str, str] = field(default_factory=lambda: HF_LAYER_NAMES)
    """Canonical name within a layer -> name within `model.layers.<i>.`."""
    norms_minus_one: bool = False
    """Hugging Face checkpoints store the factor of a norm minus one."""
    gguf_interleaved_rope: bool = False
    """GGUF files have the rows of q and k permuted for the interleaved rope layout."""
    gguf_config: Callable[[Config, dict[str, Any]], None] | None = None
    """Adds what is special to this family to the config made from a GGUF file's metadata (keys without the
    architecture's prefix)."""

    def hf_names(self, spec: DecoderSpec) -> dict[str, WeightName]:
        """Hugging Face name -> parameter, for every parameter of `spec`."""
        names = _names(spec, HF_TOP_NAMES, "model.layers.", self.hf_layer_names)
        return {
            name: WeightName(canonical, self.norms_minus_one and canonical.endswith("norm"))
            for name, canonical in names.items()
        }

    def gguf_names(self, spec: DecoderSpec) -> dict[str, WeightName]:
        """GGUF name -> parameter, for every parameter of `spec`."""
        names = _names(spec, GGUF_TOP_NAMES, "blk.", GGUF_LAYER_NAMES)
        return {name: WeightName(canonical) for name, canonical in names.items()}


def _names(spec: DecoderSpec, top: Mapping[str, str], prefix: str, in_layer: Mapping[str, str]) -> dict[str, str]:
    names = {}
    for canonical in spec.parameters():
        if canonical.startswith("layers."):
            _, index, name = canonical.split(".")
            names[f"{prefix}{index}.{in_layer[name]}"] = canonical
        else:
            names[top[canonical]] = canonical
    return names
