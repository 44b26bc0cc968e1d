"""Checkpoints of a run: save without stopping it, keep the last few and the best, and load only what is intact.

A run's directory holds one folder per step, ``00000100/``, described in :mod:`~jaxpipe.train.checkpoints.contents`;
:mod:`~jaxpipe.train.checkpoints.folders` says which folders count. Parameters and optimizer state are stored by *layer*
name, so a run may resume on another number of stages or ranks, and ``load_params`` needs no pipeline at all.
``CheckpointStore.save`` copies the arrays to host memory and returns; a thread writes them to a temporary folder
``00000100.tmp-<number>``, reads them back, and renames the folder when all of it is on disk. A kill at any moment leaves
either the whole checkpoint or a temporary folder, which is ignored and removed by the next save. Nothing else is ever
deleted but older checkpoints of the run, by a save that has succeeded.

Several processes of a run save together, each the layers whose arrays it has, on a file system that all see: each writes its
part, and the first one does the rest. Those that have the same layers (columns) write, and read, equal shares of them. Any
number of processes reads what any number has written, and each may read some layers.

One writer at a time (a lock on the directory), any number of readers.
"""

from __future__ import annotations

import fcntl
import math
import os
import secrets
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from jaxpipe.errors import CheckpointError
from jaxpipe.files import Closing, check_local
from jaxpipe.runtime.processes import Processes, SingleProcess
from jaxpipe.text import format_bytes
from jaxpipe.train.checkpoints import contents, folders
from jaxpipe.train.checkpoints.contents import DamagedCheckpointError
from jaxpipe.train.checkpoints.exchange import exchange, share_of_reading
from jaxpipe.train.checkpoints.folders import Intact, find, load_params, read_manifest
from jaxpipe.train.checkpoints.leaves import Placement, PyTree, Share, Snapshot, take_snapshot

__all__ = ["Checkpoint", "CheckpointStore", "Intact", "find", "load_params", "read_manifest"]

_Content: TypeAlias = tuple[float | None, dict[str, Any], Mapping[str, Snapshot]]
"""Evaluation loss, ``meta``, and the groups of trees."""
_Reading: TypeAlias = tuple[contents.Manifest, Path, Mapping[str, folders.GroupArrays]]
_ALONE = SingleProcess()
_Read = TypeVar("_Read")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A loaded checkpoint. ``params`` and ``optimizer`` are ``{layer: pytree}``; ``extra`` is ``{name: pytree}``, empty if
    none was saved; ``meta`` is what ``save`` was given, as JSON returns it (tuples are lists, keys are strings)."""

    step: int
    params: dict[str, PyTree]
    optimizer: dict[str, PyTree]
    meta: dict[str, Any]
    eval_loss: float | None
    path: Path
    extra: dict[str, PyTree]


class CheckpointStore(Closing):
    """The checkpoints of one run in ``directory`` (made by the first save).

    The ``keep_last`` newest checkpoints are kept, and the ``keep_best`` of lowest finite ``eval_loss``; others are deleted
    after a save has succeeded. Use it as a context manager, or call ``close``: the end of a ``with`` block waits for the
    last save. Raises CheckpointError.

    Of several ``processes`` all call ``save``, ``wait``, ``close``, ``latest_intact``, ``discard_after`` and ``load`` alike, in
    one order, and all get the same, also the same errors. What is to be kept or read, the settings here and the arguments, must
    be the same too, but for the layers, which are those of the row; ``meta`` and ``eval_loss`` are those of process 0. ``poll``
    then tells of a save only once another method has waited for it, so that it tells all at the same step.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep_last: int = 3,
        keep_best: int = 1,
        processes: Processes = _ALONE,
    ) -> None:
        if keep_last < 1:
            raise CheckpointError(f"keep_last is {keep_last}; at least 1 checkpoint must be kept")
        if keep_best < 0:
            raise CheckpointError(f"keep_best is {keep_best}; want how many of the best to keep, from 0")
        check_local(directory, "the folder of checkpoints")
        self.directory = Path(directory).absolute()
        self.keep_last = keep_last
        self.keep_best = keep_best
        self.processes = processes
        self._writer: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None
        self._failure: CheckpointError | None = None  # of a save that is over; not told yet

    def steps(self) -> tuple[int, ...]:
        """Return steps with a checkpoint, ascending, damaged or not."""
        return tuple(folder.step for folder in folders.list_checkpoints(self.directory))

    def path(self, step: int) -> Path:
        """Return the folder of ``step``, which need not exist."""
        return folders.folder_of(self.directory, step)

    def latest(self) -> int | None:
        """Return the newest step with a checkpoint, damaged or not; None if there is none."""
        return max(self.steps(), default=None)

    def latest_intact(self, before: int | None = None, *, by_manifest: bool = False) -> Intact:
        """Return the newest checkpoint (of a step below ``before``) whose files match their checksums. One process reads the
        files whole, unless ``by_manifest``: then that of each checkpoint alone, for one that is loaded next, which compares the
        rest. Raises CheckpointError if a newer one can't be read now, though it may be intact.

        A run that goes on from it calls ``discard_after(step)`` first, so that newer damaged checkpoints give way.
        """

        step, warnings = folders.run_on_all_processes(
            self.processes,
            "newest checkpoint",
            conclude=lambda _: astuple(folders.newest_intact(self.directory, before, by_manifest)),
        )
        return Intact(step, tuple(warnings))

    def best(self) -> int | None:
        """Return the step of lowest finite evaluation loss (the newest of equals); None if no checkpoint has one."""
        return next(iter(folders.steps_by_loss(folders.list_checkpoints(self.directory))), None)

    def save(
        self,
        step: int,
        params: Mapping[str, PyTree],
        optimizer: Mapping[str, PyTree],
        meta: Mapping[str, Any],
        eval_loss: float | None = None,
        wait: bool = False,
        *,
        prune: bool = True,
        spare: Collection[int] = (),
        extra: Mapping[str, PyTree] | None = None,
    ) -> None:
        """Save ``{layer: pytree}`` of arrays and numbers with ``meta`` (JSON values) as the checkpoint of ``step``.

        Returns when the arrays are copied to host memory, or with ``wait`` when the checkpoint is on disk. Waits for the
        previous save first; if that one failed, its error is left for :meth:`poll`, and this save goes on. Saving the newest
        step again replaces it; a step older than the newest is refused (see ``discard_after``). An ``eval_loss`` that is not
        finite is stored as none.

        Args:
            prune: delete what ``keep_last`` and ``keep_best`` don't keep, but the steps in ``spare``; without it every older
                checkpoint stays.
            extra: more trees by name (averaged weights, say), which come back as ``Checkpoint.extra``.
        """
        self._outlast()
        loss = float(eval_loss) if eval_loss is not None and math.isfinite(eval_loss) else None
        trees = {"params": params, "optimizer": optimizer} | ({} if extra is None else {"extra": extra})
        content: _Content | CheckpointError
        try:
            content = self._content(step, trees, loss, meta)
        except CheckpointError as error:
            if self.processes.number == 1:
                raise
            # Raising here would leave the others waiting in the writer's exchange: the error goes there, and comes of
            # it in all.
            content = error
        if self._writer is None:
            self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending = self._writer.submit(self._commit, step, content, frozenset(spare) if prune else None)
        if wait:
            self.wait()

    def poll(self) -> CheckpointError | None:
        """Return the error of a save that has failed, given once; None while saves go well or are under way. Never waits.

        A failed save has changed nothing: the same step, or a later one, may be saved again.
        """
        # A process would hear of its own failure at another step than the others: with several only a method that all
        # call tells.
        if self._pending is not None and self._pending.done() and self.processes.number == 1:
            self._outlast()
        failure, self._failure = self._failure, None
        return failure

    def wait(self) -> None:
        """Wait for the last save, if it is under way; raises CheckpointError if it failed and ``poll`` has not said so."""
        if error := self._outlast():
            self._failure = None
            raise error

    def _outlast(self) -> CheckpointError | None:
        """Wait for the save under way; its error, which is kept, if it failed. After Ctrl-C it is still under way."""
        error = None if self._pending is None else self._pending.exception()
        self._pending = None
        assert error is None or isinstance(error, CheckpointError)
        self._failure = error or self._failure
        return error

    def close(self) -> None:
        """Wait for the save under way and end the thread; raises CheckpointError if the save failed."""
        try:
            self.wait()
        finally:
            if self._writer is not None:
                self._writer.shutdown()
                self._writer = None

    def discard_after(self, step: int) -> tuple[str, ...]:
        """Make way for a run that goes on from ``step``: rename later checkpoints to ``NAME.damaged``, or ``NAME.superseded``
        where nothing is wrong with them. Returns a line for each. Nothing is deleted."""
        self.wait()

        def discard(_: Any) -> list[str]:
            lines = []
            for folder in folders.list_checkpoints(self.directory, after=step):
                try:
                    aside = folders.set_aside(folder.path, folder.error or folders.find_damage(folder.path))
                except OSError as error:
                    raise CheckpointError(
                        f"{folder.path} is in the way and can't be renamed: {error.strerror}"
                    ) from error
                lines.append(f"the checkpoint of step {folder.step} was set aside as {aside}")
            return lines

        return tuple(folders.run_on_all_processes(self.processes, "discard", conclude=discard))

    def load(
        self,
        step: int | None = None,
        *,
        like: Mapping[str, Mapping[str, PyTree]] | None = None,
        sharding: Placement | Mapping[str, Placement] | None = None,
        layers: Collection[str] | None = None,
    ) -> Checkpoint:
        """Load the checkpoint of ``step`` (the newest by default), verified.

        ``like`` is ``{"params": {layer: pytree}, "optimizer": {layer: pytree}, "extra": {name: pytree}}`` (or some of them)
        of arrays or ``ShapeDtypeStruct``: layers, paths, shapes and dtypes must match, and the result has its structure.
        Without it trees come back as dictionaries and lists. Arrays go where ``sharding`` says (for all, or by layer), else
        where the leaf of ``like`` is, else they are NumPy arrays. ``layers``: of parameters and optimizer state only these are
        read and returned; ``like`` is compared whole all the same.

        Raises CheckpointError in one line: no such checkpoint, damaged (names a step that is intact), or made for
        another model.
        """
        self.wait()
        if self.processes.number > 1:
            step = folders.run_on_all_processes(
                self.processes, "step", conclude=lambda _: folders.step_of(folders.pick(self.directory, step))
            )
        readings: list[_Reading] = []
        loaded: list[Checkpoint] = []

        def read() -> list[str]:
            read_one = partial(_read_groups, like=like, layers=layers, share=share_of_reading(self.processes))
            readings.append(folders.reading(partial(folders.pick, self.directory, step), read_one))
            return [place for group in readings[0][-1].values() for place in group.places]

        def compare_rest(places_of_process: Sequence[Sequence[str]]) -> None:
            # What is not asked for is not read; several processes ask for all that there is.
            if layers is None or self.processes.number > 1:
                places = {place for places in places_of_process for place in places}
                with suppress(contents.RemovedCheckpointError):  # by then all arrays have been compared
                    folders.reading(lambda: readings[0][1], partial(contents.verify_files, places=places))

        def place() -> None:
            manifest, folder, groups = readings[0]
            exchange(list(groups.values()), self.processes)
            trees = {name: group.place(sharding) for name, group in groups.items()}
            loaded.append(
                Checkpoint(manifest.step, **trees, meta=manifest.meta, eval_loss=manifest.eval_loss, path=folder)
            )

        # Apart: nothing is exchanged unless all have read what is theirs.
        folders.run_on_all_processes(self.processes, "read", read, compare_rest)
        folders.run_on_all_processes(self.processes, "load", place)
        return loaded[0]

    def _content(
        self, step: int, trees: Mapping[str, Mapping[str, PyTree]], loss: float | None, meta: Mapping[str, Any]
    ) -> _Content:
        if step < 0:
            raise CheckpointError(f"can't save step {step}; steps count from 0")
        if self.processes.mine == 0 and (newer := folders.list_checkpoints(self.directory, after=step)):
            raise CheckpointError(
                f"step {step} is older than the newest checkpoint ({newer[-1].step}) in {self.directory}; resume from it, use "
                f"another directory, or give up the later steps with discard_after({step})"
            )
        share = self.processes.column, self.processes.columns
        groups = {group: take_snapshot(group, content, share) for group, content in trees.items()}
        return loss, contents.strict_json(meta), groups

    def _commit(self, step: int, content: _Content | CheckpointError, spare: frozenset[int] | None) -> None:
        """Write the checkpoint; runs in the writer's thread of every process."""
        processes = self.processes

        def size() -> int:
            if isinstance(content, CheckpointError):
                raise content
            return sum(group.nbytes for group in content[-1].values())

        def begin(sizes: Sequence[int]) -> str:
            self.directory.mkdir(parents=True, exist_ok=True)
            held.enter_context(folders.lock_folder(self.directory, fcntl.LOCK_EX))  # one writer at a time
            folders.remove_leftovers(self.directory)
            self._check_room(sum(sizes))
            return f"{step:08d}.tmp-{secrets.randbelow(10**9)}"  # process numbers repeat over hosts

        def write() -> None:
            assert not isinstance(content, CheckpointError)
            contents.write_checkpoint(
                temporary if processes.number == 1 else contents.part_of(temporary, processes.mine), step, *content
            )

        def finish(_: Any) -> None:
            if processes.number > 1:
                contents.join_parts(temporary, processes.number)
            folders.put_in_place(temporary, self.path(step))
            if spare is not None:
                self._prune(spare)

        try:
            with ExitStack() as held:
                temporary = self.directory / folders.run_on_all_processes(processes, "checkpoint: begin", size, begin)
                try:
                    folders.run_on_all_processes(processes, "checkpoint: finish", write, finish)
                except BaseException:
                    if processes.mine == 0:
                        folders.remove_folder(temporary)
                    raise
        except Exception as error:
            raise CheckpointError(
                f"can't save step {step} in {self.directory}: {contents.short_reason(error)}; earlier checkpoints are as they "
                "were"
            ) from error

    def _check_room(self, size: int) -> None:
        free = shutil.disk_usage(self.directory).free
        if free < size:
            raise OSError(f"it needs {format_bytes(size)} and the disk has {format_bytes(free)} free; make room")

    def _prune(self, spare: frozenset[int]) -> None:
        """Delete the checkpoints that are not to be kept, nor in ``spare``. What is damaged, or can't be read now, is
        neither counted nor deleted."""
        # A damaged checkpoint is not among those that are kept: it would push out one that is intact.
        readable = [folder for folder in folders.list_checkpoints(self.directory) if folder.manifest is not None]
        steps_to_keep = {
            *spare,
            *(folder.step for folder in readable[-self.keep_last :]),
            *folders.steps_by_loss(readable)[: self.keep_best],
        }
        for folder in readable:
            if folder.step not in steps_to_keep:
                folders.remove_folder(folder.path)


def _read_groups(
    folder: Path, like: Mapping[str, Mapping[str, PyTree]] | None, layers: Collection[str] | None, share: Share
) -> _Reading:
    manifest = contents.read_manifest_of(folder)
    only = dict.fromkeys(contents.NEEDED, layers)  # extra trees are not of layers
    groups = {
        group: folders.read_group(folder, group, manifest, like, only.get(group), share) for group in contents.GROUPS
    }
    return manifest, folder, groups


def newest(
    store: CheckpointStore, warn: Callable[[str], None], before: int | None = None, *, by_manifest: bool = True
) -> int | None:
    """Return the newest intact step, of those below ``before``; None if there is no checkpoint. ``warn`` is told of each
    damaged one passed over. ``by_manifest``: its files are compared when it is loaded (:func:`undamaged`).

    Raises:
        CheckpointError: none is intact, or a newer one can't be read now.
    """
    intact = store.latest_intact(before, by_manifest=by_manifest)
    if intact.step is None and intact.warnings:
        raise CheckpointError(
            f"{store.directory}: no checkpoint is intact ({'; '.join(intact.warnings)}); choose another directory"
        )
    for warning in intact.warnings:
        warn(warning)
    return intact.step


def undamaged(store: CheckpointStore, step: int, read: Callable[[int], _Read], warn: Callable[[str], None]) -> _Read:
    """``read(step)``; where its files or arrays are damaged, that of the newest intact one below its step, of which ``warn``
    is told.

    Raises:
        CheckpointError: as ``read``; DamagedCheckpointError where there is no older one.
    """
    while True:
        try:
            return read(step)
        except DamagedCheckpointError as error:
            before = newest(store, warn, step)
            if before is None:
                raise
            warn(f"passed over step {step}: {error.__cause__ or error}")
            step = before
