"""How one request is sampled.

`SamplingParams` is checked when it is built and, because it is mutable, again at submission (`verify`). Every refusal
is a `BadRequestError` (a `ValueError`) that names the field, the value and the range.
"""

from __future__ import annotations

import copy
import enum
import math
import operator
from collections.abc import Callable
from numbers import Real
from typing import Any

import msgspec

from vllm.exceptions import BadRequestError
from vllm.logger import init_logger, warn_once

logger = init_logger(__name__)

MAX_INT32 = 2**31 - 1
MAX_STOP_STRINGS = 256
MAX_STOP_CHARACTERS = 4096
"""Longest single stop string or bad word."""
MAX_STOP_TOTAL = 16_384
"""Characters of all stop strings together: they become an automaton of as many states."""
MAX_STOP_TOKEN_IDS = 1024
MAX_BAD_WORDS = 1024
MAX_LOGIT_BIAS = 1024
MAX_LOGITS_PROCESSORS = 64
MAX_ALLOWED_TOKEN_IDS = 2**20
MAX_BEAM_WIDTH = 4096
MIN_TEMPERATURE = 0.01
"""A temperature between 0 and this is raised to it: smaller ones overflow fp32 logits. 0 itself is greedy."""
_MAX_FLOAT32 = 3.4028234e38


class RequestOutputKind(enum.Enum):
    """What an output of a request carries."""

    CUMULATIVE = 0
    """Everything so far, each time."""
    DELTA = 1
    """What is new since the last output."""
    FINAL_ONLY = 2
    """One output, when all has ended."""


class StructuredOutputsParams(msgspec.Struct, omit_defaults=True, repr_omit_defaults=True):
    """Constraint on the output's form: exactly one of json, regex, choice, grammar, json_object, structural_tag."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_fallback: bool = False
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | None = None

    def __post_init__(self) -> None:
        name = "guided_decoding" if isinstance(self, GuidedDecodingParams) else "structured_outputs"
        given = [
            field
            for field in ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
            if getattr(self, field) not in (None, False)
        ]
        if len(given) != 1:
            what = " and ".join(given) if given else "none"
            raise BadRequestError(
                f"{name} takes exactly one of json, regex, choice, grammar, json_object, structural_tag; got {what}",
                name,
            )
        if not (self.json is None or isinstance(self.json, (str, dict))):
            raise BadRequestError(f"{name}.json must be a string or a dict, got {_show(self.json)}", name)
        for field in ("regex", "grammar", "structural_tag", "whitespace_pattern"):
            value = getattr(self, field)
            if value is not None and (not isinstance(value, str) or not value):
                raise BadRequestError(f"{name}.{field} must be a non-empty string, got {_show(value)}", name)
        for field in ("json_object", "disable_fallback", "disable_any_whitespace", "disable_additional_properties"):
            value = getattr(self, field)
            if not isinstance(value, bool) and not (field == "json_object" and value is None):
                raise BadRequestError(f"{name}.{field} must be true or false, got {_show(value)}", name)
        if self.choice is not None:
            if not isinstance(self.choice, (list, tuple)) or not self.choice:
                raise BadRequestError(
                    f"{name}.choice must be a non-empty list of strings, got {_show(self.choice)}", name
                )
            for entry in self.choice:
                if not isinstance(entry, str) or not entry:
                    raise BadRequestError(f"{name}.choice must hold non-empty strings, got {_show(entry)}", name)
            self.choice = list(self.choice)


class GuidedDecodingParams(StructuredOutputsParams, omit_defaults=True, repr_omit_defaults=True):
    """`StructuredOutputsParams` under the name that older programs use (trl 0.24, outlines)."""

    backend: str | None = None


class BeamSearchParams(msgspec.Struct, omit_defaults=True, repr_omit_defaults=True):
    """Of `LLM.beam_search`."""

    beam_width: int
    """Sequences that are kept at every step, and returned."""
    max_tokens: int
    ignore_eos: bool = False
    """Do not end a sequence at end-of-sequence."""
    temperature: float = 0.0
    """Above 0 each beam has its sampled token among the candidates too."""
    length_penalty: float = 1.0
    """Sequences are ranked by their log-probability over length ** length_penalty."""
    include_stop_str_in_output: bool = False
    """Keep the end-of-sequence token in the returned tokens."""

    def __post_init__(self) -> None:
        self.verify()

    def verify(self) -> None:
        """Check everything again, as it stands. Raises BadRequestError."""
        self.beam_width = _integer("beam_width", self.beam_width, 1, MAX_BEAM_WIDTH)
        self.max_tokens = _integer("max_tokens", self.max_tokens, 1, MAX_INT32)
        self.temperature = _number("temperature", self.temperature, 0.0, _MAX_FLOAT32, range_text="0 (greedy) or above")
        self.length_penalty = _number("length_penalty", self.length_penalty, -_MAX_FLOAT32, _MAX_FLOAT32)
        for name in ("ignore_eos", "include_stop_str_in_output"):
            if type(getattr(self, name)) is not bool:
                raise BadRequestError(f"{name} must be True or False, got {_show(getattr(self, name))}", name)


class SamplingParams(msgspec.Struct, omit_defaults=True, repr_omit_defaults=True):
    """Sampling of one request. Mutable, deep-copyable; crosses processes by msgpack unless it has callables."""

    n: int = 1
    """Completions to return, ≥ 1 (the engine's max_n bounds it)."""
    best_of: int | None = None
    """Run this many (≥ n) and return the n with the highest mean token log-probability, best first."""
    presence_penalty: float = 0.0
    """-2 to 2; subtracted once from the logit of every token that the output holds."""
    frequency_penalty: float = 0.0
    """-2 to 2; subtracted per occurrence in the output."""
    repetition_penalty: float = 1.0
    """Above 0; 1 is off. Divides positive and multiplies negative logits of tokens in the prompt or the output."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    """Above 0, at most 1."""
    top_k: int = 0
    """0 or -1 is off; -1 is kept as 0."""
    min_p: float = 0.0
    """0 to 1, relative to the most likely token."""
    seed: int | None = None
    """Child i samples with (seed + i) mod 2**63. -1 counts as None: the engine draws one."""
    stop: str | list[str] | None = None
    """Text that ends a completion; kept as a list."""
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    """Words that are never completed."""
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    """None: to the end of the context."""
    min_tokens: int = 0
    """No end-of-sequence, stop token or stop string ends a completion before this many tokens."""
    logprobs: int | None = None
    """Log-probabilities of the sampled token and this many most likely ones; -1: of the whole vocabulary."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens."""
    flat_logprobs: bool = False
    """Hand log-probabilities out as `FlatLogprobs` in place of lists of dicts."""
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logits_processors: list[Any] | None = None
    """Callables (output_ids, logits) or (prompt_ids, output_ids, logits) -> logits; with the in-process core only."""
    truncate_prompt_tokens: int | None = None
    """Keep only this many of the prompt's last tokens; -1: as many as the model takes."""
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    """`LLM.generate` sets FINAL_ONLY."""
    structured_outputs: StructuredOutputsParams | None = None
    guided_decoding: GuidedDecodingParams | None = None
    """`structured_outputs` under its older name."""
    logit_bias: dict[int, float] | None = None
    """Token id -> number to add to its logit, -100 to 100."""
    allowed_token_ids: list[int] | None = None
    """Only these tokens are ever generated."""
    extra_args: dict[str, Any] | None = None
    skip_reading_prefix_cache: bool | None = None
    """None: only when prompt_logprobs is asked for."""
    finish_after: int | None = None
    """As soon as this many children have ended by themselves, end the others with finish_reason "abort" (ours)."""
    bad_words_token_ids: list[list[int]] | None = None
    """`bad_words` as token sequences, for the runner. Filled in by the processor at submission, not by users."""

    def __post_init__(self) -> None:
        self._check()
        if self.output_kind is RequestOutputKind.DELTA:
            self._refuse_streamed_best_of()

    def verify(self, kind: RequestOutputKind | None = None) -> None:
        """Check everything again, as it stands at submission, for outputs of `kind` (None: of `output_kind`).

        Raises BadRequestError like the constructor, and for `best_of` with any kind but FINAL_ONLY.
        """
        self._check()
        if (self.output_kind if kind is None else kind) is not RequestOutputKind.FINAL_ONLY:
            self._refuse_streamed_best_of()

    def clone(self) -> SamplingParams:
        """A copy that shares no container with this one; logits processors are the same objects in a new list."""
        twin = copy.copy(self)
        for name in ("stop", "stop_token_ids", "bad_words", "logits_processors", "logit_bias", "allowed_token_ids"):
            value = getattr(self, name)
            if value is not None:
                setattr(twin, name, copy.copy(value))
        for name in ("structured_outputs", "guided_decoding", "extra_args"):
            value = getattr(self, name)
            if value is not None:
                setattr(twin, name, copy.deepcopy(value))
        return twin

    @property
    def num_children(self) -> int:
        """Completions that run: `best_of`, or `n`."""
        return self.n if self.best_of is None else self.best_of

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list."""
        stop = self.stop
        if stop is None:
            return []
        return [stop] if isinstance(stop, str) else stop

    @property
    def constraint(self) -> StructuredOutputsParams | None:
        """The one of structured_outputs and guided_decoding that is given."""
        return self.structured_outputs if self.structured_outputs is not None else self.guided_decoding

    # The common request leaves nearly every field at its default, so each check begins with the cheapest test that a
    # default passes. Types are compared exactly (`type(x) is int`), which refuses bools without asking.

    def _check(self) -> None:
        self._check_counts()
        self._check_numbers()
        self._check_lengths()
        self._check_flags()
        self._check_containers()
        if self.temperature == 0.0:
            for name, count in (("n", self.n), ("best_of", self.best_of)):
                if count is not None and count > 1:
                    raise BadRequestError(
                        f"{name} must be 1 with greedy sampling (temperature=0), got {name}={count}: "
                        "all completions would be the same",
                        name,
                    )

    def _check_counts(self) -> None:
        if type(self.n) is not int or self.n < 1 or self.n > MAX_INT32:
            self.n = _integer("n", self.n, 1, MAX_INT32)
        if self.best_of is not None:
            self.best_of = _integer("best_of", self.best_of, 1, MAX_INT32)
            if self.best_of < self.n:
                raise BadRequestError(
                    f"best_of must be at least n, got best_of={self.best_of} and n={self.n}", "best_of"
                )
        if self.finish_after is not None:
            if self.best_of is not None:
                raise BadRequestError("finish_after cannot be combined with best_of", "finish_after")
            self.finish_after = _integer("finish_after", self.finish_after, 1, MAX_INT32)
            if self.finish_after > self.n:
                raise BadRequestError(
                    f"finish_after must be at most n, got finish_after={self.finish_after} and n={self.n}",
                    "finish_after",
                )
        if self.seed is not None:
            self.seed = _integer("seed", self.seed, -(2**63), 2**63 - 1)
            if self.seed == -1:
                self.seed = None

    def _check_numbers(self) -> None:
        if type(self.presence_penalty) is not float or self.presence_penalty != 0.0:
            self.presence_penalty = _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        if type(self.frequency_penalty) is not float or self.frequency_penalty != 0.0:
            self.frequency_penalty = _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if type(self.repetition_penalty) is not float or self.repetition_penalty != 1.0:
            self.repetition_penalty = _number(
                "repetition_penalty", self.repetition_penalty, 0.0, _MAX_FLOAT32, above=True, range_text="above 0"
            )
        if type(self.temperature) is not float or self.temperature != 1.0:
            self.temperature = _number(
                "temperature", self.temperature, 0.0, _MAX_FLOAT32, range_text="0 (greedy) or above"
            )
            if 0.0 < self.temperature < MIN_TEMPERATURE:
                warn_once(
                    logger, "temperature %s is raised to %s, below which fp32 logits overflow", self.temperature, 0.01
                )
                self.temperature = MIN_TEMPERATURE
        if type(self.top_p) is not float or self.top_p != 1.0:
            self.top_p = _number("top_p", self.top_p, 0.0, 1.0, above=True, range_text="above 0 and at most 1")
        if type(self.min_p) is not float or self.min_p != 0.0:
            self.min_p = _number("min_p", self.min_p, 0.0, 1.0)
        if type(self.top_k) is not int or self.top_k != 0:
            self.top_k = max(
                0, _integer("top_k", self.top_k, -1, MAX_INT32, range_text="at least 1, or 0 or -1 for off")
            )

    def _check_lengths(self) -> None:
        if self.max_tokens is not None and (type(self.max_tokens) is not int or not 1 <= self.max_tokens <= MAX_INT32):
            self.max_tokens = _integer("max_tokens", self.max_tokens, 1, MAX_INT32)
        if type(self.min_tokens) is not int or self.min_tokens != 0:
            self.min_tokens = _integer("min_tokens", self.min_tokens, 0, MAX_INT32)
            if self.max_tokens is not None and self.min_tokens > self.max_tokens:
                raise BadRequestError(
                    f"min_tokens must be at most max_tokens, got min_tokens={self.min_tokens} and "
                    f"max_tokens={self.max_tokens}",
                    "min_tokens",
                )
        if self.logprobs is not None:
            self.logprobs = _count_of_logprobs("logprobs", self.logprobs)
        if self.prompt_logprobs is not None:
            self.prompt_logprobs = _count_of_logprobs("prompt_logprobs", self.prompt_logprobs)
        if self.truncate_prompt_tokens is not None:
            text = "at least 1, or -1 for the model's limit"
            self.truncate_prompt_tokens = _integer(
                "truncate_prompt_tokens", self.truncate_prompt_tokens, -1, MAX_INT32, range_text=text
            )
            if self.truncate_prompt_tokens == 0:
                raise BadRequestError(f"truncate_prompt_tokens must be {text}, got 0", "truncate_prompt_tokens")

    def _check_flags(self) -> None:
        if (
            type(self.include_stop_str_in_output)
            is type(self.ignore_eos)
            is type(self.flat_logprobs)
            is type(self.detokenize)
            is type(self.skip_special_tokens)
            is type(self.spaces_between_special_tokens)
            is bool
            and type(self.output_kind) is RequestOutputKind
            and self.skip_reading_prefix_cache is None
        ):
            return
        for name in _FLAG_NAMES:
            value = getattr(self, name)
            if type(value) is not bool:
                raise BadRequestError(f"{name} must be True or False, got {_show(value)}", name)
        if self.skip_reading_prefix_cache is not None and type(self.skip_reading_prefix_cache) is not bool:
            raise BadRequestError(
                f"skip_reading_prefix_cache must be True, False or None, got {_show(self.skip_reading_prefix_cache)}",
                "skip_reading_prefix_cache",
            )
        if type(self.output_kind) is not RequestOutputKind:
            raise BadRequestError(
                f"output_kind must be a RequestOutputKind, got {_show(self.output_kind)}", "output_kind"
            )

    def _check_containers(self) -> None:
        if self.stop is not None:
            self.stop = _strings("stop", self.stop, MAX_STOP_STRINGS)
            total = sum(map(len, self.stop))
            if total > MAX_STOP_TOTAL:
                raise BadRequestError(
                    f"stop strings have at most {MAX_STOP_TOTAL} characters together, got {total}", "stop"
                )
            if self.stop and not self.detokenize:
                raise BadRequestError("stop strings need detokenize=True", "stop")
        if self.stop_token_ids is not None:
            self.stop_token_ids = _token_ids("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)
        if self.bad_words is not None:
            self.bad_words = _strings("bad_words", self.bad_words, MAX_BAD_WORDS)
        if self.bad_words_token_ids and not self.bad_words:
            raise BadRequestError(
                "bad_words_token_ids is filled in by the engine; give bad_words", "bad_words_token_ids"
            )
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = _token_ids("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_TOKEN_IDS)
            if not self.allowed_token_ids:
                raise BadRequestError(
                    "allowed_token_ids must not be empty: no token could be generated", "allowed_token_ids"
                )
        if self.logit_bias is not None:
            self.logit_bias = _biases(self.logit_bias)
        if self.logits_processors is not None:
            self.logits_processors = _callables(self.logits_processors)
        if self.extra_args is not None and not (
            isinstance(self.extra_args, dict) and all(isinstance(key, str) for key in self.extra_args)
        ):
            raise BadRequestError(
                f"extra_args must be a dict with string keys, got {_show(self.extra_args)}", "extra_args"
            )
        for name, kind in (("structured_outputs", StructuredOutputsParams), ("guided_decoding", GuidedDecodingParams)):
            value = getattr(self, name)
            if value is not None:
                if not isinstance(value, kind):
                    raise BadRequestError(f"{name} must be a {kind.__name__}, got {_show(value)}", name)
                value.__post_init__()
        if self.structured_outputs is not None and self.guided_decoding is not None:
            raise BadRequestError(
                "give structured_outputs or guided_decoding (its older name), not both", "guided_decoding"
            )

    def _refuse_streamed_best_of(self) -> None:
        if self.best_of is not None and self.best_of > 1:
            raise BadRequestError(
                "best_of cannot be combined with streaming: which completions are returned is known only at the end",
                "best_of",
            )


_FLAG_NAMES = (
    "include_stop_str_in_output",
    "ignore_eos",
    "flat_logprobs",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)


def _show(value: object) -> str:
    """A value for a message: its repr, cut, with the type where the repr alone could mislead."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - a caller's object may raise anything
        text = "?"
    if len(text) > 80:
        text = text[:77] + "..."
    return f"{text} ({type(value).__name__})"


def _integer(name: str, value: Any, low: int, high: int, *, range_text: str | None = None) -> int:
    """`value` as an int in low..high. Anything with `__index__` (numpy's and torch's integers) counts; bools do not."""
    text = range_text or (f"at least {low}" if high == MAX_INT32 else f"between {low} and {high}")
    number: int | None = None
    if type(value) is int:
        number = value
    elif not isinstance(value, bool) and getattr(getattr(value, "dtype", None), "kind", "") != "b":
        try:
            number = operator.index(value)
        except (TypeError, ValueError, RuntimeError):
            number = None
    if number is None:
        raise BadRequestError(f"{name} must be an int, {text}, got {_show(value)}", name)
    if number > high and high == MAX_INT32:
        text += f" and at most {high}"
    if not low <= number <= high:
        raise BadRequestError(
            f"{name} must be {text}, got {_show(number) if number.bit_length() > 200 else number}", name
        )
    return number


def _number(
    name: str, value: Any, low: float, high: float, *, above: bool = False, range_text: str | None = None
) -> float:
    """`value` as a finite float in low..high (without low itself if `above`)."""
    text = range_text or f"between {low:g} and {high:g}"
    if isinstance(value, bool) or not isinstance(value, Real):
        raise BadRequestError(f"{name} must be a number, {text}, got {_show(value)}", name)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or not low <= number <= high or (above and number <= low):
        raise BadRequestError(f"{name} must be finite and {text}, got {_show(value)}", name)
    return number


def _count_of_logprobs(name: str, value: Any) -> int | None:
    if value is True:  # as upstream: the sampled token and the most likely one
        return 1
    if value is False:
        return None
    return _integer(name, value, -1, MAX_INT32, range_text="at least 0, or -1 for the whole vocabulary")


def _strings(name: str, value: Any, most: int) -> list[str]:
    entries = [value] if isinstance(value, str) else value
    if not isinstance(entries, (list, tuple)):
        raise BadRequestError(f"{name} must be a list of strings, got {_show(value)}", name)
    if len(entries) > most:
        raise BadRequestError(f"{name} must hold at most {most} strings, got {len(entries)}", name)
    for entry in entries:
        if not isinstance(entry, str) or not entry:
            raise BadRequestError(f"{name} must hold non-empty strings, got {_show(entry)}", name)
        if len(entry) > MAX_STOP_CHARACTERS:
            raise BadRequestError(
                f"{name} must hold strings of at most {MAX_STOP_CHARACTERS} characters, got one of {len(entry)}", name
            )
    return list(entries)


def _token_ids(name: str, value: Any, most: int) -> list[int]:
    if not isinstance(value, (list, tuple, set, frozenset)):
        raise BadRequestError(f"{name} must be a list of token ids, got {_show(value)}", name)
    if len(value) > most:
        raise BadRequestError(f"{name} must hold at most {most} token ids, got {len(value)}", name)
    ids = list(value)
    for at, entry in enumerate(ids):
        if type(entry) is not int or not 0 <= entry <= MAX_INT32:
            try:
                ids[at] = _integer(name, entry, 0, MAX_INT32)
            except BadRequestError:
                raise BadRequestError(
                    f"{name} must hold token ids (ints of at least 0), got {_show(entry)}", name
                ) from None
    return sorted(ids) if isinstance(value, (set, frozenset)) else ids


def _biases(value: Any) -> dict[int, float]:
    if not isinstance(value, dict):
        raise BadRequestError(f"logit_bias must be a dict of token id to number, got {_show(value)}", "logit_bias")
    if len(value) > MAX_LOGIT_BIAS:
        raise BadRequestError(f"logit_bias must hold at most {MAX_LOGIT_BIAS} entries, got {len(value)}", "logit_bias")
    biases: dict[int, float] = {}
    for (key, number), token_id in zip(
        value.items(), _token_ids("logit_bias", list(value), MAX_LOGIT_BIAS), strict=True
    ):
        try:
            biases[token_id] = _number("logit_bias", number, -100.0, 100.0)
        except BadRequestError:
            raise BadRequestError(
                f"logit_bias of token {key} must be finite and between -100 and 100, got {_show(number)}", "logit_bias"
            ) from None
    return biases


def _callables(value: Any) -> list[Callable[..., Any]]:
    if not isinstance(value, (list, tuple)) or not all(callable(entry) for entry in value):
        raise BadRequestError(f"logits_processors must be a list of callables, got {_show(value)}", "logits_processors")
    if len(value) > MAX_LOGITS_PROCESSORS:
        raise BadRequestError(
            f"logits_processors must hold at most {MAX_LOGITS_PROCESSORS} callables, got {len(value)}",
            "logits_processors",
        )
    return list(value)
