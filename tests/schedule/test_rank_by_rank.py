"""Schedules with offload, rank by rank: what is found is valid, keeps the limit, and is better each time."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpipe.schedule import CostProfile, HostLink, Schedule, one_to_one, simulate, v_shape
from jaxpipe.schedule.budget import Budget
from jaxpipe.schedule.rank_by_rank import begun_rank_by_rank
from jaxpipe.schedule.solve import Options, SolveTask, solve
from jaxpipe.schedule.solve.actions import Actions, fitting, starts_at
from jaxpipe.schedule.solve.jobs import RankByRank, few_ranks
from jaxpipe.schedule.solve.solver import bound_of


def task_of(
    p: int,
    m: int,
    room: float,
    *,
    copy: float = 3.0,
    comm: float = 0.0,
    objective: Literal["span", "makespan"] = "span",
) -> SolveTask:
    costs = CostProfile.uniform(p, comm=comm, offload_time=2 * copy, host_mode="shared")
    return SolveTask(one_to_one(p), m, costs, room, True, objective)


def search_results(task: SolveTask, value: float, seconds: float, seed: int = 0) -> list[tuple[float, float]]:
    """Return for each result the time that the search claims and the simulated one, after checking that it keeps the limits."""
    both, actions = [], Actions(task)
    for timed in begun_rank_by_rank(few_ranks(task), bound_of(task), value, Budget(seconds, reproducible=True), seed):
        starts = starts_at(actions, timed)
        assert starts is not None
        fitted = fitting(actions, starts, "found")
        assert fitted is not None, "invalid, or over the limit"
        spans = [
            max(at + 1 for _, r, at in timed if r == rank) - min(at for _, r, at in timed if r == rank)
            for rank in range(task.placement.num_ranks)
        ]
        makespan = max(at + 1 for a, _, at in timed if a.op == "W")
        both.append((max(spans) if task.objective == "span" else makespan, task.seconds(fitted[1])))
    return both


def values(task: SolveTask, value: float, seconds: float, seed: int = 0) -> list[float]:
    """Return the simulated time of each result."""
    return [simulated for _, simulated in search_results(task, value, seconds, seed)]


@settings(max_examples=30)
@given(
    p=st.integers(2, 5),
    m=st.integers(1, 9),
    room=st.integers(1, 3),
    copy=st.sampled_from((1.0, 2.0, 3.0)),
    comm=st.sampled_from((0.0, 1.0, 2.0)),
    objective=st.sampled_from(("span", "makespan")),
    seed=st.integers(0, 99),
)
def test_what_is_found_keeps_the_limit_and_is_better_each_time(
    p: int, m: int, room: int, copy: float, comm: float, objective: Literal["span", "makespan"], seed: int
) -> None:
    task = task_of(p, m, room, copy=copy, comm=comm, objective=objective)
    most = 8.0 * p + 12 * m  # one microbatch after the other takes less
    pairs = search_results(task, most, 0.2, seed)
    claims = [most, *(x for x, _ in pairs)]
    assert all(b < a for a, b in pairwise(claims))
    assert all(bound_of(task) <= simulated for _, simulated in pairs)
    if comm <= 1:  # longer transfers queue, which only the simulator sees
        assert all(simulated <= x for x, simulated in pairs)


@pytest.mark.parametrize("objective", ["span", "makespan"])
@pytest.mark.parametrize(
    ("p", "m", "room", "copy", "comm"), [(2, 3, 1, 1.0, 0.0), (3, 9, 2, 2.0, 1.0), (5, 6, 3, 3.0, 1.0)]
)
def test_something_is_found(
    p: int, m: int, room: int, copy: float, comm: float, objective: Literal["span", "makespan"]
) -> None:
    assert values(task_of(p, m, room, copy=copy, comm=comm, objective=objective), 8.0 * p + 12 * m, 0.5)


def test_nothing_where_there_are_no_steps() -> None:
    """Two chunks; ops that don't take equally long; a lane for each direction; copies of less than a step; no limit."""
    plain = task_of(3, 4, 2)
    costs = plain.costs
    two = CostProfile.uniform(6, chunks=2, offload_time=6.0, host_mode="shared")
    tasks = [
        replace(plain, placement=v_shape(3), costs=two),
        replace(plain, costs=replace(costs, w_s=(1.0, 1.0, 2.0), bw_s=(2.0, 2.0, 3.0))),
        replace(plain, costs=replace(costs, f_s=(2.0,) * 3, b_s=(1.0,) * 3, w_s=(1.0,) * 3)),
        replace(plain, costs=replace(costs, host=HostLink(mode="duplex"))),
        task_of(3, 4, 2, copy=0.5),
        replace(plain, memory_limit=float("inf")),
        replace(plain, offload=False),
    ]
    assert values(plain, 60.0, 0.3)
    assert [values(task, 60.0, 0.3) for task in tasks] == [[]] * len(tasks)


def test_stages_of_different_steps_are_none() -> None:
    costs = CostProfile.uniform(3, offload_time=12.0, host_mode="shared")
    slow = replace(costs, **dict.fromkeys(("f_s", "b_s", "w_s"), (1.0, 1.0, 2.0)))
    assert values(SolveTask(one_to_one(3), 4, slow, 2, True, "span"), 90.0, 0.3) == []


def test_the_same_seed_finds_the_same() -> None:
    task = task_of(4, 8, 2)
    runs = [values(task, 90.0, 0.3, seed) for seed in (0, 0, 1)]
    assert runs[0] == runs[1]
    assert all(runs)


@pytest.mark.parametrize(
    ("p", "m", "limit", "lists", "most"),
    [
        (4, 24, 2.0, 121.0, 111.0),
        (5, 20, 2.0, 110.0, 104.0),
        (8, 32, 2.0, 192.0, 182.0),
        pytest.param(8, 32, 4.0, 123.0, 117.0, marks=pytest.mark.soak),
        pytest.param(16, 64, 4.0, 317.0, 290.0, marks=pytest.mark.soak),
        pytest.param(32, 128, 8.0, 564.0, 530.0, marks=pytest.mark.soak),
    ],
)
def test_better_than_list_schedules_where_the_host_link_is_the_bottleneck(
    p: int, m: int, limit: float, lists: float, most: float
) -> None:
    """Round trips of twice the work; ``lists``: what 20 lots of list schedules found."""
    assert min(values(task_of(p, m, limit), lists, {4: 1.0, 5: 1.0, 8: 2.0}.get(p, 40.0))) <= most


def test_a_solve_uses_it_and_proves_what_it_finds() -> None:
    """p=4, m=16, half of the activations, k=2: 75 and 78 before."""
    task = task_of(4, 16, 2)
    solution = solve(task, Options(8.0, workers=2, reproducible=True))
    assert "rank by rank with offload" in {x.source for x in solution.improvements}
    assert (solution.value, solution.status) == (74, "optimal")
    assert simulate(solution.schedule, task.costs).max_span == 74


@pytest.mark.parametrize("most", [1, 16])
def test_a_job_tells_only_what_keeps_a_limit_that_the_search_does_not_know(most: int) -> None:
    task = replace(task_of(3, 6, 2), offloads_in_flight=most)
    schedules: list[Schedule] = []

    def tell(schedule: Schedule | None, source: str, bound: float = 0.0) -> None:
        assert schedule is not None
        schedules.append(schedule)

    RankByRank(task=0, seconds=1.0, reproducible=True, value=60.0).run(task, tell)
    assert all(task.fits(simulate(x, task.costs)) for x in schedules)
    assert bool(schedules) == (most == 16)
