"""Tell people how a run goes: plain lines and one live line, on a stream that may die without ending anything.

The reader of a pipe ends, a terminal is closed, a disk is full: none of that matters as much as the run. :class:`LiveLine`
refreshes one line on a terminal and prints plain lines elsewhere.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO

from jaxpipe.text import format_bytes, format_count, format_seconds


class ProgressStream:
    """Writes text to ``stream`` at once. The first failure is told on standard error, and all that follows is dropped.

    ``stream``: None drops everything. ``lost``: why nothing is written any more; empty as long as there is no reason.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self.lost = "" if stream is not None else "there is no stream"

    def isatty(self) -> bool:
        """Return whether a person looks at it."""
        with suppress(OSError, ValueError):
            return self._stream is not None and self._stream.isatty()
        return False

    def print(self, text: str) -> None:
        """Write a line."""
        self.write(text + "\n")

    def write(self, text: str) -> None:
        """Write ``text`` and flush it."""
        if self._stream is None or self.lost:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except UnicodeEncodeError:
            self.write(text.encode("ascii", "replace").decode())
        except (OSError, ValueError) as error:  # ValueError: the stream was closed
            self.lost = getattr(error, "strerror", None) or str(error)
            if self._stream is sys.stdout:
                silence(self._stream)
            with suppress(OSError, ValueError):
                if sys.stderr is not None and self._stream is not sys.stderr:
                    print(f"jaxpipe: the output can't be written ({self.lost}); going on without it", file=sys.stderr)


def silence(stream: TextIO | None) -> None:
    """Let a dead ``stream`` write into nothing, so that what it still holds does not fail again when Python ends."""
    with suppress(OSError, ValueError, AttributeError):
        descriptor = stream.fileno()  # type: ignore[union-attr]
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, descriptor)
        os.close(null)


class LiveLine:
    """Progress for a person: step, loss, learning rate, gradient norm, tokens/s, MFU, bubble and peak memory as predicted and
    measured, time left.

    On a terminal one line is rewritten at each update; elsewhere a line is printed every ``print_every`` steps, and at the
    last. Step time is a moving average that leaves out the first step, which compiles."""

    def __init__(
        self,
        steps: int,
        out: ProgressStream,
        *,
        print_every: int = 10,
        start: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._steps, self._out, self._every, self._clock = steps, out, print_every, clock
        self._live = out.isatty() and os.environ.get("TERM") != "dumb"
        self._done, self._last_s, self._step_s, self._drawn = start, clock(), math.nan, 0
        self._first = start

    def draws(self, step: int) -> bool:
        """Return whether :meth:`update` shows this step."""
        return self._live or step % self._every == 0 or step == self._steps

    def update(
        self,
        step: int,
        *,
        loss: float,
        tokens: int,
        learning_rate: float | None = None,
        grad_norm: float | None = None,
        mfu_per_rate: float | None = None,
        bubble_predicted: float | None = None,
        bubble_measured: float | None = None,
        peak_predicted: float | None = None,
        peak_measured: float | None = None,
        extra: str = "",
    ) -> None:
        """``step`` steps are done; ``tokens``: of one step; ``mfu_per_rate``: the MFU of one token a second; bubbles as
        fractions; peaks in bytes; ``extra``: shown at the end."""
        now = self._clock()
        taken_s = (now - self._last_s) / max(1, step - self._done)
        if self._done > self._first:
            self._step_s = taken_s if math.isnan(self._step_s) else 0.9 * self._step_s + 0.1 * taken_s
        self._done, self._last_s = step, now
        if not self.draws(step):
            return
        step_s = taken_s if math.isnan(self._step_s) else self._step_s
        rate = tokens / max(step_s, 1e-9)
        parts = [f"step {step}/{self._steps}", f"loss {loss:.4f}"]
        parts += [] if learning_rate is None else [f"lr {learning_rate:.3g}"]
        parts += [] if grad_norm is None else [f"grad norm {grad_norm:.3g}"]
        parts += [f"{format_count(rate)} tok/s"]
        parts += [] if mfu_per_rate is None else [f"MFU {rate * mfu_per_rate:.1%}"]
        if bubble_predicted is not None:
            measured = "" if bubble_measured is None else f" → {bubble_measured:.1%} measured"
            parts.append(f"bubble {bubble_predicted:.1%} predicted{measured}")
        if peak_predicted is not None:
            measured = "" if peak_measured is None else f" → {format_bytes(peak_measured, binary=True)} measured"
            parts.append(f"peak {format_bytes(peak_predicted, binary=True)} predicted{measured}")
        parts += [extra] if extra else []
        parts += [f"{format_seconds((self._steps - step) * step_s)} left"] if step < self._steps else []
        self._show("  ".join(parts))

    def note(self, text: str) -> None:
        """Print a line of its own (an evaluation, a checkpoint, a warning) above the live one."""
        self._clear()
        self._out.print(text)

    def restart_clock(self) -> None:
        """Leave out the time since the last update (an evaluation, a save): it was no step."""
        self._last_s = self._clock()

    def close(self) -> None:
        """Leave the last line standing."""
        if self._drawn:
            self._out.write("\n")
            self._drawn = 0

    def _show(self, text: str) -> None:
        if not self._live:
            self._out.print(text)
        else:
            width = max(20, shutil.get_terminal_size().columns - 1)
            text = text if len(text) <= width else text[: width - 1] + "…"
            self._out.write("\r" + text + " " * max(0, self._drawn - len(text)))
            self._drawn = len(text)

    def _clear(self) -> None:
        if self._drawn:
            self._out.write("\r" + " " * self._drawn + "\r")
            self._drawn = 0
