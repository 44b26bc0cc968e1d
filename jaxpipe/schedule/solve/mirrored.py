"""Steady states of a V that repeat every few ranks, with a backward half that mirrors the forward half.

A cycle of g microbatches over p ranks (:mod:`~jaxpipe.schedule.solve.cyclic`) has 6 g p actions to place, too many for CP-SAT
where actions have no common step. Two symmetries leave a model whose size does not depend on p:

* *Repeating.* Ranks r and r + q do the same, half of n periods later on the way down and earlier on the way back (half, so
  that mirrored they fit too). So the offsets of q ranks are enough, and a forward takes n periods over q ranks and back.
* *Mirrored.* Read backwards in time, backwards are forwards: chunk 1's B's go down the ranks as its F's come up. The B of
  chunk 1 is the F of chunk 1 mirrored at one instant, and that of chunk 0 the F of chunk 0. Both get the longer one's steps.

W's take what is left, each not long after its B. Least is sought of activations × time on the first and the last rank.

Activations of chunk 0 live 2 n / q periods a rank, so rank 0 holds 2 g n p / q chunks and a few more for the turns. A forward
and its way back need 2 max(F, B) a rank, so n g T ≥ 2 q max(F, B) with T a microbatch. One microbatch (g = 1) can't have 3
ranks in a period below 6 F (README); two can have 5 in 2 periods, which is 0.8 p chunks, with no idle time at all at costs as
in Table 5 of `controllable-memory.txt`, where a cycle of one idles 8%.

Not modelled: placements other than a V with equal costs on all stages, offload; how many activations meet at an instant (what
follows, an order under the limit, sees to that).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import gcd
from typing import Any

from jaxpipe.schedule.problem import B, F, W
from jaxpipe.schedule.solve.cp_sat import LITE, run
from jaxpipe.schedule.solve.cyclic import Cycle, Grid

_MOST_RANKS, _MOST_MICROBATCHES = 9, 3
"""Ranks that repeat, microbatches in a period. The best known at p/2 has 5 ranks and 2 microbatches (README)."""
_TURNS = 1.0
"""Chunks that the turns add at least: a lower estimate, for they took 3 to 5 (README)."""
_LONGEST_WAIT = 8  # W's that a W waits for at most: bounds a variable, not tuned


@dataclass(frozen=True, slots=True)
class Shape:
    """``g`` microbatches in a period; ``q`` ranks repeat, and a forward takes ``n`` periods over them, there and back."""

    g: int
    q: int
    n: int

    def chunks(self, p: int) -> float:
        """Chunks that rank 0 of ``p`` holds, without the turns."""
        return 2 * self.g * self.n * p / self.q


def shapes(grid: Grid, stretch: float) -> Iterator[Shape]:
    """What may fit into the memory with a period of ``stretch`` × the work: few microbatches first, then much room to move."""
    p, step, chunk = grid.problem.num_ranks, _step(grid), max(grid.held)
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
    """Whether the problem is a V with equal stages."""
    problem = grid.problem
    p, n = problem.num_ranks, problem.num_replicas
    v = n == 2 * p and list(problem.rank) == [*range(p), *reversed(range(p))]
    crossings = [*grid.down[: p - 1], *grid.down[p : n - 1], *grid.up[1:p], *grid.up[p + 1 :]]
    uneven = any(len(set(row)) > 1 for row in (*grid.cells, grid.held, grid.kept, grid.limit, crossings))
    return v and p > 2 and not uneven


def _hop(grid: Grid) -> int:
    return grid.down[0]


def _step(grid: Grid) -> int:
    """Cells from an action's start to its successor's on the next rank."""
    return max(grid.cells[F][0], grid.cells[B][0]) + _hop(grid)


def find_mirrored(grid: Grid, shape: Shape, period: int, budget: dict[str, Any]) -> tuple[Cycle | None, bool]:
    """A cycle of ``period`` cells (even) that holds little, and whether there is none for sure."""
    from ortools.sat.python import cp_model

    p, (f, b, w) = grid.problem.num_ranks, (grid.cells[op][0] for op in (F, B, W))
    g, q, n = shape.g, shape.q, shape.n
    model: Any = cp_model.CpModel()
    far = period * (n + 2)
    down, up = (_chain(model, grid, shape, period, far, direction) for direction in (1, -1))
    model.add(down[0][0] == 0)
    assert n * period % 2 == 0, "q ranks shift by half of n periods"
    for j in range(g):
        model.add(down[j][q] - down[j][0] == n * period // 2)
        model.add(up[j][0] - up[j][q] == n * period // 2)
    mirror = model.new_int_var(0, 2 * far, "")
    block = _Block(grid, shape, period, down, up, mirror)
    for i in range(g):
        model.add(block.forward(1, i, p - 1) >= block.forward(0, i, p - 1) + max(f, b))
        model.add(block.backward(1, i, 0) >= block.forward(1, i, 0) + f)
    waits: dict[tuple[int, int, int], Any] = {}
    for r in range(q):
        lane = []
        for chunk in (0, 1):
            for i in range(g):
                wait = waits[r, chunk, i] = model.new_int_var(0, _LONGEST_WAIT * w, "")
                whole = block.whole * period
                ahead = block.forward(chunk, i, r) - (whole if chunk == 1 else 0)
                back = block.backward(chunk, i, r) - (whole if chunk == 1 else 2 * whole)
                lane += [(ahead, f), (back, b), (back + b + wait, w)]
        residues = [(_residue(model, x, period, far), size) for x, size in lane]
        model.add_no_overlap(
            [model.new_fixed_size_interval_var(x + again, size, "") for x, size in residues for again in (0, period)]
        )
    fullest = model.new_int_var(0, 8 * g * far * (p // q + 1), "")  # activations × time in a period
    for r in (0, p - 1):
        lives = [block.backward(k, i, r) - block.forward(k, i, r) + b + w for k in (0, 1) for i in range(g)]
        model.add(fullest >= sum(lives) + sum(waits[r % q, k, i] for k in (0, 1) for i in range(g)))
    model.add(fullest <= min(grid.limit) * period // max(grid.held))
    model.minimize(fullest)
    solver, found, done = run(model, LITE, budget)
    if not found:
        return None, done
    read = solver.value
    values = _Block(
        grid,
        shape,
        period,
        [list(map(read, x)) for x in down],
        [list(map(read, x)) for x in up],
        read(mirror),
    )
    return values.cycle({key: read(x) for key, x in waits.items()}), False


def _chain(model: Any, grid: Grid, shape: Shape, period: int, far: int, direction: int) -> list[list[Any]]:
    """Starts of g microbatches on q + 1 ranks, that follow each other down (1) or up (−1) the ranks."""
    step, size = _step(grid), max(grid.cells[F][0], grid.cells[B][0])
    starts = [[model.new_int_var(-far, 2 * far, "") for _ in range(shape.q + 1)] for _ in range(shape.g)]
    for way in starts:
        for here, there in pairwise(way):
            model.add(there >= here + step) if direction > 0 else model.add(here >= there + step)
    for r in range(shape.q + 1):
        for j, way in enumerate(starts):
            following = starts[j + 1][r] if j + 1 < shape.g else starts[0][r] + period
            model.add(following >= way[r] + size)
    return starts


def _residue(model: Any, start: Any, period: int, far: int) -> Any:
    residue = model.new_int_var(0, period - 1, "")
    quotient = model.new_int_var(-3 * far // period - 2, 4 * far // period + 2, "")
    model.add(start == quotient * period + residue)
    return residue


@dataclass(frozen=True, slots=True)
class _Block:
    """Starts on an endless row of ranks and of microbatches, in numbers or in CP-SAT's expressions: ``down[j][r]`` of chunk
    0's F's, ``up[j][r]`` of chunk 1's."""

    grid: Grid
    shape: Shape
    period: int
    down: list[list[Any]]
    up: list[list[Any]]
    mirror: Any

    @property
    def whole(self) -> int:
        """Periods that a forward takes, there and back, over the blocks of q ranks before the last rank's. ``up`` is without
        them, so that its numbers compare with those of ``down`` where the way turns; ``mirror`` is without twice them."""
        return (self.grid.problem.num_ranks - 1) // self.shape.q * self.shape.n

    def forward(self, chunk: int, i: int, rank: int) -> Any:
        """Start of the F of ``chunk`` of microbatch i."""
        blocks, r = divmod(rank, self.shape.q)
        later, j = divmod(i, self.shape.g)
        shift = blocks * self.shape.n * self.period // 2
        if chunk == 0:
            return self.down[j][r] + shift + later * self.period
        return self.up[j][r] + shift + (self.whole - blocks * self.shape.n + later) * self.period

    def backward(self, chunk: int, i: int, rank: int) -> Any:
        """Start of the B of ``chunk`` of microbatch i: the mirrored F of microbatch −i."""
        ahead = self.forward(chunk, -i, rank)
        return self.mirror + 2 * self.whole * self.period - self.grid.cells[B][0] - ahead

    def cycle(self, waits: dict[tuple[int, int, int], int]) -> Cycle:
        p, b = self.grid.problem.num_ranks, self.grid.cells[B][0]
        start: dict[tuple[int, int, int], int] = {}
        for r in range(p):
            for chunk, k in ((0, r), (1, 2 * p - 1 - r)):
                for i in range(self.shape.g):
                    start[F, k, i] = self.forward(chunk, i, r)
                    start[B, k, i] = self.backward(chunk, i, r)
                    start[W, k, i] = start[B, k, i] + b + waits[r % self.shape.q, chunk, i]
        earliest = min(start.values())
        return Cycle(self.period, self.shape.g, {key: x - earliest for key, x in start.items()})
