"""From an answer's text to content, reasoning and tool calls, while it is being made.

A parser belongs to one completion. `push` takes new text and returns what can be told for sure; text that may be the
beginning of a tag is held back. What is pushed in one piece or in many gives the same in the end. What looks like a
call and is none comes back as content, so that no text is lost.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.entrypoints.openai.tools import ToolUse

if TYPE_CHECKING:
    from vllm.entrypoints.openai.protocol import ChatBody
    from vllm.entrypoints.openai.server_args import ServerArgs

_LETTERS = string.ascii_letters + string.digits


def _call_id() -> str:
    """Nine letters and digits: what Mistral's templates insist on, and everybody else takes."""
    return "".join(secrets.choice(_LETTERS) for _ in range(9))


@dataclass(slots=True)
class Call:
    """A tool call, or more of its arguments (then without id and name)."""

    index: int
    name: str | None
    arguments: str
    id: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}

    def as_delta(self) -> dict[str, Any]:
        if self.id is None:
            return {"index": self.index, "function": {"arguments": self.arguments}}
        return {"index": self.index, **self.as_dict()}


@dataclass(slots=True)
class Delta:
    """What is new."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)

    def merged(self, more: Delta) -> Delta:
        calls = list(self.calls)
        for call in more.calls:
            if call.id is None and calls and calls[-1].index == call.index:
                calls[-1].arguments += call.arguments
            else:
                calls.append(call)
        return Delta(self.content + more.content, self.reasoning + more.reasoning, calls)


class _Held:
    """Text that has come and is not told yet, because it could be the beginning of one of the marks."""

    def __init__(self, *marks: str) -> None:
        self._marks = marks
        self.text = ""

    def until_mark(self, more: str) -> tuple[str, str | None]:
        """(text before, mark found); what follows the mark stays in `text`."""
        self.text += more
        places = [(self.text.find(mark), mark) for mark in self._marks if mark in self.text]
        if places:
            place, mark = min(places)
            before, self.text = self.text[:place], self.text[place + len(mark) :]
            return before, mark
        keep = max((_overlap(self.text, mark) for mark in self._marks), default=0)
        split = len(self.text) - keep
        before, self.text = self.text[:split], self.text[split:]
        return before, None

    def take(self) -> str:
        text, self.text = self.text, ""
        return text


def _overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` with which `mark` begins."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0


# ---- tool calls


class ToolParser:
    """Base: numbers the calls."""

    def __init__(self) -> None:
        self.num_calls = 0

    def push(self, text: str) -> Delta:
        raise NotImplementedError

    def finish(self) -> Delta:
        return Delta()

    def _call(self, name: str, arguments: Any) -> Call:
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        self.num_calls += 1
        return Call(self.num_calls - 1, name, text, _call_id())

    def _calls(self, values: Sequence[Any]) -> list[Call] | None:
        """Calls from their JSON objects, or None if one of them is none."""
        found = []
        for value in values:
            if not isinstance(value, dict) or not isinstance(value.get("name"), str):
                return None
            arguments = value.get("arguments", value.get("parameters", {}))
            found.append((value["name"], {} if arguments is None else arguments))
        return [self._call(*call) for call in found]


class HermesParser(ToolParser):
    """<tool_call>{"name": …, "arguments": {…}}</tool_call>, any number of them, between other text."""

    OPEN, CLOSE = "<tool_call>", "</tool_call>"

    def __init__(self) -> None:
        super().__init__()
        self._outside, self._inside = _Held(self.OPEN), _Held(self.CLOSE)
        self._body: list[str] | None = None

    def push(self, text: str) -> Delta:
        delta = Delta()
        while True:
            if self._body is None:
                before, mark = self._outside.until_mark(text)
                delta.content += before
                if mark is None:
                    return delta
                self._body, text = [], self._outside.take()
            else:
                before, mark = self._inside.until_mark(text)
                self._body.append(before)
                if mark is None:
                    return delta
                self._close(delta, self.CLOSE)
                text = self._inside.take()

    def finish(self) -> Delta:
        delta = Delta(self._outside.take())
        if self._body is not None:
            self._body.append(self._inside.take())
            self._close(delta, "")
        return delta

    def _close(self, delta: Delta, end: str) -> None:
        body, self._body = "".join(self._body or ()), None
        value = _json(body)
        calls = None if value is None else self._calls(value if isinstance(value, list) else [value])
        if calls is None:
            delta.content += self.OPEN + body + end
        else:
            delta.calls += calls


class Llama3Parser(ToolParser):
    """{"name": …, "parameters": {…}} as the whole answer, several with semicolons; <|python_tag|> may stand before."""

    TAG = "<|python_tag|>"

    def __init__(self) -> None:
        super().__init__()
        self._text = ""
        self._plain = False

    def push(self, text: str) -> Delta:
        if self._plain:
            return Delta(text)
        self._text += text
        start = self._text.lstrip()
        if not start or start.startswith(("{", self.TAG)) or self.TAG.startswith(start):
            return Delta()
        self._plain = True
        whole, self._text = self._text, ""
        return Delta(whole)

    def finish(self) -> Delta:
        whole, self._text = self._text, ""
        values = _json_sequence(whole.strip().removeprefix(self.TAG))
        calls = self._calls(values) if values else None
        return Delta(whole) if calls is None else Delta(calls=calls)


class MistralParser(ToolParser):
    """[TOOL_CALLS] and then [{"name": …, "arguments": {…}}, …], or, of newer models, name{…} or name[ARGS]{…}."""

    MARK = "[TOOL_CALLS]"
    _NAMED = re.compile(r"\s*([\w.\-]+)\s*(?:\[ARGS\]|\[CALL_ID\]\w+\[ARGS\])?\s*")

    def __init__(self) -> None:
        super().__init__()
        self._held = _Held(self.MARK)
        self._body: str | None = None

    def push(self, text: str) -> Delta:
        if self._body is not None:
            self._body += text
            return Delta()
        before, mark = self._held.until_mark(text)
        if mark is not None:
            self._body = self._held.take()
        return Delta(before)

    def finish(self) -> Delta:
        delta = Delta(self._held.take())
        if self._body is not None:
            values = self._read(self._body)
            calls = self._calls(values) if values else None
            if calls is None:
                delta.content += self.MARK + self._body
            else:
                delta.calls = calls
        return delta

    def _read(self, body: str) -> list[Any] | None:
        value = _json(body)
        if value is not None:
            return value if isinstance(value, list) else [value]
        found = []
        for part in body.split(self.MARK):
            match = self._NAMED.match(part)
            arguments = _json(part[match.end() :]) if match else None
            if match is None or not isinstance(arguments, dict):
                return None
            found.append({"name": match[1], "arguments": arguments})
        return found


class NamedCall(ToolParser):
    """The whole answer is the arguments of one function."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def push(self, text: str) -> Delta:
        if not text:
            return Delta()
        if self.num_calls:
            return Delta(calls=[Call(0, None, text)])
        return Delta(calls=[self._call(self._name, text)])


class RequiredCalls(ToolParser):
    """The whole answer is a list of {name, parameters}; each call is told when its object is complete."""

    def __init__(self) -> None:
        super().__init__()
        self._text = ""
        self._decoder = json.JSONDecoder()

    def push(self, text: str) -> Delta:
        delta = Delta()
        self._text += text
        while True:
            rest = self._text.lstrip("[, \n\r\t")
            if not rest.startswith("{") or "}" not in text:
                return delta
            try:
                value, end = self._decoder.raw_decode(rest)
            except (ValueError, RecursionError):
                return delta
            calls = self._calls([value])
            if calls is None:
                return delta
            delta.calls += calls
            self._text = rest[end:]


def _json(text: str) -> Any:
    """The value of a JSON text, None if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _json_sequence(text: str) -> list[Any] | None:
    """Several JSON values with semicolons between them."""
    decoder, values, place = json.JSONDecoder(), [], 0
    while place < len(text):
        try:
            value, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            return None
        values.append(value)
        rest = text[place:]
        if rest.strip() and not rest.lstrip().startswith(";"):
            return None
        place += len(rest) - len(rest.lstrip("; \n\r\t"))
    return values


TOOL_PARSERS: dict[str, Callable[[], ToolParser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3Parser,
    "mistral": MistralParser,
}
_SIGNS = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]", "llama3_json": "<|python_tag|>"}
_SHOWS_SPECIAL = frozenset(("mistral", "llama3_json"))
"""Their marks are special tokens, which must not be hidden from the parser."""


# ---- reasoning


class ReasoningParser:
    """<think> reasoning </think> content.

    Args:
        inside: the answer begins within the reasoning (the template has written <think>).
    """

    OPEN, CLOSE = "<think>", "</think>"

    def __init__(self, inside: bool) -> None:
        self._start: str | None = ""
        """What has come while it is open whether <think> stands first; None afterwards."""
        self._inside = inside
        self._held = _Held(self.CLOSE)

    def push(self, text: str) -> tuple[str, str]:
        """(reasoning, content)"""
        if self._start is not None:
            self._start += text
            begin = self._start.lstrip()
            if len(begin) < len(self.OPEN) and self.OPEN.startswith(begin):
                return "", ""
            if begin.startswith(self.OPEN):
                self._inside, text = True, begin[len(self.OPEN) :]
            else:
                text = self._start
            self._start = None
        if not self._inside:
            return "", text
        reasoning, mark = self._held.until_mark(text)
        if mark is None:
            return reasoning, ""
        self._inside = False
        return reasoning, self._held.take()

    def finish(self) -> tuple[str, str]:
        text = self._start or ""
        self._start = None
        text += self._held.take()
        return (text, "") if self._inside else ("", text)


class AnswerParser:
    """Reasoning first, then content with tool calls in it."""

    def __init__(
        self, tools: ToolParser | None, reasoning: ReasoningParser | None, show: bool, first_only: bool
    ) -> None:
        self._tools = tools
        self._reasoning = reasoning
        self._show = show
        self._first_only = first_only

    @property
    def num_calls(self) -> int:
        return 0 if self._tools is None else self._tools.num_calls

    def push(self, text: str) -> Delta:
        reasoning = ""
        if self._reasoning is not None:
            reasoning, text = self._reasoning.push(text)
        return self._limited(Delta(text) if self._tools is None else self._tools.push(text), reasoning)

    def finish(self) -> Delta:
        reasoning, delta = "", Delta()
        if self._reasoning is not None:
            reasoning, text = self._reasoning.finish()
            delta = Delta(text) if self._tools is None else self._tools.push(text)
        if self._tools is not None:
            delta = delta.merged(self._tools.finish())
        return self._limited(delta, reasoning)

    def _limited(self, delta: Delta, reasoning: str) -> Delta:
        delta.reasoning = reasoning if self._show else ""
        if self._first_only:
            delta.calls = [call for call in delta.calls if call.index == 0]
        return delta


@dataclass(frozen=True)
class ParserChoice:
    """Which parsers the answers of one request need."""

    tools: Callable[[], ToolParser] | None
    reasoning: bool
    inside: bool
    show: bool
    first_only: bool

    def new(self) -> AnswerParser | None:
        """For one completion; None if its text is plain content."""
        if self.tools is None and not self.reasoning:
            return None
        reasoning = ReasoningParser(self.inside) if self.reasoning else None
        return AnswerParser(self.tools() if self.tools else None, reasoning, self.show, self.first_only)

    @classmethod
    def of(cls, args: ServerArgs, template: Any, use: ToolUse, body: ChatBody) -> ParserChoice:
        tools: Callable[[], ToolParser] | None = None
        constrained = use.choice in ("named", "required")
        if use.choice == "named":
            tools = lambda: NamedCall(use.name)  # noqa: E731
        elif use.choice == "required":
            tools = RequiredCalls
        elif use.choice == "auto":
            tools = TOOL_PARSERS[tool_form(args.tool_call_parser, args.chat_template or template)]
        reasoning = args.reasoning_parser is not None and not constrained
        return cls(
            tools,
            reasoning,
            args.reasoning_parser == "deepseek_r1",
            body.include_reasoning is not False,
            not use.parallel,
        )


def tool_form(name: str, template: Any) -> str:
    """The parser's name; for "auto" by the sign in the chat template, hermes where there is none."""
    if name != "auto":
        return name
    text = " ".join(template.values()) if isinstance(template, dict) else str(template or "")
    return next((form for form, sign in _SIGNS.items() if sign in text), "hermes")


def shows_special_tokens(name: str, template: Any, use: ToolUse) -> bool:
    """Whether the text must have its special tokens for the parser to see the calls."""
    return use.choice == "auto" and tool_form(name, template) in _SHOWS_SPECIAL
