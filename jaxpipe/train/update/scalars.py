"""Exchange between ranks what a step needs outside the pipeline: its scalars, and leaves that two stages use.

Scalars of all ranks become one loss, norm and factor, and whether all is finite. One rank computes them, the *hub*, always
by the same functions of the same numbers, so that their bits do not depend on how ranks are divided between processes. Nothing
here waits for a device, nor for another process.

Of tied leaves the gradients of the copies are added to their owner's, and the owner's new value goes to the copies, shard by
shard: device k of the owner's rank exchanges with device k of the copy's. Gradients are added before the reduction, while each
device still has its own sum, so that a tied parameter is reduced once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe.axes import DATA
from jaxpipe.errors import StageError
from jaxpipe.mesh import replicated, spec_of, with_several
from jaxpipe.runtime.assembly import Tie, on_rank
from jaxpipe.runtime.grid import RankView, sum_over
from jaxpipe.runtime.pipeline import Pipeline
from jaxpipe.stage.functions import Reported
from jaxpipe.stage.model.params import LeafSlot, by_layer, by_path, get_leaf, insert_leaf
from jaxpipe.stage.split.trace import sum_in_order
from jaxpipe.train.update.stage_update import SHRUNK


@dataclass(frozen=True, slots=True)
class Combined:
    """Device scalars of a step: mean loss per weighted token (nats; 0 without any weight, NaN if weights sum to less), global
    gradient norm before clipping, ``scale``: the factors (first one, then the other) of the summed gradient, whether the step
    is finite and the update ``applied``, the sum of weights; ``metrics``, by name, what the loss layer reports: each sum ÷ its
    weight (NaN where that is 0); ``side_sums``, by name, what
    layers return beside ``y``, one after the other; ``stop``, ``switch``: whether any process wants to stop, or to go on with
    another schedule."""

    loss: jax.Array
    grad_norm: jax.Array
    scale: jax.Array
    applied: jax.Array
    weight: jax.Array
    metrics: Mapping[str, jax.Array]
    side_sums: Mapping[str, jax.Array]
    stop: jax.Array | bool
    switch: jax.Array | bool


jax.tree_util.register_dataclass(Combined)


class StepReduction:
    """Reduces scalars of the steps of ``pipeline``'s stages, on rank ``hub``. ``squares``: shapes of what each stage's
    reduction gives."""

    def __init__(
        self, pipeline: Pipeline, squares: Mapping[int, jax.ShapeDtypeStruct], clip_norm: float, hub: int = 0
    ) -> None:
        self._owned, self._homes = pipeline.ownership, [replicated(mesh) for mesh in pipeline.submeshes]
        self._primary = {s: ranks[0] for s, ranks in pipeline.instances.items()}
        self._combine = jax.jit(partial(_combine, clip_norm=clip_norm))
        self._guess = jax.jit(partial(_guess, dtype=next(iter(squares.values())).dtype))
        self._all = jax.jit(lambda each: jnp.all(jnp.stack(each)))
        self._any = jax.jit(lambda each: [jnp.any(jnp.stack(flags)) for flags in zip(*each, strict=True)])
        lossy = [s for s, f in enumerate(pipeline.stages) if f.reports]
        ranks = {r for s in lossy for r in pipeline.instances[s]}
        self._several = sum(len(pipeline.instances[s]) for s in lossy) > 1  # each has some of the losses
        self._apart = len({self._owned.process_of[r] for r in ranks}) > 1  # rank 0 gets them all and adds them up
        self._loss_rank = 0 if self._apart else min(ranks)
        forward = {s: pipeline.stages[s].functions["F"] for s in lossy}
        made_there = {s: list(zip(f.outputs, f.avals_out, strict=True)) for s, f in forward.items()}
        self._ports = {(s, port.index): a for s, of in made_there.items() for port, a in of if port.kind == "loss"}
        view = pipeline.rank_views[self._loss_rank]
        self._sum_losses = LossReduction(view, [spec_of(a) for _, a in sorted(self._ports.items())], pipeline.reported)
        self._views = pipeline.rank_views
        self._hub, self._any_column = hub, AnyColumn(self._views[hub])
        if not self._owned.divided:
            return
        self._squares = squares
        results = [(value, p.rank) for p in pipeline.programs for value, _ in p.results if value.kind == "loss"]
        self._losses = sorted((v.microbatch, v.stage, v.index, rank) for v, rank in results)
        ports = [_of_device(a) for _, a in sorted(self._ports.items())]
        self._sums = jax.eval_shape(partial(_reported_sums, reported=pipeline.reported), ports)
        loss_sum, weight, *reported = self._sums
        combined: Any = jax.eval_shape(self._combine, list(squares.values()), loss_sum, weight)
        self._combined = with_flags(combined, weight, reported, [jax.ShapeDtypeStruct((), jnp.bool_)] * 2)
        self._guessed = *jax.eval_shape(self._guess, loss_sum, weight), reported[-1]
        self._link()

    def _link(self) -> None:
        """Link the ranks between which scalars go, outside of programs."""
        leaders, loss_ranks = self._owned.leaders, {rank for *_, rank in self._losses} if self._apart else set()
        to_hub = {*self._primary.values(), self._loss_rank, *leaders}
        pairs = {(self._hub, rank) for rank in to_hub} | {(self._loss_rank, rank) for rank in {*leaders, *loss_ranks}}
        self._owned.link(pairs)

    def on_hub(self, hub: int) -> StepReduction:
        """Return the same with another hub."""
        if hub == self._hub:
            return self
        other = copy(self)
        other._hub, other._any_column = hub, AnyColumn(self._views[hub])
        if self._owned.divided:
            other._link()
        return other

    def sum_losses(self, losses: Sequence[tuple[jax.Array, ...]]) -> LossSums | None:
        """Sum the ``losses`` that this process has with those of others; None where the rank that does is elsewhere."""
        # Every process runs the same sequence of moves, also those that neither send nor receive: transports match
        # messages by their order.
        if self._apart:
            losses = self._all_losses(losses)
        return self._summed(losses) if self._loss_rank in self._owned.ranks else None

    def guess(self, sums: LossSums | None) -> Guess:
        """``scale``, ``loss`` and ``side_sums`` as :meth:`combine` finds them if the step is finite and not clipped, known once
        the losses are; where they were summed, or on the first rank of this process."""
        guess: Any = None if sums is None else (*self._guess(*sums[:2]), sums[-1])
        everywhere: Guess = self._spread(guess, self._loss_rank, self._guessed) if self._owned.divided else guess
        return everywhere

    def combine(
        self, squares: Mapping[int, jax.Array], sums: LossSums | None, stop: bool = False, switch: bool = False
    ) -> Combined:
        """Combine the ``squares`` that this process has, the ``sums`` of :meth:`sum_losses`, and whether this process wants to
        ``stop`` or ``switch``; on the hub, or on the first rank of this process."""
        combined_scalars: Any
        combined: Any = None
        if not self._owned.divided:
            assert sums is not None, "one process has all sums"
            loss_sum, weight, *reported = sums
            values = (list(squares.values()), loss_sum, weight)
            combined_scalars = self._combine(*jax.device_put(values, self._homes[self._hub]))
            return with_flags(combined_scalars, weight, reported, [stop, switch])
        first_rank = self._owned.ranks[0]
        squares_by_stage = [
            self._to_hub([squares[s]] if s in squares else [], r, [self._squares[s]]) for s, r in self._primary.items()
        ]
        shapes, structure = jax.tree.flatten(self._sums)
        sums_on_hub = self._to_hub(jax.tree.leaves(sums), self._loss_rank, shapes)
        flags = jax.device_put([np.asarray(stop), np.asarray(switch)], self._homes[first_rank])
        flag_avals = [self._combined.stop, self._combined.switch]
        requests = [self._to_hub(flags if k == first_rank else [], k, flag_avals) for k in self._owned.leaders]
        if self._hub in self._owned.ranks:
            loss_sum, weight, *reported = jax.tree.unflatten(structure, sums_on_hub)
            combined_scalars = self._combine([square for one in squares_by_stage for square in one], loss_sum, weight)
            combined = with_flags(combined_scalars, weight, reported, self._any_column(self._any(requests)))
        everywhere: Combined = self._spread(combined, self._hub, self._combined)
        return everywhere

    def _summed(self, losses: Sequence[tuple[jax.Array, ...]]) -> LossSums:
        """Return the sums of all losses, which are in this process."""
        if self._several:
            mesh = self._homes[self._loss_rank].mesh
            homes = tuple(NamedSharding(mesh, spec_of(a)) for _, a in sorted(self._ports.items()))
            losses = jax.device_put(list(losses), [homes] * len(losses))
        return self._sum_losses(losses)

    def all_true(self, flags: Mapping[int, jax.Array]) -> jax.Array:
        """Return whether all of the scalars, by stage, are true."""
        if not self._owned.divided:
            all_flags: jax.Array = self._all(jax.device_put(list(flags.values()), self._homes[self._hub]))
            return all_flags
        flag = self._combined.applied
        flags_by_stage = [self._to_hub([flags[s]] if s in flags else [], r, [flag]) for s, r in self._primary.items()]
        answer_on_hub = (
            self._all([x for one in flags_by_stage for x in one]) if self._hub in self._owned.ranks else None
        )
        answer: jax.Array = self._spread(answer_on_hub, self._hub, flag)
        return answer

    def _all_losses(self, losses: Sequence[tuple[jax.Array, ...]]) -> list[tuple[jax.Array, ...]]:
        """Return the losses of all microbatches, in their order, on rank 0; ``losses``: those of this process, in theirs."""
        local_keys = [at for at in self._losses if at[-1] in self._owned.ranks]
        local_losses = dict(zip(local_keys, (x for ports in losses for x in ports), strict=True))
        losses_by_key: dict[tuple[int, ...], jax.Array] = {}
        for rank in sorted({rank for *_, rank in self._losses}):
            these = [at for at in self._losses if at[-1] == rank]
            ports = [self._ports[stage, index] for _, stage, index, _ in these]
            avals = [on_sharding(a, NamedSharding(self._homes[0].mesh, spec_of(a))) for a in ports]
            moved = self._owned.move([local_losses[at] for at in these if at in local_losses], rank, 0, avals)
            losses_by_key |= zip(these, moved, strict=False)
        return [tuple(losses_by_key[at] for at in of) for _, of in groupby(sorted(losses_by_key), key=itemgetter(0))]

    def _to_hub(self, arrays: Sequence[Any], src: int, avals: Sequence[Any]) -> Sequence[jax.Array]:
        return self._owned.move(arrays, src, self._hub, [on_sharding(a, self._homes[self._hub]) for a in avals])

    def _spread(self, tree: Any, src: int, avals: Any) -> Any:
        """``tree`` of rank ``src``, as ``avals`` say, in its process, or on the first rank of this one."""
        shapes, structure = jax.tree.flatten(avals)
        return jax.tree.unflatten(structure, self._owned.spread(jax.tree.leaves(tree), src, shapes))


def with_flags(combined: Any, weight: Any, reported: Sequence[Any], flags: Sequence[Any]) -> Combined:
    loss, norm, scale, ok = combined
    return Combined(loss, norm, scale, ok, weight, *reported, *flags)


def _of_device(port: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Return what a device holds of a ``loss`` port, one number as a vector."""
    assert port.sharding is not None
    return jax.ShapeDtypeStruct(port.sharding.shard_shape(port.shape) or (1,), port.dtype)


def on_sharding(aval: Any, home: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=home)


LossSums = tuple[jax.Array, jax.Array, dict[str, jax.Array], dict[str, jax.Array]]
"""Loss sum and weight sum of a step, its metrics by name, and what layers return beside ``y``
(:meth:`~jaxpipe.runtime.assembly.Reported.side_sums`)."""

Guess = tuple[jax.Array, jax.Array, dict[str, jax.Array]]
"""``scale``, ``loss`` and ``side_sums``, before it is known whether the step is applied."""


class LossReduction:
    """``sums = loss_sums(losses)``: loss sum and weight sum over the microbatches, and each metric's sum ÷ its weight, on the
    column's devices, given the ``loss`` ports of each microbatch there, which lie as ``specs`` say. A port's terms are added in
    the order of the devices of the whole rank in ``view``, then in that of the microbatches; of peaks the largest counts."""

    def __init__(self, view: RankView, specs: Sequence[P], reported: Reported) -> None:
        self._view = view
        self._axes = with_several(view.rank, DATA)
        self._stacked = [P(None, self._axes)] * len(specs)

        def add(rows: Sequence[jax.Array]) -> Any:
            totals = [sum_in_order(sum_over(row, self._axes, view.rank)) for row in rows]
            for k in reported.peaks:
                totals[k] = jax.lax.pmax(rows[k].max(0), self._axes) if self._axes else rows[k].max(0)
            return _reported_sums(totals, reported=reported)

        if view.spans:
            self._stack = on_rank(_stacked_ports, view.column, (specs,), self._stacked)
            self._add = on_rank(add, view.rank, (self._stacked,), P())
        else:
            self._add = on_rank(lambda ports: add(_stacked_ports(ports)), view.rank, (specs,), P())

    def __call__(self, losses: Sequence[tuple[jax.Array, ...]]) -> LossSums:
        ports: Any = [list(port) for port in zip(*losses, strict=True)]
        if self._view.spans:
            ports = self._view.widen(self._stack(ports), self._stacked)
        sums: LossSums = self._view.narrow(self._add(ports))
        return sums


def _stacked_ports(ports: Sequence[Sequence[jax.Array]]) -> list[jax.Array]:
    """A device's ports, each ``[microbatches, n]``."""
    return [jnp.stack([x.reshape(-1) for x in port]) for port in ports]


def _reported_sums(totals: Sequence[Any], *, reported: Reported) -> LossSums:
    """``totals``: of each port a vector."""
    sums = [vector[0] for vector in totals]
    pairs = {n: (sums[total], sums[weight]) for n, (total, weight) in reported.metrics.items()}
    pairs |= reported.layer_losses(totals)
    means = {name: total / weight for name, (total, weight) in pairs.items()}
    return *reported.loss(sums), means, reported.side_sums(totals)


class AnyColumn:
    """``flags = any_column(flags)``: whether each of some scalars is true in any column of the rank in ``view``."""

    def __init__(self, view: RankView) -> None:
        self._view = view

        def any_of(flags: Sequence[jax.Array]) -> list[jax.Array]:
            return [jax.lax.psum(flag.astype(jnp.int32), tuple(view.rank.axis_names)) > 0 for flag in flags]

        # The flags are no copies of one scalar, as their spec has it: each device hands in its own column's.
        self._any = on_rank(any_of, view.rank, (P(),), P())

    def __call__(self, flags: Sequence[jax.Array]) -> Sequence[jax.Array]:
        view = self._view
        any_flags: Sequence[jax.Array] = (
            view.narrow(self._any(view.widen_replicated(list(flags)))) if view.spans else flags
        )
        return any_flags


def _guess(loss_sum: jax.Array, weight: jax.Array, *, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Factors of a gradient that is not clipped, and the mean loss. ``dtype``: of the squares."""
    total = jnp.where(weight > 0, weight, 1.0)
    one = jnp.ones((), jnp.result_type(dtype, weight))
    return jnp.stack([one, one / total]), loss_sum / total


def agrees(combined: Combined, scale: jax.Array, loss: jax.Array) -> bool:
    """Return whether a step is finite and its scalars are as :meth:`StepReduction.guess` has them. Waits for them."""
    # On the host: a program that compares them would stand before the next step's forwards on its device.
    ok, *pairs = jax.device_get((combined.applied, (combined.scale, scale), (combined.loss, loss)))
    return bool(ok) and all(np.array_equal(a, b) for a, b in pairs)


def _combine(
    squares: Sequence[jax.Array], loss_sum: jax.Array, weight: jax.Array, *, clip_norm: float
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Mean loss, norm of the mean gradient, the factors (first one, then the other) of the summed gradient, and whether the
    step is finite. Of a gradient whose squares overflow, norm and factors come from :data:`SHRUNK` ones."""
    # A weight of 0 (no target) would make NaN of a loss of 0; what such a step gives is dropped by ``ok``.
    total = jnp.where(weight > 0, weight, 1.0)
    plain, shrunk = jnp.sqrt(sum(squares, start=jnp.zeros(2, squares[0].dtype)))
    large = jnp.isinf(plain)
    norm = jnp.where(large, shrunk / total / SHRUNK, plain / total)
    shrink = jnp.minimum(1.0, clip_norm / jnp.maximum(norm, 1e-30)) if clip_norm > 0 else jnp.ones_like(norm)
    # Two factors where one would underflow: first the gradient becomes as small as SHRUNK, then it gets the norm that
    # is wanted.
    twice = large & (shrink < 1)
    first, second = jnp.where(twice, SHRUNK, 1.0), jnp.where(twice, clip_norm / shrunk, shrink / total)
    normal = second >= np.finfo(second.dtype).tiny  # a smaller one may count as zero
    ok = jnp.isfinite(norm) & jnp.isfinite(loss_sum) & (weight > 0) & jnp.isfinite(weight) & normal
    loss = jnp.where(weight < 0, jnp.nan, loss_sum / total)
    return loss, norm, jnp.where(ok, jnp.stack([first, second]), 0.0), ok


class UntrainedLeaves:
    """The leaves of a stage that its layers change after a step (:attr:`~jaxpipe.stage.model.layer.Layer.after_step`).
    ``buffers``: those that hold them.

    Raises:
        StageError: such a leaf is trained, divided, in a narrower dtype than masters, or another layer's too; or there is none.
    """

    def __init__(self, pipeline: Pipeline, stage: int) -> None:
        self._layout, self._reported = pipeline.layout(stage), pipeline.reported
        self._layers = {x.name: x.after_step for x in pipeline.layers(stage) if x.after_step is not None}
        layout, functions = self._layout, pipeline.stages[stage]
        slot_of = {(slot.layer, slot.path): slot for slot in layout.slots}
        outputs = zip(functions.functions["F"].outputs, functions.functions["F"].avals_out, strict=True)
        dtypes = {port.index: aval.dtype for port, aval in outputs if port.kind == "loss"}
        tied = {(owner, tuple(path)) for layer in pipeline.model.layers for owner, path in layer.tied.values()}
        leaves = by_layer(layout.layers, ((x, jax.ShapeDtypeStruct(x.shape, x.dtype)) for x in slot_of.values()))
        buffers = set()
        for k, name in enumerate(layout.layers):
            sides = [side for side in functions.sides if side.layer == k and side.kind != "loss"]
            sums = {side.name: jax.ShapeDtypeStruct(side.shape, dtypes[side.port]) for side in sides}
            returned = by_path(jax.eval_shape(self._layers[name], leaves[name], sums)) if name in self._layers else {}
            for path in returned:
                slot = slot_of.get((name, path))
                narrow = slot and jnp.issubdtype(slot.dtype, jnp.inexact) and slot.dtype != pipeline.master_dtype
                if slot is None or slot.axis is not None or layout.trains(slot) or narrow or (name, path) in tied:
                    raise StageError(
                        f"after_step of layer {name!r} changes {'/'.join(path)}; want a leaf that is not trained, whole on "
                        f"each device, tied to none, and {np.dtype(pipeline.master_dtype)} (Layer.float32)"
                    )
                buffers.add(slot.buffer)
        self.buffers = sorted(buffers)
        self._jitted = jax.jit(self._changed)

    def of(self, buffers: Buffers) -> Buffers:
        """Return those of a stage's parameter buffers."""
        return [buffers[i] for i in self.buffers]

    def changed(self, old: Buffers, side_sums: Mapping[str, jax.Array], ok: jax.Array) -> Buffers:
        """Return new ones, given the sums of the step; the old ones where it is not ``ok``."""
        new: Buffers = self._jitted(old, side_sums, ok)
        return new

    def _changed(self, old: Buffers, side_sums: Mapping[str, jax.Array], ok: jax.Array) -> Buffers:
        trees, named = self._trees(old), self._reported.by_layer(side_sums)
        for name, change in self._layers.items():
            sums = {key: of_layer[name] for key, of_layer in named.items() if name in of_layer}
            for path, leaf in by_path(change(trees[name], sums)).items():
                insert_leaf(trees[name], path, leaf)
        slots = [slot if slot.buffer in self.buffers else None for slot in self._layout.slots]
        leaves = [slot and get_leaf(trees[slot.layer], slot.path).astype(slot.dtype) for slot in slots]
        return [jnp.where(ok, a, b) for a, b in zip(self._layout.pack_leaves(leaves), old, strict=True)]

    def _trees(self, buffers: Buffers) -> dict[str, Any]:
        buffer_of = dict(zip(self.buffers, buffers, strict=True))
        leaves = self._layout.unpack_leaves([buffer_of.get(i) for i in range(len(self._layout.buffers))])
        slot_leaves = ((slot, leaf) for slot, leaf in zip(self._layout.slots, leaves, strict=True) if leaf is not None)
        return by_layer(self._layout.layers, slot_leaves)

    def on_host(self, buffers: Buffers) -> dict[str, Any]:
        """Return the leaves by layer, out of a stage's parameter buffers."""
        trees = self._trees(jax.device_get(self.of(buffers)))
        return {name: jax.device_get(trees[name]) for name in self._layers}


Instance = tuple[int, int]
Buffers = list[jax.Array]
End = tuple[int, LeafSlot]
"""A stage, and where the leaf lies there."""


class TiedLeaves:
    """Exchanges between the primary instances of the stages that share a leaf that is trained.

    Raises:
        StageError: a leaf lies differently on the shards of its two stages.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipe = pipeline
        ends = [_ends(pipeline, tie) for tie in pipeline.tied]
        ends = [(owner, copy) for owner, copy in ends if pipeline.layout(owner[0]).trains(owner[1])]
        pipeline.ownership.link({(pipeline.primary(owner[0])[0], pipeline.primary(copy[0])[0]) for owner, copy in ends})
        self._gather = [self._moving(copy, owner, "acc") for owner, copy in ends]
        self._spread = [self._moving(owner, copy, "param") for owner, copy in ends]

    def gather(self, acc: dict[Instance, Buffers]) -> dict[Instance, Buffers]:
        """Accumulators with those of copies added to their owner's. The owner's are donated."""
        for move in self._gather:
            move(acc)
        return acc

    def spread(self, buffers: dict[Instance, Buffers]) -> None:
        """Put the owners' values into the copies' parameter buffers, which are donated."""
        for move in self._spread:
            move(buffers)

    def _moving(self, source: End, target: End, kind: str) -> Callable[[dict[Instance, Buffers]], None]:
        """Compile the move of the leaf at ``source`` to that at ``target``: added to an accumulator, put in a parameter's
        place."""
        start, end = self._pipe.primary(source[0]), self._pipe.primary(target[0])
        meshes = [self._pipe.submeshes[rank] for rank, _ in (start, end)]
        source_specs, into = (self._specs(at, kind) for at in (start, end))
        source_spec, put = _flat(source_specs[source[1].buffer]), _flat(into[target[1].buffer])
        take = on_rank(partial(_take, source[1]), meshes[0], (source_specs,), source_spec)
        change = on_rank(partial(_put, target[1], add=kind == "acc"), meshes[1], (into, put), into, donate=(0,))

        functions = self._pipe.functions[start]
        leaf = jax.eval_shape(take, list(functions.acc_avals if kind == "acc" else functions.param_avals))
        home = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(meshes[1], source_spec))
        move_to = self._pipe.ownership.move

        def move(buffers: dict[Instance, Buffers]) -> None:
            carried = move_to([take(buffers[start])] if start in buffers else [], start[0], end[0], [home])
            if end in buffers:
                buffers[end] = list(change(buffers[end], carried[0]))

        return move

    def _specs(self, at: Instance, kind: str) -> list[P]:
        functions = self._pipe.functions[at]
        return [spec_of(a) for a in (functions.acc_avals if kind == "acc" else functions.param_avals)]


def _flat(spec: P) -> P:
    """Return the spec of a leaf that lies as its buffer does, flattened: only axis 0 can be split."""
    return P(*tuple(spec)[:1])


def _take(slot: LeafSlot, buffers: Buffers) -> jax.Array:
    """Return the local leaf, flat (a scalar has no axis that devices could be stacked on)."""
    start = slot.offset or 0
    return buffers[slot.buffer].reshape(-1)[start : start + slot.size]


def _put(slot: LeafSlot, buffers: Buffers, leaf: jax.Array, *, add: bool) -> Buffers:
    old, start = buffers[slot.buffer], slot.offset or 0
    new = _take(slot, buffers) + leaf if add else leaf
    buffer = new if new.size == old.size else old.ravel().at[start : start + slot.size].set(new)
    return [buffer.reshape(old.shape) if k == slot.buffer else b for k, b in enumerate(buffers)]


def _ends(pipeline: Pipeline, tie: Tie) -> tuple[End, End]:
    """Return the owner and the copy of a tied leaf."""
    owner, copy = (
        (stage, next(s for s in pipeline.layout(stage).slots if (s.layer, *s.path) == path))
        for stage, path in ((tie.owner_stage, tie.owner_path), (tie.copy_stage, tie.copy_path))
    )
    lie = {str(slot): (pipeline.layout(stage).kinds[slot.buffer], slot.axis) for stage, slot in (owner, copy)}
    if len(set(lie.values())) > 1:
        placements = " and ".join(f"{name} ({kind}, axis {axis})" for name, (kind, axis) in lie.items())
        raise StageError(
            f"tied leaves lie differently on tensor-parallel shards: {placements}; give both the same in Layer.shards"
        )
    return owner, copy
