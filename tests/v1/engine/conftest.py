"""Engines without a model, in every way a core can run. They are shared by all tests of a session, and found idle."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from tests.v1.engine.fakes import FAKE_MODEL, bundled_tokenizer, fake_config
from tests.v1.engine.helpers import drain, until_idle
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.llm_engine import LLMEngine

SYNC = ("in_process", "own_process")
ASYNC = ("thread", "own_process")


@pytest.fixture(scope="session")
def _sync_engines() -> Iterator[dict[str, LLMEngine]]:
    engines: dict[str, LLMEngine] = {}
    yield engines
    for engine in engines.values():
        engine.shutdown()


@pytest.fixture(params=SYNC)
def engine(request: pytest.FixtureRequest, _sync_engines: dict[str, LLMEngine]) -> Iterator[LLMEngine]:
    """An LLMEngine with an empty prefix cache. Afterwards everything must be gone."""
    yield from _shared(_sync_engines, request.param, "FakeExecutor")


@pytest.fixture(params=SYNC)
def slow_engine(request: pytest.FixtureRequest, _sync_engines: dict[str, LLMEngine]) -> Iterator[LLMEngine]:
    """The same, taking its time for a step: also a core in its own process is still at it when a test acts."""
    yield from _shared(_sync_engines, request.param, "SlowExecutor")


def _shared(engines: dict[str, LLMEngine], where: str, executor: str) -> Iterator[LLMEngine]:
    own = engines.get(where + executor)
    if own is None:
        own = engines[where + executor] = LLMEngine(
            fake_config(distributed_executor_backend=f"tests.v1.engine.fakes:{executor}"),
            multiprocessing=where == "own_process",
            model=FAKE_MODEL,
            tokenizer=bundled_tokenizer(),
        )
    own.reset_prefix_cache()
    yield own
    own.abort_request(list(own.output_processor._requests))
    drain(own)
    own.check_integrity()


@pytest.fixture
def make_engine() -> Iterator[Callable[..., LLMEngine]]:
    """LLMEngines of the test's own, in process unless told otherwise; keywords are fields of the configuration."""
    engines: list[LLMEngine] = []

    def make(multiprocessing: bool = False, **changes: Any) -> LLMEngine:
        tokenizer = None if changes.get("skip_tokenizer_init") else bundled_tokenizer()
        engine = LLMEngine(
            fake_config(**changes), multiprocessing=multiprocessing, model=FAKE_MODEL, tokenizer=tokenizer
        )
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        if engine.client.error is None:
            engine.abort_request(list(engine.output_processor._requests))
            drain(engine)
            engine.check_integrity()
        engine.shutdown()


@pytest.fixture(scope="session")
def _async_engines() -> Iterator[dict[str, AsyncLLM]]:
    engines: dict[str, AsyncLLM] = {}
    yield engines
    for engine in engines.values():
        engine.shutdown()


@pytest.fixture(params=ASYNC)
async def async_engine(request: pytest.FixtureRequest, _async_engines: dict[str, AsyncLLM]) -> AsyncIterator[AsyncLLM]:
    """An AsyncLLM that takes its time for a step, so that a test can act meanwhile. In the end all must be gone."""
    own = _async_engines.get(request.param)
    if own is None:
        own = _async_engines[request.param] = AsyncLLM(
            fake_config(distributed_executor_backend="tests.v1.engine.fakes:SlowExecutor"),
            multiprocessing=request.param == "own_process",
            model=FAKE_MODEL,
            tokenizer=bundled_tokenizer(),
        )
    await own.reset_prefix_cache()
    yield own
    await own.abort(list(own.output_processor._requests))
    await until_idle(own)


@pytest.fixture
def make_async_engine() -> Iterator[Callable[..., AsyncLLM]]:
    """AsyncLLMs of the test's own, in a thread unless told otherwise."""
    engines: list[AsyncLLM] = []

    def make(multiprocessing: bool = False, **changes: Any) -> AsyncLLM:
        engine = AsyncLLM(
            fake_config(**changes), multiprocessing=multiprocessing, model=FAKE_MODEL, tokenizer=bundled_tokenizer()
        )
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.shutdown()


@pytest.fixture
def ticks() -> Callable[[], Any]:
    """A coroutine function that counts how often the event loop comes round while it runs."""

    async def tick(turns: list[int]) -> None:
        while True:
            turns[0] += 1
            await asyncio.sleep(0)

    return tick
