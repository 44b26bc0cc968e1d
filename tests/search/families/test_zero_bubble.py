"""The zero-bubble heuristic: as good as the best known orders, never over its limit, sound for arbitrary costs."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule import CostProfile, Link, Timeline, check_schedule, generate, simulate
from jaxpipe.schedule.families.family import in_order
from jaxpipe.schedule.placement import one_to_one
from jaxpipe.schedule.problem import Problem
from jaxpipe.search.bounds import lower_bound, span_lower_bound
from jaxpipe.search.families.within_limit import best_draft, fuse_backwards, refill_weights
from jaxpipe.search.list_schedule.policies import ONE_CHUNK, WeightFilling, chain_drafts
from jaxpipe.search.retime import Retimer
from tests.support.paths import GOLDEN


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


@pytest.mark.parametrize(("p", "m", "limit", "best"), CP_SAT)
def test_small_cells_are_optimal(p: int, m: int, limit: float, best: float) -> None:
    """The lower bound under the limit equals what is found, also where CP-SAT proved nothing within its minute."""
    assert run(p, m, limit=limit).max_span == best
    if limit != 2 or p != 8:
        assert span_lower_bound(one_to_one(p), m, CostProfile.uniform(p), memory_limit=limit) == pytest.approx(best)


@pytest.mark.parametrize(("p", "m", "limit", "best"), [*CP_SAT, (16, 64, 8, 293), (32, 128, 16, 575)])
def test_below_full_memory_as_good_as_cp_sat(p: int, m: int, limit: float, best: float) -> None:
    assert run(p, m, limit=limit).max_span <= best


# Qi et al. 2023 (Zero Bubble), tables 5 and 9, all 12 rows: p, m, F, B, W, transfer, w-residual, bubble rate of ZB-2P by
# longest span (papers_rest.md section 1.1)
SPANS = [
    (8, 24, 18.522, 18.086, 9.337, 0.601, 0.368, 0.0433),
    (8, 24, 29.718, 29.444, 19.927, 0.527, 0.432, 0.0029),
]
SLOWER_SPANS = [
    (8, 32, 18.513, 18.086, 9.331, 0.626, 0.368, 0.0039),
    (8, 64, 18.546, 18.097, 9.321, 0.762, 0.368, 0.0026),
    (8, 32, 29.802, 29.428, 19.530, 0.577, 0.432, 0.0022),
    (8, 64, 29.935, 29.621, 19.388, 0.535, 0.432, 0.0010),
    (16, 48, 11.347, 11.248, 8.132, 0.377, 0.432, 0.0066),
    (16, 64, 11.307, 11.254, 8.101, 0.379, 0.432, 0.0054),
    (16, 128, 11.325, 11.308, 8.109, 0.378, 0.432, 0.0028),
    (32, 96, 10.419, 10.207, 7.715, 0.408, 0.432, 0.0038),
    (32, 128, 10.408, 10.204, 7.703, 0.408, 0.432, 0.0029),
    (32, 256, 10.402, 10.248, 7.698, 0.460, 0.432, 0.0018),
]


@pytest.mark.parametrize(
    ("p", "m", "f", "b", "w", "comm", "w_residual", "rate"),
    [*SPANS, *(pytest.param(*row, marks=pytest.mark.soak) for row in SLOWER_SPANS)],
)
def test_zb_2p_by_span(
    p: int, m: int, f: float, b: float, w: float, comm: float, w_residual: float, rate: float
) -> None:
    costs = CostProfile.uniform(p, f=f, b=b, w=w, comm=comm, w_residual=w_residual)
    timeline = simulate(generate("zb-2p", p, m, costs=costs, objective="span"), costs)
    assert timeline.span_bubble_rate <= rate + 2e-4


seconds = st.floats(0, 20, allow_subnormal=False)


@st.composite
def chains(draw_from: st.DrawFn) -> tuple[int, CostProfile, float]:
    p = draw_from(st.integers(1, 6))
    per_stage = st.tuples(*[seconds] * p)
    residual = draw_from(st.tuples(*[st.floats(0.5, 4)] * p))
    fractions = draw_from(
        st.tuples(*[st.integers(0, 64).map(lambda n: n / 64)] * p)
    )  # above what is rounding of a limit
    f, b, w = draw_from(per_stage), draw_from(per_stage), draw_from(per_stage)
    fused = draw_from(st.sampled_from([1.0, 1.0, 0.8, 1.2]))

    links = tuple(((r, r + 1), Link(latency_s=draw_from(seconds))) for r in range(p - 1) if draw_from(st.booleans()))
    costs = CostProfile(
        f_s=f,
        b_s=b,
        w_s=w,
        bw_s=tuple(fused * (x + y) for x, y in zip(b, w, strict=True)),
        residual_bytes=residual,
        w_residual_bytes=tuple(x * y for x, y in zip(residual, fractions, strict=True)),
        link=Link(latency_s=draw_from(st.sampled_from([0.0, 0.5, 5.0]))),
        links=links,
    )
    return draw_from(st.integers(1, 9)), costs, draw_from(st.floats(1, 2 * p + 1))


@settings(max_examples=25, deadline=None)
@given(chains())
def test_zb_with_random_costs(case: tuple[int, CostProfile, float]) -> None:
    check_zb(case)


@pytest.mark.soak
@settings(max_examples=1000, deadline=None)
@given(chains())
def test_zb_with_1000_random_costs(case: tuple[int, CostProfile, float]) -> None:
    check_zb(case)


def check_zb(case: tuple[int, CostProfile, float]) -> None:
    m, costs, limit = case
    p = costs.num_stages
    schedule = generate("zb", p, m, costs=costs, memory_limit=limit)
    check_schedule(schedule)
    timeline = simulate(schedule, costs)
    assert max(timeline.peak_activations) <= limit + 1e-6
    assert timeline.makespan >= lower_bound(schedule.placement, m, costs) * (1 - 1e-9)
    problem = Problem.of(schedule.placement, m, costs)
    draft = best_draft(problem, limit)
    assert timeline.makespan == pytest.approx(draft.makespan)
    assert timeline.max_span == pytest.approx(draft.span)
    for fixed in ("1f1b", "zb-h1", "zb-h2"):
        other = simulate(generate(fixed, p, m), costs)
        if max(other.peak_activations) <= limit - 1e-6:
            assert timeline.makespan <= other.makespan * (1 + 1e-6)


@given(st.integers(1, 5), st.integers(1, 9), st.floats(1, 11), st.sampled_from([0.0, 0.3, 4.0]))
def test_list_schedules_know_their_times(p: int, m: int, limit: float, comm: float) -> None:
    costs = CostProfile.uniform(p, f=2, b=3, w=1, comm=comm, w_residual=0.5)
    problem = Problem.of(one_to_one(p), m, costs)
    drafts = list(chain_drafts(problem, limit))
    assert len(drafts) == len(ONE_CHUNK)
    for draft in drafts[::3]:
        redraft = Retimer(problem).draft(draft.rows)
        assert redraft is not None
        assert (draft.makespan, draft.span, draft.peak) == pytest.approx((redraft.makespan, redraft.span, redraft.peak))
        assert draft.peak <= limit + 1e-6


def test_zb_improves_with_memory() -> None:
    for p, m in [(4, 12), (8, 24)]:
        times = [run(p, m, limit=x * p, f=18.5, b=18.1, w=9.3).makespan for x in (0.25, 0.5, 0.75, 1, 1.5, 2)]
        assert times == sorted(times, reverse=True)


def test_zb_uses_room_that_small_w_residuals_leave() -> None:
    full, thin = (run(8, 24, limit=1.5, w_residual=x) for x in (1.0, 0.1))
    assert thin.makespan < full.makespan
    assert max(thin.peak_activations) <= 1.5


@pytest.mark.parametrize(("family", "peak"), [("zb-1p", 4), ("zb-2p", 8), ("v-zb", 4), ("v-adaptive", 4)])
def test_orders_are_as_good_where_w_keeps_more_than_f(family: str, peak: int) -> None:
    """B hands more to W than F kept: memory is counted in what an activation takes at its largest. (A fixed limit of p left
    half of the forwards out.)"""
    chunks = 2 if family.startswith("v-") else 1
    equal = CostProfile.uniform(4 * chunks, chunks=chunks)
    larger = replace(equal, w_residual_bytes=tuple(1.16 * x for x in equal.residual_bytes))
    usual = simulate(generate(family, 4, 12, costs=equal), equal)
    timeline = simulate(generate(family, 4, 12, costs=larger), larger)
    assert timeline.makespan <= usual.makespan + 1e-9
    assert max(timeline.peak_activations) <= 1.16 * peak + 1e-9


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


def test_w_laid_anew_keep_the_order_of_f_and_b() -> None:
    shorter = 0
    for m in (5, 8, 16):
        for f, b, w in [(12.96, 13.22, 9.76), (18.5, 18.1, 9.3), (1, 3, 1)]:
            problem = Problem.of(one_to_one(4), m, CostProfile.uniform(4, f=f, b=b, w=w))
            fused = [["F"] * k + ["B", "W", "F"] * (m - k) + ["B", "W"] * k for k in (4, 3, 2, 1)]
            filling = WeightFilling(problem, 4)
            before = filling.draft(problem.codes(in_order("fused", m, fused)))
            assert before is not None
            after = refill_weights(filling, before, 30)
            assert after is not None
            assert after.peak <= 4 + 1e-9
            plain = [[code for code in row if code < 2 * 4 * m] for draft in (before, after) for row in draft.rows]
            assert plain[:4] == plain[4:]
            shorter += after.makespan < before.makespan
    assert shorter > 0


def test_a_cheap_fused_backward_is_used() -> None:
    split = CostProfile.uniform(4, f=1, b=1, w=1)
    cheap = replace(split, bw_s=(1.5,) * 4)
    schedule = generate("zb", 4, 12, costs=cheap, memory_limit=2)
    check_schedule(schedule)
    assert any(action.op == "BW" for rank in range(4) for action in schedule.actions(rank))
    assert (
        simulate(schedule, cheap).makespan
        < simulate(generate("zb", 4, 12, costs=split, memory_limit=2), split).makespan
    )
    problem = Problem.of(one_to_one(4), 12, split)
    draft = Retimer(problem).draft(problem.codes(generate("zb", 4, 12, costs=split)))
    assert draft is not None
    assert fuse_backwards(Retimer(problem), draft, 4) is draft


AUTHORS = [tuple(row) for row in json.loads(GOLDEN.joinpath("authors_zb.json").read_text())]


def assert_no_worse(name: str, p: int, m: int, fbw: list[float], comm: float, limit: float, *theirs: float) -> None:
    """Makespan and peak are not above those of the authors' order under the same limit; the longest span, which comes after the
    makespan, not by more than 2%."""
    costs = CostProfile.uniform(p, f=fbw[0], b=fbw[1], w=fbw[2], comm=comm)
    timeline = simulate(generate(name, p, m, costs=costs, memory_limit=limit if name == "zb" else None), costs)
    ours = (timeline.makespan, timeline.max_span, max(timeline.peak_activations))
    assert all(x <= y * slack for x, y, slack in zip(ours, theirs, (1 + 1e-9, 1.02, 1 + 1e-9), strict=True)), (
        name,
        p,
        m,
        fbw,
        comm,
        limit,
        ours,
        theirs,
    )


def test_no_worse_than_the_authors() -> None:
    """golden/authors_zb.json: family, p, m, F B W of a rank, transfer, limit; makespan, span and peak of their order."""
    for row in [row for row in AUTHORS if row[1] * row[2] <= 256][::8]:
        assert_no_worse(*row)


@pytest.mark.soak
def test_no_worse_than_the_authors_anywhere() -> None:
    for row in AUTHORS:
        assert_no_worse(*row)
