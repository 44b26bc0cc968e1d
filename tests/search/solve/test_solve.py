"""The solver as users call it: answers are valid, never worse than the best family, and claims are what the simulator says."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxpipe.cli import main
from jaxpipe.errors import ScheduleError
from jaxpipe.schedule import CostProfile, HostLink, Schedule, check_schedule, simulate
from jaxpipe.schedule.placement import Placement, bidirectional, circular, one_to_one, v_shape, wave
from jaxpipe.schedule.problem import Problem
from jaxpipe.search.best import best_schedule
from jaxpipe.search.budget import Budget
from jaxpipe.search.solve import Options, Progress, Solution, SolveTask, solve
from jaxpipe.search.solve.neighbourhoods import NeighbourhoodSearch
from jaxpipe.search.solve.solver import lexicographic, solve_any
from jaxpipe.search.solve.task import group_size, grouped_rows
from tests.support.processes import LONG_S

TABLE_5 = (25.92, 26.44, 19.52)  # a rank's share of the 9.6B model, milliseconds
QUICK = Options(time_limit_s=LONG_S)
"""For what is proved soon, on any machine in less than this."""


def task_of(
    placement: Placement,
    m: int,
    limit: float = float("inf"),
    cost: tuple[float, float, float] = (1.0, 1.0, 1.0),
    comm: float = 0.0,
    k: float = 0.0,
    objective: str = "makespan",
) -> SolveTask:
    costs = CostProfile.uniform(
        placement.num_stages,
        chunks=placement.num_chunks,
        f=cost[0],
        b=cost[1],
        w=cost[2],
        comm=comm,
        offload_time=k * sum(cost),
    )
    costs = dataclasses.replace(costs, host=dataclasses.replace(costs.host, mode="shared"))
    return SolveTask(placement, m, costs, limit, k > 0, objective)  # type: ignore[arg-type]


def assert_sound(solution: Solution) -> None:
    task = solution.task
    check_schedule(solution.schedule)
    timeline = simulate(solution.schedule, task.costs)
    assert timeline.peak_activations == solution.timeline.peak_activations
    assert max(timeline.peak_activations) <= task.memory_limit * (1 + 1e-9)
    value = timeline.max_span if task.objective == "span" else timeline.makespan
    assert solution.value == value
    assert solution.lower_bound <= value * (1 + 1e-9)
    assert solution.status == ("optimal" if value <= solution.lower_bound * (1 + 1e-9) else "feasible")
    assert 0 <= solution.first_feasible_s <= solution.wall_s
    values = [p.value for p in solution.improvements]
    assert values == sorted(values, reverse=True)
    assert values[-1] == pytest.approx(value, rel=1e-8)


@pytest.mark.parametrize(
    ("placement", "m", "limit", "objective"),
    [
        (one_to_one(1), 3, 1.0, "makespan"),
        (one_to_one(4), 8, 4.0, "makespan"),
        (one_to_one(4), 8, 2.0, "span"),
        (one_to_one(8), 16, 4.0, "makespan"),
        (v_shape(4), 8, 4.0, "span"),
        (v_shape(4), 8, 2.0, "makespan"),
        (v_shape(8), 16, 4.0, "span"),
    ],
)
def test_what_families_and_bounds_close_is_optimal(placement: Placement, m: int, limit: float, objective: str) -> None:
    solution = solve(task_of(placement, m, limit, objective=objective), QUICK)
    assert_sound(solution)
    assert (solution.status, solution.gap) == ("optimal", 0.0)


@pytest.mark.parametrize(
    ("placement", "m", "limit", "comm"),
    [
        pytest.param(v_shape(4), 8, 1.5, 0.0, marks=pytest.mark.soak),
        pytest.param(v_shape(4), 8, 2.0, 2.6, marks=pytest.mark.soak),
        pytest.param(circular(3, 2), 6, 2.0, 1.0, marks=pytest.mark.soak),
        (one_to_one(4), 16, 4 / 3, 2.6),
        pytest.param(bidirectional(4), 8, 4.0, 0.0, marks=pytest.mark.soak),
    ],
)
def test_never_worse_than_the_best_family(placement: Placement, m: int, limit: float, comm: float) -> None:
    task, enough = task_of(placement, m, limit, TABLE_5, comm), float("inf")
    with suppress(ScheduleError):
        best = best_schedule(placement.num_ranks, m, task.costs, limit)
        enough = best.makespan * (1 + 1e-9) if best.schedule.placement == placement else enough

    def stop(progress: Progress, schedule: Schedule | None) -> None:
        if progress.value <= enough:
            raise KeyboardInterrupt

    solution = solve(task, QUICK, stop)
    assert_sound(solution)
    assert solution.value <= enough


@pytest.mark.soak
def test_below_what_families_are_made_for_it_is_much_better() -> None:
    """p = 8 V at 3p/8: no family has a steady state there; cycles of one or two microbatches do."""
    solution = solve(task_of(v_shape(8), 32, 3.0, objective="span"), Options(time_limit_s=20))
    assert_sound(solution)
    assert solution.family is not None
    assert solution.value <= 0.9 * solution.family[1]
    assert any("cycle" in p.source for p in solution.improvements)


def test_progress_is_told_as_it_happens() -> None:
    reports: list[tuple[Progress, Schedule | None]] = []
    solution = solve(task_of(one_to_one(4), 8, 2.0), QUICK, lambda p, s: reports.append((p, s)))
    assert reports[0][0].source == "first"
    assert reports[-1][0].value == pytest.approx(solution.value, rel=1e-8)
    assert reports[-1][1] == solution.schedule
    for progress, schedule in reports:
        assert progress.gap >= 0
        if schedule is not None:
            check_schedule(schedule)


def test_a_start_is_used() -> None:
    task = task_of(v_shape(4), 8, 1.5, objective="span")
    good = solve(task, Options(time_limit_s=1))
    second = solve_any([task], Options(time_limit_s=0.05), starts=[good.schedule])
    assert second.value <= good.value


def test_several_placements_share_one_bound() -> None:
    tasks = [task_of(one_to_one(4), 8, 4.0), task_of(v_shape(4), 8, 4.0)]
    solution = solve_any(tasks, QUICK)
    assert_sound(solution)
    assert solution.task is tasks[1]
    assert solution.value == 25.5


def test_each_placement_that_may_win_gets_the_exact_model() -> None:
    """Families find 19 for the first, and only the exact model, from no start, what the second allows."""
    solution = solve_any(
        [task_of(placement, 6, 1.5) for placement in (circular(2, 4), wave(2, 4))],
        Options(time_limit_s=3.0, reproducible=True),
    )
    assert_sound(solution)
    assert (solution.value, solution.lower_bound, solution.schedule.placement.kind) == (18.75, 18.75, "wave")


def test_lexicographic_saves_memory_at_equal_time() -> None:
    """p = 2, m = 6: one activation less than the limit costs nothing, two cost time."""
    task = task_of(one_to_one(2), 6, 4.0, objective="lexicographic")
    solution = solve(task, Options(time_limit_s=10, reproducible=True))
    assert_sound(solution)
    plain = solve(dataclasses.replace(task, objective="makespan"), QUICK)
    assert solution.value == plain.value
    peak = max(solution.timeline.peak_activations)
    assert peak < task.memory_limit
    assert solve(dataclasses.replace(task, memory_limit=peak - 1, objective="makespan"), QUICK).value > solution.value


def test_lexicographic_takes_least_peak_then_least_offload() -> None:
    costs = dataclasses.replace(CostProfile.uniform(2, offload_time=1.0), host=HostLink(mode="shared"))
    task = SolveTask(one_to_one(2), 3, costs, offload=True, objective="lexicographic")
    solution = solve(task, Options(time_limit_s=1, reproducible=True))
    timeline = solution.timeline
    assert timeline.makespan == solve(dataclasses.replace(task, objective="makespan"), QUICK).value
    peak = max(timeline.peak_activations)
    smaller = solve(dataclasses.replace(task, objective="makespan", memory_limit=peak - 1), QUICK)
    assert smaller.value > timeline.makespan
    plain = solve(dataclasses.replace(task, objective="makespan", memory_limit=peak, offload=False), QUICK)
    assert (solution.offloaded == 0) == (plain.value == timeline.makespan)


def test_lexicographic_says_what_found_a_better_time() -> None:
    task = task_of(one_to_one(2), 6, 3.0, objective="lexicographic")
    first = solve(task, Options(time_limit_s=0.01))
    serial = Problem.of(task.placement, 6, task.costs)
    rows = serial.schedule("serial", grouped_rows(serial, 3))
    slow = dataclasses.replace(first, schedule=rows, timeline=simulate(rows, task.costs), improvements=())
    better = lexicographic(slow, QUICK, lambda task, options: solve(task, QUICK))
    assert better.value < slow.value
    assert better.improvements[-1].source not in ("", "neighbourhood")


def test_limits_in_bytes_of_the_profile_hold() -> None:
    costs = CostProfile.uniform(4)
    costs = dataclasses.replace(costs, param_bytes=(5.0,) * 4, memory_limit_bytes=(9.0, 9.0, 7.0, 6.0))
    task = SolveTask(one_to_one(4), 8, costs)
    assert task.limits() == (4.0, 4.0, 2.0, 1.0)
    solution = solve(task, QUICK)
    assert task.fits(solution.timeline)
    assert all(a <= b for a, b in zip(solution.timeline.peak_bytes, costs.memory_limit_bytes, strict=True))


@pytest.mark.parametrize("offload", [False, True])
def test_infeasible_limits_say_the_smallest_that_works(offload: bool) -> None:
    task = task_of(v_shape(3), 4, 0.4, k=0.5 if offload else 0.0)
    with pytest.raises(ScheduleError, match=r"1 without.*0\.5"):
        solve(task, QUICK)
    smallest = dataclasses.replace(task, memory_limit=0.5 if offload else 1.0)
    assert_sound(solve(smallest, Options(time_limit_s=1)))


def test_the_same_seed_gives_the_same_schedule(generated_once: Callable[[], object]) -> None:
    task = task_of(v_shape(4), 6, 1.5, TABLE_5)
    options = Options(time_limit_s=0.03, seed=3, reproducible=True)
    schedules = {solve(task, options).schedule}
    generated_once()
    assert {solve(task, options).schedule} == schedules


@pytest.mark.soak
def test_the_same_seed_gives_the_same_schedule_twenty_times() -> None:
    for task in (task_of(v_shape(4), 8, 1.5, TABLE_5), task_of(one_to_one(4), 12, 1.5, TABLE_5, 2.0)):
        options = Options(time_limit_s=10, seed=1, reproducible=True)
        assert len({solve(task, options).schedule for _ in range(20)}) == 1


def random_task(rng: random.Random) -> SolveTask:
    p, m = rng.randint(1, 5), rng.randint(1, 9)
    placement = rng.choice(
        [one_to_one(p), v_shape(p), circular(p, rng.randint(1, 3)), bidirectional(2 * rng.randint(1, 2))]
    )
    n, share = placement.num_stages, 1 / placement.num_chunks
    offload = placement.num_flows == 1 and rng.random() < 0.5
    costs = CostProfile.uniform(
        n, chunks=placement.num_chunks, comm=rng.choice([0.0, 0.1, 0.7]), offload_time=rng.uniform(0.1, 6)
    )
    uneven = {name: tuple(share * rng.uniform(0.3, 2) for _ in range(n)) for name in ("f_s", "b_s", "w_s")}
    total = tuple(b + w for b, w in zip(uneven["b_s"], uneven["w_s"], strict=True))
    costs = dataclasses.replace(
        costs,
        **uneven,
        bw_s=tuple(x * rng.choice([1.0, 0.9]) for x in total),
        w_residual_bytes=tuple(x * rng.choice([0.25, 1.0]) for x in costs.residual_bytes),
        host=dataclasses.replace(costs.host, mode=rng.choice(["shared", "duplex"])),
    )
    limit = rng.choice([0.5, 1.0, 1.5, 2.0, 3.0, float("inf")])
    return SolveTask(placement, m, costs, limit, offload, rng.choice(["makespan", "span", "lexicographic"]))  # type: ignore[arg-type]


def check_random_tasks(seeds: range, seconds: float) -> None:
    for seed in seeds:
        task = random_task(random.Random(seed))
        try:
            solution = solve(task, Options(time_limit_s=seconds, seed=seed))
        except ScheduleError as error:
            assert "smallest found to work" in str(error), seed
            assert task.memory_limit <= 1.0, seed
            continue
        assert solution.failures == (), (seed, solution.failures)
        assert_sound(solution)


def test_random_tasks_are_answered_soundly() -> None:
    check_random_tasks(range(6), 0.5)


@pytest.mark.soak
def test_many_random_tasks_are_answered_soundly() -> None:
    check_random_tasks(range(1000, 1300), 3.0)


# -- parts ------------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    kind=st.sampled_from([one_to_one, v_shape, lambda p: circular(p, 3), lambda p: bidirectional(2 * p)]),
    ranks=st.integers(1, 5),
    m=st.integers(1, 9),
    limit=st.floats(0.2, 6),
    w_residual=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_the_first_answer_keeps_any_feasible_limit(kind, ranks, m, limit, w_residual) -> None:  # type: ignore[no-untyped-def]
    placement = kind(ranks)
    costs = CostProfile.uniform(placement.num_stages, chunks=placement.num_chunks, w_residual=w_residual)
    problem = Problem.of(placement, m, costs)
    size = group_size(problem, [limit] * placement.num_ranks)
    if not size:
        assert limit < 1 or placement.num_flows > 1
        return
    schedule = problem.schedule("first", grouped_rows(problem, size))
    check_schedule(schedule)
    if placement.num_flows == 1:
        assert max(simulate(schedule, costs).peak_activations) <= limit * (1 + 1e-9)


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_windows_only_ever_improve_and_stay_valid(data: st.DataObject) -> None:
    check_windows(data)


@pytest.mark.soak
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_windows_of_200_tasks_only_ever_improve_and_stay_valid(data: st.DataObject) -> None:
    check_windows(data)


def check_windows(data: st.DataObject) -> None:
    p, m = data.draw(st.integers(2, 4)), data.draw(st.integers(2, 6))
    placement = data.draw(st.sampled_from([one_to_one(p), v_shape(p)]))
    n = placement.num_stages
    seconds = st.lists(st.floats(0.2, 3.0), min_size=n, max_size=n).map(tuple)
    costs = dataclasses.replace(
        CostProfile.uniform(n, chunks=placement.num_chunks, comm=data.draw(st.sampled_from([0.0, 0.3]))),
        f_s=data.draw(seconds),
        b_s=data.draw(seconds),
        w_s=data.draw(seconds),
    )
    problem = Problem.of(placement, m, costs)
    limit = data.draw(st.sampled_from([1.0, 1.5, 2.0, 4.0]))
    objective = data.draw(st.sampled_from(["makespan", "span"]))
    task = SolveTask(placement, m, costs, limit, objective=objective)
    start = problem.schedule("first", grouped_rows(problem, group_size(problem, task.limits())))

    def order(schedule: Schedule) -> tuple[float, ...]:
        timeline = simulate(schedule, costs)
        assert task.fits(timeline)
        return task.order(timeline.makespan, timeline.max_span)

    last = order(start)
    for schedule in NeighbourhoodSearch(task, start, 0).run(Budget(1.0, reproducible=True), 0.0):
        check_schedule(schedule)
        assert order(schedule) < last
        last = order(schedule)


def test_a_full_limit_is_no_fuller_for_being_rounded() -> None:
    """Residuals with a part that no unit measures: two microbatches are two, to the model as to the simulator."""
    task = SolveTask(one_to_one(3), 6, CostProfile.uniform(3, w_residual=0.31830988618379), 2.0)
    problem = Problem.of(task.placement, 6, task.costs)
    start = problem.schedule("first", grouped_rows(problem, 2))
    (*_, best) = NeighbourhoodSearch(task, start, 0).run(Budget(1.0, reproducible=True), 0.0)
    assert simulate(best, task.costs).makespan < simulate(start, task.costs).makespan
    assert simulate(best, task.costs).peak_activations[0] == 2.0


# -- command line -------------------------------------------------------------------------------------------------------


def run_cli(*args: str, cache: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "JAXPIPE_CACHE_DIR": str(cache)}
    return subprocess.run(
        [sys.executable, "-m", "jaxpipe", "solve", *args], capture_output=True, text=True, env=environment, check=False
    )


def test_solve_writes_and_reports(tmp_path: Path) -> None:
    flags = ["--ranks", "4", "--microbatches", "8", "--placement", "v", "--memory-limit", "2", "--json"]
    out = tmp_path / "best.json"
    first = run_cli(*flags, "-o", str(out), cache=tmp_path / "cache")
    assert first.returncode == 0, first.stderr
    facts = json.loads(first.stdout)
    assert (facts["makespan"], facts["gap"], facts["status"]) == (29.5, 0.0, "optimal")
    assert {"bubble_rate", "peak_activations", "wall_s", "first_feasible_s", "improvements", "offloaded"} <= set(facts)
    assert facts["improvements"][-1]["value"] == 29.5
    assert all(x["source"] in first.stderr for x in facts["improvements"]), "who found what is also told as it happens"
    assert "bound" in first.stderr
    second = run_cli(*flags, cache=tmp_path / "cache")
    assert json.loads(second.stdout)["improvements"][0]["source"] == "cache"
    simulated = subprocess.run(
        [sys.executable, "-m", "jaxpipe", "simulate", str(out), "--json"], capture_output=True, text=True, check=True
    )
    assert json.loads(simulated.stdout)["makespan"] == 29.5


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--ranks", "0"], "want 1 to"),
        (["--placement", "v", "--chunks", "3"], "v has 2 chunk(s) per rank, not 3"),
        (["--memory-limit", "-1"], "limit"),
        (["--time-limit", "0"], "time limit"),
        (["--workers", "0"], "workers"),
        (["--ranks", "4000", "--microbatches", "100000"], "too large"),
        (["--ranks", "64", "--microbatches", "4000"], "too large to solve"),
        (["--memory-limit", "0.1"], "smallest found to work is"),
        (["--placement", "moebius"], "moebius"),
    ],
)
def test_bad_input_is_one_clear_line(
    flags: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("JAXPIPE_CACHE_DIR", str(tmp_path))
    assert main(["solve", *flags]) == 2
    message = capsys.readouterr().err
    assert words in message
    assert len(message.strip().splitlines()) == 1
    assert "Traceback" not in message


def test_ctrl_c_gives_the_best_so_far(tmp_path: Path) -> None:
    flags = ["--ranks", "8", "--microbatches", "32", "--placement", "v", "--memory-limit", "3", "--time-limit", "300"]
    as_from_a_terminal = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from jaxpipe.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", as_from_a_terminal, "solve", *flags, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "JAXPIPE_CACHE_DIR": str(tmp_path)},
    )
    assert process.stderr is not None
    process.stderr.readline()  # the first answer
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate()
    assert process.returncode == 0
    assert json.loads(out)["status"] == "feasible"


def test_workers_end_with_the_solver(tmp_path: Path) -> None:
    """Killed, the solver can't end them; they notice by their input, also in the middle of a job."""
    flags = ["--ranks", "8", "--microbatches", "16", "--placement", "v", "--memory-limit", "2.5", "--time-limit", "300"]
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxpipe", "solve", *flags],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "JAXPIPE_CACHE_DIR": str(tmp_path)},
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "family" in line:  # so a worker is up
            break
    if not Path("/proc").exists():
        pytest.skip("no /proc on this system")
    workers = children_of(process.pid)
    assert workers
    process.kill()
    process.wait()
    process.stderr.close()
    while any(map(is_running, workers)):
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    """Return whether the process runs; in a container without an init process a dead orphan stays as a zombie."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def children_of(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(x) for x in text.split()]


def test_limit_in_bytes_counts_workspace_and_cotangents() -> None:
    """A limit in bytes holds for everything that lives while an action runs, not for residuals alone."""
    costs = dataclasses.replace(
        CostProfile.uniform(4),
        temp_bytes=(("B", (0.5,) * 4), ("F", (0.25,) * 4)),
        cotangent_bytes=(0.25,) * 4,
        memory_limit_bytes=(3.5,) * 4,
    )
    task = SolveTask(one_to_one(4), 8, costs)
    assert task.limits() == (3.5,) * 4
    assert task.safe_limits() == (2.75,) * 4
    solution = solve(task, Options(time_limit_s=1))
    assert max(solution.timeline.peak_bytes) <= 3.5
    assert max(simulate(solution.schedule, costs).peak_bytes) <= 3.5
    assert solution.lower_bound <= solution.value


def test_limit_in_bytes_of_two_flows_is_a_share_of_one() -> None:
    """A microbatch takes the share of its own flow on a rank that runs a stage of each flow."""
    costs = dataclasses.replace(CostProfile.uniform(4), memory_limit_bytes=(3.0,) * 4)
    assert SolveTask(bidirectional(4), 8, costs).limits() == (3.0,) * 4


def test_tiny_problems_get_the_exact_model_before_anything_else() -> None:
    """36 actions, for which families and cycles took longer than the model and were no better."""
    costs = replace(
        CostProfile.uniform(6),
        f_s=(2, 5, 5, 2, 3, 5),
        b_s=(4, 5, 5, 5, 1, 6),
        w_s=(1, 2, 4, 4, 3, 1),
        bw_s=(5, 7, 9, 9, 4, 7),
    )
    solution = solve(SolveTask(circular(2, 3), 2, costs, 1.5), Options(120.0, workers=1))
    assert solution.status == "optimal"
    assert {x.source for x in solution.improvements} <= {"first", "exact model"}
