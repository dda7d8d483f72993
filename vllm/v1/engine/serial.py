"""How messages cross to the core's process and back: msgpack, with arrays as (dtype, bytes). Nothing is pickled.

A decoded array is a read-only view of the message's own buffer.
"""

from __future__ import annotations

import builtins
import dataclasses
from typing import Any, Generic, TypeVar, get_type_hints

import msgspec
import numpy as np

from vllm import exceptions
from vllm.v1.messages import EngineCoreOutputs, EngineCoreRequest

T = TypeVar("T")

_DTYPES = {np.dtype(code).str: np.dtype(code) for code in ("u1", "u4", "i4", "i8", "u8", "f4", "f8", "b1")}


def encode_hook(value: Any) -> Any:
    """What msgpack does not know: arrays, numpy scalars. Anything else is refused by the name of its type."""
    if isinstance(value, np.ndarray):
        if value.ndim != 1 or value.dtype.str not in _DTYPES:
            raise NotImplementedError(
                f"cannot send a {value.ndim}-dimensional array of {value.dtype} to the engine core"
            )
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

    def __init__(self, kind: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind, dec_hook=decode_hook)

    def decode(self, data: bytes | memoryview) -> T:
        return self._decoder.decode(data)


def dump_config(config: Any) -> bytes:
    """A frozen configuration dataclass (nested ones too) as JSON."""
    return msgspec.json.encode(dataclasses.asdict(config))


def load_config(kind: type[T], data: bytes) -> T:
    """The inverse of `dump_config`; equal to the original."""
    config: T = _build(kind, msgspec.json.decode(data))
    return config


def _build(kind: Any, values: dict[str, Any]) -> Any:
    hints = get_type_hints(kind)
    built = {
        name: _build(hints[name], value) if dataclasses.is_dataclass(hints[name]) else value
        for name, value in values.items()
    }
    return kind(**built)


# ---- what crosses: tagged messages in both directions


class Add(msgspec.Struct, tag=0, array_like=True, gc=False):
    requests: list[EngineCoreRequest]


class Abort(msgspec.Struct, tag=1, array_like=True, gc=False):
    handles: list[int]


class StopChildren(msgspec.Struct, tag=2, array_like=True, gc=False):
    """A stop string was found in these children's text."""

    handles: list[int]


class Call(msgspec.Struct, tag=3, array_like=True):
    """A method of the core by name; its `Result` carries the same id."""

    call_id: int
    method: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}


class Hello(msgspec.Struct, tag=4, array_like=True):
    """First message to a core's process."""

    config: bytes
    """Of `dump_config`."""


class Shutdown(msgspec.Struct, tag=5, array_like=True):
    pass


class Outputs(msgspec.Struct, tag=0, array_like=True, gc=False):
    outputs: EngineCoreOutputs


class Result(msgspec.Struct, tag=1, array_like=True):
    call_id: int
    value: Any = None
    error: tuple[str, str] | None = None
    """Name of the exception's class, and its message."""


class Ready(msgspec.Struct, tag=2, array_like=True):
    """First message of a core that came up."""

    info: CoreInfo


class Failed(msgspec.Struct, tag=3, array_like=True):
    """Last message of a core that cannot go on, or did not come up."""

    error: tuple[str, str]


class CoreInfo(msgspec.Struct, array_like=True):
    """What a front end needs to know of its core."""

    pid: int
    num_blocks: int
    max_prompt_len: int
    """Longest prompt that can ever run."""


ToCore = Add | Abort | StopChildren | Call | Hello | Shutdown
FromCore = Outputs | Result | Ready | Failed


def describe_error(error: BaseException) -> tuple[str, str]:
    """An exception as it crosses."""
    return type(error).__name__, str(error)


def revive_error(error: tuple[str, str]) -> Exception:
    """The exception on the other side: of its own class if that is ours or Python's, else an EngineError naming it."""
    name, text = error
    kind = getattr(exceptions, name, None) or getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(text)
        except TypeError:  # a class whose constructor wants more
            pass
    return exceptions.EngineError(f"{name}: {text}")
