"""Solver benchmark: the best family against the solver, with the proven bound, over sizes, limits, costs and transfers. Prints
one JSON object; ``--table`` prints it as a table instead.

    python scripts/bench_solve.py --ranks 4 8 --limits 0.5 1 --time-limit 60       # a part of the grid
    python scripts/bench_solve.py --offload 0.5 1 2 --limits 0.25 0.5 --chunks 1   # one shared host lane, k = 0.5, 1, 2

Limits are parts of p, in a rank's share of one microbatch. ``table5`` are the costs of `controllable-memory.txt` table 5, 9.6B
model (F, B, W = 25.92, 26.44, 19.52 ms per rank's share). Placement: one-to-one for one chunk, V for two. Values are seconds of
the objective in the unit of the costs. ``first_s``: when the first answer was there; ``last_s``: when the last improvement was.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule import CostProfile
from jaxpipe.schedule.placement import one_to_one, v_shape
from jaxpipe.search.solve import Options, Solution, SolveTask, solve

COSTS = {"unit": (1.0, 1.0, 1.0), "table5": (25.92, 26.44, 19.52)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--times", type=int, nargs="+", default=[4], help="microbatches ÷ ranks")
    parser.add_argument("--chunks", type=int, nargs="+", choices=(1, 2), default=[1, 2])
    parser.add_argument("--limits", type=float, nargs="+", default=[1 / 3, 1 / 2, 3 / 4, 1])
    parser.add_argument("--costs", nargs="+", choices=COSTS, default=list(COSTS))
    parser.add_argument("--comm", type=float, nargs="+", default=[0.0, 0.1], help="parts of a share's F")
    parser.add_argument("--offload", type=float, nargs="+", default=[0.0], help="k: round trip ÷ (F + B + W)")
    parser.add_argument("--objective", choices=("makespan", "span"), default="makespan")
    parser.add_argument("--time-limit", type=float, default=60.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    rows = []
    grid = itertools.product(args.ranks, args.times, args.chunks, args.costs, args.comm, args.offload, args.limits)
    for p, times, v, cost, comm, k, limit in grid:
        row = case(args, p, p * times, v, cost, comm, k, limit)
        rows.append(row)
        print(text(row), file=sys.stdout if args.table else sys.stderr, flush=True)
    if not args.table:
        print(json.dumps({"cases": rows, **origin(args)}, indent=1))
    return 0


def case(
    args: argparse.Namespace, p: int, m: int, v: int, cost: str, comm: float, k: float, limit: float
) -> dict[str, Any]:
    """One cell of the grid."""
    f, b, w = COSTS[cost]
    placement = v_shape(p) if v == 2 else one_to_one(p)
    costs = CostProfile.uniform(
        placement.num_stages, chunks=v, f=f, b=b, w=w, comm=comm * f, offload_time=k * (f + b + w), host_mode="shared"
    )
    row: dict[str, Any] = {"p": p, "m": m, "v": v, "costs": cost, "comm": comm, "k": k, "limit": limit}
    task = SolveTask(placement, m, costs, limit * p, k > 0, args.objective)
    try:
        solution = solve(task, Options(args.time_limit, workers=args.workers))
    except ScheduleError as error:
        return {**row, "error": str(error)}
    return row | figures(solution)


def figures(s: Solution) -> dict[str, Any]:
    """Return the reported figures of a solution."""
    return {
        "family": s.family and s.family[0],
        "family_value": s.family and s.family[1],
        "value": s.value,
        "lower_bound": s.lower_bound,
        "gap": s.gap,
        "status": s.status,
        "peak": max(s.timeline.peak_activations),
        "offloaded": s.offloaded,
        "first_s": s.first_feasible_s,
        "last_s": s.improvements[-1].wall_s,
        "wall_s": s.wall_s,
        "source": s.improvements[-1].source,
        "failures": list(s.failures),
    }


def text(row: dict[str, Any]) -> str:
    """Return a line for people."""
    head = f"p{row['p']} m{row['m']} v{row['v']} {row['costs']} comm {row['comm']:g} k {row['k']:g} limit {row['limit']:.3g}p"
    if "error" in row:
        return f"{head}: {row['error']}"
    family = f"{row['family_value']:.6g}" if row["family_value"] else "-"
    gain = f"{1 - row['value'] / row['family_value']:.2%}" if row["family_value"] else "-"
    return (
        f"{head}: family {family} solver {row['value']:.6g} (-{gain}) bound {row['lower_bound']:.6g} gap {row['gap']:.2%} "
        f"first {row['first_s']:.2f} s last {row['last_s']:.1f} s of {row['wall_s']:.1f} s, {row['source']}"
    )


def origin(args: argparse.Namespace) -> dict[str, Any]:
    """Return the provenance of the figures."""
    import ortools

    root = Path(__file__).resolve().parents[1]
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True, check=False
    )
    return {
        "command": "python scripts/bench_solve.py " + " ".join(sys.argv[1:]),
        "commit": commit.stdout.strip(),
        "python": platform.python_version(),
        "ortools": ortools.__version__,
        "cores": os.cpu_count(),
        "objective": args.objective,
        "time_limit_s": args.time_limit,
    }


if __name__ == "__main__":
    sys.exit(main())
