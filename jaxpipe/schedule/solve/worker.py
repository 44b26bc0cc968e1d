"""A worker process of the solver: ``python -m jaxpipe.schedule.solve.worker``, tasks and jobs in, orders and bounds out.

It reads one JSON object a line (:mod:`~jaxpipe.schedule.solve.jobs`), works on one job at a time, and ends when its input
does. It knows no clock but its job's budget. A job that fails says so and the worker goes on.
"""

from __future__ import annotations

import gc
import json
import os
import queue
import sys
import threading
from collections.abc import Iterable
from typing import BinaryIO

from jaxpipe.errors import JaxpipeError
from jaxpipe.schedule.ir import Schedule
from jaxpipe.schedule.json_form import from_json, to_json
from jaxpipe.schedule.plugins import import_module
from jaxpipe.schedule.solve.jobs import KINDS, Answer, Job, job_in, to_line
from jaxpipe.schedule.solve.task import SolveTask

_NICE = 5


class Worker:
    """The tasks it knows; ``more`` kinds of jobs than :data:`~jaxpipe.schedule.solve.jobs.KINDS`."""

    def __init__(self, out: BinaryIO, *more: type[Job]) -> None:
        self.out = out
        self.tasks: list[SolveTask] = []
        self.unknown = ""  # why a module of the caller's can't be imported here; told once
        self.kinds = {**KINDS, **{kind.__name__: kind for kind in more}}

    def run(self, lines: Iterable[bytes]) -> None:
        """Until the input ends."""
        for text in lines:
            message = json.loads(text)
            if "tasks" in message:
                self.tasks = [from_json(SolveTask, x, "task") for x in message["tasks"]]
                self._import(message["imports"])
                continue
            error, self.unknown = self.unknown, ""
            number, job = job_in(message, self.kinds)

            def tell(
                schedule: Schedule | None, source: str, bound: float = 0.0, number: int = number, task: int = job.task
            ) -> None:
                self.send(Answer(job=number, task=task, source=source, schedule=schedule, bound=max(0.0, bound)))

            try:
                job.run(self.tasks[job.task], tell)
            except Exception as failure:  # the worker can still do other jobs; the solver says what happened
                error = f"{type(failure).__name__}: {failure}"
            self.send(Answer(job=number, task=job.task, done=True, error=error))
            gc.collect()

    def _import(self, modules: Iterable[str]) -> None:
        """What the caller imported. Without one of them the families and ops it registers are not known here, no more."""
        for module in modules:
            try:
                import_module(module)
            except JaxpipeError as error:
                self.unknown = f"in a solver process: {error}"

    def send(self, answer: Answer) -> None:
        self.out.write(to_line(to_json(answer)))
        self.out.flush()


def serve(*more: type[Job]) -> None:
    """Serve standard input until it ends; that also ends a job under way, since nobody is left to hear of it."""
    os.nice(_NICE)
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def listen() -> None:
        for text in iter(sys.stdin.buffer.readline, b""):
            lines.put(text)
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    Worker(sys.stdout.buffer, *more).run(iter(lines.get, b""))


if __name__ == "__main__":
    serve()
