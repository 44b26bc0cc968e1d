"""Lower bounds on makespan and span that hold for every valid schedule of a placement.

Each bound is a reason why time must pass: a rank's own work between the first activation that can reach it and the last
cotangent that must leave it; the way of one microbatch down and up; a link's own traffic. The largest reason wins. Memory
limits are ignored, so with a limit the truth may lie well above; a bound for it is one more generator of
:func:`_rank_reasons`. Braided slots are taken to cost the sum of their actions, as in the simulator.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule.costs import CostProfile
from jaxpipe.schedule.ir import OpSpec, registered_ops
from jaxpipe.schedule.placement import Placement


def lower_bound(placement: Placement, num_microbatches: int, costs: CostProfile) -> float:
    """Seconds that no valid schedule's makespan can be below.

    Raises:
        ScheduleError: the costs are for another number of stages, or there is no microbatch.
    """
    problem = _problem(placement, num_microbatches, costs)
    reasons = [problem.critical_path(), *problem.link_reasons()]
    for rank in range(placement.num_ranks):
        reasons += _rank_reasons(problem, rank)
    return max(reasons)


def span_lower_bound(placement: Placement, num_microbatches: int, costs: CostProfile) -> float:
    """Seconds that no valid schedule's longest rank span (last end − first start of one rank) can be below.

    Raises:
        ScheduleError: as :func:`lower_bound`.
    """
    problem = _problem(placement, num_microbatches, costs)
    reasons = []
    for rank in range(placement.num_ranks):
        chunks = problem.chunks(rank)
        reasons.append(sum(c.count * c.flow.whole[c.stage] for c in chunks))
        reasons += [c.flow.back_start[c.stage] - c.flow.head[c.stage] + c.flow.whole[c.stage] for c in chunks]
    return max(reasons)


def _rank_reasons(problem: _Problem, rank: int) -> Iterator[float]:
    """Why this rank's last action, or what must follow it on other ranks, can't end earlier."""
    chunks = problem.chunks(rank)
    if not chunks:
        return
    head = min(c.flow.head[c.stage] for c in chunks)
    back = min(c.flow.back_start[c.stage] for c in chunks)
    tail = min(c.flow.tail[c.stage] for c in chunks)
    forward = sum(c.count * c.flow.forward[c.stage] for c in chunks)
    passed_on = sum(c.count * c.flow.passed[c.stage] for c in chunks)
    whole_back = sum(c.count * c.flow.backward[c.stage] for c in chunks)
    yield head + forward + whole_back
    yield head + forward + passed_on + tail
    yield back + whole_back
    yield back + passed_on + tail


def _problem(placement: Placement, num_microbatches: int, costs: CostProfile) -> _Problem:
    if costs.num_stages != placement.num_stages:
        raise ScheduleError(f"the costs are for {costs.num_stages} stages and the placement has {placement.num_stages}")
    if num_microbatches < 1:
        raise ScheduleError(f"number of microbatches is {num_microbatches}; want at least 1")
    return _Problem(placement, num_microbatches, costs)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A stage on a rank, in one flow, for ``count`` microbatches."""

    stage: int
    flow: _Flow
    count: int


class _Problem:
    def __init__(self, placement: Placement, num_microbatches: int, costs: CostProfile) -> None:
        self.placement, self.costs = placement, costs
        used = min(placement.num_flows, num_microbatches)
        self.flows = [_Flow(placement, costs, k) for k in range(used)]
        self.counts = [len(range(k, num_microbatches, placement.num_flows)) for k in range(used)]

    def chunks(self, rank: int) -> list[_Chunk]:
        return [
            _Chunk(s, flow, count)
            for flow, count in zip(self.flows, self.counts, strict=True)
            for s, group in enumerate(flow.groups)
            if rank in group
        ]

    def critical_path(self) -> float:
        """One microbatch alone: down to where it turns, back to the last weight gradient."""
        stages = range(self.placement.num_stages)
        return max(flow.back_start[s] + flow.backward[s] for flow in self.flows for s in stages)

    def link_reasons(self) -> Iterator[float]:
        """Per directed pair of ranks: the first boundary that can be sent, then all of the pair's transfers."""
        traffic: dict[tuple[int, int], list[float]] = {}
        for flow, count in zip(self.flows, self.counts, strict=True):
            for pair, first, seconds in flow.transfers():
                known = traffic.setdefault(pair, [first, 0.0])
                known[0] = min(known[0], first)
                known[1] += count * seconds
        return (first + total for first, total in traffic.values())


class _Flow:
    """One microbatch of one flow, every stage at its earliest; seconds per stage.

    ``head``: earliest start of the forward. ``back_start``: earliest start of the backward. ``tail``: what must follow on
    other ranks once the cotangent has been made. ``forward``, ``passed`` (backward up to the cotangent), ``backward`` (all
    of it): work.
    """

    def __init__(self, placement: Placement, costs: CostProfile, k: int) -> None:
        self.placement, self.costs = placement, costs
        self.groups = placement.flows[k]
        n = placement.num_stages
        self.forward = [_cheapest(costs, s, {"F"}) for s in range(n)]
        self.passed = [_cheapest(costs, s, {"B"}, sent=True) for s in range(n)]
        self.backward = [_cheapest(costs, s, _required() - {"F"}) for s in range(n)]
        self.whole = [f + b for f, b in zip(self.forward, self.backward, strict=True)]
        order = placement.topological_order()
        before = [placement.predecessors(s) for s in range(n)]
        after = [placement.successors(s) for s in range(n)]
        self.head, self.back_start, self.tail = [0.0] * n, [0.0] * n, [0.0] * n
        for s in order:
            arrivals = [self.head[a] + self.forward[a] + self._move(a, s, boundary=a) for a in before[s]]
            self.head[s] = max(arrivals, default=0.0)
        for s in reversed(order):
            arrivals = [self.back_start[b] + self.passed[b] + self._move(b, s, boundary=s) for b in after[s]]
            self.back_start[s] = max([self.head[s] + self.forward[s], *arrivals])
        for s in order:
            rest = self.backward[s] - self.passed[s]
            later = [self._move(s, a, boundary=a) + self.passed[a] + self.tail[a] for a in before[s]]
            self.tail[s] = max([rest if not before[s] else 0.0, *later])

    def _routes(self, src: int, dst: int) -> list[tuple[int, int]]:
        """Pairs of ranks between which a boundary moves from stage ``src`` to stage ``dst``."""
        there, here = self.groups[src], self.groups[dst]
        return [(there[0], rank) for rank in here if rank not in there]

    def _move(self, src: int, dst: int, boundary: int) -> float:
        return max((self.costs.transfer_s(a, b, boundary) for a, b in self._routes(src, dst)), default=0.0)

    def transfers(self) -> Iterator[tuple[tuple[int, int], float, float]]:
        """(pair of ranks, when it can start at the earliest, seconds) of each boundary that moves."""
        seen = set()
        for a, b in self.placement.edges:
            for pair in self._routes(a, b):
                if (pair, a) not in seen:
                    seen.add((pair, a))
                    yield pair, self.head[a] + self.forward[a], self.costs.transfer_s(*pair, a)
            for pair in self._routes(b, a):
                yield pair, self.back_start[b] + self.passed[b], self.costs.transfer_s(*pair, a)


def _required() -> set[str]:
    return {spec.name for spec in registered_ops() if spec.required}


def _performers() -> list[OpSpec]:
    required = _required()
    return [spec for spec in registered_ops() if required.intersection(spec.performs())]


def _cheapest(costs: CostProfile, stage: int, parts: set[str], *, sent: bool = False) -> float:
    """Least seconds in which registered ops can perform ``parts`` of ``stage``; with ``sent``, a superset will do."""
    best = float("inf")
    for spec in _performers():
        does = set(spec.performs())
        if sent and parts <= does:
            best = min(best, costs.seconds(spec.cost, stage))
        elif not sent and does & parts == does and min(parts) in does:
            rest = parts - does
            best = min(best, costs.seconds(spec.cost, stage) + (_cheapest(costs, stage, rest) if rest else 0.0))
    return best
