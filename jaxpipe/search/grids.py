"""Seconds and bytes as whole numbers, for searches that know no others: the solver's, and those of bounds.

**Time.** If all durations are whole multiples of one step (to 1e-11, far inside the 1e-9 that the rest of the package
allows), the grid is exact: ticks and seconds say the same. If not, the step is a fraction of the mean duration
(how fine pays: ``scripts/results/solver.md``) and durations are rounded *down*. A bound in ticks is then a bound in
seconds. Proof: take any real schedule
and let every action start at ``floor(start / step)``. An action that ended at e by its real duration now ends at
``floor(start / step) + floor(duration / step) <= floor(e / step)``, so whatever waited for it still may start, lanes stay
free of overlap, and of two events with the release no later than the take, the release is still no later. Takes that fall
on one tick are judged together, after all releases before the last of them: the level is at most what it really was there.
So the rounded schedule is feasible in the model and its makespan is at most ``makespan / step``. A *span* has two rounded
ends: less than one tick more than ``span / step``. Hence :meth:`Ticks.makespan_bound_s` and :meth:`Ticks.span_bound_s`.

**Memory.** Exact multiples of a common unit if there is one, else sizes rounded up and limits down: what fits in units fits in
real numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor, gcd, lcm

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule.timeline import MEMORY

_SAME = 1e-11
_MAX_DENOMINATOR = 10_000
_MAX_MULTIPLE = 2**30
_HORIZON = 2**40
FINE, COARSE = 20_000, 200
_PARTS_OF_LIMIT = 2**20


@dataclass(frozen=True, slots=True)
class Ticks:
    """A grid of time. ``step_s``: seconds of one tick. ``exact``: every duration is a whole number of ticks."""

    step_s: float
    exact: bool

    def of(self, seconds: float) -> int:
        """Return the ticks of a duration or of a point in time: the number it is if exact, else the whole number below."""
        ticks = seconds / self.step_s
        return round(ticks) if self.exact else floor(ticks)

    def at_least(self, seconds: float) -> int:
        """Return the fewest ticks that a value in ticks has if it is at least ``seconds`` (a lower bound that is known)."""
        ticks = seconds / self.step_s
        return ceil(ticks - 1e-6 - 1e-9 * ticks) if self.exact else floor(ticks * (1 - MEMORY))

    def seconds(self, ticks: float) -> float:
        return ticks * self.step_s

    def makespan_bound_s(self, ticks: float) -> float:
        """Return the seconds that no makespan is below, if no makespan of the model is below ``ticks``."""
        return max(0.0, ticks * self.step_s)

    def span_bound_s(self, ticks: float) -> float:
        """Return the seconds that no longest span is below, if none of the model is below ``ticks``."""
        return max(0.0, (ticks if self.exact else ticks - 1) * self.step_s)


def time_grid(durations_s: Iterable[float], horizon_s: float, parts: int = FINE) -> Ticks:
    """Return the grid for these durations; ``horizon_s``: no time in the model is later; ``parts`` of the mean, if it must
    round.

    Raises:
        ScheduleError: the horizon has no 2^40 ticks of room: some duration is that much longer than the mean.
    """
    positive = sorted({x for x in durations_s if x > 0})
    if not positive:
        return Ticks(1.0, exact=True)
    step = common_step(positive)
    if step is not None and horizon_s / step < _HORIZON:
        return Ticks(step, exact=True)
    step = sum(positive) / len(positive) / parts
    if horizon_s / step >= _HORIZON:
        raise ScheduleError(
            f"a schedule of {horizon_s:g} s has too many steps of {step:g} s for the solver; costs differ too much"
        )
    return Ticks(step, exact=False)


def common_step(values: Iterable[float]) -> float | None:
    """Return the largest step that all positive values are whole multiples of (to 1e-11), or None if there is none worth
    having."""
    positive = sorted({x for x in values if x > 0})
    if not positive:
        return 1.0
    # the shortest value, then units that people write costs in
    for unit in (positive[0], 1.0, 1e-3, 1e-6, 1e-9):
        ratios = [Fraction(x / unit).limit_denominator(_MAX_DENOMINATOR) for x in positive]
        if any(abs(float(q) - x / unit) > _SAME * (x / unit) for q, x in zip(ratios, positive, strict=True)):
            continue
        parts = lcm(*(q.denominator for q in ratios))
        multiples = [int(q * parts) for q in ratios]
        if multiples[-1] > _MAX_MULTIPLE:
            continue
        shared = gcd(*multiples)
        return positive[-1] * shared / multiples[-1]
    return None


@dataclass(frozen=True, slots=True)
class MemoryUnits:
    """A grid of memory, in bytes or activations. ``unit``: size of one. Sizes are rounded up, limits down, if not ``exact``."""

    unit: float
    exact: bool

    def size(self, amount: float) -> int:
        """Return the units that surely hold ``amount``."""
        units = amount / self.unit
        return round(units) if self.exact else ceil(units - _SAME * units)

    def limit(self, amount: float) -> int:
        """Return the units that surely fit into ``amount``, up to the 1e-9 that the checks of limits forgive."""
        units = amount / self.unit
        return floor(units * (1 + MEMORY) if self.exact else units)


def memory_units(sizes: Iterable[float], limit: float) -> MemoryUnits:
    """Return the grid for these sizes under ``limit``."""
    sizes = [x for x in sizes if x > 0]
    unit = common_step(sizes)
    if unit is not None and (not sizes or max(sizes) / unit < _PARTS_OF_LIMIT):
        return MemoryUnits(unit, exact=True)
    return MemoryUnits(max([*sizes, limit if limit < float("inf") else 0.0]) / _PARTS_OF_LIMIT, exact=False)
