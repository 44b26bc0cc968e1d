"""The steady state as a cyclic schedule: offsets of a few microbatches that repeat every ``period``, found by CP-SAT.

A *cycle* of g microbatches is a start for each of their actions; microbatch i runs at the start of ``i % g`` plus ``i // g``
periods. On each rank the residues modulo the period must not overlap, and at every F's start the rank holds at most its limit.
What is held at a residue follows from how often each action has wrapped around (its quotient) and one order bit per pair of
actions, so memory is linear in quotients and bits (equation 1 of `controllable-memory.txt` bounds the same by lifespans).

The search is on a coarse grid of cells; only the order is kept, finished by :mod:`~jaxpipe.schedule.list_schedule.fillers` and
judged by re-timing with real costs. g > 1 finds steady states that no block of one microbatch has: at half of V-Half's limits
two microbatches save up to a quarter. Source: the building blocks of `controllable-memory.txt` section 2, with offsets free
instead of from a table.

A cycle over p ranks has 6 g p actions to place on a V, too many for CP-SAT where actions have no common step. The symmetries of
a :class:`Shape` leave a model whose size does not depend on p:

* *Repeating.* Ranks r and r + q do the same, half of n periods later on the way down and earlier on the way back (half, so
  that mirrored they fit too). So the offsets of q ranks are enough, and a forward takes n periods over q ranks and back.
* *Mirrored.* Read backwards in time, backwards are forwards: chunk 1's B's go down the ranks as its F's come up. The B of
  chunk 1 is the F of chunk 1 mirrored at one instant, and that of chunk 0 the F of chunk 0. Both get the longer one's steps.

W's take what is left, each not long after its B. Least is sought of activations × time on the first and the last rank.

Activations of chunk 0 live 2 n / q periods a rank, so rank 0 holds 2 g n p / q chunks and a few more for the turns. A forward
and its way back need 2 max(F, B) a rank, so n g T ≥ 2 q max(F, B) with T a microbatch. One microbatch (g = 1) can't have 3
ranks in a period below 6 F (README); two can have 5 in 2 periods, which is 0.8 p chunks, with no idle time at all at costs as
in Table 5 of `controllable-memory.txt`, where a cycle of one idles 8%.

Not modelled: workspace, offload, links that are busy; with a shape, placements other than a V with equal costs on all stages,
and how many activations meet at an instant (what follows, an order under the limit, sees to that).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from math import ceil, gcd, inf
from typing import Any

from jaxpipe.schedule.budget import Budget
from jaxpipe.schedule.grids import memory_units
from jaxpipe.schedule.list_schedule.fillers import Finisher
from jaxpipe.schedule.placement import v_shape
from jaxpipe.schedule.problem import B, F, Problem, W
from jaxpipe.schedule.retime import Draft, peaks
from jaxpipe.schedule.solve.cp_sat import LITE, run
from jaxpipe.schedule.tolerance import at_most

_FINEST = 24
"""Cells that the mean action takes at most. README's proofs that no cycle of one does better at half memory used 20 to 26."""


@dataclass(frozen=True, slots=True)
class Cycle:
    """``start[(op, replica, j)]``: cell at which the action of the cycle's microbatch j starts. ``period``: cells."""

    period: int
    microbatches: int
    start: dict[tuple[int, int, int], int]

    def rows(self, problem: Problem) -> list[list[int]]:
        """Rows of codes of all of ``problem``'s microbatches, each rank in order of start."""
        actions: list[list[tuple[int, int, int]]] = [[] for _ in range(problem.num_ranks)]
        for (op, k, j), cell in self.start.items():
            row = actions[problem.rank[k]]
            for i in range(j, problem.num_microbatches, self.microbatches):
                row.append((cell + i // self.microbatches * self.period, op, problem.code(op, k, i)))
        return [[code for _, _, code in sorted(row)] for row in actions]


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
        """The problem on the coarsest grid that keeps its proportions, roughly."""
        seconds = [*problem.f_s, *problem.b_s, *problem.w_s]
        cell = _cell([x for x in seconds if x > 0])
        cells = [tuple(max(1, round(x / cell)) for x in s) for s in (problem.f_s, problem.b_s, problem.w_s)]
        down, up = (tuple(ceil(x / cell - 0.25) for x in s) for s in (problem.down_s, problem.up_s))
        trip = tuple(round(x / cell) for x in problem.round_trips)
        finite = [x for x in limits if x < inf]
        units = memory_units([*problem.held, *problem.kept], max(finite, default=0.0))
        held, kept = (tuple(map(units.size, sizes)) for sizes in (problem.held, problem.kept))
        most = problem.num_microbatches * (sum(held) + 1)
        limit = tuple(units.limit(x) if x < inf else most for x in limits)
        return cls(problem, tuple(cells), down, up, trip, held, kept, limit)

    def chain(self) -> Iterator[tuple[int, int, int, int, int]]:
        """(op, replica, op, replica, cells): the second starts that much after the first, or later."""
        n = self.problem.num_replicas
        for k in range(n):
            if k + 1 < n:
                yield F, k, F, k + 1, self.cells[F][k] + self.down[k]
                yield B, k + 1, B, k, self.cells[B][k + 1] + self.up[k + 1]
            else:
                yield F, k, B, k, self.cells[F][k]
            yield B, k, W, k, self.cells[B][k]

    def work(self) -> int:
        """Cells that the busiest rank works for one microbatch."""
        problem = self.problem
        return max(sum(row[k] for row in self.cells for k in problem.replicas_of(r)) for r in range(problem.num_ranks))

    def least_period(self, g: int) -> int:
        """Cells that g microbatches take at least: work, and memory × time on each rank."""
        area = [0] * self.problem.num_ranks
        for k, rank in enumerate(self.problem.rank):
            area[rank] += self.held[k] * self.trip[k] + min(self.kept[k], self.held[k]) * self.cells[W][k]
        return max([g * self.work(), *(-(-g * a // x) for a, x in zip(area, self.limit, strict=True) if x > 0)])


def _cell(seconds: Sequence[float]) -> float:
    """The coarsest cell that all actions are multiples of, nearly; or one so small that the mean action has ``_FINEST``."""
    mean = sum(seconds) / len(seconds)
    shares = [Fraction(x / mean).limit_denominator(48) for x in seconds]
    finest = Fraction(1, _FINEST)
    for parts in range(1, _FINEST + 1):
        if all(abs(s * parts - round(s * parts)) <= Fraction(1, 50) for s in shares):
            return mean / parts
    return float(mean * finest)


_MOST_RANKS, _MOST_MICROBATCHES = 9, 3
"""Ranks that repeat, microbatches in a period. The best known at p/2 has 5 ranks and 2 microbatches (README)."""
_TURNS = 1.0
"""Chunks that the turns add at least: a lower estimate, for they took 3 to 5 (README)."""
_LONGEST_LIFE = 7  # periods beyond a round trip: bounds a variable, not tuned
_LONGEST_WAIT = 8  # W's that a W waits for at most: bounds a variable, not tuned


@dataclass(frozen=True, slots=True)
class Shape:
    """``g`` microbatches in a period; ``q`` ranks repeat, and a forward takes ``n`` periods over them, there and back. Without
    ``q`` and ``n``: no symmetries."""

    g: int
    q: int = 0
    n: int = 0

    def chunks(self, p: int) -> float:
        """Chunks that rank 0 of ``p`` holds, without the turns."""
        return 2 * self.g * self.n * p / self.q


def shapes(grid: Grid, stretch: float) -> Iterator[Shape]:
    """What may fit into the memory with a period of ``stretch`` × the work: few microbatches first, then much room to move.
    Of an uneven V nothing, as its families do better (README)."""
    p, step, chunk = grid.problem.num_ranks, max(grid.cells[F][0], grid.cells[B][0]) + grid.down[0], max(grid.held)
    if not applies(grid):
        if grid.problem.placement != v_shape(p):
            yield Shape(1)
        return
    room = min(grid.limit) / chunk - _TURNS
    found = []
    for g in range(1, _MOST_MICROBATCHES + 1):
        for q in range(2, min(_MOST_RANKS, p) + 1):
            for n in range(1, q):
                shape = Shape(g, q, n)
                slack = n * grid.work() * g * stretch - 2 * q * step
                if gcd(q, n) == 1 and slack >= 0 and shape.chunks(p) <= room:
                    found.append((g * q, -slack / q, shape))
    yield from (shape for _, _, shape in sorted(found, key=lambda x: x[:2]))


def applies(grid: Grid) -> bool:
    """Whether the problem is a V with equal stages, which has the symmetries."""
    p, down, up = grid.problem.num_ranks, grid.down, grid.up
    crossings = (*down[: p - 1], *down[p:-1], *up[1:p], *up[p + 1 :])
    equal = (*grid.cells, grid.held, grid.kept, grid.limit, crossings)
    return p > 2 and grid.problem.placement == v_shape(p) and all(len(set(row)) == 1 for row in equal)


def find_cycle(grid: Grid, period: int, shape: Shape, budget: dict[str, Any]) -> tuple[Cycle | None, bool]:
    """A cycle in ``period`` cells within ``budget`` (CP-SAT parameters), and whether there is none for sure (on this grid, with
    lives this long). With symmetries the period must be even where ``shape.n`` is odd, and little is held rather than no more
    than the limit."""
    model = _Model(grid, period, shape)
    for rank in range(shape.q or grid.problem.num_ranks):
        model.lane(rank)
        for k in () if shape.q else grid.problem.replicas_of(rank):
            for j in range(shape.g):
                model.hold(rank, (F, k, j))
    if shape.q:
        model.least_area()
    solver, found, done = run(model.cp, LITE, budget)
    if not found:
        return None, done
    return Cycle(period, shape.g, {key: solver.value(t) for key, t in model.start.items()}), False


class _Model:
    """CP-SAT's variables for a cycle, and what waits for what."""

    def __init__(self, grid: Grid, period: int, shape: Shape) -> None:
        from ortools.sat.python import cp_model

        self.grid, self.period, self.g = grid, period, shape.g
        p, replicas, flying = grid.problem.num_ranks, range(grid.problem.num_replicas), range(shape.g)
        self.cp: Any = cp_model.CpModel()
        self.longest = grid.trip[0] + sum(grid.down) + _LONGEST_LIFE * period
        self.keys = [(op, k, j) for op in (F, B, W) for k in replicas for j in flying]
        self.start = (
            self._mirrored(shape) if shape.q else {x: self.cp.new_int_var(0, self.longest, "") for x in self.keys}
        )
        self.split: dict[tuple[int, int, int], tuple[Any, Any]] = {}  # into periods and cells
        self.ended: dict[tuple[int, int, int], tuple[Any, Any]] = {}  # ends likewise
        self.cp.add(self.start[F, 0, 0] == 0)
        for op, k, then, later, cells in grid.chain():
            for j in flying if not shape.q or k < shape.q or k >= p - 1 - shape.q else ():
                self.cp.add(self.start[then, later, j] >= self.start[op, k, j] + cells)
        for op, k, j in self.keys if shape.g > 1 else ():
            if shape.q and (op == W or grid.problem.rank[k] >= shape.q):
                continue
            after = self.start[op, k, j + 1] if j + 1 < shape.g else self.start[op, k, 0] + period
            self.cp.add(after >= self.start[op, k, j] + grid.cells[op][k])

    def _divided(self, time: Any) -> tuple[Any, Any]:
        """Whole periods before a time, and what is left."""
        quotient = self.cp.new_int_var(0, self.longest // self.period + 2, "")
        residue = self.cp.new_int_var(0, self.period - 1, "")
        self.cp.add(time == quotient * self.period + residue)
        return quotient, residue

    def lane(self, rank: int) -> None:
        """One action of a rank at a time."""
        intervals = []
        for key in self.keys:
            if self.grid.problem.rank[key[1]] == rank:
                self.split[key] = self._divided(self.start[key])
                for again in (0, self.period):
                    size = self.grid.cells[key[0]][key[1]]
                    intervals.append(self.cp.new_fixed_size_interval_var(self.split[key][1] + again, size, ""))
        self.cp.add_no_overlap(intervals)

    def hold(self, rank: int, at: tuple[int, int, int]) -> None:
        """When the F called ``at`` starts, what has been taken less what has been given back is within the limit.

        An action with quotient q and a residue not later has happened one time more than one with a later residue; the bit is 1
        for F's unless their residue is later, and may be 1 for B's and W's only if their end's residue is not later.
        """
        cp, grid, here = self.cp, self.grid, self.split[at][1]
        held: Any = 0
        for key in self.keys:
            op, k, _ = key
            units = grid.held[k] if op == F else grid.held[k] - grid.kept[k] if op == B else grid.kept[k]
            if grid.problem.rank[k] != rank or not units:
                continue
            bit = cp.new_bool_var("")
            if op == F:
                quotient, residue = self.split[key]
                cp.add(residue >= here + 1).only_enforce_if(~bit)
                held += units * (bit - quotient)
            else:
                if key not in self.ended:
                    self.ended[key] = self._divided(self.start[key] + grid.cells[op][k])
                quotient, residue = self.ended[key]
                cp.add(residue <= here).only_enforce_if(bit)
                held += units * (quotient - bit)
        cp.add(held <= grid.limit[rank])

    def _mirrored(self, shape: Shape) -> dict[tuple[int, int, int], Any]:
        """Starts with the symmetries of a shape: expressions of those of the F's of q ranks, and of what W's wait."""
        cp, g, p, q = self.cp, self.g, self.grid.problem.num_ranks, shape.q
        assert shape.n * self.period % 2 == 0, "q ranks shift by half of n periods"
        half, b, w = shape.n * self.period // 2, self.grid.cells[B][0], self.grid.cells[W][0]
        center = cp.new_int_var(0, 2 * self.longest, "")
        few = [(r, chunk, j) for r in range(q) for chunk in (0, 1) for j in range(g)]
        ahead = {key: cp.new_int_var(0, self.longest, "") for key in few}
        wait = {key: cp.new_int_var(0, _LONGEST_WAIT * w, "") for key in few}
        start: dict[tuple[int, int, int], Any] = {}
        for r in range(p):
            for chunk, k, shift in ((0, r, r // q * half), (1, 2 * p - 1 - r, -(r // q) * half)):
                for j in range(g):
                    start[F, k, j] = ahead[r % q, chunk, j] + shift
                    mirrored = ahead[r % q, chunk, -j % g] + shift - (self.period if j else 0)  # F of microbatch -j
                    start[B, k, j] = center - b - mirrored
                    start[W, k, j] = center - mirrored + wait[r % q, chunk, j]
        return start

    def least_area(self) -> None:
        """Least activations × time on the first and the last rank is sought."""
        grid, start, p = self.grid, self.start, self.grid.problem.num_ranks
        area = self.cp.new_int_var(0, min(grid.limit) * self.period // max(grid.held), "")
        for ks in ((0, 2 * p - 1), (p - 1, p)):
            self.cp.add(
                area >= sum(start[W, k, j] + grid.cells[W][k] - start[F, k, j] for k in ks for j in range(self.g))
            )
        self.cp.minimize(area)


_STRETCHES = (1.0, 1.02, 1.035, 1.05, 1.0667, 1.0834, 1.12, 1.1667, 1.25, 1.3334, 1.5, 1.6667, 2.0)
"""Periods that are tried, × the work: whole twelfths, which equal costs have (a cycle of one needs 8.3% over the work at half
memory, README), and finer steps below; not tuned further."""
_TRY_S = (1.5, 6.0)  # seconds for one shape and period, at the first try and the second; not tuned
_RECIPES = 20  # of list_schedule/fillers.py, by which a cycle's order is finished; not tuned


def cycles(
    problem: Problem, limits: Sequence[float], part: int, parts: int, budget: Budget, seed: int
) -> Iterator[tuple[Draft, str]]:
    """Orders from cycles, every ``parts``-th shape from ``part`` on: short periods first, until one keeps to the limit; then
    back to short ones with more time. Limits are uniform over ranks; a chain in one direction only."""
    grid, finisher, limit = Grid.of(problem, limits), Finisher(problem), min(limits)
    settled: set[tuple[Shape, int]] = set()
    stretches: Sequence[float] = _STRETCHES
    for seconds in _TRY_S:
        for number, stretch in enumerate(stretches):
            fits = False
            for shape in islice(shapes(grid, stretch), part, None, parts):
                grain = 1 + shape.n % 2
                period = grain * ceil(max(grid.least_period(shape.g), round(grid.work() * shape.g * stretch)) / grain)
                if (shape, period) in settled or shape.g >= problem.num_microbatches:
                    continue
                if budget.left <= 0:
                    return
                cycle, none = find_cycle(grid, period, shape, budget.parameters(seconds, seed))
                if cycle is not None or none:
                    settled.add((shape, period))
                rows = [] if cycle is None else cycle.rows(problem)
                if cycle is not None and (draft := finisher.best(rows, limit, _RECIPES)) is not None:
                    fits = fits or at_most(max(peaks(problem, rows)), limit)
                    yield draft, f"{'mirrored ' * bool(shape.q)}cycle of {shape.g}"
            if fits and seconds == _TRY_S[0]:
                stretches = stretches[number::-1]  # then, from there, what was not settled
                break
