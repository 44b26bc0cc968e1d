"""Floating-point operations of a jaxpr, counted from shapes.

Matrix products (``dot_general``) and convolutions are exact: 2 · (multiply-adds). Bodies of calls and branches are followed;
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

TRANSCENDENTAL = 10
"""Operations of one transcendental function, root or division: a short polynomial or a Newton iteration."""

RANDOM_WORD = 60
"""Operations for 32 random bits."""

_FREE = frozenset(
    {
        "reshape", "broadcast_in_dim", "squeeze", "expand_dims", "transpose", "slice", "concatenate", "pvary", "pcast", "copy",
        "rev", "split", "gather", "dynamic_slice", "dynamic_update_slice", "pad", "random_wrap", "random_unwrap",
        "optimization_barrier",
    }
)  # fmt: skip
_TRANSCENDENTAL = frozenset(
    {
        "exp", "exp2", "expm1", "log", "log1p", "logistic", "tanh", "sinh", "cosh", "asinh", "acosh", "atanh", "sin", "cos",
        "tan", "asin", "acos", "atan", "atan2", "erf", "erfc", "erf_inv", "lgamma", "digamma", "pow", "sqrt", "rsqrt", "cbrt",
        "div", "rem",
    }
)  # fmt: skip


def jaxpr_flops(jaxpr: Any, *, elementwise: bool = False) -> int:
    """Operations of a ``Jaxpr`` or ``ClosedJaxpr``."""
    return sum(eqn_flops(eqn, elementwise=elementwise) for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns)


def eqn_flops(eqn: JaxprEqn, *, elementwise: bool = False) -> int:
    """Operations of one equation."""
    name = eqn.primitive.name
    if name == "dot_general":
        return _dot_flops(eqn)
    if name == "conv_general_dilated":
        return _conv_flops(eqn)
    bodies = [jaxpr_flops(sub, elementwise=elementwise) for sub in sub_jaxprs(eqn)]
    if name == "cond":
        return max(bodies, default=0)
    if name.startswith("custom_") and bodies:
        return bodies[0]
    if bodies:
        scan = scan_parts(eqn)
        return sum(bodies) * (scan.length if scan is not None else 1)
    return _elementwise_flops(eqn) if elementwise and name not in _FREE else 0


def _dot_flops(eqn: JaxprEqn) -> int:
    contracted: tuple[int, ...]
    (contracted, _), _ = eqn.params["dimension_numbers"]
    lhs = shape_of(eqn.invars[0])
    return 2 * math.prod(shape_of(eqn.outvars[0])) * math.prod(lhs[i] for i in contracted)


def _conv_flops(eqn: JaxprEqn) -> int:
    """Each output element sums over the kernel's window and its input channels (already per group in the kernel's shape)."""
    numbers = eqn.params["dimension_numbers"]
    kernel = shape_of(eqn.invars[1])
    out_features: int = kernel[numbers.rhs_spec[0]]
    batch_groups = int(eqn.params.get("batch_group_count", 1))
    per_output = math.prod(kernel) // max(out_features, 1)
    return 2 * math.prod(shape_of(eqn.outvars[0])) * per_output // batch_groups


def _elementwise_flops(eqn: JaxprEqn) -> int:
    name = eqn.primitive.name
    operands = eqn.invars if name.startswith(("reduce", "arg", "cum")) else eqn.outvars
    elements = max((math.prod(shape_of(a)) for a in operands), default=0)
    if name == "random_bits":
        return elements * max(1, int(eqn.params.get("bit_width", 32)) // 32) * RANDOM_WORD
    if name == "threefry2x32":
        return elements * 2 * RANDOM_WORD
    if name == "integer_pow":
        return elements * _multiplications(int(eqn.params["y"]))
    is_integer = any(getattr(dtype_of(v), "kind", "") in ("i", "u") for v in eqn.outvars)
    return elements * (TRANSCENDENTAL if name in _TRANSCENDENTAL and not is_integer else 1)


def _multiplications(power: int) -> int:
    """Of raising to an integer power by repeated squaring; a negative one divides as well."""
    n = abs(power)
    return max(1, n.bit_length() - 1 + n.bit_count() - 1) + (TRANSCENDENTAL if power < 0 else 0)
