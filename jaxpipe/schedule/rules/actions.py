"""Every action of a placement as codes of the clock: any DAG of stages, groups of ranks and flows, and ops as their specs say.

What waits for what is read off the :func:`~jaxpipe.schedule.deps.build_graph` of a step with one microbatch a flow. On a group
an op that is joint is one action, and others run on each rank by themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import lcm
from typing import NamedTuple

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule.clock import Feed, Tables
from jaxpipe.schedule.costs import CostProfile
from jaxpipe.schedule.deps import build_graph
from jaxpipe.schedule.ir import Action, Schedule, op_spec, registered_ops
from jaxpipe.schedule.lanes import collectives_exposed
from jaxpipe.schedule.placement import Placement

FORWARD, BACKWARD = "F", "BW"


class Kind(NamedTuple):
    """Meaning of one block of codes: ``op`` of ``stage`` for the microbatches of ``flow``, on ``ranks``. An action
    of a stage with a span has the code of its first microbatch."""

    op: str
    stage: int
    flow: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Actions:
    """``kinds[code // num_microbatches]`` says what a code is, stages in topological order, F and BW of each first.
    ``tables`` is what the clock looks up."""

    placement: Placement
    num_microbatches: int
    kinds: tuple[Kind, ...]
    tables: Tables

    @classmethod
    def of(cls, placement: Placement, num_microbatches: int, costs: CostProfile | None = None) -> Actions:
        """F, BW and every other required op of ``placement``, with the seconds of ``costs``, TP collectives included.
        Without costs each action takes 1 s and no transfer takes time.

        Raises:
            ScheduleError: the costs are for another number of stages or lack those of an op, or an op waits for one that is
                not among these.
        """
        kinds = tuple(_kinds(placement))
        return cls(placement, num_microbatches, kinds, _tables(placement, num_microbatches, kinds, costs))

    def action(self, code: int) -> Action:
        """Return the action that ``code`` stands for."""
        op, stage, *_ = self.kinds[code // self.num_microbatches]
        return Action(op, stage, code % self.num_microbatches // self.placement.span[stage])


def _kinds(placement: Placement) -> Iterator[Kind]:
    names = (FORWARD, BACKWARD, *op_spec(BACKWARD).performs())
    specs = [op_spec(FORWARD), op_spec(BACKWARD), *(x for x in registered_ops() if x.required and x.name not in names)]
    for stage in placement.topological_order():
        for spec in specs:
            for k, flow in enumerate(placement.flows):
                groups = [flow[stage]] if spec.is_joint else [(r,) for r in flow[stage]]
                yield from (Kind(spec.name, stage, k, ranks) for ranks in groups)


def _tables(placement: Placement, m: int, kinds: Sequence[Kind], costs: CostProfile | None) -> Tables:
    if costs is not None:
        costs.require_stages(placement.num_stages, "the placement")
    costs = costs and collectives_exposed(costs)
    # Host lanes first: there a slot would wait for the compute slot that stands before it.
    order = sorted(range(len(kinds)), key=lambda k: op_spec(kinds[k].op).lane == "compute")
    span, few = placement.span, max(placement.num_flows, lcm(*placement.span))
    if wrong := [s for s, g in enumerate(span) if m % g]:
        raise ScheduleError(
            f"stage {wrong[0]} runs once per {span[wrong[0]]} microbatches, and {m} is no multiple of that"
        )
    # (kind, number) of every action of the fewest microbatches that all spans divide
    numbers = {k: range(x.flow, few // span[x.stage], placement.num_flows) for k, x in enumerate(kinds)}
    rows = [[(k, i) for k in order if r in kinds[k].ranks for i in numbers[k]] for r in range(placement.num_ranks)]
    actions = tuple(tuple(Action(*kinds[k][:2], i) for k, i in row) for row in rows)
    graph = build_graph(Schedule("", placement, few, actions))
    for _, action, ops, *_ in graph.unmet:
        raise ScheduleError(
            f"op {action.op} waits for {' or '.join(ops)}, and the schedule has only "
            f"{', '.join(dict.fromkeys(x.op for x in kinds))}: let it wait for one of those (BW stands for B and W)"
        )
    kind_of = [x for row in rows for x in row]
    links: dict[tuple[int, int], int] = {}
    # Of each kind, by boundary (-1: nothing moves), rank, link and seconds: what it makes ready.
    sent: list[dict[tuple[int, int, int, float, float], list[int]]] = [{} for _ in kinds]
    needs = [0] * len(kinds)
    for (k, i), rank, waits in zip(kind_of, graph.rank_of, graph.waits, strict=True):
        needs[k] += len(waits) if i == numbers[k][0] else 0
        for x in waits:
            (source, j), key = kind_of[graph.source(x)], (-1, rank, -1, 0.0, 0.0)
            if j != numbers[source][0]:
                continue
            if x >= len(graph.slots):
                moved = graph.transfers[x - len(graph.slots)]
                link = links.setdefault((moved.src, moved.dst), len(links))
                seconds = (moved.seconds(costs), moved.occupied_s(costs)) if costs else (0.0, 0.0)
                key = (moved.stage, moved.dst, link, *seconds)
            first = i * span[kinds[k].stage] - j * span[kinds[source].stage]
            sent[source].setdefault(key, []).append((k - source) * m + first)
    return Tables(
        num_ranks=placement.num_ranks,
        num_microbatches=m,
        ranks=[x.ranks for x in kinds],
        seconds=[costs.seconds(op_spec(x.op).cost, x.stage) if costs else 1.0 for x in kinds],
        change=[{FORWARD: 1.0, BACKWARD: -1.0}.get(x.op, 0.0) for x in kinds],
        feeds=[tuple(Feed(*key[1:], tuple(gaps)) for key, gaps in sorted(moved.items())) for moved in sent],
        needs=needs,
        num_links=len(links),
        span=[span[x.stage] for x in kinds] if placement.has_spans else (),
    )
