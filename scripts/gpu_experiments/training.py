"""Experiments on a whole training and on a step under the profiler."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.gpu_experiments.blocks import pipeline, step_seconds
from scripts.gpu_experiments.planned import prediction, target_here
from scripts.gpu_experiments.process import call_apart, with_flags
from scripts.gpu_experiments.registry import ROOT, Settings, experiment

_CONFIG = ROOT / "scripts" / "quickstart.toml"
_KINDS = {
    "copies": r"memcpy|memset|copy",
    "attention": r"flash|fmha|sdpa|attention|softmax",
    "products": r"gemm|cublas|nvjet|cutlass|xmma|dot",
}
"""Patterns of names by what a kernel does; the first that fits counts."""


@experiment(
    "T4",
    version=2,
    question="where does the step's other time go?",
    backs="measured ÷ replay, MFU in a step",
    paths=("jaxpipe/stage", "jaxpipe/runtime", "jaxpipe/program", "jaxpipe/rehearsal", "models/gpt.py"),
    estimate_s=90,
    predicted={"idle of the compute stream": "below 2%", "recorder ÷ device": "1.00 without copies"},
    want={"idle_share": "<= 0.01", "recorded_over_busy": "0.98 to 1.02"},
)
def profiled_step(settings: Settings) -> dict[str, Any]:
    """Profile one recorded step of a rehearsed rank: seconds by stream and kind of kernel, what of the compute stream is idle,
    and the recorder's seconds beside the device's, also by op; then run the same functions back to back without the executor.
    Profiling slows small kernels: these are shares, not times to publish."""
    from jaxpipe.rehearsal.rank import Rehearsal
    from jaxpipe.runtime.recorder import lengths_by_op
    from jaxpipe.schedule import generate

    pipe = pipeline(settings, settings.hidden, generate("po", settings.ranks, settings.microbatches))
    rehearsal = Rehearsal(pipe, 1)
    inputs, _ = rehearsal.place()
    walls, inputs = step_seconds(rehearsal.pipeline, inputs, settings.steps)
    streams, functions_s, out = profile_of(rehearsal.pipeline.executor, inputs)
    recorded_s = sum(e.end_s - e.start_s for e in out.events if e.lane == "compute")
    busiest = max(streams.values(), key=lambda s: s["busy_s"])
    del inputs
    alone_s = _back_to_back_s(rehearsal, settings)
    return {
        "streams": streams,
        "idle_share": 1 - busiest["busy_s"] / busiest["span_s"],
        "recorded_s": recorded_s,
        "recorded_over_busy": recorded_s / busiest["busy_s"],
        "recorded_by_function_s": {f"{op}{stage}": sum(x) for (op, stage), x in lengths_by_op([out.events]).items()},
        "device_by_function_s": functions_s,
        "profiled_step_s": out.step_s,
        "step_s": statistics.median(walls),
        "back_to_back_s": alone_s,
        "step_over_back_to_back": statistics.median(walls) / alone_s,
    }


def profile_of(executor: Any, inputs: Any) -> tuple[dict[str, dict[str, Any]], dict[str, float], Any]:
    """Profile one recorded step: by stream, by function, and what the step returned."""
    import jax

    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            out = executor.run(inputs, record=True)
            out.wait()
        (file,) = Path(folder).rglob("*.xplane.pb")
        profile = jax.profiler.ProfileData.from_file(str(file))
    return _streams(profile), _by_function(profile), out


def _back_to_back_s(rehearsal: Any, settings: Settings) -> float:
    """Return the seconds of a step's functions called one after the other, on random values that stay."""
    import jax

    from jaxpipe.cost.seconds import arguments_of
    from jaxpipe.program.ir import Run

    actions = [i.action for i in rehearsal.program.instructions if isinstance(i, Run)]
    functions = {(a.op, a.stage): rehearsal.functions[rehearsal.rank, a.stage].functions[a.op] for a in actions}
    values = {name: arguments_of(f, settings.vocab) for name, f in functions.items()}
    spent_s = 0.0
    for _ in range(2):  # the first pass warms up
        began = time.perf_counter()
        for action in actions:
            name = action.op, action.stage
            function = functions[name]
            results = function.call(*values[name])
            for k in function.donated:
                values[name][k] = results[function.outputs.index(function.inputs[k])]
        jax.block_until_ready(results)
        spent_s = time.perf_counter() - began
    return spent_s


def _by_function(profile: Any) -> dict[str, float]:
    """Return the device's seconds by stage function, from the line of a GPU that names programs; a CPU has none."""
    seconds: dict[str, float] = {}
    lines = (line for plane in profile.planes if plane.name.startswith("/device:") for line in plane.lines)
    for event in (event for line in lines if line.name == "XLA Modules" for event in line.events):
        if match := re.search(r"([A-Z]+)_stage(\d+)", event.name):
            name = "".join(match.groups())
            seconds[name] = seconds.get(name, 0.0) + event.duration_ns / 1e9
    return seconds


def _streams(profile: Any) -> dict[str, dict[str, Any]]:
    """Return by stream of the devices (threads of a CPU): seconds from its first event to its last, busy, and by kind."""
    planes = [p for p in profile.planes if p.name.startswith("/device:")] or list(profile.planes)
    lines = [line for plane in planes for line in plane.lines]
    # A GPU's plane also has lines that sum up: of modules, of operations, of steps.
    lines = [line for line in lines if line.name.startswith("Stream")] or [
        line for line in lines if line.name != "python"
    ]
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
    version=2,
    question="does training train, and does a resumed run have the same bits?",
    backs="README, COMPASS 4",
    paths=("jaxpipe", "models"),
    estimate_s=180,
    predicted={
        "resumed": "the same losses, with deterministic operations",
        "plan's step ÷ measured": "0.95-1.05",
        "MFU of a whole step": "45-55%",
    },
    want={
        "differing_losses": "== 0",
        "loss_fell": "== 1",
        "predicted_over_measured_step": "0.95 to 1.05",
        "predicted_over_measured_peak": "0.95 to 1.05",
        "failed_verbs": "== 0",
    },
)
def training(settings: Settings) -> dict[str, Any]:
    """Train a Llama of 1.2B parameters on real text for 40 steps, two of them profiled; evaluate it and generate with it; then
    go on once more from the checkpoint in the middle, as after a kill."""
    steps = 2 if settings.tiny else 40
    with tempfile.TemporaryDirectory() as folder:
        environment = with_flags("--xla_gpu_deterministic_ops=true")

        def apart(function: Any, *arguments: Any) -> Any:
            return call_apart(function, settings, *arguments, limit_s=200, environment=environment)

        straight = apart(train, folder, steps)
        if "failure" in straight:
            return {"training": straight, "loss_fell": 0, "failed_verbs": 1}
        profiled = sum(file.stat().st_size for file in Path(folder, "profile").rglob("*.xplane.pb"))
        others = {
            "eval": apart(verb, ["eval", folder, "--json", "--batches", "1", "--batch", "2"]),
            "generate": apart(verb, ["generate", folder, "--tokens", "4" if settings.tiny else "64"]),
        }
        shutil.rmtree(next(Path(folder).glob(f"checkpoints/*{steps}")))
        resumed = apart(train, folder, steps)
        predicted_s = apart(predicted_step_s, folder, steps)
    rows, again, result = straight["metrics"], resumed.get("metrics", []), json.loads(straight["stdout"])
    losses, losses_again = ({row["step"]: row["loss"] for row in x if "loss" in row} for x in (rows, again))
    step_s = statistics.median(row["step_s"] for row in rows[len(rows) // 2 :] if "step_s" in row)
    peak = result["peak_measured_bytes"]
    return {
        "metrics": rows[-3:],
        "result": result,
        "verbs": others,
        "failed_verbs": sum(x.get("exit_code") != 0 for x in (straight, resumed, *others.values())),
        "profile_bytes": profiled,
        "predicted_step_s": predicted_s,
        "predicted_over_measured_step": predicted_s / step_s if isinstance(predicted_s, float) else None,
        "predicted_over_measured_peak": result["peak_bytes"] / peak if peak else None,
        "loss_fell": int(losses[steps] < losses[1]),
        "differing_losses": sum(losses[n] != losses_again.get(n) for n in losses),
    }


def _overrides(settings: Settings, folder: str, steps: int) -> list[str]:
    size: dict[str, Any] = {
        "d_model": 2048, "num_layers": 16, "num_heads": 32, "num_kv_heads": 8, "mlp_size": 8192, "vocab_size": 128256,
        "tied": "true",
    }  # fmt: skip
    if settings.tiny:
        size = {"d_model": 32, "num_layers": 1, "num_heads": 2, "tied": "false"}
    overrides = {
        "run.steps": steps,
        "run.batch": 4 if settings.tiny else 8,
        "run.dtype": "float32" if settings.tiny else "bfloat16",
        "run.eval_every": 0,
        "run.checkpoint_every": steps // 2,
        "run.log_every": 1,
        "run.profile_steps": [2, 2] if settings.tiny else [5, 6],
        "run.out_dir": folder,
        "data.seq_len": settings.sequence,
        "model.target": "models.gpt:GPT" if settings.tiny else "models.llama:Llama",
        "pipeline.ranks": 1,
        "pipeline.microbatches": 2 if settings.tiny else 8,
        "pipeline.schedule": "1f1b",
        **{f"model.options.{name}": value for name, value in size.items()},
    }
    return [f"{key}={value}" for key, value in overrides.items()]


def train(settings: Settings, folder: str, steps: int) -> dict[str, Any]:
    """Run ``jaxpipe train`` in ``folder``: its exit code, its result and what it logged."""
    outcome = verb(settings, ["train", "--json", "--config", str(_CONFIG), *_overrides(settings, folder, steps)])
    log = Path(folder, "metrics.jsonl")
    rows = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    return {**outcome, "metrics": [json.loads(row) for row in rows]}


def verb(settings: Settings, arguments: Sequence[str]) -> dict[str, Any]:
    """Run a verb of ``jaxpipe``: its exit code, and what it prints."""
    from jaxpipe.cli import main

    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = main(list(arguments))
    return {"exit_code": code, "stdout": printed.getvalue()}


def predicted_step_s(settings: Settings, folder: str, steps: int) -> float | None:
    """Return the seconds of a step that ``jaxpipe plan`` predicts for this device; None where no target describes it."""
    from jaxpipe.train.config import load_config

    if (target := target_here()) is None:
        return None
    return float(prediction(load_config(_CONFIG, _overrides(settings, folder, steps)), target).step_s)
