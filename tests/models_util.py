"""Tiny random checkpoints, as Hugging Face folders and as GGUF files, made in milliseconds and kept for the session.

`tiny_folder("llama")` and `tiny_gguf("gemma3")` give paths; keyword arguments override config.json. Both carry a
byte-level tokenizer of 260 tokens (the vocabulary is padded to 320) and a chat template. No torch, no transformers.
"""

from __future__ import annotations

import atexit
import functools
import json
import math
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Quantization
from safetensors.numpy import save_file

from vllm.model_executor.loader.dequantize import fp32_to_bf16
from vllm.model_executor.models.family import Config
from vllm.model_executor.models.registry import family_of

VOCAB_SIZE = 320
BOS, EOS, IM_START, IM_END = 256, 257, 258, 259
SPECIAL_TOKENS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"},
    "mistral": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "hidden_act": "silu",
        "head_dim": 32,
        "sliding_window": 40,
    },
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 32},
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 4,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "query_pre_attn_scalar": 24,
        "sliding_window": 24,
        "sliding_window_pattern": 2,
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "tie_word_embeddings": True,
    },
}
FAMILIES = tuple(_FAMILIES)

Weights = dict[str, npt.NDArray[np.float32]]


def tiny_config(family: str = "llama", **overrides: Any) -> dict[str, Any]:
    """A config.json in the older style (rope_theta, rope_scaling, sliding_window_pattern)."""
    return _COMMON | _FAMILIES[family] | overrides


def random_weights(config: Mapping[str, Any], seed: int = 0) -> Weights:
    """Every weight of the config by its Hugging Face name, fp32, large enough for logits that differ clearly."""
    family = family_of(config["architectures"], None, "test")
    spec = family.spec(Config(config))
    shapes = spec.parameters()
    rng = np.random.default_rng(seed)
    weights = {}
    for name, target in family.hf_names(spec).items():
        shape = shapes[target.canonical]
        if len(shape) == 2:
            deviation = 1.2 / math.sqrt(shape[1])
            if target.canonical == "embed" and spec.tie_word_embeddings:
                deviation /= 2  # so that a token's own embedding does not decide what follows it
            values = rng.standard_normal(shape, np.float32) * np.float32(deviation)
        elif target.canonical.endswith("norm"):
            values = rng.uniform(0.6, 1.4, shape).astype(np.float32) - np.float32(target.add_one)
        else:
            values = rng.standard_normal(shape, np.float32) * np.float32(0.3)
        weights[name] = values
    return weights


def write_folder(
    folder: Path,
    config: Mapping[str, Any],
    weights: Weights,
    dtype: str = "float32",
    shards: int = 1,
    generation_config: Mapping[str, Any] | None = None,
) -> Path:
    """A Hugging Face folder with safetensors in `dtype` ("float32", "float16", "bfloat16") and a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config)))
    if generation_config is not None:
        (folder / "generation_config.json").write_text(json.dumps(dict(generation_config)))
    names = list(weights)
    if shards == 1:
        _save(folder / "model.safetensors", weights, dtype)
    else:
        weight_map = {}
        for shard in range(shards):
            file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
            part = {name: weights[name] for name in names[shard::shards]}
            weight_map.update(dict.fromkeys(part, file))
            _save(folder / file, part, dtype)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    _write_tokenizer(folder)
    return folder


def _save(path: Path, weights: Weights, dtype: str) -> None:
    if dtype != "bfloat16":
        save_file({name: np.ascontiguousarray(value, dtype) for name, value in weights.items()}, path)
        return
    header, data, offset = {}, [], 0  # numpy has no bfloat16, so that the file is put together here
    for name, value in weights.items():
        bits = fp32_to_bf16(value).tobytes()
        header[name] = {"dtype": "BF16", "shape": list(value.shape), "data_offsets": [offset, offset + len(bits)]}
        data.append(bits)
        offset += len(bits)
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + b"".join(data))


def byte_alphabet() -> list[str]:
    """The character that a byte-level vocabulary writes for each byte, by byte (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {character: byte for byte, character in enumerate(byte_alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[0],
        "eos_token": SPECIAL_TOKENS[1],
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))


_ARCHITECTURES = {
    "LlamaForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "MistralForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "Qwen2ForCausalLM": gguf.MODEL_ARCH.QWEN2,
    "Qwen3ForCausalLM": gguf.MODEL_ARCH.QWEN3,
    "Gemma3ForCausalLM": gguf.MODEL_ARCH.GEMMA3,
}


def write_gguf(path: Path, config: Mapping[str, Any], weights: Weights, quantization: str = "F32") -> Path:
    """The same checkpoint as a GGUF file, written by the gguf package with its names: matrices in `quantization`
    (a type that package can make, and whose blocks divide the rows), the rest in fp32."""
    architecture = _ARCHITECTURES[config["architectures"][0]]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if config.get("sliding_window_pattern"):
        writer.add_uint32(f"{gguf.MODEL_ARCH_NAMES[architecture]}.attention.sliding_window_pattern", 2)
    _write_rope(writer, config)
    _write_vocabulary(writer)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    for name, value in weights.items():
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert gguf_name is not None, name
        if architecture == gguf.MODEL_ARCH.LLAMA and (".q_proj." in name or ".k_proj." in name):
            count = heads if ".q_proj." in name else kv_heads
            value = value.reshape(count, 2, head_dim // 2, -1).swapaxes(1, 2).reshape(value.shape)
        if architecture == gguf.MODEL_ARCH.GEMMA3 and name.endswith("norm.weight"):
            value = value + np.float32(1)
        if value.ndim == 2 and quantization != "F32":
            kind = Quantization[quantization]
            writer.add_tensor(gguf_name, gguf.quants.quantize(value, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name, np.ascontiguousarray(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_rope(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    scaling = config.get("rope_scaling")
    if not scaling:
        return
    kind = scaling["rope_type"]
    if kind == "llama3":  # the GGUF way: a divisor per frequency
        half = (config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]) // 2
        divisors = []
        for i in range(half):
            wavelength = 2 * math.pi * config["rope_theta"] ** (i / half)
            turns = scaling["original_max_position_embeddings"] / wavelength
            low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
            blend = min(max((turns - low) / (high - low), 0.0), 1.0)
            divisors.append(1 / ((1 - blend) / scaling["factor"] + blend))
        writer.add_tensor("rope_freqs.weight", np.array(divisors, np.float32))
        return
    writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
    writer.add_rope_scaling_factor(scaling["factor"])
    if "original_max_position_embeddings" in scaling:
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])


def _write_vocabulary(writer: gguf.GGUFWriter) -> None:
    tokens = [*byte_alphabet(), *SPECIAL_TOKENS]
    types = [gguf.TokenType.NORMAL] * 256 + [gguf.TokenType.CONTROL] * len(SPECIAL_TOKENS)
    while len(tokens) < VOCAB_SIZE:
        tokens.append(f"[PAD{len(tokens)}]")
        types.append(gguf.TokenType.UNUSED)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(["Ġ Ġ"])  # the package's reader does not take an empty list
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


@functools.cache
def _session_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="vllm-tiny-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


_made: dict[str, Path] = {}


def tiny_folder(family: str = "llama", dtype: str = "float32", shards: int = 1, **overrides: Any) -> Path:
    """A Hugging Face folder of `tiny_config(family, **overrides)` with `random_weights`; made once per session."""
    key = json.dumps(["folder", family, dtype, shards, overrides], sort_keys=True)
    if key not in _made:
        config = tiny_config(family, **overrides)
        folder = _session_folder() / f"{family}-{len(_made)}"
        _made[key] = write_folder(folder, config, random_weights(config), dtype, shards)
    return _made[key]


def tiny_gguf(family: str = "llama", quantization: str = "F32", **overrides: Any) -> Path:
    """The same as one GGUF file."""
    key = json.dumps(["gguf", family, quantization, overrides], sort_keys=True)
    if key not in _made:
        config = tiny_config(family, **overrides)
        path = _session_folder() / f"{family}-{len(_made)}.gguf"
        _made[key] = write_gguf(path, config, random_weights(config), quantization)
    return _made[key]
