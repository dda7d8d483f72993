"""Rule 21: FINAL_ONLY gives one output with all n in index order; the other kinds the children that moved."""

import pytest

from tests.v1.engine.helpers import run, stream
from vllm.sampling_params import RequestOutputKind

STREAMING = (RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE)
RANDOM_ENDS = {"allowed_token_ids": [2, *range(100, 108)], "ignore_eos": False, "max_tokens": 40, "seed": 5}


@pytest.mark.parametrize("n", [1, 2, 33])
def test_final_only(engine, n):
    outputs = run(engine, n=n, **RANDOM_ENDS)
    assert len(outputs) == 1
    assert [completion.index for completion in outputs[0].outputs] == list(range(n))
    assert outputs[0].finished


@pytest.mark.parametrize("kind", STREAMING, ids=lambda kind: kind.name)
@pytest.mark.parametrize("n", [1, 5])
def test_streaming(engine, kind, n):
    outputs = run(engine, n=n, kind=kind, **RANDOM_ENDS)
    lengths = {}
    for output in outputs:
        indices = [completion.index for completion in output.outputs]
        assert indices
        assert indices == sorted(set(indices))
        assert set(indices) <= set(range(n))
        for completion in output.outputs:
            grown = len(completion.token_ids)
            if kind is RequestOutputKind.CUMULATIVE:
                assert grown > lengths.get(completion.index, 0)
                lengths[completion.index] = grown
            else:
                assert grown >= 1
                lengths[completion.index] = lengths.get(completion.index, 0) + grown
    assert sorted(lengths) == list(range(n))
    assert max(lengths.values()) == len(outputs)


@pytest.mark.parametrize("kind", STREAMING, ids=lambda kind: kind.name)
async def test_asynchronously(async_engine, kind):
    outputs = await stream(async_engine, n=3, kind=kind, max_tokens=4)
    assert all({completion.index for completion in output.outputs} <= {0, 1, 2} for output in outputs)
    (final,) = await stream(async_engine, n=3, max_tokens=4)
    assert [completion.index for completion in final.outputs] == [0, 1, 2]


def test_llm_generate_is_final_only_whatever_the_params_say(engine):
    from vllm.entrypoints.llm import LLM
    from vllm.sampling_params import SamplingParams

    own = SamplingParams(n=2, max_tokens=3)
    (output,) = LLM.from_engine(engine).generate([[5, 6, 7]], own, use_tqdm=False)
    assert output.finished
    assert len(output.outputs) == 2
    assert own.output_kind is RequestOutputKind.CUMULATIVE  # the caller's object is not touched
