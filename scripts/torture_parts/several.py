"""Runs of 2 to 4 processes, started by ``jaxpipe launch local``, that are killed, stopped, or stand still.

R15 kills one process with -9: the others end within seconds, with one line each. R16 sends a signal to a process or to the
launcher: all stop after the same step, with one checkpoint. R17 stops a process with SIGSTOP, or lets an instruction sleep: the
run ends, and says which process was late. Chains of R15 and R16 end with a run to the last step, whose bits must be those of a
run in one process that nothing disturbed; each run of a chain has another number of processes.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random

from torture_parts.runs import STEPS, Yard, await_moment, check_same_end, checkpoints, last_step, yard_of
from torture_parts.trial import CHILD_LIMIT_S, Bench, Case, FailedError, Trial

ROOT = Path(__file__).resolve().parents[2]
RECIPE = "several"
_GONE_S = 3.0
_BEFORE_JOINING_S = 8.0  # the launcher gives the others 5 s
_NAMED_S = 15.0  # more than the watchdog's limit
_SILENCE_S = 30.0
_SIGNALS = (signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_PER_CHAIN = 5


class Launched:
    """``jaxpipe launch local -n NUMBER -- train …`` of the recipe. Use as a context: nothing is left behind."""

    def __init__(self, yard: Yard, folder: Path, out_dir: Path, number: int, *overrides: str) -> None:
        self.number, self._logs, self._log = number, folder / f"logs-{time.monotonic_ns()}", folder / "launcher.txt"
        command = [*("launch", "local", "-n", str(number), "--logs", str(self._logs), "--")]
        command += yard.settings(out_dir, RECIPE, *overrides)
        with self._log.open("wb") as log:
            self._launcher = subprocess.Popen(
                [sys.executable, "-m", "jaxpipe", *command],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}"},
                stdout=log,
                stderr=log,
            )
        self._found: dict[int, int] = {}

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in (*self.pids().values(), self._launcher.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._launcher.wait()

    @property
    def output(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def said_by(self, process: int) -> list[str]:
        """Return the lines of a process by which it ends."""
        with suppress(FileNotFoundError):
            text = (self._logs / f"process-{process}.log").read_text(encoding="utf-8", errors="replace")
            return [line for line in text.splitlines() if line.startswith("jaxpipe: ")]
        return []

    def pids(self) -> dict[int, int]:
        """Return the process ids by process, as far as they have been started."""
        children = Path(f"/proc/{self._launcher.pid}/task/{self._launcher.pid}/children")
        with suppress(OSError):
            for pid in map(int, children.read_text().split()):
                if pid not in self._found.values() and (number := _number(pid)) is not None:
                    self._found[number] = pid
        return self._found

    def until(self, met: Callable[[], bool]) -> bool:
        """Wait until ``met()``; False if the launcher ended before."""
        deadline = time.monotonic() + CHILD_LIMIT_S
        while self._launcher.poll() is None and time.monotonic() < deadline:
            if met():
                return True
            time.sleep(0.001)
        return False

    def send(self, number: int, process: int | None = None) -> None:
        """To a process, or the launcher."""
        with suppress(ProcessLookupError):
            os.kill(self._launcher.pid if process is None else self.pids()[process], number)

    def gone_after(self, limit_s: float, but: int) -> float:
        """Seconds until all processes ``but`` one have ended; at most the limit."""
        began = time.monotonic()
        pids = [pid for k, pid in self.pids().items() if k != but]
        while any(map(_lives, pids)) and time.monotonic() - began < limit_s:
            time.sleep(0.005)
        return time.monotonic() - began

    def end(self) -> int:
        """Return the launcher's exit code.

        Raises:
            FailedError: it does not end.
        """
        try:
            return self._launcher.wait(CHILD_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise FailedError(f"the launcher does not end: {self.output[-600:]}") from None


def _number(pid: int) -> int | None:
    """Return which process of its run it is; None until it has begun."""
    with suppress(OSError, ValueError, IndexError):
        environ = Path(f"/proc/{pid}/environ").read_bytes()
        return int(environ.split(b"JAXPIPE_PROCESS=")[1].split(b"\0")[0])
    return None


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _check_shown(launched: Launched, what: str) -> None:
    """Check that the screen shows lines, not stack traces of Python or of the libraries below JAX."""
    for noise in ("Traceback (most recent call last)", "Check failure stack trace", "*** SIGABRT"):
        if noise in launched.output:
            raise FailedError(f"{what}: {noise}: {launched.output[-3000:]}")


def _finish(yard: Yard, trial: Trial, out_dir: Path, history: list[str]) -> None:
    number = trial.rng.randint(2, 4)
    what = f"{'; '.join(history)}; then {number} processes"
    with Launched(yard, trial.folder, out_dir, number, "run.checkpoint_every=20") as launched:
        if code := launched.end():
            raise FailedError(f"{what}: the run can't go on (exit code {code}): {launched.output[-900:]}")
    try:
        check_same_end(yard.straight(RECIPE), out_dir)
    except FailedError as error:
        raise FailedError(f"{what}: {error}") from None


def _moment(rng: Random, history: list[str]) -> str:
    if not history:
        return rng.choice(("warm-up", "step"))
    return rng.choice(("warm-up", "step", "step", "save", "save", "evaluation"))


_Once = Callable[[Trial, Launched, str, list[str]], bool]
"""Disturb a run at a moment, and check how it ends. Adds to what has happened; whether the chain goes on."""


def _chain(yard: Yard, once: _Once, trial: Trial) -> None:
    """Runs of one directory, each disturbed ``once``, then one to the last step."""
    yard.straight(RECIPE)  # so that everything is compiled
    out_dir, history = trial.folder / "run", list[str]()
    for _ in range(yard.bench.count(_PER_CHAIN, 2)):
        number, phase = trial.rng.randint(2, 4), _moment(trial.rng, history)
        with Launched(yard, trial.folder, out_dir, number) as launched:
            if not once(trial, launched, phase, history):
                break
    _finish(yard, trial, out_dir, history)


# R15


def kills(bench: Bench) -> Iterator[Case]:
    """R15: chains of runs of several processes, one of which is killed at some moment."""
    yard = yard_of(bench)
    for _ in range(bench.count(8, 1)):
        yield Case("chain of kills of a process", partial(_chain, yard, _killed))


def _killed(trial: Trial, launched: Launched, phase: str, history: list[str]) -> bool:
    out_dir, rng, number = trial.folder / "run", trial.rng, launched.number
    victim = rng.randrange(number)
    await_moment(launched, out_dir, phase, rng)
    launched.until(lambda: len(launched.pids()) == number)
    joined = "documents" in launched.output
    launched.send(signal.SIGKILL, victim)
    gone_s = launched.gone_after(2 * _BEFORE_JOINING_S, victim)
    code = launched.end()
    history.append(f"process {victim} of {number} killed in {phase} at step {last_step(out_dir)}")
    what = f"{'; '.join(history)}: exit code {code}"
    if code == 0:
        history[-1] = "it ended before"
        return False
    where = phase if joined else "start"
    trial.tried[f"kills of a process in {where}"] += 1
    trial.measured.setdefault(f"others gone, {where} (s)", []).append(gone_s)
    _check_shown(launched, what)
    if gone_s > (_GONE_S if joined else _BEFORE_JOINING_S):
        raise FailedError(f"{what}: the others were gone after {gone_s:.1f} s: {launched.output[-900:]}")
    message = f"jaxpipe: process {victim} was killed by SIGKILL; all ended; "
    if code != 6 or launched.output.count(message) != 1:
        raise FailedError(f"{what}: want 6, and {message}: {launched.output[-900:]}")
    lines = [launched.said_by(k) for k in range(number) if k != victim]
    named = re.compile(rf"jaxpipe: process {victim} \(host .*\) was lost: ")
    if joined and not all(len(endings) == 1 and named.match(endings[0]) for endings in lines):
        raise FailedError(f"{what}: want one line each that names it: {lines}")
    return True


# R16


def stops(bench: Bench) -> Iterator[Case]:
    """R16: chains of runs of several processes, one of which, or the launcher, gets a signal."""
    yard = yard_of(bench)
    for _ in range(bench.count(10, 1)):
        yield Case("chain of signals to a process", partial(_chain, yard, _stopped))


def _stopped(trial: Trial, launched: Launched, phase: str, history: list[str]) -> bool:
    out_dir, rng, number = trial.folder / "run", trial.rng, launched.number
    signalled = rng.choice(_SIGNALS)
    whom = rng.choice([None, *range(number)])
    launched.until(lambda: "documents" in launched.output)  # Python's own start is not tried
    await_moment(launched, out_dir, phase, rng)
    launched.send(signalled, whom)
    code, output = launched.end(), launched.output
    to = "the launcher" if whom is None else f"process {whom} of {number}"
    history.append(f"{signalled.name} to {to} in {phase} (exit code {code})")
    what = "; ".join(history)
    if code == 0:
        return False
    before = any(x in output for x in ("before the first step", "was stopped by a signal", "was interrupted"))
    trial.tried[f"{signalled.name} to {'the launcher' if whom is None else 'a process'}"] += 1
    trial.tried["… before the first step"] += before
    _check_shown(launched, what)
    if code != 75 and not (before and signalled is signal.SIGINT):
        raise FailedError(f"{what}: want exit code 75: {output[-900:]}")
    if before:
        return True
    step = int(checkpoints(out_dir)[-1].name)
    if output.count(f"after step {step} of {STEPS}; the checkpoint is saved") != 1 or last_step(out_dir) != step:
        raise FailedError(
            f"{what}: the newest checkpoint is of step {step}, the metrics end at {last_step(out_dir)}: {output[-900:]}"
        )
    return True


# R17


def stuck(bench: Bench) -> Iterator[Case]:
    """R17: a process stands still, or one of its instructions sleeps."""
    yard = yard_of(bench)
    for phase, full, quick in (("step", 6, 1), ("save", 2, 0), ("evaluation", 2, 0), ("warm-up", 2, 0)):
        for _ in range(bench.count(full, quick)):
            yield Case(f"a process stands still, {phase}", partial(_stuck, yard, phase=phase))
    for _ in range(bench.count(6, 1)):
        yield Case("an instruction sleeps", partial(_asleep, yard))


_WATCHED = "run.watchdog_s=4"


def _stuck(yard: Yard, trial: Trial, phase: str) -> None:
    yard.straight(RECIPE)  # so that everything is compiled
    out_dir, rng = trial.folder / "run", trial.rng
    number = rng.randint(2, 4)
    victim = rng.randrange(number)
    with Launched(yard, trial.folder, out_dir, number, _WATCHED) as launched:
        launched.until(lambda: "documents" in launched.output)
        await_moment(launched, out_dir, phase, rng)
        launched.send(signal.SIGSTOP, victim)
        _check_named(trial, launched, victim, f"process {victim} of {number} stopped in {phase}", "was lost: ")
    _finish(yard, trial, out_dir, [f"process {victim} of {number} stopped in {phase}"])


def _asleep(yard: Yard, trial: Trial) -> None:
    """A layer of the model waits as long as a file is there."""
    out_dir, rng, mark = trial.folder / "run", trial.rng, trial.folder / "asleep"
    number, layer = rng.randint(2, 4), rng.randrange(4)
    overrides = (
        "model.target=torture_parts.sleeping:sleepy",
        f"model.options.layer={layer}",
        f"model.options.mark={mark}",
    )
    with Launched(yard, trial.folder, out_dir, number, _WATCHED, *overrides) as launched:
        launched.until(lambda: last_step(out_dir) >= 8)
        mark.touch()
        asleep = Path(f"{mark}.pid")
        launched.until(asleep.exists)
        time.sleep(0.2)
        victim = next(k for k, pid in launched.pids().items() if str(pid) == asleep.read_text())
        _check_named(trial, launched, victim, f"layer {layer} of a run in {number} processes sleeps", "failed: ")


def _check_named(trial: Trial, launched: Launched, victim: int, what: str, how: str) -> None:
    """Raise FailedError unless the run ends in time with lines that name ``victim``."""
    began = time.monotonic()
    code = launched.end()
    took_s = time.monotonic() - began
    messages = [line for k in range(launched.number) for line in launched.said_by(k)]
    limits = [float(x) for line in messages for x in re.findall(r"has not ended after ([\d.e+]+) s", line)]
    trial.measured.setdefault(f"ended after the limit, {what.split()[-1]} (s)", []).append(
        took_s - max(limits, default=_SILENCE_S)
    )
    _check_shown(launched, what)
    allowed = max([*limits, _SILENCE_S if not limits else 0]) + _NAMED_S
    if code not in (5, 6) or took_s > allowed:
        raise FailedError(f"{what}: exit code {code} after {took_s:.1f} s ({allowed:.1f}): {launched.output[-900:]}")
    named = re.compile(rf"jaxpipe: process {victim} \(host .*\) {how}")
    if not messages or not all(map(named.match, messages)):
        raise FailedError(f"{what}: want lines that name it: {messages}: {launched.output[-900:]}")
