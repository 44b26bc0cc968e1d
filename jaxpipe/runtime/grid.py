"""Arrays and sums of ranks whose devices belong to several processes.

Data parallelism may go beyond a process: then processes form a grid (:meth:`~jaxpipe.runtime.processes.Processes.arrange`),
and a process has one part of a rank's devices along dp, its *column*. Stage functions, messages and offloads run inside a
column, on its part of the rank's mesh; the reduction of gradients and the update after it run on the rank's whole mesh. The
same array is seen on either (:func:`seen_as`): nothing is copied, and nothing is exchanged.

**Sums.** What ``lax.psum`` and ``lax.psum_scatter`` return depends on the sizes of arrays and on how devices lie in processes,
in every size that was tried (gloo), and NCCL chooses rings and trees by size and topology. :func:`sum_over` and
:func:`scatter_sum` exchange the terms (all-to-all, which changes no bit), add them on one device in the order of the devices,
and gather the sums: the same bits on any grid, for the same bytes as a reduce-scatter and an all-gather, and one more buffer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpipe.axes import DP
from jaxpipe.mesh import AnyMesh, spec_of
from jaxpipe.stage.split.trace import sum_in_order

_GATHERED_ELEMENTS = 1024
"""The most elements of an array of which every device gets all terms: one collective, where more bytes cost less than a
second latency."""


def aval_on(mesh: Mesh, aval: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Return what an array on one mesh of a rank is on ``mesh``, which has more or fewer of the rank's devices along dp."""
    spec = spec_of(aval)
    shape = list(aval.shape)
    for axis, names in enumerate(spec):
        if DP in (names if isinstance(names, tuple) else (names,)):
            shape[axis] = shape[axis] * mesh.shape[DP] // aval.sharding.mesh.shape[DP]
    return jax.ShapeDtypeStruct(tuple(shape), aval.dtype, sharding=NamedSharding(mesh, spec))


def seen_as(arrays: Sequence[jax.Array], avals: Sequence[jax.ShapeDtypeStruct]) -> list[jax.Array]:
    """Return arrays as ``avals`` say, whose meshes have the same devices of this process. No copy, no collective."""
    return [
        array
        if array.sharding == aval.sharding
        else jax.make_array_from_single_device_arrays(
            aval.shape, _sharding(aval), [shard.data for shard in array.addressable_shards]
        )
        for array, aval in zip(arrays, avals, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class RankView:
    """Sees arrays of a rank on its whole mesh, and on the part of it in this process's column; these may be the same."""

    rank: Mesh
    column: Mesh

    @property
    def spans(self) -> bool:
        """Return whether the rank has devices of other processes."""
        return self.rank != self.column

    def widen(self, arrays: Sequence[jax.Array], specs: Sequence[PartitionSpec]) -> list[jax.Array]:
        """Return arrays of the column, which lie as ``specs`` say, as parts of arrays of the rank."""
        # The specs are not those of the arrays: one device forgets along which axes its arrays differ from others'.
        if not self.spans:
            return list(arrays)
        avals = [
            jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=NamedSharding(self.column, spec))
            for array, spec in zip(arrays, specs, strict=True)
        ]
        return seen_as(arrays, [aval_on(self.rank, aval) for aval in avals])

    def widen_replicated(self, tree: Any) -> Any:
        """Return a pytree of arrays that are the same on all devices of the column, and of the rank, as the rank's."""
        leaves, structure = jax.tree.flatten(tree)
        return jax.tree.unflatten(structure, self.widen(leaves, [PartitionSpec()] * len(leaves)))

    def narrow(self, tree: Any) -> Any:
        """Return the parts in the column of a pytree of arrays of the rank."""
        if not self.spans:
            return tree
        leaves, structure = jax.tree.flatten(tree)
        avals = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in leaves]
        return jax.tree.unflatten(structure, seen_as(leaves, [aval_on(self.column, aval) for aval in avals]))

    def narrow_undivided(self, tree: Any) -> Any:
        """Return a pytree of arrays of the rank, those that are the same along dp as arrays in the column."""
        return jax.tree.map(lambda x: x if DP in _named(spec_of(x)) else self.narrow(x), tree) if self.spans else tree


def _named(spec: PartitionSpec) -> set[str]:
    return {name for names in spec for name in (names if isinstance(names, tuple) else (names,))}


def place(values: Sequence[Any], shardings: Sequence[jax.sharding.Sharding]) -> list[jax.Array]:
    """Put host arrays, which every process has whole, on devices that may be of several processes."""
    # ``device_put`` to devices of several processes compares the values between them, each time.
    if all(sharding.is_fully_addressable for sharding in shardings):
        arrays: list[jax.Array] = jax.device_put(list(values), list(shardings))
        return arrays
    return [
        jax.make_array_from_callback(np.shape(value), sharding, np.asarray(value).__getitem__)
        for value, sharding in zip(values, shardings, strict=True)
    ]


def spanning_options(mesh: Mesh) -> dict[str, bool] | None:
    """Return the compiler options of a program over ``mesh``: None where its devices are of one process, or no GPUs."""
    # All processes of the mesh compile the same module, and must choose the same kernels: they share the tuning, which programs
    # of one process must not (train/devices.py).
    spans = len({device.process_index for device in mesh.devices.flat}) > 1
    return {"xla_gpu_shard_autotuning": True} if spans and mesh.devices.flat[0].platform == "gpu" else None


def _sharding(aval: jax.ShapeDtypeStruct) -> jax.sharding.Sharding:
    sharding: jax.sharding.Sharding | None = aval.sharding
    assert sharding is not None
    return sharding


# -- sums, inside ``shard_map`` -------------------------------------------------------------------------------------------


def sum_over(array: jax.Array, axes: Sequence[str], mesh: AnyMesh) -> jax.Array:
    """Return the sum of the devices' arrays along ``axes``, added in the order of the devices."""
    terms = math.prod(mesh.shape[a] for a in axes)
    if terms == 1:
        return array
    if array.size <= _GATHERED_ELEMENTS:
        gathered: jax.Array = sum_in_order(jax.lax.all_gather(array, tuple(axes)))
        return gathered
    flat = jnp.pad(jnp.ravel(array), (0, -array.size % terms)).reshape(terms, -1)
    own = sum_in_order(jax.lax.all_to_all(flat, tuple(axes), 0, 0))
    total: jax.Array = jax.lax.all_gather(own, tuple(axes), tiled=True)[: array.size].reshape(array.shape)
    return total


def scatter_sum(rows: jax.Array, axis: str) -> jax.Array:
    """Return the sum of the devices' row for this device, added in the order of the devices. ``rows``: one for each of them."""
    total: jax.Array = sum_in_order(jax.lax.all_to_all(rows, axis, 0, 0))
    return total
