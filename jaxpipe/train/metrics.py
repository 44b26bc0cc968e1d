"""What a run says about itself: JSONL records, TensorBoard if wanted, and one live line for a person.

:class:`MetricsLog` appends one JSON object a line and flushes it, so a killed run loses nothing but a half-written line;
resuming drops what lies beyond the checkpoint, so each step is in the file once. Numbers that are not finite are written
as null, since JSON has no word for them. :class:`LiveLine` refreshes one line on a terminal and prints plain lines elsewhere.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from jaxpipe.errors import ConfigError, DataError


def format_bytes(num_bytes: float) -> str:
    """``1.5 MiB``; three significant digits, binary units."""
    value, unit = float(num_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if abs(value) < 999.5 or unit == "PiB":
            break
        value /= 1024
    return f"{value:.0f} B" if unit == "B" else f"{value:.3g} {unit}"


def format_seconds(seconds: float) -> str:
    """``850 µs``, ``12.5 ms``, ``3.2 s``, ``4m05s``, ``2h03m``, ``3d04h``; ``?`` if not finite."""
    if not math.isfinite(seconds):
        return "?"
    if seconds < 59.95:
        for scale, unit in ((1e-6, "µs"), (1e-3, "ms")):
            if 0 < seconds < 999.5 * scale:
                return f"{seconds / scale:.3g} {unit}"
        return f"{seconds:.3g} s"
    whole = round(seconds)
    for big, small, units in ((60, 1, "ms"), (3600, 60, "hm"), (86400, 3600, "dh")):
        if whole < big * (24 if units == "hm" else 60) or units == "dh":
            return f"{whole // big}{units[0]}{whole % big // small:02d}{units[1]}"
    raise AssertionError


def format_count(count: float) -> str:
    """``950``, ``12.3k``, ``4.56M``; three significant digits."""
    value = float(count)
    for unit in ("", "k", "M", "G", "T"):
        if abs(value) < 999.5 or unit == "T":
            return f"{value:.3g}{unit}"
        value /= 1000
    raise AssertionError


def format_gain(fraction: float) -> str:
    """``12.5% less``; ``3.0% more`` for a loss."""
    return f"{abs(fraction):.1%} {'less' if fraction >= 0 else 'more'}"


class MetricsLog:
    """Appends records to ``path``; a context manager.

    With ``resume_step`` the records of later steps, and a half-written last line, are dropped first; without it the file
    starts empty. ``tensorboard_dir``: also write scalars there.

    Raises:
        DataError: the file can't be written, or what is there is not ours.
        ConfigError: TensorBoard is asked for and tensorboardX is not installed.
    """

    def __init__(
        self, path: str | Path, *, resume_step: int | None = None, tensorboard_dir: str | Path | None = None
    ) -> None:
        self._path = Path(path)
        self._tensorboard = None if tensorboard_dir is None else _tensorboard_writer(Path(tensorboard_dir), resume_step)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            kept = [] if resume_step is None else [r for r in read_metrics(self._path) if r["step"] <= resume_step]
            _write_whole(self._path, kept)
            self._file = self._path.open("a", encoding="utf-8")
        except OSError as error:
            raise DataError(f"metrics {self._path}: can't be written ({error.strerror})") from None

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Append ``{"step": step, **values}``. Values: numbers (NumPy and JAX scalars too), strings, None, lists of such.

        Raises:
            DataError: the disk is full or gone.
        """
        assert "step" not in values, values
        record = {"step": int(step), **{key: _jsonable(value) for key, value in values.items()}}
        try:
            self._file.write(json.dumps(record, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise DataError(f"metrics {self._path}: can't be written ({error.strerror})") from None
        if self._tensorboard is not None:
            for key, value in record.items():
                if key != "step" and isinstance(value, (int, float)):
                    self._tensorboard.add_scalar(key, value, step)

    def close(self) -> None:
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_metrics(path: str | Path) -> Iterator[dict[str, Any]]:
    """The records of a metrics file, in order; none if there is no file. A half-written last line is left out.

    Raises:
        DataError: a line before the last is not a record.
    """
    path = Path(path)
    lines = path.read_bytes().split(b"\n") if path.exists() else [b""]
    for number, line in enumerate(lines[:-1], start=1):  # what follows the last newline is empty or half-written
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict) or type(record.get("step")) is not int:
            raise DataError(f"metrics {path}: line {number} is not a record of a step; move the file away")
        yield record


def _write_whole(path: Path, records: list[dict[str, Any]]) -> None:
    """Replace the file at once, so that a crash leaves the old one or the new one."""
    temporary = path.with_name(path.name + ".new")
    temporary.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    temporary.replace(path)


def _jsonable(value: Any) -> Any:
    if isinstance(value, (str, bool, int, type(None))):
        return value
    if isinstance(value, (list, tuple)):
        return [_jsonable(x) for x in value]
    if hasattr(value, "tolist"):  # NumPy and JAX
        return _jsonable(value.tolist())
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


class LiveLine:
    """Progress for a person: step, loss, tokens/s, bubble predicted and measured, peak memory, time left.

    On a terminal one line is rewritten at each update; elsewhere a line is printed every ``every`` steps, and at the last.
    Step time is a moving average that leaves out the first step, which compiles.
    """

    def __init__(
        self,
        steps: int,
        stream: TextIO,
        *,
        every: int = 10,
        start: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._steps, self._stream, self._every, self._clock = steps, stream, every, clock
        self._live = stream.isatty() and os.environ.get("TERM") != "dumb"
        self._done, self._last_s, self._step_s, self._drawn = start, clock(), math.nan, 0
        self._first = start

    def update(
        self,
        step: int,
        *,
        loss: float,
        tokens: int,
        bubble_predicted: float | None = None,
        bubble_measured: float | None = None,
        peak_bytes: float | None = None,
        extra: str = "",
    ) -> None:
        """``step`` steps are done; ``tokens``: of one step; bubbles as fractions; ``extra``: shown at the end."""
        now = self._clock()
        taken_s = (now - self._last_s) / max(1, step - self._done)
        if self._done > self._first:
            self._step_s = taken_s if math.isnan(self._step_s) else 0.9 * self._step_s + 0.1 * taken_s
        self._done, self._last_s = step, now
        if not self._live and step % self._every and step != self._steps:
            return
        step_s = taken_s if math.isnan(self._step_s) else self._step_s
        parts = [f"step {step}/{self._steps}", f"loss {loss:.4f}", f"{format_count(tokens / max(step_s, 1e-9))} tok/s"]
        if bubble_predicted is not None:
            measured = "" if bubble_measured is None else f" → {bubble_measured:.1%} measured"
            parts.append(f"bubble {bubble_predicted:.1%} predicted{measured}")
        if peak_bytes is not None:
            parts.append(f"peak {format_bytes(peak_bytes)}")
        parts += [extra] if extra else []
        parts += [f"{format_seconds((self._steps - step) * step_s)} left"] if step < self._steps else []
        self._show("  ".join(parts))

    def note(self, text: str) -> None:
        """Print a line of its own (an evaluation, a checkpoint, a warning) above the live one."""
        self._clear()
        self._stream.write(text + "\n")
        self._stream.flush()

    def restart_clock(self) -> None:
        """What took time since the last update (an evaluation, a save) was no step."""
        self._last_s = self._clock()

    def close(self) -> None:
        """Leave the last line standing."""
        if self._drawn:
            self._stream.write("\n")
            self._stream.flush()
            self._drawn = 0

    def _show(self, text: str) -> None:
        if not self._live:
            self._stream.write(text + "\n")
        else:
            width = max(20, shutil.get_terminal_size().columns - 1)
            text = text if len(text) <= width else text[: width - 1] + "…"
            self._stream.write("\r" + text + " " * max(0, self._drawn - len(text)))
            self._drawn = len(text)
        self._stream.flush()

    def _clear(self) -> None:
        if self._drawn:
            self._stream.write("\r" + " " * self._drawn + "\r")
            self._drawn = 0
