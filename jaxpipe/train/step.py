"""One training step: the pipeline's gradients, one reduction of each, one global norm, an optax update per stage.

Parameters are updated in float32 (float64 under x64) on the rank that runs the stage; with bfloat16 compute, they are kept as
masters there, and the update also emits the cast buffers, so no stage function ever casts a parameter. Each device sums its own
gradients over the microbatches; after the pipeline tied copies and replicas are added to their owner, and each parameter is
reduced once over the devices of its rank (:mod:`jaxpipe.train.update.reduction`). The norm for clipping is taken over all
ranks and devices, each parameter once. The optimizer is one of the whole model, of which each stage runs its layers' part
(:mod:`jaxpipe.train.update.layerwise`); with ZeRO-1 the update and its state are divided over dp. A step whose norm is not
finite leaves parameters and optimizer state as they were. Nothing here waits for a device.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpipe.cost.memory import MemoryReport
from jaxpipe.errors import ConfigError
from jaxpipe.mesh import replicated
from jaxpipe.runtime.batches import Batch
from jaxpipe.runtime.executor import StepDropped, StepOutputs
from jaxpipe.runtime.pipeline import Pipeline
from jaxpipe.runtime.reduction import on_rank
from jaxpipe.schedule import CostProfile
from jaxpipe.stage.compiled.footprint import Footprint, compiled_footprint, total_device_bytes
from jaxpipe.stage.model.layer import Params
from jaxpipe.stage.model.params import by_path, get_leaf, insert_leaf, nested
from jaxpipe.train.state import Buffers, Instance, StepMetrics, TrainState, Unapplied, Updated
from jaxpipe.train.update.optimizer import LearningRate
from jaxpipe.train.update.post_validation import LateUpdate, PostValidation
from jaxpipe.train.update.reduction import GradientReduction, Reduced
from jaxpipe.train.update.scalars import Scalars
from jaxpipe.train.update.shards import StageShards
from jaxpipe.train.update.stage_optimizer import StageOptimizer, stage_optimizers
from jaxpipe.train.update.stage_update import StageUpdate, compile_update, fresh_state, taken
from jaxpipe.train.update.step_memory import StageState, step_memory
from jaxpipe.train.update.ties import TiedLeaves


class TrainStep:
    """``state, metrics = step(state, batch)``.

    Args:
        pipeline: compiled stages on their ranks.
        optimizer: any optax transformation of ``{layer: leaves}``, the trained parameters of the whole model, that can be
            applied layer by layer (no clipping by norm: that is global and done here). Its update gets the mean loss as
            ``value``, if it takes that.
        clip_norm: bound on the global gradient norm; 0 for none.
        zero1: divide optimizer state and update over the dp devices of each rank (:mod:`jaxpipe.train.update.shards`).
        post_validation: ``"off"``, ``"on"`` or ``"auto"``: whether the next step begins before it is known that this one is
            finite and not clipped (:mod:`jaxpipe.train.update.post_validation`). The same bits; not for several processes.
        learning_rate: of ``optimizer``, to be reported: a number, or a schedule of the count that its state keeps. That of
            ``optax.inject_hyperparams`` needs no telling.
        extra: arguments of the optimizer's update by name, numbers or arrays, which a call may give other values.

    Raises:
        ConfigError: the optimizer mixes layers, or can't be applied; devices would see pieces of parameters, and it does not
            treat elements alone; there is nothing to train.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        optimizer: Any,
        *,
        clip_norm: float = 0.0,
        zero1: bool = False,
        post_validation: str = "off",
        learning_rate: float | optax.Schedule | None = None,
        extra: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        if not 0 <= clip_norm < math.inf:
            raise ConfigError(
                f"clip_norm is {clip_norm}; want the largest norm of the gradient, such as 1.0, or 0 for any"
            )
        self.post_validation, self._late = PostValidation(post_validation), post_validation != "off"
        if pipeline.ownership.divided and self._late:
            raise ConfigError("post_validation is for one process; say 'off' where several train together")
        self.optimizer, self._extra = optimizer, dict(extra)
        self._primary = {s: ranks[0] for s, ranks in pipeline.instances.items()}
        self._own = {s: r for s, r in self._primary.items() if r in pipeline.ownership.ranks}
        self._shards = {
            s: StageShards(pipeline.layout(s), pipeline.submeshes[r], zero1, pipeline.master_dtype)
            for s, r in self._primary.items()
        }
        if not any(x.updated for x in self._shards.values()):
            raise ConfigError(f"model {pipeline.model.name} has nothing to train: no parameter of it is trainable")
        self.pipeline = pipeline
        self._reads = {s: taken(x) for s, x in self._shards.items()}
        self._writes = {s: x.updated for s, x in self._shards.items()}
        self._optimizers = stage_optimizers(optimizer, self._shards, _shapes(extra))
        self._updates = {_kinds(extra): {s: self._compile_update(s, self._optimizers[s]) for s in self._own}}
        self.states = {s: self._stage_state(s) for s in self._primary}  # shapes of what the updates take
        self._reduce = {s: GradientReduction(self._shards[s], self.states[s].acc) for s in self._own}
        self._unpack = {s: self._compile_unpack(s) for s in self._own}
        self._fresh = {s: self._compile_fresh(s) for s in self._own}
        self._rate = LearningRate(learning_rate, self.states[0].optimizer)
        squares = {s: _square_aval(x, self.states[s].acc) for s, x in self._shards.items()}
        self._scalars = Scalars(pipeline, squares, clip_norm)
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
        ranks and devices, its classes or plain dicts and lists; fresh unless given) on the ranks.

        Raises:
            CheckpointError: layers or leaves are missing, or shapes differ.
        """
        pipe = self.pipeline
        params = pipe.model.divided(params)
        optimizer = None if optimizer is None else pipe.model.divided_state(optimizer)
        compute, master = pipe.place(params), self._masters(params)
        acc = {at: pipe.zeros(at) for at in pipe.own_instances}
        states: dict[int, Any] = {}
        for s, rank in self._own.items():
            if optimizer is not None:
                states[s] = self._optimizers[s].place(optimizer)
                continue
            fresh = self._fresh[s](self._taken(s, compute[rank, s]), master[rank, s])
            states[s] = jax.device_put(fresh, jax.tree.map(lambda a: a.sharding, self.states[s].optimizer))
        state = TrainState(step, master, compute, acc, states, self._fixed(params))
        for s in self._own:  # compiles it now, and not at the first checkpoint
            self._unpack[s](self._whole_buffers(s, state))
        return state

    def __call__(
        self,
        state: TrainState,
        batch: Batch,
        key: jax.Array | None = None,
        *,
        record: bool = False,
        extra: Mapping[str, Any] = MappingProxyType({}),
        stop: bool = False,
        switch: bool = False,
    ) -> tuple[TrainState, StepMetrics]:
        """Run the pipeline on ``batch`` (arrays ``[microbatches, microbatch size, …]`` by name) and update. ``extra``:
        arguments of the optimizer's update; ones of another name or shape than before compile it anew. ``stop``,
        ``switch``: this process wants to; the metrics tell all of them.

        Raises:
            RunError: an instruction failed, or the state has been used.
            ConfigError: the optimizer can't be applied with these arguments.
        """
        pipe = self.pipeline
        state.require_unused()
        extra = {**self._extra, **extra}
        updates = self._updates_for(extra)
        state, outputs = self._run(state, batch, key, record)
        acc = self._ties.gather(pipe.sum_replicas({**state.acc, **outputs.acc}))
        reduced = {s: self._reduced(s, outputs, acc.pop((r, s))) for s, r in self._own.items()}
        losses, outputs = outputs.losses, replace(outputs, acc={}, reduced={})  # what would be kept with the metrics
        found = self._scalars.combine({s: x.square for s, x in reduced.items()}, losses, stop, switch)
        whole = Unapplied(
            state.step + 1,
            {s: self._taken(s, state.compute[r, s]) for s, r in self._own.items()},
            dict(state.master),
            dict(state.optimizer),
            reduced,
            dict(state.compute),
            acc,
            state.fixed,
            found,
            extra,
            updates,
        )
        timeline = pipe.measured_timeline(outputs) if record and pipe.ownership.processes.mine == 0 else None
        state, updated = self._updated(whole, losses)
        scalars = {f.name: getattr(found, f.name) for f in fields(found)}
        metrics = StepMetrics(**scalars, updated=updated, timeline=timeline, outputs=outputs)
        return state, metrics

    def _run(
        self, state: TrainState, batch: Batch, key: jax.Array | None, record: bool
    ) -> tuple[TrainState, StepOutputs]:
        """The pipeline on ``batch``, and ``state`` with all of the step before: committed while that runs, if it can."""
        late = state.late
        if late is not None and not record and late.open:
            with suppress(StepDropped):
                outputs = self.pipeline.run(state.compute, {}, batch, key, late=late.accumulators)
                return late.settled(), outputs
        state = state.committed()
        return state, self.pipeline.run(state.compute, state.acc, batch, key, record=record)

    # -- the update ---------------------------------------------------------------------------------------------------

    def _updated(
        self, whole: Unapplied, losses: Sequence[tuple[jax.Array, ...]]
    ) -> tuple[TrainState, Callable[[], Updated]]:
        """The state after the step, if need be without what can be committed later, and what is known of it."""
        if self.post_validation.mode != "off":
            scale, loss, valid = self._scalars.guess(losses, whole.found)
            if self.post_validation.goes_ahead(valid):
                return self._ahead(whole, scale, loss, valid)
        updated = self._applied(whole)
        return whole.state(), lambda: updated

    def _ahead(
        self, whole: Unapplied, scale: jax.Array, loss: jax.Array, valid: jax.Array
    ) -> tuple[TrainState, Callable[[], Updated]]:
        rate = self._rate.before(whole.optimizer[min(self._own)])
        given, finite = {}, {}
        for s, r in self._own.items():
            at, reduced = (r, s), whole.reduced[s]
            given[s] = self._given(s, scale, np.True_, loss, whole.extra)
            taken = whole.params[s], whole.master[at], reduced.grads, whole.optimizer[s]
            buffers, finite[s] = whole.updates[s].ahead(*taken, *given[s])
            whole.compute[at] = _with_buffers(whole.compute[at], self._writes[s], buffers)
            masters, reads = self._shards[s].mastered, zip(self._reads[s], whole.params[s], strict=True)
            whole.params[s] = [whole.compute[at][i] if i in masters else old for i, old in reads]
            whole.reduced[s] = replace(reduced, acc=[])  # made anew when it is needed
        self._hand_round(whole.compute)
        updated = Updated(self._scalars.all_true(finite), rate)
        late = LateUpdate(whole, given, valid, updated, self._rate_after, self._applied, self.post_validation)
        return replace(whole.state(), acc={}, late=late), late.known

    def _applied(self, whole: Unapplied) -> Updated:
        """Update all of it."""
        found, finite = whole.found, {}
        rate = self._rate.before(whole.optimizer[min(self._own)])
        for s, r in self._own.items():
            at, reduced = (r, s), whole.reduced[s]
            given = self._given(s, found.scale, found.applied, found.loss, whole.extra)
            taken, update = (whole.params[s], whole.master[at], reduced.grads, whole.optimizer[s]), whole.updates[s]
            buffers, whole.master[at], whole.optimizer[s], zeros, finite[s] = update.whole(*taken, *given)
            whole.compute[at] = _with_buffers(whole.compute[at], self._writes[s], buffers)
            whole.acc[at] = zeros or reduced.acc or update.zeros()
        self._hand_round(whole.compute)
        return Updated(self._scalars.all_true(finite), self._rate_after(whole.optimizer) if rate is None else rate)

    def _rate_after(self, optimizer: Mapping[int, Any]) -> jax.Array | None:
        return self._rate.after(optimizer[min(self._own)])

    def _given(self, stage: int, scale: Any, ok: Any, loss: jax.Array, extra: Mapping[str, Any]) -> tuple[Any, ...]:
        """The last arguments of an update, on the devices of its rank."""
        home = replicated(self.pipeline.submeshes[self._primary[stage]])
        given: tuple[Any, ...] = jax.device_put((scale, ok, {"value": loss, **extra}), home)
        return given

    def _hand_round(self, compute: dict[Instance, Buffers]) -> None:
        """New parameters to tied copies and replicas."""
        self._ties.spread(compute)
        self.pipeline.copy_to_replicas(compute)

    # -- by layer -----------------------------------------------------------------------------------------------------

    def by_layer(self, state: TrainState) -> tuple[dict[str, Params], dict[str, Any]]:
        """Master parameters and optimizer state by layer name, whole, each parameter once: what a checkpoint stores. The same
        bits however many ranks and devices they were divided over; valid until the next step, which reuses the memory."""
        state.require_unused()
        state = state.committed()
        params: dict[str, Params] = {}
        optimizer: dict[str, Any] = {}
        for s, r in self._own.items():
            shards = self._shards[s]
            leaves = dict(zip(shards.updated_slots, self._unpack[s](self._whole_buffers(s, state)), strict=True))
            if shards.chunked:
                leaves |= shards.host_leaves(dict(zip(shards.mastered, state.master[(r, s)], strict=True)))
            trained = shards.tree([leaves.get(slot) for slot in shards.layout.slots])
            params |= {name: nested(by_path(state.fixed[name]) | by_path(tree)) for name, tree in trained.items()}
            optimizer |= self._optimizers[s].by_layer(state.optimizer[s])
        model = self.pipeline.model
        return model.joined(params), model.joined(optimizer)

    def _taken(self, stage: int, params: Buffers) -> Buffers:
        """Of a stage's parameter buffers, those that its update reads."""
        return [params[i] for i in self._reads[stage]]

    def _whole_buffers(self, stage: int, state: TrainState) -> Buffers:
        """The buffers that a stage updates, masters in place of what is computed with unless they are divided over dp."""
        at, shards = (self._primary[stage], stage), self._shards[stage]
        masters = {} if shards.chunked else dict(zip(shards.mastered, state.master[at], strict=True))
        return [masters.get(i, state.compute[at][i]) for i in shards.updated]

    # -- memory -------------------------------------------------------------------------------------------------------

    def memory_report(self, *, workspace: bool = True) -> MemoryReport:
        """Predicted memory of a device of each rank in a step, parameters and optimizer state included, by kind. Compiles
        what a step runs, unless it has run already; without ``workspace`` (XLA's temporaries) it compiles nothing."""
        updates = {s: self._update_footprint(s) for s in self._own} if workspace else None
        return step_memory(self.pipeline, self.states, updates)

    def with_state(self, costs: CostProfile) -> CostProfile:
        """``costs`` with masters and optimizer state among the bytes that stay (``optimizer_bytes``)."""
        more = [s.optimizer_bytes + s.master_bytes + total_device_bytes(s.twice) for s in self.states.values()]
        return replace(
            costs, optimizer_bytes=tuple(a + float(b) for a, b in zip(costs.optimizer_bytes, more, strict=True))
        )

    def _stage_state(self, stage: int) -> StageState:
        pipe, shards = self.pipeline, self._shards[stage]
        functions = pipe.functions[pipe.primary(stage)]

        def master(i: int) -> jax.ShapeDtypeStruct:
            b = functions.param_avals[i]
            whole = jax.ShapeDtypeStruct(b.shape, shards.master, sharding=b.sharding)
            return shards.bucket_aval(i) if shards.chunked else whole

        return StageState(
            params=[functions.param_avals[i] for i in self._reads[stage]],
            master=[master(i) for i in shards.mastered],
            made=[functions.param_avals[i] for i in shards.mastered],
            acc=functions.acc_avals,
            optimizer=self._optimizers[stage].avals,
            grads=[shards.bucket_aval(i) for i in shards.updated] if shards.chunked else [],
            divided=shards.chunked,
            twice=[functions.param_avals[i] for i in shards.updated if i not in shards.mastered] if self._late else [],
        )

    def _update_footprint(self, stage: int) -> Footprint:
        """Of the update, with the reduction before it where that is a program of its own."""
        if stage in self._footprints:
            return self._footprints[stage]
        state, shards = self.states[stage], self._shards[stage]
        dtype = state.acc[0].dtype if state.acc else jnp.float32
        scale, ok = (shards.same_aval(jax.ShapeDtypeStruct(*a)) for a in (((2,), dtype), ((), jnp.bool_)))
        extra = jax.tree.map(shards.same_aval, _shapes(self._extra))
        grads = list(state.grads) if shards.chunked else list(state.acc)
        update = self._updates[_kinds(self._extra)][stage]
        given = list(state.params), list(state.master), grads, state.optimizer, scale, ok, extra
        halves = (update.ahead, update.commit) if self._late else ()
        lowered = [program.lower(*given) for program in (update.whole, *halves)]
        if shards.mesh.size > 1:
            lowered.append(self._reduce[stage].function.lower(list(state.acc)))
        found = [compiled_footprint(program.compile()) for program in lowered]
        temp, code = max(x.temp_bytes for x in found), sum(x.code_bytes for x in found)
        self._footprints[stage] = replace(found[0], temp_bytes=temp, code_bytes=code)
        return self._footprints[stage]

    # -- parts --------------------------------------------------------------------------------------------------------

    def _with_epilogues(self, pipeline: Pipeline) -> Pipeline:
        """``pipeline``, reducing the gradients of a stage as soon as its last W has been dispatched, where nothing is to be
        added to them first and no other stage wants them."""
        tied = {s for tie in pipeline.tied for s in (tie.owner_stage, tie.copy_stage)}
        early = {
            (r, s): self._reduce[s].dispatch
            for s, r in self._own.items()
            if self._shards[s].mesh.size > 1 and s not in tied and len(pipeline.instances[s]) == 1
        }
        return pipeline if pipeline.epilogues == early else pipeline.with_epilogues(early)

    def _reduced(self, stage: int, outputs: StepOutputs, acc: Buffers) -> Reduced:
        """The reduced gradients of a stage: dispatched in the pipeline, or now."""
        at = (self._primary[stage], stage)
        return self._reduce[stage].read(outputs.reduced[at]) if at in outputs.reduced else self._reduce[stage](acc)

    def _masters(self, params: Mapping[str, Params]) -> dict[Instance, Buffers]:
        """Master parameters on the primary ranks: buffers, or buckets where they are divided over dp."""
        placed = {}
        for s, r in self._own.items():
            shards, avals = self._shards[s], self.states[s].master
            if shards.chunked:
                made: Any = [shards.host_bucket(params, i).astype(shards.master) for i in shards.mastered]
            else:
                whole = self.pipeline.packed(s, params, shards.master) if shards.mastered else []
                made = [whole[i] for i in shards.mastered]
            placed[(r, s)] = [jax.device_put(b, a.sharding) for b, a in zip(made, avals, strict=True)]
        return placed

    def _fixed(self, params: Mapping[str, Params]) -> dict[str, Params]:
        """Copies of the parameters that are not trained."""
        fixed: dict[str, Params] = {layer.name: {} for layer in self.pipeline.model.layers}
        for layout in (self._shards[s].layout for s in self._own):
            for slot in layout.slots:
                if not layout.trains(slot) and (slot.layer, slot.path) not in layout.shared:
                    dtype = self.pipeline.master_dtype if jnp.issubdtype(slot.dtype, jnp.floating) else slot.dtype
                    insert_leaf(fixed[slot.layer], slot.path, np.array(get_leaf(params[slot.layer], slot.path), dtype))
        return fixed

    def _updates_for(self, extra: Mapping[str, Any]) -> Mapping[int, StageUpdate]:
        """The compiled updates for arguments like ``extra``."""
        kinds = _kinds(extra)
        if kinds not in self._updates:
            optimizers = stage_optimizers(self.optimizer, self._shards, _shapes(extra))
            if any(x.leaves != self._optimizers[s].leaves for s, x in optimizers.items()):
                raise ConfigError(
                    f"the optimizer keeps another state with the arguments {', '.join(extra)}; give them to TrainStep"
                )
            self._updates[kinds] = {s: self._compile_update(s, optimizers[s]) for s in self._own}
        return self._updates[kinds]

    def _compile_update(self, stage: int, optimizer: StageOptimizer) -> StageUpdate:
        acc = self.pipeline.functions[self.pipeline.primary(stage)].acc_avals
        return compile_update(self._shards[stage], optimizer.part, acc, optimizer.specs)

    def _compile_unpack(self, stage: int) -> Any:
        """From the buffers that a stage updates to whole leaves, split ones still on their shards."""
        shards, layout = self._shards[stage], self.pipeline.layout(stage)

        def unpack(buffers: Buffers) -> list[jax.Array]:
            given = dict(zip(shards.updated, buffers, strict=True))
            leaves = layout.unpack_leaves([given.get(i) for i in range(len(layout.buffers))])
            return [leaf for leaf, slot in zip(leaves, layout.slots, strict=True) if shards.updates(slot)]

        given = [shards.buffer_spec(i) for i in shards.updated]
        return on_rank(unpack, shards.mesh, (given,), [shards.whole_spec(slot) for slot in shards.updated_slots])

    def _compile_fresh(self, stage: int) -> Any:
        """From parameters and masters, as the update takes them, to the optimizer's state."""
        shards, optimizer = self._shards[stage], self._optimizers[stage]
        masters = [(shards.bucket_spec if shards.chunked else shards.buffer_spec)(i) for i in shards.mastered]
        given = ([shards.buffer_spec(i) for i in self._reads[stage]], masters)
        fresh = partial(fresh_state, shards, optimizer.part)
        return on_rank(fresh, shards.mesh, given, optimizer.specs)


def _square_aval(shards: StageShards, acc: Sequence[jax.ShapeDtypeStruct]) -> jax.ShapeDtypeStruct:
    """Of a stage's :func:`~jaxpipe.train.update.reduction.square_sum`."""
    dtype = acc[shards.updated[0]].dtype if shards.updated else jnp.float32
    return jax.ShapeDtypeStruct((2,), dtype)


def _with_buffers(buffers: Buffers, at: Sequence[int], new: Sequence[jax.Array]) -> Buffers:
    """``buffers`` with others in some places."""
    changed = dict(zip(at, new, strict=True))
    return [changed.get(i, b) for i, b in enumerate(buffers)]


def _shapes(extra: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of the arguments that an update gets, the mean loss with them.

    Raises:
        ConfigError: one is not a number or an array.
    """
    shapes = {}
    for name, value in {"value": 0.0, **extra}.items():
        try:
            aval = jax.typeof(value)
        except TypeError:
            kind = type(value).__name__
            raise ConfigError(
                f"extra argument {name!r} of the optimizer is a {kind}; want a number or an array"
            ) from None
        shapes[name] = jax.ShapeDtypeStruct(aval.shape, aval.dtype)
    return shapes


def _kinds(extra: Mapping[str, Any]) -> Hashable:
    """Equal for arguments of the same names, shapes and dtypes."""
    return tuple((name, a.shape, a.dtype) for name, a in sorted(_shapes(extra).items()))
