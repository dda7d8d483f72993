"""Random arrivals, aborts and pressure: everything ends, every table is right after every step, every token is the one
that the child would have drawn alone, and no cache slot is ever read that has other content than it should."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.v1.core.simulation import Simulation, entries_of, prompt_entries
from vllm.exceptions import PromptTooLongError
from vllm.lora.request import LoRARequest
from vllm.v1.messages import FinishReason

LONGEST = 24
LORA = LoRARequest(lora_name="adapter", lora_int_id=1)


@st.composite
def prompts(draw: st.DrawFn) -> list[int]:
    """Prompts that are often equal, or begin alike."""
    length = draw(st.integers(1, LONGEST))
    common = draw(st.integers(0, length))
    kind = draw(st.integers(0, 2))
    return [2 + i % 5 for i in range(common)] + [10 + kind] * (length - common)


configurations = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(1, 24),
        "block_size": st.sampled_from([1, 2, 3, 4, 8]),
        "max_num_seqs": st.integers(1, 8),
        "max_num_batched_tokens": st.integers(1, 20),
        "max_model_len": st.sampled_from([8, 30, 4096]),
        "enable_chunked_prefill": st.sampled_from([True, True, False]),
        "enable_prefix_caching": st.booleans(),
        "policy": st.sampled_from(["fcfs", "priority"]),
        "lag": st.booleans(),
    }
)


class RandomSchedules(RuleBasedStateMachine):
    """A front end that does anything at any time."""

    @initialize(configuration=configurations)
    def start(self, configuration: dict[str, Any]) -> None:
        self.simulation = Simulation(**configuration)
        self.not_ready: list[list[int]] = []
        self.total = 0

    @rule(
        prompt=prompts(),
        goes_on=st.booleans(),
        n=st.sampled_from([1, 1, 2, 3, 5, 64]),
        max_tokens=st.sampled_from([1, 5, 9, 17, 40, None]),
        min_tokens=st.sampled_from([0, 0, 1, 4]),
        ignore_eos=st.sampled_from([True, True, False]),
        stops=st.sampled_from([None, None, None, [4], list(range(3, 13))]),
        logprobs=st.sampled_from([None, None, 0, 2]),
        stream=st.booleans(),
        priority=st.integers(-1, 1),
        arrival_time=st.sampled_from([0.0, 1.0]),
        finish_after=st.sampled_from([None, None, None, 1, 2]),
        ready=st.sampled_from([True, True, True, False]),
        extras=st.sampled_from(
            [
                {},
                {},
                {},
                {"lora": LORA},
                {"cache_salt": "s"},
                {"prompt_logprobs": 1},
                {"skip_reading_prefix_cache": True},
            ]
        ),
    )
    def submit(
        self,
        prompt: list[int],
        goes_on: bool,
        n: int,
        max_tokens: int | None,
        min_tokens: int,
        ignore_eos: bool,
        stops: list[int] | None,
        logprobs: int | None,
        stream: bool,
        priority: int,
        arrival_time: float,
        finish_after: int | None,
        ready: bool,
        extras: dict[str, Any],
    ) -> None:
        told = [child for child in self.simulation.children.values() if child.tokens]
        if goes_on and told:  # the next turn of a dialogue: its prompt begins with what a child has said
            child = told[(len(prompt) + n) % len(told)]
            prompt = child.request.prompt_token_ids.tolist() + child.tokens + prompt[:2]
        if max_tokens is None and n > 5:
            max_tokens = 3
        if max_tokens is not None:
            min_tokens = min(min_tokens, max_tokens)
        params = dict(
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            ignore_eos=ignore_eos and max_tokens is not None,
            stop_token_ids=stops,
            logprobs=logprobs,
            **extras,
        )
        try:
            handles = self.simulation.add(
                prompt,
                n,
                stream,
                priority,
                arrival_time=arrival_time,
                finish_after=None if n == 1 else finish_after,
                ready=ready,
                **params,
            )
        except PromptTooLongError:
            assert len(prompt) > self.simulation.scheduler.max_prompt_len
            self.simulation.scheduler.check_integrity()
            return
        if not ready:
            self.not_ready.append(handles)

    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.simulation.step()

    @precondition(lambda self: self.simulation.children)
    @rule(what=st.sampled_from(["abort", "abort", "stop", "fail", "ready", "ready", "reset", "drain"]), data=st.data())
    def disturb(self, what: str, data: st.DataObject) -> None:
        simulation = self.simulation
        if what == "drain":
            self.drain()
        elif what == "reset":
            simulation.scheduler.reset_prefix_cache()
        elif what == "ready":
            if self.not_ready:
                simulation.scheduler.set_ready(self.not_ready.pop(data.draw(st.integers(0, len(self.not_ready) - 1))))
        else:
            handles = list(simulation.children)
            first = data.draw(st.integers(0, len(handles) - 1))
            some = handles[first : first + data.draw(st.sampled_from([1, 1, 2, 70]))]
            if what == "abort":
                simulation.abort([*some, 10**9])
            elif what == "stop":
                simulation.stop([handle for handle in some if simulation.children[handle].request.stream])
            else:
                simulation.runner.failing.update(some[:1])

    def drain(self) -> None:
        """To the end, and on from there."""
        for handles in self.not_ready:
            self.simulation.scheduler.set_ready(handles)
        self.not_ready.clear()
        self.simulation.run()

    def teardown(self) -> None:
        if not hasattr(self, "simulation"):
            return
        self.drain()
        simulation = self.simulation
        simulation.check_outputs()
        for child in simulation.children.values():
            assert child.stopped or child.reason != FinishReason.NONE, "a child without an end"
        for handle, columns in simulation.prompt_logprobs.items():
            request = simulation.children[handle].request
            prompt = request.prompt_token_ids.tolist()
            truth = prompt_entries(prompt, 0, len(prompt) - 1, 1)
            assert [[t for t, _ in e] for e in entries_of(columns)] == [[t for t, _ in e] for e in truth]
        assert simulation.runner.prompt_tokens == simulation.scheduler.stats().prompt_tokens_computed
        assert sum(len(child.tokens) for child in simulation.children.values()) <= simulation.new_tokens
        assert not simulation.runner.kept or simulation.scheduler._state.dropped_keys


TestRandomSchedules = RandomSchedules.TestCase
TestRandomSchedules.settings = settings(
    stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)
TestRandomSchedules.pytestmark = [pytest.mark.timeout(300)]
