"""The adaptive V scheduler: a search over building blocks under any memory limit, with real costs.

Source: `controllable-memory.txt` appendix A. The blocks are those of :func:`~jaxpipe.schedule.blocks.v_shape.searched`, which
is wider than the authors' search (δ¹ is not fixed to 1). Thousands fit a limit, and few are worth a full evaluation:

1. a block is scored by its period and its lifespans. Periods come from small copies (few ranks, mean costs) of the two uniform
   blocks it is made of, so a few hundred serve all of them; a longer lifespan within the limit shortens warm-up and cool-down;
2. the best by score get warm-up and cool-down by rule (:mod:`~jaxpipe.schedule.blocks.v_ends`), those within the authors' own
   space in any case: the best of these is what the result may not be behind, neither in makespan nor in span;
3. others are repeated, squeezed with the real costs and their waits filled by a few recipes;
4. the best of both get all recipes, W laid anew, and the best of all is kept.

All of this is done with the microbatches of warm-up and cool-down only; the steady phase is then repeated up to the number
asked for.

The V-ZB heuristic at the same limit competes, since it is better at few microbatches and near 1F1B's memory. Below the memory
of the least block, V-Min's is repeated at longer intervals, down to one microbatch at a time. All work is bounded by sizes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest
from itertools import islice, pairwise
from math import isnan

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule.blocks.block import BuildingBlock, with_weight_gradients
from jaxpipe.schedule.blocks.repeat import repeat
from jaxpipe.schedule.blocks.v_ends import VEnds
from jaxpipe.schedule.blocks.v_shape import T, VOffsets, searched
from jaxpipe.schedule.bounds import lower_bound, span_lower_bound
from jaxpipe.schedule.costs import CostProfile
from jaxpipe.schedule.families.family import Family, require_sizes
from jaxpipe.schedule.families.steady_phase import repeated
from jaxpipe.schedule.families.v_blocks import v_min_block
from jaxpipe.schedule.families.v_heuristic import best_v_draft, improved
from jaxpipe.schedule.families.weight_filling import Rule, WeightFilling, order_of
from jaxpipe.schedule.ir import Schedule
from jaxpipe.schedule.list_schedule.fillers import Finisher, merit
from jaxpipe.schedule.placement import Placement, v_shape
from jaxpipe.schedule.problem import B, CodeRows, Problem
from jaxpipe.schedule.retime import Draft, Retimer, nine_digits

_ROUNDING = 1e-9
_NARROW, _WIDE, _MORE, _LONG = 120, 24, 8, 8
_SCREENED, _KEPT, _FINISHED, _A_FEW, _ALL = 12, 2, 2, 3, 20
_PER_CLASS, _REFILLED, _PASSES = 2, 4, 16


def v_adaptive(
    ranks: int, microbatches: int, costs: CostProfile | None = None, memory_limit: float | None = None
) -> Schedule:
    """The best V schedule found under ``memory_limit`` (default p, 1F1B's), in units of one rank's share of a microbatch::

        rank 0 |F0- F1- F2-         F0b B0b W0b         F1b B1b B0- W1b W0- F2b B2b B1- W2b W1-     B2- W2-
        rank 1 |    F0- F1- F2- F0b         B0b W0b F1b B0- W0- B1b W1b F2b     B1- B2b W1- W2b B2- W2-
        rank 2 |        F0- F0b F1- F1b         B0b B0- W0b W0- F2- F2b B1b B1- W1b W1- B2b B2- W2b W2-

    Raises:
        ScheduleError: a size is not a whole number of at least 1, ``costs`` is for another number of stages, or the limit is
            below what one microbatch needs.
    """
    require_sizes("v-adaptive", ranks=ranks, microbatches=microbatches)
    placement = v_shape(ranks)
    problem = Problem.of(placement, microbatches, costs)
    limit = float(ranks) if memory_limit is None else memory_limit
    need = _one_microbatch(problem)
    if isnan(limit) or limit < need * (1 - _ROUNDING):
        raise ScheduleError(
            f"v-adaptive: a memory limit of {limit:g} is below the {need:g} of one microbatch; use {need:g} or more"
        )
    profile = CostProfile.uniform(2 * ranks, chunks=2) if costs is None else costs
    enough = (
        lower_bound(placement, microbatches, profile, memory_limit=limit),
        span_lower_bound(placement, microbatches, profile, memory_limit=limit),
    )
    return problem.schedule("v-adaptive", best_adaptive_draft(problem, limit, enough).rows)


def best_adaptive_draft(problem: Problem, limit: float, enough: tuple[float, float] = (0.0, 0.0)) -> Draft:
    """The best order for a V placement with a peak of at most ``limit`` (at least what one microbatch needs).

    ``enough``: makespan and span that can't be beaten; the search stops at both.
    """
    heuristic = best_v_draft(problem, limit)
    if heuristic is not None and _beats(heuristic, enough):
        return heuristic
    found = [] if heuristic is None else [heuristic]
    few = min(problem.num_microbatches, 2 * problem.num_ranks + 4)
    short = Finisher(replace(problem, num_microbatches=few))
    full = short if few == problem.num_microbatches else Finisher(problem)
    blocks = _Blocks(short.problem, problem.num_microbatches, limit)
    laid = _laid(blocks, short, full)
    found += [x.draft for x in laid]
    anchor = min(
        (x.draft for x in laid if x.narrow), key=lambda d: (nine_digits(d.span), nine_digits(d.makespan)), default=None
    )
    starts = [x.start for x in sorted(laid, key=lambda x: merit(x.draft))[:_FINISHED]]
    starts += _screened(blocks, short, full)
    for start in starts:
        for draft in _finished(start, short, full, limit):
            found.append(draft)
            if _beats(draft, enough):
                return draft
    assert found, "one microbatch at a time is always within the limit"
    return min((d for d in found if anchor is None or _beats(d, (anchor.makespan, anchor.span))), key=merit)


def _one_microbatch(problem: Problem) -> float:
    held = [max(h, k) for h, k in zip(problem.held, problem.kept, strict=True)]
    return max(sum(held[k] for k in problem.replicas_of(r)) for r in range(problem.num_ranks))


def _beats(draft: Draft, enough: tuple[float, float]) -> bool:
    """Whether makespan and span are no longer than these."""
    return draft.makespan <= enough[0] * (1 + _ROUNDING) and draft.span <= enough[1] * (1 + _ROUNDING)


@dataclass(frozen=True, slots=True)
class _Scored:
    """A block of the search. ``period_s``: seconds per microbatch in its steady phase. ``score_s``: about how long a schedule
    of it takes. ``narrow``: within the space that the paper's own search looks at."""

    offsets: VOffsets
    period_s: float
    score_s: float
    narrow: bool


class _Blocks:
    """Blocks whose steady phase keeps the limit, best score first."""

    def __init__(self, problem: Problem, microbatches: int, limit: float) -> None:
        self.problem, self.limit = problem, limit
        self.weights = [max(h, k) for h, k in zip(problem.held, problem.kept, strict=True)]
        chunk = sum(self.weights) / len(self.weights)
        self.most = limit / chunk if chunk > 0 else float("inf")
        mean_s = sum(map(sum, zip(problem.f_s, problem.b_s, problem.w_s, strict=True))) / (3 * len(self.weights))
        periods = _Periods(problem)
        scored = []
        for offsets in searched(problem.num_ranks, self.most):
            pairs = offsets.pairs or ((1, 1),)
            narrow = pairs[0][0] >= pairs[-1][0] and all(up == 1 for _, up in pairs)
            period = periods.of(offsets, pairs.index(pairs[-1]))
            score = microbatches * period - sum(offsets.lifespans_on_rank_0) / 2 * mean_s
            scored.append(_Scored(offsets, period, score, narrow))
        self.scored = sorted(scored, key=lambda x: (x.score_s, x.offsets.pattern, x.offsets.pairs))

    def fitting(self, wanted: Callable[[_Scored], bool]) -> Iterator[tuple[_Scored, BuildingBlock]]:
        """The blocks that are ``wanted``, best first."""
        for x in filter(wanted, self.scored):
            if max(x.offsets.steady_peaks(self.weights)) <= self.limit * (1 + _ROUNDING):
                yield x, x.offsets.block()

    def varied(self) -> Iterator[tuple[_Scored, BuildingBlock]]:
        """Best first, a few of each pattern and pair of offsets."""
        taken: Counter[object] = Counter()

        def key(x: _Scored) -> object:
            return x.offsets.pattern, x.offsets.pairs[:1], x.offsets.pairs[-1:]

        for x, block in self.fitting(lambda x: taken[key(x)] < _PER_CLASS):
            taken[key(x)] += 1
            yield x, block


@dataclass(frozen=True, slots=True)
class _Laid:
    """A block with its ends laid by rule; ``start``: its rows for few microbatches."""

    draft: Draft
    start: CodeRows
    narrow: bool


def _laid(blocks: _Blocks, short: Finisher, full: Finisher) -> list[_Laid]:
    """The best blocks with warm-up and cool-down by rule, those for all microbatches that look best with few."""
    ends = VEnds(short.problem)
    found: list[_Laid] = []
    for x, block in [*islice(blocks.fitting(lambda x: x.narrow), _NARROW), *islice(blocks.varied(), _WIDE)]:
        for rows in ends.orders(block, blocks.most):
            draft = short.squeezed(rows)
            if draft is not None and draft.peak <= blocks.limit * (1 + _ROUNDING):
                found.append(_Laid(draft, draft.rows, x.narrow))
    if full is short:
        return found
    return [
        replace(laid, draft=draft)
        for laid in _promising(found, short, full, blocks.limit)
        for draft in _longer([laid.draft], short, full, blocks.limit)
    ]


def _promising(found: Sequence[_Laid], short: Finisher, full: Finisher, limit: float) -> Sequence[_Laid]:
    """Those of few microbatches whose span will be the shortest with all of them, by what a few more take."""
    problem = short.problem
    missing = full.problem.num_microbatches - problem.num_microbatches
    if missing <= 2 * _MORE:
        return found
    more = Finisher(replace(problem, num_microbatches=problem.num_microbatches + _MORE))
    per_replica = [sum(x) for x in zip(problem.f_s, problem.b_s, problem.w_s, strict=True)]
    work_s = max(sum(per_replica[k] for k in problem.replicas_of(r)) for r in range(problem.num_ranks))
    about: list[tuple[float, float, int]] = []
    for k, laid in sorted(enumerate(found), key=lambda x: x[1].draft.span):
        if len(about) >= _LONG and laid.draft.span + missing * work_s > sorted(about)[_LONG - 1][0] * (1 + _ROUNDING):
            break
        for longer in _longer([laid.draft], short, more, limit):
            a_microbatch_s = (longer.span - laid.draft.span) / _MORE
            about.append(
                (nine_digits(longer.span + (missing - _MORE) * a_microbatch_s), nine_digits(longer.makespan), k)
            )
    return [found[k] for *_, k in nsmallest(_LONG, about)]


def _screened(blocks: _Blocks, short: Finisher, full: Finisher) -> list[CodeRows]:
    """Rows of the best few repeated blocks after a first look by a few recipes."""
    starts = [repeat(block, short.problem) for _, block in islice(blocks.varied(), _SCREENED)]
    starts = starts or [repeat(_stretched(short.problem, blocks.limit, blocks.weights), short.problem)]
    looked: list[tuple[tuple[float, float], int, CodeRows]] = []
    for rows in starts:
        drafts = [d for d in (short.squeezed(rows),) if d is not None and d.peak <= blocks.limit * (1 + _ROUNDING)]
        drafts += short.drafts(rows, blocks.limit, _A_FEW)
        longer = list(_longer(nsmallest(2, drafts, key=merit), short, full, blocks.limit))
        if longer:
            looked.append((min(map(merit, longer)), len(looked), rows))
    return [rows for *_, rows in sorted(looked)[:_KEPT]]


def _finished(rows: CodeRows, short: Finisher, full: Finisher, limit: float) -> Iterator[Draft]:
    """``rows`` by all recipes, W laid anew on the best, for all microbatches."""
    given = short.squeezed(rows)
    tried = [d for d in (given,) if d is not None and d.peak <= limit * (1 + _ROUNDING)]
    tried += short.drafts(rows, limit, _ALL)
    tried += _refilled(nsmallest(_REFILLED, tried, key=merit), short, limit)
    return _longer(tried, short, full, limit)


def _refilled(drafts: Iterable[Draft], short: Finisher, limit: float) -> Iterator[Draft]:
    """The same orders of F and B, W laid anew by passes of the profile rule."""
    filling = WeightFilling(short.problem, limit, short.retimer)
    greedy = Rule((-float("inf"),) * short.problem.num_ranks)
    for draft in drafts:
        order = order_of(short.problem, draft.rows, short.retimer)
        start = None if order is None else filling.fill(order, replace(greedy, profile_s=(0.0,) * len(order)))
        if order is not None and start is not None:
            filled = filling.draft(improved(filling, order, start, _PASSES).rows)
            if filled is not None:
                yield filled


def _longer(drafts: Iterable[Draft], short: Finisher, full: Finisher, limit: float) -> Iterator[Draft]:
    """Drafts for few microbatches as drafts for all of them; those that keep within the limit."""
    if full is short:
        yield from drafts
        return
    for draft in drafts:
        rows = repeated(short.problem, draft.rows, full.problem.num_microbatches)
        longer = None if rows is None else full.squeezed(rows)
        if longer is not None and longer.peak <= limit * (1 + _ROUNDING):
            yield longer


def _stretched(problem: Problem, limit: float, weights: Sequence[float]) -> BuildingBlock:
    """V-Min's block at the shortest interval at which the limit holds; at its whole length it is one microbatch at a time."""
    block = v_min_block(problem.num_ranks)
    for interval in range(T, 12 * problem.num_ranks + T):
        wider = with_weight_gradients(replace(block, interval=interval))
        if not wider.collisions() and max(wider.steady_peaks(weights)) <= limit * (1 + _ROUNDING):
            return wider
    raise AssertionError("one microbatch at a time is within the limit")


class _Periods:
    """Seconds per microbatch of uniform blocks in their steady phase, on few ranks with the mean costs."""

    _RANKS, _FEW, _MORE = 6, 8, 14

    def __init__(self, problem: Problem) -> None:
        n = problem.num_replicas
        p = min(problem.num_ranks, self._RANKS)
        mean = [sum(x) / n for x in (problem.f_s, problem.b_s, problem.w_s)]
        hops = max(1, 2 * (problem.num_ranks - 1))
        links = [sum(x) / hops for x in (problem.down_s, problem.up_s)]
        costs = CostProfile.uniform(2 * p, chunks=2, f=2 * mean[0], b=2 * mean[1], w=2 * mean[2], comm=sum(links) / 2)
        self.problems = [Problem.of(v_shape(p), m, costs) for m in (self._FEW, self._MORE)]
        self.retimers = [Retimer(problem) for problem in self.problems]
        self.known: dict[tuple[tuple[int, ...], tuple[int, int]], float] = {}

    def of(self, offsets: VOffsets, k: int) -> float:
        """The longer period of the two uniform blocks that ``offsets`` is made of; the second starts at rank ``k``."""
        if not offsets.pairs:
            return self._uniform(offsets.pattern, (1, 1))
        (down, up), last = offsets.pairs[0], offsets.pairs[-1]
        f0, f1, b1, b0 = offsets.pattern
        drift = k * (down + up)
        moved = (0, (f1 - f0 - drift) % T, (b1 - f0) % T, (b0 - f0 - drift) % T)
        return max(self._uniform(offsets.pattern, (down, up)), self._uniform(moved, last))

    def _uniform(self, pattern: tuple[int, ...], pair: tuple[int, int]) -> float:
        key = pattern, pair
        if key not in self.known:
            self.known[key] = self._measured(pattern, pair)
        return self.known[key]

    def _measured(self, pattern: tuple[int, ...], pair: tuple[int, int]) -> float:
        ranks = self.problems[0].num_ranks
        f0, f1, b1, b0 = pattern
        block = VOffsets((f0, f1, b1, b0), (pair,) * (ranks - 1)).block()
        ends = []
        for problem, retimer in zip(self.problems, self.retimers, strict=True):
            times = retimer.times(repeat(block, problem))
            ends.append(times.start_s[problem.code(B, 0, problem.num_microbatches - 1)])
        return next((b - a) / (self._MORE - self._FEW) for a, b in pairwise(ends))


def _v(ranks: int, chunks: int) -> Placement:
    return v_shape(ranks)


V_ADAPTIVE = Family(
    name="v-adaptive",
    function=v_adaptive,
    description="V placement, blocks searched with real costs under any --memory-limit >= 1 (default p)",
    source="Controllable Memory (Qi, Wan et al. 2024) appendix A",
    options=("costs", "memory_limit"),
    placement=_v,
    default_chunks=2,
    picture={"ranks": 3, "microbatches": 3, "memory_limit": 2},
)
