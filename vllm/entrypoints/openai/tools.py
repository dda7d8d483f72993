"""The tools of a request: what the template gets, and what the answer must look like when a call is demanded."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from vllm.entrypoints.openai.protocol import ChatBody
from vllm.exceptions import BadRequestError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

MAX_TOOLS = 128
_NAME = re.compile(r"[\w.\-]{1,256}")


@dataclass(frozen=True)
class ToolUse:
    """`choice` is none, auto, required, or named (then `name` is the function's)."""

    choice: str = "none"
    tools: list[dict[str, Any]] = field(default_factory=list)
    name: str = ""
    parallel: bool = True

    @property
    def is_named(self) -> bool:
        return self.choice == "named"

    @property
    def for_template(self) -> list[dict[str, Any]] | None:
        return self.tools if self.choice != "none" and self.tools else None

    def constrain(self, params: SamplingParams) -> None:
        """A demanded call becomes a JSON schema. Raises BadRequestError if the request has a constraint already."""
        if self.choice not in ("required", "named"):
            return
        if params.structured_outputs is not None:
            raise BadRequestError(
                "tool_choice demands a call, which cannot be combined with response_format or structured_outputs",
                "tool_choice",
            )
        params.structured_outputs = StructuredOutputsParams(
            json=self.schema(),
            disable_any_whitespace=True,  # a program reads it, and a small model would write blanks for ever
        )

    def schema(self) -> dict[str, Any]:
        """Named: the function's parameters. Required: a list of {name, parameters}; definitions stand at its root."""
        if self.is_named:
            return _parameters(next(tool for tool in self.tools if tool["function"]["name"] == self.name))
        definitions: dict[str, Any] = {}
        calls = []
        for tool in self.tools:
            parameters = dict(_parameters(tool))
            definitions.update(parameters.pop("$defs", {}))
            calls.append(
                {
                    "type": "object",
                    "properties": {"name": {"enum": [tool["function"]["name"]]}, "parameters": parameters},
                    "required": ["name", "parameters"],
                    "additionalProperties": False,
                }
            )
        schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
        if not self.parallel:
            schema["maxItems"] = 1
        if definitions:
            schema["$defs"] = definitions
        return schema


def _parameters(tool: dict[str, Any]) -> dict[str, Any]:
    parameters: dict[str, Any] | None = tool["function"].get("parameters")
    return parameters or {"type": "object", "properties": {}, "additionalProperties": False}


def read_tools(body: ChatBody) -> ToolUse:
    """Raises BadRequestError naming `tools` or `tool_choice`."""
    tools = _checked(body.tools)
    parallel = body.parallel_tool_calls is not False
    choice = body.tool_choice
    if choice is None:
        choice = "auto" if tools else "none"
    if isinstance(choice, dict):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if choice.get("type", "function") != "function" or not isinstance(name, str):
            raise BadRequestError(
                'tool_choice as an object must be {"type": "function", "function": {"name": …}}', "tool_choice"
            )
        if name not in [tool["function"]["name"] for tool in tools]:
            raise BadRequestError(f"tool_choice names {name!r:.100}, which is not among the tools", "tool_choice")
        return ToolUse("named", tools, name, False)
    if choice not in ("none", "auto", "required"):
        raise BadRequestError(
            f"tool_choice must be none, auto, required or an object, got {choice!r:.80}", "tool_choice"
        )
    if choice == "required" and not tools:
        raise BadRequestError("tool_choice is required, but there are no tools", "tool_choice")
    if not tools:
        choice = "none"
    return ToolUse(choice, tools, "", parallel)


def _checked(tools: Any) -> list[dict[str, Any]]:
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise BadRequestError("tools must be a list", "tools")
    if len(tools) > MAX_TOOLS:
        raise BadRequestError(f"tools must hold at most {MAX_TOOLS} entries, got {len(tools)}", "tools")
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type", "function") != "function":
            raise BadRequestError(f'tools[{index}] must be {{"type": "function", "function": {{…}}}}', "tools")
        name = function.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise BadRequestError(
                f"tools[{index}].function.name must be letters, digits, _, - and ., got {name!r:.80}", "tools"
            )
        if not isinstance(function.get("parameters", {}), (dict, type(None))):
            raise BadRequestError(f"tools[{index}].function.parameters must be an object", "tools")
    return tools
