"""When everything in a schedule happens, under given costs: the simulator, replay of measured durations, several steps on end.

Source: ``jaxpipe/README.md``; :mod:`jaxpipe.schedule.engine` holds the rules of time and :mod:`jaxpipe.schedule.memory`
those of memory. Every slot starts as early as it can. What collectives cost a slot, and how a braided slot hides them,
says :mod:`jaxpipe.schedule.engine`; without collectives a braid costs the sum of its actions. A braided slot waits for what
all its actions wait for, and all its results are there when it ends. O and L start after the compute slot before them in
their row, so an O further back than right behind its F may cost time (:mod:`~jaxpipe.schedule.passes.host_lane`). Not modelled:
contention between links, host time between actions.

A schedule with some backward passes left out (forward only, say) is simulated as it stands; one that can't run is refused.

:func:`simulate_steps`: what the optimizer's update between training steps costs, with and without post-validation. Sources:
`optpipe.txt` section 3.2, equations 3 and 4, and Qi et al. 2023 (zero bubble), section 4. An update needs the norm
of the whole gradient, for clipping, and whether it is finite. A rank that waits for that begins the next step when the slowest
rank has ended this one: the period is makespan + update. With *post-validation* a rank updates at once, as if the norm were
small, and that is validated later; here, before its first backward of the next step, which waits for the gradients of all
ranks (where all stages feed one loss it does anyhow). Then the period is longest rank span + update. An update waits for the
R of its rank, and the G of the next step for the update.

At uneven stages it can be shorter: a span counts from the rank's first forward, which in the first step stands as early as it
can, and where the rank then waits may stand later in the next ones. It is never longer if all stages feed one loss. Not
modelled: the time that scalars take between ranks, and steps that turn out not to be valid and start again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from operator import attrgetter
from types import MappingProxyType

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule.check import describe_unmet, explain_deadlock
from jaxpipe.schedule.costs import CostProfile
from jaxpipe.schedule.deps import DependencyGraph, Transfer, build_graph, collector_paused
from jaxpipe.schedule.engine import AT_ONCE, Passage, Woven, run_graph, slot_lanes
from jaxpipe.schedule.ir import Action, Braid, Schedule, Slot, op_spec
from jaxpipe.schedule.memory import memory_curves, static_bytes
from jaxpipe.schedule.placement import Placement
from jaxpipe.schedule.timeline import Event, Timeline


@collector_paused()
def simulate(schedule: Schedule, costs: CostProfile) -> Timeline:
    """Return the timeline of ``schedule`` under ``costs``; times are seconds from the start of the step.

    Transfers that take time appear as events on the lane ``send`` of the sending rank.

    Raises:
        ScheduleError: the costs are for another number of stages, an action has no place in the placement or appears twice,
            waits for something that the schedule lacks, or the ranks deadlock.
    """
    return simulate_graph(runnable(schedule), costs)


def simulate_graph(graph: DependencyGraph, costs: CostProfile, last_passages: Sequence[Passage] = ()) -> Timeline:
    """Return the timeline of a graph, like :func:`simulate`. ``last_passages``: of its last
    transfers, which costs do not give."""
    costs.require_stages(graph.schedule.num_stages, f"schedule {graph.schedule.name!r}")
    # slots of the same ops and stages share their lanes
    keys = list(map(_key, graph.slots))
    kinds = dict(zip(keys, graph.slots, strict=True))
    lanes_of = {key: slot_lanes(costs, [(a.op, a.stage) for a in slot.actions]) for key, slot in kinds.items()}
    passages = [*_passages(graph.transfers[: len(graph.transfers) - len(last_passages)], costs), *last_passages]
    timeline = _timeline(graph, costs, [lanes_of[key].seconds for key in keys], passages)
    return _with_collectives(timeline, lanes_of) if costs.has_collectives else timeline


def _key(slot: Slot) -> object:
    return (slot.op, slot.stage) if type(slot) is Action else tuple((a.op, a.stage) for a in slot.actions)


def _with_collectives(timeline: Timeline, lanes: Mapping[object, Woven]) -> Timeline:
    """Return ``timeline`` with what its compute slots do on the TP lane."""
    exposed = [0.0] * timeline.num_ranks
    events: list[Event] = []
    for event in timeline.events:
        events.append(event)
        if event.lane == "compute":
            inside = lanes[_key(event.action)]
            exposed[event.rank] += inside.exposed_s
            start = event.start_s
            events += [Event(event.rank, "tp", event.action, start + a, start + b) for a, b in inside.collectives]
    events.sort(key=attrgetter("rank", "start_s"))
    return replace(timeline, events=tuple(events), tp_exposed_s=tuple(exposed))


@collector_paused()
def replay(
    schedule: Schedule,
    durations: Mapping[tuple[int, Slot], float],
    costs: CostProfile | None = None,
    unread_s: Mapping[tuple[int, Slot], float] = MappingProxyType({}),
) -> Timeline:
    """Return the same order with a given duration (seconds) for each slot of each rank, and no time for communication.

    A slot that only waits (S) may be left out and takes 0 s. ``unread_s``: of the duration of a load, the seconds at its end
    in which arrays arrive that the backward does not read: that may start so much earlier, and W waits for the end.

    Measured step time divided by this timeline's makespan says what the runtime loses beside the schedule. ``costs`` is
    used for memory, and for how host lanes are shared; without it, memory is in units of activation.

    Raises:
        ScheduleError: a slot has no duration or a negative one, or the schedule can't run.
    """
    if costs is None:
        costs = CostProfile.on(schedule.placement)
    costs.require_stages(schedule.num_stages, f"schedule {schedule.name!r}")
    graph = runnable(schedule)
    duration_s = []
    for number, slot in enumerate(graph.slots):
        rank = graph.rank_of[number]
        seconds = durations.get((rank, slot))
        if seconds is None and all(op_spec(a.op).is_sync for a in slot.actions):
            seconds = 0.0
        if seconds is None:
            raise ScheduleError(f"replay: no duration for {slot} on rank {rank}; durations are keyed by (rank, slot)")
        if not 0 <= seconds < float("inf"):
            raise ScheduleError(f"replay: {slot} on rank {rank} takes {seconds} s; want a finite number >= 0")
        duration_s.append(seconds)
    passages = [AT_ONCE] * len(graph.transfers)
    if any(unread_s.values()):
        graph, passages = _reading_early(graph, passages, unread_s)
    return _timeline(graph, costs, duration_s, passages)


def _reading_early(
    graph: DependencyGraph, passages: Sequence[Passage], unread_s: Mapping[tuple[int, Slot], float]
) -> tuple[DependencyGraph, list[Passage]]:
    """Return ``graph`` and ``passages`` where what a backward reads of a load arrives so many seconds before the load ends: a
    transfer of the rank to itself that moves nothing. What follows the backward waits for the load."""
    waits, transfers, sends, arrivals = list(graph.waits), list(graph.transfers), dict(graph.sends), list(passages)
    loads: dict[tuple[int, int, int], int] = {}
    for number, (rank, slot) in enumerate(zip(graph.rank_of, graph.slots, strict=True)):
        if early_s := unread_s.get((rank, slot)):
            action = slot.actions[0]
            loads[rank, action.stage, action.microbatch] = number
            sends[number] = (len(transfers),)
            transfers.append(Transfer(number, action, rank, rank, action.stage, parts=0.0))
            arrivals.append(Passage(-early_s, 0.0))
            continue
        for load in {loads[at] for a in slot.actions if (at := (rank, a.stage, a.microbatch)) in loads}:
            arrival = len(graph.slots) + sends[load][0]
            reads = load in waits[number]
            waits[number] = (*(arrival if n == load else n for n in waits[number]), *([] if reads else [load]))
    return replace(graph, waits=waits, transfers=transfers, sends=sends), arrivals


def runnable(schedule: Schedule) -> DependencyGraph:
    """Return the graph of a schedule whose actions all have a place and something to wait for.

    Raises:
        ScheduleError: one has not.
    """
    graph = build_graph(schedule)
    problems = [*graph.problems, *(describe_unmet(graph, unmet) for unmet in graph.unmet)]
    if problems:
        raise ScheduleError(f"schedule {schedule.name!r} can't be simulated: " + "; ".join(problems), problems)
    return graph


def _passages(transfers: Sequence[Transfer], costs: CostProfile) -> list[Passage]:
    # many transfers are alike: each kind is priced once
    keys = [(moved.src, moved.dst, moved.stage, moved.action.stage, moved.barrier) for moved in transfers]
    first = dict(zip(keys, transfers, strict=True))
    passages = {key: Passage(moved.seconds(costs), moved.occupied_s(costs)) for key, moved in first.items()}
    return [passages[key] for key in keys]


def _timeline(
    graph: DependencyGraph, costs: CostProfile, duration_s: Sequence[float], passages: Sequence[Passage]
) -> Timeline:
    schedule = graph.schedule
    run = run_graph(graph, duration_s, passages, costs.host, costs.net_overlaps)
    if run.blocked:
        raise ScheduleError(f"schedule {schedule.name!r}: " + (why := explain_deadlock(graph, run)), [why])
    start_s = [t for t in run.start_s if t is not None]
    end_s = [t for t in run.end_s if t is not None]
    memory, peaks = memory_curves(graph, costs, start_s, end_s)
    static = static_bytes(schedule.placement, costs)
    return Timeline(
        name=schedule.name,
        num_ranks=schedule.num_ranks,
        events=_events(graph, start_s, end_s),
        memory=memory,
        peak_activations=peaks,
        static_bytes=static,
    )


def _events(graph: DependencyGraph, start_s: Sequence[float], end_s: Sequence[float]) -> tuple[Event, ...]:
    """Return events rank after rank, each rank's in order of start."""
    first = len(graph.slots)
    sent: dict[int, list[Event]] = {}
    for k, transfer in enumerate(graph.transfers, start=first):
        # updates between steps are transfers that move nothing (simulate_steps)
        if end_s[k] > start_s[k] and transfer.parts:
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


@dataclass(frozen=True, slots=True)
class StepsTimeline(Timeline):
    """A timeline of several steps; microbatches are numbered on from step to step, and updates are gaps.

    ``ends_s[k]``: when the last action of step k has ended. ``update_s``: seconds of an update. Without the last update.
    """

    ends_s: tuple[float, ...] = ()
    update_s: float = 0.0

    @property
    def period_s(self) -> float:
        """Return the seconds from the end of the last step but one to that of the last."""
        return self.ends_s[-1] - self.ends_s[-2]


def simulate_steps(
    schedule: Schedule, costs: CostProfile, steps: int, update_s: float = 0.0, post_validation: bool = False
) -> StepsTimeline:
    """Return ``steps`` steps of ``schedule``, each rank updating for ``update_s`` seconds between them, in the unit of
    ``costs``.

    Raises:
        ScheduleError: as :func:`~jaxpipe.schedule.simulate.simulate`; fewer than two steps, or a negative or infinite update.
    """
    if steps < 2:
        raise ScheduleError(f"simulate_steps of {steps} steps; want at least 2: a period lies between two")
    if not 0 <= update_s < float("inf"):
        raise ScheduleError(f"an update takes {update_s} s; want a finite number >= 0")
    runnable(schedule)  # what is wrong with it is told of one step
    graph = runnable(_repeated(schedule, steps))
    lanes = [[_by_step(slots, steps) for lane, slots in row.items() if lane in _LANES] for row in graph.lanes]
    linked = _with_updates(graph, lanes, post_validation)
    updates = len(linked.transfers) - len(graph.transfers)
    timeline = simulate_graph(linked, costs, [Passage(update_s, 0.0)] * updates)
    ended = {(e.rank, e.action): e.end_s for e in timeline.events if e.lane in _LANES}
    last = [{(r, graph.slots[x[k][-1]]) for r, row in enumerate(lanes) for x in row if x[k]} for k in range(steps)]
    ends_s = tuple(max((ended[slot] for slot in each), default=0.0) for each in last)
    return StepsTimeline(
        **{f.name: getattr(timeline, f.name) for f in fields(Timeline)}, ends_s=ends_s, update_s=update_s
    )


def _repeated(schedule: Schedule, steps: int) -> Schedule:
    """Return ``schedule`` so many times; a step's microbatches begin at a multiple of the flows."""
    placement, m = schedule.placement, schedule.num_microbatches
    stride = -(-m // placement.num_flows) * placement.num_flows
    rows = [tuple(_later(slot, k * stride, placement) for k in range(steps) for slot in row) for row in schedule.rows]
    return replace(schedule, num_microbatches=stride * steps, rows=tuple(rows))


def _later(slot: Slot, microbatches: int, placement: Placement) -> Slot:
    moved = [replace(a, microbatch=a.microbatch + microbatches // placement.span[a.stage]) for a in slot.actions]
    return moved[0] if type(slot) is Action else Braid(tuple(moved))


_LANES = ("compute", "net")
"""Lanes whose slots an update waits for: its gradients are reduced, too."""


def _by_step(slots: list[int], steps: int) -> list[list[int]]:
    """Return the numbers of a lane's slots, step by step."""
    each = len(slots) // steps
    return [slots[k * each : (k + 1) * each] for k in range(steps)]


def _with_updates(graph: DependencyGraph, lanes: list[list[list[list[int]]]], post_validation: bool) -> DependencyGraph:
    """Return ``graph`` with the waits between steps; an update is a transfer of a rank to itself that moves nothing, from the
    last slot of each lane. ``lanes[rank]``: slots of its lanes, step by step."""
    waits, transfers, sends = list(graph.waits), list(graph.transfers), dict(graph.sends)
    for k in range(1, len(lanes[0][0])):
        updates: dict[int, list[int]] = {}
        last = {rank: [x[k - 1][-1] for x in row if x[k - 1]] for rank, row in enumerate(lanes)}
        for rank, slots in last.items():
            updates[rank] = [len(graph.slots) + len(transfers) + n for n in range(len(slots))]
            for slot in slots:
                sends[slot] = (*sends.get(slot, ()), len(transfers))
                transfers.append(Transfer(slot, graph.slots[slot].actions[0], rank, rank, 0, parts=0.0))
        for rank, row in enumerate(lanes):
            # with post-validation a step waits for the rank's own update alone, and its first backward for all ranks' last
            # slots (Qi et al. 2023, section 4)
            awaited = updates[rank] if post_validation else [*chain(*updates.values())]
            for first, *_ in (x[k] for x in row if x[k]):
                waits[first] = (*waits[first], *awaited)
            backward = next((n for x in row for n in x[k] if _sends_back(graph.slots[n])), None)
            if post_validation and backward is not None:
                waits[backward] = (*waits[backward], *chain(*last.values()))
    return replace(graph, waits=waits, transfers=transfers, sends=sends)


def _sends_back(slot: Slot) -> bool:
    return any(op_spec(a.op).sends == "pred" for a in slot.actions)
