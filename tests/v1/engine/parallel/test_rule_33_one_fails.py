"""Rule 33: a failure in one child's processing ends that request with an error, and no other."""

import asyncio

import pytest

from tests.v1.engine.helpers import KINDS, PROMPT, drain, new_id, params, run_one, until_idle
from vllm.entrypoints.llm import LLM
from vllm.exceptions import EngineGenerateError


class Fails:
    """A logits processor that raises at a position."""

    def __init__(self, at):
        self.at = at

    def __call__(self, output_ids, logits):
        if len(output_ids) == self.at:
            raise RuntimeError("no such luck")
        return logits


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("n", [1, 4])
def test_only_that_request_ends(make_engine, kind, at, n):
    engine = make_engine()
    bad, good = new_id(), new_id()
    engine.add_request(bad, PROMPT, params(n=n, kind=kind, logits_processors=[Fails(at)]))
    engine.add_request(good, PROMPT, params(n=3, kind=kind, seed=1))
    outputs = drain(engine)
    reasons = {c.index: c for output in outputs[bad] for c in output.outputs if c.finish_reason}
    assert outputs[bad][-1].finished
    assert sorted(reasons) == list(range(n))
    assert "error" in {c.finish_reason for c in reasons.values()}
    assert {c.finish_reason for c in reasons.values()} <= {"error", "abort"}
    failed = next(c for c in reasons.values() if c.finish_reason == "error")
    assert "no such luck" in failed.stop_reason
    assert {c.finish_reason for output in outputs[good] for c in output.outputs if c.finish_reason} == {"length"}


def test_generate_finishes_the_others_and_raises(make_engine):
    engine = make_engine()
    llm = LLM.from_engine(engine)
    own = [params(seed=i) for i in range(5)]
    own[2] = params(n=2, logits_processors=[Fails(1)])
    with pytest.raises(EngineGenerateError, match=r"prompt 2: .*no such luck") as caught:
        llm.generate([PROMPT] * 5, own, use_tqdm=False)
    outputs = caught.value.outputs
    assert len(outputs) == 5
    for index in (0, 1, 3, 4):
        assert outputs[index].outputs[0].finish_reason == "length"
        assert outputs[index].outputs == run_one(engine, seed=index).outputs
    assert "error" in {c.finish_reason for c in outputs[2].outputs}
    assert len(llm.generate([PROMPT], params(n=2), use_tqdm=False)[0].outputs) == 2


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
async def test_asynchronously(make_async_engine, kind):
    engine = make_async_engine()

    async def consume(own):
        return [output async for output in engine.generate(PROMPT, own, new_id())]

    bad, good = await asyncio.gather(
        consume(params(n=3, kind=kind, logits_processors=[Fails(2)])),
        consume(params(n=3, kind=kind)),
        return_exceptions=True,
    )
    assert isinstance(bad, EngineGenerateError)
    assert "no such luck" in str(bad)
    assert good[-1].finished
    await until_idle(engine)


def test_callables_cannot_reach_another_process(make_engine):
    engine = make_engine(multiprocessing=True)
    with pytest.raises(NotImplementedError, match=r"logits_processors.*in-process core"):
        engine.add_request(new_id(), PROMPT, params(logits_processors=[Fails(0)]))
    assert len(run_one(engine).outputs) == 1


@pytest.mark.slow
def test_on_the_real_model(real_llm):
    with pytest.raises(EngineGenerateError, match="no such luck") as caught:
        real_llm.generate(
            ["One", "Two"],
            [params(n=2, max_tokens=4, logits_processors=[Fails(2)]), params(n=2, max_tokens=4)],
            use_tqdm=False,
        )
    assert [c.finish_reason for c in caught.value.outputs[1].outputs] == ["length"] * 2
