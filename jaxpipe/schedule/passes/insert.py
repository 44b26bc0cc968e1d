"""Adds a user's op to a schedule: one action behind each action of another op, as early as what it waits for allows.

The order of all other actions stays. Where an inserted action waits for other ranks, it stands before the first slot of its row
that starts, if every action takes one second, no earlier than the last of what it waits for ends. So its place agrees with an
order in time, and no rank waits for it in vain.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from itertools import chain

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule.check import check_schedule
from jaxpipe.schedule.costs import HostLink
from jaxpipe.schedule.deps import build_graph
from jaxpipe.schedule.engine import AT_ONCE, run_graph
from jaxpipe.schedule.ir import Action, Schedule, Slot, op_spec


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
