"""Rule 13: children are scheduled independently: fewer slots than children, or less cache than the group, is enough."""

import pytest

from tests.v1.engine.helpers import PROMPT, drain, new_id, params, run_one
from vllm.sampling_params import RequestOutputKind


@pytest.mark.parametrize("slots", [1, 2, 5])
def test_more_children_than_slots(make_engine, slots):
    engine = make_engine(max_num_seqs=slots)
    output = run_one(engine, n=17, max_tokens=5)
    assert [len(completion.token_ids) for completion in output.outputs] == [5] * 17
    rows = engine.model_executor.rows
    assert max(rows) <= slots
    assert max(rows) == slots


def test_a_group_larger_than_the_cache(make_engine):
    engine = make_engine(num_blocks=8)  # 128 tokens, for 12 children of 21 + 60
    output = run_one(engine, n=12, max_tokens=60, seed=1)
    assert [len(completion.token_ids) for completion in output.outputs] == [60] * 12
    assert output.metrics.num_preemptions > 0


def finish_order(engine):
    order = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            order += [(output.request_id, c.index) for c in output.outputs if c.finish_reason is not None]
    return order


def test_ties_are_broken_by_arrival_then_child_index(make_engine):
    engine = make_engine(max_num_seqs=1)
    for name in ("first", "second"):
        engine.add_request(name, PROMPT, params(n=3, max_tokens=3, kind=RequestOutputKind.DELTA))
    assert finish_order(engine) == [(name, index) for name in ("first", "second") for index in range(3)]


def test_priority_goes_before_arrival(make_engine):
    engine = make_engine(max_num_seqs=1, policy="priority")
    for name, priority in (("late", 5), ("early", -1), ("middle", 0)):
        own = params(n=2, max_tokens=3, kind=RequestOutputKind.DELTA)
        engine.add_request(name, [len(name)] * 10, own, priority=priority)
    names = [name for name, _ in finish_order(engine)]
    assert names == ["early", "early", "middle", "middle", "late", "late"]


def test_priority_without_the_policy_is_refused(engine):
    with pytest.raises(ValueError, match="scheduling_policy='priority'"):
        engine.add_request(new_id(), PROMPT, params(), priority=1)


def test_siblings_end_one_by_one(engine):
    engine.add_request(
        "family",
        PROMPT,
        params(
            n=4,
            max_tokens=40,
            kind=RequestOutputKind.DELTA,
            seed=5,
            allowed_token_ids=[2, *range(100, 115)],
            ignore_eos=False,
        ),
    )
    ends = {}
    for step, output in enumerate(drain(engine)["family"]):
        for completion in output.outputs:
            if completion.finish_reason is not None:
                ends[completion.index] = step
    assert len(ends) == 4
    assert len(set(ends.values())) > 1
