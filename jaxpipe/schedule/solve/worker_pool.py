"""Worker processes: started, given jobs, listened to, and gone when the solver is.

Processes, not threads, because half of the work is Python's; and fresh interpreters, not forks, because the caller may have
JAX's threads running. A worker that dies loses its job, nothing else.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxpipe.schedule.plugins import imported_modules
from jaxpipe.schedule.solve import messages
from jaxpipe.schedule.solve.task import SolveTask


class _Member:
    """One process and the thread that reads its answers into ``inbox``."""

    def __init__(self, number: int, tasks: Sequence[SolveTask], inbox: queue.Queue[tuple[int, dict[str, Any]]]) -> None:
        self.number, self.inbox = number, inbox
        self.job: int | None = None
        self.alive = True
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "jaxpipe.schedule.solve.worker"],
            env=child_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.send({"tasks": [messages.task_out(task) for task in tasks], "imports": imported_modules()})
        self.thread = threading.Thread(target=self._listen, daemon=True)
        self.thread.start()

    def send(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(messages.line(message))
            self.process.stdin.flush()
        except OSError:
            self.alive = False

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for text in iter(self.process.stdout.readline, b""):
            with contextlib.suppress(ValueError):
                self.inbox.put((self.number, json.loads(text)))
        self.inbox.put((self.number, {"gone": True}))

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self.thread.join()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def child_environment() -> dict[str, str]:
    """Ours, with this very package first on the path: the caller may have found it in another way than by installing it."""
    package = str(Path(__file__).resolve().parents[3])
    path = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": package + (os.pathsep + path if path else "")}


class WorkerPool:
    """``size`` workers that know ``tasks``. Use as a context; leaving it ends them."""

    def __init__(self, size: int, tasks: Sequence[SolveTask]) -> None:
        self._inbox: queue.Queue[tuple[int, dict[str, Any]]] = queue.Queue()
        self._members = [_Member(k, tasks, self._inbox) for k in range(size)]
        self._jobs = 0

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
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

    def submit(self, job: dict[str, Any]) -> int:
        """Give a job to an idle worker; returns its number."""
        member = next(m for m in self._members if m.alive and m.job is None)
        member.job, self._jobs = self._jobs, self._jobs + 1
        member.send({**job, "job": member.job})
        return member.job

    def receive(self, timeout_s: float | None) -> dict[str, Any] | None:
        """The next answer, or None after ``timeout_s`` without one (None: however long it takes)."""
        try:
            number, message = self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            return None
        member = self._members[number]
        if message.get("gone"):
            lost, member.alive, member.job = member.job, False, None
            return {"job": lost, "done": True, "error": "a solver process ended", "gone": True}
        if message.get("done"):
            member.job = None
        return message
