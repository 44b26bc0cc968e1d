"""Optimizer state by layer: which leaf belongs to which layer, the state of some layers alone, and stored states fitted to it.

A node of the state is *like the parameters* if it is a dict with a key for each layer: what is under a layer's key belongs to
that layer. The state of some layers has those keys only, as if the transformation had been given these layers and no others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxpipe.errors import CheckpointError
from jaxpipe.stage.model.layer import Path
from jaxpipe.stage.model.params import key_name, named_leaves

Tree = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class StateLeaf:
    """An array of the state. ``names``: its path. ``layer``: the one that it belongs to; None: each layer has it. ``param``: in
    the layer, the path of the parameter in whose place it stands, if it does."""

    names: Path
    layer: str | None
    param: Path | None
    aval: jax.ShapeDtypeStruct

    def __str__(self) -> str:
        return "/".join(self.names)


def state_leaves(state: Any, params: Tree) -> list[StateLeaf]:
    """The leaves of a state (shapes), in order. ``params``: what it is the state of."""
    paths = {name: {names for names, _ in named_leaves(tree)} for name, tree in params.items()}

    def walk(node: Any, names: Path, layer: str | None, inside: Path) -> Iterator[StateLeaf]:
        if isinstance(node, jax.ShapeDtypeStruct):
            starts = (inside[:n] for n in range(len(inside), -1, -1))
            param = next((p for p in starts if p in paths[layer]), None) if layer is not None else None
            yield StateLeaf(names, layer, param, node)
            return
        by_layer = layer is None and _is_like(node, params)
        children = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)[0]
        for name, child in ((key_name(keys[0]), child) for keys, child in children):
            within = inside if layer is None else (*inside, name)
            yield from walk(child, (*names, name), name if by_layer else layer, () if by_layer else within)

    return list(walk(state, (), None, ()))


def of_layers(state: Any, layers: Collection[str], all_layers: Collection[str], owners: Sequence[str | None]) -> Any:
    """Return the part of a state, whose leaves are numbers, that belongs to ``layers``. ``all_layers``: of the model;
    ``owners``: by number, the layer that the leaf belongs to."""

    def stays(number: int) -> bool:
        return owners[number] is None or owners[number] in layers

    def walk(node: Any) -> Any:
        if isinstance(node, int):
            return node if stays(node) else None
        if _is_like(node, all_layers):
            return {
                k: walk(child) for k, child in node.items() if k in layers or any(map(stays, jax.tree.leaves(child)))
            }
        children, structure = jax.tree.flatten(node, is_leaf=lambda x: x is not node)
        return jax.tree.unflatten(structure, map(walk, children))

    return walk(state)


def fitted(leaves: Sequence[StateLeaf], layers: Sequence[str], states: Tree) -> list[Any]:
    """Return the values of the state's leaves of ``layers``, out of ``states`` by layer (also plain dicts and lists).

    States that jaxpipe 0.1.0 stored had no layer's name in their paths; they fit as well.

    Raises:
        CheckpointError: they are of another optimizer or model.
    """
    if missing := [layer for layer in layers if layer not in states]:
        raise CheckpointError(f"no optimizer state for layer {min(missing)}; there is one for {', '.join(states)}")
    leaves_by_layer = {layer: dict(named_leaves(states[layer])) for layer in layers}
    values = []
    for leaf in leaves:
        candidates = [
            _value_of(layer, leaves_by_layer[layer], leaf)
            for layer in ([leaf.layer] if leaf.layer is not None else layers)
        ]
        if not all(
            np.allclose(np.asarray(candidates[0]), np.asarray(a), rtol=1e-5, equal_nan=True) for a in candidates[1:]
        ):
            raise _misfit(layers[0], f"has another {leaf} than other layers")
        values.append(candidates[0])
    for layer, rest in leaves_by_layer.items():
        if rest:
            raise _misfit(layer, f"has {'/'.join(min(rest))}, which the optimizer does not")
    return values


def _value_of(layer: str, leaves: dict[Path, Any], leaf: StateLeaf) -> Any:
    """The value of a leaf, taken out of what a layer has."""
    names, aval = leaf.names, leaf.aval
    unnamed = (names[:k] + names[k + 1 :] for k, name in enumerate(names) if name == layer)
    matching_path = next((path for path in (names, *unnamed) if path in leaves), None)
    if matching_path is None:
        raise _misfit(layer, f"has no {leaf}")
    value = leaves.pop(matching_path)
    value = value if hasattr(value, "dtype") else np.asarray(value, aval.dtype)
    if tuple(value.shape) != tuple(aval.shape) or value.dtype != aval.dtype:
        wants = f"{value.dtype}{list(value.shape)}, the optimizer wants {aval.dtype}{list(aval.shape)}"
        raise _misfit(layer, f"has {leaf} as {wants}")
    return value


def _misfit(layer: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"the optimizer state of layer {layer} {what}; go on with the optimizer that it was made by, or start with a fresh one"
    )


def _is_like(node: Any, layers: Collection[str]) -> bool:
    return isinstance(node, dict) and len(node) == len(layers) and all(name in node for name in layers)
