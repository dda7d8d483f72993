"""Constraints in `LLM`: through the whole engine, under memory pressure, on every backend."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest

from tests.models_util import tiny_folder
from vllm import LLM, SamplingParams
from vllm.exceptions import BadRequestError, EngineGenerateError
from vllm.sampling_params import GuidedDecodingParams, StructuredOutputsParams

PATTERN = "[ab]{20,60}c"


@pytest.fixture(scope="module", params=["torch", "cpu"])
def llm(request: pytest.FixtureRequest, require_backend: Callable[[str], None]) -> Iterator[LLM]:
    require_backend(request.param)
    own = LLM(
        str(tiny_folder()), backend=request.param, dtype="float32", num_gpu_blocks_override=12, max_num_seqs=8,
        max_model_len=128, num_threads=1,
    )  # fmt: skip
    yield own
    own.llm_engine.check_integrity()
    own.shutdown()


def params(**more: object) -> SamplingParams:
    constraint = StructuredOutputsParams(regex=PATTERN)
    return SamplingParams(**{"n": 8, "max_tokens": 80, "seed": 3, "structured_outputs": constraint} | more)


def test_children_are_preempted_and_go_on_in_their_grammar(llm: LLM) -> None:
    (output,) = llm.generate("some prompt", params(), use_tqdm=False)
    assert output.metrics is not None
    texts = [completion.text for completion in output.outputs]
    assert all(re.fullmatch(PATTERN, text) for text in texts), texts
    assert len(set(texts)) == 8
    alone = [llm.generate("some prompt", params(n=1, seed=3 + i), use_tqdm=False)[0].outputs[0].text for i in range(3)]
    assert texts[:3] == alone
    assert max(metric.value for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions_total") > 0


def test_the_older_name(llm: LLM) -> None:
    own = SamplingParams(guided_decoding=GuidedDecodingParams(choice=["yes", "no"]))
    assert llm.generate("a", own, use_tqdm=False)[0].outputs[0].text in ("yes", "no")


def test_a_batch_of_different_constraints(llm: LLM) -> None:
    plain = SamplingParams(max_tokens=5, ignore_eos=True)
    choices = [SamplingParams(structured_outputs=StructuredOutputsParams(choice=[f"{i}!"])) for i in range(6)]
    outputs = llm.generate(["p"] * 7, [*choices, plain], use_tqdm=False)
    assert [output.outputs[0].text for output in outputs[:6]] == [f"{i}!" for i in range(6)]
    assert len(outputs[6].outputs[0].token_ids) == 5


def test_rule_33_a_broken_grammar_ends_its_request_alone(llm: LLM) -> None:
    with pytest.raises(BadRequestError, match="structured_outputs"):
        llm.generate("a", params(structured_outputs=StructuredOutputsParams(regex="((")), use_tqdm=False)
    endless = params(n=2, structured_outputs=StructuredOutputsParams(grammar="start: start"))
    with pytest.raises(EngineGenerateError) as caught:
        llm.generate(["a", "b"], [endless, params(n=1)], use_tqdm=False)
    assert re.fullmatch(PATTERN, caught.value.outputs[1].outputs[0].text)
