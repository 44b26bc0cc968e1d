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
taken. Their O and L cost no time. Where only long intervals fit, PipeOffload's order with B's that wait for their L is the
rival: the listing's tolerance T of delays, as much as is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule.blocks.block import BuildingBlock
from jaxpipe.schedule.blocks.repeat import repeat
from jaxpipe.schedule.costs import CostProfile
from jaxpipe.schedule.families.family import family
from jaxpipe.schedule.families.pipeoffload import po_block, po_rows
from jaxpipe.schedule.ir import Schedule
from jaxpipe.schedule.list_schedule.fillers import AS_GIVEN, Finisher, Phases, Recipes, Rule, shortness
from jaxpipe.schedule.passes.plans import Plans, peak_of
from jaxpipe.schedule.placement import circular
from jaxpipe.schedule.problem import CodeRows, Problem
from jaxpipe.schedule.retime import Draft, peaks


def _with_backlogs(*, forward: bool) -> Recipes:
    rule = Rule(forward=forward, backward=False, w_gap=0.0)
    return [("real", replace(rule, lazy=most > 0, backlog=most)) for most in (0, 1, 2, 4, 8, float("inf"))]


_ONLY_W, _F_AND_W = _with_backlogs(forward=False), _with_backlogs(forward=True)
_FILLS = (1.0, 1.5, 2.0)
_INTERVALS = (1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0)
_STEADY_FILLS = tuple(  # and the part of PipeOffload's memory that they may hold
    (Phases(AS_GIVEN, rule, rule), part)
    for rule in (Rule(backward=False, w_gap=0.0, backlog=1), Rule(backward=False, w_gap=0.0, lazy=False))
    for part in (1.0, 0.75, 0.5)
)
_NEVER = 1e9
_TRIES = 16
_SMALL = 20_000
_SLACK = 1 + 1e-9


@family(
    "ada-offload",
    "PipeOffload with the densest fill phase that a memory limit allows (--memory-limit, default p)",
    "optpipe.txt §4.1.3, appendix D",
    placement=circular,
    picture={"ranks": 3, "microbatches": 5, "memory_limit": 2},
)
def ada_offload(
    ranks: int,
    microbatches: int,
    chunks: int = 1,
    costs: CostProfile | None = None,
    memory_limit: float | None = None,
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
    limit = float(ranks) if memory_limit is None else memory_limit
    if not limit > 0:
        raise ScheduleError(f"ada-offload: memory limit of {limit:g}; want activations per rank, above 0")
    placement = circular(ranks, chunks)
    if costs is None:
        costs = CostProfile.uniform(placement.num_stages, chunks=chunks)
    return _Search(Problem.of(placement, microbatches, costs), costs, limit).schedule()


@dataclass(frozen=True, slots=True)
class _Search:
    """Orders from dense to sparse, tried under a memory limit."""

    problem: Problem
    costs: CostProfile
    limit: float

    def schedule(self) -> Schedule:
        dense = {shortness(draft): draft.rows for draft in self.dense()}
        fitting = (dense[key] for key in sorted(dense) if self.least(dense[key]) <= self.limit * _SLACK)
        for rows in islice(fitting, _TRIES):
            found = self.plans(rows).free_within(self.limit, sparing=True)
            if found is not None:
                return found
        return self.sparse()

    def dense(self) -> Iterator[Draft]:
        """PipeOffload's order, and the same with waits filled: more F in flight, more or fewer W outstanding."""
        finisher, start = Finisher(self.problem), po_rows(self.problem)
        plain = finisher.squeezed(start)
        assert plain is not None, "PipeOffload's order deadlocks"
        yield plain
        for fill, recipes in ((1.0, _ONLY_W), *((fill, _F_AND_W) for fill in _FILLS)):
            yield from finisher.drafts(start, plain.peak * fill, len(recipes), recipes)

    def sparse(self) -> Schedule:
        """The shortest with microbatches at longer intervals, or PipeOffload's order with B's that wait for L."""
        best: tuple[float, Schedule] | None = None
        plain = po_rows(self.problem)
        for draft in (d for drafts in self.spread(plain) for d in sorted(drafts, key=shortness)):
            if best is None or draft.makespan < best[0]:
                found = self.plans(draft.rows).free_within(self.limit, sparing=True)
                best = best if found is None else (draft.makespan, found)
        if sum(map(len, plain)) <= _SMALL:
            delayed = self.plans(plain).delayed(self.limit)
            if delayed is not None and (best is None or delayed[1].makespan < best[0]):
                return delayed[0]
        if best is not None:
            return best[1]
        plans = self.plans(self.at_interval(self.alone))
        lowest = peak_of(plans.free(plans.lowest)[1])
        raise ScheduleError(
            f"ada-offload: no order of {self.problem.num_microbatches} microbatches on {self.problem.num_ranks} ranks "
            f"was found within a memory limit of {self.limit:g}; use {lowest:g} or more"
        )

    def spread(self, plain: CodeRows) -> Iterator[list[Draft]]:
        """Orders with ever longer intervals, as they are and with the steady phase filled; ends two intervals after the
        first that could fit without any offload."""
        finisher, in_flight, after = Finisher(self.problem), max(peaks(self.problem, plain)), 0
        fills = _STEADY_FILLS if sum(map(len, plain)) <= _SMALL else _STEADY_FILLS[:1]
        for interval in sorted({min(round(self.block.interval * x), self.alone) for x in (*_INTERVALS, _NEVER)}):
            rows = self.at_interval(interval)
            orders = [rows, *(finisher.filled(rows, in_flight * part, rule) for rule, part in fills)]
            drafts = [d for d in map(finisher.squeezed, orders) if d is not None]
            yield [d for d in drafts if self.least(d.rows) <= self.limit * _SLACK]
            after += drafts[0].peak <= self.limit * _SLACK
            if after == 2:
                return

    @property
    def block(self) -> BuildingBlock:
        return po_block(self.problem.num_ranks, self.problem.num_replicas // self.problem.num_ranks)

    @property
    def alone(self) -> int:
        """The interval at which one microbatch ends before the next begins."""
        return max(map(max, self.block.weight)) + 1

    def at_interval(self, interval: int) -> CodeRows:
        return repeat(replace(self.block, interval=interval), self.problem)

    def plans(self, rows: CodeRows) -> Plans:
        return Plans(self.problem.schedule("ada-offload", rows), self.costs)

    def least(self, rows: CodeRows) -> float:
        """What an order holds if all that may leave is away as soon as it is made: the W's outstanding."""
        nothing = tuple(0.0 for _ in self.problem.held)
        return max(peaks(replace(self.problem, held=nothing), rows), default=0.0)
