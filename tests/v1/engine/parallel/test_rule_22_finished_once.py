"""Rule 22: `finished` is true once, on the output in which the last child ends; each finish_reason comes once."""

import pytest

from tests.v1.engine.fakes import scripted
from tests.v1.engine.helpers import KINDS, run, stream

RANDOM_ENDS = {"allowed_token_ids": [2, *range(100, 108)], "ignore_eos": False, "max_tokens": 30, "seed": 8}


def check(outputs, n):
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    ended = set()
    for output in outputs:
        for completion in output.outputs:
            assert completion.index not in ended, "something came after a child's end"
            assert completion.finished() == (completion.finish_reason is not None)
            if completion.finish_reason is not None:
                ended.add(completion.index)
    assert ended == set(range(n))
    assert any(completion.finish_reason for completion in outputs[-1].outputs)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("n", [1, 2, 9])
def test_random_ends(engine, kind, n):
    check(run(engine, n=n, kind=kind, **RANDOM_ENDS), n)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_stop_strings(engine, kind):
    check(run(engine, n=5, kind=kind, seed=scripted(0), stop=["STOP", "delta"], max_tokens=30), 5)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
async def test_asynchronously(async_engine, kind):
    check(await stream(async_engine, n=4, kind=kind, **RANDOM_ENDS), 4)
