"""Rule 28: nothing ends a child before `min_tokens`; text from before is never searched."""

import pytest

from tests.v1.engine.fakes import EOS, bundled_tokenizer, scripted
from tests.v1.engine.helpers import KINDS, PROMPT, join, new_id, params, run


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("min_tokens", [1, 3, 7])
def test_end_of_sequence(engine, kind, min_tokens):
    fields = {"allowed_token_ids": [EOS, 100, 101], "ignore_eos": False, "max_tokens": 40, "seed": 2}
    for completion in join(run(engine, n=6, kind=kind, min_tokens=min_tokens, **fields), kind).values():
        assert len(completion.token_ids) >= min_tokens
        assert EOS not in completion.token_ids[: min_tokens - 1]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_stop_token(engine, kind):
    tokens = bundled_tokenizer().encode("One two three STOP four five six seven")
    fields = {"stop_token_ids": [tokens[1], tokens[4]], "seed": scripted(0), "min_tokens": 4, "max_tokens": 20}
    completion = join(run(engine, kind=kind, **fields), kind)[0]
    assert len(completion.token_ids) >= 4
    assert completion.finish_reason == "stop"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_stop_string(engine, kind):
    """The first occurrence lies before token m and is passed over; the script comes again."""
    script = bundled_tokenizer().encode("One two three STOP four five six seven")
    fields = {"seed": scripted(0), "stop": "two", "max_tokens": 40}
    early = join(run(engine, kind=kind, **fields), kind)[0]
    assert early.text == "One "
    late = join(run(engine, kind=kind, min_tokens=4, **fields), kind)[0]
    assert late.finish_reason == "stop"
    assert len(script) < len(late.token_ids)
    assert late.text.endswith("sevenOne ")


def test_more_than_max_tokens_is_refused(engine):
    own = params(max_tokens=3)
    own.min_tokens = 4
    with pytest.raises(ValueError, match="min_tokens must be at most max_tokens"):
        engine.add_request(new_id(), PROMPT, own)


@pytest.mark.slow
def test_on_the_real_model(real_llm):
    own = params(n=4, temperature=2.0, min_tokens=8, max_tokens=12, ignore_eos=False, allowed_token_ids=[2, 260, 284])
    (output,) = real_llm.generate("Hello", own, use_tqdm=False)
    for completion in output.outputs:
        assert len(completion.token_ids) >= 8
        assert 2 not in completion.token_ids[:7]
