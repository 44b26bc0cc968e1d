"""Rewrites programs of stages so that XLA's CPU backend runs them fast.

**Reductions.** By itself it makes a tree of windows of each reduction over more than 32 elements, which is slow along the last
axis. With that pass off a reduction along the last axis is one vectorised loop, and one along others strides through memory
element by element, up to fifty times slower. So these become a few reductions of groups of rows, vectorised over what lies in
a row; and long sums along the last axis are cut into parts, for the error of one loop grows with its length. The error is no
larger than that of XLA's trees. Barriers keep XLA from making one reduction of them again.

**Products** run on Eigen, which packs what it multiplies, and takes up to half as long again where it packs across rows of a
right operand. So a bᵀ multiplies by a transposed copy of b, and aᵀ b with the wider one on the left is computed as (bᵀ a)ᵀ.

**Values that several read.** XLA fuses elementwise work into each reader. What a product or a caller reads is written to memory
anyway, so a barrier has the others read that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import jax
from jax import lax

from jaxpipe._jax_compat import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Var,
    barrier,
    close_jaxpr,
    dtype_of,
    fresh_var,
    shape_of,
    variables,
)  # fmt: skip
from jaxpipe.stage.jaxprs import Dataflow, EqnKind, called, flatten, is_product, kind

OPTIONS: Mapping[str, str] = {"xla_disable_hlo_passes": "cse_barrier_expander,tree_reduction_rewriter"}
"""Compiler options that the rewriting needs: barriers stay until elementwise work is fused, and there are no trees of
windows."""
_JOINS: Mapping[str, Any] = {"reduce_sum": lax.add, "reduce_max": lax.max, "reduce_min": lax.min}
_ROWS, _PART = 8, 1024
"""Elements that a loop reduces where there are several: along other axes than the last, and along the last."""
_FEW_ROWS, _LONG = 16, 8192
"""The most elements that a single loop reduces: along other axes than the last, and along the last."""

_MANY_ROWS = 128
"""The least number of rows for which the transposed copy of a matrix pays."""


def for_cpu(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Rewrite the reductions and products of ``closed``, and those of its loops, and put barriers behind what several read."""
    return _made_once(flatten(closed.jaxpr, closed.consts, body_of=lambda eqn: _parts(eqn) or _turned(eqn)).close())


def _made_once(closed: ClosedJaxpr) -> ClosedJaxpr:
    flow = Dataflow(closed.jaxpr.eqns)
    results = set(variables(closed.jaxpr.outvars))

    def is_written(v: Var) -> bool:
        readers = [flow.eqns[i] for i in flow.readers.get(v, ())]
        return v in results or any(
            is_product(eqn) or (kind(eqn) is EqnKind.RESHAPE and is_written(eqn.outvars[0])) for eqn in readers
        )

    def is_held(eqn: JaxprEqn, v: Var) -> bool:
        if kind(eqn) in (EqnKind.ELEMENTWISE, EqnKind.CAST):
            return len(flow.readers.get(v, ())) + (v in results) > 1 and is_written(v)
        # Without a barrier XLA would swap the product's operands again, to leave out a transposition.
        return _is_over_rows(eqn) and shape_of(v)[0] != shape_of(v)[1]

    names: dict[Var, Var] = {}
    eqns: list[JaxprEqn] = []
    for eqn in closed.jaxpr.eqns:
        eqns.append(eqn.replace(invars=[called(names, a) for a in eqn.invars]))
        held = [v for v in eqn.outvars if is_held(eqn, v)]
        names |= {v: fresh_var(v.aval) for v in held}
        eqns += [barrier([v], [names[v]]) for v in held]
    consts = list(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    return close_jaxpr(consts, closed.jaxpr.invars, eqns, [called(names, a) for a in closed.jaxpr.outvars])


def _parts(eqn: JaxprEqn) -> tuple[Jaxpr, Sequence[Any]] | None:
    """Write a reduction as a body of smaller ones; None where it is one loop, and for other equations."""
    if eqn.primitive.name not in _JOINS:
        return None
    shape = shape_of(eqn.invars[0])
    runs = _runs(shape, eqn.params["axes"])
    if 0 in shape or not runs or (len(runs) == 1 and _is_one_loop(eqn, *runs[0])):
        return None

    def reduced(x: jax.Array) -> jax.Array:
        for rows, width in runs:
            x = _joined(eqn, lax.reshape(x, (x.size // (rows * width), rows, width)))
        return lax.reshape(x, shape_of(eqn.outvars[0]))

    return jax.make_jaxpr(reduced)(jax.ShapeDtypeStruct(shape, dtype_of(eqn.invars[0]))).jaxpr, ()


def _turned(eqn: JaxprEqn) -> tuple[Jaxpr, Sequence[Any]] | None:
    """Write a product with a matrix as a body that transposes the matrix or the result where that is faster; None for
    others."""
    if eqn.primitive.name != "dot_general":
        return None
    params, (over, batch) = eqn.params, eqn.params["dimension_numbers"]
    a, b = map(shape_of, eqn.invars)
    if batch == ((), ()) and over == ((len(a) - 1,), (1,)) and len(b) == 2 and math.prod(a[:-1]) >= _MANY_ROWS:
        params = params | {"dimension_numbers": ((over[0], (0,)), batch)}

        def product(a: jax.Array, b: jax.Array) -> jax.Array:
            result: jax.Array = eqn.primitive.bind(a, lax.optimization_barrier(lax.transpose(b, (1, 0))), **params)
            return result

    elif _is_over_rows(eqn) and a[1] > b[1]:
        precision = params["precision"]
        params = params | {"precision": precision[::-1] if isinstance(precision, tuple) else precision}

        def product(a: jax.Array, b: jax.Array) -> jax.Array:
            return lax.transpose(eqn.primitive.bind(b, a, **params), (1, 0))

    else:
        return None
    avals = [jax.ShapeDtypeStruct(shape_of(v), dtype_of(v)) for v in eqn.invars]
    return jax.make_jaxpr(product)(*avals).jaxpr, ()


def _is_over_rows(eqn: JaxprEqn) -> bool:
    """Whether an equation is a product of two matrices over the rows of both."""
    is_dot = eqn.primitive.name == "dot_general" and eqn.params["dimension_numbers"] == (((0,), (0,)), ((), ()))
    return is_dot and all(len(shape_of(a)) == 2 for a in eqn.invars)


def _runs(shape: Sequence[int], axes: Sequence[int]) -> list[tuple[int, int]]:
    """Return neighbouring reduced axes from the last on: the elements along them, and those along the kept axes behind them."""
    runs, width = [], 1
    for is_reduced, run in groupby(reversed(range(len(shape))), key=lambda a: a in axes):
        size = math.prod(shape[a] for a in run)
        if is_reduced:
            runs.append((size, width))
        else:
            width *= size
    return runs


def _is_one_loop(eqn: JaxprEqn, rows: int, width: int) -> bool:
    return rows <= (_FEW_ROWS if width > 1 else _LONG) or (width == 1 and eqn.primitive.name != "reduce_sum")


def _joined(eqn: JaxprEqn, x: jax.Array) -> jax.Array:
    """Reduce ``x`` [A, R, C] along R."""

    def one_loop(x: jax.Array, axis: int) -> jax.Array:
        result: jax.Array = eqn.primitive.bind(x, **eqn.params | {"axes": (axis,)})
        return result

    before, rows, width = x.shape
    if _is_one_loop(eqn, rows, width):
        return one_loop(x, 1)
    part = _ROWS if width > 1 else _PART
    parts, rest = divmod(rows, part)
    grouped = x if rest == 0 else lax.slice_in_dim(x, 0, rows - rest, axis=1)
    groups = one_loop(lax.reshape(grouped, (before, parts, part, width)), 2)
    # Without the barrier XLA would make one reduction of both levels again.
    joined = _joined(eqn, lax.optimization_barrier(groups))
    return joined if rest == 0 else _JOINS[eqn.primitive.name](joined, one_loop(x[:, rows - rest :], 1))
