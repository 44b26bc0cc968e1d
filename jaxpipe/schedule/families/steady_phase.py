"""The steady phase of an order, repeated: rows for few microbatches become rows for many.

A rank in its steady phase runs the same operations for one microbatch after the other. Where a row contains such a period twice
in a row, it may as well contain it a hundred times; the rest of the row moves on by as many microbatches. Idle seconds of
warm-up and cool-down stay what they were, so a long search on few microbatches serves any number of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxpipe.schedule.problem import Problem


def repeated(problem: Problem, rows: Sequence[Sequence[int]], microbatches: int) -> list[list[int]] | None:
    """``rows`` of ``problem`` with the steady phase repeated until there are ``microbatches``; None if a rank has none.

    Whether the result deadlocks, how long it takes and what it holds is the retimer's business.
    """
    few, more = problem.num_microbatches, microbatches - problem.num_microbatches
    assert more >= 0
    longer = []
    for row in rows:
        period = len(row) // few
        cut = _steady(row, period)
        if cut is None:
            return None
        moved = [_moved(code, few, microbatches, 0) for code in row[: cut + period]]
        for k in range(1, more + 1):
            moved += [_moved(code, few, microbatches, k) for code in row[cut : cut + period]]
        moved += [_moved(code, few, microbatches, more) for code in row[cut + period :]]
        longer.append(moved)
    return longer


def _moved(code: int, few: int, many: int, by: int) -> int:
    kind, microbatch = divmod(code, few)
    return kind * many + microbatch + by


def _steady(row: Sequence[int], period: int) -> int | None:
    """A position from which a period and the one after are the same but for the microbatch; the one nearest the middle."""
    same = [a + 1 == b for a, b in zip(row, row[period:], strict=False)]
    middle = len(row) // 2
    found = None
    run = 0
    for at, ok in enumerate(same):
        run = run + 1 if ok else 0
        if run >= period:
            start = at - period + 1
            if found is None or abs(start - middle) < abs(found - middle):
                found = start
    return found
