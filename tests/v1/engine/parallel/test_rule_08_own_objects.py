"""Rule 8: everything of a child that changes is its own object."""

from typing import ClassVar

import numpy as np
import pytest

from tests.v1.engine.helpers import KINDS, PROMPT, join, new_id, params, run
from vllm.sampling_params import RequestOutputKind


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_states_of_the_output_layer(make_engine, kind):
    engine = make_engine()
    engine.add_request(new_id(), PROMPT, params(n=5, kind=kind, stop=["zzz"], logprobs=1))
    children = list(engine.output_processor._children.values())
    engine.step()
    engine.step()
    assert len({id(child) for child in children}) == 5
    assert len({id(child.detokenizer) for child in children}) == 5
    assert all(child.detokenizer is not None for child in children)
    for name in ("token_ids", "logprobs"):
        values = [getattr(child, name) for child in children if hasattr(child, name)]
        assert len({id(value) for value in values}) == len(values)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_outputs_share_no_lists(engine, kind):
    outputs = run(engine, n=4, kind=kind, logprobs=1)
    completions = [completion for output in outputs for completion in output.outputs]
    for name in ("token_ids", "logprobs"):
        lists = [getattr(completion, name) for completion in completions]
        assert len({id(value) for value in lists}) == len(lists)


class Recorder:
    """A processor with state: the lengths it was called with. Remembers every copy of itself."""

    made: ClassVar[list["Recorder"]] = []

    def __init__(self):
        self.lengths = []

    def clone(self):
        twin = Recorder()
        Recorder.made.append(twin)
        return twin

    def __call__(self, output_ids, logits):
        self.lengths.append(len(output_ids))
        return logits


@pytest.mark.slow
def test_logits_processors_on_the_real_model(real_llm):
    Recorder.made.clear()
    own = params(n=3, max_tokens=4, logits_processors=[Recorder()], kind=RequestOutputKind.CUMULATIVE)
    (output,) = real_llm.generate("Once upon a time", own, use_tqdm=False)
    assert len(output.outputs) == 3
    assert [recorder.lengths for recorder in Recorder.made] == [[0, 1, 2, 3]] * 3


def test_children_stop_by_their_own_text(engine):
    from tests.v1.engine.fakes import scripted

    ended = join(run(engine, n=3, seed=scripted(0), stop=["STOP"], max_tokens=20), RequestOutputKind.FINAL_ONLY)
    assert [ended[i].finish_reason for i in range(3)] == ["stop", "length", "stop"]
    assert [ended[i].text for i in (0, 2)] == ["One two three ", ""]


def test_logprob_lists_match_their_own_tokens(engine):
    for completion in run(engine, n=4, logprobs=2)[0].outputs:
        assert [next(iter(entry)) for entry in completion.logprobs] == completion.token_ids
        assert completion.cumulative_logprob == pytest.approx(
            float(
                np.sum([entry[t].logprob for entry, t in zip(completion.logprobs, completion.token_ids, strict=True)])
            )
        )
