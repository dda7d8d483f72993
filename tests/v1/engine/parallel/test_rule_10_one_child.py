"""Rule 10: n == 1 goes through `SingularSamplingRequest`: the caller's id, no parent, no copy of the params, no
measurable cost. Calls and allocations are counted here; the benchmark measures."""

import collections
import sys

import numpy as np
import pytest

from tests.v1.engine.fakes import EOS, bundled_tokenizer
from tests.v1.engine.helpers import KINDS, PROMPT, new_id, params
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import parallel_sampling
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.engine.parallel_sampling import SingularSamplingRequest, Submission
from vllm.v1.messages import EngineCoreOutputs, EngineCoreRequest


def submit(processor, own, kind):
    request = EngineCoreRequest([], np.array(PROMPT, np.int32), own, 0.0, True, [EOS])
    return processor.add(Submission("mine", None, own, kind, request))


def message(handle, token, reason=0):
    return EngineCoreOutputs(
        np.array([handle]),
        np.array([0, 1], np.int32),
        np.array([token], np.int32),
        np.array([reason], np.uint8),
        np.array([-1]),
        np.zeros(1, np.int32),
        timestamp=1.0,
    )


def test_no_parent_is_made(engine, monkeypatch):
    def fail(*args):
        raise AssertionError("a parent for one child")

    monkeypatch.setattr(parallel_sampling, "ParentRequest", fail)
    own, request_id = params(), new_id()
    engine.add_request(request_id, PROMPT, own)
    (request,) = engine.output_processor._requests.values()
    assert type(request) is SingularSamplingRequest
    assert request.request_id is request_id
    assert len(request.handles) == 1
    while engine.has_unfinished_requests():
        engine.step()


def test_the_params_go_to_the_core_as_they_are(engine):
    own = params()
    submission = engine.processor.process(new_id(), PROMPT, own)
    assert submission.params is own
    assert submission.core_request.params is own


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_calls_per_report(kind):
    """One `collect`, and nothing else of the seam."""
    processor = OutputProcessor(bundled_tokenizer())
    request = submit(processor, params(kind=kind), kind)
    (handle,) = request.handles
    calls = collections.Counter()

    def count(frame, event, _):
        if event == "call" and frame.f_code.co_filename == parallel_sampling.__file__:
            calls[frame.f_code.co_name] += 1

    steps = 1 if kind is RequestOutputKind.FINAL_ONLY else 10
    messages = [message(handle, 1000 + step, 2 if step == steps - 1 else 0) for step in range(steps)]
    sys.setprofile(count)
    try:
        outputs = [processor.process(step).outputs for step in messages]
    finally:
        sys.setprofile(None)
    assert [len(made) for made in outputs] == [1] * steps
    assert calls == {"collect": steps}
    assert outputs[-1][0].request_id == "mine"
    processor.check_idle()


def test_allocations_per_report():
    """As many objects as the output itself needs."""
    request = submit(OutputProcessor(None), params(kind=RequestOutputKind.DELTA), RequestOutputKind.DELTA)
    completion = CompletionOutput(0, "text", [1])
    kept = [None] * 1000

    def through_the_seam():
        for at in range(1000):
            kept[at] = request.collect(0, completion)

    def bare():
        for at in range(1000):
            kept[at] = RequestOutput(request.request_id, None, PROMPT, None, [completion], False, None, None, 0)

    def blocks(make):
        make()
        before = sys.getallocatedblocks()
        kept[:] = [None] * 1000
        return before - sys.getallocatedblocks()

    assert abs(blocks(through_the_seam) - blocks(bare)) <= 10


def test_one_state_per_request(engine):
    engine.add_request(new_id(), PROMPT, params())
    assert engine.output_processor.num_children == 1
    assert not engine.output_processor._opened
    while engine.has_unfinished_requests():
        engine.step()
        assert not engine.output_processor._opened
