"""A directory of checkpoints: which folders in it count, which one a path means, and reading it in one or all processes.

A folder counts as the checkpoint of step N if its name is N in eight or more ASCII digits and its manifest says N. One of
such a name that holds what checkpoints are made of, but no readable manifest, is a damaged checkpoint. All others (a copy
under another number, notes in a folder with a date as its name) are somebody's: not counted, not changed, not removed.

Reading needs no run and no pipeline. A run does not remove a checkpoint that is being read (a lock on its folder), but may do
so just before. Where the newest or the best was asked for, the one that is so by then is read instead.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

import jax
import numpy as np

from jaxpipe.errors import CheckpointError
from jaxpipe.files import check_local
from jaxpipe.runtime.processes import Processes
from jaxpipe.train.checkpoints import contents
from jaxpipe.train.checkpoints.leaves import (
    Leaf,
    Placement,
    PyTree,
    Share,
    build_trees,
    fill_trees,
    leaves_by_key,
    list_differences,
    place_array,
    readers_of_parts,
)

_STEP_NAME = re.compile("[0-9]{8,18}")
_LEFTOVER = re.compile(_STEP_NAME.pattern + r"\.tmp-([0-9]+|replaced|removed)")
_CONTENT = re.compile("|".join([*contents.GROUPS, "part[0-9]+", re.escape(contents.MANIFEST), contents.SUMS]))
_SCAN_TRIES = 20


class MisnamedCheckpointError(CheckpointError):
    """A folder holds the checkpoint of another step than its name says."""


@dataclass(frozen=True, slots=True)
class CheckpointFolder:
    """A checkpoint in a folder with the name of ``step``. ``manifest`` is None if it can't be read; ``error`` says why, or
    that it is of another step."""

    step: int
    path: Path
    manifest: contents.Manifest | None
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
    """Return the folder of ``step``, which need not exist."""
    return directory / f"{step:08d}"


def step_of(folder: Path) -> int | None:
    """Return the step whose checkpoint a folder of this name would be; None if of none."""
    step = int(folder.name) if _STEP_NAME.fullmatch(folder.name) else None
    return step if step is not None and folder == folder_of(folder.parent, step) else None


def list_checkpoints(directory: Path, after: int = -1) -> tuple[CheckpointFolder, ...]:
    """Return the checkpoints in ``directory`` of steps above ``after``, damaged or not, by step. Raises CheckpointError if the
    directory can't be read."""
    return tuple(folder for folder in scan_folders(directory, after) if folder.counts)


def read_folder(folder: Path) -> CheckpointFolder | None:
    """Return what a folder with the name of a step holds; None if no checkpoint.

    Raises:
        RemovedCheckpointError: the folder went away meanwhile.
    """
    step = step_of(folder)
    assert step is not None
    try:
        with contents.watched(folder):
            if os.path.lexists(folder) and not folder.is_dir():
                return None
            if not any(_CONTENT.fullmatch(name) for name in contents.names_in(folder)):
                return None
            manifest = contents.read_manifest_of(folder)
    except contents.RemovedCheckpointError:
        raise
    except CheckpointError as error:
        return CheckpointFolder(step, folder, None, error)
    if manifest.step == step:
        return CheckpointFolder(step, folder, manifest)
    other = f"{folder} holds the checkpoint of step {manifest.step} under another number"
    return CheckpointFolder(step, folder, None, MisnamedCheckpointError(other))


def steps_by_loss(folders: Iterable[CheckpointFolder]) -> list[int]:
    """Return steps with a finite evaluation loss, the lowest first, of equals the newest."""
    losses = {each.step: each.manifest.eval_loss for each in folders if each.manifest is not None}
    known_losses = {step: loss for step, loss in losses.items() if loss is not None}
    return sorted(known_losses, key=lambda step: (known_losses[step], -step))


def find_damage(folder: Path) -> CheckpointError | None:
    """Return why the files of a checkpoint can't be read or don't match their checksums; None if they do."""
    try:
        with contents.watched(folder):
            contents.verify_files(folder)
    except CheckpointError as error:
        return error
    return None


def newest_intact(directory: Path, before: int | None, by_manifest: bool) -> Intact:
    """Return the newest checkpoint (of a step below ``before``) whose files match their checksums, or ``by_manifest`` that one
    alone.

    Raises:
        CheckpointError: a newer one can't be read now, though it may be intact (for want of permission, say).
    """
    warnings: list[str] = []
    for folder in reversed(scan_folders(directory)):
        if before is not None and folder.step >= before:
            continue
        error = folder.error or (None if by_manifest else find_damage(folder.path))
        if error is None:
            return Intact(folder.step, tuple(warnings))
        if isinstance(error, MisnamedCheckpointError):
            warnings.append(f"{error}; it is left alone")
        elif isinstance(error, contents.DamagedCheckpointError):
            warnings.append(f"passed over step {folder.step}: {error}")
        elif not isinstance(error, contents.RemovedCheckpointError):
            raise error
    return Intact(None, tuple(warnings))


def put_in_place(temporary: Path, final: Path) -> None:
    """Give a complete temporary folder its final name, replacing the checkpoint that has it; one that is damaged, or can't be
    read now, is set aside. Raises OSError if somebody's folder has the name."""
    stale = final.with_name(f"{final.name}.tmp-replaced")
    if final.exists():
        present = read_folder(final)
        if present is None or not present.counts:
            raise OSError(f"{final} is in the way and not the checkpoint of that step; move it away")
        if present.error is None:
            final.rename(stale)
        else:
            set_aside(final, present.error)
    # The rename is what makes a checkpoint count. What it replaces goes only once the new name is on the disk, so a
    # kill between any two lines leaves the old one or the new one whole.
    temporary.rename(final)
    contents.flush_directory(final.parent)
    remove_folder(stale)


def set_aside(folder: Path, error: CheckpointError | None) -> Path:
    """Rename a folder that is in the way of a run: ``NAME.damaged`` if ``error`` says so, else ``NAME.superseded``; with a
    number if there is one already. Its new path."""
    why = "damaged" if isinstance(error, contents.DamagedCheckpointError) else "superseded"
    names = (folder.with_name(f"{folder.name}.{why}{f'-{n}' if n else ''}") for n in range(10_000))
    return folder.rename(next(path for path in names if not path.exists()))


@contextmanager
def lock_folder(folder: Path, how: int) -> Iterator[None]:
    """Hold a lock (``fcntl.LOCK_EX``, or ``LOCK_SH``, which keeps :func:`remove_folder` off) on the folder; it ends with the
    process. A folder that can't be opened goes without (what follows says why), as do file systems without locks.

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


def remove_folder(folder: Path) -> None:
    """Delete a checkpoint or temporary folder, if it exists, can be deleted, and is not being read; a later save deletes what
    is left. A kill half-way leaves nothing that looks like a checkpoint."""
    # Readers hold a shared lock: a folder that is being read stays, and a later save removes it.
    with suppress(OSError), lock_folder(folder, fcntl.LOCK_EX | fcntl.LOCK_NB):
        if step_of(folder) is not None:
            folder = folder.rename(folder.with_name(f"{folder.name}.tmp-removed"))
        shutil.rmtree(folder, ignore_errors=True)


def remove_leftovers(directory: Path) -> None:
    """Delete what saves that were killed have left."""
    for path in directory.iterdir():
        if _LEFTOVER.fullmatch(path.name):
            remove_folder(path)


def scan_folders(directory: Path, after: int = -1) -> list[CheckpointFolder]:
    """Return what is in the folders with names of steps above ``after``, by step; what does not count too."""
    for left in reversed(range(_SCAN_TRIES)):
        try:
            steps = {path: step_of(path) for path in directory.iterdir()}
            folders = [read_folder(path) for path, step in steps.items() if step is not None and step > after]
        except FileNotFoundError:
            break
        except OSError as error:
            raise CheckpointError(f"checkpoint directory {directory} can't be read: {error.strerror}") from error
        except contents.RemovedCheckpointError:  # by a run that saves there, which has made a newer one
            if not left:
                raise
            continue
        return sorted((each for each in folders if each is not None), key=lambda each: each.step)
    return []


StepName: TypeAlias = int | Literal["best"] | None
"""A step, the one of lowest evaluation loss, or the newest."""
_Read = TypeVar("_Read")
_READ_TRIES = 20


def load_params(
    path: str | os.PathLike[str],
    device: Placement | None = None,
    *,
    step: StepName = None,
    like: Mapping[str, PyTree] | None = None,
) -> dict[str, PyTree]:
    """Parameters alone, ``{layer: pytree}`` on one device (JAX's default one if None), without a pipeline.

    ``path`` is the folder of one checkpoint, or a run's directory; of a run, ``step`` or else the newest is taken. The
    optimizer state is neither read nor verified. ``like`` as ``{layer: pytree}`` fixes structure, shapes and dtypes, as
    in ``CheckpointStore.load``. Raises CheckpointError.
    """
    target = jax.local_devices()[0] if device is None else device
    like_groups = None if like is None else {"params": like}
    return reading(
        partial(find, path, step),
        lambda folder: load_group(folder, "params", contents.read_manifest_of(folder), like_groups, target),
    )


def read_manifest(path: str | os.PathLike[str], step: StepName = None) -> contents.Manifest:
    """Return a checkpoint without its arrays: step, ``meta``, evaluation loss, shapes and dtypes. ``path`` as in
    ``load_params``."""
    return reading(partial(find, path, step), contents.read_manifest_of)


def find(path: str | os.PathLike[str], step: StepName = None) -> Path:
    """Return the folder of one checkpoint.

    ``path`` is that folder itself, a directory of checkpoints, or a run's directory with ``checkpoints/`` in it; of
    several, ``step`` ("best": the lowest evaluation loss), else the newest. Raises CheckpointError if there is none, and
    ConfigError for a URL.
    """
    check_local(path, "checkpoint")
    folder = Path(path).absolute()
    if step is None and (folder / contents.SUMS).is_file():
        return folder
    if not list_checkpoints(folder):
        if (folder / "checkpoints").is_dir():
            return pick(folder / "checkpoints", step)
        if step is None and step_of(folder) is not None:
            return pick(folder.parent, step_of(folder))
    return pick(folder, step)


def split_step(init_from: str) -> tuple[Path, StepName]:
    """Take ``PATH[:step]`` apart; a step is a number or ``best``."""
    match = re.fullmatch(r"(.+):([0-9]{1,12}|best)", init_from)
    if match is None or Path(init_from).exists():
        return Path(init_from), None
    return Path(match[1]), "best" if match[2] == "best" else int(match[2])


def pick(directory: Path, step: StepName) -> Path:
    """Return the folder of one of the checkpoints in ``directory``. Raises CheckpointError if there is none."""
    folders = scan_folders(directory)
    checkpoints = [each for each in folders if each.counts]
    if not checkpoints:
        what = "; ".join(str(each.error) for each in folders)
        if not directory.is_dir():
            what = "it does not exist"
        elif not folders:
            what = "it has none" if any(directory.iterdir()) else "it is empty"
        raise CheckpointError(f"no checkpoint in {directory}: {what}; train first, or correct the path")
    if step == "best":
        step = next(iter(steps_by_loss(checkpoints)), None)
        if step is None:
            raise CheckpointError(f"no checkpoint in {directory} has an evaluation loss; name a step instead")
    steps = [each.step for each in checkpoints]
    if step is not None and step not in steps:
        listed = ", ".join(str(other) for other in steps)
        raise CheckpointError(f"no checkpoint of step {step} in {directory}; it has those of steps {listed}")
    return folder_of(directory, steps[-1] if step is None else step)


def reading(where: Callable[[], Path], read: Callable[[Path], _Read]) -> _Read:
    """``read(where())``; again, with what ``where`` finds then, if that checkpoint was removed meanwhile.

    Raises:
        RemovedCheckpointError: the one that was named is gone, or they go faster than they can be read.
        DamagedCheckpointError: names one beside it that is intact.
    """
    # A run that saves may remove the newest checkpoint between finding it and locking it; the next try finds a newer
    # one.
    folder = where()
    for _ in range(_READ_TRIES):
        try:
            with _advice(folder), lock_folder(folder, fcntl.LOCK_SH), contents.watched(folder):
                return read(folder)
        except contents.RemovedCheckpointError as error:
            removed = error
        try:
            folder = where()
        except CheckpointError:
            break
    raise removed


@dataclass(frozen=True, slots=True)
class GroupArrays:
    """One group of a checkpoint, or some layers of it, as read: for each of ``leaves`` the ``arrays`` of its pieces, None for
    what another column reads. ``readers``: the column that reads each part; ``like``: the trees to fill, or None."""

    layers: Sequence[str]
    leaves: Sequence[Leaf]
    arrays: Sequence[list[np.ndarray | None]]
    readers: Mapping[int | None, int]
    like: Mapping[str, PyTree] | None
    places: Sequence[str]

    def place(self, sharding: Placement | Mapping[str, Placement] | None) -> dict[str, PyTree]:
        """Return the trees, arrays where they go. Raises CheckpointError."""
        targets = {} if self.like is None else leaves_by_key(self.like)
        values = []
        for leaf, arrays in zip(self.leaves, self.arrays, strict=True):
            where = sharding.get(leaf.layer) if isinstance(sharding, Mapping) else sharding
            values.append(place_array(leaf, leaf.assembled(arrays), targets.get(leaf.key), where))
        if self.like is None:
            return build_trees(self.layers, self.leaves, values)
        return fill_trees(self.like, self.leaves, values)


def load_group(
    folder: Path,
    group: str,
    manifest: contents.Manifest,
    like: Mapping[str, Mapping[str, PyTree]] | None,
    sharding: Placement | Mapping[str, Placement] | None,
    chosen_layers: Collection[str] | None = None,
) -> dict[str, PyTree]:
    """Compare one group with ``like[group]``, verify and read it, and place its arrays; of ``chosen_layers`` only, if given.

    Raises CheckpointError.
    """
    return read_group(folder, group, manifest, like, chosen_layers).place(sharding)


def read_group(
    folder: Path,
    group: str,
    manifest: contents.Manifest,
    like: Mapping[str, Mapping[str, PyTree]] | None,
    chosen_layers: Collection[str] | None = None,
    share: Share = (0, 1),
) -> GroupArrays:
    """Do what :func:`load_group` does, but place nothing, and verify and read a ``share`` of the parts."""
    layers: Sequence[str] = manifest.layers.get(group, ())
    leaves: Sequence[Leaf] = manifest.leaves.get(group, ())
    group_like = None if like is None else like.get(group)
    if group_like is not None and (problems := list_differences(layers, leaves, group_like)):
        rest = f" (and {len(problems) - 4} more)" if len(problems) > 4 else ""
        raise CheckpointError(
            f"checkpoint {folder} does not fit: {group}: {'; '.join(problems[:4])}{rest}; use the model and optimizer "
            f"settings that it was saved with (under meta in its {contents.MANIFEST}), or another checkpoint"
        )
    # Compared whole before layers are chosen: a process that reads some must refuse what the others refuse.
    others: Sequence[Leaf] = ()
    if chosen_layers is not None:
        layers = [x for x in layers if x in chosen_layers]
        others = [leaf for leaf in leaves if leaf.layer not in chosen_layers]
        leaves = [leaf for leaf in leaves if leaf.layer in chosen_layers]
        group_like = group_like and {layer: content for layer, content in group_like.items() if layer in chosen_layers}
    column, columns = share
    readers = readers_of_parts(leaves, columns)
    parts = {part for part, reader in readers.items() if reader == column}
    arrays = contents.read_pieces(folder, group, leaves, parts, others)
    stored = {piece.part: None for leaf in leaves if leaf.size for piece in leaf.pieces}
    places = [contents.name_of(part, group) for part in stored]
    return GroupArrays(layers, leaves, arrays, readers, group_like, places)


@contextmanager
def _advice(folder: Path) -> Iterator[None]:
    """Complete the error about a damaged checkpoint with what to do: name another one beside it that is intact."""
    try:
        yield
    except contents.DamagedCheckpointError as error:
        neighbours = (
            checkpoint for checkpoint in reversed(list_checkpoints(folder.parent)) if checkpoint.path != folder
        )
        intact = next((f for f in neighbours if f.error is None and find_damage(f.path) is None), None)
        advice = (
            "no other checkpoint beside it is intact: restore it from a copy, or start again in another directory"
            if intact is None
            else f"step {intact.step} is intact: load {intact.path}"
        )
        raise contents.DamagedCheckpointError(f"{error}; {advice}") from error


_ON_DISK = (contents.DamagedCheckpointError, contents.RemovedCheckpointError)
"""Errors that are not of the process that has found them."""
_KINDS = {kind.__name__: kind for kind in (CheckpointError, contents.UnreadableCheckpointError, *_ON_DISK)}


def run_on_all_processes(
    processes: Processes,
    name: str,
    work: Callable[[], Any] = lambda: None,
    conclude: Callable[[Sequence[Any]], Any] = lambda _: None,
) -> Any:
    """Call ``work()`` in every process, then ``conclude`` in process 0 with what that returned in each; return its result in
    all. What they return must be JSON values, unless there is one process.

    Raises:
        CheckpointError: one of them raised anything; in all processes, in the same words. Of one process, what it raised.
    """
    if processes.number == 1:
        return conclude([work()])
    cause: BaseException | None = None
    message: dict[str, Any]
    try:
        message = {"value": work()}
    except Exception as error:
        cause, message = (
            error,
            _error_message(error, "" if isinstance(error, _ON_DISK) else f"{processes.who(processes.mine)}: "),
        )
    answer: dict[str, Any] = {}
    if answers := processes.gather(name, message):
        answer = next((one for one in answers if "kind" in one), answer)
        if not answer:
            try:
                answer = {"value": conclude([one["value"] for one in answers])}
            except Exception as error:
                cause, answer = error, _error_message(error)
    answer = processes.broadcast(name, answer)
    if "kind" in answer:
        kind = _KINDS.get(answer["kind"], CheckpointError)
        raise kind(answer["text"]) from cause
    return answer["value"]


def _error_message(error: Exception, who: str = "") -> dict[str, str]:
    text = str(error) if isinstance(error, CheckpointError) else contents.short_reason(error)
    return {"kind": type(error).__name__, "text": f"{who}{text}"}
