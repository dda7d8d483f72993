"""The CPU backend behind the Backend protocol: loading, steps, sampling, and the bundled models."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.kernel_cases import DECODER_CASES, DecoderCase, batch, int32s, oracle, tensor
from benchmarks.sampling_cases import SamplingCase
from tests.kernels.isas import ISAS, NOT_BUILT
from vllm.config import DeviceConfig
from vllm.exceptions import ConfigError, UnsupportedError, UnsupportedSpecError, WeightError
from vllm.kernels.library import KernelLibraryError
from vllm.model_executor.backends import create_backend
from vllm.model_executor.backends.cpu_backend import CpuBackend
from vllm.model_executor.backends.interface import Float32s, WeightTensor
from vllm.model_executor.loader import open_checkpoint
from vllm.v1.sample import reference

pytestmark = pytest.mark.skipif(not ISAS, reason=NOT_BUILT)

CASE = next(case for case in DECODER_CASES if case.name == "biases")
TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 35, 8, 9, 7, 9, 32, 38, 46, 26, 43]


def backend_of(case: DecoderCase = CASE, dtype: str = "float32", **options: Any) -> CpuBackend:
    backend = CpuBackend(case.spec, dtype, **options)
    backend.load_weights(case.tensors())
    backend.init_cache(16, 16)
    return backend


def logits_of(backend: CpuBackend, tokens: list[int] = TEXT) -> Float32s:
    hidden = backend.forward(batch([tokens], [0], int32s([range(-(-len(tokens) // 16))])))
    return backend.logits(hidden, int32s(range(len(tokens))))


# Loading


def test_it_is_what_auto_picks() -> None:
    assert CpuBackend.is_available() is None
    backend = create_backend("auto", CASE.spec, "bfloat16")
    assert isinstance(backend, CpuBackend)
    assert backend.name == "cpu"
    backend.close()


def test_logits_are_the_models() -> None:
    expected = oracle(CASE.spec, CASE.weights(), TEXT)
    np.testing.assert_allclose(logits_of(backend_of()), expected, atol=1e-4 * expected.std())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_way_to_hand_a_weight_over_gives_the_same_model(dtype: str) -> None:
    from vllm.model_executor.loader.dequantize import bf16_to_fp32, fp32_to_bf16

    bits = {name: fp32_to_bf16(values) for name, values in CASE.weights().items()}
    values = {name: bf16_to_fp32(half) for name, half in bits.items()}
    whole = [tensor(name, value) for name, value in values.items()]
    halves = [
        WeightTensor(name, value.shape, "bfloat16", lambda v=value: v, lambda name=name: bits[name])  # type: ignore[misc]
        for name, value in values.items()
    ]
    rows = [
        WeightTensor(name, value.shape, "float32", lambda v=value: v, read_rows=lambda a, b, v=value: v[a:b])  # type: ignore[misc]
        for name, value in values.items()
    ]
    results = []
    for weights in (whole, halves, rows):
        backend = CpuBackend(CASE.spec, dtype)
        backend.load_weights(weights)
        backend.init_cache(4, 16)
        results.append(logits_of(backend))
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_weights_are_replaced_in_place(quantization: str | None) -> None:
    """Any subset, also one of three that are packed together; the rest stays."""
    backend = backend_of(dtype="bfloat16", quantization=quantization)
    before = logits_of(backend)
    other = CASE.weights(seed=7)
    names = ["layers.1.k", "layers.0.up", "layers.0.gate_bias", "layers.1.q_bias", "final_norm", "head", "layers.0.o"]
    backend.load_weights([tensor(name, other[name]) for name in names])
    mixed = CpuBackend(CASE.spec, "bfloat16", quantization=quantization)
    weights = CASE.weights()
    mixed.load_weights([tensor(name, other[name] if name in names else value) for name, value in weights.items()])
    mixed.init_cache(16, 16)
    after = logits_of(backend)
    np.testing.assert_array_equal(after, logits_of(mixed))
    assert not np.array_equal(after, before)
    backend.load_weights([tensor(name, weights[name]) for name in names])
    np.testing.assert_array_equal(logits_of(backend), before)


def test_what_is_missing_unknown_or_of_another_shape_is_named() -> None:
    tensors = CASE.tensors()
    with pytest.raises(WeightError, match=r"layers\.0\.k\b"):
        CpuBackend(CASE.spec).load_weights([weight for weight in tensors if weight.name != "layers.0.k"])
    backend = CpuBackend(CASE.spec)
    with pytest.raises(WeightError, match="before load_weights"):
        logits_of(backend)
    with pytest.raises(WeightError, match=r"layers\.9\.q"):
        backend.load_weights([*tensors, tensor("layers.9.q", np.zeros((2, 2), np.float32))])
    with pytest.raises(WeightError, match=r"final_norm has shape \(3,\)"):
        backend.load_weights([tensor("final_norm", np.zeros(3, np.float32))])


def test_what_it_cannot_run_is_named() -> None:
    spec = CASE.spec
    assert CpuBackend.supports(spec, "bfloat16") is None
    assert "float16" in str(CpuBackend.supports(spec, "float16"))
    assert "int4" in str(CpuBackend.supports(spec, "bfloat16", "int4"))
    assert "int8" in str(CpuBackend.supports(spec, "float32", "int8"))
    odd = dataclasses.replace(spec, hidden_size=51)
    assert "odd hidden size" in str(CpuBackend.supports(odd, "bfloat16"))
    layer = dataclasses.replace(spec.layers[0], mixer=dataclasses.replace(spec.layers[0].mixer, head_dim=25))
    reason = CpuBackend.supports(dataclasses.replace(spec, layers=(layer,)), "float32")
    assert "layer 0: head size 25" in str(reason)
    with pytest.raises(UnsupportedSpecError, match="float16"):
        CpuBackend(spec, "float16")
    with pytest.raises(ConfigError, match="num_threads"):
        CpuBackend(spec, device_config=DeviceConfig(num_threads=0))
    backend = backend_of()
    for size in (0, 24, 512):
        with pytest.raises(UnsupportedError, match="block size"):
            backend.init_cache(4, size)


def test_a_forced_variant_that_cannot_run_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_ISA", "avx1024")
    assert "avx1024" in str(CpuBackend.is_available())
    with pytest.raises(KernelLibraryError, match="avx1024"):
        CpuBackend(CASE.spec)


# Steps


def test_kept_rows_outlive_the_next_step() -> None:
    backend = backend_of()
    hidden = backend.forward(batch([TEXT], [0], int32s([[0, 1]])))
    expected = backend.logits(hidden, int32s([2, 7]))
    kept = backend.keep(hidden, int32s([2, 7]))
    backend.forward(batch([TEXT[::-1]], [0], int32s([[2, 3]])))
    np.testing.assert_array_equal(backend.logits(kept, int32s([0, 1])), expected)


def test_the_cache_can_be_dropped_and_made_again() -> None:
    backend = backend_of()
    expected = logits_of(backend)
    backend.drop_cache()
    backend.init_cache(8, 32)
    np.testing.assert_allclose(logits_of(backend), expected, atol=1e-4)


# Sampling


@pytest.mark.parametrize(
    "case",
    [
        SamplingCase("plain"),
        SamplingCase("greedy", {"temperature": 0.0, "num_logprobs": 2}),
        SamplingCase("nucleus", {"top_p": 0.8, "top_k": 20, "num_logprobs": 5}, per_row=7),
    ],
    ids=lambda case: case.name,
)
def test_draws_are_the_references_on_the_same_logits(case: SamplingCase) -> None:
    backend = backend_of(dtype="bfloat16")
    hidden = backend.forward(batch([TEXT], [0], int32s([[0, 1]])))
    logits = backend.logits(hidden, int32s(range(len(TEXT))))
    drawn = case.batch(len(TEXT), CASE.spec.vocab_size)
    found, expected = backend.sample(hidden, drawn), reference.sample(logits, drawn)
    np.testing.assert_array_equal(found.token_ids, expected.token_ids)
    assert (found.logprobs is None) == (expected.logprobs is None)
    if found.logprobs is not None and expected.logprobs is not None:
        np.testing.assert_array_equal(found.logprobs.token_ids, expected.logprobs.token_ids)
        np.testing.assert_array_equal(found.logprobs.logprobs, expected.logprobs.logprobs)
        np.testing.assert_array_equal(found.logprobs.ranks, expected.logprobs.ranks)


def test_a_logits_processor_sees_the_models_logits() -> None:
    backend = backend_of()
    hidden = backend.forward(batch([TEXT], [0], int32s([[0, 1]])))
    seen: list[Float32s] = []

    def only_five(logits: Float32s) -> Float32s:
        seen.append(logits.copy())
        logits[:] = -np.inf
        logits[5] = 0.0
        return logits

    drawn = SamplingCase("processed").batch(3, CASE.spec.vocab_size)
    drawn.processors = {1: only_five}
    assert backend.sample(hidden, drawn).token_ids[1] == 5
    np.testing.assert_array_equal(seen[0], backend.logits(hidden, int32s([1]))[0])


def test_ten_thousand_draws_from_one_row() -> None:
    backend = backend_of()
    hidden = backend.forward(batch([TEXT], [0], int32s([[0, 1]]), hidden=[len(TEXT) - 1]))
    drawn = SamplingCase("many", per_row=10_000).batch(1, CASE.spec.vocab_size)
    counts = np.bincount(backend.sample(hidden, drawn).token_ids, minlength=CASE.spec.vocab_size)
    logits = backend.logits(hidden, int32s([0]))[0].astype(np.float64)
    expected = np.exp(logits - logits.max())
    expected *= 10_000 / expected.sum()
    assert ((counts - expected) ** 2 / expected).sum() < 1.7 * CASE.spec.vocab_size


def test_prompt_logprobs() -> None:
    backend = backend_of()
    hidden = backend.forward(batch([TEXT], [0], int32s([[0, 1]])))
    rows = int32s(range(len(TEXT) - 1))
    found = backend.token_logprobs(hidden, rows, int32s(TEXT[1:]), 3, "raw_logprobs")
    expected = reference.token_logprobs(backend.logits(hidden, rows), int32s(TEXT[1:]), 3)
    np.testing.assert_array_equal(found.token_ids, expected.token_ids)
    np.testing.assert_array_equal(found.logprobs, expected.logprobs)
    np.testing.assert_array_equal(found.ranks, expected.ranks)


# The bundled models

PROSE = (
    "The river had been low all summer, and the boats lay on their sides in the mud below the town. In the evening the "
    "children went down to look for coins between the stones, and the old men sat on the wall and told them where the "
    "ferry used to land, before the bridge was built and the road went round the other side of the hill."
)


def perplexity(logits: Float32s, tokens: list[int]) -> float:
    wide = logits[:-1].astype(np.float64)
    wide -= wide.max(1, keepdims=True)
    chosen = wide[np.arange(len(tokens) - 1), tokens[1:]] - np.log(np.exp(wide).sum(1))
    return float(np.exp(-chosen.mean()))


@pytest.mark.parametrize("model", ["smollm2", "gemma3"])
def test_perplexity_of_each_precision(model: str, request: pytest.FixtureRequest) -> None:
    from vllm.config import ModelConfig
    from vllm.tokenizers import load_tokenizer

    path: Path = request.getfixturevalue(f"{model}_path")
    with open_checkpoint(path) as checkpoint:
        tokens = load_tokenizer(ModelConfig(str(path), str(path), 512, "bfloat16")).encode(PROSE)
        found = {}
        for dtype, quantization in (("float32", None), ("bfloat16", None), ("bfloat16", "int8")):
            backend = CpuBackend(checkpoint.spec, dtype, quantization=quantization)
            backend.load_weights(checkpoint.weights())
            backend.init_cache(8, 16)
            found[quantization or dtype] = perplexity(logits_of(backend, tokens), tokens)
            backend.close()
    assert abs(found["bfloat16"] / found["float32"] - 1) < 0.01, found
    assert abs(found["int8"] / found["bfloat16"] - 1) < 0.02, found


def test_torch_is_never_imported(smollm2_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
import numpy as np
from vllm.model_executor.loader import open_checkpoint
from vllm.model_executor.backends import create_backend
from benchmarks.kernel_cases import batch, int32s
with open_checkpoint(Path({str(smollm2_path)!r})) as checkpoint:
    backend = create_backend("cpu", checkpoint.spec, "bfloat16")
    backend.load_weights(checkpoint.weights())
backend.init_cache(4, 16)
assert np.isfinite(backend.logits(backend.forward(batch([[1, 2, 3]], [0], int32s([[0]]))), int32s([2]))).all()
assert "torch" not in sys.modules and "transformers" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
