"""`jaxpipe plan` beside the memory that the papers report, on their models and hardware, with no GPU present.

python scripts/plan_papers.py                  # a table on stdout, progress on stderr (about half a minute)
python scripts/plan_papers.py --json           # the rows, one JSON document
python scripts/plan_papers.py --write          # into scripts/results/plan-papers.json

`controllable-memory.txt` table 4 reports activation memory: the peak of a step minus what is there before it, the largest of
all devices, the same at every number of microbatches. Its sequence length is not printed beside the table; 1024 (as in table 3)
with attention scores kept reproduces all twelve numbers, and flash attention is named only for section 4.4. Ours is residuals
and boundaries, without XLA's workspace.

`stp.txt` reports peak memory of the 12.1B model (tables 5 and 8) without saying what is in it, and one number that is
activations alone (3.6 GB a microbatch and virtual stage at TP 8, its appendix C). Its tables are compared with a rank's total,
workspace apart. They don't agree with each other: four chunks of 3.6 GB at TP 8, PP 2 leave 9.6 GB of the 24 GB for 0.8 B
parameters a GPU, 12 bytes each, where bfloat16 training with Adam takes 18; interleaved 1F1B, with as many live chunks there,
takes 7 GB more. So those rows are shown, not fitted.

Memory does not depend on how workspace is found, so nothing is compiled here.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from paper_numbers import ACTIVATION_GB, STP_CHUNK_GB, STP_PEAK_GB  # noqa: E402

from jaxpipe.planning.predict import Prediction, predict  # noqa: E402
from jaxpipe.planning.roofline import Efficiency  # noqa: E402
from jaxpipe.planning.stages import StageCosts, stage_costs_of  # noqa: E402
from jaxpipe.planning.targets import TARGETS  # noqa: E402
from jaxpipe.train.config import TrainConfig, load_config  # noqa: E402

PLANS = ROOT / "scripts" / "plans"
RESULT = ROOT / "scripts" / "results" / "plan-papers.json"
TOLERANCE = 0.10
Row = dict[str, Any]


def quiet(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def planned(config: TrainConfig, stage_costs: StageCosts) -> Prediction:
    return predict(config, stage_costs, stage_costs.target.memory_bytes)


def controllable_memory() -> list[Row]:
    """Table 4's activation memory of four schedules and three models."""
    rows = []
    for name, by_schedule in ACTIVATION_GB.items():
        start = time.monotonic()
        base = load_config(PLANS / f"gpt-{name.lower()}.toml")
        stage_costs = stage_costs_of(base, TARGETS["a100"], Efficiency(), quiet)
        layers = len(stage_costs.model.layers)
        for schedule, paper in by_schedule.items():
            v = [f"pipeline.cut={list(range(1, layers - 1))}", "pipeline.chunks=2", f"pipeline.schedule={schedule}"]
            config = base if schedule == base.pipeline.schedule else base.override(v)
            p = planned(config, stage_costs)
            rows.append(
                row(name, schedule, "activation memory", paper, max(p.activation_bytes) / 1e9,
                    "bfloat16, scores kept (no flash attention), dropout 0.1, sequence 1024, recompute=fused", "")
            )  # fmt: skip
        quiet(f"{name}: {time.monotonic() - start:.1f} s")
    return rows


def stp() -> list[Row]:
    """Table 5's peak memory of the 12.1B model, and appendix C's activations of one chunk."""
    rows = []
    paper_config = load_config(PLANS / "qwen2-12.1b.toml")
    assumed = "bfloat16, flash attention, sequence 6144, no dropout, no sequence parallelism, recompute=flash"
    for (tp, pp), by_schedule in STP_PEAK_GB.items():
        per_stage = 32 // (2 * pp)
        cut = [1 + per_stage * s for s in range(1, 2 * pp)]
        base = paper_config.override([f"pipeline.tp={tp}", f"pipeline.ranks={pp}", f"pipeline.cut={cut}"])
        stage_costs = stage_costs_of(base, TARGETS["a800"], Efficiency(), quiet)
        for schedule, paper in by_schedule.items():
            config = base.override([f"pipeline.schedule={schedule}"])
            p = planned(config, stage_costs)
            ours = max(m.peak_bytes - m.by_kind["temporaries"] for m in p.memory) / 1e9
            note = "a rank's total (18 bytes a parameter and activations), without workspace"
            rows.append(row(f"12.1B TP {tp} PP {pp}", schedule, "peak memory", paper, ours, assumed, note))
            if (tp, schedule) == (8, "v-zb"):
                chunk = max(p.costs.residual_bytes) / 1e9
                note = "bytes of the layers alone; the paper calls its own numbers higher than theory"
                rows.append(
                    row(
                        f"12.1B TP {tp} PP {pp}",
                        schedule,
                        "one chunk and microbatch",
                        STP_CHUNK_GB,
                        chunk,
                        assumed,
                        note,
                    )
                )
    return rows


def row(model: str, schedule: str, what: str, paper: float, ours: float, assumed: str, note: str) -> Row:
    return {
        "model": model, "schedule": schedule, "what": what, "paper_gb": paper, "ours_gb": round(ours, 2),
        "ratio": round(ours / paper, 3), "within_10_percent": abs(ours / paper - 1) <= TOLERANCE,
        "assumed": assumed, "note": note,
    }  # fmt: skip


def table(rows: list[Row]) -> str:
    lines = ["| model | schedule | what | paper GB | plan GB | ratio | |", "|---|---|---|---|---|---|---|"]
    lines += [
        f"| {r['model']} | {r['schedule']} | {r['what']} | {r['paper_gb']} | {r['ours_gb']:.1f} | {r['ratio']:.2f} | "
        f"{'' if r['within_10_percent'] else 'outside 10%'} |"
        for r in rows
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    start, cpu = time.monotonic(), time.process_time()
    rows = [*controllable_memory(), *stp()]
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    document = {
        "command": "python scripts/plan_papers.py",
        "commit": commit.stdout.strip(),
        "seconds": round(time.monotonic() - start, 1),
        "processor_seconds": round(time.process_time() - cpu, 1),
        "rows": rows,
    }
    if arguments.write:
        RESULT.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        quiet(f"wrote {RESULT}")
    if arguments.json:
        print(json.dumps(document))
    else:
        print(table(rows))


if __name__ == "__main__":
    main()
