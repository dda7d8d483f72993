"""What the engine core asks of an executor, whatever processes or machines stand behind it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.step import RunnerOutput, SchedulerOutput
from vllm.v1.structured_output.manager import GrammarManager


class Executor(ABC):
    """Made once, with everything loaded; used from one thread."""

    config: VllmConfig
    is_busy: Callable[[], bool]
    """Set by the engine core: whether requests are unfinished. Meanwhile no weights are replaced and nothing sleeps."""

    def __init__(self, config: VllmConfig) -> None:
        self.config = config

    @property
    @abstractmethod
    def num_blocks(self) -> int:
        """KV cache blocks; their ids run from 0."""

    @property
    @abstractmethod
    def weights_version(self) -> int:
        """Grows whenever weights change; blocks computed under another version are stale."""

    @property
    @abstractmethod
    def is_sleeping(self) -> bool:
        """Whether any memory was given back by `sleep` and not taken again."""

    @property
    def grammars(self) -> GrammarManager | None:
        """Compiles the constraints of requests; None if this executor takes none."""
        return None

    @abstractmethod
    def execute(self, step: SchedulerOutput) -> RunnerOutput: ...

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> set[str]:
        """Replace weights by (Hugging Face name, array or tensor) pairs. Raises EngineError while busy or asleep."""

    @abstractmethod
    def sleep(self, level: int = 1) -> None:
        """Give memory back: 1 the KV cache, 2 the weights too."""

    @abstractmethod
    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Take memory again, all of it or the parts named ("weights", "kv_cache")."""

    @abstractmethod
    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a worker method by name, or `method(worker, *args, **kwargs)`, on every worker; one result each."""

    @abstractmethod
    def shutdown(self) -> None:
        """Give everything back; may be called twice."""
