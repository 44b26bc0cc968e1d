"""Minimum cuts without OR-Tools: as much of its ``max_flow`` as jaxpipe's splitter uses, by Dinic's algorithm.

A machine with a card may have no OR-Tools, and stages must still be split there. The cut that is nearest to the source is one
whatever finds it, so stages come out the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class SimpleMaxFlow:
    """A flow network. ``_arcs``: head and capacity left, each arc followed by its reverse; ``_from``: arcs by tail."""

    OPTIMAL = 0

    def __init__(self) -> None:
        self._arcs: list[list[int]] = []
        self._from: dict[int, list[int]] = {}
        self._reached: dict[int, int] = {}

    def add_arcs_with_capacity(self, tails: Iterable[int], heads: Iterable[int], capacities: Iterable[int]) -> None:
        for tail, head, capacity in zip(tails, heads, capacities, strict=True):
            for a, b, room in ((tail, head, capacity), (head, tail, 0)):
                self._from.setdefault(int(a), []).append(len(self._arcs))
                self._arcs.append([int(b), int(room)])

    def solve(self, source: int, sink: int) -> int:
        while sink in (levels := self._levels(source)):
            tried = dict.fromkeys(self._from, 0)
            while path := self._path(source, sink, levels, tried):
                pushed = min(self._arcs[k][1] for k in path)
                for k in path:
                    self._arcs[k][1] -= pushed
                    self._arcs[k ^ 1][1] += pushed
        self._reached = levels
        return self.OPTIMAL

    def get_source_side_min_cut(self) -> list[int]:
        return list(self._reached)

    def _levels(self, source: int) -> dict[int, int]:
        """Return, by node that is reached, the arcs on the shortest way to it that still have room."""
        levels, queue = {source: 0}, deque([source])
        while queue:
            node = queue.popleft()
            for head, room in (self._arcs[k] for k in self._from[node]):
                if room and head not in levels:
                    levels[head] = levels[node] + 1
                    queue.append(head)
        return levels

    def _path(self, source: int, sink: int, levels: dict[int, int], tried: dict[int, int]) -> list[int]:
        """Return arcs with room from the source to the sink, a level each; ``tried``: arcs of each node that lead nowhere."""
        path: list[int] = []
        node = source
        while node != sink:
            arcs = self._from[node]
            while tried[node] < len(arcs):
                head, room = self._arcs[arcs[tried[node]]]
                if room and levels.get(head) == levels[node] + 1:
                    path.append(arcs[tried[node]])
                    node = head
                    break
                tried[node] += 1
            else:
                if not path:
                    return []
                node = self._arcs[path.pop() ^ 1][0]
                tried[node] += 1
        return path
