"""Small training runs for tests: a config of the tiniest GPT over two ranks, some text, and a shared cache of compiled code.

Runs of one test session mostly compile the same programs; with the cache (JAX's own, on disk) each is compiled once, in
child processes too.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxpipe.runtime.recorder import seconds_by_op
from jaxpipe.schedule import Timeline
from jaxpipe.train.checkpoint import CheckpointStore
from jaxpipe.train.config import TrainConfig, load_config
from jaxpipe.train.loop import train
from jaxpipe.train.metrics import read_metrics
from jaxpipe.train.run.run_directory import TrainResult
from tests.support.forks import start_python

STEPS = 20
MEASURED = {"tokens_per_s", "step_s", "bubble_measured", "replay_ratio"}
"""Figures that differ between two runs of one config; of several processes ``clock_error_s``, too."""
_CHILD = (
    "import sys; from jaxpipe.cli import main; from jaxpipe.train.run import run_directory; "
    "from tests.support import small_programs as small; small.collect_seldom(); small.share_context(); "
    "run_directory.PICTURES = (); {then}; sys.exit(main())"
)
_STOPPING = (
    "import os, signal; write = sys.stdout.write; "
    "sys.stdout.write = lambda text: (write(text), text.startswith({at!r}) and os.kill(os.getpid(), signal.SIGSTOP))[0]"
)


def write_text(path: Path, lines: int = 400) -> Path:
    """Return text that a model can learn something of."""
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "that", "dog", "ran", "to", "its", "old", "red", "barn"]
    rng = np.random.default_rng(0)
    path.write_text("\n".join(" ".join(rng.choice(words, 8)) for _ in range(lines)) + "\n", encoding="utf-8")
    return path


def settings(text: Path, out_dir: Path, *overrides: str) -> list[str]:
    """Return overrides of the default config that make a tiny run; later ones win."""
    return [
        f"data.path={text}",
        f"run.out_dir={out_dir}",
        "model.options.d_model=16",
        "model.options.num_layers=2",
        "model.options.num_heads=2",
        "model.options.mlp_ratio=2",
        "data.seq_len=8",
        "data.holdout=0.1",
        "pipeline.ranks=2",
        "pipeline.microbatches=4",
        "pipeline.split_backwards=never",  # a measurement would decide, and two runs are to have the same bits
        "optimizer.lr=1e-2",
        "optimizer.warmup_steps=2",
        f"run.steps={STEPS}",
        "run.batch=8",
        "run.eval_every=5",
        "run.eval_batches=2",
        "run.checkpoint_every=5",
        "run.log_every=5",
        *overrides,
    ]


def equal_seconds(timelines: Sequence[Timeline]) -> dict[tuple[str, int], float]:
    """Return what `seconds_by_op` does, with 1 s for each op of each stage: what a busy machine measures decides nothing."""
    return dict.fromkeys(seconds_by_op(timelines), 1.0)


def config(text: Path, out_dir: Path, *overrides: str) -> TrainConfig:
    return load_config(None, settings(text, out_dir, *overrides))


class Watched(io.StringIO):
    """A stream that calls ``react(text)`` on everything printed."""

    def __init__(self, react: Callable[[str], None]) -> None:
        super().__init__()
        self._react = react

    def write(self, text: str) -> int:
        count = super().write(text)
        self._react(text)
        return count


def run(config: TrainConfig, react: Callable[[str], None] = lambda text: None) -> tuple[TrainResult, str]:
    """Train in this process; the result and what was printed."""
    stream = Watched(react)
    result = train(config, stream)
    return result, stream.getvalue()


def start(arguments: Sequence[str], stop_at: str = "") -> subprocess.Popen[str]:
    """Start ``python -m jaxpipe ARGUMENTS``, with this process's devices, flags and compile cache, which are in the
    environment; but it draws no pictures. Where it prints what starts with ``stop_at`` it stands still: see
    :func:`wait_until_stopped`."""
    return start_python(_CHILD.format(then=_STOPPING.format(at=stop_at) if stop_at else "pass"), *arguments)


def wait_until_stopped(child: subprocess.Popen[str]) -> None:
    """Wait until the child stands still; fails if it ends instead."""
    state = os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    assert state is not None and state.si_code == os.CLD_STOPPED, child.communicate()


def read_until(child: subprocess.Popen[str], begin: str) -> None:
    """Read the child's lines up to one that starts with ``begin``."""
    assert child.stdout is not None
    for line in child.stdout:
        if line.startswith(begin):
            return
    assert child.stderr is not None
    raise AssertionError(f"no line {begin!r}: {child.stderr.read()}")


def deterministic(out_dir: Path) -> list[dict[str, Any]]:
    """Return the metrics without what is measured."""
    return [
        {k: v for k, v in r.items() if k not in MEASURED | {"clock_error_s"}}
        for r in read_metrics(out_dir / "metrics.jsonl")
    ]


def losses(out_dir: Path) -> dict[int, float]:
    return {r["step"]: r["loss"] for r in read_metrics(out_dir / "metrics.jsonl") if "loss" in r}


def final(out_dir: Path, step: int = STEPS) -> Any:
    """Return parameters, optimizer state, position in the data and evaluation loss of a checkpoint."""
    checkpoint = CheckpointStore(out_dir / "checkpoints").load(step)
    return checkpoint.params, checkpoint.optimizer, checkpoint.meta["data"], checkpoint.eval_loss


def contents(out_dir: Path) -> dict[str, bytes]:
    """Return every file below a directory."""
    return {str(p.relative_to(out_dir)): p.read_bytes() for p in sorted(out_dir.rglob("*")) if p.is_file()}


def copy_run(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    return target


def trace_rows(path: Path, source: str) -> dict[int, list[str]]:
    """Return compute actions by rank, by start time, of one timeline (``measured`` or ``simulated``) in a Perfetto trace."""
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    ranks = {
        e["pid"]: int(e["args"]["name"].split()[1])
        for e in events
        if e["name"] == "process_name" and e["args"]["name"].endswith(f"{source})")
    }
    rows: dict[int, list[tuple[float, str]]] = {rank: [] for rank in ranks.values()}
    for e in events:
        if e["ph"] == "X" and e["pid"] in ranks and not e["name"].startswith("send"):
            rows[ranks[e["pid"]]].append((e["ts"], e["name"]))
    return {rank: [name for _, name in sorted(row)] for rank, row in rows.items()}
