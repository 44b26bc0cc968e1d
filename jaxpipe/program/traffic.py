"""Holds what all ranks run and send each other, as integers: as much as order, places and the proof need of many ranks.

A process makes the programs of its own ranks alone; but where messages stand between processes, and whether they can wait for
each other for ever, depends on what all ranks do. Of that, :class:`DataFlow` finds which action's values which rank reads, and
:class:`Traffic` lists steps (runs, sends, receives) without the values and slots that they work on. Both are NumPy arrays over
all actions of a schedule: up to millions, each of which has dozens of values.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from jaxpipe.errors import ProgramError
from jaxpipe.program import ir
from jaxpipe.schedule import Action, Event, Schedule, Slot, Timeline, op_spec
from jaxpipe.stage.functions import SHARED, Braids, Port, StageFunctions

READ_KINDS, WRITTEN_KINDS = ("x", "dy", "user"), ("y", "dx", "user")
"""Kinds of ports that read and write values which may travel from rank to rank."""
RUN, SYNC, RELOAD, OFFLOAD, FREE, REDUCE, SEND, RECV = range(8)
"""Kinds of steps. Those from SEND on are messages."""
_KINDS = {
    ir.Run: RUN,
    ir.Sync: SYNC,
    ir.Reload: RELOAD,
    ir.Offload: OFFLOAD,
    ir.Free: FREE,
    ir.Reduce: REDUCE,
    ir.Send: SEND,
    ir.Recv: RECV,
}

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Messages:
    """Messages by number: sender, receiver, and the action that makes what they carry."""

    src: Ints
    dst: Ints
    action_of: Callable[[int], Action]

    def name(self, number: int) -> ir.Message:
        return int(self.src[number]), int(self.dst[number]), self.action_of(number)


@dataclass(frozen=True)
class Traffic:
    """The steps of some ranks, rank after rank, each rank's in order.

    ``ranks``: whose; ``first[k]``: the first step of ``ranks[k]``, and at the end the number of steps. By step: ``kind``;
    ``message``: its number, or −1; ``place``: of a message between processes (:mod:`jaxpipe.program.order`), −1 elsewhere;
    ``start_s``, ``end_s``: of the slot that it runs, or that makes the message; ``action``: the action, as :class:`DataFlow`
    numbers it, or −1. ``reads``: pairs of a step and a message that it reads, by step.
    """

    ranks: Sequence[int]
    first: Ints
    kind: Ints
    message: Ints
    place: Ints
    start_s: Floats
    end_s: Floats
    action: Ints
    reads: Ints
    messages: Messages

    @cached_property
    def position(self) -> Ints:
        """Which position in ``ranks`` each step has."""
        return np.repeat(np.arange(len(self.ranks)), np.diff(self.first))

    def by_rank(self, values: NDArray[Any]) -> list[Any]:
        """Return values by step as a list for each rank."""
        return [values[a:b].tolist() for a, b in pairwise(self.first)]

    def times(self) -> Floats:
        """Return when each step should be issued: a send, free or reduction right behind its run, a receive right before its
        reader, or as soon as it may where its message comes from another process.

        A sync or a reload may block the thread (:func:`jaxpipe.program.order.holds`), so it is issued when it is due: before
        that, all ranks would wait.
        """
        timed = self.kind <= SYNC
        times = _latest(np.where(timed, self.start_s, -np.inf), self.first)
        numbers, ends = np.arange(len(timed)), self.first[1:][self.position]
        following = np.minimum.accumulate(np.where(timed, numbers, len(timed))[::-1])[::-1]
        # When the run behind a step is due, which a reload must not hold up; infinity where none of the rank follows.
        due = np.append(times, np.inf)[np.where(following < ends, following, len(timed))]
        times = np.where(self.kind == RELOAD, np.maximum(times, np.minimum(due, self.start_s)), times)
        return np.where((self.kind == RECV) & (self.place < 0), due, times)

    def permuted(self, order: Ints, place: Ints) -> Traffic:
        """Return the steps in another ``order`` within each rank, with these places (by step as it was)."""
        now_at = np.empty_like(order)
        now_at[order] = np.arange(len(order))
        reads = np.stack([now_at[self.reads[0]], self.reads[1]])
        changed = {name: getattr(self, name)[order] for name in ("kind", "message", "start_s", "end_s", "action")}
        return replace(self, **changed, place=place[order], reads=reads[:, np.argsort(reads[0], kind="stable")])


def _latest(values: Floats, first: Ints) -> Floats:
    """Return the largest of ``values`` so far, rank by rank."""
    parts = (np.maximum.accumulate(values[a:b]) for a, b in pairwise(first))
    return np.concatenate([*parts, values[:0]])


def latest_in_rank(traffic: Traffic, values: Floats) -> Floats:
    """Return, by step, the largest of ``values`` of the rank so far."""
    return _latest(values, traffic.first)


def traffic_of(programs: Sequence[ir.Program], times_of: Callable[[int], dict[Slot, Event]]) -> Traffic:
    """Return the steps of ``programs``. ``times_of``: by rank, when its slots run."""
    numbers: dict[ir.Message, int] = {}
    rows: list[tuple[int, int, int, float, float]] = []
    reads: list[tuple[int, int]] = []
    for program in programs:
        events = times_of(program.rank)
        held: dict[int, int] = {}
        for instruction in program.instructions:
            kind, message, place, start_s, end_s = _KINDS[type(instruction)], -1, -1, 0.0, 0.0
            if not isinstance(instruction, ir.Free) and (kind <= RELOAD or instruction.action in events):
                start_s, end_s = events[instruction.action].start_s, events[instruction.action].end_s
            if isinstance(instruction, ir.Send | ir.Recv):
                name, place = ir.message_of(program.rank, instruction), instruction.place
                message = numbers.setdefault(name, len(numbers))
            reads += [(len(rows), held[slot]) for slot in ir.reads(instruction) if slot in held]
            for slot in ir.writes(instruction):
                held.pop(slot, None)
                if kind == RECV:
                    held[slot] = message
            rows.append((kind, message, place, start_s, end_s))
    names = list(numbers)
    kinds, messages, places, starts_s, ends_s = np.array(rows, np.float64).reshape(-1, 5).T
    return Traffic(
        ranks=[p.rank for p in programs],
        first=np.array([*accumulate((len(p.instructions) for p in programs), initial=0)]),
        kind=kinds.astype(np.int64),
        message=messages.astype(np.int64),
        place=places.astype(np.int64),
        start_s=starts_s,
        end_s=ends_s,
        action=np.full(len(kinds), -1),
        reads=np.array(reads, np.int64).reshape(-1, 2).T,
        messages=Messages(
            src=np.array([src for src, *_ in names], np.int64),
            dst=np.array([dst for _, dst, _ in names], np.int64),
            action_of=lambda number: names[number][2],
        ),
    )


_SENDS_HERE, _RECEIVES_HERE, _PLACED = 1, 2, 4
"""Bits of a message: its receiver or sender is of the same process, it has a place."""


class IssueOrder:
    """Interleaves steps of the ranks of a process as its thread issues them: see :func:`jaxpipe.program.order.issue_order`."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic

    @cached_property
    def _columns(self) -> tuple[list[list[float]], list[list[int]], list[list[int]]]:
        t = self._traffic
        return t.by_rank(t.times()), t.by_rank(t.message), t.by_rank(t.place)

    def of(self, positions: Sequence[int]) -> Ints:
        """Return the steps of the ranks at these positions, in order."""
        t = self._traffic
        if len(positions) == 1:
            steps = np.arange(t.first[positions[0]], t.first[positions[0] + 1])
            own_places = t.place[steps]
            # A rank alone waits for nobody, unless it stands in its own way.
            if (np.diff(own_places[own_places >= 0]) >= 0).all():
                return steps
        all_times, all_messages, all_places = self._columns
        times, messages = [all_times[k] for k in positions], [all_messages[k] for k in positions]
        places = [all_places[k] for k in positions]
        first = [int(t.first[k]) for k in positions]
        flags = [self._flags(k, positions).tolist() for k in positions]
        sent: set[int] = set()
        waiting: dict[int, int] = {}
        # Places of messages to and from other processes: all start theirs in this order, which is what keeps them from waiting
        # for each other in a circle.
        turns = deque(sorted(place for row in places for place in row if place >= 0))
        next_turn: dict[int, int] = {}
        ready = [(row[0], k) for k, row in enumerate(times) if row]
        heapq.heapify(ready)
        at, sizes = [0] * len(times), [*map(len, times)]
        order: list[int] = []

        def resume(blocked: dict[int, int], what: int) -> None:
            if (k := blocked.pop(what, -1)) >= 0:
                heapq.heappush(ready, (times[k][at[k]], k))

        k = heapq.heappop(ready)[1] if ready else -1
        while k >= 0:
            n, goes_on = at[k], True
            # A rank that can't go on leaves the heap; what it waits for puts it back. So no rank is looked at in vain.
            if flag := flags[k][n]:
                message = messages[k][n]
                if flag & _RECEIVES_HERE and message not in sent:
                    waiting[message], goes_on = k, False
                elif flag & _PLACED:
                    if goes_on := (place := places[k][n]) == turns[0]:
                        turns.popleft()
                        resume(next_turn, turns[0] if turns else -1)
                    else:
                        next_turn[place] = k
                if goes_on and flag & _SENDS_HERE:
                    sent.add(message)
                    resume(waiting, message)
            if goes_on:
                order.append(first[k] + n)
                at[k] = n = n + 1
                if n < sizes[k]:
                    k = heapq.heappushpop(ready, (times[k][n], k))[1]
                    continue
            k = heapq.heappop(ready)[1] if ready else -1
        if next_turn and not waiting:
            ranks = ", ".join(str(t.ranks[positions[k]]) for k in sorted(next_turn.values()))
            raise ProgramError(
                f"ranks {ranks} of one process wait for each other's turn to send and receive: their transfers stand in an "
                "order that is not that of the messages' places"
            )
        if waiting:
            src, dst, action = min(map(t.messages.name, waiting))
            raise ProgramError(
                f"rank {dst} waits for ever for what {action} of rank {src} sends: an op that reads a value of another stage "
                "waits for the op that writes it (Wait of its OpSpec)"
            )
        return np.array(order, np.int64)

    def _flags(self, position: int, positions: Sequence[int]) -> Ints:
        t = self._traffic
        steps = slice(t.first[position], t.first[position + 1])
        kind, message = t.kind[steps], t.message[steps]
        peers = (
            np.where(kind == SEND, t.messages.dst[message], t.messages.src[message]) if len(t.messages.src) else message
        )
        here: NDArray[np.bool_] = np.isin(peers, [t.ranks[k] for k in positions])
        sends, receives = (kind == SEND) & here, (kind == RECV) & here
        flags: Ints = sends * _SENDS_HERE + receives * _RECEIVES_HERE + (t.place[steps] >= 0) * _PLACED
        return flags


def value_of(stage: StageFunctions, port: Port, number: int) -> ir.Value:
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


class DataFlow:
    """Knows who makes the values that may travel, and which ranks read them.

    Actions are numbered rank after rank. Of the values that an action reads or writes at one port, the numbers of microbatches
    are those of actions times a factor, so an array holds those of all actions of an op and stage.
    """

    def __init__(self, schedule: Schedule, stages: Sequence[StageFunctions]) -> None:
        self._stages, self._schedule = stages, schedule
        self.actions = [*schedule.actions()]
        counts = [sum(len(slot.actions) for slot in row) for row in schedule.rows]
        self.rank = np.repeat(np.arange(schedule.num_ranks), counts)
        # Each op of each stage, and its actions.
        self._kinds: dict[tuple[str, int], int] = {}
        kind = np.array([self._kinds.setdefault((a.op, a.stage), len(self._kinds)) for a in self.actions], np.int64)
        number = np.array([a.microbatch for a in self.actions], np.int64)
        self._kind = kind
        self._at = np.full((len(self._kinds), schedule.num_microbatches), -1, np.int64)
        self._at[kind, number] = np.arange(len(kind))
        self._lines: dict[tuple[Any, ...], int] = {}
        written: list[tuple[Ints, Ints]] = []
        read: list[tuple[Ints, Ints, Ints]] = []
        for (op, s), k in self._kinds.items():
            numbers = np.flatnonzero(self._at[k] >= 0)
            members = self._at[k][numbers]
            function = stages[s].functions.get(op)
            outputs, inputs = (function.outputs, function.inputs) if function else ((), ())
            written += [(self._values(s, port, numbers), members) for port in outputs if port.kind in WRITTEN_KINDS]
            read += [
                (self._values(s, port, numbers), members, np.full(len(members), n))
                for n, port in enumerate(inputs)
                if port.kind in READ_KINDS
            ]
        values, makers = _joined(written, 2)
        self._maker = np.full(len(self._lines) * schedule.num_microbatches, -1, np.int64)
        self._maker[values] = makers
        if (self._maker[values] != makers).any():
            self._refuse_two_writers(values, makers)
        self._check_users()
        values, readers, ports = _joined(read, 3)
        order = np.lexsort((ports, readers))
        self._link(values[order], readers[order])

    def _values(self, stage: int, port: Port, numbers: Ints) -> Ints:
        first, second = (value_of(self._stages[stage], port, number) for number in (0, 1))
        at_zero, line = first.microbatch, self._lines.setdefault(_line(first), len(self._lines))
        return line * self._schedule.num_microbatches + at_zero + numbers * (second.microbatch - at_zero)

    def _link(self, values: Ints, readers: Ints) -> None:
        """Find the messages, numbered by the action that makes them, then by receiver. ``values``, ``readers``: what is read,
        in the order in which it is."""
        ranks, makers = self._schedule.num_ranks, self._maker[values]
        travels = (makers >= 0) & (self.rank[makers] != self.rank[readers])
        values, readers, makers = values[travels], readers[travels], makers[travels]
        keys, first, self._message_read = np.unique(
            makers * ranks + self.rank[readers], return_index=True, return_inverse=True
        )
        self._readers, self._first_read = readers, first
        self.maker_of_message, dst = np.divmod(keys, ranks)
        src = self.rank[self.maker_of_message]
        self.messages = Messages(src, dst, lambda number: self.actions[self.maker_of_message[number]])
        self._read_there = {*(values * ranks + self.rank[readers]).tolist()}

    def _refuse_two_writers(self, values: Ints, makers: Ints) -> None:
        lines = list(self._lines)
        order = np.argsort(makers, kind="stable")
        writer: dict[int, int] = {}
        for value, maker in zip(values[order].tolist(), makers[order].tolist(), strict=True):
            other = writer.setdefault(value, maker)
            if other != maker:
                line, microbatch = divmod(value, self._schedule.num_microbatches)
                kind, stage, index, name = lines[line]
                raise ProgramError(
                    f"{ir.Value(kind, stage, microbatch, index, name)} has two writers: {self.actions[other]} and "
                    f"{self.actions[maker]}; give them names of their own"
                )

    def _check_users(self) -> None:
        """Check the shapes of custom values. Only these can differ: those of stages come from one trace. A value without a
        maker is found later, by the rank that reads it."""
        for (op, s), k in self._kinds.items():
            function = self._stages[s].functions.get(op)
            for port, aval in zip(function.inputs, function.avals_in, strict=True) if function else ():
                for at in self._at[k][self._at[k] >= 0].tolist() if port.kind == "user" else ():
                    action = self.actions[at]
                    value = value_of(self._stages[s], port, action.microbatch)
                    if self._stages[value.stage].links.span != self._stages[s].links.span:
                        raise ProgramError(
                            f"{action} reads {value}, of a stage that runs for another number of microbatches"
                        )
                    _, maker = self.maker(value)
                    sent = self.message(maker, None)[value] if maker else aval
                    if (sent.shape, sent.dtype) != (aval.shape, aval.dtype):
                        raise ProgramError(
                            f"{action} reads {value} as {aval.dtype}{list(aval.shape)}; {maker} writes "
                            f"{sent.dtype}{list(sent.shape)}"
                        )

    def _number(self, value: ir.Value) -> int:
        line = self._lines.get(_line(value), -1)
        return line * self._schedule.num_microbatches + value.microbatch if line >= 0 else -1

    def maker(self, value: ir.Value) -> tuple[int, Action | None]:
        """Return the rank and the action that make a value; −1 and None if nothing does."""
        number = self._number(value)
        at = int(self._maker[number]) if number >= 0 else -1
        return (int(self.rank[at]), self.actions[at]) if at >= 0 else (-1, None)

    def destinations(self, action: Action) -> list[int]:
        """Return the other ranks that read what an action makes, in order: all processes make the same programs."""
        at = self._at[self._kinds[action.op, action.stage], action.microbatch]
        first, end = np.searchsorted(self.maker_of_message, (at, at + 1))
        ranks: list[int] = self.messages.dst[first:end].tolist()
        return ranks

    def message(self, sender: Action, dst: int | None) -> dict[ir.Value, jax.ShapeDtypeStruct]:
        """Return the values that an action makes and rank ``dst`` reads (None: all of them), in order, with shapes."""
        stage, ranks = self._stages[sender.stage], self._schedule.num_ranks
        function = stage.functions[sender.op]
        outputs = [
            (value_of(stage, port, sender.microbatch), aval)
            for port, aval in zip(function.outputs, function.avals_out, strict=True)
            if port.kind in WRITTEN_KINDS
        ]
        return {v: a for v, a in outputs if dst is None or self._number(v) * ranks + dst in self._read_there}

    def traffic(self, braids: Braids, timeline: Timeline) -> Traffic:
        """Return the steps of all ranks, in the order in which each rank is lowered, for a schedule that copies nothing to the
        host. ``timeline``: of the schedule, simulated."""
        rows = self._schedule.rows
        sizes = np.array([len(slot.actions) for row in rows for slot in row], np.int64)
        slot = np.repeat(np.arange(len(sizes)), sizes)
        # Actions of a braid that is one function run as its first one.
        leader = np.arange(len(slot))
        if braids:
            woven = [
                (r, tuple((a.op, a.stage) for a in x.actions)) in braids for r, row in enumerate(rows) for x in row
            ]
            leader = np.where(np.array(woven)[slot], (np.cumsum(sizes) - sizes)[slot], leader)
        specs = {k: op_spec(op) for (op, _), k in self._kinds.items()}
        assert all(spec.runs_function or spec.lane == "net" for spec in specs.values()), "copies to the host have parts"
        reduces = np.array([spec.lane == "net" for spec in specs.values()], np.bool_)[self._kind]
        start_s, end_s = self._seconds(sizes, timeline)
        runs = np.flatnonzero(leader == np.arange(len(leader)))
        numbers = np.arange(len(self.maker_of_message))
        received = np.argsort(self._first_read, kind="stable")
        # Around each run stand the receives of what is read there first, and the sends of what it makes.
        action = np.concatenate([self._readers[self._first_read[received]], runs, self.maker_of_message])
        kind = np.repeat([RECV, RUN, SEND], [len(numbers), len(runs), len(numbers)])
        kind = np.where((kind == RUN) & reduces[action], REDUCE, kind)
        order = np.argsort(
            leader[action] * 3 + np.repeat([0, 1, 2], [len(numbers), len(runs), len(numbers)]), kind="stable"
        )
        message = np.concatenate([received, np.full(len(runs), -1), numbers])[order]
        action, kind = action[order], kind[order]
        step_of = np.empty(len(self.actions), np.int64)
        step_of[action[kind == RUN]] = np.flatnonzero(kind == RUN)
        reading = leader[self._readers]
        by_step = np.argsort(reading, kind="stable")
        return Traffic(
            range(self._schedule.num_ranks),
            np.searchsorted(self.rank[action], np.arange(self._schedule.num_ranks + 1)),
            kind,
            message,
            np.full(len(kind), -1),
            start_s[action],
            end_s[action],
            action,
            np.stack([step_of[reading], self._message_read])[:, by_step],
            self.messages,
        )

    def outline(self, traffic: Traffic, rank: int, braids: Braids, known: Collection[int]) -> ir.Program:
        """Return the program of ``rank`` without values: its runs, and in its slots the accumulators (one slot for all) and
        what it receives, in a slot a message. ``known``: the ranks whose messages have shapes."""
        first, end = traffic.first[rank : rank + 2].tolist()
        slot_of: dict[int, int] = {}
        read: dict[int, list[int]] = {}
        a, b = np.searchsorted(traffic.reads[0], (first, end))
        for step, message in traffic.reads[:, a:b].T.tolist():
            read.setdefault(step, []).append(slot_of.setdefault(message, len(slot_of) + 1))
        functions = {at: self._stages[at[1]].functions.get(at[0]) for at in self._kinds}
        adds = {at for at, f in functions.items() if f and any(port.kind == "acc" for port in f.inputs)}
        woven = {
            slot.actions[0]: slot
            for slot in (self._schedule.rows[rank] if braids else ())
            if (rank, tuple((x.op, x.stage) for x in slot.actions)) in braids
        }
        instructions: list[ir.Instruction] = []
        losses: list[tuple[ir.Value, int]] = []
        columns = (traffic.kind, traffic.message, traffic.place, traffic.action)
        for step, (kind, message, place, at) in enumerate(
            zip(*(x[first:end].tolist() for x in columns), strict=True), first
        ):
            if kind == REDUCE:
                instructions.append(ir.Reduce(self.actions[at], (0,)))
                continue
            if kind == RUN:
                slot = woven.get(self.actions[at], self.actions[at])
                accumulators = (0,) if any((x.op, x.stage) in adds for x in slot.actions) else ()
                instructions.append(ir.Run(slot, (*accumulators, *dict.fromkeys(read.get(step, ())))))
                losses += [(v, -1) for x in slot.actions for v in self._losses(x)]
                continue
            src, dst, action = self.messages.name(message)
            avals = tuple(self.message(action, dst).values()) if src in known or dst in known else ()
            if kind == SEND:
                instructions.append(ir.Send(action, (), (), dst, avals, place))
            else:
                instructions.append(ir.Recv(action, (), (slot_of[message],), src, avals, place))
        written = tuple([(0,) * len(ir.writes(i)) for i in instructions])
        bound = ((ir.Value("acc", -1, -1, 0), 0),)
        return ir.Program(rank, tuple(instructions), len(slot_of) + 1, bound, tuple(losses), (0,), written)

    def _losses(self, action: Action) -> list[ir.Value]:
        stage = self._stages[action.stage]
        outputs = stage.functions[action.op].outputs if stage.reports else ()
        return [value_of(stage, port, action.microbatch) for port in outputs if port.kind == "loss"]

    def _seconds(self, sizes: Ints, timeline: Timeline) -> tuple[Floats, Floats]:
        """Return start and end of the slot of each action. ``sizes``: how many actions each slot has."""
        # Rank after rank, and the compute slots of a rank in the order of its row, as those of the schedule are.
        events = [e for e in timeline.events if e.lane == "compute"]
        lanes = [op_spec(slot.actions[0].op).lane for row in self._schedule.rows for slot in row]
        computes = np.array([lane == "compute" for lane in lanes], np.bool_)
        assert len(events) == computes.sum(), "the timeline is of another schedule"
        times = np.zeros((2, len(lanes)))
        times[:, computes] = [[e.start_s for e in events], [e.end_s for e in events]]
        start_s, end_s = np.repeat(times, sizes, axis=1)
        return start_s, end_s


def _line(value: ir.Value) -> tuple[Any, ...]:
    """Return what the values of all microbatches have in common."""
    return value.kind, value.stage, value.index, value.name


def _joined(parts: Collection[tuple[Ints, ...]], width: int) -> Iterator[Ints]:
    """Join each of the ``width`` columns of ``parts``."""
    columns = zip(*parts, strict=True) if parts else [()] * width
    return (np.concatenate([*column, np.zeros(0, np.int64)]) for column in columns)
