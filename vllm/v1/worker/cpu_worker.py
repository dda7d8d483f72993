"""The worker on a CPU: checkpoint, backend, KV cache and runner of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from vllm.config import VllmConfig
from vllm.exceptions import ConfigError, EngineError, UnsupportedError
from vllm.model_executor.backends.interface import Backend
from vllm.model_executor.loader import Checkpoint, open_checkpoint
from vllm.model_executor.spec import DecoderSpec
from vllm.v1.step import RunnerOutput, SchedulerOutput
from vllm.v1.structured_output.manager import GrammarManager
from vllm.v1.worker.memory import available_bytes, kv_cache_blocks
from vllm.v1.worker.model_runner import ModelRunner
from vllm.v1.worker.served_model import ServedModel

if TYPE_CHECKING:
    from vllm.tokenizers import Tokenizer

SLEEP_TAGS = ("weights", "kv_cache")


class CPUWorker:
    """Everything is loaded when it has been made. Its methods are what `collective_rpc` can name."""

    device = "cpu"

    def __init__(self, config: VllmConfig) -> None:
        _check(config, self.device)
        self.config = config
        with self._open() as checkpoint:
            backend = self._load(checkpoint)
            model = ServedModel(checkpoint.spec, checkpoint.config, checkpoint.hf_name_map, backend)
            eos = checkpoint.eos_token_ids
        try:
            self.num_blocks = self._cache_blocks(backend, model.spec)
            backend.init_cache(self.num_blocks, config.cache.block_size)
        except BaseException:
            backend.close()
            raise
        self.model_runner = ModelRunner(config, backend, model.spec.vocab_size, eos)
        self.model_runner.model = model
        self.grammars: GrammarManager | None = None
        """Makes masks of constraints; None without a tokenizer."""
        if not config.model.skip_tokenizer_init:
            self.grammars = GrammarManager(self._load_tokenizer, model.spec.vocab_size, eos)
            self.model_runner.batch.grammars = self.grammars
        self._asleep: set[str] = set()

    def _cache_blocks(self, _: Backend, spec: DecoderSpec) -> int:
        return kv_cache_blocks(self.config, spec, available_bytes())

    @property
    def model(self) -> ServedModel:
        model = self.model_runner.model
        assert model is not None
        return model

    def execute(self, step: SchedulerOutput) -> RunnerOutput:
        if self._asleep:
            raise EngineError("the engine is asleep: call wake_up() first")
        return self.model_runner.execute(step)

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> set[str]:
        """See `ServedModel.load_weights`."""
        return self.model.load_weights(weights)

    def apply_model(self, function: Callable[[ServedModel], Any]) -> Any:
        return function(self.model)

    # Sleep

    @property
    def is_sleeping(self) -> bool:
        """Whether any part is asleep."""
        return bool(self._asleep)

    def sleep(self, level: int = 1) -> None:
        """Give memory back: level 1 the KV cache, level 2 the weights too. What the cache held is lost."""
        if level not in (1, 2):
            raise ConfigError(f"sleep level must be 1 or 2, got {level!r}", "level")
        if self.model.is_busy():
            raise EngineError("sleep() while requests are unfinished: finish or abort them first")
        runner = self.model_runner
        if "kv_cache" not in self._asleep:
            runner.forget()
            runner.backend.drop_cache()
            self._asleep.add("kv_cache")
        if level == 2 and "weights" not in self._asleep:
            self.model.backend = None
            runner.backend.close()
            self._asleep.add("weights")

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Take memory again: `tags` names parts ("weights", "kv_cache"), None all. Weights are those of the checkpoint,
        until new ones are loaded."""
        wanted = set(SLEEP_TAGS if tags is None else tags)
        unknown = sorted(wanted - set(SLEEP_TAGS))
        if unknown:
            raise ConfigError(f"wake_up tags are {', '.join(SLEEP_TAGS)}; got {', '.join(unknown)}", "tags")
        runner = self.model_runner
        waking = wanted & self._asleep
        if "kv_cache" in waking and "weights" in self._asleep - waking:
            raise ConfigError("wake_up(['kv_cache']) before the weights: wake them first, or both", "tags")
        if "weights" in waking:
            with self._open() as checkpoint:
                runner.backend = self.model.backend = self._load(checkpoint)
            self.model.version += 1
            self._asleep.discard("weights")
        if "kv_cache" in waking:
            runner.backend.init_cache(self.num_blocks, self.config.cache.block_size)
            self._asleep.discard("kv_cache")

    def _load_tokenizer(self) -> Tokenizer:
        from vllm.tokenizers import load_tokenizer

        return load_tokenizer(self.config.model)

    def shutdown(self) -> None:
        if self.grammars is not None:
            self.grammars.shutdown()
        if self.model.backend is not None:
            self.model.backend.close()
            self.model.backend = None

    def _open(self) -> Checkpoint:
        model = self.config.model
        return open_checkpoint(model.path or model.model, model.load_format, model.hf_overrides)

    def _load(self, checkpoint: Checkpoint) -> Backend:
        from vllm.model_executor.backends import create_backend

        config = self.config
        backend = create_backend(
            config.device.backend, checkpoint.spec, config.model.dtype, config.device, config.model.quantization
        )
        try:
            backend.load_weights(checkpoint.weights())
        except BaseException:
            backend.close()
            raise
        return backend


def _check(config: VllmConfig, device: str) -> None:
    """Refuse by name what one process on one device cannot do."""
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
        size = getattr(config.parallel, name)
        if size != 1:
            raise UnsupportedError(f"{name}={size}: this worker runs in one process; only 1 is built")
    if config.device.device != device:
        raise UnsupportedError(f"device={config.device.device!r}: this worker runs on {device!r}")
    if config.cache.kv_dtype not in ("auto", config.model.dtype):
        raise UnsupportedError(
            f"kv_cache_dtype={config.cache.kv_dtype!r} with dtype={config.model.dtype!r}: it must be the model's dtype"
        )
    if config.lora.enable_lora:
        raise UnsupportedError("enable_lora is not built yet")
