"""Which ranks are this process's, and how arrays get from a rank to another outside of programs.

All processes of a run do the same things in the same order; where a rank is another process's, nothing is done there. In one
process all of it is a copy between devices. Between processes nobody waits for ever, whatever the transport makes wait:
programs end by themselves (:mod:`jaxpipe.program.deadlock`), and a move waits for the programs dispatched before it and for
the moves before it alone, which are the same in all processes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from jaxpipe._jax_compat import puts_between_processes
from jaxpipe.errors import ProgramError
from jaxpipe.program.deadlock import NATIVE, TAGGED, Lanes
from jaxpipe.program.ir import Program, Send, message_of
from jaxpipe.runtime.mail import Mail
from jaxpipe.runtime.native import Native
from jaxpipe.runtime.processes import Alone, Processes
from jaxpipe.runtime.transfer import Carrier, InProcess, Parcel, Routed, Transport, message_homes, message_numbers


class Ownership:
    """``meshes``: of all ranks. ``processes``: of the run, which make this together. ``transport``: between them, ``tagged``
    (:mod:`~jaxpipe.runtime.mail`) or ``nccl`` (:mod:`~jaxpipe.runtime.native`). ``process_of``: by rank.

    Raises:
        AgreedError: the devices of several processes can't exchange arrays by NCCL.
    """

    def __init__(self, meshes: Sequence[Mesh], processes: Processes | None = None, transport: str = "tagged") -> None:
        self.processes = Alone() if processes is None else processes
        ranks = self.processes.ranks(len(meshes))
        self.process_of = tuple(process for process, process_ranks in enumerate(ranks) for _ in process_ranks)
        self.ranks = ranks[self.processes.mine]
        self.lanes: Lanes = NATIVE if transport == "nccl" else TAGGED
        self._meshes, self._moves = meshes, 0
        if not self.divided:
            return
        self._native = Native(meshes, self.ranks) if transport == "nccl" else None
        if self._native is None:
            self._mail = Mail(self.processes, self.process_of)
        else:
            device = meshes[self.ranks[0]].devices.flat[0]
            refusal = f"run.transport=nccl sends from GPU to GPU, and {device} is none (or its JAX can't); use tagged"
            self.processes.check("transport", "" if puts_between_processes(device) else refusal)
        self._carrier = self.carrier()

    @property
    def divided(self) -> bool:
        """Whether there is more than one process."""
        return self.processes.number > 1

    @property
    def first(self) -> bool:
        """Whether rank 0 is here."""
        return 0 in self.ranks

    def refuse_divided(self, what: str) -> None:
        """Raises:
        ProgramError: there is more than one process, and ``what`` needs all ranks in one.
        """
        if self.divided:
            raise ProgramError(
                f"{what} reads all {len(self.process_of)} ranks; {self.processes.number} processes have them"
            )

    def apart(self, one: int, other: int) -> bool:
        """Whether two ranks are in two processes."""
        return self.process_of[one] != self.process_of[other]

    def carrier(self) -> Carrier:
        """The carrier of arrays between processes; nothing has gone over it yet. All processes ask for the same ones in the
        same order."""
        return self._native or self._mail.channel()

    def transport(self, programs: Sequence[Program]) -> Transport:
        """Return the transport of the messages of ``programs``, those of all ranks."""
        numbers = message_numbers(programs)
        homes = message_homes(programs, self._meshes, numbers)
        local_messages = {n for (src, dst, _), n in numbers.items() if src in self.ranks and dst in self.ranks}
        local = InProcess({number: where for number, where in homes.items() if number in local_messages})
        if not self.divided:
            return local
        away = {}
        for program in programs:
            for i in program.instructions:
                if isinstance(i, Send) and (program.rank in self.ranks) != (i.dst in self.ranks):
                    number = numbers[message_of(program.rank, i)]
                    placed_avals = zip(i.avals, homes[number], strict=True)
                    avals = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=home) for a, home in placed_avals]
                    away[number] = Parcel(program.rank, avals)
        return Routed(local, self.carrier(), away, len(numbers))

    def agree_on_programs(self, programs: Sequence[Program]) -> None:
        """Before the first message of ``programs``, those of all ranks, link what they send between.

        Raises:
            AgreedError: other processes have others; their messages would not be what these wait for.
        """
        if self.divided:
            sends = [i for p in programs for i in p.instructions if isinstance(i, Send)]
            sent = [[(a.shape, str(a.dtype)) for a in i.avals] for i in sends]
            text = "\n".join(map(str, (*programs, sent)))
            digest = {"programs": hashlib.sha256(text.encode()).hexdigest()}
            self.processes.agree("programs", digest, "start all with one config, on equal hosts")
            if self._native is not None:
                pairs = {(p.rank, i.dst) for p in programs for i in p.instructions if isinstance(i, Send)}
                pairs |= {(0, rank) for rank in range(len(self.process_of))}  # scalars
                self._native.link(pair for pair in pairs if self.apart(*pair))

    def shared(self, name: str, values: Mapping[int, Any]) -> dict[int, Any]:
        """Merge JSON values that the processes hold by number; each number is one process's."""
        if not self.divided:
            return dict(values)
        parts = self.processes.gather(name, list(values.items()))
        return dict(self.processes.broadcast(name, [pair for part in parts for pair in part]))

    def move(
        self, arrays: Sequence[jax.Array], src: int, dst: int, avals: Sequence[jax.ShapeDtypeStruct]
    ) -> Sequence[jax.Array]:
        """``arrays`` of rank ``src`` (given where that is here) as ``avals`` on the devices of rank ``dst``; empty if that is
        elsewhere. All processes call this, in the same order, and between the same programs."""
        number = self._moves = self._moves + 1
        if src in self.ranks and dst in self.ranks:
            moved: Sequence[jax.Array] = jax.device_put(list(arrays), [a.sharding for a in avals])
            return moved
        if not avals or not self.apart(src, dst):
            return []
        if src in self.ranks:
            self._carrier.put(number, arrays, avals)
        return self._carrier.get(number, src, avals) if dst in self.ranks else []
