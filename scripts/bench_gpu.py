"""Measure jaxpipe's stage functions, copies and programs on a GPU. Prints one JSON object; needs one GPU.

    python scripts/bench_gpu.py --out scripts/results/gpu-h200.json     # hidden 4096 and 8192, bfloat16, sequence 4096
    python scripts/bench_gpu.py --hidden 4096 --steps 3                 # shorter
    python scripts/bench_gpu.py --tiny                                  # everything on a CPU at toy sizes: tests this script

Per hidden size, for the stages of one rank in the middle of a pipeline (p ranks, V or interleaved chunks, one block a stage):

* ``split``: F + B + W against F + fused backward (goal: at most 1.03), and the MFU of each: FLOPs of the model, recomputation
  not counted, over seconds and the device's dense peak (``--target`` if the device is not known by name). cuDNN's attention
  counts what its mask leaves, half of what XLA's counts: compare MFU under one ``--attention``.
* ``copies``: bandwidth and latency to pinned host memory and back, alone and both at once, and their share of the link's.
* ``slowdown``: F, B and W with copies in both directions under way all the time against without (goal: at most 1.02), A B A B.
* ``k``: round trip of the residuals that may leave ÷ (F + B + W), measured, and by scripts/round_trip.py with its 20
  bytes per token and channel and with the stage's own bytes.
* ``steps``: the rank's real program rehearsed (jaxpipe rehearse) with offload off (po) and on (po-h, po-f): step time, host
  microseconds per instruction, predicted and measured peak memory, how much of the copies lies under compute. A GPU's peak
  never falls in a process, so programs run from the smallest predicted peak to the largest.

Timing: medians; a sample is many calls back to back between two waits (jaxpipe/cost/measured.py).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jaxpipe.train.devices import request_devices
from scripts.provenance import commit_id, describe_machine

SCHEDULES = ("po", "po-h", "po-f")
"""Offload off, half, all."""
TINY = {
    "hidden": [32],
    "sequence": 16,
    "vocab": 64,
    "ranks": 2,
    "microbatches": 4,
    "steps": 1,
    "repeats": 2,
    "head": 16,
}
COPY_BYTES = 256 << 20


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=[4096, 8192])
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--microbatch-size", type=int, default=1)
    parser.add_argument("--head", type=int, default=128, help="channels of an attention head")
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--recompute", default="flash", help="policy (jaxpipe/stage/split/policies.py)")
    parser.add_argument("--attention", default="auto", help="auto, xla or cudnn (models/attention.py)")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each rehearsed program")
    parser.add_argument("--repeats", type=int, default=7, help="timed samples of everything else")
    parser.add_argument("--target", help="the device's figures, by name (jaxpipe/planning/targets.py) or JSON file")
    parser.add_argument("--tiny", action="store_true", help="toy sizes on a CPU")
    parser.add_argument("--out", metavar="FILE", help="also write the JSON there")
    args = parser.parse_args(argv)
    if args.tiny:
        vars(args).update(TINY)
    request_devices(1, "cpu" if args.tiny else "auto")
    import jax

    device = jax.devices()[0]
    if device.platform == "cpu" and not args.tiny:
        print(
            "bench_gpu: JAX sees no GPU here; run it where there is one (pip install jaxpipe[cuda13]), or add --tiny to try "
            "the script on a CPU",
            file=sys.stderr,
        )
        return 2
    text = json.dumps(run(args, device), indent=1)
    if args.out:
        Path(args.out).write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0


def run(args: argparse.Namespace, device: Any) -> dict[str, Any]:
    import jax
    import jaxlib

    from jaxpipe.cost import measure_host_link
    from jaxpipe.cost.host_link import CPU_SIZES

    target = _target(args, device)
    _note("copies to the host and back")
    link = measure_host_link([device], repeats=args.repeats, sizes=CPU_SIZES[:2] if args.tiny else None)
    return {
        "what": "jaxpipe on one device",
        "command": " ".join(["python", *sys.argv]),
        "commit": commit_id(),
        "date": time.strftime("%Y-%m-%d"),
        "device": device.device_kind,
        "target": target.name if target is not None else None,
        "machine": describe_machine(),
        "versions": {
            "python": platform.python_version(),
            "jax": jax.__version__,
            "jaxlib": jaxlib.__version__,
            "platform": " ".join(device.client.platform_version.split()),
        },
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "sequence": args.sequence,
        "microbatch_size": args.microbatch_size,
        "dtype": "bfloat16",
        "recompute": args.recompute,
        "attention": args.attention,
        "ranks": args.ranks,
        "microbatches": args.microbatches,
        "copies": _copies(link, target),
        "sizes": [_size(args, device, target, link, hidden) for hidden in args.hidden],
    }


def _copies(link: Any, target: Any) -> dict[str, Any] | None:
    if link is None:
        return None
    shares = {}
    if target is not None:
        shares = {
            "d2h_share_of_link": link.d2h.bytes_per_s / target.d2h_bytes_per_s,
            "h2d_share_of_link": link.h2d.bytes_per_s / target.h2d_bytes_per_s,
        }
    return asdict(link) | shares


def _size(args: argparse.Namespace, device: Any, target: Any, link: Any, hidden: int) -> dict[str, Any]:
    """Everything about one hidden size."""
    _note(f"hidden {hidden}: tracing")
    pipe = _pipeline(args, device, hidden, args.recompute)
    stage = pipe.stages[1]  # one block
    model_flops = _pipeline(args, device, hidden, "none").stages[1].flops
    _note(f"hidden {hidden}: functions alone")
    seconds, split = _split(args, stage, model_flops, target)
    tokens = args.microbatch_size * args.sequence
    report = {
        "hidden": hidden,
        "block_parameter_bytes": stage.param_bytes,
        "residual_bytes": stage.residual_bytes,
        "residual_bytes_per_token_and_channel": stage.residual_bytes / tokens / hidden,
        "split": split,
    }
    gc.collect()
    if link is not None:
        _note(f"hidden {hidden}: compute while copying")
        report["slowdown"] = {op: _slowdown(args, stage, op, seconds[op], link, device) for op in "FBW"}
        report["k"] = _k(args, stage, seconds, model_flops, link, hidden)
    gc.collect()
    report["steps"] = _steps(args, pipe, link, seconds)
    return report


def _pipeline(args: argparse.Namespace, device: Any, hidden: int, recompute: str) -> Any:
    """One block a stage, all ranks on ``device``; nothing is compiled yet."""
    import jax.numpy as jnp

    from jaxpipe.runtime.pipeline import Pipeline
    from jaxpipe.schedule import generate
    from jaxpipe.stage.model.reference import resolve_model

    schedule = generate(SCHEDULES[0], args.ranks, args.microbatches)
    n = schedule.num_stages
    model = resolve_model(
        "models.gpt:GPT",
        {
            "vocab_size": args.vocab, "d_model": hidden, "num_layers": n, "num_heads": hidden // args.head,
            "seq_len": args.sequence, "tied": False, "attention": args.attention,
        },
    )  # fmt: skip
    cuts = [0, *range(2, n + 1), len(model.layers)]
    return Pipeline.build(
        model,
        schedule,
        microbatch_size=args.microbatch_size,
        boundaries=list(pairwise(cuts)),
        devices=[device] * args.ranks,
        compute_dtype=jnp.bfloat16,
        recompute=recompute,
    )


def _split(
    args: argparse.Namespace, stage: Any, model_flops: Any, target: Any
) -> tuple[dict[str, float], dict[str, Any]]:
    """Seconds of each function, and what is said about them."""
    from jaxpipe.cost import time_function
    from jaxpipe.stage.compiled.footprint import footprint

    timings = {
        op: time_function(stage.functions[op], args.repeats, 2, vocab_size=args.vocab) for op in ("F", "B", "W", "BW")
    }
    seconds = {op: t.median_s for op, t in timings.items()}
    peak = target.peak_flops_per_s("bfloat16") if target is not None else None
    functions = {
        op: {
            **asdict(t),
            "flops": stage.flops[op],
            "model_flops": model_flops[op],
            "mfu": model_flops[op] / t.median_s / peak if peak else None,
            "temp_bytes": footprint(stage.functions[op]).temp_bytes,
        }
        for op, t in timings.items()
    }
    total = seconds["F"] + seconds["B"] + seconds["W"]
    return seconds, {
        "functions": functions,
        "split_over_fused": total / (seconds["F"] + seconds["BW"]),
        "mfu": sum(model_flops[op] for op in "FBW") / total / peak if peak else None,
    }


def _slowdown(args: argparse.Namespace, stage: Any, op: str, seconds: float, link: Any, device: Any) -> float:
    """Seconds of calls back to back while both directions of the link are busy ÷ seconds without: median of A B A B."""
    import jax
    import jax.numpy as jnp

    from jaxpipe.cost.random_arrays import arguments_of, random_array

    function = stage.functions[op]
    inputs = arguments_of(function, args.vocab)
    acc_in = [k for k, port in enumerate(function.inputs) if port.kind == "acc"]
    acc_out = [k for k, port in enumerate(function.outputs) if port.kind == "acc"]
    device_sharding = jax.sharding.SingleDeviceSharding(device, memory_kind="device")
    host_sharding = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    copy_bytes = max(4096, int(seconds * min(link.d2h.bytes_per_s, link.h2d.bytes_per_s)))  # busy as long as a call
    each = min(copy_bytes, COPY_BYTES)
    leaving = random_array(jax.ShapeDtypeStruct((each // 4,), jnp.float32, sharding=device_sharding))
    coming = jax.device_put(leaving, host_sharding)
    jax.block_until_ready((inputs, leaving, coming))
    calls = 2 if args.tiny else 8

    def one_round(copying: bool) -> float:
        began = time.perf_counter()
        copies: list[Any] = []
        for _ in range(calls):
            if copying:
                for _ in range(-(-copy_bytes // each)):
                    copies += [jax.device_put(leaving, host_sharding), jax.device_put(coming, device_sharding)]
            results = function.call(*inputs)
            for i, o in zip(acc_in, acc_out, strict=True):
                inputs[i] = results[o]
            del copies[: -4 * max(1, copy_bytes // each)]  # older ones may go: memory stays bounded
        jax.block_until_ready(results)
        elapsed = time.perf_counter() - began
        jax.block_until_ready(copies)
        return elapsed

    one_round(True)
    pairs = [(one_round(False), one_round(True)) for _ in range(args.repeats)]
    return statistics.median(busy / alone_s for alone_s, busy in pairs)


def _k(
    args: argparse.Namespace, stage: Any, seconds: dict[str, float], model_flops: Any, link: Any, hidden: int
) -> dict[str, float]:
    """Round trip ÷ compute of the block: measured with its own leaves, and by the formula."""
    import jax

    from jaxpipe.cost.random_arrays import random_array
    from jaxpipe.runtime.offload import host_copies
    from scripts.round_trip import BYTES_PER_TOKEN_AND_CHANNEL, k_of_layer

    forward = stage.functions["F"]
    avals = {p.index: a for p, a in zip(forward.outputs, forward.avals_out, strict=True) if p.kind == "res"}
    leaves = [random_array(avals[k]) for k in stage.offloaded]
    to_host, to_device = host_copies(forward.avals_out[0].sharding, fallback=False)
    jax.block_until_ready(leaves)

    def timed(move: Callable[[Any], Any], arrays: Any) -> tuple[float, Any]:
        began = time.perf_counter()
        moved = jax.block_until_ready(move(arrays))
        return time.perf_counter() - began, moved

    trips = []
    for _ in range(args.repeats + 1):
        out_s, host = timed(to_host, leaves)
        back_s, _ = timed(to_device, host)
        trips.append(out_s + back_s)
    compute_s = seconds["F"] + seconds["B"] + seconds["W"]
    rates = {
        "flops_per_s": sum(model_flops[op] for op in "FBW") / compute_s,
        "d2h_bytes_per_s": link.d2h.bytes_per_s,
        "h2d_bytes_per_s": link.h2d.bytes_per_s,
    }
    bytes_per_element = stage.offloadable_bytes / (args.microbatch_size * args.sequence * hidden)
    return {
        "offloadable_bytes": stage.offloadable_bytes,
        "bytes_per_token_and_channel": bytes_per_element,
        "round_trip_s": statistics.median(trips[1:]),
        "measured": statistics.median(trips[1:]) / compute_s,
        "formula": k_of_layer(hidden, args.sequence, residual_bytes=BYTES_PER_TOKEN_AND_CHANNEL, **rates),
        "formula_own_bytes": k_of_layer(hidden, args.sequence, residual_bytes=bytes_per_element, **rates)
        if bytes_per_element
        else 0.0,
    }


def _steps(args: argparse.Namespace, pipe: Any, link: Any, seconds: Mapping[str, float]) -> list[dict[str, Any]]:
    """Rehearse one rank's program under each schedule, made with the measured ``seconds`` and link, from the smallest predicted
    peak to the largest."""
    from jaxpipe.rehearsal.rank import Rehearsal
    from jaxpipe.schedule import generate

    rank = 1
    host = link.host_link() if link is not None else None
    names = SCHEDULES if link is not None else SCHEDULES[:1]
    measured = {f"{op.lower()}_s": (x,) * pipe.schedule.num_stages for op, x in seconds.items()}
    costs = replace(pipe.costs, **measured, source="measured")
    if host is not None:
        costs = replace(costs, host=host, offload_s=(), load_s=())
    schedules = [generate(name, args.ranks, args.microbatches, costs=costs) for name in names]
    rehearsals = [Rehearsal(pipe.with_schedule(schedule, costs), rank, host=host) for schedule in schedules]
    results = []
    for rehearsal in sorted(rehearsals, key=lambda r: r.predicted_peak_bytes):
        _note(f"rehearsing {rehearsal.pipeline.schedule.name}")
        r = rehearsal.run(steps=args.steps)
        results.append(
            {
                "schedule": r.schedule,
                "rank": rank,
                "instructions": r.num_instructions,
                "step": asdict(r.step),
                "host_us": r.host_us,
                "predicted_peak_bytes": r.memory.predicted_bytes,
                "measured_peak_bytes": r.memory.measured_bytes,
                "predicted_over_measured": r.memory.ratio,
                "memory_source": r.memory.source,
                "peak_is_exact": r.memory.exact,
                "by_kind": dict(r.memory.predicted.by_kind),
                "copies": [{**asdict(c), "bytes_per_s": c.bytes_per_s} for c in r.copies],
                "slowdown_while_copying": r.slowdown,
                "functions": {f"{op}{stage}": asdict(timing) for (op, stage), timing in r.timings.items()},
            }
        )
    off = next(s["step"]["median_s"] for s in results if s["schedule"] == SCHEDULES[0])
    return [{**s, "step_over_no_offload": s["step"]["median_s"] / off} for s in results]


def _target(args: argparse.Namespace, device: Any) -> Any:
    """Return the figures of the device: those asked for, or those of its name; None if it has none."""
    from jaxpipe.planning.targets import TARGETS, find_target

    if args.target is not None:
        return find_target(args.target)
    if device.platform == "cpu":
        return TARGETS["cpu"]
    kind = device.device_kind.lower()
    named = [t for t in TARGETS.values() if t.description.lower() == kind]
    named += [t for name, t in TARGETS.items() if name in kind.replace("-", " ").split()]
    return named[0] if named else None


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
