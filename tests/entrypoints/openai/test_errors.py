"""What a client can do wrong: 4xx with the field's name, never a 5xx, and the loop goes on."""

from __future__ import annotations

import json
import socket
import threading
import time
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.entrypoints.openai.server import Server
from vllm.entrypoints.openai.protocol import ChatBody, CompletionBody

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
OK: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "a", "max_tokens": 1},
    CHAT: {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
}


@pytest.mark.parametrize("path", OK)
@pytest.mark.parametrize("n", [0, -1, 2.0, 2.5, "2", True, [2], {}, 10**30, 513])
def test_rule_01_and_02_n(server: Server, path: str, n: Any) -> None:
    error = server.error(path, OK[path] | {"n": n})
    assert error["param"] == "n"
    assert "n" in error["message"].replace(":", " ").split()
    server.ok(path, OK[path] | {"n": 2})


def test_rule_03_greedy_with_n(server: Server) -> None:
    error = server.error(COMPLETIONS, OK[COMPLETIONS] | {"n": 2, "temperature": 0})
    assert "n" in error["message"]
    assert "temperature" in error["message"]


def test_rule_14_a_prompt_that_never_fits(server: Server) -> None:
    for prompt in ("x" * 1500, [1] * 1500, "x" * 10_000_000, ["a", "x" * 1500]):
        error = server.error(COMPLETIONS, {"prompt": prompt})
        assert "maximum context length" in error["message"]
        assert "1024" in error["message"]
    error = server.error(CHAT, {"messages": [{"role": "user", "content": "x" * 1500}]})
    assert "maximum context length" in error["message"]


RANGES: dict[str, list[Any]] = {
    "temperature": [-1, "1", True, [1]],
    "top_p": [0, 1.5, "1"],
    "top_k": [-2, 1.5],
    "min_p": [-0.1, 2],
    "presence_penalty": [3, "0"],
    "frequency_penalty": [-3],
    "repetition_penalty": [0, -1],
    "max_tokens": [-1, 1.5, "3", True],
    "min_tokens": [-1, 5],
    "stop": [3, [3], [""], {}, ["a"] * 300],
    "stop_token_ids": [3, ["a"], [-1], [10**9], [1.5]],
    "logit_bias": [[1], {"a": 1}, {"1": "a"}, {"1": 1e9}, {"99999": 1}, {str(i): 1 for i in range(1100)}],
    "seed": [1.5, "1", 10**30, True],
    "best_of": [0, "2"],
    "finish_after": [0, 2],
    "logprobs": [-5, "x"],
    "prompt_logprobs": [-5, 21, 1.5],
    "allowed_token_ids": [[], ["a"], 3, [10**9]],
    "bad_words": [[3], 3],
    "ignore_eos": [1, "true"],
    "stream": ["true", 1],
    "echo": [1],
    "priority": ["1", 5],
    "truncate_prompt_tokens": [0, -2, "1"],
    "response_format": [3, {}, {"type": "xml"}, {"type": "json_schema"}],
    "structured_outputs": [3, {}, {"regex": 3}, {"regex": "a", "choice": ["b"]}, {"choice": []}],
    "stream_options": [3, {"include_usage": 1}, {"include_usage": True}],
    "request_id": [3, "", "a" * 200, "a\nb"],
    "cache_salt": [3, ""],
    "skip_special_tokens": ["no"],
    "return_token_ids": [1],
    "suffix": [3],
    "model": [3],
}


@pytest.mark.parametrize("field", RANGES)
def test_wrong_values_name_their_field(server: Server, field: str) -> None:
    for path in OK:
        if field not in (CompletionBody if path == COMPLETIONS else ChatBody).model_fields:
            continue
        for value in RANGES[field]:
            error = server.error(path, OK[path] | {field: value})
            shown = error["message"] + " " + str(error["param"])
            assert field in shown or f"top_{field}" in shown or field.replace("max_", "max_completion_") in shown, shown


@pytest.mark.parametrize("path", OK)
def test_rule_39_wrong_types_in_every_field(server: Server, path: str) -> None:
    """Whatever stands in whichever field, it is no 5xx, and a refusal says something of the field."""
    for field in (CompletionBody if path == COMPLETIONS else ChatBody).model_fields:
        for value in (0, -1, 1.5, "text", True, [], [None], [[]], {}, {"a": {"b": None}}, 10**40, "\u0000"):
            response = server.post(path, OK[path] | {field: value, "max_tokens": 1})
            assert response.status_code in (200, 400, 404), (field, value, response.text)
            if response.status_code == 400:
                assert response.json()["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"null", b"3", b'"x"', b"{]", b'{"prompt": NaN}', b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b"[" * 100_000, b'{"a":' * 5000 + b"1" + b"}" * 5000, b'{"prompt": "a", "temperature": 1e999}', b"\x00" * 10,
        b'{"prompt": "a", "temperature": NaN}', b'{"prompt": "a", "n": Infinity}', b'{"max_tokens": 1}', b"a=b&c=d",
    ],
)  # fmt: skip
def test_bodies_that_are_no_request(server: Server, body: bytes) -> None:
    response = server.client.post(COMPLETIONS, content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["type"] == "BadRequestError"


def test_bodies_that_are_too_large(server: Server) -> None:
    body = b'{"prompt": "' + b"x" * (17 * 2**20) + b'"}'
    try:
        response = server.client.post(COMPLETIONS, content=body)
        assert response.status_code == 413
    except (httpx.WriteError, httpx.ReadError, httpx.RemoteProtocolError):
        pass  # the server answers, and closes, before all has been sent

    def pieces() -> Any:
        for _ in range(17):
            yield b" " * 2**20

    try:
        assert server.client.post(COMPLETIONS, content=pieces()).status_code == 413
    except (httpx.WriteError, httpx.ReadError, httpx.RemoteProtocolError):
        pass


@pytest.mark.parametrize(
    "prompt", [None, 3, {}, [], [[]], "", [""], [None], [1, "a"], [[1, "a"]], [True], [[1.5]], [-1], [[320]], {"a": 1}]
)
def test_wrong_prompts(server: Server, prompt: Any) -> None:
    error = server.error(COMPLETIONS, {"prompt": prompt})
    assert "prompt" in error["message"] or "token id" in error["message"]


def test_nothing_is_told_of_the_machine(server: Server) -> None:
    for response in (
        server.post(COMPLETIONS, {"prompt": [10**9]}),
        server.post("/no/such/path"),
        server.client.get(COMPLETIONS),
        server.post(COMPLETIONS, {"prompt": "a", "model": "/etc/passwd"}),
        server.client.get("/v1/models/../../etc/passwd"),
        server.client.get("/page/..%2f..%2fapi_server.py"),
    ):
        assert 400 <= response.status_code < 500
        assert set(response.json()) == {"error"}
        for word in ("Traceback", ".py", "site-packages", "/work", "/home", "/tmp"):
            assert word not in response.text
        assert "server" not in response.headers


def test_unknown_model_path_and_method(server: Server) -> None:
    assert server.error(COMPLETIONS, OK[COMPLETIONS] | {"model": "other"}, 404)["param"] == "model"
    assert server.error("/v1/nothing", {}, 404)["type"] == "NotFoundError"
    assert server.client.get(COMPLETIONS).status_code == 405
    assert server.client.get("/v1/models/other").status_code == 404


def test_a_live_id_is_refused_and_free_again_afterwards(server: Server) -> None:
    body = {"prompt": "abc", "max_tokens": 900, "n": 64, "ignore_eos": True, "request_id": "twice"}
    with server.client.stream("POST", COMPLETIONS, json=body | {"stream": True}) as response:
        lines = response.iter_lines()  # kept: when it goes, the connection goes
        next(lines)
        assert server.error(COMPLETIONS, body)["param"] == "request_id"
    server.wait_idle()
    server.ok(COMPLETIONS, body | {"max_tokens": 1, "n": 1})


def test_rule_11_a_clients_id_never_meets_an_inner_one(server: Server) -> None:
    body = {"max_tokens": 900, "ignore_eos": True, "n": 16}
    inner = body | {"prompt": ["a", "b"], "request_id": "x", "stream": True}
    with server.client.stream("POST", COMPLETIONS, json=inner) as response:
        lines = response.iter_lines()
        next(lines)
        for own in ("x-0", "x-1", "x\\x1f0"):
            server.ok(COMPLETIONS, {"prompt": "a", "max_tokens": 1, "request_id": own})
        assert server.error(COMPLETIONS, {"prompt": "a", "request_id": "x\x1f0"})["param"] == "request_id"


def test_health_answers_while_hostile_bodies_come(server: Server) -> None:
    """None takes the loop for 0.2 s (measured with some margin for this machine's other work)."""
    bodies: list[bytes] = [
        json.dumps({"prompt": "é " * 5_000_000}).encode()[: 15 * 2**20] + b'"}',
        json.dumps({"prompt": ["a b c"] * 16_000, "max_tokens": 1, "n": 1}).encode(),
        json.dumps({"prompt": [[1, 2, 3]] * 500_000}).encode(),
        json.dumps({"prompt": "a", "stop": ["x"] * 500_000}).encode(),
        json.dumps({"prompt": "a", "logit_bias": {str(i): 1 for i in range(500_000)}}).encode(),
        json.dumps({"messages": [{"role": "user", "content": "a"}] * 200_000}).encode(),
        b"[" * 10_000_000,
    ]
    slowest, statuses = [0.0], []
    stop = threading.Event()

    def watch() -> None:
        with httpx.Client(base_url=server.url, timeout=30) as client:
            while not stop.is_set():
                start = time.monotonic()
                assert client.get("/health").status_code == 200
                slowest[0] = max(slowest[0], time.monotonic() - start)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        for body in bodies:
            path = CHAT if body.startswith(b'{"messages') else COMPLETIONS
            statuses.append(server.client.post(path, content=body).status_code)
    finally:
        stop.set()
        thread.join()
    assert set(statuses) <= {400, 413, 503}, statuses
    assert slowest[0] < 2.0, slowest  # 0.2 on a machine of its own


def test_half_a_request_holds_nothing_up(server: Server) -> None:
    place = urlsplit(server.url)
    with socket.create_connection((place.hostname, place.port)) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        server.ok(COMPLETIONS, OK[COMPLETIONS])
    with socket.create_connection((place.hostname, place.port)) as connection:
        connection.sendall(b"\x00\x01\x02 nonsense\r\n\r\n")
        assert b"400" in connection.recv(100)
