"""Every action of a placement as codes of the clock: any DAG of stages, groups of ranks and flows, and ops as their specs say.

What waits for what is read off the :func:`~jaxpipe.schedule.deps.build_graph` of a step with one microbatch a flow. On a group
an op that sends is one joint action, and others run on each rank by themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule.costs import CostProfile
from jaxpipe.schedule.deps import build_graph
from jaxpipe.schedule.ir import Action, Schedule, op_spec, registered_ops
from jaxpipe.schedule.lanes import collectives_exposed
from jaxpipe.schedule.list_schedule.clock import Feed, Tables
from jaxpipe.schedule.placement import Placement

FORWARD, BACKWARD = "F", "BW"


class Kind(NamedTuple):
    """What the actions of one block of codes are: ``op`` of ``stage`` for the microbatches of ``flow``, on ``ranks``."""

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
        """The action that ``code`` stands for."""
        return Action(*self.kinds[code // self.num_microbatches][:2], code % self.num_microbatches)


def _kinds(placement: Placement) -> Iterator[Kind]:
    known = (FORWARD, BACKWARD, *op_spec(BACKWARD).performs())
    specs = [op_spec(FORWARD), op_spec(BACKWARD), *(x for x in registered_ops() if x.required and x.name not in known)]
    for stage in placement.topological_order():
        for spec in specs:
            for k, flow in enumerate(placement.flows):
                groups = [flow[stage]] if spec.sends != "none" else [(r,) for r in flow[stage]]
                yield from (Kind(spec.name, stage, k, ranks) for ranks in groups)


def _tables(placement: Placement, m: int, kinds: Sequence[Kind], costs: CostProfile | None) -> Tables:
    if costs is not None and costs.num_stages != placement.num_stages:
        raise ScheduleError(f"the costs are for {costs.num_stages} stages and the placement has {placement.num_stages}")
    costs = costs and collectives_exposed(costs)
    # Host lanes first: there a slot would wait for the compute slot that stands before it.
    here = sorted(range(len(kinds)), key=lambda k: op_spec(kinds[k].op).lane == "compute")
    rows = [[k for k in here if r in kinds[k].ranks] for r in range(placement.num_ranks)]
    actions = tuple(tuple(Action(*kinds[k][:3]) for k in row) for row in rows)
    graph = build_graph(Schedule("", placement, placement.num_flows, actions))
    for _, action, wanted, _ in graph.unmet:
        raise ScheduleError(
            f"op {action.op} waits for {' or '.join(wanted)}, and the schedule has only "
            f"{', '.join(dict.fromkeys(x.op for x in kinds))}: let it wait for one of those (BW stands for B and W)"
        )
    kind_of = [k for row in rows for k in row]
    links: dict[tuple[int, int], int] = {}
    # Of each kind, by boundary (-1: nothing moves), rank, link and seconds: what it makes ready.
    sent: list[dict[tuple[int, int, int, float], list[int]]] = [{} for _ in kinds]
    needs = [0] * len(kinds)
    for k, rank, waits in zip(kind_of, graph.rank_of, graph.waits, strict=True):
        needs[k] += len(waits)
        for x in waits:
            made, key = kind_of[graph.source(x)], (-1, rank, -1, 0.0)
            if x >= len(graph.slots):
                _, _, src, dst, stage = graph.transfers[x - len(graph.slots)]
                link = links.setdefault((src, dst), len(links))
                key = (stage, dst, link, costs.transfer_s(src, dst, stage) if costs else 0.0)
            sent[made].setdefault(key, []).append((k - made) * m)
    return Tables(
        num_ranks=placement.num_ranks,
        num_microbatches=m,
        ranks=[x.ranks for x in kinds],
        seconds=[costs.seconds(op_spec(x.op).cost, x.stage) if costs else 1.0 for x in kinds],
        change=[{FORWARD: 1.0, BACKWARD: -1.0}.get(x.op, 0.0) for x in kinds],
        feeds=[tuple(Feed(*key[1:], tuple(gaps)) for key, gaps in sorted(moved.items())) for moved in sent],
        needs=needs,
        num_links=len(links),
    )
