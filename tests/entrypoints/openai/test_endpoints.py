"""Everything beside the completions; keys, CORS, the OpenAPI document."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

import vllm
from tests.entrypoints.openai.server import Server


def test_health_version_models(server: Server) -> None:
    assert server.client.get("/health").status_code == 200
    assert server.client.get("/ping").status_code == 200
    assert server.client.get("/version").json() == {"version": vllm.__version__}
    (model,) = server.client.get("/v1/models").json()["data"]
    assert (model["id"], model["object"], model["root"], model["max_model_len"]) == ("tiny", "model", "tiny", 1024)
    assert server.client.get("/v1/models/tiny").json() == model
    assert server.client.get("/load").json() == {"server_load": 0}
    info = server.client.get("/server_info").json()
    assert (info["max_n"], info["max_queue_size"]) == (512, 2000)


def test_tokenize_and_detokenize(server: Server) -> None:
    answer = server.ok("/tokenize", {"prompt": "héllo", "return_token_strs": True})
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"]) == 6
    assert answer["max_model_len"] == 1024
    assert server.ok("/detokenize", {"tokens": answer["tokens"]})["prompt"] == "héllo"
    assert server.ok("/tokenize", {"prompt": ""})["tokens"] == []
    assert server.error("/tokenize", {})["param"] == "prompt"
    assert server.error("/detokenize", {"tokens": [320]})["param"] == "tokens"
    assert server.error("/detokenize", {"tokens": ["a"]})["param"] == "tokens"
    assert server.error("/detokenize", {})["param"] == "tokens"


def test_metrics(server: Server) -> None:
    server.post("/reset_prefix_cache")
    before = {name: server.metric(name) for name in COUNTED}
    server.ok("/v1/completions", {"prompt": "y" * 50, "n": 3, "max_tokens": 4, "ignore_eos": True})
    server.wait_idle()
    change = {name: server.metric(name) - before[name] for name in COUNTED}
    assert change == COUNTED
    families = {family.name: family for family in text_string_to_metric_families(server.client.get("/metrics").text)}
    for name, kind in FAMILIES.items():
        assert families[name].type == kind
        assert all(sample.labels["model_name"] == "tiny" for sample in families[name].samples)


COUNTED = {
    "vllm:prompt_tokens_total": 50,
    "vllm:prompt_tokens_computed_total": 50,
    "vllm:generation_tokens_total": 12,
    "vllm:request_success_total": 3,
    "vllm:time_to_first_token_seconds_count": 1,
    "vllm:request_params_n_count": 1,
    "vllm:request_params_n_sum": 3,
    "vllm:request_max_num_generation_tokens_sum": 4,
}
FAMILIES = {
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:prefix_cache_hits": "counter",
    "vllm:prefix_cache_queries": "counter",
    "vllm:num_preemptions": "counter",
    "vllm:e2e_request_latency_seconds": "histogram",
    "vllm:request_generation_tokens": "histogram",
}


def test_openapi_describes_the_bodies(server: Server) -> None:
    document = server.client.get("/openapi.json").json()
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/abort_requests"):
        schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert schema["type"] == "object"
        assert "$ref" not in str(schema)
    assert (
        "finish_after"
        in document["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"][
            "properties"
        ]
    )


@pytest.fixture(scope="module")
def keyed() -> object:
    from tests.entrypoints.openai.server import tiny_server
    from tests.models_util import tiny_folder

    server = tiny_server(
        tiny_folder(), "--api-key", "one", "--api-key", "two", "--allowed-origins", "https://app.example",
        "--served-model-name", "a", "b", "--disable-fastapi-docs",
        "--max-queue-size", "0", "--max-num-seqs", "4", "--enable-log-requests",
        "--shutdown-grace", "0",
    )  # fmt: skip
    yield server
    server.kill()


def test_keys(keyed: Server) -> None:
    for header in ({}, {"Authorization": "Bearer three"}, {"Authorization": "one"}, {"Authorization": "Basic one"}):
        for path in ("/v1/completions", "/tokenize", "/abort_requests", "/reset_prefix_cache", "/sleep", "/nothing"):
            response = keyed.post(path, {}, headers=header)
            assert response.status_code == 401, path
            assert response.headers["www-authenticate"] == "Bearer"
        assert keyed.client.get("/v1/models", headers=header).status_code == 401
    for path in ("/health", "/ping", "/version", "/metrics"):
        assert keyed.client.get(path).status_code == 200
    for key in ("one", "two"):
        with openai.OpenAI(base_url=keyed.url + "/v1", api_key=key) as client:
            assert [model.id for model in client.models.list()] == ["a", "b"]
            assert client.completions.create(model="b", prompt="x", max_tokens=1).model == "b"
    assert not any("one" in line or "two" in line for line in keyed.log if "access" in line)


def test_cors_only_for_the_origins_given(keyed: Server, server: Server) -> None:
    ask = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}
    assert keyed.client.options("/v1/completions", headers=ask).headers["access-control-allow-origin"] == ask["Origin"]
    other = keyed.client.options("/v1/completions", headers=ask | {"Origin": "https://evil.example"})
    assert "access-control-allow-origin" not in other.headers
    assert "access-control-allow-origin" not in server.client.get("/health", headers=ask).headers


def test_no_documents(keyed: Server) -> None:
    headers = {"Authorization": "Bearer one"}
    for path in ("/docs", "/redoc", "/openapi.json"):
        assert keyed.client.get(path, headers=headers).status_code == 404


def test_the_queue_is_bounded(keyed: Server) -> None:
    headers = {"Authorization": "Bearer one"}
    body = {"prompt": "abc", "n": 4, "max_tokens": 1000, "ignore_eos": True}
    error = keyed.error("/v1/completions", body | {"n": 5}, 400, headers=headers)
    assert error["param"] == "n"
    with keyed.client.stream("POST", "/v1/completions", json=body | {"stream": True}, headers=headers) as response:
        lines = response.iter_lines()  # kept: when it goes, the connection goes
        next(lines)
        refused = keyed.post("/v1/completions", {"prompt": "abc"}, headers=headers)
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert keyed.client.get("/health").status_code == 200
    answer = None
    for _ in range(200):  # the cut stream's children end within a step
        answer = keyed.post("/v1/completions", {"prompt": "abc", "n": 4, "max_tokens": 1}, headers=headers)
        if answer.status_code == 200:
            break
    assert answer is not None
    assert answer.status_code == 200


def test_sleep(make_server: Callable[..., Server]) -> None:
    server = make_server("--enable-sleep-mode")
    body = {"prompt": "abc", "max_tokens": 4, "seed": 1}
    text = server.ok("/v1/completions", body)["choices"][0]["text"]
    assert server.post("/sleep?level=2").status_code == 200
    assert server.client.get("/is_sleeping").json() == {"is_sleeping": True}
    assert server.post("/v1/completions", body).status_code in (500, 503)
    assert server.error("/sleep?level=7")["param"] == "level"
    assert server.error("/wake_up?tags=nothing")["message"]
    assert server.post("/wake_up").status_code == 200
    assert server.ok("/v1/completions", body)["choices"][0]["text"] == text


def test_without_a_tokenizer(make_server: Callable[..., Server]) -> None:
    server = make_server("--skip-tokenizer-init")
    body = {"prompt": [1, 2, 3], "n": 2, "max_tokens": 4, "logprobs": 1, "return_token_ids": True, "ignore_eos": True}
    for choice in server.ok("/v1/completions", body | {"echo": True})["choices"]:
        assert choice["text"] == ""
        assert len(choice["token_ids"]) == 4
        assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in [1, 2, 3, *choice["token_ids"]]]
    for path, wrong in (
        ("/v1/completions", {"prompt": "text"}),
        ("/v1/completions", {"prompt": [1], "stop": "a"}),
        ("/v1/completions", {"prompt": [1], "guided_choice": ["a"]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [1]}),
    ):
        assert "tokenizer" in server.error(path, wrong)["message"]


def test_the_older_way_to_start() -> None:
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", "/no/such/model"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "/no/such/model" in done.stderr
