"""Stage functions as values: flat lists of arrays whose positions are named by ports; their bytes, and what offloads move.

Nothing but ports is known to lowering and runtime: a function runs where what it reads is there, whatever its op. The types of
those that every stage has::

    F : (param, x, data, key)                   -> (y | loss, res, token)
    B : (param, x, data, key, res, dy)          -> (dx, wres, token)
    W : (param, x, data, key, res, wres, acc)   -> (acc, token)
    BW: (param, x, data, key, res, dy, acc)     -> (dx, acc, token)
    E : (param, x, data)                        -> (y | loss)          evaluation: no residuals, no randomness
    Y : (param, x, data)                        -> (y)                 the last stage without the loss, in evaluation

Each function lists only the ports it reads. Port indices: ``param`` and ``acc`` number the buffers of ``ParamLayout`` (integer
buffers come last and have no ``acc``); ``x``/``y`` number the array leaves of the pytree that crosses the stage boundary,
``dx``/``dy`` use the same numbers (integer leaves have none); ``data`` indexes :attr:`StageFunctions.data_names`; ``loss`` 0 is
the loss sum, 1 the weight sum, 2 and 3 those of a second loss layer, and after them come metrics, then vectors of what layers
return beside ``y``; ``res`` and ``wres`` number
what F and B save; ``token`` is a scalar that is ready when the function has run, and that nothing donates: what the runtime
waits on. Two kinds have names and are for functions that users add: ``user``, a value of one microbatch, and ``state``, arrays
that are zeros before a step and that the microbatches of a stage update in turn.

A :class:`BraidedFunction` is several of them in one call (:mod:`jaxpipe.stage.compiled.braid`).

**Footprints** (arguments, results, workspace, code) are read from XLA's buffer assignment (``memory_analysis()`` of the
compiled function), so they know about fusion, buffer reuse and donation, which shapes alone do not tell. That works where
nothing can run: compiling for described devices is enough. Compiling is shared with the runtime: a function that has run for
these shapes is not compiled again, nor is one that runs later. Bytes are those of one device. Not in them: the allocator's
rounding, memory that libraries (cuBLAS, NCCL) take for themselves, and constants that a backend places with the code without
counting them.

**Offload** is a choice over the ``res`` ports of F, made once per stage (:func:`with_offload`). A residual may leave if B or W
(and BW) read it later and F made it: parameters, batch arrays, keys and the stage input are never ``res`` ports, and what F
only hands on would free nothing. Scalars, and leaves 256 times smaller than the largest, stay: each costs a transfer and frees
next to nothing. Largest first, and of equal size what W reads after B before what dies with B, until a fraction of the bytes is
reached (`pipeoffload.txt` section 2 offloads by lifespan; all residuals of a microbatch are held from F to B, so within one
stage size decides first). Not modelled: that W alone may read a residual, so that it could come back later than B; a load
brings everything back.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import accumulate
from operator import add
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxpipe._jax_compat import ClosedJaxpr, aval_bytes
from jaxpipe.axes import DATA, ROWS
from jaxpipe.errors import StageError
from jaxpipe.mesh import AnyMesh, device_sharded, replicated
from jaxpipe.stage.jaxprs import array_leaves
from jaxpipe.stage.model.params import ParamLayout
from jaxpipe.stage.model.plan import StageLinks
from jaxpipe.stage.model.reference import combined
from jaxpipe.stage.weave.weaver import CoveredCollective

Metrics = Mapping[str, tuple[int, int]]
"""Metrics that the loss layer reports besides the loss, by name: the ``loss`` ports of the sum and of what it is divided by."""


class SideResult(NamedTuple):
    """The place of a result that a layer returns beside ``y`` (:class:`~jaxpipe.stage.model.layer.With`): the elements from
    ``start`` on of the vector of a ``loss`` port. ``layer``: its position in the stage. ``kind``: ``sum``, ``peak`` or
    ``loss``, which is ``[2]``, its sum and its weight."""

    layer: int
    kind: str
    name: str
    port: int
    start: int
    shape: tuple[int, ...]

    def of(self, vector: Any) -> Any:
        """Return the result out of its vector."""
        return vector[self.start : self.start + math.prod(self.shape)].reshape(self.shape)


PortKind = Literal["param", "x", "data", "key", "y", "loss", "res", "dy", "dx", "wres", "acc", "token", "user", "state"]


@dataclass(frozen=True, slots=True, order=True)
class Port:
    """The meaning of one argument or result; ``index`` counts within the kind, or within what is called ``name``. ``stage``:
    whose value it is, where that is another stage than the function's."""

    kind: PortKind
    index: int = 0
    name: str = ""
    stage: int = -1

    def __str__(self) -> str:
        whose = f"{self.name or self.kind}{self.index}"
        return whose if self.stage < 0 else f"{whose} of stage {self.stage}"


SHARED = ("param", "acc", "state")
"""Kinds of ports that mean the same array for every microbatch of a stage."""

IN_PLACE = ("acc", "state")
"""Kinds of ports that functions update; what updates one donates it."""


@dataclass(frozen=True, slots=True)
class Homes:
    """The placement of the arrays of a stage's ports on the devices of its rank. ``x_varies``, ``y_varies``: by array leaf of
    what enters and leaves, whether devices that have the same data hold different ones. ``dy_of``: by ``dy`` port, the leaf of
    what leaves. ``handed_on``: results that are arguments → those."""

    mesh: AnyMesh
    layout: ParamLayout
    x_varies: tuple[bool, ...]
    y_varies: tuple[bool, ...] = ()
    dy_of: tuple[int, ...] = ()
    handed_on: Mapping[Port, Port] = field(default_factory=dict)

    def axes(self, port: Port) -> tuple[str, ...]:
        """Return the mesh axes along which an array differs."""
        match port.kind:
            case "param":
                return self.layout.axes(port.index).divided
            case "token":
                return ()
            case "key":  # the second is how many layers of the model are before this stage
                return ROWS if port.index == 0 else ()
            case "data" | "loss":
                return DATA
            case "x" | "dx":
                return self.mesh.axis_names if self.x_varies[port.index] else DATA
            case "y":
                return self.mesh.axis_names if self.y_varies[port.index] else DATA
            case "dy":
                return self.axes(Port("y", self.dy_of[port.index]))
            # Each device sums what its own shards make.
            case "acc":
                axes = self.layout.axes(port.index)
                return tuple(a for a in self.mesh.axis_names if a in (*axes.divided, *axes.summed))
            # What F only hands on lies as its argument does. All else may differ between any two devices, and is stacked so.
            case "res" | "wres" | "user" | "state":
                source = self.handed_on.get(port)
                return self.mesh.axis_names if source is None else self.axes(source)

    def entering(self, port: Port, array: Any) -> jax.ShapeDtypeStruct:
        """Place a global array on this rank; scalars are the same on all devices."""
        home = device_sharded(self.mesh, self.axes(port)) if array.shape else replicated(self.mesh)
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=home)

    def aval(self, port: Port, local: Any) -> jax.ShapeDtypeStruct:
        """Return shape and sharding over the rank of what is ``local`` on each device."""
        # Stacked on axis 0, whatever an array's own axes mean: the runtime never looks inside, and a scalar gets an axis.
        axes, shape = self.axes(port), tuple(local.shape)
        devices = math.prod(self.mesh.shape[a] for a in axes)
        if not axes or (not shape and devices == 1):
            return jax.ShapeDtypeStruct(shape, local.dtype, sharding=replicated(self.mesh))
        shape = (devices * shape[0], *shape[1:]) if shape else (devices,)
        return jax.ShapeDtypeStruct(shape, local.dtype, sharding=device_sharded(self.mesh, axes))


@dataclass(frozen=True, slots=True)
class AnyFunction:
    """A function between ports, compiled on first use: what one ``Run`` of a program calls.

    ``avals_in``/``avals_out``: global shapes with their shardings on the rank's submesh. ``donated``: argument positions whose
    buffers the call consumes (accumulators, nothing else). ``jaxpr``: per-shard program, for dumps, FLOP counts and weaving.
    ``call(*arrays) -> tuple of arrays``. ``jitted``: the jitted part of ``call``; it returns the results that are not plain
    arguments (``forwarded``: result position → argument position; those arrays are handed on without a copy).
    """

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    avals_in: tuple[jax.ShapeDtypeStruct, ...]
    avals_out: tuple[jax.ShapeDtypeStruct, ...]
    donated: tuple[int, ...]
    jaxpr: ClosedJaxpr = field(repr=False)
    call: Callable[..., tuple[jax.Array, ...]] = field(repr=False)
    jitted: Any = field(repr=False)
    forwarded: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StageFunction(AnyFunction):
    """A function of a stage. If not ``per_shard``, ``jaxpr`` is of global arrays: such a function is not woven."""

    op: str = field(kw_only=True)
    per_shard: bool = True

    def __post_init__(self) -> None:
        assert len(set(self.inputs)) == len(self.inputs) == len(self.avals_in), "one argument per port"
        assert len(set(self.outputs)) == len(self.outputs) == len(self.avals_out), "one result per port"
        assert self.outputs, f"{self.op} returns nothing, so nothing could be waited on"
        assert all(self.inputs[k].kind in IN_PLACE for k in self.donated), "only accumulators are donated"

    def __str__(self) -> str:
        return f"{self.op}: ({' '.join(map(str, self.inputs))}) -> ({' '.join(map(str, self.outputs))})"


@dataclass(frozen=True, slots=True)
class StageFunctions:
    """The functions of one stage on one submesh, and what they cost in memory and arithmetic.

    ``functions``: by op, those that a schedule runs. ``evaluation``: E.

    ``x``/``y``: pytrees of ``ShapeDtypeStruct`` (global shapes) and static leaves that enter and leave; None where nothing
    does. ``x_from``: by ``x`` port, the stage that makes it and the
    ``y`` port there; ``dy_from``: by ``dy`` port, the stage that makes it and the ``dx`` port there. ``data_names``: batch
    arrays it reads, in port order. ``links``: to its neighbours. A stage that takes several microbatches at once
    (``links.span``) has ``x``, ``dx`` and ``data`` ports for each of them in turn; ``x_from`` and ``data_names`` are of one.
    Bytes are per device and call: ``residual_bytes`` is held from F to B (``res`` ports, and ``x`` where the backward
    reads it); ``w_residual_bytes`` from B's end to W's end, of which B made ``cotangent_bytes``; ``boundary_bytes`` is sent to
    the next stage. ``param_bytes`` per device. ``flops``: per operation, of matrix products and convolutions.
    ``offloaded``: indices of the ``res`` ports that O and L move, ``offloadable_bytes`` their bytes
    (:func:`with_offload`).
    ``notes``: remarks for people, such as a scan that could not be divided between B and W. ``metrics``: of the last stage's F;
    ``eval_metrics``: of its E. ``sides``: of F, what layers return beside ``y``.
    """

    stage: int
    functions: Mapping[str, StageFunction]
    evaluation: StageFunction
    x: Any
    y: Any
    links: StageLinks
    data_names: tuple[str, ...]
    uses_key: bool
    layout: ParamLayout
    param_avals: tuple[jax.ShapeDtypeStruct, ...]
    acc_avals: tuple[jax.ShapeDtypeStruct, ...]
    residual_bytes: int
    w_residual_bytes: int
    cotangent_bytes: int
    boundary_bytes: int
    param_bytes: int
    flops: Mapping[str, int]
    notes: tuple[str, ...] = ()
    offloaded: tuple[int, ...] = ()
    offloadable_bytes: int = 0
    metrics: Metrics = field(default_factory=dict)
    eval_metrics: Metrics = field(default_factory=dict)
    sides: tuple[SideResult, ...] = ()
    x_from: tuple[tuple[int, int], ...] = ()
    dy_from: tuple[tuple[int, int], ...] = ()

    @property
    def reports(self) -> bool:
        """Return whether F has ``loss`` ports."""
        return bool(self.links.losses or self.sides)

    @property
    def x_avals(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Return the array leaves of ``x``, in port order."""
        return tuple(array_leaves(self.x))

    @property
    def y_avals(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Return the array leaves of ``y``, in port order."""
        return tuple(array_leaves(self.y))

    @property
    def data_avals(self) -> Mapping[int, jax.ShapeDtypeStruct]:
        """Return the batch arrays of a microbatch that some function reads, by position in ``data_names``."""
        return {
            port.index % len(self.data_names): aval
            for f in (*self.functions.values(), self.evaluation)
            for port, aval in zip(f.inputs, f.avals_in, strict=True)
            if port.kind == "data"
        }

    def __post_init__(self) -> None:
        outputs = {p for f in self.functions.values() for p in f.outputs}
        for f in self.functions.values():
            unknown = [p for p in f.inputs if p.kind in ("res", "wres") and p not in outputs]
            assert not unknown, f"stage {self.stage}: {f.op} reads {', '.join(map(str, unknown))}, which nothing makes"
        unmade = [i for i in self.offloaded if Port("res", i) not in outputs]
        assert not unmade, f"stage {self.stage} offloads residuals {unmade}, which F does not make"

    def __str__(self) -> str:
        lines = [f"stage {self.stage}", *(f"  {f}" for f in (*self.functions.values(), self.evaluation))]
        lines.append(
            f"  bytes: residual {self.residual_bytes} (offloadable {self.offloadable_bytes} in {len(self.offloaded)} leaves), "
            f"held for W {self.w_residual_bytes} (cotangents {self.cotangent_bytes}), boundary {self.boundary_bytes}, "
            f"parameters {self.param_bytes}"
        )
        return "\n".join([*lines, *(f"  note: {n}" for n in self.notes)])


@dataclass(frozen=True, slots=True)
class Reported:
    """Positions among the ``loss`` ports of all stages, in order.

    Attributes:
        heads: of the sum and the weight of each loss.
        metrics: of the sum and the weight of each metric, by name; of several losses each is a metric by its layer's name.
        sides: by name and layer, what layers return beside ``y``, in vectors.
        factors: of the losses among these.
    """

    heads: tuple[tuple[int, int], ...]
    metrics: Metrics
    sides: Mapping[str, Mapping[str, SideResult]] = field(default_factory=dict)
    factors: Mapping[str, float] = field(default_factory=dict)

    def loss(self, sums: Sequence[Any]) -> tuple[Any, Any]:
        """Return loss sum and weight (:func:`~jaxpipe.stage.model.reference.combined`), given the sums by position."""
        return combined([(sums[a], sums[b]) for a, b in self.heads])

    @property
    def peaks(self) -> set[int]:
        """The positions of vectors of which the largest elements count, and not their sum."""
        return {side.port for of_layer in self.sides.values() for side in of_layer.values() if side.kind == "peak"}

    def layer_losses(self, vectors: Sequence[Any]) -> dict[str, tuple[Any, Any]]:
        """Return the sum and the weight of each loss that layers have beside the model's own."""
        pairs = {name: [side.of(vectors[side.port]) for side in self.sides[name].values()] for name in self.factors}
        return {name: tuple(reduce(add, each)) for name, each in pairs.items()}

    def side_sums(self, vectors: Sequence[Any]) -> dict[str, Any]:
        """Return by name the sums and peaks of all layers that have them, one after the other, flat."""
        named = {name: of_layer for name, of_layer in self.sides.items() if name not in self.factors}
        parts = {name: [side.of(vectors[side.port]).reshape(-1) for side in x.values()] for name, x in named.items()}
        return {name: jnp.concatenate(each) for name, each in parts.items()}

    def by_layer(self, side_sums: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Return by name and layer what :meth:`side_sums` put together."""
        split: dict[str, dict[str, Any]] = {}
        for name, flat in side_sums.items():
            shapes = {layer: side.shape for layer, side in self.sides[name].items()}
            starts = accumulate(map(math.prod, shapes.values()), initial=0)
            split[name] = {
                layer: flat[at : at + math.prod(shape)].reshape(shape)
                for (layer, shape), at in zip(shapes.items(), starts, strict=False)
            }
        return split


Parts = tuple[tuple[str, int], ...]
"""(op, stage) of each action that a compiled function performs, in order."""


@dataclass(frozen=True, slots=True)
class BraidedFunction(AnyFunction):
    """The functions of ``parts`` as one.

    ``input_parts[k]``: which part ``inputs[k]`` belongs to: the first that reads it. ``output_parts[k]``: which part makes
    ``outputs[k]``. An accumulator leaves once, as the last part that adds to it left it; so does a token. ``collectives``:
    those over ``tp``, and what computes under each.
    """

    parts: Parts = field(kw_only=True)
    input_parts: tuple[int, ...] = field(kw_only=True)
    output_parts: tuple[int, ...] = field(kw_only=True)
    collectives: tuple[CoveredCollective, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        # Parts of one stage share its parameters and accumulators; everything else belongs to a part.
        named = [
            (self.parts[k][1] if p.kind in SHARED else k, p) for k, p in zip(self.input_parts, self.inputs, strict=True)
        ]
        assert len(set(named)) == len(named) == len(self.avals_in), "one argument per array"
        assert len(self.outputs) == len(self.output_parts) == len(self.avals_out), "one result per port"
        assert sum(p.kind == "token" for p in self.outputs) == 1, "one token"

    @property
    def name(self) -> str:
        return "+".join(f"{op}{stage}" for op, stage in self.parts)

    def __str__(self) -> str:
        ins = " ".join(f"{p}/{k}" for p, k in zip(self.inputs, self.input_parts, strict=True))
        outs = " ".join(f"{p}/{k}" for p, k in zip(self.outputs, self.output_parts, strict=True))
        return f"{self.name}: ({ins}) -> ({outs})"


Braids = Mapping[tuple[int, Parts], BraidedFunction]
"""Braided functions by rank and parts."""


def function_of(
    rank: int, parts: Parts, functions: Mapping[tuple[int, int], StageFunctions], braids: Braids
) -> AnyFunction:
    """Return the function that a rank calls for these parts."""
    if len(parts) > 1:
        return braids[(rank, parts)]
    ((op, stage),) = parts
    return functions[(rank, stage)].functions[op]


# -- bytes, offload ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes on one device. ``alias_bytes``: of the results that are written into donated arguments (accumulators), counted in
    ``argument_bytes`` and in ``output_bytes``. ``temp_bytes``: workspace while the function runs. ``code_bytes``: of the
    program itself, as long as it is loaded. ``host_bytes``: workspace and results in host memory. ``note``: why the numbers
    are zero, where the backend does not tell them; else empty."""

    argument_bytes: int = 0
    output_bytes: int = 0
    alias_bytes: int = 0
    temp_bytes: int = 0
    code_bytes: int = 0
    host_bytes: int = 0
    note: str = ""

    @property
    def peak_bytes(self) -> int:
        """Return the bytes that are live while the function runs, its code left out."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes

    def __str__(self) -> str:
        if self.note:
            return self.note
        return (
            f"arguments {self.argument_bytes}, results {self.output_bytes} (in place {self.alias_bytes}), workspace "
            f"{self.temp_bytes}, code {self.code_bytes} bytes"
        )


UNKNOWN = Footprint(note="the backend does not report the memory of compiled functions; workspace counts as 0")

# Weak, so that a cache of footprints keeps no compiled function alive.
_footprints_of: weakref.WeakKeyDictionary[Any, dict[tuple[jax.ShapeDtypeStruct, ...], Footprint]] = (
    weakref.WeakKeyDictionary()
)


def footprint(function: AnyFunction) -> Footprint:
    """Return the footprint of a stage function or braid, compiled for its shapes unless it is already. Cached per compiled
    function.

    The first compilation takes seconds for a large stage. What the compiler raises (an out-of-memory plan, an unknown
    target) is passed on.
    """
    footprints = _footprints_of.setdefault(function.jitted, {})
    if function.avals_in not in footprints:
        footprints[function.avals_in] = compiled_footprint(function.jitted.lower(*function.avals_in).compile())
    return footprints[function.avals_in]


def compiled_footprint(compiled: Any) -> Footprint:
    """Return the footprint of any ``jax.stages.Compiled``."""
    stats = compiled.memory_analysis()
    if stats is None:
        return UNKNOWN
    return Footprint(
        argument_bytes=int(stats.argument_size_in_bytes),
        output_bytes=int(stats.output_size_in_bytes),
        alias_bytes=int(stats.alias_size_in_bytes),
        temp_bytes=int(stats.temp_size_in_bytes),
        code_bytes=int(stats.generated_code_size_in_bytes),
        host_bytes=int(stats.host_temp_size_in_bytes + stats.host_output_size_in_bytes),
    )


def device_bytes(aval: jax.ShapeDtypeStruct | jax.Array, align: int = 1) -> int:
    """Return the bytes that an array takes on each of its devices: of one shard if it is split, of the whole if it is
    replicated.

    ``align``: the allocator's granularity, to which every buffer is rounded up.
    """
    size_bytes = aval_bytes(aval)
    if aval.sharding is not None and aval.size:
        size_bytes = size_bytes * math.prod(aval.sharding.shard_shape(tuple(aval.shape))) // aval.size
    return -(-size_bytes // align) * align


def total_device_bytes(avals: Sequence[jax.ShapeDtypeStruct], align: int = 1) -> int:
    """Sum :func:`device_bytes` over ``avals``."""
    return sum(device_bytes(a, align) for a in avals)


TINY = 256
"""A leaf stays if the largest is more than this many times larger."""


def with_offload(stage: StageFunctions, fraction: float = 1.0) -> StageFunctions:
    """Have O and L of ``stage`` move about ``fraction`` of the bytes that may leave: at least that, and no leaf more than
    needed.

    Args:
        stage: any; an earlier choice is replaced.
        fraction: 0 (nothing moves) to 1 (all that may leave).

    Raises:
        StageError: ``fraction`` is outside 0..1.
    """
    if not 0 <= fraction <= 1:
        raise StageError(f"offload: fraction is {fraction}; want a number between 0 and 1")
    sizes = leaves_that_may_leave(stage)
    late = _read([f for f in stage.functions.values() if any(p.kind == "wres" for p in f.inputs)])
    target = fraction * sum(sizes.values())
    chosen: dict[int, int] = {}
    # Few large transfers rather than many small ones; the index last, so that all processes choose the same.
    for index in sorted(sizes, key=lambda i: (-sizes[i], i not in late, i)):
        if sum(chosen.values()) >= target:
            break
        chosen[index] = sizes[index]
    return replace(stage, offloaded=tuple(sorted(chosen)), offloadable_bytes=sum(chosen.values()))


def leaves_that_may_leave(stage: StageFunctions) -> dict[int, int]:
    """Return the bytes per device of every leaf that may be offloaded, by ``res`` index."""
    functions = stage.functions.values()
    read = _read(functions)
    sizes = {
        port.index: device_bytes(aval)
        for f in functions
        for k, (port, aval) in enumerate(zip(f.outputs, f.avals_out, strict=True))
        if port.kind == "res" and port.index in read and k not in f.forwarded and _is_plain_array(aval)
    }
    largest = max(sizes.values(), default=0)
    return {index: n for index, n in sizes.items() if n * TINY >= largest}


def _read(functions: Iterable[StageFunction]) -> set[int]:
    return {p.index for f in functions for p in f.inputs if p.kind == "res"}


def _is_plain_array(aval: jax.ShapeDtypeStruct) -> bool:
    return not jnp.issubdtype(aval.dtype, jax.dtypes.extended) and device_bytes(aval) > aval.dtype.itemsize
