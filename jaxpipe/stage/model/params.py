"""Packs parameters into few flat buffers, which a stage function takes instead of a pytree.

A call costs about 1 µs per argument on top of a fixed price, and a transformer layer has a dozen small leaves. So leaves of up
to 64 KiB of one stage are concatenated into flat buffers: per dtype one for vectors (biases and scales, whose gradients B makes
in passing) and one for the rest. Larger leaves keep their own buffer and shape. The gradient accumulators mirror the buffers.
Leaves that are not trained (integers, and what :attr:`Layer.trainable` leaves out) go into buffers after all others and have no
accumulator. Copies of leaves tied to another stage's share buffers only with each other: the owner's stage updates them.

Where devices divide layers a buffer holds leaves of one kind (:data:`~jaxpipe.axes.BUFFER_AXES`): split over shards, whole on
each (``same``), or whole on each with gradients that the shards make parts of (``partial``). Slots and buffers are a shard's;
what a rank holds of a split buffer is the shards' buffers one after another on axis 0. :meth:`ParamLayout.pack` and
:meth:`~ParamLayout.unpack` go between whole parameters and what a rank holds, :meth:`~ParamLayout.pack_leaves` and
:meth:`~ParamLayout.unpack_leaves` between a shard's leaves and its buffers.

Tied leaves: :func:`stage_params` puts a copy of the owner's leaf at the tied path when the owner lives in another stage; when
owner and user share a stage there is one leaf, and :meth:`ParamLayout.tree` shows it at both places.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe.axes import BUFFER_AXES, ONE_SHARD, WITHIN, BufferAxes, BufferKind, RankMesh
from jaxpipe.errors import ConfigError, StageError
from jaxpipe.stage.model.layer import Layer, Params, Path, Shard, every_init_avals

SMALL_BYTES = 64 * 1024
"""Leaves up to this size share a buffer."""

Place = tuple[str, Path]
"""The place of a parameter: its layer, and its path there."""


@dataclass(frozen=True, slots=True)
class ParamAval:
    """The shape of a parameter, the dtype that it is computed with, and whether it is trained."""

    shape: tuple[int, ...]
    dtype: Any
    trained: bool = True

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))


def compute_avals(layers: Sequence[Layer], compute: Any, master: Any = jnp.float32) -> dict[str, Any]:
    """Return what the layers create, by layer name: floats in ``compute``, those that stay float32 in ``master``."""

    def aval(layer: Layer, keys: Any, leaf: Any) -> ParamAval:
        path = tuple(getattr(k, "key", k) for k in keys)
        floating = jnp.issubdtype(leaf.dtype, jnp.floating)
        dtype = leaf.dtype if not floating else master if layer.stays_float32(path) else compute
        return ParamAval(leaf.shape, dtype, layer.trains(path))

    avals = every_init_avals(layers)
    return {x.name: jax.tree_util.tree_map_with_path(partial(aval, x), avals[x.name]) for x in layers}


def trained_params(layers: Sequence[Layer], params: Mapping[str, Params]) -> dict[str, Params]:
    """Select from parameters by layer (or shapes of them) those that are trained: what an optimizer gets."""

    def trained(layer: Layer) -> Params:
        floats = [(path, leaf) for path, leaf in leaves_of(layer.name, params) if is_trained(leaf)]
        return nested({path: leaf for path, leaf in floats if layer.trains(path)})

    return {layer.name: trained(layer) for layer in layers}


def is_trained(leaf: Any) -> bool:
    """Whether a parameter, or the shape of one, has a gradient: arrays of floats do, unless :class:`ParamAval` says else."""
    return bool(jnp.issubdtype(leaf.dtype, jnp.inexact)) and getattr(leaf, "trained", True)


def expert_leaves(layers: Iterable[Layer], params: Mapping[str, Any]) -> list[tuple[Any, int]]:
    """Return the leaves that hold experts, with how many of these a position is sent to (:attr:`Layer.experts`)."""
    return [(get_leaf(params[layer.name], path), k) for layer in layers for path, k in layer.experts.items()]


def routed_flops(experts: Iterable[tuple[Any, int]]) -> float:
    """Count the operations of the experts' products for one position in F."""
    return sum((2.0 * k * leaf.size / leaf.shape[0] for leaf, k in experts), 0.0)


@dataclass(frozen=True, slots=True)
class LeafSlot:
    """The place of one leaf: in ``buffer``, from element ``offset`` on; with ``offset`` None it is the whole buffer.

    ``shape``: a shard's. ``axis``: along which the leaf is split over ``shards``, or None.
    """

    layer: str
    path: Path
    shape: tuple[int, ...]
    dtype: Any
    buffer: int
    offset: int | None
    axis: int | None = None
    shards: int = 1

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape of the leaf, all shards together."""
        return tuple(n * self.shards if k == self.axis else n for k, n in enumerate(self.shape))

    def parts(self, leaf: Any) -> Sequence[Any]:
        """Divide the whole leaf as the shards have it."""
        return [leaf] if self.axis is None else np.split(leaf, self.shards, self.axis)

    def __str__(self) -> str:
        return "/".join((self.layer, *self.path))


@dataclass(frozen=True, slots=True)
class ParamLayout:
    """The leaves of one stage's parameters and the buffers that hold them.

    ``slots``: in order of layer, then path. ``buffers``: a shard's shapes and dtypes; the leaves of the first ``num_trained``
    are trained. ``kinds``: how each lies on the devices of ``mesh``.
    ``aliases``: (layer, path) of a leaf tied within the stage → (owner layer, owner path). ``shared``: the same for leaves
    whose owner lives in another stage; these have slots of their own, and the caller adds their gradients to the owner's.
    ``layers``: all layers of the stage, those without parameters too.
    """

    layers: tuple[str, ...]
    slots: tuple[LeafSlot, ...]
    buffers: tuple[jax.ShapeDtypeStruct, ...]
    num_trained: int
    aliases: Mapping[Place, Place]
    shared: Mapping[Place, Place]
    kinds: tuple[BufferKind, ...] = ()
    mesh: RankMesh = ONE_SHARD

    @classmethod
    def build(
        cls,
        layers: Sequence[Layer],
        params: Mapping[str, Params],
        small_bytes: int = SMALL_BYTES,
        tp: RankMesh = ONE_SHARD,
    ) -> ParamLayout:
        """Lay out the parameters of a stage (whole arrays, ``ShapeDtypeStruct`` or :class:`ParamAval`), which
        :func:`stage_params` selects.

        Raises:
            StageError: a layer's parameters are missing, are not a dict pytree of arrays, or a tied leaf has no owner; a layer
                has no tensor-parallel form, or ties leaves that lie differently on the shards.
            ConfigError: a layer can't be divided over ``tp`` shards.
        """
        names = tuple(layer.name for layer in layers)
        aliases, shared = _ties(layers)
        leaves = [
            (name, path, leaf)
            for name in names
            for path, leaf in leaves_of(name, params)
            if (name, path) not in aliases
        ]
        places, lie = {(name, path) for name, path, _ in leaves}, _sharding(layers, tp)
        assert shared.keys() <= places, "parameters that stage_params selects"
        _check_ties(places, lie, aliases)
        local_leaves = [(name, path, _shard_of(name, path, leaf, lie, tp)) for name, path, leaf in leaves]
        slots, buffers, num_trained, kinds = _assign(local_leaves, lie, shared, small_bytes, tp)
        return cls(names, slots, buffers, num_trained, aliases, shared, kinds, tp)

    def cast(self, params: Mapping[str, Params], dtype: Any = None) -> dict[str, Params]:
        """Cast a stage's whole parameters to NumPy arrays: floats in ``dtype``, by default the one they are computed with."""

        def cast(slot: LeafSlot) -> np.ndarray:
            leaf = np.asarray(self._find(params, slot))
            floating = jnp.issubdtype(leaf.dtype, jnp.floating)
            return leaf.astype(slot.dtype if dtype is None else dtype) if floating else leaf

        return by_layer(self.layers, ((slot, cast(slot)) for slot in self.slots))

    def axes(self, buffer: int) -> BufferAxes:
        """Return the axes along which a buffer is divided, and its gradient is summed."""
        return BUFFER_AXES[self.kinds[buffer]]

    def expert_sizes(self, layers: Iterable[Layer]) -> set[tuple[int, int]]:
        """Return how many experts each leaf of ``layers`` that holds some has on a shard, and how many elements."""
        places = {(layer.name, path) for layer in layers for path in layer.experts}
        return {(slot.shape[0], slot.size) for slot in self.slots if (slot.layer, slot.path) in places}

    def trains(self, slot: LeafSlot) -> bool:
        """Whether a leaf has a gradient."""
        return slot.buffer < self.num_trained

    def pack(self, params: Mapping[str, Params]) -> list[jax.Array]:
        """Pack what a rank holds of a stage's whole parameters, or of anything shaped like them (gradients, another dtype).
        Traceable.

        Raises:
            StageError: a leaf is missing or has another shape.
        """
        leaves = [self._find(params, slot) for slot in self.slots]
        parts = [slot.parts(leaf) for slot, leaf in zip(self.slots, leaves, strict=True)]
        # Shard by shard, then side by side for split buffers; buffers that are the same on all shards are held once.
        most = max(map(len, parts), default=1)
        packed = [self.pack_leaves([part[k % len(part)] for part in parts]) for k in range(most)]
        counts = [self.mesh.parts(kind) for kind in self.kinds]
        return [
            _joined(buffers[:n]) if n > 1 else buffers[0]
            for n, buffers in zip(counts, zip(*packed, strict=True), strict=True)
        ]

    def pack_leaves(self, leaves: Sequence[Any]) -> list[jax.Array]:
        """Pack a shard's leaves, in slot order, into its buffers; for leaves that are None there is no buffer. Traceable."""
        members: list[list[Any]] = [[] for _ in self.buffers]
        for slot, leaf in zip(self.slots, leaves, strict=True):
            if leaf is not None:
                members[slot.buffer].append(leaf if slot.offset is None else leaf.reshape(-1))
        return [m[0] if len(m) == 1 else _joined(m) for m in members if m]

    def unpack_leaves(self, buffers: Sequence[Any]) -> list[Any]:
        """Unpack a shard's leaves, in slot order, from its buffers; None for those of a buffer that is None. Traceable."""
        assert len(buffers) == len(self.buffers), f"{len(buffers)} buffers for a layout of {len(self.buffers)}"
        return [
            buffers[s.buffer]
            if s.offset is None or buffers[s.buffer] is None
            else jax.lax.slice_in_dim(buffers[s.buffer], s.offset, s.offset + s.size).reshape(s.shape)
            for s in self.slots
        ]

    def unpack(self, buffers: Sequence[Any], *, copies: bool = True) -> dict[str, Params]:
        """Unpack the whole parameters by layer name, each once, from what a rank holds; ``copies``: those of other stages' too.
        Traceable."""
        slots = [slot for slot in self.slots if copies or (slot.layer, slot.path) not in self.shared]
        return by_layer(self.layers, ((slot, self._whole(buffers[slot.buffer], slot)) for slot in slots))

    def _whole(self, buffer: Any, slot: LeafSlot) -> Any:
        """Take a whole leaf out of what a rank holds of its buffer."""
        # A split buffer holds the shards' buffers one after another, so the leaf's parts lie a buffer's length apart.
        if slot.axis is None:
            return buffer if slot.offset is None else buffer[slot.offset : slot.offset + slot.size].reshape(slot.shape)
        each = buffer.reshape(slot.shards, -1)
        begin = 0 if slot.offset is None else slot.offset
        parts = each[:, begin : begin + slot.size].reshape(slot.shards, *slot.shape)
        return np.moveaxis(parts, 0, slot.axis).reshape(slot.whole_shape)

    def tree(self, leaves: Sequence[Any]) -> dict[str, Params]:
        """Build the parameters by layer name from the leaves in slot order; leaves tied within the stage stand at both
        places."""
        params = by_layer(self.layers, zip(self.slots, leaves, strict=True))
        for (layer, path), (owner, owner_path) in self.aliases.items():
            insert_leaf(params[layer], path, get_leaf(params[owner], owner_path))
        return params

    def acc_avals(self, dtype: Any = jnp.float32) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Return the shapes of a shard's gradient accumulators: the trained buffers, in ``dtype`` or wider."""
        return tuple(
            jax.ShapeDtypeStruct(b.shape, jnp.promote_types(dtype, b.dtype)) for b in self.buffers[: self.num_trained]
        )

    def _find(self, params: Mapping[str, Params], slot: LeafSlot) -> Any:
        leaf = find_leaf(params, (slot.layer, *slot.path))
        if leaf is None:
            raise StageError(f"parameter {slot} is missing; have layers {', '.join(params) or 'none'}")
        if tuple(leaf.shape) != slot.whole_shape:
            expected = slot.whole_shape
            raise StageError(f"parameter {slot} has shape {tuple(leaf.shape)}, the stage was built for {expected}")
        return leaf


def _joined(arrays: Sequence[Any]) -> Any:
    """Join arrays one after the other, on the host where all are NumPy's: nothing is compiled then."""
    join: Any = np.concatenate if all(isinstance(a, np.ndarray) for a in arrays) else jnp.concatenate
    return join(arrays)


def by_layer(layers: Iterable[str], leaves: Iterable[tuple[LeafSlot, Any]]) -> dict[str, Params]:
    """Nest leaves by the name of each of ``layers``, also of those without any."""
    none: dict[str, Params] = {name: {} for name in layers}
    return none | nested({(slot.layer, *slot.path): leaf for slot, leaf in leaves})


def stage_params(layers: Sequence[Layer], params: Mapping[str, Params]) -> dict[str, Params]:
    """Select the parameters a stage of these layers holds, out of the whole model's: its layers' own leaves, and copies of
    leaves tied to layers of other stages (kept as they are where the owner is absent but the copy is there already).

    Works on arrays and on ``ShapeDtypeStruct``.

    Raises:
        StageError: a layer, or the owner of a tied leaf, is not in ``params``.
    """
    layer_names = {layer.name for layer in layers}
    chosen: dict[str, Params] = {}
    for layer in layers:
        if layer.name not in params:
            raise StageError(f"layer {layer.name!r} has no parameters; have {', '.join(map(repr, params)) or 'none'}")
        leaves = params[layer.name]
        for path, (owner, owner_path) in layer.tied.items():
            if owner in layer_names or (owner not in params and find_leaf(leaves, path) is not None):
                continue
            leaf = find_leaf(params, (owner, *owner_path))
            if leaf is None:
                raise StageError(
                    f"layer {layer.name!r} ties {'/'.join(path)} to {'/'.join((owner, *owner_path))}, which does not exist"
                )
            leaves = with_leaf(leaves, path, leaf)
        chosen[layer.name] = leaves
    return chosen


def with_tied_leaves(layer: Layer, params: Mapping[str, Params]) -> Params:
    """Put the tied leaves of ``layer``, taken from their owners, into its parameters. Raises as :func:`stage_params`."""
    return stage_params([layer], params)[layer.name]


def _ties(layers: Sequence[Layer]) -> tuple[dict[Place, Place], dict[Place, Place]]:
    layer_names = {layer.name for layer in layers}
    if len(layer_names) != len(layers):
        raise StageError(
            f"layer names repeat: {', '.join(layer.name for layer in layers)}; names are unique in a model"
        )
    ties = [((layer.name, path), (owner, tuple(at))) for layer in layers for path, (owner, at) in layer.tied.items()]
    return {place: x for place, x in ties if x[0] in layer_names}, {
        place: x for place, x in ties if x[0] not in layer_names
    }


def _check_ties(places: Collection[Place], lie: Mapping[Place, _Lie], aliases: Mapping[Place, Place]) -> None:
    """Raise StageError unless the leaves tied within a stage are there, and lie on the shards as their owners do."""
    for (layer, path), (owner, owner_path) in aliases.items():
        tie = f"layer {layer!r} ties {'/'.join(path)} to {'/'.join((owner, *owner_path))}"
        if (owner, owner_path) not in places:
            raise StageError(f"{tie}, which does not exist or is itself tied; tie to the layer that creates the leaf")
        if lie.get((layer, path)) != lie.get((owner, owner_path)):
            raise StageError(
                f"{tie}, which lies differently on tensor-parallel shards; name the same axis in shards() of both"
            )


def leaves_of(name: str, params: Mapping[str, Params]) -> list[tuple[Path, Any]]:
    """List the leaves of a layer's parameters by path.

    Raises:
        StageError: there are none of that layer, or they are not arrays in nested dicts.
    """
    if name not in params:
        raise StageError(f"layer {name!r} has no parameters; have {', '.join(map(repr, params)) or 'none'}")
    if not isinstance(params[name], Mapping):
        raise StageError(f"layer {name!r}: its parameters are a {type(params[name]).__name__}; want a dict of arrays")
    leaves = []
    for keys, leaf in jax.tree_util.tree_flatten_with_path(params[name])[0]:
        path = tuple(getattr(k, "key", k) for k in keys)
        if not all(isinstance(k, str) for k in path) or not hasattr(leaf, "shape"):
            raise StageError(
                f"layer {name!r}: parameter {jax.tree_util.keystr(keys)} ({type(leaf).__name__}) is not an array in nested "
                "dicts with string keys"
            )
        leaves.append((path, leaf))
    return leaves


_Lie = tuple[BufferKind, int | None]
"""How a leaf lies on the shards: its kind, and the axis that is divided."""
_WHOLE: _Lie = ("same", None)


def _sharding(layers: Sequence[Layer], tp: RankMesh) -> dict[Place, _Lie]:
    """Return how each leaf lies on the shards, by layer and path; leaves that are the same on each are left out."""
    if not tp.divides_parameters:
        return {}
    lie: dict[Place, _Lie] = {}
    for layer in layers:
        # Silence would be wrong: a layer that sums nothing over tp would train on its shard's part alone. Devices that have
        # other rows need nothing of a layer.
        if layer.shards is None and not tp.one_row.divides_parameters:
            continue
        if layer.shards is None:
            raise StageError(
                f"layer {layer.name!r} has no tensor-parallel form (Layer.shards is None); use tp=1, or write it with "
                "jaxpipe.tensor_parallel"
            )
        lie |= {(layer.name, tuple(path)): _lie_of(shard) for path, shard in layer.shards(tp).items()}
    return {place: (kind, axis) for place, (kind, axis) in lie.items() if tp.tells_apart(kind)}


def undivided_axes(layers: Iterable[Layer], mesh: RankMesh) -> list[str]:
    """Return the axes within others, of several devices, along which no layer divides a parameter."""
    kinds = {_lie_of(shard)[0] for layer in layers if layer.shards is not None for shard in layer.shards(mesh).values()}
    return [axis for axis in WITHIN if mesh.sizes[axis] > 1 and not any(axis in BUFFER_AXES[k].divided for k in kinds)]


def _lie_of(shard: Shard) -> _Lie:
    return ("split", shard) if isinstance(shard, int) else ("partial", None) if shard == "partial" else shard


def _shard_of(name: str, path: Path, leaf: Any, lie: Mapping[Place, _Lie], mesh: RankMesh) -> Any:
    """Return the shape and dtype of a shard of ``leaf``."""
    (kind, axis), shape = lie.get((name, path), _WHOLE), list(leaf.shape)
    if axis is not None:
        if axis >= len(shape) or shape[axis] % mesh.parts(kind):
            what = f"{shape[axis]} on axis {axis}" if axis < len(shape) else f"no axis {axis}"
            raise ConfigError(
                f"layer {name!r}: parameter {'/'.join(path)} of shape {tuple(shape)} has {what}, which does not divide over "
                f"{' × '.join(f'{a} {mesh.sizes[a]}' for a in BUFFER_AXES[kind].divided)}"
            )
        shape[axis] //= mesh.parts(kind)
    return ParamAval(tuple(shape), leaf.dtype, is_trained(leaf))


def _assign(
    leaves: Sequence[tuple[str, Path, Any]],
    lie: Mapping[Place, _Lie],
    shared: Collection[Place],
    small_bytes: int,
    mesh: RankMesh,
) -> tuple[tuple[LeafSlot, ...], tuple[jax.ShapeDtypeStruct, ...], int, tuple[BufferKind, ...]]:
    """Return slots, buffers (the trained ones first, of these the large ones first), how many are trained, and how each
    lies."""
    # Leaves share a buffer only if everything that treats buffers treats them alike: casts, reduction over shards, updates, and
    # whether B makes their gradient (vectors) or W (matrices): joined, W would wait for B's part.
    groups: dict[tuple[bool, bool, Hashable], list[int]] = {}
    for i, (name, path, leaf) in enumerate(leaves):
        dtype = np.dtype(leaf.dtype)
        small = leaf.size * dtype.itemsize <= small_bytes
        alike = (len(leaf.shape) > 1, dtype, lie.get((name, path), _WHOLE)[0], (name, path) in shared)
        groups.setdefault((not is_trained(leaf), small, alike if small else i), []).append(i)
    slots: dict[int, LeafSlot] = {}
    buffers: list[jax.ShapeDtypeStruct] = []
    kinds: list[BufferKind] = []
    for (_, small, _), members in sorted(groups.items(), key=lambda group: group[0][:2]):
        end = 0
        for i in members:
            name, path, leaf = leaves[i]
            kind, axis = lie.get((name, path), _WHOLE)
            at, shards = end if small else None, mesh.parts(kind)
            slots[i] = LeafSlot(name, path, tuple(leaf.shape), np.dtype(leaf.dtype), len(buffers), at, axis, shards)
            end += slots[i].size
        buffers.append(jax.ShapeDtypeStruct((end,) if small else tuple(leaf.shape), slots[members[0]].dtype))
        kinds.append(kind)
    num_trained = sum(not fixed for fixed, _, _ in groups)
    return tuple(slots[i] for i in range(len(leaves))), tuple(buffers), num_trained, tuple(kinds)


def get_leaf(tree: Any, path: Path) -> Any:
    """Return the leaf of a nested dict at ``path``; KeyError where there is none."""
    for key in path:
        tree = tree[key]
    return tree


def find_leaf(tree: Any, path: Path) -> Any:
    """Return the leaf of a nested dict at ``path``, None where there is none."""
    for key in path:
        if not isinstance(tree, Mapping) or key not in tree:
            return None
        tree = tree[key]
    return tree


def required_leaf(tree: Any, path: Path, whose: str) -> Any:
    """Return the leaf of a nested dict at ``path``; where there is none, raise StageError, which calls it a parameter of
    ``whose``."""
    leaf = find_leaf(tree, path)
    if leaf is None:
        raise StageError(f"{whose} has no parameter {'/'.join(path)} in what was given")
    return leaf


def by_path(tree: Any, path: Path = ()) -> dict[Path, Any]:
    """Return the leaves of a nested dict by path, keys as strings: the inverse of :func:`nested`."""
    if not isinstance(tree, Mapping):
        return {path: tree}
    return {p: leaf for name, child in tree.items() for p, leaf in by_path(child, (*path, str(name))).items()}


def nested(leaves: Mapping[Path, Any]) -> Params:
    """Make a nested dict of leaves by path."""
    tree: Params = {}
    for path, leaf in leaves.items():
        insert_leaf(tree, path, leaf)
    return tree


def with_leaf(tree: Params, path: Path, leaf: Any) -> Params:
    """Copy a nested dict with another leaf at ``path``."""
    head, *rest = path
    return {**tree, head: with_leaf(tree.get(head, {}), tuple(rest), leaf) if rest else leaf}


def insert_leaf(tree: Params, path: Path, leaf: Any) -> None:
    """Put a leaf into a nested dict, which is changed."""
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = leaf


def named_leaves(tree: Any) -> list[tuple[Path, Any]]:
    """List the leaves of a pytree with their paths as strings; a named tuple's fields are called like a dict's keys."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(tuple(key_name(key) for key in keys), leaf) for keys, leaf in leaves]


def key_name(key: Any) -> str:
    """Return the name of a step of a path in a pytree."""
    return str(next(getattr(key, attribute) for attribute in ("key", "name", "idx") if hasattr(key, attribute)))
