"""Parameters as few flat buffers: what a stage function takes instead of a pytree.

A call costs about 1 µs per argument on top of a fixed price, and a transformer layer has a dozen small leaves. So leaves of up
to 64 KiB of one stage are concatenated into flat buffers: per dtype one for vectors (biases and scales, whose gradients B makes
in passing) and one for the rest. Larger leaves keep their own buffer and shape. The gradient accumulators mirror the buffers.
Integer leaves go into buffers after all others and have no accumulator.

Tied leaves: :func:`stage_params` puts a copy of the owner's leaf at the tied path when the owner lives in another stage; when
owner and user share a stage there is one leaf, and :meth:`ParamLayout.unpack` shows it at both places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe.errors import StageError
from jaxpipe.stage.layer import Layer, Params, Path

SMALL_BYTES = 64 * 1024
"""Leaves up to this size share a buffer."""


@dataclass(frozen=True, slots=True)
class LeafSlot:
    """Where one leaf lives: in ``buffer``, from element ``offset`` on; with ``offset`` None it is the whole buffer."""

    layer: str
    path: Path
    shape: tuple[int, ...]
    dtype: Any
    buffer: int
    offset: int | None

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    def __str__(self) -> str:
        return "/".join((self.layer, *self.path))


@dataclass(frozen=True, slots=True)
class ParamLayout:
    """The leaves of one stage's parameters and the buffers that hold them.

    ``slots``: in order of layer, then path. ``buffers``: shapes and dtypes; the first ``num_trained`` are floating-point.
    ``aliases``: (layer, path) of a leaf tied within the stage → (owner layer, owner path). ``shared``: the same for leaves
    whose owner lives in another stage; these have slots of their own, and the caller adds their gradients to the owner's.
    ``layers``: all layers of the stage, those without parameters too.
    """

    layers: tuple[str, ...]
    slots: tuple[LeafSlot, ...]
    buffers: tuple[jax.ShapeDtypeStruct, ...]
    num_trained: int
    aliases: Mapping[tuple[str, Path], tuple[str, Path]]
    shared: Mapping[tuple[str, Path], tuple[str, Path]]

    @classmethod
    def build(
        cls, layers: Sequence[Layer], params: Mapping[str, Params], small_bytes: int = SMALL_BYTES
    ) -> ParamLayout:
        """Lay out the parameters of a stage (arrays or ``ShapeDtypeStruct``), which :func:`stage_params` selects.

        Raises:
            StageError: a layer's parameters are missing, are not a dict pytree of arrays, or a tied leaf has no owner.
        """
        names = tuple(layer.name for layer in layers)
        aliases, shared = _ties(layers)
        leaves = [
            (name, path, leaf) for name in names for path, leaf in _leaves(name, params) if (name, path) not in aliases
        ]
        _check_ties(leaves, aliases, shared)
        slots, buffers, num_trained = _assign(leaves, small_bytes)
        return cls(names, slots, buffers, num_trained, aliases, shared)

    def pack(self, params: Mapping[str, Params]) -> list[jax.Array]:
        """Buffers of a stage's parameters, or of anything shaped like them (gradients, another dtype). Traceable.

        Raises:
            StageError: a leaf is missing or has another shape.
        """
        return self.pack_leaves([self._find(params, slot) for slot in self.slots])

    def pack_leaves(self, leaves: Sequence[Any]) -> list[jax.Array]:
        """Buffers of the leaves in slot order; a prefix of the buffers when only their leaves are given as non-None."""
        members: list[list[Any]] = [[] for _ in self.buffers]
        for slot, leaf in zip(self.slots, leaves, strict=True):
            if leaf is not None:
                members[slot.buffer].append(leaf if slot.offset is None else jnp.ravel(leaf))
        return [m[0] if len(m) == 1 else jnp.concatenate(m) for m in members if m]

    def unpack_leaves(self, buffers: Sequence[Any]) -> list[Any]:
        """The leaves in slot order. Traceable."""
        assert len(buffers) == len(self.buffers), f"{len(buffers)} buffers for a layout of {len(self.buffers)}"
        return [
            buffers[s.buffer]
            if s.offset is None
            else jax.lax.slice_in_dim(buffers[s.buffer], s.offset, s.offset + s.size).reshape(s.shape)
            for s in self.slots
        ]

    def unpack(self, buffers: Sequence[Any], *, ties: bool = False) -> dict[str, Params]:
        """The parameters by layer name. ``ties=True`` also puts leaves tied within the stage at both places. Traceable."""
        return self.tree(self.unpack_leaves(buffers), ties=ties)

    def tree(self, leaves: Sequence[Any], *, ties: bool = True) -> dict[str, Params]:
        """The parameters by layer name, from the leaves in slot order."""
        params: dict[str, Params] = {name: {} for name in self.layers}
        for slot, leaf in zip(self.slots, leaves, strict=True):
            _insert(params[slot.layer], slot.path, leaf)
        if ties:
            for (layer, path), (owner, owner_path) in self.aliases.items():
                _insert(params[layer], path, _lookup(params[owner], owner_path))
        return params

    def acc_avals(self, dtype: Any = jnp.float32) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes of the gradient accumulators: the trained buffers, in ``dtype`` or wider."""
        return tuple(
            jax.ShapeDtypeStruct(b.shape, jnp.promote_types(dtype, b.dtype)) for b in self.buffers[: self.num_trained]
        )

    def _find(self, params: Mapping[str, Params], slot: LeafSlot) -> Any:
        try:
            leaf = _lookup(params[slot.layer], slot.path)
        except (KeyError, TypeError):
            raise StageError(f"parameter {slot} is missing; have layers {', '.join(params) or 'none'}") from None
        if tuple(leaf.shape) != slot.shape:
            raise StageError(f"parameter {slot} has shape {tuple(leaf.shape)}, the stage was built for {slot.shape}")
        return leaf


def stage_params(layers: Sequence[Layer], params: Mapping[str, Params]) -> dict[str, Params]:
    """The parameters a stage of these layers holds, out of the whole model's: its layers' own leaves, and copies of leaves
    tied to layers of other stages (kept as they are where the owner is absent but the copy is there already).

    Works on arrays and on ``ShapeDtypeStruct``.

    Raises:
        StageError: a layer, or the owner of a tied leaf, is not in ``params``.
    """
    here = {layer.name for layer in layers}
    chosen: dict[str, Params] = {}
    for layer in layers:
        if layer.name not in params:
            raise StageError(f"layer {layer.name!r} has no parameters; have {', '.join(map(repr, params)) or 'none'}")
        own = _copy_dicts(params[layer.name])
        for path, (owner, owner_path) in layer.tied.items():
            if owner in here or (owner not in params and _has(own, path)):
                continue
            try:
                leaf = _lookup(params[owner], owner_path)
            except (KeyError, TypeError):
                raise StageError(
                    f"layer {layer.name!r} ties {'/'.join(path)} to {'/'.join((owner, *owner_path))}, which does not exist"
                ) from None
            _insert(own, path, leaf)
        chosen[layer.name] = own
    return chosen


def _ties(
    layers: Sequence[Layer],
) -> tuple[dict[tuple[str, Path], tuple[str, Path]], dict[tuple[str, Path], tuple[str, Path]]]:
    here = {layer.name for layer in layers}
    if len(here) != len(layers):
        raise StageError(
            f"layer names repeat: {', '.join(layer.name for layer in layers)}; names are unique in a model"
        )
    aliases: dict[tuple[str, Path], tuple[str, Path]] = {}
    shared: dict[tuple[str, Path], tuple[str, Path]] = {}
    for layer in layers:
        for path, (owner, owner_path) in layer.tied.items():
            (aliases if owner in here else shared)[(layer.name, tuple(path))] = (owner, tuple(owner_path))
    return aliases, shared


def _check_ties(
    leaves: Sequence[tuple[str, Path, Any]],
    aliases: Mapping[tuple[str, Path], tuple[str, Path]],
    shared: Mapping[tuple[str, Path], tuple[str, Path]],
) -> None:
    have = {(name, path) for name, path, _ in leaves}
    for (layer, path), (owner, owner_path) in aliases.items():
        if (owner, owner_path) not in have:
            raise StageError(
                f"layer {layer!r} ties {'/'.join(path)} to {'/'.join((owner, *owner_path))}, which does not exist or is "
                "itself tied; tie to the layer that creates the leaf"
            )
    for layer, path in shared:
        if (layer, path) not in have:
            raise StageError(
                f"tied leaf {'/'.join((layer, *path))} was not given; select parameters with stage_params()"
            )


def _leaves(name: str, params: Mapping[str, Params]) -> list[tuple[Path, Any]]:
    if name not in params:
        raise StageError(f"layer {name!r} has no parameters; have {', '.join(map(repr, params)) or 'none'}")
    found = []
    for keys, leaf in jax.tree_util.tree_flatten_with_path(params[name])[0]:
        path = tuple(getattr(k, "key", k) for k in keys)
        if not all(isinstance(k, str) for k in path) or not hasattr(leaf, "shape"):
            raise StageError(
                f"layer {name!r}: parameter {jax.tree_util.keystr(keys)} ({type(leaf).__name__}) is not an array in nested "
                "dicts with string keys"
            )
        found.append((path, leaf))
    return found


def _assign(
    leaves: Sequence[tuple[str, Path, Any]], small_bytes: int
) -> tuple[tuple[LeafSlot, ...], tuple[jax.ShapeDtypeStruct, ...], int]:
    trained = [jnp.issubdtype(leaf.dtype, jnp.inexact) for _, _, leaf in leaves]
    buffers: list[jax.ShapeDtypeStruct] = []
    slots: dict[int, LeafSlot] = {}
    num_trained = 0
    for kind in (True, False):
        packed: dict[tuple[bool, Any], list[int]] = {}
        for i, (name, path, leaf) in enumerate(leaves):
            if trained[i] != kind:
                continue
            shape, dtype = tuple(leaf.shape), np.dtype(leaf.dtype)
            if leaf.size * dtype.itemsize <= small_bytes:
                packed.setdefault((len(shape) > 1, dtype), []).append(i)
            else:
                slots[i] = LeafSlot(name, path, shape, dtype, len(buffers), None)
                buffers.append(jax.ShapeDtypeStruct(shape, dtype))
        for (_, dtype), members in packed.items():
            offset = 0
            for i in members:
                name, path, leaf = leaves[i]
                slots[i] = LeafSlot(name, path, tuple(leaf.shape), dtype, len(buffers), offset)
                offset += slots[i].size
            buffers.append(jax.ShapeDtypeStruct((offset,), dtype))
        if kind:
            num_trained = len(buffers)
    return tuple(slots[i] for i in range(len(leaves))), tuple(buffers), num_trained


def _copy_dicts(tree: Any) -> Any:
    return {k: _copy_dicts(v) for k, v in tree.items()} if isinstance(tree, Mapping) else tree


def _lookup(tree: Any, path: Path) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _has(tree: Any, path: Path) -> bool:
    for key in path:
        if not isinstance(tree, Mapping) or key not in tree:
            return False
        tree = tree[key]
    return True


def _insert(tree: Params, path: Path, leaf: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = leaf
