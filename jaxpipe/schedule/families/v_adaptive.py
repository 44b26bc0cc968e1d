"""The adaptive V scheduler: a search over building blocks under any memory limit, with real costs.

Source: `controllable-memory.txt` appendix A. The blocks are those of :func:`~jaxpipe.schedule.blocks.v_shape.searched`.
Hundreds fit a limit, and few are worth a full evaluation:

1. those whose lifespans are the longest come first: within the limit, a longer life shortens warm-up and cool-down;
2. each gets warm-up and cool-down by rule (:mod:`~jaxpipe.schedule.blocks.v_ends`); the best of these are kept;
3. others are repeated, squeezed with the real costs and their waits filled by a few recipes;
4. the best of both get all recipes, W laid anew, and the best of all is kept.

All of this is done with the microbatches of warm-up and cool-down only; the steady phase is then repeated up to the number
asked for.

The V-ZB heuristic at the same limit competes, since it is better at few microbatches and near 1F1B's memory. Below the memory
of the least block, V-Min's is repeated at longer intervals, down to one microbatch at a time. All work is bounded by sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from heapq import nsmallest
from itertools import islice
from math import isnan

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule.blocks.block import BuildingBlock, with_weight_gradients
from jaxpipe.schedule.blocks.repeat import repeat
from jaxpipe.schedule.blocks.v_ends import rows_with_ends
from jaxpipe.schedule.blocks.v_shape import T, searched
from jaxpipe.schedule.bounds import lower_bound, span_lower_bound
from jaxpipe.schedule.costs import CostProfile
from jaxpipe.schedule.families.family import family
from jaxpipe.schedule.families.steady_phase import repeated
from jaxpipe.schedule.families.v_blocks import v_min_block
from jaxpipe.schedule.families.v_heuristic import best_v_draft, by_span
from jaxpipe.schedule.ir import Schedule
from jaxpipe.schedule.list_schedule.choosers import least_limit
from jaxpipe.schedule.list_schedule.fillers import Finisher, merit
from jaxpipe.schedule.list_schedule.weights import WeightFilling, refilled
from jaxpipe.schedule.placement import v_shape
from jaxpipe.schedule.problem import CodeRows, Problem
from jaxpipe.schedule.retime import Draft, nine_digits

_SLACK = 1 + 1e-9
# With 60 blocks and 8 laid, 14 of 188 rows of tests/golden/authors_v.json (p <= 8) were up to 1% behind the authors, now none.
_BLOCKS, _LAID, _LAID_FINISHED = 150, 24, 6
_SCREENED, _A_FEW, _SCREENED_FINISHED = 24, 3, 2
_ALL, _REFILLED, _PASSES = 20, 4, 16
_LONGER, _SPAN_WEIGHT = 1.008, 1.67
"""Of the drafts with a makespan within 0.8% of the shortest, the least makespan + 1.67 span is taken. Of weights from 0.7 to
2.5 and bounds from 0.2% to 3%, those from 1.5 and from 0.65% to 1% leave no row behind the authors, in makespan or in span."""


@family(
    "v-adaptive",
    "V placement, blocks searched with real costs under any --memory-limit >= 1 (default p)",
    "Controllable Memory (Qi, Wan et al. 2024) appendix A",
    placement=v_shape,
    picture={"ranks": 3, "microbatches": 3, "memory_limit": 2},
)
def v_adaptive(
    ranks: int,
    microbatches: int,
    costs: CostProfile | None = None,
    memory_limit: float | None = None,
    objective: str = "makespan",
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
    placement = v_shape(ranks)
    problem = Problem.of(placement, microbatches, costs)
    limit = float(ranks) if memory_limit is None else memory_limit
    need = least_limit(problem)
    if isnan(limit) or limit < need / _SLACK:
        raise ScheduleError(
            f"v-adaptive: a memory limit of {limit:g} is below the {need:g} of one microbatch; use {need:g} or more"
        )
    profile = CostProfile.uniform(2 * ranks, chunks=2) if costs is None else costs
    enough = (
        lower_bound(placement, microbatches, profile, memory_limit=limit),
        span_lower_bound(placement, microbatches, profile, memory_limit=limit),
    )
    return problem.schedule("v-adaptive", best_adaptive_draft(problem, limit, enough, objective).rows)


def best_adaptive_draft(
    problem: Problem, limit: float, enough: tuple[float, float] = (0.0, 0.0), objective: str = "makespan"
) -> Draft:
    """The best order for a V placement with a peak of at most ``limit`` (at least what one microbatch needs).

    ``enough``: makespan and span that can't be beaten; the search stops at both.
    """
    found = [draft for draft in (best_v_draft(problem, limit, objective),) if draft is not None]
    few = min(problem.num_microbatches, 2 * problem.num_ranks + 4)
    short = Finisher(replace(problem, num_microbatches=few))
    full = short if few == problem.num_microbatches else Finisher(problem)
    for draft in () if found and _beats(found[0], enough) else _searched(short, full, limit):
        found.append(draft)
        if _beats(draft, enough):
            break
    if objective == "span":
        return min(found, key=by_span)
    most = min(draft.makespan for draft in found) * _LONGER
    return min((draft for draft in found if draft.makespan <= most), key=_balanced)


def _balanced(draft: Draft) -> tuple[float, float]:
    return nine_digits(draft.makespan + _SPAN_WEIGHT * draft.span), draft.peak


def _beats(draft: Draft, enough: tuple[float, float]) -> bool:
    """Whether makespan and span are no longer than these."""
    return draft.makespan <= enough[0] * _SLACK and draft.span <= enough[1] * _SLACK


def _searched(short: Finisher, full: Finisher, limit: float) -> Iterator[Draft]:
    """Drafts from building blocks, at least one."""
    problem, weights = short.problem, short.problem.reserved
    chunk = sum(weights) / len(weights)
    blocks = searched(problem.num_ranks, limit / chunk if chunk > 0 else float("inf"))
    fitting = list(islice((b for b in blocks if max(b.steady_peaks(weights)) <= limit * _SLACK), _BLOCKS))
    ends = (rows_with_ends(block, problem) for block in fitting)
    with_ends = (short.squeezed(rows) for rows in ends if rows is not None)
    laid = nsmallest(_LAID, _within(with_ends, limit), key=by_span)
    starts: dict[tuple[float, float], CodeRows] = {}
    for draft in laid:
        for longer in _longer(iter([draft]), short, full, limit):
            starts[merit(longer)] = draft.rows
            yield longer
    plain = [repeat(block, problem) for block in fitting[:_SCREENED] or [_stretched(problem, limit)]]
    looked = [min(map(merit, short.drafts(rows, limit, _A_FEW)), default=(float("inf"), 0.0)) for rows in plain]
    best = sorted(range(len(plain)), key=looked.__getitem__)[:_SCREENED_FINISHED]
    for start in (*(starts[key] for key in sorted(starts)[:_LAID_FINISHED]), *(plain[k] for k in best)):
        yield from _finished(start, short, full, limit)


def _within(drafts: Iterable[Draft | None], limit: float) -> Iterator[Draft]:
    return (draft for draft in drafts if draft is not None and draft.peak <= limit * _SLACK)


def _finished(rows: CodeRows, short: Finisher, full: Finisher, limit: float) -> Iterator[Draft]:
    """``rows`` by all recipes, W laid anew on the best, for all microbatches."""
    tried = [*_within([short.squeezed(rows)], limit), *short.drafts(rows, limit, _ALL)]
    filling = WeightFilling(short.problem, limit, short.retimer)
    tried += _within([refilled(filling, draft, _PASSES) for draft in nsmallest(_REFILLED, tried, key=merit)], limit)
    return _longer(iter(tried), short, full, limit)


def _longer(drafts: Iterator[Draft], short: Finisher, full: Finisher, limit: float) -> Iterator[Draft]:
    """Drafts for few microbatches as drafts for all of them; those that keep within the limit."""
    if full is short:
        return drafts
    rows = (repeated(short.problem, draft.rows, full.problem.num_microbatches) for draft in drafts)
    return _within((full.squeezed(longer) for longer in rows if longer is not None), limit)


def _stretched(problem: Problem, limit: float) -> BuildingBlock:
    """V-Min's block at the shortest interval at which the limit holds; at its whole length it is one microbatch at a time."""
    block = v_min_block(problem.num_ranks)
    for interval in range(T, 12 * problem.num_ranks + T):
        wider = with_weight_gradients(replace(block, interval=interval))
        if not wider.collisions() and max(wider.steady_peaks(problem.reserved)) <= limit * _SLACK:
            return wider
    raise AssertionError("one microbatch at a time is within the limit")
