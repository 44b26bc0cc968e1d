"""Open a folder of the hub that fits a model of ours: checked whole by headers and tables, then read one parameter at a
time."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxpipe.errors import ConfigError
from jaxpipe.files import check_local, hub_advice
from jaxpipe.interop.folder import CONFIG, INDEX, Stored, check_dtype, opened, read_json, read_tensor, stored_tensors
from jaxpipe.interop.table import TARGETS, HuggingFace, Leaf, Tensor, hugging_face_of, leaf_shapes, rows_by_leaf
from jaxpipe.stage.model.layer import Params
from jaxpipe.stage.model.params import nested
from jaxpipe.stage.model.reference import ours

_ROWS = 4096  # of two tensors that are compared


@dataclass(frozen=True, slots=True)
class Hub:
    """An opened folder of the hub: its ``config.json``, the model of ours that reads it (``module:function``), and that model's
    options but for ``seq_len``."""

    folder: Path
    config: Mapping[str, Any]
    target: str
    exchange: HuggingFace
    options: Mapping[str, Any]


def is_hub(folder: Path) -> bool:
    """Return whether the folder looks like one of the hub: it has a ``config.json``."""
    return (folder / CONFIG).is_file()


def open_hub(folder: Path, target: str | None = None) -> Hub:
    """Open the folder by its config alone. ``target``: the model that reads it; by default the one of its ``model_type``.

    Raises:
        ConfigError: there is no such folder, or no model of ours does what it says.
    """
    check_local(folder, "the folder")
    if not folder.is_dir():
        raise ConfigError(
            f"{folder} is no folder; give one of the Hugging Face hub, with config.json and model.safetensors"
            f"{hub_advice(folder)}"
        )
    config = read_json(folder / CONFIG)
    kind = config.get("model_type")
    if config.get("quantization_config") is not None:
        raise ConfigError(
            f"{folder / CONFIG}: the weights are quantised (quantization_config); use the unquantised model"
        )
    if target is None and (not isinstance(kind, str) or kind not in TARGETS):
        model_types = ", ".join(sorted(TARGETS))
        raise ConfigError(
            f"{folder / CONFIG}: model_type is {kind!r}; known are {model_types}: name a model of yours with --model"
        )
    # ours: a folder ``models`` in the user's working directory must not stand in for the one of this package
    target = target or ours(TARGETS[str(kind)]) or TARGETS[str(kind)]
    exchange = hugging_face_of(target)
    try:
        options = exchange.options(config)
    except ConfigError as error:
        raise ConfigError(f"{folder}: {error}") from None
    return Hub(folder, config, target, exchange, options)


@dataclass(frozen=True, slots=True)
class Weights:
    """The parameters of a model, in the files of a folder. ``leaves``: the tensors that make each leaf. ``remarks``: what
    the files have that is not read, and does no harm."""

    leaves: Mapping[Leaf, list[tuple[Tensor, Stored]]]
    shapes: Mapping[Leaf, tuple[int, ...]]
    layers: tuple[str, ...]
    remarks: tuple[str, ...] = ()

    def read(self, layer: str) -> Params:
        """Read one layer's parameters as float32.

        Raises:
            ConfigError: a file can't be read, or holds numbers that are not finite.
        """
        layer_leaves = {leaf: rows for leaf, rows in self.leaves.items() if leaf[0] == layer}
        return nested({leaf[1]: self._leaf(leaf, rows) for leaf, rows in layer_leaves.items()})

    def _leaf(self, leaf: Leaf, rows: list[tuple[Tensor, Stored]]) -> np.ndarray:
        shape = self.shapes[leaf]
        # a leaf of several tensors is filled part by part; zeros remain only where its table says ``padded``
        array = np.zeros(shape, np.float32) if rows[0][0].parts else None
        with ExitStack() as stack:
            # Hundreds of experts' tensors are in one file, whose header takes milliseconds.
            files = {path: stack.enter_context(opened(path)) for path in dict.fromkeys(x.file for _, x in rows)}
            for row, stored in rows:
                piece = row.to_ours(read_tensor(files[stored.file], stored), shape)
                if array is None:
                    return np.ascontiguousarray(piece)
                array[row.index()] = piece
        assert array is not None
        return array


def weights_of(hub: Hub, options: Mapping[str, Any], avals: Mapping[str, Any]) -> Weights:
    """Find the tensor of each parameter of a model with these ``options``. ``avals``: the parameters' shapes, by layer.

    Raises:
        ConfigError: a tensor is missing, has no place, or is of another shape or no float.
    """
    shapes = leaf_shapes(avals)
    rows = rows_by_leaf(hub.exchange.tensors(options), shapes)
    tied = hub.exchange.tied(options)
    files, stale = stored_tensors(hub.folder, tied)
    files = {name: tensor for name, tensor in files.items() if not re.search(hub.exchange.ignored, name)}
    stored = {_full(hub.exchange, name): tensor for name, tensor in files.items()}
    names = {row.name for leaf_rows in rows.values() for row in leaf_rows}
    remarks = [f"{hub.folder / INDEX} lists {name}, which no file has; {tied[name]} is in its place" for name in stale]
    # names by headers alone: a folder of another model is refused before gigabytes are read
    if lost := sorted(names - stored.keys()):
        wrapper = _wrapper(lost, files, hub.exchange.prefix)
        raise ConfigError(f"{hub.folder} has no tensor {lost[0]}{_more(lost)}; {wrapper or 'download it again'}")
    for name in sorted(tied.keys() & stored.keys()):
        _check_equal(stored[name], stored[tied[name]])
        remarks.append(f"{hub.folder}: {name} is {tied[name]} again (tie_word_embeddings), and is not read")
    if odd := sorted(stored.keys() - names - tied.keys()):
        raise ConfigError(
            f"{hub.folder} has the tensor {odd[0]}{_more(odd)}, for which {hub.target} has no place; name a model that has"
        )
    for leaf, leaf_rows in rows.items():
        for row in leaf_rows:
            tensor, shape = stored[row.name], row.shape(shapes[leaf])
            check_dtype(tensor)
            if tensor.shape != shape:
                raise ConfigError(
                    f"{tensor.file}: {row.name} is of shape {list(tensor.shape)}, and the model wants {list(shape)}: "
                    "config.json, or an option that was set, is of another model"
                )
    leaves = {leaf: [(row, stored[row.name]) for row in leaf_rows] for leaf, leaf_rows in rows.items()}
    return Weights(leaves, shapes, tuple(avals), tuple(remarks))


def _check_equal(head: Stored, words: Stored) -> None:
    """Compare the tensor of a head with that of the embedding that it is tied to.

    Raises:
        ConfigError: they differ, so that one of them and ``tie_word_embeddings`` are of another model.
    """
    same = head.shape == words.shape
    with opened(head.file) as one, opened(words.file) as other:
        slices = one.get_slice(head.name), other.get_slice(words.name)
        rows = head.shape[0] if same else 0
        for start in range(0, rows, _ROWS):
            stop = min(start + _ROWS, rows)
            same = same and np.array_equal(*(part[start:stop].astype(np.float32) for part in slices))
    if not same:
        raise ConfigError(
            f"{head.file}: {head.name} is not {words.name}, and config.json has tie_word_embeddings true; set it to false if "
            "the head is one of its own, or take the tensor away"
        )


def _wrapper(lost: Collection[str], files: Collection[str], model_prefix: str) -> str:
    """Return advice where ``files`` hold the ``lost`` tensors under names with a wrapper's prefix, or without the model's;
    empty otherwise. ``model_prefix``: a prefix that files may leave out."""
    bare = {name.removeprefix(model_prefix) for name in lost}
    for name in files:
        ends = [name[dot.end() :] for dot in re.finditer(r"\.", name)]
        if end := next((end for end in ends if end in bare), ""):
            prefix = name.removesuffix(end).removesuffix(model_prefix)
            return f"it has {name}: save the model that is inside of the wrapper {prefix!r}"
        if full_name := next((full for full in lost if full.endswith(f".{name}")), ""):
            return f"it has {name}, without {full_name.removesuffix(name)!r}: save the model together with its head"
    return ""


def _full(exchange: HuggingFace, name: str) -> str:
    """Return a tensor's name with the prefix that files may leave out."""
    prefixed = not exchange.prefix or name.startswith((exchange.prefix, "lm_head."))
    return name if prefixed else exchange.prefix + name


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
