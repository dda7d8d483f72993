"""AsyncLLM beyond the contract's rules: loops, state, calls."""

import asyncio

import pytest

from tests.v1.engine.fakes import FAKE_MODEL, bundled_tokenizer, fake_config
from tests.v1.engine.helpers import KINDS, PROMPT, new_id, params, stream, until_idle
from vllm.exceptions import EngineDeadError
from vllm.v1.engine.async_llm import AsyncLLM


def make(multiprocessing):
    return AsyncLLM(fake_config(), multiprocessing=multiprocessing, model=FAKE_MODEL, tokenizer=bundled_tokenizer())


@pytest.mark.parametrize("multiprocessing", [False, True], ids=["thread", "own_process"])
def test_one_loop_after_another(multiprocessing):
    engine = make(multiprocessing)
    for n in (1, 2, 3):
        (output,) = asyncio.run(stream(engine, n=n))
        assert len(output.outputs) == n
    engine.shutdown()


@pytest.mark.parametrize("multiprocessing", [False, True], ids=["thread", "own_process"])
def test_a_loop_that_was_left_in_the_middle(multiprocessing):
    """Requests of a loop that has gone are freed by its shutdown; the next loop finds a working engine."""
    engine = make(multiprocessing)

    async def leave():
        task = asyncio.create_task(stream(engine, n=3, max_tokens=200))
        await asyncio.sleep(0.02)
        assert not task.done() or task.result()

    asyncio.run(leave())

    async def go_on():
        outputs = await stream(engine, n=2)
        await until_idle(engine)
        return outputs

    assert len(asyncio.run(go_on())[0].outputs) == 2
    engine.shutdown()


async def test_two_running_loops_are_refused():
    engine = make(False)
    await engine.check_health()

    def elsewhere():
        return asyncio.run(stream(engine))

    with pytest.raises(RuntimeError, match="another event loop"):
        await asyncio.to_thread(elsewhere)
    engine.shutdown()


async def test_the_core_has_its_own_process_by_default(monkeypatch):
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)
    for value, in_process in ((None, False), ("0", True), ("1", False)):
        if value is not None:
            monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", value)
        engine = make(None)
        assert engine.client.in_process is in_process
        engine.shutdown()


async def test_shutdown_wakes_everybody(make_async_engine):
    for multiprocessing in (False, True):
        engine = make_async_engine(multiprocessing, distributed_executor_backend="tests.v1.engine.fakes:SlowExecutor")
        consumers = [asyncio.create_task(stream(engine, n=2, max_tokens=200, kind=kind)) for kind in KINDS]
        await asyncio.sleep(0.05)
        engine.shutdown()
        results = await asyncio.wait_for(asyncio.gather(*consumers, return_exceptions=True), 10)
        assert [type(result) for result in results] == [EngineDeadError] * 3
        assert engine.errored
        assert engine.is_stopped
        assert isinstance(engine.dead_error, EngineDeadError)
        engine.shutdown()


async def test_calls(async_engine):
    assert await async_engine.collective_rpc("echo", args=("x",)) == ["x"]
    assert await async_engine.reset_prefix_cache() is True
    assert await async_engine.is_sleeping() is False
    with pytest.raises(ValueError, match="enable_sleep_mode"):
        await async_engine.sleep()
    assert (await async_engine.get_model_config()).model == "fake"
    assert await async_engine.get_vllm_config() is async_engine.vllm_config
    await async_engine.check_health()
    assert async_engine.is_running
    assert not async_engine.errored


async def test_bad_input_leaves_no_trace(async_engine):
    for prompt, own in (("", params()), ([-1], params()), (None, params()), (PROMPT, None), (PROMPT, {"n": 1})):
        with pytest.raises(ValueError, match=r"."):
            await async_engine.add_request(new_id(), prompt, own)
    for keyword in ("tokenization_kwargs", "trace_headers"):
        with pytest.raises(NotImplementedError, match=keyword):
            await async_engine.add_request(new_id(), PROMPT, params(), **{keyword: {"a": "b"}})
    await until_idle(async_engine)


async def test_the_params_are_copied_before_the_first_await(async_engine):
    own = params(n=2, max_tokens=3)
    task = asyncio.create_task(async_engine.add_request(new_id(), "word " * 600, params()))
    long = params(n=2, max_tokens=3, truncate_prompt_tokens=10)
    submitted = asyncio.create_task(async_engine.add_request(new_id(), "word " * 600, long))
    await asyncio.sleep(0)
    long.n, long.max_tokens = 50, 99
    output = await (await submitted).get()
    assert [len(completion.token_ids) for completion in output.outputs] == [3, 3]
    with pytest.raises(ValueError, match="maximum context"):
        await task
    assert own.n == 2


async def test_a_failure_in_processing_outputs_kills_the_engine(make_async_engine, monkeypatch, capfd):
    engine = make_async_engine()

    def broken(*args):
        raise ValueError("a bug")

    monkeypatch.setattr(engine.output_processor, "process", broken)
    with pytest.raises(EngineDeadError, match="a bug"):
        await asyncio.wait_for(stream(engine), 10)
    with pytest.raises(EngineDeadError):
        await engine.check_health()


async def test_uvloop():
    uvloop = pytest.importorskip("uvloop")

    def in_uvloop():
        engine = make(True)
        loop = uvloop.new_event_loop()
        try:
            return loop.run_until_complete(stream(engine, n=3, kind=KINDS[1]))
        finally:
            loop.close()
            engine.shutdown()

    assert (await asyncio.to_thread(in_uvloop))[-1].finished
