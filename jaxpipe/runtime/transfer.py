"""Moving arrays from rank to rank: the seam between ranks in one process and ranks in several.

The executor talks to a :class:`Transport`. :class:`InProcess` serves ranks whose devices this process owns: a send is one
batched, asynchronous copy to the receiver's submesh. :class:`Routed` serves those of several processes, over a
:class:`Carrier`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import jax
from jax.sharding import Mesh, NamedSharding

from jaxpipe._jax_compat import copier
from jaxpipe.program.ir import Message, Program, Recv, Send, message_of


class Transport(Protocol):
    """Carries lists of arrays between ranks. A message has a number, unique in a step and equal on both sides, so messages
    may be received in another order than they were sent."""

    def send(self, message: int, dst: int, arrays: Sequence[jax.Array]) -> None:
        """Start copying ``arrays`` to rank ``dst``; returns without waiting."""

    def recv(self, message: int) -> Sequence[jax.Array]:
        """The arrays of ``message``, on the receiver's devices; they may still be on their way."""

    def clear(self) -> None:
        """Forget what was not received (after a failed step)."""


class InProcess:
    """Ranks of this process: ``homes[message]`` says where each of its arrays lives on the receiver. (An activation may be
    split over ``dp`` alone, or over ``tp`` too.)"""

    def __init__(self, homes: Mapping[int, Sequence[jax.sharding.Sharding]]) -> None:
        alike = {tuple(where): copier(where) for where in homes.values()}
        self._copy = {number: alike[tuple(where)] for number, where in homes.items()}
        self._mail: dict[int, Sequence[jax.Array]] = {}

    def send(self, message: int, dst: int, arrays: Sequence[jax.Array]) -> None:
        self._mail[message] = self._copy[message](arrays)

    def recv(self, message: int) -> Sequence[jax.Array]:
        return self._mail.pop(message)

    def clear(self) -> None:
        self._mail.clear()


def message_numbers(programs: Sequence[Program]) -> dict[Message, int]:
    """The number of each message that ``programs`` send or receive."""
    messages = {message_of(p.rank, i) for p in programs for i in p.instructions if isinstance(i, Send | Recv)}
    return {message: n for n, message in enumerate(sorted(messages))}


def message_homes(
    programs: Sequence[Program], meshes: Sequence[Mesh], numbers: Mapping[Message, int]
) -> dict[int, list[NamedSharding]]:
    """Return, by message number, where the arrays of the message live on the receiver, split as they are on the sender."""
    return {
        numbers[message_of(p.rank, i)]: [NamedSharding(meshes[i.dst], a.sharding.spec) for a in i.avals]
        for p in programs
        for i in p.instructions
        if isinstance(i, Send)
    }


class Carrier(Protocol):
    """Carries lists of arrays from process to process. Both sides give the same number, used once, and the same ``avals``:
    shapes, dtypes and, as shardings, where the arrays go."""

    def put(self, number: int, arrays: Sequence[jax.Array], avals: Sequence[jax.ShapeDtypeStruct]) -> None:
        """Start sending ``arrays``, at least one."""

    def get(self, number: int, src: int, avals: Sequence[jax.ShapeDtypeStruct]) -> Sequence[jax.Array]:
        """Return what rank ``src`` has sent or will send; it may still be on its way."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """A message between this process and another: the rank that sends it, and what arrives, with where it lives on the
    receiver."""

    src: int
    avals: Sequence[jax.ShapeDtypeStruct]


class Routed:
    """Ranks of several processes: messages within this one by ``local``, the others by ``carrier``.

    ``away``: by number, what is sent to or received from another process. ``count``: of all messages of all ranks.
    """

    def __init__(self, local: InProcess, carrier: Carrier, away: Mapping[int, Parcel], count: int) -> None:
        self._local, self._carrier, self._away, self._count = local, carrier, away, count
        self._steps: Counter[int] = Counter()  # by message; each is sent once and received once a step

    def send(self, message: int, dst: int, arrays: Sequence[jax.Array]) -> None:
        if message in self._away:
            self._carrier.put(self._number(message), arrays, self._away[message].avals)
        else:
            self._local.send(message, dst, arrays)

    def recv(self, message: int) -> Sequence[jax.Array]:
        if message not in self._away:
            return self._local.recv(message)
        parcel = self._away[message]
        return self._carrier.get(self._number(message), parcel.src, parcel.avals)

    def clear(self) -> None:
        self._local.clear()

    def _number(self, message: int) -> int:
        number = self._steps[message] * self._count + message
        self._steps[message] += 1
        return number
