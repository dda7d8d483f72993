"""Rule 11: n > 1 makes one parent; its children reach the core in one message, all or none, under internal ids."""

import pytest

from tests.v1.engine.helpers import PROMPT, drain, new_id, params, run_one
from vllm.v1.engine import parallel_sampling
from vllm.v1.engine.parallel_sampling import ParentRequest


def test_one_parent_and_one_message(engine, monkeypatch):
    sent = []
    add = engine.client.add_requests
    monkeypatch.setattr(engine.client, "add_requests", lambda requests: (sent.append(requests), add(requests)))
    engine.add_request(new_id(), PROMPT, params(n=50))
    (request,) = engine.output_processor._requests.values()
    assert type(request) is ParentRequest
    assert len(sent) == 1
    (message,) = sent[0]
    assert message.handles == request.handles
    assert len(set(request.handles)) == 50
    (output,) = drain(engine).values()
    assert len(output[0].outputs) == 50


def test_none_are_left_when_the_core_refuses(engine, monkeypatch):
    def refuse(requests):
        raise RuntimeError("not today")

    request_id = new_id()
    with monkeypatch.context() as patch:
        patch.setattr(engine.client, "add_requests", refuse)
        with pytest.raises(RuntimeError, match="not today"):
            engine.add_request(request_id, PROMPT, params(n=5))
    assert not engine.has_unfinished_requests()
    engine.output_processor.check_idle()
    engine.add_request(request_id, PROMPT, params(n=5))  # the id is free
    assert len(drain(engine)[request_id][0].outputs) == 5


def test_the_core_takes_all_or_none(make_engine):
    """A request that passes the front end and is refused by the core, in both forms."""
    for multiprocessing in (False, True):
        engine = make_engine(multiprocessing)
        good = engine.processor.process(new_id(), PROMPT, params(n=4))
        good.core_request.prompt_token_ids = good.core_request.prompt_token_ids[:0]  # no front end lets that pass
        if multiprocessing:
            engine.submit(good)
            (outputs,) = drain(engine).values()
            assert [completion.finish_reason for completion in outputs[0].outputs] == ["error"] * 4
            assert "empty" in outputs[0].outputs[0].stop_reason
        else:
            with pytest.raises(ValueError, match="empty"):
                engine.submit(good)
        engine.check_integrity()
        assert len(run_one(engine, n=2).outputs) == 2


def test_no_user_id_collides_with_a_childs(engine):
    ids = ["a", "0_a", "1_a", "a_0", "a_1", "a-0", "1", "2", "3"]
    for request_id in ids:
        engine.add_request(request_id, PROMPT, params(n=3))
    outputs = drain(engine)
    assert sorted(outputs) == sorted(ids)
    for request_id in ids:
        (output,) = outputs[request_id]
        assert output.request_id == request_id
        assert len(output.outputs) == 3


def test_nobody_else_asks_for_n():
    """`fan_out` alone decides; children and requests are of one kind for everybody else."""
    import pathlib

    folder = pathlib.Path(parallel_sampling.__file__).parent
    for path in folder.glob("*.py"):
        if path.name != "parallel_sampling.py":
            assert "ParentRequest" not in path.read_text(), path.name
            assert "SingularSamplingRequest" not in path.read_text(), path.name
