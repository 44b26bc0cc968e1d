"""Backward passes split into B and W, or fused into BW, as another schedule has them.

Fused and split backwards add the same terms, but XLA may round them differently (seen in float32 on CPU): two orders give
equal bits only if they split the same backwards. B becomes BW where it stands, so its result is later and W is done earlier;
BW becomes B and W side by side. A braid with such a change comes apart into its actions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from jaxpipe.schedule.costs import CostProfile
from jaxpipe.schedule.ir import BW, Action, B, Braid, Row, Schedule, Slot, W

_CLEARLY = 1.1
_WORTH_S = 1e-3
"""Of a measurement: what it may be wrong by on a busy machine, and what another instruction may cost the host."""


def split_backwards(schedule: Schedule) -> Schedule:
    """Return ``schedule`` with B and then W in place of each BW."""
    return with_fused(schedule, frozenset())


def backwards_like(schedule: Schedule, like: Schedule) -> Schedule:
    """Return ``schedule`` with each backward split or fused as it is in ``like``.

    Where that splits a BW of a stage behind a B whose W still waits, the W's of the stage go in the order of its B's: gradients
    are added in one order then, so that sums have the same bits.
    """
    changed = with_fused(schedule, fused_backwards(like))
    if changed.rows == schedule.rows:
        return schedule
    return replace(changed, rows=tuple(map(_in_order_of_backwards, changed.rows)))


def fused_backwards(schedule: Schedule) -> frozenset[tuple[int, int]]:
    """Return the (stage, microbatch) of each BW."""
    return frozenset((a.stage, a.microbatch) for a in schedule.actions() if a.op == BW.name)


def fused_stages(schedule: Schedule) -> tuple[int, ...]:
    """Return the stages that have a BW."""
    return tuple(sorted({stage for stage, _ in fused_backwards(schedule)}))


def costly_backwards(schedule: Schedule, costs: CostProfile) -> tuple[int, ...]:
    """Return the stages whose BW takes clearly longer than B and then W do: by a tenth, and by a millisecond."""

    def is_costly(stage: int) -> bool:
        apart_s = costs.b_s[stage] + costs.w_s[stage]
        return costs.bw_s[stage] > max(_CLEARLY * apart_s, apart_s + _WORTH_S)

    return tuple(stage for stage in fused_stages(schedule) if is_costly(stage))


def with_fused_stages(schedule: Schedule, stages: Iterable[int]) -> Schedule:
    """Return ``schedule`` with B and then W in place of each BW of all other stages."""
    fused_stages = set(stages)
    return with_fused(schedule, frozenset((s, i) for s, i in fused_backwards(schedule) if s in fused_stages))


def with_fused(schedule: Schedule, fused: frozenset[tuple[int, int]]) -> Schedule:
    """Return ``schedule`` with the backwards of ``fused``, pairs of stage and microbatch, as BW and all others as B and W."""

    def changed(slot: Slot) -> tuple[Slot, ...]:
        parts = tuple(part for action in slot.actions for part in _parts(action, fused))
        return (slot,) if parts == slot.actions else parts

    return with_slots(schedule, changed)


def with_slots(schedule: Schedule, change: Callable[[Slot], Iterable[Slot]]) -> Schedule:
    """Return ``schedule`` with ``change(slot)`` in place of each slot."""
    return replace(schedule, rows=tuple(tuple(x for slot in row for x in change(slot)) for row in schedule.rows))


def slot_of(actions: Iterable[Action]) -> tuple[Slot, ...]:
    """Return the one slot of these actions: an action, a braid, or no slot where there are none."""
    held = tuple(actions)
    return held if len(held) < 2 else (Braid(held),)


def _in_order_of_backwards(row: Row) -> Row:
    """Return ``row`` with the W's of each stage, in the places where there are any, in the order of the stage's B's.

    The k-th W of a stage then stands behind its B, as at least k B's stand before it. W's in braids stay where they are.
    """
    waiting: dict[int, list[Action]] = {}
    for slot in row:
        if isinstance(slot, Action) and slot.op == B.name:
            waiting.setdefault(slot.stage, []).append(replace(slot, op=W.name))
    alone = {slot for slot in row if isinstance(slot, Action)}
    orders = {stage: iter(w for w in actions if w in alone) for stage, actions in waiting.items()}
    return tuple(
        next(orders[slot.stage], slot)
        if isinstance(slot, Action) and slot.op == W.name and slot.stage in orders
        else slot
        for slot in row
    )


def _parts(action: Action, fused: frozenset[tuple[int, int]]) -> Iterator[Action]:
    """Return what replaces an action: itself, nothing (W is part of a BW), or other parts of the backward."""
    if (action.stage, action.microbatch) in fused:
        ops: tuple[str, ...] = {B.name: (BW.name,), W.name: ()}.get(action.op, (action.op,))
    else:
        ops = {BW.name: (B.name, W.name)}.get(action.op, (action.op,))
    return (replace(action, op=op) for op in ops)
