"""The building blocks on the V placement that the adaptive search looks at.

Source: `controllable-memory.txt` section 3.1 and appendix A. Four flows cross the ranks: F of the first chunk and B of the
second go down (from rank 0 to rank p−1) with offset δ⁰ from rank to rank, F of the second chunk and B of the first go up with
offset δ¹. Lifespans, and so memory, are then balanced over the ranks. Where flows turn (at the ends of the V) the offset is the
shortest one that the pattern of the first rank leaves: at most T = 6, one cell for each of F, B, W of both chunks.

As in the authors' code δ¹ is 1, and δ⁰ takes one value down to some rank K and a smaller one from there. Blocks with δ¹ up to 3
and rising δ⁰ were tried; they improved none of the 440 cells of `tests/golden/authors_v.json`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, permutations

from jaxpipe.schedule.blocks.block import BuildingBlock
from jaxpipe.schedule.placement import v_shape

T = 6
_LARGEST = 5


def searched(ranks: int, most: float) -> Iterator[BuildingBlock]:
    """The blocks that don't collide and whose first rank may live with ``most`` chunks, longest lifespans first."""
    found = []
    for f1, b1, b0 in permutations(range(1, T), 3):
        apart = {(x - y) % T for x in (f1, b0) for y in (0, b1)}  # flows that come up, less those that go down
        middle = _turn(b1 - f1)
        for down in _offsets(ranks):
            drifts = list(accumulate(down, lambda drift, offset: drift + offset + 1, initial=0))
            first, last = _turn(f1 - drifts[-1]), _turn(b0 - b1 - drifts[-1])
            spans = 2 * drifts[-1] + first + middle + last + 1, middle + 1
            if sum(-(-span // T) for span in spans) - 1 <= most and all(drift % T not in apart for drift in drifts):
                found.append((-sum(spans), (f1, b1, b0), down, (first, middle, last)))
    for _, _, down, (first, middle, last) in sorted(found):
        up = [1] * (ranks - 1)
        yield BuildingBlock.of_chain(
            v_shape(ranks), T, forward=[*down, first, *up], turn=middle, backward=[*down, last, *up]
        )


def _offsets(ranks: int) -> Iterator[tuple[int, ...]]:
    """Every δ⁰ from each rank to the next: one value above rank K, a smaller one below."""
    if ranks == 1:
        yield ()
    for first in range(1, _LARGEST + 1):
        for k in range(1, ranks):
            for second in range(1, _LARGEST + 1) if k < ranks - 1 else (first,):
                if k < ranks - 1 and second == first:
                    continue
                yield (first,) * k + (second,) * (ranks - 1 - k)


def _turn(cells: int) -> int:
    return (cells - 1) % T + 1
