"""Fillers that look at an order from its end: orders that run and hold no more; never worse than recipes alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest

from jaxpipe.schedule import CostProfile, check_schedule
from jaxpipe.schedule.placement import Placement, bidirectional, circular, one_to_one, v_shape
from jaxpipe.schedule.problem import B, F, Problem, W
from jaxpipe.search.blocks import BuildingBlock, repeat
from jaxpipe.search.families.within_limit import v_half_block, v_min_block
from jaxpipe.search.list_schedule.fillers import GapFiller, fill_from_the_end, score
from jaxpipe.search.retime import peaks


def random_rows(problem: Problem, seed: int) -> list[list[int]]:
    """Return some order that runs: at every step a ready F, B or W, those of a replica in order of microbatches."""
    rng, rows = random.Random(seed), [list[int]() for _ in range(problem.num_ranks)]
    ways = [k for k in range(problem.num_replicas) for _ in problem.microbatches(k)]
    stages = problem.placement.num_stages
    counts = {(op, k): 0 for op in (F, B, W) for k in range(problem.num_replicas)}

    def ready(op: int, k: int) -> bool:
        if op == F:
            before = len(problem.microbatches(k)) if k % stages == 0 else counts[F, k - 1]
        elif op == B:
            before = counts[F, k] if k % stages == stages - 1 else counts[B, k + 1]
        else:
            before = counts[B, k]
        return counts[op, k] < before

    for _ in range(3 * len(ways)):
        op, k = rng.choice([key for key in counts if ready(*key)])
        rows[problem.rank[k]].append(problem.code(op, k, problem.microbatches(k)[counts[op, k]]))
        counts[op, k] += 1
    return rows


@pytest.mark.parametrize("placement", [v_shape(4), one_to_one(3), circular(3, 2), bidirectional(2)])
@pytest.mark.parametrize("costs", [{}, {"f": 1.0, "b": 1.3, "w": 0.7, "comm": 0.4, "w_residual": 0.3}])
def test_any_order_stays_one(placement: Placement, costs: dict[str, float]) -> None:
    profile = CostProfile.uniform(placement.num_stages, chunks=max(1, placement.num_chunks), **costs)
    problem = Problem.of(placement, 6, profile)
    for seed in range(4):
        rows = random_rows(problem, seed)
        most = max(peaks(problem, rows))
        for limit in (most, 0.5 * most, 2 * most):
            for filled in fill_from_the_end(problem, rows, limit):
                assert [*map(sorted, filled)] == [*map(sorted, rows)]
                check_schedule(problem.schedule("filled", filled))
                assert max(peaks(problem, filled)) <= max(most, limit) * (1 + 1e-9)


@pytest.mark.parametrize("block", [v_half_block, v_min_block])
def test_settled_is_no_worse_than_recipes(block: Callable[[int], BuildingBlock]) -> None:
    problem = Problem.of(v_shape(6), 18, CostProfile.uniform(12, chunks=2, f=25.92, b=26.44, w=19.52))
    gap_filler, rows = GapFiller(problem), repeat(block(6), problem)
    limit = max(peaks(problem, rows))
    best, settled = gap_filler.best(rows, limit, 20), [*gap_filler.improve_until_stable(rows, limit)]
    assert best is not None and score(settled[0]) == score(best)
    assert all(score(later) < score(draft) for draft, later in pairwise(settled))
    assert all(draft.peak <= limit * (1 + 1e-9) for draft in settled)
    assert not [*gap_filler.improve_until_stable(rows, 0.1)]
