"""What a run says at its end, as text and as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from jaxpipe.schedule import CostProfile
from jaxpipe.train.metrics import format_bytes, format_count, format_seconds
from jaxpipe.train.ngram import Score

if TYPE_CHECKING:
    from jaxpipe.train.loop import TrainResult


def result_json(result: TrainResult) -> dict[str, Any]:
    """The fields of a result; numbers that do not exist are None."""
    fields = {**asdict(result), "out_dir": str(result.out_dir)}
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in fields.items()}


def result_text(result: TrainResult) -> str:
    """A few lines: where the run stands, how fast it was, and where to look."""
    held_out = "" if result.eval_loss is None else f", held-out loss {result.eval_loss:.4f}"
    lines = [
        f"{'stopped' if result.stopped else 'done'} at step {result.step}: loss {result.loss:.4f}{held_out}, "
        f"{format_count(result.tokens_per_s)} tok/s, {format_seconds(result.seconds)} in all",
        f"bubble {_percent(result.bubble_predicted)} predicted, {_percent(result.bubble_measured)} measured; step ÷ replay of "
        f"its own durations {result.replay_ratio:.3f}; peak {format_bytes(result.peak_bytes)} a rank",
    ]
    if result.skipped_steps:
        lines.append(f"{result.skipped_steps} steps had a gradient that was not finite and changed nothing")
    lines.append(f"checkpoints, metrics.jsonl and pictures are in {result.out_dir}")
    return "\n".join(lines)


def score_table(scores: Mapping[str, Score]) -> str:
    """Held-out losses, aligned: nats a token and bits a byte."""
    width = max(map(len, scores))
    rows = [f"{'':<{width}}  nats/token  bits/byte"]
    for name, score in scores.items():
        bits = "-" if score.bits_per_byte is None else f"{score.bits_per_byte:.4f}"
        rows.append(f"{name:<{width}}  {score.nats_per_token:10.4f}  {bits:>9}")
    return "\n".join(rows)


def cost_table(costs: CostProfile) -> str:
    """Milliseconds and bytes of each stage, aligned."""
    rows = ["stage     F ms     B ms     W ms    BW ms   residual  held for W   boundary     params"]
    for s in range(costs.num_stages):
        times = (costs.f_s[s], costs.b_s[s], costs.w_s[s], costs.bw_s[s])
        sizes = (costs.residual_bytes[s], costs.w_residual_bytes[s], costs.boundary_bytes[s], costs.param_bytes[s])
        cells = [f"{format_bytes(x):>{w}}" for x, w in zip(sizes, (10, 11, 10, 10), strict=True)]
        rows.append(f"{s:>5}" + "".join(f" {1e3 * t:8.2f}" for t in times) + " " + " ".join(cells))
    rows.append(f"({costs.source})")
    return "\n".join(rows)


def _percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{share:.1%}"
