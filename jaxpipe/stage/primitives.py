"""What each JAX primitive does: one table, which everything that classifies equations reads.

A name that is not in it is :attr:`EqnKind.CUSTOM`: it may do anything, so it is never recomputed for little, moved between B
and W or fused with its neighbours. Which primitives call a jaxpr, and how loops are taken apart, tells
:mod:`jaxpipe._jax_compat`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from functools import cache
from types import MappingProxyType

from jaxpipe._jax_compat import JaxprEqn, sub_jaxprs


class EqnKind(Enum):
    """What a primitive does with the elements of its operands."""

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
    (Row(EqnKind.PRODUCT), "dot_general conv_general_dilated ragged_dot ragged_dot_general scaled_dot scaled_matmul"
                        " scaled_matmul_wrapper dot_product_attention_fwd_wrapper dot_product_attention_bwd_wrapper"),
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
    """What the primitive of this name does; both halves of an exchange that is started and awaited are that exchange."""
    return PRIMITIVES.get(name.removesuffix("_start").removesuffix("_done"), _UNKNOWN)


def row(eqn: JaxprEqn) -> Row:
    """What an equation's primitive does."""
    return row_of(eqn.primitive.name)


def kind(eqn: JaxprEqn) -> EqnKind:
    """What an equation does with the elements of its operands."""
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
