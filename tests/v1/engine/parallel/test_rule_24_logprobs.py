"""Rule 24: as many logprobs as token ids in every output, the sampled token first, ranks from 1, and the sum."""

import pytest

from tests.v1.engine.fakes import bundled_tokenizer, scripted
from tests.v1.engine.helpers import KINDS, params, run
from vllm.logprobs import FlatLogprobs, Logprob
from vllm.sampling_params import RequestOutputKind


def check(outputs, kind, count):
    sums = {}
    for output in outputs:
        for completion in output.outputs:
            assert len(completion.logprobs) == len(completion.token_ids)
            fresh = 0.0
            for token, entry in zip(completion.token_ids, completion.logprobs, strict=True):
                assert next(iter(entry)) == token
                assert len(entry) in (count, count + 1)
                for value in entry.values():
                    assert type(value) is Logprob
                    assert type(value.rank) is int
                    assert value.rank >= 1
                assert entry[token].decoded_token == bundled_tokenizer().token_text(token)
                fresh += entry[token].logprob
            earlier = sums.get(completion.index, 0.0) if kind is RequestOutputKind.DELTA else 0.0
            sums[completion.index] = earlier + fresh
            assert completion.cumulative_logprob == pytest.approx(sums[completion.index])


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("count", [0, 1, 5])
@pytest.mark.parametrize("n", [1, 3])
def test_shape(engine, kind, count, n):
    check(run(engine, n=n, kind=kind, logprobs=count), kind, count)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_with_stop_strings_and_aborts(engine, kind):
    outputs = run(engine, n=4, kind=kind, logprobs=1, seed=scripted(0), stop="STOP", finish_after=1, max_tokens=40)
    assert {c.finish_reason for output in outputs for c in output.outputs} >= {"stop", "abort"}
    check(outputs, kind, 1)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_flat(engine, kind):
    dicts = run(engine, n=2, kind=kind, logprobs=3, seed=4)
    flat = run(engine, n=2, kind=kind, logprobs=3, seed=4, flat_logprobs=True)
    for one, other in zip(dicts, flat, strict=True):
        for completion, twin in zip(one.outputs, other.outputs, strict=True):
            assert isinstance(twin.logprobs, FlatLogprobs)
            assert list(twin.logprobs) == completion.logprobs
            assert twin.cumulative_logprob == completion.cumulative_logprob


def test_none_unless_asked_for(engine):
    from tests.v1.engine.helpers import PROMPT, drain, new_id

    plain, asking = new_id(), new_id()
    engine.add_request(plain, PROMPT, params(n=2))
    engine.add_request(asking, PROMPT, params(n=2, logprobs=1))  # in the same steps
    outputs = drain(engine)
    for completion in outputs[plain][0].outputs:
        assert completion.logprobs is None
        assert completion.cumulative_logprob is None
    check(outputs[asking], RequestOutputKind.FINAL_ONLY, 1)


def test_the_engines_limit(make_engine):
    from tests.v1.engine.helpers import PROMPT, new_id

    engine = make_engine(max_logprobs=5)
    for name in ("logprobs", "prompt_logprobs"):
        for count in (6, -1):
            with pytest.raises(ValueError, match=rf"{name} must be at most 5"):
                engine.add_request(new_id(), PROMPT, params(**{name: count}))
    run(make_engine(max_logprobs=-1), logprobs=-1)


@pytest.mark.slow
def test_on_the_real_model(real_llm):
    (output,) = real_llm.generate("The sky is", params(n=3, seed=1, max_tokens=5, logprobs=4), use_tqdm=False)
    for completion in output.outputs:
        for token, entry in zip(completion.token_ids, completion.logprobs, strict=True):
            ranked = sorted(entry.values(), key=lambda value: value.rank)
            assert [value.logprob for value in ranked] == sorted((v.logprob for v in ranked), reverse=True)
            assert entry[token].rank == next(v.rank for k, v in entry.items() if k == token)
        assert completion.cumulative_logprob == pytest.approx(
            sum(e[t].logprob for t, e in zip(completion.token_ids, completion.logprobs, strict=True)), rel=1e-6
        )
