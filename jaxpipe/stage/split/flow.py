"""Minimum cuts of small networks."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from itertools import pairwise

INFINITE = 1 << 62
"""The capacity of an edge that no cut goes through."""


class Flow:
    """Maximum flow by augmenting along level graphs (Dinic)."""

    def __init__(self) -> None:
        self._capacity: dict[Hashable, dict[Hashable, int]] = {}

    def edge(self, a: Hashable, b: Hashable, capacity: int) -> None:
        out = self._capacity.setdefault(a, {})
        out[b] = out.get(b, 0) + capacity
        self._capacity.setdefault(b, {}).setdefault(a, 0)

    def source_side(self, source: Hashable, sink: Hashable) -> Iterable[Hashable]:
        """Nodes on the source's side of the smallest minimum cut, without the source."""
        if source not in self._capacity or sink not in self._capacity:
            return ()
        while sink in (levels := self._levels(source)):
            ahead = {
                a: [b for b in out if levels.get(b) == levels[a] + 1]
                for a, out in self._capacity.items()
                if a in levels
            }
            while self._augment(source, sink, ahead):
                pass
        return [node for node in levels if node != source]

    def _levels(self, source: Hashable) -> dict[Hashable, int]:
        levels = {source: 0}
        queue = deque([source])
        while queue:
            a = queue.popleft()
            for b, left in self._capacity[a].items():
                if left > 0 and b not in levels:
                    levels[b] = levels[a] + 1
                    queue.append(b)
        return levels

    def _augment(self, source: Hashable, sink: Hashable, ahead: dict[Hashable, list[Hashable]]) -> bool:
        path = [source]
        while path[-1] != sink:
            a = path[-1]
            while ahead[a] and not (self._capacity[a][ahead[a][-1]] > 0):
                ahead[a].pop()
            if ahead[a]:
                path.append(ahead[a][-1])
            elif len(path) == 1:
                return False
            else:
                path.pop()
                ahead[path[-1]].pop()
        steps = list(pairwise(path))
        amount = min(self._capacity[a][b] for a, b in steps)
        for a, b in steps:
            self._capacity[a][b] -= amount
            self._capacity[b][a] += amount
        return True
