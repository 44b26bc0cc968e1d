"""How masters, reduced gradients and optimizer state of a stage lie on a rank's ``dp × cp × tp`` devices, the same along cp.

Without ZeRO-1 each device holds what it computes with: its ``tp`` shard of each leaf, the same on all ``dp``. Optimizer state
is an array of each leaf's whole shape, split along the leaf's own axis.

With ZeRO-1 (Rajbhandari et al. 2020, stage 1) over ``dp`` devices, each holds a *chunk* of every leaf of its shard: the leaf
flattened, padded with zeros to a multiple of dp and cut in dp pieces ``[k, 1, …]`` of as many axes as the leaf has (so that
what an optimizer decides by ``ndim``, such as weight decay, stays as it is; a scalar becomes ``[1]``). A *bucket* ``[K]`` is
the chunks of a buffer one after another: one collective moves it. Leaves tied to another stage's and those that are not trained
are in no bucket: their owner's stage updates the first, nothing the second.

A trained buffer that is computed with in a narrower dtype than ``master`` has a *master* beside it, which the update changes
and casts (with ZeRO-1 a bucket); other buffers are updated themselves.

:class:`StageShards` converts between whole leaves on the host (checkpoints), a device's buffers, and chunks. It makes no
collective: :mod:`jaxpipe.train.update.reduction` does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe.mesh import DP, TP, replicated
from jaxpipe.stage.model.params import LeafSlot, ParamLayout, by_layer, get_leaf

Tree = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class StageShards:
    """See the module. ``zero``: divide over dp too. ``master``: dtype that parameters are updated in. *Local*: of one device,
    inside ``shard_map`` over ``mesh``."""

    layout: ParamLayout
    mesh: Mesh
    zero: bool = False
    master: Any = jnp.float32

    @property
    def dp(self) -> int:
        return int(self.mesh.shape[DP])

    @property
    def tp(self) -> int:
        return int(self.mesh.shape[TP])

    @property
    def chunked(self) -> bool:
        """Whether state is divided over dp."""
        return self.zero and self.dp > 1

    # -- which leaves -------------------------------------------------------------------------------------------------

    def updates(self, slot: LeafSlot) -> bool:
        """Whether this stage updates the leaf: it is trained, and not tied to another stage's."""
        return self.layout.trains(slot) and (slot.layer, slot.path) not in self.layout.shared

    def divides(self, slot: LeafSlot) -> bool:
        """Whether a device updates only a piece of the leaf."""
        return self.updates(slot) and (self.chunked or slot.axis is not None)

    def tree(self, leaves: Sequence[Any]) -> dict[str, Any]:
        """Of leaves in slot order, those that this stage updates, by layer; layers without any are there too."""
        leaves_by_slot = zip(self.layout.slots, leaves, strict=True)
        return by_layer(self.layout.layers, ((slot, leaf) for slot, leaf in leaves_by_slot if self.updates(slot)))

    def leaves(self, tree: Tree, fallback: Sequence[Any]) -> list[Any]:
        """Leaves in slot order: those of ``tree``, and ``fallback`` where this stage updates none."""
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
        """The leaves of a buffer that this stage updates, as they lie in it."""
        return [slot for slot in self.updated_slots if slot.buffer == buffer]

    # -- shardings ----------------------------------------------------------------------------------------------------

    def buffer_spec(self, buffer: int) -> P:
        """Of a parameter buffer: the shards of a split one are stacked on axis 0."""
        return P(TP) if self._is_split(buffer) else P()

    def bucket_spec(self, buffer: int) -> P:
        """Of a buffer's bucket, and of chunks in it: devices stacked on axis 0, dp innermost."""
        return P((TP, DP)) if self._is_split(buffer) else P(DP)

    def whole_spec(self, slot: LeafSlot) -> P:
        """Of a whole leaf, split along its own axis."""
        return P() if slot.axis is None else P(*[None] * slot.axis, TP)

    def leaf_spec(self, slot: LeafSlot) -> P:
        """Of a leaf of optimizer state: whole, or chunks."""
        return self.bucket_spec(slot.buffer) if self.chunked else self.whole_spec(slot)

    def _is_split(self, buffer: int) -> bool:
        return self.tp > 1 and self.layout.kinds[buffer] == "split"

    # -- shapes over the rank -----------------------------------------------------------------------------------------

    def whole_avals(self) -> dict[str, Any]:
        """Shapes of the whole leaves that this stage updates, by layer."""
        return self.tree([jax.ShapeDtypeStruct(s.whole_shape(self.tp), self.master) for s in self.layout.slots])

    def local_avals(self) -> dict[str, Any]:
        """Shapes of what the update on a device sees of them."""
        shapes = [self.chunk_shape(s) if self.chunked else s.shape for s in self.layout.slots]
        return self.tree([jax.ShapeDtypeStruct(shape, self.master) for shape in shapes])

    def leaf_aval(self, leaf: Any, slot: LeafSlot) -> jax.ShapeDtypeStruct:
        """What a rank holds of a leaf of optimizer state of ``leaf``'s dtype."""
        shape = slot.whole_shape(self.tp)
        if self.chunked:
            k, *ones = self.chunk_shape(slot)
            shape = (k * self.dp * (self.tp if self._is_split(slot.buffer) else 1), *ones)
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=NamedSharding(self.mesh, self.leaf_spec(slot)))

    def bucket_aval(self, index: int) -> jax.ShapeDtypeStruct:
        """What a rank holds of a buffer's bucket of masters or gradients."""
        k = sum(self.chunk_shape(slot)[0] for slot in self.members(index))
        shape = (k * self.dp * (self.tp if self._is_split(index) else 1),)
        return jax.ShapeDtypeStruct(shape, self.master, sharding=NamedSharding(self.mesh, self.bucket_spec(index)))

    def same_aval(self, leaf: Any) -> jax.ShapeDtypeStruct:
        """What a rank holds of an array that is the same on all devices."""
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=replicated(self.mesh))

    # -- chunks -------------------------------------------------------------------------------------------------------

    def chunk_shape(self, slot: LeafSlot) -> tuple[int, ...]:
        """Local shape of a leaf's chunk."""
        return (-(-slot.size // self.dp), *[1] * (len(slot.shape) - 1))

    def cut(self, buffer: Any, index: int) -> jax.Array:
        """A local buffer as ``[dp, K]``: row d is device d's bucket."""
        rows = []
        for slot in self.members(index):
            flat = jnp.ravel(buffer) if slot.offset is None else buffer[slot.offset : slot.offset + slot.size]
            k = self.chunk_shape(slot)[0]
            rows.append(jnp.pad(flat, (0, k * self.dp - slot.size)).reshape(self.dp, k))
        return jnp.concatenate(rows, axis=1)

    def _apart(self, buckets: Any, index: int) -> dict[LeafSlot, Any]:
        """A buffer's bucket, or rows that are such buckets, leaf by leaf."""
        ends = accumulate((self.chunk_shape(slot)[0] for slot in self.members(index)), initial=0)
        return {slot: buckets[..., a:b] for slot, (a, b) in zip(self.members(index), pairwise(ends), strict=True)}

    def join(self, rows: Any, index: int) -> jax.Array:
        """The local buffer of ``[dp, K]``: the inverse of :meth:`cut`."""
        flat = [part.reshape(-1)[: slot.size] for slot, part in self._apart(rows, index).items()]
        return jnp.concatenate(flat).reshape(self.layout.buffers[index].shape)

    def chunks(self, buckets: Sequence[Any]) -> dict[str, Any]:
        """The tree of chunks in local ``buckets``, which are in the order of :attr:`updated`."""
        chunk_of: dict[LeafSlot, Any] = {}
        for bucket, index in zip(buckets, self.updated, strict=True):
            chunk_of |= {slot: c.reshape(self.chunk_shape(slot)) for slot, c in self._apart(bucket, index).items()}
        return self.tree([chunk_of.get(slot) for slot in self.layout.slots])

    def buckets(self, tree: Tree) -> list[Any]:
        """The local buckets of a tree of chunks."""
        return [
            jnp.concatenate([jnp.ravel(get_leaf(tree[slot.layer], slot.path)) for slot in self.members(index)])
            for index in self.updated
        ]

    # -- on the host --------------------------------------------------------------------------------------------------

    def host_rows(self, leaf: Any, slot: LeafSlot) -> np.ndarray:
        """A whole leaf as the rank's chunks ``[tp or 1, dp, k]``."""
        array = np.asarray(leaf)
        shards = slot.parts(array, 1 if slot.axis is None else self.tp)
        k = self.chunk_shape(slot)[0]
        padded = [np.pad(part.reshape(-1), (0, k * self.dp - slot.size)) for part in shards]
        return np.stack(padded).reshape(len(shards), self.dp, k)

    def host_chunk(self, leaf: Any, slot: LeafSlot) -> np.ndarray:
        """A whole leaf as a rank's array of chunks, all devices together."""
        return self.host_rows(leaf, slot).reshape(-1, *self.chunk_shape(slot)[1:])

    def host_bucket(self, params: Tree, index: int) -> np.ndarray:
        """The rank's array of a bucket, all devices together, of whole parameters by layer."""
        rows = [self.host_rows(get_leaf(params[slot.layer], slot.path), slot) for slot in self.members(index)]
        return np.concatenate(rows, axis=2).reshape(-1)

    def host_leaves(self, buckets: Mapping[int, Any]) -> dict[LeafSlot, np.ndarray]:
        """Whole leaves of a rank's buckets, by buffer: the inverse of :meth:`host_bucket`."""
        leaf_of: dict[LeafSlot, np.ndarray] = {}
        for index, bucket in buckets.items():
            rows = np.asarray(bucket).reshape(self.dp * (self.tp if self._is_split(index) else 1), -1)
            leaf_of |= {slot: self.host_whole(chunks, slot) for slot, chunks in self._apart(rows, index).items()}
        return leaf_of

    def host_whole(self, chunks: Any, slot: LeafSlot) -> np.ndarray:
        """The whole leaf of a rank's array of chunks: the inverse of :meth:`host_chunk`."""
        shards = np.asarray(chunks).reshape(1 if slot.axis is None else self.tp, -1)[:, : slot.size]
        parts = [shard.reshape(slot.shape) for shard in shards]
        return parts[0] if slot.axis is None else np.concatenate(parts, axis=slot.axis)
