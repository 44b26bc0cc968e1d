"""Several processes of a run, played by threads."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from random import SystemRandom
from typing import Any

from jaxpipe.runtime.peers import Peers
from jaxpipe.runtime.processes import Processes, ProcessGroup

LONG_S = 600
"""Seconds that no process has to wait for another, however slow the machine; a test that hangs ends after them."""


def free_port() -> int:
    """Return a port at which nobody listens. Linux gives no such low one to who asks for any, or connects from one: it would be
    taken before it is listened at, by another test."""
    while True:
        port = SystemRandom().randrange(16_384, 32_768)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def run_in_threads(number: int, do: Callable[[Processes], Any]) -> list[Any]:
    """Run ``do`` in several processes, which are threads here, and return what each returns or raises."""
    port, outcomes = free_port(), [None] * number

    def one(process: int) -> None:
        processes = ProcessGroup(Peers("127.0.0.1", port, number, process), LONG_S)
        try:
            outcomes[process] = do(processes)
        except Exception as error:
            outcomes[process] = error  # type: ignore[call-overload]
        processes.leave()

    threads = [threading.Thread(target=one, args=(process,)) for process in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes
