"""Explains why slots can't run: waits that nothing satisfies, and ranks that wait for each other."""

from __future__ import annotations

from jaxpipe.schedule.deps import DependencyGraph, Unmet
from jaxpipe.schedule.engine import Run

_BEFORE, _AFTER, _RANKS_SHOWN = 4, 3, 16


def describe_unmet(graph: DependencyGraph, unmet: Unmet) -> str:
    """Return one sentence for a wait that nothing in the schedule satisfies."""
    actions = " or ".join(f"{op}{unmet.stage}.{unmet.microbatch}" for op in unmet.ops)
    return (
        f"{unmet.action} on rank {graph.rank_of[unmet.slot]} waits for {actions}, which the schedule does not contain"
    )


def explain_deadlock(graph: DependencyGraph, run: Run) -> str:
    """Return each blocked rank's line with the blocked action in ``>…<`` and what it waits for, then one cycle of waits."""
    heads = {_queue_key(graph, slot): slot for slot in run.blocked}
    ranks = sorted({rank for rank, _ in heads})
    lines = [f"deadlock: {len(ranks)} of {graph.schedule.num_ranks} ranks wait for ever"]
    lines += [
        f"  rank {graph.rank_of[slot]}: {_line(graph, slot)}   waits for {_reason(graph, run, slot)}"
        for slot in sorted(run.blocked)[:_RANKS_SHOWN]
    ]
    if len(run.blocked) > _RANKS_SHOWN:
        lines.append(f"  and {len(run.blocked) - _RANKS_SHOWN} more")
    lines.append("  cycle: " + ", ".join(_cycle(graph, run, heads)))
    lines.append("  move one of these actions earlier or later in its row")
    return "\n".join(lines)


def _queue_key(graph: DependencyGraph, slot: int) -> tuple[int, str]:
    rank = graph.rank_of[slot]
    return rank, next(lane for lane, slots in graph.lanes[rank].items() if slot in slots)


def _line(graph: DependencyGraph, slot: int) -> str:
    """Return the row around ``slot``, the slot itself in ``>…<``."""
    row = graph.schedule.rows[graph.rank_of[slot]]
    at = graph.position(slot)
    first, last = max(0, at - _BEFORE), min(len(row), at + 1 + _AFTER)
    shown = [f">{x}<" if k == at else str(x) for k, x in enumerate(row[first:last], start=first)]
    return " ".join(["…"] * (first > 0) + shown + ["…"] * (last < len(row)))


def _holding(graph: DependencyGraph, run: Run, slot: int) -> int | None:
    """Return the slot, not yet run, that ``slot`` waits for; None when it waits for its group only."""
    return next((graph.source(number) for number in graph.waits[slot] if run.end_s[number] is None), None)


def _waited_for(graph: DependencyGraph, run: Run, slot: int) -> list[int]:
    """Return the slots that block ``slot``; else the members of its group that are not at the head of their lane, or are
    held there."""
    held = _holding(graph, run, slot)
    if held is not None:
        return [held]
    group = graph.joints[graph.joint_of[slot]] if slot in graph.joint_of else ()
    return [n for n in group if n != slot and (n not in run.blocked or _holding(graph, run, n) is not None)]


def _reason(graph: DependencyGraph, run: Run, slot: int) -> str:
    blockers = _waited_for(graph, run, slot)
    ranks = ", ".join(f"rank {graph.rank_of[n]}" for n in blockers)
    if _holding(graph, run, slot) is not None:
        return f"{graph.slots[blockers[0]]} on {ranks}"
    return f"{ranks} to start {graph.slots[slot]} together with it" if slot in graph.joint_of else "its lane"


def _cycle(graph: DependencyGraph, run: Run, heads: dict[tuple[int, str], int]) -> list[str]:
    """Return sentences from a blocked slot along what it waits for, until a slot comes again."""
    step_of_slot: dict[int, int] = {}
    steps: list[str] = []
    slot = min(run.blocked)
    while slot not in step_of_slot:
        step_of_slot[slot] = len(steps)
        waits_for = _waited_for(graph, run, slot)
        if not waits_for:
            break
        blocker = waits_for[0]
        # the blocker may itself stand behind the blocked head of its lane: the walk goes on from there
        head = heads.get(_queue_key(graph, blocker), blocker)
        step = f"{graph.slots[slot]} waits for {graph.slots[blocker]} on rank {graph.rank_of[blocker]}"
        steps.append(step + (f", which stands behind {graph.slots[head]}" if head != blocker else ""))
        slot = head
    return steps[step_of_slot.get(slot, 0) :]
