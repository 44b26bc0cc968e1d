"""Training runs that are killed, stopped, starved of disk and moved to other devices, against one that was left alone.

R1 kills with -9, R2 stops with signals, R11 takes the disk away, R13 goes on over other ranks and schedules. Every chain ends
with a run to the last step, whose parameters, optimizer state, position in the data and metrics must be the straight run's.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from torture_parts.trial import Bench, Case, Child, FailedError, SkippedError, Trial, Waiting

STEPS = 40
_EVERY = 6  # steps between evaluations
_SAME = ("loss", "grad_norm", "tokens", "applied", "eval_loss")
"""Keys of a record of metrics whose values do not depend on the clock."""
_NOBODY = 65534

_MODEL = ["d_model=16", "num_layers=2", "num_heads=2", "mlp_ratio=2"]
_TINY = [
    *(f"model.options.{option}" for option in _MODEL),
    *(
        "data.seq_len=16",
        "data.holdout=0.1",
        "optimizer.lr=1e-2",
        "optimizer.warmup_steps=2",
        "run.batch=8",
        "run.platform=cpu",
    ),
    *(
        f"run.steps={STEPS}",
        f"run.eval_every={_EVERY}",
        "run.eval_batches=2",
        "run.checkpoint_every=1",
        "run.log_every=5",
    ),
    *("run.keep_last=3", "pipeline.ranks=2", "pipeline.microbatches=4"),
]
_SELDOM = "run.checkpoint_every=20"  # of runs that are left alone
_RECIPES = {
    "plain": ["pipeline.schedule=zb-h1"],
    "heavy": [
        *("pipeline.schedule=v-zb", "pipeline.chunks=2", "pipeline.dp=2", "pipeline.zero1=true"),
        *("run.dtype=bfloat16", "model.options.dropout=0.1"),
    ],
    "several": ["pipeline.ranks=4", "model.options.num_layers=4", "pipeline.schedule=zb-1p"],
}


class Yard:
    """The place where training runs are started."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        cache = {"DIR": str(bench.make("compiled")), "MIN_COMPILE_TIME_SECS": "0", "MIN_ENTRY_SIZE_BYTES": "-1"}
        names = {"DIR": "JAX_COMPILATION_CACHE_DIR"} | {n: f"JAX_PERSISTENT_CACHE_{n}" for n in list(cache)[1:]}
        os.environ |= {names[key]: value for key, value in cache.items()}
        os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"  # compiles faster

    def settings(self, out_dir: Path, recipe: str, *overrides: str) -> list[str]:
        return [
            "train",
            *_TINY,
            f"data.path={self.bench.text}",
            f"run.out_dir={out_dir}",
            *_RECIPES[recipe],
            *overrides,
        ]

    def start(self, trial_folder: Path, out_dir: Path, recipe: str, *overrides: str, **limits: int | None) -> Child:
        arguments = self.settings(out_dir, recipe, *overrides)
        return Child(self.bench, arguments, trial_folder / "output.txt", **limits)  # type: ignore[arg-type]

    def straight(self, recipe: str) -> Path:
        """Return the folder of the recipe's undisturbed run, which is made when first asked for."""
        folder = self.bench.folder / f"straight-{recipe}"
        with self.bench.lock:
            if not folder.exists():
                child = self.start(self.bench.folder, folder, recipe, _SELDOM)
                if child.answer().code:
                    raise FailedError(f"a run that nothing disturbs fails: {child.output[-600:]}")
        return folder


@cache
def yard_of(bench: Bench) -> Yard:
    return Yard(bench)


# Looking at a run's folder, from outside and while it changes


def records(out_dir: Path) -> list[dict[str, Any]]:
    """Return the metrics, without a half-written last line."""
    try:
        lines = (out_dir / "metrics.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines]


def last_step(out_dir: Path) -> int:
    """Return the step of the newest record; -1 without any."""
    with contextlib.suppress(ValueError, KeyError, IndexError):
        return int(records(out_dir)[-1]["step"])
    return -1


def checkpoints(out_dir: Path) -> list[Path]:
    """Return the folders of complete checkpoints, oldest first."""
    try:
        return sorted(path for path in (out_dir / "checkpoints").iterdir() if path.name.isdecimal())
    except FileNotFoundError:
        return []


def is_saving(out_dir: Path) -> bool:
    try:
        return any(".tmp-" in path.name for path in (out_dir / "checkpoints").iterdir())
    except FileNotFoundError:
        return False


def flip(path: Path, rng: random.Random) -> str:
    """Flip one bit of a file; what was done."""
    content = bytearray(path.read_bytes())
    at, bit = rng.randrange(len(content)), rng.randrange(8)
    content[at] ^= 1 << bit
    path.write_bytes(content)
    return f"bit {bit} of byte {at} of {path.name}"


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)


# Comparing


def measured_apart(out_dir: Path) -> dict[tuple[int, str], Any]:
    """Return the metrics by step and name, without what is measured. Left out is the evaluation of step 0 that a run makes
    when it was stopped there and goes on."""
    values = ((r["step"], name, r[name]) for r in records(out_dir) for name in _SAME if name in r)
    return {(step, name): value for step, name, value in values if (step, name) != (0, "eval_loss")}


def check_same_end(straight: Path, out_dir: Path) -> None:
    """Raise FailedError unless both runs ended alike, to the last bit."""
    ours, theirs = (_state(folder) for folder in (out_dir, straight))
    if ours.keys() != theirs.keys():
        raise FailedError(f"the last checkpoint holds other arrays: {sorted(ours.keys() ^ theirs.keys())[:4]}")
    different = [name for name, value in theirs.items() if value != ours[name]]
    a, b = measured_apart(out_dir), measured_apart(straight)
    different += [
        f"{name} of step {step}"
        for step, name in sorted(b.keys() | a.keys())
        if a.get((step, name)) != b.get((step, name))
    ]
    if different:
        raise FailedError(
            f"the end is another than without disturbance: {', '.join(different[:6])} ({len(different)} in all)"
        )


def _state(out_dir: Path) -> dict[str, Any]:
    """Return the content of the last checkpoint: arrays as dtype, shape and bytes."""
    import jax

    from jaxpipe.train.checkpoint import CheckpointStore

    loaded = CheckpointStore(out_dir / "checkpoints").load(STEPS)
    tree = {"params": loaded.params, "optimizer": loaded.optimizer}
    arrays = {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]}
    plain = {"data": loaded.meta["data"], "eval_loss": loaded.eval_loss}
    return {name: (str(x.dtype), x.shape, x.tobytes()) for name, x in arrays.items()} | plain


def _finish(yard: Yard, trial: Trial, out_dir: Path, recipe: str, what: str) -> None:
    child = yard.start(trial.folder, out_dir, recipe, _SELDOM)
    if child.answer().code:
        raise FailedError(f"{what}: the run can't go on: {child.output[-600:]}")
    try:
        check_same_end(yard.straight(recipe), out_dir)
    except FailedError as error:
        raise FailedError(f"{what}: {error}") from None


# R1


def kills(bench: Bench) -> Iterator[Case]:
    """R1: chains of runs, each killed at some moment."""
    yard = yard_of(bench)
    for recipe, flips, full, quick in (("plain", False, 16, 1), ("heavy", False, 10, 0), ("plain", True, 6, 0)):
        for _ in range(bench.count(full, quick)):
            yield Case(f"chain of kills, {recipe}", partial(_killed, yard, recipe=recipe, flips=flips))


def _killed(yard: Yard, trial: Trial, recipe: str, flips: bool) -> None:
    yard.straight(recipe)  # so that everything is compiled
    out_dir, rng = trial.folder / "run", trial.rng
    history = []
    for _ in range(yard.bench.count(10, 3)):
        child = yard.start(trial.folder, out_dir, recipe)
        phase = rng.choice(("warm-up", "step", "step", "save", "save", "evaluation"))
        await_moment(child, out_dir, phase, rng)
        child.send(signal.SIGKILL)
        if child.end() != -signal.SIGKILL:
            break  # it ended before
        half = ", half-saved" if is_saving(out_dir) else ""
        trial.tried[f"kills in {phase}, {recipe}{half}"] += 1
        history.append(f"{phase} at step {last_step(out_dir)}{half}")
        saved = checkpoints(out_dir)
        if flips and len(saved) > 1:
            history.append(flip(rng.choice(files_of(saved[-1])), rng))
            trial.tried["flips after a kill"] += 1
    _finish(yard, trial, out_dir, recipe, f"killed in {'; '.join(history)}")


def await_moment(child: Waiting, out_dir: Path, phase: str, rng: random.Random) -> None:
    """Wait until a run is in ``phase``, some time after where it started from."""
    if phase == "warm-up":
        line = rng.choice(("", "documents", "tracing", "timing each stage", "built in"))
        child.until(lambda: line in child.output)
        child.until(partial(_is_past, time.monotonic() + rng.uniform(0, 0.5)))
        return
    start = int(checkpoints(out_dir)[-1].name) if checkpoints(out_dir) else 0
    target_step = start + rng.randint(1, 3)
    if phase == "evaluation":
        target_step = min(STEPS, (start // _EVERY + 1) * _EVERY)
    child.until(lambda: target_step <= last_step(out_dir))
    if phase == "save":
        child.until(lambda: is_saving(out_dir))
    child.until(partial(_is_past, time.monotonic() + rng.uniform(0, 0.02)))


def _is_past(moment: float) -> bool:
    return time.monotonic() > moment


# R2


def stops(bench: Bench) -> Iterator[Case]:
    """R2: chains of runs, each stopped by a signal; and runs that get two."""
    yard = yard_of(bench)
    for recipe, full, quick in (("plain", 6, 1), ("heavy", 2, 0)):
        for _ in range(bench.count(full, quick)):
            yield Case("chain of signals", partial(_stopped, yard, recipe=recipe))
    for _ in range(bench.count(12, 1)):
        yield Case("second signal", partial(_stopped_twice, yard))


_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


def _stopped(yard: Yard, trial: Trial, recipe: str) -> None:
    yard.straight(recipe)  # so that everything is compiled
    out_dir, rng = trial.folder / "run", trial.rng
    history = []
    for _ in range(yard.bench.count(8, 2)):
        child, number = yard.start(trial.folder, out_dir, recipe), rng.choice(_SIGNALS)
        phase = rng.choice(("warm-up", "step", "step", "save", "evaluation"))
        await_moment(child, out_dir, phase, rng)
        built = "built in" in child.output
        child.send(number)
        code, output = child.end(), child.output
        if code == 0:
            break
        trial.tried[f"{number.name}, exit code {code}"] += 1
        history.append(f"{number.name} in {phase} (exit code {code})")
        before_steps = not built or "ended before the first step" in output  # nothing is to be saved then
        early = (
            (130, -number) if number is signal.SIGINT or not output else (75,)
        )  # -number: Python itself was starting
        if code != 75 and not (before_steps and code in early):
            raise FailedError(f"{'; '.join(history)}: want exit code 75: {output[-400:]}")
        if code == 75 and not before_steps:
            step = int(checkpoints(out_dir)[-1].name)
            if f"after step {step} of {STEPS}" not in output or (step and last_step(out_dir) != step):
                raise FailedError(f"{'; '.join(history)}: the newest checkpoint is of step {step}: {output[-400:]}")
    _finish(yard, trial, out_dir, recipe, "; ".join(history))


def _stopped_twice(yard: Yard, trial: Trial) -> None:
    """The second signal ends the process at once, unless it has ended by itself."""
    yard.straight("plain")
    out_dir, (first, second) = trial.folder / "run", trial.rng.choices(_SIGNALS, k=2)
    child = yard.start(trial.folder, out_dir, "plain")
    child.until(lambda: last_step(out_dir) > 2)
    child.send(first)
    child.until(lambda: "stopping after this step" in child.output)
    child.send(second)
    code = child.end()
    trial.tried[f"second signal, exit code {code}"] += 1
    if code not in (75, 130):
        raise FailedError(f"{first.name}, then {second.name}: exit code {code}: {child.output[-400:]}")
    _finish(yard, trial, out_dir, "plain", f"{first.name}, {second.name}")


# R11


def disks(bench: Bench) -> Iterator[Case]:
    """R11: files may not grow, the disk is full, folders can't be written."""
    yard = yard_of(bench)
    for _ in range(bench.count(12, 1)):
        yield Case("limit on the size of files", partial(_limited, yard))
    for _ in range(bench.count(8, 1)):
        yield Case("full disk", partial(_full, yard))
    for where, later in (("", False), ("checkpoints", False), ("pictures", False), ("checkpoints", True))[
        : bench.count(4, 0)
    ]:
        yield Case("folder not writable", partial(_unwritable, yard, where=where, later=later))


def _begun_run(yard: Yard) -> Path:
    """A run stopped after a few steps."""
    with yard.bench.lock:
        begun = yard.bench.folder / "begun"
        if not begun.exists():
            yard.straight("plain")
            child = yard.start(yard.bench.folder, begun, "plain")
            child.until(lambda: last_step(begun) >= 8)
            child.send(signal.SIGTERM)
            child.end()
    return begun


def _begun(yard: Yard, out_dir: Path) -> int:
    """A run stopped after a few steps is put into ``out_dir``; its step."""
    shutil.copytree(_begun_run(yard), out_dir, dirs_exist_ok=True)
    return int(checkpoints(out_dir)[-1].name)


def _recovers(
    yard: Yard, trial: Trial, out_dir: Path, child: Child, begun: int, relieve: Callable[[], None], what: str
) -> None:
    """The run on a bad disk ended as documented, what was saved is intact, and on a good one it goes on to the same end."""
    answer = child.answer()
    trial.tried[f"{what.split(',')[0]}, exit code {answer.code}"] += 1
    if answer.code not in (0, 2, 3, 5):
        raise FailedError(f"{what}: exit code {answer.code}: {answer.err[-400:]}")
    from jaxpipe.train.checkpoint import CheckpointStore

    intact = CheckpointStore(out_dir / "checkpoints").latest_intact()
    if intact.step is None or intact.step < begun or intact.warnings:
        raise FailedError(f"{what}: step {begun} was there, and now {intact}")
    relieve()
    _finish(yard, trial, out_dir, "plain", what)


def _limited(yard: Yard, trial: Trial) -> None:
    out_dir, most = trial.folder / "run", trial.rng.choice((1_000, 3_000, 8_000, 15_000, 25_000, 40_000))
    begun = _begun(yard, out_dir)
    child = yard.start(trial.folder, out_dir, "plain", file_bytes=most)
    _recovers(yard, trial, out_dir, child, begun, lambda: None, f"files of at most {most} bytes")


def _full(yard: Yard, trial: Trial) -> None:
    disk = trial.folder / "disk"
    disk.mkdir()
    pages = sum(-(-file.lstat().st_size // 4096) + 1 for file in _begun_run(yard).rglob("*"))
    kilobytes = int(4 * pages * trial.rng.uniform(1.05, 2.5))
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", disk], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        raise SkippedError(f"no tmpfs can be mounted ({mounted.stderr.strip()[:80]})")
    try:
        out_dir = disk / "run"
        begun = _begun(yard, out_dir)
        child = yard.start(trial.folder, out_dir, "plain")
        grow = ["mount", "-o", "remount,size=64m", str(disk)]
        relieve = partial(subprocess.run, grow, check=True, capture_output=True)
        _recovers(yard, trial, out_dir, child, begun, relieve, f"a disk of {kilobytes} kB")
    finally:
        subprocess.run(["umount", disk], capture_output=True, check=False)


def _unwritable(yard: Yard, trial: Trial, where: str, later: bool) -> None:
    """Run as a user who may not write there, from the start or after some steps."""
    out_dir = trial.folder / "run"
    begun = _begun(yard, out_dir)
    (out_dir / where).mkdir(exist_ok=True)
    for root in (out_dir, yard.bench.folder / "compiled"):
        _open(root)
    (out_dir / where).chmod(0o777 if later else 0o555)
    trial.folder.chmod(0o755)
    child = yard.start(trial.folder, out_dir, "plain", user=_NOBODY)
    if later:
        child.until(lambda: last_step(out_dir) > begun + 3)
        (out_dir / where).chmod(0o555)
    what = f"{where or 'the whole folder'} {'no longer' if later else 'not'} writable"
    _recovers(yard, trial, out_dir, child, begun, partial(_open, out_dir), what)


def _open(folder: Path) -> None:
    """Let everybody write below ``folder``."""
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o777 if path.is_dir() else 0o666)


# R13

_TOPOLOGIES = {
    "one rank": ["pipeline.ranks=1", "pipeline.schedule=gpipe"],
    "1f1b": ["pipeline.schedule=1f1b"],
    "zb-1p, 4 ranks": ["pipeline.ranks=4", "pipeline.schedule=zb-1p"],
    "v-zb": ["pipeline.schedule=v-zb", "pipeline.chunks=2"],
    "interleaved, 2 chunks": ["pipeline.schedule=interleaved-1f1b", "pipeline.chunks=2"],
    "dp 2, ZeRO-1": ["pipeline.schedule=zb-h1", "pipeline.dp=2", "pipeline.zero1=true"],
    "tp 2, sequence-parallel": ["pipeline.schedule=1f1b", "pipeline.tp=2", "pipeline.sequence_parallel=true"],
    "8 microbatches": ["pipeline.schedule=zb-h1", "pipeline.microbatches=8"],
}


def topologies(bench: Bench) -> Iterator[Case]:
    """R13."""
    yard = yard_of(bench)
    for _ in range(bench.count(6, 1)):
        yield Case("chain of topologies", partial(_moved, yard))


def _moved(yard: Yard, trial: Trial) -> None:
    """A run that goes on over other devices: the same tokens, losses within 1e-6."""
    straight, out_dir = yard.straight("plain"), trial.folder / "run"
    names = trial.rng.sample(sorted(_TOPOLOGIES), yard.bench.count(6, 2))
    for k, name in enumerate(names, start=1):
        child = yard.start(trial.folder, out_dir, "plain", *_TOPOLOGIES[name])
        if k < len(names):
            child.until(lambda k=k: last_step(out_dir) >= STEPS * k // len(names))
            child.send(signal.SIGTERM)
        code = child.end()
        trial.tried[f"runs on {name}"] += 1
        if code not in (0, 75):
            raise FailedError(f"{' → '.join(names[:k])}: exit code {code}: {child.output[-500:]}")
    ours, theirs = measured_apart(out_dir), measured_apart(straight)
    worst = max((abs(ours[at] - theirs[at]), at) for at in theirs if at in ours and at[1] in ("loss", "eval_loss"))
    tokens = [at for at in theirs if at[1] == "tokens" and ours.get(at) != theirs[at]]
    if ours.keys() != theirs.keys() or tokens or not worst[0] < 1e-6:
        raise FailedError(
            f"{' → '.join(names)}: other records or tokens {tokens[:3]}, or losses {worst[0]:.2g} apart at {worst[1]}"
        )
