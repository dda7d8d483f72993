"""Counters and histograms."""

import math

import pytest

from vllm.outputs import RequestStateStats
from vllm.v1.messages import SchedulerStats
from vllm.v1.metrics.stats import (
    Counter,
    EngineMetrics,
    FinishedRequest,
    Gauge,
    Histogram,
    HistogramSum,
    IterationStats,
    RequestTimes,
)


def test_histogram():
    histogram = HistogramSum((1, 5, 10))
    for value in (0.5, 1, 2, 5, 7, 100):
        histogram.observe(value)
    read = histogram.read("x", {"a": "b"})
    assert read == Histogram("x", {"a": "b"}, 6, 115.5, {"1": 2, "5": 4, "10": 5, "+Inf": 6})


def test_times_of_a_parent():
    times = RequestTimes(10.0)
    assert times.snapshot().first_token_ts == 0.0
    assert times.saw_first_token(13.0)
    assert not times.saw_first_token(12.5)
    times.child_ended(4, 12.0, 13.0, 20.0, 1)
    times.child_ended(7, 11.0, 12.5, 19.0, 2)
    times.child_ended(1, 0.0, 0.0, 0.0, 0)  # aborted before it ran
    stats = times.snapshot()
    assert stats.num_generation_tokens == 12
    assert stats.num_preemptions == 3
    assert (stats.queued_ts, stats.scheduled_ts, stats.first_token_ts, stats.last_token_ts) == (10.0, 11.0, 12.5, 20.0)
    assert stats.first_token_latency == 2.5
    assert times.max_tokens == 7


def test_the_engines_sums():
    metrics = EngineMetrics("model")
    stats = RequestStateStats(12, 0.0, 10.0, 11.0, 12.5, 20.0, 2.5, 0)
    request = FinishedRequest(3, 100, 16, stats, 7, {"stop": 2, "abort": 1}, 9, 21.0)
    metrics.record(SchedulerStats(num_running=2, prompt_tokens=100, prompt_tokens_computed=84), IterationStats())
    metrics.record(None, IterationStats(time_to_first_tokens=[2.5], finished=[request]))
    read = {(metric.name, metric.labels.get("finished_reason")): metric for metric in metrics.read()}
    assert all(metric.labels["model_name"] == "model" for metric in read.values())
    assert read["vllm:num_requests_running", None] == Gauge("vllm:num_requests_running", metrics.labels, 2)
    assert read["vllm:prompt_tokens_total", None].value == 100
    computed = read["vllm:prompt_tokens_computed_total", None]
    assert isinstance(computed, Counter)
    assert computed.value == 84
    assert read["vllm:request_success_total", "stop"].value == 2
    assert read["vllm:request_success_total", "abort"].value == 1
    for name, total in {
        "vllm:time_to_first_token_seconds": 2.5,
        "vllm:e2e_request_latency_seconds": 11.0,
        "vllm:request_queue_time_seconds": 1.0,
        "vllm:request_prefill_time_seconds": 1.5,
        "vllm:request_decode_time_seconds": 7.5,
        "vllm:request_inference_time_seconds": 10.0,
        "vllm:request_time_per_output_token_seconds": 1.25,
        "vllm:request_prompt_tokens": 100,
        "vllm:request_generation_tokens": 12,
        "vllm:request_max_num_generation_tokens": 7,
        "vllm:request_params_n": 3,
        "vllm:request_params_max_tokens": 9,
    }.items():
        assert (read[name, None].count, read[name, None].sum) == (1, pytest.approx(total)), name


def test_without_statistics_per_request():
    metrics = EngineMetrics("model", per_request=False)
    stats = RequestStateStats(12, 0.0, 10.0, 11.0, 12.5, 20.0, 2.5, 0)
    finished = [FinishedRequest(3, 100, 16, stats, 7, {"stop": 3}, 9, 21.0)]
    metrics.record(SchedulerStats(prompt_tokens=100), IterationStats(finished=finished))
    names = {metric.name for metric in metrics.read()}
    assert "vllm:prompt_tokens_computed_total" in names
    assert not any("request" in name for name in names - {"vllm:num_requests_running", "vllm:num_requests_waiting"})


def test_a_request_that_never_ran():
    metrics = EngineMetrics("model")
    stats = RequestStateStats(0, 0.0, 10.0)
    metrics.record(None, IterationStats(finished=[FinishedRequest(1, 5, 0, stats, 0, {"abort": 1}, None, 11.0)]))
    for metric in metrics.read():
        if isinstance(metric, Histogram):
            assert math.isfinite(metric.sum)
            assert metric.sum >= 0
