"""From chat messages to the text of a prompt: checks the messages, picks the chat template, and runs it."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from jinja2 import nodes

from vllm.entrypoints.chat_template import parse_template, render_template
from vllm.exceptions import BadRequestError

ContentFormat = Literal["auto", "string", "openai"]
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Kinds of content parts that are text, and the field that has it."""
_CONTINUE = "\ue0c0continue here\ue0c1 "
"""Marks the end of the message to continue. A template that trims contents takes the last space away, which shows
whether the message's own space at the end is to be kept."""
_OWN_VARIABLES = frozenset(["messages", "tools", "add_generation_prompt"])


class TemplateSource(Protocol):
    """The part of a tokenizer that matters here; ours and transformers' have it."""

    chat_template: str | dict[str, str] | None

    @property
    def special_tokens_map(self) -> dict[str, Any]: ...


def render(
    tokenizer: TemplateSource,
    messages: Sequence[dict[str, Any]],
    chat_template: str | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[dict[str, Any]] | None = None,
    *,
    content_format: ContentFormat = "auto",
    documents: Sequence[dict[str, Any]] | None = None,
    **variables: Any,
) -> str:
    """The prompt for a conversation. Encode it with `add_special_tokens=False`: templates write the special tokens.

    Args:
        messages: each has a `role`, and a `content` that is a string, a list of text parts, or None.
        chat_template: a template, or the name of one of the checkpoint's; None takes the checkpoint's own.
        add_generation_prompt: end with the beginning of an answer.
        continue_final_message: leave the last message open, so that the answer continues it.
        tools: descriptions of functions, as OpenAI's API has them.
        content_format: how contents are handed to the template: "string" joins text parts with line breaks, "openai"
            hands over lists of parts, "auto" looks at what the template does with them.
        documents, variables: further variables of the template.

    Raises BadRequestError for messages of a wrong form, and with the template's own message if it refuses them.
    """
    if add_generation_prompt and continue_final_message:
        raise BadRequestError(
            "continue_final_message cannot be combined with add_generation_prompt: one continues the last message, the "
            "other begins a new one",
            "continue_final_message",
        )
    taken = sorted(_OWN_VARIABLES.intersection(variables))
    if taken:
        raise BadRequestError(f"chat_template_kwargs cannot set {', '.join(taken)}", "chat_template_kwargs")
    source = resolve_hf_chat_template(tokenizer, chat_template, tools)
    if source is None:
        raise BadRequestError(
            "the model has no chat template: pass chat_template=, or give a prompt in place of messages",
            "chat_template",
        )
    conversation = _conversation(messages, *_content_style(source, content_format))
    if continue_final_message:
        _open_last(conversation)
    text = render_template(
        source,
        {
            **tokenizer.special_tokens_map,
            "documents": documents,
            **variables,
            "messages": conversation,
            "tools": _tools(tools),
            "add_generation_prompt": add_generation_prompt,
        },
    )
    return _cut(text) if continue_final_message else text


def resolve_hf_chat_template(
    tokenizer: Any,
    chat_template: str | None = None,
    tools: Sequence[dict[str, Any]] | None = None,
    model_config: Any = None,  # noqa: ARG001 - lm-eval passes it
    *,
    trust_remote_code: bool | None = None,  # noqa: ARG001 - older programs pass it
) -> str | None:
    """The template that applies: the one given, or the one of that name; else the tokenizer's own, that for tools if it
    has one and there are tools. None if there is none. Takes transformers' tokenizers, too."""
    own: str | dict[str, str] | None = getattr(tokenizer, "chat_template", None)
    if chat_template is not None:
        if not isinstance(chat_template, str):
            raise BadRequestError(
                f"chat_template must be a string, got {type(chat_template).__name__}", "chat_template"
            )
        return own.get(chat_template, chat_template) if isinstance(own, dict) else chat_template
    if not isinstance(own, dict):
        return own
    if tools and "tool_use" in own:
        return own["tool_use"]
    if "default" not in own:
        raise BadRequestError(
            f"the model has several chat templates and no default: choose one of {', '.join(sorted(own))}",
            "chat_template",
        )
    return own["default"]


def load_chat_template(chat_template: str | Path | None, *, is_literal: bool = False) -> str | None:
    """A template from a file, or the text itself if it is one. Raises ValueError naming a file that cannot be read."""
    if chat_template is None or is_literal:
        return None if chat_template is None else str(chat_template)
    if isinstance(chat_template, str) and any(mark in chat_template for mark in "{}\n"):
        return chat_template
    try:
        return Path(chat_template).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"chat template {chat_template}: neither a template nor a readable file ({error})") from error


def _conversation(messages: Any, as_parts: bool, wrap: bool) -> list[dict[str, Any]]:
    if not isinstance(messages, (list, tuple)):
        raise BadRequestError(f"messages must be a list, got {type(messages).__name__}", "messages")
    if not messages:
        raise BadRequestError("messages is empty: a conversation has at least one message", "messages")
    return [_message(index, message, as_parts, wrap) for index, message in enumerate(messages)]


def _message(index: int, message: Any, as_parts: bool, wrap: bool) -> dict[str, Any]:
    place = f"messages[{index}]"
    if not isinstance(message, dict):
        raise BadRequestError(f"{place} must be a dict, got {type(message).__name__}", "messages")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise BadRequestError(f"{place}.role must be a non-empty string, got {role!r:.80}", "messages")
    result = dict(message)
    content = message.get("content")
    if isinstance(content, (list, tuple)):
        texts = [_part(f"{place}.content[{k}]", part) for k, part in enumerate(content)]
        result["content"] = [{"type": "text", "text": text} for text in texts] if as_parts else "\n".join(texts)
    elif isinstance(content, str):
        result["content"] = [{"type": "text", "text": content}] if wrap else content
    elif content is not None:
        raise BadRequestError(
            f"{place}.content must be a string or a list of parts, got {type(content).__name__}", "messages"
        )
    calls = message.get("tool_calls")
    if calls is not None:
        if not isinstance(calls, (list, tuple)):
            raise BadRequestError(f"{place}.tool_calls must be a list, got {type(calls).__name__}", "messages")
        result["tool_calls"] = [_tool_call(f"{place}.tool_calls[{k}]", call) for k, call in enumerate(calls)]
    return result


def _part(place: str, part: Any) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise BadRequestError(f"{place} must be a string or a dict, got {type(part).__name__}", "messages")
    kind = part.get("type")
    field = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if field is None:
        raise BadRequestError(f"{place} is of the type {kind!r:.80}: this engine takes text only", "messages")
    text = part.get(field)
    if not isinstance(text, str):
        raise BadRequestError(f"{place}.{field} must be a string, got {type(text).__name__}", "messages")
    return text


def _tool_call(place: str, call: Any) -> dict[str, Any]:
    """OpenAI's API has a call's arguments as JSON text; templates expect them read."""
    if not isinstance(call, dict):
        raise BadRequestError(f"{place} must be a dict, got {type(call).__name__}", "messages")
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return dict(call)
    text = function["arguments"]
    try:
        arguments = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"{place}.function.arguments is not JSON: {error}", "messages") from None
    return {**call, "function": {**function, "arguments": arguments}}


def _tools(tools: Any) -> list[dict[str, Any]] | None:
    if tools is None:
        return None
    if not isinstance(tools, (list, tuple)) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRequestError("tools must be a list of dicts", "tools")
    return list(tools) or None


def _open_last(conversation: list[dict[str, Any]]) -> None:
    content = conversation[-1].get("content")
    if isinstance(content, str):
        conversation[-1]["content"] = content + _CONTINUE
    elif isinstance(content, list) and content:
        content[-1]["text"] += _CONTINUE
    else:
        raise BadRequestError("continue_final_message: the last message has no text to continue", "messages")


def _cut(text: str) -> str:
    mark = _CONTINUE.rstrip()
    place = text.rfind(mark)
    if place < 0:
        raise BadRequestError("continue_final_message: the chat template does not write the last message", "messages")
    return text[:place] if text.startswith(_CONTINUE, place) else text[:place].rstrip()


def _content_style(source: str, content_format: ContentFormat) -> tuple[bool, bool]:
    """(lists of parts are handed over as lists, strings too become lists)."""
    if content_format == "string":
        return False, False
    if content_format == "openai":
        return True, True
    if content_format != "auto":
        raise BadRequestError(
            f"content_format must be auto, string or openai, got {content_format!r:.80}", "chat_template_content_format"
        )
    return _loops_over_content(source)


@functools.lru_cache(maxsize=32)
def _loops_over_content(source: str) -> tuple[bool, bool]:
    """(the template loops over a message's content, it does so without asking whether it is a string)."""
    tree = parse_template(source)
    aliases = {"content"}
    for node in tree.find_all(nodes.Assign):
        if isinstance(node.target, nodes.Name) and _is_content(node.node, aliases):
            aliases.add(node.target.name)
    loops = any(_is_content(node.iter, aliases) for node in tree.find_all(nodes.For))
    asks = any(test.name == "string" and _is_content(test.node, aliases) for test in tree.find_all(nodes.Test))
    return loops, loops and not asks


def _is_content(node: nodes.Node, aliases: Iterable[str]) -> bool:
    """`message.content`, `message['content']`, a variable that was set to it, or one of these filtered or sliced."""
    if isinstance(node, nodes.Filter):
        return node.node is not None and _is_content(node.node, aliases)
    if isinstance(node, nodes.Getitem):
        if isinstance(node.arg, nodes.Const):
            return bool(node.arg.value == "content")
        return isinstance(node.arg, nodes.Slice) and _is_content(node.node, aliases)
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    return isinstance(node, nodes.Name) and node.name in aliases
