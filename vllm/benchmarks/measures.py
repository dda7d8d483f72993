"""What is measured of a request, of its children, and of a run. All times are seconds; results are in milliseconds.

    TTFT   submission -> a child's first token
    ITL    time between two tokens of one child
    TPOT   (last - first token) / (tokens - 1) of one child
    E2EL   submission -> a child's last token

A request with n > 1 has besides: the time until its first child is done, until its last one is, and the spread between.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.exceptions import BadRequestError

PERCENTILES = (90.0, 99.0)
"""Always in the results, whatever else is asked for."""
GOODPUT_MEASURES = ("ttft", "tpot", "e2el")


@dataclass(slots=True)
class ChildRecord:
    """One completion as its reader saw it."""

    arrivals: list[float] = field(default_factory=list)
    """Moment of each token (of each chunk, where a server sends several tokens in one)."""
    tokens: int = 0
    text: str = ""
    finish_reason: str | None = None


@dataclass(slots=True)
class RequestRecord:
    """One request. Moments are of time.perf_counter()."""

    index: int
    prompt_tokens: int
    start: float = 0.0
    end: float = 0.0
    children: dict[int, ChildRecord] = field(default_factory=dict)
    error: str | None = None

    @property
    def completed(self) -> bool:
        return self.error is None and bool(self.children)

    @property
    def output_tokens(self) -> int:
        return sum(child.tokens for child in self.children.values())

    def saw(self, index: int, tokens: int, moment: float, text: str = "", finish_reason: str | None = None) -> None:
        """News of one child."""
        child = self.children.setdefault(index, ChildRecord())
        if tokens:
            child.tokens += tokens
            child.arrivals.append(moment)
        child.text += text
        if finish_reason is not None:
            child.finish_reason = finish_reason
        self.end = max(self.end, moment)


@dataclass(slots=True)
class Samples:
    """Every value of every measure over the completed requests of a run."""

    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)
    e2el: list[float] = field(default_factory=list)
    request_ttft: list[float] = field(default_factory=list)
    request_e2el: list[float] = field(default_factory=list)
    first_child: list[float] = field(default_factory=list)
    last_child: list[float] = field(default_factory=list)
    child_spread: list[float] = field(default_factory=list)


def collect(records: Iterable[RequestRecord]) -> Samples:
    """The measures' values; failed requests are left out."""
    samples = Samples()
    for record in records:
        if not record.completed:
            continue
        firsts, lasts = [], []
        for child in record.children.values():
            if not child.arrivals:
                continue
            first, last = child.arrivals[0] - record.start, child.arrivals[-1] - record.start
            firsts.append(first)
            lasts.append(last)
            samples.ttft.append(first)
            samples.e2el.append(last)
            samples.itl.extend(b - a for a, b in zip(child.arrivals, child.arrivals[1:], strict=False))
            if child.tokens > 1 and len(child.arrivals) > 1:
                samples.tpot.append((last - first) / (child.tokens - 1))
        if not firsts:
            continue
        samples.request_ttft.append(min(firsts))
        samples.request_e2el.append(max(lasts))
        if len(record.children) > 1:
            samples.first_child.append(min(lasts))
            samples.last_child.append(max(lasts))
            samples.child_spread.append(max(lasts) - min(lasts))
    return samples


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the two nearest values; NaN of nothing."""
    if not values:
        return math.nan
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summarize(values: Sequence[float], percentiles: Iterable[float] = ()) -> dict[str, float]:
    """mean, median, std, and p90, p99 and the percentiles asked for. Empty for no values."""
    if not values:
        return {}
    summary = {
        "mean": statistics.fmean(values),
        "median": statistics.median(values),
        "std": statistics.pstdev(values),
    }
    for percent in sorted({*PERCENTILES, *percentiles}):
        summary[f"p{percent:g}"] = percentile(values, percent)
    return summary


def in_milliseconds(samples: Samples, percentiles: Iterable[float] = ()) -> dict[str, float]:
    """Flat, under the names that upstream's result files have: mean_ttft_ms, p99_itl_ms, …"""
    result: dict[str, float] = {}
    percentiles = tuple(percentiles)
    for name in Samples.__slots__:
        for what, value in summarize(getattr(samples, name), percentiles).items():
            result[f"{what}_{name}_ms"] = value * 1000
    return result


def parse_goodput(words: Sequence[str]) -> dict[str, float]:
    """Limits in milliseconds from words such as "ttft:500". Raises BadRequestError."""
    limits: dict[str, float] = {}
    for word in words:
        name, colon, text = word.partition(":")
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not colon or name not in GOODPUT_MEASURES or not value > 0:
            raise BadRequestError(
                f"goodput must be NAME:MILLISECONDS with NAME one of {', '.join(GOODPUT_MEASURES)} and a positive "
                f"number, got {word!r}",
                "goodput",
            )
        limits[name] = value
    return limits


def count_good(records: Iterable[RequestRecord], limits: Mapping[str, float]) -> int:
    """Completed requests whose every child kept every limit (milliseconds)."""
    good = 0
    for record in records:
        if record.completed:
            own = collect([record])
            good += all(value * 1000 <= limit for name, limit in limits.items() for value in getattr(own, name))
    return good


def totals(records: Sequence[RequestRecord], duration: float) -> dict[str, Any]:
    """Counts and rates of a run."""
    done = [record for record in records if record.completed]
    prompt_tokens = sum(record.prompt_tokens for record in done)
    output_tokens = sum(record.output_tokens for record in done)
    return {
        "duration": duration,
        "completed": len(done),
        "failed": len(records) - len(done),
        "total_input_tokens": prompt_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": len(done) / duration if duration > 0 else 0.0,
        "output_throughput": output_tokens / duration if duration > 0 else 0.0,
        "total_token_throughput": (prompt_tokens + output_tokens) / duration if duration > 0 else 0.0,
    }
