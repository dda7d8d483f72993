"""The GPU backend: Triton kernels behind the backend interface, and CUDA graphs for decode steps.

The roundings are the reference's (`torch_decoder`): values between matrix products are fp32, their inputs, q, K and V
are in the model's dtype, sums are fp32. Per layer: norm with residual; qkv; q/k-norm, rope and cache write; attention;
o; norm with residual; gate and up; activation; down.

A step's integers travel in one copy from a pinned buffer to a fixed place on the device, so that a captured graph finds
them there. Nothing waits for the device before `sample` fetches its tokens. Where the kernels run (a card, or Triton's
interpreter on a CPU) is known to `kernels/triton/runtime.py` alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vllm.config import DeviceConfig
from vllm.exceptions import UnsupportedError, UnsupportedSpecError, WeightError
from vllm.kernels.triton import sampler
from vllm.kernels.triton.attention import FIELDS, DeviceTasks, Kind, Scratch, Tasks, attend, plan
from vllm.kernels.triton.elementwise import ACTIVATIONS, add_norm, gate, rope_cache
from vllm.kernels.triton.gemm import linear
from vllm.kernels.triton.runtime import DEVICE, power_of_2, to_device, unavailable
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
from vllm.model_executor.spec import AttentionSpec, DecoderSpec, LayerSpec, RopeSpec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MAX_GRAPH_ROWS = 1024
"""Decode steps of more rows run eagerly."""
_LOAD_ROWS = 4096
_LOGITS_ELEMENTS = 1 << 26  # of one tile of logits rows
_MAX_HEAD_DIM = 256


class TritonBackend:
    """See `interface.Backend`. Where a card is, decode steps are replayed from CUDA graphs (`use_graphs`)."""

    name = "triton"

    def __init__(
        self,
        spec: DecoderSpec,
        dtype: str,
        device_config: DeviceConfig | None = None,
        quantization: str | None = None,
    ) -> None:
        device_config = device_config or DeviceConfig(device="cpu" if DEVICE == "cpu" else "cuda")
        reason = self.supports(spec, dtype, quantization)
        if reason is not None:
            raise UnsupportedSpecError(f"the triton backend cannot run this model: {reason}")
        if device_config.device != DEVICE:
            raise UnsupportedError(
                f"the triton backend with device={device_config.device!r}: here it runs on {DEVICE!r} "
                "(on a CPU only in Triton's interpreter, with TRITON_INTERPRET=1 from the start, for tests)"
            )
        self.spec = spec
        self.device = torch.device(DEVICE)
        self.dtype = DTYPES[dtype]
        self.use_graphs = self.device.type == "cuda" and not device_config.enforce_eager
        self._batch_variant = device_config.allow_batch_variance
        self._parameters = spec.parameters()
        self._vectors: dict[str, Tensor] = {}
        self._matrices: dict[str, Tensor] = {}
        self._places = {name: _place(spec, name) for name in self._parameters}
        self._loaded: set[str] = set()
        self._kinds = list(dict.fromkeys(Kind.of(layer.mixer) for layer in spec.layers))
        self._ropes: dict[RopeSpec, tuple[Tensor, Tensor]] = {}
        self._caches: list[tuple[Tensor, Tensor]] = []
        self._block_size = 0
        self._staging = _Staging(self.device)
        self._scratch = Scratch(self.device)
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._pool: Any = None

    @staticmethod
    def is_available() -> str | None:
        """None, or why the kernels cannot run here."""
        return unavailable()

    @staticmethod
    def supports(spec: DecoderSpec, dtype: str, quantization: str | None = None) -> str | None:
        """Why this backend cannot run `spec` in `dtype`, or None."""
        if dtype not in DTYPES:
            return f"dtype {dtype} ({', '.join(DTYPES)} are there)"
        if quantization is not None:
            return f"quantization {quantization!r} (not built for the triton backend)"
        for layer in spec.layers:
            mixer, ffn = layer.mixer, layer.ffn
            if mixer.tag != "attention":
                return f"mixer {mixer.tag}"
            if ffn.tag != "dense":
                return f"feed-forward part {ffn.tag}"
            if ffn.activation not in ACTIVATIONS:
                return f"activation {ffn.activation}"
            if mixer.head_dim > _MAX_HEAD_DIM:
                return f"head size {mixer.head_dim} (at most {_MAX_HEAD_DIM})"
            if mixer.num_heads // mixer.num_kv_heads > 64:
                return f"{mixer.num_heads // mixer.num_kv_heads} heads per K/V head (at most 64)"
        return None

    # Weights

    @torch.inference_mode()
    def load_weights(self, weights: Iterable[WeightTensor]) -> None:
        """See `interface.Backend`. q, k and v stand in one matrix, and so do gate and up."""
        for weight in weights:
            expected = self._parameters.get(weight.name)
            if expected is None:
                raise WeightError(f"weight {weight.name!r} is not a parameter of {self.spec.architecture}")
            if tuple(weight.shape) != expected:
                raise WeightError(f"weight {weight.name!r} has shape {tuple(weight.shape)}, not {expected}")
            name, first, rows = self._places[weight.name]
            if len(expected) == 1:
                vector = self._vectors.get(name)
                if vector is None:
                    vector = self._vectors[name] = torch.zeros(rows, device=self.device)
                vector[first : first + expected[0]] = self._tensor(np.array(weight.read(), np.float32))
            else:
                matrix = self._matrices.get(name)
                if matrix is None:
                    matrix = torch.zeros(rows, expected[1], dtype=self.dtype, device=self.device)
                    self._matrices[name] = matrix
                self._fill(matrix[first : first + expected[0]], weight)
            self._loaded.add(weight.name)
        missing = [name for name in self._parameters if name not in self._loaded]
        if missing:
            more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
            raise WeightError(f"no weight fills {', '.join(missing[:5])}{more} of {self.spec.architecture}")

    def _fill(self, rows: Tensor, weight: WeightTensor) -> None:
        if self.dtype == torch.bfloat16 and weight.bf16_bits is not None:
            rows.copy_(self._tensor(np.array(weight.bf16_bits(), np.uint16).view(np.int16)).view(torch.bfloat16))
        elif weight.read_rows is None:
            rows.copy_(self._tensor(np.array(weight.read(), np.float32)))
        else:
            for start in range(0, weight.shape[0], _LOAD_ROWS):
                stop = min(start + _LOAD_ROWS, weight.shape[0])
                rows[start:stop] = self._tensor(np.array(weight.read_rows(start, stop), np.float32))

    def _tensor(self, array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    # Cache

    def init_cache(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._caches = []
        for layer in self.spec.layers:
            shape = (num_blocks * block_size, layer.mixer.num_kv_heads, layer.mixer.head_dim)
            k, v = (torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(2))
            self._caches.append((k, v))
        self._graphs.clear()

    def drop_cache(self) -> None:
        self._caches = []
        self._graphs.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def copy_blocks(self, pairs: Int32s) -> None:
        if len(pairs) == 0:
            return
        sources, targets = (to_device(pairs[:, side].astype(np.int64), self.device) for side in (0, 1))
        for caches in self._caches:
            for cache in caches:
                blocks = cache.view(-1, self._block_size, *cache.shape[1:])
                blocks.index_copy_(0, targets, blocks.index_select(0, sources))

    # Steps

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> Hidden:
        if not self._caches:
            raise RuntimeError("forward before init_cache")
        tasks = [plan(batch, kind, self._block_size) for kind in self._kinds]
        tokens = len(batch.token_ids)
        decode = tokens == len(batch.seq_lens)
        if self.use_graphs and decode and 0 < tokens <= MAX_GRAPH_ROWS:
            hidden = self._replay(batch, tasks)
        else:
            width = batch.block_tables.shape[1]
            shapes = [(len(part.fused), len(part.split), part.partitions, part.span) for part in tasks]
            self._reach(int(batch.seq_lens.max(initial=0)))
            hidden = self._run(self._stage(batch, tasks, tokens, len(batch.seq_lens), width, shapes))
        return cast(Hidden, hidden.index_select(0, to_device(batch.hidden_rows, self.device)))

    def _stage(
        self,
        batch: ForwardBatch,
        tasks: list[Tasks],
        tokens: int,
        rows: int,
        width: int,
        shapes: list[tuple[int, int, int, int]],
    ) -> _Inputs:
        """The step's integers on the device, padded to `tokens`, `rows`, block tables of `width`, and per kind of layer
        `shapes`: (fused tasks, split tasks, partitions, span)."""
        slots = _slots(batch, self._block_size)
        parts: list[tuple[Int32s, tuple[int, ...], int]] = [  # values, padded shape, what padding holds
            (batch.token_ids, (tokens,), 0),
            (batch.positions, (tokens,), -1),
            (slots, (tokens,), -1),
            (batch.block_tables[:, :width], (rows, width), 0),
        ]
        for part, (fused, split, _, _) in zip(tasks, shapes, strict=True):
            parts += [(part.fused, (fused, FIELDS), 0), (part.split, (split, FIELDS), 0)]
            parts.append((part.merged, (rows if split else 0,), -1))
        views = iter(self._staging.send(parts))
        token_ids, positions, slot_ids, tables = (next(views) for _ in range(4))
        kinds = {}
        for kind, (_, _, partitions, span) in zip(self._kinds, shapes, strict=True):
            kinds[kind] = DeviceTasks(next(views), next(views), next(views), partitions, span)
        return _Inputs(token_ids, positions, slot_ids, tables, kinds)

    def _run(self, inputs: _Inputs) -> Tensor:
        """All layers -> final, normed hidden rows [T, D] in the model's dtype. Allocates, but never waits."""
        spec = self.spec
        x = self._matrices["embed"].index_select(0, inputs.token_ids).float()
        if spec.embed_scale != 1.0:
            x *= spec.embed_scale
        add: Tensor | None = None
        add_weight: Tensor | None = None
        for index, layer in enumerate(spec.layers):
            name = f"layers.{index}."
            h = self._add_norm(x, name + "input_norm", add, add_weight)
            a = self._attention(h, index, layer.mixer, inputs)
            h = self._add_norm(x, name + "ffn_norm", a, self._vectors.get(name + "post_mixer_norm"))
            add = self._feed_forward(h, name, layer)
            add_weight = self._vectors.get(name + "post_ffn_norm")
        return self._add_norm(x, "final_norm", add, add_weight)

    def _add_norm(self, x: Tensor, name: str, add: Tensor | None, add_weight: Tensor | None) -> Tensor:
        return add_norm(x, self._vectors[name], self.spec.norm_eps, self.dtype, add, add_weight)

    def _attention(self, h: Tensor, index: int, mixer: AttentionSpec, inputs: _Inputs) -> Tensor:
        name = f"layers.{index}."
        qkv = self._linear(h, name + "qkv")
        k_cache, v_cache = self._caches[index]
        norms = (self._vectors[name + "q_norm"], self._vectors[name + "k_norm"]) if mixer.qk_norm else None
        rope = None if mixer.rope is None else self._ropes[mixer.rope]
        q = rope_cache(
            qkv, k_cache, v_cache, inputs.positions, inputs.slots, mixer.num_heads, rope, norms, self.spec.norm_eps
        )
        a = attend(
            q,
            k_cache,
            v_cache,
            inputs.positions,
            inputs.tables,
            inputs.kinds[Kind.of(mixer)],
            mixer,
            self._block_size,
            self._scratch,
        )
        return self._linear(a, name + "o")

    def _feed_forward(self, h: Tensor, name: str, layer: LayerSpec) -> Tensor:
        return self._linear(gate(self._linear(h, name + "gate_up"), layer.ffn.activation, self.dtype), name + "down")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        """fp32 [rows, out]."""
        weight, bias = self._matrices[name], self._vectors.get(name + "_bias")
        if not self._batch_variant:
            return linear(x, weight, bias)
        out = torch.nn.functional.linear(x, weight).float()  # cuBLAS, which rounds to the dtype on the way out
        return out if bias is None else out.add_(bias)

    def _reach(self, length: int) -> None:
        """Rope tables of at least `length` positions, grown in powers of two: [positions, rotary_dim / 2] each."""
        for layer in self.spec.layers:
            rope = layer.mixer.rope
            if rope is None or (rope in self._ropes and len(self._ropes[rope][0]) >= length):
                continue
            positions = torch.arange(max(1024, power_of_2(length)), dtype=torch.float32, device=self.device)
            angles = positions[:, None] * torch.tensor(rope.inv_freq, dtype=torch.float32, device=self.device)
            self._ropes[rope] = (torch.cos(angles) * rope.attention_factor, torch.sin(angles) * rope.attention_factor)
            self._graphs.clear()  # they hold the old tables' places

    # CUDA graphs

    def _replay(self, batch: ForwardBatch, tasks: list[Tasks]) -> Tensor:
        """A decode step from the graph of its padded size; captured when the size is first met."""
        rows = graph_rows(len(batch.seq_lens))
        partitions = power_of_2(-(-int(batch.seq_lens.max()) // PARTITION))
        self._reach(partitions * PARTITION)
        width = -(-partitions * PARTITION // self._block_size)
        # A row's own task, and at most one of a sharing set per row.
        shapes = [(0, 2 * rows, partitions, partitions)] * len(self._kinds)
        inputs = self._stage(batch, tasks, rows, rows, width, shapes)
        graph = self._graphs.get((rows, partitions))
        if graph is None or graph.place != inputs.token_ids.data_ptr():  # new, or the inputs have moved
            hidden = self._run(inputs)  # compiles the kernels too
            self._graphs[rows, partitions] = self._capture(inputs)
            return hidden[: len(batch.seq_lens)]
        graph.cuda.replay()
        return graph.hidden[: len(batch.seq_lens)]

    def _capture(self, inputs: _Inputs) -> _Graph:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()  # one for all: a graph's memory is free when it has run
        others, self._scratch = self._scratch, Scratch(self.device)  # from the graph's memory
        try:
            cuda = torch.cuda.CUDAGraph()
            with torch.cuda.graph(cuda, pool=self._pool):
                hidden = self._run(inputs)
            return _Graph(cuda, hidden, inputs.token_ids.data_ptr(), self._scratch)
        finally:
            self._scratch = others

    @torch.inference_mode()
    def keep(self, hidden: Hidden, rows: Int32s) -> Hidden:
        return cast(Hidden, cast(Tensor, hidden).index_select(0, to_device(rows, self.device)))

    # Draws

    @property
    def _tile_rows(self) -> int:
        return max(1, _LOGITS_ELEMENTS // self.spec.vocab_size)

    def _logits(self, hidden: Hidden, rows: Int32s) -> Tensor:
        """[len(rows), V] fp32 on the device, after scale and soft-cap."""
        chosen = cast(Tensor, hidden).index_select(0, to_device(rows, self.device))
        logits = self._linear(chosen, "embed" if self.spec.tie_word_embeddings else "head")
        if self.spec.logits_scale != 1.0:
            logits *= self.spec.logits_scale
        if self.spec.logits_softcap is not None:
            logits = torch.tanh(logits / self.spec.logits_softcap) * self.spec.logits_softcap
        return logits

    @torch.inference_mode()
    def logits(self, hidden: Hidden, rows: Int32s) -> Float32s:
        """Logits [len(rows), V] of some hidden rows."""
        return cast(Float32s, self._logits(hidden, rows).cpu().numpy())

    @torch.inference_mode()
    def sample(self, hidden: Hidden, batch: SamplingBatch) -> Sampled:
        return sampler.sample(lambda rows: self._logits(hidden, rows), batch, self._tile_rows)

    @torch.inference_mode()
    def token_logprobs(
        self, hidden: Hidden, rows: Int32s, targets: Int32s, num_logprobs: int, mode: LogprobsMode
    ) -> LogprobColumns:
        return sampler.token_logprobs(
            lambda part: self._logits(hidden, part),
            rows,
            targets,
            num_logprobs,
            mode,
            self.spec.vocab_size,
            self._tile_rows,
        )

    def close(self) -> None:
        self.drop_cache()
        self._matrices.clear()
        self._vectors.clear()
        self._loaded.clear()


def graph_rows(rows: int) -> int:
    """The padded number of rows of a decode graph: 1, 2, 4, 8, then multiples of 8, from 64 of 32, from 256 of 64."""
    if rows <= 8:
        return power_of_2(rows)
    step = 8 if rows <= 64 else 32 if rows <= 256 else 64
    return -(-rows // step) * step


@dataclass
class _Inputs:
    """A step's integers on the device."""

    token_ids: Tensor  # [T]
    positions: Tensor  # [T], -1 is padding
    slots: Tensor  # [T], -1 is padding
    tables: Tensor  # [R, width]
    kinds: dict[Kind, DeviceTasks]


@dataclass
class _Graph:
    cuda: Any
    hidden: Tensor
    place: int  # of its inputs
    scratch: Scratch


class _Staging:
    """Arrays of integers in one copy: from pinned buffers, in turn, to one fixed buffer on the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._target = torch.empty(0, dtype=torch.int32, device=device)
        self._sources: list[Tensor] = []
        self._copied: list[Any] = []  # events: a source may be written again once its copy is done
        self._turn = 0

    def send(self, parts: list[tuple[Int32s, tuple[int, ...], int]]) -> list[Tensor]:
        """For each (values, padded shape, padding) a tensor of that shape on the device."""
        sizes = [-(-int(np.prod(shape)) // 4) * 4 for _, shape, _ in parts]  # keeps each 16 bytes aligned
        total = sum(sizes)
        if self._target.numel() < total:
            self._grow(power_of_2(total))
        self._turn ^= 1
        source = self._sources[self._turn]
        if self._copied[self._turn] is not None:
            self._copied[self._turn].synchronize()
        host = source.numpy()
        views = []
        start = 0
        for (values, shape, padding), size in zip(parts, sizes, strict=True):
            end = start + int(np.prod(shape))
            area = host[start:end].reshape(shape)
            if values.shape == shape:
                area[...] = values
            else:
                area.fill(padding)
                area[tuple(slice(0, count) for count in values.shape)] = values
            views.append(self._target[start:end].view(shape))
            start += size
        self._target[:total].copy_(source[:total], non_blocking=True)
        if self._device.type == "cuda":
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._copied[self._turn] = event
        return views

    def _grow(self, size: int) -> None:
        pinned = self._device.type == "cuda"
        self._target = torch.empty(size, dtype=torch.int32, device=self._device)
        self._sources = [torch.empty(size, dtype=torch.int32, pin_memory=pinned) for _ in range(2)]
        self._copied = [None, None]


def _slots(batch: ForwardBatch, block_size: int) -> Int32s:
    """Cache slot of each token [T]."""
    rows = np.repeat(np.arange(len(batch.seq_lens)), np.diff(batch.query_start))
    blocks = batch.block_tables[rows, batch.positions // block_size]
    slots: Int32s = (blocks * block_size + batch.positions % block_size).astype(np.int32)
    return slots


def _place(spec: DecoderSpec, name: str) -> tuple[str, int, int]:
    """(name of the array that holds it, its first row there, rows of that array)."""
    if not name.startswith("layers."):
        return name, 0, spec.parameters()[name][0]
    _, index, part = name.split(".")
    layer = spec.layers[int(index)]
    base, bias = (part[:-5], "_bias") if part.endswith("_bias") else (part, "")
    q, kv = layer.mixer.num_heads * layer.mixer.head_dim, layer.mixer.num_kv_heads * layer.mixer.head_dim
    inner = layer.ffn.intermediate_size
    places = {"q": ("qkv", 0, q + 2 * kv), "k": ("qkv", q, q + 2 * kv), "v": ("qkv", q + kv, q + 2 * kv)}
    places |= {"gate": ("gate_up", 0, 2 * inner), "up": ("gate_up", inner, 2 * inner)}
    if base in places:
        joined, first, rows = places[base]
        return f"layers.{index}.{joined}{bias}", first, rows
    return name, 0, spec.parameters()[name][0]
