"""`stp.txt` table 3 (vision-language models) beside `jaxpipe plan` of the same models, on the A800, with no GPU present.

python scripts/plan_vlm.py                     # a table on stdout, progress on stderr (some minutes)
python scripts/plan_vlm.py --only "TP 8"       # the settings whose name has this in it
python scripts/plan_vlm.py --write             # into scripts/results/plan-vlm.json

The models are `scripts/plans/vlm-*.toml`: the whole vision transformer first, then the language model's layers as the paper
cuts them. For TP 8, PP 2 it does not say how 33 layers are cut into three, the last with two fewer; here 12, 11 and 10.

Rates. The paper's attention is FlashAttention 2, which writes no scores to memory; these plans ask for the plain XLA path, half
of whose time is that traffic. So memory's bandwidth is taken as unbounded here, and time is that of products at 0.75 of peak.
Links are such that figure 1 holds: 27.5% of a layer's forward pass at TP 8, sequence 6144. Between ranks each GPU sends its
1/TP of an activation over the network, gathered over NVLink, as Megatron does (`paper_stp.py`), where jaxpipe sends it whole.
Nothing is fitted to this table. A microbatch is one sample.

ZB-V is the better of ours and of ours with each W right behind its B, in both a B whose W follows at once one backward, as in
`paper_stp.py`. Memory is a rank's total without workspace; the paper calls its own "peak activation memory".
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from paper_numbers import STP_EXPOSED, VLM_THROUGHPUT  # noqa: E402

from jaxpipe.planning.predict import Prediction, planned_costs, predict  # noqa: E402
from jaxpipe.planning.roofline import Efficiency  # noqa: E402
from jaxpipe.planning.stages import StageCosts, stage_costs_of  # noqa: E402
from jaxpipe.planning.targets import TARGETS, Target  # noqa: E402
from jaxpipe.schedule import Action, CostProfile, Schedule  # noqa: E402
from jaxpipe.schedule.passes import prompt_weights  # noqa: E402
from jaxpipe.schedule.passes.braid import fused_backwards, with_fused  # noqa: E402
from jaxpipe.train.config import TrainConfig, load_config  # noqa: E402

RESULT = ROOT / "scripts" / "results" / "plan-vlm.json"
SCHEDULES = ("interleaved-1f1b", "v-zb", "stp", "stp-published")
UNPRINTED_CUT = ["embed", "block_12", "block_23"]
Row = dict[str, Any]
Transform = Callable[[Schedule, CostProfile], Schedule]


def quiet(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def setting(name: str, tp: int, pp: int) -> TrainConfig:
    """Return the plan file of a model, on other ranks where the table has them."""
    config = load_config(ROOT / "scripts" / "plans" / f"vlm-{name.lower()}.toml")
    if (config.pipeline.tp, config.pipeline.ranks) == (tp, pp):
        return config
    return config.override([f"pipeline.tp={tp}", f"pipeline.ranks={pp}", f"pipeline.cut={json.dumps(UNPRINTED_CUT)}"])


def machine(tp: int, efficiency: Efficiency) -> Target:
    """Return the A800 with a network that an activation crosses as in Megatron."""
    a800 = TARGETS["a800"]
    near = a800.link_bytes_per_s * efficiency.link
    rate = 1 / (1 / (tp * a800.network_bytes_per_s) + (tp - 1) / tp / near)
    return replace(a800, network_bytes_per_s=rate / efficiency.link)


def planned(base: TrainConfig, stage_costs: StageCosts, schedule: str, microbatches: int) -> Prediction:
    """Return the prediction of one schedule; of ZB-V as described above."""
    config = base.override(
        [f"pipeline.schedule={schedule}", f"pipeline.microbatches={microbatches}", f"run.batch={microbatches}"]
    )
    as_it_is: list[Transform | None] = [None]
    fused: list[Transform | None] = [
        lambda schedule, _: fuse_neighbours(schedule),
        lambda schedule, _: fuse_neighbours(prompt_weights(schedule)),
    ]
    predictions = [
        predict(config, stage_costs, stage_costs.target.memory_bytes, transform)
        for transform in (fused if schedule == "v-zb" else as_it_is)
    ]
    return min(predictions, key=lambda p: p.step_s)


def fuse_neighbours(schedule: Schedule) -> Schedule:
    """``schedule`` with BW in place of each B whose own W is the next slot: B's TP collectives have W under them. The published
    code of ZB-V's authors does so (sail-sg/zero-bubble-pipeline-parallelism, ``zb_schedules.py``)."""
    fused = frozenset(
        (one.stage, one.microbatch)
        for row in schedule.rows
        for one, two in pairwise(row)
        if type(one) is Action and one.op == "B" and two == replace(one, op="W")
    )
    return with_fused(schedule, fused | fused_backwards(schedule))


def rates() -> Efficiency:
    """`plan`'s own without time for memory, and with links at which figure 1 holds: that part of the forward pass of a layer of
    the 12.1B model is communication."""
    tp, sequence, part = STP_EXPOSED
    config = load_config(ROOT / "scripts" / "plans" / "qwen2-12.1b.toml").override([
        f"pipeline.tp={tp}", "pipeline.ranks=2", "pipeline.cut=[1, 2, 3]", f"data.seq_len={sequence}",
    ])  # fmt: skip
    target, efficiency = TARGETS["a800"], Efficiency(bandwidth=1e3)
    stage_costs = stage_costs_of(config, target, efficiency, quiet)
    layer = stage_costs.stages(((0, 1), (1, 2), (2, len(stage_costs.model.layers))), config.pipeline.recompute, 1)[1]
    costs = planned_costs([layer], replace(config.pipeline, ranks=1), target, efficiency, target.memory_bytes)
    comm_s = (costs.f_comm_s[0] + costs.b_comm_s[0]) / 2
    link = efficiency.link * comm_s / (costs.f_s[0] * part / (1 - part))
    quiet(f"a layer takes {1e3 * costs.f_s[0]:.2f} ms and {1e3 * comm_s:.2f} ms of links; so links at {link:.3f}")
    return replace(efficiency, link=link)


def rows_of(name: str, tp: int, pp: int, efficiency: Efficiency) -> list[Row]:
    """A setting at its three numbers of microbatches."""
    base, rows = setting(name, tp, pp), []
    stage_costs = stage_costs_of(base, machine(tp, efficiency), efficiency, quiet)
    by_microbatches, peaks = VLM_THROUGHPUT[name, tp, pp]
    for m, paper in by_microbatches.items():
        predictions = {schedule: planned(base, stage_costs, schedule, m) for schedule in SCHEDULES}
        ours = {schedule: m / p.step_s for schedule, p in predictions.items()}
        theirs = dict(zip(SCHEDULES, (*paper, paper[-1]), strict=True))
        gains = {
            f"{schedule} over {other}": [_gain(theirs, schedule, other), _gain(ours, schedule, other)]
            for schedule in SCHEDULES[2:]
            for other in SCHEDULES[:2]
        }
        rows.append({
            "model": name, "tp": tp, "ranks": pp, "microbatches": m,
            "samples_per_s": {s: [theirs[s], round(ours[s], 3)] for s in SCHEDULES},
            "gain_percent": gains,
            "memory_gb": {
                s: [gb, round(max(x.live_peak_bytes for x in predictions[s].memory) / 1e9, 1)]
                for s, gb in zip(SCHEDULES, (*peaks, peaks[-1]), strict=True)
            },
        })  # fmt: skip
        quiet(f"{name} TP {tp} PP {pp} m {m}: {gains}")
    return rows


def _gain(samples: dict[str, float], schedule: str, other: str) -> float:
    return round(100 * (samples[schedule] / samples[other] - 1), 2)


def table(rows: list[Row]) -> str:
    lines = [
        "| model | TP, PP | m | STP over 1F1B-I | published | STP over ZB-V | samples/s of 1F1B-I, ZB-V, STP | GB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        gains = [r["gain_percent"][f"{a} over {b}"] for a, b in (
            ("stp", "interleaved-1f1b"), ("stp-published", "interleaved-1f1b"), ("stp", "v-zb"))]  # fmt: skip
        cells = [f"{paper:.1f} → {ours:.1f}" for paper, ours in gains]
        speeds = ", ".join("{:.2f} → {:.2f}".format(*r["samples_per_s"][s]) for s in SCHEDULES[:3])
        memory = ", ".join("{:.0f} → {:.0f}".format(*r["memory_gb"][s]) for s in SCHEDULES[:3])
        lines.append(
            f"| {r['model']} | {r['tp']}, {r['ranks']} | {r['microbatches']} | {' | '.join(cells)} | {speeds} | {memory} |"
        )
    return "\n".join(lines)


def _write(rows: list[Row], efficiency: Efficiency, seconds: float) -> None:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    document = {
        "command": "python scripts/plan_vlm.py",
        "commit": commit.stdout.strip(),
        "link": round(efficiency.link, 4),
        "seconds": round(seconds, 1),
        "rows": rows,
    }
    RESULT.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    quiet(f"wrote {RESULT}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="settings whose name, such as '14.9B TP 8 PP 2', has this in it")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    start, efficiency = time.monotonic(), rates()
    rows: list[Row] = []
    for name, tp, pp in VLM_THROUGHPUT:
        if arguments.only in f"{name} TP {tp} PP {pp}":
            rows += rows_of(name, tp, pp, efficiency)
            if arguments.write:
                _write(rows, efficiency, time.monotonic() - start)
    print(table(rows))


if __name__ == "__main__":
    main()
