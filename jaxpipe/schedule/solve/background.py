"""A solve in a process of its own, for a caller that must not wait: a training run, say.

The process is a worker of lowest priority with one more kind of job, ``solve``, for which it starts workers of its own. All of
them end when their input does: with the caller, however that ends.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from jaxpipe.errors import ScheduleError, gist
from jaxpipe.schedule.ir import Schedule
from jaxpipe.schedule.json_form import from_schedule
from jaxpipe.schedule.solve.solver import solve
from jaxpipe.schedule.solve.task import Options, Progress, SolveTask
from jaxpipe.schedule.solve.worker import Job, Tell, serve
from jaxpipe.schedule.solve.worker_pool import WorkerPool
from jaxpipe.wording import clipped

COMMAND = (sys.executable, "-P", "-m", "jaxpipe.schedule.solve.background")
_LOWEST = 19
_LONGEST = 200


@dataclass(frozen=True, slots=True)
class Found:
    """A schedule, better than those found before. ``source``: what found it."""

    schedule: Schedule
    source: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a search, after which nothing comes. ``lower_bound_s``: no schedule of the task is shorter (0: nothing is
    known). ``remark``: why nothing was found, or empty."""

    lower_bound_s: float = 0.0
    remark: str = ""


@dataclass(frozen=True, slots=True)
class Failed:
    """The end of a search that went wrong. ``what``: happened to the solver, in one line."""

    what: str


class BackgroundSolve:
    """:func:`~jaxpipe.schedule.solve.solve` of ``task``, under way. Whoever asked checks what is found.

    Raises:
        OSError: its process can't be started.
    """

    def __init__(self, task: SolveTask, options: Options, command: Sequence[str] = COMMAND) -> None:
        self._pool = WorkerPool(1, [task], command)
        self._pool.submit({"kind": "solve", "task": 0, "options": asdict(options)})

    def take(self) -> list[Found | Finished | Failed]:
        """What has come since the last call, in order; nothing after the end, whatever becomes of the process."""
        answers: list[Found | Finished | Failed] = []
        try:
            while (message := self._pool.receive(0.0)) is not None:
                match message:
                    case {"gone": how}:
                        return [*answers, Failed(how)]
                    case {"error": ""}:
                        pass
                    case {"error": error}:
                        return [*answers, Failed(f"failed ({clipped(' '.join(error.split()), _LONGEST)})")]
                    case {"schedule": schedule, "source": source}:
                        answers.append(Found(from_schedule(schedule), source))
                    case {"source": remark}:
                        return [*answers, Finished(float(message.get("bound", 0.0)), remark)]
        except Exception as error:  # whatever it wrote
            answers.append(Failed(f"wrote what is no answer ({type(error).__name__}: {gist(error)})"))
        return answers

    def close(self) -> None:
        """End its processes."""
        self._pool.stop()


def _solve(task: SolveTask, job: Job, tell: Tell) -> None:
    """Tell of every better schedule, and at last the bound, or why there is none."""
    os.nice(_LOWEST)

    def better(progress: Progress, schedule: Schedule | None) -> None:
        if schedule is not None:
            tell(schedule, progress.source)

    try:
        tell(None, "", solve(task, Options(**job["options"]), better).lower_bound)
    except ScheduleError as error:
        tell(None, gist(error))


if __name__ == "__main__":
    serve(solve=_solve)
