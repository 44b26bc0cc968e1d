"""A few ranks exactly, by dynamic programming over the orders of their actions; all other ranks only take time.

Keep the actions of some ranks of a chain, each with its rank to itself and its activations under the limit; between two of a
microbatch's actions that were kept, what lies on other ranks takes at least its own time. Every schedule stays one when
other ranks' actions are left out, so the least time of what is left bounds it. All microbatches are alike: name the j-th F, B
and W of each stage after microbatch j, and what waited for its own microbatch's action before waits for none later than then
(sorting both sides of s_i + lag ≤ t_i keeps it true). So an order is a row of (action, next microbatch), and each action
starts when its rank is free and its microbatch has come; memory is given back at ends on the same rank, so order alone tells
what fits.

A state is what has been started, how often, and: the time when each rank is free, and the times at which microbatches on their
way reach the next action. Of two states with the same counts one that is nowhere later is as good, so only states that no
other dominates are kept. The limit leaves few microbatches on their way, so there are few: tens per count where the limit
is tight. Where there are more than ``width`` with the same counts, neighbours become one state with the least of their
times, which bounds both. A state from which the work left on some rank ends too late is dropped.

Two ranks see what neither sees alone: a V at p/2 with uneven costs loses time because the actions of a microbatch on both
can't follow each other at once without idling one of them.

**With offload** (:class:`HostOrders`) one rank of a chain and its host lane, in the same way. The rank has one stage and room
for ``room`` activations, whole from F to W; O's and L's take turns on one lane, and every activation may go to the host and
come back. Actions are taken in order of their starts, so it is known what has been given back when an F or an L starts: all
but what runs.

Which activation moves does not matter, but for when its B may start (*ready*: a trip after its F). Of two activations that
the rank holds, let the one that is ready first run B first: if it does not, let the two swap what follows; the later B is
late enough for either, and so is the sooner one for the activation that is ready sooner. In the same way the last to be
ready leaves first, and the first to be ready comes back first. (The last may be the one whose F runs and which can't leave
yet, so the one before it is tried too.) Swapping may let an activation leave twice, which no schedule does: that only makes
the bound lower; O's are as many as microbatches at most.

**Which ranks** (:class:`FewRankBounds`): the set of ranks grows by the one that proves most; with offload it is one rank at a
time, with its host lane. Each set is asked for more and more: is there an order that ends within a quarter of the gap above
the bound, half of it, three quarters? What can't end in time is left out of the search, so a small step costs little, and each
no is a bound.

For plain chains in one direction. Where durations have no common step they are rounded down (``budget.py``).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf
from operator import le
from typing import NamedTuple, Protocol, TypeVar

from jaxpipe.schedule.costs import CostProfile
from jaxpipe.schedule.placement import Placement
from jaxpipe.schedule.timeline import MEMORY, at_most, how_many
from jaxpipe.search.bounds import Flows, FlowTimes, work_by_stage
from jaxpipe.search.bounds.memory import StageWork
from jaxpipe.search.budget import Budget, Ticks, time_grid

C = TypeVar("C")
Late = Callable[[int], bool]
"""Told how many states come next: whether time is up."""
State = tuple[int, ...]
"""Least objective that is already sure; per rank, when it is free; per step but the first and per microbatch on its way to it,
when it is there."""


@dataclass(frozen=True, slots=True)
class Step:
    """An F or B of every microbatch on rank number ``rank``: ``ticks`` it takes, ``lag`` from its start to that of the next."""

    rank: int
    stage: int
    ticks: int
    lag: int


@dataclass(frozen=True, slots=True)
class StageMemory:
    """A stage on a rank that is kept: units ``held`` from F's start to B's end, ``kept`` from there to the end of its W, which
    takes ``w`` ticks."""

    held: float
    kept: float
    w: int


@dataclass(frozen=True, slots=True)
class RankTail:
    """Ticks that a rank adds to the objective: from the end of its last B, and from the end of its last action, to the
    objective's; −inf where it is not measured by that."""

    after_b: float
    after_all: float


class OrderSearch(Protocol[C]):
    """A search of all orders, one action after the other; states are told apart by counts of what has started."""

    def least(self, most: float, width: int, late: Late) -> float:
        """Return the ticks from the first start that no order's objective is below: the least of what is at most ``most``,
        else infinite.

        0, which proves nothing, if ``late`` said so.
        """
        best, layer = inf, dict([self.first()])
        while layer:
            after: dict[C, list[State]] = {}
            for counts, states in layer.items():
                if self.ended(counts):
                    best = min(best, *map(self.objective, states))
                    continue
                if late(len(states)):
                    return 0.0
                for then, successors in self.next(counts, states):
                    after.setdefault(then, []).extend(successors)
            # states that end too late are dropped before others are merged, which then lose less
            hopeful = {counts: self.hopeful(counts, states, most) for counts, states in after.items()}
            layer = {
                counts: _merge_neighbours(_pareto_front(states), width) for counts, states in hopeful.items() if states
            }
        return best

    def first(self) -> tuple[C, list[State]]:
        """Return what has started before any action, nothing, and the states then."""

    def ended(self, counts: C, /) -> bool:
        """Return whether no action is left to start."""

    def next(self, counts: C, states: Sequence[State], /) -> Iterator[tuple[C, list[State]]]:
        """Return every action that may follow, and the states after it."""

    def hopeful(self, counts: C, states: Sequence[State], most: float, /) -> list[State]:
        """Return the states that may still end by ``most``."""

    def objective(self, state: State) -> float:
        """Return the objective, in ticks, of a state without actions left."""


_Counts = tuple[int, ...]
"""How often each step, then each kind of W, has started."""


class Orders(OrderSearch[_Counts]):
    """``count`` microbatches through ``steps`` (F's of ``stages`` in order, then their B's) on ranks with ``limits``. The next
    action is an F, B or W of any rank."""

    def __init__(
        self,
        steps: Sequence[Step],
        stages: Sequence[StageMemory],
        limits: Sequence[float],
        ends: Sequence[RankTail],
        count: int,
    ) -> None:
        self.steps, self.stages, self.limits, self.ends, self.count = steps, stages, limits, ends, count
        self.ranks = range(len(limits))
        rank_of = {step.stage: step.rank for step in steps}
        # W's of one length and size are exchangeable: counted together they make fewer states
        kinds = [(rank_of[s], x.w, x.kept) for s, x in enumerate(stages)]
        self.kinds = sorted(set(kinds))  # W's that are alike on a rank
        self.kind_of = [self.kinds.index(x) for x in kinds]
        self.last_b = [max(k for k, step in enumerate(steps) if step.rank == rank) for rank in self.ranks]
        self.spare = [self._spare_weights(rank) for rank in self.ranks]

    def first(self) -> tuple[_Counts, list[State]]:
        return (0,) * (len(self.steps) + len(self.kinds)), [(0,) * (1 + len(self.limits))]

    def _spare_weights(self, rank: int) -> float:
        """Return the most ticks of W's that can wait when the last B of ``rank`` ends."""
        mine = [(w, residue) for r, w, residue in self.kinds if r == rank]
        limit = self.limits[rank]
        # W's that hold nothing may all wait
        if limit == inf or any(w and not residue for w, residue in mine):
            return inf
        if len(mine) == 1:
            ((w, residue),) = mine
            return w * how_many(residue, limit) if residue else 0
        return max(w * limit / residue if residue else 0.0 for w, residue in mine) * (1 + MEMORY)

    def ended(self, counts: _Counts) -> bool:
        return sum(counts) == self.count * (len(self.steps) + len(self.stages))

    def objective(self, state: State) -> float:
        return max(state[0], *(state[1 + r] + self.ends[r].after_all for r in self.ranks))

    def hopeful(self, counts: _Counts, states: Sequence[State], most: float) -> list[State]:
        # all that a rank has yet to run must fit before the latest end
        passes, waits = [0] * len(self.limits), [0] * len(self.limits)
        for step, done in zip(self.steps, counts, strict=False):
            passes[step.rank] += (self.count - done) * step.ticks
        for k, ((rank, w, _), done) in enumerate(zip(self.kinds, counts[len(self.steps) :], strict=True)):
            waits[rank] += (self.count * self.kind_of.count(k) - done) * w
        latest = []
        for rank, ends in enumerate(self.ends):
            ways = [passes[rank] + waits[rank] + ends.after_all]
            if counts[self.last_b[rank]] < self.count:
                ways.append(passes[rank] + max(0.0, waits[rank] - self.spare[rank]) + ends.after_b)
            latest.append(most - max(ways))
        return [x for x in states if x[0] <= most and all(x[1 + r] <= t for r, t in enumerate(latest))]

    def next(self, counts: _Counts, states: Sequence[State]) -> Iterator[tuple[_Counts, list[State]]]:
        n = len(self.steps)
        under_way = [a - b for a, b in pairwise(counts[:n])]
        first = 1 + len(self.ranks)
        at = [first, *accumulate(under_way, initial=first)]  # at[k]: where those stand that are on their way to step k
        waits = [0] * len(self.kinds)
        level = [0.0] * len(self.ranks)
        for s, stage in enumerate(self.stages):
            kind, b = self.kind_of[s], counts[n - 1 - s]
            waits[kind] += b
            level[self.kinds[kind][0]] += stage.held * (counts[s] - b)
        for kind, (rank, _, residue) in enumerate(self.kinds):
            waits[kind] -= counts[n + kind]
            level[rank] += residue * waits[kind]
        # entries of a state that are no earlier than the rank is free
        mine: list[list[int]] = [[1 + r] for r in self.ranks]
        for k in range(1, n):
            mine[self.steps[k].rank] += range(at[k], at[k + 1])
        # the next microbatch of each step that has one waiting
        for k, step in enumerate(self.steps):
            if counts[k] == self.count or (k and not under_way[k - 1]):
                continue
            # F's are the first half of the steps, and only they take memory
            if 2 * k < n and not at_most(level[step.rank] + self.stages[step.stage].held, self.limits[step.rank]):
                continue
            then = (*counts[:k], counts[k] + 1, *counts[k + 1 :])
            home = self.ends[step.rank].after_b if k == self.last_b[step.rank] and then[k] == self.count else -inf
            yield then, [self._after_step(x, k, at, mine[step.rank], home) for x in states]
        for kind, (rank, w, _) in enumerate(self.kinds):
            if waits[kind]:
                then = (*counts[: n + kind], counts[n + kind] + 1, *counts[n + kind + 1 :])
                yield then, [_busy_until(list(x), mine[rank], x[1 + rank] + w) for x in states]

    def _after_step(self, x: State, k: int, at: Sequence[int], mine: Sequence[int], home: float) -> State:
        """Return the state after step k of the next microbatch."""
        steps = self.steps
        step, free = steps[k], 1 + steps[k].rank
        start = x[at[k]] if k else x[free]
        after = list(x)
        end = start + step.ticks
        # the last B fixes what must follow it on other ranks
        if home > -inf:
            after[0] = max(after[0], int(end + home))
        after = list(_busy_until(after, mine, end))
        if k + 1 < len(steps):
            arrival = start + step.lag
            after.insert(at[k + 2], max(arrival, after[1 + steps[k + 1].rank]))
        if k:
            del after[at[k]]
        return tuple(after)


def _busy_until(x: list[int], mine: Sequence[int], end: int) -> State:
    """Return the state with a rank busy until ``end``."""
    # what arrives while the rank is busy starts no earlier: raised, states that act alike are equal
    for i in mine:
        if x[i] < end:
            x[i] = end
    return tuple(x)


def _pareto_front(states: Sequence[State]) -> list[State]:
    """Return those that no other dominates."""
    best: list[State] = []
    # what dominates a state has no larger sum, so it was looked at before
    for x in sorted(set(states), key=sum):
        if not any(all(map(le, y, x)) for y in best):
            best.append(x)
    return best


def _merge_neighbours(states: list[State], width: int) -> list[State]:
    """Return about ``width`` states, of which one is nowhere later, for each of these."""
    if len(states) <= width:
        return states
    # neighbours are alike, so their common minimum gives little away
    states.sort()
    size = -(-len(states) // width)
    return [tuple(map(min, zip(*states[i : i + size], strict=True))) for i in range(0, len(states), size)]


class _HostCounts(NamedTuple):
    """How often each action has started, and whether the last one of the lane and of the rank gives an activation back."""

    f: int = 0
    b: int = 0
    w: int = 0
    o: int = 0
    back: int = 0  # L's
    lane_gives: bool = False
    rank_gives: bool = False


@dataclass(frozen=True, slots=True)
class HostOrders(OrderSearch[_HostCounts]):
    """``count`` microbatches; ticks of each action, and ``trip`` from F's start to B's."""

    f: int
    b: int
    w: int
    o: int
    back: int
    trip: int
    room: int
    ends: RankTail
    count: int

    def first(self) -> tuple[_HostCounts, list[State]]:
        return _HostCounts(), [(0, 0, 0)]

    def ended(self, n: _HostCounts) -> bool:
        return n.w == self.count and n.o == n.back

    def objective(self, state: State) -> float:
        return max(state[0], state[1] + self.ends.after_all)

    def hopeful(self, n: _HostCounts, states: Sequence[State], most: float) -> list[State]:
        passes = (self.count - n.f) * self.f + (self.count - n.b) * self.b
        waits = (self.count - n.w) * self.w
        latest = most - passes - waits - self.ends.after_all
        if n.b < self.count:
            latest = min(latest, most - passes - max(0, waits - self.room * self.w) - self.ends.after_b)
        # what is away must come back before its B, so the lane's work bounds the end as well
        away = n.o - n.back
        lane = most - away * self.back - max(self.b + self.w + self.ends.after_all, self.b + self.ends.after_b)
        return [x for x in states if x[0] <= most and x[1] <= latest and (not away or x[2] <= lane)]

    def next(self, n: _HostCounts, states: Sequence[State]) -> Iterator[tuple[_HostCounts, list[State]]]:
        held = n.f - n.b - n.o + n.back
        away = 3 + held  # where those stand that are away
        room = self.room - held - (n.b - n.w)
        if n.f < self.count and room > 0:
            waits = n.lane_gives and room == 1  # for what the lane takes away just now
            yield n._replace(f=n.f + 1, rank_gives=False), [self._after_f(x, away, waits) for x in states]
        if held:
            last = n.b + 1 == self.count
            yield n._replace(b=n.b + 1, rank_gives=False), [self._after_b(x, away, last) for x in states]
        if held and n.o < self.count:
            then = n._replace(o=n.o + 1, lane_gives=True)
            # the last to be ready, or the one before it if the last one's F still runs
            which = range(max(3, away - 2), away)
            yield then, [self._after_o(x, away, i) for x in states for i in which]
        if n.b > n.w:
            yield (
                n._replace(w=n.w + 1, rank_gives=True),
                [self._state(x[0], x[1] + self.w, max(x[2], x[1]), x[3:away], x[away:]) for x in states],
            )
        if n.o > n.back and room > 0:
            then = n._replace(back=n.back + 1, lane_gives=False)
            yield then, [self._after_l(x, away, n.rank_gives and room == 1) for x in states]

    def _after_f(self, x: State, away: int, waits: bool) -> State:
        sure, rank, lane = x[:3]
        start = max(rank, lane) if waits else rank
        held = list(x[3:away])
        insort(held, start + self.trip)
        return self._state(sure, start + self.f, max(lane, start), held, x[away:])

    def _after_b(self, x: State, away: int, last: bool) -> State:
        start = max(x[1], x[3])
        sure = max(x[0], int(start + self.b + self.ends.after_b)) if last and self.ends.after_b > -inf else x[0]
        return self._state(sure, start + self.b, max(x[2], start), x[4:away], x[away:])

    def _after_o(self, x: State, away: int, i: int) -> State:
        sure, rank, lane = x[:3]
        # once raised to when the rank is free, x[i] no longer tells when its F ended: then only the lane counts
        start = max(lane, x[i] - self.trip + self.f) if x[i] > rank else lane
        gone = list(x[away:])
        insort(gone, x[i])
        return self._state(sure, max(rank, start), start + self.o, x[3:i] + x[i + 1 : away], gone)

    def _after_l(self, x: State, away: int, waits: bool) -> State:
        sure, rank, lane = x[:3]
        start = max(lane, rank) if waits else lane
        held = list(x[3:away])
        insort(held, max(x[away], start + self.back))
        return self._state(sure, max(rank, start), start + self.back, held, x[away + 1 :])

    def _state(self, sure: int, rank: int, lane: int, held: Sequence[int], away: Sequence[int]) -> State:
        """No B starts before the rank is free, and none of what is away before the lane has brought it back."""
        soonest = lane + self.back
        return (
            *(sure, rank, lane),
            *[x if x > rank else rank for x in held],
            *[x if x > soonest else soonest for x in away],
        )


_PARTS_OF_GAP = 4
_WIDTH = 400  # states with the same counts: more become fewer; not tuned
_PART_OF_TIME = 2  # of what is left, for one set of ranks
_STATES_PER_S = 60_000  # that follow one another, roughly: what a reproducible search counts instead of seconds


class FewRankBounds:
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
        self.stage_works = [work_by_stage(flows, rank) for rank in range(placement.num_ranks)]
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
        last = len(self.stage_works) - 1
        order = list(range(last + 1))  # the longest trip first, or the turns
        if len(self.rank_of) > len(self.stage_works):
            order.sort(key=lambda rank: (min(rank, last - rank), -rank))
        ranks: tuple[int, ...] = ()
        while len(ranks) <= last:
            sets = [tuple(sorted((*ranks, rank))) for rank in order if rank not in ranks]
            scores = []
            for rank_set in sets:
                score = 0
                orders = self.host_orders(*rank_set) if self.offload else self.orders(rank_set)
                for score in _raise_bound(orders, least, top, budget) if orders else ():
                    if score > least:
                        least = score
                        yield self.ticks.bound_s(least, self.span)
                scores.append(score)
                if least >= top or budget.left <= 0:
                    return
            # the search with a host lane is for one rank: there are no larger sets
            if self.offload:
                return
            # grown by the best one, for there are too many sets to search them all
            ranks = sets[scores.index(max(scores))]

    def orders(self, ranks: Sequence[int]) -> Orders:
        """Return the orders of ``ranks`` (ascending)."""
        flow, of = self.flow, self.ticks.of
        stages = [s for s, rank in enumerate(self.rank_of) if rank in ranks]
        stay: dict[int, StageWork] = {
            s: x for rank in ranks for s, x in zip(self._stages(rank), self.stage_works[rank], strict=True)
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
            steps,
            [StageMemory(stay[s].held, stay[s].kept, of(stay[s].w_s)) for s in stages],
            [self.limits[rank] for rank in ranks],
            [self._ends(rank, stages[0], back) for rank in ranks],
            self.count,
        )

    def host_orders(self, rank: int) -> HostOrders | None:
        """Return the orders of one rank with its host lane; none where it has several stages, or moves parts, or both
        ways at once."""
        stage_works, limit, of = self.stage_works[rank], self.limits[rank], self.ticks.of
        if len(stage_works) != 1 or limit == float("inf"):
            return None
        (x,) = stage_works
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

    def _ends(self, rank: int, first: int, back: Sequence[float]) -> RankTail:
        """Return what follows the work of ``rank`` in a search that starts with the F of stage ``first``."""
        flow, of, s = self.flow, self.ticks.of, self._stages(rank)[0]
        if not self.span:
            return RankTail(of(flow.head[first] + flow.tail[s]), of(flow.head[first]))
        before = flow.head[first] - flow.head[0]
        home = of(before + back[s] + flow.backward[0] - flow.passed[0])
        return RankTail(home, 0 if rank == self.rank_of[first] else -float("inf"))


def _raise_bound(orders: Orders | HostOrders, least: int, top: int, budget: Budget) -> Iterator[int]:
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
