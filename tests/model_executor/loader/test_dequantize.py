"""GGUF block formats against the gguf package's decoder and scalar readings of the format; bfloat16 rounding."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Quantization
from hypothesis import given
from hypothesis import strategies as st

from vllm.model_executor.loader.dequantize import FORMATS, bf16_to_fp32, dequantize, fp32_to_bf16
from vllm.model_executor.loader.gguf_file import BLOCK_TYPES

BLOCKED = [name for name, size, _ in BLOCK_TYPES.values() if size > 1]
SIZES = {name: (size, num_bytes) for name, size, num_bytes in BLOCK_TYPES.values()}
HALVES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,)}
HALVES |= {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def random_blocks(name: str, count: int, seed: int = 0) -> np.ndarray:
    """Any bytes, with finite scales."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (count, SIZES[name][1]), np.uint8)
    for start in HALVES[name]:
        scales = (rng.standard_normal(count) * 0.1).astype(np.float16)
        blocks[:, start : start + 2] = scales.view(np.uint8).reshape(count, 2)
    return blocks


def test_the_table_of_sizes_is_the_gguf_packages():
    for number, (name, size, num_bytes) in BLOCK_TYPES.items():
        assert Quantization(number).name == name
        assert gguf.GGML_QUANT_SIZES[Quantization(number)] == (size, num_bytes)
    assert {name for name, _, _ in BLOCK_TYPES.values()} == set(FORMATS)


@pytest.mark.parametrize("name", BLOCKED)
@pytest.mark.parametrize("count", [1, 3, 1500])
def test_equals_the_gguf_package_bit_for_bit(name, count):
    blocks = random_blocks(name, count, seed=count)
    expected = gguf.quants.dequantize(blocks.reshape(1, -1), Quantization[name])
    actual = dequantize(blocks.reshape(-1), name, (1, count * SIZES[name][0]))
    assert actual.dtype == np.float32
    assert np.array_equal(actual, expected)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "BF16", "F16"])
def test_what_the_gguf_package_quantizes_comes_back_near(name):
    values = np.random.default_rng(1).standard_normal((5, 256)).astype(np.float32)
    data = gguf.quants.quantize(values, Quantization[name])
    back = dequantize(data.reshape(-1).view(np.uint8), name, values.shape)
    steps = {"Q4_0": 8, "Q4_1": 15, "Q5_0": 16, "Q5_1": 31, "Q8_0": 127, "BF16": 256, "F16": 2048}
    assert np.abs(back - values).max() <= 2.0 * np.abs(values).max() / steps[name]


def _half(block: bytes, start: int) -> float:
    return float(np.frombuffer(block, np.float16, 1, start)[0])


def _k_scale(block: bytes, j: int) -> tuple[int, int]:
    s = block[4:16]
    if j < 4:
        return s[j] & 63, s[j + 4] & 63
    return (s[j + 4] & 15) | (s[j - 4] >> 6) << 4, (s[j + 4] >> 4) | (s[j] >> 6) << 4


def scalar_value(name: str, block: bytes, i: int) -> float:
    """Element i of one block, read as the format's description has it."""
    if name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1"):
        high = name[1] == "5"
        start = {"Q4_0": 2, "Q4_1": 4, "Q5_0": 6, "Q5_1": 8}[name]
        quant = block[start + i % 16] >> (4 * (i // 16)) & 15
        if high:
            bits = int.from_bytes(block[start - 4 : start], "little")
            quant |= (bits >> i & 1) << 4
        if name.endswith("0"):
            return _half(block, 0) * (quant - (16 if high else 8))
        return _half(block, 0) * quant + _half(block, 2)
    if name == "Q8_0":
        return _half(block, 0) * (block[2 + i] - 256 * (block[2 + i] > 127))
    if name in ("Q4_K", "Q5_K"):
        j = i // 32
        start = 16 if name == "Q4_K" else 48
        quant = block[start + (j // 2) * 32 + i % 32] >> (4 * (j % 2)) & 15
        if name == "Q5_K":
            quant |= (block[16 + i % 32] >> j & 1) << 4
        scale, minimum = _k_scale(block, j)
        return _half(block, 0) * scale * quant - _half(block, 2) * minimum
    half, rest = divmod(i, 128)
    quarter, l = divmod(rest, 32)
    quant = block[half * 64 + (quarter % 2) * 32 + l] >> (4 * (quarter // 2)) & 15
    quant |= (block[128 + half * 32 + l] >> (2 * quarter) & 3) << 4
    scale = block[192 + i // 16]
    return _half(block, 208) * (scale - 256 * (scale > 127)) * (quant - 32)


@pytest.mark.parametrize("name", BLOCKED)
def test_equals_a_scalar_reading_of_the_format(name):
    blocks = random_blocks(name, 3, seed=7)
    size = SIZES[name][0]
    actual = dequantize(blocks.reshape(-1), name, (3, size))
    for row, block in enumerate(blocks):
        expected = [scalar_value(name, block.tobytes(), i) for i in range(size)]
        np.testing.assert_allclose(actual[row], expected, rtol=1e-5, atol=1e-6)


def test_f32_is_a_view():
    values = np.arange(6, dtype=np.float32)
    back = dequantize(values.view(np.uint8), "F32", (2, 3))
    assert np.shares_memory(back, values)
    assert back.tolist() == [[0, 1, 2], [3, 4, 5]]


@given(st.lists(st.floats(width=32), max_size=40))
def test_bfloat16_rounds_as_torch_does(values):
    torch = pytest.importorskip("torch")
    array = np.array(values, np.float32)
    bits = fp32_to_bf16(array)
    expected = torch.from_numpy(array.copy()).to(torch.bfloat16)
    actual = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
    assert torch.equal(actual.isnan(), expected.isnan())
    assert torch.equal(actual[~expected.isnan()], expected[~expected.isnan()])
    back = bf16_to_fp32(bits)
    assert np.array_equal(fp32_to_bf16(back), bits)


def test_bfloat16_ties_go_to_even():
    bits = np.array([0x3F800000, 0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF], np.uint32)
    assert fp32_to_bf16(bits.view(np.float32)).tolist() == [0x3F80, 0x3F80, 0x3F82, 0x3F81, 0x7F80]
