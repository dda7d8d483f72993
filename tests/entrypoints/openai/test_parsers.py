"""Tool calls and reasoning out of text, in one piece and in many."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm.entrypoints.openai.parsers import (
    AnswerParser,
    Delta,
    HermesParser,
    Llama3Parser,
    MistralParser,
    NamedCall,
    ReasoningParser,
    RequiredCalls,
    ToolParser,
    tool_form,
)
from vllm.entrypoints.openai.protocol import ChatBody
from vllm.entrypoints.openai.tools import read_tools
from vllm.exceptions import BadRequestError

CALL = '{"name": "get", "arguments": {"city": "Köln", "n": [1, {"a": "}"}]}}'
ARGUMENTS = {"city": "Köln", "n": [1, {"a": "}"}]}

CASES: list[tuple[Callable[[], ToolParser], str, str, list[tuple[str, Any]]]] = [
    (HermesParser, "plain text < <tool and more", "plain text < <tool and more", []),
    (HermesParser, f"a<tool_call>\n{CALL}\n</tool_call>b", "ab", [("get", ARGUMENTS)]),
    (HermesParser, f"<tool_call>{CALL}</tool_call>" * 3, "", [("get", ARGUMENTS)] * 3),
    (HermesParser, f"<tool_call>{CALL}", "", [("get", ARGUMENTS)]),
    (HermesParser, "<tool_call>no json</tool_call>x", "<tool_call>no json</tool_call>x", []),
    (HermesParser, '<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>', []),
    (HermesParser, "<tool_call>{", "<tool_call>{", []),
    (HermesParser, "", "", []),
    (Llama3Parser, "plain {text}", "plain {text}", []),
    (Llama3Parser, '{"name": "f", "parameters": {"a": 1}}', "", [("f", {"a": 1})]),
    (Llama3Parser, ' <|python_tag|>{"name": "f", "parameters": {}}; {"name": "g"}', "", [("f", {}), ("g", {})]),
    (Llama3Parser, '{"name": "f", "parameters": {}} and more', '{"name": "f", "parameters": {}} and more', []),
    (Llama3Parser, '{"no": "call"}', '{"no": "call"}', []),
    (Llama3Parser, "<|python", "<|python", []),
    (MistralParser, "plain [TOOL] text", "plain [TOOL] text", []),
    (MistralParser, f"Well. [TOOL_CALLS] [{CALL}, {CALL}]", "Well. ", [("get", ARGUMENTS)] * 2),
    (MistralParser, '[TOOL_CALLS]get{"a": 1}[TOOL_CALLS]put[ARGS]{"b": 2}', "", [("get", {"a": 1}), ("put", {"b": 2})]),
    (MistralParser, "[TOOL_CALLS] nonsense", "[TOOL_CALLS] nonsense", []),
    (lambda: NamedCall("f"), '{"a": 1}', "", [("f", {"a": 1})]),
    (RequiredCalls, '[{"name":"f","parameters":{"a":"}{"}},{"name":"g"}]', "", [("f", {"a": "}{"}), ("g", {})]),
]  # fmt: skip


def run(parser: Any, pieces: list[str]) -> Delta:
    found = Delta()
    for piece in pieces:
        found = found.merged(parser.push(piece))
    return found.merged(parser.finish())


@pytest.mark.parametrize(("make", "text", "content", "calls"), CASES)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 1000])
def test_calls(make: Any, text: str, content: str, calls: list[Any], size: int) -> None:
    parser = make()
    found = run(parser, [text[i : i + size] for i in range(0, len(text), size)])
    assert found.content == content
    assert [(call.name, json.loads(call.arguments)) for call in found.calls] == calls
    assert [call.index for call in found.calls] == list(range(len(calls)))
    assert len({call.id for call in found.calls}) == len(calls) == parser.num_calls


@given(text=st.text('<>/tool_cal{}": ,nme[]TOL;|ab', max_size=60), size=st.integers(1, 9))
def test_no_text_is_lost(text: str, size: int) -> None:
    for make in (HermesParser, Llama3Parser, MistralParser):
        found = run(make(), [text[i : i + size] for i in range(0, len(text), size)])
        assert found.calls or found.content == text


@pytest.mark.parametrize(
    ("inside", "text", "reasoning", "content"),
    [
        (False, "<think>why</think>so", "why", "so"),
        (False, "\n<think>\nwhy\n</think>\n\nso", "\nwhy\n", "\n\nso"),
        (False, "no reasoning </think> here", "", "no reasoning </think> here"),
        (False, "<thin", "", "<thin"),
        (False, "<think>cut", "cut", ""),
        (False, "<think>cut </thi", "cut </thi", ""),
        (True, "why</think>so", "why", "so"),
        (True, "<think>why</think>so", "why", "so"),
        (True, "cut", "cut", ""),
        (False, "", "", ""),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_reasoning(inside: bool, text: str, reasoning: str, content: str, size: int) -> None:
    for show in (True, False):
        parser = AnswerParser(None, ReasoningParser(inside), show, False)
        found = run(parser, [text[i : i + size] for i in range(0, len(text), size)])
        assert (found.reasoning, found.content) == (reasoning if show else "", content)


def test_reasoning_before_calls_and_one_call_only() -> None:
    text = f"<think>a<tool_call>no</think><tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call>"
    for first_only, count in ((False, 2), (True, 1)):
        found = run(AnswerParser(HermesParser(), ReasoningParser(False), True, first_only), list(text))
        assert found.reasoning == "a<tool_call>no"
        assert len(found.calls) == count


def test_form_by_the_chat_template() -> None:
    assert tool_form("auto", "… <tool_call> …") == "hermes"
    assert tool_form("auto", "… [TOOL_CALLS] …") == "mistral"
    assert tool_form("auto", {"default": "x", "tool_use": "<|python_tag|>"}) == "llama3_json"
    assert tool_form("auto", None) == "hermes"
    assert tool_form("mistral", "<tool_call>") == "mistral"


def body(**fields: Any) -> ChatBody:
    return ChatBody(messages=[], **fields)


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "$defs": {"x": {}}}}}


def test_reading_tools() -> None:
    assert read_tools(body()).choice == "none"
    assert read_tools(body(tool_choice="auto")).choice == "none"
    assert read_tools(body(tools=[TOOL])).choice == "auto"
    assert read_tools(body(tools=[TOOL], tool_choice="none")).for_template is None
    required = read_tools(body(tools=[TOOL], tool_choice="required", parallel_tool_calls=False)).schema()
    assert required["maxItems"] == 1
    assert required["$defs"] == {"x": {}}
    named = read_tools(body(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "f"}}))
    assert named.is_named
    assert named.schema() == TOOL["function"]["parameters"]  # type: ignore[index]


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"tools": 3}, "tools"),
        ({"tools": [3]}, "tools"),
        ({"tools": [{}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": 3}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 3}}]}, "tools"),
        ({"tools": [TOOL] * 200}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "other"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": 3}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {}}, "tool_choice"),
    ],
)
def test_wrong_tools(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(BadRequestError, match=name) as caught:
        read_tools(body(**fields))
    assert caught.value.parameter == name
