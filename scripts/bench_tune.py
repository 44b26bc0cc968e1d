"""Tuner benchmark: how long ``jaxpipe tune`` searches for the 5B model with a million words on A800s, and what it finds beside
plain 1F1B. Prints one JSON object.

    python scripts/bench_tune.py                          # FlexPipe's sizes (`flexpipe.txt` table 5); minutes on 2 cores
    python scripts/bench_tune.py --devices 4 8 --memory-limit-gb 400

Each size is one command in a process of its own; ``wall_s`` and ``cpu_s`` count its start and the import of JAX, too.
``paper_s``: FlexPipe's search. ``plain``: the fastest prediction of 1F1B with the vocabulary in the first and the last stage,
without tensor parallelism, over dp, microbatches and recomputation: layers cut by FLOPs (as jaxpipe does), and the same number
in each stage.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.provenance import commit_id, describe_machine

ROOT = Path(__file__).resolve().parents[1]
PAPER_S = {2: 4.73, 4: 8.28, 8: 71.28, 16: 107.34, 32: 534.78}
PLAN = "scripts/plans/gpt-5b-1m.toml"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", default=list(PAPER_S))
    parser.add_argument("--target", default="a800")
    parser.add_argument("--memory-limit-gb", type=float, help="instead of 0.92 of the target's memory")
    args = parser.parse_args()
    rows = []
    for devices in args.devices:
        rows.append(searched(args, devices))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    most = max(args.devices)
    plain = {cut: fastest_plain(args, most, cut == "equal layers") for cut in ("by FLOPs", "equal layers")}
    print(json.dumps({"searches": rows, "plain": {"devices": most, **plain}, **origin(args)}, indent=1))
    return 0


def searched(args: argparse.Namespace, devices: int) -> dict[str, Any]:
    """One search, from the shell's point of view."""
    limit = [] if args.memory_limit_gb is None else ["--memory-limit-gb", str(args.memory_limit_gb)]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "all.json")
        command = [
            sys.executable,
            "-m",
            "jaxpipe",
            "tune",
            PLAN,
            "--devices",
            str(devices),
            "--target",
            args.target,
            *limit,
        ]
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        completed = subprocess.run(
            [*command, "--json", str(file)], cwd=ROOT, capture_output=True, text=True, check=False
        )
        wall_s, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
        document = json.loads(file.read_text())
    counts = Counter[str]()
    for tried in document["tried"]:
        counts[tried["status"]] += tried["candidates"]
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    row = {
        "devices": devices,
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "paper_s": PAPER_S.get(devices),
        "exit": completed.returncode,
    }
    row |= {"candidates": counts.total(), **counts}
    if document["best"] is None:
        return {**row, "says": completed.stderr.splitlines()[-1]}
    best, plain = (
        document["best"],
        ("ranks", "dp", "cp", "tp", "microbatches", "recompute", "schedule", "chunks", "vocabulary"),
    )
    settings = {key: best["config"]["pipeline"][key] for key in plain if key in best["config"]["pipeline"]}
    return {**row, **{key: best[key] for key in ("step_s", "tokens_per_s", "mfu", "peak_bytes")}, "settings": settings}


def fastest_plain(args: argparse.Namespace, devices: int, equal: bool) -> dict[str, Any] | None:
    """1F1B as Megatron-LM runs it."""
    from jaxpipe.planning.predict import predict
    from jaxpipe.planning.roofline import Efficiency
    from jaxpipe.planning.space import Space
    from jaxpipe.planning.stages import stage_costs_of
    from jaxpipe.planning.targets import find_target
    from jaxpipe.train.config import load_config

    space = Space.of(load_config(ROOT / PLAN), devices, ["pipeline.tp=1", "pipeline.schedule=1f1b"])
    target = find_target(args.target)
    limit = args.memory_limit_gb * 1e9 if args.memory_limit_gb else target.memory_bytes * Efficiency().memory
    stage_costs = stage_costs_of(space.base, target, Efficiency(), lambda text: None, probes=True)
    blocks, best = len(stage_costs.model.layers) - 3, None
    for layout in space.layouts():
        ranks = layout["pipeline.ranks"]
        if ranks == 1 or layout.get("pipeline.vocabulary", "ends") != "ends":
            continue
        cut = {"pipeline.cut": tuple(1 + k * blocks // ranks for k in range(1, ranks))} if equal else {}
        config = space.config({**layout, "pipeline.schedule": "1f1b", **cut})
        p = predict(config, stage_costs.over(config.pipeline), limit)
        if p.fits and (best is None or p.step_s < best["step_s"]):
            best = {"step_s": p.step_s, "tokens_per_s": p.tokens_per_s, "settings": layout}
    return best


def origin(args: argparse.Namespace) -> dict[str, Any]:
    """Return the provenance of the measurement."""
    import jax

    cores = len(os.sched_getaffinity(0))
    return {
        "command": " ".join(["python", "scripts/bench_tune.py", *sys.argv[1:]]),
        "commit": commit_id(),
        "machine": describe_machine(cores),
        "load_before": os.getloadavg()[0],
        "python": platform.python_version(),
        "jax": jax.__version__,
    }


if __name__ == "__main__":
    sys.exit(main())
