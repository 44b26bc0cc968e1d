"""Worker processes: started, given jobs, listened to, and gone when the solver is.

Processes, not threads, because half of the work is Python's; and fresh interpreters, not forks, because the caller may have
JAX's threads running. A worker that dies loses its job, nothing else.

A worker (``python -m jaxpipe.search.solve.pool``) reads one JSON object a line (:mod:`~jaxpipe.search.solve.jobs`), works
on one job at a time, and ends when its input does. It knows no clock but its job's budget. A job that fails says so and the
worker goes on.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from jaxpipe.errors import JaxpipeError
from jaxpipe.schedule.ir import Schedule
from jaxpipe.schedule.json_form import from_json, to_json
from jaxpipe.schedule.plugins import import_module, imported_modules
from jaxpipe.search.solve.jobs import Answer, Job, job_in, job_line, tasks_line, to_line
from jaxpipe.search.solve.task import SolveTask

COMMAND = (sys.executable, "-P", "-m", "jaxpipe.search.solve.pool")


class _Member:
    """One process, and the threads that write to it and read its answers into ``inbox``, so that neither a full pipe nor a
    process that hangs holds up the caller."""

    def __init__(self, command: Sequence[str], tasks: Sequence[SolveTask], inbox: _Inbox) -> None:
        self.inbox = inbox
        self.job: int | None = None
        self.process = subprocess.Popen(
            command,
            env=child_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # Ctrl-C in a terminal is for the caller, who then ends its workers in order
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
                self.inbox.put((self, json.loads(text)))
        self.inbox.put((self, {"job": 0, "gone": _fate(self.process.wait())}))

    def stop(self) -> None:
        # killed before threads are joined: one that writes to a full pipe ends only with its reader
        self.process.kill()
        self.process.wait()
        self.outbox.put(None)
        for thread in self.threads:
            thread.join()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


_Inbox = queue.Queue[tuple[_Member, dict[str, Any]]]


def child_environment() -> dict[str, str]:
    """Return our environment with this very package first on the path and then what we import from: the caller may have
    found the package, and modules that register families, in another way than by installing them."""
    path = (Path(__file__).resolve().parents[3], *map(os.path.abspath, sys.path))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}


def _fate(code: int) -> str:
    """Return how a process ended, by its exit code."""
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended before it was done (exit code {code})"


class WorkerPool:
    """``size`` workers that know ``tasks``, processes that run ``command``. To be closed.

    Raises:
        OSError: they can't be started.
    """

    def __init__(self, size: int, tasks: Sequence[SolveTask], command: Sequence[str] = COMMAND) -> None:
        self._inbox: _Inbox = queue.Queue()
        self._members = [_Member(command, tasks, self._inbox) for _ in range(size)]
        self._jobs = 0

    def close(self) -> None:
        """End the workers, whatever they do."""
        for member in self._members:
            member.stop()

    @property
    def idle(self) -> int:
        """Count the workers without a job."""
        return sum(m.job is None for m in self._members)

    @property
    def busy(self) -> int:
        """Count the workers with a job."""
        return len(self._members) - self.idle

    def submit(self, job: Job) -> int:
        """Give a job to an idle worker and return its number, from 0."""
        member = next(m for m in self._members if m.job is None)
        member.job, self._jobs = self._jobs, self._jobs + 1
        member.outbox.put(job_line(member.job, job))
        return member.job

    def receive(self, timeout_s: float | None) -> Answer | None:
        """Return the next answer, or None after ``timeout_s`` without one (None: however long it takes).

        Raises:
            ScheduleParseError: a worker wrote what is no answer.
        """
        try:
            member, message = self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            return None
        answer = from_json(Answer, message, "answer")
        if answer.gone:
            self._members.remove(member)
            member.stop()
            return replace(answer, job=member.job or 0, done=True, error=f"a solver process {answer.gone}")
        if answer.done:
            member.job = None
        return answer


_NICE = 5


class Worker:
    """The tasks it knows."""

    def __init__(self, out: BinaryIO) -> None:
        self.out = out
        self.tasks: list[SolveTask] = []
        self.unknown = ""  # why a module of the caller's can't be imported here; told once

    def run(self, lines: Iterable[bytes]) -> None:
        """Serve until the input ends."""
        for text in lines:
            message = json.loads(text)
            if "tasks" in message:
                self.tasks = [from_json(SolveTask, x, "task") for x in message["tasks"]]
                self._import(message["imports"])
            else:
                self._work(*job_in(message))
                gc.collect()

    def _work(self, number: int, job: Job) -> None:
        error, self.unknown = self.unknown, ""

        def tell(schedule: Schedule | None, source: str, bound: float = 0.0) -> None:
            self.send(Answer(job=number, task=job.task, source=source, schedule=schedule, bound=bound))

        try:
            job.run(self.tasks[job.task], tell)
        except Exception as failure:  # the worker can still do other jobs; the solver says what happened
            error = f"{type(failure).__name__}: {failure}"
        self.send(Answer(job=number, task=job.task, done=True, error=error))

    def _import(self, modules: Iterable[str]) -> None:
        """Import what the caller imported. Without one of them the families and ops it registers are not known here, no
        more."""
        for module in modules:
            try:
                import_module(module)
            except JaxpipeError as error:
                self.unknown = f"in a solver process: {error}"

    def send(self, answer: Answer) -> None:
        self.out.write(to_line(to_json(answer)))
        self.out.flush()


def serve() -> None:
    """Serve standard input until it ends; that also ends a job under way, since nobody is left to hear of it."""
    os.nice(_NICE)
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def listen() -> None:
        for text in iter(sys.stdin.buffer.readline, b""):
            lines.put(text)
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    Worker(sys.stdout.buffer).run(iter(lines.get, b""))


if __name__ == "__main__":
    serve()
