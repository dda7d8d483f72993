"""Reads a SentencePiece `tokenizer.model`, for folders that have no tokenizer.json.

The file is one protocol-buffer message (sentencepiece_model.proto, ModelProto); the few fields that matter are read
here: pieces (1: text, 2: score, 3: type), trainer_spec (2: model type, byte fallback, special ids) and normalizer_spec
(3: character map, dummy prefix).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from vllm.exceptions import TokenizerError
from vllm.tokenizers.vocabulary import TokenType, Vocabulary, merges_from_scores

_MODEL_TYPES = {1: "unigram", 2: "bpe", 3: "word", 4: "char"}
_BPE = 2
_ROLE_FIELDS = {40: ("unk", 0), 41: ("bos", 1), 42: ("eos", 2), 43: ("pad", -1)}
_REMEDY = (
    "Save the tokenizer as a tokenizer.json once: "
    "transformers.AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) where sentencepiece is installed."
)


def read_sentencepiece(path: Path) -> Vocabulary:
    """Raises TokenizerError with a remedy for what is not byte-pair encoding, or naming what is wrong with the file."""
    try:
        data = path.read_bytes()
        return _read(data)
    except OSError as error:
        raise TokenizerError(f"{path}: cannot be read ({error.strerror})") from error
    except (struct.error, IndexError, UnicodeDecodeError, ValueError) as error:
        raise TokenizerError(f"{path}: not a SentencePiece model, or truncated ({error})") from error
    except TokenizerError as error:
        raise TokenizerError(f"{path}: {error}") from None


def _read(data: bytes) -> Vocabulary:
    tokens: list[str] = []
    scores: list[float] = []
    types: list[int] = []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    for number, value in _fields(data):
        if number == 1:
            piece = dict(_fields(_message(value)))
            tokens.append(_message(piece.get(1, b"")).decode())
            scores.append(struct.unpack("<f", piece[2])[0] if 2 in piece else 0.0)
            types.append(int(piece.get(3, TokenType.NORMAL)))
        elif number == 2:
            trainer = dict(_fields(_message(value)))
        elif number == 3:
            normalizer = dict(_fields(_message(value)))
    if not tokens:
        raise ValueError("no pieces")
    model_type = int(trainer.get(3, 1))
    if model_type != _BPE:
        kind = _MODEL_TYPES.get(model_type, str(model_type))
        raise TokenizerError(f"a SentencePiece model of the type {kind!r}; only 'bpe' is read here. {_REMEDY}")
    if normalizer.get(2):
        raise TokenizerError(f"a SentencePiece model that normalizes characters; that is not read here. {_REMEDY}")
    if len(set(tokens)) != len(tokens):
        raise TokenizerError("a piece occurs twice")
    roles = {}
    for number, (role, default) in _ROLE_FIELDS.items():
        token_id = _signed(trainer.get(number, default))
        if 0 <= token_id < len(tokens):
            roles[role] = token_id
    kinds = np.array(types, np.uint8)
    return Vocabulary(
        kind="spm",
        tokens=tokens,
        token_types=kinds,
        merges=merges_from_scores(tokens, np.array(scores, np.float32), kinds),
        roles=roles,
        add_bos="bos" in roles,
        add_space_prefix=bool(normalizer.get(3, 1)),
    )


def _message(value: Any) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("a field of another type")
    return value


def _signed(value: int) -> int:
    """Negative numbers are written as 64-bit two's complement."""
    return value - (1 << 64) if value >= 1 << 63 else value


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(field number, int for a varint, bytes for everything else) of one message."""
    position, end = 0, len(data)
    while position < end:
        tag, position = _varint(data, position)
        wire = tag & 7
        if wire == 0:
            value, position = _varint(data, position)
            yield tag >> 3, value
            continue
        if wire == 2:
            length, position = _varint(data, position)
        elif wire in (1, 5):
            length = 8 if wire == 1 else 4
        else:
            raise ValueError(f"wire type {wire} at byte {position}")
        if position + length > end:
            raise ValueError(f"a field of {length} bytes at byte {position}")
        yield tag >> 3, data[position : position + length]
        position += length


def _varint(data: bytes, position: int) -> tuple[int, int]:
    result = shift = 0
    while True:
        byte = data[position]
        position += 1
        result |= (byte & 0x7F) << shift
        if byte < 0x80:
            return result, position
        shift += 7
        if shift > 63:
            raise ValueError(f"a number of more than 64 bits at byte {position}")
