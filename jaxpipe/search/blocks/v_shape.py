"""The building blocks on the V placement that the adaptive search looks at.

Source: `controllable-memory.txt` section 3.1 and appendix A. Four flows cross the ranks: F of the first chunk and B of the
second go down (from rank 0 to rank p−1) with offset δ⁰ from rank to rank, F of the second chunk and B of the first go up with
offset δ¹. Lifespans, and so memory, are then balanced over the ranks. Where flows turn (at the ends of the V) the offset is the
shortest one that the pattern of the first rank leaves: at most T = 6, one cell for each of F, B, W of both chunks.

As in the authors' code δ¹ is 1, and δ⁰ takes one value down to some rank K and a smaller one from there. Blocks with δ¹ up to 3
and rising δ⁰ were tried; they improved none of the 440 cells of `tests/golden/authors_v.json`.

Warm-up and cool-down of a V schedule, laid out by rule on the grid of cells instead of moved action by action.

Source: `controllable-memory.txt` appendix C, figure 11, and what the authors' adaptive scheduler makes of it. With a peak of k
chunks the best ends of a V schedule are known in advance, whatever the block in between:

* *warm-up*, all that a rank runs before its first B of the first chunk: rank r sends F of the first chunk down while none can
  come back (2(p − 1 − r) cells), then runs F of both chunks in turn, at most k together; then B, W and F in turn;
* *cool-down*: the last B of both chunks run two cells apart, so that those going down and those coming up pass each other
  without waiting.

The result is an order of F and B; where W goes, :mod:`~jaxpipe.search.list_schedule.weights` decides by real costs. Without
these rules the adaptive search is behind the authors' in 31 of 49 cells of `tests/golden/authors_v.json`, by up to 6%.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, permutations, zip_longest

from jaxpipe.schedule.placement import v_shape
from jaxpipe.schedule.problem import B, F, Problem, W
from jaxpipe.search.blocks.block import BuildingBlock
from jaxpipe.search.blocks.repeat import repeat
from jaxpipe.search.retime import Retimer

T = 6
_LARGEST = 5


def searched(ranks: int, most: float) -> Iterator[BuildingBlock]:
    """Yield the blocks that don't collide and whose first rank may live with ``most`` chunks, longest lifespans first."""
    blocks = []
    for f1, b1, b0 in permutations(range(1, T), 3):
        offsets = {(x - y) % T for x in (f1, b0) for y in (0, b1)}  # flows that come up, less those that go down
        middle = _turn(b1 - f1)
        for down in _offsets(ranks):
            drifts = list(accumulate(down, lambda drift, offset: drift + offset + 1, initial=0))
            first, last = _turn(f1 - drifts[-1]), _turn(b0 - b1 - drifts[-1])
            spans = 2 * drifts[-1] + first + middle + last + 1, middle + 1
            if sum(-(-span // T) for span in spans) - 1 <= most and all(drift % T not in offsets for drift in drifts):
                blocks.append((-sum(spans), (f1, b1, b0), down, (first, middle, last)))
    for _, _, down, (first, middle, last) in sorted(blocks):
        up = [1] * (ranks - 1)
        yield BuildingBlock.of_chain(
            v_shape(ranks), T, forward=[*down, first, *up], turn=middle, backward=[*down, last, *up]
        )


def _offsets(ranks: int) -> Iterator[tuple[int, ...]]:
    """Yield every δ⁰ from each rank to the next: one value above rank K, a smaller one below."""
    if ranks == 1:
        yield ()
    for first in range(1, _LARGEST + 1):
        for k in range(1, ranks):
            for second in range(1, _LARGEST + 1) if k < ranks - 1 else (first,):
                # one value for all ranks is what the last k stands for
                if k < ranks - 1 and second == first:
                    continue
                yield (first,) * k + (second,) * (ranks - 1 - k)


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
