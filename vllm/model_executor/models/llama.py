"""Llama (1 to 3.x) and its twin Mistral: grouped heads, rms-norm before each part, rope, SiLU-gated feed-forward."""

from __future__ import annotations

from vllm.model_executor.models.family import Config, Family
from vllm.model_executor.models.rope import max_position, rope_parameters, rope_spec
from vllm.model_executor.spec import AttentionSpec, DecoderSpec, DenseFFNSpec, LayerSpec


def llama_spec(
    config: Config,
    architecture: str = "LlamaForCausalLM",
    qkv_bias: bool | None = None,
    out_bias: bool | None = None,
    qk_norm: bool = False,
    windows: list[int | None] | None = None,
    tied_by_default: bool = False,
) -> DecoderSpec:
    """The plain decoder. Other families call it with what they do differently; None takes `attention_bias`."""
    heads, kv_heads, head_dim = config.heads()
    num_layers = config.num_layers()
    attention_bias = config.flag("attention_bias", False)
    rope = rope_spec(rope_parameters(config), head_dim, config.integer("max_position_embeddings", 2048), config.source)
    ffn = DenseFFNSpec(
        intermediate_size=config.integer("intermediate_size"),
        activation=config.activation("hidden_act", "silu"),
        bias=config.flag("mlp_bias", False),
    )
    layers = []
    for window in windows or [None] * num_layers:
        mixer = AttentionSpec(
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            rope=rope,
            window=window,
            qkv_bias=attention_bias if qkv_bias is None else qkv_bias,
            out_bias=attention_bias if out_bias is None else out_bias,
            qk_norm=qk_norm,
        )
        layers.append(LayerSpec(mixer, ffn))
    return DecoderSpec(
        architecture=architecture,
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        layers=tuple(layers),
        norm_eps=config.number("rms_norm_eps", 1e-6),
        max_position=max_position(config),
        tie_word_embeddings=config.flag("tie_word_embeddings", tied_by_default),
    )


def mistral_spec(config: Config) -> DecoderSpec:
    """Mistral: no biases, and a sliding window in every layer where the config gives one."""
    num_layers = config.num_layers()
    window = None if config.get("sliding_window") is None else config.integer("sliding_window")
    return llama_spec(config, "MistralForCausalLM", False, False, windows=[window] * num_layers)


LLAMA = Family(("LlamaForCausalLM",), "llama", "llama", llama_spec, gguf_interleaved_rope=True)
MISTRAL = Family(("MistralForCausalLM",), "mistral", None, mistral_spec)
