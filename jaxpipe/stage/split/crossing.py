"""Which cheap equations to move from W to B so that fewer bytes wait between them.

A bias gradient is a sum over a large cotangent: left in W it keeps the cotangent alive, moved to B it leaves a vector. Moving
some equations only pays together (scale and bias gradients of one norm read the same cotangent), so this is not a greedy walk
but a minimum cut: nodes are W's equations, an edge carries the bytes of a value that crosses if its maker is on B's side and a
reader on W's. Matrix products, convolutions, loops, scatters and anything unknown stay in W, unless they recompute what F did:
such a product belongs in B where its result is smaller than its operands (attention's output, which only W reads, against
scores that grow with the square of the sequence). Nothing is computed twice.
Of all minimum cuts the one that moves least is taken. Each value also counts a fixed :data:`VALUE_BYTES`, for an argument costs
host time too: gradients of one buffer of vectors are rather joined in B than passed one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Container

from jaxpipe._jax_compat import Var, aval_bytes
from jaxpipe.stage.primitives import is_cheap
from jaxpipe.stage.split.flow import INFINITE, Flow
from jaxpipe.stage.split.graph import Graph

VALUE_BYTES = 4096
"""What passing one more value counts, besides its size: about 1 µs of host time."""


def cheapest_moves(
    graph: Graph, w: set[int], free: Callable[[Var], bool], again: Container[int] = frozenset()
) -> set[int]:
    """The equations of ``w`` to move to B. ``free``: values that W has without holding memory for them. ``again``: equations
    of F that run again, which may move whatever they cost."""
    flow = Flow()
    source, sink = "B", "W"
    readers: dict[Var, list[int]] = {}
    for i in w:
        eqn = graph.eqns[i]
        reads = {v for v in eqn.invars if isinstance(v, Var)}
        if not ((is_cheap(eqn) and not eqn.effects) or i in again) or any(graph.port_kind(v) == "acc" for v in reads):
            flow.edge(i, sink, INFINITE)
        for v in reads:
            maker = graph.maker.get(v)
            if maker in w:
                flow.edge(i, maker, INFINITE)  # what it reads moves along
            base = _base(graph, v, w)
            if not free(base):
                readers.setdefault(base, []).append(i)
    for port, atom in graph.trace.outputs:
        if port.kind == "acc" and isinstance(atom, Var) and graph.maker.get(atom) in w:
            flow.edge(graph.maker[atom], sink, INFINITE)
    for v, ends in readers.items():
        maker = graph.maker.get(v)
        flow.edge(maker if maker in w else source, v, aval_bytes(v.aval) + VALUE_BYTES)
        for i in ends:
            flow.edge(v, i, INFINITE)
    return {i for i in flow.source_side(source, sink) if isinstance(i, int)}


def _base(graph: Graph, v: Var, w: set[int]) -> Var:
    """Return the value that crosses in place of a view made in B or F."""
    while graph.maker.get(v) not in w and (base := graph.view_base(v)) is not None:
        v = base
    return v
