"""A child's own logits processors: callables (output_ids, logits) or (prompt_ids, output_ids, logits) -> logits.

Siblings never share a processor object that can hold state: with n > 1 every child gets its own, by the object's
`clone()` where it has one, else by `copy.deepcopy` (which leaves plain functions as they are). With n = 1 the user's
object itself is called. Ids come as lists. Logits come as a numpy array [V], or, where torch is imported already, as a
torch tensor on the same memory; either kind may come back.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vllm.model_executor.backends.interface import Float32s, Int32s


class ChildProcessors:
    """The processors of one child, kept from its first token to its end. Building it never raises: an error in copying
    an object is raised by the draw, where it ends this child's request and no other."""

    def __init__(self, processors: Sequence[Callable[..., Any]], own_copies: bool) -> None:
        self._error: Exception | None = None
        self._calls: list[tuple[Callable[..., Any], bool]] = []
        try:
            for processor in processors:
                own = _copy(processor) if own_copies else processor
                self._calls.append((own, _takes_prompt(own)))
        except Exception as error:  # noqa: BLE001 - a user's object may raise anything
            self._error = error

    def bind(self, prompt_ids: Int32s, output_ids: Int32s) -> Callable[[Float32s], Float32s]:
        """The processors in order as one function of the logits, for one draw."""

        def process(logits: Float32s) -> Float32s:
            if self._error is not None:
                raise self._error
            torch = sys.modules.get("torch")
            wrap = getattr(torch, "from_numpy", None)
            current: Any = logits if wrap is None else wrap(logits)
            for call, takes_prompt in self._calls:
                ids = (prompt_ids.tolist(), output_ids.tolist()) if takes_prompt else (output_ids.tolist(),)
                current = call(*ids, current)
                if current is None:
                    raise TypeError("it returned None in place of the logits")
            if not isinstance(current, np.ndarray) and hasattr(current, "detach"):
                current = current.detach().cpu().float().numpy()
            return np.asarray(current, np.float32)

        return process


def _copy(processor: Callable[..., Any]) -> Callable[..., Any]:
    clone = getattr(processor, "clone", None)
    twin: Callable[..., Any] = clone() if callable(clone) else copy.deepcopy(processor)
    return twin


def _takes_prompt(processor: Callable[..., Any]) -> bool:
    try:
        return len(inspect.signature(processor).parameters) == 3
    except (TypeError, ValueError):  # a builtin without a signature
        return False
