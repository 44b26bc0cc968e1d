"""Tables that map the tensors of a Hugging Face folder to parameters of jaxpipe, in both directions.

A model file brings its own by a function ``hugging_face()`` that returns a :class:`HuggingFace`. A row (:class:`Tensor`) joins
one tensor of theirs to a leaf of ours, or to a part of one, by an ``einops`` pattern; the reversed pattern exports.
Sizes of axes that a pattern joins follow from the leaf. Every element of every leaf must come from exactly one row.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxpipe.errors import ConfigError
from jaxpipe.stage.model.layer import Path
from jaxpipe.stage.model.params import by_path
from jaxpipe.stage.model.reference import resolved

Leaf = tuple[str, Path]
"""Layer and path of a parameter."""

TARGETS: Mapping[str, str] = {
    "gpt2": "models.gpt:GPT",
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "smollm3"), "models.llama:Llama"),
}
"""By ``model_type`` of config.json, the model that reads it unless another is named."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """``name`` there; ``layer`` and ``path`` of the leaf here. ``pattern``: of einops, from theirs to ours, axes of ours one by
    one: ``(h k) d -> d h k``. ``part``: axis, start and stop of the leaf that it fills; by default all. ``padded``: what it
    leaves of the leaf is rows of zeros, which are in no file."""

    name: str
    layer: str
    path: Path
    pattern: str
    part: tuple[int, int, int] | None = None
    padded: bool = False

    @classmethod
    def of_words(cls, name: str, layer: str, path: Path, words: int, rows: int) -> Tensor:
        """Return a row for each of ``words``, of a leaf that has ``rows`` of them: an embedding or a head."""
        return cls(name, layer, path, "v d -> v d", (0, 0, words) if rows > words else None, rows > words)

    @property
    def leaf(self) -> Leaf:
        return self.layer, self.path

    @property
    def sides(self) -> tuple[str, str]:
        theirs, ours = self.pattern.split("->")
        return theirs.strip(), ours.strip()

    def index(self) -> tuple[slice, ...]:
        """The index of the leaf that the tensor fills."""
        if self.part is None:
            return (slice(None),)
        axis, start, stop = self.part
        return (*[slice(None)] * axis, slice(start, stop))

    def axes(self, leaf: Sequence[int]) -> dict[str, int]:
        """Return the sizes of the pattern's axes for a leaf of this shape."""
        shape = list(leaf)
        if self.part is not None:
            axis, start, stop = self.part
            shape[axis] = stop - start
        return dict(zip(self.sides[1].split(), shape, strict=True))

    def shape(self, leaf: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the file's tensor for a leaf of this shape."""
        sizes = self.axes(leaf)
        axes = re.findall(r"\(([^)]*)\)|(\w+)", self.sides[0])
        return tuple(math.prod(sizes[name] for name in (joined or single).split()) for joined, single in axes)

    def to_ours(self, array: np.ndarray, leaf: Sequence[int]) -> np.ndarray:
        """Convert a file's tensor to the part of a leaf of this shape."""
        return _rearranged(array, self.pattern, self.axes(leaf))

    def to_theirs(self, leaf: np.ndarray) -> np.ndarray:
        theirs, ours = self.sides
        return _rearranged(leaf[self.index()], f"{ours} -> {theirs}", {})


@dataclass(frozen=True, slots=True)
class HuggingFace:
    """How a model goes to and from folders of the hub.

    ``options(config)``: the model's options out of ``config.json``, without ``seq_len``. ``tensors(options)``: the table for a
    model of these options. ``config(options)``: ``config.json`` of such a model, but for token ids and dtype. Both of the last
    get every option that was set, ``vocab_size`` and ``seq_len`` too. They raise ConfigError for what the other side does not
    have, and name the key. ``ignored``: a regular expression of names in files that are no parameters. ``prefix``: of tensors'
    names, which files may leave out. ``tied(options)``: tensors that files may hold although the model has none for them, by
    name, and the one that each must be equal to.
    """

    options: Callable[[Mapping[str, Any]], dict[str, Any]]
    tensors: Callable[[Mapping[str, Any]], Sequence[Tensor]]
    config: Callable[[Mapping[str, Any]], dict[str, Any]]
    ignored: str = r"(^|\.)rotary_emb\.inv_freq"
    prefix: str = ""
    tied: Callable[[Mapping[str, Any]], Mapping[str, str]] = lambda options: {}


def hugging_face_of(target: str) -> HuggingFace:
    """Return the hub description in the file of the model ``module:function``.

    Raises:
        ConfigError: it has no function ``hugging_face``, or that returns something else.
    """
    module = target.partition(":")[0]
    description = resolved("model", f"{module}:hugging_face", {})
    if not isinstance(description, HuggingFace):
        raise ConfigError(
            f"{module}:hugging_face returned a {type(description).__name__}; want jaxpipe.interop.table.HuggingFace"
        )
    return description


def leaf_shapes(params: Mapping[str, Any]) -> dict[Leaf, tuple[int, ...]]:
    """Return the shape of each leaf of ``params``, trees of arrays or avals by layer."""
    return {(layer, path): tuple(a.shape) for layer, tree in params.items() for path, a in by_path(tree).items()}


def rows_by_leaf(table: Sequence[Tensor], leaves: Mapping[Leaf, tuple[int, ...]]) -> dict[Leaf, list[Tensor]]:
    """Group the table's rows by leaf. ``leaves``: their shapes.

    Raises:
        ConfigError: a leaf is not filled exactly once, or there is no such leaf: the table is of another model.
    """
    leaf_rows: dict[Leaf, list[Tensor]] = {leaf: [] for leaf in leaves}
    for row in table:
        if row.leaf not in leaf_rows:
            raise ConfigError(
                f"the table of tensors has {row.name} for {_named(row.leaf)}, which is no parameter of the model"
            )
        leaf_rows[row.leaf].append(row)
    for leaf, rows in leaf_rows.items():
        if not _fill(rows, leaves[leaf]):
            raise ConfigError(f"the table of tensors does not fill {_named(leaf)} exactly once")
    return leaf_rows


def _fill(rows: Sequence[Tensor], shape: Sequence[int]) -> bool:
    """Return whether these rows fill a leaf of this shape exactly once: it is one of them, or their parts follow each other."""
    parts = sorted(row.part for row in rows if row.part is not None)
    if len(parts) < len(rows) or not parts:
        return len(rows) == 1
    axis, _, end = parts[-1]
    follow = [start for _, start, _ in parts] == [0, *(stop for _, _, stop in parts[:-1])]
    return follow and {a for a, _, _ in parts} == {axis} and (end == shape[axis] or any(row.padded for row in rows))


def _named(leaf: Leaf) -> str:
    return "/".join([leaf[0], *leaf[1]])


def _rearranged(array: np.ndarray, pattern: str, sizes: Mapping[str, int]) -> np.ndarray:
    from einops import rearrange

    rearranged_array: np.ndarray = rearrange(array, pattern, **sizes)
    return rearranged_array
