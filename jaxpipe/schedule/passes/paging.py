"""Offloads that compute waits for: what meets a tight memory limit where free and delayed plans can't.

The order of a rank's compute slots says what it holds, slot by slot. Where the next slot has no room, the resident whose B is
farthest leaves (Belady's rule for pages): its O stands right behind its F, and an S before the slot makes that wait until the O
has ended. It comes back before its B, up to so many slots earlier where there is room all the way. So the limit holds by order
alone, however long anything takes. With one chunk a rank and room for one activation no other plan keeps a pipeline going: a
free O never ends before the next F begins.

Not modelled: lanes and other ranks; who calls simulates.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import attrgetter

from jaxpipe.schedule.ir import Action, Row, Schedule
from jaxpipe.schedule.passes.residency import GRID, RankLife, Resident
from jaxpipe.schedule.tolerance import MEMORY

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
    """One rank's row with O, S and L."""
    levels = list(life.level)
    away: dict[Resident, int] = {}  # and the slot before which it has left
    present: list[Resident] = []
    for j in range(len(row)):
        present = [x for x in present if x.b_slot > j]
        while levels[j] > most:
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
        behind[x.f_slot].append(Action("O", x.stage, x.microbatch))
    for x, left in away.items():
        behind[left - 1].append(Action("S", x.stage, x.microbatch))
    for x, left in sorted(away.items(), key=lambda item: item[0].b_slot):
        at = x.b_slot
        while at - 1 > max(left, x.b_slot - 1 - ahead) and levels[at - 1] + x.size <= most:
            at -= 1
            levels[at] += x.size
        behind[at - 1].append(Action("L", x.stage, x.microbatch))
    return tuple(x for j, slot in enumerate(row) for x in (slot, *behind[j]))
