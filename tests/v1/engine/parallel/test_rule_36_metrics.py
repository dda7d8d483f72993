"""Rule 36: a parent's metrics: earliest arrival, schedule and first token, latest last token, sums."""

import time

import pytest

from tests.v1.engine.helpers import KINDS, run, run_one


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("n", [1, 4])
def test_on_the_last_output(engine, kind, n):
    start, wall = time.monotonic(), time.time()
    outputs = run(engine, n=n, kind=kind, max_tokens=5)
    end = time.monotonic()
    metrics = outputs[-1].metrics
    assert all(output.metrics is None for output in outputs[:-1])
    assert metrics.num_generation_tokens == 5 * n
    assert metrics.num_preemptions == 0
    assert start <= metrics.queued_ts <= metrics.scheduled_ts <= metrics.first_token_ts <= metrics.last_token_ts <= end
    assert metrics.first_token_latency == pytest.approx(metrics.first_token_ts - metrics.queued_ts)
    assert wall <= metrics.arrival_time <= wall + end - start + 1


def test_children_that_run_one_after_the_other(make_engine):
    """The first token is the first child's; the last one's is the last child's."""
    engine = make_engine(max_num_seqs=1, distributed_executor_backend="tests.v1.engine.fakes:SlowExecutor")
    metrics = run_one(engine, n=3, max_tokens=4).metrics
    assert metrics.last_token_ts - metrics.first_token_ts >= 9 * 0.005
    assert metrics.num_generation_tokens == 12


def test_preemptions_are_summed(make_engine):
    engine = make_engine(num_blocks=8)
    metrics = run_one(engine, n=6, max_tokens=60).metrics
    assert metrics.num_preemptions == engine.metrics.scheduler.num_preemptions > 0


def test_stop_strings(engine):
    from tests.v1.engine.fakes import scripted

    metrics = run_one(engine, n=2, seed=scripted(2), stop=["STOP", "never"], max_tokens=20).metrics
    assert metrics.num_generation_tokens >= 2
    assert 0 < metrics.first_token_ts <= metrics.last_token_ts
