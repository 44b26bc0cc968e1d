"""List scheduling with offload: valid, within the limit, never below the bound, and optimal where the host lane keeps up."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpipe.cli import main
from jaxpipe.errors import ScheduleError
from jaxpipe.schedule import (
    CostProfile,
    HostLink,
    Placement,
    Schedule,
    check_schedule,
    circular,
    generate,
    one_to_one,
    simulate,
    v_shape,
)
from jaxpipe.schedule.costs import HostMode
from jaxpipe.schedule.passes.host_lane import paged
from jaxpipe.schedule.passes.offload import Plans
from jaxpipe.schedule.placement import with_shared
from jaxpipe.schedule.timeline import at_most, nine_digits
from jaxpipe.search.best import best_schedule, bounds_within
from jaxpipe.search.budget import Budget
from jaxpipe.search.solve import Options, Progress
from jaxpipe.search.solve.cache import CrudeProblem
from jaxpipe.search.solve.neighbourhoods import NeighbourhoodSearch
from jaxpipe.search.solve.offload_list import offload_candidates
from jaxpipe.search.solve.solver import solve_any
from jaxpipe.search.solve.task import Objective, SolveTask, most_offloaded
from tests.support.paths import ROOT
from tests.support.processes import LONG_S
from tests.support.schedule_strategies import random_costs, random_placements, random_valid_schedules

UNIT = (1.0, 1.0, 1.0)
TABLE_5 = (12.96, 13.22, 9.76)


def never() -> bool:
    return False


def uniform(
    placement: Placement, k: float, fbw: tuple[float, float, float] = UNIT, host: HostLink | None = None
) -> CostProfile:
    f, b, w = fbw
    costs = CostProfile.uniform(
        placement.num_stages, chunks=placement.num_chunks, f=f, b=b, w=w, offload_time=k * (f + b + w)
    )
    return replace(costs, host=host or HostLink(mode="shared"))


def task_of(p: int, m: int, limit: float, k: float, fbw: tuple[float, float, float] = UNIT) -> SolveTask:
    placement = one_to_one(p)
    return SolveTask(placement, m, uniform(placement, k, fbw), limit, offload=True, objective="span")


def bound_of(task: SolveTask) -> float:
    makespan, span = bounds_within(
        task.placement, task.num_microbatches, task.costs, task.memory_limit, offload=task.offload
    )
    return span if task.objective == "span" else makespan


def value_of(task: SolveTask, schedule: Schedule) -> float:
    timeline = simulate(schedule, task.costs)
    return timeline.max_span if task.objective == "span" else timeline.makespan


def best_of(task: SolveTask, most: int) -> float:
    *_, last = offload_candidates(task, bound_of(task), never, most=most)
    return value_of(task, last)


def ops_of(schedule: Schedule) -> set[str]:
    return {a.op for r in range(schedule.num_ranks) for a in schedule.actions(r)}


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_whatever_it_yields_is_valid_and_keeps_the_limit(data: st.DataObject) -> None:
    placement = data.draw(random_placements(max_ranks=4, max_stages=6, chains_only=True, single_rank_stages=True))
    m = data.draw(st.integers(1, 6))
    costs = data.draw(random_costs(placement.num_stages, placement.num_ranks))
    limit = data.draw(st.sampled_from([0.75, 1.0, 1.5, 2.0, 3.0, 100.0]))
    objective: Objective = data.draw(st.sampled_from(["makespan", "span", "lexicographic"]))
    task = SolveTask(placement, m, costs, limit, data.draw(st.booleans()), objective)
    bound = bound_of(task)
    values = []
    for schedule in offload_candidates(task, bound, never, most=30):
        check_schedule(schedule)
        assert task.fits(simulate(schedule, costs))
        assert task.offload or not ops_of(schedule) & {"O", "L", "S"}
        values.append(value_of(task, schedule))
        assert values[-1] >= bound * (1 - 1e-9)
    assert values == sorted(values, reverse=True)


@pytest.mark.parametrize("fbw", [UNIT, TABLE_5])
@pytest.mark.parametrize("k", [0.5, 1.0])
@pytest.mark.parametrize(("p", "m"), [(4, 16), (8, 32)])
@pytest.mark.parametrize("part", [4, 2])
def test_optimal_where_the_lane_keeps_up(p: int, m: int, part: int, k: float, fbw: tuple[float, float, float]) -> None:
    if p // part == 1:
        pytest.skip("one activation per rank: nothing overlaps")
    task = task_of(p, m, p / part, k, fbw)
    assert best_of(task, 120) == pytest.approx(bound_of(task), rel=1e-9)


@pytest.mark.parametrize(
    ("p", "m", "limit", "most"),
    [
        (4, 16, 2, 81),
        (4, 8, 2, 41),
        *(pytest.param(*case, marks=pytest.mark.soak) for case in ((8, 32, 4, 131), (8, 32, 2, 200))),
    ],
)
def test_a_slow_lane(p: int, m: int, limit: float, most: float) -> None:
    """Round trip of two microbatches' work: what was reached, so that it stays reached."""
    assert best_of(task_of(p, m, limit, 2), 250) <= most


@pytest.mark.soak
@pytest.mark.parametrize(("p", "limit", "most"), [(16, 8, 225), (16, 4, 320), (32, 16, 441)])
def test_lots_of_policies_on_many_ranks(p: int, limit: float, most: float) -> None:
    assert best_of(task_of(p, 4 * p, limit, 2), 5000) <= most


def test_one_activation_per_rank_still_overlaps_with_the_host() -> None:
    task = task_of(4, 8, 1, 0.5)
    schedules = list(offload_candidates(task, bound_of(task), never, most=200))
    assert value_of(task, schedules[-1]) <= 40
    assert "S" in ops_of(schedules[-1])
    bare = tuple(tuple(slot for slot in row if slot.actions[0].op != "S") for row in schedules[-1].rows)
    assert not task.fits(simulate(replace(schedules[-1], rows=bare), task.costs)), "S is what keeps the limit"


@pytest.mark.parametrize("k", [*(pytest.param(k, marks=pytest.mark.soak) for k in (0.5, 1.0)), 2.0])
def test_never_worse_than_families_of_one_chunk(k: float) -> None:
    for limit in (1.0, 2.0):
        task = task_of(4, 8, limit, k)
        family = best_schedule(4, 8, task.costs, limit, objective="span")
        assert best_of(task, 150) <= family.span * (1 + 1e-9)


def test_duplex_is_no_worse_and_groups_are_no_better() -> None:
    placement = one_to_one(4)
    best_by_link = {}
    for name, host in {
        "duplex": HostLink(mode="duplex"),
        "shared": HostLink(mode="shared"),
        "pairs": HostLink(mode="shared", groups=((0, 1), (2, 3))),
    }.items():
        task = SolveTask(placement, 16, uniform(placement, 0.5, host=host), 2, offload=True, objective="span")
        best_by_link[name] = best_of(task, 200)
    assert best_by_link["duplex"] <= best_by_link["shared"] <= best_by_link["pairs"]


def test_two_chunks_per_rank() -> None:
    placement = v_shape(4)
    task = SolveTask(placement, 16, uniform(placement, 0.5), 2, offload=True, objective="span")
    assert best_of(task, 60) <= 60


def test_uneven_stages_and_a_limit_in_bytes() -> None:
    rng = random.Random(7)
    costs = uniform(one_to_one(4), 0.5)
    costs = replace(costs, f_s=tuple(rng.uniform(0.5, 2) for _ in range(4)), memory_limit_bytes=(2.0, 2.0, 3.0, 1.0))
    task = SolveTask(one_to_one(4), 12, costs, offload=True)
    last = list(offload_candidates(task, bound_of(task), never, most=100))[-1]
    peaks = simulate(last, costs).peak_activations
    assert all(a <= x * (1 + 1e-9) for a, x in zip(peaks, task.limits(), strict=True))


def test_the_same_seed_gives_the_same_schedules() -> None:
    task = task_of(4, 8, 2, 2)
    one, two = (list(offload_candidates(task, 0.0, never, most=200)) for _ in range(2))
    assert one == two
    other = list(offload_candidates(task, 0.0, never, most=200, seed=5))
    assert other[0] == one[0]


def test_the_deadline_and_the_target_end_it() -> None:
    task = task_of(4, 16, 2, 2)
    assert not list(offload_candidates(task, 0.0, lambda: True))
    assert len(list(offload_candidates(task, 1e9, never))) == 1
    assert not list(offload_candidates(task_of(2, 4, 0.5, 1), 0.0, never, most=20))
    assert len(list(islice(offload_candidates(task, 0.0, never), 1))) == 1


def test_placements_that_no_list_can_order() -> None:
    placement = with_shared(one_to_one(2), {0})
    with pytest.raises(ScheduleError, match="not a chain of stages on one rank each"):
        next(offload_candidates(SolveTask(placement, 2, CostProfile.uniform(2)), 0.0, never))


@pytest.mark.parametrize(
    ("p", "m", "limit", "bound"),
    [(8, 16, 2, 88), (8, 32, 2, 173), (16, 64, 4, 267.5), (32, 128, 8, 487), (4, 8, 1, 72), (4, 16, 2, 73)],
)
def test_bounds_with_a_slow_lane_count_whole_microbatches(p: int, m: int, limit: float, bound: float) -> None:
    assert bound_of(task_of(p, m, limit, 2)) == pytest.approx(bound)


@settings(max_examples=30, deadline=None)
@given(
    p=st.integers(1, 4),
    m=st.integers(1, 9),
    limit=st.integers(1, 4),
    seed=st.integers(0, 2**32),
    mode=st.sampled_from(["shared", "duplex"]),
)
def test_nothing_found_is_below_the_bound(p: int, m: int, limit: int, seed: int, mode: str) -> None:
    """Chains of one stage a rank, everything offloadable: the case that the bounds are made for."""
    rng = random.Random(seed)

    def each() -> tuple[float, ...]:
        return tuple(rng.choice([0.0, 0.5, 1.0, 2.0, 3.25]) for _ in range(p))

    f, b, w, out, back = (each() for _ in range(5))
    bw = tuple(x + y for x, y in zip(b, w, strict=True))
    one = (1.0,) * p
    host = HostLink(mode=mode)  # type: ignore[arg-type]
    costs = CostProfile(f, b, w, bw, one, one, offload_s=out, load_s=back, host=host)
    task = SolveTask(one_to_one(p), m, costs, limit, offload=True, objective="span")
    makespan, span = bounds_within(task.placement, m, costs, limit, offload=True)
    for schedule in offload_candidates(task, 0.0, never, most=40):
        timeline = simulate(schedule, costs)
        assert timeline.max_span >= span * (1 - 1e-9)
        assert timeline.makespan >= makespan * (1 - 1e-9)


def test_offloads_in_flight_are_limited_in_lists_neighbourhoods_and_by_the_verb(
    capsys: pytest.CaptureFixture[str],
) -> None:
    free = task_of(4, 10, 2, 1)
    most = {}
    for limit in (None, 2, 1, 0):
        task = replace(free, offloads_in_flight=limit)
        timelines = [simulate(x, task.costs) for x in offload_candidates(task, 0.0, never, most=60)]
        most[limit] = max(map(most_offloaded, timelines))
        assert all(map(task.fits, timelines))
    assert most[None] is not None and most[None] > 2 and (most[2], most[1], most[0]) == (2, 1, 0)
    task = replace(free, offloads_in_flight=2)
    start = list(offload_candidates(task, 0.0, never, most=3))[-1]
    for schedule in NeighbourhoodSearch(task, start, 1).run(Budget(1.0, reproducible=True), 0.0):
        assert most_offloaded(simulate(schedule, task.costs)) <= 2
    assert CrudeProblem.of(task) != CrudeProblem.of(free), "another problem to the cache"
    flags = "--ranks 3 --microbatches 6 --memory-limit 1 --offload-time 1 --host-link shared --chunks 1 --no-cache"
    assert main(["solve", *flags.split(), "--time-limit", "1", "--offloads-in-flight", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["most_offloaded"] <= 1


def sources_until(tasks: Sequence[SolveTask], seconds: float) -> list[str]:
    """Return the sources of better answers in a solve that is interrupted once an answer takes at most ``seconds``."""
    sources = []

    def stop(progress: Progress, schedule: Schedule | None) -> None:
        sources.append(progress.source)
        if at_most(progress.value, nine_digits(seconds)):
            raise KeyboardInterrupt

    assert at_most(solve_any(tasks, Options(LONG_S, workers=1), stop).value, seconds)
    return sources


@pytest.mark.parametrize("seed", [1, *(pytest.param(s, marks=pytest.mark.soak) for s in (2, *range(100, 130)))])
def test_no_list_is_tried_before_the_best_of_six_families(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them as it is or through the offload pass, on every placement tried."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from torture_parts.solver import best_family, random_tasks

    tasks = random_tasks(random.Random(seed), most=4 if seed < 100 else 8)
    sources = sources_until(tasks, best_family(tasks)[0])
    assert all(x == "first" or x.startswith("family ") for x in sources), sources


def test_no_list_is_tried_before_families_at_published_costs() -> None:
    """One call of ``po-f`` takes 1561 there, where a solve said 3926 after 15 s."""
    costs = CostProfile.uniform(
        12, chunks=2, f=25.92, b=26.44, w=19.52, comm=1.296, offload_time=71.88, host_mode="shared"
    )
    sources = sources_until([SolveTask(circular(6, 2), 18, costs, 1.5, offload=True)], 1561)
    assert all(x == "first" or x.startswith("family ") for x in sources), sources


@pytest.mark.parametrize("mode", ["shared", "duplex"])
@pytest.mark.parametrize(
    ("p", "m", "limit", "k", "work"), [(6, 18, 1.5, 1.0, 2.3), (4, 9, 1.0, 0.5, 2.0), (5, 12, 2.0, 2.0, 3.0)]
)
def test_ada_offload_of_one_chunk_keeps_the_pipeline_going(
    p: int, m: int, limit: float, k: float, work: float, mode: HostMode
) -> None:
    """Fs wait for Os with room for one activation; one microbatch at a time takes p times the work, 4.8 at p=6."""
    costs = CostProfile.uniform(p, f=26, b=26, w=20, comm=1.3, offload_time=72 * k, host_mode=mode)
    timeline = simulate(generate("ada-offload", p, m, 1, costs, limit), costs)
    assert timeline.makespan <= work * m * 72
    assert max(timeline.peak_activations) <= limit


@given(random_valid_schedules(), st.floats(0.3, 1.0), st.data())
def test_paged_orders_keep_the_limit_however_long_anything_takes(
    schedule: Schedule, part: float, data: st.DataObject
) -> None:
    costs = data.draw(random_costs(schedule.num_stages, schedule.num_ranks))
    plans = Plans(schedule, costs)
    limit = part * max(plans.before.peak_activations)
    slow = replace(costs, offload_s=tuple(50 * x for x in costs.offload_s), link=replace(costs.link, latency_s=7.0))
    for order in paged(schedule, plans.lives, plans.candidates, limit):
        check_schedule(order)
        for seconds in (costs, slow):
            assert max(simulate(order, seconds).peak_activations) <= limit * (1 + 1e-9)


@pytest.mark.parametrize(("p", "v", "m", "k"), [(6, 3, 12, 50), (4, 2, 9, 20), (3, 1, 7, 9), (5, 4, 6, 30)])
def test_pipeoffload_is_never_behind_its_order_without_offload(p: int, v: int, m: int, k: float) -> None:
    """PO-H and PO-F are ``po`` if the host is so slow that nothing leaves: not longer, and hold no more."""
    costs = CostProfile.uniform(p * v, chunks=v, f=3, b=3, w=3, offload_time=9 * k, host_mode="shared")
    plain, *offloaded = (simulate(generate(name, p, m, v, costs), costs) for name in ("po", "po-h", "po-f"))
    for timeline in offloaded:
        assert max(timeline.peak_activations) <= max(plain.peak_activations)
        assert timeline.makespan <= plain.makespan
