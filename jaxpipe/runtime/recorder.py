"""Measures when each action ran: a thread per rank and lane waits for every result in issue order and reads the clock.

An action starts when its predecessor on its lane has ended, its inputs have arrived and it has been dispatched, whichever is
last; it ends when its result is ready. Devices run what they are given in order (seen on CPU and GPU), so this is the time
the action took on its device, up to the latency of waking a thread. Copies to and from the host have lanes of their own, as
they overlap compute; an offload starts no earlier than what it copies is ready, a load no earlier than its offload has ended.
The dispatching thread never waits. A braid that runs as one function is one action here.

:func:`measured_timeline` makes a :class:`Timeline` of the events, and :func:`replay_ratio` compares it with a replay of its own
durations: the wall time of the step over the makespan of the same order with the same measured durations and no communication.
That shows what the runtime loses to dispatch, transfers and waiting; noise in the durations themselves cancels.
"""

from __future__ import annotations

import math
import queue
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import jax

from jaxpipe.schedule import CostProfile, Event, Schedule, Slot, Timeline, build_graph, replay
from jaxpipe.schedule.deps import HOST_LANES
from jaxpipe.schedule.memory import memory_curves, static_bytes

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


class _Reading(NamedTuple):
    """One piece of work that a lane was given, which started at the ``earliest`` then. The thread that waits for it reads
    the clock when it wakes up, so ``sourced`` (what it copies was ready) and ``ended`` are late rather than early. What the
    host did has ended."""

    number: int
    action: Slot
    lane: str
    earliest: float
    sourced: float
    ended: float


_Watched = tuple[_Reading, jax.Array | None, jax.Array | None]
"""Something with the array it copies, and the one that is ready when it is done, if any."""


class Recorder:
    """Use as a context around the dispatch of one step; then :meth:`events` has what happened, in seconds from the start."""

    def __init__(self, num_ranks: int) -> None:
        self._queues: dict[tuple[int, str], queue.SimpleQueue[_Watched | None]] = {}
        self._threads: list[threading.Thread] = []
        self._readings: list[list[_Reading]] = [[] for _ in range(num_ranks)]
        # The marker of the last action, by (rank, stage, microbatch): what a host copy that follows it copies from.
        self._last: dict[tuple[int, int, int], jax.Array | None] = {}
        self._failures: list[FailedAction] = []
        self._origin = 0.0
        self._count = 0
        self._switch = sys.getswitchinterval()

    def __enter__(self) -> Recorder:
        self._origin = time.perf_counter()
        sys.setswitchinterval(_SWITCH_S)
        return self

    def __exit__(self, *_: object) -> None:
        for q in self._queues.values():
            q.put(None)
        for thread in self._threads:
            thread.join()
        self._last.clear()
        sys.setswitchinterval(self._switch)

    def dispatched(self, rank: int, lane: str, action: Slot, marker: jax.Array | None, began: float) -> None:
        """Note that ``action`` was given to the device (lane ``compute``, ``d2h`` or ``h2d``), or its message was (``recv``).

        ``marker``: an array that is ready when it is done; None or no array if the host did it, between ``began`` and now.
        """
        now = time.perf_counter()
        self._count += 1
        if not isinstance(marker, jax.Array):
            marker = None
        source = None
        if lane != "recv":
            for a in action.actions:
                at = (rank, a.stage, a.microbatch)
                # A copy waits in its own queue for its source; without the source's time it would seem to run all the while.
                source = self._last.get(at) if lane in HOST_LANES and marker is not None else None
                self._last[at] = marker
        earliest = began if marker is None else now
        self._queue(rank, lane).put((_Reading(self._count, action, lane, earliest, math.inf, now), source, marker))

    def _queue(self, rank: int, lane: str) -> queue.SimpleQueue[_Watched | None]:
        at = (rank, _queue_of(lane))
        if at not in self._queues:
            self._queues[at] = queue.SimpleQueue()
            name = f"jaxpipe-recorder-{rank}-{at[1]}"
            self._threads.append(
                threading.Thread(target=self._watch, args=(rank, self._queues[at]), name=name, daemon=True)
            )
            self._threads[-1].start()
        return self._queues[at]

    def _watch(self, rank: int, results: queue.SimpleQueue[_Watched | None]) -> None:
        while (watched := results.get()) is not None:
            reading, source, marker = watched
            try:
                if source is not None:
                    source.block_until_ready()
                    reading = reading._replace(sourced=time.perf_counter())
                if marker is not None:
                    marker.block_until_ready()
                    reading = reading._replace(ended=time.perf_counter())
            except Exception as error:
                self._failures.append(FailedAction(reading.number, rank, reading.action, error))
            else:
                self._readings[rank].append(reading)

    @property
    def failure(self) -> FailedAction | None:
        """The failure to blame, or None. The one that others depend on was dispatched first."""
        return min(self._failures, key=lambda f: f.number, default=None)

    def events(self) -> tuple[Event, ...]:
        """Return all events, rank by rank in issue order."""
        return tuple(
            Event(rank, r.lane, r.action, start - self._origin, end - self._origin)
            for rank, readings in enumerate(self._readings)
            for r, start, end in _reconciled(sorted(readings), self._origin)
            if r.lane != "recv"
        )


def _reconciled(readings: Sequence[_Reading], origin: float) -> list[tuple[_Reading, float, float]]:
    """Return each reading of one rank with its start and end, in order of dispatch, consistent over its lanes.

    Threads of different lanes wake up with different delays, but an action has ended when a later one of its lane has, or when
    the next one of its stage and microbatch could start or has ended: the earliest of these readings is its end.
    """
    ends = [0.0] * len(readings)
    lane_end: dict[str, float] = {}
    chain_end: dict[tuple[int, int], float] = {}
    # Backwards: a reading's end is bounded by those after it, never by those before.
    for k in range(len(readings) - 1, -1, -1):
        _, action, lane, _, sourced, ended = readings[k]
        queued, chains = _queue_of(lane), _chains(action)
        ended = min(ended, lane_end.get(queued, math.inf))
        if lane != "recv":
            ended = min(ended, *(chain_end.get(chain, math.inf) for chain in chains))
            chain_end.update(dict.fromkeys(chains, min(ended, sourced)))
        ends[k] = lane_end[queued] = ended
    # Forwards: a start follows from the ends before it, which stand now.
    spans = []
    free: dict[str, float] = {}
    done: dict[tuple[int, int], float] = {}
    for r, ended in zip(readings, ends, strict=True):
        queued, chains = _queue_of(r.lane), _chains(r.action)
        after = max(done.get(chain, origin) for chain in chains) if r.lane in HOST_LANES else origin
        spans.append((r, min(max(free.get(queued, origin), after, r.earliest), ended), ended))
        free[queued] = ended
        if r.lane != "recv":
            done.update(dict.fromkeys(chains, ended))
    return spans


def _chains(slot: Slot) -> tuple[tuple[int, int], ...]:
    """Return (stage, microbatch) of each action of the slot: actions of one such pair run one after another."""
    return tuple((a.stage, a.microbatch) for a in slot.actions)


def _queue_of(lane: str) -> str:
    """Return the lane whose thread waits for it: what is received is waited for where it is computed on."""
    return lane if lane in HOST_LANES else "compute"


def measured_timeline(schedule: Schedule, costs: CostProfile, events: Sequence[Event]) -> Timeline:
    """Make the timeline of recorded ``events`` (one per slot of the schedule), with memory from the bytes in ``costs``.

    Braided slots that ran as several calls become one event from the first start to the last end.
    """
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


def replay_ratio(schedule: Schedule, timeline: Timeline, step_s: float) -> float:
    """Divide ``step_s`` by the makespan of the same order with ``timeline``'s durations and no communication."""
    durations: dict[tuple[int, Slot], float] = {(e.rank, e.action): e.end_s - e.start_s for e in timeline.events}
    return step_s / replay(schedule, durations).makespan


def seconds_by_op(timelines: Sequence[Timeline]) -> dict[tuple[str, int], float]:
    """Return the mean seconds of each (op, stage) over all microbatches of some measured timelines."""
    return {at: sum(lengths_s) / len(lengths_s) for at, lengths_s in lengths_by_op(t.events for t in timelines).items()}


def lengths_by_op(steps: Iterable[Iterable[Event]]) -> dict[tuple[str, int], list[float]]:
    """Return the seconds of each (op, stage) in all microbatches of some recorded steps. What ran in a braid does not count:
    its time is not its own."""
    lengths_s: dict[tuple[str, int], list[float]] = {}
    for event in chain.from_iterable(steps):
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
            merged[(rank, slot)] = Event(
                rank, parts[0].lane, slot, min(e.start_s for e in parts), max(e.end_s for e in parts)
            )
    return merged
