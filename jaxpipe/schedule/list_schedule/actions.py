"""Every action of a placement as codes of the clock: any DAG of stages, groups of ranks and flows, and ops as their specs say.

The readings are those of :mod:`~jaxpipe.schedule.deps`: one transfer per producing action, destination rank and boundary; a
consumer in its producer's group reads its own rank's copy, others receive from the group's first rank; on a group an op that
sends is one joint action, and others run on each rank by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule.costs import CostProfile
from jaxpipe.schedule.deps import boundary_moved
from jaxpipe.schedule.ir import Action, OpSpec, Wait, op_spec, registered_ops
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
    """``kinds[code // num_microbatches]`` says what a code is; ``tables`` is what the clock looks up."""

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
        costs = None if costs is None else collectives_exposed(costs)
        if costs is not None and costs.num_stages != placement.num_stages:
            raise ScheduleError(
                f"the costs are for {costs.num_stages} stages and the placement has {placement.num_stages}"
            )
        both = op_spec(BACKWARD).performs()
        specs = [op_spec(FORWARD), op_spec(BACKWARD)]
        specs += [x for x in registered_ops() if x.required and x.name not in (FORWARD, *both)]
        kinds = tuple(
            Kind(spec.name, stage, k, ranks)
            for spec in specs
            for k, flow in enumerate(placement.flows)
            for stage, group in enumerate(flow)
            for ranks in ([group] if spec.sends != "none" else [(r,) for r in group])
        )
        return cls(placement, num_microbatches, kinds, _tables(placement, num_microbatches, kinds, specs, costs))

    def action(self, code: int) -> Action:
        """The action that ``code`` stands for."""
        kind = self.kinds[code // self.num_microbatches]
        return Action(kind.op, kind.stage, code % self.num_microbatches)


def _tables(
    placement: Placement, m: int, kinds: Sequence[Kind], specs: Sequence[OpSpec], costs: CostProfile | None
) -> Tables:
    spec_of = {spec.name: spec for spec in specs}
    where = {(x.op, x.flow, x.stage, rank): k for k, x in enumerate(kinds) for rank in x.ranks}
    sent: list[dict[tuple[int, int], list[int]]] = [{} for _ in kinds]  # by boundary (-1: nothing moves) and rank
    needs = [0] * len(kinds)
    for k, (op, stage, flow, ranks) in enumerate(kinds):
        for wait in spec_of[op].waits:
            used = _source(spec_of[op], wait, spec_of)
            if used is None:
                continue
            targets: tuple[int, ...] = (stage,)
            if wait.where != "self":
                targets = (placement.predecessors if wait.where == "pred" else placement.successors)(stage)
            for target in targets:
                boundary = boundary_moved(used, wait, stage, target)
                for rank in ranks:
                    own = where.get((used.name, flow, target, rank))
                    made = where[used.name, flow, target, placement.flows[flow][target][0]] if own is None else own
                    key = (-1 if own is not None or boundary is None else boundary, rank)
                    sent[made].setdefault(key, []).append((k - made) * m)
                    needs[k] += 1
    links: dict[tuple[int, int], int] = {}
    feeds: list[list[Feed]] = []
    for kind, moved in zip(kinds, sent, strict=True):
        feeds.append([])
        for (boundary, rank), gaps in sorted(moved.items()):
            source, link, seconds = kind.ranks[0], -1, 0.0
            if boundary >= 0:
                link = links.setdefault((source, rank), len(links))
                seconds = costs.transfer_s(source, rank, boundary) if costs else 0.0
            feeds[-1].append(Feed(rank, link, seconds, tuple(gaps)))
    return Tables(
        num_ranks=placement.num_ranks,
        num_microbatches=m,
        ranks=[x.ranks for x in kinds],
        seconds=[costs.seconds(spec_of[x.op].cost, x.stage) if costs else 1.0 for x in kinds],
        change=[{FORWARD: 1.0, BACKWARD: -1.0}.get(x.op, 0.0) for x in kinds],
        feeds=[tuple(x) for x in feeds],
        needs=needs,
        num_links=len(links),
    )


def _source(spec: OpSpec, wait: Wait, used: dict[str, OpSpec]) -> OpSpec | None:
    """The op that satisfies ``wait``; None where it is optional and there is none."""
    found = next((used[op] for op in wait.ops if op in used), None)
    if found is None and not wait.optional:
        raise ScheduleError(
            f"op {spec.name} waits for {' or '.join(wait.ops)}, and the schedule has only {', '.join(used)}: let it wait "
            "for one of those (BW stands for B and W)"
        )
    return found
