"""From a GGUF file's metadata to the config dict that a Hugging Face folder of the same model would have."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from vllm.exceptions import UnsupportedError
from vllm.model_executor.loader.dequantize import dequantize
from vllm.model_executor.loader.gguf_file import GGUFFile
from vllm.model_executor.models.family import Config, Family
from vllm.model_executor.models.registry import family_of_gguf

_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<|end_of_text|>", "<|endoftext|>", "</s>")


def gguf_config(file: GGUFFile) -> tuple[Family, dict[str, Any]]:
    """The family, and a config in the shape of config.json."""
    source = str(file.path)
    parts = file.metadata.get("split.count")
    if isinstance(parts, int) and parts > 1:
        raise UnsupportedError(
            f"{source}: one of several GGUF files of a model; merge them first (llama-gguf-split --merge)"
        )
    architecture = file.metadata.get("general.architecture")
    family = family_of_gguf(architecture, source)
    prefix = f"{architecture}."
    metadata = Config(
        {key[len(prefix) :]: _plain(file.metadata[key]) for key in file.metadata if key.startswith(prefix)}, source
    )
    if metadata.integer("expert_count", 0, minimum=0):
        raise UnsupportedError(f"{source}: mixture of experts is not supported")
    if "token_embd.weight" not in file.tensors:
        raise metadata.fail("token_embd.weight is missing")
    config: dict[str, Any] = {
        "architectures": [family.architectures[0]],
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": metadata.integer("embedding_length"),
        "num_hidden_layers": metadata.integer("block_count"),
        "intermediate_size": metadata.integer("feed_forward_length"),
        "num_attention_heads": metadata.integer("attention.head_count"),
        "num_key_value_heads": metadata.integer("attention.head_count_kv", metadata.integer("attention.head_count")),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": metadata.integer("context_length"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_output.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in file.tensors,
    }
    heads = config["num_attention_heads"]
    head_dim = metadata.integer("attention.key_length", config["hidden_size"] // heads)
    if metadata.integer("attention.value_length", head_dim) != head_dim:
        raise UnsupportedError(f"{source}: heads of different sizes for k and v are not supported")
    if metadata.integer("rope.dimension_count", head_dim) != head_dim:
        raise UnsupportedError(f"{source}: rope over a part of the head is not supported")
    config["head_dim"] = head_dim
    if metadata.get("attention.sliding_window"):
        config["sliding_window"] = metadata.integer("attention.sliding_window")
    config["rope_parameters"] = _rope(file, metadata)
    if family.gguf_config is not None:
        family.gguf_config(metadata, config)
    config["bos_token_id"] = _token_id(file, "bos")
    config["eos_token_id"] = _eos_token_ids(file)
    return family, config


def _plain(value: Any) -> Any:
    """An array of equal numbers (a value per layer) as that number; any other array as a list."""
    if isinstance(value, np.ndarray):
        return value[0].item() if value.size and (value == value[0]).all() else value.tolist()
    return value


def _rope(file: GGUFFile, metadata: Config) -> dict[str, Any]:
    kind = metadata.text("rope.scaling.type", "linear" if metadata.get("rope.scale_linear") else "none")
    rope: dict[str, Any] = {
        "rope_type": "default" if kind == "none" else kind,
        "rope_theta": metadata.number("rope.freq_base", 10_000.0),
    }
    if kind != "none":
        rope["factor"] = metadata.number("rope.scaling.factor", metadata.number("rope.scale_linear", 1.0))
    if metadata.get("rope.scaling.original_context_length"):
        rope["original_max_position_embeddings"] = metadata.integer("rope.scaling.original_context_length")
    for name in ("beta_fast", "beta_slow"):
        if metadata.get(f"rope.scaling.yarn_{name}") is not None:
            rope[name] = metadata.number(f"rope.scaling.yarn_{name}")
    if kind == "yarn":  # GGUF's factor stands on top of the usual one
        usual = 1.0 + 0.1 * math.log(max(rope["factor"], 1.0))
        rope["attention_factor"] = usual * metadata.number("rope.scaling.attn_factor", 1.0)
    divisors = file.tensors.get("rope_freqs.weight")
    if divisors is not None:
        rope["divisors"] = dequantize(file.data(divisors), divisors.type_name, divisors.shape).tolist()
    return rope


def _token_id(file: GGUFFile, name: str) -> int | None:
    value = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
    return value if isinstance(value, int) else None


def _eos_token_ids(file: GGUFFile) -> list[int]:
    """Ids that end a generation: those the file names, and the end-of-turn token that its chat template writes.

    Many files name only the end of a text; without the end of a turn a chat would run on into the next speaker."""
    ids = [token for name in ("eos", "eot", "eom") if (token := _token_id(file, name)) is not None]
    template = file.metadata.get("tokenizer.chat_template")
    if isinstance(template, str) and "tokenizer.ggml.tokens" in file.metadata:
        spellings = [text for text in _END_OF_TURN if text in template]
        if spellings:
            ids += file.metadata.find_strings("tokenizer.ggml.tokens", spellings)
    return list(dict.fromkeys(ids))
