"""The simulator against a slow reference written from jaxpipe/README.md, and what every timeline must satisfy."""

from __future__ import annotations

import random
from fractions import Fraction
from itertools import pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import given

from jaxpipe.schedule import (
    Action,
    CostProfile,
    Schedule,
    Timeline,
    bidirectional,
    one_to_one,
    op_spec,
    simulate,
    with_shared,
)
from tests.support.schedule_strategies import (
    random_costs,
    random_schedule,
    random_valid_schedules,
)

TOWARDS = {"pred": "succ", "succ": "pred", "self": None}
"""Who waits on a predecessor reads what was sent to a successor."""


class Reference:
    """Finds each slot's start by recursion over the rules, in no particular order; no PCIe groups.

    A slot's start is the latest of: end of the slot before it in its lane; ends (or arrivals) of what its actions wait for; for
    a host action, the end of the compute slot before it in its row. Joint slots share the latest of their starts.
    """

    def __init__(self, schedule: Schedule, costs: CostProfile) -> None:
        self.schedule, self.costs = schedule, costs
        self.where = {
            (a, r): (r, k) for r, row in enumerate(schedule.rows) for k, x in enumerate(row) for a in x.actions
        }
        self.known: dict[tuple[int, int], float] = {}
        self.arrived: dict[tuple[Action, int, int, int], float] = {}

    def lane(self, rank: int, k: int) -> str:
        lane = op_spec(self.schedule.rows[rank][k].actions[0].op).lane
        return "host" if lane != "compute" and self.costs.host.mode == "shared" else lane

    def duration(self, place: tuple[int, int]) -> float:
        slot = self.schedule.rows[place[0]][place[1]]
        return sum(self.costs.seconds(op_spec(a.op).cost, a.stage) for a in slot.actions)

    def end(self, place: tuple[int, int]) -> float:
        return self.start(place) + self.duration(place)

    def start(self, place: tuple[int, int]) -> float:
        if place not in self.known:
            self.known[place] = max(self.ready(other) for other in self.joined(place))
        return self.known[place]

    def joined(self, place: tuple[int, int]) -> set[tuple[int, int]]:
        group = {place}
        while True:
            neighbours = {
                self.where[action, r]
                for rank, k in group
                for action in self.schedule.rows[rank][k].actions
                if op_spec(action.op).sends != "none"
                for r in self.schedule.placement.ranks(action.stage, action.microbatch)
                if (action, r) in self.where
            }
            if neighbours <= group:
                return group
            group |= neighbours

    def ready(self, place: tuple[int, int]) -> float:
        rank, k = place
        row = self.schedule.rows[rank]
        times = [0.0]
        times += [self.end((rank, j)) for j in range(k) if self.lane(rank, j) == self.lane(rank, k)][-1:]
        if self.lane(rank, k) != "compute":
            times += [self.end((rank, j)) for j in range(k) if self.lane(rank, j) == "compute"][-1:]
        for action in row[k].actions:
            times += self.inputs(action, rank)
        return max(times)

    def inputs(self, action: Action, rank: int) -> list[float]:
        placement, times = self.schedule.placement, []
        for wait in op_spec(action.op).waits:
            s = action.stage
            near = {"self": (s,), "pred": placement.predecessors(s), "succ": placement.successors(s)}[wait.where]
            for t in near:
                group = placement.ranks(t, action.microbatch)
                source = rank if rank in group else group[0]
                for op in wait.ops:
                    producer = Action(op, t, action.microbatch)
                    if (producer, source) in self.where:
                        moves = source != rank and op_spec(op).sends == TOWARDS[wait.where]
                        boundary = t if wait.where == "pred" else s
                        times.append(
                            self.arrival(producer, source, rank, boundary)
                            if moves
                            else self.end(self.where[producer, source])
                        )
        return times

    def arrival(self, action: Action, src: int, dst: int, boundary: int) -> float:
        """Return the arrival of a transfer: all of the pair start in the order in which ``src`` issues them, each once the
        bytes of the one before have left; then they are on their way for the latency."""
        link = dict(self.costs.links).get((src, dst), self.costs.link)
        free: float = 0.0
        for message, stage in self.traffic(src, dst):
            begin = max(free, self.end(self.where[message, src]))
            bytes_s = self.costs.boundary_bytes[stage] / link.bytes_per_s
            free = begin + bytes_s
            if (message, stage) == (action, boundary):
                return begin + (link.latency_s + bytes_s)
        raise AssertionError("not sent")

    def traffic(self, src: int, dst: int) -> list[tuple[Action, int]]:
        placement, messages = self.schedule.placement, []
        for action in self.schedule.actions(src):
            direction, s = op_spec(action.op).sends, action.stage
            if placement.ranks(s, action.microbatch)[0] != src or dst in placement.ranks(s, action.microbatch):
                continue
            if direction == "succ" and any(
                dst in placement.ranks(t, action.microbatch) for t in placement.successors(s)
            ):
                messages.append((action, s))
            if direction == "pred":
                messages += [
                    (action, t)
                    for t in sorted(placement.predecessors(s))
                    if dst in placement.ranks(t, action.microbatch)
                ]
        return messages

    def waiting(self, rank: int) -> list[tuple[float, float, int]]:
        """Return (since, until, stage) of boundaries that are on ``rank`` and that nothing reads yet."""
        placement = self.schedule.placement
        local, reads_of = [], {}
        for k, slot in enumerate(self.schedule.rows[rank]):
            for action in slot.actions:
                for wait in op_spec(action.op).waits:
                    if wait.where == "self":
                        continue
                    near = placement.predecessors if wait.where == "pred" else placement.successors
                    for t in near(action.stage):
                        group = placement.ranks(t, action.microbatch)
                        source = rank if rank in group else group[0]
                        for op in wait.ops:
                            producer = self.where.get((Action(op, t, action.microbatch), source))
                            if producer is None or op_spec(op).sends != TOWARDS[wait.where]:
                                continue
                            stage = t if wait.where == "pred" else action.stage
                            if source == rank:
                                local.append((self.end(producer), self.start((rank, k)), stage))
                            else:
                                reads_of.setdefault((producer, op, stage, action.microbatch), []).append(
                                    self.start((rank, k))
                                )
        return local + [
            (self.start(producer), max(reads), stage) for (producer, _, stage, _), reads in reads_of.items()
        ]


def reference_memory(
    schedule: Schedule, costs: CostProfile, timeline: Timeline, rank: int, reference: Reference
) -> tuple[dict[float, Fraction], Fraction]:
    """Return live bytes after each instant, and the peak in activation units, with exact fractions."""
    live: dict[float, Fraction] = {}
    units: dict[float, Fraction] = {}
    temp = dict(costs.temp_bytes)
    for e in timeline.of(rank):
        for a in e.action.actions if e.lane != "send" else ():
            flow = schedule.placement.flows[a.microbatch % schedule.placement.num_flows]
            share = sum(Fraction(costs.residual_bytes[s]) for s, group in enumerate(flow) if rank in group)
            workspace = Fraction(temp[a.op][a.stage]) if a.op in temp else Fraction(0)
            for at, sign in ((e.start_s, 1), (e.end_s, -1)):
                live[at] = live.get(at, Fraction(0)) + sign * workspace
            for effect in op_spec(a.op).memory:
                at = e.start_s if effect.at == "start" else e.end_s
                amount = effect.sign * Fraction(costs.values(effect.field)[a.stage])
                live[at] = live.get(at, Fraction(0)) + amount
                if effect.field in ("residual_bytes", "w_residual_bytes", "offloadable_bytes"):
                    units[at] = units.get(at, Fraction(0)) + amount / share
    for since, until, stage in reference.waiting(rank) if costs.boundary_buffers else ():
        for at, sign in ((since, 1), (until, -1)):
            live[at] = live.get(at, Fraction(0)) + sign * Fraction(costs.boundary_bytes[stage])
    return _running(live), max(_running(units).values(), default=Fraction(0))


def _running(changes: dict[float, Fraction]) -> dict[float, Fraction]:
    total, levels = Fraction(0), {}
    for at in sorted(changes):
        total += changes[at]
        levels[at] = total
    return levels


@given(random_valid_schedules(offload=True, braids=True), st.data())
def test_agrees_with_the_reference(schedule: Schedule, data: st.DataObject) -> None:
    costs = data.draw(
        random_costs(schedule.num_stages, schedule.num_ranks).filter(
            lambda c: not c.host.groups or len(c.host.groups[0]) == 1
        )
    )
    timeline = simulate(schedule, costs)
    reference = Reference(schedule, costs)
    slots = {(e.rank, e.action): e for e in timeline.events if e.lane != "send"}
    assert len(slots) == sum(map(len, schedule.rows))
    for rank, row in enumerate(schedule.rows):
        for k, slot in enumerate(row):
            event = slots[rank, slot]
            assert (event.start_s, event.end_s) == (reference.start((rank, k)), reference.end((rank, k)))
    for rank in range(schedule.num_ranks):
        levels, peak = reference_memory(schedule, costs, timeline, rank, reference)
        curve = dict(zip(timeline.memory[rank].times_s, timeline.memory[rank].bytes, strict=True))
        for at in sorted(levels):
            before = [t for t in curve if t <= at]
            assert (curve[max(before)] if before else 0) == levels[at]
        assert timeline.peak_activations[rank] == pytest.approx(float(peak), rel=1e-12)


@given(random_valid_schedules(offload=True, braids=True), st.data())
def test_any_timeline_is_sound(schedule: Schedule, data: st.DataObject) -> None:
    """Lanes never overlap (those of a PCIe group included), memory ends at zero and is never negative, work is conserved."""
    costs = data.draw(random_costs(schedule.num_stages, schedule.num_ranks))
    timeline = simulate(schedule, costs)
    group_of = {r: k for k, group in enumerate(costs.host.groups) for r in group}
    lanes: dict[tuple[object, ...], list[tuple[float, float]]] = {}
    for e in timeline.events:
        if e.lane in ("d2h", "h2d"):
            key: tuple[object, ...] = (
                "host",
                group_of.get(e.rank, -1 - e.rank),
                e.lane if costs.host.mode == "duplex" else "",
            )
        else:
            key = (e.lane, e.rank) if e.lane == "compute" else ("send", e.rank, id(e))
        lanes.setdefault(key, []).append((e.start_s, e.end_s))
    for spans in lanes.values():
        spans.sort()
        assert all(a[1] <= b[0] for a, b in pairwise(spans))
    for rank, curve in enumerate(timeline.memory):
        assert not curve.bytes or curve.bytes[-1] == 0
        assert min(curve.bytes, default=0) >= 0
        starts = [e.start_s for e in timeline.of(rank)]
        assert starts == sorted(starts)
        work = sum(
            costs.seconds(op_spec(a.op).cost, a.stage)
            for a in schedule.actions(rank)
            if op_spec(a.op).lane == "compute"
        )
        assert timeline.compute_s[rank] == work


@given(random_valid_schedules(offload=True), st.data())
def test_renaming_ranks_changes_no_time(schedule: Schedule, data: st.DataObject) -> None:
    """Rank numbers are names: simulate a permuted schedule and map back."""
    names = data.draw(st.permutations(range(schedule.num_ranks)))
    placement = schedule.placement
    flows = tuple(tuple(tuple(names[r] for r in group) for group in flow) for flow in placement.flows)
    rows = [schedule.rows[names.index(r)] for r in range(schedule.num_ranks)]
    renamed = Schedule(
        "renamed",
        type(placement)("explicit", placement.num_ranks, flows, placement.edges),
        schedule.num_microbatches,
        tuple(rows),
    )
    costs = CostProfile.uniform(schedule.num_stages, comm=0.25, offload_time=1.0)
    old, new = simulate(schedule, costs), simulate(renamed, costs)
    assert [old.peak_activations[r] for r in range(schedule.num_ranks)] == [new.peak_activations[n] for n in names]
    assert {(names[e.rank], e.lane, e.action, e.start_s) for e in old.events} == {
        (e.rank, e.lane, e.action, e.start_s) for e in new.events
    }


def test_simulating_twice_gives_the_same_timeline() -> None:
    for placement in (one_to_one(3), with_shared(bidirectional(2), [1])):
        schedule = random_schedule(placement, 4, random.Random(1), offload=0.5)
        costs = CostProfile.uniform(placement.num_stages, comm=0.5, offload_time=1.0)
        assert simulate(schedule, costs) == simulate(schedule, costs)
