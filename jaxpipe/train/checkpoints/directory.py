"""What lies in a directory of checkpoints: ours, damaged, not readable now, or somebody's.

A folder counts as the checkpoint of step N if its name is N in eight or more ASCII digits and its manifest says N. One of
such a name that holds what checkpoints are made of, but no readable manifest, is a damaged checkpoint. All others (a copy
under another number, notes in a folder with a date as its name) are somebody's: not counted, not changed, not removed.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from jaxpipe.errors import CheckpointError
from jaxpipe.train.checkpoints import format as form
from jaxpipe.train.checkpoints.format import DamagedCheckpointError, RemovedCheckpointError
from jaxpipe.train.checkpoints.manifest import GROUPS, Manifest

_STEP_NAME = re.compile("[0-9]{8,18}")
_LEFTOVER = re.compile(_STEP_NAME.pattern + r"\.tmp-([0-9]+|replaced|removed)")
_CONTENT = re.compile("|".join([*GROUPS, "part[0-9]+", re.escape(form.MANIFEST), form.SUMS]))
_TRIES = 20


class MisnamedCheckpointError(CheckpointError):
    """A folder holds the checkpoint of another step than its name says."""


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint in a folder with the name of ``step``. ``manifest`` is None if it can't be read; ``error`` says why, or
    that it is of another step."""

    step: int
    path: Path
    manifest: Manifest | None
    error: CheckpointError | None = None

    @property
    def counts(self) -> bool:
        """Whether it is the checkpoint of ``step``, damaged or not."""
        return not isinstance(self.error, MisnamedCheckpointError)


@dataclass(frozen=True, slots=True)
class Intact:
    """The newest checkpoint whose files all match their checksums; ``step`` is None if there is none.

    ``warnings`` has one line for each newer checkpoint that was passed over, saying what is wrong with it.
    """

    step: int | None
    warnings: tuple[str, ...]


def folder_of(directory: Path, step: int) -> Path:
    """The folder of ``step``, which need not exist."""
    return directory / f"{step:08d}"


def step_of(folder: Path) -> int | None:
    """The step whose checkpoint a folder of this name would be; None if of none."""
    step = int(folder.name) if _STEP_NAME.fullmatch(folder.name) else None
    return step if step is not None and folder == folder_of(folder.parent, step) else None


def checkpoints(directory: Path, after: int = -1) -> tuple[Found, ...]:
    """The checkpoints in ``directory`` of steps above ``after``, damaged or not, by step. Raises CheckpointError if the
    directory can't be read."""
    return tuple(found for found in scan(directory, after) if found.counts)


def look(folder: Path) -> Found | None:
    """What a folder with the name of a step holds; None if no checkpoint.

    Raises:
        RemovedCheckpointError: the folder went away meanwhile.
    """
    step = step_of(folder)
    assert step is not None
    try:
        with form.watched(folder):
            if os.path.lexists(folder) and not folder.is_dir():
                return None
            if not any(_CONTENT.fullmatch(name) for name in form.names_in(folder)):
                return None
            manifest = form.read_manifest(folder)
    except RemovedCheckpointError:
        raise
    except CheckpointError as error:
        return Found(step, folder, None, error)
    if manifest.step == step:
        return Found(step, folder, manifest)
    other = f"{folder} holds the checkpoint of step {manifest.step} under another number"
    return Found(step, folder, None, MisnamedCheckpointError(other))


def by_loss(found: Iterable[Found]) -> list[int]:
    """Steps with a finite evaluation loss, the lowest first, of equals the newest."""
    losses = {each.step: each.manifest.eval_loss for each in found if each.manifest is not None}
    known = {step: loss for step, loss in losses.items() if loss is not None}
    return sorted(known, key=lambda step: (known[step], -step))


def damage(folder: Path, share: tuple[int, int] = (0, 1)) -> CheckpointError | None:
    """Why the files of a checkpoint (``share``: as ``form.verify``) can't be read or don't match their checksums; None if they
    do."""
    try:
        with form.watched(folder):
            form.verify(folder, share=share)
    except CheckpointError as error:
        return error
    return None


def newest_intact(
    directory: Path, before: int | None = None, damage: Callable[[Path], CheckpointError | None] = damage
) -> Intact:
    """The newest checkpoint (of a step below ``before``) whose files match their checksums. Reads the files whole, by
    ``damage``.

    Raises:
        CheckpointError: a newer one can't be read now, though it may be intact (for want of permission, say).
    """
    warnings: list[str] = []
    for found in reversed(scan(directory)):
        if before is not None and found.step >= before:
            continue
        error = found.error or damage(found.path)
        if error is None:
            return Intact(found.step, tuple(warnings))
        if isinstance(error, MisnamedCheckpointError):
            warnings.append(f"{error}; it is left alone")
        elif isinstance(error, DamagedCheckpointError):
            warnings.append(f"passed over step {found.step}: {error}")
        elif not isinstance(error, RemovedCheckpointError):
            raise error
    return Intact(None, tuple(warnings))


def put_in_place(temporary: Path, final: Path) -> None:
    """Give a complete temporary folder its final name, replacing the checkpoint that has it; one that is damaged, or can't be
    read now, is set aside. Raises OSError if somebody's folder has the name."""
    stale = final.with_name(f"{final.name}.tmp-replaced")
    if final.exists():
        present = look(final)
        if present is None or not present.counts:
            raise OSError(f"{final} is in the way and not the checkpoint of that step; move it away")
        if present.error is None:
            final.rename(stale)
        else:
            set_aside(final, present.error)
    temporary.rename(final)
    form.flush_directory(final.parent)
    remove(stale)


def set_aside(folder: Path, error: CheckpointError | None) -> Path:
    """Rename a folder that is in the way of a run: ``NAME.damaged`` if ``error`` says so, else ``NAME.superseded``; with a
    number if there is one already. Its new path."""
    why = "damaged" if isinstance(error, DamagedCheckpointError) else "superseded"
    names = (folder.with_name(f"{folder.name}.{why}{f'-{n}' if n else ''}") for n in range(10_000))
    return folder.rename(next(path for path in names if not path.exists()))


@contextmanager
def locked(folder: Path, how: int) -> Iterator[None]:
    """Hold a lock (``fcntl.LOCK_EX``, or ``LOCK_SH``, which keeps :func:`remove` off) on the folder; it goes with the process.
    A folder that can't be opened goes without (what follows says why), as do file systems without locks.

    Raises:
        BlockingIOError: another has it, and ``how`` is not to wait (``fcntl.LOCK_NB``).
    """
    descriptor = None
    try:
        try:
            descriptor = os.open(folder, os.O_RDONLY)
            fcntl.flock(descriptor, how)
        except BlockingIOError:
            raise
        except OSError:
            pass
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def remove(folder: Path) -> None:
    """Delete a checkpoint or temporary folder, if it exists, can be deleted, and is not being read; a later save deletes what
    is left. A kill half-way leaves nothing that looks like a checkpoint."""
    with suppress(OSError), locked(folder, fcntl.LOCK_EX | fcntl.LOCK_NB):
        if step_of(folder) is not None:
            folder = folder.rename(folder.with_name(f"{folder.name}.tmp-removed"))
        shutil.rmtree(folder, ignore_errors=True)


def remove_leftovers(directory: Path) -> None:
    """Delete what saves that were killed have left."""
    for path in directory.iterdir():
        if _LEFTOVER.fullmatch(path.name):
            remove(path)


def scan(directory: Path, after: int = -1) -> list[Found]:
    """What is in the folders with names of steps above ``after``, by step; what does not count too."""
    for left in reversed(range(_TRIES)):
        try:
            steps = {path: step_of(path) for path in directory.iterdir()}
            found = [look(path) for path, step in steps.items() if step is not None and step > after]
        except FileNotFoundError:
            break
        except OSError as error:
            raise CheckpointError(f"checkpoint directory {directory} can't be read: {error.strerror}") from error
        except RemovedCheckpointError:  # by a run that saves there, which has made a newer one
            if not left:
                raise
            continue
        return sorted((each for each in found if each is not None), key=lambda each: each.step)
    return []
