"""Rule 1: `n` is an int of at least 1, when the params are built and again when they are submitted."""

import pytest

from tests.v1.engine.helpers import PROMPT, new_id, params, run_one, stream
from vllm.sampling_params import SamplingParams

BAD = (True, False, 2.0, 1.5, "2", 0, -1, None, [2], float("nan"), 2**70)


@pytest.mark.parametrize("n", BAD, ids=repr)
def test_refused_when_built(n):
    with pytest.raises(ValueError, match=r"\bn must be"):
        SamplingParams(n=n)


@pytest.mark.parametrize("n", BAD, ids=repr)
def test_refused_when_submitted_and_the_engine_keeps_serving(engine, n):
    own = params()
    own.n = n
    with pytest.raises(ValueError, match=r"\bn must be") as caught:
        engine.add_request(new_id(), PROMPT, own)
    assert caught.value.parameter == "n"
    assert not engine.has_unfinished_requests()
    own.n = 3
    assert len(run_one(engine, own=own).outputs) == 3


async def test_refused_by_the_async_engine_too(async_engine):
    own = params()
    own.n = 0
    with pytest.raises(ValueError, match=r"\bn must be"):
        await async_engine.add_request(new_id(), PROMPT, own)
    assert len((await stream(async_engine, n=2))[0].outputs) == 2


@pytest.mark.parametrize("n", [1, 2, 7])
def test_good_ones_give_n_completions(engine, n):
    assert [completion.index for completion in run_one(engine, n=n).outputs] == list(range(n))
