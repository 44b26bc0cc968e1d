"""A schedule as start times of the model: a hint, and an upper bound where the model could have found it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

from jaxpipe.schedule.ir import Action, Schedule, Slot
from jaxpipe.schedule.simulate import simulate
from jaxpipe.schedule.solve.formulation import Key
from jaxpipe.schedule.solve.instance import Instance
from jaxpipe.schedule.solve.rows import Starts
from jaxpipe.schedule.timeline import Timeline


def starts_of(instance: Instance, schedule: Schedule) -> Starts | None:
    """The times of ``schedule``; None if the model can't express them: it is of another placement or size, breaks a limit, has
    braided slots or microbatches out of order, offloads what may not leave.

    A full backward that saves no time is taken apart: B, and W right behind it.
    """
    task = instance.task
    if (schedule.placement.flows, schedule.num_microbatches) != (task.placement.flows, task.num_microbatches):
        return None
    split = replace(schedule, rows=tuple(_split(instance, row) for row in schedule.rows))
    timeline = simulate(split, task.costs)
    if not task.fits(timeline):
        return None
    found = times_of(instance, timeline)
    if found is None or any(not instance.may_leave[k] for k, _ in found.away):
        return None
    starts = replace(found, start={**found.start, **_idle(instance, found.start)})
    return starts if _in_order(instance, starts) else None


def times_of(instance: Instance, timeline: Timeline) -> Starts | None:
    """The times of a simulated schedule in ticks; None if it has ops or slots that the model lacks.

    A full backward that saves no time is taken apart: B, and W right behind it.
    """
    start: dict[Key, int] = {}
    fused: set[tuple[int, int]] = set()
    for event in timeline.events:
        action = event.action
        if event.lane == "send" or action.actions[0].op == "S":
            continue
        if not isinstance(action, Action) or action.op not in ("F", "B", "W", "BW", "O", "L"):
            return None
        k, i = _replica(instance, action), action.microbatch
        at = instance.ticks.of(event.start_s)
        if action.op != "BW":
            start[action.op, k, i] = at
            continue
        length = "BW" if instance.may_fuse[k] else "B"
        start["B", k, i], start["W", k, i] = at, at + instance.duration[length][k]
        if instance.may_fuse[k]:
            fused.add((k, i))
    return Starts(start, frozenset((k, i) for op, k, i in start if op == "O"), frozenset(fused))


def _split(instance: Instance, row: tuple[Slot, ...]) -> tuple[Slot, ...]:
    slots: list[Slot] = []
    for slot in row:
        if isinstance(slot, Action) and slot.op == "BW" and not instance.may_fuse[_replica(instance, slot)]:
            slots += [Action("B", slot.stage, slot.microbatch), Action("W", slot.stage, slot.microbatch)]
        else:
            slots.append(slot)
    return tuple(slots)


def _replica(instance: Instance, action: Action) -> int:
    flows = instance.problem.placement.num_flows
    return action.microbatch % flows * instance.num_stages + action.stage


def _idle(instance: Instance, start: Mapping[Key, int]) -> dict[Key, int]:
    """Where O and L of microbatches that stay stand: at the end of the one before."""
    idle: dict[Key, int] = {}
    for k in (k for k in range(instance.problem.num_replicas) if instance.may_leave[k]):
        for op in ("O", "L"):
            free = 0
            for i in instance.problem.microbatches(k):
                if (op, k, i) in start:
                    free = start[op, k, i] + instance.duration[op][k]
                else:
                    idle[op, k, i] = free
    return idle


def _in_order(instance: Instance, starts: Starts) -> bool:
    for k in range(instance.problem.num_replicas):
        every = instance.problem.microbatches(k)
        split = [i for i in every if (k, i) not in starts.fused]
        ops = [("F", every), ("B", every), ("W", split)]
        if instance.may_leave[k]:
            ops += [("O", every), ("L", every)]
        for op, chosen in ops:
            times = [starts.start[op, k, i] for i in chosen]
            if any(a > b for a, b in pairwise(times)):
                return False
    return True
