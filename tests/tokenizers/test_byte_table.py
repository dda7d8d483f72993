"""Tables of bytes against the library's decoders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models

from vllm.tokenizers import Tokenizer, open_tokenizer
from vllm.tokenizers.byte_table import (
    ByteTable,
    byte_alphabet,
    byte_level_table,
    decode_prefix,
    join,
    reproduces,
    sentencepiece_table,
    table_of,
)

SP_DECODER = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Tokenizer:
    return open_tokenizer(smollm2_path)


def library_of(tokens: list[str], decoder: decoders.Decoder | None) -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer(models.BPE({token: k for k, token in enumerate(tokens)}, []))
    if decoder is not None:
        library.decoder = decoder
    return library


def test_the_alphabet_has_every_byte_once() -> None:
    alphabet = byte_alphabet()
    assert sorted(alphabet.values()) == list(range(256))
    assert (alphabet["Ġ"], alphabet["Ċ"], alphabet["!"], alphabet["ÿ"], alphabet["ł"]) == (32, 10, 33, 255, 160)


@given(st.lists(st.binary(max_size=6), max_size=8), st.text(max_size=5))
def test_byte_level_table(pieces: list[bytes], stranger: str) -> None:
    letters = {byte: letter for letter, byte in byte_alphabet().items()}
    tokens = ["".join(letters[byte] for byte in piece) for piece in pieces]
    stranger += " "  # outside the alphabet
    assert byte_level_table([*tokens, stranger, *tokens]) == [*pieces, stranger.encode(), *pieces]


def test_sentencepiece_table() -> None:
    tokens = ["▁the", "<0x0A>", "<0xfF>", "<0x0G>", "x<0x0A>", "▁▁", ""]
    assert sentencepiece_table(tokens) == [b" the", b"\n", b"\xff", b"<0x0G>", b"x<0x0A>", b"  ", b""]
    assert sentencepiece_table(tokens, byte_fallback=False)[1:3] == [b"<0x0A>", b"<0xfF>"]


@given(data=st.data())
def test_any_ids_as_the_library_decodes_them(data: st.DataObject, smollm2: Tokenizer) -> None:
    """Byte-level decoding is the same for broken characters, too."""
    assert smollm2.table is not None
    parts = [k for k, piece in enumerate(smollm2.table.data) if decode_prefix(piece)[1] or piece[:1] >= b"\x80"]
    ids = data.draw(st.lists(st.one_of(st.integers(0, smollm2.vocab_size - 1), st.sampled_from(parts))))
    assert join(smollm2.table, ids) == smollm2.library.decode(ids, skip_special_tokens=False)


@given(st.binary(max_size=12))
def test_prefixes(data: bytes) -> None:
    """Cut anywhere, the pieces decode to the whole; the rest is the beginning of one character."""
    for cut in range(len(data) + 1):
        text, rest = decode_prefix(data[:cut])
        assert len(rest) <= 3
        assert set(rest.decode("utf-8", "replace")) <= {"\ufffd"}
        more, end = decode_prefix(rest + data[cut:])
        assert text + more + end.decode("utf-8", "replace") == data.decode("utf-8", "replace")


@pytest.mark.parametrize(
    ("decoder", "strips"),
    [
        (decoders.ByteLevel(), False),
        (decoders.Sequence([decoders.ByteLevel()]), False),
        (decoders.Sequence(SP_DECODER), False),
        (decoders.Sequence([*SP_DECODER, decoders.Strip(" ", 1, 0)]), True),
        (decoders.Metaspace("▁", prepend_scheme="always"), True),
        (decoders.Metaspace("▁", prepend_scheme="never"), False),
    ],
)
def test_decoders_that_have_a_table(decoder: decoders.Decoder, strips: bool) -> None:
    spaced = "Ġa" if json.loads(decoder.__getstate__()).get("type") == "ByteLevel" else "▁a"
    library = library_of([spaced, "b", "c", "<0x0A>", "<s>"], decoder)
    table = table_of(library)
    assert table is not None
    assert table.strips_space == strips
    for ids in ([0], [0, 1], [1, 0], [1, 3, 2], [0, 0, 4, 0]):
        assert join(table, ids) == library.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        decoders.WordPiece(),
        decoders.BPEDecoder(),
        decoders.CTC(),
        decoders.Sequence([decoders.ByteLevel(), decoders.Strip("a", 1, 0)]),
        decoders.Sequence([decoders.Replace("_", " "), decoders.ByteFallback(), decoders.Fuse()]),
        decoders.Sequence([*SP_DECODER, decoders.Strip("x", 1, 0)]),
        decoders.Metaspace("_"),
    ],
)
def test_decoders_that_have_none(decoder: decoders.Decoder | None) -> None:
    assert table_of(library_of(["a", "b"], decoder)) is None


def test_ids_without_a_token_write_nothing() -> None:
    library = library_of(["a", "b"], decoders.ByteLevel())
    library.model = models.BPE({"a": 0, "b": 5}, [])
    table = table_of(library)
    assert table is not None
    assert table.data == [b"a", b"", b"", b"", b"", b"b"]
    assert join(table, [0, 3, 5, 77, -1]) == "ab"


def test_ids_too_far_apart_for_a_table() -> None:
    library = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1_000_000}, []))
    library.decoder = decoders.ByteLevel()
    assert table_of(library) is None


def test_added_tokens_are_in_the_table() -> None:
    library = library_of(["a", "b"], decoders.ByteLevel())
    library.add_tokens([AddedToken("<a b>", special=True, normalized=False)])
    table = table_of(library)
    assert table is not None
    assert table.data == [b"a", b"b", b"<a b>"]


def test_a_wrong_table_is_noticed(smollm2: Tokenizer) -> None:
    assert smollm2.table is not None
    assert reproduces(smollm2.table, smollm2.library)
    assert not reproduces(ByteTable([b"?"] * len(smollm2.table.data)), smollm2.library)
    assert not reproduces(ByteTable(smollm2.table.data, strips_space=True), smollm2.library)
    assert not reproduces(ByteTable([]), smollm2.library)
