"""Reordering on the grid of cells: every action moves to the earliest vacant cells that its inputs and the memory allow.

Source: `controllable-memory.txt` appendix C, here over the whole schedule, and for fused BW too. One walk over the repeated
block, in order of cells. B, BW and W move as early as they can; an F moves up only through cells where the rank holds
less than the block's peak over all ranks. Looking at cells, not seconds, it keeps the rhythm of the block where costs are near
one another; use it as another start for :class:`~jaxpipe.search.list_schedule.fillers.Finisher`.
"""

from __future__ import annotations

from collections.abc import Mapping

from jaxpipe.schedule.problem import BW, B, F, Problem, W
from jaxpipe.search.blocks.repeat import rows_of


def compact(problem: Problem, cell_of: Mapping[int, int]) -> list[list[int]]:
    """Return rows of codes after the walk over the cells ``cell_of`` the codes; memory counts every stage as one (chunks), and
    the peak stays that of the cells."""
    m, n, stages = problem.num_microbatches, problem.num_replicas, problem.placement.num_stages
    width = max(cell_of.values()) + 3
    occupied = [bytearray(width) for _ in range(problem.num_ranks)]
    live = [[0] * width for _ in range(problem.num_ranks)]
    change = (1, 0, -1, -1)
    for code, cell in cell_of.items():
        op, rank = code // m // n, problem.rank[code // m % n]
        last = cell + (op == BW)
        occupied[rank][cell] = occupied[rank][last] = 1
        live[rank][last] += change[op]
    for row in live:
        for c in range(1, width):
            row[c] += row[c - 1]
    peak = max(map(max, live))
    end: dict[int, int] = {}  # of actions that have found their place
    latest: dict[int, int] = {}  # per kind, end of its latest action
    cells: dict[int, int] = {}
    for code in sorted(cell_of, key=lambda code: (cell_of[code], problem.rank[code // m % n], code)):
        op, k, _ = problem.decode(code)
        cell, length, rank = cell_of[code], 1 + (op == BW), problem.rank[k]
        place = latest.get(code // m, 0)
        if op == F and k % stages:
            place = max(place, end[code - m])
        elif op in (B, BW):
            turn = k % stages == stages - 1
            place = max(place, end[code - op * n * m] if turn else end[code + m])
        elif op == W:
            place = max(place, end[code - (W - B) * n * m])
        # an F moves up only as far as the rank's peak stays
        if op == F:
            below = cell
            while below > place and live[rank][below - 1] < peak:
                below -= 1
            place = below
        # it leaves its own cells before it looks for others
        occupied[rank][cell : cell + length] = bytes(length)
        while any(occupied[rank][place : place + length]):
            place += 1
        occupied[rank][place : place + length] = b"\1" * length
        for c in range(place + length - 1, cell + length - 1):
            live[rank][c] += change[op]
        cells[code], end[code], latest[code // m] = place, place + length, place + length
    return rows_of(problem, cells)
