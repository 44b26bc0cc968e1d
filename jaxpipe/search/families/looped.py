"""Looped pipelines: stages dealt round-robin over the ranks, microbatches sent round the loop breadth-first or depth-first.

Source: Lamy-Poirier 2023 ("Breadth-first pipeline parallelism", arXiv 2211.05953), section 4; depth-first is his name for the
interleaving of Narayanan et al. 2021. Breadth-first sends all microbatches through a chunk before the next chunk starts:
every activation is kept, but a chunk's parameters are needed in one go (good with sharded parameters), its gradients are
complete early, and any m works without groups. Depth-first prefers the microbatch that is furthest.
"""

from __future__ import annotations

from jaxpipe.schedule.costs import CostProfile
from jaxpipe.schedule.families.family import family
from jaxpipe.schedule.ir import Action, Schedule
from jaxpipe.schedule.placement import circular
from jaxpipe.schedule.problem import Problem
from jaxpipe.search.families.interleaved import interleaved_one_f_one_b
from jaxpipe.search.list_schedule.fillers import improved


@family(
    "looped-bfs",
    "all microbatches through a chunk before the next (--chunks, default 2): GPipe's bubble divided by v",
    "Lamy-Poirier 2023 §4 (breadth-first pipeline parallelism)",
    placement=circular,
    peak_activations=lambda p, m, v: m,
    makespan=lambda p, m, v, f, b, w: (m + (p - 1 + (v - 1) * max(0, p - m)) / v) * (f + b + w),
    picture={"ranks": 2, "microbatches": 3, "chunks": 2},
)
def looped_bfs(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """Breadth-first looped pipeline for any ``ranks`` p, ``microbatches`` m and ``chunks`` v per rank, all >= 1::

        rank 0 |F0- F1- F2- F0b F1b F2b             BW0b--- BW1b--- BW2b--- BW0---- BW1---- BW2----
        rank 1 |    F0- F1- F2- F0b F1b F2b BW0b--- BW1b--- BW2b--- BW0---- BW1---- BW2----

    With equal stages and no transfer time the makespan is m(F + B + W) + (p − 1 + (v − 1) max(0, p − m))(F + B + W)/v: a loop
    waits for the first microbatch to come round when m < p. All m activations are held. One chunk gives GPipe.

    Raises:
        ScheduleError: a size is not a whole number of at least 1.
    """
    rows = []
    for rank in range(ranks):
        stages = range(rank, ranks * chunks, ranks)
        row = [Action("F", stage, i) for stage in stages for i in range(microbatches)]
        row += [Action("BW", stage, i) for stage in reversed(stages) for i in range(microbatches)]
        rows.append(tuple(row))
    return Schedule("looped-bfs", circular(ranks, chunks), microbatches, tuple(rows))


@family(
    "looped-dfs",
    "the furthest microbatch first, with real costs (--chunks, default 2); at least interleaved-1f1b",
    "Lamy-Poirier 2023 §4 (depth-first); Narayanan et al. 2021 §2.2.2",
    placement=circular,
    picture={"ranks": 2, "microbatches": 3, "chunks": 2},
)
def looped_dfs(ranks: int, microbatches: int, chunks: int = 2, costs: CostProfile | None = None) -> Schedule:
    """Depth-first looped pipeline for any ``ranks`` p, ``microbatches`` m and ``chunks`` v per rank, all >= 1::

        rank 0 |F0- F1- F0b F2- F1b     BW0b--- F2b     BW0---- BW1b---     BW2b--- BW1---- BW2----
        rank 1 |    F0- F1- F0b BW0b--- F2- F1b BW0---- BW1b--- F2b BW2b--- BW1---- BW2----

    It differs from ``interleaved-1f1b`` in that no groups of p are fixed: with the real ``costs`` (one entry per stage, p·v), a
    rank fills its waits with what is ready later in its row, as far as the memory of interleaved 1F1B goes; the best such order
    that is no worse than interleaved 1F1B in makespan, span and peak is taken.

    Raises:
        ScheduleError: a size is not a whole number of at least 1, or the costs are for another number of stages.
    """
    problem = Problem.of(circular(ranks, chunks), microbatches, costs)
    interleaved_rows = problem.codes(interleaved_one_f_one_b(ranks, microbatches, chunks, costs))
    return problem.schedule("looped-dfs", improved(problem, [interleaved_rows]).rows)
