"""Runs the exact model: phases of one objective after the other, hints.

A hint that the model can express is an answer from the start. Every answer of CP-SAT is turned into rows and simulated; the
best of those that keep the limits is kept. On a host with a lane per direction an answer may have no rows (see ``strict`` in
:mod:`.model_memory`); then the strict model is solved for a schedule, and the bound stays that of the first.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from jaxpipe.schedule.ir import Schedule
from jaxpipe.schedule.solve.cp_sat import WHOLE_RESERVOIRS, configure
from jaxpipe.schedule.solve.formulation import Formulation
from jaxpipe.schedule.solve.hints import starts_of
from jaxpipe.schedule.solve.instance import Instance
from jaxpipe.schedule.solve.model_memory import add_memory, has_reservoirs
from jaxpipe.schedule.solve.rows import Starts, schedule_of
from jaxpipe.schedule.timeline import Timeline
from jaxpipe.schedule.tolerance import TIME, at_most

ExactStatus = Literal["optimal", "feasible", "infeasible", "unknown"]


@dataclass(frozen=True, slots=True)
class ExactResult:
    """What the model says of a task.

    ``value``: seconds of the simulated schedule; ``model_value``: what the model claims of it (equal if optimal and
    ``exact_ticks``; more if it left gaps, less by rounding). ``lower_bound``: seconds, for every schedule if
    ``every_order``, else for those with microbatches in order (with offload, others may be shorter). ``status``:
    ``optimal``: the value is the bound; ``infeasible``: no schedule keeps the limits; ``unknown``: none was found.
    ``size``: variables and constraints. ``first_feasible_s``, ``wall_s``: since the call.
    """

    schedule: Schedule | None
    timeline: Timeline | None
    value: float
    model_value: float
    lower_bound: float
    status: ExactStatus
    wall_s: float
    first_feasible_s: float
    exact_ticks: bool
    every_order: bool
    size: tuple[int, int]


@dataclass(frozen=True, slots=True)
class _Phase:
    """One call of the solver. ``aim``: what is minimised. ``cost``: ticks allowed to the time; ``peak``: units to the peak."""

    aim: Literal["time", "peak", "bytes"] = "time"
    strict: bool = False
    lower: int = 0
    cost: int | None = None
    peak: int | None = None
    hint: Starts | None = None


@dataclass(frozen=True, slots=True)
class _Answer:
    status: str
    starts: Starts | None
    cost: int
    bound: int
    objective: int
    size: tuple[int, int]


class Search:
    """Phases of one :func:`solve_exact` and the best schedule among their answers."""

    def __init__(
        self,
        instance: Instance,
        time_limit_s: float,
        seed: int,
        workers: int,
        deterministic: bool,
        every_order: bool,
        began: float,
    ) -> None:
        self.began, self.instance = began, instance
        self.left_s, self.seed, self.workers, self.deterministic = time_limit_s, seed, workers, deterministic
        self.ordered = not every_order
        self.best: tuple[Schedule, Timeline, float] | None = None
        self.model_value = self.value = float("inf")
        self.first_s = float("inf")

    def run(self, hint: Schedule | None, lower_bound: float) -> ExactResult:
        ticks = self.instance.ticks
        starts = None if hint is None else starts_of(self.instance, hint)
        lower = ticks.at_least(lower_bound) if lower_bound < float("inf") else 0
        cost = None if starts is None else self._cost(starts)
        lower = lower if cost is None else min(lower, cost)
        phase = _Phase("time", False, lower, cost, None, starts)
        answer = None
        if starts is not None and cost is not None:
            self._take(starts, cost, phase)
            answer = _Answer("OPTIMAL", starts, cost, lower, cost, (0, 0)) if cost <= lower else None
        answer = answer or self._solve(phase)
        bound = self._bound_s(answer.bound)
        if answer.starts is not None and self.best is None:
            self._solve(replace(phase, strict=True, lower=max(lower, answer.bound), cost=cost, hint=starts))
        if self.instance.task.objective == "lexicographic" and self.best is not None:
            self._refine(answer if answer.starts is not None else replace(answer, starts=starts, cost=cost or 0))
        return self._result(answer, max(bound, lower_bound))

    def _refine(self, answer: _Answer) -> None:
        """Less peak memory in the same time, then fewer bytes offloaded with the same peak."""
        starts, cost = answer.starts, answer.cost
        peak = None
        for aim in ("peak", "bytes") if starts is not None else ():
            assert aim in ("peak", "bytes")
            found = self._solve(_Phase(aim, False, min(answer.bound, cost), cost, peak, starts))
            if found.starts is None:
                return
            starts = found.starts
            peak = found.objective if aim == "peak" else peak

    def _result(self, answer: _Answer, bound: float) -> ExactResult:
        wall = time.perf_counter() - self.began
        schedule, timeline, value = self.best or (None, None, float("inf"))
        status: ExactStatus = "unknown"
        if answer.status == "INFEASIBLE":
            status, bound = "infeasible", float("inf")
        elif schedule is not None:
            bound = min(bound, value)
            status = "optimal" if at_most(value, bound) else "feasible"
        exact, size = self.instance.ticks.exact, answer.size
        every = not (self.ordered and any(self.instance.may_leave))
        return ExactResult(
            schedule, timeline, value, self.model_value, bound, status, wall, self.first_s, exact, every, size
        )

    def _bound_s(self, ticks: int) -> float:
        spans = self.instance.task.objective == "span"
        grid = self.instance.ticks
        return grid.span_bound_s(ticks) if spans else grid.makespan_bound_s(ticks)

    def _cost(self, starts: Starts) -> int:
        """Ticks of the objective of given times."""
        instance, rank = self.instance, self.instance.problem.rank
        ends = [(rank[key[1]], starts.end(instance, key)) for key in starts.start if key[0] in "FBW"]
        if instance.task.objective != "span":
            return max(end for _, end in ends)
        begins = instance.first_starts()
        if begins is None:
            every = range(instance.problem.num_ranks)
            begins = [min(at for key, at in starts.start.items() if key[0] == "F" and rank[key[1]] == r) for r in every]
        return max(end - begins[r] for r, end in ends)

    # One call of CP-SAT.

    def _solve(self, phase: _Phase) -> _Answer:
        from ortools.sat.python import cp_model

        model = Formulation(self.instance, self.ordered, phase.lower, phase.cost)
        target = self._aim(model, phase)
        model.seal()
        model.cp.minimize(target)
        if phase.hint is not None:
            self._hint(model, phase.hint)
        solver = self._solver(cp_model.CpSolver(), phase.aim == "time" and has_reservoirs(self.instance))
        status = solver.solve(model.cp, self._watcher(cp_model))
        spent = solver.deterministic_time if self.deterministic else solver.wall_time
        self.left_s = max(0.0, self.left_s - float(spent))
        size = (len(model.cp.proto.variables), len(model.cp.proto.constraints))
        name = str(solver.status_name(status))
        if name not in ("OPTIMAL", "FEASIBLE"):
            return _Answer(name, None, 0, phase.lower, 0, size)
        bound = round(solver.best_objective_bound) if phase.aim == "time" else phase.lower
        starts = _read(model, solver.value)
        self._take(starts, int(solver.value(model.cost)), phase)
        return _Answer(
            name, starts, int(solver.value(model.cost)), max(bound, phase.lower), round(solver.objective_value), size
        )

    def _aim(self, model: Formulation, phase: _Phase) -> Any:
        """Adds memory; returns what to minimise."""
        if phase.aim == "time":
            add_memory(model, strict=phase.strict)
            return model.cost
        most = max((x.capacity for x in self.instance.memory_limits if x.activations), default=0)
        peak = model.cp.new_int_var(0, most if phase.peak is None else phase.peak, "peak")
        add_memory(model, strict=phase.strict, peak=peak)
        if phase.aim == "peak":
            return peak
        sizes = {k: x.holdings[k].leaves for x in self.instance.memory_limits for k in x.holdings if x.activations}
        return sum(sizes[k] * here for (k, _), here in model.away.items())

    def _solver(self, solver: Any, reservoirs: bool) -> Any:
        parameters = solver.parameters
        parameters.random_seed = self.seed
        parameters.num_workers = self.workers
        if reservoirs:
            configure(solver, WHOLE_RESERVOIRS)
        if self.deterministic:
            parameters.max_deterministic_time = max(self.left_s, 0.01)
            parameters.interleave_search = self.workers > 1
        else:
            parameters.max_time_in_seconds = max(self.left_s, 0.01)
        return solver

    def _hint(self, model: Formulation, starts: Starts) -> None:
        for key, variable in model.starts.items():
            model.cp.add_hint(variable, starts.start[key])
        for literals, chosen in ((model.away, starts.away), (model.fused, starts.fused)):
            for pair, literal in literals.items():
                model.cp.add_hint(literal, int(pair in chosen))
        model.cp.add_hint(model.cost, self._cost(starts))

    def _watcher(self, cp_model: Any) -> Any:
        """Notes when the first answer is there."""
        search = self

        class Watcher(cp_model.CpSolverSolutionCallback):  # type: ignore[misc]
            def on_solution_callback(self) -> None:
                search.first_s = min(search.first_s, time.perf_counter() - search.began)

        return Watcher()

    def _take(self, starts: Starts, cost: int, phase: _Phase) -> None:
        """Keep the schedule of an answer if it keeps the limits and is better (or refines)."""
        schedule, timeline = schedule_of(self.instance, starts, "cp-sat")
        value = self.instance.task.seconds(timeline)
        if not self.instance.task.fits(timeline):
            return
        allowed = self.value * (1 + TIME if self.instance.ticks.exact else 1 + 1e-4)
        if self.best is not None and (value > allowed if phase.aim != "time" else value >= self.value):
            return
        self.first_s = min(self.first_s, time.perf_counter() - self.began)
        self.best, self.value = (schedule, timeline, value), value
        self.model_value = self.instance.ticks.seconds(cost)


def _read(model: Formulation, value: Callable[[Any], int]) -> Starts:
    return Starts(
        {key: int(value(variable)) for key, variable in model.starts.items()},
        frozenset(pair for pair, literal in model.away.items() if value(literal)),
        frozenset(pair for pair, literal in model.fused.items() if value(literal)),
    )
