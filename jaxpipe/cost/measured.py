"""Costs from running each compiled function alone on its own device.

*Timing.* A sample is ``calls`` calls back to back, the last one's results awaited, divided by ``calls``: a GPU runs what it is
given in order, so while one call runs the next is being dispatched, and neither the latency of dispatch nor that of waking
up counts more than once a sample. The CPU backend gets one call a sample (its dispatch shares cores with the computation, and
a function's time is what a pipeline step sees). The median of several samples counts, after calls that warm up; quartiles tell
the spread. *Memory.* Bytes between functions are exact (shapes); workspace inside one is XLA's own figure.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe.cost.analytic import with_bytes
from jaxpipe.cost.collectives import time_collectives
from jaxpipe.cost.host_link import HostLinkMeasurement
from jaxpipe.cost.memory import OPS
from jaxpipe.cost.timing import Timing
from jaxpipe.schedule import CostProfile, Link
from jaxpipe.schedule.lanes import slot_lanes
from jaxpipe.stage.compiled.footprint import Footprint, footprint
from jaxpipe.stage.functions import StageFunction, StageFunctions
from jaxpipe.stage.identity import value_key
from jaxpipe.stage.model.layer import Layer, LayerContext, Model
from jaxpipe.stage.model.reference import init_params, with_tied_leaves

_SAMPLE_S = 0.05
"""What a sample should take on an accelerator: long against the microseconds that its ends are uncertain by."""
_MOST_CALLS = 30
"""Of one sample: below the 32 computations that a device lets be in flight before dispatch blocks."""


@dataclass(frozen=True, slots=True)
class StageMeasurements:
    """``timings`` and ``footprints`` (workspace, arguments, results: bytes) by (op, stage). ``host``: the host link, if it was
    measured. ``collectives``: by stage, the tensor-parallel collectives of its F alone, where it has any."""

    stages: tuple[StageFunctions, ...]
    timings: Mapping[tuple[str, int], Timing]
    footprints: Mapping[tuple[str, int], Footprint]
    host: HostLinkMeasurement | None = None
    collectives: Mapping[int, Timing] = field(default_factory=dict)

    def costs(self, link: Link | None = None) -> CostProfile:
        """As a profile: medians, and workspace if it was asked for. ``link``: between any two ranks; free by default.

        F and B are given without their collectives, and BW as B and W are together, unless it was measured and takes less.
        """
        stages, ops = range(len(self.stages)), {op for op, _ in self.timings}
        seconds = {op: tuple(self.timings[(op, s)].median_s for s in stages) for op in OPS if op in ops}
        if "BW" not in ops:
            seconds["BW"] = tuple(b + w for b, w in zip(seconds["B"], seconds["W"], strict=True))
        comm = tuple(self.collectives[s].median_s if s in self.collectives else 0.0 for s in stages)
        if any(comm):
            for op in ("F", "B"):
                seconds[op] = tuple(max(0.0, a - c) for a, c in zip(seconds[op], comm, strict=True))
            apart = zip(seconds["B"], seconds["W"], seconds["BW"], strict=True)
            seconds["BW"] = tuple(min(b + w, bw) for b, w, bw in apart)
        count = min(t.count for t in self.timings.values())
        host = self.host.host_link() if self.host is not None else None
        return with_bytes(
            self.stages,
            seconds,
            source=f"measured, median of {count}",
            link=link,
            host=host,
            footprint_of=(lambda f: footprint(f) if f.op in ops else Footprint()) if self.footprints else None,
            tp_comm_s=comm,
        )


def measure_stages(
    stages: Sequence[StageFunctions],
    *,
    repeats: int = 5,
    warm_up: int = 1,
    memory: bool = True,
    fused: bool = True,
    progress: Callable[[str], None] | None = None,
) -> StageMeasurements:
    """Run every function of every stage alone.

    Args:
        stages: in order.
        fused: BW too, which schedules of B and W never run.
        repeats: timed samples per function.
        warm_up: calls before them, beside the first, which compiles.
        memory: also ask XLA for each function's workspace.
        progress: called with a line per function.
    """
    timings, footprints, exchanged = {}, {}, {}
    for s, stage in enumerate(stages):
        for op in OPS if fused else [op for op in OPS if op != "BW"]:
            timings[(op, s)] = time_function(stage.functions[op], repeats, warm_up)
            if memory:
                footprints[(op, s)] = footprint(stage.functions[op])
            if progress is not None:
                progress(f"stage {s} {op}: {timings[(op, s)]}")
        alone = time_collectives(stage.functions["F"], repeats, warm_up)
        if alone is not None:
            exchanged[s] = alone
            if progress is not None:
                progress(f"stage {s} collectives of F: {alone}")
    return StageMeasurements(tuple(stages), timings, footprints, collectives=exchanged)


def time_function(function: StageFunction, repeats: int, warm_up: int = 1, *, calls: int | None = None) -> Timing:
    """Seconds of one call on arrays of ones. Accumulators go round and round, as in a run.

    ``calls`` back to back between two waits: on an accelerator as many as make a sample of 50 ms (30 at most), one on a CPU.
    """
    inputs = [_ones(aval) for aval in function.avals_in]
    acc_in = [k for k, port in enumerate(function.inputs) if port.kind == "acc"]
    acc_out = [k for k, port in enumerate(function.outputs) if port.kind == "acc"]

    def sample(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            results = function.call(*inputs)
            for i, o in zip(acc_in, acc_out, strict=True):
                inputs[i] = results[o]
        jax.block_until_ready(results)
        return (time.perf_counter() - start) / count

    sample(1)  # compiles
    warm = [sample(1) for _ in range(warm_up)]
    if calls is None and _on_cpu(function):
        calls = 1
    elif calls is None:
        once = min(warm) if warm else sample(1)
        calls = min(_MOST_CALLS, max(2, math.ceil(_SAMPLE_S / once)))
    return Timing.of([sample(calls) for _ in range(repeats)])


def _on_cpu(function: StageFunction) -> bool:
    sharding = (*function.avals_in, *function.avals_out)[0].sharding
    assert sharding is not None, "stage functions know their devices"
    return all(d.platform == "cpu" for d in sharding.device_set)


def _ones(aval: jax.ShapeDtypeStruct) -> jax.Array:
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        key: jax.Array = jax.device_put(jax.random.key(0), aval.sharding)
        return key
    ones: jax.Array = jax.device_put(np.ones(aval.shape, aval.dtype), aval.sharding)
    return ones


def measured_layer_costs(model: Model, microbatch_size: int, *, repeats: int = 3) -> tuple[float, ...]:
    """Seconds of forward and backward of each layer alone on the first device, median of ``repeats``. Layers of the same
    functions and shapes are timed once."""
    params = init_params(model, 0)
    batch = {n: jnp.zeros(a.shape, a.dtype) for n, a in model.batch_spec(microbatch_size).items()}
    x: Any = None
    costs: list[float] = []
    seen: dict[Hashable, float] = {}
    for index, layer in enumerate(model.layers):
        own = with_tied_leaves(layer, params)
        context = LayerContext(
            {n: batch[n] for n in layer.reads}, jax.random.key(index) if layer.uses_key else None, layer.uses_key
        )
        leaves, structure = jax.tree.flatten((own, x))
        shapes = tuple((v.shape, str(v.dtype)) if hasattr(v, "shape") else value_key(v) for v in leaves)
        same = (layer.code, structure, shapes)
        if same not in seen:
            seen[same] = _layer_seconds(layer, own, x, context, repeats)
        costs.append(seen[same])
        x = layer.apply(own, x, context)
    return tuple(costs)


def _layer_seconds(layer: Layer, params: Any, x: Any, context: LayerContext, repeats: int) -> float:
    leaves, tree = jax.tree.flatten((params, x))
    trained = [hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in leaves]

    def run(floats: list[Any]) -> Any:
        given = iter(floats)
        own, carry = jax.tree.unflatten(
            tree, [next(given) if t else leaf for t, leaf in zip(trained, leaves, strict=True)]
        )
        y = layer.apply(own, carry, context)
        return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(y) if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact))

    step = jax.jit(jax.grad(run))
    floats = [leaf for t, leaf in zip(trained, leaves, strict=True) if t]
    times = []
    for n in range(repeats + 1):
        start = time.perf_counter()
        jax.block_until_ready(step(floats))
        if n:
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def with_measured_times(costs: CostProfile, seconds: Mapping[tuple[str, int], float]) -> CostProfile:
    """``costs`` with the seconds of some (op, stage) replaced, as averaged from a recorded run of these actions alone: what
    ``costs`` say that one waits for tensor-parallel collectives is taken off."""
    fields = {"F": "f_s", "B": "b_s", "W": "w_s", "BW": "bw_s"}

    def compute_s(op: str, stage: int, now_s: float) -> float:
        measured = seconds.get((op, stage))
        return now_s if measured is None else max(0.0, measured - slot_lanes(costs, [(op, stage)]).exposed_s)

    changed: dict[str, Any] = {}
    for op, name in fields.items():
        changed[name] = tuple(compute_s(op, s, x) for s, x in enumerate(getattr(costs, name)))
    return replace(costs, source="measured in the run", **changed)
