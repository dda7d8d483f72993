"""GGUF block formats to fp32, and fp32 to bfloat16 bits, in numpy.

A row of a tensor is a whole number of blocks. Work goes in chunks whose temporaries stay in the L2 cache. Values equal
those of the `gguf` package's own decoder bit for bit (the same operations in the same order, in fp32).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

UInt8s = npt.NDArray[np.uint8]
Float32s = npt.NDArray[np.float32]

_CHUNK = 32_768  # elements
_LOW_HALVES, _FOUR = np.uint64(0x0F0F0F0F0F0F0F0F), np.uint64(4)
_FOUR_BITS = np.uint8(4)


def _half(blocks: UInt8s, start: int) -> Float32s:
    """The fp16 number at byte `start` of each block, as an fp32 column [N, 1]."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: UInt8s) -> UInt8s:
    """[N, 16] bytes to [N, 32] numbers: low halves first, then high halves."""
    words = np.ascontiguousarray(packed).view(np.uint64)
    out = np.empty((len(packed), 4), np.uint64)
    np.bitwise_and(words, _LOW_HALVES, out=out[:, :2])
    np.right_shift(words, _FOUR, out=out[:, 2:])
    out[:, 2:] &= _LOW_HALVES
    return out.view(np.uint8)


def _fifth_bits(blocks: UInt8s, start: int) -> UInt8s:
    """The bit per element of Q5_0 and Q5_1, moved to weight 16: [N, 32]."""
    return np.unpackbits(blocks[:, start : start + 4], axis=1, bitorder="little") << _FOUR_BITS


def _q4_0(blocks: UInt8s, out: Float32s) -> None:
    quants = _nibbles(blocks[:, 2:18])
    quants -= 8
    np.multiply(quants.view(np.int8), _half(blocks, 0), out=out)


def _q4_1(blocks: UInt8s, out: Float32s) -> None:
    quants = _nibbles(blocks[:, 4:20])
    np.multiply(quants, _half(blocks, 0), out=out)
    out += _half(blocks, 2)


def _q5_0(blocks: UInt8s, out: Float32s) -> None:
    quants = _nibbles(blocks[:, 6:22])
    quants |= _fifth_bits(blocks, 2)
    quants -= 16
    np.multiply(quants.view(np.int8), _half(blocks, 0), out=out)


def _q5_1(blocks: UInt8s, out: Float32s) -> None:
    quants = _nibbles(blocks[:, 8:24])
    quants |= _fifth_bits(blocks, 4)
    np.multiply(quants, _half(blocks, 0), out=out)
    out += _half(blocks, 2)


def _q8_0(blocks: UInt8s, out: Float32s) -> None:
    np.multiply(blocks[:, 2:34].view(np.int8), _half(blocks, 0), out=out)


def _k_scales(packed: UInt8s) -> tuple[UInt8s, UInt8s]:
    """The 8 six-bit scales and the 8 six-bit minima of a Q4_K or Q5_K block, from its 12 bytes."""
    low, middle, high = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([low & 63, (high & 15) | ((low >> 2) & 48)], axis=1)
    minima = np.concatenate([middle & 63, (high >> 4) | ((middle >> 2) & 48)], axis=1)
    return scales, minima


def _k_affine(blocks: UInt8s, quants: UInt8s, out: Float32s) -> None:
    """out = d * scale * quant - dmin * minimum, over [N, 8, 32]."""
    scales, minima = _k_scales(blocks[:, 4:16])
    values = out.reshape(-1, 8, 32)
    np.multiply(quants, (_half(blocks, 0) * scales)[:, :, None], out=values)
    values -= (_half(blocks, 2) * minima)[:, :, None]


def _q4_k(blocks: UInt8s, out: Float32s) -> None:
    packed = blocks[:, 16:144].reshape(-1, 4, 32)
    quants = np.empty((len(blocks), 4, 2, 32), np.uint8)
    np.bitwise_and(packed, 15, out=quants[:, :, 0])
    np.right_shift(packed, 4, out=quants[:, :, 1])
    _k_affine(blocks, quants.reshape(-1, 8, 32), out)


def _q5_k(blocks: UInt8s, out: Float32s) -> None:
    packed = blocks[:, 48:176].reshape(-1, 4, 32)
    quants = np.empty((len(blocks), 4, 2, 32), np.uint8)
    np.bitwise_and(packed, 15, out=quants[:, :, 0])
    np.right_shift(packed, 4, out=quants[:, :, 1])
    high = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]
    high &= 1
    high <<= 4
    high |= quants.reshape(-1, 8, 32)
    _k_affine(blocks, high, out)


def _q6_k(blocks: UInt8s, out: Float32s) -> None:
    low = blocks[:, 0:128].reshape(-1, 2, 2, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32)
    quants = np.empty((len(blocks), 2, 4, 32), np.uint8)
    np.bitwise_and(low, 15, out=quants[:, :, :2])
    np.right_shift(low, 4, out=quants[:, :, 2:])
    shifted = high >> np.array([0, 2, 4, 6], np.uint8)[:, None]
    shifted &= 3
    shifted <<= 4
    quants |= shifted
    quants -= 32
    scales = _half(blocks, 208) * np.ascontiguousarray(blocks[:, 192:208]).view(np.int8)
    np.multiply(quants.view(np.int8).reshape(-1, 16, 16), scales[:, :, None], out=out.reshape(-1, 16, 16))


_FORMATS: dict[str, tuple[int, int, Callable[[UInt8s, Float32s], None]]] = {
    "Q4_0": (32, 18, _q4_0),
    "Q4_1": (32, 20, _q4_1),
    "Q5_0": (32, 22, _q5_0),
    "Q5_1": (32, 24, _q5_1),
    "Q8_0": (32, 34, _q8_0),
    "Q4_K": (256, 144, _q4_k),
    "Q5_K": (256, 176, _q5_k),
    "Q6_K": (256, 210, _q6_k),
}

FORMATS = ("F32", "F16", "BF16", *_FORMATS)


def dequantize(data: UInt8s, type_name: str, shape: tuple[int, ...]) -> Float32s:
    """Decode a tensor's bytes to fp32, row-major. F32 data comes back as a read-only view where it is aligned."""
    if type_name == "F32":
        return data.view(np.float32).reshape(shape)
    if type_name == "F16":
        return data.view(np.float16).astype(np.float32).reshape(shape)
    if type_name == "BF16":
        return bf16_to_fp32(data.view(np.uint16)).reshape(shape)
    block_size, block_bytes, decode = _FORMATS[type_name]
    blocks = data.reshape(-1, block_bytes)
    out = np.empty((len(blocks), block_size), np.float32)
    step = _CHUNK // block_size
    for start in range(0, len(blocks), step):
        decode(blocks[start : start + step], out[start : start + step])
    return out.reshape(shape)


def bf16_to_fp32(bits: npt.NDArray[np.uint16]) -> Float32s:
    """bfloat16 bits to the fp32 numbers they stand for (exact)."""
    wide = bits.astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)


def fp32_to_bf16(values: npt.NDArray[Any]) -> npt.NDArray[np.uint16]:
    """fp32 to the nearest bfloat16's bits, ties to even; a NaN stays a (quiet) NaN."""
    flat = np.ascontiguousarray(values, np.float32).reshape(-1)
    out = np.empty(flat.size, np.uint16)
    for start in range(0, flat.size, _CHUNK):
        part = flat[start : start + _CHUNK]
        bits = part.view(np.uint32)
        rounded = (bits >> 16) & 1
        rounded += 0x7FFF
        rounded += bits
        rounded >>= 16
        out[start : start + _CHUNK] = rounded
        nan = np.isnan(part)
        if nan.any():
            out[start : start + _CHUNK][nan] = (bits[nan] >> 16) | 0x40
    return out.reshape(np.shape(values))
