"""The fewest bytes that F can save without doing much of its work twice.

Of what the backward pass reads, a value that elementwise equations make from others need not be kept where those are: a norm's
result follows from its operand, mean and deviation, GELU and its derivative from one argument, dropout from its mask. Which
values to keep is a minimum cut between what only costly equations make (products, sums, random bits, kernels, exchanges) and
what the backward pass reads; cutting at a value costs its bytes and :data:`VALUE_BYTES`. Of all minimum cuts the one that
recomputes least is taken. Equations that move elements (transposes, slices) count half the bytes they write, for what they move
is often an operand of a product, which XLA lays out anew each time.

The same idea as the min-cut rematerialisation of PyTorch's AOTAutograd (Horace He, 2022); theirs weighs values by distance from
the backward pass and looks at fusions of their compiler.
"""

from __future__ import annotations

from collections.abc import Iterable

from jaxpipe._jax_compat import Var, aval_bytes, variables
from jaxpipe.stage.dataflow import reachable
from jaxpipe.stage.primitives import Kind, kind
from jaxpipe.stage.split.crossing import VALUE_BYTES
from jaxpipe.stage.split.flow import INFINITE, Flow
from jaxpipe.stage.split.graph import Graph, Level, Saveable

_LOCAL = frozenset({Kind.ELEMENTWISE, Kind.CAST, Kind.MOVE, Kind.WINDOW, Kind.RESHAPE})
"""What may run again."""

_MOVES = frozenset({Kind.MOVE, Kind.WINDOW})

_HELD = ("", "x")
"""Where a value comes from that takes memory between F and B: an equation, or what enters the stage."""


def leanest(graph: Graph, read: Iterable[Var], may_save: Saveable) -> Saveable:
    """Choose what F saves of what it may save. ``read``: the values that the backward pass reads."""

    def operands(v: Var) -> list[Var]:
        operands_of_maker = graph.eqns[graph.maker[v]].invars if v in graph.maker else ()
        return [u for u in variables(operands_of_maker) if graph.of(u) is Level.FORWARD and graph.port_kind(u) in _HELD]

    def saveable(v: Var) -> bool:
        if v not in graph.maker or graph.eqns[graph.maker[v]].effects:
            return True
        return not graph.is_view(v) and may_save(v)

    backward_reads = reachable(
        (v for v in read if graph.of(v) is Level.FORWARD and graph.port_kind(v) in _HELD),
        lambda v: () if saveable(v) else operands(v),
    )
    stack = [v for v in backward_reads if saveable(v)]
    flow = Flow()
    for v in stack:
        flow.edge("backward", v, INFINITE)
    reached: set[Var] = set()
    while stack:
        v = stack.pop()
        if v in reached:
            continue
        reached.add(v)
        size = aval_bytes(v.aval)
        flow.edge(v, ("make", v), size + VALUE_BYTES if saveable(v) else INFINITE)
        maker_kind = kind(graph.eqns[graph.maker[v]]) if v in graph.maker else None
        if maker_kind not in _LOCAL:
            flow.edge(("make", v), "forward", INFINITE)
            continue
        if maker_kind in _MOVES and not graph.is_view(v):
            flow.edge(("make", v), "forward", size // 2)
        for u in operands(v):
            flow.edge(("make", v), u, INFINITE)
            stack.append(u)
    again = set(flow.source_side("backward", "forward"))
    saved = {v for v in reached if v in again and ("make", v) not in again}
    return saved.__contains__
