"""Repeating a building block: the order in which each rank runs the actions of all microbatches.

Source: `controllable-memory.txt` section 2 (uniform repeat) and appendix H (repeat in groups). The order is by cell; times
are dropped, so squeezing is re-timing the order with real costs (:mod:`~jaxpipe.schedule.retime`).
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxpipe.schedule.blocks.block import BuildingBlock
from jaxpipe.schedule.problem import BW, B, F, Problem, W


def repeat(block: BuildingBlock, problem: Problem, places: Sequence[int] | None = None) -> list[list[int]]:
    """Rows of codes: every action of ``problem``'s microbatches on its rank, in the order of its cell.

    ``places``: the microbatch at each place of the repetition, -1 where one is left out (default: all in turn). Leaving out
    whole microbatches keeps what the others wait for. A last block that is only partly needed is cut. A block that collides
    gives an order all the same (ties: F, then B, then W); ask
    :meth:`~jaxpipe.schedule.blocks.block.BuildingBlock.collisions` where that matters.
    """
    assert block.placement == problem.placement
    n, stages = block.num_microbatches, problem.placement.num_stages
    numbers = range(problem.num_microbatches) if places is None else places
    flows = problem.placement.num_flows
    actions: list[list[tuple[int, int]]] = [[] for _ in range(problem.num_ranks)]
    kinds = [(F, block.forward), (BW if block.fused else B, block.backward)]
    if not block.fused:
        kinds.append((W, block.weight))
    for j in range(n):
        starts = [(i, block.start(k // n)) for k, i in enumerate(numbers) if k % n == j and i >= 0]
        for op, cells in kinds:
            for s in range(stages):
                replica = j % flows * stages + s
                code = problem.code(op, replica, 0)
                cell = cells[j][s]
                actions[problem.rank[replica]] += [(cell + start, code + i) for i, start in starts]
    return [[code for _, code in sorted(row)] for row in actions]
