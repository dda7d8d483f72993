"""Clients that go, signals, the engine's death."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import psutil
import pytest

from tests.entrypoints.openai.server import Server, by_index, read_events
from vllm.entrypoints.openai.launcher import EXIT_ENGINE_DIED

PATH = "/v1/completions"
LONG: dict[str, Any] = {"prompt": "abc", "n": 16, "max_tokens": 1000, "ignore_eos": True}
MakeServer = Callable[..., Server]


@pytest.mark.parametrize("stream", [True, False])
def test_rule_31_a_client_that_goes_is_an_abort(server: Server, stream: bool) -> None:
    before = server.metric("vllm:request_success_total")
    tokens = server.metric("vllm:generation_tokens_total")
    body = LONG | {"n": 64, "stream": stream}
    with httpx.Client(base_url=server.url) as client:
        if stream:
            with client.stream("POST", PATH, json=body) as response:
                lines = response.iter_lines()
                next(lines)
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post(PATH, json=body, timeout=0.15)
    server.wait_idle(5)
    assert server.metric("vllm:request_success_total") == before + 64
    assert server.metric("vllm:generation_tokens_total") < tokens + 64 * 1000


def test_rule_23_a_slow_reader_loses_nothing(server: Server) -> None:
    body = LONG | {"n": 32, "max_tokens": 900, "seed": 11}
    expected = server.ok(PATH, body)["choices"]
    with server.client.stream("POST", PATH, json=body | {"stream": True, "return_token_ids": True}) as response:
        time.sleep(1.5)  # the sockets' buffers are full by then
        pieces = by_index(list(read_events(response.iter_lines())))
    for choice in expected:
        own = pieces[choice["index"]]
        assert "".join(piece["text"] for piece in own) == choice["text"]
        assert sum(len(piece["token_ids"]) for piece in own) == 900
        assert [piece["finish_reason"] for piece in own] == [None] * (len(own) - 1) + ["length"]


def test_rule_34_counted_once_also_when_aborted(server: Server) -> None:
    names = ("vllm:request_params_n_count", "vllm:request_params_n_sum", "vllm:request_max_num_generation_tokens_count")
    before = [server.metric(name) for name in names]
    with server.client.stream("POST", PATH, json=LONG | {"stream": True, "n": 5}) as response:
        lines = response.iter_lines()
        next(lines)
    server.wait_idle(5)
    assert [server.metric(name) - old for name, old in zip(names, before, strict=True)] == [1, 5, 1]


async def test_200_streams_a_third_of_them_cut(server: Server) -> None:
    """All others complete, and are right; nothing is left behind."""
    rng = random.Random(5)
    body = {"prompt": "Once upon a time", "n": 4, "max_tokens": 24, "ignore_eos": True}
    expected = {seed: server.ok(PATH, body | {"seed": seed})["choices"] for seed in range(5)}
    engine = psutil.Process(server.engine_pid)
    limits = httpx.Limits(max_connections=200)

    async def one(client: httpx.AsyncClient, number: int, cut: bool) -> None:
        seed = number % 5
        request = client.stream("POST", PATH, json=body | {"seed": seed, "stream": True})
        async with request as response:
            assert response.status_code == 200
            lines = []
            last = rng.randrange(40)
            async for line in response.aiter_lines():
                lines.append(line)
                if cut and len(lines) > last:
                    return
        pieces = by_index(list(read_events(iter(lines))))
        for choice in expected[seed]:
            assert "".join(piece["text"] for piece in pieces[choice["index"]]) == choice["text"]

    async def round_of(count: int) -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as client:
            await asyncio.gather(*(one(client, number, number % 3 == 0) for number in range(count)))
        await asyncio.to_thread(server.wait_idle)

    await round_of(200)
    before = engine.memory_info().rss
    await round_of(200)
    assert engine.memory_info().rss < before * 1.05


def test_sigterm_lets_requests_finish(make_server: MakeServer) -> None:
    server = make_server()
    with server.client.stream("POST", PATH, json=LONG | {"stream": True, "n": 2, "max_tokens": 900}) as response:
        lines = response.iter_lines()
        first = next(lines)
        server.process.send_signal(signal.SIGTERM)
        with httpx.Client(base_url=server.url) as other:
            for _ in range(100):
                refused = other.post(PATH, json=LONG)
                if refused.status_code == 503:
                    break
            assert refused.status_code == 503
            assert "retry-after" in refused.headers
            assert other.get("/health").status_code == 503
        events = list(read_events(iter([first, *lines])))
    assert [pieces[-1]["finish_reason"] for pieces in by_index(events).values()] == ["length"] * 2
    assert server.wait() == 0
    assert "Traceback" not in "".join(server.log)


def test_sigterm_aborts_at_the_deadline(make_server: MakeServer) -> None:
    server = make_server("--shutdown-grace", "0.3", "--max-num-seqs", "256")
    with server.client.stream("POST", PATH, json=LONG | {"stream": True, "n": 256}) as response:
        lines = response.iter_lines()
        first = next(lines)
        start = time.monotonic()
        server.process.send_signal(signal.SIGINT)
        events = list(read_events(iter([first, *lines])))
    reasons = {pieces[-1]["finish_reason"] for pieces in by_index(events).values()}
    assert "abort" in reasons
    assert server.wait() == 0
    assert time.monotonic() - start < 15


def test_the_engines_death(make_server: MakeServer) -> None:
    server = make_server()
    answers: list[Any] = []

    def ask(stream: bool) -> None:
        with httpx.Client(base_url=server.url, timeout=30) as client:
            response = client.post(PATH, json=LONG | {"stream": stream})
            answers.append((time.monotonic(), response.status_code, response.text))

    threads = [threading.Thread(target=ask, args=(stream,)) for stream in (True, False, True)]
    for thread in threads:
        thread.start()
    while server.client.get("/load").json()["server_load"] < 3:
        time.sleep(0.01)
    os.kill(server.engine_pid, signal.SIGKILL)
    start = time.monotonic()
    while server.client.get("/health").status_code != 503:
        assert time.monotonic() < start + 2
        time.sleep(0.01)
    for thread in threads:
        thread.join()
    for moment, status, text in answers:
        assert moment < start + 2
        assert "the engine has stopped" in text
        assert status == 503 or (status == 200 and text.endswith("data: [DONE]\n\n"))
        assert "pid" not in text
    assert server.wait() == EXIT_ENGINE_DIED


def test_restart_engine(make_server: MakeServer) -> None:
    server = make_server("--restart-engine")
    body = LONG | {"n": 1, "max_tokens": 8, "seed": 3}
    text = server.ok(PATH, body)["choices"][0]["text"]
    before = server.engine_pid
    os.kill(before, signal.SIGKILL)
    deadline = time.monotonic() + 40
    while True:
        assert time.monotonic() < deadline
        answer = server.post(PATH, body)
        if answer.status_code == 200:
            break
        assert answer.status_code == 503
        time.sleep(0.1)
    assert answer.json()["choices"][0]["text"] == text
    assert server.engine_pid != before
    assert server.stop() == 0


def test_no_process_is_left(make_server: MakeServer) -> None:
    server = make_server()
    engine = psutil.Process(server.engine_pid)
    server.process.kill()
    assert engine.wait(10) is not None or not engine.is_running()


def serve(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_exit_codes_of_what_cannot_start() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = serve("smollm2-135m-instruct", "--host", "127.0.0.1", "--port", port)
        assert done.returncode == 2
        assert f"cannot listen on 127.0.0.1, port {port}" in done.stderr
    done = serve("/no/such/model")
    assert done.returncode == 1
    assert "/no/such/model" in done.stderr
    assert "Traceback" not in done.stderr
