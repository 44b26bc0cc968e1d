"""Microbatches that meet: why a chain with one stage per rank can't run every microbatch at its least round trip.

Take the ranks from e down to the last, and let at most K microbatches be between F's start and their release on rank e (the
limit allows no more). All microbatches are alike, so let the j-th F, B and W of each rank be those of microbatch j; then F of
j + K starts after the release of j, and the microbatches j, j + K, j + 2K, … are one *lane*: down, up, down again.

Two lanes A and B meet again and again: while one goes down the other comes up. Say they meet at cut x if on x ranks the F of
the one runs before the B of the other, on the ranks below after it. Both leave the meeting no earlier than both reached it
(at the cut each waits for the other's action on the same rank). Let them meet at x and next at y. In between the one runs
up the x ranks, is released, and runs down y ranks; the other runs down to the last rank and up to the cut y. The time is at
least the longer of both, and the two together pass each rank once each way: with unit costs and n ranks they take
x + y + 1 and 2n − x − y, so n + 1 at least, where the mean is n + ½. So a lane's cycle is 2n + 2, not the round trip's 2n + 1.

The least time over all sequences of cuts is found by dynamic programming. Start: F's of the first two start as
:func:`~jaxpipe.search.bounds.memory.releases` says. End: the last two must come home, and with them every later one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from jaxpipe.schedule.tolerance import TIME, at_most, how_many
from jaxpipe.search.bounds.resident import Confined, Resident

_CHOICES = 4
"""How many distances between the two lanes, and how many last microbatches, are tried at most."""


@dataclass(frozen=True, slots=True)
class Run:
    """A chain from rank e down: seconds per rank of F, B, transfers down and up to the next rank; on e: release after B."""

    f_s: Sequence[float]
    b_s: Sequence[float]
    down_s: Sequence[float]
    up_s: Sequence[float]
    release_s: float


def meet(run: Run, top: Resident, limit: float, starts: Sequence[float]) -> Confined:
    """Return the least time of rank e's work when no more than ``limit`` may be held there; ``starts``: least start of its
    j-th F."""
    m = top.count
    lanes = how_many(top.held, limit) if top.held > 0 else m
    bound = Confined(0.0, 0.0)
    if not 2 <= lanes < m:
        return bound
    legs = _Legs(run, includes_release=at_most(top.held, top.kept))
    # each pair of lanes is a bound by itself, so some of them suffice
    step = -(-lanes // _CHOICES)
    for distance in range(1, lanes, step):
        for last in range(m - 1, max(m - 1 - lanes, lanes), -step):
            bound = bound.or_longer(_pair(legs, top, starts, lanes, distance, last))
    return bound


class _Legs:
    """Times of the ways to and from a cut, and between meetings. Transfers over the cut itself are left out."""

    def __init__(self, run: Run, includes_release: bool) -> None:
        n = len(run.f_s)
        self.cuts = range(n + 1)
        # ranks above the cut: from rank e's F start to the cut, from the cut to rank e's B end; below: the same to the turn
        self.down_to = _sums(run.f_s, run.down_s)
        self.up_from = _sums(run.b_s, run.up_s)
        self.to_turn = _sums(run.f_s[::-1], run.down_s[::-1])[::-1]
        self.from_turn = _sums(run.b_s[::-1], run.up_s[::-1])[::-1]
        self.down, self.up = self.down_to[n], self.up_from[n]
        self.release = run.release_s if includes_release else 0.0
        # the cut from which on the way over the top is the longer, by the cut of the meeting before
        over = [(self.up_from[x] + self.release, self.to_turn[x]) for x in self.cuts]
        self.turns = [
            next((y for y in self.cuts if a + self.down_to[y] >= b + self.from_turn[y]), n + 1) for a, b in over
        ]
        self.over = over

    def earlier(self, after: Sequence[float]) -> list[float]:
        """Return the least time that follows the meeting before, given the one that follows a meeting at each cut.

        It is min over y of max(over the top to y, around the turn to y) + after[y]. The former grows with y and the latter
        falls, so one running minimum from each side does it.
        """
        low, high = [inf], [inf]
        for t, way in zip(after, self.from_turn, strict=True):
            low.append(min(low[-1], way + t))
        for t, way in zip(reversed(after), reversed(self.down_to), strict=True):
            high.append(min(high[-1], way + t))
        high.reverse()
        return [min(b + low[y], a + high[y]) for (a, b), y in zip(self.over, self.turns, strict=True)]


def _sums(seconds: Sequence[float], hops: Sequence[float]) -> list[float]:
    """Return prefix sums; ``[k]``: the first k of ``seconds`` with the transfers between them."""
    sums = [0.0]
    for k, s in enumerate(seconds):
        sums.append(sums[-1] + s + (hops[k - 1] if k else 0.0))
    return sums


def _pair(legs: _Legs, top: Resident, starts: Sequence[float], lanes: int, distance: int, last: int) -> Confined:
    """Bound the lanes of ``last`` and of ``last − distance``, from their last meeting back to any of their first."""
    m = top.count
    span, through = [0.0] * len(legs.cuts), [0.0] * len(legs.cuts)
    i, k = last - distance, last
    for x in legs.cuts:
        home = legs.to_turn[x] + legs.up - top.b_s  # until B of k starts on rank e
        other = legs.up_from[x] - (top.b_s if x else 0.0)
        span[x] = max(home + (m - k) * top.back_s, other + (m - i - (x == 0)) * top.back_s)
        through[x] = max(home + (m - k) * top.b_s, other + (m - i - (x == 0)) * top.b_s)
    bound = Confined(0.0, 0.0)
    while i >= 0:
        if i < 2 * lanes:
            begin = [max(starts[i] + legs.down + legs.from_turn[x], starts[k] + legs.down_to[x]) for x in legs.cuts]
            bound = bound.or_longer(Confined(_plus(begin, span), _plus(begin, through)))
        cycles = (i - 2 * lanes) // lanes
        # near the start one meeting at a time, since each may be the first
        if cycles < 1:
            span, through = legs.earlier(span), legs.earlier(through)
            i, k = k - lanes, i
            continue
        before = [legs.earlier(legs.earlier(after)) for after in (span, through)]
        # a cycle that adds the same at every cut does so up to the start
        if all(_steady(old, new) for old, new in zip((span, through), before, strict=True)):
            span, through = (_repeat(old, new, cycles) for old, new in zip((span, through), before, strict=True))
        else:
            span, through = before
            cycles = 1
        i, k = i - cycles * lanes, k - cycles * lanes
    return bound


def _plus(begin: Sequence[float], after: Sequence[float]) -> float:
    return min(map(float.__add__, begin, after))


def _steady(old: Sequence[float], new: Sequence[float]) -> bool:
    added = list(map(float.__sub__, new, old))
    return max(added) - min(added) <= TIME * max(new)


def _repeat(old: Sequence[float], new: Sequence[float], cycles: int) -> list[float]:
    """Return ``old`` after so many cycles: what one cycle adds everywhere, each further one adds at least."""
    added = min(map(float.__sub__, new, old))
    return [t + cycles * added for t in old]
