"""What a run writes down about itself: JSONL records, and TensorBoard if wanted. Also numbers as people read them.

:class:`MetricsLog` appends one JSON object a line at once, so a killed run loses nothing but a half-written line; resuming
drops what lies beyond the checkpoint, so each step is in the file once. Numbers that are not finite are written as null, since
JSON has no word for them. A disk that takes no more ends no run: records are left out, and the file stays readable.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from jaxpipe.errors import ConfigError, DataError
from jaxpipe.files import Closing


def format_gain(fraction: float) -> str:
    """``12.5% less``; ``3.0% more`` for a loss."""
    return f"{abs(fraction):.1%} {'less' if fraction >= 0 else 'more'}"


class MetricsLog(Closing):
    """Appends records to ``path``; a context manager.

    With ``resume_step`` the records of later steps, and a half-written last line, are dropped first; without it the file
    starts empty. It takes the place of a link at ``path``. ``tensorboard_dir``: also write scalars there. What can't be written
    is left out; ``warn`` is told once, in a line. Without a ``path`` nothing is written.

    Raises:
        DataError: what is there is not ours.
        ConfigError: TensorBoard is asked for and tensorboardX is not installed.
    """

    def __init__(
        self,
        path: str | Path | None,
        *,
        warn: Callable[[str], None],
        resume_step: int | None = None,
        tensorboard_dir: str | Path | None = None,
    ) -> None:
        self._path, self._warn, self._warned = None if path is None else Path(path), warn, set[str]()
        self._file: io.FileIO | None = None
        self._tensorboard: Any = None
        if tensorboard_dir is not None:
            require_tensorboard()
        try:
            if self._path is not None:
                self._file = _begin(self._path, resume_step)
            if tensorboard_dir is not None:
                self._tensorboard = _tensorboard_writer(Path(tensorboard_dir), resume_step)
        except OSError as error:
            self._complain("metrics", error)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Append ``{"step": step, **values}``. Values: numbers (NumPy and JAX scalars too), strings, None, lists of such."""
        assert "step" not in values, values
        record = {"step": int(step), **plain(values)}
        self._append((json.dumps(record, allow_nan=False) + "\n").encode())
        try:
            for key, value in record.items() if self._tensorboard is not None else ():
                if key != "step" and isinstance(value, (int, float)):
                    self._tensorboard.add_scalar(key, value, step)
        except Exception as error:  # whatever another package raises
            self._tensorboard = None
            self._complain("TensorBoard", error)

    def sync(self) -> None:
        """Bring to the disk what was written: a checkpoint saved after this is never without its records."""
        try:
            if self._file is not None:
                os.fsync(self._file.fileno())
        except OSError as error:
            self._complain("metrics", error)

    def close(self) -> None:
        try:
            if self._file is not None:
                self._file.close()
            if self._tensorboard is not None:
                self._tensorboard.close()
        except Exception as error:  # as in write
            self._complain("metrics", error)

    def _append(self, line: bytes) -> None:
        """Write a whole line or nothing."""
        if self._file is None:
            return
        end = self._file.tell()
        try:
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._complain("metrics", error)
            try:
                self._file.truncate(end)
                self._file.seek(end)
            except OSError:  # half a line stays, and nothing may follow it
                self._file = None

    def _complain(self, what: str, error: Exception) -> None:
        if what not in self._warned:
            self._warned.add(what)
            reason = getattr(error, "strerror", None) or error
            self._warn(
                f"warning: {what} ({self._path}) can't be written: {reason}; training goes on, records are missing"
            )


def read_metrics(path: str | Path) -> Iterator[dict[str, Any]]:
    """The records of a metrics file, in order; none if there is no file. A half-written last line is left out.

    Raises:
        DataError: a line before the last is not a record.
    """
    return (record for record, _ in _read(Path(path)))


def _read(path: Path) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Each record with its line. Holds one line at a time."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):  # half-written
                return
            try:
                record = json.loads(line, parse_constant=_no_number)
            except (ValueError, RecursionError):
                record = None
            if not isinstance(record, dict) or type(record.get("step")) is not int:
                raise DataError(f"metrics {path}: line {number} is not a record of a step; move the file away")
            yield record, line


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _begin(path: Path, resume_step: int | None) -> io.FileIO:
    """The file, open behind the records up to ``resume_step``. A crash leaves the old file or the new one."""
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


def require_tensorboard() -> Any:
    """The package that writes for TensorBoard.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import tensorboardX
    except ImportError:
        advice = "pip install tensorboardX, or set run.tensorboard=false (metrics.jsonl is written either way)"
        raise ConfigError(f"run.tensorboard=true needs the package tensorboardX: {advice}") from None
    return tensorboardX


def _tensorboard_writer(directory: Path, resume_step: int | None) -> Any:
    purge = None if resume_step is None else resume_step + 1
    return require_tensorboard().SummaryWriter(str(directory), purge_step=purge)
