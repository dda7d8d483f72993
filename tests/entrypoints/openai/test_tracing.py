"""Spans for OpenTelemetry, taken by a small collector of the test's own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.entrypoints.openai.server import Server
from tests.models_util import tiny_folder
from vllm import LLM
from vllm.entrypoints.openai.tracing import Tracer
from vllm.exceptions import ConfigError, UnsupportedError

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def collector() -> Iterator[tuple[str, list[bytes]]]:
    bodies: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1/traces", bodies
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_span_per_request(make_server: Callable[..., Server], collector: tuple[str, list[bytes]]) -> None:
    endpoint, bodies = collector
    server = make_server("--otlp-traces-endpoint", endpoint)
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-Id": "mine"}
    body = {"prompt": "abc", "n": 3, "max_tokens": 4, "ignore_eos": True, "temperature": 0.5}
    server.ok("/v1/completions", body, headers=headers)
    server.events("/v1/completions", body)
    server.ok("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1})
    assert server.stop() == 0  # sends what waits
    spans = []
    for data in bodies:
        for resource in ExportTraceServiceRequest.FromString(data).resource_spans:
            assert resource.resource.attributes
            for scope in resource.scope_spans:
                spans += scope.spans
    assert [span.name for span in spans] == ["llm_request"] * 3
    first = next(span for span in spans if span.trace_id.hex() == TRACE)
    assert first.parent_span_id.hex() == PARENT
    assert first.end_time_unix_nano > first.start_time_unix_nano
    attributes = {entry.key: entry.value for entry in first.attributes}
    assert attributes["gen_ai.request.id"].string_value == "cmpl-mine"
    assert attributes["gen_ai.request.n"].int_value == 3
    assert attributes["gen_ai.usage.prompt_tokens"].int_value == 3
    assert attributes["gen_ai.usage.completion_tokens"].int_value == 12
    assert attributes["gen_ai.request.temperature"].double_value == 0.5
    assert attributes["gen_ai.latency.time_to_first_token"].double_value > 0


def test_what_is_refused() -> None:
    with pytest.raises(ConfigError, match="otlp_traces_endpoint"):
        Tracer("there", "m")
    with pytest.raises(UnsupportedError, match="otlp_traces_endpoint"):
        LLM(str(tiny_folder()), otlp_traces_endpoint="http://there")
