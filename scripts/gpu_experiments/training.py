"""Experiments on a whole training and on a step under the profiler."""

from __future__ import annotations

import json
import re
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

from scripts.gpu_experiments.blocks import pipeline, step_seconds
from scripts.gpu_experiments.process import call_apart, with_flags
from scripts.gpu_experiments.registry import ROOT, Settings, experiment

_KINDS = {
    "copies": r"memcpy|memset|copy",
    "attention": r"flash|fmha|sdpa|attention|softmax",
    "products": r"gemm|cublas|nvjet|cutlass|xmma|dot",
}
"""Patterns of names by what a kernel does; the first that fits counts."""


@experiment(
    "T4",
    version=1,
    question="where does the step's other time go?",
    backs="measured ÷ replay, MFU in a step",
    paths=("jaxpipe/stage", "jaxpipe/runtime", "jaxpipe/program", "jaxpipe/rehearsal", "models/gpt.py"),
    estimate_s=90,
    predicted={"idle of the compute stream": "below 2%", "recorder ÷ device": "1.00 without copies"},
    want={"idle_share": "<= 0.01", "recorded_over_busy": "0.98 to 1.02"},
)
def profiled_step(settings: Settings) -> dict[str, Any]:
    """Profile one recorded step of a rehearsed rank: seconds by stream and kind of kernel, what of the compute stream is idle,
    and the recorder's seconds beside the device's. Profiling slows small kernels: these are shares, not times to publish."""
    import jax

    from jaxpipe.rehearsal.rank import Rehearsal
    from jaxpipe.schedule import generate

    pipe = pipeline(settings, settings.hidden, generate("po", settings.ranks, settings.microbatches))
    rehearsal = Rehearsal(pipe, 1)
    executor = rehearsal.pipeline.executor
    inputs, _ = rehearsal.place()
    _, inputs = step_seconds(rehearsal.pipeline, inputs, 1)  # after one that compiles
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            out = executor.run(inputs, record=True)
            out.wait()
        (file,) = Path(folder).rglob("*.xplane.pb")
        streams = _streams(jax.profiler.ProfileData.from_file(str(file)))
    recorded_s = sum(e.end_s - e.start_s for e in out.events if e.lane == "compute")
    busiest = max(streams.values(), key=lambda s: s["busy_s"])
    return {
        "streams": streams,
        "idle_share": 1 - busiest["busy_s"] / busiest["span_s"],
        "recorded_s": recorded_s,
        "recorded_over_busy": recorded_s / busiest["busy_s"],
        "step_s": out.step_s,
    }


def _streams(profile: Any) -> dict[str, dict[str, Any]]:
    """Return by stream of the devices (threads of a CPU): seconds from its first event to its last, busy, and by kind."""
    planes = [p for p in profile.planes if p.name.startswith("/device:")] or list(profile.planes)
    lines = [line for plane in planes for line in plane.lines]
    # A GPU's plane also has lines that sum up: of modules, of operations, of steps.
    lines = [line for line in lines if line.name.startswith("Stream")] or lines
    streams = {}
    for line in lines:
        events = sorted((e.start_ns, e.start_ns + e.duration_ns, e.name) for e in line.events)
        if not events:
            continue
        busy_ns, ended = 0.0, events[0][0]
        kinds: dict[str, float] = {}
        for start, end, name in events:
            busy_ns += max(0.0, end - max(start, ended))
            ended = max(ended, end)
            kind = next((kind for kind, names in _KINDS.items() if re.search(names, name.lower())), "elementwise")
            kinds[kind] = kinds.get(kind, 0.0) + (end - start) / 1e9
        span_ns = max(1.0, ended - events[0][0])
        streams[line.name] = {"span_s": span_ns / 1e9, "busy_s": max(1.0, busy_ns) / 1e9, "by_kind_s": kinds}
    return streams


@experiment(
    "T12",
    version=1,
    question="does training train, and does a resumed run have the same bits?",
    backs="README, COMPASS 4",
    paths=("jaxpipe", "models"),
    estimate_s=200,
    predicted={"resumed": "the same losses, with deterministic operations"},
    want={"differing_losses": "== 0", "loss_fell": "== 1"},
)
def training(settings: Settings) -> dict[str, Any]:
    """Train a Llama of 1.2B parameters on real text for 40 steps, then go on once more from the checkpoint in the middle."""
    steps = 4 if settings.tiny else 40
    with tempfile.TemporaryDirectory() as folder:
        environment = with_flags("--xla_gpu_deterministic_ops=true")
        straight = call_apart(train, settings, folder, steps, limit_s=200, environment=environment)
        if "failure" in straight:
            return {"training": straight, "loss_fell": 0}
        shutil.rmtree(next(Path(folder).glob(f"checkpoints/*{steps}")))
        resumed = call_apart(train, settings, folder, steps, limit_s=200, environment=environment)
    rows, again = straight["metrics"], resumed.get("metrics", [])
    losses, losses_again = ({row["step"]: row["loss"] for row in x if "loss" in row} for x in (rows, again))
    return {
        "metrics": rows[-3:],
        "tokens_per_s": statistics.median(
            row["tokens_per_s"] for row in rows[len(rows) // 2 :] if "tokens_per_s" in row
        ),
        "exit_codes": [straight["exit_code"], resumed.get("exit_code", resumed.get("failure"))],
        "loss_fell": int(losses[steps] < losses[1]),
        "differing_losses": sum(losses[n] != losses_again.get(n) for n in losses),
    }


def train(settings: Settings, folder: str, steps: int) -> dict[str, Any]:
    """Run ``jaxpipe train`` in ``folder``: its exit code and what it logged."""
    from jaxpipe.cli import main

    size = {"d_model": 2048, "num_layers": 16, "num_heads": 16, "tied": False}
    size = {"d_model": 32, "num_layers": 1, "num_heads": 2, "tied": False} if settings.tiny else size
    overrides = {
        "run.steps": steps,
        "run.batch": 4 if settings.tiny else 8,
        "run.dtype": "float32" if settings.tiny else "bfloat16",
        "run.eval_every": 0,
        "run.checkpoint_every": steps // 2,
        "run.log_every": 1,
        "run.out_dir": folder,
        "data.seq_len": settings.sequence,
        "model.target": "models.gpt:GPT" if settings.tiny else "models.llama:Llama",
        "pipeline.ranks": 1,
        "pipeline.microbatches": 2 if settings.tiny else 8,
        "pipeline.schedule": "1f1b",
        **{f"model.options.{name}": str(value).lower() for name, value in size.items()},
    }
    arguments = [f"{key}={value}" for key, value in overrides.items()]
    code = main(["train", "--config", str(ROOT / "scripts" / "quickstart.toml"), *arguments])
    log = Path(folder, "metrics.jsonl")
    rows = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    return {"exit_code": code, "metrics": [json.loads(row) for row in rows]}
