"""Families found with real costs under a memory limit: the zero-bubble heuristic of one chunk a rank, and V schedules of two.

**The zero-bubble heuristic** orders F, B and W by real costs under a memory limit (``zb``, and ``zb-1p``, ``zb-2p`` and
``zb-two-thirds``, which are ``zb`` at one limit).

Source: Qi et al. 2023 (Zero Bubble Pipeline Parallelism), section 3.1; `controllable-memory.txt` calls the heuristic at 1F1B's
memory ZB-1P and at twice that ZB-2P. Many drafts are made: list
schedules over a grid of policies (:mod:`~jaxpipe.search.list_schedule.policies`), and the fixed orders 1F1B, ZB-H1 and ZB-H2.
W are laid anew into the best few. Where a fused BW costs less than B + W, neighbours are fused.
Nothing more is tried once the lower bounds are reached.

For limits between two thirds of 1F1B's memory and all of it, the building block of appendix I is tried too.

Not made: the paper's own rounds (an F and a B of each rank in turn). Answers that had to be no worse than the rounds' in
makespan, span *and* peak were longer by 0.09% on average and by up to 3.8% (48 random chains), and as drafts like any other the
rounds changed no makespan of these or of the authors' cells.

At unit costs and limits p/4 to p the longest span equals or beats the best that CP-SAT found in FACTS.md's table (a test).
Not modelled: workspace of a running function, and ``cotangent_bytes``, which B adds while it runs.

**V placement**, two chunks per rank: fixed building blocks, and a search over blocks under any memory limit.

V-Min, V-Half and 1F1B-V: the fixed building blocks. Source: Qi, Wan et al. 2024 (Pipeline Parallelism with Controllable
Memory), sections 3.1 and 3.2, appendix F (offsets that depend on p) and appendix I (1F1B-V). The block is repeated, squeezed
and reordered with the real costs (:mod:`jaxpipe.search.blocks`), never above the memory that the block itself holds in its
steady phase.

Where Table 9 leaves a choice: V-Half turns with offsets (1, 2) (F on the last rank, B on the last rank), as the authors' code
does, not (2, 1) as the table has it; both are free of collisions, and (1, 2) lives shorter.

The adaptive V scheduler searches with real costs. Source: `controllable-memory.txt` appendix A. The blocks are those of
:func:`~jaxpipe.search.blocks.block.search_blocks`. Hundreds fit a limit, and few are worth a full evaluation:

1. those whose lifespans are the longest come first: within the limit, a longer life shortens warm-up and cool-down;
2. each gets warm-up and cool-down by rule (:mod:`~jaxpipe.search.blocks.block`); the best of these are kept;
3. others are repeated, squeezed with the real costs and their waits filled by a few recipes;
4. the best of both get all recipes, W laid anew, and the best of all is kept.

All of this is done with the microbatches of warm-up and cool-down only; the steady phase is then repeated up to the number
asked for.

Below the memory of the least block, V-Min's is repeated at longer intervals, down to one microbatch at a time. All work is
bounded by sizes.

``v-zb`` is this at 1F1B's memory. The V-ZB of the paper's Table 4 is a heuristic of rounds (section 3.2). At limit p it is ten
times as fast and its makespans are 0.4% to 2.8% longer (12 cells, p from 4 to 16, Table 5's costs); its spans are 0.3% shorter
on average, 0.9% to 1.9% with p microbatches. Beside these blocks it was worth 0.00%, so it went.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from heapq import nsmallest
from itertools import count, islice, pairwise
from math import isnan

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule.clock import ROUNDING
from jaxpipe.schedule.costs import CostProfile
from jaxpipe.schedule.families.family import family
from jaxpipe.schedule.families.one_f_one_b import fused_row, h1_rows, h2_rows, split_row
from jaxpipe.schedule.ir import Schedule
from jaxpipe.schedule.placement import Placement, one_to_one, v_shape
from jaxpipe.schedule.problem import BW, OPS, B, CodeRows, Problem, W
from jaxpipe.schedule.timeline import Objective
from jaxpipe.search.blocks.block import (
    BuildingBlock,
    T,
    cells_of,
    cells_with_ends,
    compact,
    repeat,
    repeat_steady_phase,
    search_blocks,
    with_weight_gradients,
)
from jaxpipe.search.bounds import lower_bounds
from jaxpipe.search.list_schedule.fillers import RECIPES, GapFiller, recipe_budget, score
from jaxpipe.search.list_schedule.policies import WeightFilling, chain_drafts, full_limit, least_limit, refill_weights
from jaxpipe.search.retime import SLACK, Draft, Retimer, best_of, within

_QI = "Qi et al. 2023 (Zero Bubble) §3.1"
_WAN = "Controllable Memory (Qi, Wan et al. 2024)"
_CHAIN_REFILLED, _CHAIN_PASSES, _CHAIN_ACTIONS, _TWO_THIRDS_ACTIONS = 3, 30, 20_000, 40_000


@family(
    "zb",
    "the zero-bubble heuristic with real costs under any --memory-limit >= 1 (default p)",
    _QI,
    picture={"ranks": 4, "microbatches": 6, "memory_limit": 2},
)
def zero_bubble(
    ranks: int,
    microbatches: int,
    costs: CostProfile | None = None,
    memory_limit: float | None = None,
    objective: Objective = "makespan",
) -> Schedule:
    """The heuristic under ``memory_limit`` (default p, 1F1B's peak; where w-residuals are larger than residuals p of those), in
    units of one rank's share of one microbatch.

    Works for any ``ranks`` p >= 1, ``microbatches`` m >= 1 and limit >= 1. Here with a limit of 2, half of 1F1B's::

        rank 0 |F0 F1                B0 W0 B1 F2 W1 F3             B2 W2 B3 F4 W3 F5             B4 W4 B5 W5
        rank 1 |   F0 F1          B0 W0 B1 W1    F2    F3       B2 W2 B3 W3    F4    F5       B4 W4 B5 W5
        rank 2 |      F0 F1    B0 W0 B1 W1          F2    F3 B2 W2 B3 W3          F4    F5 B4 W4 B5 W5
        rank 3 |         F0 B0 F1 B1 W0 W1             F2 B2 F3 B3 W2 W3             F4 B4 F5 B5 W4 W5

    ``costs``: one stage per rank; default F = B = W. A rank whose w-residuals are smaller than its residuals gets more
    forwards under the same limit. ``objective``: what is minimised first, the makespan or the longest rank span.

    Raises:
        ScheduleError: a size is not a whole number of at least 1, ``costs`` is for another number of stages, or the limit is
            below what one microbatch needs.
    """
    problem, limit, bounds = problem_within("zb", one_to_one(ranks), microbatches, costs, memory_limit)
    return problem.schedule("zb", best_draft(problem, limit, bounds, objective).rows)


def problem_within(
    name: str,
    placement: Placement,
    microbatches: int,
    costs: CostProfile | None,
    limit: float | None = None,
    activations: int | None = None,
) -> tuple[Problem, float, tuple[float, float]]:
    """Return what the family ``name`` has to order, its memory limit, by default room for so many ``activations`` (default p),
    and the makespan and span that no order beats.

    Raises:
        ScheduleError: the sizes and costs don't match, or the limit is below what one microbatch needs.
    """
    costs = costs or CostProfile.uniform(placement.num_stages, chunks=placement.num_chunks)
    problem = Problem.of(placement, microbatches, costs)
    need = least_limit(problem)
    limit = need * (activations or placement.num_ranks) if limit is None else limit
    if isnan(limit) or limit < need / SLACK:
        raise ScheduleError(
            f"{name}: a memory limit of {limit:g} is below the {need:g} of one microbatch; use {need:g} or more"
        )
    return problem, limit, lower_bounds(placement, microbatches, costs, memory_limit=limit)


_AT_LIMITS: tuple[tuple[str, Callable[[int], int], str, str], ...] = (
    ("zb-1p", lambda p: p, "1F1B's memory (limit p)", f"{_QI}; controllable-memory.txt §4"),
    ("zb-2p", lambda p: 2 * p, "twice 1F1B's memory (limit 2p)", f"{_QI}; controllable-memory.txt §4"),
    (
        "zb-two-thirds",
        lambda p: min(p, p // 3 * 2 + 2),
        "about 2/3 of 1F1B's memory",
        f"{_WAN} appendix I (its memory)",
    ),
)
"""Families that are ``zb`` at one limit: name, activations that a rank of p has room for, in words, source."""


def _at_limit(name: str, activations: Callable[[int], int]) -> Callable[..., Schedule]:
    def at_limit(
        ranks: int, microbatches: int, costs: CostProfile | None = None, objective: Objective = "makespan"
    ) -> Schedule:
        """Schedule as :func:`zero_bubble` does, at the memory limit of the family's row in :data:`_AT_LIMITS`.

        Raises:
            ScheduleError: a size is not a whole number of at least 1, or ``costs`` is for another number of stages.
        """
        problem, limit, bounds = problem_within(
            name, one_to_one(ranks), microbatches, costs, activations=activations(ranks)
        )
        return problem.schedule(name, best_draft(problem, limit, bounds, objective).rows)

    return at_limit


for _name, _activations, _memory, _source in _AT_LIMITS:
    family(_name, f"the zero-bubble heuristic with real costs, at {_memory}", _source, picture={})(
        _at_limit(_name, _activations)
    )


def best_draft(
    problem: Problem,
    limit: float,
    bounds: tuple[float, float] = (0.0, 0.0),
    objective: Objective = "makespan",
) -> Draft:
    """Return the best of all drafts, W laid anew; stops early at one that takes no more than ``bounds``, a makespan and a span.

    The best by makespan and the best by span are finished for either objective: laying W anew into an order of short span may
    give the shortest makespan.
    """
    retimer = Retimer(problem)
    tops: dict[Objective, list[Draft]] = {"makespan": [], "span": []}
    for draft in _drafts(retimer, limit):
        for goal, top in tops.items():
            # as short as the bounds allow
            if top and _is_no_longer_than(top[0], bounds):
                return top[0]
            tops[goal] = nsmallest(_CHAIN_REFILLED, [*top, draft], key=lambda d, goal=goal: d.key(goal))  # type: ignore[misc]
    filling = WeightFilling(problem, limit + ROUNDING, retimer)
    passes = min(_CHAIN_PASSES, _CHAIN_ACTIONS // (3 * problem.num_ranks * problem.num_microbatches))
    bests = (
        best_of([*top, *(refill_weights(filling, d, passes) for d in top)], objective=goal)
        for goal, top in tops.items()
    )
    chosen = best_of((fuse_backwards(retimer, best, limit + ROUNDING) for best in bests if best), objective=objective)
    assert chosen is not None
    return chosen


def fuse_backwards(retimer: Retimer, draft: Draft, limit: float) -> Draft:
    """Return ``draft`` with one BW for each B whose W directly follows it, on those ranks where that makes it no longer.

    Only where a fused backward costs less than both. It puts the cotangent off until W's end, and keeps the whole activation
    as long, so it is taken rank by rank, never over ``limit``.
    """
    problem = retimer.problem
    kind = problem.num_replicas * problem.num_microbatches
    best = draft
    for rank, row in enumerate(draft.rows):
        stages = problem.replicas_of(rank)
        if all(problem.bw_s[k] >= problem.b_s[k] + problem.w_s[k] for k in stages):
            continue
        fused: list[int] = []
        for code in row:
            if fused and fused[-1] // kind == B and code == fused[-1] + (W - B) * kind:
                fused[-1] += (BW - B) * kind
            else:
                fused.append(code)
        tried = retimer.draft([fused if r == rank else other for r, other in enumerate(best.rows)])
        # the peak may rise up to the limit; makespan and span may not
        if tried is not None and tried.no_worse_than(replace(best, peak=limit)):
            best = tried
    return best


def _drafts(retimer: Retimer, limit: float) -> Iterator[Draft]:
    """Yield drafts within the limit, of which one always exists."""
    problem = retimer.problem
    p, m = problem.num_ranks, problem.num_microbatches
    need = least_limit(problem)
    # 1F1B's p - r forwards on rank r, as many of them as the limit holds
    in_flight = [int(min(p - r, limit / need + ROUNDING)) if need else p - r for r in range(p)]
    # 1F1B with B and W apart, then ZB-H1 and ZB-H2 (Qi et al. 2023, section 2)
    fixed: list[Sequence[Sequence[str]]] = [[split_row(k, 0, m) for k in in_flight], h1_rows(p, m), h2_rows(p, m)]
    if any(bw < b + w for bw, b, w in zip(problem.bw_s, problem.b_s, problem.w_s, strict=True)):
        fixed.append([fused_row(k, m) for k in in_flight])
    for rows in fixed:
        draft = retimer.draft([_in_order(problem, rank, ops) for rank, ops in enumerate(rows)])
        if draft is not None and draft.peak <= limit + ROUNDING:
            yield draft
    yield from chain_drafts(problem, limit)
    # On 32 random chains at limits of 0.7p to 0.95p, makespans are 0.47% longer without the block, 3.7% at most. Below 2p/3 it
    # does not fit, and from p on it never won in 96 chains.
    if 2 / 3 * full_limit(problem) <= limit < full_limit(problem):
        yield from block_drafts(problem, limit)


def _in_order(problem: Problem, rank: int, ops: Sequence[str]) -> list[int]:
    """Return the codes of a rank that issues ``ops``, each of which takes the microbatches in turn."""
    codes = {op: count(problem.code(number, rank, 0)) for number, op in enumerate(OPS)}
    return [next(codes[op]) for op in ops]


def two_thirds_block(ranks: int, distance: int = 2) -> BuildingBlock:
    """Return the block of two microbatches, a ``distance`` of 2 or 4 cells apart, every 6 cells.

    F goes down and B comes up one cell per rank, without a wait, so an activation lives about 2p cells; two of them start every
    6 cells, hence 2p/3 in memory. On rank r, F of the first takes residue r and its B 2p − 1 − r modulo 6: one is even, the
    other odd. The second microbatch keeps both parities, so its F and B take free residues too, and one residue of each parity
    is left for the two W. Reconstructed from what appendix I says of figure 16b, which is lost in the text that this was made
    from; it may differ from the drawn one.
    """
    forward = tuple(tuple(start + r for r in range(ranks)) for start in (0, distance))
    backward = tuple(tuple(start + 2 * ranks - 1 - r for r in range(ranks)) for start in (0, distance))
    after = tuple(tuple(cell + 1 for cell in row) for row in backward)
    return with_weight_gradients(BuildingBlock(one_to_one(ranks), 6, forward, backward, after))


def block_drafts(problem: Problem, limit: float) -> Iterator[Draft]:
    """Yield the repeated block reordered with real costs within ``limit``; nothing if the block needs more."""
    gap_filler = GapFiller(problem)
    tries = min(len(RECIPES), _TWO_THIRDS_ACTIONS // max(1, 3 * problem.num_ranks * problem.num_microbatches))
    for distance in (2, 4):
        draft = gap_filler.best(repeat(two_thirds_block(problem.num_ranks, distance), problem), limit, tries)
        if draft is not None:
            yield draft


_FIXED_BLOCK_ACTIONS = 80_000


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
    f"{_WAN} §3.2, appendix F table 8",
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
    return _repeat_block("v-min", v_min_block(ranks), microbatches, costs)


@family(
    "v-half",
    "V placement at half of 1F1B's memory",
    f"{_WAN} §3.2, appendix F table 9",
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
    return _repeat_block("v-half", v_half_block(ranks), microbatches, costs)


@family(
    "1f1b-v",
    "1F1B on the V placement without splitting the backward: two thirds of 1F1B's memory",
    f"{_WAN} appendix I, figure 16a",
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
    return _repeat_block("1f1b-v", one_f_one_b_v_block(ranks), microbatches, costs)


def _repeat_block(name: str, block: BuildingBlock, microbatches: int, costs: CostProfile | None) -> Schedule:
    problem = Problem.of(block.placement, microbatches, costs)
    rows = repeat(block, problem)
    gap_filler = GapFiller(problem)
    squeezed = gap_filler.retimer.draft(rows)
    assert squeezed is not None, "a repeated block deadlocks"
    tries = recipe_budget(problem, _FIXED_BLOCK_ACTIONS)
    # squeezed rank by rank and cell by cell: neither start gives the better result everywhere
    starts = rows, compact(problem, cells_of(block, problem))
    drafts = [gap_filler.best(start, squeezed.peak, tries) for start in starts]
    return problem.schedule(name, min((d for d in drafts if d is not None), key=score).rows)


_by_span = partial(Draft.key, objective="span")
# With these no row of tests/golden/authors_v.json that was tried (388 of 440) is behind the authors; fewer screened lost 0.5%.
_BLOCKS, _WITH_ENDS, _WITH_ENDS_FINISHED = 60, 24, 2
_SCREENED, _A_FEW, _SCREENED_FINISHED = 24, 3, 2
_ALL, _REFILLED, _PASSES = 20, 4, 16
_FULL_SEARCH, _ALL_STARTS_AT_P = 4_000, 1_000
"""Actions up to which all tries on a start are made, and for ``v-zb`` all starts are looked at; above, fewer by the square of
the size: ``v-zb`` at p = 16, m = 64 takes 2 CPU seconds instead of 8, for makespans that are 0.04% longer. At limit p/2 fewer
tries lose up to 0.8%, so ``v-adaptive`` keeps them."""


@family(
    "v-zb",
    "V placement at 1F1B's memory: almost no bubble, by real costs",
    f"{_WAN} §3.2, Table 4; appendix A",
    placement=v_shape,
    makespan=lambda p, m, v, f, b, w: m * (f + b + w) + (p - 1) * f / 2 if f == b == w and m >= p else None,
    picture={"ranks": 2, "microbatches": 4},
)
def v_zb(
    ranks: int, microbatches: int, costs: CostProfile | None = None, objective: Objective = "makespan"
) -> Schedule:
    """Schedule as :func:`v_adaptive` does at 1F1B's memory, p activations::

        rank 0 |F0- F1- F2- F0b B0b W0b F1b B1b W1b F3- B0- W0- F2b B2b W2b B1- W1- F3b B3b B2- W3b B3- W2- W3-
        rank 1 |    F0- F0b F1- F1b B0b W0b F2- B0- W0- F2b B1b W1b F3- B1- W1- F3b B2b B2- B3b B3- W2b W2- W3b W3-

    ``objective``: as :func:`v_adaptive`. (``b`` marks the second chunk of a rank.) ``costs``: one entry per stage, two stages
    per rank; default F = B = W. With F = B = W and no transfer time, m >= p gives a makespan of m(F + B + W) + (p - 1)F/2,
    which no schedule on this placement beats, and m >= 2p ranks that are never idle between their first and last action. The
    peak is above p only if w-residuals are larger than residuals: p of those.

    Raises:
        ScheduleError: a size is not a whole number of at least 1, or ``costs`` is for another number of stages.
    """
    return _adaptive_schedule("v-zb", ranks, microbatches, costs, None, objective, _ALL_STARTS_AT_P)


@family(
    "v-adaptive",
    "V placement, blocks searched with real costs under any --memory-limit >= 1 (default p)",
    f"{_WAN} appendix A",
    placement=v_shape,
    picture={"ranks": 3, "microbatches": 3, "memory_limit": 2},
)
def v_adaptive(
    ranks: int,
    microbatches: int,
    costs: CostProfile | None = None,
    memory_limit: float | None = None,
    objective: Objective = "makespan",
) -> Schedule:
    """The best V schedule found under ``memory_limit`` (default p, 1F1B's), in units of one rank's share of a microbatch::

        rank 0 |F0- F1- F2-         F0b B0b W0b         F1b B1b B0- W1b W0- F2b B2b B1- W2b W1-     B2- W2-
        rank 1 |    F0- F1- F2- F0b         B0b W0b F1b B0- W0- B1b W1b F2b     B1- B2b W1- W2b B2- W2-
        rank 2 |        F0- F0b F1- F1b         B0b B0- W0b W0- F2- F2b B1b B1- W1b W1- B2b B2- W2b W2-

    ``objective``: ``makespan`` weighs makespan and longest span against each other, ``span`` wants the shortest span.

    Raises:
        ScheduleError: a size is not a whole number of at least 1, ``costs`` is for another number of stages, or the limit is
            below what one microbatch needs.
    """
    return _adaptive_schedule("v-adaptive", ranks, microbatches, costs, memory_limit, objective)


def _adaptive_schedule(
    name: str,
    ranks: int,
    microbatches: int,
    costs: CostProfile | None,
    memory_limit: float | None,
    objective: Objective,
    all_starts: int = _FULL_SEARCH,
) -> Schedule:
    """Make the schedule ``name``: the search stops at one that takes no more than the bounds.

    For ``makespan``, the result is behind the block of shortest span with ends by rule in neither: choosing by score alone
    gives 0.3% longer spans in some authors' rows.
    """
    problem, limit, bounds = problem_within(name, v_shape(ranks), microbatches, costs, memory_limit)
    search = _BlockSearch(problem, limit, all_starts)
    with_ends = list(search.blocks_with_ends())
    drafts = [draft for draft, _ in with_ends]
    anchor = min(drafts, key=_by_span, default=None)
    for start in search.starts(with_ends):
        for draft in search.finish(start):
            drafts.append(draft)
            if _is_no_longer_than(draft, bounds):
                return problem.schedule(name, draft.rows)
    if objective == "makespan" and anchor is not None:
        drafts = [draft for draft in drafts if _is_no_longer_than(draft, (anchor.makespan, anchor.span))]
    return problem.schedule(name, min(drafts, key=_by_span if objective == "span" else score).rows)


def _is_no_longer_than(draft: Draft, enough: tuple[float, float]) -> bool:
    """Return whether makespan and span are no longer than these."""
    return draft.makespan <= enough[0] * SLACK and draft.span <= enough[1] * SLACK


class _BlockSearch:
    """Orders of ``problem`` under ``limit``, made for few microbatches, whose steady phase is then repeated.

    How much is tried goes by size and not by a clock: the same input gives the same schedule on any machine. ``all_starts``:
    actions up to which all starts are looked at.
    """

    def __init__(self, problem: Problem, limit: float, all_starts: int) -> None:
        few = min(problem.num_microbatches, 2 * problem.num_ranks + 4)
        self.problem, self.limit = replace(problem, num_microbatches=few), limit
        self.short = GapFiller(self.problem)
        # several starts and recipes make the same order
        self._longer = cache(self._lengthen)
        self.full = self.short if few == problem.num_microbatches else GapFiller(problem)
        actions = 3 * problem.num_replicas * few
        self.part, self.starts_part = (min(1.0, most / actions) for most in (_FULL_SEARCH, all_starts))
        weights = problem.reserved
        chunk = sum(weights) / len(weights)
        blocks = search_blocks(problem.num_ranks, limit / chunk if chunk > 0 else float("inf"))
        fitting = (b for b in blocks if max(b.steady_peaks(weights)) <= limit * SLACK)
        self.blocks = list(islice(fitting, self.starts_of(_BLOCKS)))

    def starts_of(self, count: int) -> int:
        """Return how many of ``count`` starts are looked at, one at least."""
        return max(1, int(count * self.starts_part**2))

    def tries_of(self, count: int, power: int = 2) -> int:
        """Return how many of ``count`` tries are made on a start, one at least."""
        return max(1, int(count * self.part**power))

    def blocks_with_ends(self) -> Iterator[tuple[Draft, CodeRows]]:
        """Yield the best blocks with ends by rule: drafts for all microbatches, and their rows for few."""
        cells = (cells_with_ends(block, self.problem) for block in self.blocks)
        drafts = within(
            (self.short.retimer.draft(compact(self.problem, x)) for x in cells if x is not None), self.limit
        )
        for draft in nsmallest(self.starts_of(_WITH_ENDS), drafts, key=_by_span):
            for longer in self.lengthen([draft]):
                yield longer, draft.rows

    def starts(self, with_ends: Sequence[tuple[Draft, CodeRows]]) -> Iterator[CodeRows]:
        """Yield rows worth finishing: the best with ends by rule, and repeated blocks that look best after a few recipes."""
        best = {score(draft): rows for draft, rows in with_ends}
        yield from (best[key] for key in sorted(best)[: self.starts_of(_WITH_ENDS_FINISHED)])
        blocks = self.blocks[: self.starts_of(_SCREENED)] or [_stretch_block(self.problem, self.limit)]
        plain = (repeat(block, self.problem) for block in blocks)
        yield from nsmallest(self.starts_of(_SCREENED_FINISHED), plain, key=self._score_by_a_few)

    def _score_by_a_few(self, rows: CodeRows) -> tuple[float, float]:
        """Return the best score of ``rows`` by a few recipes; infinite if none keeps the limit."""
        drafts = self.short.drafts(rows, self.limit, self.tries_of(_A_FEW))
        return min(map(score, drafts), default=(float("inf"), 0.0))

    def finish(self, rows: CodeRows) -> Iterator[Draft]:
        """Return ``rows`` by all recipes, W laid anew on the best, for all microbatches."""
        short, limit = self.short, self.limit
        tried = [*within([short.retimer.draft(rows)], limit), *short.drafts(rows, limit, self.tries_of(_ALL))]
        # W laid anew is what helps most for its time, so it shrinks less
        refills, passes = self.tries_of(_REFILLED, power=1), self.tries_of(_PASSES, power=1)
        filling = WeightFilling(self.problem, limit, short.retimer)
        best = nsmallest(refills, tried, key=score)
        tried += within([refill_weights(filling, draft, passes) for draft in best], limit)
        return self.lengthen(tried)

    def lengthen(self, drafts: Sequence[Draft]) -> Iterator[Draft]:
        """Return drafts for few microbatches as drafts for all of them; those that keep within the limit."""
        if self.full is self.short:
            return iter(drafts)
        return within((self._longer(tuple(map(tuple, draft.rows))) for draft in drafts), self.limit)

    def _lengthen(self, rows: CodeRows) -> Draft | None:
        longer = repeat_steady_phase(self.problem, rows, self.full.problem.num_microbatches)
        return self.full.retimer.draft(longer) if longer is not None else None


def _stretch_block(problem: Problem, limit: float) -> BuildingBlock:
    """V-Min's block at the shortest interval at which the limit holds; at its whole length it is one microbatch at a time."""
    block = v_min_block(problem.num_ranks)
    for interval in range(T, 12 * problem.num_ranks + T):
        wider = with_weight_gradients(replace(block, interval=interval))
        if not wider.collisions() and max(wider.steady_peaks(problem.reserved)) <= limit * SLACK:
            return wider
    raise AssertionError("one microbatch at a time is within the limit")
