"""Rule 3: greedy sampling with more than one completion is refused, naming both fields."""

import pytest

from tests.v1.engine.helpers import PROMPT, new_id, params, run_one
from vllm.sampling_params import SamplingParams


@pytest.mark.parametrize("fields", [{"n": 2}, {"best_of": 3}, {"n": 2, "best_of": 3}])
def test_refused_when_built(fields):
    with pytest.raises(ValueError, match=r"(?s)(n|best_of) must be 1.*temperature"):
        SamplingParams(temperature=0, **fields)


def test_refused_when_submitted(engine):
    own = params(n=2)
    own.temperature = 0.0
    with pytest.raises(ValueError, match=r"n must be 1.*temperature"):
        engine.add_request(new_id(), PROMPT, own)


def test_one_greedy_completion_is_fine(engine):
    assert len(run_one(engine, temperature=0.0).outputs) == 1
