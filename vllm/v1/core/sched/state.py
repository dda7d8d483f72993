"""The scheduler's tables, and the transitions of children and groups that both planning and reporting make."""

from __future__ import annotations

import itertools
import math
from array import array

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.prefill_group import GroupState, PrefillGroup, WaitQueue
from vllm.v1.core.request import Child, ChildState, Key, Request
from vllm.v1.core.sched.outputs import OutputBuilder
from vllm.v1.core.sched.slots import SlotTable
from vllm.v1.messages import FinishReason, LogprobColumnsMsg, SchedulerStats

EMPTY = array("i")
LAST: Key = ((2**63, math.inf, 0), 0)
"""After every child."""


class State:
    """Children by handle, groups, slots, blocks, and what the runner has yet to be told."""

    def __init__(self, kv: KVCacheManager, num_slots: int) -> None:
        self.kv = kv
        self.slots = SlotTable(num_slots)
        self.children: dict[int, Child] = {}
        """Those that have not ended."""
        self.groups: dict[PrefillGroup, None] = {}
        """Those with live members, oldest first."""
        self.complete: dict[PrefillGroup, None] = {}
        """Those that hold their prompt."""
        self.shared_groups: dict[tuple[object, ...], PrefillGroup] = {}
        """Those that strangers may join, by what must be equal."""
        self.group_numbers = itertools.count(1)
        self.queue = WaitQueue()
        self.prefilling: dict[int, PrefillGroup | Child] = {}
        """By slot: groups in PREFILL, and children that compute their own tokens again after a preemption."""
        self.late: dict[PrefillGroup, None] = {}
        """Groups with PENDING members whose hidden row is kept: they draw in the next step."""
        self.num_held = 0
        """Children that only hold a prompt."""
        self.pinned: set[PrefillGroup] = set()
        """Groups whose blocks are read by copies of the step that is being planned."""
        self.outputs = OutputBuilder()
        self.stats = SchedulerStats()
        # For the next step that is not empty:
        self.freed_slots: list[int] = []
        self.dropped_keys: list[int] = []
        self.finished_handles: list[int] = []
        self.lent_slots: list[int] = []
        """Of groups that became COMPLETE in the last step: free from the next one on."""

    @property
    def num_running(self) -> int:
        """Sequences in slots: children, and groups in PREFILL for their leaders."""
        return self.slots.size - self.slots.num_free - len(self.lent_slots)

    @property
    def num_waiting(self) -> int:
        return len(self.children) - self.num_running

    # Slots

    def close_slot(self, slot: int) -> None:
        self.slots.close(slot)
        self.freed_slots.append(slot)
        self.slots.give_back(slot)

    def return_lent_slots(self) -> None:
        for slot in self.lent_slots:
            self.freed_slots.append(slot)
            self.slots.give_back(slot)
        self.lent_slots.clear()

    def entity_key(self, entity: Child | PrefillGroup) -> Key:
        """The priority of what stands in a slot."""
        if isinstance(entity, Child):
            return entity.key
        return entity.best_key or LAST

    # Giving up memory

    def leave_slot(self, child: Child) -> None:
        """A RUNNING child gives up its slot and its blocks."""
        slot = child.slot
        child.slot = -1
        child.time_last = float(self.slots.last_token[slot])
        child.group.num_running -= 1
        self.prefilling.pop(slot, None)
        self.close_slot(slot)
        self.kv.release_child(child)

    def preempt(self, entity: Child | PrefillGroup) -> None:
        """Take slot and blocks from a RUNNING child, or from a group in PREFILL with all its members."""
        self.stats.num_preemptions += 1
        if isinstance(entity, Child):
            self.leave_slot(entity)
            entity.num_preemptions += 1
            entity.group.add_ready(entity)
            self.queue.update(entity.group)
        else:
            leader = entity.best_pending() or entity.best_ready()
            if leader is not None:
                leader.num_preemptions += 1
            self.leave_prefill(entity)
            self.queue.update(entity)

    def leave_prefill(self, group: PrefillGroup) -> None:
        """A group in PREFILL gives up its slot and its blocks."""
        del self.prefilling[group.slot]
        self.close_slot(group.slot)
        group.slot = -1
        group.leader = None
        self.forget_prompt(group)

    def forget_prompt(self, group: PrefillGroup) -> None:
        """The group's blocks become free; it computes its prompt again when its turn comes."""
        self.kv.release_group(group)
        self.complete.pop(group, None)
        group.state = GroupState.WAITING
        if group.prompt_logprobs is not None and not group.prompt_logprobs.complete:
            group.prompt_logprobs.chunks.clear()

    def drop_idle_group(self, above: Key | None, keep: PrefillGroup | None) -> bool:
        """The idle group of the lowest priority drops its prompt; False if there is none.

        Only groups that come after `above` (None: any), and not `keep`.
        """
        worst: PrefillGroup | None = None
        worst_key: Key | None = None
        for group in self.complete:
            if group.is_idle and group is not keep and group not in self.pinned:
                key = group.best_key or LAST  # members that are not ready: nobody waits for these blocks yet
                if (above is None or key > above) and (worst_key is None or key > worst_key):
                    worst, worst_key = group, key
        if worst is None:
            return False
        self.forget_prompt(worst)
        self.queue.update(worst)
        return True

    def merge_partial_block(self) -> bool:
        """Free one block where a group and its running children have copies of the same; False if there is none."""
        for child in self.slots.owner:
            if isinstance(child, Child):
                group = child.group
                if group.writer is None and len(group.blocks) > len(group.full_blocks):
                    self.kv.merge_partial(child)
                    return True
        return False

    # Ends

    def end(self, child: Child, by_itself: bool) -> None:
        """Take a live child out of all tables and let go of its tokens: what is reported about it is, before this."""
        state = child.state
        request, group = child.request, child.group
        child.state = ChildState.ENDED
        del self.children[child.handle]
        self.finished_handles.append(child.handle)
        request.num_live -= 1
        if request.hold:
            self.num_held -= 1
        if by_itself:
            request.num_ended += 1
        if state == ChildState.RUNNING:
            self.leave_slot(child)
        elif state == ChildState.DRAWING:
            group.num_drawing -= 1
        child.tokens = EMPTY
        child.logprobs = None
        group.num_live -= 1
        if not group.num_live:
            self.end_group(group)
        elif state != ChildState.RUNNING and group.state != GroupState.PREFILL:
            self.queue.update(group)

    def end_group(self, group: PrefillGroup) -> None:
        """The last member has ended."""
        if group.state == GroupState.PREFILL:
            self.leave_prefill(group)
        elif group.blocks:
            self.kv.release_group(group)
            del self.complete[group]
        if group.kept:
            self.dropped_keys.append(group.number)
        self.queue.remove(group)
        del self.groups[group]
        self.late.pop(group, None)
        group.source = None
        if group.key is not None:
            del self.shared_groups[group.key]

    def abort(self, child: Child, reason: FinishReason = FinishReason.ABORT) -> None:
        """End a live child and report what it has."""
        if child.state == ChildState.RUNNING:
            child.time_last = float(self.slots.last_token[child.slot])
        self.outputs.end(child, reason)
        self.end(child, by_itself=False)

    def carry(self, request: Request, prompt_logprobs: LogprobColumnsMsg) -> None:
        """Send the prompt's log-probabilities with the first report of the request's first live child."""
        for child in request.children:
            if child.state != ChildState.ENDED:
                self.outputs.carried[child.handle] = prompt_logprobs
                return

    def stop(self, child: Child) -> None:
        """End a live child for the front end, which wants no report of it."""
        carried = self.outputs.carried.pop(child.handle, None)
        self.end(child, by_itself=True)
        if carried is not None:
            self.carry(child.request, carried)

    def abort_rest(self, request: Request) -> None:
        """End the remaining children of a request."""
        if request.num_live:
            for child in request.children:
                if child.state != ChildState.ENDED:
                    self.abort(child)

    def check_finish_after(self, request: Request) -> None:
        if request.finish_after is not None and request.num_ended >= request.finish_after:
            self.abort_rest(request)
