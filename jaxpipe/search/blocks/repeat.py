"""Repeating a building block: the order in which each rank runs the actions of all microbatches.

Source: `controllable-memory.txt` section 2 (uniform repeat) and appendix H (repeat in groups). The order is by cell; times
are dropped, so squeezing is re-timing the order with real costs (:mod:`~jaxpipe.search.retime`).
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
