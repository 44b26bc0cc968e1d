"""The leaves of what crosses a boundary: arrays, which have ports, and static values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp


def is_array(leaf: Any) -> bool:
    """Whether a boundary leaf is an array (or the type of one) rather than a static value."""
    return isinstance(leaf, jax.ShapeDtypeStruct | jax.Array) or (hasattr(leaf, "shape") and hasattr(leaf, "dtype"))


def is_inexact(leaf: Any) -> bool:
    """Whether a leaf carries a gradient."""
    return is_array(leaf) and bool(jnp.issubdtype(leaf.dtype, jnp.inexact))


def array_leaves(tree: Any) -> list[Any]:
    """The array leaves of a boundary pytree, in port order."""
    return [leaf for leaf in jax.tree.leaves(tree) if is_array(leaf)]


def fill(tree: Any, arrays: Sequence[Any]) -> Any:
    """``tree`` with its array leaves replaced, in port order; static leaves stay."""
    leaves, treedef = jax.tree.flatten(tree)
    rest = iter(arrays)
    return jax.tree.unflatten(treedef, [next(rest) if is_array(leaf) else leaf for leaf in leaves])
