"""Interleaved 1F1B at 1F1B's memory: the same bubble as interleaved 1F1B with p − 1 chunks less.

Source: `controllable-memory.txt` appendix I, figure 16c ("a variation of interleaved 1F1B with the same bubble rate but lower
memory"). The figure is lost in the text that this was made from; the block here is reconstructed from that sentence and may
differ from the drawn one. Time goes in turns of three cells, F then BW. F of chunk c runs in turn cp of rank 0 and moves on
one cell per rank, so it comes round just before the next chunk's turn. BW of the last chunk follows its F on the last rank
at once and comes up two cells per rank, that is, one turn per rank later and one cell earlier within the turn, as F moves:
F keeps the first cell of a rank's turns, BW the other two, and nothing ever meets. Chunks of B are p turns apart as well.

A rank holds vp chunks at most, p shares, where interleaved 1F1B holds (v + 1)p − 1 chunks. Less is not possible at this
makespan: with one chunk less every schedule is 3 cells longer (:func:`~jaxpipe.schedule.bounds.lower_bound`; a test).
"""

from __future__ import annotations

from jaxpipe.schedule.blocks import BuildingBlock, repeat
from jaxpipe.schedule.costs import CostProfile
from jaxpipe.schedule.families.family import family
from jaxpipe.schedule.families.gis import interleaved_block
from jaxpipe.schedule.families.interleaved import best_order, slots
from jaxpipe.schedule.ir import Schedule
from jaxpipe.schedule.list_schedule.fillers import improved
from jaxpipe.schedule.placement import circular
from jaxpipe.schedule.problem import Problem


def low_memory_block(ranks: int, chunks: int) -> BuildingBlock:
    """The block of one microbatch; groups of p, one turn apart within a group."""
    return interleaved_block(ranks, range(0, chunks * ranks, ranks), group=ranks, fused=True)


@family(
    "interleaved-low-memory",
    "interleaved 1F1B's bubble at 1F1B's memory, v chunks per rank (--chunks, default 2)",
    "Controllable Memory (Qi, Wan et al. 2024) appendix I, figure 16c (reconstructed)",
    placement=circular,
    peak_activations=lambda p, m, v: min(p, m) if m % p == 0 else None,
    makespan=lambda p, m, v, f, b, w: (m + (p - 1) / v) * (f + b + w) if m % p == 0 else None,
    picture={"ranks": 2, "microbatches": 4, "chunks": 2},
)
def interleaved_low_memory(
    ranks: int, microbatches: int, chunks: int = 2, costs: CostProfile | None = None
) -> Schedule:
    """Interleaved 1F1B with less memory for any ``ranks`` p, ``microbatches`` m and ``chunks`` v per rank, all >= 1::

        rank 0 |F0- F1- F0b F1b         BW0b--- F2- BW1b--- F3- BW0---- F2b BW1---- F3b BW2b---     BW3b--- BW2---- BW3----
        rank 1 |    F0- F1- F0b BW0b--- F1b BW1b--- F2- BW0---- F3- BW1---- F2b BW2b--- F3b BW3b--- BW2---- BW3----

    (``b`` marks the second chunk of a rank.) With m a multiple of p, equal stages and no transfer time the makespan is
    m(F + B + W) + (p − 1)(F + B + W)/v, that of interleaved 1F1B, and a rank holds min(vp, vm) chunks, 1/v of its share each.
    Otherwise whole microbatches are left out of the next multiple of p; which, and small changes of order, is decided with the
    real ``costs`` (one entry per stage, p·v).

    Raises:
        ScheduleError: a size is not a whole number of at least 1, or the costs are for another number of stages.
    """
    problem = Problem.of(circular(ranks, chunks), microbatches, costs)
    block = low_memory_block(ranks, chunks)
    orders = [repeat(block, problem, places) for places in slots(microbatches, ranks, chunks)]
    return problem.schedule("interleaved-low-memory", improved(problem, [best_order(problem, orders)]).rows)
