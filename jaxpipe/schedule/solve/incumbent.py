"""The best answer so far, the best bound so far, and how they came about. Nothing is taken unchecked."""

from __future__ import annotations

import time
from collections.abc import Sequence

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule.check import check_schedule
from jaxpipe.schedule.ir import Schedule
from jaxpipe.schedule.retime import Draft
from jaxpipe.schedule.simulate import simulate
from jaxpipe.schedule.solve.task import OnProgress, Progress, Solution, SolveTask, count_offloads
from jaxpipe.schedule.timeline import Timeline
from jaxpipe.schedule.tolerance import at_most, nine_digits


class Incumbent:
    """Answers to ``tasks``, which differ in placement only; the best of all counts."""

    def __init__(self, tasks: Sequence[SolveTask], bounds: Sequence[float], on_progress: OnProgress | None) -> None:
        self.tasks, self.bounds = tasks, list(bounds)
        self.on_progress = on_progress
        self.began = time.perf_counter()
        self.number = -1  # of the task that the best schedule answers
        self.schedule: Schedule | None = None
        self._timeline: Timeline | None = None
        self._key: tuple[float, ...] = (float("inf"),)
        self.per_task: list[tuple[tuple[float, ...], Schedule] | None] = [None] * len(tasks)
        self.improvements: list[Progress] = []
        self.family: tuple[str, float] | None = None
        self.first_feasible_s = 0.0

    @property
    def wall_s(self) -> float:
        return time.perf_counter() - self.began

    @property
    def lower_bound(self) -> float:
        """Of the problem: the least of the placements' bounds."""
        return min(self.bounds)

    @property
    def value(self) -> float:
        """Seconds of the objective's time; infinite before the first answer."""
        return self._key[0]

    @property
    def solved(self) -> bool:
        return at_most(self.value, self.lower_bound)

    def offer_first(self, number: int, schedule: Schedule, draft: Draft) -> None:
        """Take the first answer as its generator's re-timing has it; simulating it can wait."""
        if self.tasks[number].fits_peak(draft.peak):
            self._offer(number, schedule, (draft.makespan, draft.span, draft.peak, 0), "first")

    def offer(self, number: int, schedule: Schedule, source: str) -> bool:
        """Take a schedule that answers task ``number`` if it is valid, keeps the limits, and is the best so far."""
        task, moved = self.tasks[number], count_offloads(schedule)
        if schedule.placement != task.placement or schedule.num_microbatches != task.num_microbatches:
            return False
        try:
            check_schedule(schedule)
            timeline = simulate(schedule, task.costs)
        except ScheduleError:
            return False
        if not task.fits(timeline) or (moved and not task.offload):
            return False
        peak = max(timeline.peak_activations, default=0.0)
        figures = (timeline.makespan, timeline.max_span, peak, moved)
        seconds = task.seconds(timeline)
        if source.startswith("family") and (self.family is None or seconds < self.family[1]):
            self.family = (source.removeprefix("family "), seconds)
        return self._offer(number, schedule, figures, source, timeline)

    def _offer(
        self,
        number: int,
        schedule: Schedule,
        figures: tuple[float, float, float, int],
        source: str,
        timeline: Timeline | None = None,
    ) -> bool:
        key = self._rank(figures)
        known = self.per_task[number]
        if known is not None and known[0] <= key:
            return False
        self.per_task[number] = key, schedule
        if self._key <= key:
            return False
        if self.schedule is None:
            self.first_feasible_s = self.wall_s
        better = not at_most(self.value, key[0])
        self.number, self.schedule, self._timeline, self._key = number, schedule, timeline, key
        progress = Progress(self.wall_s, self.value, self.lower_bound, source)
        if better:
            self.improvements.append(progress)
        if self.on_progress is not None:
            self.on_progress(progress, schedule)
        return True

    def _rank(self, figures: tuple[float, float, float, int]) -> tuple[float, ...]:
        """What is minimised, in order: as the objective says, then what any user would rather have less of."""
        makespan, span, peak, moved = figures
        order: tuple[float, ...]
        if self.tasks[0].objective == "lexicographic":
            order = (makespan, peak, moved, span)
        elif self.tasks[0].objective == "span":
            order = (span, makespan, peak, moved)
        else:
            order = (makespan, span, peak, moved)
        return tuple(nine_digits(x) for x in order)

    def prove(self, number: int, bound: float, source: str) -> None:
        """Take a proven bound of task ``number``, in seconds."""
        if at_most(bound, self.bounds[number]):
            return
        self.bounds[number] = bound
        if self.on_progress is not None and self.schedule is not None:
            self.on_progress(Progress(self.wall_s, self.value, self.lower_bound, source), None)

    def solution(self, failures: Sequence[str] = ()) -> Solution:
        """The answer, simulated; ``failures``: what went wrong in workers.

        Raises:
            ScheduleError: the answer breaks a rule, which is a defect here.
        """
        assert self.schedule is not None, "no answer yet"
        task = self.tasks[self.number]
        if self._timeline is None:
            check_schedule(self.schedule)
            self._timeline = simulate(self.schedule, task.costs)
        seconds = task.seconds(self._timeline)
        solved = self.solved or at_most(seconds, self.lower_bound)
        own_bound = self.bounds[self.number]
        return Solution(
            task=task,
            schedule=self.schedule,
            timeline=self._timeline,
            lower_bound=seconds if solved else self.lower_bound,  # equal up to rounding
            status="optimal" if solved else "feasible",
            wall_s=self.wall_s,
            first_feasible_s=self.first_feasible_s,
            improvements=tuple(self.improvements),
            offloaded=count_offloads(self.schedule),
            family=self.family,
            failures=tuple(failures),
            placement_bound=seconds if at_most(seconds, own_bound) else own_bound,
        )
