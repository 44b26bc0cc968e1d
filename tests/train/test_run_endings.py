"""How a run ends, and what must not end it: streams that die, disks that are full, devices that hang, values that are not
finite, directories that are somebody else's. Exit codes come from child processes where a process must end by force."""

from __future__ import annotations

import errno
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jaxpipe.axes import RankMesh
from jaxpipe.cli import main
from jaxpipe.cost.memory import KINDS, MemoryReport, RankMemory
from jaxpipe.errors import (
    EXIT_CODES,
    CheckpointError,
    ConfigError,
    DataError,
    JaxpipeError,
    NotFiniteError,
    RunError,
    short_message,
)
from jaxpipe.schedule import generate
from jaxpipe.train.checkpoint import CheckpointStore
from jaxpipe.train.checkpoints.contents import write_checkpoint
from jaxpipe.train.config import TrainConfig, load_config
from jaxpipe.train.corpora.datasets import load_dataset
from jaxpipe.train.devices import device_errors, find_devices
from jaxpipe.train.metrics import MetricsLog, read_metrics
from jaxpipe.train.run import run_directory
from jaxpipe.train.run.run_directory import RunDirectory, result_json
from jaxpipe.train.step import TrainStep
from tests.support.paths import ROOT
from tests.support.train_runs import (
    STEPS,
    contents,
    losses,
    read_until,
    run,
    settings,
    start,
    wait_until_stopped,
    write_text,
)

pytestmark = pytest.mark.usefixtures("one_build")

BAD = "model.target=tests.support.failing_models:"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture(scope="module")
def marked_text(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Provide the text with a ``Q`` among the targets of some steps, and in what is held out if asked for."""

    def make(*steps: int, held_out: bool = False) -> Path:
        content = bytearray(text.read_bytes())
        dataset = load_dataset(tiny_config(text, Path("nowhere")))
        batches = dataset.batches(0, 8, 8)
        for a, b in dataset.held_out if held_out else ():
            content[a:b] = content[a:b].replace(b"t", b"Q")
        starts = [a for start, stop in dataset.train for a in range(start, stop - 8, 8)]
        for step in steps:
            content[starts[batches.indices_at(step - 1)[0]] + 4] = ord("Q")
        path = tmp_path_factory.mktemp("spoilt") / "text.txt"
        path.write_bytes(content)
        return path

    return make


def tiny(text: Path, out_dir: Path, *overrides: str) -> list[str]:
    """Return overrides that make a run even smaller than those of other tests: it ends badly, and is not looked at."""
    return settings(
        text, out_dir, "model.options.num_layers=1", "pipeline.microbatches=2", "run.eval_every=0", *overrides
    )


def tiny_config(text: Path, out_dir: Path, *overrides: str) -> TrainConfig:
    return load_config(None, tiny(text, out_dir, *overrides))


def steps_in(out_dir: Path) -> tuple[int, ...]:
    return CheckpointStore(out_dir / "checkpoints").steps()


def run_jaxpipe(arguments: Sequence[str]) -> tuple[int, str, str]:
    """Run ``jaxpipe ARGUMENTS`` and return its exit code, stdout and stderr."""
    with start(arguments) as child:
        out, err = child.communicate()
    return child.returncode, out, err


# -- exit codes -----------------------------------------------------------------------------------------------------------


def test_every_error_has_a_documented_exit_code() -> None:
    def below(kind: type[JaxpipeError]) -> Iterator[type[JaxpipeError]]:
        yield kind
        for other in kind.__subclasses__():
            yield from below(other)

    codes = {kind.__name__: kind.exit_code for kind in below(JaxpipeError)}
    assert set(codes.values()) <= EXIT_CODES.keys()
    assert (codes["ConfigError"], codes["RunError"], codes["CheckpointError"], codes["NotFiniteError"]) == (2, 5, 3, 4)


def test_the_codes_are_in_the_readme_and_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    readme = (ROOT / "jaxpipe" / "cli" / "README.md").read_text(encoding="utf-8")
    assert main(["train", "--help"]) == 0
    printed = capsys.readouterr().out
    for code, meaning in EXIT_CODES.items():
        assert f"| {code} | {meaning} |" in readme.replace("\\|", "|")
        assert f"  {code:<3}  {meaning}\n" in printed


def test_codes_of_mistakes(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """2, and 3 by a process that compiles nothing; 75 is tested where runs are stopped."""
    assert main(["train", *tiny(text, tmp_path / "run", "run.stepz=1")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    code, _, err = run_jaxpipe(["train", *tiny(text, tmp_path / "run", "run.resume=must")])
    assert (code, err.count("\n")) == (3, 1)
    assert contents(tmp_path) == {}
    assert not (tmp_path / "run").exists()


def test_a_reader_that_has_seen_enough_is_no_mistake() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stdout:
        arguments = [sys.executable, "-m", "jaxpipe", "schedules"]
        result = subprocess.run(arguments, cwd=ROOT, stdout=stdout, stderr=subprocess.PIPE, text=True)
    assert (result.returncode, result.stderr) == (141, "")


# -- what is less important than checkpoints ------------------------------------------------------------------------------


def test_a_dead_stdout_and_ctrl_c_still_save(text: Path, tmp_path: Path) -> None:
    """``jaxpipe train … | tee log`` and Ctrl-C, which ends tee too."""
    overrides = ("run.steps=1000000", "run.checkpoint_every=0")
    with start(["train", *tiny(text, tmp_path / "run", *overrides)]) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        read_until(child, "step 10/")
        child.stdout.close()
        assert "output can't be written (Broken pipe)" in child.stderr.readline()
        child.send_signal(signal.SIGINT)
        assert child.wait() == 75, child.stderr.read()
    (step,) = steps_in(tmp_path / "run")
    assert max(losses(tmp_path / "run")) == step > 10


def test_nothing_but_checkpoints_is_needed(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings, plan, metrics and pictures can't be written: a line each, and the run is as good as any."""

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def refuse_metrics(self: MetricsLog, line: bytes) -> None:
        self._complain(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))

    monkeypatch.setattr(run_directory, "write_atomically", full)
    monkeypatch.setattr(run_directory, "PICTURES", ("timeline.svg",))
    monkeypatch.setattr(run_directory, "plot_timelines", full)
    monkeypatch.setattr(MetricsLog, "_append", refuse_metrics)
    result, printed = run(tiny_config(text, tmp_path / "run", "run.steps=5"))
    assert (result.step, result.stopped) == (5, False)
    assert steps_in(tmp_path / "run") == (5,)
    warnings = [line.split(" can't be written")[0] for line in printed.splitlines() if line.startswith("warning: ")]
    assert warnings == [
        "warning: settings and plan",
        f"warning: metrics ({tmp_path / 'run' / 'metrics.jsonl'})",
        "warning: pictures",
    ]
    assert printed.count("No space left on device") == 3
    monkeypatch.undo()
    assert run(tiny_config(text, tmp_path / "run", "run.steps=5"))[1].startswith("nothing to do: ")


@pytest.fixture(autouse=True, scope="module")
def hearing_sighup() -> Iterator[None]:
    """Children inherit what is ignored: under nohup they would never hear it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


STOP_LOOP = """
import signal, sys, time
from jaxpipe.train.run.ending import Stop
for name in sys.argv[1:]:
    signal.signal(signal.Signals[name], signal.SIG_IGN)
with Stop() as stop:
    print("ready", flush=True)
    while not stop.requested:
        time.sleep(0.01)
print("asked by", stop.requested, flush=True)
"""


@pytest.mark.parametrize(
    ("ignored", "signals", "signal_name"),
    [
        ([], ["SIGHUP"], "SIGHUP"),
        ([], ["SIGUSR1"], "SIGUSR1"),
        (["SIGHUP"], ["SIGHUP", "SIGTERM"], "SIGTERM"),
        (["SIGUSR1"], ["SIGUSR1", "SIGINT"], "SIGINT"),
    ],
)
def test_signals_of_terminals_and_slurm(ignored: list[str], signals: list[str], signal_name: str) -> None:
    """nohup ignores SIGHUP: it stays ignored, and does not count as the first of two."""
    with subprocess.Popen(
        [sys.executable, "-c", STOP_LOOP, *ignored], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        read_until(child, "ready")
        for name in signals:
            child.send_signal(signal.Signals[name])
        out, err = child.communicate()
    assert (child.returncode, out) == (0, f"asked by {signal_name}\n")
    assert err == f"{signal_name}: stopping after this step and saving; a second signal ends at once\n"


# -- saves that fail ------------------------------------------------------------------------------------------------------


def failing_writes(monkeypatch: pytest.MonkeyPatch, fails: Callable[[int], bool]) -> list[int]:
    """Return a list that collects the steps of all attempts to save; those whose number ``fails`` selects end in a full
    disk."""
    attempts: list[int] = []

    def maybe(folder: Path, step: int, *args: Any) -> None:
        attempts.append(step)
        if fails(len(attempts)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_checkpoint(folder, step, *args)

    monkeypatch.setattr("jaxpipe.train.checkpoints.contents.write_checkpoint", maybe)
    return attempts


def test_a_save_that_failed_is_tried_again_with_pauses(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full for four tries. Steps are waited for, so that a failure shows at the next step and not later."""
    attempts = failing_writes(monkeypatch, lambda number: number <= 4)
    save = CheckpointStore.save

    def save_now(self: CheckpointStore, *args: Any, **kwargs: Any) -> None:
        save(self, *args, **kwargs)
        assert self._writer is not None
        self._writer.submit(lambda: None).result()

    monkeypatch.setattr(CheckpointStore, "save", save_now)
    result, printed = run(tiny_config(text, tmp_path / "run", "run.checkpoint_every=10"))
    assert attempts == [10, 11, 13, 16, 20]
    assert (result.step, steps_in(tmp_path / "run")) == (STEPS, (STEPS,))
    assert printed.count("warning: can't save step") == 4
    assert printed.count("no space left on device") == 4


def test_a_last_save_that_fails_ends_the_run_with_what_is_left(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = failing_writes(monkeypatch, lambda number: number > 1)
    with pytest.raises(CheckpointError) as info:
        run(tiny_config(text, tmp_path / "run", "run.steps=8", "run.checkpoint_every=4"))
    assert str(info.value).startswith("after step 8: can't save step 8 in ")
    assert str(info.value).endswith("; run the same command again to go on from step 4")
    assert info.value.exit_code == 3
    assert attempts == [4, 8, 8]


# -- hanging --------------------------------------------------------------------------------------------------------------


def test_a_step_that_hangs_ends_the_process(marked_text: Callable[..., Path], tmp_path: Path) -> None:
    overrides = (f"{BAD}hangs", "run.watchdog_s=1", "run.checkpoint_every=3")
    code, _, err = run_jaxpipe(["train", *tiny(marked_text(7), tmp_path / "run", *overrides)])
    lines = err.splitlines()
    assert code == 5, err
    assert any(line.startswith(("Current thread ", "Thread ")) for line in lines)
    assert lines[-1].startswith("jaxpipe: step ")
    assert ": rank 1, action F1." in lines[-1]
    assert lines[-1].endswith(" of step 7 has not run; run the same command again to go on from step 6")


def test_what_is_whole_when_a_step_hangs_is_saved(marked_text: Callable[..., Path], tmp_path: Path) -> None:
    """A recorded step is waited for before its update takes the state of the step before."""
    overrides = (f"{BAD}hangs", "run.watchdog_s=1", "run.checkpoint_every=4", "run.log_every=1")
    code, _, err = run_jaxpipe(["train", *tiny(marked_text(7), tmp_path / "run", *overrides)])
    assert (code, steps_in(tmp_path / "run")) == (5, (4, 6))
    assert err.splitlines()[-1].endswith(" of step 7 has not run; run the same command again to go on from step 6")


def test_an_evaluation_that_hangs_ends_the_process(marked_text: Callable[..., Path], tmp_path: Path) -> None:
    overrides = (f"{BAD}hangs", "run.watchdog_s=2", "run.checkpoint_every=2", "run.eval_every=6", "run.eval_batches=1")
    code, _, err = run_jaxpipe(["train", *tiny(marked_text(held_out=True), tmp_path / "run", *overrides)])
    assert code == 5
    line = err.splitlines()[-1]
    assert line.startswith("jaxpipe: step 6 has not ended after ")
    assert re.search(
        r"\(run.watchdog_s\): its evaluation has not; run the same command again to go on from step 6$", line
    )


@pytest.mark.parametrize("name", ["SIGTERM", *(pytest.param(n, marks=pytest.mark.soak) for n in ("SIGHUP", "SIGUSR1"))])
def test_a_signal_before_the_first_step_ends_at_once(name: str, text: Path, tmp_path: Path) -> None:
    """They ended the process without a word."""
    with start(["train", *tiny(text, tmp_path / "run")], stop_at="tracing") as child:
        wait_until_stopped(child)
        child.send_signal(signal.Signals[name])
        child.send_signal(signal.SIGCONT)
        _, err = child.communicate()
    message = f"{name}: ended before the first step, nothing was changed; the same command starts again"
    assert (child.returncode, err.strip()) == (75, message)
    assert not (tmp_path / "run").exists()


def test_a_second_signal_ends_a_run_that_hangs(
    marked_text: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The main thread waits inside XLA, where no Python handler runs."""
    overrides = (f"{BAD}hangs", "run.watchdog_s=0", "run.checkpoint_every=3")
    monkeypatch.setenv("JAXPIPE_TEST_HANGING", str(tmp_path / "hangs"))
    with start(["train", *tiny(marked_text(7), tmp_path / "run", *overrides)]) as child:
        assert child.stderr is not None
        while 6 not in steps_in(tmp_path / "run") or not (tmp_path / "hangs").exists():
            assert child.poll() is None
            time.sleep(0.1)
        child.send_signal(signal.SIGHUP)
        assert child.stderr.readline().startswith("SIGHUP: stopping after this step")
        child.send_signal(signal.SIGINT)
        assert child.wait() == 130
        assert child.stderr.read() == "SIGINT: ended at once; what was saved before is intact\n"
    assert steps_in(tmp_path / "run") == (3, 6)


# -- not finite -----------------------------------------------------------------------------------------------------------


def test_a_row_of_skipped_steps_ends_the_run(
    marked_text: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out_dir = tmp_path / "run"
    overrides = (f"{BAD}not_finite", "run.max_skipped=3", "run.checkpoint_every=4")
    code = main(["train", *tiny(marked_text(7, 8, 9), out_dir, *overrides)])
    assert (code, capsys.readouterr().err) == (
        4,
        "jaxpipe: steps 7 to 9 were not finite (run.max_skipped=3): optimizer.lr=0.01 may be too high, or the data hold ids "
        "that the model does not know; change that and run the same command again to go on from step 4\n",
    )
    assert steps_in(out_dir) == (4,)
    assert [r["step"] for r in read_metrics(out_dir / "metrics.jsonl") if not r["applied"]] == [7, 8, 9]


def test_saves_wait_for_a_finite_step(marked_text: Callable[..., Path], tmp_path: Path) -> None:
    out_dir = tmp_path / "run"
    overrides = (
        f"{BAD}not_finite",
        "run.checkpoint_every=8",
        "run.keep_last=9",
        "run.eval_every=12",
        "run.steps=12",
        "run.log_every=2",
    )
    result, printed = run(tiny_config(marked_text(7, 8, 9, held_out=True), out_dir, *overrides))
    assert (result.step, result.skipped_steps) == (12, 3)
    assert steps_in(out_dir) == (10, 12)
    *step_records, evaluation = read_metrics(out_dir / "metrics.jsonl")
    assert (evaluation, result_json(result)["eval_loss"]) == ({"step": 12, "eval_loss": None}, None)
    assert CheckpointStore(out_dir / "checkpoints").best() is None
    records = {r["step"]: r for r in step_records}
    assert [n for n, r in records.items() if not r["applied"]] == [7, 8, 9]
    assert [records[n]["loss"] for n in (7, 8, 9)] == [None] * 3
    assert printed.count("step 7: the gradient is not finite; parameters were left as they are") == 1
    assert printed.count("the gradient is not finite") == 1
    assert printed.count("step 10: finite again; 3 steps were skipped") == 1
    (line,) = [line for line in printed.splitlines() if line.startswith("step 12/12")]
    assert "  3 skipped" in line


def test_a_weight_that_is_not_finite_counts_for_the_step(marked_text: Callable[..., Path], tmp_path: Path) -> None:
    """It ended in a traceback."""
    overrides = (f"{BAD}weightless", "run.steps=9")
    result, _ = run(tiny_config(marked_text(7), tmp_path / "run", *overrides))
    assert (result.step, result.skipped_steps) == (9, 1)
    (skipped,) = (r for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if r["step"] == 7)
    assert (skipped["applied"], skipped["tokens"]) == (False, None)


@pytest.mark.parametrize("rate", [pytest.param("1e5", marks=pytest.mark.soak), "1e30"])
def test_a_run_that_blows_up_keeps_what_was_good(rate: str, text: Path, tmp_path: Path) -> None:
    """Without evaluation, checkpoints of finite parameters with absurd losses replaced all good ones."""
    out_dir = tmp_path / "run"
    overrides = ("run.checkpoint_every=1", "run.keep_last=1", "run.keep_best=0")
    run(tiny_config(text, out_dir, *overrides, "run.steps=6"))
    assert steps_in(out_dir) == (6,)
    message = ""
    try:
        run(tiny_config(text, out_dir, *overrides, "run.steps=40", f"optimizer.lr={rate}"))
    except NotFiniteError as error:
        message = str(error)
    losses = {r["step"]: r["loss"] for r in read_metrics(out_dir / "metrics.jsonl")}
    good = [n for n in steps_in(out_dir) if n >= 6 and (losses.get(n + 1) or math.inf) <= losses[1]]
    assert good
    if message and steps_in(out_dir)[-1] != good[-1]:
        assert message.endswith(f"; if that fails, too, move away its checkpoints after step {good[-1]}")


def test_a_stop_among_skipped_steps_prunes_nothing(marked_text: Callable[..., Path], tmp_path: Path) -> None:
    def interrupt(printed: str) -> None:
        if printed.startswith("step 8/"):
            signal.raise_signal(signal.SIGTERM)

    overrides = (
        f"{BAD}not_finite",
        "run.checkpoint_every=1",
        "run.keep_last=1",
        "run.keep_best=0",
        "run.log_every=8",
    )
    result, _ = run(tiny_config(marked_text(7, 8, 9), tmp_path / "run", *overrides), interrupt)
    assert (result.stopped, result.step) == (True, 8)
    assert steps_in(tmp_path / "run") == (5, 6, 8)  # 5: the last that a good step followed when 6 was saved


def test_parameters_that_are_not_finite_are_not_saved(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = TrainStep.__call__

    def spoil(self: TrainStep, *args: Any, **kwargs: Any) -> Any:
        state, metrics = call(self, *args, **kwargs)
        updated = replace(metrics.updated(), finite=state.step != 7)
        return state, replace(metrics, updated=lambda: updated)

    monkeypatch.setattr(TrainStep, "__call__", spoil)
    overrides = ("run.checkpoint_every=3", "run.keep_last=9")
    with pytest.raises(NotFiniteError, match=r"^step.*7 made.*optimizer\.lr=0\.01.*6$"):
        run(tiny_config(text, tmp_path / "run", *overrides))
    assert steps_in(tmp_path / "run") == (3, 6)


def test_abort_at_the_first(marked_text: Callable[..., Path], tmp_path: Path) -> None:
    overrides = (f"{BAD}not_finite", "run.on_nonfinite=abort")
    with pytest.raises(NotFiniteError, match=r"^step.*7.*\(run\.max_skipped=1\).*5$"):
        run(tiny_config(marked_text(7), tmp_path / "run", *overrides))
    assert steps_in(tmp_path / "run") == (5,)


# -- errors keep cause and advice -----------------------------------------------------------------------------------------


def test_an_error_of_a_device_keeps_its_cause_and_advice(
    marked_text: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = (f"{BAD}breaks", "run.checkpoint_every=3")
    assert main(["train", *tiny(marked_text(7), tmp_path / "run", *overrides)]) == 5
    line = capsys.readouterr().err
    assert line.startswith("jaxpipe: after step 6: rank 1, action ")
    assert line.endswith("failed: ValueError: the sensor is on fire; run the same command again to go on from step 6\n")
    assert line.count("\n") == 1


def test_the_gist_of_long_messages() -> None:
    frames = "".join(f'  File "/a/very/long/path/{n}.py", line {n}, in call\n' for n in range(40))
    callback = f"INTERNAL: CpuCallback error calling callback: Traceback (most recent call last):\n{frames}ValueError: no\nluck"
    assert short_message(RuntimeError(callback)) == "ValueError: no luck"
    memory_map = (
        "RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.\n" + "  buffer 1: 3 bytes\n" * 99 + "see the log"
    )
    assert (
        short_message(RuntimeError(memory_map)) == "RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes. … see the log"
    )
    assert short_message(RuntimeError("a\nshort one")) == "a short one"
    nested = "INTERNAL: " + "Error dispatching computation: " * 9 + "Error while transferring: Connection closed"
    assert short_message(RuntimeError(nested)) == "INTERNAL: Connection closed"
    assert short_message(ValueError()) == "ValueError"
    assert len(short_message(RuntimeError("x" * 999))) == 250


def _report(**kinds: int) -> MemoryReport:
    by_kind = {kind: kinds.get(kind, 0) for kind in KINDS}
    total = sum(by_kind.values())
    return MemoryReport((RankMemory(0, total, "F0.0", by_kind, by_kind, total, 0),))


@pytest.mark.parametrize(
    ("memory", "advice"),
    [
        (None, "out of memory: use a smaller run.batch"),
        (
            _report(parameters=3 * 2**30, optimizer=6 * 2**30, residuals=2**30),
            "state take 9 GiB of 10 GiB .* more pipeline.ranks",
        ),
        (
            _report(parameters=2**30, residuals=9 * 2**30),
            "activations and workspace take 9 GiB of 10 GiB .* smaller run.batch",
        ),
    ],
)
def test_advice_is_for_what_does_not_fit(memory: MemoryReport | None, advice: str) -> None:
    """Memory that runs out is any type of error: ``device_put`` raises ValueError."""
    with (
        pytest.raises(RunError, match=rf"^setting up: a device failed: RESOURCE_EXHAUSTED: no room; .*{advice}"),
        device_errors("setting up", None if memory is None else lambda: memory),
    ):
        raise ValueError("RESOURCE_EXHAUSTED: no room")
    with pytest.raises(ValueError, match="a mistake of ours"), device_errors("setting up"):
        raise ValueError("a mistake of ours")


# -- data that are cut ----------------------------------------------------------------------------------------------------


def test_ids_that_are_cut_while_training_end_it_with_a_checkpoint(tmp_path: Path) -> None:
    """Reading beyond the end of a mapped file would be SIGBUS."""
    path = tmp_path / "ids.npy"
    np.save(path, (np.arange(20_000) * 7 % 256).astype(np.uint8))

    def cut(printed: str) -> None:
        if printed.startswith("step 10/"):
            os.truncate(path, 4096)

    with pytest.raises(
        DataError, match=rf"^after step 10, which is saved: data {path}: the file was cut to 4096 bytes"
    ):
        run(tiny_config(path, tmp_path / "run", "data.tokenizer=ids:256"), cut)
    assert steps_in(tmp_path / "run")[-1] == 10
    path.unlink()


# -- the directory --------------------------------------------------------------------------------------------------------


def folder(path: Path) -> RunDirectory:
    return RunDirectory(TrainConfig().override([f"run.out_dir={path}"]).run)


@pytest.mark.parametrize("name", run_directory.CONTENT)
def test_files_of_others_are_not_overwritten(name: str, text: Path, tmp_path: Path) -> None:
    (tmp_path / name).write_text("# mine", encoding="utf-8")
    (tmp_path / "notes.txt").write_text("mine too", encoding="utf-8")
    before = contents(tmp_path)
    with pytest.raises(ConfigError, match=rf"run\.out_dir={tmp_path}: {name} there is no run's of jaxpipe's"):
        run(tiny_config(text, tmp_path))
    assert contents(tmp_path) == before


def test_links_in_the_directory_are_replaced(tmp_path: Path) -> None:
    names = ("config.toml", "plan.json", "schedule.sched")
    (tmp_path / "run").mkdir()
    for name in names:
        (tmp_path / name).write_text("precious", encoding="utf-8")
        (tmp_path / "run" / name).symlink_to(tmp_path / name)
    plan = SimpleNamespace(to_json=lambda: "{}")
    folder(tmp_path / "run").write_plan(TrainConfig(), plan, generate("1f1b", 2, 4))  # type: ignore[arg-type]
    assert {(tmp_path / name).read_text(encoding="utf-8") for name in names} == {"precious"}
    assert load_config(tmp_path / "run" / "config.toml") == TrainConfig()
    with folder(tmp_path / "run"):  # it is known as a run's
        pass


def test_a_new_directory_is_held_from_the_start(tmp_path: Path) -> None:
    """And nothing is left of it, parents neither, if the run does not begin."""
    path = tmp_path / "new" / "run"
    with folder(path):
        with pytest.raises(ConfigError, match="another process is training in it"), folder(path):
            pass
        assert path.is_dir()
    assert list(tmp_path.iterdir()) == []
    with folder(path):
        (path / "config.toml").write_text("something", encoding="utf-8")
    assert contents(tmp_path) == {"new/run/config.toml": b"something"}


def test_places_where_nothing_can_be_saved_are_refused_at_once(text: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.out_dir=/proc/x: can't be made"):
        run(tiny_config(text, Path("/proc/x")))
    (tmp_path / "checkpoints").write_text("in the way", encoding="utf-8")
    with pytest.raises(ConfigError, match=r".*checkpoints \(Not.*directory\)"):
        run(tiny_config(text, tmp_path))
    assert contents(tmp_path) == {"checkpoints": b"in the way"}


# -- devices --------------------------------------------------------------------------------------------------------------


class _Gpu:
    platform = "gpu"


def test_cpu_devices_do_not_stand_in_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with 8 GPUs, as far as JAX says."""
    cpus, gpus = jax.devices("cpu"), [_Gpu()] * 8
    monkeypatch.setattr(jax, "devices", lambda kind=None: cpus if kind == "cpu" else gpus)
    assert find_devices(8) == gpus
    with pytest.raises(ConfigError) as info:
        find_devices(64, mesh=RankMesh(tp=2))
    assert str(info.value) == (
        "64 devices are needed and JAX sees 8 (gpu); ways to use these (--pp --tp --dp): 4×2×1, 2×2×2, 1×2×4, 8×1×1, or set "
        "run.platform=cpu to emulate them, slowly"
    )
    for cp, with_cp in ((4, "4): 1×2×1, 2×1×1, 1×1×2"), (3, "1): 4×2×1, 2×2×2, 1×2×4, 8×1×1")):
        with pytest.raises(ConfigError, match=re.escape(f"(--pp --tp --dp with --cp {with_cp}, or set ")):
            find_devices(64, mesh=RankMesh(tp=2, cp=cp))
    assert find_devices(4, "cpu") == cpus[:4]
