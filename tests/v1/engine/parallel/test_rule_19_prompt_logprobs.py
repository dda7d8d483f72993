"""Rule 19: prompt log-probabilities: an entry per prompt token, the first None, hot as cold, once on the parent."""

import pytest

from tests.v1.engine.helpers import KINDS, params, run
from vllm.logprobs import FlatLogprobs
from vllm.sampling_params import RequestOutputKind

PROMPT = list(range(10, 60))


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_shape_and_place(engine, n, kind):
    outputs = run(engine, PROMPT, n=n, kind=kind, prompt_logprobs=2)
    holders = outputs if kind is not RequestOutputKind.DELTA else outputs[:1]
    for output in holders:
        entries = output.prompt_logprobs
        assert len(entries) == len(PROMPT)
        assert entries[0] is None
        for entry in entries[1:]:
            assert 2 <= len(entry) <= 3
            assert all(value.rank >= 1 and isinstance(value.decoded_token, str) for value in entry.values())
    if kind is RequestOutputKind.DELTA:
        assert all(output.prompt_logprobs is None for output in outputs[1:])


def test_hot_as_cold_and_in_chunks(make_engine):
    engine = make_engine(max_num_batched_tokens=16, max_num_seqs=8)
    cold = run(engine, PROMPT, n=3, prompt_logprobs=1)[0]
    run(engine, PROMPT)
    hot = run(engine, PROMPT, n=3, prompt_logprobs=1)[0]
    whole = run(make_engine(), PROMPT, prompt_logprobs=1)[0]
    assert cold.prompt_logprobs == hot.prompt_logprobs == whole.prompt_logprobs
    assert hot.num_cached_tokens == 0


def test_zero_gives_the_token_itself(engine):
    entries = run(engine, PROMPT, prompt_logprobs=0)[0].prompt_logprobs
    assert all(len(entry) == 1 for entry in entries[1:])


def test_flat(engine):
    dicts = run(engine, PROMPT, prompt_logprobs=2)[0].prompt_logprobs
    flat = run(engine, PROMPT, prompt_logprobs=2, flat_logprobs=True)[0].prompt_logprobs
    assert isinstance(flat, FlatLogprobs)
    assert list(flat) == dicts


def test_none_unless_asked_for(engine):
    assert run(engine, PROMPT)[0].prompt_logprobs is None


def test_a_prompt_of_one_token(engine):
    assert run(engine, [7], prompt_logprobs=1)[0].prompt_logprobs == [None]


@pytest.mark.slow
def test_on_the_real_model(real_llm):
    text = "The quick brown fox jumps over the lazy dog, as it always did."
    results = []
    for _ in range(2):
        (output,) = real_llm.generate(text, params(n=2, max_tokens=2, prompt_logprobs=3), use_tqdm=False)
        results.append(output.prompt_logprobs)
        real_llm.generate(text, params(max_tokens=1), use_tqdm=False)
    assert results[0] == results[1]
    assert len(results[0]) == len(output.prompt_token_ids)
    for token, entry in zip(output.prompt_token_ids[1:], results[0][1:], strict=True):
        assert next(iter(entry)) == token
        assert entry[token].logprob <= max(value.logprob for value in entry.values())
