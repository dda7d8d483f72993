"""Reads a GGUF file's header: metadata decoded when asked for, tensors as places in the mapped file.

The `gguf` package decodes every string of a vocabulary while it opens a file (seconds); this reader steps over them.
Everything a file claims is checked against its size before it is believed.

    "GGUF" version  tensor count  key count | key type value ... | name dims type offset ... | padding | tensor data
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from vllm.exceptions import CheckpointError

MAGIC = b"GGUF"
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", _BOOL: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_SCALAR_STRUCTS = {kind: struct.Struct(form) for kind, form in _SCALARS.items()}
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_MAX_NAME = 65_535
_MAX_DIMS = 4

BLOCK_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}
"""Type number -> (name, elements per block, bytes per block) of the formats this project decodes itself."""

OTHER_TYPES = {
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
}
"""Formats known by name only, so that refusing them can say which one it was."""


class GGUFTensor(NamedTuple):
    """Where a tensor lies. `shape` is row-major (outermost first); a row is a whole number of blocks."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    offset: int
    num_bytes: int


class _Field(NamedTuple):
    kind: int
    item_kind: int  # of an array
    length: int  # of an array
    start: int  # of the value; for an array, of its first element
    end: int


class GGUFMetadata(Mapping[str, Any]):
    """The file's key-value pairs. A value is decoded on each access: a scalar, a str, a list of str, or a read-only
    numpy view of a numeric array."""

    def __init__(self, buffer: mmap.mmap, fields: dict[str, _Field]) -> None:
        self._buffer = buffer
        self._fields = fields

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __contains__(self, key: object) -> bool:
        return key in self._fields

    def __getitem__(self, key: str) -> Any:
        field = self._fields[key]
        if field.kind in _SCALAR_STRUCTS:
            return _SCALAR_STRUCTS[field.kind].unpack_from(self._buffer, field.start)[0]
        if field.kind == _STRING:
            return self._buffer[field.start : field.end].decode("utf-8", "replace")
        if field.item_kind == _STRING:
            return [text.decode("utf-8", "replace") for text in self.byte_strings(key)]
        dtype = np.dtype(_SCALARS[field.item_kind][1:]).newbyteorder("<")
        return np.frombuffer(self._buffer, dtype, field.length, field.start)

    def array_length(self, key: str) -> int:
        """Number of elements of an array, without decoding it."""
        field = self._fields[key]
        if field.kind != _ARRAY:
            raise CheckpointError(f"GGUF key {key} is not an array")
        return field.length

    def byte_strings(self, key: str) -> list[bytes]:
        """An array of strings as the file has them."""
        field = self._fields[key]
        if (field.kind, field.item_kind) != (_ARRAY, _STRING):
            raise CheckpointError(f"GGUF key {key} is not an array of strings")
        data = self._buffer[field.start : field.end]
        unpack, position, texts = _U64.unpack_from, 0, []
        for _ in range(field.length):
            start = position + 8
            position = start + unpack(data, position)[0]
            texts.append(data[start:position])
        return texts

    def find_strings(self, key: str, texts: list[str]) -> list[int]:
        """Indices, in an array of strings, of those of `texts` that are in it; reads no further than it must."""
        field, buffer, unpack = self._fields[key], self._buffer, _U64.unpack_from
        places = {}
        for text in texts:
            encoded = text.encode()
            place = buffer.find(_U64.pack(len(encoded)) + encoded, field.start, field.end)
            if place >= 0:
                places[place] = text
        found: dict[str, int] = {}
        position, last = field.start, max(places, default=-1)
        for index in range(field.length):
            if position > last:
                break
            if position in places:
                found[places[position]] = index
            position += 8 + unpack(buffer, position)[0]
        return [found[text] for text in texts if text in found]

    def encoded(self, key: str) -> bytes:
        """A value's bytes in the file (a copy); equal bytes mean equal values, so this is what to hash."""
        field = self._fields[key]
        return self._buffer[field.start : field.end]


class GGUFFile:
    """An open GGUF file. Raises `CheckpointError` saying what is wrong with it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open(path, "rb") as file:
                self.size = os.fstat(file.fileno()).st_size
                if self.size < 24:
                    raise CheckpointError(f"{path}: {self.size} bytes are too few for a GGUF file; it is truncated")
                self._buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
        try:
            self._parse()
        except (struct.error, OverflowError):
            self.close()
            raise CheckpointError(f"{path}: the header reaches past the end of the file; it is truncated") from None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Unmap the file, as soon as no array that views it is alive."""
        try:
            self._buffer.close()
        except BufferError:  # arrays still view it; the last one to go unmaps it
            pass

    def data(self, tensor: GGUFTensor) -> npt.NDArray[np.uint8]:
        """The tensor's encoded bytes, a read-only view."""
        return np.frombuffer(self._buffer, np.uint8, tensor.num_bytes, tensor.offset)

    def _fail(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {message}")

    def _parse(self) -> None:
        buffer = self._buffer
        if buffer[:4] != MAGIC:
            raise self._fail("not a GGUF file (wrong magic number)")
        (version,) = _U32.unpack_from(buffer, 4)
        if version not in (2, 3):
            if version & 0xFFFF == 0:
                raise self._fail("a big-endian GGUF file; only little-endian ones are read")
            raise self._fail(f"GGUF version {version}; versions 2 and 3 are read")
        (num_tensors,), (num_fields,) = _U64.unpack_from(buffer, 8), _U64.unpack_from(buffer, 16)
        if num_tensors > self.size // 24 or num_fields > self.size // 12:
            raise self._fail(f"claims {num_tensors} tensors and {num_fields} keys, more than the file can hold")
        position, fields = 24, {}
        for _ in range(num_fields):
            key, position = self._name(position)
            field = self._field(key, position)
            if key in fields:
                raise self._fail(f"key {key!r} occurs twice")
            fields[key] = field
            position = field.end
        self.metadata = GGUFMetadata(buffer, fields)
        self.tensors = self._tensors(position, num_tensors)

    def _name(self, position: int) -> tuple[str, int]:
        (length,) = _U64.unpack_from(self._buffer, position)
        start = position + 8
        if length > _MAX_NAME or start + length > self.size:
            raise self._fail(f"a name of {length} bytes at offset {position}; the file is truncated or corrupt")
        return self._buffer[start : start + length].decode("utf-8", "replace"), start + length

    def _field(self, key: str, position: int) -> _Field:
        buffer, size = self._buffer, self.size
        (kind,) = _U32.unpack_from(buffer, position)
        start = position + 4
        if kind in _SCALAR_STRUCTS:
            field = _Field(kind, 0, 0, start, start + _SCALAR_STRUCTS[kind].size)
        elif kind == _STRING:
            (length,) = _U64.unpack_from(buffer, start)
            field = _Field(kind, 0, 0, start + 8, start + 8 + length)
        elif kind == _ARRAY:
            (item_kind,), (count,) = _U32.unpack_from(buffer, start), _U64.unpack_from(buffer, start + 4)
            start += 12
            if item_kind in _SCALAR_STRUCTS:
                end = start + count * _SCALAR_STRUCTS[item_kind].size
            elif item_kind == _STRING:
                if count > size // 8:
                    raise self._fail(f"key {key!r} claims {count} strings, more than the file can hold")
                end, unpack = start, _U64.unpack_from
                for _ in range(count):
                    end += 8 + unpack(buffer, end)[0]
            else:
                raise self._fail(f"key {key!r} is an array of type {item_kind}, which is not read")
            field = _Field(kind, item_kind, count, start, end)
        else:
            raise self._fail(f"key {key!r} has the unknown type {kind}")
        if field.end > size:
            raise self._fail(f"the value of key {key!r} reaches past the end of the file; it is truncated")
        return field

    def _tensors(self, position: int, count: int) -> dict[str, GGUFTensor]:
        buffer = self._buffer
        headers = []
        for _ in range(count):
            name, position = self._name(position)
            (num_dims,) = _U32.unpack_from(buffer, position)
            if not 1 <= num_dims <= _MAX_DIMS:
                raise self._fail(f"tensor {name!r} has {num_dims} dimensions")
            dims = struct.unpack_from(f"<{num_dims}Q", buffer, position + 4)
            position += 4 + 8 * num_dims
            type_number, offset = struct.unpack_from("<IQ", buffer, position)
            position += 12
            headers.append((name, dims[::-1], type_number, offset))
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self._fail(f"general.alignment is {alignment!r}, not a power of two")
        base = -(-position // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        for name, shape, type_number, offset in headers:
            type_name, block_size, block_bytes = self._type(name, type_number)
            elements = 1
            for size in shape:
                elements *= size
            if elements == 0 or shape[-1] % block_size:
                raise self._fail(f"tensor {name!r} of shape {shape} cannot be {type_name} (blocks of {block_size})")
            num_bytes = elements // block_size * block_bytes
            if base + offset + num_bytes > self.size:
                raise self._fail(
                    f"tensor {name!r} needs bytes {base + offset} to {base + offset + num_bytes}, "
                    f"the file has {self.size}; it is truncated"
                )
            if offset % alignment:
                raise self._fail(f"tensor {name!r} starts at {offset}, not a multiple of the alignment {alignment}")
            if name in tensors:
                raise self._fail(f"tensor {name!r} occurs twice")
            tensors[name] = GGUFTensor(name, tuple(shape), type_name, base + offset, num_bytes)
        return tensors

    def _type(self, tensor: str, number: int) -> tuple[str, int, int]:
        if number in BLOCK_TYPES:
            return BLOCK_TYPES[number]
        known = ", ".join(name for name, _, _ in BLOCK_TYPES.values())
        raise self._fail(f"tensor {tensor!r} has the type {OTHER_TYPES.get(number, number)}; these are read: {known}")
