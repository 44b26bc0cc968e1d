"""One training step: the pipeline's gradients, one reduction of each, one global norm, an optax update per stage; its memory.

Parameters are updated in float32 (float64 under x64) on the rank that runs the stage; with bfloat16 compute, they are kept as
masters there, and the update also emits the cast buffers, so no stage function ever casts a parameter. Each device sums its own
gradients over the microbatches; after the pipeline tied copies and replicas are added to their owner, and each parameter is
reduced once over the devices of its rank (:mod:`jaxpipe.train.update.stage_update`). The norm for clipping is taken over all
ranks and devices, each parameter once. The optimizer is one of the whole model, of which each stage runs its layers' part
(:mod:`jaxpipe.train.update.layerwise`); with ZeRO-1 the update and its state are divided over dp. A step whose norm is not
finite leaves parameters and optimizer state as they were. Nothing here waits for a device.

Predicted memory is that of the pipeline with the optimizer's state beside it, or of the update after it, whichever is more. The
update of a stage works in place on masters, accumulators and optimizer state; with a smaller compute dtype the new compute
copies are made while the old ones are still there. Replicas of a stage (bidirectional placements) add their accumulators up
before it, and get the new parameters while they hold the old; tied leaves travel between their ranks. The update's peak counts
all of that as if it happened at once, so it is an upper bound; the pipeline's is exact (:mod:`jaxpipe.cost.memory`). Not
modelled: the optimizer's norm, and what the last step's metrics still hold (a scalar per action).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from jaxpipe.cost.memory import Kind, MemoryReport, RankMemory
from jaxpipe.errors import ConfigError
from jaxpipe.mesh import replicated
from jaxpipe.runtime.assembly import on_rank
from jaxpipe.runtime.batches import Batch
from jaxpipe.runtime.executor import StepDropped, StepOutputs
from jaxpipe.runtime.grid import aval_on, place
from jaxpipe.runtime.pipeline import Pipeline
from jaxpipe.schedule import CostProfile
from jaxpipe.stage.functions import Footprint, compiled_footprint, device_bytes, total_device_bytes
from jaxpipe.stage.model.layer import Params
from jaxpipe.stage.model.params import LeafSlot, by_path, get_leaf, insert_leaf, nested
from jaxpipe.train.checkpoints.leaves import joined_rows
from jaxpipe.train.state import Buffers, Instance, StepMetrics, TrainState, Unapplied, Updated
from jaxpipe.train.update import scalars, stage_update
from jaxpipe.train.update.optimizer import LearningRate
from jaxpipe.train.update.post_validation import LateUpdate, PostValidation, last_rank
from jaxpipe.train.update.scalars import StepReduction, TiedLeaves


@dataclass(frozen=True, slots=True)
class StageState:
    """Memory of the update of one stage, as shapes on the stage's primary rank. ``params``: parameter buffers that it reads
    and replaces; ``master``: masters, and ``new_params``, the parameter buffers that it makes of them; ``grads``: what
    gradients take beside the accumulators once they are reduced. ``divided``: over dp (ZeRO-1). ``twice``: of ``params``, those
    that are there old and new from an update ahead to its commit."""

    params: Sequence[jax.ShapeDtypeStruct]
    master: Sequence[jax.ShapeDtypeStruct]
    new_params: Sequence[jax.ShapeDtypeStruct]
    acc: Sequence[jax.ShapeDtypeStruct]
    optimizer: Any
    grads: Sequence[jax.ShapeDtypeStruct] = ()
    divided: bool = False
    twice: Sequence[jax.ShapeDtypeStruct] = ()

    @property
    def master_bytes(self) -> int:
        return total_device_bytes(self.master)

    @property
    def optimizer_bytes(self) -> int:
        return sum(device_bytes(leaf) for leaf in jax.tree.leaves(self.optimizer))

    @property
    def reduced_bytes(self) -> int:
        """Return what the reduction makes beside the accumulators: with the gradients two sums of squares."""
        return total_device_bytes(self.grads) + 2 * max((a.dtype.itemsize for a in self.acc), default=0)

    def workspace_bytes(self, update: Footprint) -> int:
        """Return what the update allocates beside new parameter buffers: XLA's temporaries, and what it does not write in
        place."""
        donated = self.master_bytes + self.optimizer_bytes + total_device_bytes(self.params)
        return update.temp_bytes + max(
            0, donated + total_device_bytes([] if self.divided else self.acc) - update.alias_bytes
        )


def step_memory(
    pipeline: Pipeline,
    states: Mapping[int, StageState],
    footprints: Mapping[int, tuple[Footprint, Footprint]] | None,
) -> MemoryReport:
    """Return the memory of a step, per rank: of the pipeline's instructions or of the update, whichever is more.

    Args:
        states: by stage, what its update takes.
        footprints: by stage, of the compiled update and of the reduction; None to count no temporaries.
    """
    resident: dict[int, dict[Kind, int]] = {r.rank: {} for r in pipeline.local_programs}
    for rank, held in resident.items():
        held |= {kind: total_device_bytes(avals) for kind, avals in resident_avals(pipeline, states, rank).items()}
        rank_stages = [s for s in states if pipeline.primary(s)[0] == rank]
        held["code"] = sum(x.code_bytes for s in rank_stages for x in footprints[s]) if footprints else 0
    # O's bytes leave when the copy ends: the bound for a run that does not stop after each instruction
    bytes_of_reductions = {
        (r, s): (states[s].reduced_bytes, footprints[s][1].temp_bytes if footprints else 0)
        for r, s in pipeline.reductions
    }
    report = pipeline.memory_report(
        resident,
        workspace=footprints is not None,
        timeline=pipeline.predicted_timeline(),
        reductions=bytes_of_reductions,
    )
    ranks = []
    for before in report.ranks:
        held = {**resident[before.rank], **_update(pipeline, before, states)}
        workspace = [
            max(states[s].workspace_bytes(update), reduction.temp_bytes)
            for s, (update, reduction) in (footprints or {}).items()
            if before.rank == pipeline.primary(s)[0]  # no update and no reduction runs at a replica
        ]
        held["temporaries"] = max(workspace, default=0)
        ranks.append(_larger(before, {k: n for k, n in held.items() if n}))
    return replace(report, ranks=tuple(ranks))


def resident_avals(
    pipeline: Pipeline, states: Mapping[int, StageState], rank: int
) -> dict[Kind, list[jax.ShapeDtypeStruct]]:
    """Return shapes of what a training step keeps on ``rank`` beside its compute parameters and accumulators."""
    rank_states = [states[s] for s in states if pipeline.primary(s)[0] == rank]
    return {
        "masters": [a for state in rank_states for a in (*state.master, *state.twice)],
        "optimizer": [a for state in rank_states for a in jax.tree.leaves(state.optimizer)],
    }


def _update(pipeline: Pipeline, before: RankMemory, states: Mapping[int, StageState]) -> dict[Kind, int]:
    """Bytes by kind on a rank while its stages are updated, without what the optimizer keeps."""
    held: dict[Kind, int] = {kind: before.peaks.get(kind, 0) for kind in ("parameters", "gradients", "losses", "code")}
    sent = 0
    for s, ranks in pipeline.instances.items():
        if before.rank not in ranks:
            continue
        acc, trained = total_device_bytes(states[s].acc), pipeline.functions[before.rank, s]
        held["gradients"] += acc if len(ranks) > 1 else 0  # of all replicas, to be added up
        if ranks[0] == before.rank:
            sent = max(sent, acc if len(ranks) > 1 else 0)
            early = (before.rank, s) in pipeline.reductions  # counted by then
            held["gradients"] += 0 if early else total_device_bytes(states[s].grads)
            held["parameters"] += total_device_bytes(states[s].new_params)  # new buffers beside the old
        else:
            held["parameters"] += total_device_bytes(trained.param_avals[: trained.layout.num_trained])
    held["gradients"] += sent
    held["communication"] = _tied_bytes(pipeline, before.rank)
    return held


def _tied_bytes(pipeline: Pipeline, rank: int) -> int:
    """Return leaves that are carried between this rank and others, so that tied copies stay equal: gradients, then values."""
    total = 0
    for tie in pipeline.tied:
        layout = pipeline.layout(tie.owner_stage)
        slot = next(slot for slot in layout.slots if (slot.layer, *slot.path) == tie.owner_path)
        ends = sum(pipeline.primary(s)[0] == rank for s in (tie.owner_stage, tie.copy_stage))
        total += ends * slot.size * pipeline.master_dtype.itemsize if layout.trains(slot) else 0
    return total


def _larger(rank: RankMemory, update: Mapping[Kind, int]) -> RankMemory:
    total = sum(update.values())
    peaks: dict[Kind, int] = {k: max(rank.peaks.get(k, 0), update.get(k, 0)) for k in {**rank.peaks, **update}}
    if total <= rank.peak_bytes:
        return replace(rank, peaks=peaks)
    return replace(rank, peak_bytes=total, at="the update", by_kind=dict(update), peaks=peaks)


class TrainStep:
    """``state, metrics = step(state, batch)``.

    Args:
        pipeline: compiled stages on their ranks.
        optimizer: any optax transformation of ``{layer: leaves}``, the trained parameters of the whole model, that can be
            applied layer by layer (no clipping by norm: that is global and done here). Its update gets the mean loss as
            ``value``, if it takes that.
        clip_norm: bound on the global gradient norm; 0 for none.
        zero1: divide optimizer state and update over the dp devices of each rank (:mod:`jaxpipe.train.update.stage_update`).
        post_validation: ``"off"``, ``"on"`` or ``"auto"``: whether the next step begins before it is known that this one is
            finite and not clipped (:mod:`jaxpipe.train.update.post_validation`). The same bits.
        reduction: how gradients are added over the devices of a rank: ``"ordered"``, in their order, which gives the same bits
            however they lie in processes; or ``"fast"``, as XLA's all-reduce and reduce-scatter do.
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
        reduction: Literal["ordered", "fast"] = "ordered",
        learning_rate: float | optax.Schedule | None = None,
        extra: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        if not 0 <= clip_norm < math.inf:
            raise ConfigError(
                f"clip_norm is {clip_norm}; want the largest norm of the gradient, such as 1.0, or 0 for any"
            )
        self.post_validation = PostValidation(post_validation, pipeline.ownership.processes)
        self._late = post_validation != "off"
        self.optimizer, self._extra = optimizer, dict(extra)
        self._primary = {s: ranks[0] for s, ranks in pipeline.instances.items()}
        self._own = {s: r for s, r in self._primary.items() if r in pipeline.ownership.ranks}
        if reduction not in ("ordered", "fast"):
            raise ConfigError(f"reduction is {reduction!r}; want 'ordered' or 'fast'")
        ordered, dtype = reduction == "ordered", pipeline.master_dtype
        self._views = {s: pipeline.rank_views[r] for s, r in self._primary.items()}
        self._shards = {
            s: stage_update.StageShards(pipeline.layout(s), view.rank, zero1, dtype, ordered)
            for s, view in self._views.items()
        }
        if not any(x.updated for x in self._shards.values()):
            raise ConfigError(f"model {pipeline.model.name} has nothing to train: no parameter of it is trainable")
        self.pipeline = pipeline
        self._reads = {s: stage_update.taken(x) for s, x in self._shards.items()}
        self._writes = {s: x.updated for s, x in self._shards.items()}
        self._optimizers = stage_update.stage_optimizers(optimizer, self._shards, _shapes(extra))
        self._updates = {_kinds(extra): {s: self._compile_update(s, self._optimizers[s]) for s in self._own}}
        self.states = {s: self._stage_state(s) for s in self._primary}  # shapes of what the updates take
        self._reduce = {
            s: stage_update.GradientReduction(self._shards[s], self.states[s].acc, self._views[s]) for s in self._own
        }
        self._unpack = {s: self._compile_unpack(s) for s in self._own}
        self._fresh = {s: self._compile_fresh(s) for s in self._own}
        self._rate = LearningRate(learning_rate, self.states[0].optimizer)
        untrained = {s: scalars.UntrainedLeaves(pipeline, s) for s in self._primary}
        self._untrained = {s: x for s, x in untrained.items() if x.buffers}
        squares = {s: _square_aval(x, self.states[s].acc) for s, x in self._shards.items()}
        self._scalars = StepReduction(pipeline, squares, clip_norm, last_rank(pipeline) if self._late else 0)
        self._ties = TiedLeaves(pipeline)
        self.pipeline = self._with_reductions(pipeline)
        self._footprints: dict[int, tuple[Footprint, Footprint]] = {}

    def with_pipeline(self, pipeline: Pipeline) -> TrainStep:
        """Return the same step over ``pipeline``, which has the same stages on the same ranks in another order. Compiles
        nothing."""
        other = copy.copy(self)
        other._scalars = self._scalars.on_hub(last_rank(pipeline) if self._late else 0)
        other.pipeline = self._with_reductions(pipeline)
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
            view = self._views[s]
            params_of_rank = view.widen(self._taken(s, compute[rank, s]), self._param_specs(s))
            fresh = self._fresh[s](params_of_rank, master[rank, s])
            homes = jax.tree.map(lambda a: a.sharding, self.states[s].optimizer)
            states[s] = fresh if view.spans else jax.device_put(fresh, homes)
        state = TrainState(step, master, compute, acc, states, self._fixed(params))
        # Compiles it now: at the first checkpoint the devices would wait for it.
        for s in self._own:
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
        # Tied copies and replicas first, as long as each device still has its own sum: the reduction then takes each
        # parameter once.
        acc = self._ties.gather(pipe.sum_replicas({**state.acc, **outputs.acc}))
        reduced = {s: self._reduced(s, outputs, acc.pop((r, s))) for s, r in self._own.items()}
        # Metrics keep ``outputs`` until they are read, a step later: accumulators and gradients must not live that
        # long.
        outputs = replace(outputs, acc={}, reduced={})
        sums = self._scalars.sum_losses(outputs.losses)
        # Before the norms are asked for: where moves between processes run one after another, it must not wait for them.
        guess = self._scalars.guess(sums) if self.post_validation.mode != "off" else None
        combined = self._scalars.combine({s: x.square for s, x in reduced.items()}, sums, stop, switch)
        unapplied = Unapplied(
            state.step + 1,
            {s: self._taken(s, state.compute[r, s]) for s, r in self._own.items()},
            dict(state.master),
            dict(state.optimizer),
            reduced,
            dict(state.compute),
            acc,
            state.fixed,
            combined,
            extra,
            updates,
            {at: x.of(state.compute[at]) for at in pipe.own_instances if (x := self._untrained.get(at[1]))},
        )
        timeline = pipe.measured_timeline(outputs) if record and pipe.ownership.processes.mine == 0 else None
        state, updated = self._updated(unapplied, guess)
        values = {f.name: getattr(combined, f.name) for f in fields(combined)}
        metrics = StepMetrics(
            **values, updated=updated, timeline=timeline, outputs=outputs, side_results=pipe.reported.by_layer
        )
        return state, metrics

    def _run(
        self, state: TrainState, batch: Batch, key: jax.Array | None, record: bool
    ) -> tuple[TrainState, StepOutputs]:
        """Return the pipeline on ``batch``, and ``state`` with all of the step before: committed while that runs, if it can."""
        # A recorded step begins with idle devices, so there is nothing to begin early for.
        late = state.late
        if late is not None and not record and late.open:
            with suppress(StepDropped):
                outputs = self.pipeline.run(state.compute, {}, batch, key, late=late.accumulators)
                return late.settled(), outputs
        state = state.committed()
        return state, self.pipeline.run(state.compute, state.acc, batch, key, record=record)

    # -- the update ---------------------------------------------------------------------------------------------------

    def _updated(self, unapplied: Unapplied, guess: scalars.Guess | None) -> tuple[TrainState, Callable[[], Updated]]:
        """Return the state after the step, if need be without what can be committed later, and what is known of it."""
        if guess is not None:
            is_valid = partial(scalars.agrees, unapplied.combined, *guess[:2])
            if self.post_validation.goes_ahead(is_valid):
                return self._ahead(unapplied, *guess, is_valid)
        updated = self._applied(unapplied)
        return unapplied.state(), lambda: updated

    def _ahead(
        self,
        unapplied: Unapplied,
        scale: jax.Array,
        loss: jax.Array,
        side_sums: Mapping[str, jax.Array],
        is_valid: Callable[[], bool],
    ) -> tuple[TrainState, Callable[[], Updated]]:
        rate = self._rate.before(unapplied.optimizer[min(self._own)])
        late_arguments, finite = {}, {}
        for s, r in self._own.items():
            at, reduced = (r, s), unapplied.reduced[s]
            late_arguments[s] = self._given(s, scale, np.True_, loss, unapplied.extra)
            inputs = unapplied.params[s], unapplied.master[at], reduced.grads, unapplied.optimizer[s]
            buffers, finite[s] = unapplied.updates[s].ahead(*inputs, *late_arguments[s])
            unapplied.compute[at] = _with_buffers(unapplied.compute[at], self._writes[s], buffers)
            unapplied.reduced[s] = replace(reduced, acc=[])  # made anew when it is needed
        self._broadcast_params(unapplied.compute)
        self._change_untrained(unapplied, side_sums, np.True_)
        # After it, which donates buffers with copies of tied leaves.
        for s, r in self._own.items():
            masters, reads = self._shards[s].mastered, zip(self._reads[s], unapplied.params[s], strict=True)
            unapplied.params[s] = [unapplied.compute[r, s][i] if i in masters else old for i, old in reads]
        updated = Updated(self._scalars.all_true(finite), rate)
        late = LateUpdate(
            unapplied, late_arguments, is_valid, updated, self._rate_after, self._applied, self.post_validation
        )
        return replace(unapplied.state(), acc={}, late=late), late.result

    def _applied(self, unapplied: Unapplied) -> Updated:
        """Update all of it."""
        combined, finite = unapplied.combined, {}
        rate = self._rate.before(unapplied.optimizer[min(self._own)])
        for s, r in self._own.items():
            at, reduced = (r, s), unapplied.reduced[s]
            late_arguments = self._given(s, combined.scale, combined.applied, combined.loss, unapplied.extra)
            inputs, update = (
                (unapplied.params[s], unapplied.master[at], reduced.grads, unapplied.optimizer[s]),
                unapplied.updates[s],
            )
            buffers, unapplied.master[at], unapplied.optimizer[s], zeros, finite[s] = update.full(
                *inputs, *late_arguments
            )
            unapplied.compute[at] = _with_buffers(unapplied.compute[at], self._writes[s], buffers)
            unapplied.acc[at] = zeros or reduced.acc or update.zeros()
        self._broadcast_params(unapplied.compute)
        self._change_untrained(unapplied, combined.side_sums, combined.applied)
        return Updated(self._scalars.all_true(finite), self._rate_after(unapplied.optimizer) if rate is None else rate)

    def _rate_after(self, optimizer: Mapping[int, Any]) -> jax.Array | None:
        return self._rate.after(optimizer[min(self._own)])

    def _given(self, stage: int, scale: Any, ok: Any, loss: jax.Array, extra: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the last arguments of an update, on the devices of its rank."""
        home = replicated(self.pipeline.submeshes[self._primary[stage]])
        arguments: tuple[Any, ...] = jax.device_put((scale, ok, {"value": loss, **extra}), home)
        return arguments

    def _change_untrained(self, unapplied: Unapplied, side_sums: Mapping[str, jax.Array], ok: Any) -> None:
        """Put in the leaves that layers change after a step, in all replicas: as they were where the step is not ``ok``."""
        for at, old in unapplied.untrained.items():
            home, leaves = replicated(self.pipeline.submeshes[at[0]]), self._untrained[at[1]]
            new = leaves.changed(old, *jax.device_put((side_sums, ok), home))
            unapplied.compute[at] = _with_buffers(unapplied.compute[at], leaves.buffers, new)

    def _broadcast_params(self, compute: dict[Instance, Buffers]) -> None:
        """New parameters to tied copies and replicas."""
        self._ties.spread(compute)
        self.pipeline.copy_to_replicas(compute)

    # -- by layer -----------------------------------------------------------------------------------------------------

    def by_layer(self, state: TrainState) -> tuple[dict[str, Params], dict[str, Any]]:
        """Master parameters and optimizer state by layer name, each parameter once: what a checkpoint stores. Leaves are whole,
        but for those that other processes have parts of (ZeRO-1's chunks, or shards): of these, what is in this one
        (:class:`~jaxpipe.train.checkpoints.leaves.Fragment`). The same bits however many ranks and devices they were divided
        over; valid until the next step, which reuses the memory."""
        state.require_unused()
        state = state.committed()
        params: dict[str, Params] = {}
        optimizer: dict[str, Any] = {}
        for s, r in self._own.items():
            shards, view = self._shards[s], self._views[s]
            arrays = view.narrow_whole(self._unpack[s](self._whole_buffers(s, state)))
            leaves: dict[LeafSlot, Any] = {
                slot: stage_update.own_shards(x, slot) for slot, x in zip(shards.updated_slots, arrays, strict=True)
            }
            if shards.chunked:
                leaves |= shards.host_leaves(dict(zip(shards.mastered, state.master[(r, s)], strict=True)))
            trained = shards.tree([leaves.get(slot) for slot in shards.layout.slots])
            changed = self._untrained[s].on_host(state.compute[r, s]) if s in self._untrained else {}
            for name, tree in trained.items():
                leaf_of = by_path(state.fixed[name]) | by_path(changed.get(name, {})) | by_path(tree)
                params[name] = nested(leaf_of)
            optimizer |= self._optimizers[s].by_layer(view.narrow_whole(state.optimizer[s]))
        model = self.pipeline.model
        return model.joined(params, joined_rows), model.joined(optimizer, joined_rows)

    def _taken(self, stage: int, params: Buffers) -> Buffers:
        """Return those of a stage's parameter buffers that its update reads."""
        return [params[i] for i in self._reads[stage]]

    def _whole_buffers(self, stage: int, state: TrainState) -> Buffers:
        """Return the buffers that a stage updates, on the whole rank, masters in place of what is computed with unless they are
        divided over dp."""
        at, shards = (self._primary[stage], stage), self._shards[stage]
        masters = {} if shards.chunked else dict(zip(shards.mastered, state.master[at], strict=True))
        compute = [state.compute[at][i] for i in shards.updated]
        on_rank = self._views[stage].widen(compute, [shards.buffer_spec(i) for i in shards.updated])
        return [masters.get(i, buffer) for i, buffer in zip(shards.updated, on_rank, strict=True)]

    # -- memory -------------------------------------------------------------------------------------------------------

    def memory_report(self, *, workspace: bool = True) -> MemoryReport:
        """Predicted memory of a device of each rank in a step, parameters and optimizer state included, by kind. Compiles
        what a step runs, unless it has run already; without ``workspace`` (XLA's temporaries) it compiles nothing."""
        footprints = {s: self._stage_footprints(s) for s in self._own} if workspace else None
        return step_memory(self.pipeline, self.states, footprints)

    def with_state(self, costs: CostProfile) -> CostProfile:
        """``costs`` with masters and optimizer state among the bytes that stay (``optimizer_bytes``)."""
        state_bytes = [s.optimizer_bytes + s.master_bytes + total_device_bytes(s.twice) for s in self.states.values()]
        return replace(
            costs, optimizer_bytes=tuple(a + float(b) for a, b in zip(costs.optimizer_bytes, state_bytes, strict=True))
        )

    def _stage_state(self, stage: int) -> StageState:
        pipe, shards = self.pipeline, self._shards[stage]
        functions = pipe.functions[pipe.primary(stage)]
        param_avals, acc_avals = (
            [aval_on(shards.mesh, a) for a in avals] for avals in (functions.param_avals, functions.acc_avals)
        )

        def master(i: int) -> jax.ShapeDtypeStruct:
            b = param_avals[i]
            aval = jax.ShapeDtypeStruct(b.shape, shards.master, sharding=b.sharding)
            return shards.bucket_aval(i) if shards.chunked else aval

        return StageState(
            params=[param_avals[i] for i in self._reads[stage]],
            master=[master(i) for i in shards.mastered],
            new_params=[param_avals[i] for i in shards.mastered],
            acc=acc_avals,
            optimizer=self._optimizers[stage].avals,
            grads=[shards.bucket_aval(i) for i in shards.updated] if shards.chunked else [],
            divided=shards.chunked,
            twice=[param_avals[i] for i in shards.updated if i not in shards.mastered] if self._late else [],
        )

    def _stage_footprints(self, stage: int) -> tuple[Footprint, Footprint]:
        """Return the footprints of an update, and of the reduction before it where that is a program of its own."""
        if stage in self._footprints:
            return self._footprints[stage]
        state, shards = self.states[stage], self._shards[stage]
        dtype = state.acc[0].dtype if state.acc else jnp.float32
        scale, ok = (shards.same_aval(jax.ShapeDtypeStruct(*a)) for a in (((2,), dtype), ((), jnp.bool_)))
        extra = jax.tree.map(shards.same_aval, _shapes(self._extra))
        grads = list(state.grads) if shards.chunked else list(state.acc)
        update = self._updates[_kinds(self._extra)][stage]
        arguments = list(state.params), list(state.master), grads, state.optimizer, scale, ok, extra
        halves = (update.ahead, update.commit) if self._late else ()
        parts = [compiled_footprint(program.lower(*arguments).compile()) for program in (update.full, *halves)]
        temp, code = max(x.temp_bytes for x in parts), sum(x.code_bytes for x in parts)
        reduction = Footprint()
        if shards.mesh.size > 1:
            reduction = compiled_footprint(self._reduce[stage].function.lower(list(state.acc)).compile())
        self._footprints[stage] = replace(parts[0], temp_bytes=temp, code_bytes=code), reduction
        return self._footprints[stage]

    # -- parts --------------------------------------------------------------------------------------------------------

    def _with_reductions(self, pipeline: Pipeline) -> Pipeline:
        """``pipeline``, which adds gradients up as this step does."""
        reductions = {(r, s): self._reduce[s].dispatch for r, s in pipeline.reduced if s in self._own}
        return pipeline if pipeline.reductions == reductions else pipeline.with_reductions(reductions)

    def _reduced(self, stage: int, outputs: StepOutputs, acc: Buffers) -> stage_update.Reduced:
        """Return the reduced gradients of a stage: dispatched in the pipeline, or now."""
        at = (self._primary[stage], stage)
        return self._reduce[stage].read(outputs.reduced[at]) if at in outputs.reduced else self._reduce[stage](acc)

    def _masters(self, params: Mapping[str, Params]) -> dict[Instance, Buffers]:
        """Master parameters on the primary ranks: buffers, or buckets where they are divided over dp."""
        placed = {}
        for s, r in self._own.items():
            shards, avals = self._shards[s], self.states[s].master
            if shards.chunked:
                masters: Any = [shards.host_bucket(params, i).astype(shards.master) for i in shards.mastered]
            else:
                buffers = self.pipeline.packed(s, params, shards.master) if shards.mastered else []
                masters = [buffers[i] for i in shards.mastered]
            placed[(r, s)] = place(masters, [a.sharding for a in avals if a.sharding])
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

    def _updates_for(self, extra: Mapping[str, Any]) -> Mapping[int, stage_update.StageUpdate]:
        """Return the compiled updates for arguments like ``extra``."""
        kinds = _kinds(extra)
        if kinds not in self._updates:
            optimizers = stage_update.stage_optimizers(self.optimizer, self._shards, _shapes(extra))
            if any(x.leaves != self._optimizers[s].leaves for s, x in optimizers.items()):
                raise ConfigError(
                    f"the optimizer keeps another state with the arguments {', '.join(extra)}; give them to TrainStep"
                )
            self._updates[kinds] = {s: self._compile_update(s, optimizers[s]) for s in self._own}
        return self._updates[kinds]

    def _compile_update(self, stage: int, optimizer: stage_update.StageOptimizer) -> stage_update.StageUpdate:
        acc = self.pipeline.functions[self.pipeline.primary(stage)].acc_avals
        return stage_update.compile_update(
            self._shards[stage], optimizer.part, acc, optimizer.specs, self._views[stage]
        )

    def _compile_unpack(self, stage: int) -> Any:
        """Compile what makes whole leaves of the buffers that a stage updates, split ones still on their shards."""
        shards, layout = self._shards[stage], self.pipeline.layout(stage)

        def unpack(buffers: Buffers) -> list[jax.Array]:
            buffer_of = dict(zip(shards.updated, buffers, strict=True))
            leaves = layout.unpack_leaves([buffer_of.get(i) for i in range(len(layout.buffers))])
            return [leaf for leaf, slot in zip(leaves, layout.slots, strict=True) if shards.updates(slot)]

        specs = [shards.buffer_spec(i) for i in shards.updated]
        return on_rank(unpack, shards.mesh, (specs,), [shards.whole_spec(slot) for slot in shards.updated_slots])

    def _param_specs(self, stage: int) -> list[PartitionSpec]:
        """Return how the parameter buffers lie that the update of a stage reads."""
        return [self._shards[stage].buffer_spec(i) for i in self._reads[stage]]

    def _compile_fresh(self, stage: int) -> Any:
        """Compile what makes the optimizer's state of parameters and masters, as the update takes them."""
        shards, optimizer = self._shards[stage], self._optimizers[stage]
        masters = [(shards.bucket_spec if shards.chunked else shards.buffer_spec)(i) for i in shards.mastered]
        specs = (self._param_specs(stage), masters)
        fresh = partial(stage_update.fresh_state, shards, optimizer.part)
        return on_rank(fresh, shards.mesh, specs, optimizer.specs)


def _square_aval(shards: stage_update.StageShards, acc: Sequence[jax.ShapeDtypeStruct]) -> jax.ShapeDtypeStruct:
    """Return shape and dtype of a stage's :func:`~jaxpipe.train.update.stage_update.square_sum`."""
    dtype = acc[shards.updated[0]].dtype if shards.updated else jnp.float32
    return jax.ShapeDtypeStruct((2,), dtype)


def _with_buffers(buffers: Buffers, at: Sequence[int], new: Sequence[jax.Array]) -> Buffers:
    """``buffers`` with others in some places."""
    changed = dict(zip(at, new, strict=True))
    return [changed.get(i, b) for i, b in enumerate(buffers)]


def _shapes(extra: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
    """Return shapes of the arguments that an update gets, the mean loss with them.

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
