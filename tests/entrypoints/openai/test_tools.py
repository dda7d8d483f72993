"""Tools over HTTP: what the template gets, and what comes back, streamed and not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.entrypoints.openai.server import Server, by_index, tiny_server
from tests.models_util import tiny_folder

PATH = "/v1/chat/completions"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Rome", "Oslo"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("weather", "population")
]
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "?"}], "tools": TOOLS, "seed": 2, "max_tokens": 300}
NAMED = {"type": "function", "function": {"name": "weather"}}
TEMPLATE = (
    "{% if tools %}{% for tool in tools %}[{{ tool.function.name }}]{% endfor %}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
)


def joined(pieces: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a stream's deltas make."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "calls": {}}
    for piece in pieces:
        delta = piece["delta"]
        message["content"] += delta.get("content") or ""
        message["reasoning"] += delta.get("reasoning") or ""
        for call in delta.get("tool_calls", ()):
            own = message["calls"].setdefault(call["index"], {"name": None, "arguments": ""})
            if "id" in call:
                assert own["name"] is None
                assert call["type"] == "function"
                own["name"] = call["function"]["name"]
            own["arguments"] += call["function"]["arguments"]
    return message


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_demanded_call(server: Server, choice: Any) -> None:
    body = BODY | {"tool_choice": choice, "n": 3, "parallel_tool_calls": False}
    answer = server.ok(PATH, body)
    streamed = by_index(server.events(PATH, body))
    for one in answer["choices"]:
        message = one["message"]
        (call,) = message["tool_calls"]
        assert not message["content"]
        assert call["function"]["name"] in ("weather", "population")
        assert json.loads(call["function"]["arguments"])["city"] in ("Rome", "Oslo")
        assert one["finish_reason"] == ("stop" if choice is NAMED else "tool_calls")
        made = joined(streamed[one["index"]])
        assert made["content"] == ""
        assert list(made["calls"].values()) == [call["function"]]
        assert streamed[one["index"]][-1]["finish_reason"] == one["finish_reason"]


def test_a_call_and_a_format_do_not_go_together(server: Server) -> None:
    body = BODY | {"tool_choice": "required", "response_format": {"type": "json_object"}}
    assert server.error(PATH, body)["param"] == "tool_choice"


def test_auto_without_a_call_is_content(server: Server) -> None:
    answer = server.ok(PATH, BODY)["choices"][0]
    assert "tool_calls" not in answer["message"]
    assert joined(by_index(server.events(PATH, BODY))[0])["content"] == answer["message"]["content"]


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """With a template that knows tools, and a parser for reasoning."""
    template = tmp_path_factory.mktemp("template") / "tools.jinja"
    Path(template).write_text(TEMPLATE)
    own = tiny_server(tiny_folder(), "--chat-template", str(template), "--reasoning-parser", "deepseek_r1",
                      "--trust-request-chat-template")  # fmt: skip
    yield own
    own.kill()


def written(text: str) -> dict[str, Any]:
    """Makes the model write a text."""
    return {"structured_outputs": {"choice": [text]}}


def test_the_template_gets_the_tools(other: Server) -> None:
    with_tools = other.ok(PATH, BODY | {"max_tokens": 1, "return_token_ids": True})["prompt_token_ids"]
    assert bytes(with_tools[:21]) == b"[weather][population]"
    without = other.ok(PATH, BODY | {"max_tokens": 1, "return_token_ids": True, "tool_choice": "none"})
    assert without["prompt_token_ids"] == with_tools[21:]
    own = other.ok(PATH, BODY | {"max_tokens": 1, "return_token_ids": True, "chat_template": "abc"})
    assert bytes(own["prompt_token_ids"]) == b"abc"


def test_reasoning_content_and_calls(other: Server) -> None:
    text = 'I see</think>One moment.<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
    body = BODY | written(text)
    one = other.ok(PATH, body)["choices"][0]
    message = one["message"]
    assert message["reasoning"] == message["reasoning_content"] == "I see"
    assert message["content"] == "One moment."
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Rome"}'}
    assert one["finish_reason"] == "tool_calls"
    pieces = by_index(other.events(PATH, body))[0]
    made = joined(pieces)
    assert (made["reasoning"], made["content"]) == ("I see", "One moment.")
    assert made["calls"][0] == call["function"]
    assert pieces[-1]["finish_reason"] == "tool_calls"
    hidden = other.ok(PATH, body | {"include_reasoning": False})["choices"][0]["message"]
    assert not hidden["reasoning"]
    assert hidden["content"] == "One moment."


def test_a_template_that_never_ends_is_cut(other: Server) -> None:
    for template in ("{% for i in range(10**9) %}x{% endfor %}", "{{ ''.__class__.__mro__ }}", "{% if %}", "{{ 1/0 }}"):
        error = other.error(PATH, BODY | {"chat_template": template})
        assert "Traceback" not in error["message"]
    assert other.client.get("/health").status_code == 200
