"""Make what a run needs of its :class:`~jaxpipe.train.config.TrainConfig`: data, model, schedule, pipeline, step."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np

from jaxpipe.errors import ConfigError
from jaxpipe.program.ir import host_bytes
from jaxpipe.runtime.pipeline import Pipeline
from jaxpipe.runtime.processes import Processes
from jaxpipe.runtime.transfer import OffloadOptions
from jaxpipe.schedule import Schedule, simulate
from jaxpipe.schedule.files import from_schedule, to_schedule
from jaxpipe.schedule.passes.braid import costly_backwards, fused_stages, with_fused_stages
from jaxpipe.schedule.timeline import at_most
from jaxpipe.stage.functions import StageFunctions
from jaxpipe.stage.jaxprs import PEERS, expert_flops, is_ragged
from jaxpipe.stage.model.layer import Model
from jaxpipe.stage.model.params import expert_leaves, routed_flops
from jaxpipe.stage.model.plan import StagePlan, analytic_layer_costs, param_avals
from jaxpipe.stage.model.reference import resolve_model
from jaxpipe.text import format_bytes, format_seconds
from jaxpipe.train.assemble import Progress, ScheduleDraft, assemble, choose, order_for_link, spread_over, stage_planner
from jaxpipe.train.checkpoints import which_model
from jaxpipe.train.config import TrainConfig
from jaxpipe.train.corpora.datasets import MixedDataset, data_remarks, load_dataset
from jaxpipe.train.corpora.tokenizers import continued_tokenizer
from jaxpipe.train.data import Dataset, TokenDataset
from jaxpipe.train.devices import device_errors, limit_line, limit_remark
from jaxpipe.train.metrics import format_gain
from jaxpipe.train.settings.sections import OffloadConfig, PipelineConfig
from jaxpipe.train.step import TrainStep
from jaxpipe.train.trainer import Trainer
from jaxpipe.train.update.optimizer import DecayRule, optimizer_of, optimizer_remarks, rate_of


@dataclass(frozen=True)
class Prepared:
    """A run of which nothing is compiled yet; what a user can get wrong in a config has been checked. ``draft`` is the order
    before stages are traced, ``plan`` says which layers are on which stage."""

    config: TrainConfig
    dataset: Dataset
    model: Model
    draft: ScheduleDraft
    plan: StagePlan

    @property
    def schedule(self) -> Schedule:
        return self.draft.schedule

    @cached_property
    def program(self) -> dict[str, str]:
        """The digest of what the model computes, by which checkpoints know it again."""
        return which_model.model_digest(self.model)

    @cached_property
    def provenance(self) -> dict[str, Any]:
        """The user's files and JAX settings that checkpoints keep beside the digest."""
        return which_model.provenance(self.config)


def with_mask(config: TrainConfig, vocab_size: int, *, has_chats: bool) -> TrainConfig:
    """``config`` with a ``data.mask`` in place of ``auto`` where chats are packed whole: ``document`` if the model can tell
    documents apart, else ``causal``."""
    if config.data.reading.mask != "auto" or not has_chats:
        return config
    causal, document = (config.changed({"data.reading.mask": mask}) for mask in ("causal", "document"))
    with suppress(ConfigError):  # of a model that has no such option, or others that forbid it
        if "segments" in build_model(document, vocab_size).batch_spec(1):
            return document
    return causal


def build_model(config: TrainConfig, vocab_size: int) -> Model:
    """Return the model of ``config``. Its function gets what it takes of the data's ``seq_len`` and ``vocab_size``, unless the
    options set a larger vocabulary, and ``mask`` where that is ``document``. A model without tokens has neither length nor
    vocabulary.

    Raises:
        ConfigError: the target or an option is wrong, or the model can't take the data's tokens.
    """
    mask = config.data.reading.mask
    masked = {"mask": mask} if mask == "document" else {}
    offered = {"vocab_size": vocab_size, "seq_len": config.data.seq_len}
    model = resolve_model(config.model.target, {**masked, **config.model.options}, offered)
    check_tokens(model, vocab_size, config.data.seq_len)
    return model


def check_tokens(model: Model, vocab_size: int, seq_len: int) -> None:
    """Raise ConfigError if ``model`` can't take tokens of this vocabulary, or sequences of this length."""
    if 0 < model.vocab_size < vocab_size:
        raise ConfigError(
            f"model.options.vocab_size={model.vocab_size}, but the tokenizer makes {vocab_size} different ids"
        )
    if 0 < model.seq_len < seq_len:
        raise ConfigError(f"model.options.seq_len={model.seq_len} is less than data.seq_len={seq_len}")


def read_by(model: Model, dataset: Dataset, seq_len: int) -> Dataset:
    """Return ``dataset`` as ``model`` reads it, in sequences of ``seq_len``.

    Raises:
        DataError: it lacks an array, or has one of another shape or dtype.
    """
    specs = {name: (aval.shape[1:], aval.dtype) for name, aval in model.batch_spec(1).items()}
    return dataset.for_model(specs, seq_len)


def prepare(
    config: TrainConfig, processes: Processes | None = None, origin: Mapping[str, Any] | None = None
) -> Prepared:
    """Read the data, make the model, choose the schedule and cut the model. Of several ``processes`` the first one chooses the
    schedule: a search may end elsewhere in each. ``origin``: what the checkpoint that the run goes on from says of it.

    Raises:
        ConfigError, DataError, ScheduleError, StageError: what is wrong, and what would work.
    """
    tokenizer = None if origin is None else continued_tokenizer(origin.get("tokenizer"), config.data.tokenizer)
    dataset = load_dataset(config, tokenizer)
    vocab_size = dataset.tokenizer.vocab_size
    has_chats = isinstance(dataset, TokenDataset | MixedDataset) and dataset.has_chats
    config = with_mask(config, vocab_size, has_chats=has_chats)
    model = spread_over(config.pipeline, build_model(config, vocab_size))
    dataset = read_by(model, dataset, config.data.seq_len)
    planner = stage_planner(config.pipeline, model, config.microbatch_size, processes)
    # Followers wait for the schedule before they plan: they cut the model as process 0 did, for the same stages.
    chosen = None
    if processes is not None and processes.mine:
        chosen = from_schedule(processes.broadcast("schedule", ""))
    draft, plan = choose(config.pipeline, model, planner, chosen)
    if processes is not None and processes.mine == 0:
        processes.broadcast("schedule", to_schedule(draft.schedule))
    return Prepared(config, dataset, model, draft, plan)


def compile_setup(
    prepared: Prepared,
    devices: Sequence[jax.Device],
    progress: Progress,
    *,
    repeats: int = 3,
    fused: Collection[int] | None = None,
    processes: Processes | None = None,
    decay: DecayRule = "role",
) -> Trainer:
    """Trace, split, compile and time the stages, ``repeats`` calls a function; the prediction rests on these times.
    ``progress`` is told what is being done. ``fused``: the stages whose BW stay; by default ``pipeline.split_backwards``
    decides. ``decay``: what decides which parameters decay."""
    for remark in optimizer_remarks(prepared.config, prepared.model, decay):
        progress(remark)
    step = step_over(prepared.config, compile_pipeline(prepared, devices, progress, processes), decay)
    trainer = Trainer.over(step, prepared.config.run.seed)
    with device_errors("setting up", lambda: trainer.train_step.memory_report(workspace=False)):
        if moved := host_bytes(trainer.pipeline.programs):
            progress(f"offloads at most {format_bytes(moved, binary=True)} at a time to host memory")
        devices_here = [trainer.pipeline.submeshes[rank].devices.flat[0] for rank in trainer.pipeline.ownership.ranks]
        if remark := limit_remark(lambda: trainer.train_step.memory_report(workspace=False), devices_here):
            progress(remark)
        progress("timing each stage alone")
        trainer = _with_known_link(trainer.measured(repeats), prepared, progress, processes)
        trainer = _with_cheaper_backwards(trainer, prepared.config.pipeline, progress, fused)
        progress(f"{trainer.train_step.memory_report()}")
    return trainer


def _with_known_link(trainer: Trainer, prepared: Prepared, progress: Progress, processes: Processes | None) -> Trainer:
    """Return the trainer with O and L where the measured link to the host wants them, and say what copies still cost."""
    now, costs = trainer.schedule, trainer.pipeline.costs
    if not now.offloads:
        return trainer
    schedule = order_for_link(prepared.config.pipeline, prepared.draft, now, costs)
    # A search may end elsewhere in each process.
    if processes is not None and processes.number > 1:
        schedule = from_schedule(processes.broadcast("order", to_schedule(schedule)))
    free = replace(costs, offload_s=(0.0,) * costs.num_stages, load_s=(0.0,) * costs.num_stages)
    before = after = simulate(now, costs)
    if schedule.rows != now.rows and (moved := trainer.with_schedule(schedule)).fits_devices():
        trainer, after = moved, simulate(schedule, costs)
        peaks = f"{max(after.peak_activations):.3g} activations at most, not {max(before.peak_activations):.3g}"
        times = f"a step of {format_seconds(after.makespan)}, not {format_seconds(before.makespan)}"
        progress(f"O and L moved for the measured link: {times}; {peaks}")
    # Of the order that runs: one that did not fit would compare its own copies with the step of another.
    step_s, free_s = after.makespan, simulate(trainer.schedule, free).makespan
    if step_s > 1.01 * free_s:
        progress(f"copies to and from the host are predicted to take {1 - free_s / step_s:.0%} of a step")
    return trainer


def _with_cheaper_backwards(
    trainer: Trainer, pipe: PipelineConfig, progress: Progress, fused: Collection[int] | None
) -> Trainer:
    """B and then W in place of BW on the stages where that takes clearly less time, or on those that are not ``fused``; nowhere
    if the memory limit does not allow it."""
    now, costs = trainer.schedule, trainer.pipeline.costs
    fused_now = fused_stages(now)
    split = costly_backwards(now, costs) if fused is None else [s for s in fused_now if s not in fused]
    if pipe.passes.split_backwards != "auto" or not split:
        return trainer
    schedule = with_fused_stages(now, set(fused_now).difference(split))
    if pipe.memory_limit is not None and not at_most(
        max(simulate(schedule, costs).peak_activations), pipe.memory_limit
    ):
        return trainer
    saved = sum(costs.bw_s[s] - costs.b_s[s] - costs.w_s[s] for s in split) / sum(costs.bw_s[s] for s in split)
    why = f"{format_gain(saved)} time" if fused is None else "as in the run so far"
    progress(f"stage {', '.join(map(str, split))}: B and then W in place of BW: {why}")
    return trainer.with_schedule(schedule)


def compile_pipeline(
    prepared: Prepared, devices: Sequence[jax.Device], progress: Progress, processes: Processes | None = None
) -> Pipeline:
    """Trace and split the stages, each compiled when it first runs; costs are FLOP counts."""
    config, schedule = prepared.config, prepared.schedule
    for line in (prepared.dataset.describe(), *data_remarks(prepared.dataset)):
        progress(line)
    progress(f"{prepared.plan}")
    if line := limit_line(jax.local_devices()[0]):
        progress(line)
    progress(f"tracing, splitting and compiling {schedule.num_stages} stages for schedule {schedule.name}")
    with device_errors("setting up"):
        return assemble(
            prepared.model,
            prepared.draft,
            prepared.plan,
            config.pipeline,
            microbatch_size=config.microbatch_size,
            dtype=config.run.dtype,
            offload=offload_options(config.pipeline.offload),
            devices=devices,
            progress=progress,
            split=config.run.replan.enabled and config.run.replan.split,
            processes=processes,
            transport=config.run.machine.transport,
        )


def step_over(config: TrainConfig, pipeline: Pipeline, decay: DecayRule = "role") -> TrainStep:
    """Return the step of ``config`` over ``pipeline``. Compiles nothing yet."""
    return TrainStep(
        pipeline,
        optimizer_of(config, pipeline.model, decay),
        clip_norm=config.optimizer.clip_norm,
        learning_rate=rate_of(config.optimizer, config.run.steps),
        zero1=config.pipeline.sharding.zero1,
        reduction=config.pipeline.sharding.reduction,
        post_validation=config.pipeline.passes.post_validation,
    )


def step_flops(prepared: Prepared, stages: Sequence[StageFunctions]) -> tuple[float, float]:
    """Return three times the products of the forward of a step: as ``stages`` compute them, which leaves out what an attention
    kernel's mask does, but of experts those of the rows that are sent to them, not of their buffers; and with attention counted
    whole (:data:`~jaxpipe.stage.jaxprs.PEERS`)."""
    config, layers = prepared.config, prepared.model.layers
    pipe, detached = config.pipeline, prepared.schedule.placement.detached
    # the F of a detached stage makes a part of the backward; its W is one product, as the forward is
    forward = sum(f.flops["W" if s in detached else "F"] for s, f in enumerate(stages)) * pipe.mesh.num_devices
    buffers = sum(expert_flops(f.functions["F"].jaxpr, f.layout.expert_sizes(layers)) for f in stages)
    experts = expert_leaves(layers, param_avals(prepared.model)) if buffers else []
    idle = buffers * pipe.mesh.num_devices - routed_flops(experts) * config.microbatch_size * config.data.seq_len
    # on one device no buffer of ragged products is larger than what comes
    idle_alone = 0.0 if any(is_ragged(f.functions["F"].jaxpr) for f in stages) else idle
    layer_costs = analytic_layer_costs(prepared.model.stored, config.microbatch_size, attention=PEERS)
    passes = 3.0 * pipe.microbatches
    return passes * (forward - idle), passes * (sum(layer_costs) - idle_alone)


def offload_options(offload: OffloadConfig) -> OffloadOptions:
    """Return what ``pipeline.offload`` says, in bytes."""
    gigabytes = offload.host_memory_gb
    return OffloadOptions(offload.fraction, None if gigabytes is None else gigabytes * 1e9, offload.fallback)


def held_out_microbatches(prepared: Prepared) -> Mapping[str, np.ndarray]:
    """Return what every evaluation of a run looks at: arrays ``[count, microbatch size, sequence]``; empty if there is none.

    Raises:
        DataError: nothing is held out.
    """
    config, m = prepared.config, prepared.config.pipeline.microbatches
    if not config.run.eval_every:
        return {}
    size, span = config.microbatch_size, prepared.model.span
    groups = prepared.dataset.held_out_batches(
        size * span, config.data.seq_len, config.run.output.eval_batches * m // span
    )
    rows = {name: np.concatenate([group[name] for group in groups]) for name in groups[0]}
    return {name: array.reshape(-1, size, *array.shape[1:]) for name, array in rows.items()}
