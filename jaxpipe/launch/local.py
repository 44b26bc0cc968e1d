"""Start the processes of a run on this machine, log their output, forward signals, and restart them if one is lost.

Each gets its share of the cores, as processes that share them fight for them. The standard output of process 0 is passed on to
ours; what the others write, and every standard error, comes on our standard error with the number of the process before each
line. All of it is kept in files, also what is not shown: the logs of the libraries below JAX, and the stacks that follow when
one of these ends a process.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO

from jaxpipe.errors import ConfigError, RunError
from jaxpipe.runtime.connections import LOST
from jaxpipe.train.run.ending import INTERRUPTED, STOPPED, Stop

_LAUNCHER = "JAXPIPE_LAUNCHER"
RESTARTABLE = (RunError.exit_code, LOST)
"""Exit codes that another attempt may mend."""
SAID = (0, ConfigError.exit_code, STOPPED, INTERRUPTED)
"""Exit codes after which nothing is left to say, or to look up in logs."""
_GRACE_S = 5.0
_GLANCE_S = 0.02
_READ_S = 5.0  # after the end, until all is shown
_BLOCK = 1 << 16
_LIBRARY_LOG = re.compile(rb"([EF])\d{4} \d\d:\d\d:\d\d|\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: ([EF]) ")


class Launch:
    """Runs a command in ``number`` processes. Use as a context: meanwhile every signal that ends a run is passed on to all of
    them, once. ``logs``: a folder for their output."""

    def __init__(self, command: Sequence[str], number: int, logs: Path) -> None:
        self._command, self._number, self._logs = list(command), number, logs
        self._children: list[subprocess.Popen[bytes]] = []
        self._before: dict[int, Any] = {}
        self._asked = 0

    def __enter__(self) -> Launch:
        for number in Stop.signals:
            self._before[number] = signal.signal(number, self._pass_on)
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._children:
            child.kill()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def run(self, restarts: int) -> int:
        """Run to the end, restarting up to ``restarts`` times after a loss; return the exit code of the process that ended
        the run."""
        for attempt in range(restarts + 1):
            listeners = self._start()
            process, code = self._wait()
            for thread in listeners:
                thread.join(_READ_S)
            if code in SAID:
                if code == INTERRUPTED:
                    _write(b"jaxpipe: interrupted\n")
                break
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            code = LOST if code < 0 else code
            again = code in RESTARTABLE and attempt < restarts and not self._asked
            then = (
                f"starting all again ({attempt + 1} of {restarts})" if again else f"all ended; their logs: {self._logs}"
            )
            _write(f"jaxpipe: process {process} {how}; {then}\n".encode())
            if not again:
                break
        return code

    def _start(self) -> list[threading.Thread]:
        """Start all processes; return the threads that read their output."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = f"127.0.0.1:{server.getsockname()[1]}"
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        of = self._number
        # In the children, until they listen to them; here, until all have started: who starts later would never hear of it.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, Stop.signals)
        self._children = []
        listeners = []
        for k in range(of):
            environ = {"JAXPIPE_COORDINATOR": address, "JAXPIPE_PROCESSES": str(of), "JAXPIPE_PROCESS": str(k)}
            environ |= {
                "JAXPIPE_LOCAL_PROCESS": str(k),
                "JAXPIPE_LOCAL_PROCESSES": str(of),
                _LAUNCHER: str(os.getpid()),
            }
            child = subprocess.Popen(
                self._command,
                env={**os.environ, **environ},
                stdin=subprocess.PIPE,  # see follow_launcher
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT if k else subprocess.PIPE,
                start_new_session=True,  # a terminal sends Ctrl-C to us alone
            )
            self._children.append(child)
            if len(cores) >= of:
                with suppress(OSError):
                    os.sched_setaffinity(child.pid, cores[k * len(cores) // of : (k + 1) * len(cores) // of])
            log = (self._logs / f"process-{k}.log").open("ab")
            if k == 0:
                listeners.append(threading.Thread(target=self._pass_output, args=(child.stdout, log), daemon=True))
                log = (self._logs / f"process-{k}.log").open("ab")
            listeners.append(
                threading.Thread(target=self._listen, args=(k, child.stderr or child.stdout, log), daemon=True)
            )
        if self._asked:  # before this start
            self._pass_on(self._asked, None)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for thread in listeners:
            thread.start()
        return listeners

    def _wait(self) -> tuple[int, int]:
        """Wait until all have ended; return the process that ended the others, and its exit code (a killed one: minus the
        signal)."""
        ended: dict[int, int] = {}
        until: float | None = None
        while len(ended) < self._number:
            for k, child in enumerate(self._children):
                if k not in ended and (code := child.poll()) is not None:
                    ended[k] = code
                    if code not in (0, STOPPED):
                        until = until or time.monotonic() + _GRACE_S
            if until is not None and time.monotonic() > until:
                for k in set(range(self._number)) - ended.keys():
                    self._children[k].kill()
                break
            time.sleep(_GLANCE_S)
        for child in self._children:
            child.wait()
            assert child.stdin is not None
            child.stdin.close()
        killed = [(k, code) for k, code in ended.items() if code < 0]  # the others may have ended a moment earlier
        failed = [(k, code) for k, code in ended.items() if code not in (0, STOPPED)]
        return next(iter([*killed, *failed, *sorted(ended.items(), key=lambda item: -item[1])]))

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        self._asked = number
        for child in self._children:
            with suppress(OSError):
                child.send_signal(number)

    def _pass_output(self, stream: Any, log: BinaryIO) -> None:
        """Copy the standard output of process 0 to the log, and to ours while somebody reads it.

        The log gets whole lines, as the lines of standard error go there from another thread.
        """
        lost, line = False, b""
        with stream, log:
            while chunk := stream.read1(_BLOCK):
                lines, end, line = (line + chunk).rpartition(b"\n")
                log.write(lines + end)
                log.flush()
                try:
                    while chunk and not lost:
                        chunk = chunk[os.write(1, chunk) :]
                except OSError as error:
                    lost = True
                    _write(f"jaxpipe: the output can't be written ({error.strerror}); going on without it\n".encode())
            log.write(line)

    def _listen(self, process: int, stream: Any, log: BinaryIO) -> None:
        fatal = False
        with stream, log:
            for line in stream:
                log.write(line)
                log.flush()
                log_match = _LIBRARY_LOG.match(line)
                fatal = fatal or (log_match is not None and b"F" in log_match.groups())
                if self._asked and line.startswith(b"jaxpipe: ") and line.endswith(b"interrupted\n"):
                    continue  # we say it
                if line.startswith(b"jaxpipe: ") or not (log_match or fatal):
                    _write(b"[%d] %s" % (process, line))


def follow_launcher() -> None:
    """Have this process get one SIGTERM when the launcher that started it is gone, as nobody hears it any more. Its standard
    input ends then; Linux's own signal for that (prctl) comes once for every thread that the launcher had."""

    def follow() -> None:
        with suppress(OSError):
            os.read(0, 1)
        os.kill(os.getpid(), signal.SIGTERM)

    if os.environ.get(_LAUNCHER) == str(os.getppid()):
        threading.Thread(target=follow, name="jaxpipe-launcher", daemon=True).start()


def _write(line: bytes) -> None:
    with suppress(OSError):
        os.write(2, line)
