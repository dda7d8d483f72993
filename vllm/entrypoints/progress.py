"""The progress bar of `LLM.generate`: prompts and completions done, and tokens per second in and out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from vllm.outputs import RequestOutput
from vllm.v1.engine.output_processor import Processed

_INTERVAL = 0.1
"""Seconds between two writings of the figures."""


class ProgressBar:
    """Drives a tqdm-like bar.

    Args:
        make: called as tqdm is: `make(total=…, desc=…, dynamic_ncols=…, postfix=…)`; its result has `update(n)`,
            `close()` and (if it shows figures) `set_postfix_str` or `postfix`.
        prompts: requests of the batch.
        children: completions that run for them.
    """

    def __init__(self, make: Callable[..., Any], prompts: int, children: int, desc: str = "Processed prompts") -> None:
        self._children = children
        self._children_done = 0
        self._prompts_done = 0
        self._tokens_in = 0
        self._tokens_out = 0
        self._start = self._shown = time.perf_counter()
        self._bar = make(total=prompts, desc=desc, dynamic_ncols=True, postfix=self._figures())

    def update(self, processed: Processed, outputs: Sequence[RequestOutput]) -> None:
        """After a step: its statistics, and the requests it finished."""
        self._children_done += processed.stats.num_children_finished
        self._tokens_out += processed.stats.num_generation_tokens
        self._tokens_in += processed.stats.num_prompt_tokens
        now = time.perf_counter()
        if outputs or now - self._shown >= _INTERVAL:
            self._shown = now
            self._show()
            self._bar.update(len(outputs))

    def advance(self, prompts_done: int) -> None:
        """Show that many prompts as done, for work that is not one batch."""
        self._bar.update(max(0, prompts_done - self._prompts_done))
        self._prompts_done = max(self._prompts_done, prompts_done)

    def close(self) -> None:
        self._show()
        self._bar.close()

    def _figures(self) -> str:
        seconds = max(time.perf_counter() - self._start, 1e-9)
        return (
            f"completions: {self._children_done}/{self._children}, in: {self._tokens_in / seconds:.1f} toks/s, "
            f"out: {self._tokens_out / seconds:.1f} toks/s"
        )

    def _show(self) -> None:
        show = getattr(self._bar, "set_postfix_str", None)
        if callable(show):
            show(self._figures(), refresh=False)
        elif hasattr(self._bar, "postfix"):
            self._bar.postfix = self._figures()
