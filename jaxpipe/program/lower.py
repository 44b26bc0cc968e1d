"""Schedule + stage functions → one :class:`~jaxpipe.program.ir.Program` per rank.

Each action becomes a ``Run`` with its ports bound to values; a value that a neighbour stage needs stays where it is when that
stage lives on the same rank, and is sent right after the ``Run`` otherwise; it is received right before its first reader.
A braid becomes one ``Run`` where there is a function for it, else one a part; a braid with a sync in it always does.
Offload and load actions move the residuals that the stage has chosen (``StageFunctions.offloaded``); S waits for the copy.
Slots are assigned, and dropped after the last reader, by :mod:`jaxpipe.program.liveness`. Not lowered here: stages spread over
several ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Literal

import jax

from jaxpipe import dump
from jaxpipe.errors import ProgramError
from jaxpipe.program.check import check_programs
from jaxpipe.program.ir import Program, Value
from jaxpipe.program.liveness import Step, assign_slots
from jaxpipe.schedule import Action, Braid, Schedule, Slot, check_schedule, op_spec
from jaxpipe.schedule.placement import Edges
from jaxpipe.stage.compiled.footprint import device_bytes
from jaxpipe.stage.functions import AnyFunction, Braids, Parts, Port, StageFunctions
from jaxpipe.stage.model.links import stage_edges


def lower(
    schedule: Schedule, stages: Sequence[StageFunctions], braids: Braids = MappingProxyType({})
) -> tuple[Program, ...]:
    """The programs of all ranks, checked.

    Args:
        schedule: any valid schedule whose stages follow each other as the model's do, one rank a stage (of a chain several
            flows too).
        stages: the functions of each stage, in order.
        braids: by rank and parts; a braid that is not among them runs as separate calls, one after another.

    Raises:
        ScheduleError: the schedule is invalid.
        ProgramError: the schedule does not fit the stages, or uses what the runtime does not support.
    """
    check_schedule(schedule)
    _check_fit(schedule, stages)
    performers = _performers(schedule)
    programs = tuple(
        _RankLowering(schedule, stages, braids, performers, rank).program() for rank in range(schedule.num_ranks)
    )
    check_programs(programs)
    for program in programs:
        dump.dump("program", f"rank{program.rank}", str(program))
    return programs


def braided_slots(schedule: Schedule, stages: Sequence[StageFunctions]) -> tuple[tuple[int, Parts], ...]:
    """(rank, parts) of the braids that can run as one function: all but those that hold a sync.

    Raises:
        ScheduleError, ProgramError: there are braids, and the schedule is one that :func:`lower` refuses.
    """
    found = {
        (rank, tuple((a.op, a.stage) for a in slot.actions)): None
        for rank, row in enumerate(schedule.rows)
        for slot in row
        if isinstance(slot, Braid) and not any(op_spec(a.op).is_sync for a in slot.actions)
    }
    if found:
        check_schedule(schedule)
        _check_fit(schedule, stages)
    return tuple(found)


def _check_fit(schedule: Schedule, stages: Sequence[StageFunctions]) -> None:
    placement = schedule.placement
    if placement.num_stages != len(stages):
        raise ProgramError(
            f"schedule {schedule.name!r} has {placement.num_stages} stages, the model was cut into {len(stages)}; cut it into "
            f"{placement.num_stages} (ranks × chunks)"
        )
    edges = stage_edges([stage.links for stage in stages])
    if edges != tuple(sorted(placement.edges)):
        raise ProgramError(
            f"schedule {schedule.name!r} has the edges {_arrows(placement.edges)} between stages; the model's, by what its "
            f"layers take, are {_arrows(edges)}"
        )
    if placement.num_flows > 1 and not placement.is_chain:
        raise ProgramError(
            "the runtime runs several flows over a chain of stages only; this placement's form another graph"
        )
    for s in range(placement.num_stages):
        for i in range(placement.num_flows):
            group = placement.ranks(s, i)
            if len(group) != 1:
                raise ProgramError(
                    f"stage {s} is spread over ranks {', '.join(map(str, group))}; the runtime runs one rank a stage: use a "
                    "placement without shared stages"
                )
    for rank in range(schedule.num_ranks):
        for action in schedule.actions(rank):
            if op_spec(action.op).is_sync:
                _check_sync(rank, action)
            elif op_spec(action.op).lane == "compute" and action.op not in stages[action.stage].functions:
                have = " ".join(sorted(stages[action.stage].functions))
                raise ProgramError(
                    f"rank {rank}, action {action}: stage {action.stage} has no function for op {action.op!r} (it has {have})"
                )


def _arrows(edges: Edges) -> str:
    return " ".join(f"{a}->{b}" for a, b in sorted(edges)) or "none"


def _check_sync(rank: int, action: Action) -> None:
    waits = op_spec(action.op).waits
    if len(waits) != 1 or waits[0].where != "self" or any(op_spec(op).lane != "d2h" for op in waits[0].ops):
        raise ProgramError(
            f"rank {rank}, action {action}: the runtime can wait only for an offload of the same stage and microbatch"
        )


class _RankLowering:
    """Walks one row and writes steps over values."""

    def __init__(
        self,
        schedule: Schedule,
        stages: Sequence[StageFunctions],
        braids: Braids,
        performers: Mapping[tuple[int, str, int, int], Action],
        rank: int,
    ) -> None:
        self.schedule = schedule
        self.stages = stages
        self.braids = braids
        self.performers = performers
        self.rank = rank
        self.steps: list[Step] = []
        self.value_bytes: dict[Value, int] = {}
        self.present: set[Value] = set()

    def program(self) -> Program:
        for slot in self.schedule.rows[self.rank]:
            together = self.braids.get((self.rank, tuple((a.op, a.stage) for a in slot.actions)))
            if together is not None:
                self._run(slot, together, together.input_parts, together.output_parts)
                continue
            for action in slot.actions:
                self._one(action)
        return assign_slots(self.rank, self.steps, self.value_bytes)

    def _one(self, action: Action) -> None:
        spec = op_spec(action.op)
        if spec.is_sync:
            self._move(action, "sync")
        elif spec.lane == "compute":
            function = self.stages[action.stage].functions[action.op]
            self._run(action, function, [0] * len(function.inputs), [0] * len(function.outputs))
        else:
            self._move(action, "offload" if spec.lane == "d2h" else "reload")

    def _run(self, slot: Slot, function: AnyFunction, reads: Sequence[int], makes: Sequence[int]) -> None:
        """One call. ``reads``, ``makes``: which of the slot's actions each input and output port belongs to."""
        actions = slot.actions
        inputs = [self._value(port, actions[k]) for port, k in zip(function.inputs, reads, strict=True)]
        for k, action in enumerate(actions):
            self._receive(action, [v for v, part in zip(inputs, reads, strict=True) if part == k])
        outputs = [self._output(port, actions[k]) for port, k in zip(function.outputs, makes, strict=True)]
        for value, aval in zip(inputs, function.avals_in, strict=True):
            self.value_bytes[value] = device_bytes(aval)
        for out, aval in zip(outputs, function.avals_out, strict=True):
            if out is not None:
                self.value_bytes[out] = device_bytes(aval)
        self.steps.append(Step("run", slot, tuple(inputs), tuple(outputs)))
        self.present.update(v for v in outputs if v is not None)
        for k, action in enumerate(actions):
            made = zip(function.outputs, outputs, makes, strict=True)
            self._send(action, [v for port, v, part in made if part == k and port.kind in ("y", "dx")])

    def _value(self, port: Port, action: Action) -> Value:
        """The value an input port reads."""
        s, i = action.stage, action.microbatch
        match port.kind:
            case "x":
                producer, leaf = self.stages[s].x_from[port.index]
                return Value("y", producer, i, leaf)
            case "dy":
                reader, leaf = self.stages[s].dy_from[port.index]
                return Value("dx", reader, i, leaf)
            case "param" | "acc":
                return Value(port.kind, s, -1, port.index)
            case "key":
                return Value("key", -1, i, port.index)
            case "data" | "res" | "wres":
                return Value(port.kind, s, i, port.index)
            case _:
                raise AssertionError(f"{action} reads a {port.kind} port")

    def _output(self, port: Port, action: Action) -> Value | None:
        """The value an output port writes."""
        s, i = action.stage, action.microbatch
        match port.kind:
            case "acc":
                return Value("acc", s, -1, port.index)
            case "y" | "dx" | "res" | "wres" | "loss":
                return Value(port.kind, s, i, port.index)
            case "token":
                return None
            case _:
                raise AssertionError(f"{action} writes a {port.kind} port")

    def _receive(self, action: Action, inputs: Sequence[Value]) -> None:
        missing = dict.fromkeys((v.kind, v.stage) for v in inputs if v.kind in ("y", "dx") and v not in self.present)
        for kind, stage in sorted(missing):
            (src,) = self.schedule.placement.ranks(stage, action.microbatch)
            sender = self.performers[(src, "F" if kind == "y" else "B", stage, action.microbatch)]
            assert src != self.rank, f"{action} on rank {self.rank} reads what {sender} never made"
            values = self._message(sender, self.rank)
            self.steps.append(Step("recv", sender, (), values, peer=src))
            self.present.update(values)

    def _message(self, sender: Action, dst: int) -> tuple[Value, ...]:
        carried = message(self.stages, sender, self.schedule.placement.stages_of(dst))
        self.value_bytes.update({value: device_bytes(aval) for value, aval in carried})
        return tuple(value for value, _ in carried)

    def _send(self, action: Action, boundary: Sequence[Value | None]) -> None:
        """A message to each other rank that reads of what an action made."""
        readers = {t for value in boundary if value is not None for t in readers_of(self.stages, value)}
        ranks = {rank for t in readers for rank in self.schedule.placement.ranks(t, action.microbatch)}
        for dst in sorted(ranks - {self.rank}):
            values = self._message(action, dst)
            if values:
                self.steps.append(Step("send", action, values, (), peer=dst))

    def _move(self, action: Action, kind: Literal["offload", "reload", "sync"]) -> None:
        chosen = self.stages[action.stage].offloaded
        residuals = tuple(Value("res", action.stage, action.microbatch, index) for index in chosen)
        self.steps.append(Step(kind, action, residuals, ()))


Stages = Sequence[StageFunctions] | Mapping[int, StageFunctions]
"""The functions of stages by number."""


def message(stages: Stages, sender: Action, readers: Collection[int]) -> tuple[tuple[Value, jax.ShapeDtypeStruct], ...]:
    """What a send of ``sender`` to a rank with the stages ``readers`` carries, in order: of its y or dx what their functions
    read, with shapes."""
    function = stages[sender.stage].functions[sender.op]
    found = [
        (Value(port.kind, sender.stage, sender.microbatch, port.index), aval)
        for port, aval in zip(function.outputs, function.avals_out, strict=True)
        if port.kind in ("y", "dx")
    ]
    return tuple((v, aval) for v, aval in found if any(t in readers for t in readers_of(stages, v)))


def readers_of(stages: Stages, value: Value) -> Iterator[int]:
    """The stages that read a y or dx in training."""
    made, forward = stages[value.stage], value.kind == "y"
    for t in dict.fromkeys(t for t, _ in (made.dy_from if forward else made.x_from)):
        names = stages[t].x_from if forward else stages[t].dy_from
        ports = {Port("x" if forward else "dy", k) for k, n in enumerate(names) if n == (value.stage, value.index)}
        if any(not ports.isdisjoint(f.inputs) for f in stages[t].functions.values()):
            yield t


def _performers(schedule: Schedule) -> Mapping[tuple[int, str, int, int], Action]:
    """Which action performs a part: ``(rank, part, stage, microbatch)`` → the F, B, W or BW in that rank's row."""
    return {
        (rank, part, a.stage, a.microbatch): a
        for rank in range(schedule.num_ranks)
        for a in schedule.actions(rank)
        for part in op_spec(a.op).performs()
    }
