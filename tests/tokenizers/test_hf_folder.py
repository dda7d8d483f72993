"""Hugging Face folders against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from tests.tokenizers.corpus import CORPUS, DIGITS
from tests.tokenizers.vocab_util import part_of_bpe, read_keys
from vllm.exceptions import ModelNotFoundError, TokenizerError
from vllm.tokenizers import open_tokenizer

CONFIG = {
    "bos_token": "<|im_start|>",
    "eos_token": {"__type": "AddedToken", "content": "<|im_end|>", "special": True},
    "pad_token": None,
    "model_max_length": 64,
    "tokenizer_class": "PreTrainedTokenizerFast",
}


@pytest.fixture(scope="module")
def library(smollm2_path: Path) -> tokenizers.Tokenizer:
    """A small byte-level tokenizer with everything that files have: truncation and padding that must not be applied,
    a template around prompts, added tokens with all flags."""
    keys = part_of_bpe(read_keys(smollm2_path), 3000)
    tokens = keys["tokenizer.ggml.tokens"]
    merges = [tuple(line.split(" ")) for line in keys["tokenizer.ggml.merges"]]
    library = tokenizers.Tokenizer(models.BPE({token: k for k, token in enumerate(tokens)}, merges))
    library.normalizer = normalizers.NFC()
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    library.add_tokens([AddedToken("<word>", single_word=True), AddedToken("<strip>", lstrip=True, rstrip=True)])
    library.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", pair="<|im_start|> $A $B", special_tokens=[("<|im_start|>", 1)]
    )
    library.enable_truncation(4)
    library.enable_padding(length=64)
    return library


@pytest.fixture
def folder(tmp_path: Path, library: tokenizers.Tokenizer) -> Path:
    library.save(str(tmp_path / "tokenizer.json"))
    write_config(tmp_path)
    return tmp_path


def write_config(folder: Path, **changes: Any) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({**CONFIG, **changes}))


def test_as_transformers_reads_it(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(str(folder))
    ours = open_tokenizer(folder)
    extra = ["a <word> b", "a<word>b", "a <strip> b", "<|im_end|> x <|endoftext|>", "x" * 100]
    for text in CORPUS + DIGITS + extra:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special), text
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.vocab_size == len(theirs)
    assert ours.special_tokens_map == dict(theirs.special_tokens_map)
    assert (ours.bos_token_id, ours.eos_token_id, ours.pad_token_id) == (1, 2, None)
    assert ours.special_ids == set(theirs.all_special_ids) | {0}
    assert ours.table is not None


def test_by_file(folder: Path) -> None:
    assert open_tokenizer(folder / "tokenizer.json").encode("Hi") == open_tokenizer(folder).encode("Hi")


def test_without_a_config(folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()
    tokenizer = open_tokenizer(folder)
    assert tokenizer.special_tokens_map == {}
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.chat_template is None
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    assert open_tokenizer(folder).eos_token_id == 2


def test_added_tokens_of_the_config(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    size = open_tokenizer(folder).vocab_size
    added = {
        "2": {"content": "<|im_end|>", "special": True, "normalized": False},
        str(size): {"content": "<new>", "special": True, "normalized": False},
        str(size + 1): {"content": "<newer>", "special": False, "normalized": False, "lstrip": True},
    }
    write_config(folder, added_tokens_decoder=added)
    ours, theirs = open_tokenizer(folder), transformers.AutoTokenizer.from_pretrained(str(folder))
    for text in ("a <new> b <newer> c", "<newer><new>"):
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.vocab_size == size + 2
    assert size in ours.special_ids
    assert size + 1 not in ours.special_ids


@pytest.mark.parametrize(
    "added",
    [{"9999": {"content": "<far>"}}, {"2": {"content": "<other>"}}, {"2": "<|im_end|>"}],
)
def test_added_tokens_that_contradict(folder: Path, added: dict[str, Any]) -> None:
    write_config(folder, added_tokens_decoder=added)
    with pytest.raises(TokenizerError, match="tokenizer_config.json: added token"):
        open_tokenizer(folder)


def test_a_role_on_an_ordinary_token_makes_it_special(folder: Path) -> None:
    write_config(folder, eos_token="Ġthe", unk_token="<not there>")
    tokenizer = open_tokenizer(folder)
    assert tokenizer.eos_token_id == tokenizer.token_to_id("Ġthe")
    assert tokenizer.eos_token_id in tokenizer.special_ids
    assert tokenizer.unk_token_id is None


def test_where_chat_templates_come_from(folder: Path) -> None:
    write_config(folder, chat_template="C")
    assert open_tokenizer(folder).chat_template == "C"
    several = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    write_config(folder, chat_template=several)
    assert open_tokenizer(folder).chat_template == {"default": "D", "tool_use": "T"}
    write_config(folder, chat_template=several[:1])
    assert open_tokenizer(folder).chat_template == "D"
    (folder / "chat_template.jinja").write_text("Jé", encoding="utf-8")
    assert open_tokenizer(folder).chat_template == "Jé"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("R")
    assert open_tokenizer(folder).chat_template == {"default": "Jé", "rag": "R"}


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("tokenizer.json", "{", "tokenizer.json"),
        ("tokenizer.json", '{"version": "1.0"}', "tokenizer.json"),
        ("tokenizer_config.json", "{", "tokenizer_config.json"),
        ("tokenizer_config.json", "[]", "not a JSON object"),
        ("tokenizer_config.json", '{"bos_token": 3}', "bos_token is 3"),
        ("tokenizer_config.json", '{"chat_template": 3}', "neither a string nor a list"),
        ("tokenizer_config.json", '{"chat_template": ["x"]}', "a list without names"),
    ],
)
def test_damaged_files(folder: Path, file: str, text: str, message: str) -> None:
    (folder / file).write_text(text)
    with pytest.raises(TokenizerError, match=message):
        open_tokenizer(folder)


def test_invalid_utf8(folder: Path) -> None:
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(TokenizerError, match=r"chat_template\.jinja"):
        open_tokenizer(folder)


def test_folders_without_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(TokenizerError, match="no tokenizer.json and no tokenizer.model .found: no tokenizer file"):
        open_tokenizer(tmp_path)
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"found: vocab\.json.*save_pretrained"):
        open_tokenizer(tmp_path)
    with pytest.raises(ModelNotFoundError):
        open_tokenizer(tmp_path / "nothing")


def test_texts_are_bounded_only_where_that_is_sound(folder: Path, library: tokenizers.Tokenizer) -> None:
    """An added token that takes the spaces around it stands for any number of bytes."""
    tokenizer = open_tokenizer(folder)
    assert tokenizer.encode(" " * 5000 + "<strip>" + " " * 5000, max_tokens=3)[1:] == [3001]
    plain = json.loads((folder / "tokenizer.json").read_text())
    plain["added_tokens"] = [token for token in plain["added_tokens"] if token["content"] != "<strip>"]
    (folder / "tokenizer.json").write_text(json.dumps(plain))
    with pytest.raises(ValueError, match="at most 3 fit"):
        open_tokenizer(folder).encode(" " * 10_000, max_tokens=3)
