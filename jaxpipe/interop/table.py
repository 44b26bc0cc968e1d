"""Map the tensors of a Hugging Face folder to parameters of jaxpipe by tables, both ways, and read its ``config.json``.

A model file brings its own by a function ``hugging_face()`` that returns a :class:`HuggingFace`. A row (:class:`Tensor`) joins
one tensor of theirs to a leaf of ours, or to a part of one, by an ``einops`` pattern; the reversed pattern exports.
Sizes of axes that a pattern joins follow from the leaf. Every element of every leaf must come from exactly one row.

``config.json`` is read key by key (:class:`Keys`); a value of another type is refused in a line that names the key.
Rotary positions have two forms: ``rope_theta`` and ``rope_scaling`` (transformers 4), and both in ``rope_parameters``
(transformers 5). Both are read, and where a file has both they must agree. The first is what is to be written: transformers 4
takes the second for none at all, without a word, and version 5 reads both.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from jaxpipe.errors import ConfigError
from jaxpipe.stage.model.layer import Path
from jaxpipe.stage.model.params import by_path
from jaxpipe.stage.model.reference import resolved
from jaxpipe.text import truncate

Leaf = tuple[str, Path]
"""The address of a parameter: its layer, and its path in that layer's tree."""
Part = tuple[int, int, int]
"""A part of a leaf: its axis, start and stop."""

TARGETS: Mapping[str, str] = {
    "gpt2": "models.gpt:GPT",
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "smollm3"), "models.llama:Llama"),
    **dict.fromkeys(("mixtral", "olmoe", "qwen2_moe", "qwen3_moe"), "models.moe:MoE"),
}
"""The model that reads a folder by default, by ``model_type`` of its config.json."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A row of the table: the tensor ``name`` of the folder, and ``layer`` and ``path`` of our leaf. ``pattern``: einops' from
    theirs to ours, with our axes one by one: ``(h k) d -> d h k``. ``parts``: along which axes the tensor fills how much of the
    leaf; by default all. ``padded``: the rest of the leaf is rows of zeros, which are in no file."""

    name: str
    layer: str
    path: Path
    pattern: str
    parts: tuple[Part, ...] = ()
    padded: bool = False

    @classmethod
    def of_words(cls, name: str, layer: str, path: Path, words: int, rows: int) -> Tensor:
        """Return a row for each of ``words``, of a leaf that has ``rows`` of them: an embedding or a head."""
        return cls(name, layer, path, "v d -> v d", ((0, 0, words),) if rows > words else (), rows > words)

    @property
    def leaf(self) -> Leaf:
        return self.layer, self.path

    @property
    def sides(self) -> tuple[str, str]:
        theirs, ours = self.pattern.split("->")
        return theirs.strip(), ours.strip()

    def index(self) -> tuple[slice, ...]:
        """The index of the leaf that the tensor fills."""
        slices = {axis: slice(start, stop) for axis, start, stop in self.parts}
        return tuple(slices.get(axis, slice(None)) for axis in range(max(slices, default=0) + 1))

    def axes(self, leaf: Sequence[int]) -> dict[str, int]:
        """Return the sizes of the pattern's axes for a leaf of this shape."""
        shape = list(leaf)
        for axis, start, stop in self.parts:
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
    """Return whether these rows fill each element of a leaf of this shape exactly once, or of a padded one at most once."""
    parts = [{axis: part for axis, *part in row.parts} for row in rows]
    edges = [sorted({0, size, *(edge for p in parts for edge in p.get(axis, ()))}) for axis, size in enumerate(shape)]
    if any((ends[0], ends[-1]) != (0, size) for ends, size in zip(edges, shape, strict=True)):
        return False
    # Between two neighbouring edges of each axis all elements are filled alike: one count stands for them.
    counts = np.zeros([len(ends) - 1 for ends in edges], np.int32)
    for part in parts:
        counts[tuple(slice(*map(ends.index, part.get(axis, (0, ends[-1])))) for axis, ends in enumerate(edges))] += 1
    return bool(rows) and counts.max(initial=1) == 1 and (counts.min(initial=1) == 1 or any(row.padded for row in rows))


def _named(leaf: Leaf) -> str:
    return "/".join([leaf[0], *leaf[1]])


def _rearranged(array: np.ndarray, pattern: str, sizes: Mapping[str, int]) -> np.ndarray:
    from einops import rearrange

    rearranged_array: np.ndarray = rearrange(array, pattern, **sizes)
    return rearranged_array


_T = TypeVar("_T")
MOST_LAYERS = 10_000
"""A file that says more is no model's: lists of layers are made before anything else is looked at."""


def refused(key: str, value: Any, allowed: str) -> ConfigError:
    """Return the error about a value that a model does not support."""
    return ConfigError(
        f"config.json: {key} is {truncate(repr(value), 60)}, and this model has {allowed}; choose another"
    )


def conflict(values: Mapping[str, Any]) -> ConfigError:
    """Return the error about two keys whose values contradict each other."""
    listed = " and ".join(f"{name} is {truncate(repr(value), 80)}" for name, value in values.items())
    return ConfigError(f"config.json: {listed}; take the wrong one away")


@dataclass(frozen=True, slots=True)
class Keys:
    """``config``: of the file, or a table in it; ``where``: what stands before a key's name in messages.

    A key that is absent has the default that transformers' class has, which the model adds to ``config``; null is a value of
    its own, and stands for a method's ``default``. The methods raise ConfigError.
    """

    config: Mapping[str, Any]
    where: str = ""

    def whole(self, name: str, default: int | None = None, *, least: int = 1, most: int = 2**31 - 1) -> int:
        value = self.config.get(name)
        # some tools write 32.0
        if type(value) is float and value.is_integer():
            value = int(value)
        value = self._of(name, value, int, "a whole number", default)
        if not least <= value <= most:
            raise ConfigError(f"config.json: {self.where}{name} is {truncate(str(value), 60)}; want {least} to {most}")
        return value

    def number(self, name: str, *, above: float = -math.inf, below: float = math.inf) -> float:
        value = self.config.get(name)
        value = self._of(name, float(value) if type(value) is int else value, float, "a number", None)
        if not above < value < below:
            limits = (
                f"{f' above {above:g}' * (above > -math.inf)}{f' below {below:g}' * (below < math.inf)}"
                or " that is finite"
            )
            raise ConfigError(f"config.json: {self.where}{name} is {value:g}; want a number{limits}")
        return value

    def flag(self, name: str, default: bool | None = None) -> bool:
        return self._of(name, self.config.get(name), bool, "true or false", default)

    def text(self, name: str, default: str | None = None) -> str:
        return self._of(name, self.config.get(name), str, "a string", default)

    def only(self, name: str, *allowed: Any) -> None:
        """Refuse values that are none of these; an absent key is not refused."""
        # types are compared, too: in Python True == 1, and a flag where a number belongs is another model's file
        value = self.config.get(name)
        if name in self.config and not any(type(value) is type(one) and value == one for one in allowed):
            allowed_texts = [str(one) for one in allowed if one is not None]
            raise refused(f"{self.where}{name}", value, ", ".join(allowed_texts) or "none")

    def rope(self, theta: float) -> tuple[float, str, Keys]:
        """Return the base of rotary frequencies (``theta`` where none is said), kind of their scaling, and the table of its
        numbers.

        Of two tables transformers 5 takes ``rope_scaling``, as version 4 does; but they differ about which base counts where
        several are said, and a table that says other things than a second one may be a leftover. Both are refused.
        """
        tables = [self._table(name) for name in ("rope_parameters", "rope_scaling") if self.config.get(name)]
        kinds = [table.config.get("rope_type", table.config.get("type", "default")) for table in tables]
        numbers = [_numbers(table, kind) for table, kind in zip(tables, kinds, strict=True)]
        if len(tables) == 2 and kinds[0] != "default" and numbers[0] != numbers[1]:
            raise conflict({table.where[:-1]: dict(table.config) for table in tables})
        places = [keys for keys in (self, *tables) if "rope_theta" in keys.config]
        bases = {f"{keys.where}rope_theta": keys.number("rope_theta", above=1) for keys in places}
        # rope_scaling replaces rope_parameters: a base that only the latter says is not the one that transformers uses
        if not places or (len(tables) == 2 and places == tables[:1]):
            bases["rope_theta, where it is absent,"] = theta
        if len(set(bases.values())) > 1:
            raise conflict(bases)
        for keys in (self, *tables):
            keys.only("partial_rotary_factor", 1, 1.0, None)
        return next(iter(bases.values())), kinds[-1] if tables else "default", tables[-1] if tables else Keys({})

    def _table(self, name: str) -> Keys:
        table = self.config[name]
        if not isinstance(table, Mapping) or any(isinstance(value, Mapping) for value in table.values()):
            raise refused(name, table, "one table of numbers")
        kind = "rope_type" if "rope_type" in table else "type"
        if not isinstance(table.get(kind, ""), str):
            raise refused(f"{name}.{kind}", table[kind], "kinds by name")
        return Keys(table, f"{name}.")

    def _of(self, name: str, value: Any, kind: type[_T], what: str, default: _T | None) -> _T:
        value = default if value is None else value
        # type() and not isinstance: true is an int in Python, and no number of layers
        if type(value) is not kind:
            is_null = "null" if name in self.config else "missing"
            shown = is_null if value is None else truncate(repr(value), 60)
            raise ConfigError(f"config.json: {self.where}{name} is {shown}; want {what}")
        return value


def _numbers(table: Keys, kind: str) -> dict[str, Any]:
    names = table.config.keys() - {"type", "rope_type", "rope_theta"}
    return {"rope_type": kind, **{name: table.config[name] for name in names if table.config[name] is not None}}
