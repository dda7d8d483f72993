"""Measures, from records made by hand."""

from __future__ import annotations

import math

import pytest

from vllm.benchmarks import measures
from vllm.benchmarks.measures import RequestRecord
from vllm.exceptions import BadRequestError


def record(*children: list[float], start: float = 10.0, error: str | None = None) -> RequestRecord:
    """A request of 5 prompt tokens whose children's tokens came so many seconds after its start."""
    made = RequestRecord(0, 5, start, error=error)
    for index, moments in enumerate(children):
        for moment in moments:
            made.saw(index, 1, start + moment, "x")
        made.saw(index, 0, start + moments[-1], "", "length")
    return made


def test_a_child() -> None:
    samples = measures.collect([record([0.5, 0.75, 1.5])])
    assert samples.ttft == [0.5]
    assert samples.itl == [0.25, 0.75]
    assert samples.tpot == [0.5]
    assert samples.e2el == [1.5]
    assert samples.request_ttft == [0.5]
    assert samples.request_e2el == [1.5]
    assert samples.first_child == samples.last_child == samples.child_spread == []


def test_children_and_their_parent() -> None:
    samples = measures.collect([record([0.5, 1.0], [0.25, 2.0], [1.0])])
    assert samples.ttft == [0.5, 0.25, 1.0]
    assert samples.tpot == [0.5, 1.75]
    assert samples.request_ttft == [0.25]
    assert samples.request_e2el == [2.0]
    assert samples.first_child == [1.0]
    assert samples.last_child == [2.0]
    assert samples.child_spread == [1.0]


def test_several_tokens_in_one_chunk() -> None:
    made = RequestRecord(0, 5, 0.0)
    made.saw(0, 3, 1.0)
    made.saw(0, 2, 3.0)
    samples = measures.collect([made])
    assert samples.tpot == [0.5]  # 2 s for the four tokens after the first
    assert samples.itl == [2.0]


def test_failed_requests_are_left_out() -> None:
    records = [record([1.0]), record([0.1], error="boom"), RequestRecord(2, 5)]
    assert measures.collect(records).ttft == [1.0]
    totals = measures.totals(records, 2.0)
    assert totals["completed"] == 1
    assert totals["failed"] == 2
    assert totals["total_input_tokens"] == 5
    assert totals["total_output_tokens"] == 1
    assert totals["request_throughput"] == 0.5
    assert totals["output_throughput"] == 0.5
    assert totals["total_token_throughput"] == 3.0
    assert measures.totals([], 0.0)["request_throughput"] == 0.0


@pytest.mark.parametrize(("percent", "expected"), [(0, 1.0), (50, 3.0), (90, 4.6), (100, 5.0)])
def test_percentile(percent: float, expected: float) -> None:
    assert measures.percentile([5.0, 1.0, 4.0, 2.0, 3.0], percent) == pytest.approx(expected)
    assert math.isnan(measures.percentile([], percent))


def test_summary_and_names() -> None:
    summary = measures.summarize([1.0, 3.0], [25.0, 99.9])
    assert set(summary) == {"mean", "median", "std", "p25", "p90", "p99", "p99.9"}
    assert summary["mean"] == 2.0
    assert summary["std"] == 1.0
    assert measures.summarize([]) == {}
    flat = measures.in_milliseconds(measures.collect([record([0.5, 1.0])]))
    assert flat["mean_ttft_ms"] == 500.0
    assert flat["p99_e2el_ms"] == 1000.0
    assert "mean_first_child_ms" not in flat


def test_goodput() -> None:
    limits = measures.parse_goodput(["ttft:400", "tpot:600.5"])
    assert limits == {"ttft": 400.0, "tpot": 600.5}
    records = [record([0.3, 0.5]), record([0.3, 0.5], [0.41, 0.5]), record([0.3, 1.0]), record([0.1], error="x")]
    assert measures.count_good(records, limits) == 1
    assert measures.count_good(records, {"e2el": 600.0}) == 2


@pytest.mark.parametrize("word", ["ttft", "ttft:", "ttft:0", "ttft:-1", "ttft:x", "speed:5", "ttft:nan", ""])
def test_bad_goodput(word: str) -> None:
    with pytest.raises(BadRequestError, match="goodput"):
        measures.parse_goodput([word])
