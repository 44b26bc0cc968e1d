"""The papers' tables beside what this code makes of the same costs, cell by cell.

python scripts/paper_tables.py                  # markdown on stdout, progress on stderr (about 15 minutes)
python scripts/paper_tables.py --quick          # the small columns only
python scripts/paper_tables.py --json           # the numbers, one JSON document
python scripts/paper_tables.py --write          # into scripts/results/paper-tables.json, which the README shows
python scripts/paper_tables.py --only stp --write       # the tables whose title has this in it; the others stay as they are

Bubbles are the papers': longest rank span minus work, over the span (by makespan V-ZB's are up to 5 points higher, which
``jaxpipe compare`` shows). Figures are printed without numbers, so there the columns are ours and the formula's.
It imports neither JAX nor NumPy.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import paper_stp  # noqa: E402
from paper_numbers import MODELS, TABLE_1_MEMORY, TABLE_4, Model  # noqa: E402

from jaxpipe.schedule import FAMILIES, CostProfile, Timeline, circular, generate, simulate  # noqa: E402
from jaxpipe.schedule.passes import braid, offload  # noqa: E402
from jaxpipe.schedule.placement import one_to_one, v_shape  # noqa: E402
from jaxpipe.schedule.problem import Problem  # noqa: E402
from jaxpipe.search.families.pipeoffload import po_rows  # noqa: E402
from jaxpipe.search.solve import Options, SolveTask  # noqa: E402
from jaxpipe.search.solve.solver import solve_any  # noqa: E402

RESULT = ROOT / "scripts" / "results" / "paper-tables.json"
TOLERANCE = 0.3  # points
Row = dict[str, Any]


def timeline_of(name: str, p: int, m: int, costs: CostProfile, **options: Any) -> Timeline:
    """Return the simulation of a family."""
    return simulate(generate(name, p, m, costs=costs, **options), costs)


def chunk_costs(
    name: str, p: int, chunk: tuple[float, float, float], comm: float, chunks: int = 0, **k: float
) -> CostProfile:
    """Costs where half of a rank's share, a V-chunk, takes ``chunk`` (F, B, W)."""
    v = chunks or FAMILIES[name].default_chunks
    f, b, w = (2 * x for x in chunk)
    return CostProfile.uniform(p * v, chunks=v, f=f, b=b, w=w, comm=comm, **k)


def table_4(quick: bool) -> list[Row]:
    """`controllable-memory.txt` table 4: bubble rates in percent, and ours."""
    rows = []
    for name, by_model in TABLE_4.items():
        for model, printed in zip(MODELS, by_model, strict=True):
            cells = [
                _cell_of_table_4(name, model, m, paper)
                for m, paper in zip(model.microbatches, printed, strict=True)
                if not (quick and m > 2 * model.ranks)
            ]
            rows.append({"family": name, "model": model.name, "ranks": model.ranks, "cells": cells})
    return rows


def _cell_of_table_4(name: str, model: Model, m: int, paper: float | None) -> Row:
    timeline = timeline_of(name, model.ranks, m, chunk_costs(name, model.ranks, model.chunk_ms, model.comm_ms))
    ours = 100 * timeline.span_bubble_rate
    difference = None if paper is None else round(ours - paper, 2)
    return {"microbatches": m, "paper": paper, "ours": round(ours, 2), "difference": difference}


def table_1_memory(quick: bool) -> list[Row]:
    """`controllable-memory.txt` table 1 at unit costs: peak ÷ 1F1B's, and bubble ÷ d in chunk units."""
    p, rows = (8 if quick else 32), []
    m = 4 * p
    for name, (memory, bubble) in TABLE_1_MEMORY.items():
        timeline = timeline_of(name, p, m, chunk_costs(name, p, (1, 1, 1), 0))
        rows.append(
            {
                "family": name,
                "ranks": p,
                "microbatches": m,
                "peak": _beside(memory, max(timeline.peak_activations) / p),
                "bubble": _beside(bubble, (timeline.max_span - 6 * m) / p),
            }
        )
    return rows


def figure_9(quick: bool) -> list[Row]:
    """`controllable-memory.txt` figure 9: bubble rate of the adaptive V schedule in percent, against memory limit ÷ 1F1B's.

    (The third model, at p = 32, would take as long as all else together.)
    """
    rows = []
    for model in MODELS[:1] if quick else MODELS[:2]:
        p = model.ranks
        costs = chunk_costs("v-adaptive", p, model.chunk_ms, model.comm_ms)
        points = []
        for eighths in (4, 8) if quick else (3, 4, 5, 6, 7, 8, 12, 16):
            limit = _round_up(eighths * p / 8)
            timeline = timeline_of("v-adaptive", p, 2 * p, costs, memory_limit=limit)
            points.append({"limit": round(limit / p, 3), "ours": round(100 * timeline.span_bubble_rate, 2)})
        rows.append({"model": model.name, "ranks": p, "microbatches": 2 * p, "points": points})
    return rows


def _round_up(limit: float) -> float:
    """A whole number of chunks, plus the one that "just above 1/2 of 1F1B" (appendix B) needs."""
    return (int(2 * limit) + 2) / 2


def table_1_offload(quick: bool) -> list[Row]:
    """`pipeoffload.txt` table 1 at unit costs: peak and bubble of a rank in chunk units, by the closed forms of FACTS.md."""
    rows = []
    p, v = 8, 2
    g = (p + 1) // 2
    forms: dict[str, tuple[float | None, float | None]] = {
        "1f1b": (v * p, v * 3 * (p - 1)),
        "interleaved-1f1b": ((v + 1) * p - 1, 3 * (p - 1)),
        "gis": (v * p, 2 * (p - 1)),
        "gis-h": ((v - 1) * g + p, 2 * (p - 1) + (v - 1) * (p - g)),
        "po-h": (None, None),
        "po-f": (None, None),
    }
    for m in (16,) if quick else (16, 64):
        for name, (peak, bubble) in forms.items():
            chunks = v if FAMILIES[name].default_chunks > 1 else 1
            costs = CostProfile.uniform(p * chunks, chunks=chunks, f=v, b=v, w=v, offload_time=0.5 * 3 * v)
            timeline = timeline_of(name, p, m, costs)
            rows.append(
                {
                    "family": name,
                    "ranks": p,
                    "chunks": v,
                    "microbatches": m,
                    "peak": _beside(peak, v * max(timeline.peak_activations)),
                    "bubble": _beside(bubble, timeline.makespan - 3 * v * m),
                }
            )
    return rows


def figure_3(quick: bool) -> list[Row]:
    """`pipeoffload.txt` figure 3: peak ÷ peak without offload of the uniform repeat, by the part of stages offloaded.

    Lifespans fall linearly over a rank's stages, so with many of them the part x of the longest leaves (1 − x)².
    """
    rows = []
    p, m = 8, 32
    for v in (2, 4) if quick else (2, 4, 8, 16):
        costs = CostProfile.uniform(p * v, chunks=v, offload_time=0.03)
        problem = Problem.of(circular(p, v), m, costs)
        schedule = problem.schedule("po", po_rows(problem))
        full_peak = max(simulate(schedule, costs).peak_activations)
        points = []
        for quarters in range(5):
            peak_after = max(offload(schedule, costs, fraction=quarters / 4).peak_after) / full_peak
            points.append({"offloaded": quarters / 4, "formula": (1 - quarters / 4) ** 2, "ours": round(peak_after, 3)})
        rows.append({"ranks": p, "chunks": v, "microbatches": m, "peak": round(full_peak, 3), "points": points})
    return rows


def table_1_optpipe(quick: bool) -> list[Row]:
    """`optpipe.txt` table 1 on simulated costs: makespan ÷ work of each method, by memory limit; None where it does not fit.

    The paper's are milliseconds on hardware and its rows repeat under other labels (FACTS.md), so only who fits and who wins
    compares. Costs of the 9.6B model, transfers of 0.05 F, round trip k = 1 on one shared host lane; PipeOffload is PO-F with
    two chunks, OptPipe's place is taken by the solver, on one chunk or in V, the better.
    """
    rows = []
    f, b, w = (2 * x for x in MODELS[0].chunk_ms)
    for p, m in ((4, 16),) if quick else ((4, 8), (4, 16), (8, 16), (8, 32), (16, 32), (16, 64)):
        for part in (2.0, 1.0, 0.5, 0.25):
            fitting = {name: _within(name, p, m, part * p, (f, b, w)) for name in OPTPIPE_BASELINES}
            tasks = [
                SolveTask(placement, m, _with_host(placement.num_chunks, p, (f, b, w)), part * p, offload=True)
                for placement in (one_to_one(p), v_shape(p))
            ]
            solved = solve_any(tasks, Options(time_limit_s=10 if quick else 30))
            work = m * (f + b + w)
            cells = {name: None if x is None else round(x / work, 4) for name, x in fitting.items()}
            ours = {"solver": round(solved.value / work, 4), "bound": round(solved.lower_bound / work, 4)}
            rows.append({"ranks": p, "microbatches": m, "limit": part, **cells, **ours})
    return rows


OPTPIPE_BASELINES = ("1f1b", "interleaved-1f1b", "zb-1p", "v-zb", "po-f")


def _with_host(chunks: int, p: int, share: tuple[float, float, float]) -> CostProfile:
    f, b, w = share
    times = {"f": f, "b": b, "w": w, "comm": 0.05 * f, "offload_time": f + b + w}
    return CostProfile.uniform(p * chunks, chunks=chunks, **times, host_mode="shared")


def _within(name: str, p: int, m: int, limit: float, share: tuple[float, float, float]) -> float | None:
    """Makespan of a family, or None if it holds more than the limit."""
    costs = _with_host(FAMILIES[name].default_chunks, p, share)
    timeline = timeline_of(name, p, m, costs)
    return timeline.makespan if max(timeline.peak_activations) <= limit * (1 + 1e-9) else None


HIDING = (
    ("1f1b", 1, False),
    ("interleaved-1f1b", 2, False),
    ("interleaved-1f1b", 2, True),
    ("combined-1f1b", 2, False),
    ("combined-1f1b", 4, False),
    ("dualpipe-v", 2, False),
    ("stp-memory", 2, False),
    ("stp", 2, False),
    ("stp-published", 2, False),
    ("v-zb", 2, False),
)
"""Families, chunks a rank, and whether the pass ``braid`` goes over them."""


def hidden_exchanges(quick: bool) -> list[Row]:
    """Orders of experts' and tensor-parallel collectives, eight in a stage; F = B = W = 1 a rank's share, and ``comm`` the
    collectives of F, and of B: makespan, peak activations, gain over 1F1B."""
    sizes = [(4, 16, 1.0)] if quick else [(8, 32, 0.5), (8, 32, 1.0), (8, 32, 2.0), (16, 64, 1.0)]
    rows = []
    for p, m, comm in sizes:
        cells: list[Row] = []
        for name, v, braids in HIDING:
            costs = CostProfile.uniform(p * v, chunks=v, tp_comm=comm, tp_collectives=8)
            options = {"chunks": v} if "chunks" in FAMILIES[name].options else {}
            schedule = generate(name, p, m, costs=costs, **options)
            timeline = simulate(braid(schedule, costs) if braids else schedule, costs)
            gain = cells[0]["makespan"] / timeline.makespan if cells else 1.0
            peak = max(timeline.peak_activations)
            cell = {"family": name, "chunks": v, "braid": braids, "makespan": timeline.makespan, "peak": round(peak, 4)}
            cells.append({**cell, "gain": round(gain, 4)})
        rows.append({"ranks": p, "microbatches": m, "comm": comm, "cells": cells})
    return rows


def hidden_exchanges_recorded(quick: bool) -> list[Row]:
    """The gain of Megatron's combined 1F1B that Megatron-Bridge recorded (its documents of 2026-05-18: Qwen3-30B-A3B, 16 H100,
    EP 16, no pipeline), and ours on one rank over F, B and W that hide nothing, where exchanges take the part of F that
    ``plan_experts.py`` computes for EP 8 in a node (between two nodes it is more)."""
    sizes = json.loads((RESULT.parent / "plan-experts.json").read_text(encoding="utf-8"))["sizes"]
    comm = next(row["exchange_share"] for row in sizes if row["model"] == "qwen3-30b-a3b")
    m = 8 if quick else 64
    costs = CostProfile.uniform(2, chunks=2, tp_comm=comm, tp_collectives=96)
    ours = m * (3 + 2 * comm) / simulate(generate("combined-1f1b", 1, m), costs).makespan
    return [{"comm": comm, "microbatches": m, "gain": _beside(41.25 / 31.31, ours)}]


def _beside(paper: float | None, ours: float) -> Row:
    difference = None if paper is None else round(ours - paper, 3)
    return {"paper": None if paper is None else round(paper, 3), "ours": round(ours, 3), "difference": difference}


TABLES: dict[str, Callable[[bool], list[Row]]] = {
    "controllable-memory table 4": table_4,
    "controllable-memory table 1": table_1_memory,
    "controllable-memory figure 9": figure_9,
    "pipeoffload table 1": table_1_offload,
    "pipeoffload figure 3": figure_3,
    "stp table 1": paper_stp.table_1,
    "stp tables 5 and 6": paper_stp.table_6,
    "stp table 10": paper_stp.table_10,
    "optpipe table 1": table_1_optpipe,
    "hidden exchanges": hidden_exchanges,
    "hidden exchanges, recorded": hidden_exchanges_recorded,
}


def missed(report: Row) -> list[str]:
    """Cells of table 4 that are worse than the paper by more than the tolerance."""
    return [
        f"{row['family']} {row['model']} m={cell['microbatches']}: {cell['ours']} against {cell['paper']}"
        for row in report["tables"]["controllable-memory table 4"]
        for cell in row["cells"]
        if cell["difference"] is not None and cell["difference"] > TOLERANCE
    ]


def make_report(quick: bool, only: str = "") -> Row:
    """Return the tables whose title contains ``only`` (all by default) as plain values; the others as they were saved."""
    tables = {}
    for title, make in TABLES.items():
        if only not in title:
            continue
        start = time.perf_counter()
        tables[title] = make(quick)
        print(f"{title}: {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    origin = {
        "command": "python scripts/paper_tables.py"
        + (f" --only {only}" if only else "")
        + (" --quick" if quick else ""),
        "commit": commit.stdout.strip(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    if not only:
        return {**origin, "tables": tables}
    saved: Row = json.loads(RESULT.read_text(encoding="utf-8"))
    again = {title: old for title, old in saved.get("again", {}).items() if title not in tables}
    in_order = {title: tables.get(title, saved["tables"].get(title)) for title in TABLES}
    tables_of = {title: rows for title, rows in in_order.items() if rows is not None}
    return {**saved, "tables": tables_of, "again": again | dict.fromkeys(tables, origin)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small columns only")
    parser.add_argument("--only", default="", metavar="TEXT", help="only the tables whose title contains this")
    parser.add_argument("--json", action="store_true", help="print JSON instead of markdown")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.relative_to(ROOT)}")
    arguments = parser.parse_args()
    report = make_report(arguments.quick, arguments.only)
    if arguments.write:
        RESULT.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if arguments.json:
        print(json.dumps(report))
    else:
        from results_table import paper_tables

        print(paper_tables(report))
        if arguments.only:
            titles = [title for title in TABLES if arguments.only in title]
            print(
                f"\nComputed now: {', '.join(titles) or 'nothing'}. All other tables are those of {RESULT.relative_to(ROOT)}."
            )
    for cell in missed(report):
        print(f"worse than the paper by more than {TOLERANCE} points: {cell}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
