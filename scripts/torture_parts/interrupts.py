"""R26: Ctrl-C, as a terminal sends it: to all processes of the command, at any time from the start of any verb.

Each verb gets an input that keeps it busy. It ends within two seconds, with one line and exit code 130, and leaves no process
behind. Steps of training that have begun are saved first, with exit code 75.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

from torture_parts.trial import Bench, Case, FailedError, Trial

ROOT = Path(__file__).resolve().parents[2]
WITHIN_S = 2.0
"""Longest time between Ctrl-C and the end on a machine that has a core for the command: waits count, other processes don't."""
_STARTED_CPU_S = 0.1
"""CPU seconds after which Python itself has started: before that it ends in its own way."""
_STOPPED = 75
_MARK = "JAXPIPE_TORTURE_MARK"
_TINY = (
    *(f"model.options.{option}" for option in ("d_model=16", "num_layers=2", "num_heads=2", "mlp_ratio=2")),
    *(
        "data.seq_len=16",
        "data.holdout=0.1",
        "run.batch=8",
        "run.platform=cpu",
        "pipeline.ranks=2",
        "pipeline.microbatches=4",
    ),
)


def verbs(folder: Path, text: Path) -> Mapping[str, Sequence[str]]:
    """Return, by verb, the arguments of a command that is busy for a while. ``folder``: of :func:`prepare`; results go
    there, too."""
    config = [*_TINY, f"data.path={text}"]
    long = [*config, "run.steps=1000000", "run.eval_every=0", "run.checkpoint_every=0"]
    sizes = ["--ranks", "16", "--microbatches", "1024"]
    run, out = f"{folder}/run", f"{folder}/out-{time.monotonic_ns()}"
    return {
        "schedule": ["schedule", "v-adaptive", "--ranks", "8", "--microbatches", "100000"],
        "simulate": ["simulate", f"{folder}/long.sched", "--steps", "64"],
        "compare": ["compare", *sizes],
        "best": ["best", *sizes, "--offload-time", "1"],
        "solve": ["solve", "--ranks", "6", "--microbatches", "24", "--memory-limit", "4", "--time-limit", "600"],
        "plot": ["plot", f"{folder}/long.sched", "-o", f"{out}.svg"],
        "cache": ["cache", "ls"],
        "plan": ["plan", *config, "model.options.num_layers=48", "--suggest"],
        "tune": ["tune", "--devices", "16", *config, "model.options.num_layers=24"],
        "rehearse": ["rehearse", f"{run}/config.toml", "--all-ranks", "--steps", "10000"],
        "profile": ["profile", *config, "--repeats", "1000"],
        "data": ["data", "build", f"{folder}/large.txt", "-o", f"{out}-store", "--workers", "2"],
        "train": ["train", *long, f"run.out_dir={out}"],
        "launch": ["launch", "local", "-n", "2", "--", "train", *long, f"run.out_dir={out}"],
        "eval": ["eval", run, "--batch", "1"],
        "generate": ["generate", run, "--tokens", "1000000"],
        "export": ["export", run, "-o", f"{out}-hf"],
        "import": ["import", f"{folder}/hf", "-o", f"{out}-run"],
    }


def prepare(folder: Path, text: Path) -> None:
    """Make the files that the verbs work on."""
    (folder / "large.txt").write_text(text.read_text(encoding="utf-8") * 500, encoding="utf-8")
    config = [*_TINY, f"data.path={text}", "run.steps=2", f"run.out_dir={folder}/run"]
    for arguments in (
        ["train", *config],
        ["export", f"{folder}/run", "-o", f"{folder}/hf"],
        ["schedule", "1f1b", "--ranks", "8", "--microbatches", "4096", "-o", f"{folder}/long.sched"],
    ):
        command = [sys.executable, "-m", "jaxpipe", *arguments]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)


def interrupt(arguments: Sequence[str], after_s: float, within_s: float = WITHIN_S) -> str:
    """Run a verb in a process group of its own and send SIGINT to that ``after_s`` seconds later. How it ended, in a word.
    ``within_s``: when all of it must have ended after that.

    Raises:
        FailedError: it did not end as it should.
    """
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    child = subprocess.Popen(
        [sys.executable, "-m", "jaxpipe", *arguments],
        cwd=ROOT,
        env={**os.environ, _MARK: mark},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    )
    with suppress(subprocess.TimeoutExpired):
        _, err = child.communicate(timeout=after_s)
        if child.returncode:
            raise FailedError(f"exit code {child.returncode} of {' '.join(arguments)}: {err[-1000:]}")
        return "ended before"
    while child.poll() is None and _cpu_s(child.pid) < _STARTED_CPU_S:
        time.sleep(0.005)
    # it may end between the last look at it and the signal
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGINT)
    began = time.monotonic()
    what = f"{' '.join(arguments)}, interrupted after {after_s:.2f} s"
    try:
        _, err = child.communicate(timeout=20 * within_s)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        raise FailedError(f"does not end: {what}: {child.communicate()[1][-3000:]}") from None
    took_s = time.monotonic() - began
    while (survivors := _marked(mark)) and time.monotonic() < began + within_s:
        time.sleep(0.05)
    for pid in survivors:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    if child.returncode == _STOPPED and arguments[0] in ("train", "launch"):
        return "saved"
    lines = [line for line in err.splitlines() if line.startswith("jaxpipe: ")]
    if child.returncode == 0 and not lines:
        return "ended before"
    if child.returncode != 130 or lines != ["jaxpipe: interrupted"] or not err.endswith("jaxpipe: interrupted\n"):
        raise FailedError(f"exit code {child.returncode} and {lines}: {what}: {err[-3000:]}")
    if "Traceback" in err or "Error" in err:
        raise FailedError(f"noise: {what}: {err[-3000:]}")
    if survivors:
        raise FailedError(f"{len(survivors)} processes are left: {what}")
    if took_s > within_s:
        raise FailedError(f"took {took_s:.1f} s to end: {what}: {err[-1000:]}")
    return "interrupted"


def _cpu_s(pid: int) -> float:
    """Seconds that the main process has had a core for."""
    with suppress(OSError):
        user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    return 0.0


def _marked(mark: str) -> list[int]:
    """Living processes that have inherited the mark."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            is_ours = f"{_MARK}={mark}\0".encode() in (folder / "environ").read_bytes()
            if is_ours and (folder / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                pids.append(int(folder.name))
    return pids


def cases(bench: Bench) -> Iterator[Case]:
    @cache
    def prepared() -> tuple[Path, Path]:
        folder = bench.make("interrupts")
        prepare(folder, bench.text)
        return folder, bench.text

    def run(trial: Trial, name: str) -> None:
        with bench.lock:
            folder, text = prepared()
        after_s = 0.1 * 100 ** trial.rng.random()  # 0.1 to 10 s
        trial.tried[f"{name}: {interrupt(verbs(folder, text)[name], after_s)}"] += 1

    for _ in range(bench.count(16, 1)):
        for name in verbs(Path(), Path()):
            yield Case(name, partial(run, name=name))
