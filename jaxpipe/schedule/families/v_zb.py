"""V-ZB: almost no bubble at 1F1B's memory, by two chunks per rank down the ranks and back up.

Source: `controllable-memory.txt` section 3.2 (figures 3d and 4d), Table 4. Two things go by that name in the paper: a block
with offsets (4, 2), and the heuristic behind Table 4's numbers. :mod:`~jaxpipe.schedule.families.v_heuristic` starts from the
heuristic and takes the block's order, W laid anew, where that is better in makespan and in longest span.
"""

from __future__ import annotations

from jaxpipe.schedule.costs import CostProfile
from jaxpipe.schedule.families.family import family
from jaxpipe.schedule.families.v_heuristic import best_v_draft
from jaxpipe.schedule.ir import Schedule
from jaxpipe.schedule.list_schedule.choosers import least_limit
from jaxpipe.schedule.placement import v_shape
from jaxpipe.schedule.problem import Problem
from jaxpipe.schedule.retime import Objective


@family(
    "v-zb",
    "V placement at 1F1B's memory: almost no bubble, by real costs",
    "Qi et al. 2024 (controllable-memory.txt) §3.2, Table 4",
    placement=v_shape,
    makespan=lambda p, m, v, f, b, w: m * (f + b + w) + (p - 1) * f / 2 if f == b == w and m >= p else None,
    picture={"ranks": 2, "microbatches": 4},
)
def v_zb(
    ranks: int, microbatches: int, costs: CostProfile | None = None, objective: Objective = "makespan"
) -> Schedule:
    """V-ZB for any ``ranks`` p >= 1 and ``microbatches`` m >= 1, at 1F1B's memory, p activations::

        rank 0 |F0- F1- F2- F0b B0b W0b F1b B1b W1b F3- B0- W0- F2b B2b W2b B1- W1- F3b B3b B2- W3b B3- W2- W3-
        rank 1 |    F0- F0b F1- F1b B0b W0b F2- B0- W0- F2b B1b W1b F3- B1- W1- F3b B2b B2- B3b B3- W2b W2- W3b W3-

    ``objective``: what is minimised first, the makespan or the longest rank span. (``b`` marks the second chunk of a rank.)
    ``costs``: one entry per stage, two stages per rank; default F = B = W. With F = B = W and no transfer time, m >= p gives
    a makespan of m(F + B + W) + (p - 1)F/2, which no schedule on this placement beats, and m >= 2p ranks that are never idle
    between their first and last action. The peak is above p only if one microbatch alone is (w-residuals above residuals).

    Raises:
        ScheduleError: a size is not a whole number of at least 1, or ``costs`` is for another number of stages.
    """
    problem = Problem.of(v_shape(ranks), microbatches, costs)
    draft = best_v_draft(problem, max(ranks, least_limit(problem)), objective)
    assert draft is not None, "one microbatch fits the least limit"
    return problem.schedule("v-zb", draft.rows)
