"""Rule 6: child i of seed s uses (s + i) mod 2**63, and says what an n=1 request with that seed says."""

import random

import pytest

from tests.v1.engine.helpers import KINDS, PROMPT, drain, join, new_id, params, run, run_one
from vllm.sampling_params import SamplingParams


@pytest.mark.parametrize("seed", [0, 1, 12345, 2**63 - 2])
def test_a_child_equals_an_n1_request(engine, seed):
    children = run_one(engine, n=4, seed=seed, logprobs=1).outputs
    for index, child in enumerate(children):
        alone = run_one(engine, seed=(seed + index) % 2**63, logprobs=1).outputs[0]
        assert (child.token_ids, child.text, child.logprobs) == (alone.token_ids, alone.text, alone.logprobs)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_in_a_crowd(engine, kind):
    rng = random.Random(7)
    expected = {seed: run_one(engine, seed=seed).outputs[0].token_ids for seed in range(40, 48)}
    wanted = {}
    for seed in rng.sample(sorted(expected), 5):
        request_id = new_id()
        engine.add_request(request_id, PROMPT, params(n=8 - (seed - 40), seed=seed, kind=kind))
        wanted[request_id] = seed
        engine.add_request(new_id(), [rng.randrange(900) for _ in range(30)], params(n=3, kind=kind))
    outputs = drain(engine)
    for request_id, seed in wanted.items():
        for index, completion in join(outputs[request_id], kind).items():
            assert completion.token_ids == expected[seed + index]


def test_after_preemption(make_engine):
    wide = make_engine()
    expected = [completion.token_ids for completion in run_one(wide, n=6, seed=9, max_tokens=60).outputs]
    tight = make_engine(num_blocks=12)
    output = run_one(tight, n=6, seed=9, max_tokens=60)
    assert tight.metrics.scheduler.num_preemptions > 0
    assert [completion.token_ids for completion in output.outputs] == expected


@pytest.mark.parametrize("budget", [1, 3, 16, 64])
def test_chunked_at_any_budget(make_engine, budget):
    expected = run_one(make_engine(), n=3, seed=9).outputs
    engine = make_engine(max_num_batched_tokens=budget, max_num_seqs=4)
    assert run_one(engine, n=3, seed=9).outputs == expected


def test_minus_one_counts_as_none():
    assert SamplingParams(seed=-1).seed is None


@pytest.mark.parametrize("seed", [True, False, 1.0, "1", 2**63])
def test_bad_seeds(seed):
    with pytest.raises(ValueError, match="seed must be"):
        SamplingParams(seed=seed)


def test_cached_prompts_change_nothing(engine):
    prompt = list(range(700, 764))
    cold = run(engine, prompt, n=2, seed=3)
    hot = run(engine, prompt, n=2, seed=3)
    assert hot[0].num_cached_tokens > 0
    assert [c.token_ids for c in hot[0].outputs] == [c.token_ids for c in cold[0].outputs]
