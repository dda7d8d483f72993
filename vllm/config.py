"""Configuration: frozen dataclasses, made once by `EngineArgs.create_engine_config` and never adjusted afterwards.

Derived values are properties. What a user may set, with its help text, stands in `vllm.engine.arg_utils.EngineArgs`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Dtype = Literal["float32", "bfloat16", "float16"]
LogprobsMode = Literal["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"]
SchedulingPolicy = Literal["fcfs", "priority"]


@dataclass(frozen=True)
class ModelConfig:
    """Which checkpoint, and how it is run."""

    model: str
    """As the user named it: a folder, a GGUF file, or a bundled name."""
    path: str
    """The folder or file it was resolved to; "" with load_format="dummy" and a bare config."""
    max_model_len: int
    """Longest prompt + output, in tokens."""
    dtype: Dtype
    tokenizer: str = ""
    """Folder or file that the tokenizer comes from; "" means `path`."""
    tokenizer_mode: str = "auto"
    skip_tokenizer_init: bool = False
    trust_remote_code: bool = False
    quantization: str | None = None
    """None or "int8" (weight-only, per output channel)."""
    load_format: str = "auto"
    """auto, safetensors, gguf, dummy."""
    seed: int | None = None
    """Engine seed: None takes the system's entropy for requests without a seed of their own."""
    logprobs_mode: LogprobsMode = "raw_logprobs"
    max_logprobs: int = 20
    """Largest logprobs / prompt_logprobs a request may ask for; -1 for no limit."""
    generation_config: str = "auto"
    """Where default sampling parameters come from: "auto" (the checkpoint), "vllm" (none), or a folder."""
    served_model_name: str | None = None
    hf_overrides: dict[str, Any] = field(default_factory=dict)
    enable_sleep_mode: bool = False


@dataclass(frozen=True)
class CacheConfig:
    block_size: int = 16
    num_blocks: int | None = None
    """Fixed number of KV cache blocks; None sizes the cache from memory."""
    memory_fraction: float | None = None
    """Fraction of free memory for the KV cache (None: 0.4); on a GPU, of all of it, with the weights (None: 0.9)."""
    memory_bytes: int | None = None
    """Upper bound in bytes, before the fraction; None for no bound."""
    enable_prefix_caching: bool = True
    kv_dtype: Dtype | Literal["auto"] = "auto"


@dataclass(frozen=True)
class SchedulerConfig:
    max_num_seqs: int = 256
    """Most sequences that run in one step; the number of slots."""
    max_num_batched_tokens: int = 2048
    """Token budget of one step."""
    enable_chunked_prefill: bool = True
    policy: SchedulingPolicy = "fcfs"
    max_n: int = 16384
    """Largest `n` (or `best_of`) of one request."""


@dataclass(frozen=True)
class ParallelConfig:
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    distributed_executor_backend: str = "uni"


@dataclass(frozen=True)
class DeviceConfig:
    device: Literal["cpu", "cuda"] = "cpu"
    backend: str = "auto"
    """auto, torch (the reference), cpu (csrc kernels), triton."""
    num_threads: int | None = None
    """Threads of the CPU backends; None: the cores this process may use."""
    enforce_eager: bool = False
    """No CUDA graphs."""
    allow_batch_variance: bool = False
    """cuBLAS for the GPU's matrix products: a row's bits may then depend on the rows beside it."""


@dataclass(frozen=True)
class LoRAConfig:
    enable_lora: bool = False
    max_lora_rank: int = 16
    max_loras: int = 1


@dataclass(frozen=True)
class ObservabilityConfig:
    log_stats: bool = True
    otlp_traces_endpoint: str | None = None


@dataclass(frozen=True)
class VllmConfig:
    """Everything an engine needs to know, in parts that the layers take separately."""

    model: ModelConfig
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    parallel: ParallelConfig = ParallelConfig()
    device: DeviceConfig = DeviceConfig()
    lora: LoRAConfig = LoRAConfig()
    observability: ObservabilityConfig = ObservabilityConfig()

    @property
    def multiprocessing(self) -> bool:
        """Whether the core runs in a process of its own unless the caller says otherwise."""
        from vllm import envs

        return envs.VLLM_ENABLE_V1_MULTIPROCESSING
