"""Requests that continue a prompt which another one holds: nothing is computed twice, and what they read is right.

The simulated runner knows what every cache slot holds, so a partial block that was copied too early, too late, or from
the wrong place shows as wrong tokens.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.v1.core.simulation import Simulation


class Holding(Simulation):
    """`add` takes `hold` and `continues` too."""

    def __init__(self, *args: Any, **changes: Any) -> None:
        super().__init__(*args, **changes)
        add_request = self.scheduler.add_request
        self._fields: dict[str, Any] = {}

        def with_fields(message, **options):
            for name, value in self._fields.items():
                setattr(message, name, value)
            add_request(message, **options)

        self.scheduler.add_request = with_fields  # type: ignore[method-assign]

    def add(self, prompt: list[int], hold: bool = False, continues: int = -1, **options: Any) -> list[int]:
        self._fields = {"hold": hold, "continues": continues}
        return super().add(prompt, **options)

    def add_held(self, prompt: list[int], continues: int = -1, **options: Any) -> tuple[list[int], int]:
        """A request and, beside it, one that holds its prompt."""
        handles = self.add(prompt, continues=continues, **options)
        return handles, self.add(prompt, hold=True, continues=continues)[0]

    @property
    def computed(self) -> int:
        return self.scheduler.stats().prompt_tokens_computed


@pytest.mark.parametrize("length", range(1, 14))
@pytest.mark.parametrize("more", [1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize("lag", [False, True])
def test_only_the_new_tokens_are_computed(length, more, lag):
    simulation = Holding(num_blocks=40, lag=lag)
    prompt = list(range(1, length + 1))
    _, hold = simulation.add_held(prompt, max_tokens=1)
    while simulation.step():
        pass
    assert simulation.computed == length
    assert not simulation.scheduler.has_unfinished()  # one that only holds has nothing to do
    for start in (100, 200, 300):  # several continue it, each in its own copy
        simulation.add(prompt + list(range(start, start + more)), continues=hold, max_tokens=3)
    while simulation.step():
        pass
    assert simulation.computed == length + 3 * more
    simulation.abort([hold])
    simulation.run()
    simulation.check_outputs()


def test_a_hold_reports_nothing_until_it_is_aborted():
    simulation = Holding()
    (handle,), hold = simulation.add_held([1, 2, 3, 4, 5], max_tokens=2)
    while simulation.step():
        pass
    assert simulation.children[handle].tokens
    assert simulation.children[hold].reason == 0
    assert simulation.scheduler._kv.pool.num_free < 64
    assert simulation.scheduler.stats().prompt_tokens == 5  # counted once
    simulation.abort([hold])
    simulation.run()
    assert not simulation.children[hold].tokens


def test_a_source_that_has_gone_is_no_harm():
    simulation = Holding()
    _, hold = simulation.add_held([1, 2, 3, 4, 5], max_tokens=1)
    while simulation.step():
        pass
    simulation.abort([hold])
    simulation.add([1, 2, 3, 4, 5, 6], continues=hold, max_tokens=2)
    simulation.add([1, 2, 3, 4, 5, 7], continues=12345, max_tokens=2)
    simulation.run()
    simulation.check_outputs()


@pytest.mark.parametrize("other", [[9, 2, 3, 4, 5, 6], [1, 2, 3, 4, 9, 6], [1, 2, 3, 4], [1, 2, 3, 4, 5]])
def test_a_source_that_is_no_beginning_is_not_taken(other):
    simulation = Holding()
    _, hold = simulation.add_held([1, 2, 3, 4, 5], max_tokens=1)
    while simulation.step():
        pass
    simulation.add(other, continues=hold, max_tokens=2)
    while simulation.step():
        pass
    simulation.abort([hold])
    simulation.run()
    simulation.check_outputs()


def test_another_salt_takes_nothing():
    simulation = Holding()
    _, hold = simulation.add_held([1, 2, 3, 4, 5], max_tokens=1)
    while simulation.step():
        pass
    simulation.add([1, 2, 3, 4, 5, 6], continues=hold, cache_salt="other", max_tokens=2)
    while simulation.step():
        pass
    assert simulation.computed == 5 + 6
    simulation.abort([hold])
    simulation.run()
    simulation.check_outputs()


@given(
    blocks=st.integers(6, 40),
    slots=st.integers(1, 5),
    budget=st.integers(4, 40),
    lag=st.booleans(),
    chunked=st.booleans(),
    data=st.data(),
)
def test_random_trees(blocks, slots, budget, lag, chunked, data):
    """Beams and strangers in a small cache; holds come and go at random."""
    simulation = Holding(
        num_blocks=blocks, lag=lag, max_num_seqs=slots, max_num_batched_tokens=budget, enable_chunked_prefill=chunked
    )
    longest = min(simulation.scheduler.max_prompt_len, 24)
    holds: list[tuple[int, list[int]]] = []
    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["root", "grow", "grow", "grow", "stranger", "drop", "step", "step"]))
        if action == "root":
            prompt = [data.draw(st.integers(1, 2))] * data.draw(st.integers(1, min(9, longest)))
            holds.append((simulation.add_held(prompt, max_tokens=1)[1], prompt))
        elif action == "grow" and holds:
            hold, prompt = data.draw(st.sampled_from(holds))
            prompt = prompt + data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=5))
            if len(prompt) <= longest:
                own = {"max_tokens": data.draw(st.integers(1, 3)), "n": data.draw(st.integers(1, 3))}
                if data.draw(st.booleans()):
                    holds.append((simulation.add_held(prompt, hold, **own)[1], prompt))
                else:
                    simulation.add(prompt, continues=hold, **own)
        elif action == "stranger":
            simulation.add([data.draw(st.integers(1, 2))] * data.draw(st.integers(1, longest)), max_tokens=3)
        elif action == "drop" and holds:
            simulation.abort([holds.pop(data.draw(st.integers(0, len(holds) - 1)))[0]])
        else:
            simulation.step()
    for _ in range(3000):
        if not simulation.scheduler.has_unfinished() and not simulation.waiting:
            break
        simulation.step()
    else:
        raise AssertionError(simulation.describe())
    simulation.abort([hold for hold, _ in holds])
    simulation.run()
    simulation.check_outputs()
