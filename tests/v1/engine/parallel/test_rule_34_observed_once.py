"""Rule 34: n and the largest number of tokens of a child are observed once per request, when its last child ends."""

import pytest

from tests.v1.engine.fakes import EOS
from tests.v1.engine.helpers import KINDS, PROMPT, drain, new_id, params, run, until_idle

N, LARGEST = "vllm:request_params_n", "vllm:request_max_num_generation_tokens"


def observed(engine, name):
    histogram = engine.metrics.histograms[name]
    return sum(histogram.counts), histogram.sum


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("n", [1, 5])
def test_once_per_request(engine, kind, n):
    before = observed(engine, N), observed(engine, LARGEST)
    fields = {"allowed_token_ids": [EOS, *range(100, 106)], "ignore_eos": False, "max_tokens": 30, "seed": 3}
    request_id = new_id()
    engine.add_request(request_id, PROMPT, params(n=n, kind=kind, **fields))
    lengths = {}
    while engine.has_unfinished_requests():
        assert observed(engine, N) == before[0]
        for output in engine.step():
            for completion in output.outputs:
                lengths.setdefault(completion.index, 0)
                lengths[completion.index] += len(completion.token_ids)
                if kind is KINDS[0]:
                    lengths[completion.index] = len(completion.token_ids)
    assert observed(engine, N) == (before[0][0] + 1, before[0][1] + n)
    assert observed(engine, LARGEST) == (before[1][0] + 1, before[1][1] + max(lengths.values()))


def test_also_by_abort(slow_engine):
    before = observed(slow_engine, N), observed(slow_engine, LARGEST)
    aborts = slow_engine.metrics.success["abort"]
    request_id = new_id()
    slow_engine.add_request(request_id, PROMPT, params(n=4, max_tokens=100))
    slow_engine.abort_request(request_id)
    drain(slow_engine)
    assert observed(slow_engine, N) == (before[0][0] + 1, before[0][1] + 4)
    assert observed(slow_engine, LARGEST)[0] == before[1][0] + 1
    assert slow_engine.metrics.success["abort"] == aborts + 4


def test_best_of_counts_what_the_user_asked_for(engine):
    before = observed(engine, N)
    run(engine, n=2, best_of=6)
    assert observed(engine, N) == (before[0] + 1, before[1] + 2)


async def test_asynchronously(async_engine):
    before = observed(async_engine, N)
    request_id = new_id()
    generator = async_engine.generate(PROMPT, params(n=3, max_tokens=200, kind=KINDS[1]), request_id)
    await generator.__anext__()
    await generator.aclose()
    await until_idle(async_engine)
    assert observed(async_engine, N) == (before[0] + 1, before[1] + 3)


def test_in_get_metrics(engine):
    run(engine, n=3)
    histograms = {metric.name: metric for metric in engine.get_metrics() if hasattr(metric, "buckets")}
    assert histograms[N].count == observed(engine, N)[0]
    assert histograms[N].buckets["+Inf"] == histograms[N].count
    assert list(histograms[N].buckets.values()) == sorted(histograms[N].buckets.values())
