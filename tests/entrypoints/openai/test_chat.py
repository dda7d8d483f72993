"""/v1/chat/completions of a real server."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.entrypoints.openai.server import Server, by_index, flat

PATH = "/v1/chat/completions"
MESSAGES = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}]
BODY: dict[str, Any] = {"messages": MESSAGES, "max_completion_tokens": 10, "seed": 3, "ignore_eos": True}


def test_answer(server: Server) -> None:
    answer = server.ok(PATH, BODY | {"model": "tiny"})
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    (choice,) = answer["choices"]
    assert choice["message"]["role"] == "assistant"
    assert isinstance(choice["message"]["content"], str)
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 10


def test_the_prompt_is_the_templates(server: Server) -> None:
    text = "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    ids = server.ok("/tokenize", {"messages": MESSAGES})["tokens"]
    assert server.ok("/detokenize", {"tokens": ids})["prompt"] == text
    answer = server.ok(PATH, BODY | {"return_token_ids": True})
    assert answer["prompt_token_ids"] == ids
    same = server.ok("/v1/completions", {"prompt": ids, "max_tokens": 10, "seed": 3, "ignore_eos": True})
    assert same["choices"][0]["text"] == answer["choices"][0]["message"]["content"]


def test_default_length_is_to_the_end_of_the_context(server: Server) -> None:
    body = {key: value for key, value in BODY.items() if key != "max_completion_tokens"}
    usage = server.ok(PATH, body)["usage"]
    assert usage["total_tokens"] == 1024


def test_rule_38_roles_and_streams_equal_the_answer(server: Server) -> None:
    body = BODY | {"n": 3, "logprobs": True, "top_logprobs": 2, "return_token_ids": True}
    answer = server.ok(PATH, body)
    events = server.events(PATH, body)
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({event["id"] for event in events}) == 1
    streamed = by_index(events)
    assert sorted(streamed) == [0, 1, 2]
    for choice in answer["choices"]:
        pieces = streamed[choice["index"]]
        assert pieces[0]["delta"]["role"] == "assistant"
        assert all("role" not in piece["delta"] for piece in pieces[1:])
        assert "".join(piece["delta"]["content"] for piece in pieces) == choice["message"]["content"]
        assert [piece["finish_reason"] for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
        content = flat(piece["logprobs"]["content"] for piece in pieces)
        assert content == choice["logprobs"]["content"]
        assert flat(piece["token_ids"] for piece in pieces) == choice["token_ids"]


def test_logprobs(server: Server) -> None:
    (choice,) = server.ok(PATH, BODY | {"logprobs": True, "top_logprobs": 3})["choices"]
    entries = choice["logprobs"]["content"]
    assert len(entries) == 10
    for entry in entries:
        assert len(entry["top_logprobs"]) in (3, 4)
        best = [one["logprob"] for one in entry["top_logprobs"]]
        assert best == sorted(best, reverse=True)
        assert entry["logprob"] <= best[0]
        assert len(entry["bytes"]) <= 1 or entry["token"].startswith("<")  # ids without a token write nothing
    assert server.error(PATH, BODY | {"top_logprobs": 3})["param"] == "top_logprobs"
    assert server.error(PATH, BODY | {"logprobs": True, "top_logprobs": 21})["param"] in ("logprobs", "top_logprobs")


def test_usage_in_a_stream(server: Server) -> None:
    events = server.events(PATH, BODY | {"n": 2, "stream_options": {"include_usage": True}})
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 20


def test_parts_and_continuing(server: Server) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert server.ok("/tokenize", {"messages": parts}) == server.ok(
        "/tokenize", {"messages": [{"role": "user", "content": "a\nb"}]}
    )
    open_end = [*MESSAGES, {"role": "assistant", "content": "Well,"}]
    body = BODY | {"messages": open_end, "continue_final_message": True, "return_token_ids": True}
    answer = server.ok(PATH, body)
    assert bytes(answer["prompt_token_ids"][-5:]) == b"Well,"
    echoed = server.ok(PATH, body | {"echo": True})
    assert echoed["choices"][0]["message"]["content"] == "Well," + answer["choices"][0]["message"]["content"]
    pieces = by_index(server.events(PATH, body | {"echo": True}))[0]
    assert "".join(p["delta"]["content"] for p in pieces) == echoed["choices"][0]["message"]["content"]
    error = server.error(PATH, body | {"add_generation_prompt": True})
    assert error["param"] == "continue_final_message"


def test_templates_from_requests_are_refused(server: Server) -> None:
    assert server.error(PATH, BODY | {"chat_template": "{{ 1 }}"})["param"] == "chat_template"
    assert (
        server.error(PATH, BODY | {"chat_template_kwargs": {"chat_template": "x"}})["param"] == "chat_template_kwargs"
    )
    assert server.error(PATH, BODY | {"chat_template_kwargs": {"messages": []}})["param"] == "chat_template_kwargs"
    server.ok(PATH, BODY | {"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low"})


@pytest.mark.parametrize(
    "messages",
    [
        [], "hi", None, 3, [3], [{}], [{"role": 1}], [{"role": "user", "content": 3}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}],
        [{"role": "assistant", "tool_calls": 3}],
    ],
)  # fmt: skip
def test_wrong_messages(server: Server, messages: Any) -> None:
    error = server.error(PATH, BODY | {"messages": messages})
    assert error["param"] == "messages"
    assert "messages" in error["message"]


def test_the_official_client(server: Server) -> None:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none") as client:
        arguments: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "n": 2, "max_tokens": 8, "seed": 3}
        answer = client.chat.completions.create(**arguments, logprobs=True, top_logprobs=2)
        pieces = {0: "", 1: ""}
        for event in client.chat.completions.create(**arguments, stream=True):
            for choice in event.choices:
                pieces[choice.index] += choice.delta.content or ""
        assert pieces == {choice.index: choice.message.content for choice in answer.choices}
        assert answer.choices[0].logprobs is not None


async def test_the_official_client_async(server: Server) -> None:
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none") as client:
        stream = await client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=8, seed=3, stream=True, stream_options={"include_usage": True}
        )
        events = [event async for event in stream]
        assert events[-1].usage is not None
        assert events[-1].usage.completion_tokens <= 8
