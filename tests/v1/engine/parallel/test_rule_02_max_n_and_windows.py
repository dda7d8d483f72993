"""Rule 2: `max_n` refuses before any child exists; offline any number of prompts x n is taken in windows."""

import asyncio
import itertools
import math

import pytest

from tests.v1.engine.helpers import PROMPT, new_id, params, stream
from vllm.entrypoints.llm import LLM
from vllm.v1.engine import async_llm, batch


@pytest.mark.parametrize("field", ["n", "best_of"])
def test_more_than_max_n_is_refused_before_any_child_exists(make_engine, field):
    engine = make_engine(max_n=8)
    with pytest.raises(ValueError, match=rf"{field} must be at most 8 \(max_n") as caught:
        engine.add_request(new_id(), PROMPT, params(**{field: 9}))
    assert caught.value.parameter == field
    assert engine.output_processor.num_children == 0
    engine.add_request(new_id(), PROMPT, params(n=8))
    assert engine.output_processor.num_children == 8


def test_the_default_is_16384(engine):
    with pytest.raises(ValueError, match="16384"):
        engine.add_request(new_id(), PROMPT, params(n=16385))


def test_any_number_of_prompts_goes_through_windows(make_engine, monkeypatch):
    monkeypatch.setattr(batch, "MIN_WINDOW", 20)
    monkeypatch.setattr(batch, "WINDOW_PER_SEQUENCE", 1)
    engine = make_engine(max_num_seqs=8)
    seen = []
    process = engine.output_processor.process

    def watched(message):
        seen.append((engine.output_processor.num_children, engine.output_processor.num_requests))
        return process(message)

    monkeypatch.setattr(engine.output_processor, "process", watched)
    counts = [3, 1, 7, 60, 2, 1, 5, 20, 21, 4] * 3
    outputs = LLM.from_engine(engine).generate(
        [[100 + i] for i in range(len(counts))], [params(n=n, max_tokens=2) for n in counts], use_tqdm=False
    )
    assert [len(output.outputs) for output in outputs] == counts
    assert [output.prompt_token_ids for output in outputs] == [[100 + i] for i in range(len(counts))]
    # Never more than the window, but for one that is larger by itself, which is alone.
    assert all(children <= 20 or requests == 1 for children, requests in seen)
    assert max(seen) == (60, 1)
    assert any(requests > 2 for _, requests in seen)


def test_equal_prompts_meet_in_one_window(make_engine, monkeypatch):
    monkeypatch.setattr(batch, "MIN_WINDOW", 8)
    monkeypatch.setattr(batch, "WINDOW_PER_SEQUENCE", 1)
    engine = make_engine(max_num_seqs=8)
    prompts = [[100 + kind] * 20 for _ in range(8) for kind in range(4)]  # equal ones are far from each other
    LLM.from_engine(engine).generate(prompts, params(max_tokens=2), use_tqdm=False)
    assert engine.metrics.scheduler.prompt_tokens_computed == 4 * 20


async def test_many_children_do_not_keep_the_event_loop(make_async_engine):
    """A message of many children is processed in slices, and others have their turn between them."""
    engine = make_async_engine(max_num_seqs=2000, max_num_batched_tokens=4000)
    turns_between = []
    process_next = engine._process_next
    turns = [0]

    def watched():
        turns_between.append(turns[0])
        process_next()

    engine._process_next = watched

    async def tick():
        while True:
            turns[0] += 1
            await asyncio.sleep(0)

    ticking = asyncio.create_task(tick())
    (output,) = await stream(engine, n=2000, max_tokens=1)
    ticking.cancel()
    assert len(output.outputs) == 2000
    slices = math.ceil(2000 / async_llm.SLICE)
    assert len(turns_between) >= slices
    last = turns_between[-slices:]
    assert all(later > earlier for earlier, later in itertools.pairwise(last))
