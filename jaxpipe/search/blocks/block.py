"""Building blocks: the cells that one group of microbatches takes, how a pipeline repeats them, and those on the V placement.

Source: `controllable-memory.txt` section 2. A cell is one unit of time of a grid on which F, B and W each take one; real
costs come in later, when the repeated order is squeezed. A block says at which cell every action of its microbatches starts;
which rank it runs on is the placement's. Repeating is legal if no two actions meet on a rank, which residues modulo T decide
(:meth:`BuildingBlock.collisions`). Lifespans decide the memory (:meth:`BuildingBlock.steady_peaks`).

Not modelled: actions longer than a cell, except a fused BW, which takes two. Cells are not checked against the data flow:
rows of a block that runs against it deadlock, which the retimer finds.

**Repeated** (:func:`repeat`): the order in which each rank runs the actions of all microbatches. Source:
`controllable-memory.txt` section 2 (uniform repeat) and appendix H (repeat in groups). The order is by cell; times are
dropped, so squeezing is re-timing the order with real costs (:mod:`~jaxpipe.search.retime`).

**Reordered on the grid of cells** (:func:`compact`): every action moves to the earliest vacant cells that its inputs and the
memory allow. Source: `controllable-memory.txt` appendix C, here over the whole schedule, and for fused BW too. One walk over
the repeated block, in order of cells. B, BW and W move as early as they can; an F moves up only through cells where the rank
holds less than the block's peak over all ranks. Looking at cells, not seconds, it keeps the rhythm of the block where costs
are near one another; use it as another start for :class:`~jaxpipe.search.list_schedule.fillers.GapFiller`.

**On the V placement** (:func:`search_blocks`): the blocks that the adaptive search looks at. Source: `controllable-memory.txt`
section 3.1 and appendix A. Four flows cross the ranks: F of the first chunk and B of the second go down (from rank 0 to rank
p−1) with offset δ⁰ from rank to rank, F of the second chunk and B of the first go up with offset δ¹. Lifespans, and so memory,
are then balanced over the ranks. Where flows turn (at the ends of the V) the offset is the shortest one that the pattern of
the first rank leaves: at most T = 6, one cell for each of F, B, W of both chunks.

As in the authors' code δ¹ is 1, and δ⁰ takes one value down to some rank K and a smaller one from there. Blocks with δ¹ up to
3 and rising δ⁰ were tried; they improved none of the 440 cells of `tests/golden/authors_v.json`.

**Ends of a V schedule** (:func:`cells_with_ends`): warm-up and cool-down laid out by rule on the grid of cells instead of
moved action by action. Source: `controllable-memory.txt` appendix C, figure 11, and what the authors' adaptive scheduler makes
of it. With a peak of k chunks the best ends of a V schedule are known in advance, whatever the block in between:

* *warm-up*, all that a rank runs before its first B of the first chunk: rank r sends F of the first chunk down while none can
  come back (2(p − 1 − r) cells), then runs F of both chunks in turn, at most k together; then B, W and F in turn;
* *cool-down*: the last B of both chunks run two cells apart, so that those going down and those coming up pass each other
  without waiting.

The result is an order of F and B; where W goes, :mod:`~jaxpipe.search.list_schedule.policies` decides by real costs. Without
these rules the adaptive search is behind the authors' in 31 of 49 cells of `tests/golden/authors_v.json`, by up to 6%.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, permutations, product, zip_longest
from typing import Any

from jaxpipe.schedule.placement import Placement, circular, v_shape
from jaxpipe.schedule.problem import BW, B, F, Problem, W
from jaxpipe.search.retime import Retimer

Cells = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class BuildingBlock:
    """``forward[j][s]``, ``backward[j][s]``, ``weight[j][s]``: the cell where F, B, W of stage s start for the block's
    microbatch j.

    ``interval``: cells T from one block to the next. ``weight`` empty: B and W run as one BW of two cells. Most blocks hold
    one microbatch; several let a pattern alternate (appendix I). Microbatch i of the pipeline is microbatch ``i % n`` of its
    block, where n = ``len(forward)``.

    ``group``: 0 for a uniform repeat. Otherwise blocks come in groups of that many, T apart within a group, and groups come
    every ``group_interval`` cells (bi-level, appendix H: interleaved 1F1B has groups of p).
    """

    placement: Placement
    interval: int
    forward: Cells
    backward: Cells
    weight: Cells = ()
    group: int = 0
    group_interval: int = 0

    @classmethod
    def of_chain(
        cls,
        placement: Placement,
        interval: int,
        *,
        forward: Sequence[int],
        turn: int,
        backward: Sequence[int],
        fused: bool = False,
    ) -> BuildingBlock:
        """Return the block of one microbatch with these offsets along the chain, and W greedily in the cells that F and B
        leave.

        ``forward[s]``: cells from F of stage s to F of stage s+1. ``turn``: from the last stage's F to its B.
        ``backward[k]``: from the k-th B to the next, in the order they run (last stage first). ``fused``: BW instead of B, W.
        Meant for blocks whose F and B don't collide; if they do, W stands directly after B.
        """
        f = tuple(accumulate(forward, initial=0))
        # B's run from the last stage to the first, and rows go by stage
        b = tuple(accumulate(backward, initial=f[-1] + turn))[::-1]
        block = cls(placement, interval, (f,), (b,))
        return block if fused else with_weight_gradients(block)

    @property
    def num_microbatches(self) -> int:
        return len(self.forward)

    @property
    def fused(self) -> bool:
        """Return whether B and W run as one BW."""
        return not self.weight

    @property
    def period(self) -> int:
        """Return the cells after which the repeated pattern comes again: T, or a group's interval."""
        return self.group_interval if self.group else self.interval

    def start(self, k: int) -> int:
        """Return the cell at which the k-th block of the pipeline starts."""
        groups, k = divmod(k, self.group) if self.group else (0, k)
        return groups * self.group_interval + k * self.interval

    def rank(self, stage: int, microbatch: int) -> int:
        """Return the rank that runs ``stage`` for the block's microbatch."""
        return self.placement.ranks(stage, microbatch)[0]

    @property
    def ends(self) -> Cells:
        """Return ``[j][s]``: the cell of W, or the second one of BW: the last in which the activation lives."""
        return self.weight or tuple(tuple(cell + 1 for cell in row) for row in self.backward)

    def places(self, cells: Cells) -> Iterator[tuple[int, int]]:
        """Yield (rank, cell modulo the period) of everything that stands at ``cells[j][s]``, once for each block of a group."""
        for j, row in enumerate(cells):
            for s, cell in enumerate(row):
                yield from self.copies(self.rank(s, j), cell)

    def copies(self, rank: int, cell: int) -> list[tuple[int, int]]:
        """Return ``cell`` of ``rank`` modulo the period, in each block of a group."""
        return [(rank, (cell + self.start(k)) % self.period) for k in range(max(1, self.group))]

    def collisions(self) -> list[tuple[int, int]]:
        """Return (rank, cell modulo the period) where actions meet when the block repeats; empty for a legal block."""
        occupancy = Counter(place for cells in (self.forward, self.backward, self.ends) for place in self.places(cells))
        return [place for place, count in occupancy.items() if count > 1]

    def steady_peaks(self, weights: Sequence[float] | None = None) -> tuple[float, ...]:
        """Return, per rank, the most that lives at one cell of the steady phase: what no repeat exceeds on the grid. It is
        at most equation 1, Σ ⌈lifespan / T⌉ × activation over the stages of a rank, whose maxima may not coincide.

        ``weights[s]``: activation of stage s (default 1 each: chunks).
        """
        live = [[0.0] * self.period for _ in range(self.placement.num_ranks)]
        for j, (first, last) in enumerate(zip(self.forward, self.ends, strict=True)):
            for s, (f, end) in enumerate(zip(first, last, strict=True)):
                # whole periods of a lifespan live at every cell, the rest at ``part`` of them
                full, part = divmod(end + 1 - f, self.period)
                weight, rank = weights[s] if weights else 1.0, self.rank(s, j)
                cells = live[rank]
                for _, at in self.copies(rank, f):
                    for c in range(self.period):
                        cells[c] += full * weight
                    for c in range(at, at + part):
                        cells[c % self.period] += weight
        return tuple(map(max, live))


def with_weight_gradients(block: BuildingBlock) -> BuildingBlock:
    """Return the block of split B and W: each W at the first cell after its B whose residue F, B and earlier W leave free.

    Ws are placed in the order of their Bs. Where no residue is free, W stands directly after B (the block then collides).
    """
    occupied = {*block.places(block.forward), *block.places(block.backward)}
    weight = [[cell + 1 for cell in row] for row in block.backward]
    for b, j, s in sorted((cell, j, s) for j, row in enumerate(block.backward) for s, cell in enumerate(row)):
        # one period has every residue: past it no cell is free that was not before
        for cell in range(b + 1, b + 1 + block.period):
            copies = block.copies(block.rank(s, j), cell)
            if occupied.isdisjoint(copies):
                occupied.update(copies)
                weight[j][s] = cell
                break
    return replace(block, weight=tuple(map(tuple, weight)))


def interleaved_block(ranks: int, turns: Sequence[int], *, group: int = 0, fused: bool = False) -> BuildingBlock:
    """Return the building block of a microbatch whose chunk c runs F in turn ``turns[c]`` of rank 0, and B of the last chunk as
    soon as it can; B of the other chunks follow at the same distances. A turn is three cells: F, B, W.

    ``group``: microbatches in a group, one turn apart, groups coming every group × v turns; 0: microbatches v turns apart.
    ``fused``: a turn is F and BW, and ranks start 1 cell after each other, which needs chunks p turns apart.

    With B and W apart ranks start 1 or 2 cells after each other, so that both F and B come round before the next chunk's
    turn. This needs chunks at least ⌈p/2⌉ turns apart.
    """
    p, v = ranks, len(turns)
    # the closest pair of chunks decides how late ranks may start and still have F round in time
    distance = min((b - a for a, b in pairwise(turns)), default=p)
    late = 0 if fused else min(p - 1, 3 * distance - p)
    cells = [r + min(r, late) for r in range(p)]
    forward = [3 * turn + cell for turn in turns for cell in cells]
    back = [3 * (turns[-1] + turn + p - 1 - r) + cells[r] + 1 for turn in reversed(turns) for r in range(p)]
    return BuildingBlock(
        circular(p, v),
        interval=3 if group else 3 * v,
        forward=(tuple(forward),),
        backward=(tuple(back),),
        weight=() if fused else (tuple(cell + 1 for cell in back),),
        group=group,
        group_interval=3 * v * group,
    )


def repeat(block: BuildingBlock, problem: Problem, places: Sequence[int] | None = None) -> list[list[int]]:
    """Return rows of codes: every action of ``problem``'s microbatches on its rank, in the order of its cell.

    ``places``: the microbatch at each place of the repetition, -1 where one is left out (default: all in turn). Leaving out
    whole microbatches keeps what the others wait for. A last block that is only partly needed is cut. A block that collides
    gives an order all the same (ties: F, then B, then W); ask
    :meth:`~jaxpipe.search.blocks.block.BuildingBlock.collisions` where that matters.
    """
    return rows_of(problem, cells_of(block, problem, places))


def cells_of(block: BuildingBlock, problem: Problem, places: Sequence[int] | None = None) -> dict[int, int]:
    """Return the cell at which each action of ``problem``'s microbatches starts, by code; ``places`` as for :func:`repeat`."""
    assert block.placement == problem.placement
    n, m = block.num_microbatches, problem.num_microbatches
    stages, flows = problem.placement.num_stages, problem.placement.num_flows
    backward = [(BW, block.backward)] if block.fused else [(B, block.backward), (W, block.weight)]
    numbers = [(k % n, block.start(k // n), i) for k, i in enumerate(range(m) if places is None else places) if i >= 0]
    return {
        problem.code(op, j % flows * stages + s, i): cells[j][s] + start
        for op, cells in ((F, block.forward), *backward)
        for s in range(stages)
        for j, start, i in numbers
    }


def rows_of(problem: Problem, cells: Mapping[int, int]) -> list[list[int]]:
    """Return, per rank, its actions in the order of their cells."""
    import numpy as np  # here, as importing the families is to need no NumPy

    codes, starts = (np.fromiter(x, np.int64, len(cells)) for x in (cells, cells.values()))
    ranks = np.array(problem.rank)[codes // problem.num_microbatches % problem.num_replicas]
    order = np.lexsort((codes, starts, ranks))
    ends = np.searchsorted(ranks[order], np.arange(1, problem.num_ranks))
    return [row.tolist() for row in np.split(codes[order], ends)]


def repeat_steady_phase(problem: Problem, rows: Sequence[Sequence[int]], microbatches: int) -> list[list[int]] | None:
    """Return ``rows`` of ``problem`` with the steady phase repeated until there are ``microbatches``; None if a rank has none.

    Whether the result deadlocks, how long it takes and what it holds is the retimer's business.
    """
    import numpy as np

    few, extra = problem.num_microbatches, microbatches - problem.num_microbatches
    assert extra >= 0
    longer = []
    for row in map(np.array, rows):
        # actions of one microbatch on the rank
        period = len(row) // few
        cut = _steady(row, period)
        if cut is None:
            return None
        moved = row // few * microbatches + row % few
        # the period at the cut comes once more for each new microbatch, numbered one higher each time
        repeated = moved[cut : cut + period] + np.arange(1, extra + 1)[:, None]
        longer.append(np.concatenate([moved[: cut + period], repeated.ravel(), moved[cut + period :] + extra]).tolist())
    return longer


def _steady(row: Any, period: int) -> int | None:
    """Return a position from which a period and the one after are the same but for the microbatch; the one nearest the
    middle."""
    import numpy as np

    # codes of one op and stage go up by 1 a microbatch
    same = np.cumsum(np.append(0, row[:-period] + 1 == row[period:]))
    starts = np.flatnonzero(same[period:] - same[:-period] == period)
    return int(min(starts, key=lambda at: abs(at - len(row) // 2))) if len(starts) else None


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
    # one peak for all ranks: those that hold less may fill up to it
    peak = max(map(max, live))
    end: dict[int, int] = {}  # of actions that have found their place
    latest: dict[int, int] = {}  # per kind, end of its latest action
    cells: dict[int, int] = {}
    for code in sorted(cell_of, key=lambda code: (cell_of[code], problem.rank[code // m % n], code)):
        op, k, _ = problem.decode(code)
        cell, length, rank = cell_of[code], 1 + (op == BW), problem.rank[k]
        # what is of one kind keeps its order, in which gradients add up
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
        # what it takes or gives back now happens that much earlier
        for c in range(place + length - 1, cell + length - 1):
            live[rank][c] += change[op]
        cells[code], end[code], latest[code // m] = place, place + length, place + length
    return rows_of(problem, cells)


T = 6
_LARGEST = 5


def search_blocks(ranks: int, most: float) -> Iterator[BuildingBlock]:
    """Yield the blocks that don't collide and whose first rank may live with ``most`` chunks, longest lifespans first."""
    blocks = []
    # by how much flows drift apart down to each rank, and the residues of that, whatever the first rank's pattern
    ways = []
    for down in _offsets(ranks):
        drifts = [*accumulate((offset + 1 for offset in down), initial=0)]
        ways.append((down, drifts[-1], {drift % T for drift in drifts}))
    for f1, b1, b0 in permutations(range(1, T), 3):
        offsets = {(x - y) % T for x in (f1, b0) for y in (0, b1)}  # flows that come up, less those that go down
        middle = _turn(b1 - f1)
        for down, drift, residues in ways:
            first, last = _turn(f1 - drift), _turn(b0 - b1 - drift)
            spans = 2 * drift + first + middle + last + 1, middle + 1
            if sum(-(-span // T) for span in spans) - 1 <= most and offsets.isdisjoint(residues):
                blocks.append((-sum(spans), (f1, b1, b0), down, (first, middle, last)))
    for _, _, down, (first, middle, last) in sorted(blocks):
        up = [1] * (ranks - 1)
        yield BuildingBlock.of_chain(
            v_shape(ranks), T, forward=[*down, first, *up], turn=middle, backward=[*down, last, *up]
        )


def _offsets(ranks: int) -> set[tuple[int, ...]]:
    """Return every δ⁰ from each rank to the next: one value above rank K, another one below."""
    pairs = [*product(range(1, _LARGEST + 1), repeat=2)]
    return {(first,) * k + (second,) * (ranks - 1 - k) for k in range(ranks) for first, second in pairs}


def _turn(cells: int) -> int:
    # a flow turns after one cell at least; later by whole periods would only hold more
    return (cells - 1) % T + 1


def cells_with_ends(block: BuildingBlock, problem: Problem) -> dict[int, int] | None:
    """Return the cell of each action, by code; None if the rule for the warm-up doesn't fit the block.

    With fewer than 2p microbatches the warm-up is that of 2p, and the rest is left out.
    """
    p, m, n = problem.num_ranks, problem.num_microbatches, problem.num_replicas
    one = (1.0,) * n
    unit = replace(problem.without_transfers(), num_microbatches=max(m, 2 * p), f_s=one, b_s=one, w_s=one)
    most = min(2 * p, round(max(block.steady_peaks())))
    times = Retimer(unit).times([_warm_up(unit, r, row, most) for r, row in enumerate(repeat(block, unit))])
    if times.deadlocked:
        return None
    cells = {
        problem.code(op, s, i): round(times.start_s[unit.code(op, s, i)])
        for op in (F, B, W)
        for s in range(n)
        for i in range(m)
    }
    # the last F turns at rank 0; from there the last B's are counted, two cells apart
    turn, up = cells[problem.code(F, n - 1, m - 1)], min((most + 1) // 2, m)
    for r in range(p):
        down = min(most - up, r + 1, m)
        last = [(problem.code(B, r, m - 1 - k), turn - r + 2 * p - 2 * k) for k in range(up)]
        last += [(problem.code(B, n - 1 - r, m - 1 - k), turn + 1 + r - 2 * k) for k in range(down)]
        cells.update(last)
        forward, backward, weight = (
            [problem.code(op, s, i) for s in (r, n - 1 - r) for i in range(m)] for op in (F, B, W)
        )
        occupied, place = {cells[code] for code in (*forward, *backward)}, -1
        w_cells = [*sorted(cells[code] for code in weight)[: 2 * m - len(last)], *[0] * len(last)]
        # W's in the order of their B's, each no earlier than the cell that the squeezed order had for it
        for earliest, code in zip(w_cells, sorted(backward, key=lambda code: (cells[code], code)), strict=True):
            place = max(cells[code] + 1, place + 1, earliest)
            while place in occupied:
                place += 1
            cells[code + n * m] = place
    return cells


def _warm_up(problem: Problem, rank: int, row: Sequence[int], most: int) -> list[int]:
    """Return ``row`` with all that stands before its first B of the first chunk in the order of the rule."""
    p, flow = problem.num_ranks, problem.num_ranks * problem.num_microbatches
    first = next(at for at, code in enumerate(row) if code // flow == 2)
    down, up, backward, weight = ([c for c in row[:first] if c // flow == which] for which in (0, 1, 3, 5))
    returning = min(rank + 1, most // 2)
    ahead = down[: min(2 * (p - 1 - rank), most - returning)]
    turns = down[len(ahead) : min(len(ahead) + rank + 1, most - returning)]
    rest = up[returning:] + down[len(ahead) + len(turns) :]
    return [*ahead, *_in_turn(turns, up[:returning]), *_in_turn(backward, weight, rest), *row[first:]]


def _in_turn(*queues: Sequence[int]) -> list[int]:
    return [code for codes in zip_longest(*queues) for code in codes if code is not None]
