"""Floating-point operations of a jaxpr, counted from shapes.

Matrix products and convolutions are exact: 2 · (multiply-adds), and so are cuDNN's attention kernels: of the pairs of positions
that their mask leaves, two products forwards and five backwards. Bodies of calls and branches are followed;
``scan`` counts its body once per iteration, ``cond`` the most expensive branch, ``while`` one iteration (the trip count is not
in the jaxpr).

With ``elementwise=True`` other equations count too: one operation per result element (a cast, comparison or selection as
well as an addition), reductions and cumulative sums one per operand element, transcendental functions, roots and divisions
:data:`TRANSCENDENTAL` each, random bits :data:`RANDOM_WORD` per 32 bits (threefry: 20 rounds of 5 integer operations and the
key schedule, for two words). Moving data counts nothing. These are operations, not seconds: on a GPU elementwise work is bound
by memory, and costs more than its share of operations where XLA can't fuse it.
"""

from __future__ import annotations

import math
from typing import Any

from jaxpipe._jax_compat import JaxprEqn, dtype_of, scan_parts, shape_of, sub_jaxprs
from jaxpipe.stage.primitives import TRANSCENDENTAL, Kind, is_attention_kernel, is_product, row

RANDOM_WORD = 60
"""Operations for 32 random bits."""


def jaxpr_flops(jaxpr: Any, *, elementwise: bool = False) -> int:
    """Operations of a ``Jaxpr`` or ``ClosedJaxpr``."""
    return sum(eqn_flops(eqn, elementwise=elementwise) for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns)


def eqn_flops(eqn: JaxprEqn, *, elementwise: bool = False) -> int:
    """Operations of one equation."""
    name = eqn.primitive.name
    if is_product(eqn):
        if is_attention_kernel(eqn):
            return _attention_flops(eqn)
        return _conv_flops(eqn) if name == "conv_general_dilated" else _dot_flops(eqn)
    bodies = [jaxpr_flops(sub, elementwise=elementwise) for sub in sub_jaxprs(eqn)]
    if name == "cond":
        return max(bodies, default=0)
    if name.startswith("custom_") and bodies:
        return bodies[0]
    if bodies:
        scan = scan_parts(eqn)
        return sum(bodies) * (scan.length if scan is not None else 1)
    return _elementwise_flops(eqn) if elementwise else 0


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


def _attention_flops(eqn: JaxprEqn) -> int:
    """q [B, T, H, K] over k, v [B, S, G, K]. ``mask_type`` is one of ``CAUSAL`` or not; padding is not known here."""
    B, T, H, K = shape_of(eqn.invars[0])
    S = shape_of(eqn.invars[1])[1]
    window = eqn.params["sliding_window_length"] or S
    pairs = sum(min(t + 1, window, S) for t in range(T)) if "CAUSAL" in eqn.params["mask_type"].name else T * S
    return 2 * B * H * K * pairs * (5 if "_bwd" in eqn.primitive.name else 2)


def _elementwise_flops(eqn: JaxprEqn) -> int:
    name = eqn.primitive.name
    each = row(eqn)
    operands = eqn.invars if each.kind in (Kind.REDUCTION, Kind.CUMULATIVE) else eqn.outvars
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
