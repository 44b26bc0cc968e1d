"""The exact CP-SAT model against exhaustive search, the simulator and itself."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from functools import cache
from typing import Any, Literal, get_args

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule.check import check_schedule
from jaxpipe.schedule.costs import CostProfile, HostLink, Link
from jaxpipe.schedule.ir import Action, Schedule
from jaxpipe.schedule.placement import (
    Placement,
    bidirectional,
    circular,
    explicit,
    one_to_one,
    v_shape,
    wave,
    with_shared,
)
from jaxpipe.schedule.simulate import simulate
from jaxpipe.schedule.text import parse_schedule
from jaxpipe.search.budget import Budget, common_step, memory_units, time_grid
from jaxpipe.search.solve.neighbourhoods import ExactResult, NeighbourhoodSearch, solve_exact
from jaxpipe.search.solve.task import Objective, SolveTask, most_offloaded
from tests.support.exhaustive_search import Case, optimum
from tests.support.processes import LONG_S
from tests.support.schedule_strategies import one_f_one_b_rows


def solved(task: SolveTask, **options: Any) -> ExactResult:
    """Return an answer that has passed every check there is."""
    result = solve_exact(task, **{"time_limit_s": LONG_S, "workers": 1, **options})
    if result.schedule is not None:
        check_schedule(result.schedule)
        timeline = simulate(result.schedule, task.costs)
        assert timeline == result.timeline
        value = timeline.max_span if task.objective == "span" else timeline.makespan
        assert result.value == value
        assert task.fits(timeline)
        assert result.lower_bound <= value
    return result


def agrees(result: ExactResult) -> None:
    """Check that the simulator confirms what the model proves."""
    assert result.status == "optimal"
    assert result.lower_bound == pytest.approx(result.value, rel=1e-9)


# Against exhaustive search.


@cache
def best_of(case: Case) -> int | None:
    """Return the optimum, searched once."""
    return optimum(case, at_most=100)


def problem_of(case: Case) -> SolveTask:
    """Return the same problem in the package's terms, limits in bytes."""
    n = case.stages
    share = [sum(case.held[s] for s in range(n) if case.rank[s] == r) for r in range(case.ranks)]
    assert all(x > 0 for x in share)
    costs = CostProfile(
        f_s=case.f,
        b_s=case.b,
        w_s=case.w,
        bw_s=case.bw or tuple(b + w for b, w in zip(case.b, case.w, strict=True)),
        residual_bytes=case.held,
        w_residual_bytes=case.w_held,
        offloadable_bytes=case.leaves or case.held,
        offload_s=case.o or (0.0,) * n,
        load_s=case.l or (0.0,) * n,
        boundary_bytes=(case.occupied,) * n,
        link=Link(case.comm - case.occupied, 1.0),
        host=HostLink(
            mode="shared" if case.shared else "duplex", groups=(tuple(range(case.ranks)),) if case.group else ()
        ),
        memory_limit_bytes=tuple(map(float, case.limit)),
    )
    placement = explicit(case.ranks, case.rank)
    return SolveTask(
        placement,
        case.microbatches,
        costs,
        offload=bool(case.leaves),
        objective="span" if case.span else "makespan",
        offloads_in_flight=case.in_flight,
    )


def uniform(ranks: int, microbatches: int, limit: int, **options: Any) -> Case:
    ones = (1,) * ranks
    return Case(tuple(range(ranks)), microbatches, ones, ones, ones, ones, ones, (limit,) * ranks, **options)


def away(ranks: int, o: int = 1, l: int = 1, **options: Any) -> dict[str, Any]:  # noqa: E741
    return {"leaves": (1,) * ranks, "o": (o,) * ranks, "l": (l,) * ranks, **options}


V2, CIRCULAR2 = (0, 1, 1, 0), (0, 1, 0, 1)

PLAIN = {
    "room for all": uniform(3, 4, 3),
    "room for two": uniform(3, 4, 2),
    "room for one": uniform(3, 3, 1),
    "span": uniform(3, 4, 2, span=True),
    "span, three": uniform(3, 4, 3, span=True),
    "comm": uniform(3, 3, 2, comm=1),
    "slow links": uniform(3, 3, 3, comm=3, occupied=3),
    "slow links, span": uniform(2, 4, 2, comm=2, occupied=2, span=True),
    "late": uniform(3, 3, 3, comm=3),
    "slow and late": uniform(3, 3, 3, comm=4, occupied=2),
    "uneven": Case((0, 1, 2), 4, (2, 1, 3), (3, 2, 1), (1, 4, 2), (2, 2, 2), (1, 2, 1), (4, 4, 4)),
    "uneven, tight": Case((0, 1, 2), 3, (2, 1, 3), (3, 2, 1), (1, 4, 2), (3, 2, 2), (1, 1, 2), (4, 3, 4), comm=1),
    "half kept": Case((0, 1), 4, (1, 1), (1, 1), (1, 1), (2, 2), (1, 1), (3, 2)),
    "half kept, span": Case((0, 1), 4, (2, 1), (1, 2), (1, 1), (2, 2), (1, 1), (3, 3), span=True),
    "v": Case(V2, 3, (1,) * 4, (1,) * 4, (1,) * 4, (1,) * 4, (1,) * 4, (3, 3)),
    "v, tight": Case(V2, 4, (1,) * 4, (1,) * 4, (1,) * 4, (1,) * 4, (1,) * 4, (2, 2)),
    "v, uneven": Case(V2, 3, (1, 2, 1, 1), (1, 2, 2, 1), (1, 1, 1, 2), (2, 1, 1, 1), (1, 1, 0, 1), (4, 3), comm=1),
    "v, span": Case(V2, 3, (1, 2, 1, 1), (1, 2, 2, 1), (1, 1, 1, 2), (1,) * 4, (1,) * 4, (3, 3), span=True),
    "v, slow links": Case(
        V2, 3, (1, 1, 1, 1), (1, 1, 1, 1), (1, 1, 1, 1), (1,) * 4, (1,) * 4, (4, 4), comm=2, occupied=2
    ),
    "v, late": Case(V2, 3, (1, 1, 1, 1), (1, 1, 1, 1), (1, 1, 1, 1), (1,) * 4, (1,) * 4, (4, 4), comm=2),
    "circular": Case(CIRCULAR2, 3, (1,) * 4, (1,) * 4, (1,) * 4, (1,) * 4, (1,) * 4, (3, 3)),
    "circular, slow links": Case(
        CIRCULAR2, 3, (1,) * 4, (1,) * 4, (2,) * 4, (1,) * 4, (1,) * 4, (4, 4), comm=2, occupied=2
    ),
    "circular, late": Case(CIRCULAR2, 2, (1,) * 4, (1,) * 4, (2,) * 4, (1,) * 4, (1,) * 4, (4, 4), comm=4, occupied=1),
    "ranks swapped": Case((1, 0, 2), 3, (1, 2, 1), (1, 1, 2), (1, 1, 1), (1,) * 3, (1,) * 3, (2, 2, 2)),
    "full backwards": Case((0, 1), 3, (1, 1), (2, 2), (2, 2), (1, 1), (1, 1), (2, 1), bw=(3, 3)),
    "full backwards, three": Case(
        (0, 1, 2), 3, (2,) * 3, (2,) * 3, (2,) * 3, (2,) * 3, (1,) * 3, (3,) * 3, bw=(3, 4, 3)
    ),
}

OFFLOADED = {
    "one": uniform(2, 2, 1, **away(2)),
    "one, three microbatches": uniform(2, 3, 1, **away(2)),
    "one, three ranks": uniform(3, 2, 1, **away(3)),
    "one, span": uniform(2, 3, 1, **away(2), span=True),
    "two, four microbatches": uniform(2, 4, 2, **away(2)),
    "slow": uniform(2, 3, 1, **away(2, 2, 3)),
    "fast loads": Case((0, 1), 3, (2, 2), (2, 2), (2, 2), (1, 1), (1, 1), (1, 1), **away(2, 2, 1)),
    "half leaves": Case((0, 1), 3, (1, 2), (2, 1), (1, 1), (2, 2), (1, 1), (3, 2), **away(2, 1, 2)),
    "all leaves, half kept": Case(
        (0, 1), 3, (1, 2), (2, 1), (1, 1), (2, 2), (1, 1), (3, 2), leaves=(2, 2), o=(2, 1), l=(1, 2)
    ),
    "leaves less than kept": Case(
        (0, 1), 3, (1, 1), (2, 1), (1, 1), (3, 3), (2, 2), (4, 3), leaves=(1, 1), o=(1, 1), l=(1, 1)
    ),
    "there and back": Case((0, 1, 0), 2, (1,) * 3, (1,) * 3, (1,) * 3, (1,) * 3, (1,) * 3, (2, 1), **away(3)),
    "two chunks, one rank": Case((0, 0), 2, (1, 2), (1, 1), (2, 1), (1, 1), (1, 1), (2,), **away(2)),
    "comm": uniform(2, 3, 1, **away(2), comm=1),
}  # fmt: skip

WAITING = Case((0, 1), 2, (2, 2), (3, 3), (1, 1), (1, 1), (1, 0), (1, 1), comm=1, **away(2, 1, 2))
DUPLEX = {
    name: replace(case, shared=False)
    for name, case in OFFLOADED.items()
    if name not in ("one, three ranks", "there and back")
}
GROUPED = {name: replace(OFFLOADED[name], group=True) for name in ("one", "slow", "half leaves")}


@pytest.mark.parametrize("name", PLAIN)
def test_optimum_is_that_of_exhaustive_search(name: str) -> None:
    case = PLAIN[name]
    result = solved(problem_of(case))
    best = best_of(case)
    if best is None:
        assert result.status == "infeasible"
    else:
        agrees(result)
        assert result.value == best


@pytest.mark.parametrize("name", OFFLOADED)
def test_optimum_with_offload_is_that_of_exhaustive_search(name: str) -> None:
    case = OFFLOADED[name]
    result = solved(problem_of(case))
    agrees(result)
    assert result.value == best_of(case)


@pytest.mark.parametrize("name", [*DUPLEX, *GROUPED])
def test_two_lanes_and_groups_are_bounded_by_exhaustive_search(name: str) -> None:
    """Rows can't express an L that waits for another's O while a slot runs, or who goes first in a group; that may cost
    time."""
    for case in (cases[name] for cases in (DUPLEX, GROUPED) if name in cases):
        result = solved(problem_of(case))
        best = best_of(case)
        assert best is not None
        assert result.lower_bound <= best <= result.value
        assert result.status == "optimal"


CHUNKS = Case((0, 0, 1), 2, (1, 1, 2), (1,) * 3, (1,) * 3, (1,) * 3, (1,) * 3, (1, 1), **away(3))


@pytest.mark.parametrize("case", [OFFLOADED["fast loads"], OFFLOADED["there and back"], OFFLOADED["comm"], CHUNKS])
def test_optimum_with_few_offloads_in_flight_is_that_of_exhaustive_search(case: Case) -> None:
    one = replace(case, in_flight=1)
    result = solved(problem_of(one))
    agrees(result)
    assert result.value == best_of(one) > (best_of(case) or 0)
    assert result.timeline is not None
    assert most_offloaded(result.timeline) <= 1
    without = solved(problem_of(replace(case, in_flight=0)))
    assert without.value == (best_of(replace(case, leaves=())) or float("inf"))


def test_offload_saves_time_and_waits_for_room() -> None:
    """Only offload is that fast, and a forward waits for an offload to end."""
    result = solved(problem_of(WAITING))
    assert result.schedule is not None
    assert result.value == best_of(WAITING)
    resident = best_of(replace(WAITING, leaves=()))
    assert resident is not None
    assert result.value < resident
    assert any(a.op == "S" for a in result.schedule.actions(0))


OUT_OF_ORDER = """\
# jaxpipe schedule 1
name: out-of-order
microbatches: 4
placement: explicit ranks=3 flow=0,1,2
edges: chain
rank 0: F0.0 F0.1 O0.1 S0.1 F0.2 O0.2 B0.0 L0.1 W0.0 F0.3 B0.1 W0.1 L0.2 B0.3 W0.3 B0.2 W0.2
rank 1: F1.0 F1.1 B1.0 W1.0 F1.2 B1.1 W1.1 F1.3 B1.3 W1.3 B1.2 W1.2
rank 2: F2.0 B2.0 W2.0 F2.1 B2.1 W2.1 F2.2 B2.2 W2.2 F2.3 B2.3 W2.3
"""


def test_with_offload_the_order_of_microbatches_may_cost_time() -> None:
    """Against `optpipe.txt` section 4.1.1: the last to go forward is the first to come back, so that what is away can stay."""
    ones = (1, 1, 1)
    o, l = (3, 1, 2), (4, 3, 4)  # noqa: E741
    case = Case((0, 1, 2), 4, (2, 1, 1), (3, 3, 1), (3, 2, 3), ones, ones, (2, 2, 2), leaves=ones, o=o, l=l)
    task = problem_of(case)
    timeline = simulate(parse_schedule(OUT_OF_ORDER), task.costs)
    assert task.fits(timeline)
    ordered = solved(task)
    assert timeline.makespan == 35 < ordered.lower_bound == 36
    assert not ordered.every_order
    assert ordered.schedule is not None
    *_, best = NeighbourhoodSearch(task, ordered.schedule, 1).run(Budget(10.0, reproducible=True), 35.0)
    assert simulate(best, task.costs).makespan == 35, "neighbourhoods leave the order"
    assert solved(replace(task, offload=False), time_limit_s=1.0).every_order


# Every kind of answer.

FIGURE_4 = SolveTask(
    one_to_one(4),
    8,
    replace(CostProfile.uniform(4, offload_time=2.0), host=HostLink(mode="shared")),
    memory_limit=3.0,
    offload=True,
)
"""`optpipe.txt` figure 4: equal times, room for three activations."""


def test_toy_of_figure_4_is_solved() -> None:
    result = solved(FIGURE_4, workers=2)
    agrees(result)
    assert result.value == 28.0


@pytest.mark.parametrize("objective", get_args(Objective))
def test_hint_is_never_lost(objective: Objective) -> None:
    task = SolveTask(one_to_one(4), 6, CostProfile.uniform(4), 2.0, objective=objective)
    unhinted = solved(task)
    for schedule in (one_f_one_b_rows(4, 6), serial(one_to_one(4), 6), unhinted.schedule):
        result = solved(task, hint=schedule, lower_bound=unhinted.lower_bound)
        assert result.status == "optimal"
        assert result.value == unhinted.value


def serial(placement: Placement, microbatches: int) -> Schedule:
    """Return one microbatch after the other, with full backwards."""
    rows: list[list[Action]] = [[] for _ in range(placement.num_ranks)]
    stages = range(placement.num_stages)
    for i in range(microbatches):
        for op, way in (("F", stages), ("BW", reversed(stages))):
            for s in way:
                rows[placement.ranks(s, i)[0]].append(Action(op, s, i))
    return Schedule("serial", placement, microbatches, tuple(map(tuple, rows)))


def test_hint_alone_when_there_is_no_time() -> None:
    task = SolveTask(one_to_one(4), 6, CostProfile.uniform(4), 1.0)
    result = solved(task, hint=serial(one_to_one(4), 6), time_limit_s=0.5)
    assert result.value <= simulate(serial(one_to_one(4), 6), task.costs).makespan


def test_hint_with_offload_is_a_solution_of_the_model() -> None:
    optimum = solved(FIGURE_4, workers=2)
    second = solved(FIGURE_4, hint=optimum.schedule, lower_bound=optimum.value)
    agrees(second)
    assert second.value == optimum.value


def test_nothing_keeps_the_limit() -> None:
    result = solve_exact(SolveTask(one_to_one(2), 2, CostProfile.uniform(2), 0.5), time_limit_s=LONG_S)
    assert result.status == "infeasible"
    assert result.schedule is None


def test_workspace_and_cotangents_count_in_bytes() -> None:
    """A limit in bytes holds with what only runs for a while, and costs time."""
    costs = replace(
        CostProfile.uniform(2, w_residual=0.5),
        cotangent_bytes=(0.5, 0.5),
        temp_bytes=(("F", (1.0, 1.0)), ("W", (0.25, 0.0))),
        param_bytes=(3.0, 3.0),
        memory_limit_bytes=(5.0, 5.0),
    )
    result = solved(SolveTask(one_to_one(2), 4, costs))
    agrees(result)
    assert result.timeline is not None
    assert max(result.timeline.peak_bytes) <= 5.0
    free = solved(SolveTask(one_to_one(2), 4, replace(costs, memory_limit_bytes=())))
    assert free.value < result.value


def test_whole_backwards_may_be_all_that_fits() -> None:
    """B adds cotangents that W reads, BW does not: with room for a residual alone it is the only way, however long it takes."""
    costs = replace(CostProfile.uniform(2), cotangent_bytes=(1.0, 1.0), memory_limit_bytes=(1.0, 1.0), bw_s=(2.0, 2.5))
    result = solved(SolveTask(one_to_one(2), 2, costs))
    agrees(result)
    assert result.schedule is not None
    assert [a.op for a in result.schedule.actions(0)] == ["F", "BW"] * 2


def test_flows_of_both_directions() -> None:
    task = SolveTask(bidirectional(2), 4, CostProfile.uniform(2), 2.0)
    agrees(solved(task))
    assert solved(replace(task, objective="span")).status in ("optimal", "feasible")


@pytest.mark.parametrize("placement", [v_shape(2), circular(2, 2), wave(2, 2)], ids=lambda p: p.kind)
def test_chunks(placement: Placement) -> None:
    costs = CostProfile.uniform(placement.num_stages, chunks=placement.num_chunks, comm=0.1, w_residual=0.5)
    agrees(solved(SolveTask(placement, 3, costs, 1.5), workers=2))


def test_task_that_has_no_model() -> None:
    with pytest.raises(ScheduleError, match="chain"):
        solve_exact(SolveTask(with_shared(one_to_one(2), [1]), 2, CostProfile.uniform(2)), time_limit_s=1.0)
    with pytest.raises(ScheduleError, match="at least 1"):
        solve_exact(SolveTask(one_to_one(2), 0, CostProfile.uniform(2)), time_limit_s=1.0)


# Running.


def test_same_seed_same_schedule() -> None:
    task = SolveTask(one_to_one(4), 8, CostProfile.uniform(4, f=1.0, b=1.3, w=0.7), 2.0)
    for workers in (1, 2):
        schedules = {
            str(solve_exact(task, time_limit_s=1.0, seed=7, workers=workers, deterministic=True).schedule)
            for _ in range(2)
        }
        assert len(schedules) == 1


def test_order_of_microbatches_changes_no_optimum_here() -> None:
    for case in (PLAIN["room for two"], PLAIN["v, span"], OFFLOADED["one"], OFFLOADED["half leaves"]):
        result = solved(problem_of(case), every_order=True)
        assert result.value == best_of(case)
        assert result.status == "optimal"


def test_parallel_search_keeps_reservoirs() -> None:
    """OR-Tools' violation search does not see reservoirs that are kept whole; it is switched off."""
    assert solved(SolveTask(one_to_one(4), 16, CostProfile.uniform(4), 1.0), workers=2).schedule is not None


# Whole numbers.


@given(st.lists(st.integers(1, 2000), min_size=1, max_size=9), st.sampled_from([1.0, 0.1, 1e-3, 1 / 3, 0.7e-6]))
def test_common_step_is_found(multiples: list[int], unit: float) -> None:
    step = common_step([x * unit for x in multiples])
    assert step is not None
    for x in multiples:
        assert x * unit / step == pytest.approx(round(x * unit / step), rel=1e-9)


@given(st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=9))
def test_rounded_ticks_are_no_longer_than_what_they_stand_for(seconds: list[float]) -> None:
    grid = time_grid(seconds, 100 * sum(seconds))
    for x in seconds:
        assert grid.seconds(grid.of(x)) <= x * (1 + 1e-9)
        assert grid.seconds(grid.of(x)) >= x - (1e-9 * x if grid.exact else grid.step_s)


@given(st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=9), st.floats(0.5, 5.0))
def test_what_fits_in_units_fits(sizes: list[float], limit: float) -> None:
    units = memory_units(sizes, limit)
    assert sum(map(units.size, sizes)) > units.limit(limit) or sum(sizes) <= limit * (1 + 1e-8)


def test_uneven_costs_have_no_common_step() -> None:
    assert common_step([0.123456789123, 0.2718281828459]) is None
    with pytest.raises(ScheduleError, match="differ too much"):
        time_grid([1e-12, 1.23456789123456e3], 1e18)


@settings(max_examples=5)
@given(st.integers(0, 2**32 - 1), st.booleans(), st.sampled_from(["makespan", "span"]))
def test_real_costs(seed: int, offload: bool, objective: Literal["makespan", "span"]) -> None:
    """Costs on no grid: limits hold in real numbers, the bound stays below and within the rounding."""
    rng = random.Random(seed)
    placement = rng.choice([one_to_one(2), one_to_one(3), v_shape(2)])
    n = placement.num_stages

    def each(low: float, high: float) -> tuple[float, ...]:
        return tuple(rng.uniform(low, high) for _ in range(n))

    residual = each(0.5, 1.5)
    costs = CostProfile(
        f_s=each(0.5, 2),
        b_s=each(0.5, 2),
        w_s=each(0.5, 2),
        bw_s=each(2, 4),
        residual_bytes=residual,
        w_residual_bytes=tuple(x * rng.random() for x in residual),
        offloadable_bytes=tuple(x * rng.random() for x in residual),
        offload_s=each(0.1, 1),
        load_s=each(0.1, 1),
        link=Link(rng.choice([0.0, 0.1, 3.0])),
        host=HostLink(mode=rng.choice(["shared", "duplex"])),
    )
    task = SolveTask(placement, 3, costs, rng.uniform(1, 2), offload, objective)
    began = time.perf_counter()
    result = solved(task, time_limit_s=1.5, hint=serial(placement, 3))
    wall_s = time.perf_counter() - began
    assert result.schedule is not None
    assert result.value <= simulate(serial(placement, 3), costs).makespan
    if wall_s < 1.4:  # the solver did not run out of its time
        assert result.value <= result.lower_bound * 1.01
