"""Cost planned stages on a target: seconds by roofline and link rates, as a :class:`~jaxpipe.schedule.costs.CostProfile`."""

from __future__ import annotations

import math
from collections.abc import Sequence

from jaxpipe.cost.profile import cost_profile
from jaxpipe.cost.seconds import LEAST_S, ops_of
from jaxpipe.planning.roofline import Efficiency, Work
from jaxpipe.planning.stages import PlannedStage
from jaxpipe.planning.targets import Target
from jaxpipe.schedule import CostProfile, HostLink, Link
from jaxpipe.stage.weave.units import UnitCosts
from jaxpipe.train.settings.sections import PipelineConfig


def planned_costs(
    stages: Sequence[PlannedStage], pipe: PipelineConfig, target: Target, efficiency: Efficiency, limit_bytes: float
) -> CostProfile:
    """Return the cost profile of planned stages: seconds by roofline, bytes from shapes, links of the target.
    ``limit_bytes``: what arrays may fill on a device. Collectives over ``tp`` and ``cp`` are rings; F and B are taken to
    need equally long ones, which they do but for an embedding and a head. ``optimizer_bytes``: gradient accumulators,
    master parameters and optimizer state."""
    sizes, rates = [s.sizes for s in stages], unit_costs(target, efficiency, pipe.tp * pipe.cp)
    f, b, w = ([x.exchange_s(op, rates) for x in sizes] for op in ("F", "B", "W"))
    work = {op: [s.work.get(op, Work()) for s in stages] for op in ops_of([s.functions for s in stages])}
    seconds = {op: [max(LEAST_S, x.seconds) for x in row] for op, row in work.items()}
    for op in ("W", "BW"):  # gathers of what W recomputes: nothing hides them
        seconds[op] = [x + gathers for x, gathers in zip(seconds[op], w, strict=True)]
    return cost_profile(
        sizes,
        seconds,
        workspace={op: [s.workspace.get(op, 0.0) for s in stages] for op in work},
        state_bytes=[s.state_bytes / (pipe.dp if pipe.sharding.zero1 else 1) for s in stages],
        link=link_of(target, efficiency),
        links=near_links(target, efficiency, pipe),
        host=host_link(target, efficiency, pipe),
        memory_limit_bytes=(limit_bytes,) * pipe.ranks,
        tp_comm_s=tuple((x + y) / 2 for x, y in zip(f, b, strict=True)),
        source=f"roofline of {target.name}, {efficiency.matmul:g} of peak, {efficiency.bandwidth:g} of memory bandwidth",
    )


def host_link(target: Target, efficiency: Efficiency, pipe: PipelineConfig) -> HostLink:
    """Return the share of the host link that one device gets. Devices of one rank that share a link copy at once and halve
    it; devices of different ranks take turns (a PCIe group)."""
    inside = min(target.gpus_per_host_link, pipe.tp * pipe.cp)
    across = target.gpus_per_host_link // inside
    groups = [tuple(range(r, min(r + across, pipe.ranks))) for r in range(0, pipe.ranks, across)]
    return HostLink(
        d2h_bytes_per_s=target.d2h_bytes_per_s * efficiency.host / inside,
        h2d_bytes_per_s=target.h2d_bytes_per_s * efficiency.host / inside,
        latency_s=target.host_latency_s,
        mode="duplex" if target.host_duplex else "shared",
        groups=tuple(g for g in groups if len(g) > 1),
    )


def link_of(target: Target, efficiency: Efficiency, devices: float = math.inf) -> Link:
    """Return the link between so many neighbouring devices: NVLink where they fit into a node, else the network."""
    inside = devices <= target.node_size
    latency_s = target.link_latency_s if inside else target.network_latency_s
    return Link(latency_s, (target.link_bytes_per_s if inside else target.network_bytes_per_s) * efficiency.link)


def near_links(
    target: Target, efficiency: Efficiency, pipe: PipelineConfig
) -> tuple[tuple[tuple[int, int], Link], ...]:
    """Return the links between cyclic neighbours that lie in one node."""
    near = link_of(target, efficiency, 1)
    pairs = {(a, (a + step) % pipe.ranks) for a in range(pipe.ranks) for step in (1, -1)}
    return tuple(
        ((a, b), near) for a, b in sorted(pairs) if a != b and link_between(a, b, target, efficiency, pipe) == near
    )


def link_between(a: int, b: int, target: Target, efficiency: Efficiency, pipe: PipelineConfig) -> Link:
    """Return the link between devices of two ranks; ranks fill nodes in order."""
    per_node = max(1, target.node_size // pipe.rank_devices)
    return link_of(target, efficiency, 1 if a // per_node == b // per_node else math.inf)


def unit_costs(target: Target, efficiency: Efficiency, devices: int) -> UnitCosts:
    """Return the target's rates as the cost model of units takes them; ``devices``: that collectives go between."""
    link = link_of(target, efficiency, devices)
    return UnitCosts(
        flops_per_s=target.peak_flops_per_s("bfloat16") * efficiency.matmul,
        bytes_per_s=target.memory_bytes_per_s * efficiency.bandwidth,
        link_bytes_per_s=link.bytes_per_s,
        link_latency_s=link.latency_s,
    )
