"""Backwards split or fused as another schedule has them (:func:`backwards_like`), and ops of users inserted (:func:`insert`).

Fused and split backwards add the same terms, but XLA may round them differently (seen in float32 on CPU): two orders give
equal bits only if they split the same backwards. B becomes BW where it stands, so its result is later and W is done earlier;
BW becomes B and W side by side. A braid with such a change comes apart into its actions.

A user's op gets one action behind each action of another op, as early as what it waits for allows. The order of all other
actions stays. Where an inserted action waits for other ranks, it stands before the first slot of its row
that starts, if every action takes one second, no earlier than the last of what it waits for ends. So its place agrees with an
order in time, and no rank waits for it in vain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache
from itertools import chain

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule.check import check_schedule
from jaxpipe.schedule.costs import CostProfile, HostLink
from jaxpipe.schedule.deps import build_graph
from jaxpipe.schedule.engine import AT_ONCE, run_graph
from jaxpipe.schedule.ir import BW, Action, B, Braid, Row, Schedule, Slot, W, op_spec

_CLEARLY = 1.1
_WORTH_S = 1e-3
"""A measurement may be wrong by this factor on a busy machine, and another instruction may cost the host this many seconds."""


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
    unbraided = {slot for slot in row if isinstance(slot, Action)}
    orders = {stage: iter(w for w in actions if w in unbraided) for stage, actions in waiting.items()}
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


def insert(schedule: Schedule, op: str, *, after: str, stages: Iterable[int]) -> Schedule:
    """Return ``schedule`` with the op called ``op`` behind each action of the op ``after`` of ``stages``, in its row, for
    the same microbatch (for each group of a stage with a span, on each rank of a shared stage).

    Raises:
        ScheduleError: ``op`` is unknown, there is no such stage, it has no action ``after``, or the result is not valid: the
            action is there already, or nothing makes what it waits for.
    """
    name, chosen = op_spec(op).name, sorted(set(stages))
    added: list[list[tuple[Action, int]]] = []  # of each rank, with the place of what it follows
    for row in schedule.rows:
        behind = ((a, at) for at, x in enumerate(row) for a in x.actions if a.op == after and a.stage in chosen)
        added.append([(replace(a, op=name), at) for a, at in behind])
    if wrong := [s for s in chosen if s not in {a.stage for new in added for a, _ in new}]:
        ops = sorted({a.op for a in schedule.actions() if a.stage == wrong[0]})
        why = f"no {after} to stand behind, but {' '.join(ops)}" if ops else f"no place in 0..{schedule.num_stages - 1}"
        raise ScheduleError(f"insert {name}: stage {wrong[0]} has {why}")
    rows = tuple((*row, *(a for a, _ in new)) for row, new in zip(schedule.rows, added, strict=True))
    graph = build_graph(replace(schedule, rows=rows))
    first = [start + len(row) for start, row in zip(graph.row_start, schedule.rows, strict=True)]
    numbers = {start + k for start, new in zip(first, added, strict=True) for k in range(len(new))}
    seconds = [float(n not in numbers) for n in range(len(graph.slots))]
    run = run_graph(graph, seconds, [AT_ONCE] * len(graph.transfers), HostLink())
    if graph.unmet or graph.problems or run.blocked:
        check_schedule(graph.schedule)

    @cache
    def ended_s(n: int) -> float:
        """Return when slot ``n`` ends; one that is added starts and ends when the last of what it waits for does."""
        return (
            max((ended_s(graph.source(x)) for x in graph.waits[n]), default=0.0)
            if n in numbers
            else run.end_s[n] or 0.0
        )

    new_rows = []
    for row, start, new, n in zip(schedule.rows, graph.row_start, added, first, strict=True):
        slots: list[list[Slot]] = [[slot] for slot in row]
        for _, k in sorted((ended_s(n + k), k) for k in range(len(new))):
            action, at = new[k]
            later = (j for j in range(at + 1, len(row)) if (run.start_s[start + j] or 0.0) >= ended_s(n + k))
            slots[next(later, len(row)) - 1].append(action)
        new_rows.append(tuple(chain.from_iterable(slots)))
    schedule = replace(schedule, rows=tuple(new_rows))
    check_schedule(schedule)
    return schedule
