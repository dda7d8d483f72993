"""Rule 30: `abort(id)` ends all children of the user's request at once, also right after submission, also twice."""

import asyncio

import pytest

from tests.v1.engine.helpers import KINDS, PROMPT, drain, new_id, params, until_idle
from vllm.sampling_params import RequestOutputKind


@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_all_children_end(slow_engine, n, steps):
    request_id = new_id()
    slow_engine.add_request(request_id, PROMPT, params(n=n, max_tokens=200, kind=RequestOutputKind.DELTA))
    for _ in range(steps):
        slow_engine.step()
    slow_engine.abort_request([request_id])
    assert slow_engine.get_num_unfinished_requests() == 0
    outputs = drain(slow_engine)[request_id]
    ended = {c.index: c.finish_reason for output in outputs for c in output.outputs if c.finish_reason}
    assert ended == dict.fromkeys(range(n), "abort")
    slow_engine.check_integrity()


def test_twice_and_unknown(slow_engine):
    request_id = new_id()
    slow_engine.add_request(request_id, PROMPT, params(n=3, max_tokens=200))
    slow_engine.abort_request("nobody")
    slow_engine.abort_request([])
    slow_engine.abort_request([request_id, request_id, "nobody"])
    slow_engine.abort_request(request_id)
    assert [len(outputs) for outputs in drain(slow_engine).values()] == [1]
    slow_engine.abort_request(request_id)
    assert not slow_engine.has_unfinished_requests()


def test_others_go_on(slow_engine):
    victim, other = new_id(), new_id()
    for request_id, length in ((victim, 200), (other, 5)):
        slow_engine.add_request(request_id, PROMPT, params(n=3, max_tokens=length, seed=1))
    slow_engine.step()
    slow_engine.abort_request(victim)
    outputs = drain(slow_engine)
    assert [c.finish_reason for c in outputs[other][0].outputs] == ["length"] * 3
    assert [c.finish_reason for c in outputs[victim][0].outputs] == ["abort"] * 3


def test_a_child_s_handle_is_not_an_id(engine):
    request_id = new_id()
    engine.add_request(request_id, PROMPT, params(n=2))
    handles = engine.output_processor._requests[request_id].handles
    engine.abort_request([str(handle) for handle in handles])
    assert [c.finish_reason for c in drain(engine)[request_id][0].outputs] == ["length"] * 2


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
async def test_asynchronously(async_engine, kind):
    request_id = new_id()
    own = params(n=4, max_tokens=200, kind=kind)

    async def consume():
        return [output async for output in async_engine.generate(PROMPT, own, request_id)]

    consumer = asyncio.create_task(consume())
    await asyncio.sleep(0.03)
    await async_engine.abort(request_id)
    await async_engine.abort([request_id, "nobody"])
    outputs = await asyncio.wait_for(consumer, 10)
    assert outputs[-1].finished
    await until_idle(async_engine)


async def test_right_after_submission(async_engine):
    request_id = new_id()
    collector = await async_engine.add_request(request_id, PROMPT, params(n=4, max_tokens=200))
    await async_engine.abort(request_id)
    output = await asyncio.wait_for(collector.get(), 10)
    assert output.finished
    assert [c.finish_reason for c in output.outputs] == ["abort"] * 4
