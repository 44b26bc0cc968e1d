"""Lowers a schedule over stage functions to one :class:`~jaxpipe.program.ir.Program` per rank.

Each action becomes a ``Run`` with its ports bound to values; a value that a neighbour stage needs stays where it is when that
stage lives on the same rank, and is sent right after the ``Run`` otherwise; it is received right before its first reader.
A braid becomes one ``Run`` where there is a function for it, else one a part; a braid with a sync in it always does.
Offload and load actions move the residuals that the stage has chosen (``StageFunctions.offloaded``); S waits for the copy.
Slots are assigned, and dropped after the last reader, by :mod:`jaxpipe.program.ir`. Not lowered here: stages spread over
several ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import jax

from jaxpipe import dump
from jaxpipe.errors import ProgramError
from jaxpipe.program import ir
from jaxpipe.program.order import Crossing, RankSteps, copies_in_parts, lower_apart
from jaxpipe.schedule import Action, Braid, Schedule, Slot, Timeline, check_schedule, op_spec
from jaxpipe.schedule.deps import collector_paused
from jaxpipe.stage.functions import SHARED, AnyFunction, Braids, Parts, Port, StageFunctions, device_bytes
from jaxpipe.stage.model.plan import stage_edges
from jaxpipe.text import arrows

_READ_KINDS, _WRITTEN_KINDS = ("x", "dy", "user"), ("y", "dx", "user")
"""Kinds of ports that read and write values which may travel from rank to rank."""


@collector_paused()
def lower(
    schedule: Schedule,
    stages: Sequence[StageFunctions],
    braids: Braids = MappingProxyType({}),
    crossing: Crossing | None = None,
    parts_by: Timeline | None = None,
) -> tuple[ir.Program, ...]:
    """Return the programs of all ranks, checked.

    Args:
        schedule: any valid schedule whose stages follow each other as the model's do, one rank a stage (of a chain several
            flows too).
        stages: the functions of each stage, in order.
        braids: by rank and parts; a braid that is not among them runs as separate calls, one after another.
        crossing: where the ranks are in several processes, which and how (:mod:`jaxpipe.program.order`).
        parts_by: issue O and L in parts, at their times in this simulated timeline; whole where it is None.

    Raises:
        ScheduleError: the schedule is invalid.
        ProgramError: the schedule does not fit the stages, or uses what the runtime does not support.
    """
    check_schedule(schedule)
    _check_fit(schedule, stages)
    data_flow = _DataFlow(schedule, stages)
    ranks = [_RankLowering(schedule, stages, braids, data_flow, rank).walk() for rank in range(schedule.num_ranks)]
    if parts_by is not None:
        ranks = [copies_in_parts(rank, steps, parts_by) for rank, steps in enumerate(ranks)]
    if crossing is None:
        programs = tuple(ir.assign_slots(rank, *steps) for rank, steps in enumerate(ranks))
        ir.check_programs(programs)
    else:
        assert len(crossing.process_of) == schedule.num_ranks, "every rank has a process"
        programs = lower_apart(ranks, crossing)
    for program in programs:
        dump.dump("program", f"rank{program.rank}", program.__str__)
    return programs


def braided_slots(schedule: Schedule, stages: Sequence[StageFunctions]) -> tuple[tuple[int, Parts], ...]:
    """Return (rank, parts) of the braids that can run as one function: all but those that hold a sync, or a custom instruction.

    Raises:
        ScheduleError, ProgramError: there are braids, and the schedule is one that :func:`lower` refuses.
    """
    braids = {
        (rank, tuple((a.op, a.stage) for a in slot.actions)): None
        for rank, row in enumerate(schedule.rows)
        for slot in row
        if isinstance(slot, Braid) and all(_is_woven(stages, a) for a in slot.actions)
    }
    if braids:
        check_schedule(schedule)
        _check_fit(schedule, stages)
    return tuple(braids)


def _is_woven(stages: Sequence[StageFunctions], action: Action) -> bool:
    functions = stages[action.stage].functions if 0 <= action.stage < len(stages) else {}
    return not op_spec(action.op).is_sync and (action.op not in functions or functions[action.op].per_shard)


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
            f"schedule {schedule.name!r} has the edges {arrows(placement.edges)} between stages; the model's, by what its "
            f"layers take, are {arrows(edges)}"
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
    for s, (span, stage) in enumerate(zip(placement.span, stages, strict=True)):
        if span != stage.links.span:
            raise ProgramError(
                f"schedule {schedule.name!r} has span {span} for stage {s}, whose layers have span {stage.links.span} "
                f"(Layer.span, part of what is computed); use with_span(placement, {{{s}: {stage.links.span}}})"
            )
    for rank in range(schedule.num_ranks):
        for action in schedule.actions(rank):
            if op_spec(action.op).is_sync:
                _check_sync(rank, action)
            elif op_spec(action.op).lane == "compute" and action.op not in stages[action.stage].functions:
                ops = " ".join(sorted(stages[action.stage].functions))
                raise ProgramError(
                    f"rank {rank}, action {action}: stage {action.stage} has no function for op {action.op!r} (it has {ops}); "
                    f"register_instruction({action.op!r}, build) gives it one"
                )


def _check_sync(rank: int, action: Action) -> None:
    waits = op_spec(action.op).waits
    if len(waits) != 1 or waits[0].where != "self" or any(op_spec(op).lane != "d2h" for op in waits[0].ops):
        raise ProgramError(
            f"rank {rank}, action {action}: the runtime can wait only for an offload of the same stage and microbatch"
        )


@dataclass
class _RankLowering:
    """Walks one row of the schedule and writes instructions over values. ``present``: the values that the rank holds by
    then."""

    schedule: Schedule
    stages: Sequence[StageFunctions]
    braids: Braids
    data_flow: _DataFlow
    rank: int
    steps: list[ir.ValueInstruction] = field(default_factory=list)
    value_bytes: dict[ir.Value, int] = field(default_factory=dict)
    present: set[ir.Value] = field(default_factory=set)

    def walk(self) -> RankSteps:
        for slot in self.schedule.rows[self.rank]:
            braid = self.braids.get((self.rank, tuple((a.op, a.stage) for a in slot.actions)))
            if braid is not None:
                self._run(slot, braid, braid.input_parts, braid.output_parts)
                continue
            for action in slot.actions:
                self._one(action)
        return self.steps, self.value_bytes

    def _one(self, action: Action) -> None:
        spec = op_spec(action.op)
        if spec.lane == "net":
            # a training step reduces a stage behind its last W by itself, and gathers in its update
            return
        if spec.lane == "compute" and not spec.is_sync:
            function = self.stages[action.stage].functions[action.op]
            self._run(action, function, [0] * len(function.inputs), [0] * len(function.outputs))
            return
        # What an offload takes is not present until its load: an action that reads it in between is refused when lowering.
        moved = tuple(ir.Value("res", action.stage, action.microbatch, k) for k in self.stages[action.stage].offloaded)
        if spec.is_sync:
            self.steps.append(ir.ValueInstruction(ir.Sync, action, moved, ()))
        elif spec.lane == "d2h":
            self.steps.append(ir.ValueInstruction(ir.Offload, action, moved, moved))
            self.present.difference_update(moved)
        else:
            self.steps.append(ir.ValueInstruction(ir.Reload, action, moved, moved))
            self.present.update(moved)

    def _run(self, slot: Slot, function: AnyFunction, reads: Sequence[int], makes: Sequence[int]) -> None:
        """Write one call with its messages. ``reads``, ``makes``: which of the slot's actions each input and output port
        belongs to."""
        actions = slot.actions
        inputs = [
            _value(self.stages[actions[k].stage], port, actions[k].microbatch)
            for port, k in zip(function.inputs, reads, strict=True)
        ]
        for k, action in enumerate(actions):
            self._receive(action, [v for v, part in zip(inputs, reads, strict=True) if part == k])
        outputs = [
            None if port.kind == "token" else _value(self.stages[actions[k].stage], port, actions[k].microbatch)
            for port, k in zip(function.outputs, makes, strict=True)
        ]
        avals = (*function.avals_in, *function.avals_out)
        self._add(
            ir.ValueInstruction(ir.Run, slot, tuple(inputs), tuple(outputs)),
            zip((*inputs, *outputs), avals, strict=True),
        )
        self.present.update(v for v in outputs if v is not None)
        for action in actions:
            self._send(action)

    def _receive(self, action: Action, inputs: Sequence[ir.Value]) -> None:
        """Receive those of ``inputs`` that other ranks make; check that the rest is present."""
        for value in inputs:
            if value.kind in ir.BOUND_KINDS or value in self.present:
                continue
            # One message carries all that an action sends to a rank, so receiving it for one value brings the others, too.
            src, sender = self.data_flow.makers.get(value, (self.rank, None))
            if sender is None or src == self.rank:
                raise ProgramError(
                    f"rank {self.rank}, action {action}: reads {value}, which is not there: nothing has made it by then, or it "
                    "is offloaded"
                )
            arrays = self.data_flow.message(sender, self.rank)
            self._add(
                ir.ValueInstruction(ir.Recv, sender, (), tuple(arrays), (src, tuple(arrays.values()))), arrays.items()
            )
            self.present.update(arrays)

    def _send(self, action: Action) -> None:
        """Send a message to each other rank that reads what an action makes."""
        # Sorted, so that all processes make the same programs.
        for dst in sorted(self.data_flow.destinations(action) - {self.rank}):
            arrays = self.data_flow.message(action, dst)
            self._add(
                ir.ValueInstruction(ir.Send, action, tuple(arrays), (), (dst, tuple(arrays.values()))), arrays.items()
            )

    def _add(self, step: ir.ValueInstruction, shapes: Iterable[tuple[ir.Value | None, jax.ShapeDtypeStruct]]) -> None:
        self.value_bytes.update({value: device_bytes(aval) for value, aval in shapes if value is not None})
        self.steps.append(step)


def _value(stage: StageFunctions, port: Port, number: int) -> ir.Value:
    """Return the value that a port of a stage's action reads or writes.

    A stage of span g runs once for g microbatches, as action ``number``. What crosses stages, batch arrays and keys (the first
    one's of the g) are numbered by microbatch, all else by the action.
    """
    s, kind, first = stage.stage, port.kind, number * stage.links.span
    if kind == "x":
        member, at = divmod(port.index, len(stage.x_from))
        producer, leaf = stage.x_from[at]
        return ir.Value("y", producer, first + member, leaf)
    if kind == "dy":
        reader, leaf = stage.dy_from[port.index]
        return ir.Value("dx", reader, first, leaf)
    if kind == "key":
        return ir.Value("key", -1, first, port.index)
    if stage.links.span > 1 and (kind == "dx" or kind == "data"):
        member, at = divmod(port.index, len(stage.x_from if kind == "dx" else stage.data_names))
        return ir.Value(kind, s, first + member, at)
    assert kind != "token", f"stage {s} reads a token"
    return ir.Value(kind, s if port.stage < 0 else port.stage, -1 if kind in SHARED else number, port.index, port.name)


class _DataFlow:
    """Knows who makes the values that may travel, and which ranks read them.

    ``makers``: rank and action by value. ``readers``: ranks by value.
    """

    def __init__(self, schedule: Schedule, stages: Sequence[StageFunctions]) -> None:
        self.makers: dict[ir.Value, tuple[int, Action]] = {}
        self.readers: dict[ir.Value, tuple[int, ...]] = {}
        self._made: dict[Action, list[ir.Value]] = {}
        self._written: dict[tuple[str, int], list[tuple[Port, jax.ShapeDtypeStruct]]] = {}
        reads: dict[tuple[str, int], list[tuple[Port, jax.ShapeDtypeStruct]]] = {}
        for stage in stages:
            for op, f in stage.functions.items():
                outputs = zip(f.outputs, f.avals_out, strict=True)
                inputs = zip(f.inputs, f.avals_in, strict=True)
                self._written[(op, stage.stage)] = [x for x in outputs if x[0].kind in _WRITTEN_KINDS]
                reads[(op, stage.stage)] = [x for x in inputs if x[0].kind in _READ_KINDS]
        expected: dict[ir.Value, tuple[Action, jax.ShapeDtypeStruct]] = {}
        for rank in range(schedule.num_ranks):
            for action in schedule.actions(rank):
                at = (action.op, action.stage)
                written = self._written.get(at, ())
                self._made[action] = made = [
                    _value(stages[action.stage], port, action.microbatch) for port, _ in written
                ]
                for value in made:
                    other = self.makers.setdefault(value, (rank, action))[1]
                    if other is not action and other != action:
                        raise ProgramError(
                            f"{value} has two writers: {other} and {action}; give them names of their own"
                        )
                for port, aval in reads.get(at, ()):
                    value = _value(stages[action.stage], port, action.microbatch)
                    ranks = self.readers.get(value, ())
                    self.readers[value] = ranks if rank in ranks else (*ranks, rank)
                    if port.kind == "user":
                        expected[value] = action, aval
                        if stages[value.stage].links.span != stages[action.stage].links.span:
                            raise ProgramError(
                                f"{action} reads {value}, of a stage that runs for another number of microbatches"
                            )
        # Only custom values can differ in shape: those of stages come from one trace. A value without a maker is found later,
        # by the rank that reads it.
        for value, (action, aval) in expected.items():
            if value in self.makers:
                sent = self.message(self.makers[value][1], None)[value]
                if (sent.shape, sent.dtype) != (aval.shape, aval.dtype):
                    raise ProgramError(
                        f"{action} reads {value} as {aval.dtype}{list(aval.shape)}; {self.makers[value][1]} writes "
                        f"{sent.dtype}{list(sent.shape)}"
                    )

    def destinations(self, action: Action) -> set[int]:
        """Return the ranks that read what an action makes."""
        return {rank for value in self._made[action] for rank in self.readers.get(value, ())}

    def message(self, sender: Action, dst: int | None) -> dict[ir.Value, jax.ShapeDtypeStruct]:
        """Return the values that an action makes and rank ``dst`` reads (None: all of them), in order, with shapes."""
        outputs = zip(self._made[sender], self._written[(sender.op, sender.stage)], strict=True)
        return {v: aval for v, (_, aval) in outputs if dst is None or dst in self.readers.get(v, ())}
