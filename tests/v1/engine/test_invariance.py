"""Rule 6 through the whole engine, on every backend: a seeded request says the same, bit for bit, whatever is around
it: alone, in a random crowd, chunked at any budget, preempted, shared or not, in process or in another process."""

import random

import pytest

from tests.models_util import tiny_folder
from vllm import LLM, SamplingParams

QUIET = {"use_tqdm": False}
BACKENDS = {
    "cpu-float32": {"backend": "cpu", "dtype": "float32"},
    "cpu-bfloat16": {"backend": "cpu", "dtype": "bfloat16"},
    "torch-float32": {"backend": "torch", "dtype": "float32"},
}
RNG = random.Random(11)
PROMPTS = [[RNG.randrange(256) for _ in range(length)] for length in (1, 15, 16, 37, 270, 300)]
"""Shorter than a block, a block, and longer than a partition of attention."""
SEEDS = (3, 50, 2**63 - 2)
CHILDREN = 3
LENGTH = 7


def make(backend, **changes):
    fields = {"max_model_len": 512, "max_num_seqs": 16, "num_gpu_blocks_override": 300, "generation_config": "vllm"}
    return LLM(str(tiny_folder("gemma3")), **(fields | BACKENDS[backend] | changes))


def params(seed, n=1, **fields):
    return SamplingParams(seed=seed, n=n, max_tokens=LENGTH, logprobs=2, ignore_eos=True, top_p=0.95, **fields)


def said(completion):
    return completion.token_ids, completion.logprobs, completion.cumulative_logprob


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request, require_backend):
    require_backend(BACKENDS[request.param]["backend"])
    return request.param


@pytest.fixture(scope="module")
def alone(backend):
    """What every (prompt, seed) says by itself, on a cold cache."""
    expected = {}
    with make(backend, enable_prefix_caching=False) as llm:
        for number, prompt in enumerate(PROMPTS):
            for seed in SEEDS:
                for index in range(CHILDREN):
                    own = (seed + index) % 2**63
                    expected[number, own] = said(llm.generate([prompt], params(own), **QUIET)[0].outputs[0])
    return expected


def check(llm, alone, rng, crowd=True, times=1):
    """All requests at once in random order, among strangers without seeds."""
    work = [(number, seed) for number in range(len(PROMPTS)) for seed in SEEDS] * times
    if crowd:
        work += [(None, None)] * 6
    rng.shuffle(work)
    prompts, own = [], []
    for number, seed in work:
        if number is None:
            prompts.append([rng.randrange(256) for _ in range(rng.randrange(1, 60))])
            own.append(SamplingParams(n=rng.randrange(1, 4), max_tokens=rng.randrange(1, 15), temperature=1.5))
        else:
            prompts.append(PROMPTS[number])
            own.append(params(seed, CHILDREN))
    for (number, seed), output in zip(work, llm.generate(prompts, own, **QUIET), strict=True):
        if number is not None:
            for index, completion in enumerate(output.outputs):
                assert said(completion) == alone[number, (seed + index) % 2**63]
    llm.llm_engine.check_integrity()


@pytest.mark.parametrize("caching", [True, False], ids=["shared", "not_shared"])
def test_in_a_crowd(backend, alone, caching):
    rng = random.Random(1)
    with make(backend, enable_prefix_caching=caching) as llm:
        check(llm, alone, rng, times=2)  # the same request twice, too
        check(llm, alone, rng)  # what is cached now


@pytest.mark.parametrize("budget", [3, 17, 100])
def test_chunked(backend, alone, budget):
    with make(backend, max_num_batched_tokens=budget, max_num_seqs=3) as llm:
        check(llm, alone, random.Random(budget))


def test_preempted(backend, alone):
    with make(backend, num_gpu_blocks_override=30) as llm:
        check(llm, alone, random.Random(2))
        assert llm.llm_engine.metrics.scheduler.num_preemptions > 0


def test_in_another_process(backend, alone, monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    with make(backend) as llm:
        assert not llm.llm_engine.client.in_process
        check(llm, alone, random.Random(3))
