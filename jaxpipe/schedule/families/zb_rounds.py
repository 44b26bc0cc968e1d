"""The order of F and B behind the zero-bubble heuristic: after the warm-up, rounds of one F and one B on every rank.

Source: Qi et al. 2023 (Zero Bubble), section 3.1, which describes it in words: as many warm-up forwards as memory allows before
the first B comes back; then F and B in turn; a rank may leave out an F that would come too early on the next. Here all ranks
but the last few leave out one in some rounds or in none (:data:`_LEFT_OUT`); :mod:`~jaxpipe.schedule.list_schedule.weights`
adds W by real costs. One stage per rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from jaxpipe.schedule.problem import B, F, Problem

_LEFT_OUT: tuple[dict[int, int], ...] = (
    *({}, {2: 0}, {3: 1}, {4: 0}, {4: 1}, {4: 2}, {4: 3}),
    *({2: 3, 8: 1}, {2: 4, 8: 6}, {2: 10, 12: 11}),
)
"""Round: how many ranks before the last leave out nothing. Chosen of 120 by the rows of the authors' heuristic
(`tests/golden/authors_zb.json`) with transfers and a limit above p, where leaving out none has spans up to 0.6% longer."""


def round_orders(problem: Problem, limit: float) -> Iterator[list[int]]:
    """F and B as one list in which everything stands after what it waits for, for each choice of F to leave out."""
    lead = _leads(problem, limit)
    for choice in _LEFT_OUT:
        order = _order(problem, lead, choice)
        if order is not None:
            yield order


def _leads(problem: Problem, limit: float) -> list[int]:
    """Per rank, the F before its first B: those that end before it arrives, at least one, and fewer than on the rank before."""
    p, m = problem.num_ranks, problem.num_microbatches
    ends = [problem.f_s[0]]
    for r in range(1, p):
        ends.append(ends[-1] + problem.down_s[r - 1] + problem.f_s[r])
    lead, back = [1] * p, ends[-1] + problem.b_s[-1]
    for r in reversed(range(p - 1)):
        back += problem.up_s[r + 1]
        now, need = ends[r], problem.reserved[r]
        while lead[r] < m and (lead[r] + 1) * need <= limit * (1 + 1e-9) and now + problem.f_s[r] <= back:
            now += problem.f_s[r]
            lead[r] += 1
        back += problem.b_s[r]
    for r in range(1, p):
        if lead[r] < m:
            lead[r] = max(1, min(lead[r], lead[r - 1] - 1))
    return lead


def _order(problem: Problem, lead: Sequence[int], left_out: Mapping[int, int]) -> list[int] | None:
    p, m = problem.num_ranks, problem.num_microbatches
    done = list(lead)
    order = [problem.code(F, r, i) for r in range(p) for i in range(lead[r])]
    for turn in range(m):
        for r in range(p) if turn else ():
            if done[r] < m and r >= p - 1 - left_out.get(turn, p):
                if r and done[r - 1] <= done[r]:
                    return None
                order.append(problem.code(F, r, done[r]))
                done[r] += 1
        if turn >= min(done):
            return None
        order += [problem.code(B, r, turn) for r in reversed(range(p))]
    return order
