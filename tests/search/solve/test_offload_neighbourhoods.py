"""Neighbourhoods of schedules with offload: valid, within the limit, better each time, reproducible; some proved optimal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from jaxpipe.schedule import HostLink, Schedule, check_schedule, one_to_one, simulate, v_shape
from jaxpipe.search.budget import Budget, run
from jaxpipe.search.solve.actions import ActionTable, schedule_of, starts_of
from jaxpipe.search.solve.formulation import Formulation, Window
from jaxpipe.search.solve.neighbourhoods import NeighbourhoodSearch, solve_exact
from jaxpipe.search.solve.offload_list import offload_candidates
from jaxpipe.search.solve.solver import bound_of
from jaxpipe.search.solve.task import Objective, SolveTask, count_offloads
from tests.search.solve.test_offload import never, task_of, uniform, value_of


def first_of(task: SolveTask, most: int = 4) -> Schedule:
    """Return a start that leaves something to improve."""
    return list(offload_candidates(task, 0.0, never, most=most))[-1]


def improved(task: SolveTask, start: Schedule, seconds: float, bound: float = 0.0) -> list[Schedule]:
    """Return what the search yields in deterministic time."""
    return list(NeighbourhoodSearch(task, start, 3).run(Budget(seconds, reproducible=True), bound))


def tasks() -> Iterator[tuple[str, SolveTask]]:
    yield "one chunk", task_of(4, 10, 2, 2)
    yield "uneven", task_of(4, 8, 2, 1.5, (12.96, 13.22, 9.76))
    yield "V", SolveTask(v_shape(2), 8, uniform(v_shape(2), 1.0), 1.5, offload=True)
    for mode in (HostLink(mode="duplex"), HostLink(mode="shared", groups=((0, 1), (2, 3)))):
        costs = uniform(one_to_one(4), 1.0, host=mode)
        yield mode.mode + str(len(mode.groups)), SolveTask(one_to_one(4), 8, costs, 2, offload=True, objective="span")
    costs = uniform(one_to_one(3), 1.0)
    fused = replace(costs, bw_s=(1.5, 1.5, 1.5), w_residual_bytes=(0.25, 0.5, 1.0), offloadable_bytes=(0.75, 0.75, 1.0))
    yield "fused, and parts that stay", SolveTask(one_to_one(3), 8, fused, 2, offload=True)


@pytest.mark.parametrize(("name", "task"), list(tasks()), ids=lambda x: x if isinstance(x, str) else "")
def test_what_it_yields_is_valid_within_the_limit_and_better_each_time(name: str, task: SolveTask) -> None:
    start = first_of(task)
    values = [value_of(task, start)]
    for schedule in improved(task, start, 0.7):
        check_schedule(schedule)
        timeline = simulate(schedule, task.costs)
        assert task.fits(timeline)
        values.append(value_of(task, schedule))
    assert values == sorted(values, reverse=True)
    assert values[-1] >= bound_of(task) * (1 - 1e-9)


@pytest.mark.parametrize("objective", ["span", "makespan"])
def test_it_reaches_a_proved_optimum(objective: Objective) -> None:
    task = replace(task_of(3, 5, 1, 1), objective=objective)
    start = first_of(task, 1)
    proved = solve_exact(task, time_limit_s=600, workers=1)
    assert proved.status == "optimal"
    best = improved(task, start, 20.0, proved.value)
    assert value_of(task, start) > value_of(task, best[-1]) == pytest.approx(proved.value)
    assert count_offloads(best[-1])


def test_reproducible() -> None:
    task = task_of(4, 10, 2, 2)
    start = first_of(task, 1)
    one, two = (improved(task, start, 1.5) for _ in range(2))
    assert one == two
    assert one and value_of(task, one[-1]) < value_of(task, start)


@pytest.mark.parametrize("p", [1, 4])
def test_times_become_the_same_schedule_again(p: int) -> None:
    """A neighbourhood in which nothing may move gives back what it was given."""
    task = task_of(p, 8, 2, 1)
    timeline = simulate(first_of(task), task.costs)
    actions = ActionTable(task)
    starts = starts_of(actions, timeline)
    assert starts is not None
    model = Formulation(actions, starts, Window(3, 12, frozenset()))
    solver, _, is_solved = run(model.cp, {"num_workers": 1})
    assert is_solved
    times = model.answer(solver)
    assert [t < 0 for t in times] == [t < 0 for t in starts]
    result = schedule_of(actions, times, "again")[1]
    assert result.max_span <= timeline.max_span


@pytest.mark.parametrize("p", [8, 16])
def test_a_preference_leaves_the_objective_within_64_bits(p: int) -> None:
    """CP-SAT calls a model invalid whose objective could be more, and then finds nothing."""
    task = task_of(p, 2 * p, p / 2, 2, (12.96, 13.22, 9.76))
    timeline = simulate(first_of(task, 1), task.costs)
    actions = ActionTable(task, parts=200)
    starts = starts_of(actions, timeline)
    assert starts is not None
    window = Window(0, actions.ticks.of(timeline.makespan) // 2, frozenset(range(p)))
    model = Formulation(actions, starts, window, prefer={"F": 1, "B": 2, "W": 1, "away": 2})
    assert not model.cp.validate()


def test_it_ends_at_once_where_it_can_do_nothing() -> None:
    task = task_of(4, 8, 2, 1)
    start = first_of(task)
    assert not improved(task, start, 5.0, value_of(task, start)), "the bound is met"
    assert not improved(task, start, 0.0), "no time"
    assert not improved(replace(task, memory_limit=0.5), start, 5.0), "the start breaks the limit"
