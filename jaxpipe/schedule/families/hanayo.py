"""Hanayo: one pipeline that runs down the ranks and up again, wave after wave; Chimera's gain without its second copy.

Source: Liu et al. 2023 (Hanayo, SC '23). v chunks per rank make v/2 waves. The paper takes even v; odd v works too (the last
chunk ends on the last rank; v = 1 is 1F1B). Where a wave turns, both stages are on one rank and nothing is sent. The order is
that of basic units of p microbatches (``basic_units.py``), improved with real costs.
"""

from __future__ import annotations

from jaxpipe.schedule.costs import CostProfile
from jaxpipe.schedule.families.basic_units import units_in_a_row
from jaxpipe.schedule.families.family import family
from jaxpipe.schedule.ir import Schedule
from jaxpipe.schedule.placement import wave
from jaxpipe.schedule.problem import Problem


@family(
    "hanayo",
    "waves down and up the ranks (--chunks: two a wave): 1F1B's memory, the bubble divided by v",
    "Liu et al. 2023 (Hanayo)",
    placement=wave,
    peak_activations=lambda p, m, v: min(p, m) if m < p or m % p == 0 else None,
    makespan=lambda p, m, v, f, b, w: (
        m * (f + b + w) + (p - 1) * 2 / v * max(f, b + w) if v % 2 == 0 and m == p else None
    ),
    picture={"ranks": 3, "microbatches": 3},
)
def hanayo(ranks: int, microbatches: int, chunks: int = 2, costs: CostProfile | None = None) -> Schedule:
    """Hanayo for any ``ranks`` p, ``microbatches`` m and ``chunks`` v per rank (v/2 waves), all >= 1::

        rank 0 |F0- F1- F2-         F0b BW0b--- F1b BW1b--- F2b BW2b---         BW0----         BW1----         BW2----
        rank 1 |    F0- F1-     F0b F2- F1b     BW0b--- F2b BW1b---     BW0---- BW2b--- BW1----         BW2----
        rank 2 |        F0- F0b F1- F1b F2- F2b         BW0b--- BW0---- BW1b--- BW1---- BW2b--- BW2----

    With even v, equal stages and no transfer time, m = p idles (p − 1)(2/v) max(F, B + W): for W waves and B + W = 2F a bubble
    of (2p − 2)/(3pW + 2p − 2). A rank holds at most min(p, m) activations, as in 1F1B. ``costs``: one entry per stage (p·v).

    Raises:
        ScheduleError: a size is not a whole number of at least 1, or the costs are for another number of stages.
    """
    problem = Problem.of(wave(ranks, chunks), microbatches, costs)
    return problem.schedule("hanayo", units_in_a_row(problem).rows)
