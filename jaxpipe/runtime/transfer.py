"""Moving arrays from rank to rank: the seam between ranks in one process and ranks in several.

The executor talks to a :class:`Transport`. :class:`InProcess` serves ranks whose devices this process owns: a send is one
batched, asynchronous copy to the receiver's submesh. A cross-process transport implements the same methods
(FACTS.md: a jitted ``ppermute`` over the pair of devices).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import jax

from jaxpipe._jax_compat import copier


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
