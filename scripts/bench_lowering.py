"""Measure what it takes to plan and lower schedules for many processes, a rank each: CPU seconds of one process, MB. Prints one
JSON object.

    python scripts/bench_lowering.py > scripts/results/lowering.json      # 100 CPU seconds

``generate``, ``check``, ``simulate``; ``prove``: the order of all messages, and that none waits for ever; ``planned``: all
four. ``own``: check, prove, lower the process's rank and outline the others, of stages with as many arrays as eight blocks of
a Llama; ``all ranks``: lower all of them, of stages with an array of each kind. Each case is a process of its own.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jaxpipe.program.lower import lower
from jaxpipe.program.order import TAGGED, Crossing, lower_apart
from jaxpipe.program.traffic import DataFlow
from jaxpipe.schedule import CostProfile, check_schedule, generate, simulate
from scripts.provenance import commit_id, describe_machine
from tests.support.bare_stages import bare_stages

CASES = [
    *(("1f1b", p, 4 * p, 1, ["own", "all ranks"]) for p in (32, 64)),
    ("v-zb", 64, 256, 2, ["own", "all ranks"]),
    *((family, 256, 1024, chunks, []) for family, chunks in (("1f1b", 1), ("zb-1p", 1), ("v-zb", 2))),
]
"""Family, ranks, microbatches, chunks; what to measure beside the rest."""
PARAMS, RESIDUALS = 73, 150

Result = TypeVar("Result")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case is not None:
        print(json.dumps(measured(*CASES[args.case])))
        return 0
    command = [sys.executable, __file__, "--case"]
    cases = [json.loads(subprocess.check_output([*command, str(n)])) for n in range(len(CASES))]
    about = {"what": "planning and lowering for a process a rank", "command": "python scripts/bench_lowering.py"}
    print(json.dumps(about | {"commit": commit_id(), "machine": describe_machine(), "cases": cases}, indent=1))
    return 0


def measured(family: str, ranks: int, microbatches: int, chunks: int, more: list[str]) -> dict[str, Any]:
    cpu_s: dict[str, float] = {}

    def timed(name: str, do: Callable[[], Result]) -> Result:
        began = time.process_time()
        result = do()
        cpu_s[name] = round(time.process_time() - began, 2)
        return result

    # Unequal costs, as real ones are: with equal ones many ranks are due at once.
    costs = CostProfile.uniform(ranks * chunks, chunks=chunks, f=1.0, b=1.1, w=0.9, comm=0.05)
    schedule = timed("generate", lambda: generate(family, ranks, microbatches, chunks if chunks > 1 else None, costs))
    timed("check", lambda: check_schedule(schedule))
    timeline = timed("simulate", lambda: simulate(schedule, costs))
    crossing, stages = Crossing(tuple(range(ranks)), timeline, TAGGED, 1), bare_stages(schedule.placement)
    timed("prove", lambda: lower_apart({}, DataFlow(schedule, stages).traffic({}, timeline), crossing))
    cpu_s["planned"] = round(sum(cpu_s.values()), 2)
    if "own" in more:
        wide = bare_stages(schedule.placement, PARAMS, RESIDUALS)
        timed("own", lambda: lower(schedule, wide, crossing=crossing, ranks=(ranks // 2,)))
    if "all ranks" in more:
        timed("all ranks", lambda: lower(schedule, stages, crossing=crossing))
    return {
        "schedule": family,
        "ranks": ranks,
        "microbatches": microbatches,
        "actions": sum(1 for _ in schedule.actions()),
        "cpu_s": cpu_s,
        "mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


if __name__ == "__main__":
    sys.exit(main())
