"""Basic units: p microbatches that fill all ranks without a gap, one unit after another. Chimera and Hanayo are made of them.

Li & Hoefler 2021 (section 3, "direct concatenation") draw a unit on a grid where F and BW of a chunk take one column each.
Microbatches of a chain start 2 columns apart, and a unit starts 2pv columns after the one before, exactly when its columns
are free. That holds for two chains of even length in opposite directions (Chimera) and for one chain that runs down and up v
times (Hanayo); with odd p two chains do meet in a column, and the grid then gives only the order. By column, everything that
an action waits for comes before it, so the order runs at any size. The last unit, or the first, may be short.

Where BW takes longer than F a gap stays between units; it is closed as far as
:func:`~jaxpipe.schedule.families.reordered.improved` finds a way. Forward doubling (pairs of microbatches) is not made here.
"""

from __future__ import annotations

from jaxpipe.schedule.families.reordered import improved
from jaxpipe.schedule.problem import BW, F, Problem
from jaxpipe.schedule.retime import Draft, Retimer, best_of


def units_in_a_row(problem: Problem) -> Draft:
    """Basic units with the costs of ``problem``: the best of a short first unit, a short last unit and what dominates them."""
    retimer = Retimer(problem)
    missing = -problem.num_microbatches % problem.num_ranks
    plain = best_of(retimer.draft(unit_rows(problem, skipped)) for skipped in sorted({0, missing}))
    assert plain is not None, "columns are an order that runs"
    return improved(problem, plain.rows)


def unit_rows(problem: Problem, skipped: int = 0) -> list[list[int]]:
    """Each rank's F and BW in the order of their columns. The first unit lacks its first ``skipped`` microbatches."""
    stages, flows, p = problem.placement.num_stages, problem.placement.num_flows, problem.num_ranks
    period = 2 * p * problem.placement.num_chunks
    rows: list[list[tuple[int, int, int]]] = [[] for _ in range(p)]
    for replica, rank in enumerate(problem.rank):
        stage = replica % stages
        for i in problem.microbatches(replica):
            unit, within = divmod(i + skipped, p)
            start = unit * period + 2 * (within // flows)
            rows[rank].append((start + stage, i, problem.code(F, replica, i)))
            rows[rank].append((start + 2 * stages - 1 - stage, i, problem.code(BW, replica, i)))
    return [[code for _, _, code in sorted(row)] for row in rows]
