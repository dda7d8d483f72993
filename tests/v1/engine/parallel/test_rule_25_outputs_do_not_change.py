"""Rule 25: `token_ids` is a list, and what was handed out never changes."""

import copy

import pytest

from tests.v1.engine.fakes import scripted
from tests.v1.engine.helpers import KINDS, PROMPT, new_id, params


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("fields", [{}, {"logprobs": 1}, {"stop": ["STOP"]}, {"logprobs": 1, "flat_logprobs": True}],
                         ids=str)  # fmt: skip
def test_handed_out_is_final(engine, kind, fields):
    engine.add_request(new_id(), PROMPT, params(n=3, kind=kind, seed=scripted(0), max_tokens=12, **fields))
    handed, copies = [], []
    while engine.has_unfinished_requests():
        for output in engine.step():
            for completion in output.outputs:
                assert type(completion.token_ids) is list
                assert all(type(token) is int for token in completion.token_ids)
            handed.append(output)
            copies.append(copy.deepcopy(output))
    assert handed == copies


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_client_may_write_into_its_outputs(engine, kind):
    """What a client does to a list it got does not reach the engine."""
    from tests.v1.engine.helpers import join, run

    expected = join(run(engine, n=2, kind=kind, seed=3, logprobs=0), kind)
    request_id = new_id()
    engine.add_request(request_id, PROMPT, params(n=2, kind=kind, seed=3, logprobs=0))
    seen = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            seen.append(copy.deepcopy(output))
            for completion in output.outputs:
                completion.token_ids.append(-1)
                completion.logprobs.clear()
                completion.text = ""
            output.outputs.clear()
    assert join(seen, kind) == expected


def test_the_callers_prompt_is_not_kept(engine):
    prompt = list(PROMPT)
    engine.add_request(new_id(), prompt, params())
    prompt.clear()
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert outputs[0].prompt_token_ids == PROMPT


def test_changing_params_later_changes_nothing(engine):
    """A caller may reuse one object for many requests, with other values each time."""
    own = params(max_tokens=3)
    ids = [new_id() for _ in range(4)]
    for length, request_id in enumerate(ids, start=1):
        own.max_tokens, own.n = length, length
        engine.add_request(request_id, PROMPT, own)
    own.max_tokens, own.n = 99, 99
    lengths = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            lengths[output.request_id] = [len(completion.token_ids) for completion in output.outputs]
    assert [lengths[request_id] for request_id in ids] == [[1], [2] * 2, [3] * 3, [4] * 4]
