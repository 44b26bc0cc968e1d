"""A building block: the cells that one group of microbatches takes, which a pipeline repeats every T cells.

Source: `controllable-memory.txt` section 2. A cell is one unit of time of a grid on which F, B and W each take one; real
costs come in later, when the repeated order is squeezed. A block says at which cell every action of its microbatches starts;
which rank it runs on is the placement's. Repeating is legal if no two actions meet on a rank, which residues modulo T decide
(:meth:`BuildingBlock.collisions`). Lifespans decide the memory (:meth:`BuildingBlock.steady_peaks`).

Not modelled: actions longer than a cell, except a fused BW, which takes two. Cells are not checked against the data flow:
rows of a block that runs against it deadlock, which the retimer finds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from jaxpipe.schedule.placement import Placement

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
        """B and W run as one BW."""
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
