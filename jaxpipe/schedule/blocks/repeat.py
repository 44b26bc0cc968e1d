"""Repeating a building block: the order in which each rank runs the passes of all microbatches.

Source: `controllable-memory.txt` section 2 (uniform repeat) and appendix H (repeat in groups). The order is by cell; times
are dropped, so squeezing is re-timing the order with real costs (:mod:`~jaxpipe.schedule.retime`).
"""

from __future__ import annotations

from collections.abc import Mapping

from jaxpipe.schedule.blocks.block import BuildingBlock
from jaxpipe.schedule.problem import BW, B, F, Problem, W


def repeat(block: BuildingBlock, problem: Problem) -> list[list[int]]:
    """Rows of codes: every action of ``problem``'s microbatches on its rank, in the order of its cell.

    A last block that is only partly needed is cut. A block that collides gives an order all the same (ties: F, then B, then W).
    """
    return rows_of(problem, cells_of(block, problem))


def cells_of(block: BuildingBlock, problem: Problem) -> dict[int, int]:
    """The cell at which each action of ``problem``'s microbatches starts, by code."""
    assert block.placement == problem.placement
    n, m, stages = block.num_microbatches, problem.num_microbatches, problem.placement.num_stages
    backward = [(BW, block.backward)] if block.fused else [(B, block.backward), (W, block.weight)]
    return {
        problem.code(op, i % n % problem.placement.num_flows * stages + s, i): cells[i % n][s] + block.start(i // n)
        for op, cells in ((F, block.forward), *backward)
        for s in range(stages)
        for i in range(m)
    }


def rows_of(problem: Problem, cells: Mapping[int, float]) -> list[list[int]]:
    """Per rank, its actions in the order of their cells."""
    rows: list[list[int]] = [[] for _ in range(problem.num_ranks)]
    for code in sorted(cells, key=lambda code: (cells[code], code)):
        rows[problem.rank[code // problem.num_microbatches % problem.num_replicas]].append(code)
    return rows
