"""Experiments on copies to host memory and back: whether orders that know the link hide them, what shared streams cost."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from scripts.gpu_experiments.blocks import block_flops, host_link, measured_costs, middle_block, pipeline
from scripts.gpu_experiments.here import cannot_ask
from scripts.gpu_experiments.layer_k import k_of_layer
from scripts.gpu_experiments.registry import Settings, experiment
from scripts.gpu_experiments.training import profile_of

_OFFLOAD_PATHS = (
    "jaxpipe/stage",
    "jaxpipe/cost",
    "jaxpipe/runtime",
    "jaxpipe/program",
    "jaxpipe/schedule",
    "models/gpt.py",
)
_COPY_BYTES = 256 << 20
RANK = 1
"""A rank in the middle of a pipeline."""


@experiment(
    "T3",
    version=2,
    question="is offload free when the order knows the link?",
    backs="COMPASS 3d, row 5; README's table of GPUs",
    paths=(*_OFFLOAD_PATHS, "jaxpipe/rehearsal"),
    estimate_s=150,
    predicted={
        "po-h ÷ po with lanes of their own": "1.00-1.02",
        "po-h ÷ po with shared streams": "up to 1.01 at 8192, 1.28 at 4096",
    },
    want={"8192.po-h.over_po": "<= 1.01", "4096.po-h.over_po": "<= 1.03"},
)
def offload_with_costs(settings: Settings) -> dict[str, Any]:
    """Rehearse one rank's program with offload off and on, in orders made with measured seconds and link, A B A B; copies
    as the profiler sees them."""
    from jaxpipe.cost import time_function

    if (link := host_link(settings)) is None:
        return cannot_ask("there is no pinned host memory")
    numbers: dict[str, Any] = {"link": asdict(link)}
    sizes = sorted(settings.sizes.items(), reverse=True)[: 1 if settings.tiny else None]
    for name, hidden in sizes:
        stage = middle_block(settings, hidden)
        timings = {
            op: time_function(f, settings.repeats, 1, vocab_size=settings.vocab) for op, f in stage.functions.items()
        }
        seconds = {op: t.median_s for op, t in timings.items()}
        numbers[name] = _steps(settings, hidden, link, seconds) | {
            "functions": {op: asdict(t) for op, t in timings.items()},
            "slower_while_copying": {op: _slowdown(settings, stage.functions[op], seconds[op], link) for op in "FBW"},
            "k": _k(settings, stage, seconds, link, hidden),
        }
        gc.collect()
    return numbers


def _steps(settings: Settings, hidden: int, link: Any, seconds: dict[str, float]) -> dict[str, Any]:
    """Rehearse the programs twice in turn, the smallest first: a peak of the allocator never falls."""
    from jaxpipe.rehearsal.rank import Rehearsal
    from jaxpipe.runtime.transfer import OffloadOptions
    from jaxpipe.schedule import generate, simulate

    ranks, microbatches = settings.ranks, settings.microbatches
    base = pipeline(settings, hidden, generate("po", ranks, microbatches))
    costs = measured_costs(base, seconds, link)
    whole = base.with_offload(OffloadOptions(in_parts=False))
    names = ("po-f", "po-f, issued whole", "po-h", "ada-offload", "po")
    names = ("po-f, issued whole", "po-h", "po") if settings.tiny else names
    schedules = {
        name: generate(name.split(",")[0], ranks, microbatches, costs=costs) for name in names if name != "ada-offload"
    }
    if "ada-offload" in names:
        # As much memory as po-h takes, and the same stages.
        limit, chunks = max(simulate(schedules["po-h"], costs).peak_activations), base.schedule.num_stages // ranks
        schedules["ada-offload"] = generate(
            "ada-offload", ranks, microbatches, chunks=chunks, costs=costs, memory_limit=limit
        )
    rehearsals = {}
    for name in names:
        pipe = (whole if name.endswith("whole") else base).with_schedule(schedules[name], costs)
        rehearsals[name] = Rehearsal(pipe, RANK, host=link.host_link())
    rounds = [
        {name: r.run(steps=settings.steps, complete=False) for name, r in rehearsals.items()}
        for _ in range(1 if settings.tiny else 2)
    ]
    table: dict[str, Any] = {}
    for name in names:
        first = rounds[0][name]
        table[name] = {
            "order": str(schedules[name]),
            "step_s": [asdict(reports[name].step) for reports in rounds],
            "over_po": statistics.median(r[name].step.median_s / r["po"].step.median_s for r in rounds),
            "predicted_over_po": simulate(schedules[name], costs).makespan / simulate(schedules["po"], costs).makespan,
            "predicted_peak_bytes": first.memory.predicted_bytes,
            "measured_peak_bytes": first.memory.measured_bytes,
            "peak_is_exact": first.memory.exact,
            "host_us": first.host_us,
            "profiled": _copy_streams(rehearsals[name]),
            "copies": [{**asdict(c), "bytes_per_s": c.bytes_per_s} for c in first.copies],
            "functions": {f"{op}{stage}": asdict(t) for (op, stage), t in first.timings.items()},
        }
    return table


def _copy_streams(rehearsal: Any) -> dict[str, Any]:
    """Return, of one profiled step, seconds by stream that hold copies."""
    inputs, _ = rehearsal.place()
    streams, _, _ = profile_of(rehearsal.pipeline.executor, inputs)
    return {name: stream for name, stream in streams.items() if "copies" in stream["by_kind_s"]}


def _slowdown(settings: Settings, function: Any, seconds: float, link: Any) -> float:
    """Return seconds of calls back to back while both directions of the link are busy ÷ seconds without: median of A B A B."""
    import jax
    import jax.numpy as jnp

    from jaxpipe.cost.seconds import arguments_of, call_timer, random_array

    copy_bytes = int(seconds * min(link.d2h.bytes_per_s, link.h2d.bytes_per_s))  # busy as long as a call
    pieces = max(1, -(-copy_bytes // _COPY_BYTES))
    homes = [jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=k) for k in ("device", "pinned_host")]
    aval = jax.ShapeDtypeStruct((max(1024, copy_bytes // pieces // 4),), jnp.float32, sharding=homes[0])
    leaving = random_array(aval)
    coming = jax.block_until_ready(jax.device_put(leaving, homes[1]))
    sample = call_timer(function, arguments_of(function, settings.vocab))
    calls = 2 if settings.tiny else 8

    def copying() -> float:
        moves = ((leaving, homes[1]), (coming, homes[0]))
        copies = [jax.device_put(x, home) for _ in range(calls * pieces) for x, home in moves]
        spent = sample(calls)
        jax.block_until_ready(copies)
        return spent

    sample(1)
    copying()
    return statistics.median(copying() / sample(calls) for _ in range(settings.repeats))


def _k(settings: Settings, stage: Any, seconds: dict[str, float], link: Any, hidden: int) -> dict[str, float]:
    """Return round trip ÷ compute of the block: measured with its own leaves, and by the formula with its own bytes or 20."""
    import jax

    from jaxpipe.cost.seconds import random_array
    from jaxpipe.runtime.transfer import host_copies

    forward = stage.functions["F"]
    avals = {p.index: a for p, a in zip(forward.outputs, forward.avals_out, strict=True) if p.kind == "res"}
    leaves = [random_array(avals[k]) for k in stage.offloaded]
    to_host, to_device = host_copies(forward.avals_out[0].sharding, fallback=False)
    jax.block_until_ready(leaves)
    trips = []
    for _ in range(settings.repeats + 1):
        began = time.perf_counter()
        jax.block_until_ready(to_device(jax.block_until_ready(to_host(leaves))))
        trips.append(time.perf_counter() - began)
    compute_s = sum(seconds[op] for op in "FBW")
    flops = block_flops(hidden, settings.sequence)
    rates = {
        "flops_per_s": sum(flops[op] for op in "FBW") / compute_s,
        "d2h_bytes_per_s": link.d2h.bytes_per_s,
        "h2d_bytes_per_s": link.h2d.bytes_per_s,
    }
    bytes_per_element = stage.offloadable_bytes / (settings.sequence * hidden)
    return {
        "offloadable_bytes": stage.offloadable_bytes,
        "round_trip_s": statistics.median(trips[1:]),
        "measured": statistics.median(trips[1:]) / compute_s,
        "formula": k_of_layer(hidden, settings.sequence, **rates),
        "formula_own_bytes": k_of_layer(hidden, settings.sequence, residual_bytes=bytes_per_element, **rates)
        if bytes_per_element
        else 0.0,
    }


@dataclass(frozen=True, slots=True)
class _Variant:
    """How copies are dispatched: in so many arrays, loads so many runs before their readers, offloads after the next run."""

    leaves: int = 10
    early: int = 0
    offload_late: bool = False


_RUNS, _READ_AFTER = 12, 6
_VARIANTS = {
    "as now": _Variant(),
    "1 leaf": _Variant(leaves=1),
    "offload late": _Variant(offload_late=True),
    "load 2 early": _Variant(early=2),
    "load 4 early": _Variant(early=4),
    "load 4 early, offload late": _Variant(early=4, offload_late=True),
}


@experiment(
    "T3b",
    version=1,
    question="what do the streams cost that copies share?",
    backs="jaxpipe/runtime/transfer.py; the virtual device",
    paths=("jaxpipe/runtime/transfer.py",),
    estimate_s=60,
    predicted={"as now": "1.1-1.3 × the runs alone", "4 early": "1.00-1.05"},
    want={"best": "<= 1.02"},
)
def shared_streams(settings: Settings) -> dict[str, Any]:
    """Run 12 products of about 3 ms, each offloaded and loaded 6 runs later, against the same products without copies."""
    import jax
    import jax.numpy as jnp

    from jaxpipe.cost.seconds import random_array
    from jaxpipe.runtime.transfer import host_copies

    home = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="device")
    n, rate = (64, 1e9) if settings.tiny else (8192, settings.ceilings["noise_300_flops_per_s"])
    depth = max(1, round(3e-3 * rate / (2 * n**3)))
    copy_bytes = (
        1 << 16
        if settings.tiny
        else int(0.9 * 3e-3 * min(settings.ceilings[f"{way}_bytes_per_s"] for way in ("d2h", "h2d")))
    )
    weight = random_array(jax.ShapeDtypeStruct((n, n), jnp.bfloat16, sharding=home), 1 / n**0.5)

    @jax.jit
    def run(x: Any, weight: Any, loaded: Any, leaves: Any) -> tuple[Any, Any]:
        """A product that reads what was loaded, and writes what is to leave."""
        x = x + loaded[0][0].astype(x.dtype) * 1e-3
        for _ in range(depth):
            x = x @ weight
        return x, [leaf + x[0, 0].astype(leaf.dtype) for leaf in leaves]

    def wall(variant: _Variant, *, copies: bool) -> float:
        size = copy_bytes // 4 // variant.leaves
        leaves = [
            random_array(jax.ShapeDtypeStruct((size,), jnp.float32, sharding=home)) for _ in range(variant.leaves)
        ]
        jax.block_until_ready(leaves)
        began = 0.0
        moves = host_copies(home, fallback=False) if copies else None
        # The first pass compiles and makes the copies' functions.
        for _ in range(2):
            x = jax.block_until_ready(weight + 0)
            began = time.perf_counter()
            x = _chain(run, x, weight, leaves, moves, variant)
            jax.block_until_ready(x)
        return time.perf_counter() - began

    alone = {leaves: [wall(_Variant(leaves), copies=False) for _ in range(settings.repeats)] for leaves in (1, 10)}
    ratios = {
        name: statistics.median(wall(v, copies=True) for _ in range(settings.repeats))
        / statistics.median(alone[v.leaves])
        for name, v in _VARIANTS.items()
    }
    run_s = statistics.median(alone[10]) / _RUNS
    return {"run_s": run_s, "copy_bytes": copy_bytes, "over_runs_alone": ratios, "best": min(ratios.values())}


def _chain(run: Callable[..., Any], x: Any, weight: Any, leaves: Sequence[Any], moves: Any, variant: _Variant) -> Any:
    """Dispatch the runs with their copies in the order of ``variant``: what is ready last."""
    written: dict[int, Any] = {}
    on_host: dict[int, Any] = {}
    loaded: dict[int, Any] = {}
    for k in range(_RUNS):
        ahead = k + variant.early - _READ_AFTER
        if moves and ahead in on_host:
            loaded[ahead] = moves[1](on_host.pop(ahead))
        x, written[k] = run(x, weight, loaded.pop(k - _READ_AFTER, leaves), leaves)
        offloaded = k - variant.offload_late
        if moves and offloaded in written:
            on_host[offloaded] = moves[0](written.pop(offloaded))
        if not moves:
            written.clear()
    return x, on_host
