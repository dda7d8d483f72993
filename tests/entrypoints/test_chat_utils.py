"""Chat messages to prompts: equal to transformers' own rendering, and bounded whatever the template does."""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Any

import jinja2
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models

from vllm.entrypoints import chat_template as sandbox
from vllm.entrypoints.chat_utils import load_chat_template, render, resolve_hf_chat_template
from vllm.exceptions import BadRequestError
from vllm.tokenizers import open_tokenizer

CHATML = """{%- for message in messages %}
{%- if loop.first and message.role != 'system' %}
{{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
{%- endif %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}"""

HEADERS = """{{- bos_token }}
{%- if tools is not none %}
    {{- "<|start_header_id|>system<|end_header_id|>\\n\\nTools:\\n" }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
    {{- "<|eot_id|>" }}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim }}
        {{- '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}<|eot_id|>' }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable and message.content is not string %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""

INSTRUCTIONS = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set ns = namespace(index=0) %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message.role in ["user", "assistant"] %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("roles must alternate user and assistant") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
    {%- if message["role"] == "user" %}
        {%- if loop.first and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"] + eos_token }}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported!") }}
    {%- endif %}
{%- endfor %}"""

TURNS = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set first_user_prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- else -%}
        {%- set first_user_prefix = messages[0]['content'][0]['text'] + '\\n\\n' -%}
    {%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'assistant') -%}
        {%- set role = "model" -%}
    {%- else -%}
        {%- set role = message['role'] -%}
    {%- endif -%}
    {{ '<start_of_turn>' + role + '\\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'text' -%}
                {{ item['text'] | trim }}
            {%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception("Invalid content type") }}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<start_of_turn>model\\n'}}
{%- endif -%}"""

HERMES = """{%- macro json_to_python_type(json_spec) %}
{%- set basic_type_map = {"string": "str", "number": "float", "integer": "int", "boolean": "bool"} %}
{%- if basic_type_map[json_spec.type] is defined %}
    {{- basic_type_map[json_spec.type] }}
{%- elif json_spec.type == "array" %}
    {{- "list[" +  json_to_python_type(json_spec.items) + "]" }}
{%- else %}
    {{- "Any" }}
{%- endif %}
{%- endmacro %}
{%- if tools %}
    {{- "<tools>\\n" }}
    {%- for tool in tools %}
        {%- if tool.function is defined %}{%- set tool = tool.function %}{%- endif %}
        {{- '{"name": ' ~ tool.name|tojson ~ ', "args": "' }}
        {%- for param_name, param_fields in tool.parameters.properties|items %}
            {{- param_name + ": " + json_to_python_type(param_fields) }}
            {%- if not loop.last %}{{- ", " }}{%- endif %}
        {%- endfor %}
        {{- '"}\\n' }}
    {%- endfor %}
    {{- "</tools>\\n" }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "assistant" and message.tool_calls %}
        {{- '<|im_start|>assistant' }}
        {%- for tool_call in message.tool_calls %}
            {{- '\\n<tool_call>\\n{"name": "' ~ tool_call.function.name ~ '", "arguments": ' }}
            {{- tool_call.function.arguments|tojson ~ '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.previtem and loop.previtem.role != "tool" %}{{- '<|im_start|>tool\\n' }}{%- endif %}
        {{- '<tool_response>\\n' + message.content }}
        {%- if not loop.last %}{{- '\\n</tool_response>\\n' }}{%- else %}{{- '\\n</tool_response>' }}{%- endif %}
        {%- if loop.last or loop.nextitem.role != "tool" %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

THINKING = """{%- set ns = namespace(last_query=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if message.role == "user" and not (message.content.startswith('<tool_response>')) %}
        {%- set ns.last_query = index %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == "assistant" and '</think>' in content %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|' ~ message.role ~ '|>' ~ content ~ ('!' if loop.index0 > ns.last_query else '') ~ eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""

TRAINING = """{% for message in messages %}
{% if message.role == 'assistant' %}
<assistant>{% generation %}{{ message.content }}
{% endgeneration %}</assistant>
{% else %}
<{{ message.role }}>{{ message.content }}</{{ message.role }}>
{% endif %}
{% endfor %}
{% if add_generation_prompt %}<assistant>{% endif %}"""

TEMPLATES = {
    "chatml": CHATML,
    "headers": HEADERS,
    "instructions": INSTRUCTIONS,
    "turns": TURNS,
    "hermes": HERMES,
    "thinking": THINKING,
    "training": TRAINING,
}

USER = {"role": "user", "content": "What is 2+2?  \n"}
ANSWER = {"role": "assistant", "content": ' <think>\nhm\n</think>\n\nFour, "é" & 4 < 5.\n'}
SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": [1, 2], "note": "ü's <x>"}}}
    ],
}
RESULT = {"role": "tool", "content": "4", "tool_call_id": "1"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds <numbers> & 'more'",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "array", "items": {"type": "number"}}, "note": {"type": "string"}},
            },
        },
    }
]
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [USER],
    "system": [SYSTEM, USER],
    "answered": [USER, ANSWER],
    "long": [SYSTEM, USER, ANSWER, USER, ANSWER, USER],
    "wrong order": [USER, USER],
    "called": [USER, CALL],
    "called and answered": [SYSTEM, USER, CALL, RESULT, RESULT, {"role": "assistant", "content": "It is 4."}],
    "unknown role": [{"role": "critic", "content": "No."}],
}


class Source:
    """The part of a tokenizer that `render` looks at."""

    def __init__(self, chat_template: str | dict[str, str] | None = None, **special: str) -> None:
        self.chat_template = chat_template
        self.special_tokens_map = special


SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.fixture(scope="module")
def transformers_tokenizer() -> Any:
    transformers = pytest.importorskip("transformers")
    library = tokenizers.Tokenizer(models.BPE({"<s>": 0, "</s>": 1}, []))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=library, **SPECIAL)


def by_transformers(tokenizer: Any, messages: list[dict[str, Any]], template: str, **options: Any) -> str | None:
    """None if the template refuses the messages."""
    try:
        text: str = tokenizer.apply_chat_template(
            copy.deepcopy(messages), chat_template=template, tokenize=False, **options
        )
    except (ValueError, TypeError, jinja2.TemplateError):
        return None
    return text


def ours(messages: list[dict[str, Any]], template: str, **options: Any) -> str | None:
    try:
        return render(Source(**SPECIAL), messages, template, **options)
    except BadRequestError:
        return None


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["", "tools"])
def test_as_transformers_renders(
    name: str, conversation: str, tools: list[dict[str, Any]] | None, transformers_tokenizer: Any
) -> None:
    messages, template = CONVERSATIONS[conversation], TEMPLATES[name]
    for begin in (True, False):
        theirs = by_transformers(transformers_tokenizer, messages, template, tools=tools, add_generation_prompt=begin)
        assert ours(messages, template, tools=tools, add_generation_prompt=begin) == theirs


@pytest.mark.parametrize("conversation", ["one", "answered", "long", "called and answered"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_continue_final_message(name: str, conversation: str, transformers_tokenizer: Any) -> None:
    messages, template = CONVERSATIONS[conversation], TEMPLATES[name]
    theirs = by_transformers(transformers_tokenizer, messages, template, continue_final_message=True)
    text = ours(messages, template, continue_final_message=True, add_generation_prompt=False)
    if (name, conversation) == (
        "thinking",
        "answered",
    ):  # transformers gives up where a part of the message is left out
        assert theirs is None
        assert text is not None
        assert text.endswith('<|assistant|>Four, "é" & 4 < 5.\n')
    else:
        assert text == theirs


def test_variables(transformers_tokenizer: Any) -> None:
    for options in ({"enable_thinking": False}, {"enable_thinking": True}, {}):
        theirs = by_transformers(transformers_tokenizer, [USER], THINKING, add_generation_prompt=True, **options)
        assert ours([USER], THINKING, **options) == theirs
    template = "{{ documents[0].title }}{{ bos_token }}"
    assert render(Source(**SPECIAL), [USER], template, documents=[{"title": "T"}], bos_token="B") == "TB"


@given(texts=st.lists(st.text(max_size=20), min_size=1, max_size=4))
def test_any_text(texts: list[str], transformers_tokenizer: Any) -> None:
    messages = [{"role": ("user", "assistant")[k % 2], "content": text} for k, text in enumerate(texts)]
    for template in (CHATML, HEADERS, TURNS):
        theirs = by_transformers(transformers_tokenizer, messages, template, add_generation_prompt=True)
        assert ours(messages, template) == theirs


def test_the_bundled_models_own_template(smollm2_path: Path) -> None:
    tokenizer = open_tokenizer(smollm2_path)
    transformers_tokenizer = pytest.importorskip("vllm.tokenizers.hf").wrap(tokenizer, "smollm2")
    for messages in ([USER], [SYSTEM, USER], [USER, ANSWER, USER]):
        for begin in (True, False):
            theirs = transformers_tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=begin)
            assert render(tokenizer, messages, add_generation_prompt=begin) == theirs
    ids = tokenizer.encode(render(tokenizer, [USER]), add_special_tokens=False)
    assert ids[0] == tokenizer.token_to_id("<|im_start|>")
    theirs = transformers_tokenizer.apply_chat_template([USER], add_generation_prompt=True)
    assert ids == (theirs if isinstance(theirs, list) else theirs["input_ids"])


def test_a_model_without_a_template_says_so(gemma3_path: Path) -> None:
    tokenizer = open_tokenizer(gemma3_path)
    with pytest.raises(BadRequestError, match="no chat template"):
        render(tokenizer, [USER])
    text = render(tokenizer, [USER], TURNS)
    assert text == "<bos><start_of_turn>user\nWhat is 2+2?<end_of_turn>\n<start_of_turn>model\n"
    assert tokenizer.encode(text, add_special_tokens=False)[:2] == [2, tokenizer.token_to_id("<start_of_turn>")]


# ---- contents


def test_text_parts_are_joined_or_handed_over() -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "a "}, "b", {"type": "refusal", "refusal": "c"}]}
    assert render(Source(), [parts], "{{ messages[0].content }}") == "a \nb\nc"
    looping = "{% for m in messages %}{% for p in m['content'] %}[{{ p.type }}:{{ p.text }}]{% endfor %}{% endfor %}"
    assert render(Source(), [parts], looping) == "[text:a ][text:b][text:c]"
    assert render(Source(), [USER], looping) == f"[text:{USER['content']}]"
    assert render(Source(), [parts], TURNS) == "<start_of_turn>user\nabc<end_of_turn>\n<start_of_turn>model\n"
    assert render(Source(), [parts], looping, content_format="string").startswith("[:][:]")
    assert render(Source(), [USER], "{{ messages[0].content[0].text }}", content_format="openai") == USER["content"]
    with pytest.raises(BadRequestError, match="content_format"):
        render(Source(), [USER], CHATML, content_format="yaml")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "loop",
    [
        "{% for p in message.content %}{{ p.text }}{% endfor %}",
        "{% for p in message['content'] %}{{ p.text }}{% endfor %}",
        "{% for p in message.content | selectattr('type', 'equalto', 'text') %}{{ p.text }}{% endfor %}",
        "{% for p in message.content[:9] %}{{ p.text }}{% endfor %}",
        "{% set parts = message.content %}{% for p in parts %}{{ p.text }}{% endfor %}",
        "{% macro f(content) %}{% for p in content %}{{ p.text }}{% endfor %}{% endmacro %}{{ f(message.content) }}",
    ],
)
def test_loops_over_parts_are_recognized(loop: str) -> None:
    template = "{% for message in messages %}" + loop + "{% endfor %}"
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    assert render(Source(), [parts, USER], template) == "ab" + USER["content"]


def test_none_and_missing_contents_stay_as_they_are() -> None:
    template = "{{ messages[0].content is none }} {{ 'content' in messages[1] }}"
    assert render(Source(), [{"role": "assistant", "content": None}, {"role": "x"}], template) == "True False"


def test_arguments_of_tool_calls_are_read() -> None:
    call = copy.deepcopy(CALL)
    call["tool_calls"][0]["function"]["arguments"] = '{"a": [1, 2], "note": "ü\'s <x>"}'  # type: ignore[index]
    before = copy.deepcopy(call)
    assert render(Source(**SPECIAL), [USER, call], HERMES) == render(Source(**SPECIAL), [USER, CALL], HERMES)
    assert call == before
    call["tool_calls"][0]["function"]["arguments"] = "{not json"  # type: ignore[index]
    with pytest.raises(BadRequestError, match=r"messages\[1\]\.tool_calls\[0\]\.function\.arguments is not JSON"):
        render(Source(**SPECIAL), [USER, call], HERMES)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hi", "messages must be a list, got str"),
        ([], "messages is empty"),
        (["hi"], r"messages\[0\] must be a dict"),
        ([{"content": "x"}], r"messages\[0\]\.role must be a non-empty string"),
        ([{"role": 3, "content": "x"}], r"messages\[0\]\.role"),
        ([USER, {"role": "user", "content": 7}], r"messages\[1\]\.content must be a string or a list"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "type 'image_url'"),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], "type 'input_audio'"),
        ([{"role": "user", "content": [{"text": "no type"}]}], "type None"),
        ([{"role": "user", "content": [{"type": ["text"], "text": "x"}]}], r"type \['text'\]"),
        ([{"role": "user", "content": [{"type": "text", "text": 3}]}], r"content\[0\]\.text must be a string"),
        ([{"role": "user", "content": [4]}], r"content\[0\] must be a string or a dict"),
        ([{"role": "assistant", "tool_calls": "x"}], r"tool_calls must be a list"),
        ([{"role": "assistant", "tool_calls": ["x"]}], r"tool_calls\[0\] must be a dict"),
    ],
)
def test_wrong_messages(messages: Any, message: str) -> None:
    with pytest.raises(BadRequestError, match=message) as caught:
        render(Source(), messages, CHATML)
    assert caught.value.parameter == "messages"


@pytest.mark.parametrize("tools", ["x", [1], {"type": "function"}])
def test_wrong_tools(tools: Any) -> None:
    with pytest.raises(BadRequestError, match="tools must be a list of dicts"):
        render(Source(), [USER], CHATML, tools=tools)


def test_contradictions() -> None:
    with pytest.raises(BadRequestError, match="continue_final_message cannot be combined"):
        render(Source(), [USER], CHATML, continue_final_message=True)
    with pytest.raises(BadRequestError, match="does not write the last message"):
        render(Source(), [USER], "x", add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(BadRequestError, match="no text to continue"):
        render(Source(), [{"role": "assistant"}], CHATML, add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(TypeError):
        render(Source(), [USER], CHATML, messages=[USER])  # type: ignore[misc]


# ---- which template


def test_which_template_applies() -> None:
    several = Source({"default": "D", "tool_use": "T", "rag": "R"})
    assert resolve_hf_chat_template(several) == "D"
    assert resolve_hf_chat_template(several, tools=TOOLS) == "T"
    assert resolve_hf_chat_template(several, "rag", None) == "R"
    assert resolve_hf_chat_template(several, "{{ x }}") == "{{ x }}"
    assert resolve_hf_chat_template(Source("S"), None, None, model_config=object()) == "S"
    assert resolve_hf_chat_template(Source("S"), None, TOOLS, trust_remote_code=False) == "S"
    assert resolve_hf_chat_template(Source()) is None
    assert resolve_hf_chat_template(object()) is None
    with pytest.raises(BadRequestError, match="one of rag, tool_use"):
        resolve_hf_chat_template(Source({"tool_use": "T", "rag": "R"}))
    with pytest.raises(BadRequestError, match="chat_template must be a string"):
        resolve_hf_chat_template(Source(), 3)  # type: ignore[arg-type]


def test_loading_a_template(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("{{ messages }}é", encoding="utf-8")
    assert load_chat_template(file) == load_chat_template(str(file)) == "{{ messages }}é"
    assert load_chat_template("{{ x }}") == "{{ x }}"
    assert load_chat_template("plain", is_literal=True) == "plain"
    assert load_chat_template(None) is None
    with pytest.raises(ValueError, match=r"no-such-file\.jinja"):
        load_chat_template("no-such-file.jinja")


# ---- what a template may do


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('only users') }}", "refuses these messages: only users"),
        ("{{ messages[0].nope.deeper }}", "nope"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ 'a' + 1 }}", "cannot be applied"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "undefined|unsafe"),
        ("{{ messages.__class__.__init__.__globals__ }}", "undefined|unsafe"),
        ("{% if %}", "line 1"),
        ("\n\n{% for x in %}{% endfor %}", "line 3"),
        ("{% endfor %}", "line 1"),
        ("{{ x | no_such_filter }}", "no_such_filter"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recurses too deeply"),
        ("{% include 'x' %}", "cannot be applied"),
    ],
)
def test_errors_of_a_template(template: str, message: str) -> None:
    with pytest.raises(BadRequestError, match=message):
        render(Source(), [USER], template)


BOMBS = {
    "range": "{% for x in range(10**9) %}{% endfor %}",
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "constant loops": "".join(f"{{% for x{k} in [1,2,3,4,5,6,7,8,9,0] %}}" for k in range(9)) + "{% endfor %}" * 9,
    "generators": "{% for a in range(99999)|map('string') %}{% for b in range(99999)|select %}{% endfor %}{% endfor %}",
    "static text": "{% for a in range(99999) %}{% for b in range(20) %}" + "x" * 2000 + "{% endfor %}{% endfor %}",
    "captured": "{% set ns = namespace(x='ab') %}{% for a in range(99) %}{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}"
    "{% set ns.x = y %}{% endfor %}",
    "repetition": "{{ 'x' * 10**9 }}",
    "repetition of a list": "{{ ([0] * 10**9)|length }}",
    "repetition from the left": "{{ 10**9 * 'x' }}",
    "power": "{{ 9**(9**9) }}",
    "product": "{% set ns = namespace(x=9) %}{% for a in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "sums": "{% set ns = namespace(x='ab') %}{% for a in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "concatenations": "{% set n = namespace(x='ab') %}{% for a in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "replace": "{{ ('a' * 99999)|replace('a', 'b' * 99999) }}",
    "replace method": "{{ ('a' * 99999).replace('a', 'b' * 99999) }}",
    "join": "{{ range(99999)|join('x' * 99999) }}",
    "join method": "{{ ('x' * 99999).join(['a'] * 99999) }}",
    "join of long texts": "{{ ([('x' * 99999)] * 99999)|join }}",
    "width": "{{ 'x'.ljust(10**9) }}",
    "zeros": "{{ '1'.zfill(10**9) }}",
    "format method": "{{ '{:>1000000000}'.format(1) }}",
    "percent": "{{ '%1000000000d' % 1 }}",
    "percent star": "{{ '%*d' % (10**9, 1) }}",
    "format filter": "{{ '%1000000000d'|format(1) }}",
    "center": "{{ 'x'|center(10**9) }}",
    "indent": "{{ 'x\\ny'|indent(10**9) }}",
    "batch": "{{ [1]|batch(10**9, 0)|list }}",
    "json": "{{ [1]|tojson(indent=10**9) }}",
    "tabs": "{{ ('\\t' * 99999).expandtabs(99999) }}",
    "macro": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_defused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_SECONDS", 0.2)
    start = time.thread_time()
    with pytest.raises(BadRequestError):
        render(Source(), [USER], BOMBS[name])
    assert time.thread_time() - start < 60  # not hours; the exact time is not the point


def test_a_template_that_is_too_long() -> None:
    with pytest.raises(BadRequestError, match="characters"):
        render(Source(), [USER], "x" * (sandbox.MAX_TEMPLATE + 1))


def test_what_is_written_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_TEXT", 1000)
    assert len(render(Source(), [{"role": "user", "content": "x" * 900}], "{{ messages[0].content }}")) == 900
    with pytest.raises(BadRequestError, match="1000 characters"):
        render(Source(), [{"role": "user", "content": "x" * 1001}], "{{ messages[0].content }}")
    with pytest.raises(BadRequestError, match="1000 characters"):
        render(Source(), [USER], "x" * 1001)


def test_long_conversations_are_no_bomb() -> None:
    messages = [{"role": ("user", "assistant")[k % 2], "content": "words " * 50} for k in range(2000)]
    for template in (CHATML, HEADERS, TURNS, INSTRUCTIONS):
        assert len(render(Source(**SPECIAL), messages, template)) > 600_000


def test_a_template_cannot_change_the_messages() -> None:
    messages = [copy.deepcopy(CALL)]
    render(Source(), messages, "{% set m = messages[0] %}{{ m.tool_calls }}")
    assert messages == [CALL]
    with pytest.raises(BadRequestError):
        render(Source(), messages, "{{ messages[0].update({'role': 'x'}) }}")
    assert messages == [CALL]


def test_harmless_numbers_pass() -> None:
    template = "{{ 1700000000|int }} {{ 'a'.replace('a', 'b', 2) }} {{ '%05.2f' % 3.14159 }} {{ 7 * 6 }} {{ 2**10 }}"
    assert render(Source(), [USER], template) == "1700000000 b 03.14 42 1024"
    assert render(Source(), [USER], "{{ [1, 2]|join(', ') }} {{ 'a-b'|replace('-', '+') }} {{ [3,1]|sort|first }}") == (
        "1, 2 a+b 1"
    )


def test_the_date() -> None:
    text = render(Source(), [USER], "{{ strftime_now('%Y-%m-%d') }}")
    assert time.strptime(text, "%Y-%m-%d").tm_year >= 2024
