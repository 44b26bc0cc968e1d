"""Steady states as orders: what a worker does with cycles, within its :class:`Budget`.

Orders are judged by re-timing with real costs (:class:`~jaxpipe.schedule.retime.Retimer`). Everything here is a function of its
arguments; with a budget in deterministic time no clock decides anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jaxpipe.schedule.list_schedule.fillers import Finisher
from jaxpipe.schedule.problem import Problem
from jaxpipe.schedule.retime import Draft
from jaxpipe.schedule.solve.cp_sat import Budget
from jaxpipe.schedule.solve.cyclic import Grid, find_cycle
from jaxpipe.schedule.solve.mirrored import Shape, applies, find_mirrored, shapes
from jaxpipe.schedule.tolerance import at_most, nine_digits

_PERIODS = (1.0, 1.02, 1.04, 1.0834, 1.1667, 1.25, 1.3334, 1.5, 1.6667, 2.0)
_STRETCHES = (1.0, 1.02, 1.035, 1.05, 1.0667, 1.0834, 1.12, 1.1667, 1.25)
"""Periods that are tried, × the work: whole twelfths, which equal costs have (a cycle of one needs 8.3% over the work at half
memory, README), and finer steps below; not tuned further."""
_MIRRORED_S = (1.5, 6.0)  # seconds for one shape and period, at the first try and the second; not tuned
_RECIPES = 20  # of list_schedule/fillers.py, by which a cycle's order is finished; not tuned


@dataclass(frozen=True, slots=True)
class Target:
    """What an order is judged by: ``by_span`` the longest span, else the makespan; within ``limits`` per rank.

    ``bound``: seconds of the objective that nothing is below.
    """

    limits: tuple[float, ...]
    by_span: bool
    bound: float

    @property
    def limit(self) -> float:
        return min(self.limits)

    def value(self, draft: Draft) -> float:
        return draft.span if self.by_span else draft.makespan

    def key(self, draft: Draft) -> tuple[float, float, float]:
        """Smaller is better: the objective, the other time, the peak."""
        times = (draft.span, draft.makespan) if self.by_span else (draft.makespan, draft.span)
        return nine_digits(times[0]), nine_digits(times[1]), nine_digits(draft.peak)

    def reached(self, draft: Draft) -> bool:
        return at_most(self.value(draft), self.bound)


def cycles(problem: Problem, target: Target, g: int, budget: Budget, seed: int) -> Iterator[tuple[Draft, str]]:
    """Orders from cycles of ``g`` microbatches: the shortest period that is found first, then longer and earlier-ending ones.

    Cycles are uniform over ranks' limits; a chain in one direction only.
    """
    if problem.placement.num_flows != 1:
        return
    grid, finisher = Grid.of(problem, target.limits), Finisher(problem)
    tried: set[int] = set()
    found = 0
    for stretch in _PERIODS:
        period = max(grid.least_period(g), round(grid.work() * g * stretch))
        if period in tried or budget.left <= 0 or found >= 3:
            continue
        tried.add(period)
        for short in (False, True):
            share = max(1.0, budget.left / 4)
            cycle = find_cycle(grid, period, g, budget.parameters(share, seed), short=short)
            if cycle is None:
                break
            draft = finisher.best(cycle.rows(problem), target.limit, _RECIPES)
            found += 1
            if draft is not None:
                yield draft, f"cycle of {g}"
                if target.reached(draft):
                    return
            if budget.left <= 0:
                return


def mirrored_cycles(
    problem: Problem, target: Target, part: int, parts: int, budget: Budget, seed: int
) -> Iterator[tuple[Draft, str]]:
    """Orders from mirrored cycles of a V, every ``parts``-th shape: short periods first, until one keeps to the limit; then
    back to short ones with more time."""
    grid, finisher = Grid.of(problem, target.limits), Finisher(problem)
    if not applies(grid):
        return
    settled: set[tuple[Shape, int]] = set()
    stretches: Sequence[float] = _STRETCHES
    for seconds in _MIRRORED_S:
        for number, stretch in enumerate(stretches):
            fits = False
            for shape in list(shapes(grid, stretch))[part::parts]:
                period = 2 * round(grid.work() * shape.g * stretch / 2)
                if (shape, period) in settled or shape.g >= problem.num_microbatches:
                    continue
                if budget.left <= 0:
                    return
                cycle, none = find_mirrored(grid, shape, period, budget.parameters(seconds, seed))
                if cycle is not None or none:
                    settled.add((shape, period))
                draft = None if cycle is None else finisher.best(cycle.rows(problem), target.limit, _RECIPES)
                if cycle is None or draft is None:
                    continue
                fits = fits or cycle.peak(grid) <= min(grid.limit)
                yield draft, f"mirrored cycle of {shape.g}"
                if target.reached(draft):
                    return
            if fits and seconds == _MIRRORED_S[0]:
                stretches = stretches[number::-1]  # then, from there, what was not settled
                break
