"""Tries to make jaxpipe lose work, load what is damaged, believe what is wrong, or answer with anything but one line.

    python scripts/torture.py                        # everything: 300 kills, 2,000 flipped bits, … in some tens of minutes
    python scripts/torture.py --quick                # a little of everything
    python scripts/torture.py --only R3,R5 --seed 7  # some parts, other random choices
    python scripts/torture.py --only R5 --case 17    # one case again
    python scripts/torture.py --only R15,R16 --most 2  # two chains of kills and two of signals, of several processes

Prints JSON on stdout: what was tried how often, and what failed, with the number of the case. A table for people goes to
stderr. Exit code 1 if anything failed. Numbers of the parts are those of the reliability goals (R6, R7, R9, R12 are tests).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from provenance import commit_id  # noqa: E402
from torture_parts import (  # noqa: E402
    chats,
    checkpoints,
    data_files,
    fuzz,
    hostile_data,
    hub_configs,
    identity,
    interrupts,
    job_files,
    python_door,
    runs,
    schedules,
    several,
    solver,
    strangers,
    tokenizers,
)
from torture_parts.trial import Bench, Case, FailedError, SkippedError, Trial  # noqa: E402

_MOST_SHOWN = 5  # failures of a part that are told in full
_SIDE_BY_SIDE = 2  # cases at a time of parts whose work is in other processes


@dataclass(frozen=True, slots=True)
class Requirement:
    """A requirement and the cases that test it. ``processes``: cases only wait for processes, so some may run at a time."""

    what: str
    cases: Callable[[Bench], Iterator[Case]]
    processes: bool = False


PARTS: dict[str, Requirement] = {
    "R1": Requirement("killed runs go on to the same end", runs.kills, processes=True),
    "R2": Requirement("signals stop a run, which goes on to the same end", runs.stops, processes=True),
    "R3": Requirement("damaged checkpoints are reported and not loaded", checkpoints.damage),
    "R4": Requirement("valid schedules are accepted", schedules.valid),
    "R5": Requirement("damaged schedule and timeline files are refused", schedules.damaged),
    "R8": Requirement("odd settings, flags and files get one line", fuzz.inputs),
    "R10": Requirement("data files made to harm", hostile_data.files),
    "R11": Requirement("bad disks cost no checkpoint", runs.disks, processes=True),
    "R13": Requirement("runs go on over other ranks and schedules", runs.topologies, processes=True),
    "R14": Requirement("checkpoints of other versions", checkpoints.versions),
    "R15": Requirement(
        "processes that are killed take the others along, and the run goes on to the same end", several.kills
    ),
    "R16": Requirement("signals to one process or the launcher stop all after the same step", several.stops),
    "R17": Requirement("processes that stand still are named", several.stuck),
    "R18": Requirement("tokenizer files give the ids of the package, or one line", tokenizers.files),
    "R19": Requirement("data files are read by what they hold", data_files.files),
    "R20": Requirement(
        "answers are found in chats, or these are refused; whole chats are seen once an epoch", chats.chats
    ),
    "R21": Requirement("variants of config.json mean what they mean to transformers", hub_configs.variants),
    "R22": Requirement("another model, rate, checkpoint or size is told from the same", identity.everything),
    "R23": Requirement("what comes in and goes out by Python means what it says", python_door.cases),
    "R24": Requirement("strangers keep no processes from meeting", strangers.cases),
    "R24b": Requirement("values in job files stay values", job_files.values),
    "R25": Requirement("solves, links and limits mean what they say", solver.cases),
    "R26": Requirement("Ctrl-C ends every verb in one line, at any time", interrupts.cases, processes=True),
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a little of everything")
    parser.add_argument("--seed", type=int, default=0, help="other random choices")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, such as R1,R3")
    parser.add_argument("--case", type=int, help="only the case of this number")
    parser.add_argument("--most", type=int, help="at most so many cases of a part, evenly spread")
    args = parser.parse_args(arguments)
    names = args.only.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"no part {unknown[0]}; there are {', '.join(PARTS)}")
    report = torture(names, quick=args.quick, seed=args.seed, only=args.case, most=args.most)
    print(json.dumps(report, indent=1))
    return 1 if any(part["failed"] for part in report["parts"].values()) else 0


def torture(
    names: Sequence[str], *, quick: bool, seed: int = 0, only: int | None = None, most: int | None = None
) -> dict[str, Any]:
    """Run the parts called ``names``. ``only``: of each the case with this number; ``most``: at most so many, evenly spread."""
    started, environment, parts = time.monotonic(), dict(os.environ), {}
    with tempfile.TemporaryDirectory(prefix="jaxpipe-torture-") as folder, contextlib.chdir(folder):
        Path(folder).chmod(0o755)
        os.environ |= {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3", "MPLBACKEND": "Agg"}
        os.environ["JAXPIPE_CACHE_DIR"] = f"{folder}/schedules"
        bench = Bench(Path(folder), quick)
        try:
            for name in names:
                parts[name] = _run(name, bench, seed, only, most)
                print(_row(name, parts[name]), file=sys.stderr, flush=True)
        finally:
            os.environ.clear()
            os.environ |= environment
    return {
        "commit": commit_id(),
        "seed": seed,
        "quick": quick,
        "seconds": round(time.monotonic() - started, 1),
        "parts": parts,
    }


def _run(name: str, bench: Bench, seed: int, only: int | None, most: int | None) -> dict[str, Any]:
    part, started = PARTS[name], time.monotonic()
    cases = list(enumerate(part.cases(bench)))
    if only is not None:
        cases = cases[only : only + 1]
    if most is not None and len(cases) > most:
        cases = [cases[k * len(cases) // most] for k in range(most)]
    tried: Counter[str] = Counter()
    measured: dict[str, list[float]] = {}
    failures: list[dict[str, Any]] = []
    skipped: list[str] = []

    def one(numbered: tuple[int, Case]) -> None:
        number, case = numbered
        with tempfile.TemporaryDirectory(dir=bench.folder, prefix=f"{name}-") as folder:
            trial = Trial(random.Random(f"{seed}/{name}/{number}"), Path(folder))
            try:
                case.run(trial)
            except SkippedError as reason:
                skipped.append(f"{case.kind}: {reason}")
                return
            except FailedError as failure:
                what = str(failure)
            except Exception as error:
                what = f"{type(error).__name__} ({error})\n{traceback.format_exc()[-3000:]}"
            else:
                what = ""
        with bench.lock:
            tried.update(trial.tried or Counter([case.kind]))
            for key, values in trial.measured.items():
                measured.setdefault(key, []).extend(values)
            if what:
                again = (
                    f"python scripts/torture.py --only {name} --case {number} --seed {seed}" + " --quick" * bench.quick
                )
                failures.append({"case": number, "kind": case.kind, "what": what, "again": again})
                print(f"{name} case {number}: {what[:600]}", file=sys.stderr, flush=True)

    if part.processes:
        with ThreadPoolExecutor(_SIDE_BY_SIDE) as pool:
            list(pool.map(one, cases))
    else:
        for numbered in cases:
            one(numbered)
    return {
        "what": part.what,
        "tried": dict(tried),
        **({"measured": {name: _spread(values) for name, values in measured.items()}} if measured else {}),
        "failed": len(failures),
        "failures": sorted(failures, key=lambda f: f["case"])[:_MOST_SHOWN],
        "skipped": sorted(set(skipped)),
        "seconds": round(time.monotonic() - started, 1),
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    median = statistics.median(values)
    return {"count": len(values), "median": round(median, 2), "most": round(max(values), 2)}


def _row(name: str, part: dict[str, Any]) -> str:
    tried = ", ".join(f"{count:,} {kind}" for kind, count in part["tried"].items())
    skipped = f"; skipped {', '.join(part['skipped'])}" if part["skipped"] else ""
    count = f"{part['failed']:>4} failed of {sum(part['tried'].values()):,} in {part['seconds']:.0f} s"
    return f"{name:<4} {count}: {tried}{skipped}"


if __name__ == "__main__":
    raise SystemExit(main())
