"""Lower bounds on makespan and spans that hold for every valid schedule of a placement, under a memory limit if there is one.

Each bound is a reason why time must pass, and the largest reason wins. Without a limit: a rank's own work between the first
activation that can reach it and the last cotangent that must leave it; the way of one microbatch down and up; a link's own
traffic. With a limit on the activations a rank holds, and stages that form a plain chain (on single ranks, without spans; for
other placements the limit is ignored): :mod:`~jaxpipe.search.bounds.memory` (appendix E.2 of `controllable-memory.txt`
generalised; memory × time; release by release; microbatches that meet). With
offload activations may leave for host memory, as fast as each rank's own host lane allows. Proofs stand with the functions.

Two bounds take seconds and are asked for by ``solve`` only (:mod:`~jaxpipe.search.bounds.orders`): all
orders of one rank or a few.

Assumed: ops hold what F, B, W and BW hold (a user op that recomputes may hold less); workspace is not counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import inf

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule.costs import CostProfile
from jaxpipe.schedule.placement import Placement
from jaxpipe.search.bounds.memory import Confined
from jaxpipe.search.bounds.ranks import Flows, Visit, confine_ranks

Limit = float | Sequence[float] | None

__all__ = ["lower_bound", "rank_lower_bounds", "span_lower_bound"]


def lower_bound(
    placement: Placement, microbatches: int, costs: CostProfile, *, memory_limit: Limit = None, offload: bool = False
) -> float:
    """Return the seconds that no valid schedule's makespan can be below.

    ``memory_limit``: activations a rank may hold at once, in units of one rank's share of a microbatch; one number, or one
    per rank. ``offload``: activations may be moved to host memory. Infinite if no schedule keeps to the limit.

    Raises:
        ScheduleError: the costs are for another number of stages, there is no microbatch, or the limits are not one per rank.
    """
    return _Bounds(placement, microbatches, costs, memory_limit, offload).makespan()


def span_lower_bound(
    placement: Placement, microbatches: int, costs: CostProfile, *, memory_limit: Limit = None, offload: bool = False
) -> float:
    """Return the seconds that no valid schedule's longest rank span (last end − first start of one rank) can be below.

    ``memory_limit``, ``offload``, Raises: as :func:`lower_bound`.
    """
    return max(rank_lower_bounds(placement, microbatches, costs, memory_limit=memory_limit, offload=offload))


def rank_lower_bounds(
    placement: Placement, microbatches: int, costs: CostProfile, *, memory_limit: Limit = None, offload: bool = False
) -> tuple[float, ...]:
    """Return, per rank, seconds that its span can't be below in any valid schedule.

    ``memory_limit``, ``offload``, Raises: as :func:`lower_bound`.
    """
    return tuple(_Bounds(placement, microbatches, costs, memory_limit, offload).spans())


class _Bounds:
    """Every rank's confined bounds, and how they reach other ranks."""

    def __init__(self, placement: Placement, m: int, costs: CostProfile, limit: Limit, offload: bool) -> None:
        costs.require_stages(placement.num_stages, "the placement")
        if m < 1:
            raise ScheduleError(f"number of microbatches is {m}; want at least 1")
        self.placement = placement
        self.flows = Flows(placement, m, costs)
        self.visits = [self.flows.chunks(rank) for rank in range(placement.num_ranks)]
        self.simple = placement.is_plain_chain
        limits = _limits(placement, limit) if self.simple else None
        self.confined = confine_ranks(self.flows, limits, offload)

    def makespan(self) -> float:
        reasons = [self.flows.critical_path(), *self.flows.link_reasons()]
        for visits, confined in zip(self.visits, self.confined, strict=True):
            reasons += _rank_reasons(visits, confined)
        return max([*reasons, *self.spans()])

    def spans(self) -> list[float]:
        spans = []
        for visits, confined in zip(self.visits, self.confined, strict=True):
            round_trips = (v.flow.round_trip[v.stage] + v.flow.backward[v.stage] for v in visits)
            spans.append(max([confined.own, *round_trips], default=0.0))
        if self.simple and self.placement.num_flows == 1:
            spans = [max(pair) for pair in zip(spans, self._through_others(), strict=True)]
        return spans

    def _through_others(self) -> Iterator[float]:
        """Bound each rank's span by others: it starts before what it feeds and ends after what feeds its backwards; −inf if
        it feeds no other rank.

        Let e's first stage be s, and let this rank run a stage a < s. The first F on e has this rank's F of stage a before it
        by at least head(s) − head(a). After the last B on e (its microbatch's B of s is not earlier), that microbatch's B and
        W of every stage of this rank below s still follow.
        """
        flow = self.flows.all[0]
        back = flow.way_back()
        through = {visits[0].stage: x.through for visits, x in zip(self.visits, self.confined, strict=True)}
        last = [flow.head[s] + through.get(s, -inf) for s in range(len(back))]
        last_b = [-inf] * (len(back) + 1)  # the latest last B of an e with s or more
        home = [-inf] * (len(back) + 1)  # the same, back at stage 0
        for s in reversed(range(len(back))):
            last_b[s], home[s] = max(last_b[s + 1], last[s]), max(home[s + 1], last[s] + back[s])
        for visits in self.visits:
            a = visits[0].stage
            rests = (home[s + 1] - back[s] + flow.backward[s] - flow.passed[s] for s in (v.stage for v in visits))
            yield max(last_b[a + 1], *rests) - flow.head[a]


def _rank_reasons(visits: list[Visit], confined: Confined) -> Iterable[float]:
    """Yield seconds before which this rank's last action, or what must follow it on other ranks, can't end."""
    if not visits:
        return
    head = min(v.flow.head[v.stage] for v in visits)
    tail = min(v.flow.tail[v.stage] for v in visits)
    yield head + confined.own
    yield head + confined.through + tail
    yield _released_and_due(visits)


def _released_and_due(visits: list[Visit]) -> float:
    """Return the longest of: a time, all work of this rank that can't start before it and must have an equal time behind
    its end, and that time behind it. Of a backward only the way to the cotangent has anything behind it."""
    work = [(v.flow.head[v.stage], v.count * v.flow.forward[v.stage], v.flow.after_forward(v.stage)) for v in visits]
    for v in visits:
        start, back, passed = v.flow.back_start[v.stage], v.flow.backward[v.stage], v.flow.passed[v.stage]
        work += [(start, v.count * passed, v.flow.tail[v.stage]), (start, v.count * (back - passed), 0.0)]
    work.sort(reverse=True)
    longest = 0.0
    # the bound of one machine with heads and tails: over all sets with tails of at least ``due``
    for due in {tail for _, _, tail in work}:
        spent = 0.0
        for head, seconds, tail in work:
            if tail >= due:
                spent += seconds
                longest = max(longest, head + spent + due)
    return longest


def _limits(placement: Placement, limit: Limit) -> list[float] | None:
    if limit is None:
        return None
    limits = list(limit) if isinstance(limit, Sequence) else [float(limit)] * placement.num_ranks
    if len(limits) != placement.num_ranks:
        raise ScheduleError(
            f"{len(limits)} memory limits for {placement.num_ranks} ranks; give one number or one per rank"
        )
    if any(not x >= 0 for x in limits):
        raise ScheduleError(f"memory limits are {', '.join(f'{x:g}' for x in limits)}; want numbers >= 0")
    return limits
