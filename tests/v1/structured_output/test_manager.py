"""Grammars and their states, on the tiny vocabulary of bytes."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import numpy as np
import pytest

from tests.models_util import EOS, VOCAB_SIZE, tiny_folder
from vllm.config import ModelConfig
from vllm.exceptions import BadRequestError, UnsupportedError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.tokenizers import load_tokenizer
from vllm.v1.structured_output.grammar import MAX_CHARACTERS, check
from vllm.v1.structured_output.manager import ChildGrammar, GrammarError, GrammarManager

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"enum": ["a", "b"]}, "age": {"type": "integer", "minimum": 0, "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture
def manager() -> Any:
    config = ModelConfig("tiny", str(tiny_folder()), 1024, "float32")
    own = GrammarManager(lambda: load_tokenizer(config), VOCAB_SIZE, [EOS])
    yield own
    own.shutdown()


def params(**constraint: Any) -> SamplingParams:
    return SamplingParams(structured_outputs=StructuredOutputsParams(**constraint))


def allowed(mask: Any) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB_SIZE]).tolist()


def walk(state: ChildGrammar, rng: random.Random, most: int = 400) -> list[int]:
    """A random output that the grammar allows, without its end."""
    output: list[int] = []
    while len(output) < most:
        token = rng.choice(allowed(state.mask(output)))
        if token == EOS:
            return output
        output.append(token)
    raise AssertionError("no end")


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        ({"regex": "[0-9]{3}-[0-9]{2}"}, r"\d{3}-\d{2}"),
        ({"choice": ["yes", "no", 'ja „x"\\\n']}, 'yes|no|ja „x"\\\\\n'),
        ({"grammar": 'root ::= "a" | "b" root'}, "b*a"),
        ({"grammar": 'start: "x" start | "y"'}, "x*y"),
    ],
)
def test_every_walk_fits(manager: GrammarManager, constraint: dict[str, Any], pattern: str) -> None:
    own = params(**constraint)
    check(own.constraint)  # type: ignore[arg-type]
    for seed in range(20):
        text = bytes(walk(manager.state(seed, own), random.Random(seed))).decode()
        assert re.fullmatch(pattern, text), text


@pytest.mark.parametrize("schema", [SCHEMA, json.dumps(SCHEMA)])
def test_every_walk_is_json_of_the_schema(manager: GrammarManager, schema: Any) -> None:
    own = params(json=schema, disable_any_whitespace=True)
    for seed in range(20):
        value = json.loads(bytes(walk(manager.state(seed, own), random.Random(seed))))
        assert set(value) == {"name", "age"}
        assert value["name"] in ("a", "b")
        assert 0 <= value["age"] <= 120


def test_rule_08_every_child_has_its_own_state(manager: GrammarManager) -> None:
    own = params(choice=["abc", "xyz"])
    first, second = manager.state(1, own), manager.state(2, own)
    assert manager.state(1, own) is first
    assert allowed(first.mask([])) == allowed(second.mask([])) == [ord("a"), ord("x")]
    assert allowed(first.mask([ord("a")])) == [ord("b")]
    assert allowed(second.mask([ord("x")])) == [ord("y")]
    assert manager.num_states == 2
    manager.end([1, 2, 3])
    assert manager.num_states == 0


def test_an_undone_draw(manager: GrammarManager) -> None:
    state = manager.state(1, params(choice=["abc", "xyz"]))
    state.mask([ord("a")])
    state.mask([ord("a"), ord("b")])
    assert allowed(state.mask([ord("a")])) == [ord("b")]
    assert allowed(state.mask([])) == [ord("a"), ord("x")]
    assert allowed(state.mask([ord("x"), ord("y")])) == [ord("z")]
    assert allowed(state.mask([*b"xyz"])) == [EOS]


def test_children_wait_for_their_grammar(manager: GrammarManager) -> None:
    own = params(choice=["a"])
    assert manager.take_ready() == []
    assert not manager.begin([1, 2], own)
    ready: list[int] = []
    while not ready:
        ready = manager.take_ready(0.05)
    assert ready == [1, 2]
    assert manager.take_ready() == []
    assert manager.begin([3], own)  # compiled before


def test_a_token_that_the_grammar_refuses_is_an_error_of_its_child(manager: GrammarManager) -> None:
    own = params(choice=["abc"])
    state, other = manager.state(1, own), manager.state(2, own)
    with pytest.raises(GrammarError, match="structured_outputs"):
        state.mask([ord("z")])
    assert allowed(other.mask([])) == [ord("a")]


WRONG: list[dict[str, Any]] = [
    {"regex": "(("},
    {"regex": "a" * (MAX_CHARACTERS + 1)},
    {"json": "{"},
    {"json": "3"},
    {"json": {"type": "nothing"}},
    {"json": {"$ref": "#/nowhere"}},
    {"json": {"type": "object", "description": "x" * MAX_CHARACTERS}},
    {"grammar": "root ::= ("},
    {"grammar": "start: nothing"},
    {"choice": ["a"] * 2000},
]


@pytest.mark.parametrize("constraint", WRONG)
def test_wrong_constraints(manager: GrammarManager, constraint: dict[str, Any]) -> None:
    own = params(**constraint)
    with pytest.raises(BadRequestError, match="structured_outputs") as caught:
        check(own.constraint)  # type: ignore[arg-type]
    assert caught.value.parameter == "structured_outputs"
    assert len(str(caught.value)) < 700
    with pytest.raises(GrammarError, match="structured_outputs"):
        manager.state(1, own)


def test_unbuilt_constraints_are_named() -> None:
    for constraint in ({"structural_tag": "{}"}, {"json": {}, "disable_additional_properties": True}):
        with pytest.raises(UnsupportedError, match=next(reversed(constraint))):
            check(StructuredOutputsParams(**constraint))  # type: ignore[arg-type]
