"""Leaves that two stages use: gradients of the copies are added to their owner's, the owner's new value goes to the copies.

Both work on what the devices hold, shard by shard: device k of the owner's rank exchanges with device k of the copy's.
Gradients are added before the reduction, while each device still has its own sum, so that a tied parameter is reduced once.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe.errors import StageError
from jaxpipe.runtime.assembly import Tie
from jaxpipe.runtime.pipeline import Pipeline
from jaxpipe.runtime.reduction import on_rank, spec_of
from jaxpipe.stage.model.layer import Path
from jaxpipe.stage.model.params import LeafSlot

Instance = tuple[int, int]
Buffers = list[jax.Array]


class TiedLeaves:
    """Exchanges between the primary instances of the stages that share a leaf that is trained.

    Raises:
        StageError: a leaf lies differently on the shards of its two stages.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipe = pipeline
        slots = {tie: _slots(pipeline, tie) for tie in pipeline.tied}
        self._slots = {t: pair for t, pair in slots.items() if pipeline.layout(t.owner_stage).trains(pair[0])}
        self._take_grad = {t: self._taker(t.copy_stage, copy, "acc") for t, (_, copy) in self._slots.items()}
        self._add = {t: self._putter(t.owner_stage, owner, "acc") for t, (owner, _) in self._slots.items()}
        self._take_value = {t: self._taker(t.owner_stage, owner, "param") for t, (owner, _) in self._slots.items()}
        self._put = {t: self._putter(t.copy_stage, copy, "param") for t, (_, copy) in self._slots.items()}

    def gather(self, acc: dict[Instance, Buffers]) -> dict[Instance, Buffers]:
        """Accumulators with those of copies added to their owner's. The owner's are donated."""
        for t in self._slots:
            owner, copy = self._pipe.primary(t.owner_stage), self._pipe.primary(t.copy_stage)
            leaf = self._carry(self._take_grad[t](acc[copy]), owner[0])
            acc[owner] = list(self._add[t](acc[owner], leaf))
        return acc

    def spread(self, buffers: dict[Instance, Buffers]) -> None:
        """Put the owners' values into the copies' parameter buffers, which are donated."""
        for t in self._slots:
            owner, copy = self._pipe.primary(t.owner_stage), self._pipe.primary(t.copy_stage)
            leaf = self._carry(self._take_value[t](buffers[owner]), copy[0])
            buffers[copy] = list(self._put[t](buffers[copy], leaf))

    def _carry(self, leaf: jax.Array, rank: int) -> jax.Array:
        carried: jax.Array = jax.device_put(leaf, NamedSharding(self._pipe.submeshes[rank], spec_of(leaf)))
        return carried

    def _taker(self, stage: int, slot: LeafSlot, kind: str) -> Any:
        specs = self._specs(stage, kind)
        return on_rank(partial(_take, slot), self._mesh(stage), (specs,), _flat(specs[slot.buffer]))

    def _putter(self, stage: int, slot: LeafSlot, kind: str) -> Any:
        specs = self._specs(stage, kind)
        change = partial(_put, slot, add=kind == "acc")
        return on_rank(change, self._mesh(stage), (specs, _flat(specs[slot.buffer])), specs, donate=(0,))

    def _specs(self, stage: int, kind: str) -> list[P]:
        functions = self._pipe.functions[self._pipe.primary(stage)]
        return [spec_of(a) for a in (functions.acc_avals if kind == "acc" else functions.param_avals)]

    def _mesh(self, stage: int) -> jax.sharding.Mesh:
        return self._pipe.submeshes[self._pipe.primary(stage)[0]]


def _flat(spec: P) -> P:
    """Of a leaf that lies as its buffer does, flattened: only axis 0 can be split."""
    return P(*tuple(spec)[:1])


def _take(slot: LeafSlot, buffers: Buffers) -> jax.Array:
    """The local leaf, flat (a scalar has no axis that devices could be stacked on)."""
    return _member(buffers[slot.buffer], slot)


def _put(slot: LeafSlot, buffers: Buffers, leaf: jax.Array, *, add: bool) -> Buffers:
    old = buffers[slot.buffer]
    new = _member(old, slot) + leaf if add else leaf
    start = slot.offset or 0
    whole = new if new.size == old.size else old.ravel().at[start : start + slot.size].set(new)
    return [whole.reshape(old.shape) if k == slot.buffer else b for k, b in enumerate(buffers)]


def _member(buffer: jax.Array, slot: LeafSlot) -> jax.Array:
    start = slot.offset or 0
    return buffer.reshape(-1)[start : start + slot.size]


def _slots(pipeline: Pipeline, tie: Tie) -> tuple[LeafSlot, LeafSlot]:
    """Where the owner and the copy of a tied leaf lie."""
    owner, copy = (
        _slot(pipeline, stage, path)
        for stage, path in ((tie.owner_stage, tie.owner_path), (tie.copy_stage, tie.copy_path))
    )
    kinds: Mapping[str, Any] = {
        str(slot): (pipeline.layout(stage).kinds[slot.buffer], slot.axis)
        for stage, slot in ((tie.owner_stage, owner), (tie.copy_stage, copy))
    }
    if len(set(kinds.values())) > 1:
        told = " and ".join(f"{name} ({kind}, axis {axis})" for name, (kind, axis) in kinds.items())
        raise StageError(
            f"tied leaves lie differently on tensor-parallel shards: {told}; give both the same in Layer.shards"
        )
    return owner, copy


def _slot(pipeline: Pipeline, stage: int, path: Path) -> LeafSlot:
    return next(s for s in pipeline.layout(stage).slots if (s.layer, *s.path) == path)
