"""Collectives over ``tp`` of a stage function, read from its jaxpr, and how long they take.

Time: a ring moves ``2 (t − 1) / t`` of an array's bytes through each device in an all-reduce, half of that in an all-gather (of
what it makes) or a reduce-scatter (of what it reads); one latency each. Collectives of tiny arrays (the softmax over a divided
vocabulary) cost their latency.

Not modelled: NCCL's choice of algorithm by size, in-switch reduction, contention with other traffic.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jaxpipe._jax_compat import aval_bytes, scan_parts, sub_jaxprs, variables
from jaxpipe.mesh import TP
from jaxpipe.planning.roofline import Efficiency
from jaxpipe.planning.targets import Target

Kind = Literal["all-reduce", "all-gather", "reduce-scatter"]

COLLECTIVES: dict[str, Kind] = {
    "psum": "all-reduce",
    "pmax": "all-reduce",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
}
"""Primitive → what it is called on a GPU."""


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective: ``num_bytes`` of the whole array on one device (before a reduce-scatter, after an all-gather)."""

    kind: Kind
    num_bytes: int


def collectives_of(jaxpr: Any) -> tuple[Collective, ...]:
    """The collectives over ``tp`` of a per-shard jaxpr in program order; those of a loop as often as it turns."""
    return tuple(_walk(getattr(jaxpr, "jaxpr", jaxpr)))


def _walk(body: Any) -> Iterator[Collective]:
    for eqn in body.eqns:
        kind = COLLECTIVES.get(eqn.primitive.name)
        axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
        if kind is not None and TP in axes:
            read = sum(aval_bytes(v.aval) for v in variables(eqn.invars))
            made = sum(aval_bytes(v.aval) for v in eqn.outvars)
            yield Collective(kind, max(read, made))
        loop = scan_parts(eqn)
        for inner in sub_jaxprs(eqn):
            for _ in range(loop.length if loop is not None else 1):
                yield from _walk(inner)


def collectives_s(found: Sequence[Collective], tp: int, target: Target, efficiency: Efficiency) -> float:
    """Seconds of these collectives over ``tp`` devices, one after another."""
    if tp == 1:
        return 0.0
    inside = tp <= target.node_size
    rate = target.link_bytes_per_s if inside else target.network_bytes_per_s
    latency = target.link_latency_s if inside else target.network_latency_s
    turns = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1}
    ring = (tp - 1) / tp / (rate * efficiency.link)
    return sum(turns[c.kind] * (c.num_bytes * ring + latency) for c in found)
