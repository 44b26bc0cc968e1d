"""Measures when each action ran: a thread per rank and lane waits for every result in issue order and reads the clock.

An action starts when its predecessor on its lane has ended, its inputs have arrived and it has been dispatched, whichever is
last; it ends when its result is ready. Devices run what they are given in order (seen on CPU and GPU), so this is the time
the action took on its device, up to the latency of waking a thread. Copies to and from the host have lanes of their own, as
they overlap compute; an offload starts no earlier than what it copies is ready, a load no earlier than its offload has ended.
The dispatching thread never waits. A braid that runs as one function is one action here.
"""

from __future__ import annotations

import math
import queue
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax

from jaxpipe.schedule import Event, Slot
from jaxpipe.schedule.deps import HOST_LANES

_SWITCH_S = 5e-5


@dataclass(frozen=True, slots=True)
class Failure:
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
        self._last: dict[tuple[int, int, int], jax.Array | None] = {}  # marker by (rank, stage, microbatch)
        self._failures: list[Failure] = []
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
        """``action`` was given to the device (lane ``compute``, ``d2h`` or ``h2d``), or its message was (``recv``).

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
                self._failures.append(Failure(reading.number, rank, reading.action, error))
            else:
                self._readings[rank].append(reading)

    @property
    def failure(self) -> Failure | None:
        """The failure to blame, if any: the one that others depend on was dispatched first."""
        return min(self._failures, key=lambda f: f.number, default=None)

    def events(self) -> tuple[Event, ...]:
        """All events, rank by rank in issue order."""
        return tuple(
            Event(rank, r.lane, r.action, start - self._origin, end - self._origin)
            for rank, readings in enumerate(self._readings)
            for r, start, end in _reconciled(sorted(readings), self._origin)
            if r.lane != "recv"
        )


def _reconciled(readings: Sequence[_Reading], origin: float) -> list[tuple[_Reading, float, float]]:
    """Start and end of one rank's readings, in order of dispatch, consistent over its lanes.

    Threads of different lanes wake up with different delays, but an action has ended when a later one of its lane has, or when
    the next one of its stage and microbatch could start or has ended: the earliest of these readings is its end.
    """
    ends = [0.0] * len(readings)
    lane_end: dict[str, float] = {}
    chain_end: dict[tuple[int, int], float] = {}
    for k in range(len(readings) - 1, -1, -1):
        _, action, lane, _, sourced, ended = readings[k]
        queued, chains = _queue_of(lane), _chains(action)
        ended = min(ended, lane_end.get(queued, math.inf))
        if lane != "recv":
            ended = min(ended, *(chain_end.get(chain, math.inf) for chain in chains))
            chain_end.update(dict.fromkeys(chains, min(ended, sourced)))
        ends[k] = lane_end[queued] = ended
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
    """(stage, microbatch) of what the slot holds: what belongs to one of them runs one after another."""
    return tuple((a.stage, a.microbatch) for a in slot.actions)


def _queue_of(lane: str) -> str:
    """The lane whose thread waits for it: what is received is waited for where it is computed on."""
    return lane if lane in HOST_LANES else "compute"
