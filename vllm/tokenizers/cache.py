"""Converted vocabularies, kept in the user's cache folder so that the next start need not convert again.

A file is named after a hash of the vocabulary's own bytes, so a changed checkpoint finds no file, and it is believed
only if its checksum fits. Deleting the folder is always safe. Layout:

    magic | crc32 of the rest | length of the header | header (JSON) | token text | token bytes | merges | token types
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from vllm import envs
from vllm.logger import init_logger, warn_once
from vllm.tokenizers.byte_table import ByteTable
from vllm.tokenizers.vocabulary import Vocabulary

logger = init_logger(__name__)

_MAGIC = b"vllm-vocabulary-1\n"
_FIXED = struct.Struct("<II")
_FIELDS = ("kind", "pre", "roles", "add_bos", "add_eos", "add_space_prefix", "chat_template")


def cache_path(fingerprint: Iterable[bytes]) -> Path:
    """Where the vocabulary with these bytes is kept."""
    digest = hashlib.sha256(_MAGIC)
    for part in fingerprint:
        digest.update(part)
    return Path(envs.VLLM_CACHE_ROOT) / "tokenizers" / f"{digest.hexdigest()[:40]}.vocab"


def store(path: Path, vocabulary: Vocabulary, table: ByteTable | None) -> None:
    """Write atomically. A folder that cannot be written costs the time of a conversion at each start and no more."""
    text_separator = _separator("".join(vocabulary.tokens), [chr(code) for code in range(0xF8FF, 0xE000, -1)])
    if text_separator is None:
        return
    byte_separator = b"\xff\xfe\xff"
    data = byte_separator.join(table.data) if table is not None else b""
    if table is not None and data.split(byte_separator) != table.data:
        return
    sections = [
        text_separator.join(vocabulary.tokens).encode("utf-8", "surrogatepass"),
        data,
        vocabulary.merges.astype("<i4").tobytes(),
        vocabulary.token_types.tobytes(),
    ]
    header = {
        **{name: getattr(vocabulary, name) for name in _FIELDS},
        "separators": [text_separator, byte_separator.decode("latin-1")],
        "table": None if table is None else {"strips_space": table.strips_space},
        "lengths": [len(section) for section in sections],
    }
    encoded = json.dumps(header).encode()
    body = b"".join([_FIXED.pack(0, len(encoded))[4:], encoded, *sections])
    import tempfile

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(_MAGIC + struct.pack("<I", zlib.crc32(body)) + body)
            os.replace(name, path)  # another process may have written the same: either file is whole
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        warn_once(logger, "converted tokenizers cannot be kept in %s (%s)", path.parent, error.strerror)


def load(path: Path) -> tuple[Vocabulary, ByteTable | None] | None:
    """What `store` wrote, or None if there is no such file or it is damaged."""
    try:
        raw = path.read_bytes()
    except OSError:
        return None
    try:
        return _parse(raw)
    except (ValueError, KeyError, TypeError, IndexError, struct.error) as error:
        logger.info("the cached tokenizer %s is damaged and is made anew (%s)", path, error)
        return None


def _parse(raw: bytes) -> tuple[Vocabulary, ByteTable | None]:
    start = len(_MAGIC)
    if raw[:start] != _MAGIC:
        raise ValueError("wrong magic number")
    checksum, header_length = _FIXED.unpack_from(raw, start)
    if zlib.crc32(memoryview(raw)[start + 4 :]) != checksum:
        raise ValueError("wrong checksum")
    start += _FIXED.size
    header: dict[str, Any] = json.loads(raw[start : start + header_length])
    start += header_length
    sections = []
    for length in header["lengths"]:
        sections.append(raw[start : start + length])
        start += length
    if start != len(raw):
        raise ValueError("wrong length")
    text, data, merges, types = sections
    text_separator, byte_separator = header["separators"]
    vocabulary = Vocabulary(
        tokens=text.decode("utf-8", "surrogatepass").split(text_separator),
        token_types=np.frombuffer(types, np.uint8),
        merges=np.frombuffer(merges, "<i4").reshape(-1, 2),
        **{name: header[name] for name in _FIELDS},
    )
    table = None
    if header["table"] is not None:
        table = ByteTable(data.split(byte_separator.encode("latin-1")), **header["table"])
        if len(table.data) != len(vocabulary.tokens):
            raise ValueError("a table of another length")
    return vocabulary, table


def _separator(text: str, candidates: list[str]) -> str | None:
    return next((candidate for candidate in candidates if candidate not in text), None)
