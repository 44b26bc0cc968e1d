"""Predicts the bytes that XLA's allocator on GPUs takes beyond those of buffers, as it hands out whole chunks.

XLA's allocator (openxla/xla ``xla/tsl/framework/bfc_allocator.cc``) gives a buffer the smallest free chunk that holds it. It
divides a chunk only where that is at least twice as large, or 128 MiB larger; else the rest stays unused until the buffer is
freed, and counts as in use. Freed neighbours become one chunk. Allocations follow the order of dispatch, so the order of a
program decides the padding. Not modelled: a full device, where more is tried, and what is left of earlier steps.
"""

from __future__ import annotations

from bisect import bisect_left, insort

LARGEST_REST = 128 << 20
"""The rest of a chunk is left unused only where it is smaller."""


class Chunks:
    """The chunks of a device, as if it had no end. A chunk is named by where it begins."""

    def __init__(self) -> None:
        self._begins = [0]
        self._size = {0: 1 << 60}
        self._free = [(1 << 60, 0)]  # size and begin, in this order

    def take(self, n: int) -> tuple[int, int]:
        """Return a chunk for ``n`` bytes, and how many more it has."""
        size, chunk = self._free.pop(bisect_left(self._free, (n, -1)))
        if size < 2 * n and size - n < LARGEST_REST:
            return chunk, size - n
        self._size |= {chunk: n, chunk + n: size - n}
        insort(self._begins, chunk + n)
        insort(self._free, (size - n, chunk + n))
        return chunk, 0

    def give_back(self, chunk: int) -> None:
        """Free a chunk, as one with its free neighbours."""
        at = bisect_left(self._begins, chunk)
        near = [(self._size[begin], begin) for begin in self._begins[max(0, at - 1) : at + 2]]
        joined = [begin for size, begin in near if begin == chunk or (size, begin) in self._free]
        self._free = [entry for entry in self._free if entry[1] not in joined]
        first = bisect_left(self._begins, joined[0])
        self._begins[first : first + len(joined)] = joined[:1]
        self._size[joined[0]] = size = sum(self._size.pop(begin) for begin in joined)
        insort(self._free, (size, joined[0]))
