"""Counts that do not depend on the machine: a change that makes the engine do more shows here, not in seconds.

    python -m vllm.benchmarks.counts [--expected FILE [--update]]

An engine without a model (real front end, real scheduler, one constant token) runs a few workloads, and these are
counted: steps, prompt tokens computed, messages of the core and their bytes as they would travel, and per step of
steady decoding the Python calls and the bytes newly allocated at the step's peak. The first ones are exact; the last
two differ a little from one Python to another, and are held under a ceiling.
"""

# ruff: noqa: ARG002 - an executor that does nothing with what it is given

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tracemalloc
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.exceptions import UnsupportedError
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.executor.abstract import Executor
from vllm.v1.step import RunnerOutput, SchedulerOutput

EXACT = ("steps", "prompt_tokens_computed", "messages", "message_bytes", "outputs")
CEILINGS = ("calls_per_step", "peak_bytes_per_step")
HEADROOM = 1.25
"""Ceilings are this much above what was counted when the file was written."""


@dataclass(frozen=True)
class Workload:
    """`prompts` x `n` completions, all submitted at once."""

    prompts: int
    n: int
    prompt_len: int
    output_len: int
    kind: RequestOutputKind
    same_prompt: bool = False

    @property
    def name(self) -> str:
        same = "same:" if self.same_prompt else ""
        return f"{self.prompts}x{self.n}:{same}{self.prompt_len}:{self.output_len}:{self.kind.name.lower()}"


WORKLOADS = (
    Workload(1, 1, 32, 48, RequestOutputKind.FINAL_ONLY),
    Workload(1, 1, 32, 48, RequestOutputKind.DELTA),
    Workload(32, 1, 40, 48, RequestOutputKind.FINAL_ONLY),
    Workload(32, 1, 40, 48, RequestOutputKind.DELTA),
    Workload(1, 64, 300, 48, RequestOutputKind.FINAL_ONLY),
    Workload(1, 64, 300, 48, RequestOutputKind.DELTA),
    Workload(4, 8, 300, 48, RequestOutputKind.CUMULATIVE),
    Workload(8, 4, 300, 48, RequestOutputKind.FINAL_ONLY, same_prompt=True),
    Workload(1, 200, 100, 48, RequestOutputKind.FINAL_ONLY),
)
"""The last one has more children than run at a time."""


class ConstantExecutor(Executor):
    """Every draw is the same token."""

    def __init__(self, config: VllmConfig) -> None:
        super().__init__(config)
        self.is_busy = lambda: False

    @property
    def num_blocks(self) -> int:
        return self.config.cache.num_blocks or 1

    @property
    def weights_version(self) -> int:
        return 0

    @property
    def is_sleeping(self) -> bool:
        return False

    def execute(self, step: SchedulerOutput) -> RunnerOutput:
        drawn = step.handles[np.flatnonzero(step.samples)].tolist()
        drawn += [member.handle for fork in step.forks for member in fork.members]
        handles = np.array(drawn, np.int64)
        return RunnerOutput(handles, np.full(len(handles), 7, np.int32))

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> set[str]:
        raise UnsupportedError("this executor has no weights")

    def sleep(self, level: int = 1) -> None:
        raise UnsupportedError("this executor has no memory")

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        raise UnsupportedError("this executor has no memory")

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        raise UnsupportedError("this executor has no workers")

    def shutdown(self) -> None:
        """Nothing is held."""


def count(workload: Workload) -> dict[str, int]:
    """Run a workload once for the counts, and once more for the ceilings (profiling disturbs allocations)."""
    engine, totals = _engine()
    _submit(engine, workload)
    _run(engine)
    now = engine.metrics.scheduler
    counted = {"steps": now.step, "prompt_tokens_computed": now.prompt_tokens_computed, **totals}
    engine.check_integrity()
    engine.shutdown()

    engine, _ = _engine()
    _submit(engine, workload)
    calls, peaks = _steady_steps(engine, workload.output_len)
    _run(engine)
    engine.shutdown()
    return counted | {"calls_per_step": calls, "peak_bytes_per_step": peaks}


def _engine() -> tuple[Any, dict[str, int]]:
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.engine.processor import ModelInfo
    from vllm.v1.engine.serial import Encoder, Outputs

    config = VllmConfig(
        model=ModelConfig("counts", "", 1024, "float32", skip_tokenizer_init=True, seed=0),
        cache=CacheConfig(num_blocks=4096),
        scheduler=SchedulerConfig(max_num_seqs=128, max_num_batched_tokens=512),
    )
    engine = LLMEngine(config, multiprocessing=False, model=ModelInfo(1000), executor=ConstantExecutor(config))
    totals = {"messages": 0, "message_bytes": 0, "outputs": 0}
    encoder = Encoder()
    process = engine.output_processor.process

    def counted(message: Any, *more: Any) -> Any:
        totals["messages"] += 1
        message.timestamp = 1.0  # a float takes nine bytes, whatever it is; a moment of exactly zero would not
        totals["message_bytes"] += len(encoder.encode(Outputs(message)))
        processed = process(message, *more)
        totals["outputs"] += len(processed.outputs)
        return processed

    engine.output_processor.process = counted  # type: ignore[method-assign, assignment]
    return engine, totals


def _submit(engine: Any, workload: Workload) -> None:
    params = SamplingParams(
        n=workload.n,
        max_tokens=workload.output_len,
        ignore_eos=True,
        detokenize=False,
        output_kind=workload.kind,
    )
    for index in range(workload.prompts):
        first = 100 if workload.same_prompt else 100 + index
        prompt = [first, *range(1, workload.prompt_len)]
        engine.add_request(f"count-{index}", prompt, params)


def _run(engine: Any) -> None:
    while engine.has_unfinished_requests():
        engine.step()


def _steady_steps(engine: Any, output_len: int) -> tuple[int, int]:
    """Python calls of the median step, and bytes allocated at the peak of the median step, while all decode. The steps
    that take a new block differ from the others, and the median is of the others."""
    for _ in range(output_len // 4):
        engine.step()
    step = engine.step
    calls: list[int] = []
    seen = 0

    def profile(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal seen
        seen += event in ("call", "c_call")

    gc.collect()
    gc.disable()
    earlier = sys.getprofile()
    try:
        for _ in range(7):
            seen = 0
            sys.setprofile(profile)
            step()
            sys.setprofile(earlier)
            calls.append(seen)
        peaks: list[int] = []
        tracemalloc.start()
        try:
            for _ in range(7):
                tracemalloc.reset_peak()
                before, _peak = tracemalloc.get_traced_memory()
                step()
                peaks.append(tracemalloc.get_traced_memory()[1] - before)
        finally:
            tracemalloc.stop()
    finally:
        sys.setprofile(earlier)
        gc.enable()
    return int(statistics.median(calls)), int(statistics.median(peaks))


def differences(expected: dict[str, dict[str, int]], counted: dict[str, dict[str, int]]) -> list[str]:
    """What is not as expected, in words; empty if all is well."""
    found = [f"{name}: not counted" for name in expected.keys() - counted.keys()]
    found += [f"{name}: not expected" for name in counted.keys() - expected.keys()]
    for name in sorted(expected.keys() & counted.keys()):
        for what in EXACT:
            if counted[name][what] != expected[name][what]:
                found.append(f"{name}: {what} is {counted[name][what]}, not {expected[name][what]}")
        for what in CEILINGS:
            if counted[name][what] > expected[name][what]:
                found.append(f"{name}: {what} is {counted[name][what]}, above {expected[name][what]}")
    return found


def with_headroom(counted: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    """As an expectation."""
    return {
        name: {what: int(value * HEADROOM) if what in CEILINGS else value for what, value in values.items()}
        for name, values in counted.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--expected", metavar="FILE", help="compare with the counts in this file")
    parser.add_argument("--update", action="store_true", help="write that file, in place of comparing")
    args = parser.parse_args()
    counted = {workload.name: count(workload) for workload in WORKLOADS}
    columns = (*EXACT, *CEILINGS)
    print(f"{'prompts x n:in:out:kind':<34}" + "".join(f"{name:>24}" for name in columns))
    for name, values in counted.items():
        print(f"{name:<34}" + "".join(f"{values[column]:>24,}" for column in columns))
    if not args.expected:
        return 0
    path = Path(args.expected)
    if args.update:
        path.write_text(json.dumps(with_headroom(counted), indent=2) + "\n")
        return 0
    found = differences(json.loads(path.read_text()), counted)
    for line in found:
        print(line, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
