"""From a model and ``[pipeline]`` settings to a pipeline: the schedule chosen, the model cut, the stages traced and split, the
order made anew where their collectives or bytes ask for it.

The one way from settings to a :class:`~jaxpipe.runtime.pipeline.Pipeline`, for configs and for :class:`jaxpipe.Trainer`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe import profile
from jaxpipe.errors import ConfigError, ScheduleError
from jaxpipe.mesh import TensorParallel
from jaxpipe.runtime.offload import OffloadOptions
from jaxpipe.runtime.pipeline import Pipeline
from jaxpipe.schedule import FAMILIES, CostProfile, Schedule, check_schedule, generate, read_schedule
from jaxpipe.stage.layer import Model
from jaxpipe.stage.plan import StagePlan, analytic_layer_costs, plan_stages
from jaxpipe.train.braiding import with_collectives
from jaxpipe.train.config import PipelineConfig

Progress = Callable[[str], None]


def stage_planner(pipe: PipelineConfig, model: Model, microbatch_size: int) -> Callable[[int], StagePlan]:
    """A function from the number of stages to the plan, cut as ``pipe.cut`` says. Costs of layers are taken once."""
    cut = pipe.cut
    size = microbatch_size // pipe.dp  # what one device sees, as far as costs go
    if cut == "measured":
        costs, source = profile.measured_layer_costs(model, size), "measured"
    else:
        costs, source = analytic_layer_costs(model, size), "analytic"

    def plan(num_stages: int) -> StagePlan:
        if isinstance(cut, tuple):
            return plan_stages(model, boundaries=cut, costs=costs, costs_from=source)
        return plan_stages(model, num_stages, costs=costs, costs_from=source)

    return plan


def build_schedule(pipe: PipelineConfig, stage_costs: Callable[[int], Sequence[float]]) -> Schedule:
    """The schedule of ``pipe``: a family's, with the stages' relative costs, or a file's.

    ``stage_costs(n)``: relative forward cost of each stage when the model is cut into n.

    Raises:
        ScheduleError: the family refuses these sizes, or the file is wrong.
        ConfigError: the file is for other sizes.
    """
    if Path(pipe.schedule).suffix in (".sched", ".json", ".csv"):
        schedule = read_schedule(pipe.schedule)
        try:
            check_schedule(schedule)
        except ScheduleError as error:
            named = [f"{pipe.schedule}: {problem}" for problem in error.problems]
            raise ScheduleError("; ".join(named), named) from None
        for what, have, want in (
            ("ranks", schedule.num_ranks, pipe.ranks),
            ("microbatches", schedule.num_microbatches, pipe.microbatches),
            ("chunks", schedule.num_chunks, pipe.chunks),
        ):
            if have != want:
                raise ConfigError(
                    f"{pipe.schedule} has {have} {what}, the config says pipeline.{what}={want}: make them equal"
                )
        return schedule
    takes_chunks = pipe.schedule in FAMILIES and "chunks" in FAMILIES[pipe.schedule].options
    chunks = pipe.chunks if takes_chunks else None
    shape = generate(pipe.schedule, pipe.ranks, pipe.microbatches, chunks=chunks, memory_limit=pipe.memory_limit)
    costs = relative_costs(stage_costs(shape.num_stages))
    return generate(
        pipe.schedule, pipe.ranks, pipe.microbatches, chunks=chunks, costs=costs, memory_limit=pipe.memory_limit
    )


def relative_costs(forward: Sequence[float]) -> CostProfile:
    """Costs proportional to each stage's forward, B and W as long as F: what an order is chosen with before anything runs."""
    f = tuple(max(x, 1e-9 * max(forward)) for x in forward)
    ones = tuple(1.0 for _ in f)
    twice = tuple(2 * x for x in f)
    return CostProfile(
        f_s=f, b_s=f, w_s=f, bw_s=twice, residual_bytes=ones, w_residual_bytes=ones, source="relative FLOPs"
    )


def assemble(
    model: Model,
    schedule: Schedule,
    plan: StagePlan,
    pipe: PipelineConfig,
    *,
    microbatch_size: int,
    dtype: Any,
    offload: OffloadOptions,
    devices: Sequence[jax.Device],
    progress: Progress,
) -> Pipeline:
    """The stages of ``plan`` on ``devices``, traced and split, each compiled when it first runs; costs are FLOP counts.

    Raises:
        ConfigError, ScheduleError, StageError, ProgramError: what is wrong, and what would work.
    """
    pipeline = Pipeline.build(
        model,
        schedule,
        microbatch_size=microbatch_size,
        boundaries=plan,
        devices=devices,
        compute_dtype=jnp.dtype(dtype),
        recompute=pipe.recompute,
        offload=offload,
        dp=pipe.dp,
        tp=tensor_parallel(pipe),
        braid=pipe.braid,
    )
    pipeline = with_collectives(pipe, pipeline)
    return within_memory_limit(pipe, pipeline, [s.cost for s in plan.stages], progress)


def tensor_parallel(pipe: PipelineConfig) -> TensorParallel:
    """How the layers of a rank divide their work."""
    return TensorParallel(pipe.tp, sequence=pipe.sequence_parallel, fused_residual=pipe.fused_residual)


def within_memory_limit(
    pipe: PipelineConfig, pipeline: Pipeline, stage_costs: Sequence[float], progress: Progress
) -> Pipeline:
    """``pipeline``, or if its stages' real bytes break ``pipe.memory_limit``, the same with an order made for these bytes.

    What waits for W may be larger than what F saved (with recomputation it often is), which is known once stages are split.
    Depends on shapes only, so a resumed run gets the same order.

    Raises:
        ScheduleError: one microbatch alone needs more than the limit.
    """
    limit = pipe.memory_limit
    peak = max(pipeline.predicted_timeline().peak_activations)
    if limit is None or peak <= limit * (1 + 1e-9) or pipe.schedule not in FAMILIES:
        return pipeline
    costs = replace(
        relative_costs(stage_costs),
        residual_bytes=pipeline.costs.residual_bytes,
        w_residual_bytes=pipeline.costs.w_residual_bytes,
        offloadable_bytes=pipeline.costs.offloadable_bytes,
    )
    progress(f"W keeps more than F saved: {peak:.3g} activations would be live, a new order keeps to {limit:g}")
    return pipeline.with_schedule(
        generate(pipe.schedule, pipe.ranks, pipe.microbatches, costs=costs, memory_limit=limit)
    )
