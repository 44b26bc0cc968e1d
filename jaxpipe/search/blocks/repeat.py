"""Repeat a building block: the order in which each rank runs the actions of all microbatches.

Source: `controllable-memory.txt` section 2 (uniform repeat) and appendix H (repeat in groups). The order is by cell; times
are dropped, so squeezing is re-timing the order with real costs (:mod:`~jaxpipe.search.retime`).

Reorder on the grid of cells (:func:`compact`): every action moves to the earliest vacant cells that its inputs and the
memory allow.

Source: `controllable-memory.txt` appendix C, here over the whole schedule, and for fused BW too. One walk over the repeated
block, in order of cells. B, BW and W move as early as they can; an F moves up only through cells where the rank holds
less than the block's peak over all ranks. Looking at cells, not seconds, it keeps the rhythm of the block where costs are near
one another; use it as another start for :class:`~jaxpipe.search.list_schedule.fillers.GapFiller`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jaxpipe.schedule.problem import BW, B, F, Problem, W
from jaxpipe.search.blocks.block import BuildingBlock


def repeat(block: BuildingBlock, problem: Problem, places: Sequence[int] | None = None) -> list[list[int]]:
    """Return rows of codes: every action of ``problem``'s microbatches on its rank, in the order of its cell.

    ``places``: the microbatch at each place of the repetition, -1 where one is left out (default: all in turn). Leaving out
    whole microbatches keeps what the others wait for. A last block that is only partly needed is cut. A block that collides
    gives an order all the same (ties: F, then B, then W); ask
    :meth:`~jaxpipe.search.blocks.block.BuildingBlock.collisions` where that matters.
    """
    return rows_of(problem, cells_of(block, problem, places))


def cells_of(block: BuildingBlock, problem: Problem, places: Sequence[int] | None = None) -> dict[int, int]:
    """Return the cell at which each action of ``problem``'s microbatches starts, by code; ``places`` as for :func:`repeat`."""
    assert block.placement == problem.placement
    n, m, stages, flows = (
        block.num_microbatches,
        problem.num_microbatches,
        problem.placement.num_stages,
        problem.placement.num_flows,
    )
    backward = [(BW, block.backward)] if block.fused else [(B, block.backward), (W, block.weight)]
    numbers = [(k % n, block.start(k // n), i) for k, i in enumerate(range(m) if places is None else places) if i >= 0]
    return {
        problem.code(op, j % flows * stages + s, i): cells[j][s] + start
        for op, cells in ((F, block.forward), *backward)
        for s in range(stages)
        for j, start, i in numbers
    }


def rows_of(problem: Problem, cells: Mapping[int, int]) -> list[list[int]]:
    """Return, per rank, its actions in the order of their cells."""
    rows: list[list[int]] = [[] for _ in range(problem.num_ranks)]
    for code in sorted(cells, key=lambda code: (cells[code], code)):
        rows[problem.rank[code // problem.num_microbatches % problem.num_replicas]].append(code)
    return rows


def repeated(problem: Problem, rows: Sequence[Sequence[int]], microbatches: int) -> list[list[int]] | None:
    """Return ``rows`` of ``problem`` with the steady phase repeated until there are ``microbatches``; None if a rank has none.

    Whether the result deadlocks, how long it takes and what it holds is the retimer's business.
    """
    few, extra = problem.num_microbatches, microbatches - problem.num_microbatches
    assert extra >= 0
    longer = []
    for row in rows:
        # actions of one microbatch on the rank
        period = len(row) // few
        cut = _steady(row, period)
        if cut is None:
            return None
        # the period at the cut comes once more for each new microbatch, numbered one higher each time
        moved = [_moved(code, few, microbatches, 0) for code in row[: cut + period]]
        for k in range(1, extra + 1):
            moved += [_moved(code, few, microbatches, k) for code in row[cut : cut + period]]
        moved += [_moved(code, few, microbatches, extra) for code in row[cut + period :]]
        longer.append(moved)
    return longer


def _moved(code: int, few: int, many: int, by: int) -> int:
    kind, microbatch = divmod(code, few)
    return kind * many + microbatch + by


def _steady(row: Sequence[int], period: int) -> int | None:
    """Return a position from which a period and the one after are the same but for the microbatch; the one nearest the
    middle."""
    # codes of one op and stage go up by 1 a microbatch
    same = [a + 1 == b for a, b in zip(row, row[period:], strict=False)]
    middle = len(row) // 2
    steady_start = None
    run = 0
    for at, ok in enumerate(same):
        run = run + 1 if ok else 0
        if run >= period:
            start = at - period + 1
            if steady_start is None or abs(start - middle) < abs(steady_start - middle):
                steady_start = start
    return steady_start


def compact(problem: Problem, cell_of: Mapping[int, int]) -> list[list[int]]:
    """Return rows of codes after the walk over the cells ``cell_of`` the codes; memory counts every stage as one (chunks), and
    the peak stays that of the cells."""
    m, n, stages = problem.num_microbatches, problem.num_replicas, problem.placement.num_stages
    width = max(cell_of.values()) + 3
    occupied = [bytearray(width) for _ in range(problem.num_ranks)]
    live = [[0] * width for _ in range(problem.num_ranks)]
    change = (1, 0, -1, -1)
    for code, cell in cell_of.items():
        op, rank = code // m // n, problem.rank[code // m % n]
        last = cell + (op == BW)
        occupied[rank][cell] = occupied[rank][last] = 1
        live[rank][last] += change[op]
    for row in live:
        for c in range(1, width):
            row[c] += row[c - 1]
    # one peak for all ranks: those that hold less may fill up to it
    peak = max(map(max, live))
    end: dict[int, int] = {}  # of actions that have found their place
    latest: dict[int, int] = {}  # per kind, end of its latest action
    cells: dict[int, int] = {}
    for code in sorted(cell_of, key=lambda code: (cell_of[code], problem.rank[code // m % n], code)):
        op, k, _ = problem.decode(code)
        cell, length, rank = cell_of[code], 1 + (op == BW), problem.rank[k]
        # what is of one kind keeps its order, in which gradients add up
        place = latest.get(code // m, 0)
        if op == F and k % stages:
            place = max(place, end[code - m])
        elif op in (B, BW):
            turn = k % stages == stages - 1
            place = max(place, end[code - op * n * m] if turn else end[code + m])
        elif op == W:
            place = max(place, end[code - (W - B) * n * m])
        # an F moves up only as far as the rank's peak stays
        if op == F:
            below = cell
            while below > place and live[rank][below - 1] < peak:
                below -= 1
            place = below
        # it leaves its own cells before it looks for others
        occupied[rank][cell : cell + length] = bytes(length)
        while any(occupied[rank][place : place + length]):
            place += 1
        occupied[rank][place : place + length] = b"\1" * length
        # what it takes or gives back now happens that much earlier
        for c in range(place + length - 1, cell + length - 1):
            live[rank][c] += change[op]
        cells[code], end[code], latest[code // m] = place, place + length, place + length
    return rows_of(problem, cells)
