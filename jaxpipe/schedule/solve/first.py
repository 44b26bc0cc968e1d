"""A feasible order at once, whatever the limit: groups of microbatches, each ended before the next begins.

Groups are as large as every rank's limit allows, so 1F1B's warm-up at best and one microbatch at a time at worst (the "trivial
feasible schedule" of `optpipe.txt` section 4.1.3). Far from good; it is there so that an answer exists in well under a second
at any size, and something is left if everything else is cut short.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxpipe.schedule.ir import Action, Schedule
from jaxpipe.schedule.problem import B, F, Problem, W
from jaxpipe.schedule.tolerance import how_many


def group_size(problem: Problem, limits: Sequence[float]) -> int:
    """The most microbatches that may be in flight at once if none is given back before all are there; 0 if not even one."""
    flows = problem.placement.num_flows
    fits = problem.num_microbatches
    for rank, limit in enumerate(limits):
        share = max(
            (sum(max(problem.held[k], problem.kept[k]) for k in mine) for mine in _by_flow(problem, rank)), default=0.0
        )
        if share > 0 and limit < float("inf"):
            fits = min(fits, how_many(share, limit))
    return max(0, fits) if flows == 1 else max(0, fits // flows * flows) or (1 if fits else 0)


def _by_flow(problem: Problem, rank: int) -> list[list[int]]:
    stages = problem.placement.num_stages
    mine = problem.replicas_of(rank)
    return [[k for k in mine if k // stages == flow] for flow in range(problem.placement.num_flows)]


def grouped_rows(problem: Problem, size: int) -> list[list[int]]:
    """Rows of codes: groups of ``size`` microbatches, all F's, then each B with its W."""
    m, stages = problem.num_microbatches, problem.placement.num_stages
    rows: list[list[int]] = [[] for _ in range(problem.num_ranks)]
    for first in range(0, m, size):
        group = range(first, min(m, first + size))
        for s in range(stages):
            for i in group:
                k = i % problem.placement.num_flows * stages + s
                rows[problem.rank[k]].append(problem.code(F, k, i))
        for s in reversed(range(stages)):
            for i in group:
                k = i % problem.placement.num_flows * stages + s
                rows[problem.rank[k]] += [problem.code(B, k, i), problem.code(W, k, i)]
    return rows


def away_schedule(problem: Problem) -> Schedule:
    """One microbatch at a time, every residual on the host while another stage of its rank runs: the least memory there is.

    Each F but the rank's last is followed by O and S (the next F waits for the room); L comes behind the rank's W before.
    """
    m, stages, flows = problem.num_microbatches, problem.placement.num_stages, problem.placement.num_flows
    rows: list[list[Action]] = [[] for _ in range(problem.num_ranks)]
    for i in range(m):
        first = i % flows * stages
        last = {problem.rank[first + s]: s for s in range(stages)}
        for s in range(stages):
            row = rows[problem.rank[first + s]]
            row.append(Action("F", s, i))
            if last[problem.rank[first + s]] != s:
                row += [Action("O", s, i), Action("S", s, i)]
        for s in reversed(range(stages)):
            row = rows[problem.rank[first + s]]
            if last[problem.rank[first + s]] != s:
                row.append(Action("L", s, i))
            row += [Action("B", s, i), Action("W", s, i)]
    return Schedule("first", problem.placement, m, tuple(map(tuple, rows)))
