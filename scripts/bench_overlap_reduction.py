"""Simulate what reducing gradients and gathering parameters beside compute is worth, for models of the size of Llama 3.

python scripts/bench_overlap_reduction.py            # a table on stdout
python scripts/bench_overlap_reduction.py --write    # into scripts/results/reductions.json, too

A stage's gradients are reduced over dp once a step (R, behind its last W), and with ZeRO-1 its parameters are gathered (G,
before its first F). ``today``: R on the compute lane, as the runtime dispatches it, and all parameters gathered at the end of
the update. ``own lane``: R and G beside compute, a stage at a time. ``buckets``: eight a stage, so that most of R lies under
the stage's last W, and its first F begins when an eighth of the parameters is there. ``validated``: own lane, and with
post-validation. ``after``: R after the pipeline, and G.

Taken: 445 TFLOP/s a GPU and F = B = W; 45 GB/s a GPU between hosts, float32 gradients, bfloat16 parameters; sequences of
8,192 tokens, one a microbatch; no other messages, no embedding or head. Compute does not slow down beside a collective, which
it does on GPUs. Nothing here ran on one.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from jaxpipe.schedule import (  # noqa: E402  # noqa: E402
    Action,
    CostProfile,
    OpSpec,
    Schedule,
    Slot,
    Wait,
    generate,
    op_spec,
    register_op,
    replay,
    simulate,
    simulate_steps,
)
from jaxpipe.schedule.passes import with_reductions  # noqa: E402
from scripts.provenance import commit_id  # noqa: E402

RESULT = ROOT / "scripts" / "results" / "reductions.json"
FLOPS_PER_S, BYTES_PER_S, TOKENS = 445e12, 45e9, 8192
FAMILIES = {"1f1b": 1, "zb-1p": 1, "interleaved-1f1b": 2, "v-zb": 2, "v-half": 2}
"""Chunks by family."""
EARLY = "abcdefg"
"""Names of the buckets of a stage but the last, which is R or G itself."""


@dataclass(frozen=True, slots=True)
class Run:
    """A model of ``parameters`` on pp × tp × dp GPUs, and the microbatches of a step."""

    name: str
    parameters: float
    pp: int
    tp: int
    dp: int
    microbatches: int

    @property
    def function_s(self) -> float:
        """Seconds of F of a rank's share of one microbatch."""
        return 2 * self.parameters / self.pp * TOKENS / (self.tp * FLOPS_PER_S)

    def moved_s(self, bytes_each: int) -> float:
        """Seconds of a reduce-scatter or an all-gather over dp of a rank's parameters."""
        return bytes_each * self.parameters / self.pp / self.tp * (self.dp - 1) / self.dp / BYTES_PER_S


RUNS = (
    Run("70B, 1,024 GPUs", 70e9, 8, 8, 16, 32),
    Run("70B, 1,024 GPUs", 70e9, 8, 8, 16, 16),
    Run("405B, 4,096 GPUs", 405e9, 16, 8, 32, 64),
    Run("405B, 4,096 GPUs", 405e9, 16, 8, 32, 16),
)


def register_buckets() -> None:
    """Register the ops of the early buckets: parts of R and G, and the parts of F, W and BW beside which they run."""
    for bucket in EARLY:
        first = (*op_spec("F").waits[:1], Wait((f"G{bucket}",), "self"))
        register_op(OpSpec(f"G{bucket}", "net", (), "gather_s"))
        register_op(OpSpec(f"F{bucket}", "compute", first, "f_s"))
        for op in ("W", "BW"):
            register_op(OpSpec(f"{op}{bucket}", "compute", op_spec(op).waits, op_spec(op).cost))
        register_op(OpSpec(f"R{bucket}", "net", (Wait((f"W{bucket}", f"BW{bucket}"), "self"),), "reduce_s"))


def in_buckets(schedule: Schedule) -> Schedule:
    """Return ``schedule``, which has R and G, with eight of each a stage, and its first F and last W in as many parts."""
    return replace(schedule, rows=tuple(tuple(_split(row)) for row in schedule.rows))


def _split(row: Sequence[Slot]) -> Iterator[Slot]:
    actions = [slot.actions[0] for slot in row]
    first = {a.stage: a for a in reversed(actions) if a.op == "F"}
    last = {a.stage: a for a in actions if a.op in ("W", "BW")}
    for action in actions:
        if action.op == "G":
            yield from (Action(f"G{x}", action.stage, first[action.stage].microbatch) for x in EARLY)
        elif action in (first[action.stage], last[action.stage]):
            for x in EARLY:
                yield replace(action, op=action.op + x)
                if action.op != "F":
                    yield replace(action, op=f"R{x}")
        yield action


def bucketed_s(schedule: Schedule, costs: CostProfile) -> float:
    """Return the seconds of a step of ``schedule``, which has R and G, in buckets."""
    divided, parts = in_buckets(schedule), len(EARLY) + 1
    names = {(a.op[:-1], a.stage, a.microbatch) for a in divided.actions() if a.op[-1] in EARLY}
    seconds = {}
    for rank in range(divided.num_ranks):
        for a in divided.actions(rank):
            whole_s = costs.seconds(op_spec(a.op).cost, a.stage)
            is_part = a.op[-1] in EARLY or a.op in "RG" or (a.op, a.stage, a.microbatch) in names
            seconds[rank, a] = whole_s / parts if is_part else whole_s
    return replay(divided, seconds, costs).makespan


def measured(run: Run, family: str) -> dict[str, Any]:
    """Return the seconds of a step of each kind, and the gain of buckets on a lane of their own over today's."""
    chunks, f = FAMILIES[family], run.function_s
    n = run.pp * chunks
    costs = CostProfile.uniform(n, chunks=chunks, f=f, b=f, w=f)
    reduce_s, gather_s = run.moved_s(4), run.moved_s(2)
    costs = costs.with_values("reduce_s", (reduce_s / chunks,) * n).with_values("gather_s", (gather_s / chunks,) * n)
    plain = generate(family, run.pp, run.microbatches, chunks if chunks > 1 else None, costs)
    both = with_reductions(plain, gather=True)
    pipeline_s = simulate(plain, costs).makespan
    today_s = simulate(with_reductions(plain), replace(costs, net_overlaps=False)).makespan + gather_s
    lane_s, buckets_s = simulate(both, costs).makespan, bucketed_s(both, costs)
    validated_s = simulate_steps(both, costs, 3, post_validation=True).period_s
    return {
        "run": run.name,
        "microbatches": run.microbatches,
        "family": family,
        "reduce_s": reduce_s,
        "gather_s": gather_s,
        "pipeline_s": pipeline_s,
        "after_s": pipeline_s + reduce_s + gather_s,
        "today_s": today_s,
        "own_lane_s": lane_s,
        "buckets_s": buckets_s,
        "validated_s": validated_s,
        "gain": today_s / buckets_s - 1,
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the gains as a Markdown table: a row per run, a column per family."""
    lines = ["| | R, G a rank | " + " | ".join(FAMILIES) + " |", "|---|---|" + "---|" * len(FAMILIES)]
    for name, m in dict.fromkeys((row["run"], row["microbatches"]) for row in rows):
        mine = {row["family"]: row for row in rows if (row["run"], row["microbatches"]) == (name, m)}
        first = next(iter(mine.values()))
        cells = [
            f"{x['today_s']:.2f} → {x['own_lane_s']:.2f}, {x['buckets_s']:.2f} ({x['gain']:.1%})" for x in mine.values()
        ]
        seconds = f"{1e3 * first['reduce_s']:.0f}, {1e3 * first['gather_s']:.0f} ms"
        lines.append(f"| {name}, m {m} | {seconds} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.relative_to(ROOT)}")
    arguments = parser.parse_args(argv)
    register_buckets()
    rows = [measured(run, family) for run in RUNS for family in FAMILIES]
    print(table(rows))
    if arguments.write:
        report = {"command": "python scripts/bench_overlap_reduction.py --write", "commit": commit_id(), "rows": rows}
        RESULT.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
