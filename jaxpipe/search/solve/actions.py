"""A task in whole numbers: its actions, numbered, what waits for what, and what holds memory from when to when.

Everything is read off one order of the actions by the rules that the simulator has (:mod:`~jaxpipe.schedule.deps`), so whatever
can be simulated can be searched, but for braided slots: chains and graphs of stages, stages on groups of ranks, several flows,
ops of the user's own. Copies to the host are for chains alone. Three limits may hold on a rank, each a :class:`MemoryLimit`:
activations (``memory_limit``), bytes (``memory_limit_bytes``, where cotangents and workspace count too), offloads in flight.

What one microbatch of a stage holds on a rank, R = ``stays`` + ``leaves``, K = ``kept``:

    stays      F start ── B end             kept       B end ── W end           (one piece F start ── W end for what both share)
    leaves     F start ── O end, L start ── B end   if it goes away, else with ``stays``
    cotangent  B start ── B end             workspace  while its op runs

:func:`schedule_of` and :func:`starts_of` go from start times to rows and back: the order behind a solver's answer, and a
schedule as a solver's hint. Rows hold order only, and the simulator starts everything as early as the order allows, so an
answer's times are shifted left as far as they go. What keeps the memory limit is order too, all but one thing: a compute slot
that starts late because an offload gives room. Rows say it with ``S``, which waits for that O and makes the compute slots
behind it wait. An S goes before the first compute slot that starts no earlier than its O ends, so it delays nothing beyond the
solver's times; it is set only where something takes what the O gave and no other slot or copy says that it has ended, and
never behind the L that brings the same back. Claim (one host lane per rank): with all of them the limit holds. Take the last
of the takes that have happened by some instant, in the solver's order. All that was given back before it in the solver's times
has been given back: by compute slots, as they stand before it in the row; by an O, through its S if the take is a compute
slot's, through the shared lane if it is an L's. With a lane per direction the last step fails, see ``strict`` in
:mod:`.formulation`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import NamedTuple

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule.check import check_schedule
from jaxpipe.schedule.deps import build_graph
from jaxpipe.schedule.engine import host_groups
from jaxpipe.schedule.ir import HOST_LANES, Action, Row, Schedule, Slot, op_spec
from jaxpipe.schedule.memory import ACTIVATION_FIELDS, rank_share, static_bytes
from jaxpipe.schedule.passes.braid import with_slots
from jaxpipe.schedule.problem import Problem
from jaxpipe.schedule.simulate import simulate
from jaxpipe.schedule.timeline import Timeline, at_most
from jaxpipe.search.budget import FINE, memory_units, time_grid
from jaxpipe.search.solve.task import SolveTask, grouped_rows

_KNOWN = frozenset(("F", "B", "W", "BW", "O", "L"))  # ops whose memory is said in pairs of events
_Kind = tuple[str, int, int, int]
Starts = Sequence[int]
"""When each action starts, in ticks; -1: it does not take place, as the W of a full backward."""
Event = tuple[int, bool]
"""The start of an action, or (True) its end."""


class MemoryInterval(NamedTuple):
    """``units`` of memory held from ``opens`` to ``closes`` (None: from the start, for ever). If there is a ``choice``, only
    where it is as ``holds`` says."""

    units: int
    opens: Event | None
    closes: Event | None
    choice: int = -1
    holds: bool = True


_Sized = tuple[float, float, MemoryInterval]
"""An interval of the one amount less the other, each rounded to units by itself, so that what adds up still does."""


class TransferEdge(NamedTuple):
    """A transfer: the action whose end it follows, the directed pair of ranks, ticks until it has arrived, and those in which
    it occupies the pair."""

    producer: int
    link: tuple[int, int]
    ticks: int
    occupied: int


class FusedBackward(NamedTuple):
    """Choice to run a B and its W as one BW of so many ``ticks``. ``choice``: shared by the ranks of a group."""

    choice: int
    w: int
    ticks: int


class OffloadPair(NamedTuple):
    """The actions around what an O may take away: the O's number is the choice."""

    f: int
    load: int
    b: int


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """``capacity`` in units of what may be held on one rank at a time."""

    rank: int
    capacity: int
    intervals: tuple[MemoryInterval, ...]


class ActionTable:
    """The actions of ``order``, any schedule of the task (None: of a chain, one microbatch after the other), each O and L that
    there could be, and with ``fusing`` every backward as B and W with BW to choose; ``parts`` of a mean duration to a tick
    where costs have no common step.

    They are numbered as the slots of ``graph``. One entry each: ``action``, ``rank``, ``size`` (ticks), ``joint`` (the first of
    those that start together). ``ops``: numbers by rank, then stage and microbatch, then op. ``transfers``: of the graph, in
    ticks. ``lanes``: what runs on each, the ranks' compute lanes first. ``fusing``: by B, where BW may be chosen. ``copies``:
    by O. ``limits``: those that could be felt.

    Raises:
        ScheduleError: there is no order and the stages form no chain on single ranks; the costs are for another number of
            stages or too uneven for a grid; or there is no microbatch.
    """

    def __init__(
        self, task: SolveTask, order: Schedule | None = None, parts: int = FINE, *, fusing: bool = True
    ) -> None:
        if task.num_microbatches < 1:
            raise ScheduleError(f"number of microbatches is {task.num_microbatches}; want at least 1")
        self.task, self.placement, self.costs = task, task.placement, task.costs
        self.num_ranks = task.placement.num_ranks
        self.costs.require_stages(self.placement.num_stages, "the placement")
        self.graph = graph = build_graph(self._complete(order, fusing))
        self.action, self.rank = tuple(action for slot in graph.slots for action in slot.actions), graph.rank_of
        self.joint = tuple(
            graph.joints[graph.joint_of[n]][0] if n in graph.joint_of else n for n in range(len(self.action))
        )
        self.ops: list[dict[tuple[int, int], dict[str, int]]] = [{} for _ in graph.schedule.rows]
        for n, (a, r) in enumerate(zip(self.action, self.rank, strict=True)):
            self.ops[r].setdefault((a.stage, a.microbatch), {})[a.op] = n
        of_kind = {(a.op, a.stage): self.costs.seconds(op_spec(a.op).cost, a.stage) for a in set(self.action)}
        seconds = [of_kind[a.op, a.stage] for a in self.action]
        backs = (n for n, a in enumerate(self.action) if fusing and a.op == "B" and self._gains(a.stage))
        bw_seconds = {n: self.costs.bw_s[self.action[n].stage] for n in backs}
        sent = [t.seconds(self.costs) for t in graph.transfers]
        occupied = [t.occupied_s(self.costs) for t in graph.transfers]
        durations = [*seconds, *bw_seconds.values(), *sent, *occupied]
        # in a best schedule something always runs, so it ends within the sum; twice leaves room
        self.ticks = ticks = time_grid(durations, 2 * sum(durations), parts)
        self.size = tuple(map(ticks.of, seconds))
        self.transfers = tuple(
            TransferEdge(t.producer, (t.src, t.dst), ticks.of(x), ticks.of(y))
            for t, x, y in zip(graph.transfers, sent, occupied, strict=True)
        )
        self.fusing: dict[int, FusedBackward] = {}
        for n, x in bw_seconds.items():
            w = self.ops[self.rank[n]][self.action[n].stage, self.action[n].microbatch]["W"]
            # ranks of a group fuse together: the choice is that of the first of them
            self.fusing[n] = FusedBackward(self.joint[n], w, ticks.of(x))
        copied = (ops for ops_of in self.ops for ops in ops_of.values() if "O" in ops)
        self.copies = {ops["O"]: OffloadPair(ops["F"], ops["L"], ops["BW" if "BW" in ops else "B"]) for ops in copied}
        self.lanes = tuple(self._lanes())
        self.limits = tuple(self._limits())

    def sources(self, n: int) -> Iterator[tuple[int, int]]:
        """Yield (action that n waits for, ticks that its result takes)."""
        count = len(self.action)
        for x in self.graph.waits[n]:
            yield self.graph.source(x), self.transfers[x - count].ticks if x >= count else 0

    @cached_property
    def followers(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Return, by action, what waits for it, and the ticks that its result takes."""
        followers: list[list[tuple[int, int]]] = [[] for _ in self.action]
        for n in range(len(self.action)):
            for x, lag in self.sources(n):
                followers[x].append((n, lag))
        return tuple(map(tuple, followers))

    def number(self, action: Action, rank: int) -> int | None:
        """Return the number of an action; of a BW that is not there, that of its B. None: there is none."""
        slot = self.graph.slot_of(action.op, action.stage, action.microbatch, rank)
        return self.number(replace(action, op="B"), rank) if slot is None and action.op == "BW" else slot

    @cached_property
    def kind(self) -> tuple[_Kind, ...]:
        """Return, by action, its op, stage, flow and rank."""
        flows = self.task.placement.num_flows
        placed = zip(self.action, self.rank, strict=True)
        return tuple((a.op, a.stage, a.microbatch % flows, rank) for a, rank in placed)

    @cached_property
    def alike(self) -> Mapping[_Kind, list[int]]:
        """Return, by kind, its actions in the order of microbatches."""
        alike: dict[_Kind, list[int]] = {}
        for n in sorted(range(len(self.action)), key=lambda n: self.action[n].microbatch):
            alike.setdefault(self.kind[n], []).append(n)
        return alike

    @cached_property
    def reach(self) -> int:
        """Return the ticks after an action's start within which its result is everywhere."""
        return max(self.size) + max((sent.ticks for sent in self.transfers), default=0)

    @cached_property
    def horizon(self) -> int:
        """Return the ticks within which a best schedule ends: as long as anything is left, something runs."""
        return 1 + sum(self.size) + sum(x.ticks for x in self.transfers) + sum(x.ticks for x in self.fusing.values())

    @cached_property
    def first_starts(self) -> Mapping[int, int] | None:
        """Return, by the first action of each rank, when it starts in every schedule; None where that depends on the order.
        Spans take 2 to 200 times as long to prove without.

        On a chain of one flow a rank's first action is F of its lowest stage and microbatch 0. If that is so for all ranks on
        the way there, it starts as soon as it arrives.
        """
        placement = self.task.placement
        if placement.num_flows > 1 or not placement.is_plain_chain:
            return None
        forwards = [n for n, a in enumerate(self.action) if (a.op, a.microbatch) == ("F", 0)]
        starts: dict[int, int] = {}
        ranks: set[int] = set()
        for n in sorted(forwards, key=lambda n: self.action[n].stage):
            if self.rank[n] in ranks:
                continue
            # an input that is no rank's first action comes at a time that depends on the order
            if any(x not in starts for x, _ in self.sources(n)):
                return None
            ranks.add(self.rank[n])
            starts[n] = max((starts[x] + self.size[x] + lag for x, lag in self.sources(n)), default=0)
        return starts

    def chosen(self, choice: int, starts: Starts) -> bool:
        """Return whether an O takes place, or a B is a full backward."""
        return starts[choice] >= 0 if choice in self.copies else starts[self.fusing[choice].w] < 0

    def end(self, n: int, starts: Starts) -> int:
        """Return when an action that takes place ends."""
        is_fused = n in self.fusing and self.chosen(n, starts)
        return starts[n] + (self.fusing[n].ticks if is_fused else self.size[n])

    def extent(self, starts: Starts) -> tuple[list[int], list[int]]:
        """Return, per rank, when compute begins and ends; (0, 0) without any."""
        lanes = [[n for n in lane if starts[n] >= 0] for lane in self.lanes[: self.num_ranks]]
        begins = [min((starts[n] for n in lane), default=0) for lane in lanes]
        return begins, [max((self.end(n, starts) for n in lane), default=0) for lane in lanes]

    # Which actions.

    def _complete(self, order: Schedule | None, fusing: bool) -> Schedule:
        """Return ``order`` with backwards apart, all of them or those that gain nothing by being whole, and with all copies."""
        if order is None:
            problem = Problem.of(self.placement, self.task.num_microbatches, self.costs)
            # it says which actions there are and what waits for what, so any order does
            order = problem.schedule("serial", grouped_rows(problem, 1))
        separates = [fusing or not self._gains(stage) for stage in range(self.placement.num_stages)]

        def complete(slot: Slot) -> Iterator[Slot]:
            for a in slot.actions:
                if a.op == "BW" and separates[a.stage]:
                    yield from (replace(a, op="B"), replace(a, op="W"))
                # copies of the order are dropped: all that could be are added, and syncs follow from times (_Row)
                elif a.op not in ("O", "L", "S"):
                    yield a
                if a.op == "F" and self._may_leave(a):
                    yield from (replace(a, op="O"), replace(a, op="L"))

        return with_slots(order, complete)

    def _gains(self, stage: int) -> bool:
        """Return whether a fused backward may take less time, or less memory, than B and W."""
        costs = self.costs
        while_it_runs = costs.memory_limit_bytes and (costs.cotangent_bytes[stage] or costs.temp_bytes)
        return bool(while_it_runs) or not at_most(costs.b_s[stage] + costs.w_s[stage], costs.bw_s[stage])

    def _may_leave(self, forward: Action) -> bool:
        """Return whether what an F makes may go to the host, and memory is short where it is."""
        if not self.task.offload or not self.placement.is_plain_chain:
            return False
        (rank,) = self.placement.ranks(forward.stage, forward.microbatch)
        short = min(self.task.memory_limit, (self.costs.memory_limit_bytes or (inf,) * (rank + 1))[rank]) < inf
        return short and self.costs.offloadable_bytes[forward.stage] > 0

    def _lanes(self) -> Iterator[tuple[int, ...]]:
        """Compute lanes, then those of the host, of a rank or of a PCIe group."""
        host: dict[tuple[bool, int, str], list[int]] = {}
        groups = host_groups(self.costs.host, self.num_ranks)
        for r, lanes in enumerate(self.graph.lanes):
            yield tuple(lanes["compute"])
            for name in HOST_LANES:
                # ranks of a PCIe group take turns on one lane, whoever's copies they are
                of = r in groups, groups.get(r, r), name if self.costs.host.mode == "duplex" else "shared"
                host.setdefault(of, []).extend(lanes[name])
        yield from (tuple(lane) for lane in host.values() if lane)

    # Memory.

    def _limits(self) -> Iterator[MemoryLimit]:
        yield from self._of_kind([self.task.memory_limit] * self.num_ranks, activations=True)
        if self.costs.memory_limit_bytes:
            static = static_bytes(self.placement, self.costs)
            room = [x - constant for x, constant in zip(self.costs.memory_limit_bytes, static, strict=True)]
            yield from self._of_kind(room, activations=False)
        if self.task.offloads_in_flight is not None:
            for r in range(self.num_ranks):
                offloads = [ops for ops in self.ops[r].values() if "O" in ops]
                held = tuple(MemoryInterval(1, (ops["O"], False), (ops["L"], True), ops["O"]) for ops in offloads)
                yield MemoryLimit(r, self.task.offloads_in_flight, held)

    def _of_kind(self, limits: Sequence[float], activations: bool) -> Iterator[MemoryLimit]:
        """Yield limits by rank, on one grid."""
        pieces = {r: list(self._pieces(r, activations)) for r, limit in enumerate(limits) if limit < inf}
        sizes = {amount for each in pieces.values() for *amounts, _ in each for amount in amounts}
        units = memory_units(sizes, max((limits[r] for r in pieces), default=0.0))
        units_of = {x: units.size(x) for x in sizes}
        for r, each in pieces.items():
            capacity = units.limit(limits[r]) if limits[r] >= 0 else -1
            held = tuple(x._replace(units=units_of[most] - units_of[less]) for most, less, x in each if most > less)
            # a limit that everything together would keep can't be felt
            if capacity < sum(interval.units for interval in held if interval.opens):
                yield MemoryLimit(r, capacity, held)

    def _pieces(self, rank: int, activations: bool) -> Iterator[_Sized]:
        """Yield what is held on a rank, in bytes or activations."""
        flows = self.placement.num_flows
        shares = [rank_share(self.placement, self.costs, rank, flow) if activations else 1.0 for flow in range(flows)]
        for (stage, i), ops in self.ops[rank].items():
            share = shares[i % flows]
            for most, less, piece in self._of_microbatch(stage, ops, activations) if share > 0 else ():
                yield most / share, less / share, piece

    def _of_microbatch(self, stage: int, ops: Mapping[str, int], activations: bool) -> Iterator[_Sized]:
        costs = self.costs
        yield from _residuals(
            ops, costs.residual_bytes[stage], costs.offloadable_bytes[stage], costs.w_residual_bytes[stage]
        )
        for op, n in ops.items():
            if op not in _KNOWN:
                for effect in op_spec(op).memory:
                    if not activations or effect.field in ACTIVATION_FIELDS:
                        at = n, effect.at == "end"
                        held = MemoryInterval(0, at, None) if effect.sign > 0 else MemoryInterval(0, None, at)
                        yield costs.values(effect.field)[stage], 0.0, held
        if activations:
            return
        back = ops.get("B", -1)
        choice = self.fusing[back].choice if back in self.fusing else -1
        if back >= 0:
            yield costs.cotangent_bytes[stage], 0.0, _while(back, choice, False)
        for op, values in costs.temp_bytes:
            if op in ops:
                # workspace of what may not take place is held only if it does
                literal = ops["O"] if op in ("O", "L") else choice if op in ("B", "W") else -1
                yield values[stage], 0.0, _while(ops[op], literal, op in ("O", "L"))
            # a BW to choose has no number of its own: it runs where its B stands
            elif op == "BW" and choice >= 0:
                yield values[stage], 0.0, _while(back, choice, True)


def _while(n: int, choice: int, holds: bool) -> MemoryInterval:
    """Return what is held while an action runs."""
    return MemoryInterval(0, (n, False), (n, True), choice, holds)


def _residuals(ops: Mapping[str, int], held: float, may_leave: float, w_held: float) -> Iterator[_Sized]:
    """Yield what F makes until B ends, and what B keeps until W ends; see the module."""
    ends = {op: (n, True) for op, n in ops.items()}
    f, b, w = (ops["F"], False), ends.get("BW", ends.get("B")), ends.get("W")
    if w is None:
        w_held = 0.0

    def stay(held: float, residue: float, opens: Event, choice: int = -1, holds: bool = True) -> Iterator[_Sized]:
        # what F and W both hold is one piece, so that B's end does not seem to give it back and take it again
        shared = min(held, residue)
        yield shared, 0.0, MemoryInterval(0, opens, w, choice, holds)
        yield held, shared, MemoryInterval(0, opens, b, choice, holds)
        yield residue, shared, MemoryInterval(0, b, w, choice, holds)

    if "O" not in ops:
        yield from stay(held, w_held, f)
        return
    leaves = min(may_leave, held)
    # w-residuals are part of what leaves if they are no larger
    o, rest = ops["O"], w_held if w_held <= leaves else 0.0
    yield held - leaves, 0.0, MemoryInterval(0, f, b)
    yield leaves, 0.0, MemoryInterval(0, f, ends["O"], o)
    yield from stay(leaves, rest, f, o, False)
    yield from stay(leaves, rest, (ops["L"], False), o, True)
    yield w_held, rest, MemoryInterval(0, b, w)


def schedule_of(actions: ActionTable, starts: Starts, name: str) -> tuple[Schedule, Timeline]:
    """Return the schedule that issues everything in the order of ``starts``, and when that happens.

    Raises:
        ScheduleError: the order is not a valid schedule.
    """
    task = actions.task
    rows = tuple(_Row(actions, starts, rank).slots() for rank in range(actions.num_ranks))
    schedule = Schedule(name, task.placement, task.num_microbatches, rows)
    check_schedule(schedule)
    return schedule, simulate(schedule, task.costs)


def schedule_within_limits(actions: ActionTable, starts: Starts, name: str) -> tuple[Schedule, Timeline] | None:
    """Return what :func:`schedule_of` does, or None where the order is not valid or breaks a limit."""
    with suppress(ScheduleError):
        solved = schedule_of(actions, starts, name)
        if actions.task.fits(solved[1]):
            return solved
    return None


def starts_of(actions: ActionTable, timeline: Timeline) -> Starts | None:
    """Return the times of a simulated schedule in ticks; None if it has slots that are not among ``actions``."""
    begun: list[tuple[Action, int, float]] = []
    for event in timeline.events:
        a = event.action
        if event.lane not in ("compute", *HOST_LANES) or (type(a) is Action and op_spec(a.op).is_sync):
            continue
        if type(a) is not Action:
            return None
        begun.append((a, event.rank, event.start_s))
    return starts_at(actions, begun)


def starts_at(actions: ActionTable, begun: Iterable[tuple[Action, int, float]]) -> Starts | None:
    """Convert starts by rank, in seconds, into ticks by action; None if some of it is not among ``actions``.

    A full backward that is not there is taken apart: B, and W right behind it.
    """
    starts = [-1] * len(actions.action)
    for a, rank, seconds in begun:
        n = actions.number(a, rank)
        if n is None:
            return None
        starts[n] = actions.ticks.of(seconds)
        if a.op == "BW" != actions.action[n].op and n not in actions.fusing:
            starts[actions.number(Action("W", a.stage, a.microbatch), rank) or 0] = starts[n] + actions.size[n]
    return starts


class _Row:
    """The actions of one rank in the order of their times."""

    def __init__(self, actions: ActionTable, starts: Starts, rank: int) -> None:
        self.actions, self.starts, self.rank = actions, starts, rank
        compute = [n for n in actions.lanes[rank] if starts[n] >= 0]
        self.compute = sorted(compute, key=lambda n: (starts[n], self._end(n), n))
        self.begins, self.ends = [starts[n] for n in self.compute], [self._end(n) for n in self.compute]
        self.place = {n: at for at, n in enumerate(self.compute)}
        self.copies = {o: c for o, c in actions.copies.items() if actions.rank[o] == rank and starts[o] >= 0}

    def _end(self, n: int) -> int:
        return self.actions.end(n, self.starts)

    def slots(self) -> Row:
        """Compute slots with what goes between them: host actions behind the last slot that has ended, then syncs."""
        limits = [limit for limit in self.actions.limits if self.copies and limit.rank == self.rank]
        syncs = {o for limit in limits for o in self._syncs(limit)}
        # keys: compute slots before it, compute behind copies, begin, end, and O before L before S
        slots = [(at, True, 0, 0, 0, self._slot(n)) for at, n in enumerate(self.compute)]
        for o, copies in self.copies.items():
            for order, n in enumerate((o, copies.load)):
                begin, end, action = self.starts[n], self._end(n), self.actions.action[n]
                slots.append((self._gap(n, copies), False, begin, end, order, action))
            end = self._end(o)
            place = max(bisect_left(self.begins, end), self._gap(o, copies))
            if o in syncs and place <= self._gap(copies.load, copies):
                a = self.actions.action[o]
                slots.append((place, False, end, end, 2, Action("S", a.stage, a.microbatch)))
        return tuple(action for *_, action in sorted(slots))

    def _slot(self, n: int) -> Action:
        a, actions = self.actions.action[n], self.actions
        return replace(a, op="BW") if n in actions.fusing and actions.chosen(n, self.starts) else a

    def _gap(self, n: int, copies: OffloadPair) -> int:
        """Return how many compute slots stand before this O or L: those that have ended when it starts."""
        after = bisect_right(self.ends, self.starts[n])
        # rounding must move no copy before its F or behind its B
        return min(max(after, self.place[copies.f] + 1), self.place[copies.b])

    def _syncs(self, limit: MemoryLimit) -> Iterator[int]:
        """Yield O's that something must wait for: it takes what they gave, and nothing else in the row says that they have
        ended."""
        unwaited: dict[int, int] = {}  # units, by O's that ended and that nothing waited for
        actions, level = self.actions, 0
        loads = {copies.load: o for o, copies in self.copies.items()}
        backs = {copies.b: copies.load for copies in self.copies.values()}
        waits = {n for n in loads if actions.task.costs.host.mode == "duplex"} | self.place.keys()
        # at one tick what is given back sorts before what is taken, as limits are judged
        for _, units, n in sorted(self._changes(limit)):
            level += units
            if n in loads:
                unwaited.pop(loads[n], None)  # it takes what its own O gave
            elif n in backs and not waits & loads.keys():  # its L waited for what went before on the lane
                unwaited = {o: x for o, x in unwaited.items() if self._end(o) > self.starts[backs[n]]}
            elif n in self.copies and units < 0:
                unwaited[n] = unwaited.get(n, 0) - units
            last = None
            while units > 0 and n in waits and unwaited and level + sum(unwaited.values()) > limit.capacity:
                last = next(iter(unwaited))
                del unwaited[last]
            if last is not None:  # those before it ended before it
                yield last

    def _changes(self, limit: MemoryLimit) -> Iterator[tuple[int, int, int]]:
        """Yield (tick, units, action): what is given back and taken."""
        start = self.starts
        b_of_w = {fusing.w: b for b, fusing in self.actions.fusing.items()}
        for interval in limit.intervals:
            if interval.choice < 0 or self.actions.chosen(interval.choice, start) == interval.holds:
                for event, units in ((interval.opens, interval.units), (interval.closes, -interval.units)):
                    n, at_end = event or (-1, False)
                    n = b_of_w[n] if n in b_of_w and start[n] < 0 else n
                    if n >= 0 or units > 0:
                        yield (self._end(n) if at_end else start[n]) if n >= 0 else -1, units, n
