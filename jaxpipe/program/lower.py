"""Lowers a schedule over stage functions to one :class:`~jaxpipe.program.ir.Program` per rank.

Each action becomes a ``Run`` with its ports bound to values; a value that a neighbour stage needs stays where it is when that
stage lives on the same rank, and is sent right after the ``Run`` otherwise; it is received right before its first reader.
A braid becomes one ``Run`` where there is a function for it, else one a part; a braid with a sync in it always does.
Offload and load actions move the residuals that the stage has chosen (``StageFunctions.offloaded``); S waits for the copy. R
takes the stage's accumulators; G takes no instruction.
Slots are assigned, and dropped after the last reader, by :mod:`jaxpipe.program.ir`. Not lowered here: stages spread over
several ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import jax

from jaxpipe import dump
from jaxpipe.errors import ProgramError
from jaxpipe.program import ir
from jaxpipe.program.order import Crossing, RankSteps, copies_in_parts, lower_apart
from jaxpipe.program.traffic import DataFlow, value_of
from jaxpipe.schedule import Action, Braid, Schedule, Slot, Timeline, check_schedule, op_spec
from jaxpipe.schedule.deps import collector_paused
from jaxpipe.schedule.passes import with_missing_reductions
from jaxpipe.stage.functions import AnyFunction, Braids, Parts, StageFunctions, device_bytes
from jaxpipe.stage.model.plan import stage_edges
from jaxpipe.text import arrows


@collector_paused()
def lower(
    schedule: Schedule,
    stages: Sequence[StageFunctions],
    braids: Braids = MappingProxyType({}),
    crossing: Crossing | None = None,
    parts_by: Timeline | None = None,
    ranks: Collection[int] | None = None,
    reduced: Collection[int] = (),
) -> tuple[ir.Program, ...]:
    """Return the programs of all ranks, checked.

    Args:
        schedule: any valid schedule whose stages follow each other as the model's do, one rank a stage (of a chain several
            flows too).
        stages: the functions of each stage, in order.
        braids: by rank and parts; a braid that is not among them runs as separate calls, one after another.
        crossing: where the ranks are in several processes, which and how (:mod:`jaxpipe.program.order`).
        parts_by: issue O and L in parts, at their times in this simulated timeline; whole where it is None.
        ranks: of this process, where there are several. Programs of others may be outlines, which say what is run, sent and
            received, but hold no values (:meth:`~jaxpipe.program.traffic.DataFlow.outline`).
        reduced: stages whose gradients programs add up over the devices of their rank.

    Raises:
        ScheduleError: the schedule is invalid.
        ProgramError: the schedule does not fit the stages, or uses what the runtime does not support.
    """
    check_schedule(schedule)
    _check_fit(schedule, stages)
    schedule = issued_order(schedule, stages, reduced)
    data_flow = DataFlow(schedule, stages)
    # Where the thread waits for copies to the host follows from slots, so the proof needs the programs of all ranks.
    complete = ranks is None or crossing is None or schedule.offloads
    walked = range(schedule.num_ranks) if complete or ranks is None else sorted(ranks)
    steps = {rank: _RankLowering(schedule, stages, braids, data_flow, rank).walk() for rank in walked}
    if parts_by is not None:
        steps = {rank: copies_in_parts(rank, steps[rank], parts_by) for rank in walked}
    if crossing is None:
        programs = tuple(ir.assign_slots(rank, *steps[rank]) for rank in walked)
        ir.check_programs(programs)
    else:
        assert len(crossing.process_of) == schedule.num_ranks, "every rank has a process"
        traffic = None if schedule.offloads else data_flow.traffic(braids, crossing.timeline)
        programs, placed = lower_apart(steps, traffic, crossing)
        if not complete:
            own = {program.rank: program for program in programs}
            programs = tuple(
                own.get(rank) or data_flow.outline(placed, rank, braids, walked) for rank in range(schedule.num_ranks)
            )
    for rank in walked:
        dump.dump("program", f"rank{rank}", programs[rank].__str__)
    return programs


def issued_order(schedule: Schedule, stages: Sequence[StageFunctions], reduced: Collection[int]) -> Schedule:
    """Return ``schedule`` with R of the ``reduced`` stages alone, where it has them, or else behind all that reads the stage's
    gradients; and without G."""

    def reads(action: Action) -> bool:
        function = stages[action.stage].functions.get(action.op)
        return function is not None and any(port.kind == "acc" for port in function.inputs)

    return with_missing_reductions(schedule, reduced, reads)


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
    firsts: dict[tuple[int, str, int], Action] = {}
    for rank in range(schedule.num_ranks):
        for action in schedule.actions(rank):
            firsts.setdefault((rank, action.op, action.stage), action)
    for (rank, op, at), action in firsts.items():
        if op_spec(op).is_sync:
            _check_sync(rank, action)
        elif op_spec(op).lane == "compute" and op not in stages[at].functions:
            ops = " ".join(sorted(stages[at].functions))
            raise ProgramError(
                f"rank {rank}, action {action}: stage {at} has no function for op {op!r} (it has {ops}); "
                f"register_instruction({op!r}, build) gives it one"
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
    then; ``reduced``: the stages whose gradients have been added up."""

    schedule: Schedule
    stages: Sequence[StageFunctions]
    braids: Braids
    data_flow: DataFlow
    rank: int
    steps: list[ir.ValueInstruction] = field(default_factory=list)
    value_bytes: dict[ir.Value, int] = field(default_factory=dict)
    present: set[ir.Value] = field(default_factory=set)
    reduced: set[int] = field(default_factory=set)

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
            self._reduce(action)
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

    def _reduce(self, action: Action) -> None:
        avals = self.stages[action.stage].acc_avals
        accumulators = [ir.Value("acc", action.stage, -1, k) for k in range(len(avals))]
        sums = ir.Value("sums", action.stage, -1, 0)
        self._add(
            ir.ValueInstruction(ir.Reduce, action, tuple(accumulators), (sums,)), zip(accumulators, avals, strict=True)
        )
        # what it takes follows from the function, which is given later
        self.value_bytes[sums] = 0
        self.reduced.add(action.stage)

    def _run(self, slot: Slot, function: AnyFunction, reads: Sequence[int], makes: Sequence[int]) -> None:
        """Write one call with its messages. ``reads``, ``makes``: which of the slot's actions each input and output port
        belongs to."""
        actions = slot.actions
        inputs = [
            value_of(self.stages[actions[k].stage], port, actions[k].microbatch)
            for port, k in zip(function.inputs, reads, strict=True)
        ]
        if early := self.reduced.intersection(v.stage for v in inputs if v.kind == "acc"):
            raise ProgramError(
                f"rank {self.rank}, action {slot}: reads gradients of stage {min(early)} behind the stage's R, which uses them "
                "up: put R behind it"
            )
        for k, action in enumerate(actions):
            self._receive(action, [v for v, part in zip(inputs, reads, strict=True) if part == k])
        outputs = [
            None if port.kind == "token" else value_of(self.stages[actions[k].stage], port, actions[k].microbatch)
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
            src, sender = self.data_flow.maker(value)
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
        for dst in self.data_flow.destinations(action):
            arrays = self.data_flow.message(action, dst)
            self._add(
                ir.ValueInstruction(ir.Send, action, tuple(arrays), (), (dst, tuple(arrays.values()))), arrays.items()
            )

    def _add(self, step: ir.ValueInstruction, shapes: Iterable[tuple[ir.Value | None, jax.ShapeDtypeStruct]]) -> None:
        self.value_bytes.update({value: device_bytes(aval) for value, aval in shapes if value is not None})
        self.steps.append(step)
