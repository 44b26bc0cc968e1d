"""The solver on graphs of stages: shapes of Tessel's public case file, against bounds, rules, and all orders of small ones."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from jaxpipe.cli import main
from jaxpipe.errors import ScheduleError
from jaxpipe.schedule import (
    CostProfile,
    Link,
    Placement,
    Schedule,
    check_schedule,
    explicit,
    read_schedule,
    simulate,
    write_schedule,
)
from jaxpipe.schedule.ir import Row
from jaxpipe.schedule.passes.braid import split_backwards
from jaxpipe.search.bounds import lower_bound, span_lower_bound
from jaxpipe.search.solve import Options, SolveTask, solve
from jaxpipe.search.solve.neighbourhoods import solve_exact
from jaxpipe.search.solve.task import graph_starts
from tests.support.processes import LONG_S


def shape(name: str, p: int) -> tuple[Placement, set[int]]:
    """Tessel's placements, and their shared stages: embedding and head, the embedding alone, a second one in the middle, two
    branches that all ranks join."""
    everyone, half = tuple(range(p)), p // 2
    if name == "kshape":
        edges = [(b + i, b + i + 1) for b in (0, half) for i in range(half - 1)] + [(half - 1, p), (p - 1, p)]
        return explicit(p, [*range(p), everyone], edges), {p}
    groups, shared = {
        "mllm": ([everyone, *range(p), everyone], {0, p + 1}),
        "mshape": ([everyone, *range(p)], {0}),
        "nnshape": ([everyone, *range(half), everyone, *range(half, p)], {0, half + 1}),
    }[name]
    return explicit(p, groups), shared


def tessel_costs(stages: int, shared: set[int]) -> CostProfile:
    """F 1 and BW 3 (it recomputes); 1 and 1 of what is shared, which holds nothing."""

    def each(shared_cost: float, stage_cost: float) -> tuple[float, ...]:
        return tuple(shared_cost if s in shared else stage_cost for s in range(stages))

    return CostProfile(each(1, 1), each(0.5, 2), each(0.5, 1), each(1, 3), each(0, 1), each(0, 0.5))


def task_of(name: str, p: int, m: int, limit: float = float("inf")) -> SolveTask:
    placement, shared = shape(name, p)
    return SolveTask(placement, m, tessel_costs(placement.num_stages, shared), limit)


@pytest.mark.parametrize(
    ("name", "seconds", "most"),
    [
        ("mllm", 1, 76),
        ("kshape", LONG_S, 49),
        *(
            pytest.param(name, 60, most, marks=pytest.mark.soak)
            for name, most in (("mllm", 67.5), ("mshape", 51), ("nnshape", 67.5))
        ),
    ],
)
def test_tessels_shapes(name: str, seconds: float, most: float) -> None:
    """A rank's work is 64, 48, 64 and 48, which is Tessel's period times 8; whole backwards fill and drain in 12 more."""
    task = task_of(name, 4, 8)
    solution = solve(task, Options(time_limit_s=seconds, reproducible=seconds < 10))
    check_schedule(solution.schedule)
    assert solution.timeline == simulate(solution.schedule, task.costs)
    assert lower_bound(task.placement, 8, task.costs) <= solution.lower_bound <= solution.value <= most
    assert solution.failures == ()


def test_a_limit_holds_and_rules_are_no_better() -> None:
    task = task_of("kshape", 4, 8, 3.0)
    solution = solve(task, Options(time_limit_s=LONG_S))
    assert max(solution.timeline.peak_activations) <= 3.0
    rules = [simulate(x, task.costs) for x, _ in graph_starts(task)]
    assert solution.value <= min(task.seconds(x) for x in rules if task.fits(x))
    assert (solution.value, solution.status) == (49.0, "optimal")
    assert max(simulate(next(graph_starts(task))[0], task.costs).peak_activations) <= 1.0


def test_a_limit_that_nothing_keeps_names_one_that_works() -> None:
    with pytest.raises(
        ScheduleError, match=r"keeps a memory limit of 0\.5 without offload; the smallest found to work is 1$"
    ):
        solve(task_of("mllm", 2, 2, 0.5), Options(time_limit_s=1))


def rows_in_order(row: Row) -> Iterator[Row]:
    """Yield all orders of a row in which each microbatch goes down the stages and up again."""
    for order in itertools.permutations(row):
        ways: dict[int, list[int]] = {}
        for slot in order:
            (action,) = slot.actions
            ways.setdefault(action.microbatch, []).append(action.stage if action.op == "F" else 99 - action.stage)
        if all(way == sorted(way) for way in ways.values()):
            yield order


def all_orders(schedule: Schedule, task: SolveTask) -> float:
    """Return the least makespan of all orders of a schedule's rows."""
    best = float("inf")
    for rows in itertools.product(*map(rows_in_order, schedule.rows)):
        with suppress(ScheduleError):
            timeline = simulate(replace(schedule, rows=rows), task.costs)
            if task.fits(timeline):
                best = min(best, timeline.makespan)
    return best


@pytest.mark.parametrize("limit", [1.0, float("inf")])
def test_the_exact_model_finds_the_least_of_all_orders(limit: float) -> None:
    """Two branches on a rank each, joined on the first."""
    placement = explicit(2, [0, 1, 0], [(0, 2), (1, 2)])
    costs = CostProfile(
        (1.0, 3.0, 1.0), (1.0, 2.0, 1.0), (0.0, 0.0, 0.0), (1.0, 2.0, 1.0), (1.0, 1.0, 1.0), (0.5, 0.5, 0.5),
        boundary_bytes=(1.0, 1.0, 1.0), link=Link(0.25, 4.0),
    )  # fmt: skip
    task = SolveTask(placement, 2, costs, limit)
    start = next(graph_starts(task))[0]
    result = solve_exact(task, time_limit_s=LONG_S, hint=start)
    assert (result.status, result.value) == ("optimal", pytest.approx(all_orders(start, task)))
    longer = replace(task, costs=replace(costs, w_s=(0.5, 1.0, 0.5)))
    assert solve_exact(longer, time_limit_s=LONG_S, hint=start).value == result.value, "whole backwards can be chosen"


def test_longest_span_is_minimised_where_that_is_asked_for() -> None:
    task = replace(task_of("mshape", 2, 4), objective="span")
    options = Options(time_limit_s=0.2, reproducible=True)
    solution = solve(task, options)
    assert solution.value == solution.timeline.max_span
    assert span_lower_bound(task.placement, 4, task.costs) <= solution.value
    fastest = solve(replace(task, objective="makespan"), options)
    assert solution.value <= fastest.timeline.max_span


def test_the_same_twice() -> None:
    task = task_of("nnshape", 2, 2, 2.0)
    one, two = (solve(task, Options(time_limit_s=0.05, reproducible=True)) for _ in range(2))
    assert one.schedule == two.schedule and one.lower_bound == two.lower_bound


def test_a_start_may_have_more_chunks_than_are_tried_and_sizes_must_agree(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start = next(graph_starts(task_of("nnshape", 6, 2)))[0]
    chunks = explicit(3, [0, 1, 2] * 6)
    many = next(graph_starts(SolveTask(chunks, 2, CostProfile.on(chunks))))[0]
    for name, schedule in (("six", start), ("many", many)):
        write_schedule(schedule, tmp_path / f"{name}.sched")
    flags = ["--no-cache", "--time-limit", "0.5"]
    assert main(["solve", "--start", str(tmp_path / "many.sched"), *flags]) == 0
    assert main(["solve", "--start", str(tmp_path / "six.sched"), "--ranks", "4", *flags]) == 2
    assert "--ranks 4 contradicts " in capsys.readouterr().err


def test_the_verb_starts_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = task_of("kshape", 4, 4)
    start = split_backwards(next(graph_starts(task))[0])
    path, output = tmp_path / "towers.sched", tmp_path / "better.sched"
    write_schedule(start, path)
    flags = ["--no-cache", "--time-limit", "2", "-o", str(output), "--json"]
    assert main(["solve", "--start", str(path), *flags]) == 0
    facts = json.loads(capsys.readouterr().out)
    better = read_schedule(output)
    assert better.placement == start.placement and facts["value"] < facts["improvements"][0]["value"]
    for flag in (["--placement", "v"], ["--ranks", "7"]):
        assert main(["solve", "--start", str(path), *flag]) == 2
        assert flag[0] in capsys.readouterr().err
