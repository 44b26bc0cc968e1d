"""Budgets that end searches in time, and seconds and bytes as whole numbers for those that know no others.

**Budgets.** A search ends by a :class:`Budget` that it asks, in seconds of the clock or deterministic ones, or by an alarm,
wherever it is, which interrupts the main thread between two instructions of Python. CP-SAT is run here too (:func:`run`), with
parameters that several models share.

**Time in ticks.** If all durations are whole multiples of one step (to 1e-11, far inside the 1e-9 that the rest of the package
allows), the grid is exact: ticks and seconds say the same. If not, the step is a fraction of the mean duration
(how fine pays: ``scripts/results/solver.md``) and durations are rounded *down*. A bound in ticks is then a bound in
seconds. Proof: take any real schedule
and let every action start at ``floor(start / step)``. An action that ended at e by its real duration now ends at
``floor(start / step) + floor(duration / step) <= floor(e / step)``, so whatever waited for it still may start, lanes stay
free of overlap, and of two events with the release no later than the take, the release is still no later. Takes that fall
on one tick are judged together, after all releases before the last of them: the level is at most what it really was there.
So the rounded schedule is feasible in the model and its makespan is at most ``makespan / step``. A *span* has two rounded
ends: less than one tick more than ``span / step``. Hence :meth:`Ticks.bound_s`.

**Memory in units.** Exact multiples of a common unit if there is one, else sizes rounded up and limits down: what fits in
units fits in real numbers.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor, gcd, lcm
from typing import Any, TypeVar

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule.timeline import MEMORY

DETERMINISTIC_SECOND = 0.1  # CP-SAT's deterministic time in a second of the development machine, roughly


@dataclass(slots=True)
class Budget:
    """Wall-clock seconds from its creation, or with ``reproducible`` deterministic seconds that callers spend."""

    seconds: float
    reproducible: bool = False
    spent: float = 0.0
    began: float = 0.0

    def __post_init__(self) -> None:
        self.began = time.perf_counter()

    @property
    def left(self) -> float:
        used = self.spent if self.reproducible else time.perf_counter() - self.began
        return self.seconds - used

    def parameters(self, seconds: float, seed: int) -> dict[str, Any]:
        """Return CP-SAT parameters for a search of up to so many seconds, which it counts as spent."""
        seconds = max(0.05, min(seconds, self.left))
        self.spent += seconds
        name, scale = (
            ("max_deterministic_time", DETERMINISTIC_SECOND) if self.reproducible else ("max_time_in_seconds", 1.0)
        )
        return {name: seconds * scale, "num_workers": 1, "random_seed": seed}


Found = TypeVar("Found")


class OutOfTimeError(Exception):
    """The search is to end with the best so far."""


def within(seconds: float | None, search: Callable[[], Found]) -> tuple[Found | None, bool]:
    """Return what ``search`` returns, in which OutOfTimeError is raised after so many seconds (None: never), and whether it
    was. None if time was up before the search began."""
    if seconds is None or threading.current_thread() is not threading.main_thread():
        return search(), False
    result, searching, ended = None, [True], []

    def ring(*_: object) -> None:
        if searching:
            ended.append(True)
            raise OutOfTimeError

    before, began = signal.signal(signal.SIGALRM, ring), time.monotonic()
    left_s, every_s = signal.getitimer(signal.ITIMER_REAL)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        result = search()
        searching.clear()
    except OutOfTimeError:
        pass
    finally:
        searching.clear()
        signal.setitimer(signal.ITIMER_REAL, max(left_s - (time.monotonic() - began), 0.001) if left_s else 0, every_s)
        signal.signal(signal.SIGALRM, before)
    return result, bool(ended)


LITE: Mapping[str, Any] = {"symmetry_level": 0, "cp_model_probing_level": 0}
"""Less presolve: what it costs is more than it brings on small models."""
WHOLE_RESERVOIRS: Mapping[str, Any] = {
    "expand_reservoir_constraints": False,
    "use_feasibility_jump": False,
    "num_violation_ls": 0,
}
"""Reservoirs kept whole: expanded into pairs of events, larger models find no answer in time. OR-Tools 9.15's local search by
violations does not see whole ones and hands out answers that break them, so it is left out."""


def run(model: Any, *parameters: Mapping[str, Any]) -> tuple[Any, bool, bool]:
    """Solve ``model`` with these parameters, of which later ones win: the solver, whether it has an answer, and whether the
    search came to its end (the answer is optimal, or there is none)."""
    from ortools.sat.python import cp_model

    solver: Any = cp_model.CpSolver()
    for values in parameters:
        for name, value in values.items():
            setattr(solver.parameters, name, value)
    status = solver.solve(model)
    # an invalid model is a defect here; it would read as "no answer in time"
    assert status != cp_model.MODEL_INVALID, model.validate()
    has_answer = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    return solver, has_answer, status in (cp_model.OPTIMAL, cp_model.INFEASIBLE)


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

    def bound_s(self, ticks: float, span: bool) -> float:
        """Return the seconds that no makespan, or no longest ``span``, is below if none of the model is below ``ticks``."""
        return max(0.0, (ticks - 1 if span and not self.exact else ticks) * self.step_s)


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
