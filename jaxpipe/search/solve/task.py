"""Records of the solver: the task, what it may spend, and its answer; and the orders that a search starts from.

**First orders** (:func:`first_schedules`) are feasible and there at once, whatever the limit: groups of microbatches, each
ended before the next begins. Groups are as large as every rank's limit allows, so 1F1B's warm-up at best and one microbatch
at a time at worst (the "trivial feasible schedule" of `optpipe.txt` section 4.1.3). Far from good; it is there so that an
answer exists in well under a second at any size, and something is left if everything else is cut short. Graphs of stages
start from schedules by rules. The same orders say what to answer where nothing fits: the smallest limit that was found to
work, with and without offload.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate, product
from typing import Any, Literal

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule.check import check_schedule
from jaxpipe.schedule.costs import CostProfile
from jaxpipe.schedule.engine import collectives_exposed
from jaxpipe.schedule.ir import Schedule, Slot, op_spec
from jaxpipe.schedule.memory import rank_share, static_bytes
from jaxpipe.schedule.passes.braid import with_slots
from jaxpipe.schedule.passes.separate import separate_gradients
from jaxpipe.schedule.placement import Placement
from jaxpipe.schedule.problem import B, F, Problem, W
from jaxpipe.schedule.rules import FIRST, Traversal, traverse
from jaxpipe.schedule.simulate import simulate
from jaxpipe.schedule.timeline import MEMORY, Timeline, at_most, how_many, nine_digits
from jaxpipe.search.retime import Draft, Retimer

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
    Boundaries in flight between ranks take no memory here, whatever the costs say, and collectives are part of the actions
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


_SEPARATED = 6  # of the schedules by rules; not tuned


def group_size(problem: Problem, limits: Sequence[float]) -> int:
    """Return the most microbatches that may be in flight at once if none is given back before all are there; 0 if not even
    one."""
    flows, stages = problem.placement.num_flows, problem.placement.num_stages
    fits = problem.num_microbatches
    for rank, limit in enumerate(limits):
        shares = [0.0] * flows
        for k in problem.replicas_of(rank):
            # B may leave more for W than F kept, so the larger of both must fit
            shares[k // stages] += max(problem.held[k], problem.kept[k])
        if max(shares) > 0 and limit < float("inf"):
            fits = max(0, min(fits, how_many(max(shares), limit)))
    return fits // flows * flows or min(fits, 1)


def grouped_rows(problem: Problem, size: int) -> list[list[int]]:
    """Return rows of codes: groups of ``size`` microbatches, all F's, then each B with its W."""
    m, stages, flows = problem.num_microbatches, problem.placement.num_stages, problem.placement.num_flows
    rows: list[list[int]] = [[] for _ in range(problem.num_ranks)]
    for first in range(0, m, size):
        group = range(first, min(m, first + size))
        for k, i in [(i % flows * stages + s, i) for s in range(stages) for i in group]:
            rows[problem.rank[k]].append(problem.code(F, k, i))
        for k, i in [(i % flows * stages + s, i) for s in reversed(range(stages)) for i in group]:
            rows[problem.rank[k]] += [problem.code(B, k, i), problem.code(W, k, i)]
    return rows


def away_schedule(problem: Problem) -> Schedule:
    """Return one microbatch at a time, every residual on the host while another stage of its rank runs: the least memory
    there is.

    Each F but the rank's last is followed by O and S (the next F waits for the room); L comes behind the rank's W before.
    """
    stages, flows = problem.placement.num_stages, problem.placement.num_flows
    last = {(rank, k // stages): k for k, rank in enumerate(problem.rank)}

    def away(slot: Slot) -> Iterator[Slot]:
        for a in slot.actions:
            leaves = a.microbatch % flows * stages + a.stage not in last.values()
            if leaves and a.op == "B":
                yield replace(a, op="L")
            yield a
            if leaves and a.op == "F":
                yield from (replace(a, op="O"), replace(a, op="S"))

    return with_slots(problem.schedule("first", grouped_rows(problem, 1)), away)


def first_schedules(task: SolveTask) -> Iterator[tuple[Schedule, str, Draft | None]]:
    """Yield schedules to start from, where they come from, and their times if known: one of a chain, if it fits; several by
    rules of a graph of stages.

    Raises:
        ScheduleError: the costs are for another number of stages.
    """
    if not task.placement.is_plain_chain:
        yield from ((schedule, source, None) for schedule, source in graph_starts(task))
        return
    problem = Problem.of(task.placement, task.num_microbatches, task.costs)
    size = group_size(problem, task.safe_limits())
    if size:
        rows = grouped_rows(problem, size)
        draft = Retimer(problem).draft(rows)
        assert draft is not None, "microbatches one group after the other deadlock"
        yield problem.schedule("first", rows), "first", draft
    elif task.offload:
        yield away_schedule(problem), "first", None


def graph_starts(task: SolveTask) -> Iterator[tuple[Schedule, str]]:
    """Yield schedules by rules, the surest to keep the limits first; then the shortest of them with backwards separated.

    Raises:
        ScheduleError: the costs are for another number of stages.
    """
    ranked: list[tuple[bool, float, int, Schedule, str]] = []
    rules = (
        Traversal(first, forward=forward, backward=backward, **room)
        for room in _rooms(task)
        for first, forward, backward in product(reversed(FIRST), ("depth", "breadth"), ("depth", "breadth"))
    )
    for rule in rules:
        with suppress(ScheduleError):  # the limits of one stage or another leave no room
            schedule = traverse(task.placement, task.num_microbatches, rule, task.costs)
            timeline = simulate(schedule, task.costs)
            ranked.append((not task.fits(timeline), task.seconds(timeline), len(ranked), schedule, f"rules {rule}"))
            yield schedule, f"rules {rule}"
    for *_, schedule, name in sorted(ranked)[:_SEPARATED]:
        with suppress(ScheduleError):
            yield separate_gradients(schedule, task.costs, memory_limit=task.memory_limit), f"{name}, separated"


def _rooms(task: SolveTask) -> Iterator[dict[str, Any]]:
    """Yield limits on microbatches in flight: one at a time; for each stage what lies behind it, as in 1F1B; for each
    stage, and for each rank, what the limits allow. A stage that holds nothing has no limit."""
    placement, m = task.placement, task.num_microbatches
    most = [max(1, int(min(m, limit * (1 + MEMORY)))) for limit in task.limits()]
    behind: dict[int, int] = {}
    for s in reversed(placement.topological_order()):
        behind[s] = (task.costs.residual_bytes[s] > 0) + max((behind[t] for t in placement.successors(s)), default=0)
    flows = placement.num_flows  # a limit of a stage holds in each
    room = [
        max(1, min(most[r] for flow in placement.flows for r in flow[s]) // flows) for s in range(placement.num_stages)
    ]
    chunks = [len(placement.stages_of(rank)) for rank in range(placement.num_ranks)]
    holds = [x > 0 for x in task.costs.residual_bytes]
    yield {"in_flight": tuple(chunks)}
    yield {"in_flight_per_stage": tuple(max(1, min(x, behind[s])) if holds[s] else m for s, x in enumerate(room))}
    yield {"in_flight_per_stage": tuple(x if holds[s] else m for s, x in enumerate(room))}
    yield {"in_flight": tuple(n * x for n, x in zip(chunks, most, strict=True))}


def smallest_limits(task: SolveTask) -> tuple[float, float]:
    """Return the peak activations, in units of a rank's share of a microbatch, of one microbatch at a time: without and
    with offload."""
    if not task.placement.is_plain_chain:
        stays = min(max(simulate(x, task.costs).peak_activations) for x, _ in graph_starts(task))
        return stays, stays
    problem = Problem.of(task.placement, min(task.num_microbatches, task.placement.num_flows), task.costs)
    one_at_a_time = problem.schedule("alone", grouped_rows(problem, 1))
    stays = max(simulate(one_at_a_time, task.costs).peak_activations)
    away = max(simulate(away_schedule(problem), task.costs).peak_activations)
    return stays, min(stays, away)


def explain(tasks: Sequence[SolveTask]) -> str:
    """Return the error line for users; ``tasks`` differ in placement only."""
    task = tasks[0]
    smallest = [smallest_limits(replace(t, memory_limit=float("inf"))) for t in tasks]
    stays, away = min(x for x, _ in smallest), min(x for _, x in smallest)
    limit = min(task.safe_limits())
    sizes = f"{task.placement.num_ranks} ranks and {task.num_microbatches} microbatches"
    offload = "with" if task.offload else "without"
    most = f"{stays:g} without offload and {away:g} with it" if task.placement.is_plain_chain else f"{stays:g}"
    return f"no schedule of {sizes} keeps a memory limit of {limit:g} {offload} offload; the smallest found to work is {most}"
