"""Runtime benchmark: host cost per instruction, pipelined against unpipelined, split against fused backward, prediction
against measurement. Prints one JSON object.

    python scripts/bench_runtime.py                        # the quick start's model, p=4, m=16
    python scripts/bench_runtime.py --ranks 2 --rounds 3

Everything is compared within one run, alternating A B A B, medians of several: absolute times on a shared machine mean
little, ratios more. ``host_us``: CPU time of the dispatching thread for single instructions over all rounds, in µs: median and
90th percentile of all, medians by kind, and what a device waits for: ``run_mean`` and ``run_p90`` of instructions that run a
function, on ``arrays`` arguments and results a call. ``of_5_ms``: the part of a GPU's time that the host thread, which feeds
all ranks, would be busy if each such instruction took 5 ms. (Not counted: that a dispatch which finds 32 computations in flight
on its device waits for one to finish.)

Unpipelined JAX on one device, which may use all cores: a compiled loop over the microbatches (``unpipelined``), one call a
microbatch (``one_by_one``), all sequences in one call (``at_once``); ``pipelined_over_strongest``: over the fastest of them.
They run with the XLA flags of a run. ``scripts/bench_torch.py`` compares with PyTorch.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jaxpipe.train.config import load_config
from jaxpipe.train.devices import request_devices
from scripts.provenance import commit_id, describe_machine

CONFIG = Path(__file__).with_name("quickstart.toml")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--microbatch-size", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7, help="alternations of each comparison")
    parser.add_argument("--schedules", nargs="+", default=["1f1b", "interleaved-1f1b", "zb-1p"])
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="changes to scripts/quickstart.toml")
    args = parser.parse_args()
    config = load_config(CONFIG, args.overrides)
    request_devices(args.ranks)
    print(json.dumps(run(args, config), indent=1))
    return 0


def run(args: argparse.Namespace, config: Any) -> dict[str, Any]:
    import jax
    import numpy as np

    from jaxpipe.stage.model.reference import resolve_model

    options = {"vocab_size": 256, "seq_len": config.data.seq_len, **config.model.options}
    rng = np.random.default_rng(0)
    shape = (args.microbatches, args.microbatch_size, config.data.seq_len)
    tokens = rng.integers(0, 256, (*shape[:2], shape[2] + 1)).astype(np.int32)
    batch = {
        "tokens": tokens[..., :-1].copy(),
        "targets": tokens[..., 1:].copy(),
        "weights": np.ones(shape, np.float32),
    }

    report: dict[str, Any] = {
        "what": "jaxpipe runtime",
        "command": " ".join(["python", *sys.argv]),
        "commit": commit_id(),
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{describe_machine()}, {jax.devices()[0].device_kind}",
        "versions": {"python": platform.python_version(), "jax": jax.__version__},
        "load_before": os.getloadavg()[0],
        "model": {"target": config.model.target, **options},
        "ranks": args.ranks,
        "microbatches": args.microbatches,
        "microbatch_size": args.microbatch_size,
        "recompute": config.pipeline.recompute,
        "schedules": {},
    }
    for name in args.schedules:
        _note(f"schedule {name}")
        stages = _scheduled(args, name).num_stages  # a block each, at least
        layers = {} if stages == args.ranks else {"num_layers": max(options["num_layers"], stages)}
        model = resolve_model(config.model.target, {**options, **layers})
        report["schedules"][name] = _schedule(args, config, model, batch, name) | layers
    report["load_after"] = os.getloadavg()[0]
    return report


def _build(args: argparse.Namespace, config: Any, model: Any, name: str, size: int) -> Any:
    from jaxpipe.runtime.pipeline import Pipeline
    from jaxpipe.stage.model.plan import analytic_layer_costs, plan_stages

    schedule = _scheduled(args, name)
    plan = plan_stages(model, schedule.num_stages, costs=analytic_layer_costs(model, size))
    pipe = Pipeline.build(
        model,
        schedule,
        microbatch_size=size,
        boundaries=[(s.start, s.stop) for s in plan.stages],
        recompute=config.pipeline.recompute,
    )
    pipe = pipe.with_costs(pipe.measure_costs(repeats=25))
    pipe = pipe.with_schedule(_scheduled(args, name, pipe.costs))
    pipe.warm_up()
    return pipe


def _scheduled(args: argparse.Namespace, name: str, costs: Any = None) -> Any:
    from jaxpipe.schedule import FAMILIES, generate

    chunks = 2 if name.startswith("interleaved") else None
    assert chunks is None or "chunks" in FAMILIES[name].options
    return generate(name, args.ranks, args.microbatches, chunks=chunks, costs=costs)


def _schedule(args: argparse.Namespace, config: Any, model: Any, batch: Any, name: str) -> dict[str, Any]:
    import jax

    from jaxpipe.stage.model.reference import init_params

    params = init_params(model, 0)
    pipe = _build(args, config, model, name, args.microbatch_size)
    rivals = {"unpipelined": _unpipelined(model), "one_by_one": _one_by_one(model), "at_once": _at_once(model)}
    placed = pipe.place(params)
    arguments = jax.device_put((params, batch), jax.devices()[0])
    acc = {at: pipe.zeros(at) for at in pipe.own_instances}
    jax.block_until_ready([rival(*arguments) for rival in rivals.values()])
    pipelined_s, ratios, bubbles = [], [], []
    rivals_s: dict[str, list[float]] = {rival: [] for rival in rivals}
    host: list[tuple[str, float]] = []
    for _ in range(args.rounds):
        start = time.perf_counter()
        with _thread_time():
            out = pipe.run(placed, acc, batch)
        acc = {at: list(b) for at, b in out.acc.items()}
        jax.block_until_ready((acc, out.losses))
        pipelined_s.append(time.perf_counter() - start)
        host += zip(pipe.executor.instruction_kinds, out.instruction_s, strict=True)
        for rival, run in rivals.items():
            start = time.perf_counter()
            jax.block_until_ready(run(*arguments))
            rivals_s[rival].append(time.perf_counter() - start)
        out = pipe.run(placed, acc, batch, record=True)
        acc = {at: list(b) for at, b in out.acc.items()}
        ratios.append(pipe.replay_ratio(out))
        bubbles.append(pipe.measured_timeline(out).bubble_rate)

    def over(times: list[float]) -> float:
        return statistics.median(a / b for a, b in zip(pipelined_s, times, strict=True))

    costs = pipe.costs
    seconds = {op: sum(getattr(costs, f"{op.lower()}_s")) for op in ("F", "B", "W", "BW")}
    flops = {op: sum(s.flops[op] for s in pipe.stages) for op in ("F", "B", "W", "BW")}
    return {
        "instructions": pipe.executor.num_instructions,
        "host_us": _host_cost(host) | _arrays(pipe, args.ranks, host),
        "pipelined_s": statistics.median(pipelined_s),
        **{f"{rival}_s": statistics.median(times) for rival, times in rivals_s.items()},
        **{f"pipelined_over_{rival}": over(times) for rival, times in rivals_s.items()},
        "pipelined_over_strongest": max(over(times) for times in rivals_s.values()),
        "predicted_over_measured": pipe.predicted_timeline().makespan / statistics.median(pipelined_s),
        "measured_over_replay": statistics.median(ratios),
        "bubble_predicted": pipe.predicted_timeline().bubble_rate,
        "bubble_measured": statistics.median(bubbles),
        "split_over_fused_flops": (flops["F"] + flops["B"] + flops["W"]) / (flops["F"] + flops["BW"]),
        "split_over_fused_seconds": (seconds["F"] + seconds["B"] + seconds["W"]) / (seconds["F"] + seconds["BW"]),
        "peak_bytes": list(pipe.peak_bytes),
    }


@contextmanager
def _thread_time() -> Iterator[None]:
    """The executor's stamps are CPU time of the dispatching thread."""
    from jaxpipe.runtime.recorder import DeviceClock

    now = DeviceClock.now
    DeviceClock.now = lambda clock: time.thread_time()
    try:
        yield
    finally:
        DeviceClock.now = now


def _microbatch_step(model: Any) -> Any:
    """Adds one microbatch's gradients, loss sum and weight sum to a carry."""
    import jax
    import jax.numpy as jnp

    from jaxpipe.stage.model.reference import apply_model

    def step(carry: Any, params: Any, micro: Any) -> Any:
        (total, weight), grads = jax.value_and_grad(lambda p: apply_model(model, p, micro), has_aux=True)(params)
        return jax.tree.map(jnp.add, carry, (grads, total, weight))

    return step


def _zeros(params: Any) -> Any:
    import jax
    import jax.numpy as jnp

    return jax.tree.map(jnp.zeros_like, params), jnp.zeros(()), jnp.zeros(())


def _unpipelined(model: Any) -> Any:
    """Time the same microbatches unpipelined in one jitted step on one device: a compiled loop."""
    import jax

    one = _microbatch_step(model)
    return jax.jit(lambda params, batch: jax.lax.scan(lambda c, b: (one(c, params, b), None), _zeros(params), batch)[0])


def _one_by_one(model: Any) -> Any:
    """The same, one jitted call a microbatch: XLA's CPU loops are slower than straight code, so this is the stricter rival."""
    import jax

    one = jax.jit(_microbatch_step(model), donate_argnums=0)
    zeros = jax.jit(_zeros)

    def step(params: Any, batch: Any) -> Any:
        carry = zeros(params)
        for i in range(len(batch["tokens"])):
            carry = one(carry, params, {k: v[i] for k, v in batch.items()})
        return carry

    return step


def _at_once(model: Any) -> Any:
    """Time the same gradient of all sequences together."""
    import jax

    one = _microbatch_step(model)

    def step(params: Any, batch: Any) -> Any:
        return one(_zeros(params), params, {name: x.reshape(-1, *x.shape[2:]) for name, x in batch.items()})

    return jax.jit(step)


def _arrays(pipe: Any, ranks: int, samples: list[tuple[str, float]]) -> dict[str, float]:
    """Return the times of instructions that run a function, and how many arrays these read and write."""
    from jaxpipe.program.ir import Run

    runs = [i for program in pipe.programs for i in program.instructions if isinstance(i, Run)]
    us = sorted(s * 1e6 for kind, s in samples if kind == "run")
    return {
        "run_mean": statistics.mean(us),
        "run_p90": us[len(us) * 9 // 10],
        "arrays": statistics.mean(len(i.inputs) + len(i.outputs) for i in runs),
        "of_5_ms": ranks * statistics.mean(us) / 5000,
    }


def _host_cost(samples: list[tuple[str, float]]) -> dict[str, float]:
    """µs per instruction: median and 90th percentile of all, and the median of each kind."""
    microseconds = sorted(s * 1e6 for _, s in samples)
    kinds = {kind: [s * 1e6 for k, s in samples if k == kind] for kind in dict(samples)}
    return {
        "median": statistics.median(microseconds),
        "p90": microseconds[len(microseconds) * 9 // 10],
        **{kind: statistics.median(values) for kind, values in kinds.items()},
    }


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
