"""The only file that may say ``jax._src`` or branch on a JAX version.

Borrowed names, why, and where they were checked (jax 0.10.2 on Python 3.11, jax 0.12.0.1 on Python 3.13):

=============================  ==========================================================================================
name                           why
=============================  ==========================================================================================
``jax.extend.core``            ``Var Literal Jaxpr ClosedJaxpr JaxprEqn``: the types an equation list is made of.
                               Semi-public; ``Var(aval)`` makes a fresh variable in both versions, and ``ClosedJaxpr`` and
                               ``Jaxpr`` are one class in 0.12 (``ClosedJaxpr(jaxpr, consts)`` works in both).
``jax.core.eval_jaxpr``        public; evaluates an equation list under a new trace.
``eqn.source_info.name_stack`` which layer an equation came from. ``NameStack`` has no public home: read through ``str``,
                               joined with ``+``.
``aval.vma``                   mesh axes over which a value varies; ``aval.mat.varying`` in 0.10.2 and 0.12, replaced through
                               ``aval.update(manual_axis_type=…)``.
``jax.lax.pcast``              casts a value to varying; public since 0.9.
``psum_invariant``             what ``jax.lax.psum`` becomes while varying-axis types are on; the cut programs run with them
                               off and need ``jax.lax.psum_p`` in its place.
``NamedAxisEffect``            the effect of an equation that names a mesh axis; told by its class's name.
``source_info_util.summarize`` (``jax._src``) file and line of an equation, for error messages; has no public equivalent.
``source_info_util.user_       (``jax._src``) the functions that led to an equation, by qualified name: which optax
frames``                       transformation an equation belongs to.
``effects.ordered_effects``    (``jax._src``) tells effects that must keep their order (they can't be split) from others.
``xla_bridge.backends_are_     (``jax._src``) whether devices were looked for: emulated ones must be asked for before.
initialized``
``make_gloo_tcp_collectives``  (``jaxlib``) makes the collectives of CPU devices between processes, at the address of the
                               host's name, which Debian and Ubuntu have as 127.0.1.1: :func:`set_cpu_address`.
``compiler._cache_write``      (``jax._src``) keeps what was compiled, but in process 0 alone: :func:`keep_compiled`.
``xla_client.batched_copy_     (``jax._src.lib``) what ``jax.device_put`` ends in for arrays that keep their number of devices:
array_to_devices_with_         7 µs a call where ``device_put`` takes 73 µs. :func:`copier` falls back to ``device_put``.
sharding``
``supports_cross_host_         of a device's ``client``: whether ``jax.device_put`` goes between processes; undocumented.
transfers``
``partial_eval.dce_jaxpr``     (``jax.interpreters``) drops what given results do not depend on, inside calls and loops too.
``scan`` parameters            ``num_consts`` and ``num_carry`` in 0.10; a tree ``ft_in`` in 0.12.
``flattree.FlatTree``          (``jax._src``) what those trees are: equal by their structure and what it holds.
``jax.experimental.topologies`` ``get_topology_desc(name, "cuda", target_config=…)``: devices that only compile. Experimental;
                               needs the plugin's wheels, and works without a driver when JAX itself runs on the CPU.
``fused_attention_stablehlo.   (``jax._src.cudnn``) what asks for the installed cuDNN before its attention can be traced;
check_cudnn_version``          :func:`cudnn_assumed` answers for a GPU that is not here.
``pallas.ops.gpu.ragged_       (``jax.experimental``) kernels of products in groups for Hopper GPUs, without derivatives:
dot_mgpu``, ``transposed_…``   :func:`hopper_ragged_dot`. They compile in 0.10.2; never run by us.
=============================  ==========================================================================================

Not handled: jaxprs with mutable references or "high" types.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from types import FunctionType, SimpleNamespace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import compiler as _compiler
from jax._src import effects as _effects
from jax._src import source_info_util as _source_info
from jax._src import xla_bridge as _xla_bridge
from jax._src.cudnn import fused_attention_stablehlo as _fused_attention
from jax._src.interpreters import partial_eval as _partial_eval
from jax._src.lib import xla_client as _xla_client  # type: ignore[attr-defined]
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive, Var  # type: ignore[attr-defined,unused-ignore]
from jax.interpreters import mlir
from jaxlib import _jax as _jaxlib

# Those of JAX; of the rest, what has no underscore.
__all__ = ["ClosedJaxpr", "Jaxpr", "JaxprEqn", "Literal", "Var"]

Atom: TypeAlias = Var | Literal

eval_jaxpr = jax.core.eval_jaxpr

STRUCTURES: tuple[type, ...] = (jax.tree_util.PyTreeDef,)
"""Trees that are equal by their structure and what they hold."""
with suppress(ImportError):  # before 0.12
    from jax._src.flattree import FlatTree as _FlatTree  # type: ignore[import-not-found,unused-ignore]

    STRUCTURES += (_FlatTree,)

_CALLS = frozenset(
    {
        "jit",
        "pjit",
        "closed_call",
        "core_call",
        "core_closed_call",
        "custom_jvp_call",
        "custom_vjp_call",
        "custom_vjp_call_jaxpr",
        "checkpoint",
        "remat",
        "remat2",
    }
)
"""Primitives whose meaning is "run this jaxpr on these operands"; the name of a primitive changes between versions."""


def fresh_var(aval: Any) -> Var:
    """Return a new variable of the given abstract value."""
    return Var(aval)


def variables(atoms: Iterable[Atom]) -> Iterator[Var]:
    """Return the variables among atoms (literals can't be hashed, and depend on nothing)."""
    return (a for a in atoms if isinstance(a, Var))


def called_jaxpr(eqn: JaxprEqn) -> tuple[Jaxpr, Sequence[Any]] | None:
    """Return the body of a call-like equation and its constants, or None for any other equation."""
    if eqn.primitive.name not in _CALLS:
        return None
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        body = eqn.params.get(name)
        if body is not None:
            jaxpr, consts = _open(body)
            if len(jaxpr.invars) == len(eqn.invars):
                return jaxpr, consts
    return None


def is_checkpoint(eqn: JaxprEqn) -> bool:
    """Return whether the equation is a ``jax.checkpoint`` body."""
    return eqn.primitive.name in ("checkpoint", "remat", "remat2")


def set_cpu_address(address: str) -> None:
    """Set the address at which collectives of CPU devices reach this process. Call it before JAX looks for devices."""
    _jaxlib.make_gloo_tcp_collectives = partial(_jaxlib.make_gloo_tcp_collectives, hostname=address)


def barrier(operands: Sequence[Var], results: Sequence[Var]) -> JaxprEqn:
    """Return the equation ``results = optimization_barrier(operands)``."""
    avals = [jax.ShapeDtypeStruct(shape_of(v), dtype_of(v)) for v in operands]
    (eqn,) = jax.make_jaxpr(lambda *a: jax.lax.optimization_barrier(a))(*avals).jaxpr.eqns
    placed: JaxprEqn = eqn.replace(invars=list(operands), outvars=list(results))
    return placed


def plain_collective(eqn: JaxprEqn) -> JaxprEqn:
    """Strip an equation of what only the types of ``shard_map`` need: a sum whose result is typed as equal on all shards
    (``psum_invariant``) becomes the plain ``psum``; that a mesh axis is named is no effect (it may be dropped or repeated)."""
    effects = {e for e in eqn.effects if type(e).__name__ != "NamedAxisEffect"}
    plain: JaxprEqn = eqn.replace(effects=effects) if len(effects) < len(eqn.effects) else eqn
    if eqn.primitive.name == "psum_invariant":
        params = {"axes": tuple(eqn.params["axes"]), "axis_index_groups": None}
        plain = plain.replace(primitive=jax.lax.psum_p, params=params)
    return plain


def checkpoint_name_of(eqn: JaxprEqn) -> str | None:
    """Return the name given by ``checkpoint_name``, or None for any other equation."""
    return str(eqn.params["name"]) if eqn.primitive.name == "name" else None


_JAXPRS, _SEVERAL = (Jaxpr, ClosedJaxpr), (tuple, list)


def _open(body: Any) -> tuple[Jaxpr, Sequence[Any]]:
    inner = getattr(body, "jaxpr", body)
    return inner, getattr(body, "consts", ())


def sub_jaxprs(eqn: JaxprEqn) -> Iterator[Jaxpr]:
    """Return every jaxpr among an equation's parameters (bodies, branches)."""
    for value in eqn.params.values():
        for item in value if isinstance(value, _SEVERAL) else (value,):
            if isinstance(item, _JAXPRS):
                yield _open(item)[0]


def close_jaxpr(
    consts: Sequence[tuple[Var, Any]], invars: Sequence[Var], eqns: Sequence[JaxprEqn], outvars: Sequence[Atom]
) -> ClosedJaxpr:
    """Return a closed jaxpr of these equations."""
    effects: set[Any] = set().union(*(eqn.effects for eqn in eqns)) if eqns else set()
    jaxpr = Jaxpr(
        [v for v, _ in consts], list(invars), list(outvars), list(eqns), effects, _no_debug_info(invars, outvars)
    )
    return ClosedJaxpr(jaxpr, [c for _, c in consts])


def only_results(
    closed: ClosedJaxpr, results: Iterable[int], inputs: Iterable[int] = ()
) -> tuple[ClosedJaxpr, tuple[bool, ...]]:
    """Return a closed jaxpr that computes only these results (in their old order), and which of the old inputs it takes: these
    ``inputs``, and those that it reads."""
    outputs, arguments = set(results), set(inputs)
    used = [k in outputs for k in range(len(closed.jaxpr.outvars))]
    jaxpr, kept_inputs = _partial_eval.dce_jaxpr(
        closed.jaxpr, used, [k in arguments for k in range(len(closed.jaxpr.invars))]
    )
    return ClosedJaxpr(jaxpr, closed.consts), tuple(kept_inputs)


def _no_debug_info(invars: Sequence[Var], outvars: Sequence[Atom]) -> Any:
    return _debug_info()._replace(arg_names=("",) * len(invars), result_paths=("",) * len(outvars))


@cache
def _debug_info() -> Any:
    return jax.make_jaxpr(lambda: ())().jaxpr.debug_info


def map_bodies(eqn: JaxprEqn, change: Callable[[Jaxpr, Sequence[Any]], ClosedJaxpr]) -> JaxprEqn:
    """Replace each closed body ``(jaxpr, consts)`` of a loop or branch equation; return any other equation unchanged."""
    if eqn.primitive.name not in ("scan", "while", "cond"):
        return eqn

    def mapped(value: Any) -> Any:
        if isinstance(value, tuple | list):
            return type(value)(mapped(v) for v in value) if any(isinstance(v, ClosedJaxpr) for v in value) else value
        return change(*_open(value)) if isinstance(value, ClosedJaxpr) else value

    changed: JaxprEqn = eqn.replace(params={k: mapped(v) for k, v in eqn.params.items()})
    return changed


def with_outer_names(eqn: JaxprEqn, outer: JaxprEqn | None, invars: Sequence[Atom], outvars: Sequence[Var]) -> JaxprEqn:
    """Return ``eqn`` of the body called by ``outer`` (if any) on other variables, its name stack extended by the caller's."""
    info = eqn.source_info
    if outer is not None:
        info = info.replace(name_stack=outer.source_info.name_stack + info.name_stack)
    named: JaxprEqn = eqn.replace(invars=list(invars), outvars=list(outvars), source_info=info)
    return named


def source_line(eqn: JaxprEqn) -> str:
    """Return ``file:line (function)`` of the user code that made an equation."""
    return str(_source_info.summarize(eqn.source_info))


def source_functions(eqn: JaxprEqn) -> tuple[tuple[str, str], ...]:
    """Return the functions outside JAX that made an equation, innermost first: qualified name, and ``file:line``."""
    frames = _source_info.user_frames(eqn.source_info.traceback)
    return tuple((f.function_name, f"{f.file_name}:{f.start_line}") for f in frames)


def pruned(eqn: JaxprEqn, used: Sequence[bool]) -> JaxprEqn:
    """Drop unused results from the equation, as far as JAX can take loops and branches apart."""
    if all(used):
        return eqn
    single_eqn = close_jaxpr([], list(dict.fromkeys(variables(eqn.invars))), [eqn], eqn.outvars)
    smaller: JaxprEqn
    (smaller,) = only_results(single_eqn, [k for k, use in enumerate(used) if use])[0].jaxpr.eqns
    return smaller


def has_ordered_effects(eqn: JaxprEqn) -> bool:
    """Return whether the equation has effects whose order is part of the program (an ordered callback or print)."""
    return bool(_effects.ordered_effects.filter_in(eqn.effects))


def is_key_dtype(dtype: Any) -> bool:
    """Return whether a dtype is that of typed PRNG keys."""
    return bool(jnp.issubdtype(dtype, jax.dtypes.prng_key))


def varying_axes(value: Any) -> frozenset[str]:
    """Return the mesh axes over which a value varies, inside ``shard_map``."""
    aval = jax.typeof(value)
    vma: Any = getattr(aval, "vma", None)
    if vma is None:
        vma = getattr(getattr(aval, "mat", None), "varying", ())
    return frozenset(vma)


_UNVARYING: Any = getattr(jax.core.ShapedArray((), np.dtype(np.float32)), "manual_axis_type", None)


def without_varying(aval: Any) -> Any:
    """Return an abstract value without its varying-axis type."""
    if _UNVARYING is not None and hasattr(aval, "manual_axis_type"):
        return aval.update(manual_axis_type=_UNVARYING)
    return aval.update(vma=frozenset()) if getattr(aval, "vma", None) else aval


def vary(value: Any, axes: Sequence[str]) -> Any:
    """Cast ``value`` to varying over ``axes``, except those over which it varies already."""
    current_axes = varying_axes(value)
    missing = tuple(a for a in axes if a not in current_axes)
    if not missing:
        return value
    return jax.lax.pcast(value, missing, to="varying")


@dataclass(frozen=True, slots=True)
class ScanParts:
    """The division of a scan equation's operands and results: constants, carries, then stacked inputs or outputs."""

    body: Jaxpr
    body_consts: Sequence[Any]
    num_consts: int
    num_carry: int
    length: int
    reverse: bool
    unroll: Any


def scan_parts(eqn: JaxprEqn) -> ScanParts | None:
    """Return the parts of a ``lax.scan`` equation, or None for any other equation."""
    if eqn.primitive.name != "scan":
        return None
    p = eqn.params
    if "num_consts" in p:
        num_consts, num_carry = p["num_consts"], p["num_carry"]
    else:
        consts, carry, _ = p["ft_in"].unpack()
        num_consts, num_carry = len(list(consts)), len(list(carry))
    body, body_consts = _open(p["jaxpr"])
    return ScanParts(body, body_consts, num_consts, num_carry, int(p["length"]), bool(p["reverse"]), p.get("unroll", 1))


def shape_of(atom: Atom) -> tuple[int, ...]:
    """Return the shape of a variable or literal; () for what has none."""
    return tuple(getattr(atom.aval, "shape", ()))


def dtype_of(atom: Atom) -> Any:
    """Return the dtype of a variable or literal; None for what has none."""
    return getattr(atom.aval, "dtype", None)


def aval_bytes(aval: Any) -> int:
    """Return the bytes of an array of this shape and dtype (typed PRNG keys count as their raw words)."""
    itemsize = getattr(aval.dtype, "itemsize", None) or np.dtype(aval.dtype).itemsize
    return int(math.prod(aval.shape)) * int(itemsize)


def keep_compiled() -> None:
    """Have this process, which is not the first of several, write what it compiles into JAX's compilation cache, too. JAX
    spares file systems the writes of many processes to one folder; give each its own."""
    first = SimpleNamespace(global_state=SimpleNamespace(process_id=0))
    if (write := getattr(_compiler, "_cache_write", None)) is not None:
        _compiler._cache_write = FunctionType(write.__code__, {**write.__globals__, "distributed": first})


def backends_initialized() -> bool:
    """Return whether JAX has looked for devices already; afterwards it does not read the environment again."""
    return bool(_xla_bridge.backends_are_initialized())


def puts_between_processes(device: jax.Device) -> bool:
    """Return whether ``jax.device_put`` takes arrays from and to devices of other processes, as by NCCL on GPUs."""
    return bool(getattr(device.client, "supports_cross_host_transfers", False))


@contextmanager
def cudnn_assumed() -> Iterator[None]:
    """Have cuDNN's attention traced inside the block as on a machine that has version 9.6: nothing is looked for, or run."""
    original_check = _fused_attention.check_cudnn_version
    _fused_attention.check_cudnn_version = lambda: 90600
    try:
        yield
    finally:
        _fused_attention.check_cudnn_version = original_check


def compile_only_devices(name: str, description: str, count: int = 1) -> Sequence[jax.Device] | str:
    """Return ``count`` CUDA devices that do not exist: lowering and compiling for them works, running does not.

    ``description``: text proto of the GPU (``gpu_device_info`` and so on). Returns the reason, for people, where it can't be:
    wheels that are not installed, or a plugin that refuses the description.
    """
    from jax.experimental import topologies

    try:
        topology = topologies.get_topology_desc(name, "cuda", target_config=description, topology=f"1x1x{count}")
    except NotImplementedError:
        return "the CUDA plugin is not installed (pip install jaxpipe[cuda12], or [cuda13])"
    except Exception as error:
        return f"the CUDA plugin refused: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    return list(topology.devices)


_HOPPER_DOT = Primitive("hopper_ragged_dot")
"""A product in groups by JAX's kernels for Hopper. One equation, with the parameters of ``ragged_dot_general``, so that it is
counted and woven as that is."""


def hopper_kernels() -> Any:
    """Return JAX's two modules of kernels for Hopper GPUs, or None in a version without."""
    with suppress(ImportError):
        from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu, transposed_ragged_dot_mgpu

        return ragged_dot_mgpu, transposed_ragged_dot_mgpu
    return None


def hopper_ragged_dot(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, contracted: tuple[int, int]) -> jax.Array:
    """Multiply rows in groups on a Hopper GPU. ``contracted``: the axes that are summed over: (1, 1) of rows [R, K] and kernels
    [e, K, N], (1, 2) of [R, N] and those, (0, 0), within each of the e groups, of [R, K] and [R, N].

    All of 16 bits, K and N multiples of 128. Rows past the groups make zeros.
    """
    dims = (((contracted[0],), (contracted[1],)), ((), ()))
    numbers = jax.lax.RaggedDotDimensionNumbers(dims, [0], [] if contracted == (0, 0) else [0])
    product: jax.Array = _HOPPER_DOT.bind(lhs, rhs, sizes, ragged_dot_dimension_numbers=numbers)
    return product


@_HOPPER_DOT.def_abstract_eval  # type: ignore[untyped-decorator,unused-ignore]
def _hopper_aval(lhs: Any, rhs: Any, sizes: Any, *, ragged_dot_dimension_numbers: Any) -> Any:
    (_, (contracted,)), _ = ragged_dot_dimension_numbers.dot_dimension_numbers
    rows, width = lhs.shape
    in_groups = not ragged_dot_dimension_numbers.rhs_group_dimensions
    return lhs.update(shape=(*sizes.shape, width, rhs.shape[1]) if in_groups else (rows, rhs.shape[3 - contracted]))


def _hopper_dot(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, *, ragged_dot_dimension_numbers: Any) -> jax.Array:
    ragged, transposed = hopper_kernels()
    (_, (contracted,)), _ = ragged_dot_dimension_numbers.dot_dimension_numbers
    rows = lhs.shape[0]
    # Rows are read in blocks, of which none may reach past the array.
    lhs, rhs = (a if a.ndim > 2 else jnp.pad(a, ((0, -rows % 128), (0, 0))) for a in (lhs, rhs))
    blocks = {"block_m": 128, "block_n": 128, "block_k": 64, "max_concurrent_steps": 4, "grid_block_n": 8}
    if contracted == 0:
        # It asks the first device how many processors there are, which is none of its own where it is only compiled.
        cores = getattr(jax.devices()[0], "core_count", 132)
        jax_with_cores = SimpleNamespace(**{**vars(jax), "devices": lambda: [SimpleNamespace(core_count=cores)]})
        kernel = transposed.transposed_ragged_dot
        weights: jax.Array = FunctionType(kernel.__code__, {**kernel.__globals__, "jax": jax_with_cores})(
            lhs, rhs, group_sizes=sizes, **blocks
        )
        return weights
    product = ragged.ragged_dot(lhs, rhs, group_sizes=sizes, transpose_rhs=contracted == 2, **blocks)[:rows]
    # What it does not write is whatever the memory held: NaN, perhaps, which 0 times is NaN.
    return jnp.where(jnp.arange(rows)[:, None] < jnp.sum(sizes), product, jnp.zeros_like(product))


mlir.register_lowering(_HOPPER_DOT, mlir.lower_fun(_hopper_dot, multiple_results=False))


def copier(targets: Sequence[jax.sharding.Sharding]) -> Callable[[Sequence[jax.Array]], Sequence[jax.Array]]:
    """Return a function that starts copying arrays to ``targets``, one each, of any memory kind (as many devices as they
    are on now), and returns the copies.

    It does what ``jax.device_put(arrays, targets)`` does without finding out each time how; the caller vouches that the arrays
    live on as many devices as their targets have, all of this process, split the same way.
    """
    copy = getattr(_xla_client, "batched_copy_array_to_devices_with_sharding", None)
    shardings = list(targets)
    devices = [getattr(s, "_internal_device_list", None) for s in shardings]
    if copy is None or any(d is None for d in devices) or not all(s.is_fully_addressable for s in shardings):
        return lambda arrays: jax.device_put(list(arrays), shardings)
    semantics = [_xla_client.ArrayCopySemantics.REUSE_INPUT] * len(shardings)

    def copies(arrays: Sequence[jax.Array]) -> Sequence[jax.Array]:
        result: Sequence[jax.Array] = copy(list(arrays), devices, shardings, semantics)
        return result

    return copies
