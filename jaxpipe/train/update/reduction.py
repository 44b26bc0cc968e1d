"""The collectives of a training step outside the pipeline: gradients are added up, updated parameters handed round.

F, B and W add to each device's own accumulators and sum nothing over ``dp`` or ``cp``. After the pipeline, here, each parameter
is reduced once: over both, and over ``tp`` too where the shards made parts of one gradient (buffers of kind ``partial``).
Without ZeRO-1 one all-reduce takes all buffers that want the same axes; with it a reduce-scatter a bucket over ``dp``, an
all-reduce of the pieces over the other axes, and after the update an all-gather a bucket. Copies of tied leaves are left out:
they have been added to their owner's accumulator.

A stage's reduction depends on nothing but its rank's accumulators, so it runs as soon as the rank has run its last W, while
other ranks still work. With one device a rank there are no collectives, and nothing is compiled for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxpipe.mesh import DP, TP, spec_of
from jaxpipe.runtime.reduction import on_rank, reduced_axes
from jaxpipe.stage.model.params import LeafSlot
from jaxpipe.train.update.shards import StageShards

Buffers = list[jax.Array]

SHRUNK = 2.0**-66
"""Gradients times this have squares that do not overflow, up to a norm of 3e38: their sum counts where the plain one does."""


@dataclass(frozen=True, slots=True)
class Reduced:
    """Of one stage: ``grads``, the summed gradients as the update takes them; ``square``: ``[2]``, the sum of their squares and
    that of the gradients · :data:`SHRUNK`, each parameter counted once; ``acc``: accumulators for the next step, empty where
    the update makes them of ``grads``."""

    grads: Buffers
    square: jax.Array
    acc: Buffers


class GradientReduction:
    """``reduced = reduction(acc)`` for the accumulators of a stage, which are donated.

    Args:
        shards: how the stage's state lies on its rank.
        acc_avals: shapes and shardings of the accumulators.
    """

    def __init__(self, shards: StageShards, acc_avals: Sequence[jax.ShapeDtypeStruct]) -> None:
        self.shards = shards
        specs = [spec_of(a) for a in acc_avals]
        if shards.mesh.size == 1:
            self.function = jax.jit(lambda acc: square_sum(shards, gradient_tree(shards, acc)))
        elif shards.chunked:
            buckets = [shards.bucket_spec(i) for i in shards.updated]
            self.function = on_rank(self._scattered, shards.mesh, (specs,), (buckets, P(), specs), donate=(0,))
        else:
            self.function = on_rank(self._summed, shards.mesh, (specs,), (specs, P()), donate=(0,))

    def __call__(self, acc: Buffers) -> Reduced:
        return self.read(self.dispatch(acc))

    def dispatch(self, acc: Buffers) -> Buffers:
        """What :meth:`read` takes, as a flat list: an epilogue of the executor."""
        if self.shards.mesh.size == 1:
            return [self.function(acc), *acc]
        parts = self.function(acc)
        return [parts[1], *parts[0], *(parts[2] if self.shards.chunked else ())]

    def read(self, flat: Sequence[jax.Array]) -> Reduced:
        """What was dispatched."""
        square, *arrays = flat
        count = len(self.shards.updated) if self.shards.chunked else len(arrays)
        return Reduced(arrays[:count], square, arrays[count:])

    def _summed(self, acc: Buffers) -> tuple[Buffers, jax.Array]:
        sums = summed(self.shards, acc)
        return sums, square_sum(self.shards, gradient_tree(self.shards, sums))

    def _scattered(self, acc: Buffers) -> tuple[Buffers, jax.Array, Buffers]:
        buckets = scattered(self.shards, acc)
        square = square_sum(self.shards, self.shards.chunks(buckets))
        return buckets, square, [jnp.zeros_like(a) for a in acc]


def summed(shards: StageShards, acc: Sequence[jax.Array]) -> Buffers:
    """Local accumulators with what this stage updates of them added up over the rank."""
    kinds = shards.layout.kinds
    return _summed_over(
        acc, [reduced_axes(shards.mesh, kinds[i]) if i in shards.updated else () for i in range(len(acc))]
    )


def _summed_over(arrays: Sequence[jax.Array], axes: Sequence[tuple[str, ...]]) -> Buffers:
    """``arrays``, each summed over its axes: one collective for all that have the same."""
    sums = list(arrays)
    for over in dict.fromkeys(axes):
        members = [k for k, leaf_axes in enumerate(axes) if leaf_axes == over]
        if over:
            for k, total in zip(members, jax.lax.psum([arrays[k] for k in members], over), strict=True):
                sums[k] = total
    return sums


def scattered(shards: StageShards, acc: Sequence[jax.Array]) -> Buffers:
    """Local accumulators added up over the rank, as this device's buckets."""
    assert shards.chunked, "without ZeRO-1 there are no buckets"
    buckets = [jax.lax.psum_scatter(shards.cut(acc[i], i), DP, scatter_dimension=0) for i in shards.updated]
    axes = [tuple(a for a in reduced_axes(shards.mesh, shards.layout.kinds[i]) if a != DP) for i in shards.updated]
    return _summed_over(buckets, axes)


def gathered(shards: StageShards, buckets: Sequence[jax.Array]) -> Buffers:
    """Updated local buffers of the buckets of all dp devices."""
    return [shards.join(jax.lax.all_gather(bucket, DP), i) for bucket, i in zip(buckets, shards.updated, strict=True)]


def own_bucket(shards: StageShards, buffer: jax.Array, index: int) -> jax.Array:
    """This device's bucket of a local parameter buffer. No collective."""
    me = jax.lax.axis_index(DP)
    bucket: jax.Array = jax.lax.dynamic_index_in_dim(shards.cut(buffer, index), me, axis=0, keepdims=False)
    return bucket


def whole_leaf(shards: StageShards, slot: LeafSlot, piece: jax.Array) -> jax.Array:
    """The whole leaf of what each device has of it: its shard, or with ZeRO-1 its chunk."""
    if shards.chunked:
        flat = jax.lax.all_gather(jnp.ravel(piece), DP, tiled=True)
        piece = flat[: slot.size].reshape(slot.shape)
    return piece if slot.axis is None else jax.lax.all_gather(piece, TP, axis=slot.axis, tiled=True)


def own_piece(shards: StageShards, slot: LeafSlot, leaf: jax.Array) -> jax.Array:
    """This device's piece of a whole leaf: the inverse of :func:`whole_leaf`. No collective."""
    if slot.axis is not None:
        width = slot.shape[slot.axis]
        leaf = jax.lax.dynamic_slice_in_dim(leaf, jax.lax.axis_index(TP) * width, width, slot.axis)
    if not shards.chunked:
        return leaf
    chunk = shards.chunk_shape(slot)
    flat = jnp.pad(jnp.ravel(leaf), (0, chunk[0] * shards.dp - slot.size))
    return jax.lax.dynamic_slice_in_dim(flat, jax.lax.axis_index(DP) * chunk[0], chunk[0]).reshape(chunk)


def square_sum(shards: StageShards, tree: Any) -> jax.Array:
    """``[2]``: the sum of squares of reduced gradients (local leaves or chunks), plain and :data:`SHRUNK`. Each parameter is
    counted once: every shard of split leaves, one of the others."""
    leaves = jax.tree.leaves(tree)
    kinds = [shards.layout.kinds[slot.buffer] for slot in jax.tree.leaves(shards.tree(shards.layout.slots))]
    dtype = leaves[0].dtype if leaves else jnp.float32
    over_dp = (DP,) if shards.chunked else ()

    def total(split: bool) -> jax.Array:
        mine = [g for g, kind in zip(leaves, kinds, strict=True) if (kind == "split") == split]
        sums = [sum((jnp.sum(jnp.square(g * f)) for g in mine), start=jnp.zeros((), dtype)) for f in (1, SHRUNK)]
        axes = (*over_dp, TP) if split and shards.tp > 1 else over_dp
        return jnp.stack(jax.lax.psum(sums, axes) if axes else sums)

    return total(split=False) + total(split=True) if "split" in kinds else total(split=False)


def gradient_tree(shards: StageShards, acc: Sequence[Any]) -> dict[str, Any]:
    """Local leaves of accumulators, by layer, of the parameters that this stage updates."""
    layout = shards.layout
    return shards.tree(layout.unpack_leaves([*acc, *[None] * (len(layout.buffers) - len(acc))]))
