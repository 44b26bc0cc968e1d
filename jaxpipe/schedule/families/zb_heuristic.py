"""The zero-bubble heuristic: orders F, B and W by real costs under a memory limit (``zb``, ``zb-1p``, ``zb-2p``).

Source: Qi et al. 2023 (Zero Bubble Pipeline Parallelism), section 3.1; `controllable-memory.txt` calls the heuristic at 1F1B's
memory ZB-1P and at twice that ZB-2P. The heuristic as the paper has it (:mod:`~jaxpipe.schedule.families.zb_rounds`), with its
shortest span, is the answer to beat wherever it fits in memory. Many more drafts are made, and the best of those that are no
worse in makespan, span *and* peak is kept: list schedules over a grid of policies
(:mod:`~jaxpipe.schedule.list_schedule.policies`), and the fixed orders 1F1B, ZB-H1 and ZB-H2. W are laid anew into the best
few. Where a fused BW costs less than B + W, neighbours are fused.
Nothing more is tried once the lower bounds are reached.

For limits below p the building block of `controllable-memory.txt`, appendix I is tried from 2p/3 on
(up to 4%). ``zb-two-thirds`` is ``zb`` at the memory of that block, which
often finds a better warm-up, and makes sure that the block itself, repeated and squeezed, is not better in anything.
At unit costs and limits p/4 to p the longest span equals or beats the best that CP-SAT found in FACTS.md's table (a test).
Not modelled: workspace of a running function, and ``cotangent_bytes``, which B adds while it runs.

The building block of two microbatches, whose F and B never meet, with two thirds of 1F1B's memory.

Source: `controllable-memory.txt` appendix I, figure 16b. The figure is lost in the text that this was made from; the block here
is reconstructed from what is said of it (two microbatches in a block, 2/3 of the memory, B and W apart) and may differ from
the drawn one. F goes down and B comes up one cell per rank, without a wait, so an activation lives about 2p cells; two of
them start every T = 6 cells, hence 2p/3 in memory. On rank r, F of the first takes residue r and its B 2p − 1 − r modulo 6:
one is even, the other odd. The second microbatch starts 2 (or 4) cells later, which keeps both parities, so its F and B take
free residues too, and one residue of each parity is left for the two W.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from heapq import nsmallest
from math import isnan

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule.blocks.block import BuildingBlock, with_weight_gradients
from jaxpipe.schedule.blocks.repeat import repeat
from jaxpipe.schedule.bounds import lower_bound, span_lower_bound
from jaxpipe.schedule.costs import CostProfile
from jaxpipe.schedule.families.family import family, in_order
from jaxpipe.schedule.families.one_f_one_b import fused_row
from jaxpipe.schedule.families.zb_h import h1_rows, h2_rows, split_row
from jaxpipe.schedule.families.zb_rounds import round_rows
from jaxpipe.schedule.ir import Schedule
from jaxpipe.schedule.list_schedule.choosers import full_limit, least_limit
from jaxpipe.schedule.list_schedule.fillers import RECIPES, Finisher
from jaxpipe.schedule.list_schedule.policies import chain_drafts
from jaxpipe.schedule.list_schedule.weights import WeightFilling, refilled
from jaxpipe.schedule.placement import one_to_one
from jaxpipe.schedule.problem import BW, B, Problem, W
from jaxpipe.schedule.retime import Draft, Objective, Retimer, best_of, nine_digits

_REFILLED, _PASSES, _ACTIONS, _BLOCK_ACTIONS = 3, 30, 20_000, 40_000


@family(
    "zb",
    "the zero-bubble heuristic with real costs under any --memory-limit >= 1 (default p)",
    "Qi et al. 2023 (Zero Bubble) §3.1; controllable-memory.txt appendix I for limits below p",
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


@family(
    "zb-1p",
    "the zero-bubble heuristic with real costs, at 1F1B's memory (limit p)",
    "Qi et al. 2023 (Zero Bubble) §3.1; controllable-memory.txt §4",
    picture={"ranks": 4, "microbatches": 6},
)
def zb_1p(
    ranks: int, microbatches: int, costs: CostProfile | None = None, objective: Objective = "makespan"
) -> Schedule:
    """The heuristic at 1F1B's memory, p activations::

        rank 0 |F0 F1 F2 F3          B0 W0 F4 B1 W1 F5 B2 W2 B3 W3 B4 W4 B5 W5
        rank 1 |   F0 F1 F2       B0 F3 B1 W0 F4 B2 W1 F5 B3 W2 B4 W3 B5 W4 W5
        rank 2 |      F0 F1    B0 F2 B1 F3 B2 W0 F4 B3 W1 F5 B4 W2 B5 W3 W4 W5
        rank 3 |         F0 B0 F1 B1 F2 B2 F3 B3 W0 F4 B4 W1 F5 B5 W2 W3 W4 W5

    Raises:
        ScheduleError: as :func:`zero_bubble`.
    """
    return _zero_bubble("zb-1p", ranks, microbatches, costs, None, objective)


@family(
    "zb-2p",
    "the zero-bubble heuristic with real costs, at twice 1F1B's memory (limit 2p)",
    "Qi et al. 2023 (Zero Bubble) §3.1; controllable-memory.txt §4",
    picture={"ranks": 4, "microbatches": 8},
)
def zb_2p(
    ranks: int, microbatches: int, costs: CostProfile | None = None, objective: Objective = "makespan"
) -> Schedule:
    """The heuristic at twice 1F1B's memory, 2p activations::

        rank 0 |F0 F1 F2 F3 F4 F5 F6 B0 F7 W0 B1 W1 B2 W2 B3 W3 B4 W4 B5 W5 B6 W6 B7 W7
        rank 1 |   F0 F1 F2 F3 F4 B0 F5 B1 F6 B2 F7 B3 W0 B4 W1 B5 W2 B6 W3 B7 W4 W5 W6 W7
        rank 2 |      F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 W0 B6 W1 B7 W2 W3 W4 W5 W6 W7
        rank 3 |         F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7 W0 W1 W2 W3 W4 W5 W6 W7

    Raises:
        ScheduleError: as :func:`zero_bubble`.
    """
    return _zero_bubble("zb-2p", ranks, microbatches, costs, None, objective, 2)


@family(
    "zb-two-thirds",
    "zero bubble at about 2/3 of 1F1B's memory: a building block of two microbatches",
    "Controllable Memory (Qi, Wan et al. 2024) appendix I, figure 16b (reconstructed)",
    picture={"ranks": 5, "microbatches": 6},
)
def zb_two_thirds(ranks: int, microbatches: int, costs: CostProfile | None = None) -> Schedule:
    """Zero bubble at about 2/3 of 1F1B's memory, for any ``ranks`` p >= 1 and ``microbatches`` m >= 1::

        rank 0 |F0 F1 F2 F3                B0 W0 B1 F4 W1 F5 B2 W2 B3 W3       B4 W4 B5 W5
        rank 1 |   F0 F1 F2             B0 F3 B1 W0 W1 F4 B2 F5 B3 W2 W3    B4    B5 W4 W5
        rank 2 |      F0 F1          B0 F2 B1 F3 W0 W1 B2 F4 B3 F5 W2 W3 B4    B5 W4 W5
        rank 3 |         F0 F1    B0 W0 B1 F2 W1 F3 B2 W2 B3 F4 W3 F5 B4 W4 B5 W5
        rank 4 |            F0 B0 F1 B1 W0 W1 F2 B2 F3 B3 W2 W3 F4 B4 F5 B5 W4 W5

    Every rank holds at most min(p, m, 2⌊p/3⌋ + 2) activations. Never worse than the block, repeated and squeezed, in
    makespan, longest span and peak (for p = 1 and 3, where the block needs more than 1F1B, than ``zb`` at limit p).
    ``costs``: one stage per rank; default F = B = W.

    Raises:
        ScheduleError: a size is not a whole number of at least 1, or ``costs`` is for another number of stages.
    """
    problem = Problem.of(one_to_one(ranks), microbatches, costs)
    retimer = Retimer(problem)
    squeezed = retimer.draft(repeat(two_thirds_block(ranks), problem))
    assert squeezed is not None, "a repeated block deadlocks"
    if squeezed.peak > full_limit(problem) * (1 + 1e-9):
        return problem.schedule("zb-two-thirds", best_draft(problem, full_limit(problem)).rows)
    drafts = [best_draft(problem, squeezed.peak)]
    if not drafts[0].no_worse_than(squeezed):
        drafts += block_drafts(problem, squeezed.peak)
    best = best_of(drafts, anchor=squeezed)
    assert best is not None
    return problem.schedule("zb-two-thirds", best.rows)


def _zero_bubble(
    name: str,
    ranks: int,
    m: int,
    costs: CostProfile | None,
    limit: float | None,
    objective: Objective,
    times: int = 1,
) -> Schedule:
    """Schedule under ``limit``, by default ``times`` 1F1B's memory."""
    if costs is None:
        costs = CostProfile.uniform(ranks)
    problem = Problem.of(one_to_one(ranks), m, costs)
    need = least_limit(problem)
    if limit is not None and (isnan(limit) or limit < need):
        raise ScheduleError(
            f"{name}: a memory limit of {limit:g} is below the {need:g} of one microbatch; use {need:g} or more"
        )
    limit = times * full_limit(problem) if limit is None else limit
    makespan, span = (find(problem.placement, m, costs, memory_limit=limit) for find in (lower_bound, span_lower_bound))
    return problem.schedule(name, best_draft(problem, limit, makespan, span, objective).rows)


def best_draft(
    problem: Problem, limit: float, makespan: float = 0.0, span: float = 0.0, objective: Objective = "makespan"
) -> Draft:
    """Return the best of all drafts, W laid anew; stops early at one that takes no more than ``makespan`` and ``span``.

    The best by makespan is finished for either objective, so that choosing by span never gives a longer one.
    """
    retimer = Retimer(problem)
    anchor = _paper_draft(retimer, limit)
    peak = (limit if anchor is None else anchor.peak) + 1e-9
    tops: dict[Objective, list[Draft]] = {goal: [anchor] if anchor else [] for goal in ("makespan", objective)}
    for draft in _drafts(retimer, limit, peak):
        for goal, top in tops.items():
            # as short as the bounds allow
            if top and top[0].makespan <= makespan * (1 + 1e-9) and top[0].span <= span * (1 + 1e-9):
                return top[0]
            if anchor is None or draft.no_worse_than(anchor, goal):
                tops[goal] = nsmallest(_REFILLED, [*top, draft], key=lambda d, goal=goal: d.key(goal))  # type: ignore[misc]
    filling = WeightFilling(problem, peak, retimer)
    passes = min(_PASSES, _ACTIONS // (3 * problem.num_ranks * problem.num_microbatches))
    bests = (best_of([*top, *(refilled(filling, d, passes) for d in top)], anchor, goal) for goal, top in tops.items())
    chosen = best_of((fuse_backwards(retimer, best, peak) for best in bests if best), objective=objective)
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


def _paper_draft(retimer: Retimer, limit: float) -> Draft | None:
    """Return the shortest span of the heuristic's choices, the first of equals."""
    drafts = [draft for rows in round_rows(retimer.problem, limit) if (draft := retimer.draft(rows)) is not None]
    return min(drafts, key=lambda d: nine_digits(d.span), default=None)


def _drafts(retimer: Retimer, limit: float, peak: float) -> Iterator[Draft]:
    """Yield drafts within the limit, of which one always exists; building blocks only within ``peak``."""
    problem = retimer.problem
    p, m = problem.num_ranks, problem.num_microbatches
    need = least_limit(problem)
    # 1F1B's p - r forwards on rank r, as many of them as the limit holds
    in_flight = [int(min(p - r, limit / need + 1e-9)) if need else p - r for r in range(p)]
    # 1F1B with B and W apart, then ZB-H1 and ZB-H2 (Qi et al. 2023, section 2)
    fixed = [[split_row(k, 0, m) for k in in_flight], h1_rows(p, m), h2_rows(p, m)]
    if any(bw < b + w for bw, b, w in zip(problem.bw_s, problem.b_s, problem.w_s, strict=True)):
        fixed.append([fused_row(k, m) for k in in_flight])
    for rows in fixed:
        draft = retimer.draft(problem.codes(in_order("fixed", m, rows)))
        if draft is not None and draft.peak <= limit + 1e-9:
            yield draft
    yield from chain_drafts(problem, limit)
    if limit < full_limit(problem):
        yield from block_drafts(problem, peak)


def two_thirds_block(ranks: int, distance: int = 2) -> BuildingBlock:
    """Return the block: two microbatches at a ``distance`` of 2 or 4 cells, every 6 cells."""
    forward = tuple(tuple(start + r for r in range(ranks)) for start in (0, distance))
    backward = tuple(tuple(start + 2 * ranks - 1 - r for r in range(ranks)) for start in (0, distance))
    after = tuple(tuple(cell + 1 for cell in row) for row in backward)
    return with_weight_gradients(BuildingBlock(one_to_one(ranks), 6, forward, backward, after))


def block_drafts(problem: Problem, limit: float) -> Iterator[Draft]:
    """Yield the repeated block reordered with real costs within ``limit``; nothing if the block needs more."""
    finisher = Finisher(problem)
    tries = min(len(RECIPES), _BLOCK_ACTIONS // max(1, 3 * problem.num_ranks * problem.num_microbatches))
    for distance in (2, 4):
        draft = finisher.best(repeat(two_thirds_block(problem.num_ranks, distance), problem), limit, tries)
        if draft is not None:
            yield draft
