"""Rule 17: the engine counts computed prompt tokens: len(prompt) for one cold request, whatever n."""

import pytest

from tests.v1.engine.helpers import counter, params, run, stream
from vllm.entrypoints.llm import LLM

COMPUTED, TAKEN = "vllm:prompt_tokens_computed_total", "vllm:prompt_tokens_total"


@pytest.mark.parametrize("n", [1, 4, 64])
def test_in_the_metrics(engine, n):
    before = counter(engine, COMPUTED), counter(engine, TAKEN)
    prompt = list(range(3000, 3077))
    run(engine, prompt, n=n)
    assert counter(engine, COMPUTED) - before[0] == 77
    assert counter(engine, TAKEN) - before[1] == 77


def test_of_llm(engine):
    llm = LLM.from_engine(engine)
    before = counter(engine, COMPUTED)
    llm.generate([list(range(100, 150)), list(range(200, 230))], params(n=3), use_tqdm=False)
    after = {metric.name: metric for metric in llm.get_metrics()}
    assert after[COMPUTED].value - before == 80


async def test_asynchronously(async_engine):
    before = counter(async_engine, COMPUTED)
    await stream(async_engine, list(range(4000, 4100)), n=8)
    assert counter(async_engine, COMPUTED) - before == 100


def test_a_cached_prompt_costs_little(engine):
    prompt = list(range(5000, 5064))
    run(engine, prompt)
    before = counter(engine, COMPUTED)
    run(engine, prompt, n=3)
    assert 0 < counter(engine, COMPUTED) - before <= 16


@pytest.mark.slow
@pytest.mark.parametrize("duplicates", [False, True], ids=["one_request", "duplicates"])
def test_64_ways_on_the_real_model(real_llm, duplicates):
    real_llm.reset_prefix_cache()
    before = real_llm.llm_engine.metrics.scheduler.prompt_tokens_computed
    prompt = list(range(300, 400)) if duplicates else list(range(400, 500))
    prompts, n = ([prompt] * 64, 1) if duplicates else (prompt, 64)
    outputs = real_llm.generate(prompts, params(n=n, max_tokens=2), use_tqdm=False)
    assert sum(len(output.outputs) for output in outputs) == 64
    assert real_llm.llm_engine.metrics.scheduler.prompt_tokens_computed - before == 100
