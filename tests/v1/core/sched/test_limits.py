"""Slots, token budget, memory, priorities and preemption: who runs when, and that everything ends. Rules 13, 14, 20."""

from __future__ import annotations

import numpy as np
import pytest

from tests.v1.core.simulation import Simulation
from vllm.exceptions import IntegrityError, PromptTooLongError
from vllm.v1.core.sched.integrity import check_integrity
from vllm.v1.messages import FinishReason


def prompt_of(length: int, start: int = 10) -> list[int]:
    return [start + i % 7 for i in range(length)]


def finish(simulation: Simulation) -> None:
    simulation.run()
    simulation.check_outputs()


def rows(simulation: Simulation) -> list[list[tuple[int, int]]]:
    """(handle, tokens) of each row of each step."""
    return [list(zip(s.handles.tolist(), s.num_tokens.tolist(), strict=True)) for s in simulation.steps]


# Slots and budget


@pytest.mark.parametrize("slots", [1, 2, 3, 7])
@pytest.mark.parametrize("caching", [True, False])
def test_rule_13_more_children_than_slots(slots, caching):
    simulation = Simulation(max_num_seqs=slots, enable_prefix_caching=caching)
    simulation.add(prompt_of(6), n=20, max_tokens=5)
    simulation.add(prompt_of(3, 30), n=3, max_tokens=5)
    finish(simulation)
    assert simulation.runner.max_rows == slots


def test_decodes_come_before_prompts():
    simulation = Simulation(max_num_batched_tokens=5)
    simulation.add(prompt_of(3), max_tokens=9, ignore_eos=True)
    simulation.step()
    simulation.add(prompt_of(9, 30), max_tokens=2, ignore_eos=True)
    simulation.step()
    simulation.step()
    assert rows(simulation) == [[(1, 3)], [(1, 1), (2, 4)], [(1, 1), (2, 4)]]
    finish(simulation)


def test_prompts_are_cut_at_the_budget_and_the_rest_goes_to_the_next():
    simulation = Simulation(max_num_batched_tokens=10)
    for i in range(3):
        simulation.add(prompt_of(7, 10 * i), max_tokens=1)
    finish(simulation)
    assert rows(simulation) == [[(1, 7), (2, 3)], [(2, 4), (3, 6)], [(3, 1)]]


def test_without_chunked_prefill_prompts_are_computed_whole_or_wait():
    simulation = Simulation(max_num_batched_tokens=10, enable_chunked_prefill=False)
    for i in range(3):
        simulation.add(prompt_of(7 if i else 3, 10 * i), max_tokens=2, ignore_eos=True)
    finish(simulation)
    assert rows(simulation)[:3] == [[(1, 3), (2, 7)], [(1, 1), (2, 1), (3, 7)], [(3, 1)]]


@pytest.mark.parametrize("budget", [1, 2, 3])
def test_fewer_tokens_a_step_than_children_that_decode(budget):
    simulation = Simulation(max_num_batched_tokens=budget)
    simulation.add(prompt_of(5), n=6, max_tokens=4, ignore_eos=True)
    finish(simulation)
    last = {handle: index for index, step in enumerate(rows(simulation)) for handle, _ in step}
    assert list(last.values()) == sorted(last.values())  # the earlier ones are served first, and end first


def test_first_come_first_served():
    simulation = Simulation(max_num_seqs=1)
    for i in range(4):
        simulation.add(prompt_of(3, 10 * i), priority=-i, max_tokens=2, ignore_eos=True)
    finish(simulation)
    assert [step[0][0] for step in rows(simulation)] == [1, 1, 2, 2, 3, 3, 4, 4]


def test_priorities_then_arrival_then_order_of_submission():
    simulation = Simulation(max_num_seqs=1, policy="priority")
    for i, (priority, arrival) in enumerate([(1, 0.0), (0, 5.0), (0, 4.0), (0, 4.0), (-1, 9.0)]):
        simulation.add(prompt_of(3, 10 * i), priority=priority, arrival_time=arrival, max_tokens=1)
    finish(simulation)
    assert [step[0][0] for step in rows(simulation)] == [5, 3, 4, 2, 1]


def test_ties_of_siblings_are_broken_by_their_index():
    simulation = Simulation(max_num_seqs=1)
    handles = simulation.add(prompt_of(3), n=4, max_tokens=2, ignore_eos=True)
    finish(simulation)
    assert [step[0][0] for step in rows(simulation)] == [handles[0], *handles]  # the prompt, then each one's second


def test_a_groups_priority_is_its_best_members():
    simulation = Simulation(max_num_seqs=1, policy="priority")
    simulation.add(prompt_of(3), priority=5, max_tokens=1)
    simulation.add(prompt_of(3, 30), priority=3, max_tokens=1)
    simulation.add(prompt_of(3), priority=0, max_tokens=1)  # lifts the first one's group
    finish(simulation)
    assert len(simulation.steps[0].forks[0].members) == 2
    assert simulation.steps[1].handles.tolist() == [2]


def test_a_group_sinks_when_its_best_member_is_aborted():
    simulation = Simulation(max_num_seqs=1, policy="priority")
    simulation.add(prompt_of(3), priority=5, max_tokens=1)
    simulation.add(prompt_of(3, 30), priority=3, max_tokens=1)
    simulation.abort(simulation.add(prompt_of(3), priority=0, max_tokens=1))
    finish(simulation)
    assert [step.handles.tolist() for step in simulation.steps] == [[2], [1]]


# Memory


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("lag", [True, False])
@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("blocks", [6, 7, 8, 11])
def test_too_little_memory_for_all_at_once(n, caching, lag, chunked, blocks):
    simulation = Simulation(
        num_blocks=blocks,
        enable_prefix_caching=caching,
        lag=lag,
        enable_chunked_prefill=chunked,
        max_num_seqs=5,
        max_num_batched_tokens=12,
    )
    for i in range(5):
        simulation.add(prompt_of(5 + i, 10 * i), n=n, max_tokens=12, ignore_eos=True, stream=i % 2 == 0)
    finish(simulation)
    assert simulation.scheduler.stats().num_preemptions > 0
    assert all(child.reason == FinishReason.LENGTH for child in simulation.children.values())


def test_the_last_one_is_preempted_and_computes_its_own_tokens_again():
    simulation = Simulation(num_blocks=6, enable_prefix_caching=False)
    simulation.add(prompt_of(6), n=2, max_tokens=12, ignore_eos=True)
    finish(simulation)
    assert simulation.scheduler.stats().num_preemptions >= 1
    assert simulation.scheduler.stats().prompt_tokens_computed == 6
    again = [new for step in simulation.steps for new in step.new_sequences if len(new.output_token_ids) > 1]
    assert {new.handle for new in again} == {2}
    assert all(new.num_computed_tokens == 6 for new in again)
    assert simulation.children[1].times[3] == 0
    assert simulation.children[2].times[3] == simulation.scheduler.stats().num_preemptions


def test_preemption_during_the_prompt_takes_the_whole_group():
    simulation = Simulation(num_blocks=8, max_num_batched_tokens=2, policy="priority", enable_prefix_caching=False)
    (high,) = simulation.add(prompt_of(2), max_tokens=30, ignore_eos=True, priority=0)
    simulation.step()
    low = simulation.add(prompt_of(28, 30), n=3, max_tokens=2, ignore_eos=True, priority=1)
    (_, group) = simulation.scheduler._state.groups
    states = []
    simulation.on_step = lambda step: states.append((group.state.name, len(group.blocks)))
    finish(simulation)
    place = states.index(("PREFILL", 4))
    assert ("WAITING", 0) in states[place:]
    assert [simulation.children[handle].times[3] for handle in (high, *low)] == [0, 1, 0, 0]  # once, for its leader
    assert simulation.scheduler.stats().num_preemptions == 1
    assert simulation.scheduler.stats().prompt_tokens_computed > 30


def test_an_idle_group_drops_its_prompt_and_computes_it_again():
    simulation = Simulation(num_blocks=8, max_num_seqs=2, policy="priority", enable_prefix_caching=False)
    low = simulation.add(prompt_of(8, 30), n=4, max_tokens=5, ignore_eos=True, priority=1)
    simulation.step()
    high = simulation.add(prompt_of(21), n=2, max_tokens=3, ignore_eos=True, priority=0)
    finish(simulation)
    assert simulation.scheduler.stats().prompt_tokens_computed == 8 + 21 + 8
    last = [step.handles.tolist() for step in simulation.steps][-1]
    assert set(last) <= set(low)
    assert high


def test_who_waits_does_not_preempt():
    simulation = Simulation(num_blocks=6, policy="priority")
    simulation.add(prompt_of(12), max_tokens=8, ignore_eos=True, priority=1)
    simulation.step()
    simulation.add(prompt_of(16, 30), max_tokens=2, ignore_eos=True, priority=0)
    finish(simulation)
    assert simulation.scheduler.stats().num_preemptions == 0


def test_a_lone_child_uses_the_whole_cache_beside_its_waiting_siblings():
    simulation = Simulation(num_blocks=5, max_num_seqs=4, enable_prefix_caching=False)
    simulation.add(prompt_of(6), n=3, max_tokens=None, ignore_eos=True)
    finish(simulation)
    assert {len(child.tokens) for child in simulation.children.values()} == {15}
    assert simulation.scheduler.stats().prompt_tokens_computed == 6


def test_freed_blocks_are_used_before_untouched_ones():
    simulation = Simulation(num_blocks=1000, enable_prefix_caching=False)
    for i in range(20):
        simulation.add(prompt_of(10, i), n=3, max_tokens=4)
        simulation.run()
    assert simulation.scheduler._kv.pool._untouched <= 8


# Prompts that can never fit


def test_rule_14_the_longest_prompt():
    assert Simulation(num_blocks=100, max_model_len=50).scheduler.max_prompt_len == 49
    assert Simulation(num_blocks=10, max_model_len=50).scheduler.max_prompt_len == 40
    small = {"num_blocks": 100, "max_model_len": 50, "max_num_batched_tokens": 30}
    assert Simulation(**small).scheduler.max_prompt_len == 49
    assert Simulation(**small, enable_chunked_prefill=False).scheduler.max_prompt_len == 30


@pytest.mark.parametrize(
    "limits",
    [
        {"num_blocks": 100, "max_model_len": 50},
        {"num_blocks": 10, "max_model_len": 500},
        {"num_blocks": 100, "max_num_batched_tokens": 30, "enable_chunked_prefill": False},
    ],
)
@pytest.mark.parametrize("n", [1, 3])
def test_rule_14_the_longest_prompt_runs_and_one_more_is_refused(limits, n):
    simulation = Simulation(**limits)
    longest = simulation.scheduler.max_prompt_len
    simulation.scheduler.check_fits(longest)
    with pytest.raises(PromptTooLongError, match=rf"{longest + 1} tokens; at most {longest} .*maximum context length"):
        simulation.add(prompt_of(longest + 1), n=n)
    simulation.add(prompt_of(longest), n=n, max_tokens=1)
    finish(simulation)
    assert {len(child.tokens) for child in simulation.children.values()} == {1}


# The cache between requests


def test_reset_prefix_cache():
    simulation = Simulation()
    simulation.add(prompt_of(9), max_tokens=3, ignore_eos=True)
    simulation.step()
    assert not simulation.scheduler.reset_prefix_cache()
    simulation.run()
    assert simulation.scheduler.reset_prefix_cache()
    (handle,) = simulation.add(prompt_of(9), max_tokens=1)
    finish(simulation)
    assert simulation.children[handle].num_cached == 0


def test_a_weights_version_keeps_stale_content_from_being_hit():
    simulation = Simulation()
    simulation.add(prompt_of(9), max_tokens=3)
    with pytest.raises(RuntimeError, match="1 children are unfinished"):
        simulation.scheduler.set_weights_version(1)
    simulation.run()
    for version, cached in [(1, 0), (1, 8), (0, 8), (2, 0)]:
        simulation.scheduler.set_weights_version(version)
        (handle,) = simulation.add(prompt_of(9), max_tokens=1)
        simulation.run()
        assert simulation.children[handle].num_cached == cached


def test_the_next_turn_of_a_dialogue_hits_what_was_said():
    simulation = Simulation()
    (first,) = simulation.add(prompt_of(6), max_tokens=9, ignore_eos=True)
    simulation.run()
    (second,) = simulation.add([*prompt_of(6), *simulation.children[first].tokens, 3, 4], max_tokens=2)
    finish(simulation)
    assert simulation.children[second].num_cached == 12  # 6 + 9 - 1 tokens were computed: three full blocks


def test_what_a_former_writer_said_is_not_hit_after_another_wrote_over_it():
    simulation = Simulation(max_num_seqs=1, num_blocks=30)
    handles = simulation.add(prompt_of(6), n=3, max_tokens=9, ignore_eos=True)
    simulation.run()
    for handle in handles:  # the partial block belongs to the last one's tokens now
        simulation.add([*prompt_of(6), *simulation.children[handle].tokens], max_tokens=2)
        finish(simulation)


def test_nobody_writes_into_a_block_that_another_prompt_has_hit():
    simulation = Simulation(max_num_seqs=2, policy="priority")
    a, b, _ = simulation.add(prompt_of(6), n=3, max_tokens=20, ignore_eos=True, priority=1)
    for _ in range(6):
        simulation.step()
    simulation.abort([a])  # the writer: its block is full, and can be found
    simulation.receive(simulation.scheduler.take_outputs())
    said = [*prompt_of(6), *simulation.children[a].tokens, 3, 4]
    (other,) = simulation.add(said, max_tokens=20, ignore_eos=True, priority=0)
    simulation.step()
    simulation.abort([b])
    finish(simulation)  # the third one has written into a copy
    assert simulation.children[other].num_cached == 8


# The check itself


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda state: state.slots.blocks.__setitem__(slice(None), 9), "slot 0 has 9 blocks of 2"),
        (lambda state: state.slots.handle.__setitem__(slice(None), 99), "slot 0 is 99's, not 1's"),
        (lambda state: state.slots.computed.__setitem__(slice(None), 999), "computed 999 tokens in room for"),
        (lambda state: state.slots.decodes.__setitem__(slice(None), False), "decodes and is prefilling, or neither"),
        (lambda state: state.kv.pool.refs.__iadd__(1), "wrong reference counts"),
        (lambda state: state.shared_groups.clear(), "strangers may join"),
        (lambda state: state.complete.clear(), "0 groups noted as complete"),
        (lambda state: state.slots._free.append(0), "2 used \\+ 1 free"),
        (lambda state: [setattr(group, "num_live", 9) for group in state.groups], "9 live"),
        (lambda state: [setattr(group, "num_running", 9) for group in state.groups], "9 running"),
        (lambda state: [setattr(group, "queued", None) for group in state.groups], "in the queue by None, not"),
        (lambda state: state.children.pop(3), "3 live, .* has 2 members"),
    ],
)
def test_rule_20_the_check_says_what_is_wrong(spoil, message):
    simulation = Simulation(max_num_seqs=2)
    simulation.add(prompt_of(6), n=3, max_tokens=9, ignore_eos=True)
    simulation.step()
    simulation.step()
    state = simulation.scheduler._state
    check_integrity(state)
    spoil(state)
    with pytest.raises(IntegrityError, match=message):
        check_integrity(state)


def test_arrays_of_a_step_are_not_changed_by_later_ones():
    simulation = Simulation(lag=True, max_num_seqs=4)
    simulation.add(prompt_of(5), n=6, max_tokens=9)
    copies = []
    names = ("slots", "num_tokens", "num_computed", "samples", "handles")
    simulation.on_step = lambda step: copies.append([np.array(getattr(step, name)) for name in names])
    finish(simulation)
    for step, before in zip(simulation.steps, copies, strict=True):
        assert all(np.array_equal(getattr(step, name), array) for name, array in zip(names, before, strict=True))
