"""An engine without a model: real scheduler, real front end, tokens from a function. A step takes microseconds.

The token of a child depends on its seed and its position only, so that results can be compared between runs, kinds and
clients. Test params steer it:

    logit_bias {id: 100}     always that token
    allowed_token_ids        one of these
    seed = SCRIPTS + k       child 0 says the k-th of SCRIPT_TEXTS, over and over, child 1 the next one
    logits_processors        called with (output_ids, logits); what one raises is this child's error
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from vllm.config import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
from vllm.model_executor.backends.interface import LogprobColumns
from vllm.sampling_params import SamplingParams
from vllm.tokenizers import Tokenizer
from vllm.v1.engine.processor import ModelInfo
from vllm.v1.executor.abstract import Executor
from vllm.v1.step import RunnerOutput, SchedulerOutput

VOCAB = 49_152
EOS = 2
SCRIPTS = 1 << 40
SCRIPT_TEXTS = (
    "One two three STOP four five six seven",
    "alpha beta gamma delta epsilon zeta eta theta",
    "STOP at once",
    "never the word, but ST and STO and S T O P",
    "naïve café 🙂🙃 日本語 end",
)
FAKE_MODEL = ModelInfo(VOCAB, (EOS,), {})


def scripted(index: int) -> int:
    """A seed whose child 0 says SCRIPT_TEXTS[index]."""
    return SCRIPTS + index


def fake_token(seed: int, position: int, low: int = 100, high: int = 20_000) -> int:
    """Token of a child at a position of its output."""
    mixed = (seed * 0x9E3779B97F4A7C15 + position * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    mixed ^= mixed >> 31
    mixed = (mixed * 0x94D049BB133111EB) & (2**64 - 1)
    return low + (mixed >> 33) % (high - low)


def fake_config(**changes: Any) -> VllmConfig:
    """Limits of the fake engine; keywords are fields of any of the configuration's parts."""
    config = VllmConfig(
        model=ModelConfig("fake", "", 256, "float32", skip_tokenizer_init=False, seed=None),
        cache=CacheConfig(num_blocks=512, block_size=16),
        scheduler=SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=256),
        parallel=ParallelConfig(distributed_executor_backend="tests.v1.engine.fakes:FakeExecutor"),
    )
    for part in ("model", "cache", "scheduler", "parallel"):
        old = getattr(config, part)
        own = {name: changes.pop(name) for name in list(changes) if hasattr(old, name)}
        config = replace(config, **{part: replace(old, **own)})
    assert not changes, changes
    return config


class FakeExecutor(Executor):
    """Plays the worker; `delay` seconds per step."""

    def __init__(self, config: VllmConfig) -> None:
        super().__init__(config)
        self.is_busy: Callable[[], bool] = lambda: False
        self.delay = 0.0
        self.version = 0
        self.asleep = False
        self.steps = 0
        self.rows: list[int] = []
        """Rows of each step."""
        self._slots: dict[int, tuple[int, SamplingParams, list[int]]] = {}
        self._prompts: dict[int, list[int]] = {}
        self._scripts: list[list[int]] | None = None

    @property
    def num_blocks(self) -> int:
        return self.config.cache.num_blocks or 512

    @property
    def weights_version(self) -> int:
        return self.version

    @property
    def is_sleeping(self) -> bool:
        return self.asleep

    def execute(self, step: SchedulerOutput) -> RunnerOutput:
        if self.delay:
            time.sleep(self.delay)
        self.steps += 1
        self.rows.append(len(step.slots))
        for new in step.new_sequences:
            self._slots[new.slot] = (new.seed, new.params, list(new.output_token_ids))
            self._prompts[new.slot] = new.prompt_token_ids.tolist()
        handles, tokens, params, errors = [], [], [], {}
        for row in np.flatnonzero(step.samples).tolist():
            seed, own, outputs = self._slots[int(step.slots[row])]
            handle = int(step.handles[row])
            token = self._draw(handle, seed, own, outputs, errors)
            outputs.append(token)
            handles.append(handle)
            tokens.append(token)
            params.append(own)
        for fork in step.forks:
            for member in fork.members:
                handles.append(member.handle)
                tokens.append(self._draw(member.handle, member.seed, member.params, [], errors))
                params.append(member.params)
        prompt_logprobs = {}
        for row, asked in step.prompt_logprobs:
            first = int(step.num_computed[row]) + 1
            targets = self._prompts[int(step.slots[row])][first : first + int(step.num_tokens[row])]
            prompt_logprobs[row] = _columns(targets, [asked] * len(targets))
        logprobs = None
        if any(own.logprobs is not None for own in params):
            logprobs = _columns(tokens, [None if own.logprobs is None else own.logprobs for own in params])
        return RunnerOutput(np.array(handles, np.int64), np.array(tokens, np.int32), logprobs, prompt_logprobs, errors)

    def _draw(self, handle: int, seed: int, params: SamplingParams, outputs: list[int], errors: dict[int, str]) -> int:
        position = len(outputs)
        for processor in params.logits_processors or ():
            try:
                processor(outputs, np.zeros(8, np.float32))
            except Exception as error:  # noqa: BLE001
                errors[handle] = f"{type(error).__name__}: {error}"
        if params.logit_bias:
            return max(params.logit_bias, key=params.logit_bias.__getitem__)
        if params.allowed_token_ids:
            allowed = params.allowed_token_ids
            if position < params.min_tokens:
                allowed = [token for token in allowed if token != EOS] or allowed
            return allowed[fake_token(seed, position, 0, 1 << 20) % len(allowed)]
        if SCRIPTS <= seed < SCRIPTS + 1000:
            script = self._script(seed - SCRIPTS)
            return script[position % len(script)]
        return fake_token(seed, position)

    def _script(self, index: int) -> list[int]:
        if self._scripts is None:
            tokenizer = bundled_tokenizer()
            self._scripts = [tokenizer.encode(text) for text in SCRIPT_TEXTS]
        return self._scripts[index % len(self._scripts)]

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> set[str]:
        self.version += 1
        return {name for name, _ in weights}

    def sleep(self, level: int = 1) -> None:
        self.asleep = True

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        self.asleep = False

    def echo(self, value: Any) -> Any:
        return value

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)

    def crash(self) -> None:
        """Every following step fails."""
        self.execute = _crashed  # type: ignore[method-assign]

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        call = method if callable(method) else getattr(type(self), method)
        return [call(self, *args, **(kwargs or {}))]

    def shutdown(self) -> None:
        self._slots.clear()


class SlowExecutor(FakeExecutor):
    """Takes its time, so that a test can act while requests run."""

    def __init__(self, config: VllmConfig) -> None:
        super().__init__(config)
        self.delay = 0.005


class FailingExecutor(FakeExecutor):
    """Does not come up."""

    def __init__(self, config: VllmConfig) -> None:
        raise ValueError("no weights in this drawer")


class HangingExecutor(FakeExecutor):
    """Comes up never."""

    def __init__(self, config: VllmConfig) -> None:
        time.sleep(60)
        super().__init__(config)


def _crashed(step: SchedulerOutput) -> RunnerOutput:
    raise RuntimeError("the roof fell in")


def _columns(tokens: list[int], asked: list[int | None]) -> LogprobColumns:
    """Entries with a plausible shape: the token at -1 (rank 3), the most likely ones at -0.1, -0.2, …"""
    ids: list[int] = []
    values: list[float] = []
    offsets, ranks = [0], []
    for token, count in zip(tokens, asked, strict=True):
        if count is not None:
            ids.append(token)
            values.append(-1.0 - (token % 7) / 8)
            for rank in range(count if count >= 0 else 50):
                ids.append(token if rank == 2 else 10 + rank)
                values.append(-0.1 * (rank + 1))
        ranks.append(0 if count is None else 3)
        offsets.append(len(ids))
    return LogprobColumns(
        np.array(offsets, np.int32), np.array(ids, np.int32), np.array(values, np.float32), np.array(ranks, np.int32)
    )


_loaded: list[Tokenizer] = []


def bundled_tokenizer() -> Tokenizer:
    """SmolLM2's, loaded once."""
    if not _loaded:
        from vllm.tokenizers import open_tokenizer

        _loaded.append(open_tokenizer("smollm2-135m-instruct"))
    return _loaded[0]
