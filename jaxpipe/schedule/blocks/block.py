"""A building block: the cells that one group of microbatches takes, which a pipeline repeats every T cells.

Source: `controllable-memory.txt` section 2. A cell is one unit of time of a grid on which F, B and W each take one; real
costs come in later, when the repeated order is squeezed. A block says at which cell every pass of its microbatches starts;
which rank it runs on is the placement's. Repeating is legal if no two passes meet on a rank, which residues modulo T decide
(:meth:`BuildingBlock.collisions`). Lifespans decide the memory (equation 1, :meth:`BuildingBlock.predicted_peaks`).

Not modelled: passes longer than a cell, except a fused BW, which takes two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from jaxpipe.errors import ScheduleError
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

    Raises:
        ScheduleError: shapes that don't fit the placement, an interval below 1, or cells that run against the data flow.
    """

    placement: Placement
    interval: int
    forward: Cells
    backward: Cells
    weight: Cells = ()
    group: int = 0
    group_interval: int = 0

    def __post_init__(self) -> None:
        n, stages = len(self.forward), self.placement.num_stages
        problems = []
        for name, cells in (("forward", self.forward), ("backward", self.backward), ("weight", self.weight)):
            if (cells or name != "weight") and (len(cells) != n or any(len(row) != stages for row in cells)):
                problems.append(f"{name} needs {stages} cells for each of {n} microbatches")
        if not n or n % self.placement.num_flows:
            problems.append(
                f"{n} microbatches in a block; want a multiple of the placement's {self.placement.num_flows} flows"
            )
        if self.interval < 1:
            problems.append(f"interval is {self.interval}; want at least 1")
        if self.group < 0 or (self.group > 0 and self.group_interval < 1):
            problems.append(
                f"groups of {self.group} every {self.group_interval} cells; want at least 1, or group=0 for none"
            )
        problems = problems or list(self._against_the_flow())
        if problems:
            raise ScheduleError("building block: " + "; ".join(problems), problems)

    def _against_the_flow(self) -> list[str]:
        found = []
        for j in range(len(self.forward)):
            f, b = self.forward[j], self.backward[j]
            w = self.weight[j] if self.weight else b
            back = 1 if self.weight else 2
            for s in range(self.placement.num_stages):
                late = [f"F{t}" for t in self.placement.predecessors(s) if f[t] + 1 > f[s]]
                late += [f"B{t}" for t in self.placement.successors(s) if b[t] + back > b[s]]
                if late:
                    found.append(f"stage {s} of microbatch {j} starts before {late[0]} has ended")
                if f[s] + 1 > b[s] or (self.weight and b[s] + 1 > w[s]):
                    found.append(
                        f"stage {s} of microbatch {j} does not run F, B, W in this order: {f[s]}, {b[s]}, {w[s]}"
                    )
        return found

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
        """The block of one microbatch with these offsets along the chain, and W greedily in the cells that F and B leave.

        ``forward[s]``: cells from F of stage s to F of stage s+1. ``turn``: from the last stage's F to its B.
        ``backward[k]``: from the k-th B to the next, in the order they run (last stage first). ``fused``: BW instead of B, W.
        Meant for blocks whose F and B don't collide; if they do, W stands directly after B.
        """
        f = tuple(accumulate(forward, initial=0))
        b = tuple(accumulate(backward, initial=f[-1] + turn))[::-1]
        if fused:
            return cls(placement, interval, (f,), (b,))
        return with_weight_gradients(cls(placement, interval, (f,), (b,), (tuple(c + 1 for c in b),)))

    @property
    def num_microbatches(self) -> int:
        return len(self.forward)

    @property
    def fused(self) -> bool:
        """B and W run as one BW."""
        return not self.weight

    @property
    def period(self) -> int:
        """Cells after which the repeated pattern comes again: T, or a group's interval."""
        return self.group_interval if self.group else self.interval

    def start(self, k: int) -> int:
        """The cell at which the k-th block of the pipeline starts."""
        if not self.group:
            return k * self.interval
        return k // self.group * self.group_interval + k % self.group * self.interval

    def rank(self, stage: int, microbatch: int) -> int:
        """The rank that runs ``stage`` for the block's microbatch."""
        return self.placement.ranks(stage, microbatch)[0]

    def passes(self) -> list[tuple[int, str, int, int, int]]:
        """(rank, op, stage, microbatch of the block, cell) of each cell taken; a BW takes two, called B and W."""
        found = []
        for j in range(self.num_microbatches):
            weight = self.weight[j] if self.weight else tuple(c + 1 for c in self.backward[j])
            for op, cells in (("F", self.forward[j]), ("B", self.backward[j]), ("W", weight)):
                found += [(self.rank(s, j), op, s, j, cell) for s, cell in enumerate(cells)]
        return found

    def collisions(self) -> list[str]:
        """What meets on a rank when the block repeats, in words; empty for a legal block."""
        taken: dict[tuple[int, int], str] = {}
        found = []
        for rank, op, s, j, cell in self.passes():
            name = f"{op}{s}" + (f" of microbatch {j}" if self.num_microbatches > 1 else "")
            for k in range(max(1, self.group)):
                key = rank, (cell + self.start(k)) % self.period
                if key in taken:
                    found.append(f"rank {rank}: {taken[key]} and {name} meet at cell {key[1]} modulo {self.period}")
                taken[key] = name
        return found

    def require_no_collision(self) -> BuildingBlock:
        """This block.

        Raises:
            ScheduleError: it collides; names rank, passes and residue.
        """
        found = self.collisions()
        if found:
            raise ScheduleError(
                f"the building block cannot repeat every {self.period} cells: {'; '.join(found[:3])}"
                + (f" and {len(found) - 3} more" if len(found) > 3 else "")
                + "; change an offset or take a longer interval",
                found,
            )
        return self

    def lifespans(self) -> Cells:
        """``[j][s]``: cells from the start of F to the end of W (or BW): how long the activation lives (section 2.2)."""
        ends = self.weight or tuple(tuple(c + 1 for c in row) for row in self.backward)
        return tuple(
            tuple(end + 1 - f for f, end in zip(first, last, strict=True))
            for first, last in zip(self.forward, ends, strict=True)
        )

    def predicted_peaks(self, weights: Sequence[float] | None = None) -> tuple[float, ...]:
        """Equation 1: per rank, Σ ⌈lifespan / T⌉ × activation over its stages; no repeat holds more on the grid.

        ``weights[s]``: activation of stage s (default 1 each: chunks). For groups the sum counts, at the cell where most live,
        what overlaps.
        """
        if self.group:
            return self.steady_peaks(weights)
        peaks = [0.0] * self.placement.num_ranks
        for j, spans in enumerate(self.lifespans()):
            for s, span in enumerate(spans):
                peaks[self.rank(s, j)] += -(-span // self.interval) * (weights[s] if weights else 1.0)
        return tuple(peaks)

    def steady_peaks(self, weights: Sequence[float] | None = None) -> tuple[float, ...]:
        """Per rank, the most that lives at one cell of the steady phase: at most equation 1, whose maxima may not coincide."""
        live = [[0.0] * self.period for _ in range(self.placement.num_ranks)]
        for j, spans in enumerate(self.lifespans()):
            for s, span in enumerate(spans):
                full, part = divmod(span, self.period)
                weight = weights[s] if weights else 1.0
                cells = live[self.rank(s, j)]
                for k in range(max(1, self.group)):
                    first = self.forward[j][s] + self.start(k)
                    for c in range(self.period):
                        cells[c] += full * weight
                    for c in range(part):
                        cells[(first + c) % self.period] += weight
        return tuple(max(cells) for cells in live)

    def __str__(self) -> str:
        """A picture: a row per rank, a cell per column; chunks of a rank are told apart by case (``F f``), then by number."""
        width = 1 + max(cell for *_, cell in self.passes())
        rows = [["·"] * width for _ in range(self.placement.num_ranks)]
        for rank, op, s, j, cell in self.passes():
            chunk = self.placement.stages_of(rank).index(s)
            mark = (op, op.lower())[chunk] if chunk < 2 and self.num_microbatches == 1 else f"{op}{s}.{j}"
            rows[rank][cell] = mark
        wide = max(len(mark) for row in rows for mark in row)
        digits = len(str(len(rows) - 1))
        lines = [f"rank {r:<{digits}} |" + "".join(f"{mark:<{wide}}" for mark in row) for r, row in enumerate(rows)]
        return "\n".join(line.rstrip() for line in lines)


def with_weight_gradients(block: BuildingBlock) -> BuildingBlock:
    """The block of split B and W: each W at the first cell after its B whose residue F, B and earlier W leave free.

    Ws are placed in the order of their Bs. Where no residue is free, W stands directly after B (the block then collides).
    """
    period = block.period
    copies = range(max(1, block.group))
    taken = {
        (rank, (cell + block.start(k)) % period) for rank, op, _, _, cell in block.passes() for k in copies if op != "W"
    }
    weight = [[c + 1 for c in row] for row in block.backward]
    order = sorted((c, j, s) for j, row in enumerate(block.backward) for s, c in enumerate(row))
    for b, j, s in order:
        rank = block.rank(s, j)
        for cell in range(b + 1, b + 1 + period):
            wanted = {(rank, (cell + block.start(k)) % period) for k in copies}
            if not wanted & taken:
                taken |= wanted
                weight[j][s] = cell
                break
    return BuildingBlock(
        block.placement,
        block.interval,
        block.forward,
        block.backward,
        tuple(map(tuple, weight)),
        block.group,
        block.group_interval,
    )
