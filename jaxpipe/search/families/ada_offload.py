"""AdaOffload: PipeOffload with as many F before the first B as memory allows once activations leave for the host.

Source: `optpipe.txt` section 4.1.3 and appendix D (algorithm 1). The listing there contradicts itself (the loop breaks before
its body; F waits for the whole stage before it; the end of an F is used before it is set). The reading taken here:

1. *Fill*. Where a rank waits, F's from later in PipeOffload's order move up, more of them or fewer. F's in the fill phase are
   not held back until their predecessor's O has ended, as the listing has it: an order can't say that. Instead a fill that
   needs more memory than the limit, with O and L in place, is not taken.
2. *Then PipeOffload's rules*: its order, B and W apart ("allow overlap between B and W"): W's fill later waits, with at most
   some number of them outstanding, since what W needs does not leave.
3. *Tight memory or a slow host*: the plain order; and if that is too much, microbatches come at longer intervals, down to one
   at a time, with F moved up once the B's have begun.

All of these are made, re-timed with the real costs, and tried from the shortest on; the first within the limit on every rank is
taken. Their O and L cost no time. Where only long intervals fit, PipeOffload's order with B's that wait for their L, or with
F's that wait for an O, is the rival: the listing's tolerance T of delays, as much as is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import islice

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule.costs import CostProfile
from jaxpipe.schedule.families.family import family
from jaxpipe.schedule.ir import Schedule
from jaxpipe.schedule.passes.plans import Plans, peak_of
from jaxpipe.schedule.placement import circular
from jaxpipe.schedule.problem import CodeRows, Problem
from jaxpipe.search.blocks.block import repeat
from jaxpipe.search.families.pipeoffload import po_block, po_rows
from jaxpipe.search.list_schedule.fillers import AS_GIVEN, GapFiller, Phases, Recipes, Rule
from jaxpipe.search.list_schedule.policies import full_limit
from jaxpipe.search.retime import SLACK, Draft, peaks

_RULES = [Rule(backward=False, w_gap=0.0, lazy=most > 0, backlog=most) for most in (0, 1, 2, 4, 8, float("inf"))]
_FILLS: Recipes = [("real", rule) for rule in _RULES]
_ONLY_W: Recipes = [("real", replace(rule, forward=False)) for rule in _RULES]
_STEADY_FILLS = [  # and the part of PipeOffload's memory that they may hold
    (Phases(AS_GIVEN, rule, rule), part) for rule in _RULES[1::-1] for part in (1.0, 0.75, 0.5)
]
_INTERVALS = (1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, float("inf"))
_TRIES = 16
_SMALL = 20_000
_gap_filler = lru_cache(maxsize=4)(GapFiller)
"""What it fills does not depend on the limit: a search asks for many."""


@family(
    "ada-offload",
    "PipeOffload with the densest fill phase that a memory limit allows (--memory-limit, default p)",
    "optpipe.txt §4.1.3, appendix D",
    placement=circular,
    picture={"ranks": 3, "microbatches": 5, "memory_limit": 2},
)
def ada_offload(
    ranks: int, microbatches: int, chunks: int = 1, costs: CostProfile | None = None, memory_limit: float | None = None
) -> Schedule:
    """AdaOffload under ``memory_limit`` (default p, 1F1B's peak), in units of one rank's share of one microbatch::

        rank 0 |F0 F1 F2       B0 W0 F3 B1 W1 F4 B2 W2 B3 W3    B4 W4
        rank 1 |   F0 F1 F2 B0 W0 B1 W1 F3 B2 W2 F4 B3 W3    B4 W4
        rank 2 |      F0 B0 F1 B1 W0 F2 B2 W1 F3 B3 W2 F4 B4 W3 W4

    ``costs``: seconds of O and L, and whether the host lane is shared (default: no time at all).

    Raises:
        ScheduleError: a size is not a whole number of at least 1, the costs are for another number of stages, or nothing
            fits the limit; names one that works.
    """
    problem = Problem.of(circular(ranks, chunks), microbatches, costs)
    limit = full_limit(problem) if memory_limit is None else memory_limit
    if not limit > 0:
        raise ScheduleError(f"ada-offload: memory limit of {limit:g}; want activations per rank, above 0")
    costs = costs or CostProfile.uniform(problem.num_replicas, chunks=chunks)
    return _Search(problem, costs, limit).schedule()


class _Search:
    """Orders from dense to sparse, tried under a memory limit.

    ``alone``: the interval at which one microbatch ends before the next begins.
    """

    def __init__(self, problem: Problem, costs: CostProfile, limit: float) -> None:
        self.problem, self.costs, self.limit, self.most = problem, costs, limit, limit * SLACK
        self.gap_filler, self.plain = _gap_filler(problem), po_rows(problem)
        self.block = po_block(problem.num_ranks, problem.placement.num_chunks)
        self.alone = max(map(max, self.block.weight)) + 1
        self.small = sum(map(len, self.plain)) <= _SMALL

    def schedule(self) -> Schedule:
        dense = {draft.key(): draft.rows for draft in self.dense()}
        # shortest first, and only those that could fit: planning offloads is what takes long
        fitting = (rows for _, rows in sorted(dense.items()) if self.fits(rows))
        tried = map(self.offloaded, islice(fitting, _TRIES))
        return next((schedule for schedule in tried if schedule is not None), None) or self.sparse()

    def dense(self) -> Iterator[Draft]:
        """PipeOffload's order, and the same with waits filled: more F in flight, more or fewer W outstanding."""
        plain = self.gap_filler.retimer.draft(self.plain)
        assert plain is not None, "PipeOffload's order deadlocks"
        yield plain
        for fill, recipes in ((1.0, _ONLY_W), (1.0, _FILLS), (1.5, _FILLS), (2.0, _FILLS)):
            yield from self.gap_filler.drafts(self.plain, plain.peak * fill, len(recipes), recipes)

    def sparse(self) -> Schedule:
        """Return the shortest with microbatches at longer intervals, or PipeOffload's order with B's that wait for L or F's
        for O."""
        shortest, best = float("inf"), None
        for draft in self.spread():
            if draft.makespan < shortest and (offloaded := self.offloaded(draft.rows)) is not None:
                shortest, best = draft.makespan, offloaded
        plans = self.plans(self.plain)
        for waiting in (plans.delayed(self.limit), plans.paged(self.limit)) if self.small else ():
            if waiting is not None and waiting[1].makespan < shortest:
                best, shortest = waiting[0], waiting[1].makespan
        if best is not None:
            return best
        # the leanest order, one microbatch at a time, says which limit would do
        plans = self.plans(self.at_interval(self.alone))
        lowest = peak_of(plans.free(plans.lowest)[1])
        raise ScheduleError(
            f"ada-offload: no order of {self.problem.num_microbatches} microbatches on {self.problem.num_ranks} ranks "
            f"was found within a memory limit of {self.limit:g}; use {lowest:g} or more"
        )

    def spread(self) -> Iterator[Draft]:
        """Yield orders with ever longer intervals, as they are and with the steady phase filled; ends two intervals after the
        first that could fit without any offload."""
        in_flight, after = max(peaks(self.problem, self.plain)), 0
        fills = _STEADY_FILLS if self.small else _STEADY_FILLS[:1]
        for interval in sorted({round(min(self.block.interval * x, self.alone)) for x in _INTERVALS}):
            rows = self.at_interval(interval)
            orders = [rows, *(self.gap_filler.filled(rows, in_flight * part, rule) for rule, part in fills)]
            drafts = [draft for draft in map(self.gap_filler.retimer.draft, orders) if draft is not None]
            yield from sorted((draft for draft in drafts if self.fits(draft.rows)), key=Draft.key)
            after += drafts[0].peak <= self.most
            if after == 2:
                return

    def at_interval(self, interval: int) -> CodeRows:
        return repeat(replace(self.block, interval=interval), self.problem)

    def plans(self, rows: CodeRows) -> Plans:
        return Plans(self.problem.schedule("ada-offload", rows), self.costs)

    def offloaded(self, rows: CodeRows) -> Schedule | None:
        return self.plans(rows).free_within(self.limit, sparing=True)

    def fits(self, rows: CodeRows) -> bool:
        """Return whether an order fits if all that may leave is away as soon as it is made: what is held are the W's
        outstanding."""
        nothing = tuple(0.0 for _ in self.problem.held)
        return max(peaks(replace(self.problem, held=nothing), rows), default=0.0) <= self.most
