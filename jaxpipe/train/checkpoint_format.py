"""One checkpoint on disk: a folder of arrays by layer name, a JSON file that describes them, and checksums of both.

A checkpoint folder holds::

    params/           Orbax (OCDBT) tree {layer: {name: array}}; readable with Orbax alone
    optimizer/        the same for the optimizer state
    extra/            the same for more trees by name, if any were given
    checkpoint.json   step, evaluation loss, the caller's ``meta``, and per leaf its path, shape, dtype and SHA-256
    SHA256SUMS        one line per file, as ``sha256sum -c SHA256SUMS`` reads it

Orbax 0.12 loads flipped bits without noticing, so files are verified before Orbax decodes them (corrupt input never
reaches its decoders), and every array is verified again after decoding, against what was in memory when it was saved.

How trees become leaves with names is ``checkpoint_tree``'s, what the JSON file may hold ``checkpoint_manifest``'s. Nothing
is pickled.

Not modelled: several processes that write one checkpoint together.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import stat
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np

from jaxpipe import __version__
from jaxpipe.errors import CheckpointError
from jaxpipe.train.checkpoint_manifest import (
    GROUPS,
    Manifest,
    OtherFormatError,
    dtype_of,
    manifest_text,
    parse_manifest,
)
from jaxpipe.train.checkpoint_tree import Snapshot

MANIFEST = "checkpoint.json"
SUMS = "SHA256SUMS"

_SUM_LINE = re.compile(r"([0-9a-f]{64})  (\S[^\n]*)")


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
        read_arrays(folder, group, manifest)
    (folder / MANIFEST).write_text(manifest_text(manifest), encoding="utf-8")
    names = _file_names(folder)
    sums = "".join(f"{_file_sha256(folder / name, flush=True)}  {name}\n" for name in names)
    (folder / SUMS).write_text(sums, encoding="utf-8")
    _file_sha256(folder / SUMS, flush=True)
    for directory in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        flush_directory(directory)


def verify(folder: Path, groups: Sequence[str] = GROUPS) -> None:
    """Compare the files of ``groups`` and the manifest with their checksums; decodes nothing. A file missing anywhere in the
    folder is damage; files of others are ignored.

    Raises:
        DamagedCheckpointError: a file is missing or does not match.
        UnreadableCheckpointError: the system refuses to read one.
    """
    for name, expected in _read_sums(folder).items():
        with _opened(folder, name) as file:
            if name != MANIFEST and name.split("/")[0] not in groups:
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


def read_arrays(folder: Path, group: str, manifest: Manifest) -> list[np.ndarray]:
    """Arrays of one group in the order of ``manifest.leaves[group]``, each compared with its checksum.

    Call ``verify`` first. Raises DamagedCheckpointError.
    """
    leaves = manifest.leaves.get(group, ())
    tree: Any = _restore(folder, group) if any(np.prod(leaf.shape) for leaf in leaves) else {}
    arrays = []
    for leaf in leaves:
        if not np.prod(leaf.shape):  # Orbax refuses arrays without elements; the manifest says all there is to say
            arrays.append(np.zeros(leaf.shape, dtype_of(leaf.dtype)))
            continue
        node = tree
        for key in leaf.storage_keys:
            node = node.get(key) if isinstance(node, dict) else None
        array = np.asarray(node)
        fits = (array.shape, array.dtype.name) == (leaf.shape, leaf.dtype)
        if not fits or _array_sha256(array) != leaf.sha256:
            raise DamagedCheckpointError(
                f"checkpoint {folder} is damaged: {group}: {leaf.name} is not the array that was saved"
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
    """Every file below ``folder`` but SHA256SUMS, relative and with forward slashes; the manifest comes last."""
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
    except MemoryError:
        raise
    except Exception as error:
        raise DamagedCheckpointError(
            f"checkpoint {folder} is damaged: Orbax can't read {group}: {reason(error)}"
        ) from error


def _orbax() -> Any:
    """Orbax, imported at first use (it is slow), without what it logs and prints of exceptions that it also raises."""
    import orbax.checkpoint

    for logger in ("absl", "asyncio"):
        logging.getLogger(logger).addFilter(_not_raised_anyway)
    if not isinstance(sys.unraisablehook, _WithoutLateCallbacks):
        sys.unraisablehook = _WithoutLateCallbacks(sys.unraisablehook)
    return orbax.checkpoint


@dataclass(frozen=True, slots=True)
class _WithoutLateCallbacks:
    """The hook for exceptions that nobody can catch, but for those of TensorStore's threads that report to an event loop which
    ended with the first error of a save: that one was raised."""

    hook: Any

    def __call__(self, unraisable: Any) -> None:
        error = unraisable.exc_value
        if not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
            self.hook(unraisable)


def _not_raised_anyway(record: logging.LogRecord) -> bool:
    text = record.getMessage()
    if "exception was never retrieved" in text:  # of several writes that failed, one is raised
        told = text + "".join(traceback.format_exception(*record.exc_info) if record.exc_info else ())
        return not ("tensorstore" in told or "orbax" in told)
    return "_SignalingThread.run() raised" not in text
