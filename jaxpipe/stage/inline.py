"""Flatten a jaxpr: replace every call-like equation (jit, custom derivative, checkpoint) by the equations of its body.

The cut into F, B and W needs single equations: a jitted helper may hold work of all three. ``scan``, ``while`` and ``cond``
stay, their bodies flattened. Variables are renamed at each use, since JAX shares bodies between calls; name stacks are extended
by the caller's, so an equation still tells its layer.

Varying-axis types are dropped from all variables and bodies: they have done their work when the gradients are traced, and the
cut programs run with ``check_vma=False``; sums over shards become plain sums. Identities disappear: casts to varying, copies,
and ``checkpoint_name``, whose names are returned beside the equations as ``names``.

A checkpoint body that depends on a cotangent is the transposed one: what it computes from saved values is recomputation, and
belongs to the backward pass although it does not depend on the cotangent. Its equations are returned as ``recomputed``.

A product over leading axes of both operands (a weight gradient over batch and time) becomes one of two matrices: given more
axes, XLA's CPU backend copies an operand transposed, and computes in each copy all that leads to it. The numbers are the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

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
    shape_of,
    with_outer_names,
    without_varying,
)
from jaxpipe.stage.dataflow import called
from jaxpipe.stage.primitives import is_identity


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
"""What to put in place of an equation: a jaxpr and its constants, or None for the equation itself."""


def flatten(
    jaxpr: Jaxpr,
    consts: Sequence[Any],
    sources: str = "",
    *,
    at_calls: bool = False,
    body_of: BodyOf | None = None,
) -> FlatJaxpr:
    """``jaxpr`` without call-like equations.

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
        """The variable that stands for a constant, one per array."""
        if id(value) not in self._const_vars:
            self._const_vars[id(value)] = fresh_var(without_varying(var.aval))
            self.consts[self._const_vars[id(value)]] = value
        return self._const_vars[id(value)]

    def add(self, eqn: JaxprEqn, outer: JaxprEqn | None, env: dict[Var, Atom], *, in_checkpoint: bool) -> None:
        invars = [called(env, a) for a in eqn.invars]
        if is_identity(eqn):
            env[eqn.outvars[0]] = self._identity(eqn, invars[0])
            return
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
            value = fresh_var(without_varying(value.aval))
            self.tainted.add(value)
        self.names.append((name, value))
        return value


def _of_matrices(eqn: JaxprEqn) -> tuple[Jaxpr, Sequence[Any]] | None:
    """A product over leading axes, as a body that flattens its operands; None for others, and if they are matrices."""
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
    traceback = eqn.source_info.traceback
    return body.replace(eqns=[e.replace(source_info=e.source_info.replace(traceback=traceback)) for e in body.eqns]), ()


def _bind(env: dict[Var, Atom], var: Var) -> Var:
    new = fresh_var(without_varying(var.aval))
    env[var] = new
    return new
