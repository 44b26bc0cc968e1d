"""Interleaved 1F1B: each rank runs v chunks, stages dealt round-robin, so the pipeline fills v times faster.

Source: Narayanan et al. 2021 (Megatron-LM, section 2.2.2); `controllable-memory.txt` appendix H, figure 15a (the official,
non-uniform repeat). Microbatches go through in groups of p: a rank runs a group on its first chunk, then on its second, …

Megatron asks for m divisible by p. Here any m works: the schedule is that of the next multiple of p with the missing
microbatches left out. Leaving out whole microbatches keeps every dependency satisfied, so it can't deadlock and is never slower
than the full multiple. Which to leave out is tried with real costs: the start of the first group, the end of the last, or one
or more of every group (shorter groups bring the first backwards forward; up to 4% measured).

With less memory: the same bubble with p − 1 chunks less.
Source: `controllable-memory.txt` appendix I, figure 16c ("a variation of interleaved 1F1B with the same bubble rate but lower
memory"). The figure is lost in the text that this was made from; the block here is reconstructed from that sentence and may
differ from the drawn one. Time goes in turns of three cells, F then BW. F of chunk c runs in turn cp of rank 0 and moves on
one cell per rank, so it comes round just before the next chunk's turn. BW of the last chunk follows its F on the last rank
at once and comes up two cells per rank, that is, one turn per rank later and one cell earlier within the turn, as F moves:
F keeps the first cell of a rank's turns, BW the other two, and nothing ever meets. Chunks of B are p turns apart as well.

A rank holds vp chunks at most, p shares, where interleaved 1F1B holds (v + 1)p − 1 chunks. Less is not possible at this
makespan: with one chunk less every schedule is 3 cells longer (:func:`~jaxpipe.search.bounds.lower_bound`; a test).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import count, zip_longest

from jaxpipe.schedule.costs import CostProfile
from jaxpipe.schedule.families.family import family
from jaxpipe.schedule.ir import Schedule
from jaxpipe.schedule.placement import circular
from jaxpipe.schedule.problem import BW, CodeRows, F, Problem
from jaxpipe.search.blocks import BuildingBlock, repeat
from jaxpipe.search.families.gis import interleaved_block
from jaxpipe.search.list_schedule.fillers import improved
from jaxpipe.search.retime import Retimer, best_of


@family(
    "interleaved-1f1b",
    "1F1B over v chunks per rank (--chunks, default 2): the bubble divided by v, more activations",
    "Narayanan et al. 2021 (Megatron-LM) §2.2.2; controllable-memory.txt appendix H",
    placement=circular,
    peak_activations=lambda p, m, v: min((v + 1) * p - 1, v * m) / v if m % p == 0 else None,
    makespan=lambda p, m, v, f, b, w: (m + (p - 1) / v) * (f + b + w) if m % p == 0 else None,
    picture={"ranks": 2, "microbatches": 4, "chunks": 2},
)
def interleaved_one_f_one_b(
    ranks: int, microbatches: int, chunks: int = 2, costs: CostProfile | None = None
) -> Schedule:
    """Interleaved 1F1B for any ``ranks`` p, ``microbatches`` m and ``chunks`` v per rank, all >= 1::

        rank 0 |F0- F1- F0b F1b F2-     BW0b--- F3- BW1b--- F2b BW0---- F3b BW1----     BW2b---     BW3b--- BW2---- BW3----
        rank 1 |    F0- F1- F0b BW0b--- F1b BW1b--- F2- BW0---- F3- BW1---- F2b BW2b--- F3b BW3b--- BW2---- BW3----

    (``b`` marks the second chunk of a rank.) With m a multiple of p, equal stages and no transfer time the makespan is
    m(F + B + W) + (p − 1)(F + B + W)/v; a rank holds at most (v + 1)p − 1 chunks of activations, 1/v of its share each.
    One chunk gives eager 1F1B. ``costs`` (one entry per stage, p·v) only decide how a remainder of m is spread.

    Raises:
        ScheduleError: a size is not a whole number of at least 1, or the costs are for another number of stages.
    """
    problem = Problem.of(circular(ranks, chunks), microbatches, costs)
    orders = [[_row(problem, r, chunks, places) for r in range(ranks)] for places in slots(microbatches, ranks, chunks)]
    return problem.schedule("interleaved-1f1b", best_order(problem, orders))


def low_memory_block(ranks: int, chunks: int) -> BuildingBlock:
    """Return the block of one microbatch; groups of p, one turn apart within a group."""
    return interleaved_block(ranks, range(0, chunks * ranks, ranks), group=ranks, fused=True)


@family(
    "interleaved-low-memory",
    "interleaved 1F1B's bubble at 1F1B's memory, v chunks per rank (--chunks, default 2)",
    "Controllable Memory (Qi, Wan et al. 2024) appendix I, figure 16c (reconstructed)",
    placement=circular,
    peak_activations=lambda p, m, v: min(p, m) if m % p == 0 else None,
    makespan=lambda p, m, v, f, b, w: (m + (p - 1) / v) * (f + b + w) if m % p == 0 else None,
    picture={"ranks": 2, "microbatches": 4, "chunks": 2},
)
def interleaved_low_memory(
    ranks: int, microbatches: int, chunks: int = 2, costs: CostProfile | None = None
) -> Schedule:
    """Interleaved 1F1B with less memory for any ``ranks`` p, ``microbatches`` m and ``chunks`` v per rank, all >= 1::

        rank 0 |F0- F1- F0b F1b         BW0b--- F2- BW1b--- F3- BW0---- F2b BW1---- F3b BW2b---     BW3b--- BW2---- BW3----
        rank 1 |    F0- F1- F0b BW0b--- F1b BW1b--- F2- BW0---- F3- BW1---- F2b BW2b--- F3b BW3b--- BW2---- BW3----

    (``b`` marks the second chunk of a rank.) With m a multiple of p, equal stages and no transfer time the makespan is
    m(F + B + W) + (p − 1)(F + B + W)/v, that of interleaved 1F1B, and a rank holds min(vp, vm) chunks, 1/v of its share each.
    Otherwise whole microbatches are left out of the next multiple of p; which, and small changes of order, is decided with the
    real ``costs`` (one entry per stage, p·v).

    Raises:
        ScheduleError: a size is not a whole number of at least 1, or the costs are for another number of stages.
    """
    problem = Problem.of(circular(ranks, chunks), microbatches, costs)
    block = low_memory_block(ranks, chunks)
    orders = [repeat(block, problem, places) for places in slots(microbatches, ranks, chunks)]
    return problem.schedule("interleaved-low-memory", improved(problem, [best_order(problem, orders)]).rows)


def best_order(problem: Problem, orders: Iterable[CodeRows]) -> CodeRows:
    """Return the first order, or the best of those that are no worse in makespan, span and peak."""
    first, *drafts = map(Retimer(problem).draft, orders)
    best = best_of(drafts, anchor=first)
    assert best is not None
    return best.rows


def slots(m: int, p: int, v: int) -> Iterator[list[int]]:
    """Yield ways to number the places of whole groups of p with m microbatches; −1 where there is none. One chunk: one way."""
    groups, missing = -(-m // p), -m % p
    ways: list[Sequence[int]] = [range(missing)]
    if missing and groups > 1 and v > 1:
        turns = [divmod(k, groups) for k in range(missing)]
        ways.append(range(m, groups * p))
        ways.append([group * p + p - 1 - turn for turn, group in turns])
        ways.append([(groups - 1 - group) * p + p - 1 - turn for turn, group in turns])
        ways.append([(groups - 1 - group) * p + turn for turn, group in turns])
    for empty in ways:
        numbers = count()
        yield [-1 if place in empty else next(numbers) for place in range(groups * p)]


def _row(problem: Problem, rank: int, v: int, places: list[int]) -> list[int]:
    """Forwards group by group, chunk by chunk; backwards in the same order over mirrored chunks."""
    p = problem.num_ranks
    units = [(chunk, i) for k in range(0, len(places), p) for chunk in range(v) for i in places[k : k + p]]
    # Megatron's warm-up: two forwards for each rank below, and all chunks but the last of a group
    lead = min(2 * (p - rank - 1) + (v - 1) * p, len(units))
    turns = [(F, *unit) for unit in units[:lead]]
    for forward, backward in zip_longest(units[lead:], units):
        turns += [(F, *forward)] if forward else []
        turns.append((BW, v - 1 - backward[0], backward[1]))
    return [problem.code(op, chunk * p + rank, i) for op, chunk, i in turns if i >= 0]
