"""A search that ends in time, wherever it is: an alarm interrupts the main thread between two instructions of Python."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")


class OutOfTimeError(Exception):
    """The search is to end with the best so far."""


def within(seconds: float | None, search: Callable[[], Found]) -> tuple[Found | None, bool]:
    """Return what ``search`` returns, in which OutOfTimeError is raised after so many seconds (None: never), and whether it
    was. None if time was up before the search began."""
    if seconds is None or threading.current_thread() is not threading.main_thread():
        return search(), False
    result, searching, ended = None, [True], []

    def ring(*_: object) -> None:
        if searching:
            ended.append(True)
            raise OutOfTimeError

    before, began = signal.signal(signal.SIGALRM, ring), time.monotonic()
    left_s, every_s = signal.getitimer(signal.ITIMER_REAL)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        result = search()
        searching.clear()
    except OutOfTimeError:
        pass
    finally:
        searching.clear()
        signal.setitimer(signal.ITIMER_REAL, max(left_s - (time.monotonic() - began), 0.001) if left_s else 0, every_s)
        signal.signal(signal.SIGALRM, before)
    return result, bool(ended)
