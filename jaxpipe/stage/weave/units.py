"""Cuts a stage function's per-shard jaxpr into units at its collectives (`stp.txt` section 3, figure 3).

An equation belongs to the unit of the first collective, in program order, that needs its result; what no collective needs is
filler: weight gradients, and what follows the last collective. So the units of one function run in order, each ends by
starting its collective, and filler may run any time after what it reads. Units are named as the paper names them, by
structure: one with an attention product (a ``dot_general`` with batch dimensions, or a fused attention kernel) is ``Attn``,
another one with products ``MLP``; what stands before the first product of a unit (residual sum, norm) is ``Pre-Attn`` or
``Pre-MLP``. In a backward pass the norm's own derivative so counts as the beginning
of the following unit, since the collective lies between it and the products that it belongs to.

Units are made of chunks, the least that ``weave/weaver.py`` moves: one product (or loop, or kernel) with the cheap
equations around it.

Collectives are the all-reduces, reduce-scatters, all-gathers, all-to-alls and permutes over either axis. Those that move little
beside the largest one (the maxima and sums of a cross entropy) stay ordinary equations: nothing is gained by cutting there.
Costs come from shapes (:class:`UnitCosts`): a chunk takes the longer of its arithmetic and its memory traffic, results that
stay within it cost none, and collectives are rings. Not modelled: collectives inside ``scan`` and ``while`` bodies (the loop is
one chunk), kernel launches, and that a collective slows the products beside it (`stp.txt` table 11: 7.5%).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from jaxpipe._jax_compat import ClosedJaxpr, JaxprEqn, Var, aval_bytes, sub_jaxprs, variables
from jaxpipe.axes import BUFFER_AXES, exchanging
from jaxpipe.stage.jaxprs import Dataflow, EqnKind, eqn_flops, kind, mesh_axes, row, row_of

LEAST_SHARE = 1 / 8
"""A collective that moves less than this share of the largest one's bytes is not cut at."""

_ATTENTION_KERNELS = ("dot_product_attention", "flash")


@dataclass(frozen=True, slots=True)
class UnitCosts:
    """Rates by which equations take time on one shard: an H100 SXM at what large products and NCCL reach of its peak.

    ``flops_per_s``: of 16-bit products. ``bytes_per_s``: of device memory. ``link_bytes_per_s``: of the ring between shards,
    one direction. ``link_latency_s``: of one collective.
    """

    flops_per_s: float = 660e12
    bytes_per_s: float = 2.7e12
    link_bytes_per_s: float = 360e9
    link_latency_s: float = 10e-6

    def work_s(self, flops: int, moved_bytes: int) -> float:
        """Estimate the seconds of a chunk: arithmetic or memory traffic, whichever is longer."""
        return max(flops / self.flops_per_s, moved_bytes / self.bytes_per_s)

    def collective_s(self, primitive: str, whole_bytes: float, shards: float) -> float:
        """Estimate the seconds of a ring over ``shards``; ``whole_bytes``: of the array before a scatter or after a gather. A
        permute is one step of it, with all of the array."""
        # An all-reduce is a reduce-scatter and an all-gather: twice around the ring.
        exchange = row_of(primitive).exchange
        passes = 1.0 if exchange == "permute" else (2 if exchange == "all-reduce" else 1) * (shards - 1) / shards
        return self.link_latency_s + passes * whole_bytes / self.link_bytes_per_s


@dataclass(frozen=True, slots=True)
class Chunk:
    """Equations that stay together: at most one product, loop or kernel, and the cheap ones around it.

    ``eqns``: positions in the jaxpr, in an order that respects dataflow. ``heavy``: position of the product, if any.
    ``flops`` counts products; ``bytes_read`` and ``bytes_written`` what enters and leaves the chunk.
    """

    eqns: tuple[int, ...]
    heavy: int | None
    flops: int
    bytes_read: int
    bytes_written: int


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective over ``axes``: its position in the jaxpr, and the bytes of the whole (gathered, unscattered) array."""

    eqn: int
    primitive: str
    whole_bytes: int
    axes: tuple[str, ...]

    @property
    def eqns(self) -> tuple[int, ...]:
        return (self.eqn,)

    @property
    def of_experts(self) -> bool:
        """Return whether it moves rows to experts, or their results back."""
        experts = BUFFER_AXES["experts"].divided
        return row_of(self.primitive).exchange == "all-to-all" and not set(experts).isdisjoint(self.axes)


@dataclass(frozen=True, slots=True)
class Unit:
    """The work between two collectives of one function. ``collective``: the one that ends it, None for filler and for what
    stands before the first product (the products' unit follows and has it). ``filler``: no collective needs it."""

    name: str
    chunks: tuple[Chunk, ...]
    collective: Collective | None
    filler: bool = False

    @property
    def works(self) -> tuple[Chunk | Collective, ...]:
        """Return the chunks of the unit and its collective, in order."""
        return (*self.chunks, self.collective) if self.collective is not None else self.chunks

    @property
    def eqns(self) -> tuple[int, ...]:
        return tuple(i for chunk in self.chunks for i in chunk.eqns)


class PartGraph(Dataflow):
    """Dataflow of one jaxpr, and what each collective needs. Built once, not changed.

    ``closed``: flat (no calls left in it, see :mod:`jaxpipe.stage.jaxprs`). ``least_bytes``: collectives that move less are
    ordinary equations (:func:`cut_threshold`).
    """

    def __init__(self, closed: ClosedJaxpr, least_bytes: float = 0) -> None:
        super().__init__(closed.jaxpr.eqns)
        self.jaxpr = closed.jaxpr
        self.results = set(variables(closed.jaxpr.outvars))
        self.collectives = [c for c in collectives(closed) if c.whole_bytes >= least_bytes]
        self.need = self._needs()

    def _needs(self) -> list[int | None]:
        """Return the first collective (by number) that depends on each equation, itself included; None for filler."""
        # In program order, so that what two collectives need belongs to the first.
        need: list[int | None] = [None] * len(self.eqns)
        for number, collective in enumerate(self.collectives):
            for i in self.needed(self.eqns[collective.eqn].outvars, lambda i: need[i] is None):
                need[i] = number
        return need

    def ends(self, eqns: Sequence[int]) -> tuple[list[Var], list[Var]]:
        """Return what these equations read of others, and those of their results that others read or that the jaxpr returns."""
        outputs = dict.fromkeys(v for i in eqns for v in self.eqns[i].outvars)
        read = dict.fromkeys(v for i in eqns for v in variables(self.eqns[i].invars))
        left = [v for v in outputs if v in self.results or not set(self.readers.get(v, ())).issubset(eqns)]
        return [v for v in read if v not in outputs], left

    def chunk(self, eqns: Sequence[int]) -> Chunk:
        """Make the chunk of these equations."""
        heavy = next((i for i in eqns if is_heavy(self.eqns[i])), None)
        flops = sum(eqn_flops(self.eqns[i]) for i in eqns)
        read_bytes, left_bytes = (sum(aval_bytes(v.aval) for v in values) for values in self.ends(eqns))
        return Chunk(tuple(eqns), heavy, flops, read_bytes, left_bytes)


def collectives(closed: ClosedJaxpr) -> tuple[Collective, ...]:
    """All collectives of layers that move activations or statistics in bulk, in program order."""
    collectives_of_part = []
    for i, eqn in enumerate(closed.jaxpr.eqns):
        if row(eqn).exchange and not exchanging().isdisjoint(mesh_axes(eqn)):
            ends = (sum(aval_bytes(a.aval) for a in atoms) for atoms in (eqn.invars, eqn.outvars))
            collectives_of_part.append(Collective(i, eqn.primitive.name, max(ends), mesh_axes(eqn)))
    return tuple(collectives_of_part)


def cut_threshold(parts: Sequence[ClosedJaxpr]) -> float:
    """The bytes from which a collective of these functions is worth a cut."""
    return LEAST_SHARE * max((c.whole_bytes for part in parts for c in collectives(part)), default=0)


def units_of(graph: PartGraph) -> tuple[Unit, ...]:
    """Cut a stage function into units in program order, those of filler last."""
    members: Mapping[int | None, list[int]] = {k: [] for k in (*range(len(graph.collectives)), None)}
    ends = {c.eqn for c in graph.collectives}
    for i in range(len(graph.eqns)):
        if i not in ends:
            members[graph.need[i]].append(i)
    units = [Unit(_kind(graph, members[k]), _chunks(graph, members[k]), c) for k, c in enumerate(graph.collectives)]
    return (
        *(u for unit in _named_before_gathers(units) for u in _without_head(graph, unit)),
        *(Unit("filler", (c,), None, filler=True) for c in _chunks(graph, members[None])),
    )


def is_heavy(eqn: JaxprEqn) -> bool:
    """Whether an equation is a kernel of its own with much work: a product, convolution or custom call, or a loop
    with one."""
    # A loop is one equation here, and can't be interleaved with anything: as a whole it hides a collective.
    if kind(eqn) is EqnKind.BODY:
        return any(is_heavy(inner) for sub in sub_jaxprs(eqn) for inner in sub.eqns)
    return kind(eqn) in (EqnKind.PRODUCT, EqnKind.CUSTOM)


def _chunks(graph: PartGraph, members: Sequence[int]) -> tuple[Chunk, ...]:
    """Cut ``members`` into chunks: each product behind what it still needs, and followed by what it makes possible. Equations
    that touch no product make chunks of their own, one for each connected piece."""
    # Cheap work goes to the product whose result it reads, so that XLA can fuse it there: a barrier between them would write
    # the product's result to memory and read it again.
    mine = set(members)
    heavies = [i for i in members if is_heavy(graph.eqns[i])]
    before: set[int] = set()
    for h in heavies:
        before.update(_missing(graph, h, mine, before))
    tails = [i for i in members if i not in before]
    placed: set[int] = set()
    chunks: list[Chunk] = []
    for h in heavies:
        group = _missing(graph, h, mine, placed)
        placed.update(group)
        reached = {h}
        for i in tails:
            if i not in placed and not reached.isdisjoint(graph.inputs(i)):
                missing = _missing(graph, i, mine, placed)
                # What a later product needs waits for that product, or this chunk would hold it up.
                if all(j == i or j not in before for j in missing):
                    group += missing
                    placed.update(missing)
                    reached.add(i)
        chunks.append(graph.chunk(group))
    rest = [i for i in members if i not in placed]
    return (*chunks, *(graph.chunk(piece) for piece in _pieces(graph, rest)))


def _pieces(graph: PartGraph, members: Sequence[int]) -> list[list[int]]:
    """Return the connected pieces of ``members``, each in program order."""
    # Members of a piece share one list; reading another piece joins the two, and all of both get the joined list.
    piece: dict[int, list[int]] = {}
    for i in members:
        joined = [i]
        for other in {id(piece[j]): piece[j] for j in graph.inputs(i) if j in piece}.values():
            joined = [*other, *joined]
        for j in joined:
            piece[j] = joined
    return list({id(p): sorted(p) for p in piece.values()}.values())


def _missing(graph: PartGraph, root: int, mine: set[int], placed: set[int]) -> list[int]:
    """Return ``root`` and what it needs of ``mine`` that has no place yet, in program order."""
    return sorted({root} | graph.needed(graph.eqns[root].invars, lambda i: i in mine and i not in placed))


def _kind(graph: PartGraph, members: Sequence[int]) -> str:
    """Name the unit of these equations: ``Attn``, ``MLP``, or "" without products."""
    if not any(is_heavy(graph.eqns[i]) for i in members):
        return ""
    return "Attn" if any(_is_attention(graph.eqns[i]) for i in members) else "MLP"


def _is_attention(eqn: JaxprEqn) -> bool:
    """Whether an equation multiplies activations by activations, batch entry by batch entry, or is a kernel that does."""
    if eqn.primitive.name == "dot_general":
        _, batched = eqn.params["dimension_numbers"]
        return any(batched)
    if any(word in eqn.primitive.name for word in _ATTENTION_KERNELS):
        return True
    return any(_is_attention(inner) for sub in sub_jaxprs(eqn) for inner in sub.eqns)


def _named_before_gathers(units: Sequence[Unit]) -> Iterable[Unit]:
    """Give units without products, which end at a gather of sequence shards, the name of what follows: Pre-Attn, Pre-MLP."""
    following, named = "", []
    for unit in reversed(units):
        following = unit.name or following
        before = f"Pre-{following}" if following else "end"
        named.append(unit if unit.name else replace(unit, name=before))
    return reversed(named)


def _without_head(graph: PartGraph, unit: Unit) -> Iterable[Unit]:
    """Split what stands before the first product of a unit off into a unit of its own (the paper's Pre-Attn, Pre-MLP)."""
    first = unit.chunks[0] if unit.chunks else None
    if first is None or first.heavy is None:
        return [unit]
    at = first.eqns.index(first.heavy)
    operands = set(_missing(graph, first.heavy, set(first.eqns), set()))
    head = [i for i in first.eqns[:at] if i in operands]
    # Casts and reshapes alone are no norm: they stay with their product.
    if not any(eqn_flops(graph.eqns[i], elementwise=True) for i in head):
        return [unit]
    rest = [i for i in first.eqns if i not in set(head)]
    pre = Unit(f"Pre-{unit.name}", (graph.chunk(head),), None)
    return [pre, Unit(unit.name, (graph.chunk(rest), *unit.chunks[1:]), unit.collective)]
