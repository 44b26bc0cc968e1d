"""Which ranks run which stage, and how stages follow each other.

A :class:`Placement` maps (stage, microbatch) to the group of ranks that runs it: one rank in the usual case, several for a
stage spread over ranks (a vocabulary layer on the whole pipeline). Stages form a DAG, a chain by default. Bidirectional
pipelines keep a replica of each stage per flow; microbatch i belongs to flow ``i % num_flows``. A stage may run once per group
of microbatches (:attr:`Placement.span`).

Constructors: :func:`one_to_one`, :func:`circular`, :func:`v_shape`, :func:`wave`, :func:`bidirectional`,
:func:`towers`, :func:`with_shared`, :func:`with_span`, :func:`with_vocabulary`, and :func:`explicit` for anything else.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush

from jaxpipe.errors import ScheduleError

_VOCABULARY = "+vocabulary"
Group = tuple[int, ...]
Edges = tuple[tuple[int, int], ...]


def chain(num_stages: int) -> Edges:
    """Edges of a chain: each stage feeds the next."""
    return tuple((s, s + 1) for s in range(num_stages - 1))


@dataclass(frozen=True, slots=True)
class Placement:
    """``flows[k][s]``: the group of ranks that runs stage s for microbatches of flow k (i % number of flows).

    ``edges``: the DAG of stages as (from, to) pairs. ``kind``: name of the constructor, for people. ``span[s]``: stage s runs
    once for each group of so many consecutive microbatches (default: 1); the number in its actions is the group's: j stands
    for the microbatches j·span up to (j + 1)·span − 1, and the number of microbatches must be a multiple of it.
    ``detached``: stages that hand no gradient back to those before them, whose backwards therefore don't wait for theirs.

    Raises:
        ScheduleError: ranks out of range, empty or repeated in a group, ranks without a stage, flows of unequal length,
            edges that are out of range, repeated or cyclic, spans that are not one a stage, below 1, or above 1 with
            several flows, or detached stages that are out of range, repeated or out of order.
    """

    kind: str
    num_ranks: int
    flows: tuple[tuple[Group, ...], ...]
    edges: Edges
    span: tuple[int, ...] = ()
    detached: tuple[int, ...] = ()
    num_chunks: int = field(init=False, repr=False, compare=False)
    """The largest number of stages of the :attr:`trunk` that one rank runs in one flow."""
    _stages: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)
    _before: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)
    _after: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)
    _returning: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.span and self.flows:
            # frozen: equal placements must have equal spans, given or not
            object.__setattr__(self, "span", (1,) * self.num_stages)
        problems = list(self._problems())
        if problems:
            raise ScheduleError(f"placement {self.kind!r}: " + "; ".join(problems), problems)
        trunk = self.trunk
        visits = [Counter(r for s, group in enumerate(flow) if s in trunk for r in group) for flow in self.flows]
        object.__setattr__(self, "num_chunks", max(max(counts.values()) for counts in visits))
        runs = {(rank, s) for flow in self.flows for s, group in enumerate(flow) for rank in group}
        object.__setattr__(self, "_stages", _grouped(self.num_ranks, sorted(runs)))
        object.__setattr__(self, "_before", _grouped(self.num_stages, [(b, a) for a, b in self.edges]))
        object.__setattr__(self, "_after", _grouped(self.num_stages, self.edges))
        # a detached stage gets no gradient to hand on, so no backward before it may wait for one
        attached = [(a, b) for a, b in self.edges if b not in self.detached]
        object.__setattr__(self, "_returning", _grouped(self.num_stages, attached))

    def _problems(self) -> Iterable[str]:
        if self.num_ranks < 1:
            yield f"number of ranks is {self.num_ranks}; want at least 1"
            return
        if not self.flows or not self.flows[0]:
            yield "there are no stages"
            return
        n = len(self.flows[0])
        used = {rank for flow in self.flows for group in flow for rank in group}
        for k, flow in enumerate(self.flows):
            if len(flow) != n:
                yield f"flow {k} has {len(flow)} stages, flow 0 has {n}"
            for s, group in enumerate(flow):
                if not group:
                    yield f"stage {s} runs on no rank"
                if len(set(group)) != len(group):
                    yield f"stage {s} names a rank twice: {group}"
                outside = (r for r in group if not 0 <= r < self.num_ranks)
                yield from (f"stage {s} runs on rank {r}, but ranks are 0..{self.num_ranks - 1}" for r in outside)
        idle = sorted(set(range(self.num_ranks)) - used)
        if idle:
            yield f"ranks {', '.join(map(str, idle))} run no stage"
        if len(set(self.edges)) != len(self.edges):
            yield "an edge is given twice"
        bad = [e for e in self.edges if not (0 <= e[0] < n and 0 <= e[1] < n)]
        if bad:
            yield f"edge {bad[0][0]}->{bad[0][1]} names a stage outside 0..{n - 1}"
        elif _topological_order(n, self.edges) is None:
            yield "the edges between stages form a cycle"
        if len(self.span) != n or any(type(g) is not int or g < 1 for g in self.span):
            yield f"spans are {' '.join(map(str, self.span))}; want a whole number of at least 1 for each of {n} stages"
        elif self.has_spans and len(self.flows) > 1:
            yield f"spans are {' '.join(map(str, self.span))}, and there are {len(self.flows)} flows; want one of the two"
        if self.kind.endswith(_VOCABULARY) and not self.trunk:
            yield f"{n} stages on {self.num_ranks} ranks are too few for parts of vocabulary layers on each"
        if sorted({*self.detached} & {*range(n)}) != list(self.detached):
            yield f"detached stages are {' '.join(map(str, self.detached))}; want some of 0..{n - 1}, ascending"

    @property
    def num_stages(self) -> int:
        return len(self.flows[0])

    @property
    def num_flows(self) -> int:
        return len(self.flows)

    @property
    def has_spans(self) -> bool:
        """Return whether some stage runs once for several microbatches."""
        return any(g != 1 for g in self.span)

    def covering(self, stage: int, number: int, other: int) -> range:
        """Return the numbers of the actions of stage ``other`` that share a microbatch with action ``number`` of ``stage``."""
        span, other_span = self.span[stage], self.span[other]
        return range(number * span // other_span, -(-(number + 1) * span // other_span))

    def is_shared(self, stage: int) -> bool:
        """Return whether several ranks run ``stage`` for one microbatch."""
        return any(len(flow[stage]) > 1 for flow in self.flows)

    def ranks(self, stage: int, microbatch: int) -> Group:
        """Return the group of ranks that runs ``stage`` for ``microbatch``."""
        return self.flows[microbatch % len(self.flows)][stage]

    def first_flow(self, stage: int, microbatch: int) -> int:
        """Return the first flow with ``stage`` on the ranks that run it for ``microbatch``: the number of what runs once a
        step."""
        group = self.ranks(stage, microbatch)
        return next(k for k, flow in enumerate(self.flows) if flow[stage] == group)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that ``rank`` runs in any flow, ascending: its chunks."""
        return self._stages[rank]

    def predecessors(self, stage: int) -> tuple[int, ...]:
        return self._before[stage]

    def successors(self, stage: int) -> tuple[int, ...]:
        return self._after[stage]

    def returning(self, stage: int) -> tuple[int, ...]:
        """Return the successors that hand a gradient back."""
        return self._returning[stage]

    @property
    def trunk(self) -> range:
        """Return the stages that are no parts of vocabulary layers (:func:`with_vocabulary`)."""
        # parts of the embedding stand before the chain; those of the head and the loss after it
        ends = self.num_ranks if self.kind.endswith(_VOCABULARY) else 0
        return range(ends, self.num_stages - (ends + 1 if ends else 0))

    def peers(self, stage: int) -> tuple[int, ...]:
        """Return the other stages whose results a successor of ``stage`` takes, ascending: of a tower's end, those of the
        others."""
        return tuple(sorted({p for s in self.successors(stage) for p in self.predecessors(s)} - {stage}))

    def topological_order(self) -> tuple[int, ...]:
        """Return stages such that every stage comes after its predecessors; ties by number."""
        order = _topological_order(self.num_stages, self.edges)
        assert order is not None
        return order

    @property
    def is_chain(self) -> bool:
        return sorted(self.edges) == list(chain(self.num_stages))

    @property
    def is_v(self) -> bool:
        """Return whether it is that of :func:`v_shape`."""
        return self == v_shape(self.num_ranks)

    @property
    def is_plain_chain(self) -> bool:
        """Return whether the stages form a chain, each on one rank, and none has a span."""
        is_simple_chain = self.is_chain and not self.has_spans and not self.detached
        return is_simple_chain and not any(map(self.is_shared, range(self.num_stages)))


def _grouped(n: int, pairs: Iterable[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
    """Return, per first entry 0..n-1, the second entries of its pairs, in order."""
    groups: list[list[int]] = [[] for _ in range(n)]
    for key, value in pairs:
        groups[key].append(value)
    return tuple(map(tuple, groups))


def _topological_order(n: int, edges: Iterable[tuple[int, int]]) -> tuple[int, ...] | None:
    after, waits = _grouped(n, edges), Counter(b for _, b in edges)
    ready, order = [s for s in range(n) if not waits[s]], []
    while ready:
        # by number among those that are ready, so that the order does not depend on that of the edges
        order.append(s := heappop(ready))
        for t in after[s]:
            waits[t] -= 1
            if not waits[t]:
                heappush(ready, t)
    return tuple(order) if len(order) == n else None


def _wound(kind: str, ranks: int, chunks: int, turns_back: bool) -> Placement:
    """Return ``chunks`` a rank, each running down the ranks, or every second one back up."""
    for name, size in (("ranks", ranks), ("chunks", chunks)):
        if size < 1:
            raise ScheduleError(f"number of {name} is {size}; want at least 1")
    flow = tuple((ranks - 1 - r if turns_back and k % 2 else r,) for k in range(chunks) for r in range(ranks))
    return Placement(kind, ranks, (flow,), chain(len(flow)))


def one_to_one(ranks: int) -> Placement:
    """Stage s on rank s."""
    return _wound("one-to-one", ranks, 1, turns_back=False)


def circular(ranks: int, chunks: int) -> Placement:
    """Stage s on rank s mod p (interleaved): every chunk starts again at rank 0."""
    return _wound("circular", ranks, chunks, turns_back=False)


def v_shape(ranks: int) -> Placement:
    """Place two chunks: down the ranks and back up, so rank 0 holds the first stage and the last."""
    return _wound("v", ranks, 2, turns_back=True)


def wave(ranks: int, chunks: int) -> Placement:
    """Wind down, up, down, …: chunk k runs the ranks forward when k is even and backward when odd (Hanayo's waves)."""
    return _wound("wave", ranks, chunks, turns_back=True)


def bidirectional(ranks: int) -> Placement:
    """Place two flows over replicas of each stage: even microbatches down the ranks, odd ones up (Chimera, DualPipe)."""
    (down,) = one_to_one(ranks).flows
    return Placement("bidirectional", ranks, (down, down[::-1]), chain(ranks))


def placement_named(kind: str, ranks: int, chunks: int | None = None) -> Placement:
    """Return the placement of one of the :data:`CONSTRUCTORS`; ``chunks`` a rank where it may have any number of them
    (default 2).

    Raises:
        ScheduleError: it has another number of chunks, or there is none of that name.
    """
    if kind not in CONSTRUCTORS:
        raise ScheduleError(f"placement {kind!r} is unknown; known: {', '.join(CONSTRUCTORS)}")
    arguments, make = CONSTRUCTORS[kind]
    if "chunks" in arguments:
        return make(ranks, 2 if chunks is None else chunks)
    placement = make(ranks)
    if chunks not in (None, placement.num_chunks):
        raise ScheduleError(
            f"placement {kind} has {placement.num_chunks} chunk(s) per rank, not {chunks}; drop one of the two"
        )
    return placement


def with_shared(base: Placement, stages: Iterable[int]) -> Placement:
    """Return ``base`` with each of ``stages`` spread over all ranks (a vocabulary layer shared by the whole pipeline)."""
    shared = set(stages)
    outside = sorted(s for s in shared if not 0 <= s < base.num_stages)
    if outside:
        raise ScheduleError(f"shared stage {outside[0]} is outside 0..{base.num_stages - 1}")
    everyone = tuple(range(base.num_ranks))
    flows = tuple(tuple(everyone if s in shared else g for s, g in enumerate(flow)) for flow in base.flows)
    return Placement(f"{base.kind}+shared", base.num_ranks, flows, base.edges, base.span)


def with_vocabulary(base: Placement, *, barriers: int) -> Placement:
    """Return ``base``, a chain of n stages on p ranks, with a vocabulary-parallel embedding and head over all ranks.

    Stages, in order: p parts of the embedding, part r on rank r, whose results the first stage of the chain puts together; the
    chain (:attr:`Placement.trunk`); p parts of the head, part r on rank r, which all take what the last stage of the chain
    returns; and on that stage's rank the loss, which takes what the parts return. With two ``barriers`` the parts of the head
    hand their share of the gradient back when they know the whole loss; with one they hand it on to the loss, which takes what
    they took too, and are detached (arXiv 2411.05288, algorithms 1 and 2).

    Raises:
        ScheduleError: ``base`` is no chain with one flow and one rank a stage.
    """
    if not base.is_plain_chain or base.num_flows > 1:
        raise ScheduleError(f"placement {base.kind} is no chain of one flow; only such have spread vocabulary layers")
    p, n, (flow,) = base.num_ranks, base.num_stages, base.flows
    each = tuple((r,) for r in range(p))
    first, last, heads, loss = p, p + n - 1, range(p + n, 2 * p + n), 2 * p + n
    edges = [(e, first) for e in range(p)] + [(p + a, p + b) for a, b in base.edges]
    # with one barrier the loss, too, takes what the chain returns
    edges += [(last, h) for h in (*heads, *[loss] * (barriers == 1))] + [(h, loss) for h in heads]
    flow = (*each, *flow, *each, flow[-1])
    detached = tuple(heads) if barriers == 1 else ()
    return Placement(base.kind + _VOCABULARY, p, (flow,), tuple(sorted(edges)), detached=detached)


def with_span(base: Placement, spans: Mapping[int, int]) -> Placement:
    """Return ``base`` where stage s runs once for every ``spans[s]`` consecutive microbatches (a loss over several of them).

    Raises:
        ScheduleError: there is no such stage, or as :class:`Placement`.
    """
    if outside := [s for s in spans if not 0 <= s < base.num_stages]:
        raise ScheduleError(f"stage {outside[0]} with a span is outside 0..{base.num_stages - 1}")
    return replace(base, span=tuple(spans.get(s, g) for s, g in enumerate(base.span)))


def towers(parts: Mapping[str, Placement], join: Iterable[str]) -> Placement:
    """Return the placements ``parts`` side by side, each on ranks of its own, and last a stage that takes the results of
    them all, on the last rank of each part named in ``join`` (the loss of a model of several towers; on several ranks it is
    shared).

    Stages and ranks are numbered in the order of ``parts``.

    Raises:
        ScheduleError: there is no part, a name in ``join`` is none of them or there is none, or a part has several flows.
    """
    join = tuple(join)
    if not join or not set(join) <= {*parts}:
        raise ScheduleError(
            f"towers: join names {', '.join(map(repr, join)) or 'nothing'}; want some of {', '.join(parts)}"
        )
    flow: list[Group] = []
    edges: list[tuple[int, int]] = []
    spans: list[int] = []
    last: dict[str, Group] = {}
    loss, ranks = sum(part.num_stages for part in parts.values()), 0
    for name, part in parts.items():
        if part.num_flows > 1:
            raise ScheduleError(f"towers: {name!r} has {part.num_flows} flows; a tower has one")
        first = len(flow)
        flow += [tuple(ranks + r for r in group) for group in part.flows[0]]
        edges += [(first + a, first + b) for a, b in part.edges]
        # every end of a tower feeds the loss
        edges += [(first + s, loss) for s in range(part.num_stages) if not part.successors(s)]
        spans += part.span
        ranks, last[name] = ranks + part.num_ranks, flow[-1][-1:]
    group = tuple(rank for name in join for rank in last[name])
    return Placement("towers", ranks, ((*flow, group),), tuple(edges), (*spans, 1))


def explicit(
    num_ranks: int, groups: Sequence[int | Sequence[int]], edges: Iterable[tuple[int, int]] | None = None
) -> Placement:
    """Build any one-flow placement: ``groups[s]`` is the rank, or ranks, of stage s; ``edges`` a DAG (default: a chain)."""
    flow = tuple((g,) if isinstance(g, int) else tuple(g) for g in groups)
    return Placement("explicit", num_ranks, (flow,), chain(len(flow)) if edges is None else tuple(edges))


CONSTRUCTORS: dict[str, tuple[tuple[str, ...], Callable[..., Placement]]] = {
    "one-to-one": (("ranks",), one_to_one),
    "circular": (("ranks", "chunks"), circular),
    "v": (("ranks",), v_shape),
    "wave": (("ranks", "chunks"), wave),
    "bidirectional": (("ranks",), bidirectional),
}
"""Kinds that sizes alone say, with the names of these sizes and the constructor."""
_BARE_WORD = re.compile(r"[A-Za-z][\w.+-]*")


def format_placement(placement: Placement) -> str:
    """Return kind and arguments of ``placement``, without its edges, as the text form of a schedule writes them."""
    constructor = CONSTRUCTORS.get(placement.kind)
    if constructor is not None:
        arguments, make = constructor
        sizes = {"ranks": placement.num_ranks, "chunks": max(1, placement.num_stages // placement.num_ranks)}
        sizes = {name: sizes[name] for name in arguments}
        if make(**sizes).flows == placement.flows:
            return " ".join([placement.kind, *(f"{name}={size}" for name, size in sizes.items())])
    kind = placement.kind if _BARE_WORD.fullmatch(placement.kind) else json.dumps(placement.kind)
    flows = (",".join("+".join(map(str, group)) for group in flow) for flow in placement.flows)
    return " ".join([kind, f"ranks={placement.num_ranks}", *(f"flow={flow}" for flow in flows)])


def format_edges(placement: Placement) -> str:
    """Return ``chain``, ``none`` or a list such as ``0->2 1->2``."""
    if placement.edges == chain(placement.num_stages):
        return "chain"
    return " ".join(f"{a}->{b}" for a, b in placement.edges) or "none"
