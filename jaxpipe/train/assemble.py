"""Makes a pipeline of a model and ``[pipeline]`` settings: the model cut, the schedule chosen, the stages traced and split, the
order made anew where their collectives or bytes ask for it.

The one way from settings to a :class:`~jaxpipe.runtime.pipeline.Pipeline`, for configs and for :class:`jaxpipe.Trainer`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe.cost.seconds import measured_layer_costs
from jaxpipe.errors import ConfigError, ScheduleError, StageError
from jaxpipe.runtime.assembly import Assembly
from jaxpipe.runtime.pipeline import Pipeline
from jaxpipe.runtime.processes import Processes, SingleProcess
from jaxpipe.runtime.transfer import OffloadOptions
from jaxpipe.schedule import CostProfile, Link, Schedule, simulate
from jaxpipe.schedule.passes import braid, separate_gradients
from jaxpipe.schedule.passes.braid import backwards_like, fused_backwards, split_backwards
from jaxpipe.schedule.passes.reductions import without_reductions
from jaxpipe.schedule.placement import Edges
from jaxpipe.schedule.timeline import at_most
from jaxpipe.stage.identity import ById
from jaxpipe.stage.model.layer import Model, taken_by
from jaxpipe.stage.model.plan import LayerCosts, StagePlan, analytic_layer_costs, cut, cut_at, cut_edges, plan_stages
from jaxpipe.stage.model.vocabulary import VocabParallelModel, spread
from jaxpipe.text import arrows
from jaxpipe.train.replan import why_not
from jaxpipe.train.schedule_source import ScheduleSource, barriers, edges_to_cut, relative_costs, source_of
from jaxpipe.train.settings.sections import PipelineConfig

Progress = Callable[[str], None]
Planner = Callable[..., StagePlan]
"""A function of a number of stages and the edges between them (None or left out: whatever follows from the cut)."""


def spread_over(pipe: PipelineConfig, model: Model) -> Model:
    """``model`` with its vocabulary layers where ``pipe.vocabulary`` says.

    Raises:
        ConfigError: they can't be spread.
    """
    if pipe.vocabulary == "ends":
        return model.stored
    return _spread(ById(model.stored), pipe.ranks, pipe.tp, barriers(pipe.vocabulary))


@lru_cache(maxsize=16)
def _spread(model: ById, ranks: int, tp: int, barriers: int) -> VocabParallelModel:
    """One object for one question: what is known of its layers is known by their functions."""
    return spread(model.value, ranks, tp=tp, barriers=barriers)


def stage_planner(
    pipe: PipelineConfig,
    model: Model,
    microbatch_size: int,
    processes: Processes | None = None,
    flops_cache: dict[Any, Any] | None = None,
) -> Planner:
    """Plans of ``model``, as :func:`spread_over` returns it, cut as ``pipe.cut`` says. Costs of layers are taken once; the
    first of several ``processes`` measures for all. ``flops_cache``: FLOPs of layers, shared with other planners."""
    cut = pipe.cut
    size = microbatch_size // pipe.dp  # what one device sees, as far as costs go
    if cut == "measured":
        processes = processes or SingleProcess()
        measured = measured_layer_costs(model, size) if processes.mine == 0 else ()
        costs, source = tuple(processes.broadcast("layer costs", measured)), "measured"
    else:
        costs, source = analytic_layer_costs(model, size, flops_cache), "analytic"

    def plan(num_stages: int, edges: Edges | None = None) -> StagePlan:
        if isinstance(model, VocabParallelModel):
            return plan_stages(
                model, boundaries=_around_trunk(model, num_stages, cut, costs), costs=costs, costs_from=source
            )
        if isinstance(cut, tuple):
            if len(cut) + 1 != num_stages:
                raise ConfigError(
                    f"pipeline.cut makes {len(cut) + 1} stages, and {pipe.schedule} has {num_stages}: give the "
                    f"{num_stages - 1} layers at which the second and later stages start"
                )
            return plan_stages(model, boundaries=cut, costs=costs, costs_from=source)
        try:
            return plan_stages(model, num_stages, costs=costs, costs_from=source, edges=edges)
        except StageError as error:
            advice = "" if edges is None else "; families of schedules, such as 1f1b, take layers of any graph"
            raise StageError(f"{error}{advice}") from None

    return plan


def _around_trunk(model: VocabParallelModel, num_stages: int, trunk_cut: Any, costs: Sequence[float]) -> list[int]:
    """Return the layers at which the second and later of ``num_stages`` stages start: each part of a vocabulary layer is one,
    and the loss; those of the layers between are cut as ``trunk_cut`` or by costs."""
    trunk = model.trunk
    layers = [replace(layer, takes=None) for layer in model.layers[trunk.start : trunk.stop]]
    if isinstance(trunk_cut, tuple):
        ranges = cut_at(layers, trunk_cut)
    else:
        sent = getattr(costs, "boundary_bytes", (0,) * len(costs))
        trunk_costs = LayerCosts(costs[trunk.start : trunk.stop], sent[trunk.start : trunk.stop])
        ranges = cut(layers, num_stages - 2 * model.parts - 1, trunk_costs)
    inner = [trunk.start + first for first, _ in ranges]
    return [*range(1, trunk.start), *inner, *range(trunk.stop, len(model.layers))]


@dataclass(frozen=True, slots=True)
class ScheduleDraft:
    """An order chosen before stages are traced: ``schedule``, what ``source`` makes of their relative ``costs``."""

    schedule: Schedule
    source: ScheduleSource
    costs: CostProfile


def choose(
    pipe: PipelineConfig, model: Model, planner: Planner, schedule: Schedule | None = None
) -> tuple[ScheduleDraft, StagePlan]:
    """Return the schedule of ``pipe``, or ``schedule``, and the plan of its stages, of ``model`` as :func:`spread_over` returns
    it.

    Whatever has stages in a chain takes a model of any graph: its order has each stage after all before it in the chain, more
    than any graph asks for. Its stages then wait for those alone whose results they take.

    Raises:
        ScheduleError, ConfigError, StageError: as :func:`~jaxpipe.train.schedule_source.source_of` and ``planner``.
    """
    source = source_of(pipe, model.span, schedule)
    plan = planner(source.num_stages, source.edges)
    costs = relative_costs([stage.cost for stage in plan.stages])
    # what runs once a step is the training step's business, whatever a file says of it
    schedule = without_reductions(schedule or source.order(costs))
    placement = schedule.placement
    # A function may place stages as it likes, which is known only now.
    if (schedule.num_stages, edges_to_cut(placement)) != (source.num_stages, source.edges):
        plan = planner(schedule.num_stages, edges_to_cut(placement))
    edges = cut_edges(taken_by(model.layers), plan.cut)
    if not placement.is_chain:
        if edges != tuple(sorted(placement.edges)):
            raise ScheduleError(
                f"schedule {schedule.name!r} has the edges {arrows(placement.edges)} between stages, and the cut, by what its "
                f"layers take, {arrows(edges)}: "
                "start stages where branches start"
            )
        return ScheduleDraft(schedule, source, costs), plan
    if placement.num_flows > 1 and edges != placement.edges:
        raise ScheduleError(
            f"schedule {schedule.name!r} has {placement.num_flows} flows, which chains of stages can have, and this model's "
            "stages are none: use one with a single flow, such as 1f1b"
        )
    return ScheduleDraft(with_edges(schedule, edges), source, costs), plan


def with_edges(schedule: Schedule, edges: Edges) -> Schedule:
    """``schedule`` with other edges between its stages, whose order allows them."""
    return replace(schedule, placement=replace(schedule.placement, edges=edges))


def assemble(
    model: Model,
    draft: ScheduleDraft,
    plan: StagePlan,
    pipe: PipelineConfig,
    *,
    microbatch_size: int,
    dtype: Any,
    offload: OffloadOptions,
    devices: Sequence[jax.Device],
    progress: Progress,
    split: bool = False,
    processes: Processes | None = None,
    transport: str = "tagged",
) -> Pipeline:
    """Return the stages of ``plan`` on ``devices``, traced and split, each compiled when it first runs, in the order that
    :func:`final_order` makes of ``draft``; costs are FLOP counts.

    Raises:
        ConfigError, ScheduleError, StageError, ProgramError: what is wrong, and what would work.
    """
    assembly = Assembly.of(
        model,
        draft.schedule.placement,
        microbatch_size=microbatch_size,
        boundaries=plan,
        devices=devices,
        compute_dtype=jnp.dtype(dtype),
        recompute=pipe.recompute,
        offload=offload,
        tp=pipe.mesh,
        braid=bool(pipe.passes.braid),
        processes=processes,
        transport=transport,
    ).with_ops(draft.schedule)
    for remark in assembly.remarks:
        progress(remark)
    costs = assembly.flop_costs
    return Pipeline.over(assembly, final_order(pipe, draft, costs, progress, split))


def final_order(
    pipe: PipelineConfig, draft: ScheduleDraft, costs: CostProfile, progress: Progress, split: bool = False
) -> Schedule:
    """Return the order of ``pipe`` for stages of these ``costs``, where ``draft`` was chosen by relative costs, before they
    were there. It is the draft's own schedule, unless

    * stages have collectives (tp, cp, ep): the families of `stp.txt` choose their warm-up by them, others leave room for
      what F and B wait;
    * the memory limit would break with the bytes that stages really hold. What waits for W may be larger than what F saved
      (with recomputation it often is), which is known once stages are split;
    * ``pipe`` asks for passes: gradients separated, neighbours braided where collectives take time; or ``split``: backwards
      split, as ``pipe`` may ask for too, for a run that is re-planned; if the limit allows that.

    Depends on shapes only, so a resumed run gets the same order.

    Raises:
        ScheduleError: one microbatch alone needs more than the limit, a schedule from a file does, or the family can't keep to
            it.
    """
    limit = math.inf if pipe.memory_limit is None else pipe.memory_limit
    source, schedule = draft.source, draft.schedule

    def costs_with(names: Sequence[str]) -> CostProfile:
        """Return the costs of the draft with these fields of ``costs``."""
        return replace(draft.costs, **{name: getattr(costs, name) for name in names})

    def order_by(profile: CostProfile) -> Schedule:
        return with_edges(source.order(profile), draft.schedule.placement.edges)

    def peak(schedule: Schedule) -> float:
        return max(simulate(schedule, costs).peak_activations)

    # Collectives first: an order chosen by their durations is then held to the limit, and passes keep to it.
    if costs.has_collectives and source.takes_costs:
        timed = costs_with(_TIMED)
        if not timed.links and timed.link == Link():
            # Among orders that are equal where transfers take no time, most wait where they take some. One made for transfers
            # of 1% of F costs nothing if they take none, and saves 1.5% of a step if they take 6% (V-ZB, m=64, tp=4).
            timed = replace(timed, link=Link(latency_s=1e-2 * min(timed.f_s)))
        if timed != draft.costs:
            schedule = order_by(timed)
    if limit < math.inf and not at_most(peak_activations := peak(schedule), limit):
        if not source.keeps_limit:
            raise ScheduleError(
                f"schedule {schedule.name!r} holds up to {peak_activations:.4g} activations on a rank, more than the "
                f"memory limit of {limit:g}: raise the limit, or use another schedule"
            )
        progress(
            f"W keeps more than F saved: {peak_activations:.3g} activations would be live, a new order keeps to {limit:g}"
        )
        schedule = order_by(costs_with(_HELD))
    if pipe.passes.separate_gradients:
        schedule = separate_gradients(schedule, costs, memory_limit=limit)
    if pipe.passes.braid == "adjacent" and costs.has_collectives:
        schedule = braid(schedule, costs, memory_limit=limit)
    if (split or pipe.passes.split_backwards == "always") and fused_backwards(schedule):
        split_schedule = split_backwards(schedule)
        if limit == math.inf or at_most(peak(split_schedule), limit):
            schedule = split_schedule
    return schedule


def order_for_link(pipe: PipelineConfig, draft: ScheduleDraft, now: Schedule, costs: CostProfile) -> Schedule:
    """Return the order that the source of ``draft`` makes of measured ``costs``, or ``now`` if that is no longer.

    ``now`` was made before the seconds of copies were known. Where they seem to take none, each load stands right before its
    backward, which then waits for it (on an H200 a step took 1.2 to 2.3 times as long as without offload).

    The new order runs the functions of ``now`` and adds up gradients as it does, so nothing is compiled and no bit changes.
    """
    if not (now.offloads and draft.source.takes_costs):
        return now
    costs = replace(costs, boundary_buffers=False)  # families do not know them
    try:
        schedule = with_edges(draft.source.order(costs), now.placement.edges)
        schedule = final_order(pipe, replace(draft, schedule=schedule, costs=costs), costs, lambda line: None)
    # With real bytes the source may have no order within the limit; the one that runs was found otherwise.
    except ScheduleError:
        return now
    schedule = replace(backwards_like(schedule, now), name=now.name)
    is_shorter = simulate(schedule, costs).makespan < simulate(now, costs).makespan
    return schedule if is_shorter and not why_not(schedule, now) else now


def planned_order(pipe: PipelineConfig, draft: ScheduleDraft, costs: CostProfile) -> Schedule:
    """Return the order that a run of ``pipe`` ends with if it measures ``costs``, seconds of copies among them.

    Raises:
        ScheduleError: as :func:`final_order`.
    """
    schedule = final_order(pipe, draft, costs, lambda line: None)
    return order_for_link(pipe, draft, schedule, costs)


_HELD = ("residual_bytes", "w_residual_bytes", "offloadable_bytes")
_TIMED = (
    "f_s", "b_s", "w_s", "bw_s", "f_comm_s", "b_comm_s", "collectives", "link", "links", "boundary_bytes",
    "source",
)  # fmt: skip
