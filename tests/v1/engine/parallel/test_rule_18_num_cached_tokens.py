"""Rule 18: `num_cached_tokens` is what was in the cache before the request came."""

import pytest

from tests.v1.engine.helpers import KINDS, drain, new_id, params, run


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_cold_also_for_siblings(engine, kind):
    outputs = run(engine, list(range(6000, 6040)), n=5, kind=kind)
    assert {output.num_cached_tokens for output in outputs} == {0}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize(("length", "cached"), [(40, 32), (33, 32), (15, 0)])
def test_hot(engine, kind, length, cached):
    prompt = list(range(6100, 6100 + length))
    run(engine, prompt)
    outputs = run(engine, prompt, n=3, kind=kind)
    assert {output.num_cached_tokens for output in outputs} == {cached}


def test_a_common_beginning(engine):
    run(engine, list(range(6200, 6240)))
    (output,) = run(engine, [*range(6200, 6220), *range(7000, 7030)])
    assert output.num_cached_tokens == 16


def test_off_without_caching(make_engine):
    engine = make_engine(enable_prefix_caching=False)
    for _ in range(2):
        (output,) = run(engine, list(range(6300, 6340)), n=2)
        assert output.num_cached_tokens == 0


def test_a_stranger_counts_the_blocks_complete_when_it_came(make_engine):
    engine = make_engine(max_num_batched_tokens=40)
    prompt = list(range(6400, 6500))
    first, second = new_id(), new_id()
    engine.add_request(first, prompt, params())
    engine.step()
    engine.add_request(second, prompt, params())
    outputs = drain(engine)
    assert outputs[first][0].num_cached_tokens == 0
    assert outputs[second][0].num_cached_tokens == 32
