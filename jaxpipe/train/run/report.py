"""What a run says at its end, as text and as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jaxpipe.cost import StageMeasurements
from jaxpipe.schedule import CostProfile
from jaxpipe.schedule.json_form import to_costs
from jaxpipe.text import aligned, format_bytes, format_count, format_seconds
from jaxpipe.train.corpora.ngram import Score
from jaxpipe.train.metrics import format_gain, plain

_NAN = float("nan")


@dataclass(frozen=True, slots=True)
class TrainResult:
    """How a run ended. ``steps_run``: by this process; 0 if the run was finished before. ``stopped``: a signal ended it before
    its last step. ``tokens_per_s``: in training steps, without the first (it compiles), evaluation and saving.
    ``bubble_measured`` and ``replay_ratio`` (step time ÷ replay of the same order with its own durations): medians over
    recorded steps, NaN if there was none. ``peak_bytes``: of the fullest rank's device, as predicted
    (:meth:`~jaxpipe.train.step.TrainStep.memory_report`); ``peak_measured_bytes``: of the fullest device, None where the
    backend does not count, or the device was fuller before the first step, when stages were timed alone. ``mfu``: NaN where the
    device's peak is not known. ``schedule``: the one that ran at the end, to which predictions and medians belong;
    ``gain_predicted`` and ``gain_measured``: the fraction of the time that it saves over the one before, where re-planning
    changed it, else NaN. ``rollbacks``: steps that post-validation dropped and did again. ``empty_steps``: steps
    without a target."""

    out_dir: Path
    step: int
    steps_run: int
    stopped: bool
    loss: float
    eval_loss: float | None
    tokens_per_s: float
    bubble_predicted: float
    bubble_measured: float
    replay_ratio: float
    peak_bytes: int
    skipped_steps: int
    seconds: float
    schedule: str = ""
    gain_predicted: float = _NAN
    gain_measured: float = _NAN
    mfu: float = _NAN
    peak_measured_bytes: int | None = None
    rollbacks: int = 0
    empty_steps: int = 0

    @classmethod
    def finished(cls, out_dir: Path, step: int, metrics: Mapping[str, float], seconds: float) -> TrainResult:
        """Of a run that had nothing left to do; ``metrics``: its last values."""
        loss, eval_loss = metrics.get("loss", _NAN), metrics.get("eval_loss")
        return cls(out_dir, step, 0, False, loss, eval_loss, _NAN, _NAN, _NAN, _NAN, 0, 0, seconds)


def result_json(result: TrainResult) -> dict[str, Any]:
    """The fields of a result; numbers that do not exist are None."""
    fields: dict[str, Any] = plain({**asdict(result), "out_dir": str(result.out_dir)})
    return fields


def result_text(result: TrainResult) -> str:
    """A few lines: where the run stands, how fast it was, and where to look."""
    held_out = "" if result.eval_loss is None else f", held-out loss {result.eval_loss:.4f}"
    lines = [f"{'stopped' if result.stopped else 'done'} at step {result.step}: loss {result.loss:.4f}{held_out}"]
    if result.steps_run:
        mfu = "" if math.isnan(result.mfu) else f", MFU {result.mfu:.1%}"
        lines[0] += f", {format_count(result.tokens_per_s)} tok/s{mfu}, {format_seconds(result.seconds)} in all"
        lines.append(f"bubble {result.bubble_predicted:.1%} predicted")
        if not math.isnan(result.bubble_measured):
            lines[1] += (
                f", {result.bubble_measured:.1%} measured; step ÷ replay of its own durations {result.replay_ratio:.3f}"
            )
        lines[1] += f"; peak {format_bytes(result.peak_bytes, binary=True)} a rank predicted"
        if result.peak_measured_bytes is not None:
            lines[1] += f", {format_bytes(result.peak_measured_bytes, binary=True)} measured"
    if not math.isnan(result.gain_predicted):
        gains = {"predicted": result.gain_predicted, "measured": result.gain_measured}
        said = [f"{format_gain(gain)} {how}" for how, gain in gains.items() if not math.isnan(gain)]
        lines.append(f"schedule {result.schedule} takes {', '.join(said)} than the one before")
    if result.skipped_steps:
        plural = "s" if result.skipped_steps > 1 else ""
        lines.append(f"{result.skipped_steps} step{plural} had a gradient that was not finite and changed nothing")
    if result.empty_steps:
        plural = "s" if result.empty_steps > 1 else ""
        lines.append(f"{result.empty_steps} step{plural} had no target and changed nothing")
    if result.rollbacks:
        lines.append(f"{result.rollbacks} of the steps that began early began again (pipeline.post_validation)")
    lines.append(f"checkpoints, metrics.jsonl and pictures are in {result.out_dir}")
    return "\n".join(lines)


def score_table(scores: Mapping[str, Score], loss_unit: str) -> str:
    """Held-out losses, aligned: in ``loss_unit`` and in bits a byte; and what else a model reports."""
    rows = [("", loss_unit, "bits/byte", "")]
    for name, score in scores.items():
        bits = "-" if score.bits_per_byte is None else f"{score.bits_per_byte:.4f}"
        others = "  ".join(f"{metric} {value:.4f}" for metric, value in score.metrics.items())
        rows.append((name, f"{score.loss:.4f}", bits, others))
    return "\n".join(aligned(rows, left=(0, 3)))


def scores_json(scores: Mapping[str, Score]) -> dict[str, dict[str, Any]]:
    """Held-out losses; None for a number that is not finite or does not exist."""
    return {
        name: {
            "loss": plain(x.loss),
            "bits_per_byte": plain(x.bits_per_byte),
            **({"metrics": {metric: plain(value) for metric, value in x.metrics.items()}} if x.metrics else {}),
        }
        for name, x in scores.items()
    }


def cost_table(costs: CostProfile) -> str:
    """Milliseconds and bytes of each stage, aligned."""
    rows: list[tuple[str, ...]] = [
        ("stage", "F ms", "B ms", "W ms", "BW ms", "residual", "held for W", "boundary", "params")
    ]
    for s in range(costs.num_stages):
        times = (costs.f_s[s], costs.b_s[s], costs.w_s[s], costs.bw_s[s])
        sizes = (costs.residual_bytes[s], costs.w_residual_bytes[s], costs.boundary_bytes[s], costs.param_bytes[s])
        rows.append((str(s), *(f"{1e3 * t:.2f}" for t in times), *(format_bytes(x, binary=True) for x in sizes)))
    return "\n".join([*aligned(rows), f"({costs.source})"])


def measurement_table(measured: StageMeasurements) -> str:
    """Per stage and function: median milliseconds with their spread, XLA's workspace, arguments and results; collectives over
    tp, where there are any; then bytes per stage and the host link."""
    rows: list[tuple[str, ...]] = [("stage", "op", "ms", "spread", "workspace", "arguments", "results")]
    for (op, s), timing in sorted(measured.timings.items(), key=lambda item: item[0][1]):
        f = measured.footprints.get((op, s))
        sizes = () if f is None else (f.temp_bytes, f.argument_bytes, f.output_bytes)
        cells = [format_bytes(x, binary=True) for x in sizes] or [""] * 3
        rows.append((str(s), op, f"{1e3 * timing.median_s:.3f}", f"{timing.spread:.0%}", *cells))
    lines = aligned(rows, left=(1,))
    for s, alone in sorted(measured.collectives.items()):
        took = f"{1e3 * alone.median_s:.3f} ms alone, spread {alone.spread:.0%}"
        lines.append(f"{s:>5}  collectives in F, and as many in B: {took}")
    host = "host link: not measured" if measured.host is None else str(measured.host)
    return "\n".join([*lines, "", cost_table(measured.costs()), host])


def measurement_json(measured: StageMeasurements) -> dict[str, Any]:
    """All that was measured: the cost profile, quartiles and memory of each function, the points of the host link."""
    found: dict[str, Any] = plain(
        {
            "costs": to_costs(measured.costs()),
            "functions": [
                {
                    "stage": s,
                    "op": op,
                    "timing": asdict(timing),
                    "memory": asdict(measured.footprints[(op, s)]) if (op, s) in measured.footprints else None,
                }
                for (op, s), timing in measured.timings.items()
            ],
            "tp_collectives": [
                {"stage": s, "timing": asdict(alone)} for s, alone in sorted(measured.collectives.items())
            ],
            "host_link": asdict(measured.host) if measured.host is not None else None,
        }
    )
    return found
