"""Re-planning while training: a child process looks for a better order, and the loop adopts it between two steps.

Source: `optpipe.txt` section 4.3. The run starts at once with the schedule of its config. Its first recorded step gives the
seconds of every function in the run itself; with these a child process (:mod:`.solve_worker`) searches. What it finds is
checked here, never believed: it must be able to take the running schedule's place (:mod:`.interchange`: no bit changes,
nothing is compiled), keep to the memory limit, and be shorter by ``replan.min_gain`` when simulated. An order that measures
slower by as much as it should have been faster is taken back. When the measured costs drift, the search starts anew.

Nothing here waits, and nothing that happens to the solver ends or delays the run: crash, kill, garbage and timeout are a line
each.

Drift compares shapes: a device that becomes slower in everything needs no other order. Not looked at: transfers between ranks
(their time is not recorded), and other placements, which would have to be compiled.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from jaxpipe.cost import with_measured_times
from jaxpipe.errors import JaxpipeError, ScheduleError
from jaxpipe.runtime.measured import seconds_by_op
from jaxpipe.runtime.pipeline import Pipeline
from jaxpipe.schedule import CostProfile, HostLink, Schedule, Timeline, simulate
from jaxpipe.schedule.memory import static_bytes
from jaxpipe.schedule.solve import SolveTask
from jaxpipe.schedule.tolerance import TIME
from jaxpipe.train.config import TrainConfig
from jaxpipe.train.interchange import offloads, takes_time, why_not
from jaxpipe.train.metrics import format_gain
from jaxpipe.train.solve_process import SolveProcess
from jaxpipe.train.solve_worker import Finished, Found, Problem, read_answer
from jaxpipe.wording import format_seconds

Seconds = Mapping[tuple[str, int], float]
"""Mean seconds by (op, stage)."""

PATIENCE_S = 10.0
"""A solver may take twice its time limit and this before it is killed."""
_PARTING_S = 3.0
_TRIED = 3  # recorded steps after which a new schedule is judged
_KEPT = 9  # recorded steps that the time of a step is the median of
_MOST_DOUBLINGS = 6


def drift(then: Seconds, now: Seconds) -> float:
    """The largest change of one function's seconds, as a fraction of the mean work on a microbatch in a stage, after both are
    scaled to the same total."""
    ops = [key for key in then.keys() & now.keys() if takes_time(key[0])]
    totals = [sum(seconds[key] for key in ops) for seconds in (then, now)]
    if min(totals, default=0.0) <= 0:
        return 0.0
    stages = len({stage for _, stage in ops})
    return max(abs(now[key] / totals[1] - then[key] / totals[0]) for key in ops) * stages


@dataclass(frozen=True, slots=True)
class _Running:
    """A schedule since it was adopted. ``predicted``: gain over the one before, as a fraction. ``steps_s``: of its last
    recorded steps."""

    pipeline: Pipeline
    predicted: float = math.nan
    steps_s: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))

    @property
    def name(self) -> str:
        return self.pipeline.schedule.name

    @property
    def step_s(self) -> float:
        return statistics.median(self.steps_s) if self.steps_s else math.nan


@dataclass(slots=True)
class _Solve:
    """A search under way. ``costs``: as measured; the task has tensor-parallel collectives as part of the actions, which a
    schedule with braids does not wait for. ``began``: by the clock. ``complained``: whether the user was told of a schedule
    refused. ``makespans``: by name, of schedules that have run, under ``costs``."""

    process: SolveProcess
    task: SolveTask
    costs: CostProfile
    began: float
    complained: bool = False
    makespans: dict[str, float] = field(default_factory=dict)

    def makespan(self, schedule: Schedule) -> float:
        if schedule.name not in self.makespans:
            self.makespans[schedule.name] = simulate(schedule, self.costs).makespan
        return self.makespans[schedule.name]


class Replanner:
    """Ask :meth:`poll` between steps, tell :meth:`observe` of each recorded step, and :meth:`close` at the end.

    Args:
        config: of the run.
        pipeline: what the run starts with.
        note: told what happens, a line each.
        first_step: the step at which the run starts; the next one is not looked at, as it compiles.
        clock: seconds.
    """

    def __init__(
        self,
        config: TrainConfig,
        pipeline: Pipeline,
        note: Callable[[str], None],
        first_step: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config, self._limit, self._note, self._clock = config.replan, config.pipeline.memory_limit, note, clock
        self._first_step = first_step
        self._start = pipeline.schedule
        self._running = _Running(pipeline)
        self._before: _Running | None = None
        self._solve: _Solve | None = None
        self._solved: Seconds | None = None  # what the last search was given
        self._next = -math.inf  # no search before this time
        self._failures = self._adopted = 0
        self._rejected: set[Schedule] = set()

    @property
    def pid(self) -> int | None:
        """The solver's process, if there is one."""
        return None if self._solve is None else self._solve.process.pid

    @property
    def gains(self) -> tuple[float, float]:
        """Of the schedule that runs over the one before it: predicted and measured, as fractions; NaN where unknown."""
        if self._before is None:
            return math.nan, math.nan
        return self._running.predicted, 1 - self._running.step_s / self._before.step_s

    def close(self) -> None:
        """End the solver, at the end of the run."""
        if self._solve is not None:
            self._solve.process.close(_PARTING_S)
            self._solve = None

    # -- recorded steps -----------------------------------------------------------------------------------------------

    def observe(self, step: int, timeline: Timeline, step_s: float) -> None:
        """Step number ``step`` was recorded: what it measured, and how long it took."""
        if step <= self._first_step + 1:
            return
        self._running.steps_s.append(step_s)
        if self._before is not None and len(self._running.steps_s) in (1, _TRIED):
            predicted, measured = map(format_gain, self.gains)
            took = f"{self._before.name} took {format_seconds(self._before.step_s)}"
            takes = f"schedule {self._running.name} takes {format_seconds(self._running.step_s)}"
            self._note(f"step {step}: {takes}, {took}: {measured} measured, {predicted} predicted")
        if self._solve is None and self._clock() >= self._next:
            self._consider(step, timeline)

    def _consider(self, step: int, timeline: Timeline) -> None:
        """Start a search if there was none, if the last one failed, or if costs have drifted."""
        seconds = seconds_by_op([timeline])
        if self._solved is None:
            why = "looking for a better schedule"
        elif (moved := drift(self._solved, seconds)) > self.config.drift:
            why = f"costs drifted by {moved:.0%}, looking again"
        elif self._failures:
            why = "looking once more"
        else:
            return
        costs = self._costs(seconds, timeline)
        task = self._task(costs)
        limit_s = self.config.time_limit_s
        problem = Problem(self._start, task, limit_s, self.config.workers)
        try:
            process = SolveProcess(problem.line())
        except OSError as error:
            self._failed(f"can't be started ({error.strerror})")
            return
        self._note(
            f"step {step}: re-planning: {why} (up to {format_seconds(limit_s)}, {task.memory_limit:.3g} activations)"
        )
        self._solve, self._solved = _Solve(process, task, costs, self._clock()), seconds

    def _costs(self, seconds: Seconds, timeline: Timeline) -> CostProfile:
        """Seconds as the run measured them; where it offloads, the rates of the link to the host too."""
        costs = with_measured_times(self._running.pipeline.costs, seconds)
        costs = replace(costs, boundary_buffers=False)  # the search does not know them
        rates = {lane: _bytes_per_s(timeline, lane, costs) for lane in ("d2h", "h2d")}
        if not all(rates.values()):
            return costs
        host = HostLink(rates["d2h"], rates["h2d"], 0.0, costs.host.mode, costs.host.groups)
        return replace(costs, host=host, offload_s=(), load_s=())

    def _task(self, costs: CostProfile) -> SolveTask:
        """The limit is what the config says, or what the schedule that the run started with needs: activations and bytes."""
        placement, m = self._start.placement, self._start.num_microbatches
        offload = offloads(self._start)
        limit = self.config.memory_limit if self.config.memory_limit is not None else self._limit
        if limit is not None:
            return SolveTask(placement, m, costs, limit, offload)
        timeline = simulate(self._start, costs)
        peaks = timeline.peak_activations
        shares = [sum(costs.residual_bytes[s] for s in placement.stages_of(r)) for r in range(placement.num_ranks)]
        static = static_bytes(placement, costs)
        most = max(*(a + b * c for a, b, c in zip(static, peaks, shares, strict=True)), *timeline.peak_bytes)
        bounded = replace(costs, memory_limit_bytes=(most,) * placement.num_ranks)
        return SolveTask(placement, m, bounded, max(peaks), offload)

    # -- between steps ------------------------------------------------------------------------------------------------

    def poll(self, step: int) -> Pipeline | None:
        """After step number ``step``: the pipeline for the steps to come, None to go on with the one that runs."""
        back = self._take_back(step)
        if back is not None or self._solve is None:
            return back
        solve, ended = self._solve, self._solve.process.ended
        found: Found | None = None
        finished: Finished | None = None
        try:
            for line in solve.process.take():
                match read_answer(line):
                    case Found() as answer:
                        found = answer
                    case Finished() as answer:
                        finished = answer
        except ScheduleError as error:
            self._failed(f"wrote {error}")
            return None
        adopted = self._judge(step, found, solve) if found is not None else None
        if finished is not None:
            self._finish(solve, finished)
        elif ended:
            self._failed(solve.process.fate())
        elif self._clock() > solve.began + 2 * self.config.time_limit_s + PATIENCE_S:
            self._failed(f"took longer than {format_seconds(self._clock() - solve.began)}")
        return adopted

    def _judge(self, step: int, found: Found, solve: _Solve) -> Pipeline | None:
        """The pipeline that runs what was found, if it is worth it. What claims too little is not even looked at."""
        running = self._running.pipeline
        now_s = solve.makespan(running.schedule)
        most_s = now_s * (1 - max(self.config.min_gain, TIME))
        schedule = replace(found.schedule, name=f"solved-{self._adopted + 1}", placement=self._start.placement)
        if not found.makespan_s < most_s or replace(schedule, name="") in self._rejected:
            return None
        try:
            if why := why_not(found.schedule, self._start):
                raise ScheduleError(why)
            timeline = simulate(schedule, solve.task.costs)
            if why := _misfit(found, timeline, solve.task):
                raise ScheduleError(why)
            pipeline = running.with_schedule(schedule, solve.costs)
        except JaxpipeError as error:
            self._complain(solve, str(error))
            return None
        gain = 1 - timeline.makespan / now_s
        self._adopted += 1
        self._note(
            f"step {step}: schedule {self._running.name} (makespan {format_seconds(now_s)}) -> {schedule.name} "
            f"({format_seconds(timeline.makespan)} predicted, {format_gain(gain)}; by {found.source})"
        )
        if self._before is None or self._running.steps_s:  # else what ran before was never measured
            self._before = self._running
        past_s = solve.makespan(self._before.pipeline.schedule)
        self._running = _Running(pipeline, 1 - timeline.makespan / past_s)
        return pipeline

    def _take_back(self, step: int) -> Pipeline | None:
        """The pipeline before this one, if this one has turned out slower by as much as it should have been faster."""
        predicted, measured = self.gains
        if self._before is None or len(self._running.steps_s) != _TRIED or not measured < -predicted:
            return None
        self._note(
            f"step {step}: schedule {self._running.name} -> {self._before.name} again: it was {format_gain(measured)} measured"
        )
        self._rejected.add(replace(self._running.pipeline.schedule, name=""))
        self._running, self._before = self._before, None
        return self._running.pipeline

    # -- ends of a search ---------------------------------------------------------------------------------------------

    def _finish(self, solve: _Solve, finished: Finished) -> None:
        took = format_seconds(self._clock() - solve.began)
        self._failures = 0
        self._end()
        running = self._running.pipeline.schedule
        said = finished.remark
        if finished.lower_bound_s > 0:
            said = f"none is more than {max(0.0, 1 - finished.lower_bound_s / solve.makespan(running)):.1%} shorter"
        self._note(f"re-planning: searched for {took}; schedule {running.name} goes on{said and f' ({said})'}")

    def _failed(self, what: str) -> None:
        self._failures += 1
        self._end()
        self._note(f"re-planning: the solver {what}; training goes on with schedule {self._running.name}")

    def _end(self) -> None:
        """No search is under way; the next may begin a time limit after this one did, later after failures."""
        began = self._clock()
        if self._solve is not None:
            began = self._solve.began
            self._solve.process.close()
            self._solve = None
        self._next = began + self.config.time_limit_s * 2 ** min(self._failures, _MOST_DOUBLINGS)

    def _complain(self, solve: _Solve, why: str) -> None:
        """Say why a schedule is not taken; once a search is enough."""
        if not solve.complained:
            solve.complained = True
            self._note(f"re-planning: a schedule was refused: {why}")


def _misfit(found: Found, timeline: Timeline, task: SolveTask) -> str:
    """What is wrong with a schedule's ``timeline``; empty if nothing is."""
    if not task.fits(timeline):
        return f"it needs {max(timeline.peak_activations):.3g} activations, more than the limit allows"
    if not math.isclose(found.makespan_s, timeline.makespan, rel_tol=1e-6):
        return f"it should take {format_seconds(found.makespan_s)}, and takes {format_seconds(timeline.makespan)} simulated"
    return ""


def _bytes_per_s(timeline: Timeline, lane: str, costs: CostProfile) -> float:
    """Measured rate of copies to or from the host; 0 if there were none."""
    seconds = moved = 0.0
    for event in timeline.events:
        if event.lane == lane:
            seconds += event.end_s - event.start_s
            moved += sum(costs.offloadable_bytes[a.stage] for a in event.action.actions)
    return moved / seconds if seconds > 0 else 0.0
