"""Measures when each action ran: a thread per rank and lane waits for every result in issue order and reads the clock.

An action starts when its predecessor on its lane has ended, its inputs have arrived and it has been dispatched, whichever is
last; it ends when its result is ready. Devices run what they are given in order (seen on CPU and GPU), so this is the time
the action took on its device, up to the latency of waking a thread. Copies to and from the host have lanes of their own, as
they overlap compute, and have ended when their last array has arrived. An offload starts no earlier than what it copies is
ready, a load no earlier than its offload has ended, and a backward no earlier than the loaded arrays that it reads are there.
The dispatching thread never waits. A braid that runs as one function is one action here.

:func:`measured_timeline` makes a :class:`Timeline` of the events, and :func:`replay_ratio` compares it with a replay of its own
durations: the wall time of the step over the makespan of the same order with the same measured durations and no communication.
That shows what the runtime loses to dispatch, transfers and waiting; noise in the durations themselves cancels.
"""

from __future__ import annotations

import itertools
import math
import queue
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax

from jaxpipe.schedule import CostProfile, Event, Schedule, Slot, Timeline, build_graph, op_spec, replay
from jaxpipe.schedule.ir import HOST_LANES
from jaxpipe.schedule.memory import memory_curves, static_bytes
from jaxpipe.schedule.passes import with_missing_reductions

# Python's default of 5 ms would let the dispatching thread keep the interpreter while a thread that was woken waits for it, and
# put that on the action's time.
_SWITCH_S = 5e-5


@dataclass(frozen=True, slots=True)
class FailedAction:
    """An action whose result could not be computed. ``number``: its place in the order of dispatch."""

    number: int
    rank: int
    action: Slot
    error: Exception


class DeviceClock:
    """The host's clock, in seconds, and when arrays are ready by it. A subclass may tell another time, of arrays of its own:
    then a recorded step is one of virtual devices (``tests/support/virtual_gpu.py``).

    ``loads_follow_compute``: a load starts after the compute that was dispatched before it, as on GPUs: XLA allocates what it
    copies to in the order of the compute stream."""

    def __init__(self, *, loads_follow_compute: bool) -> None:
        self.loads_follow_compute = loads_follow_compute

    def now(self) -> float:
        """Return the time."""
        return time.perf_counter()

    def when_ready(self, arrays: Sequence[Any]) -> float:
        """Wait until all arrays are ready and return the time then."""
        jax.block_until_ready(arrays)
        return time.perf_counter()


class _Reading(NamedTuple):
    """One piece of work that a lane was given, which started at the ``earliest`` then. The thread that waits for it reads
    the clock when it wakes up, so ``sourced`` (what it reads was copied or computed) and ``ended`` are late rather than early.
    What the host did has ended."""

    number: int
    action: Slot
    lane: str
    earliest: float
    sourced: float
    ended: float


Markers = tuple[jax.Array, ...]
"""Arrays that are all ready when an action is done."""
_Watched = tuple[_Reading, Markers, Markers]
"""Something with the arrays that it must wait for, where that takes long enough to show, and its own."""


class Recorder:
    """Use as a context around the dispatch of one step; then :meth:`events` has what happened, in seconds from the start.
    ``net_overlaps``: reductions run beside compute."""

    def __init__(self, num_ranks: int, clock: DeviceClock, *, net_overlaps: bool = False) -> None:
        self._clock = clock
        self._own_lanes = (*HOST_LANES, "net") if net_overlaps else HOST_LANES
        self._queues: dict[tuple[int, str], queue.SimpleQueue[_Watched | None]] = {}
        self._threads: list[threading.Thread] = []
        self._readings: list[list[_Reading]] = [[] for _ in range(num_ranks)]
        # By (rank, stage, microbatch): the markers of the last action, which an offload copies from, arrays of the load, and
        # those of each part of the offload.
        self._last: dict[tuple[int, int, int], Markers] = {}
        self._loaded: dict[tuple[int, int, int], Markers] = {}
        self._offloaded: dict[tuple[int, int, int], deque[Markers]] = {}
        self._failures: list[FailedAction] = []
        self._origin = 0.0
        self._numbers = itertools.count()
        self._switch = sys.getswitchinterval()

    def __enter__(self) -> Recorder:
        self._origin = self._clock.now()
        sys.setswitchinterval(_SWITCH_S)
        return self

    def __exit__(self, *_: object) -> None:
        for q in self._queues.values():
            q.put(None)
        for thread in self._threads:
            thread.join()
        self._last.clear()
        self._loaded.clear()
        self._offloaded.clear()
        sys.setswitchinterval(self._switch)

    def dispatched(
        self, rank: int, lane: str, action: Slot, markers: Sequence[Any], began: float, arguments: Sequence[Any] = ()
    ) -> None:
        """Note that ``action`` was given to the device (lane ``compute``, ``d2h``, ``h2d``, ``net``), or its message, ``recv``.

        ``markers``: all are ready when it is done; without arrays among them the host did it, between ``began`` and now. A
        reduction in a lane of its own starts at ``began``, too: small ones hold up the thread that dispatches them.
        ``arguments``: what a function was called with.
        """
        now = self._clock.now()
        arrays = tuple(marker for marker in markers if hasattr(marker, "block_until_ready"))
        sources: Markers = ()
        for a in action.actions if lane != "recv" else ():
            at = (rank, a.stage, a.microbatch)
            # A lane's threads see its order, so only work behind another lane's can wait unseen: a copy for all of what it
            # copies, a backward for those loaded arrays that it reads (W may read others). It would count as their own time.
            if lane in HOST_LANES:
                offloaded = self._offloaded.setdefault(at, deque())
                # A part of a load copies what the same part of the offload wrote.
                source = offloaded.popleft() if lane == "h2d" and offloaded else self._last.get(at, ())
                sources += source if arrays else ()
                self._loaded[at] = (*self._loaded.get(at, ()), *arrays) if lane == "h2d" else ()
                if lane == "d2h":
                    offloaded.append(arrays)
            elif at in self._loaded:
                read = {id(argument) for argument in arguments}
                sources += tuple(array for array in self._loaded[at] if id(array) in read)
            self._last[at] = arrays
        earliest = now if arrays and (lane != "net" or lane not in self._own_lanes) else began
        reading = _Reading(next(self._numbers), action, lane, earliest, math.inf, now)
        self._queue(rank, lane).put((reading, sources, arrays))

    def _queue(self, rank: int, lane: str) -> queue.SimpleQueue[_Watched | None]:
        at = (rank, _queue_of(lane, self._own_lanes))
        if at not in self._queues:
            self._queues[at] = queue.SimpleQueue()
            name = f"jaxpipe-recorder-{rank}-{at[1]}"
            thread = threading.Thread(target=self._watch, args=(rank, self._queues[at]), name=name, daemon=True)
            thread.start()
            self._threads.append(thread)
        return self._queues[at]

    def _watch(self, rank: int, results: queue.SimpleQueue[_Watched | None]) -> None:
        while (watched := results.get()) is not None:
            reading, sources, markers = watched
            try:
                if sources:
                    reading = reading._replace(sourced=self._clock.when_ready(sources))
                if markers:
                    reading = reading._replace(ended=self._clock.when_ready(markers))
            except Exception as error:
                self._failures.append(FailedAction(reading.number, rank, reading.action, error))
            else:
                self._readings[rank].append(reading)

    @property
    def failure(self) -> FailedAction | None:
        """The failure to blame, or None. The one that others depend on was dispatched first."""
        return min(self._failures, key=lambda f: f.number, default=None)

    def events(self) -> tuple[Event, ...]:
        """Return all events, rank by rank in issue order. A copy issued in parts is one event that ends with its last and
        takes as long as all."""
        events: dict[tuple[int, str, Slot], Event] = {}
        for rank, readings in enumerate(self._readings):
            follows = self._clock.loads_follow_compute
            for r, start, end in _reconciled(sorted(readings), self._origin, follows, self._own_lanes):
                event = Event(rank, r.lane, r.action, start - self._origin, end - self._origin)
                if (before := events.get((rank, r.lane, r.action))) is not None:
                    event = replace(event, start_s=event.start_s - (before.end_s - before.start_s))
                events[rank, r.lane, r.action] = event
        return tuple(event for event in events.values() if event.lane != "recv")


def _reconciled(
    readings: Sequence[_Reading], origin: float, loads_follow_compute: bool, own_lanes: Collection[str]
) -> list[tuple[_Reading, float, float]]:
    """Return each reading of one rank with its start and end, in order of dispatch, consistent over its lanes.

    Threads of different lanes wake up with different delays, but an action has ended when a later one of its lane has, or when
    the next one of its stage and microbatch could start or has ended: the earliest of these readings is its end. (Not that of
    a load: B may end before arrays have arrived that only W reads.)
    """
    ends = [0.0] * len(readings)
    lane_end: dict[str, float] = {}
    chain_end: dict[tuple[int, ...], float] = {}
    # A part of a load follows the same part of the offload, and may be under way before the last one has ended.
    parts = _part_numbers(readings)
    # Backwards: a reading's end is bounded by those after it, never by those before.
    for k in range(len(readings) - 1, -1, -1):
        _, action, lane, _, sourced, ended = readings[k]
        queued, chains = _queue_of(lane, own_lanes), _chains(action)
        ended = min(ended, lane_end.get(queued, math.inf))
        parted = [(*chain, parts[k]) for chain in chains]
        if lane not in ("recv", "h2d"):
            followers = (*chains, *parted) if lane == "d2h" else chains
            ended = min(ended, *(chain_end.get(follower, math.inf) for follower in followers))
        if lane == "h2d":
            chain_end.update(dict.fromkeys(chains, math.inf) | dict.fromkeys(parted, min(ended, sourced)))
        elif lane != "recv":
            chain_end.update(dict.fromkeys(chains, min(ended, sourced)))
        ends[k] = ended
        # The host waits in S, for a copy that may end while what was dispatched before it still runs; S takes no time.
        if not _is_sync(action):
            lane_end[queued] = ended
    # Forwards: a start follows from the ends before it, which stand now.
    spans = []
    free: dict[str, float] = {}
    done: dict[tuple[int, ...], float] = {}
    computed = origin
    for r, ended, part in zip(readings, ends, parts, strict=True):
        queued, chains = _queue_of(r.lane, own_lanes), _chains(r.action)
        parted = [(*chain, part) for chain in chains]
        ended = max(ended, free.get(queued, origin))
        after = origin
        if r.lane in HOST_LANES:
            after = max(done.get(before, origin) for before in (parted if r.lane == "h2d" else chains))
        elif r.sourced < math.inf:
            after = r.sourced
        if r.lane == "h2d" and loads_follow_compute:
            after = max(after, computed)
        start = ended if _is_sync(r.action) else min(max(free.get(queued, origin), after, r.earliest), ended)
        spans.append((r, start, ended))
        free[queued] = ended
        if r.lane == "compute":
            computed = ended
        if r.lane != "recv":
            done.update(dict.fromkeys((*chains, *parted) if r.lane == "d2h" else chains, ended))
    return spans


def _part_numbers(readings: Sequence[_Reading]) -> list[int]:
    """Return how many readings of the same lane and action stand before each."""
    counts = Counter[tuple[str, Slot]]()
    numbers = []
    for r in readings:
        numbers.append(counts[r.lane, r.action])
        counts[r.lane, r.action] += 1
    return numbers


def _is_sync(slot: Slot) -> bool:
    return op_spec(slot.actions[0].op).is_sync


def _chains(slot: Slot) -> tuple[tuple[int, int], ...]:
    """Return (stage, microbatch) of each action of the slot: actions of one such pair run one after another."""
    return tuple((a.stage, a.microbatch) for a in slot.actions)


def _queue_of(lane: str, own_lanes: Collection[str]) -> str:
    """Return the lane whose thread waits for it: what is received is waited for where it is computed on, and so is a reduction
    that takes turns with compute."""
    return lane if lane in own_lanes else "compute"


def measured_timeline(schedule: Schedule, costs: CostProfile, events: Sequence[Event]) -> Timeline:
    """Make the timeline of recorded ``events`` (one per slot of the schedule, and R of some stages), with memory from the bytes
    in ``costs``.

    Braided slots that ran as several calls become one event from the first start to the last end.
    """
    schedule = _with_recorded_reductions(schedule, events)
    merged = _slot_events(schedule, events)
    graph = build_graph(schedule)
    where = [merged[(graph.rank_of[n], slot)] for n, slot in enumerate(graph.slots)]
    memory, peaks = memory_curves(graph, costs, [e.start_s for e in where], [e.end_s for e in where])
    return Timeline(
        name=schedule.name,
        num_ranks=schedule.num_ranks,
        events=tuple(merged[(rank, slot)] for rank in range(schedule.num_ranks) for slot in schedule.rows[rank]),
        memory=memory,
        peak_activations=peaks,
        static_bytes=static_bytes(schedule.placement, costs),
        source="measured",
    )


def _with_recorded_reductions(schedule: Schedule, events: Iterable[Event]) -> Schedule:
    return with_missing_reductions(schedule, {a.stage for e in events if e.lane == "net" for a in e.action.actions})


def replay_ratio(schedule: Schedule, timeline: Timeline, step_s: float, *, net_overlaps: bool = False) -> float:
    """Divide ``step_s`` by the makespan of the same order with ``timeline``'s durations and no communication. A backward that
    began before all of its load was there, as it reads only a part, need not wait for the rest. ``net_overlaps``: reductions
    ran beside compute."""
    durations: dict[tuple[int, Slot], float] = {(e.rank, e.action): e.end_s - e.start_s for e in timeline.events}
    unread_s: dict[tuple[int, Slot], float] = {}
    loads: dict[tuple[int, int, int], Event] = {}
    for event in timeline.events:
        for stage, microbatch in _chains(event.action):
            if event.lane == "h2d":
                loads[event.rank, stage, microbatch] = event
            elif (load := loads.pop((event.rank, stage, microbatch), None)) is not None:
                unread_s[event.rank, load.action] = max(0.0, load.end_s - event.start_s)
    schedule = _with_recorded_reductions(schedule, timeline.events)
    free = replace(CostProfile.on(schedule.placement), net_overlaps=net_overlaps)
    return step_s / replay(schedule, durations, free, unread_s=unread_s).makespan


def seconds_by_op(timelines: Sequence[Timeline]) -> dict[tuple[str, int], float]:
    """Return the mean seconds of each (op, stage) over all microbatches of some measured timelines."""
    return {at: sum(lengths_s) / len(lengths_s) for at, lengths_s in lengths_by_op(t.events for t in timelines).items()}


def lengths_by_op(steps: Iterable[Iterable[Event]]) -> dict[tuple[str, int], list[float]]:
    """Return the seconds of each (op, stage) in all microbatches of some recorded steps. What ran in a braid does not count:
    its time is not its own."""
    lengths_s: dict[tuple[str, int], list[float]] = {}
    for event in itertools.chain.from_iterable(steps):
        if len(event.action.actions) == 1:
            (action,) = event.action.actions
            lengths_s.setdefault((action.op, action.stage), []).append(event.end_s - event.start_s)
    return lengths_s


def _slot_events(schedule: Schedule, events: Sequence[Event]) -> dict[tuple[int, Slot], Event]:
    event_of = {(e.rank, e.action): e for e in events}
    merged: dict[tuple[int, Slot], Event] = {}
    for rank, row in enumerate(schedule.rows):
        for slot in row:
            slot_event = event_of.get((rank, slot))
            parts = [slot_event] if slot_event is not None else [event_of[(rank, action)] for action in slot.actions]
            start_s, end_s = min(e.start_s for e in parts), max(e.end_s for e in parts)
            merged[(rank, slot)] = Event(rank, parts[0].lane, slot, start_s, end_s)
    return merged
