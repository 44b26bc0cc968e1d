"""Values → slots: who is live when, where each array sits, and how many bytes that takes.

Slots are reused as soon as their value is dropped, so a program needs about as many slots as values are live at once.
Device memory is predicted by :mod:`~jaxpipe.cost.memory`, from what a program writes and drops.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jaxpipe.program.ir import Free, Instruction, Offload, Program, Recv, Reload, Run, Send, Sync, Value
from jaxpipe.schedule.ir import Action, Slot

BOUND_KINDS = ("param", "acc", "data", "key", "state")
RESULT_KINDS = ("acc", "loss")
UNREAD_KINDS = (*RESULT_KINDS, "user")
"""What stays if nothing reads it."""


@dataclass(frozen=True, slots=True)
class Step:
    """An instruction over values, before slots exist. ``peer``: the other rank of a send or receive, and ``avals`` what it
    carries. Only a run is of a braid."""

    kind: Literal["run", "send", "recv", "offload", "reload", "sync"]
    action: Slot
    inputs: tuple[Value, ...]
    outputs: tuple[Value | None, ...]
    peer: int = -1
    avals: tuple[Any, ...] = ()


class _Slots:
    """Integer slots, lowest free one first."""

    def __init__(self) -> None:
        self.free: list[int] = []
        self.count = 0
        self.of: dict[tuple[str, Value], int] = {}

    def take(self, value: Value, memory: str = "device") -> int:
        key = (memory, value)
        if key not in self.of:
            if self.free:
                self.of[key] = heapq.heappop(self.free)
            else:
                self.of[key] = self.count
                self.count += 1
        return self.of[key]

    def at(self, value: Value, memory: str = "device") -> int:
        return self.of[(memory, value)]

    def drop(self, value: Value, memory: str = "device") -> int:
        slot = self.of.pop((memory, value))
        heapq.heappush(self.free, slot)
        return slot


def assign_slots(rank: int, steps: Sequence[Step], value_bytes: Mapping[Value, int]) -> Program:
    """Give every value a slot, drop it after its last reader, and return the program."""
    last_read = {v: k for k, step in enumerate(steps) for v in step.inputs}
    slots = _Slots()
    bound_values = sorted(
        {v for step in steps for v in step.inputs if v.kind in BOUND_KINDS},
        key=lambda v: (v.kind, v.stage, v.microbatch, v.index, v.name),
    )
    bound = tuple((v, slots.take(v)) for v in bound_values)
    out: list[Instruction] = []
    written: list[tuple[int, ...]] = []
    for k, step in enumerate(steps):
        out.append(_instruction(slots, step))
        moved = step.inputs if step.kind in ("offload", "reload") else step.outputs
        written.append(tuple(value_bytes[v] for v in moved if v is not None))
        dead = [v for v in dict.fromkeys(step.inputs) if _is_dead(v, k, last_read, slots)]
        dead += [v for v in step.outputs if v is not None and v not in last_read and v.kind not in UNREAD_KINDS]
        if dead:
            out.append(Free(tuple(slots.drop(v) for v in dead)))
            written.append(())
    results = tuple(
        (v, slot) for (memory, v), slot in sorted(slots.of.items(), key=lambda item: item[1]) if v.kind in UNREAD_KINDS
    )
    bound_bytes = tuple(value_bytes[v] for v in bound_values)
    return Program(rank, tuple(out), slots.count, bound, results, bound_bytes, tuple(written))


def _is_dead(value: Value, k: int, last_read: Mapping[Value, int], slots: _Slots) -> bool:
    persistent = value.kind in RESULT_KINDS or value.kind == "param"
    return not persistent and last_read[value] == k and ("device", value) in slots.of


def _instruction(slots: _Slots, step: Step) -> Instruction:
    if step.kind == "run":
        inputs = tuple(slots.at(v) for v in step.inputs)
        return Run(step.action, inputs, tuple(-1 if v is None else slots.take(v) for v in step.outputs))
    action = step.action
    assert isinstance(action, Action), f"{step.kind} of {action}"
    match step.kind:
        case "send":
            return Send(action, step.peer, tuple(slots.at(v) for v in step.inputs), step.avals)
        case "recv":
            return Recv(action, step.peer, tuple(slots.take(v) for v in step.outputs if v is not None), step.avals)
        case "offload":
            host = tuple(slots.take(v, "host") for v in step.inputs)
            return Offload(action, tuple(slots.drop(v) for v in step.inputs), host)
        case "reload":
            device = tuple(slots.take(v) for v in step.inputs)
            return Reload(action, tuple(slots.drop(v, "host") for v in step.inputs), device)
        case "sync":
            return Sync(action, tuple(slots.at(v, "host") for v in step.inputs))


def live_host_bytes(program: Program) -> tuple[int, ...]:
    """Host bytes held once each instruction has its results allocated and has dropped nothing yet: offloaded residuals."""
    size: dict[int, int] = {}
    held = []
    for instruction, written in zip(program.instructions, program.written_bytes, strict=True):
        if isinstance(instruction, Offload):
            size.update(zip(instruction.host, written, strict=True))
        held.append(sum(size.values()))
        if isinstance(instruction, Reload):
            for slot in instruction.host:
                del size[slot]
    return tuple(held)


def host_bytes(programs: Sequence[Program]) -> int:
    """Host bytes that the process that runs ``programs`` needs for offloads: each rank at its peak, whenever that is."""
    return sum(max(live_host_bytes(p), default=0) for p in programs)
