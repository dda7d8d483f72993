"""What a front end needs of a checkpoint: its tokenizer, and a few facts. Cheap: weights are not read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.config import ModelConfig
from vllm.exceptions import ConfigError
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.processor import ModelInfo

if TYPE_CHECKING:
    from vllm.tokenizers import Tokenizer

_FROM_GENERATION_CONFIG = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def load_front_end(config: ModelConfig) -> tuple[ModelInfo, Tokenizer | None]:
    """Facts and tokenizer of the model that the configuration names; no tokenizer with skip_tokenizer_init."""
    from vllm.model_executor.loader import open_checkpoint

    tokenizer: Tokenizer | None = None
    if not config.skip_tokenizer_init:
        from vllm.tokenizers import load_tokenizer

        tokenizer = load_tokenizer(config)
    checkpoint = open_checkpoint(Path(config.path), config.load_format, config.hf_overrides)
    try:
        eos = list(checkpoint.eos_token_ids)
        generation = _generation_config(config.generation_config, checkpoint.generation_config)
        vocab_size = checkpoint.spec.vocab_size
    finally:
        checkpoint.close()
    if not eos and tokenizer is not None and tokenizer.eos_token_id is not None:
        eos = [tokenizer.eos_token_id]
    return ModelInfo(vocab_size, tuple(eos), generation), tokenizer


def _generation_config(source: str, of_checkpoint: dict[str, Any]) -> dict[str, Any]:
    if source == "auto":
        return dict(of_checkpoint)
    if source == "vllm":
        return {}
    path = Path(source).expanduser() / "generation_config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"generation_config={source!r}: {path} cannot be read: {error}", "generation_config"
        ) from None
    if not isinstance(values, dict):
        raise ConfigError(f"generation_config={source!r}: {path} does not hold an object", "generation_config")
    return values


def default_sampling_params(generation_config: dict[str, Any]) -> SamplingParams:
    """Default sampling parameters, with what the model's generation_config.json says about sampling."""
    given = {
        ours: generation_config[theirs]
        for theirs, ours in _FROM_GENERATION_CONFIG.items()
        if generation_config.get(theirs) is not None
    }
    return SamplingParams(**given)
