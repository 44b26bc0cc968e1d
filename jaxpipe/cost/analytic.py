"""Costs from shapes alone: FLOPs of the jaxprs over a rate, exact bytes. No device needed, good enough to choose an order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from jaxpipe.cost.memory import OPS, with_memory
from jaxpipe.schedule import CostProfile, HostLink, Link
from jaxpipe.stage.compiled.footprint import Footprint
from jaxpipe.stage.functions import StageFunction, StageFunctions
from jaxpipe.stage.weave.units import UnitCosts, collectives

DEFAULT_FLOPS_PER_S = 1e11


def analytic_profile(
    stages: Sequence[StageFunctions], *, flops_per_s: float = DEFAULT_FLOPS_PER_S, link: Link | None = None
) -> CostProfile:
    """Costs from FLOP counts: seconds = FLOPs / ``flops_per_s`` (at least a microsecond, for functions without matmuls).

    Tensor-parallel collectives take what they would beside an H100 slowed down to that rate (:class:`UnitCosts`).
    """
    seconds = {op: tuple(max(1e-6, s.flops.get(op, 0) / flops_per_s) for s in stages) for op in OPS}
    slowed = UnitCosts().flops_per_s / flops_per_s
    comm = tuple(slowed * _exchange_s(s) for s in stages)
    return with_bytes(stages, seconds, link=link, source=f"analytic, {flops_per_s:.3g} FLOP/s", tp_comm_s=comm)


def _exchange_s(stage: StageFunctions) -> float:
    """Seconds of the collectives of F on H100s, latencies left out."""
    rates, shards = replace(UnitCosts(), link_latency_s=0.0), stage.layout.shards
    found = collectives(stage.functions["F"].jaxpr) if shards > 1 else ()
    return sum(rates.collective_s(c.primitive, c.whole_bytes, shards) for c in found)


def with_bytes(
    stages: Sequence[StageFunctions],
    seconds: Mapping[str, tuple[float, ...]],
    *,
    source: str,
    link: Link | None = None,
    host: HostLink | None = None,
    footprint_of: Callable[[StageFunction], Footprint] | None = None,
    tp_comm_s: tuple[float, ...] = (),
) -> CostProfile:
    """A profile of these ``seconds`` (by op, an entry a stage) and the bytes that the stages know, workspace included where
    ``footprint_of`` tells it. ``tp_comm_s``: of the tensor-parallel collectives of F, which ``seconds`` leave out."""

    def each(name: str) -> tuple[float, ...]:
        return tuple(float(getattr(s, name)) for s in stages)

    costs = CostProfile(
        f_s=seconds["F"],
        b_s=seconds["B"],
        w_s=seconds["W"],
        bw_s=seconds["BW"],
        residual_bytes=each("residual_bytes"),
        w_residual_bytes=each("w_residual_bytes"),
        cotangent_bytes=each("cotangent_bytes"),
        offloadable_bytes=each("offloadable_bytes"),
        boundary_bytes=each("boundary_bytes"),
        param_bytes=each("param_bytes"),
        link=link if link is not None else Link(),
        host=host if host is not None else HostLink(),
        source=source,
        tp_comm_s=tp_comm_s,
        tp_collectives=tuple(max(1, len(collectives(s.functions["F"].jaxpr))) for s in stages),
    )
    return with_memory(costs, stages, footprint_of)
