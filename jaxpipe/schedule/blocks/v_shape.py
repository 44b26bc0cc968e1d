"""Building blocks on the V placement, and all of them that the adaptive search looks at.

Source: `controllable-memory.txt` section 3.1 and appendix A. Four flows cross the ranks: F of the first chunk and B of the
second go down (from rank 0 to rank p−1) with offset δ⁰ from rank to rank, F of the second chunk and B of the first go up with
offset δ¹. Lifespans, and so memory, are then balanced over the ranks. Where flows turn (at the ends of the V) the offset is the
shortest one that the pattern of the first rank leaves: less than T = 6, one cell for each of F, B, W of both chunks.

The search of appendix A takes two pairs (δ⁰, δ¹), one above rank K and one below. The authors' code fixes δ¹ to 1, and lists
pairs only in falling order; here δ¹ goes up to 3 and the order is free, so V-ZB's (4, 2) is among them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import permutations

from jaxpipe.schedule.blocks.block import BuildingBlock
from jaxpipe.schedule.placement import v_shape

T = 6
PAIRS = ((1, 1), (2, 1), (3, 1), (4, 1), (5, 1), (4, 2), (2, 2), (3, 3), (3, 2), (1, 2), (1, 3), (2, 3))
"""(δ⁰, δ¹) that the search combines."""


@dataclass(frozen=True, slots=True)
class VOffsets:
    """A block on p ranks: residues of F0, F1, B1, B0 (chunk numbers) on rank 0, and (δ⁰, δ¹) from each rank to the next."""

    pattern: tuple[int, int, int, int]
    pairs: tuple[tuple[int, int], ...]

    @property
    def turns(self) -> tuple[int, int, int]:
        """Cells from F0 to F1 on the last rank, from F1 to B1 on the first, from B1 to B0 on the last: each 1 to T."""
        f0, f1, b1, b0 = self.pattern
        drift = sum(down + up for down, up in self.pairs)
        return _turn(f1 - f0 - drift), _turn(b1 - f1), _turn(b0 - b1 - drift)

    @property
    def lifespans_on_rank_0(self) -> tuple[int, int]:
        """Cells from F to the end of B of the first and of the second chunk."""
        first, middle, last = self.turns
        round_trip = sum(down + up for down, up in self.pairs)
        return 2 * round_trip + first + middle + last + 1, middle + 1

    def steady_peaks(self, weights: Sequence[float]) -> tuple[float, ...]:
        """``self.block().steady_peaks(weights)`` without making the block; it must not collide."""
        first, middle, last = self.turns
        ranks = len(self.pairs) + 1
        f0, b0 = 0, 2 * sum(map(sum, self.pairs)) + first + middle + last
        f1 = first + sum(map(sum, self.pairs))
        b1 = f1 + middle
        found = []
        for rank in range(ranks):
            if rank:
                down, up = self.pairs[rank - 1]
                f0, f1, b1, b0 = f0 + down, f1 - up, b1 + down, b0 - up
            late0, late1 = _weight_delays((f1 - f0) % T, (b1 - f0) % T, (b0 - f0) % T, b0 < b1)
            x, y = weights[rank], weights[2 * ranks - 1 - rank]
            full0, part0 = divmod(b0 + late0 + 1 - f0, T)
            full1, part1 = divmod(b1 + late1 + 1 - f1, T)
            apart = (f1 - f0) % T
            live = (x * (c < part0) + y * ((c - apart) % T < part1) for c in range(T))
            found.append(full0 * x + full1 * y + max(live))
        return tuple(found)

    def block(self) -> BuildingBlock:
        """The block on the V placement of ``len(pairs) + 1`` ranks, W placed greedily."""
        first, middle, last = self.turns
        down, up = [d for d, _ in self.pairs], [u for _, u in reversed(self.pairs)]
        placement = v_shape(len(self.pairs) + 1)
        return BuildingBlock.of_chain(
            placement, T, forward=[*down, first, *up], turn=middle, backward=[*down, last, *up]
        )


def _turn(cells: int) -> int:
    return (cells - 1) % T + 1


@cache
def _weight_delays(f1: int, b1: int, b0: int, first_chunk_first: bool) -> tuple[int, int]:
    """Cells from B to W of the first and of the second chunk on a rank, by residues counted from F of the first chunk.

    As :func:`~jaxpipe.schedule.blocks.block.with_weight_gradients` places them: in the order of the Bs, first free residue.
    """
    taken = {0, f1, b1, b0}
    late = {}
    for chunk in (0, 1) if first_chunk_first else (1, 0):
        b = b1 if chunk else b0
        late[chunk] = next(d for d in range(1, T + 1) if (b + d) % T not in taken)
        taken.add((b + late[chunk]) % T)
    return late[0], late[1]


def searched(ranks: int, most: float) -> Iterator[VOffsets]:
    """All blocks of the search that don't collide and whose first rank may live with ``most`` chunks by lifespans.

    Every pattern of the first rank, every two of ``PAIRS``, every rank K where the second takes over; uniform ones once.
    """
    patterns = [(0, *rest) for rest in permutations(range(1, T), 3)]
    for f0, f1, b1, b0 in patterns:
        apart = [(x - y) % T for x in (f1, b0) for y in (f0, b1)]
        for first in PAIRS:
            reach = _reach(apart, sum(first), ranks - 1)
            for k in range(1, reach + 1):
                if k == ranks - 1:
                    yield from _within(VOffsets((f0, f1, b1, b0), (first,) * k), most)
                    break
                moved = [(x + k * -sum(first)) % T for x in apart]
                for second in PAIRS:
                    if second != first and _reach(moved, sum(second), ranks - 1 - k) == ranks - 1 - k:
                        pairs = (first,) * k + (second,) * (ranks - 1 - k)
                        yield from _within(VOffsets((f0, f1, b1, b0), pairs), most)
            if ranks == 1:
                yield from _within(VOffsets((f0, f1, b1, b0), ()), most)
                break


def _reach(apart: Sequence[int], drift: int, steps: int) -> int:
    """How many ranks further (at most ``steps``) the flows that go up and down keep apart, drifting by ``drift`` a rank."""
    for step in range(1, steps + 1):
        if any((x - step * drift) % T == 0 for x in apart):
            return step - 1
    return steps


def _within(offsets: VOffsets, most: float) -> Iterator[VOffsets]:
    if sum(-(-span // T) for span in offsets.lifespans_on_rank_0) - 1 <= most:
        yield offsets
