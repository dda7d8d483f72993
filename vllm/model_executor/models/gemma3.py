"""Gemma 3 (text): norms before and after each part, q/k norms, five windowed layers to one full one, each kind with its
own rope, GELU-gated feed-forward, embeddings scaled by sqrt(hidden_size)."""

from __future__ import annotations

import math
from typing import Any

from vllm.exceptions import UnsupportedError
from vllm.model_executor.models.family import HF_LAYER_NAMES, Config, Family
from vllm.model_executor.models.rope import rope_parameters, rope_spec
from vllm.model_executor.spec import AttentionSpec, DecoderSpec, DenseFFNSpec, LayerSpec

_LOCAL_THETA = 10_000.0
_DEFAULT_PATTERN = 6


def gemma3_spec(config: Config) -> DecoderSpec:
    defaults = {"head_dim": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "sliding_window": 4096}
    config = Config(defaults | {key: value for key, value in config.values.items() if value is not None}, config.source)
    if config.flag("use_bidirectional_attention", False):
        raise UnsupportedError(f"{config.source}: use_bidirectional_attention is not supported")
    heads, kv_heads, head_dim = config.heads()
    num_layers = config.num_layers()
    longest = config.integer("max_position_embeddings", 131_072)
    pattern = config.integer("sliding_window_pattern", config.integer("_sliding_window_pattern", _DEFAULT_PATTERN))
    full_rope = rope_spec(_parameters(config, "full_attention"), head_dim, longest, config.source)
    local_rope = rope_spec(_parameters(config, "sliding_attention"), head_dim, longest, config.source)
    ffn = DenseFFNSpec(
        intermediate_size=config.integer("intermediate_size"),
        activation=config.activation("hidden_activation", "gelu_pytorch_tanh"),
    )
    layers = []
    for window in config.layer_windows(num_layers, lambda index: (index + 1) % pattern != 0):
        bias = config.flag("attention_bias", False)
        mixer = AttentionSpec(
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            scale=config.number("query_pre_attn_scalar", 256.0) ** -0.5,
            rope=full_rope if window is None else local_rope,
            window=window,
            softcap=config.optional_number("attn_logit_softcapping"),
            qkv_bias=bias,
            out_bias=bias,
            qk_norm=True,
        )
        layers.append(LayerSpec(mixer, ffn, post_mixer_norm=True, post_ffn_norm=True))
    hidden_size = config.integer("hidden_size")
    return DecoderSpec(
        architecture="Gemma3ForCausalLM",
        vocab_size=config.integer("vocab_size", 262_208),
        hidden_size=hidden_size,
        layers=tuple(layers),
        norm_eps=config.number("rms_norm_eps", 1e-6),
        max_position=longest,
        tie_word_embeddings=config.flag("tie_word_embeddings", True),
        embed_scale=math.sqrt(hidden_size),
        logits_softcap=config.optional_number("final_logit_softcapping"),
    )


def _parameters(config: Config, layer_type: str) -> dict[str, Any]:
    """Newer configs have one dict per layer type. In older ones `rope_scaling` is for the full layers only, and the
    windowed layers turn by `rope_local_base_freq`."""
    if config.get("rope_parameters") is not None:
        return rope_parameters(config, layer_type)
    if layer_type == "sliding_attention":
        return {"rope_theta": config.number("rope_local_base_freq", _LOCAL_THETA)}
    parameters = rope_parameters(config)
    parameters.setdefault("rope_theta", 1_000_000.0)
    return parameters


def _gguf_config(metadata: Config, config: dict[str, Any]) -> None:
    heads, num_layers = config["num_attention_heads"], config["num_hidden_layers"]
    # The 27B model (62 layers) alone scales by hidden_size / heads; GGUF has no key for it.
    config["query_pre_attn_scalar"] = config["hidden_size"] / heads if num_layers == 62 else config["head_dim"]
    config["hidden_activation"] = "gelu_pytorch_tanh"
    pattern = metadata.get("attention.sliding_window_pattern")
    if isinstance(pattern, list):  # one flag per layer
        config["layer_types"] = ["sliding_attention" if slides else "full_attention" for slides in pattern]
    else:
        config["sliding_window_pattern"] = metadata.integer("attention.sliding_window_pattern", _DEFAULT_PATTERN)
    config["attn_logit_softcapping"] = metadata.optional_number("attn_logit_softcapping")
    config["final_logit_softcapping"] = metadata.optional_number("final_logit_softcapping")
    full = config["rope_parameters"]
    full["rope_theta"] = metadata.number("rope.freq_base", 1_000_000.0)
    local = {"rope_type": "default", "rope_theta": metadata.number("rope.freq_base_swa", _LOCAL_THETA)}
    config["rope_parameters"] = {"full_attention": full, "sliding_attention": local}


_HF_NAMES = {
    **HF_LAYER_NAMES,
    "post_mixer_norm": "post_attention_layernorm.weight",
    "ffn_norm": "pre_feedforward_layernorm.weight",
    "post_ffn_norm": "post_feedforward_layernorm.weight",
}

GEMMA3 = Family(
    ("Gemma3ForCausalLM",),
    "gemma3_text",
    "gemma3",
    gemma3_spec,
    hf_layer_names=_HF_NAMES,
    norms_minus_one=True,
    gguf_config=_gguf_config,
)
