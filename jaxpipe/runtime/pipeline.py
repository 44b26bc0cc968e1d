"""A model on its ranks, ready to run: stages cut, split and compiled, a schedule lowered, arrays placed.

:class:`Pipeline` is what training, evaluation and tests talk to::

    pipeline = Pipeline.build(model, schedule, microbatch_size=4)
    params = pipeline.place(init_params(model, seed=0))
    loss, grads = pipeline.loss_and_grads(params, batch)

Parameters go in and gradients come out by layer name. Each stage lives on one rank, or on one per flow of a bidirectional
placement (replicas: the first is the primary, which owns the update).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe import dump
from jaxpipe.cost import analytic_profile, measure_host_link, measure_stages, with_offloadable_bytes
from jaxpipe.cost.memory import Kind, MemoryReport, account, batch_bytes, calls_of
from jaxpipe.errors import CheckpointError, ProgramError, StageError
from jaxpipe.mesh import ONE_SHARD, TensorParallel, pipeline_submeshes
from jaxpipe.program.ir import Offload, Program
from jaxpipe.program.lower import braided_slots, lower
from jaxpipe.program.order import holds, issue_order
from jaxpipe.runtime.batches import (
    Batch,
    Instance,
    check_microbatch,
    check_placed,
    checked_batch,
    joined_shards,
    place_data,
    place_keys,
)
from jaxpipe.runtime.executor import Epilogues, Executor, StepInputs, StepOutputs
from jaxpipe.runtime.host_memory import check_host_memory
from jaxpipe.runtime.leaves import replace_leaf, without_leaves
from jaxpipe.runtime.measured import measured_timeline, replay_ratio
from jaxpipe.runtime.offload import OFFLOAD_ALL, OffloadOptions
from jaxpipe.runtime.reduction import reduction
from jaxpipe.schedule import CostProfile, Schedule, Timeline, simulate
from jaxpipe.stage.compiled.braid import build_braids
from jaxpipe.stage.compiled.compile import BuildCache, build_all, build_output
from jaxpipe.stage.compiled.footprint import footprint
from jaxpipe.stage.compiled.offloadable import with_offload
from jaxpipe.stage.compiled.recompute_report import PolicyCost, compare_policies, remarks
from jaxpipe.stage.functions import Braids, Metrics, Port, StageFunction, StageFunctions
from jaxpipe.stage.leaves import array_leaves, fill
from jaxpipe.stage.model.layer import Layer, Model, Params, Path, taken_by
from jaxpipe.stage.model.links import loss_factor
from jaxpipe.stage.model.params import ParamLayout, compute_avals, get_leaf, stage_params
from jaxpipe.stage.model.plan import Cut, StagePlan, analytic_layer_costs, checked_cut, cut
from jaxpipe.stage.model.reference import combined, model_output, read_by, weights_of
from jaxpipe.stage.split.policies import STANDARD

Buffers = list[jax.Array]

_ALLOCATOR_BYTES = {"gpu": 256, "cuda": 256, "rocm": 256}
"""To what the allocator of a platform rounds every buffer up; elsewhere bytes are those of the arrays."""


@dataclass(frozen=True, slots=True)
class Tie:
    """A parameter leaf used by two stages: ``copy_path`` in ``copy_stage``'s parameters repeats ``owner_path`` in
    ``owner_stage``'s. Paths begin with the layer name."""

    owner_stage: int
    owner_path: Path
    copy_stage: int
    copy_path: Path


@dataclass(frozen=True, slots=True)
class Reported:
    """Positions among the ``loss`` ports of all stages, in order: ``heads``, of each loss its sum and weight; ``metrics``, by
    name the same of each metric, and of several losses of each by its layer's name."""

    heads: tuple[tuple[int, int], ...]
    metrics: Metrics

    def loss(self, sums: Sequence[Any]) -> tuple[Any, Any]:
        """Loss sum and weight (:func:`~jaxpipe.stage.model.reference.combined`), of the sums by position."""
        return combined([(sums[a], sums[b]) for a, b in self.heads])


@dataclass(frozen=True, repr=False)
class Pipeline:
    """See the module. Build with :meth:`build`; the fields are read-only.

    ``functions[(rank, stage)]``; ``instances[stage]``: ranks that run the stage, the primary first; ``boundaries[stage]``:
    first and one-past-last layer; ``costs``: what the order of dispatch and the predicted timeline are based on; ``offload``:
    what O and L move, and where to; ``braid``: whether braided slots run as one function, those in ``braids``; ``epilogues``:
    what is done with a stage's accumulators as soon as nothing adds to them. Every rank has ``dp`` × ``tp.size`` devices: a
    microbatch is split over ``dp``, and the layers divide their work over ``tp``.
    """

    model: Model
    schedule: Schedule
    boundaries: tuple[tuple[int, int], ...]
    submeshes: tuple[jax.sharding.Mesh, ...]
    functions: Mapping[Instance, StageFunctions]
    instances: Mapping[int, tuple[int, ...]]
    tied: tuple[Tie, ...]
    programs: tuple[Program, ...]
    executor: Executor
    costs: CostProfile
    microbatch_size: int
    compute_dtype: Any
    master_dtype: Any
    offload: OffloadOptions = OFFLOAD_ALL
    dp: int = 1
    tp: TensorParallel = ONE_SHARD
    braid: bool = True
    braids: Braids = field(default_factory=dict)
    epilogues: Epilogues = field(default_factory=dict)
    cache: BuildCache = field(default_factory=BuildCache)

    def __repr__(self) -> str:
        schedule, layers = self.schedule, len(self.model.layers)
        sharding = f" × dp {self.dp} × tp {self.tp.size}" if (self.dp, self.tp.size) != (1, 1) else ""
        return (
            f"<Pipeline of {self.model.name}: {layers} layers in {len(self.boundaries)} stages on {schedule.num_ranks} "
            f"ranks{sharding}, schedule {schedule.name}, {schedule.num_microbatches} microbatches of {self.microbatch_size}>"
        )

    @classmethod
    def build(
        cls,
        model: Model,
        schedule: Schedule,
        *,
        microbatch_size: int,
        boundaries: Sequence[tuple[int, int]] | StagePlan | None = None,
        devices: Sequence[jax.Device] | None = None,
        compute_dtype: Any = jnp.float32,
        recompute: str | Sequence[str] = "none",
        costs: CostProfile | None = None,
        offload: OffloadOptions = OFFLOAD_ALL,
        dp: int = 1,
        tp: TensorParallel | int = ONE_SHARD,
        braid: bool = True,
    ) -> Pipeline:
        """Trace, split and compile the stages, and lower the schedule.

        Args:
            model: layers in order, the loss last.
            schedule: one rank a stage (several flows are allowed), stages in a chain.
            microbatch_size: sequences in a microbatch, over all ``dp`` shards of a rank.
            boundaries: per stage, first and one-past-last layer: all layers in order, each once. Or a plan of this model; or
                None for stages balanced by FLOPs.
            devices: ``dp · tp.size`` a rank, in order, ``tp`` innermost; the first of ``jax.devices()`` by default.
            compute_dtype: of parameters and activations; master parameters are float32 (float64 if this is float64).
            recompute: policy by name (:mod:`jaxpipe.stage.split.recompute`), or one a stage.
            costs: for the dispatch order and the prediction; FLOP counts by default.
            offload: how much of a stage's residuals O and L move, and what the host has for them.
            dp: shards of a microbatch on each rank.
            tp: tensor-parallel shards of each rank, and how they divide the layers' work (an int: without options).
            braid: run each braided slot as one woven function; if not, as separate calls, with bit-equal results.

        Raises:
            ScheduleError, StageError, ProgramError, ConfigError: what is wrong, and what would work. Schedules that offload
                need pinned host memory, or ``offload.fallback``, and room for what they keep on the host.
        """
        placement = schedule.placement
        check_microbatch(microbatch_size, dp)
        boundaries = _cut(model, schedule, boundaries, microbatch_size // dp)
        tp = TensorParallel(tp) if isinstance(tp, int) else tp
        submeshes = pipeline_submeshes(placement.num_ranks, dp=dp, tp=tp.size, devices=devices)
        layers = [model.layers[a:b] for a, b in boundaries]
        instances = _instances(schedule)
        compute = jnp.dtype(compute_dtype)
        master = jnp.dtype(jnp.float64) if compute == jnp.float64 else jnp.dtype(jnp.float32)
        functions: dict[Instance, StageFunctions] = {}
        cache = BuildCache()
        for flow in range(max(len(r) for r in instances.values())):
            ranks = [instances[s][min(flow, len(instances[s]) - 1)] for s in range(len(layers))]
            built = build_all(
                layers,
                param_avals=compute_avals(model.layers, compute, master),
                data_avals=model.batch_spec(microbatch_size),
                meshes=[submeshes[r] for r in ranks],
                recompute=recompute,
                acc_dtype=master,
                tp=tp,
                cache=cache,
            )
            chosen = [with_offload(f, offload.fraction) for f in built]
            functions.update({(r, s): f for s, (r, f) in enumerate(zip(ranks, chosen, strict=True))})
        first = [functions[(instances[s][0], s)] for s in range(len(layers))]
        costs = costs if costs is not None else analytic_profile(first)
        braids = build_braids(braided_slots(schedule, first), functions, cache) if braid else {}
        programs = lower(schedule, first, braids)
        dump.dump("schedule", schedule.name, str(schedule))
        check_host_memory(programs, offload, _platform(submeshes))
        executor = _executor(programs, schedule, costs, functions, submeshes, offload, braids)
        return cls(
            model,
            schedule,
            boundaries,
            submeshes,
            functions,
            instances,
            _ties(first),
            programs,
            executor,
            costs,
            microbatch_size,
            compute,
            master,
            offload,
            dp,
            tp,
            braid,
            braids,
            cache=cache,
        )

    def with_costs(self, costs: CostProfile) -> Pipeline:
        """The same pipeline, dispatching in the order and predicting the times that ``costs`` give. Compiles nothing."""
        executor = _executor(
            self.programs,
            self.schedule,
            costs,
            self.functions,
            self.submeshes,
            self.offload,
            self.braids,
            self.epilogues,
        )
        return replace(self, costs=costs, executor=executor)

    def with_epilogues(self, epilogues: Epilogues) -> Pipeline:
        """The same pipeline, handing the accumulators of each (rank, stage) in ``epilogues`` to a function as soon as nothing
        adds to them: what it returns is in :attr:`StepOutputs.reduced`. Compiles nothing."""
        return replace(self, epilogues=epilogues).with_costs(self.costs)

    def with_schedule(self, schedule: Schedule, costs: CostProfile | None = None) -> Pipeline:
        """Another order over the same stages on the same ranks, and other costs if given. Compiles nothing by itself: a
        function that no schedule has used yet is compiled when it first runs.

        Raises:
            ProgramError: the schedule places its stages elsewhere, or offloads what this machine can't hold.
        """
        if schedule.placement.flows != self.schedule.placement.flows:
            raise ProgramError(
                f"schedule {schedule.name!r} places stages differently from {self.schedule.name!r}; build a new pipeline for it"
            )
        braids = dict(self.braids)
        if self.braid:
            wanted = [slot for slot in braided_slots(schedule, self.stages) if slot not in braids]
            braids |= build_braids(wanted, self.functions, self.cache)
        programs = lower(schedule, self.stages, braids)
        check_host_memory(programs, self.offload, _platform(self.submeshes))
        return replace(self, schedule=schedule, programs=programs, braids=braids).with_costs(
            costs if costs is not None else self.costs
        )

    def with_offload(self, offload: OffloadOptions) -> Pipeline:
        """The same stages and order, moving another part of the residuals or moving it elsewhere. Compiles nothing.

        Raises:
            StageError, ProgramError: the fraction is outside 0..1, or this machine can't do it.
        """
        functions = {at: with_offload(f, offload.fraction) for at, f in self.functions.items()}
        moved = tuple(float(functions[self.primary(s)].offloadable_bytes) for s in self.instances)
        return replace(self, functions=functions, offload=offload).with_schedule(
            self.schedule, with_offloadable_bytes(self.costs, moved)
        )

    # -- stages -------------------------------------------------------------------------------------------------------

    @property
    def stages(self) -> tuple[StageFunctions, ...]:
        """Per stage, the functions on its primary rank."""
        return tuple(self.functions[self.primary(s)] for s in range(len(self.boundaries)))

    @property
    def all_instances(self) -> tuple[Instance, ...]:
        return tuple((r, s) for s, ranks in self.instances.items() for r in ranks)

    def primary(self, stage: int) -> Instance:
        """(rank, stage) of the instance that owns the update."""
        return self.instances[stage][0], stage

    def layout(self, stage: int) -> ParamLayout:
        return self.functions[self.primary(stage)].layout

    def layers(self, stage: int) -> tuple[Layer, ...]:
        a, b = self.boundaries[stage]
        return self.model.layers[a:b]

    def compare_policies(self, policies: Sequence[str] = STANDARD) -> tuple[tuple[PolicyCost, ...], ...]:
        """What each recompute policy would save and cost, by stage (``compiled/recompute_report.py``). Runs nothing."""
        stages = range(len(self.boundaries))
        return compare_policies(
            [self.layers(s) for s in stages],
            compute_avals(self.model.layers, self.compute_dtype, self.master_dtype),
            self.model.batch_spec(self.microbatch_size),
            [self.submeshes[self.primary(s)[0]] for s in stages],
            policies,
            self.master_dtype,
            self.tp,
        )

    @property
    def remarks(self) -> tuple[str, ...]:
        """What is worth knowing of the stages: policies that recompute nothing, loops that are not divided between B and W."""
        return remarks(self.stages)

    # -- parameters ---------------------------------------------------------------------------------------------------

    def owned(self, stage: int, tree: Mapping[str, Params]) -> dict[str, Params]:
        """``tree`` (a stage's parameters or gradients) without the copies of leaves that other stages own."""
        copies = {(name, *path) for name, path in self.layout(stage).shared}
        return {name: without_leaves(leaves, (name,), copies) for name, leaves in tree.items()}

    def unpack_acc(self, stage: int, acc: Sequence[jax.Array]) -> dict[str, Params]:
        """Gradients of all shards together (reduced accumulators) as a tree of whole leaves; leaves that are not trained come
        as zeros."""
        functions = self.functions[self.primary(stage)]
        untrained = functions.param_avals[functions.layout.num_trained :]
        return functions.layout.unpack([*acc, *(jnp.zeros(b.shape, b.dtype) for b in untrained)])

    def place(self, params: Mapping[str, Params]) -> dict[Instance, Buffers]:
        """Parameters by layer name → buffers on every rank that needs them, in the dtypes that are computed with.

        Raises:
            CheckpointError: a layer or leaf is missing, or a shape differs from the model's.
        """
        placed = {}
        for rank, stage in self.all_instances:
            buffers = self.packed(stage, params)
            placed[(rank, stage)] = list(jax.device_put(buffers, self.param_homes((rank, stage))))
        return placed

    def packed(self, stage: int, params: Mapping[str, Params], dtype: Any = None) -> Buffers:
        """The buffers of a stage's parameters, out of the whole model's by layer name, floats in ``dtype`` or as they are
        computed with.

        Raises:
            CheckpointError: as :meth:`place`.
        """
        layout = self.layout(stage)
        try:
            return layout.pack(layout.cast(stage_params(self.layers(stage), params), dtype))
        except StageError as error:
            raise CheckpointError(f"these parameters do not fit the model: {error}") from None

    def param_homes(self, instance: Instance) -> list[jax.sharding.Sharding]:
        """Where each parameter buffer of one (rank, stage) lives; reduced gradients live there too."""
        return [_home(a) for a in self.functions[instance].param_avals]

    def reduced(self, acc: Mapping[Instance, Buffers]) -> dict[Instance, Buffers]:
        """What the devices of each rank accumulated, summed over them (:mod:`jaxpipe.runtime.reduction`)."""
        return {at: self._reductions[at](buffers) for at, buffers in acc.items()}

    @cached_property
    def _reductions(self) -> Mapping[Instance, Any]:
        return {(r, s): reduction(self.submeshes[r], f) for (r, s), f in self.functions.items()}

    def zeros(self, instance: Instance) -> Buffers:
        """Gradient accumulators of one (rank, stage)."""
        return [jax.device_put(np.zeros(a.shape, a.dtype), a.sharding) for a in self.functions[instance].acc_avals]

    # -- running ------------------------------------------------------------------------------------------------------

    def run(
        self,
        params: Mapping[Instance, Buffers],
        acc: Mapping[Instance, Buffers],
        batch: Batch,
        key: jax.Array | None = None,
        *,
        record: bool = False,
    ) -> StepOutputs:
        """One pass over ``batch`` (arrays ``[microbatches, microbatch size, …]`` by name): gradients are added to ``acc``,
        which is donated. ``key``: this step's PRNG key, needed if a layer draws random numbers.

        Raises:
            RunError: an instruction failed.
            ProgramError: the batch does not fit.
        """
        return self.executor.run(self.step_inputs(params, acc, batch, key), record=record)

    def step_inputs(
        self,
        params: Mapping[Instance, Buffers],
        acc: Mapping[Instance, Buffers],
        batch: Batch,
        key: jax.Array | None = None,
    ) -> StepInputs:
        """What :class:`~jaxpipe.runtime.executor.Executor` takes, with the batch and the keys on the ranks that read them."""
        microbatches = self.schedule.num_microbatches
        check_placed(params, self.functions)
        batch = self._with_factors(checked_batch(batch, self.model.batch_spec(self.microbatch_size), microbatches))
        data = place_data(batch, self.functions, self.submeshes)
        return StepInputs(params, acc, data, place_keys(key, microbatches, self.functions, self.submeshes))

    def loss_and_grads(
        self, params: Mapping[Instance, Buffers], batch: Batch, key: jax.Array | None = None
    ) -> tuple[jax.Array, dict[str, Params]]:
        """Mean loss and its gradient by layer name (tied copies added to their owner), for tests and small uses."""
        out = self.run(params, {at: self.zeros(at) for at in self.all_instances}, batch, key)
        sums = [sum(float(jnp.sum(x)) for x in port) for port in zip(*out.losses, strict=True)]
        loss_sum, weight = self.reported.loss(sums)
        acc = self.sum_replicas(self.reduced({at: list(buffers) for at, buffers in out.acc.items()}))
        whole = {s: self.unpack_acc(s, acc[self.primary(s)]) for s in self.instances}
        grads = {name: tree for s in self.instances for name, tree in self.owned(s, whole[s]).items()}
        for tie in self.tied:
            extra = get_leaf(whole[tie.copy_stage], tie.copy_path)
            own = get_leaf(grads, tie.owner_path)
            grads = replace_leaf(grads, tie.owner_path, own + jax.device_put(extra, own.sharding))
        return jnp.asarray(loss_sum / weight), jax.tree.map(lambda g: g / weight, grads)

    def evaluate(self, params: Mapping[Instance, Buffers], batch: Batch) -> tuple[float, float]:
        """Loss sum and weight sum over ``batch`` (leading axis: microbatches), forward only, without dropout. Of several
        losses, as :func:`~jaxpipe.stage.model.reference.combined`."""
        sums = self.evaluate_sums(params, batch)
        loss_sum, weight = self.eval_reported.loss(sums)
        return float(loss_sum), float(weight)

    def evaluate_sums(self, params: Mapping[Instance, Buffers], batch: Batch) -> list[float]:
        """As :meth:`evaluate`, the sums of all ``loss`` ports of all stages: those of ``eval_metrics`` too."""
        found = self._forward(params, batch, [f.evaluation for f in self.stages])
        losses = [[made[at] for at in sorted(made) if at[1].kind == "loss"] for made in found]
        return [sum(float(jnp.sum(x)) for x in port) for port in zip(*losses, strict=True)]

    @cached_property
    def reported(self) -> Reported:
        """Where what a step reports stands among the ``loss`` ports of all stages."""
        return self._reported(False)

    @cached_property
    def eval_reported(self) -> Reported:
        """As :attr:`reported`, of an evaluation."""
        return self._reported(True)

    def _reported(self, evaluation: bool) -> Reported:
        heads: list[tuple[int, int]] = []
        named: dict[str, tuple[int, int]] = {}
        first = 0
        several = len(self.model.losses) > 1
        for s, f in enumerate(self.stages):
            own = [(first + 2 * k, first + 2 * k + 1) for k in range(len(f.links.losses))]
            names = [self.layers(s)[k].name for k in f.links.losses]
            found = {n: at for n, at in zip(names, own, strict=True) if several and n != "loss"}
            metrics = f.eval_metrics if evaluation else f.metrics
            found |= {name: (first + a, first + b) for name, (a, b) in metrics.items()}
            if twice := found.keys() & named.keys():
                raise StageError(f"two losses report a metric {min(twice)!r}; give one another name")
            named |= found
            heads += own
            first += sum(p.kind == "loss" for p in (f.evaluation if evaluation else f.functions["F"]).outputs)
        return Reported(tuple(heads), named)

    def predict(self, params: Mapping[Instance, Buffers], batch: Batch) -> Any:
        """What the layer before the loss returns for ``batch`` (leading axis: microbatches; what only the loss reads may be
        left out), without dropout: a pytree of NumPy arrays ``[microbatches · microbatch size, …]``.

        Raises:
            ProgramError: the batch lacks what a layer before the loss reads; the output's shape does not tell how it is divided
                over tensor-parallel shards.
        """
        reads = read_by(self.model, taken_by(self.model.layers)[-1])
        if missing := [name for name in reads if name not in batch]:
            raise ProgramError(f"the batch has no {missing[0]!r}; the layers before the loss read {', '.join(reads)}")
        function, tree, whole = self._output
        count = len(next(iter(batch.values())))
        unread = {
            n: np.zeros((count, *a.shape), a.dtype) for n, a in self.model.batch_spec(self.microbatch_size).items()
        }
        functions = [*(f.evaluation for f in self.stages[:-1]), function]
        runs = self._forward(params, {**unread, **batch}, functions)
        made = zip(*([run[(len(functions) - 1, port)] for port in function.outputs] for run in runs), strict=True)
        leaves = [
            np.concatenate([joined_shards(np.asarray(part), a.shape, self.dp, self.tp.size) for part in parts])
            for parts, a in zip(made, whole, strict=True)
        ]
        return fill(tree, leaves)

    @cached_property
    def _output(self) -> tuple[StageFunction, Any, Sequence[jax.ShapeDtypeStruct]]:
        """The last stage's function without the loss, what it returns as a pytree, and the whole shapes of its arrays."""
        last = len(self.boundaries) - 1
        spec = self.model.batch_spec(self.microbatch_size)
        params = compute_avals(self.model.layers, self.compute_dtype, self.master_dtype)
        whole = jax.eval_shape(lambda p, b: array_leaves(model_output(self.model, p, b)), params, spec)
        mesh = self.submeshes[self.primary(last)[0]]
        return *build_output(self.layers(last), self.stages[last], mesh, spec, self.tp), whole

    def _forward(
        self, params: Mapping[Instance, Buffers], batch: Batch, functions: Sequence[StageFunction]
    ) -> Iterator[Mapping[tuple[int, Port], jax.Array]]:
        """What ``functions``, one a stage, return for each microbatch, by stage and port."""
        check_placed(params, self.functions)
        count = len(next(iter(batch.values())))
        batch = self._with_factors(checked_batch(batch, self.model.batch_spec(self.microbatch_size), count))
        data = place_data(batch, self.functions, self.submeshes)
        for i in range(count):
            made: dict[tuple[int, Port], jax.Array] = {}
            for s, function in enumerate(functions):
                at = self.primary(s)
                f = self.functions[at]
                entering = [made[(t, Port("y", leaf))] for t, leaf in f.x_from]
                x = jax.device_put(entering, [_home(a) for a in f.x_avals]) if entering else []
                given = {"param": params[at], "x": x, "data": data[at][i] if at in data else ()}
                results = function.call(*(given[port.kind][port.index] for port in function.inputs))
                made |= {(s, port): result for port, result in zip(function.outputs, results, strict=True)}
            yield made

    def _with_factors(self, batch: Batch) -> Batch:
        """``batch`` with what the gradient of each loss is multiplied by, where there are several: the first one's weight in
        all microbatches over its own (0 without weight)."""
        if len(self.model.losses) == 1:
            return batch
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            totals = [float(w) for w in self._weights({name: np.asarray(x) for name, x in batch.items()})]
        shape = (len(next(iter(batch.values()))), self.microbatch_size)
        factors = [totals[0] / w if w > 0 else 0.0 for w in totals]
        layers = [self.model.layers[k] for k in self.model.losses]
        return {
            **batch,
            **{loss_factor(x): np.full(shape, f, self.master_dtype) for x, f in zip(layers, factors, strict=True)},
        }

    @cached_property
    def _weights(self) -> Any:
        """The weight of each loss in a batch, by the batch alone."""
        params = compute_avals(self.model.layers, self.compute_dtype, self.master_dtype)
        one = weights_of(self.model, params, self.model.batch_spec(self.microbatch_size))
        return jax.jit(lambda batch: [jnp.sum(w) for w in jax.vmap(one)(batch)])

    def sum_replicas(self, given: Mapping[Instance, Sequence[jax.Array]]) -> dict[Instance, Buffers]:
        """Gradients, reduced or not, with those of a stage's replicas added to its primary's, the replicas' at zero."""
        acc = {at: list(buffers) for at, buffers in given.items()}
        for s, ranks in self.instances.items():
            for other in ranks[1:]:
                there = jax.device_put(list(acc[(other, s)]), [a.sharding for a in acc[(ranks[0], s)]])
                acc[(ranks[0], s)] = [a + b for a, b in zip(acc[(ranks[0], s)], there, strict=True)]
                acc[(other, s)] = [jnp.zeros_like(a) for a in acc[(other, s)]]
        return acc

    def copy_to_replicas(self, buffers: dict[Instance, Buffers]) -> None:
        """Copy a stage's trained parameters from its primary to its replicas, in place."""
        for s, ranks in self.instances.items():
            for other in ranks[1:]:
                n, homes = self.layout(s).num_trained, self.param_homes((other, s))
                new = jax.device_put(buffers[(ranks[0], s)][:n], homes[:n])
                buffers[(other, s)] = [*new, *buffers[(other, s)][n:]]

    # -- predictions and measurements ---------------------------------------------------------------------------------

    def predicted_timeline(self) -> Timeline:
        """The schedule simulated with :attr:`costs`; static bytes hold the batch too."""
        return simulate(self.schedule, self._costs_with_batch())

    def measured_timeline(self, outputs: StepOutputs) -> Timeline:
        """What a recorded step did."""
        return measured_timeline(self.schedule, self._costs_with_batch(), outputs.events)

    def _costs_with_batch(self) -> CostProfile:
        """:attr:`costs`, where what is placed once a step or stays until its end (batch arrays, keys, losses, a scalar per
        action) counts as static bytes."""
        if not self.costs.boundary_buffers:
            return self.costs
        m = self.schedule.num_microbatches
        batch = [float(batch_bytes(s, m, calls_of(self.programs, s.stage))) for s in self.stages]
        static = tuple(a + b for a, b in zip(self.costs.optimizer_bytes, batch, strict=True))
        return replace(self.costs, optimizer_bytes=static)

    def replay_ratio(self, outputs: StepOutputs) -> float:
        """Wall time of a recorded step ÷ replay of its order with its own durations (:mod:`jaxpipe.runtime.measured`)."""
        return replay_ratio(self.schedule, self.measured_timeline(outputs), outputs.step_s)

    @cached_property
    def peak_bytes(self) -> tuple[int, ...]:
        """Per rank, the most bytes a step holds: parameters, accumulators, data and activations (no workspace)."""
        return self.memory_report(workspace=False).peak_bytes

    def memory_report(
        self,
        *,
        resident: Mapping[int, Mapping[Kind, int]] | None = None,
        workspace: bool = True,
        timed_copies: bool = False,
        curves: bool = False,
    ) -> MemoryReport:
        """Predicted memory of a device of each rank, by kind (:mod:`jaxpipe.cost.memory`).

        Args:
            resident: by rank, bytes that stay through a step beside parameters, accumulators and data.
            workspace: count XLA's temporaries too; compiles the functions that the programs run, unless they are already.
            timed_copies: offloaded bytes leave when the copy ends in the predicted timeline, not when it is issued.
            curves: keep what is held after each instruction.
        """
        return account(
            self.programs,
            self.executor.order,
            self.functions,
            num_microbatches=self.schedule.num_microbatches,
            resident=resident,
            timeline=self.predicted_timeline() if timed_copies else None,
            footprint_of=footprint if workspace else None,
            align=_ALLOCATOR_BYTES.get(self.submeshes[0].devices.flat[0].platform, 1),
            curves=curves,
            braids=self.braids,
        )

    def measure_costs(self, *, repeats: int = 5, progress: Any = None) -> CostProfile:
        """Run every stage function alone and time it (BW only if the schedule has one); time the link to the host, if the
        schedule uses it."""
        host = None
        if any(isinstance(i, Offload) for program in self.programs for i in program.instructions):
            host = measure_host_link([mesh.devices.flat[0] for mesh in self.submeshes], repeats=repeats)
        fused = any(a.op == "BW" for r in range(self.schedule.num_ranks) for a in self.schedule.actions(r))
        measured = measure_stages(self.stages, repeats=repeats, fused=fused, progress=progress)
        return replace(measured, host=host).costs()

    def warm_up(self) -> None:
        """Compile everything before the first step: every function runs once, and every link carries a message."""
        batch = {
            name: np.ones((self.schedule.num_microbatches, *aval.shape), aval.dtype)
            for name, aval in self.model.batch_spec(self.microbatch_size).items()
        }
        acc = {at: self.zeros(at) for at in self.all_instances}
        params = {
            at: [jax.device_put(jnp.zeros(a.shape, a.dtype), _home(a)) for a in self.functions[at].param_avals]
            for at in self.all_instances
        }
        self.run(params, acc, batch, jax.random.key(0)).wait()  # accumulators may be donated to what follows


def _executor(
    programs: Sequence[Program],
    schedule: Schedule,
    costs: CostProfile,
    functions: Mapping[Instance, StageFunctions],
    submeshes: Sequence[jax.sharding.Mesh],
    offload: OffloadOptions,
    braids: Braids,
    epilogues: Epilogues = MappingProxyType({}),
) -> Executor:
    timeline = simulate(schedule, costs)
    order = issue_order(programs, timeline)
    held = {(k, at): ended for k, p in enumerate(programs) for at, ended in holds(p, timeline).items()}
    return Executor(
        programs,
        order,
        functions,
        submeshes,
        offload_fallback=offload.fallback,
        holds=held,
        braids=braids,
        epilogues=epilogues,
    )


def _cut(
    model: Model, schedule: Schedule, given: Sequence[tuple[int, int]] | StagePlan | None, device_batch: int
) -> Cut:
    """First and one-past-last layer of each stage.

    Raises:
        ProgramError: there are more or fewer than the schedule has stages.
        StageError: they are no cut of this model.
    """
    stages = schedule.placement.num_stages
    if given is None:
        return cut(model.layers, stages, analytic_layer_costs(model, device_batch), schedule.placement.edges)
    if isinstance(given, StagePlan):
        planned = [name for stage in given.stages for name in stage.layers]
        if planned != [layer.name for layer in model.layers]:
            raise StageError(f"the stage plan is of another model ({given.model}): its layers are {', '.join(planned)}")
        given = given.cut
    if len(given) != stages:
        raise ProgramError(
            f"schedule {schedule.name!r} has {stages} stages, the cut has {len(given)}: cut the model into {stages}"
        )
    return checked_cut(model.layers, given)


def _home(aval: jax.ShapeDtypeStruct) -> jax.sharding.Sharding:
    sharding: jax.sharding.Sharding | None = aval.sharding
    assert sharding is not None
    return sharding


def _platform(submeshes: Sequence[jax.sharding.Mesh]) -> str:
    return str(submeshes[0].devices.flat[0].platform)


def _instances(schedule: Schedule) -> dict[int, tuple[int, ...]]:
    placement = schedule.placement
    ranks = {
        s: [r for i in range(placement.num_flows) for r in placement.ranks(s, i)] for s in range(placement.num_stages)
    }
    return {s: tuple(dict.fromkeys(group)) for s, group in ranks.items()}


def _ties(functions: Sequence[StageFunctions]) -> tuple[Tie, ...]:
    home = {name: f.stage for f in functions for name in f.layout.layers}
    return tuple(
        Tie(home[owner], (owner, *owner_path), f.stage, (layer, *path))
        for f in functions
        for (layer, path), (owner, owner_path) in f.layout.shared.items()
    )
