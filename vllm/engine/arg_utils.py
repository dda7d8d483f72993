"""What a user may set of an engine: one dataclass, from which the command line is generated too.

`EngineArgs(...)` refuses what is out of range and what is not known (`TypeError` with the nearest known name). What is
known to programs but cannot be honoured here is refused by name (`UnsupportedError`), or warned about once where
ignoring it cannot change results. `create_engine_config()` resolves the model and makes the frozen `VllmConfig`.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import functools
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from vllm import envs
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    Dtype,
    LogprobsMode,
    LoRAConfig,
    ModelConfig,
    ObservabilityConfig,
    ParallelConfig,
    SchedulerConfig,
    SchedulingPolicy,
    VllmConfig,
)
from vllm.exceptions import ConfigError, UnsupportedError
from vllm.logger import init_logger, warn_once
from vllm.utils.argparse_utils import add_dataclass_arguments, option, option_rules

if TYPE_CHECKING:
    from typing_extensions import Self

logger = init_logger(__name__)

DEFAULT_MODEL = "smollm2-135m-instruct"

PARTITION = 256
"""Attention works on partitions of this many positions (backends/interface.py), which blocks must divide."""

_DTYPES: dict[str, Dtype] = {
    "half": "float16",
    "float16": "float16",
    "float": "float32",
    "float32": "float32",
    "bfloat16": "bfloat16",
}


def _naming_unknown(init: Callable[..., None]) -> Callable[..., None]:
    """A dataclass's `__init__` that names the nearest known keyword beside an unknown one."""

    @functools.wraps(init)
    def checked_init(self: Any, *args: Any, **kwargs: Any) -> None:
        known = {field.name for field in dataclasses.fields(self)}
        for name in kwargs:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise TypeError(f"unknown engine argument {name!r}{hint}")
        init(self, *args, **kwargs)

    return checked_init


@dataclass
class EngineArgs:
    """Arguments of an engine; `None` means the default for each."""

    model: str = option(
        DEFAULT_MODEL, "model", "Folder, GGUF file, or bundled name (smollm2-135m-instruct, gemma3-270m)."
    )
    tokenizer: str | None = option(None, "model", "Where the tokenizer comes from, if not from the model.")
    tokenizer_mode: Literal["auto", "hf"] = option(
        "auto", "model", "auto and hf: the fast tokenizer of the checkpoint.", unbuilt=("slow", "mistral", "custom")
    )
    tokenizer_revision: str | None = option(None, "model", "Only main: models are read from this machine.")
    revision: str | None = option(None, "model", "Only main: models are read from this machine.")
    dtype: Literal["auto", "half", "float16", "bfloat16", "float", "float32"] = option(
        "auto", "model", "auto: bfloat16 where the device computes in it, else float32."
    )
    seed: int | None = option(
        None, "model", "Makes a whole run repeatable by order of submission; default: entropy.", low=0
    )
    trust_remote_code: bool = option(False, "model", "Accepted; code from a checkpoint is never run.")
    max_model_len: int | None = option(
        None, "model", "Longest prompt + output in tokens; default: the model's own limit.", low=-1
    )
    quantization: str | None = option(None, "model", "int8: weight-only, one scale per output channel.")
    load_format: Literal["auto", "safetensors", "gguf", "dummy"] = option(
        "auto",
        "model",
        "auto: by what the model is; dummy: random weights of the config's shape.",
        unbuilt=("pt", "npcache", "sharded_state", "bitsandbytes", "mistral", "tensorizer", "runai_streamer"),
    )
    download_dir: str | None = option(None, "model", "Accepted; nothing is downloaded.")
    hf_overrides: dict[str, Any] | None = option(None, "model", "Entries that replace those of the model's config.")
    generation_config: str = option(
        "auto", "model", "Default sampling parameters: auto (the model's), vllm (none), or a folder."
    )
    model_impl: Literal["auto", "vllm"] = option(
        "auto", "model", "auto and vllm: this engine's own model code.", unbuilt=("transformers", "terratorch")
    )
    skip_tokenizer_init: bool = option(False, "model", "No tokenizer: prompts and outputs are token ids only.")
    served_model_name: str | None = option(None, "model", "Name under which the server lists the model.")
    logprobs_mode: LogprobsMode = option(
        "raw_logprobs", "model", "What log-probabilities are of: raw before, processed after all logit processing."
    )
    max_logprobs: int = option(20, "model", "Most log-probabilities a request may ask for; -1: no limit.", low=-1)
    enable_sleep_mode: bool = option(False, "model", "Allow sleep() to give weights and cache memory back.")

    block_size: int = option(16, "cache", "Tokens per block of the KV cache; a divisor of 256.", low=1)
    gpu_memory_utilization: float | None = option(
        None, "cache", "Fraction of the free memory for the KV cache, on a CPU too (default there: 0.4).", low=0
    )
    kv_cache_memory_bytes: int | None = option(None, "cache", "Upper bound of the KV cache in bytes.", low=1)
    num_gpu_blocks_override: int | None = option(
        None, "cache", "Number of KV cache blocks, whatever the memory.", low=1
    )
    enable_prefix_caching: bool = option(True, "cache", "Keep and reuse the blocks of prompts seen before.")
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", "cache", "auto: as dtype.", unbuilt=("fp8", "fp8_e4m3", "fp8_e5m2")
    )
    swap_space: float | None = option(
        None, "cache", "Accepted; preempted requests are computed again, not swapped.", low=0
    )
    cpu_offload_gb: float | None = option(None, "cache", "Accepted; on a CPU everything is in its memory.", low=0)

    max_num_seqs: int = option(256, "scheduler", "Most sequences in one step.", low=1)
    max_num_batched_tokens: int | None = option(
        None, "scheduler", "Most tokens in one step; default: 2048, or the context without chunked prefill.", low=1
    )
    enable_chunked_prefill: bool = option(True, "scheduler", "Cut long prompts into pieces that fit a step.")
    scheduling_policy: SchedulingPolicy = option("fcfs", "scheduler", "priority: lower numbers first, then arrival.")
    max_n: int = option(16384, "scheduler", "Largest n (or best_of) of one request.", low=1)

    tensor_parallel_size: int = option(1, "parallel", "Only 1 so far.", low=1)
    pipeline_parallel_size: int = option(1, "parallel", "Only 1 so far.", low=1)
    data_parallel_size: int = option(1, "parallel", "Only 1 so far.", low=1)
    distributed_executor_backend: str | None = option(
        None, "parallel", "uni; mp and external_launcher mean the same for one process."
    )

    device: Literal["auto", "cpu", "cuda"] = option(
        "auto", "device", "auto is cpu: the GPU runner (cuda) has not run on a card yet, and is taken by name."
    )
    backend: Literal["auto", "cpu", "torch", "triton"] = option(
        "auto",
        "device",
        "auto: the fastest that can run: on a CPU the compiled kernels, on a GPU Triton, or the torch reference.",
    )
    num_threads: int | None = option(None, "device", "Threads of the CPU backends; default: the usable cores.", low=1)
    enforce_eager: bool = option(False, "device", "No CUDA graphs; a CPU runs every step eagerly anyway.")
    allow_batch_variance: bool = option(
        False, "device", "cuBLAS on a GPU: results may then depend on what else runs (batch invariance is given up)."
    )

    enable_lora: bool = option(False, "lora", "Adapters; not built yet.")
    max_lora_rank: int = option(16, "lora", "Largest rank of an adapter.", low=1)
    max_loras: int = option(1, "lora", "Most adapters in one step.", low=1)

    disable_log_stats: bool = option(False, "observability", "No periodic log line, no statistics per request.")
    otlp_traces_endpoint: str | None = option(None, "observability", "URL for the server's traces (OTLP over HTTP).")

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is None:
                setattr(self, field.name, field.default)
        self._check()

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add a flag for every field."""
        add_dataclass_arguments(parser, cls)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """The arguments from a namespace that may hold more than this dataclass's fields."""
        names = (field.name for field in dataclasses.fields(cls))
        return cls(**{name: getattr(args, name) for name in names if hasattr(args, name)})

    def create_engine_config(self) -> VllmConfig:
        """Resolve the model, read its limits, and make the configuration.

        Raises ConfigError (a ValueError), UnsupportedError (a NotImplementedError), or ModelLoadError.
        """
        from vllm.model_executor.loader import open_checkpoint, resolve_model

        self._check()
        self._refuse_unbuilt()
        self._warn_of_ignored()
        path = resolve_model(self.model)
        checkpoint = open_checkpoint(path, self.load_format, self.hf_overrides or {})
        try:
            max_position = checkpoint.spec.max_position
        finally:
            checkpoint.close()
        max_model_len = self._max_model_len(max_position)
        space = envs.VLLM_CPU_KVCACHE_SPACE
        return VllmConfig(
            model=ModelConfig(
                model=self.model,
                path=str(path),
                max_model_len=max_model_len,
                dtype=_DTYPES.get(self.dtype) or ("bfloat16" if self.device == "cuda" else default_dtype()),
                tokenizer="" if self.tokenizer is None else str(_tokenizer_path(self.tokenizer)),
                tokenizer_mode="auto",
                skip_tokenizer_init=self.skip_tokenizer_init,
                trust_remote_code=self.trust_remote_code,
                quantization=None if self.quantization == "gguf" else self.quantization,
                load_format=self.load_format,
                seed=self.seed,
                logprobs_mode=self.logprobs_mode,
                max_logprobs=self.max_logprobs,
                generation_config=self.generation_config,
                served_model_name=self.served_model_name,
                hf_overrides=dict(self.hf_overrides or {}),
                enable_sleep_mode=self.enable_sleep_mode,
            ),
            cache=CacheConfig(
                block_size=self.block_size,
                num_blocks=self.num_gpu_blocks_override,
                memory_fraction=self.gpu_memory_utilization,
                memory_bytes=self.kv_cache_memory_bytes or (None if space is None else int(space * 2**30)),
                enable_prefix_caching=self.enable_prefix_caching,
                kv_dtype=self.kv_cache_dtype,
            ),
            scheduler=SchedulerConfig(
                max_num_seqs=self.max_num_seqs,
                max_num_batched_tokens=self._max_num_batched_tokens(max_model_len),
                enable_chunked_prefill=self.enable_chunked_prefill,
                policy=self.scheduling_policy,
                max_n=self.max_n,
            ),
            parallel=ParallelConfig(),
            device=DeviceConfig(
                device="cuda" if self.device == "cuda" else "cpu",
                backend=self.backend,
                num_threads=self.num_threads or envs.VLLM_CPU_NUM_THREADS,
                enforce_eager=self.enforce_eager,
                allow_batch_variance=self.allow_batch_variance,
            ),
            lora=LoRAConfig(self.enable_lora, self.max_lora_rank, self.max_loras),
            observability=ObservabilityConfig(not self.disable_log_stats, self.otlp_traces_endpoint),
        )

    # What one field must be by itself.

    def _check(self) -> None:
        self.dtype = cast(Any, str(self.dtype).removeprefix("torch."))  # programs pass torch.bfloat16 itself
        if callable(self.hf_overrides):
            raise UnsupportedError("hf_overrides as a function is not built here; give a dict")
        for field, rule in option_rules(type(self)):
            value = getattr(self, field.name)
            if value is not None:
                if rule.choices and isinstance(value, str) and value in field.metadata["unbuilt"]:
                    raise UnsupportedError(f"{field.name}={value!r} is not built here; {rule.text}")
                self._require(field.name, rule.fits(value), rule.text)
        if self.gpu_memory_utilization is not None:
            self._require("gpu_memory_utilization", 0 < self.gpu_memory_utilization <= 1, "above 0 and at most 1")
        self._require("block_size", PARTITION % self.block_size == 0, f"a divisor of {PARTITION}")

    def _require(self, name: str, fits: bool, what: str) -> None:
        if not fits:
            raise ConfigError(f"{name} must be {what}, got {getattr(self, name)!r}", name)

    # What cannot be honoured, and what need not be.

    def _refuse_unbuilt(self) -> None:
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
            if getattr(self, name) != 1:
                raise UnsupportedError(f"{name}={getattr(self, name)}: only 1 is built so far")
        if self.distributed_executor_backend not in (None, "uni", "mp", "external_launcher"):
            raise UnsupportedError(
                f"distributed_executor_backend={self.distributed_executor_backend!r} is not built here"
            )
        if self.quantization not in (None, "int8", "gguf"):
            raise UnsupportedError(f"quantization={self.quantization!r} is not built here; int8, or a GGUF file")
        for name in ("revision", "tokenizer_revision"):
            if getattr(self, name) not in (None, "main"):
                raise UnsupportedError(
                    f"{name}={getattr(self, name)!r}: models are read from this machine, as they are"
                )
        if self.cpu_offload_gb and self.device == "cuda":
            raise UnsupportedError("cpu_offload_gb is not built for a GPU")
        if self.enable_lora:
            raise UnsupportedError("enable_lora is not built yet")
        if not envs.VLLM_USE_V1:
            raise UnsupportedError("VLLM_USE_V1=0: there is no other engine here")

    def _warn_of_ignored(self) -> None:
        if self.swap_space:
            warn_once(logger, "swap_space has no effect: preempted requests are computed again")
        if self.cpu_offload_gb:
            warn_once(logger, "cpu_offload_gb has no effect on a CPU")
        if self.download_dir:
            warn_once(logger, "download_dir has no effect: nothing is downloaded")
        if self.trust_remote_code:
            warn_once(logger, "trust_remote_code has no effect: code from a checkpoint is never run")
        for name in envs.unknown():
            warn_once(logger, "environment variable %s is not known", name)

    # What depends on the model.

    def _max_model_len(self, max_position: int) -> int:
        if self.max_model_len in (None, -1):
            return max_position
        assert self.max_model_len is not None
        self._require("max_model_len", self.max_model_len >= 1, f"between 1 and the model's limit, {max_position}")
        self._require("max_model_len", self.max_model_len <= max_position, f"at most the model's limit, {max_position}")
        return self.max_model_len

    def _max_num_batched_tokens(self, max_model_len: int) -> int:
        budget = self.max_num_batched_tokens
        if self.enable_chunked_prefill:
            return 2048 if budget is None else budget
        if budget is None:
            return max(2048, max_model_len)
        if budget < max_model_len:
            raise ConfigError(
                f"max_num_batched_tokens ({budget}) must be at least max_model_len ({max_model_len}) when "
                "enable_chunked_prefill is off: a longer prompt could never run",
                "max_num_batched_tokens",
            )
        return budget


class AsyncEngineArgs(EngineArgs):
    """Arguments of an asynchronous engine: the same."""


EngineArgs.__init__ = _naming_unknown(EngineArgs.__init__)  # type: ignore[method-assign]


def default_dtype() -> Dtype:
    """bfloat16 where this CPU has instructions for it, else float32 (emulated bfloat16 is slower than float32)."""
    try:
        flags = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return "float32"
    start = flags.find("flags" if platform.machine() in ("x86_64", "AMD64") else "Features")
    words = flags[start : flags.find("\n", start)].split() if start >= 0 else []
    return "bfloat16" if "avx512_bf16" in words or "bf16" in words else "float32"


def _tokenizer_path(name: str) -> Path:
    """A folder with tokenizer files needs no model in it; anything else is named like a model."""
    from vllm.model_executor.loader import resolve_model

    folder = Path(name).expanduser()
    return folder if folder.is_dir() else resolve_model(name)
