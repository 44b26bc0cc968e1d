"""Worker processes: started, given jobs, listened to, and gone when the solver is.

Processes, not threads, because half of the work is Python's; and fresh interpreters, not forks, because the caller may have
JAX's threads running. A worker that dies loses its job, nothing else.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxpipe.schedule.json_form import from_json
from jaxpipe.schedule.plugins import imported_modules
from jaxpipe.schedule.solve.jobs import Answer, Job, job_line, tasks_line
from jaxpipe.schedule.solve.task import SolveTask

COMMAND = (sys.executable, "-P", "-m", "jaxpipe.schedule.solve.worker")


class _Member:
    """One process, and the threads that write to it and read its answers into ``inbox``, so that neither a full pipe nor a
    process that hangs holds up the caller."""

    def __init__(
        self,
        number: int,
        command: Sequence[str],
        tasks: Sequence[SolveTask],
        inbox: queue.Queue[tuple[int, dict[str, Any]]],
    ) -> None:
        self.number, self.inbox = number, inbox
        self.job: int | None = None
        self.alive = True
        self.process = subprocess.Popen(
            command,
            env=child_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.outbox.put(tasks_line(tasks, imported_modules()))
        self.threads = [threading.Thread(target=talk, daemon=True) for talk in (self._write, self._listen)]
        for thread in self.threads:
            thread.start()

    def _write(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # it is gone, as the one who listens will say
            for line in iter(self.outbox.get, None):
                self.process.stdin.write(line)
                self.process.stdin.flush()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for text in iter(self.process.stdout.readline, b""):
            with contextlib.suppress(ValueError, RecursionError):
                self.inbox.put((self.number, json.loads(text)))
        self.inbox.put((self.number, {"job": 0, "gone": _fate(self.process.wait())}))

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self.outbox.put(None)
        for thread in self.threads:
            thread.join()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def child_environment() -> dict[str, str]:
    """Ours, with this very package first on the path and then what we import from: the caller may have found the package, and
    modules that register families, in another way than by installing them."""
    path = (Path(__file__).resolve().parents[3], *map(os.path.abspath, sys.path))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}


def _fate(code: int) -> str:
    """How a process ended, by its exit code."""
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended before it was done (exit code {code})"


class WorkerPool:
    """``size`` workers that know ``tasks``, processes that run ``command``. Use as a context; leaving it ends them.

    Raises:
        OSError: they can't be started.
    """

    def __init__(self, size: int, tasks: Sequence[SolveTask], command: Sequence[str] = COMMAND) -> None:
        self._inbox: queue.Queue[tuple[int, dict[str, Any]]] = queue.Queue()
        self._members = [_Member(k, command, tasks, self._inbox) for k in range(size)]
        self._jobs = 0

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End the workers, whatever they do."""
        for member in self._members:
            member.stop()

    @property
    def idle(self) -> int:
        """Workers without a job."""
        return sum(m.alive and m.job is None for m in self._members)

    @property
    def busy(self) -> int:
        """Workers with a job."""
        return sum(m.alive and m.job is not None for m in self._members)

    def submit(self, job: Job) -> int:
        """Give a job to an idle worker; returns its number."""
        member = next(m for m in self._members if m.alive and m.job is None)
        member.job, self._jobs = self._jobs, self._jobs + 1
        member.outbox.put(job_line(member.job, job))
        return member.job

    def receive(self, timeout_s: float | None) -> Answer | None:
        """The next answer, or None after ``timeout_s`` without one (None: however long it takes).

        Raises:
            ScheduleParseError: a worker wrote what is no answer.
        """
        try:
            number, message = self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            return None
        member, answer = self._members[number], from_json(Answer, message, "answer")
        if answer.gone:
            lost, member.alive, member.job = member.job, False, None
            return replace(answer, job=lost or 0, done=True, error=f"a solver process {answer.gone}")
        if answer.done:
            member.job = None
        return answer
