"""Constraints over HTTP: every child its own state, a broken grammar ends its request and no other."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.entrypoints.openai.server import Server, by_index

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "y", "z"]}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["a", "n"],
    "additionalProperties": False,
}


def test_n_children_each_with_their_own_state(server: Server) -> None:
    body = {"prompt": "abc", "n": 16, "max_tokens": 200, "structured_outputs": {"regex": "[a-z]{3}[0-9]{1,9}"}}
    texts = [choice["text"] for choice in server.ok(COMPLETIONS, body)["choices"]]
    assert all(re.fullmatch("[a-z]{3}[0-9]{1,9}", text) for text in texts), texts
    assert len(set(texts)) > 8


def test_json_schema_by_every_name(server: Server) -> None:
    strict = {"json": SCHEMA, "disable_any_whitespace": True}
    for body in (
        {"structured_outputs": strict},
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
    ):
        answer = server.ok(CHAT, {"messages": MESSAGES, "n": 2, "seed": 1, "logit_bias": WHITESPACE} | body)
        for choice in answer["choices"]:
            value = json.loads(choice["message"]["content"])
            assert value["a"] in "xyz"
            assert choice["finish_reason"] == "stop"


WHITESPACE = {str(ord(mark)): -100 for mark in " \n\r\t"}
"""The random model would write blanks for ever."""


def test_streams_equal_the_answer(server: Server) -> None:
    body = {
        "prompt": "abc", "n": 3, "seed": 4, "max_tokens": 200,
        "structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True},
    }  # fmt: skip
    answer = server.ok(COMPLETIONS, body)
    streamed = by_index(server.events(COMPLETIONS, body))
    for choice in answer["choices"]:
        assert "".join(piece["text"] for piece in streamed[choice["index"]]) == choice["text"]
        assert set(json.loads(choice["text"])) == {"a", "n"}


def test_choice_and_grammar(server: Server) -> None:
    body = {"prompt": "abc", "n": 8, "max_tokens": 50}
    choices = server.ok(COMPLETIONS, body | {"guided_choice": ["red", "green"]})["choices"]
    assert {choice["text"] for choice in choices} <= {"red", "green"}
    grammar = 'root ::= "(" root ")" | "x"'
    for choice in server.ok(COMPLETIONS, body | {"guided_grammar": grammar})["choices"]:
        assert re.fullmatch(r"\(*x?\)*", choice["text"])
        if choice["finish_reason"] == "stop":
            assert choice["text"].count("(") == choice["text"].count(")")


def test_json_object(server: Server) -> None:
    body = {
        "messages": MESSAGES,
        "response_format": {"type": "json_object"},
        "max_tokens": 300,
        "logit_bias": WHITESPACE,
    }
    choice = server.ok(CHAT, body)["choices"][0]
    assert choice["message"]["content"].startswith("{")
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(choice["message"]["content"]), dict)


@pytest.mark.parametrize(
    "constraint",
    [
        {"regex": "(("}, {"regex": "(?=a)b"}, {"json": "{"}, {"json": {"type": "nothing"}}, {"grammar": "root ::= ("},
        {"structural_tag": "{}"}, {"regex": "a" * 10**6}, {"json": {"$ref": "#/x"}}, {"choice": ["a"] * 5000},
        {"json": {"type": "string", "pattern": "(("}}, {"regex": "a", "json": {}},
    ],
)  # fmt: skip
def test_broken_constraints_are_400(server: Server, constraint: dict[str, Any]) -> None:
    error = server.error(COMPLETIONS, {"prompt": "a", "structured_outputs": constraint})
    assert "structured_outputs" in error["message"]


HOSTILE: list[dict[str, Any]] = [
    {"regex": "(a{1,1000}){1,1000}b(.*){1,1000}"},
    {"regex": "(" * 500 + "a*" + ")*" * 500},
    {"regex": "(x+x+)+y"},
    {"regex": "x{1,100000}"},
    {"grammar": 'start: start "a" | start start | "b"'},
    {"grammar": "start: start"},
    {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}},
    {"json": {"$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}}}, "$ref": "#/$defs/t"}},
    {"json": {"type": "array", "items": {"anyOf": [{"type": "string", "pattern": f"a{{{i}}}b*"} for i in range(300)]}}},
    {
        "json": {
            "allOf": [
                {"anyOf": [{"type": "object", "properties": {f"p{i}{j}": {}}} for i in range(8)]} for j in range(8)
            ]
        }
    },
]


@pytest.mark.parametrize("constraint", HOSTILE, ids=range(len(HOSTILE)))
def test_rule_33_hostile_grammars_end_their_request_and_no_other(server: Server, constraint: dict[str, Any]) -> None:
    response = server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 20, "n": 2, "structured_outputs": constraint})
    assert response.status_code in (200, 400), response.text[:500]
    assert server.client.get("/health", timeout=2).status_code == 200
    assert server.ok(COMPLETIONS, {"prompt": "a", "guided_choice": ["ok"]})["choices"][0]["text"] == "ok"


def test_rule_33_a_constraint_that_leaves_nothing(server: Server) -> None:
    body = {"prompt": "a", "structured_outputs": {"choice": ["ab"]}, "min_tokens": 5, "max_tokens": 9}
    error = server.error(COMPLETIONS, body)
    assert error["param"] == "structured_outputs"
    assert "min_tokens" in error["message"]
    with server.client.stream("POST", COMPLETIONS, json=body | {"stream": True}) as response:
        text = response.read().decode()
    assert '"error"' in text
    assert text.endswith("data: [DONE]\n\n")
