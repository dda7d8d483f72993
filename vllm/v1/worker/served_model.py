"""The model as clients of a worker see it: its description, and its weights to be replaced.

trl reaches it as `llm.llm_engine.model_executor.driver_worker.model_runner.model.load_weights([(name, tensor)])`, one
tensor at a time under Hugging Face's names; `LLM.apply_model` hands it to the caller's function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from vllm.exceptions import EngineError, WeightError
from vllm.model_executor.backends.interface import Backend, Float32s, WeightTensor
from vllm.model_executor.models.family import WeightName
from vllm.model_executor.spec import DecoderSpec


class ServedModel:
    """`version` grows with every change of the weights; the scheduler keys cached blocks by it."""

    def __init__(
        self, spec: DecoderSpec, config: dict[str, Any], name_map: dict[str, WeightName], backend: Backend
    ) -> None:
        self.spec = spec
        self.config = config
        self.backend: Backend | None = backend
        """None while the weights sleep."""
        self.version = 0
        self.is_busy: Callable[[], bool] = lambda: False
        """Set by the owner of the scheduler: whether requests are unfinished."""
        self._names = name_map
        self._shapes = spec.parameters()

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> set[str]:
        """Replace weights: (Hugging Face name, numpy array or torch tensor) pairs, any subset; q and k in Hugging
        Face's order, q/k/v and gate/up apart. Returns the names taken; a tied head is passed over.

        Raises EngineError while requests are unfinished or the weights sleep, WeightError for an unknown name or a
        wrong shape (what came before it has been loaded).
        """
        if self.is_busy():
            raise EngineError("load_weights() while requests are unfinished: finish or abort them first")
        if self.backend is None:
            raise EngineError("load_weights() while the weights sleep: call wake_up(['weights']) first")
        taken: set[str] = set()
        self.version += 1  # also when a later pair fails: what the cache holds is stale from the first one on
        self.backend.load_weights(self._canonical(weights, taken))
        return taken

    def _canonical(self, weights: Iterable[tuple[str, Any]], taken: set[str]) -> Iterator[WeightTensor]:
        for name, values in weights:
            target = self._names.get(name)
            if target is None:
                if name == "lm_head.weight" and self.spec.tie_word_embeddings:
                    continue
                raise WeightError(f"weight {name!r} is not part of {self.spec.architecture}")
            shape, expected = tuple(values.shape), self._shapes[target.canonical]
            if shape != expected:
                raise WeightError(f"weight {name!r} has shape {shape}, {self.spec.architecture} needs {expected}")
            yield _tensor(target, values)
            taken.add(name)


def _tensor(target: WeightName, values: Any) -> WeightTensor:
    dtype = str(values.dtype).removeprefix("torch.")
    if dtype not in ("float32", "float64", "float16", "bfloat16"):
        raise WeightError(f"weight for {target.canonical!r} has dtype {dtype}; float32, float16 and bfloat16 are taken")

    def read() -> Float32s:
        array = values.detach().cpu().float().numpy() if hasattr(values, "detach") else values
        array = np.ascontiguousarray(array, np.float32)
        return array + np.float32(1) if target.add_one else array

    return WeightTensor(target.canonical, tuple(values.shape), "float32", read)
