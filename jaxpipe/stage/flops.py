"""Floating-point operations of a jaxpr, counted from shapes.

Matrix products (``dot_general``) and convolutions are exact: 2 · (multiply-adds). Bodies of calls and branches are followed;
``scan`` counts its body once per iteration, ``cond`` the most expensive branch, ``while`` one iteration (the trip count is not
in the jaxpr). With ``elementwise=True`` other equations count one operation per result element, reductions per operand element.
"""

from __future__ import annotations

import math
from typing import Any

from jaxpipe._jax_compat import JaxprEqn, scan_parts, shape_of, sub_jaxprs

_FREE = frozenset(
    {"reshape", "broadcast_in_dim", "squeeze", "expand_dims", "transpose", "slice", "concatenate", "pvary", "pcast"}
)


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
    operands = eqn.invars if eqn.primitive.name.startswith(("reduce", "arg")) else eqn.outvars
    return max((math.prod(shape_of(a)) for a in operands), default=0)
