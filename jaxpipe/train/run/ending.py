"""How a run ends early: by a signal, after its step; or at once, where a step never ends. Imports no JAX.

Once steps run, the first signal asks for a stop, a second one ends the process at once, with exit code 130. Signals are counted
by a thread, because the main thread may wait for a device inside XLA, where no Python handler runs.

A device that hangs leaves the main thread waiting inside XLA, for good. A thread counts seconds in slices while a step is being
watched, so a process that was suspended is not taken for one that hangs.

Ending at once loses no checkpoint: one half-written is ignored (:mod:`jaxpipe.train.checkpoint`).
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import signal
import statistics
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

from jaxpipe.errors import INTERRUPTED, JaxpipeError, RunError
from jaxpipe.errors import STOPPED as STOPPED
from jaxpipe.interrupts import last_words
from jaxpipe.runtime.connections import say

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)  # USR1: what Slurm can send before time is up
_UNLESS_IGNORED = (signal.SIGHUP, signal.SIGUSR1)  # by nohup, say


class Stop:
    """Use as a context around work that looks at :attr:`requested` now and then; handlers are put back at its end.

    SIGINT, SIGTERM, SIGHUP and SIGUSR1 ask for a stop; the last two not where they were ignored before. Outside the main
    thread, where Python allows no handlers, nothing is ever requested. ``requested`` is the name of the signal, or empty.
    """

    signals: Sequence[signal.Signals] = _SIGNALS

    def __init__(self) -> None:
        self.requested = ""
        self._before: dict[int, Any] = {}
        self._seen = False

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            self._reader, self._writer = os.pipe()
            os.set_blocking(self._writer, False)
            self._wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
            self._thread = threading.Thread(target=self._count, name="jaxpipe-signals", daemon=True)
            self._thread.start()
            for number in self.signals:
                if number not in _UNLESS_IGNORED or signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._request)
            # A launcher blocks the signals in its children until somebody listens, so that none is lost in between.
            signal.pthread_sigmask(signal.SIG_UNBLOCK, self.signals)
        return self

    def __exit__(self, *_: object) -> None:
        if not self._before:
            return
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._writer)
        self._thread.join()
        os.close(self._reader)

    def _request(self, number: int, _frame: FrameType | None) -> None:
        self.requested = self.requested or signal.Signals(number).name

    def _count(self) -> None:
        """Read the number of every signal, also of those that Python handles for others."""
        while number := os.read(self._reader, 1):
            if number[0] not in self._before:
                if self._wakeup != -1:  # of who listened before, and still does
                    with contextlib.suppress(OSError):
                        os.write(self._wakeup, number)
                continue
            self._heard(signal.Signals(number[0]).name)

    def _heard(self, name: str) -> None:
        """Handle a signal, in the thread that counts them."""
        if self._seen:
            say(f"{name}: ended at once; what was saved before is intact")
            os._exit(INTERRUPTED)
        self._seen = True
        say(f"{name}: stopping after this step and saving; a second signal ends at once")


class EndingEarly(Stop):
    """Use as a context around what comes before the first step, when nothing is to be saved yet: SIGTERM, SIGHUP and SIGUSR1
    end the process with a line and exit code 75, also while it compiles. SIGINT raises KeyboardInterrupt as ever.

    Args:
        clean_up: called before that with how the process ends, in words, and with which code; also where an interrupt ends it
            (:mod:`jaxpipe.interrupts`).
    """

    signals = _SIGNALS[1:]

    def __init__(self, clean_up: Callable[[str, int], object] = lambda how, code: None) -> None:
        super().__init__()
        self._clean_up = clean_up

    def __enter__(self) -> EndingEarly:
        last_words.append(self._clean_up)
        super().__enter__()
        return self

    def __exit__(self, *details: object) -> None:
        super().__exit__(*details)
        last_words.remove(self._clean_up)

    def _heard(self, name: str) -> None:
        say(f"{name}: ended before the first step, nothing was changed; the same command starts again")
        with contextlib.suppress(Exception):
            self._clean_up("was stopped by a signal", STOPPED)
        os._exit(STOPPED)


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
        watched, spent_s = None, 0.0
        slice_s = min(_SLICE_S, self._floor_s / 4)
        while not self._closed.wait(slice_s):
            # Compared by identity: a step of the same number may be watched anew, and its time begins anew. A debugger
            # that traces the thread may hold it for as long as it likes.
            if self._watched is not watched or watched is None or _traced(self._owner):
                watched, spent_s = self._watched, 0.0
                continue
            spent_s += slice_s
            if spent_s > self.limit_s(watched.lasting):
                self._end(watched.step, watched.lasting)

    def _end(self, step: int, lasting: float) -> None:
        # The words below ask other parts of the process, which may hang as the step does: a timer in C ends it all the
        # same.
        with suppress(OSError, ValueError):
            faulthandler.dump_traceback_later(_LAST_WORDS_S, exit=True, file=_STDERR)
            faulthandler.dump_traceback(_STDERR)
        late = f"step {step} has not ended after {self.limit_s(lasting):.3g} s (run.watchdog_s)"
        self._tell(late)
        reason = "what it waits for is not known"
        with suppress(JaxpipeError, OSError, RuntimeError):
            reason = self._explain()
        say(f"jaxpipe: {late}: {reason}")
        os._exit(RunError.exit_code)


def _traced(thread: int) -> bool:
    """Return whether a debugger, or another tracer, follows the thread."""
    frame = sys._current_frames().get(thread)
    while frame is not None and frame.f_trace is None:
        frame = frame.f_back
    return frame is not None
