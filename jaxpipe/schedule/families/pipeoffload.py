"""PipeOffload's order of work, without its offloads: GIS-H's building block repeated uniformly.

Source: `pipeoffload.txt` sections 2 and 3.2. Each microbatch comes v turns (of F, B, W) after the one before, where GIS runs a
group chunk by chunk. Its chunks are ⌈p/2⌉ turns apart on a rank, as in GIS-H (more where the costs need it), and one turn more
where two chunks would otherwise want the same turn, modulo v: the paper's "minor modifications to prevent collisions".

What a chunk adds to the peak is then proportional to its lifespan: chunk c lives about (v − 1 − c)p + p turns. The longer-lived
half holds three quarters of the peak when v is large, so offloading it leaves a quarter;
:mod:`~jaxpipe.schedule.families.pipeoffload_offloaded` adds that.
"""

from __future__ import annotations

from jaxpipe.schedule.blocks.block import BuildingBlock
from jaxpipe.schedule.blocks.repeat import repeat
from jaxpipe.schedule.costs import CostProfile
from jaxpipe.schedule.families.family import family
from jaxpipe.schedule.families.gis import interleaved_block, smallest_group
from jaxpipe.schedule.ir import Schedule
from jaxpipe.schedule.list_schedule.fillers import improved
from jaxpipe.schedule.placement import circular
from jaxpipe.schedule.problem import Problem


@family(
    "po",
    "PipeOffload's order without offload: GIS-H's block, one microbatch after the other",
    "pipeoffload.txt §2, §3.2",
    placement=circular,
    picture={"ranks": 3, "microbatches": 4, "chunks": 2},
)
def pipeoffload(ranks: int, microbatches: int, chunks: int = 2, costs: CostProfile | None = None) -> Schedule:
    """PipeOffload without offload, for any ``ranks`` p, ``microbatches`` m and ``chunks`` v per rank, all >= 1::

        rank 0 |F0- F1- F2- F0b F1b F3-         B0b W0b F2b B1b W1b B0- F3b B2b W0- B1- W2b B3b B2- W1- B3- W3b W2- W3-
        rank 1 |    F0- F1- F2- F0b F1b F3- B0b W0b B1b W1b F2b B0- W0- B2b F3b B1- W2b B3b B2- W1- B3- W3b W2- W3-
        rank 2 |        F0- F1- F2- F0b B0b F1b B1b F3- B0- W0b F2b B2b B1- W1b F3b B3b B2- W0- B3- W2b W1- W3b W2- W3-

    Raises:
        ScheduleError: a size is not a whole number of at least 1, or the costs are for another number of stages.
    """
    problem = Problem.of(circular(ranks, chunks), microbatches, costs)
    return problem.schedule("po", improved(problem, [po_rows(problem)]).rows)


def po_rows(problem: Problem) -> list[list[int]]:
    """The uniform order itself, each W right after its B and gaps left open: what offloads are placed on.

    ``problem``: on :func:`~jaxpipe.schedule.placement.circular`. Filling gaps makes activations live longer, which is free at
    the peak of this order but not at the peak that is left after offloading.
    """
    chunks = problem.num_replicas // problem.num_ranks
    return repeat(po_block(problem.num_ranks, chunks, shortest_distance(problem)), problem)


def po_block(ranks: int, chunks: int, distance: int | None = None) -> BuildingBlock:
    """The building block of one microbatch, whose chunks are ``distance`` turns apart or a few more (default: ⌈p/2⌉)."""
    turns = [0]
    while len(turns) < chunks:
        turn = turns[-1] + (smallest_group(ranks) if distance is None else distance)
        while any((turn - other) % chunks == 0 for other in turns):
            turn += 1
        turns.append(turn)
    return interleaved_block(ranks, turns)


def shortest_distance(problem: Problem) -> int:
    """The fewest turns between the chunks of a microbatch for which F and B come round all ranks in time, with real costs.

    ⌈p/2⌉, or more (up to p) where F or B is so large a part of F + B + W that p of them take longer than that many turns of
    the busiest rank: then a shorter distance costs more time than 1F1B takes. Transfers are left out.
    """
    p = problem.num_ranks
    turn_s = [0.0] * p
    for r, f, b, w in zip(problem.rank, problem.f_s, problem.b_s, problem.w_s, strict=True):
        turn_s[r] += f + b + w
    distance = smallest_group(p)
    round_s = max(sum(problem.f_s), sum(problem.b_s)) * (1 - 1e-9)
    while distance < p and distance * max(turn_s) < round_s:
        distance += 1
    return distance
