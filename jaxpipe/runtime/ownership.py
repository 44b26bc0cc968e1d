"""Which ranks are this process's, and how arrays get from a rank to another outside of programs.

All processes of a run do the same things in the same order; where a rank is another process's, nothing is done there. In one
process all of it is a copy between devices.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jaxpipe.program.ir import Program, Send
from jaxpipe.runtime.mail import Mail
from jaxpipe.runtime.processes import Alone, Processes


class Ownership:
    """``process_of``: by rank. ``processes``: of the run, which make this together."""

    def __init__(self, num_ranks: int, processes: Processes | None = None) -> None:
        self.processes = Alone() if processes is None else processes
        ranks = self.processes.ranks(num_ranks)
        self.process_of = tuple(process for process, some in enumerate(ranks) for _ in some)
        self.ranks = ranks[self.processes.mine]
        self.mail = Mail(self.processes) if self.divided else None
        self._channel = None if self.mail is None else self.mail.channel()
        self._moves = 0

    @property
    def divided(self) -> bool:
        """Whether there is more than one process."""
        return self.processes.number > 1

    @property
    def first(self) -> bool:
        """Whether rank 0 is here."""
        return 0 in self.ranks

    def agree_on_programs(self, programs: Sequence[Program]) -> None:
        """Raises AgreedError if other processes have others: their messages would not be what these wait for."""
        if self.divided:
            sends = [i for p in programs for i in p.instructions if isinstance(i, Send)]
            sent = [[(a.shape, str(a.dtype)) for a in i.avals] for i in sends]
            told = "\n".join(map(str, (*programs, sent)))
            digest = {"programs": hashlib.sha256(told.encode()).hexdigest()}
            self.processes.agree("programs", digest, "start all with one config, on equal hosts")

    def shared(self, name: str, own: Mapping[int, Any]) -> dict[int, Any]:
        """What the processes have by number, JSON values, as one; each number is one process's."""
        if not self.divided:
            return dict(own)
        texts = self.processes.gather(name, json.dumps(list(own.items())))
        whole = dict(pair for text in texts for pair in json.loads(text))
        pairs: list[tuple[int, Any]] = json.loads(self.processes.broadcast(name, json.dumps(list(whole.items()))))
        return dict(pairs)

    def move(
        self, arrays: Sequence[jax.Array], src: int, dst: int, avals: Sequence[jax.ShapeDtypeStruct]
    ) -> Sequence[jax.Array]:
        """``arrays`` of rank ``src`` (given where that is here) as ``avals`` on the devices of rank ``dst``; empty if that is
        elsewhere. All processes call this, in the same order."""
        number = self._moves = self._moves + 1
        if src in self.ranks and dst in self.ranks:
            moved: Sequence[jax.Array] = jax.device_put(list(arrays), [a.sharding for a in avals])
            return moved
        if not avals or self.process_of[src] == self.process_of[dst]:
            return []
        assert self._channel is not None, "ranks of several processes have a channel"
        if src in self.ranks:
            self._channel.put(number, arrays)
        return self._channel.get(number, self.process_of[src], avals) if dst in self.ranks else []
