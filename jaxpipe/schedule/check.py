"""The one checker of schedules: collects everything that is wrong, then raises, and explains why slots can't run.

Rules, all read from the registered :class:`~jaxpipe.schedule.ir.OpSpec` and the placement:

1. One row per rank; stages and microbatches in range; every action on a rank that the placement names for it.
2. No action twice on a rank. Every required part (F, B, W) of every stage, microbatch and rank of its group is performed
   exactly once, so a full backward next to a split one is refused.
3. On a stage spread over ranks, an op that sends is on every rank of the group (it is one joint computation).
4. What an action waits for exists; on its own rank it stands earlier in the row; actions of one braid are independent.
5. An op that runs once a step (R, G) is on none or on all stages: once on each of a stage's ranks, with the number of the first
   flow that is there. So no W of the stage follows its R, and no F comes before its G (rule 4).
6. What a stage and microbatch takes of a kind of memory it gives back (an O without its L breaks this).
7. The ranks never wait for each other in a circle.

The order of transfers is not a rule. Where they are tagged, as within a process, it can't deadlock; where a transport between
processes runs them in the order in which they were started, lowering gives them one, with proof (``jaxpipe.program.order``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule.costs import HostLink
from jaxpipe.schedule.deps import DependencyGraph, Unmet, build_graph, collector_paused
from jaxpipe.schedule.engine import AT_ONCE, EngineRun, run_graph
from jaxpipe.schedule.ir import Action, OpSpec, Schedule, registered_ops

_BEFORE, _AFTER, _RANKS_SHOWN = 4, 3, 16


def describe_unmet(graph: DependencyGraph, unmet: Unmet) -> str:
    """Return one sentence for a wait that nothing in the schedule satisfies."""
    actions = " or ".join(f"{op}{unmet.stage}.{unmet.microbatch}" for op in unmet.ops)
    return (
        f"{unmet.action} on rank {graph.rank_of[unmet.slot]} waits for {actions}, which the schedule does not contain"
    )


def explain_deadlock(graph: DependencyGraph, run: EngineRun) -> str:
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


def _holding(graph: DependencyGraph, run: EngineRun, slot: int) -> int | None:
    """Return the slot, not yet run, that ``slot`` waits for; None when it waits for its group only."""
    return next((graph.source(number) for number in graph.waits[slot] if run.end_s[number] is None), None)


def _waited_for(graph: DependencyGraph, run: EngineRun, slot: int) -> list[int]:
    """Return the slots that block ``slot``; else the members of its group that are not at the head of their lane, or are
    held there."""
    held = _holding(graph, run, slot)
    if held is not None:
        return [held]
    group = graph.joints[graph.joint_of[slot]] if slot in graph.joint_of else ()
    return [n for n in group if n != slot and (n not in run.blocked or _holding(graph, run, n) is not None)]


def _reason(graph: DependencyGraph, run: EngineRun, slot: int) -> str:
    blockers = _waited_for(graph, run, slot)
    ranks = ", ".join(f"rank {graph.rank_of[n]}" for n in blockers)
    if _holding(graph, run, slot) is not None:
        return f"{graph.slots[blockers[0]]} on {ranks}"
    return f"{ranks} to start {graph.slots[slot]} together with it" if slot in graph.joint_of else "its lane"


def _cycle(graph: DependencyGraph, run: EngineRun, heads: dict[tuple[int, str], int]) -> list[str]:
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


_SHOWN = 40
_MOST = 1000  # problems of completeness after which nothing more is looked for

Place = tuple[int, int, int]
"""(stage, microbatch, rank)."""


def check_schedule(schedule: Schedule, where: str = "") -> None:
    """Raise unless ``schedule`` is complete, fits its placement and can run. ``where``: what the message begins with, such as
    the file that it is from.

    Raises:
        ScheduleError: with every problem found in ``.problems``; the message shows the first 40.
    """
    problems = find_problems(schedule)
    if problems:
        remainder = [f"and {len(problems) - _SHOWN} more problems"] * (len(problems) > _SHOWN)
        shown = [*problems[:_SHOWN], *remainder]
        text = f"schedule {schedule.name!r}: " + "; ".join(shown)
        raise ScheduleError(f"{where}: {text}" if where else text, problems)


@collector_paused()
def find_problems(schedule: Schedule) -> list[str]:
    """Return every problem of ``schedule``, one string each; empty for a valid schedule. A list that is too long ends by
    saying so."""
    graph = build_graph(schedule)
    problems = list(graph.problems)
    if not graph.waits:
        return problems or [f"rows are empty: {schedule.num_stages} stages need their actions"]
    missing, places, parts = _incomplete(graph)
    problems += missing
    if len(missing) >= _MOST:
        return [*problems, f"{_MOST} actions are missing or done twice, and no more was looked for"]
    problems += [
        *_torn_groups(graph, places),
        *_once_a_step(graph),
        *_unmet(graph, parts),
        *_row_order(graph),
        *_memory_balance(graph, places),
    ]
    # a deadlock is worth telling only of a schedule that is right otherwise; order alone decides it
    if not problems:
        run = run_graph(graph, [0.0] * len(graph.slots), [AT_ONCE] * len(graph.transfers), HostLink())
        if run.blocked:
            problems.append(explain_deadlock(graph, run))
    return problems


def _incomplete(graph: DependencyGraph) -> tuple[list[str], set[Place], set[tuple[str, int, int]]]:
    """Find required parts that are missing or performed more than once: problems, ``_MOST`` at most; the places concerned;
    (part, stage, microbatch) that are missing on some rank."""
    problems: list[str] = []
    places: set[Place] = set()
    parts: set[tuple[str, int, int]] = set()
    for part in (spec.name for spec in registered_ops() if spec.required):
        performers = [spec.name for spec in graph.ops() if part in spec.performs()]
        for stage, i, rank in _places(graph.schedule):
            ops = [op for op in performers if graph.slot_of(op, stage, i, rank) is not None]
            if len(ops) == 1:
                continue
            if len(problems) >= _MOST:
                return problems, places, parts
            # remembered, so that what follows from this is not reported a second time
            places.add((stage, i, rank))
            where = f"{part} of stage {stage}, microbatch {i} on rank {rank}"
            if ops:
                names = " and ".join(str(Action(op, stage, i)) for op in ops)
                problems.append(f"{where} is performed {len(ops)} times, by {names}; keep one")
            else:
                parts.add((part, stage, i))
                problems.append(f"{where} is missing")
    return problems, places, parts


def _places(schedule: Schedule) -> Iterator[Place]:
    flows, span, m = schedule.placement.flows, schedule.placement.span, schedule.num_microbatches
    for i in range(m):
        for stage, group in enumerate(flows[i % len(flows)]):
            for rank in group if i * span[stage] < m else ():
                yield stage, i, rank


def _torn_groups(graph: DependencyGraph, reported: set[Place]) -> Iterator[str]:
    """Report computations of a group that some of its ranks lack."""
    placement = graph.schedule.placement
    for spec in (spec for spec in graph.ops() if spec.sends != "none"):
        for stage, i, rank in _places(graph.schedule):
            group = placement.ranks(stage, i)
            having = [r for r in group if graph.slot_of(spec.name, stage, i, r) is not None] if len(group) > 1 else []
            if having and rank not in having and (stage, i, rank) not in reported:
                yield (
                    f"{Action(spec.name, stage, i)} is on rank {having[0]} but not on rank {rank}: "
                    f"stage {stage} runs on ranks {', '.join(map(str, group))} together"
                )


def _once_a_step(graph: DependencyGraph) -> Iterator[str]:
    """Report ops that run once a step and do not, or not on all stages."""
    schedule, names = graph.schedule, {spec.name for spec in graph.ops() if spec.per_step}
    present = {(a, rank) for rank in range(schedule.num_ranks) for a in schedule.actions(rank) if a.op in names}
    flow = schedule.placement.first_flow
    places = {(Action(op, s, i), rank) for op in names for s, i, rank in _places(schedule) if i == flow(s, i)}
    for action, rank in sorted(places - present):
        yield f"{action} is missing on rank {rank}: {action.op} runs once a step on every stage, or on none"
    for action, rank in sorted(present - places):
        if 0 <= action.stage < schedule.num_stages:
            numbered = replace(action, microbatch=flow(action.stage, action.microbatch))
            yield f"{action} on rank {rank}: {action.op} runs once a step, as {numbered}"


def _unmet(graph: DependencyGraph, missing: set[tuple[str, int, int]]) -> Iterator[str]:
    """Report waits that nothing satisfies, unless the action waited for is already reported as missing."""
    parts = {spec.name: spec.performs() for spec in registered_ops()}
    for unmet in graph.unmet:
        # BW stands for B and W: a wait for either is explained by the part that is missing
        awaited_parts = {part for op in unmet.ops for part in parts.get(op, ())}
        if not any((part, unmet.stage, unmet.microbatch) in missing for part in awaited_parts):
            yield describe_unmet(graph, unmet)


def _row_order(graph: DependencyGraph) -> Iterator[str]:
    rank_of, count = graph.rank_of, len(graph.slots)
    for slot, waits in enumerate(graph.waits):
        for dep in waits:
            if slot == dep:
                braid = f"braid {graph.slots[slot]} on rank {rank_of[slot]}"
                yield f"{braid}: one of its actions waits for another; braid independent actions only"
            # numbers from ``count`` on are transfers, which stand in no row
            elif slot < dep < count and rank_of[dep] == rank_of[slot]:
                yield (
                    f"{graph.slots[slot]} stands before {graph.slots[dep]}, which it waits for, on rank {rank_of[slot]} "
                    f"(slots {graph.position(slot)} and {graph.position(dep)})"
                )


def _memory_balance(graph: DependencyGraph, reported: set[Place]) -> Iterator[str]:
    """Report fields that optional ops take and never give back, or the reverse. Required ops balance once they are complete."""
    ops = graph.ops()
    fields = sorted({e.field for spec in ops if not _is_required(spec) for e in spec.memory})
    for name in fields:
        sums = {spec.name: sum(e.sign for e in spec.memory if e.field == name) for spec in ops}
        sums = {op: total for op, total in sums.items() if total}
        for place in _places(graph.schedule) if sums else ():
            present = [op for op in sums if graph.slot_of(op, *place) is not None]
            total = sum(sums[op] for op in present)
            if total and place not in reported:
                yield _unbalanced(name, place, total, (op for op in present if sums[op] * total > 0))


def _is_required(spec: OpSpec) -> bool:
    return any(s.required and s.name in spec.performs() for s in registered_ops())


def _unbalanced(field: str, place: Place, total: int, present: Iterable[str]) -> str:
    stage, i, rank = place
    names = " and ".join(str(Action(op, stage, i)) for op in present)
    undo = [
        str(Action(spec.name, stage, i))
        for spec in registered_ops()
        if not _is_required(spec) and sum(e.sign for e in spec.memory if e.field == field) * total < 0
    ]
    verb = "takes {0} and nothing gives it back" if total > 0 else "gives back {0} and nothing takes it again"
    remedy = f"; add {' or '.join(undo)}" if undo else ""
    return f"{names} on rank {rank} {verb.format(field)}{remedy}"
