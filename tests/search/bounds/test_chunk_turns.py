"""Chunks that a rank holds together: the bound against closed forms, exact optima and the families."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxpipe.schedule import CostProfile, simulate
from jaxpipe.schedule.placement import Placement, circular, v_shape
from jaxpipe.search.best import best_schedule
from jaxpipe.search.bounds import lower_bound, span_lower_bound
from jaxpipe.search.solve import SolveTask
from jaxpipe.search.solve.neighbourhoods import solve_exact


def test_with_room_for_one_pair_the_turn_takes_microbatches_one_by_one() -> None:
    """p = 4, V, three chunks: on rank 3 a microbatch holds both chunks for 9 chunk units, from F4 to W4."""
    bound = span_lower_bound(v_shape(4), 16, CostProfile.uniform(8, chunks=2), memory_limit=1.5)
    assert bound >= 0.5 * (1 + 15 * 9 + 7 + 4)
    assert span_lower_bound(v_shape(4), 16, CostProfile.uniform(8, chunks=2), memory_limit=1.5, offload=True) < 60


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_no_optimum_is_below_it(data: st.DataObject) -> None:
    placement: Placement = data.draw(st.sampled_from([v_shape(2), v_shape(3), circular(2, 2), circular(2, 3)]))
    n, m = placement.num_stages, data.draw(st.integers(2, 4))
    durations = st.lists(st.integers(1, 4).map(float), min_size=n, max_size=n).map(tuple)
    w_residual = data.draw(st.sampled_from([1.0, 0.5]))
    costs = dataclasses.replace(
        CostProfile.uniform(
            n, chunks=placement.num_chunks, comm=data.draw(st.sampled_from([0.0, 1.0])), w_residual=w_residual
        ),
        f_s=data.draw(durations),
        b_s=data.draw(durations),
        w_s=data.draw(durations),
        bw_s=(100.0,) * n,
    )
    limit = data.draw(st.sampled_from([1.0, 1.5, 2.0]))
    objective = data.draw(st.sampled_from(["makespan", "span"]))
    result = solve_exact(SolveTask(placement, m, costs, limit, objective=objective), time_limit_s=600)
    if result.schedule is None:
        return
    find = span_lower_bound if objective == "span" else lower_bound
    assert find(placement, m, costs, memory_limit=limit * (1 + 1e-9)) <= result.value * (1 + 1e-9)
    timeline = simulate(result.schedule, costs)
    assert max(timeline.peak_activations) <= limit * (1 + 1e-9)


@pytest.mark.parametrize(
    ("p", "m", "limit"),
    [
        (4, 16, 4 / 3),
        *(
            pytest.param(*case, marks=pytest.mark.soak)
            for case in ((4, 16, 1.5), (5, 20, 1.6), (6, 12, 2.0), (8, 32, 8 / 3))
        ),
    ],
)
def test_no_family_is_below_it(p: int, m: int, limit: float) -> None:
    costs = CostProfile.uniform(2 * p, chunks=2, f=25.92, b=26.44, w=19.52)
    for placement in (v_shape(p), circular(p, 2)):
        best = best_schedule(p, m, costs, limit, chunks=2)
        if best.schedule.placement == placement:
            assert lower_bound(placement, m, costs, memory_limit=limit * (1 + 1e-9)) <= best.makespan * (1 + 1e-9)
