"""The arrays of a checkpoint as leaves with names: trees taken apart to be saved and put together when loaded, and the pieces
of a leaf that several processes write.

Trees are stored by key path, not by class: dictionaries, lists, tuples, named tuples (optax states) and registered
dataclasses are all flattened by ``jax.tree_util``. With ``like`` they come back with the classes of ``like``; without it
dictionaries and named tuples come back as dictionaries, and lists and tuples as lists. Empty containers inside a layer
have no leaf and come back only with ``like``. Typed PRNG keys are not stored (store ``jax.random.key_data``).

The processes of a row hold the same layers, and each of its columns writes one share of them. Elements of a leaf are counted as
they lie in memory, in C order; those of a leaf that is *split* (over tp, into equal shards along an axis) shard by shard. A
:class:`Piece` is what one part of a checkpoint has of a leaf: some ranges of elements, stored as an array ``[n]``, or all of
it, stored in its shape.

Leaves that every column holds are laid end to end, in the order of the tree, and cut into as many equal lengths of bytes as
there are columns: most leaves are then whole in one part, and the shares are equal however large a leaf is (an embedding may be
half of a row). Of leaves that are divided over the columns (ZeRO-1) each column writes the elements that it has, a
:class:`Fragment`, and nothing is gathered.
"""

from __future__ import annotations

import math
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
"""A place for loaded arrays: one device, or a sharding over several."""
LeafKey: TypeAlias = tuple[str, tuple[PathStep, ...]]
"""Layer and key path."""
Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""Elements of a leaf: the first of each range, and the one behind its last."""
Share: TypeAlias = tuple[int, int]
"""``(k, n)``: the k-th of n shares."""

_PYTHON_SCALARS: Mapping[str, Callable[[Any], bool | int | float]] = {"bool": bool, "int": int, "float": float}


def dtype_of(name: str) -> np.dtype[Any]:
    """Return the NumPy dtype of this name, ``bfloat16`` and its like included."""
    return np.dtype(getattr(ml_dtypes, name, name))


@dataclass(frozen=True, slots=True)
class Piece:
    """The share of a leaf in one part of a checkpoint: the elements in ``ranges``, one after another; all if there are none.

    ``part``: the number of the process that has written it, None if there was one. ``sha256``: of its bytes, as stored.
    """

    part: int | None = None
    ranges: Ranges = ()
    sha256: str = ""


@dataclass(frozen=True, slots=True)
class Leaf:
    """One stored array: ``layer`` and key path, shape, NumPy dtype name, and where its elements are.

    ``python`` names the type of a leaf that was a Python number ("bool", "int", "float"), else it is None. ``split``: the axis
    along which it is split and into how many shards, where that decides the order of its elements.
    """

    layer: str
    path: tuple[PathStep, ...]
    shape: tuple[int, ...]
    dtype: str
    python: str | None = None
    split: tuple[int, int] | None = None
    pieces: tuple[Piece, ...] = (Piece(),)

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
        keys = (self.layer, *(str(key) for _, key in self.path))
        return tuple(urllib.parse.quote(key, safe="").replace(".", "%2E") or "%" for key in keys)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        return dtype_of(self.dtype)

    def stored_shape(self, piece: Piece) -> tuple[int, ...]:
        """Return the shape of a piece's array."""
        return (sum(stop - start for start, stop in piece.ranges),) if piece.ranges else self.shape

    @property
    def problem(self) -> str:
        """A line about the pieces that do not fit together; empty if each element is in one of them and in no other."""
        ranges = [span for piece in self.pieces for span in piece.ranges or ((0, self.size),)]
        end = 0
        for start, stop in (*sorted(ranges), (self.size, self.size)):
            if start != end:
                how = "missing" if start > end else "in several pieces"
                return f"{self.name}: elements {min(start, end)} to {max(start, end) - 1} of {self.size} are {how}"
            end = stop
        return ""

    def assembled(self, arrays: Sequence[np.ndarray | None]) -> np.ndarray:
        """Return the leaf, from the arrays of its pieces, all of which must be there."""
        piece_arrays = [array for array in arrays if array is not None]
        if not self.pieces[0].ranges:
            return piece_arrays[0]
        elements = np.empty(self.size, self.numpy_dtype)
        for piece, array in zip(self.pieces, piece_arrays, strict=True):
            begin = 0
            for start, stop in piece.ranges:
                elements[start:stop] = array[begin : begin + stop - start]
                begin += stop - start
        if self.split is None:
            return elements.reshape(self.shape)
        axis, shards = self.split
        shape = (*self.shape[:axis], self.shape[axis] // shards, *self.shape[axis + 1 :])
        return np.concatenate(elements.reshape(shards, *shape), axis)


@dataclass(frozen=True, slots=True, eq=False)
class Fragment:
    """A leaf of a tree to be saved, of which this process has only the elements in ``ranges``: ``values`` ``[n]``, range after
    range. ``shape``, ``split``: of the leaf (:class:`Leaf`)."""

    values: np.ndarray
    ranges: Ranges
    shape: tuple[int, ...]
    split: tuple[int, int] | None = None

    def part(self, k: int, n: int) -> Fragment:
        """Return the k-th of ``n`` parts, as equal as can be."""
        first, stop = (self.values.size * edge // n for edge in (k, k + 1))
        ranges: list[tuple[int, int]] = []
        begin = 0  # where a range's values begin
        for start, end in self.ranges:
            low, high = (start + min(max(edge - begin, 0), end - start) for edge in (first, stop))
            ranges += [(low, high)] if low < high else []
            begin += end - start
        return replace(self, values=self.values[first:stop], ranges=tuple(ranges))


def joined_rows(parts: Mapping[int, Any], each: int, rows: int, count: int) -> np.ndarray | Fragment:
    """Return a leaf of ``rows`` rows that is divided into ``count`` parts of ``each`` (the last may have more than there are),
    of which ``parts`` are here, by number: whole, or a fragment."""
    if len(parts) == count and not any(isinstance(part, Fragment) for part in parts.values()):
        return np.concatenate([np.asarray(parts[k]) for k in range(count)])[:rows]
    values, ranges = [], []
    for k, part in sorted(parts.items()):
        whole = None if isinstance(part, Fragment) else np.asarray(part)
        elements, spans = (part.values, part.ranges) if whole is None else (whole.reshape(-1), ((0, whole.size),))
        width, begin = math.prod(part.shape[1:]), 0
        for start, stop in spans:
            first, last = (min(end + k * each * width, rows * width) for end in (start, stop))
            values.append(elements[begin : begin + last - first])
            ranges += [(first, last)] if first < last else []
            begin += stop - start
    return Fragment(np.concatenate(values), tuple(ranges), (rows, *part.shape[1:]))


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A group of layers copied to host memory: ``arrays[i]`` is the one piece of ``leaves[i]``; ``layers`` may have none."""

    layers: tuple[str, ...]
    leaves: tuple[Leaf, ...]
    arrays: tuple[np.ndarray, ...]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    def pairs(self) -> Iterator[tuple[Leaf, np.ndarray]]:
        return zip(self.leaves, self.arrays, strict=True)


def take_snapshot(group: str, tree: Mapping[str, PyTree], share: Share = (0, 1)) -> Snapshot:
    """Copy ``{layer: pytree}`` of JAX arrays, NumPy arrays and Python numbers to host memory; of those that all columns have
    only this ``share`` (column, columns).

    The copy is the caller's no longer: donating or changing the originals afterwards does not touch it.
    Raises CheckpointError for a leaf that can't be stored, and for two leaves with the same name.
    """
    leaves = [
        (Leaf(layer, path, (), ""), value) for layer, pytree in tree.items() for path, value in flatten_layer(pytree)
    ]
    stored_names: set[tuple[str, ...]] = set()
    for leaf, _ in leaves:
        if leaf.storage_keys in stored_names:
            raise CheckpointError(
                f"{group}: two leaves are called {leaf.name}; keys of one dictionary must differ as text"
            )
        stored_names.add(leaf.storage_keys)
    shared = [(leaf, value) for leaf, value in leaves if not isinstance(value, Fragment)]
    chosen = {
        leaf.key: span
        for (leaf, _), span in zip(shared, _elements_of_share([value for _, value in shared], share), strict=True)
        if span is not None
    }
    # All copies are started before the first is waited for: transfers from several devices overlap.
    for leaf, value in shared:
        if leaf.key in chosen and isinstance(value, jax.Array) and value.is_fully_addressable:
            value.copy_to_host_async()
    arrays: dict[Leaf, np.ndarray] = {}
    for leaf, value in leaves:
        if isinstance(value, Fragment):
            if value.values.size:
                dtype, piece = value.values.dtype.name, Piece(ranges=value.ranges)
                stored = Leaf(leaf.layer, leaf.path, value.shape, dtype, None, value.split, (piece,))
                arrays[stored] = np.array(value.values, copy=True)
        elif leaf.key in chosen:
            array, span = _to_host(value, f"{group}: {leaf.name}"), chosen[leaf.key]
            python = type(value).__name__ if isinstance(value, bool | int | float) else None
            piece = Piece() if span == (0, array.size) else Piece(ranges=(span,))
            stored = Leaf(leaf.layer, leaf.path, array.shape, array.dtype.name, python, None, (piece,))
            arrays[stored] = array.reshape(-1)[slice(*span)].copy() if piece.ranges else array
    return Snapshot(tuple(tree), tuple(arrays), tuple(arrays.values()))


def readers_of_parts(leaves: Sequence[Leaf], columns: int) -> dict[int | None, int]:
    """Return which of the columns that read leaves together reads each part that has some of them: about as many bytes each."""
    sizes: dict[int | None, int] = {}
    for leaf in leaves:
        for piece in leaf.pieces:
            nbytes = int(np.prod(leaf.stored_shape(piece), dtype=np.int64)) * leaf.numpy_dtype.itemsize
            sizes[piece.part] = sizes.get(piece.part, 0) + nbytes
    loads, readers = [0] * columns, dict[int | None, int]()
    for part in sorted(sizes, key=lambda part: -sizes[part]):
        readers[part] = loads.index(min(loads))
        loads[readers[part]] += sizes[part]
    return readers


def _elements_of_share(values: Sequence[Any], share: Share) -> list[tuple[int, int] | None]:
    """Return which elements of each value a share has: all values are laid end to end, and cut into equal lengths of bytes. A
    value without elements is in the first share."""
    sizes = [int(getattr(value, "nbytes", 8)) for value in values]
    cuts = [sum(sizes) * k // share[1] for k in (share[0], share[0] + 1)]
    spans: list[tuple[int, int] | None] = []
    begin = 0
    for value, nbytes in zip(values, sizes, strict=True):
        count = int(np.size(value))
        width = max(nbytes // max(count, 1), 1)
        start, stop = (min(max(-(-(cut - begin) // width), 0), count) for cut in cuts)
        spans.append((start, stop) if start < stop or (count == 0 and share[0] == 0) else None)
        begin += nbytes
    return spans


def flatten_layer(pytree: PyTree) -> list[tuple[tuple[PathStep, ...], Any]]:
    """Return leaves of one layer with their key paths; None and empty containers have none. Raises CheckpointError."""
    try:
        leaves = jax.tree_util.tree_flatten_with_path(pytree)[0]
    except ValueError as error:  # a dictionary whose keys can't be sorted
        reason = str(error).split("\n")[0]
        raise CheckpointError(f"can't store a tree: {reason}; use keys of one type in each dictionary") from error
    return [(tuple(_path_step(key) for key in path), leaf) for path, leaf in leaves]


def build_trees(layers: Sequence[str], leaves: Sequence[Leaf], values: Sequence[Any]) -> dict[str, PyTree]:
    """``{layer: pytree}`` of dictionaries and lists from leaves and their values."""
    by_layer: dict[str, list[tuple[tuple[PathStep, ...], Any]]] = {layer: [] for layer in layers}
    for leaf, value in zip(leaves, values, strict=True):
        by_layer[leaf.layer].append((leaf.path, value))
    return {layer: _nest(items) for layer, items in by_layer.items()}


def leaves_by_key(targets: Mapping[str, PyTree]) -> dict[LeafKey, Any]:
    """Return the leaves of ``{layer: pytree}`` by layer and path."""
    return {(layer, path): leaf for layer, tree in targets.items() for path, leaf in flatten_layer(tree)}


def list_differences(layers: Sequence[str], leaves: Sequence[Leaf], targets: Mapping[str, PyTree]) -> list[str]:
    """Return what keeps saved ``layers`` and ``leaves`` from filling ``targets``, a line each; empty if they fit."""
    problems = [f"it has no layer {layer}" for layer in targets if layer not in layers]
    problems += [f"it has the layer {layer}, the model does not" for layer in layers if layer not in targets]
    saved = {leaf.key: leaf for leaf in leaves if leaf.layer in targets}
    for (layer, path), target in leaves_by_key(targets).items():
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


def fill_trees(targets: Mapping[str, PyTree], leaves: Sequence[Leaf], values: Sequence[Any]) -> dict[str, PyTree]:
    """``{layer: pytree}`` with the classes of ``targets``, which the leaves must fit, and the values of the leaves."""
    by_key = {leaf.key: value for leaf, value in zip(leaves, values, strict=True)}
    return {
        layer: jax.tree.unflatten(jax.tree.structure(tree), [by_key[layer, path] for path, _ in flatten_layer(tree)])
        for layer, tree in targets.items()
    }


def place_array(leaf: Leaf, array: np.ndarray, target: Any, placement: Placement | None) -> Any:
    """Return a loaded array as the caller wants it.

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
