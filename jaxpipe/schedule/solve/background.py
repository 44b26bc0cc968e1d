"""A solve in a process of its own, for a caller that must not wait: a training run, say.

The process is a worker of lowest priority with one more kind of job, ``solve``, for which it starts workers of its own. All of
them end when their input does: with the caller, however that ends.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from jaxpipe.errors import ScheduleError, gist
from jaxpipe.schedule.ir import Schedule
from jaxpipe.schedule.solve.jobs import Job, Tell
from jaxpipe.schedule.solve.solver import solve
from jaxpipe.schedule.solve.task import Options, Progress, SolveTask
from jaxpipe.schedule.solve.worker import serve
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Solve(Job):
    """A whole solve: tells of every better schedule, and at last the bound, or why there is none."""

    options: Options

    def run(self, task: SolveTask, tell: Tell) -> None:
        os.nice(_LOWEST)

        def better(progress: Progress, schedule: Schedule | None) -> None:
            if schedule is not None:
                tell(schedule, progress.source)

        try:
            tell(None, "", solve(task, self.options, better).lower_bound)
        except ScheduleError as error:
            tell(None, gist(error))


class BackgroundSolve:
    """:func:`~jaxpipe.schedule.solve.solve` of ``task``, under way. Whoever asked checks what is found.

    Raises:
        OSError: its process can't be started.
    """

    def __init__(self, task: SolveTask, options: Options, command: Sequence[str] = COMMAND) -> None:
        self._pool = WorkerPool(1, [task], command)
        self._pool.submit(Solve(task=0, seconds=options.time_limit_s, options=options))

    def take(self) -> list[Found | Finished | Failed]:
        """What has come since the last call, in order; nothing after the end, whatever becomes of the process."""
        answers: list[Found | Finished | Failed] = []
        try:
            while (answer := self._pool.receive(0.0)) is not None:
                if answer.gone:
                    return [*answers, Failed(answer.gone)]
                if answer.error:
                    return [*answers, Failed(f"failed ({clipped(' '.join(answer.error.split()), _LONGEST)})")]
                if answer.schedule is not None:
                    answers.append(Found(answer.schedule, answer.source))
                elif not answer.done:
                    return [*answers, Finished(answer.bound, answer.source)]
        except Exception as error:  # whatever it wrote
            answers.append(Failed(f"wrote what is no answer ({type(error).__name__}: {gist(error)})"))
        return answers

    def close(self) -> None:
        """End its processes."""
        self._pool.stop()


if __name__ == "__main__":
    serve(Solve)
