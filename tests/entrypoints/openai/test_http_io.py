"""Reading bodies."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm.entrypoints.openai import http_io
from vllm.entrypoints.openai.http_io import parse_json
from vllm.exceptions import BadRequestError

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text('ab"\\[]{},: é\n', max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('a"\\[', max_size=5), inner, max_size=4),
)


@given(value=VALUES, piece=st.integers(1, 9))
def test_what_stands_outside_strings(value: object, piece: int) -> None:
    body = json.dumps(value).encode()
    before = http_io._PIECE
    http_io._PIECE = piece
    try:
        outside = b"".join(http_io._outside_strings(body))
    finally:
        http_io._PIECE = before

    def count(item: object) -> int:
        if isinstance(item, list):
            return 1 + sum(map(count, item))
        if isinstance(item, dict):
            return 1 + sum(map(count, item.values()))
        return 0

    assert http_io._count(outside, b"[{") == count(value)
    assert b'"' not in outside


def test_marks_within_strings_do_not_count() -> None:
    text = "[{:,\\" * 300_000
    assert parse_json(json.dumps({"prompt": text}).encode()) == {"prompt": text}


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (b"[" + b"[1]," * 70_000 + b"1]", "lists and objects"),
        (json.dumps({str(i): 1 for i in range(300_000)}).encode(), "fields"),
        (b"[" + b"1," * 4_200_000 + b"1]", "entries"),
    ],
)
def test_too_much_of_something(body: bytes, what: str) -> None:
    with pytest.raises(BadRequestError, match=what):
        parse_json(body)
