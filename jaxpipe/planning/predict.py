"""Predict a config on a target: memory per rank by kind, step time, MFU, bubble, offload.

Assumed: AdamW with float32 moments; float32 master parameters and gradient accumulators beside parameters in the compute dtype
(with float32 compute there are no separate masters): 18 bytes a parameter in bfloat16, 16 in float32, as the runtime keeps
them and as Megatron-LM does. No data parallelism, so no sharded optimizer. Batch arrays, keys and losses are left out
(megabytes). The update reads and writes its state once at the memory's bandwidth. Gradients are reduced over dp once a step,
by a ring, and after the pipeline: what of it runs under the tail of the pipeline is not counted as hidden. Of post-validation,
taken to be right always: a step takes the longest span of a rank (:mod:`jaxpipe.schedule.steps`), the update reads its state
once more, and parameters in float32 are there twice.

MFU counts the products of the forward three times (forward and backward, recomputation not), as Narayanan et al. 2021 do,
over the step and the dense peak of the compute dtype.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from jaxpipe.cost.memory import Kind, RankMemory
from jaxpipe.planning.costs import link_between, link_of, planned_costs
from jaxpipe.planning.roofline import Efficiency
from jaxpipe.planning.stages import PlannedStage, Workbench, planner
from jaxpipe.planning.targets import Target
from jaxpipe.schedule import CostProfile, MemoryCurve, Placement, Schedule, Timeline, op_spec, simulate
from jaxpipe.schedule.costs import PER_STAGE_FIELDS, k_of
from jaxpipe.schedule.deps import HOST_LANES
from jaxpipe.schedule.memory import static_bytes
from jaxpipe.schedule.search_orders import offloaded_share
from jaxpipe.stage.compiled.recompute_report import remarks
from jaxpipe.stage.model.plan import StagePlan
from jaxpipe.train.assemble import Planner, choose, final_order
from jaxpipe.train.config import TrainConfig
from jaxpipe.train.settings.sections import PipelineConfig
from jaxpipe.train.setup import microbatch_size


@dataclass(frozen=True, slots=True)
class Prediction:
    """The prediction for one config on ``target``. ``memory``: of a device of each rank at its peak; ``residuals`` are what
    F keeps for B and W and B for W. ``activation_bytes``: per rank, the most that residuals and boundaries take at any
    time. ``limit_bytes``: what arrays may fill on a device. ``fused_attention``: cuDNN's, in any stage. ``remarks``: on
    stages, such as a recompute policy that finds nothing to do. ``update_s``: of the config; ``late_update_s``: with
    post-validation."""

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
    num_params: int
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
class Ground:
    """A priced plan, whatever the order of actions: the cut, its stages and their costs. ``own_ops``: custom ops, which
    take no time."""

    plan: StagePlan
    stages: tuple[PlannedStage, ...]
    costs: CostProfile
    own_ops: tuple[str, ...] = ()

    def update_s(self, config: TrainConfig, bench: Workbench, placement: Placement, late: bool | None = None) -> float:
        """Return the seconds of a step beside the pipeline's: gradients reduced, also to the rank that owns a stage of
        several flows, parameters updated, and handed back to the other ranks of such a stage. ``late``: with
        post-validation, by default as ``config`` says."""
        passes = 3 if (config.pipeline.passes.post_validation != "off" if late is None else late) else 2
        gradients = [
            sum(self.stages[s].sizes.acc_bytes for s in placement.stages_of(r)) for r in range(placement.num_ranks)
        ]
        twice = gradients if _twice(config) else [0.0] * placement.num_ranks
        static = max(n - m for n, m in zip(static_bytes(placement, self.costs), twice, strict=True))
        updated_s = passes * static / (bench.target.memory_bytes_per_s * bench.efficiency.bandwidth)
        reduced_s = reduction_s(max(gradients), bench.target, bench.efficiency, config.pipeline)
        return updated_s + reduced_s + self._replicas_s(config, bench, placement)

    def _replicas_s(self, config: TrainConfig, bench: Workbench, placement: Placement) -> float:
        """Return the longest exchange between two ranks that hold the same stages: gradients there, parameters back."""
        gradients, parameters = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
        for s, (primary, *replicas) in enumerate(zip(*placement.flows, strict=True)):
            for rank in {rank for group in replicas for rank in group if rank not in primary}:
                gradients[(rank, primary[0])] += round(self.stages[s].sizes.acc_bytes)
                parameters[(primary[0], rank)] += round(self.costs.param_bytes[s])

        def seconds(a: int, b: int, n: int) -> float:
            return link_between(a, b, bench.target, bench.efficiency, config.pipeline).seconds(n)

        ways = (gradients, parameters)
        return sum(max((seconds(*pair, n) for pair, n in way.items()), default=0.0) for way in ways)


def ground(
    config: TrainConfig,
    bench: Workbench,
    plan: StagePlan,
    limit_bytes: float,
    ops: Collection[str] = (),
    compile_stages: bool = False,
) -> Ground:
    """Price the stages of ``plan``. ``ops``: that schedules will run; ``compile_stages``: as :func:`predict`.

    Raises:
        StageError: a stage can't be traced or split, or no such policy.
    """
    pipe, bench = config.pipeline, bench.over(config.pipeline)
    stages = bench.stages(
        plan.cut, pipe.recompute, microbatch_size(config) // pipe.dp, config.pipeline.offload.fraction
    )
    stages = bench.compiled(stages, ops if compile_stages else ())
    costs = planned_costs(stages, pipe, bench.target, bench.efficiency, limit_bytes)
    if _twice(config):
        twice = [n + s.sizes.acc_bytes for n, s in zip(costs.optimizer_bytes, stages, strict=True)]
        costs = replace(costs, optimizer_bytes=tuple(twice))
    custom_ops = sorted(op for op in ops if op_spec(op).cost not in ("", *PER_STAGE_FIELDS))
    for op in custom_ops:
        costs = costs.with_values(op_spec(op).cost, (0.0,) * costs.num_stages)
    return Ground(plan, stages, costs, tuple(custom_ops))


def predict(
    config: TrainConfig,
    bench: Workbench,
    limit_bytes: float,
    transform: Callable[[Schedule, CostProfile], Schedule] | None = None,
    compile_stages: bool = False,
    planned: Planner | None = None,
) -> Prediction:
    """Predict ``config`` with its own schedule, or with ``transform`` of it. ``compile_stages``: compile what the
    schedule uses, as far as the workbench can, to know its workspace; what was compiled before is used in any case.
    ``planned``: the config's planner, where it is there already.

    Raises:
        ScheduleError, StageError, ConfigError: the config's schedule, cut or policy can't be.
    """
    pipe = config.pipeline
    draft, plan = choose(pipe, bench.model, planned or planner(config, bench.model))
    ops = {a.op for a in draft.schedule.actions()}
    ops |= {"B", "W"} if pipe.passes.separate_gradients else set()
    priced_plan = ground(config, bench, plan, limit_bytes, ops, compile_stages)
    schedule = final_order(pipe, draft, priced_plan.costs, lambda text: None)
    if transform is not None:
        schedule = transform(schedule, priced_plan.costs)
    return predicted(config, bench, priced_plan, schedule, simulate(schedule, priced_plan.costs), limit_bytes)


def predicted(
    config: TrainConfig,
    bench: Workbench,
    priced_plan: Ground,
    schedule: Schedule,
    timeline: Timeline,
    limit_bytes: float,
) -> Prediction:
    """Predict ``config``, whose final ``schedule`` gives ``timeline`` under the costs of ``priced_plan``."""
    pipe, stages, costs, custom_ops = config.pipeline, priced_plan.stages, priced_plan.costs, priced_plan.own_ops
    memory, activations = _memory(schedule, timeline, stages, costs)
    detached = schedule.placement.detached  # their F makes a part of the backward; W is one product, as the forward is
    forward = sum(s.work["W" if k in detached else "F"].flops for k, s in enumerate(stages))
    flops = 3 * forward * pipe.microbatches * pipe.rank_devices
    return Prediction(
        config=config,
        target=bench.target,
        schedule=schedule,
        costs=costs,
        timeline=timeline,
        memory=memory,
        activation_bytes=activations,
        limit_bytes=limit_bytes,
        update_s=priced_plan.update_s(config, bench, schedule.placement),
        late_update_s=priced_plan.update_s(config, bench, schedule.placement, late=True),
        model_flops=flops,
        num_params=sum(s.num_params for s in priced_plan.plan.stages),
        fused_attention=any(s.fuses_attention for s in stages),
        remarks=(
            *remarks([s.functions for s in stages]),
            *(f"{op}, an op of your own, takes no time" for op in custom_ops),
        ),
    )


def _twice(config: TrainConfig) -> bool:
    """Return whether old and new parameters coexist during the update."""
    return config.pipeline.passes.post_validation != "off" and config.run.dtype == "float32"


def pipeline_s(timeline: Timeline, pipe: PipelineConfig) -> float:
    """Return the seconds of a step's pipeline in a steady state of consecutive steps."""
    return timeline.makespan if pipe.passes.post_validation == "off" else timeline.max_span


def _memory(
    schedule: Schedule, timeline: Timeline, stages: Sequence[PlannedStage], costs: CostProfile
) -> tuple[tuple[RankMemory, ...], tuple[float, ...]]:
    """Return each rank's memory at its peak, and the peak of residuals and boundaries. Kinds are separated by simulating
    the same times without workspace, and without boundaries."""
    passing = tuple(
        (op, tuple(n - s.workspace.get(op, 0.0) for n, s in zip(row, stages, strict=True)))
        for op, row in costs.temp_bytes
    )
    curves = simulate(schedule, replace(costs, temp_bytes=passing)).memory
    residual_memory = simulate(schedule, replace(costs, temp_bytes=(), boundary_buffers=False)).memory
    acc = [s.sizes.acc_bytes for s in stages]
    memory = []
    for rank, (full, on_host) in enumerate(zip(timeline.memory, _host_peaks(timeline, costs), strict=True)):
        rank_stages = schedule.placement.stages_of(rank)
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
        by_kind: dict[Kind, int] = {kind: round(n) for kind, n in held_then.items()}
        total = sum(by_kind.values())
        static = by_kind["parameters"] + by_kind["gradients"] + by_kind["optimizer"]
        memory.append(
            RankMemory(rank, total, f"{at:.3g} s", by_kind, by_kind, static + round(curves[rank].peak), round(on_host))
        )
    return tuple(memory), tuple(curve.peak for curve in curves)


def reduction_s(gradient_bytes: float, target: Target, efficiency: Efficiency, pipe: PipelineConfig) -> float:
    """Return the seconds of a ring all-reduce of ``gradient_bytes`` over dp · cp devices; with ZeRO-1 a reduce-scatter, and an
    all-gather of as many bytes of updated parameters."""
    n = pipe.dp * pipe.cp
    return 2 * (n - 1) / n * gradient_bytes / link_of(target, efficiency, pipe.rank_devices).bytes_per_s


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
