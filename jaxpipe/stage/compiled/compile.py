"""From layers to compiled functions: trace, split, jit on the rank's submesh.

:func:`build_stage_functions` makes one stage, :func:`build_all` all, handing what leaves a stage to those that take it. Stages
that compute the same (:mod:`jaxpipe.stage.identity`) are split once per :class:`BuildCache`, and traced once where their layers
are the same functions; on one submesh they also share compiled code (unless a layer draws random numbers: its index in the
model is part of the program).

Calls are positional over flat lists of arrays. How each lies on the submesh follows from its port (:class:`_Homes`): keys and
parameters that are the same on all shards are replicated, split parameters stacked over ``tp``; batch arrays, losses and
activations that are the same on all ``tp`` shards are split over ``dp`` on axis 0; all else (residuals, accumulators of
parameters that the shards divide, sequence-parallel activations) is each device's own, stacked over ``dp`` and ``tp`` on axis
0. So an accumulator holds what each device summed, and the update adds them up. Scalars become arrays with an entry a device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe import dump
from jaxpipe._jax_compat import ClosedJaxpr, Var, aval_bytes, dtype_of, eval_jaxpr
from jaxpipe.errors import StageError
from jaxpipe.mesh import DP, ONE_SHARD, TP, AnyMesh, TensorParallel, device_sharded, replicated, varies_over_tp
from jaxpipe.stage.compiled.offloadable import with_offload
from jaxpipe.stage.flops import jaxpr_flops
from jaxpipe.stage.functions import Port, StageFunction, StageFunctions
from jaxpipe.stage.identity import Same, function_key, value_key
from jaxpipe.stage.leaves import array_leaves, fill, is_array
from jaxpipe.stage.model.layer import Layer, Params
from jaxpipe.stage.model.links import StageLinks, links_of, loss_factor
from jaxpipe.stage.model.params import ParamLayout, stage_params
from jaxpipe.stage.split.graph import Part
from jaxpipe.stage.split.policies import ingredients, per_stage
from jaxpipe.stage.split.recompute import policy
from jaxpipe.stage.split.splitter import Split, split
from jaxpipe.stage.split.trace import (
    StageTrace,
    TraceSpec,
    acc_axes,
    boundary_axes,
    param_axes,
    trace_eval,
    trace_joint,
)
from jaxpipe.stage.weave.weaver import GPU_OVERLAP_OPTIONS, weave


@dataclass(frozen=True, slots=True)
class _Traced:
    """What stages that compute the same share, whatever the recompute policy; ``splits`` by policy, made on demand. ``stage``:
    the first of them, by which their programs are called: equal ones under equal names are found in JAX's compilation cache
    on devices of other ranks too (where its keys leave the devices out, which is on GPUs)."""

    stage: int
    joint: StageTrace
    evaluation: StageTrace
    splits: dict[str, Split] = field(default_factory=dict)


@dataclass(slots=True)
class BuildCache:
    """Traces by what decides them, and by what they compute; jitted functions by trace, policy and submesh. One per run; pass
    it to every build."""

    traced: dict[Hashable, _Traced] = field(default_factory=dict)
    jitted: dict[Hashable, Any] = field(default_factory=dict)


def build_stage_functions(
    layers: Sequence[Layer],
    layer_offset: int,
    param_avals: Mapping[str, Params],
    x: Any,
    data_avals: Mapping[str, jax.ShapeDtypeStruct],
    mesh: AnyMesh,
    stage: int,
    links: StageLinks,
    recompute: str = "none",
    acc_dtype: Any = jnp.float32,
    cache: BuildCache | None = None,
    tp: TensorParallel = ONE_SHARD,
) -> StageFunctions:
    """The functions of one stage.

    Args:
        layers: of the stage, in order.
        layer_offset: index in the model of the first of them.
        param_avals: parameters by layer name, as shapes (or arrays), in the dtype the stage computes in; may hold the whole
            model's. Leaves tied to layers of other stages are taken from their owners where the layer does not hold a copy.
        x: what enters (:meth:`~jaxpipe.stage.model.links.StageLinks.entering`). Leaves are ``ShapeDtypeStruct`` (global shapes)
            or static values.
        data_avals: all arrays of a microbatch by name, global shapes; the stage takes those its layers read.
        mesh: the rank's submesh with axes ``dp`` and ``tp``.
        links: where the layers' inputs come from, and where what leaves goes.
        recompute: name of a policy in :data:`jaxpipe.stage.split.policies.POLICIES`, or several joined by ``+``.
        acc_dtype: dtype of gradient accumulators, at least (float64 parameters get float64).
        cache: shares traces and compiled functions between stages.
        tp: how the layers divide their work over the axis ``tp`` of ``mesh``.

    Raises:
        StageError: parameters, batch arrays or boundary values don't fit, a layer fails, or it can't be split.
        ConfigError: a layer can't be divided over so many shards.
    """
    assert mesh.shape[TP] == tp.size, f"a submesh with {mesh.shape[TP]} shards for tp {tp.size}"
    cache = cache if cache is not None else BuildCache()
    layout = ParamLayout.build(layers, stage_params(layers, param_avals), tp=tp)
    data = _data_read(layers, data_avals, stage)
    spec = TraceSpec(stage, tuple(layers), layer_offset, layout, x, data, links, acc_dtype, tp)
    saveable = policy(recompute)
    traced = _traced(spec, mesh, cache)
    name = "+".join(ingredients(recompute))
    if name not in traced.splits:
        traced.splits[name] = split(traced.joint, saveable)
    return _assemble(spec, traced, traced.splits[name], mesh, (Same(traced), name), cache)


def build_all(
    stages: Sequence[Sequence[Layer]],
    param_avals: Mapping[str, Params],
    data_avals: Mapping[str, jax.ShapeDtypeStruct],
    meshes: Sequence[AnyMesh],
    recompute: str | Sequence[str] = "none",
    acc_dtype: Any = jnp.float32,
    cache: BuildCache | None = None,
    tp: TensorParallel = ONE_SHARD,
) -> tuple[StageFunctions, ...]:
    """The functions of all stages of a model; ``meshes`` and (if not one name) ``recompute`` have an entry a stage.

    Raises:
        StageError: as :func:`build_stage_functions`, or the lengths differ.
    """
    if len(stages) != len(meshes):
        raise StageError(f"{len(stages)} stages, {len(meshes)} meshes; want as many of each")
    policies = per_stage(recompute, len(stages))
    cache = cache if cache is not None else BuildCache()
    all_links = links_of(stages, param_avals)
    data_avals = with_factors(stages, all_links, data_avals, acc_dtype)
    built: list[StageFunctions] = []
    leaving: list[tuple[Any, ...]] = []
    offset = 0
    for s, (layers, links) in enumerate(zip(stages, all_links, strict=True)):
        built.append(
            build_stage_functions(
                layers, offset, param_avals, links.entering(leaving), data_avals, meshes[s], s, links, policies[s],
                acc_dtype, cache, tp,
            )
        )  # fmt: skip
        leaving.append(links.exits(built[-1].y))
        offset += len(layers)
    ends = [list(accumulate((len(array_leaves(entry)) for entry in found), initial=0)) for found in leaving]
    x_from = [
        tuple((t, leaf) for t, n in links.before for leaf in range(ends[t][n], ends[t][n + 1])) for links in all_links
    ]
    dy_from = [
        tuple(
            (t, x_from[t].index((s, leaf)))
            for t, taken in links.readers
            for n in taken
            for leaf in range(ends[s][n], ends[s][n + 1])
        )
        for s, links in enumerate(all_links)
    ]
    return tuple(replace(f, x_from=x_from[s], dy_from=dy_from[s]) for s, f in enumerate(built))


def build_output(
    layers: Sequence[Layer],
    last: StageFunctions,
    mesh: AnyMesh,
    data_avals: Mapping[str, jax.ShapeDtypeStruct],
    tp: TensorParallel = ONE_SHARD,
) -> tuple[StageFunction, Any]:
    """The function ``Y`` of the last stage: what the loss takes in evaluation; and that as a pytree of per-shard shapes and
    static values. ``last``: the stage's functions; the rest as in :func:`build_stage_functions`."""
    data = {name: data_avals[name] for name in last.data_names if name in data_avals}
    links = last.links.without_loss
    x = last.links.members(last.x)[0]
    spec = TraceSpec(last.stage, tuple(layers[:-1]), 0, last.layout, x, data, links, jnp.float32, tp)
    trace = trace_eval(spec, mesh)
    homes = _Homes(mesh, last.layout, tuple(varies_over_tp(v) for v in array_leaves(x)), trace.y_varies, ())
    part = _eval_part(trace)
    closed = part.close({v: _portable(c) for v, c in trace.consts.items()})
    return _function("Y", part, closed, homes, f"Y_stage{last.stage}", None, BuildCache()), trace.y


def with_factors(
    stages: Sequence[Sequence[Layer]],
    links: Sequence[StageLinks],
    data_avals: Mapping[str, jax.ShapeDtypeStruct],
    dtype: Any,
) -> dict[str, jax.ShapeDtypeStruct]:
    """The arrays of a microbatch, and where a model has several losses a factor for the gradient of each that has one
    (:func:`~jaxpipe.stage.model.links.loss_factor`), once a sequence."""
    losses = [
        (layers[k], learns)
        for layers, link in zip(stages, links, strict=True)
        for k, learns in zip(link.losses, link.loss_learns, strict=True)
    ]
    size = next(iter(data_avals.values())).shape[:1] if data_avals else ()
    factors = {loss_factor(layer): jax.ShapeDtypeStruct(size, dtype) for layer, learns in losses if learns}
    return {**data_avals, **(factors if len(losses) > 1 else {})}


def _data_read(
    layers: Sequence[Layer], data_avals: Mapping[str, jax.ShapeDtypeStruct], stage: int
) -> dict[str, jax.ShapeDtypeStruct]:
    wanted = {name for layer in layers for name in (*layer.reads, loss_factor(layer))}
    for layer in layers:
        unknown = [name for name in layer.reads if name not in data_avals]
        if unknown:
            raise StageError(
                f"layer {layer.name!r} (stage {stage}) reads {', '.join(map(repr, unknown))}; the batch has "
                f"{', '.join(map(repr, data_avals)) or 'no arrays'}"
            )
    return {name: jax.ShapeDtypeStruct(v.shape, v.dtype) for name, v in data_avals.items() if name in wanted}


def _traced(spec: TraceSpec, mesh: AnyMesh, cache: BuildCache) -> _Traced:
    """The stage's traces. They are those of an earlier stage where the layers' functions are the same objects, or where what
    was traced is the same program; what layers are called, or are said to be, does not count."""
    signature = _signature(spec, mesh)
    functions = (signature, tuple(function_key(layer.apply) for layer in spec.layers))
    if functions not in cache.traced:
        made = _Traced(spec.stage, trace_joint(spec, mesh), trace_eval(spec, mesh))
        program = (signature, made.joint.key(), made.evaluation.key())
        cache.traced[functions] = cache.traced.setdefault(program, made)
    return cache.traced[functions]


def _signature(spec: TraceSpec, mesh: AnyMesh) -> Hashable:
    """All but the layers' functions that decides a stage's trace and how its arrays lie."""
    leaves, treedef = jax.tree.flatten(spec.x)
    statics = tuple((v.shape, np.dtype(v.dtype), varies_over_tp(v)) if is_array(v) else value_key(v) for v in leaves)
    position = {layer.name: i for i, layer in enumerate(spec.layers)}
    layers = tuple((layer.reads, layer.uses_key, tuple(sorted(layer.tied))) for layer in spec.layers)
    slots = tuple((position[s.layer], s.path, s.shape, s.dtype, s.buffer, s.offset, s.axis) for s in spec.layout.slots)
    shards = (spec.layout.kinds, spec.layout.num_trained, spec.tp)
    aliases = tuple((position[a], p, position[b], q) for (a, p), (b, q) in spec.layout.aliases.items())
    data = tuple((name, v.shape, np.dtype(v.dtype)) for name, v in spec.data.items())
    return (
        layers, slots, shards, aliases, treedef, statics, data, spec.links.kind, np.dtype(spec.acc_dtype),
        tuple(mesh.shape.items()), jax.config.jax_enable_x64,  # type: ignore[attr-defined]
    )  # fmt: skip


def _assemble(
    spec: TraceSpec, traced: _Traced, cut: Split, mesh: AnyMesh, program: Hashable, cache: BuildCache
) -> StageFunctions:
    joint = traced.joint
    consts = {v: _portable(c) for v, c in joint.consts.items()}
    if joint.seed is not None:
        consts[joint.seed] = np.ones((), dtype_of(joint.seed))
    if joint.offset is not None:
        consts[joint.offset] = np.uint32(spec.layer_offset)
    x_varies = tuple(varies_over_tp(v) for v in array_leaves(spec.x))
    homes = _Homes(mesh, spec.layout, x_varies, joint.y_varies, joint.dy_of, _handed_on(cut.parts))
    key = (program, mesh, spec.layer_offset if spec.uses_key else None)

    def compiled(op: str, part: Part, consts: Mapping[Var, Any]) -> StageFunction:
        closed = part.close(consts)
        dump.dump("jaxpr", f"stage{spec.stage}-{op}", lambda: str(closed))
        return _function(op, part, closed, homes, f"{op}_stage{traced.stage}", (*key, op), cache)

    functions = {op: compiled(op, part, consts) for op, part in cut.parts.items()}
    evaluation = {v: _portable(c) for v, c in traced.evaluation.consts.items()}
    y = joint.y
    leaving = [homes.aval(Port("y", i), v) for i, v in enumerate(array_leaves(y))]
    y_global = fill(y, leaving) if y is not None else None
    x_avals = tuple(homes.entering(i, v) for i, v in enumerate(array_leaves(spec.x)))
    layout = spec.layout
    built = StageFunctions(
        stage=spec.stage,
        functions=functions,
        evaluation=compiled("E", _eval_part(traced.evaluation), evaluation),
        x=spec.x,
        y=y_global,
        x_avals=x_avals,
        y_avals=tuple(array_leaves(y_global)),
        links=spec.links,
        data_names=tuple(spec.data),
        uses_key=spec.uses_key,
        layout=layout,
        param_avals=tuple(homes.aval(Port("param", i), b) for i, b in enumerate(layout.buffers)),
        acc_avals=tuple(homes.aval(Port("acc", i), b) for i, b in enumerate(layout.acc_avals(spec.acc_dtype))),
        **_sizes(cut.parts),
        boundary_bytes=sum(aval_bytes(v) for v in array_leaves(y)),
        param_bytes=sum(aval_bytes(b) for b in layout.buffers),
        flops={op: jaxpr_flops(f.jaxpr) for op, f in functions.items()},
        notes=cut.notes,
        metrics=joint.metrics,
        eval_metrics=traced.evaluation.metrics,
    )
    built = with_offload(built)
    dump.dump("stage", f"stage{spec.stage}", lambda: str(built))
    return built


def _eval_part(trace: StageTrace) -> Part:
    ports = {v: p for v, p in trace.inputs.items() if p.kind != "acc"}
    read = {a for eqn in trace.eqns for a in eqn.invars if isinstance(a, Var)}
    read.update(a for _, a in trace.outputs if isinstance(a, Var))
    used = [(p, v) for v, p in ports.items() if v in read]
    return Part(
        tuple(p for p, _ in used),
        tuple(v for _, v in used),
        tuple(p for p, _ in trace.outputs),
        tuple(a for _, a in trace.outputs),
        trace.eqns,
    )


def _portable(const: Any) -> Any:
    """A closed-over array as NumPy, so that it is tied to no device."""
    if isinstance(const, jax.core.Tracer):
        raise StageError("a layer closes over a traced value; pass it through params, x or the batch instead")
    if isinstance(const, jax.Array) and not jnp.issubdtype(const.dtype, jax.dtypes.prng_key):
        return np.asarray(const)
    return const


def _sizes(parts: Mapping[str, Part]) -> dict[str, Any]:
    """Bytes held between the operations, per device."""
    held = {
        op: {p: aval_bytes(v.aval) for p, v in zip(parts[op].inputs, parts[op].invars, strict=True)}
        for op in ("B", "W")
    }
    kept = ("x", "res")
    for_w = {p: n for p, n in held["W"].items() if p.kind in (*kept, "wres")}
    return {
        "residual_bytes": sum({p: n for h in held.values() for p, n in h.items() if p.kind in kept}.values()),
        "w_residual_bytes": sum(for_w.values()),
        "cotangent_bytes": sum(n for p, n in for_w.items() if p.kind == "wres"),
    }


@dataclass(frozen=True, slots=True)
class _Homes:
    """How the arrays of a stage's ports lie on the devices of its rank. ``x_varies``, ``y_varies``: by array leaf of what
    enters and leaves, whether it differs between ``tp`` shards. ``dy_of`` as in :class:`StageTrace`. ``handed_on``: results
    that are arguments → those."""

    mesh: AnyMesh
    layout: ParamLayout
    x_varies: tuple[bool, ...]
    y_varies: tuple[bool, ...]
    dy_of: tuple[int, ...]
    handed_on: Mapping[Port, Port] = field(default_factory=dict)

    def axes(self, port: Port) -> tuple[str, ...]:
        """The mesh axes along which an array differs."""
        match port.kind:
            case "param":
                return param_axes(self.layout, port.index)
            case "key" | "token":
                return ()
            case "data" | "loss":
                return (DP,)
            case "x" | "dx":
                return boundary_axes(self.x_varies[port.index])
            case "y":
                return boundary_axes(self.y_varies[port.index])
            case "dy":
                return boundary_axes(self.y_varies[self.dy_of[port.index]])
            case "acc":
                return acc_axes(self.layout, port.index)
            case "res" | "wres" | "user" | "state":
                source = self.handed_on.get(port)
                return (DP, TP) if source is None else self.axes(source)

    def entering(self, index: int, whole: Any) -> jax.ShapeDtypeStruct:
        """Array leaf ``index`` of what enters the stage, as it lies on this rank."""
        home = device_sharded(self.mesh, self.axes(Port("x", index))) if whole.shape else replicated(self.mesh)
        return jax.ShapeDtypeStruct(whole.shape, whole.dtype, sharding=home)

    def aval(self, port: Port, local: Any) -> jax.ShapeDtypeStruct:
        """Shape and sharding over the rank of what is ``local`` on each device."""
        axes, shape = self.axes(port), tuple(local.shape)
        devices = math.prod(self.mesh.shape[a] for a in axes)
        if not axes or (not shape and devices == 1):
            return jax.ShapeDtypeStruct(shape, local.dtype, sharding=replicated(self.mesh))
        shape = (devices * shape[0], *shape[1:]) if shape else (devices,)
        return jax.ShapeDtypeStruct(shape, local.dtype, sharding=device_sharded(self.mesh, axes))


def _handed_on(parts: Mapping[str, Part]) -> dict[Port, Port]:
    """Residuals that are arguments of the function that saves them, with those: they stay where they are."""
    found: dict[Port, Port] = {}
    for op in ("F", "B"):
        ports = dict(zip(parts[op].invars, parts[op].inputs, strict=True))
        found.update(
            (p, ports[a])
            for p, a in zip(parts[op].outputs, parts[op].outvars, strict=True)
            if p.kind in ("res", "wres") and isinstance(a, Var) and a in ports
        )
    return found


def _function(
    op: str,
    part: Part,
    closed: ClosedJaxpr,
    homes: _Homes,
    name: str,
    key: Hashable,
    cache: BuildCache,
) -> StageFunction:
    avals_in = tuple(homes.aval(p, v.aval) for p, v in zip(part.inputs, part.invars, strict=True))
    avals_out = tuple(homes.aval(p, a.aval) for p, a in zip(part.outputs, part.outvars, strict=True))
    donated = tuple(k for k, p in enumerate(part.inputs) if p.kind == "acc")
    at = {v: k for k, v in enumerate(part.invars)}
    forwarded = {
        k: at[a] for k, a in enumerate(part.outvars) if isinstance(a, Var) and a in at and at[a] not in donated
    }
    jitted = cache.jitted.get(key)
    if jitted is None:
        rest = [k for k in range(len(part.outvars)) if k not in forwarded]
        results, shards = [avals_out[k] for k in rest], homes.mesh.shape[TP]
        program = closed
        if donated and shards > 1:  # weight gradients go under collectives; its jaxpr stays plain, for braids to weave
            program = weave([closed], shards=shards).jaxpr
        jitted = jit_per_shard(program, avals_in, results, rest, homes.mesh, donated, name, gpu_options(homes.mesh))
        cache.jitted[key] = jitted
    call = jitted if not forwarded else forwarding(jitted, forwarded, len(part.outvars))
    return StageFunction(
        part.inputs, part.outputs, avals_in, avals_out, donated, closed, call, jitted, forwarded, op=op
    )


def gpu_options(mesh: AnyMesh) -> Mapping[str, bool | int | str]:
    """Compiler options of functions with tensor-parallel collectives, by what ``mesh`` is made of."""
    if mesh.shape[TP] == 1 or not isinstance(mesh, Mesh) or mesh.devices.flat[0].platform not in ("gpu", "cuda"):
        return {}
    return GPU_OVERLAP_OPTIONS


def jit_per_shard(
    closed: ClosedJaxpr,
    avals_in: Sequence[jax.ShapeDtypeStruct],
    avals_out: Sequence[jax.ShapeDtypeStruct],
    results: Sequence[int],
    mesh: AnyMesh,
    donated: tuple[int, ...],
    name: str,
    compiler_options: Mapping[str, bool | int | str] = MappingProxyType({}),
) -> Any:
    shapes = [v.aval.shape for v in closed.jaxpr.invars]

    def run(*arrays: Any) -> tuple[Any, ...]:
        local = [a if a.shape == shape else a.reshape(shape) for a, shape in zip(arrays, shapes, strict=True)]
        out = eval_jaxpr(closed.jaxpr, closed.consts, *local)
        chosen = [jnp.asarray(out[k]) for k in results]
        return tuple(v if v.ndim == len(a.shape) else v.reshape(1) for v, a in zip(chosen, avals_out, strict=True))

    run.__name__ = run.__qualname__ = name
    specs = [tuple(_spec(a) for a in avals) for avals in (avals_in, avals_out)]
    mapped = jax.shard_map(run, mesh=mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False)
    return jax.jit(mapped, donate_argnums=donated, compiler_options=dict(compiler_options) or None)


def _spec(aval: jax.ShapeDtypeStruct) -> P:
    sharding = aval.sharding
    assert isinstance(sharding, NamedSharding)
    return sharding.spec


def forwarding(
    jitted: Callable[..., tuple[jax.Array, ...]], forwarded: Mapping[int, int], count: int
) -> Callable[..., tuple[jax.Array, ...]]:
    """A call that hands arguments on as results without copying them."""
    rest = [k for k in range(count) if k not in forwarded]
    if not rest:
        return lambda *arrays: tuple(arrays[forwarded[k]] for k in range(count))
    source = tuple((True, forwarded[k]) if k in forwarded else (False, rest.index(k)) for k in range(count))

    def call(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        made = jitted(*arrays)
        return tuple(arrays[i] if given else made[i] for given, i in source)

    return call
