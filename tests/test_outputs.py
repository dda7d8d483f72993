"""Outputs and log-probabilities: cheap, comparable, picklable, and readable in the ways programs read them."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm.logprobs import FlatLogprobs, Logprob
from vllm.outputs import CompletionOutput, RequestOutput, RequestStateStats


def test_logprob() -> None:
    entry = Logprob(-0.5, 1, "a")
    assert (entry.logprob, entry.rank, entry.decoded_token) == (-0.5, 1, "a")
    assert entry == Logprob(logprob=-0.5, rank=1, decoded_token="a")
    assert entry != Logprob(-0.5, 2, "a")
    assert Logprob(-1.0) == Logprob(-1.0, None, None)


def test_request_output_fields_in_order() -> None:
    completion = CompletionOutput(0, "hi", [1, 2], -1.5, [{1: Logprob(-0.5)}, {2: Logprob(-1.0)}], "stop", None)
    output = RequestOutput("id", "prompt", [7], None, [completion], True, None, None, 3)
    assert RequestOutput.__struct_fields__ == (
        "request_id",
        "prompt",
        "prompt_token_ids",
        "prompt_logprobs",
        "outputs",
        "finished",
        "metrics",
        "lora_request",
        "num_cached_tokens",
    )
    assert CompletionOutput.__struct_fields__ == (
        "index",
        "text",
        "token_ids",
        "cumulative_logprob",
        "logprobs",
        "finish_reason",
        "stop_reason",
        "lora_request",
    )
    assert output.num_cached_tokens == 3
    assert completion.finished()
    assert not CompletionOutput(0, "", []).finished()
    assert "text='hi'" in repr(output)
    # trl: the first value of each dict is the sampled token's
    assert [next(iter(entry.values())).logprob for entry in completion.logprobs or ()] == [-0.5, -1.0]


def test_outputs_travel() -> None:
    output = RequestOutput(
        "id",
        None,
        [1],
        FlatLogprobs([None, {1: Logprob(-0.5, 1, "a")}]),
        [CompletionOutput(0, "x", [1])],
        False,
        RequestStateStats(num_generation_tokens=4),
    )
    assert pickle.loads(pickle.dumps(output)) == output


def test_outputs_take_no_other_attribute() -> None:
    with pytest.raises(AttributeError):
        CompletionOutput(0, "", []).score = 1.0  # type: ignore[attr-defined]


entries = st.one_of(
    st.none(),
    st.dictionaries(
        st.integers(0, 99),
        st.builds(Logprob, st.floats(-50, 0), st.one_of(st.none(), st.integers(1, 9)), st.one_of(st.none(), st.text())),
        min_size=1,
        max_size=4,
    ),
)


@given(st.lists(entries, max_size=8), st.slices(8))
def test_flat_logprobs_read_like_the_list(rows: list[dict[int, Logprob] | None], cut: slice) -> None:
    flat = FlatLogprobs(rows)
    assert len(flat) == len(rows)
    assert list(flat) == rows
    assert flat == rows
    assert list(flat[cut]) == rows[cut]
    for at in range(-len(rows), len(rows)):
        assert flat[at] == rows[at]
        if rows[at] is not None:
            assert list(flat[at] or ()) == list(rows[at] or ())  # the order within an entry too
    with pytest.raises(IndexError):
        flat[len(rows)]
    with pytest.raises(IndexError):
        flat[-len(rows) - 1]


def test_flat_logprobs_from_columns() -> None:
    flat = FlatLogprobs()
    flat.append_columns([5, 6], [-0.1, -2.0], [1, 2], ["a", None])
    flat.append(None)
    assert flat == [{5: Logprob(-0.1, 1, "a"), 6: Logprob(-2.0, 2, None)}, None]
    assert flat != [{5: Logprob(-0.1, 1, "a")}, None]
    assert flat != "ab"
    assert repr(flat) == "FlatLogprobs(2 positions, 2 entries)"
    with pytest.raises(TypeError):
        hash(flat)
