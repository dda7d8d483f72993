"""The log line that says every ten seconds what the engine does."""

from __future__ import annotations

import time

from vllm.logger import init_logger
from vllm.v1.messages import SchedulerStats
from vllm.v1.metrics.stats import EngineMetrics

logger = init_logger(__name__)


class StatsLogger:
    """Rates since the last line. Silent while nothing happens."""

    SECONDS = 10.0

    def __init__(self, metrics: EngineMetrics) -> None:
        self._metrics = metrics
        self._last = SchedulerStats()
        self._moment = time.monotonic()
        self._idle = True

    def log(self) -> None:
        """One line, unless the engine was idle at this and at the last call."""
        text = self.line(time.monotonic())
        idle = self._metrics.scheduler.num_running + self._metrics.scheduler.num_waiting == 0 and "0.0 tokens/s" in text
        if not (idle and self._idle):
            logger.info(text)
        self._idle = idle

    def line(self, now: float) -> str:
        """What is to be said at `now` (of time.monotonic())."""
        stats, last = self._metrics.scheduler, self._last
        seconds = max(now - self._moment, 1e-9)
        self._last, self._moment = stats, now
        queries = stats.prefix_cache_queries - last.prefix_cache_queries
        hits = stats.prefix_cache_hits - last.prefix_cache_hits
        rate = f"{100 * hits / queries:.1f}%" if queries else "-"
        return (
            f"generation {(stats.generation_tokens - last.generation_tokens) / seconds:.1f} tokens/s, "
            f"prompts {(stats.prompt_tokens - last.prompt_tokens) / seconds:.1f} tokens/s "
            f"(computed {(stats.prompt_tokens_computed - last.prompt_tokens_computed) / seconds:.1f}), "
            f"running {stats.num_running}, waiting {stats.num_waiting}, "
            f"KV cache {100 * stats.kv_cache_usage:.1f}%, prefix cache hits {rate}, "
            f"preempted {stats.num_preemptions - last.num_preemptions}"
        )
