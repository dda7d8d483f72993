"""Reads a safetensors file: its JSON header, and tensors as views of the mapped file.

header length (u64) | header: {name: {dtype, shape, data_offsets}} | data
"""

from __future__ import annotations

import json
import mmap
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from vllm.exceptions import CheckpointError

_MAX_HEADER = 100_000_000

DTYPES: dict[str, tuple[str, int]] = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
}


class SafeTensor(NamedTuple):
    """Where a tensor lies; `dtype` is one of the values of `DTYPES`."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    num_bytes: int


class SafetensorsFile:
    """An open safetensors file. Raises `CheckpointError` saying what is wrong with it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open(path, "rb") as file:
                self.size = os.fstat(file.fileno()).st_size
                if self.size < 8:
                    raise self._fail(f"{self.size} bytes are too few for a safetensors file; it is truncated")
                self._buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise self._fail(f"cannot be read ({error.strerror})") from error
        try:
            self.tensors = self._parse()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Unmap the file, as soon as no array that views it is alive."""
        try:
            self._buffer.close()
        except BufferError:  # arrays still view it; the last one to go unmaps it
            pass

    def data(self, tensor: SafeTensor) -> npt.NDArray[Any]:
        """The tensor as a read-only view; bfloat16 as uint16 bits."""
        dtype = np.dtype("uint16" if tensor.dtype == "bfloat16" else tensor.dtype)
        count = tensor.num_bytes // dtype.itemsize
        return np.frombuffer(self._buffer, dtype, count, tensor.offset).reshape(tensor.shape)

    def _fail(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {message}")

    def _parse(self) -> dict[str, SafeTensor]:
        length = int.from_bytes(self._buffer[:8], "little")
        if length > _MAX_HEADER or 8 + length > self.size:
            raise self._fail(f"claims a header of {length} bytes, the file has {self.size}; it is truncated or corrupt")
        try:
            header = json.loads(self._buffer[8 : 8 + length])
        except (ValueError, RecursionError) as error:
            raise self._fail(f"the header is not JSON ({error})") from None
        if not isinstance(header, dict):
            raise self._fail("the header is not a JSON object")
        header.pop("__metadata__", None)
        return {name: self._tensor(name, entry, 8 + length) for name, entry in header.items()}

    def _tensor(self, name: str, entry: Any, base: int) -> SafeTensor:
        try:
            dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
            valid = isinstance(dtype, str)
            valid &= all(type(number) is int and number >= 0 for number in (*shape, begin, end))
        except (TypeError, KeyError, ValueError):
            valid = False
        if not valid:
            raise self._fail(f"the header's entry for tensor {name!r} is malformed")
        if dtype not in DTYPES:
            raise self._fail(f"tensor {name!r} has dtype {dtype}; these are read: {', '.join(DTYPES)}")
        numpy_name, item_size = DTYPES[dtype]
        num_bytes = item_size
        for size in shape:
            num_bytes *= size
        if end - begin != num_bytes:
            raise self._fail(
                f"tensor {name!r} of shape {shape} needs {num_bytes} bytes, its header gives {end - begin}"
            )
        if base + end > self.size:
            raise self._fail(f"tensor {name!r} ends at byte {base + end}, the file has {self.size}; it is truncated")
        return SafeTensor(name, shape, numpy_name, base + begin, num_bytes)
