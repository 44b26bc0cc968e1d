"""How long the residuals of every stage and microbatch lie in memory, and how much a rank holds at every compute slot.

What a pass that moves residuals needs to know of a simulated schedule: per rank, its compute slots with times, the memory
level during each, and one :class:`Resident` for each (stage, microbatch), whose life is the gap between its F and its B.
Amounts are whole numbers on a binary grid (:data:`GRID` to a unit), so that what is taken and given back cancels exactly.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from jaxpipe.schedule.costs import CostProfile
from jaxpipe.schedule.ir import Row, Schedule, Slot
from jaxpipe.schedule.memory import UNIT, slot_units
from jaxpipe.schedule.timeline import Timeline

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
        """Highest level with further changes ``moves``; changes at one instant are merged, as the simulator does."""
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
                size = -change(rank, replace(a, op="O"))[1]
                out, back = costs.offload_s[a.stage], costs.load_s[a.stage]
                residents.append(Resident(a.stage, a.microbatch, f_slot, j, times[f_slot][1], start, size, out, back))
        live += allocation
        levels.append(live)
        live += release
        changes += [(at, amount) for at, amount in ((start, allocation), (end, release)) if amount]
    residents.sort(key=lambda x: x.f_slot)
    return RankLife(
        rank,
        tuple(start for start, _ in times),
        tuple(end for _, end in times),
        tuple(levels),
        tuple(sorted(changes)),
        tuple(residents),
    )
