"""What only a card can show, as tests (`tools/gpu_check.py` has the same with figures). Elsewhere each is skipped."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from benchmarks.kernel_cases import DECODER_CASES
from tests.model_executor.driver import Driver
from tools.gpu_check import Check

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here"),
]


@pytest.fixture(scope="module")
def check() -> Check:
    return Check(small=False)


def test_products_are_exact_enough_and_know_no_neighbours(check: Check) -> None:
    found = check._gemm()
    assert all(entry["same_bits"] for entry in found.values()), found
    assert all(entry["largest_error"] < 1e-5 for entry in found.values()), found


def test_decoders_are_exact_enough_and_the_same_in_chunks_and_graphs(check: Check) -> None:
    found = check._decoder()
    assert all(entry["chunks_and_decode_same_bits"] for entry in found.values()), found
    assert all(entry["root_mean_square"] < 1e-5 for name, entry in found.items() if "float32" in name), found


def test_draws_equal_the_reference(check: Check) -> None:
    found = check._sampling()
    assert all(entry["equal"] == entry["draws"] for entry in found.values()), found
    assert all(entry.get("logprobs_equal", True) and entry.get("ids_equal", True) for entry in found.values()), found


def test_the_engine_agrees_with_the_cpu_and_with_itself(check: Check) -> None:
    found = check.engine()
    assert found["greedy_equal_to_cpu"] == found["greedy_requests"]
    assert found["seeded_alone_equal_in_a_crowd"] == found["seeded_requests"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_graphs_give_the_bits_of_eager_steps(dtype: str) -> None:
    from vllm.config import DeviceConfig
    from vllm.model_executor.backends.triton_backend import TritonBackend

    case = DECODER_CASES[0]
    found = []
    for eager in (True, False):
        backend = TritonBackend(case.spec, dtype, DeviceConfig(device="cuda", enforce_eager=eager))
        backend.load_weights(case.tensors())
        driver = Driver(backend)
        sequences = [driver.add(np.arange(length) % case.spec.vocab_size) for length in (3, 255, 300)]
        driver.step([(sequence, len(sequence.tokens)) for sequence in sequences])
        rows = []
        for _ in range(4):
            for sequence in sequences:
                sequence.tokens.append(1)
            rows.append(driver.step([(sequence, 1) for sequence in sequences]))
        found.append(np.stack(rows))
        backend.close()
    np.testing.assert_array_equal(*found)
