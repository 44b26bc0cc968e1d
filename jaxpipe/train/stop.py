"""A clean stop: the first SIGINT or SIGTERM asks for one, a second one ends the process at once.

Imports no JAX. Ending at once loses no checkpoint: one half-written is ignored (:mod:`jaxpipe.train.checkpoint`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_STDERR = 2


class Stop:
    """Use as a context around work that looks at :attr:`requested` now and then; handlers are put back at its end.

    Outside the main thread, where Python allows no handlers, nothing is ever requested. ``requested`` is the name of the
    signal, or empty.
    """

    def __init__(self) -> None:
        self.requested = ""
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self.requested = signal.Signals(number).name
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_DFL)  # the system ends the process, also inside a long call of XLA's
        line = f"{self.requested}: stopping after this step and saving; a second signal ends at once\n"
        before = "\n" if sys.stderr is not None and sys.stderr.isatty() else ""
        with contextlib.suppress(OSError):
            os.write(_STDERR, (before + line).encode())  # print may not be called while another print is under way
