"""Every family against transformers: greedy tokens identical for 64 tokens in fp32, log-probabilities within 1e-3.

The backend decodes step by step through the paged cache; transformers then reads prompt and answer in one pass, and
must give the same distribution, and with it the same most likely token, at every step.
"""

from __future__ import annotations

import gguf
import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.model_executor.driver import Driver, log_softmax
from tests.models_util import random_weights, tiny_config, tiny_folder, tiny_gguf
from vllm.model_executor.backends.torch_backend import TorchBackend
from vllm.model_executor.loader import open_checkpoint
from vllm.model_executor.loader.gguf_file import GGUFFile

STEPS = 64
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
CASES = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama one kv head": ("llama", {"num_key_value_heads": 1}),
    "llama no grouping": ("llama", {"num_key_value_heads": 4}),
    "llama 9 heads over 3": ("llama", {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72}),
    "llama own head size": ("llama", {"head_dim": 24}),
    "llama gelu": ("llama", {"hidden_act": "gelu"}),
    "llama linear": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "llama3": ("llama", {"rope_scaling": LLAMA3, "rope_theta": 500_000.0}),
    "llama yarn": ("llama", {"rope_scaling": YARN}),
    "mistral window": ("mistral", {}),
    "mistral plain": ("mistral", {"sliding_window": None, "num_key_value_heads": 1}),
    "qwen2": ("qwen2", {}),
    "qwen2 yarn": ("qwen2", {"rope_scaling": YARN, "rope_theta": 1_000_000.0}),
    "qwen2 window": ("qwen2", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}),
    "qwen3": ("qwen3", {}),
    "qwen3 biases, tied": ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
    "gemma3": ("gemma3", {}),
    "gemma3 linear": ("gemma3", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    "gemma3 soft-cap of logits": ("gemma3", {"final_logit_softcapping": 5.0}),
    "gemma3 untied, biases": ("gemma3", {"tie_word_embeddings": False, "attention_bias": True}),
}


def reference_model(config: dict, weights: dict):
    """transformers' model of the same config and weights, fp32, without its fused attention."""
    values = {key: value for key, value in config.items() if key not in ("architectures", "model_type")}
    hf_config = transformers.AutoConfig.for_model(config["model_type"], **values)
    hf_config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(hf_config).eval().float()
    state = {name: torch.from_numpy(value.copy()) for name, value in weights.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= ({"lm_head.weight"} if config["tie_word_embeddings"] else set())
    return model


def reference_logits(model, tokens: list[int]) -> np.ndarray:
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0].float().numpy()


def check(logits: np.ndarray, tokens: list[int], prompt_length: int, model) -> None:
    """`logits` [steps, V] gave tokens[prompt_length:]."""
    expected = reference_logits(model, tokens[:-1])[prompt_length - 1 :]
    assert expected.shape == logits.shape
    assert np.abs(log_softmax(logits) - log_softmax(expected)).max() < 1e-3
    assert expected.argmax(axis=1).tolist() == tokens[prompt_length:]


@pytest.mark.parametrize("case", CASES)
def test_greedy_and_logprobs(case):
    family, overrides = CASES[case]
    config = tiny_config(family, **overrides)
    model = reference_model(config, random_weights(config))
    with open_checkpoint(tiny_folder(family, **overrides)) as checkpoint:
        backend = TorchBackend(checkpoint.spec, "float32")
        backend.load_weights(checkpoint.weights())
    driver = Driver(backend)
    prompt = np.random.default_rng(3).integers(0, 256, 45)
    sequence = driver.add(prompt)
    logits = driver.greedy(sequence, STEPS, chunk=17)
    check(logits, sequence.tokens, len(prompt), model)
    # A test that cannot fail shows nothing: the answer is not one token over and over, and not a foregone conclusion.
    assert len(set(sequence.tokens[len(prompt) :])) > 2
    assert np.exp(log_softmax(logits).max(axis=1)).mean() < 0.999


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3"])
def test_a_config_as_transformers_writes_it_now_means_the_same(family):
    """`rope_parameters` and `layer_types`, in place of `rope_theta` and `sliding_window_pattern`."""
    from vllm.model_executor.models.family import Config
    from vllm.model_executor.models.registry import family_of

    config = tiny_config(family, **({"rope_scaling": YARN} if family == "qwen3" else {}))
    values = {key: value for key, value in config.items() if key != "model_type"}
    newer = transformers.AutoConfig.for_model(config["model_type"], **values).to_dict()
    assert "rope_parameters" in newer
    found = family_of(newer["architectures"], newer["model_type"], "test")
    assert found.spec(Config(newer)) == found.spec(Config(config))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_gguf_file(family):
    """A quantized GGUF file, decoded here and by the gguf package, in both."""
    overrides = {"query_pre_attn_scalar": 32} if family == "gemma3" else {}  # what a GGUF file implies
    config = tiny_config(family, **overrides)
    path = tiny_gguf(family, "Q8_0", **overrides)
    quantize, dequantize = gguf.quants.quantize, gguf.quants.dequantize
    kind = gguf.GGMLQuantizationType.Q8_0
    weights = {
        name: dequantize(quantize(value, kind), kind) if value.ndim == 2 else value
        for name, value in random_weights(config).items()
    }
    model = reference_model(config, weights)
    with open_checkpoint(path) as checkpoint:
        backend = TorchBackend(checkpoint.spec, "float32")
        backend.load_weights(checkpoint.weights())
    driver = Driver(backend)
    sequence = driver.add(range(30, 60))
    logits = driver.greedy(sequence, 20)
    check(logits, sequence.tokens, 30, model)


# The bundled models, from the same file, its weights decoded by the gguf package.

_HF_NAMES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_NAMES = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def bundled_reference(path, hf_config, names: dict[str, str], heads: dict[str, int], norm_offset: float):
    """transformers' model, filled by hand from a GGUF file."""
    hf_config._attn_implementation = "eager"
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(hf_config).eval()
    model.to_empty(device="cpu")
    model.float()
    state = {}
    file = GGUFFile(path)  # the gguf package's own reader takes ten seconds over Gemma's vocabulary
    for tensor in file.tensors.values():
        kind = gguf.GGMLQuantizationType[tensor.type_name]
        data = file.data(tensor).view(np.float32 if kind == gguf.GGMLQuantizationType.F32 else np.uint8)
        value = gguf.quants.dequantize(data.reshape(tensor.shape[0], -1), kind).reshape(tensor.shape)
        parts = tensor.name.removesuffix(".weight").split(".")
        prefix = f"model.layers.{parts[1]}." if parts[0] == "blk" else "model."
        if parts[-1] in heads:  # llama.cpp's interleaved rope order, back to halves
            value = value.reshape(heads[parts[-1]], -1, 2, value.shape[1]).swapaxes(1, 2).reshape(value.shape)
        if value.ndim == 1:
            value = value - np.float32(norm_offset)
        state[f"{prefix}{names[parts[-1]]}.weight"] = torch.from_numpy(np.ascontiguousarray(value))
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    for module in model.modules():  # buffers that `meta` left empty
        if hasattr(module, "rope_init_fn") or type(module).__name__.endswith("RotaryEmbedding"):
            module.__init__(hf_config)
        if hasattr(module, "embed_scale") and torch.is_tensor(module.embed_scale):
            module.embed_scale.fill_(module.scalar_embed_scale)
    return model


@pytest.mark.slow
def test_smollm2(smollm2_path):
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
    )
    model = bundled_reference(smollm2_path, config, _HF_NAMES, {"attn_q": 9, "attn_k": 3}, 0.0)
    with open_checkpoint(smollm2_path) as checkpoint:
        backend = TorchBackend(checkpoint.spec, "float32")
        backend.load_weights(checkpoint.weights())
    driver = Driver(backend)
    prompt = [1, 4093, 198, 1195, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
    sequence = driver.add(prompt)
    logits = driver.greedy(sequence, STEPS)
    check(logits, sequence.tokens, len(prompt), model)


@pytest.mark.slow
def test_gemma3(gemma3_path):
    config = transformers.Gemma3TextConfig(
        vocab_size=262144,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        max_position_embeddings=32768,
        rms_norm_eps=1e-6,
        query_pre_attn_scalar=256,
        sliding_window=512,
        tie_word_embeddings=True,
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    )
    model = bundled_reference(gemma3_path, config, _HF_NAMES | _GEMMA_NAMES, {}, 1.0)
    with open_checkpoint(gemma3_path) as checkpoint:
        backend = TorchBackend(checkpoint.spec, "float32")
        backend.load_weights(checkpoint.weights())
    driver = Driver(backend)
    prompt = [2, 669, 5279, 529, 7001, 563]
    sequence = driver.add(prompt)
    logits = driver.greedy(sequence, STEPS)
    check(logits, sequence.tokens, len(prompt), model)
