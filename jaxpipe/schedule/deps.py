"""Compute what each slot of a schedule waits for, as integers: the graph that checker, simulator and lowering share.

Slots are numbered 0..n-1, rank after rank in row order; transfers between ranks get the numbers from n on, so that one list
of numbers says what a slot waits for. Everything comes from :class:`~jaxpipe.schedule.ir.OpSpec`; no op is named here.

Readings taken where :file:`jaxpipe/README.md` leaves room:

* One transfer per (producing action, destination rank, boundary): two consumers on one rank share it.
* A stage on a group of ranks: an op that sends is a joint computation, its members start together; other ops, and those that
  are not ``together``, run on each rank by themselves. A consumer in the producer's group reads its own rank's copy; one
  outside it receives from the group's first rank.
* A *barrier*, the collective after members that ran by themselves, is a transfer from each of them: to itself for consumers in
  the group, which wait for all of these, else to the consumer. So it begins when the last of them ends.
* An op that runs once a step (``per_step``) stands for the microbatches on its rank from its own number up to the next of
  its actions, so that several steps on end are one schedule. Of what it waits for, which ends in row order, the last counts.
* Where spans differ, an action waits for every action that has a microbatch in common with it. One whole boundary of it moves:
  a cotangent back to a stage of smaller span is that of all the microbatches in its group.
* Transfers count as tagged, so ranks may receive in another order than the one in which they were sent: channels are no
  source of deadlock here and only slots have to wait.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, get_args

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule.costs import CostProfile
from jaxpipe.schedule.ir import Action, Lane, OpSpec, Schedule, Slot, Wait, op_spec
from jaxpipe.schedule.placement import Placement

_NEIGHBOURS = {"pred": Placement.predecessors, "succ": Placement.returning, "peer": Placement.peers}
_DENSE_LIMIT = 1_000_000


class Transfer(NamedTuple):
    """The boundary of ``stage``, made by ``action`` in slot number ``producer``, moved from rank ``src`` to rank ``dst``.

    ``parts``: how many boundaries of ``stage`` move at once; where 0, nothing moves but time passes. ``barrier``: whether a
    collective of the action's group goes before; within the group that is all.
    """

    producer: int
    action: Action
    src: int
    dst: int
    stage: int
    parts: float = 1.0
    barrier: bool = False

    def seconds(self, costs: CostProfile) -> float:
        """Return how long it takes to arrive."""
        return self._barrier_s(costs) + costs.transfer_s(self.src, self.dst, self.stage, self.parts)

    def occupied_s(self, costs: CostProfile) -> float:
        """Return how long no other transfer of the pair of ranks may start."""
        return self._barrier_s(costs) + costs.occupied_s(self.src, self.dst, self.stage, self.parts)

    def _barrier_s(self, costs: CostProfile) -> float:
        return costs.group_comm_s[self.action.stage] if self.barrier else 0.0


class Unmet(NamedTuple):
    """``action`` in ``slot`` waits for one of ``ops`` of ``stage`` and ``microbatch``, and the schedule has none."""

    slot: int
    action: Action
    ops: tuple[str, ...]
    stage: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class DependencyGraph:
    """Slots, transfers and what waits for what. Lists are read-only by convention.

    ``slots[n]``, ``rank_of[n]``: slot number n and its rank; ``row_start[r]`` is the number of rank r's first slot.
    ``lanes[r]``: slot numbers of rank r per lane, in row order. ``waits[n]``: numbers that slot n waits for: slots, and
    ``len(slots) + k`` for ``transfers[k]``. ``sends[n]``: indices into ``transfers`` that slot n issues, in order.
    ``joint_of[n]``: index into ``joints`` of the set of slots that n must start together with (absent: starts alone).
    ``problems``: actions that have no place in the graph. ``unmet``: waits that nothing satisfies.
    """

    schedule: Schedule
    slots: list[Slot] = field(default_factory=list)
    rank_of: list[int] = field(default_factory=list)
    row_start: list[int] = field(default_factory=list)
    lanes: list[dict[str, list[int]]] = field(default_factory=list)
    waits: list[tuple[int, ...]] = field(default_factory=list)
    sends: dict[int, tuple[int, ...]] = field(default_factory=dict)
    transfers: list[Transfer] = field(default_factory=list)
    joint_of: dict[int, int] = field(default_factory=dict)
    joints: list[tuple[int, ...]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    unmet: list[Unmet] = field(default_factory=list)
    _ops: dict[str, _OpIndex] = field(default_factory=dict)

    def slot_of(self, op: str, stage: int, microbatch: int, rank: int) -> int | None:
        """Number of the slot on ``rank`` that holds this action, or None."""
        index = self._ops.get(op)
        if index is None:
            return None
        key = stage * self.schedule.num_microbatches + microbatch
        slot = index.single[key]
        if slot >= 0:
            return slot if self.rank_of[slot] == rank else None
        return index.members.get(key, {}).get(rank)

    def local_boundaries(self, action: Action, rank: int) -> Iterator[tuple[int, int, float]]:
        """Yield (slot that makes it, upstream stage, how many) of each boundary that ``action`` on ``rank`` reads on the
        spot."""
        placement, ops = self.schedule.placement, self._ops
        for wait in ops[action.op].spec.waits:
            if wait.where in ("pred", "succ"):
                upstream = wait.where == "pred"
                sending = [
                    op for op in wait.ops if op in ops and ops[op].spec.sends == ("succ" if upstream else "pred")
                ]
                for t in (placement.predecessors if upstream else placement.returning)(action.stage):
                    for i in placement.covering(action.stage, action.microbatch, t):
                        producers = (self.slot_of(op, t, i, rank) for op in sending)
                        producer = next((n for n in producers if n is not None), None)
                        if producer is not None:
                            stage = t if upstream else action.stage
                            yield producer, stage, placement.span[t] / placement.span[stage]

    def waiting_boundaries(
        self, start_s: Sequence[float], end_s: Sequence[float]
    ) -> Iterator[tuple[int, int, float, float, float]]:
        """Yield (rank, stage, how many, since, until) of each boundary that is on a rank before an action reads it, where slots
        and transfers start and end so."""
        first = len(self.slots)
        read_s: dict[int, float] = {}
        for number, waits in enumerate(self.waits):
            for source in waits:
                if source >= first:
                    # a boundary that several slots read stays until the last of them starts
                    read_s[source] = max(start_s[number], read_s.get(source, 0.0))
            rank = self.rank_of[number]
            for action in self.slots[number].actions:
                for producer, stage, parts in self.local_boundaries(action, rank):
                    if start_s[number] > end_s[producer]:
                        yield rank, stage, parts, end_s[producer], start_s[number]
        for number, until_s in read_s.items():
            moved = self.transfers[number - first]
            if moved.src != moved.dst and until_s > start_s[moved.producer]:
                yield moved.dst, moved.stage, moved.parts, start_s[moved.producer], until_s

    def ops(self) -> tuple[OpSpec, ...]:
        """Return the ops that the schedule uses."""
        return tuple(index.spec for index in self._ops.values())

    def position(self, slot: int) -> int:
        """Place of a slot in its row, from 0."""
        return slot - self.row_start[self.rank_of[slot]]

    def source(self, number: int) -> int:
        """Return the slot behind a number in ``waits``: itself, or the producer of the transfer."""
        return number if number < len(self.slots) else self.transfers[number - len(self.slots)].producer


@dataclass(slots=True)
class _OpIndex:
    """Slots of the actions of one op: ``single[stage * m + microbatch]`` is a slot or -1; groups are in ``members``."""

    spec: OpSpec
    single: list[int]
    members: dict[int, dict[int, int]] = field(default_factory=dict)


class _Source(NamedTuple):
    """An op that may satisfy a wait, and the stage whose boundary then moves (None: nothing moves). ``barrier``: on a group,
    all ranks are waited for."""

    op_index: _OpIndex
    boundary: int | None
    barrier: bool


class _Rule(NamedTuple):
    """One wait of one op on one stage: for ``stage``, whose actions begin at ``base`` of the index. ``alike``: equal spans."""

    wait: Wait
    stage: int
    base: int
    alike: bool
    sources: tuple[_Source, ...]


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause cyclic garbage collection: graphs of schedules are many small objects without cycles, and scanning
    them takes a third of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def build_graph(schedule: Schedule) -> DependencyGraph:
    """Return the dependency graph of ``schedule``. Never raises for a bad schedule: see ``problems`` and ``unmet``."""
    builder = _Builder(schedule)
    if builder.index():
        builder.link()
        builder.join()
    return builder.graph


class _Builder:
    """Fills the lists of ``graph``."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        graph = self.graph = DependencyGraph(schedule)
        self.slots, self.rank_of, self.row_start, self.lanes = graph.slots, graph.rank_of, graph.row_start, graph.lanes
        self.waits, self.sends, self.transfers = graph.waits, graph.sends, graph.transfers
        self.problems, self.unmet, self.ops = graph.problems, graph.unmet, graph._ops
        self.unknown: set[str] = set()
        self.per_step: set[str] = set()
        self.rules: dict[tuple[str, int], tuple[_Rule, ...]] = {}
        self.outside: set[Action] = set()
        self.made: dict[tuple[int, int, int, str, int], int] = {}

    # Step 1: number the slots, find every action.

    def index(self) -> bool:
        """Fill ``slots`` and ``ops``; False when the schedule's shape is too wrong to go on."""
        s = self.schedule
        if s.num_microbatches < 1:
            self.problems.append(f"number of microbatches is {s.num_microbatches}; want at least 1")
        if len(s.rows) != s.num_ranks:
            self.problems.append(f"the schedule has {len(s.rows)} rows for {s.num_ranks} ranks; give one row per rank")
        for stage, g in enumerate(s.placement.span):
            if s.num_microbatches % g:
                self.problems.append(
                    f"stage {stage} runs once per {g} microbatches, and {s.num_microbatches} is no multiple"
                )
        size = sum(map(len, s.rows))
        # tables are dense, so a mistyped number of microbatches must not fill the memory
        pairs = s.num_stages * s.num_microbatches
        if pairs > max(_DENSE_LIMIT, 8 * size):
            self.problems.append(
                f"{s.num_stages} stages x {s.num_microbatches} microbatches need {pairs} actions of each required op, but "
                f"the rows hold {size} slots in all; is the number of microbatches right?"
            )
        if self.problems:
            return False
        for rank, row in enumerate(s.rows):
            self._index_row(rank, row)
        for op in self.per_step:
            self._spread(self.ops[op])
        return True

    def _index_row(self, rank: int, row: Sequence[Slot]) -> None:
        s = self.schedule
        num_stages, m, flows, num_flows = s.num_stages, s.num_microbatches, s.placement.flows, s.placement.num_flows
        counts = [m // g for g in s.placement.span]
        lanes: dict[str, list[int]] = {lane: [] for lane in get_args(Lane)}
        self.lanes.append(lanes)
        number = len(self.slots)
        self.row_start.append(number)
        self.slots.extend(row)
        self.rank_of.extend([rank] * len(row))
        ops = self.ops
        for slot in row:
            lane = ""
            for action in (slot,) if type(slot) is Action else slot.actions:
                index = ops.get(action.op) or self._open(action, rank)
                stage, i = action.stage, action.microbatch
                if index is None:
                    lane = lane or "compute"
                    continue
                lane = self._lane(lane, index.spec, slot, rank)
                if not (0 <= stage < num_stages and 0 <= i < counts[stage]):
                    self._out_of_range(action, rank)
                elif rank not in (group := flows[i % num_flows][stage]):
                    self._misplaced(action, rank, group)
                elif len(group) > 1:
                    members = index.members.setdefault(stage * m + i, {})
                    if rank in members:
                        self._duplicate(action, rank, members[rank], number)
                    else:
                        members[rank] = number
                elif index.single[stage * m + i] >= 0:
                    self._duplicate(action, rank, index.single[stage * m + i], number)
                else:
                    index.single[stage * m + i] = number
            lanes[lane].append(number)
            number += 1

    def _open(self, action: Action, rank: int) -> _OpIndex | None:
        if action.op in self.unknown:
            return None
        try:
            spec = op_spec(action.op)
        except ScheduleError as error:
            # reported once: every further action of the op would say the same
            self.unknown.add(action.op)
            self.problems.append(f"{action} on rank {rank}: {error}")
            return None
        index = _OpIndex(spec, [-1] * (self.schedule.num_stages * self.schedule.num_microbatches))
        self.ops[action.op] = index
        if index.spec.per_step:
            self.per_step.add(action.op)
        return index

    def _spread(self, index: _OpIndex) -> None:
        """Give each microbatch the last action before it, on the same ranks, of an op that runs once a step."""
        s, m, flows = self.schedule, self.schedule.num_microbatches, self.schedule.placement.num_flows
        for stage, span in enumerate(s.placement.span):
            for i in range(1, m // span):
                ranks, before = s.placement.ranks(stage, i), range(i - 1, max(-1, i - 1 - flows), -1)
                key = stage * m + i
                last = next((stage * m + k for k in before if s.placement.ranks(stage, k) == ranks), None)
                if last is not None and index.single[key] < 0:
                    index.single[key] = index.single[last]
                if last in index.members:
                    index.members.setdefault(key, index.members[last])

    def _lane(self, lane: str, spec: OpSpec, slot: Slot, rank: int) -> str:
        if (lane and lane != spec.lane) or (type(slot) is not Action and spec.lane != "compute"):
            self.problems.append(
                f"braid {slot} on rank {rank} holds {spec.name}, which does not run on the compute lane"
            )
            return "compute"
        return spec.lane

    def _out_of_range(self, action: Action, rank: int) -> None:
        # what has no place can't be resolved either, and its waits would only repeat the problem
        self.outside.add(action)
        s = self.schedule
        span = s.placement.span[action.stage] if 0 <= action.stage < s.num_stages else 1
        what = "microbatches" if span == 1 else f"groups of {span} microbatches"
        self.problems.append(
            f"{action} on rank {rank} is out of range: stages are 0..{s.num_stages - 1}, "
            f"{what} 0..{s.num_microbatches // span - 1}"
        )

    def _misplaced(self, action: Action, rank: int, group: Sequence[int]) -> None:
        ranks = f"rank {group[0]}" if len(group) == 1 else f"ranks {', '.join(map(str, group))}"
        self.problems.append(
            f"{action} is on rank {rank}, but the placement runs stage {action.stage} "
            f"of microbatch {action.microbatch} on {ranks}"
        )

    def _duplicate(self, action: Action, rank: int, first: int, second: int) -> None:
        start = self.row_start[rank]
        self.problems.append(f"{action} appears twice on rank {rank} (slots {first - start} and {second - start})")

    # Step 2: resolve the waits.

    def link(self) -> None:
        for rank, row in enumerate(self.schedule.rows):
            beside = {n for lane, slots in self.lanes[rank].items() if lane != "compute" for n in slots}
            last_compute = -1
            for number, slot in enumerate(row, start=self.row_start[rank]):
                if type(slot) is Action:
                    waits = self._resolve(slot, number, rank)
                else:
                    waits = [dep for action in slot.actions for dep in self._resolve(action, number, rank)]
                # a copy or a reduction is issued once the compute slot before it in the row has ended
                if number not in beside:
                    last_compute = number
                elif last_compute >= 0:
                    waits.append(last_compute)
                self.waits.append(tuple(waits))
        self._order_sends()

    def _resolve(self, action: Action, number: int, rank: int) -> list[int]:
        """Return the numbers that ``action`` in slot ``number`` waits for."""
        if self.outside and action in self.outside:
            return []
        waits: list[int] = []
        numbers: Sequence[int] = (action.microbatch,)
        if action.op in self.per_step:
            numbers = self._step_of(action, number, rank)
        for rule in self.rules.get((action.op, action.stage)) or self._open_rules(action):
            first = len(waits)
            # between stages of different spans several actions share a microbatch with this one
            for i in numbers if rule.alike else self.schedule.placement.covering(action.stage, numbers[0], rule.stage):
                # the first of the wait's ops that the schedule has here satisfies it
                for source in rule.sources:
                    dep = source.op_index.single[rule.base + i]
                    if dep < 0 and source.op_index.members:
                        members = source.op_index.members.get(rule.base + i)
                        if members and source.barrier:
                            waits += self._barrier(members, source, rule.stage, i, rank)
                            break
                        dep = self._member(members, rule, rank, i) if members else -1
                    if dep >= 0:
                        if source.boundary is not None and self.rank_of[dep] != rank:
                            dep = self._transfer(dep, source, rule.stage, i, rank)
                        waits.append(dep)
                        break
                else:
                    if not rule.wait.optional:
                        self.unmet.append(Unmet(number, action, rule.wait.ops, rule.stage, i))
            # of slots of one lane the last one to end is the last in the row
            if len(numbers) > 1 and waits[first:]:
                waits[first:] = [max(waits[first:])]
        return waits

    def _step_of(self, action: Action, number: int, rank: int) -> Sequence[int]:
        """Return the microbatches that ``action`` of an op that runs once a step is for."""
        s, index = self.schedule, self.ops[action.op]
        numbers = range(action.microbatch, s.num_microbatches // s.placement.span[action.stage])
        keys = ((action.stage * s.num_microbatches + i, i) for i in numbers)
        return [i for key, i in keys if number in (index.single[key], index.members.get(key, {}).get(rank))]

    def _open_rules(self, action: Action) -> tuple[_Rule, ...]:
        if action.op in self.unknown or action in self.outside:
            return ()
        rules = self.rules[action.op, action.stage] = tuple(self._make_rules(self.ops[action.op].spec, action.stage))
        return rules

    def _make_rules(self, spec: OpSpec, stage: int) -> Iterator[_Rule]:
        placement, m = self.schedule.placement, self.schedule.num_microbatches
        for wait in spec.waits:
            used = [self.ops[op] for op in wait.ops if op in self.ops]
            if wait.optional and not used:
                continue
            for t in _NEIGHBOURS[wait.where](placement, stage) if wait.where in _NEIGHBOURS else (stage,):
                sources = tuple(_source(index, wait, stage, t) for index in used)
                yield _Rule(wait, t, t * m, placement.span[t] == placement.span[stage], sources)

    def _member(self, members: Mapping[int, int], rule: _Rule, rank: int, i: int) -> int:
        """On a group: the rank's own slot, else (from another stage) that of the group's first rank; -1 if there is none."""
        if rank in members or rule.wait.where == "self":
            return members.get(rank, -1)
        return next(members[r] for r in self.schedule.placement.ranks(rule.stage, i) if r in members)

    def _barrier(self, members: Mapping[int, int], source: _Source, stage: int, i: int, rank: int) -> Iterator[int]:
        """Yield the numbers of the transfers by which ``rank`` knows that all ``members`` and their collective have ended."""
        for member, slot in members.items():
            yield self._transfer(slot, source, stage, i, member if rank in members else rank, barrier=True)

    def _transfer(self, producer: int, source: _Source, stage: int, i: int, dst: int, barrier: bool = False) -> int:
        """Number of the transfer that brings this boundary to ``dst``; a new one unless another consumer asked already."""
        op, boundary = source.op_index.spec.name, stage if source.boundary is None else source.boundary
        key = (producer, dst, boundary, op, i)
        number = self.made.get(key)
        if number is None:
            number = self.made[key] = len(self.slots) + len(self.transfers)
            slot = self.slots[producer]
            if type(slot) is not Action:
                slot = next(a for a in slot.actions if a.op == op and a.stage == stage and a.microbatch == i)
            self.sends[producer] = (*self.sends.get(producer, ()), len(self.transfers))
            span = self.schedule.placement.span
            moved = (dst, boundary, span[stage] / span[boundary], barrier)
            self.transfers.append(Transfer(producer, slot, self.rank_of[producer], *moved))
        return number

    def _order_sends(self) -> None:
        """Transfers of one slot go out in the order of its actions, then by boundary and destination."""
        for producer, sent in self.sends.items():
            if len(sent) > 1:
                actions, moved = self.slots[producer].actions, self.transfers
                self.sends[producer] = tuple(
                    sorted(sent, key=lambda k: (actions.index(moved[k].action), moved[k].stage, moved[k].dst, k))
                )

    # Step 3: slots that start together.

    def join(self) -> None:
        parent: dict[int, int] = {}

        def root(x: int) -> int:
            while parent.setdefault(x, x) != x:
                # union-find, halving paths: joints that share a braid start together
                parent[x] = x = parent[parent[x]]
            return x

        for index in self.ops.values():
            if index.spec.is_joint:
                for members in index.members.values():
                    first, *rest = members.values()
                    for other in rest:
                        parent[root(other)] = root(first)
        groups: dict[int, list[int]] = {}
        for slot in sorted(parent):
            groups.setdefault(root(slot), []).append(slot)
        for group in groups.values():
            self.graph.joint_of.update(dict.fromkeys(group, len(self.graph.joints)))
            self.graph.joints.append(tuple(group))


def _source(index: _OpIndex, wait: Wait, stage: int, target: int) -> _Source:
    """The boundary that a wait of ``stage`` on ``target`` moves is that of the upstream one, if the producer sends it there."""
    moves = (wait.where, index.spec.sends) in (("pred", "succ"), ("succ", "pred"), ("peer", "peer"))
    boundary = (stage if wait.where == "succ" else target) if moves else None
    return _Source(index, boundary, wait.where == "group" or not (index.spec.together or target == stage))
