"""A worker without a model: a checkpoint of invented weights, and the fake backend in place of a real one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.v1.worker.runner_fakes import FakeBackend
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 67,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "eos_token_id": [2, 3],
}
GEMMA = {
    **LLAMA,
    "architectures": ["Gemma3ForCausalLM"],
    "head_dim": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 8,
    "query_pre_attn_scalar": 4,
}


class Made(list[FakeBackend]):
    """The backends made, in order."""


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    backends = Made()

    def create_backend(name: str, spec: Any, dtype: str, device: DeviceConfig, quantization: str | None) -> FakeBackend:
        assert (name, dtype, quantization) == ("auto", "float32", None)
        backends.append(FakeBackend(spec.vocab_size))
        return backends[-1]

    monkeypatch.setattr("vllm.model_executor.backends.create_backend", create_backend)
    return backends


def config_of(folder: Path, values: dict[str, Any] | None = None, **model: Any) -> VllmConfig:
    (folder / "config.json").write_text(json.dumps(values or LLAMA))
    return VllmConfig(
        ModelConfig("m", str(folder), max_model_len=64, dtype="float32", load_format="dummy", **model),
        CacheConfig(block_size=4, num_blocks=64),
        SchedulerConfig(max_num_seqs=4),
    )
