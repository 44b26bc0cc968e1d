"""Every rank of a placement under its memory limit: what it does and holds, handed to the arguments about one rank."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from jaxpipe.schedule.tolerance import how_many
from jaxpipe.search.bounds.flows import Flows, FlowTimes, Visit
from jaxpipe.search.bounds.memory import ChainTimes, Confined, StageWork, chunk_turns, confine, meet, releases

_TOP_RANKS = 1
"""From how many ranks down the crossing argument is made: those where the limit costs most."""


def confine_ranks(flows: Flows, limits: Sequence[float] | None, offload: bool) -> list[Confined]:
    """Return, per rank, bounds on its own span and on the time to its last B. Without limits, its work."""
    p = flows.placement.num_ranks
    residents_of = [residents(flows, rank) for rank in range(p)]
    if limits is None:
        return [confine(stays, inf, offload) for stays in residents_of]
    bounds = [confine(stays, limit, offload) for stays, limit in zip(residents_of, limits, strict=True)]
    # a microbatch on its way may be on the host, so with offload its chunks need not take turns
    if not offload:
        turns = (chunk_turns(stays, limit) for stays, limit in zip(residents_of, limits, strict=True))
        bounds = [bound.or_longer(turn) for bound, turn in zip(bounds, turns, strict=True)]
    if flows.placement.num_flows == 1 and flows.placement.num_stages == p > 1 and not offload:
        # the crossing argument is for one flow and one stage per rank
        stage_of = {group[0]: s for s, group in enumerate(flows.all[0].groups)}
        costly = sorted(range(p), key=lambda r: -_slowness(residents_of[r][0], limits[r]))
        for rank in costly[:_TOP_RANKS]:
            if bounds[rank].own < inf:
                top = residents_of[rank][0]
                run = _run(flows.all[0], stage_of[rank], top)
                bounds[rank] = bounds[rank].or_longer(meet(run, top, limits[rank], releases(top, limits[rank])))
    return bounds


def _slowness(top: StageWork, limit: float) -> float:
    lanes = how_many(top.held, limit) if top.held > 0 else top.count
    return top.trip_s / max(1, lanes)


def _run(flow: FlowTimes, stage: int, top: StageWork) -> ChainTimes:
    stages = range(stage, len(flow.groups))
    return ChainTimes(
        f_s=[flow.forward[s] for s in stages],
        b_s=[flow.passed[s] for s in stages],
        down_s=[flow.hop(s, s + 1, s) for s in stages[:-1]],
        up_s=[flow.hop(s + 1, s, s) for s in stages[:-1]],
        release_s=top.w_s,
    )


def residents(flows: Flows, rank: int) -> list[StageWork]:
    """Return what ``rank`` does and holds, flow by flow, stages ascending."""
    visits, stays = flows.chunks(rank), []
    for number, flow in enumerate(flows.all):
        mine = [v for v in visits if v.flow is flow]
        share = sum(flows.costs.residual_bytes[v.stage] for v in mine)
        start = min((flow.head[v.stage] for v in mine), default=0.0)
        stays += [_resident(flows, v, number, share, start) for v in mine]
    return stays


def _resident(flows: Flows, v: Visit, number: int, share: float, start: float) -> StageWork:
    """``share``: residuals of all visits of the same flow on the same rank; ``start``: the first of them at its earliest."""
    flow, s, costs = v.flow, v.stage, flows.costs
    d2h, h2d = costs.offload_s[s], costs.load_s[s]
    return StageWork(
        flow=number,
        count=v.count,
        f_s=flow.forward[s],
        b_s=flow.passed[s],
        back_s=flow.backward[s],
        trip_s=flow.round_trip[s],
        in_s=flow.head[s] - start,
        out_s=flow.back_start[s] - start,
        held=costs.residual_bytes[s] / share if share > 0 else 0.0,
        kept=costs.w_residual_bytes[s] / share if share > 0 else 0.0,
        leaves=min(costs.residual_bytes[s], costs.offloadable_bytes[s]) / share if share > 0 else 0.0,
        d2h_s=d2h,
        h2d_s=h2d,
        together_s=d2h + h2d if costs.host.mode == "shared" else (d2h + h2d) / 2,
    )
