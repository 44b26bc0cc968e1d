"""The steady state as a cyclic schedule: offsets of a few microbatches that repeat every ``period``, found by CP-SAT.

A *cycle* of g microbatches is a start for each of their actions; microbatch i runs at the start of ``i % g`` plus ``i // g``
periods. On each rank the residues modulo the period must not overlap, and at every F's start the rank holds at most its limit.
What is held at a residue follows from how often each action has wrapped around (its quotient) and one order bit per pair of
actions, so memory is linear in quotients and bits (equation 1 of `controllable-memory.txt` bounds the same by lifespans).

The search is on a coarse grid of cells; only the order is kept, and re-timing it with real costs is the caller's. g > 1 finds
steady states that no block of one microbatch has: at half of V-Half's limits two microbatches save up to a quarter.
Source: the building blocks of `controllable-memory.txt` section 2, with offsets free instead of from a table.

Not modelled: workspace, offload, links that are busy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import Any

from jaxpipe.schedule.problem import B, F, Problem, W
from jaxpipe.schedule.solve.cp_sat import LITE, run
from jaxpipe.schedule.tolerance import MEMORY, how_many

_FINEST = 24
"""Cells that the mean action takes at most. README's proofs that no cycle of one does better at half memory used 20 to 26."""
_UNITS = 60  # units of memory that the largest residual is divided into, where sizes differ: divisible by 2, 3, 4, 5, 6


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

    def peak(self, grid: Grid) -> int:
        """Units of memory that the fullest rank holds in the steady state."""
        return max(self._held(grid, key) for key in self.start if key[0] == F)

    def _held(self, grid: Grid, at: tuple[int, int, int]) -> int:
        """Units that a rank holds when the F called ``at`` starts."""
        now, held = self.start[at], 0
        for k in grid.problem.replicas_of(grid.problem.rank[at[1]]):
            freed = grid.held[k] - grid.kept[k], grid.kept[k]
            for j in range(self.microbatches):
                held += grid.held[k] * ((now - self.start[F, k, j]) // self.period + 1)
                for op, units in zip((B, W), freed, strict=True):
                    held -= units * ((now - self.start[op, k, j] - grid.cells[op][k]) // self.period + 1)
        return held


@dataclass(frozen=True, slots=True)
class Grid:
    """A problem in whole cells: ``cells[op][k]`` of an action, ``down[k]`` and ``up[k]`` of transfers, memory in whole units.

    Only one flow: chains in both directions have no cycle here.
    """

    problem: Problem
    cells: tuple[tuple[int, ...], ...]
    down: tuple[int, ...]
    up: tuple[int, ...]
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
        sizes = {x for x in (*problem.held, *problem.kept) if x > 0}
        unit = max(sizes, default=1.0) if len(sizes) <= 1 else max(sizes) / _UNITS
        held, kept = (tuple(ceil(x / unit * (1 - MEMORY)) for x in s) for s in (problem.held, problem.kept))
        most = problem.num_microbatches * (sum(held) + 1)
        limit = tuple(most if x == float("inf") else how_many(unit, x) for x in limits)
        return cls(problem, tuple(cells), down, up, held, kept, limit)

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
        busy = [0] * self.problem.num_ranks
        for k, rank in enumerate(self.problem.rank):
            busy[rank] += sum(self.cells[op][k] for op in (F, B, W))
        return max(busy)

    def round_trips(self) -> list[int]:
        """Per replica, least cells from F's start to B's end."""
        trip = [0] * self.problem.num_replicas
        way = 0
        for k in reversed(range(self.problem.num_replicas)):
            way += self.cells[F][k] + self.cells[B][k]
            trip[k] = way
            if k:
                way += self.down[k - 1] + self.up[k]
        return trip

    def least_period(self, g: int) -> int:
        """Cells that g microbatches take at least: work, and memory × time on each rank."""
        p, trip = self.problem.num_ranks, self.round_trips()
        area = [0] * p
        for k, rank in enumerate(self.problem.rank):
            kept = min(self.kept[k], self.held[k])
            area[rank] += self.held[k] * trip[k] + kept * self.cells[W][k]
        by_memory = [-(-g * a // x) for a, x in zip(area, self.limit, strict=True) if x > 0]
        return max([g * self.work(), *by_memory])


def _cell(seconds: Sequence[float]) -> float:
    """The coarsest cell that all actions are multiples of, nearly; or one so small that the mean action has ``_FINEST``."""
    mean = sum(seconds) / len(seconds)
    shares = [Fraction(x / mean).limit_denominator(48) for x in seconds]
    finest = Fraction(1, _FINEST)
    for parts in range(1, _FINEST + 1):
        if all(abs(s * parts - round(s * parts)) <= Fraction(1, 50) for s in shares):
            return mean / parts
    return float(mean * finest)


class CycleModel:
    """CP-SAT's variables for a cycle of ``g`` microbatches in ``period`` cells."""

    def __init__(self, grid: Grid, period: int, g: int, *, feasible_only: bool) -> None:
        from ortools.sat.python import cp_model

        self.grid, self.period, self.g = grid, period, g
        self.model: Any = cp_model.CpModel()
        self.longest = self._longest()
        self.start: dict[tuple[int, int, int], Any] = {}
        self.quotient: dict[tuple[int, int, int], Any] = {}
        self.residue: dict[tuple[int, int, int], Any] = {}
        self._passes()
        self._flow()
        for rank in range(grid.problem.num_ranks):
            self._rank(rank)
        if not feasible_only:
            last = grid.problem.num_replicas
            self.model.minimize(sum(self.start[W, k, j] for k in range(last) for j in range(g)))

    def _longest(self) -> int:
        """A microbatch's first chunk on a rank lives no longer than the limit × the period allows."""
        grid = self.grid
        trip, longest = grid.round_trips(), 0
        for rank in range(grid.problem.num_ranks):
            mine = grid.problem.replicas_of(rank)
            if not mine:
                continue
            least = sum(grid.held[k] * trip[k] for k in mine[1:])
            room = max(0, grid.limit[rank] * self.period - least) // max(1, grid.held[mine[0]])
            longest = max(longest, min(room, trip[mine[0]] + 6 * self.period))
        return max(longest, trip[0]) + self.period + sum(grid.down)

    def _passes(self) -> None:
        model, grid = self.model, self.grid
        most = self.longest // self.period + 1
        for op in (F, B, W):
            for k in range(grid.problem.num_replicas):
                for j in range(self.g):
                    key = op, k, j
                    start = self.start[key] = model.new_int_var(0, self.longest, "")
                    quotient = self.quotient[key] = model.new_int_var(0, most, "")
                    residue = self.residue[key] = model.new_int_var(0, self.period - 1, "")
                    model.add(start == quotient * self.period + residue)
        model.add(self.start[F, 0, 0] == 0)

    def _flow(self) -> None:
        model, start, grid = self.model, self.start, self.grid
        for op, k, then, later, cells in grid.chain():
            for j in range(self.g):
                model.add(start[then, later, j] >= start[op, k, j] + cells)
        for op in (F, B, W):
            for k in range(grid.problem.num_replicas):
                for j in range(self.g):
                    after = start[op, k, j + 1] if j + 1 < self.g else start[op, k, 0] + self.period
                    if self.g > 1:
                        model.add(after >= start[op, k, j] + grid.cells[op][k])

    def _rank(self, rank: int) -> None:
        model, grid = self.model, self.grid
        mine = grid.problem.replicas_of(rank)
        keys = [(op, k, j) for k in mine for op in (F, B, W) for j in range(self.g)]
        intervals = []
        for key in keys:
            size = grid.cells[key[0]][key[1]]
            intervals.append(model.new_fixed_size_interval_var(self.residue[key], size, ""))
            intervals.append(model.new_fixed_size_interval_var(self.residue[key] + self.period, size, ""))
        model.add_no_overlap(intervals)
        ends = {key: self._end(key) for key in keys if key[0] != F and self._given(key)}
        for k in mine:
            for j in range(self.g):
                self._memory(rank, (F, k, j), keys, ends)

    def _given(self, key: tuple[int, int, int]) -> int:
        """Units that the end of a B or W gives back."""
        op, k, _ = key
        return self.grid.held[k] - self.grid.kept[k] if op == B else self.grid.kept[k]

    def _end(self, key: tuple[int, int, int]) -> tuple[Any, Any]:
        quotient = self.model.new_int_var(0, self.longest // self.period + 2, "")
        residue = self.model.new_int_var(0, self.period - 1, "")
        size = self.grid.cells[key[0]][key[1]]
        self.model.add(self.start[key] + size == quotient * self.period + residue)
        return quotient, residue

    def _memory(
        self,
        rank: int,
        at: tuple[int, int, int],
        keys: Sequence[tuple[int, int, int]],
        ends: dict[tuple[int, int, int], tuple[Any, Any]],
    ) -> None:
        """When the F called ``at`` starts, what has been taken less what has been given back is within the limit.

        An action with quotient q and a residue not later has happened one time more than one with a later residue; the bit is 1
        for F's unless their residue is later, and may be 1 for B's and W's only if their end's residue is not later.
        """
        model, grid, here = self.model, self.grid, self.residue[at]
        held = 0
        for key in keys:
            op, k, _ = key
            if op == F:
                bit = 1 if key == at else model.new_bool_var("")
                if key != at:
                    model.add(self.residue[key] >= here + 1).only_enforce_if(~bit)
                held += grid.held[k] * (bit - self.quotient[key])
            elif key in ends:
                quotient, residue = ends[key]
                bit = model.new_bool_var("")
                model.add(residue <= here).only_enforce_if(bit)
                held += self._given(key) * (quotient - bit)
        model.add(held <= grid.limit[rank])

    def solve(self, budget: dict[str, Any]) -> tuple[Cycle | None, bool]:
        """A cycle, or None; and whether it is proven that there is none (on this grid, with lives this long)."""
        solver, found, done = run(self.model, LITE, budget)
        if not found:
            return None, done
        start = {key: solver.value(x) for key, x in self.start.items()}
        return Cycle(self.period, self.g, start), False


def find_cycle(grid: Grid, period: int, g: int, budget: dict[str, Any], *, short: bool = False) -> Cycle | None:
    """A cycle of ``g`` microbatches in ``period`` cells within ``budget`` (CP-SAT parameters); ``short``: with early ends."""
    return CycleModel(grid, period, g, feasible_only=not short).solve(budget)[0]
