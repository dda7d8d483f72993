"""tokenizer.model files, read without the sentencepiece package, against what that package says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tokenizers.vocab_util import sentencepiece_file
from vllm.exceptions import TokenizerError
from vllm.tokenizers import Tokenizer, open_tokenizer
from vllm.tokenizers.loading import convert, from_vocabulary
from vllm.tokenizers.sentencepiece_model import read_sentencepiece

DATA = Path(__file__).resolve().parent / "data"
EXPECTED = json.loads((DATA / "spm_expected.json").read_text(encoding="utf-8"))
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
PIECES = ["<unk>", "<s>", "</s>", "▁", "a", "b", "▁a", "ab", "▁ab"]
SCORES = [0.0, 0.0, 0.0, -10.0, -11.0, -12.0, -1.0, -2.0, -3.0]
TYPES = [UNKNOWN, CONTROL, CONTROL, NORMAL, NORMAL, NORMAL, NORMAL, NORMAL, NORMAL]


def opened(name: str) -> Tokenizer:
    return from_vocabulary(*convert(read_sentencepiece(DATA / f"spm_{name}.model")))


@pytest.fixture(scope="module")
def models() -> dict[str, Tokenizer]:
    return {name: opened(name) for name in EXPECTED}


@pytest.mark.parametrize(("name", "index"), [(name, k) for name in EXPECTED for k in range(len(EXPECTED[name]))])
def test_as_sentencepiece_says(name: str, index: int, models: dict[str, Tokenizer]) -> None:
    text, ids, decoded = EXPECTED[name][index]
    tokenizer = models[name]
    if name == "prefix" and "<" in text and any(f"<{word}>" in text for word in ("b", "tool")):
        # The library writes the prefix after every added token, as Llama's own files have it; SentencePiece only at
        # the beginning. The text stays the same.
        assert tokenizer.decode(tokenizer.encode(text)).replace(" ", "") == text.replace(" ", "")
    else:
        assert tokenizer.encode(text, add_special_tokens=False) == ids
    assert tokenizer.decode(ids) == decoded


@pytest.mark.parametrize("name", list(EXPECTED))
@given(text=st.text())
def test_round_trip(name: str, models: dict[str, Tokenizer], text: str) -> None:
    tokenizer = models[name]
    for word in ("▁", "<"):
        text = text.replace(word, "")
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_roles_and_special_tokens(models: dict[str, Tokenizer]) -> None:
    for tokenizer in models.values():
        assert (tokenizer.unk_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (
            0,
            1,
            2,
            3,
        )
        assert tokenizer.encode("a")[0] == 1
        assert 1 not in tokenizer.encode("a", add_special_tokens=False)
        end = tokenizer.token_to_id("<end>")
        assert end in tokenizer.special_ids
        assert tokenizer.token_to_id("<tool>") not in tokenizer.special_ids
        assert tokenizer.encode("x<end>")[-1] == end
        assert tokenizer.decode([end]) == ""
        assert tokenizer.decode([end], skip_special_tokens=False) == "<end>"


def write(path: Path, **options: object) -> Path:
    file = path / "tokenizer.model"
    file.write_bytes(sentencepiece_file(PIECES, SCORES, TYPES, **options))  # type: ignore[arg-type]
    return file


def test_scores_decide(tmp_path: Path) -> None:
    """▁a scores above ab, so "ab" with its prefix is ▁a + b, unless ▁ab can be made of them."""
    vocabulary = read_sentencepiece(write(tmp_path))
    tokenizer = from_vocabulary(*convert(vocabulary))
    pairs = [(vocabulary.tokens[left], vocabulary.tokens[right]) for left, right in vocabulary.merges.tolist()]
    assert pairs == [("▁", "a"), ("a", "b"), ("▁", "ab"), ("▁a", "b")]
    assert [tokenizer.id_to_token(i) for i in tokenizer.encode("ab aab", add_special_tokens=False)] == [
        "▁ab",
        "▁a",
        "ab",
    ]


def test_prefix_and_roles_are_read(tmp_path: Path) -> None:
    vocabulary = read_sentencepiece(write(tmp_path, add_dummy_prefix=False, roles=(0, -1, 2, -1)))
    assert vocabulary.add_space_prefix is False
    assert vocabulary.add_bos is False
    assert vocabulary.roles == {"unk": 0, "eos": 2}
    assert read_sentencepiece(write(tmp_path)).add_space_prefix is True


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model_type": 1}, "'unigram'; only 'bpe' is read here. Save the tokenizer as a tokenizer.json"),
        ({"model_type": 3}, "'word'"),
        ({"charsmap": b"\1\2"}, "normalizes characters"),
    ],
)
def test_what_is_not_read_names_the_remedy(tmp_path: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        read_sentencepiece(write(tmp_path, **options))


def test_a_piece_twice(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.model"
    file.write_bytes(sentencepiece_file(["a", "a"], [0, 0], [1, 1]))
    with pytest.raises(TokenizerError, match="twice"):
        read_sentencepiece(file)


@given(data=st.data())
def test_damaged_files(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A cut or changed file gives a vocabulary or a TokenizerError, and nothing else."""
    raw = bytearray(sentencepiece_file(PIECES, SCORES, TYPES))
    file = tmp_path_factory.mktemp("damaged") / "tokenizer.model"
    if data.draw(st.booleans()):
        del raw[data.draw(st.integers(0, len(raw) - 1)) :]
    else:
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    file.write_bytes(raw)
    try:
        vocabulary = read_sentencepiece(file)
    except TokenizerError as error:
        assert str(file) in str(error)
    else:
        assert len(vocabulary.tokens) == len(vocabulary.token_types)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="cannot be read"):
        read_sentencepiece(tmp_path / "none.model")


def test_a_folder_with_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes((DATA / "spm_prefix.model").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"add_bos_token": False, "add_eos_token": True, "chat_template": "{{ x }}", "pad_token": "</s>"})
    )
    for _ in range(2):  # converted, then from the cache
        tokenizer = open_tokenizer(tmp_path)
        ids = tokenizer.encode("The engine")
        assert ids[0] != 1
        assert ids[-1] == 2
        assert tokenizer.chat_template == "{{ x }}"
        assert tokenizer.pad_token_id == 2
        assert tokenizer.decode(ids) == "The engine"
