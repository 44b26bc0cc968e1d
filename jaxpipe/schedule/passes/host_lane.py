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
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from jaxpipe.schedule.passes.residency import RankLife, Resident

_NEVER = float("inf")
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Move:
    """An O or L of ``resident``, in the row of ``rank`` behind its first ``position`` compute slots."""

    op: str
    rank: int
    resident: Resident
    position: int
    start_s: float
    end_s: float


@dataclass(slots=True)
class _View:
    """A rank while its lane is planned: slots that have ended, levels with what is away, residents that may leave.

    ``owed``: slots that read something that is away.
    """

    life: RankLife
    target: float
    level: list[int]
    leavers: dict[int, list[Resident]]
    ended: int = 0
    pool: list[Resident] = field(default_factory=list)
    owed: set[int] = field(default_factory=set)

    def last_end(self) -> float:
        return self.life.end_s[self.ended - 1] if self.ended else 0.0

    def next_end(self) -> float:
        return self.life.end_s[self.ended] if self.ended < len(self.life.end_s) else _NEVER


@dataclass(slots=True)
class _Away:
    """A resident that is away, or on its way: until slot ``last`` its absence is counted in the levels."""

    due_s: float
    view: _View
    resident: Resident
    last: int
    back_s: float
    latest_s: float = _NEVER


@dataclass(slots=True)
class _Wish:
    """An O that would lower a level above the target by the most; absent from slot ``first`` to slot ``last``."""

    view: _View
    resident: Resident
    first: int
    last: int
    excess: float


def _due(x: Resident) -> float:
    return x.due_s


class LanePlan:
    """One lane (``shared``) or a pair of lanes of the ranks ``lives``; ``moves`` holds the result of :meth:`run`.

    ``targets``: level per rank above which it pays to offload. ``candidates``: residents that may leave, per rank.
    ``stretch``: host times are taken this much longer than they are (planning with reserve), or shorter (below 1).
    """

    def __init__(
        self,
        lives: Sequence[RankLife],
        candidates: Sequence[Collection[Resident]],
        targets: Sequence[float],
        *,
        shared: bool,
        stretch: float = 1.0,
    ) -> None:
        self.shared, self.stretch = shared, stretch
        self.moves: list[Move] = []
        self.views = []
        for life, chosen, target in zip(lives, candidates, targets, strict=True):
            leavers: dict[int, list[Resident]] = {}
            for x in chosen:
                leavers.setdefault(x.f_slot, []).append(x)
            self.views.append(_View(life, target, list(life.level), leavers))
        self.away: list[_Away] = []
        self.out_free = self.in_free = 0.0
        self.completions: list[float] = []

    def run(self) -> list[Move]:
        marks = sorted((end, j, v) for v, view in enumerate(self.views) for j, end in enumerate(view.life.end_s))
        for end, j, v in marks:
            while self.completions and self.completions[0] < end:
                self._act(self.completions.pop(0), self.views)
            view = self.views[v]
            self._force(view, j)
            view.ended = j + 1
            for x in view.leavers.get(j, ()):
                insort(view.pool, x, key=_due)
            now_free = bool(self.completions) and self.completions[0] == end
            self._act(end, self.views if now_free else (view,))
        return self.moves

    # The rule.

    def _act(self, now: float, views: Collection[_View]) -> None:
        """Start what should start at ``now``: O's of ``views``, and L's."""
        while True:
            wish = self._wish(now, views) if self.out_free <= now else None
            if wish is not None and self._offload(wish):
                continue
            if self.away and self.in_free <= now and self._load_now(self.away[0], now, blocked=wish is not None):
                self._load()
                continue
            return

    def _load_now(self, front: _Away, now: float, blocked: bool) -> bool:
        if front.back_s > now:
            return False
        view = front.view
        if view.ended >= front.resident.b_slot or view.next_end() > front.latest_s + _ROUNDING * self._load_s(front):
            return True
        return blocked and self.shared

    def _wish(self, now: float, views: Collection[_View]) -> _Wish | None:
        best = None
        for view in views:
            found = self._farthest(view, now)
            if found is not None and (best is None or found.excess > best.excess):
                best = found
        return best

    def _farthest(self, view: _View, now: float) -> _Wish | None:
        """The resident of ``view`` whose B is farthest, if its absence is needed."""
        pool, life = view.pool, view.life
        while pool:
            x = pool[-1]
            first = bisect_left(life.start_s, now + x.offload_s * self.stretch, view.ended)
            last = bisect_right(life.end_s, x.due_s - x.load_s * self.stretch, view.ended) - 1
            last = min(last, x.b_slot - 1)
            if first <= last:
                excess = max(view.level[first : last + 1]) - view.target
                return _Wish(view, x, first, last, excess) if excess > 0 else None
            pool.pop()
        return None

    # Its effects.

    def _offload(self, wish: _Wish) -> bool:
        """Start the O if every L can still be in time."""
        x, view = wish.resident, wish.view
        seconds = x.offload_s * self.stretch
        now = max(view.last_end(), self.out_free)
        back = now + seconds
        at = bisect_left(self.away, x.due_s, key=lambda a: a.due_s)
        item = _Away(x.due_s, view, x, wish.last, back)
        self.away.insert(at, item)
        changed = self._latest(at)
        room = back if self.shared else max(now, self.in_free)
        tiny = _ROUNDING * (seconds + x.load_s)
        if self.away[0].latest_s + tiny < room or item.latest_s + tiny < back:
            del self.away[at]
            for other, latest in changed:
                other.latest_s = latest
            return False
        view.pool.pop()
        view.owed.add(x.b_slot)
        self._take(view, wish.first, wish.last, -x.size)
        self._record("O", view, x, now, back)
        self.out_free = back
        if self.shared:
            self.in_free = back
        return True

    def _latest(self, at: int) -> list[tuple[_Away, float]]:
        """Latest starts from entry ``at`` to the front; returns what they were."""
        changed = []
        bound = self.away[at + 1].latest_s if at + 1 < len(self.away) else _NEVER
        for k in range(at, -1, -1):
            entry = self.away[k]
            bound = min(entry.due_s, bound) - self._load_s(entry)
            if entry.latest_s == bound:
                break
            changed.append((entry, entry.latest_s))
            entry.latest_s = bound
        return changed

    def _load(self) -> None:
        front = self.away.pop(0)
        view, x = front.view, front.resident
        view.owed.discard(x.b_slot)
        now = max(view.last_end(), self.in_free, front.back_s)
        last = bisect_right(view.life.end_s, now) - 1
        if last < front.last:
            self._take(view, last + 1, front.last, x.size)
        end = now + self._load_s(front)
        self._record("L", view, x, now, end)
        self.in_free = end
        if self.shared:
            self.out_free = end

    def _force(self, view: _View, slot: int) -> None:
        """Before ``slot`` of ``view`` counts as ended: what it reads is on the way."""
        while slot in view.owed:
            self._load()

    def _record(self, op: str, view: _View, x: Resident, start: float, end: float) -> None:
        self.moves.append(Move(op, view.life.rank, x, view.ended, start, end))
        if end > start:
            insort(self.completions, end)

    @staticmethod
    def _take(view: _View, first: int, last: int, amount: int) -> None:
        level = view.level
        for j in range(first, last + 1):
            level[j] += amount

    def _load_s(self, entry: _Away) -> float:
        return entry.resident.load_s * self.stretch
