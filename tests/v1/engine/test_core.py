"""The core by itself: answers, sleep, weights."""

import numpy as np
import pytest

from tests.v1.engine.fakes import FakeExecutor, fake_config
from tests.v1.engine.helpers import PROMPT, params, run, run_one
from vllm.exceptions import ConfigError, EngineError
from vllm.v1.engine.core import EngineCore, refusal
from vllm.v1.messages import EngineCoreRequest, FinishReason


@pytest.fixture
def core():
    core = EngineCore(fake_config(enable_sleep_mode=True))
    yield core
    core.abort(list(core.scheduler._state.children))
    core.step()
    core.check_integrity()
    core.shutdown()


def request(*handles, stream=False, **fields):
    own = params(n=len(handles), **fields)
    return EngineCoreRequest(
        list(handles), np.array(PROMPT, np.int32), own, 0.0, stream, [2], finish_after=own.finish_after
    )


def steps(core):
    messages = []
    while core.has_work:
        message = core.step()
        if message is not None:
            messages.append(message)
    return messages


def test_a_final_only_child_is_reported_once(core):
    core.add_request(request(1, 2, 3, max_tokens=9))
    messages = [message for message in steps(core) if len(message.handles)]
    assert len(messages) == 1
    assert sorted(messages[0].handles.tolist()) == [1, 2, 3]
    assert messages[0].offsets.tolist() == [0, 9, 18, 27]
    assert messages[0].finish_reasons.tolist() == [FinishReason.LENGTH] * 3


def test_a_streaming_child_is_reported_in_every_step(core):
    core.add_request(request(1, stream=True, max_tokens=9))
    messages = steps(core)
    assert [len(message.token_ids) for message in messages if len(message.handles)] == [1] * 9


def test_an_abort_is_answered_with_the_tokens_not_yet_sent(core):
    core.add_request(request(1, 2, max_tokens=50))
    for _ in range(5):
        core.step()
    core.abort([2, 77])
    assert core.has_work
    message = core.step()
    assert message.handles.tolist() == [2]
    assert len(message.token_ids) in (4, 5)
    assert message.finish_reasons.tolist() == [FinishReason.ABORT]


def test_an_abort_before_anything_ran_is_answered_too(core):
    core.add_request(request(1, 2))
    core.abort([1, 2])
    (message,) = steps(core)
    assert sorted(message.handles.tolist()) == [1, 2]
    assert message.offsets[-1] == 0
    assert not core.has_work


def test_a_stopped_child_says_nothing_more(core):
    core.add_request(request(1, 2, stream=True, max_tokens=9))
    core.step()
    core.stop_children([1])
    for message in steps(core):
        assert 1 not in message.handles.tolist()


def test_stopped_children_count_for_finish_after(core):
    core.add_request(request(1, 2, 3, stream=True, max_tokens=50, finish_after=1))
    core.step()
    core.stop_children([2])
    (message,) = steps(core)
    assert sorted(message.handles.tolist()) == [1, 3]
    assert message.finish_reasons.tolist() == [FinishReason.ABORT] * 2


def test_sleep(core):
    core.add_request(request(1))
    with pytest.raises(EngineError, match="unfinished"):
        FakeSleep.sleep(core)
    steps(core)
    core.sleep()
    assert core.is_sleeping()
    with pytest.raises(EngineError, match=r"asleep.*wake_up"):
        core.add_request(request(2))
    core.wake_up()
    core.add_request(request(2))
    assert steps(core)


class FakeSleep:
    """What the worker does: it refuses while requests are unfinished."""

    @staticmethod
    def sleep(core):
        if core.executor.is_busy():
            raise EngineError("sleep() while requests are unfinished")
        core.sleep()


def test_sleep_must_be_enabled():
    core = EngineCore(fake_config())
    with pytest.raises(ConfigError, match="enable_sleep_mode"):
        core.sleep()


def test_new_weights_make_cached_blocks_stale(make_engine):
    engine = make_engine()
    prompt = list(range(100, 164))
    run(engine, prompt)
    assert run_one(engine, prompt).num_cached_tokens == 48
    engine.client.core.load_weights([("x", np.zeros(1))])
    assert run_one(engine, prompt).num_cached_tokens == 0
    assert run_one(engine, prompt).num_cached_tokens == 48


def test_the_executor_knows_when_requests_are_unfinished(core):
    assert not core.executor.is_busy()
    core.add_request(request(1))
    assert core.executor.is_busy()
    steps(core)
    assert not core.executor.is_busy()


def test_refusals():
    message = refusal([5, 6], "no")
    assert message.handles.tolist() == [5, 6]
    assert message.errors == {5: "no", 6: "no"}
    assert message.offsets.tolist() == [0, 0, 0]


def test_an_executor_by_import_path():
    assert type(EngineCore(fake_config()).executor) is FakeExecutor
    with pytest.raises(NotImplementedError, match="distributed_executor_backend='mp'"):
        EngineCore(fake_config(distributed_executor_backend="mp"))
