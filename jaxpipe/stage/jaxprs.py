"""Flat programs: pytrees as lists of array leaves, jaxprs without calls, their dataflow, their FLOPs, and one table of what
each JAX primitive does.

**The table** is what everything that classifies equations reads. A name that is not in it is :attr:`EqnKind.CUSTOM`: it may do
anything, so it is never recomputed for little, moved between B and W or fused with its neighbours. Which primitives call a
jaxpr, and how loops are taken apart, tells :mod:`jaxpipe._jax_compat`.

**Flattening** (:func:`flatten`) replaces every call-like equation (jit, custom derivative, checkpoint) by the equations of its
body. The cut into F, B and W needs single equations: a jitted helper may hold work of all three. ``scan``, ``while`` and
``cond`` stay, their bodies flattened. Variables are renamed at each use, since JAX shares bodies between calls; name stacks are
extended by the caller's, so an equation still tells its layer.

Varying-axis types are dropped from all variables and bodies: they have done their work when the gradients are traced, and the
cut programs run with ``check_vma=False``; sums over shards become plain sums. Identities disappear: casts to varying, copies,
and ``checkpoint_name``, whose names are returned beside the equations as ``names``.

A checkpoint body that depends on a cotangent is the transposed one: what it computes from saved values is recomputation, and
belongs to the backward pass although it does not depend on the cotangent. Its equations are returned as ``recomputed``.

A product over leading axes of both operands (a weight gradient over batch and time) becomes one of two matrices: given more
axes, XLA's CPU backend copies an operand transposed, and computes in each copy all that leads to it. The numbers are the same.

**FLOPs** (:func:`jaxpr_flops`) are counted from shapes. Matrix products and convolutions are exact: 2 · (multiply-adds), and so
are cuDNN's attention kernels: of the pairs of positions that their mask leaves, two products forwards and five backwards.
Bodies of calls and branches are followed; ``scan`` counts its body once per iteration, ``cond`` the most expensive branch,
``while`` one iteration (the trip count is not in the jaxpr).

With ``elementwise=True`` other equations count too: one operation per result element (a cast, comparison or selection as
well as an addition), reductions and cumulative sums one per operand element, transcendental functions, roots and divisions
:data:`TRANSCENDENTAL` each, random bits :data:`RANDOM_WORD` per 32 bits (threefry: 20 rounds of 5 integer operations and the
key schedule, for two words). Moving data counts nothing. These are operations, not seconds: on a GPU elementwise work is bound
by memory, and costs more than its share of operations where XLA can't fuse it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import cache
from types import MappingProxyType
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jaxpipe._jax_compat import (
    Atom,
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Var,
    called_jaxpr,
    checkpoint_name_of,
    close_jaxpr,
    dtype_of,
    fresh_var,
    is_checkpoint,
    map_bodies,
    plain_collective,
    scan_parts,
    shape_of,
    sub_jaxprs,
    variables,
    with_outer_names,
    without_varying,
)


class EqnKind(Enum):
    """Says what a primitive does with the elements of its operands."""

    PRODUCT = auto()
    """Multiplies two operands and sums: much arithmetic."""
    CUSTOM = auto()
    """A kernel from elsewhere, or an unknown primitive."""
    KERNEL = auto()
    """Picks, places, orders or solves: a kernel of its own, bound by memory."""
    EXCHANGE = auto()
    """Needs other shards."""
    BODY = auto()
    """Runs jaxprs of its own, and costs what they cost."""
    CUMULATIVE = auto()
    REDUCTION = auto()
    ELEMENTWISE = auto()
    """Each element of the result from the elements at its place."""
    CAST = auto()
    """The same numbers in another dtype, place by place."""
    MOVE = auto()
    """The same elements elsewhere, fewer, or several times."""
    WINDOW = auto()
    """Reads or writes a part at a place known at run time."""
    RESHAPE = auto()
    """The same bytes under another shape."""
    SAME = auto()
    """Its operand; needed only by names and types."""
    BARRIER = auto()
    """Its operands; says when or where."""
    MAKE = auto()
    """Values from none, and random bits."""
    KEY = auto()
    """Random keys."""


_CHEAP = frozenset(
    {EqnKind.REDUCTION, EqnKind.ELEMENTWISE, EqnKind.CAST, EqnKind.MOVE, EqnKind.WINDOW, EqnKind.RESHAPE, EqnKind.SAME,
     EqnKind.BARRIER, EqnKind.MAKE, EqnKind.KEY}
)  # fmt: skip

TRANSCENDENTAL = 10
"""Operations of one transcendental function, root or division: a short polynomial or a Newton iteration."""


@dataclass(frozen=True, slots=True)
class Row:
    """``flops``: operations per element (of integers at most 1). ``view``: cheaper to redo than to keep, where it does not
    shrink. ``picks``: reads as much of its first operand as it returns. ``exchange``: which one, as GPUs call it; "" for those
    of statistics."""

    kind: EqnKind
    flops: int = 1
    view: bool = False
    picks: bool = False
    exchange: str = ""


_UNKNOWN = Row(EqnKind.CUSTOM)
_ROWS: tuple[tuple[Row, str], ...] = (
    (Row(EqnKind.PRODUCT), "dot_general conv_general_dilated ragged_dot ragged_dot_general hopper_ragged_dot scaled_dot"
                        " scaled_matmul scaled_matmul_wrapper dot_product_attention_fwd_wrapper"
                        " dot_product_attention_bwd_wrapper"),
    (Row(EqnKind.KERNEL), "scatter scatter-add scatter-sub scatter-mul scatter-min scatter-max scatter_add scatter_mul sort"
                       " top_k approx_top_k fft select_and_scatter select_and_scatter_add cholesky cholesky_update"
                       " triangular_solve tridiagonal tridiagonal_solve symmetric_product lu lu_pivots_to_permutation qr geqrf"
                       " geqp3 householder_product ormqr eig eigh svd schur hessenberg"),
    (Row(EqnKind.KERNEL, 0, picks=True), "gather"),
    (Row(EqnKind.BODY), "scan while cond pallas_call"),
    (Row(EqnKind.CUMULATIVE), "cumsum cumprod cummax cummin cumlogsumexp"),
    (Row(EqnKind.REDUCTION), "reduce reduce_sum reduce_prod reduce_max reduce_min reduce_and reduce_or reduce_xor argmax argmin"
                          " reduce_window reduce_window_sum reduce_window_max reduce_window_min select_and_gather_add"),
    (Row(EqnKind.ELEMENTWISE), "abs add add_any and bessel_i0e bessel_i1e ceil clamp clz complex conj eq eq_to floor ge gt imag"
                            " integer_pow is_finite le le_to lt lt_to max min mul mulhi ne neg nextafter not or"
                            " one_minus_square polynomial population_count real round select_n shift_left"
                            " shift_right_arithmetic shift_right_logical sign square sub xor"),
    (Row(EqnKind.ELEMENTWISE, TRANSCENDENTAL), "acos acosh asin asinh atan atan2 atanh cbrt cos cosh digamma div erf erf_inv"
                                            " erfc exp exp2 expm1 lgamma log log1p log2 logistic pow rem rsqrt sin sinh sqrt"
                                            " tan tanh"),
    (Row(EqnKind.CAST, view=True), "convert_element_type"),
    (Row(EqnKind.CAST), "reduce_precision"),
    (Row(EqnKind.MOVE), "bitcast_convert_type"),
    (Row(EqnKind.MOVE, 0, view=True), "broadcast_in_dim"),
    (Row(EqnKind.MOVE, 0), "broadcast_to tile transpose slice rev concatenate split stack unstack pad"),
    (Row(EqnKind.WINDOW, 0, picks=True), "dynamic_slice"),
    (Row(EqnKind.WINDOW, 0), "dynamic_update_slice"),
    (Row(EqnKind.RESHAPE, 0, view=True), "reshape squeeze expand_dims"),
    (Row(EqnKind.SAME, 0), "name pvary pcast copy copy_p"),
    (Row(EqnKind.BARRIER, 0), "stop_gradient optimization_barrier sharding_constraint layout_constraint preduced"
                           " vary_unreduced_cast vary_unreduced_cast_p reduced_vary_cast_p"),
    (Row(EqnKind.MAKE), "iota axis_index platform_index empty empty2 zeros_like random_bits threefry2x32 threefry4x32"
                     " philox2x32 philox4x32 rng_bit_generator rng_uniform iota_2x32_shape"),
    (Row(EqnKind.KEY), "random_seed random_split random_fold_in random_clone"),
    (Row(EqnKind.KEY, 0), "random_wrap random_unwrap"),
    (Row(EqnKind.EXCHANGE, exchange="all-reduce"), "psum psum_invariant unreduced_psum"),
    (Row(EqnKind.EXCHANGE, exchange="reduce-scatter"), "reduce_scatter unreduced_reduce_scatter"),
    (Row(EqnKind.EXCHANGE, exchange="all-gather"), "all_gather all_gather_invariant all_gather_reduced"),
    (Row(EqnKind.EXCHANGE, exchange="all-to-all"), "all_to_all ragged_all_to_all"),
    (Row(EqnKind.EXCHANGE, exchange="permute"), "ppermute pbroadcast pbroadcast_dynamic psend precv"),
    (Row(EqnKind.EXCHANGE), "pmax pmin unreduced_pmax unreduced_pmin"),
)  # fmt: skip
PRIMITIVES: Mapping[str, Row] = MappingProxyType({name: row for row, names in _ROWS for name in names.split()})
"""Name → what the primitive does."""


@cache
def row_of(name: str) -> Row:
    """Return the row of the primitive of this name; both halves of an exchange, started and awaited, are that exchange."""
    return PRIMITIVES.get(name.removesuffix("_start").removesuffix("_done"), _UNKNOWN)


def row(eqn: JaxprEqn) -> Row:
    """Return the row of an equation's primitive."""
    return row_of(eqn.primitive.name)


def kind(eqn: JaxprEqn) -> EqnKind:
    """Return what an equation does with the elements of its operands."""
    return row(eqn).kind


def has_body(eqn: JaxprEqn) -> bool:
    """Whether an equation runs a jaxpr among its parameters."""
    return next(sub_jaxprs(eqn), None) is not None


def is_product(eqn: JaxprEqn) -> bool:
    """Whether an equation is a matrix product or a convolution."""
    return kind(eqn) is EqnKind.PRODUCT


def is_attention_kernel(eqn: JaxprEqn) -> bool:
    """Whether an equation is cuDNN's attention, forwards or backwards."""
    return eqn.primitive.name.startswith("dot_product_attention")


def is_exchange(eqn: JaxprEqn) -> bool:
    """Whether an equation needs other shards."""
    return kind(eqn) is EqnKind.EXCHANGE


def is_cheap(eqn: JaxprEqn) -> bool:
    """Whether running an equation once more costs little beside the products of a layer."""
    return kind(eqn) in _CHEAP and not has_body(eqn)


def is_identity(eqn: JaxprEqn) -> bool:
    """Whether the result is the operand, once varying-axis types no longer matter."""
    return kind(eqn) is EqnKind.SAME and eqn.params.get("to", "varying") == "varying"


def mesh_axes(eqn: JaxprEqn) -> tuple[str, ...]:
    """The mesh axes over which an exchange goes."""
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return tuple(axes) if isinstance(axes, tuple | list) else (axes,)


_Node = TypeVar("_Node", bound=Hashable)


class Dataflow:
    """Who makes and who reads the values of a flat list of equations. ``maker``: position of the equation that makes a value;
    ``readers``: of those that read it. Built once, not changed."""

    def __init__(self, eqns: Sequence[JaxprEqn]) -> None:
        self.eqns = eqns
        self.maker: dict[Var, int] = {v: i for i, eqn in enumerate(eqns) for v in eqn.outvars}
        self.readers: dict[Var, list[int]] = {}
        for i, eqn in enumerate(eqns):
            for v in variables(eqn.invars):
                self.readers.setdefault(v, []).append(i)

    def inputs(self, i: int) -> Iterable[int]:
        """Return the equations whose results equation ``i`` reads."""
        return (self.maker[v] for v in variables(self.eqns[i].invars) if v in self.maker)

    def outputs(self, i: int) -> Iterable[int]:
        """Return the equations that read results of equation ``i``."""
        return (r for v in self.eqns[i].outvars for r in self.readers.get(v, ()))

    def needed(self, roots: Iterable[Atom], among: Callable[[int], bool]) -> set[int]:
        """Return the equations that ``roots`` depend on, walking only through those accepted by ``among``."""
        makers = (self.maker[v] for v in variables(roots) if v in self.maker)
        return reachable(filter(among, makers), lambda i: filter(among, self.inputs(i)))


def reachable(start: Iterable[_Node], near: Callable[[_Node], Iterable[_Node]]) -> set[_Node]:
    """Return ``start`` and all that can be reached from there, going from each to those ``near`` it."""
    nodes: set[_Node] = set()
    stack = list(start)
    while stack:
        node = stack.pop()
        if node not in nodes:
            nodes.add(node)
            stack.extend(near(node))
    return nodes


def called(names: Mapping[Var, Atom], atom: Atom) -> Atom:
    """Return the name that ``names`` give a value; the value itself, if they give none."""
    return names.get(atom, atom) if isinstance(atom, Var) else atom


RANDOM_WORD = 60
"""Operations for 32 random bits."""


@dataclass(frozen=True, slots=True)
class AttentionFormula:
    """The formula that counts the operations of an attention kernel. ``counts_masked``: pairs of positions that the mask leaves
    out count too, as where attention is made of products; ``backward``: operations of its backward ÷ those of its forward."""

    counts_masked: bool
    backward: float


EXECUTED = AttentionFormula(counts_masked=False, backward=2.5)
"""Operations that a kernel executes: its backward computes the scores again."""
PEERS = AttentionFormula(counts_masked=True, backward=2.0)
"""The formula behind the MFU that Megatron-LM and torchtitan publish."""


def jaxpr_flops(jaxpr: Any, *, elementwise: bool = False, attention: AttentionFormula = EXECUTED) -> int:
    """Count the operations of a ``Jaxpr`` or ``ClosedJaxpr``."""
    eqns = getattr(jaxpr, "jaxpr", jaxpr).eqns
    return sum(eqn_flops(eqn, elementwise=elementwise, attention=attention) for eqn in eqns)


def eqn_flops(eqn: JaxprEqn, *, elementwise: bool = False, attention: AttentionFormula = EXECUTED) -> int:
    """Count the operations of one equation."""
    name = eqn.primitive.name
    if is_product(eqn):
        if is_attention_kernel(eqn):
            return _attention_flops(eqn, attention)
        return _conv_flops(eqn) if name == "conv_general_dilated" else _dot_flops(eqn)
    bodies = [jaxpr_flops(sub, elementwise=elementwise, attention=attention) for sub in sub_jaxprs(eqn)]
    if name == "cond":
        return max(bodies, default=0)
    # A custom derivative has its function first, then the rules, which do not run.
    if name.startswith("custom_") and bodies:
        return bodies[0]
    if bodies:
        scan = scan_parts(eqn)
        return sum(bodies) * (scan.length if scan is not None else 1)
    return _elementwise_flops(eqn) if elementwise else 0


def multiplies_experts(eqn: JaxprEqn, experts: Collection[tuple[int, int]]) -> bool:
    """Return whether an equation multiplies rows by experts' matrices, or makes the gradient of those: a product in groups
    (over one batch axis, or ragged) of an array that may be a parameter of theirs. ``experts``: how many each of these holds,
    along axis 0, and how many elements."""
    is_batched = eqn.primitive.name == "dot_general" and len(eqn.params["dimension_numbers"][1][0]) == 1
    if not is_batched and "ragged_dot_dimension_numbers" not in eqn.params:
        return False
    return any((shape[0], math.prod(shape)) in experts for shape in map(shape_of, (*eqn.invars, *eqn.outvars)))


def is_ragged(jaxpr: Any) -> bool:
    """Return whether a body has products in groups of as many rows as there are."""
    return any("ragged_dot_dimension_numbers" in eqn.params for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns)


def expert_flops(jaxpr: Any, experts: Collection[tuple[int, int]]) -> int:
    """Count the operations of experts' products, on all rows of their buffers."""
    total = 0
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        scan = scan_parts(eqn)
        inside = sum(expert_flops(sub, experts) for sub in sub_jaxprs(eqn)) * (scan.length if scan is not None else 1)
        total += eqn_flops(eqn) if multiplies_experts(eqn, experts) else inside
    return total


def _dot_flops(eqn: JaxprEqn) -> int:
    """A product in groups (ragged) is as much work as one: a row belongs to one group. Scaled ones contract the last axis."""
    lhs, out = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    ragged = eqn.params.get("ragged_dot_dimension_numbers")
    dims = ragged.dot_dimension_numbers if ragged is not None else eqn.params.get("dimension_numbers")
    contracted = dims[0][0] if dims is not None else (len(lhs) - 1,)
    groups = out[0] if ragged is not None and set(ragged.lhs_ragged_dimensions) & set(contracted) else 1
    return 2 * math.prod(out) * math.prod(lhs[i] for i in contracted) // groups


def _conv_flops(eqn: JaxprEqn) -> int:
    """Each output element sums over the kernel's window and its input channels (already per group in the kernel's shape)."""
    numbers = eqn.params["dimension_numbers"]
    kernel = shape_of(eqn.invars[1])
    out_features: int = kernel[numbers.rhs_spec[0]]
    batch_groups = int(eqn.params.get("batch_group_count", 1))
    per_output = math.prod(kernel) // max(out_features, 1)
    return 2 * math.prod(shape_of(eqn.outvars[0])) * per_output // batch_groups


def _attention_flops(eqn: JaxprEqn, formula: AttentionFormula) -> int:
    """q [B, T, H, K] over k, v [B, S, G, K]. ``mask_type`` is one of ``CAUSAL`` or not; padding is not known here."""
    B, T, H, K = shape_of(eqn.invars[0])
    S = shape_of(eqn.invars[1])[1]
    window = eqn.params["sliding_window_length"] or S
    is_causal = "CAUSAL" in eqn.params["mask_type"].name and not formula.counts_masked
    pairs = sum(min(t + 1, window, S) for t in range(T)) if is_causal else T * S
    return round(2 * B * H * K * pairs * 2 * (formula.backward if "_bwd" in eqn.primitive.name else 1))


def _elementwise_flops(eqn: JaxprEqn) -> int:
    name = eqn.primitive.name
    each = row(eqn)
    operands = eqn.invars if each.kind in (EqnKind.REDUCTION, EqnKind.CUMULATIVE) else eqn.outvars
    elements = max((math.prod(shape_of(a)) for a in operands), default=0)
    if name == "random_bits":
        return elements * max(1, int(eqn.params.get("bit_width", 32)) // 32) * RANDOM_WORD
    if name == "threefry2x32":
        return elements * 2 * RANDOM_WORD
    if name == "integer_pow":
        return elements * _multiplications(int(eqn.params["y"]))
    is_integer = any(getattr(dtype_of(v), "kind", "") in ("i", "u") for v in eqn.outvars)
    return elements * (min(each.flops, 1) if is_integer else each.flops)


def _multiplications(power: int) -> int:
    """Count the multiplications of an integer power by repeated squaring; a negative power divides as well."""
    n = abs(power)
    return max(1, n.bit_length() - 1 + n.bit_count() - 1) + (TRANSCENDENTAL if power < 0 else 0)


def is_array(leaf: Any) -> bool:
    """Whether a boundary leaf is an array (or the type of one) rather than a static value."""
    return isinstance(leaf, jax.ShapeDtypeStruct | jax.Array) or (hasattr(leaf, "shape") and hasattr(leaf, "dtype"))


def is_inexact(leaf: Any) -> bool:
    """Whether a leaf carries a gradient."""
    return is_array(leaf) and bool(jnp.issubdtype(leaf.dtype, jnp.inexact))


def array_leaves(tree: Any) -> list[Any]:
    """Return the array leaves of a boundary pytree, in port order."""
    return [leaf for leaf in jax.tree.leaves(tree) if is_array(leaf)]


def fill(tree: Any, arrays: Sequence[Any]) -> Any:
    """Replace the array leaves of ``tree``, in port order; static leaves stay."""
    leaves, treedef = jax.tree.flatten(tree)
    rest = iter(arrays)
    return jax.tree.unflatten(treedef, [next(rest) if is_array(leaf) else leaf for leaf in leaves])


@dataclass(frozen=True, slots=True)
class FlatJaxpr:
    """Equations without calls. ``outvars`` may be inputs or literals. ``consts``: values of free variables.

    ``recomputed``: positions of the equations of transposed checkpoint bodies. ``names``: what ``checkpoint_name`` called a
    value, in program order.
    """

    invars: tuple[Var, ...]
    outvars: tuple[Atom, ...]
    eqns: tuple[JaxprEqn, ...]
    consts: Mapping[Var, Any]
    recomputed: frozenset[int]
    names: tuple[tuple[str, Atom], ...]

    def close(self) -> ClosedJaxpr:
        return close_jaxpr(list(self.consts.items()), self.invars, self.eqns, self.outvars)


BodyOf = Callable[[JaxprEqn], tuple[Jaxpr, Sequence[Any]] | None]
"""A function from an equation to what takes its place: a jaxpr and its constants, or None for the equation itself."""


def flatten(
    jaxpr: Jaxpr,
    consts: Sequence[Any],
    sources: str = "",
    *,
    at_calls: bool = False,
    body_of: BodyOf | None = None,
) -> FlatJaxpr:
    """Flatten ``jaxpr``: return it without call-like equations.

    ``sources``: prefix of names; a value named so is cut off from what computes it and becomes a free variable (found in
    ``names``): how cotangents, whose types are known only once the forward pass has been traced, enter as inputs.
    ``at_calls``: equations of a body tell the place of the call as their source. Their own may be another caller's: JAX traces
    a jitted function once. ``body_of``: for equations that are no calls; by default products become products of matrices.
    """
    flat = _Flattening(sources, at_calls, body_of or _of_matrices)
    env: dict[Var, Atom] = {v: flat.const(v, c) for v, c in zip(jaxpr.constvars, consts, strict=True)}
    invars = tuple(_bind(env, v) for v in jaxpr.invars)
    for eqn in jaxpr.eqns:
        flat.add(eqn, None, env, in_checkpoint=False)
    outvars = tuple(called(env, a) for a in jaxpr.outvars)
    return FlatJaxpr(invars, outvars, tuple(flat.eqns), flat.consts, frozenset(flat.recomputed), tuple(flat.names))


class _Flattening:
    """The equations gathered so far. ``tainted``: variables that depend on a source."""

    def __init__(self, sources: str, at_calls: bool, body_of: BodyOf) -> None:
        self.sources, self.at_calls, self.body_of = sources, at_calls, body_of
        self.eqns: list[JaxprEqn] = []
        self.consts: dict[Var, Any] = {}
        self.recomputed: set[int] = set()
        self.names: list[tuple[str, Atom]] = []
        self.tainted: set[Var] = set()
        self._const_vars: dict[int, Var] = {}

    def const(self, var: Var, value: Any) -> Var:
        """Return the variable that stands for a constant, one per array."""
        if id(value) not in self._const_vars:
            self._const_vars[id(value)] = fresh_var(without_varying(var.aval))
            self.consts[self._const_vars[id(value)]] = value
        return self._const_vars[id(value)]

    def add(self, eqn: JaxprEqn, outer: JaxprEqn | None, env: dict[Var, Atom], *, in_checkpoint: bool) -> None:
        invars = [called(env, a) for a in eqn.invars]
        if is_identity(eqn):
            env[eqn.outvars[0]] = self._identity(eqn, invars[0])
            return
        # Only a checkpoint body that a cotangent enters is recomputation; the same body in the forward pass is F's.
        tainted = any(isinstance(a, Var) and a in self.tainted for a in invars)
        call = called_jaxpr(eqn) or self.body_of(eqn)
        if call is None:
            outvars = [_bind(env, v) for v in eqn.outvars]
            plain = plain_collective(map_bodies(eqn, self._flat_body))
            self.eqns.append(self._placed(with_outer_names(plain, outer, invars, outvars), outer))
            if in_checkpoint:
                self.recomputed.add(len(self.eqns) - 1)
            if tainted:
                self.tainted.update(outvars)
            return
        # A fresh environment for each call: JAX shares one body between all callers of a jitted function.
        body, consts = call
        caller = self._placed(with_outer_names(eqn, outer, invars, eqn.outvars), outer)
        inner: dict[Var, Atom] = dict(zip(body.invars, invars, strict=True))
        inner.update((v, self.const(v, c)) for v, c in zip(body.constvars, consts, strict=True))
        for sub in body.eqns:
            self.add(sub, caller, inner, in_checkpoint=in_checkpoint or (tainted and is_checkpoint(eqn)))
        env.update((v, called(inner, a)) for v, a in zip(eqn.outvars, body.outvars, strict=True))

    def _flat_body(self, jaxpr: Jaxpr, consts: Sequence[Any]) -> ClosedJaxpr:
        return flatten(jaxpr, consts, at_calls=self.at_calls, body_of=self.body_of).close()

    def _placed(self, eqn: JaxprEqn, outer: JaxprEqn | None) -> JaxprEqn:
        placed: JaxprEqn = eqn.replace(source_info=outer.source_info) if self.at_calls and outer is not None else eqn
        return placed

    def _identity(self, eqn: JaxprEqn, value: Atom) -> Atom:
        name = checkpoint_name_of(eqn)
        if name is None:
            return value
        if self.sources and name.startswith(self.sources):
            # The old value is dropped: what computed it (zeros) becomes dead, and the new variable is an input of the program.
            value = fresh_var(without_varying(value.aval))
            self.tainted.add(value)
        self.names.append((name, value))
        return value


def _of_matrices(eqn: JaxprEqn) -> tuple[Jaxpr, Sequence[Any]] | None:
    """Write a product over leading axes as a body that flattens its operands; None for others, and if they are matrices."""
    if eqn.primitive.name != "dot_general" or all(len(shape_of(a)) <= 2 for a in eqn.invars):
        return None
    (left, right), (batch, _) = eqn.params["dimension_numbers"]
    leading = tuple(range(len(left)))
    if not leading or batch or tuple(left) != leading or tuple(right) != leading:
        return None
    params = eqn.params | {"dimension_numbers": (((0,), (0,)), ((), ())), "out_sharding": None}
    rows = math.prod(shape_of(eqn.invars[0])[: len(left)])
    shapes = [(rows, math.prod(shape_of(a)[len(left) :])) for a in eqn.invars]

    def product(*operands: jax.Array) -> jax.Array:
        matrix = eqn.primitive.bind(*map(jax.lax.reshape, operands, shapes), **params)
        return jax.lax.reshape(matrix, shape_of(eqn.outvars[0]))

    avals = [jax.ShapeDtypeStruct(shape_of(a), dtype_of(a)) for a in eqn.invars]
    body = jax.make_jaxpr(product)(*avals).jaxpr
    # With the product's own place in the model, or every message about it would name this file.
    traceback = eqn.source_info.traceback
    return body.replace(eqns=[e.replace(source_info=e.source_info.replace(traceback=traceback)) for e in body.eqns]), ()


def _bind(env: dict[Var, Atom], var: Var) -> Var:
    new = fresh_var(without_varying(var.aval))
    env[var] = new
    return new
