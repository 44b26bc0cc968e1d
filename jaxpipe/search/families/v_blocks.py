"""V-Min, V-Half and 1F1B-V: the fixed building blocks on the V placement, two chunks per rank.

Source: Qi, Wan et al. 2024 (Pipeline Parallelism with Controllable Memory), sections 3.1 and 3.2, appendix F (offsets that
depend on p) and appendix I (1F1B-V). The block is repeated, squeezed and reordered with the real costs
(:mod:`jaxpipe.search.blocks`), never above the memory that the block itself holds in its steady phase.

Where Table 9 leaves a choice: V-Half turns with offsets (1, 2) (F on the last rank, B on the last rank), as the authors' code
does, not (2, 1) as the table has it; both are free of collisions, and (1, 2) lives shorter.
"""

from __future__ import annotations

from itertools import pairwise

from jaxpipe.schedule.costs import CostProfile
from jaxpipe.schedule.families.family import family
from jaxpipe.schedule.ir import Schedule
from jaxpipe.schedule.placement import v_shape
from jaxpipe.schedule.problem import Problem
from jaxpipe.search.blocks.block import BuildingBlock, cells_of, compact, repeat
from jaxpipe.search.list_schedule.fillers import GapFiller, recipe_budget, score

_ACTIONS = 80_000


def v_min_block(ranks: int) -> BuildingBlock:
    """δ⁰ = δ¹ = 1 (Table 8): lifespans of a third of 1F1B's."""
    p = ranks
    return BuildingBlock.of_chain(
        v_shape(p), 6, forward=[1] * (2 * p - 1), turn=3 if p % 3 == 0 else 1, backward=[1] * (2 * p - 1)
    )


def v_half_block(ranks: int) -> BuildingBlock:
    """δ⁰ = 2, δ¹ = 1 (Table 9): lifespans of half of 1F1B's."""
    down, up = [2] * (ranks - 1), [1] * (ranks - 1)
    turn = 4 if ranks % 2 == 0 else 1
    return BuildingBlock.of_chain(v_shape(ranks), 6, forward=[*down, 1, *up], turn=turn, backward=[*down, 2, *up])


def one_f_one_b_v_block(ranks: int) -> BuildingBlock:
    """δ = 1 for F, and each BW at the first cell where it fits: every three ranks take 2, 2 and 5 cells.

    On each rank the two F leave four residues modulo 6, which make two pairs of neighbours in one way: the slots of its BW.
    """
    p = ranks
    cell, backward = 2 * p, []
    slots = [_slots(r, 2 * p - 1 - r) for r in range(p)]
    for stage in reversed(range(2 * p)):
        rank = stage if stage < p else 2 * p - 1 - stage
        while cell % 6 not in slots[rank]:
            cell += 1
        slots[rank].remove(cell % 6)
        backward.append(cell)
        cell += 2
    return BuildingBlock.of_chain(
        v_shape(p),
        6,
        forward=[1] * (2 * p - 1),
        turn=backward[0] - (2 * p - 1),
        backward=[b - a for a, b in pairwise(backward)],
        fused=True,
    )


def _slots(*forward: int) -> set[int]:
    """Residues at which a BW may start so that both BW of the rank fit between its F."""
    free = set(range(6)) - {c % 6 for c in forward}
    first = min(c for c in free if (c - 1) % 6 not in free)
    return {first, next(c for c in sorted(free - {first, (first + 1) % 6}) if (c + 1) % 6 in free)}


@family(
    "v-min",
    "V placement, least memory: about a third of 1F1B's",
    "Controllable Memory (Qi, Wan et al. 2024) §3.2, appendix F table 8",
    placement=v_shape,
    picture={"ranks": 2, "microbatches": 4},
)
def v_min(ranks: int, microbatches: int, costs: CostProfile | None = None) -> Schedule:
    """V-Min: the least memory of the V family, about a third of 1F1B's, for any p >= 1 and m >= 1::

        rank 0 |F0- F1- F2- F0b B0b W0b F1b B0- B1b W0- F3- B1- W1b F2b B2b W1- W2b B2- W2- F3b B3b W3b     B3- W3-
        rank 1 |    F0- F0b F1- F1b B0b B0- W0b F2- B1b B1- W0- F2b W1b F3- B2b B2- W1- F3b W2b W2- B3b B3- W3b W3-

    Raises:
        ScheduleError: a size is not a whole number of at least 1, or ``costs`` is for another number of stages.
    """
    return _repeated("v-min", v_min_block(ranks), microbatches, costs)


@family(
    "v-half",
    "V placement at half of 1F1B's memory",
    "Controllable Memory (Qi, Wan et al. 2024) §3.2, appendix F table 9",
    placement=v_shape,
    picture={"ranks": 2, "microbatches": 4},
)
def v_half(ranks: int, microbatches: int, costs: CostProfile | None = None) -> Schedule:
    """V-Half: half of 1F1B's memory and less bubble, for any p >= 1 and m >= 1::

        rank 0 |F0- F1- F2- F0b B0b W0b F1b B0- B1b W0- F3- W1b F2b B1- B2b W1- W2b F3b B3b B2- W3b B3- W2- W3-
        rank 1 |    F0- F0b F1- F1b B0b B0- W0b F2- W0- F2b B1b B1- W1b F3- W1- F3b B2b B2- B3b B3- W2b W2- W3b W3-

    Raises:
        ScheduleError: a size is not a whole number of at least 1, or ``costs`` is for another number of stages.
    """
    return _repeated("v-half", v_half_block(ranks), microbatches, costs)


@family(
    "1f1b-v",
    "1F1B on the V placement without splitting the backward: two thirds of 1F1B's memory",
    "Controllable Memory (Qi, Wan et al. 2024) appendix I, figure 16a",
    placement=v_shape,
    picture={"ranks": 2, "microbatches": 4},
)
def one_f_one_b_v(ranks: int, microbatches: int, costs: CostProfile | None = None) -> Schedule:
    """1F1B on the V placement, B and W fused: two thirds of 1F1B's memory, for any p >= 1 and m >= 1::

        rank 0 |F0- F1- F2- F0b BW0b--- F1b BW1b--- F3- BW0---- F2b BW2b---     BW1---- F3b BW3b---     BW2----         BW3----
        rank 1 |    F0- F0b F1- F1b     BW0b--- BW0---- F2- F2b BW1b--- BW1---- F3- F3b BW2b--- BW2---- BW3b--- BW3----

    Raises:
        ScheduleError: a size is not a whole number of at least 1, or ``costs`` is for another number of stages.
    """
    return _repeated("1f1b-v", one_f_one_b_v_block(ranks), microbatches, costs)


def _repeated(name: str, block: BuildingBlock, microbatches: int, costs: CostProfile | None) -> Schedule:
    problem = Problem.of(block.placement, microbatches, costs)
    rows = repeat(block, problem)
    gap_filler = GapFiller(problem)
    squeezed = gap_filler.retimer.draft(rows)
    assert squeezed is not None, "a repeated block deadlocks"
    tries = recipe_budget(problem, _ACTIONS)
    starts = rows, compact(problem, cells_of(block, problem))
    drafts = [gap_filler.best(start, squeezed.peak, tries) for start in starts]
    return problem.schedule(name, min((d for d in drafts if d is not None), key=score).rows)
