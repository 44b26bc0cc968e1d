"""Chimera: two pipelines in opposite directions over the same ranks, each filling the gaps of the other.

Source: Li & Hoefler 2021 (arXiv 2107.06925), section 3 (direct concatenation for m > p). Even microbatches go down the ranks,
odd ones up, so every rank holds two stages and the parameters are held twice: the replicas' gradients are summed at the end
of the step (not in the schedule). Forward doubling and backward halving, the paper's answers to BW = 2F, are not made.

The paper asks for even p and m. Any p works here; with odd p the two directions meet in the same columns of the grid and
wait for each other. With odd m the direction down has one microbatch more.
"""

from __future__ import annotations

from jaxpipe.schedule.costs import CostProfile
from jaxpipe.schedule.families.basic_units import units_in_a_row
from jaxpipe.schedule.families.family import family
from jaxpipe.schedule.ir import Schedule
from jaxpipe.schedule.placement import bidirectional
from jaxpipe.schedule.problem import Problem


@family(
    "chimera",
    "two pipelines in opposite directions: half of 1F1B's bubble at m = p, parameters held twice",
    "Li & Hoefler 2021 (Chimera) §3; controllable-memory.txt §2.2",
    placement=bidirectional,
    peak_activations=lambda p, m, v: min(p, m) if p % 2 == 0 and (m < p or m % p == 0) else None,
    makespan=lambda p, m, v, f, b, w: m * (f + b + w) + (p - 2) * max(f, b + w) if p % 2 == 0 and m == p else None,
)
def chimera(ranks: int, microbatches: int, costs: CostProfile | None = None) -> Schedule:
    """Chimera for any ``ranks`` p and ``microbatches`` m >= 1; ``costs`` has one entry per stage (p stages)::

        rank 0 |F0- F2-     F1b BW1b--- F3b BW3b---     BW0----         BW2----
        rank 1 |    F0- F1b F2- F3b     BW1b--- BW0---- BW3b--- BW2----
        rank 2 |    F1- F0b F3- F2b     BW0b--- BW1---- BW2b--- BW3----
        rank 3 |F1- F3-     F0b BW0b--- F2b BW2b---     BW1----         BW3----

    (``b`` marks the later of a rank's two stages; even microbatches go down.) With even p, equal stages and no transfer time,
    m = p idles (p − 2) max(F, B + W), as in Li & Hoefler's table 2. A rank holds between p/2 + 1 and p activations: 1F1B's
    peak, spread more evenly.

    Raises:
        ScheduleError: a size is not a whole number of at least 1, or the costs are for another number of stages.
    """
    problem = Problem.of(bidirectional(ranks), microbatches, costs)
    return problem.schedule("chimera", units_in_a_row(problem).rows)
