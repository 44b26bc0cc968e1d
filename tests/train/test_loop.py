"""Whole runs: stopped, killed, damaged, resumed elsewhere, and what they leave behind. Sizes are the tiniest."""

from __future__ import annotations

import errno
import io
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxpipe.errors import CheckpointError, ConfigError, DataError, RunError
from jaxpipe.runtime.executor import Executor
from jaxpipe.schedule import read_schedule
from jaxpipe.train import loop
from jaxpipe.train.checkpoint import CheckpointStore, load_params
from jaxpipe.train.config import load_config
from jaxpipe.train.corpora.datasets import load_dataset
from jaxpipe.train.devices import peak_bytes_in_use
from jaxpipe.train.evaluate import held_out_score, load_trained
from jaxpipe.train.metrics import read_metrics
from jaxpipe.train.run import run_directory, step_log
from jaxpipe.train.run.run_directory import PICTURES, RunDirectory, TrainResult, result_text
from jaxpipe.train.run.step_log import Pace
from tests.support.paths import ROOT
from tests.support.pipelines import assert_same_arrays
from tests.support.train_runs import (
    MEASURED,
    STEPS,
    config,
    contents,
    copy_run,
    deterministic,
    final,
    losses,
    read_until,
    run,
    settings,
    start,
    trace_rows,
    wait_until_stopped,
    write_text,
)

pytestmark = pytest.mark.usefixtures("one_build")

HALF = 10


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture(scope="module")
def straight(text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TrainResult, str]:
    """Run 20 steps without a break: the run that the others are compared with."""
    out_dir = tmp_path_factory.mktemp("straight") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_directory, "PICTURES", PICTURES)
        return out_dir, *run(config(text, out_dir))


@pytest.fixture(scope="module")
def stopped(text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TrainResult, str]:
    """Provide the same run, stopped by Ctrl-C in its tenth step. Copy it before going on."""
    out_dir = tmp_path_factory.mktemp("stopped") / "run"

    def interrupt(printed: str) -> None:
        if printed.startswith(f"step {HALF}/"):
            signal.raise_signal(signal.SIGINT)

    return out_dir, *run(config(text, out_dir), interrupt)


def assert_same_run(out_dir: Path, other: Path) -> None:
    """Assert that two runs are equal bit for bit: parameters, optimizer state, position in the data, metrics."""
    (*arrays, data, eval_loss), (*expected, expected_data, expected_loss) = final(out_dir), final(other)
    assert_same_arrays(arrays, expected)
    assert (data, eval_loss) == (expected_data, expected_loss)
    assert deterministic(out_dir) == deterministic(other)


# -- stopping and going on ------------------------------------------------------------------------------------------------


@pytest.mark.compiles
def test_straight_run(straight: tuple[Path, TrainResult, str]) -> None:
    out_dir, result, printed = straight
    assert (result.out_dir, result.step, result.steps_run, result.stopped) == (out_dir, STEPS, STEPS, False)
    assert result.loss == losses(out_dir)[STEPS] < losses(out_dir)[1] - 0.5
    assert result.skipped_steps == 0
    assert 0 < result.bubble_predicted < 1
    assert 0 < result.bubble_measured < 1
    assert result.replay_ratio > 0
    assert result.tokens_per_s > 0
    assert result.peak_bytes > 10_000
    lines = [line for line in printed.splitlines() if line.startswith("step ") and "/" in line]
    assert [line.split()[1] for line in lines] == [f"{n}/{STEPS}" for n in (5, 10, 15, 20)]
    for words in ("tok/s", "predicted →", "measured", "peak"):
        assert all(words in line for line in lines)
    assert printed.count("held-out loss") == 4
    assert result_text(result).startswith(f"done at step {STEPS}: loss {result.loss:.4f}, held-out loss")


@pytest.mark.compiles
@pytest.mark.parametrize(("in_steps", "measured"), [(5000, None), (7000, 7000)])
def test_the_peak_is_of_steps_not_of_what_came_before(
    in_steps: int, measured: int | None, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On an H200 timing stages alone filled 4.99 GiB and steps 2.9, and 4.99 were shown as theirs."""
    peaks = itertools.chain([5000], itertools.repeat(in_steps))  # the first is asked for before the first step

    class Counting:
        def memory_stats(self) -> dict[str, int]:
            return {"peak_bytes_in_use": next(peaks)}

    monkeypatch.setattr(step_log, "peak_bytes_in_use", lambda _, baseline: peak_bytes_in_use([Counting()], baseline))
    result, printed = run(config(text, tmp_path / "run", "run.steps=2", "run.log_every=1"))
    assert result.peak_measured_bytes == measured
    assert ("KiB measured" in printed) == (measured is not None)


def test_interrupted_and_resumed_equals_straight(
    stopped: tuple[Path, TrainResult, str], straight: tuple[Path, TrainResult, str], text: Path, tmp_path: Path
) -> None:
    _, result, printed = stopped
    assert (result.stopped, result.step, result.steps_run) == (True, HALF, HALF)
    assert printed.splitlines()[-1] == (
        f"stopped by SIGINT after step {HALF} of {STEPS}; the checkpoint is saved, run the same command again to go on"
    )
    out_dir = copy_run(stopped[0], tmp_path / "run")
    handler = signal.getsignal(signal.SIGINT)  # ignored where the tests run in the background of a shell
    resumed, printed = run(config(text, out_dir))
    assert f"resumed from step {HALF}" in printed
    assert (resumed.step, resumed.steps_run, resumed.stopped) == (STEPS, STEPS - HALF, False)
    assert_same_run(out_dir, straight[0])
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_killed_process_and_a_terminated_run_resume_bit_for_bit(
    text: Path, tmp_path: Path, straight: tuple[Path, TrainResult, str], capfd: pytest.CaptureFixture[str]
) -> None:
    """The exit code after SIGTERM: as after SIGINT, in test_run_endings.py."""
    out_dir = tmp_path / "run"
    arguments = ["train", *settings(text, out_dir)]
    with start(arguments, stop_at="step 15/") as child:
        wait_until_stopped(child)
        child.kill()
    assert child.returncode == -signal.SIGKILL
    last_step = CheckpointStore(out_dir / "checkpoints").latest_intact().step
    assert last_step in (5, 10, 15)

    def terminate(printed: str) -> None:
        if printed.startswith(f"resumed from step {last_step} "):
            signal.raise_signal(signal.SIGTERM)

    result, out = run(config(text, out_dir), terminate)
    assert result.stopped
    at = CheckpointStore(out_dir / "checkpoints").latest_intact().step
    assert at is not None
    assert at >= last_step
    assert f"stopped by SIGTERM after step {at} of {STEPS}; the checkpoint is saved" in out
    assert capfd.readouterr().err == "SIGTERM: stopping after this step and saving; a second signal ends at once\n"

    run(config(text, out_dir))
    assert_same_run(out_dir, straight[0])


STOP_LOOP = """
import time
from jaxpipe.train.run.ending import Stop
with Stop() as stop:
    print("ready", flush=True)
    while True:
        time.sleep(0.01)
        if stop.requested:
            print("asked by", stop.requested, flush=True)
            time.sleep(600)
"""


@pytest.mark.parametrize(
    ("first", "second"),
    [(signal.SIGINT, signal.SIGINT), (signal.SIGINT, signal.SIGTERM), (signal.SIGTERM, signal.SIGINT)],
)
def test_a_second_signal_ends_at_once(first: signal.Signals, second: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STOP_LOOP], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        read_until(child, "ready")
        child.send_signal(first)
        read_until(child, f"asked by {first.name}")
        child.send_signal(second)
        assert child.wait() == 130


# -- going on elsewhere ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(["pipeline.ranks=1"], marks=pytest.mark.soak),
        pytest.param(["pipeline.schedule=zb-h1", "pipeline.microbatches=2"], marks=pytest.mark.soak),
        pytest.param(["pipeline.schedule=interleaved-1f1b", "pipeline.chunks=2"], marks=pytest.mark.soak),
        ["pipeline.tp=2", "pipeline.dp=2", "pipeline.sequence_parallel=true", "pipeline.zero1=true"],
    ],
    ids=["one rank", "another schedule and microbatch count", "two chunks a rank", "eight devices with ZeRO-1"],
)
def test_another_pipeline_goes_on_with_the_same_data(
    overrides: list[str],
    text: Path,
    tmp_path: Path,
    stopped: tuple[Path, TrainResult, str],
    straight: tuple[Path, TrainResult, str],
) -> None:
    out_dir = copy_run(stopped[0], tmp_path / "run")
    run(config(text, out_dir, *overrides))
    got, expected = losses(out_dir), losses(straight[0])
    assert list(got) == list(expected)
    np.testing.assert_allclose(list(got.values()), list(expected.values()), rtol=1e-5)
    assert final(out_dir)[2] == final(straight[0])[2]  # the position in the data
    np.testing.assert_allclose(final(out_dir)[3], final(straight[0])[3], rtol=1e-5)


def test_a_damaged_newest_checkpoint_is_passed_over(
    text: Path, tmp_path: Path, straight: tuple[Path, TrainResult, str]
) -> None:
    out_dir = copy_run(straight[0], tmp_path / "run")
    newest = max((out_dir / "checkpoints" / f"{STEPS:08d}" / "params").rglob("*"), key=lambda p: p.stat().st_size)
    newest.write_bytes(newest.read_bytes()[:-7])
    _, printed = run(config(text, out_dir))
    assert f"warning: passed over step {STEPS}: " in printed
    assert "resumed from step 15" in printed
    assert_same_run(out_dir, straight[0])


def test_all_checkpoints_damaged(text: Path, tmp_path: Path, straight: tuple[Path, TrainResult, str]) -> None:
    out_dir = copy_run(straight[0], tmp_path / "run")
    for manifest in out_dir.rglob("checkpoint.json"):
        manifest.unlink()
    before = contents(out_dir)
    with pytest.raises(CheckpointError, match="no checkpoint is intact"):
        run(config(text, out_dir))
    assert contents(out_dir) == before


def test_a_finished_run_does_nothing_but_say_so(text: Path, straight: tuple[Path, TrainResult, str]) -> None:
    out_dir, first_result, _ = straight
    before = contents(out_dir)
    result, printed = run(config(text, out_dir))
    assert printed == (
        f"nothing to do: {out_dir} is at step {STEPS} of run.steps={STEPS}; raise run.steps, or choose another run.out_dir\n"
    )
    assert (result.step, result.steps_run, result.stopped) == (STEPS, 0, False)
    assert (result.loss, result.eval_loss) == (first_result.loss, first_result.eval_loss)
    assert "nan" not in result_text(result)
    assert contents(out_dir) == before


def test_another_model_in_the_directory_is_refused(
    text: Path, tmp_path: Path, stopped: tuple[Path, TrainResult, str]
) -> None:
    out_dir = stopped[0]
    before = contents(out_dir)
    for override, what in {
        "model.options.d_model=32": "model.options.d_model is 32, was 16",
        "model.options.num_heads=4": "model.options.num_heads is 4, was 2",  # every shape agrees
        "model.options.norm_eps=0.1": "model.options.norm_eps is 0.1, was not set",
    }.items():
        with pytest.raises(CheckpointError, match="of another model") as info:
            run(config(text, out_dir, override))
        assert what in str(info.value)
    with pytest.raises(DataError, match=r"data\.seed=1.*0"):
        run(config(text, out_dir, "data.seed=1"))
    other = write_text(tmp_path / "other.txt", lines=300)
    with pytest.raises(DataError, match="differ from the checkpoint"):
        run(config(other, out_dir))
    with pytest.raises(CheckpointError, match=r"run\.resume=never would overwrite"):
        run(config(text, out_dir, "run.resume=never"))
    with pytest.raises(CheckpointError, match="no checkpoint to resume from"):
        run(config(text, tmp_path / "new", "run.resume=must"))
    assert contents(out_dir) == before
    assert not (tmp_path / "new").exists()


def test_a_default_spelt_out_is_the_same_model(
    text: Path, tmp_path: Path, stopped: tuple[Path, TrainResult, str]
) -> None:
    out_dir = copy_run(stopped[0], tmp_path / "run")
    result, _ = run(config(text, out_dir, "model.options.tied=true", "run.steps=12", "run.eval_every=0"))
    assert (result.step, result.steps_run) == (12, 2)


def test_one_process_at_a_time(text: Path, straight: tuple[Path, TrainResult, str]) -> None:
    settings = config(text, straight[0], "run.steps=21")
    with RunDirectory(settings.run), pytest.raises(ConfigError, match="another process is training in it"):
        run(settings)


# -- failures ---------------------------------------------------------------------------------------------------------


def test_a_failing_instruction_leaves_the_last_checkpoint(
    text: Path,
    tmp_path: Path,
    stopped: tuple[Path, TrainResult, str],
    straight: tuple[Path, TrainResult, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out_dir = copy_run(stopped[0], tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(Executor, "run", _failing_from(8, Executor.run))
        with pytest.raises(RunError) as info:
            run(config(text, out_dir))
    assert str(info.value) == (
        "after step 16: rank 1, action B1.2 (stage 1, microbatch 2) failed: out of luck; run the same command again to go on "
        "from step 15"
    )
    assert max(losses(out_dir)) == 16
    run(config(text, out_dir))
    assert_same_run(out_dir, straight[0])


def _failing_from(call: int, original: Callable[..., Any]) -> Callable[..., Any]:
    calls = itertools.count(1)

    def run(self: Executor, *args: Any, **kwargs: Any) -> Any:
        if next(calls) == call:  # one is the warm-up
            raise RunError("rank 1, action B1.2 (stage 1, microbatch 2) failed: out of luck")
        return original(self, *args, **kwargs)

    return run


def test_a_failure_on_a_device_is_told_when_its_result_is_awaited(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = itertools.count(1)

    def fail(loss: Any) -> Any:
        if next(calls) == 3:
            raise ValueError("the device caught fire")
        return loss

    compile_setup = loop.compile_setup

    def compile_and_break(*args: Any, **kwargs: Any) -> Any:
        trainer = compile_setup(*args, **kwargs)
        scalars = trainer.train_step._scalars
        combine = scalars.combine

        def broken(*inputs: Any) -> Any:
            metrics = combine(*inputs)
            burn = jax.jit(lambda x: jax.pure_callback(fail, jax.ShapeDtypeStruct((), x.dtype), x))
            return replace(metrics, loss=burn(metrics.loss))

        monkeypatch.setattr(scalars, "combine", broken)
        return trainer

    monkeypatch.setattr(loop, "compile_setup", compile_and_break)
    with pytest.raises(
        RunError,
        match=r"^after.*2.*caught",
    ) as info:
        run(config(text, tmp_path / "run"))
    assert "\n" not in str(info.value)


def test_a_full_disk_is_told_and_loses_nothing(
    text: Path, tmp_path: Path, stopped: tuple[Path, TrainResult, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out_dir = copy_run(stopped[0], tmp_path / "run")

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("jaxpipe.train.checkpoints.contents.write_checkpoint", full)
    with pytest.raises(CheckpointError, match=r"can't save step 20.*[Nn]o space left on device"):
        run(config(text, out_dir))
    assert CheckpointStore(out_dir / "checkpoints").latest_intact().step == HALF


def test_tensorboard_is_asked_for_before_anything_is_compiled(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ConfigError, match="pip install tensorboardX"):
        run(config(text, tmp_path / "run", "run.tensorboard=true"))
    assert not (tmp_path / "run").exists()


def test_a_window_of_steps_is_traced(text: Path, tmp_path: Path) -> None:
    quiet = ("run.eval_every=0", "run.checkpoint_every=0")
    _, output = run(config(text, tmp_path / "run", "run.steps=3", "run.profile_steps=2,3", *quiet))
    folder = tmp_path / "run" / "profile"
    assert f"the trace of run.profile_steps is in {folder}" in output
    assert len(list(folder.glob("plugins/profile/*/*.xplane.pb"))) == 1
    assert json.loads((folder / "timeline.trace.json").read_text())


def test_the_pace_counts_what_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps, dispatched in no time, of which the second is waited for: it takes as long as that."""
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    pace = Pace(100)
    for seconds in (30.0, 2.0):
        with pace.step():
            pass
        with pace.waiting():
            clock[0] += seconds
    assert pace.lap() == pace.tokens_per_s == 50


# -- what a run leaves ----------------------------------------------------------------------------------------------------


def test_metrics_have_every_step_once(straight: tuple[Path, TrainResult, str]) -> None:
    out_dir, result, _ = straight
    records = list(read_metrics(out_dir / "metrics.jsonl"))
    steps = [r for r in records if "loss" in r]
    evaluations = [r for r in records if "eval_loss" in r]
    assert [r["step"] for r in steps] == list(range(1, STEPS + 1))
    assert [r["step"] for r in evaluations] == [5, 10, 15, 20]
    assert result.eval_loss == evaluations[-1]["eval_loss"] < evaluations[0]["eval_loss"]
    assert all(r["applied"] is True and r["tokens"] == 64 and r["grad_norm"] > 0 for r in steps)
    for record in steps:
        measured = record.keys() & MEASURED
        assert measured == (MEASURED if record["step"] % 5 == 0 else set())
        assert all(record[name] > 0 for name in measured)


def test_the_checkpoint_of_the_lowest_loss_is_the_one_that_was_evaluated(text: Path, tmp_path: Path) -> None:
    """A checkpoint of a step that was not evaluated has no evaluation loss, least of all an older step's."""
    out_dir = tmp_path / "run"
    overrides = ("run.steps=7", "run.checkpoint_every=2", "run.eval_every=4", "run.keep_last=9")
    run(config(text, out_dir, *overrides))
    store = CheckpointStore(out_dir / "checkpoints")
    evaluated = {r["step"]: r["eval_loss"] for r in read_metrics(out_dir / "metrics.jsonl") if "eval_loss" in r}
    assert list(evaluated) == [4, 7]
    assert {s: store.load(s).eval_loss for s in store.steps()} == {2: None, 6: None, **evaluated}


def test_evaluation_without_a_pipeline_agrees(text: Path, straight: tuple[Path, TrainResult, str]) -> None:
    out_dir, result, _ = straight
    trained = load_trained(out_dir)
    assert (trained.step, trained.model.name) == (STEPS, "gpt")
    batches = load_dataset(trained.config).held_out_batches(2, 8, 8)  # eval_batches · microbatches, of microbatch size
    score = held_out_score(trained, batches, 1.0)
    assert result.eval_loss is not None
    np.testing.assert_allclose(score.loss, result.eval_loss, rtol=1e-5)
    assert {len(a.devices()) for a in jax.tree.leaves(trained.params)} == {1}
    same = load_trained(out_dir / "checkpoints" / f"{STEPS:08d}")
    assert_same_arrays(same.params, trained.params)
    assert_same_arrays(load_params(out_dir), trained.params)
    best = load_trained(out_dir, step="best")
    assert (
        best.step
        == min((r["eval_loss"], r["step"]) for r in read_metrics(out_dir / "metrics.jsonl") if "eval_loss" in r)[1]
    )


def test_config_plan_and_schedule_are_kept(text: Path, straight: tuple[Path, TrainResult, str]) -> None:
    out_dir = straight[0]
    assert load_config(out_dir / "config.toml") == config(text, out_dir)
    schedule = read_schedule(out_dir / "schedule.sched")
    assert (schedule.name, schedule.num_ranks, schedule.num_microbatches) == ("1f1b", 2, 4)
    assert (out_dir / "plan.json").stat().st_size > 100
    json.loads((out_dir / "plan.json").read_text(encoding="utf-8"), parse_constant=pytest.fail)


def test_pictures_show_the_schedule_as_it_ran(straight: tuple[Path, TrainResult, str]) -> None:
    pictures = straight[0] / "pictures"
    assert sorted(p.name for p in pictures.iterdir()) == sorted(PICTURES)
    assert (pictures / "timeline.svg").read_text(encoding="utf-8").count("<path") > 50
    assert (pictures / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert (pictures / "timeline.png").stat().st_size > 10_000
    assert "measured" in (pictures / "timeline.html").read_text(encoding="utf-8")
    schedule = read_schedule(straight[0] / "schedule.sched")
    rows = {rank: [str(slot) for slot in row] for rank, row in enumerate(schedule.rows)}
    assert trace_rows(pictures / "timeline.trace.json", "measured") == rows
    simulated = trace_rows(pictures / "timeline.trace.json", "simulated")
    assert simulated == rows


@pytest.mark.soak
def test_bfloat16_with_dropout_and_a_bidirectional_file(text: Path, tmp_path: Path) -> None:
    """Everything at once: a schedule file of two flows, mixed precision, dropout, no evaluation, one final checkpoint."""
    from jaxpipe.schedule import bidirectional, write_schedule
    from tests.support.pipelines import some_schedule

    path = tmp_path / "both-ways.sched"
    write_schedule(some_schedule(bidirectional(2), 4), path)
    overrides = [
        f"pipeline.schedule={path}", "run.dtype=bfloat16", "model.options.dropout=0.1", "run.steps=4",
        "run.eval_every=0", "run.checkpoint_every=0", "run.log_every=2", "optimizer.clip_norm=0.5",
    ]  # fmt: skip
    result, printed = run(config(text, tmp_path / "run", *overrides))
    assert (result.step, result.eval_loss) == (4, None)
    assert "held-out" not in printed
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    assert store.steps() == (4,)
    floats = [a for a in jax.tree.leaves(store.load(4).params) if a.dtype.kind == "f"]
    assert {a.dtype.name for a in floats} == {"float32"}
    resumed, _ = run(config(text, tmp_path / "run", *overrides, "run.steps=6"))
    assert (resumed.step, resumed.steps_run) == (6, 2)


def test_progress_goes_nowhere_but_to_the_stream(
    text: Path, straight: tuple[Path, TrainResult, str], capsys: pytest.CaptureFixture[str]
) -> None:
    stream = io.StringIO()
    began_cpu_s = time.process_time()
    loop.train(config(text, straight[0]), stream)
    assert time.process_time() - began_cpu_s < 5, "a finished run builds nothing"
    assert stream.getvalue()
    assert capsys.readouterr().out == ""
