"""From a model and ``[pipeline]`` settings to a pipeline: the schedule chosen, the model cut, the stages traced and split, the
order made anew where their collectives or bytes ask for it.

The one way from settings to a :class:`~jaxpipe.runtime.pipeline.Pipeline`, for configs and for :class:`jaxpipe.Trainer`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe.cost import measured_layer_costs
from jaxpipe.errors import ConfigError, ScheduleError, StageError
from jaxpipe.mesh import TensorParallel
from jaxpipe.runtime.assembly import Assembly
from jaxpipe.runtime.offload import OffloadOptions
from jaxpipe.runtime.pipeline import Pipeline
from jaxpipe.runtime.processes import Processes, SingleProcess
from jaxpipe.schedule import (
    FAMILIES,
    CostProfile,
    Link,
    Schedule,
    find_problems,
    generate,
    read_schedule,
    simulate,
    traverse,
    with_span,
)
from jaxpipe.schedule.families import family_named
from jaxpipe.schedule.families.vocabulary import spread_vocabulary
from jaxpipe.schedule.files import SUFFIXES
from jaxpipe.schedule.passes import braid, separate_gradients
from jaxpipe.schedule.passes.backwards import fused_backwards, split_backwards
from jaxpipe.schedule.placement import Edges, placement_named, with_vocabulary
from jaxpipe.schedule.tolerance import at_most
from jaxpipe.stage.identity import Same
from jaxpipe.stage.model.layer import Model, taken_by
from jaxpipe.stage.model.plan import LayerCosts, StagePlan, analytic_layer_costs, cut, cut_at, cut_edges, plan_stages
from jaxpipe.stage.model.vocabulary import SpreadModel, spread
from jaxpipe.text import arrows
from jaxpipe.train.own_schedules import made_by_function, towers_of, traversed
from jaxpipe.train.settings.rules import joint_problem
from jaxpipe.train.settings.sections import PipelineConfig

Progress = Callable[[str], None]
Planner = Callable[..., StagePlan]
"""Of a number of stages, and the edges between them (None or left out: whatever follows from the cut)."""


def spread_over(pipe: PipelineConfig, model: Model) -> Model:
    """``model`` with its vocabulary layers where ``pipe.vocabulary`` says.

    Raises:
        ConfigError: they can't be spread.
    """
    if pipe.vocabulary == "ends":
        return model.stored
    return _spread(Same(model.stored), pipe.ranks, pipe.tp, barriers(pipe.vocabulary))


@lru_cache(maxsize=16)
def _spread(model: Same, ranks: int, tp: int, barriers: int) -> SpreadModel:
    """One object for one question: what is known of its layers is known by their functions."""
    return spread(model.value, ranks, tp=tp, barriers=barriers)


def barriers(vocabulary: str) -> int:
    """Of a step of spread vocabulary layers, by the setting."""
    return 1 if vocabulary == "spread" else 2


_SENT = 0.1
"""Of a stage's forward: the time that an order of spread vocabulary layers leaves for a transfer."""


def stage_planner(
    pipe: PipelineConfig,
    model: Model,
    microbatch_size: int,
    processes: Processes | None = None,
    known: dict[Any, Any] | None = None,
) -> Planner:
    """Plans cut as ``pipe.cut`` says. Costs of layers are taken once; the first of several ``processes`` measures for all.
    ``known``: FLOPs of layers, shared with other planners."""
    cut, model = pipe.cut, spread_over(pipe, model)
    size = microbatch_size // pipe.dp  # what one device sees, as far as costs go
    if cut == "measured":
        processes = processes or SingleProcess()
        own = measured_layer_costs(model, size) if processes.mine == 0 else ()
        costs, source = tuple(processes.broadcast("layer costs", own)), "measured"
    else:
        costs, source = analytic_layer_costs(model, size, known), "analytic"

    def plan(num_stages: int, edges: Edges | None = None) -> StagePlan:
        if isinstance(model, SpreadModel):
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
            told = "" if edges is None else "; families of schedules, such as 1f1b, take layers of any graph"
            raise StageError(f"{error}{told}") from None

    return plan


def _around_trunk(model: SpreadModel, num_stages: int, given: Any, costs: Sequence[float]) -> list[int]:
    """Where the second and later stages start, of so many: each part of a vocabulary layer is one, and the loss; those of the
    layers between are cut as ``given`` or by costs."""
    trunk = model.trunk
    layers = [replace(layer, takes=None) for layer in model.layers[trunk.start : trunk.stop]]
    if isinstance(given, tuple):
        ranges = cut_at(layers, given)
    else:
        sent = getattr(costs, "boundary_bytes", (0,) * len(costs))
        own = LayerCosts(costs[trunk.start : trunk.stop], sent[trunk.start : trunk.stop])
        ranges = cut(layers, num_stages - 2 * model.parts - 1, own)
    inner = [trunk.start + first for first, _ in ranges]
    return [*range(1, trunk.start), *inner, *range(trunk.stop, len(model.layers))]


def is_schedule_file(schedule: str) -> bool:
    """Whether ``schedule`` is the path of a file, and no family's name."""
    return Path(schedule).suffix in SUFFIXES


def read_checked(path: str | Path) -> Schedule:
    """The schedule in a file.

    Raises:
        ScheduleError: it can't be read, or breaks a rule; names the file.
    """
    schedule = read_schedule(path)
    if problems := [f"{path}: {problem}" for problem in find_problems(schedule)]:
        raise ScheduleError("; ".join(problems), problems)
    return schedule


def choose(
    pipe: PipelineConfig, model: Model, planner: Planner, given: Schedule | None = None
) -> tuple[Schedule, StagePlan]:
    """The schedule of ``pipe``, or ``given``, and the plan of its stages.

    Whatever has stages in a chain takes a model of any graph: its order has each stage after all before it in the chain, more
    than any graph asks for. Its stages then wait for those alone whose results they take.

    Raises:
        ScheduleError, ConfigError, StageError: as :func:`build_schedule` and ``planner``.
    """
    made = given or build_schedule(pipe, lambda *cut: [s.cost for s in planner(*cut).stages], model.span)
    placement, model = made.placement, spread_over(pipe, model)
    plan = planner(made.num_stages, None if placement.is_chain else placement.edges)
    edges = cut_edges(taken_by(model.layers), plan.cut)
    if not placement.is_chain:
        if edges != tuple(sorted(placement.edges)):
            raise ScheduleError(
                f"schedule {made.name!r} has the edges {arrows(placement.edges)} between stages, and the cut, by what its "
                f"layers take, {arrows(edges)}: "
                "start stages where branches start"
            )
        return made, plan
    if placement.num_flows > 1 and edges != placement.edges:
        raise ScheduleError(
            f"schedule {made.name!r} has {placement.num_flows} flows, which chains of stages can have, and this model's stages "
            "are none: use one with a single flow, such as 1f1b"
        )
    return with_edges(made, edges), plan


def with_edges(schedule: Schedule, edges: Edges) -> Schedule:
    """``schedule`` with other edges between its stages, whose order allows them."""
    return replace(schedule, placement=replace(schedule.placement, edges=edges))


def build_schedule(pipe: PipelineConfig, stage_costs: Callable[..., Sequence[float]], span: int = 1) -> Schedule:
    """The schedule of ``pipe``: a family's, one by rules, or a function's, with the stages' relative costs; or a file's.

    ``stage_costs(n, edges)``: relative forward cost of each stage when the model is cut into n, with these edges if they are
    given. ``span``: how many microbatches the loss takes at once.

    Raises:
        ScheduleError: the family refuses these sizes or that span, nothing can go on under the rules, or what was read or made
            is wrong.
        ConfigError: what was read or made is for other sizes.
    """
    if pipe.schedule == "towers":
        placement, by_rank = towers_of(pipe.towers)
        placement = with_span(placement, {placement.num_stages - 1: span})
        known = relative_costs(stage_costs(placement.num_stages, placement.edges))
        return replace(traverse(placement, pipe.microbatches, by_rank, known), name="towers")
    if pipe.vocabulary != "ends" and not is_schedule_file(pipe.schedule):
        return _with_vocabulary(pipe, stage_costs)
    stages = len(pipe.cut) + 1 if isinstance(pipe.cut, tuple) else pipe.ranks * pipe.chunks
    costs = None if is_schedule_file(pipe.schedule) else relative_costs(stage_costs(stages))
    if costs is None or ":" in pipe.schedule:
        schedule = read_checked(pipe.schedule) if costs is None else made_by_function(pipe.schedule, pipe, costs)
        for what, have, want in (
            ("ranks", schedule.num_ranks, pipe.ranks),
            ("microbatches", schedule.num_microbatches, pipe.microbatches),
            *([("chunks", schedule.num_chunks, pipe.chunks)] if schedule.placement.is_chain else []),
        ):
            if have != want:
                raise ConfigError(f"{pipe.schedule} has {have} {what}, and pipeline.{what} is {want}: make them equal")
        return schedule
    if span > 1 and pipe.schedule != "traverse":
        raise ScheduleError(
            f"the loss takes {span} microbatches at once, and the stages of {pipe.schedule!r} one: set pipeline.schedule to "
            "'towers' or 'traverse'"
        )
    return _ordered(pipe, costs, span)


def _ordered(pipe: PipelineConfig, costs: CostProfile, span: int = 1) -> Schedule:
    """An order by rules where ``pipe`` asks for them, else of its family."""
    if pipe.schedule == "traverse":
        return traversed(pipe, costs, span)
    return generate(pipe.schedule, pipe.ranks, pipe.microbatches, family_chunks(pipe), costs, pipe.memory_limit)


def _with_vocabulary(pipe: PipelineConfig, stage_costs: Callable[..., Sequence[float]]) -> Schedule:
    """The order of ``pipe.schedule`` with the passes of spread vocabulary layers."""
    if problem := joint_problem(pipe):
        raise ConfigError(problem)
    if pipe.vocabulary == "joint":
        return generate("vocab-1f1b-joint", pipe.ranks, pipe.microbatches)
    if pipe.schedule == "traverse":
        chain = placement_named(pipe.traverse.placement, pipe.ranks, pipe.chunks)
    else:
        chain = family_named(pipe.schedule).placement(pipe.ranks, pipe.chunks)
    placement = with_vocabulary(chain, barriers=barriers(pipe.vocabulary))
    costs = relative_costs(stage_costs(placement.num_stages))
    costs = replace(costs, link=Link(_SENT * sum(costs.f_s[s] for s in placement.trunk) / len(placement.trunk)))

    def base(microbatches: int, known: CostProfile) -> Schedule:
        return _ordered(replace(pipe, microbatches=microbatches, memory_limit=None), known)

    name = f"vocab-{pipe.schedule}" + ("-2" if barriers(pipe.vocabulary) == 2 else "")
    return spread_vocabulary(name, base, placement, pipe.microbatches, costs)


def family_chunks(pipe: PipelineConfig) -> int | None:
    """Chunks a rank, where ``pipe.schedule`` is a family that takes them."""
    family = FAMILIES.get(pipe.schedule)
    return pipe.chunks if family is not None and "chunks" in family.options else None


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
    draft: Schedule,
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
    """The stages of ``plan`` on ``devices``, traced and split, each compiled when it first runs, in the order that
    :func:`final_order` makes of ``draft``; costs are FLOP counts.

    Raises:
        ConfigError, ScheduleError, StageError, ProgramError: what is wrong, and what would work.
    """
    if pipe.vocabulary != "ends" and processes is not None and processes.number > 1:
        raise ConfigError(
            f"pipeline.vocabulary={pipe.vocabulary} runs in one process: a checkpoint puts the parts of all ranks together"
        )
    assembly = Assembly.of(
        model,
        draft.placement,
        microbatch_size=microbatch_size,
        boundaries=plan,
        devices=devices,
        compute_dtype=jnp.dtype(dtype),
        recompute=pipe.recompute,
        offload=offload,
        dp=pipe.dp,
        tp=shards_of(pipe),
        braid=bool(pipe.passes.braid),
        processes=processes,
        transport=transport,
    ).with_ops(draft)
    for remark in assembly.remarks:
        progress(remark)
    costs = assembly.flop_costs
    return Pipeline.over(assembly, final_order(pipe, draft, costs, [s.cost for s in plan.stages], progress, split))


def shards_of(pipe: PipelineConfig) -> TensorParallel:
    """How the layers of a rank divide their work."""
    sharding = pipe.sharding
    return TensorParallel(pipe.tp, sharding.sequence_parallel, sharding.fused_residual, pipe.cp, sharding.cp_method)


def final_order(
    pipe: PipelineConfig,
    draft: Schedule,
    costs: CostProfile,
    stage_costs: Sequence[float],
    progress: Progress,
    split: bool = False,
) -> Schedule:
    """The order of ``pipe`` for stages of these ``costs``, where ``draft`` was chosen before they were there, by
    ``stage_costs`` alone. It is ``draft`` itself, unless

    * stages have tensor-parallel collectives: the families of `stp.txt` choose their warm-up by them, others leave room for
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
    family, schedule = FAMILIES.get(pipe.schedule) if pipe.vocabulary == "ends" else None, draft

    def made_by(fields: Sequence[str]) -> Schedule:
        """Chosen anew, as the draft was but for these fields of ``costs``."""
        known = replace(relative_costs(stage_costs), **{name: getattr(costs, name) for name in fields})
        return with_edges(_ordered(pipe, known), draft.placement.edges)

    def peak(schedule: Schedule) -> float:
        return max(simulate(schedule, costs).peak_activations)

    if any(costs.tp_comm_s) and family is not None and "costs" in family.options:
        schedule = made_by(_TIMED)
    if limit < math.inf and not at_most(needed := peak(schedule), limit):
        if family is None:
            raise ScheduleError(
                f"schedule {schedule.name!r} holds up to {needed:.4g} activations on a rank, more than the memory limit of "
                f"{limit:g}: raise the limit, or use another schedule"
            )
        progress(f"W keeps more than F saved: {needed:.3g} activations would be live, a new order keeps to {limit:g}")
        schedule = made_by(_HELD)
    if pipe.passes.separate_gradients:
        schedule = separate_gradients(schedule, costs, memory_limit=limit)
    if pipe.passes.braid == "adjacent" and any(costs.tp_comm_s):
        schedule = braid(schedule, costs, memory_limit=limit)
    if (split or pipe.passes.split_backwards == "always") and fused_backwards(schedule):
        apart = split_backwards(schedule)
        if limit == math.inf or at_most(peak(apart), limit):
            schedule = apart
    return schedule


_HELD = ("residual_bytes", "w_residual_bytes", "offloadable_bytes")
_TIMED = ("f_s", "b_s", "w_s", "bw_s", "tp_comm_s", "tp_collectives", "source")
