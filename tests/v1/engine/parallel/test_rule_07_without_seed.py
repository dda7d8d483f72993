"""Rule 7: without a seed children and requests differ; the engine's own seed makes a whole run repeatable."""

from tests.v1.engine.helpers import PROMPT, drain, new_id, params, run_one


def texts(output):
    return [tuple(completion.token_ids) for completion in output.outputs]


def test_children_and_identical_requests_differ(engine):
    first, second = texts(run_one(engine, n=4)), texts(run_one(engine, n=4))
    assert len(set(first + second)) == 8


def test_concurrent_identical_requests_differ(engine):
    ids = [new_id() for _ in range(4)]
    for request_id in ids:
        engine.add_request(request_id, PROMPT, params(n=2))
    outputs = drain(engine)
    assert len({text for request_id in ids for text in texts(outputs[request_id][0])}) == 8


def test_runs_differ_without_an_engine_seed(make_engine):
    assert texts(run_one(make_engine())) != texts(run_one(make_engine()))


def test_an_engine_seed_repeats_a_run_by_order_of_submission(make_engine):
    runs = []
    for _ in range(2):
        engine = make_engine(seed=77)
        runs.append([texts(run_one(engine, n=3)), texts(run_one(engine, n=3)), texts(run_one(engine))])
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[0][1]  # equal requests differ all the same
    assert texts(run_one(make_engine(seed=78), n=3)) != runs[0][0]


def test_the_default_engine_seed_is_none():
    from vllm.engine.arg_utils import EngineArgs

    assert EngineArgs().seed is None
