"""Offloads right behind the slot that makes what they copy.

A host copy starts once the compute slot that stands before it in its row has ended (:mod:`~jaxpipe.schedule.engine`). An O that
stands further back than its F therefore waits for compute that it does not need.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from jaxpipe.schedule.costs import CostProfile
from jaxpipe.schedule.ir import Action, Row, Schedule, Slot, op_spec
from jaxpipe.schedule.retime import nine_digits
from jaxpipe.schedule.simulate import simulate
from jaxpipe.schedule.timeline import Timeline


@dataclass(frozen=True, slots=True)
class LateOffload:
    """``action`` on ``rank`` stands behind compute slot ``after`` and needs only ``source``; so do ``others`` of the schedule.

    ``timeline``: with each of them right behind its source.
    """

    rank: int
    action: Action
    after: Slot
    source: Slot
    others: int
    timeline: Timeline


def late_offload(schedule: Schedule, costs: CostProfile, timeline: Timeline) -> LateOffload | None:
    """The first offload that stands later than it need, if standing earlier makes the schedule shorter than ``timeline``, or as
    long with a lower peak; None if none does."""
    late = [(rank, *found) for rank, row in enumerate(schedule.rows) for found in _late(row)]
    if not late:
        return None
    better = simulate(prompt_offloads(schedule), costs)
    if _figures(better) >= _figures(timeline):
        return None
    rank, action, after, source = late[0]
    return LateOffload(rank, action, after, source, len(late) - 1, better)


def prompt_offloads(schedule: Schedule) -> Schedule:
    """``schedule`` with each offload right behind the slot that makes what it copies, behind offloads that stand there."""
    return replace(schedule, rows=tuple(map(_prompt, schedule.rows)))


def _figures(timeline: Timeline) -> tuple[float, float]:
    return nine_digits(timeline.makespan), nine_digits(max(timeline.peak_activations))


def _prompt(row: Row) -> Row:
    moved = {action: source for action, _, source in _late(row)}
    behind: dict[Slot, list[Slot]] = {}
    for action, source in moved.items():
        behind.setdefault(source, []).append(action)
    slots: list[Slot] = []
    waiting: list[Slot] = []
    for slot in row:
        if _is_compute(slot):
            slots += waiting
            waiting = behind.get(slot, [])
            slots.append(slot)
        elif slot not in moved:
            slots.append(slot)
    return (*slots, *waiting)


def _late(row: Row) -> list[tuple[Action, Slot, Slot]]:
    """Each offload that stands behind another compute slot than its source: itself, that slot, its source."""
    found = []
    made: dict[Action, Slot] = {}
    last: Slot | None = None
    for slot in row:
        if _is_compute(slot):
            last = slot
            made |= dict.fromkeys(slot.actions, slot)
        elif isinstance(slot, Action) and op_spec(slot.op).lane == "d2h":
            ops = [op for wait in op_spec(slot.op).waits if wait.where == "self" for op in wait.ops]
            sources = [made[a] for op in ops if (a := Action(op, slot.stage, slot.microbatch)) in made]
            if last is not None and sources and last not in sources:
                found.append((slot, last, sources[-1]))
    return found


def _is_compute(slot: Slot) -> bool:
    return op_spec(slot.actions[0].op).lane == "compute"
