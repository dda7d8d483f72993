"""Rule 32: cancelling `generate()` at any await frees every child."""

import asyncio
import contextlib

import pytest

from tests.v1.engine.helpers import KINDS, PROMPT, new_id, params, until_idle
from vllm.sampling_params import RequestOutputKind


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5, 8, 20, 100])
@pytest.mark.parametrize("prompt", [PROMPT, "word " * 600], ids=["ids", "long text"])
async def test_after_any_number_of_turns(async_engine, turns, prompt):
    own = params(n=5, max_tokens=300, kind=RequestOutputKind.DELTA, truncate_prompt_tokens=20)
    request_id = new_id()

    async def consume():
        async for _ in async_engine.generate(prompt, own, request_id):
            pass

    task = asyncio.create_task(consume())
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until_idle(async_engine)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
async def test_while_waiting(async_engine, kind):
    async def consume():
        return [
            output async for output in async_engine.generate(PROMPT, params(n=5, max_tokens=300, kind=kind), new_id())
        ]

    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(consume(), 0.05)
    await until_idle(async_engine)


async def test_leaving_the_loop(async_engine):
    """`break`, and an exception of the consumer: the generator is closed."""
    generator = async_engine.generate(PROMPT, params(n=5, max_tokens=300, kind=RequestOutputKind.DELTA), new_id())
    async for _ in generator:
        break
    await generator.aclose()
    await until_idle(async_engine)

    async def fail():
        own = params(n=5, max_tokens=300, kind=RequestOutputKind.DELTA)
        async with contextlib.aclosing(async_engine.generate(PROMPT, own, new_id())) as outputs:
            async for _ in outputs:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    await until_idle(async_engine)


async def test_the_id_is_free_at_once(async_engine):
    request_id = new_id()
    for _ in range(3):
        generator = async_engine.generate(PROMPT, params(n=2, max_tokens=300, kind=RequestOutputKind.DELTA), request_id)
        await generator.__anext__()
        await generator.aclose()
    outputs = [output async for output in async_engine.generate(PROMPT, params(n=2, max_tokens=3), request_id)]
    assert [len(c.token_ids) for c in outputs[0].outputs] == [3, 3]
    await until_idle(async_engine)


async def test_many_at_random_moments(async_engine):
    import random

    rng = random.Random(3)

    async def one(seconds):
        own = params(n=rng.randint(1, 6), max_tokens=rng.choice([3, 10, 100]), kind=rng.choice(KINDS))

        async def consume():
            return [output async for output in async_engine.generate([rng.randrange(900)] * 20, own, new_id())]

        try:
            return await asyncio.wait_for(consume(), seconds)
        except asyncio.TimeoutError:
            return None

    results = await asyncio.gather(*(one(rng.choice([0.0, 0.01, 0.05, 0.1, 30])) for _ in range(60)))
    assert any(results)
    for outputs in results:
        assert outputs is None or outputs[-1].finished
    await until_idle(async_engine)
