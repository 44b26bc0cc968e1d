"""Rank what spares offloads the wait for shared copy streams, on GPUs of a virtual clock: seconds of a step ÷ without offload.

XLA's GPU client puts all that a device copies (offloads, loads, sends) on four streams in turn, each in order, and loads into
memory that the compute dispatched before may still use (``tests/support/virtual_gpu.py``). ``issued whole``: an O or L is one
instruction where its row has it; ``early n``: L stands n compute actions earlier; ``late``: O stands behind the next compute
action; ``leaves n``: the arrays of a copy lie in n buffers; ``in parts``: what the runtime does on GPUs
(:func:`jaxpipe.program.order.copies_in_parts`). Orders are made with the costs of a measured card, as ``train`` makes them.

    python scripts/rank_offload.py --out scripts/results/offload-remedies.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jaxpipe.train.devices import request_devices

RANKS = 4
EARLY = (0, 2, 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--microbatches", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    request_devices(RANKS, "cpu")
    rows = [row for m in args.microbatches for row in table(m)]
    command = " ".join(["python scripts/rank_offload.py", *sys.argv[1:]])
    report = {"command": command, "ranks": RANKS, "costs": "scripts/results/gpu-h200.json", "rows": rows}
    text = json.dumps(report, indent=1)
    if args.out:
        args.out.write_text(text + "\n", encoding="utf-8")
    print(text)


def table(microbatches: int) -> list[dict[str, Any]]:
    """Return a row for each hidden size and family: ratios of steps by remedy, of rank 1 alone and of the whole pipeline."""
    import jax.numpy as jnp

    from jaxpipe.runtime.pipeline import Pipeline
    from jaxpipe.runtime.transfer import OffloadOptions
    from jaxpipe.schedule import generate, simulate
    from models.gpt import GPT
    from tests.support.virtual_gpu import H200, FewLeaves, VirtualGPUs

    plain = generate("po", RANKS, microbatches)
    in_parts = Pipeline.build(
        GPT(vocab_size=17, d_model=16, num_layers=2 * RANKS, num_heads=2, seq_len=8),
        plain,
        microbatch_size=2,
        compute_dtype=jnp.float32,
        recompute="flash",
        offload=OffloadOptions(fallback=True, in_parts=True),
    )
    whole = in_parts.with_offload(OffloadOptions(fallback=True))
    rows = []
    for hidden, card in H200.items():
        costs = card.costs()

        def steps(pipe: Any, schedule: Any, leaves: int = 0, streams: bool = True, costs: Any = costs) -> list[float]:
            running = pipe.with_schedule(schedule, costs)
            make = partial(FewLeaves, leaves) if leaves else VirtualGPUs
            return [make(running, costs, rank=rank, shared_streams=streams).run().step_s for rank in (1, None)]

        base = steps(whole, plain)
        for family in ("po-h", "po-f"):
            order = generate(family, RANKS, microbatches, costs=costs)
            moved = {(n, late): _moved(order, n, late) for n in EARLY for late in (False, True)}
            remedies = {
                f"early {n}" * (n > 0) + ", " * (n > 0 and late) + "late" * late or "issued whole": steps(
                    whole, schedule
                )
                for (n, late), schedule in moved.items()
            }
            remedies |= {f"leaves {n}": steps(whole, order, n) for n in (1, 2, 4)}
            remedies["leaves 2, early 2"] = steps(whole, moved[2, False], 2)
            remedies["in parts"] = steps(in_parts, order)
            remedies["in parts, early 2"] = steps(in_parts, moved[2, False])
            remedies["streams of their own"] = steps(whole, order, streams=False)
            rows.append(
                {
                    "hidden": hidden,
                    "microbatches": microbatches,
                    "family": family,
                    "plain_s": dict(zip(("rank 1", "pipeline"), base, strict=True)),
                    "over_plain": {
                        name: {
                            where: round(s / of, 3)
                            for where, s, of in zip(("rank 1", "pipeline"), seconds, base, strict=True)
                        }
                        for name, seconds in remedies.items()
                    },
                    "peak_activations": {
                        f"early {n}{', late' * late}": max(simulate(schedule, costs).peak_activations)
                        for (n, late), schedule in moved.items()
                    },
                }
            )
    return rows


def _moved(schedule: Any, early: int, late: bool) -> Any:
    """Return ``schedule`` with every L so many compute actions earlier, behind its O, and O one later if ``late``."""
    from jaxpipe.schedule import op_spec

    def row_of(row: Sequence[Any]) -> tuple[Any, ...]:
        places: list[tuple[int, int, int]] = []
        left: dict[tuple[int, int], int] = {}
        compute = 0
        for n, slot in enumerate(row):
            action, lane = slot.actions[0], op_spec(slot.actions[0].op).lane
            compute += lane == "compute"
            at = compute
            if lane == "d2h":
                at = left[action.stage, action.microbatch] = compute + late
            elif lane == "h2d":
                at = max(compute - early, left[action.stage, action.microbatch])
            places.append((at, ("compute", "d2h", "h2d").index(lane), n))
        return tuple(row[n] for *_, n in sorted(places))

    return replace(schedule, rows=tuple(map(row_of, schedule.rows)))


if __name__ == "__main__":
    main()
