"""The V-ZB heuristic: orders of F, B and W on a V placement by real costs, under any memory limit.

Source: `controllable-memory.txt` section 3.2 and Table 4. The paper's V-ZB block is one thing, the V-ZB of its Table 4
another: a heuristic, which is far better than any block at few microbatches. Here it is made of parts:

1. orders of F and B: rounds (:mod:`~jaxpipe.schedule.families.v_rounds`) and the (4, 2) block of figure 3d; where neither is
   good, for limits below p and for stages that differ much, list schedules (:mod:`~jaxpipe.schedule.list_schedule.policies`);
2. W filled in with real costs (:mod:`~jaxpipe.schedule.list_schedule.weights`). The rounds with the *even* rule are the
   *anchor*, equal to what the authors' heuristic finds up to ties; from p on, every later draft must be at least as good in
   makespan *and* in longest span;
3. passes of the *profile* rule toward targets a little below the best so far;
4. many microbatches: the search is done for few, and the steady phase is repeated
   (:func:`repeated`); the anchor is made for all of them.

The number of drafts depends on sizes only, never on a clock. Not modelled: workspace of a running function.

A rank in its steady phase runs the same operations for one microbatch after the other. Where a row contains such a period twice
in a row, it may as well contain it a hundred times; the rest of the row moves on by as many microbatches. Idle seconds of
warm-up and cool-down stay what they were, so a long search on few microbatches serves any number of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from heapq import nsmallest

from jaxpipe.schedule.blocks.repeat import repeat
from jaxpipe.schedule.costs import CostProfile
from jaxpipe.schedule.families.family import family
from jaxpipe.schedule.families.v_blocks import v_zb_block
from jaxpipe.schedule.families.v_rounds import rounds_order
from jaxpipe.schedule.ir import Schedule
from jaxpipe.schedule.list_schedule.choosers import full_limit
from jaxpipe.schedule.list_schedule.clock import ROUNDING
from jaxpipe.schedule.list_schedule.policies import chunk_drafts
from jaxpipe.schedule.list_schedule.weights import Filled, WeightFilling, balanced, improved, least, order_of
from jaxpipe.schedule.placement import v_shape
from jaxpipe.schedule.problem import Problem
from jaxpipe.schedule.retime import Draft, Objective, best_of

_ACTIONS, _MOST_PASSES = 700_000, 60
_LONGER = 3
_FAR = 1.05
"""From what no order beats, × that: above it list schedules are tried too. Rounds suit stages that are much alike."""


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
    between their first and last action. The peak is above p only if w-residuals are larger than residuals: p of those.

    Raises:
        ScheduleError: a size is not a whole number of at least 1, or ``costs`` is for another number of stages.
    """
    problem = Problem.of(v_shape(ranks), microbatches, costs)
    draft = best_v_draft(problem, full_limit(problem), objective)
    assert draft is not None, "one microbatch fits the least limit"
    return problem.schedule("v-zb", draft.rows)


def best_v_draft(problem: Problem, limit: float, objective: Objective = "makespan") -> Draft | None:
    """Return the best order found for ``problem`` (V placement) with a peak of at most ``limit``; None if nothing fits.

    ``limit``: activations per rank in units of one rank's share of one microbatch; 1F1B has p, that is 2p chunks.
    From a limit of p on, its makespan and its longest span are both at most those of the authors' heuristic.
    """
    # enough for a warm-up, a steady phase to repeat, and a cool-down
    few = 2 * problem.num_ranks + 4
    short = problem if problem.num_microbatches <= few + 2 else replace(problem, num_microbatches=few)
    at_p = _from_anchor(short, min(limit, full_limit(problem))) if limit > problem.num_ranks - ROUNDING else None
    best = None if at_p is None else _longer(problem, short, at_p, limit, objective)
    if best is None or best.makespan > _FAR * least(problem)[1]:
        return best_of([_below(problem, short, limit, objective)], best, objective)
    return best


def _longer(problem: Problem, short: Problem, at_p: Filled, limit: float, objective: Objective) -> Draft | None:
    """Extend what was found for few microbatches at 1F1B's memory to all of them, under ``limit``."""
    fillings, most = [at_p], full_limit(problem)
    if limit > most + ROUNDING:
        filling = WeightFilling(short, limit)
        fillings.append(_improved_orders(filling, at_p, _anchor(filling)))
    filling = WeightFilling(problem, limit)
    if short is problem:
        return filling.draft(fillings[-1].rows)
    anchor = _anchor(WeightFilling(problem, min(limit, most)))
    best = filling.draft(anchor.rows) if anchor else None
    for few_rows in (filled.rows for filled in fillings):
        rows = repeated(short, few_rows, problem.num_microbatches)
        best = best_of([filling.draft(rows)] if rows else [], best, objective)
    return best


def _from_anchor(problem: Problem, limit: float) -> Filled | None:
    filling = WeightFilling(problem, limit)
    anchor = _anchor(filling)
    return anchor and _improved_orders(filling, anchor, anchor)


def _anchor(filling: WeightFilling) -> Filled | None:
    """Return the rounds, W filled in by the *even* rule before all kinds, all but B of the second chunk, all but F, or
    neither; the first of those with the shortest span. None if the rounds get stuck: uneven memory."""
    problem = filling.problem
    p, order = problem.num_ranks, rounds_order(problem, filling.limit)
    if order is None:
        return None
    best: Filled | None = None
    for b in (True, False):
        for f in (True, False):
            filled = balanced(filling, order, (f,) * (2 * p) + (True,) * p + (b,) * p, "as computed")
            if best is None or (filled is not None and max(filled.idle_s) < max(best.idle_s)):
                best = filled
    return best


def _improved_orders(filling: WeightFilling, best: Filled, anchor: Filled | None) -> Filled:
    """Return ``best``, or what dominates it: on the (4, 2) block, on rounds that keep room, on the rounds, and from the
    ``anchor``."""
    problem = filling.problem
    rounds = rounds_order(problem, filling.limit)
    starts = [
        (_block_order(filling), None),
        (rounds_order(problem, filling.limit, keep_room=True), None),
        (rounds, None),
        (rounds, anchor),
    ]
    passes = min(_MOST_PASSES, _ACTIONS // len(starts) // (3 * problem.num_replicas * problem.num_microbatches))
    for order, start in starts:
        if order is not None and _beatable(problem, best):
            best = improved(filling, order, best, passes, start)
    return best


def _block_order(filling: WeightFilling) -> list[int] | None:
    """F and B of the paper's V-ZB block, repeated and squeezed; W are laid anew."""
    problem = filling.problem
    block = v_zb_block(problem.num_ranks)
    return order_of(problem, repeat(block, problem), filling.retimer)


def _beatable(problem: Problem, best: Filled) -> bool:
    span, makespan = least(problem)
    return best.span > span * (1 + ROUNDING) or best.makespan > makespan * (1 + ROUNDING)


def _below(problem: Problem, short: Problem, limit: float, objective: Objective) -> Draft | None:
    """Return the best list schedule for a limit below p, or rounds under that limit; few microbatches first, then all."""
    drafts = chunk_drafts(short, limit)
    if not drafts:
        return None
    filling = WeightFilling(short, limit)
    order = rounds_order(short, limit)
    rounds = order and balanced(filling, order)
    drafts += [draft for draft in (rounds and filling.draft(rounds.rows),) if draft]
    if short is problem:
        return best_of(drafts, objective=objective)
    goals: tuple[Objective, ...] = ("makespan", objective)
    shortest = [d for goal in dict.fromkeys(goals) for d in nsmallest(_LONGER, drafts, key=lambda d, g=goal: d.key(g))]  # type: ignore[misc]
    filling = WeightFilling(problem, limit)
    rows = [repeated(short, d.rows, problem.num_microbatches) for d in shortest]
    longer = best_of((filling.draft(r) for r in rows if r), objective=objective)
    return longer or best_of(chunk_drafts(problem, limit), objective=objective)


def repeated(problem: Problem, rows: Sequence[Sequence[int]], microbatches: int) -> list[list[int]] | None:
    """Return ``rows`` of ``problem`` with the steady phase repeated until there are ``microbatches``; None if a rank has none.

    Whether the result deadlocks, how long it takes and what it holds is the retimer's business.
    """
    few, extra = problem.num_microbatches, microbatches - problem.num_microbatches
    assert extra >= 0
    longer = []
    for row in rows:
        # actions of one microbatch on the rank
        period = len(row) // few
        cut = _steady(row, period)
        if cut is None:
            return None
        moved = [_moved(code, few, microbatches, 0) for code in row[: cut + period]]
        for k in range(1, extra + 1):
            moved += [_moved(code, few, microbatches, k) for code in row[cut : cut + period]]
        moved += [_moved(code, few, microbatches, extra) for code in row[cut + period :]]
        longer.append(moved)
    return longer


def _moved(code: int, few: int, many: int, by: int) -> int:
    kind, microbatch = divmod(code, few)
    return kind * many + microbatch + by


def _steady(row: Sequence[int], period: int) -> int | None:
    """Return a position from which a period and the one after are the same but for the microbatch; the one nearest the
    middle."""
    # codes of one op and stage go up by 1 a microbatch
    same = [a + 1 == b for a, b in zip(row, row[period:], strict=False)]
    middle = len(row) // 2
    steady_start = None
    run = 0
    for at, ok in enumerate(same):
        run = run + 1 if ok else 0
        if run >= period:
            start = at - period + 1
            if steady_start is None or abs(start - middle) < abs(steady_start - middle):
                steady_start = start
    return steady_start
