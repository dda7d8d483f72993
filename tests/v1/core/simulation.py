"""A runner without a model, whose cache tells lies nowhere: the physical cache is modelled position by position.

What stands in a cache slot is a number that depends on every token before it, as K and V do. The runner reads, through
the block tables it was given, all that a sequence has in the cache before it computes anything, and compares it with
what that sequence's own tokens say: a wrong table, a missing copy, a stale hit, a block used twice, or a position that
was never computed is found in the step in which it is read. Tokens are drawn from that content, the child's seed and
the position in its output, so that a child's tokens must equal those of `expected_tokens`, which knows no cache at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.lora.request import LoRARequest
from vllm.model_executor.backends.interface import LogprobColumns
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.messages import EngineCoreOutputs, EngineCoreRequest, FinishReason, LogprobColumnsMsg
from vllm.v1.step import NewSequence, RunnerOutput, SchedulerOutput

VOCABULARY = 50
EOS = 1
MASK = 2**64 - 1


def mix(*values: int) -> int:
    """A 64-bit number from others (splitmix64 steps)."""
    x = 0x9E3779B97F4A7C15
    for value in values:
        x = (x ^ value) & MASK
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
        x ^= x >> 31
    return x


def start_of(lora: LoRARequest | None) -> int:
    return 0 if lora is None else mix(lora.lora_int_id, 77)


def draw(content: int, seed: int, position: int) -> int:
    """The token at `position` of an output. EOS now and then."""
    x = mix(content, seed, position, 5)
    return EOS if x % 23 == 0 else 2 + (x >> 8) % (VOCABULARY - 2)


def contents(tokens: Iterable[int], lora: LoRARequest | None = None) -> list[int]:
    """What stands in the cache for a sequence, position by position."""
    content, found = start_of(lora), []
    for token in tokens:
        content = mix(content, token, 3)
        found.append(content)
    return found


def logprob_of(content: int, token: int) -> float:
    return -(mix(content, token) % 1000) / 100


def expected_tokens(
    prompt: list[int], seed: int, params: SamplingParams, longest: int, lora: LoRARequest | None = None
) -> tuple[list[int], FinishReason, int]:
    """Tokens, finish reason and stop reason of one child, alone and without a cache."""
    tokens: list[int] = []
    content = contents(prompt, lora)[-1]
    limit = longest if params.max_tokens is None else min(longest, params.max_tokens)
    while True:
        token = draw(content, seed, len(tokens))
        tokens.append(token)
        if len(tokens) >= params.min_tokens:
            if token == EOS and not params.ignore_eos:
                return tokens, FinishReason.STOP, -1
            if token in (params.stop_token_ids or ()):
                return tokens, FinishReason.STOP, token
        if len(tokens) >= limit:
            return tokens, FinishReason.LENGTH, -1
        content = mix(content, token, 3)


@dataclass
class _Sequence:
    """What stands in a slot."""

    handle: int
    params: SamplingParams
    seed: int
    tokens: list[int]
    prompt_len: int
    num_computed: int
    blocks: list[int]
    start: int
    contents: list[int] = field(default_factory=list)

    def content(self, position: int) -> int:
        while len(self.contents) <= position:
            before = self.contents[-1] if self.contents else self.start
            self.contents.append(mix(before, self.tokens[len(self.contents)], 3))
        return self.contents[position]


class FakeRunner:
    """Executes scheduler outputs and objects to every one that is not right."""

    def __init__(self, num_blocks: int, block_size: int, num_slots: int, budget: int) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.num_slots = num_slots
        self.budget = budget
        self.cache: dict[int, int] = {}
        """Cache slot (block * block_size + offset) -> content."""
        self.slots: dict[int, _Sequence] = {}
        self.kept: dict[int, int] = {}
        self.finished: set[int] = set()
        self.failing: set[int] = set()
        """Handles whose draws fail."""
        self.num_steps = 0
        self.num_copies = 0
        self.prompt_tokens = 0
        """Prompt tokens computed."""
        self.max_rows = 0

    def execute(self, step: SchedulerOutput) -> RunnerOutput:
        self.num_steps += 1
        self._apply(step)
        rows = len(step.slots)
        assert len(set(step.slots.tolist())) == rows, "a slot has two rows"
        assert rows <= self.num_slots
        assert int(step.num_tokens.sum()) <= self.budget
        self.max_rows = max(self.max_rows, rows)
        reads = [self._read(step, row) for row in range(rows)]  # before anything is written, as attention would
        self._check_shared(step)
        written: set[int] = set()
        for row in range(rows):
            self._write(step, row, reads[row], written)
        for sequence in self.slots.values():
            for position in range(sequence.num_computed):
                where = self._where(sequence.blocks, position)
                assert self.cache[where] == sequence.content(position), "another row wrote over this sequence"
        return self._draw(step)

    def _apply(self, step: SchedulerOutput) -> None:
        self.finished.update(step.finished_handles)
        for slot in step.freed_slots:
            del self.slots[slot]
        for new in step.new_sequences:
            self._enter(new)
        for slot, start, ids in step.block_updates:
            blocks = self.slots[slot].blocks
            assert 0 <= start <= len(blocks), "a gap in a block table"
            assert ids
            blocks[start : start + len(ids)] = ids
        targets = {target for _, target in step.copies}
        assert len(targets) == len(step.copies)
        assert not targets & {source for source, _ in step.copies}
        for source, target in step.copies:
            self.num_copies += 1
            for offset in range(self.block_size):
                self.cache.pop(target * self.block_size + offset, None)
                if source * self.block_size + offset in self.cache:
                    self.cache[target * self.block_size + offset] = self.cache[source * self.block_size + offset]

    def _enter(self, new: NewSequence) -> None:
        assert new.slot not in self.slots, "the slot is taken"
        assert 0 <= new.slot < self.num_slots
        assert new.handle not in self.finished, "a finished child enters a slot"
        assert new.handle not in {sequence.handle for sequence in self.slots.values()}, "a child is in two slots"
        assert len(set(new.block_ids)) == len(new.block_ids)
        self.slots[new.slot] = _Sequence(
            handle=new.handle,
            params=new.params,
            seed=new.seed,
            tokens=new.prompt_token_ids.tolist() + list(new.output_token_ids),
            prompt_len=len(new.prompt_token_ids),
            num_computed=new.num_computed_tokens,
            blocks=list(new.block_ids),
            start=start_of(new.lora_request),
        )

    def _where(self, blocks: list[int], position: int) -> int:
        block = blocks[position // self.block_size]
        assert 0 <= block < self.num_blocks
        return block * self.block_size + position % self.block_size

    def _read(self, step: SchedulerOutput, row: int) -> int:
        """Content of the last cached token, all of it compared."""
        sequence = self.slots[int(step.slots[row])]
        assert sequence.handle == step.handles[row]
        assert sequence.num_computed == step.num_computed[row], "the row does not go on where it stopped"
        content = sequence.start
        for position in range(sequence.num_computed):
            content = self.cache.get(self._where(sequence.blocks, position), -1)
            assert content == sequence.content(position), f"position {position} of {sequence.handle} has other content"
        return content

    def _write(self, step: SchedulerOutput, row: int, content: int, written: set[int]) -> None:
        sequence = self.slots[int(step.slots[row])]
        count = int(step.num_tokens[row])
        assert count >= 1
        assert sequence.num_computed + count <= len(sequence.tokens), "the row computes tokens that are not there"
        for position in range(sequence.num_computed, sequence.num_computed + count):
            content = mix(content, sequence.tokens[position], 3)
            where = self._where(sequence.blocks, position)
            assert where not in written, "two rows write one cache slot"
            written.add(where)
            self.cache[where] = content
        self.prompt_tokens += max(0, min(sequence.num_computed + count, sequence.prompt_len) - sequence.num_computed)
        sequence.num_computed += count
        if step.samples[row]:
            assert sequence.num_computed == len(sequence.tokens), "a draw before the last token"

    def _check_shared(self, step: SchedulerOutput) -> None:
        taken: set[int] = set()
        for first, count, blocks in step.shared:
            members = range(first, first + count)
            assert count >= 2
            assert blocks >= 1
            assert first + count <= len(step.slots)
            assert taken.isdisjoint(members)
            taken.update(members)
            tables = [self.slots[int(step.slots[row])].blocks[:blocks] for row in members]
            assert all(table == tables[0] and len(table) == blocks for table in tables)
            assert all(step.num_computed[row] >= blocks * self.block_size for row in members)

    def _draw(self, step: SchedulerOutput) -> RunnerOutput:
        handles: list[int] = []
        tokens: list[int] = []
        entries: list[list[tuple[int, float]]] = []
        errors: dict[int, str] = {}

        def sample(handle: int, params: SamplingParams, seed: int, position: int, content: int) -> int:
            assert handle not in self.finished, "a draw for a finished child"
            assert handle not in handles, "two draws for one child"
            token = draw(content, seed, position)
            if handle in self.failing:
                errors[handle] = "a logits processor raised"
                token = -7
            handles.append(handle)
            tokens.append(token)
            asked = -1 if params.logprobs is None else params.logprobs
            entries.append([(token + i, logprob_of(content, token + i)) for i in range(asked + 1)])
            return token

        for row in np.flatnonzero(step.samples).tolist():
            sequence = self.slots[int(step.slots[row])]
            position = len(sequence.tokens) - sequence.prompt_len
            content = sequence.content(sequence.num_computed - 1)
            sequence.tokens.append(sample(sequence.handle, sequence.params, sequence.seed, position, content))
        for fork in step.forks:
            if fork.row >= 0:
                sequence = self.slots[int(step.slots[fork.row])]
                assert sequence.num_computed == sequence.prompt_len == len(fork.prompt_token_ids)
                content = sequence.content(sequence.prompt_len - 1)
            else:
                content = self.kept[fork.keep_key]
            if fork.keep and fork.row >= 0:
                assert fork.keep_key not in self.kept
                self.kept[fork.keep_key] = content
            for member in fork.members:
                sample(member.handle, member.params, member.seed, 0, content)
        for key in step.dropped_keys:
            del self.kept[key]
        logprobs = _columns(entries) if any(entries) else None
        prompt_logprobs = {row: self._prompt_logprobs(step, row, asked) for row, asked in step.prompt_logprobs}
        return RunnerOutput(np.array(handles, np.int64), np.array(tokens, np.int32), logprobs, prompt_logprobs, errors)

    def _prompt_logprobs(self, step: SchedulerOutput, row: int, asked: int) -> LogprobColumns:
        sequence = self.slots[int(step.slots[row])]
        start = int(step.num_computed[row])
        end = min(start + int(step.num_tokens[row]), sequence.prompt_len - 1)
        return _columns(prompt_entries(sequence.tokens, start, end, asked, sequence.start))


def prompt_entries(
    tokens: list[int], start: int, end: int, asked: int, first: int = 0
) -> list[list[tuple[int, float]]]:
    """Entries for the prompt tokens start + 1 .. end."""
    content, entries = first, []
    for position in range(end):
        content = mix(content, tokens[position], 3)
        if position >= start:
            token = tokens[position + 1]
            entries.append([(token + i, logprob_of(content, token + i)) for i in range(asked + 1)])
    return entries


def _columns(entries: list[list[tuple[int, float]]]) -> LogprobColumns:
    flat = [item for entry in entries for item in entry]
    return LogprobColumns(
        offsets=np.cumsum([0, *map(len, entries)]).astype(np.int32),
        token_ids=np.array([token for token, _ in flat], np.int32),
        logprobs=np.array([value for _, value in flat], np.float32),
        ranks=np.array([1 if entry else 0 for entry in entries], np.int32),
    )


def entries_of(columns: LogprobColumnsMsg, first: int = 0, last: int | None = None) -> list[list[tuple[int, float]]]:
    """Entries first .. last - 1 of columns, as lists."""
    offsets = columns.offsets.tolist()
    last = len(offsets) - 1 if last is None else last
    return [
        list(
            zip(
                columns.token_ids[offsets[e] : offsets[e + 1]].tolist(),
                columns.logprobs[offsets[e] : offsets[e + 1]].tolist(),
                strict=True,
            )
        )
        for e in range(first, last)
    ]


def make_config(**changes: Any) -> VllmConfig:
    """A configuration by the fields' names, whichever part they stand in."""
    parts: dict[str, dict[str, Any]] = {"model": {}, "cache": {}, "scheduler": {}}
    for name, value in changes.items():
        for part, kind in (("model", ModelConfig), ("cache", CacheConfig), ("scheduler", SchedulerConfig)):
            if name in kind.__dataclass_fields__:
                parts[part][name] = value
                break
        else:
            raise TypeError(name)
    model = {"model": "none", "path": "", "max_model_len": 4096, "dtype": "float32", **parts["model"]}
    return VllmConfig(
        ModelConfig(**model), CacheConfig(**{"block_size": 4, **parts["cache"]}), SchedulerConfig(**parts["scheduler"])
    )


@dataclass
class Child:
    """What a front end knows of one child."""

    handle: int
    index: int
    request: EngineCoreRequest
    seed: int
    tokens: list[int] = field(default_factory=list)
    reason: FinishReason = FinishReason.NONE
    stop_reason: int = -1
    num_cached: int = -1
    logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    times: tuple[float, float, float, int] | None = None
    error: str | None = None
    stopped: bool = False
    """By the front end."""
    aborted: bool = False


class Simulation:
    """A scheduler, the fake runner, and a front end that checks every message."""

    def __init__(self, num_blocks: int = 64, lag: bool = False, check: bool = True, **changes: Any) -> None:
        self.config = make_config(**changes)
        limits = self.config.scheduler
        self.num_blocks = num_blocks
        self.scheduler = Scheduler(self.config, num_blocks)
        self.runner = FakeRunner(
            num_blocks, self.config.cache.block_size, limits.max_num_seqs, limits.max_num_batched_tokens
        )
        self.lag = lag
        self.check = check
        self.waiting: list[tuple[SchedulerOutput, RunnerOutput]] = []
        """Steps that have been run and not reported."""
        self.children: dict[int, Child] = {}
        self.prompt_logprobs: dict[int, LogprobColumnsMsg] = {}
        self.messages: list[EngineCoreOutputs] = []
        self.steps: list[SchedulerOutput] = []
        self.new_tokens = 0
        self.first_tokens: list[int] = []
        self._next = 1
        self.on_step: Callable[[SchedulerOutput], None] = lambda step: None

    # The front end

    def add(
        self,
        prompt: list[int],
        n: int = 1,
        stream: bool = False,
        priority: int = 0,
        lora: LoRARequest | None = None,
        cache_salt: str | None = None,
        ready: bool = True,
        arrival_time: float = 0.0,
        finish_after: int | None = None,
        index_offset: int = 0,
        **params: Any,
    ) -> list[int]:
        """Submit a request; its handles. A seed is given so that the outputs can be foretold."""
        handles = list(range(self._next, self._next + n))
        self._next += n
        params.setdefault("seed", handles[0] * 1000)
        sampling = SamplingParams(n=n, **params)
        message = EngineCoreRequest(
            handles=handles,
            prompt_token_ids=np.array(prompt, np.int32),
            params=sampling,
            arrival_time=arrival_time,
            stream=stream,
            eos_token_ids=[] if sampling.ignore_eos else [EOS],
            priority=priority,
            lora_request=lora,
            cache_salt=cache_salt,
            finish_after=finish_after,
            index_offset=index_offset,
        )
        if ready:
            self.scheduler.add_request(message)
        else:
            self.scheduler.add_request(message, ready=False)
        for index, handle in enumerate(handles):
            seed = (sampling.seed + index_offset + index) % 2**63 if sampling.seed is not None else 0
            self.children[handle] = Child(handle, index, message, seed)
        return handles

    def abort(self, handles: Iterable[int]) -> None:
        handles = list(handles)
        for handle in handles:
            if handle in self.scheduler._state.children:
                self.children[handle].aborted = True
        self.scheduler.abort(handles)

    def stop(self, handles: Iterable[int]) -> None:
        handles = list(handles)
        for handle in handles:
            if handle in self.scheduler._state.children:
                self.children[handle].stopped = True
        self.scheduler.stop_children(handles)

    def receive(self, message: EngineCoreOutputs | None) -> None:
        if message is None:
            return
        self.messages.append(message)
        handles = message.handles.tolist()
        count = len(handles)
        assert len(set(handles)) == count, "a handle stands twice in a message"
        assert len(message.offsets) == count + 1
        for column in (message.finish_reasons, message.stop_reasons, message.num_cached_tokens):
            assert len(column) == count
        assert message.offsets[-1] == len(message.token_ids)
        ended = 0
        for position, handle in enumerate(handles):
            child = self.children[handle]
            assert child.reason == FinishReason.NONE, "something after the end"
            assert not child.stopped, "something after the front end stopped it"
            first, last = int(message.offsets[position]), int(message.offsets[position + 1])
            tokens = message.token_ids[first:last].tolist()
            child.reason = FinishReason(message.finish_reasons[position])
            child.stop_reason = int(message.stop_reasons[position])
            assert tokens or child.reason in (FinishReason.ABORT, FinishReason.ERROR), "an empty report"
            if child.request.stream:
                assert len(tokens) <= 1 or self.lag
            else:
                assert child.reason != FinishReason.NONE, "a final-only child is reported once"
            child.tokens += tokens
            cached = int(message.num_cached_tokens[position])
            assert child.num_cached in (-1, cached)
            child.num_cached = cached
            if message.logprobs is not None:
                entries = entries_of(message.logprobs, first, last)
                wanted = child.request.params.logprobs
                assert all(len(entry) == (0 if wanted is None else wanted + 1) for entry in entries)
                child.logprobs += entries if wanted is not None else []
            else:
                assert child.request.params.logprobs is None or not tokens
            if child.reason != FinishReason.NONE:
                times = message.finished_times
                assert times is not None
                child.times = (
                    float(times.scheduled[ended]),
                    float(times.first_token[ended]),
                    float(times.last_token[ended]),
                    int(times.num_preemptions[ended]),
                )
                ended += 1
        assert (0 if message.finished_times is None else len(message.finished_times.scheduled)) == ended
        for handle, columns in message.prompt_logprobs.items():
            assert handle in handles
            assert handle not in self.prompt_logprobs
            self.prompt_logprobs[handle] = columns
        for handle, text in message.errors.items():
            assert self.children[handle].reason == FinishReason.ERROR
            self.children[handle].error = text
        self.new_tokens += message.new_tokens
        if message.first_token_handles is not None:
            self.first_tokens += message.first_token_handles.tolist()

    # Steps

    def step(self) -> bool:
        """One step; False when there was nothing to run and nothing to report."""
        output = self.scheduler.schedule()
        if self.check:
            self.scheduler.check_integrity()
        ran = not output.is_empty
        if ran:
            self.steps.append(output)
            self.on_step(output)
            self.waiting.append((output, self.runner.execute(output)))
        moved = bool(self.waiting)
        while len(self.waiting) > (1 if self.lag and ran else 0):
            self.receive(self.scheduler.update(*self.waiting.pop(0)))
            if self.check:
                self.scheduler.check_integrity()
        if not ran:
            self.receive(self.scheduler.take_outputs())
        return moved

    def run_until_quiet(self) -> None:
        """Until nothing can be done; something may be unfinished then."""
        while self.step():
            pass

    def run(self, most: int = 5_000) -> None:
        """Until nothing is left; the tables are empty then."""
        for _ in range(most):
            if not self.scheduler.has_unfinished() and not self.waiting:
                break
            if not self.step() and not self.waiting:
                assert not self.scheduler.has_unfinished(), f"nothing runs: {self.describe()}"
        else:
            raise AssertionError(f"not finished after {most} steps")
        self.scheduler.check_integrity()
        assert self.scheduler._kv.pool.num_free == self.num_blocks

    def describe(self) -> str:
        """What is live, for a failing assertion."""
        state = self.scheduler._state
        children = [(c.handle, c.state.name, c.slot, len(c.tokens), c.blocks) for c in state.children.values()]
        groups = [
            (g.number, g.state.name, g.blocks, g.num_running, g.num_drawing, g.best_key, g.queued) for g in state.groups
        ]
        return f"{self.scheduler.stats()}\n{children}\n{groups}\n{state.prefilling}\n{self.config}"

    def check_outputs(self) -> None:
        """Every child's tokens against those of a run alone; aborted ones have a part of them."""
        capacity = self.num_blocks * self.config.cache.block_size
        for child in self.children.values():
            request = child.request
            prompt = request.prompt_token_ids.tolist()
            longest = min(self.config.model.max_model_len - len(prompt), capacity - len(prompt) + 1)
            tokens, reason, stop_reason = expected_tokens(
                prompt, child.seed, request.params, longest, request.lora_request
            )
            assert child.tokens == tokens[: len(child.tokens)], child
            if child.stopped:
                assert child.reason == FinishReason.NONE
            elif child.reason in (FinishReason.ABORT, FinishReason.ERROR):
                assert child.aborted or request.finish_after is not None or self.runner.failing & set(request.handles)
            else:
                assert (child.tokens, child.reason, child.stop_reason) == (tokens, reason, stop_reason)
            if request.params.logprobs is not None:
                read = contents(prompt + child.tokens, request.lora_request)[len(prompt) - 1 :]
                truth = [
                    [(token + i, logprob_of(content, token + i)) for i in range(request.params.logprobs + 1)]
                    for content, token in zip(read, child.tokens, strict=False)
                ]
                assert [[t for t, _ in e] for e in child.logprobs] == [[t for t, _ in e] for e in truth]
                np.testing.assert_allclose(
                    [v for e in child.logprobs for _, v in e], [v for e in truth for _, v in e], rtol=1e-6
                )
            if child.times is not None and child.tokens:
                scheduled, first, last, _ = child.times
                assert 0 < scheduled <= first <= last
