"""What is asked of the engine: random prompts, ShareGPT's JSON form, JSON lines, and a small set of our own.

`add_arguments` has upstream's flags; `load` turns them into samples. A missing or malformed file, or one in which
nothing is usable, raises DatasetError saying where.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.exceptions import BadRequestError
from vllm.utils.argparse_utils import human_int

if TYPE_CHECKING:
    from vllm.tokenizers import Tokenizer

OWN_DATA = Path(__file__).resolve().parent / "data" / "conversations.json"
"""Conversations written for this project, in ShareGPT's shape."""
NAMES = ("random", "sharegpt", "custom", "jsonl", "conversations")
ANSWER_LEN = 256
"""Output tokens where a line of a file does not say how many."""

# What upstream leaves out of ShareGPT: turns too short to time, and those beyond the context of small models.
_MIN_LEN, _MAX_PROMPT_LEN, _MAX_TOTAL_LEN = 4, 1024, 2048
_FIRST_RANDOM_ID, _LAST_RANDOM_ID = 100, 40_000


class DatasetError(BadRequestError):
    """The data set is missing, malformed, or has nothing usable in it."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "dataset_path")


@dataclass(frozen=True, slots=True)
class Sample:
    """One request to make."""

    prompt: str | list[int]
    prompt_len: int
    """In tokens; 0 where no tokenizer was at hand."""
    output_len: int


def add_arguments(parser: argparse.ArgumentParser, *, num_prompts: int | None, num_prompts_help: str) -> None:
    """The data set's flags, as upstream has them."""
    group = parser.add_argument_group("data set")
    group.add_argument("--dataset-name", choices=NAMES, help="default: what the other flags imply; custom is jsonl")
    group.add_argument("--dataset-path", "--dataset", metavar="FILE", help="a file in ShareGPT's form, or JSON lines")
    group.add_argument("--num-prompts", type=human_int, default=num_prompts, metavar="N", help=num_prompts_help)
    group.add_argument(
        "--input-len", "--random-input-len", type=human_int, metavar="N", help="prompt tokens (random; default 512)"
    )
    group.add_argument(
        "--output-len",
        "--random-output-len",
        "--sharegpt-output-len",
        "--custom-output-len",
        type=human_int,
        metavar="N",
        help="output tokens (default: random 128, a file's own)",
    )
    group.add_argument(
        "--random-range-ratio",
        type=float,
        default=0.0,
        metavar="R",
        help="random: lengths are uniform in (1-R)·LEN .. (1+R)·LEN (default: 0)",
    )
    group.add_argument(
        "--prefix-len",
        "--random-prefix-len",
        type=human_int,
        default=0,
        metavar="N",
        help="random: tokens that all prompts begin with, beside --input-len (default: 0)",
    )
    group.add_argument("--disable-shuffle", action="store_true", help="take a file's entries in their order")


def dataset_name(args: argparse.Namespace) -> str:
    """The data set that the flags mean."""
    if args.dataset_name is not None:
        return "jsonl" if args.dataset_name == "custom" else str(args.dataset_name)
    if args.dataset_path is not None:
        return "jsonl" if str(args.dataset_path).endswith(".jsonl") else "sharegpt"
    return "random" if args.input_len is not None or args.prefix_len else "conversations"


def load(
    args: argparse.Namespace,
    open_tokenizer: Callable[[], Tokenizer | None],
    *,
    seed: int,
    vocab_size: int | None = None,
    as_text: bool = False,
) -> list[Sample]:
    """The samples that the flags ask for: `num_prompts` of them, or all of a file's where that is None.

    Args:
        open_tokenizer: called where texts must be measured (or, with `as_text`, random ids be turned into text).
        vocab_size: bound of random token ids.
        as_text: random prompts as text, for servers.
    """
    _check(args)
    name = dataset_name(args)
    rng = random.Random(seed)
    if name == "random":
        count = 100 if args.num_prompts is None else args.num_prompts
        return _random(args, count, rng, open_tokenizer() if as_text else None, vocab_size)
    if name == "conversations" and args.dataset_path is not None:
        raise DatasetError("dataset_name conversations is our own file; it takes no dataset_path")
    if name != "conversations" and args.dataset_path is None:
        raise DatasetError(f"dataset_name {name} needs --dataset-path")
    path = OWN_DATA if name == "conversations" else Path(args.dataset_path).expanduser()
    entries = list(_json_lines(path, args.output_len) if name == "jsonl" else _sharegpt(path))
    if not args.disable_shuffle:
        rng.shuffle(entries)
    tokenizer = open_tokenizer()
    if tokenizer is None:
        raise DatasetError(f"{path}: texts need a tokenizer, and this model has none; give --tokenizer")
    samples = _measured(path, entries, tokenizer, args.output_len, args.num_prompts, prune=name != "jsonl")
    if args.num_prompts is not None and len(samples) < args.num_prompts:
        samples = [samples[index % len(samples)] for index in range(args.num_prompts)]
    return samples


def _check(args: argparse.Namespace) -> None:
    for name, least in (("num_prompts", 1), ("input_len", 1), ("output_len", 1), ("prefix_len", 0)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise BadRequestError(f"{name} must be at least {least}, got {value}", name)
    if not 0 <= args.random_range_ratio < 1:
        raise BadRequestError(
            f"random_range_ratio must be at least 0 and below 1, got {args.random_range_ratio}", "random_range_ratio"
        )


# Random


def _random(
    args: argparse.Namespace, count: int, rng: random.Random, tokenizer: Tokenizer | None, vocab_size: int | None
) -> list[Sample]:
    vocab = tokenizer.vocab_size if tokenizer is not None else (vocab_size or _LAST_RANDOM_ID)
    high = min(_LAST_RANDOM_ID, vocab)
    low = min(_FIRST_RANDOM_ID, high // 2)
    ratio = args.random_range_ratio

    def length(mean: int) -> int:
        return rng.randint(max(1, round(mean * (1 - ratio))), round(mean * (1 + ratio))) if ratio else mean

    def ids(size: int) -> list[int]:
        return [rng.randrange(low, high) for _ in range(size)]

    input_len = 512 if args.input_len is None else args.input_len
    output_len = 128 if args.output_len is None else args.output_len
    prefix = ids(args.prefix_len)
    samples = []
    for _ in range(count):
        prompt = prefix + ids(length(input_len))
        if tokenizer is None:
            samples.append(Sample(prompt, len(prompt), length(output_len)))
        else:
            text, size = _text_of(tokenizer, prompt)
            samples.append(Sample(text, size, length(output_len)))
    return samples


def _text_of(tokenizer: Tokenizer, ids: Sequence[int]) -> tuple[str, int]:
    """A text of about as many tokens, and how many it has: decoding random ids and encoding the text again need not
    give the same ids, so that what is too long is cut and encoded once more."""
    text = tokenizer.decode(list(ids))
    again = tokenizer.encode(text, add_special_tokens=False)
    if len(again) > len(ids):
        text = tokenizer.decode(again[: len(ids)])
    return text, len(tokenizer.encode(text))


# Files


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DatasetError(f"data set {path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(f"data set {path}: cannot be read: {error}") from None


def _sharegpt(path: Path) -> Iterator[tuple[str, str | int | None]]:
    """First question and its answer of every conversation that has both."""
    text = _read(path)
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"data set {path}: not JSON: {error}") from None
    if not isinstance(entries, list):
        raise DatasetError(f"data set {path}: expected a list of conversations, got {type(entries).__name__}")
    for number, entry in enumerate(entries):
        turns = entry.get("conversations", entry.get("conversation")) if isinstance(entry, dict) else None
        if not isinstance(turns, list):
            raise DatasetError(f"data set {path}: entry {number} has no list of conversations")
        texts: list[Any] = [turn.get("value") if isinstance(turn, dict) else None for turn in turns[:2]]
        if any(not isinstance(text, str) for text in texts):
            raise DatasetError(f"data set {path}: entry {number} has a turn without a text as its value")
        if len(texts) == 2:
            yield texts[0], texts[1]


def _json_lines(path: Path, output_len: int | None) -> Iterator[tuple[str, str | int | None]]:
    """`{"prompt": text}` by line, with "output_len" or "output_tokens" where --output-len does not say it."""
    for number, line in enumerate(_read(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DatasetError(f"data set {path}, line {number}: not JSON: {error}") from None
        if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str):
            raise DatasetError(f'data set {path}, line {number}: expected an object with a "prompt" that is a text')
        length = entry.get("output_len", entry.get("output_tokens"))
        if length is not None and (type(length) is not int or length < 1):
            raise DatasetError(f"data set {path}, line {number}: output_len must be an int of at least 1")
        yield entry["prompt"], length or output_len or ANSWER_LEN


def _measured(
    path: Path,
    entries: Sequence[tuple[str, str | int | None]],
    tokenizer: Tokenizer,
    output_len: int | None,
    limit: int | None,
    *,
    prune: bool,
) -> list[Sample]:
    samples: list[Sample] = []
    for prompt, answer in entries:
        prompt_len = len(tokenizer.encode(prompt))
        if output_len is not None:
            wanted = output_len
        else:
            wanted = len(tokenizer.encode(answer, add_special_tokens=False)) if isinstance(answer, str) else answer or 0
        too_short = min(prompt_len, wanted) < _MIN_LEN if output_len is None else prompt_len < _MIN_LEN
        too_long = prompt_len > _MAX_PROMPT_LEN or prompt_len + wanted > _MAX_TOTAL_LEN
        if prune and (too_short or too_long):
            continue
        if prompt_len < 1:
            continue
        samples.append(Sample(prompt, prompt_len, wanted))
        if limit is not None and len(samples) == limit:
            break
    if not samples:
        raise DatasetError(f"data set {path}: none of its {len(entries)} entries is usable")
    return samples
