"""What each token contributes to the output, in bytes: text is the joined bytes of its tokens, read as UTF-8.

That holds for byte-level BPE and for SentencePiece vocabularies, which between them are nearly all that are in use.
Bytes that are not UTF-8 become U+FFFD, one for each maximal part of a character (as Unicode recommends, Python decodes
and the `tokenizers` library decodes byte-level vocabularies; its SentencePiece decoder writes one for each byte of a
run of byte tokens that is broken anywhere).
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import tokenizers

SPACE = "▁"
"""How SentencePiece writes a space."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True)
class ByteTable:
    """`data[id]` is what token `id` writes; b"" for ids that no token has."""

    data: list[bytes]
    strips_space: bool = False
    """One space at the very beginning of a text is not written (it is the tokenizer's own prefix)."""


@lru_cache(maxsize=1)
def byte_alphabet() -> dict[str, int]:
    """GPT-2's one character per byte: printable Latin-1 stands for itself, U+0100 and up for the 68 other bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + k): byte for k, byte in enumerate(others)}


def byte_level_table(tokens: Sequence[str]) -> list[bytes]:
    """Tokens in the byte alphabet, as bytes. A token with any other character (an added token) stands for itself."""
    lookup = np.full(0x200, -1, np.int16)
    for character, byte in byte_alphabet().items():
        lookup[ord(character)] = byte
    points = np.frombuffer("".join(tokens).encode("utf-32-le", "surrogatepass"), np.uint32)
    values = lookup[np.minimum(points, len(lookup) - 1)]
    lengths = np.fromiter(map(len, tokens), np.int64, len(tokens))
    ends = np.cumsum(lengths)
    strangers = np.unique(np.searchsorted(ends, np.flatnonzero(values < 0), side="right"))
    blob = values.astype(np.uint8).tobytes()
    table = _split(blob, ends)
    for index in strangers.tolist():
        table[index] = tokens[index].encode("utf-8", "surrogatepass")
    return table


def _split(blob: bytes, ends: npt.NDArray[np.int64]) -> list[bytes]:
    bounds = [0, *ends.tolist()]
    return [blob[start:end] for start, end in pairwise(bounds)]


def sentencepiece_table(tokens: Iterable[str], byte_fallback: bool = True) -> list[bytes]:
    """Tokens with ▁ for a space and, with `byte_fallback`, <0xNN> for a byte."""
    table = [token.replace(SPACE, " ").encode("utf-8", "surrogatepass") for token in tokens]
    if byte_fallback:
        for index, data in enumerate(table):
            if len(data) == 6 and data.startswith(b"<0x"):
                match = _BYTE_TOKEN.fullmatch(data.decode("utf-8", "replace"))
                if match:
                    table[index] = bytes([int(match[1], 16)])
    return table


def table_of(library: tokenizers.Tokenizer) -> ByteTable | None:
    """The table that reproduces the library's decoder, or None where no table does (WordPiece, and kinds not known
    here)."""
    if library.decoder is None:
        return None
    style = _decoder_style(json.loads(library.decoder.__getstate__()))
    if style is None:
        return None
    vocabulary = library.get_vocab(with_added_tokens=True)
    size = max(vocabulary.values(), default=-1) + 1
    if size > 8 * len(vocabulary) + 1024:
        return None  # ids scattered too widely for a table
    tokens = [""] * size
    for token, index in vocabulary.items():
        tokens[index] = token
    kind, strips = style
    data = byte_level_table(tokens) if kind == "bytes" else sentencepiece_table(tokens, kind == "pieces+bytes")
    table = ByteTable(data, strips)
    return table if reproduces(table, library) else None


def _decoder_style(state: dict[str, Any]) -> tuple[str, bool] | None:
    """("bytes" | "pieces" | "pieces+bytes", strips a leading space), by the decoder's own description."""
    steps = state["decoders"] if state.get("type") == "Sequence" else [state]
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return "bytes", False
    if kinds == ["Metaspace"] and steps[0].get("replacement") == SPACE:
        return "pieces", steps[0].get("prepend_scheme", "always") != "never"
    if kinds[:2] == ["Replace", "ByteFallback"] and kinds[2:] in (["Fuse"], ["Fuse", "Strip"]):
        if steps[0].get("pattern") != {"String": SPACE} or steps[0].get("content") != " ":
            return None
        if len(steps) == 3:
            return "pieces+bytes", False
        strip = steps[3]
        if (strip.get("content"), strip.get("start"), strip.get("stop")) == (" ", 1, 0):
            return "pieces+bytes", True
    return None


def join(table: ByteTable, ids: Iterable[int]) -> str:
    """The text of `ids` from the beginning of a text."""
    size = len(table.data)
    text = b"".join([table.data[i] for i in ids if 0 <= i < size]).decode("utf-8", "replace")
    return text[1:] if table.strips_space and text.startswith(" ") else text


def reproduces(table: ByteTable, library: tokenizers.Tokenizer) -> bool:
    """Whether joining bytes gives the library's text, on a fixed sample of token sequences.

    The sample has no broken characters: there the library's decoders differ among themselves.
    """
    from random import Random

    whole = [index for index, data in enumerate(table.data) if _is_text(data)]
    if not whole:
        return False
    random = Random(0)
    sequences = [random.choices(whole, k=24) for _ in range(64)]
    sequences += [library.encode(text, add_special_tokens=False).ids for text in _SAMPLE_TEXTS]
    return all(join(table, ids) == library.decode(ids, skip_special_tokens=False) for ids in sequences)


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


_SAMPLE_TEXTS = (
    "Hello, world! It's 12:30; don't  worry.\n\n\tdef f(x): return {x: [1, 2]}\r\n",
    " naïve café — “quotes” … 日本語 中文 한국어 العربية हिन्दी 👍🏽👨‍👩‍👧",
    "\x00\u200b e\u0301   ",
)


def decode_prefix(data: bytes) -> tuple[str, bytes]:
    """(text, rest): the rest is the beginning of a character that the bytes do not complete, at most 3 bytes."""
    text, used = codecs.utf_8_decode(data, "replace", False)
    return text, data[used:]
