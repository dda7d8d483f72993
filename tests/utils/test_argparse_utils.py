"""Flags from a dataclass."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from vllm.utils.argparse_utils import (
    FlexibleArgumentParser,
    add_dataclass_arguments,
    human_int,
    json_object,
    option,
    option_rules,
)


@dataclass
class Options:
    some_name: str | None = option(None, "first", "A name; 100% free.")
    some_count: int = option(3, "first", "A count.", low=0)
    some_factor: float | None = option(None, "second", "A factor.")
    some_flag: bool = option(True, "second", "A flag.")
    some_mode: Literal["a", "b"] = option("a", "second", "A mode.")
    some_dict: dict[str, Any] | None = option(None, "second", "A dict.")
    not_a_flag: int = 0


def parse(*words: str) -> argparse.Namespace:
    parser = FlexibleArgumentParser(prog="test", exit_on_error=False)
    add_dataclass_arguments(parser, Options)
    return parser.parse_args(list(words))


def test_defaults_and_values() -> None:
    assert vars(parse()) == {
        "some_name": None,
        "some_count": 3,
        "some_factor": None,
        "some_flag": True,
        "some_mode": "a",
        "some_dict": None,
    }
    args = parse(
        "--some-name=x_y", "--some_count", "2K", "--some-factor", "0.5", "--no-some-flag", "--some_mode=b",
        "--some-dict", '{"a": [1]}',
    )  # fmt: skip
    assert (args.some_name, args.some_count, args.some_factor, args.some_flag) == ("x_y", 2048, 0.5, False)
    assert (args.some_mode, args.some_dict) == ("b", {"a": [1]})


@pytest.mark.parametrize(
    "words",
    [
        ["--some-count", "many"],
        ["--some-factor", "many"],
        ["--some-mode", "c"],
        ["--some-dict", "[1]"],
        ["--some-dict", "{"],
    ],
)
def test_bad_values(words: list[str]) -> None:
    with pytest.raises(argparse.ArgumentError, match=words[0]):
        parse(*words)


@pytest.mark.parametrize("word", ["--not-a-flag", "--some-nam", "--no-some-name"])
def test_unknown_and_abbreviated_flags(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises((SystemExit, argparse.ArgumentError)):
        parse(word, "1")
    capsys.readouterr()


def test_help_is_grouped() -> None:
    parser = FlexibleArgumentParser(prog="test")
    add_dataclass_arguments(parser, Options, skip=frozenset({"some_mode"}))
    text = parser.format_help().split("options:")[1]
    assert text.index("first:") < text.index("--some-count") < text.index("second:") < text.index("--no-some-flag")
    assert "100% free" in text
    assert "(default: 3)" in text
    assert "--some-mode" not in text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("-1", -1),
        ("4096", 4096),
        ("8k", 8000),
        ("8K", 8192),
        ("2m", 2_000_000),
        ("1.5K", 1536),
        ("1G", 2**30),
    ],
)
def test_human_int(text: str, value: int) -> None:
    assert human_int(text) == value


@pytest.mark.parametrize("text", ["", "k", "1.5", "4kb", "0x10", "1e3"])
def test_human_int_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="whole number"):
        human_int(text)


def test_json_object() -> None:
    assert json_object('{"a": 1}') == {"a": 1}


def test_rules() -> None:
    rules = {field.name: rule for field, rule in option_rules(Options)}
    assert list(rules) == ["some_name", "some_count", "some_factor", "some_flag", "some_mode", "some_dict"]
    cases: dict[str, tuple[list[object], list[object]]] = {
        "some_name": (["x"], ["", 5]),
        "some_count": ([0, 7], [-1, True, 1.0, "1", 2**63]),
        "some_factor": ([0, 0.5], [True, "1", float("nan"), float("inf"), 10**400]),
        "some_flag": ([True, False], [1, "true"]),
        "some_mode": (["a", "b"], ["c", 1, ["a"]]),
        "some_dict": ([{}, {"a": 1}], [[], {1: 2}]),
    }
    for name, (good, bad) in cases.items():
        assert all(rules[name].fits(value) for value in good)
        assert not any(rules[name].fits(value) for value in bad), name
        assert rules[name].text


def test_an_annotation_without_a_command_line_form() -> None:
    @dataclass
    class Odd:
        parts: list[int] = option(None, "x", "A list.")  # type: ignore[assignment]

    with pytest.raises(TypeError, match="parts"):
        option_rules(Odd)
