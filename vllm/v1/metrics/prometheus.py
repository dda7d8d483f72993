"""The engine's metrics in Prometheus' text format, under upstream's names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vllm.v1.metrics.stats import Counter, Gauge, Histogram, Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_HELP = {
    "vllm:num_requests_running": "Sequences in model execution batches.",
    "vllm:num_requests_waiting": "Sequences waiting to be processed.",
    "vllm:kv_cache_usage_perc": "Used part of the KV cache; 1 is all of it.",
    "vllm:prompt_tokens": "Prompt tokens of accepted requests, once per request whatever n.",
    "vllm:prompt_tokens_computed": "Prompt tokens that went through the model.",
    "vllm:generation_tokens": "Generated tokens.",
    "vllm:prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "vllm:prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "vllm:num_preemptions": "Preemptions by the scheduler.",
    "vllm:request_success": "Completions that ended, by reason.",
    "vllm:time_to_first_token_seconds": "Time from arrival to the first token of a request.",
    "vllm:e2e_request_latency_seconds": "Time from arrival to the end of a request's last completion.",
    "vllm:request_queue_time_seconds": "Time from arrival to the first step.",
    "vllm:request_prefill_time_seconds": "Time from the first step to the first token.",
    "vllm:request_decode_time_seconds": "Time from the first to the last token.",
    "vllm:request_inference_time_seconds": "Time from the first step to the end.",
    "vllm:request_time_per_output_token_seconds": "Decode time per token of the longest completion.",
    "vllm:request_prompt_tokens": "Prompt tokens per request.",
    "vllm:request_generation_tokens": "Generated tokens per request, summed over its completions.",
    "vllm:request_max_num_generation_tokens": "Generated tokens of the longest completion of a request.",
    "vllm:request_params_n": "n of requests.",
    "vllm:request_params_max_tokens": "max_tokens of requests.",
}


def exposition(metrics: Iterable[Metric]) -> bytes:
    """Families in the order of their first metric; a counter's samples end in _total."""
    families: dict[str, list[Metric]] = {}
    for metric in metrics:
        families.setdefault(metric.name, []).append(metric)
    lines: list[str] = []
    for name, members in families.items():
        kind, family = _kind(members[0]), name
        if kind == "counter":
            family = name.removesuffix("_total") + "_total"
        lines.append(f"# HELP {family} {_HELP.get(name.removesuffix('_total'), 'See the documentation.')}")
        lines.append(f"# TYPE {family} {kind}")
        for member in members:
            lines += _samples(family, member)
    return ("\n".join(lines) + "\n").encode()


def _kind(metric: Metric) -> str:
    return {Counter: "counter", Gauge: "gauge", Histogram: "histogram"}[type(metric)]


def _samples(name: str, metric: Metric) -> Sequence[str]:
    if isinstance(metric, Histogram):
        buckets = [
            f"{name}_bucket{_labels({**metric.labels, 'le': bound})} {count}" for bound, count in metric.buckets.items()
        ]
        labels = _labels(metric.labels)
        return [*buckets, f"{name}_sum{labels} {metric.sum!r}", f"{name}_count{labels} {metric.count}"]
    value: Any = metric.value  # type: ignore[attr-defined]
    return [f"{name}{_labels(metric.labels)} {value!r}"]


def _labels(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{key}="{_escape(value)}"' for key, value in labels.items()) + "}"


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
