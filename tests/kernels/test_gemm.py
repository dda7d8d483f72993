"""Matrix products on packed weights: against fp64, and a row's bits whatever stands beside it."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.kernel_cases import GEMM_CASES, GEMM_ROWS, TOLERANCE, Float64s, GemmCase, activation, to_bf16
from tests.kernels.isas import ISAS, NOT_BUILT
from vllm.kernels.library import KernelError
from vllm.kernels.matrix import ENCODED_TYPES, PackedMatrix
from vllm.model_executor.backends.interface import Float32s
from vllm.model_executor.loader.dequantize import dequantize

pytestmark = pytest.mark.skipif(not ISAS, reason=NOT_BUILT)

KINDS = ("float32", "bfloat16", "int8")
SMALL = [case for case in GEMM_CASES if case.n * case.k < 2_000_000]


@pytest.fixture(params=ISAS or ["none"])
def isa(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def packed(case: GemmCase, kind: str, isa: str, threads: int = 2) -> PackedMatrix:
    matrix = PackedMatrix(case.n, case.k, kind, gated=case.activation is not None, threads=threads, isa=isa)
    matrix.pack(case.weights())
    return matrix


def rounded_inputs(case: GemmCase, kind: str, m: int) -> tuple[Float64s, Float64s]:
    """(a, w) in fp64 as the kernel sees them."""
    a, w = case.rows(m), case.weights()
    if kind == "float32":
        return a.astype(np.float64), w.astype(np.float64)
    if kind == "int8":
        scale = np.abs(w).max(1, keepdims=True) / np.float32(127)
        return to_bf16(a).astype(np.float64), np.rint(w / scale).astype(np.float64) * scale
    return to_bf16(a).astype(np.float64), to_bf16(w).astype(np.float64)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_against_fp64(case: GemmCase, kind: str, isa: str) -> None:
    m = max(GEMM_ROWS)
    a, w = rounded_inputs(case, kind, m)
    sums = a @ w.T
    sizes = np.sqrt((a * a) @ (w * w).T)
    bias = case.bias_values()
    if bias is not None:
        sums = sums + bias
    found = packed(case, kind, isa).multiply(case.rows(m), bias, case.activation)
    if case.activation is None:
        limit = TOLERANCE[kind] * np.sqrt(case.k) * (sizes + np.abs(sums)) + 1e-7
        np.testing.assert_array_less(np.abs(found - sums), limit)
        return
    gate, up = np.split(sums, 2, axis=1)
    expected = activation(case.activation, gate) * up
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_a_row_has_the_same_bits_in_any_company(case: GemmCase, kind: str, isa: str) -> None:
    rows, bias = case.rows(max(GEMM_ROWS)), case.bias_values()
    matrix = packed(case, kind, isa)
    whole = matrix.multiply(rows, bias, case.activation)
    for m in GEMM_ROWS:
        np.testing.assert_array_equal(matrix.multiply(rows[:m], bias, case.activation), whole[:m])
    for place in (0, 7, 77):
        np.testing.assert_array_equal(matrix.multiply(rows[place : place + 1], bias, case.activation)[0], whole[place])
    for threads in (1, 3, 5):
        matrix.threads = threads
        np.testing.assert_array_equal(matrix.multiply(rows, bias, case.activation), whole)


def test_many_rows_are_cut_without_a_seam(isa: str) -> None:
    case = GemmCase("tall", 40, 300)
    rows = np.random.default_rng(5).standard_normal((1100, case.k)).astype(np.float32)
    matrix = packed(case, "bfloat16", isa)
    whole = matrix.multiply(rows)
    np.testing.assert_array_equal(matrix.multiply(rows[1000:1003]), whole[1000:1003])
    a, w = to_bf16(rows).astype(np.float64), to_bf16(case.weights()).astype(np.float64)
    np.testing.assert_allclose(whole, a @ w.T, atol=1e-4)


def test_no_rows(isa: str) -> None:
    case = SMALL[0]
    assert packed(case, "bfloat16", isa).multiply(np.zeros((0, case.k), np.float32)).shape == (0, case.n)


@pytest.mark.parametrize("kind", KINDS)
def test_packing_rows_in_any_cut_gives_the_same_weights(kind: str, isa: str) -> None:
    case = GemmCase("cut", 100, 74)
    weights = case.weights()
    whole, parts = packed(case, kind, isa), PackedMatrix(case.n, case.k, kind, isa=isa)
    for first, stop in ((50, 100), (0, 1), (1, 17), (17, 50)):
        parts.pack(weights[first:stop], first)
    rows = case.rows(3)
    np.testing.assert_array_equal(whole.multiply(rows), parts.multiply(rows))


def test_rows_come_back_as_they_were_rounded(isa: str) -> None:
    case = GemmCase("rows", 45, 37)
    weights = case.weights()
    full, half, byte = (packed(case, kind, isa) for kind in KINDS)
    scale = np.abs(weights).max(1, keepdims=True) / np.float32(127)
    for i in range(case.n):
        np.testing.assert_array_equal(full.row(i), weights[i])
        np.testing.assert_array_equal(half.row(i), to_bf16(weights[i]))
        np.testing.assert_allclose(byte.row(i), weights[i], atol=0.51 * float(scale[i, 0]))


@pytest.mark.parametrize("source", ["bfloat16", "float16"])
def test_halves_are_taken_as_they_are(source: str, isa: str) -> None:
    case = GemmCase("halves", 20, 33)
    weights: Float32s = to_bf16(case.weights())
    rows = (weights.view(np.uint32) >> 16).astype(np.uint16) if source == "bfloat16" else weights.astype(np.float16)
    matrix = PackedMatrix(case.n, case.k, "float32", isa=isa)
    matrix.pack(rows, source_type=source)
    expected = weights if source == "bfloat16" else weights.astype(np.float16).astype(np.float32)
    for i in range(case.n):
        np.testing.assert_array_equal(matrix.row(i), expected[i])


def test_special_numbers_survive_rounding(isa: str) -> None:
    values = np.array([[0.0, -0.0, np.inf, -np.inf, 1e-40, 3.3895e38, 1.00390625, 1.01171875]], np.float32)
    matrix = PackedMatrix(1, 8, "bfloat16", isa=isa)
    matrix.pack(values)
    found, expected = matrix.row(0), to_bf16(values)[0]
    expected[4] = found[4]  # a denormal: kept or flushed to zero
    assert abs(found[4]) < 1.2e-38
    np.testing.assert_array_equal(found, expected)
    matrix.pack(np.full((1, 8), np.nan, np.float32))
    assert np.isnan(matrix.row(0)).all()


@pytest.mark.parametrize("name", ENCODED_TYPES)
def test_gguf_blocks_decode_to_the_loaders_bits(name: str, isa: str) -> None:
    block = {"Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34)}
    numbers, size = block.get(name, (256, {"Q4_K": 144, "Q5_K": 176, "Q6_K": 210}.get(name, 0)))
    n, k = 37, 512
    raw = np.random.default_rng(3).integers(0, 256, (n, k // numbers * size)).astype(np.uint8)
    with np.errstate(all="ignore"):
        expected = dequantize(raw.reshape(-1), name, (n, k))
    matrix = PackedMatrix(n, k, "float32", isa=isa)
    matrix.pack(raw, source_type=name)
    for i in range(n):
        np.testing.assert_array_equal(matrix.row(i), expected[i])


def test_bad_input_is_refused(isa: str) -> None:
    with pytest.raises(KernelError, match="shape"):
        PackedMatrix(0, 4, "float32", isa=isa)
    matrix = PackedMatrix(8, 40, "float32", isa=isa)
    rows = np.zeros((9, 40), np.float32)
    with pytest.raises(KernelError, match="outside the matrix"):
        matrix.pack(rows)
    with pytest.raises(KernelError, match="outside the matrix"):
        matrix.pack(rows[:1], first=8)
    with pytest.raises(KernelError, match="outside the matrix"):
        matrix.pack(rows[:1], first=-1)
    with pytest.raises(KernelError, match="whole blocks"):
        matrix.pack(np.zeros((8, 34), np.uint8), source_type="Q8_0")
    with pytest.raises(KernelError, match="source type"):
        matrix.pack(rows[:8], source_type="Q3_K")
    with pytest.raises(KernelError, match="no such output"):
        matrix.row(8)
    with pytest.raises(KernelError, match="interleaved"):
        matrix.multiply(rows, activation="silu")
    with pytest.raises(KernelError, match="shape"):
        matrix.multiply(np.zeros((2, 41), np.float32))
