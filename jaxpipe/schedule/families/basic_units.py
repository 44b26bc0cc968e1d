"""Basic units: p microbatches that fill all ranks without a gap, one unit after another. Chimera and Hanayo are made of them.

Li & Hoefler 2021 (section 3, "direct concatenation") draw a unit on a grid where F and BW of a chunk take one column each.
Microbatches of a chain start 2 columns apart, and a unit starts 2pv columns after the one before, exactly when its columns
are free. That holds for two chains of even length in opposite directions (Chimera) and for one chain that runs down and up v
times (Hanayo); with odd p two chains do meet in a column, and the grid then gives only the order. By column, everything that
an action waits for comes before it, so the order runs at any size. Units may be short.

Where BW takes longer than F a gap stays between units; it is closed as far as
:func:`~jaxpipe.schedule.list_schedule.fillers.improved` finds a way. Forward doubling (pairs of microbatches) is not made here.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxpipe.schedule.list_schedule.fillers import improved
from jaxpipe.schedule.problem import BW, F, Problem
from jaxpipe.schedule.retime import Draft, best_of


def units_in_a_row(problem: Problem) -> Draft:
    """Basic units with the costs of ``problem``: for each way to size them, the best order that dominates theirs; the best
    of all. At most p activations are held on a rank."""
    best = best_of(improved(problem, [unit_rows(problem, sizes)]) for sizes in unit_sizes(problem))
    assert best is not None
    return best


def unit_sizes(problem: Problem) -> list[tuple[int, ...]]:
    """Ways to cut m into units of at most p microbatches: all full but the first, all but the last, or all about equal."""
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
    starts = [unit * period + 2 * (k // flows) for unit, size in enumerate(sizes) for k in range(size)]
    rows: list[list[tuple[int, int, int]]] = [[] for _ in range(p)]
    for replica, rank in enumerate(problem.rank):
        stage = replica % stages
        for i in problem.microbatches(replica):
            rows[rank].append((starts[i] + stage, i, problem.code(F, replica, i)))
            rows[rank].append((starts[i] + 2 * stages - 1 - stage, i, problem.code(BW, replica, i)))
    return [[code for _, _, code in sorted(row)] for row in rows]
