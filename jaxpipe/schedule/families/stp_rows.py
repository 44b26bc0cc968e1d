"""The rows of an STP schedule, phase by phase.

Source: `stp.txt` section 4.2, Figure 5 and appendix A (Figure 11), and the counts of the authors' published code. On rank r of
p, chunk 0 is stage r and chunk 1 stage 2p − 1 − r; F0 is a forward of chunk 0, B1 a backward of chunk 1. With
``below`` = p − 1 − r:

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
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from jaxpipe.schedule.ir import Action, Row, Slot
from jaxpipe.schedule.passes.backwards import slot_of


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
