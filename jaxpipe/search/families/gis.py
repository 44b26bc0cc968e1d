"""Generalized interleaved schedules: interleaved 1F1B with B and W apart, a shorter warm-up, and groups of any size.

Source: `pipeoffload.txt` section 3 (GIS, G(T), GIS-H), figures 5 and 6. A rank's time is cut into turns of F, B, W. The
microbatches of a *group* go through a rank's chunks in turn, as in interleaved 1F1B; the smaller the group, the sooner its B
follow its F and the less a rank holds. Rank r runs (v − 1)g + p − r F before its first B, so rank 0 holds (v − 1)g + p chunks
of activations, 1/v of its share each. A group needs ⌈p/2⌉ microbatches: with fewer, F and B have not come round all ranks
when the next chunk of the group is due, and every round waits. That is counted with F = B = W; where B alone takes more than
half of F + B + W, rounds wait in groups of ⌈p/2⌉ too, and a larger group is faster.

The paper runs each W right after its B and leaves the gaps. Here gaps are filled with real costs, at no more memory, and the
result is kept if it is no worse than the paper's order in makespan, longest span and peak at once. With F = B = W that
halves GIS's idle time of p − 1 F and p − 1 B of a chunk.

The authors leave the last group short when m is not a multiple of it. Here the first or the second may be short instead, or
all groups smaller and even; real costs decide.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule.costs import CostProfile
from jaxpipe.schedule.families.family import family
from jaxpipe.schedule.ir import Schedule
from jaxpipe.schedule.placement import circular
from jaxpipe.schedule.problem import CodeRows, Problem
from jaxpipe.search.blocks.block import BuildingBlock, repeat
from jaxpipe.search.list_schedule.fillers import improved


@family(
    "gis",
    "interleaved 1F1B with B and W apart and a shorter warm-up (--chunks, default 2): 1F1B's memory",
    "pipeoffload.txt §3.1",
    placement=circular,
    peak_activations=lambda p, m, v: min(p, m),
    makespan=lambda p, m, v, f, b, w: m * (f + b + w) + (p - 1) * f / v if m % p == 0 and f == b == w else None,
    picture={"ranks": 2, "microbatches": 4, "chunks": 2},
)
def gis(ranks: int, microbatches: int, chunks: int = 2, costs: CostProfile | None = None) -> Schedule:
    """GIS: groups of p microbatches, for any ``ranks`` p, ``microbatches`` m and ``chunks`` v per rank, all >= 1::

        rank 0 |F0- F1- F0b F1b     B0b W0b F2- B1b W1b F3- B0- W0- F2b B1- W1- F3b B2b W2b B3b B2- B3- W3b W2- W3-
        rank 1 |    F0- F1- F0b B0b F1b B1b B0- W0b F2- B1- W1b F3- W0- F2b B2b W1- F3b B3b B2- B3- W2b W3b W2- W3-

    Raises:
        ScheduleError: a size is not a whole number of at least 1, or the costs are for another number of stages.
    """
    return _in_groups("gis", Problem.of(circular(ranks, chunks), microbatches, costs), ranks)


@family(
    "gis-g",
    "GIS in groups of p/2 to p microbatches (--group): the smaller, the less memory and the longer the warm-up",
    "pipeoffload.txt §3.2, G(T)",
    placement=circular,
    picture={"ranks": 4, "microbatches": 3, "chunks": 2, "group": 3},
)
def gis_g(
    ranks: int, microbatches: int, chunks: int = 2, costs: CostProfile | None = None, group: int | None = None
) -> Schedule:
    """G(T): groups of ``group`` microbatches (default p), from ⌈p/2⌉ to p::

        rank 0 |F0- F1- F2-     F0b F1b F2b                 B0b W0b B1b W1b B2b B0- B1- W2b B2- W0- W1- W2-
        rank 1 |    F0- F1- F2-     F0b F1b F2b         B0b W0b B1b W1b B2b B0- B1- W2b B2- W0- W1- W2-
        rank 2 |        F0- F1- F2-     F0b F1b F2b B0b W0b B1b W1b B2b B0- B1- W2b B2- W0- W1- W2-
        rank 3 |            F0- F1- F2-     F0b B0b F1b B1b F2b B2b B0- B1- W0b B2- W1b W2b W0- W1- W2-

    Raises:
        ScheduleError: a size is not a whole number of at least 1, ``group`` is outside its range, or the costs are for
            another number of stages.
    """
    g = ranks if group is None else group
    least = smallest_group(ranks)
    if not least <= g <= ranks:
        raise ScheduleError(f"gis-g: a group of {g} does not suit {ranks} ranks; use a group from {least} to {ranks}")
    return _in_groups("gis-g", Problem.of(circular(ranks, chunks), microbatches, costs), g)


@family(
    "gis-h",
    "GIS in groups of p/2, the smallest: towards half of 1F1B's memory with more chunks",
    "pipeoffload.txt §3.2, GIS-H",
    placement=circular,
    peak_activations=lambda p, m, v: min((v - 1) * smallest_group(p) + p, v * m) / v if m >= p else None,
    picture={"ranks": 3, "microbatches": 4, "chunks": 2},
)
def gis_h(ranks: int, microbatches: int, chunks: int = 2, costs: CostProfile | None = None) -> Schedule:
    """GIS-H: the smallest groups, ⌈p/2⌉ microbatches::

        rank 0 |F0- F1- F2- F0b F1b             B0b W0b F3- B1b W1b F2b B0- W0- F3b B1- W1- B2b W2b B3b B2- W3b B3- W2- W3-
        rank 1 |    F0- F1- F2- F0b F1b     B0b W0b B1b B0- F3- W1b W0- F2b B1- W1- F3b B2b W2b B3b B2- W3b B3- W2- W3-
        rank 2 |        F0- F1- F2- F0b B0b F1b B1b B0- W0b W1b F3- B1- W0- F2b B2b W1- F3b B3b B2- W2b B3- W3b W2- W3-

    Raises:
        ScheduleError: a size is not a whole number of at least 1, or the costs are for another number of stages.
    """
    return _in_groups("gis-h", Problem.of(circular(ranks, chunks), microbatches, costs), smallest_group(ranks))


def smallest_group(ranks: int) -> int:
    """Return the fewest microbatches that may go through a chunk in turn: ⌈p/2⌉.

    From F of a chunk to F of the next are 3g cells on rank 0, and as many from B to B. These 6g must hold a trip of F and one
    of B through the ranks: p − 1 steps of 3 cells, one F step and one B step, and the last F and B. So 6g >= 3p − 1.
    """
    return -(-ranks // 2)


def interleaved_block(ranks: int, turns: Sequence[int], *, group: int = 0, fused: bool = False) -> BuildingBlock:
    """Return the building block of a microbatch whose chunk c runs F in turn ``turns[c]`` of rank 0, and B of the last chunk as
    soon as it can; B of the other chunks follow at the same distances. A turn is three cells: F, B, W.

    ``group``: microbatches in a group, one turn apart, groups coming every group × v turns; 0: microbatches v turns apart.
    ``fused``: a turn is F and BW, and ranks start 1 cell after each other, which needs chunks p turns apart.

    With B and W apart ranks start 1 or 2 cells after each other, so that both F and B come round before the next chunk's
    turn. This needs chunks at least ⌈p/2⌉ turns apart.
    """
    p, v = ranks, len(turns)
    distance = min((b - a for a, b in pairwise(turns)), default=p)
    late = 0 if fused else min(p - 1, 3 * distance - p)
    cells = [r + min(r, late) for r in range(p)]
    forward = [3 * turn + cell for turn in turns for cell in cells]
    back = [3 * (turns[-1] + turn + p - 1 - r) + cells[r] + 1 for turn in reversed(turns) for r in range(p)]
    return BuildingBlock(
        circular(p, v),
        interval=3 if group else 3 * v,
        forward=(tuple(forward),),
        backward=(tuple(back),),
        weight=() if fused else (tuple(cell + 1 for cell in back),),
        group=group,
        group_interval=3 * v * group,
    )


def group_block(ranks: int, chunks: int, group: int) -> BuildingBlock:
    """Return the building block of G(T): a group runs all its microbatches through one chunk, then through the next."""
    return interleaved_block(ranks, range(0, chunks * group, group), group=group)


def _in_groups(name: str, problem: Problem, group: int) -> Schedule:
    return problem.schedule(name, improved(problem, [*_orders(problem, group)]).rows)


def _orders(problem: Problem, group: int) -> Iterator[CodeRows]:
    """Yield the paper's order; where its last group is short, also those with the first or second short, or all smaller."""
    p, m, chunks = problem.num_ranks, problem.num_microbatches, problem.placement.num_chunks
    block, missing = group_block(p, chunks, group), -m % group
    yield repeat(block, problem)
    if missing:
        for first in (0, group) if m > 2 * group else (0,):
            yield repeat(block, problem, [*range(first), *[-1] * missing, *range(first, m)])
        # as many groups, all about equally small
        even = -(-m // -(-m // group))
        if smallest_group(p) <= even < group:
            yield repeat(group_block(p, chunks, even), problem)
