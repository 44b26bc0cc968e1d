"""Repeating a building block: the order in which each rank runs the actions of all microbatches.

Source: `controllable-memory.txt` section 2 (uniform repeat) and appendix H (repeat in groups). The order is by cell; times
are dropped, so squeezing is re-timing the order with real costs (:mod:`~jaxpipe.schedule.retime`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jaxpipe.schedule.blocks.block import BuildingBlock
from jaxpipe.schedule.problem import BW, B, F, Problem, W


def repeat(block: BuildingBlock, problem: Problem, places: Sequence[int] | None = None) -> list[list[int]]:
    """Return rows of codes: every action of ``problem``'s microbatches on its rank, in the order of its cell.

    ``places``: the microbatch at each place of the repetition, -1 where one is left out (default: all in turn). Leaving out
    whole microbatches keeps what the others wait for. A last block that is only partly needed is cut. A block that collides
    gives an order all the same (ties: F, then B, then W); ask
    :meth:`~jaxpipe.schedule.blocks.block.BuildingBlock.collisions` where that matters.
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
