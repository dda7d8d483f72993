"""Two results, two environments, or two servers, side by side.

    A.json B.json                   the figures of two result files, and their ratios
    --against PYTHON                this environment's vllm and another interpreter's, in alternating runs
    --url A --against-url B         two OpenAI-compatible servers, in alternating runs

Alternating runs are quoted pair by pair: on a shared machine seconds drift from minute to minute, and the ratio of two
runs beside each other does not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from vllm.benchmarks import portable, results
from vllm.exceptions import BadRequestError, VLLMError
from vllm.utils.argparse_utils import FlexibleArgumentParser, human_int, json_object

HIGHER_IS_BETTER = ("request_throughput", "output_throughput", "total_token_throughput", "request_goodput")
_COMPARED = (*HIGHER_IS_BETTER, "avg_latency", "steps", "prompt_tokens_computed", "peak_memory_bytes")
_CONDITIONS = (
    *("benchmark", "model", "n", "num_prompts", "batch_size", "input_len", "output_len", "request_rate", "dtype"),
    *("quantization", "dataset", "machine", "cores"),
)


class RunError(VLLMError, RuntimeError):
    """One of the two sides could not be measured."""


def add_arguments(parser: FlexibleArgumentParser) -> None:
    parser.add_argument("files", nargs="*", metavar="FILE", help="two result files")
    parser.add_argument("--against", metavar="PYTHON", help="the interpreter of another environment that has a vllm")
    parser.add_argument("--url", help="base URL of a server")
    parser.add_argument("--against-url", metavar="URL", help="base URL of the other")
    parser.add_argument("--model", help="folder, file or bundled name; for servers what they call it")
    parser.add_argument("--against-model", metavar="MODEL", help="the other side's, if another")
    parser.add_argument("--tokenizer", help="for servers: measures prompts")
    parser.add_argument(
        "--case", action="append", metavar="PxN:IN:OUT", help="prompts x n : prompt : output tokens; may be repeated"
    )
    parser.add_argument("--pairs", type=human_int, default=5, metavar="N", help="pairs of runs (default: 5)")
    parser.add_argument("--engine", type=json_object, default={}, metavar="JSON", help="keywords of LLM, both sides")
    parser.add_argument("--against-engine", type=json_object, default={}, metavar="JSON", help="the other side's own")
    parser.add_argument("--output-json", metavar="FILE", help="write the pairs to this file")


def run(args: argparse.Namespace) -> int:
    ways = [bool(args.files), args.against is not None, args.url is not None or args.against_url is not None]
    if sum(ways) != 1:
        raise BadRequestError("give two result files, or --against PYTHON, or --url and --against-url")
    if args.files:
        if len(args.files) != 2:
            raise BadRequestError(f"give two result files, not {len(args.files)}")
        first, second = args.files
        show_files(results.read(first), results.read(second), args.files)
        return 0
    cases = args.case or ["4x8:512:128"]
    for case in cases:
        try:
            portable.parse_case(case)
        except ValueError:
            raise BadRequestError(f"case must be PROMPTSxN:IN:OUT such as 4x8:512:128, got {case!r}", "case") from None
    if args.pairs < 1:
        raise BadRequestError(f"pairs must be at least 1, got {args.pairs}", "pairs")
    if args.against is not None:
        measured = _environments(args, cases)
    else:
        if args.url is None or args.against_url is None:
            raise BadRequestError("two servers need --url and --against-url")
        measured = _servers(args, cases)
    if args.output_json:
        results.write(args.output_json, results.stamp("compare") | {"cases": measured})
    return 0


# Two files


def show_files(a: results.Result, b: results.Result, names: Sequence[str] = ("baseline", "this")) -> None:
    """A table of the figures that both have, with b / a."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="b / a", title_justify="left")
    for column in ("", f"a: {Path(names[0]).name}", f"b: {Path(names[1]).name}", "b / a", ""):
        table.add_column(column, justify="left" if column == "" else "right")
    for name, old, new in rows(a, b):
        ratio = new / old
        table.add_row(name, f"{old:,.4g}", f"{new:,.4g}", f"{ratio:.3f}", _verdict(name, ratio))
    console = Console(highlight=False)
    console.print(table)
    for name in _CONDITIONS:
        if a.get(name) != b.get(name):
            console.print(f"[yellow]not alike:[/yellow] {name}: {a.get(name)} and {b.get(name)}")


def rows(a: results.Result, b: results.Result) -> list[tuple[str, float, float]]:
    """(name, a's, b's) of every figure that both results have. Raises BadRequestError if there is none."""
    times = [key for key in a if key.endswith("_ms") and key.split("_", 1)[0] in ("mean", "median", "p90", "p99")]
    found = []
    for name in (*_COMPARED, *times):
        old, new = a.get(name), b.get(name)
        if all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in (old, new)) and old:
            found.append((name, float(old), float(new)))  # type: ignore[arg-type]
    if not found:
        raise BadRequestError("the two results have no figure in common")
    return found


def _verdict(name: str, ratio: float) -> str:
    if 0.98 <= ratio <= 1.02:
        return "alike"
    return "better" if (ratio > 1) == (name in HIGHER_IS_BETTER) else "worse"


# Two environments


class Side:
    """`portable.py` under one interpreter, with its engine loaded."""

    def __init__(self, name: str, python: str, engine: dict[str, Any]) -> None:
        self.name = name
        self._folder = tempfile.TemporaryDirectory(prefix="vllm-compare-")
        # In an empty folder, so that neither environment sees this project's source beside it.
        script = shutil.copy(portable.__file__, self._folder.name)
        # Absolute, but not resolved: a virtual environment is known by the link it is called through.
        python = os.path.abspath(shutil.which(python) or python)
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        try:
            self._process = subprocess.Popen(
                [python, script],
                cwd=self._folder.name,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        except OSError as error:
            self._folder.cleanup()
            raise BadRequestError(f"{python}: cannot be run: {error}", "against") from None
        try:
            answer = self._ask({"engine": engine})
        except BaseException:
            self.close()
            raise
        self.ready, self.version = float(answer["ready"]), str(answer["version"])

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        stdin, stdout = _pipe(self._process.stdin), _pipe(self._process.stdout)
        try:
            stdin.write(json.dumps(message) + "\n")
            stdin.flush()
            line = stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise RunError(f"{self.name} ended with code {self._process.wait()}; its own words stand above")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RunError(f"{self.name}: {answer['error']}")
        return answer

    def measure(self, case: str, seed: int) -> float:
        """Output tokens per second of one run."""
        answer = self._ask({"case": case, "seed": seed})
        return float(answer["tokens"] / answer["seconds"])

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            _pipe(pipe).close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None  # both were asked for
    return pipe


def _environments(args: argparse.Namespace, cases: Sequence[str]) -> dict[str, Any]:
    if args.model is None:
        raise BadRequestError("--against needs --model", "model")
    own = Side("this environment", sys.executable, {"model": _absolute(args.model), **args.engine})
    try:
        model = _absolute(args.against_model or args.model)
        other = Side(args.against, args.against, {"model": model, **args.engine, **args.against_engine})
    except BaseException:
        own.close()
        raise
    try:
        print(f"this: {own.version}, ready after {own.ready:.1f} s; other: {other.version}, {other.ready:.1f} s")
        return {case: show_pairs(case, alternate(case, args.pairs, own.measure, other.measure)) for case in cases}
    finally:
        own.close()
        other.close()


def _absolute(model: str) -> str:
    """A path as the other process, which runs in another folder, finds it; a bundled name as its file, which any
    engine can read."""
    from vllm.exceptions import ModelNotFoundError
    from vllm.model_executor.loader import resolve_model

    try:
        return str(resolve_model(model).absolute())
    except ModelNotFoundError:
        return model


# Pairs


def alternate(
    case: str, pairs: int, first: Callable[[str, int], float], second: Callable[[str, int], float]
) -> list[tuple[float, float]]:
    """(first's, second's) figure of every pair after one that is thrown away. Who begins changes from pair to pair."""
    found = []
    for pair in range(pairs + 1):
        if pair % 2:
            other = second(case, pair)
            own = first(case, pair)
        else:
            own = first(case, pair)
            other = second(case, pair)
        if pair:
            found.append((own, other))
    return found


def show_pairs(case: str, pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Print the pairs of one case, and return them with their ratios."""
    from rich.console import Console
    from rich.table import Table

    ratios = [own / other for own, other in pairs]
    table = Table(title=f"{case}, output tokens/s", title_justify="left")
    for column in ("pair", "this", "other", "this / other"):
        table.add_column(column, justify="right")
    for number, ((own, other), ratio) in enumerate(zip(pairs, ratios, strict=True), 1):
        table.add_row(str(number), f"{own:,.1f}", f"{other:,.1f}", f"{ratio:.3f}")
    console = Console(highlight=False)
    console.print(table)
    median = statistics.median(ratios)
    console.print(f"{case}: median ratio {median:.3f}, from {min(ratios):.3f} to {max(ratios):.3f}")
    return {"pairs": [list(pair) for pair in pairs], "ratios": ratios, "median_ratio": median}


# Two servers


def _servers(args: argparse.Namespace, cases: Sequence[str]) -> dict[str, Any]:
    from vllm.benchmarks import serve

    def side(url: str, model: str | None) -> Callable[[str, int], float]:
        def measure(case: str, seed: int) -> float:
            prompts, n, prompt_len, output_len = portable.parse_case(case)
            parser = FlexibleArgumentParser()
            serve.add_arguments(parser)
            words = ["--base-url", url, "--dataset-name", "random", "--disable-tqdm", "--disable-limits"]
            words += ["--skip-initial-test"]
            words += ["--num-prompts", str(prompts), "--n", str(n), "--temperature", "1", "--seed", str(seed)]
            words += ["--input-len", str(prompt_len), "--output-len", str(output_len)]
            for flag, value in (("--model", model), ("--tokenizer", args.tokenizer)):
                words += [flag, value] if value else []
            own = parser.parse_args(words)
            serve.check(own)
            result = asyncio.run(serve.measure(own))
            if result["failed"]:
                raise RunError(
                    f"{url}: {result['failed']} of {prompts} requests failed: {next(iter(result['errors']))}"
                )
            return float(result["output_throughput"])

        return measure

    own = side(args.url, args.model)
    other = side(args.against_url, args.against_model or args.model)
    return {case: show_pairs(case, alternate(case, args.pairs, own, other)) for case in cases}
