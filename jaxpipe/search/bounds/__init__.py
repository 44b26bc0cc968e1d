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

What a placement asks of its ranks and links: what one microbatch alone needs, per stage and flow, the traffic it puts on
links, and what each rank does and holds, handed to the arguments about one rank (:mod:`~jaxpipe.search.bounds.memory`).

Everything here holds for any placement: DAGs of stages, stages spread over groups of ranks, several flows. Braided slots take
at least the sum of their actions' compute, as in the simulator. collectives take no rank's time, since a braid may hide
them, but a microbatch waits for its own, in a braid or not: heads, first backwards and tails count them. User ops count where
they perform F, B or W; an op that performs a forward and a backward at once would void the bounds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from math import inf
from typing import NamedTuple

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule.costs import PER_STAGE_FIELDS, CostProfile
from jaxpipe.schedule.engine import collectives_exposed
from jaxpipe.schedule.ir import registered_ops
from jaxpipe.schedule.placement import Placement
from jaxpipe.schedule.timeline import how_many
from jaxpipe.search.bounds.memory import ChainTimes, Confined, StageWork, chunk_turns, confine, meet, releases

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
    return lower_bounds(placement, microbatches, costs, memory_limit=memory_limit, offload=offload)[0]


def span_lower_bound(
    placement: Placement, microbatches: int, costs: CostProfile, *, memory_limit: Limit = None, offload: bool = False
) -> float:
    """Return the seconds that no valid schedule's longest rank span (last end − first start of one rank) can be below.

    ``memory_limit``, ``offload``, Raises: as :func:`lower_bound`.
    """
    return lower_bounds(placement, microbatches, costs, memory_limit=memory_limit, offload=offload)[1]


def lower_bounds(
    placement: Placement, microbatches: int, costs: CostProfile, *, memory_limit: Limit = None, offload: bool = False
) -> tuple[float, float]:
    """Return what :func:`lower_bound` and :func:`span_lower_bound` do, in the time of one of them."""
    bounds = _Bounds(placement, microbatches, costs, memory_limit, offload)
    spans = bounds.spans()
    return max([*bounds.makespan_reasons(), *spans]), max(spans)


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

    def makespan_reasons(self) -> Iterator[float]:
        """Yield seconds that no makespan is below; nor is it below any span."""
        yield self.flows.critical_path()
        yield from self.flows.link_reasons()
        yield from chain.from_iterable(map(_rank_reasons, self.visits, self.confined))

    def spans(self) -> list[float]:
        spans = []
        for visits, confined in zip(self.visits, self.confined, strict=True):
            round_trips = (v.flow.round_trip[v.stage] + v.flow.backward[v.stage] for v in visits)
            spans.append(max([confined.own, *round_trips]))
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
    """Return a limit per rank; None where none of them limits anything."""
    if limit is None:
        return None
    limits = list(limit) if isinstance(limit, Sequence) else [float(limit)] * placement.num_ranks
    if len(limits) != placement.num_ranks:
        raise ScheduleError(
            f"{len(limits)} memory limits for {placement.num_ranks} ranks; give one number or one per rank"
        )
    if any(not x >= 0 for x in limits):
        raise ScheduleError(f"memory limits are {', '.join(f'{x:g}' for x in limits)}; want numbers >= 0")
    return limits if min(limits) < inf else None


@dataclass(frozen=True, slots=True)
class Visit:
    """A stage on a rank, in one flow, for ``count`` microbatches."""

    stage: int
    flow: FlowTimes
    count: int


class Flows:
    """The flows of a placement, and which rank visits what how often."""

    def __init__(self, placement: Placement, num_microbatches: int, costs: CostProfile) -> None:
        self.placement, self.costs = placement, costs
        used = min(placement.num_flows, num_microbatches)
        self.all = [FlowTimes(placement, costs, k) for k in range(used)]
        self.counts = [len(range(k, num_microbatches, placement.num_flows)) for k in range(used)]

    def chunks(self, rank: int) -> list[Visit]:
        """Return the stages that ``rank`` runs, flow by flow, ascending."""
        return [
            Visit(s, flow, count // self.placement.span[s])
            for flow, count in zip(self.all, self.counts, strict=True)
            for s in self.placement.stages_of(rank)
            if rank in flow.groups[s]
        ]

    def critical_path(self) -> float:
        """Return the seconds of one microbatch alone: down to where it turns, back to the last weight gradient."""
        stages = range(self.placement.num_stages)
        return max(flow.back_start[s] + flow.waits_bw[s] for flow in self.all for s in stages)

    def link_reasons(self) -> Iterator[float]:
        """Yield, per directed pair of ranks: the first boundary that can be sent, all of the pair's transfers, what must
        follow."""
        traffic: dict[tuple[int, int], list[_Traffic]] = {}
        for flow, count in zip(self.all, self.counts, strict=True):
            for pair, sent in flow.transfers():
                traffic.setdefault(pair, []).append(sent._replace(seconds=count * sent.seconds))
        for all_sent in traffic.values():
            yield min(x.earliest for x in all_sent) + sum(x.seconds for x in all_sent) + min(x.rest for x in all_sent)


class _Traffic(NamedTuple):
    """One boundary on a link: earliest start, seconds in which it occupies the link, seconds that must follow."""

    earliest: float
    seconds: float
    rest: float


class FlowTimes:
    """One microbatch of one flow, every stage at its earliest; seconds per stage.

    ``head``: earliest start of the forward. ``back_start``: earliest start of the backward. ``round_trip``: from the
    forward's start to the backward's. ``tail``: what must follow once the cotangent has been made. ``forward``, ``passed``
    (backward up to the cotangent), ``backward`` (all of it): work. ``head``, ``back_start`` and ``tail`` count collectives.
    """

    def __init__(self, placement: Placement, costs: CostProfile, k: int) -> None:
        self.placement, self.costs = placement, costs
        self.groups = placement.flows[k]
        n = placement.num_stages
        (self.forward, self.passed, self.backward), (self.waits_f, self.waits_b, self.waits_bw) = (
            [[_cheapest(x, s, frozenset(parts)) for s in range(n)] for parts in ("F", "B", "BW")]
            for x in (costs, collectives_exposed(costs))
        )
        self.head, self.back_start, self.round_trip, self.tail = [0.0] * n, [0.0] * n, [0.0] * n, [0.0] * n
        order = placement.topological_order()
        for s in order:
            self._go_down(s)
        for s in reversed(order):
            self._come_back(s)
        for s in order:
            behind = () if s in placement.detached else placement.predecessors(s)
            later = [self.hop(s, a, a) + self.waits_b[a] + self.tail[a] for a in behind]
            self.tail[s] = max([self.waits_bw[s] - self.waits_b[s], *later])

    def _go_down(self, s: int) -> None:
        before, span = self.placement.predecessors(s), self.placement.span
        # when the last of those that s's group waits for begins
        first = [self.head[a] + (-(-span[s] // span[a]) - 1) * self.forward[a] for a in before]
        arrivals = [x + self.waits_f[a] + self.hop(a, s, a) for x, a in zip(first, before, strict=True)]
        self.head[s] = max(arrivals, default=0.0)

    def _come_back(self, s: int) -> None:
        self.round_trip[s] = self.forward[s]
        self.back_start[s] = self.head[s] + self.waits_f[s]
        for b in self.placement.returning(s):
            back = self.hop(b, s, s)
            there_and_back = self.forward[s] + self.hop(s, b, s) + self.round_trip[b] + self.passed[b] + back
            self.round_trip[s] = max(self.round_trip[s], there_and_back)
            self.back_start[s] = max(self.back_start[s], self.back_start[b] + self.waits_b[b] + back)

    def _routes(self, src: int, dst: int) -> list[tuple[int, int]]:
        """Return the pairs of ranks between which a boundary moves from stage ``src`` to stage ``dst``."""
        sources, targets = self.groups[src], self.groups[dst]
        return [(sources[0], rank) for rank in targets if rank not in sources]

    def hop(self, src: int, dst: int, boundary: int) -> float:
        """Return the seconds that the boundary of stage ``boundary`` takes from stage ``src`` to stage ``dst``."""
        return max((self.costs.transfer_s(a, b, boundary) for a, b in self._routes(src, dst)), default=0.0)

    def after_forward(self, s: int) -> float:
        """Return the seconds that must follow the end of a forward."""
        return self.round_trip[s] - self.forward[s] + self.passed[s] + self.tail[s]

    def way_back(self) -> list[float]:
        """Return, per stage of a chain: seconds from the end of its B to the end of the same microbatch's B of stage 0."""
        way = [0.0]
        for s in range(len(self.groups) - 1):
            way.append(way[s] + self.passed[s] + self.hop(s + 1, s, s))
        return way

    def transfers(self) -> Iterator[tuple[tuple[int, int], _Traffic]]:
        """Yield each boundary that moves, its ranks, its seconds a microbatch; an activation goes once to a rank that needs
        it."""
        span = self.placement.span
        down: dict[tuple[tuple[int, int], int], _Traffic] = {}
        for a, b in self.placement.edges:
            for pair in self._routes(a, b):
                occupied_s = self.costs.occupied_s(*pair, a)
                rest = self.costs.transfer_s(*pair, a) - occupied_s + self.forward[b] + self.after_forward(b)
                traffic = down.get((pair, a))
                # one activation may feed several stages there; sure is only the least that follows
                rest = rest if traffic is None else min(rest, traffic.rest)
                down[pair, a] = _Traffic(self.head[a] + self.forward[a], occupied_s / span[a], rest)
            for pair in self._routes(b, a) if b not in self.placement.detached else ():
                occupied_s = self.costs.occupied_s(*pair, a, span[b] / span[a])
                rest = self.costs.transfer_s(*pair, a, span[b] / span[a]) - occupied_s + self.passed[a] + self.tail[a]
                yield pair, _Traffic(self.back_start[b] + self.passed[b], occupied_s / span[b], rest)
        yield from ((pair, sent) for (pair, _), sent in down.items())


def _cheapest(costs: CostProfile, stage: int, parts: frozenset[str]) -> float:
    """Return the least seconds in which registered ops can perform ``parts`` of ``stage``."""
    if not parts:
        return 0.0
    # the least over all registered ops: a bound holds for schedules with ops of the user's own, too
    first, priced = min(parts), {*PER_STAGE_FIELDS, *dict(costs.extra)}
    specs = [spec for spec in registered_ops() if first in spec.performs() and spec.cost in priced]
    return min(
        costs.seconds(spec.cost, stage) + _cheapest(costs, stage, parts.difference(spec.performs())) for spec in specs
    )


def confine_ranks(flows: Flows, limits: Sequence[float] | None, offload: bool) -> list[Confined]:
    """Return, per rank, bounds on its own span and on the time to its last B. Without limits, its work."""
    p = flows.placement.num_ranks
    works_of = [work_by_stage(flows, rank) for rank in range(p)]
    if limits is None:
        return [confine(stage_works, inf, offload) for stage_works in works_of]
    bounds = [confine(stage_works, limit, offload) for stage_works, limit in zip(works_of, limits, strict=True)]
    # a microbatch on its way may be on the host, so with offload its chunks need not take turns
    if not offload:
        turns = (chunk_turns(stage_works, limit) for stage_works, limit in zip(works_of, limits, strict=True))
        bounds = [bound.or_longer(turn) for bound, turn in zip(bounds, turns, strict=True)]
    if flows.placement.num_flows == 1 and flows.placement.num_stages == p > 1 and not offload:
        # the crossing argument is for one flow and one stage per rank; it is made from the rank down where the limit costs most
        rank = max(range(p), key=lambda r: _slowness(works_of[r][0], limits[r]))
        if bounds[rank].own < inf:
            (visit,), (top,) = flows.chunks(rank), works_of[rank]
            run = _run(visit.flow, visit.stage)
            bounds[rank] = bounds[rank].or_longer(meet(run, top, limits[rank], releases(top, limits[rank])))
    return bounds


def _slowness(top: StageWork, limit: float) -> float:
    lanes = how_many(top.held, limit) if top.held > 0 else top.count
    return top.trip_s / max(1, lanes)


def _run(flow: FlowTimes, stage: int) -> ChainTimes:
    stages = range(stage, len(flow.groups))
    return ChainTimes(
        f_s=[flow.forward[s] for s in stages],
        b_s=[flow.passed[s] for s in stages],
        down_s=[flow.hop(s, s + 1, s) for s in stages[:-1]],
        up_s=[flow.hop(s + 1, s, s) for s in stages[:-1]],
    )


def work_by_stage(flows: Flows, rank: int) -> list[StageWork]:
    """Return what ``rank`` does and holds, flow by flow, stages ascending."""
    visits, stage_works = flows.chunks(rank), []
    for number, flow in enumerate(flows.all):
        mine = [v for v in visits if v.flow is flow]
        share = sum(flows.costs.residual_bytes[v.stage] for v in mine)
        start = min((flow.head[v.stage] for v in mine), default=0.0)
        stage_works += [_stage_work(flows, v, number, share, start) for v in mine]
    return stage_works


def _stage_work(flows: Flows, v: Visit, number: int, share: float, start: float) -> StageWork:
    """Return what a rank does and holds for one visit. ``share``: residuals of all visits of the same flow on the same rank;
    ``start``: the first of them at its earliest."""
    flow, s, costs = v.flow, v.stage, flows.costs
    d2h, h2d = costs.offload_s[s], costs.load_s[s]
    return StageWork(
        flow=number,
        count=v.count,
        f_s=flow.forward[s],
        b_s=flow.passed[s],
        back_s=flow.backward[s],
        trip_s=flow.round_trip[s],
        in_s=flow.head[s] - start,
        out_s=flow.back_start[s] - start,
        held=costs.residual_bytes[s] / share if share > 0 else 0.0,
        kept=costs.w_residual_bytes[s] / share if share > 0 else 0.0,
        leaves=min(costs.residual_bytes[s], costs.offloadable_bytes[s]) / share if share > 0 else 0.0,
        d2h_s=d2h,
        h2d_s=h2d,
        together_s=d2h + h2d if costs.host.mode == "shared" else (d2h + h2d) / 2,
    )
