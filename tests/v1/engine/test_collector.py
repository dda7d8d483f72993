"""The collector: nothing lost between a producer and a consumer of any speed."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.v1.engine.helpers import join
from vllm.logprobs import FlatLogprobs, Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.collector import RequestOutputCollector

DELTA, CUMULATIVE = RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE


def output(completions, finished=False, prompt_logprobs=None):
    return RequestOutput("x", None, [1], prompt_logprobs, completions, finished)


def delta(index, token, end=None, flat=False):
    entry = {token: Logprob(-float(token), 1, str(token))}
    logprobs = FlatLogprobs([entry]) if flat else [entry]
    return CompletionOutput(index, f"<{token}>", [token], -1.0 * token, logprobs, end, "why" if end else None)


async def test_passes_through():
    collector = RequestOutputCollector(DELTA)
    assert collector.get_nowait() is None
    first, second = output([delta(0, 1)]), output([delta(0, 2)])
    collector.put(first)
    assert collector.get_nowait() is first
    collector.put(second)
    assert await collector.get() is second
    assert collector.get_nowait() is None


async def test_a_waiting_consumer_is_woken():
    collector = RequestOutputCollector(DELTA)
    waiter = asyncio.create_task(collector.get())
    await asyncio.sleep(0)
    collector.put(output([delta(0, 1)]))
    assert (await waiter).outputs[0].token_ids == [1]


@pytest.mark.parametrize("flat", [False, True])
def test_deltas_are_joined(flat):
    collector = RequestOutputCollector(DELTA)
    collector.put(output([delta(1, 1, flat=flat), delta(0, 2, flat=flat)], prompt_logprobs=[None]))
    collector.put(output([delta(0, 3, "stop", flat=flat)]))
    collector.put(output([delta(2, 4, flat=flat), delta(1, 5, "length", flat=flat)], True))
    merged = collector.get_nowait()
    by_index = {completion.index: completion for completion in merged.outputs}
    assert by_index[0].text == "<2><3>"
    assert by_index[0].token_ids == [2, 3]
    assert [next(iter(entry)) for entry in by_index[0].logprobs] == [2, 3]
    assert by_index[0].cumulative_logprob == -3.0
    assert (by_index[0].finish_reason, by_index[0].stop_reason) == ("stop", "why")
    assert by_index[1].text == "<1><5>"
    assert by_index[2].text == "<4>"
    assert merged.finished
    assert merged.prompt_logprobs == [None]
    assert collector.get_nowait() is None


def test_cumulative_ones_are_replaced():
    collector = RequestOutputCollector(CUMULATIVE)
    collector.put(output([CompletionOutput(0, "a", [1]), CompletionOutput(1, "x", [7])]))
    collector.put(output([CompletionOutput(0, "ab", [1, 2])]))
    merged = collector.get_nowait()
    assert {c.index: (c.text, c.token_ids) for c in merged.outputs} == {0: ("ab", [1, 2]), 1: ("x", [7])}


async def test_an_error_comes_after_what_came_before_it():
    collector = RequestOutputCollector(DELTA)
    collector.put(output([delta(0, 1)]))
    collector.fail(RuntimeError("first"))
    collector.fail(RuntimeError("second"))
    assert (await collector.get()).outputs
    for _ in range(2):
        with pytest.raises(RuntimeError, match="first"):
            await collector.get()


async def test_an_error_wakes_a_waiting_consumer():
    collector = RequestOutputCollector(DELTA)
    waiter = asyncio.create_task(collector.get())
    await asyncio.sleep(0)
    collector.fail(RuntimeError("gone"))
    with pytest.raises(RuntimeError, match="gone"):
        await asyncio.wait_for(waiter, 5)


@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    kind=st.sampled_from([DELTA, CUMULATIVE]),
    flat=st.booleans(),
    data=st.data(),
)
def test_any_speed_gives_the_same(lengths, kind, flat, data):
    """Children of random lengths report in random groups; the consumer takes at random moments."""
    collector = RequestOutputCollector(kind)
    said = dict.fromkeys(range(len(lengths)), 0)
    taken = []
    while said:
        moving = data.draw(st.sets(st.sampled_from(sorted(said)), min_size=1))
        completions = []
        for index in moving:
            said[index] += 1
            count, end = said[index], "length" if said[index] == lengths[index] else None
            tokens = list(range(index * 10 + 1, index * 10 + count + 1))
            if kind is DELTA:
                completions.append(delta(index, tokens[-1], end, flat))
            else:
                text = "".join(f"<{token}>" for token in tokens)
                completions.append(CompletionOutput(index, text, tokens, None, None, end))
            if end:
                del said[index]
        collector.put(output(completions, not said))
        if data.draw(st.booleans()):
            taken.append(collector.get_nowait())
    rest = collector.get_nowait()
    if rest is not None:
        taken.append(rest)
    assert [one.finished for one in taken] == [False] * (len(taken) - 1) + [True]
    ends = join(taken, kind)
    for index, length in enumerate(lengths):
        tokens = list(range(index * 10 + 1, index * 10 + length + 1))
        assert ends[index].token_ids == tokens
        assert ends[index].text == "".join(f"<{token}>" for token in tokens)
        assert ends[index].finish_reason == "length"
        if kind is DELTA:
            assert [next(iter(entry)) for entry in ends[index].logprobs] == tokens
