"""Trees of one checkpoint as named leaves, and back.

Trees are stored by key path, not by class: dictionaries, lists, tuples, named tuples (optax states) and registered
dataclasses are all flattened by ``jax.tree_util``. With ``like`` they come back with the classes of ``like``; without it
dictionaries and named tuples come back as dictionaries, and lists and tuples as lists. Empty containers inside a layer
have no leaf and come back only with ``like``.

Not stored: arrays that span several processes (each must be addressable from the process that saves), and typed PRNG
keys (store ``jax.random.key_data``).
"""

from __future__ import annotations

import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Sharding

from jaxpipe.errors import CheckpointError

PyTree: TypeAlias = Any
PathStep: TypeAlias = tuple[Literal["key", "index", "field"], str | int]
Placement: TypeAlias = jax.Device | Sharding
"""Where loaded arrays go: one device, or a sharding over several."""
LeafKey: TypeAlias = tuple[str, tuple[PathStep, ...]]
"""Layer and key path."""

_PYTHON_SCALARS: Mapping[str, Callable[[Any], bool | int | float]] = {"bool": bool, "int": int, "float": float}


@dataclass(frozen=True, slots=True)
class Leaf:
    """One stored array: ``layer`` and key path, shape, NumPy dtype name, and SHA-256 of its bytes in C order.

    ``python`` names the type of a leaf that was a Python number ("bool", "int", "float"), else it is None. ``part``: the number
    of the process that has written it, None if there was one.
    """

    layer: str
    path: tuple[PathStep, ...]
    shape: tuple[int, ...]
    dtype: str
    python: str | None = None
    sha256: str = ""
    part: int | None = None

    @property
    def key(self) -> LeafKey:
        return self.layer, self.path

    @property
    def name(self) -> str:
        """The leaf as messages print it, e.g. ``h.0/attention/kernel``."""
        return "/".join([self.layer, *(str(key) for _, key in self.path)])

    @property
    def storage_keys(self) -> tuple[str, ...]:
        """Keys in the Orbax tree; Orbax joins keys with dots, so dots and slashes inside a name are escaped."""
        pieces = (self.layer, *(str(key) for _, key in self.path))
        return tuple(urllib.parse.quote(piece, safe="").replace(".", "%2E") or "%" for piece in pieces)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A group of layers copied to host memory: ``arrays[i]`` belongs to ``leaves[i]``; ``layers`` may have none."""

    layers: tuple[str, ...]
    leaves: tuple[Leaf, ...]
    arrays: tuple[np.ndarray, ...]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    def pairs(self) -> Iterator[tuple[Leaf, np.ndarray]]:
        return zip(self.leaves, self.arrays, strict=True)


def snapshot(group: str, tree: Mapping[str, PyTree]) -> Snapshot:
    """Copy ``{layer: pytree}`` of JAX arrays, NumPy arrays and Python numbers to host memory.

    The copy is the caller's no longer: donating or changing the originals afterwards does not touch it.
    Raises CheckpointError for a leaf that can't be stored, and for two leaves with the same name.
    """
    found = [(layer, path, leaf) for layer, pytree in tree.items() for path, leaf in flatten(pytree)]
    for _, _, leaf in found:
        if isinstance(leaf, jax.Array) and leaf.is_fully_addressable:
            leaf.copy_to_host_async()
    arrays: dict[Leaf, np.ndarray] = {}
    seen: set[tuple[str, ...]] = set()
    for layer, path, value in found:
        leaf = Leaf(layer, path, (), "")
        if leaf.storage_keys in seen:
            raise CheckpointError(
                f"{group}: two leaves are called {leaf.name}; keys of one dictionary must differ as text"
            )
        seen.add(leaf.storage_keys)
        array = _to_host(value, f"{group}: {leaf.name}")
        python = type(value).__name__ if isinstance(value, bool | int | float) else None
        arrays[Leaf(layer, path, array.shape, array.dtype.name, python)] = array
    return Snapshot(tuple(tree), tuple(arrays), tuple(arrays.values()))


def flatten(pytree: PyTree) -> list[tuple[tuple[PathStep, ...], Any]]:
    """Leaves of one layer with their key paths; None and empty containers have none. Raises CheckpointError."""
    try:
        found = jax.tree_util.tree_flatten_with_path(pytree)[0]
    except ValueError as error:  # a dictionary whose keys can't be sorted
        reason = str(error).split("\n")[0]
        raise CheckpointError(f"can't store a tree: {reason}; use keys of one type in each dictionary") from error
    return [(tuple(_path_step(key) for key in path), leaf) for path, leaf in found]


def build(layers: Sequence[str], leaves: Sequence[Leaf], values: Sequence[Any]) -> dict[str, PyTree]:
    """``{layer: pytree}`` of dictionaries and lists from leaves and their values."""
    by_layer: dict[str, list[tuple[tuple[PathStep, ...], Any]]] = {layer: [] for layer in layers}
    for leaf, value in zip(leaves, values, strict=True):
        by_layer[leaf.layer].append((leaf.path, value))
    return {layer: _nest(items) for layer, items in by_layer.items()}


def targets_of(wanted: Mapping[str, PyTree]) -> dict[LeafKey, Any]:
    """The leaves of ``{layer: pytree}`` by layer and path."""
    return {(layer, path): leaf for layer, tree in wanted.items() for path, leaf in flatten(tree)}


def differences(layers: Sequence[str], leaves: Sequence[Leaf], wanted: Mapping[str, PyTree]) -> list[str]:
    """What keeps saved ``layers`` and ``leaves`` from filling ``wanted``, a line each; empty if they fit."""
    problems = [f"it has no layer {layer}" for layer in wanted if layer not in layers]
    problems += [f"it has the layer {layer}, the model does not" for layer in layers if layer not in wanted]
    saved = {leaf.key: leaf for leaf in leaves if leaf.layer in wanted}
    for (layer, path), target in targets_of(wanted).items():
        leaf = saved.pop((layer, path), None)
        dtype = np.dtype(target.dtype).name if hasattr(target, "dtype") else None
        if layer not in layers:
            continue
        if leaf is None:
            problems.append(f"it has no {Leaf(layer, path, (), '').name}")
        elif leaf.shape != np.shape(target):
            problems.append(f"{leaf.name} has shape {leaf.shape}, the model wants {np.shape(target)}")
        elif dtype not in (None, leaf.dtype) and leaf.python is None:
            problems.append(f"{leaf.name} has dtype {leaf.dtype}, the model wants {dtype}")
    return problems + [f"it has {leaf.name}, the model does not" for leaf in saved.values()]


def refill(wanted: Mapping[str, PyTree], leaves: Sequence[Leaf], values: Sequence[Any]) -> dict[str, PyTree]:
    """``{layer: pytree}`` with the classes of ``wanted``, which the leaves must fit, and the values of the leaves."""
    by_key = {leaf.key: value for leaf, value in zip(leaves, values, strict=True)}
    return {
        layer: jax.tree.unflatten(jax.tree.structure(tree), [by_key[layer, path] for path, _ in flatten(tree)])
        for layer, tree in wanted.items()
    }


def place(leaf: Leaf, array: np.ndarray, target: Any, placement: Placement | None) -> Any:
    """A loaded array as the caller wants it.

    A Python number if one was saved or ``target`` is one; else a JAX array on ``placement``, or where ``target`` is; else
    ``array``. Raises CheckpointError where JAX would round (64-bit data without ``jax_enable_x64``).
    """
    if isinstance(target, bool | int | float):
        return type(target)(array.item())
    if leaf.python is not None:
        if target is None:
            return _PYTHON_SCALARS[leaf.python](array.item())
        array = array.astype(target.dtype)
    if placement is None:
        placement = getattr(target, "sharding", None)
    if placement is None:
        return array
    if jax.dtypes.canonicalize_dtype(array.dtype) != array.dtype:
        raise CheckpointError(
            f"{leaf.name} was saved as {leaf.dtype}, which JAX would round; set JAX_ENABLE_X64=1, as when it was saved"
        )
    return jax.device_put(array, placement)


def _nest(items: Sequence[tuple[tuple[PathStep, ...], Any]]) -> PyTree:
    if len(items) == 1 and not items[0][0]:
        return items[0][1]
    children: dict[PathStep, list[tuple[tuple[PathStep, ...], Any]]] = {}
    for path, value in items:
        children.setdefault(path[0], []).append((path[1:], value))
    if children and all(kind == "index" for kind, _ in children):
        by_index = {int(index): _nest(child) for (_, index), child in children.items()}
        return [by_index.get(index) for index in range(max(by_index) + 1)]  # a gap was None or an empty container
    return {key: _nest(child) for (_, key), child in children.items()}


def _path_step(key: Any) -> PathStep:
    match key:
        case jax.tree_util.DictKey(key=name) if isinstance(name, str | int):
            return ("key", name)
        case jax.tree_util.SequenceKey(idx=index):
            return ("index", index)
        case jax.tree_util.FlattenedIndexKey(key=index):
            return ("index", index)
        case jax.tree_util.GetAttrKey(name=name):
            return ("field", name)
    raise CheckpointError(f"can't store a tree with the key {key!r}; dictionary keys must be strings or integers")


def _to_host(value: Any, where: str) -> np.ndarray:
    if isinstance(value, jax.Array):
        if jnp.issubdtype(value.dtype, jax.dtypes.extended):
            raise CheckpointError(f"{where} is a typed {value.dtype}; store jax.random.key_data(key) instead")
        if not value.is_fully_addressable:
            raise CheckpointError(f"{where} spans devices of several processes; gather it before saving")
    array = np.array(value, copy=True, order="C")
    if array.dtype.hasobject or (array.dtype.kind in "SUMmV" and not hasattr(ml_dtypes, array.dtype.name)):
        raise CheckpointError(f"{where} is a {type(value).__name__}, not an array of numbers")
    return array
