"""Vocabulary parallelism: a model whose embedding and head are divided by words over the ranks of a pipeline.

Part r of a layer is a layer of its own, ``embed@0``, ``embed@1``, …, with the rows of R words: a stage that any schedule can
place (``with_vocabulary`` of the schedules puts part r on rank r). What is left of the embedding puts the parts' look-ups
together, each word's from the part that has it, so to the bit what one table gives; what is left of the head makes what all
parts take; the loss merges the parts. Rows are made a multiple of ranks × ``tp``; those past the vocabulary never learn.

Gradients are those of :mod:`~jaxpipe.stage.split`, for the parts as for any layer. With two *barriers* (Yeung et al. 2024,
arXiv 2411.05288, algorithm 1) a part hands back its share of the gradient of what it takes, once it has that of what it
returned. With one (algorithm 2) it computes its share ahead, as if its words were all, and sends it on; the loss rescales the
shares and adds them up in the order of the ranks, and the parts, detached, have only their rows' gradient left to make. All of
it are messages from rank to rank: a star around the last one, where a chain would wait for its turn on each rank.

A checkpoint knows nothing of this: :meth:`VocabParallelModel.divided` and :meth:`VocabParallelModel.joined` go between it and
the parts.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe.errors import ConfigError
from jaxpipe.stage.identity import function_key
from jaxpipe.stage.model.layer import JoinRows, Layer, Model, Params, Path, VocabSplit, init_avals
from jaxpipe.stage.model.params import by_path, find_leaf, key_name, named_leaves, nested


@dataclass(frozen=True, slots=True)
class VocabTable:
    """The rows of ``layer``, at ``path`` in its parameters: ``words`` of them, ``each`` in a part."""

    layer: str
    path: Path
    words: int
    each: int


@dataclass(frozen=True, slots=True, repr=False)
class VocabParallelModel(Model):
    """A model in vocabulary-parallel form; make it with :func:`spread`. ``source``: :attr:`stored`. ``parts``: how many each of
    ``tables`` has. Layers, in order: the parts of the embedding; all others, with what is left of embedding and head; the parts
    of the head; the loss."""

    source: Model
    parts: int
    tables: tuple[VocabTable, ...]

    @property
    def stored(self) -> Model:
        return self.source

    @property
    def first(self) -> int:
        """Return a number so that the layers behind the parts keep theirs, and draw what they drew."""
        return -self.parts

    @property
    def trunk(self) -> range:
        """Return the positions of the transformer's stages: layers that are no parts, without the loss."""
        return range(self.parts, len(self.layers) - self.parts - 1)

    def divided(self, params: Mapping[str, Params]) -> Mapping[str, Params]:
        """Divide parameters of :attr:`stored` by layer into those of this model's layers."""
        layers = {**{name: {} for name in self._parts_of_all()}, **params}
        for table in self.tables:
            rows = find_leaf(params, (table.layer, *table.path))
            # Divided already; or missing, and whoever takes the parts says so.
            if rows is None:
                continue
            leaves = by_path(params[table.layer])
            layers[table.layer] = nested({path: leaf for path, leaf in leaves.items() if path != table.path})
            for name, part in zip(_parts(table.layer, self.parts), self._divided(table, rows), strict=True):
                layers[name] = nested({table.path: part})
        return layers

    def divided_state(self, states: Mapping[str, Any]) -> Mapping[str, Any]:
        """Divide optimizer states of :attr:`stored` by layer, as a checkpoint has them, into those of this model's layers, as
        nested dicts."""
        by_layer = dict(states)
        for layer in filter(states.__contains__, self._divided_layers()):
            table = next((t for t in self.tables if t.layer == layer), None)
            leaves = dict(named_leaves(states[layer]))
            # Moments lie under their parameter's path; all else, such as counts, is the same for every part.
            rows = {path for path in leaves if table is not None and path[-len(table.path) :] == table.path}
            by_layer[layer] = nested({path: leaf for path, leaf in leaves.items() if path not in rows})
            divided = {path: self._divided(table, leaves[path]) for path in rows if table is not None}
            common = {path: leaf for path, leaf in leaves.items() if layer not in path}
            for k, name in enumerate(_parts(layer, self.parts)):
                part_leaves = {
                    tuple(name if key == layer else key for key in path): x[k] for path, x in divided.items()
                }
                by_layer[name] = nested(common | part_leaves)
        return by_layer

    def joined(self, trees: Mapping[str, Any], join_rows: JoinRows | None = None) -> dict[str, Any]:
        """Join parameters or optimizer states of this model's layers into those of :attr:`stored`, rows on the host. Where what
        is left of a layer is elsewhere, the rows of its parts alone."""
        join_rows = _join_all if join_rows is None else join_rows
        part_names = set(self._parts_of_all())
        stored = {name: tree for name, tree in trees.items() if name not in part_names}
        for table in self.tables:
            numbers = [k for k, name in enumerate(_parts(table.layer, self.parts)) if name in trees]
            parts = [_renamed(trees[f"{table.layer}@{k}"], f"{table.layer}@{k}", table.layer) for k in numbers]

            def rows_of(*leaves: Any, numbers: Sequence[int] = numbers, table: VocabTable = table) -> Any:
                return join_rows(dict(zip(numbers, leaves, strict=True)), table.each, table.words, self.parts)

            if table.layer in stored:
                stored[table.layer] = _merged(stored[table.layer], parts, rows_of)
            elif parts:
                stored[table.layer] = _only_rows(parts, table.path, rows_of)
        return stored

    def stored_layer(self, name: str) -> str:
        return next((layer for layer in self._divided_layers() if name in _parts(layer, self.parts)), name)

    def _divided(self, table: VocabTable, rows: Any) -> list[Any]:
        """Divide rows among the parts, those past the vocabulary zero."""
        rows = np.asarray(rows)
        padding_rows = self.parts * table.each - rows.shape[0]
        filled = np.concatenate([rows, np.zeros((padding_rows, *rows.shape[1:]), rows.dtype)]) if padding_rows else rows
        return [filled[k * table.each : (k + 1) * table.each] for k in range(self.parts)]

    def _divided_layers(self) -> list[str]:
        return [self.source.layers[0].name, self.source.layers[-2].name]

    def _parts_of_all(self) -> list[str]:
        return [name for layer in self._divided_layers() for name in _parts(layer, self.parts)]


def spread(model: Model, parts: int, *, tp: int = 1, barriers: int = 1) -> VocabParallelModel:
    """Divide embedding and head of ``model`` into ``parts``, their rows padded to a multiple of ``parts`` × ``tp``.

    Raises:
        ConfigError: its first layer, the last but one or the loss does not say how it is divided by words; or layers form no
            chain.
    """
    embed, *inner, head, loss = model.layers
    of_embed, of_head, of_loss = (_words_of(model, layer) for layer in (embed, head, loss))
    if any(layer.takes is not None for layer in model.layers):
        raise ConfigError(f"model {model.name}: only vocabulary layers at the ends of a chain of layers are spread")
    # A head tied to the embedding is divided as it is: part r of both lies on rank r, and the tie holds part by part.
    tied = head.tied.get(of_head.path)
    if tied not in (None, (embed.name, of_embed.path)):
        raise ConfigError(f"model {model.name}: layer {head.name} is tied to other leaves than the embedding's rows")
    tables = tuple(
        _rows(layer, words.path, parts * tp, tp)
        for layer, words in ((embed, of_embed), (head, of_head))
        if words.path not in layer.tied
    )
    looking_up = [_part(embed, of_embed, tables[0], k, barriers) for k in range(parts)]
    predicting = [_part(head, of_head, tables[-1], k, barriers) for k in range(parts)]
    left = replace(_rest(embed, of_embed, barriers), takes=tuple(layer.name for layer in looking_up))
    hidden = replace(_rest(head, of_head, barriers), takes=None)
    predicting = [replace(layer, takes=(head.name,), detached=barriers == 1) for layer in predicting]
    predicting_names = tuple(layer.name for layer in predicting)
    merged = replace(
        _rest(loss, of_loss, barriers), takes=(head.name, *predicting_names) if barriers == 1 else predicting_names
    )
    field_values = {field.name: getattr(model, field.name) for field in fields(Model)}
    layers = (*looking_up, left, *inner, hidden, *predicting, merged)
    return VocabParallelModel(**{**field_values, "layers": layers}, source=model, parts=parts, tables=tables)


def _words_of(model: Model, layer: Layer) -> VocabSplit:
    if layer.words is None:
        raise ConfigError(
            f"model {model.name}: layer {layer.name} does not say how it is divided by words (Layer.words)"
        )
    return layer.words


def _parts(layer: str, count: int) -> list[str]:
    return [f"{layer}@{k}" for k in range(count)]


def _rows(layer: Layer, path: Path, multiple: int, tp: int) -> VocabTable:
    words = find_leaf(init_avals(layer), path).shape[0]
    return VocabTable(layer.name, path, words, tp * -(-words // multiple))


def _rest(layer: Layer, words: VocabSplit, barriers: int) -> Layer:
    """Return what is left of a layer, with its rules."""
    rules = {name: getattr(layer, name) for name in ("name", "trainable", "float32", "frozen", "matrices")}
    return replace(words.rest(barriers), **rules)


def _part(layer: Layer, words: VocabSplit, table: VocabTable, number: int, barriers: int) -> Layer:
    """Make part ``number`` of a layer."""

    # All rows are drawn and one part kept: the rows are then those of the undivided model, to the bit.
    def init(key: jax.Array) -> Params:
        if words.path in layer.tied:
            return {}
        rows = find_leaf(layer.init(key), words.path)
        filled = jnp.pad(rows, ((0, (number + 1) * table.each), (0, 0)))
        return nested({words.path: filled[number * table.each : (number + 1) * table.each]})

    return Layer(
        f"{layer.name}@{number}",
        init,
        words.part(number * table.each, barriers),
        words.reads,
        tied={path: (f"{owner}@{number}", at) for path, (owner, at) in layer.tied.items() if path == words.path},
        kind=layer.kind,
        shards=None if layer.shards is None else lambda tp: {words.path: 0},
        trainable=layer.trainable,
        float32=layer.float32,
        takes=(),
        frozen=layer.frozen,
        alike=(function_key(layer.apply), table.each, barriers),
    )


_ABSENT: Any = object()


def _join_all(parts: Mapping[int, Any], each: int, words: int, count: int) -> np.ndarray:
    return np.concatenate([np.asarray(parts[k]) for k in range(count)])[:words]


def _children(node: Any) -> tuple[list[Any], Any]:
    """Return what is right below a node of a tree, and how to put it together; of a leaf, nothing."""
    children, structure = jax.tree.flatten(node, is_leaf=partial(operator.is_not, node))
    return ([], structure) if children and children[0] is node else (children, structure)


def _renamed(node: Any, name: str, layer: str) -> Any:
    """Return a tree of the part ``name`` with ``layer`` for this key."""
    if isinstance(node, Mapping):
        return {layer if key == name else key: _renamed(child, name, layer) for key, child in node.items()}
    children, structure = _children(node)
    if not children:
        return node
    return jax.tree.unflatten(structure, [_renamed(child, name, layer) for child in children])


def _merged(node: Any, parts: Sequence[Any], rows_of: Callable[..., Any]) -> Any:
    """Merge into a node of a layer's tree those of its parts: what is in the parts alone are rows."""
    if all(part is _ABSENT for part in parts):
        return node
    if isinstance(parts[0], Mapping):
        subtree = {} if node is _ABSENT else node
        return {
            k: _merged(subtree.get(k, _ABSENT), [x.get(k, _ABSENT) for x in parts], rows_of)
            for k in {**subtree, **parts[0]}
        }
    if node is _ABSENT:
        # An optimizer may keep nothing of them: a node without leaves.
        return rows_of(*parts) if jax.tree.leaves(parts[0]) else parts[0]
    children, structure = _children(node)
    inside = [_children(part)[0] for part in parts]
    if not children:
        return node
    return jax.tree.unflatten(
        structure, [_merged(child, x, rows_of) for child, *x in zip(children, *inside, strict=True)]
    )


def _only_rows(parts: Sequence[Any], path: Path, rows_of: Callable[..., Any]) -> Any:
    """Return the tree of a layer's parts with their rows alone: all else is also in what is left of the layer."""

    def rows_at(keys: Any, *leaves: Any) -> Any:
        is_table = tuple(key_name(key) for key in keys)[-len(path) :] == path
        return rows_of(*leaves) if is_table else None

    return jax.tree_util.tree_map_with_path(rows_at, *parts)
