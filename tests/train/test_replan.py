"""Re-planning while training: schedules change between steps and bits don't; nothing that the solver does harms the run."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxpipe.errors import ConfigError
from jaxpipe.runtime import assembly
from jaxpipe.runtime.pipeline import Pipeline
from jaxpipe.schedule import (
    CostProfile,
    Schedule,
    Slot,
    check_schedule,
    generate,
    one_to_one,
    read_schedule,
    simulate,
    write_schedule,
)
from jaxpipe.schedule.families import FAMILIES
from jaxpipe.schedule.files import from_json, to_json, to_schedule
from jaxpipe.schedule.passes.braid import backwards_like, fused_backwards, split_backwards, with_slots
from jaxpipe.search.solve import Options, SolveTask
from jaxpipe.search.solve.jobs import COMMAND
from jaxpipe.search.solve.solver import BackgroundSolve, Failed, Finished, Found
from jaxpipe.stage.compiled.compile import BuildCache
from jaxpipe.train import replan
from jaxpipe.train.assemble import ScheduleDraft, final_order
from jaxpipe.train.checkpoint import CheckpointStore
from jaxpipe.train.config import TrainConfig, load_config
from jaxpipe.train.metrics import read_metrics
from jaxpipe.train.replan import Offer, Replanner, costs_as_in, drift, why_not
from jaxpipe.train.run.run_directory import result_text
from jaxpipe.train.schedule_source import relative_costs, source_of
from jaxpipe.train.setup import compile_setup, prepare
from tests.support import train_runs
from tests.support.paths import ROOT
from tests.support.pipelines import assert_same_arrays
from tests.support.train_runs import config, deterministic, final, run, write_text

pytestmark = pytest.mark.usefixtures("one_build")

STEPS = 16
COMPILED: list[str] = []
"""Events of JAX's tracing, lowering and compiling, in order."""


@pytest.fixture(scope="module", autouse=True)
def _listening() -> None:
    jax.monitoring.register_event_duration_secs_listener(_note_compilation)


def _note_compilation(event: str, _: float, **__: Any) -> None:
    if event.startswith("/jax/core/compile/"):
        COMPILED.append(event)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


def serial(schedule: Schedule) -> Schedule:
    """Return the schedule's actions one microbatch after the other, W's at the end: slow under any costs. A W in between would
    fill the wait of a rank that has most of the work, whose other orders are then no shorter."""

    def place_in_row(slot: Slot) -> tuple[bool, int, bool]:
        (action,) = slot.actions
        return action.op == "W", action.microbatch, action.op != "F"

    rows = tuple(tuple(sorted(row, key=place_in_row)) for row in schedule.rows)
    return dataclasses.replace(schedule, name="serial", rows=rows)


def settings(text: Path, out_dir: Path, *overrides: str) -> TrainConfig:
    """Return settings of a run of gpipe over two ranks of which every step is recorded; what W needs is no more than what F
    saves."""
    return config(
        text,
        out_dir,
        "pipeline.schedule=gpipe",
        "pipeline.recompute=fused",
        f"run.steps={STEPS}",
        "run.log_every=1",
        "run.eval_every=2",
        "run.checkpoint_every=8",
        "replan.min_gain=0",
        *overrides,
    )


Answers = list[Found | Finished | Failed]


class Patient(BackgroundSolve):
    """A solver that is always waited for: what it does comes to the same step in every run."""

    def take(self) -> Answers:
        return _take_until(super().take, lambda answers: isinstance(answers[-1], Finished | Failed))


@pytest.fixture
def equal_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every function seem to take equally long: where a rank measures most of all work, no order is shorter than gpipe."""
    monkeypatch.setattr(replan, "seconds_by_op", train_runs.equal_seconds)


def prompt(running: Schedule) -> type[BackgroundSolve]:
    """Return a solver that is waited for once, until it has found something better than ``running``."""

    class Prompt(BackgroundSolve):
        def __init__(self, task: SolveTask, options: Options) -> None:
            super().__init__(task, options)
            self.costs: CostProfile | None = task.costs

        def take(self) -> Answers:
            if self.costs is None:
                return super().take()
            costs, self.costs = self.costs, None
            enough = 0.999 * simulate(running, costs).makespan
            return _take_until(
                super().take,
                lambda answers: (
                    not isinstance(answers[-1], Found) or simulate(answers[-1].schedule, costs).makespan < enough
                ),
            )

    return Prompt


def _take_until(take: Callable[[], Answers], enough: Callable[[Answers], bool]) -> Answers:
    answers: Answers = []
    while not (answers and enough(answers)):
        time.sleep(0.002)
        answers += take()
    return answers


# -- whole runs -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run without re-planning what does from the start what a re-planned one does: B and W apart."""
    folder = tmp_path_factory.mktemp("plain")
    write_schedule(split_backwards(generate("gpipe", 2, 4)), folder / "start.sched")
    _, printed = run(settings(text, folder / "run", f"pipeline.schedule={folder / 'start.sched'}"))
    assert "re-planning" not in printed
    return folder / "run"


def assert_same_training(out_dir: Path, other: Path, step: int = STEPS) -> None:
    """Assert that two runs are equal bit for bit: parameters, optimizer state, position in the data, evaluation loss, and
    all metrics but the schedule."""
    (*arrays, data, loss), (*expected, expected_data, expected_loss) = final(out_dir, step), final(other, step)
    assert_same_arrays(arrays, expected)
    assert (data, loss) == (expected_data, expected_loss)
    metrics, expected_metrics = (
        [{k: v for k, v in record.items() if k != "schedule"} for record in deterministic(folder)]
        for folder in (out_dir, other)
    )
    assert metrics == expected_metrics


@pytest.mark.usefixtures("equal_seconds")
def test_a_run_that_switches_gives_the_same_bits(
    text: Path, tmp_path: Path, plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assembly, "BuildCache", BuildCache)  # nothing that another run compiled
    monkeypatch.setattr("jaxpipe.search.solve.solver.BackgroundSolve", prompt(split_backwards(generate("gpipe", 2, 4))))
    counts: list[tuple[str, int]] = []
    out_dir = tmp_path / "run"
    result, printed = run(
        settings(text, out_dir, "replan.enabled=true"), lambda line: counts.append((line, len(COMPILED)))
    )
    lines = printed.splitlines()
    assert "step 2: re-planning: looking for a better schedule (up to 1m00s, 4 activations)" in lines
    switch = next(line for line in lines if " -> solved-1 (" in line)
    assert switch.startswith("step 2: schedule gpipe (makespan ")
    assert " less; by " in switch
    assert any(line.startswith("step 3: schedule solved-1 takes ") and " predicted" in line for line in lines)
    assert any(line.startswith(f"step 3/{STEPS} ") and "  schedule solved-1  " in line for line in lines)
    assert_same_training(out_dir, plain)
    names = {r["step"]: r["schedule"] for r in read_metrics(out_dir / "metrics.jsonl") if "loss" in r}
    assert [names[k] for k in (1, 2, 3)] == ["gpipe", "gpipe", "solved-1"]
    assert result.schedule == names[STEPS]
    at_switch = next(count for line, count in counts if " -> solved-1 (" in line)
    assert len(COMPILED) == at_switch, "a switch compiles nothing"
    assert CheckpointStore(out_dir / "checkpoints").load(8).meta["schedule"] == names[8]
    stored = read_schedule(out_dir / "schedule.sched")
    assert (stored.name, why_not(stored, split_backwards(generate("gpipe", 2, 4)))) == (result.schedule, "")
    if not math.isnan(result.gain_predicted):  # it may have been taken back: the machine is busy
        assert f"schedule {result.schedule} takes " in result_text(result)


@pytest.mark.usefixtures("equal_seconds")
def test_an_interrupted_run_with_switches_resumes_to_the_same_bits(
    text: Path, tmp_path: Path, plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxpipe.search.solve.solver.BackgroundSolve", prompt(split_backwards(generate("gpipe", 2, 4))))

    def interrupt(printed: str) -> None:
        if printed.startswith("step 5/"):
            signal.raise_signal(signal.SIGINT)

    overrides = settings(text, tmp_path / "run", "replan.enabled=true")
    stopped, printed = run(overrides, interrupt)
    assert (stopped.step, stopped.stopped) == (5, True)
    assert " -> solved-1 (" in printed
    _, printed = run(overrides)
    assert "resumed from step 5" in printed
    assert "step 7: schedule gpipe (makespan " in printed
    assert_same_training(tmp_path / "run", plain)


@pytest.mark.usefixtures("equal_seconds")
def test_fused_backwards_stay_fused_where_that_is_asked_for(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bits are those of a run without re-planning. One microbatch after another is slow in any run."""
    start = generate("gpipe", 2, 4)
    monkeypatch.setattr("jaxpipe.search.solve.solver.BackgroundSolve", prompt(serial(start)))
    path = tmp_path / "serial.sched"
    write_schedule(serial(start), path)
    overrides = (f"pipeline.schedule={path}", "replan.split=false", "replan.memory_limit=2", "run.steps=4")
    _, printed = run(settings(text, tmp_path / "run", *overrides, "replan.enabled=true"))
    assert "step 2: schedule serial (makespan " in printed
    stored = read_schedule(tmp_path / "run" / "schedule.sched")
    assert fused_backwards(stored) == fused_backwards(start)
    run(settings(text, tmp_path / "other", *overrides))
    assert_same_training(tmp_path / "run", tmp_path / "other", 4)


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.soak)])
def test_kills_change_nothing_but_notices(
    kills: int, text: Path, tmp_path: Path, plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(0)
    attacked: list[int] = []
    finished: list[int] = []

    class Killed(Patient):
        """The real solver, killed at a random moment, often before it has read its task. A slow machine may let it finish
        before that, but not the first."""

        def __init__(self, task: SolveTask, options: Options) -> None:
            super().__init__(task, options)
            self.pid = _pid(self)
            if len(attacked) < kills:
                time.sleep(rng.uniform(0, 0.2) if attacked else 0)  # the first has no time to finish
                attacked.append(self.pid)
                os.kill(self.pid, signal.SIGKILL)

        def take(self) -> Answers:
            answers = super().take()
            if self.pid in attacked and any(isinstance(answer, Finished) for answer in answers):
                finished.append(self.pid)
            return answers

    monkeypatch.setattr("jaxpipe.search.solve.solver.BackgroundSolve", Killed)
    monkeypatch.setattr(replan, "_MOST_DOUBLINGS", 0)
    eager = ("replan.enabled=true", "replan.min_gain=1", "replan.time_limit_s=0.001", "replan.drift=1e-9")
    result, printed = run(settings(text, tmp_path / "run", *eager))
    notice = "re-planning: the solver was killed by SIGKILL; training goes on with schedule gpipe"
    assert printed.splitlines().count(notice) + len(finished) == len(attacked) == kills
    assert len(finished) < kills
    assert (result.schedule, result.steps_run, math.isnan(result.gain_predicted)) == ("gpipe", STEPS, True)
    assert_same_training(tmp_path / "run", plain)
    assert not any(_exists(pid) for pid in attacked)


def _pid(solver: BackgroundSolve) -> int:
    (member,) = solver._pool._members
    return member.process.pid


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# -- the replanner alone --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pipe(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    """Return the pipeline that a re-planned run starts with: gpipe, its backwards split."""
    overrides = settings(text, tmp_path_factory.mktemp("none"), "replan.enabled=true")
    return compile_setup(prepare(overrides), jax.devices()[:2], lambda _: None, repeats=1).pipeline


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """A replanner without a run: measured steps are simulated ones, and fake solvers answer."""

    def __init__(self, pipe: Pipeline, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> None:
        self.patch = monkeypatch
        self.notes: list[str] = []
        self.clock = Clock()
        self.started: list[SolveTask] = []
        base = load_config(None, ["pipeline.schedule=gpipe", "replan.enabled=true", *overrides])
        self.replanner = Replanner(base, pipe, self.notes.append, 0, self.clock)
        self.costs = CostProfile.uniform(2)
        self.schedule = pipe.schedule
        self.first = to_schedule(pipe.schedule)
        self.pid = 0
        self.solver()

    def solver(self, script: str | None = None, patient: bool = True) -> None:
        """Let solvers run ``script`` from now on, with ``schedule`` (a dict), the one that the run started with; the real
        worker without one."""
        bench = self
        read = f"import json, os, sys, time\nfor _ in range(2): sys.stdin.readline()\nschedule = {self.first!r}\n"
        command = COMMAND if script is None else (sys.executable, "-S", "-c", read + script)

        class Fake(Patient if patient else BackgroundSolve):  # type: ignore[misc]
            def __init__(self, task: SolveTask, options: Options) -> None:
                bench.started.append(task)
                super().__init__(task, options, command)
                bench.pid = _pid(self)

        self.patch.setattr("jaxpipe.search.solve.solver.BackgroundSolve", Fake)

    def finds(self, schedule: Schedule) -> None:
        """Let solvers find ``schedule``, and nothing else, from now on."""
        answer = {"job": 0, "task": 0, "source": "fake", "schedule": to_schedule(split_backwards(schedule))}
        end = {"job": 0, "task": 0, "source": ""}
        self.solver(f"print({json.dumps(answer)!r})\nprint({json.dumps(end)!r}, flush=True)\ntime.sleep(600)")

    def record(self, step: int, step_s: float = 1.0) -> None:
        self.replanner.observe(step, simulate(self.schedule, self.costs), step_s)

    def poll(self, step: int) -> Pipeline | None:
        offer = self.replanner.poll()
        new_pipeline = (
            None
            if offer is None
            else self.replanner.adopt(step, from_json(Offer, json.loads(json.dumps(to_json(offer))), "offer"))
        )
        if new_pipeline is not None:
            self.schedule = new_pipeline.schedule
        return new_pipeline


@pytest.fixture
def bench(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Bench]]:
    benches: list[Bench] = []

    def make(*overrides: str) -> Bench:
        benches.append(Bench(pipe, monkeypatch, *overrides))
        return benches[-1]

    yield make
    for each in benches:
        each.replanner.close()


def test_measured_costs_decide_and_the_first_step_is_not_looked_at(pipe: Pipeline, bench: Callable[..., Bench]) -> None:
    b = bench()
    b.record(1)
    assert b.started == []
    b.costs = CostProfile.uniform(2, f=3, b=2, w=1)
    b.record(2)
    (task,) = b.started
    assert (task.costs.f_s, task.costs.b_s, task.costs.w_s) == ((3.0, 3.0), (2.0, 2.0), (1.0, 1.0))
    assert task.memory_limit == 4
    assert len(task.costs.memory_limit_bytes) == 2
    new = b.poll(2)
    assert new is not None
    assert new.functions is pipe.functions
    predicted, current = new.predicted_timeline().makespan, simulate(split_backwards(generate("gpipe", 2, 4)), b.costs)
    assert predicted < current.makespan
    assert b.notes[1].startswith(
        f"step 2: schedule gpipe (makespan {current.makespan:.3g} s) -> solved-1 ({predicted:.3g} s"
    )
    assert b.notes[2].startswith("re-planning: searched for ")
    b.record(3, 0.5)
    assert b.notes[3].startswith("step 3: schedule solved-1 takes 500 ms, gpipe took 1 s: 50.0% less measured, ")
    assert b.replanner.gains[1] == 0.5


def test_drift_starts_a_second_search_but_not_at_once(bench: Callable[..., Bench]) -> None:
    b = bench("replan.drift=0.2", "replan.time_limit_s=30")
    b.finds(generate("zb-h1", 2, 4))
    b.record(2)
    b.poll(2)
    b.clock.now = 31
    b.record(3)
    assert len(b.started) == 1, "costs are the same"
    b.costs = CostProfile.uniform(2, f=2, b=2, w=2)
    b.record(4)
    assert len(b.started) == 1, "all is slower alike"
    b.costs = CostProfile.uniform(2, f=1, b=1, w=3)
    b.clock.now = 29
    b.record(5)
    assert len(b.started) == 1, "too early"
    b.clock.now = 30
    b.record(6)
    assert len(b.started) == 2
    assert b.started[1].costs.w_s == (3.0, 3.0)
    assert b.notes[-1].startswith("step 6: re-planning: costs drifted by 27%, looking again (up to 30 s, ")


def test_drift_is_a_share_of_a_stage() -> None:
    then = {(op, s): 1.0 for op in "FBW" for s in range(2)}
    assert drift(then, then) == 0
    assert drift(then, {k: 7 * v for k, v in then.items()}) == pytest.approx(0)
    assert drift(then, then | {("W", 1): 3.0}) == pytest.approx(2 * (3 / 8 - 1 / 6))
    assert drift({}, then) == 0


def test_what_measures_slower_is_taken_back_and_not_tried_again(bench: Callable[..., Bench]) -> None:
    b = bench("replan.time_limit_s=1")
    b.finds(generate("zb-h1", 2, 4))
    b.record(2)
    assert b.poll(2) is not None
    for step in (3, 4, 5):
        b.record(step, 2.0)
        back = b.poll(step)
        assert (back is None) == (step < 5)
    assert back is not None
    assert back.schedule.name == "gpipe"
    assert b.notes[-1] == "step 5: schedule solved-1 -> gpipe again: it was 100.0% more measured"
    assert math.isnan(b.replanner.gains[0]), "nothing is gained"
    b.clock.now, b.costs = 100, CostProfile.uniform(2, w=2)
    b.finds(generate("zb-h1", 2, 4))
    b.record(6)
    assert len(b.started) == 2
    assert b.poll(6) is None
    assert not any("refused" in note for note in b.notes)


ANSWER = (
    "def answer(**changes):\n    return json.dumps({'job': 0, 'source': 'test', 'schedule': schedule | changes})\n"
    "rows = schedule['rows']\n"
)
DISASTERS = {
    "print('garbage')": "ended before it was done (exit code 0); ",
    "print('[1, 2]')": "wrote what is no answer (ScheduleParseError: ",
    "print('{}')": "wrote what is no answer (ScheduleParseError: ",
    "print('[' * 100_000)": "ended before it was done (exit code 0); ",
    "print('\\x1b[31m', chr(233))": "ended before it was done (exit code 0); ",
    "sys.stdout.buffer.write(bytes(range(128, 255)) + b'\\n')": "ended before it was done (exit code 0); ",
    "print(answer(rows=[['Q1.2']]))": "wrote what is no answer (ScheduleParseError: answer.schedule: rows[0][0]: ",
    "print(json.dumps({'job': 0, 'source': '', 'bound': 'low'}))": "wrote what is no answer (ScheduleParseError: ",
    "sys.stdout.write(answer()[:99])": "ended before it was done (exit code 0); ",
    "": "ended before it was done (exit code 0); ",
    "sys.exit(3)": "ended before it was done (exit code 3); ",
    "print(json.dumps({'job': 0, 'done': True, 'error': 'MemoryError: no\\nmore'}))": "failed (MemoryError: no more); ",
    "os.kill(os.getpid(), 11)": "was killed by SIGSEGV; ",
    "print(answer(rows=[rows[0][1:], rows[1]]))": "a schedule was refused: rank 0 lacks F0.0",
    "print(answer(rows=[rows[0] + ['F1.0'], rows[1]]))": "a schedule was refused: rank 0 runs F1.0; ",
    "print(answer(rows=rows[::-1]))": "a schedule was refused: rank 0 ",
    "print(answer(rows=rows[:1]))": "a schedule was refused: it has 1 rows for 2 ranks",
    "print(answer(rows=[rows[0][::-1], rows[1]]))": "a schedule was refused: rank 0 would add up weight gradients in another",
    "print(answer(rows=[rows[0], rows[1][1:] + rows[1][:1]]))": "a schedule was refused: ",
    "print(answer(microbatches=3))": "a schedule was refused: it has 3 microbatches, the run has 4",
    "print(answer(placement=dict(schedule['placement'], flows=[[[1], [0]]])))": "it places stages elsewhere",
    "rows[0][5:5] = ['O0.0', 'L0.0']; print(answer(rows=rows))": "refused: it offloads, which this run does not",
    "print(answer())": "ended before it was done (exit code 0); ",
}


def test_a_failure_is_not_told_as_the_end_that_follows_it() -> None:
    """Both may have come by the time somebody asks."""
    task = SolveTask(one_to_one(2), 4, CostProfile.uniform(2), 2.0)
    script = f"print({json.dumps({'job': 0, 'done': True, 'error': 'no'})!r})"
    solver = BackgroundSolve(task, Options(), (sys.executable, "-S", "-c", script))
    (member,) = solver._pool._members
    member.threads[1].join()
    assert solver.take() == [Failed("failed (no)")]
    solver.close()


@pytest.mark.parametrize("script", DISASTERS)
def test_nothing_that_a_solver_does_is_worse_than_a_line(script: str, bench: Callable[..., Bench]) -> None:
    b = bench()
    b.solver(ANSWER + script)
    b.record(2)
    assert b.poll(2) is None
    failures = [note for note in b.notes[1:] if "exit code 0" not in note or "exit code 0" in DISASTERS[script]]
    assert len(failures) == 1
    assert DISASTERS[script] in failures[0]
    assert failures[0].startswith("re-planning: ")
    assert "\n" not in failures[0]
    assert failures[0].isprintable()
    assert not _exists(b.pid)
    b.record(3)
    assert b.poll(3) is None
    b.finds(generate("zb-h1", 2, 4))  # what failed is tried once more, later
    b.clock.now = 1000
    b.record(4)
    assert b.notes[-1].startswith("step 4: re-planning: looking once more (")
    assert b.poll(4) is not None


def test_a_solver_that_hangs_is_ended_in_time(bench: Callable[..., Bench]) -> None:
    b = bench("replan.time_limit_s=5")
    b.solver("time.sleep(1000)", patient=False)
    b.record(2)
    b.clock.now = 2 * 5 + replan.PATIENCE_S
    assert b.poll(2) is None
    assert len(b.notes) == 1
    b.clock.now += 1
    assert b.poll(3) is None
    assert b.notes[1] == "re-planning: the solver took longer than 21 s; training goes on with schedule gpipe"
    assert not _exists(b.pid)


def test_a_solver_that_cannot_be_started_is_a_line(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    b = bench()
    monkeypatch.setattr(
        "jaxpipe.search.solve.solver.BackgroundSolve", lambda *args: BackgroundSolve(*args, ["/nowhere/python"])
    )
    b.record(2)
    assert b.notes == [
        "re-planning: the solver can't be started (No such file or directory); training goes on with schedule gpipe"
    ]
    assert b.poll(2) is None


def test_a_gain_too_small_is_left(bench: Callable[..., Bench]) -> None:
    b = bench("replan.min_gain=0.9")
    b.record(2)
    assert b.poll(2) is None
    assert b.notes[-1].startswith("re-planning: searched for ")
    assert "; schedule gpipe goes on (none is more than " in b.notes[-1]


def test_a_memory_limit_is_kept_or_told(bench: Callable[..., Bench]) -> None:
    b = bench("replan.memory_limit=2")
    b.record(2)
    new = b.poll(2)
    assert new is not None
    assert max(new.predicted_timeline().peak_activations) <= 2
    assert "(up to 1m00s, 2 activations)" in b.notes[0]
    low = bench("replan.memory_limit=0.5")
    low.record(2)
    assert low.poll(2) is None
    assert "no schedule" in low.notes[-1]
    greedy = bench("replan.memory_limit=1")
    greedy.finds(generate("zb-h1", 2, 4))
    greedy.record(2)
    assert greedy.poll(2) is None
    assert "a schedule was refused: it needs 2 activations, more than the limit allows" in greedy.notes[1]


# -- the process ----------------------------------------------------------------------------------------------------------


def _answers(running: Schedule, time_limit_s: float = 1.0) -> Answers:
    costs = CostProfile.uniform(running.num_stages, chunks=running.num_chunks)
    task = SolveTask(running.placement, running.num_microbatches, costs_as_in(running, costs))
    solver = Patient(task, Options(time_limit_s=time_limit_s, workers=1))
    answers = solver.take()
    solver.close()
    return answers


def test_the_worker_answers_with_better_schedules_and_a_bound() -> None:
    running = split_backwards(generate("gpipe", 3, 6))
    *candidates, finished = _answers(running, 600.0)
    assert isinstance(finished, Finished)
    makespans = []
    for each in candidates:
        assert isinstance(each, Found)
        assert why_not(each.schedule, running) == ""
        makespans.append(simulate(each.schedule, CostProfile.uniform(3)).makespan)
    assert makespans == sorted(makespans, reverse=True)
    assert 0 < finished.lower_bound_s <= makespans[-1] < simulate(running, CostProfile.uniform(3)).makespan


def test_what_the_worker_finds_can_take_the_place_of_fused_backwards_and_other_placements() -> None:
    for family, chunks in (("gpipe", None), ("looped-bfs", 2), ("v-min", None)):
        running = generate(family, 2, 4, chunks=chunks)
        *candidates, finished = _answers(running)
        assert isinstance(finished, Finished)
        assert candidates
        assert all(why_not(backwards_like(each.schedule, running), running) == "" for each in candidates)  # type: ignore[union-attr]


def test_the_worker_imports_no_jax() -> None:
    code = "import sys, jaxpipe.search.solve.solver; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_the_worker_ends_with_its_parent() -> None:
    """The parent is killed; the worker's task would keep it, and the solver's own processes, busy for long."""
    code = (
        "import json, sys, time\nfrom jaxpipe.schedule.files import from_json\n"
        "from jaxpipe.search.solve import Options, SolveTask\n"
        "from jaxpipe.search.solve.solver import BackgroundSolve\n"
        "solver = BackgroundSolve(from_json(SolveTask, json.load(sys.stdin), 'task'), Options(600.0))\n"
        "while not solver.take(): time.sleep(0.01)\nprint('at work', flush=True)\ntime.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        json.dump(to_json(_long_task()), parent.stdin)
        parent.stdin.close()
        assert parent.stdout.readline() == "at work\n"
        below = _descendants(parent.pid)
        assert {os.getpriority(os.PRIO_PROCESS, pid) for pid in below} == {19}
        parent.kill()
    _await_end(below)


def test_the_end_of_a_run_ends_all_of_a_search() -> None:
    solver = prompt(serial(generate("gpipe", 8, 64)))(_long_task(), Options(600.0))
    assert solver.take()
    pids = [_pid(solver), *_descendants(_pid(solver))]
    solver.close()
    assert not _exists(pids[0])
    _await_end(pids)


def _long_task() -> SolveTask:
    """Return a task that no solver is done with soon."""
    placement = generate("gpipe", 8, 64).placement
    return SolveTask(placement, 64, CostProfile.uniform(8, f=1.0, b=1.3, w=0.7, comm=0.21), memory_limit=3)


def _descendants(pid: int) -> list[int]:
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text(encoding="utf-8").rsplit(")", 1)[1].split()[1])
    below = [pid]
    for each in below:
        below += [child for child, parent in parents.items() if parent == each]
    return below[1:]


def _await_end(pids: Sequence[int]) -> None:
    while any(map(_running, pids)):
        time.sleep(0.01)


def _running(pid: int) -> bool:
    """Return whether the process runs; in a container without an init process a dead orphan stays as a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_starting_and_ending_never_wait() -> None:
    """A task larger than a pipe holds, for a process that doesn't read."""
    task = SolveTask(generate("gpipe", 2000, 1).placement, 1, CostProfile.uniform(2000))
    deaf = BackgroundSolve(task, Options(), [sys.executable, "-S", "-c", "import time\nwhile True: time.sleep(600)"])
    assert deaf.take() == []
    deaf.close()


# -- schedules ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [name for name, f in FAMILIES.items() if "memory_limit" not in f.options])
def test_backwards_are_split_and_fused_as_in_another(family: str) -> None:
    schedule = generate(family, 2, 4)
    split = split_backwards(schedule)
    check_schedule(split)
    assert not fused_backwards(split)
    fused = generate("gpipe", 2, 4)
    all_backwards = frozenset((s, i) for s in range(split.num_stages) for i in range(4))
    assert fused_backwards(fused) == frozenset((s, i) for s in range(2) for i in range(4))
    assert backwards_like(split, split) == split
    if fused_backwards(schedule) == all_backwards:
        check_schedule(back := backwards_like(split, schedule))
        assert back == with_slots(schedule, lambda slot: slot.actions)  # a braid that was split stays apart


def test_a_zero_bubble_order_with_fused_backwards_is_valid() -> None:
    order, like = generate("zb-h1", 3, 6), generate("gpipe", 3, 6)
    fused = backwards_like(order, like)
    check_schedule(fused)
    assert why_not(fused, like) == ""
    assert why_not(order, like).startswith("rank 0 runs B0.0; other actions")


def test_the_solver_is_given_what_the_run_can_do() -> None:
    costs = dataclasses.replace(CostProfile.uniform(2, w=3), bw_s=(2.5, 2.5))
    split = costs_as_in(split_backwards(generate("gpipe", 2, 4)), costs)
    assert (split.b_s, split.w_s, split.bw_s) == ((1.0, 1.0), (3.0, 3.0), (4.0, 4.0))
    fused = costs_as_in(generate("gpipe", 2, 4), costs)
    assert (fused.b_s, fused.w_s, fused.bw_s) == ((2.5, 2.5), (0.0, 0.0), (2.5, 2.5))
    assert (fused.residual_bytes, fused.w_residual_bytes) == ((1.0, 1.0), (0.0, 0.0))


# -- settings -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["replan.min_gain=-0.1"], "replan.min_gain is -0.1, must be at least 0"),
        (["replan.min_gain=2"], "replan.min_gain is 2.0, must be at most 1"),
        (["replan.time_limit_s=0"], "replan.time_limit_s is 0.0, must be greater than 0"),
        (["replan.time_limit_s=1e9"], "replan.time_limit_s is 1000000000.0, must be at most 86400"),
        (["replan.drift=0"], "replan.drift is 0.0, must be greater than 0"),
        (["replan.workers=0"], "replan.workers is 0, must be at least 1"),
        (["replan.memory_limit=-1"], "replan.memory_limit is -1.0, must be greater than 0"),
        (["replan.enabled=perhaps"], "replan.enabled is \"perhaps\", expected true or false"),
        (["replan.min_gian=1"], "unknown key replan.min_gian: did you mean replan.min_gain?"),
        (
            ["replan.enabled=true", "run.steps=20", "run.log_every=20"],
            "replan.enabled=true needs a recorded step after the first and before the last, and run.steps=20 with "
            "run.log_every=20 has none: use more steps, or run.log_every=5",
        ),
        (
            ["replan.enabled=true", "run.steps=2", "run.log_every=1", "optimizer.warmup_steps=1"],
            "replan.enabled=true needs a recorded step after the first and before the last, and run.steps=2 with "
            "run.log_every=1 has none: use more steps",
        ),
    ],
)  # fmt: skip
def test_wrong_settings_are_one_line(overrides: Sequence[str], message: str) -> None:
    with pytest.raises(ConfigError) as info:
        load_config(None, list(overrides))
    assert str(info.value).split(": ", 1)[-1] == message or str(info.value) == message


def test_a_split_start_keeps_the_limit(pipe: Pipeline) -> None:
    """Splitting what is fused may take more than the config allows if W needs more than F kept."""
    fused = generate("gpipe", 2, 4)
    heavy = dataclasses.replace(pipe.costs, w_residual_bytes=tuple(9 * x for x in pipe.costs.residual_bytes))
    limited = load_config(None, ["pipeline.schedule=zb", "pipeline.memory_limit=4"]).pipeline
    draft = ScheduleDraft(fused, source_of(limited), relative_costs((1.0, 1.0)))

    def order(costs: CostProfile, split: bool) -> Schedule:
        return final_order(limited, draft, costs, lambda _: None, split)

    assert order(heavy, split=True) == fused
    assert not fused_backwards(order(pipe.costs, split=True))
    assert order(pipe.costs, split=False) is fused
