"""/v1/completions of a real server: raw HTTP for the shapes, the official client for what clients do."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.entrypoints.openai.server import Server, by_index, flat

PATH = "/v1/completions"
LONG: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 12, "seed": 7, "ignore_eos": True}


def test_defaults(server: Server) -> None:
    answer = server.ok(PATH, {"model": "tiny", "prompt": "hello", "ignore_eos": True})
    assert answer["object"] == "text_completion"
    assert answer["model"] == "tiny"
    assert answer["id"].startswith("cmpl-")
    (choice,) = answer["choices"]
    assert choice["index"] == 0
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"] is None
    assert answer["usage"] == {
        "prompt_tokens": 5, "completion_tokens": 16, "total_tokens": 21, "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip


def test_rule_37_index_is_prompt_index_times_n_plus_i_and_echo_is_per_prompt(server: Server) -> None:
    body = {"prompt": ["aaa", "bbbb", "c"], "n": 2, "max_tokens": 3, "echo": True, "ignore_eos": True, "seed": 5}
    answer = server.ok(PATH, body)
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    starts = [prompt for prompt in body["prompt"] for _ in range(2)]  # type: ignore[attr-defined]
    assert all(choice["text"].startswith(start) for choice, start in zip(answer["choices"], starts, strict=True))
    assert answer["usage"]["prompt_tokens"] == 8
    assert answer["usage"]["completion_tokens"] == 18
    streamed = by_index(server.events(PATH, body))
    assert sorted(streamed) == list(range(6))
    for choice in answer["choices"]:
        assert "".join(piece["text"] for piece in streamed[choice["index"]]) == choice["text"]


@pytest.mark.parametrize("prompt", ["hello", [104, 101, 108, 108, 111], ["hello"], [[104, 101, 108, 108, 111]]])
def test_prompt_forms_mean_the_same(server: Server, prompt: Any) -> None:
    expected = server.ok(PATH, LONG | {"prompt": "hello"})["choices"][0]["text"]
    assert server.ok(PATH, LONG | {"prompt": prompt})["choices"][0]["text"] == expected


def test_streams_equal_the_answer(server: Server) -> None:
    body = LONG | {"n": 4, "logprobs": 3, "return_token_ids": True}
    answer = server.ok(PATH, body)
    streamed = by_index(server.events(PATH, body))
    assert len({choice["text"] for choice in answer["choices"]}) > 1
    for choice in answer["choices"]:
        pieces = streamed[choice["index"]]
        assert "".join(piece["text"] for piece in pieces) == choice["text"]
        assert flat(piece["token_ids"] for piece in pieces) == choice["token_ids"]
        assert pieces[0]["prompt_token_ids"] == choice["prompt_token_ids"]
        for key in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
            assert flat(piece["logprobs"][key] for piece in pieces) == choice["logprobs"][key]


def test_many_completions(server: Server) -> None:
    body = LONG | {"n": 400, "max_tokens": 3, "logprobs": 20}
    answer = server.ok(PATH, body)
    assert [choice["index"] for choice in answer["choices"]] == list(range(400))
    streamed = by_index(server.events(PATH, body))
    for choice in answer["choices"]:
        assert "".join(piece["text"] for piece in streamed[choice["index"]]) == choice["text"]
    chat = {"messages": [{"role": "user", "content": "a"}], "n": 400, "max_tokens": 3, "seed": 1}
    chat |= {"logprobs": True, "top_logprobs": 20}
    texts = [choice["message"]["content"] for choice in server.ok("/v1/chat/completions", chat)["choices"]]
    pieces = by_index(server.events("/v1/chat/completions", chat))
    assert texts == ["".join(piece["delta"]["content"] for piece in pieces[index]) for index in range(400)]


def test_rule_06_child_i_is_the_request_with_seed_plus_i(server: Server) -> None:
    texts = [choice["text"] for choice in server.ok(PATH, LONG | {"n": 3})["choices"]]
    alone = [server.ok(PATH, LONG | {"seed": 7 + i})["choices"][0]["text"] for i in range(3)]
    assert texts == alone


def test_rule_07_without_a_seed_requests_differ(server: Server) -> None:
    body = {key: value for key, value in LONG.items() if key != "seed"} | {"n": 2}
    texts = [choice["text"] for _ in range(2) for choice in server.ok(PATH, body)["choices"]]
    assert len(set(texts)) == 4


def test_rule_22_and_38_one_finish_reason_per_index_explicit_null_before(server: Server) -> None:
    for index, pieces in by_index(server.events(PATH, LONG | {"n": 3})).items():
        assert [piece["finish_reason"] for piece in pieces] == [None] * (len(pieces) - 1) + ["length"], index


def test_rule_35_usage(server: Server) -> None:
    events = server.events(PATH, LONG | {"n": 2, "stream_options": {"include_usage": True}})
    assert events[-1]["choices"] == []
    usage = events[-1]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (16, 24, 40)
    assert all(event["usage"] is None for event in events[:-1])
    continuous = server.events(
        PATH, LONG | {"n": 2, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    )
    counts = [event["usage"]["completion_tokens"] for event in continuous]
    assert counts == sorted(counts)
    assert counts[-1] == 24
    assert all("usage" not in event for event in server.events(PATH, LONG))


def test_cached_tokens(server: Server) -> None:
    prompt = "x" * 100
    server.post("/reset_prefix_cache")
    first, second = (server.ok(PATH, {"prompt": prompt})["usage"]["prompt_tokens_details"] for _ in range(2))
    assert first == {"cached_tokens": 0}
    assert second == {"cached_tokens": 96}


def test_best_of(server: Server) -> None:
    answer = server.ok(PATH, LONG | {"n": 2, "best_of": 5, "logprobs": 0})
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    means = [sum(c["logprobs"]["token_logprobs"]) / 12 for c in answer["choices"]]
    assert means[0] >= means[1]
    error = server.error(PATH, LONG | {"n": 2, "best_of": 5, "stream": True})
    assert error["param"] == "best_of"


def test_rule_05_finish_after(server: Server) -> None:
    answer = server.ok(PATH, {"prompt": "abc", "n": 8, "finish_after": 1, "max_tokens": 400, "temperature": 2.0})
    reasons = [choice["finish_reason"] for choice in answer["choices"]]
    assert len(reasons) == 8
    assert set(reasons) <= {"stop", "length", "abort"}
    assert any(reason != "abort" for reason in reasons)


def test_stop_and_stop_reason(server: Server) -> None:
    body = {"prompt": "abc", "max_tokens": 50, "logit_bias": {"120": 100}, "temperature": 0}
    plain = server.ok(PATH, body)["choices"][0]
    assert plain["text"] == "x" * 50
    stopped = server.ok(PATH, body | {"stop": "xxx"})["choices"][0]
    assert (stopped["text"], stopped["finish_reason"], stopped["stop_reason"]) == ("", "stop", "xxx")
    kept = server.ok(PATH, body | {"stop": ["xxx"], "include_stop_str_in_output": True, "min_tokens": 5})["choices"][0]
    assert kept["text"].endswith("xxx")
    by_id = server.ok(PATH, body | {"stop_token_ids": [120]})["choices"][0]
    assert (by_id["finish_reason"], by_id["stop_reason"]) == ("stop", 120)
    pieces = by_index(server.events(PATH, body | {"stop": "xxx", "min_tokens": 5}))[0]
    whole = server.ok(PATH, body | {"stop": "xxx", "min_tokens": 5})["choices"][0]
    assert "".join(piece["text"] for piece in pieces) == whole["text"]
    assert pieces[-1]["stop_reason"] == "xxx"


def test_echo_with_logprobs_as_lm_eval_asks(server: Server) -> None:
    body = {"prompt": [104, 101, 108], "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True, "seed": 1}
    (choice,) = server.ok(PATH, body)["choices"]
    logprobs = choice["logprobs"]
    assert logprobs["tokens"][:3] == ["h", "e", "l"]
    assert logprobs["token_logprobs"][0] is None
    assert all(value < 0 for value in logprobs["token_logprobs"][1:])
    assert logprobs["top_logprobs"][0] is None
    assert len(logprobs["tokens"]) == 4
    only = server.ok(PATH, body | {"max_tokens": 0})["choices"][0]
    assert only["text"] == "hel"
    assert only["logprobs"]["token_logprobs"] == logprobs["token_logprobs"][:3]


def test_prompt_logprobs(server: Server) -> None:
    (choice,) = server.ok(PATH, LONG | {"prompt_logprobs": 2, "n": 1})["choices"]
    entries = choice["prompt_logprobs"]
    assert entries[0] is None
    assert len(entries) == 16
    for token, entry in zip("Once upon a time"[1:], entries[1:], strict=True):
        assert entry[str(ord(token))]["decoded_token"] == token
        assert 2 <= len(entry) <= 3


def test_tokens_as_ids(server: Server) -> None:
    (choice,) = server.ok(PATH, LONG | {"logprobs": 1, "return_tokens_as_token_ids": True, "return_token_ids": True})[
        "choices"
    ]
    assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in choice["token_ids"]]


def test_request_id_is_honoured_and_echoed(server: Server) -> None:
    response = server.post(PATH, {"prompt": "a", "max_tokens": 1}, headers={"X-Request-Id": "mine-1"})
    assert response.headers["x-request-id"] == "mine-1"
    assert response.json()["id"] == "cmpl-mine-1"
    assert server.ok(PATH, {"prompt": "a", "max_tokens": 1, "request_id": "own"})["id"] == "cmpl-own"
    odd = server.post(PATH, {"prompt": "a", "max_tokens": 1}, headers={"X-Request-Id": "a b" + "c" * 500})
    assert len(odd.headers["x-request-id"]) == 32


def test_rule_39_null_is_the_default_and_unknown_fields_are_passed_over(server: Server) -> None:
    from vllm.entrypoints.openai.protocol import CompletionBody

    nulls = dict.fromkeys(CompletionBody.model_fields) | LONG | {"no_such_field": [1], "another": {"a": None}}
    assert server.ok(PATH, nulls)["choices"] == server.ok(PATH, LONG)["choices"]


def test_abort_by_id(server: Server) -> None:
    body = LONG | {"max_tokens": 1000, "request_id": "long-one", "n": 4, "stream": True}
    with server.client.stream("POST", PATH, json=body) as response:
        lines = response.iter_lines()
        next(lines)
        server.post("/abort_requests", {"request_ids": ["cmpl-long-one", "unknown"]})
        rest = "".join(lines)
    assert rest.count('"finish_reason":"abort"') == 4
    assert rest.endswith("data: [DONE]")


def test_the_official_client(server: Server) -> None:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none") as client:
        model = client.models.list().data[0].id
        answer = client.completions.create(model=model, prompt="hello", n=2, max_tokens=6, seed=3)
        pieces: dict[int, str] = {0: "", 1: ""}
        for event in client.completions.create(model=model, prompt="hello", n=2, max_tokens=6, seed=3, stream=True):
            pieces[event.choices[0].index] += event.choices[0].text
        assert pieces == {choice.index: choice.text for choice in answer.choices}
        with pytest.raises(openai.BadRequestError, match="top_p"):
            client.completions.create(model=model, prompt="hello", top_p=7)
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="other", prompt="hello")


async def test_the_official_client_async(server: Server) -> None:
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none") as client:
        stream = await client.completions.create(model="tiny", prompt="hello", max_tokens=6, seed=3, stream=True)
        text = "".join([event.choices[0].text async for event in stream])
        answer = await client.completions.create(model="tiny", prompt="hello", max_tokens=6, seed=3)
        assert answer.choices[0].text == text
