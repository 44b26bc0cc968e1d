"""``jaxpipe.Trainer``: a model, an optimizer and a schedule, ready to train over a pipeline from a Python script.

It chooses the schedule, cuts the model, traces and splits the stages (:mod:`jaxpipe.train.assemble`), puts them on devices and
adds the optimizer (:mod:`jaxpipe.train.step`); then it steps, evaluates, predicts, saves and restores. ``jaxpipe train`` goes
the same way. :file:`GUIDE.md` beside this file has a complete script.
"""

from __future__ import annotations

import copy
import itertools
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, cast

import jax
import numpy as np
import optax

from jaxpipe import __version__
from jaxpipe.axes import RankMesh, rank_mesh
from jaxpipe.errors import CheckpointError, ConfigError
from jaxpipe.files import Closing
from jaxpipe.runtime.batches import THREEFRY, in_microbatches
from jaxpipe.runtime.pipeline import Pipeline
from jaxpipe.runtime.processes import Processes, SingleProcess
from jaxpipe.runtime.transfer import OFFLOAD_ALL, OffloadOptions
from jaxpipe.schedule import Schedule, Timeline, generate
from jaxpipe.schedule.families.family import Family, family_named
from jaxpipe.stage.model.layer import Layer, LeafRule, Model, Params, check_dtype, with_leaf_rules
from jaxpipe.stage.model.params import by_path, nested
from jaxpipe.stage.model.plan import StagePlan, param_avals
from jaxpipe.stage.model.reference import init_params
from jaxpipe.stage.model.vocabulary import VocabParallelModel
from jaxpipe.text import format_bytes, format_count
from jaxpipe.train.assemble import (
    ScheduleDraft,
    assemble,
    choose,
    order_for_link,
    spread_over,
    stage_planner,
    with_edges,
)
from jaxpipe.train.checkpoint import Checkpoint, CheckpointStore, newest, read_manifest, undamaged
from jaxpipe.train.checkpoints import which_model
from jaxpipe.train.corpora.tokenizers import Tokenizer, load_tokenizer
from jaxpipe.train.data import Data
from jaxpipe.train.devices import device_errors, limit_remark
from jaxpipe.train.run.agreement import agree_on_batch, agree_on_training, find_trainer_devices, lay_out
from jaxpipe.train.run.compiling import saying, to_stderr, use_compile_cache
from jaxpipe.train.schedule_source import is_schedule_file, made_by_function, read_checked, relative_costs, source_of
from jaxpipe.train.settings.sections import ModelConfig, PassesConfig, PipelineConfig, ShardingConfig
from jaxpipe.train.state import StepMetrics, TrainState
from jaxpipe.train.step import TrainStep
from jaxpipe.train.update.optimizer import ema_of, with_ema

_FIRST_STEP = "compiling the first step"


class Trainer(Closing):
    """Trains ``model`` over a pipeline.

    Args:
        model: layers in order, the loss last.
        optimizer: any optax transformation of the parameters ``{layer: leaves}``. One that mixes layers (clipping by the norm
            of all gradients, say) is refused.
        schedule: a family by name (``jaxpipe schedules`` lists them), ``module:function``, which makes a schedule, a schedule
            file, or a schedule.
        ranks, microbatches: p and m; needed with the name of a family or a function, else those of the schedule.
        microbatch_size: sequences in a microbatch, over all ``dp`` shards. A step takes ``microbatches · microbatch_size``.
        vocabulary: where embedding and head are, as ``pipeline.vocabulary`` of a config.
        chunks, memory_limit: for families that take them (as in :func:`jaxpipe.schedule.generate`).
        cut: how layers become stages: balanced by ``"analytic"`` FLOPs or by ``"measured"`` seconds; the layers (indices or
            names) at which the second and later stages start; or a stage plan.
        dtype: of parameters and activations in the compute: float32, bfloat16, or under x64 float64; master parameters are
            float32 (float64 if this is).
        recompute: a policy (:mod:`jaxpipe.stage.split.recompute`), or one a stage.
        update_arguments: of the optimizer's update by name, numbers or arrays, beside ``value``, the mean loss, which it gets
            without asking; :meth:`step` may give other values.
        clip_norm: bound on the norm of the whole gradient; 0 for none.
        learning_rate: of ``optimizer``, a number or a schedule of the step; only reported, as
            :attr:`StepMetrics.learning_rate`. That of ``optax.inject_hyperparams`` needs no telling.
        ema: decay of an exponential moving average of the parameters, kept with the optimizer's state; None for none.
        dp, ep, cp, tp, zero1: devices of each rank that share a microbatch's sequences, those of them that share a layer's
            experts, devices that share each sequence's positions, and its layers' work (``tp`` may be a whole
            :class:`~jaxpipe.axes.RankMesh`); divide the optimizer's state and update over dp.
        cp_method: how attention is computed where positions are divided (:data:`jaxpipe.axes.CP_METHODS`).
        reduction: how gradients are added over the devices of a rank: ``"ordered"``, the same bits however these lie in
            processes; or ``"fast"``, as XLA adds them.
        post_validation: ``"off"``, ``"on"`` or ``"auto"``: begin a step before it is known whether the last one's gradient was
            finite and short enough (:mod:`jaxpipe.train.update.post_validation`). The same bits.
        offload, braid: as in :meth:`Pipeline.build`.
        trainable, float32: of (layer name, path), whether a parameter is trained, and whether it stays float32 where
            ``dtype`` is smaller (:func:`jaxpipe.stage.model.layer.with_leaf_rules`).
        seed: of initial parameters, and of the random numbers that layers draw.
        keep_last, keep_best: how many checkpoints stay, the newest and those of the lowest evaluation loss.
        devices: to run on, ``dp · cp · tp`` a rank; else what ``platform`` has: accelerators, or on a machine without any,
            emulated CPU devices.
        processes: what :func:`jaxpipe.join` returned, if several processes run this script: each has its share of the ranks, or
            of their devices, makes the same trainer, takes the same steps and is given the whole batch.
        columns: processes that share a rank, each with an equal part of its devices (0: one, or where there are more processes
            than ranks, as many as there are for each rank).
        target, target_options: ``module:function`` and keyword arguments that made ``model``, which checkpoints keep, so that
            ``eval``, ``generate`` and ``export`` can make it again. Models that come with jaxpipe know theirs.
        compile_cache: where compiled programs are kept for the next start, for this process's whole JAX: ``"auto"``, where JAX
            was told to (``JAX_COMPILATION_CACHE_DIR``), else a folder of this user's in ``~/.cache/jaxpipe``; a folder that is
            yours alone; or ``"off"``, which leaves JAX's settings as they are.
        progress: called with a line, from another thread, every ten seconds while something takes long (compiling mostly), from
            the fifth second on. By default lines go to standard error; None for none.

    Raises:
        ConfigError, ScheduleError, StageError, ProgramError: what is wrong, and what would work.
    """

    _named_origin: ModelConfig | None = None  # what makes the model, as the user says

    _choice: tuple[PipelineConfig, ScheduleDraft, Schedule] | None
    """How the first schedule was chosen, and that schedule."""

    def __init__(
        self,
        model: Model,
        *,
        optimizer: optax.GradientTransformation,
        microbatch_size: int,
        schedule: str | Path | Schedule = "1f1b",
        ranks: int | None = None,
        microbatches: int | None = None,
        chunks: int | None = None,
        vocabulary: Literal["ends", "spread", "spread-2", "joint"] = "ends",
        memory_limit: float | None = None,
        cut: Literal["analytic", "measured"] | Sequence[int | str] | StagePlan = "analytic",
        dtype: Any = "float32",
        recompute: str | Sequence[str] = "none",
        update_arguments: Mapping[str, Any] = MappingProxyType({}),
        clip_norm: float = 0.0,
        learning_rate: float | optax.Schedule | None = None,
        ema: float | None = None,
        dp: int = 1,
        cp: int = 1,
        ep: int = 1,
        cp_method: str = "gather",
        tp: int | RankMesh = 1,
        zero1: bool = False,
        reduction: Literal["ordered", "fast"] = "ordered",
        post_validation: Literal["off", "on", "auto"] = "off",
        offload: OffloadOptions = OFFLOAD_ALL,
        braid: bool = True,
        trainable: LeafRule | None = None,
        float32: LeafRule | None = None,
        seed: int = 0,
        keep_last: int = 3,
        keep_best: int = 1,
        devices: Sequence[jax.Device] | None = None,
        platform: Literal["auto", "cpu", "gpu"] = "auto",
        processes: Processes | None = None,
        columns: int = 0,
        target: str | None = None,
        target_options: Mapping[str, Any] = MappingProxyType({}),
        compile_cache: str | Path = "auto",
        progress: Callable[[str], None] | None = to_stderr,
    ) -> None:
        if not isinstance(model, Model):
            raise ConfigError(
                f"the model is a {type(model).__name__}; want a jaxpipe.Model, which jaxpipe.layers_from_nnx and "
                "layers_from_linen make of a Flax module"
            )
        sizes = {"ranks": ranks, "microbatches": microbatches, "chunks": chunks}
        explicit_sizes = {name: n for name, n in sizes.items() if n is not None}
        counts = {"microbatch_size": microbatch_size, "dp": dp, "ep": ep, "cp": cp, "keep_last": keep_last}
        for name, value in {**counts, **explicit_sizes}.items():
            _whole(name, value)
        for name, value in {"seed": seed, "keep_best": keep_best, "columns": columns}.items():
            _whole(name, value, least=0)
        check_dtype("dtype", dtype)
        if platform not in ("auto", "cpu", "gpu"):
            raise ConfigError(f"platform is {platform!r}; want 'auto', 'cpu' or 'gpu'")
        if compile_cache != "off" and (remark := use_compile_cache(str(compile_cache))) and progress is not None:
            progress(f"warning: {remark}")
        # Before the rules of leaves: what makes the model, and so what a checkpoint is of, does not depend on what is
        # trained.
        source = model
        if trainable is not None or float32 is not None:
            model = with_leaf_rules(model, trainable=trainable, float32=float32)
        mesh = rank_mesh(tp, dp=dp, ep=ep, cp=cp)
        mesh = mesh if cp == 1 else replace(mesh, cp_method=cp_method)
        schedule_value = _given_schedule(schedule)
        all_sizes = _sizes(schedule, schedule_value, explicit_sizes)
        pipe = PipelineConfig(
            ranks=all_sizes["ranks"],
            **cast("Any", mesh.settings),
            microbatches=all_sizes["microbatches"],
            chunks=all_sizes["chunks"],
            schedule=str(schedule) if schedule_value is None else "",
            vocabulary=vocabulary,
            memory_limit=memory_limit,
            recompute=recompute if isinstance(recompute, str) else tuple(recompute),
            cut=_cut_setting(cut),
            sharding=ShardingConfig(cast("Any", mesh.cp_method), mesh.sequence, mesh.fused_residual, zero1, reduction),
            passes=PassesConfig(braid, post_validation=post_validation),
        )
        processes = processes or SingleProcess()
        lay_out(processes, pipe, columns)
        progress = None if processes.mine else progress  # the first one speaks for all
        if devices is None:
            devices = find_trainer_devices(pipe, platform, processes)
        with saying(progress, f"cutting and tracing {model.name}"):
            self._named_origin = None if target is None else which_model.checked_origin(source, target, target_options)
            model = spread_over(pipe, model)
            planner = (
                (lambda *_: cut)
                if isinstance(cut, StagePlan)
                else stage_planner(pipe, model, microbatch_size, processes)
            )
            draft, plan = choose(pipe, model, planner, schedule=schedule_value)
            with device_errors("setting up"):
                pipeline = assemble(
                    model,
                    draft,
                    plan,
                    pipe,
                    microbatch_size=microbatch_size,
                    dtype=dtype,
                    offload=offload,
                    devices=devices,
                    progress=partial(warnings.warn, stacklevel=4),
                    processes=processes,
                )
                train_step = TrainStep(
                    pipeline,
                    optimizer if ema is None else with_ema(optimizer, ema),
                    clip_norm=clip_norm,
                    zero1=zero1,
                    reduction=reduction,
                    post_validation=post_validation,
                    learning_rate=learning_rate,
                    extra=update_arguments,
                )
        self._set_up(train_step, seed, plan=plan, ema=ema, keep_last=keep_last, keep_best=keep_best, progress=progress)
        self._source, self._choice = source, (pipe, draft, self.schedule)
        numbers = {"seed": seed, "clip_norm": clip_norm, "ema": ema, "post_validation": post_validation}
        agree_on_training(processes, numbers, self.model, lambda: self.program, self.optimizer, update_arguments)

    @classmethod
    def over(cls, train_step: TrainStep, seed: int = 0) -> Trainer:
        """Return a trainer that takes these steps, over the pipeline that is theirs."""
        trainer = object.__new__(cls)
        trainer._set_up(train_step, seed)
        return trainer

    def _set_up(
        self,
        train_step: TrainStep,
        seed: int,
        *,
        plan: StagePlan | None = None,
        ema: float | None = None,
        keep_last: int = 3,
        keep_best: int = 1,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        self.train_step, self.seed, self.plan, self.ema = train_step, seed, plan, ema
        self.keep_last, self.keep_best = keep_last, keep_best
        self.extra: dict[str, Any] = {}
        self._spec = self.model.batch_spec(self.pipeline.microbatch_size)
        self._recorded: Timeline | None = None
        self._store: CheckpointStore | None = None
        self._restored: int | None = None  # the step that later checkpoints in the store make way for
        self._source = self.model  # without rules for leaves
        self._choice = None
        self.progress = progress
        self._begun: set[str] = set()  # what has been done once, and so is compiled
        self._tokenizer: Tokenizer | None = None
        self._data: Data | None = None

    # -- what it is ---------------------------------------------------------------------------------------------------

    @property
    def pipeline(self) -> Pipeline:
        """The compiled stages on their ranks, in the order of :attr:`schedule`."""
        return self.train_step.pipeline

    @property
    def optimizer(self) -> optax.GradientTransformation:
        """The moving average is part of it."""
        return self.train_step.optimizer

    @property
    def model(self) -> Model:
        return self.pipeline.model.stored

    @property
    def schedule(self) -> Schedule:
        return self.pipeline.schedule

    @cached_property
    def program(self) -> dict[str, str]:
        """The digest of what the model computes, by which checkpoints know it again."""
        return which_model.model_digest(self.model)

    @cached_property
    def origin(self) -> ModelConfig | None:
        """The function and the options that make the model, which checkpoints keep; None where that is not known."""
        return self._named_origin or which_model.known_origin(self._source)

    def _saying(self, doing: str) -> AbstractContextManager[None]:
        """Says while the block lasts that it is ``doing`` something, if that is for the first time, which compiles."""
        first = doing not in self._begun
        self._begun.add(doing)
        return saying(self.progress if first else None, doing)

    @property
    def timeline(self) -> Timeline:
        """The timeline of the last recorded step, as measured (``timeline.source`` says so); before there is one, the predicted
        one."""
        return self._recorded if self._recorded is not None else self.pipeline.predicted_timeline()

    def __repr__(self) -> str:
        return f"<Trainer of {self.model.name} by {self.schedule.name} on {self.schedule.num_ranks} ranks>"

    def __str__(self) -> str:
        """Model, pipeline, optimizer and memory in four lines."""
        pipe, schedule = self.pipeline, self.schedule
        leaves = jax.tree.leaves(param_avals(self.model))
        devices = f"{pipe.mesh.after(f'{schedule.num_ranks} ranks')} on {pipe.submeshes[0].devices.flat[0].platform}"
        peak = max(self.train_step.memory_report(workspace=False).peak_bytes)
        stages = " | ".join(_layer_words(pipe.layers(s)) for s in range(len(pipe.boundaries)))
        count = format_count(sum(leaf.size for leaf in leaves))
        return (
            f"{self.model.name}: {count} parameters, {len(self.model.layers)} layers, {pipe.compute_dtype}\n"
            f"schedule {schedule.name}: {devices}, {schedule.num_microbatches} "
            f"microbatches of {pipe.microbatch_size}, bubble {pipe.predicted_timeline().bubble_rate:.1%} predicted\n"
            f"stages: {stages}\n"
            f"memory: {format_bytes(peak, binary=True)} on the fullest device, workspace apart"
        )

    def with_schedule(self, schedule: str | Path | Schedule) -> Trainer:
        """Return the same stages on the same ranks in another order: compiles nothing, and states can be handed on.

        Raises:
            ScheduleError, ProgramError: the schedule places the stages otherwise.
        """
        order = _given_schedule(schedule)
        now = self.schedule
        if order is None and ":" in str(schedule):
            pipe = PipelineConfig(ranks=now.num_ranks, microbatches=now.num_microbatches, chunks=now.num_chunks)
            order = made_by_function(str(schedule), pipe, self.pipeline.costs)
        elif order is None:
            order = self._order_of(family_named(str(schedule)))
        if order.placement.is_chain and order.num_stages == now.num_stages:
            order = with_edges(order, now.placement.edges)
        return self.with_pipeline(self.pipeline.with_schedule(order))

    def _order_of(self, family: Family) -> Schedule:
        """For these stages, with these costs; where a family has other stages, the pipeline says so."""
        now, costs = self.schedule, self.pipeline.costs
        ranks, microbatches, chunks = now.num_ranks, now.num_microbatches, now.num_chunks
        if isinstance(self.pipeline.model, VocabParallelModel) and not family.vocabulary:
            spread: Literal["spread", "spread-2"] = "spread" if now.placement.detached else "spread-2"
            pipe = PipelineConfig(
                ranks=ranks, microbatches=microbatches, chunks=chunks, schedule=family.name, vocabulary=spread
            )
            source = source_of(pipe)
            fits = source.num_stages == now.num_stages  # where it does not, the pipeline says so
            return source.order(relative_costs(costs.f_s if fits else (1.0,) * source.num_stages))
        family_chunks = chunks if "chunks" in family.options else None
        fits = family.placement(ranks, family_chunks or family.default_chunks).num_stages == now.num_stages
        return generate(family.name, ranks, microbatches, family_chunks, costs if fits else None)

    def with_pipeline(self, pipeline: Pipeline) -> Trainer:
        """Return the same over ``pipeline``, which has the same stages on the same ranks. Compiles nothing."""
        other = copy.copy(self)
        other.train_step = self.train_step.with_pipeline(pipeline)
        other._recorded, other._begun = None, set()
        return other

    def measured(self, repeats: int = 3) -> Trainer:
        """Return the same with every function that the schedule runs compiled and timed, the median of ``repeats`` calls each:
        predictions rest on these times then, and no longer on FLOP counts. Where the schedule offloads, its copies are placed
        for the measured link."""
        with self._saying("compiling and timing each stage"):
            costs = self.train_step.with_state(self.pipeline.measure_costs(repeats=repeats))
            measured = self.with_pipeline(self.pipeline.with_costs(costs))
            if self._choice is not None and self._choice[2] is self.schedule:
                pipe, draft, schedule = self._choice
                order = order_for_link(pipe, draft, schedule, measured.pipeline.costs)
                if order is not schedule and (moved := measured.with_schedule(order)).fits_devices():
                    measured = moved
            measured.pipeline.warm_up()
        return measured

    def fits_devices(self) -> bool:
        """Return whether a step fits in the memory that JAX has on each device, where the backend tells it; all processes get
        the same answer."""
        owned = self.pipeline.ownership
        devices = [self.pipeline.submeshes[rank].devices.flat[0] for rank in owned.ranks]
        fits_here = not limit_remark(lambda: self.train_step.memory_report(workspace=False), devices)
        return all(owned.shared("order fits", {owned.processes.mine: fits_here}).values())

    # -- training -----------------------------------------------------------------------------------------------------

    def init(self, params: Mapping[str, Params] | None = None) -> TrainState:
        """Return the state before the first step: ``params`` (whole, by layer name, as :func:`jaxpipe.load_params` reads them),
        or fresh ones of :attr:`seed`.

        Raises:
            CheckpointError: layers or leaves are missing, or shapes differ.
        """
        with self._saying("making the first state"):
            return self.train_step.init(init_params(self.model, self.seed) if params is None else params)

    def step(
        self,
        state: TrainState,
        batch: Mapping[str, Any],
        *,
        key: jax.Array | None = None,
        record: bool = False,
        stop: bool = False,
        switch: bool = False,
        **extra: Any,
    ) -> tuple[TrainState, StepMetrics]:
        """One step. Nothing waits for the devices until a metric is looked at.

        Args:
            state: consumed; go on with the one returned.
            batch: arrays by name, each ``[microbatches · microbatch size, …]`` or ``[microbatches, microbatch size, …]``; of
                the former :meth:`own_rows` will do.
            key: of the random numbers that layers draw; by default of :attr:`seed` and the step's number.
            record: wait for the devices before and after, and measure :attr:`timeline`.
            stop, switch: this process wants to end, or to go on in another order; the metrics tell all processes.
            extra: arguments of the optimizer's update that are other than ``update_arguments``.

        Raises:
            ProgramError: the batch does not fit.
            RunError: an action failed.
        """
        _require_state(state)
        if key is None:
            key = jax.random.fold_in(jax.random.key(self.seed, impl=THREEFRY), state.step)
        m = self.schedule.num_microbatches
        batch = in_microbatches(batch, self._spec, m, self.pipeline.own_rows(m))
        if record or _FIRST_STEP not in self._begun:
            agree_on_batch(self.pipeline.ownership.processes, f"the batch of step {state.step + 1}", batch)
        with self._saying(_FIRST_STEP):
            state, metrics = self.train_step(state, batch, key, record=record, extra=extra, stop=stop, switch=switch)
        if metrics.timeline is not None:
            self._recorded = metrics.timeline
        return state, metrics

    def own_rows(self, record: bool = False) -> np.ndarray | None:
        """Return which rows of the next step's batch, ``[microbatches · microbatch size, …]``, this process needs; None for
        all, as in the first step and those that ``record``: of these processes compare the batches."""
        compared = record or _FIRST_STEP not in self._begun
        return None if compared else self.pipeline.own_rows(self.schedule.num_microbatches)

    def evaluate(self, state: TrainState, batch: Mapping[str, Any], *, ema: bool = False) -> dict[str, float]:
        """``loss`` and the metrics of the loss layer over ``batch`` (any number of microbatches), each sum ÷ its weight,
        forward only and without dropout; ``weight``: the sum of weights that the loss was divided by (the loss is NaN unless
        it is positive). ``ema``: of the averaged
        parameters.

        Raises:
            ProgramError: the batch does not fit.
        """
        batch = in_microbatches(batch, self._spec, None)
        with self._saying("compiling the first evaluation"):
            sums = self.pipeline.evaluate_sums(self._params(state, ema), batch)
        reported = self.pipeline.eval_reported
        pairs = {"loss": reported.loss(sums), **{name: (sums[a], sums[b]) for name, (a, b) in reported.metrics.items()}}
        means = {name: float(total / weight) if weight else float("nan") for name, (total, weight) in pairs.items()}
        if pairs["loss"][1] < 0:
            means["loss"] = float("nan")
        return {**means, "weight": float(pairs["loss"][1])}

    def predict(self, state: TrainState, batch: Mapping[str, Any], *, ema: bool = False) -> Any:
        """Return what the layer before the loss returns for ``batch`` (any number of microbatches; what only the loss reads may
        be left out), without dropout: a pytree of NumPy arrays ``[sequences, …]``, the same in every process, which all call
        it. ``ema`` as in :meth:`evaluate`."""
        specs = {name: aval for name, aval in self._spec.items() if name in batch}
        batch = in_microbatches(batch, specs, None)
        with self._saying("compiling the first prediction"):
            return self.pipeline.predict(self._params(state, ema), batch)

    def params(self, state: TrainState, *, ema: bool = False) -> dict[str, Params]:
        """Master parameters by layer name, whole, as NumPy arrays; or their moving average. In one process: several save
        checkpoints."""
        self.pipeline.ownership.refuse_divided("params")
        params, optimizer = self.train_step.by_layer(_require_state(state))
        host_params: dict[str, Params] = jax.device_get(self._averaged(params, optimizer) if ema else params)
        return host_params

    def _averaged(self, params: Mapping[str, Params], optimizer: Mapping[str, Any]) -> dict[str, Params]:
        """``params`` with the moving averages in place of what is trained."""
        if self.ema is None:
            raise ConfigError("there is no moving average: give Trainer(ema=…) a decay, such as 0.999")
        return {name: nested(by_path(params[name]) | by_path(leaves)) for name, leaves in ema_of(optimizer).items()}

    def _params(self, state: TrainState, ema: bool) -> Mapping[Any, Any]:
        """Parameters on the ranks, in the compute dtype."""
        _require_state(state).require_unused()
        return self.pipeline.place(self.params(state, ema=True)) if ema else state.committed().compute

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def save(
        self,
        state: TrainState,
        path: str | Path | None = None,
        *,
        extra: Mapping[str, Any] | None = None,
        eval_loss: float | None = None,
        wait: bool = True,
        tokenizer: str | Path | None = None,
        data: Data | None = None,
    ) -> None:
        """Save ``state`` as the checkpoint of its step in the directory ``path``; by default where it was restored from, or
        saved last. Parameters and optimizer state are stored whole, by layer: a run may go on over other ranks, devices and
        schedules.

        Args:
            extra: what else to keep, by name: JSON values, or pytrees of arrays. :attr:`extra` has it after :meth:`restore`.
            eval_loss: of the held-out data; the checkpoints of the lowest are kept, too.
            wait: until it is on disk; without, the next save or :meth:`close` reports a failure.
            tokenizer: ``byte``, a ``tokenizer.json`` or ``ids:N``: what text the tokens are of, for ``generate``, ``export``
                and ``eval``. Later saves keep it.
            data: what the model is trained on (:func:`jaxpipe.data`), for ``eval``; it has a tokenizer. Later saves keep it.

        Raises:
            CheckpointError: it can't be written; earlier checkpoints are as they were.
            ConfigError, DataError: an argument is wrong.
        """
        store = self._open(path)
        if eval_loss is not None and not isinstance(eval_loss, float | int | np.number | np.ndarray | jax.Array):
            raise ConfigError(f"eval_loss is a {type(eval_loss).__name__}; want a number, such as evaluate(…)['loss']")
        self._data = data or self._data
        self._tokenizer = self._tokenizer if tokenizer is None else load_tokenizer(str(tokenizer))
        with self._saying("tracing the model for its checkpoints"):
            _, meta_of_model = (
                self.program,
                which_model.stored_meta(self.model, self.origin, self._tokenizer, self._data),
            )
        # Said once, and not at every save: the checkpoint is whole, only the verbs need a name for its model.
        if self.origin is None and self.progress is not None and "save" not in self._begun:
            self._begun.add("save")
            self.progress(
                f"saved without what makes {self.model.name}: eval, generate and export need --model module:function; "
                "Trainer(target=…) keeps it"
            )
        params, optimizer, meta = self.contents(state)
        values, trees = _divided({} if extra is None else extra)
        if self._restored is not None:
            for line in store.discard_after(self._restored):
                warnings.warn(line, stacklevel=2)
            self._restored = None
        meta = {**meta, **meta_of_model, "extra": values}
        store.save(state.step, params, optimizer, meta, eval_loss=eval_loss, wait=wait, extra=trees or None)

    def contents(self, state: TrainState) -> tuple[dict[str, Params], dict[str, Any], dict[str, Any]]:
        """Return what a checkpoint holds: parameters and optimizer state by layer, whole, and the values that every ``meta``
        has."""
        meta = {"jaxpipe": __version__, "schedule": self.schedule.name, "program": self.program}
        return *self.train_step.by_layer(state), meta

    def restore(
        self,
        path: str | Path,
        *,
        default: TrainState | Callable[[], TrainState] | None = None,
        step: int | Literal["best"] | None = None,
        same_model: bool = True,
    ) -> TrainState:
        """Return the state of a checkpoint in the directory ``path`` (of checkpoints, or of a run of ``jaxpipe train``): the
        newest intact one, or that of ``step``. Later saves go there; the first one sets aside what is newer there than this
        one.

        Args:
            default: the state, or what makes it (:meth:`init`), where there is no checkpoint yet.
            step: of the checkpoint, or ``"best"`` for the lowest evaluation loss.
            same_model: refuse a checkpoint of a model that computes something else, even where all shapes agree.

        Raises:
            CheckpointError: there is none and no ``default``; it is damaged, or of another model or optimizer.
        """
        store = self._open(path)
        warn = partial(warnings.warn, stacklevel=3)
        at = newest(store, warn) if step is None else read_manifest(store.directory, step).step
        if at is None:
            if default is None:
                raise CheckpointError(
                    f"no checkpoint in {store.directory}; give default=trainer.init to start anew where there is none"
                )
            self.extra = {}
            return default() if callable(default) else default

        def read(at: int) -> Checkpoint:
            meta = read_manifest(store.path(at)).meta
            like = which_model.likeness(meta, self.program)
            if same_model and like is which_model.Likeness.OTHER:
                raise CheckpointError(
                    f"{store.path(at)} is of another model: it computes something else than {self.model.name} does now; use "
                    "that model, another directory, or same_model=False if the difference is meant"
                )
            if same_model and like is which_model.Likeness.TRAINS_OTHERWISE:
                warn(f"{self.model.name} {like.value} when {store.path(at)} was saved")
            if same_model and like is which_model.Likeness.UNKNOWN:
                warn(which_model.not_compared(meta, self.model.name, store.path(at)))
            mine = None
            if self.pipeline.ownership.divided:
                mine = which_model.placed_layers(
                    self.pipeline.model,
                    (x for _, s in self.pipeline.own_instances for x in self.pipeline.layers(s)),
                )
            return which_model.load_state(store, at, self.model, self.optimizer, self.pipeline.master_dtype, mine)

        loaded = undamaged(store, at, read, warn) if step is None else read(at)
        extra = loaded.meta.get("extra")
        self.extra = {**(extra if isinstance(extra, Mapping) else {}), **loaded.extra}
        self._restored = loaded.step
        with self._saying("making the restored state"):
            return self.train_step.init(loaded.params, loaded.optimizer, step=loaded.step)

    def close(self) -> None:
        """Wait for the last save.

        Raises:
            CheckpointError: it failed.
        """
        if self._store is not None:
            self._store.close()

    def _open(self, path: str | Path | None) -> CheckpointStore:
        """Return the store of the checkpoints in ``path``, or the one used last."""
        if path is None:
            if self._store is None:
                raise CheckpointError("save: give a directory; nothing was restored or saved before")
            return self._store
        inner = Path(path) / "checkpoints"  # of a run
        store = CheckpointStore(
            inner if inner.is_dir() else path,
            keep_last=self.keep_last,
            keep_best=self.keep_best,
            processes=self.pipeline.ownership.processes,
        )
        if self._store is None or self._store.directory != store.directory:
            self.close()
            self._store, self._restored = store, None
        return self._store


def _whole(name: str, value: Any, least: int = 1) -> None:
    """Raises ConfigError if ``value`` is no whole number from ``least``."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ConfigError(f"{name} is {value!r}; want a whole number from {least}")


def _require_state(state: Any) -> TrainState:
    """Raises ConfigError if ``state`` is something else."""
    if not isinstance(state, TrainState):
        raise ConfigError(f"the state is a {type(state).__name__}; want what init, restore or step returned")
    return state


def _given_schedule(schedule: str | Path | Schedule) -> Schedule | None:
    """Return the schedule that is given, by value or in a file; None for the name of a family or a function."""
    if isinstance(schedule, Schedule):
        return schedule
    return read_checked(schedule) if isinstance(schedule, Path) or is_schedule_file(schedule) else None


def _cut_setting(cut: Literal["analytic", "measured"] | Sequence[int | str] | StagePlan) -> Any:
    """``cut`` as a config has it; a plan needs no cutting."""
    if isinstance(cut, StagePlan):
        return "analytic"
    if isinstance(cut, str) and cut not in ("analytic", "measured"):
        raise ConfigError(
            f"cut is {cut!r}; want 'analytic', 'measured', the layers that later stages start at, or a plan"
        )
    return cut if isinstance(cut, str) else tuple(cut)


def _sizes(schedule: Any, value: Schedule | None, explicit: Mapping[str, int]) -> dict[str, int]:
    """``ranks``, ``microbatches`` and ``chunks``: as asked, which must agree with a schedule that is given.

    Raises:
        ConfigError: they don't, or sizes are missing.
    """
    if value is not None:
        sizes = {"ranks": value.num_ranks, "microbatches": value.num_microbatches, "chunks": value.num_chunks}
        wrong = [f"{name}={n}, it has {sizes[name]}" for name, n in explicit.items() if n != sizes[name]]
        if wrong:
            raise ConfigError(f"schedule {value.name!r}: {'; '.join(wrong)}; leave these arguments out")
        return sizes
    name = str(schedule)
    default_chunks = 1 if ":" in name else family_named(name).default_chunks
    missing = [size for size in ("ranks", "microbatches") if size not in explicit]
    if missing:
        raise ConfigError(f"schedule {name!r} fits any sizes: say {' and '.join(f'{size}=…' for size in missing)}")
    return {"chunks": default_chunks, **explicit}


def _layer_words(layers: Sequence[Layer]) -> str:
    """``embed, 4 gpt.block``: the layers of a stage, those of one kind in a row counted."""
    runs = [(kind, list(run)) for kind, run in itertools.groupby(layers, key=lambda layer: layer.kind or layer.name)]
    return ", ".join(run[0].name if len(run) == 1 else f"{len(run)} {kind}" for kind, run in runs)


def _divided(extra: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what JSON can hold, and pytrees of arrays.

    Raises:
        ConfigError: it is no mapping of names, or a value is neither.
    """
    if not isinstance(extra, Mapping) or not all(isinstance(name, str) for name in extra):
        raise ConfigError(f"extra is a {type(extra).__name__}; want a dict of what else to keep, by name")
    values: dict[str, Any] = {}
    trees: dict[str, Any] = {}
    for name, value in extra.items():
        leaves = jax.tree.leaves(value)
        arrays = any(isinstance(leaf, jax.Array | np.ndarray | np.generic) for leaf in leaves)
        if not arrays:
            try:
                json.dumps(value, allow_nan=False)
            except (TypeError, ValueError) as error:
                raise ConfigError(f"extra[{name!r}] can't be kept: {error}; want JSON values, or arrays") from None
        (trees if arrays else values)[name] = value
    return values, trees
