"""Checkpoints on disk: which file a name means, and its weights by canonical name. Imports no torch."""

from vllm.model_executor.loader.checkpoint import LOAD_FORMATS, Checkpoint, open_checkpoint
from vllm.model_executor.loader.resolve import BUNDLED, DEFAULT_MODEL, resolve_model

__all__ = ["BUNDLED", "DEFAULT_MODEL", "LOAD_FORMATS", "Checkpoint", "open_checkpoint", "resolve_model"]
