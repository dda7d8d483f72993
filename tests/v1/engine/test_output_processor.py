"""The one loop: slices, unknown handles, what goes where."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.v1.engine.fakes import EOS, bundled_tokenizer
from tests.v1.engine.helpers import KINDS, PROMPT, join, params
from vllm.exceptions import DuplicateRequestError, EngineDeadError, EngineGenerateError, IntegrityError
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.output_processor import OutputProcessor, slices
from vllm.v1.engine.parallel_sampling import Submission
from vllm.v1.messages import HANDLE_CLIENT_SHIFT, ChildTimes, EngineCoreOutputs, EngineCoreRequest, LogprobColumnsMsg

FINAL = RequestOutputKind.FINAL_ONLY


class Sink:
    def __init__(self):
        self.outputs, self.errors = [], []

    def put(self, output):
        self.outputs.append(output)

    def fail(self, error, output=None):
        self.errors.append((error, output))


def add(processor, request_id="x", sink=None, **fields):
    own = params(**fields)
    request = EngineCoreRequest([], np.array(PROMPT, np.int32), own, 0.0, True, [EOS])
    return processor.add(Submission(request_id, None, own, own.output_kind, request), sink)


def message(rows, **fields):
    """rows: (handle, tokens, reason)"""
    tokens = [token for _, own, _ in rows for token in own]
    ended = sum(reason != 0 for _, _, reason in rows)
    times = ChildTimes(
        *(np.arange(1, ended + 1, dtype=float) + base for base in (0, 100, 200)), np.arange(ended, dtype=np.int32)
    )
    return EngineCoreOutputs(
        np.array([handle for handle, _, _ in rows], np.int64),
        np.cumsum([0, *(len(own) for _, own, _ in rows)], dtype=np.int32),
        np.array(tokens, np.int32),
        np.array([reason for _, _, reason in rows], np.uint8),
        np.full(len(rows), -1),
        np.zeros(len(rows), np.int32),
        finished_times=times,
        timestamp=1000.0,
        **fields,
    )  # fmt: skip


def logprobs_for(rows):
    tokens = [token for _, own, _ in rows for token in own]
    count = len(tokens)
    return LogprobColumnsMsg(
        np.arange(count + 1, dtype=np.int32), np.array(tokens, np.int32), -np.arange(count, dtype=np.float32),
        np.ones(count, np.int32),
    )  # fmt: skip


def test_handles_are_fresh_and_carry_the_client():
    processor = OutputProcessor(None, client_index=3)
    first, second = add(processor, "a", n=2), add(processor, "b", n=3)
    handles = first.handles + second.handles
    assert len(set(handles)) == 5
    assert all(handle >> HANDLE_CLIENT_SHIFT == 3 for handle in handles)


def test_unknown_handles_are_passed_over():
    processor = OutputProcessor(None)
    request = add(processor, n=2)
    rows = [(999, [1, 2], 2), (request.handles[0], [5], 2), (998, [], 3), (request.handles[1], [6, 7], 1)]
    (output,) = processor.process(message(rows)).outputs
    assert [completion.token_ids for completion in output.outputs] == [[5], [6, 7]]
    # rows of the times are those of all that ended in the message
    assert output.metrics.scheduled_ts == 2.0
    assert output.metrics.last_token_ts == 204.0
    assert output.metrics.num_preemptions == 1 + 3
    processor.check_idle()


def test_sinks():
    processor = OutputProcessor(None)
    sink = Sink()
    with_sink, without = add(processor, "a", sink), add(processor, "b")
    rows = [(with_sink.handles[0], [1], 2), (without.handles[0], [2], 2)]
    assert [output.request_id for output in processor.process(message(rows)).outputs] == ["b"]
    assert [output.request_id for output in sink.outputs] == ["a"]


def test_a_failed_request_fails_its_sink():
    processor = OutputProcessor(None)
    sink = Sink()
    request = add(processor, "a", sink, n=2, kind=RequestOutputKind.DELTA)
    rows = [(request.handles[0], [], 4), (request.handles[1], [1], 3)]
    processor.process(message(rows, errors={request.handles[0]: "bad luck"}))
    ((error, output),) = sink.errors
    assert not sink.outputs
    assert type(error) is EngineGenerateError
    assert "bad luck" in str(error)
    assert {c.finish_reason: c.stop_reason for c in output.outputs} == {"error": "bad luck", "abort": None}
    processor.check_idle()


def test_the_engines_death():
    processor = OutputProcessor(None)
    sinks = [Sink(), Sink()]
    for index, sink in enumerate(sinks):
        add(processor, str(index), sink, n=3)
    add(processor, "aborted", Sink())
    processor.abort(["aborted"])
    processor.fail_all(EngineDeadError("gone"))
    assert [len(sink.errors) for sink in sinks] == [1, 1]
    processor.check_idle()


def test_withdrawing():
    processor = OutputProcessor(None)
    request = add(processor, n=3)
    with pytest.raises(DuplicateRequestError):
        add(processor)
    with pytest.raises(IntegrityError, match="1 requests, 3 children, 0 open"):
        processor.check_idle()
    processor.withdraw(request)
    processor.check_idle()


def test_first_tokens_are_timed_once_per_request():
    processor = OutputProcessor(None)
    first, second = add(processor, "a", n=2), add(processor, "b")
    rows = []
    stats = processor.process(message(rows, first_token_handles=np.array([*first.handles, 555]), new_tokens=2)).stats
    assert len(stats.time_to_first_tokens) == 1
    assert stats.num_prompt_tokens == len(PROMPT)
    assert stats.num_generation_tokens == 2
    stats = processor.process(message(rows, first_token_handles=np.array([first.handles[1], *second.handles]))).stats
    assert len(stats.time_to_first_tokens) == 1


def test_several_tokens_per_step():
    """As speculation gives them: one completion with all of them, whatever the kind."""
    tokens = bundled_tokenizer().encode("one two three four five six")
    for kind in KINDS:
        processor = OutputProcessor(bundled_tokenizer())
        request = add(processor, kind=kind, logprobs=0)
        rows = [[(request.handles[0], tokens[:2], 0)], [(request.handles[0], tokens[2:], 2)]]
        outputs = []
        if kind is FINAL:
            rows = [[(request.handles[0], tokens, 2)]]
        for own in rows:
            outputs += processor.process(message(own, logprobs=logprobs_for(own))).outputs
        assert len(outputs) == len(rows)
        completion = join(outputs, kind)[0]
        assert completion.token_ids == tokens
        assert completion.text == "one two three four five six"
        assert len(completion.logprobs) == len(tokens)


@given(
    n=st.integers(1, 12),
    size=st.integers(1, 13),
    kind=st.sampled_from(KINDS),
    steps=st.integers(1, 4),
    stop=st.sampled_from([None, "two"]),
    finish_after=st.sampled_from([None, 1, 2]),
    data=st.data(),
)
def test_slices_say_the_same(n, size, kind, steps, stop, finish_after, data):
    """A message in slices of any size leads to the same results as the whole one."""
    script = bundled_tokenizer().encode("one two three four five six seven")
    ends = [data.draw(st.integers(0, steps - 1)) for _ in range(n)]
    cuts = [data.draw(st.integers(0, 6)) for _ in range(n)]
    results = []
    for sliced in (False, True):
        processor = OutputProcessor(bundled_tokenizer())
        finish = None if finish_after is None else min(finish_after, n)
        request = add(processor, n=n, kind=kind, logprobs=0, stop=stop, finish_after=finish)
        outputs, stops, aborts = [], [], []
        for step in range(steps):
            final = kind is FINAL and stop is None
            rows = [
                (handle, script[cut : cut + step + 1] if final else [script[(cut + step) % len(script)]],
                 2 if ends[index] == step else 0)
                for index, (handle, cut) in enumerate(zip(request.handles, cuts, strict=True))
                if (ends[index] == step if final else ends[index] >= step) and handle not in stops
            ]  # fmt: skip
            if final and finish is not None and rows:
                continue  # the core's own count is not what this test is about
            whole = message(rows, logprobs=logprobs_for(rows), new_tokens=len(rows))
            for piece, last in slices(whole, size if sliced else 1000):
                processed = processor.process(piece, last)
                outputs += processed.outputs
                stops += processed.stops
                aborts += processed.aborts
        results.append((join(outputs, kind), stops, aborts, sum(output.finished for output in outputs)))
    assert results[0] == results[1]


@given(st.integers(0, 20), st.integers(1, 21))
def test_slices_cover_everything_once(count, size):
    rows = [(index + 1, list(range(index % 4)), index % 3) for index in range(count)]
    whole = message(rows, logprobs=logprobs_for(rows), new_tokens=count, first_token_handles=np.array([1, 2]))
    pieces = [piece for piece, _ in slices(whole, size)]
    assert [last for _, last in slices(whole, size)] == [False] * (len(pieces) - 1) + [True]
    for name in ("handles", "token_ids", "finish_reasons"):
        parts = [getattr(piece, name) for piece in pieces]
        assert np.concatenate(parts).tolist() == getattr(whole, name).tolist()
    for name in ("scheduled", "num_preemptions"):
        parts = [getattr(piece.finished_times, name) for piece in pieces]
        assert np.concatenate(parts).tolist() == getattr(whole.finished_times, name).tolist()
    assert np.concatenate([piece.logprobs.token_ids for piece in pieces]).tolist() == whole.token_ids.tolist()
    assert sum(piece.new_tokens for piece in pieces) == count
    assert sum(piece.first_token_handles is not None for piece in pieces) == 1
    for piece in pieces:
        assert piece.offsets[0] == 0
        assert piece.offsets[-1] == len(piece.token_ids) == len(piece.logprobs.ranks)
