"""One instruction list per rank over integer slots: what the executor runs, with nothing left to infer.

A slot holds one array. Lowering decides which value sits in which slot and when it is dropped; the executor moves arrays
between slots. Arrays that travel between ranks are tagged with the action that produced them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from jaxpipe.schedule.ir import Action, Slot

ValueKind = Literal["param", "acc", "data", "key", "y", "dx", "res", "wres", "loss", "user", "state"]


@dataclass(frozen=True, slots=True)
class Value:
    """An array of one stage: the ``index``-th of its kind. ``microbatch`` is −1 for parameters and accumulators. What crosses
    from stage to stage is named by who makes it: ``y`` by the leaf of what leaves, ``dx`` by that of what enters. ``name``: of
    what instructions of one's own write."""

    kind: ValueKind
    stage: int
    microbatch: int
    index: int
    name: str = ""

    def __str__(self) -> str:
        where = f"{self.stage}" if self.microbatch < 0 else f"{self.stage}.{self.microbatch}"
        return f"{self.name or self.kind}{where}[{self.index}]"


@dataclass(frozen=True, slots=True)
class _OfAction:
    """One instruction for ``action``: it reads the arrays in the slots ``inputs`` and writes those in ``outputs``."""

    action: Slot
    inputs: tuple[int, ...]
    outputs: tuple[int, ...] = ()

    def __str__(self) -> str:
        peer = f" to rank {self.dst}" if isinstance(self, Send) else ""
        peer += f" from rank {self.src}" if isinstance(self, Recv) else ""
        peer += f" #{self.place}" if isinstance(self, Send | Recv) and self.place >= 0 else ""
        slots = " -> ".join(f"({_slots(x)})" for x in (self.inputs, self.outputs) if x)
        return f"{type(self).__name__} {self.action}{peer} {slots}"


@dataclass(frozen=True, slots=True)
class Run(_OfAction):
    """Call the function of ``action``, or of a braid whose actions are one function; results of the output −1 are dropped at
    once. ``parts``: (op, stage) of each action."""

    @property
    def parts(self) -> tuple[tuple[str, int], ...]:
        return tuple((a.op, a.stage) for a in self.action.actions)


@dataclass(frozen=True, slots=True)
class _Move(_OfAction):
    """Arrays in ``inputs`` go elsewhere, arrays from elsewhere into ``outputs``."""

    action: Action


@dataclass(frozen=True, slots=True)
class Send(_Move):
    """Copy ``inputs``, which hold arrays of ``avals``, to rank ``dst``; the message is named by the action that produced it.

    ``place``: of a message to another process, where it is started in the one order of all that all processes do
    (:mod:`jaxpipe.program.messages`); −1 where both ranks are in one process.
    """

    dst: int = -1
    avals: tuple[Any, ...] = ()
    place: int = -1


@dataclass(frozen=True, slots=True)
class Recv(_Move):
    """Receive into ``outputs`` what rank ``src`` sent for ``action``. ``place``: as of the send, or an earlier one."""

    src: int = -1
    avals: tuple[Any, ...] = ()
    place: int = -1


@dataclass(frozen=True, slots=True)
class Offload(_Move):
    """Copy ``inputs`` to ``outputs`` in pinned host memory and drop the device arrays."""


@dataclass(frozen=True, slots=True)
class Reload(_Move):
    """Copy ``inputs`` in pinned host memory back to ``outputs`` and drop the host arrays."""


@dataclass(frozen=True, slots=True)
class Sync(_Move):
    """Go on with this rank only when the copies in ``inputs`` in pinned host memory are complete."""


@dataclass(frozen=True, slots=True)
class Free:
    """Drop the arrays in ``slots``."""

    slots: tuple[int, ...]

    def __str__(self) -> str:
        return f"Free ({_slots(self.slots)})"


Instruction = Run | Send | Recv | Offload | Reload | Sync | Free
Message = tuple[int, int, Action]
"""Sender, receiver, and the action that makes it."""


@dataclass(frozen=True, slots=True)
class Program:
    """The instructions of one rank.

    ``bound``: values that the caller puts into slots before the run (parameters, accumulators, data, keys).
    ``results``: values that are in slots after it (accumulators, losses, named values that nothing reads).
    ``bound_bytes``: bytes of each bound value on each device of the rank.
    ``written_bytes[k]``: bytes of what instruction k writes, one entry a slot of :func:`writes`.
    """

    rank: int
    instructions: tuple[Instruction, ...]
    num_slots: int
    bound: tuple[tuple[Value, int], ...]
    results: tuple[tuple[Value, int], ...]
    bound_bytes: tuple[int, ...]
    written_bytes: tuple[tuple[int, ...], ...]

    def __str__(self) -> str:
        lines = [f"program of rank {self.rank}: {len(self.instructions)} instructions, {self.num_slots} slots"]
        lines += [f"  bound  {slot:4d} {value}" for value, slot in self.bound]
        lines += [f"  {i}" for i in self.instructions]
        lines += [f"  result {slot:4d} {value}" for value, slot in self.results]
        return "\n".join(lines)


def message_of(rank: int, transfer: Send | Recv) -> Message:
    """The message that ``rank`` sends or receives."""
    ends = (rank, transfer.dst) if isinstance(transfer, Send) else (transfer.src, rank)
    return *ends, transfer.action


def reads(instruction: Instruction) -> tuple[int, ...]:
    """Slots whose arrays the instruction uses."""
    return () if isinstance(instruction, Free) else instruction.inputs


def writes(instruction: Instruction) -> tuple[int, ...]:
    """Slots that the instruction fills."""
    return () if isinstance(instruction, Free) else tuple(s for s in instruction.outputs if s >= 0)


def drops(instruction: Instruction) -> tuple[int, ...]:
    """Slots that are empty after the instruction."""
    if isinstance(instruction, Free):
        return instruction.slots
    return instruction.inputs if isinstance(instruction, Offload | Reload) else ()


def _slots(slots: tuple[int, ...]) -> str:
    return " ".join("_" if s < 0 else str(s) for s in slots)
