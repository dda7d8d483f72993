"""The reference backend: `TorchDecoder` and `torch_attention` behind the backend interface, on a CPU or a GPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vllm.config import DeviceConfig
from vllm.exceptions import UnsupportedSpecError, WeightError
from vllm.model_executor.backends.interface import (
    Float32s,
    ForwardBatch,
    Hidden,
    Int32s,
    LogprobColumns,
    LogprobsMode,
    Sampled,
    SamplingBatch,
    WeightTensor,
)
from vllm.model_executor.backends.torch_products import MIN_TILE, Matrix
from vllm.model_executor.spec import AttentionSpec, DecoderSpec
from vllm.model_executor.torch_decoder import ACTIVATIONS, TorchDecoder
from vllm.v1.attention.torch_attention import PagedCache, Plan, attend, make_plan, slot_mapping
from vllm.v1.sample.columns import concatenate
from vllm.v1.sample.reference import sample_in_tiles, token_logprobs

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_LOAD_ROWS = 4096
_LOGITS_ELEMENTS = 1 << 24  # of one tile of logits rows


class TorchBackend:
    """See `interface.Backend`. Weights are kept in `dtype` (or int8 with a scale per output channel); sums are fp32."""

    name = "torch"

    def __init__(
        self,
        spec: DecoderSpec,
        dtype: str,
        device_config: DeviceConfig | None = None,
        quantization: str | None = None,
    ) -> None:
        device_config = device_config or DeviceConfig()
        reason = self.supports(spec, dtype, quantization)
        if reason is not None:
            raise UnsupportedSpecError(f"the torch backend cannot run this model: {reason}")
        if device_config.num_threads is not None and device_config.device == "cpu":
            torch.set_num_threads(device_config.num_threads)
        self.spec = spec
        self.device = torch.device(device_config.device)
        self.dtype = DTYPES[dtype]
        self._int8 = quantization == "int8"
        self._decoder = TorchDecoder(spec, self.dtype, self.device)
        self._parameters = spec.parameters()
        self._caches: list[PagedCache] = []
        self._block_size = self._num_blocks = 0

    @staticmethod
    def is_available() -> str | None:
        """None: it can be imported, so that it can be used."""
        return None

    @staticmethod
    def supports(spec: DecoderSpec, dtype: str, quantization: str | None = None) -> str | None:
        """Why this backend cannot run `spec` in `dtype`, or None."""
        if dtype not in DTYPES:
            return f"dtype {dtype} ({', '.join(DTYPES)} are there)"
        if quantization not in (None, "int8"):
            return f"quantization {quantization!r} (int8 is there)"
        for layer in spec.layers:
            if layer.mixer.tag != "attention":
                return f"mixer {layer.mixer.tag}"
            if layer.ffn.tag != "dense":
                return f"feed-forward part {layer.ffn.tag}"
            if layer.ffn.activation not in ACTIVATIONS:
                return f"activation {layer.ffn.activation}"
            rope = layer.mixer.rope
            if rope is not None and rope.rotary_dim != layer.mixer.head_dim:
                return "rope over a part of the head"
        return None

    # Weights

    @torch.inference_mode()
    def load_weights(self, weights: Iterable[WeightTensor]) -> None:
        decoder = self._decoder
        for weight in weights:
            expected = self._parameters.get(weight.name)
            if expected is None:
                raise WeightError(f"weight {weight.name!r} is not a parameter of {self.spec.architecture}")
            if tuple(weight.shape) != expected:
                raise WeightError(f"weight {weight.name!r} has shape {tuple(weight.shape)}, not {expected}")
            if len(expected) == 1:
                decoder.vectors[weight.name] = self._tensor(np.array(weight.read(), np.float32))
                continue
            matrix = decoder.matrices.get(weight.name)
            if matrix is None:
                matrix = Matrix(expected, self.dtype, self.device, self._int8)
            self._fill(matrix, weight)
            decoder.matrices[weight.name] = matrix
        missing = [name for name in self._parameters if name not in decoder.matrices and name not in decoder.vectors]
        if missing:
            more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
            raise WeightError(f"no weight fills {', '.join(missing[:5])}{more} of {self.spec.architecture}")

    def _fill(self, matrix: Matrix, weight: WeightTensor) -> None:
        if self.dtype == torch.bfloat16 and weight.bf16_bits is not None and not self._int8:
            bits = self._tensor(np.array(weight.bf16_bits(), np.uint16).view(np.int16))
            matrix.data.copy_(bits.view(torch.bfloat16))
        elif weight.read_rows is None:
            matrix.set_rows(0, self._tensor(weight.read()))
        else:
            for start in range(0, weight.shape[0], _LOAD_ROWS):
                stop = min(start + _LOAD_ROWS, weight.shape[0])
                matrix.set_rows(start, self._tensor(weight.read_rows(start, stop)))

    def _tensor(self, array: npt.NDArray[Any]) -> Tensor:
        """An array on the device. On a CPU it may share the array's memory."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*not writable.*")  # it is only read
            tensor = torch.from_numpy(np.ascontiguousarray(array))
        return tensor.to(self.device)

    # Cache

    def init_cache(self, num_blocks: int, block_size: int) -> None:
        self._num_blocks, self._block_size = num_blocks, block_size
        self._caches = [
            PagedCache(layer.mixer, num_blocks, block_size, self.dtype, self.device) for layer in self.spec.layers
        ]

    def drop_cache(self) -> None:
        self._caches = []

    @torch.inference_mode()
    def copy_blocks(self, pairs: Int32s) -> None:
        if len(pairs) == 0:
            return
        sources, targets = (self._tensor(pairs[:, side].astype(np.int64)) for side in (0, 1))
        for cache in self._caches:
            cache.copy_blocks(sources, targets)

    # Steps

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> Hidden:
        if len(self._caches) != self.spec.num_layers:
            raise RuntimeError("forward before init_cache")
        num_tokens = len(batch.token_ids)
        padded = -(-num_tokens // MIN_TILE) * MIN_TILE
        token_ids = torch.zeros(padded, dtype=torch.int64, device=self.device)
        positions = torch.zeros_like(token_ids)
        token_ids[:num_tokens] = self._tensor(batch.token_ids)
        positions[:num_tokens] = self._tensor(batch.positions)
        slots = self._tensor(slot_mapping(batch, self._block_size))
        plans: dict[tuple[int, int, int, int | None], Plan] = {}

        def attend_layer(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            mixer, cache = self.spec.layers[index].mixer, self._caches[index]
            cache.write(slots, k[:num_tokens], v[:num_tokens])
            out = q.new_zeros(padded, mixer.num_heads * mixer.head_dim)
            out[:num_tokens] = attend(q[:num_tokens], cache, self._plan(plans, batch, mixer), mixer)
            return out

        x = self._decoder.forward(token_ids, positions, attend_layer)
        rows = x.index_select(0, self._tensor(batch.hidden_rows.astype(np.int64)))
        return cast(Hidden, self._decoder.final_norm(rows))

    def _plan(self, plans: dict[Any, Plan], batch: ForwardBatch, mixer: AttentionSpec) -> Plan:
        key = (mixer.num_heads, mixer.num_kv_heads, mixer.head_dim, mixer.window)
        if key not in plans:
            plans[key] = make_plan(batch, mixer, self._block_size, self._num_blocks, self.device)
        return plans[key]

    @torch.inference_mode()
    def keep(self, hidden: Hidden, rows: Int32s) -> Hidden:
        return cast(Hidden, self._rows(hidden, rows))

    def _rows(self, hidden: Hidden, rows: npt.NDArray[Any]) -> Tensor:
        return cast(Tensor, hidden).index_select(0, self._tensor(rows.astype(np.int64)))

    @property
    def _tile_rows(self) -> int:
        return max(1, _LOGITS_ELEMENTS // self.spec.vocab_size)

    @torch.inference_mode()
    def logits(self, hidden: Hidden, rows: Int32s) -> Float32s:
        """Logits [len(rows), V] of some hidden rows."""
        chosen = self._rows(hidden, rows)
        padding = -len(chosen) % MIN_TILE
        logits = self._decoder.logits(torch.nn.functional.pad(chosen, (0, 0, 0, padding)))
        return cast(Float32s, logits[: len(chosen)].cpu().numpy())

    def sample(self, hidden: Hidden, batch: SamplingBatch) -> Sampled:
        return sample_in_tiles(lambda rows: self.logits(hidden, rows), batch, self._tile_rows)

    def token_logprobs(
        self, hidden: Hidden, rows: Int32s, targets: Int32s, num_logprobs: int, mode: LogprobsMode
    ) -> LogprobColumns:
        parts = []
        for start in range(0, max(len(rows), 1), self._tile_rows):
            part = slice(start, start + self._tile_rows)
            parts.append(token_logprobs(self.logits(hidden, rows[part]), targets[part], num_logprobs, mode))
        return concatenate(parts)

    def close(self) -> None:
        self.drop_cache()
        self._decoder.matrices.clear()
        self._decoder.vectors.clear()
