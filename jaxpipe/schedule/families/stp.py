"""STP: forwards braided with backwards of other microbatches, so that tensor-parallel collectives hide, on a V placement.

Source: `stp.txt` sections 3 and 4, appendices A and B, and the authors' published code. ``stp`` begins with the
throughput-efficient warm-up, ``stp-memory`` with the memory-efficient one, ``stp-offload`` offloads chunk 0 (section 4.4),
``stp-published`` is the order that the authors' code makes. ``scripts/paper_stp.py`` has the closed forms of Table 1. What
the paper fixes by hand is tried here and simulated with the given costs: how many forwards go ahead, how many weight
gradients are put off, how many last backwards are split, whether forwards of the warm-up run in pairs; one choice after the
other.

The published order puts off r weight gradients on rank r. That makes it shorter than what keeps to 3p + 1 chunks (p = 8,
m = 32, F = B = W = 1: 199 against 205), and holds 4p - 1 on the last rank. Allowed as much, ``stp`` is no longer than that.

Where the lane of collectives is what a slot waits for, forwards ahead only add to it, and ``stp`` is ``stp-memory`` whatever
the limit: with collectives of 2 F (p = 8, m = 32) the shortest of 96 shapes takes 176.8, with one ahead at a peak of 9; with
all p ahead 179.6.

Not modelled: transfers between ranks that compute waits for, as in the authors' runtime (section 5.2); here they overlap it.

The rows are made phase by phase. Source: `stp.txt` section 4.2, Figure 5 and appendix A (Figure 11), and the counts of the
authors' published code. On rank r of p, chunk 0 is stage r and chunk 1 stage 2p − 1 − r; F0 is a forward of chunk 0, B1 a
backward of chunk 1. With ``below`` = p − 1 − r:

1. 2·below F0; r + 1 times F0, F1
2. F0 ahead of time, in pairs F0+F0 whose collectives hide each other
3. below times F1+B1 and then F0+W1, or W1 alone: weights are split off so that cotangents reach the ranks below sooner
4. F1+BW1, then F0+BW0 and F1+BW1 in turn while F0's are left: nothing is split, all collectives are hidden
5. BW0, F1+B1 in turn while F1's are left; BW0, BW1 in turn while B1's are; BW0, W W in turn; the W's left over

The F0's of phases 2 and 3 that are not needed to begin are ``ahead``: p of them are the throughput-efficient warm-up (Figure
11c), 1 the memory-efficient one (11b: "an additional forward pass"), anything between is possible. Every forward ahead holds
one chunk more, and keeps a rank busy while the first backwards are on their way.

Two things differ from the paper. W's of a stage run in order of microbatch, so that gradients add up in one order: where some
were put off, BW is B braided with the W that is next in turn, which takes as long. And any m works: a smaller one takes the
rows for more microbatches and leaves some out.

In phase 4 neighbours wait for each other in turn: a rank's F1 for the F1 below it, and that rank's next B1 for the B1 braided
with it. Both results leave when the slot ends, so a slot and its transfer repeat: transfers add to the period although they
overlap compute. The paper says the same of its runtime (section 5.2). To hide them, neighbours would have to be two
microbatches apart instead of one: 4p − 2 chunks by this count (not tried).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule.costs import CostProfile
from jaxpipe.schedule.families.family import family
from jaxpipe.schedule.ir import Action, Row, Schedule, Slot
from jaxpipe.schedule.passes.braid import slot_of
from jaxpipe.schedule.passes.offload import figures, offload
from jaxpipe.schedule.placement import v_shape
from jaxpipe.schedule.simulate import simulate
from jaxpipe.schedule.timeline import MEMORY, Objective, at_most, order_key


@dataclass(frozen=True, slots=True)
class Shape:
    """Choices that make an order. ``ahead``: forwards ahead, 1 to p. ``split``: so many of a rank's last slots of phase 4,
    at most r on rank r, put W off.

    ``hasty``: the last so many BW0 are B0 alone, whose cotangents leave sooner. ``paired``: whether forwards of phase 2 run in
    pairs. ``first``: of the microbatches left out, whether the first ones are.
    """

    ahead: int
    split: int
    hasty: int = 0
    paired: bool = True
    first: bool = False


def stp_rows(ranks: int, microbatches: int, shape: Shape) -> tuple[Row, ...]:
    """One row per rank."""
    # the phases need that many; what is too many is cut out of the rows
    enough = max(microbatches, 2 * ranks - 1 + shape.ahead)
    missing = enough - microbatches
    skipped = range(missing) if shape.first else range(microbatches, enough)
    rows = (_Rank(ranks, enough, rank).run(shape) for rank in range(ranks))
    return tuple(_without(row, skipped) for row in rows) if missing else tuple(map(tuple, rows))


def _without(row: Iterable[Slot], skipped: range) -> Row:
    """Return the row without these microbatches, the others numbered from 0."""
    first = len(skipped) if skipped.start == 0 else 0

    def left(slot: Slot) -> tuple[Slot, ...]:
        remaining = (a for a in slot.actions if a.microbatch not in skipped)
        return slot_of(replace(a, microbatch=a.microbatch - first) for a in remaining)

    return tuple(x for slot in row for x in left(slot))


@dataclass(slots=True)
class _Rank:
    """A row as it grows. ``done``: how many of an op and chunk it holds (B also for BW); they come in order of microbatch."""

    ranks: int
    microbatches: int
    rank: int
    row: list[Slot] = field(default_factory=list)
    done: Counter[tuple[str, int]] = field(default_factory=Counter)

    def run(self, shape: Shape) -> list[Slot]:
        below = self.ranks - 1 - self.rank
        # phase 1
        for chunk in (*[0] * (2 * below), *[0, 1] * (self.rank + 1)):
            self._add(self._next("F", chunk))
        depth = min(shape.ahead, self.rank + 1)
        pairs = depth // 2 if shape.paired else 0
        # phase 2
        for forwards in [1] * (depth - 2 * pairs) + [2] * pairs:
            self._add(*(self._next("F", 0) for _ in range(forwards)))
        # phase 3
        for k in range(below):
            self._add(self._next("F", 1), self._next("B", 1))
            self._add(*([self._next("F", 0)] if k >= below - (shape.ahead - depth) else []), self._next("W", 1))
        self._steady(min(shape.split, self.rank))
        self._cool_down(shape.hasty)
        return self.row

    def _steady(self, split: int) -> None:
        slots = 2 * (self.microbatches - self.done["F", 0]) + 1
        for k in range(slots):
            chunk = 1 - k % 2
            self._add(self._next("F", chunk), *([self._next("B", chunk)] if k >= slots - split else self._bw(chunk)))

    def _cool_down(self, hasty: int) -> None:
        m = self.microbatches
        while self.done["F", 1] < m:
            self._add(*self._bw(0))
            self._add(self._next("F", 1), self._next("B", 1))
        while self.done["B", 1] < m:
            self._add(*self._bw(0))
            self._add(*self._bw(1))
        while self.done["B", 0] < m:
            self._add(*([self._next("B", 0)] if self.done["B", 0] >= m - hasty else self._bw(0)))
            self._weights(2)
        self._weights(2 * m)

    def _add(self, *actions: Action) -> None:
        self.row += slot_of(actions)

    def _next(self, op: str, chunk: int) -> Action:
        self.done[op, chunk] += 1
        return Action(op, 2 * self.ranks - 1 - self.rank if chunk else self.rank, self.done[op, chunk] - 1)

    def _bw(self, chunk: int) -> list[Action]:
        """Return a whole backward: BW, or B with the W that is next in turn."""
        b, w = self._next("B", chunk), self._next("W", chunk)
        return [replace(b, op="BW")] if b.microbatch == w.microbatch else [b, w]

    def _weights(self, most: int) -> None:
        """Add up to so many W's that were put off, chunk 0 first: its B's came earlier."""
        for chunk in (0, 1):
            while most and self.done["W", chunk] < self.done["B", chunk]:
                self._add(self._next("W", chunk))
                most -= 1


_FACTS: dict[str, Any] = {"placement": v_shape, "sees_collectives": True, "picture": {"ranks": 2, "microbatches": 4}}


@family(
    "stp",
    "V placement, F braided with B so that tensor-parallel collectives hide: fast, 1.5 times 1F1B's memory",
    "Qi et al. 2025 (stp.txt) §4.2, appendix A",
    **_FACTS,
)
def stp(
    ranks: int,
    microbatches: int,
    costs: CostProfile | None = None,
    memory_limit: float | None = None,
    objective: Objective = "makespan",
) -> Schedule:
    """STP with the throughput-efficient warm-up, for any ``ranks`` p and ``microbatches`` m >= 1::

        rank 0 |F0- F1- F2- F0b F3- F1b+B0b W0b         F2b+BW1b--- BW0---- F3b+B2b BW1---- B3b+W2b BW2---- W3b B3- W3-
        rank 1 |    F0- F0b F1- F1b F2-     F2b+BW0b--- F3+BW0----- F3b+B1b BW1---- B2b+W1b BW2---- B3b+W2b B3- W3- W3b

    (``b`` marks the second chunk of a rank.) ``costs``: one entry per stage, 2p stages, with ``f_comm_s`` and ``b_comm_s``
    where collectives take time. ``memory_limit``: peak activations of a rank, in units of its share of a microbatch, which is
    two chunks. The default is 3p + 1 chunks: the paper's 3p between slots, and one more while a braid runs, whose F takes
    memory before its B gives any back. ``objective``: what is minimised first, the makespan or the longest rank span.

    Raises:
        ScheduleError: a size is not a whole number of at least 1, the costs are for another number of stages, or no order tried
            keeps the memory limit (on equal stages one of p + 1 is kept).
    """
    limit = (3 * ranks + 1) / 2 if memory_limit is None else memory_limit
    schedule, peak = _best("stp", ranks, microbatches, costs, limit, objective)
    if memory_limit is not None and not at_most(peak, memory_limit):
        raise ScheduleError(
            f"stp: a memory limit of {memory_limit:g} is below the {peak:g} it needs; use {peak:g} or more"
        )
    return schedule


@family(
    "stp-memory",
    "STP with fewer forwards ahead: about 1F1B's memory, a slower start",
    "Qi et al. 2025 (stp.txt) §4.2, appendices A and B",
    **_FACTS,
)
def stp_memory(
    ranks: int, microbatches: int, costs: CostProfile | None = None, objective: Objective = "makespan"
) -> Schedule:
    """STP with the memory-efficient warm-up (Figure 12d), for any ``ranks`` p and ``microbatches`` m >= 1::

        rank 0 |F0- F1- F2- F0b F3- F1b+B0b W0b         F2b+BW1b--- BW0---- F3b+B2b BW1---- B3b+W2b BW2---- W3b B3- W3-
        rank 1 |    F0- F0b F1- F1b F2-     F2b+BW0b--- F3+BW0----- F3b+B1b BW1---- B2b+W1b BW2---- B3b+W2b B3- W3- W3b

    (``b`` marks the second chunk of a rank.) On equal stages no rank holds more than 2p + 2 chunks of activations, one of them
    only while a braid runs; ranks wait longer before the steady phase. ``costs``, ``objective``: as :func:`stp`.

    Raises:
        ScheduleError: a size is not a whole number of at least 1, or the costs are for another number of stages.
    """
    return _best("stp-memory", ranks, microbatches, costs, ranks + 1, objective)[0]


@family(
    "stp-offload",
    "STP with the first chunk of each rank offloaded to the host as far as its link allows",
    "Qi et al. 2025 (stp.txt) §4.4",
    **_FACTS,
)
def stp_offload(
    ranks: int, microbatches: int, costs: CostProfile | None = None, objective: Objective = "makespan"
) -> Schedule:
    """:func:`stp` with chunk 0 offloaded to the host (section 4.4), for any ``ranks`` p and ``microbatches`` m >= 1::

        rank 0 |F0- F1- F2- F0b F3- F1b+B0b W0b         F2b+BW1b--- BW0---- F3b+B2b BW1---- B3b+W2b BW2---- W3b B3- W3-
        rank 1 |    F0- F0b F1- F1b F2-     F2b+BW0b--- F3+BW0----- F3b+B1b BW1---- B2b+W1b BW2---- B3b+W2b B3- W3- W3b

    (``b`` marks the second chunk of a rank.) Chunk 1 lives too short to leave. The paper moves a part α of every activation, so
    small in the warm-up that the copy takes less than F (T_o < T_F); here whole activations leave, as many as the host lane has
    time for without delaying any action, the longest lived first. ``costs``: as :func:`stp`, with ``offload_s``, ``load_s``;
    ``objective`` as there.

    Raises:
        ScheduleError: a size is not a whole number of at least 1, or the costs are for another number of stages.
    """
    profile = costs or CostProfile.uniform(2 * ranks, chunks=2)
    wholes = (stp(ranks, microbatches, profile, objective=o) for o in dict.fromkeys(("makespan", objective)))
    offloaded = [offload(full, profile, stages=range(ranks)).schedule for full in wholes]
    best = min(offloaded, key=lambda schedule: order_key(objective, *figures(simulate(schedule, profile))))
    return replace(best, name="stp-offload")


@family(
    "stp-published",
    "STP in the order of its authors' code: the fastest, up to twice 1F1B's memory on the last rank",
    "Qi et al. 2025 (stp.txt), published code",
    peak_activations=lambda p, m, v: max(3 * p + 1, 4 * p - 1) / 2 if m >= 3 * p - 1 else None,
    makespan=lambda p, m, v, f, b, w: (
        m * (f + b + w) + (p - 1) * (f + b - 1.5 * w) if m >= 3 * p - 1 and b >= f >= w else None
    ),
    **_FACTS,
)
def stp_published(ranks: int, microbatches: int) -> Schedule:
    """The order of the authors' published code, for any ``ranks`` p and ``microbatches`` m >= 1; it looks at no costs::

        rank 0 |F0- F1- F2- F0b F3- F1b+B0b W0b         F2b+BW1b--- BW0---- F3b+B2b BW1---- B3b BW2---- W2b     BW3---- W3b
        rank 1 |    F0- F0b F1- F1b F2+F3-- F2b+BW0b--- BW0----     F3b+B1b BW1---- B2b BW2---- B3b+W1b BW3---- W2b W3b

    (``b`` marks the second chunk of a rank.) The counts of their code hold from m = 3p - 1 on; with fewer microbatches these
    are the rows for 3p - 1 without the last ones. In a stage W's run here in order of microbatch, as everywhere in jaxpipe:
    where theirs runs BW while older W's wait, B is braided with the oldest of them. Makespan and peak are the same.

    Raises:
        ScheduleError: a size is not a whole number of at least 1.
    """
    rows = stp_rows(ranks, microbatches, _published(ranks))
    return Schedule("stp-published", v_shape(ranks), microbatches, rows)


def _published(ranks: int) -> Shape:
    return Shape(ahead=ranks, split=ranks - 1)


def _best(
    name: str, ranks: int, microbatches: int, costs: CostProfile | None, limit: float, objective: Objective
) -> tuple[Schedule, float]:
    """Return the best of the shapes tried that hold at most ``limit`` activations, if none does the one that holds least;
    its peak.

    On equal stages ``ahead`` forwards ahead hold 2p + 1 + ``ahead`` chunks, and as many as the limit allows are tried first.
    """
    profile = costs or CostProfile.uniform(2 * ranks, chunks=2)

    def made(shape: Shape) -> Schedule:
        return Schedule(name, v_shape(ranks), microbatches, stp_rows(ranks, microbatches, shape))

    @cache
    def reached(shape: Shape) -> tuple[float, float, float]:
        return figures(simulate(made(shape), profile))

    def key(goal: Objective, shape: Shape) -> tuple[float, ...]:
        """Return what is minimised: the peak above the limit, makespan and longest span (the goal first), peak."""
        return max(reached(shape)[-1], limit * (1 + MEMORY)), *order_key(goal, *reached(shape))

    # the limit is in activations of two chunks each
    most = max(1, int(min(ranks, 2 * limit * (1 + MEMORY) - 2 * ranks - 1)))
    ahead = sorted({most, (most + 1) // 2, 1}, reverse=True)
    splits = sorted({0, 1, ranks // 2, ranks - 1})
    firsts = (False, True) if microbatches < 2 * ranks - 1 + most else (False,)  # True matters where some are left out
    best = Shape(most, split=0, paired=profile.has_collectives)
    # one choice after another; some again, since later ones change what is best
    tried: list[tuple[str, Sequence[int]]] = [("first", firsts), ("split", splits), ("ahead", ahead), ("first", firsts)]
    tried += [("hasty", [ranks // 2]), ("paired", [False]), ("split", splits)]
    for goal in dict.fromkeys(("makespan", objective)):  # span after makespan, so that it is never the longer
        for what, values in tried:
            changes: list[dict[str, Any]] = [{what: value} for value in values]
            best = min([best, *(replace(best, **other) for other in changes)], key=partial(key, goal))
        best = min(best, _published(ranks), key=partial(key, goal))
    return made(best), reached(best)[-1]
