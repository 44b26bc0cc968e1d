"""Flatten a jaxpr: replace every call-like equation (jit, custom derivative, checkpoint) by the equations of its body.

The cut into F, B and W needs single equations: a jitted helper may hold work of all three. ``scan``, ``while`` and ``cond`` stay
whole here. Variables of a body are renamed at each use, since JAX shares bodies between calls; name stacks are extended by the
caller's, so an equation still tells its layer.

Identities disappear: casts to varying (the cut programs run with ``check_vma=False``), copies, and ``checkpoint_name``, whose
names are returned beside the equations as ``names``.

A checkpoint body that depends on a cotangent is the transposed one: what it computes from saved values is recomputation, and
belongs to the backward pass although it does not depend on the cotangent. Its equations are returned as ``recomputed``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxpipe._jax_compat import (
    Atom,
    DropVar,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    called_jaxpr,
    checkpoint_name_of,
    fresh_var,
    is_checkpoint,
    is_identity,
    with_outer_names,
)


@dataclass(frozen=True, slots=True)
class FlatJaxpr:
    """Equations without calls. ``invars`` are the caller's own; ``outvars`` may be inputs or literals. ``consts``: values of
    free variables. ``recomputed``: positions of the equations of transposed checkpoint bodies. ``names``: what
    ``checkpoint_name`` called a value, in program order."""

    invars: tuple[Var, ...]
    outvars: tuple[Atom, ...]
    eqns: tuple[JaxprEqn, ...]
    consts: Mapping[Var, Any]
    recomputed: frozenset[int]
    names: tuple[tuple[str, Atom], ...]


@dataclass(slots=True)
class _Flattening:
    eqns: list[JaxprEqn] = field(default_factory=list)
    consts: dict[Var, Any] = field(default_factory=dict)
    recomputed: set[int] = field(default_factory=set)
    names: list[tuple[str, Atom]] = field(default_factory=list)
    sources: str = ""
    tainted: set[Var] = field(default_factory=set)  # depends on a source


def flatten(jaxpr: Jaxpr, consts: Sequence[Any], sources: str = "") -> FlatJaxpr:
    """``jaxpr`` without call-like equations.

    ``sources``: prefix of names; a value named so is cut off from what computes it and becomes a free variable (found in
    ``names``): how cotangents, whose types are known only once the forward pass has been traced, enter as inputs.
    """
    flat = _Flattening(sources=sources)
    flat.consts.update(zip(jaxpr.constvars, consts, strict=True))
    env: dict[Var, Atom] = {v: v for v in (*jaxpr.constvars, *jaxpr.invars)}
    for eqn in jaxpr.eqns:
        _flatten_eqn(flat, eqn, None, env, in_checkpoint=False, keep_names=True)
    outvars = tuple(_read(env, a) for a in jaxpr.outvars)
    return FlatJaxpr(
        tuple(jaxpr.invars), outvars, tuple(flat.eqns), flat.consts, frozenset(flat.recomputed), tuple(flat.names)
    )


def _flatten_eqn(
    flat: _Flattening,
    eqn: JaxprEqn,
    outer: JaxprEqn | None,
    env: dict[Var, Atom],
    *,
    in_checkpoint: bool,
    keep_names: bool = False,
) -> None:
    invars = [_read(env, a) for a in eqn.invars]
    call = called_jaxpr(eqn)
    if is_identity(eqn):
        env[eqn.outvars[0]] = _identity(flat, eqn, invars[0])
        return
    if call is None:
        outvars = [_bind(env, v, keep_names) for v in eqn.outvars]
        flat.eqns.append(with_outer_names(eqn, outer, invars, outvars))
        if in_checkpoint:
            flat.recomputed.add(len(flat.eqns) - 1)
        if any(isinstance(a, Var) and a in flat.tainted for a in invars):
            flat.tainted.update(outvars)
        return
    body, consts = call
    caller = with_outer_names(eqn, outer, invars, eqn.outvars)
    tainted = any(isinstance(a, Var) and a in flat.tainted for a in invars)
    inner: dict[Var, Atom] = dict(zip(body.invars, invars, strict=True))
    for v, c in zip(body.constvars, consts, strict=True):
        inner[v] = fresh_var(v.aval)
        flat.consts[inner[v]] = c
    for sub in body.eqns:
        _flatten_eqn(flat, sub, caller, inner, in_checkpoint=in_checkpoint or (tainted and is_checkpoint(eqn)))
    for v, a in zip(eqn.outvars, body.outvars, strict=True):
        env[v] = _read(inner, a)


def _identity(flat: _Flattening, eqn: JaxprEqn, value: Atom) -> Atom:
    name = checkpoint_name_of(eqn)
    if name is None:
        return value
    if flat.sources and name.startswith(flat.sources):
        value = fresh_var(value.aval)
        flat.tainted.add(value)
    flat.names.append((name, value))
    return value


def _read(env: Mapping[Var, Atom], atom: Atom) -> Atom:
    return atom if isinstance(atom, Literal) else env[atom]


def _bind(env: dict[Var, Atom], var: Var, keep: bool) -> Var:
    if isinstance(var, DropVar):
        return var
    new = var if keep else fresh_var(var.aval)
    env[var] = new
    return new
