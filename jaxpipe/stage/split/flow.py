"""Minimum cuts of networks, by OR-Tools' maximum flow."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import numpy as np

INFINITE = -1
"""The capacity of an edge that no cut goes through, if another cut is there."""


class Flow:
    """A network, edge by edge."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._edges: list[tuple[int, int, int]] = []

    def edge(self, a: Hashable, b: Hashable, capacity: int) -> None:
        tail, head = (self._numbers.setdefault(node, len(self._numbers)) for node in (a, b))
        self._edges.append((tail, head, capacity))

    def source_side(self, source: Hashable, sink: Hashable) -> Iterable[Hashable]:
        """Nodes on the source's side of the smallest minimum cut, without the source."""
        from ortools.graph.python import max_flow

        if source not in self._numbers or sink not in self._numbers:
            return ()
        tails, heads, capacities = np.array(self._edges, np.int64).T
        infinite = 1 + capacities[capacities != INFINITE].sum()
        network = max_flow.SimpleMaxFlow()
        network.add_arcs_with_capacity(tails, heads, np.where(capacities == INFINITE, infinite, capacities))
        status = network.solve(self._numbers[source], self._numbers[sink])
        assert status == network.OPTIMAL, f"no maximum flow: {status}"
        nodes = list(self._numbers)
        return [nodes[k] for k in network.get_source_side_min_cut() if nodes[k] != source]
