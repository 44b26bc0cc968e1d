"""Measures when each action ran: a thread per rank waits for every result in issue order and reads the clock.

An action starts when its predecessor on the rank has ended, its inputs have arrived and it has been dispatched, whichever is
last; it ends when its result is ready. Devices run what they are given in order (seen on CPU and GPU), so this is the time
the action took on its device, up to the latency of waking a thread. The dispatching thread never waits.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from dataclasses import dataclass

import jax

from jaxpipe.schedule import Action, Event

_SWITCH_S = 5e-5


@dataclass(frozen=True, slots=True)
class Failure:
    """The first action of a rank whose result could not be computed."""

    rank: int
    action: Action
    error: Exception


class Recorder:
    """Use as a context around the dispatch of one step; then :meth:`events` has what happened, in seconds from the start."""

    def __init__(self, num_ranks: int) -> None:
        self._queues: list[queue.SimpleQueue[tuple[Action, str, float, jax.Array] | None]] = [
            queue.SimpleQueue() for _ in range(num_ranks)
        ]
        self._events: list[list[Event]] = [[] for _ in range(num_ranks)]
        self._failures: list[Failure] = []
        self._origin = 0.0
        self._switch = sys.getswitchinterval()
        self._threads = [
            threading.Thread(target=self._watch, args=(r,), name=f"jaxpipe-recorder-{r}", daemon=True)
            for r in range(num_ranks)
        ]

    def __enter__(self) -> Recorder:
        self._origin = time.perf_counter()
        sys.setswitchinterval(_SWITCH_S)
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for q in self._queues:
            q.put(None)
        for thread in self._threads:
            thread.join()
        sys.setswitchinterval(self._switch)

    def dispatched(self, rank: int, lane: str, action: Action, marker: jax.Array) -> None:
        """``action`` was given to the device (lane ``compute``, ``d2h`` or ``h2d``), or its message was (``recv``)."""
        self._queues[rank].put((action, lane, time.perf_counter(), marker))

    def _watch(self, rank: int) -> None:
        free = self._origin
        while (item := self._queues[rank].get()) is not None:
            action, lane, dispatched, marker = item
            try:
                marker.block_until_ready()
            except Exception as error:
                self._failures.append(Failure(rank, action, error))
                continue
            now = time.perf_counter()
            if lane != "recv":
                start = max(free, dispatched)
                self._events[rank].append(Event(rank, lane, action, start - self._origin, now - self._origin))
            free = max(free, now)

    @property
    def failure(self) -> Failure | None:
        """The failure to blame, if any: the one that others depend on came first."""
        return self._failures[0] if self._failures else None

    def events(self) -> tuple[Event, ...]:
        """All events, rank by rank in issue order."""
        return tuple(e for row in self._events for e in row)
