"""Zero bubble with two thirds of 1F1B's memory: ``zb`` at the memory of a building block, and no worse than the block.

Source: `controllable-memory.txt` appendix I, figure 16b; the block, reconstructed, is in
:mod:`~jaxpipe.schedule.families.two_thirds_block`. ``zb`` at the same limit tries the block too, and often finds a better
warm-up; here it is made sure that the block itself, repeated and squeezed, is not better in anything.
"""

from __future__ import annotations

from jaxpipe.schedule.blocks import repeat
from jaxpipe.schedule.costs import CostProfile
from jaxpipe.schedule.families.family import family
from jaxpipe.schedule.families.two_thirds_block import block_drafts, two_thirds_block
from jaxpipe.schedule.families.zb_heuristic import best_draft
from jaxpipe.schedule.ir import Schedule
from jaxpipe.schedule.list_schedule.choosers import least_limit
from jaxpipe.schedule.placement import one_to_one
from jaxpipe.schedule.problem import Problem
from jaxpipe.schedule.retime import Retimer, best_of


@family(
    "zb-two-thirds",
    "zero bubble at about 2/3 of 1F1B's memory: a building block of two microbatches",
    "Controllable Memory (Qi, Wan et al. 2024) appendix I, figure 16b (reconstructed)",
    picture={"ranks": 5, "microbatches": 6},
)
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
    problem = Problem.of(one_to_one(ranks), microbatches, costs)
    retimer = Retimer(problem)
    squeezed = retimer.draft(repeat(two_thirds_block(ranks), problem))
    assert squeezed is not None, "a repeated block deadlocks"
    if squeezed.peak > ranks * (1 + 1e-9):
        return problem.schedule("zb-two-thirds", best_draft(problem, max(ranks, least_limit(problem))).rows)
    drafts = [best_draft(problem, squeezed.peak)]
    if not drafts[0].no_worse_than(squeezed):
        drafts += block_drafts(problem, squeezed.peak)
    best = best_of(drafts, anchor=squeezed)
    assert best is not None
    return problem.schedule("zb-two-thirds", best.rows)
