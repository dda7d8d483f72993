"""Qwen 3: Llama with rms-norms on q and k over each head, and a head size of its own."""

from __future__ import annotations

from vllm.model_executor.models.family import Config, Family
from vllm.model_executor.models.llama import llama_spec
from vllm.model_executor.models.qwen2 import qwen_windows
from vllm.model_executor.spec import DecoderSpec


def qwen3_spec(config: Config) -> DecoderSpec:
    if config.get("head_dim") is None:
        config = Config({**config.values, "head_dim": 128}, config.source)
    return llama_spec(config, "Qwen3ForCausalLM", qk_norm=True, windows=qwen_windows(config))


QWEN3 = Family(("Qwen3ForCausalLM",), "qwen3", "qwen3", qwen3_spec)
