"""Braiding as a pass: two actions of different microbatches that stand side by side become one slot, where that pays.

Source: `stp.txt` section 3. In a braided slot the TP collectives of each action have the other's compute under them
(:mod:`~jaxpipe.schedule.lanes`); in return the slot waits for what both wait for, and both results come when it ends. So a pair
is braided only if

* it has less to wait for as one slot than as two: the local gain is positive;
* what its second action waits for is there when the first starts, in the schedule's simulated timeline. Then every dependency
  still leads from an earlier start to a later one, and no braid can deadlock;
* the whole schedule gets shorter, or takes as long and holds no more. All pairs are tried at once, and by halves where that
  fails.

F's are braided with backwards first. Then any two of F, B, BW and W, if need be: two F's hide each other's collectives, as in
the authors' warm-up, and a W those of a B. Both at once would make less of the first (up to 4% longer in a few families).
Stages on several ranks are left alone. The order of actions never changes. The second action's memory is taken with the
first's: a B before an F holds one chunk more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from operator import itemgetter

from jaxpipe.schedule.check import check_schedule
from jaxpipe.schedule.costs import CostProfile
from jaxpipe.schedule.deps import build_graph
from jaxpipe.schedule.ir import Action, Braid, Schedule, Slot
from jaxpipe.schedule.lanes import slot_lanes
from jaxpipe.schedule.passes.backwards import with_slots
from jaxpipe.schedule.simulate import simulate
from jaxpipe.schedule.timeline import Timeline
from jaxpipe.schedule.tolerance import TIME, at_most

_PARTS = 32  # of the candidates, the smallest part that is tried by itself
_OPS = frozenset(("F", "B", "BW", "W"))


@dataclass(frozen=True, slots=True)
class _Pair:
    """Slots ``at`` and ``at + 1`` of a rank, and the seconds that a braid of them saves."""

    rank: int
    at: int
    gain_s: float


def braid(schedule: Schedule, costs: CostProfile, *, memory_limit: float = float("inf")) -> Schedule:
    """Return ``schedule`` with adjacent F, B, BW or W of different microbatches braided where the cost model says that it pays.

    Braids that are there stay. ``memory_limit``: peak activations per rank that braiding may not exceed, in units of one rank's
    share of a microbatch (what the schedule needs already is always allowed). The makespan never grows.

    Raises:
        ScheduleError: the schedule is invalid, or the costs are for another number of stages.
    """
    check_schedule(schedule)
    for alike in (False, True):
        search = _Search(schedule, costs, memory_limit)
        pairs = _candidates(schedule, costs, search.timeline, alike)
        search.take(pairs, max(1, len(pairs) // _PARTS))
        schedule = search.schedule
    check_schedule(schedule)
    return schedule


def unbraid(schedule: Schedule) -> Schedule:
    """Return ``schedule`` with each braid taken apart into its actions, in their order. Always valid if ``schedule`` is."""
    return with_slots(schedule, lambda slot: slot.actions)


class _Search:
    """The best schedule so far, and the pairs that it braids."""

    def __init__(self, schedule: Schedule, costs: CostProfile, memory_limit: float) -> None:
        self.plain = self.schedule = schedule
        self.costs = costs
        self.timeline = simulate(schedule, costs)
        self.limit = max(memory_limit, max(self.timeline.peak_activations, default=0.0))
        self.taken: list[_Pair] = []

    def _better(self, timeline: Timeline) -> bool:
        """Return whether it is shorter within the limit, or as long and holds no more than the best so far."""
        peak, now = max(timeline.peak_activations), max(self.timeline.peak_activations)
        if not at_most(self.timeline.makespan, timeline.makespan):
            return at_most(peak, self.limit)
        return timeline.makespan <= self.timeline.makespan and at_most(peak, now)

    def take(self, pairs: Sequence[_Pair], least: int) -> None:
        """Braid all of ``pairs``, or those halves, quarters, … of at least ``least`` with which nothing takes longer."""
        if not pairs:
            return
        tried = _with_braids(self.plain, [*self.taken, *pairs])
        timeline = simulate(tried, self.costs)
        if self._better(timeline):
            self.schedule, self.timeline = tried, timeline
            self.taken += pairs
        elif len(pairs) > least:
            middle = len(pairs) // 2
            self.take(pairs[:middle], least)
            self.take(pairs[middle:], least)


class _Times:
    """When the slots and transfers of a simulated schedule begin and end."""

    def __init__(self, schedule: Schedule, timeline: Timeline) -> None:
        self.graph = build_graph(schedule)
        lanes = {(e.rank, e.action, e.lane == "send"): e for e in timeline.events if e.lane != "tp"}
        self.times = {key: (e.start_s, e.end_s) for key, e in lanes.items()}

    def ended(self, number: int) -> float:
        """Return the end of the slot or transfer that a wait names by its number."""
        graph, source = self.graph, self.graph.source(number)
        end = self.times[graph.rank_of[source], graph.slots[source], False][1]
        if number == source:
            return end
        moved = graph.transfers[number - len(graph.slots)]
        return max(end, self.times.get((moved.src, moved.action, True), (0.0, 0.0))[1])

    def together(self, rank: int, at: int) -> bool:
        """Return whether slot ``at + 1`` of a rank has all that it waits for when slot ``at`` begins, and that takes time."""
        row, first = self.graph.schedule.rows[rank], self.graph.row_start[rank]
        begins, ends = self.times[rank, row[at], False]
        return ends > begins and all(at_most(self.ended(x), begins) for x in self.graph.waits[first + at + 1])


def _candidates(schedule: Schedule, costs: CostProfile, timeline: Timeline, alike: bool) -> list[_Pair]:
    """Return, of every rank, the pairs without a slot in common that save most if braided, by place in the row."""
    times = _Times(schedule, timeline)
    gain = cache(partial(_gain, costs))
    candidates: list[_Pair] = []
    for rank, row in enumerate(schedule.rows):
        able = [(at, (*x.actions, *y.actions)) for at, (x, y) in enumerate(pairwise(row)) if _may(x, y, alike)]
        able = [(at, held) for at, held in able if not any(schedule.placement.is_shared(a.stage) for a in held)]
        pairs = [_Pair(rank, at, gain(*((a.op, a.stage) for a in actions))) for at, actions in able]
        candidates += _apart([x for x in pairs if x.gain_s > 0 and times.together(rank, x.at)])
    return sorted(candidates, key=lambda x: (x.at, x.rank))


def _gain(costs: CostProfile, *actions: tuple[str, int]) -> float:
    """Return the seconds that a braid of these actions saves; 0 where it is rounding."""
    sequential_s = sum(slot_lanes(costs, [x]).seconds for x in actions)
    saved = sequential_s - slot_lanes(costs, actions).seconds
    return saved if saved > TIME * sequential_s else 0.0


def _may(one: Slot, two: Slot, alike: bool) -> bool:
    """Return whether two slots, not braided yet, are an F and a backward of different microbatches; ``alike``: or any two
    of these."""
    if type(one) is not Action or type(two) is not Action or one.microbatch == two.microbatch:
        return False
    ops = {one.op, two.op}
    return ops <= _OPS and (alike or ("F" in ops and len(ops) == 2))


def _apart(pairs: Sequence[_Pair]) -> list[_Pair]:
    """Return those of the pairs of a rank that save most and share no slot."""
    best, sooner, last = (
        (0.0, list[_Pair]()),
        (0.0, list[_Pair]()),
        -1,
    )  # of all up to the last pair, of those before it
    for pair in pairs:
        saved, chain = sooner if last + 1 == pair.at else best
        best, sooner, last = max(best, (saved + pair.gain_s, [*chain, pair]), key=itemgetter(0)), best, pair.at
    return best[1]


def _with_braids(schedule: Schedule, pairs: Sequence[_Pair]) -> Schedule:
    """Return ``schedule`` with these pairs braided."""
    begins = {(x.rank, x.at) for x in pairs}
    rows = (
        tuple(
            Braid((*slot.actions, *row[at + 1].actions)) if (rank, at) in begins else slot
            for at, slot in enumerate(row)
            if (rank, at - 1) not in begins
        )
        for rank, row in enumerate(schedule.rows)
    )
    return replace(schedule, rows=tuple(rows))
