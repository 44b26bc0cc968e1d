"""Arrays, sums and functions of ranks whose devices belong to several processes.

A rank may be larger than a process: then processes form a grid (:meth:`~jaxpipe.runtime.processes.Processes.arrange`), and a
process has one part of a rank's devices, its *column*. What the runtime keeps and moves are arrays of the column: messages and
offloads stay within it. The reduction of gradients and the update after it run on the rank's whole mesh. The same array is seen
on either (:class:`RankView`): nothing is copied, and nothing is exchanged.

Where columns divide dp alone, stage functions run in a column. Where they divide axes along which layers exchange (tp, cp), a
function runs on devices of several processes, and each calls it with its parts of the arrays (:func:`function_in_process`).

**Sums.** What ``lax.psum`` and ``lax.psum_scatter`` return depends on the sizes of arrays and on how devices lie in processes,
in every size that was tried (gloo), and NCCL chooses rings and trees by size and topology. :func:`sum_over` and
:func:`scatter_sum` exchange the terms (all-to-all, which changes no bit), add them on one device in the order of the devices,
and gather the sums: the same bits on any grid, for the same bytes as a reduce-scatter and an all-gather, and one more buffer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpipe.mesh import AnyMesh, spec_of
from jaxpipe.stage.functions import AnyFunction, StageFunctions
from jaxpipe.stage.split.trace import sum_in_order

_Function = TypeVar("_Function", bound=AnyFunction)

_GATHERED_ELEMENTS = 1024
"""The most elements of an array of which every device gets all terms: one collective, where more bytes cost less than a
second latency."""


def aval_on(mesh: Mesh, aval: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Return what an array on one mesh of a rank is on ``mesh``, which has more or fewer of the rank's devices."""
    spec, shape = spec_of(aval), list(aval.shape)
    for axis, names in enumerate(spec):
        for name in names if isinstance(names, tuple) else (names,):
            if name is not None:
                shape[axis] = shape[axis] * mesh.shape[name] // aval.sharding.mesh.shape[name]
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
        return jax.tree.unflatten(structure, seen_as(leaves, [aval_on(self.column, _aval(x)) for x in leaves]))

    def narrow_whole(self, tree: Any) -> Any:
        """Return a pytree of arrays of the rank, those of which this process has all as arrays in the column."""

        def is_whole(array: jax.Array) -> bool:
            return tuple(aval_on(self.column, _aval(array)).shape) == tuple(array.shape)

        return jax.tree.map(lambda x: self.narrow(x) if is_whole(x) else x, tree) if self.spans else tree


def _aval(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


def holders_share(array: jax.Array) -> tuple[int, int]:
    """Return ``(k, n)``: n processes have the same parts of an array as this one, which is the k-th of them."""
    if array.sharding.is_fully_addressable:
        return 0, 1
    parts: Mapping[Any, Any] = array.sharding.devices_indices_map(array.shape)
    mine = jax.process_index()
    own_part = next(part for device, part in parts.items() if device.process_index == mine)
    holders = sorted({device.process_index for device, part in parts.items() if part == own_part})
    return holders.index(mine), len(holders)


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


def scatter_sum(rows: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Return the sum of the row for this device that the devices along ``axes`` have, added in their order. ``rows``: one for
    each of them."""
    total: jax.Array = sum_in_order(jax.lax.all_to_all(rows, axes, 0, 0))
    return total


# -- functions whose devices are of several processes ---------------------------------------------------------------------


class _JittedInProcess:
    """The jitted part of a function, lowered for the shapes of a process's parts."""

    def __init__(self, jitted: Any, avals: Sequence[jax.ShapeDtypeStruct]) -> None:
        self._jitted, self._avals = jitted, avals

    def lower(self, *_: jax.ShapeDtypeStruct) -> Any:
        return self._jitted.lower(*self._avals)


def function_in_process(function: _Function, view: RankView) -> _Function:
    """Return a compiled function of all devices in ``view.rank`` as one that each of their processes calls, in the same order,
    with its parts of the arrays, and that returns its parts of the results."""
    joint, avals_in = function.call, function.avals_in

    def call(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(view.narrow(list(joint(*seen_as(arrays, avals_in)))))

    return replace(
        function,
        avals_in=tuple(aval_on(view.column, a) for a in avals_in),
        avals_out=tuple(aval_on(view.column, a) for a in function.avals_out),
        call=call,
        jitted=_JittedInProcess(function.jitted, avals_in),
    )


def stage_in_process(stage: StageFunctions, view: RankView) -> StageFunctions:
    """Return a stage whose functions run on all devices in ``view.rank`` as each of their processes sees it."""
    if not view.spans:
        return stage

    def part(aval: Any) -> Any:
        return aval_on(view.column, aval) if isinstance(aval, jax.ShapeDtypeStruct) else aval

    return replace(
        stage,
        functions={op: function_in_process(f, view) for op, f in stage.functions.items()},
        evaluation=function_in_process(stage.evaluation, view),
        x=jax.tree.map(part, stage.x),
        y=jax.tree.map(part, stage.y),
        param_avals=tuple(map(part, stage.param_avals)),
        acc_avals=tuple(map(part, stage.acc_avals)),
    )
