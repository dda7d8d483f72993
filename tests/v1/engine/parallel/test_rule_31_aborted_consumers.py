"""Rule 31: a waiting consumer gets a last output with everything there is; an exception in `generate` leaves an engine
that works."""

import asyncio
import signal
import threading

import pytest

from tests.v1.engine.fakes import EOS
from tests.v1.engine.helpers import KINDS, PROMPT, drain, join, new_id, params, run, run_one, stream
from vllm.entrypoints.llm import LLM
from vllm.sampling_params import RequestOutputKind

RANDOM_ENDS = {"allowed_token_ids": [EOS, *range(100, 104)], "ignore_eos": False, "max_tokens": 120, "seed": 5}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("fields", [{}, {"logprobs": 1}, {"stop": ["zzz"]}], ids=str)
def test_ended_children_keep_their_reason_and_the_others_what_they_have(make_engine, kind, fields):
    engine = make_engine()
    everything = join(run(engine, n=6, kind=kind, **RANDOM_ENDS, **fields), kind)
    lengths = sorted(len(c.token_ids) for c in everything.values())
    assert lengths[2] < lengths[3]
    request_id = new_id()
    engine.add_request(request_id, PROMPT, params(n=6, kind=kind, **RANDOM_ENDS, **fields))
    outputs = []
    for _ in range(lengths[2]):
        outputs += engine.step()
    engine.abort_request(request_id)
    outputs += drain(engine).get(request_id, [])
    ended = join(outputs, kind)
    assert outputs[-1].finished
    for index, reference in everything.items():
        completion = ended[index]
        if len(reference.token_ids) <= lengths[2]:
            assert completion == reference
        else:
            assert completion.finish_reason == "abort"
            assert completion.stop_reason is None
            assert completion.token_ids == reference.token_ids[: lengths[2]]
            assert reference.text.startswith(completion.text.rstrip("\ufffd"))
            if "logprobs" in fields:
                assert completion.logprobs == reference.logprobs[: lengths[2]]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
async def test_a_waiting_consumer_is_woken(async_engine, kind):
    request_id = new_id()
    collector = await async_engine.add_request(request_id, PROMPT, params(n=3, max_tokens=200, kind=kind, seed=1))
    outputs = []

    async def consume():
        while not (outputs and outputs[-1].finished):
            outputs.append(await collector.get())

    consumer = asyncio.create_task(consume())
    await asyncio.sleep(0.3)
    await async_engine.abort(request_id)
    await asyncio.wait_for(consumer, 10)
    ended = join(outputs, kind)
    assert {c.finish_reason for c in ended.values()} == {"abort"}
    counts = {len(c.token_ids) for c in ended.values()}
    assert len(counts) == 1
    assert counts.pop() > 1
    full = join(await stream(async_engine, n=3, max_tokens=200, seed=1), RequestOutputKind.FINAL_ONLY)
    for index, completion in ended.items():
        assert completion.token_ids == full[index].token_ids[: len(completion.token_ids)]


class BoomError(Exception):
    pass


@pytest.mark.parametrize("error", [BoomError, KeyboardInterrupt, SystemExit])
def test_an_exception_inside_generate(engine, error):
    """Here the progress bar raises, in the middle of things."""

    class Bar:
        postfix = ""
        updates = 0

        def __init__(self, **_):
            pass

        def update(self, count):
            Bar.updates += 1
            raise error("in the progress bar")

        def close(self):
            pass

    with pytest.raises(error):
        LLM.from_engine(engine).generate([PROMPT] * 20, params(n=4, max_tokens=50), use_tqdm=Bar)
    assert Bar.updates == 1
    engine.check_integrity()
    assert len(run_one(engine, n=2).outputs) == 2


def test_ctrl_c_inside_generate(engine):
    """A real signal. No step is cut short, everything is freed, and the engine goes on."""
    assert threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGINT)
    started = threading.Event()

    def interrupt():
        started.wait(10)
        signal.raise_signal(signal.SIGINT)

    class Bar:
        postfix = ""

        def __init__(self, **_):
            started.set()

        def update(self, count):
            pass

        def close(self):
            pass

    threading.Thread(target=interrupt).start()

    def work():
        while True:  # until the signal comes
            LLM.from_engine(engine).generate([PROMPT] * 50, params(n=8, max_tokens=100), use_tqdm=Bar)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert signal.getsignal(signal.SIGINT) is handler
    engine.check_integrity()
    assert len(run_one(engine, n=2).outputs) == 2


def test_generate_in_another_thread_touches_no_signals(engine):
    results = []

    def work():
        results.append(LLM.from_engine(engine).generate([PROMPT], params(n=2), use_tqdm=False))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(results[0][0].outputs) == 2
