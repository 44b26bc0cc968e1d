"""Reading one checkpoint: which one a path means, and its trees, verified and placed. Needs no run and no pipeline.

A run does not remove a checkpoint that is being read (a lock on its folder), but may do so just before. Where the newest or the
best was asked for, the one that is so by then is read instead.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar

import jax

from jaxpipe.errors import CheckpointError
from jaxpipe.files import check_local
from jaxpipe.train.checkpoints import directory as shelf
from jaxpipe.train.checkpoints import format as form
from jaxpipe.train.checkpoints import tree
from jaxpipe.train.checkpoints.format import DamagedCheckpointError, RemovedCheckpointError
from jaxpipe.train.checkpoints.manifest import Manifest
from jaxpipe.train.checkpoints.tree import Leaf, Placement, PyTree

StepName: TypeAlias = int | Literal["best"] | None
"""A step, the one of lowest evaluation loss, or the newest."""
_Read = TypeVar("_Read")
_TRIES = 20


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
    wanted = None if like is None else {"params": like}
    return reading(
        partial(find, path, step),
        lambda folder: load_group(folder, "params", form.read_manifest(folder), wanted, target),
    )


def read_manifest(path: str | os.PathLike[str], step: StepName = None) -> Manifest:
    """A checkpoint without its arrays: step, ``meta``, evaluation loss, shapes and dtypes. ``path`` as in ``load_params``."""
    return reading(partial(find, path, step), form.read_manifest)


def find(path: str | os.PathLike[str], step: StepName = None) -> Path:
    """The folder of one checkpoint.

    ``path`` is that folder itself, a directory of checkpoints, or a run's directory with ``checkpoints/`` in it; of
    several, ``step`` ("best": the lowest evaluation loss), else the newest. Raises CheckpointError if there is none, and
    ConfigError for a URL.
    """
    check_local(path, "checkpoint")
    folder = Path(path).absolute()
    if step is None and (folder / form.SUMS).is_file():
        return folder
    if not shelf.checkpoints(folder):
        if (folder / "checkpoints").is_dir():
            return pick(folder / "checkpoints", step)
        if step is None and shelf.step_of(folder) is not None:
            return pick(folder.parent, shelf.step_of(folder))
    return pick(folder, step)


def pick(directory: Path, step: StepName) -> Path:
    """The folder of one of the checkpoints in ``directory``. Raises CheckpointError if there is none."""
    there = shelf.scan(directory)
    found = [each for each in there if each.counts]
    if not found:
        what = "; ".join(str(each.error) for each in there)
        if not directory.is_dir():
            what = "it does not exist"
        elif not there:
            what = "it has none" if any(directory.iterdir()) else "it is empty"
        raise CheckpointError(f"no checkpoint in {directory}: {what}; train first, or correct the path")
    if step == "best":
        step = next(iter(shelf.by_loss(found)), None)
        if step is None:
            raise CheckpointError(f"no checkpoint in {directory} has an evaluation loss; name a step instead")
    steps = [each.step for each in found]
    if step is not None and step not in steps:
        have = ", ".join(str(other) for other in steps)
        raise CheckpointError(f"no checkpoint of step {step} in {directory}; it has those of steps {have}")
    return shelf.folder_of(directory, steps[-1] if step is None else step)


def reading(where: Callable[[], Path], read: Callable[[Path], _Read]) -> _Read:
    """``read(where())``; again, with what ``where`` finds then, if that checkpoint was removed meanwhile.

    Raises:
        RemovedCheckpointError: the one that was named is gone, or they go faster than they can be read.
        DamagedCheckpointError: names one beside it that is intact.
    """
    folder = where()
    for _ in range(_TRIES):
        try:
            with _advice(folder), shelf.locked(folder, fcntl.LOCK_SH), form.watched(folder):
                return read(folder)
        except RemovedCheckpointError as error:
            removed = error
        try:
            folder = where()
        except CheckpointError:
            break
    raise removed


def load_group(
    folder: Path,
    group: str,
    manifest: Manifest,
    like: Mapping[str, Mapping[str, PyTree]] | None,
    sharding: Placement | Mapping[str, Placement] | None,
    only: Collection[str] | None = None,
) -> dict[str, PyTree]:
    """Compare one group with ``like[group]``, verify and read it, and place its arrays; of the layers ``only``, if given.

    Raises CheckpointError.
    """
    layers: Sequence[str] = manifest.layers.get(group, ())
    leaves: Sequence[Leaf] = manifest.leaves.get(group, ())
    wanted = None if like is None else like.get(group)
    if wanted is not None and (problems := tree.differences(layers, leaves, wanted)):
        more = f" (and {len(problems) - 4} more)" if len(problems) > 4 else ""
        raise CheckpointError(
            f"checkpoint {folder} does not fit: {group}: {'; '.join(problems[:4])}{more}; use the model and optimizer "
            f"settings that it was saved with (under meta in its {form.MANIFEST}), or another checkpoint"
        )
    if only is not None:
        layers, leaves = [x for x in layers if x in only], [leaf for leaf in leaves if leaf.layer in only]
        wanted = wanted and {layer: content for layer, content in wanted.items() if layer in only}
    form.verify(folder, (group,), {leaf.part for leaf in leaves})
    targets = {} if wanted is None else tree.targets_of(wanted)
    values = []
    for leaf, array in zip(leaves, form.read_arrays(folder, group, leaves, some=only is not None), strict=True):
        where = sharding.get(leaf.layer) if isinstance(sharding, Mapping) else sharding
        values.append(tree.place(leaf, array, targets.get(leaf.key), where))
    return tree.build(layers, leaves, values) if wanted is None else tree.refill(wanted, leaves, values)


@contextmanager
def _advice(folder: Path) -> Iterator[None]:
    """Complete the error about a damaged checkpoint with what to do: name another one beside it that is intact."""
    try:
        yield
    except DamagedCheckpointError as error:
        others = (found for found in reversed(shelf.checkpoints(folder.parent)) if found.path != folder)
        intact = next((f for f in others if f.error is None and shelf.damage(f.path) is None), None)
        advice = (
            "no other checkpoint beside it is intact: restore it from a copy, or start again in another directory"
            if intact is None
            else f"step {intact.step} is intact: load {intact.path}"
        )
        raise DamagedCheckpointError(f"{error}; {advice}") from error
