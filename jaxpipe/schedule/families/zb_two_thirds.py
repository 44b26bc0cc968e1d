"""Zero bubble with two thirds of 1F1B's memory: a building block of two microbatches, so that F and B never meet.

Source: `controllable-memory.txt` appendix I, figure 16b. The figure is lost in the text that this was made from; the block here
is reconstructed from what is said of it (two microbatches in a block, 2/3 of the memory, B and W apart) and may differ from
the drawn one. F goes down and B comes up one cell per rank, without a wait, so an activation lives about 2p cells; two of
them start every T = 6 cells, hence 2p/3 in memory. On rank r, F of the first takes residue r and its B 2p − 1 − r modulo 6:
one is even, the other odd. The second microbatch starts 2 (or 4) cells later, which keeps both parities, so its F and B take
free residues too, and one residue of each parity is left for the two W.

``zb`` at the same limit finds its own warm-up and is usually as good or better with few ranks; at p = 7 and 16 (unit costs,
m = 4p) the reordered block is a unit shorter. So both are tried here.
"""

from __future__ import annotations

from jaxpipe.schedule.blocks import BuildingBlock, repeat, with_weight_gradients
from jaxpipe.schedule.blocks.finish import Finisher, affordable
from jaxpipe.schedule.costs import CostProfile
from jaxpipe.schedule.families.family import Family, require_sizes
from jaxpipe.schedule.families.list_scheduler import Bounded
from jaxpipe.schedule.families.zb_heuristic import best_draft
from jaxpipe.schedule.ir import Schedule
from jaxpipe.schedule.placement import one_to_one
from jaxpipe.schedule.problem import Problem
from jaxpipe.schedule.retime import best_of

_ACTIONS = 60_000


def two_thirds_block(ranks: int, apart: int = 2) -> BuildingBlock:
    """The block: two microbatches ``apart`` (2 or 4) cells from each other, every 6 cells."""
    forward = tuple(tuple(start + r for r in range(ranks)) for start in (0, apart))
    backward = tuple(tuple(start + 2 * ranks - 1 - r for r in range(ranks)) for start in (0, apart))
    after = tuple(tuple(cell + 1 for cell in row) for row in backward)
    return with_weight_gradients(BuildingBlock(one_to_one(ranks), 6, forward, backward, after))


def zb_two_thirds(ranks: int, microbatches: int, costs: CostProfile | None = None) -> Schedule:
    """Zero bubble at about 2/3 of 1F1B's memory, for any ``ranks`` p >= 1 and ``microbatches`` m >= 1::

        rank 0 |F0 F1 F2 F3                B0 W0 B1 F4 W1 F5 B2 W2 B3 W3       B4 W4 B5 W5
        rank 1 |   F0 F1 F2             B0 F3 B1 W0 W1 F4 B2 F5 B3 W2 W3    B4    B5 W4 W5
        rank 2 |      F0 F1          B0 F2 B1 F3 W0 W1 B2 F4 B3 F5 W2 W3 B4    B5 W4 W5
        rank 3 |         F0 F1    B0 W0 B1 F2 W1 F3 B2 W2 B3 F4 W3 F5 B4 W4 B5 W5
        rank 4 |            F0 B0 F1 B1 W0 W1 F2 B2 F3 B3 W2 W3 F4 B4 F5 B5 W4 W5

    Every rank holds at most min(p, m, 2⌊p/3⌋ + 2) activations. Never worse than the block, repeated and squeezed, in
    makespan, longest span and peak (for p = 1 and 3, where the block needs more than 1F1B, than ``zb`` at limit p).
    ``costs``: one stage per rank; default F = B = W.

    Raises:
        ScheduleError: a size is not a whole number of at least 1, or ``costs`` is for another number of stages.
    """
    require_sizes("zb-two-thirds", ranks=ranks, microbatches=microbatches)
    problem = Problem.of(one_to_one(ranks), microbatches, costs)
    finisher = Finisher(problem)
    squeezed = finisher.squeezed(repeat(two_thirds_block(ranks), problem))
    assert squeezed is not None, "a repeated block deadlocks"
    if squeezed.peak > ranks * (1 + 1e-9):
        bounded = Bounded(problem, max(ranks, *problem.held, *problem.kept))
        return problem.schedule("zb-two-thirds", best_draft(bounded).rows)
    tries = affordable(problem, _ACTIONS) // 2
    drafts = [finisher.best(repeat(two_thirds_block(ranks, d), problem), squeezed.peak, tries) for d in (2, 4)]
    best = best_of([best_draft(Bounded(problem, squeezed.peak)), *drafts], anchor=squeezed)
    assert best is not None
    return problem.schedule("zb-two-thirds", best.rows)


ZB_TWO_THIRDS = Family(
    name="zb-two-thirds",
    function=zb_two_thirds,
    description="zero bubble at about 2/3 of 1F1B's memory: a building block of two microbatches",
    source="Controllable Memory (Qi, Wan et al. 2024) appendix I, figure 16b (reconstructed)",
    options=("costs",),
    picture={"ranks": 5, "microbatches": 6},
)
