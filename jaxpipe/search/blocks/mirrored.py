"""Steady states of a V with stages that are nearly equal, found rank by rank by a beam search.

A V read backwards in time is a V: chunk 1's B's go down the ranks as chunk 0's F's do, and chunk 0's B's come up as chunk 1's
F's do. Where all stages are alike, a block that repeats, a cycle, may be its own mirror image: the B of a chunk is the F of
the same chunk mirrored at one instant. Then g microbatches in a period are 2 g numbers a rank, the residues modulo the period
at which F's of chunk 0 and 1 start, and the next rank has them a step and a wait later and earlier. So a cycle is a path over
the ranks

* from the turn at rank 0, where the last chunk's F meets its own mirror image and B follows at once,
* by waits of a few cells, so that F's and B's do not overlap and the gaps between them have room for W's,
* to the turn at rank p - 1, where chunk 1's F follows chunk 0's at once.

By how much a stream of chunk 0 lags behind one of chunk 1 shrinks by two steps and both waits a rank and is given modulo the
period, so what all waits of a microbatch add up to is known at rank 0. With it, so is what each rank holds on average: a wait
of chunk 0 counts on its own rank and those before it, one of chunk 1 on all and twice behind it. A path whose ranks hold more
than the limit ends. Of the others those that hold little and whose waits are spread over the ranks are followed, so many a
rank.

The grid is coarse, for only the order is kept (:mod:`~jaxpipe.search.list_schedule.fillers` finishes it). With Table 5's
costs of `controllable-memory.txt` F and B take 4 cells, W 3. There 2 microbatches in 44 cells have no idle time at all at
p = 16 and 32 with p / 2 activations, and 3 in 68 idle 3% at p = 8; CP-SAT took a minute for the latter
(`scripts/results/solver.md`).
Source: building blocks, `controllable-memory.txt` section 2; the symmetry and the search are ours.

Not modelled: stages that differ, links that are busy, waits at the turns, workspace.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from itertools import chain, combinations, count, islice
from math import ceil, inf
from statistics import fmean
from typing import Any

import numpy as np

from jaxpipe.schedule.placement import v_shape
from jaxpipe.schedule.problem import B, F, Problem, W
from jaxpipe.search.blocks.block import BuildingBlock, repeat
from jaxpipe.search.budget import Budget
from jaxpipe.search.list_schedule.fillers import ORDERS_UNTIL_STABLE, GapFiller, score
from jaxpipe.search.retime import Draft

Array = Any
"""Whole numbers, a row a path of the beam."""
_CELLS = 6
"""An F or B is at most so many cells; waits are up to two of them."""
_ALIKE = 1.08
"""The largest of a kind of duration ÷ the smallest, up to which stages count as equal: a cycle is one of their means, and its
order is timed with each stage's own. Measured costs of equal layers differ by 1 to 2%."""
_UNEVEN = 0.03  # that the sizes of actions may differ from whole cells
_WORD = 64
_MOST = 100_000  # rows that are looked at together: bounds memory, not tuned
_CELLS_PER_S, _ROWS_PER_S, _ACTIONS_PER_S = 100_000, 8_000_000, 150_000
"""Cells that a beam is prepared for, rows that are looked at, actions that are finished in a second of the development machine,
roughly."""
_STRETCH = 1.35  # periods that are tried, × the work, at most; the best known at 3p/8 need 1.11
_BEYOND = 1.03  # × the shortest period that was found: some longer ones have shorter ramps
_HOPELESS = 4  # times that all kinds are tried before there is any cycle
_PATHS = 6  # of a beam that become cycles; they and their rotations become orders
_LEAST_S, _FINISHING = 0.5, 0.2
"""Seconds for a beam at least, and the part of the time for finishing the orders of one kind of cycle."""
_PROMISING = 1.03  # × the best finished order is an order that is finished: it gains 1 to 2%


@dataclass(frozen=True, slots=True)
class _Round:
    """A try of all kinds of cycle: ``microbatches`` in a period at most, ``width`` paths followed, ``share`` of the time for a
    beam."""

    microbatches: int
    width: int
    share: float


# narrow first, so that every kind is looked at soon; then the last two in turn. Odd rounds have any waits, even ones those that
# F's and W's take.
_ROUNDS = (_Round(3, 300, 0.04), _Round(2, 1500, 0.2), _Round(4, 1500, 0.2), _Round(3, 1500, 0.2))
# None of these numbers was tuned beyond the cases of scripts/results/solver.md.


@dataclass(frozen=True, slots=True)
class Lattice:
    """A V of ``ranks`` ranks in whole cells: ``size`` of an op, ``step`` from an F's start to that on the next rank at least,
    ``turn`` to that of the next chunk on the same rank. In units of memory: ``held`` from F's start to B's end, ``kept`` from
    there to W's end, ``limit``."""

    ranks: int
    size: tuple[int, int, int]
    step: int
    turn: int
    held: float
    kept: float
    limit: float

    @classmethod
    def of(cls, problem: Problem, limit: float) -> Lattice | None:
        """Return the lattice of ``problem``; None if it is no V, its stages differ by more than :data:`_ALIKE`, or nothing
        takes time or memory."""
        p, down, up = problem.num_ranks, problem.down_s, problem.up_s
        seconds = (problem.f_s, problem.b_s, problem.w_s)
        crossings = (*down[: p - 1], *down[p:-1], *up[1:p], *up[p + 1 :])
        if p < 3 or not problem.placement.is_v:
            return None
        if not all(max(row) <= _ALIKE * min(row) for row in (*seconds, problem.held, problem.kept, crossings)):
            return None
        f, b, w = map(fmean, seconds)
        if max(f, b) <= 0 or max(problem.held) <= 0:
            return None
        cell = _cell(f, b, w)
        size = max(1, round(f / cell)), max(1, round(b / cell)), max(1, round(w / cell))
        turn = max(size[:2])
        return cls(
            p, size, turn + ceil(fmean(crossings) / cell - 0.25), turn, max(problem.held), max(problem.kept), limit
        )

    @property
    def work(self) -> int:
        """Return the cells of one microbatch on a rank."""
        return 2 * sum(self.size)

    def least(self, g: int) -> float:
        """Return the memory × cells that g microbatches take on a rank without waits."""
        f, b, w = self.size
        lives = 2 * (f + b) + 2 * ((2 * self.ranks - 2) * self.step + self.turn)
        return g * (self.held * lives + self.kept * 2 * w)


def _cell(f: float, b: float, w: float) -> float:
    """Return the seconds of the coarsest cell of which all three are nearly multiples, or of the best of those that are
    tried."""
    tried = []
    for parts in range(1, _CELLS + 1):
        cell = max(f, b) / parts
        tried.append((max(abs(max(1, round(x / cell)) * cell - x) / max(f, b) for x in (f, b, w)), cell))
        if tried[-1][0] <= _UNEVEN:
            return tried[-1][1]
    return min(tried)[1]


class Beam:
    """The search for a mirrored cycle of ``g`` microbatches in ``period`` cells that holds no more than the lattice's limit on
    average. ``width``: paths that are followed. ``waits``: cells that may be waited from rank to rank.

    ``mirror``: B of an F that starts at s starts at ``mirror`` - s, modulo the period.
    """

    def __init__(
        self,
        lattice: Lattice,
        g: int,
        period: int,
        mirror: int,
        *,
        width: int,
        waits: Sequence[int],
        seed: int,
        budget: Budget,
    ) -> None:
        self.lattice, self.g, self.period, self.mirror = lattice, g, period, mirror
        self.width, self.random, self.budget = width, np.random.default_rng(seed), budget
        self.waits = [(one, two) for one in waits for two in waits]
        self.room = (lattice.limit * period - lattice.least(g)) / 2  # for waits
        self.cells, self.free = self._cells()
        budget.spent += self.cells.size / _CELLS_PER_S

    def _cells(self) -> tuple[Array, Array]:
        """Return which cells an F that starts at s and its mirror image take, a bit each; and whether they don't overlap."""
        f, b, _ = self.lattice.size
        words = np.zeros((self.period, -(-self.period // _WORD)), np.uint64)
        free = np.ones(self.period, bool)
        for s in range(self.period):
            occupied = [(s + i) % self.period for i in range(f)]
            occupied += [(self.mirror - s + i) % self.period for i in range(b)]
            free[s] = len(set(occupied)) == f + b
            for cell in occupied:
                words[s, cell // _WORD] |= np.uint64(1 << cell % _WORD)
        return words, free

    def paths(self, most: int) -> Iterator[list[Array]]:
        """Yield up to ``most`` paths, those that hold least first: for each rank and microbatch the starts of F of chunk 0
        and 1."""
        p, lattice = self.lattice.ranks, self.lattice
        now, left, area = self._start_on_first_rank()
        share, leaning = left, np.zeros(len(now), np.int64)  # waits of each microbatch in all
        layers: list[tuple[Array, Array]] = [(now, np.arange(len(now)))]
        for rank in range(1, p):
            if not len(now) or self.budget.left <= 0:
                return
            come, then, rest, leans = self._extend_to_next_rank(now, left, rank == p - 1)
            leans = leans + leaning[come]
            waited = self._cells_waited(then)
            held = lattice.least(self.g) + 2 * lattice.held * (share[come].sum(1) + leans) + lattice.kept * waited
            area_then = np.maximum(area[come], held)
            fits = (waited >= 0) & (area_then <= lattice.limit * self.period)
            # paths that spend their waits evenly over the ranks leave more ways to go on
            uneven = np.abs(rest - share[come] * ((p - 1 - rank) / (p - 1))).sum(1) * lattice.held
            # noise keeps paths of nearly equal score varied
            noise = self.random.random(len(come)) * (0.1 * self.period * lattice.held)
            best = self._best_rows(np.nonzero(fits)[0], then, rest, leans, area_then + uneven + noise)
            come, now, left, area, leaning = come[best], then[best], rest[best], area_then[best], leans[best]
            share = share[come]
            layers.append((now, come))
        for row in np.argsort(area, kind="stable")[:most]:
            path, at = [], row
            for rows, before in reversed(layers):
                path.append(rows[at])
                at = before[at]
            yield path[::-1]

    def _start_on_first_rank(self) -> tuple[Array, Array, Array]:
        """Return, for rank 0: starts [paths, g, 2], the waits of each microbatch over all ranks [paths, g], memory × cells
        [paths]."""
        p, lattice, g = self.lattice.ranks, self.lattice, self.g
        meet = self.mirror - lattice.size[F]  # the sum of starts of two F's whose B's follow each other's ends
        pairs = [(y, (meet - y) % self.period) for y in range(self.period)]
        fixpoints = [y for y, other in pairs if y == other]
        # F's of the last chunk are in pairs, or alone their own image, so that B's follow at once
        groups = [
            [*singles, *chain(*couples)]
            for singles in chain(*(combinations(fixpoints, n) for n in range(g % 2, min(g, len(fixpoints)) + 1, 2)))
            for couples in combinations([pair for pair in pairs if pair[0] < pair[1]], (g - len(singles)) // 2)
        ]
        last = np.array(groups, np.int64).reshape(-1, g)
        occupied = np.zeros((len(last), self.cells.shape[1]), np.uint64)
        for j in range(g):
            fits, both = self._fit_beside(occupied, last[:, j])
            last, occupied = last[fits], both[fits]
        starts, waits = np.zeros((len(last), 0), np.int64), np.zeros((len(last), 0), np.int64)
        behind = lattice.turn + 2 * lattice.step * (p - 1)
        offsets = np.arange(max(0, min(self.period, int(self.room / lattice.held) + 1)))
        for j in range(g):
            at = (last[:, j, None] - behind - offsets) % self.period
            fits, both = self._fit_beside(occupied[:, None], at)
            fits &= lattice.held * (waits.sum(1)[:, None] + offsets) <= self.room
            row, wait = np.nonzero(fits)
            self.budget.spent += fits.size / _ROWS_PER_S
            row, wait = self._sample_rows(row, wait)
            occupied, last = both[row, wait], last[row]
            starts = np.concatenate([starts[row], at[row, wait][:, None]], 1)
            waits = np.concatenate([waits[row], wait[:, None]], 1)
        now = np.stack([starts, last], 2)
        waited = self._cells_waited(now)
        area = lattice.least(g) + 2 * lattice.held * waits.sum(1) + lattice.kept * waited
        fits = np.nonzero((waited >= 0) & (area <= lattice.limit * self.period))[0]
        score = area + self.random.random(len(area)) * self.period * lattice.held
        best = fits[np.argsort(score[fits], kind="stable")][: 2 * self.width]
        return now[best], waits[best], area[best]

    def _sample_rows(self, *columns: Array) -> tuple[Array, ...]:
        """Return the same rows of all ``columns``, all or :data:`_MOST` by chance."""
        rows = len(columns[0])
        if rows <= _MOST:
            return columns
        sample = np.sort(self.random.choice(rows, _MOST, replace=False))
        return tuple(column[sample] for column in columns)

    def _fit_beside(self, occupied: Array, at: Array) -> tuple[Array, Array]:
        """Return whether F's and their images that start there have room beside what is taken, and all of these cells."""
        # a bit a cell: whether two sets of cells meet is one AND a word
        addition = self.cells[at]
        return self.free[at] & ((occupied & addition) == 0).all(-1), occupied | addition

    def _extend_to_next_rank(self, now: Array, left: Array, last: bool) -> tuple[Array, Array, Array, Array]:
        """Extend paths by a rank: return the row that each comes from, starts, waits that are left, and by how much those of
        chunk 1 are more than those of chunk 0."""
        come, step = np.arange(len(now)), self.lattice.step
        occupied = np.zeros((len(now), self.cells.shape[1]), np.uint64)
        then, rest = np.zeros((len(now), 0, 2), np.int64), np.zeros((len(now), 0), np.int64)
        leans = np.zeros(len(now), np.int64)
        for j in range(self.g):
            self.budget.spent += len(come) * len(self.waits) / _ROWS_PER_S
            parts = []
            for one, two in self.waits:
                still = left[come, j] - one - two
                # at the turn every wait must be spent
                row = np.nonzero(still == 0 if last else still >= 0)[0]
                at = (now[come[row], j] + (step + one, -step - two)) % self.period
                fits, both = self._fit_beside(occupied[row], at[:, 0])
                second_fits, both = self._fit_beside(both, at[:, 1])
                fits &= second_fits
                row = row[fits]
                parts.append((row, at[fits], both[fits], still[row], np.full(len(row), two - one)))
            row, at, both, still, lean = self._sample_rows(*(np.concatenate(x) for x in zip(*parts, strict=True)))
            come, occupied, leans = come[row], both, leans[row] + lean
            then = np.concatenate([then[row], at[:, None]], 1)
            rest = np.concatenate([rest[row], still[:, None]], 1)
        return come, then, rest, leans

    def _weights_in_gaps(self, starts: Array) -> tuple[Array, Array, Array, Array]:
        """F's and B's of a rank in the order of a period: where each ends and whether it is a B [paths, 4 g], how many W's run
        in the gap behind it; and how many W's wait when a period begins [paths]. W's take the first gap that is left, those
        first that have waited longest."""
        f, b, w = self.lattice.size
        ahead = starts.reshape(len(starts), 2 * self.g)
        blocks = np.sort(np.concatenate([ahead * 2, (self.mirror - ahead) % self.period * 2 + 1], 1), 1)
        at, back = blocks >> 1, blocks & 1
        end = at + np.where(back, b, f)
        slots = (np.concatenate([at[:, 1:], at[:, :1] + self.period], 1) - end) // w
        queue, served = np.zeros(len(starts), np.int64), np.zeros_like(slots)
        for _ in range(2):  # the first to know what waits when a period begins
            waiting = queue
            for i in range(blocks.shape[1]):
                queue = queue + back[:, i]
                served[:, i] = np.minimum(queue, slots[:, i])
                queue = queue - served[:, i]
        return end, back, served, waiting

    def _cells_waited(self, starts: Array) -> Array:
        """Return the cells that W's wait, all together; -1 where there are too few gaps."""
        end, back, served, waiting = self._weights_in_gaps(starts)
        waited = (served * end + self.lattice.size[W] * (served * (served - 1) // 2) - back * end).sum(1)
        return np.where(served.sum(1) == 2 * self.g, waited + waiting * self.period, -1)

    def _best_rows(self, rows: Array, starts: Array, rest: Array, leans: Array, score: Array) -> Array:
        """Return the ``width`` rows of least score, of those with the same starts and waits left that lean about as much
        one."""
        rows = rows[np.argsort(score[rows], kind="stable")][: 8 * self.width]
        same = np.concatenate([starts[rows].reshape(len(rows), 2 * self.g), rest[rows], leans[rows, None] // 4], 1)
        _, first = np.unique(same, axis=0, return_index=True)
        return rows[np.sort(first)][: self.width]

    def block(self, path: Sequence[Array]) -> BuildingBlock:
        """Return the building block of a path: whole times from residues, with W's in the gaps."""
        f, p, g = self.lattice.size[F], self.lattice.ranks, self.g
        last, step, turn = 2 * p - 1, self.lattice.step, self.lattice.turn
        start: dict[tuple[int, int, int], int] = {}  # by op, microbatch, stage
        for j in range(g):  # from the end back
            at = int(path[0][j, 1])
            start[F, j, last] = at
            for k in reversed(range(last)):
                least = turn if k == p - 1 else step
                residue = int(path[k][j, 0] if k < p else path[last - k][j, 1])
                # the latest start with that residue from which the result arrives in time
                at -= least + (at - least - residue) % self.period
                start[F, j, k] = at
        whose = {int(path[0][j, 1]): j for j in range(g)}
        for j in range(g):
            image = whose[(self.mirror - f - int(path[0][j, 1])) % self.period]
            for k in range(last + 1):
                start[B, j, k] = start[F, j, last] + f + start[F, image, last] - start[F, image, k]
        for rank in range(p):
            self._place_weights(start, (rank, last - rank), path[rank])
        order = sorted(range(g), key=lambda j: start[F, j, 0] % self.period)
        forward, backward, weight = (
            tuple(
                tuple(start[op, j, k] - start[F, j, 0] // self.period * self.period for k in range(last + 1))
                for j in order
            )
            for op in (F, B, W)
        )
        return BuildingBlock(v_shape(p), self.period, forward, backward, weight)

    def _place_weights(self, start: dict[tuple[int, int, int], int], replicas: Sequence[int], starts: Array) -> None:
        """Place the W's of a rank, whose F's are at ``starts``."""
        end, _, served, waiting = (x[0].tolist() for x in self._weights_in_gaps(starts[None]))
        cells = [at + self.lattice.size[W] * k for at, length in zip(end, served, strict=True) for k in range(length)]
        ordered = sorted((start[B, j, k] % self.period, j, k) for j in range(self.g) for k in replicas)
        for n, (at, j, k) in enumerate(ordered, waiting):
            start[W, j, k] = start[B, j, k] - at + cells[n % len(cells)] + n // len(cells) * self.period


def mirrored_cycles(
    problem: Problem, limits: Sequence[float], part: int, parts: int, budget: Budget, seed: int
) -> Iterator[tuple[Draft, str]]:
    """Yield orders from mirrored cycles, every ``parts``-th kind from ``part`` on: short periods first, until there is a
    cycle; then all up to a little more, again and again with wider beams, other seeds and another part, until the budget
    ends."""
    limit, gap_filler = min(limits), GapFiller(problem)
    lattice = Lattice.of(problem, limit) if limit < inf else None
    if lattice is None:
        return
    actions, turn, w = 3 * problem.num_microbatches * problem.num_replicas, lattice.turn, lattice.size[W]
    finished_s, best = ORDERS_UNTIL_STABLE * actions / _ACTIONS_PER_S, inf
    kinds = sorted(
        (period / g, g, period)
        for g in range(1, min(max(x.microbatches for x in _ROUNDS), problem.num_microbatches - 1) + 1)
        for period in range(g * lattice.work, int(g * lattice.work * _STRETCH) + 1)
    )
    longest, tried = inf, set[tuple[float, float, float]]()
    for again in count():
        if not kinds or (longest == inf and again == _HOPELESS):
            return
        waits = range(2 * turn + 1) if again % 2 else sorted({0, w, turn, turn + w, 2 * turn})
        effort = _ROUNDS[min(again, 2 + again % 2)]
        for share, g, period in islice(kinds, (part + again) % parts, None, parts):
            if share > longest * _BEYOND:
                break
            if budget.left <= 0:
                return
            rows_by_key: dict[tuple[float, float, float], list[list[int]]] = {}
            for block in (
                _blocks(lattice, g, period, waits, effort, seed + again, budget) if g <= effort.microbatches else ()
            ):
                longest = min(longest, share)
                for first in range(g):
                    # without its first microbatches a cycle starts elsewhere, and has other ramps
                    rows = repeat(block, problem, [-1] * first + [*range(problem.num_microbatches)])
                    budget.spent += actions / _ACTIONS_PER_S
                    draft = gap_filler.retimer.draft(rows)
                    # orders with the same times and peak are taken for one, which is finished once
                    if draft is not None and (key := (*score(draft), draft.span)) not in tried:
                        rows_by_key[key] = rows
            tried |= rows_by_key.keys()
            for key in nsmallest(max(again > 0, int(budget.seconds * _FINISHING / finished_s)), rows_by_key):
                if budget.left <= 0 or key[0] > best * _PROMISING:
                    break
                budget.spent += finished_s
                for draft in gap_filler.improve_until_stable(rows_by_key[key], limit):
                    best = min(best, score(draft)[0])
                    yield draft, f"mirrored cycle of {g}"
            if rows_by_key and again == 0:
                break


def _blocks(
    lattice: Lattice, g: int, period: int, waits: Sequence[int], effort: _Round, seed: int, budget: Budget
) -> Iterator[BuildingBlock]:
    """Yield blocks of one kind, mirrored at a cell and between two. What a beam may look at is the same on a busy machine."""
    for mirror in range(2 - period % 2):
        spend = Budget(min(budget.left, max(_LEAST_S, budget.seconds * effort.share)), reproducible=True)
        beam = Beam(lattice, g, period, mirror, width=effort.width, waits=waits, seed=seed, budget=spend)
        yield from [*map(beam.block, beam.paths(_PATHS))]
        budget.spent += spend.spent
