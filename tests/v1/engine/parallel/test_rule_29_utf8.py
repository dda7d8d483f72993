"""Rule 29: text is right at character boundaries, whatever the kind; the prompt's text is never in the output."""

import pytest

from tests.v1.engine.fakes import SCRIPT_TEXTS, bundled_tokenizer, scripted
from tests.v1.engine.helpers import KINDS, join, run
from vllm.sampling_params import RequestOutputKind

SCRIPT = SCRIPT_TEXTS[4]


@pytest.mark.parametrize("length", range(1, 31))
def test_every_cut_agrees(engine, length):
    texts = [join(run(engine, kind=kind, seed=scripted(4), max_tokens=length), kind)[0].text for kind in KINDS]
    assert texts[0] == texts[1] == texts[2]
    tokens = bundled_tokenizer().encode(SCRIPT)
    if length < len(tokens):
        text = texts[0]
        assert text.count("\ufffd") <= 1
        assert SCRIPT.startswith(text.rstrip("\ufffd"))


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE], ids=lambda kind: kind.name)
def test_no_replacement_character_on_the_way(engine, kind):
    outputs = run(engine, kind=kind, seed=scripted(4), max_tokens=len(bundled_tokenizer().encode(SCRIPT)))
    assert "\ufffd" not in "".join(output.outputs[0].text for output in outputs)
    assert join(outputs, kind)[0].text == SCRIPT


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_prompt_that_ends_in_a_character(engine, kind):
    """The prompt ends with the first bytes of an emoji, the output begins with the rest of it."""
    tokens = bundled_tokenizer().encode("🙃")
    assert len(tokens) > 1
    completion = join(
        run(
            engine,
            [*bundled_tokenizer().encode("Hi "), *tokens[:-1]],
            kind=kind,
            logit_bias={tokens[-1]: 100.0},
            max_tokens=1,
        ),
        kind,
    )[0]
    assert completion.token_ids == [tokens[-1]]
    assert "🙃" not in completion.text
    assert "Hi" not in completion.text
    assert "\ufffd" not in completion.text
