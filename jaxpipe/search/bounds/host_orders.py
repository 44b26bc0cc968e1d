"""One rank of a chain and its host lane exactly, by dynamic programming over orders as in
:mod:`~jaxpipe.search.bounds.orders`; all other ranks only take time.

The rank has one stage and room for ``room`` activations, whole from F to W; O's and L's take turns on one lane, and every
activation may go to the host and come back. Actions are taken in order of their starts, so it is known what has been given
back when an F or an L starts: all but what runs.

Which activation moves does not matter, but for when its B may start (*ready*: a trip after its F). Of two activations that
the rank holds, let the one that is ready first run B first: if it does not, let the two swap what follows; the later B is
late enough for either, and so is the sooner one for the activation that is ready sooner. In the same way the last to be
ready leaves first, and the first to be ready comes back first. (The last may be the one whose F runs and which can't leave
yet, so the one before it is tried too.) Swapping may let an activation leave twice, which no schedule does: that only makes
the bound lower; O's are as many as microbatches at most.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from jaxpipe.search.bounds.orders import Ends, Late, State, least_objective


class _Counts(NamedTuple):
    """How often each action has started, and whether the last one of the lane and of the rank gives an activation back."""

    f: int = 0
    b: int = 0
    w: int = 0
    o: int = 0
    back: int = 0  # L's
    lane_gives: bool = False
    rank_gives: bool = False


@dataclass(frozen=True, slots=True)
class HostOrders:
    """``count`` microbatches; ticks of each action, and ``trip`` from F's start to B's. It is the search of its orders, too."""

    f: int
    b: int
    w: int
    o: int
    back: int
    trip: int
    room: int
    ends: Ends
    count: int

    def least(self, most: float, width: int, late: Late) -> float:
        """Return what :meth:`~jaxpipe.search.bounds.orders.Orders.least` does, with the host lane."""
        return least_objective(self, {_Counts(): [(0, 0, 0)]}, most, width, late)

    def ended(self, n: _Counts) -> bool:
        return n.w == self.count and n.o == n.back

    def objective(self, state: State) -> float:
        return max(state[0], state[1] + self.ends.after_all)

    def hopeful(self, n: _Counts, states: Sequence[State], most: float) -> list[State]:
        passes = (self.count - n.f) * self.f + (self.count - n.b) * self.b
        waits = (self.count - n.w) * self.w
        latest = most - passes - waits - self.ends.after_all
        if n.b < self.count:
            latest = min(latest, most - passes - max(0, waits - self.room * self.w) - self.ends.after_b)
        # what is away must come back before its B, so the lane's work bounds the end as well
        away = n.o - n.back
        lane = most - away * self.back - max(self.b + self.w + self.ends.after_all, self.b + self.ends.after_b)
        return [x for x in states if x[0] <= most and x[1] <= latest and (not away or x[2] <= lane)]

    def next(self, n: _Counts, states: Sequence[State]) -> Iterator[tuple[_Counts, list[State]]]:
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
