"""Rule 14: a prompt that can never fit is refused at submission, with the limit and the length."""

import pytest

from tests.v1.engine.helpers import new_id, params, run_one
from vllm.exceptions import PromptTooLongError


@pytest.mark.parametrize("length", [256, 257, 5000])
def test_longer_than_the_context(engine, length):
    with pytest.raises(ValueError, match=rf"maximum context length is 256 tokens.* {length} ") as caught:
        engine.add_request(new_id(), [5] * length, params())
    assert isinstance(caught.value, PromptTooLongError)
    assert not engine.has_unfinished_requests()


def test_the_longest_that_fits(engine):
    """lm-eval asks for one token after max_model_len - 1."""
    output = run_one(engine, [5] * 255, max_tokens=1)
    assert len(output.outputs[0].token_ids) == 1
    output = run_one(engine, [5] * 255, max_tokens=50)
    assert len(output.outputs[0].token_ids) == 1
    assert output.outputs[0].finish_reason == "length"


def test_text(engine):
    with pytest.raises(ValueError, match=r"maximum context length is 256 tokens.* 300 "):
        engine.add_request(new_id(), " a" * 300, params())


def test_huge_text_is_refused_without_being_tokenized(engine, monkeypatch):
    library = engine.processor.tokenizer.library
    monkeypatch.setattr(engine.processor.tokenizer, "_library", None)
    monkeypatch.setattr(engine.processor.tokenizer, "_make_library", lambda: pytest.fail("it was tokenized"))
    with pytest.raises(ValueError, match=r"maximum context length is 256 tokens.*\d{5,} tokens"):
        engine.add_request(new_id(), "x" * 10_000_000, params())
    monkeypatch.setattr(engine.processor.tokenizer, "_library", library)


@pytest.mark.parametrize("multiprocessing", [False, True], ids=["in_process", "own_process"])
def test_longer_than_the_cache(make_engine, multiprocessing):
    engine = make_engine(multiprocessing, num_blocks=4)  # 64 tokens
    with pytest.raises(ValueError, match=r"prompt has 100 tokens.*KV cache.*at most 6\d .*context length 256"):
        engine.add_request(new_id(), [5] * 100, params())
    limit = engine.client.info.max_prompt_len
    assert len(run_one(engine, [5] * limit, max_tokens=1).outputs[0].token_ids) == 1


async def test_asynchronously(async_engine):
    for prompt in ([5] * 256, [5] * 5000, " a" * 5000):
        with pytest.raises(ValueError, match="maximum context length is 256"):
            await async_engine.add_request(new_id(), prompt, params())


def test_truncation_makes_it_fit(engine):
    output = run_one(engine, list(range(600)), truncate_prompt_tokens=10)
    assert output.prompt_token_ids == list(range(590, 600))
    output = run_one(engine, list(range(600)), truncate_prompt_tokens=-1)
    assert output.prompt_token_ids == list(range(345, 600))


def test_max_tokens_none_runs_to_the_end_of_the_context(engine):
    assert len(run_one(engine, [5] * 200, max_tokens=None).outputs[0].token_ids) == 56
