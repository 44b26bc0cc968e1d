"""The V-ZB heuristic: orders of F, B and W on a V placement by real costs, under any memory limit.

Source: `controllable-memory.txt` section 3.2 and Table 4. The paper's V-ZB block is one thing, the V-ZB of its Table 4
another: a heuristic, which is far better than any block at few microbatches. Here it is made of parts:

1. an order of F and B: rounds (:mod:`~jaxpipe.schedule.families.v_rounds`), or list schedules under the limit;
2. W filled in with real costs (:mod:`~jaxpipe.schedule.families.weight_filling`). The rounds with the *even* rule are the
   *anchor*: what the authors' heuristic finds. Every later draft must be at least as good in makespan *and* in longest span;
3. passes toward targets a little below the best so far;
4. many microbatches: all of this is done for few, and the steady phase is repeated
   (:mod:`~jaxpipe.schedule.families.steady_phase`).

The number of drafts depends on sizes only, never on a clock. Not modelled: workspace of a running function.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from jaxpipe.schedule.families.chunk_list_scheduler import chunk_drafts
from jaxpipe.schedule.families.steady_phase import repeated
from jaxpipe.schedule.families.v_rounds import rounds_order
from jaxpipe.schedule.families.weight_filling import Filled, Rule, WeightFilling, balanced
from jaxpipe.schedule.problem import Problem
from jaxpipe.schedule.retime import Draft, best_of

_ROUNDING = 1e-9
_STEPS = (0.1, 0.03, 0.3, 0.01)
_PASSES = 16


def best_v_draft(problem: Problem, limit: float) -> Draft | None:
    """The best order found for ``problem`` (V placement) with a peak of at most ``limit``; None if nothing fits.

    ``limit``: activations per rank in units of one rank's share of one microbatch; 1F1B has p, that is 2p chunks.
    At a limit of p its makespan and its longest span are both at most those of the authors' heuristic.
    """
    p, m = problem.num_ranks, problem.num_microbatches
    few = 2 * p + 4
    if m <= few + 2:
        return _search(problem, limit)
    found = _search(replace(problem, num_microbatches=few), limit)
    if found is None:
        return None
    rows = repeated(replace(problem, num_microbatches=few), found.rows, m)
    filling = WeightFilling(problem, limit)
    anchors = [filling.draft(a.rows) for a in _anchors(filling, limit)]
    longer = filling.draft(rows) if rows else None
    return best_of([longer, *anchors], anchors[0] if anchors else None)


def _search(problem: Problem, limit: float) -> Draft | None:
    filling = WeightFilling(problem, limit)
    anchors = _anchors(filling, limit)
    drafts: list[Draft | None] = [filling.draft(a.rows) for a in anchors]
    anchor = drafts[0] if drafts else None
    listed = chunk_drafts(problem, limit)
    return best_of([*drafts, *listed], anchor)


def _anchors(filling: WeightFilling, limit: float) -> list[Filled]:
    """The rounds with W by the even rule, in the variant with the shortest span first; then their improvements."""
    problem = filling.problem
    found: list[Filled] = []
    for keep_room in (False, True):
        order = rounds_order(problem, limit, keep_room)
        if order is None:
            continue
        variants = [balanced(filling, order, before) for before in _variants(problem)]
        starts = [v for v in variants if v is not None]
        if not starts:
            continue
        anchor = found[0] if found else min(starts, key=lambda f: round(f.span, 9))
        if not found:
            found.append(anchor)
        for start in (starts[0], filling.fill(order, Rule((0.0,) * problem.num_ranks, [0.0] * len(order)))):
            if start is not None:
                found += _improved(filling, order, start, found[-1])
    return found


def _variants(problem: Problem) -> Iterator[Sequence[bool]]:
    """Which kinds a W may delay: all; all but the second B of a rank; no F; neither."""
    p = problem.num_ranks
    for second_b in (True, False):
        for f in (True, False):
            yield [f] * (2 * p) + [True] * p + [second_b] * p


def _improved(filling: WeightFilling, order: Sequence[int], start: Filled, best: Filled) -> Iterator[Filled]:
    """Ever better fillings than ``best``, by passes toward targets between it and what no order can beat."""
    least_span, least_makespan = _least(filling.problem)
    now, step = start, 0
    for _ in range(_PASSES):
        share = _STEPS[step % len(_STEPS)]
        span = best.span - share * (best.span - least_span)
        makespan = best.makespan - share * (best.makespan - least_makespan)
        filled = filling.fill(order, Rule(filling.spare(now, span, makespan), now.profile_s))
        if filled is None:
            return
        if filled.dominates(best):
            best = filled
            yield best
        if filled.rows == now.rows:
            step += 1
        now = filled


def _least(problem: Problem) -> tuple[float, float]:
    """(span, makespan) that no order can beat: every rank does its work, none starts before the first microbatch reaches it."""
    m, reach = problem.num_microbatches, 0.0
    starts: dict[int, float] = {}
    work = [0.0] * problem.num_ranks
    for q, r in enumerate(problem.rank):
        starts.setdefault(r, reach)
        work[r] += m * (problem.f_s[q] + problem.b_s[q] + problem.w_s[q])
        reach += problem.f_s[q] + problem.down_s[q]
    return max(work), max(starts[r] + w for r, w in enumerate(work))
