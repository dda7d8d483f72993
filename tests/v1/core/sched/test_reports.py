"""What the core tells: ends and their reasons, what is streamed and what is told once, aborts, failures, counts."""

from __future__ import annotations

import numpy as np
import pytest

from tests.v1.core.simulation import EOS, Simulation, contents, draw, expected_tokens
from vllm.exceptions import IntegrityError
from vllm.sampling_params import SamplingParams
from vllm.v1.messages import FinishReason
from vllm.v1.step import RunnerOutput

PROMPT = [5, 6, 7, 8, 9, 10]


def seed_that_ends(kind: str, at: int, most: int = 30) -> int:
    """A seed whose output has its first EOS as token number `at`, or (kind "none") none at all."""
    for seed in range(100_000):
        tokens, reason, _ = expected_tokens(PROMPT, seed, SamplingParams(max_tokens=most, seed=seed), 1000)
        if kind == "none" and reason == FinishReason.LENGTH:
            return seed
        if kind == "eos" and reason == FinishReason.STOP and len(tokens) == at:
            return seed
    raise AssertionError


LONG = seed_that_ends("none", 0)
EOS_AT_1, EOS_AT_3 = seed_that_ends("eos", 1), seed_that_ends("eos", 3)


# Ends


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 2])
def test_max_tokens(stream, n):
    simulation = Simulation()
    handles = simulation.add(PROMPT, n=n, stream=stream, max_tokens=5, seed=LONG, ignore_eos=True)
    simulation.run()
    simulation.check_outputs()
    for handle in handles:
        child = simulation.children[handle]
        assert (child.reason, child.stop_reason, len(child.tokens)) == (FinishReason.LENGTH, -1, 5)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("seed", "count"), [(EOS_AT_1, 1), (EOS_AT_3, 3)])
def test_end_of_sequence_has_no_stop_reason(stream, seed, count):
    simulation = Simulation()
    (handle,) = simulation.add(PROMPT, stream=stream, max_tokens=30, seed=seed)
    simulation.run()
    child = simulation.children[handle]
    assert (child.reason, child.stop_reason) == (FinishReason.STOP, -1)
    assert len(child.tokens) == count
    assert child.tokens[-1] == EOS


def test_ignore_eos_goes_on():
    simulation = Simulation()
    (handle,) = simulation.add(PROMPT, max_tokens=7, seed=EOS_AT_3, ignore_eos=True)
    simulation.run()
    simulation.check_outputs()
    assert simulation.children[handle].reason == FinishReason.LENGTH


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("position", [0, 2])
@pytest.mark.parametrize("more", [0, 20])
@pytest.mark.parametrize("n", [1, 2])
def test_stop_token_ids(stream, position, more, n):
    """Few of them are compared as columns, many one by one."""
    tokens, _, _ = expected_tokens(PROMPT, LONG, SamplingParams(max_tokens=30), 1000)
    stop = tokens[position]
    simulation = Simulation()
    handles = simulation.add(
        PROMPT, n=n, stream=stream, max_tokens=30, seed=LONG, stop_token_ids=[stop, *range(900, 900 + more)]
    )
    simulation.run()
    simulation.check_outputs()
    child = simulation.children[handles[0]]
    assert (child.reason, child.stop_reason) == (FinishReason.STOP, stop)
    assert child.tokens == tokens[: tokens.index(stop) + 1]


def test_eos_among_the_stop_token_ids_is_still_eos():
    simulation = Simulation()
    (handle,) = simulation.add(PROMPT, max_tokens=30, seed=EOS_AT_3, stop_token_ids=[EOS])
    simulation.run()
    assert simulation.children[handle].stop_reason == -1


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(("seed", "least", "ends"), [(EOS_AT_3, 3, True), (EOS_AT_3, 4, False), (EOS_AT_1, 2, False)])
def test_min_tokens(n, seed, least, ends):
    """The sampler bans them; if one comes nevertheless, it does not end the child before its time."""
    simulation = Simulation()
    handles = simulation.add(PROMPT, n=n, max_tokens=30, min_tokens=least, seed=seed)
    simulation.run()
    simulation.check_outputs()
    assert (len(simulation.children[handles[0]].tokens) == least) == ends


def test_the_context_ends_a_child():
    simulation = Simulation(max_model_len=10)
    (handle,) = simulation.add(PROMPT, max_tokens=None, seed=LONG, ignore_eos=True)
    simulation.run()
    child = simulation.children[handle]
    assert (child.reason, len(child.tokens)) == (FinishReason.LENGTH, 4)


@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("caching", [True, False])
def test_the_cache_ends_a_child_at_the_same_length_whatever_n(n, caching):
    simulation = Simulation(num_blocks=3, enable_prefix_caching=caching)
    simulation.add(PROMPT, n=n, max_tokens=None, seed=LONG, ignore_eos=True)
    simulation.run()
    simulation.check_outputs()
    assert {len(child.tokens) for child in simulation.children.values()} == {7}  # the last one needs no room


def test_stop_wins_over_length_in_one_token():
    simulation = Simulation()
    (handle,) = simulation.add(PROMPT, max_tokens=3, seed=EOS_AT_3)
    simulation.run()
    assert simulation.children[handle].reason == FinishReason.STOP


# Streams, and those that are told once


def test_a_stream_tells_every_token_in_its_step_and_the_others_nothing_before_their_ends():
    simulation = Simulation()
    (stream,) = simulation.add(PROMPT, stream=True, max_tokens=6, seed=LONG)
    (once,) = simulation.add(PROMPT, max_tokens=6, seed=LONG)
    handles = [message.handles.tolist() for message in messages(simulation)]
    assert handles == [[stream]] * 5 + [[stream, once]]
    assert [message.new_tokens for message in simulation.messages] == [2] * 6
    assert simulation.children[stream].tokens == simulation.children[once].tokens
    assert simulation.messages[0].first_token_handles.tolist() == [stream, once]
    assert all(message.first_token_handles is None for message in simulation.messages[1:])


def messages(simulation: Simulation):
    simulation.run()
    simulation.check_outputs()
    return simulation.messages


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("asked", [0, 3])
def test_logprobs_go_with_their_tokens(stream, asked):
    simulation = Simulation(max_num_seqs=3)
    simulation.add(PROMPT, n=4, stream=stream, max_tokens=6, logprobs=asked)
    simulation.add(PROMPT, stream=True, max_tokens=3)
    simulation.add(PROMPT, max_tokens=4)
    messages(simulation)  # the simulation compares every entry
    assert any(message.logprobs is not None for message in simulation.messages)


def test_a_message_without_logprobs_has_no_columns_for_them():
    simulation = Simulation()
    simulation.add(PROMPT, n=2, stream=True, max_tokens=3)
    assert all(message.logprobs is None for message in messages(simulation))


def test_a_step_without_a_token_says_nothing():
    simulation = Simulation(max_num_batched_tokens=4)
    simulation.add(PROMPT, max_tokens=3)
    simulation.step()
    assert simulation.messages == []


def test_times_stand_beside_those_that_ended_and_in_order():
    simulation = Simulation()
    simulation.add(PROMPT, stream=True, max_tokens=2, seed=LONG)
    simulation.add(PROMPT, n=2, stream=True, max_tokens=4, seed=LONG)
    simulation.add(PROMPT, n=2, max_tokens=4, seed=LONG)
    last = messages(simulation)[-1]
    assert len(last.finished_times.scheduled) == 4
    assert simulation.children[1].times[2] < simulation.children[2].times[2]


def test_statistics():
    simulation = Simulation(max_num_seqs=2)
    simulation.add(PROMPT, n=3, stream=True, max_tokens=4, seed=LONG, ignore_eos=True)
    simulation.add([1, 2], stream=True, max_tokens=4, ignore_eos=True)
    simulation.step()
    first = simulation.messages[0].stats
    assert (first.num_running, first.num_waiting) == (1, 3)  # its group has left its slot, the other prompt stays in
    assert first.kv_cache_usage == 3 / 64
    last = messages(simulation)[-1].stats
    assert (last.num_running, last.num_waiting, last.kv_cache_usage) == (0, 0, 0.0)
    assert (last.prompt_tokens, last.prompt_tokens_computed, last.generation_tokens) == (8, 8, 16)
    assert last.step == len(simulation.steps)


# Aborts


@pytest.mark.parametrize("stream", [True, False])
def test_an_abort_is_answered_with_what_was_not_told(stream):
    simulation = Simulation()
    handles = simulation.add(PROMPT, n=2, stream=stream, max_tokens=30, seed=LONG, ignore_eos=True)
    for _ in range(4):
        simulation.step()
    before = len(simulation.messages)
    simulation.abort(handles[:1])
    assert simulation.scheduler.has_unfinished()
    simulation.receive(simulation.scheduler.take_outputs())
    answer = simulation.messages[before]
    assert answer.handles.tolist() == handles[:1]
    assert len(answer.token_ids) == (0 if stream else 4)
    child = simulation.children[handles[0]]
    assert (child.reason, len(child.tokens)) == (FinishReason.ABORT, 4)
    assert simulation.scheduler.take_outputs() is None
    simulation.abort([handles[0], 12345])  # twice, and an unknown one
    assert simulation.scheduler.take_outputs() is None
    simulation.run()
    simulation.check_outputs()
    assert simulation.children[handles[1]].reason == FinishReason.LENGTH


def test_an_abort_right_after_submission():
    simulation = Simulation()
    handles = simulation.add(PROMPT, n=3, max_tokens=3)
    simulation.abort(handles)
    assert not simulation.step()
    assert {simulation.children[handle].reason for handle in handles} == {FinishReason.ABORT}
    assert not simulation.scheduler.has_unfinished()
    simulation.scheduler.check_integrity()


def test_an_abort_of_a_ready_child_tells_its_first_token():
    simulation = Simulation(max_num_seqs=1)
    handles = simulation.add(PROMPT, n=3, max_tokens=9, seed=LONG)
    simulation.step()
    simulation.abort(handles[2:])
    simulation.run()
    simulation.check_outputs()
    assert len(simulation.children[handles[2]].tokens) == 1


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_an_abort_between_a_step_and_its_report(stream, n, steps):
    """While it draws its first token, and while it decodes: the draw is not told."""
    simulation = Simulation()
    handles = simulation.add(PROMPT, n=n, stream=stream, max_tokens=9, seed=LONG)
    for _ in range(steps):
        simulation.step()
    output = simulation.scheduler.schedule()
    result = simulation.runner.execute(output)
    simulation.abort(handles[:1])
    simulation.receive(simulation.scheduler.update(output, result))
    simulation.run()
    simulation.check_outputs()
    child = simulation.children[handles[0]]
    assert (child.reason, len(child.tokens)) == (FinishReason.ABORT, steps)


def test_abort_all():
    simulation = Simulation(max_num_seqs=2)
    for i in range(4):
        simulation.add([1 + i, 2], n=2, max_tokens=9)
    simulation.step()
    for child in simulation.children.values():
        child.aborted = True
    simulation.scheduler.abort_all()
    simulation.run()
    assert {child.reason for child in simulation.children.values()} == {FinishReason.ABORT}


def test_children_that_the_front_end_stopped_are_not_told_of():
    simulation = Simulation()
    handles = simulation.add(PROMPT, n=3, stream=True, max_tokens=6, seed=LONG)
    simulation.step()
    simulation.stop(handles[:1])
    simulation.run()
    simulation.check_outputs()
    assert len(simulation.children[handles[0]].tokens) == 1


# finish_after


@pytest.mark.parametrize("stream", [True, False])
def test_finish_after_ends_the_others(stream):
    simulation = Simulation()
    handles = simulation.add(PROMPT, n=4, stream=stream, max_tokens=30, seed=EOS_AT_3, finish_after=1)
    simulation.run()
    simulation.check_outputs()
    reasons = [simulation.children[handle].reason for handle in handles]
    counts = [len(simulation.children[handle].tokens) for handle in handles]
    ended = [reason for reason in reasons if reason != FinishReason.ABORT]
    assert ended
    assert reasons.count(FinishReason.ABORT) >= 1
    assert max(counts) <= 3
    for reason, count in zip(reasons, counts, strict=True):
        assert reason != FinishReason.ABORT or count == max(counts)  # they were told all they had


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_all_that_end_in_the_step_of_the_kth_keep_their_reasons(stream, k):
    simulation = Simulation()
    handles = simulation.add(PROMPT, n=3, stream=stream, max_tokens=4, seed=LONG, ignore_eos=True, finish_after=k)
    simulation.run()
    assert [simulation.children[handle].reason for handle in handles] == [FinishReason.LENGTH] * 3


def test_finish_after_also_ends_those_without_a_slot():
    simulation = Simulation(max_num_seqs=2)
    handles = simulation.add(PROMPT, n=6, max_tokens=4, seed=LONG, ignore_eos=True, finish_after=1)
    simulation.run()
    reasons = [simulation.children[handle].reason for handle in handles]
    assert reasons == [FinishReason.LENGTH] * 2 + [FinishReason.ABORT] * 4
    assert [len(simulation.children[handle].tokens) for handle in handles] == [4, 4, 1, 1, 1, 1]


def test_finish_after_counts_what_the_front_end_stops():
    simulation = Simulation()
    handles = simulation.add(PROMPT, n=4, stream=True, max_tokens=9, seed=LONG, ignore_eos=True, finish_after=2)
    simulation.step()
    simulation.stop(handles[:1])
    simulation.step()
    assert simulation.scheduler.has_unfinished()
    simulation.stop(handles[1:2])
    simulation.run()
    assert {simulation.children[handle].reason for handle in handles[2:]} == {FinishReason.ABORT}


# Failures


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("after", [0, 2])
def test_a_failing_child_ends_its_request_and_no_other(stream, after):
    simulation = Simulation()
    handles = simulation.add(PROMPT, n=3, stream=stream, max_tokens=9, seed=LONG, ignore_eos=True)
    (other,) = simulation.add(PROMPT, stream=stream, max_tokens=9, seed=LONG, ignore_eos=True)  # the same group
    for _ in range(after):
        simulation.step()
    simulation.runner.failing.add(handles[1])
    simulation.run()
    simulation.check_outputs()
    reasons = [simulation.children[handle].reason for handle in handles]
    assert reasons == [FinishReason.ABORT, FinishReason.ERROR, FinishReason.ABORT]
    assert simulation.children[handles[1]].error == "a logits processor raised"
    assert [len(simulation.children[handle].tokens) for handle in handles] == [after + 1, after, after + 1]
    assert simulation.children[other].reason == FinishReason.LENGTH


def test_a_sibling_that_ends_in_the_step_of_a_failure_keeps_its_reason():
    simulation = Simulation()
    handles = simulation.add(PROMPT, n=3, stream=True, max_tokens=2, seed=LONG, ignore_eos=True)
    simulation.step()
    simulation.runner.failing.add(handles[2])
    simulation.run()
    reasons = [simulation.children[handle].reason for handle in handles]
    assert reasons == [FinishReason.LENGTH, FinishReason.LENGTH, FinishReason.ERROR]


# Protocol


def test_steps_are_reported_once_and_in_order():
    simulation = Simulation()
    simulation.add(PROMPT, max_tokens=9)
    first = simulation.scheduler.schedule()
    result = simulation.runner.execute(first)
    second = simulation.scheduler.schedule()
    with pytest.raises(IntegrityError, match="in the order"):
        simulation.scheduler.update(second, result)
    simulation.scheduler.update(first, result)
    with pytest.raises(IntegrityError, match="once"):
        simulation.scheduler.update(first, result)


@pytest.mark.parametrize("n", [1, 2])
def test_draws_of_others_are_refused(n):
    simulation = Simulation()
    simulation.add(PROMPT, n=n, max_tokens=9)
    output = simulation.scheduler.schedule()
    result = simulation.runner.execute(output)
    wrong = RunnerOutput(result.handles + 1, result.token_ids)
    with pytest.raises(IntegrityError, match="the runner drew for"):
        simulation.scheduler.update(output, wrong)


def test_too_few_draws_are_refused():
    simulation = Simulation()
    simulation.add(PROMPT, n=3, max_tokens=9)
    output = simulation.scheduler.schedule()
    result = simulation.runner.execute(output)
    with pytest.raises(IntegrityError, match="2 draws, not 3"):
        simulation.scheduler.update(output, RunnerOutput(result.handles[:2], result.token_ids[:2]))


def test_the_runner_is_told_of_every_end_once():
    simulation = Simulation(max_num_seqs=2)
    handles = simulation.add(PROMPT, n=4, max_tokens=4)
    simulation.step()
    simulation.abort(handles[3:])
    simulation.add([1], max_tokens=1)
    simulation.run()
    told = [handle for step in simulation.steps for handle in step.finished_handles]
    assert len(set(told)) == len(told)
    waiting = simulation.scheduler._state.finished_handles  # told with the next step that is not empty
    assert set(told) | set(waiting) == set(simulation.children)


def test_columns_have_their_types():
    simulation = Simulation()
    simulation.add(PROMPT, n=2, stream=True, max_tokens=3, logprobs=1)
    simulation.add([1, 2], max_tokens=3, logprobs=0)
    simulation.add([3, 2], max_tokens=2)
    for message in messages(simulation):
        types = [
            (message.handles, np.int64),
            (message.offsets, np.int32),
            (message.token_ids, np.int32),
            (message.finish_reasons, np.uint8),
            (message.stop_reasons, np.int64),
            (message.num_cached_tokens, np.int32),
        ]
        if message.logprobs is not None:
            columns = message.logprobs
            types += [(columns.offsets, np.int32), (columns.token_ids, np.int32), (columns.ranks, np.int32)]
            types += [(columns.logprobs, np.float32)]
        assert all(array.dtype == kind for array, kind in types)


def test_the_model_of_the_draws_is_not_trivial():
    """What the other tests rest on: tokens depend on the prompt, the seed and the position."""
    a = contents(PROMPT)[-1]
    b = contents([*PROMPT[:-1], 11])[-1]
    assert len({draw(a, 1, i) for i in range(20)}) > 5
    assert [draw(a, 1, i) for i in range(20)] != [draw(b, 1, i) for i in range(20)]
    assert [draw(a, 1, i) for i in range(20)] != [draw(a, 2, i) for i in range(20)]
