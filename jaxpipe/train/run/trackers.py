"""Where a run's numbers go beside ``metrics.jsonl``: TensorBoard, Weights & Biases, trackio, or a tracker of one's own.

An installed package adds one by an entry point of the group ``jaxpipe.trackers``: a name, and a function like
:data:`TrackerFactory`. Libraries are imported when their tracker is named. Their variables hold (``WANDB_MODE``,
``WANDB_PROJECT``, ``TRACKIO_DIR``, …); the project is jaxpipe, and the run has the name of its directory. A run that goes on
from an earlier step hands on the steps in between once more: TensorBoard drops the old ones, wandb and trackio keep theirs.
"""

from __future__ import annotations

import importlib
import os
import secrets
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol

from jaxpipe.errors import ConfigError, short_message

GROUP = "jaxpipe.trackers"


class Tracker(Protocol):
    """Is told numbers by name after a step; steps increase. What it raises costs the run a line, and the tracker."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


TrackerFactory = Callable[[Path, Mapping[str, Any], int | None], Tracker]
"""Of the run directory, the settings by section, and the step that the run goes on from, if it does."""


def find_trackers(names: Iterable[str]) -> dict[str, TrackerFactory]:
    """What makes each tracker. ``jsonl`` is left out: ``metrics.jsonl`` is written in any case.

    Raises:
        ConfigError: there is no such tracker, or its package is not installed.
    """
    return {name: _find(name) for name in dict.fromkeys(names) if name != "jsonl"}


def _find(name: str) -> TrackerFactory:
    if name in _OURS:
        package, factory = _OURS[name]
        try:
            importlib.import_module(package)
        except ImportError:
            raise ConfigError(
                f"run.trackers names {name}, which needs the package {package}: pip install {package}, or leave it out "
                "(metrics.jsonl is written either way)"
            ) from None
        return factory
    installed = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name not in installed:
        known = ", ".join(["jsonl", *_OURS, *sorted(installed)])
        raise ConfigError(
            f"run.trackers names {name!r}; there are {known}; a package adds its own by an entry point {GROUP}"
        )
    try:
        made: TrackerFactory = installed[name].load()
    except Exception as error:
        raise ConfigError(
            f"run.trackers names {name}, which can't be loaded: {short_message(error)}; mend it or leave it out"
        ) from error
    return made


class _TensorBoard:
    def __init__(self, folder: Path, settings: Mapping[str, Any], resume_step: int | None) -> None:
        purge = None if resume_step is None else resume_step + 1
        self._writer = importlib.import_module("tensorboardX").SummaryWriter(
            str(folder / "tensorboard"), purge_step=purge
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Session:
    """What wandb and trackio have in common: functions of the run that ``init`` began."""

    def __init__(self, package: str, folder: Path, settings: Mapping[str, Any], **more: Any) -> None:
        self._library = importlib.import_module(package)
        project = os.environ.get(f"{package.upper()}_PROJECT", "jaxpipe")
        self._library.init(project=project, name=folder.name, config=dict(settings), **more)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._library.log(dict(values), step=step)

    def close(self) -> None:
        self._library.finish()


def _wandb(folder: Path, settings: Mapping[str, Any], resume_step: int | None) -> Tracker:
    """The id in the run directory is that of the wandb run which later starts go on with."""
    kept = folder / "wandb.id"
    if resume_step is None or not kept.exists():
        kept.write_text(secrets.token_hex(8), encoding="utf-8")
    run_id = kept.read_text(encoding="utf-8")
    return _Session("wandb", folder, settings, dir=str(folder), id=run_id, resume="allow")


def _trackio(folder: Path, settings: Mapping[str, Any], resume_step: int | None) -> Tracker:
    return _Session("trackio", folder, settings, resume="never" if resume_step is None else "allow")


_OURS: Mapping[str, tuple[str, TrackerFactory]] = {
    "tensorboard": ("tensorboardX", _TensorBoard),
    "wandb": ("wandb", _wandb),
    "trackio": ("trackio", _trackio),
}
