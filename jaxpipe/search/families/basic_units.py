"""Chimera and Hanayo, of basic units: p microbatches that fill all ranks without a gap, one unit after another.

Li & Hoefler 2021 (section 3, "direct concatenation") draw a unit on a grid where F and BW of a chunk take one column each.
Microbatches of a chain start 2 columns apart, and a unit starts 2pv columns after the one before, exactly when its columns
are free. That holds for two chains of even length in opposite directions (Chimera) and for one chain that runs down and up v
times (Hanayo); with odd p two chains do meet in a column, and the grid then gives only the order. By column, everything that
an action waits for comes before it, so the order runs at any size. Units may be short.

Where BW takes longer than F a gap stays between units; it is closed as far as
:func:`~jaxpipe.search.list_schedule.fillers.improved` finds a way. Forward doubling (pairs of microbatches) is not made here.

Chimera (Li & Hoefler 2021, arXiv 2107.06925, section 3): even microbatches go down the ranks, odd ones up, so every rank holds
two stages and the parameters are held twice: the replicas' gradients are summed at the end of the step (not in the schedule).
The paper asks for even p and m. Any p works here; with odd p the two directions meet in the same columns of the grid and
wait for each other. With odd m the direction down has one microbatch more.

Hanayo (Liu et al. 2023, SC '23): one pipeline that runs down the ranks and up again, wave after wave; Chimera's gain without
its second copy. v chunks per rank make v/2 waves. The paper takes even v; odd v works too (the last chunk ends on the last
rank; v = 1 is 1F1B). Where a wave turns, both stages are on one rank and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxpipe.schedule.costs import CostProfile
from jaxpipe.schedule.families.family import family
from jaxpipe.schedule.ir import Schedule
from jaxpipe.schedule.placement import bidirectional, wave
from jaxpipe.schedule.problem import BW, F, Problem
from jaxpipe.search.list_schedule.fillers import improved
from jaxpipe.search.retime import Draft, best_of


@family(
    "chimera",
    "two pipelines in opposite directions: half of 1F1B's bubble at m = p, parameters held twice",
    "Li & Hoefler 2021 (Chimera) §3; controllable-memory.txt §2.2",
    placement=bidirectional,
    peak_activations=lambda p, m, v: min(p, m) if p % 2 == 0 and (m < p or m % p == 0) else None,
    makespan=lambda p, m, v, f, b, w: m * (f + b + w) + (p - 2) * max(f, b + w) if p % 2 == 0 and m == p else None,
)
def chimera(ranks: int, microbatches: int, costs: CostProfile | None = None) -> Schedule:
    """Chimera for any ``ranks`` p and ``microbatches`` m >= 1; ``costs`` has one entry per stage (p stages)::

        rank 0 |F0- F2-     F1b BW1b--- F3b BW3b---     BW0----         BW2----
        rank 1 |    F0- F1b F2- F3b     BW1b--- BW0---- BW3b--- BW2----
        rank 2 |    F1- F0b F3- F2b     BW0b--- BW1---- BW2b--- BW3----
        rank 3 |F1- F3-     F0b BW0b--- F2b BW2b---     BW1----         BW3----

    (``b`` marks the later of a rank's two stages; even microbatches go down.) With even p, equal stages and no transfer time,
    m = p idles (p − 2) max(F, B + W), as in Li & Hoefler's table 2. A rank holds between p/2 + 1 and p activations: 1F1B's
    peak, spread more evenly.

    Raises:
        ScheduleError: a size is not a whole number of at least 1, or the costs are for another number of stages.
    """
    problem = Problem.of(bidirectional(ranks), microbatches, costs)
    return problem.schedule("chimera", units_in_a_row(problem).rows)


@family(
    "hanayo",
    "waves down and up the ranks (--chunks: two a wave): 1F1B's memory, the bubble divided by v",
    "Liu et al. 2023 (Hanayo)",
    placement=wave,
    peak_activations=lambda p, m, v: min(p, m) if m < p or m % p == 0 else None,
    makespan=lambda p, m, v, f, b, w: (
        m * (f + b + w) + (p - 1) * 2 / v * max(f, b + w) if v % 2 == 0 and m == p else None
    ),
    picture={"ranks": 3, "microbatches": 3},
)
def hanayo(ranks: int, microbatches: int, chunks: int = 2, costs: CostProfile | None = None) -> Schedule:
    """Hanayo for any ``ranks`` p, ``microbatches`` m and ``chunks`` v per rank (v/2 waves), all >= 1::

        rank 0 |F0- F1- F2-         F0b BW0b--- F1b BW1b--- F2b BW2b---         BW0----         BW1----         BW2----
        rank 1 |    F0- F1-     F0b F2- F1b     BW0b--- F2b BW1b---     BW0---- BW2b--- BW1----         BW2----
        rank 2 |        F0- F0b F1- F1b F2- F2b         BW0b--- BW0---- BW1b--- BW1---- BW2b--- BW2----

    With even v, equal stages and no transfer time, m = p idles (p − 1)(2/v) max(F, B + W): for W waves and B + W = 2F a bubble
    of (2p − 2)/(3pW + 2p − 2). A rank holds at most min(p, m) activations, as in 1F1B. ``costs``: one entry per stage (p·v).

    Raises:
        ScheduleError: a size is not a whole number of at least 1, or the costs are for another number of stages.
    """
    problem = Problem.of(wave(ranks, chunks), microbatches, costs)
    return problem.schedule("hanayo", units_in_a_row(problem).rows)


def units_in_a_row(problem: Problem) -> Draft:
    """Basic units with the costs of ``problem``: for each way to size them, the best order that dominates theirs; the best
    of all. At most p activations are held on a rank."""
    best = best_of(improved(problem, [unit_rows(problem, sizes)]) for sizes in unit_sizes(problem))
    assert best is not None
    return best


def unit_sizes(problem: Problem) -> list[tuple[int, ...]]:
    """Return ways to cut m into units of at most p microbatches: all full but the first, all but the last, or all about
    equal."""
    p, m = problem.num_ranks, problem.num_microbatches
    units, full = -(-m // p), (p,) * (m // p)
    if m % p == 0:
        return [full]
    about_equal = tuple(m // units + (k >= units - m % units) for k in range(units))
    return sorted({(m % p, *full), (*full, m % p), about_equal})


def unit_rows(problem: Problem, sizes: Sequence[int]) -> list[list[int]]:
    """Each rank's F and BW in the order of their columns, with units of ``sizes`` microbatches."""
    stages, flows, p = problem.placement.num_stages, problem.placement.num_flows, problem.num_ranks
    period = 2 * p * problem.placement.num_chunks
    # columns: a microbatch of a flow enters every second one
    starts = [unit * period + 2 * (k // flows) for unit, size in enumerate(sizes) for k in range(size)]
    rows: list[list[tuple[int, int, int]]] = [[] for _ in range(p)]
    for replica, rank in enumerate(problem.rank):
        stage = replica % stages
        for i in problem.microbatches(replica):
            rows[rank].append((starts[i] + stage, i, problem.code(F, replica, i)))
            rows[rank].append((starts[i] + 2 * stages - 1 - stage, i, problem.code(BW, replica, i)))
    return [[code for _, _, code in sorted(row)] for row in rows]
