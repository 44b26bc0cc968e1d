"""Weaves stage functions into one jaxpr so that each collective of its shards has compute under it (`stp.txt` section 3).

F of one microbatch and B, W or BW of another, of the same stage or of two, depend on nothing of each other; put into one
program as they are, XLA still runs them one after the other. :func:`weave` orders their chunks (``weave/units.py``) on
a compute and a collective lane (:func:`best_order`) and writes the order into the jaxpr: wherever the chunk that runs
next does not read what the last one made, an ``optimization_barrier`` ties an operand of the next chunk, and the results of the
collectives it reads, to a result of the last one. XLA then can't run chunks in another order, and a collective whose start
stands before a chunk, and whose result is read behind it, has that chunk under it. A function alone is worth weaving, too: the
weight gradients of a BW go under its own collectives.

The equations are those of the parts, unchanged, so the results are the same numbers. Parts must be flat and without
varying-axis types (:mod:`jaxpipe.stage.jaxprs`); the result is evaluated with ``check_vma=False``. GPU programs want
:data:`GPU_OVERLAP_OPTIONS`; on CPU XLA drops the barriers and runs collectives in line.

**The order** is the one in which compute waits least. The compute lane runs one chunk at a time. One collective flies at a
time, and starts between two chunks: XLA starts it where it stands in the program and keeps one in flight. A list scheduler
places the chunks by several rules, filler in two ways, and the order with the shortest makespan wins (then the one with fewest
collectives that have no product under them):

* a chunk that a later collective needs goes before filler; filler fills the time in which nothing else can run;
* where filler is left over at the end, that much of it runs early instead, as soon as it can: what it reads is freed sooner.

Deterministic. Not exact: with two functions and uneven units the shortest order may be missed by a chunk's length. In
192 programs (F, B, W, BW, alone and together, of GPT and Llama; tp 4 and 8) each of the four rules is needed for some best
order, and two more (taking turns; the last part first) for none; without filler that fits, 42 are longer, by 7.9% at most.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeAlias

from jaxpipe._jax_compat import Atom, ClosedJaxpr, JaxprEqn, Var, aval_bytes, barrier, close_jaxpr, fresh_var, variables
from jaxpipe.stage.jaxprs import called, reachable
from jaxpipe.stage.weave.units import Chunk, Collective, PartGraph, UnitCosts, cut_threshold, units_of


@dataclass(frozen=True, slots=True)
class Node:
    """A chunk or a collective of part ``part``. ``deps``: numbers of the nodes whose results it reads. ``filler``: no
    collective needs it."""

    part: int
    unit: str
    work: Chunk | Collective
    seconds: float
    deps: tuple[int, ...]
    filler: bool = False

    @property
    def is_collective(self) -> bool:
        return isinstance(self.work, Collective)

    @property
    def has_product(self) -> bool:
        return isinstance(self.work, Chunk) and self.work.heavy is not None


@dataclass(frozen=True, slots=True)
class LaneOrder:
    """``nodes``: chunks in the order they run, each collective where it starts. Times of the two-lane model in seconds:
    ``starts`` by position, ``makespan_s``, and ``exposed_s``, in which compute waits for a collective."""

    nodes: tuple[int, ...]
    starts: tuple[float, ...]
    makespan_s: float
    exposed_s: float


Rule: TypeAlias = Callable[[int, "_ListScheduler"], tuple[float, ...]]


def best_order(nodes: Sequence[Node]) -> LaneOrder:
    """Return the best of the rules' orders. ``nodes`` must list what a node depends on before it."""
    best: tuple[tuple[float, int], LaneOrder] | None = None
    for rule in _RULES:
        for fitting in (False, True):
            order = _ListScheduler(nodes, rule, fitting).run()
            spare = _left_over(nodes, order)
            orders = [_ListScheduler(nodes, rule, fitting, early_s=spare).run(), order] if spare > 0 else [order]
            for order in orders:
                # Rounded to 0.1 µs, so that orders that are equal but for rounding errors compare by their covers.
                score = (round(order.makespan_s, 7), len(uncovered(nodes, order)))
                if best is None or score < best[0]:
                    best = (score, order)
    assert best is not None
    return best[1]


def covers(nodes: Sequence[Node], order: LaneOrder) -> dict[int, tuple[int, ...]]:
    """Return the chunks that run under each collective: between its start and its end, which is the first chunk or collective
    that reads its result, or the next collective."""
    under: dict[int, list[int]] = {}
    flying: int | None = None
    for n in order.nodes:
        if nodes[n].is_collective:
            under[n] = []
            flying = n
        elif flying is not None:
            if flying in nodes[n].deps:
                flying = None
            else:
                under[flying].append(n)
    return {c: tuple(chunks) for c, chunks in under.items()}


def uncovered(nodes: Sequence[Node], order: LaneOrder) -> list[int]:
    """Return the collectives without a product under them."""
    return [c for c, under in covers(nodes, order).items() if not any(nodes[n].has_product for n in under)]


def _left_over(nodes: Sequence[Node], order: LaneOrder) -> float:
    """Return the seconds of filler that run at the end, when no collective is left to hide."""
    spare = 0.0
    done = 0.0
    for n, start in zip(order.nodes, order.starts, strict=True):
        if nodes[n].is_collective:
            done = max(done, start + nodes[n].seconds)
    # From the back, as far as nothing but filler runs and no collective flies.
    for n, start in zip(reversed(order.nodes), reversed(order.starts), strict=True):
        if not nodes[n].filler or start < done:
            break
        spare += nodes[n].seconds
    return spare


@dataclass(slots=True)
class _ListScheduler:
    """One run of the list scheduler. ``fitting``: under a collective goes the shortest filler that outlasts it, or the longest,
    rather than the first. ``early_s``: seconds of filler that may run although other work is ready."""

    nodes: Sequence[Node]
    rule: Rule
    fitting: bool = False
    early_s: float = 0.0
    now_s: float = 0.0
    last_part: int = -1
    flying_until_s: float = 0.0
    ends: dict[int, float] = field(default_factory=dict)
    placed: list[tuple[int, float]] = field(default_factory=list)
    after: list[float] = field(init=False)
    to_collective: list[float] = field(init=False)

    def __post_init__(self) -> None:
        readers: list[list[int]] = [[] for _ in self.nodes]
        for n, node in enumerate(self.nodes):
            for d in node.deps:
                readers[d].append(n)
        # Critical paths to the end and to the next collective, from the back. Filler is left out: nothing waits for it.
        self.after = [0.0] * len(self.nodes)
        self.to_collective = [0.0] * len(self.nodes)
        for n in reversed(range(len(self.nodes))):
            node = self.nodes[n]
            ahead = [r for r in readers[n] if not self.nodes[r].filler]
            self.after[n] = node.seconds + max((self.after[r] for r in ahead), default=0.0)
            near = [0.0 if self.nodes[r].is_collective else self.to_collective[r] for r in ahead]
            self.to_collective[n] = node.seconds + max(near, default=0.0)

    def run(self) -> LaneOrder:
        open_ = set(range(len(self.nodes)))
        while open_:
            # A collective first: its lane is free, and every chunk before its start delays all that waits for it.
            n = self._collective(open_)
            if n is None:
                n = self._chunk(open_)
            # Nothing can run before the collective in flight ends: exposed time.
            if n is None:
                self.now_s = self.flying_until_s
                continue
            open_.discard(n)
            self.placed.append((n, self.now_s))
            self.ends[n] = self.now_s + self.nodes[n].seconds
            if self.nodes[n].is_collective:
                self.flying_until_s = self.ends[n]
            else:
                self.now_s = self.ends[n]
                self.last_part = self.nodes[n].part
        makespan = max(self.now_s, self.flying_until_s)
        compute = sum(self.nodes[n].seconds for n, _ in self.placed if not self.nodes[n].is_collective)
        return LaneOrder(
            tuple(n for n, _ in self.placed), tuple(s for _, s in self.placed), makespan, makespan - compute
        )

    def _done(self, n: int) -> bool:
        """Whether everything that node ``n`` reads is there."""
        return all(self.ends.get(d, float("inf")) <= self.now_s for d in self.nodes[n].deps)

    def _collective(self, open_: set[int]) -> int | None:
        """Choose the collective that starts now; None while one flies, as one flies at a time."""
        if self.flying_until_s > self.now_s:
            return None
        ready = [n for n in sorted(open_) if self.nodes[n].is_collective and self._done(n)]
        return max(ready, key=self.after.__getitem__, default=None)

    def _chunk(self, open_: set[int]) -> int | None:
        """Choose the chunk that runs now; None if none is ready."""
        ready = [n for n in sorted(open_) if not self.nodes[n].is_collective and self._done(n)]
        main = [n for n in ready if not self.nodes[n].filler]
        filler = [n for n in ready if self.nodes[n].filler]
        # Early filler goes first while its seconds last: it would run at the end, and so frees sooner what it reads.
        if filler and self.nodes[filler[0]].seconds <= self.early_s:
            self.early_s -= self.nodes[filler[0]].seconds
            return filler[0]
        if main:
            return min(main, key=lambda n: self.rule(n, self))
        return self._filler(filler) if filler else None

    def _filler(self, ready: Sequence[int]) -> int:
        """Choose the filler that runs now, since nothing else can."""
        # The shortest that outlasts the collective: a longer one would delay what waits for it, a shorter one expose the rest.
        missing = self.flying_until_s - self.now_s
        if not self.fitting or missing <= 0:
            return ready[0]
        long = [n for n in ready if self.nodes[n].seconds >= missing]
        if long:
            return min(long, key=lambda n: self.nodes[n].seconds)
        return max(ready, key=lambda n: self.nodes[n].seconds)


_RULES: tuple[Rule, ...] = (
    lambda n, lanes: (-lanes.after[n],),  # the most work and collectives still after it
    lambda n, lanes: (lanes.to_collective[n], -lanes.after[n]),  # the least work before the next collective can start
    lambda n, lanes: (float(lanes.nodes[n].part == lanes.last_part), -lanes.after[n]),  # another part than the last
    lambda n, lanes: (float(lanes.nodes[n].part), -lanes.after[n]),
)


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


def weave(parts: Sequence[ClosedJaxpr], sizes: Mapping[str, int]) -> WovenJaxpr:
    """Make one jaxpr that computes what ``parts`` compute, their collectives hidden under each other's compute.

    Args:
        parts: flat per-shard jaxprs; none reads what another one makes. They may hold the same variables.
        sizes: of the mesh axes, for the cost of collectives. The rates that decide what is put under what are an H100's.
    """
    assert parts, "nothing to weave"
    # One threshold for all parts: what is small beside the largest collective of any gains nothing by a cut.
    least = cut_threshold(parts)
    renamed, consts = _apart(parts)
    graphs = [PartGraph(part, least) for part in renamed]
    nodes = _nodes(graphs, UnitCosts(), sizes)
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
