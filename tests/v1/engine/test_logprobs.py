"""Columns to lists."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm.logprobs import FlatLogprobs, Logprob
from vllm.v1.engine.logprobs import LogprobReader, TokenTexts, extend, prompt_logprobs, snapshot
from vllm.v1.messages import LogprobColumnsMsg

TEXTS = TokenTexts(str)


def columns(entries):
    """entries: [(rank of the own token, [(id, logprob), …]), …]"""
    flat = [pair for _, pairs in entries for pair in pairs]
    return LogprobColumnsMsg(
        np.cumsum([0, *(len(pairs) for _, pairs in entries)], dtype=np.int32),
        np.array([token for token, _ in flat], np.int32),
        np.array([value for _, value in flat], np.float32),
        np.array([rank for rank, _ in entries], np.int32),
    )


def test_the_own_token_is_first_and_stands_once():
    reader = LogprobReader(columns([(2, [(7, -2.0), (5, -1.0), (7, -2.0), (9, -3.0)]), (9, [(4, -8.0), (1, -0.5)])]))
    first, second = reader.dicts(0, 2, TEXTS)
    assert list(first.items()) == [
        (7, Logprob(-2.0, 2, "7")), (5, Logprob(-1.0, 1, "5")), (9, Logprob(-3.0, 3, "9"))
    ]  # fmt: skip
    assert list(second.items()) == [(4, Logprob(-8.0, 9, "4")), (1, Logprob(-0.5, 1, "1"))]
    assert reader.total(0, 2) == -10.0


def test_impossible_tokens():
    (entry,) = LogprobReader(columns([(1, [(3, 0.0), (3, 0.0), (4, -math.inf)])])).dicts(0, 1, TEXTS)
    assert entry[4].logprob == -math.inf


def test_a_prompts_list():
    assert prompt_logprobs(columns([(1, [(3, -1.0)])]), TEXTS, False) == [None, {3: Logprob(-1.0, 1, "3")}]
    assert prompt_logprobs(columns([]), TEXTS, False) == [None]
    assert list(prompt_logprobs(columns([(1, [(3, -1.0)])]), TEXTS, True)) == [None, {3: Logprob(-1.0, 1, "3")}]


def test_texts_are_decoded_once():
    calls = []
    texts = TokenTexts(lambda token: calls.append(token) or "text")
    assert texts[5] == texts[5] == "text"
    assert calls == [5]
    assert TokenTexts(None)[5] is None


PAIRS = st.tuples(st.integers(0, 5), st.floats(-9, 0, width=32))
ONE_ENTRY = st.tuples(st.integers(1, 99), st.lists(PAIRS, min_size=1, max_size=5, unique_by=lambda pair: pair[0]))
ENTRIES = st.lists(ONE_ENTRY, max_size=6)


@given(ENTRIES, st.booleans())
def test_flat_says_the_same(entries, repeat_own):
    if repeat_own:
        entries = [(rank, [*pairs, pairs[0]]) for rank, pairs in entries]
    reader = LogprobReader(columns(entries))
    dicts = reader.entries(0, len(entries), TEXTS, False)
    flat = reader.entries(0, len(entries), TEXTS, True)
    assert isinstance(flat, FlatLogprobs)
    assert list(flat) == dicts
    assert [list(entry) for entry in flat] == [list(entry) for entry in dicts]


@given(ENTRIES, ENTRIES, st.booleans())
def test_extending_and_copying(one, other, flat):
    first = LogprobReader(columns(one)).entries(0, len(one), TEXTS, flat)
    second = LogprobReader(columns(other)).entries(0, len(other), TEXTS, flat)
    before = snapshot(first)
    expected = [*first, *second]
    extend(first, second)
    assert list(first) == expected
    assert list(before) == expected[: len(one)]


def test_forms_do_not_mix():
    with pytest.raises(TypeError):
        extend([], FlatLogprobs())
