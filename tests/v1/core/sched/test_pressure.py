"""Too little of everything, and steps planned before the last one is reported: the rare ways through the plan."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.v1.core.simulation import Simulation
from vllm.v1.core.prefill_group import PrefillGroup
from vllm.v1.core.request import Child
from vllm.v1.messages import FinishReason


def prompt_of(length: int, start: int = 10) -> list[int]:
    return [start + i % 7 for i in range(length)]


def finish(simulation: Simulation) -> None:
    simulation.run()
    simulation.check_outputs()


@pytest.mark.parametrize("lag", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("seed", range(12))
def test_random_pressure(lag, stream, policy, seed):
    """Requests of any priority at any time, in a cache that holds two or three of them."""
    choose = random.Random(seed)
    size = choose.choice([1, 2, 3, 4])
    simulation = Simulation(
        num_blocks=-(-choose.randint(24, 60) // size),
        block_size=size,
        lag=lag,
        policy=policy,
        max_num_seqs=choose.randint(2, 8),
        max_num_batched_tokens=choose.randint(2, 14),
        enable_chunked_prefill=choose.random() < 0.8,
        enable_prefix_caching=choose.random() < 0.5,
    )
    for _ in range(10):
        longest = min(20, simulation.scheduler.max_prompt_len)
        simulation.add(
            prompt_of(choose.randint(1, longest), choose.choice([10, 20, 30])),
            n=choose.choice([1, 1, 2, 4]),
            stream=stream,
            priority=choose.randint(0, 3),
            max_tokens=choose.randint(1, 20),
            logprobs=choose.choice([None, 1]),
            ignore_eos=True,
        )
        for _ in range(choose.randint(0, 12)):
            simulation.step()
        if choose.random() < 0.2:
            simulation.abort([choose.randint(1, max(simulation.children))])
    finish(simulation)


def test_a_prompt_that_comes_first_preempts_children_that_decode_in_its_step():
    simulation = Simulation(num_blocks=8, max_num_batched_tokens=3, policy="priority", enable_prefix_caching=False)
    (low,) = simulation.add(prompt_of(4), max_tokens=25, ignore_eos=True, priority=1)
    for _ in range(9):
        simulation.step()
    simulation.add(prompt_of(16, 30), max_tokens=2, ignore_eos=True, priority=0)
    finish(simulation)
    assert simulation.children[low].times[3] >= 1
    assert simulation.runner.num_steps > 0


def test_the_last_child_takes_over_the_block_that_its_group_holds_for_the_others():
    """It runs in a copy, its sibling that wrote in the group's own block has ended, and there is no block left."""
    simulation = Simulation(num_blocks=3, block_size=8, enable_prefix_caching=False)
    first, second = simulation.add(prompt_of(4), n=2, max_tokens=21, ignore_eos=True)
    for _ in range(3):
        simulation.step()
    simulation.abort([first])
    finish(simulation)
    assert len(simulation.children[second].tokens) == 21
    assert simulation.children[second].times[3] == 0


def preempt_in_the_next_plan(simulation: Simulation, entity: Child | PrefillGroup) -> None:
    """As if something that comes before it had needed its blocks."""
    planner = simulation.scheduler._planner
    chunks = planner._chunks

    def preempting(plan: Any) -> None:
        planner._chunks = chunks  # type: ignore[method-assign]
        chunks(plan)
        plan.chunks = [chunk for chunk in plan.chunks if chunk.entity is not entity]
        simulation.scheduler._state.preempt(entity)
        plan.preempted = True

    planner._chunks = preempting  # type: ignore[method-assign]


@pytest.mark.parametrize("n", [1, 2])
def test_a_draw_under_way_outlives_a_preemption(n):
    simulation = Simulation(lag=True)
    handles = simulation.add(prompt_of(6), n=n, stream=True, max_tokens=4, ignore_eos=True)
    child = simulation.scheduler._state.children[handles[0]]
    while child.slot < 0:
        simulation.step()
    assert len(child.tokens) == n - 1  # one draw is under way
    preempt_in_the_next_plan(simulation, child)
    simulation.step()
    assert (child.slot, len(child.tokens)) == (-1, n)
    finish(simulation)
    assert simulation.new_tokens == 4 * n
    assert simulation.children[handles[0]].times[3] == 1


def test_a_last_draw_under_way_ends_a_child_that_was_preempted():
    simulation = Simulation(lag=True)
    (handle,) = simulation.add(prompt_of(6), max_tokens=2, ignore_eos=True, logprobs=0)
    simulation.step()
    simulation.step()
    preempt_in_the_next_plan(simulation, simulation.scheduler._state.children[handle])
    finish(simulation)
    assert len(simulation.steps) == 2


def test_a_child_that_comes_back_draws_no_more_than_its_length():
    simulation = Simulation(lag=True)
    (handle,) = simulation.add(prompt_of(6), max_tokens=7, ignore_eos=True)
    for _ in range(4):
        simulation.step()
    preempt_in_the_next_plan(simulation, simulation.scheduler._state.children[handle])
    draws = []
    simulation.on_step = lambda step: draws.append(int(step.samples.sum()))
    finish(simulation)
    assert simulation.children[handle].times[3] == 1
    assert 4 + sum(draws) == 7


def test_a_failure_under_way_ends_a_child_that_was_preempted():
    simulation = Simulation(lag=True)
    (handle,) = simulation.add(prompt_of(6), max_tokens=9, ignore_eos=True)
    simulation.step()
    simulation.runner.failing.add(handle)
    simulation.step()
    preempt_in_the_next_plan(simulation, simulation.scheduler._state.children[handle])
    finish(simulation)
    assert simulation.children[handle].reason == FinishReason.ERROR
    assert len(simulation.children[handle].tokens) == 1


def test_a_chunk_under_way_does_not_count_for_the_blocks_of_a_later_start():
    simulation = Simulation(lag=True, max_num_batched_tokens=4)
    simulation.add(prompt_of(10), max_tokens=2, ignore_eos=True)
    simulation.step()
    (group,) = simulation.scheduler._state.groups
    preempt_in_the_next_plan(simulation, group)
    simulation.step()
    assert (group.num_done, group.blocks) == (0, [])
    finish(simulation)
    assert simulation.scheduler.stats().prompt_tokens_computed == 4 + 10


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [True, False])
def test_lengths_are_known_in_advance(n, stream):
    """No row is planned beyond a child's length, though its last token has not been reported."""
    simulation = Simulation(lag=True, max_num_seqs=2, num_blocks=6)
    simulation.add(prompt_of(5), n=n, stream=stream, max_tokens=9, ignore_eos=True)
    simulation.add(prompt_of(6, 30), stream=stream, max_tokens=7, ignore_eos=True)
    draws = []
    simulation.on_step = lambda step: draws.append(int(step.samples.sum()) + sum(len(f.members) for f in step.forks))
    finish(simulation)
    assert sum(draws) == simulation.new_tokens == 9 * n + 7


def test_a_child_that_ends_by_its_token_draws_once_more_in_vain():
    simulation = Simulation(lag=True)
    (handle,) = simulation.add(prompt_of(5), max_tokens=30, stop_token_ids=list(range(2, 50)))
    draws = []
    simulation.on_step = lambda step: draws.append(int(step.samples.sum()))
    finish(simulation)
    assert len(simulation.children[handle].tokens) == 1
    assert sum(draws) == 2


def test_an_abort_while_first_tokens_are_drawn():
    simulation = Simulation(lag=True)
    handles = simulation.add(prompt_of(6), n=3, max_tokens=4, ignore_eos=True)
    simulation.step()
    simulation.abort(handles[:2])
    simulation.scheduler.check_integrity()
    finish(simulation)
    assert [len(simulation.children[handle].tokens) for handle in handles] == [0, 0, 4]


def test_a_group_whose_first_tokens_are_being_drawn_keeps_its_prompt():
    simulation = Simulation(lag=True, num_blocks=6, max_num_seqs=3)
    simulation.add(prompt_of(4), max_tokens=16, ignore_eos=True)
    simulation.add(prompt_of(8, 30), n=2, max_tokens=2, ignore_eos=True)
    finish(simulation)
    assert simulation.scheduler.stats().prompt_tokens_computed == 12
