"""Random submitting, aborting and finishing through the whole engine: nothing hangs, is lost, or is left."""

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.v1.engine.fakes import EOS, FAKE_MODEL, bundled_tokenizer, fake_config, fake_token, scripted
from tests.v1.engine.helpers import KINDS, join, new_id, params, until_idle
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.llm_engine import LLMEngine

REQUESTS = st.fixed_dictionaries({
    "n": st.one_of(st.integers(1, 4), st.integers(5, 64)),
    "kind": st.sampled_from(KINDS),
    "max_tokens": st.integers(1, 20),
    "seed": st.sampled_from([None, 1, 2, 3, scripted(0), scripted(3)]),
    "stop": st.sampled_from([None, None, ["STOP"], ["a", "e"]]),
    "logprobs": st.sampled_from([None, None, 0, 2]),
    "allowed_token_ids": st.sampled_from([None, None, [EOS, 100, 101, 102]]),
    "prompt_logprobs": st.sampled_from([None, None, None, 1]),
    "finish": st.integers(0, 4),
})  # fmt: skip
PROMPTS = st.tuples(st.sampled_from([500, 500, 900]), st.integers(1, 60))


def build(fields):
    fields = dict(fields)
    finish = fields.pop("finish")
    if 0 < finish <= fields["n"]:
        fields["finish_after"] = finish
    if fields["allowed_token_ids"] is not None:
        fields["ignore_eos"] = False
    return params(**fields)


@settings(max_examples=40)
@given(data=st.data(), seed=st.integers(0, 2**32))
def test_synchronously(data, seed):
    config = fake_config(
        num_blocks=data.draw(st.integers(5, 40), "blocks"),
        max_num_seqs=data.draw(st.integers(1, 9), "slots"),
        max_num_batched_tokens=data.draw(st.integers(9, 80), "budget"),
        enable_prefix_caching=data.draw(st.booleans(), "caching"),
    )
    engine = LLMEngine(config, model=FAKE_MODEL, tokenizer=bundled_tokenizer())
    owns, live, aborted, outputs = {}, [], set(), {}

    def step():
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
            if output.finished:
                assert output.request_id in owns
                if output.request_id in live:
                    live.remove(output.request_id)
        engine.client.call("check_integrity")

    for _ in range(data.draw(st.integers(1, 12), "actions")):
        action = data.draw(st.sampled_from(["submit", "submit", "step", "step", "abort"]))
        if action == "submit":
            first, length = data.draw(PROMPTS)
            if length > engine.client.info.max_prompt_len:
                continue
            request_id = new_id()
            owns[request_id] = (build(data.draw(REQUESTS)), list(range(first, first + length)))
            engine.add_request(request_id, owns[request_id][1], owns[request_id][0])
            live.append(request_id)
        elif action == "abort" and live:
            request_id = data.draw(st.sampled_from(live))
            engine.abort_request(request_id)
            aborted.add(request_id)
            live.remove(request_id)
        else:
            for _ in range(data.draw(st.integers(1, 6))):
                step()
    for _ in range(5000):
        if not engine.has_unfinished_requests():
            break
        step()
    assert not engine.has_unfinished_requests(), "it hangs"
    engine.check_integrity()
    for request_id, (own, prompt) in owns.items():
        check(own, prompt, outputs[request_id], request_id in aborted)
    engine.shutdown()


def check(own, prompt, outputs, aborted):
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    ends = join(outputs, own.output_kind)
    assert sorted(ends) == list(range(own.n))
    for index, completion in ends.items():
        ids = completion.token_ids
        assert completion.finish_reason in (
            ("abort", "stop", "length") if aborted or own.finish_after else ("stop", "length")
        )
        assert len(ids) <= own.max_tokens
        if completion.finish_reason == "length":
            assert len(ids) == own.max_tokens or len(ids) + len(prompt) <= 256
        if own.seed is not None and own.seed < 10 and own.allowed_token_ids is None:
            assert ids == [fake_token(own.seed + index, position) for position in range(len(ids))]
        if own.logprobs is not None:
            assert len(completion.logprobs) == len(ids)
        if completion.finish_reason != "stop":
            assert completion.text == bundled_tokenizer().decode(ids)
        elif completion.stop_reason in (own.stop or ()):
            assert not any(stop in completion.text for stop in own.stop)
    if own.prompt_logprobs is not None and outputs[0].prompt_logprobs is not None:
        assert len(outputs[0].prompt_logprobs) == len(prompt)


@pytest.mark.parametrize("multiprocessing", [False, True], ids=["thread", "own_process"])
@pytest.mark.parametrize("seed", range(3))
async def test_asynchronously(multiprocessing, seed):
    rng = random.Random(seed)
    config = fake_config(num_blocks=24, max_num_seqs=6, max_num_batched_tokens=40)
    engine = AsyncLLM(config, multiprocessing=multiprocessing, model=FAKE_MODEL, tokenizer=bundled_tokenizer())
    texts = ["short", "word " * 30, "word " * 30, "long " * 50]

    async def one():
        own = params(
            n=rng.choice([1, 1, 2, 5, 30]), kind=rng.choice(KINDS), max_tokens=rng.randint(1, 30),
            seed=rng.choice([None, 5, scripted(0)]), stop=rng.choice([None, ["STOP"]]), logprobs=rng.choice([None, 1]),
        )  # fmt: skip
        request_id = new_id()
        prompt = rng.choice(texts)
        outputs = []

        async def consume():
            async for output in engine.generate(prompt, own, request_id):
                outputs.append(output)
                if rng.random() < 0.2:
                    await asyncio.sleep(rng.random() / 50)

        await asyncio.sleep(rng.random() / 5)
        task = asyncio.create_task(consume())
        fate = rng.choice(["finish", "finish", "abort", "cancel"])
        if fate != "finish":
            await asyncio.sleep(rng.random() / 20)
            if fate == "abort":
                await engine.abort(request_id)
            else:
                task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            assert fate == "cancel"
        else:
            check(own, list(range(50)), outputs, fate == "abort")

    try:
        await asyncio.wait_for(asyncio.gather(*(one() for _ in range(50))), 60)
        await until_idle(engine)
    finally:
        engine.shutdown()
