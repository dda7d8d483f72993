"""Rule 35, where the engine has its part: the prompt counts once, completion tokens are the sum over the children."""

import pytest

from tests.v1.engine.helpers import KINDS, counter, join, run


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("n", [1, 6])
def test_counters(engine, kind, n):
    prompts = counter(engine, "vllm:prompt_tokens_total")
    generated = counter(engine, "vllm:generation_tokens_total")
    prompt = list(range(8000, 8033))
    outputs = run(engine, prompt, n=n, kind=kind, max_tokens=7)
    assert counter(engine, "vllm:prompt_tokens_total") - prompts == 33
    assert counter(engine, "vllm:generation_tokens_total") - generated == 7 * n
    assert sum(len(c.token_ids) for c in join(outputs, kind).values()) == 7 * n
    assert all(output.prompt_token_ids == prompt for output in outputs)


def test_the_progress_bar_counts_so(engine):
    from vllm.entrypoints.llm import LLM

    class Bar:
        def __init__(self, total, desc, dynamic_ncols, postfix):
            self.total, self.postfix, self.done = total, postfix, 0
            bars.append(self)

        def set_postfix_str(self, text, refresh):
            self.postfix = text

        def update(self, count):
            self.done += count

        def close(self):
            self.closed = True

    bars = []
    LLM.from_engine(engine).generate([[1, 2, 3], [4, 5, 6, 7]], run_params(), use_tqdm=Bar)
    (bar,) = bars
    assert bar.total == bar.done == 2
    assert bar.closed
    assert "completions: 8/8" in bar.postfix
    for word in ("in: ", "out: "):
        assert float(bar.postfix.split(word)[1].split(" ")[0]) > 0


def run_params():
    from tests.v1.engine.helpers import params

    return params(n=4, max_tokens=3)
