"""Vocabularies for tests: parts of the bundled ones, and GGUF and SentencePiece files with a vocabulary alone."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from vllm.model_executor.loader.gguf_file import GGUFFile


def write_gguf(path: Path, keys: dict[str, Any], architecture: str = "llama") -> Path:
    """A GGUF file with these `tokenizer.*` keys and no tensors."""
    writer = gguf.GGUFWriter(path, architecture)
    for key in ("context_length", "embedding_length", "block_count", "feed_forward_length"):
        writer.add_uint32(f"{architecture}.{key}", 64)
    writer.add_uint32(f"{architecture}.attention.head_count", 2)
    for key, value in keys.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def read_keys(path: Path) -> dict[str, Any]:
    """The `tokenizer.*` keys of a GGUF file, arrays as lists."""
    file = GGUFFile(path)
    keys = {}
    for key in file.metadata:
        if key.startswith("tokenizer."):
            value = file.metadata[key]
            keys[key] = value.tolist() if isinstance(value, np.ndarray) else value
    file.close()
    return keys


def part_of_bpe(keys: dict[str, Any], size: int, **changes: Any) -> dict[str, Any]:
    """A byte-level vocabulary's first `size` tokens and the merges among them."""
    tokens = keys["tokenizer.ggml.tokens"][:size]
    known = set(tokens)
    merges = [
        line
        for line in keys["tokenizer.ggml.merges"]
        if known.issuperset(line.split(" ")) and line.replace(" ", "") in known
    ]
    part = {
        **keys,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": keys["tokenizer.ggml.token_type"][:size],
        "tokenizer.ggml.merges": merges,
    }
    return changed(part, changes)


def part_of_spm(keys: dict[str, Any], keep: Iterable[int], **changes: Any) -> dict[str, Any]:
    """Some tokens of a SentencePiece vocabulary, renumbered."""
    chosen = sorted(set(keep))
    part = {
        **keys,
        **{
            f"tokenizer.ggml.{name}": [keys[f"tokenizer.ggml.{name}"][i] for i in chosen]
            for name in ("tokens", "scores", "token_type")
        },
    }
    return changed(part, changes)


def changed(keys: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Changes by the last part of a key; None takes it away."""
    result = dict(keys)
    for name, value in changes.items():
        key = f"tokenizer.{name}" if name == "chat_template" else f"tokenizer.ggml.{name}"
        if value is None:
            result.pop(key, None)
        else:
            result[key] = value
    return result


# ---- SentencePiece's file format, written by hand


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def sentencepiece_file(
    tokens: Sequence[str],
    scores: Sequence[float],
    types: Sequence[int],
    *,
    model_type: int = 2,
    add_dummy_prefix: bool = True,
    charsmap: bytes = b"",
    roles: tuple[int, int, int, int] = (0, 1, 2, -1),
) -> bytes:
    """A ModelProto: pieces, trainer_spec (with `roles` of unk, bos, eos, pad) and normalizer_spec."""
    pieces = [
        _bytes(1, _bytes(1, token.encode()) + _varint(2 << 3 | 5) + struct.pack("<f", score) + _number(3, kind))
        for token, score, kind in zip(tokens, scores, types, strict=True)
    ]
    trainer = _number(3, model_type) + _number(4, len(tokens)) + _number(35, 1)
    trainer += b"".join(_number(field, value) for field, value in zip((40, 41, 42, 43), roles, strict=True))
    normalizer = _bytes(1, b"identity") + _bytes(2, charsmap) + _number(3, add_dummy_prefix) + _number(4, 0)
    return b"".join(pieces) + _bytes(2, trainer) + _bytes(3, normalizer)
