"""The building block of two microbatches, whose F and B never meet, with two thirds of 1F1B's memory.

Source: `controllable-memory.txt` appendix I, figure 16b. The figure is lost in the text that this was made from; the block here
is reconstructed from what is said of it (two microbatches in a block, 2/3 of the memory, B and W apart) and may differ from
the drawn one. F goes down and B comes up one cell per rank, without a wait, so an activation lives about 2p cells; two of
them start every T = 6 cells, hence 2p/3 in memory. On rank r, F of the first takes residue r and its B 2p − 1 − r modulo 6:
one is even, the other odd. The second microbatch starts 2 (or 4) cells later, which keeps both parities, so its F and B take
free residues too, and one residue of each parity is left for the two W.
"""

from __future__ import annotations

from collections.abc import Iterator

from jaxpipe.schedule.blocks import BuildingBlock, repeat, with_weight_gradients
from jaxpipe.schedule.list_schedule.fillers import RECIPES, Finisher
from jaxpipe.schedule.placement import one_to_one
from jaxpipe.schedule.problem import Problem
from jaxpipe.schedule.retime import Draft

_ACTIONS = 40_000


def two_thirds_block(ranks: int, apart: int = 2) -> BuildingBlock:
    """The block: two microbatches ``apart`` (2 or 4) cells from each other, every 6 cells."""
    forward = tuple(tuple(start + r for r in range(ranks)) for start in (0, apart))
    backward = tuple(tuple(start + 2 * ranks - 1 - r for r in range(ranks)) for start in (0, apart))
    after = tuple(tuple(cell + 1 for cell in row) for row in backward)
    return with_weight_gradients(BuildingBlock(one_to_one(ranks), 6, forward, backward, after))


def block_drafts(problem: Problem, limit: float) -> Iterator[Draft]:
    """The repeated block reordered with real costs within ``limit``; nothing if the block needs more."""
    finisher = Finisher(problem)
    tries = min(len(RECIPES), _ACTIONS // max(1, 3 * problem.num_ranks * problem.num_microbatches))
    for apart in (2, 4):
        draft = finisher.best(repeat(two_thirds_block(problem.num_ranks, apart), problem), limit, tries)
        if draft is not None:
            yield draft
