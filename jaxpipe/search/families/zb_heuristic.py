"""The zero-bubble heuristic: orders F, B and W by real costs under a memory limit (``zb``, and ``zb-1p``, ``zb-2p`` and
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
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from heapq import nsmallest
from itertools import count
from math import isnan

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule.clock import ROUNDING
from jaxpipe.schedule.costs import CostProfile
from jaxpipe.schedule.families.family import family
from jaxpipe.schedule.families.one_f_one_b import fused_row, h1_rows, h2_rows, split_row
from jaxpipe.schedule.ir import Schedule
from jaxpipe.schedule.placement import Placement, one_to_one
from jaxpipe.schedule.problem import BW, OPS, B, Problem, W
from jaxpipe.schedule.timeline import Objective
from jaxpipe.search.blocks.block import BuildingBlock, repeat, with_weight_gradients
from jaxpipe.search.bounds import lower_bounds
from jaxpipe.search.list_schedule.fillers import RECIPES, GapFiller
from jaxpipe.search.list_schedule.policies import WeightFilling, chain_drafts, full_limit, least_limit, refilled
from jaxpipe.search.retime import SLACK, Draft, Retimer, best_of

_REFILLED, _PASSES, _ACTIONS, _BLOCK_ACTIONS = 3, 30, 20_000, 40_000


@family(
    "zb",
    "the zero-bubble heuristic with real costs under any --memory-limit >= 1 (default p)",
    "Qi et al. 2023 (Zero Bubble) §3.1",
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
    return _zero_bubble("zb", ranks, microbatches, costs, memory_limit, objective)


def _zero_bubble(
    name: str,
    ranks: int,
    microbatches: int,
    costs: CostProfile | None,
    limit: float | None,
    objective: Objective,
    activations: int | None = None,
) -> Schedule:
    problem, limit, bounds = problem_within(name, one_to_one(ranks), microbatches, costs, limit, activations)
    return problem.schedule(name, best_draft(problem, limit, bounds, objective).rows)


def problem_within(
    name: str,
    placement: Placement,
    microbatches: int,
    costs: CostProfile | None,
    limit: float | None,
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
    (
        "zb-1p",
        lambda p: p,
        "the zero-bubble heuristic with real costs, at 1F1B's memory (limit p)",
        "Qi et al. 2023 (Zero Bubble) §3.1; controllable-memory.txt §4",
    ),
    (
        "zb-2p",
        lambda p: 2 * p,
        "the zero-bubble heuristic with real costs, at twice 1F1B's memory (limit 2p)",
        "Qi et al. 2023 (Zero Bubble) §3.1; controllable-memory.txt §4",
    ),
    (
        "zb-two-thirds",
        lambda p: min(p, p // 3 * 2 + 2),
        "the zero-bubble heuristic with real costs, at about 2/3 of 1F1B's memory",
        "Controllable Memory (Qi, Wan et al. 2024) appendix I (the memory of its block)",
    ),
)
"""Families that are ``zb`` at one limit: name, activations that a rank of p has room for, description, source."""


def _at_limit(name: str, activations: Callable[[int], int]) -> Callable[..., Schedule]:
    def at_limit(
        ranks: int, microbatches: int, costs: CostProfile | None = None, objective: Objective = "makespan"
    ) -> Schedule:
        """Schedule as :func:`zero_bubble` does, at the memory limit of the family's row in :data:`_AT_LIMITS`.

        Raises:
            ScheduleError: a size is not a whole number of at least 1, or ``costs`` is for another number of stages.
        """
        return _zero_bubble(name, ranks, microbatches, costs, None, objective, activations(ranks))

    return at_limit


for _name, _activations, _description, _source in _AT_LIMITS:
    family(_name, _description, _source, picture={})(_at_limit(_name, _activations))


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
            if top and top[0].makespan <= bounds[0] * SLACK and top[0].span <= bounds[1] * SLACK:
                return top[0]
            tops[goal] = nsmallest(_REFILLED, [*top, draft], key=lambda d, goal=goal: d.key(goal))  # type: ignore[misc]
    filling = WeightFilling(problem, limit + ROUNDING, retimer)
    passes = min(_PASSES, _ACTIONS // (3 * problem.num_ranks * problem.num_microbatches))
    bests = (
        best_of([*top, *(refilled(filling, d, passes) for d in top)], objective=goal) for goal, top in tops.items()
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
    tries = min(len(RECIPES), _BLOCK_ACTIONS // max(1, 3 * problem.num_ranks * problem.num_microbatches))
    for distance in (2, 4):
        draft = gap_filler.best(repeat(two_thirds_block(problem.num_ranks, distance), problem), limit, tries)
        if draft is not None:
            yield draft
