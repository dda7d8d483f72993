"""The C++ decoder (`csrc/cpu/model.cpp`) behind a Python class: a description in, whole steps out."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm.kernels import sampling
from vllm.kernels.library import KernelError, check, load
from vllm.kernels.matrix import ACTIVATIONS, ENCODED_TYPES, KINDS, SOURCE_TYPES, declare
from vllm.model_executor.backends.interface import LogprobColumns, LogprobsMode, Sampled, SamplingBatch
from vllm.model_executor.spec import DecoderSpec

_GLOBAL_SLOTS = {"embed": 0, "head": 1, "final_norm": 2}
_LAYER_SLOTS = {
    name: 3 + index
    for index, name in enumerate(
        (
            *("q", "k", "v", "o", "gate", "up", "down"),
            *("input_norm", "ffn_norm", "post_mixer_norm", "post_ffn_norm", "q_norm", "k_norm"),
            *("q_bias", "k_bias", "v_bias", "o_bias", "gate_bias", "up_bias", "down_bias"),
        )
    )
}
PHASES = ("embed", "norm", "qkv", "rope", "attention", "out", "gate_up", "down", "head")

_SIGNATURES: dict[str, tuple[Any, str]] = {
    "vllm_model_create": (ctypes.c_void_p, "plpli"),
    "vllm_model_free": (None, "p"),
    "vllm_model_set": (ctypes.c_int, "piillpi"),
    "vllm_model_make_cache": (ctypes.c_int, "pli"),
    "vllm_model_drop_cache": (None, "p"),
    "vllm_model_copy_blocks": (ctypes.c_int, "ppl"),
    "vllm_model_row_bytes": (ctypes.c_int64, "p"),
    "vllm_model_weight_bytes": (ctypes.c_int64, "p"),
    "vllm_model_block_bytes": (ctypes.c_int64, "p"),
    "vllm_model_forward": (ctypes.c_int, "pippipppiipippp"),
    "vllm_model_logits": (ctypes.c_int, "pppip"),
    "vllm_model_sample": (ctypes.c_int, "ppp"),
    "vllm_model_token_logprobs": (ctypes.c_int, "ppp"),
    "vllm_model_profile": (ctypes.c_int, "ppi"),
}
Int32s = npt.NDArray[np.int32]
Float32s = npt.NDArray[np.float32]
Hidden = npt.NDArray[np.uint8]


def slot_of(name: str) -> tuple[int, int]:
    """(layer, slot) of a canonical parameter name; the layer is -1 for what stands outside the layers."""
    if name in _GLOBAL_SLOTS:
        return -1, _GLOBAL_SLOTS[name]
    _, layer, short = name.split(".")
    return int(layer), _LAYER_SLOTS[short]


def encode_spec(spec: DecoderSpec, kind: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """The description as two flat lists, in the order in which `Model::build` reads them."""
    ropes: list[Any] = []
    for layer in spec.layers:
        if layer.mixer.rope is not None and layer.mixer.rope not in ropes:
            ropes.append(layer.mixer.rope)
    ints: list[int] = [
        spec.vocab_size,
        spec.hidden_size,
        spec.num_layers,
        int(spec.tie_word_embeddings),
        KINDS[kind],
        len(ropes),
    ]
    floats: list[float] = [spec.norm_eps, spec.embed_scale, spec.logits_softcap or 0.0, spec.logits_scale]
    for rope in ropes:
        floats += [rope.attention_factor, *rope.inv_freq]
        ints.append(len(rope.inv_freq))
    for layer in spec.layers:
        mixer, ffn = layer.mixer, layer.ffn
        ints += [
            mixer.num_heads,
            mixer.num_kv_heads,
            mixer.head_dim,
            -1 if mixer.rope is None else ropes.index(mixer.rope),
            mixer.window or 0,
            int(mixer.qkv_bias),
            int(mixer.out_bias),
            int(mixer.qk_norm),
            ffn.intermediate_size,
            ACTIVATIONS[ffn.activation],
            int(ffn.bias),
            int(layer.post_mixer_norm),
            int(layer.post_ffn_norm),
        ]
        floats += [mixer.scale, mixer.softcap or 0.0]
    return np.array(ints, np.int64), np.array(floats, np.float64)


def _pointer(array: npt.NDArray[Any]) -> int:
    return array.ctypes.data


def _int32(array: npt.NDArray[Any]) -> Int32s:
    return np.ascontiguousarray(array, np.int32)


class DecoderKernel:
    """One model: packed weights, cache and steps. Raises KernelError with the library's message.

    Used by one thread at a time; several models may run in one process and share the thread pool.
    """

    def __init__(self, spec: DecoderSpec, kind: str, threads: int, isa: str | None = None) -> None:
        self.library = load(isa)
        declare(self.library, _SIGNATURES)
        self.vocab_size = spec.vocab_size
        self.threads = threads
        ints, floats = encode_spec(spec, kind)
        self.handle: int | None = self.library.vllm_model_create(
            _pointer(ints), len(ints), _pointer(floats), len(floats), threads
        )
        if not self.handle:
            self.handle = None
            raise KernelError(self.library.vllm_last_error().decode("utf-8", "replace"))
        self.row_bytes = int(self.library.vllm_model_row_bytes(self.handle))

    def close(self) -> None:
        """Give the memory back. Nothing may be called afterwards."""
        if self.handle is not None:
            self.library.vllm_model_free(self.handle)
            self.handle = None

    def __del__(self) -> None:
        if getattr(self, "handle", None) is not None:
            self.close()

    @property
    def weight_bytes(self) -> int:
        return int(self.library.vllm_model_weight_bytes(self.handle))

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers; 0 before `make_cache`."""
        return int(self.library.vllm_model_block_bytes(self.handle))

    def set_rows(self, name: str, first: int, rows: npt.NDArray[Any], source_type: str = "float32") -> None:
        """Pack rows first .. first + len(rows) of a canonical parameter (whole for a vector)."""
        layer, slot = slot_of(name)
        dtype = {"float32": np.float32, "bfloat16": np.uint16, "float16": np.float16}[source_type]
        rows = np.ascontiguousarray(rows, dtype)
        rc = self.library.vllm_model_set(
            self.handle, layer, slot, first, len(rows), _pointer(rows), SOURCE_TYPES[source_type]
        )
        check(self.library, rc)

    def set_encoded_rows(self, name: str, first: int, rows: npt.NDArray[np.uint8], source_type: str) -> None:
        """`set_rows` for rows [count, bytes] of a matrix in one of GGUF's block formats."""
        layer, slot = slot_of(name)
        rows = np.ascontiguousarray(rows)
        rc = self.library.vllm_model_set(
            self.handle, layer, slot, first, len(rows), _pointer(rows), ENCODED_TYPES[source_type]
        )
        check(self.library, rc)

    def make_cache(self, num_blocks: int, block_size: int) -> None:
        check(self.library, self.library.vllm_model_make_cache(self.handle, num_blocks, block_size))

    def drop_cache(self) -> None:
        self.library.vllm_model_drop_cache(self.handle)

    def copy_blocks(self, pairs: Int32s) -> None:
        pairs = _int32(pairs)
        check(self.library, self.library.vllm_model_copy_blocks(self.handle, _pointer(pairs), len(pairs)))

    def forward(
        self,
        token_ids: Int32s,
        positions: Int32s,
        query_start: Int32s,
        seq_lens: Int32s,
        block_tables: Int32s,
        hidden_rows: Int32s,
        shared_rows: Int32s,
        shared_blocks: Int32s,
    ) -> Hidden:
        """One step (ForwardBatch's arrays); the final normed rows, [H, row_bytes]."""
        token_ids, positions, query_start = _int32(token_ids), _int32(positions), _int32(query_start)
        seq_lens, block_tables, hidden_rows = _int32(seq_lens), _int32(block_tables), _int32(hidden_rows)
        shared_rows, shared_blocks = _int32(shared_rows), _int32(shared_blocks)
        rows = len(seq_lens)
        if len(query_start) != rows + 1 or len(positions) != len(token_ids) or len(block_tables) != rows:
            raise KernelError("forward: arrays of different lengths")
        if shared_rows.shape != (len(shared_blocks), 2):
            raise KernelError("forward: shared_rows and shared_blocks of different lengths")
        hidden = np.empty((len(hidden_rows), self.row_bytes), np.uint8)
        rc = self.library.vllm_model_forward(
            self.handle,
            len(token_ids),
            _pointer(token_ids),
            _pointer(positions),
            rows,
            _pointer(query_start),
            _pointer(seq_lens),
            _pointer(block_tables),
            block_tables.shape[1],
            len(hidden_rows),
            _pointer(hidden_rows),
            len(shared_blocks),
            _pointer(shared_rows),
            _pointer(shared_blocks),
            _pointer(hidden),
        )
        check(self.library, rc)
        return hidden

    def logits(self, hidden: Hidden, rows: Int32s) -> Float32s:
        """Logits [len(rows), V] of some hidden rows."""
        rows = _int32(rows)
        if len(rows) and (rows.min() < 0 or rows.max() >= len(hidden)):
            raise KernelError("logits: no such hidden row")
        out = np.empty((len(rows), self.vocab_size), np.float32)
        check(
            self.library,
            self.library.vllm_model_logits(self.handle, _pointer(hidden), _pointer(rows), len(rows), _pointer(out)),
        )
        return out

    def sample(self, hidden: Hidden, batch: SamplingBatch) -> Sampled:
        """Head and sampler in one call, in tiles of rows."""

        def run(args: sampling.SamplingArgs) -> None:
            rc = self.library.vllm_model_sample(self.handle, _pointer(hidden), ctypes.byref(args))
            check(self.library, rc)

        return sampling.draw(batch, self.vocab_size, len(hidden), run, lambda rows: self.logits(hidden, rows))

    def token_logprobs(
        self, hidden: Hidden, rows: Int32s, targets: Int32s, num_logprobs: int, mode: LogprobsMode
    ) -> LogprobColumns:
        def run(args: sampling.TokenLogprobArgs) -> None:
            rc = self.library.vllm_model_token_logprobs(self.handle, _pointer(hidden), ctypes.byref(args))
            check(self.library, rc)

        return sampling.score(rows, targets, num_logprobs, mode, self.vocab_size, len(hidden), run)

    def profile(self) -> dict[str, float]:
        """Seconds spent in each phase of the steps since the last call."""
        seconds = np.zeros(len(PHASES), np.float64)
        self.library.vllm_model_profile(self.handle, _pointer(seconds), len(seconds))
        return dict(zip(PHASES, seconds.tolist(), strict=True))
