"""Rule 20: when everything has ended, all blocks are free and every table is empty; a check has the numbers."""

import pytest

from tests.v1.engine.helpers import PROMPT, drain, new_id, params, run
from vllm.exceptions import IntegrityError


def test_after_ends_of_every_kind(engine):
    for n in (1, 3, 40):
        run(engine, n=n)
        engine.check_integrity()
    ids = [new_id() for _ in range(6)]
    for request_id in ids:
        engine.add_request(request_id, PROMPT, params(n=3, max_tokens=50))
    engine.step()
    engine.abort_request(ids[::2])
    engine.step()
    engine.abort_request(ids)
    drain(engine)
    engine.check_integrity()
    assert engine.metrics.scheduler.kv_cache_usage == 0.0
    assert (engine.metrics.scheduler.num_running, engine.metrics.scheduler.num_waiting) == (0, 0)


def test_the_check_raises_with_the_numbers(engine):
    engine.add_request(new_id(), PROMPT, params(n=3))
    with pytest.raises(IntegrityError, match="1 requests, 3 children"):
        engine.check_integrity()
    drain(engine)


def test_the_front_end_keeps_nothing(engine):
    import gc

    from vllm.v1.engine.children import Child
    from vllm.v1.engine.parallel_sampling import ParentRequest

    run(engine, n=20, logprobs=1)
    gc.collect()
    assert not [thing for thing in gc.get_objects() if type(thing) in (Child, ParentRequest)]
