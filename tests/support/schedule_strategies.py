"""Random placements, costs and valid schedules, for property tests of everything that takes a schedule.

A random schedule is a random linear order of the actions' dependency order, dealt out to the rows: so it can't deadlock.
:func:`random_schedule` works from a :class:`random.Random`; the hypothesis strategies draw its arguments and a seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Literal

from hypothesis import strategies as st

from jaxpipe.schedule.costs import CostProfile, HostLink, Link
from jaxpipe.schedule.ir import Action, Braid, Schedule, Slot, op_spec
from jaxpipe.schedule.placement import (
    Placement,
    bidirectional,
    chain,
    circular,
    one_to_one,
    v_shape,
    wave,
    with_shared,
)

Split = Literal["any", "split", "full"]
Item = tuple[Action, tuple[int, ...]]
"""An action and the ranks that run it at once."""


def random_schedule(
    placement: Placement,
    microbatches: int,
    rng: random.Random,
    *,
    split: Split = "any",
    offload: float = 0.0,
    braid: float = 0.0,
) -> Schedule:
    """Return a valid schedule of ``placement``.

    ``split``: every backward as B and W, as BW, or either. ``offload``: probability that a microbatch of a stage is offloaded
    and loaded back; half of those have an S. ``braid``: probability that two neighbouring independent compute actions are
    woven.
    """
    items = [
        item
        for s in range(placement.num_stages)
        for i in range(microbatches // placement.span[s])
        for item in _items(placement, s, i, rng, split, offload)
    ]
    before = _order(placement, items)
    rows: list[list[tuple[Slot, int]]] = [[] for _ in range(placement.num_ranks)]
    waiting = {k: len(deps) for k, deps in enumerate(before)}
    after: list[list[int]] = [[] for _ in items]
    for k, deps in enumerate(before):
        for dep in deps:
            after[dep].append(k)
    ready = [k for k, n in waiting.items() if n == 0]
    last: tuple[int, int] | None = None
    while ready:
        k = ready.pop(rng.randrange(len(ready)))
        action, ranks = items[k]
        if _braids(items, before, last, k) and rng.random() < braid:
            slot, _ = rows[ranks[0]].pop()
            rows[ranks[0]].append((Braid((*slot.actions, action)), k))
            last = None
        else:
            for rank in ranks:
                rows[rank].append((action, k))
            last = (k, ranks[0])
        for t in after[k]:
            waiting[t] -= 1
            if not waiting[t]:
                ready.append(t)
    return Schedule("random", placement, microbatches, tuple(tuple(slot for slot, _ in row) for row in rows))


def _items(placement: Placement, s: int, i: int, rng: random.Random, split: Split, offload: float) -> list[Item]:
    """Return the actions of one stage and microbatch; joint ones once for their group, others once per rank."""
    group = placement.ranks(s, i)
    full = split == "full" or (split == "any" and rng.random() < 0.5)
    items: list[Item] = [(Action("F", s, i), group), (Action("BW" if full else "B", s, i), group)]
    for rank in group:
        if not full:
            items.append((Action("W", s, i), (rank,)))
        if rng.random() < offload:
            items += [(Action(op, s, i), (rank,)) for op in ("O", "L", "S")[: 2 + (rng.random() < 0.5)]]
    return items


def _order(placement: Placement, items: list[Item]) -> list[set[int]]:
    """Return for each item the items that its op's waits name."""
    where: dict[tuple[Action, int], int] = {
        (action, rank): k for k, (action, ranks) in enumerate(items) for rank in ranks
    }
    before: list[set[int]] = []
    for action, ranks in items:
        predecessors = set()
        for wait in op_spec(action.op).waits:
            targets = {
                "self": (action.stage,),
                "pred": placement.predecessors(action.stage),
                "succ": placement.successors(action.stage),
            }[wait.where]
            for op in wait.ops:
                for t in targets:
                    span, other_span = placement.span[action.stage], placement.span[t]
                    first, last = (
                        action.microbatch * span // other_span,
                        ((action.microbatch + 1) * span - 1) // other_span,
                    )
                    for producer in (Action(op, t, i) for i in range(first, last + 1)):
                        homes = ranks if wait.where == "self" else placement.ranks(t, producer.microbatch)
                        predecessors |= {where[producer, rank] for rank in homes if (producer, rank) in where}
        before.append(predecessors)
    return before


def _braids(items: list[Item], before: list[set[int]], last: tuple[int, int] | None, k: int) -> bool:
    """Return whether item k may be woven with the item dealt out just before it."""
    if last is None:
        return False
    (other, other_ranks), (action, ranks) = items[last[0]], items[k]
    return (
        ranks == other_ranks
        and len(ranks) == 1
        and op_spec(action.op).lane == op_spec(other.op).lane == "compute"
        and last[0] not in before[k]
    )


@st.composite
def random_dag(draw: st.DrawFn, num_stages: int) -> tuple[tuple[int, int], ...]:
    """Draw edges from lower to higher stage numbers, every stage but the last feeding at least one."""
    edges = set()
    for a in range(num_stages - 1):
        for b in draw(st.sets(st.integers(a + 1, num_stages - 1), min_size=1, max_size=2)):
            edges.add((a, b))
    return tuple(sorted(edges))


@st.composite
def random_placements(
    draw: st.DrawFn,
    max_ranks: int = 4,
    max_stages: int = 6,
    *,
    ranks: int | None = None,
    chunks: int | None = None,
    chains_only: bool = False,
    single_rank_stages: bool = False,
    one_flow: bool = False,
) -> Placement:
    """Draw any kind of placement. ``ranks`` and ``chunks`` fix those; the flags exclude DAGs, groups of ranks, several
    flows."""
    p = ranks or draw(st.integers(1, max_ranks))
    v = chunks or draw(st.integers(1, max(1, max_stages // p)))
    base = draw(st.sampled_from(_makers(p, v, one_flow)))()
    if draw(st.booleans()):
        base = _shuffled(base, draw(st.permutations(range(p))))
    if not single_rank_stages and p > 1 and draw(st.integers(0, 3)) == 0:
        base = with_shared(base, draw(st.sets(st.integers(0, base.num_stages - 1), min_size=1, max_size=2)))
    if not chains_only and draw(st.integers(0, 2)) == 0:
        base = Placement(f"{base.kind}-dag", p, base.flows, draw(random_dag(base.num_stages)))
    return base


def _makers(p: int, v: int, one_flow: bool) -> list[Callable[[], Placement]]:
    makers: list[Callable[[], Placement]] = [lambda: circular(p, v), lambda: wave(p, v)]
    if v == 1:
        makers += [lambda: one_to_one(p)] + ([] if one_flow else [lambda: bidirectional(p)])
    if v == 2:
        makers.append(lambda: v_shape(p))
    return makers


def _shuffled(base: Placement, names: list[int]) -> Placement:
    """Return the same placement with ranks renamed: stages no longer follow each other in rank order."""
    flows = tuple(tuple(tuple(names[r] for r in group) for group in flow) for flow in base.flows)
    return Placement("explicit", base.num_ranks, flows, base.edges)


@st.composite
def random_valid_schedules(
    draw: st.DrawFn,
    max_ranks: int = 4,
    max_stages: int = 6,
    max_microbatches: int = 5,
    *,
    ranks: int | None = None,
    chunks: int | None = None,
    microbatches: int | None = None,
    split: Split = "any",
    offload: bool = False,
    braids: bool = False,
    placements: st.SearchStrategy[Placement] | None = None,
    chains_only: bool = False,
    single_rank_stages: bool = False,
    one_flow: bool = False,
) -> Schedule:
    """Draw valid schedules in random order. Sizes given (``ranks``, ``chunks``, ``microbatches``) are fixed, others drawn."""
    if placements is None:
        placements = random_placements(
            max_ranks,
            max_stages,
            ranks=ranks,
            chunks=chunks,
            chains_only=chains_only,
            single_rank_stages=single_rank_stages,
            one_flow=one_flow,
        )
    placement = draw(placements)
    m = microbatches or draw(st.integers(1, max_microbatches))
    return random_schedule(
        placement,
        m,
        random.Random(draw(st.integers(0, 2**32 - 1))),
        split=split,
        offload=draw(st.sampled_from([0.0, 0.4, 1.0])) if offload else 0.0,
        braid=draw(st.sampled_from([0.0, 0.5])) if braids else 0.0,
    )


@st.composite
def random_costs(draw: st.DrawFn, num_stages: int, num_ranks: int, *, comm: bool = True) -> CostProfile:
    """Draw uneven stages, links and host links. Values are small integers and quarters, so sums are exact."""
    quarter = st.integers(0, 12).map(lambda x: x / 4)

    def each(values: st.SearchStrategy[float]) -> tuple[float, ...]:
        return tuple(draw(st.lists(values, min_size=num_stages, max_size=num_stages)))

    residual = each(st.integers(1, 8).map(float))
    pairs = [(a, b) for a in range(num_ranks) for b in range(num_ranks) if a != b]
    links = (
        draw(st.lists(st.tuples(st.sampled_from(pairs), quarter), max_size=3, unique_by=lambda x: x[0]))
        if pairs
        else []
    )
    groups = draw(st.sampled_from([(), (tuple(range(num_ranks)),), tuple((r,) for r in range(num_ranks))]))
    return CostProfile(
        f_s=each(quarter),
        b_s=each(quarter),
        w_s=each(quarter),
        bw_s=each(quarter),
        residual_bytes=residual,
        w_residual_bytes=tuple(x / 2 for x in residual),
        cotangent_bytes=tuple(x / 4 for x in residual),
        offloadable_bytes=tuple(x / 2 for x in residual),
        boundary_bytes=each(st.integers(0, 3).map(float)),
        boundary_buffers=draw(st.booleans()),
        param_bytes=each(st.integers(0, 3).map(float)),
        temp_bytes=(("F", each(quarter)), ("W", each(quarter))),
        offload_s=each(quarter),
        load_s=each(quarter),
        link=Link(draw(quarter), 2.0) if comm else Link(),
        links=tuple((pair, Link(latency, 4.0)) for pair, latency in links) if comm else (),
        host=HostLink(mode=draw(st.sampled_from(["duplex", "shared"])), groups=groups),
    )


def one_f_one_b_rows(ranks: int, microbatches: int) -> Schedule:
    """Return 1F1B written out by hand, independent of the families: rank r starts with p − r forwards."""
    rows = []
    for r in range(ranks):
        warm = min(ranks - r, microbatches)
        row: list[Slot] = [Action("F", r, i) for i in range(warm)]
        for i in range(microbatches):
            row.append(Action("BW", r, i))
            if i + warm < microbatches:
                row.append(Action("F", r, i + warm))
        rows.append(tuple(row))
    return Schedule("1f1b", one_to_one(ranks), microbatches, tuple(rows))


def gpipe_rows(ranks: int, microbatches: int) -> Schedule:
    """Return all forwards, then all backwards, in order."""
    rows = tuple(tuple(Action(op, r, i) for op in ("F", "BW") for i in range(microbatches)) for r in range(ranks))
    return Schedule("gpipe", one_to_one(ranks), microbatches, rows)


__all__ = [
    "chain",
    "gpipe_rows",
    "one_f_one_b_rows",
    "random_costs",
    "random_dag",
    "random_placements",
    "random_schedule",
    "random_valid_schedules",
]
