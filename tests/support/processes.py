"""Several processes of a run, played by threads."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

from jaxpipe.runtime.peers import Peers
from jaxpipe.runtime.processes import Processes, ProcessGroup


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def run_in_threads(number: int, do: Callable[[Processes], Any]) -> list[Any]:
    """Run ``do`` in several processes, which are threads here, and return what each returns or raises."""
    port, outcomes = free_port(), [None] * number

    def one(process: int) -> None:
        processes = ProcessGroup(Peers("127.0.0.1", port, number, process), 10)
        try:
            outcomes[process] = do(processes)
        except Exception as error:
            outcomes[process] = error  # type: ignore[call-overload]
        processes.leave()

    threads = [threading.Thread(target=one, args=(process,)) for process in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return outcomes
