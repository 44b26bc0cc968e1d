"""Programs computed equation by equation, by NumPy where it has the operation: XLA compiles every other operation anew for each
shape, which takes far longer than a tiny program does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from jaxpipe._jax_compat import called_jaxpr, eval_jaxpr

PLAIN = frozenset(map(np.dtype, ("bool", "int32", "int64", "uint32", "float32", "float64")))


def _dot(a: Any, b: Any, *, dimension_numbers: Any) -> Any:
    (contract_a, contract_b), (batch_a, batch_b) = dimension_numbers
    names_a, names_b = list(range(a.ndim)), [a.ndim + k for k in range(b.ndim)]
    for x, y in zip((*contract_a, *batch_a), (*contract_b, *batch_b), strict=True):
        names_b[y] = names_a[x]
    free_a = [n for k, n in enumerate(names_a) if k not in (*contract_a, *batch_a)]
    free_b = [n for k, n in enumerate(names_b) if k not in (*contract_b, *batch_b)]
    return np.einsum(a, names_a, b, names_b, [*(names_a[k] for k in batch_a), *free_a, *free_b])


def _broadcast(a: Any, *, shape: Any, broadcast_dimensions: Any) -> Any:
    wide = [1] * len(shape)
    for k, at in enumerate(broadcast_dimensions):
        wide[at] = a.shape[k]
    return np.broadcast_to(a.reshape(wide), shape)


def _slice(a: Any, *, start_indices: Any, limit_indices: Any, strides: Any) -> Any:
    steps = strides or (1,) * a.ndim
    return a[tuple(slice(*bounds) for bounds in zip(start_indices, limit_indices, steps, strict=True))]


def _integer_pow(a: Any, *, y: int) -> Any:
    return a**y if y >= 0 else 1 / a**-y


OPERATIONS: dict[str, Callable[..., Any]] = {
    "add": np.add, "add_any": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "neg": np.negative,
    "max": np.maximum, "min": np.minimum, "exp": np.exp, "log": np.log, "tanh": np.tanh, "sin": np.sin, "cos": np.cos,
    "sqrt": np.sqrt, "square": np.square, "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal, "and": np.bitwise_and, "or": np.bitwise_or, "not": np.invert,
    "stop_gradient": np.asarray,
    "rsqrt": lambda a: 1 / np.sqrt(a), "copy": np.asarray, "copy_p": np.asarray, "name": np.asarray,
    "convert_element_type": np.asarray, "integer_pow": _integer_pow, "dot_general": _dot, "broadcast_in_dim": _broadcast,
    "slice": _slice, "transpose": lambda a, permutation: a.transpose(permutation),
    "squeeze": lambda a, dimensions: a.squeeze(dimensions),
    "concatenate": lambda *arrays, dimension: np.concatenate(arrays, dimension),
    "select_n": lambda which, no, yes: np.where(which, yes, no),
    "reduce_sum": lambda a, axes: a.sum(axes, dtype=a.dtype), "reduce_max": lambda a, axes: a.max(axes),
}  # fmt: skip
READ: dict[str, tuple[str, ...]] = {
    "integer_pow": ("y",), "dot_general": ("dimension_numbers",), "broadcast_in_dim": ("shape", "broadcast_dimensions"),
    "slice": ("start_indices", "limit_indices", "strides"), "transpose": ("permutation",), "squeeze": ("dimensions",),
    "concatenate": ("dimension",), "reduce_sum": ("axes",), "reduce_max": ("axes",),
}  # fmt: skip
"""The parameters that say something about values; the type of the result every equation has."""


def interpret(jaxpr: Any, constants: Sequence[Any], *args: Any) -> list[Any]:
    """Return the results of an open jaxpr."""
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *args], strict=True))
    for eqn in jaxpr.eqns:
        inputs = [v.val if hasattr(v, "val") else values[v] for v in eqn.invars]
        values.update(zip(eqn.outvars, _results(eqn, inputs), strict=True))
    return [v.val if hasattr(v, "val") else values[v] for v in jaxpr.outvars]


def _results(eqn: Any, inputs: list[Any]) -> list[Any]:
    name = eqn.primitive.name
    if (called := called_jaxpr(eqn)) is not None:
        return interpret(*called, *inputs)
    if name == "optimization_barrier":
        return inputs
    if name == "reshape" and eqn.params["dimensions"] is None and _plain(eqn):
        return [np.asarray(inputs[0]).reshape(eqn.outvars[0].aval.shape)]
    if name in OPERATIONS and _plain(eqn):
        arrays = [np.asarray(a, v.aval.dtype) for a, v in zip(inputs, eqn.invars, strict=True)]
        params = {k: eqn.params[k] for k in READ.get(name, ())}
        result = np.asarray(OPERATIONS[name](*arrays, **params), eqn.outvars[0].aval.dtype)
        assert result.shape == eqn.outvars[0].aval.shape
        return [result]
    read = {v: a for v, a in zip(eqn.invars, inputs, strict=True) if not hasattr(v, "val")}
    equation = SimpleNamespace(constvars=[], invars=list(read), eqns=[eqn], outvars=eqn.outvars)
    return list(eval_jaxpr(equation, [], *read.values()))


def _plain(eqn: Any) -> bool:
    return all(getattr(v.aval, "dtype", None) in PLAIN for v in (*eqn.invars, *eqn.outvars))
