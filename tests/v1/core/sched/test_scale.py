"""Large n: the work and the memory of a step do not grow with the children that wait."""

from __future__ import annotations

import sys
import tracemalloc

import numpy as np

from tests.v1.core.simulation import make_config
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.messages import EngineCoreRequest
from vllm.v1.step import RunnerOutput, SchedulerOutput

SLOTS = 32


def add(scheduler: Scheduler, n: int, first: int = 1, length: int = 64, max_tokens: int = 4) -> None:
    scheduler.add_request(
        EngineCoreRequest(
            handles=list(range(first, first + n)),
            prompt_token_ids=np.arange(length, dtype=np.int32),
            params=SamplingParams(n=n, max_tokens=max_tokens, ignore_eos=True, seed=1),
            arrival_time=0.0,
            stream=False,
        )
    )


def execute(step: SchedulerOutput) -> RunnerOutput:
    members = [member.handle for fork in step.forks for member in fork.members]
    handles = np.concatenate((step.handles[step.samples], np.array(members, np.int64)))
    return RunnerOutput(handles, np.full(len(handles), 7, np.int32))


def calls_per_step(n: int) -> list[int]:
    """Python calls of each step's planning and reporting."""
    scheduler = Scheduler(make_config(max_num_seqs=SLOTS), 4096)
    add(scheduler, n)
    counts = []

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    while scheduler.has_unfinished():
        calls = 0
        sys.setprofile(count)
        try:
            step = scheduler.schedule()
            scheduler.update(step, execute(step))
        finally:
            sys.setprofile(None)
        counts.append(calls)
    return counts


def test_a_steps_work_does_not_grow_with_those_that_wait():
    few, many = calls_per_step(4 * SLOTS), calls_per_step(40 * SLOTS)
    assert len(many) > 5 * len(few)
    assert max(many[1:]) <= 1.1 * max(few[1:])  # all but the step that draws the first tokens
    assert sum(many[1:]) / len(many) <= 1.1 * sum(few[1:]) / len(few)


def test_decode_steps_make_no_call_per_row():
    def calls(rows: int) -> int:
        scheduler = Scheduler(make_config(max_num_seqs=rows, block_size=64), 4096)
        for i in range(rows):
            add(scheduler, 1, first=1 + i, length=5 + i % 3, max_tokens=20)
        made = 0

        def count(frame: object, event: str, argument: object) -> None:
            nonlocal made
            made += event == "call"

        for index in range(10):
            if index == 9:
                sys.setprofile(count)
            step = scheduler.schedule()
            result = execute(step) if index < 9 else RunnerOutput(step.handles, np.full(rows, 7, np.int32))
            scheduler.update(step, result)
        sys.setprofile(None)
        return made

    assert calls(64) == calls(4)


def test_ten_thousand_children_hold_little_more_than_their_own_tokens():
    scheduler = Scheduler(make_config(max_num_seqs=SLOTS), 4096)
    n = 10_000
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    add(scheduler, n)
    step = scheduler.schedule()
    result = execute(step)
    scheduler.update(step, result)
    del step, result
    per_child = (tracemalloc.get_traced_memory()[0] - before) / n
    tracemalloc.stop()
    assert per_child < 1024  # bytes, whatever the prompt's length
    steps = 1
    told = 0
    while scheduler.has_unfinished():
        step = scheduler.schedule()
        message = scheduler.update(step, execute(step))
        told += 0 if message is None else len(message.handles)
        steps += 1
    assert told == n
    assert steps == 1 + 3 * -(-n // SLOTS)
    scheduler.check_integrity()
    assert scheduler.stats().prompt_tokens_computed == 64
    assert scheduler.stats().generation_tokens == 4 * n


def test_blocks_in_use_follow_the_running_children():
    scheduler = Scheduler(make_config(max_num_seqs=SLOTS, enable_prefix_caching=False), 4096)
    add(scheduler, 1000, length=66)
    most = 0
    while scheduler.has_unfinished():
        step = scheduler.schedule()
        most = max(most, 4096 - scheduler._kv.pool.num_free)
        scheduler.update(step, execute(step))
    assert most <= 17 + 2 * SLOTS
