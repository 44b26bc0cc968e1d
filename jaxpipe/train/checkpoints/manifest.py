"""``checkpoint.json``: what a checkpoint says of itself, strict JSON both ways.

Nothing in the file is believed: what is read has the types and shapes that ``manifest_text`` writes, or is refused.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

from jaxpipe import __version__
from jaxpipe.errors import CheckpointError
from jaxpipe.train.checkpoints.tree import Leaf, LeafKey

FORMATS = (1, 2)
"""Of one process, and of the parts that several have written."""
NEEDED = ("params", "optimizer")
GROUPS = (*NEEDED, "extra")

_LARGEST = 10**18
_MOST_ELEMENTS = 2**48
_SHA256 = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Manifest:
    """What ``checkpoint.json`` says. ``layers`` and ``leaves`` are by group: "params", "optimizer", perhaps "extra".

    ``eval_loss`` is finite or None. ``version``: of the jaxpipe that wrote it.
    """

    step: int
    eval_loss: float | None
    meta: dict[str, Any]
    version: str
    layers: Mapping[str, tuple[str, ...]]
    leaves: Mapping[str, tuple[Leaf, ...]]


class OtherFormatError(CheckpointError):
    """The manifest is of a format that this version does not read."""


def manifest_text(manifest: Manifest) -> str:
    """The text of ``checkpoint.json``."""
    body = {
        "format": FORMATS[any(leaf.part is not None for leaves in manifest.leaves.values() for leaf in leaves)],
        "jaxpipe": manifest.version,
        "step": manifest.step,
        "eval_loss": manifest.eval_loss,
        "meta": manifest.meta,
        "layers": manifest.layers,
        "leaves": {group: [_leaf_to_json(leaf) for leaf in leaves] for group, leaves in manifest.leaves.items()},
    }
    return json.dumps(body, indent=1, allow_nan=False) + "\n"


def parse_manifest(data: bytes) -> Manifest:
    """The manifest in the bytes of ``checkpoint.json``.

    Raises:
        ValueError: they are not what jaxpipe writes; says in a few words what is wrong.
        OtherFormatError: another version wrote them.
    """
    odd: list[str] = []

    def constant(name: str) -> float:
        odd.append(name)
        return math.nan

    try:
        body: Any = json.loads(data, parse_constant=constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"it is not JSON ({error})") from None
    if type(body) is not dict or type(body.get("format")) is not int:
        raise ValueError("it has no format number")
    if body["format"] not in FORMATS:
        raise OtherFormatError(
            f"has format {body['format']}, written by jaxpipe {body.get('jaxpipe')}; this is jaxpipe {__version__}, which "
            f"reads formats {' and '.join(map(str, FORMATS))}; install the version that wrote it"
        )
    fields: list[Any] = [body.get(key) for key in ("step", "eval_loss", "meta", "jaxpipe")]
    step, loss, meta, version = fields
    for key, fits in {
        "step": type(step) is int and 0 <= step < _LARGEST,
        "eval_loss": loss is None or type(loss) is float or (type(loss) is int and abs(loss) < _LARGEST),
        "meta": type(meta) is dict,
        "jaxpipe": type(version) is str,
    }.items():
        if not fits:
            raise ValueError(f"its {key} is {body.get(key, 'missing')!r:.60}")
    finite = loss is not None and math.isfinite(loss)
    if odd[1 if loss is not None and not finite else 0 :]:  # jaxpipe 0.1.0 wrote the loss so where it was not finite
        raise ValueError(f"it holds {odd[-1]}, which is not JSON")
    return Manifest(step, loss if finite else None, meta, version, *_groups(body))


def merged(parts: Sequence[Manifest]) -> Manifest:
    """The manifest of a whole checkpoint, from those of the parts that processes have written. Of arrays that several have, the
    first counts.

    Raises:
        ValueError: two have different arrays under one name.
    """
    layers: dict[str, tuple[str, ...]] = {}
    leaves: dict[str, tuple[Leaf, ...]] = {}
    for group in {group: None for part in parts for group in part.layers}:
        layers[group] = tuple({layer: None for part in parts for layer in part.layers.get(group, ())})
        found: dict[LeafKey, Leaf] = {}
        for number, part in enumerate(parts):
            for leaf in part.leaves.get(group, ()):
                first = found.setdefault(leaf.key, replace(leaf, part=number))
                if replace(first, part=None) != leaf:
                    raise ValueError(f"{group}: {leaf.name} of process {number} is not that of process {first.part}")
        leaves[group] = tuple(found.values())
    return replace(parts[0], layers=layers, leaves=leaves)


def strict_json(meta: Mapping[str, Any]) -> dict[str, Any]:
    """``meta`` as JSON gives it back, a deep copy; raises CheckpointError for what JSON can't hold, NaN among it."""
    try:
        values: dict[str, Any] = json.loads(json.dumps(dict(meta), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"meta can't be stored as JSON: {error}; convert it to finite numbers, strings, lists and dicts"
        ) from error
    return values


def dtype_of(name: str) -> np.dtype[Any]:
    """The NumPy dtype of this name, ``bfloat16`` and its like included."""
    return np.dtype(getattr(ml_dtypes, name, name))


def _groups(body: Mapping[str, Any]) -> tuple[dict[str, tuple[str, ...]], dict[str, tuple[Leaf, ...]]]:
    try:
        layers = {group: tuple(names) for group, names in body["layers"].items()}
        leaves = {group: tuple(_leaf_from_json(x) for x in records) for group, records in body["leaves"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"its layers or leaves can't be read ({type(error).__name__}: {error})") from None
    known = all(type(name) is str for names in layers.values() for name in names)
    if not (known and layers.keys() == leaves.keys() >= set(NEEDED)):
        raise ValueError(f"its layers or leaves are not by {', '.join(NEEDED)}")
    for group, found in leaves.items():
        if stray := [leaf.name for leaf in found if leaf.layer not in layers[group]]:
            raise ValueError(f"its {group} have a leaf {stray[0]:.60} of no layer")
    return layers, leaves


def _leaf_to_json(leaf: Leaf) -> dict[str, Any]:
    record: dict[str, Any] = {"layer": leaf.layer, "path": leaf.path, "shape": leaf.shape, "dtype": leaf.dtype}
    if leaf.python is not None:
        record["python"] = leaf.python
    if leaf.part is not None:
        record["part"] = leaf.part
    return {**record, "sha256": leaf.sha256}


def _leaf_from_json(record: Mapping[str, Any]) -> Leaf:
    path = tuple((kind, key) for kind, key in record["path"])
    shape = tuple(record["shape"])
    part = record.get("part")
    leaf = Leaf(record["layer"], path, shape, record["dtype"], record.get("python"), record["sha256"], part)
    named = type(leaf.layer) is str and leaf.python in (None, "bool", "int", "float")
    sized = all(type(size) is int and size >= 0 for size in shape) and _SHA256.fullmatch(leaf.sha256)
    steps = all(kind in ("key", "index", "field") and type(key) in (str, int) for kind, key in path)
    written = part is None or (type(part) is int and 0 <= part < _LARGEST)
    if not (
        named and sized and steps and written and leaf.storage_keys
    ):  # which are text that UTF-8 can hold, or raise
        raise ValueError(f"a leaf is {record!r:.60}")
    if math.prod(size for size in shape if size) > _MOST_ELEMENTS or dtype_of(leaf.dtype).name != leaf.dtype:
        raise ValueError(f"a leaf has shape {shape!r:.60} and dtype {leaf.dtype!r:.20}")
    return leaf
