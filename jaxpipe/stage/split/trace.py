"""Traces one stage: its layers become one flat jaxpr of forward pass, gradients and accumulation.

The joint function ``(param buffers, x, data, key, dy, acc) -> (y, new acc, dx)`` is traced per shard inside ``shard_map`` on
the rank's submesh, with varying-axis types on where layers are divided over ``tp`` or ``cp``. Parameters are cast to varying
over ``dp`` and ``cp`` first, so gradients stay per-shard sums and no microbatch pays a reduction. Nothing is executed;
splitting (:mod:`jaxpipe.stage.split.splitter`) cuts the result.

Randomness: a microbatch's key is ``uint32[2]`` (threefry key data); layer ``i`` of the *model* draws from
:func:`layer_key` ``(key, i)``, so results do not depend on the cut. With ``dp > 1`` the shard's index is folded in as well.

What crosses a stage boundary is a pytree: inexact arrays have cotangents, integer and boolean arrays travel without, other
leaves (Python numbers, strings) are recorded while tracing and baked into the next stage. Axis 0 of every array is that of the
parts of the devices along ``dp`` and ``cp``, one after another; one that is not the same on all ``tp`` shards (the types
tell) is per device.

Tensor parallelism: layers are written per shard. Types make the derivative right: where a value that is the same on all shards
meets a shard's own part of a parameter, its cotangent is summed over ``tp``. Parameters whose gradient each shard makes a part
of (``partial``) are cast to varying over ``tp`` as well, so that the sum waits until the end of the step.

What layers return beside ``y`` (:class:`~jaxpipe.stage.model.layer.With`) leaves F as few vectors, behind the other ``loss``
ports, and never B or W, whatever is recomputed there. The sum of such losses of a stage, each times its factor, is one more
result with a cotangent, which leaves nowhere.

A stage that takes several microbatches at once (``StageLinks.span``) has ``x``, ``dx`` and ``data`` ports for each, those of
the first before those of the second; their rows are put together inside the function, so that a shard's are its own.

A model's layers are mostly one function, so each is called as a jitted function (:class:`Calls`) that JAX traces,
differentiates and transposes once, however many layers have it. Flattening (:mod:`jaxpipe.stage.jaxprs`) puts the equations
where the calls are, in the order in which they would be without.

Not modelled here: complex-valued losses, side effects that must stay ordered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
from jax import jit
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from jaxpipe._jax_compat import (
    Atom,
    ClosedJaxpr,
    JaxprEqn,
    Literal,
    Var,
    has_ordered_effects,
    source_line,
    variables,
    vary,
    varying_axes,
)
from jaxpipe.axes import DATA, ONE_SHARD, ROWS, RankMesh
from jaxpipe.errors import StageError
from jaxpipe.mesh import AnyMesh, spec_of, varies_beside_data
from jaxpipe.stage.functions import Homes, Metrics, Port, PortKind, SideResult
from jaxpipe.stage.identity import AtomKeys, equations_key, function_key, value_key
from jaxpipe.stage.jaxprs import FlatJaxpr, array_leaves, called, fill, flatten, is_array, is_inexact
from jaxpipe.stage.model.layer import Layer, LayerContext, Params, With, given_to, split_result
from jaxpipe.stage.model.params import ParamLayout
from jaxpipe.stage.model.plan import StageLinks, layer_loss_factor, loss_factor
from jaxpipe.stage.model.reference import calling, checked_losses
from jaxpipe.stage.split.loops import hoist_fixed
from jaxpipe.stage.split.sums import add_in_products, add_vectors, keep_biases_scaled


@dataclass(slots=True)
class Calls:
    """Jitted functions of layers by what decides their traces, with the pytrees that they return. ``repeated``: keys of the
    functions that are worth it; the others are called as they are. None: all are."""

    traced: dict[Hashable, tuple[Callable[..., list[Any]], list[Any]]] = field(default_factory=dict)
    repeated: Collection[Hashable] | None = None

    def __call__(self, layer: Layer, params: Params, x: Any, context: LayerContext, where: str) -> Any:
        """Call ``layer`` and return its result.

        Raises:
            StageError: as :func:`~jaxpipe.stage.model.reference.calling`.
        """
        if self.repeated is not None and function_key(layer.apply) not in self.repeated:
            return calling(layer, params, x, context, where)
        arguments = (params, x, dict(context.data), context.key)
        leaves, structure = jax.tree.flatten(arguments)
        types = tuple((v.shape, v.dtype, varying_axes(v)) if is_array(v) else value_key(v) for v in leaves)
        kind = (function_key(layer.apply), structure, types, context.train, context.tp)
        if kind not in self.traced:
            skeleton: list[Any] = []
            still = fill(arguments, [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in array_leaves(arguments)])

            # Inside ``jit`` only arrays may flow; whatever else a layer returns is kept beside the function that returned it.
            def arrays_of(arrays: list[Any]) -> list[Any]:
                params, x, data, key = fill(still, arrays)
                y = calling(layer, params, x, LayerContext(data, key, context.train, context.tp), where)
                outputs = array_leaves(y)
                skeleton[:] = [fill(y, [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in outputs])]
                return outputs

            self.traced[kind] = jit(arrays_of), skeleton
        jitted, returned = self.traced[kind]
        arrays = jitted(array_leaves(arguments))
        return fill(returned[0], arrays)


KEY_AVAL = jax.ShapeDtypeStruct((2,), jnp.uint32)
"""A microbatch's random key: raw threefry key data."""

_PREFIX = "jaxpipe"
_SOURCE = f"{_PREFIX}.dy"
_SEED = "seed"
_OWN = Port("loss", -1)
"""The sum of the losses that a stage's layers return beside ``y``, while the stage is traced: no function returns it."""


@dataclass(frozen=True, slots=True)
class TraceSpec:
    """The description of a stage to trace. ``x`` and ``data`` have global shapes; ``data`` holds what the layers read of a
    microbatch, in port order. ``calls``: what is known of layers' functions."""

    stage: int
    layers: tuple[Layer, ...]
    layer_offset: int
    layout: ParamLayout
    x: Any
    data: Mapping[str, jax.ShapeDtypeStruct]
    links: StageLinks
    acc_dtype: Any
    tp: RankMesh = ONE_SHARD
    calls: Calls = field(default_factory=Calls)

    @property
    def uses_key(self) -> bool:
        return any(layer.uses_key for layer in self.layers)

    @property
    def x_varies(self) -> tuple[bool, ...]:
        """Tell, for each array leaf of ``x``, whether it differs between devices that have the same data."""
        return tuple(map(varies_beside_data, array_leaves(self.x)))

    @property
    def x_learns(self) -> list[bool]:
        """Tell, for each array leaf of ``x``, whether it has a cotangent."""
        each = [zip(self.links.entries(x), self.links.x_learns, strict=True) for x in self.links.members(self.x)]
        return [is_inexact(v) and learns for entries in each for entry, learns in entries for v in array_leaves(entry)]

    def whole_x(self, leaves: Sequence[Any]) -> Any:
        """Build the input of the stage from its array ``leaves``, the rows of all its microbatches joined."""
        first, *rest = self.links.members(fill(self.x, leaves))
        columns = zip(*map(array_leaves, (first, *rest)), strict=True)
        return fill(first, [jnp.concatenate(column) for column in columns]) if rest else first

    def whole_data(self, data: Sequence[Any]) -> list[Any]:
        """Return batch arrays in port order, with the rows of all microbatches as one."""
        n = len(self.data)
        return [jnp.concatenate(data[i::n]) for i in range(n)] if self.links.span > 1 else list(data)


@dataclass(frozen=True, slots=True)
class StageTrace:
    """A traced stage, flat. ``inputs``: variable → port. ``outputs``: ``y`` (or ``loss``), ``acc`` and ``dx`` ports with the
    values they return. ``roots``: what B must compute besides ``dx`` (see :func:`trace_joint`). ``layer_inputs``: values that
    enter a layer, in order. ``layer_cotangents``: by position in the stage of a layer (not the last), the cotangents of what it
    returns. ``named``: values marked with ``checkpoint_name`` by the layers. ``offset``: the variable for the
    model-wide index of the stage's first layer. ``seed``: the variable for the loss's own cotangent. ``y``: the pytree that
    leaves, leaves being per-shard ``ShapeDtypeStruct`` or static. ``y_varies``: by array leaf of it, whether it differs between
    ``tp`` shards. ``metrics``: what the loss layer reports besides the loss.
    ``sides``: what layers return beside ``y``. ``dy_of``: by ``dy`` port, the leaf of ``y`` whose
    cotangent it is a part of; -1 where there is none, since the reader hands none back."""

    eqns: tuple[JaxprEqn, ...]
    consts: Mapping[Var, Any]
    inputs: Mapping[Var, Port]
    outputs: tuple[tuple[Port, Atom], ...]
    y: Any
    y_varies: tuple[bool, ...]
    metrics: Metrics
    sides: tuple[SideResult, ...]
    dy_of: tuple[int, ...]
    recomputed: frozenset[int] = frozenset()
    roots: tuple[Atom, ...] = ()
    layer_inputs: tuple[Atom, ...] = ()
    layer_cotangents: tuple[tuple[int, Atom], ...] = ()
    named: tuple[tuple[str, Atom], ...] = ()
    offset: Var | None = None
    seed: Var | None = None

    def key(self) -> Hashable:
        """Return a key that is equal for traces of the same program with the same ports, constants compared by value."""
        keys = AtomKeys()
        constants = tuple((keys.define(v), value_key(c)) for v, c in self.consts.items())
        free = tuple(
            (name, keys.define(v)) for name, v in (("offset", self.offset), ("seed", self.seed)) if v is not None
        )
        entering = tuple((port, keys.define(v)) for v, port in self.inputs.items())
        body = equations_key(self.eqns, keys)
        marks = (
            tuple((port, keys.of(a)) for port, a in self.outputs),
            *(tuple(map(keys.of, atoms)) for atoms in (self.roots, self.layer_inputs)),
            *(tuple((k, keys.of(a)) for k, a in named) for named in (self.layer_cotangents, self.named)),
        )
        leaves, structure = jax.tree.flatten(self.y)
        leaving = tuple((v.shape, str(v.dtype)) if is_array(v) else value_key(v) for v in leaves)
        layers = tuple(map(layer_of, self.eqns))
        return (
            constants,
            free,
            entering,
            body,
            layers,
            self.recomputed,
            marks,
            structure,
            leaving,
            self.y_varies,
            value_key(self.metrics),
            self.sides,
            self.dy_of,
        )


def layer_key(key: jax.Array, layer_index: int | jax.Array) -> jax.Array:
    """Return the key that layer ``layer_index`` (counted over the whole model) draws from; ``key``: uint32[2] of the
    microbatch."""
    return jax.random.fold_in(jax.random.wrap_key_data(key, impl="threefry2x32"), layer_index)


def trace_joint(spec: TraceSpec, mesh: AnyMesh) -> StageTrace:
    """Trace forward, gradients and accumulation of a stage.

    ``roots`` of the result is empty where ``x`` has inexact leaves: B then computes what ``dx`` needs. A stage without (the
    first one) has the cotangents of its first activation behind a trained parameter as roots instead, so that its B walks the
    whole chain down to the embedding and W holds the weight products, as in every other stage.

    Raises:
        StageError: a layer fails, or returns what can't cross a boundary; batch sizes don't divide by ``dp``.
    """
    traced: dict[str, Any] = {}

    def joint(
        buffers: list[Any], x: list[Any], data: list[Any], key: Any, offset: Any, acc: list[Any]
    ) -> tuple[Any, ...]:
        leaves, data = spec.layout.unpack_leaves(_varying_params(spec, buffers)), spec.whole_data(data)
        theta, theta_of = _partition(leaves, [spec.layout.trains(slot) for slot in spec.layout.slots])
        floats, x_of = _partition([vary(leaf, DATA) for leaf in x], spec.x_learns)

        def forward(theta: list[Any], floats: list[Any]) -> tuple[list[Any], list[Any]]:
            params = spec.layout.tree(theta_of(theta))
            entering = spec.whole_x(x_of(floats))
            results, sides = _run_layers(spec, params, entering, data, key, offset, train=True)
            traced.update(_leaving(spec, entering, results, sides))
            # Differentiated as what leaves is, but reported with the other results, which carry no gradient.
            loss_ports = _own_loss(spec, sides, data)
            traced["values"] |= loss_ports
            traced["learning"] += loss_ports
            traced["rest"] = [p for p in traced["values"] if p not in traced["learning"]]
            ys = [traced["values"][p] for p in traced["learning"]]
            return ys, [jax.lax.stop_gradient(traced["values"][p]) for p in traced["rest"]]

        # Only what learns is differentiated: integers and leaves whose reader hands no cotangent back go along as auxiliary
        # values.
        ys, pullback, aux = jax.vjp(forward, theta, floats, has_aux=True)
        ends = dict(zip(traced["learning"], ys, strict=True))
        dtheta, dx = pullback(_cotangents(spec, ends, traced["leaving"]["dy_of"], data))
        traced.pop("values")
        if ends.pop(_OWN, None) is not None:
            ys, traced["learning"] = list(ends.values()), list(ends)
        grads = spec.layout.pack_leaves(theta_of(dtheta, missing=None))
        return ys, aux, dx, [a + g.astype(a.dtype) for a, g in zip(acc, grads, strict=True)]

    return _joint_trace(spec, traced, *_trace(spec, mesh, joint, spec.layout.acc_avals(spec.acc_dtype)))


def trace_eval(spec: TraceSpec, mesh: AnyMesh) -> StageTrace:
    """Trace the evaluation forward pass: ``(param, x, data) -> y | loss`` with ``train=False`` and no keys."""
    traced: dict[str, Any] = {}

    def forward(buffers: list[Any], x: list[Any], data: list[Any], key: Any, offset: Any, acc: list[Any]) -> list[Any]:
        params = spec.layout.tree(spec.layout.unpack_leaves(_varying_params(spec, buffers)))
        entering, data = spec.whole_x(x), spec.whole_data(data)
        results, _ = _run_layers(spec, params, entering, data, key, offset, train=False)
        traced.update(_leaving(spec, entering, results, {}))
        values = traced.pop("values")
        traced["ports"] = sorted(values)
        return [values[p] for p in traced["ports"]]

    flat, inputs, _ = _trace(spec, mesh, forward, [])
    outputs = tuple(zip(traced["ports"], flat.outvars, strict=True))
    return StageTrace(flat.eqns, flat.consts, inputs, outputs, **traced["leaving"])


def _varying_params(spec: TraceSpec, buffers: Sequence[Any]) -> list[Any]:
    """Cast parameter buffers to varying where the gradients of the shards are to stay apart."""
    # The transpose of this cast is the sum over the axes; casting before differentiation keeps that sum out of the stage.
    return [vary(b, spec.layout.axes(k).summed) for k, b in enumerate(buffers)]


def _trace(
    spec: TraceSpec, mesh: AnyMesh, fn: Callable[..., Any], acc: Sequence[jax.ShapeDtypeStruct]
) -> tuple[FlatJaxpr, dict[Var, Port], Var]:
    """Trace ``fn`` per shard; return it with the ports of its inputs and the input that is the layer offset."""
    captured: list[ClosedJaxpr] = []
    homes, offset = Homes(mesh, spec.layout, spec.x_varies), Port("key", 1)
    sources: Mapping[PortKind, tuple[Any, Sequence[Any]]] = {
        "param": (homes.aval, spec.layout.buffers),
        "x": (homes.entering, array_leaves(spec.x)),
        "data": (homes.entering, [*spec.data.values()] * spec.links.span),
        "key": (homes.aval, [KEY_AVAL, jax.ShapeDtypeStruct((), jnp.uint32)]),
        "acc": (homes.aval, acc),
    }
    _check_divisible(spec, mesh)
    args = [[lying(Port(kind, i), a) for i, a in enumerate(arrays)] for kind, (lying, arrays) in sources.items()]

    def body(params: Any, x: Any, data: Any, drawing: Any, acc: Any) -> jax.Array:
        captured.append(jax.make_jaxpr(fn)(params, x, data, *drawing, acc))
        return jnp.zeros(())

    # Types make derivatives right where parameters are divided; elsewhere they would only refuse loops that start from zeros.
    typed, specs = spec.tp.divided, tuple(jax.tree.map(spec_of, args))
    mapped = jax.shard_map(body, mesh=mesh.abstract_mesh, in_specs=specs, out_specs=P(), check_vma=typed)
    jax.eval_shape(mapped, *args)
    flat = flatten(captured[0].jaxpr, captured[0].consts, sources=_SOURCE)
    eqns, recomputed = keep_biases_scaled(*add_vectors(flat.eqns, flat.recomputed))
    flat = replace(flat, eqns=tuple(eqns), recomputed=recomputed)
    _refuse_ordered_effects(spec, flat)
    ports = [Port(kind, i) for kind, (_, arrays) in sources.items() for i in range(len(arrays))]
    variable = dict(zip(ports, flat.invars, strict=True))
    return flat, {v: p for p, v in variable.items() if p != offset}, variable[offset]


def _check_divisible(spec: TraceSpec, mesh: AnyMesh) -> None:
    dp, shards = (math.prod(mesh.shape[a] for a in axes) for axes in (ROWS, DATA))
    arrays = [(f"batch array {n!r}", v) for n, v in spec.data.items()]
    arrays += [(f"input leaf {i} of stage {spec.stage}", v) for i, v in enumerate(array_leaves(spec.x))]
    for what, v in arrays:
        if spec.links.span > 1 and not v.shape:
            raise StageError(f"{what} has no axis 0, on which {spec.links.span} microbatches could be put together")
        if dp > 1 and (not v.shape or v.shape[0] % shards):
            size = v.shape[0] if v.shape else "no axis"
            raise StageError(
                f"{what} of shape {tuple(v.shape)} has {size} on axis 0, which does not divide over dp {dp}; use a "
                f"multiple of {dp}"
            )


def _partition(leaves: Sequence[Any], chosen: Sequence[bool]) -> tuple[list[Any], Callable[..., list[Any]]]:
    """Return the chosen leaves, and a function that puts others in their places between the remaining leaves."""
    rest = [None if c else leaf for c, leaf in zip(chosen, leaves, strict=True)]

    def merge(values: Sequence[Any], missing: Any = rest) -> list[Any]:
        fillers = rest if missing is not None else [None] * len(rest)
        it = iter(values)
        return [next(it) if c else other for c, other in zip(chosen, fillers, strict=True)]

    return [leaf for c, leaf in zip(chosen, leaves, strict=True) if c], merge


def _zeros(like: Any) -> Any:
    return vary(jnp.zeros(like.shape, like.dtype), sorted(varying_axes(like)))


def _leaving(spec: TraceSpec, x: Any, results: Sequence[Any], sides: Mapping[int, With]) -> dict[str, Any]:
    """Return what leaves a stage: ``values`` by port, the ports that are ``learning`` (have a cotangent), and ``leaving``.

    ``x``: what enters; ``results``: what each layer returned; ``sides``: what some returned beside it; ``leaving``: the fields
    of :class:`StageTrace` about it."""
    links = spec.links
    values: dict[Port, Any] = {}
    learning: list[Port] = []
    out = links.leave(results, x)
    learns = [yes for entry, yes in zip(links.exits(out), links.y_learns, strict=False) for _ in array_leaves(entry)]
    for i, leaf in enumerate(array_leaves(out)):
        values[Port("y", i)] = vary(jnp.asarray(leaf), DATA)
        learning += [Port("y", i)] if is_inexact(values[Port("y", i)]) and i < len(learns) and learns[i] else []
    ys = list(values.values())
    silent = {links.readers[n][0] for n in links.silent}
    metrics: dict[str, tuple[int, int]] = {}
    next_output = 2 * len(links.losses)
    for h, position in enumerate(links.losses):
        sums, named = _loss(spec.layers[position].name, results[position])
        at = [2 * h, 2 * h + 1, *range(next_output, next_output + len(sums) - 2)]
        next_output += len(sums) - 2
        values |= {Port("loss", n): v for n, v in zip(at, sums, strict=True)}
        learning.append(Port("loss", 2 * h))
        metrics |= {name: (at[total], at[weight]) for name, (total, weight) in named.items()}
    vectors, side_results = _side_results(spec, sides, next_output)
    values |= vectors
    leaving = {
        "y": fill(out, [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in ys]) if links.leaving else None,
        "y_varies": tuple(not varying_axes(v) <= set(DATA) for v in ys),
        "metrics": metrics,
        "sides": side_results,
        "dy_of": tuple(-1 if t in silent else leaf for t, leaf in leaves_read(links, out)),
    }
    return {"values": values, "learning": learning, "leaving": leaving}


def _side_results(
    spec: TraceSpec, sides: Mapping[int, With], first: int
) -> tuple[dict[Port, Any], tuple[SideResult, ...]]:
    """Return what layers returned beside ``y`` as vectors, by ports from ``first`` on, and where each result is in them."""
    # Few vectors, as each result of a call costs a microsecond: by what becomes of them, and integers apart, which stay exact.
    groups: dict[tuple[bool, bool], list[tuple[int, str, str, Any]]] = {}
    for position, side in sides.items():
        layer = spec.layers[position]
        named = [("loss", n, jnp.stack(_pair(layer, n, x))) for n, x in checked_losses(layer, side).items()]
        for kind, arrays in (("sum", side.sums), ("peak", side.peaks)):
            named += [(kind, n, _own_part(f"{kind} {n!r} of layer {layer.name!r}", x)) for n, x in arrays.items()]
        for kind, name, value in named:
            groups.setdefault((kind == "peak", is_inexact(value)), []).append((position, kind, name, value))
    vectors: dict[Port, Any] = {}
    side_results = []
    for index, (_, members) in enumerate(sorted(groups.items(), key=lambda group: group[0]), first):
        vectors[Port("loss", index)] = jnp.concatenate([jnp.ravel(value) for *_, value in members])
        starts = accumulate((value.size for *_, value in members), initial=0)
        side_results += [SideResult(*m[:3], index, at, m[3].shape) for m, at in zip(members, starts, strict=False)]
    return vectors, tuple(side_results)


def _own_loss(spec: TraceSpec, sides: Mapping[int, With], data: Sequence[Any]) -> dict[Port, Any]:
    """Return the sum of the losses that layers returned beside ``y``, each times the factor that the batch gives for it, as
    :data:`_OWN`; nothing where there are none."""
    factors = dict(zip(spec.data, data, strict=True))
    terms = []
    for position, side in sides.items():
        for name, pair in side.losses.items():
            total, factor = _pair(spec.layers[position], name, pair)[0], factors.get(layer_loss_factor(name))
            terms.append(total if factor is None else total * vary(factor[0], DATA).astype(total.dtype))
    return {_OWN: sum_in_order(terms)} if terms else {}


def _pair(layer: Layer, name: str, pair: tuple[Any, Any]) -> list[Any]:
    return [
        _scalar(f"layer {layer.name!r}", f"{what} of {name!r}", x)
        for what, x in zip(("sum", "weight"), pair, strict=True)
    ]


def leaves_read(links: StageLinks, y: Any) -> list[tuple[int, int]]:
    """Return, by ``dy`` port, the stage that makes it and the leaf of ``y`` whose cotangent it is.

    Ports are in the order of the stages that read, and of the leaves that each of them takes.
    """
    ends = list(accumulate((len(array_leaves(entry)) for entry in links.exits(y)), initial=0))
    return [(t, leaf) for t, reads in links.readers for n in reads for leaf in range(ends[n], ends[n + 1])]


def _cotangents(spec: TraceSpec, ys: Mapping[Port, Any], dy_of: Sequence[int], data: Sequence[Any]) -> list[Any]:
    """Return the cotangent of each of ``ys``: for what leaves, those of all who read it, summed in their order; for a loss, one
    times the factor that the batch gives for it where the model has several."""
    arrays = dict(zip(spec.data, data, strict=True))
    cotangents: list[Any] = []
    seed: Any = None
    for port, v in ys.items():
        if port.kind == "y":
            parts = [k for k, leaf in enumerate(dy_of) if leaf == port.index]
            # Zeros by name: flattening cuts the program there, and what was a constant becomes the dy port.
            terms = [checkpoint_name(_zeros(v), f"{_SOURCE}/{k}") for k in parts]
            cotangents.append(sum_in_order(terms) if terms else _zeros(v))
            continue
        if seed is None:
            seed = checkpoint_name(_zeros(v), f"{_SOURCE}/{_SEED}")
        layer = None if port == _OWN else spec.layers[spec.links.losses[port.index // 2]]
        factor = None if layer is None else arrays.get(loss_factor(layer))
        cotangent = seed.astype(v.dtype)
        cotangents.append(cotangent if factor is None else cotangent * vary(factor[0], DATA).astype(v.dtype))
    return cotangents


def sum_in_order(parts: Sequence[Any] | jax.Array) -> Any:
    """Sum one or more arrays, from the first on: bits must not depend on where the readers are placed."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _run_layers(
    spec: TraceSpec,
    params: Mapping[str, Params],
    x: Any,
    data: Sequence[Any],
    key: Any,
    offset: Any,
    *,
    train: bool,
) -> tuple[list[Any], dict[int, With]]:
    """Run the layers of a stage and return what each of them returns; and by position what some return beside it."""
    entries, arrays = spec.links.entries(x), dict(zip(spec.data, data, strict=True))
    results: list[Any] = []
    sides: dict[int, With] = {}
    for i, (layer, takes) in enumerate(zip(spec.layers, spec.links.takes, strict=True)):
        layer_key_value = layer_key(key, offset + jnp.uint32(i)) if train and layer.uses_key else None
        context = LayerContext({name: arrays[name] for name in layer.reads}, layer_key_value, train, spec.tp)
        layer_input = given_to(layer, [results[k] if k >= 0 else entries[~k] for k in takes])
        # The scope ends up in the names of all equations, backward ones too: that is how :func:`layer_of` finds their layer.
        with jax.named_scope(f"layer{i}"):
            side = split_result(
                spec.calls(layer, dict(params[layer.name]), layer_input, context, f" (stage {spec.stage})")
            )
        y = side.y
        if layer.losses or side.losses or side.sums or side.peaks:
            sides[i] = side
        if train and i + 1 < len(spec.layers) and i not in spec.links.losses:
            y = fill(y, [_mark(leaf, i, k) if is_inexact(leaf) else leaf for k, leaf in enumerate(array_leaves(y))])
        results.append(y)
    return results, sides


def _mark(value: Any, layer: int, leaf: int) -> Any:
    """Name a value between two layers, and its cotangent."""

    # ``checkpoint_name`` is transparent to differentiation, so the cotangent needs a rule of its own to get a name, too.
    @jax.custom_vjp
    def marked(v: Any) -> Any:
        return checkpoint_name(v, f"{_PREFIX}.h/{layer}/{leaf}")

    marked.defvjp(
        lambda v: (checkpoint_name(v, f"{_PREFIX}.h/{layer}/{leaf}"), None),
        lambda _, ct: (checkpoint_name(ct, f"{_PREFIX}.ct/{layer}/{leaf}"),),
    )
    return marked(value)


def _loss(layer: str, out: Any) -> tuple[list[Any], Metrics]:
    """Return what a loss layer returned, as float scalars in the order of ``loss`` ports, and which of them are metrics."""
    if not (isinstance(out, tuple) and len(out) in (2, 3) and (len(out) == 2 or isinstance(out[2], Mapping))):
        raise StageError(
            f"the loss layer {layer!r} (no layer takes it) returns {_described(out)}; want (loss_sum, weight_sum), two float "
            "scalars, and optionally a dict of metrics"
        )
    named = {"loss_sum": out[0], "weight_sum": out[1]}
    metrics: dict[str, tuple[int, int]] = {}
    for name, value in (out[2] if len(out) == 3 else {}).items():
        pair = value if isinstance(value, tuple) else (value,)
        if not isinstance(name, str) or len(pair) > 2:
            raise StageError(
                f"the loss layer {layer!r} returns the metric {name!r} as {_described(value)}; want a scalar sum, or a pair "
                "(sum, weight), by a string"
            )
        if name in ("loss", "weight"):
            raise StageError(
                f"the loss layer {layer!r} returns a metric {name!r}, which is what evaluations call their own"
            )
        metrics[name] = (len(named), len(named) + 1 if len(pair) == 2 else 1)
        named |= dict(zip((f"metric {name!r}", f"the weight of metric {name!r}"), pair, strict=False))
    return [_scalar(f"the loss layer {layer!r}", what, value) for what, value in named.items()], metrics


def _described(out: Any) -> str:
    """Describe what a layer returned, in a user's words."""
    if isinstance(out, tuple):
        return f"({', '.join(map(_described, out))})"
    if hasattr(out, "shape") and hasattr(out, "dtype"):
        return "a scalar" if out.shape == () else f"an array of shape {tuple(out.shape)}"
    return f"a {type(out).__name__}"


def _scalar(layer: str, what: str, value: Any) -> Any:
    """Cast one result of a layer to a float scalar that each ``dp`` shard has its own part of."""
    value = jnp.asarray(value)
    if value.shape != ():
        raise StageError(f"{what} of {layer} has shape {value.shape}; want a scalar: sum it over the microbatch")
    return _own_part(f"{what} of {layer}", value.astype(jnp.promote_types(value.dtype, jnp.float32)))


def _own_part(what: str, value: Any) -> Any:
    """Return an array that each ``dp`` shard has its own part of, as numbers of at least 32 bits.

    Raises:
        StageError: shards that have the same positions return different ones.
    """
    value = jnp.asarray(value)
    if shards := varying_axes(value) - set(DATA):
        raise StageError(f"{what} differs between shards; sum it over {' and '.join(shards)!r} in the layer")
    least = jnp.float32 if is_inexact(value) else jnp.int32
    return vary(value.astype(jnp.promote_types(value.dtype, least)), DATA)


def _refuse_ordered_effects(spec: TraceSpec, flat: FlatJaxpr) -> None:
    for eqn in flat.eqns:
        if has_ordered_effects(eqn):
            raise StageError(
                f"stage {spec.stage}: {eqn.primitive.name} at {source_line(eqn)} in {where(spec.layers, eqn)} has ordered "
                "effects, which can't be kept in order across F, B and W; use ordered=False or remove it"
            )


def where(layers: Sequence[Layer], eqn: JaxprEqn) -> str:
    """Name the layer an equation came from, for messages."""
    i = layer_of(eqn)
    return f"layer {layers[i].name!r}" if i is not None and i < len(layers) else "the stage"


def layer_of(eqn: JaxprEqn) -> int | None:
    """Return the position in the stage of the layer that an equation (forward or backward) came from."""
    for part in str(eqn.source_info.name_stack).replace("(", "/").replace(")", "/").split("/"):
        if part.startswith("layer") and part[5:].isdigit():
            return int(part[5:])
    return None


def _joint_trace(
    spec: TraceSpec, traced: Mapping[str, Any], flat: FlatJaxpr, inputs: dict[Var, Port], offset: Var
) -> StageTrace:
    fixed = {*flat.consts, offset, *(v for v, p in inputs.items() if p.kind == "param")}
    # Before anything is cut: a scan that returns its weights as residuals would tie parameters to the microbatch.
    eqns, recomputed, renamed = hoist_fixed(flat.eqns, flat.recomputed, fixed.__contains__)
    outvars = [called(renamed, a) for a in flat.outvars]
    names = [(name, called(renamed, a)) for name, a in flat.names]
    ports = [*traced["learning"], *traced["rest"]]
    ports += [Port("dx", i) for i, learns in enumerate(spec.x_learns) if learns]
    ports += [Port("acc", i) for i in range(spec.layout.num_trained)]
    sums = [a for p, a in zip(ports, outvars, strict=True) if p.kind == "acc"]
    read_elsewhere = set(variables([*outvars, *(a for _, a in names)]))
    eqns, recomputed = add_in_products(eqns, recomputed, sums, read_elsewhere)
    sources = {name.split("/")[1]: v for name, v in names if name.startswith(_SOURCE) and isinstance(v, Var)}
    seed = sources.pop(_SEED, None)
    inputs |= {v: Port("dy", int(which)) for which, v in sources.items()}
    cotangents = tuple((int(name.split("/")[1]), a) for name, a in names if name.startswith(f"{_PREFIX}.ct/"))
    return StageTrace(
        tuple(eqns),
        flat.consts,
        inputs,
        tuple(zip(ports, outvars, strict=True)),
        **traced["leaving"],
        recomputed=recomputed,
        roots=() if any(spec.x_learns) else _first_cotangents(cotangents, _first_trained(spec)),
        layer_inputs=tuple(a for name, a in names if name.startswith(f"{_PREFIX}.h/")),
        layer_cotangents=cotangents,
        named=tuple((name, a) for name, a in names if not name.startswith(f"{_PREFIX}.")),
        offset=offset,
        seed=seed,
    )


def _first_trained(spec: TraceSpec) -> list[int]:
    """Return the positions in the stage of the layers with a parameter that is trained (or tied) and none before them."""
    slots = {slot.layer for slot in spec.layout.slots if spec.layout.trains(slot)}
    trained = slots | {a for a, _ in spec.layout.aliases}
    behind: list[bool] = []
    positions = []
    for i, (layer, takes) in enumerate(zip(spec.layers, spec.links.takes, strict=True)):
        earlier = any(behind[k] for k in takes if k >= 0)
        if layer.name in trained and not earlier:
            positions.append(i)
        behind.append(earlier or layer.name in trained)
    return positions


def _first_cotangents(marks: Sequence[tuple[int, Atom]], starts: Sequence[int]) -> tuple[Atom, ...]:
    """Return the cotangents of what the first layers from each of ``starts`` on return."""
    first = {min((layer for layer, _ in marks if layer >= start), default=None) for start in starts}
    return tuple(a for layer, a in marks if layer in first and not isinstance(a, Literal))
