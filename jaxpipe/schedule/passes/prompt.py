"""Actions moved to right behind the slot that makes what they need: offloads behind their F, W's behind their B.

A host copy starts once the compute slot that stands before it in its row has ended (:mod:`~jaxpipe.schedule.engine`). An O that
stands further back than its F therefore waits for compute that it does not need. And what W needs can't leave for the host
(`pipeoffload.txt` offloads what F keeps), so an order that puts its W's off, as zero-bubble orders do to fill waits, stays as
high as they pile up; `pipeoffload.txt` section 3.1 runs each W right after its B, to keep its strategies simple.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace

from jaxpipe.schedule.costs import CostProfile
from jaxpipe.schedule.ir import Action, Row, Schedule, Slot, op_spec
from jaxpipe.schedule.simulate import simulate
from jaxpipe.schedule.timeline import Timeline
from jaxpipe.schedule.tolerance import nine_digits


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
    """Return the first offload that stands later than it need, if standing earlier makes the schedule shorter than
    ``timeline``, or as long with a lower peak; None if none does."""
    late = [(rank, *late_action) for rank, row in enumerate(schedule.rows) for late_action in _late(row, _is_offload)]
    if not late:
        return None
    better = simulate(replace(schedule, rows=tuple(_prompt(row, _is_offload) for row in schedule.rows)), costs)
    if _figures(better) >= _figures(timeline):
        return None
    rank, action, after, source = late[0]
    return LateOffload(rank, action, after, source, len(late) - 1, better)


def prompt_weights(schedule: Schedule) -> Schedule:
    """Return ``schedule`` with each W behind the slot that holds its B. W's in braids, and fused BW, stay where they are.

    W waits for nothing but its B, on the same rank, so a valid schedule stays valid. It can take longer: W's then stand before
    B's that other ranks wait for.
    """
    return replace(schedule, rows=tuple(_prompt(row, lambda slot: slot.actions[0].op == "W") for row in schedule.rows))


def _is_offload(slot: Slot) -> bool:
    return op_spec(slot.actions[0].op).lane == "d2h"


def _figures(timeline: Timeline) -> tuple[float, float]:
    return nine_digits(timeline.makespan), nine_digits(max(timeline.peak_activations))


def _prompt(row: Row, moves: Callable[[Slot], bool]) -> Row:
    behind = defaultdict[Slot, list[Slot]](list)
    moved = set[Slot]()
    for action, _, source in _late(row, moves):
        moved.add(action)
        behind[source].append(action)
    slots: list[Slot] = []
    waiting: list[Slot] = []
    for slot in (x for x in row if x not in moved):
        if _is_compute(slot) and not moves(slot):
            slots += waiting
            waiting = behind[slot]
        slots.append(slot)
    return (*slots, *waiting)


def _late(row: Row, moves: Callable[[Slot], bool]) -> list[tuple[Action, Slot, Slot]]:
    """Each action to move that stands behind another compute slot than its source: itself, that slot, its source."""
    late = []
    slots: dict[Action, Slot] = {}
    last: Slot | None = None
    for slot in row:
        if type(slot) is Action and moves(slot):
            ops = [op for wait in op_spec(slot.op).waits if wait.where == "self" for op in wait.ops]
            sources = [slots[a] for op in ops if (a := Action(op, slot.stage, slot.microbatch)) in slots]
            if last is not None and sources and last not in sources:
                late.append((slot, last, sources[-1]))
        elif _is_compute(slot):
            last = slot
            slots |= dict.fromkeys(slot.actions, slot)
    return late


def _is_compute(slot: Slot) -> bool:
    return op_spec(slot.actions[0].op).lane == "compute"
