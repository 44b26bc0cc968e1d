"""The dataflow of a traced stage, the program of one operation cut from it, and two minimum cuts: what F saves for the backward
pass (the cut F|B), and what B hands to W (the cut B|W).

**F|B** (:func:`leanest`): the fewest bytes that F can save without doing much of its work twice. Of what the backward pass
reads, a value that elementwise equations make from others need not be kept where those are: a norm's result follows from its
operand, mean and deviation, GELU and its derivative from one argument, dropout from its mask. The cut runs between what only
costly equations make (products, sums, random bits, kernels, exchanges) and what the backward pass reads; cutting at a value
costs its bytes and :data:`VALUE_BYTES`. Of all minimum cuts the one that recomputes least is taken. Equations that move
elements (transposes, slices) count half the bytes they write, for what they move is often an operand of a product, which XLA
lays out anew each time.

The same idea as the min-cut rematerialisation of PyTorch's AOTAutograd (Horace He, 2022); theirs weighs values by distance from
the backward pass and looks at fusions of their compiler.

**B|W** (:func:`cheapest_moves`): which cheap equations to move from W to B so that fewer bytes wait between them. A bias
gradient is a sum over a large cotangent: left in W it keeps the cotangent alive, moved to B it leaves a vector. Moving some
equations only pays together (scale and bias gradients of one norm read the same cotangent), so this is no greedy walk but a
minimum cut: nodes are W's equations, an edge carries the bytes of a value that crosses if its maker is on B's side and a reader
on W's. Matrix products, convolutions, loops, scatters and anything unknown stay in W, unless they recompute what F did: such a
product belongs in B where its result is smaller than its operands (attention's output, which only W reads, against scores that
grow with the square of the sequence). Nothing is computed twice. Of all minimum cuts the one that moves least is taken.

Each value also counts a fixed :data:`VALUE_BYTES`, for an argument costs host time too: gradients of one buffer of vectors are
rather joined in B than passed one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from jaxpipe._jax_compat import (
    Atom,
    ClosedJaxpr,
    JaxprEqn,
    Literal,
    Var,
    aval_bytes,
    close_jaxpr,
    is_key_dtype,
    variables,
)
from jaxpipe.stage.functions import Port
from jaxpipe.stage.jaxprs import Dataflow, EqnKind, is_cheap, kind, reachable, row
from jaxpipe.stage.split.trace import StageTrace

Saveable = Callable[[Var], bool]
"""Whether F may save a value it computed."""


class Level(IntEnum):
    """Names the latest that a value depends on: parameters and constants; inputs of the microbatch; cotangents."""

    FIXED = 0
    FORWARD = 1
    BACKWARD = 2


@dataclass(frozen=True, slots=True)
class StagePart:
    """The program of one operation: equations between ports."""

    inputs: tuple[Port, ...]
    invars: tuple[Var, ...]
    outputs: tuple[Port, ...]
    outvars: tuple[Atom, ...]
    eqns: tuple[JaxprEqn, ...]

    def close(self, consts: Mapping[Var, Any]) -> ClosedJaxpr:
        """Return a jaxpr with these constants bound (those it uses)."""
        read = {a for eqn in self.eqns for a in eqn.invars if isinstance(a, Var)}
        read.update(a for a in self.outvars if isinstance(a, Var))
        return close_jaxpr([(v, c) for v, c in consts.items() if v in read], self.invars, self.eqns, self.outvars)


class Graph(Dataflow):
    """Dataflow of a trace, and what each value depends on. Built once, not changed."""

    def __init__(self, trace: StageTrace) -> None:
        super().__init__(trace.eqns)
        self.trace = trace
        self.level: dict[Var, Level] = {v: _port_level(p) for v, p in trace.inputs.items()}
        if trace.seed is not None:
            self.level[trace.seed] = Level.BACKWARD
        self.eqn_level = [self._classify(i, eqn) for i, eqn in enumerate(self.eqns)]
        self.parts = {v for whole in self.readers if self.of(whole) is Level.FORWARD for v in self._parts(whole)}

    def _parts(self, whole: Var) -> list[Var]:
        """Return the slices of a value that together are all of it, where nothing else reads it, elementwise work alone reads
        them, and the backward pass reads each: keeping the value then takes their bytes and no copies. Kernels slice as they
        read."""
        slices = [eqn for eqn in map(self.eqns.__getitem__, self.readers[whole]) if eqn.primitive.name == "slice"]
        parts = {eqn.params["start_indices"]: eqn.outvars[0] for eqn in slices}
        is_cut = len(parts) == len(self.readers[whole]) > 1
        is_whole = is_cut and sum(aval_bytes(v.aval) for v in parts.values()) == aval_bytes(whole.aval)
        return [*parts.values()] if is_whole and all(map(self._is_read_elementwise, parts.values())) else []

    def _is_read_elementwise(self, v: Var) -> bool:
        readers = reachable(self.readers.get(v, ()), lambda i: self.outputs(i) if row(self.eqns[i]).view else ())
        direct = [i for i in readers if not row(self.eqns[i]).view]
        is_late = any(self.eqn_level[i] is Level.BACKWARD for i in direct)
        return is_late and {kind(self.eqns[i]) for i in direct} <= {EqnKind.ELEMENTWISE, EqnKind.CAST}

    def _classify(self, i: int, eqn: JaxprEqn) -> Level:
        keys = [v for v in variables(eqn.invars) if is_key(v) or self.port_kind(v) == "key"]
        level = max(
            (self.level.get(v, Level.FIXED) for v in variables(eqn.invars) if self.port_kind(v) != "key"),
            default=Level.FIXED,
        )
        # Folding keys costs nothing and is repeated where bits are drawn; only drawing makes a value of the microbatch.
        plumbing = kind(eqn) is EqnKind.KEY or all(is_key(v) for v in eqn.outvars)
        if keys and not plumbing:
            level = max(level, Level.FORWARD)
        # A model's own jax.checkpoint: its recomputation belongs to the backward pass, though it reads no cotangent.
        if i in self.trace.recomputed and level is Level.FORWARD:
            level = Level.BACKWARD
        for v in eqn.outvars:
            self.level[v] = level
        return level

    def port_kind(self, v: Var) -> str:
        """Return the kind of the port through which a value enters the stage; "" for others."""
        port = self.trace.inputs.get(v)
        return "" if port is None else port.kind

    def of(self, atom: Atom) -> Level:
        return Level.FIXED if isinstance(atom, Literal) else self.level.get(atom, Level.FIXED)

    def early(self, eqns: Sequence[JaxprEqn]) -> set[int]:
        """Return the positions of those among backward equations, in the order of a program, that depend on no cotangent."""
        late = {v for v, p in self.trace.inputs.items() if p.kind == "dy"} | {self.trace.seed}
        positions = set()
        for k, eqn in enumerate(eqns):
            if eqn.effects or any(v in late for v in variables(eqn.invars)):
                late.update(eqn.outvars)
            else:
                positions.add(k)
        return positions

    def is_fixed(self, v: Var) -> bool:
        return self.of(v) is Level.FIXED

    def is_view(self, v: Var) -> bool:
        """Whether a value is cheaper to make again than to keep."""
        return self.view_base(v) is not None

    def view_base(self, v: Var) -> Var | None:
        """Return the operand of which ``v`` is a view, None if it is none, or takes fewer bytes than the operand: then it pays
        to keep the view, but for slices that are kept all."""
        i = self.maker.get(v)
        if i is None or not (row(self.eqns[i]).view or v in self.parts):
            return None
        operands = list(variables(self.eqns[i].invars))
        if len(operands) != 1 or (aval_bytes(operands[0].aval) > aval_bytes(v.aval) and v not in self.parts):
            return None
        return operands[0]


def is_key(v: Var) -> bool:
    return is_key_dtype(v.aval.dtype) if hasattr(v.aval, "dtype") else False


def _port_level(port: Port) -> Level:
    match port.kind:
        case "param":
            return Level.FIXED
        case "x" | "data" | "key":
            return Level.FORWARD
        case _:
            return Level.BACKWARD


# -- minimum cuts ------------------------------------------------------------------------------------------------------

INFINITE = -1
"""The capacity of an edge that no cut goes through, unless every cut does."""


class FlowNetwork:
    """A flow network, built edge by edge; nodes are any hashable values."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._edges: list[tuple[int, int, int]] = []

    def edge(self, a: Hashable, b: Hashable, capacity: int) -> None:
        tail, head = (self._numbers.setdefault(node, len(self._numbers)) for node in (a, b))
        self._edges.append((tail, head, capacity))

    def source_side(self, source: Hashable, sink: Hashable) -> Iterable[Hashable]:
        """Return the nodes on the source's side of the smallest minimum cut, without the source."""
        # Imported on first use, as it is slow to load.
        from ortools.graph.python import max_flow

        if source not in self._numbers or sink not in self._numbers:
            return ()
        tails, heads, capacities = np.array(self._edges, np.int64).T
        # One more than all finite edges together: larger than any cut that avoids it, and far from overflow.
        infinite = 1 + capacities[capacities != INFINITE].sum()
        network = max_flow.SimpleMaxFlow()
        network.add_arcs_with_capacity(tails, heads, np.where(capacities == INFINITE, infinite, capacities))
        status = network.solve(self._numbers[source], self._numbers[sink])
        assert status == network.OPTIMAL, f"no maximum flow: {status}"
        # Of all minimum cuts the one nearest to the source, which does not depend on the order of the edges.
        nodes = list(self._numbers)
        return [nodes[k] for k in network.get_source_side_min_cut() if nodes[k] != source]


VALUE_BYTES = 4096
"""The bytes that passing one more value counts as, besides its size: about 1 µs of host time."""


def cheapest_moves(
    graph: Graph, w: set[int], free: Callable[[Var], bool], again: Container[int] = frozenset()
) -> set[int]:
    """Choose the equations of ``w`` to move to B. ``free``: values that W has without holding memory for them. ``again``:
    equations of F that run again, which may move whatever they cost."""
    flow = FlowNetwork()
    source, sink = "B", "W"
    readers: dict[Var, list[int]] = {}
    for i in w:
        eqn = graph.eqns[i]
        reads = {v for v in eqn.invars if isinstance(v, Var)}
        # Tied to W: what is costly, as moving it would lengthen B, the critical path; and what adds to an accumulator, which
        # only W has.
        if not ((is_cheap(eqn) and not eqn.effects) or i in again) or any(graph.port_kind(v) == "acc" for v in reads):
            flow.edge(i, sink, INFINITE)
        for v in reads:
            maker = graph.maker.get(v)
            if maker in w:
                # What it reads moves along, or B could not run it.
                flow.edge(i, maker, INFINITE)
            base = _base(graph, v, w)
            if not free(base):
                readers.setdefault(base, []).append(i)
    for port, atom in graph.trace.outputs:
        if port.kind == "acc" and isinstance(atom, Var) and graph.maker.get(atom) in w:
            flow.edge(graph.maker[atom], sink, INFINITE)
    # A node for the value itself between its maker and its readers: it is paid for once, however many read it.
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


_LOCAL = frozenset({EqnKind.ELEMENTWISE, EqnKind.CAST, EqnKind.MOVE, EqnKind.WINDOW, EqnKind.RESHAPE})
"""Kinds of equations that may run again."""

_MOVES = frozenset({EqnKind.MOVE, EqnKind.WINDOW})

_HELD = ("", "x")
"""Kinds of ports of values that take memory between F and B: none (an equation makes the value), or what enters the stage."""


def leanest(graph: Graph, read: Iterable[Var], may_save: Saveable) -> Saveable:
    """Choose what F saves of what it may save. ``read``: the values that the backward pass reads."""

    def operands(v: Var) -> list[Var]:
        operands_of_maker = graph.eqns[graph.maker[v]].invars if v in graph.maker else ()
        return [u for u in variables(operands_of_maker) if graph.of(u) is Level.FORWARD and graph.port_kind(u) in _HELD]

    def saveable(v: Var) -> bool:
        # What enters the stage is there; an equation with effects must not run twice.
        if v not in graph.maker or graph.eqns[graph.maker[v]].effects:
            return True
        return not graph.is_view(v) and may_save(v)

    # A value that may not be saved is read through its operands, down to the first that may be.
    backward_reads = reachable(
        (v for v in read if graph.of(v) is Level.FORWARD and graph.port_kind(v) in _HELD),
        lambda v: () if saveable(v) else operands(v),
    )
    stack = [v for v in backward_reads if saveable(v)]
    flow = FlowNetwork()
    for v in stack:
        flow.edge("backward", v, INFINITE)
    reached: set[Var] = set()
    while stack:
        v = stack.pop()
        if v in reached:
            continue
        reached.add(v)
        # Two nodes a value: cutting between them saves it; the way from "make" leads on to what making it again reads.
        size = aval_bytes(v.aval)
        flow.edge(v, ("make", v), size + VALUE_BYTES if saveable(v) else INFINITE)
        # Costly equations don't run again: making such a value is as good as running F once more, which no cut may leave open.
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
