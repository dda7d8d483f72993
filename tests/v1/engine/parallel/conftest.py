"""The bundled model, for the rules that a function of seed and position cannot show."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from vllm.entrypoints.llm import LLM


@pytest.fixture(scope="session")
def real_llm() -> Iterator[LLM]:
    """SmolLM2-135M-Instruct, in process."""
    with LLM("smollm2-135m-instruct", max_model_len=512, max_num_seqs=16, num_gpu_blocks_override=256) as llm:
        yield llm
        llm.llm_engine.check_integrity()
