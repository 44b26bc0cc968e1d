"""Lower bounds: below every valid schedule, and tight where the optimum is known."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from math import inf

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule import (
    CostProfile,
    HostLink,
    Link,
    OpSpec,
    Placement,
    Schedule,
    bidirectional,
    circular,
    explicit,
    one_to_one,
    op_spec,
    parse_schedule,
    register_op,
    simulate,
    v_shape,
    wave,
    with_shared,
    with_vocabulary,
)
from jaxpipe.schedule.problem import B, F, Problem, W
from jaxpipe.search.bounds import lower_bound, rank_lower_bounds, span_lower_bound
from jaxpipe.search.retime import Retimer, Times, peaks
from jaxpipe.search.solve.offload_list import offload_candidates
from jaxpipe.search.solve.task import SolveTask
from tests.support.schedule_strategies import (
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
        with_vocabulary(one_to_one(2), barriers=1),
    ],
    ids=lambda p: p.kind,
)
@pytest.mark.parametrize("comm", [0.0, 0.5, 4.0])
@pytest.mark.parametrize("orders", [100, pytest.param(300, marks=pytest.mark.soak)])
def test_many_orders_of_small_problems_come_close_but_not_below(placement: Placement, comm: float, orders: int) -> None:
    """The best of many random orders of two microbatches lies within 30% of the bound, never below it."""
    costs = CostProfile.uniform(placement.num_stages, f=1, b=1.25, w=0.75, comm=comm)
    bound, span = lower_bound(placement, 2, costs), span_lower_bound(placement, 2, costs)
    timelines = [simulate(random_schedule(placement, 2, random.Random(seed)), costs) for seed in range(orders)]
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
    """Eight transfers of 10 s each way dominate: the first leaves at 1, the last needs F, B, transfer, B and W. A latency of 3
    s is paid once each way."""
    costs = replace(CostProfile.uniform(2), boundary_bytes=(10.0, 0.0), link=Link(0.0, 1.0))
    assert lower_bound(one_to_one(2), 8, costs) == 1 + 80 + 1 + 1 + 10 + 1 + 1
    assert simulate(one_f_one_b_rows(2, 8), costs).makespan >= 95
    assert simulate(gpipe_rows(2, 8), costs).makespan >= 95
    late = replace(costs, link=Link(3.0, 1.0))
    assert lower_bound(one_to_one(2), 8, late) == 95 + 2 * 3
    assert simulate(gpipe_rows(2, 8), late).makespan >= 101
    assert lower_bound(one_to_one(2), 8, CostProfile.uniform(2, comm=10.0)) == 1 + 10 + 8 * 2 + 10 + 1 + 1


def test_no_schedule_of_a_bidirectional_pipeline_is_charged_for_an_unused_flow() -> None:
    placement = bidirectional(3)
    costs = CostProfile.uniform(3)
    assert lower_bound(placement, 1, costs) == lower_bound(one_to_one(3), 1, costs)


@pytest.mark.parametrize("barriers", [1, 2])
def test_parts_of_a_head_bound_after_the_way_to_the_last_layer(barriers: int) -> None:
    """The last rank's work, but for its part of the embedding, once a microbatch has come there; with whole backwards the
    optimum is 7 (6 + 1 + 2) + 4 · 6 = 87."""
    placement = with_vocabulary(one_to_one(5), barriers=barriers)
    costs = CostProfile.on(placement, f=2, b=2, w=2, head=(1, 2))
    assert lower_bound(placement, 7, costs) == 4 * 2 + 7 * (6 + 1 + 2)


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
    with pytest.raises(ScheduleError, match=r"3 stages.*2"):
        lower_bound(one_to_one(2), 1, CostProfile.uniform(3))
    with pytest.raises(ScheduleError, match="number of microbatches is 0"):
        span_lower_bound(one_to_one(2), 0, CostProfile.uniform(2))


# --- with a memory limit --------------------------------------------------------------------------------------------------


def assert_not_below(problem: Problem, costs: CostProfile, times: Times, limit: tuple[float, ...]) -> None:
    placement, m = problem.placement, problem.num_microbatches
    near = 1 - 1e-9
    assert times.makespan >= lower_bound(placement, m, costs, memory_limit=limit) * near
    assert times.span >= span_lower_bound(placement, m, costs, memory_limit=limit) * near
    for first, last, bound in zip(
        times.first_s, times.last_s, rank_lower_bounds(placement, m, costs, memory_limit=limit), strict=True
    ):
        assert last - first >= bound * near - 1e-12


def improved(problem: Problem, rows: list[list[int]], rng: random.Random, memory_weight: float) -> list[list[int]]:
    """Return ``rows`` after random moves that did not lengthen makespan + span + weight × memory: near the optimum if small."""
    retimer = Retimer(problem)

    def score() -> float:
        times = retimer.times(rows)
        return inf if times.deadlocked else times.makespan + times.span + memory_weight * sum(peaks(problem, rows))

    best = score()
    for _ in range(120):
        row = rng.choice(rows)
        source, target = rng.randrange(len(row)), rng.randrange(len(row))
        code = row.pop(source)
        row.insert(target, code)
        ready = all(
            row.index(problem.code(B, k, i)) < row.index(problem.code(W, k, i))
            for op, k, i in map(problem.decode, row)
            if op == W
        )
        value = score() if ready else inf
        if value > best:
            row.remove(code)
            row.insert(source, code)
        else:
            best = value
    return rows


times_of = st.sampled_from([0.0, 0.5, 1.0, 1.0, 1.0, 2.0, 3.0])


@st.composite
def memory_costs(draw: st.DrawFn, n: int) -> CostProfile:
    even = draw(st.booleans())

    def each(values: st.SearchStrategy[float]) -> tuple[float, ...]:
        return (draw(values),) * n if even else draw(st.tuples(*[values] * n))

    f, b, w = each(times_of), each(times_of), each(times_of)
    residual = each(st.sampled_from([1.0, 1.0, 0.4, 2.0]))
    w_fractions = each(st.sampled_from([1.0, 1.0, 0.5, 0.0, 1.5]))
    copy_times = each(st.sampled_from([0.0, 0.1, 0.5, 2.0]))
    fused = draw(st.sampled_from([1.0, 1.0, 0.7]))
    part = each(st.sampled_from([1.0, 1.0, 0.5]))
    costs = CostProfile.uniform(n, comm=draw(st.sampled_from([0.0, 0.0, 0.3, 2.0])))
    return replace(
        costs,
        f_s=f,
        b_s=b,
        w_s=w,
        bw_s=tuple(fused * (x + y) for x, y in zip(b, w, strict=True)),
        residual_bytes=residual,
        w_residual_bytes=tuple(x * y for x, y in zip(residual, w_fractions, strict=True)),
        offloadable_bytes=tuple(x * y for x, y in zip(residual, part, strict=True)),
        offload_s=copy_times,
        load_s=copy_times,
        host=HostLink(mode=draw(st.sampled_from(["duplex", "shared"]))),
    )


PLACEMENTS = [one_to_one, one_to_one, v_shape, lambda p: circular(p, 2), lambda p: wave(p, 3), bidirectional]


def check_orders_within_their_memory(make: object, p: int, m: int, seed: int, data: st.DataObject) -> None:
    """The peaks of an order as the limit: neither a random order is below the bound, nor what local search makes of it."""
    placement: Placement = make(p)  # type: ignore[operator]
    costs = data.draw(memory_costs(placement.num_stages))
    rng = random.Random(seed)
    problem = Problem.of(placement, m, costs)
    rows = problem.codes(random_schedule(placement, m, rng, split=rng.choice(["any", "split"])))
    assert_not_below(problem, costs, Retimer(problem).times(rows), peaks(problem, rows))
    rows = improved(problem, rows, rng, memory_weight=rng.choice([0.0, 1.0, 5.0]))
    assert_not_below(problem, costs, Retimer(problem).times(rows), peaks(problem, rows))


ORDERS = given(st.sampled_from(PLACEMENTS), st.integers(1, 4), st.integers(1, 6), st.integers(0, 10**6), st.data())
test_no_order_within_its_memory_is_below = settings(max_examples=60)(ORDERS(check_orders_within_their_memory))
test_no_order_is_below_at_length = pytest.mark.soak(
    settings(max_examples=3000, deadline=None)(ORDERS(check_orders_within_their_memory))
)


def check_orders_that_offload(make: object, p: int, m: int, seed: int, data: st.DataObject) -> None:
    placement: Placement = make(p)  # type: ignore[operator]
    costs = data.draw(memory_costs(placement.num_stages))
    schedule = random_schedule(placement, m, random.Random(seed), offload=0.7, braid=0.2)
    timeline = simulate(schedule, costs)
    limit = timeline.peak_activations
    assert timeline.makespan >= lower_bound(placement, m, costs, memory_limit=limit, offload=True) * (1 - 1e-9)
    assert timeline.max_span >= span_lower_bound(placement, m, costs, memory_limit=limit, offload=True) * (1 - 1e-9)


OFFLOADING = given(st.sampled_from(PLACEMENTS), st.integers(1, 4), st.integers(1, 5), st.integers(0, 10**6), st.data())
test_no_order_that_offloads_is_below = settings(max_examples=60)(OFFLOADING(check_orders_that_offload))
test_no_order_that_offloads_is_below_at_length = pytest.mark.soak(
    settings(max_examples=1000, deadline=None)(OFFLOADING(check_orders_that_offload))
)


def all_rows(problem: Problem, rank: int, limit: float) -> Iterator[list[int]]:
    """Yield every order of F, B and W of one rank, each in microbatch order, that holds at most ``limit`` activations."""
    (k,) = problem.replicas_of(rank)
    m = problem.num_microbatches
    stack: list[tuple[list[int], int, int, int]] = [([], 0, 0, 0)]
    while stack:
        row, f, b, w = stack.pop()
        if w == m:
            yield row
        if f < m and f + 1 - w <= limit:
            stack.append(([*row, problem.code(F, k, f)], f + 1, b, w))
        if b < f:
            stack.append(([*row, problem.code(B, k, b)], f, b + 1, w))
        if w < b:
            stack.append(([*row, problem.code(W, k, w)], f, b, w + 1))


@pytest.mark.parametrize(
    ("p", "m", "limit", "fbw"),
    [
        (2, 3, 1, (1, 1, 1)),
        (2, 3, 2, (2, 3, 1)),
        (2, 4, 2, (1, 1, 1)),
        (2, 4, 2, (3, 2, 1)),
        (3, 3, 2, (1, 1, 1)),
        (2, 4, 2, (2, 2, 1)),
    ],
)
def test_equals_the_optimum_of_all_orders(p: int, m: int, limit: float, fbw: tuple[float, float, float]) -> None:
    f, b, w = fbw
    costs = CostProfile.uniform(p, f=f, b=b, w=w)
    problem = Problem.of(one_to_one(p), m, costs)
    retimer = Retimer(problem)
    all_times = [
        retimer.times(rows) for rows in itertools.product(*[list(all_rows(problem, r, limit)) for r in range(p)])
    ]
    valid = [times for times in all_times if not times.deadlocked]
    assert min(t.makespan for t in valid) == pytest.approx(lower_bound(one_to_one(p), m, costs, memory_limit=limit))
    assert min(t.span for t in valid) == pytest.approx(span_lower_bound(one_to_one(p), m, costs, memory_limit=limit))


# FACTS.md, CP-SAT table: p, m, limit, best known span; and whether our bound equals it, which proves it optimal
@pytest.mark.parametrize(
    ("p", "m", "limit", "bound", "best"),
    [
        (4, 16, 4, 51, 51),
        (4, 16, 2, 81, 81),
        (4, 32, 2, 161, 161),
        (8, 16, 4, 79, 79),
        (8, 16, 8 / 3, 145, 145),
        (8, 32, 4, 151, 151),
        (16, 64, 8, 291, 293),
        (32, 128, 16, 571, 575),
    ],
)
def test_one_chunk_as_strong_as_known(p: int, m: int, limit: float, bound: float, best: float) -> None:
    least = span_lower_bound(one_to_one(p), m, CostProfile.uniform(p), memory_limit=limit)
    assert bound - EPS <= least <= best + EPS


@pytest.mark.parametrize(("p", "m"), [(4, 16), (8, 32), (16, 64)])
def test_appendix_e2(p: int, m: int) -> None:
    """6m + 6p − 3k − 1 for peak k chunks of a V at unit chunk costs (controllable-memory.txt E.2), in makespan and span."""
    costs = CostProfile.uniform(2 * p, chunks=2, f=2, b=2, w=2)
    for k in range(2 * p // 3 + 1, 2 * p):
        e2 = 6 * m + 6 * p - 3 * k - 1
        assert lower_bound(v_shape(p), m, costs, memory_limit=k / 2) >= e2 - EPS
        assert span_lower_bound(v_shape(p), m, costs, memory_limit=k / 2) >= e2 - EPS


def test_memory_times_time() -> None:
    """Far below half of 1F1B's memory a V needs what Little's law says: 4p + 4 chunk × time a microbatch, over the limit."""
    p, m, k = 8, 64, 4
    costs = CostProfile.uniform(2 * p, chunks=2, f=2, b=2, w=2)
    assert span_lower_bound(v_shape(p), m, costs, memory_limit=k / 2) > m * (4 * p + 4) / k


@pytest.mark.parametrize(
    ("p", "m", "limit", "k", "bound"), [(16, 64, 8, 1, 213), (16, 64, 4, 1, 218), (32, 128, 8, 1, 437)]
)
def test_offload_as_strong_as_known(p: int, m: int, limit: float, k: float, bound: float) -> None:
    """FACTS.md: round trip k × (F + B + W), one lane for both ways, 3/4 kept for W; optimal at the first two."""
    costs = replace(CostProfile.uniform(p, offload_time=3 * k, w_residual=0.75), host=HostLink(mode="shared"))
    assert span_lower_bound(one_to_one(p), m, costs, memory_limit=limit, offload=True) == pytest.approx(bound)


def test_offload_where_microbatches_that_stay_make_the_lane_idle() -> None:
    """Room for two: while one stays for its trip, the others come one by one, and the lane waits for their F, B and W.

    165 without that argument; one rank alone can be done in 189, and the best schedule found takes 194.
    """
    costs = replace(CostProfile.uniform(8, offload_time=6), host=HostLink(mode="shared"))
    assert 173 - EPS <= lower_bound(one_to_one(8), 32, costs, memory_limit=2, offload=True) <= 189


def best_span_with_offload(m: int, costs: CostProfile, limit: float) -> float:
    task = SolveTask(one_to_one(2), m, costs, memory_limit=limit, offload=True, objective="span")
    *_, best = offload_candidates(task, 0.0, lambda: False, most=60)
    return simulate(best, costs).max_span


@pytest.mark.parametrize("w_residual", [1.0, 0.5])
@pytest.mark.parametrize(("out", "back"), [(3.0, 3.0), (2.0, 2.0), (1.0, 4.0)])
@pytest.mark.parametrize(("limit", "comm", "m"), [(2, 8, 12), (2, 4, 8), (2.5, 14, 12), (3, 14, 16)])
def test_no_policy_that_offloads_is_below(
    w_residual: float, out: float, back: float, limit: float, comm: float, m: int
) -> None:
    """Slow links between two ranks: long trips of which few fit."""
    costs = CostProfile.uniform(2, comm=comm, w_residual=w_residual)
    costs = replace(costs, offload_s=(out,) * 2, load_s=(back,) * 2, host=HostLink(mode="shared"))
    bound = span_lower_bound(one_to_one(2), m, costs, memory_limit=limit, offload=True)
    assert bound - EPS <= best_span_with_offload(m, costs, limit)


@pytest.mark.parametrize(("m", "f", "best"), [(2, 2, 11), (4, 1, 16), (4, 2, 20)])
def test_half_of_one_beside_another(m: int, f: float, best: float) -> None:
    """Limit 1½: one activation, and half of one whose other half has left, are there at once."""
    costs = CostProfile.uniform(2, f=f)
    costs = replace(costs, offloadable_bytes=(0.5,) * 2, offload_s=(1.0,) * 2, load_s=(0.0,) * 2)
    costs = replace(costs, host=HostLink(mode="shared"))
    assert best_span_with_offload(m, costs, 1.5) <= best
    assert span_lower_bound(one_to_one(2), m, costs, memory_limit=1.5, offload=True) <= best + EPS


def test_more_memory_never_raises_a_bound_and_plenty_is_none() -> None:
    for placement in (one_to_one(5), v_shape(4), circular(3, 3)):
        costs = CostProfile.uniform(placement.num_stages, chunks=placement.num_chunks, f=3, b=4, w=2, comm=0.3)
        for offload in (False, True):
            bounds = [
                lower_bound(placement, 9, costs, memory_limit=limit, offload=offload) for limit in (1, 1.5, 2, 3, 5, 9)
            ]
            assert bounds == sorted(bounds, reverse=True)
            assert bounds[-1] == lower_bound(placement, 9, costs)
            assert bounds[0] > bounds[-1] or offload


def test_limits_that_nothing_fits_and_limits_per_rank() -> None:
    costs = CostProfile.uniform(4, chunks=2)
    assert lower_bound(v_shape(2), 3, costs, memory_limit=0.9) == inf
    assert lower_bound(v_shape(2), 3, costs, memory_limit=0.9, offload=True) < inf
    assert rank_lower_bounds(v_shape(2), 3, costs, memory_limit=[2, 0.5])[1] == inf
    one = lower_bound(one_to_one(4), 12, CostProfile.uniform(4), memory_limit=2)
    assert lower_bound(one_to_one(4), 12, CostProfile.uniform(4), memory_limit=[2, 9, 9, 9]) == one
    with pytest.raises(ScheduleError, match=r"3 memory.*2 ranks"):
        lower_bound(v_shape(2), 3, costs, memory_limit=[1, 1, 1])
    with pytest.raises(ScheduleError, match="memory limits are -1, -1"):
        lower_bound(v_shape(2), 3, costs, memory_limit=-1)


def test_limit_is_ignored_for_stages_on_several_ranks() -> None:
    placement = with_shared(one_to_one(2), [1])
    costs = CostProfile.uniform(2)
    assert lower_bound(placement, 3, costs, memory_limit=1) == lower_bound(placement, 3, costs)
