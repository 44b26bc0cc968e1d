"""Write a run's metrics: as JSONL records, to trackers, and as people read them.

:class:`MetricsLog` appends one JSON object a line at once, so a killed run loses nothing but a half-written line; resuming
drops what lies beyond the checkpoint, so each step is in the file once. Numbers that are not finite are written as null, since
JSON has no word for them. A disk that takes no more ends no run: records are left out, and the file stays readable.

Trackers are TensorBoard, Weights & Biases, trackio, or a user's own: an installed package adds one by an entry point of the
group ``jaxpipe.trackers``, a name and a function like :data:`TrackerFactory`. Libraries are imported when their tracker is
named. Their variables hold (``WANDB_MODE``, ``WANDB_PROJECT``, ``TRACKIO_DIR``, …); the project is jaxpipe, and the run has the
name of its directory. A run that goes on from an earlier step hands on the steps in between once more: TensorBoard drops the
old ones, wandb and trackio keep theirs.
"""

from __future__ import annotations

import errno
import importlib
import io
import json
import math
import os
import secrets
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from importlib.metadata import entry_points
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from jaxpipe.errors import ConfigError, DataError, short_message
from jaxpipe.files import Closing, no_constant

GROUP = "jaxpipe.trackers"


class Tracker(Protocol):
    """Is told numbers by name after a step; steps increase. What it raises costs the run a line, and the tracker."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


TrackerFactory = Callable[[Path, Mapping[str, Any], int | None], Tracker]
"""A function of the run directory, the settings by section, and the step that the run goes on from, if it does."""


def find_trackers(names: Iterable[str]) -> dict[str, TrackerFactory]:
    """Return what makes each tracker. ``jsonl`` is left out: ``metrics.jsonl`` is written in any case.

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
        names = ", ".join(["jsonl", *_OURS, *sorted(installed)])
        raise ConfigError(
            f"run.trackers names {name!r}; there are {names}; a package adds its own by an entry point {GROUP}"
        )
    try:
        loaded: TrackerFactory = installed[name].load()
    except Exception as error:
        raise ConfigError(
            f"run.trackers names {name}, which can't be loaded: {short_message(error)}; mend it or leave it out"
        ) from error
    return loaded


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
    """Logs to wandb or trackio, which both have functions of the run that ``init`` began."""

    def __init__(self, package: str, folder: Path, settings: Mapping[str, Any], **options: Any) -> None:
        self._library = importlib.import_module(package)
        project = os.environ.get(f"{package.upper()}_PROJECT", "jaxpipe")
        self._library.init(project=project, name=folder.name, config=dict(settings), **options)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._library.log(dict(values), step=step)

    def close(self) -> None:
        self._library.finish()


def _wandb(folder: Path, settings: Mapping[str, Any], resume_step: int | None) -> Tracker:
    """Return the id in the run directory is that of the wandb run which later starts go on with."""
    id_file = folder / "wandb.id"
    if resume_step is None or not id_file.exists():
        id_file.write_text(secrets.token_hex(8), encoding="utf-8")
    run_id = id_file.read_text(encoding="utf-8")
    return _Session("wandb", folder, settings, dir=str(folder), id=run_id, resume="allow")


def _trackio(folder: Path, settings: Mapping[str, Any], resume_step: int | None) -> Tracker:
    return _Session("trackio", folder, settings, resume="never" if resume_step is None else "allow")


_OURS: Mapping[str, tuple[str, TrackerFactory]] = {
    "tensorboard": ("tensorboardX", _TensorBoard),
    "wandb": ("wandb", _wandb),
    "trackio": ("trackio", _trackio),
}


def format_gain(fraction: float) -> str:
    """``12.5% less``; ``3.0% more`` for a loss."""
    return f"{abs(fraction):.1%} {'less' if fraction >= 0 else 'more'}"


class MetricsLog(Closing):
    """Appends records to ``path``; a context manager.

    With ``resume_step`` the records of later steps, and a half-written last line, are dropped first; without it the file
    starts empty. It takes the place of a link at ``path``. ``trackers``: what makes each, by name; they are told every number.
    What can't be written is left out; ``warn`` is told once, in a line. Without a ``path`` nothing is written or told.

    Raises:
        DataError: what is there is not ours.
    """

    def __init__(
        self,
        path: str | Path | None,
        *,
        warn: Callable[[str], None],
        resume_step: int | None = None,
        trackers: Mapping[str, Callable[[], Tracker]] = MappingProxyType({}),
    ) -> None:
        self._path, self._warn, self._warned = None if path is None else Path(path), warn, False
        self._file: io.FileIO | None = None
        self._trackers: dict[str, Tracker] = {}
        if self._path is None:
            return
        try:
            self._file = _begin(self._path, resume_step)
        except OSError as error:
            self._complain(error)
        for name, start in trackers.items():
            with self._tracking(name):
                self._trackers[name] = start()

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Append ``{"step": step, **values}``. Values: numbers (NumPy and JAX scalars too), strings, None, lists of such."""
        assert "step" not in values, values
        record = {"step": int(step), **plain(values)}
        self._append((json.dumps(record, allow_nan=False) + "\n").encode())
        numbers = {key: x for key, x in record.items() if key != "step" and isinstance(x, (int, float))}
        for name, tracker in list(self._trackers.items()):
            with self._tracking(name):
                tracker.log(int(step), numbers)

    def sync(self) -> None:
        """Bring to the disk what was written: a checkpoint saved after this is never without its records."""
        try:
            if self._file is not None:
                os.fsync(self._file.fileno())
        except OSError as error:
            self._complain(error)

    def close(self) -> None:
        try:
            if self._file is not None:
                self._file.close()
        except OSError as error:
            self._complain(error)
        for name, tracker in list(self._trackers.items()):
            with self._tracking(name):
                tracker.close()

    def _append(self, line: bytes) -> None:
        """Write a whole line or nothing."""
        if self._file is None:
            return
        end = self._file.tell()
        try:
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._complain(error)
            try:
                self._file.truncate(end)
                self._file.seek(end)
            # Half a line stays, and nothing may follow it: a reader takes a last line without its end for one being
            # written.
            except OSError:
                self._file = None

    @contextmanager
    def _tracking(self, name: str) -> Iterator[None]:
        """A tracker that fails inside the block is told, and left out from then on. What it prints is no result of the run."""
        try:
            with redirect_stdout(sys.stderr):
                yield
        except Exception as error:  # whatever another package raises
            self._trackers.pop(name, None)
            self._warn(f"warning: tracker {name} failed: {short_message(error)}; training goes on without it")

    def _complain(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            reason = error.strerror or error
            self._warn(
                f"warning: metrics ({self._path}) can't be written: {reason}; training goes on, records are missing"
            )


def read_metrics(path: str | Path) -> Iterator[dict[str, Any]]:
    """Return the records of a metrics file, in order; none if there is no file. A half-written last line is left out.

    Raises:
        DataError: a line before the last is not a record.
    """
    return (record for record, _ in _read(Path(path)))


def _read(path: Path) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Yield each record with its line. Holds one line at a time."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):  # half-written
                return
            try:
                record = json.loads(line, parse_constant=no_constant)
            except (ValueError, RecursionError):
                record = None
            if not isinstance(record, dict) or type(record.get("step")) is not int:
                raise DataError(f"metrics {path}: line {number} is not a record of a step; move the file away")
            yield record, line


def _begin(path: Path, resume_step: int | None) -> io.FileIO:
    """Return the file, open behind the records up to ``resume_step``. A crash leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".new")
    temporary.unlink(missing_ok=True)  # of a process that was killed, or a link
    file = io.FileIO(temporary, "x")
    try:
        lines = io.BufferedWriter(file)
        for record, line in _read(path) if resume_step is not None else ():
            if record["step"] <= resume_step:
                lines.write(line)
        lines.detach()
        os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        file.close()
        temporary.unlink(missing_ok=True)
        raise
    return file


def plain(value: Any) -> Any:
    """``value`` in types that JSON has; numbers that are not finite become None."""
    if isinstance(value, (str, bool, int, type(None))):
        return value
    if isinstance(value, Mapping):
        return {key: plain(x) for key, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(x) for x in value]
    if hasattr(value, "tolist"):  # NumPy and JAX
        return plain(value.tolist())
    return float(value) if math.isfinite(value) else None
