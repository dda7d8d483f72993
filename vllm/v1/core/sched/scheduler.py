"""The scheduler's face: requests in, steps out, draws in, news out.

    add_request / abort / stop_children        at any time between the calls below
    schedule() -> SchedulerOutput              what the runner does next
    update(output, result) -> EngineCoreOutputs | None

`update` follows `schedule` by one step, or by two: the next step may be scheduled before the last one is reported (see
`plan`). Steps are reported in their order. An empty SchedulerOutput is not run and not reported.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterable

import msgspec
import numpy as np

from vllm.config import VllmConfig
from vllm.exceptions import BadRequestError, DuplicateRequestError, IntegrityError, PromptTooLongError
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.prefill_group import GroupState, PrefillGroup, PromptLogprobs
from vllm.v1.core.request import Child, ChildState, Request, SeedSource
from vllm.v1.core.sched.integrity import check_integrity
from vllm.v1.core.sched.plan import Planner, Step
from vllm.v1.core.sched.state import State
from vllm.v1.core.sched.update import Updater
from vllm.v1.messages import EngineCoreOutputs, EngineCoreRequest, SchedulerStats
from vllm.v1.step import RunnerOutput, SchedulerOutput


class Scheduler:
    def __init__(self, vllm_config: VllmConfig, num_blocks: int) -> None:
        cache, limits = vllm_config.cache, vllm_config.scheduler
        self.max_model_len = vllm_config.model.max_model_len
        self._limits = limits
        self._by_priority = limits.policy == "priority"
        self._kv = KVCacheManager(num_blocks, cache.block_size, cache.enable_prefix_caching)
        self._state = State(self._kv, limits.max_num_seqs)
        self._planner = Planner(self._state, limits.max_num_batched_tokens, limits.enable_chunked_prefill)
        self._updater = Updater(self._state)
        self._seeds = SeedSource(vllm_config.model.seed)
        self._arrivals = itertools.count()
        self._in_flight: deque[Step] = deque()

    # Requests

    @property
    def max_prompt_len(self) -> int:
        """Longest prompt that can be served: with one token of output, in the cache, and in one step if it must be."""
        limit = min(self.max_model_len - 1, self._kv.capacity)
        if not self._limits.enable_chunked_prefill:
            limit = min(limit, self._limits.max_num_batched_tokens)
        return limit

    def check_fits(self, num_tokens: int) -> None:
        """Raise PromptTooLongError if a prompt of this length could never be served."""
        if num_tokens > self.max_prompt_len:
            chunks = self._limits.enable_chunked_prefill
            step = "" if chunks else f", and a step, without chunked prefill, {self._limits.max_num_batched_tokens}"
            raise PromptTooLongError(
                f"the prompt has {num_tokens} tokens; at most {self.max_prompt_len} can be served: the maximum context "
                f"length is {self.max_model_len}, one of them for output; the KV cache holds {self._kv.capacity}{step}",
                "prompt",
            )

    def add_request(self, message: EngineCoreRequest, ready: bool = True) -> None:
        """Take in all children of a request, or raise and take in none.

        `ready=False`: its children draw their first tokens only after `set_ready` (a grammar is still compiling); the
        prompt is computed meanwhile.
        """
        state, params = self._state, message.params
        self._check(message)
        ready = ready and not message.hold
        priority = message.priority if self._by_priority else 0
        rank = (priority, message.arrival_time, next(self._arrivals))
        prompt_len = len(message.prompt_token_ids)
        seed = self._seeds.next() if params.seed is None else params.seed
        longest = min(self.max_model_len - prompt_len, self._kv.capacity - prompt_len + 1)
        request = Request(
            message, rank, seed, longest if params.max_tokens is None else min(longest, params.max_tokens)
        )
        group = self._group(message, request)
        request.children = [
            Child(handle, request, message.index_offset + i, group, not ready)
            for i, handle in enumerate(message.handles)
        ]
        group.add(request)
        state.children.update(zip(message.handles, request.children, strict=True))
        if message.hold:
            state.num_held += len(message.handles)
        else:
            state.stats.prompt_tokens += prompt_len
        if group.drawn:
            if ready:
                state.late[group] = None
        else:
            state.queue.update(group)

    def _check(self, message: EngineCoreRequest) -> None:
        handles = message.handles
        if not handles:
            raise BadRequestError("a request needs at least one child", "n")
        if len(set(handles)) != len(handles) or not self._state.children.keys().isdisjoint(handles):
            raise DuplicateRequestError("a handle of this request is live already, or stands in it twice")
        if not len(message.prompt_token_ids):
            raise BadRequestError("the prompt is empty", "prompt")
        self.check_fits(len(message.prompt_token_ids))
        if message.params.max_tokens is not None and message.params.max_tokens < 1:
            raise BadRequestError(f"max_tokens must be at least 1, got {message.params.max_tokens}", "max_tokens")

    def _group(self, message: EngineCoreRequest, request: Request) -> PrefillGroup:
        """The group that the request joins, or a new one."""
        state, kv, params = self._state, self._kv, message.params
        prompt = np.array(message.prompt_token_ids, np.int32)
        reads_cache = (
            kv.enable_prefix_caching and params.prompt_logprobs is None and not params.skip_reading_prefix_cache
        )
        key = None
        if reads_cache:
            lora = message.lora_request
            key = (None if lora is None else (lora.lora_int_id, lora.lora_name), message.cache_salt, prompt.tobytes())
            group = state.shared_groups.get(key)
            if group is not None:
                self._join(group, request)
                return group
        group = PrefillGroup(next(state.group_numbers), prompt, key, message.lora_request)
        group.reads_cache = reads_cache
        if kv.enable_prefix_caching:
            group.root = kv.root(message.lora_request, message.cache_salt)
        source = state.children.get(message.continues)
        if reads_cache and source is not None:
            group.source = source.group
        if params.prompt_logprobs is not None:
            group.prompt_logprobs = PromptLogprobs(params.prompt_logprobs, request)
        group.unstarted.append(request)
        state.groups[group] = None
        if key is not None:
            state.shared_groups[key] = group
        return group

    def _join(self, group: PrefillGroup, request: Request) -> None:
        if group.state == GroupState.WAITING and not group.drawn:
            group.unstarted.append(request)
            return
        size = self._kv.block_size
        request.num_cached = group.num_done // size * size
        if group.state == GroupState.PREFILL and not group.drawn:
            request.time_scheduled = time.monotonic()
        self._state.stats.prefix_cache_queries += group.prompt_len
        self._state.stats.prefix_cache_hits += request.num_cached

    def set_ready(self, handles: Iterable[int]) -> None:
        """Children that were added with `ready=False` may draw. Unknown handles are passed over."""
        for handle in handles:
            child = self._state.children.get(handle)
            if child is not None and child.waits:
                child.waits = False
                if child.group.drawn and child.state == ChildState.PENDING:
                    self._state.late[child.group] = None

    def abort(self, handles: Iterable[int]) -> None:
        """End children now; the next message says what each had. Unknown handles, and ended ones, are passed over."""
        for handle in handles:
            child = self._state.children.get(handle)
            if child is not None:
                self._state.abort(child)

    def abort_all(self) -> None:
        self.abort(list(self._state.children))

    def stop_children(self, handles: Iterable[int]) -> None:
        """The front end has ended these children (a stop string): they count for `finish_after`, and nothing more is
        reported of them."""
        state = self._state
        requests: dict[Request, None] = {}
        for handle in handles:
            child = state.children.get(handle)
            if child is not None:
                state.stop(child)
                requests[child.request] = None
        for request in requests:
            state.check_finish_after(request)

    def has_unfinished(self) -> bool:
        """Whether anything is left to compute or to tell. Children that only hold a prompt have nothing to compute."""
        return len(self._state.children) > self._state.num_held or self._state.outputs.has_news

    # Steps

    def schedule(self) -> SchedulerOutput:
        step = self._planner.plan(bool(self._in_flight), time.monotonic())
        if not step.output.is_empty:
            self._in_flight.append(step)
        return step.output

    def update(self, output: SchedulerOutput, result: RunnerOutput) -> EngineCoreOutputs | None:
        """What the runner drew in the oldest step that has not been reported."""
        if not self._in_flight or self._in_flight[0].output is not output:
            raise IntegrityError("steps must be reported once, in the order in which they were scheduled")
        step = self._in_flight.popleft()
        now = time.monotonic()
        self._state.stats.step += 1
        self._updater.update(step, result, now)
        return self._state.outputs.build(result.logprobs, self.stats(), now)

    def take_outputs(self) -> EngineCoreOutputs | None:
        """What ended since the last message, when no step follows that would tell."""
        return self._state.outputs.build(None, self.stats(), time.monotonic())

    # The cache, and debugging

    def reset_prefix_cache(self) -> bool:
        """Forget what the prefix cache has; False, and nothing done, while live children hold blocks."""
        return self._kv.pool.reset()

    def set_weights_version(self, version: int) -> None:
        """KV of other versions of the weights is never hit from now on. Only while nothing is live."""
        if self._state.children:
            raise RuntimeError(f"{len(self._state.children)} children are unfinished: weights change only between them")
        self._kv.weights_version = version

    def stats(self) -> SchedulerStats:
        """A snapshot."""
        state = self._state
        stats = msgspec.structs.replace(state.stats)
        stats.num_running = state.num_running
        stats.num_waiting = state.num_waiting
        stats.kv_cache_usage = self._kv.pool.usage
        return stats

    def check_integrity(self) -> None:
        """Compare all tables with each other; raise IntegrityError with the numbers. When nothing is live they are
        empty, and all blocks are free."""
        check_integrity(self._state)
