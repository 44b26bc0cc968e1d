"""Turns layers into compiled functions: traces them, splits the trace, jits on the rank's submesh.

:func:`build_stage_functions` makes one stage, :func:`build_all` all, handing what leaves a stage to those that take it. Stages
that compute the same (:mod:`jaxpipe.stage.identity`) are split once per :class:`BuildCache`, and traced once where their layers
are the same functions; on one submesh they also share compiled code (unless a layer draws random numbers: its index in the
model is part of the program).

Calls are positional over flat lists of arrays. How each lies on the submesh follows from its port (:class:`Homes`): keys and
parameters that are the same on all shards are replicated, split parameters stacked over ``tp``; batch arrays, losses and
activations that are the same on all ``tp`` shards are split over ``dp`` on axis 0; all else (residuals, accumulators of
parameters that the shards divide, sequence-parallel activations) is each device's own, stacked over ``dp`` and ``tp`` on axis
0. So an accumulator holds what each device summed, and the update adds them up. Scalars become arrays with an entry a device.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxpipe import dump
from jaxpipe._jax_compat import ClosedJaxpr, Var, aval_bytes, dtype_of, eval_jaxpr, shape_of, variables
from jaxpipe.axes import ONE_SHARD, RankMesh, exchanging
from jaxpipe.errors import StageError
from jaxpipe.mesh import AnyMesh, spanning_options, spec_of, varies_beside_data, with_several
from jaxpipe.stage.compiled.cpu import OPTIONS, for_cpu
from jaxpipe.stage.functions import IN_PLACE, SHARED, Homes, Port, StageFunction, StageFunctions, with_offload
from jaxpipe.stage.identity import ById, function_key, value_key
from jaxpipe.stage.jaxprs import array_leaves, fill, is_array, jaxpr_flops
from jaxpipe.stage.model.layer import Layer, Params
from jaxpipe.stage.model.params import ParamLayout, stage_params
from jaxpipe.stage.model.plan import StageLinks, layer_loss_factor, links_of, loss_factor
from jaxpipe.stage.split.graph import StagePart
from jaxpipe.stage.split.policies import ingredients, per_stage
from jaxpipe.stage.split.recompute import policy
from jaxpipe.stage.split.splitter import Split, split
from jaxpipe.stage.split.trace import Calls, StageTrace, TraceSpec, leaves_read, trace_eval, trace_joint
from jaxpipe.stage.weave.weaver import GPU_OVERLAP_OPTIONS, weave


@dataclass(frozen=True, slots=True)
class _Traced:
    """The traces that stages which compute the same share, whatever the recompute policy; ``splits`` by policy, made on demand.
    ``stage``: the first of them, by which their programs are called: equal ones under equal names are found in JAX's
    compilation cache on devices of other ranks too (where its keys leave the devices out, which is on GPUs)."""

    stage: int
    joint: StageTrace
    evaluation: StageTrace | None
    splits: dict[str, Split] = field(default_factory=dict)


@dataclass(slots=True)
class BuildCache:
    """Traces by what decides them, and by what they compute; jitted functions by trace, policy and submesh; what is known of
    layers' functions. One per run; pass it to every build."""

    traced: dict[Hashable, _Traced] = field(default_factory=dict)
    jitted: dict[Hashable, Any] = field(default_factory=dict)
    calls: Calls = field(default_factory=Calls)


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
    tp: RankMesh = ONE_SHARD,
    evaluated: bool = True,
) -> StageFunctions:
    """Build the functions of one stage.

    Args:
        layers: of the stage, in order.
        layer_offset: index in the model of the first of them.
        param_avals: parameters by layer name, as shapes (or arrays), in the dtype the stage computes in; may hold the whole
            model's. Leaves tied to layers of other stages are taken from their owners where the layer does not hold a copy.
        x: what enters (:meth:`~jaxpipe.stage.model.plan.StageLinks.entering`). Leaves are ``ShapeDtypeStruct`` (global shapes)
            or static values.
        data_avals: all arrays of a microbatch by name, global shapes; the stage takes those its layers read.
        mesh: the rank's submesh with axes ``dp``, ``cp`` and ``tp``.
        links: where the layers' inputs come from, and where what leaves goes.
        recompute: name of a policy in :data:`jaxpipe.stage.split.policies.POLICIES`, or several joined by ``+``.
        acc_dtype: dtype of gradient accumulators, at least (float64 parameters get float64).
        cache: shares traces and compiled functions between stages.
        tp: how the layers divide their work over the axes ``tp`` and ``cp`` of ``mesh``.
        evaluated: False where nobody will evaluate: F stands for E then.

    Raises:
        StageError: parameters, batch arrays or boundary values don't fit, a layer fails, or it can't be split.
        ConfigError: a layer can't be divided over so many shards.
    """
    assert tp.resized(mesh.shape).one_replica == tp.one_replica, f"a submesh of {dict(mesh.shape)} for {tp}"
    cache = cache if cache is not None else BuildCache()
    layout = ParamLayout.build(layers, stage_params(layers, param_avals), tp=tp)
    data = _data_read(layers, data_avals, stage)
    spec = TraceSpec(stage, tuple(layers), layer_offset, layout, x, data, links, acc_dtype, tp, cache.calls)
    saveable = policy(recompute)
    traced = _traced(spec, mesh, cache, evaluated)
    name = "+".join(ingredients(recompute))
    if name not in traced.splits:
        traced.splits[name] = split(traced.joint, saveable)
    return _assemble(spec, traced, traced.splits[name], mesh, (ById(traced), name), cache)


def build_all(
    stages: Sequence[Sequence[Layer]],
    param_avals: Mapping[str, Params],
    data_avals: Mapping[str, jax.ShapeDtypeStruct],
    meshes: Sequence[AnyMesh],
    recompute: str | Sequence[str] = "none",
    acc_dtype: Any = jnp.float32,
    cache: BuildCache | None = None,
    tp: RankMesh = ONE_SHARD,
    first: int = 0,
) -> tuple[StageFunctions, ...]:
    """Build the functions of all stages of a model; ``meshes`` and (if not one name) ``recompute`` have an entry a stage.
    ``first``: the number of the first layer.

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
    offset = first
    for s, (layers, links) in enumerate(zip(stages, all_links, strict=True)):
        built.append(
            build_stage_functions(
                layers, offset, param_avals, links.entering(leaving), data_avals, meshes[s], s, links, policies[s],
                acc_dtype, cache, tp,
            )
        )  # fmt: skip
        leaving.append(links.exits(built[-1].y))
        offset += len(layers)
    # Known only when all are built: what a stage's readers take follows from their layers, and its leaves from its own trace.
    read = [leaves_read(f.links, f.y) for f in built]
    x_from = [
        tuple((t, leaf) for t, reads in enumerate(read) for reader, leaf in reads if reader == s)
        for s in range(len(built))
    ]
    dy_from = [tuple((t, x_from[t].index((s, leaf))) for t, leaf in reads) for s, reads in enumerate(read)]
    return tuple(replace(f, x_from=x_from[s], dy_from=dy_from[s]) for s, f in enumerate(built))


def build_output(
    layers: Sequence[Layer],
    last: StageFunctions,
    mesh: AnyMesh,
    data_avals: Mapping[str, jax.ShapeDtypeStruct],
    tp: RankMesh = ONE_SHARD,
) -> tuple[StageFunction, Any]:
    """Build the function ``Y`` of the last stage, which returns what the loss takes in evaluation; and return that as a pytree
    of per-shard shapes and static values. ``last``: the stage's functions; the rest as in :func:`build_stage_functions`."""
    data = {name: data_avals[name] for name in last.data_names if name in data_avals}
    links = last.links.without_loss
    x = last.links.members(last.x)[0]
    spec = TraceSpec(last.stage, tuple(layers[:-1]), 0, last.layout, x, data, links, jnp.float32, tp)
    trace = trace_eval(spec, mesh)
    homes = Homes(mesh, last.layout, spec.x_varies, trace.y_varies)
    part = _eval_part(trace)
    closed = part.close({v: _portable(c) for v, c in trace.consts.items()})
    return _function("Y", part, closed, homes, f"Y_stage{last.stage}", None, BuildCache()), trace.y


def with_factors(
    stages: Sequence[Sequence[Layer]],
    links: Sequence[StageLinks],
    data_avals: Mapping[str, jax.ShapeDtypeStruct],
    dtype: Any,
) -> dict[str, jax.ShapeDtypeStruct]:
    """Add to the arrays of a microbatch, where a model has several losses, a factor for the gradient of each that has one
    (:func:`~jaxpipe.stage.model.plan.loss_factor`), once a sequence."""
    losses = [
        (layers[k], learns)
        for layers, link in zip(stages, links, strict=True)
        for k, learns in zip(link.losses, link.loss_learns, strict=True)
    ]
    size = next(iter(data_avals.values())).shape[:1] if data_avals else ()
    names = [loss_factor(layer) for layer, learns in losses if learns] if len(losses) > 1 else []
    names += [layer_loss_factor(name) for layers in stages for layer in layers for name in layer.losses]
    return {**data_avals, **dict.fromkeys(names, jax.ShapeDtypeStruct(size, dtype))}


def _data_read(
    layers: Sequence[Layer], data_avals: Mapping[str, jax.ShapeDtypeStruct], stage: int
) -> dict[str, jax.ShapeDtypeStruct]:
    names = {
        name for layer in layers for name in (*layer.reads, loss_factor(layer), *map(layer_loss_factor, layer.losses))
    }
    for layer in layers:
        unknown = [name for name in layer.reads if name not in data_avals]
        if unknown:
            raise StageError(
                f"layer {layer.name!r} (stage {stage}) reads {', '.join(map(repr, unknown))}; the batch has "
                f"{', '.join(map(repr, data_avals)) or 'no arrays'}"
            )
    return {name: jax.ShapeDtypeStruct(v.shape, v.dtype) for name, v in data_avals.items() if name in names}


def _traced(spec: TraceSpec, mesh: AnyMesh, cache: BuildCache, evaluated: bool) -> _Traced:
    """Return the stage's traces, without evaluation if it is not ``evaluated``. They are those of an earlier stage where the
    layers' functions are the same objects, or where what was traced is the same program; what layers are called, or are said to
    be, does not count."""
    signature = _signature(spec, mesh)
    functions = (signature, tuple(function_key(layer.apply) for layer in spec.layers))
    if functions not in cache.traced:
        traced = _Traced(spec.stage, trace_joint(spec, mesh), trace_eval(spec, mesh) if evaluated else None)
        # Two lookups: by functions saves the trace, by program saves splitting and compiling. A stage that nobody will run
        # (no evaluation) compiles nothing that others could share.
        if traced.evaluation is not None:
            program = (signature, traced.joint.key(), traced.evaluation.key())
            traced = cache.traced.setdefault(program, traced)
        cache.traced[functions] = traced
    return cache.traced[functions]


def _signature(spec: TraceSpec, mesh: AnyMesh) -> Hashable:
    """Return a key of all but the layers' functions that decides a stage's trace and how its arrays lie."""
    leaves, treedef = jax.tree.flatten(spec.x)
    statics = tuple(
        (v.shape, np.dtype(v.dtype), varies_beside_data(v)) if is_array(v) else value_key(v) for v in leaves
    )
    position = {layer.name: i for i, layer in enumerate(spec.layers)}
    layers = tuple((x.reads, x.uses_key, tuple(sorted(x.tied)), tuple(x.losses)) for x in spec.layers)
    slots = tuple((position[s.layer], s.path, s.shape, s.dtype, s.buffer, s.offset, s.axis) for s in spec.layout.slots)
    shards = (spec.layout.kinds, spec.layout.num_trained, spec.tp)
    aliases = tuple((position[a], p, position[b], q) for (a, p), (b, q) in spec.layout.aliases.items())
    data = tuple((name, v.shape, np.dtype(v.dtype)) for name, v in spec.data.items())
    return (
        layers, slots, shards, aliases, treedef, statics, data, spec.links.kind, np.dtype(spec.acc_dtype),
        tuple(mesh.shape.items()), mesh.abstract_mesh.abstract_device, jax.config.jax_enable_x64,  # type: ignore[attr-defined,unused-ignore]
    )  # fmt: skip


def _assemble(
    spec: TraceSpec, traced: _Traced, cut: Split, mesh: AnyMesh, program: Hashable, cache: BuildCache
) -> StageFunctions:
    joint = traced.joint
    # Seed and offset are constants only now: the same trace serves stages at other places in the model.
    consts = {v: _portable(c) for v, c in joint.consts.items()}
    if joint.seed is not None:
        consts[joint.seed] = np.ones((), dtype_of(joint.seed))
    if joint.offset is not None:
        consts[joint.offset] = np.uint32(spec.layer_offset % 2**32)
    homes = Homes(mesh, spec.layout, spec.x_varies, joint.y_varies, joint.dy_of, _handed_on(cut.parts))
    # The offset is compiled in, but only read where layers draw: other stages share code wherever they stand.
    key = (program, mesh, spec.layer_offset if spec.uses_key else None)

    def compiled(op: str, part: StagePart, consts: Mapping[Var, Any]) -> StageFunction:
        closed = part.close(consts)
        dump.dump("jaxpr", f"stage{spec.stage}-{op}", lambda: str(closed))
        return _function(op, part, closed, homes, f"{op}_stage{traced.stage}", (*key, op), cache)

    functions = {op: compiled(op, part, consts) for op, part in cut.parts.items()}
    evaluation, ends = functions["F"], traced.evaluation
    if ends is not None:
        evaluation = compiled("E", _eval_part(ends), {v: _portable(c) for v, c in ends.consts.items()})
    layout = spec.layout
    built = StageFunctions(
        stage=spec.stage,
        functions=functions,
        evaluation=evaluation,
        x=fill(spec.x, [homes.entering(Port("x", i), v) for i, v in enumerate(array_leaves(spec.x))]),
        y=fill(joint.y, [homes.aval(Port("y", i), v) for i, v in enumerate(array_leaves(joint.y))]),
        links=spec.links,
        data_names=tuple(spec.data),
        uses_key=spec.uses_key,
        layout=layout,
        param_avals=tuple(homes.aval(Port("param", i), b) for i, b in enumerate(layout.buffers)),
        acc_avals=tuple(homes.aval(Port("acc", i), b) for i, b in enumerate(layout.acc_avals(spec.acc_dtype))),
        **held_bytes({op: (part.inputs, part.invars) for op, part in cut.parts.items()}),
        boundary_bytes=sum(aval_bytes(v) for v in array_leaves(joint.y)),
        param_bytes=sum(aval_bytes(b) for b in layout.buffers),
        flops={op: jaxpr_flops(f.jaxpr) for op, f in functions.items()},
        notes=cut.notes,
        metrics=joint.metrics,
        eval_metrics=(ends or joint).metrics,
        sides=joint.sides,
    )
    built = with_offload(built)
    dump.dump("stage", f"stage{spec.stage}", lambda: str(built))
    return built


def _eval_part(trace: StageTrace) -> StagePart:
    ports, results = zip(*trace.outputs, strict=True)
    read = set(variables([*(a for eqn in trace.eqns for a in eqn.invars), *results]))
    used = {v: p for v, p in trace.inputs.items() if v in read}
    return StagePart(tuple(used.values()), tuple(used), ports, results, trace.eqns)


def _portable(const: Any) -> Any:
    """Convert a closed-over array to NumPy, so that it is tied to no device."""
    if isinstance(const, jax.core.Tracer):
        raise StageError("a layer closes over a traced value; pass it through params, x or the batch instead")
    if isinstance(const, jax.Array) and not jnp.issubdtype(const.dtype, jax.dtypes.prng_key):
        return np.asarray(const)
    return const


def held_bytes(inputs: Mapping[str, tuple[Sequence[Port], Sequence[Var]]]) -> dict[str, Any]:
    """Return the bytes held between the operations, per device, by field of :class:`StageFunctions`; ``inputs``: of each
    operation."""
    held = {op: {p: aval_bytes(v.aval) for p, v in zip(*inputs[op], strict=True)} for op in ("B", "W")}
    residual_kinds = ("x", "res")
    for_w = {p: n for p, n in held["W"].items() if p.kind in (*residual_kinds, "wres")}
    return {
        "residual_bytes": sum({p: n for h in held.values() for p, n in h.items() if p.kind in residual_kinds}.values()),
        "w_residual_bytes": sum(for_w.values()),
        "cotangent_bytes": sum(n for p, n in for_w.items() if p.kind == "wres"),
    }


def _handed_on(parts: Mapping[str, StagePart]) -> dict[Port, Port]:
    """Return the residuals that are arguments of the function that saves them, with those: they stay where they are."""
    source_of: dict[Port, Port] = {}
    for part in parts.values():
        ports = dict(zip(part.invars, part.inputs, strict=True))
        results = zip(part.outputs, part.outvars, strict=True)
        source_of |= {
            p: ports[v] for p, v in results if p.kind in ("res", "wres") and isinstance(v, Var) and v in ports
        }
    return source_of


def _function(
    op: str,
    part: StagePart,
    closed: ClosedJaxpr,
    homes: Homes,
    name: str,
    key: Hashable,
    cache: BuildCache,
) -> StageFunction:
    avals_in = tuple(homes.aval(p, v.aval) for p, v in zip(part.inputs, part.invars, strict=True))
    avals_out = tuple(homes.aval(p, a.aval) for p, a in zip(part.outputs, part.outvars, strict=True))

    def jit(donated: tuple[int, ...], results: Sequence[int]) -> Any:
        if key not in cache.jitted:

            def woven() -> ClosedJaxpr:
                """Weight gradients go under collectives; the function's jaxpr stays plain, for braids to weave."""
                return weave([closed], homes.mesh.shape).jaxpr

            # What donates adds weight gradients (W, BW), and only those can fill a wait for a collective of the same function.
            order = woven if donated and with_several(homes.mesh, exchanging()) else None
            cache.jitted[key] = jit_per_shard(closed, avals_in, avals_out, results, homes.mesh, donated, name, order)
        return cache.jitted[key]

    calls = compiled(closed, part.inputs, part.outputs, jit)
    return StageFunction(part.inputs, part.outputs, avals_in, avals_out, *calls, op=op)


class _CompiledFields(NamedTuple):
    """The fields of a function (:class:`~jaxpipe.stage.functions.AnyFunction`) that follow from what it is compiled to."""

    donated: tuple[int, ...]
    jaxpr: ClosedJaxpr
    call: Callable[..., tuple[jax.Array, ...]]
    jitted: Any
    forwarded: Mapping[int, int]


def compiled(
    closed: ClosedJaxpr,
    inputs: Sequence[Port],
    outputs: Sequence[Port],
    jit: Callable[[tuple[int, ...], Sequence[int]], Any],
) -> _CompiledFields:
    """Make ``closed`` a function between ports: what it updates is donated, and arguments that are results are handed on, not
    copied, unless they are shared by microbatches. ``jit(donated, results)`` compiles the other results."""
    # A result that is an argument would be a copy out of XLA; handed on in Python it is the same buffer.
    at = {v: k for k, v in enumerate(closed.jaxpr.invars)}
    donated = tuple(k for k, p in enumerate(inputs) if p.kind in IN_PLACE and p in outputs)
    forwarded = {
        k: at[a]
        for k, a in enumerate(closed.jaxpr.outvars)
        if isinstance(a, Var) and a in at and not {inputs[at[a]].kind, outputs[k].kind} & set(SHARED)
    }
    rest = [k for k in range(len(outputs)) if k not in forwarded]
    jitted = jit(donated, rest)
    call = jitted if not forwarded else _forwarding(jitted, forwarded, rest)
    return _CompiledFields(donated, closed, call, jitted, forwarded)


def _forwarding(
    jitted: Callable[..., tuple[jax.Array, ...]], forwarded: Mapping[int, int], rest: Sequence[int]
) -> Callable[..., tuple[jax.Array, ...]]:
    """Return a call that hands arguments on as results without copying them."""
    count = len(rest) + len(forwarded)
    # A function all of whose results are arguments has nothing to compile.
    if not rest:
        return lambda *arrays: tuple(arrays[forwarded[k]] for k in range(count))
    source = tuple((True, forwarded[k]) if k in forwarded else (False, rest.index(k)) for k in range(count))

    def call(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        outputs = jitted(*arrays)
        return tuple(arrays[i] if is_argument else outputs[i] for is_argument, i in source)

    return call


def options_for(mesh: AnyMesh) -> Mapping[str, bool | int | str]:
    """Return the compiler options for the devices of ``mesh``: on GPUs for functions with collectives."""
    if _platform(mesh) == "cpu":
        return OPTIONS
    overlaps = with_several(mesh, exchanging()) and _platform(mesh) in ("gpu", "cuda")
    return {**(GPU_OVERLAP_OPTIONS if overlaps else {}), **spanning_options(mesh)}


def _platform(mesh: AnyMesh) -> str:
    return str(mesh.devices.flat[0].platform) if isinstance(mesh, Mesh) else ""


def jit_per_shard(
    closed: ClosedJaxpr,
    avals_in: Sequence[jax.ShapeDtypeStruct],
    avals_out: Sequence[jax.ShapeDtypeStruct],
    results: Sequence[int],
    mesh: AnyMesh,
    donated: tuple[int, ...],
    name: str,
    reordered: Callable[[], ClosedJaxpr] | None = None,
) -> Any:
    """Jit ``closed``, a program of one shard, over ``mesh``; of its results, which lie as ``avals_out`` say, return only
    ``results``. ``reordered``: makes the program that does the same in another order, called when it is compiled."""
    shapes = [shape_of(v) for v in closed.jaxpr.invars]
    leaving = [avals_out[k] for k in results]

    def run(*arrays: Any) -> tuple[Any, ...]:
        # Inside the traced function, so that programs that never run are neither woven nor rewritten.
        program = closed if reordered is None else reordered()
        program = for_cpu(program) if _platform(mesh) == "cpu" else program
        local = [a if a.shape == shape else a.reshape(shape) for a, shape in zip(arrays, shapes, strict=True)]
        out = eval_jaxpr(program.jaxpr, program.consts, *local)
        chosen = [jnp.asarray(out[k]) for k in results]
        return tuple(v if v.ndim == len(a.shape) else v.reshape(1) for v, a in zip(chosen, leaving, strict=True))

    run.__name__ = run.__qualname__ = name
    specs = [tuple(spec_of(a) for a in avals) for avals in (avals_in, leaving)]
    mapped = jax.shard_map(run, mesh=mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False)
    return jax.jit(mapped, donate_argnums=donated, compiler_options=dict(options_for(mesh)) or None)
