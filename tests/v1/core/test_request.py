"""Seeds, stop ids, and the compact store of log-probabilities."""

from __future__ import annotations

import numpy as np
import pytest

from tests.v1.core.simulation import Simulation
from vllm.v1.core.request import LogprobStore, SeedSource


def test_an_engine_seed_makes_seeds_repeatable_by_order_and_different_from_each_other():
    first, second, other = SeedSource(5), SeedSource(5), SeedSource(6)
    run = [first.next() for _ in range(200)]
    assert run == [second.next() for _ in range(200)]
    assert len(set(run)) == 200
    assert run != [other.next() for _ in range(200)]
    assert all(0 <= seed < 2**63 for seed in run)


def test_without_an_engine_seed_seeds_are_the_systems():
    a, b = SeedSource(None), SeedSource(None)
    seeds = [a.next() for _ in range(50)] + [b.next() for _ in range(50)]
    assert len(set(seeds)) == 100
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize("seed", [0, 7, 2**63 - 2, -3])
def test_child_i_has_seed_plus_i(seed):
    simulation = Simulation()
    handles = simulation.add([1, 2], n=4, seed=seed)
    children = simulation.scheduler._state.children
    assert [children[handle].seed for handle in handles] == [(seed + i) % 2**63 for i in range(4)]


def test_the_index_goes_on_over_messages_of_one_request():
    simulation = Simulation()
    handles = simulation.add([1, 2], n=3, seed=10, index_offset=5)
    children = simulation.scheduler._state.children
    assert [children[handle].seed for handle in handles] == [15, 16, 17]


def seeds_of_two_requests(**changes: int) -> list[int]:
    simulation = Simulation(**changes)
    handles = [*simulation.add([1, 2], n=2, seed=None), *simulation.add([1, 2], n=2, seed=None)]
    return [simulation.scheduler._state.children[handle].seed for handle in handles]


def test_without_seeds_children_and_identical_requests_differ():
    assert len(set(seeds_of_two_requests())) == 4
    assert seeds_of_two_requests() != seeds_of_two_requests()


def test_with_an_engine_seed_a_run_repeats_and_identical_requests_differ():
    assert len(set(seeds_of_two_requests(seed=3))) == 4
    assert seeds_of_two_requests(seed=3) == seeds_of_two_requests(seed=3)
    assert seeds_of_two_requests(seed=3) != seeds_of_two_requests(seed=4)


def test_the_store_keeps_entries_flat():
    store = LogprobStore()
    ids, values = np.array([4, 9, 2], np.int32), np.array([-0.5, -1.0, -2.0], np.float32)
    store.append(ids.data.cast("B")[:4], values.data.cast("B")[:4], 3)
    store.append(ids.data.cast("B")[4:], values.data.cast("B")[4:], 1)
    assert store.lengths.tolist() == [1, 2]
    assert store.token_ids.tolist() == [4, 9, 2]
    assert store.logprobs.tolist() == [-0.5, -1.0, -2.0]
    assert store.ranks.tolist() == [3, 1]
