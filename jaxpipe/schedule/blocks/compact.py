"""Reordering on the grid of cells: every pass moves to the earliest vacant cells that its inputs and the memory allow.

Source: `controllable-memory.txt` appendix C, here over the whole schedule, and for fused BW too. One walk over the repeated
block, in order of cells. Backward passes move as early as they can; an F moves up only through cells where the rank holds
less than the block's peak over all ranks. Looking at cells, not seconds, it keeps the rhythm of the block where costs are near
one another; use it as another start for :class:`~jaxpipe.schedule.list_schedule.fillers.Finisher`.
"""

from __future__ import annotations

from jaxpipe.schedule.blocks.block import BuildingBlock
from jaxpipe.schedule.problem import BW, B, F, Problem, W


def compact(block: BuildingBlock, problem: Problem) -> list[list[int]]:
    """Rows of codes of the repeated block after the walk; memory counts every stage as one (chunks), peak as repeated."""
    assert block.placement == problem.placement
    grid = _Grid(block, problem)
    for cell, _, code in sorted(grid.passes()):
        grid.move_up(code, cell)
    return grid.rows()


class _Grid:
    """Cells of each rank, who stands there, and the memory in each."""

    def __init__(self, block: BuildingBlock, problem: Problem) -> None:
        self.block, self.problem = block, problem
        self.cell: dict[int, int] = {}
        for j in range(block.num_microbatches):
            kinds = [(F, block.forward[j]), (BW if block.fused else B, block.backward[j])]
            if not block.fused:
                kinds.append((W, block.weight[j]))
            for op, cells in kinds:
                for s, first in enumerate(cells):
                    k = j % problem.placement.num_flows * problem.placement.num_stages + s
                    for i in range(j, problem.num_microbatches, block.num_microbatches):
                        self.cell[problem.code(op, k, i)] = first + block.start(i // block.num_microbatches)
        width = max(self.cell.values()) + 3
        self.taken = [bytearray(width) for _ in range(problem.num_ranks)]
        self.live = [[0] * width for _ in range(problem.num_ranks)]
        self.end: dict[int, int] = {}  # of passes that have found their place
        self.last: dict[int, int] = {}  # per kind, end of its latest pass
        for code, cell in self.cell.items():
            op, _, rank = self._what(code)
            for c in range(cell, cell + 1 + (op == BW)):
                self.taken[rank][c] = 1
            self.live[rank][cell + (op == BW)] += 1 if op == F else -1 if op in (W, BW) else 0
        for row in self.live:
            for c in range(1, width):
                row[c] += row[c - 1]
        self.peak = max(max(row) for row in self.live)

    def _what(self, code: int) -> tuple[int, int, int]:
        op, replica, _ = self.problem.decode(code)
        return op, replica, self.problem.rank[replica]

    def passes(self) -> list[tuple[int, int, int]]:
        """(cell, rank, code) of every pass."""
        return [(cell, self._what(code)[2], code) for code, cell in self.cell.items()]

    def _earliest(self, code: int) -> int:
        """The first cell at which what the pass waits for has ended."""
        op, k, i = self.problem.decode(code)
        stages, backward = self.problem.placement.num_stages, BW if self.block.fused else B
        earliest = self.last.get(code // self.problem.num_microbatches, 0)
        if op == F and k % stages:
            return max(earliest, self.end[self.problem.code(F, k - 1, i)])
        if op in (B, BW):
            before = (F, k) if k % stages == stages - 1 else (backward, k + 1)
            return max(earliest, self.end[self.problem.code(*before, i)])
        return max(earliest, self.end[self.problem.code(B, k, i)]) if op == W else earliest

    def move_up(self, code: int, cell: int) -> None:
        """Give a pass the earliest place that is free for it, at ``cell`` at the latest."""
        op, _, rank = self._what(code)
        taken, live = self.taken[rank], self.live[rank]
        length = 1 + (op == BW)
        place = self._earliest(code)
        if op == F:
            below = cell
            while below > place and live[below - 1] < self.peak:
                below -= 1
            place = below
        taken[cell : cell + length] = bytes(length)
        while any(taken[place : place + length]):
            place += 1
        taken[place : place + length] = b"\1" * length
        change = 1 if op == F else -1 if op in (W, BW) else 0
        if change:
            for c in range(place + length - 1, cell + length - 1):
                live[c] += change
        self.cell[code] = place
        self.end[code] = self.last[code // self.problem.num_microbatches] = place + length

    def rows(self) -> list[list[int]]:
        order: list[list[tuple[int, int]]] = [[] for _ in range(self.problem.num_ranks)]
        for code, cell in self.cell.items():
            order[self._what(code)[2]].append((cell, code))
        return [[code for _, code in sorted(row)] for row in order]
