"""Qwen 2 and 2.5: Llama with biases on q, k and v, and (rarely) sliding windows in the upper layers."""

from __future__ import annotations

from vllm.model_executor.models.family import Config, Family
from vllm.model_executor.models.llama import llama_spec
from vllm.model_executor.spec import DecoderSpec


def qwen_windows(config: Config) -> list[int | None]:
    """Windows stand from `max_window_layers` upwards, and only with `use_sliding_window`."""
    num_layers = config.num_layers()
    if not config.flag("use_sliding_window", False):
        return [None] * num_layers
    first = config.integer("max_window_layers", num_layers, minimum=0)
    return config.layer_windows(num_layers, lambda index: index >= first)


def qwen2_spec(config: Config) -> DecoderSpec:
    return llama_spec(config, "Qwen2ForCausalLM", qkv_bias=True, out_bias=False, windows=qwen_windows(config))


QWEN2 = Family(("Qwen2ForCausalLM",), "qwen2", "qwen2", qwen2_spec)
