"""Command line flags made from a dataclass: flag names, types, defaults, choices and help come from its fields."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
import sys
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypeVar, overload

_T = TypeVar("_T")
_SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


class FlexibleArgumentParser(argparse.ArgumentParser):
    """An `ArgumentParser` that takes `--max_model_len` for `--max-model-len`, and refuses abbreviated flags."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)

    @overload  # type: ignore[override]
    def parse_known_args(
        self, args: Sequence[str] | None = None, namespace: None = None
    ) -> tuple[argparse.Namespace, list[str]]: ...
    @overload
    def parse_known_args(self, args: Sequence[str] | None, namespace: _T) -> tuple[_T, list[str]]: ...
    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:
        given = sys.argv[1:] if args is None else list(args)
        return super().parse_known_args([_with_dashes(word) for word in given], namespace)


def _with_dashes(word: str) -> str:
    if not word.startswith("--"):
        return word
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value


def human_int(text: str) -> int:
    """A whole number; k, m, g are powers of a thousand and K, M, G powers of 1,024: "8k" is 8000, "8K" is 8192."""
    match = re.fullmatch(r"([+-]?\d+)([kmgKMG]?)|([+-]?\d+\.\d+)([kmgKMG])", text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"expected a whole number such as 4096, 4k or 4K, got {text!r}")
    if match[1] is not None:
        return int(match[1]) * _SUFFIXES.get(match[2], 1)
    return int(float(match[3]) * _SUFFIXES[match[4]])


def json_object(text: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {text!r}: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {text!r}")
    return value


def option(
    default: Any,
    group: str,
    help: str,  # noqa: A002 - argparse's word
    *,
    low: int | None = None,
    unbuilt: tuple[str, ...] = (),
) -> Any:
    """A dataclass field that is also a command line flag, listed under `group`.

    `low` is the least number that it takes; `unbuilt` are choices that programs know and that are not built here.
    """
    return dataclasses.field(default=default, metadata={"group": group, "help": help, "low": low, "unbuilt": unbuilt})


class Rule(NamedTuple):
    """What an option's value must be (None aside), from its annotation and its `low`."""

    kind: type
    choices: tuple[str, ...] = ()
    low: int | None = None

    @property
    def text(self) -> str:
        if self.choices:
            return "one of " + ", ".join(self.choices)
        if self.kind is bool:
            return "True or False"
        if self.kind is dict:
            return "a dict with string keys"
        if self.kind is str:
            return "a non-empty string"
        noun = "an int" if self.kind is int else "a number"
        return noun if self.low is None else f"{noun} of at least {self.low}"

    def fits(self, value: Any) -> bool:
        if self.choices:
            return isinstance(value, str) and value in self.choices
        if self.kind is bool:
            return isinstance(value, bool)
        if self.kind is dict:
            return isinstance(value, dict) and all(isinstance(key, str) for key in value)
        if self.kind is str:
            return isinstance(value, str) and bool(value)
        if isinstance(value, bool) or not isinstance(value, int if self.kind is int else (int, float)):
            return False
        return (self.low is None or self.low <= value) and value < 2**63 and math.isfinite(value)


_rules_of: dict[type[Any], list[tuple[dataclasses.Field[Any], Rule]]] = {}


def option_rules(cls: type[Any]) -> list[tuple[dataclasses.Field[Any], Rule]]:
    """Every `option` field of a dataclass with its rule."""
    if cls not in _rules_of:
        _rules_of[cls] = list(_make_rules(cls))
    return _rules_of[cls]


def _make_rules(cls: type[Any]) -> Iterator[tuple[dataclasses.Field[Any], Rule]]:
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if "group" not in field.metadata:
            continue
        hint = hints[field.name]
        members = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
        member = next(member for member in members if member is not type(None))
        if typing.get_origin(member) is Literal:
            rule = Rule(str, typing.get_args(member))
        else:
            rule = Rule(typing.get_origin(member) or member, low=field.metadata["low"])
        if rule.kind not in (bool, int, float, str, dict):
            raise TypeError(f"{cls.__name__}.{field.name}: no command line form for {hint!r}")
        yield field, rule


def add_dataclass_arguments(
    parser: argparse.ArgumentParser, cls: type[Any], *, skip: frozenset[str] = frozenset()
) -> None:
    """Add a flag for every `option` field of `cls`, grouped; a bool gets a --no- form too."""
    groups: dict[str, argparse._ArgumentGroup] = {group.title: group for group in parser._action_groups if group.title}
    for field, rule in option_rules(cls):
        if field.name in skip:
            continue
        title = field.metadata["group"]
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        text = field.metadata["help"].replace("%", "%%")
        if field.default is not None:
            text += f" (default: {str(field.default).replace('%', '%%')})"
        settings: dict[str, Any] = {"dest": field.name, "default": field.default, "help": text}
        if rule.choices:
            settings |= {"choices": rule.choices}
        elif rule.kind is bool:
            settings |= {"action": argparse.BooleanOptionalAction}
        elif rule.kind is dict:
            settings |= {"type": json_object, "metavar": "JSON"}
        elif rule.kind is float:
            settings |= {"type": float, "metavar": "X"}
        elif rule.kind is int:
            settings |= {"type": human_int, "metavar": "N"}
        else:
            settings |= {"metavar": field.name.rsplit("_", 1)[-1].upper()}
        groups[title].add_argument("--" + field.name.replace("_", "-"), **settings)
