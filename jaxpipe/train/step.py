"""One training step: the pipeline's gradients, one global norm, an optax update per stage.

Master parameters are float32 (float64 under x64) buffers on the rank that runs the stage; with bfloat16 compute, the update
also emits the cast buffers, so no stage function ever casts a parameter. The norm for clipping is taken over all ranks, each
parameter once (tied copies and replicas are added to their owner first). A step whose norm is not finite leaves parameters
and optimizer state as they were. Nothing here waits for a device.
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
from jaxpipe.runtime.executor import StepOutputs
from jaxpipe.runtime.pipeline import Batch, Pipeline, get_leaf, replace_leaf
from jaxpipe.schedule import CostProfile, Timeline
from jaxpipe.stage.footprint import Footprint, compiled_footprint
from jaxpipe.stage.layer import Params, Path
from jaxpipe.train.step_memory import StageState, master_avals, step_memory

Instance = tuple[int, int]
Buffers = list[jax.Array]


@dataclass(frozen=True, slots=True)
class TrainState:
    """Everything that a step changes. ``master``, ``compute``, ``acc`` by (rank, stage); ``optimizer`` by stage, then layer.

    ``compute`` is ``master`` itself when both have one dtype. ``acc`` is all zeros between steps. A state is consumed by the
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
    was applied, the sum of weights. ``timeline``: measured, on recorded steps. ``outputs`` has the host-side timings (and no
    accumulators)."""

    loss: jax.Array
    grad_norm: jax.Array
    applied: jax.Array
    weight: jax.Array
    timeline: Timeline | None
    outputs: StepOutputs


class TrainStep:
    """``state, metrics = step(state, batch)``.

    Args:
        pipeline: compiled stages on their ranks.
        optimizer: an optax transformation of one layer's parameters (no clipping by norm: that is global and done here).
        clip_norm: bound on the global gradient norm; 0 for none.
    """

    def __init__(self, pipeline: Pipeline, optimizer: optax.GradientTransformation, *, clip_norm: float = 0.0) -> None:
        self.pipeline = pipeline
        self._tx = optimizer
        self._primary = {s: ranks[0] for s, ranks in pipeline.instances.items()}
        self._update = {s: self._compile_update(s) for s in self._primary}
        self._square = {s: jax.jit(partial(_square_sum, pipeline, s)) for s in self._primary}
        self._unpack = {s: jax.jit(pipeline.layout(s).unpack) for s in self._primary}
        self._fresh = jax.jit(lambda params: {name: optimizer.init(leaves) for name, leaves in params.items()})
        self._combine = jax.jit(partial(_combine, clip_norm=clip_norm))
        self._sum_losses = jax.jit(_sum_losses)
        self._ties = _TiedGradients(pipeline)
        self._states: dict[int, StageState] = {}  # for memory reports, as are the footprints of updates
        self._footprints: dict[int, Footprint] = {}

    def with_pipeline(self, pipeline: Pipeline) -> TrainStep:
        """The same step over ``pipeline``, which has the same stages on the same ranks in another order. Compiles nothing."""
        other = copy.copy(self)
        other.pipeline = pipeline
        return other

    def init(
        self, params: Mapping[str, Params], optimizer: Mapping[str, Any] | None = None, *, step: int = 0
    ) -> TrainState:
        """Place parameters (by layer name, any float dtype) and optimizer state (fresh unless given) on the ranks.

        Raises:
            CheckpointError: layers or leaves are missing, or shapes differ.
        """
        pipe = self.pipeline
        master = pipe.place(params, pipe.master_dtype)
        compute = master if not pipe.casts else pipe.place(params, pipe.compute_dtype)
        acc = {at: pipe.zeros(at) for at in pipe.all_instances}
        states: dict[int, dict[str, Any]] = {}
        for s, rank in self._primary.items():
            home = replicated(pipe.submeshes[rank])
            owned = trained(pipe.owned(s, self._unpack[s](master[(rank, s)])))
            if optimizer is not None and (missing := owned.keys() - optimizer.keys()):
                raise CheckpointError(
                    f"no optimizer state for layer {min(missing)}; there is one for {', '.join(optimizer)}"
                )
            given = self._fresh(owned) if optimizer is None else {name: optimizer[name] for name in owned}
            states[s] = jax.device_put(given, home)
        return TrainState(step, master, compute, acc, states)

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
        outputs = replace(outputs, acc={})  # whoever keeps the metrics would keep replicas' accumulators
        squares = [self._square[s](acc[(r, s)]) for s, r in self._primary.items()]
        first = replicated(pipe.submeshes[0])
        several = len(pipe.instances[len(pipe.boundaries) - 1]) > 1  # replicas of the last stage have some losses each
        loss_sum, weight = self._sum_losses(jax.device_put(outputs.losses, first) if several else outputs.losses)
        loss, norm, scale, ok = self._combine(*jax.device_put((squares, loss_sum, weight), first))
        master, compute = dict(state.master), dict(state.compute)
        optimizer = dict(state.optimizer)
        for s, r in self._primary.items():
            local_scale, local_ok = jax.device_put((scale, ok), replicated(pipe.submeshes[r]))
            new = self._update[s](master[(r, s)], acc[(r, s)], optimizer[s], local_scale, local_ok)
            master[(r, s)], compute[(r, s)], optimizer[s], acc[(r, s)] = new
        self._share(master)
        if not pipe.casts:
            compute = master
        else:
            self._share(compute)
        timeline = pipe.measured_timeline(outputs) if record else None
        metrics = StepMetrics(loss, norm, ok, weight, timeline, outputs)
        return TrainState(state.step + 1, master, compute, acc, optimizer), metrics

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
        for s in self._primary:
            if s not in self._states:
                self._states[s] = self._stage_state(s)
        return self._states

    def _stage_state(self, stage: int) -> StageState:
        pipe, rank = self.pipeline, self._primary[stage]
        home = replicated(pipe.submeshes[rank])
        master = master_avals(pipe, stage)
        owned = jax.eval_shape(lambda buffers: trained(pipe.owned(stage, pipe.layout(stage).unpack(buffers))), master)
        fresh = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=home), jax.eval_shape(self._fresh, owned)
        )
        return StageState(master, pipe.functions[(rank, stage)].acc_avals, fresh)

    def _update_footprint(self, stage: int) -> Footprint:
        if stage in self._footprints:
            return self._footprints[stage]
        state = self.stage_states()[stage]
        home = replicated(self.pipeline.submeshes[self._primary[stage]])
        dtype = state.acc[0].dtype if state.acc else jnp.float32
        scale, ok = (jax.ShapeDtypeStruct((), d, sharding=home) for d in (dtype, jnp.bool_))
        lowered = self._update[stage].lower(list(state.master), list(state.acc), state.optimizer, scale, ok)
        self._footprints[stage] = compiled_footprint(lowered.compile())
        return self._footprints[stage]

    def by_layer(self, state: TrainState) -> tuple[dict[str, Params], dict[str, Any]]:
        """Master parameters and optimizer state by layer name, each parameter once: what a checkpoint stores."""
        params: dict[str, Params] = {}
        optimizer: dict[str, Any] = {}
        for s, r in self._primary.items():
            params.update(self.pipeline.owned(s, self._unpack[s](state.master[(r, s)])))
            optimizer.update(state.optimizer[s])
        return params, optimizer

    def _share(self, buffers: dict[Instance, Buffers]) -> None:
        """Give updated parameters to tied copies, and then to replicas."""
        self._ties.spread(buffers)
        self.pipeline.copy_to_replicas(buffers)

    def _compile_update(self, stage: int) -> Any:
        pipe, tx = self.pipeline, self._tx
        layout = pipe.layout(stage)
        cast_to = pipe.compute_dtype if pipe.casts else None

        def update(master: Buffers, acc: Buffers, states: Mapping[str, Any], scale: jax.Array, ok: jax.Array) -> Any:
            tree = layout.unpack(master)
            params = trained(pipe.owned(stage, tree))
            grads = trained(pipe.owned(stage, pipe.unpack_acc(stage, acc)))
            new_params, new_states = {}, {}
            for name, leaves in params.items():
                scaled = jax.tree.map(lambda g, p: (g * scale).astype(p.dtype), grads[name], leaves)
                updates, new_state = tx.update(scaled, states[name], leaves)
                fresh = optax.apply_updates(leaves, updates)
                new_params[name] = jax.tree.map(partial(jnp.where, ok), fresh, leaves)
                new_states[name] = jax.tree.map(partial(jnp.where, ok), new_state, states[name])
            packed = layout.pack(pipe.with_owned(tree, new_params))
            cast = [_cast(b, cast_to) for b in packed] if cast_to is not None else []
            return packed, cast, new_states, [jnp.zeros_like(a) for a in acc]

        return jax.jit(update, donate_argnums=(0, 1, 2))


class _TiedGradients:
    """Adds gradients of tied copies to their owner, and hands the owner's new value to the copies."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipe = pipeline
        self._take = {t: jax.jit(partial(_take, pipeline, t.copy_stage, t.copy_path)) for t in pipeline.tied}
        self._give = {t: jax.jit(partial(_take, pipeline, t.owner_stage, t.owner_path)) for t in pipeline.tied}
        self._add = {
            t: jax.jit(partial(_add, pipeline, t.owner_stage, t.owner_path), donate_argnums=0) for t in pipeline.tied
        }
        self._put = {
            t: jax.jit(partial(_put, pipeline, t.copy_stage, t.copy_path), donate_argnums=0) for t in pipeline.tied
        }

    def gather(self, acc: dict[Instance, Buffers]) -> dict[Instance, Buffers]:
        for t in self._pipe.tied:
            owner, copy = self._pipe.primary(t.owner_stage), self._pipe.primary(t.copy_stage)
            leaf = jax.device_put(self._take[t](acc[copy]), replicated(self._pipe.submeshes[owner[0]]))
            acc[owner] = self._add[t](acc[owner], leaf)
        return acc

    def spread(self, buffers: dict[Instance, Buffers]) -> None:
        for t in self._pipe.tied:
            owner, copy = self._pipe.primary(t.owner_stage), self._pipe.primary(t.copy_stage)
            leaf = jax.device_put(self._give[t](buffers[owner]), replicated(self._pipe.submeshes[copy[0]]))
            buffers[copy] = self._put[t](buffers[copy], leaf)


def _take(pipe: Pipeline, stage: int, path: Path, buffers: Buffers) -> jax.Array:
    leaf: jax.Array = get_leaf(_unpack(pipe, stage, buffers), path)
    return leaf


def _put(pipe: Pipeline, stage: int, path: Path, buffers: Buffers, leaf: jax.Array) -> Buffers:
    packed = pipe.layout(stage).pack(replace_leaf(_unpack(pipe, stage, buffers), path, leaf))
    return list(packed[: len(buffers)])


def _add(pipe: Pipeline, stage: int, path: Path, buffers: Buffers, leaf: jax.Array) -> Buffers:
    return _put(pipe, stage, path, buffers, _take(pipe, stage, path, buffers) + leaf)


def _unpack(pipe: Pipeline, stage: int, buffers: Buffers) -> dict[str, Params]:
    """Parameters or accumulators (which lack the integer buffers) as a tree."""
    layout = pipe.layout(stage)
    return layout.unpack(buffers) if len(buffers) == len(layout.buffers) else pipe.unpack_acc(stage, buffers)


def _cast(buffer: jax.Array, dtype: Any) -> jax.Array:
    return buffer.astype(dtype) if jnp.issubdtype(buffer.dtype, jnp.floating) else buffer


def trained(tree: Any) -> Any:
    """A nested dict without its integer leaves, which no optimizer changes."""
    if not isinstance(tree, Mapping):
        return tree
    kept = {k: trained(v) for k, v in tree.items()}
    return {k: v for k, v in kept.items() if isinstance(v, Mapping) or jnp.issubdtype(v.dtype, jnp.inexact)}


def _square_sum(pipe: Pipeline, stage: int, acc: Buffers) -> jax.Array:
    leaves = jax.tree.leaves(trained(pipe.owned(stage, pipe.unpack_acc(stage, acc))))
    return sum((jnp.sum(jnp.square(g)) for g in leaves), start=jnp.zeros((), acc[0].dtype if acc else jnp.float32))


def _sum_losses(losses: Sequence[tuple[jax.Array, ...]]) -> tuple[jax.Array, jax.Array]:
    return sum(x[0] for x in losses), sum(x[1] for x in losses)  # type: ignore[return-value]


def _combine(
    squares: Sequence[jax.Array], loss_sum: jax.Array, weight: jax.Array, *, clip_norm: float
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Mean loss, norm of the mean gradient, factor for the summed gradient, and whether the step is finite."""
    total = jnp.where(weight > 0, weight, 1.0)
    norm = jnp.sqrt(sum(squares, start=jnp.zeros((), squares[0].dtype))) / total
    ok = jnp.isfinite(norm) & jnp.isfinite(loss_sum) & (weight > 0)
    shrink = jnp.minimum(1.0, clip_norm / jnp.maximum(norm, 1e-30)) if clip_norm > 0 else jnp.ones_like(norm)
    return loss_sum / total, norm, jnp.where(ok, shrink / total, 0.0), ok
