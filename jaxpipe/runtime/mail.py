"""Arrays from process to process, by number: JAX's transfer server.

The sender lays arrays out under a number and goes on; the receiver asks for that number, gets arrays that may still be on their
way, and goes on. Nothing is ordered, so nothing waits for its turn. They go over TCP and host memory, on GPUs too. There is no
authentication: whoever reaches the port of a server may take what lies there, so it is bound to the interface by which the
processes reach each other.

What JAX does not check is not checked here either: a number used twice, or other shapes on the two sides. Numbers are made by
rule (:meth:`Mail.channel`), and processes agree on their programs before the first message.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from itertools import count
from typing import Any

import jax

from jaxpipe.runtime.processes import Processes

_CHANNEL_BITS = 12
_SOCKETS = 2


class Mail:
    """The server of this process, and connections to those of the others: a :class:`~jaxpipe.runtime.transfer.Carrier` on the
    first of its channels. All processes make it together. ``process_of``: by rank."""

    def __init__(self, processes: Processes, process_of: Sequence[int]) -> None:
        from jax.experimental import transfer

        address = processes.interface()
        own = f"[{address}]:0" if ":" in address else f"{address}:0"
        client = jax.local_devices()[0].client
        self._server = transfer.start_transfer_server(client, own, [own] * _SOCKETS)
        own_address = processes.gather("transfer servers", self._server.address())
        self._addresses: Sequence[str] = processes.broadcast("transfer servers", own_address)
        self._process_of = process_of
        self._connections: dict[int, Any] = {}
        self._channel, self._channels = 0, count(1)

    def channel(self) -> Mail:
        """The same with numbers of their own, under which nothing has gone yet. All processes make the same ones in the same
        order."""
        made = copy(self)
        made._channel = next(self._channels)
        assert made._channel < 1 << _CHANNEL_BITS, "too many channels for their bits in a number"
        return made

    def put(self, number: int, arrays: Sequence[jax.Array], avals: Sequence[jax.ShapeDtypeStruct]) -> None:
        self._server.await_pull(number << _CHANNEL_BITS | self._channel, list(arrays))

    def get(self, number: int, src: int, avals: Sequence[jax.ShapeDtypeStruct]) -> list[jax.Array]:
        process = self._process_of[src]
        if process not in self._connections:
            self._connections[process] = self._server.connect(self._addresses[process])
        arrays: list[jax.Array] = self._connections[process].pull(number << _CHANNEL_BITS | self._channel, list(avals))
        return arrays
