"""Host lanes: what lies in memory and for how long, and where offloads (O) and loads (L) stand so that no compute action waits.

**Lives** (:func:`rank_lives`): a simulated schedule as a pass that moves residuals sees it: per rank, its compute slots with
times, the memory level during each, and one :class:`Resident` for each (stage, microbatch), whose life is the gap between its F
and its B. Amounts are whole numbers on a binary grid (:data:`GRID` to a unit), so that what is taken and given back cancels
exactly.

**Free plans** (:class:`LanePlan`): a rule that looks at the lane each time it is free and a compute slot ends, or when a
transfer ends:

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

**Paged plans** (:func:`paged`): offloads that compute waits for, where a memory limit is too tight for free and delayed plans.
The order of a rank's compute slots says what it holds, slot by slot. Where the next slot has no room, the resident whose B is
farthest leaves (Belady's rule for pages): its O stands right behind its F, and an S before the slot makes that wait until the O
has ended. It comes back before its B, up to so many slots earlier where there is room all the way. So the limit holds by order
alone, however long anything takes. With one chunk a rank and room for one activation no other plan keeps a pipeline going: a
free O never ends before the next F begins. Not modelled here: lanes and other ranks; who calls simulates.

**Prompt** (:func:`late_offload`, :func:`prompt_weights`): actions moved to right behind the slot that makes what they need.
A host copy starts once the compute slot that stands before it in its row has ended (:mod:`~jaxpipe.schedule.engine`), so an O
that stands further back than its F waits for compute that it does not need. And what W needs can't leave for the host
(`pipeoffload.txt` offloads what F keeps), so an order that puts its W's off, as zero-bubble orders do to fill waits, stays as
high as they pile up; `pipeoffload.txt` section 3.1 runs each W right after its B, to keep its strategies simple.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import attrgetter

from jaxpipe.schedule.costs import CostProfile
from jaxpipe.schedule.ir import Action, Row, Schedule, Slot, op_spec
from jaxpipe.schedule.memory import UNIT, slot_units
from jaxpipe.schedule.simulate import simulate
from jaxpipe.schedule.timeline import MEMORY, TIME, Timeline, nine_digits


@dataclass(frozen=True, slots=True)
class LateOffload:
    """A needless wait of an offload: ``action`` on ``rank`` stands behind compute slot ``after`` and needs only
    ``source``; so do ``num_others`` more of the schedule.

    ``timeline``: with each of them right behind its source.
    """

    rank: int
    action: Action
    after: Slot
    source: Slot
    num_others: int
    timeline: Timeline


def late_offload(schedule: Schedule, costs: CostProfile, timeline: Timeline) -> LateOffload | None:
    """Return the first offload that stands later than it need, if standing earlier makes the schedule shorter than
    ``timeline``, or as long with a lower peak; None if none does."""
    late = [(rank, *late_action) for rank, row in enumerate(schedule.rows) for late_action in _late(row, _is_offload)]
    if not late:
        return None
    better = simulate(replace(schedule, rows=tuple(_prompt(row, _is_offload) for row in schedule.rows)), costs)
    if _figures(better) >= _figures(timeline):
        return None
    rank, action, after, source = late[0]
    return LateOffload(rank, action, after, source, len(late) - 1, better)


def prompt_weights(schedule: Schedule) -> Schedule:
    """Return ``schedule`` with each W behind the slot that holds its B. W's in braids, and fused BW, stay where they are.

    W waits for nothing but its B, on the same rank, so a valid schedule stays valid. It can take longer: W's then stand before
    B's that other ranks wait for.
    """
    return replace(schedule, rows=tuple(_prompt(row, lambda slot: slot.actions[0].op == "W") for row in schedule.rows))


def _is_offload(slot: Slot) -> bool:
    return op_spec(slot.actions[0].op).lane == "d2h"


# Rounded, so that a gain of floating-point noise alone never asks anyone to move an offload.
def _figures(timeline: Timeline) -> tuple[float, float]:
    return nine_digits(timeline.makespan), nine_digits(max(timeline.peak_activations))


def _prompt(row: Row, moves: Callable[[Slot], bool]) -> Row:
    """Return ``row`` with the slots that ``moves`` names right behind their sources; those that stand there stay.

    To move other ops, change ``moves``: what an op waits for on its own rank is read off its spec.
    """
    behind = defaultdict[Slot, list[Slot]](list)
    moved = set[Slot]()
    for action, _, source in _late(row, moves):
        moved.add(action)
        behind[source].append(action)
    slots: list[Slot] = []
    waiting: list[Slot] = []
    for slot in (x for x in row if x not in moved):
        # behind the copies that stand there already: a lane runs in row order, and those keep their turn
        if _is_compute(slot) and not moves(slot):
            slots += waiting
            waiting = behind[slot]
        slots.append(slot)
    return (*slots, *waiting)


def _late(row: Row, moves: Callable[[Slot], bool]) -> list[tuple[Action, Slot, Slot]]:
    """Return each action to move that stands behind another compute slot than its source: itself, that slot, its source."""
    late = []
    slots: dict[Action, Slot] = {}
    last: Slot | None = None
    for slot in row:
        if type(slot) is Action and moves(slot):
            ops = [op for wait in op_spec(slot.op).waits if wait.where == "self" for op in wait.ops]
            sources = [slots[a] for op in ops if (a := Action(op, slot.stage, slot.microbatch)) in slots]
            if last is not None and sources and last not in sources:
                late.append((slot, last, sources[-1]))
        elif _is_compute(slot):
            last = slot
            slots |= dict.fromkeys(slot.actions, slot)
    return late


def _is_compute(slot: Slot) -> bool:
    return op_spec(slot.actions[0].op).lane == "compute"


GRID = int(UNIT)


@dataclass(frozen=True, slots=True)
class Resident:
    """The residuals that one rank keeps of one stage and microbatch.

    ``f_slot`` ``b_slot``: compute slots of the rank that make and read them. ``ready_s``: end of the first, ``due_s``: start
    of the second. ``size``: what O may move, on the grid. ``offload_s`` ``load_s``: seconds of O and of L.
    """

    stage: int
    microbatch: int
    f_slot: int
    b_slot: int
    ready_s: float
    due_s: float
    size: int
    offload_s: float
    load_s: float

    @property
    def life_s(self) -> float:
        """Return the seconds between the end of F and the start of B."""
        return self.due_s - self.ready_s


@dataclass(frozen=True, slots=True)
class RankLife:
    """One rank of a simulated schedule without offloads.

    ``start_s`` ``end_s``: of its compute slots. ``level[j]``: memory held during slot j. ``changes``: (seconds, amount) of
    every change of memory, in order of time. ``residents``: in order of their F.
    """

    rank: int
    start_s: tuple[float, ...]
    end_s: tuple[float, ...]
    level: tuple[int, ...]
    changes: tuple[tuple[float, int], ...]
    residents: tuple[Resident, ...]

    def peak(self, moves: Iterable[tuple[float, int]] = ()) -> int:
        """Return the highest level with further changes ``moves``; changes at one instant are merged, as the simulator does."""
        by_time: defaultdict[float, int] = defaultdict(int)
        for at, amount in (*self.changes, *moves):
            by_time[at] += amount
        return max(accumulate((by_time[at] for at in sorted(by_time)), initial=0))


def rank_lives(schedule: Schedule, timeline: Timeline, costs: CostProfile) -> tuple[RankLife, ...]:
    """Return the lives of every rank of ``schedule`` (compute actions only), as ``timeline`` has them.

    Memory is in units of one rank's share of one microbatch (``Timeline.peak_activations``), on the grid.
    """
    times: list[list[tuple[float, float]]] = [[] for _ in range(schedule.num_ranks)]
    for event in timeline.events:
        if event.lane == "compute":
            times[event.rank].append((event.start_s, event.end_s))
    change = slot_units(schedule.placement, costs)
    return tuple(_rank_life(row, rank, times[rank], costs, change) for rank, row in enumerate(schedule.rows))


def _rank_life(
    row: Row,
    rank: int,
    times: Sequence[tuple[float, float]],
    costs: CostProfile,
    change: Callable[[int, Slot], tuple[int, int]],
) -> RankLife:
    forward_slots: dict[tuple[int, int], int] = {}
    levels, changes, residents = [], [], []
    live = 0
    for j, (slot, (start, end)) in enumerate(zip(row, times, strict=True)):
        allocation, release = change(rank, slot)
        for a in slot.actions:
            if a.op == "F":
                forward_slots[a.stage, a.microbatch] = j
            elif a.op in ("B", "BW"):
                f_slot = forward_slots[a.stage, a.microbatch]
                # what O gives back by its spec, which is less than F took where W needs a part of it
                size = -change(rank, replace(a, op="O"))[1]
                out, back = costs.offload_s[a.stage], costs.load_s[a.stage]
                residents.append(Resident(a.stage, a.microbatch, f_slot, j, times[f_slot][1], start, size, out, back))
        live += allocation
        levels.append(live)
        live += release
        changes += [(at, amount) for at, amount in ((start, allocation), (end, release)) if amount]
    # found in the order of their B's; a plan takes them as they are made
    residents.sort(key=lambda x: x.f_slot)
    return RankLife(
        rank,
        tuple(start for start, _ in times),
        tuple(end for _, end in times),
        tuple(levels),
        tuple(sorted(changes)),
        tuple(residents),
    )


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
class LaneRank:
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

    view: LaneRank
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

    views: Sequence[LaneRank]
    shared: bool
    stretch: float
    moves: list[Move] = field(default_factory=list)
    away: list[_Trip] = field(default_factory=list)
    completions: list[float] = field(default_factory=list)
    out_free: float = 0.0
    in_free: float = 0.0

    def run(self) -> list[Move]:
        """Return the O's and L's of all ranks, each in the order of its lane.

        The order of events is fixed; which resident goes may change in :meth:`_farthest`, and when an L goes in
        :meth:`_load_now`. What must hold after any change: no L starts after its ``latest_s``, since a B would wait.
        """
        leavers: defaultdict[tuple[int, int], list[Resident]] = defaultdict(list)
        for v, view in enumerate(self.views):
            for x in view.candidates:
                leavers[v, x.f_slot].append(x)
        # Decisions fall at ends of slots (of all ranks on the lane, in order of time) and of transfers, because a transfer can
        # only start behind a slot of its row and when the lane is free.
        marks = sorted((end, j, v) for v, view in enumerate(self.views) for j, end in enumerate(view.life.end_s))
        for end, j, v in marks:
            # transfers that end before this slot free the lane first; one that ends with it is dealt with below
            while self.completions and self.completions[0] < end:
                self._act(self.completions.pop(0), self.views)
            view = self.views[v]
            # An L must stand before its B in the row, even where the lane, by rounding, is not free at its latest start. L's
            # keep their order, so those in front of it go, too.
            while any(a.resident.b_slot == j and a.view is view for a in self.away):
                self._load()
            view.ended = j + 1
            for x in leavers[v, j]:
                insort(view.pool, x, key=_due)
            self._act(end, self.views if end in self.completions[:1] else (view,))
        return self.moves

    # The rule.

    def _act(self, now: float, views: Collection[LaneRank]) -> None:
        """Start what should start at ``now``: O's of ``views``, and L's; again until nothing more can.

        O's go first: they lower levels, and an L that can wait only raises them. Only where O's and L's share a lane may an O
        that is refused let the L in its way go early.
        """
        while True:
            overfull = [x for view in views if (x := self._farthest(view, now))] if self.out_free <= now else []
            # one lane for several ranks: the rank that is farthest above its target has most to win
            if overfull and self._offload(max(overfull, key=lambda x: x.excess)):
                continue
            if not self.away or self.in_free > now or not self._load_now(now, bool(overfull) and self.shared):
                return
            self._load()

    def _load_now(self, now: float, blocked: bool) -> bool:
        """Return whether the most urgent L should start at ``now``: an O waits for it (``blocked``), its B is next, or the
        next slot ends later than its latest start. Any earlier would cost memory, any later would make a B wait.
        """
        front = self.away[0]
        ended, x = front.view.ended, front.resident
        # what has not arrived on the host can't come back
        if front.back_s > now:
            return False
        # a start that is late by rounding alone is in time
        tiny = TIME * x.load_s * self.stretch
        return blocked or ended >= x.b_slot or front.view.life.end_s[ended] > front.latest_s + tiny

    def _farthest(self, view: LaneRank, now: float) -> _Trip | None:
        """Return the resident of ``view`` whose B is farthest, if its absence is needed at some slot; None if no O pays.

        The rule to change for another choice of what leaves; it must return a trip with at least one slot of absence.
        """
        pool, life = view.pool, view.life
        while pool:
            x = pool[-1]
            first = bisect_left(life.start_s, now + x.offload_s * self.stretch, view.ended)
            last = min(bisect_right(life.end_s, x.due_s - x.load_s * self.stretch, view.ended), x.b_slot) - 1
            # absent in whole slots only: a level counts for all of its slot
            if first <= last:
                excess = max(view.level[first : last + 1]) - view.target
                return _Trip(view, x, first, last, excess) if excess > 0 else None
            # time only runs on, so a round trip that does not fit now never will
            pool.pop()
        return None

    # Its effects.

    def _offload(self, trip: _Trip) -> bool:
        """Start the O if every L can still be in time, and return whether it started.

        This check is what makes offload free: loosen it, and B's wait for their L's. Latest starts change only once it holds.
        """
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
        # On a shared lane this O holds up the most urgent L; otherwise only the L before it does. The resident's own L can't
        # start before its O has ended either way.
        if bound + tiny < (trip.back_s if self.shared else max(now, self.in_free)) or latest[0] + tiny < trip.back_s:
            return False
        for other, bound in zip(sooner, latest, strict=True):
            other.latest_s = bound
        self.away.insert(at, trip)
        view.pool.pop()
        self._move("O", trip, now, trip.back_s, trip.first, -x.size)
        return True

    def _load(self) -> None:
        """Start the L of the resident whose B comes first: behind the last slot that has ended, once the lane is free."""
        trip = self.away.pop(0)
        view, x = trip.view, trip.resident
        start = max(view.life.end_s[view.ended - 1], self.in_free, trip.back_s)
        # memory is taken when L starts, so the slot that runs then holds it, too
        first = bisect_right(view.life.end_s, start)
        self._move("L", trip, start, start + x.load_s * self.stretch, first, x.size)

    def _move(self, op: str, trip: _Trip, start: float, end: float, first: int, change: int) -> None:
        """Record an O or L from ``start`` to ``end``, which changes levels from slot ``first`` on."""
        view = trip.view
        for j in range(first, trip.last + 1):
            view.level[j] += change
        # as the simulator counts: O gives memory back when it ends, L takes it when it starts
        at = end if op == "O" else start
        self.moves.append(Move(op, view.life.rank, trip.resident, view.ended, (at, change)))
        # a transfer of no time ends where it starts, and that instant is being dealt with
        if end > start:
            insort(self.completions, end)
        if op == "O" or self.shared:
            self.out_free = end
        if op == "L" or self.shared:
            self.in_free = end


AHEAD = (3, 1)
"""How many slots before its B a resident comes back, tried one after the other."""


def paged(
    schedule: Schedule, lives: Sequence[RankLife], candidates: Sequence[Sequence[Resident]], limit: float
) -> Iterator[Schedule]:
    """Yield ``schedule`` with offloads that keep ``limit`` (activations, in units of a rank's share) on every rank, one for
    each of :data:`AHEAD`; nothing where some rank can't. ``lives``: of its ranks; ``candidates``: by rank, what may
    leave."""
    ranks = list(zip(schedule.rows, lives, candidates, strict=True))
    for ahead in AHEAD:
        rows = [row for x in ranks if (row := _row(*x, limit * GRID * (1 + MEMORY), ahead)) is not None]
        if len(rows) < len(ranks):
            return
        yield replace(schedule, rows=tuple(rows))


def _row(row: Row, life: RankLife, leavers: Sequence[Resident], most: float, ahead: int) -> Row | None:
    """Return one rank's row with O, S and L; None where even with all that may leave away a slot holds more than ``most``.

    Which resident leaves may change freely (any choice keeps the limit); that S and L stand where the levels say may not.
    """
    levels = list(life.level)
    away: dict[Resident, int] = {}  # and the slot before which it has left
    present: list[Resident] = []
    for j in range(len(row)):
        present = [x for x in present if x.b_slot > j]
        while levels[j] > most:
            # nothing is left to move: no order of O and L meets this limit
            if not present:
                return None
            x = max(present, key=attrgetter("b_slot"))
            present.remove(x)
            away[x] = j
            for k in range(j, x.b_slot):
                levels[k] -= x.size
        present += (x for x in leavers if x.f_slot == j)
    behind = defaultdict[int, list[Action]](list)  # by compute slot
    for x in away:
        # O's first, then S, then L: behind one slot they stand in this order, and an S before its O would wait for ever
        behind[x.f_slot].append(Action("O", x.stage, x.microbatch))
    for x, left in away.items():
        behind[left - 1].append(Action("S", x.stage, x.microbatch))
    for x, left in sorted(away.items(), key=lambda item: item[0].b_slot):
        at = x.b_slot
        # earlier than right before the B, so that a slow L hides behind compute, but never where that breaks the limit
        while at - 1 > max(left, x.b_slot - 1 - ahead) and levels[at - 1] + x.size <= most:
            at -= 1
            levels[at] += x.size
        behind[at - 1].append(Action("L", x.stage, x.microbatch))
    return tuple(x for j, slot in enumerate(row) for x in (slot, *behind[j]))
