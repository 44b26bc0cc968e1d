"""From a :class:`~jaxpipe.train.config.TrainConfig` to the things a run is made of: data, model, schedule, pipeline, step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxpipe import profile
from jaxpipe.errors import ConfigError, ScheduleError
from jaxpipe.mesh import TensorParallel
from jaxpipe.program.liveness import host_bytes
from jaxpipe.runtime.offload import OffloadOptions
from jaxpipe.runtime.pipeline import Pipeline
from jaxpipe.schedule import FAMILIES, CostProfile, Schedule, check_schedule, generate, read_schedule
from jaxpipe.stage.layer import Model
from jaxpipe.stage.plan import StagePlan, analytic_layer_costs, plan_stages
from jaxpipe.stage.reference import init_params, resolve_model
from jaxpipe.train.braiding import with_collectives
from jaxpipe.train.config import TrainConfig
from jaxpipe.train.corpus import load_corpus
from jaxpipe.train.data import TokenDataset
from jaxpipe.train.devices import device_errors
from jaxpipe.train.metrics import format_bytes
from jaxpipe.train.optimizer import adamw, learning_rate
from jaxpipe.train.replan import with_replannable_start
from jaxpipe.train.step import TrainStep
from jaxpipe.train.tokenizers import load_tokenizer

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A run of which nothing is compiled yet; what a user can get wrong in a config has been checked. ``plan`` says which
    layers are on which stage."""

    config: TrainConfig
    dataset: TokenDataset
    model: Model
    schedule: Schedule
    plan: StagePlan


@dataclass(frozen=True, slots=True)
class Setup:
    """A run, ready to start."""

    config: TrainConfig
    dataset: TokenDataset
    model: Model
    plan: StagePlan
    pipeline: Pipeline
    step: TrainStep


def load_dataset(config: TrainConfig) -> TokenDataset:
    """Tokenise and split the data of ``config``.

    Raises:
        DataError: it can't be read or is too small.
    """
    data = config.data
    tokenizer = load_tokenizer(data.tokenizer)
    corpus = load_corpus(data.path, tokenizer, data.suffixes)
    return TokenDataset.split(corpus, tokenizer, data.holdout, data.split)


def build_model(config: TrainConfig, vocab_size: int) -> Model:
    """The model of ``config``. Its function gets ``seq_len`` and ``vocab_size`` of the data, unless the options set a larger
    vocabulary.

    Raises:
        ConfigError: the target or an option is wrong, or the model can't take the data's tokens.
    """
    options = {"vocab_size": vocab_size, "seq_len": config.data.seq_len, **config.model.options}
    model = resolve_model(config.model.target, options)
    if model.vocab_size < vocab_size:
        raise ConfigError(
            f"model.options.vocab_size={model.vocab_size}, but the tokenizer makes {vocab_size} different ids"
        )
    if model.seq_len < config.data.seq_len:
        raise ConfigError(f"model.options.seq_len={model.seq_len} is less than data.seq_len={config.data.seq_len}")
    return model


def stored_params(model: Model) -> dict[str, Any]:
    """Shapes and dtypes of a model's parameters in a checkpoint: floats are float32, whatever the model creates."""

    def master(a: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(a.shape, jnp.float32 if jnp.issubdtype(a.dtype, jnp.floating) else a.dtype)

    return jax.tree.map(master, jax.eval_shape(partial(init_params, model), 0))  # type: ignore[no-any-return]


def microbatch_size(config: TrainConfig) -> int:
    """Sequences in a microbatch, over all data-parallel devices of a rank: consecutive rows of a step's batch. Which
    sequences a step sees depends on ``run.batch`` alone, not on how the batch is divided."""
    return config.run.batch // config.pipeline.microbatches


def stage_planner(config: TrainConfig, model: Model) -> Callable[[int], StagePlan]:
    """A function from the number of stages to the plan, cut as ``pipeline.cut`` says. Costs of layers are taken once."""
    cut = config.pipeline.cut
    size = microbatch_size(config) // config.pipeline.dp  # what one device sees, as far as costs go
    if cut == "measured":
        costs, source = profile.measured_layer_costs(model, size), "measured"
    else:
        costs, source = analytic_layer_costs(model, size), "analytic"

    def plan(num_stages: int) -> StagePlan:
        if isinstance(cut, tuple):
            return plan_stages(model, boundaries=cut, costs=costs, costs_from=source)
        return plan_stages(model, num_stages, costs=costs, costs_from=source)

    return plan


def build_schedule(config: TrainConfig, stage_costs: Callable[[int], Sequence[float]]) -> Schedule:
    """The schedule of ``pipeline``: a family's, with the stages' relative costs, or a file's.

    ``stage_costs(n)``: relative forward cost of each stage when the model is cut into n.

    Raises:
        ScheduleError: the family refuses these sizes, or the file is wrong.
        ConfigError: the file is for other sizes than the config's.
    """
    pipe = config.pipeline
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


def prepare(config: TrainConfig) -> Prepared:
    """Read the data, make the model, choose the schedule and cut the model.

    Raises:
        ConfigError, DataError, ScheduleError, StageError: what is wrong, and what would work.
    """
    dataset = load_dataset(config)
    model = build_model(config, dataset.tokenizer.vocab_size)
    planner = stage_planner(config, model)
    schedule = build_schedule(config, lambda n: [s.cost for s in planner(n).stages])
    plan = planner(schedule.num_stages)
    return Prepared(config, dataset, model, schedule, plan)


def compile_setup(prepared: Prepared, devices: Sequence[jax.Device], progress: Progress, *, repeats: int = 3) -> Setup:
    """Trace, split, compile and time the stages, ``repeats`` calls a function; the prediction rests on these times.
    ``progress`` is told what is being done."""
    config = prepared.config
    pipeline = compile_pipeline(prepared, devices, progress)
    with device_errors("setting up"):
        if moved := host_bytes(pipeline.programs):
            progress(f"offloads at most {format_bytes(moved)} at a time to host memory")
        progress("timing each stage alone")
        pipeline = pipeline.with_costs(pipeline.measure_costs(repeats=repeats))
        step = step_of(config, pipeline)
        pipeline = pipeline.with_costs(step.costs_with_state())
        step = step.with_pipeline(pipeline)
        pipeline.warm_up()
        progress(f"{step.memory_report()}")
    return Setup(config, prepared.dataset, prepared.model, prepared.plan, pipeline, step)


def compile_pipeline(prepared: Prepared, devices: Sequence[jax.Device], progress: Progress) -> Pipeline:
    """Trace and split the stages, each compiled when it first runs; costs are FLOP counts."""
    config, schedule = prepared.config, prepared.schedule
    progress(prepared.dataset.describe())
    progress(f"{prepared.plan}")
    progress(f"tracing, splitting and compiling {schedule.num_stages} stages for schedule {schedule.name}")
    with device_errors("setting up"):
        pipeline = Pipeline.build(
            prepared.model,
            schedule,
            microbatch_size=microbatch_size(config),
            boundaries=prepared.plan,
            devices=devices,
            compute_dtype=jnp.dtype(config.run.dtype),
            recompute=config.pipeline.recompute,
            offload=offload_options(config),
            dp=config.pipeline.dp,
            tp=tensor_parallel(config),
            braid=config.pipeline.braid,
        )
        pipeline = with_collectives(config, pipeline)
        pipeline = within_memory_limit(config, pipeline, [s.cost for s in prepared.plan.stages], progress)
        return with_replannable_start(config, pipeline)


def step_of(config: TrainConfig, pipeline: Pipeline) -> TrainStep:
    """The training step of ``config`` over ``pipeline``. Compiles nothing yet."""
    zero1 = config.pipeline.zero1
    return TrainStep(pipeline, optimizer_of(config), clip_norm=config.optimizer.clip_norm, zero1=zero1)


def tensor_parallel(config: TrainConfig) -> TensorParallel:
    """How the layers of a rank divide their work."""
    pipe = config.pipeline
    return TensorParallel(pipe.tp, sequence=pipe.sequence_parallel, fused_residual=pipe.fused_residual)


def offload_options(config: TrainConfig) -> OffloadOptions:
    """What ``[offload]`` says, in bytes."""
    o = config.offload
    return OffloadOptions(o.fraction, None if o.host_memory_gb is None else o.host_memory_gb * 1e9, o.fallback)


def within_memory_limit(
    config: TrainConfig, pipeline: Pipeline, stage_costs: Sequence[float], progress: Progress
) -> Pipeline:
    """``pipeline``, or if its stages' real bytes break ``pipeline.memory_limit``, the same with an order made for these bytes.

    What waits for W may be larger than what F saved (with recomputation it often is), which is known once stages are split.
    Depends on shapes only, so a resumed run gets the same order.

    Raises:
        ScheduleError: one microbatch alone needs more than the limit.
    """
    pipe, limit = config.pipeline, config.pipeline.memory_limit
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


def build(config: TrainConfig, devices: Sequence[jax.Device], progress: Progress, *, repeats: int = 3) -> Setup:
    """:func:`prepare`, then :func:`compile_setup`."""
    return compile_setup(prepare(config), devices, progress, repeats=repeats)


def optimizer_of(config: TrainConfig) -> optax.GradientTransformation:
    """The optimizer that ``config`` describes."""
    o = config.optimizer
    schedule: Any = learning_rate(o.lr, o.warmup_steps, config.run.steps, o.min_lr_ratio)
    return adamw(schedule, betas=o.betas, eps=o.eps, weight_decay=o.weight_decay)
