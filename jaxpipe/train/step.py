"""One training step: the pipeline's gradients, one reduction of each, one global norm, an optax update per stage.

Master parameters are float32 (float64 under x64) buffers on the rank that runs the stage; with bfloat16 compute, the update
also emits the cast buffers, so no stage function ever casts a parameter. Each device sums its own gradients over the
microbatches; after the pipeline tied copies and replicas are added to their owner, and each parameter is reduced once over the
devices of its rank (:mod:`jaxpipe.train.reduction`). The norm for clipping is taken over all ranks and devices, each parameter
once. With ZeRO-1 the update and its state are divided over dp. A step whose norm is not finite leaves parameters and optimizer
state as they were. Nothing here waits for a device.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxpipe.errors import CheckpointError
from jaxpipe.mesh import replicated
from jaxpipe.program.accounting import MemoryReport
from jaxpipe.runtime.batches import Batch
from jaxpipe.runtime.executor import StepOutputs
from jaxpipe.runtime.pipeline import Pipeline
from jaxpipe.schedule import CostProfile, Timeline
from jaxpipe.stage.footprint import Footprint, compiled_footprint
from jaxpipe.stage.functions import Metrics
from jaxpipe.stage.layer import Params
from jaxpipe.stage.params import LeafSlot
from jaxpipe.train.reduction import GradientReduction, Reduced, on_rank, own_buckets
from jaxpipe.train.shards import StageShards
from jaxpipe.train.step_memory import StageState, master_avals, step_memory
from jaxpipe.train.ties import TiedLeaves
from jaxpipe.train.update import check_elementwise, compile_update, takes_params

Instance = tuple[int, int]
Buffers = list[jax.Array]


@dataclass(frozen=True, slots=True)
class TrainState:
    """Everything that a step changes. ``master``, ``compute``, ``acc`` by (rank, stage); ``optimizer`` by stage, then layer.

    ``compute`` is ``master`` itself when both have one dtype; when they differ, ZeRO-1 keeps masters as buckets
    (:mod:`jaxpipe.train.shards`) on the primary ranks only. ``acc`` is all zeros between steps. A state is consumed by the
    step that takes it (its buffers are donated).
    """

    step: int
    master: Mapping[Instance, Buffers]
    compute: Mapping[Instance, Buffers]
    acc: Mapping[Instance, Buffers]
    optimizer: Mapping[int, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """Device scalars of a step: mean loss per weighted token (nats), global gradient norm before clipping, whether the update
    was applied, the sum of weights; ``metrics``, by name, what the loss layer reports: each sum ÷ its weight (NaN where that is
    0). ``timeline``: measured, on recorded steps. ``outputs`` has the host-side timings (and no accumulators)."""

    loss: jax.Array
    grad_norm: jax.Array
    applied: jax.Array
    weight: jax.Array
    metrics: Mapping[str, jax.Array]
    timeline: Timeline | None
    outputs: StepOutputs


class TrainStep:
    """``state, metrics = step(state, batch)``.

    Args:
        pipeline: compiled stages on their ranks.
        optimizer: an optax transformation of one layer's parameters (no clipping by norm: that is global and done here).
        clip_norm: bound on the global gradient norm; 0 for none.
        zero1: divide optimizer state and update over the dp devices of each rank (:mod:`jaxpipe.train.shards`).

    Raises:
        ConfigError: devices would see pieces of parameters, and the optimizer does not treat elements alone.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        optimizer: optax.GradientTransformation,
        *,
        clip_norm: float = 0.0,
        zero1: bool = False,
    ) -> None:
        self._tx = optimizer
        self._primary = {s: ranks[0] for s, ranks in pipeline.instances.items()}
        self._shards = {
            s: StageShards(pipeline.layout(s), pipeline.submeshes[r], zero1) for s, r in self._primary.items()
        }
        if any(x.chunked or x.tp > 1 for x in self._shards.values()):
            check_elementwise(optimizer)
        self.pipeline = pipeline
        self._states = {s: self._stage_state(s) for s in self._primary}
        self._reduce = {s: GradientReduction(x, self._states[s].acc) for s, x in self._shards.items()}
        self._update = {s: self._compile_update(s) for s in self._primary}
        self._unpack = {s: self._compile_unpack(s) for s in self._primary}
        self._fresh = {s: self._compile_fresh(s) for s in self._primary}
        self._combine = jax.jit(partial(_combine, clip_norm=clip_norm))
        self._sum_losses = jax.jit(partial(_sum_losses, metrics=pipeline.stages[-1].metrics))
        self._ties = TiedLeaves(pipeline)
        self.pipeline = self._with_epilogues(pipeline)
        self._footprints: dict[int, Footprint] = {}

    def with_pipeline(self, pipeline: Pipeline) -> TrainStep:
        """The same step over ``pipeline``, which has the same stages on the same ranks in another order. Compiles nothing."""
        other = copy.copy(self)
        other.pipeline = self._with_epilogues(pipeline)
        return other

    def init(
        self, params: Mapping[str, Params], optimizer: Mapping[str, Any] | None = None, *, step: int = 0
    ) -> TrainState:
        """Place parameters (whole, by layer name, any float dtype) and optimizer state (as :meth:`by_layer` gives it, from any
        ranks and devices; fresh unless given) on the ranks.

        Raises:
            CheckpointError: layers or leaves are missing, or shapes differ.
        """
        pipe = self.pipeline
        compute = pipe.place(params, pipe.compute_dtype)
        master = compute if not pipe.casts else self._masters(params)
        acc = {at: pipe.zeros(at) for at in pipe.all_instances}
        states: dict[int, dict[str, Any]] = {}
        for s, rank in self._primary.items():
            if optimizer is None:
                homes = jax.tree.map(lambda a: a.sharding, self._states[s].optimizer)
                states[s] = jax.device_put(self._fresh[s](master[(rank, s)]), homes)  # zeros know no device
                continue
            layers = pipe.layout(s).layers
            if missing := [name for name in layers if name not in optimizer]:
                raise CheckpointError(
                    f"no optimizer state for layer {min(missing)}; there is one for {', '.join(optimizer)}"
                )
            states[s] = self._place_states(s, {name: optimizer[name] for name in layers})
        state = TrainState(step, master, compute, acc, states)
        for s in self._primary:  # compiles it now, and not at the first checkpoint
            self._unpack[s](self._whole_buffers(s, state))
        return state

    def __call__(
        self, state: TrainState, batch: Batch, key: jax.Array | None = None, *, record: bool = False
    ) -> tuple[TrainState, StepMetrics]:
        """Run the pipeline on ``batch`` (arrays ``[microbatches, microbatch size, …]`` by name) and update.

        Raises:
            RunError: an instruction failed.
        """
        pipe = self.pipeline
        outputs = pipe.run(state.compute, state.acc, batch, key, record=record)
        acc = self._ties.gather(pipe.sum_replicas(outputs.acc))
        reduced = {s: self._reduced(s, outputs, acc.pop((r, s))) for s, r in self._primary.items()}
        outputs = replace(outputs, acc={}, reduced={})  # whoever keeps the metrics would keep what is in them
        first = replicated(pipe.submeshes[0])
        several = len(pipe.instances[len(pipe.boundaries) - 1]) > 1  # replicas of the last stage have some losses each
        loss_sum, weight, reported = self._sum_losses(
            jax.device_put(outputs.losses, first) if several else outputs.losses
        )
        squares = [reduced[s].square for s in self._primary]
        loss, norm, scale, ok = self._combine(*jax.device_put((squares, loss_sum, weight), first))
        master, compute = dict(state.master), dict(state.compute)
        optimizer = dict(state.optimizer)
        for s, r in self._primary.items():
            at, shards = (r, s), self._shards[s]
            local_scale, local_ok = jax.device_put((scale, ok), replicated(pipe.submeshes[r]))
            params = compute[at] if takes_params(shards, pipe.casts) else []
            masters = master[at] if pipe.casts else []
            new = self._update[s](params, masters, reduced[s].grads, optimizer[s], local_scale, local_ok)
            compute[at], master[at], optimizer[s], zeros = new
            acc[at] = zeros or reduced[s].acc
        self._share(compute)
        if not pipe.casts:
            master = compute
        elif not self._chunked:
            self._share(master)
        timeline = pipe.measured_timeline(outputs) if record else None
        metrics = StepMetrics(loss, norm, ok, weight, reported, timeline, outputs)
        return TrainState(state.step + 1, master, compute, acc, optimizer), metrics

    def by_layer(self, state: TrainState) -> tuple[dict[str, Params], dict[str, Any]]:
        """Master parameters and optimizer state by layer name, whole, each parameter once: what a checkpoint stores. The same
        bits however many ranks and devices they were divided over; valid until the next step, which reuses the memory."""
        params: dict[str, Params] = {}
        optimizer: dict[str, Any] = {}
        for s, r in self._primary.items():
            shards, at = self._shards[s], (r, s)
            whole = self.pipeline.owned(s, self._unpack[s](self._whole_buffers(s, state)))
            if self.pipeline.casts and shards.chunked:  # whole has what is not trained
                whole = self.pipeline.with_owned(whole, shards.host_tree(state.master[at]))
            params.update(whole)
            gather = shards.host_whole if shards.chunked else _as_it_is
            optimizer.update(shards.on_states(self._tx, state.optimizer[s], gather, lambda other: other))
        return params, optimizer

    def _whole_buffers(self, stage: int, state: TrainState) -> Buffers:
        """A stage's master parameters; those that are computed with where masters are divided over dp."""
        at = (self._primary[stage], stage)
        return state.compute[at] if self.pipeline.casts and self._shards[stage].chunked else state.master[at]

    # -- memory -------------------------------------------------------------------------------------------------------

    def memory_report(self, *, workspace: bool = True) -> MemoryReport:
        """Predicted memory of a device of each rank in a step, parameters and optimizer state included, by kind. Compiles
        what a step runs, unless it has run already; without ``workspace`` (XLA's temporaries) it compiles nothing."""
        updates = dict.fromkeys(self._primary, Footprint())
        if workspace:
            updates = {s: self._update_footprint(s) for s in self._primary}
        return step_memory(self.pipeline, self.stage_states(), updates, workspace=workspace)

    def costs_with_state(self) -> CostProfile:
        """The pipeline's costs with masters and optimizer state among the bytes that stay (``optimizer_bytes``)."""
        costs, states = self.pipeline.costs, self.stage_states()
        more = [s.optimizer_bytes + s.master_bytes * self.pipeline.casts for s in states.values()]
        return replace(
            costs, optimizer_bytes=tuple(a + float(b) for a, b in zip(costs.optimizer_bytes, more, strict=True))
        )

    def stage_states(self) -> Mapping[int, StageState]:
        """By stage, the shapes of what its update takes."""
        return self._states

    def _stage_state(self, stage: int) -> StageState:
        pipe, shards = self.pipeline, self._shards[stage]
        buckets = [shards.bucket_aval(i, pipe.master_dtype) for i in shards.bucketed] if shards.chunked else []
        leaves = shards.whole_avals(pipe.master_dtype)
        fresh = {name: jax.eval_shape(self._tx.init, tree) for name, tree in leaves.items()}
        return StageState(
            master=buckets if shards.chunked and pipe.casts else master_avals(pipe, stage),
            acc=pipe.functions[pipe.primary(stage)].acc_avals,
            optimizer=shards.on_states(self._tx, fresh, shards.leaf_aval, shards.same_aval),
            grads=buckets,
            divided=shards.chunked,
        )

    def _update_footprint(self, stage: int) -> Footprint:
        """Of the update, with the reduction before it where that is a program of its own."""
        if stage in self._footprints:
            return self._footprints[stage]
        pipe, state, shards = self.pipeline, self._states[stage], self._shards[stage]
        dtype = state.acc[0].dtype if state.acc else jnp.float32
        scale, ok = (shards.same_aval(jax.ShapeDtypeStruct((), d)) for d in (dtype, jnp.bool_))
        params = list(pipe.functions[pipe.primary(stage)].param_avals) if takes_params(shards, pipe.casts) else []
        masters = list(state.master) if pipe.casts else []
        grads = list(state.grads) if shards.chunked else list(state.acc)
        lowered = self._update[stage].lower(params, masters, grads, state.optimizer, scale, ok)
        found = compiled_footprint(lowered.compile())
        if shards.mesh.size > 1:
            before = compiled_footprint(self._reduce[stage].function.lower(list(state.acc)).compile())
            temp, code = max(found.temp_bytes, before.temp_bytes), found.code_bytes + before.code_bytes
            found = replace(found, temp_bytes=temp, code_bytes=code)
        self._footprints[stage] = found
        return found

    # -- parts --------------------------------------------------------------------------------------------------------

    def _with_epilogues(self, pipeline: Pipeline) -> Pipeline:
        """``pipeline``, reducing the gradients of a stage as soon as its last W has been dispatched, where nothing is to be
        added to them first and no other stage wants them."""
        tied = {s for tie in pipeline.tied for s in (tie.owner_stage, tie.copy_stage)}
        early = {
            (r, s): self._reduce[s].dispatch
            for s, r in self._primary.items()
            if self._shards[s].mesh.size > 1 and s not in tied and len(pipeline.instances[s]) == 1
        }
        return pipeline.with_epilogues(early) if early else pipeline

    def _reduced(self, stage: int, outputs: StepOutputs, acc: Buffers) -> Reduced:
        """The reduced gradients of a stage: dispatched in the pipeline, or now."""
        at = (self._primary[stage], stage)
        return self._reduce[stage].read(outputs.reduced[at]) if at in outputs.reduced else self._reduce[stage](acc)

    @property
    def _chunked(self) -> bool:
        return any(x.chunked for x in self._shards.values())

    def _share(self, buffers: dict[Instance, Buffers]) -> None:
        """Give updated parameters to tied copies, and then to replicas."""
        self._ties.spread(buffers)
        self.pipeline.copy_to_replicas(buffers)

    def _masters(self, params: Mapping[str, Params]) -> dict[Instance, Buffers]:
        """Master parameters on the ranks: buffers, or buckets where they are divided over dp."""
        pipe = self.pipeline
        if not self._chunked:
            return pipe.place(params, pipe.master_dtype)
        return {
            (r, s): [
                jax.device_put(self._shards[s].host_bucket(params, i).astype(aval.dtype), aval.sharding)
                for i, aval in zip(self._shards[s].bucketed, self._states[s].master, strict=True)
            ]
            for s, r in self._primary.items()
        }

    def _place_states(self, stage: int, given: Mapping[str, Any]) -> dict[str, Any]:
        """Whole optimizer states of layers on the devices of their rank.

        Raises:
            CheckpointError: they are of another optimizer or model.
        """
        shards = self._shards[stage]
        if shards.mesh.size == 1:
            placed: dict[str, Any] = jax.device_put(dict(given), replicated(shards.mesh))
            return placed

        def put(leaf: Any, slot: LeafSlot) -> Any:
            if tuple(leaf.shape) != slot.whole_shape(shards.tp):
                raise ValueError(f"{slot} has shape {tuple(leaf.shape)}, the model wants {slot.whole_shape(shards.tp)}")
            aval = shards.leaf_aval(leaf, slot)
            return jax.device_put(shards.host_chunk(leaf, slot) if shards.chunked else leaf, aval.sharding)

        try:
            return shards.on_states(self._tx, given, put, partial(jax.device_put, device=replicated(shards.mesh)))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            reason = " ".join(str(error).split())
            raise CheckpointError(f"the optimizer state of stage {stage} does not fit: {reason}") from error

    def _compile_update(self, stage: int) -> Any:
        cast_to = self.pipeline.compute_dtype if self.pipeline.casts else None
        state = self._states[stage]
        return compile_update(self._shards[stage], self._tx, state.acc, state.optimizer, cast_to)

    def _compile_unpack(self, stage: int) -> Any:
        """From parameter buffers to whole leaves by layer, split ones still on their shards."""
        shards, layout = self._shards[stage], self.pipeline.layout(stage)

        def unpack(buffers: Buffers) -> dict[str, Params]:
            return layout.tree(layout.unpack_leaves(buffers), ties=False)

        specs = layout.tree([shards.whole_spec(slot) for slot in layout.slots], ties=False)
        return on_rank(unpack, shards.mesh, (shards.buffer_specs,), specs)

    def _compile_fresh(self, stage: int) -> Any:
        """From master parameters, as they are kept, to optimizer states by layer."""
        shards, tx = self._shards[stage], self._tx
        in_buckets = shards.chunked and self.pipeline.casts

        def fresh(master: Buffers) -> dict[str, Any]:
            if shards.chunked:
                tree = shards.chunks(master if in_buckets else own_buckets(shards, master))
            else:
                tree = shards.tree(shards.layout.unpack_leaves(master))
            return {name: tx.init(leaves) for name, leaves in tree.items()}

        given = [shards.bucket_spec(i) for i in shards.bucketed] if in_buckets else shards.buffer_specs
        return on_rank(fresh, shards.mesh, (given,), shards.state_specs(tx, self._states[stage].optimizer))


def _as_it_is(leaf: Any, slot: LeafSlot) -> Any:
    return leaf


def trained(tree: Any) -> Any:
    """A nested dict without its integer leaves, which no optimizer changes."""
    if not isinstance(tree, Mapping):
        return tree
    kept = {k: trained(v) for k, v in tree.items()}
    return {k: v for k, v in kept.items() if isinstance(v, Mapping) or jnp.issubdtype(v.dtype, jnp.inexact)}


def _sum_losses(
    losses: Sequence[tuple[jax.Array, ...]], *, metrics: Metrics
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """Loss sum and weight sum over the microbatches, and each metric's sum ÷ its weight."""
    sums: list[Any] = [sum(jnp.sum(x) for x in port) for port in zip(*losses, strict=True)]
    return sums[0], sums[1], {name: sums[total] / sums[weight] for name, (total, weight) in metrics.items()}


def _combine(
    squares: Sequence[jax.Array], loss_sum: jax.Array, weight: jax.Array, *, clip_norm: float
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Mean loss, norm of the mean gradient, factor for the summed gradient, and whether the step is finite."""
    total = jnp.where(weight > 0, weight, 1.0)
    norm = jnp.sqrt(sum(squares, start=jnp.zeros((), squares[0].dtype))) / total
    ok = jnp.isfinite(norm) & jnp.isfinite(loss_sum) & (weight > 0)
    shrink = jnp.minimum(1.0, clip_norm / jnp.maximum(norm, 1e-30)) if clip_norm > 0 else jnp.ones_like(norm)
    return loss_sum / total, norm, jnp.where(ok, shrink / total, 0.0), ok
