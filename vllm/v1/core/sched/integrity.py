"""The debug check of the scheduler's tables against each other."""

from __future__ import annotations

from vllm.exceptions import IntegrityError
from vllm.v1.core.prefill_group import GroupState, PrefillGroup
from vllm.v1.core.request import Child, ChildState
from vllm.v1.core.sched.state import State


def check_integrity(state: State) -> None:
    children = state.children.values()
    running = [child for child in children if child.state == ChildState.RUNNING]
    state.kv.check_integrity(state.groups, running)
    slots = state.slots

    def demand(truth: object, what: str) -> None:
        if not truth:
            raise IntegrityError(what)

    for child in running:
        slot = child.slot
        held = len(child.blocks)
        demand(slots.owner[slot] is child, f"slot {slot} has another owner than {child.handle}")
        demand(slots.handle[slot] == child.handle, f"slot {slot} is {slots.handle[slot]}'s, not {child.handle}'s")
        demand(slots.blocks[slot] == held, f"slot {slot} has {slots.blocks[slot]} blocks of {held}")
        room = len(child.blocks) * state.kv.block_size
        demand(slots.computed[slot] <= room, f"slot {slot} computed {slots.computed[slot]} tokens in room for {room}")
        demand(slots.decodes[slot] != (slot in state.prefilling), f"slot {slot} decodes and is prefilling, or neither")
        demand(child.group.state == GroupState.COMPLETE, f"{child.handle} runs on a prompt in {child.group.state!r}")
        shared = child.group.full_blocks.tolist()
        demand(child.blocks[: len(shared)] == shared, f"{child.handle} does not begin with its group's blocks {shared}")
    used = [slot for slot, owner in enumerate(slots.owner) if owner is not None]
    prefilling = [group for group in state.groups if group.state == GroupState.PREFILL]
    demand(len(used) == len(running) + len(prefilling), f"{len(used)} slots for {len(running)} + {len(prefilling)}")
    demand(
        len(used) + slots.num_free + len(state.lent_slots) == slots.size,
        f"{len(used)} used + {slots.num_free} free + {len(state.lent_slots)} lent slots of {slots.size}",
    )
    members: dict[PrefillGroup, list[Child]] = {group: [] for group in state.groups}
    for child in children:
        demand(child.group in members, f"{child.handle} is a member of a group that has ended")
        members[child.group].append(child)
    queued = state.queue.groups()
    for group, live in members.items():
        counts = [sum(child.state == s for child in live) for s in ChildState]
        name = f"group {group.number} ({group.state!r}, {group.num_live} live, {counts} by state)"
        demand(group.num_live == len(live) > 0, f"{name} has {len(live)} members")
        demand(group.num_running == counts[ChildState.RUNNING], f"{name}: {group.num_running} running")
        demand(group.num_drawing == counts[ChildState.DRAWING], f"{name}: {group.num_drawing} drawing")
        demand(bool(group.blocks) == (group.state != GroupState.WAITING), f"{name} has {len(group.blocks)} blocks")
        key = None if group.state == GroupState.PREFILL else group.best_key
        place = group.queued if group in queued else None
        demand(place == key, f"{name}: stands in the queue by {place}, not {key}")
        ready = sum(child.state == ChildState.READY for _, child in group.ready)
        demand(ready == counts[ChildState.READY], f"{name}: {ready} ready ones in its heap")
        late = group.drawn and any(child.state == ChildState.PENDING and not child.waits for child in live)
        demand((group in state.late) >= late, f"{name} has members for the kept row, but is not noted")
        demand(group.writer is None or group.writer.state == ChildState.RUNNING, f"{name} has a writer not running")
    complete = [group for group in state.groups if group.state == GroupState.COMPLETE]
    demand(set(complete) == set(state.complete), f"{len(state.complete)} groups noted as complete, not {len(complete)}")
    demand(
        set(state.shared_groups.values()) == {group for group in state.groups if group.key is not None},
        "the table of groups that strangers may join is wrong",
    )
    if not children:
        pool = state.kv.pool
        demand(pool.num_free == pool.num_blocks, f"idle, but {pool.num_free} of {pool.num_blocks} blocks are free")
        left = (
            len(state.groups),
            len(state.complete),
            len(state.shared_groups),
            len(state.prefilling),
            len(state.late),
            len(queued),
        )
        demand(left == (0,) * 6, f"idle, but (groups, complete, shared, prefilling, late, queued) = {left}")
        told = state.outputs.has_news or not state.outputs.carried
        demand(told, f"idle, but {len(state.outputs.carried)} prompt log-probabilities wait")
