"""Places offloads (O) and loads (L) on a host lane so that no compute action waits.

A rule that looks at the lane each time it is free and a compute slot ends, or when a transfer ends:

* Every resident that is away has a *latest start* of its L, counted back from the starts of the B's that read them, as if
  the lane did nothing else. L's run in the order of those B's.
* An O may go only if all latest starts still hold after it. So no B ever waits: offload is free, or it does not happen.
* Among the residents that may leave, the one whose B is farthest goes first (the longest life; Belady's rule for caches),
  and only if without it some later slot would hold more than ``target``.
* An L goes as late as the row allows. Where an O would like to leave and the next L is in its way, the L goes at once: with
  round trips near the time of compute this is the one-offload-one-reload pattern of `pipeoffload.txt` section 4.2.

Ranks of a PCIe group share a lane and are planned together. A transfer stands in its row right behind the last compute slot
that has ended, so the simulator starts it at the planned time, or earlier; in a group, where ties go to the first
comer, the caller simulates and looks.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from jaxpipe.schedule.passes.residency import RankLife, Resident
from jaxpipe.schedule.tolerance import TIME


@dataclass(frozen=True, slots=True)
class Move:
    """An O or L of ``resident``, in the row of ``rank`` behind its first ``position`` compute slots.

    ``change``: when memory changes by it (end of O, start of L), and by how much.
    """

    op: str
    rank: int
    resident: Resident
    position: int
    change: tuple[float, int]


@dataclass(slots=True)
class View:
    """A rank while its lane is planned.

    ``candidates``: residents that may leave. ``target``: level above which it pays to offload. ``level``: of every slot, with
    what is away. ``ended``: slots that have ended. ``pool``: candidates that are there, by their B.
    """

    life: RankLife
    candidates: Collection[Resident]
    target: float
    level: list[int]
    ended: int = 0
    pool: list[Resident] = field(default_factory=list)


@dataclass(slots=True)
class _Trip:
    """A resident that may leave, or is away: absent from slot ``first`` to slot ``last``.

    ``excess``: how far a level that its absence lowers is above the target. ``back_s``: end of its O. ``latest_s``: latest
    start of its L.
    """

    view: View
    resident: Resident
    first: int
    last: int
    excess: float
    back_s: float = 0.0
    latest_s: float = 0.0


def _due(x: Resident) -> float:
    return x.due_s


@dataclass(slots=True)
class LanePlan:
    """One lane (``shared``) or a pair of lanes of the ranks ``views``; :meth:`run` plans it.

    ``stretch``: host times are taken this much longer than they are (planning with reserve), or shorter (below 1).
    """

    views: Sequence[View]
    shared: bool
    stretch: float
    moves: list[Move] = field(default_factory=list)
    away: list[_Trip] = field(default_factory=list)
    completions: list[float] = field(default_factory=list)
    out_free: float = 0.0
    in_free: float = 0.0

    def run(self) -> list[Move]:
        leavers: defaultdict[tuple[int, int], list[Resident]] = defaultdict(list)
        for v, view in enumerate(self.views):
            for x in view.candidates:
                leavers[v, x.f_slot].append(x)
        # ends of the slots of all ranks on the lane, in order of time
        marks = sorted((end, j, v) for v, view in enumerate(self.views) for j, end in enumerate(view.life.end_s))
        for end, j, v in marks:
            while self.completions and self.completions[0] < end:
                self._act(self.completions.pop(0), self.views)
            view = self.views[v]
            while any(a.resident.b_slot == j and a.view is view for a in self.away):
                self._load()
            view.ended = j + 1
            for x in leavers[v, j]:
                insort(view.pool, x, key=_due)
            self._act(end, self.views if end in self.completions[:1] else (view,))
        return self.moves

    # The rule.

    def _act(self, now: float, views: Collection[View]) -> None:
        """Start what should start at ``now``: O's of ``views``, and L's."""
        while True:
            overfull = [x for view in views if (x := self._farthest(view, now))] if self.out_free <= now else []
            if overfull and self._offload(max(overfull, key=lambda x: x.excess)):
                continue
            if not self.away or self.in_free > now or not self._load_now(now, bool(overfull) and self.shared):
                return
            self._load()

    def _load_now(self, now: float, blocked: bool) -> bool:
        front = self.away[0]
        ended, x = front.view.ended, front.resident
        if front.back_s > now:
            return False
        tiny = TIME * x.load_s * self.stretch
        return blocked or ended >= x.b_slot or front.view.life.end_s[ended] > front.latest_s + tiny

    def _farthest(self, view: View, now: float) -> _Trip | None:
        """Return the resident of ``view`` whose B is farthest, if its absence is needed."""
        pool, life = view.pool, view.life
        while pool:
            x = pool[-1]
            first = bisect_left(life.start_s, now + x.offload_s * self.stretch, view.ended)
            last = min(bisect_right(life.end_s, x.due_s - x.load_s * self.stretch, view.ended), x.b_slot) - 1
            if first <= last:
                excess = max(view.level[first : last + 1]) - view.target
                return _Trip(view, x, first, last, excess) if excess > 0 else None
            pool.pop()
        return None

    # Its effects.

    def _offload(self, trip: _Trip) -> bool:
        """Start the O if every L can still be in time."""
        x, view, stretch = trip.resident, trip.view, self.stretch
        now = max(view.life.end_s[view.ended - 1], self.out_free)
        trip.back_s = now + x.offload_s * stretch
        at = bisect_left(self.away, x.due_s, key=lambda a: a.resident.due_s)
        # from this L back to the most urgent, each must end before the next one's latest start
        sooner = [trip, *reversed(self.away[:at])]
        latest, bound = [], self.away[at].latest_s if at < len(self.away) else float("inf")
        for other in sooner:
            bound = min(other.resident.due_s, bound) - other.resident.load_s * stretch
            latest.append(bound)
        tiny = TIME * (x.offload_s * stretch + x.load_s)
        if bound + tiny < (trip.back_s if self.shared else max(now, self.in_free)) or latest[0] + tiny < trip.back_s:
            return False
        for other, bound in zip(sooner, latest, strict=True):
            other.latest_s = bound
        self.away.insert(at, trip)
        view.pool.pop()
        self._move("O", trip, now, trip.back_s, trip.first, -x.size)
        return True

    def _load(self) -> None:
        trip = self.away.pop(0)
        view, x = trip.view, trip.resident
        start = max(view.life.end_s[view.ended - 1], self.in_free, trip.back_s)
        first = bisect_right(view.life.end_s, start)
        self._move("L", trip, start, start + x.load_s * self.stretch, first, x.size)

    def _move(self, op: str, trip: _Trip, start: float, end: float, first: int, change: int) -> None:
        """Record an O or L from ``start`` to ``end``, which changes levels from slot ``first`` on."""
        view = trip.view
        for j in range(first, trip.last + 1):
            view.level[j] += change
        at = end if op == "O" else start
        self.moves.append(Move(op, view.life.rank, trip.resident, view.ended, (at, change)))
        if end > start:
            insort(self.completions, end)
        if op == "O" or self.shared:
            self.out_free = end
        if op == "L" or self.shared:
            self.in_free = end
