"""Weaves stage functions into one jaxpr so that each collective of its shards has compute under it (`stp.txt` section 3).

F of one microbatch and B, W or BW of another, of the same stage or of two, depend on nothing of each other; put into one
program as they are, XLA still runs them one after the other. :func:`weave` orders their chunks (``weave/units.py``) on
a compute and a collective lane (``weave/lanes.py``) and writes the order into the jaxpr: wherever the chunk that runs
next does not read what the last one made, an ``optimization_barrier`` ties an operand of the next chunk, and the results of the
collectives it reads, to a result of the last one. XLA then can't run chunks in another order, and a collective whose start
stands before a chunk, and whose result is read behind it, has that chunk under it. A function alone is worth weaving, too: the
weight gradients of a BW go under its own collectives.

The equations are those of the parts, unchanged, so the results are the same numbers. Parts must be flat and without
varying-axis types (:mod:`jaxpipe.stage.jaxprs`); the result is evaluated with ``check_vma=False``. GPU programs want
:data:`GPU_OVERLAP_OPTIONS`; on CPU XLA drops the barriers and runs collectives in line.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from jaxpipe._jax_compat import Atom, ClosedJaxpr, JaxprEqn, Var, aval_bytes, barrier, close_jaxpr, fresh_var, variables
from jaxpipe.mesh import CP, TP
from jaxpipe.stage.jaxprs import called, reachable
from jaxpipe.stage.weave.lanes import LaneOrder, Node, best_order, covers
from jaxpipe.stage.weave.units import Chunk, Collective, PartGraph, UnitCosts, cut_threshold, units_of

GPU_OVERLAP_OPTIONS: Mapping[str, bool | int | str] = MappingProxyType(
    {
        "xla_gpu_enable_latency_hiding_scheduler": True,
        "xla_gpu_all_reduce_combine_threshold_bytes": 0,
        "xla_gpu_all_gather_combine_threshold_bytes": 0,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": 0,
    }
)
"""Compiler options for woven programs on a GPU: collectives stay apart, and starts and dones are scheduled apart.

Compiled for H100 with jax 0.10.2 (``scripts/bench_overlap.py``), barriers and these options keep every planned overlap. Tried,
and made no difference: ``xla_gpu_experimental_collective_start_as_early_as_possible``,
``xla_gpu_experimental_parallel_collective_overlap_limit``, ``xla_gpu_enable_approx_costly_collectives``,
``xla_gpu_enable_analytical_sol_latency_estimator`` and optimization levels. Harmful: the attributes ``_scheduling_group_id``
(0 of 8 covered) and ``latency_metadata`` (collectives start later).
"""


@dataclass(frozen=True, slots=True)
class CoveredCollective:
    """A collective of a woven program and the compute under it.

    ``unit``: name of the unit that ends with it. ``seconds`` and ``under_s``: of the collective and of the compute under it, by
    the cost model. ``products``: how many of the ``eqns`` equations under it are products (or loops, or kernels).
    """

    part: int
    unit: str
    primitive: str
    whole_bytes: int
    seconds: float
    eqns: int
    products: int
    flops: int
    under_s: float

    @property
    def covered(self) -> bool:
        """Whether a product runs under it."""
        return self.products > 0

    def __str__(self) -> str:
        under = f"{self.products} products, {self.flops / 1e9:.3g} GFLOP, {self.under_s * 1e6:.0f} µs"
        return (
            f"part {self.part} {self.unit}: {self.primitive} {self.whole_bytes / 1e6:.3g} MB, {self.seconds * 1e6:.0f} µs: "
            f"{under} under it" + ("" if self.covered else " (exposed)")
        )


@dataclass(frozen=True, slots=True)
class WovenJaxpr:
    """Several functions in one jaxpr: inputs and outputs of the parts one after another.

    ``collectives``: by part, in program order. ``makespan_s``, ``exposed_s``: of the two-lane model, the second in which
    compute waits for a collective.
    """

    jaxpr: ClosedJaxpr
    collectives: tuple[CoveredCollective, ...]
    makespan_s: float
    exposed_s: float

    def __str__(self) -> str:
        covered = sum(c.covered for c in self.collectives)
        head = (
            f"{covered} of {len(self.collectives)} collectives covered, {self.exposed_s * 1e6:.0f} of "
            f"{self.makespan_s * 1e6:.0f} µs exposed"
        )
        return "\n".join([head, *(f"  {c}" for c in self.collectives)])


def weave(parts: Sequence[ClosedJaxpr], *, shards: int = 8, cp: int = 1) -> WovenJaxpr:
    """Make one jaxpr that computes what ``parts`` compute, their collectives hidden under each other's compute.

    Args:
        parts: flat per-shard jaxprs; none reads what another one makes. They may hold the same variables.
        shards, cp: sizes of the mesh axes ``tp`` and ``cp``, for the cost of collectives. The rates that decide what is put
            under what are an H100's.
    """
    assert parts, "nothing to weave"
    # One threshold for all parts: what is small beside the largest collective of any gains nothing by a cut.
    least = cut_threshold(parts)
    renamed, consts = _apart(parts)
    graphs = [PartGraph(part, least) for part in renamed]
    nodes = _nodes(graphs, UnitCosts(), {TP: shards, CP: cp})
    order = best_order(nodes)
    eqns, names = _Emission(graphs, nodes).run(order)
    outvars = [called(names, a) for g in graphs for a in g.jaxpr.outvars]
    closed = close_jaxpr(consts, [v for part in renamed for v in part.jaxpr.invars], eqns, outvars)
    return WovenJaxpr(closed, _report(nodes, order), order.makespan_s, order.exposed_s)


def _apart(parts: Sequence[ClosedJaxpr]) -> tuple[list[ClosedJaxpr], list[tuple[Var, Any]]]:
    """Rename the parts' variables apart; return them without constants, and the constants, each once."""
    # F and B of one stage come from one trace and share variables; two microbatches must not.
    consts: dict[int, tuple[Var, Any]] = {}
    jaxprs: list[ClosedJaxpr] = []
    for part in parts:
        jaxpr = part.jaxpr
        env: dict[Var, Atom] = {
            v: fresh_var(v.aval) for v in (*jaxpr.invars, *(v for e in jaxpr.eqns for v in e.outvars))
        }
        for v, c in zip(jaxpr.constvars, part.consts, strict=True):
            env[v] = consts.setdefault(id(c), (fresh_var(v.aval), c))[0]

        def new(atoms: Iterable[Atom], env: Mapping[Var, Atom] = env) -> list[Any]:
            return [called(env, a) for a in atoms]

        eqns = [eqn.replace(invars=new(eqn.invars), outvars=new(eqn.outvars)) for eqn in jaxpr.eqns]
        jaxprs.append(close_jaxpr([], new(jaxpr.invars), eqns, new(jaxpr.outvars)))
    return jaxprs, list(consts.values())


def _nodes(graphs: Sequence[PartGraph], costs: UnitCosts, sizes: Mapping[str, int]) -> list[Node]:
    """List the chunks and collectives of all parts, each after what it depends on."""
    nodes: list[Node] = []
    for p, graph in enumerate(graphs):
        works = [(unit, work) for unit in units_of(graph) for work in unit.works]
        made_by = {i: n for n, (_, work) in enumerate(works, len(nodes)) for i in work.eqns}
        for unit, work in works:
            deps = {made_by[j] for i in work.eqns for j in graph.inputs(i)} - {len(nodes)}
            nodes.append(Node(p, unit.name, work, _seconds(work, costs, sizes), tuple(sorted(deps)), unit.filler))
    return nodes


def _seconds(work: Chunk | Collective, costs: UnitCosts, sizes: Mapping[str, int]) -> float:
    if isinstance(work, Collective):
        shards = math.prod(sizes.get(axis, 1) for axis in work.axes)
        return costs.collective_s(work.primitive, work.whole_bytes, shards)
    return costs.work_s(work.flops, work.bytes_read + work.bytes_written)


@dataclass(frozen=True, slots=True)
class _Ends:
    """The values at the ends of a node. ``reads``: what others make; ``feeds``: of these, what its product needs. ``results``:
    all that it makes; ``left``: of these, what others read; ``late``: what needs its product. In a chunk without a product the
    last equation stands for it, and all results are late."""

    reads: list[Var]
    feeds: list[Var]
    results: list[Var]
    left: list[Var]
    late: set[Var]

    @classmethod
    def of(cls, node: Node, graph: PartGraph) -> _Ends:
        own_eqns = set(node.work.eqns)
        product = node.work.heavy if isinstance(node.work, Chunk) else None
        reads, left = graph.ends(node.work.eqns)
        last = node.work.eqns[-1] if product is None else product
        before = graph.needed(graph.eqns[last].invars, own_eqns.__contains__)
        near = [v for i in (last, *sorted(before, reverse=True)) for v in variables(graph.eqns[i].invars)]
        behind = own_eqns
        if product is not None:
            behind = reachable([product], lambda i: own_eqns.intersection(graph.outputs(i)))
        late = {v for i in behind for v in graph.eqns[i].outvars}
        outputs = [v for i in node.work.eqns for v in graph.eqns[i].outvars]
        return cls(reads, [v for v in dict.fromkeys(near) if v in reads], outputs, left, late)


class _Emission:
    """Emits the equations in the chosen order, with barriers. ``names``: what a value is called from here on; ``last``: the
    last chunk with a product; ``flying``: the collective in flight."""

    def __init__(self, graphs: Sequence[PartGraph], nodes: Sequence[Node]) -> None:
        self.graphs = graphs
        self.nodes = nodes
        self.ends = [_Ends.of(node, graphs[node.part]) for node in nodes]
        self.names: dict[Var, Var] = {}
        self.out: list[JaxprEqn] = []
        self.last: int | None = None
        self.flying: int | None = None

    def run(self, order: LaneOrder) -> tuple[list[JaxprEqn], dict[Var, Var]]:
        # Barriers only while a collective flies or is still to start: behind the last one XLA may order as it likes.
        to_start = sum(self.nodes[n].is_collective for n in order.nodes)
        for k, n in enumerate(order.nodes):
            if self.nodes[n].is_collective:
                to_start -= 1
                self._start(n, self._first_under(order.nodes[k + 1 :]))
                continue
            if to_start or self.flying is not None:
                self._order(n)
            if self._landing(n):
                self.flying = None
            self._emit(n)
            if self.nodes[n].has_product:
                self.last = n
        return self.out, self.names

    def _first_under(self, following: Sequence[int]) -> int | None:
        """Return the chunk after a collective's start that must wait for it.

        It is the first chunk with a product before the next collective, or the first that makes what that product reads.
        """
        # Not further than the next collective: that one will tie the chunks behind it.
        window = list(itertools.takewhile(lambda n: not self.nodes[n].is_collective, following))
        product = next((n for n in window if self.nodes[n].has_product), None)
        if product is None:
            return None
        leading = reachable([product], lambda n: self.nodes[n].deps)
        return next(n for n in window if n in leading)

    def _order(self, n: int) -> None:
        """Put a chunk's product behind the last one, where it does not need what that made, and the end of the collective in
        flight behind the last product, where the chunk reads it."""
        # Without the second, XLA may wait for the collective before the chunk that is meant to hide it.
        gates = self._landing(n)
        if self.nodes[n].has_product and self.last is not None and not self._runs_behind_last(n):
            gates += self._gates(n)
        if gates:
            self._tie(self._token([]), gates)

    def _start(self, collective: int, under: int | None) -> None:
        """Emit a collective, behind the end of the one that flies and before the chunk ``under`` it, if there is one."""
        operands = self.ends[collective].reads
        behind = [*operands]
        if under is not None and not self._follows(under, collective):
            behind += [*self._landing(under), *self._gates(under)]
        landed = self.ends[self.flying].results if self.flying is not None else []
        after_last = self.ends[self.last].late if self.last is not None else set()
        # Where dataflow orders collective and chunk already, a barrier would only cost fusions.
        ordered = after_last.issuperset(operands) and (under is None or self._runs_behind_last(under))
        if landed or not ordered:
            self._tie(self._token(operands), [*landed, *behind])
        self._emit(collective)
        self.flying = collective

    def _follows(self, n: int, other: int) -> bool:
        """Whether ``n`` reads what ``other`` makes."""
        return not set(self.ends[other].results).isdisjoint(self.ends[n].reads)

    def _runs_behind_last(self, n: int) -> bool:
        """Whether the chunk's product needs that of the last chunk."""
        return self.last is not None and not self.ends[self.last].late.isdisjoint(self.ends[n].feeds)

    def _landing(self, n: int) -> list[Var]:
        """Return the results of the collective in flight, if the chunk reads them."""
        return [*self.ends[self.flying].results] if self.flying is not None and self._follows(n, self.flying) else []

    def _tie(self, token: Var | None, values: Sequence[Var]) -> None:
        """Make these values available no earlier than ``token`` and each other."""
        # One value alone ties nothing: the barrier would only keep XLA from fusing across it.
        tied = list(dict.fromkeys(v for v in (token, *values) if v is not None))
        if len(tied) < 2:
            return
        operands = [self.names.get(v, v) for v in tied]
        results = [fresh_var(v.aval) for v in operands]
        self.out.append(barrier(operands, results))
        self.names.update(zip(tied, results, strict=True))

    def _token(self, operands: Sequence[Var]) -> Var | None:
        """Return a result of the last chunk that something still reads (XLA drops others from a barrier): the operand of a
        collective that starts now, else the smallest that depends on the product."""
        if self.last is None:
            return None
        left, late = self.ends[self.last].left, self.ends[self.last].late
        first = [v for v in left if v in operands]
        return min(first or [v for v in left if v in late] or left, key=lambda v: aval_bytes(v.aval), default=None)

    def _gates(self, n: int) -> list[Var]:
        """Return the operands that make the chunk's product wait.

        That is the operand that was computed rather than passed in, else any; none where the product reads the collective
        in flight.
        """
        feeds, graph = self.ends[n].feeds, self.graphs[self.nodes[n].part]
        if not set(self._landing(n)).isdisjoint(feeds):
            return []
        return [v for v in feeds if v in graph.maker][:1] or feeds[:1]

    def _emit(self, n: int) -> None:
        node = self.nodes[n]
        for i in node.work.eqns:
            eqn = self.graphs[node.part].eqns[i]
            self.out.append(eqn.replace(invars=[called(self.names, a) for a in eqn.invars]))


def _report(nodes: Sequence[Node], order: LaneOrder) -> tuple[CoveredCollective, ...]:
    report = []
    for c, under in sorted(covers(nodes, order).items()):
        node = nodes[c]
        assert isinstance(node.work, Collective)
        chunks = [w for n in under if isinstance(w := nodes[n].work, Chunk)]
        report.append(
            CoveredCollective(
                node.part,
                node.unit,
                node.work.primitive,
                node.work.whole_bytes,
                node.seconds,
                sum(len(w.eqns) for w in chunks),
                sum(w.heavy is not None for w in chunks),
                sum(w.flops for w in chunks),
                sum(nodes[n].seconds for n in under),
            )
        )
    return tuple(report)
