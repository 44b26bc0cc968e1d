"""From planned stages and a target to a :class:`~jaxpipe.schedule.costs.CostProfile`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jaxpipe.planning.roofline import Efficiency
from jaxpipe.planning.stages import OPS, PlannedStage, Sharding
from jaxpipe.planning.targets import Target
from jaxpipe.schedule import CostProfile, HostLink, Link
from jaxpipe.stage.weave.units import UnitCosts

_LEAST_S = 1e-6


def cost_profile(
    stages: Sequence[PlannedStage],
    ranks: int,
    target: Target,
    efficiency: Efficiency,
    sharding: Sharding,
    memory_limit_bytes: float,
) -> CostProfile:
    """Seconds by roofline, bytes from shapes, links of the target. Collectives over ``tp`` are rings; F and B are taken to need
    equally long ones, which they do but for an embedding and a head.

    ``optimizer_bytes`` holds what stays beside the parameters a stage computes with: gradient accumulators, master parameters
    and the two moments of Adam. Boundaries count as the runtime holds them: while an action reads or makes
    them (in ``temp_bytes``, with XLA's workspace) and while they wait (``boundary_buffers``).
    """
    rates = unit_costs(target, efficiency, sharding)

    def exchange_s(stage: PlannedStage, op: str) -> float:
        return sum(rates.collective_s(c.primitive, c.whole_bytes, sharding.tp) for c in stage.collectives[op])

    seconds = {op: tuple(max(_LEAST_S, s.work[op].seconds) for s in stages) for op in OPS}
    gathers = [exchange_s(s, "W") for s in stages]  # of what W recomputes; nothing hides them
    for op in ("W", "BW"):
        seconds[op] = tuple(a + b for a, b in zip(seconds[op], gathers, strict=True))
    host = host_link(target, efficiency, sharding, ranks)
    return CostProfile(
        f_s=seconds["F"],
        b_s=seconds["B"],
        w_s=seconds["W"],
        bw_s=seconds["BW"],
        residual_bytes=tuple(s.residual for s in stages),
        w_residual_bytes=tuple(s.w_residual for s in stages),
        cotangent_bytes=tuple(s.cotangent for s in stages),
        offloadable_bytes=tuple(s.offloadable for s in stages),
        boundary_bytes=tuple(s.boundary for s in stages),
        param_bytes=tuple(s.parameters for s in stages),
        optimizer_bytes=tuple(s.gradients + s.optimizer for s in stages),
        temp_bytes=tuple((op, tuple(s.temp[op] + s.passing[op] for s in stages)) for op in OPS),
        link=Link(target.network_latency_s, target.network_bytes_per_s * efficiency.link),
        links=tuple(_near_links(ranks, target, efficiency, sharding).items()),
        host=host,
        memory_limit_bytes=(memory_limit_bytes,) * ranks,
        boundary_buffers=True,
        tp_comm_s=tuple((exchange_s(s, "F") + exchange_s(s, "B")) / 2 for s in stages),
        tp_collectives=tuple(max(1, len(s.collectives["F"])) for s in stages),
        source=f"roofline of {target.name}, {efficiency.matmul:g} of peak, {efficiency.bandwidth:g} of memory bandwidth",
    )


def host_link(target: Target, efficiency: Efficiency, sharding: Sharding, ranks: int) -> HostLink:
    """What one device gets of the host link. Devices of one rank that share a link copy at once and halve it; devices of
    different ranks take turns (a PCIe group)."""
    sharing = target.gpus_per_host_link
    inside = min(sharing, sharding.tp)
    across = sharing // inside
    groups = (
        [tuple(range(r, min(r + across, ranks))) for r in range(0, ranks, across)] if across > 1 and ranks > 1 else []
    )
    return HostLink(
        d2h_bytes_per_s=target.d2h_bytes_per_s * efficiency.host / inside,
        h2d_bytes_per_s=target.h2d_bytes_per_s * efficiency.host / inside,
        latency_s=target.host_latency_s,
        mode="duplex" if target.host_duplex else "shared",
        groups=tuple(g for g in groups if len(g) > 1),
    )


def _near_links(
    ranks: int, target: Target, efficiency: Efficiency, sharding: Sharding
) -> Mapping[tuple[int, int], Link]:
    """Links between neighbours (cyclically) that sit in one node; ranks fill nodes in order, ``tp`` devices each."""
    near = Link(target.link_latency_s, target.link_bytes_per_s * efficiency.link)
    per_node = max(1, target.node_size // sharding.tp)
    pairs = {
        (a, b)
        for a in range(ranks)
        for b in ((a + 1) % ranks, (a - 1) % ranks)
        if a != b and a // per_node == b // per_node
    }
    return dict.fromkeys(sorted(pairs), near)


def unit_costs(target: Target, efficiency: Efficiency, sharding: Sharding) -> UnitCosts:
    """The target's rates as the cost model of units takes them: NVLink within a node, the network beyond it."""
    inside = sharding.tp <= target.node_size
    rate = target.link_bytes_per_s if inside else target.network_bytes_per_s
    return UnitCosts(
        flops_per_s=target.peak_flops_per_s("bfloat16") * efficiency.matmul,
        bytes_per_s=target.memory_bytes_per_s * efficiency.bandwidth,
        link_bytes_per_s=rate * efficiency.link,
        link_latency_s=target.link_latency_s if inside else target.network_latency_s,
    )
