"""How messages cross to the core's process and back: msgpack, with arrays as (dtype, bytes). Nothing is pickled.

A decoded array is a read-only view of the message's own buffer.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Generic, TypeVar, get_type_hints

import msgspec
import numpy as np

T = TypeVar("T")

_DTYPES = {np.dtype(code).str: np.dtype(code) for code in ("u1", "u4", "i4", "i8", "u8", "f4", "f8", "b1")}


def encode_hook(value: Any) -> Any:
    """What msgpack does not know: arrays, numpy scalars. Anything else is refused by the name of its type."""
    if isinstance(value, np.ndarray):
        if value.ndim != 1 or value.dtype.str not in _DTYPES:
            raise NotImplementedError(f"cannot send a {value.ndim}-dimensional array of {value.dtype} to the engine core")
        return (value.dtype.str, np.ascontiguousarray(value).data.cast("B") if value.size else b"")
    if isinstance(value, np.integer):
        return int(value)
    if isinstance(value, np.floating):
        return float(value)
    if callable(value):
        raise NotImplementedError(
            f"cannot send the callable {getattr(value, '__qualname__', type(value).__name__)!r} to a core in its own "
            "process: callables (logits_processors, collective_rpc, apply_model) need the in-process core "
            "(VLLM_ENABLE_V1_MULTIPROCESSING=0)"
        )
    raise NotImplementedError(f"cannot send a {type(value).__name__} to the engine core")


def decode_hook(expected: Any, value: Any) -> Any:
    """The inverse, for fields that are declared as arrays."""
    if isinstance(value, (list, tuple)) and len(value) == 2 and value[0] in _DTYPES:
        return np.frombuffer(value[1], dtype=_DTYPES[value[0]])
    raise msgspec.ValidationError(f"cannot decode a {expected}")


class Encoder:
    """Any of the message types to bytes."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder(enc_hook=encode_hook)

    def encode(self, value: Any) -> bytes:
        return self._encoder.encode(value)


class Decoder(Generic[T]):
    """Bytes to one message type. Raises msgspec.ValidationError (or DecodeError) on anything else."""

    def __init__(self, kind: type[T]) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind, dec_hook=decode_hook)

    def decode(self, data: bytes | memoryview) -> T:
        return self._decoder.decode(data)


def dump_config(config: Any) -> bytes:
    """A frozen configuration dataclass (nested ones too) as JSON."""
    return msgspec.json.encode(dataclasses.asdict(config))


def load_config(kind: type[T], data: bytes) -> T:
    """The inverse of `dump_config`; equal to the original."""
    return _build(kind, msgspec.json.decode(data))


def _build(kind: Any, values: dict[str, Any]) -> Any:
    hints = get_type_hints(kind)
    built = {
        name: _build(hints[name], value) if dataclasses.is_dataclass(hints[name]) else value
        for name, value in values.items()
    }
    return kind(**built)
