"""One span per request for OpenTelemetry, sent to the endpoint that `--otlp-traces-endpoint` names.

Spans are made when a request has ended, from the times that the engine kept; nothing is measured for them. A request's
`traceparent` header makes its span a child of the caller's. Needs opentelemetry-sdk and
opentelemetry-exporter-otlp-proto-http ('vllm[otel]').
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from vllm.exceptions import ConfigError, UnsupportedError
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.version import __version__

_NANOSECONDS = 1_000_000_000


class Tracer:
    """Sends spans from a thread of its own; an endpoint that does not answer costs requests nothing.

    Raises UnsupportedError without the packages, ConfigError for an endpoint that is no URL.
    """

    def __init__(self, endpoint: str, model: str) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace import SpanKind
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise UnsupportedError(f"otlp_traces_endpoint needs 'vllm[otel]' ({error})") from None
        if not endpoint.startswith(("http://", "https://")):
            raise ConfigError(f"otlp_traces_endpoint must be an http(s) URL, got {endpoint!r}", "otlp_traces_endpoint")
        self._model = model
        self._provider = TracerProvider(resource=Resource.create({"service.name": "vllm"}))
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("vllm", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._kind = SpanKind.SERVER

    def record(self, headers: Mapping[str, str], params: SamplingParams, output: RequestOutput) -> None:
        """A request that has ended; `output` is its last."""
        stats = output.metrics
        if stats is None:
            return
        now = time.time()
        attributes: dict[str, Any] = {
            "gen_ai.request.id": output.request_id.replace("\x1f", "-"),
            "gen_ai.response.model": self._model,
            "gen_ai.request.n": params.n,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.usage.prompt_tokens": len(output.prompt_token_ids or ()),
            "gen_ai.usage.completion_tokens": stats.num_generation_tokens,
            "gen_ai.latency.e2e": now - stats.arrival_time,
        }
        if params.max_tokens is not None:
            attributes["gen_ai.request.max_tokens"] = params.max_tokens
        if stats.scheduled_ts:
            attributes["gen_ai.latency.time_in_queue"] = stats.scheduled_ts - stats.queued_ts
        if stats.first_token_ts:
            attributes["gen_ai.latency.time_to_first_token"] = stats.first_token_latency
        span = self._tracer.start_span(
            "llm_request",
            context=self._propagator.extract({name: headers[name] for name in _HEADERS if name in headers}),
            kind=self._kind,
            attributes=attributes,
            start_time=int(stats.arrival_time * _NANOSECONDS),
        )
        span.end(int(now * _NANOSECONDS))

    def shutdown(self) -> None:
        """Send what waits."""
        self._provider.shutdown()


_HEADERS = ("traceparent", "tracestate")
