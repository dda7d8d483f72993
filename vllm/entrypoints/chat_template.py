"""Runs a checkpoint's chat template: jinja2 as transformers sets it up, sandboxed, and bounded in time and size.

A template comes with a model that somebody downloaded. It may read what it is given and write text, and nothing else:
attributes of Python's insides and changes to its arguments are refused by jinja2's sandbox; loops, repetitions and
growing strings are bounded here, so that no template can stop the server or fill its memory.
"""

from __future__ import annotations

import contextvars
import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer, NodeVisitor

from vllm.exceptions import BadRequestError

MAX_TEMPLATE = 1 << 20
"""Characters of a template."""
MAX_TEXT = 1 << 24
"""Characters of the rendered text, of all that its expressions write together, and of any single value."""
MAX_ITERATIONS = 1 << 21
"""Turns of all loops together."""
MAX_NUMBER = 100_000
"""Largest number that a filter or a method takes: a width, a count. jinja2's sandbox has the same bound for ranges."""
MAX_SECONDS = 10.0
"""Processor time of one rendering."""
_MAX_UNWRITTEN = 1 << 30  # characters that loops could write if no condition stood in them


class _Budget:
    """What one rendering may still use."""

    __slots__ = ("iterations", "text", "until", "unwritten")

    def __init__(self) -> None:
        self.iterations = MAX_ITERATIONS
        self.text = MAX_TEXT
        self.unwritten = _MAX_UNWRITTEN
        self.until = time.thread_time() + MAX_SECONDS

    def check_time(self) -> None:
        if time.thread_time() > self.until:
            raise SecurityError(f"it runs for more than {MAX_SECONDS:.0f} seconds")


_budget: contextvars.ContextVar[_Budget] = contextvars.ContextVar("chat_template_budget")


def render_template(source: str, variables: dict[str, Any]) -> str:
    """Raises BadRequestError with the template's own message, or with what is wrong with it."""
    token = _budget.set(_Budget())
    try:
        pieces, size = [], 0
        for piece in compile_template(source).generate(variables):
            size += len(piece)
            if size > MAX_TEXT:
                raise SecurityError(f"it writes more than {MAX_TEXT} characters")
            pieces.append(piece)
        return "".join(pieces)
    except BadRequestError:
        raise
    except RecursionError:
        raise BadRequestError("the chat template recurses too deeply", "chat_template") from None
    except Exception as error:  # a template can raise anything that Python's operators do
        message = getattr(error, "message", None) or str(error) or type(error).__name__
        raise BadRequestError(
            f"the chat template cannot be applied to these messages: {message}", "messages"
        ) from error
    finally:
        _budget.reset(token)


@functools.lru_cache(maxsize=32)
def compile_template(source: str) -> jinja2.Template:
    """Raises BadRequestError naming the line of a syntax error."""
    environment = _environment()
    tree = parse_template(source)
    try:
        code = environment.compile(_Bounded().visit(tree))
    except (TemplateError, SyntaxError, RecursionError) as error:
        raise BadRequestError(f"the chat template cannot be compiled: {error}", "chat_template") from error
    return environment.template_class.from_code(environment, code, environment.make_globals(None))


def parse_template(source: str) -> nodes.Template:
    if len(source) > MAX_TEMPLATE:
        raise BadRequestError(
            f"the chat template has {len(source)} characters; {MAX_TEMPLATE} are the limit", "chat_template"
        )
    try:
        return _environment().parse(source)
    except TemplateSyntaxError as error:
        raise BadRequestError(f"the chat template, line {error.lineno}: {error.message}", "chat_template") from error
    except (TemplateError, RecursionError) as error:
        raise BadRequestError(f"the chat template cannot be read: {error}", "chat_template") from error


@functools.lru_cache(maxsize=1)
def _environment() -> _Environment:
    return _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _Generation],
        finalize=_written,
    )


class _Generation(Extension):
    """`{% generation %}`: marks the assistant's words for training. Here they are text like the rest."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.filters |= {"tojson": _tojson, "join": _join}
        self.filters = {name: _guarded(name, function) for name, function in self.filters.items()}
        self.filters["_concatenated"] = _concatenated
        self.filters["_counted"] = _counted
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _check_operands(operator, left, right)
        return _checked(super().call_binop(context, operator, left, right))

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        receiver = getattr(function, "__self__", None)
        if isinstance(receiver, (str, bytes, int, list, tuple)):
            _check_method(receiver, getattr(function, "__name__", ""), args, kwargs)
        return _checked(super().call(context, function, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """jinja2 hands out its own function for `str.format` and `str.format_map`."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def guarded(*args: Any, **kwargs: Any) -> str:
            _check_format(value.__self__)
            _check_numbers([*args, *kwargs.values()])  # a field can take its width from another
            return wrapped(*args, **kwargs)

        return guarded


class _StaticText(NodeVisitor):
    """Counts the characters of a template's own text below a node."""

    size = 0

    def visit_TemplateData(self, node: nodes.TemplateData) -> None:  # noqa: N802 - jinja2 looks it up by this name
        self.size += len(node.data)


class _Bounded(NodeTransformer):
    """Rewrites what jinja2 gives no hook for: loops are counted, and `~` checks what it makes."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        text = _StaticText()
        for child in node.body:
            text.visit(child)
        size = nodes.Const(text.size, lineno=node.lineno)
        node.iter = nodes.Filter(node.iter, "_counted", [size], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        parts = nodes.Tuple(node.nodes, "load", lineno=node.lineno)
        return nodes.Filter(parts, "_concatenated", [], [], None, None, lineno=node.lineno)


@jinja2.pass_context  # so that a constant list is not taken for the filter's result when the template is compiled
def _counted(_context: Context, items: Any, static_size: int) -> Any:
    """A loop's items. Their number is charged, and the text that the loop's body could write."""
    if isinstance(items, Sized):
        _charge(len(items), static_size)
        return items
    return _one_by_one(items, static_size)


def _one_by_one(items: Iterable[Any], static_size: int) -> Iterator[Any]:
    for item in items:
        _charge(1, static_size)
        yield item


def _charge(turns: int, static_size: int) -> None:
    budget = _budget.get()
    budget.iterations -= turns
    budget.unwritten -= turns * static_size
    if budget.iterations < 0 or budget.unwritten < 0:
        raise SecurityError(f"its loops turn more than {MAX_ITERATIONS} times, or write too much")
    budget.check_time()


def _written(value: Any) -> Any:
    """Every value that an expression writes, also into a variable (`{% set x %}…`) or a macro's result."""
    budget = _budget.get(None)
    if budget is not None:
        budget.text -= len(value) if isinstance(value, str) else 16
        if budget.text < 0:
            raise SecurityError(f"it writes more than {MAX_TEXT} characters")
    return value


def _concatenated(parts: tuple[Any, ...]) -> str:
    texts = [str(part) for part in parts]
    if sum(map(len, texts)) > MAX_TEXT:
        raise SecurityError(f"a text of more than {MAX_TEXT} characters")
    return "".join(texts)


def _checked(value: Any) -> Any:
    budget = _budget.get(None)
    if budget is not None:  # None while constants are folded at compile time
        budget.check_time()
    if isinstance(value, (str, bytes, list, tuple, dict)) and len(value) > MAX_TEXT:
        raise SecurityError(f"a value of more than {MAX_TEXT} entries")
    return value


def _check_operands(operator: str, left: Any, right: Any) -> None:
    if operator == "%" and isinstance(left, str):
        _check_format(left)
    if operator == "*":
        for one, other in ((left, right), (right, left)):
            if isinstance(one, Sized) and isinstance(other, int) and len(one) * other > MAX_TEXT:
                raise SecurityError(f"a repetition of more than {MAX_TEXT} entries")
    if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() + right.bit_length() if operator == "*" else left.bit_length() * abs(right)
        if bits > MAX_NUMBER:
            raise SecurityError("a number of too many digits")


def _check_format(text: str) -> None:
    if re.search(r"[0-9]{6,}|\*", text):
        raise SecurityError("a format with a width that is too large")


def _check_numbers(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > MAX_NUMBER:
            raise SecurityError(f"a number above {MAX_NUMBER} as an argument")


_SIZED_METHODS = frozenset(["ljust", "rjust", "center", "zfill", "expandtabs", "to_bytes"])
_SIZED_FILTERS = frozenset(["center", "indent", "batch", "slice", "wordwrap", "truncate", "tojson", "format", "round"])


def _check_method(receiver: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if name in _SIZED_METHODS:
        _check_numbers([*args, *kwargs.values()])
    if not isinstance(receiver, str):
        return
    if name == "replace" and len(args) >= 2:
        _check_replace(receiver, args[0], args[1])
    elif name == "join" and args and isinstance(args[0], Sized):
        _check_join(receiver, args[0])
    elif name == "expandtabs" and receiver.count("\t") * max([8, *args, *kwargs.values()]) > MAX_TEXT:
        raise SecurityError(f"a text of more than {MAX_TEXT} characters")


def _check_replace(text: str, old: Any, new: Any) -> None:
    if isinstance(old, str) and isinstance(new, str) and len(text) + text.count(old) * len(new) > MAX_TEXT:
        raise SecurityError(f"a text of more than {MAX_TEXT} characters")


def _check_join(separator: str, items: Any) -> None:
    size = len(separator) * len(items)
    for item in items:
        size += len(item) if isinstance(item, str) else 1
        if size > MAX_TEXT:
            raise SecurityError(f"a text of more than {MAX_TEXT} characters")


def _guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose numbers and result are bounded."""

    @functools.wraps(function)  # keeps jinja2's marks on it, too
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if name in _SIZED_FILTERS:
            _check_numbers([*args[1:], *kwargs.values()])
        if name == "format":
            _check_format(str(args[0]))
        elif name == "replace" and len(args) >= 4:
            _check_replace(str(args[1]), args[2], args[3])
        return _checked(function(*args, **kwargs))

    return guarded


@jinja2.pass_eval_context
def _join(
    eval_context: nodes.EvalContext, value: Iterable[Any], d: str = "", attribute: str | int | None = None
) -> str:
    items = list(value)
    _check_join(d, items)
    joined: str = jinja2.filters.sync_do_join(eval_context, items, d, attribute)
    return joined


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As transformers has it: jinja2's own would escape for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    """What templates call to refuse messages."""
    raise BadRequestError(f"the chat template refuses these messages: {message}", "messages")


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
