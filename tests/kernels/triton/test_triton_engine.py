"""The engine on the Triton backend, end to end, with the GPU's device replaced by the interpreter's: a 2-layer model
gives the tokens of the torch backend."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.kernels.triton.interpreted import DEVICE  # isort: skip
from tests.v1.worker.worker_fakes import GEMMA, LLAMA
from vllm import LLM, SamplingParams

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")  # interpreter's

PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [5, 6, 7, 8, 9, 1], [40]]
PARAMS = [
    SamplingParams(n=3, temperature=1.0, seed=7, max_tokens=5, logprobs=2, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, repetition_penalty=1.3, prompt_logprobs=1),
    SamplingParams(n=2, seed=3, top_k=9, top_p=0.8, max_tokens=4, ignore_eos=True, logit_bias={4: 2.0}),
]


def generate(folder: Path, values: dict[str, Any], backend: str) -> list[Any]:
    (folder / "config.json").write_text(json.dumps(values))
    llm = LLM(
        str(folder),
        backend=backend,
        device=DEVICE.type if backend == "triton" else "cpu",
        load_format="dummy",
        dtype="float32",
        skip_tokenizer_init=True,
        block_size=4,
        num_gpu_blocks_override=40,
        max_num_seqs=8,
        max_num_batched_tokens=16,
        max_model_len=64,
    )
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], PARAMS, use_tqdm=False)
    llm.shutdown()
    return outputs


@pytest.mark.parametrize("values", [LLAMA, GEMMA], ids=["llama", "gemma3"])
def test_tokens_of_the_torch_backend(tmp_path: Path, values: dict[str, Any]) -> None:
    """Forks, chunks, shared prompts, penalties, filters and log-probabilities, in one run."""
    found, expected = (generate(tmp_path, values, backend) for backend in ("triton", "torch"))
    for one, other in zip(found, expected, strict=True):
        assert [child.token_ids for child in one.outputs] == [child.token_ids for child in other.outputs]
        for mine, theirs in zip(one.outputs, other.outputs, strict=True):
            for step, reference in zip(mine.logprobs or [], theirs.logprobs or [], strict=True):
                assert list(step) == list(reference)
                values_of = [[entry.logprob for entry in part.values()] for part in (step, reference)]
                np.testing.assert_allclose(*values_of, atol=1e-4)
    assert found[1].prompt_logprobs is not None
    assert len(found[1].prompt_logprobs) == len(PROMPTS[1])
