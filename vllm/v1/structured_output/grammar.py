"""From a request's constraint to a grammar in llguidance's form, checked where the caller hears of it.

What a client can write is bounded twice: its size here, and what compiling and each step of it may cost (`limits`).
"""

from __future__ import annotations

import functools
import json
from typing import Any

from vllm.exceptions import BadRequestError, UnsupportedError
from vllm.sampling_params import StructuredOutputsParams

NAME = "structured_outputs"
MAX_CHARACTERS = 256 * 1024
"""Of a schema, a regex or a grammar."""
MAX_CHOICES = 1024


def library() -> Any:
    """llguidance. Raises UnsupportedError where it is not installed."""
    try:
        import llguidance
    except ImportError:
        raise UnsupportedError(f"{NAME} needs the package llguidance (pip install 'vllm[server]')") from None
    return llguidance


def limits() -> Any:
    """What a grammar may cost: some 20 ms to build its lexer, some 10 ms for a step, some 100 MiB of states."""
    return library().LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=150_000,
        step_max_items=50_000,
        max_lexer_states=50_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


def to_grammar(constraint: StructuredOutputsParams) -> str:
    """Raises BadRequestError for what is too long or no JSON, UnsupportedError by name for what is not built."""
    matcher = library().LLMatcher
    if constraint.structural_tag is not None:
        raise UnsupportedError(f"{NAME}.structural_tag is not built here")
    if constraint.disable_additional_properties:
        raise UnsupportedError(f"{NAME}.disable_additional_properties is not built here: say it in the schema")
    if constraint.regex is not None:
        _bounded("regex", constraint.regex)
        return str(matcher.grammar_from_regex(constraint.regex))
    if constraint.choice is not None:
        if len(constraint.choice) > MAX_CHOICES:
            raise BadRequestError(f"{NAME}.choice has {len(constraint.choice)} entries, more than {MAX_CHOICES}", NAME)
        _bounded("choice", "".join(constraint.choice))
        return str(matcher.grammar_from_lark("start: " + " | ".join(map(_literal, constraint.choice))))
    if constraint.grammar is not None:
        _bounded("grammar", constraint.grammar)
        return str(matcher.grammar_from_lark(_lark(constraint.grammar)))
    schema: Any = {"type": "object"} if constraint.json is None else constraint.json
    options: dict[str, Any] = {}
    if constraint.disable_any_whitespace:
        options["whitespace_flexible"] = False
    if constraint.whitespace_pattern is not None:
        options["whitespace_pattern"] = constraint.whitespace_pattern
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema)
        _bounded("json", text)
        if not isinstance(json.loads(text), (dict, bool)):
            raise BadRequestError(f"{NAME}.json must be a JSON schema: an object", NAME)
        return str(matcher.grammar_from_json_schema(text, overrides=options))
    except BadRequestError:
        raise
    except (ValueError, TypeError, RecursionError) as error:
        raise BadRequestError(f"{NAME}.json is not a JSON schema: {error}", NAME) from None


def check(constraint: StructuredOutputsParams) -> None:
    """Raise BadRequestError for a constraint that cannot be compiled. Takes up to some 100 ms, once for each."""
    error = _problem(to_grammar(constraint))
    if error:
        raise BadRequestError(f"{NAME}: {error}", NAME)


@functools.lru_cache(maxsize=256)
def _problem(grammar: str) -> str:
    """What is wrong with a grammar; empty if nothing is."""
    is_error, messages = library().LLMatcher.validate_grammar_with_warnings(grammar, None, limits=limits())
    return " ".join(messages[0].split())[:500] if is_error else ""


def _bounded(field: str, text: str) -> None:
    if len(text) > MAX_CHARACTERS:
        raise BadRequestError(f"{NAME}.{field} has {len(text)} characters, more than {MAX_CHARACTERS}", NAME)


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _lark(text: str) -> str:
    """Lark's form as it is; the EBNF of llama.cpp (GBNF) is translated. Raises BadRequestError."""
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return str(any_to_lark(text))
    except Exception as error:  # noqa: BLE001 - the translator raises what comes
        raise BadRequestError(f"{NAME}.grammar cannot be read: {' '.join(str(error).split())[:300]}", NAME) from None
