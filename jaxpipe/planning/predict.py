"""What a config would need and reach on a target: memory per rank by kind, step time, MFU, bubble, offload.

Assumed: AdamW with float32 moments; float32 master parameters and gradient accumulators beside parameters in the compute dtype
(with float32 compute there are no separate masters): 18 bytes a parameter in bfloat16, 16 in float32, as the runtime keeps
them and as Megatron-LM does. No data parallelism, so no sharded optimizer. Batch arrays, keys and losses are left out
(megabytes). The update reads and writes its state once at the memory's bandwidth. Gradients are reduced over dp once a step,
by a ring, and after the pipeline: what of it runs under the tail of the pipeline is not counted as hidden.

MFU counts the products of the forward three times (forward and backward, recomputation not), as Narayanan et al. 2021 do,
over the step and the dense peak of the compute dtype.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from jaxpipe.planning.costs import cost_profile
from jaxpipe.planning.roofline import Efficiency
from jaxpipe.planning.stages import OPS, PlannedStage, Sharding, Workbench, microbatch_size
from jaxpipe.planning.targets import Target
from jaxpipe.schedule import CostProfile, MemoryCurve, Schedule, Timeline, simulate
from jaxpipe.schedule.costs import k_of
from jaxpipe.schedule.search_orders import offloaded_share
from jaxpipe.stage.compiled.recompute_report import remarks
from jaxpipe.train.assemble import build_schedule, final_order
from jaxpipe.train.config import TrainConfig


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes on one device of a rank at the rank's peak. ``residuals``: what F keeps for B and W, and B for W."""

    rank: int
    parameters: float
    gradients: float
    optimizer: float
    residuals: float
    temporaries: float
    boundaries: float

    @property
    def activations(self) -> float:
        """What a step adds to what is there before it, workspace apart: residuals and boundaries."""
        return self.residuals + self.boundaries

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.temporaries


@dataclass(frozen=True, slots=True)
class Prediction:
    """Of one config. ``limit_bytes``: what arrays may fill on a device. ``activation_bytes``: per rank, the most that residuals
    and boundaries take at any time. ``offloaded``: share of residual bytes copied to the host; ``offload_bytes``: a rank and
    step, one way; ``host_bytes``: the most that a rank holds in host memory. ``k``: round trip of everything ÷ compute.
    ``remarks``: on stages, such as a recompute policy that finds nothing to do."""

    config: TrainConfig
    schedule: Schedule
    costs: CostProfile
    timeline: Timeline
    memory: tuple[RankMemory, ...]
    activation_bytes: tuple[float, ...]
    limit_bytes: float
    update_s: float
    model_flops: float
    devices: int
    peak_flops_per_s: float
    offloaded: float
    offload_bytes: tuple[float, ...]
    host_bytes: tuple[float, ...]
    num_params: int
    remarks: tuple[str, ...] = ()

    @property
    def step_s(self) -> float:
        return self.timeline.makespan + self.update_s

    @property
    def tokens_per_s(self) -> float:
        return self.config.run.batch * self.config.data.seq_len / self.step_s

    @property
    def tokens_per_s_per_device(self) -> float:
        return self.tokens_per_s / self.devices

    @property
    def mfu(self) -> float:
        return self.model_flops / (self.step_s * self.devices * self.peak_flops_per_s)

    @property
    def k(self) -> float:
        return k_of(self.costs)

    @property
    def worst(self) -> RankMemory:
        return max(self.memory, key=lambda m: m.total)

    @property
    def fits(self) -> bool:
        return self.worst.total <= self.limit_bytes


def predict(
    config: TrainConfig,
    bench: Workbench,
    target: Target,
    efficiency: Efficiency,
    sharding: Sharding,
    limit_bytes: float,
    transform: Callable[[Schedule, CostProfile], Schedule] | None = None,
    compile_stages: bool = False,
) -> Prediction:
    """The prediction for ``config`` with its own schedule, or with ``transform`` of it. ``compile_stages``: compile what the
    schedule uses, as far as the workbench can, to know its workspace; what was compiled before is used in any case.

    Raises:
        ScheduleError, StageError, ConfigError: the config's schedule, cut or policy can't be.
    """
    size, pipe = microbatch_size(config), config.pipeline

    def planned(num_stages: int) -> tuple[PlannedStage, ...]:
        return bench.stages(bench.plan(config, num_stages).cut, pipe.recompute, size, config.offload.fraction)

    def costs_of(stages: Sequence[PlannedStage]) -> CostProfile:
        return cost_profile(stages, pipe.ranks, target, efficiency, sharding, limit_bytes)

    schedule = build_schedule(pipe, lambda n: [s.cost for s in bench.plan(config, n).stages], config.traverse)
    stages = planned(schedule.num_stages)
    ops = {a.op for r in range(schedule.num_ranks) for a in schedule.actions(r)}
    ops |= {"B", "W"} if pipe.separate_gradients else set()
    stages = bench.compiled(stages, ops if compile_stages else ())
    costs = costs_of(stages)
    stage_costs = [s.cost for s in bench.plan(config, schedule.num_stages).stages]
    schedule = final_order(pipe, schedule, costs, stage_costs, lambda text: None)
    timeline = simulate(schedule, costs)
    if transform is not None:
        schedule = transform(schedule, costs)
        timeline = simulate(schedule, costs)
    return _prediction(config, schedule, stages, costs, timeline, target, efficiency, sharding, limit_bytes)


def _prediction(
    config: TrainConfig,
    schedule: Schedule,
    stages: Sequence[PlannedStage],
    costs: CostProfile,
    timeline: Timeline,
    target: Target,
    efficiency: Efficiency,
    sharding: Sharding,
    limit_bytes: float,
) -> Prediction:
    placement = schedule.placement
    passing = tuple((op, tuple(s.passing[op] for s in stages)) for op in OPS)
    held = simulate(schedule, replace(costs, temp_bytes=passing)).memory  # the same times, without workspace
    kept = simulate(schedule, replace(costs, temp_bytes=(), boundary_buffers=False)).memory  # nor boundaries
    memory, copied = [], []
    for rank in range(schedule.num_ranks):
        mine, full = placement.stages_of(rank), timeline.memory[rank]
        at = full.times_s[full.bytes.index(full.peak)] if full.bytes else 0.0
        residuals, activations = _value_at(kept[rank], at), _value_at(held[rank], at)
        memory.append(
            RankMemory(
                rank,
                sum(stages[s].parameters for s in mine),
                sum(stages[s].gradients for s in mine),
                sum(stages[s].optimizer for s in mine),
                residuals,
                max(0.0, full.peak - activations),
                max(0.0, activations - residuals),
            )
        )
        copied.append(sum(costs.offloadable_bytes[a.stage] for a in schedule.actions(rank) if a.op == "O"))
    static = max(m.parameters + m.gradients + m.optimizer for m in memory)
    flops = 3 * sum(s.work["F"].flops for s in stages) * config.pipeline.microbatches * sharding.dp * sharding.tp
    return Prediction(
        config=config,
        schedule=schedule,
        costs=costs,
        timeline=timeline,
        memory=tuple(memory),
        activation_bytes=tuple(curve.peak for curve in held),
        limit_bytes=limit_bytes,
        update_s=2 * static / (target.memory_bytes_per_s * efficiency.bandwidth)
        + reduction_s(max(m.gradients for m in memory), target, efficiency, sharding),
        model_flops=flops,
        devices=schedule.num_ranks * sharding.tp * sharding.dp,
        peak_flops_per_s=target.peak_flops_per_s(config.run.dtype),
        offloaded=offloaded_share(schedule, costs),
        offload_bytes=tuple(copied),
        host_bytes=_host_peaks(timeline, costs),
        num_params=sum(s.num_params for s in stages),
        remarks=remarks([s.functions for s in stages]),
    )


def reduction_s(gradient_bytes: float, target: Target, efficiency: Efficiency, sharding: Sharding) -> float:
    """Seconds that dp devices take to add up ``gradient_bytes`` each by a ring; with ZeRO-1 a reduce-scatter, and an
    all-gather of as many bytes of updated parameters."""
    if sharding.dp == 1:
        return 0.0
    near = sharding.dp * sharding.tp <= target.node_size
    rate = target.link_bytes_per_s if near else target.network_bytes_per_s
    return 2 * (sharding.dp - 1) / sharding.dp * gradient_bytes / (rate * efficiency.link)


def _value_at(curve: MemoryCurve, at: float) -> float:
    """Live bytes from the last change at or before ``at`` on."""
    index = bisect_right(curve.times_s, at)
    return curve.bytes[index - 1] if index else 0.0


def _host_peaks(timeline: Timeline, costs: CostProfile) -> tuple[float, ...]:
    """Per rank, the most bytes in host memory: from the start of an O to the end of its L."""
    changes: list[list[tuple[float, float]]] = [[] for _ in range(timeline.num_ranks)]
    for event in timeline.events:
        for action in event.action.actions:
            if action.op == "O":
                changes[event.rank].append((event.start_s, costs.offloadable_bytes[action.stage]))
            elif action.op == "L":
                changes[event.rank].append((event.end_s, -costs.offloadable_bytes[action.stage]))
    peaks = []
    for mine in changes:
        live = accumulate(change for _, change in sorted(mine))
        peaks.append(max(live, default=0.0))
    return tuple(peaks)
