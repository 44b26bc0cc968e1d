"""Leaves that two stages use: gradients of the copies are added to their owner's, the owner's new value goes to the copies.

Both work on what the devices hold, shard by shard: device k of the owner's rank exchanges with device k of the copy's.
Gradients are added before the reduction, while each device still has its own sum, so that a tied parameter is reduced once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe.errors import StageError
from jaxpipe.mesh import spec_of
from jaxpipe.runtime.assembly import Tie
from jaxpipe.runtime.pipeline import Pipeline
from jaxpipe.runtime.reduction import on_rank
from jaxpipe.stage.model.params import LeafSlot

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
        """From the leaf at ``source`` to that at ``target``: added to an accumulator, put in a parameter's place."""
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
    """Of a leaf that lies as its buffer does, flattened: only axis 0 can be split."""
    return P(*tuple(spec)[:1])


def _take(slot: LeafSlot, buffers: Buffers) -> jax.Array:
    """The local leaf, flat (a scalar has no axis that devices could be stacked on)."""
    start = slot.offset or 0
    return buffers[slot.buffer].reshape(-1)[start : start + slot.size]


def _put(slot: LeafSlot, buffers: Buffers, leaf: jax.Array, *, add: bool) -> Buffers:
    old, start = buffers[slot.buffer], slot.offset or 0
    new = _take(slot, buffers) + leaf if add else leaf
    buffer = new if new.size == old.size else old.ravel().at[start : start + slot.size].set(new)
    return [buffer.reshape(old.shape) if k == slot.buffer else b for k, b in enumerate(buffers)]


def _ends(pipeline: Pipeline, tie: Tie) -> tuple[End, End]:
    """The owner and the copy of a tied leaf."""
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
