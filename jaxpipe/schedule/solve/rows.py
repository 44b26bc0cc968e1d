"""From start times to rows and back: the order behind a solver's answer, and a schedule as a solver's hint.

Rows hold order only, and the simulator starts everything as early as the order allows, so an answer's times are shifted
left as far as they go. What keeps the memory limit is order too, all but one thing: a compute slot that starts late because
an offload gives room. Rows say it with ``S``, which waits for that O and makes the compute slots behind it wait. An S goes
before the first compute slot that starts no earlier than its O ends, so it delays nothing beyond the solver's times; it is
set only where the limit would be broken without, and never behind the L that brings the same back. Claim (one host lane per
rank): with all of them the limit holds. Take the last of the takes that have happened by some instant, in the solver's
order. All that was given back before it in the solver's times has been given back: by compute slots, as they stand before
it in the row; by an O, through its S if the take is a compute slot's, through the shared lane if it is an L's. With a lane
per direction the last step fails, see ``strict`` in :mod:`.formulation`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule.check import find_problems
from jaxpipe.schedule.deps import HOST_LANES
from jaxpipe.schedule.ir import Action, Row, Schedule, op_spec
from jaxpipe.schedule.simulate import simulate
from jaxpipe.schedule.solve.actions import Actions, Copies, Starts
from jaxpipe.schedule.timeline import Timeline
from jaxpipe.schedule.tolerance import MEMORY, at_most

_ROUNDS = 50


def schedule_of(actions: Actions, starts: Starts, name: str) -> tuple[Schedule, Timeline]:
    """The schedule that issues everything in the order of ``starts``, and when that happens.

    Raises:
        ScheduleError: the order is not a valid schedule.
    """
    rows = [_Row(actions, starts, rank) for rank in range(actions.num_ranks)]
    syncs: set[int] = set()
    for _ in range(_ROUNDS):
        schedule, timeline = _simulated(actions, name, rows, syncs)
        if actions.task.fits(timeline):
            return schedule, timeline
        more = {o for row in rows for o in row.missing(timeline, syncs)}
        if not more:
            break
        syncs |= more
    return _simulated(actions, name, rows, {o for row in rows for o in row.copies})


def starts_of(actions: Actions, timeline: Timeline) -> Starts | None:
    """The times of a simulated schedule in ticks; None if it has slots that are not among ``actions``.

    A full backward that is not there is taken apart: B, and W right behind it.
    """
    start, fused = [-1] * len(actions.action), set()
    for event in timeline.events:
        a = event.action
        if event.lane not in ("compute", *HOST_LANES) or (type(a) is Action and op_spec(a.op).is_sync):
            continue
        if type(a) is not Action:
            return None
        at, n = actions.ticks.of(event.start_s), actions.number(a, event.rank)
        if n is None:
            return None
        start[n] = at
        if a.op == "BW" != actions.action[n].op:
            if n in actions.fusing:
                fused.add(actions.fusing[n].choice)
            else:
                start[actions.number(Action("W", a.stage, a.microbatch), event.rank) or 0] = at + actions.size[n]
    return Starts(start, frozenset(fused))


def _simulated(actions: Actions, name: str, rows: list[_Row], syncs: set[int]) -> tuple[Schedule, Timeline]:
    task = actions.task
    schedule = Schedule(name, task.placement, task.num_microbatches, tuple(row.slots(syncs) for row in rows))
    problems = find_problems(schedule)
    if problems:
        raise ScheduleError(f"solver's schedule: {problems[0]}", problems)
    return schedule, simulate(schedule, task.costs)


class _Row:
    """The actions of one rank in the order of their times."""

    def __init__(self, actions: Actions, starts: Starts, rank: int) -> None:
        self.actions, self.starts, self.rank = actions, starts, rank
        compute = [n for n in actions.lanes[rank] if starts.start[n] >= 0]
        self.compute = sorted(compute, key=lambda n: (starts.start[n], self._end(n), n))
        self.begins, self.ends = [starts.start[n] for n in self.compute], [self._end(n) for n in self.compute]
        self.place = {n: at for at, n in enumerate(self.compute)}
        self.copies = {o: c for o, c in actions.copies.items() if actions.rank[o] == rank and starts.start[o] >= 0}

    def _end(self, n: int) -> int:
        return self.actions.end(n, self.starts)

    def slots(self, syncs: set[int]) -> Row:
        """Compute slots with what goes between them: host actions behind the last slot that has ended, then syncs."""
        between: dict[int, list[tuple[int, int, int, Action]]] = {}
        for o, copies in self.copies.items():
            for order, n in enumerate((o, copies.load)):
                here = self.starts.start[n], self._end(n), order, self.actions.action[n]
                between.setdefault(self._gap(n, copies), []).append(here)
            place, end = max(bisect_left(self.begins, self._end(o)), self._gap(o, copies)), self._end(o)
            if o in syncs and place <= self._gap(copies.load, copies):
                a = self.actions.action[o]
                between.setdefault(place, []).append((end, end, 2, Action("S", a.stage, a.microbatch)))
        row: list[Action] = []
        for at in range(len(self.compute) + 1):
            row += (action for *_, action in sorted(between.get(at, ())))
            if at < len(self.compute):
                row.append(self._slot(self.compute[at]))
        return tuple(row)

    def _slot(self, n: int) -> Action:
        a, fusing = self.actions.action[n], self.actions.fusing.get(n)
        return Action("BW", a.stage, a.microbatch) if fusing and fusing.choice in self.starts.fused else a

    def _gap(self, n: int, copies: Copies) -> int:
        """How many compute slots stand before this O or L: those that have ended when it starts."""
        after = bisect_right(self.ends, self.starts.start[n])
        return min(max(after, self.place[copies.f] + 1), self.place[copies.b])

    def missing(self, timeline: Timeline, syncs: set[int]) -> Iterator[int]:
        """O's that end, by the solver's times, before something that takes memory here, but not so in ``timeline``: at the
        first instant at which the rank holds more than it may."""
        when = self._first_excess(timeline)
        if when is None:
            return
        late, latest = [], 0
        for event in timeline.of(self.rank):
            for action in event.action.actions:
                n = self.actions.number(action, self.rank)
                if n is None or event.lane == "send":
                    continue
                if n in self.copies and n not in syncs and event.end_s > when:
                    late.append(n)
                if n not in self.copies and event.start_s <= when:
                    latest = max(latest, self.starts.start[n])
        yield from (n for n in late if self._end(n) <= latest)

    def _first_excess(self, timeline: Timeline) -> float | None:
        """When the rank's memory first passes a limit; activations in bytes of residuals if only their limit is known."""
        task, curve = self.actions.task, timeline.memory[self.rank]
        allowed = []
        if task.costs.memory_limit_bytes:
            allowed.append(task.costs.memory_limit_bytes[self.rank] - timeline.static_bytes[self.rank])
        if task.memory_limit < float("inf") and not at_most(timeline.peak_activations[self.rank], task.memory_limit):
            share = sum(task.costs.residual_bytes[s] for s in task.placement.stages_of(self.rank))
            allowed.append(task.memory_limit * share)
        limit = min(allowed, default=float("inf")) * (1 + MEMORY)
        return next((t for t, level in zip(curve.times_s, curve.bytes, strict=True) if level > limit), None)
