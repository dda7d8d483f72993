"""The tokenizer's own interface, and how it is found and loaded."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from vllm.config import ModelConfig
from vllm.exceptions import BadRequestError, ModelNotFoundError, UnsupportedError
from vllm.tokenizers import Tokenizer, get_tokenizer, load_tokenizer, open_tokenizer
from vllm.tokenizers.hf import wrap


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Tokenizer:
    return open_tokenizer(smollm2_path)


@pytest.fixture(scope="module")
def gemma3(gemma3_path: Path) -> Tokenizer:
    return open_tokenizer(gemma3_path)


def config(**fields: object) -> ModelConfig:
    given: dict[str, object] = {"model": "m", "path": "", "max_model_len": 64, "dtype": "float32", **fields}
    return ModelConfig(**given)  # type: ignore[arg-type]


def test_roles(smollm2: Tokenizer, gemma3: Tokenizer) -> None:
    assert (smollm2.vocab_size, smollm2.bos_token_id, smollm2.eos_token_id) == (49152, 1, 2)
    assert (smollm2.unk_token_id, smollm2.pad_token_id, len(smollm2)) == (0, 2, 49152)
    assert (gemma3.vocab_size, gemma3.bos_token_id, gemma3.eos_token_id) == (262144, 2, 1)
    assert smollm2.special_tokens_map["bos_token"] == "<|im_start|>"
    assert smollm2.special_ids == frozenset(range(17))


def test_encode(smollm2: Tokenizer, gemma3: Tokenizer) -> None:
    ids = smollm2.encode("Hello world")
    assert type(ids) is list
    assert all(type(token_id) is int for token_id in ids)
    assert [smollm2.id_to_token(i) for i in ids] == ["Hello", "Ġworld"]
    assert smollm2.encode("") == []
    assert gemma3.encode("Hi")[0] == 2
    assert gemma3.encode("Hi", add_special_tokens=False)[0] != 2
    assert smollm2.encode_batch(["Hello world", "", "x"]) == [ids, [], smollm2.encode("x")]


@pytest.mark.parametrize("text", [None, 3, b"bytes", ["x"]])
def test_only_strings(smollm2: Tokenizer, text: object) -> None:
    with pytest.raises(BadRequestError, match="must be a string") as caught:
        smollm2.encode(text)  # type: ignore[arg-type]
    assert caught.value.parameter == "prompt"
    with pytest.raises(BadRequestError, match="must be a string"):
        smollm2.encode_batch(["x", text])  # type: ignore[list-item]


def test_lone_surrogates(smollm2: Tokenizer) -> None:
    with pytest.raises(BadRequestError, match="lone surrogate at character 2"):
        smollm2.encode("ab\ud800c")


def test_texts_that_cannot_fit_are_refused_unread(smollm2: Tokenizer, gemma3: Tokenizer) -> None:
    for tokenizer in (smollm2, gemma3):
        for text in ("Hello world " * 20, "👍" * 50, "e\u0301" * 50, " " * 300):
            ids = tokenizer.encode(text)
            assert tokenizer.encode(text, max_tokens=len(ids)) == ids  # what fits is never refused
        with pytest.raises(BadRequestError, match=r"at least \d+ tokens; at most 10 fit"):
            tokenizer.encode("x" * 1_000_000, max_tokens=10)
        with pytest.raises(BadRequestError, match="at most 10 fit"):
            tokenizer.encode_batch(["x", "x" * 1_000_000], max_tokens=10)


def test_the_longest_token_fits(smollm2: Tokenizer) -> None:
    """The bound is sound where it is tightest: a text of the longest tokens."""
    assert smollm2.table is not None
    longest = max((data for data in smollm2.table.data if data.isascii()), key=len).decode()
    ids = smollm2.encode(longest)
    assert smollm2.encode(longest, max_tokens=len(ids)) == ids


def test_decode(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("Hello<|im_end|> world")
    assert smollm2.decode(ids) == "Hello world"
    assert smollm2.decode(ids, skip_special_tokens=False) == "Hello<|im_end|> world"
    assert smollm2.decode(np.array(ids)) == smollm2.decode(iter(ids)) == "Hello world"
    assert smollm2.decode([]) == ""


def test_ids_that_no_token_has(smollm2: Tokenizer) -> None:
    for tokenizer in (smollm2, Tokenizer(lambda: smollm2.library, smollm2.vocab_size, smollm2.special, None)):
        ids = [-1, 49_152, 10**9, *tokenizer.encode("x")]
        assert tokenizer.decode(ids) == "x"
        assert tokenizer.id_to_token(-1) is tokenizer.id_to_token(49_152) is None
        assert tokenizer.token_text(-1) == tokenizer.token_text(49_152) == ""
    assert smollm2.token_bytes(-1) == smollm2.token_bytes(49_152) == b""
    assert smollm2.token_to_id("no such token") is None


def test_single_tokens(smollm2: Tokenizer, gemma3: Tokenizer) -> None:
    word, part = smollm2.encode(" world")[0], smollm2.encode("日")[0]
    assert smollm2.token_text(word) == " world"
    assert smollm2.token_bytes(word) == b" world"
    assert smollm2.token_text(2) == "<|im_end|>"
    assert smollm2.token_text(part) == "\ufffd"
    assert gemma3.token_text(gemma3.encode("a world")[-1]) == " world"
    line_feed = gemma3.token_to_id("<0x0A>")
    assert line_feed is not None
    assert gemma3.token_bytes(line_feed) == b"\n"


def test_text_tables_hide_special_tokens(smollm2: Tokenizer) -> None:
    shown, hidden = smollm2.text_table(False), smollm2.text_table(True)
    assert shown is not None
    assert hidden is not None
    assert (shown.texts[2], hidden.texts[2], hidden.data[2]) == ("<|im_end|>", "", b"")
    assert shown is smollm2.text_table(False)
    for data, text in zip(shown.data, shown.texts, strict=True):
        assert text is None or text.encode() == data
    assert 100 < sum(text is None for text in shown.texts) < 5000


def test_either_table_can_be_made_first(smollm2_path: Path) -> None:
    for order in ((True, False), (False, True)):
        tokenizer = open_tokenizer(smollm2_path)
        tables = {skip: tokenizer.text_table(skip) for skip in order}
        assert tables[True] is not None
        assert tables[False] is not None
        assert tables[True].texts[2] == ""
        assert tables[False].texts[2] == "<|im_end|>"


def test_threads(smollm2_path: Path) -> None:
    """The first use builds, and all uses agree."""
    tokenizer = open_tokenizer(smollm2_path)
    texts = [f"Text number {k}, with a few words and é日本 {'x' * k}" for k in range(64)]
    barrier = threading.Barrier(8)

    def work(worker: int) -> list[str]:
        barrier.wait()
        tokenizer.text_table(worker % 2 == 0)
        return [tokenizer.decode(tokenizer.encode(text)) for text in texts]

    with ThreadPoolExecutor(8) as pool:
        assert all(result == texts for result in pool.map(work, range(8)))


def test_new_libraries_are_separate(smollm2: Tokenizer) -> None:
    mine = smollm2.new_library()
    mine.enable_truncation(1)
    assert len(smollm2.encode("Hello world")) == 2


# ---- finding


def test_load_tokenizer(smollm2_path: Path, gemma3_path: Path) -> None:
    assert load_tokenizer(config(path=str(smollm2_path))).vocab_size == 49152
    assert load_tokenizer(config(model="smollm2-135m-instruct")).vocab_size == 49152
    assert load_tokenizer(config(path=str(gemma3_path), tokenizer=str(smollm2_path))).vocab_size == 49152
    for mode in ("auto", "hf", "fast"):
        assert load_tokenizer(config(path=str(smollm2_path), tokenizer_mode=mode)).eos_token_id == 2
    with pytest.raises(UnsupportedError, match="tokenizer_mode='mistral'"):
        load_tokenizer(config(path=str(smollm2_path), tokenizer_mode="mistral"))
    with pytest.raises(ModelNotFoundError, match="no-such-model"):
        load_tokenizer(config(path="no-such-model"))


def test_loading_needs_no_other_library(smollm2_path: Path) -> None:
    code = (
        "import sys; from vllm.tokenizers import open_tokenizer; "
        f"t = open_tokenizer({str(smollm2_path)!r}); assert t.decode(t.encode('Hi')) == 'Hi'; "
        "print([m for m in ('torch', 'transformers', 'gguf', 'huggingface_hub', 'jinja2') if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_the_library_is_built_when_text_comes(smollm2_path: Path) -> None:
    code = (
        "import sys; from vllm.tokenizers import open_tokenizer; "
        f"t = open_tokenizer({str(smollm2_path)!r}); assert t.decode([19556, 905]) == 'Hello world'; "
        "print('tokenizers' in sys.modules)"
    )
    subprocess.check_call([sys.executable, "-c", code], stdout=subprocess.DEVNULL)  # the cache is filled
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"


def test_names() -> None:
    import vllm.tokenizers

    assert vllm.tokenizers.Tokenizer is Tokenizer
    with pytest.raises(AttributeError, match="nothing"):
        vllm.tokenizers.nothing  # noqa: B018


# ---- for clients


def test_get_tokenizer(smollm2: Tokenizer, smollm2_path: Path) -> None:
    theirs = get_tokenizer("smollm2-135m-instruct", truncation_side="left")
    for text in ("Hello world 123", "a<|im_end|>b", "", "日本 é"):
        assert theirs.encode(text) == smollm2.encode(text)
        assert theirs.decode(theirs.encode(text), skip_special_tokens=True) == smollm2.decode(smollm2.encode(text))
    assert theirs.truncation_side == "left"
    assert theirs.name_or_path == str(smollm2_path)
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id, len(theirs)) == (1, 2, 2, 49152)
    assert theirs.chat_template == smollm2.chat_template
    assert set(theirs.all_special_ids) == smollm2.special_ids
    assert theirs("Hello world", truncation=True, max_length=1)["input_ids"] == smollm2.encode(" world")
    assert smollm2.encode("Hello world") == [19556, 905]


def test_get_tokenizer_of_a_folder(tmp_path: Path, smollm2: Tokenizer) -> None:
    wrap(smollm2, "smollm2").save_pretrained(str(tmp_path))
    for name in (tmp_path, str(tmp_path), tmp_path / "tokenizer.json"):
        theirs = get_tokenizer(name)
        assert theirs.encode("Hello world <|im_end|>") == smollm2.encode("Hello world <|im_end|>")
        assert theirs.chat_template == smollm2.chat_template
    again = open_tokenizer(tmp_path)
    assert again.encode("Hello world 123 <|im_end|>") == smollm2.encode("Hello world 123 <|im_end|>")
    assert again.special_ids == smollm2.special_ids
    assert again.chat_template == smollm2.chat_template
    assert again.table == smollm2.table


def test_get_tokenizer_refuses() -> None:
    with pytest.raises(ModelNotFoundError, match="no-such-model"):
        get_tokenizer("no-such-model")
    with pytest.raises(UnsupportedError, match="tokenizer_mode='mistral'"):
        get_tokenizer("smollm2-135m-instruct", tokenizer_mode="mistral")


def test_get_tokenizer_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match="pip install transformers"):
        get_tokenizer("smollm2-135m-instruct")
