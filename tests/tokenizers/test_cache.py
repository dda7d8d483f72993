"""Converted vocabularies in the cache folder: found again, made anew when damaged, never believed blindly."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tokenizers.vocab_util import part_of_bpe, read_keys, write_gguf
from vllm.tokenizers import byte_table, cache, loading, open_tokenizer
from vllm.tokenizers.byte_table import ByteTable
from vllm.tokenizers.vocabulary import Vocabulary


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tokenizers"


@pytest.fixture
def gguf(tmp_path: Path, smollm2_path: Path) -> Path:
    return write_gguf(tmp_path / "small.gguf", part_of_bpe(read_keys(smollm2_path), 400))


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Vocabulary]:
    """What has been converted."""
    seen: list[Vocabulary] = []
    convert = loading.convert

    def counted(vocabulary: Vocabulary) -> tuple[Vocabulary, ByteTable | None]:
        seen.append(vocabulary)
        return convert(vocabulary)

    monkeypatch.setattr(loading, "convert", counted)
    return seen


def test_converted_once(folder: Path, gguf: Path, conversions: list[Vocabulary]) -> None:
    first, second = open_tokenizer(gguf), open_tokenizer(gguf)
    assert len(conversions) == 1
    assert len(list(folder.iterdir())) == 1
    text = "def f(x): return <|im_start|> x  é"
    assert first.encode(text) == second.encode(text)
    assert first.table == second.table
    for name in ("vocab_size", "special_ids", "special_tokens_map", "chat_template"):
        assert getattr(first, name) == getattr(second, name)


def test_found_by_content(folder: Path, gguf: Path, smollm2_path: Path, conversions: list[Vocabulary]) -> None:
    """A copy under another name, with another time, is the same vocabulary; a changed one is not, whatever its size."""
    open_tokenizer(gguf)
    copy = Path(shutil.copy(gguf, gguf.with_name("copy.gguf")))
    os.utime(copy, (0, 0))
    open_tokenizer(copy)
    assert len(conversions) == 1
    raw = gguf.read_bytes()
    assert raw.count(b"add_bos_token") == 1
    place = raw.index(b"add_bos_token") + len(b"add_bos_token") + 4
    stat = gguf.stat()
    gguf.write_bytes(raw[:place] + b"\1" + raw[place + 1 :])
    os.utime(gguf, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert gguf.stat().st_size == stat.st_size
    assert open_tokenizer(gguf).encode("x")[0] == 1
    assert open_tokenizer(copy).encode("x")[0] != 1
    assert len(conversions) == 2
    assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize("damage", ["empty", "cut", "changed", "longer", "other"])
def test_damaged_files_are_made_anew(damage: str, folder: Path, gguf: Path, conversions: list[Vocabulary]) -> None:
    ids = open_tokenizer(gguf).encode("Hello world")
    (file,) = folder.iterdir()
    good = file.read_bytes()
    bad = {
        "empty": b"",
        "cut": good[:-7],
        "changed": good[:500] + bytes([good[500] ^ 1]) + good[501:],
        "longer": good + b"x",
        "other": pickle.dumps({"tokens": []}),
    }[damage]
    file.write_bytes(bad)
    assert open_tokenizer(gguf).encode("Hello world") == ids
    assert len(conversions) == 2
    assert file.read_bytes() == good
    open_tokenizer(gguf)
    assert len(conversions) == 2


@given(data=st.data())
def test_any_damage_is_noticed(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    vocabulary = Vocabulary(
        "bpe", ["a", "b", "ab", "\n"], np.ones(4, np.uint8), np.array([[0, 1]], np.int32), roles={"bos": 0}
    )
    file = tmp_path_factory.mktemp("cache") / "x.vocab"
    cache.store(file, vocabulary, ByteTable(byte_table.byte_level_table(vocabulary.tokens)))
    assert cache.load(file) is not None
    raw = bytearray(file.read_bytes())
    if data.draw(st.booleans()):
        del raw[data.draw(st.integers(0, len(raw) - 1)) :]
    else:
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    file.write_bytes(raw)
    assert cache.load(file) is None


@given(
    tokens=st.lists(st.text(max_size=4), min_size=1, max_size=8, unique=True),
    data=st.lists(st.one_of(st.binary(max_size=1), st.text(max_size=3).map(str.encode)), min_size=8, max_size=8),
    template=st.one_of(st.none(), st.text(max_size=5), st.dictionaries(st.text(max_size=3), st.text(max_size=3))),
    strips=st.booleans(),
)
def test_what_is_stored_comes_back(
    tokens: list[str],
    data: list[bytes],
    template: str | dict[str, str] | None,
    strips: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    size = len(tokens)
    vocabulary = Vocabulary(
        "spm",
        tokens,
        np.arange(size, dtype=np.uint8),
        np.arange(6, dtype=np.int32).reshape(3, 2),
        roles={"eos": 1},
        add_bos=True,
        add_space_prefix=strips,
        chat_template=template,
    )
    table = ByteTable(data[:size], strips)
    file = tmp_path_factory.mktemp("cache") / "x.vocab"
    cache.store(file, vocabulary, table)
    found = cache.load(file)
    assert found is not None
    again, table_again = found
    assert table_again == table
    for name in Vocabulary.__dataclass_fields__:
        assert np.array_equal(getattr(again, name), getattr(vocabulary, name)), name


def test_what_cannot_be_separated_is_not_stored(tmp_path: Path) -> None:
    """Tokens that have every character, or the bytes, that would stand between them."""
    for tokens, table in [
        (["".join(chr(code) for code in range(0xE000, 0xF900))], None),
        (["a"], ByteTable([b"\xff\xfe\xff"])),
    ]:
        vocabulary = Vocabulary("spm", tokens, np.ones(1, np.uint8), np.zeros((0, 2), np.int32))
        cache.store(tmp_path / "x.vocab", vocabulary, table)
        assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written(
    tmp_path: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch, fresh_warnings: None, log: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(blocked))
    assert open_tokenizer(gguf).decode(open_tokenizer(gguf).encode("Hello")) == "Hello"
    assert log.text.count("cannot be kept") == 1


def test_an_interrupted_write_leaves_nothing(
    folder: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch, make_fail: Callable[[], None]
) -> None:
    make_fail()
    with pytest.raises(KeyboardInterrupt):
        open_tokenizer(gguf)
    assert not list(folder.iterdir())


@pytest.fixture
def make_fail(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def fail(*_args: object) -> None:
        raise KeyboardInterrupt

    return lambda: monkeypatch.setattr(cache.os, "replace", fail)
