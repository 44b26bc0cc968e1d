"""Predict a config on a target: memory per rank by kind, step time, MFU, bubble, offload.

Assumed: AdamW with float32 moments; float32 master parameters and gradient accumulators beside parameters in the compute dtype
(with float32 compute there are no separate masters): 18 bytes a parameter in bfloat16, 16 in float32, as the runtime keeps
them and as Megatron-LM does. Batch arrays, keys and losses are left out
(megabytes). The update reads and writes its state once at the memory's bandwidth. Gradients are reduced over dp once a step, by
a ring: those of a stage behind its last W (R, :mod:`~jaxpipe.schedule.passes.reductions`), on the compute lane, as the runtime
does; with several flows after the pipeline. With ZeRO-1 parameters are gathered at the end of the update. With
post-validation, which is taken to be right always, a step takes the longest span of a rank
(:mod:`jaxpipe.schedule.simulate`), the update reads its state once more, and parameters in float32 exist twice.

*Experts.* Buffers are static, so memory is exact, and exchanges and padded products take as long as the rows that they have
room for, ragged products as the rows that come. ``Efficiency.imbalance`` beyond that lengthens all of them, as buffers for it
would. Which of a device's rows go over NVLink and which over the network is as even choices have it.

MFU counts the products of the forward three times (forward and backward, recomputation not), as Narayanan et al. 2021 do,
over the step and the dense peak of the compute dtype; of experts those of the rows that are sent to them, not of their buffers.

The file begins with the costs of stages on a target, and goes on with the prediction.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from jaxpipe.axes import BUFFER_AXES, DATA, ROWS, BufferKind
from jaxpipe.cost.memory import Kind, RankMemory
from jaxpipe.cost.profile import Exchange, StageSizes, cost_profile
from jaxpipe.cost.seconds import LEAST_S, ops_of
from jaxpipe.planning.roofline import Efficiency, Work
from jaxpipe.planning.stages import PlannedStage, StageCosts, planner
from jaxpipe.planning.targets import Target
from jaxpipe.schedule import CostProfile, HostLink, Link, MemoryCurve, Placement, Schedule, Timeline, op_spec
from jaxpipe.schedule.costs import PER_STAGE_FIELDS, k_of
from jaxpipe.schedule.deps import DependencyGraph
from jaxpipe.schedule.ir import HOST_LANES
from jaxpipe.schedule.memory import memory_curves, offloaded_share
from jaxpipe.schedule.passes import with_reductions
from jaxpipe.schedule.simulate import runnable, simulate_graph
from jaxpipe.stage.compiled.recompute_report import remarks
from jaxpipe.stage.identity import ById
from jaxpipe.stage.jaxprs import PEERS, row_of
from jaxpipe.stage.model.params import routed_flops
from jaxpipe.stage.model.plan import StagePlan, analytic_layer_costs
from jaxpipe.stage.weave.units import UnitCosts
from jaxpipe.train.assemble import Planner, choose, planned_order
from jaxpipe.train.config import TrainConfig
from jaxpipe.train.settings.sections import PipelineConfig


def planned_costs(
    stages: Sequence[PlannedStage],
    pipe: PipelineConfig,
    target: Target,
    efficiency: Efficiency,
    limit_bytes: float,
    experts: ExpertRows | None = None,
) -> CostProfile:
    """Return the cost profile of planned stages: seconds by roofline, bytes from shapes, links of the target.
    ``limit_bytes``: what arrays may fill on a device. ``experts``: their rows. ``optimizer_bytes``: gradient accumulators,
    master parameters and optimizer state."""
    sizes = [s.sizes for s in stages]
    uneven = 1.0 if experts is None else efficiency.imbalance / experts.room
    more_rows = max(1.0, uneven) if experts is None or not experts.is_ragged else uneven
    seconds_of = collective_seconds(target, efficiency, experts)
    f, b, w = ([x.exchange_s(op, seconds_of) for x in sizes] for op in ("F", "B", "W"))
    work = {op: [s.work.get(op, Work()) for s in stages] for op in ops_of([s.functions for s in stages])}
    seconds = {op: [max(LEAST_S, x.seconds + (more_rows - 1) * x.expert_s) for x in row] for op, row in work.items()}
    # braids can hide the collectives of F and B, which have fields of their own; nothing hides the gathers of what W recomputes
    for op in ("W", "BW"):
        seconds[op] = [x + gathers for x, gathers in zip(seconds[op], w, strict=True)]
    return cost_profile(
        sizes,
        seconds,
        workspace={op: [s.workspace.get(op, 0.0) for s in stages] for op in work},
        state_bytes=[sum(n / _zero_parts(pipe, kind) for kind, n in s.state_bytes.items()) for s in stages],
        link=link_of(target, efficiency),
        links=near_links(target, efficiency, pipe),
        host=host_link(target, efficiency, pipe),
        memory_limit_bytes=(limit_bytes,) * pipe.ranks,
        f_comm_s=tuple(f),
        b_comm_s=tuple(b),
        reduce_s=tuple(reduction_s(x, target, efficiency, pipe) for x in sizes),
        gather_s=tuple(gather_s(x, target, efficiency, pipe) for x in sizes),
        net_overlaps=False,
        source=f"roofline of {target.name}, {efficiency.matmul_of(target):g} of peak, "
        f"{efficiency.bandwidth:g} of memory bandwidth",
    )


class ExpertRows(NamedTuple):
    """The rows that a device receives for its experts, a layer and microbatch: each position goes to ``top_k`` of
    ``num_experts``. ``mean``: of all devices; ``worst``: if every position wants as many of one device's experts as it may;
    ``room``: the rows of buffers, in means. ``is_ragged``: products leave out the empty ones."""

    num_experts: int
    top_k: int
    mean: float
    worst: float
    row_bytes: int
    room: float
    is_ragged: bool


def expert_rows(stage_costs: StageCosts, stages: Sequence[PlannedStage], config: TrainConfig) -> ExpertRows | None:
    """Return the rows that these stages' experts get in a run of ``config``; None without experts."""
    mesh, received = config.pipeline.mesh, list[ExpertRows]()
    positions, parts = config.microbatch_size * config.data.seq_len / mesh.num_devices, mesh.parts("experts")
    room = sum(s.work["F"].expert_flops for s in stages) / max(positions * routed_flops(stage_costs.experts), 1)
    for leaf, k in stage_costs.experts:
        count, width, *_ = leaf.shape
        worst = parts * positions * min(k, count // parts)
        row_bytes, is_ragged = width * leaf.dtype.itemsize, any(s.is_ragged for s in stages)
        received.append(ExpertRows(count, k, positions * k, worst, row_bytes, room, is_ragged))
    return max(received, key=lambda rows: rows.worst, default=None)


def host_link(target: Target, efficiency: Efficiency, pipe: PipelineConfig) -> HostLink:
    """Return the share of the host link that one device gets. Devices of one rank that share a link copy at once and halve
    it; devices of different ranks take turns (a PCIe group)."""
    inside = min(target.gpus_per_host_link, pipe.mesh.one_row.num_devices)
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
    per_node = max(1, target.node_size // pipe.mesh.num_devices)
    return link_of(target, efficiency, 1 if a // per_node == b // per_node else math.inf)


def collective_seconds(
    target: Target, efficiency: Efficiency, experts: ExpertRows | None
) -> Callable[[Exchange], float]:
    """Return what gives the seconds of a collective of layers; those of experts take longer where choices are uneven."""
    crowded = 1.0 if experts is None else max(1.0, efficiency.imbalance / experts.room)
    return lambda exchange: exchange_s(target, efficiency, exchange) * (crowded if exchange.of_experts else 1)


def comm_by_axes(
    stages: Sequence[PlannedStage], seconds_of: Callable[[Exchange], float]
) -> dict[str, tuple[float, float]]:
    """Return the seconds of the collectives of F and of B for a microbatch by the axes that they are over, such as ``ep``, each
    on the stage where that is most."""
    names = {"×".join(x.axes): x.axes for s in stages for op in "FB" for x in s.sizes.exchanges.get(op, {})}

    def longest(op: str, axes: tuple[str, ...]) -> float:
        return max(s.sizes.exchange_s(op, lambda x: seconds_of(x) if x.axes == axes else 0.0) for s in stages)

    return {name: (longest("F", axes), longest("B", axes)) for name, axes in sorted(names.items())}


def exchange_s(target: Target, efficiency: Efficiency, exchange: Exchange) -> float:
    """Return the seconds of a collective of layers: a ring over the slowest link between its devices. In an all-to-all each
    device sends to every other one: to those of its node over the links inside, and at the same time to the others."""
    name, whole_bytes, devices, span, *_ = exchange

    def over(link: Link, sent_bytes: float, parts: float) -> float:
        rates = UnitCosts(link_bytes_per_s=link.bytes_per_s, link_latency_s=link.latency_s)
        return rates.collective_s(name, sent_bytes, parts)

    slowest, nodes = link_of(target, efficiency, span), min(devices, math.ceil(span / target.node_size))
    if nodes == 1 or row_of(name).exchange != "all-to-all":
        return over(slowest, whole_bytes, devices)
    # n nodes: of all bytes (n - 1) / n leave, and the n-th part is exchanged inside
    inside_s = over(link_of(target, efficiency, 1), whole_bytes / nodes, devices / nodes)
    return max(inside_s, over(slowest, whole_bytes, nodes))


@dataclass(frozen=True, slots=True)
class Prediction:
    """The prediction for one config on ``target``. ``timeline``: of ``schedule`` with its reductions.

    ``memory``: one device of each rank at its peak, by kind; ``residuals`` are what F keeps for B and W, and B for W.
    ``activation_bytes``: per rank, the most that residuals and boundaries take at any time. ``limit_bytes``: what arrays may
    fill on a device. ``fused_attention``: whether any stage runs cuDNN's kernel. ``remarks``: lines about stages, such as a
    recompute policy that finds nothing to do. ``update_s``: seconds of the update as configured; ``late_update_s``: with
    post-validation. ``model_flops``: three times the products of the forward, of attention what the mask leaves where a kernel
    computes it, of experts the rows that they are sent; ``peers_flops``: with attention counted whole
    (:data:`~jaxpipe.stage.jaxprs.PEERS`). ``active_params``: of ``num_params`` those that a position meets. ``comm_s``:
    as :func:`comm_by_axes`.
    """

    config: TrainConfig
    target: Target
    schedule: Schedule
    costs: CostProfile
    timeline: Timeline
    memory: tuple[RankMemory, ...]
    activation_bytes: tuple[float, ...]
    limit_bytes: float
    update_s: float
    late_update_s: float
    model_flops: float
    peers_flops: float
    num_params: int
    active_params: int
    experts: ExpertRows | None
    comm_s: Mapping[str, tuple[float, float]]
    fused_attention: bool
    remarks: tuple[str, ...] = ()

    @property
    def step_s(self) -> float:
        return pipeline_s(self.timeline, self.config.pipeline) + self.update_s

    @property
    def late_step_s(self) -> float:
        """Seconds of a step with post-validation."""
        return self.timeline.max_span + self.late_update_s

    @property
    def tokens_per_s(self) -> float:
        return self.config.run.batch * self.config.data.seq_len / self.step_s

    @property
    def tokens_per_s_per_device(self) -> float:
        return self.tokens_per_s / self.devices

    @property
    def devices(self) -> int:
        return self.config.pipeline.num_devices

    @property
    def mfu(self) -> float:
        return self.model_flops / (self.step_s * self.devices * self.target.peak_flops_per_s(self.config.run.dtype))

    @property
    def peers_mfu(self) -> float:
        """The MFU by the formula that Megatron-LM and torchtitan publish."""
        return self.mfu * self.peers_flops / self.model_flops

    @property
    def k(self) -> float:
        """Seconds of a round trip of all residuals ÷ seconds of compute."""
        return k_of(self.costs)

    @property
    def offloaded(self) -> float:
        """Share of residual bytes that is copied to the host."""
        return offloaded_share(self.schedule, self.costs)

    @property
    def offload_bytes(self) -> tuple[float, ...]:
        """Bytes that each rank copies to the host in a step."""
        rows = (self.schedule.actions(rank) for rank in range(self.schedule.num_ranks))
        return tuple(
            sum(self.costs.offloadable_bytes[a.stage] for a in row if op_spec(a.op).lane == "d2h") for row in rows
        )

    @property
    def worst(self) -> RankMemory:
        return max(self.memory, key=lambda m: m.peak_bytes)

    @property
    def fits(self) -> bool:
        return self.worst.peak_bytes <= self.limit_bytes


@dataclass(frozen=True, slots=True)
class PricedPlan:
    """A cut of the model with the prices of its stages, whatever the order of actions. ``custom_ops``: ops that a user
    registered with a cost of their own, which is taken as no time."""

    plan: StagePlan
    stages: tuple[PlannedStage, ...]
    costs: CostProfile
    custom_ops: tuple[str, ...] = ()
    experts: ExpertRows | None = None

    def update_s(
        self, config: TrainConfig, stage_costs: StageCosts, placement: Placement, held_bytes: Sequence[float]
    ) -> tuple[float, float]:
        """Return the seconds of a step after its pipeline, as ``config`` says and with post-validation: gradients of several
        flows are reduced, also to the rank that owns the stage, parameters are updated, gathered, and sent to the other ranks
        of such a stage. ``held_bytes``: parameters and optimizer state of each rank."""
        gradients = [
            sum(self.stages[s].sizes.acc_bytes for s in placement.stages_of(r)) for r in range(placement.num_ranks)
        ]
        twice = gradients if _keeps_old_params(config) else [0.0] * placement.num_ranks
        static = max(n - m for n, m in zip(held_bytes, twice, strict=True))
        bytes_per_s = stage_costs.target.memory_bytes_per_s * stage_costs.efficiency.bandwidth
        net_s = self.costs.gather_s
        if placement.num_flows > 1:
            net_s = tuple(map(sum, zip(self.costs.reduce_s, net_s, strict=True)))
        longest_s = max(sum(net_s[s] for s in placement.stages_of(r)) for r in range(placement.num_ranks))
        replicas_s = self._replicas_s(config, stage_costs, placement)
        # each static byte is read and written once; the late commit of post-validation reads it a second time
        plain_s, late_s = (passes * static / bytes_per_s + longest_s + replicas_s for passes in (2, 3))
        return plain_s if config.pipeline.passes.post_validation == "off" else late_s, late_s

    def _replicas_s(self, config: TrainConfig, stage_costs: StageCosts, placement: Placement) -> float:
        """Return the longest exchange between two ranks that hold the same stages: gradients there, parameters back."""
        gradients, parameters = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
        for s, (primary, *replicas) in enumerate(zip(*placement.flows, strict=True)):
            for rank in {rank for group in replicas for rank in group if rank not in primary}:
                gradients[(rank, primary[0])] += round(self.stages[s].sizes.acc_bytes)
                parameters[(primary[0], rank)] += round(self.costs.param_bytes[s])

        def seconds(a: int, b: int, n: int) -> float:
            return link_between(a, b, stage_costs.target, stage_costs.efficiency, config.pipeline).seconds(n)

        ways = (gradients, parameters)
        return sum(max((seconds(*pair, n) for pair, n in way.items()), default=0.0) for way in ways)


def price_plan(
    config: TrainConfig,
    stage_costs: StageCosts,
    plan: StagePlan,
    limit_bytes: float,
    ops: Collection[str] = (),
    compile_stages: bool = False,
) -> PricedPlan:
    """Price the stages of ``plan``. ``ops``: that schedules will run; ``stage_costs``, ``compile_stages``: as :func:`predict`.

    Raises:
        StageError: a stage can't be traced or split, or no such policy.
    """
    assert stage_costs.is_for(config.pipeline), "stage costs of other shards, or of other vocabulary layers"
    pipe, size = config.pipeline, config.microbatch_size // config.pipeline.dp
    stages = stage_costs.stages(plan.cut, pipe.recompute, size, pipe.offload.fraction)
    stages = stage_costs.compiled(stages, ops if compile_stages else ())
    experts = expert_rows(stage_costs, stages, config)
    costs = planned_costs(stages, pipe, stage_costs.target, stage_costs.efficiency, limit_bytes, experts)
    if _keeps_old_params(config):
        twice = [n + s.sizes.acc_bytes for n, s in zip(costs.optimizer_bytes, stages, strict=True)]
        costs = replace(costs, optimizer_bytes=tuple(twice))
    custom_ops = sorted(op for op in ops if op_spec(op).cost not in ("", *PER_STAGE_FIELDS))
    for op in custom_ops:
        costs = costs.with_values(op_spec(op).cost, (0.0,) * costs.num_stages)
    return PricedPlan(plan, stages, costs, tuple(custom_ops), experts)


def predict(
    config: TrainConfig,
    stage_costs: StageCosts,
    limit_bytes: float,
    transform: Callable[[Schedule, CostProfile], Schedule] | None = None,
    compile_stages: bool = False,
    planned: Planner | None = None,
) -> Prediction:
    """Predict ``config`` with its own schedule, or with ``transform`` of it. ``stage_costs``: of its model, with vocabulary
    layers where it puts them (:meth:`~jaxpipe.planning.stages.StageCosts.over`). ``compile_stages``: compile what the schedule
    uses, as far as ``stage_costs`` can, to know its workspace; earlier compilations are used in any case.
    ``planned``: the config's planner, if the caller has one.

    Raises:
        ScheduleError, StageError, ConfigError: the config's schedule, cut or policy can't be.
    """
    pipe = config.pipeline
    planned = planned or planner(config, stage_costs.model)
    draft, plan = choose(pipe, stage_costs.model, planned)
    ops = {a.op for a in draft.schedule.actions()}
    ops |= {"B", "W"} if pipe.passes.separate_gradients else set()
    priced_plan = price_plan(config, stage_costs, plan, limit_bytes, ops, compile_stages)
    stages, costs = priced_plan.stages, priced_plan.costs
    schedule = planned_order(pipe, draft, costs)
    if transform is not None:
        schedule = transform(schedule, costs)
    graph = runnable(reduced_in_time(schedule, costs))
    timeline = simulate_graph(graph, costs)
    memory, activations = _memory(graph, timeline, stages, costs)
    update_s, late_update_s = priced_plan.update_s(config, stage_costs, schedule.placement, timeline.static_bytes)
    detached = schedule.placement.detached  # their F makes a part of the backward; W is one product, as the forward is
    forward = [s.work["W" if k in detached else "F"] for k, s in enumerate(stages)]
    # of experts' buffers the mean of the rows is work of the model
    experts = priced_plan.experts
    idle = 0.0 if experts is None else sum(x.expert_flops for x in forward) * (1 - 1 / experts.room)
    passes = 3 * pipe.microbatches
    flops = passes * pipe.mesh.num_devices * (sum(x.flops for x in forward) - idle)
    # on one device no buffer of ragged products is larger than what comes
    idle_alone = 0.0 if experts is None or experts.is_ragged else idle * pipe.mesh.num_devices
    peers_flops = passes * (_peers_flops(ById(stage_costs.model.stored), config.microbatch_size) - idle_alone)
    fuses_attention = any(s.fuses_attention for s in stages)
    num_params = sum(s.num_params for s in priced_plan.plan.stages)
    return Prediction(
        config=config,
        target=stage_costs.target,
        schedule=schedule,
        costs=costs,
        timeline=timeline,
        memory=memory,
        activation_bytes=activations,
        limit_bytes=limit_bytes,
        update_s=update_s,
        late_update_s=late_update_s,
        model_flops=flops,
        peers_flops=peers_flops if fuses_attention else flops,
        num_params=num_params,
        active_params=num_params - round(sum((1 - k / leaf.shape[0]) * leaf.size for leaf, k in stage_costs.experts)),
        experts=experts,
        comm_s=comm_by_axes(stages, collective_seconds(stage_costs.target, stage_costs.efficiency, experts)),
        fused_attention=fuses_attention,
        remarks=(
            *remarks([s.functions for s in stages]),
            *(f"{op}, an op of your own, takes no time" for op in priced_plan.custom_ops),
        ),
    )


@lru_cache(maxsize=16)
def _peers_flops(model: ById, microbatch_size: int) -> float:
    return sum(analytic_layer_costs(model.value, microbatch_size, attention=PEERS))


def _keeps_old_params(config: TrainConfig) -> bool:
    """Return whether old and new parameters coexist during the update."""
    return config.pipeline.passes.post_validation != "off" and config.run.dtype == "float32"


def reduced_in_time(schedule: Schedule, costs: CostProfile) -> Schedule:
    """Return ``schedule`` with the reductions that the runtime dispatches before the pipeline has ended."""
    return with_reductions(schedule) if any(costs.reduce_s) and schedule.placement.num_flows == 1 else schedule


def pipeline_s(timeline: Timeline, pipe: PipelineConfig) -> float:
    """Return the seconds of a step's pipeline in a steady state of consecutive steps."""
    return timeline.makespan if pipe.passes.post_validation == "off" else timeline.max_span


def _memory(
    graph: DependencyGraph, timeline: Timeline, stages: Sequence[PlannedStage], costs: CostProfile
) -> tuple[tuple[RankMemory, ...], tuple[float, ...]]:
    """Return each rank's memory at its peak, and the peak of residuals and boundaries."""
    # a curve adds all kinds up: curves of the same events without workspace, and then without boundaries, tell them apart
    passing = tuple(
        (op, tuple(n - s.workspace.get(op, 0.0) for n, s in zip(row, stages, strict=True)))
        for op, row in costs.temp_bytes
    )
    events = {(e.rank, e.action): e for e in timeline.events if e.lane not in ("send", "tp")}
    slots = [events[graph.rank_of[n], slot] for n, slot in enumerate(graph.slots)]
    starts_s, ends_s = [e.start_s for e in slots], [e.end_s for e in slots]
    curves, _ = memory_curves(graph, replace(costs, temp_bytes=passing), starts_s, ends_s)
    bare_costs = replace(costs, temp_bytes=(), boundary_buffers=False)
    residual_memory, _ = memory_curves(graph, bare_costs, starts_s, ends_s)
    acc = [s.sizes.acc_bytes for s in stages]
    memory = []
    for rank, (full, on_host) in enumerate(zip(timeline.memory, _host_peaks(timeline, costs), strict=True)):
        rank_stages = graph.schedule.placement.stages_of(rank)
        at = full.times_s[full.bytes.index(full.peak)] if full.bytes else 0.0
        residuals, activations = _value_at(residual_memory[rank], at), _value_at(curves[rank], at)
        gradients = sum(acc[s] for s in rank_stages)
        held_then: dict[Kind, float] = {
            "parameters": sum(costs.param_bytes[s] for s in rank_stages),
            "gradients": gradients,
            "optimizer": sum(costs.optimizer_bytes[s] for s in rank_stages) - gradients,
            "residuals": residuals,
            "boundaries": max(0.0, activations - residuals),
            "temporaries": max(0.0, full.peak - activations),
        }
        # the total is that of the rounded kinds, so that a table of them adds up to what it says
        by_kind: dict[Kind, int] = {kind: round(n) for kind, n in held_then.items()}
        total = sum(by_kind.values())
        static = by_kind["parameters"] + by_kind["gradients"] + by_kind["optimizer"]
        memory.append(
            RankMemory(rank, total, f"{at:.3g} s", by_kind, by_kind, static + round(curves[rank].peak), round(on_host))
        )
    return tuple(memory), tuple(curve.peak for curve in curves)


def reduction_s(sizes: StageSizes, target: Target, efficiency: Efficiency, pipe: PipelineConfig) -> float:
    """Return the seconds of a ring all-reduce of each gradient over the devices that have the same parameter and other data;
    with ZeRO-1 of a reduce-scatter over those with other rows, and an all-reduce of the pieces over the rest."""
    seconds = 0.0
    for kind, acc_bytes in sizes.acc_bytes_by_kind.items():
        rows, n = _zero_parts(pipe, kind), math.prod(pipe.mesh.sizes[axis] for axis in _data_axes(kind))
        parts = (rows - 1) / rows + 2 * (n / rows - 1) / n
        seconds += parts * acc_bytes / link_of(target, efficiency, pipe.mesh.num_devices).bytes_per_s
    return seconds


def gather_s(sizes: StageSizes, target: Target, efficiency: Efficiency, pipe: PipelineConfig) -> float:
    """Return the seconds of ZeRO-1's all-gather of updated parameters over the devices with other rows, 0 without."""
    rows = {kind: _zero_parts(pipe, kind) for kind in sizes.acc_bytes_by_kind}
    # accumulators are as large as parameters, or larger by the same factor
    parts = sum(n / sizes.acc_bytes * (1 - 1 / rows[kind]) for kind, n in sizes.acc_bytes_by_kind.items() if n)
    return parts * sizes.param_bytes / link_of(target, efficiency, pipe.mesh.num_devices).bytes_per_s


def _data_axes(kind: BufferKind) -> list[str]:
    """Return the axes along which devices have other data, and the same parameters of this kind."""
    return [axis for axis in DATA if axis not in BUFFER_AXES[kind].divided]


def _zero_parts(pipe: PipelineConfig, kind: BufferKind) -> int:
    """Return into how many parts ZeRO-1 divides state of this kind of buffer; 1 without."""
    sizes = pipe.mesh.sizes
    return math.prod(sizes[axis] for axis in _data_axes(kind) if axis in ROWS) if pipe.sharding.zero1 else 1


def _value_at(curve: MemoryCurve, at: float) -> float:
    """Return the live bytes after the last change at or before ``at``."""
    index = bisect_right(curve.times_s, at)
    return curve.bytes[index - 1] if index else 0.0


def _host_peaks(timeline: Timeline, costs: CostProfile) -> list[float]:
    """Return the peak bytes in host memory per rank; an offload occupies it from the start of O to the end of L."""
    changes: list[list[tuple[float, float]]] = [[] for _ in range(timeline.num_ranks)]
    for event in timeline.events:
        for action in event.action.actions:
            n = costs.offloadable_bytes[action.stage]
            if event.lane in HOST_LANES:
                changes[event.rank].append((event.start_s, n) if event.lane == "d2h" else (event.end_s, -n))
    return [max(accumulate(change for _, change in sorted(rank_changes)), default=0.0) for rank_changes in changes]
