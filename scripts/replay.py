"""Prove a refactor: dump every family, its timeline and a few programs at fixed sizes, and compare with another commit.

    python scripts/replay.py OUT                  # write the dumps into the folder OUT
    python scripts/replay.py --against HEAD~1     # dump both trees, print what differs; exit code 1 if anything does

The other commit is checked out into a temporary worktree and must have this script.
"""

from __future__ import annotations

import argparse
import filecmp
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

SIZES = [(1, 3, 1), (2, 4, 2), (4, 8, 1), (4, 8, 2), (8, 24, 1)]
"""(ranks, microbatches, chunks)."""
COSTS = [(1.0, 1.0, 1.0, 0.0), (1.0, 1.2, 0.8, 0.1)]
"""(F, B, W, transfer)."""


def dump_schedules(out: Path) -> None:
    """Write a file for each family and size: the rows, then makespan, spans and peaks at each of the costs."""
    from jaxpipe.schedule import FAMILIES, CostProfile, generate, simulate

    for name, family in FAMILIES.items():
        for p, m, v in SIZES:
            if v > 1 and "chunks" not in family.options:
                continue
            parts = []
            for f, b, w, comm in COSTS:
                costs = CostProfile.uniform(p * v, chunks=v, f=f, b=b, w=w, comm=comm)
                chunks = v if "chunks" in family.options else None
                schedule = generate(name, p, m, chunks=chunks, costs=costs)
                t = simulate(schedule, costs)
                parts.append(f"{schedule}\n{(f, b, w, comm)}: {t.makespan:.9g} {t.spans} {t.peak_activations}\n")
            (out / f"{name}-p{p}-m{m}-v{v}.txt").write_text("\n".join(parts), encoding="utf-8")


def dump_programs(out: Path) -> None:
    """The programs of a tiny GPT on two ranks, for one schedule with fused and one with split backward."""
    from jaxpipe.train.devices import request_devices

    request_devices(2, "cpu")
    from jaxpipe.runtime.pipeline import Pipeline
    from jaxpipe.schedule import generate
    from models.gpt import GPT

    model = GPT(vocab_size=16, d_model=16, num_layers=2, num_heads=2, seq_len=8)
    for name in ("1f1b", "zb-h1"):
        pipe = Pipeline.build(
            model, generate(name, 2, 3), microbatch_size=1, boundaries=[(0, 2), (2, 5)], recompute="cheap"
        )
        text = "\n".join([*map(str, pipe.stages), *map(str, pipe.programs)])
        (out / f"program-{name}.txt").write_text(text + "\n", encoding="utf-8")


def dump_all(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    dump_schedules(out)
    dump_programs(out)


def against(commit: str) -> int:
    with tempfile.TemporaryDirectory() as folder:
        new_folder, old_folder, tree = (Path(folder) / n for n in ("here", "there", "tree"))
        dump_all(new_folder)
        subprocess.run(["git", "worktree", "add", "-q", "--detach", str(tree), commit], cwd=ROOT, check=True)
        try:
            environment = {**os.environ, "PYTHONPATH": str(tree)}
            subprocess.run(
                [sys.executable, str(tree / "scripts" / "replay.py"), str(old_folder)], check=True, env=environment
            )
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True)
        names = sorted({p.name for d in (new_folder, old_folder) for p in d.iterdir()})
        _, changed, missing = filecmp.cmpfiles(new_folder, old_folder, names, shallow=False)
        for name in sorted([*changed, *missing]):
            diff = subprocess.run(
                ["diff", "-uN", str(old_folder / name), str(new_folder / name)], capture_output=True, text=True
            )
            print("\n".join(diff.stdout.splitlines()[:20]))
        print(f"{len(names) - len(changed) - len(missing)} of {len(names)} dumps are equal to {commit}'s")
        return 1 if changed or missing else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, help="folder for the dumps")
    parser.add_argument("--against", metavar="COMMIT", help="compare with this commit instead")
    args = parser.parse_args()
    if args.against:
        return against(args.against)
    if args.out is None:
        parser.error("name a folder, or --against COMMIT")
    dump_all(args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
