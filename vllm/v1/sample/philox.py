"""Philox4x32-10, the counter-based generator of the sampler, vectorized over draws.

Source: Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (SC'11). A number is a pure function
of (key, counter), so there is no state to keep: key = the child's 64-bit seed (low word, high word), counter = the
64-bit index of the token in the child's output in words 0 and 1 (low, high), words 2 and 3 zero.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from vllm.model_executor.backends.interface import Float32s, Int64s, UInt64s

UInt32s = npt.NDArray[np.uint32]

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox4x32(counter: npt.NDArray[Any], key: npt.NDArray[Any], rounds: int = 10) -> UInt32s:
    """`counter` [..., 4] and `key` [..., 2] of 32-bit words to [..., 4] random 32-bit words."""
    c0, c1, c2, c3 = (counter[..., i].astype(np.uint64) for i in range(4))
    k0, k1 = (key[..., i].astype(np.uint64) for i in range(2))
    for _ in range(rounds):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (product1 >> _HALF) ^ c1 ^ k0,
            product1 & _LOW,
            (product0 >> _HALF) ^ c3 ^ k1,
            product0 & _LOW,
        )
        k0, k1 = (k0 + np.uint64(_WEYL[0])) & _LOW, (k1 + np.uint64(_WEYL[1])) & _LOW
    return np.stack((c0, c1, c2, c3), axis=-1).astype(np.uint32)


def uniforms(seeds: UInt64s, positions: Int64s) -> Float32s:
    """One number in [0, 1) per draw: the top 24 bits of word 0, over 2**24 (exact in fp32)."""
    seeds = np.asarray(seeds, np.uint64)
    counts = np.asarray(positions, np.int64).view(np.uint64)
    zero = np.zeros_like(counts)
    counter = np.stack((counts & _LOW, counts >> _HALF, zero, zero), axis=-1)
    key = np.stack((seeds & _LOW, seeds >> _HALF), axis=-1)
    top = philox4x32(counter, key)[..., 0] >> np.uint32(8)
    numbers: Float32s = top.astype(np.float32) * np.float32(2.0**-24)
    return numbers
