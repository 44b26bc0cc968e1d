"""Values → slots: who is live when, where each array sits, and how many bytes that takes.

Slots are reused as soon as their value is dropped, so a program needs about as many slots as values are live at once.
Device memory is predicted by :mod:`~jaxpipe.cost.memory`, from what a program writes and drops.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from jaxpipe.program.ir import Free, Instruction, Offload, Program, Reload, Sync, Value
from jaxpipe.schedule.ir import Slot

BOUND_KINDS = ("param", "acc", "data", "key", "state")
RESULT_KINDS = ("acc", "loss")
UNREAD_KINDS = (*RESULT_KINDS, "user")
"""What stays if nothing reads it."""


@dataclass(frozen=True, slots=True)
class Step:
    """An instruction over values, before slots exist. ``message``: the other rank of a send or receive, and the shapes of what
    it carries."""

    kind: Callable[..., Instruction]
    action: Slot
    inputs: tuple[Value, ...]
    outputs: tuple[Value | None, ...]
    message: tuple[Any, ...] = ()


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
        written.append(tuple(value_bytes[v] for v in step.outputs if v is not None))
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
    source = "host" if step.kind in (Reload, Sync) else "device"
    target = "host" if step.kind is Offload else "device"
    outputs = tuple(-1 if v is None else slots.take(v, target) for v in step.outputs)
    moves = step.kind in (Offload, Reload)
    inputs = tuple(slots.drop(v, source) if moves else slots.of[(source, v)] for v in step.inputs)
    return step.kind(step.action, inputs, outputs, *step.message)


def host_bytes(programs: Sequence[Program]) -> int:
    """Host bytes that the process that runs ``programs`` needs for offloads: each rank at its peak, whenever that is."""

    def changes(program: Program) -> Iterator[int]:
        for instruction, moved in zip(program.instructions, program.written_bytes, strict=True):
            if isinstance(instruction, Offload | Reload):
                yield sum(moved) if isinstance(instruction, Offload) else -sum(moved)

    return sum(max(accumulate(changes(program)), default=0) for program in programs)
