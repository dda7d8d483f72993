"""Rule 26: a stop string ends its child only, and no character of it is ever streamed."""

import numpy as np
import pytest

from tests.v1.engine.fakes import EOS, SCRIPT_TEXTS, bundled_tokenizer, scripted
from tests.v1.engine.helpers import KINDS, PROMPT, join, params, run, stream
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.engine.parallel_sampling import Submission
from vllm.v1.messages import EngineCoreOutputs, EngineCoreRequest, LogprobColumnsMsg

STREAMING = (RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("stop", ["STOP", "three STOP f", "e", " ", "One"])
@pytest.mark.parametrize("include", [False, True])
def test_text_and_reason(engine, kind, stop, include):
    fields = {"stop": stop, "include_stop_str_in_output": include, "seed": scripted(0), "max_tokens": 30}
    completion = join(run(engine, kind=kind, **fields), kind)[0]
    end = SCRIPT_TEXTS[0].index(stop)
    assert completion.text == SCRIPT_TEXTS[0][: end + len(stop) if include else end]
    assert completion.finish_reason == "stop"
    assert completion.stop_reason == stop


@pytest.mark.parametrize("kind", STREAMING, ids=lambda kind: kind.name)
def test_no_character_is_ever_streamed(engine, kind):
    """Also when it straddles tokens and steps: ST, then OP."""
    shown = ""
    for output in run(engine, kind=kind, seed=scripted(0), stop="three STOP four", max_tokens=30):
        text = output.outputs[0].text
        shown = shown + text if kind is RequestOutputKind.DELTA else text
        assert "One two ".startswith(shown)
    assert shown == "One two "


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_what_only_looks_like_one_is_shown(engine, kind):
    completion = join(run(engine, kind=kind, seed=scripted(3), stop="STOP", max_tokens=14), kind)[0]
    assert completion.finish_reason == "length"
    assert completion.text == bundled_tokenizer().decode(completion.token_ids)


def test_only_that_child_is_stopped(engine):
    children = run(engine, n=4, seed=scripted(0), stop="STOP", max_tokens=30)[0].outputs
    assert [completion.finish_reason for completion in children] == ["stop", "length", "stop", "length"]
    assert [len(completion.token_ids) for completion in children][1::2] == [30, 30]


def test_the_core_computes_no_further(make_engine):
    engine = make_engine()
    run(engine, seed=scripted(2), stop="STOP", max_tokens=200)
    assert engine.model_executor.steps <= 6


async def test_asynchronously(async_engine):
    outputs = await stream(
        async_engine, n=3, kind=RequestOutputKind.DELTA, seed=scripted(0), stop="STOP", max_tokens=20
    )
    assert join(outputs, RequestOutputKind.DELTA)[0].text == "One two three "


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_tokens_past_the_stop_are_trimmed(kind):
    """Several tokens in one step, as speculation gives them."""
    tokens = bundled_tokenizer().encode("One two STOP three four")
    used = next(i for i in range(len(tokens)) if "STOP" in bundled_tokenizer().decode(tokens[: i + 1])) + 1
    processor = OutputProcessor(bundled_tokenizer())
    own = params(kind=kind, stop="STOP", logprobs=0)
    request = EngineCoreRequest([], np.array(PROMPT, np.int32), own, 0.0, True, [EOS])
    (handle,) = processor.add(Submission("x", None, own, kind, request)).handles
    count = len(tokens)
    processed = processor.process(
        EngineCoreOutputs(
            np.array([handle]), np.array([0, count], np.int32), np.array(tokens, np.int32), np.zeros(1, np.uint8),
            np.array([-1]), np.zeros(1, np.int32),
            logprobs=LogprobColumnsMsg(
                np.arange(count + 1, dtype=np.int32), np.array(tokens, np.int32), np.full(count, -0.5, np.float32),
                np.ones(count, np.int32),
            ),
        )
    )  # fmt: skip
    assert processed.stops == [handle]
    (completion,) = processed.outputs[0].outputs
    assert completion.text == "One two "
    assert completion.token_ids == tokens[:used]
    assert len(completion.logprobs) == used
    assert completion.cumulative_logprob == -0.5 * used
    processor.check_idle()
