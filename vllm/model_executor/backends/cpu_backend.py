"""The CPU backend: whole steps in C++ (`csrc/cpu`), numpy on this side, no torch.

Weights are packed as they come, a few rows at a time, so that beside the packed ones there is never more than a few
megabytes of them. A step is one call for the forward pass and one for sampling; both let go of the GIL.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from vllm.config import DeviceConfig
from vllm.exceptions import ConfigError, UnsupportedError, UnsupportedSpecError, WeightError
from vllm.kernels.library import KernelLibraryError, available_threads, choose_isa
from vllm.kernels.matrix import ACTIVATIONS, ENCODED_TYPES
from vllm.kernels.model import DecoderKernel
from vllm.model_executor.backends.interface import (
    PARTITION,
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
from vllm.model_executor.spec import DecoderSpec

_CHUNK_BYTES = 8 << 20
"""Of fp32 weights decoded at a time while loading."""


class CpuBackend:
    """Runs a `DecoderSpec` with the C++ kernels. See `interface.Backend` for the order of the calls.

    dtype: "bfloat16" (weights, activations at the matrix products, and cache; sums and the residual stream are fp32) or
    "float32". quantization "int8" keeps the matrices as int8 with one scale per output; the rest as in bfloat16.
    """

    name = "cpu"

    def __init__(
        self,
        spec: DecoderSpec,
        dtype: str = "bfloat16",
        device_config: DeviceConfig | None = None,
        quantization: str | None = None,
        isa: str | None = None,
    ) -> None:
        reason = self.supports(spec, dtype, quantization)
        if reason is not None:
            raise UnsupportedSpecError(f"cpu backend: {reason}")
        asked = device_config.num_threads if device_config is not None else None
        if asked is not None and asked < 1:
            raise ConfigError(f"num_threads must be at least 1, not {asked}", "num_threads")
        self.spec = spec
        self.dtype = dtype
        self.isa = isa or choose_isa()
        self.kernel = DecoderKernel(spec, quantization or dtype, asked or available_threads(), self.isa)
        self._shapes = spec.parameters()
        self._loaded = False

    @staticmethod
    def is_available() -> str | None:
        """None when a kernel library for this machine is there, otherwise why not."""
        try:
            choose_isa()
        except KernelLibraryError as error:
            return str(error)
        return None

    @staticmethod
    def supports(spec: DecoderSpec, dtype: str, quantization: str | None = None) -> str | None:
        """None when this backend can run the model in this dtype, otherwise the part it cannot run."""
        if dtype not in ("float32", "bfloat16"):
            return f"dtype {dtype} (float32 and bfloat16 are there)"
        if quantization not in (None, "int8"):
            return f"quantization {quantization!r} (int8 is there)"
        if quantization == "int8" and dtype != "bfloat16":
            return f"int8 weights with dtype {dtype} (they run in bfloat16)"
        if dtype == "bfloat16" and spec.hidden_size % 2:
            return f"an odd hidden size ({spec.hidden_size}) in bfloat16"
        for index, layer in enumerate(spec.layers):
            if layer.mixer.tag != "attention" or layer.ffn.tag != "dense":
                return f"layer {index}: {layer.mixer.tag} mixer with {layer.ffn.tag} feed-forward"
            if layer.ffn.activation not in ACTIVATIONS:
                return f"layer {index}: activation {layer.ffn.activation!r}"
            if layer.mixer.head_dim % 2 or layer.mixer.head_dim > 1024:
                return f"layer {index}: head size {layer.mixer.head_dim} (even ones up to 1024 are there)"
            if layer.mixer.num_heads % layer.mixer.num_kv_heads:
                return f"layer {index}: {layer.mixer.num_heads} heads over {layer.mixer.num_kv_heads} kv heads"
        return None

    # Weights

    def load_weights(self, weights: Iterable[WeightTensor]) -> None:
        missing = set() if self._loaded else set(self._shapes)
        for weight in weights:
            shape = self._shapes.get(weight.name)
            if shape is None:
                raise WeightError(f"no parameter {weight.name!r} in {self.spec.architecture}")
            if tuple(weight.shape) != shape:
                raise WeightError(
                    f"{weight.name} has shape {tuple(weight.shape)}, {self.spec.architecture} needs {shape}"
                )
            self._load(weight, shape)
            missing.discard(weight.name)
        if missing:
            names = [name for name in self._shapes if name in missing]
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise WeightError(f"no weight for {', '.join(names[:5])}{more}")
        self._loaded = True

    def _load(self, weight: WeightTensor, shape: tuple[int, ...]) -> None:
        if len(shape) == 1:
            self.kernel.set_rows(weight.name, 0, weight.read())
            return
        if weight.bf16_bits is not None:
            self.kernel.set_rows(weight.name, 0, weight.bf16_bits(), "bfloat16")
            return
        if weight.raw is not None and weight.dtype in ENCODED_TYPES:
            self.kernel.set_encoded_rows(weight.name, 0, weight.raw(), weight.dtype)
            return
        if weight.read_rows is None:
            self.kernel.set_rows(weight.name, 0, weight.read())
            return
        step = max(1, _CHUNK_BYTES // (4 * shape[1]))
        for first in range(0, shape[0], step):
            self.kernel.set_rows(weight.name, first, weight.read_rows(first, min(shape[0], first + step)))

    # Cache

    def init_cache(self, num_blocks: int, block_size: int) -> None:
        if block_size < 1 or PARTITION % block_size:
            raise UnsupportedError(f"cpu backend: block size {block_size} (it must divide {PARTITION})")
        self.kernel.make_cache(num_blocks, block_size)

    def drop_cache(self) -> None:
        self.kernel.drop_cache()

    def copy_blocks(self, pairs: Int32s) -> None:
        if len(pairs):
            self.kernel.copy_blocks(pairs)

    # Steps

    def forward(self, batch: ForwardBatch) -> Hidden:
        if not self._loaded:
            raise WeightError("forward before load_weights")
        hidden = self.kernel.forward(
            batch.token_ids,
            batch.positions,
            batch.query_start,
            batch.seq_lens,
            batch.block_tables,
            batch.hidden_rows,
            batch.shared_rows,
            batch.shared_blocks,
        )
        return Hidden(hidden)

    def keep(self, hidden: Hidden, rows: Int32s) -> Hidden:
        assert isinstance(hidden, np.ndarray)
        return Hidden(hidden[rows])

    def logits(self, hidden: Hidden, rows: Int32s) -> Float32s:
        """fp32 logits [len(rows), V], after scale and soft-cap."""
        assert isinstance(hidden, np.ndarray)
        return self.kernel.logits(hidden, rows)

    def sample(self, hidden: Hidden, batch: SamplingBatch) -> Sampled:
        assert isinstance(hidden, np.ndarray)
        return self.kernel.sample(hidden, batch)

    def token_logprobs(
        self, hidden: Hidden, rows: Int32s, targets: Int32s, num_logprobs: int, mode: LogprobsMode
    ) -> LogprobColumns:
        assert isinstance(hidden, np.ndarray)
        return self.kernel.token_logprobs(hidden, rows, targets, num_logprobs, mode)

    def close(self) -> None:
        self.kernel.close()
