"""The sampler of `csrc/cpu/sampling*`: `SamplingBatch` in, `Sampled` out, bit for bit as vllm.v1.sample.reference.

The structures mirror csrc/cpu/sampling.h. A model runs its head and samples in one call of the library: `draw` fills
the arguments and leaves the call to its caller.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm.kernels.library import check
from vllm.model_executor.backends.interface import (
    Float32s,
    Int32s,
    LogprobColumns,
    LogprobsMode,
    Ragged,
    Sampled,
    SamplingBatch,
)
from vllm.v1.sample.columns import offsets_of
from vllm.v1.sample.reference import ERROR_NAN, ERROR_NONE, DrawError, edit_and_process

MODES: dict[LogprobsMode, int] = {"raw_logprobs": 0, "raw_logits": 1, "processed_logprobs": 2, "processed_logits": 3}
ERRORS = {1: ERROR_NAN, 2: ERROR_NONE}

_P = ctypes.c_void_p
_I = ctypes.c_int32


class RaggedArgs(ctypes.Structure):
    _fields_ = [("offsets", _P), ("ids", _P), ("values", _P)]


class SamplingArgs(ctypes.Structure):
    """struct SamplingArgs of csrc/cpu/sampling.h."""

    _fields_ = [
        ("size", _I),
        ("vocab", _I),
        ("num_rows", _I),
        ("mode", _I),
        ("rows", _P),
        ("temperature", _P),
        ("top_k", _P),
        ("top_p", _P),
        ("min_p", _P),
        ("seeds", _P),
        ("positions", _P),
        ("num_logprobs", _P),
        ("allowed", _P),
        ("banned", RaggedArgs),
        ("bias", RaggedArgs),
        ("penalties", _P),
        ("output_tokens", RaggedArgs),
        ("prompt_tokens", RaggedArgs),
        ("processed", _P),
        ("token_ids", _P),
        ("status", _P),
        ("entry_offsets", _P),
        ("entry_ids", _P),
        ("entry_values", _P),
        ("entry_ranks", _P),
    ]


class TokenLogprobArgs(ctypes.Structure):
    """struct TokenLogprobArgs of csrc/cpu/sampling.h."""

    _fields_ = [
        ("size", _I),
        ("vocab", _I),
        ("num_rows", _I),
        ("mode", _I),
        ("num_logprobs", _I),
        ("rows", _P),
        ("targets", _P),
        ("entry_ids", _P),
        ("entry_values", _P),
        ("entry_ranks", _P),
    ]


def _address(array: npt.NDArray[Any]) -> int:
    """array.ctypes.data, in a quarter of its time where the array can be written."""
    if array.flags.writeable and array.nbytes:
        buffer: Any = array
        return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    return int(array.ctypes.data)


class _Pointers:
    """Addresses of arrays of a given type and length; keeps what it had to convert alive for the call."""

    def __init__(self) -> None:
        self._kept: list[npt.NDArray[Any]] = []

    def of(self, array: npt.NDArray[Any], dtype: Any, *shape: int) -> int:
        converted = np.ascontiguousarray(array, dtype)
        if shape and converted.shape != shape:
            raise ValueError(f"sampling: an array of shape {array.shape} where {shape} is expected")
        self._kept.append(converted)
        return _address(converted)

    def of_ragged(self, ragged: Ragged, size: int) -> RaggedArgs:
        offsets = self.of(ragged.offsets, np.int32, size + 1)
        count = int(ragged.offsets[-1])
        if len(ragged.token_ids) < count or (ragged.values is not None and len(ragged.values) < count):
            raise ValueError(f"sampling: lists of {count} ids in arrays that are shorter")
        values = 0 if ragged.values is None else self.of(ragged.values, np.float32)
        return RaggedArgs(offsets, self.of(ragged.token_ids, np.int32), values)


def draw(
    batch: SamplingBatch,
    vocab: int,
    num_rows: int,
    run: Callable[[SamplingArgs], None],
    logits_of: Callable[[Int32s], Float32s],
) -> Sampled:
    """Sample `batch` from `num_rows` rows of `vocab` logits.

    `run` makes the library's call with the arguments, and raises when it is refused. `logits_of(rows)` gives
    [len(rows), vocab] logits; it is called only for draws with a logits processor, whose Python code needs them.
    """
    size = batch.size
    tokens = np.zeros(size, np.int32)
    if not size:
        return Sampled(tokens, None)
    pointers = _Pointers()
    status = np.zeros(size, np.int32)
    args = SamplingArgs(
        size,
        vocab,
        num_rows,
        MODES[batch.logprobs_mode],
        pointers.of(batch.rows, np.int32, size),
        pointers.of(batch.temperature, np.float32, size),
        pointers.of(batch.top_k, np.int32, size),
        pointers.of(batch.top_p, np.float32, size),
        pointers.of(batch.min_p, np.float32, size),
        pointers.of(batch.seeds, np.uint64, size),
        pointers.of(batch.positions, np.int64, size),
        pointers.of(batch.num_logprobs, np.int32, size),
        token_ids=_address(tokens),
        status=_address(status),
    )
    if batch.allowed is not None:
        args.allowed = pointers.of(batch.allowed, np.uint32, size, -(-vocab // 32))
    if batch.banned is not None:
        args.banned = pointers.of_ragged(batch.banned, size)
    if batch.bias is not None:
        args.bias = pointers.of_ragged(batch.bias, size)
    if batch.penalties is not None:
        args.penalties = pointers.of(batch.penalties, np.float32, size, 3)
        if batch.output_tokens is not None:
            args.output_tokens = pointers.of_ragged(batch.output_tokens, size)
        if batch.prompt_tokens is not None:
            args.prompt_tokens = pointers.of_ragged(batch.prompt_tokens, size)
    columns = None
    if int(batch.num_logprobs.max()) >= 0:
        lengths = np.where(batch.num_logprobs < 0, 0, np.minimum(batch.num_logprobs, vocab) + 1)
        offsets = offsets_of(lengths)
        count = int(offsets[-1])
        columns = LogprobColumns(
            offsets, np.empty(count, np.int32), np.empty(count, np.float32), np.zeros(size, np.int32)
        )
        args.entry_offsets = _address(offsets)
        args.entry_ids = _address(columns.token_ids)
        args.entry_values = _address(columns.logprobs)
        args.entry_ranks = _address(columns.ranks)
    errors: dict[int, str] = {}
    if batch.processors:
        processed = np.zeros(size, np.uint64)
        args.processed = _address(processed)
        for index in batch.processors:
            try:
                row = logits_of(batch.rows[index : index + 1])[0]
                processed[index] = pointers.of(edit_and_process(row, batch, index), np.float32, vocab)
            except DrawError as error:
                errors[index] = str(error)
    run(args)
    if errors or status.any():
        for index in np.flatnonzero(status).tolist():
            errors.setdefault(index, ERRORS[int(status[index])])
        failed = np.array(sorted(errors), np.intp)
        tokens[failed] = 0
        if columns is not None:
            columns = _without(columns, failed)
    return Sampled(tokens, columns, errors)


def sample(library: ctypes.CDLL, logits: Float32s, batch: SamplingBatch, threads: int) -> Sampled:
    """Sample `batch` from logits [rows, V] in memory."""
    rows = _as_rows(logits)

    def run(args: SamplingArgs) -> None:
        stride = ctypes.c_int64(rows.strides[0] // 4)
        check(library, library.vllm_sample(ctypes.byref(args), _P(rows.ctypes.data), stride, threads))

    return draw(batch, rows.shape[1], rows.shape[0], run, lambda wanted: rows[wanted])


def score(
    rows: Int32s,
    targets: Int32s,
    num_logprobs: int,
    mode: LogprobsMode,
    vocab: int,
    num_rows: int,
    run: Callable[[TokenLogprobArgs], None],
) -> LogprobColumns:
    """Log-probability of targets[i] under row rows[i], with the `num_logprobs` largest; `run` as in `draw`."""
    size, width = len(rows), min(num_logprobs, vocab) + 1
    offsets = offsets_of(np.full(size, width))
    ids = np.empty(size * width, np.int32)
    columns = LogprobColumns(offsets, ids, np.empty(size * width, np.float32), np.zeros(size, np.int32))
    if not size:
        return columns
    pointers = _Pointers()
    args = TokenLogprobArgs(
        size,
        vocab,
        num_rows,
        MODES[mode],
        num_logprobs,
        pointers.of(rows, np.int32, size),
        pointers.of(targets, np.int32, size),
        _address(columns.token_ids),
        _address(columns.logprobs),
        _address(columns.ranks),
    )
    run(args)
    return columns


def token_logprobs(
    library: ctypes.CDLL,
    logits: Float32s,
    rows: Int32s,
    targets: Int32s,
    num_logprobs: int,
    mode: LogprobsMode,
    threads: int,
) -> LogprobColumns:
    """`score` for logits [rows, V] in memory."""
    matrix = _as_rows(logits)

    def run(args: TokenLogprobArgs) -> None:
        stride = ctypes.c_int64(matrix.strides[0] // 4)
        rc = library.vllm_token_logprobs(ctypes.byref(args), _P(matrix.ctypes.data), stride, threads)
        check(library, rc)

    return score(rows, targets, num_logprobs, mode, matrix.shape[1], matrix.shape[0], run)


def _as_rows(logits: Float32s) -> Float32s:
    """Logits whose rows are contiguous; the rows themselves may be apart."""
    usable = logits.dtype == np.float32 and logits.strides[1] == 4 and logits.strides[0] % 4 == 0
    return logits if usable and logits.strides[0] > 0 else np.ascontiguousarray(logits, np.float32)


def _without(columns: LogprobColumns, failed: npt.NDArray[np.intp]) -> LogprobColumns:
    """Entries of failed draws made empty."""
    lengths = np.diff(columns.offsets)
    kept = np.ones(len(lengths), np.bool_)
    kept[failed] = False
    places = np.repeat(kept, lengths)
    columns.ranks[failed] = 0
    return LogprobColumns(
        offsets_of(np.where(kept, lengths, 0)), columns.token_ids[places], columns.logprobs[places], columns.ranks
    )
