"""The zero-bubble heuristic: as good as the best known orders, never over its limit, sound for arbitrary costs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule import CostProfile, Link, Timeline, check_schedule, generate, lower_bound, simulate
from jaxpipe.schedule.families.list_scheduler import Chain, Draft, replay
from jaxpipe.schedule.families.polish import move_weight_gradients
from jaxpipe.schedule.families.zb_h import h1_rows, h2_rows
from jaxpipe.schedule.families.zb_heuristic import best_draft


def run(p: int, m: int, limit: float, **costs: float) -> Timeline:
    profile = CostProfile.uniform(p, **costs)
    return simulate(generate("zb", p, m, costs=profile, memory_limit=limit), profile)


# FACTS.md, CP-SAT table (unit costs, longest span): p, m, memory limit, best known
CP_SAT = [
    (4, 16, 4, 51),
    (4, 16, 2, 81),
    (4, 32, 2, 161),
    (8, 16, 8, 55),
    (8, 16, 4, 79),
    (8, 16, 2, 145),
    (8, 32, 4, 151),
]


@pytest.mark.parametrize(("p", "m", "limit", "best"), [*CP_SAT, (16, 64, 8, 293), (32, 128, 16, 575)])
def test_below_full_memory_as_good_as_cp_sat(p: int, m: int, limit: float, best: float) -> None:
    assert run(p, m, limit=limit).max_span <= best


seconds = st.floats(0, 20, allow_subnormal=False)


@st.composite
def chains(draw_from: st.DrawFn) -> tuple[int, CostProfile, float]:
    p = draw_from(st.integers(1, 6))
    per_stage = st.tuples(*[seconds] * p)
    residual = draw_from(st.tuples(*[st.floats(0.5, 4)] * p))
    kept = draw_from(st.tuples(*[st.floats(0, 1)] * p))
    f, b, w = draw_from(per_stage), draw_from(per_stage), draw_from(per_stage)

    links = tuple(((r, r + 1), Link(latency_s=draw_from(seconds))) for r in range(p - 1) if draw_from(st.booleans()))
    costs = CostProfile(
        f_s=f,
        b_s=b,
        w_s=w,
        bw_s=tuple(x + y for x, y in zip(b, w, strict=True)),
        residual_bytes=residual,
        w_residual_bytes=tuple(x * y for x, y in zip(residual, kept, strict=True)),
        link=Link(latency_s=draw_from(st.sampled_from([0.0, 0.5, 5.0]))),
        links=links,
    )
    return draw_from(st.integers(1, 9)), costs, draw_from(st.floats(1, 2 * p + 1))


@settings(max_examples=300, deadline=None)
@given(chains())
def test_zb_with_random_costs(case: tuple[int, CostProfile, float]) -> None:
    m, costs, limit = case
    p = costs.num_stages
    schedule = generate("zb", p, m, costs=costs, memory_limit=limit)
    check_schedule(schedule)
    timeline = simulate(schedule, costs)
    assert max(timeline.peak_activations) <= limit + 1e-6
    assert timeline.makespan >= lower_bound(schedule.placement, m, costs) * (1 - 1e-9)
    draft = best_draft(Chain.of(costs, m, limit))
    assert timeline.makespan == pytest.approx(draft.makespan)
    assert timeline.max_span == pytest.approx(draft.span)
    for fixed in ("1f1b", "zb-h1", "zb-h2"):
        other = simulate(generate(fixed, p, m), costs)
        if max(other.peak_activations) <= limit - 1e-6:
            assert timeline.makespan <= other.makespan * (1 + 1e-6)


@given(st.integers(1, 5), st.integers(1, 9), st.sampled_from([h1_rows, h2_rows]), seconds)
def test_replay_agrees_with_the_simulator(
    p: int, m: int, rows: Callable[[int, int], list[list[str]]], comm: float
) -> None:
    costs = CostProfile.uniform(p, f=2, b=3, w=1, comm=comm, w_residual=0.5)
    draft = replay(Chain.of(costs, m, float("inf")), tuple(rows(p, m)))
    timeline = simulate(generate("zb-h1" if rows is h1_rows else "zb-h2", p, m), costs)
    assert isinstance(draft, Draft)
    assert draft.makespan == pytest.approx(timeline.makespan)
    assert draft.span == pytest.approx(timeline.max_span)
    assert draft.peak == pytest.approx(max(timeline.peak_activations))


def test_zb_improves_with_memory() -> None:
    for p, m in [(4, 12), (8, 24)]:
        times = [run(p, m, limit=x * p, f=18.5, b=18.1, w=9.3).makespan for x in (0.25, 0.5, 0.75, 1, 1.5, 2)]
        assert times == sorted(times, reverse=True)


def test_zb_uses_room_that_small_w_residuals_leave() -> None:
    full, thin = (run(8, 24, limit=1.5, w_residual=x) for x in (1.0, 0.1))
    assert thin.makespan < full.makespan
    assert max(thin.peak_activations) <= 1.5


def test_zb_with_w_residuals_larger_than_residuals() -> None:
    costs = CostProfile((1.0,) * 3, (1.0,) * 3, (1.0,) * 3, (2.0,) * 3, (1.0,) * 3, (1.5,) * 3)
    schedule = generate("zb", 3, 6, costs=costs, memory_limit=2)
    assert max(simulate(schedule, costs).peak_activations) <= 2
    with pytest.raises(ScheduleError, match=r"below the 1\.5 of one microbatch"):
        generate("zb", 3, 6, costs=costs, memory_limit=1.2)


def test_zb_scales_with_the_unit_of_time() -> None:
    rows = [
        generate("zb", 4, 10, costs=CostProfile.uniform(4, f=2 * x, b=3 * x, w=x)).rows
        for x in (1.0, 2.0**-20, 2.0**20)
    ]
    assert rows[0] == rows[1] == rows[2]


def test_polish_shortens_or_leaves_alone() -> None:
    shorter = 0
    for m in (5, 8, 16):
        for f, b, w in [(12.96, 13.22, 9.76), (18.5, 18.1, 9.3), (1, 3, 1)]:
            c = Chain.of(CostProfile.uniform(4, f=f, b=b, w=w), m, 8)
            fused = [["F"] * k + ["B", "W", "F"] * (m - k) + ["B", "W"] * k for k in (4, 3, 2, 1)]
            before = replay(c, tuple(fused))
            assert before is not None
            after = move_weight_gradients(c, before, tries=60)
            assert (after.makespan, after.span) <= (before.makespan * (1 + 1e-9), before.span * (1 + 1e-9))
            assert after.peak <= c.limit
            assert replay(c, after.rows) == Draft(after.rows, after.makespan, after.span, after.peak) or after == before
            shorter += after.makespan < before.makespan
    assert shorter > 0
