"""A clean stop: once steps run, the first signal asks for one, a second one ends the process at once, with exit code 130.

Signals are counted by a thread, because the main thread may wait for a device inside XLA, where no Python handler runs. Imports
no JAX. Ending at once loses no checkpoint: one half-written is ignored (:mod:`jaxpipe.train.checkpoint`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from jaxpipe.runtime.lines import say

STOPPED = 75
INTERRUPTED_TWICE = 130
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
            self._thread = threading.Thread(target=self._count, name="jaxpipe-signals", daemon=True)
            self._thread.start()
            self._wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
            for number in self.signals:
                if number not in _UNLESS_IGNORED or signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._request)
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
                continue
            self._heard(signal.Signals(number[0]).name)

    def _heard(self, name: str) -> None:
        """In the thread that counts."""
        if self._seen:
            say(f"{name}: ended at once; what was saved before is intact")
            os._exit(INTERRUPTED_TWICE)
        self._seen = True
        say(f"{name}: stopping after this step and saving; a second signal ends at once")


class EndingEarly(Stop):
    """Use as a context around what comes before the first step, when nothing is to be saved yet: SIGTERM, SIGHUP and SIGUSR1
    end the process with a line and exit code 75, also while it compiles. SIGINT raises KeyboardInterrupt as ever.

    Args:
        clean_up: called before that.
    """

    signals = _SIGNALS[1:]

    def __init__(self, clean_up: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self._clean_up = clean_up

    def _heard(self, name: str) -> None:
        say(f"{name}: ended before the first step, nothing was changed; the same command starts again")
        with contextlib.suppress(Exception):
            self._clean_up()
        os._exit(STOPPED)
