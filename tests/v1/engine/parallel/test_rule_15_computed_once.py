"""Rule 15: a request's prompt is computed once, whatever n, cache on or off, at any length."""

import pytest

from tests.v1.engine.helpers import params, run_one

BLOCK = 16


@pytest.mark.parametrize("caching", [True, False], ids=["caching", "no_caching"])
@pytest.mark.parametrize("length", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1, 100])
def test_any_length(make_engine, caching, length):
    engine = make_engine(enable_prefix_caching=caching)
    prompt = list(range(1000, 1000 + length))
    output = run_one(engine, prompt, n=7, seed=3)
    assert engine.metrics.scheduler.prompt_tokens_computed == length
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 7
    for index, completion in enumerate(output.outputs):
        assert completion.token_ids == run_one(engine, prompt, seed=3 + index).outputs[0].token_ids


def test_in_chunks(make_engine):
    engine = make_engine(max_num_batched_tokens=7, max_num_seqs=4)
    run_one(engine, list(range(100)), n=6)
    assert engine.metrics.scheduler.prompt_tokens_computed == 100


def test_all_first_tokens_in_the_step_that_completes_the_prompt(make_engine):
    engine = make_engine(max_num_seqs=2)
    engine.add_request("family", list(range(100, 140)), params(n=9, kind=_delta()))
    (first,) = engine.step()
    assert sorted(completion.index for completion in first.outputs) == list(range(9))
    while engine.has_unfinished_requests():
        engine.step()


def _delta():
    from vllm.sampling_params import RequestOutputKind

    return RequestOutputKind.DELTA


@pytest.mark.slow
def test_on_the_real_model(real_llm):
    before = real_llm.llm_engine.metrics.scheduler.prompt_tokens_computed
    real_llm.reset_prefix_cache()
    prompt = list(range(300, 345))
    real_llm.generate(prompt, params(n=8, max_tokens=2), use_tqdm=False)
    assert real_llm.llm_engine.metrics.scheduler.prompt_tokens_computed - before == 45
