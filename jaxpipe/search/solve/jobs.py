"""Jobs that the solver sends to its worker processes, and the answers they send back.

A job is a frozen record, a class per kind; it travels as JSON by the types of its fields and does itself: ``run(task, tell)``.
Schedules need no trust: whoever receives one checks and simulates it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, ClassVar, Protocol

from jaxpipe.errors import JaxpipeError
from jaxpipe.schedule.families import FAMILIES
from jaxpipe.schedule.families.family import cheap_first
from jaxpipe.schedule.ir import Schedule
from jaxpipe.schedule.json_form import from_json, to_json
from jaxpipe.schedule.passes.braid import unbraid
from jaxpipe.schedule.problem import OPS, Problem
from jaxpipe.schedule.timeline import at_most, nine_digits
from jaxpipe.search.best import Candidate, Task, best_of_family, quick_candidates
from jaxpipe.search.bounds.orders import FewRankBounds
from jaxpipe.search.budget import Budget
from jaxpipe.search.solve.task import SolveTask, count_offloads

_OPS = frozenset((*OPS, "O", "L", "S"))  # that the search knows
_ACTIONS_PER_S = 60_000  # that list scheduling with offload places, roughly
_FEWEST_POLICIES = 12
FIRST = ("gis", "gis-h", "zb-h1", "po-f", "po-h", "ada-offload")
"""Families that are tried before all else where activations may leave, the quick ones first: the best of those that the offload
pass helps, and those made for it. Other families follow, with all their settings."""
_FIRST_PAIRS = 1024  # of stage and microbatch, up to which each takes about a second


class Tell(Protocol):
    """Sends an order, where it comes from, and a proven bound (seconds; 0 for none)."""

    def __call__(self, schedule: Schedule | None, source: str, bound: float = 0.0) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """``task``: number of the task it is about. ``seconds``: its budget, deterministic ones with ``reproducible``.
    ``bound``: seconds of the objective that no schedule is below."""

    timed: ClassVar[bool] = True
    """Whether it takes its budget, rather than what it takes."""
    task: int
    seconds: float
    seed: int = 0
    reproducible: bool = False
    bound: float = 0.0

    def run(self, task: SolveTask, tell: Tell) -> None:
        raise NotImplementedError

    def budget(self) -> Budget:
        return Budget(self.seconds, self.reproducible)


@dataclass(frozen=True, slots=True, kw_only=True)
class Families(Job):
    """Families by name, with all their settings or ``once``, with their defaults. Only what may take less than ``value``
    seconds goes through the offload pass."""

    timed = False
    names: tuple[str, ...]
    once: bool = False
    value: float = inf

    def run(self, task: SolveTask, tell: Tell) -> None:
        family_schedules(task, self.names, tell, once=self.once, beat=self.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBounds(Job):
    """Bounds from a few ranks at once. ``value``: seconds of the best schedule that is known."""

    value: float

    def run(self, task: SolveTask, tell: Tell) -> None:
        for bound in few_ranks(task).bounds(self.bound, self.value, self.budget()):
            tell(None, "orders of a few ranks", bound)


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadLists(Job):
    """List schedules with offload."""

    timed = False

    def run(self, task: SolveTask, tell: Tell) -> None:
        from jaxpipe.search.solve.offload_list import offload_candidates

        budget = self.budget()
        lot_s = 3 * task.placement.num_stages * task.num_microbatches / _ACTIONS_PER_S
        # a dozen policies, fixed ones first, are played whatever the budget is
        budget.spent -= lot_s * _FEWEST_POLICIES

        def late() -> bool:
            budget.spent += lot_s
            return budget.left <= 0

        for schedule in offload_candidates(task, self.bound, late, seed=self.seed):
            tell(schedule, "list with offload")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cycles(Job):
    """Mirrored steady states of a V, every ``parts``-th kind from ``part`` on."""

    part: int = 0
    parts: int = 1

    def run(self, task: SolveTask, tell: Tell) -> None:
        from jaxpipe.search.blocks.mirrored import mirrored_cycles  # NumPy is for those who solve

        problem, limits = Problem.of(task.placement, task.num_microbatches, task.costs), task.safe_limits()
        best: tuple[float, ...] = (float("inf"),)
        for draft, source in mirrored_cycles(problem, limits, self.part, self.parts, self.budget(), self.seed):
            key = *task.order(draft.makespan, draft.span), nine_digits(draft.peak)
            if key < best:
                best = key
                tell(problem.schedule("solved", draft.rows), source)
            if at_most(best[0], self.bound):
                return


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbourhoods(Job):
    """Large-neighbourhood search from ``start``; with offload only if that has some."""

    start: Schedule

    def run(self, task: SolveTask, tell: Tell) -> None:
        from jaxpipe.search.solve.neighbourhoods import NeighbourhoodSearch

        offload = count_offloads(self.start) > 0
        search = NeighbourhoodSearch(replace(task, offload=offload), self.start, self.seed)
        for schedule in search.run(self.budget(), self.bound):
            tell(schedule, "neighbourhood with offload" if offload else "neighbourhood")


@dataclass(frozen=True, slots=True, kw_only=True)
class Exact(Job):
    """The exact model with ``workers`` threads: microbatches in order first; where that may cost something (with offload), then
    in any order, which proves more. Of a graph of stages with the actions of ``start``."""

    start: Schedule | None
    workers: int

    def run(self, task: SolveTask, tell: Tell) -> None:
        from jaxpipe.search.solve.neighbourhoods import solve_exact

        start = self.start
        for every_order in (False, True):
            result = solve_exact(
                task,
                time_limit_s=self.seconds / 2 if task.offload else self.seconds,
                seed=self.seed,
                workers=self.workers,
                hint=start,
                lower_bound=self.bound,
                deterministic=self.reproducible,
                every_order=every_order,
            )
            tell(result.schedule, "exact model", result.lower_bound if result.every_order else 0.0)
            if result.every_order or at_most(result.value, self.bound):
                return
            start = result.schedule or start


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """To job number ``job``, about task number ``task``: a schedule, a bound (seconds; 0: none) or both, and what found them.

    ``done``: the job is; nothing else comes. ``error``: what went wrong in it. ``gone``: how its process ended, if it did.
    """

    job: int
    task: int = 0
    source: str = ""
    schedule: Schedule | None = None
    bound: float = 0.0
    done: bool = False
    error: str = ""
    gone: str = ""


def to_line(message: Mapping[str, Any]) -> bytes:
    """Encode one message for a pipe."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def tasks_line(tasks: Sequence[SolveTask], imports: Sequence[str]) -> bytes:
    """Return the first line to a worker: its tasks, and the modules to import for what they register."""
    return to_line({"tasks": [to_json(task) for task in tasks], "imports": list(imports)})


def job_line(number: int, job: Job) -> bytes:
    """Return a job by its number, as :func:`job_in` reads it."""
    return to_line({"number": number, "kind": [type(job).__module__, type(job).__name__], "job": to_json(job)})


def job_in(message: Mapping[str, Any]) -> tuple[int, Job]:
    """Return the job of a line, and its number."""
    module, name = message["kind"]
    return message["number"], from_json(getattr(importlib.import_module(module), name), message["job"], "job")


def few_ranks(task: SolveTask) -> FewRankBounds:
    """Return a task as the bounds from a few ranks take it."""
    span, limits = task.objective == "span", task.limits()
    return FewRankBounds(task.placement, task.num_microbatches, task.costs, limits, offload=task.offload, span=span)


def family_schedules(
    task: SolveTask,
    names: Sequence[str],
    tell: Callable[[Schedule, str], object],
    *,
    once: bool = False,
    beat: float = inf,
) -> None:
    """Try every family of the task's placement among ``names``, and report each schedule that beats those before it: with
    all settings, or ``once`` each. Only what may take less than ``beat`` seconds goes through the offload pass."""
    # families look at activations alone, so workspace comes off the limit before they see it
    limits = task.safe_limits()
    family_task = Task(
        task.placement.num_ranks,
        task.num_microbatches,
        task.costs,
        min(limits),
        offload=task.offload,
        objective="span" if task.objective == "span" else "makespan",
    )

    def keep(candidate: Candidate) -> None:
        ops = {a.op for rank in range(candidate.schedule.num_ranks) for a in candidate.schedule.actions(rank)}
        if candidate.schedule.placement == task.placement and ops <= _OPS:
            tell(unbraid(candidate.schedule), f"family {candidate.setting}")

    if once:
        quick_candidates([FAMILIES[name] for name in names], family_task, task.placement, keep, beat)
        return
    for name in names:
        with contextlib.suppress(JaxpipeError):
            best_of_family(FAMILIES[name], family_task, keep, beat)


def families_of(task: SolveTask) -> list[str]:
    """Return the families that make schedules of the task's placement, the cheap ones first."""
    p, v = task.placement.num_ranks, max(1, task.placement.num_chunks)
    return [f.name for f in cheap_first(f for f in FAMILIES.values() if _same_placement(f.placement, p, v, task))]


def quick_families(task: SolveTask) -> list[str]:
    """Return those of them that make a schedule at once, whatever the memory limit."""
    return [name for name in families_of(task) if "memory_limit" not in FAMILIES[name].options]


def first_families(task: SolveTask) -> list[str]:
    """Return those of :data:`FIRST` on the task's placement, if its size lets them end soon."""
    pairs = sum(map(len, task.placement.flows)) * task.num_microbatches // task.placement.num_flows
    return sorted(set(FIRST).intersection(families_of(task)), key=FIRST.index) if pairs <= _FIRST_PAIRS else []


def _same_placement(make: Callable[..., Any], ranks: int, chunks: int, task: SolveTask) -> bool:
    try:
        return bool(make(ranks, chunks) == task.placement)
    except JaxpipeError:
        return False
