"""The update of one stage on the devices of its rank: how its state lies there, the reduction before it, the optimizer's part.

Masters, reduced gradients and optimizer state of a stage lie on a rank's devices, the same along cp. Without ZeRO-1 each device
holds what it computes with: its shard of each leaf, the same on all that only have other rows. Optimizer state is an array of
each leaf's whole shape, split along the leaf's own axis; a leaf that is like no divided parameter is whole on each device.

With ZeRO-1 (Rajbhandari et al. 2020, stage 1) each device holds a *chunk* of every leaf of its shard, cut over the *row
devices* of the buffer: those that share a microbatch's rows, but for those along which the buffer is divided already (all
``dp``; for experts ``dp / ep``). The leaf is flattened, padded with zeros to a multiple of their number n and cut in n pieces
``[k, 1, …]`` of as many axes as the leaf has (so that what an optimizer decides by ``ndim``, such as weight decay, stays as it
is; a scalar becomes ``[1]``). A *bucket* ``[K]`` is the chunks of a buffer one after another: one collective moves it. Leaves
tied to another stage's and those that are not trained are in no bucket: their owner's stage updates the first, nothing the
second. A device updates its chunks, and the new parameters are gathered in the dtype that is computed with.

A trained buffer that is computed with in a narrower dtype than ``master`` has a *master* beside it, which the update changes
and casts (with ZeRO-1 a bucket, which stays in chunks); other buffers are updated themselves.

F, B and W add to each device's own accumulators and sum nothing over ``dp`` or ``cp``. After the pipeline each parameter is
reduced once: over both, and over ``tp`` too where the shards made parts of one gradient (buffers of kind ``partial``). With
ZeRO-1 a device gets its bucket of the sum over the row devices, which is then summed over the other axes, and after the update
an all-gather a bucket. Sums are in the order of the devices (:mod:`jaxpipe.runtime.grid`), so that their bits do not depend on
how these lie in processes; or, with ``ordered=False``, as XLA's all-reduce and reduce-scatter make them, one all-reduce for all
buffers that want the same axes. Copies of tied leaves are left out: they have been added to their owner's accumulator. A
stage's reduction depends on nothing but its rank's accumulators, so it runs as soon as the rank has run its last W, while
other ranks still work. With one device a rank there are no collectives, and nothing is compiled for them.

All of this is on the rank's whole mesh, which may be of several processes."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe.axes import BUFFER_AXES, ROWS
from jaxpipe.mesh import replicated, spec_of, stacked, with_several
from jaxpipe.runtime.assembly import on_rank
from jaxpipe.runtime.grid import RankView, holders_share, place, scatter_sum, sum_over
from jaxpipe.stage.model.params import LeafSlot, ParamLayout, Place, by_layer, get_leaf
from jaxpipe.train.checkpoints.leaves import Fragment
from jaxpipe.train.update import layerwise

Tree = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class StageShards:
    """See the module. ``zero``: divide over rows too. ``master``: dtype that parameters are updated in. ``ordered``: add
    gradients in the order of the devices. *Local*: of one device, inside ``shard_map`` over ``mesh``."""

    layout: ParamLayout
    mesh: Mesh
    zero: bool = False
    master: Any = jnp.float32
    ordered: bool = True

    @property
    def chunked(self) -> bool:
        """Return whether state is divided over devices that share rows."""
        return self.zero and bool(with_several(self.mesh, ROWS))

    def row_axes(self, divided: Collection[str]) -> tuple[str, ...]:
        """Return the axes of several devices that a buffer which is ``divided`` along these is cut over with ZeRO-1."""
        return tuple(axis for axis in with_several(self.mesh, ROWS) if axis not in divided)

    def pieces(self, buffer: int) -> int:
        """Return in how many chunks ZeRO-1 cuts each leaf of a buffer."""
        return math.prod(self.mesh.shape[axis] for axis in self.row_axes(self.divided(buffer)))

    # -- which leaves -------------------------------------------------------------------------------------------------

    def updates(self, slot: LeafSlot) -> bool:
        """Return whether this stage updates the leaf: it is trained, and not tied to another stage's."""
        return self.layout.trains(slot) and (slot.layer, slot.path) not in self.layout.shared

    def divides(self, slot: LeafSlot) -> bool:
        """Return whether a device updates only a piece of the leaf."""
        return self.updates(slot) and (self.chunked or slot.axis is not None)

    def tree(self, leaves: Sequence[Any]) -> dict[str, Any]:
        """Return those of leaves in slot order that this stage updates, by layer; layers without any are there too."""
        leaves_by_slot = zip(self.layout.slots, leaves, strict=True)
        return by_layer(self.layout.layers, ((slot, leaf) for slot, leaf in leaves_by_slot if self.updates(slot)))

    def leaves(self, tree: Tree, fallback: Sequence[Any]) -> list[Any]:
        """Return leaves in slot order: those of ``tree``, and ``fallback`` where this stage updates none."""
        return [
            get_leaf(tree[slot.layer], slot.path) if self.updates(slot) else other
            for slot, other in zip(self.layout.slots, fallback, strict=True)
        ]

    @property
    def updated_slots(self) -> tuple[LeafSlot, ...]:
        """The leaves that this stage updates."""
        return tuple(slot for slot in self.layout.slots if self.updates(slot))

    @property
    def updated(self) -> tuple[int, ...]:
        """The buffers that this stage updates, in order: of no buffer does it update a part."""
        return tuple(sorted({slot.buffer for slot in self.updated_slots}))

    @property
    def mastered(self) -> tuple[int, ...]:
        """Those of :attr:`updated` that have a master beside them."""
        return tuple(i for i in self.updated if self.layout.buffers[i].dtype != self.master)

    def members(self, buffer: int) -> list[LeafSlot]:
        """Return the leaves of a buffer that this stage updates, as they lie in it."""
        return [slot for slot in self.updated_slots if slot.buffer == buffer]

    # -- shardings ----------------------------------------------------------------------------------------------------

    def buffer_spec(self, buffer: int) -> P:
        """Return the spec of a parameter buffer: the shards of a split one are stacked on axis 0."""
        return stacked(self.divided(buffer))

    def bucket_spec(self, buffer: int) -> P:
        """Return the spec of a buffer's bucket, and of chunks in it: devices stacked on axis 0, row devices innermost."""
        divided = self.divided(buffer)
        return stacked((*divided, *self.row_axes(divided)))

    def whole_spec(self, slot: LeafSlot) -> P:
        """Return the spec of a whole leaf, split along its own axis."""
        return P() if slot.axis is None else P(*[None] * slot.axis, *stacked(self.divided(slot.buffer)))

    def leaf_spec(self, slot: LeafSlot) -> P:
        """Return the spec of a leaf of optimizer state: whole, or chunks."""
        return self.bucket_spec(slot.buffer) if self.chunked else self.whole_spec(slot)

    def divided(self, buffer: int) -> tuple[str, ...]:
        """Return the axes of several devices along which a buffer is divided, whatever ZeRO-1 does."""
        return with_several(self.mesh, self.layout.axes(buffer).divided)

    def _parts(self, buffer: int) -> int:
        """Return into how many parts a buffer is divided, whatever ZeRO-1 does."""
        return self.layout.mesh.parts(self.layout.kinds[buffer])

    # -- shapes over the rank -----------------------------------------------------------------------------------------

    def whole_avals(self) -> dict[str, Any]:
        """Return shapes of the whole leaves that this stage updates, by layer."""
        return self.tree([jax.ShapeDtypeStruct(s.whole_shape, self.master) for s in self.layout.slots])

    def local_avals(self) -> dict[str, Any]:
        """Return shapes of what the update on a device sees of them."""
        shapes = [self.chunk_shape(s) if self.chunked else s.shape for s in self.layout.slots]
        return self.tree([jax.ShapeDtypeStruct(shape, self.master) for shape in shapes])

    def leaf_aval(self, leaf: Any, slot: LeafSlot) -> jax.ShapeDtypeStruct:
        """Return what a rank holds of a leaf of optimizer state of ``leaf``'s dtype."""
        shape = slot.whole_shape
        if self.chunked:
            k, *ones = self.chunk_shape(slot)
            shape = (k * self.pieces(slot.buffer) * slot.shards, *ones)
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=NamedSharding(self.mesh, self.leaf_spec(slot)))

    def bucket_aval(self, index: int) -> jax.ShapeDtypeStruct:
        """Return what a rank holds of a buffer's bucket of masters or gradients."""
        k = sum(self.chunk_shape(slot)[0] for slot in self.members(index))
        shape = (k * self.pieces(index) * self._parts(index),)
        return jax.ShapeDtypeStruct(shape, self.master, sharding=NamedSharding(self.mesh, self.bucket_spec(index)))

    def same_aval(self, leaf: Any) -> jax.ShapeDtypeStruct:
        """Return what a rank holds of an array that is the same on all devices."""
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=replicated(self.mesh))

    # -- chunks -------------------------------------------------------------------------------------------------------

    def chunk_shape(self, slot: LeafSlot) -> tuple[int, ...]:
        """Local shape of a leaf's chunk."""
        return (-(-slot.size // self.pieces(slot.buffer)), *[1] * (len(slot.shape) - 1))

    def cut(self, buffer: Any, index: int) -> jax.Array:
        """Return a local buffer as ``[n, K]``: row d is the bucket of the d-th row device."""
        rows, pieces = [], self.pieces(index)
        for slot in self.members(index):
            flat = jnp.ravel(buffer) if slot.offset is None else buffer[slot.offset : slot.offset + slot.size]
            k = self.chunk_shape(slot)[0]
            rows.append(jnp.pad(flat, (0, k * pieces - slot.size)).reshape(pieces, k))
        return jnp.concatenate(rows, axis=1)

    def _apart(self, buckets: Any, index: int) -> dict[LeafSlot, Any]:
        """Return a buffer's bucket, or rows that are such buckets, leaf by leaf."""
        ends = accumulate((self.chunk_shape(slot)[0] for slot in self.members(index)), initial=0)
        return {slot: buckets[..., a:b] for slot, (a, b) in zip(self.members(index), pairwise(ends), strict=True)}

    def join(self, rows: Any, index: int) -> jax.Array:
        """Return the local buffer of ``[n, K]``: the inverse of :meth:`cut`."""
        flat = [part.reshape(-1)[: slot.size] for slot, part in self._apart(rows, index).items()]
        return jnp.concatenate(flat).reshape(self.layout.buffers[index].shape)

    def chunks(self, buckets: Sequence[Any]) -> dict[str, Any]:
        """Return the tree of chunks in local ``buckets``, which are in the order of :attr:`updated`."""
        chunk_of: dict[LeafSlot, Any] = {}
        for bucket, index in zip(buckets, self.updated, strict=True):
            chunk_of |= {slot: c.reshape(self.chunk_shape(slot)) for slot, c in self._apart(bucket, index).items()}
        return self.tree([chunk_of.get(slot) for slot in self.layout.slots])

    def buckets(self, tree: Tree) -> list[Any]:
        """Return the local buckets of a tree of chunks."""
        return [
            jnp.concatenate([jnp.ravel(get_leaf(tree[slot.layer], slot.path)) for slot in self.members(index)])
            for index in self.updated
        ]

    # -- on the host --------------------------------------------------------------------------------------------------

    def host_rows(self, leaf: Any, slot: LeafSlot) -> np.ndarray:
        """Return a whole leaf as the rank's chunks ``[shards, n, k]``."""
        shards, pieces = slot.parts(np.asarray(leaf)), self.pieces(slot.buffer)
        k = self.chunk_shape(slot)[0]
        padded = [np.pad(part.reshape(-1), (0, k * pieces - slot.size)) for part in shards]
        return np.stack(padded).reshape(len(shards), pieces, k)

    def host_chunk(self, leaf: Any, slot: LeafSlot) -> np.ndarray:
        """Return a whole leaf as a rank's array of chunks, all devices together."""
        return self.host_rows(leaf, slot).reshape(-1, *self.chunk_shape(slot)[1:])

    def host_bucket(self, params: Tree, index: int) -> np.ndarray:
        """Return the rank's array of a bucket, all devices together, of whole parameters by layer."""
        rows = [self.host_rows(get_leaf(params[slot.layer], slot.path), slot) for slot in self.members(index)]
        return np.concatenate(rows, axis=2).reshape(-1)

    def host_leaves(self, buckets: Mapping[int, jax.Array]) -> dict[LeafSlot, np.ndarray | Fragment]:
        """Leaves of a rank's buckets, by buffer: the inverse of :meth:`host_bucket`; of leaves that other processes have chunks
        of, what is in this one."""
        leaf_of: dict[LeafSlot, np.ndarray | Fragment] = {}
        for index, bucket in buckets.items():
            numbers, rows = rows_on_host(bucket, self.pieces(index) * self._parts(index))
            share, leaves = holders_share(bucket), self._apart(rows, index)
            leaf_of |= {slot: self._host_leaf(numbers, x, slot, share) for slot, x in leaves.items()}
        return leaf_of

    def host_leaf(self, chunks: jax.Array, slot: LeafSlot) -> np.ndarray | Fragment:
        """Return the leaf of a rank's array of chunks: the inverse of :meth:`host_chunk`; where other processes have some of
        them, what is in this one."""
        count = self.pieces(slot.buffer) * self._parts(slot.buffer)
        return self._host_leaf(*rows_on_host(chunks, count), slot, holders_share(chunks))

    def _host_leaf(
        self, numbers: Sequence[int], rows: np.ndarray, slot: LeafSlot, share: tuple[int, int]
    ) -> np.ndarray | Fragment:
        """Return the leaf, or a fragment, of ``rows`` ``[n, k]``: chunks by number, shard by shard; of a fragment that other
        processes have too, this one's ``share``."""
        k, pieces = self.chunk_shape(slot)[0], self.pieces(slot.buffer)
        if len(numbers) == slot.shards * pieces:
            parts = [shard.reshape(slot.shape) for shard in rows.reshape(slot.shards, -1)[:, : slot.size]]
            return parts[0] if slot.axis is None else np.concatenate(parts, axis=slot.axis)
        ranges: list[tuple[int, int]] = []
        values = [rows[0, :0]]
        for (shard, d), row in zip((divmod(number, pieces) for number in numbers), rows, strict=True):
            start, stop = (shard * slot.size + min(edge * k, slot.size) for edge in (d, d + 1))
            if start == stop:  # nothing but padding
                continue
            values.append(row[: stop - start])
            begin = ranges.pop()[0] if ranges and ranges[-1][1] == start else start
            ranges.append((begin, stop))
        split = None if slot.axis is None else (slot.axis, slot.shards)
        return Fragment(np.concatenate(values), tuple(ranges), slot.whole_shape, split).part(*share)


def own_shards(array: jax.Array, slot: LeafSlot) -> jax.Array | Fragment:
    """Return the array of a whole leaf, or where other processes have other shards of it, this one's share of its own."""
    if array.is_fully_addressable:
        return array
    assert slot.axis is not None, "all processes have a leaf that is not split"
    data_of = {
        (shard.index[slot.axis].start or 0) // slot.shape[slot.axis]: shard.data for shard in array.addressable_shards
    }
    values = np.concatenate([np.asarray(data_of[number]).reshape(-1) for number in sorted(data_of)])
    ranges = tuple((number * slot.size, (number + 1) * slot.size) for number in sorted(data_of))
    return Fragment(values, ranges, slot.whole_shape, (slot.axis, slot.shards)).part(*holders_share(array))


def rows_on_host(array: jax.Array, count: int) -> tuple[list[int], np.ndarray]:
    """Return the numbers of those of ``count`` equal rows that this process has, of an array that is divided into these along
    its first axis, and the rows ``[n, k]``."""
    if not array.size:
        return list(range(count)), np.empty((count, 0), array.dtype)
    length = array.shape[0] // count
    data_of = {(shard.index[0].start or 0) // length: shard.data for shard in array.addressable_shards}
    for data in data_of.values():  # from all devices at once
        data.copy_to_host_async()
    numbers = sorted(data_of)
    return numbers, np.stack([np.asarray(data_of[number]).reshape(-1) for number in numbers])


Buffers = list[jax.Array]

SHRUNK = 2.0**-66
"""Gradients times this have squares that do not overflow, up to a norm of 3e38: their sum counts where the plain one does."""


@dataclass(frozen=True, slots=True)
class Reduced:
    """The reduction of one stage: ``grads``, the summed gradients as the update takes them; ``square``: ``[2]``, the sum of
    their squares and that of the gradients · :data:`SHRUNK`, each parameter counted once; ``acc``: accumulators for the next
    step, empty where the update makes them of ``grads``."""

    grads: Buffers
    square: jax.Array
    acc: Buffers


class GradientReduction:
    """``reduced = reduction(acc)`` for the accumulators of a stage, which are donated.

    Args:
        shards: how the stage's state lies on its rank.
        acc_avals: shapes and shardings of the accumulators.
        view: of the rank; accumulators, and ``square``, are in this process's column, ``grads`` on the whole rank.
    """

    def __init__(self, shards: StageShards, acc_avals: Sequence[jax.ShapeDtypeStruct], view: RankView) -> None:
        self.shards, self.view = shards, view
        specs = self._specs = [spec_of(a) for a in acc_avals]
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
        """Return what :meth:`read` takes, as a flat list, ``square`` first: what R calls."""
        if self.shards.mesh.size == 1:
            return [self.function(acc), *acc]
        parts = self.function(self.view.widen(acc, self._specs))
        return [parts[1], *parts[0], *(parts[2] if self.shards.chunked else ())]

    def read(self, flat: Sequence[jax.Array]) -> Reduced:
        """Return what was dispatched."""
        square, *arrays = flat
        count = len(self.shards.updated) if self.shards.chunked else len(arrays)
        return Reduced(arrays[:count], self.view.narrow(square), self.view.narrow(arrays[count:]))

    def _summed(self, acc: Buffers) -> tuple[Buffers, jax.Array]:
        sums = summed(self.shards, acc)
        return sums, square_sum(self.shards, gradient_tree(self.shards, sums))

    def _scattered(self, acc: Buffers) -> tuple[Buffers, jax.Array, Buffers]:
        buckets = scattered(self.shards, acc)
        square = square_sum(self.shards, self.shards.chunks(buckets))
        return buckets, square, [jnp.zeros_like(a) for a in acc]


def summed(shards: StageShards, acc: Sequence[jax.Array]) -> Buffers:
    """Local accumulators with what this stage updates of them added up over the rank."""
    axes = [shards.layout.axes(i).summed if i in shards.updated else () for i in range(len(acc))]
    return _summed_over(shards, acc, [with_several(shards.mesh, over) for over in axes])


def _summed_over(shards: StageShards, arrays: Sequence[jax.Array], axes: Sequence[tuple[str, ...]]) -> Buffers:
    """``arrays``, each summed over its axes."""
    if shards.ordered:
        return [sum_over(array, over, shards.mesh) for array, over in zip(arrays, axes, strict=True)]
    sums = list(arrays)
    # One psum for all buffers that want the same axes, as XLA makes one all-reduce of it: a collective for each would
    # cost a latency each.
    for over in dict.fromkeys(axes):
        members = [k for k, leaf_axes in enumerate(axes) if leaf_axes == over]
        if over:
            for k, total in zip(members, jax.lax.psum([arrays[k] for k in members], over), strict=True):
                sums[k] = total
    return sums


def scattered(shards: StageShards, acc: Sequence[jax.Array]) -> Buffers:
    """Local accumulators added up over the rank, as this device's buckets."""
    assert shards.chunked, "without ZeRO-1 there are no buckets"
    scatter = scatter_sum if shards.ordered else partial(jax.lax.psum_scatter, scatter_dimension=0)
    cut_axes = [shards.row_axes(shards.divided(i)) for i in shards.updated]
    rows = [shards.cut(acc[i], i) for i in shards.updated]
    buckets = [scatter(cut, over) if over else cut[0] for cut, over in zip(rows, cut_axes, strict=True)]
    axes = [
        [a for a in shards.layout.axes(i).summed if a not in over]
        for i, over in zip(shards.updated, cut_axes, strict=True)
    ]
    return _summed_over(shards, buckets, [with_several(shards.mesh, over) for over in axes])


def gathered(shards: StageShards, buckets: Sequence[jax.Array]) -> Buffers:
    """Updated local buffers of the buckets of all row devices."""
    return [shards.join(_of_row_devices(shards, b, i), i) for b, i in zip(buckets, shards.updated, strict=True)]


def own_bucket(shards: StageShards, buffer: jax.Array, index: int) -> jax.Array:
    """This device's bucket of a local parameter buffer. No collective."""
    me = _row_device(shards, index)
    bucket: jax.Array = jax.lax.dynamic_index_in_dim(shards.cut(buffer, index), me, axis=0, keepdims=False)
    return bucket


def _of_row_devices(shards: StageShards, piece: jax.Array, buffer: int) -> jax.Array:
    """Return what each of the buffer's row devices has, ``[n, …]``."""
    axes = shards.row_axes(shards.divided(buffer))
    return jax.lax.all_gather(piece, axes) if axes else piece[None]


def _row_device(shards: StageShards, buffer: int) -> jax.Array | int:
    """Return the number of this device among the buffer's row devices."""
    axes = shards.row_axes(shards.divided(buffer))
    return jax.lax.axis_index(axes) if axes else 0


def whole_leaf(shards: StageShards, slot: LeafSlot, piece: jax.Array) -> jax.Array:
    """Return the whole leaf of what each device has of it: its shard, or with ZeRO-1 its chunk."""
    if shards.chunked:
        flat = jnp.ravel(_of_row_devices(shards, jnp.ravel(piece), slot.buffer))
        piece = flat[: slot.size].reshape(slot.shape)
    if slot.axis is None:
        return piece
    whole: jax.Array = jax.lax.all_gather(piece, shards.divided(slot.buffer), axis=slot.axis, tiled=True)
    return whole


def own_piece(shards: StageShards, slot: LeafSlot, leaf: jax.Array) -> jax.Array:
    """This device's piece of a whole leaf: the inverse of :func:`whole_leaf`. No collective."""
    if slot.axis is not None:
        width = slot.shape[slot.axis]
        leaf = jax.lax.dynamic_slice_in_dim(
            leaf, jax.lax.axis_index(shards.divided(slot.buffer)) * width, width, slot.axis
        )
    if not shards.chunked:
        return leaf
    chunk = shards.chunk_shape(slot)
    flat = jnp.pad(jnp.ravel(leaf), (0, chunk[0] * shards.pieces(slot.buffer) - slot.size))
    begin = _row_device(shards, slot.buffer) * chunk[0]
    return jax.lax.dynamic_slice_in_dim(flat, begin, chunk[0]).reshape(chunk)


def square_sum(shards: StageShards, tree: Any) -> jax.Array:
    """``[2]``: the sum of squares of reduced gradients (local leaves or chunks), plain and :data:`SHRUNK`. Each parameter is
    counted once: every shard of split leaves, one of the others."""
    # Leaves that are not divided are the same on all devices, so only divided ones are summed over their axes; chunks of
    # ZeRO-1 are everyone's own, so all are summed over the row devices.
    leaves = jax.tree.leaves(tree)
    divided = [shards.layout.axes(slot.buffer).divided for slot in jax.tree.leaves(shards.tree(shards.layout.slots))]
    dtype = leaves[0].dtype if leaves else jnp.float32

    def total(over: tuple[str, ...]) -> jax.Array:
        parts = [g for g, axes in zip(leaves, divided, strict=True) if axes == over]
        sums = [sum((jnp.sum(jnp.square(g * f)) for g in parts), start=jnp.zeros((), dtype)) for f in (1, SHRUNK)]
        over_rows = shards.row_axes(over) if shards.chunked else ()
        return sum_over(jnp.stack(sums), (*over_rows, *with_several(shards.mesh, over)), shards.mesh)

    # In the table's order: the sum of floats must not depend on that of the leaves.
    groups = [over for over in dict.fromkeys(axes.divided for axes in BUFFER_AXES.values()) if over in ((), *divided)]
    first, *others = map(total, groups)
    return sum(others, start=first)


def gradient_tree(shards: StageShards, acc: Sequence[Any]) -> dict[str, Any]:
    """Local leaves of accumulators, by layer, of the parameters that this stage updates."""
    layout = shards.layout
    return shards.tree(layout.unpack_leaves([*acc, *[None] * (len(layout.buffers) - len(acc))]))


_Arrays = Sequence[jax.Array]


@dataclass(frozen=True, slots=True)
class StageUpdate:
    """``full``: see :func:`compile_update`; ``ahead``: of the same arguments only ``params`` and ``finite``, and nothing is
    donated; ``commit``: the other three, and all but parameters and buckets is donated. ``zeros()``: accumulators."""

    full: Any
    ahead: Any
    commit: Any
    zeros: Callable[[], list[jax.Array]]


class _SpanningUpdate:
    """A compiled update of a rank of several processes, called as :func:`compile_update` says, with parameters, factors,
    accumulators and flags of this process's column. ``in_column``: which of its results are these."""

    def __init__(self, jitted: Any, view: RankView, param_specs: Sequence[P], in_column: Sequence[bool]) -> None:
        self.lower = jitted.lower
        self._jitted, self._view, self._param_specs, self._in_column = jitted, view, param_specs, in_column

    def __call__(self, params: _Arrays, masters: _Arrays, grads: _Arrays, state: Any, *arguments: Any) -> Any:
        view = self._view
        results = self._jitted(
            view.widen(params, self._param_specs), masters, grads, state, *view.widen_replicated(arguments)
        )
        return [view.narrow(x) if is_here else x for x, is_here in zip(results, self._in_column, strict=True)]


def compile_update(
    shards: StageShards,
    part: layerwise.OptimizerPart,
    acc_avals: Sequence[jax.ShapeDtypeStruct],
    state_specs: Any,
    view: RankView,
) -> StageUpdate:
    """``update(params, masters, grads, state, scale, ok, extra) -> (params, masters, state, acc, finite)``, whole and in two
    halves, compiled when they first run.

    ``params``: the buffers that :func:`taken` names, then all of :attr:`StageShards.updated`. ``masters``: of
    :attr:`StageShards.mastered`. ``grads``: as :class:`~jaxpipe.train.update.stage_update.GradientReduction` gives them.
    ``state``: of the layers in ``part``. ``scale``: ``[2]``, factors of the gradients, one after the other; ``ok``: whether
    to change anything; ``extra``: arguments of the transformation by name. ``acc``: accumulators at zero, in place of
    ``grads``; empty with ZeRO-1. ``finite``: whether all new parameters are. What is replaced is donated. ``acc_avals``: of
    the column in ``view``, where ``params``, ``scale``, ``ok``, ``extra``, ``acc`` and ``finite`` are; the rest is on the
    whole rank.
    """
    buckets = [shards.bucket_spec(i) for i in shards.updated]
    acc = [spec_of(a) for a in acc_avals]
    masters = [(shards.bucket_spec if shards.chunked else shards.buffer_spec)(i) for i in shards.mastered]
    update = partial(_update, shards, part)
    input_specs = (
        [shards.buffer_spec(i) for i in taken(shards)],
        masters,
        buckets if shards.chunked else acc,
        state_specs,
    )
    output_specs = (
        [shards.buffer_spec(i) for i in shards.updated],
        masters,
        state_specs,
        [] if shards.chunked else acc,
        P(),
    )
    # Gradients are donated only where a result can take their place, the zeroed accumulators; with ZeRO-1 none has
    # their shape.
    in_place = (1, 3) if shards.chunked else (1, 2, 3)

    def compile_results(results: slice, donate: tuple[int, ...]) -> Any:
        jitted = on_rank(
            lambda *old: update(*old)[results],
            shards.mesh,
            (*input_specs, *[P()] * 3),
            output_specs[results],
            donate=donate,
        )
        in_column = [True, False, False, True, True][results]
        return _SpanningUpdate(jitted, view, input_specs[0], in_column) if view.spans else jitted

    return StageUpdate(
        full=compile_results(slice(None), (0, *in_place)),
        ahead=compile_results(slice(0, None, 4), ()),
        commit=compile_results(slice(1, 4), in_place),
        zeros=lambda: [jnp.zeros(a.shape, a.dtype, device=a.sharding) for a in acc_avals],
    )


def taken(shards: StageShards) -> tuple[int, ...]:
    """Return the parameter buffers that the update reads: not those that it makes anew of whole masters."""
    return shards.updated if shards.chunked else tuple(i for i in shards.updated if i not in shards.mastered)


def _update(
    shards: StageShards,
    part: layerwise.OptimizerPart,
    params: _Arrays,
    masters: _Arrays,
    grads: _Arrays,
    state: Any,
    scale: jax.Array,
    ok: jax.Array,
    extra: Mapping[str, Any],
) -> Any:
    """Return what :func:`compile_update` compiles, on one device; parameters and state stay the old ones where not ``ok``."""
    # The two factors are multiplied one after the other: their product may be below the least normal number where each
    # is not.
    old = _held(shards, params, masters)
    gradients = shards.chunks(grads) if shards.chunked else gradient_tree(shards, grads)
    scaled = jax.tree.map(lambda g, p: (g * scale[0] * scale[1]).astype(p.dtype), gradients, old)
    updates, new_state = part.update(scaled, state, old, extra)
    keep = partial(jnp.where, ok)
    new = jax.tree.map(keep, optax.apply_updates(old, updates), old)
    if shards.chunked:
        new_buffers = shards.buckets(new)
    else:
        new_buffers = shards.layout.pack_leaves(shards.leaves(new, _leaves(shards, params, masters)))
    packed = dict(zip(shards.updated, new_buffers, strict=True))
    computed = [b.astype(shards.layout.buffers[i].dtype) for i, b in packed.items()]
    computed = gathered(shards, computed) if shards.chunked else computed
    zeros = [] if shards.chunked else [jnp.zeros_like(a) for a in grads]
    new_masters = [packed[i] for i in shards.mastered]
    return computed, new_masters, jax.tree.map(keep, new_state, state), zeros, _all_finite(shards, computed)


def fresh_state(shards: StageShards, part: layerwise.OptimizerPart, params: _Arrays, masters: _Arrays) -> Any:
    """Return the optimizer's state of fresh parameters, given as to the update."""
    return part.init(_held(shards, params, masters))


def _held(shards: StageShards, params: _Arrays, masters: _Arrays) -> dict[str, Any]:
    """Return what this device updates, by layer: its leaves, or with ZeRO-1 its chunks."""
    if not shards.chunked:
        return shards.tree(_leaves(shards, params, masters))
    beside = dict(zip(shards.mastered, masters, strict=True))
    params_by_buffer = zip(shards.updated, params, strict=True)
    return shards.chunks([beside[i] if i in beside else own_bucket(shards, b, i) for i, b in params_by_buffer])


def _leaves(shards: StageShards, params: _Arrays, masters: _Arrays) -> list[Any]:
    """Local leaves in slot order, None for those of buffers that are not updated."""
    buffer_of = {**dict(zip(taken(shards), params, strict=True)), **dict(zip(shards.mastered, masters, strict=True))}
    return shards.layout.unpack_leaves([buffer_of.get(i) for i in range(len(shards.layout.buffers))])


def _all_finite(shards: StageShards, buffers: _Arrays) -> jax.Array:
    """Return whether every number in the buffers is finite, on all devices of the rank: ZeRO-1 leaves the same on row
    devices."""
    bad = sum((jnp.sum(~jnp.isfinite(b)) for b in buffers), start=jnp.zeros((), jnp.int32))
    divided = tuple(dict.fromkeys(a for i in shards.updated for a in shards.divided(i)))
    return (jax.lax.psum(bad, divided) if divided else bad) == 0


@dataclass(frozen=True, slots=True)
class StageOptimizer:
    """``part``: the programs for what a device holds. ``leaves``: of the state, whole; ``slots``: the parameter that each is
    divided like, or None."""

    shards: StageShards
    part: layerwise.OptimizerPart
    leaves: tuple[layerwise.StateLeaf, ...]
    slots: tuple[LeafSlot | None, ...]

    @property
    def avals(self) -> Any:
        """The shapes of the optimizer's state as the rank holds it."""
        return self._tree(
            self.shards.same_aval(leaf.aval) if slot is None else self.shards.leaf_aval(leaf.aval, slot)
            for leaf, slot in zip(self.leaves, self.slots, strict=True)
        )

    @property
    def specs(self) -> Any:
        """How it lies."""
        return self._tree(P() if slot is None else self.shards.leaf_spec(slot) for slot in self.slots)

    def place(self, states: Mapping[str, Any]) -> Any:
        """States by layer, whole, on the devices.

        Raises:
            CheckpointError: they are of another optimizer or model.
        """
        values = layerwise.fitted(self.leaves, self.shards.layout.layers, states)
        divided = [
            self.shards.host_chunk(value, slot) if slot is not None and self.shards.chunked else value
            for value, slot in zip(values, self.slots, strict=True)
        ]
        return self._tree(place(divided, [a.sharding for a in jax.tree.leaves(self.avals)]))

    def by_layer(self, state: Any) -> dict[str, Any]:
        """Return the state of each layer alone, as ``optimizer.init({layer: leaves})`` makes it: whole, or with fragments of
        the leaves that other processes have chunks of."""
        host_leaf = self.shards.host_leaf if self.shards.chunked else own_shards
        leaves = [
            value if slot is None else host_leaf(value, slot)
            for value, slot in zip(jax.tree.leaves(state), self.slots, strict=True)
        ]
        layers = self.shards.layout.layers
        numbers, owners = self._tree(range(len(leaves))), [leaf.layer for leaf in self.leaves]
        return {
            name: jax.tree.map(leaves.__getitem__, layerwise.of_layers(numbers, [name], layers, owners))
            for name in layers
        }

    def _tree(self, leaves: Iterable[Any]) -> Any:
        return jax.tree.unflatten(self.part.structure, leaves)


def stage_optimizers(
    optimizer: Any, shards: Mapping[int, StageShards], extra: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[int, StageOptimizer]:
    """Return the optimizer of each stage; ``extra``: shapes of the arguments that its update gets.

    Raises:
        ConfigError: it can't be applied layer by layer, or devices would see pieces of parameters and it neither treats
            elements alone nor knows what to do on pieces (``on_pieces``).
    """
    undivided = layerwise.LayerwiseOptimizer.trace(optimizer, _joined(s.whole_avals() for s in shards.values()), extra)
    division: layerwise.Division = {
        (slot.layer, slot.path): (s.chunked, slot.axis)
        for s in shards.values()
        for slot in s.layout.slots
        if s.divides(slot)
    }
    local = undivided
    divided: tuple[Place | None, ...] = (None,) * len(undivided.leaves)
    if division:
        on_pieces = getattr(optimizer, "on_pieces", None)
        pieces = optimizer if on_pieces is None else on_pieces(partial(_gathered, shards))
        axes = next(iter(shards.values())).mesh.shape  # the same on each rank
        avals = _joined(s.local_avals() for s in shards.values())
        local = layerwise.LayerwiseOptimizer.trace(pieces, avals, extra, tuple(axes.items()))
        if on_pieces is None:
            layerwise.check_pieces(undivided, local, division)
        divided = layerwise.divided_like(undivided, local, division)
    by_stage = {}
    for s, x in shards.items():
        part, slots = local.part(x.layout.layers), {(slot.layer, slot.path): slot for slot in x.layout.slots}
        like = tuple(None if (at := divided[k]) is None else slots[at] for k in part.numbers)
        by_stage[s] = StageOptimizer(x, part, tuple(undivided.leaves[k] for k in part.numbers), like)
    return by_stage


def _gathered(
    shards: Mapping[int, StageShards], place: Place, function: Callable[[jax.Array], jax.Array], piece: jax.Array
) -> jax.Array:
    """Return a device's piece of ``function`` of a whole leaf, of which every device of the rank has a piece."""
    layer, path = place
    candidates = (
        (x, slot) for x in shards.values() for slot in x.updated_slots if (slot.layer, slot.path) == (layer, path)
    )
    mine, slot = next(candidates)
    return own_piece(mine, slot, function(whole_leaf(mine, slot, piece)))


def _joined(trees: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    return {name: leaves for tree in trees for name, leaves in tree.items()}
