"""A program: one rank's list of instructions over integer slots, which the executor runs with nothing left to infer.

A slot holds one array. Lowering decides which value sits in which slot and when it is dropped (:func:`assign_slots`); the
executor moves arrays between slots. Arrays that travel between ranks are tagged with the action that produced them. Slots are
reused as soon as their value is dropped, so a program needs about as many slots as values are live at once. Device memory is
predicted by :mod:`~jaxpipe.cost.memory`, from what a program writes and drops.

:func:`check_programs` is the one checker of programs: slots hold what is read, messages pair up, nothing leaks. Lowering runs
it on everything it makes.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter
from typing import Any, Literal, NamedTuple

from jaxpipe.errors import ProgramError
from jaxpipe.schedule.ir import Action, Slot

ValueKind = Literal["param", "acc", "data", "key", "y", "dx", "res", "wres", "loss", "user", "state", "sums"]


class Value(NamedTuple):
    """An array of one stage: the ``index``-th of its kind. ``microbatch`` is −1 for parameters and accumulators. What crosses
    from stage to stage is named by who makes it: ``y`` by the leaf of what leaves, ``dx`` by that of what enters. ``name``: of
    the arrays that custom instructions write. ``sums`` is all that the reduction of a stage returns, as one."""

    kind: ValueKind
    stage: int
    microbatch: int
    index: int  # type: ignore[assignment]  # hides a method of tuples
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
    """A transfer: arrays in ``inputs`` go to another rank or memory, arrays from there into ``outputs``."""

    action: Action


@dataclass(frozen=True, slots=True)
class Send(_Move):
    """Copy ``inputs``, which hold arrays of ``avals``, to rank ``dst``; the message is named by the action that produced it.

    ``place``: of a message to another process, where it is started in the one order of all that all processes do
    (:mod:`jaxpipe.program.order`); −1 where both ranks are in one process.
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
class Reduce(_Move):
    """Add up the gradient accumulators in ``inputs``, to which nothing is added any more, over the devices of the rank.

    What that returns is in the slot ``outputs``, and the accumulators may be used up. All processes with devices of the rank
    do this at the same place of the order in which they issue instructions.
    """


@dataclass(frozen=True, slots=True)
class Free:
    """Drop the arrays in ``slots``."""

    slots: tuple[int, ...]

    def __str__(self) -> str:
        return f"Free ({_slots(self.slots)})"


Instruction = Run | Send | Recv | Offload | Reload | Sync | Reduce | Free
Message = tuple[int, int, Action]
"""Sender, receiver, and the action that makes the arrays."""


@dataclass(frozen=True, slots=True)
class Program:
    """The instructions of one rank.

    ``bound``: values that the caller puts into slots before the run (parameters, accumulators, data, keys).
    ``results``: values that are in slots after it (accumulators, their sums, losses, named values that nothing reads).
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
    """Return the message that ``rank`` sends or receives."""
    ends = (rank, transfer.dst) if isinstance(transfer, Send) else (transfer.src, rank)
    return *ends, transfer.action


def reads(instruction: Instruction) -> tuple[int, ...]:
    """Return the slots whose arrays the instruction uses."""
    return () if isinstance(instruction, Free) else instruction.inputs


def writes(instruction: Instruction) -> tuple[int, ...]:
    """Return the slots that the instruction fills."""
    return () if isinstance(instruction, Free) else tuple([s for s in instruction.outputs if s >= 0])


def drops(instruction: Instruction) -> tuple[int, ...]:
    """Return the slots that are empty after the instruction."""
    if isinstance(instruction, Free):
        return instruction.slots
    return instruction.inputs if isinstance(instruction, (Offload, Reload)) else ()


def _slots(slots: tuple[int, ...]) -> str:
    return " ".join("_" if s < 0 else str(s) for s in slots)


def check_programs(programs: Sequence[Program], *, complete: bool = True) -> None:
    """Check the programs of all ranks together; of some, if they are not ``complete``, but for what others send and receive.

    Raises:
        ProgramError: a slot is read or dropped while empty, filled while full, out of range, or still full at the end without
            being a result; an array on the host is computed on, sent or offloaded, or one on the device is loaded or awaited
            as a copy; or a message is sent and not received, received and not sent, of other shapes, or sent twice.
    """
    # All problems, not the first: a lowering that goes wrong breaks several rules at once, and one of them shows the cause.
    problems = [p for program in programs for p in _slot_problems(program)]
    problems += _message_problems(programs) if complete else ()
    if problems:
        raise ProgramError("; ".join(problems))


def _slot_problems(program: Program) -> Iterator[str]:
    full = {slot for _, slot in program.bound}
    on_host: set[int] = set()
    for k, instruction in enumerate(program.instructions):
        read, written, dropped = reads(instruction), writes(instruction), drops(instruction)
        for slot in (*read, *written, *dropped):
            if not 0 <= slot < program.num_slots:
                yield f"{_where(program, k)}: slot {slot} is outside 0..{program.num_slots - 1}"
        yield from (f"{_where(program, k)}: reads slot {s}, which is empty" for s in read if s not in full)
        wants_host = isinstance(instruction, (Reload, Sync))
        for slot in full.intersection(read):
            if (slot in on_host) is not wants_host:
                yield f"{_where(program, k)}: reads slot {slot}, which is on the {'device' if wants_host else 'host'}"
        # A donated accumulator is written in place: the only slot that may be full when it is filled.
        replaced = read if isinstance(instruction, Run) else ()
        yield from (
            f"{_where(program, k)}: fills slot {s}, which is full" for s in written if s in full and s not in replaced
        )
        full.update(written)
        (on_host.update if isinstance(instruction, Offload) else on_host.difference_update)(written)
        yield from (f"{_where(program, k)}: drops slot {s}, which is empty" for s in dropped if s not in full)
        full.difference_update(dropped)
    result_slots = {slot for _, slot in program.results} | {slot for v, slot in program.bound if v.kind == "param"}
    if full - result_slots:
        yield f"rank {program.rank}: slots {sorted(full - result_slots)} are still full at the end"
    if result_slots - full:
        yield f"rank {program.rank}: result slots {sorted(result_slots - full)} are empty at the end"


def _where(program: Program, k: int) -> str:
    # Written when something is wrong: the text of every instruction took half of the check's time.
    return f"rank {program.rank}, instruction {k} ({program.instructions[k]})"


def _message_problems(programs: Sequence[Program]) -> Iterator[str]:
    ends = [(p.rank, i) for p in programs for i in p.instructions if isinstance(i, Send | Recv)]
    sent = Counter((message_of(r, i), len(i.inputs), _shapes(i)) for r, i in ends if isinstance(i, Send))
    received = Counter((message_of(r, i), len(i.outputs), _shapes(i)) for r, i in ends if isinstance(i, Recv))
    for (src, dst, action), n, shapes in sorted((sent - received).keys(), key=str):
        yield f"rank {src} sends {n} arrays of {action}{_text(shapes)} to rank {dst}, which does not receive them"
    for (src, dst, action), n, shapes in sorted((received - sent).keys(), key=str):
        yield f"rank {dst} receives {n} arrays of {action}{_text(shapes)} from rank {src}, which does not send them"
    yield from (
        f"rank {src} sends {action} to rank {dst} {n} times" for ((src, dst, action), *_), n in sent.items() if n > 1
    )


def _shapes(transfer: Send | Recv) -> tuple[Any, ...]:
    return tuple((a.shape, a.dtype) for a in transfer.avals)


def _text(shapes: tuple[Any, ...]) -> str:
    return "".join(f" {dtype}{list(shape)}" for shape, dtype in shapes)


BOUND_KINDS = ("param", "acc", "data", "key", "state")
RESULT_KINDS = ("acc", "loss", "sums")
UNREAD_KINDS = (*RESULT_KINDS, "user")
"""Kinds of values that stay in their slots if nothing reads them."""
_READ_AND_LEFT = (*RESULT_KINDS, "param")


class ValueInstruction(NamedTuple):
    """An instruction over values, before slots exist. ``message``: the other rank of a send or receive, and the shapes of what
    it carries."""

    kind: Callable[..., Instruction]
    action: Slot
    inputs: tuple[Value, ...]
    outputs: tuple[Value | None, ...]
    message: tuple[Any, ...] = ()


def assign_slots(rank: int, steps: Sequence[ValueInstruction], value_bytes: Mapping[Value, int]) -> Program:
    """Give every value a slot, drop it after its last reader, and return the program. The lowest free slot goes first, which
    keeps them few."""
    last_read = {v: k for k, step in enumerate(steps) for v in step.inputs}
    free: list[int] = []
    # By memory, as a value that is being copied has a slot in both.
    slot_of: Mapping[str, dict[Value, int]] = {"device": {}, "host": {}}
    on_device, on_host = slot_of.values()

    def take(values: Iterable[Value | None], memory: str) -> tuple[int, ...]:
        slots = slot_of[memory]
        for value in values:
            if value is not None and value not in slots:
                # Where none is free, the slots that there are all hold values.
                slots[value] = heapq.heappop(free) if free else len(on_device) + len(on_host)
        return tuple([-1 if value is None else slots[value] for value in values])

    def drop(values: Iterable[Value], memory: str) -> tuple[int, ...]:
        slots = tuple([slot_of[memory].pop(value) for value in values])
        for slot in slots:
            heapq.heappush(free, slot)
        return slots

    bound_values = sorted(
        {v for step in steps for v in step.inputs if v.kind in BOUND_KINDS},
        key=lambda v: (v.kind, v.stage, v.microbatch, v.index, v.name),
    )
    bound = tuple(zip(bound_values, take(bound_values, "device"), strict=True))
    instructions: list[Instruction] = []
    written: list[tuple[int, ...]] = []
    for k, step in enumerate(steps):
        source = "host" if step.kind in (Reload, Sync) else "device"
        # Outputs first: were the inputs' slots free already, a copy could be given the slot that it reads from.
        outputs = take(step.outputs, "host" if step.kind is Offload else "device")
        held = slot_of[source]
        moves = step.kind in (Offload, Reload)
        inputs = drop(step.inputs, source) if moves else tuple([held[value] for value in step.inputs])
        instructions.append(step.kind(step.action, inputs, outputs, *step.message))
        written.append(tuple([value_bytes[v] for v in step.outputs if v is not None]))
        # Right behind the last reader, as its own instruction: the accounting of memory sees when bytes go, and the executor
        # folds it into the instruction before. An offload has dropped its inputs already: they are not on the device any more.
        read = [v for v in step.inputs if last_read[v] == k and v.kind not in _READ_AND_LEFT and v in on_device]
        dead = [*dict.fromkeys(read)]
        dead += [v for v in step.outputs if v is not None and v not in last_read and v.kind not in UNREAD_KINDS]
        if dead:
            instructions.append(Free(drop(dead, "device")))
            written.append(())
    left = [item for item in (*on_device.items(), *on_host.items()) if item[0].kind in UNREAD_KINDS]
    num_slots = len(free) + len(on_device) + len(on_host)
    bound_bytes = tuple(value_bytes[v] for v in bound_values)
    results = tuple(sorted(left, key=itemgetter(1)))
    return Program(rank, tuple(instructions), num_slots, bound, results, bound_bytes, tuple(written))


def host_bytes(programs: Sequence[Program]) -> int:
    """Return the host bytes that the process that runs ``programs`` needs for offloads: each rank at its peak, whenever that
    is."""

    def changes(program: Program) -> Iterator[int]:
        for instruction, moved in zip(program.instructions, program.written_bytes, strict=True):
            if isinstance(instruction, Offload | Reload):
                yield sum(moved) if isinstance(instruction, Offload) else -sum(moved)

    return sum(max(accumulate(changes(program)), default=0) for program in programs)
