"""Seconds and bytes of each stage function → :class:`~jaxpipe.schedule.costs.CostProfile`.

*Analytic*: FLOPs of the jaxprs over a rate; no device needed, good enough to choose an order. *Measured*: each compiled
function is run alone on its device, median of several calls after a warm-up. Bytes are exact in both (shapes of residuals,
boundaries, parameters); XLA's workspace, known once a function is compiled, is in the measured one only.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe.schedule import CostProfile, Link
from jaxpipe.stage.footprint import Footprint, footprint, total_device_bytes
from jaxpipe.stage.functions import StageFunction, StageFunctions
from jaxpipe.stage.layer import Layer, LayerContext, Model
from jaxpipe.stage.reference import init_params, with_tied_leaves

DEFAULT_FLOPS_PER_S = 1e11
_TIMED = ("F", "B", "W", "BW")


def analytic_profile(
    stages: Sequence[StageFunctions], *, flops_per_s: float = DEFAULT_FLOPS_PER_S, link: Link | None = None
) -> CostProfile:
    """Costs from FLOP counts: seconds = FLOPs / ``flops_per_s`` (at least a microsecond, for functions without matmuls)."""

    def seconds(op: str) -> tuple[float, ...]:
        return tuple(max(1e-6, s.flops.get(op, 0) / flops_per_s) for s in stages)

    b_s, w_s = seconds("B"), seconds("W")
    return _with_bytes(stages, seconds("F"), b_s, w_s, seconds("BW"), link, f"analytic, {flops_per_s:.3g} FLOP/s")


def measured_profile(
    stages: Sequence[StageFunctions],
    *,
    repeats: int = 5,
    link: Link | None = None,
    progress: Callable[[str], None] | None = None,
) -> CostProfile:
    """Costs from running each function alone on its own devices.

    Args:
        stages: in order.
        repeats: timed calls per function; the median counts.
        link: between any two ranks; free by default.
        progress: called with a line per function.
    """
    seconds: dict[str, list[float]] = {"F": [], "B": [], "W": [], "BW": []}
    for s, stage in enumerate(stages):
        for op, row in seconds.items():
            row.append(median_seconds(stage.functions[op], repeats))
            if progress is not None:
                progress(f"stage {s} {op}: {row[-1] * 1e3:.3f} ms")
    f, b, w, bw = (tuple(seconds[op]) for op in ("F", "B", "W", "BW"))
    return _with_bytes(stages, f, b, w, bw, link, f"measured, median of {repeats}", footprint)


def median_seconds(function: StageFunction, repeats: int) -> float:
    """Median wall seconds of one call on arrays of ones, results awaited. Accumulators go round and round, as in a run."""
    inputs = [_ones(aval) for aval in function.avals_in]
    acc_in = [k for k, port in enumerate(function.inputs) if port.kind == "acc"]
    acc_out = [k for k, port in enumerate(function.outputs) if port.kind == "acc"]
    times = []
    for n in range(repeats + 1):
        start = time.perf_counter()
        results = jax.block_until_ready(function.call(*inputs))
        if n:
            times.append(time.perf_counter() - start)
        for i, o in zip(acc_in, acc_out, strict=True):
            inputs[i] = results[o]
    return statistics.median(times)


def _ones(aval: jax.ShapeDtypeStruct) -> jax.Array:
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        key: jax.Array = jax.device_put(jax.random.key(0), aval.sharding)
        return key
    ones: jax.Array = jax.device_put(np.ones(aval.shape, aval.dtype), aval.sharding)
    return ones


def measured_layer_costs(model: Model, microbatch_size: int, *, repeats: int = 3) -> tuple[float, ...]:
    """Seconds of forward and backward of each layer alone on the first device, median of ``repeats``; equal kinds run once."""
    params = init_params(model, 0)
    batch = {n: jnp.zeros(a.shape, a.dtype) for n, a in model.batch_spec(microbatch_size).items()}
    x: Any = None
    costs, seen = [], {}
    for index, layer in enumerate(model.layers):
        own = with_tied_leaves(layer, params)
        context = LayerContext(
            {n: batch[n] for n in layer.reads}, jax.random.key(index) if layer.uses_key else None, layer.uses_key
        )
        if layer.kind not in seen or not layer.kind:
            seen[layer.kind] = _layer_seconds(layer, own, x, context, repeats)
        costs.append(seen[layer.kind])
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
    """``costs`` with the seconds of some (op, stage) replaced, as averaged from a recorded run."""
    fields = {"F": "f_s", "B": "b_s", "W": "w_s", "BW": "bw_s"}
    changed: dict[str, Any] = {}
    for op, name in fields.items():
        old = getattr(costs, name)
        changed[name] = tuple(seconds.get((op, s), x) for s, x in enumerate(old))
    return replace(costs, source="measured in the run", **changed)


def with_offloadable_bytes(costs: CostProfile, offloadable_bytes: tuple[float, ...]) -> CostProfile:
    """``costs`` of stages that offload other bytes: seconds of O and L in proportion, or as the host link says where nothing
    was offloaded before."""
    ratios = [new / old if old else 0.0 for new, old in zip(offloadable_bytes, costs.offloadable_bytes, strict=True)]
    linked = replace(costs, offloadable_bytes=offloadable_bytes, offload_s=(), load_s=())

    def scaled(name: str) -> tuple[float, ...]:
        rows = zip(getattr(costs, name), getattr(linked, name), ratios, costs.offloadable_bytes, strict=True)
        return tuple(seconds * ratio if old else link_s for seconds, link_s, ratio, old in rows)

    return replace(linked, offload_s=scaled("offload_s"), load_s=scaled("load_s"))


def _with_bytes(
    stages: Sequence[StageFunctions],
    f_s: tuple[float, ...],
    b_s: tuple[float, ...],
    w_s: tuple[float, ...],
    bw_s: tuple[float, ...],
    link: Link | None,
    source: str,
    footprint_of: Callable[[StageFunction], Footprint] | None = None,
) -> CostProfile:
    def each(name: str) -> tuple[float, ...]:
        return tuple(float(getattr(s, name)) for s in stages)

    costs = CostProfile(
        f_s=f_s,
        b_s=b_s,
        w_s=w_s,
        bw_s=bw_s,
        residual_bytes=each("residual_bytes"),
        w_residual_bytes=each("w_residual_bytes"),
        cotangent_bytes=each("cotangent_bytes"),
        offloadable_bytes=each("offloadable_bytes"),
        boundary_bytes=each("boundary_bytes"),
        param_bytes=each("param_bytes"),
        link=link if link is not None else Link(),
        source=source,
    )
    return with_memory(costs, stages, footprint_of)


def with_memory(
    costs: CostProfile,
    stages: Sequence[StageFunctions],
    footprint_of: Callable[[StageFunction], Footprint] | None = None,
) -> CostProfile:
    """``costs`` with every byte of the stages in it, so that the simulator's peak bounds what the runtime holds.

    ``temp_bytes`` of an op: XLA's workspace (with ``footprint_of``, which compiles; 0 without) and what the runtime holds
    while the op runs beside residuals and cotangents: x where no backward pass reads it, y, dy and dx. Between actions
    ``boundary_buffers`` count what was sent and not read. ``param_bytes``: parameters. ``optimizer_bytes``: gradient
    accumulators and compiled code; add optimizer state and masters to them. Left to the caller, as it depends on the number
    of microbatches: batch arrays, keys and losses.
    """

    def temp(stage: StageFunctions, op: str) -> float:
        function = stage.functions[op]
        workspace = 0
        if footprint_of is not None:
            found = footprint_of(function)
            donated = total_device_bytes([function.avals_in[k] for k in function.donated])
            workspace = found.temp_bytes + max(0, donated - found.alias_bytes)
        return float(workspace + _passing_bytes(stage, function))

    def code(stage: StageFunctions) -> int:
        return 0 if footprint_of is None else sum(footprint_of(stage.functions[op]).code_bytes for op in _TIMED)

    return replace(
        costs,
        temp_bytes=tuple((op, tuple(temp(s, op) for s in stages)) for op in _TIMED),
        optimizer_bytes=tuple(float(total_device_bytes(s.acc_avals) + code(s)) for s in stages),
        boundary_buffers=True,
    )


def _passing_bytes(stage: StageFunctions, function: StageFunction) -> int:
    """Bytes of the boundaries that a function reads or makes and that are no residual: gone when it has run and sent."""
    kept = {p for op in ("B", "W") for p in stage.functions[op].inputs if p.kind == "x"}
    shared = {
        k for n, k in function.forwarded.items() if function.outputs[n].kind == "wres"
    }  # a dy that is handed to W counts as a cotangent
    read = [
        aval
        for k, (port, aval) in enumerate(zip(function.inputs, function.avals_in, strict=True))
        if (port.kind == "dy" and k not in shared) or (port.kind == "x" and port not in kept)
    ]
    made = [
        aval
        for n, (port, aval) in enumerate(zip(function.outputs, function.avals_out, strict=True))
        if port.kind in ("y", "dx") and n not in function.forwarded
    ]
    return total_device_bytes([*read, *made])
