"""Add what data parallelism communicates once a step: the reduction of each stage's gradients, the gather of its parameters.

R of a stage stands behind its last W, where its gradients are complete: in the cool-down, while other stages and ranks still
compute. G (ZeRO-1: each replica updates its part of the parameters) stands before everything else in the row, in the order
in which the stages first run, so that later stages gather while earlier ones compute. Megatron-LM does both there
(``overlap_grad_reduce``, ``overlap_param_gather``), in buckets of some layers, which are not modelled.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from jaxpipe.schedule.costs import CostProfile
from jaxpipe.schedule.ir import Action, F, G, R, Row, Schedule, Slot, W, op_spec
from jaxpipe.schedule.passes.braid import with_slots
from jaxpipe.schedule.placement import Placement


def with_reductions(schedule: Schedule, *, gather: bool = False, stages: Collection[int] | None = None) -> Schedule:
    """Return ``schedule`` with an R behind the last W of each of ``stages`` (by default all), and with ``gather`` a G of each
    stage before its first slot. A stage that is on several ranks, in several flows, has its own on each. What the schedule has
    of them already is placed anew. The result is valid if ``schedule`` is; a search prices thousands, so this does not check
    it again.
    """
    chosen = range(schedule.num_stages) if stages is None else stages
    plain = without_reductions(schedule)
    return replace(
        plain, rows=tuple(_with_communication(row, schedule.placement, chosen, gather) for row in plain.rows)
    )


def with_missing_reductions(
    schedule: Schedule, stages: Collection[int], reads: Callable[[Action], bool] | None = None
) -> Schedule:
    """Return ``schedule`` with one R of each of ``stages``, which are on one rank each, and no other R or G. A stage's R stands
    where the schedule has it, or else behind the last action that ``reads`` its gradients (by default its last W)."""
    present = {action for action in schedule.actions() if action.op == R.name and action.stage in stages}
    plain = with_slots(
        schedule, lambda slot: (slot,) if slot in present or not op_spec(slot.actions[0].op).per_step else ()
    )
    missing = {*stages} - {action.stage for action in present}
    rows = (_with_communication(row, schedule.placement, missing, False, reads or _adds) for row in plain.rows)
    return replace(plain, rows=tuple(rows))


def _adds(action: Action) -> bool:
    return W.name in op_spec(action.op).performs()


def without_reductions(schedule: Schedule) -> Schedule:
    """Return ``schedule`` without what runs once a step."""
    return with_slots(schedule, lambda slot: () if op_spec(slot.actions[0].op).per_step else (slot,))


def with_reductions_of(schedule: Schedule, like: Schedule) -> Schedule:
    """Return ``schedule`` with R and G where ``like`` has any: what a pass that moves W's made of it without them."""
    stages = {op: {a.stage for a in like.actions() if a.op == op} for op in (R.name, G.name)}
    return (
        with_reductions(schedule, gather=bool(stages[G.name]), stages=stages[R.name])
        if any(stages.values())
        else schedule
    )


def with_priced_reductions(schedule: Schedule, costs: CostProfile) -> Schedule:
    """Return ``schedule`` with each R, and each G, if ``costs`` price any, unless it has some of its own."""
    priced = any(costs.reduce_s) or any(costs.gather_s)
    if not priced or any(op_spec(a.op).per_step for a in schedule.actions()):
        return schedule
    return with_reductions(schedule, gather=any(costs.gather_s))


def _with_communication(
    row: Row,
    placement: Placement,
    reduced: Collection[int],
    gather: bool,
    reads: Callable[[Action], bool] = _adds,
) -> Row:
    gathers: dict[Action, None] = {}
    last: dict[Action, int] = {}
    for at, slot in enumerate(row):
        for action in slot.actions:
            performed, flow = op_spec(action.op).performs(), placement.first_flow(action.stage, action.microbatch)
            if F.name in performed:
                gathers.setdefault(Action(G.name, action.stage, flow))
            if action.stage in reduced and reads(action):
                last[Action(R.name, action.stage, flow)] = at
    behind: dict[int, list[Slot]] = {}
    for reduction, at in last.items():
        behind.setdefault(at, []).append(reduction)
    return (*(gathers if gather else ()), *(x for at, slot in enumerate(row) for x in (slot, *behind.get(at, ()))))
