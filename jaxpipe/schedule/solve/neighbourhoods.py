"""Improving a schedule a neighbourhood at a time: CP-SAT reorders what is in a window, what follows moves up.

A window is a stretch of time on all ranks or on some neighbours; with offload also a few microbatches over a longer stretch,
between all others in their order. :mod:`.formulation` says what moves. Without offload an answer's order is timed anew, as
early as it goes; with offload CP-SAT's times are kept, since they, not order alone, keep the limit. Plateaus are walked in
ticks; what promises to be better becomes rows (:mod:`.rows`), is simulated with real costs and held to the limits, so what the
model leaves out costs at most a proposal. Large-neighbourhood search in the sense of Shaw (1998).

The objective alone is blind to progress that other neighbourhoods have to complete, so some of them ask for a preference among
equals, which costs time.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule.ir import Schedule
from jaxpipe.schedule.passes.braid import unbraid
from jaxpipe.schedule.simulate import simulate
from jaxpipe.schedule.solve.actions import Actions, Starts
from jaxpipe.schedule.solve.cp_sat import DETERMINISTIC_SECOND, LITE, WHOLE_RESERVOIRS, Budget, run
from jaxpipe.schedule.solve.formulation import Formulation
from jaxpipe.schedule.solve.rows import schedule_of, starts_of
from jaxpipe.schedule.solve.task import SolveTask
from jaxpipe.schedule.solve.times import Window
from jaxpipe.schedule.timeline import Timeline
from jaxpipe.schedule.tolerance import at_most, nine_digits

_PARTS = 200
_PREFERENCES = 0.3  # of neighbourhoods have one
_BY_MICROBATCH = 0.2  # of those with offload
_LARGEST = 3000.0
_LEAST_S = 0.02  # that a neighbourhood counts for
_PATIENCE = 8  # neighbourhoods without progress for each further second


@dataclass(frozen=True, slots=True)
class _Manner:
    """``size``, ``smallest``: actions of a neighbourhood, at first and at least. ``edge``: the part of them that is at the
    start, and as much at the end. ``seconds``: for one: at first, and after many that brought nothing. Not tuned further."""

    size: float
    smallest: float
    edge: float
    seconds: tuple[float, float]


_PLAIN, _WITH_OFFLOAD = _Manner(240.0, 50.0, 0.15, (2.0, 2.0)), _Manner(70.0, 40.0, 0.2, (1.0, 6.0))


class NeighbourhoodSearch:
    """The search from ``start`` for ``task``.

    Raises:
        ScheduleError: the costs are for another number of stages or too uneven for a grid, or ``start`` is no valid schedule.
    """

    def __init__(self, task: SolveTask, start: Schedule, seed: int) -> None:
        self.task, start = task, unbraid(start)
        self.actions = Actions.of(task, start, _PARTS, fusing=False)
        self.random, self.seed = random.Random(seed), seed
        self.timeline = simulate(start, task.costs)
        self.manner = _WITH_OFFLOAD if self.actions.copies else _PLAIN
        self.size = dict.fromkeys(("time", "ranks", "microbatches"), self.manner.size)
        self.tried = self.stale = 0

    def run(self, budget: Budget, bound_s: float) -> Iterator[Schedule]:
        """Better and better schedules until the budget ends or ``bound_s`` is met; none if the start breaks a limit.

        Better: less of the objective (for ``lexicographic`` the makespan), or as much and less of the other of makespan and
        span.
        """
        starts, best = starts_of(self.actions, self.timeline), self._merit(self.timeline)
        if starts is None or not self.task.fits(self.timeline):
            return
        while budget.left > 0 and not at_most(best[0], bound_s):
            proposal, now = self._propose(starts, budget), self._ticks(starts)
            self.stale += 1
            if proposal is None or (found := self._ticks(proposal)) > now:
                continue
            self.stale = 0 if found < now else self.stale
            if found[:2] == now[:2]:
                starts = proposal
                continue
            made = self._made(proposal)
            if made is None or self._merit(made[1]) >= best:
                continue
            starts, best = starts_of(self.actions, made[1]) or starts, self._merit(made[1])
            yield made[0]

    def _merit(self, timeline: Timeline) -> tuple[float, float]:
        """The objective, then the other time."""
        times = nine_digits(timeline.makespan), nine_digits(timeline.max_span)
        return times if self.task.objective != "span" else times[::-1]

    def _ticks(self, starts: Starts) -> tuple[int, int, int]:
        """The objective, the other time, and by what neighbourhoods make progress on plateaus: the sum of starts, or of ranks'
        ends."""
        begins, ends = self.actions.extent(starts)
        times = max(ends) - min(begins), max(b - a for a, b in zip(begins, ends, strict=True))
        one, two = times if self.task.objective != "span" else times[::-1]
        return one, two, sum(ends if self.actions.copies else starts.start)

    def _propose(self, starts: Starts, budget: Budget) -> Starts | None:
        self.tried += 1
        kind = self._kind()
        window = self._window(kind, starts)
        prefer = self._preference() if self.random.random() < _PREFERENCES else None
        model = Formulation(self.actions, starts, window, prefer=prefer)
        model.hint(starts)
        least_s, most_s = self.manner.seconds
        given = budget.spent
        parameters = budget.parameters(min(least_s + self.stale / _PATIENCE, most_s), self.seed + self.tried)
        solver, found, done = run(model.cp, LITE, {} if self.actions.copies else WHOLE_RESERVOIRS, parameters)
        if budget.reproducible:  # what it did not need is there for others
            needed_s = solver.response_proto.deterministic_time / DETERMINISTIC_SECOND
            budget.spent = min(budget.spent, given + max(_LEAST_S, needed_s))
        factor = 1.15 if done else 0.9 if found else 0.75
        self.size[kind] = min(_LARGEST, max(self.manner.smallest, self.size[kind] * factor))
        answer = model.answer(solver) if found else None
        return answer if answer is None or self.actions.copies else self._earliest(answer, starts)

    def _earliest(self, answer: Starts, before: Starts) -> Starts | None:
        """The order of an answer, as early as it goes."""
        start = answer.start
        rows = [sorted(lane, key=lambda n: (start[n], before.start[n], n)) for lane in self.actions.lanes]
        return self.actions.earliest(rows)

    def _made(self, starts: Starts) -> tuple[Schedule, Timeline] | None:
        """The schedule of these times, if it keeps the limits."""
        try:
            schedule, timeline = schedule_of(self.actions, starts, "solved")
        except ScheduleError:
            return None
        return (schedule, timeline) if self.task.fits(timeline) else None

    # Which neighbourhoods.

    def _preference(self) -> Mapping[str, int]:
        """What to prefer among equals. Without offload all early; with it F late and B early hold less, anything else leads
        elsewhere."""
        if not self.actions.copies:
            return {a.op: 1 for a in self.actions.action}
        pick = self.random.choice
        return {"F": pick((-1, 0, 1)), "B": pick((1, 2)), "W": pick((0, 1)), "away": pick((-2, 0, 2))}

    def _kind(self) -> str:
        if self.actions.copies and self.random.random() < _BY_MICROBATCH:
            return "microbatches"
        return "ranks" if self.actions.num_ranks > 4 and self.random.random() < 0.5 else "time"

    def _window(self, kind: str, starts: Starts) -> Window:
        """About ``size`` actions in a row; often at the start or the end. With ``microbatches``, about as many over a longer
        stretch."""
        rng, p, actions = self.random, self.actions.num_ranks, self.actions
        ranks = range(p)
        if kind == "ranks":  # a quarter to a half of them, one beside the other
            count = rng.randint(max(2, p // 4), max(3, p // 2))
            first = rng.randint(0, p - count)
            ranks = range(first, first + count)
        times = sorted(starts.start[n] for rank in ranks for n in actions.lanes[rank])
        want = min(len(times), int(self.size[kind] * rng.uniform(0.7, 1.2)) * (4 if kind == "microbatches" else 1))
        last, place = len(times) - want, rng.random()
        at = 0 if place < self.manner.edge else last if place < 2 * self.manner.edge else rng.randint(0, last)
        begin = times[at]
        end = max(begin + 1, times[at + want] if at < last else times[-1] + 1)
        return Window(begin, end, frozenset(ranks), self._some(starts, begin, end) if kind == "microbatches" else None)

    def _some(self, starts: Starts, begin: int, end: int) -> frozenset[int]:
        """A quarter of the microbatches that have a forward inside, neighbours or not."""
        every = zip(self.actions.action, starts.start, strict=True)
        there = sorted({a.microbatch for a, t in every if a.op == "F" and begin <= t < end})
        count = max(1, len(there) // 4)
        if not there or self.random.random() < 0.5:
            return frozenset(self.random.sample(there, min(count, len(there))))
        first = self.random.randint(0, len(there) - count)
        return frozenset(there[first : first + count])
