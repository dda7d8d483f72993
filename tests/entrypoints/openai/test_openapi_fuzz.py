"""Requests made from the server's own OpenAPI document: valid ones, and ones with a wrong value somewhere."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.entrypoints.openai.server import Server

PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/abort_requests")
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
SMALL = {"max_tokens": 2, "max_completion_tokens": 2, "n": 2, "best_of": 2, "stream": False, "model": "tiny"}
"""In place of what would make a request long, or another one than is asked for."""


def strategy(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values that fit a schema of the kinds that stand in the document."""
    if "anyOf" in schema:
        return st.one_of([strategy(option) for option in schema["anyOf"]])
    kind = schema.get("type")
    if kind == "object":
        properties = schema.get("properties", {})
        required = {name: strategy(properties[name]) for name in schema.get("required", ())}
        optional = {name: strategy(value) for name, value in properties.items() if name not in required}
        if not properties:
            return st.dictionaries(st.text("abrole1", max_size=4), JUNK, max_size=3)
        return st.fixed_dictionaries(required, optional=optional)
    if kind == "array":
        return st.lists(strategy(schema.get("items", {})), min_size=schema.get("minItems", 0), max_size=4)
    return {
        "string": st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
        "integer": st.integers(-3, 400) | st.integers(),
        "number": st.floats(-3, 3) | st.floats(allow_nan=False, allow_infinity=False),
        "boolean": st.booleans(),
        "null": st.none(),
    }.get(str(kind), JUNK)


@functools.cache
def schemas(server: Server) -> dict[str, dict[str, Any]]:
    document = server.client.get("/openapi.json").json()
    return {
        path: document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"] for path in PATHS
    }


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("wrong", [False, True])
def test_no_request_is_a_5xx(server: Server, path: str, wrong: bool) -> None:
    schema = schemas(server)[path]
    names = sorted(schema["properties"])

    @settings(max_examples=60, suppress_health_check=list(HealthCheck))
    @given(body=strategy(schema), field=st.sampled_from(names), junk=JUNK, extra=JUNK)
    def check(body: dict[str, Any], field: str, junk: Any, extra: Any) -> None:
        body |= {name: value for name, value in SMALL.items() if name in body or name == "max_tokens"}
        body["of_no_meaning"] = extra
        if wrong:
            body[field] = junk
        response = server.post(path, body)
        assert response.status_code in (200, 400, 404), (response.status_code, response.text[:300], body)
        if response.status_code != 200:
            error = response.json()["error"]
            assert error["message"]
            assert "Traceback" not in error["message"]

    check()
    assert server.client.get("/health").status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_any_message_or_prompt_is_answered_or_refused(server: Server, path: str) -> None:
    content = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
    message = st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "tool"]), "content": content}
    )

    @settings(max_examples=60, suppress_health_check=list(HealthCheck))
    @given(text=content, messages=st.lists(message, min_size=1, max_size=4), seed=st.integers(-1, 2**63 - 1))
    def check(text: str, messages: Any, seed: int) -> None:
        own: dict[str, Any] = {"messages": messages} if "chat" in path else {"prompt": text}
        response = server.post(
            path, own | {"max_tokens": 3, "seed": seed, "n": 2, "logprobs": True if "chat" in path else 1}
        )
        assert response.status_code == 200 or (response.status_code == 400 and not text), response.text[:300]

    check()
