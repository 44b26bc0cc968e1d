"""Ends a run whose step never ends: a device that hangs leaves the main thread waiting inside XLA, for good.

A thread counts seconds in slices while a step is being watched, so a process that was suspended is not taken for one that
hangs. Imports no JAX. What it ends loses no checkpoint: one half-written is ignored (:mod:`jaxpipe.train.checkpoint`).
"""

from __future__ import annotations

import faulthandler
import math
import os
import statistics
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from jaxpipe.errors import JaxpipeError, RunError
from jaxpipe.runtime.connections import say

_FACTOR = 20
_KEPT = 33  # steps that the usual length is the median of
_SLICE_S = 1.0
_LAST_WORDS_S = 30
_STDERR = 2


@dataclass(frozen=True, slots=True, eq=False)
class _Watched:
    step: int
    lasting: float


class Watchdog:
    """Use as a context around the steps of a run; the thread that makes it is the one that runs them.

    While a step is watched for longer than ``floor_s`` and than 20 times the median of the past ones, the process ends with
    exit code 5, after every thread's stack and one line on standard error. Before the first step was timed nothing is too
    long, as that one compiles; nor is it while a Python debugger traces the watched thread. What is not a step may be watched
    as if it were some.

    Args:
        floor_s: seconds; 0 watches nothing.
        explain: called in another thread when the time is up: where the step stands, and what to do.
        tell: called before that with what took too long, where other processes are to end, too; may end this one.
    """

    def __init__(
        self, floor_s: float, explain: Callable[[], str], tell: Callable[[str], object] = lambda late: None
    ) -> None:
        self.usual_s = math.inf
        self._floor_s, self._explain, self._tell = floor_s, explain, tell
        self._watched: _Watched | None = None  # a new one each time, so that a slice belongs to one of them
        self._lengths_s: deque[float] = deque(maxlen=_KEPT)
        self._closed = threading.Event()
        self._owner = threading.get_ident()
        self._thread = threading.Thread(target=self._count, name="jaxpipe-watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        if self._floor_s > 0:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        if self._floor_s > 0:
            self._thread.join()

    @contextmanager
    def watch(self, step: int, lasting: float = 1) -> Iterator[None]:
        """The block dispatches ``step`` or waits for it, or for something else that takes at most ``lasting`` steps."""
        before, self._watched = self._watched, _Watched(step, lasting)
        try:
            yield
        finally:
            self._watched = before and replace(before)

    def limit_s(self, lasting: float = 1) -> float:
        """After how many seconds the process ends."""
        return max(self._floor_s, _FACTOR * self.usual_s * lasting)

    def took(self, seconds: float) -> None:
        """A step took so long."""
        self._lengths_s.append(seconds)
        self.usual_s = statistics.median(self._lengths_s)

    def _count(self) -> None:
        seen, spent_s = None, 0.0
        slice_s = min(_SLICE_S, self._floor_s / 4)
        while not self._closed.wait(slice_s):
            if self._watched is not seen or seen is None or _traced(self._owner):
                seen, spent_s = self._watched, 0.0
                continue
            spent_s += slice_s
            if spent_s > self.limit_s(seen.lasting):
                self._end(seen.step, seen.lasting)

    def _end(self, step: int, lasting: float) -> None:
        with suppress(OSError, ValueError):
            faulthandler.dump_traceback_later(
                _LAST_WORDS_S, exit=True, file=_STDERR
            )  # whatever the words below wait for
            faulthandler.dump_traceback(_STDERR)
        late = f"step {step} has not ended after {self.limit_s(lasting):.3g} s (run.watchdog_s)"
        self._tell(late)
        said = "what it waits for is not known"
        with suppress(JaxpipeError, OSError, RuntimeError):
            said = self._explain()
        say(f"jaxpipe: {late}: {said}")
        os._exit(RunError.exit_code)


def _traced(thread: int) -> bool:
    """Whether a debugger, or another tracer, follows the thread."""
    frame = sys._current_frames().get(thread)
    while frame is not None and frame.f_trace is None:
        frame = frame.f_back
    return frame is not None
