"""Lower bounds: below every valid schedule, and tight where the optimum is known."""

from __future__ import annotations

import random

import hypothesis.strategies as st
import pytest
from hypothesis import given

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule import (
    CostProfile,
    OpSpec,
    Placement,
    Schedule,
    bidirectional,
    circular,
    explicit,
    lower_bound,
    one_to_one,
    op_spec,
    parse_schedule,
    register_op,
    simulate,
    span_lower_bound,
    v_shape,
    with_shared,
)
from tests.schedule_strategies import (
    gpipe_rows,
    one_f_one_b_rows,
    random_costs,
    random_schedule,
    random_valid_schedules,
)

EPS = 1e-9


@given(random_valid_schedules(offload=True, braids=True), st.data())
def test_no_random_schedule_is_below(schedule: Schedule, data: st.DataObject) -> None:
    costs = data.draw(random_costs(schedule.num_stages, schedule.num_ranks))
    timeline = simulate(schedule, costs)
    assert timeline.makespan >= lower_bound(schedule.placement, schedule.num_microbatches, costs) - EPS
    assert timeline.max_span >= span_lower_bound(schedule.placement, schedule.num_microbatches, costs) - EPS


@pytest.mark.parametrize(
    "placement",
    [
        one_to_one(2),
        circular(2, 2),
        v_shape(2),
        bidirectional(2),
        explicit(3, [0, 1, 2], [(0, 2), (1, 2)]),
        with_shared(one_to_one(2), [1]),
    ],
    ids=lambda p: p.kind,
)
@pytest.mark.parametrize("comm", [0.0, 0.5, 4.0])
def test_many_orders_of_small_problems_come_close_but_not_below(placement: Placement, comm: float) -> None:
    """The best of 300 random orders of two microbatches lies within 30% of the bound, never below it."""
    costs = CostProfile.uniform(placement.num_stages, f=1, b=1.25, w=0.75, comm=comm)
    bound, span = lower_bound(placement, 2, costs), span_lower_bound(placement, 2, costs)
    timelines = [simulate(random_schedule(placement, 2, random.Random(seed)), costs) for seed in range(300)]
    best = min(t.makespan for t in timelines)
    assert bound - EPS <= best <= 1.3 * bound
    assert span - EPS <= min(t.max_span for t in timelines)


@pytest.mark.parametrize("comm", [0.0, 0.5])
@pytest.mark.parametrize("p", [1, 2, 5])
def test_tight_for_one_microbatch(p: int, comm: float) -> None:
    """One microbatch: the bound is its way down and up, which split backwards shorten."""
    costs = CostProfile.uniform(p, f=1, b=2, w=3, comm=comm)
    way = 3 * p + 2 * (p - 1) * comm + 3
    assert lower_bound(one_to_one(p), 1, costs) == pytest.approx(way)
    text = f"# jaxpipe schedule 1\nname: one\nmicrobatches: 1\nplacement: one-to-one ranks={p}\n"
    rows = "".join(f"rank {r}: F{r}.0 B{r}.0 W{r}.0\n" for r in range(p))
    assert simulate(parse_schedule(text + rows), costs).makespan == pytest.approx(way)
    assert span_lower_bound(one_to_one(p), 1, costs) == pytest.approx(way)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (8, 16)])
def test_of_unit_costs_is_the_zero_bubble_optimum(p: int, m: int) -> None:
    """All of a rank's work plus the way to the last rank: 3m + p − 1, which zero-bubble schedules reach (51 for p=4, m=16)."""
    costs = CostProfile.uniform(p)
    assert lower_bound(one_to_one(p), m, costs) == 3 * m + p - 1
    assert span_lower_bound(one_to_one(p), m, costs) == 3 * m


def test_published_optimum_is_not_below() -> None:
    """FACTS.md: proved optimal longest span 51 (p=4, m=16) and 55 (p=8, m=16) at full memory."""
    assert span_lower_bound(one_to_one(4), 16, CostProfile.uniform(4)) <= 51
    assert span_lower_bound(one_to_one(8), 16, CostProfile.uniform(8)) <= 55


def test_full_backward_costs_less_than_split_when_it_does() -> None:
    costs = CostProfile((1.0,), (2.0,), (2.0,), (3.0,), (1.0,), (1.0,))
    assert lower_bound(one_to_one(1), 5, costs) == 20
    split_is_cheaper = CostProfile((1.0,), (2.0,), (2.0,), (9.0,), (1.0,), (1.0,))
    assert lower_bound(one_to_one(1), 5, split_is_cheaper) == 25


def test_slow_links_bound() -> None:
    """Eight transfers of 10 s each way dominate: the first leaves at 1, the last needs F, B, transfer, B and W."""
    costs = CostProfile.uniform(2, comm=10.0)
    assert lower_bound(one_to_one(2), 8, costs) == 1 + 80 + 1 + 1 + 10 + 1 + 1
    assert simulate(one_f_one_b_rows(2, 8), costs).makespan >= 95
    assert simulate(gpipe_rows(2, 8), costs).makespan >= 95


def test_no_schedule_of_a_bidirectional_pipeline_is_charged_for_an_unused_flow() -> None:
    placement = bidirectional(3)
    costs = CostProfile.uniform(3)
    assert lower_bound(placement, 1, costs) == lower_bound(one_to_one(3), 1, costs)


def test_the_slowest_stage_bounds() -> None:
    """Its work after the first microbatch has come; upstream may finish while it catches up on weight gradients."""
    costs = CostProfile((1.0, 9.0, 1.0), (1.0, 9.0, 1.0), (1.0,) * 3, (2.0, 10.0, 2.0), (1.0,) * 3, (1.0,) * 3)
    assert lower_bound(one_to_one(3), 10, costs) == 1 + 10 * 19
    assert simulate(one_f_one_b_rows(3, 10), costs).makespan >= 191


def test_a_cheaper_user_op_lowers_the_bound() -> None:
    full = op_spec("BW")
    register_op(OpSpec("FastBW", "compute", full.waits, "fast_s", full.memory, parts=("B", "W"), sends="pred"))
    plain = CostProfile((1.0,), (2.0,), (2.0,), (4.0,), (1.0,), (1.0,))
    fast = CostProfile((1.0,), (2.0,), (2.0,), (4.0,), (1.0,), (1.0,), extra=(("fast_s", (0.5,)),))
    assert lower_bound(one_to_one(1), 2, plain) == 10
    assert lower_bound(one_to_one(1), 2, fast) == 3


def test_refusals() -> None:
    with pytest.raises(ScheduleError, match="the costs are for 3 stages and the placement has 2"):
        lower_bound(one_to_one(2), 1, CostProfile.uniform(3))
    with pytest.raises(ScheduleError, match="number of microbatches is 0"):
        span_lower_bound(one_to_one(2), 0, CostProfile.uniform(2))
