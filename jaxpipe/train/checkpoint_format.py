"""One checkpoint on disk: a folder of arrays by layer name, a JSON file that describes them, and checksums of both.

A checkpoint folder holds::

    params/           Orbax (OCDBT) tree {layer: {name: array}}; readable with Orbax alone
    optimizer/        the same for the optimizer state
    extra/            the same for more trees by name, if any were given
    checkpoint.json   step, evaluation loss, the caller's ``meta``, and per leaf its path, shape, dtype and SHA-256
    SHA256SUMS        one line per file, as ``sha256sum -c SHA256SUMS`` reads it

Orbax 0.12 loads flipped bits without noticing, so files are verified before Orbax decodes them (corrupt input never
reaches its decoders), and every array is verified again after decoding, against what was in memory when it was saved.

How trees become leaves with names is ``checkpoint_tree``'s. Nothing is pickled.

Not modelled: several processes that write one checkpoint together.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxpipe import __version__
from jaxpipe.errors import CheckpointError
from jaxpipe.train.checkpoint_tree import Leaf, Snapshot

FORMAT = 1
GROUPS = ("params", "optimizer", "extra")
"""The last one is optional."""
MANIFEST = "checkpoint.json"
SUMS = "SHA256SUMS"

_SUM_LINE = re.compile(r"([0-9a-f]{64})  (\S[^\n]*)")


class DamagedCheckpointError(CheckpointError):
    """A checkpoint folder is incomplete, truncated or altered; another step may be intact."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What ``checkpoint.json`` says. ``layers`` and ``leaves`` are by group ("params", "optimizer", perhaps "extra")."""

    step: int
    eval_loss: float | None
    meta: dict[str, Any]
    version: str
    layers: Mapping[str, tuple[str, ...]]
    leaves: Mapping[str, tuple[Leaf, ...]]


def write(
    folder: Path, step: int, eval_loss: float | None, meta: dict[str, Any], groups: Mapping[str, Snapshot]
) -> None:
    """Write one checkpoint into the new folder ``folder`` and flush it to disk. Raises OSError and what Orbax raises."""
    folder.mkdir(parents=True)
    for group, content in groups.items():
        _write_arrays(folder / group, content)
    body = {
        "format": FORMAT,
        "jaxpipe": __version__,
        "step": step,
        "eval_loss": eval_loss,
        "meta": meta,
        "layers": {group: list(content.layers) for group, content in groups.items()},
        "leaves": {group: [_leaf_to_json(*pair) for pair in content.pairs()] for group, content in groups.items()},
    }
    (folder / MANIFEST).write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    names = _file_names(folder)
    sums = "".join(f"{_file_sha256(folder / name, flush=True)}  {name}\n" for name in names)
    (folder / SUMS).write_text(sums, encoding="utf-8")
    _file_sha256(folder / SUMS, flush=True)
    for directory in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        _flush_directory(directory)


def verify(folder: Path, groups: Sequence[str] = GROUPS) -> None:
    """Compare the files of ``groups`` and the manifest with their checksums; raises DamagedCheckpointError.

    Reads the files whole, decodes nothing. A file missing anywhere in the folder is damage; files of others
    are ignored.
    """
    sums = _read_sums(folder)
    for name, expected in sums.items():
        if name != MANIFEST and name.split("/")[0] not in groups:
            continue
        try:
            found = _file_sha256(folder / name)
        except OSError as error:
            raise DamagedCheckpointError(f"checkpoint {folder} can't be read: {name}: {error.strerror}") from error
        if found != expected:
            raise DamagedCheckpointError(
                f"checkpoint {folder} is damaged: {name} ({(folder / name).stat().st_size} bytes) does not match its "
                "checksum (truncated or altered since it was saved)"
            )


def read_manifest(folder: Path) -> Manifest:
    """Read ``checkpoint.json`` after comparing it with its checksum. Raises CheckpointError."""
    if not folder.is_dir():
        raise CheckpointError(
            f"no checkpoint at {folder}; give the folder of one step, such as runs/gpt/checkpoints/00000100"
        )
    verify(folder, groups=())
    body = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    if body["format"] != FORMAT:
        raise CheckpointError(
            f"checkpoint {folder} has format {body['format']}, written by jaxpipe {body['jaxpipe']}; this is jaxpipe "
            f"{__version__}, which reads format {FORMAT}; install the version that wrote it"
        )
    return Manifest(
        step=body["step"],
        eval_loss=body["eval_loss"],
        meta=body["meta"],
        version=body["jaxpipe"],
        layers={group: tuple(layers) for group, layers in body["layers"].items()},
        leaves={group: tuple(_leaf_from_json(leaf) for leaf in leaves) for group, leaves in body["leaves"].items()},
    )


def read_arrays(folder: Path, group: str, manifest: Manifest) -> list[np.ndarray]:
    """Arrays of one group in the order of ``manifest.leaves[group]``, each compared with its checksum.

    Call ``verify`` first. Raises DamagedCheckpointError.
    """
    leaves = manifest.leaves.get(group, ())
    tree: Any = _restore(folder, group) if any(np.prod(leaf.shape) for leaf in leaves) else {}
    arrays = []
    for leaf in leaves:
        if not np.prod(leaf.shape):  # Orbax refuses arrays without elements; the manifest says all there is to say
            arrays.append(np.zeros(leaf.shape, _dtype(leaf.dtype)))
            continue
        node = tree
        for key in leaf.storage_keys:
            node = node.get(key) if isinstance(node, dict) else None
        array = np.asarray(node)
        if (array.shape, array.dtype.name, _array_sha256(array)) != (leaf.shape, leaf.dtype, leaf.sha256):
            raise DamagedCheckpointError(
                f"checkpoint {folder} is damaged: {group}: {leaf.name} is not the array that was saved"
            )
        arrays.append(array)
    return arrays


def to_json_values(meta: Mapping[str, Any]) -> dict[str, Any]:
    """``meta`` as JSON gives it back, a deep copy; raises CheckpointError for what JSON can't hold."""
    try:
        values: dict[str, Any] = json.loads(json.dumps(dict(meta)))
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"meta can't be stored as JSON: {error}; convert it to numbers, strings, lists and dicts"
        ) from error
    return values


def reason(error: BaseException) -> str:
    """An error in one line of at most 300 characters; of TensorStore's, the part that says what happened."""
    text = str(error).strip().split("\n")[0].split(" [tensorstore_spec=")[0] or type(error).__name__
    if "No space left on device" in text:
        return "no space left on device"
    return text if len(text) <= 300 else f"{text[:100]} ... {text[-195:]}"


def put_in_place(temporary: Path, final: Path) -> None:
    """Give a complete temporary folder its final name, replacing what has it."""
    stale = final.with_name(f"{final.name}.tmp-replaced")
    if final.exists():
        final.rename(stale)
    temporary.rename(final)
    _flush_directory(final.parent)
    remove(stale)


def remove(folder: Path) -> None:
    """Delete a checkpoint or temporary folder, if it exists; a kill half-way leaves nothing that looks like a checkpoint."""
    if ".tmp-" not in folder.name and folder.exists():
        folder = folder.rename(folder.with_name(f"{folder.name}.tmp-removed"))
    shutil.rmtree(folder, ignore_errors=True)


def _flush_directory(directory: Path) -> None:
    """Make new names in ``directory`` survive a power cut."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _dtype(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, name))


def _array_sha256(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data).hexdigest()


def _file_sha256(path: Path, flush: bool = False) -> str:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        if flush:
            os.fsync(file.fileno())
    return digest


def _file_names(folder: Path) -> list[str]:
    """Every file below ``folder`` but SHA256SUMS, relative and with forward slashes; the manifest comes last."""
    files = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted((name for name in files if name != SUMS), key=lambda name: (name == MANIFEST, name))


def _read_sums(folder: Path) -> dict[str, str]:
    try:
        text = (folder / SUMS).read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise DamagedCheckpointError(f"checkpoint {folder} is incomplete: {SUMS} is missing") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DamagedCheckpointError(f"checkpoint {folder} is damaged: {SUMS} can't be read: {error}") from error
    sums = {}
    for line in text.split("\n")[:-1]:
        match = _SUM_LINE.fullmatch(line)
        if match is None:
            raise DamagedCheckpointError(f"checkpoint {folder} is damaged: {SUMS} has the line {line[:90]!r}")
        sums[match[2]] = match[1]
    if next(reversed(sums), None) != MANIFEST:
        raise DamagedCheckpointError(f"checkpoint {folder} is damaged: {SUMS} has lost its end")
    if missing := sorted(sums.keys() - set(_file_names(folder))):
        raise DamagedCheckpointError(f"checkpoint {folder} is incomplete: {missing[0]} is missing")
    return sums


def _leaf_to_json(leaf: Leaf, array: np.ndarray) -> dict[str, Any]:
    record: dict[str, Any] = {"layer": leaf.layer, "path": leaf.path, "shape": leaf.shape, "dtype": leaf.dtype}
    if leaf.python is not None:
        record["python"] = leaf.python
    return {**record, "sha256": _array_sha256(array)}


def _leaf_from_json(record: Mapping[str, Any]) -> Leaf:
    path = tuple((kind, key) for kind, key in record["path"])
    return Leaf(record["layer"], path, tuple(record["shape"]), record["dtype"], record.get("python"), record["sha256"])


def _write_arrays(folder: Path, content: Snapshot) -> None:
    tree: dict[str, Any] = {}
    for leaf, array in content.pairs():
        if not array.size:
            continue
        node = tree
        *parents, last = leaf.storage_keys
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = array
    if not tree:
        return
    ocp = _orbax()
    # Uncompressed: trained weights shrink by a tenth, and compression takes three times the CPU, beside training.
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False)) as checkpointer:
        checkpointer.save(folder, ocp.args.PyTreeSave(tree))


def _restore(folder: Path, group: str) -> Any:
    ocp = _orbax()
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            return checkpointer.restore(folder / group)
    except Exception as error:
        raise DamagedCheckpointError(
            f"checkpoint {folder} is damaged: Orbax can't read {group}: {reason(error)}"
        ) from error


def _orbax() -> Any:
    """Orbax, imported at first use (it is slow), without its log of exceptions that it also raises."""
    import orbax.checkpoint

    logging.getLogger("absl").addFilter(_not_raised_anyway)
    return orbax.checkpoint


def _not_raised_anyway(record: logging.LogRecord) -> bool:
    return "_SignalingThread.run() raised" not in record.getMessage()
