"""One prompt, computed once: siblings, strangers, the partial block, the kept row, take-over. Rules 11 to 20."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.v1.core.simulation import Simulation
from vllm.exceptions import BadRequestError, DuplicateRequestError
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.core.prefill_group import GroupState
from vllm.v1.messages import EngineCoreRequest, FinishReason

LENGTHS = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33]  # block size 4: shorter than a block, exact, one over


def prompt_of(length: int, start: int = 10) -> list[int]:
    return [start + i % 7 for i in range(length)]


def computed(simulation: Simulation) -> int:
    stats = simulation.scheduler.stats()
    assert stats.prompt_tokens_computed == simulation.runner.prompt_tokens
    return stats.prompt_tokens_computed


def finish(simulation: Simulation) -> None:
    simulation.run()
    simulation.check_outputs()


# Rule 15 and 17: siblings


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("n", [1, 2, 5, 16])
@pytest.mark.parametrize("budget", [3, 2048])
def test_rule_15_siblings_compute_their_prompt_once(caching, length, n, budget):
    simulation = Simulation(
        num_blocks=256, enable_prefix_caching=caching, max_num_batched_tokens=budget, max_num_seqs=8, lag=False
    )
    simulation.add(prompt_of(length), n=n, max_tokens=6, ignore_eos=True)
    finish(simulation)
    assert computed(simulation) == length
    copies = n - 1 if length % 4 else 0
    if n > 8 or budget < n:  # a later child may write on where one that has ended wrote
        assert simulation.runner.num_copies <= copies
    else:
        assert simulation.runner.num_copies == copies
    assert {child.num_cached for child in simulation.children.values()} == {0}


def test_all_first_tokens_are_drawn_in_the_step_that_completes_the_prompt():
    simulation = Simulation(max_num_seqs=2, max_num_batched_tokens=8)
    simulation.add(prompt_of(14), n=10, max_tokens=3)
    simulation.step()
    assert simulation.new_tokens == 0
    simulation.step()
    assert simulation.new_tokens == 10
    assert len(simulation.first_tokens) == 10
    fork = simulation.steps[1].forks[0]
    assert (fork.row, len(fork.members)) == (0, 10)
    finish(simulation)


def test_siblings_share_the_blocks_and_copy_the_partial_one_once_each():
    simulation = Simulation(max_num_seqs=3)
    simulation.add(prompt_of(10), n=3, max_tokens=2, ignore_eos=True)
    simulation.step()
    state = simulation.scheduler._state
    (group,) = state.groups
    assert [state.kv.pool.ref(block) for block in group.blocks] == [1, 1, 1]
    simulation.scheduler.schedule()
    assert [state.kv.pool.ref(block) for block in group.blocks] == [4, 4, 2]  # group, three children; the writer


def test_the_group_holds_its_prompt_until_the_last_member_ends():
    simulation = Simulation(max_num_seqs=1, enable_prefix_caching=False, num_blocks=20)
    simulation.add(prompt_of(10), n=4, max_tokens=5, ignore_eos=True)
    used = []
    simulation.on_step = lambda step: used.append(20 - simulation.scheduler._kv.pool.num_free)
    finish(simulation)
    assert min(used) == 3
    assert computed(simulation) == 10


def test_a_single_child_stays_in_its_slot_and_copies_nothing():
    simulation = Simulation(enable_prefix_caching=False)
    simulation.add(prompt_of(10), max_tokens=8, ignore_eos=True)
    finish(simulation)
    assert sum(len(step.new_sequences) for step in simulation.steps) == 1
    assert not any(step.forks or step.copies for step in simulation.steps)
    assert len(simulation.steps) == 8


def test_running_children_of_a_group_are_told_to_share():
    simulation = Simulation(max_num_seqs=8)
    simulation.add(prompt_of(9), n=3, max_tokens=6, ignore_eos=True)
    simulation.add(prompt_of(3, 30), n=2, max_tokens=6, ignore_eos=True)  # no full block: nothing to share
    simulation.add(prompt_of(12, 20), n=2, max_tokens=6, ignore_eos=True)
    simulation.step()
    step = simulation.scheduler.schedule()
    sets = sorted((count, blocks) for _, count, blocks in step.shared)
    assert sets == [(2, 3), (3, 2)]


def test_rows_of_a_sharing_set_stay_together_while_others_come_and_go():
    simulation = Simulation(max_num_seqs=12, num_blocks=200)
    for i in range(4):
        simulation.add(prompt_of(9, 10 + i), n=3, max_tokens=4 + 3 * i, ignore_eos=True)
        simulation.step()
    finish(simulation)  # the runner checks that the rows of a set have the same blocks
    assert any(len(step.shared) >= 3 for step in simulation.steps)


# Rule 16 and 17: strangers


@pytest.mark.parametrize("length", LENGTHS)
def test_rule_17_duplicates_compute_their_prompt_once(length):
    simulation = Simulation(num_blocks=512)
    for _ in range(64):
        simulation.add(prompt_of(length), max_tokens=3)
    finish(simulation)
    assert computed(simulation) == length


def test_rule_17_at_the_size_of_the_contract():
    simulation = Simulation(num_blocks=1024, block_size=16, check=False)
    for _ in range(64):
        simulation.add(prompt_of(1024), max_tokens=2)
    finish(simulation)
    assert computed(simulation) == 1024


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("when", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("lag", [False, True])
def test_rule_17_whenever_the_duplicates_come(length, when, lag):
    """While the prompt is half computed, in the step after it, and while the first one decodes behind it."""
    simulation = Simulation(max_num_batched_tokens=6, lag=lag)
    simulation.add(prompt_of(length), max_tokens=12, ignore_eos=True)
    for _ in range(when):
        simulation.step()
    simulation.add(prompt_of(length), max_tokens=6)
    simulation.add(prompt_of(length), n=3, max_tokens=6)
    finish(simulation)
    assert computed(simulation) == length


def test_a_stranger_after_completion_draws_from_the_kept_row_without_computing():
    simulation = Simulation()
    simulation.add(prompt_of(10), max_tokens=20, ignore_eos=True)
    simulation.step()
    late = simulation.add(prompt_of(10), n=2, max_tokens=3)
    step = simulation.scheduler.schedule()
    (fork,) = step.forks
    assert fork.row == -1
    assert [member.handle for member in fork.members] == late
    assert step.num_tokens.tolist() == [1]


def test_the_kept_row_is_dropped_with_its_group():
    simulation = Simulation()
    for i in range(5):
        simulation.add(prompt_of(5, 10 + i), max_tokens=2)
    simulation.run()
    simulation.add([1], max_tokens=1)
    finish(simulation)
    assert simulation.runner.kept.keys() <= {6}


def test_without_prefix_caching_no_row_is_kept_and_strangers_do_not_share():
    simulation = Simulation(enable_prefix_caching=False)
    for _ in range(3):
        simulation.add(prompt_of(10), n=2, max_tokens=3)
    finish(simulation)
    assert computed(simulation) == 30
    assert not any(fork.keep for step in simulation.steps for fork in step.forks)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"cache_salt": "a"}, {"cache_salt": "b"}),
        ({"cache_salt": None}, {"cache_salt": ""}),
        ({}, {"lora": LoRARequest(lora_name="x", lora_int_id=1)}),
        (
            {"lora": LoRARequest(lora_name="x", lora_int_id=1)},
            {"lora": LoRARequest(lora_name="y", lora_int_id=2)},
        ),
        ({}, {"prompt_logprobs": 0}),
        ({"prompt_logprobs": 0}, {}),
        ({"prompt_logprobs": 0}, {"prompt_logprobs": 0}),
        ({}, {"skip_reading_prefix_cache": True}),
    ],
)
def test_rule_16_who_does_not_follow_another(first, second):
    simulation = Simulation()
    simulation.add(prompt_of(10), max_tokens=3, **first)
    simulation.add(prompt_of(10), max_tokens=3, **second)
    finish(simulation)
    assert computed(simulation) == 20
    assert {child.num_cached for child in simulation.children.values()} == {0}


@pytest.mark.parametrize("extras", [{"cache_salt": "a"}, {"lora": LoRARequest(lora_name="x", lora_int_id=1)}])
def test_rule_16_equal_extras_do_share(extras):
    simulation = Simulation()
    for _ in range(2):
        simulation.add(prompt_of(10), max_tokens=3, **extras)
    finish(simulation)
    assert computed(simulation) == 10


@pytest.mark.parametrize("extras", [{"cache_salt": "a"}, {"lora": LoRARequest(lora_name="x", lora_int_id=1)}])
def test_rule_16_what_one_left_in_the_cache_is_not_for_another(extras):
    simulation = Simulation()
    for own, cached in [({}, 0), (extras, 0), (extras, 8), ({}, 8)]:
        (handle,) = simulation.add(prompt_of(10), max_tokens=3, **own)
        finish(simulation)
        assert simulation.children[handle].num_cached == cached


def test_prompts_that_only_begin_alike_share_through_the_cache():
    simulation = Simulation()
    simulation.add(prompt_of(10), max_tokens=3)
    simulation.run()
    (handle,) = simulation.add([*prompt_of(10), 3, 4], max_tokens=3)
    finish(simulation)
    assert simulation.children[handle].num_cached == 8
    assert computed(simulation) == 10 + 4


# Rule 18


@pytest.mark.parametrize("n", [1, 3])
def test_rule_18_counts_what_was_there_before(n):
    simulation = Simulation()
    for length, cached in [(16, 0), (16, 12), (17, 16), (3, 0), (5, 4)]:
        handles = simulation.add(prompt_of(length), n=n, max_tokens=2)
        simulation.run()
        assert [simulation.children[handle].num_cached for handle in handles] == [cached] * n
    simulation.check_outputs()
    assert computed(simulation) == 16 + 4 + 1 + 3 + 1


def test_rule_18_strangers_before_the_first_step_count_nothing():
    simulation = Simulation()
    handles = [simulation.add(prompt_of(16), max_tokens=2)[0] for _ in range(3)]
    simulation.run()
    assert {simulation.children[handle].num_cached for handle in handles} == {0}


@pytest.mark.parametrize(("steps", "cached"), [(0, 0), (1, 4), (2, 12), (3, 16), (4, 16)])
def test_rule_18_a_stranger_counts_the_blocks_complete_when_it_came(steps, cached):
    simulation = Simulation(max_num_batched_tokens=6)
    simulation.add(prompt_of(17), max_tokens=9, ignore_eos=True)
    for _ in range(steps):
        simulation.step()
    (handle,) = simulation.add(prompt_of(17), max_tokens=2)
    finish(simulation)
    assert simulation.children[handle].num_cached == cached
    stats = simulation.scheduler.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (34, cached)
    assert (stats.prompt_tokens, stats.prompt_tokens_computed) == (34, 17)


def test_a_wholly_cached_prompt_computes_its_last_block():
    simulation = Simulation()
    simulation.add(prompt_of(16), max_tokens=1)
    simulation.run()
    simulation.add(prompt_of(16), max_tokens=1)
    finish(simulation)
    assert computed(simulation) == 16 + 4


# Rule 19


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("budget", [1, 5, 2048])
@pytest.mark.parametrize("length", [1, 2, 9, 16])
def test_rule_19_prompt_logprobs_are_complete_the_same_hot_and_cold_and_sent_once(n, stream, budget, length):
    simulation = Simulation(max_num_batched_tokens=budget)
    found = []
    for _ in range(2):
        handles = simulation.add(prompt_of(length), n=n, stream=stream, max_tokens=3, prompt_logprobs=2)
        simulation.run()
        assert not simulation.prompt_logprobs.keys() & handles[1:]
        columns = simulation.prompt_logprobs[handles[0]]
        assert len(columns.ranks) == length - 1
        assert columns.offsets.tolist() == [3 * i for i in range(length)]
        assert columns.token_ids[columns.offsets[:-1]].tolist() == prompt_of(length)[1:]
        found.append(columns.logprobs.tolist())
    assert found[0] == found[1]
    assert computed(simulation) == 2 * length
    (hot,) = simulation.add(prompt_of(length), max_tokens=1)  # they have written, though they do not read
    finish(simulation)
    assert simulation.children[hot].num_cached == (length - 1) // 4 * 4


def test_prompt_logprobs_go_to_the_next_child_when_the_first_is_aborted():
    simulation = Simulation(max_num_batched_tokens=4)
    handles = simulation.add(prompt_of(10), n=3, max_tokens=3, prompt_logprobs=0)
    simulation.step()
    simulation.abort(handles[:1])
    finish(simulation)
    assert list(simulation.prompt_logprobs) == [handles[1]]
    assert len(simulation.prompt_logprobs[handles[1]].ranks) == 9


def test_prompt_logprobs_survive_a_preemption_of_the_prompt():
    simulation = Simulation(max_num_batched_tokens=4, num_blocks=12, policy="priority")
    (handle,) = simulation.add(prompt_of(20), max_tokens=3, prompt_logprobs=0, priority=1)
    simulation.step()
    simulation.step()
    state = simulation.scheduler._state
    (group,) = state.groups
    state.preempt(group)
    finish(simulation)
    assert len(simulation.prompt_logprobs[handle].ranks) == 19
    assert simulation.prompt_logprobs[handle].token_ids.tolist() == prompt_of(20)[1:]
    assert computed(simulation) == 28
    assert simulation.children[handle].times is not None
    assert simulation.children[handle].times[3] == 1


# Take-over, and members that are not ready


@pytest.mark.parametrize("caching", [True, False])
def test_a_sibling_takes_over_where_the_leader_stood(caching):
    simulation = Simulation(max_num_batched_tokens=4, enable_prefix_caching=caching)
    handles = simulation.add(prompt_of(14), n=3, max_tokens=3)
    simulation.step()
    simulation.step()
    simulation.abort(handles[:1])
    finish(simulation)
    assert computed(simulation) == 14
    assert simulation.children[handles[0]].reason == FinishReason.ABORT


def test_a_stranger_takes_over_alone_with_its_own_seed():
    simulation = Simulation(max_num_batched_tokens=4)
    first = simulation.add(prompt_of(14), max_tokens=3)
    simulation.step()
    simulation.add(prompt_of(14), max_tokens=3)
    simulation.step()
    simulation.abort(first)
    finish(simulation)
    assert computed(simulation) == 14


def test_when_all_members_are_aborted_the_prompt_is_given_up():
    simulation = Simulation(max_num_batched_tokens=4)
    handles = simulation.add(prompt_of(14), n=3, max_tokens=3)
    simulation.step()
    simulation.abort(handles)
    assert simulation.scheduler._kv.pool.num_free == simulation.num_blocks
    finish(simulation)
    assert computed(simulation) == 4


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("caching", [True, False])
def test_members_that_are_not_ready_draw_later_from_the_kept_row(n, caching):
    simulation = Simulation(enable_prefix_caching=caching)
    handles = simulation.add(prompt_of(10), n=n, max_tokens=3, ready=False)
    assert simulation.step()
    assert simulation.new_tokens == 0
    assert not simulation.step()
    simulation.scheduler.check_integrity()
    simulation.scheduler.set_ready(handles[:1])
    assert simulation.step()
    assert simulation.new_tokens == 1
    simulation.scheduler.set_ready([*handles, 999])
    finish(simulation)
    assert computed(simulation) == 10


def test_ready_before_the_prompt_is_complete_is_like_ready_at_once():
    simulation = Simulation(max_num_batched_tokens=4)
    handles = simulation.add(prompt_of(10), n=2, max_tokens=3, ready=False)
    simulation.step()
    simulation.scheduler.set_ready(handles)
    finish(simulation)
    assert [fork.row for step in simulation.steps for fork in step.forks] == [0]


def test_the_blocks_of_those_that_are_not_ready_are_given_up_first():
    simulation = Simulation(num_blocks=6)
    handles = simulation.add(prompt_of(12), max_tokens=3, ready=False)
    simulation.step()
    simulation.add(prompt_of(20, 30), max_tokens=3)
    simulation.run_until_quiet()
    simulation.scheduler.set_ready(handles)
    finish(simulation)
    assert computed(simulation) == 12 + 20 + 12


# Rule 11, 12 and 20


def message(handles: list[int], length: int = 5, **params: Any) -> EngineCoreRequest:
    return EngineCoreRequest(
        handles=handles,
        prompt_token_ids=np.array(prompt_of(length), np.int32),
        params=SamplingParams(n=max(1, len(handles)), **params),
        arrival_time=0.0,
        stream=False,
    )


def test_rule_11_all_children_are_taken_in_or_none():
    simulation = Simulation(num_blocks=4)
    simulation.scheduler.add_request(message([1, 2]))
    for bad, error in [
        (message([3, 4, 2]), DuplicateRequestError),
        (message([3, 3]), DuplicateRequestError),
        (message([]), BadRequestError),
        (message([3], length=0), BadRequestError),
        (message([3], length=17), BadRequestError),
    ]:
        with pytest.raises(error):
            simulation.scheduler.add_request(bad)
        simulation.scheduler.check_integrity()
        assert set(simulation.scheduler._state.children) == {1, 2}
        assert len(simulation.scheduler._state.groups) == 1


def test_a_handle_is_free_again_after_its_end():
    simulation = Simulation()
    simulation.scheduler.add_request(message([1]))
    simulation.scheduler.abort([1])
    simulation.scheduler.add_request(message([1]))


def test_rule_20_the_check_tells_an_empty_house_from_one_that_is_not():
    simulation = Simulation()
    simulation.add(prompt_of(10), n=3, max_tokens=3)
    finish(simulation)
    state = simulation.scheduler._state
    assert not (
        state.children or state.groups or state.shared_groups or state.prefilling or state.late or state.complete
    )
    assert simulation.scheduler._kv.pool.num_free == simulation.num_blocks
    assert state.slots.num_free == state.slots.size - len(state.lent_slots)


def test_group_states():
    simulation = Simulation(max_num_batched_tokens=4, max_num_seqs=1)
    simulation.add(prompt_of(6), n=2, max_tokens=2, ignore_eos=True)
    (group,) = simulation.scheduler._state.groups
    states = [group.state]
    for _ in range(3):
        simulation.step()
        states.append(group.state)
    assert states == [GroupState.WAITING, GroupState.PREFILL, GroupState.COMPLETE, GroupState.COMPLETE]
