"""Rule 12: of two live requests with one id the second is refused, the first goes on; afterwards the id is free."""

import asyncio

import pytest

from tests.v1.engine.helpers import PROMPT, drain, new_id, params
from vllm.exceptions import DuplicateRequestError
from vllm.sampling_params import RequestOutputKind


@pytest.mark.parametrize("n", [1, 3])
def test_the_second_is_refused(engine, n):
    engine.add_request("twin", PROMPT, params(n=n, seed=4))
    with pytest.raises(DuplicateRequestError, match="'twin'"):
        engine.add_request("twin", [1, 2, 3], params(n=4 - n))
    outputs = drain(engine)
    assert len(outputs["twin"]) == 1
    assert outputs["twin"][0].prompt_token_ids == PROMPT
    assert len(outputs["twin"][0].outputs) == n
    engine.add_request("twin", [1, 2, 3], params())  # free again
    assert len(drain(engine)["twin"]) == 1


def test_free_after_an_abort(slow_engine):
    slow_engine.add_request("twin", PROMPT, params(max_tokens=100))
    slow_engine.abort_request("twin")
    slow_engine.add_request("twin", PROMPT, params(seed=1))
    outputs = drain(slow_engine)["twin"]
    assert [output.outputs[0].finish_reason for output in outputs] == ["abort", "length"]


async def test_asynchronously(async_engine):
    request_id = new_id()
    own = params(max_tokens=20, kind=RequestOutputKind.DELTA)

    async def consume():
        return [output async for output in async_engine.generate(PROMPT, own, request_id)]

    first = asyncio.create_task(consume())
    await asyncio.sleep(0.02)
    with pytest.raises(DuplicateRequestError, match=request_id):
        await consume()
    outputs = await first
    assert outputs[-1].finished
    assert sum(len(output.outputs[0].token_ids) for output in outputs) == 20
    assert (await consume())[-1].finished


async def test_two_at_the_same_moment(async_engine):
    """Both tokenize in another thread; one of them wins."""
    request_id = new_id()
    prompt = "word " * 600

    async def consume():
        own = params(truncate_prompt_tokens=50)
        return [output async for output in async_engine.generate(prompt, own, request_id)]

    results = await asyncio.gather(consume(), consume(), return_exceptions=True)
    assert sorted(type(result).__name__ for result in results) == ["DuplicateRequestError", "list"]


@pytest.mark.parametrize("bad", [None, 5, "", b"x"], ids=repr)
def test_ids_are_strings(engine, bad):
    with pytest.raises(ValueError, match="request_id must be a non-empty string"):
        engine.add_request(bad, PROMPT, params())
