"""Bounds from a few ranks at once: never above the exhaustive search, equal to it where all ranks are kept."""

from __future__ import annotations

import random

import pytest

from jaxpipe.schedule import CostProfile
from jaxpipe.schedule.placement import one_to_one, v_shape
from jaxpipe.search.budget import Budget
from jaxpipe.search.solve import SolveTask
from jaxpipe.search.solve.jobs import few_ranks
from jaxpipe.search.solve.solver import bound_of
from jaxpipe.search.solve.task import Objective
from tests.search.solve.test_model import problem_of
from tests.support.exhaustive_search import Case, optimum

V2, V3, CIRCULAR2 = (0, 1, 1, 0), (0, 1, 2, 2, 1, 0), (0, 1, 0, 1)
ALL = 10**6
DEFAULT = (
    30  # cases, two of which take seconds; those of the soak are larger, and some take the exhaustive search a minute
)


def random_case(seed: int) -> Case:
    rng = random.Random(seed)
    rank = rng.choice([(0, 1), (0, 1, 2), V2, V2, CIRCULAR2, *([V3] if seed >= DEFAULT else [])])
    stage_bytes = tuple(rng.randint(1, 2) for _ in rank)
    ranks = max(rank) + 1
    least = [sum(x for x, r in zip(stage_bytes, rank, strict=True) if r == i) for i in range(ranks)]
    b, w = (tuple(rng.randint(1, 3) for _ in rank) for _ in range(2))
    return Case(
        rank,
        rng.randint(2, 4 if len(rank) < 3 or seed >= DEFAULT else 3),
        tuple(rng.randint(1, 3) for _ in rank),
        b,
        w,
        stage_bytes,
        tuple(rng.randint(0, x) for x in stage_bytes),
        tuple(x + rng.randint(0, 2) for x in least),
        comm=rng.choice([0, 0, 1]),
        bw=tuple(x + y - 1 for x, y in zip(b, w, strict=True)) if rng.random() < 0.2 else (),
        span=rng.random() < 0.3 and rank != CIRCULAR2,
    )


@pytest.mark.parametrize(
    "seed", [pytest.param(s, marks=[pytest.mark.soak] * (s >= DEFAULT or s in (5, 18))) for s in range(1, 400)]
)
def test_no_optimum_is_below_it_and_with_all_ranks_it_is_the_optimum(seed: int) -> None:
    case = random_case(seed)
    best = optimum(case, at_most=100)
    if best is None:
        return
    task = problem_of(case)
    bounds = {}
    for ranks in [*((r,) for r in range(case.ranks)), (0, 1), tuple(range(case.ranks))]:
        bounds[ranks] = few_ranks(task).orders(ranks).least(ALL, ALL, lambda _: False)
        assert bounds[ranks] <= best
        assert few_ranks(task).orders(ranks).least(ALL, 1, lambda _: False) <= bounds[ranks]
        assert few_ranks(task).orders(ranks).least(bounds[ranks] - 1, ALL, lambda _: False) == float("inf")
    if not (case.comm or case.bw or case.span):
        assert bounds[tuple(range(case.ranks))] == best


def random_offload(seed: int) -> Case:
    rng = random.Random(seed)
    ranks = rng.choice([1, 2, 2, 3] if seed >= DEFAULT else [1, 1, 2])
    f, b, w, o, back = (tuple(rng.randint(1, 2) for _ in range(ranks)) for _ in range(5))
    ones = (1,) * ranks
    limit = tuple(rng.randint(1, 2) for _ in ones)
    m = rng.randint(2, 3) if ranks == 1 or seed >= DEFAULT else 2
    span, in_order = rng.random() < 0.5, rng.random() < (0.5 if seed >= DEFAULT else 0.8)
    return Case(
        *(tuple(range(ranks)), m, f, b, w, ones, ones, limit), leaves=ones, o=o, l=back, span=span, in_order=in_order
    )


@pytest.mark.parametrize(
    "seed", [*range(DEFAULT), *(pytest.param(s, marks=pytest.mark.soak) for s in range(DEFAULT, 300))]
)
def test_no_optimum_with_offload_is_below_it(seed: int) -> None:
    case = random_offload(seed)
    best = optimum(case, at_most=100)
    if best is None:
        return
    for rank in range(case.ranks):
        orders = few_ranks(problem_of(case)).host_orders(rank)
        assert orders is not None
        assert orders.least(ALL, ALL, lambda _: False) <= best
        assert orders.least(ALL, 1, lambda _: False) <= orders.least(best, ALL, lambda _: False) <= best


def test_one_rank_with_its_host_lane() -> None:
    """p=4, two of four activations, round trips of twice the work: 73 from memory × time, 78 the best known."""
    costs = CostProfile.uniform(4, offload_time=6.0, host_mode="shared")
    task = SolveTask(one_to_one(4), 16, costs, 2.0, offload=True, objective="span")
    assert bound_of(task) == 73
    assert 74 <= proven(task, 78) <= 78


def proven(task: SolveTask, value: float) -> float:
    return max([bound_of(task), *few_ranks(task).bounds(bound_of(task), value, Budget(8.0, reproducible=True))])


def test_optima_of_small_v_shapes() -> None:
    """Unit costs at 3p/8. p=4, m=8: 43, by the exact model; a bound that looks at one rank at a time says 40."""
    task = SolveTask(v_shape(4), 8, CostProfile.uniform(8, chunks=2), 1.5, objective="span")
    assert bound_of(task) == 40
    assert proven(task, 43) == 43


def test_the_last_rank_alone_proves_the_best_known_schedule_of_eight_ranks() -> None:
    """V at 3p/8, unit costs, m=32: in half units, 239, which neighbourhoods found; memory × time says 221."""
    task = SolveTask(v_shape(8), 32, CostProfile.uniform(16, chunks=2), 3.0, objective="span")
    assert few_ranks(task).orders((7,)).least(ALL, ALL, lambda _: False) == 239


def test_limits_that_do_not_bind_cost_nothing() -> None:
    task = SolveTask(one_to_one(4), 8, CostProfile.uniform(4))
    assert proven(task, bound_of(task)) == bound_of(task)


@pytest.mark.parametrize("objective", ["makespan", "span"])
def test_durations_without_a_common_step_are_rounded_down(objective: Objective) -> None:
    def bound(b: float, w: float) -> float:
        task = SolveTask(v_shape(3), 4, CostProfile.uniform(6, chunks=2, f=1.0, b=b, w=w), 1.5, objective=objective)
        return proven(task, 18)

    assert bound(2**0.5, 3**-0.5) <= bound(1.415, 0.578)
    assert bound(2**0.5, 3**-0.5) == pytest.approx(bound(1.414, 0.577), rel=1e-3)


def test_a_reproducible_search_spends_no_clock() -> None:
    task = SolveTask(v_shape(4), 8, CostProfile.uniform(8, chunks=2, f=25.92, b=26.44, w=19.52), 2.0, objective="span")
    runs = [list(few_ranks(task).bounds(bound_of(task), 760.0, Budget(0.5, reproducible=True))) for _ in range(2)]
    assert runs[0] == runs[1]
    assert runs[0][-1] > bound_of(task)
