"""A run's result: one flat JSON object, and the table in which people read it.

Names are upstream's where upstream has the figure (`request_throughput`, `p99_ttft_ms`, …), so that scripts that read
its files read these.
"""

from __future__ import annotations

import json
import math
import os
import platform
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.exceptions import BadRequestError
from vllm.version import __version__

if TYPE_CHECKING:
    from rich.table import Table

Result = dict[str, Any]

TIMES = (
    ("ttft", "time to first token"),
    ("tpot", "time per output token"),
    ("itl", "between two tokens"),
    ("e2el", "end to end"),
    ("request_ttft", "request: first token"),
    ("request_e2el", "request: end to end"),
    ("first_child", "request: first child done"),
    ("last_child", "request: last child done"),
    ("child_spread", "request: first to last child"),
)
"""Measures in order of the table, and what the table calls them."""

_COUNTS = (
    ("completed", "requests completed", "{:,.0f}"),
    ("failed", "requests failed", "{:,.0f}"),
    ("n", "n, completions per request", "{:,.0f}"),
    ("duration", "duration (s)", "{:.2f}"),
    ("total_input_tokens", "prompt tokens", "{:,.0f}"),
    ("prompt_tokens_computed", "prompt tokens computed", "{:,.0f}"),
    ("total_output_tokens", "output tokens", "{:,.0f}"),
    ("steps", "steps of the engine", "{:,.0f}"),
    ("request_throughput", "requests/s", "{:.3f}"),
    ("request_goodput", "requests/s that kept the limits", "{:.3f}"),
    ("output_throughput", "output tokens/s", "{:,.1f}"),
    ("total_token_throughput", "total tokens/s", "{:,.1f}"),
    ("avg_latency", "mean latency (s)", "{:.3f}"),
    ("max_concurrent_requests", "most requests at a time", "{:,.0f}"),
)


def stamp(kind: str) -> Result:
    """What every result begins with."""
    return {
        "benchmark": kind,
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "version": __version__,
        "machine": cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    }


def cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()


def write(path: str | Path, result: Result, *, append: bool = False) -> None:
    """Whole or not at all. With `append` the file holds one result per line, as upstream's does.

    Raises BadRequestError where it cannot be written.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if append:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(_plain(result)) + "\n")
            return
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(_plain(result), file, indent=2)
                file.write("\n")
            os.chmod(name, 0o644)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        raise BadRequestError(f"cannot write the result to {path}: {error}") from None


def _plain(value: Any) -> Any:
    """Without NaN and infinities, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def read(path: str | Path) -> Result:
    """A result that `write` wrote (the last one of an appended file). Raises BadRequestError."""
    try:
        text = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise BadRequestError(f"{path}: cannot be read: {error}") from None
    for candidate in (text, text.rpartition("\n")[2]):
        try:
            value = json.loads(candidate)
        except ValueError:
            continue
        if isinstance(value, dict):
            return value
    raise BadRequestError(f"{path}: not a benchmark's result (a JSON object)")


def show(result: Mapping[str, Any], title: str) -> None:
    """The table, on standard output."""
    from rich.console import Console

    console = Console(highlight=False)
    for table in tables(result, title):
        console.print(table)


def tables(result: Mapping[str, Any], title: str) -> list[Table]:
    """The counts and rates, then the times."""
    from rich.table import Table

    counts = Table(title=title, title_justify="left", show_header=False)
    counts.add_column()
    counts.add_column(justify="right")
    for name, label, form in _COUNTS:
        if result.get(name) is not None:
            counts.add_row(label, form.format(result[name]))
    for name, label in (("bandwidth_fraction", "of the memory bandwidth"), ("flops_fraction", "of the arithmetic")):
        if result.get(name) is not None:
            limit = result[name.replace("fraction", "limit")]
            unit = "GB/s" if name.startswith("bandwidth") else "GFLOP/s"
            counts.add_row(f"{label} ({limit / 1e9:,.0f} {unit})", f"{result[name]:.1%}")
    if result.get("peak_memory_bytes"):
        counts.add_row("peak memory (MiB)", f"{result['peak_memory_bytes'] / 2**20:,.0f}")
    made = [counts]
    rows = [(name, label) for name, label in TIMES if f"mean_{name}_ms" in result]
    if rows:
        asked = _percentiles(result)
        times = Table(title="milliseconds", title_justify="left")
        times.add_column("")
        for word in ("mean", "median", *asked):
            times.add_column(word, justify="right")
        for name, label in rows:
            times.add_row(label, *(_cell(result.get(f"{word}_{name}_ms")) for word in ("mean", "median", *asked)))
        made.append(times)
    return made


def _percentiles(result: Mapping[str, Any]) -> list[str]:
    words = {key.split("_", 1)[0] for key in result if key.startswith("p") and key.endswith("_ms")}
    return sorted((word for word in words if word[1:].replace(".", "").isdigit()), key=lambda word: float(word[1:]))


def _cell(value: Any) -> str:
    return f"{value:,.2f}" if isinstance(value, (int, float)) else "-"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table for a page."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"
