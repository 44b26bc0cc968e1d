"""Bounds from a few ranks at once (:mod:`~jaxpipe.search.bounds.orders`): the set of ranks grows by the one that proves most.

Each set is asked for more and more: is there an order that ends within a quarter of the gap above the bound, half of it,
three quarters? What can't end in time is left out of the search, so a small step costs little, and each no is a bound.

With offload one rank at a time, with its host lane (:mod:`~jaxpipe.search.bounds.host_orders`).

For plain chains in one direction. Where durations have no common step they are rounded down (``grids.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from jaxpipe.schedule.costs import CostProfile
from jaxpipe.schedule.placement import Placement
from jaxpipe.schedule.tolerance import how_many
from jaxpipe.search.bounds.flows import Flows, FlowTimes
from jaxpipe.search.bounds.host_orders import HostOrders
from jaxpipe.search.bounds.memory import StageWork
from jaxpipe.search.bounds.orders import Ends, Kept, Orders, Step
from jaxpipe.search.bounds.ranks import residents
from jaxpipe.search.budget import Budget
from jaxpipe.search.grids import Ticks, time_grid

_PARTS_OF_GAP = 4
_WIDTH = 400  # states with the same counts: more become fewer; not tuned
_PART_OF_TIME = 2  # of what is left, for one set of ranks
_STATES_PER_S = 60_000  # that follow one another, roughly: what a reproducible search counts instead of seconds


class FewRanks:
    """A problem in ticks. ``limits``: per rank, activations in units of its share of one microbatch. ``span``: the longest
    span is bounded, not the makespan.

    Raises:
        ScheduleError: the costs are too uneven for a grid.
    """

    def __init__(
        self,
        placement: Placement,
        num_microbatches: int,
        costs: CostProfile,
        limits: Sequence[float],
        *,
        offload: bool = False,
        span: bool = False,
    ) -> None:
        self.count, self.limits, self.offload, self.span = num_microbatches, limits, offload, span
        self.shared_lane = costs.host.mode == "shared"
        flows = Flows(placement, num_microbatches, costs)
        self.flow: FlowTimes = flows.all[0]
        self.stays = [residents(flows, rank) for rank in range(placement.num_ranks)]
        self.rank_of = [group[0] for group in self.flow.groups]
        n = len(self.rank_of)
        hops = [self.flow.hop(s, s + 1, s) for s in range(n - 1)] + [self.flow.hop(s + 1, s, s) for s in range(n - 1)]
        w = [b - a for a, b in zip(self.flow.passed, self.flow.backward, strict=True)]
        host = [*costs.offload_s, *costs.load_s] if offload else []
        durations = [*self.flow.forward, *self.flow.passed, *w, *hops, *host]
        self.ticks: Ticks = time_grid(durations, (num_microbatches + 1) * sum(durations))

    def bounds(self, bound: float, value: float, budget: Budget) -> Iterator[float]:
        """Yield better and better bounds, in seconds, from one that is known up to the ``value`` of a known schedule."""
        least, top = self.ticks.at_least(bound), self.ticks.of(value)
        last = len(self.stays) - 1
        order = list(range(last + 1))  # the longest trip first, or the turns
        if len(self.rank_of) > len(self.stays):
            order.sort(key=lambda rank: (min(rank, last - rank), -rank))
        ranks: tuple[int, ...] = ()
        while len(ranks) <= last:
            sets = [tuple(sorted((*ranks, rank))) for rank in order if rank not in ranks]
            scores = []
            for rank_set in sets:
                score = 0
                orders = self.host_orders(*rank_set) if self.offload else self.orders(rank_set)
                for score in _raised(orders, least, top, budget) if orders else ():
                    if score > least:
                        least = score
                        yield self._seconds(least)
                scores.append(score)
                if least >= top or budget.left <= 0:
                    return
            # the search with a host lane is for one rank: there are no larger sets
            if self.offload:
                return
            # grown by the best one, for there are too many sets to search them all
            ranks = sets[scores.index(max(scores))]

    def _seconds(self, ticks: int) -> float:
        return self.ticks.span_bound_s(ticks) if self.span else self.ticks.makespan_bound_s(ticks)

    def orders(self, ranks: Sequence[int]) -> Orders:
        """Return the orders of ``ranks`` (ascending)."""
        flow, of = self.flow, self.ticks.of
        stages = [s for s, rank in enumerate(self.rank_of) if rank in ranks]
        stay: dict[int, StageWork] = {
            s: x for rank in ranks for s, x in zip(self._stages(rank), self.stays[rank], strict=True)
        }
        back = flow.way_back()
        down = [0.0]  # from F's start of stage 0 to that of each stage
        for s in range(len(back) - 1):
            down.append(down[s] + flow.forward[s] + flow.hop(s, s + 1, s))
        last = stages[-1]
        starts = [down[s] for s in stages] + [
            down[last] + flow.round_trip[last] + flow.passed[last] - flow.passed[s] + back[last] - back[s]
            for s in reversed(stages)
        ]
        # from each step's start to the next one's: its own time, transfers, and other ranks between
        lags = [of(b - a) for a, b in pairwise(starts)] + [0]
        number = {rank: i for i, rank in enumerate(ranks)}
        way = [(s, flow.forward[s]) for s in stages] + [(s, flow.passed[s]) for s in reversed(stages)]
        steps = [
            Step(number[self.rank_of[s]], stages.index(s), of(seconds), lag)
            for (s, seconds), lag in zip(way, lags, strict=True)
        ]
        return Orders(
            steps=tuple(steps),
            stages=tuple(Kept(stay[s].held, stay[s].kept, of(stay[s].w_s)) for s in stages),
            limits=tuple(self.limits[rank] for rank in ranks),
            ends=tuple(self._ends(rank, stages[0], back) for rank in ranks),
            count=self.count,
        )

    def host_orders(self, rank: int) -> HostOrders | None:
        """The orders of one rank with its host lane; none where it has several stages, or moves parts, or both ways at once."""
        stays, limit, of = self.stays[rank], self.limits[rank], self.ticks.of
        if len(stays) != 1 or limit == float("inf"):
            return None
        (x,) = stays
        # that search counts activations that leave and come back whole
        offloads_everything = 0 < x.held <= min(x.kept, x.leaves)
        if not offloads_everything or not self.shared_lane:
            return None
        return HostOrders(
            f=of(x.f_s),
            b=of(x.b_s),
            w=of(x.w_s),
            o=of(x.d2h_s),
            back=of(x.h2d_s),
            trip=of(x.trip_s),
            room=how_many(x.held, limit),
            ends=self._ends(rank, self._stages(rank)[0], self.flow.way_back()),
            count=self.count,
        )

    def _stages(self, rank: int) -> list[int]:
        return [s for s, r in enumerate(self.rank_of) if r == rank]

    def _ends(self, rank: int, first: int, back: Sequence[float]) -> Ends:
        """Return what follows the work of ``rank`` in a search that starts with the F of stage ``first``."""
        flow, of, s = self.flow, self.ticks.of, self._stages(rank)[0]
        if not self.span:
            return Ends(of(flow.head[first] + flow.tail[s]), of(flow.head[first]))
        before = flow.head[first] - flow.head[0]
        home = of(before + back[s] + flow.backward[0] - flow.passed[0])
        return Ends(home, 0 if rank == self.rank_of[first] else -float("inf"))


def _raised(orders: Orders | HostOrders, least: int, top: int, budget: Budget) -> Iterator[int]:
    """Yield the ticks that no order's objective is below: one step after the other from ``least`` to ``top``, or what it
    can't exceed."""
    late = _late_for(budget)
    for part in range(1, _PARTS_OF_GAP + 1):
        most = least + (top - least) * part // _PARTS_OF_GAP - 1
        objective = orders.least(most, _WIDTH, late)
        # no order ends by ``most``, so each needs a tick more
        if objective > most:
            yield most + 1
            continue
        yield int(objective)
        return


def _late_for(budget: Budget) -> Callable[[int], bool]:
    """Return a predicate of the states that a search made: whether they spent their share of the remaining budget."""
    end = budget.left * (1 - 1 / _PART_OF_TIME)

    def late(states: int) -> bool:
        # states stand for seconds, so that no clock decides
        if budget.reproducible:
            budget.spent += states / _STATES_PER_S
        return budget.left <= end

    return late
