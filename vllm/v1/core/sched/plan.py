"""Planning a step: who computes how many tokens.

Order: children that decode, one token each; then sequences in slots that have more to compute (prompts, and the own
tokens of children that were preempted), best key first; then whoever waits, best key first, until slots, blocks or the
token budget run out. The head of the queue is never passed by.

Memory. A sequence in a slot that needs a block takes a free one, or the prompt of an idle group that comes after it,
or a partial block that a group and a child of it both have, or preempts the last sequence in a slot, if that comes
after it; otherwise it sits out the step and keeps what it has.
The first of all in slots may also take idle prompts that come before it, so that it always goes on, and with it the
whole. Who waits preempts nobody: it takes free blocks and the prompts of idle groups that come after it; and when
nothing runs all groups are idle, and the head of the queue comes before them all.

Token values are never read here, so that a step may be planned before the one before it has been reported: decode
rows, prompts in chunks and a lone child's first decode go on by counting. A child that reaches its length is left out
of further plans; one that ends by its tokens does so when they are reported, and what was planned for it meanwhile is
ignored. Only entering a slot needs reported tokens: children forked from a group enter after the report of their first
ones, and one that is preempted while a draw of its own is under way enters again after the report of that; there is one
such step at most, and nobody enters in a step that preempts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from vllm.v1.core.prefill_group import GroupState, PrefillGroup
from vllm.v1.core.request import Child, ChildState, Key
from vllm.v1.core.sched.slots import Rows
from vllm.v1.core.sched.state import State
from vllm.v1.step import Fork, ForkSample, NewSequence, SchedulerOutput


@dataclass(slots=True)
class Chunk:
    """A row that is no decode row: positions start .. start + count - 1 of a prompt, or of a child's own tokens."""

    entity: Child | PrefillGroup
    slot: int
    handle: int
    start: int
    count: int
    samples: bool = False
    group: PrefillGroup | None = None
    """The group whose prompt it is; None for a child's own tokens."""
    epoch: int = 0


@dataclass(slots=True)
class Step:
    """A planned step: what its report needs to know of it."""

    output: SchedulerOutput
    num_decodes: int
    """Rows before the chunks."""
    chunks: list[Chunk]
    forked: list[list[Child]]
    """The members of each fork."""


@dataclass(slots=True)
class _Plan:
    """A step in the making."""

    budget: int
    rows: Rows
    entered: list[int] = field(default_factory=list)
    """Slots of children that decode from this step on."""
    chunks: list[Chunk] = field(default_factory=list)
    new_sequences: list[NewSequence] = field(default_factory=list)
    block_updates: list[tuple[int, int, list[int]]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    forks: list[Fork] = field(default_factory=list)
    forked: list[list[Child]] = field(default_factory=list)
    prompt_logprobs: list[tuple[int, int]] = field(default_factory=list)
    preempted: bool = False
    partial: bool = False
    """Some children that decode are left out."""


class Planner:
    def __init__(self, state: State, max_num_batched_tokens: int, enable_chunked_prefill: bool) -> None:
        self.state = state
        self.max_num_batched_tokens = max_num_batched_tokens
        self.chunked = enable_chunked_prefill

    def plan(self, lagging: bool, now: float) -> Step:
        """`lagging`: there is a step that has not been reported."""
        state = self.state
        state.return_lent_slots()
        state.pinned.clear()
        plan = _Plan(self.max_num_batched_tokens, state.slots.rows())
        for group in state.late:
            members = group.take_drawable()
            if members:
                self._fork(plan, group, -1, members, now)
        state.late.clear()
        self._decodes(plan, lagging)
        self._chunks(plan)
        if not plan.preempted:
            self._admit(plan, now)
        return self._assemble(plan, now)

    # Sequences in slots

    def _decodes(self, plan: _Plan, lagging: bool) -> None:
        state, slots = self.state, self.state.slots
        rows = plan.rows
        chosen = rows.slots
        if lagging:
            going = slots.outputs[chosen] < slots.max_outputs[chosen]
            if not going.all():
                chosen = chosen[going]
        if len(chosen) > plan.budget:
            best = sorted(chosen.tolist(), key=self._slot_key)[: plan.budget]
            chosen = chosen[np.isin(chosen, best)]
        size = state.kv.block_size
        full = chosen[slots.computed[chosen] == slots.blocks[chosen] * size]
        if len(full):
            if len(full) <= state.kv.pool.num_free:
                for slot in full.tolist():
                    self._grow(plan, slot, 1)
            else:
                stalled = [
                    slot for slot in sorted(full.tolist(), key=self._slot_key) if not self._grow_or_stall(plan, slot)
                ]
                chosen = chosen[slots.decodes[chosen]]
                chosen = chosen[~np.isin(chosen, stalled)]
        if chosen is not rows.slots:
            plan.rows = slots.arrange(chosen)
            plan.partial = True
        plan.budget -= len(chosen)

    def _slot_key(self, slot: int) -> Key:
        entity = self.state.slots.owner[slot]
        assert entity is not None
        return self.state.entity_key(entity)

    def _grow(self, plan: _Plan, slot: int, count: int) -> None:
        """`count` free blocks for a child in a slot."""
        state = self.state
        child = state.slots.owner[slot]
        assert isinstance(child, Child)
        blocks = state.kv.pool.allocate(count)
        plan.block_updates.append((slot, len(child.blocks), blocks))
        child.blocks.extend(blocks)
        state.slots.blocks[slot] += count

    def _grow_or_stall(self, plan: _Plan, slot: int) -> bool:
        """A block for a decode row under memory pressure. True also for a row that was preempted meanwhile."""
        entity = self.state.slots.owner[slot]
        if entity is None:
            return True
        if not self._make_room(plan, 1, entity):
            return False
        self._grow(plan, slot, 1)
        return True

    def _make_room(self, plan: _Plan, count: int, entity: Child | PrefillGroup) -> bool:
        """Free blocks for something in a slot; see the module's docstring."""
        state = self.state
        pool = state.kv.pool
        key = state.entity_key(entity)
        own = entity.group if isinstance(entity, Child) else entity
        while pool.num_free < count:
            if state.drop_idle_group(key, own) or state.merge_partial_block():
                continue
            others = [other for other in state.slots.owner if other is not None and other is not entity]
            worst = max(others, key=state.entity_key, default=None)
            if worst is not None and state.entity_key(worst) > key:
                state.preempt(worst)
                plan.preempted = True
            elif any(state.entity_key(other) < key for other in others) or not state.drop_idle_group(None, own):
                return False
        return True

    def _chunks(self, plan: _Plan) -> None:
        state = self.state
        if not state.prefilling:
            return
        kv, slots = state.kv, state.slots
        for entity in sorted(state.prefilling.values(), key=state.entity_key):
            if entity.slot < 0 or plan.budget <= 0:  # preempted for one before it, or no tokens left
                continue
            start = entity.num_computed if isinstance(entity, PrefillGroup) else int(slots.computed[entity.slot])
            end = entity.prompt_len if isinstance(entity, PrefillGroup) else entity.num_tokens
            count = self._chunk_length(end - start, plan.budget)
            if not count:
                continue
            need = kv.blocks_for(start + count) - len(entity.blocks)
            if need > kv.pool.num_free:
                if self.chunked:
                    # As far as the free blocks go; one block more, at others' expense, only if that is nowhere.
                    if len(entity.blocks) * kv.block_size == start:
                        self._make_room(plan, 1, entity)
                    count = min(count, (len(entity.blocks) + kv.pool.num_free) * kv.block_size - start)
                elif not self._make_room(plan, need, entity):
                    count = 0
                if count <= 0:
                    continue
                need = kv.blocks_for(start + count) - len(entity.blocks)
            if need > 0:
                if isinstance(entity, PrefillGroup):
                    at = len(entity.blocks)
                    plan.block_updates.append((entity.slot, at, kv.extend_group(entity, start + count)))
                    slots.blocks[entity.slot] = len(entity.blocks)
                else:
                    self._grow(plan, entity.slot, need)
            self._add_chunk(plan, entity, start, count)

    def _chunk_length(self, remaining: int, budget: int) -> int:
        """Tokens to compute of `remaining`: without chunked prefill all of them, or none in this step, or, where they
        are more than any step takes (own tokens after a preemption), as many as a whole step takes."""
        if not self.chunked and remaining > budget and budget < self.max_num_batched_tokens:
            return 0
        return min(remaining, budget)

    def _add_chunk(self, plan: _Plan, entity: Child | PrefillGroup, start: int, count: int) -> None:
        plan.budget -= count
        slot = entity.slot
        handle = int(self.state.slots.handle[slot])
        group = entity if isinstance(entity, PrefillGroup) else None
        plan.chunks.append(Chunk(entity, slot, handle, start, count, group=group, epoch=group.epoch if group else 0))

    # Those that wait

    def _admit(self, plan: _Plan, now: float) -> None:
        state = self.state
        while plan.budget > 0 and state.slots.num_free:
            group = state.queue.peek()
            if group is None:
                return
            started = self._enter(plan, group) if group.state == GroupState.COMPLETE else self._start(plan, group, now)
            if not started:
                return
            state.queue.update(group)

    def _start(self, plan: _Plan, group: PrefillGroup, now: float) -> bool:
        """Put a WAITING group in a slot, with its first chunk; False if it does not fit now."""
        state, kv = self.state, self.state.kv
        leader = group.best_ready() if group.drawn else group.best_pending()
        if leader is None:
            leader = group.best_ready()
        assert leader is not None
        start = kv.take_hits(group)
        count = self._chunk_length(group.prompt_len - start, plan.budget)
        room = kv.blocks_for(group.prompt_len) - len(group.blocks)
        while count and kv.pool.num_free < room:
            if not state.drop_idle_group(state.entity_key(group), group):
                count = 0
        if not count:
            kv.pool.release(group.blocks)
            group.blocks = []
            return False
        partial = kv.block_to_continue(group, start)
        if partial >= 0:
            assert group.source is not None
            start = group.source.prompt_len
            count = self._chunk_length(group.prompt_len - start, plan.budget)
            state.pinned.add(group.source)
        group.source = None
        kv.extend_group(group, start + count)
        if partial >= 0:
            plan.copies.append((partial, group.blocks[start // kv.block_size]))
        group.state = GroupState.PREFILL
        group.num_computed = group.num_done = start
        group.leader = leader
        group.slot = state.slots.enter_group(group, leader)
        state.prefilling[group.slot] = group
        for request in group.unstarted:
            request.time_scheduled = now
            request.num_cached = start
            if group.reads_cache:
                state.stats.prefix_cache_queries += group.prompt_len
                state.stats.prefix_cache_hits += start
        group.unstarted.clear()
        plan.new_sequences.append(
            NewSequence(
                slot=group.slot,
                handle=leader.handle,
                params=leader.request.params,
                seed=leader.seed,
                prompt_token_ids=group.prompt,
                output_token_ids=[],
                num_computed_tokens=start,
                block_ids=list(group.blocks),
                lora_request=group.lora_request,
            )
        )
        self._add_chunk(plan, group, start, count)
        return True

    def _enter(self, plan: _Plan, group: PrefillGroup) -> bool:
        """Put the best READY member of a COMPLETE group in a slot; False if it does not fit now."""
        state, kv = self.state, self.state.kv
        child = group.best_ready()
        assert child is not None
        num_outputs = len(child.tokens)
        count = self._chunk_length(num_outputs, plan.budget)
        if not count:
            return False
        num_tokens = group.prompt_len + num_outputs
        while kv.pool.num_free < kv.fork_need(group, num_tokens):
            if not state.drop_idle_group(child.key, group):
                return False
        group.pop_ready()
        copy = kv.fork(child, num_tokens)
        if copy is not None:
            plan.copies.append(copy)
        slot = state.slots.take()
        self._settle(child, slot, num_outputs)
        plan.new_sequences.append(
            NewSequence(
                slot=slot,
                handle=child.handle,
                params=child.request.params,
                seed=child.seed,
                prompt_token_ids=group.prompt,
                output_token_ids=child.tokens.tolist(),
                num_computed_tokens=group.prompt_len,
                block_ids=list(child.blocks),
                lora_request=group.lora_request,
            )
        )
        if num_outputs == 1:
            state.slots.set_decodes(slot, True)
            plan.entered.append(slot)
            plan.budget -= 1
        else:
            state.prefilling[slot] = child
            self._add_chunk(plan, child, group.prompt_len, count)
        return True

    def _settle(self, child: Child, slot: int, num_outputs: int) -> None:
        child.state = ChildState.RUNNING
        child.slot = slot
        child.group.num_running += 1
        self.state.slots.enter_child(child, slot, child.group.prompt_len, num_outputs)

    # The step

    def _assemble(self, plan: _Plan, now: float) -> Step:
        state, slots = self.state, self.state.slots
        rows = self._final_rows(plan)
        num_decodes = len(rows.slots)
        computed = slots.computed[rows.slots]
        slots.computed[rows.slots] += 1
        slots.outputs[rows.slots] += 1
        for index, chunk in enumerate(plan.chunks):
            self._advance(plan, chunk, num_decodes + index, now)
        if plan.chunks:
            chunks = plan.chunks
            output = SchedulerOutput(
                slots=np.concatenate((rows.slots, np.array([c.slot for c in chunks], np.int32))),
                num_tokens=np.concatenate((rows.ones, np.array([c.count for c in chunks], np.int32))),
                num_computed=np.concatenate((computed, np.array([c.start for c in chunks], np.int32))),
                samples=np.concatenate((rows.samples, np.array([c.samples for c in chunks], np.bool_))),
                handles=np.concatenate((rows.handles, np.array([c.handle for c in chunks], np.int64))),
            )
        else:
            output = SchedulerOutput(rows.slots, rows.ones, computed, rows.samples, rows.handles)
        output.shared = rows.shared
        output.new_sequences = plan.new_sequences
        output.block_updates = plan.block_updates
        output.copies = plan.copies
        output.forks = plan.forks
        output.prompt_logprobs = plan.prompt_logprobs
        if not output.is_empty:  # an empty one is not run: what the runner must know waits for the next
            output.freed_slots, state.freed_slots = state.freed_slots, []
            output.dropped_keys, state.dropped_keys = state.dropped_keys, []
            output.finished_handles, state.finished_handles = state.finished_handles, []
        return Step(output, num_decodes, plan.chunks, plan.forked)

    def _final_rows(self, plan: _Plan) -> Rows:
        slots = self.state.slots
        rows = plan.rows
        if plan.preempted:
            plan.block_updates = [update for update in plan.block_updates if slots.handle[update[0]] >= 0]
            still = slots.decodes[rows.slots]
            if not still.all():
                return slots.arrange(rows.slots[still])
        if not plan.entered:
            return rows
        entered = np.array(plan.entered, np.int32)
        if not plan.partial:
            return slots.rows()
        return slots.arrange(np.concatenate((rows.slots, entered)))

    def _advance(self, plan: _Plan, chunk: Chunk, row: int, now: float) -> None:
        """The chunk will have been computed: what follows from that."""
        state, slots = self.state, self.state.slots
        entity, end = chunk.entity, chunk.start + chunk.count
        if isinstance(entity, PrefillGroup):
            wanted = entity.prompt_logprobs
            if wanted is not None and not wanted.complete:
                plan.prompt_logprobs.append((row, wanted.num_logprobs))
            entity.num_computed = end
            if end == entity.prompt_len:
                self._complete(plan, entity, chunk, row, now)
        else:
            slots.computed[chunk.slot] = end
            if end == entity.num_tokens:
                chunk.samples = True
                slots.outputs[chunk.slot] += 1
                slots.set_decodes(chunk.slot, True)
                del state.prefilling[chunk.slot]

    def _complete(self, plan: _Plan, group: PrefillGroup, chunk: Chunk, row: int, now: float) -> None:
        """The group's prompt will be complete after this step."""
        state = self.state
        slot = chunk.slot
        del state.prefilling[slot]
        group.state = GroupState.COMPLETE
        state.complete[group] = None
        group.slot = -1
        leader, group.leader = group.leader, None
        state.kv.complete_group(group)
        members: list[Child] = []
        if not group.drawn:
            group.drawn = True
            members = group.take_drawable()
            alone = len(members) == 1 and group.num_live == 1 and members[0] is leader
            group.kept = group.key is not None or bool(group.pending)
            if alone:
                chunk.samples = True
                state.kv.fork(members[0], group.prompt_len)
                self._settle(members[0], slot, 1)
                state.slots.set_decodes(slot, True)
                if group.kept:
                    self._fork(plan, group, row, [], now)
                return
            self._fork(plan, group, row, members, now)
        state.slots.close(slot)
        state.lent_slots.append(slot)
        state.queue.update(group)

    def _fork(self, plan: _Plan, group: PrefillGroup, row: int, members: list[Child], now: float) -> None:
        """Let members draw their first tokens from the row that completes the prompt, or (-1) from the kept one."""
        samples = []
        for child in members:
            child.state = ChildState.DRAWING
            request = child.request
            if not request.time_scheduled:
                request.time_scheduled = now
            samples.append(ForkSample(child.handle, child.seed, request.params))
        group.num_drawing += len(members)
        plan.forks.append(Fork(row, group.prompt, samples, group.number if group.kept else 0, group.kept))
        plan.forked.append(members)
