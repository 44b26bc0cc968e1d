"""The child process of re-planning: reads one problem, writes every better schedule that it finds. See :mod:`.replan`.

``python -m jaxpipe.train.solve_worker`` reads a line of JSON (:class:`Problem`) and answers with lines of JSON: a
:class:`Found` for each better schedule, a :class:`Finished` at the end. It imports no JAX, runs at the lowest priority, and
ends when its standard input does, that is with its parent.

A better schedule keeps the placement, and splits or fuses each backward as the running schedule does, so that it changes no
bit. The search is that of :func:`jaxpipe.schedule.solve.solve`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from jaxpipe.errors import ScheduleError, ScheduleParseError
from jaxpipe.schedule import Schedule, simulate
from jaxpipe.schedule.json_form import from_schedule, to_schedule
from jaxpipe.schedule.passes.backwards import backwards_like, fused_backwards
from jaxpipe.schedule.solve import Options, Solution, SolveTask, messages, solve
from jaxpipe.schedule.tolerance import at_most
from jaxpipe.train.interchange import why_not

_GRACE_S = 2.0


@dataclass(frozen=True, slots=True)
class Problem:
    """A better order for ``schedule`` is wanted, under the costs and within the limits of ``task``."""

    schedule: Schedule
    task: SolveTask
    time_limit_s: float
    workers: int

    def line(self) -> str:
        schedule, task = to_schedule(self.schedule), messages.task_out(self.task)
        limits = {"time_limit_s": self.time_limit_s, "workers": self.workers}
        return json.dumps({"schedule": schedule, "task": task, **limits})

    @classmethod
    def of_line(cls, line: str | bytes) -> Problem:
        data = json.loads(line)
        schedule, task = from_schedule(data["schedule"]), messages.task_in(data["task"])
        return cls(schedule, task, data["time_limit_s"], data["workers"])

    def adapted(self) -> SolveTask:
        """The problem for the solver: a stage whose backwards are all fused has a B that does everything and an empty W; one
        whose backwards are all split gains nothing by fusing them."""
        schedule, costs = self.schedule, self.task.costs
        fused = fused_backwards(schedule)
        count = [sum(stage == s for stage, _ in fused) for s in range(schedule.num_stages)]
        m = schedule.num_microbatches

        def choose(if_fused: Any, if_split: Any, mixed: tuple[float, ...]) -> tuple[float, ...]:
            return tuple(
                if_fused(s) if count[s] == m else if_split(s) if count[s] == 0 else mixed[s] for s in range(len(mixed))
            )

        def zero(_: int) -> float:
            return 0.0

        known = replace(
            costs,
            b_s=choose(lambda s: costs.bw_s[s], lambda s: costs.b_s[s], costs.b_s),
            w_s=choose(zero, lambda s: costs.w_s[s], costs.w_s),
            bw_s=choose(lambda s: costs.bw_s[s], lambda s: costs.b_s[s] + costs.w_s[s], costs.bw_s),
            w_residual_bytes=choose(zero, lambda s: costs.w_residual_bytes[s], costs.w_residual_bytes),
            cotangent_bytes=choose(zero, lambda s: costs.cotangent_bytes[s], costs.cotangent_bytes),
        )
        return replace(self.task, costs=known)


@dataclass(frozen=True, slots=True)
class Found:
    """A schedule, and its claimed makespan. ``source``: what found it."""

    schedule: Schedule
    makespan_s: float
    source: str

    def line(self) -> str:
        return json.dumps(
            {"makespan_s": self.makespan_s, "source": self.source, "schedule": to_schedule(self.schedule)}
        )


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a search. ``lower_bound_s``: no schedule of this problem is shorter (0: nothing is known). ``remark``: why
    nothing was found, or empty."""

    lower_bound_s: float = 0.0
    remark: str = ""

    def line(self) -> str:
        return json.dumps({"finished": True, "lower_bound_s": self.lower_bound_s, "remark": self.remark})


def read_answer(line: bytes) -> Found | Finished:
    """The answer that a line holds.

    Raises:
        ScheduleParseError: it holds none.
    """
    try:
        data = json.loads(line)
        if "finished" in data:
            return Finished(float(data["lower_bound_s"]), _plain(data["remark"]))
        return Found(from_schedule(data["schedule"]), float(data["makespan_s"]), _plain(data["source"]))
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
        raise ScheduleParseError(f"not an answer: {_plain(line[:40].decode(errors='replace'))}") from None


def _plain(text: object) -> str:
    """One short line that a terminal can show."""
    return "".join(c if c.isprintable() else " " for c in str(text)).strip()[:200]


class _Search:
    """Sends what is better than everything before."""

    def __init__(self, problem: Problem, send: Callable[[str], None]) -> None:
        self.problem, self.send = problem, send
        self.task = problem.adapted()
        self.best_s = simulate(problem.schedule, problem.task.costs).makespan

    def run(self) -> None:
        problem = self.problem
        try:
            solution: Solution = solve(
                self.task,
                Options(time_limit_s=problem.time_limit_s, workers=problem.workers),
                lambda progress, schedule: self._offer(schedule, progress.source),
            )
        except ScheduleError as error:
            self.send(Finished(remark=_plain(error)).line())
            return
        self._offer(solution.schedule, "solver")
        self.send(Finished(solution.lower_bound).line())

    def _offer(self, schedule: Schedule | None, source: str) -> None:
        running = self.problem.schedule
        if schedule is None or schedule.placement.flows != running.placement.flows:
            return
        fitted = replace(backwards_like(schedule, running), placement=running.placement)
        if why_not(fitted, running):
            return
        timeline = simulate(fitted, self.problem.task.costs)
        if not at_most(self.best_s, timeline.makespan) and self.task.fits(timeline):
            self.best_s = timeline.makespan
            self.send(Found(fitted, timeline.makespan, source).line())


def _end_with_parent() -> None:
    """Wait for the end of standard input, then end this process: as Ctrl-C does, so that the solver ends what it started, or
    with force if that takes long."""
    with contextlib.suppress(OSError, ValueError):
        while os.read(0, 1 << 16):
            pass
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(_GRACE_S)
    os._exit(1)


@contextlib.contextmanager
def _answers() -> Iterator[Callable[[str], None]]:
    """A function that writes a line where the parent reads; whatever else is printed goes to standard error."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)

        def send(line: str) -> None:
            out.write(line + "\n")
            out.flush()

        yield send


def main() -> int:
    with contextlib.suppress(OSError):
        os.nice(19)
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n"):
        return 1  # the parent is gone
    signal.signal(signal.SIGINT, signal.default_int_handler)  # it may have been started with SIGINT ignored
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with _answers() as send, contextlib.suppress(KeyboardInterrupt):
        _Search(Problem.of_line(line), send).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
