"""Improving a schedule with offload a neighbourhood at a time; the neighbourhoods are :mod:`.offload_neighbourhood_model`'s.

Two kinds of neighbourhoods: a stretch of time, on all ranks or some neighbours; and a few microbatches over a longer stretch,
between all others in their order. CP-SAT's times become rows (:mod:`.rows`), which are simulated with real costs and held
to the limits, so what the model leaves out costs at most a proposal. Large-neighbourhood search in the sense of Shaw (1998).
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule.ir import Schedule
from jaxpipe.schedule.simulate import simulate
from jaxpipe.schedule.solve.hints import times_of
from jaxpipe.schedule.solve.instance import Instance
from jaxpipe.schedule.solve.offload_neighbourhood_model import OffloadNeighbourhoodModel, TieBreak
from jaxpipe.schedule.solve.offload_neighbourhood_times import OffloadNeighbourhood
from jaxpipe.schedule.solve.rows import Starts, schedule_of
from jaxpipe.schedule.solve.search import DETERMINISTIC_SECOND, Budget, some_neighbours, some_stretch
from jaxpipe.schedule.solve.task import SolveTask
from jaxpipe.schedule.solve.ticks import COARSE
from jaxpipe.schedule.timeline import Timeline
from jaxpipe.schedule.tolerance import at_most, nine_digits

_TIE_BREAKS = 0.3  # of neighbourhoods
_BY_MICROBATCH = 0.2
_EDGE = 0.2  # of neighbourhoods are at the start, and as many at the end
_SECONDS = 1.0, 6.0  # for one neighbourhood: at first, and after many that brought nothing
_LEAST_S = 0.02  # that a neighbourhood counts for
_PATIENCE = 8  # neighbourhoods without progress for each further second
_SIZE, _SMALLEST, _LARGEST = 70.0, 40.0, 3000.0


def offload_neighbourhood_search(
    task: SolveTask, start: Schedule, bound_s: float, budget: Budget, seed: int
) -> Iterator[Schedule]:
    """Better and better schedules of ``task``, all better than ``start``, until the budget ends or ``bound_s`` is met.

    Better: less of the objective (for ``lexicographic`` the makespan), or as much and less of the other of makespan and span.
    Yields nothing if ``start`` breaks a limit or holds braided slots.

    Raises:
        ScheduleError: the placement's stages form no chain on single ranks, or the costs are for another number of stages.
    """
    instance = Instance.of(task, COARSE)
    timeline = simulate(start, task.costs)
    if task.fits(timeline):
        yield from _Search(instance, seed).run(timeline, bound_s, budget)


class _Search:
    """The state of one search; ``size`` of neighbourhoods per kind adapts to what CP-SAT gets done."""

    def __init__(self, instance: Instance, seed: int) -> None:
        self.instance, self.seed = instance, seed
        self.random = random.Random(seed)
        self.size = dict.fromkeys(("time", "ranks", "microbatches"), _SIZE)
        self.tried = self.stale = 0

    def run(self, timeline: Timeline, bound_s: float, budget: Budget) -> Iterator[Schedule]:
        """Plateaus are walked by the model's own times; only what promises to be better becomes rows."""
        starts, best = times_of(self.instance, timeline), self._merit(timeline)
        while starts is not None and budget.left > 0 and not at_most(best[0], bound_s):
            proposal, merit = self._propose(starts, budget), self._ticks(starts)
            self.stale += 1
            if proposal is None or self._ticks(proposal) > merit:
                continue
            self.stale = 0 if self._ticks(proposal) < merit else self.stale
            if self._ticks(proposal)[:2] == merit[:2]:
                starts = proposal
                continue
            made = self._rows(proposal)
            if made is None or self._merit(made[1]) >= best:
                continue
            starts, best = times_of(self.instance, made[1]), self._merit(made[1])
            yield made[0]

    def _merit(self, timeline: Timeline) -> tuple[float, float]:
        """The objective, then the other time."""
        times = nine_digits(timeline.makespan), nine_digits(timeline.max_span)
        return times if self.instance.task.objective != "span" else (times[1], times[0])

    def _ticks(self, starts: Starts) -> tuple[int, int, int]:
        """The objective, the other time, and the sum of ranks' ends, by which neighbourhoods make progress on plateaus."""
        begins, ends = self._extent(starts)
        times = max(ends) - min(begins), max(b - a for a, b in zip(begins, ends, strict=True))
        one, two = times if self.instance.task.objective != "span" else (times[1], times[0])
        return one, two, sum(ends)

    def _extent(self, starts: Starts) -> tuple[list[int], list[int]]:
        """Per rank, when compute begins and ends."""
        rank = self.instance.problem.rank
        begins: list[list[int]] = [[] for _ in range(self.instance.problem.num_ranks)]
        ends: list[list[int]] = [[] for _ in begins]
        for key, t in starts.start.items():
            if key[0] in "FBW":
                begins[rank[key[1]]].append(t)
                ends[rank[key[1]]].append(starts.end(self.instance, key))
        return [min(x, default=0) for x in begins], [max(x, default=0) for x in ends]

    def _propose(self, starts: Starts, budget: Budget) -> Starts | None:
        self.tried += 1
        kind = self._kind()
        tie_break = self._tie_break() if self.random.random() < _TIE_BREAKS else None
        model = OffloadNeighbourhoodModel(self.instance, starts, self._neighbourhood(kind, starts), tie_break)
        seconds = min(_SECONDS[0] + self.stale / _PATIENCE, _SECONDS[1], budget.left)
        given = budget.spent
        times, done = model.solve(budget.parameters(seconds, self.seed + self.tried))
        if budget.reproducible:  # what it did not need is there for others
            budget.spent = min(budget.spent, given + max(_LEAST_S, model.spent / DETERMINISTIC_SECOND))
        factor = 1.15 if done else 0.9 if times is not None else 0.75
        self.size[kind] = min(_LARGEST, max(_SMALLEST, self.size[kind] * factor))
        return times

    def _rows(self, starts: Starts) -> tuple[Schedule, Timeline] | None:
        """The schedule of these times, if it keeps the limits."""
        try:
            schedule, timeline = schedule_of(self.instance, starts, "solved")
        except ScheduleError:
            return None
        return (schedule, timeline) if self.instance.task.fits(timeline) else None

    def _tie_break(self) -> TieBreak:
        """What to prefer among equals: F late and B early hold less, anything else leads elsewhere."""
        pick = self.random.choice
        return {"F": pick((-1, 0, 1)), "B": pick((1, 2)), "W": pick((0, 1)), "away": pick((-2, 0, 2))}

    def _kind(self) -> str:
        if self.random.random() < _BY_MICROBATCH:
            return "microbatches"
        return "ranks" if self.instance.problem.num_ranks > 4 and self.random.random() < 0.5 else "time"

    def _neighbourhood(self, kind: str, starts: Starts) -> OffloadNeighbourhood:
        """About ``size`` actions in a row; often at the start or the end. With ``microbatches``, about as many over a longer
        stretch."""
        rng, p = self.random, self.instance.problem.num_ranks
        ranks = range(p)
        if kind == "ranks":
            ranks = some_neighbours(rng, p)
        times = sorted(
            t for (op, k, _), t in starts.start.items() if op in "FBW" and self.instance.problem.rank[k] in ranks
        )
        want = int(self.size[kind] * rng.uniform(0.7, 1.2)) * (4 if kind == "microbatches" else 1)
        begin, end = some_stretch(rng, times, want, _EDGE)
        chosen = self._chosen(starts, begin, end) if kind == "microbatches" else None
        return OffloadNeighbourhood(begin, end, frozenset(ranks), chosen)

    def _chosen(self, starts: Starts, begin: int, end: int) -> frozenset[int]:
        """A quarter of the microbatches that have a forward inside, neighbours or not."""
        there = sorted({i for (op, _, i), t in starts.start.items() if op == "F" and begin <= t < end})
        count = max(1, len(there) // 4)
        if not there or self.random.random() < 0.5:
            return frozenset(self.random.sample(there, min(count, len(there))))
        first = self.random.randint(0, len(there) - count)
        return frozenset(there[first : first + count])
