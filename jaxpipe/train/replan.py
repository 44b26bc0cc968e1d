"""Re-planning while training: a child process looks for a better order, and the loop adopts it between two steps.

Source: `optpipe.txt` section 4.3. The run starts at once with the schedule of its config. Its first recorded step gives the
seconds of every function in the run itself; with these a child process (:mod:`jaxpipe.search.solve.solver`) searches.
What it finds splits or fuses each backward here as the first schedule does, and is checked, never believed: it must be able to
take the running schedule's place (:func:`why_not`: no bit changes, nothing is compiled), keep to the memory limit, and be
shorter by ``replan.min_gain`` when simulated. An order that measures slower by as much as it should have been faster is taken
back. When the measured costs drift, the search starts anew.

Of several processes the first one observes, searches and judges, and all :meth:`Replanner.adopt` what it offers after the same
step; where one can't, none does.

Nothing here waits, and nothing that happens to the solver ends or delays the run: crash, kill, garbage and timeout are a line
each.

Drift compares shapes: a device that becomes slower in everything needs no other order. Not looked at: transfers between ranks
(their time is not recorded), and other placements, which would have to be compiled.

A schedule may take another's place if it is valid, places the same stages on the same ranks, runs the same stage functions
there (so every function is compiled, and every backward is rounded as before), and adds up each stage's weight gradients in the
same order. It may offload only if the other does."""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from jaxpipe.cost.profile import with_measured_times
from jaxpipe.errors import JaxpipeError, ScheduleError
from jaxpipe.runtime.pipeline import Pipeline
from jaxpipe.runtime.recorder import seconds_by_op
from jaxpipe.schedule import CostProfile, HostLink, Schedule, Timeline, find_problems, op_spec, simulate
from jaxpipe.schedule.ir import Row
from jaxpipe.schedule.memory import static_bytes
from jaxpipe.schedule.passes.braid import backwards_like, fused_backwards
from jaxpipe.schedule.timeline import TIME
from jaxpipe.text import format_seconds
from jaxpipe.train.config import TrainConfig
from jaxpipe.train.metrics import format_gain

if TYPE_CHECKING:  # a run that does not re-plan never imports the search
    from jaxpipe.search.solve import SolveTask
    from jaxpipe.search.solve.solver import BackgroundSolve, Failed, Finished, Found


def why_not(schedule: Schedule, running: Schedule) -> str:
    """Return why ``schedule`` can't take the place of ``running``; empty if it can."""
    if (schedule.placement.flows, schedule.placement.edges) != (running.placement.flows, running.placement.edges):
        return "it places stages elsewhere"
    if schedule.num_microbatches != running.num_microbatches:
        return f"it has {schedule.num_microbatches} microbatches, the run has {running.num_microbatches}"
    if len(schedule.rows) != len(running.rows):
        return f"it has {len(schedule.rows)} rows for {len(running.rows)} ranks"
    return _other_actions(schedule, running) or next(iter(find_problems(schedule)), "")


def _other_actions(schedule: Schedule, running: Schedule) -> str:
    if schedule.offloads and not running.offloads:
        return "it offloads, which this run does not"
    for rank in range(running.num_ranks):
        new, old = schedule.functions(rank), running.functions(rank)
        if new != old:
            odd = min((new - old) or (old - new))
            return f"rank {rank} {'runs' if odd in new - old else 'lacks'} {odd}; other actions are compiled or rounded apart"
        if schedule.weight_order(rank) != running.weight_order(rank):
            return f"rank {rank} would add up weight gradients in another order"
    return ""


Seconds = Mapping[tuple[str, int], float]
"""Mean seconds by (op, stage)."""

PATIENCE_S = 10.0
"""A solver may take twice its time limit and this before it is killed."""
# Recorded steps after which a new schedule is judged, and of how many the time of a step is the median; the first
# recorded step after a switch alone may be an outlier.
_TRIED, _KEPT = 3, 9
# After failures searches begin ever later, up to 2^6 time limits apart.
_MOST_DOUBLINGS = 6


def drift(then: Seconds, now: Seconds) -> float:
    """Return the largest change of one function's seconds, as a fraction of the mean work on a microbatch in a stage, after
    both are scaled to the same total."""
    ops = [key for key in then.keys() & now.keys() if op_spec(key[0]).runs_function]
    totals = [sum(seconds[key] for key in ops) for seconds in (then, now)]
    if min(totals, default=0.0) <= 0:
        return 0.0
    stages = len({stage for _, stage in ops})
    return max(abs(now[key] / totals[1] - then[key] / totals[0]) for key in ops) * stages


@dataclass(frozen=True, slots=True)
class Offer:
    """A schedule to go on with, under ``costs`` that give it a step of ``makespan_s``. ``message``: what is noted when it is
    adopted. ``back``: it is the one before the one that runs."""

    schedule: Schedule
    costs: CostProfile
    makespan_s: float
    message: str
    back: bool = False


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
class _SearchUnderWay:
    """One under way. ``task``: what a schedule must keep to. ``costs``: as measured; the task has tensor-parallel collectives
    as part of the actions, which a schedule with braids does not wait for. ``began``: by the clock. ``complained``: whether the
    user was told of a schedule refused."""

    solver: BackgroundSolve
    task: SolveTask
    costs: CostProfile
    began: float
    complained: bool = False

    def makespan(self, schedule: Schedule) -> float:
        """Return the makespan of a schedule that has run, under the costs."""
        return simulate(schedule, self.costs).makespan


class Replanner:
    """Ask :meth:`poll` between steps and :meth:`adopt` what it offers, tell :meth:`observe` of each recorded step, and
    :meth:`close` at the end. Unless ``replan.enabled``, no search ever starts.

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
        self.config, self._limit, self._note, self._clock = config.run.replan, config.pipeline.memory_limit, note, clock
        self._first_step = first_step
        self._start = pipeline.schedule
        self._running = _Running(pipeline)
        self._before: _Running | None = None
        self._search: _SearchUnderWay | None = None
        self._answers: Sequence[Found | Finished | Failed] = ()  # whose end is to be looked at
        self._solved: Seconds | None = None  # what the last search was given
        self._next = -math.inf  # no search before this time
        self._failures = self._adopted = 0
        self._rejected: set[tuple[Row, ...]] = set()

    @property
    def gains(self) -> tuple[float, float]:
        """The gain of the schedule that runs over the one before it: predicted and measured, as fractions; NaN where
        unknown."""
        if self._before is None:
            return math.nan, math.nan
        return self._running.predicted, 1 - self._running.step_s / self._before.step_s

    def close(self) -> None:
        """End the solver, at the end of the run."""
        if self._search is not None:
            self._search.solver.close()
            self._search = None

    # -- recorded steps -----------------------------------------------------------------------------------------------

    def observe(self, step: int, timeline: Timeline, step_s: float) -> None:
        """Step number ``step`` was recorded: what it measured, and how long it took."""
        if not self.config.enabled or step <= self._first_step + 1:
            return
        self._running.steps_s.append(step_s)
        if self._before is not None and len(self._running.steps_s) in (1, _TRIED):
            predicted, measured = map(format_gain, self.gains)
            took = f"{self._before.name} took {format_seconds(self._before.step_s)}"
            takes = f"schedule {self._running.name} takes {format_seconds(self._running.step_s)}"
            self._note(f"step {step}: {takes}, {took}: {measured} measured, {predicted} predicted")
        if self._search is None and self._clock() >= self._next:
            self._consider(step, timeline)

    def _consider(self, step: int, timeline: Timeline) -> None:
        """Start a search if there was none, if the last one failed, or if costs have drifted."""
        from jaxpipe.search.solve import Options
        from jaxpipe.search.solve.solver import BackgroundSolve

        # orders are searched without reductions, which stand behind the last W of any
        seconds = {at: x for at, x in seconds_by_op([timeline]).items() if op_spec(at[0]).lane != "net"}
        if self._solved is None:
            why = "looking for a better schedule"
        elif (moved := drift(self._solved, seconds)) > self.config.drift:
            why = f"costs drifted by {moved:.0%}, looking again"
        elif self._failures:
            why = "looking once more"
        else:
            return
        costs = self._costs(seconds, timeline)
        task, limit_s = self._task(costs), self.config.time_limit_s
        options = Options(time_limit_s=limit_s, workers=self.config.workers)
        try:
            solver = BackgroundSolve(replace(task, costs=costs_as_in(self._start, task.costs)), options)
        except OSError as error:
            self._failed(f"can't be started ({error.strerror})")
            return
        self._note(
            f"step {step}: re-planning: {why} (up to {format_seconds(limit_s)}, {task.memory_limit:.3g} activations)"
        )
        self._search, self._solved = _SearchUnderWay(solver, task, costs, self._clock()), seconds

    def _costs(self, seconds: Seconds, timeline: Timeline) -> CostProfile:
        """Seconds as the run measured them; where it offloads, the rates of the link to the host too."""
        costs = with_measured_times(self._running.pipeline.costs, seconds)
        # The search does not know boundary buffers.
        costs = replace(costs, boundary_buffers=False)
        rates = {lane: _bytes_per_s(timeline, lane, costs) for lane in ("d2h", "h2d")}
        if not all(rates.values()):
            return costs
        host = HostLink(rates["d2h"], rates["h2d"], 0.0, costs.host.mode, costs.host.groups)
        return replace(costs, host=host, offload_s=(), load_s=())

    def _task(self, costs: CostProfile) -> SolveTask:
        """Return the limit is what the config says, or what the schedule that the run started with needs: activations and
        bytes."""
        from jaxpipe.search.solve import SolveTask

        placement, m = self._start.placement, self._start.num_microbatches
        offload = self._start.offloads
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

    def poll(self) -> Offer | None:
        """After a step: what to go on with, None to leave it. What was offered is to be adopted before the next question."""
        from jaxpipe.search.solve.solver import Found

        # An order that runs is judged before another is looked at: a new one would be compared with what may go.
        back = self._take_back()
        if back is not None or (search := self._search) is None:
            return back
        self._answers = search.solver.take()
        offer = self._judge([answer for answer in self._answers if isinstance(answer, Found)], search)
        if offer is None:
            self._look_at_end(search)
        return offer

    def adopt(self, step: int, offer: Offer) -> Pipeline | None:
        """After step number ``step``: the pipeline of ``offer``, for the steps to come; None, and a line, if it can't be made.
        All processes make it together."""
        pipeline: Pipeline | None = None
        try:
            pipeline = self._running.pipeline.with_schedule(offer.schedule, offer.costs)
        except JaxpipeError as error:
            self._complain(str(error))
        if offer.back:
            assert self._before is not None, "a schedule ran before the one that is taken back"
            self._rejected.add(self._running.pipeline.schedule.rows)
            self._running, self._before = (
                self._running if pipeline is None else replace(self._before, pipeline=pipeline),
                None,
            )
        elif pipeline is not None:
            self._adopted += 1
            # Gains are told of schedules that were measured: one that was replaced before its first recorded step is
            # skipped.
            if self._before is None or self._running.steps_s:
                self._before = self._running
            past_s = simulate(self._before.pipeline.schedule, offer.costs).makespan
            self._running = _Running(pipeline, 1 - offer.makespan_s / past_s)
        if pipeline is not None:
            self._note(f"step {step}: {offer.message}")
        if self._search is not None:
            self._look_at_end(self._search)
        return pipeline

    def _look_at_end(self, search: _SearchUnderWay) -> None:
        """End a search if its last answers say so or it takes too long."""
        from jaxpipe.search.solve.solver import Failed, Finished

        answers, self._answers = self._answers, []
        match answers[-1:]:
            case [Finished() as finished]:
                self._finish(search, finished)
            case [Failed(what)]:
                self._failed(what)
            case _ if self._clock() > search.began + 2 * self.config.time_limit_s + PATIENCE_S:
                self._failed(f"took longer than {format_seconds(self._clock() - search.began)}")

    def _judge(self, schedules: Sequence[Found], search: _SearchUnderWay) -> Offer | None:
        """Return the newest of what was found that can run at all, if it is worth it."""
        running = self._running.pipeline
        for newest in reversed(schedules):
            schedule = backwards_like(newest.schedule, self._start)
            if not (why := why_not(schedule, self._start)):
                break
            self._complain(why)
        else:
            return None
        try:
            now_s, timeline = search.makespan(running.schedule), simulate(schedule, search.task.costs)
            gain = 1 - timeline.makespan / now_s
            if gain <= max(self.config.min_gain, TIME) or schedule.rows in self._rejected:
                return None
            if not search.task.fits(timeline):
                peak = max(timeline.peak_activations)
                raise ScheduleError(f"it needs {peak:.3g} activations, more than the limit allows")
        except JaxpipeError as error:
            self._complain(str(error))
            return None
        named = replace(schedule, name=f"solved-{self._adopted + 1}")
        message = (
            f"schedule {self._running.name} (makespan {format_seconds(now_s)}) -> {named.name} "
            f"({format_seconds(timeline.makespan)} predicted, {format_gain(gain)}; by {newest.source})"
        )
        return Offer(named, search.costs, timeline.makespan, message)

    def _take_back(self) -> Offer | None:
        """Return the schedule before this one, if this one has turned out slower by as much as it should have been faster."""
        predicted, measured = self.gains
        if self._before is None or len(self._running.steps_s) != _TRIED or not measured < -predicted:
            return None
        message = f"schedule {self._running.name} -> {self._before.name} again: it was {format_gain(measured)} measured"
        pipe = self._before.pipeline
        return Offer(pipe.schedule, pipe.costs, math.nan, message, back=True)

    # -- ends of a search ---------------------------------------------------------------------------------------------

    def _finish(self, search: _SearchUnderWay, finished: Finished) -> None:
        took = format_seconds(self._clock() - search.began)
        self._failures = 0
        self._end()
        running = self._running.pipeline.schedule
        remark = finished.remark
        if finished.lower_bound_s > 0:
            remark = f"none is more than {max(0.0, 1 - finished.lower_bound_s / search.makespan(running)):.1%} shorter"
        self._note(f"re-planning: searched for {took}; schedule {running.name} goes on{remark and f' ({remark})'}")

    def _failed(self, what: str) -> None:
        self._failures += 1
        self._end()
        self._note(f"re-planning: the solver {what}; training goes on with schedule {self._running.name}")

    def _end(self) -> None:
        """No search is under way; the next may begin a time limit after this one did, later after failures."""
        began = self._clock() if self._search is None else self._search.began
        self.close()
        self._next = began + self.config.time_limit_s * 2 ** min(self._failures, _MOST_DOUBLINGS)

    def _complain(self, why: str) -> None:
        """Say why a schedule is not taken; once a search is enough."""
        if self._search is None or not self._search.complained:
            self._note(f"re-planning: a schedule was refused: {why}")
        if self._search is not None:
            self._search.complained = True


def costs_as_in(schedule: Schedule, costs: CostProfile) -> CostProfile:
    """Costs for a solver that splits every backward: a stage whose backwards are all fused in ``schedule`` has a B that does
    everything and an empty W; one whose backwards are all split gains nothing by fusing them."""
    fused = Counter(stage for stage, _ in fused_backwards(schedule))
    stages = range(schedule.num_stages)

    def where_all_are_fused(then: Sequence[float], otherwise: Sequence[float]) -> tuple[float, ...]:
        return tuple((then if fused[s] == schedule.num_microbatches else otherwise)[s] for s in stages)

    nothing = (0.0,) * schedule.num_stages
    return replace(
        costs,
        b_s=where_all_are_fused(costs.bw_s, costs.b_s),
        w_s=where_all_are_fused(nothing, costs.w_s),
        bw_s=tuple(costs.bw_s[s] if fused[s] else costs.b_s[s] + costs.w_s[s] for s in stages),
        w_residual_bytes=where_all_are_fused(nothing, costs.w_residual_bytes),
        cotangent_bytes=where_all_are_fused(nothing, costs.cotangent_bytes),
    )


def _bytes_per_s(timeline: Timeline, lane: str, costs: CostProfile) -> float:
    """Measured rate of copies to or from the host; 0 if there were none."""
    seconds = moved = 0.0
    for event in timeline.events:
        if event.lane == lane:
            seconds += event.end_s - event.start_s
            moved += sum(costs.offloadable_bytes[a.stage] for a in event.action.actions)
    return moved / seconds if seconds > 0 else 0.0
