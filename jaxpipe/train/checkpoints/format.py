"""One checkpoint on disk: a folder of arrays by layer name, a JSON file that describes them, and checksums of both.

A checkpoint folder holds::

    params/           Orbax (OCDBT) tree {layer: {name: array}}; readable with Orbax alone
    optimizer/        the same for the optimizer state
    extra/            the same for more trees by name, if any were given
    checkpoint.json   step, evaluation loss, the caller's ``meta``, and per leaf its path, shape, dtype and SHA-256
    SHA256SUMS        one line per file, as ``sha256sum -c SHA256SUMS`` reads it

Of several processes each writes all this, with its own layers, into ``part0/``, ``part1/``, …; the first then adds a
``checkpoint.json`` of all leaves, which says of each in which part it is, and a ``SHA256SUMS`` of all files.

Orbax 0.12 loads flipped bits without noticing, so files are verified before Orbax decodes them (corrupt input never
reaches its decoders), and every array is verified again after decoding, against what was in memory when it was saved.

How trees become leaves with names is ``checkpoint_tree``'s, what the JSON file may hold ``checkpoint_manifest``'s, what Orbax
is told ``checkpoint_orbax``'s. Nothing is pickled.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np

from jaxpipe import __version__
from jaxpipe.errors import CheckpointError
from jaxpipe.train.checkpoints.manifest import (
    GROUPS,
    Manifest,
    OtherFormatError,
    dtype_of,
    manifest_text,
    merged,
    parse_manifest,
)
from jaxpipe.train.checkpoints.orbax_trees import read_tree, write_tree
from jaxpipe.train.checkpoints.tree import Leaf, Snapshot

MANIFEST = "checkpoint.json"
SUMS = "SHA256SUMS"

_SUM_LINE = re.compile(r"([0-9a-f]{64})  (\S[^\n]*)")
_IN_PART = re.compile(r"part([0-9]{1,9})/([^/]+)(/.*)?")


class DamagedCheckpointError(CheckpointError):
    """A checkpoint folder is incomplete, truncated or altered; another step may be intact."""


class UnreadableCheckpointError(CheckpointError):
    """The system can't read a file of a checkpoint now; the checkpoint may be intact."""


class RemovedCheckpointError(CheckpointError):
    """A checkpoint was removed or replaced while it was being read."""


def write(
    folder: Path, step: int, eval_loss: float | None, meta: dict[str, Any], groups: Mapping[str, Snapshot]
) -> None:
    """Write one checkpoint into the new folder ``folder``, flush it to disk, and compare what Orbax reads back with what was
    to be written. Raises OSError, DamagedCheckpointError and what Orbax raises."""
    folder.mkdir(parents=True)
    for group, content in groups.items():
        _write_arrays(folder / group, content)
    manifest = Manifest(
        step,
        eval_loss,
        meta,
        __version__,
        {group: content.layers for group, content in groups.items()},
        {
            group: tuple(replace(leaf, sha256=_array_sha256(array)) for leaf, array in content.pairs())
            for group, content in groups.items()
        },
    )
    for group in groups:
        read_arrays(folder, group, manifest.leaves[group])
    (folder / MANIFEST).write_text(manifest_text(manifest), encoding="utf-8")
    _write_sums(folder, {name: _file_sha256(folder / name, flush=True) for name in _file_names(folder)})
    for directory in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        flush_directory(directory)


def part_of(folder: Path, process: int) -> Path:
    """Where a process writes its part of a checkpoint, with :func:`write`."""
    return folder / f"part{process}"


def join(folder: Path, number: int) -> None:
    """Make one checkpoint of ``number`` parts, which have been written and flushed.

    Raises:
        ValueError: they don't fit together.
        CheckpointError: one can't be read.
    """
    parts = [part_of(folder, process) for process in range(number)]
    sums: dict[str, str] = {}
    for part in parts:
        sums |= {f"{part.name}/{name}": digest for name, digest in _read_sums(part).items()}
        sums[f"{part.name}/{SUMS}"] = _file_sha256(part / SUMS)
    manifest = merged([read_manifest(part) for part in parts])
    (folder / MANIFEST).write_text(manifest_text(manifest), encoding="utf-8")
    _write_sums(folder, sums | {MANIFEST: _file_sha256(folder / MANIFEST, flush=True)})
    flush_directory(folder)


def verify(
    folder: Path,
    groups: Sequence[str] = GROUPS,
    parts: Collection[int | None] | None = None,
    share: tuple[int, int] = (0, 1),
) -> None:
    """Compare the files of ``groups`` (in ``parts``, if given) and the manifest with their checksums; decodes nothing. A file
    missing anywhere in the folder is damage; files of others are ignored. ``share``: (k, n) for the k-th of n shares of them.

    Raises:
        DamagedCheckpointError: a file is missing or does not match.
        UnreadableCheckpointError: the system refuses to read one.
    """
    mine, number = share
    for name, expected in list(_read_sums(folder).items())[mine::number]:
        part, group = _place(name)
        with _opened(folder, name) as file:
            if group not in (*groups, MANIFEST, SUMS) or (parts is not None and part is not None and part not in parts):
                continue
            found, size = hashlib.file_digest(file, "sha256").hexdigest(), file.tell()
        if found != expected:
            raise _mismatch(folder, name, size)


def read_manifest(folder: Path) -> Manifest:
    """Read ``checkpoint.json`` after comparing it with its checksum. Raises CheckpointError, as :func:`verify` does."""
    expected = _read_sums(folder)[MANIFEST]
    with _opened(folder, MANIFEST) as file:
        data = file.read()
    if hashlib.sha256(data).hexdigest() != expected:
        raise _mismatch(folder, MANIFEST, len(data))
    try:
        return parse_manifest(data)
    except OtherFormatError as error:
        raise OtherFormatError(f"checkpoint {folder} {error}") from None
    except ValueError as error:
        raise DamagedCheckpointError(f"checkpoint {folder} is damaged: {MANIFEST}: {error}") from None


def read_arrays(folder: Path, group: str, leaves: Sequence[Leaf], *, some: bool = False) -> list[np.ndarray]:
    """Arrays of leaves of one group, each compared with its checksum. ``some``: these may not be all that is there, and others
    are not read.

    Call ``verify`` first. Raises DamagedCheckpointError.
    """
    stored: dict[int | None, list[Leaf]] = {}
    for leaf in leaves:
        if np.prod(leaf.shape):
            stored.setdefault(leaf.part, []).append(leaf)
    trees: dict[int | None, Any] = {
        part: _restore(folder, _name_of(part, group), _nested((leaf, 0) for leaf in found) if some else None)
        for part, found in stored.items()
    }
    arrays = []
    for leaf in leaves:
        if not np.prod(leaf.shape):  # Orbax refuses arrays without elements; the manifest says all there is to say
            arrays.append(np.zeros(leaf.shape, dtype_of(leaf.dtype)))
            continue
        node = trees[leaf.part]
        for key in leaf.storage_keys:
            node = node.get(key) if isinstance(node, dict) else None
        array = np.asarray(node)
        fits = (array.shape, array.dtype.name) == (leaf.shape, leaf.dtype)
        if not fits or _array_sha256(array) != leaf.sha256:
            raise DamagedCheckpointError(
                f"checkpoint {folder} is damaged: {_name_of(leaf.part, group)}: {leaf.name} is not the array that was saved"
            )
        arrays.append(array)
    return arrays


@contextmanager
def watched(folder: Path) -> Iterator[None]:
    """Around reading ``folder``: what looks like damage because it was removed or replaced meanwhile (by the run that saves
    there) is a RemovedCheckpointError."""
    before = _identity(folder)
    try:
        yield
    except DamagedCheckpointError as error:
        if before is None or _identity(folder) != before:
            raise RemovedCheckpointError(
                f"checkpoint {folder} was removed while being read, as a run removes old ones; read a newer one, or raise "
                "run.keep_last"
            ) from error
        raise


def reason(error: BaseException) -> str:
    """An error in one line of at most 300 characters; of TensorStore's, the part that says what happened."""
    text = str(error).strip().split("\n")[0].split(" [tensorstore_spec=")[0] or type(error).__name__
    if "No space left on device" in text:
        return "no space left on device"
    return text if len(text) <= 300 else f"{text[:100]} ... {text[-195:]}"


def flush_directory(directory: Path) -> None:
    """Make new names in ``directory`` survive a power cut."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _identity(folder: Path) -> tuple[int, int] | None:
    try:
        about = folder.stat()
    except OSError:
        return None
    return about.st_dev, about.st_ino


@contextmanager
def _opened(folder: Path, name: str) -> Iterator[BufferedReader]:
    """A file of a checkpoint, to be read."""
    with _told(folder, name):
        if not stat.S_ISREG((folder / name).stat().st_mode):  # reading a pipe would never end
            raise FileNotFoundError
        with (folder / name).open("rb") as file:
            yield file


@contextmanager
def _told(folder: Path, name: str) -> Iterator[None]:
    """Errors of the system as ours: what is not there is damage, what can't be read now is not."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError, ValueError) as error:  # ValueError: no file can have such a name
        raise DamagedCheckpointError(f"checkpoint {folder} is incomplete: {name} is missing") from error
    except OSError as error:
        raise UnreadableCheckpointError(
            f"checkpoint {folder} can't be read now: {name}: {error.strerror}; make it readable and try again, or move the "
            "folder away to do without it"
        ) from error


def _mismatch(folder: Path, name: str, size: int) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        f"checkpoint {folder} is damaged: {name} ({size} bytes) does not match its checksum (truncated or altered since it "
        "was saved)"
    )


def _array_sha256(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data).hexdigest()


def _file_sha256(path: Path, flush: bool = False) -> str:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        if flush:
            os.fsync(file.fileno())
    return digest


def _file_names(folder: Path) -> list[str]:
    """Every file below ``folder`` but its SHA256SUMS, relative and with forward slashes; the manifest comes last."""
    files = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted((name for name in files if name != SUMS), key=lambda name: (name == MANIFEST, name))


def names_in(folder: Path) -> set[str]:
    """Names of what lies directly in a checkpoint. Raises CheckpointError."""
    with _told(folder, "the folder"):
        return {path.name for path in folder.iterdir()}


def _read_sums(folder: Path) -> dict[str, str]:
    """Checksums by file name."""
    with _opened(folder, SUMS) as file:
        data = file.read()
    *lines, rest = data.decode("utf-8", "replace").split("\n")
    sums = {}
    for line in lines:
        match = _SUM_LINE.fullmatch(line)
        if match is None:
            raise DamagedCheckpointError(f"checkpoint {folder} is damaged: {SUMS} has the line {line[:90]!r}")
        sums[match[2]] = match[1]
    if rest or next(reversed(sums), None) != MANIFEST:
        raise DamagedCheckpointError(f"checkpoint {folder} is damaged: {SUMS} has lost its end")
    return sums


def _write_sums(folder: Path, sums: Mapping[str, str]) -> None:
    """``sums``: checksums by file name, the manifest's last."""
    (folder / SUMS).write_text("".join(f"{digest}  {name}\n" for name, digest in sums.items()), encoding="utf-8")
    _file_sha256(folder / SUMS, flush=True)


def _name_of(part: int | None, group: str) -> str:
    return group if part is None else f"part{part}/{group}"


def _place(name: str) -> tuple[int | None, str]:
    """Part and group that a file is in, by its name."""
    match = _IN_PART.fullmatch(name)
    return (int(match[1]), match[2]) if match else (None, name.split("/")[0])


def _nested(values: Iterable[tuple[Leaf, Any]]) -> dict[str, Any]:
    """The Orbax tree with these values."""
    tree: dict[str, Any] = {}
    for leaf, value in values:
        node = tree
        *parents, last = leaf.storage_keys
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = value
    return tree


def _write_arrays(folder: Path, content: Snapshot) -> None:
    if tree := _nested((leaf, array) for leaf, array in content.pairs() if array.size):
        write_tree(folder, tree)


def _restore(folder: Path, name: str, only: Mapping[str, Any] | None) -> Any:
    try:
        return read_tree(folder / name, only)
    except MemoryError:
        raise
    except Exception as error:
        raise DamagedCheckpointError(
            f"checkpoint {folder} is damaged: Orbax can't read {name}: {reason(error)}"
        ) from error
