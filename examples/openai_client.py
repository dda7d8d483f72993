"""Four answers to one question from a running `vllm serve`, streamed side by side, then one as JSON of a schema."""

from __future__ import annotations

import os

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("VLLM_URL", "http://localhost:8000/v1"), api_key=os.environ.get("VLLM_API_KEY", "none")
)
model = client.models.list().data[0].id

answers = [""] * 4
stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Name a tree, and say why you like it."}],
    n=4,
    seed=1,
    temperature=0.8,
    max_tokens=40,
    stream=True,
)
for event in stream:
    for choice in event.choices:
        answers[choice.index] += choice.delta.content or ""
for index, answer in enumerate(answers):
    print(f"{index}: {answer}")

schema = {
    "type": "object",
    "properties": {"tree": {"type": "string", "maxLength": 20}, "height": {"type": "integer", "maximum": 120}},
    "required": ["tree", "height"],
    "additionalProperties": False,
}
answer = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Name a tree and its height in metres, as JSON."}],
    max_tokens=60,
    response_format={"type": "json_schema", "json_schema": {"name": "tree", "schema": schema}},
)
print(answer.choices[0].message.content)
