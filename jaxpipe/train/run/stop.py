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

from jaxpipe.interrupts import INTERRUPTED as INTERRUPTED
from jaxpipe.interrupts import last_words
from jaxpipe.runtime.connections import say

STOPPED = 75
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
            signal.pthread_sigmask(signal.SIG_UNBLOCK, self.signals)  # a launcher blocks them until somebody listens
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
        """In the thread that counts."""
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
