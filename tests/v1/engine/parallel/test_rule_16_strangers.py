"""Rule 16: separate live requests with one prompt share it, also half computed, with prefix caching on."""

import pytest

from tests.v1.engine.helpers import counter, drain, new_id, params, run_one
from vllm.entrypoints.llm import LLM

PROMPT = list(range(2000, 2100))
COMPUTED = "vllm:prompt_tokens_computed_total"


def submit(engine, count, prompt=PROMPT, **fields):
    ids = [new_id() for _ in range(count)]
    for request_id in ids:
        engine.add_request(request_id, prompt, params(**fields))
    return ids


def test_duplicates_in_one_call(engine):
    before = counter(engine, COMPUTED)
    outputs = LLM.from_engine(engine).generate([PROMPT] * 64, params(max_tokens=3), use_tqdm=False)
    assert counter(engine, COMPUTED) - before == len(PROMPT)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 64


def test_joining_a_prompt_in_progress(make_engine):
    engine = make_engine(max_num_batched_tokens=32)
    submit(engine, 1)
    engine.step()  # a third of it
    submit(engine, 3, n=2)
    engine.step()
    submit(engine, 2)
    drain(engine)
    assert engine.metrics.scheduler.prompt_tokens_computed == len(PROMPT)


def test_joining_a_prompt_that_is_complete(make_engine):
    engine = make_engine()
    submit(engine, 1, max_tokens=20)
    engine.step()
    engine.step()
    submit(engine, 3, n=2)
    drain(engine)
    assert engine.metrics.scheduler.prompt_tokens_computed == len(PROMPT)


def test_not_without_prefix_caching(make_engine):
    engine = make_engine(enable_prefix_caching=False)
    submit(engine, 3)
    drain(engine)
    assert engine.metrics.scheduler.prompt_tokens_computed == 3 * len(PROMPT)


def test_not_with_another_salt(slow_engine):
    before = counter(slow_engine, COMPUTED)
    for salt in ("a", "b", "a", None):
        prompt = {"prompt_token_ids": PROMPT} | ({"cache_salt": salt} if salt else {})
        slow_engine.add_request(new_id(), prompt, params(max_tokens=60))
    drain(slow_engine)
    assert counter(slow_engine, COMPUTED) - before == 3 * len(PROMPT)


@pytest.mark.parametrize("fields", [{"prompt_logprobs": 1}, {"skip_reading_prefix_cache": True}], ids=str)
def test_not_with_what_must_be_computed(engine, fields):
    before = counter(engine, COMPUTED)
    submit(engine, 1)
    submit(engine, 2, **fields)
    drain(engine)
    assert counter(engine, COMPUTED) - before == 3 * len(PROMPT)


def test_they_say_what_they_say_alone(engine):
    ids = [new_id() for _ in range(5)]
    for seed, request_id in enumerate(ids):
        engine.add_request(request_id, PROMPT, params(n=2, seed=100 + seed))
    outputs = drain(engine)
    for seed, request_id in enumerate(ids):
        alone = run_one(engine, PROMPT, n=2, seed=100 + seed)
        assert outputs[request_id][0].outputs == alone.outputs
