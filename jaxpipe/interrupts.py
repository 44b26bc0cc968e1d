"""Ctrl-C ends a command in one line, with one exit code and soon, wherever the command is. Imports no JAX.

Python raises KeyboardInterrupt between two instructions of the main thread: late while that compiles or solves, with odd
results inside of an import, and with tracebacks in the worker processes, to which a terminal sends the signal too. So a thread
hears of the signal, gives the main thread a moment to take down what it has up, and then ends the process and its children.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from types import FrameType
from typing import Any, NoReturn

from jaxpipe.errors import INTERRUPTED

_LINE = b"jaxpipe: interrupted\n"
_GRACE_S = 1.0
_IMPORTING = "<frozen importlib._bootstrap>"

last_words: list[Callable[[str, int], object]] = []
"""Called with how this process ends ("was interrupted") and its exit code, the newest first, if the main thread does not get to
it: to tell other processes, and free what is held. May end the process."""


class Interrupts:
    """The SIGINT handling of a command that owns the process. ``heard``: SIGINT came.

    The first SIGINT raises KeyboardInterrupt in the main thread. A second one, one during an import, or a main thread that is
    still busy a second later end the process at once, and all its children: with a line on standard error and the exit code
    130. Where SIGINT is ignored (``nohup``, a shell's ``&``), or another handler has taken over, nothing is changed.
    """

    def __init__(self) -> None:
        self.heard = False
        self._ending = threading.Lock()
        self._active = signal.getsignal(signal.SIGINT) is not signal.SIG_IGN

    def listen(self) -> None:
        """Install the handler; a SIGINT that came before and was blocked is handled, too (:func:`starting_children`)."""
        if self._active:
            self._reader, writer = os.pipe()
            os.set_blocking(writer, False)
            signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
            signal.signal(signal.SIGINT, self._interrupt)
            threading.Thread(target=self._listen, name="jaxpipe-interrupts", daemon=True).start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    def close(self, code: int) -> None:
        """Note that the command is done: from here on SIGINT only shortens how Python ends, with the exit code of the
        command."""
        if self._active and not self.heard:
            signal.signal(signal.SIGINT, lambda *_: os._exit(code))

    def finish(self) -> NoReturn:
        """End the process with the line; called once what a KeyboardInterrupt takes down is down."""
        with suppress(OSError, ValueError, AttributeError):
            sys.stdout.flush()
        self._end()

    def _interrupt(self, _number: int, frame: FrameType | None) -> None:
        """Handle SIGINT in the main thread."""
        self._begin()
        while frame is not None:
            if frame.f_code.co_filename == _IMPORTING:
                self._end()
            frame = frame.f_back
        raise KeyboardInterrupt

    def _listen(self) -> None:
        """Read signal numbers in a thread, which works while the main thread runs no Python."""
        while number := os.read(self._reader, 1):
            if number[0] == signal.SIGINT and signal.getsignal(signal.SIGINT) == self._interrupt:
                if self.heard:
                    self._end()
                self._begin()

    def _begin(self) -> None:
        """Silence all output but the line from here on, and end the process after a moment."""
        if not self.heard:
            self.heard = True
            sys.unraisablehook = lambda _: None
            threading.excepthook = lambda _: None
            threading.Timer(_GRACE_S, self._end).start()

    def _end(self) -> NoReturn:
        if not self._ending.acquire(blocking=False):
            # Another thread ends the process.
            threading.Event().wait()
        kill_children()
        for tell in reversed(last_words):
            with suppress(Exception):
                tell("was interrupted", INTERRUPTED)
        with suppress(OSError):
            os.write(2, _LINE)
        os._exit(INTERRUPTED)


def kill_children() -> None:
    """End the processes that this one has started and not waited for yet. Only where Linux's /proc tells of them."""
    # Imports nothing: the signal may have come during an import, whose lock the main thread then never gives back.
    with suppress(OSError):
        for thread in os.scandir("/proc/self/task"):
            with suppress(OSError), FileIO(f"{thread.path}/children") as listing:
                for child in listing.readall().split():
                    with suppress(OSError):
                        os.kill(int(child), signal.SIGKILL)


@contextmanager
def starting_children() -> Iterator[None]:
    """Block SIGINT until the block ends, and in the processes that it starts: their parent gets it too and ends them. They
    may unblock it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard: list[Any] = []
    before = signal.getsignal(signal.SIGINT)
    if callable(before):
        signal.signal(signal.SIGINT, lambda *signalled: heard.append(signalled))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if callable(before):
            signal.signal(signal.SIGINT, before)
    if heard and callable(before):
        before(*heard[0])
