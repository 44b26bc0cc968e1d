"""Orders that a search starts from: a feasible one at once, whatever the limit, and cyclic steady states found by CP-SAT.

**At once**: groups of microbatches, each ended before the next begins. Groups are as large as every rank's limit allows, so
1F1B's warm-up at best and one microbatch at a time at worst (the "trivial feasible schedule" of `optpipe.txt` section 4.1.3).
Far from good; it is there so that an answer exists in well under a second at any size, and something is left if everything
else is cut short. Graphs of stages start from schedules by rules. The same orders say what to answer where nothing fits: the
smallest limit that was found to work, with and without offload.

**Cycles**: offsets of the actions of a microbatch that repeat every ``period``, found by CP-SAT. On each rank the residues of
the starts modulo the period must not overlap, and at every F's start the rank holds at most its limit. What is held at a
residue follows from how often each action has wrapped around (its quotient) and one order bit per pair of actions, so memory
is linear in quotients and bits (equation 1 of `controllable-memory.txt` bounds the same by lifespans).

The search is on a coarse grid of cells; only the order is kept, finished by :mod:`~jaxpipe.search.list_schedule.fillers` and
judged by re-timing with real costs. Source: the building blocks of `controllable-memory.txt` section 2, with offsets free
instead of from a table. For placements of several chunks other than a V: with equal stages that has symmetries
(:mod:`~jaxpipe.search.blocks.mirrored`), with unequal ones families that do better (scripts/results/solver.md).

Not modelled by cycles: workspace, offload, links that are busy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import product
from math import ceil, inf
from typing import Any

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule.ir import Schedule, Slot
from jaxpipe.schedule.passes.backwards import with_slots
from jaxpipe.schedule.passes.separate import separate_gradients
from jaxpipe.schedule.problem import B, F, Problem, W
from jaxpipe.schedule.rules.traversal import FIRST, Traversal
from jaxpipe.schedule.rules.traverse import traverse
from jaxpipe.schedule.simulate import simulate
from jaxpipe.schedule.tolerance import MEMORY, at_most, how_many
from jaxpipe.search.blocks.block import BuildingBlock, repeat
from jaxpipe.search.budget import Budget
from jaxpipe.search.grids import memory_units
from jaxpipe.search.list_schedule.fillers import GapFiller
from jaxpipe.search.retime import Draft, peaks
from jaxpipe.search.solve.cp_sat import LITE, run
from jaxpipe.search.solve.task import SolveTask

_SEPARATED = 6  # of the schedules by rules; not tuned


def group_size(problem: Problem, limits: Sequence[float]) -> int:
    """Return the most microbatches that may be in flight at once if none is given back before all are there; 0 if not even
    one."""
    flows, stages = problem.placement.num_flows, problem.placement.num_stages
    fits = problem.num_microbatches
    for rank, limit in enumerate(limits):
        shares = [0.0] * flows
        for k in problem.replicas_of(rank):
            # B may leave more for W than F kept, so the larger of both must fit
            shares[k // stages] += max(problem.held[k], problem.kept[k])
        if max(shares) > 0 and limit < float("inf"):
            fits = max(0, min(fits, how_many(max(shares), limit)))
    return fits // flows * flows or min(fits, 1)


def grouped_rows(problem: Problem, size: int) -> list[list[int]]:
    """Return rows of codes: groups of ``size`` microbatches, all F's, then each B with its W."""
    m, stages, flows = problem.num_microbatches, problem.placement.num_stages, problem.placement.num_flows
    rows: list[list[int]] = [[] for _ in range(problem.num_ranks)]
    for first in range(0, m, size):
        group = range(first, min(m, first + size))
        for k, i in [(i % flows * stages + s, i) for s in range(stages) for i in group]:
            rows[problem.rank[k]].append(problem.code(F, k, i))
        for k, i in [(i % flows * stages + s, i) for s in reversed(range(stages)) for i in group]:
            rows[problem.rank[k]] += [problem.code(B, k, i), problem.code(W, k, i)]
    return rows


def away_schedule(problem: Problem) -> Schedule:
    """Return one microbatch at a time, every residual on the host while another stage of its rank runs: the least memory
    there is.

    Each F but the rank's last is followed by O and S (the next F waits for the room); L comes behind the rank's W before.
    """
    stages, flows = problem.placement.num_stages, problem.placement.num_flows
    last = {(rank, k // stages): k for k, rank in enumerate(problem.rank)}

    def away(slot: Slot) -> Iterator[Slot]:
        for a in slot.actions:
            leaves = a.microbatch % flows * stages + a.stage not in last.values()
            if leaves and a.op == "B":
                yield replace(a, op="L")
            yield a
            if leaves and a.op == "F":
                yield from (replace(a, op="O"), replace(a, op="S"))

    return with_slots(problem.schedule("first", grouped_rows(problem, 1)), away)


def graph_starts(task: SolveTask) -> Iterator[tuple[Schedule, str]]:
    """Yield schedules by rules, the surest to keep the limits first; then the shortest of them with backwards separated.

    Raises:
        ScheduleError: the costs are for another number of stages.
    """
    ranked: list[tuple[bool, float, int, Schedule, str]] = []
    rules = (
        Traversal(first, forward=forward, backward=backward, **room)
        for room in _rooms(task)
        for first, forward, backward in product(reversed(FIRST), ("depth", "breadth"), ("depth", "breadth"))
    )
    for rule in rules:
        with suppress(ScheduleError):  # the limits of one stage or another leave no room
            schedule = traverse(task.placement, task.num_microbatches, rule, task.costs)
            timeline = simulate(schedule, task.costs)
            ranked.append((not task.fits(timeline), task.seconds(timeline), len(ranked), schedule, f"rules {rule}"))
            yield schedule, f"rules {rule}"
    for *_, schedule, name in sorted(ranked)[:_SEPARATED]:
        with suppress(ScheduleError):
            yield separate_gradients(schedule, task.costs, memory_limit=task.memory_limit), f"{name}, separated"


def _rooms(task: SolveTask) -> Iterator[dict[str, Any]]:
    """Yield limits on microbatches in flight: one at a time; for each stage what lies behind it, as in 1F1B; for each
    stage, and for each rank, what the limits allow. A stage that holds nothing has no limit."""
    placement, m = task.placement, task.num_microbatches
    most = [max(1, int(min(m, limit * (1 + MEMORY)))) for limit in task.limits()]
    behind: dict[int, int] = {}
    for s in reversed(placement.topological_order()):
        behind[s] = (task.costs.residual_bytes[s] > 0) + max((behind[t] for t in placement.successors(s)), default=0)
    flows = placement.num_flows  # a limit of a stage holds in each
    room = [
        max(1, min(most[r] for flow in placement.flows for r in flow[s]) // flows) for s in range(placement.num_stages)
    ]
    chunks = [len(placement.stages_of(rank)) for rank in range(placement.num_ranks)]
    holds = [x > 0 for x in task.costs.residual_bytes]
    yield {"in_flight": tuple(chunks)}
    yield {"in_flight_per_stage": tuple(max(1, min(x, behind[s])) if holds[s] else m for s, x in enumerate(room))}
    yield {"in_flight_per_stage": tuple(x if holds[s] else m for s, x in enumerate(room))}
    yield {"in_flight": tuple(n * x for n, x in zip(chunks, most, strict=True))}


def smallest_limits(task: SolveTask) -> tuple[float, float]:
    """Return the peak activations, in units of a rank's share of a microbatch, of one microbatch at a time: without and
    with offload."""
    if not task.placement.is_plain_chain:
        stays = min(max(simulate(x, task.costs).peak_activations) for x, _ in graph_starts(task))
        return stays, stays
    problem = Problem.of(task.placement, min(task.num_microbatches, task.placement.num_flows), task.costs)
    one_at_a_time = problem.schedule("alone", grouped_rows(problem, 1))
    stays = max(simulate(one_at_a_time, task.costs).peak_activations)
    away = max(simulate(away_schedule(problem), task.costs).peak_activations)
    return stays, min(stays, away)


def explain(tasks: Sequence[SolveTask]) -> str:
    """Return the error line for users; ``tasks`` differ in placement only."""
    task = tasks[0]
    smallest = [smallest_limits(replace(t, memory_limit=float("inf"))) for t in tasks]
    stays, away = min(x for x, _ in smallest), min(x for _, x in smallest)
    limit = min(task.safe_limits())
    sizes = f"{task.placement.num_ranks} ranks and {task.num_microbatches} microbatches"
    offload = "with" if task.offload else "without"
    most = f"{stays:g} without offload and {away:g} with it" if task.placement.is_plain_chain else f"{stays:g}"
    return f"no schedule of {sizes} keeps a memory limit of {limit:g} {offload} offload; the smallest found to work is {most}"


_FINEST = 24
"""Cells that the mean action takes at most. Proofs that no cycle of one does better at half memory used 20 to 26
(scripts/results/solver.md)."""


@dataclass(frozen=True, slots=True)
class Grid:
    """A problem in whole cells: ``cells[op][k]`` of an action, ``down[k]`` and ``up[k]`` of transfers, ``trip[k]`` from
    the start of F to the end of B, memory in whole units.

    Only one flow: chains in both directions have no cycle here.
    """

    problem: Problem
    cells: tuple[tuple[int, ...], ...]
    down: tuple[int, ...]
    up: tuple[int, ...]
    trip: tuple[int, ...]
    held: tuple[int, ...]
    kept: tuple[int, ...]
    limit: tuple[int, ...]

    @classmethod
    def of(cls, problem: Problem, limits: Sequence[float]) -> Grid:
        """Return the problem on the coarsest grid that keeps its proportions, roughly."""
        seconds = [*problem.f_s, *problem.b_s, *problem.w_s]
        cell = _cell([x for x in seconds if x > 0])
        cells = [tuple(max(1, round(x / cell)) for x in s) for s in (problem.f_s, problem.b_s, problem.w_s)]
        down, up = (tuple(ceil(x / cell - 0.25) for x in s) for s in (problem.down_s, problem.up_s))
        trip = tuple(round(x / cell) for x in problem.round_trips)
        finite = [x for x in limits if x < inf]
        units = memory_units([*problem.held, *problem.kept], max(finite, default=0.0))
        held, residues = (tuple(map(units.size, sizes)) for sizes in (problem.held, problem.kept))
        most = problem.num_microbatches * (sum(held) + 1)
        limit = tuple(units.limit(x) if x < inf else most for x in limits)
        return cls(problem, tuple(cells), down, up, trip, held, residues, limit)

    def chain(self) -> Iterator[tuple[int, int, int, int, int]]:
        """Yield (op, replica, op, replica, cells): the second starts that much after the first, or later."""
        n = self.problem.num_replicas
        for k in range(n):
            if k + 1 < n:
                yield F, k, F, k + 1, self.cells[F][k] + self.down[k]
                yield B, k + 1, B, k, self.cells[B][k + 1] + self.up[k + 1]
            else:
                yield F, k, B, k, self.cells[F][k]
            yield B, k, W, k, self.cells[B][k]

    def work(self) -> int:
        """Return the cells that the busiest rank works for one microbatch."""
        problem = self.problem
        return max(sum(row[k] for row in self.cells for k in problem.replicas_of(r)) for r in range(problem.num_ranks))

    def least_period(self) -> int:
        """Return the cells that a microbatch takes at least: work, and memory × time on each rank."""
        area = [0] * self.problem.num_ranks
        for k, rank in enumerate(self.problem.rank):
            area[rank] += self.held[k] * self.trip[k] + min(self.kept[k], self.held[k]) * self.cells[W][k]
        return max([self.work(), *(-(-a // x) for a, x in zip(area, self.limit, strict=True) if x > 0)])


def _cell(seconds: Sequence[float]) -> float:
    """Return the coarsest cell that all actions are multiples of, nearly; or one so small that the mean action has
    ``_FINEST``."""
    mean = sum(seconds) / len(seconds)
    shares = [Fraction(x / mean).limit_denominator(48) for x in seconds]
    finest = Fraction(1, _FINEST)
    for parts in range(1, _FINEST + 1):
        if all(abs(s * parts - round(s * parts)) <= Fraction(1, 50) for s in shares):
            return mean / parts
    return float(mean * finest)


_LONGEST_LIFE = 7  # periods beyond a round trip: bounds a variable, not tuned


def find_cycle(grid: Grid, period: int, budget: dict[str, Any]) -> tuple[BuildingBlock | None, bool]:
    """Return a cycle of one microbatch in ``period`` cells within ``budget`` (CP-SAT parameters), and whether there is none
    for sure (on this grid, with lives this long)."""
    model = _Model(grid, period)
    for rank in range(grid.problem.num_ranks):
        model.lane(rank)
        for k in grid.problem.replicas_of(rank):
            # levels rise when F's start (w-residuals that are larger are left to the gap filler)
            model.hold(rank, (F, k))
    solver, has_answer, done = run(model.cp, LITE, budget)
    if not has_answer:
        return None, done
    f, b, w = (tuple(solver.value(model.start[op, k]) for k in range(grid.problem.num_replicas)) for op in (F, B, W))
    return BuildingBlock(grid.problem.placement, period, (f,), (b,), (w,)), False


class _Model:
    """CP-SAT's variables for a cycle, and what waits for what."""

    def __init__(self, grid: Grid, period: int) -> None:
        from ortools.sat.python import cp_model

        self.grid, self.period = grid, period
        self.cp: Any = cp_model.CpModel()
        self.longest = grid.trip[0] + sum(grid.down) + _LONGEST_LIFE * period
        keys = [(op, k) for op in (F, B, W) for k in range(grid.problem.num_replicas)]
        self.start = {key: self.cp.new_int_var(0, self.longest, "") for key in keys}
        self.split: dict[tuple[int, int], tuple[Any, Any]] = {}  # into periods and cells
        self.ended: dict[tuple[int, int], tuple[Any, Any]] = {}  # ends likewise
        # a cycle may begin anywhere: one of its rotations is enough
        self.cp.add(self.start[F, 0] == 0)
        for op, k, then, later, cells in grid.chain():
            self.cp.add(self.start[then, later] >= self.start[op, k] + cells)

    def _split_time(self, time: Any) -> tuple[Any, Any]:
        """Return the whole periods before a time, and what is left."""
        quotient = self.cp.new_int_var(0, self.longest // self.period + 2, "")
        residue = self.cp.new_int_var(0, self.period - 1, "")
        self.cp.add(time == quotient * self.period + residue)
        return quotient, residue

    def lane(self, rank: int) -> None:
        """Let a rank run one action at a time."""
        intervals = []
        for key in self.start:
            if self.grid.problem.rank[key[1]] == rank:
                self.split[key] = self._split_time(self.start[key])
                # twice, a period apart: what runs past the period's end overlaps the next one's beginning
                for again in (0, self.period):
                    size = self.grid.cells[key[0]][key[1]]
                    intervals.append(self.cp.new_fixed_size_interval_var(self.split[key][1] + again, size, ""))
        self.cp.add_no_overlap(intervals)

    def hold(self, rank: int, at: tuple[int, int]) -> None:
        """Hold the limit when the F called ``at`` starts: what has been taken less what has been given back is within the
        limit.

        An action with quotient q and a residue not later has happened one time more than one with a later residue; the bit is 1
        for F's unless their residue is later, and may be 1 for B's and W's only if their end's residue is not later.
        """
        cp, grid, offset = self.cp, self.grid, self.split[at][1]
        held: Any = 0
        for key in self.start:
            op, k = key
            units = grid.held[k] if op == F else grid.held[k] - grid.kept[k] if op == B else grid.kept[k]
            if grid.problem.rank[k] != rank or not units:
                continue
            bit = cp.new_bool_var("")
            if op == F:
                quotient, residue = self.split[key]
                cp.add(residue >= offset + 1).only_enforce_if(~bit)
                held += units * (bit - quotient)
            else:
                if key not in self.ended:
                    self.ended[key] = self._split_time(self.start[key] + grid.cells[op][k])
                quotient, residue = self.ended[key]
                cp.add(residue <= offset).only_enforce_if(bit)
                held += units * (quotient - bit)
        cp.add(held <= grid.limit[rank])


_STRETCHES = (1.0, 1.02, 1.035, 1.05, 1.0667, 1.0834, 1.12, 1.1667, 1.25, 1.3334, 1.5, 1.6667, 2.0)
"""Periods that are tried, × the work: whole twelfths, which equal costs have (a cycle of one needs 8.3% over the work at half
memory, scripts/results/solver.md), and finer steps below; not tuned further."""
_TRY_S = (1.5, 6.0)  # seconds for one period, at the first try and the second; not tuned


def cycles(problem: Problem, limits: Sequence[float], budget: Budget, seed: int) -> Iterator[tuple[Draft, str]]:
    """Yield orders from cycles of one microbatch: short periods first, until one keeps to the limit; then back to short
    ones with more time. Limits are uniform over ranks; a chain in one direction only."""
    grid, gap_filler, limit = Grid.of(problem, limits), GapFiller(problem), min(limits)
    decided: set[int] = set()
    stretches: Sequence[float] = _STRETCHES if problem.num_microbatches > 1 else ()
    for seconds in _TRY_S:
        for number, stretch in enumerate(stretches):
            period = max(grid.least_period(), round(grid.work() * stretch))
            if period in decided:
                continue
            if budget.left <= 0:
                return
            cycle, none = find_cycle(grid, period, budget.parameters(seconds, seed))
            # more time changes nothing where there is a cycle, or surely none
            if cycle is not None or none:
                decided.add(period)
            if cycle is None:
                continue
            rows = repeat(cycle, problem)
            within_limit = False
            for draft in gap_filler.improve_until_stable(rows, limit):
                within_limit = True
                yield draft, "cycle of 1"
            if within_limit and seconds == _TRY_S[0] and at_most(max(peaks(problem, rows)), limit):
                stretches = stretches[number::-1]  # then, from there, what is undecided
                break
