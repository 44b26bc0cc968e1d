"""Experiments on whole programs: whether a rank's parts predict the pipeline, where a step's time goes, what the host costs."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from scripts.gpu_experiments.blocks import pipeline, step_seconds
from scripts.gpu_experiments.process import call_apart, with_flags
from scripts.gpu_experiments.registry import PROGRAM_PATHS, Settings, experiment

_SCHEDULES = ("po-h", "v-half", "zb-h1", "1f1b")
"""Schedules whose peaks rise."""
_LIMIT_S = 120


@experiment(
    "T5",
    version=1,
    question="does the sum of the ranks, rehearsed, predict the whole pipeline?",
    backs="jaxpipe rehearse (U5), plan",
    paths=PROGRAM_PATHS,
    estimate_s=150,
    predicted={"busy ÷ whole": "0.97-1.00", "peak": "within 2%"},
    want={f"{name}.busy_over_whole": "0.98 to 1.02" for name in _SCHEDULES},
)
def parts_and_whole(settings: Settings) -> dict[str, Any]:
    """Rehearse each rank, then run the whole pipeline with all ranks on this device: its step is the sum of theirs."""
    return {name: _parts_and_whole(settings, name) for name in (_SCHEDULES[-1:] if settings.tiny else _SCHEDULES)}


def _parts_and_whole(settings: Settings, name: str) -> dict[str, Any]:
    import jax

    from jaxpipe.rehearsal.rank import Rehearsal, stand_in_inputs
    from jaxpipe.schedule import generate

    pipe = pipeline(settings, settings.hidden, generate(name, settings.ranks, settings.microbatches))
    if name == "po-h":
        # The order must know what copies take.
        costs = pipe.measure_costs(repeats=1)
        pipe = pipe.with_schedule(generate(name, settings.ranks, settings.microbatches, costs=costs), costs)
    ranks = sorted((Rehearsal(pipe, r) for r in range(settings.ranks)), key=lambda r: r.predicted_peak_bytes)
    reports = [r.run(steps=settings.steps, complete=False) for r in ranks]
    gc.collect()
    device = jax.devices()[0]
    before = device.memory_stats() or {}
    walls, inputs = step_seconds(pipe, stand_in_inputs(pipe, pipe.functions, settings.vocab), settings.steps)
    after = device.memory_stats() or {}
    del inputs
    gc.collect()
    busy_s, whole_s = sum(r.step.median_s for r in reports), statistics.median(walls)
    rose = after.get("peak_bytes_in_use", 0) > before.get("peak_bytes_in_use", 0)
    predicted = sum(pipe.memory_report().peak_bytes)
    return {
        "rank_step_s": {str(r.rank): r.step.median_s for r in reports},
        "whole_step_s": walls,
        "busy_over_whole": busy_s / whole_s,
        "predicted_peak_bytes_all_ranks": predicted,
        "measured_peak_bytes": after.get("peak_bytes_in_use") if rose else None,
        "rank_predicted_over_measured": {str(r.rank): r.memory.ratio for r in reports},
    }


@experiment(
    "T11",
    version=2,
    question="what does the host take for an instruction, and how small may an action be?",
    backs="results: host µs per instruction",
    paths=PROGRAM_PATHS,
    estimate_s=90,
    predicted={"mean µs of a run": "60-110 with 35 arrays", "device-bound from": "0.5-1 ms an action"},
    want={"least_mean_run_us": "<= 40"},
)
def host_cost(settings: Settings) -> dict[str, Any]:
    """Run one rank's program with blocks of several sizes at sequence 1024: host µs by kind of instruction, of the first 16
    alone, as later ones wait for a place among 32 computations; step ÷ the sum of its functions. The smallest blocks also
    without command buffers, whose addresses would change with each call."""
    hidden = [settings.hidden] if settings.tiny else [512, 1024, 2048, 4096]
    rows = call_apart(host_rows, settings, hidden, limit_s=_LIMIT_S, environment={})
    numbers: dict[str, Any] = {"by_hidden": rows}
    if not settings.tiny:
        flags = with_flags("--xla_gpu_enable_command_buffer=")
        numbers["without_command_buffers"] = call_apart(
            host_rows, settings, hidden[:1], limit_s=_LIMIT_S, environment=flags
        )
    if "failure" not in rows:
        numbers["least_mean_run_us"] = min(row["us"].get("Run", 1e9) for row in rows.values())
    return numbers


def host_rows(settings: Settings, hidden_sizes: Sequence[int]) -> dict[str, Any]:
    """Return what the host takes, by hidden size."""
    from jaxpipe.schedule import generate

    short = settings if settings.tiny else replace(settings, sequence=1024)
    rows = {}
    for hidden in hidden_sizes:
        rows[str(hidden)] = _host_row(
            short, pipeline(short, hidden, generate("zb-h1", short.ranks, short.microbatches))
        )
        gc.collect()
    return rows


def _host_row(settings: Settings, pipe: Any) -> dict[str, Any]:
    from jaxpipe.rehearsal.rank import Rehearsal

    rehearsal = Rehearsal(pipe, 1)
    report = rehearsal.run(steps=settings.steps)
    executor = rehearsal.pipeline.executor
    samples: dict[str, list[float]] = {}
    inputs, _ = rehearsal.place()
    for n in range(settings.steps + 1):
        out = executor.run(inputs)
        out.wait()
        inputs = replace(inputs, acc=out.acc)
        instructions = [rehearsal.program.instructions[at] for _, at in executor.sequence]
        for instruction, seconds in list(zip(instructions, out.instruction_s, strict=True))[: _FREE if n else 0]:
            samples.setdefault(type(instruction).__name__, []).append(seconds * 1e6)
    alone_s = sum(
        report.standalone[i.action.op, i.action.stage].median_s
        for i in rehearsal.program.instructions
        if type(i).__name__ == "Run"
    )
    return {
        "us": {kind: statistics.mean(values) for kind, values in samples.items()},
        "step_s": report.step.median_s,
        "functions_s": alone_s,
        "step_over_functions": report.step.median_s / alone_s,
        "arrays": statistics.mean(len(f.inputs) for s in rehearsal.functions.values() for f in s.functions.values()),
    }


_FREE = 16
"""Instructions from a step's start that find a place among the computations in flight."""
