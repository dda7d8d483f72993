"""GGUF vocabularies: converted by us, against transformers' reading of the same files where that is right."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tokenizers.corpus import CORPUS, DIGITS, SENTENCES
from tests.tokenizers.vocab_util import changed, part_of_bpe, part_of_spm, read_keys, write_gguf
from vllm.exceptions import TokenizerError
from vllm.model_executor.loader import resolve_model
from vllm.tokenizers import Tokenizer, open_tokenizer
from vllm.tokenizers.pretokenizers import PRETOKENIZERS

TEXTS = [*CORPUS, *SENTENCES]


@pytest.fixture(scope="module")
def smollm2_keys(smollm2_path: Path) -> dict[str, Any]:
    return read_keys(smollm2_path)


@pytest.fixture(scope="module")
def gemma_keys(gemma3_path: Path) -> dict[str, Any]:
    """The part of Gemma's vocabulary that a test has time for: its beginning, single characters, user-defined ones."""
    keys = read_keys(gemma3_path)
    return part_of_spm(keys, [*range(6000), *range(236_740, 239_500), *range(255_968, 256_001)])


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Path]:
    def write(keys: dict[str, Any], architecture: str = "llama", **changes: Any) -> Path:
        return write_gguf(tmp_path / "vocabulary.gguf", changed(keys, changes), architecture)

    return write


def by_transformers(path: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)


def tokens_of(tokenizer: Tokenizer, text: str) -> list[str | None]:
    return [tokenizer.id_to_token(i) for i in tokenizer.encode(text, add_special_tokens=False)]


def assert_same(ours: Tokenizer, theirs: Any, texts: list[str]) -> None:
    for text in texts:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special), text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids, False) == theirs.decode(ids, skip_special_tokens=False)


# ---- against transformers


@pytest.mark.parametrize("name", ["smollm2-135m-instruct", "gemma3-270m"])
def test_bundled_vocabularies(name: str) -> None:
    """Whole vocabularies against what transformers says of them (data/make_bundled.py).

    It does not look at tokenizer.ggml.pre: it takes numbers whole, which SmolLM2 does not."""
    expected = json.loads((Path(__file__).parent / "data" / "bundled_expected.json").read_text(encoding="utf-8"))
    tokenizer = opened(str(resolve_model(name)))
    compared = 0
    for text, ids in expected[name]:
        if name == "gemma3-270m" or not any(letter.isnumeric() for letter in text):
            assert tokenizer.encode(text) == ids, text
            compared += 1
    assert compared > 40


def test_part_of_smollm2(smollm2_keys: dict[str, Any], make: Callable[..., Path]) -> None:
    path = make(part_of_bpe(smollm2_keys, 6000))
    ours, theirs = open_tokenizer(path), by_transformers(path)
    assert_same(ours, theirs, [text for text in TEXTS if not any(letter.isnumeric() for letter in text)])
    assert ours.special_tokens_map == dict(theirs.special_tokens_map)
    assert ours.chat_template == theirs.chat_template
    assert ours.vocab_size == len(theirs)


def test_numbers_are_split_into_digits(smollm2_path: Path) -> None:
    tokenizer = opened(str(smollm2_path))
    for text in DIGITS:
        assert all(sum(letter.isdigit() for letter in token or "") <= 1 for token in tokens_of(tokenizer, text))
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_qwen2(smollm2_keys: dict[str, Any], make: Callable[..., Path]) -> None:
    path = make(part_of_bpe(smollm2_keys, 6000, pre="qwen2"), "qwen2")
    ours, theirs = open_tokenizer(path), by_transformers(path)
    assert_same(ours, theirs, [text for text in TEXTS + DIGITS if "e\u0301" not in text])
    assert ours.encode("e\u0301") == ours.encode("é") == theirs.encode("é")  # the model's own file composes; theirs not


def test_llama_bpe(smollm2_keys: dict[str, Any], make: Callable[..., Path]) -> None:
    path = make(part_of_bpe(smollm2_keys, 6000, pre="llama-bpe", add_bos_token=True))
    ours, theirs = open_tokenizer(path), by_transformers(path)
    assert_same(ours, theirs, TEXTS + DIGITS)
    assert ours.encode("x")[0] == ours.bos_token_id


def test_gemma(gemma_keys: dict[str, Any], make: Callable[..., Path]) -> None:
    path = make(gemma_keys, "gemma3")
    assert_same(open_tokenizer(path), by_transformers(path), TEXTS + DIGITS)


def test_gemma_user_defined_symbols_come_first(gemma3_path: Path) -> None:
    """Runs of spaces and line breaks are single tokens, whatever words follow them."""
    tokenizer = opened(str(gemma3_path))
    assert tokens_of(tokenizer, "  the\n\n\nx   y") == ["▁▁", "the", "\n\n\n", "x", "▁▁▁", "y"]
    assert tokens_of(tokenizer, "<table><tr>a b") == ["<table>", "<tr>", "a", "▁b"]
    assert tokens_of(tokenizer, "\U0001fffe") == ["<0xF0>", "<0x9F>", "<0xBF>", "<0xBE>"]
    assert tokenizer.encode("") == [2]


def test_llama_sentencepiece_adds_its_prefix(gemma_keys: dict[str, Any], make: Callable[..., Path]) -> None:
    """transformers adds none before a text that begins with a space, and joins no user-defined symbols with it."""
    path = make(gemma_keys, add_space_prefix=True)
    ours, theirs = open_tokenizer(path), by_transformers(path)
    plain = [text for text in TEXTS if text and not text.startswith((" ", "▁", "\t", "\n", "\r")) and "  " not in text]
    assert_same(ours, theirs, [text for text in plain if "<" not in text and "\t" not in text and "\n" not in text])
    assert tokens_of(ours, "x") == ["▁x"]
    assert tokens_of(ours, " x")[:2] == ["▁", "▁x"]
    for text in TEXTS:
        if "▁" not in text and "<" not in text and not any(mark in text for mark in "\t\n"):
            assert ours.decode(ours.encode(text)) == text
    assert tokens_of(open_tokenizer(make(gemma_keys, add_space_prefix=None)), "x") == ["▁x"]  # the format's default


# ---- round trips


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
@given(data=st.data())
def test_round_trip(name: str, data: st.DataObject, smollm2_path: Path, gemma3_path: Path) -> None:
    tokenizer = opened(str({"smollm2": smollm2_path, "gemma3": gemma3_path}[name]))
    # SmolLM2's vocabulary has no tokens for a few bytes, ▁ is SentencePiece's space, and tokens may be written out.
    letters = st.characters(exclude_categories=["Cs"], exclude_characters="▁<", max_codepoint=0x2FFFF)
    text = "".join(letter for letter in data.draw(st.text(letters)) if name == "gemma3" or writable(tokenizer, letter))
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert b"".join(tokenizer.token_bytes(i) or b"" for i in ids).decode() == text
    assert tokenizer.library.decode(ids) == text


_opened: dict[str, Tokenizer] = {}


def opened(path: str) -> Tokenizer:
    if path not in _opened:
        _opened[path] = open_tokenizer(path)
    return _opened[path]


def writable(tokenizer: Tokenizer, letter: str) -> bool:
    assert tokenizer.table is not None
    single = {data for data in tokenizer.table.data[:1000] if len(data) == 1}
    return all(bytes([byte]) in single for byte in letter.encode())


# ---- special tokens and flags


def test_special_tokens_in_a_text(smollm2_path: Path) -> None:
    tokenizer = opened(str(smollm2_path))
    end = tokenizer.token_to_id("<|im_end|>")
    a, b, space = map(tokenizer.token_to_id, ("a", "b", "Ġ"))
    assert tokenizer.encode("a<|im_end|>b <|im_end|>") == [a, end, b, space, end]
    assert end in tokenizer.special_ids
    assert tokenizer.decode([a, end, b]) == "ab"
    assert tokenizer.decode([a, end, b], skip_special_tokens=False) == "a<|im_end|>b"


@pytest.mark.parametrize("bos", [True, False, None])
@pytest.mark.parametrize("eos", [True, False, None])
def test_bos_and_eos_as_the_file_says(
    bos: bool | None, eos: bool | None, smollm2_keys: dict[str, Any], make: Callable[..., Path]
) -> None:
    small = part_of_bpe(smollm2_keys, 500, add_bos_token=bos, add_eos_token=eos)
    ids = open_tokenizer(make(small)).encode("x")
    assert ids == ([1] if bos else []) + [104] + ([2] if eos else [])


def test_user_defined_tokens_of_a_byte_level_vocabulary(
    smollm2_keys: dict[str, Any], make: Callable[..., Path]
) -> None:
    small = part_of_bpe(smollm2_keys, 500)
    tokens = [*small["tokenizer.ggml.tokens"], "<tool call>", "     ", "｜世界｜"]
    types = [*small["tokenizer.ggml.token_type"], 4, 4, 4]
    tokenizer = open_tokenizer(make(small, tokens=tokens, token_type=types))
    text = "x<tool call>y      z｜世界｜"
    ids = tokenizer.encode(text)
    assert {500, 501, 502} <= set(ids)
    assert tokenizer.decode(ids) == text
    assert not {500, 501, 502} & tokenizer.special_ids


def test_an_ordinary_word_as_unknown_token_stays_ordinary(
    smollm2_keys: dict[str, Any], make: Callable[..., Path]
) -> None:
    tokenizer = open_tokenizer(make(part_of_bpe(smollm2_keys, 500, unknown_token_id=104)))
    assert tokenizer.unk_token_id is None
    assert tokenizer.decode([104]) == "x"


def test_several_chat_templates(smollm2_keys: dict[str, Any], make: Callable[..., Path]) -> None:
    small = part_of_bpe(smollm2_keys, 500)
    assert open_tokenizer(make(small)).chat_template == smollm2_keys["tokenizer.chat_template"]
    named = {**small, "tokenizer.chat_template.tool_use": "T", "tokenizer.chat_templates": ["tool_use"]}
    assert open_tokenizer(make(named)).chat_template == {
        "default": smollm2_keys["tokenizer.chat_template"],
        "tool_use": "T",
    }
    assert open_tokenizer(make(small, chat_template=None)).chat_template is None


# ---- pre-tokenizers


_WORDS = "I|'ll| take| |1|2|3|4|5| HTTPServer|'S| x|=foo|.bar|!\n\n| | z|  "
_GROUPED = _WORDS.replace("1|2|3|4|5", "123|45")
SPLITS = {
    "gpt-2": "I|'ll| take| 12345| HTTPServer|'|S| x|=|foo|.|bar|!|\n\n | z|  ",
    "smollm": "I|'ll| take| |1|2|3|4|5| HTTPServer|'|S| x|=|foo|.|bar|!|\n\n | z|  ",
    "llama-bpe": _GROUPED,
    "qwen2": _WORDS,
    "tekken": _WORDS,
    "gpt-4o": _GROUPED.replace("I|'ll", "I'll").replace("HTTPServer|'S", "HTTPServer'S"),
    "deepseek-v3": _GROUPED,
}


@pytest.mark.parametrize("name", SPLITS)
def test_splits(name: str) -> None:
    text = "I'll take 12345 HTTPServer'S x=foo.bar!\n\n  z  "
    parts = [text[start:end] for _, (start, end) in PRETOKENIZERS[name].build().pre_tokenize_str(text)]
    assert "|".join(parts) == SPLITS[name]


@pytest.mark.parametrize("name", list(PRETOKENIZERS))
@given(text=st.text(max_size=30))
def test_splits_lose_nothing(name: str, text: str) -> None:
    parts = PRETOKENIZERS[name].build().pre_tokenize_str(text)
    spans = [span for _, span in parts]
    assert "".join(text[start:end] for start, end in spans) == text


@pytest.mark.parametrize("name", list(PRETOKENIZERS))
def test_every_name_opens(name: str, smollm2_keys: dict[str, Any], make: Callable[..., Path]) -> None:
    small = part_of_bpe(smollm2_keys, 500, pre=name or None)
    tokenizer = open_tokenizer(make(small))
    assert tokenizer.decode(tokenizer.encode("Hello world 123", add_special_tokens=False)) == "Hello world 123"


def test_words_that_are_tokens_are_taken_whole(smollm2_keys: dict[str, Any], make: Callable[..., Path]) -> None:
    """Llama 3's vocabulary has words that no merges lead to."""
    small = part_of_bpe(smollm2_keys, 500)
    tokens = [*small["tokenizer.ggml.tokens"], "Ġqzx"]
    changes: dict[str, Any] = {"tokens": tokens, "token_type": [*small["tokenizer.ggml.token_type"], 1]}
    assert tokens_of(open_tokenizer(make(small, pre="llama-bpe", **changes)), " qzx") == ["Ġqzx"]
    assert tokens_of(open_tokenizer(make(small, pre="qwen2", **changes)), " qzx") != ["Ġqzx"]


# ---- what is wrong with a file


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre": "no-such-splitter"}, "unknown pre-tokenizer 'no-such-splitter'.*known are .*llama-bpe"),
        ({"model": "bert"}, "of the kind 'bert'"),
        ({"model": None}, "no key tokenizer.ggml.model"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokens": "x"}, "tokenizer.ggml.tokens is not a list of strings"),
        ({"merges": None}, "tokenizer.ggml.merges is missing"),
        ({"merges": ["a qqq"]}, "joins 'qqq', which is not a token"),
        ({"merges": ["ab"]}, "joins 'ab'|joins ''"),
        ({"token_type": [1, 2]}, "2 entries for 500 tokens"),
        ({"token_type": "x"}, "not an array of numbers"),
        ({"eos_token_id": 500}, "eos_token_id is 500; the vocabulary has 500 tokens"),
        ({"eos_token_id": True}, "eos_token_id is True"),
        ({"add_bos_token": "yes"}, "add_bos_token is 'yes'"),
        ({"add_bos_token": True, "bos_token_id": None}, "asks for a bos token"),
        ({"chat_template": 3}, "tokenizer.chat_template is not a string"),
    ],
)
def test_wrong_byte_level_vocabularies(
    changes: dict[str, Any], message: str, smollm2_keys: dict[str, Any], make: Callable[..., Path]
) -> None:
    path = make(part_of_bpe(smollm2_keys, 500), **changes)
    with pytest.raises(TokenizerError, match=message) as caught:
        open_tokenizer(path)
    assert str(path) in str(caught.value)


def test_a_token_twice(smollm2_keys: dict[str, Any], make: Callable[..., Path]) -> None:
    small = part_of_bpe(smollm2_keys, 500)
    tokens = [*small["tokenizer.ggml.tokens"][:-1], "x"]
    with pytest.raises(TokenizerError, match="has 'x' twice"):
        open_tokenizer(make(small, tokens=tokens))


def test_a_merge_whose_result_is_no_token(smollm2_keys: dict[str, Any], make: Callable[..., Path]) -> None:
    with pytest.raises(TokenizerError, match="contradicts itself"):
        open_tokenizer(make(part_of_bpe(smollm2_keys, 500), merges=["q q"]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": None}, "tokenizer.ggml.scores is missing"),
        ({"scores": [1.0]}, "1 entries for"),
    ],
)
def test_wrong_sentencepiece_vocabularies(
    changes: dict[str, Any], message: str, gemma_keys: dict[str, Any], make: Callable[..., Path]
) -> None:
    with pytest.raises(TokenizerError, match=message):
        open_tokenizer(make(gemma_keys, **changes))


def test_a_token_that_is_too_long(make: Callable[..., Path]) -> None:
    keys = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["a", "a" * 5000],
        "tokenizer.ggml.scores": [0.0, 1.0],
        "tokenizer.ggml.token_type": [1, 1],
    }
    with pytest.raises(TokenizerError, match="token 1 has 5000 characters"):
        open_tokenizer(make(keys))


def test_scores_that_are_no_numbers_do_no_harm(make: Callable[..., Path]) -> None:
    keys = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["a", "b", "ab", "▁"],
        "tokenizer.ggml.scores": [float("nan")] * 4,
        "tokenizer.ggml.token_type": [1] * 4,
        "tokenizer.ggml.add_space_prefix": False,
    }
    assert open_tokenizer(make(keys)).encode("ab") == [2]


def test_ids_of_roles_beyond_the_type(smollm2_keys: dict[str, Any], make: Callable[..., Path]) -> None:
    """-1 and its unsigned form mean none."""
    tokenizer = open_tokenizer(make(part_of_bpe(smollm2_keys, 500, padding_token_id=0xFFFFFFFF)))
    assert tokenizer.pad_token_id is None
    assert np.all(np.array(tokenizer.encode("abc")) >= 0)
