"""Dataflow through a flat jaxpr: which inputs its results depend on.

Branches and scans are looked into: a result of ``cond`` or ``scan`` depends on what its own values come from, not on all that
the others read. JAX can take these apart, and no ``while``: each of its results depends on everything that it reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jaxpipe._jax_compat import Atom, Jaxpr, JaxprEqn, Literal, Var, scan_parts


@dataclass(frozen=True, slots=True)
class Sources:
    """What a value depends on: ``mask``, a bit for each kind of source; ``origin``, where several came together first."""

    mask: int = 0
    origin: JaxprEqn | None = None


NOTHING = Sources()


def sources(jaxpr: Jaxpr, given: Sequence[Sources]) -> list[Sources]:
    """The sources of each result, from those of the inputs (constants have none)."""
    known: dict[Var, Sources] = dict(zip(jaxpr.invars, given, strict=True))

    def read(atom: Atom) -> Sources:
        return NOTHING if isinstance(atom, Literal) else known.get(atom, NOTHING)

    for eqn in jaxpr.eqns:
        known.update(zip(eqn.outvars, _through(eqn, [read(a) for a in eqn.invars]), strict=True))
    return [read(a) for a in jaxpr.outvars]


def _through(eqn: JaxprEqn, given: Sequence[Sources]) -> list[Sources]:
    if eqn.primitive.name == "cond":
        predicate, *operands = given
        branches = [sources(b.jaxpr, operands) for b in eqn.params["branches"]]
        return [_joined(eqn, [predicate, *results]) for results in zip(*branches, strict=True)]
    scan = scan_parts(eqn)
    if scan is None:
        return [_joined(eqn, given)] * len(eqn.outvars)
    consts, carry = given[: scan.num_consts], list(given[scan.num_consts : scan.num_consts + scan.num_carry])
    while True:
        results = sources(scan.body, [*consts, *carry, *given[scan.num_consts + scan.num_carry :]])
        again = [_joined(eqn, pair) for pair in zip(carry, results[: scan.num_carry], strict=True)]
        if [c.mask for c in again] == [c.mask for c in carry]:
            return [*carry, *results[scan.num_carry :]]
        carry = again


def _joined(eqn: JaxprEqn, given: Iterable[Sources]) -> Sources:
    mask, origin = 0, None
    for source in given:
        mask |= source.mask
        origin = origin or source.origin
    return Sources(mask, origin or (eqn if mask & (mask - 1) else None))
