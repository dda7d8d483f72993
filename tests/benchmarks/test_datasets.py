"""Data sets: what they yield, and what they say of bad files."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from tests.models_util import tiny_folder
from vllm.benchmarks import datasets
from vllm.benchmarks.datasets import DatasetError, Sample
from vllm.exceptions import BadRequestError
from vllm.tokenizers import Tokenizer, open_tokenizer


def parse(*words: str, num_prompts: int | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    datasets.add_arguments(parser, num_prompts=num_prompts, num_prompts_help="")
    return parser.parse_args(words)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A token per byte."""
    return open_tokenizer(tiny_folder())


def load(tokenizer: Tokenizer | None, *words: str, **options: Any) -> list[Sample]:
    return datasets.load(parse(*words), lambda: tokenizer, seed=options.pop("seed", 0), **options)


def write(path: Path, value: Any) -> str:
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return str(path)


def talk(*texts: str) -> dict[str, Any]:
    return {"conversations": [{"from": "human", "value": text} for text in texts]}


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ([], "conversations"),
        (["--input-len", "3"], "random"),
        (["--prefix-len", "3"], "random"),
        (["--dataset-path", "a.json"], "sharegpt"),
        (["--dataset", "a.json"], "sharegpt"),
        (["--dataset-path", "a.jsonl"], "jsonl"),
        (["--dataset-name", "custom"], "jsonl"),
        (["--dataset-path", "a.json", "--dataset-name", "jsonl"], "jsonl"),
    ],
)
def test_which_is_meant(words: list[str], name: str) -> None:
    assert datasets.dataset_name(parse(*words)) == name


# Random


def test_random_lengths_prefix_and_seed() -> None:
    words = ("--input-len", "20", "--output-len", "7", "--prefix-len", "6", "--num-prompts", "5")
    samples = load(None, *words, vocab_size=300)
    assert len(samples) == 5
    for sample in samples:
        assert isinstance(sample.prompt, list)
        assert len(sample.prompt) == sample.prompt_len == 26
        assert sample.output_len == 7
        assert sample.prompt[:6] == samples[0].prompt[:6]
        assert all(0 <= token < 300 for token in sample.prompt)
    assert len({tuple(sample.prompt) for sample in samples}) == 5
    assert load(None, *words, vocab_size=300) == samples
    assert load(None, *words, vocab_size=300, seed=1) != samples


def test_random_range() -> None:
    words = ("--input-len", "100", "--output-len", "10", "--random-range-ratio", "0.5", "--num-prompts", "200")
    samples = load(None, *words)
    sizes = {sample.prompt_len for sample in samples}
    assert min(sizes) < 60
    assert max(sizes) > 140
    assert all(50 <= size <= 150 for size in sizes)
    assert {sample.output_len for sample in samples} == set(range(5, 16))


def test_random_texts(tokenizer: Tokenizer) -> None:
    for sample in load(tokenizer, "--input-len", "30", "--num-prompts", "20", as_text=True):
        assert isinstance(sample.prompt, str)
        assert sample.prompt_len == len(tokenizer.encode(sample.prompt))


def test_a_tiny_vocabulary() -> None:
    (sample,) = load(None, "--input-len", "50", "--num-prompts", "1", vocab_size=8)
    assert set(sample.prompt) <= set(range(8))


@pytest.mark.parametrize(
    "words",
    [
        ["--input-len", "0"],
        ["--input-len", "5", "--output-len", "0"],
        ["--input-len", "5", "--num-prompts", "0"],
        ["--prefix-len", "-1"],
        ["--input-len", "5", "--random-range-ratio", "1"],
        ["--input-len", "5", "--random-range-ratio", "-0.1"],
    ],
)
def test_numbers_out_of_range(words: list[str]) -> None:
    with pytest.raises(BadRequestError, match="must be at least"):
        load(None, *words)


# Files


def test_sharegpt(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.json",
        [
            talk("question one", "answer"),
            talk("only one turn"),
            talk("abc", "long enough an answer"),  # too short a question
            talk("long enough a question", "abc"),  # too short an answer
            talk("q" * 1025, "long enough an answer"),
            talk("q" * 1000, "a" * 1100),
            talk("question two", "another answer", "a third turn"),
        ],
    )
    samples = load(tokenizer, "--dataset-path", path, "--disable-shuffle")
    assert samples == [Sample("question one", 12, 6), Sample("question two", 12, 14)]
    samples = load(tokenizer, "--dataset-path", path, "--disable-shuffle", "--output-len", "3", "--num-prompts", "1")
    assert samples == [Sample("question one", 12, 3)]


def test_too_few_entries_are_repeated(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", [talk("question one", "answer"), talk("question two", "answer")])
    samples = load(tokenizer, "--dataset-path", path, "--num-prompts", "5")
    assert len(samples) == 5
    assert samples[0] == samples[2] == samples[4] != samples[1]


def test_json_lines(tokenizer: Tokenizer, tmp_path: Path) -> None:
    lines = ['{"prompt": "ab", "output_len": 9}', "", '{"prompt": "cde"}', '{"prompt": "f", "output_tokens": 4}']
    path = write(tmp_path / "a.jsonl", "\n".join(lines))
    samples = load(tokenizer, "--dataset-path", path, "--disable-shuffle")
    assert samples == [Sample("ab", 2, 9), Sample("cde", 3, datasets.ANSWER_LEN), Sample("f", 1, 4)]


def test_our_own(tokenizer: Tokenizer) -> None:
    samples = load(tokenizer)
    entries = json.loads(datasets.OWN_DATA.read_text(encoding="utf-8"))
    assert len(entries) == len({entry["id"] for entry in entries}) >= 30
    assert 20 <= len(samples) <= len(entries)


def test_our_own_is_usable_with_the_bundled_model(smollm2_path: Path) -> None:
    samples = load(open_tokenizer(smollm2_path))
    assert len(samples) >= 25
    assert len({sample.output_len for sample in samples}) > 15


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", "{", "not JSON"),
        ("a.json", "[" * 100_000, "not JSON"),
        ("a.json", {"a": 1}, "expected a list of conversations, got dict"),
        ("a.json", [1], "entry 0 has no list"),
        ("a.json", [talk("question one", "answer"), {"conversations": "x"}], "entry 1 has no list"),
        ("a.json", [{"conversations": [{"from": "human"}]}], "entry 0 has a turn without"),
        ("a.json", [{"conversations": [{"value": 5}, {"value": "x"}]}], "entry 0 has a turn without"),
        ("a.json", [], "none of its 0 entries"),
        ("a.json", [talk("abc", "abc")], "none of its 1 entries"),
        ("a.jsonl", '{"prompt": "a"}\n{"prompt"', "line 2: not JSON"),
        ("a.jsonl", '["a"]', "line 1: expected an object"),
        ("a.jsonl", '{"prompt": 5}', "line 1: expected an object"),
        ("a.jsonl", '{"prompt": "a", "output_len": 0}', "line 1: output_len"),
        ("a.jsonl", '{"prompt": "a", "output_len": true}', "line 1: output_len"),
        ("a.jsonl", "\n", "none of its 0 entries"),
    ],
)
def test_malformed_files(tokenizer: Tokenizer, tmp_path: Path, name: str, content: Any, message: str) -> None:
    path = write(tmp_path / name, content)
    with pytest.raises(DatasetError, match=message) as caught:
        load(tokenizer, "--dataset-path", path)
    assert path in str(caught.value)


def test_missing_and_unreadable_files(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"missing\.json: no such file"):
        load(tokenizer, "--dataset-path", str(tmp_path / "missing.json"))
    with pytest.raises(DatasetError, match="cannot be read"):
        load(tokenizer, "--dataset-path", str(tmp_path))
    (tmp_path / "latin.json").write_bytes(b'["\xe9"]')
    with pytest.raises(DatasetError, match="cannot be read"):
        load(tokenizer, "--dataset-path", str(tmp_path / "latin.json"))
    with pytest.raises(DatasetError, match="needs --dataset-path"):
        load(tokenizer, "--dataset-name", "sharegpt")
    with pytest.raises(DatasetError, match="takes no dataset_path"):
        load(tokenizer, "--dataset-name", "conversations", "--dataset-path", "x")
    with pytest.raises(DatasetError, match="need a tokenizer"):
        load(None)
