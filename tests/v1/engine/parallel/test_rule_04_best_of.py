"""Rule 4: `best_of` children run, and the n with the highest mean token log-probability are returned, best first."""

import pytest

from tests.v1.engine.helpers import PROMPT, new_id, params, run, run_one, stream
from vllm.sampling_params import RequestOutputKind, SamplingParams


def means(output):
    return [completion.cumulative_logprob / len(completion.token_ids) for completion in output.outputs]


@pytest.mark.parametrize(("n", "best_of"), [(1, 5), (3, 7), (4, 4)])
@pytest.mark.parametrize("logprobs", [None, 0, 2])
def test_the_best_n_best_first(engine, n, best_of, logprobs):
    everything = run_one(engine, n=best_of, seed=11, logprobs=0)
    ranked = sorted(zip(means(everything), everything.outputs, strict=True), key=lambda pair: -pair[0])
    best = run_one(engine, n=n, best_of=best_of, seed=11, logprobs=logprobs)
    assert [completion.token_ids for completion in best.outputs] == [other.token_ids for _, other in ranked[:n]]
    assert [completion.text for completion in best.outputs] == [other.text for _, other in ranked[:n]]
    assert [completion.index for completion in best.outputs] == list(range(n))
    for completion in best.outputs:
        if logprobs is None:
            assert completion.logprobs is None
            assert completion.cumulative_logprob is None
        else:
            assert len(completion.logprobs) == len(completion.token_ids)
            assert len(completion.logprobs[0]) == logprobs + 1


def test_none_is_accepted(engine):
    assert len(run_one(engine, n=2, best_of=None).outputs) == 2


def test_shorter_completions_are_ranked_by_the_mean(engine):
    """With end-of-sequence among the tokens, lengths differ; the sum would prefer the short ones."""
    fields = {"allowed_token_ids": [2, 100, 101, 106], "ignore_eos": False, "max_tokens": 12, "seed": 3}
    everything = run_one(engine, n=8, logprobs=0, **fields)
    assert len({len(completion.token_ids) for completion in everything.outputs}) > 1
    ranked = sorted(means(everything), reverse=True)
    assert means(run_one(engine, n=8, best_of=8, logprobs=0, **fields)) == ranked


def test_fewer_than_n_is_refused():
    with pytest.raises(ValueError, match=r"best_of must be at least n"):
        SamplingParams(n=3, best_of=2)


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE])
async def test_streaming_is_refused_by_name(engine, async_engine, kind):
    own = params(n=2, best_of=4)
    own.output_kind = kind
    with pytest.raises(ValueError, match=r"best_of cannot be combined with streaming"):
        engine.add_request(new_id(), PROMPT, own)
    with pytest.raises(ValueError, match=r"best_of cannot be combined with streaming"):
        await async_engine.add_request(new_id(), PROMPT, own)


async def test_asynchronously(async_engine):
    (output,) = await stream(async_engine, n=2, best_of=5)
    assert [completion.index for completion in output.outputs] == [0, 1]


def test_logits_cannot_rank(make_engine):
    engine = make_engine(logprobs_mode="raw_logits")
    with pytest.raises(ValueError, match=r"best_of ranks by log-probability"):
        engine.add_request(new_id(), PROMPT, params(n=2, best_of=4))


def test_the_callers_params_stay_as_they_are(engine):
    own = params(n=2, best_of=4)
    run(engine, own=own)
    assert own.logprobs is None
    assert own == params(n=2, best_of=4)
