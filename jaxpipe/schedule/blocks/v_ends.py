"""Warm-up and cool-down of a V schedule, laid out by rule on the grid of cells instead of moved pass by pass.

Source: `controllable-memory.txt` appendix C, figure 11, and what the authors' adaptive scheduler makes of it. With a peak of k
chunks the best ends of a V schedule are known in advance, whatever the block in between:

* *warm-up*, all that a rank runs before its first B of the first chunk: rank r sends F of the first chunk down while none can
  come back (2(p − 1 − r) cells), then runs F of both chunks in turn, at most k together; then B, W and F in turn;
* *cool-down*: the last B of both chunks run two cells apart, so that those going down and those coming up pass each other
  without waiting; W fills what is left.

In between, a vacant cell takes the first later pass that is ready and that memory leaves room for. The result is an order; real
costs come in when it is re-timed. A rule that doesn't fit (a pass would run before its input) gives no order.

Every chunk counts as one unit of memory here; who calls looks at the real peak.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from jaxpipe.schedule.blocks.block import BuildingBlock
from jaxpipe.schedule.blocks.repeat import repeat
from jaxpipe.schedule.problem import B, CodeRows, F, Problem, W
from jaxpipe.schedule.retime import Retimer

_VACANT = _NOTHING = -1  # in a row of codes; in a row of kinds
# what a rank runs, in the order a microbatch meets it: F of the chunk that goes down and of the one that comes up, B and W
_F_DOWN, _F_UP, _B_DOWN, _B_UP, _W_DOWN, _W_UP = range(6)


class VEnds:
    """The rules for one problem on a V placement; :meth:`orders` for each block."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.num_ranks = problem.num_ranks
        self.wanted = _Grid(problem)
        longer = max(problem.num_microbatches, 2 * problem.num_ranks)
        same = longer == problem.num_microbatches
        self.long = self.wanted if same else _Grid(replace(problem, num_microbatches=longer))

    def orders(self, block: BuildingBlock, limit: float) -> Iterator[CodeRows]:
        """Orders of all microbatches that hold at most ``limit`` chunks; none if the rules don't fit the block.

        With fewer than 2p microbatches, the warm-up is that of 2p, and the rest is left out; with at most p, memory is left
        over then, and the first W of each rank may wait: two orders.
        """
        p, m = self.num_ranks, self.problem.num_microbatches
        long, wanted = self.long, self.wanted
        rows = repeat(block, long.unit)
        held = max(map(long.peak, rows))
        if held > 2 * p or (long is wanted and held > limit):
            return
        cells = long.cells(_warm_up(long, rows, min(held, 2 * p)))
        if cells is None:
            return
        most = max(map(long.peak, cells))
        if most > held:
            return
        if long is wanted:
            starts = [cells]
        else:
            kept = [long.renumbered(row, wanted) for row in cells]
            orders = [kept, _put_off(wanted, kept, min(2 * p, most))] if m <= p else [kept]
            starts = [laid for laid in map(wanted.cells, orders) if laid is not None]
        for start in starts:
            found = self._ended(start)
            if found is not None and max(map(wanted.peak, found)) <= limit:
                yield found

    def _ended(self, cells: list[list[int]]) -> list[list[int]] | None:
        """``cells`` with the cool-down by the rule and vacant cells filled; None if it doesn't fit."""
        wanted = self.wanted
        held = max(map(wanted.peak, cells))
        laid = _cool_down(wanted, cells, held)
        if laid is None:
            return None
        _fill(wanted, laid)
        rows = [_weights_in_turn(wanted, r, row) for r, row in enumerate(laid)]
        complete = all(len(row) == 6 * wanted.m for row in rows)
        return rows if complete and max(map(wanted.peak, rows)) <= held else None


class _Grid:
    """Codes of a problem as passes on cells: which of the six kinds a code is, and what an order's cells are."""

    def __init__(self, problem: Problem) -> None:
        n = problem.num_replicas
        one, free = (1.0,) * n, (0.0,) * n
        self.unit = replace(problem, f_s=one, b_s=one, w_s=one, down_s=free, up_s=free, held=one, kept=one)
        self.m, self.n, self.p = problem.num_microbatches, n, problem.num_ranks
        self.retimer = Retimer(self.unit)
        down = n // 2  # replicas below run on the way down
        self.kind = [
            *(_F_DOWN if k < down else _F_UP for k in range(n)),
            *(_B_UP if k < down else _B_DOWN for k in range(n)),
            *(_W_UP if k < down else _W_DOWN for k in range(n)),
        ]

    def of(self, code: int) -> int:
        return self.kind[code // self.m]

    def code(self, rank: int, kind: int, microbatch: int) -> int:
        """The code of a kind of pass on ``rank``."""
        op = (F, F, B, B, W, W)[kind]
        stage = rank if kind in (_F_DOWN, _B_UP, _W_UP) else self.n - 1 - rank
        return self.unit.code(op, stage, microbatch)

    def cells(self, rows: list[list[int]]) -> list[list[int]] | None:
        """``rows`` squeezed: per rank, which code stands in which cell; None if the order deadlocks."""
        ordered = [[c for c in row if c != _VACANT] for row in rows]
        times = self.retimer.times(ordered)
        if times.deadlocked:
            return None
        length = round(max(times.last_s))
        cells = [[_VACANT] * length for _ in ordered]
        for row, codes in zip(cells, ordered, strict=True):
            for code in codes:
                row[round(times.start_s[code])] = code
        return cells

    def peak(self, row: list[int]) -> int:
        """Most chunks held at once."""
        live = most = 0
        for code in row:
            if code != _VACANT:
                kind = self.kind[code // self.m]
                if kind <= _F_UP:
                    live += 1
                    most = max(most, live)
                elif kind >= _W_DOWN:
                    live -= 1
        return most

    def renumbered(self, row: list[int], fewer: _Grid) -> list[int]:
        """``row`` without the microbatches that ``fewer`` does not have, in its codes."""
        split = (divmod(code, self.m) for code in row if code != _VACANT)
        return [where * fewer.m + i for where, i in split if i < fewer.m]


def _warm_up(grid: _Grid, rows: CodeRows, most: int) -> list[list[int]]:
    """Orders in which all before the first B of the first chunk follows the rule. ``most``: chunks held at once."""
    m, found = grid.m, []
    for r, row in enumerate(rows):
        first = next((k for k, c in enumerate(row) if grid.of(c) == _B_UP), len(row))
        up = min(r + 1, most // 2, m)
        found.append([*_warm_up_of_rank(grid, r, row[:first], min(most - up, m), up), *row[first:]])
    return found


def _warm_up_of_rank(grid: _Grid, rank: int, codes: Sequence[int], down: int, up: int) -> Iterator[int]:
    """The same passes: ``down`` and ``up`` F of the two chunks at first, then B, W, F in turn."""
    queues: list[list[int]] = [[] for _ in range(6)]
    for code in reversed(codes):
        queues[grid.of(code)].append(code)
    going, coming, back, weight = queues[_F_DOWN], queues[_F_UP], queues[_B_DOWN], queues[_W_DOWN]
    left_down, left_up = max(0, len(going) - down), max(0, len(coming) - up)
    for _ in range(2 * (grid.p - 1 - rank)):
        if len(going) > left_down:
            yield going.pop()
    for _ in range(rank + 1):
        if len(going) > left_down:
            yield going.pop()
        if len(coming) > left_up:
            yield coming.pop()
    while going or coming or back or weight:
        for queue in (back, weight, coming or going):
            if queue:
                yield queue.pop()


def _put_off(grid: _Grid, rows: list[list[int]], held: int) -> list[list[int]]:
    """With few microbatches memory is left over: the first W of each rank go to its end, as many as ``held`` chunks allow."""
    found = []
    for row in rows:
        weights = [c for c in row if grid.of(c) >= _W_DOWN]
        late = weights[: held - grid.peak(row)]
        order = [c for c in row if c not in late] + late
        # W of each chunk in the order of their B again
        queues = {kind: iter([c for c in weights if grid.of(c) == kind]) for kind in (_W_DOWN, _W_UP)}
        found.append([next(queues[grid.of(c)]) if grid.of(c) >= _W_DOWN else c for c in order])
    return found


def _cool_down(grid: _Grid, cells: list[list[int]], most: int) -> list[list[int]] | None:
    """Cells with the last B of both chunks by the rule and W in what they leave; squeezed. None if they don't fit.

    ``most``: chunks that ``cells`` hold at once.
    """
    m = grid.m
    up = min((most + 1) // 2, m)
    down = min(most - up, m)
    turn = max(c for c, code in enumerate(cells[0]) if code != _VACANT and grid.of(code) == _F_UP)
    rows = []
    for r, row in enumerate(cells):
        laid = _cool_down_of_rank(grid, r, row, turn, up, min(down, r + 1), most)
        if laid is None:
            return None
        rows.append(laid)
    return grid.cells(rows)


def _cool_down_of_rank(
    grid: _Grid, rank: int, row: list[int], turn: int, up: int, down: int, most: int
) -> list[int] | None:
    """``turn``: the cell of the last F on rank 0; ``up``, ``down``: how many B of the two chunks move; ``most``: peak."""
    p, m = grid.p, grid.m
    kinds = [_NOTHING if code == _VACANT else grid.kind[code // m] for code in row]
    kinds += [_NOTHING] * (2 * p + 2)
    moved = {
        _B_UP: [turn - rank + 2 * p - 2 * k for k in range(up)],
        _B_DOWN: [turn + 1 + rank - 2 * k for k in range(down)],
    }
    left = {_B_UP: up, _B_DOWN: down}
    taken = {_W_DOWN: 0, _W_UP: 0}
    for c in range(len(kinds) - 1, -1, -1):
        kind = kinds[c]
        if kind in left:
            if left[kind]:
                left[kind] -= 1
                kinds[c] = _NOTHING
        elif kind in taken and not (taken[_W_DOWN] >= down and taken[_W_UP] >= up and sum(taken.values()) >= most):
            taken[kind] += 1
            kinds[c] = _NOTHING
    for kind, places in moved.items():
        for place in places:
            if not 0 <= place < len(kinds) or kinds[place] != _NOTHING:
                return None
            kinds[place] = kind
    _put_weights(kinds, m)
    count = [0] * 6
    cells = [_VACANT] * len(kinds)
    for c, kind in enumerate(kinds):
        if kind != _NOTHING:
            cells[c] = grid.code(rank, kind, count[kind])
            count[kind] += 1
    return cells


def _put_weights(kinds: list[int], microbatches: int) -> None:
    """The missing W of a rank, each in the first vacant cell after its B and after the last W that is there."""
    last = max((c for c, kind in enumerate(kinds) if kind >= _W_DOWN), default=-1)
    before = kinds[: last + 1]
    due = {w: before.count(w - 2) - before.count(w) for w in (_W_DOWN, _W_UP)}
    missing = {w: microbatches - before.count(w) for w in due}
    for c in range(last + 1, len(kinds)):
        kind = kinds[c]
        if kind in (_B_DOWN, _B_UP):
            due[kind + 2] += 1
        elif kind == _NOTHING:
            for w in due:
                if due[w] > 0:
                    kinds[c] = w
                    due[w] -= 1
                    missing[w] -= 1
                    break
    for w, count in missing.items():
        kinds += [w] * count


def _fill(grid: _Grid, cells: list[list[int]]) -> None:
    """Column by column, a vacant cell takes the first later pass of its row that is ready and that memory leaves room for."""
    most = max(map(grid.peak, cells))
    ranks = [_Row(grid, r, row, most) for r, row in enumerate(cells)]
    for here, above, below in zip(ranks, [None, *ranks], [*ranks[1:], None], strict=False):
        here.above, here.below = above, below
    for c in range(max(map(len, cells))):
        for row in ranks:
            if c < row.length:
                row.settle(c)


class _Row:
    """One rank while its vacant cells are filled. ``at[kind]``: the cell of each pass of that kind, in order; the first
    ``count[kind]`` of them are settled."""

    __slots__ = ("above", "at", "below", "cells", "count", "kind", "length", "live", "most", "size")

    def __init__(self, grid: _Grid, rank: int, cells: list[int], most: int) -> None:
        self.cells, self.length = cells, len(cells)
        self.kind, self.size = grid.kind, grid.m
        self.most, self.live = most, 0
        self.above: _Row | None = None
        self.below: _Row | None = None
        self.count = [0] * 6
        self.at: list[list[int]] = [[] for _ in range(6)]
        for c, code in enumerate(cells):
            if code != _VACANT:
                self.at[grid.kind[code // grid.m]].append(c)

    def settle(self, cell: int) -> None:
        """Give ``cell`` its pass: the one that stands there, or one that may move there."""
        code = self.cells[cell]
        if code == _VACANT:
            kind = self._mover(cell)
            if kind < 0:
                return
            source = self.at[kind][self.count[kind]]
            self.cells[cell], self.cells[source] = self.cells[source], _VACANT
            self.at[kind][self.count[kind]] = cell
        else:
            kind = self.kind[code // self.size]
        self.count[kind] += 1
        self.live += (kind <= _F_UP) - (kind >= _W_DOWN)

    def _mover(self, cell: int) -> int:
        """The kind of pass that moves to ``cell``: of those that may, the one that stands nearest; -1 for none."""
        at, count = self.at, self.count
        best, nearest = -1, self.length
        for kind in range(_F_DOWN if self.live < self.most else _B_DOWN, 6):
            i = count[kind]
            if i < len(at[kind]):
                place = at[kind][i]
                if place < nearest and self._ready(kind, i, cell) and (kind >= _B_DOWN or self._fits(cell, place)):
                    best, nearest = kind, place
        return best

    def _ready(self, kind: int, i: int, cell: int) -> bool:
        """Whether what pass ``i`` of ``kind`` needs stands before ``cell``."""
        if kind >= _W_DOWN:
            return self.count[kind - 2] > i
        goes_down = kind in (_F_DOWN, _B_DOWN)
        source = self.above if goes_down else self.below
        if source is not None:
            return source.count[kind] > i and source.at[kind][i] < cell
        return kind == _F_DOWN or self.count[kind - 1] > i

    def _fits(self, cell: int, place: int) -> bool:
        """Whether an F from ``place`` may run in ``cell``: between them, less than the most is held."""
        live = self.live
        cells, of, size = self.cells, self.kind, self.size
        for c in range(cell + 1, place):
            code = cells[c]
            if code != _VACANT:
                kind = of[code // size]
                if kind <= _F_UP:
                    live += 1
                    if live >= self.most:
                        return False
                elif kind >= _W_DOWN:
                    live -= 1
        return True


def _weights_in_turn(grid: _Grid, rank: int, row: list[int]) -> list[int]:
    """The order of the cells, with W in the order of their B."""
    waiting: list[int] = []
    taken = {_B_DOWN: 0, _B_UP: 0}
    found = []
    for code in row:
        if code == _VACANT:
            continue
        kind = grid.of(code)
        if kind in taken:
            waiting.append(grid.code(rank, _W_DOWN if kind == _B_DOWN else _W_UP, taken[kind]))
            taken[kind] += 1
        elif kind >= _W_DOWN:
            if not waiting:
                return []
            code = waiting.pop(0)
        found.append(code)
    return found
