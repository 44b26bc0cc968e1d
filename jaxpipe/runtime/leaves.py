"""Leaves of nested dicts of parameters, by path."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpipe.stage.model.layer import Path


def without_leaves(tree: Any, prefix: Path, drop: set[Path]) -> Any:
    """A nested dict, itself at ``prefix``, without the leaves at the paths ``drop``, nor the dicts that this leaves empty."""
    if not isinstance(tree, Mapping):
        return tree
    kept = {k: without_leaves(v, (*prefix, k), drop) for k, v in tree.items() if (*prefix, k) not in drop}
    return {k: v for k, v in kept.items() if not (isinstance(v, Mapping) and not v and tree[k])}


def merged(tree: Any, more: Any) -> Any:
    """Two nested dicts as one; where both have a leaf, that of ``more``."""
    if not (isinstance(tree, Mapping) and isinstance(more, Mapping)):
        return more
    return {**tree, **{k: merged(tree[k], v) if k in tree else v for k, v in more.items()}}
