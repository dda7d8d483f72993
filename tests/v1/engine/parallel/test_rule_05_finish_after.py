"""Rule 5: as soon as k children have finished by themselves, the others end with what they have."""

import pytest

from tests.v1.engine.fakes import EOS, scripted
from tests.v1.engine.helpers import KINDS, join, params, run, run_one, stream
from vllm.sampling_params import RequestOutputKind, SamplingParams

RANDOM_ENDS = {"allowed_token_ids": [EOS, *range(100, 111)], "ignore_eos": False, "max_tokens": 60, "seed": 5}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("k", [1, 2, 4, 6])
def test_others_are_aborted_with_what_they_have(engine, kind, k):
    alone = run_one(engine, n=6, **RANDOM_ENDS).outputs
    lengths = sorted(len(completion.token_ids) for completion in alone)
    assert len(set(lengths)) > 2
    limit = lengths[k - 1]
    ended = join(run(engine, n=6, finish_after=k, kind=kind, **RANDOM_ENDS), kind)
    assert sorted(ended) == list(range(6))
    for index, reference in enumerate(alone):
        completion = ended[index]
        if len(reference.token_ids) <= limit:  # also all that end in the same step as the k-th
            assert completion.token_ids == reference.token_ids
            assert completion.text == reference.text
            assert completion.finish_reason == reference.finish_reason
        else:
            assert completion.finish_reason == "abort"
            assert completion.token_ids == reference.token_ids[: len(completion.token_ids)]
            assert len(completion.token_ids) == limit


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_stop_strings_are_counted_by_the_front_end(engine, kind):
    # Child 2 says STOP at once, child 0 at its fourth word, the others never.
    fields = {"n": 4, "seed": scripted(0), "stop": "STOP", "max_tokens": 50, "kind": kind}
    first = join(run(engine, finish_after=1, **fields), kind)
    assert [first[i].finish_reason for i in range(4)] == ["abort", "abort", "stop", "abort"]
    assert first[2].stop_reason == "STOP"
    second = join(run(engine, finish_after=2, **fields), kind)
    assert [second[i].finish_reason for i in range(4)] == ["stop", "abort", "stop", "abort"]
    assert second[0].text == "One two three "
    assert "alpha beta gamma delta epsilon zeta eta theta".startswith(second[1].text)


async def test_asynchronously(async_engine):
    (output,) = await stream(async_engine, n=6, finish_after=1, **RANDOM_ENDS)
    assert {completion.finish_reason for completion in output.outputs} == {"stop", "abort"}


def test_refused_by_name():
    with pytest.raises(ValueError, match=r"finish_after cannot be combined with best_of"):
        SamplingParams(n=2, best_of=4, finish_after=1)
    for bad in (0, -1, True, 1.0, "1", 4):
        with pytest.raises(ValueError, match=r"finish_after must be"):
            SamplingParams(n=3, finish_after=bad)


def test_all_of_them_is_as_none(engine):
    kind = RequestOutputKind.FINAL_ONLY
    assert join(run(engine, n=3, finish_after=3, **RANDOM_ENDS), kind) == join(run(engine, n=3, **RANDOM_ENDS), kind)


def test_default_is_none():
    assert params().finish_after is None
