"""Rule 27: a stop token's text is absent (unless asked for), its id stays; stop_reason is the id, None for EOS."""

import pytest

from tests.v1.engine.fakes import EOS, bundled_tokenizer, scripted
from tests.v1.engine.helpers import KINDS, join, run


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("n", [1, 3])
def test_stop_token(engine, kind, n):
    tokens = bundled_tokenizer().encode("One two three STOP")
    completion = join(run(engine, n=n, kind=kind, seed=scripted(0), stop_token_ids=[tokens[2]]), kind)[0]
    assert completion.token_ids == tokens[:3]
    assert completion.text == bundled_tokenizer().decode(tokens[:2])
    assert (completion.finish_reason, completion.stop_reason) == ("stop", tokens[2])


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_kept_if_asked_for(engine, kind):
    tokens = bundled_tokenizer().encode("One two three STOP")
    fields = {"stop_token_ids": [tokens[2]], "include_stop_str_in_output": True, "seed": scripted(0)}
    completion = join(run(engine, kind=kind, **fields), kind)[0]
    assert completion.text == bundled_tokenizer().decode(tokens[:3])


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("skip", [True, False])
def test_end_of_sequence(engine, kind, skip):
    fields = {"logit_bias": {EOS: 100.0}, "ignore_eos": False, "skip_special_tokens": skip}
    completion = join(run(engine, kind=kind, **fields), kind)[0]
    assert completion.token_ids == [EOS]
    assert completion.text == ""
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_end_of_sequence_ignored(engine, kind):
    completion = join(run(engine, kind=kind, logit_bias={EOS: 100.0}, max_tokens=4), kind)[0]
    assert completion.token_ids == [EOS] * 4
    assert completion.finish_reason == "length"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_stop_string_in_the_same_step_as_the_length(engine, kind):
    """The stop string is the reason."""
    tokens = bundled_tokenizer().encode("One two three STOP")
    fields = {"seed": scripted(0), "stop": "STOP", "max_tokens": len(tokens)}
    completion = join(run(engine, kind=kind, **fields), kind)[0]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "STOP")


@pytest.mark.parametrize("bad", [[-1], [49152], ["1"], [True], 5])
def test_bad_ids_are_refused(engine, bad):
    with pytest.raises(ValueError, match="stop_token_ids"):
        run(engine, stop_token_ids=bad)
