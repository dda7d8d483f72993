"""Rule 23: a slow consumer loses nothing, a fast one gets every token; deltas, cumulative and final text agree."""

import asyncio

import pytest

from tests.v1.engine.fakes import SCRIPT_TEXTS, scripted
from tests.v1.engine.helpers import KINDS, PROMPT, join, new_id, params, run, stream
from vllm.sampling_params import RequestOutputKind

STREAMING = (RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE)
FINAL = RequestOutputKind.FINAL_ONLY


@pytest.mark.parametrize("kind", STREAMING, ids=lambda kind: kind.name)
@pytest.mark.parametrize("n", [1, 4])
async def test_slow(async_engine, kind, n):
    fields = {"n": n, "seed": 21, "max_tokens": 30, "logprobs": 1}
    expected = join(await stream(async_engine, **fields), FINAL)
    outputs = []
    async for output in async_engine.generate(PROMPT, params(kind=kind, **fields), new_id()):
        outputs.append(output)
        await asyncio.sleep(0.05)
    assert len(outputs) < 25  # they were merged
    assert all(len({c.index for c in output.outputs}) == len(output.outputs) for output in outputs)
    assert join(outputs, kind) == expected


@pytest.mark.parametrize("kind", STREAMING, ids=lambda kind: kind.name)
def test_every_token_has_its_output(engine, kind):
    """Nobody holds the synchronous engine back: one output per step, one token per child."""
    outputs = run(engine, n=3, kind=kind, seed=scripted(4), max_tokens=25)
    assert len(outputs) == 25
    for step, output in enumerate(outputs, start=1):
        assert sorted(completion.index for completion in output.outputs) == [0, 1, 2]
        expected = 1 if kind is RequestOutputKind.DELTA else step
        assert [len(completion.token_ids) for completion in output.outputs] == [expected] * 3
    texts = [c.text for output in outputs for c in output.outputs if c.index == 0]
    if kind is RequestOutputKind.DELTA:
        assert "" in texts  # a token that completes no character


@pytest.mark.parametrize("fields", [
    {"seed": 5, "max_tokens": 40},
    {"seed": scripted(0), "max_tokens": 24, "stop": ["STOP"]},
    {"seed": scripted(0), "max_tokens": 24, "stop": ["STOP", "epsilon zeta"], "include_stop_str_in_output": True},
    {"seed": scripted(3), "max_tokens": 40},
    {"seed": 6, "allowed_token_ids": [2, *range(100, 110)], "ignore_eos": False, "max_tokens": 30, "logprobs": 2},
], ids=str)  # fmt: skip
def test_all_kinds_agree(engine, fields):
    ends = [join(run(engine, n=5, kind=kind, **fields), kind) for kind in KINDS]
    assert ends[0] == ends[1] == ends[2]
    assert all(ends[0][index].token_ids for index in range(5))


async def test_all_kinds_agree_asynchronously(async_engine):
    fields = {"n": 3, "seed": scripted(4), "max_tokens": 20}
    ends = [join(await stream(async_engine, kind=kind, **fields), kind) for kind in KINDS]
    assert ends[0] == ends[1] == ends[2]


def test_scripts_are_said(engine):
    (output,) = run(engine, seed=scripted(1), max_tokens=8)
    assert output.outputs[0].text == SCRIPT_TEXTS[1][: len(output.outputs[0].text)]
