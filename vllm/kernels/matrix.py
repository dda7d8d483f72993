"""One packed matrix of `csrc/cpu/gemm.cpp` by itself: what the kernel's tests and its benchmark drive."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm.kernels.library import KernelError, check, load

KINDS = {"float32": 0, "bfloat16": 1, "int8": 2}
"""Weight kinds of gemm.h. int8 runs with bf16 activations."""

SOURCE_TYPES = {"float32": 0, "bfloat16": 1, "float16": 2}
"""What rows of a weight may be handed over as (bf16 as its bits)."""

ENCODED_TYPES = {
    name: 10 + index for index, name in enumerate(("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"))
}
"""GGUF's block formats, handed over as their bytes."""

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu": 2}

_TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int32, "l": ctypes.c_int64}

Float32s = npt.NDArray[np.float32]


def declare(library: ctypes.CDLL, signatures: dict[str, tuple[Any, str]]) -> None:
    """Set result and argument types: p pointer, i int32, l int64."""
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = [_TYPES[kind] for kind in arguments]


_SIGNATURES: dict[str, tuple[Any, str]] = {
    "vllm_matrix_create": (ctypes.c_void_p, "illi"),
    "vllm_matrix_free": (None, "p"),
    "vllm_matrix_pack": (ctypes.c_int, "pllpii"),
    "vllm_matrix_row": (ctypes.c_int, "plp"),
    "vllm_matrix_multiply": (ctypes.c_int, "pplppiip"),
}


class PackedMatrix:
    """Weights [n, k] packed as `kind`. With `gated` the first half of the outputs are gates, the second half ups."""

    def __init__(
        self, n: int, k: int, kind: str, gated: bool = False, threads: int = 1, isa: str | None = None
    ) -> None:
        self.library = load(isa)
        declare(self.library, _SIGNATURES)
        self.shape, self.gated, self.threads, self.seconds = (n, k), gated, threads, 0.0
        self.handle: int | None = self.library.vllm_matrix_create(KINDS[kind], n, k, int(gated))
        if not self.handle:
            raise KernelError(self.library.vllm_last_error().decode())

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self.library.vllm_matrix_free(self.handle)

    def pack(self, rows: npt.NDArray[Any], first: int = 0, source_type: str = "float32") -> None:
        """Rows first .. first + len(rows), as fp32, fp16, bf16 bits, or GGUF blocks [rows, bytes]."""
        rows = np.ascontiguousarray(rows)
        code = SOURCE_TYPES.get(source_type, ENCODED_TYPES.get(source_type, -1))
        rc = self.library.vllm_matrix_pack(self.handle, first, len(rows), rows.ctypes.data, code, self.threads)
        check(self.library, rc)

    def row(self, output: int) -> Float32s:
        """One output's weights as the kernel sees them."""
        out = np.empty(self.shape[1], np.float32)
        check(self.library, self.library.vllm_matrix_row(self.handle, output, out.ctypes.data))
        return out

    def multiply(self, a: Float32s, bias: Float32s | None = None, activation: str | None = None) -> Float32s:
        """a [m, k] times the weights: [m, n], or with an activation act(gate) * up [m, n / 2].

        `seconds` afterwards has the time of the product alone.
        """
        a = np.ascontiguousarray(a, np.float32)
        if a.ndim != 2 or a.shape[1] != self.shape[1]:
            raise KernelError(f"multiply: rows of shape {a.shape} with weights of shape {self.shape}")
        out = np.empty((len(a), self.shape[0] // 2 if activation else self.shape[0]), np.float32)
        bias_at = None if bias is None else np.ascontiguousarray(bias, np.float32)
        seconds = np.zeros(1)
        rc = self.library.vllm_matrix_multiply(
            self.handle,
            a.ctypes.data,
            len(a),
            out.ctypes.data,
            None if bias_at is None else bias_at.ctypes.data,
            -1 if activation is None else ACTIVATIONS[activation],
            self.threads,
            seconds.ctypes.data,
        )
        check(self.library, rc)
        self.seconds = float(seconds[0])
        return out
