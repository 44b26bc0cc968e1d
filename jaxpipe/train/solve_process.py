"""The solver's process as training sees it: started, listened to, ended; nothing here ever waits for it.

One thread hands over the problem and collects the lines that come back, so that neither a full pipe nor a process that hangs
holds up a step. The process has its own session: a Ctrl-C in the terminal is not for it, and ending it ends what it started.
Imports no JAX.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Sequence

from jaxpipe.schedule.solve.worker_pool import child_environment

COMMAND = (sys.executable, "-m", "jaxpipe.train.solve_worker")
_MAX_LINE = 1 << 26
_MAX_LINES = 64
_JOIN_S = 5.0


class SolveProcess:
    """A running solver. Raises OSError if it can't be started."""

    def __init__(self, problem: str, command: Sequence[str] = COMMAND) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  closed by close()
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=child_environment(),
                start_new_session=True,
            )
        except OSError:
            self._errors.close()
            raise
        self._swept = self._handed_over = False
        self._lines: deque[bytes] = deque(maxlen=_MAX_LINES)
        self._problem = problem.encode() + b"\n"
        self._thread = threading.Thread(target=self._talk, name="jaxpipe-solver", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def take(self) -> list[bytes]:
        """The complete lines that have come since the last call; the oldest are lost if there are very many."""
        lines = []
        with contextlib.suppress(IndexError):
            while True:
                lines.append(self._lines.popleft())
        return lines

    @property
    def ended(self) -> bool:
        """Whether the process is gone and :meth:`take` gives all that is left."""
        if self._process.poll() is None:
            return False
        self._kill()
        return not self._thread.is_alive()

    def fate(self) -> str:
        """How the process ended, in words, with the last line that it wrote to standard error."""
        code = self._process.returncode
        if code is not None and code < 0:
            with contextlib.suppress(ValueError):
                return f"was killed by {signal.Signals(-code).name}"
        return f"ended before it was done (exit code {code}{self._last_error()})"

    def close(self, patience_s: float = 0.0) -> None:
        """End the process, whatever it does. With ``patience_s`` it may first end processes of its own in other sessions."""
        stdin, stdout = self._process.stdin, self._process.stdout
        if patience_s > 0 and self._handed_over:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                stdin.close()  # type: ignore[union-attr]
                self._process.wait(patience_s)
        self._kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_JOIN_S)
        self._thread.join(_JOIN_S)
        for pipe in (stdin, stdout, self._errors):
            with contextlib.suppress(OSError):
                pipe.close()  # type: ignore[union-attr]

    def _kill(self) -> None:
        """Kill the process and what it started, which may hold the pipe open. Once it is known to be gone, only once: numbers
        of processes are used again."""
        if self._swept:
            return
        self._swept = self._process.returncode is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _last_error(self) -> str:
        with contextlib.suppress(OSError, ValueError):
            size = self._errors.seek(0, os.SEEK_END)
            self._errors.seek(max(0, size - 4096))
            lines = self._errors.read().decode(errors="replace").split("\n")
            words = [line.strip() for line in lines if line.strip()]
            if words:
                return ": " + "".join(c if c.isprintable() else " " for c in words[-1])[:200]
        return ""

    def _talk(self) -> None:
        """Hand over the problem, then collect lines to the end. Half a line at the end is dropped."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        with contextlib.suppress(OSError, ValueError):
            stdin.write(self._problem)
            stdin.flush()  # left open: its end would tell the process to end
            self._handed_over = True
        with contextlib.suppress(OSError, ValueError):
            while (line := stdout.readline(_MAX_LINE)).endswith(b"\n"):
                self._lines.append(line)
            if len(line) == _MAX_LINE:
                self._lines.append(line)  # no answer is that long
                self._kill()
