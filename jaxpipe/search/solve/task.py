"""Records of the solver: the task, what it may spend, and its answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule.check import check_schedule
from jaxpipe.schedule.costs import CostProfile
from jaxpipe.schedule.engine import collectives_exposed
from jaxpipe.schedule.ir import Schedule, op_spec
from jaxpipe.schedule.memory import rank_share, static_bytes
from jaxpipe.schedule.placement import Placement
from jaxpipe.schedule.simulate import simulate
from jaxpipe.schedule.timeline import Timeline, at_most, nine_digits

Objective = Literal["makespan", "span", "lexicographic"]
Status = Literal["optimal", "feasible"]


@dataclass(frozen=True, slots=True)
class SolveTask:
    """A scheduling problem.

    ``costs``: seconds and bytes, one entry a stage of ``placement``. ``memory_limit``: peak activations allowed on a rank, in
    units of its share of one microbatch; where the costs name a limit in bytes per rank, both hold. ``offload``: whether
    activations may be copied to the host; ``offloads_in_flight``: how many of a rank at a time, from the start of their O to
    the end of their L (None: any number). ``objective``: ``makespan``; ``span``, the longest rank span, what counts with
    post-validation (`optpipe.txt` equation 3); ``lexicographic``: makespan, then peak memory, then what is offloaded.
    Boundaries in flight between ranks take no memory here, whatever the costs say, and TP collectives are part of the actions
    that wait for them: the search is for schedules without braids.
    """

    placement: Placement
    num_microbatches: int
    costs: CostProfile
    memory_limit: float = float("inf")
    offload: bool = False
    objective: Objective = "makespan"
    offloads_in_flight: int | None = None

    def __post_init__(self) -> None:
        costs = collectives_exposed(self.costs)
        if costs.boundary_buffers:
            costs = replace(costs, boundary_buffers=False)
        # bounds, families and the simulator get these costs, so all of them price one problem
        if costs is not self.costs:
            object.__setattr__(self, "costs", costs)

    def limits(self) -> tuple[float, ...]:
        """Return, per rank, what no schedule of the task exceeds: activations in units of the rank's share of one
        microbatch."""
        return self._limits(min, (0.0,) * self.placement.num_ranks)

    def safe_limits(self) -> tuple[float, ...]:
        """Return, per rank, activations that fit whatever runs: as :meth:`limits`, less the largest workspace of an action
        and the cotangents that a B adds while it runs."""
        costs, temp = self.costs, dict(self.costs.temp_bytes)
        nothing = (0.0,) * costs.num_stages
        actions = [*temp.values(), [c + t for c, t in zip(costs.cotangent_bytes, temp.get("B", nothing), strict=True)]]
        extra = [max(values[s] for values in actions) for s in range(costs.num_stages)]
        placement = self.placement
        return self._limits(max, [max(extra[s] for s in placement.stages_of(r)) for r in range(placement.num_ranks)])

    def _limits(self, share_of: Callable[[list[float]], float], workspace: Sequence[float]) -> tuple[float, ...]:
        limits = [self.memory_limit] * self.placement.num_ranks
        if self.costs.memory_limit_bytes:
            static = static_bytes(self.placement, self.costs)
            for rank, allowed in enumerate(self.costs.memory_limit_bytes):
                share = share_of(
                    [rank_share(self.placement, self.costs, rank, k) for k in range(self.placement.num_flows)]
                )
                if share > 0:
                    limits[rank] = min(limits[rank], (allowed - static[rank] - workspace[rank]) / share)
        return tuple(limits)

    def seconds(self, timeline: Timeline) -> float:
        """Return the seconds of what is minimised: the makespan, or the longest span."""
        return timeline.max_span if self.objective == "span" else timeline.makespan

    def order(self, makespan: float, span: float) -> tuple[float, float]:
        """Return what is minimised, then the other of the two times; smaller is better, and equal but for rounding is equal."""
        # else two answers that differ by rounding would lead a search two ways
        times = nine_digits(makespan), nine_digits(span)
        return times[::-1] if self.objective == "span" else times

    def timeline_of(self, schedule: Schedule) -> Timeline | None:
        """Return when an answer to this task runs what; None if it breaks a limit or offloads where that is not allowed.

        Raises:
            ScheduleError: it is not a valid schedule, or not of the task's placement and microbatches.
        """
        if (schedule.placement, schedule.num_microbatches) != (self.placement, self.num_microbatches):
            raise ScheduleError("the schedule is of another placement or number of microbatches")
        check_schedule(schedule)
        timeline = simulate(schedule, self.costs)
        return timeline if self.fits(timeline) and (self.offload or not count_offloads(schedule)) else None

    def fits(self, timeline: Timeline) -> bool:
        """Return whether a timeline keeps to the limits: in activations, in bytes with workspace where the costs limit
        them, and of offloads in flight."""
        if not all(at_most(peak, self.memory_limit) for peak in timeline.peak_activations):
            return False
        if self.offloads_in_flight is not None and most_offloaded(timeline) > self.offloads_in_flight:
            return False
        allowed = self.costs.memory_limit_bytes or (float("inf"),) * timeline.num_ranks
        return all(at_most(peak, x) for peak, x in zip(timeline.peak_bytes, allowed, strict=True))


def gap_of(value: float, lower_bound: float) -> float:
    """Return how far a value may be from the optimum, as a fraction of the bound; 0 without a bound."""
    return max(0.0, value / lower_bound - 1) if lower_bound > 0 else 0.0


def count_offloads(schedule: Schedule) -> int:
    """Return how many (stage, microbatch) pairs are copied to the host."""
    return sum(op_spec(a.op).lane == "d2h" for a in schedule.actions())


def most_offloaded(timeline: Timeline) -> int:
    """Return the most activations of a rank that are on the host, on their way there or on their way back at a time."""
    changes: dict[int, list[tuple[float, int]]] = {}
    for event in timeline.events:
        if event.lane == "d2h":
            changes.setdefault(event.rank, []).append((nine_digits(event.start_s), 1))
        elif event.lane == "h2d":
            changes.setdefault(event.rank, []).append((nine_digits(event.end_s), -1))
    # at one instant -1 sorts first: what has come back makes room for what leaves
    return max((max(accumulate(change for _, change in sorted(each))) for each in changes.values()), default=0)


@dataclass(frozen=True, slots=True)
class Options:
    """Budget of one solve. ``time_limit_s``: wall-clock seconds. ``workers``: threads or processes.

    ``reproducible``: no clock decides anything; the same task, options and OR-Tools version give the same schedule, and
    ``time_limit_s`` counts deterministic time, which is seconds of this project's development machine, roughly.
    """

    time_limit_s: float = 60.0
    seed: int = 0
    workers: int = 2
    reproducible: bool = False


@dataclass(frozen=True, slots=True)
class Progress:
    """The state of a solve: seconds since its start, best value so far (seconds of the objective), proven lower bound.

    ``source``: what found it, such as ``family v-half`` or ``neighbourhood``.
    """

    wall_s: float
    value: float
    lower_bound: float
    source: str

    @property
    def gap(self) -> float:
        """Return how far the value may be from the optimum, as a fraction of the bound."""
        return gap_of(self.value, self.lower_bound)


OnProgress = Callable[[Progress, Schedule | None], None]
"""Called with every improvement (with its schedule) and every better bound (with None)."""


@dataclass(frozen=True, slots=True)
class Solution:
    """The answer to a :class:`SolveTask`.

    ``timeline``: the schedule simulated under the task's costs. ``lower_bound``: of the objective's time, proven for every
    placement that was tried; ``placement_bound``: for that of ``schedule``. ``improvements``: every better answer, in order.
    ``family``: the best family at this limit with its time, or None if no family fits. ``failures``: what went wrong in
    worker processes, if anything; the answer stands all the same.
    """

    task: SolveTask
    schedule: Schedule
    timeline: Timeline
    lower_bound: float
    wall_s: float
    improvements: Sequence[Progress] = ()
    family: tuple[str, float] | None = None
    failures: Sequence[str] = ()
    placement_bound: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "placement_bound", max(self.placement_bound, self.lower_bound))

    @property
    def status(self) -> Status:
        """Return ``optimal`` if the bound for all is reached."""
        return "optimal" if at_most(self.value, self.lower_bound) else "feasible"

    @property
    def offloaded(self) -> int:
        """Return the number of (stage, microbatch) pairs that are offloaded."""
        return count_offloads(self.schedule)

    @property
    def first_feasible_s(self) -> float:
        """Return when the first answer was there."""
        return self.improvements[0].wall_s

    @property
    def placement_gap(self) -> float:
        """Return how far ``value`` may be from the least of its placement, as a fraction of that bound."""
        return gap_of(self.value, self.placement_bound)

    @property
    def optimal_in_placement(self) -> bool:
        """Return whether no schedule of the same placement takes less time."""
        return at_most(self.value, self.placement_bound)

    @property
    def value(self) -> float:
        """Return the seconds of what was minimised."""
        return self.task.seconds(self.timeline)

    @property
    def gap(self) -> float:
        """Return how far ``value`` may be from the optimum, as a fraction of the bound."""
        return gap_of(self.value, self.lower_bound)
