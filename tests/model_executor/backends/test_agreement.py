"""Every backend of this machine runs every family and agrees with the reference: in fp32 to rounding, in bfloat16 to
bfloat16's own error."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")

from tests.model_executor.driver import Driver, log_softmax
from tests.models_util import FAMILIES, tiny_folder
from vllm.model_executor import backends
from vllm.model_executor.backends import create_backend
from vllm.model_executor.loader import open_checkpoint

# In Triton's interpreter these cases take minutes: its own, smaller ones stand in tests/kernels/triton.
OTHERS = [name for name in backends._BACKENDS if name not in ("torch", "triton")]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
CASES = {family: (family, {}) for family in FAMILIES}
CASES["biases, yarn, gelu"] = (
    "llama",
    {"attention_bias": True, "mlp_bias": True, "rope_scaling": YARN, "hidden_act": "gelu"},
)
CASES["soft-caps"] = ("gemma3", {"final_logit_softcapping": 5.0, "attn_logit_softcapping": 3.0})


def logits(name: str, case: str, dtype: str) -> np.ndarray:
    """All rows of a prompt of two partitions, in two chunks, then two children that share it."""
    family, overrides = CASES[case]
    with open_checkpoint(tiny_folder(family, **overrides)) as checkpoint:
        backend = create_backend(name, checkpoint.spec, dtype)
        backend.load_weights(checkpoint.weights())
    driver = Driver(backend)
    parent = driver.add(np.random.default_rng(0).integers(0, 256, 330))
    rows = [driver.step([(parent, 200)], rows="all"), driver.step([(parent, 130)], rows="all")]
    children = [driver.fork(parent) for _ in range(3)]
    for token, child in enumerate(children):
        child.tokens.append(token)
    rows.append(driver.step([(child, 1) for child in children], shared=[(0, 3, 20)]))
    backend.close()
    return np.concatenate(rows)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", OTHERS)
def test_agrees_with_the_reference(name, case, dtype):
    if (reason := backends._find(name)[1]) is not None:
        pytest.skip(f"the {name} backend is not available: {reason}")
    expected, actual = logits("torch", case, dtype), logits(name, case, dtype)
    if dtype == "float32":
        np.testing.assert_allclose(actual, expected, atol=5e-5)
        assert np.array_equal(actual.argmax(axis=1), expected.argmax(axis=1))
    else:
        exact = log_softmax(logits("torch", case, "float32"))
        errors = [np.abs(log_softmax(rows) - exact).mean() for rows in (expected, actual)]
        assert errors[1] < 2 * errors[0]
