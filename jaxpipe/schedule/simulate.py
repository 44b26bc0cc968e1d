"""When everything in a schedule happens, under given costs: the simulator, and replay of measured durations.

Source: DESIGN.md section 4; :mod:`jaxpipe.schedule.engine` holds the rules of time and :mod:`jaxpipe.schedule.memory` those of
memory. Every slot starts as early as it can. A braided slot costs the sum of its actions: overlap inside a braid is not
modelled here, nor is contention between links, nor host time between actions. A schedule with some backward passes left
out (forward only, say) is simulated as it stands; one that can't run is refused.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule.costs import CostProfile
from jaxpipe.schedule.deadlock import explain_deadlock, unmet_problems
from jaxpipe.schedule.deps import DependencyGraph, build_graph
from jaxpipe.schedule.engine import run_graph
from jaxpipe.schedule.ir import Action, Schedule, Slot, op_spec
from jaxpipe.schedule.memory import memory_curves, static_bytes
from jaxpipe.schedule.timeline import Event, Timeline


def simulate(schedule: Schedule, costs: CostProfile) -> Timeline:
    """The timeline of ``schedule`` under ``costs``; times are seconds from the start of the step.

    Transfers that take time appear as events on the lane ``send`` of the sending rank.

    Raises:
        ScheduleError: the costs are for another number of stages, an action has no place in the placement or appears twice,
            waits for something that the schedule lacks, or the ranks deadlock.
    """
    _match(schedule, costs)
    duration_of = _memo(lambda op, stage: costs.seconds(op_spec(op).cost, stage))
    with _collector_paused():
        graph = _runnable(schedule)
        duration_s = []
        for slot in graph.slots:
            if type(slot) is Action:
                duration_s.append(duration_of(slot.op, slot.stage))
            else:
                duration_s.append(sum(duration_of(a.op, a.stage) for a in slot.actions))
        return _timeline(graph, costs, duration_s, _transfer_seconds(graph, costs))


def replay(
    schedule: Schedule, durations: Mapping[tuple[int, Slot], float], costs: CostProfile | None = None
) -> Timeline:
    """The same order with a given duration (seconds) for each slot of each rank, and no time for communication.

    A slot that only waits (S) may be left out and takes 0 s.

    Measured step time divided by this timeline's makespan says what the runtime loses beside the schedule. ``costs`` is
    used for memory, and for how host lanes are shared; without it, memory is in units of activation.

    Raises:
        ScheduleError: a slot has no duration or a negative one, or the schedule can't run.
    """
    if costs is None:
        costs = CostProfile.uniform(schedule.num_stages, chunks=schedule.num_chunks)
    _match(schedule, costs)
    with _collector_paused():
        graph = _runnable(schedule)
        duration_s = []
        for number, slot in enumerate(graph.slots):
            rank = graph.rank_of[number]
            seconds = durations.get((rank, slot))
            if seconds is None and all(op_spec(a.op).is_sync for a in slot.actions):
                seconds = 0.0
            if seconds is None:
                raise ScheduleError(
                    f"replay: no duration for {slot} on rank {rank}; durations are keyed by (rank, slot)"
                )
            if not 0 <= seconds < float("inf"):
                raise ScheduleError(f"replay: {slot} on rank {rank} takes {seconds} s; want a finite number >= 0")
            duration_s.append(seconds)
        return _timeline(graph, costs, duration_s, [0.0] * len(graph.transfers))


def _runnable(schedule: Schedule) -> DependencyGraph:
    """The graph of a schedule whose actions all have a place and something to wait for."""
    graph = build_graph(schedule)
    problems = [*graph.problems, *unmet_problems(graph)]
    if problems:
        raise ScheduleError(f"schedule {schedule.name!r} can't be simulated: " + "; ".join(problems), problems)
    return graph


def _match(schedule: Schedule, costs: CostProfile) -> None:
    if costs.num_stages != schedule.num_stages:
        raise ScheduleError(
            f"the costs are for {costs.num_stages} stages and schedule {schedule.name!r} has {schedule.num_stages}; "
            f"give one entry per stage "
            f"(uniform costs: CostProfile.uniform({schedule.num_stages}, chunks={schedule.num_chunks}))"
        )


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Pause cyclic garbage collection: a simulation makes many small objects and no cycles; scanning them takes a third
    of its time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _memo(seconds: Callable[[str, int], float]) -> Callable[[str, int], float]:
    known: dict[tuple[str, int], float] = {}

    def lookup(op: str, stage: int) -> float:
        value = known.get((op, stage))
        if value is None:
            value = known[op, stage] = seconds(op, stage)
        return value

    return lookup


def _transfer_seconds(graph: DependencyGraph, costs: CostProfile) -> list[float]:
    known: dict[tuple[int, int, int], float] = {}
    seconds = []
    for _, _, src, dst, stage in graph.transfers:
        value = known.get((src, dst, stage))
        if value is None:
            value = known[src, dst, stage] = costs.transfer_s(src, dst, stage)
        seconds.append(value)
    return seconds


def _timeline(
    graph: DependencyGraph, costs: CostProfile, duration_s: Sequence[float], transfer_s: Sequence[float]
) -> Timeline:
    schedule = graph.schedule
    run = run_graph(graph, duration_s, transfer_s, costs.host)
    if run.blocked:
        raise ScheduleError(f"schedule {schedule.name!r}: " + (why := explain_deadlock(graph, run)), [why])
    start_s = [t for t in run.start_s if t is not None]
    end_s = [t for t in run.end_s if t is not None]
    memory, peaks = memory_curves(graph, costs, start_s, end_s)
    return Timeline(
        name=schedule.name,
        num_ranks=schedule.num_ranks,
        events=_events(graph, start_s, end_s),
        memory=memory,
        peak_activations=peaks,
        static_bytes=static_bytes(schedule.placement, costs),
    )


def _events(graph: DependencyGraph, start_s: Sequence[float], end_s: Sequence[float]) -> tuple[Event, ...]:
    """Events rank after rank, each rank's in order of start."""
    first = len(graph.slots)
    sent: dict[int, list[Event]] = {}
    for k, transfer in enumerate(graph.transfers, start=first):
        if end_s[k] > start_s[k]:
            event = Event(transfer.src, "send", transfer.action, start_s[k], end_s[k])
            sent.setdefault(transfer.src, []).append(event)
    events: list[Event] = []
    slots = graph.slots
    for rank, lanes in enumerate(graph.lanes):
        row = [Event(rank, lane, slots[n], start_s[n], end_s[n]) for lane in lanes for n in lanes[lane]]
        row += sent.get(rank, ())
        row.sort(key=attrgetter("start_s"))
        events += row
    return tuple(events)
