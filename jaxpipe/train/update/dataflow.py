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


def sources(jaxpr: Jaxpr, input_sources: Sequence[Sources]) -> list[Sources]:
    """The sources of each result, from those of the inputs (constants have none)."""
    sources_of: dict[Var, Sources] = dict(zip(jaxpr.invars, input_sources, strict=True))

    def read(atom: Atom) -> Sources:
        return NOTHING if isinstance(atom, Literal) else sources_of.get(atom, NOTHING)

    for eqn in jaxpr.eqns:
        sources_of.update(zip(eqn.outvars, _through(eqn, [read(a) for a in eqn.invars]), strict=True))
    return [read(a) for a in jaxpr.outvars]


def _through(eqn: JaxprEqn, operand_sources: Sequence[Sources]) -> list[Sources]:
    if eqn.primitive.name == "cond":
        predicate, *operands = operand_sources
        branches = [sources(b.jaxpr, operands) for b in eqn.params["branches"]]
        return [_joined(eqn, [predicate, *results]) for results in zip(*branches, strict=True)]
    scan = scan_parts(eqn)
    if scan is None:
        return [_joined(eqn, operand_sources)] * len(eqn.outvars)
    consts, carry = (
        operand_sources[: scan.num_consts],
        list(operand_sources[scan.num_consts : scan.num_consts + scan.num_carry]),
    )
    while True:
        results = sources(scan.body, [*consts, *carry, *operand_sources[scan.num_consts + scan.num_carry :]])
        again = [_joined(eqn, pair) for pair in zip(carry, results[: scan.num_carry], strict=True)]
        if [c.mask for c in again] == [c.mask for c in carry]:
            return [*carry, *results[scan.num_carry :]]
        carry = again


def _joined(eqn: JaxprEqn, sources_to_join: Iterable[Sources]) -> Sources:
    mask, origin = 0, None
    for source in sources_to_join:
        mask |= source.mask
        origin = origin or source.origin
    return Sources(mask, origin or (eqn if mask & (mask - 1) else None))
