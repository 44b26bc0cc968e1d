"""Checkpoints of a run: save without stopping it, keep the last few and the best, and load only what is intact.

A run's directory holds one folder per step, ``00000100/``, described in ``checkpoint_format``. Parameters and optimizer
state are stored by *layer* name, so a run may resume on another number of stages or ranks, and ``load_params`` needs no
pipeline at all. ``CheckpointStore.save`` copies the arrays to host memory and returns; a thread writes them to a
temporary folder ``00000100.tmp-<pid>`` and renames it when all of it is on disk. A kill at any moment leaves either the
whole checkpoint or a temporary folder, which is ignored and removed by the next save.

One writer at a time (a lock on the directory), any number of readers. All arrays must be addressable from this process.
"""

from __future__ import annotations

import fcntl
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import jax

from jaxpipe.errors import CheckpointError
from jaxpipe.train import checkpoint_format as form
from jaxpipe.train import checkpoint_tree as tree
from jaxpipe.train.checkpoint_format import DamagedCheckpointError, Manifest
from jaxpipe.train.checkpoint_tree import Placement, PyTree, Snapshot

_STEP_NAME = re.compile(r"\d{8,}")


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


@dataclass(frozen=True, slots=True)
class Intact:
    """The newest checkpoint whose files all match their checksums; ``step`` is None if there is none.

    ``warnings`` has one line for each newer checkpoint that was passed over, saying what is wrong with it.
    """

    step: int | None
    warnings: tuple[str, ...]


class CheckpointStore:
    """The checkpoints of one run in ``directory`` (made by the first save).

    The ``keep_last`` newest checkpoints are kept, and the ``keep_best`` of lowest finite ``eval_loss``; others are deleted
    after a save has succeeded. Use it as a context manager, or call ``close``: the end of a ``with`` block waits for the
    last save. Raises CheckpointError.
    """

    def __init__(self, directory: str | os.PathLike[str], *, keep_last: int = 3, keep_best: int = 1) -> None:
        if keep_last < 1:
            raise CheckpointError(f"keep_last is {keep_last}; at least 1 checkpoint must be kept")
        if keep_best < 0:
            raise CheckpointError(f"keep_best is {keep_best}; want how many of the best to keep, from 0")
        self.directory = Path(directory).absolute()
        self.keep_last = keep_last
        self.keep_best = keep_best
        self._writer: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None
        self._failure: CheckpointError | None = None  # of a save that is over; not told yet

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except CheckpointError as failed:
            if error is None:
                raise
            error.add_note(f"also: {failed}")

    def steps(self) -> tuple[int, ...]:
        """Steps with a checkpoint, ascending, damaged or not; temporary folders don't count."""
        try:
            names = [path.name for path in self.directory.iterdir() if path.is_dir()]
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise CheckpointError(f"checkpoint directory {self.directory} can't be read: {error.strerror}") from error
        return tuple(sorted(int(name) for name in names if _STEP_NAME.fullmatch(name)))

    def path(self, step: int) -> Path:
        """The folder of ``step``, which need not exist."""
        return self.directory / f"{step:08d}"

    def latest(self) -> int | None:
        """The newest step with a checkpoint, damaged or not; None if there is none."""
        return max(self.steps(), default=None)

    def latest_intact(self) -> Intact:
        """The newest checkpoint whose files match their checksums, for automatic resume. Reads the files whole.

        A run that goes on from it calls ``discard_after(step)`` first, so that newer damaged checkpoints give way.
        """
        warnings = []
        for step in reversed(self.steps()):
            try:
                form.verify(self.path(step))
            except DamagedCheckpointError as error:
                warnings.append(f"passed over step {step}: {error}")
            else:
                return Intact(step, tuple(warnings))
        return Intact(None, tuple(warnings))

    def best(self) -> int | None:
        """The step of lowest finite evaluation loss (the newest of equals); None if no checkpoint has one."""
        return next(iter(self._by_loss()), None)

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
        extra: Mapping[str, PyTree] | None = None,
    ) -> None:
        """Save ``{layer: pytree}`` of arrays and numbers with ``meta`` (JSON values) as the checkpoint of ``step``.

        Returns when the arrays are copied to host memory, or with ``wait`` when the checkpoint is on disk. Waits for the
        previous save first; if that one failed, its error is left for :meth:`poll`, and this save goes on. Saving the newest
        step again replaces it; a step older than the newest is refused (see ``discard_after``).

        Args:
            prune: delete what ``keep_last`` and ``keep_best`` don't keep; without it every older checkpoint stays.
            extra: more trees by name (averaged weights, say), which come back as ``Checkpoint.extra``.
        """
        self._outlast()
        if step < 0:
            raise CheckpointError(f"can't save step {step}; steps count from 0")
        newest = self.latest()
        if newest is not None and step < newest:
            raise CheckpointError(
                f"step {step} is older than the newest checkpoint ({newest}) in {self.directory}; resume from it, use "
                f"another directory, or give up the later steps with discard_after({step})"
            )
        trees = {"params": params, "optimizer": optimizer} | ({} if extra is None else {"extra": extra})
        groups = {group: tree.snapshot(group, content) for group, content in trees.items()}
        record = form.to_json_values(meta)
        loss = None if eval_loss is None else float(eval_loss)
        if self._writer is None:
            self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending = self._writer.submit(self._commit, step, loss, record, groups, prune)
        if wait:
            self.wait()

    def poll(self) -> CheckpointError | None:
        """The error of a save that has failed, given once; None while saves go well or are under way. Never waits.

        A failed save has changed nothing: the same step, or a later one, may be saved again.
        """
        if self._pending is not None and self._pending.done():
            self._outlast()
        failure, self._failure = self._failure, None
        return failure

    def wait(self) -> None:
        """Wait for the last save, if it is under way; raises CheckpointError if it failed and ``poll`` has not said so."""
        if self._pending is not None and not self._outlast():
            failure, self._failure = self._failure, None
            assert failure is not None
            raise failure

    def _outlast(self) -> bool:
        """Wait for the save under way; False if it failed, with its error kept. After Ctrl-C it is still under way."""
        try:
            if self._pending is not None:
                self._pending.result()
        except CheckpointError as error:
            self._failure = error
            return False
        finally:
            if self._pending is not None and self._pending.done():
                self._pending = None
        return True

    def close(self) -> None:
        """Wait for the save under way and end the thread; raises CheckpointError if the save failed."""
        try:
            self.wait()
        finally:
            if self._writer is not None:
                self._writer.shutdown()
                self._writer = None

    def discard_after(self, step: int) -> tuple[int, ...]:
        """Delete the checkpoints of steps after ``step``, for a run that goes on from there. Returns those steps."""
        self.wait()
        doomed = tuple(other for other in self.steps() if other > step)
        for other in doomed:
            form.remove(self.path(other))
        return doomed

    def load(
        self,
        step: int | None = None,
        *,
        like: Mapping[str, Mapping[str, PyTree]] | None = None,
        sharding: Placement | Mapping[str, Placement] | None = None,
    ) -> Checkpoint:
        """Load the checkpoint of ``step`` (the newest by default), verified.

        ``like`` is ``{"params": {layer: pytree}, "optimizer": {layer: pytree}, "extra": {name: pytree}}`` (or some of them)
        of arrays or ``ShapeDtypeStruct``: layers, paths, shapes and dtypes must match, and the result has its structure.
        Without it trees come back as dictionaries and lists. Arrays go where ``sharding`` says (for all, or by layer), else
        where the leaf of ``like`` is, else they are NumPy arrays.

        Raises CheckpointError in one line: no such checkpoint, damaged (names a step that is intact), or made for
        another model.
        """
        self.wait()
        step = self._existing(step)
        folder = self.path(step)
        with _advice(folder):
            manifest = form.read_manifest(folder)
            trees = {group: _load_group(folder, group, manifest, like, sharding) for group in form.GROUPS}
        return Checkpoint(step, **trees, meta=manifest.meta, eval_loss=manifest.eval_loss, path=folder)

    def _existing(self, step: int | None) -> int:
        steps = self.steps()
        if not steps:
            what = "is empty" if self.directory.is_dir() else "does not exist"
            raise CheckpointError(f"no checkpoint in {self.directory}: it {what}; train first, or correct the path")
        if step is not None and step not in steps:
            have = ", ".join(str(other) for other in steps)
            raise CheckpointError(f"no checkpoint of step {step} in {self.directory}; it has those of steps {have}")
        return steps[-1] if step is None else step

    def _commit(
        self, step: int, eval_loss: float | None, meta: dict[str, Any], groups: Mapping[str, Snapshot], prune: bool
    ) -> None:
        temporary = self.directory / f"{step:08d}.tmp-{os.getpid()}"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with _locked(self.directory):
                for leftover in self.directory.glob("*.tmp-*"):
                    form.remove(leftover)
                self._check_room(groups)
                try:
                    form.write(temporary, step, eval_loss, meta, groups)
                except BaseException:
                    form.remove(temporary)
                    raise
                form.put_in_place(temporary, self.path(step))
                if prune:
                    self._prune()
        except Exception as error:
            raise CheckpointError(
                f"can't save step {step} in {self.directory}: {form.reason(error)}; earlier checkpoints are as they were"
            ) from error

    def _check_room(self, groups: Mapping[str, Snapshot]) -> None:
        needed = sum(content.nbytes for content in groups.values())
        free = shutil.disk_usage(self.directory).free
        if free < needed:
            raise OSError(f"it needs {needed / 1e6:,.1f} MB and the disk has {free / 1e6:,.1f} MB free; make room")

    def _prune(self) -> None:
        steps = self.steps()
        kept = {*steps[-self.keep_last :], *self._by_loss()[: self.keep_best]}
        for step in steps:
            if step not in kept:
                form.remove(self.path(step))

    def _by_loss(self) -> list[int]:
        """Steps with a finite evaluation loss, the lowest first, of equals the newest."""
        losses = {}
        for step in self.steps():
            try:
                loss = form.read_manifest(self.path(step)).eval_loss
            except CheckpointError:  # damaged: not a candidate
                continue
            if loss is not None and math.isfinite(loss):
                losses[step] = loss
        return sorted(losses, key=lambda step: (losses[step], -step))


def load_params(
    path: str | os.PathLike[str],
    device: Placement | None = None,
    *,
    step: int | Literal["best"] | None = None,
    like: Mapping[str, PyTree] | None = None,
) -> dict[str, PyTree]:
    """Parameters alone, ``{layer: pytree}`` on one device (JAX's default one if None), without a pipeline.

    ``path`` is the folder of one checkpoint, or a run's directory; of a run, ``step`` or else the newest is taken. The
    optimizer state is neither read nor verified. ``like`` as ``{layer: pytree}`` fixes structure, shapes and dtypes, as
    in ``CheckpointStore.load``. Raises CheckpointError.
    """
    folder = find(path, step)
    target = jax.devices()[0] if device is None else device
    with _advice(folder):
        return _load_group(
            folder, "params", form.read_manifest(folder), None if like is None else {"params": like}, target
        )


def read_manifest(path: str | os.PathLike[str], step: int | Literal["best"] | None = None) -> Manifest:
    """A checkpoint without its arrays: step, ``meta``, evaluation loss, shapes and dtypes. ``path`` as in ``load_params``."""
    folder = find(path, step)
    with _advice(folder):
        return form.read_manifest(folder)


def find(path: str | os.PathLike[str], step: int | Literal["best"] | None = None) -> Path:
    """The folder of one checkpoint.

    ``path`` is that folder itself, a directory of checkpoints, or a run's directory with ``checkpoints/`` in it; of
    several, ``step`` ("best": the lowest evaluation loss), else the newest. Raises CheckpointError if there is none.
    """
    folder = Path(path).absolute()
    if step is None and (folder / form.SUMS).is_file():
        return folder
    store = CheckpointStore(folder)
    if not store.steps() and (folder / "checkpoints").is_dir():
        store = CheckpointStore(folder / "checkpoints")
    elif step is None and _STEP_NAME.fullmatch(folder.name) and not store.steps():
        store, step = CheckpointStore(folder.parent), int(folder.name)
    if step == "best":
        step = store.best()
        if step is None:
            raise CheckpointError(f"no checkpoint in {store.directory} has an evaluation loss; name a step instead")
    return store.path(store._existing(step))


@contextmanager
def _advice(folder: Path) -> Iterator[None]:
    """Complete the error about a damaged checkpoint with what to do: name one beside it that is intact."""
    try:
        yield
    except DamagedCheckpointError as error:
        store = CheckpointStore(folder.parent)
        intact = store.latest_intact().step
        advice = (
            "no other checkpoint beside it is intact: restore it from a copy, or start again in another directory"
            if intact is None
            else f"step {intact} is intact: load {store.path(intact)}, or delete {folder} to resume from there"
        )
        raise DamagedCheckpointError(f"{error}; {advice}") from error


def _load_group(
    folder: Path,
    group: str,
    manifest: Manifest,
    like: Mapping[str, Mapping[str, PyTree]] | None,
    sharding: Placement | Mapping[str, Placement] | None,
) -> dict[str, PyTree]:
    """Compare one group with ``like[group]``, verify and read it, and place its arrays."""
    layers, leaves = manifest.layers.get(group, ()), manifest.leaves.get(group, ())
    wanted = None if like is None else like.get(group)
    if wanted is not None and (problems := tree.differences(layers, leaves, wanted)):
        more = f" (and {len(problems) - 4} more)" if len(problems) > 4 else ""
        raise CheckpointError(
            f"checkpoint {folder} does not fit: {group}: {'; '.join(problems[:4])}{more}; use the model and optimizer "
            f"settings that it was saved with (under meta in its {form.MANIFEST}), or another checkpoint"
        )
    form.verify(folder, (group,))
    targets = {} if wanted is None else tree.targets_of(wanted)
    values = []
    for leaf, array in zip(leaves, form.read_arrays(folder, group, manifest), strict=True):
        where = sharding.get(leaf.layer) if isinstance(sharding, Mapping) else sharding
        values.append(tree.place(leaf, array, targets.get(leaf.key), where))
    return tree.build(layers, leaves, values) if wanted is None else tree.refill(wanted, leaves, values)


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """One writer at a time; the lock goes with the process that holds it. File systems without locks go without."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
