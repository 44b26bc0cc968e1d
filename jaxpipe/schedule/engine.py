"""Runs a dependency graph: every lane advances as far as it can, and what is left over is deadlocked.

One loop serves the checker (do the rows ever finish?), the simulator (when?) and replay (when, with given durations?), so
that they can't disagree. Semantics are those of :file:`jaxpipe/README.md`:

* A lane is a queue in row order: one compute lane per rank; host lanes per rank and direction, one for both directions
  where the host link is ``shared``; a lane for what goes over the network once a step (R, G), or their place in the compute
  lane where it has no lane of its own.
* A slot starts when its lane is free and all it waits for has ended; slots that are joined start together.
* A host copy also waits until the compute slot that stands before it in its row has ended, whatever that slot computes
  (``deps.link``): that is how a row says when a copy may begin.
* A transfer starts when its producer has ended and the directed pair of ranks is free, in issue order. It occupies the pair
  for what its bytes take; the latency of the link comes after that and delays its arrival alone.
* Ranks of one PCIe group share their host lanes, first come first served; ties go to the lower rank.

Inside one slot there are two lanes, the rank's compute and the tensor-parallel (TP) collectives that its functions wait for
(`stp.txt` section 3). F and B of a stage with n collectives are n pairs (compute, collective), one after another: n equal
units of compute, each collective waits for the unit before it and the next unit for the collective. W is n units without
collectives; as part of BW, unit k of W may run once unit k of B has. Alone, F and B leave every collective exposed, and BW
hides those of B under W as far as W is long enough (Figure 3a). In a braided slot the units of all actions share one
compute lane and one collective lane, so each collective has the others' compute under it.

The order inside a braid is made by list scheduling: whichever chain is ready runs its next unit, W fills what would be a wait.
Nine rules (which chain first, how far W may reach beyond the wait) and the actions one after another are timed; the shortest
counts, and ties go to the first. It depends on seconds and counts only, so the same slot always takes the same time. Of 2,309
random slots of up to three collectives a strand, one was longer than the exhaustive optimum, by 1.3% (a test repeats that). A
braid of actions without collectives takes the sum of its actions, exactly.

Not modelled: that compute slows down while a collective runs beside it (`stp.txt` appendix F: 7.5% for a long GEMM).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule.costs import CostProfile, HostLink
from jaxpipe.schedule.deps import DependencyGraph
from jaxpipe.schedule.ir import HOST_LANES, op_spec
from jaxpipe.schedule.timeline import TIME, at_most


@dataclass(frozen=True, slots=True)
class EngineRun:
    """``start_s[n]`` and ``end_s[n]`` of slot n, then of the transfers; both are None for what never ran.

    ``blocked``: per rank and lane that did not finish, the slot at its head.
    """

    start_s: list[float | None]
    end_s: list[float | None]
    blocked: tuple[int, ...]


class Passage(NamedTuple):
    """Seconds of a transfer: until it has arrived, and until the next one of its pair of ranks may start."""

    seconds: float
    occupied_s: float


AT_ONCE = Passage(0.0, 0.0)


def run_graph(
    graph: DependencyGraph,
    duration_s: Sequence[float],
    passages: Sequence[Passage],
    host: HostLink,
    net_overlaps: bool = True,
) -> EngineRun:
    """Start every slot as early as its row, lanes and waits allow.

    ``duration_s[n]``: seconds of slot n. ``passages[k]``: of ``graph.transfers[k]``. ``net_overlaps``: as in the costs.

    Raises:
        ScheduleError: a PCIe group of ``host`` names a rank that does not exist, or a rank twice.
    """
    engine = _Engine(graph, duration_s, passages, host, net_overlaps)
    engine.run()
    return EngineRun(engine.start, engine.end, engine.blocked())


def host_groups(host: HostLink, num_ranks: int) -> dict[int, int]:
    """Return rank -> index of its PCIe group, for ranks in a group of two or more.

    Raises:
        ScheduleError: a group names a rank outside the schedule, or a rank is named twice.
    """
    group_of: dict[int, int] = {}
    for k, group in enumerate(host.groups):
        for rank in group:
            if not 0 <= rank < num_ranks:
                raise ScheduleError(
                    f"PCIe group {k} names rank {rank}, but ranks are 0..{num_ranks - 1}; mend host.groups"
                )
            if rank in group_of:
                raise ScheduleError(f"rank {rank} is named twice in the PCIe groups; a rank has one host link")
            group_of[rank] = k
    return {rank: k for rank, k in group_of.items() if len(host.groups[k]) > 1}


class _Engine:
    """Queues are lanes of one rank; a queue is woken when the number it waits for ends."""

    def __init__(
        self,
        graph: DependencyGraph,
        duration_s: Sequence[float],
        passages: Sequence[Passage],
        host: HostLink,
        net_overlaps: bool,
    ) -> None:
        self.graph = graph
        self.duration = duration_s
        self.passages = passages
        total = len(graph.slots) + len(graph.transfers)
        self.start: list[float | None] = [None] * total
        self.end: list[float | None] = [None] * total
        self.queues: list[list[int]] = []
        self.shared_lane: dict[int, tuple[int, str]] = {}
        self._make_queues(host, net_overlaps)
        self.head = [0] * len(self.queues)
        self.free = [0.0] * len(self.queues)
        self.waiters: dict[int, list[int]] = {}
        self.stack = list(range(len(self.queues)))
        self.pair_free: dict[tuple[int, int], float] = {}
        self.arrived: dict[int, list[tuple[int, float]]] = {}
        self.requests: dict[tuple[int, str], list[tuple[float, int, int, int]]] = {}
        self.lane_free: dict[tuple[int, str], float] = {}

    def _make_queues(self, host: HostLink, net_overlaps: bool) -> None:
        groups = host_groups(host, self.graph.schedule.num_ranks)
        for rank, lanes in enumerate(self.graph.lanes):
            if net_overlaps:
                split = [("compute", lanes["compute"]), ("net", lanes["net"])]
            else:
                split = [("compute", sorted(lanes["compute"] + lanes["net"]))]
            if host.mode == "shared":
                # one lane for both directions runs O and L in the order of the row
                split.append(("host", sorted(n for lane in HOST_LANES for n in lanes[lane])))
            else:
                split += [(lane, lanes[lane]) for lane in HOST_LANES]
            for lane, slots in split:
                if not slots:
                    continue
                if lane not in ("compute", "net") and rank in groups:
                    self.shared_lane[len(self.queues)] = (groups[rank], lane)
                self.queues.append(slots)

    def run(self) -> None:
        while True:
            while self.stack:
                self._advance(self.stack.pop())
            # only when every queue is blocked is the earliest request of a shared lane sure
            if not self._grant():
                return

    def blocked(self) -> tuple[int, ...]:
        return tuple(queue[k] for queue, k in zip(self.queues, self.head, strict=True) if k < len(queue))

    def _advance(self, q: int) -> None:
        """Run queue ``q`` until it is empty or its head has to wait."""
        queue, head, free = self.queues[q], self.head[q], self.free[q]
        waits, joint_of, sends = self.graph.waits, self.graph.joint_of, self.graph.sends
        start, end, duration, waiters = self.start, self.end, self.duration, self.waiters
        # lanes that ranks share are granted in order of time, not as they are come upon
        special = q in self.shared_lane
        while head < len(queue):
            slot = queue[head]
            ready = free
            for dep in waits[slot]:
                ended = end[dep]
                if ended is None:
                    # woken when ``dep`` ends; all waits of the slot are looked at again then
                    waiters.setdefault(dep, []).append(q)
                    break
                if ended > ready:
                    ready = ended
            else:
                if special or slot in joint_of:
                    self.head[q], self.free[q] = head, free
                    self._park(q, slot, ready)
                    return
                start[slot] = ready
                free = end[slot] = ready + duration[slot]
                head += 1
                if slot in sends:
                    self._send(slot, free)
                if slot in waiters:
                    self.stack += waiters.pop(slot)
                continue
            break
        self.head[q], self.free[q] = head, free

    def _send(self, slot: int, ended: float) -> None:
        first = len(self.graph.slots)
        for k in self.graph.sends[slot]:
            transfer = self.graph.transfers[k]
            pair = (transfer.src, transfer.dst)
            # a pair of ranks moves what it is given in order of issue; only occupied time excludes the next
            begin = max(ended, self.pair_free.get(pair, 0.0))
            self.start[first + k] = begin
            seconds, occupied_s = self.passages[k]
            self.end[first + k], self.pair_free[pair] = begin + seconds, begin + occupied_s
            if first + k in self.waiters:
                self.stack += self.waiters.pop(first + k)

    def _park(self, q: int, slot: int, ready: float) -> None:
        """Hold a slot whose own waits are over until its group arrives or its shared lane is granted."""
        lane = self.shared_lane.get(q)
        if lane is not None:
            heapq.heappush(self.requests.setdefault(lane, []), (ready, self.graph.rank_of[slot], slot, q))
            return
        joint = self.graph.joint_of[slot]
        arrivals = self.arrived.setdefault(joint, [])
        arrivals.append((q, ready))
        # the last to arrive says when all start
        if len(arrivals) == len(self.graph.joints[joint]):
            start = max(at for _, at in arrivals)
            for member, _ in arrivals:
                self._finish(member, start)

    def _finish(self, q: int, begin: float) -> None:
        """Run the parked head of ``q`` at ``begin`` and let the queue go on."""
        slot = self.queues[q][self.head[q]]
        self.start[slot] = begin
        ended = self.end[slot] = self.free[q] = begin + self.duration[slot]
        self.head[q] += 1
        if slot in self.graph.sends:
            self._send(slot, ended)
        self.stack += self.waiters.pop(slot, ())
        self.stack.append(q)

    def _grant(self) -> bool:
        """Give the shared lane that can start earliest to its first comer; False when nobody asks.

        Every slot not yet known to be ready depends on a slot that has not started, so it can't come before the earliest
        start among the requests: granting that one is final.
        """
        best: tuple[float, float, int, tuple[int, str]] | None = None
        for lane, queue in self.requests.items():
            if queue:
                ready, rank = queue[0][:2]
                candidate = (max(ready, self.lane_free.get(lane, 0.0)), ready, rank, lane)
                best = candidate if best is None else min(best, candidate)
        if best is None:
            return False
        begin, _, _, lane = best
        _, _, slot, q = heapq.heappop(self.requests[lane])
        self.lane_free[lane] = begin + self.duration[slot]
        self._finish(q, begin)
        return True


_RULES = tuple(product(("longest", "first", "last"), (0.0, 0.5, 1.0)))


@dataclass(frozen=True, slots=True)
class Strand:
    """One action on the two lanes: ``units`` pairs of compute and collective, then as many units that wait for no collective.

    ``chain_s``: compute between the collectives, in all. ``collective_s``: the collectives, in all. ``filler_s``: compute that
    no collective waits for, in all; its unit k may run once unit k of the chain has (at once without a chain).
    """

    chain_s: float
    collective_s: float
    filler_s: float
    units: int

    @property
    def compute_s(self) -> float:
        return self.chain_s + self.filler_s


@dataclass(frozen=True, slots=True)
class Woven:
    """A slot on its two lanes. ``seconds``: until all has ended. ``compute_s``: its compute alone.

    ``collectives``: when the collective lane is busy, from the slot's start on; adjoining intervals are merged.
    """

    seconds: float
    compute_s: float
    collectives: tuple[tuple[float, float], ...] = ()

    @property
    def exposed_s(self) -> float:
        """Return the seconds in which the compute lane waits for a collective."""
        return max(0.0, self.seconds - self.compute_s)


def strand(costs: CostProfile, op: str, stage: int) -> Strand:
    """Return the action ``op`` of ``stage`` as a strand.

    An op whose spec names a ``collective`` cost is a chain. One with several parts (BW) has the chain of the part that does;
    the rest of its compute is filler.
    """
    spec = op_spec(op)
    seconds = costs.seconds(spec.cost, stage)
    units = costs.collectives[stage] if not spec.is_sync else 1
    part = next((x for x in (spec, *map(op_spec, spec.parts)) if x.collective), None)
    if part is None:
        return Strand(0.0, 0.0, seconds, units)
    chain_s = seconds if part is spec else min(seconds, costs.seconds(part.cost, stage))
    return Strand(chain_s, costs.seconds(part.collective, stage), seconds - chain_s, units)


def slot_lanes(costs: CostProfile, actions: Sequence[tuple[str, int]]) -> Woven:
    """Return the lanes of a slot that holds ``actions``, pairs of op and stage.

    Raises:
        ScheduleError: the costs lack what an op takes.
    """
    seconds = [costs.seconds(op_spec(op).cost, stage) for op, stage in actions]
    if not any(costs.f_comm_s[stage] or costs.b_comm_s[stage] for _, stage in actions):
        return Woven(total := sum(seconds), total)
    return weave([strand(costs, op, stage) for op, stage in actions], seconds)


def collectives_exposed(costs: CostProfile) -> CostProfile:
    """Return ``costs`` with every TP collective as part of the action that waits for it: F = f + T_AR, B = b + T_AR, and BW
    what it takes alone, where W hides B's collectives as far as it is long enough.

    A schedule without braids takes as long under both; generators and the solver, which make no braids, work on this form.
    """
    if not costs.has_collectives:
        return costs

    def alone(op: str) -> tuple[float, ...]:
        return tuple(slot_lanes(costs, [(op, s)]).seconds for s in range(costs.num_stages))

    exposed = {op_spec(op).cost: alone(op) for op in ("F", "B", "W", "BW")}
    return replace(costs, **exposed, f_comm_s=(), b_comm_s=(), collectives=())  # type: ignore[arg-type]


def weave(strands: Sequence[Strand], seconds: Sequence[float] | None = None) -> Woven:
    """Return the strands of a slot in the shortest of the orders described above. ``seconds``: compute of each, if known
    exactly."""
    return _shortest(tuple(strands), sum(seconds if seconds is not None else (x.compute_s for x in strands)))


@lru_cache(maxsize=4096)  # a search times many orders of the same few slots
def _shortest(strands: tuple[Strand, ...], compute_s: float) -> Woven:
    if not any(x.collective_s for x in strands):
        return Woven(compute_s, compute_s)
    best = _in_turn(strands, compute_s)
    for first, reach in _RULES if len(strands) > 1 else ():
        candidate = _Lanes(strands, first, reach).run(compute_s)
        # of orders that are equal but for rounding, the first
        if not at_most(best.seconds, candidate.seconds):
            best = candidate
    return best


def _alone(x: Strand) -> Woven:
    unit, collective = x.chain_s / x.units, x.collective_s / x.units
    busy = [(k * (unit + collective) + unit, (k + 1) * (unit + collective)) for k in range(x.units)]
    return Woven(x.chain_s + x.collective_s, x.chain_s, merged(busy))


def _in_turn(strands: Sequence[Strand], compute_s: float) -> Woven:
    """Run unit by unit in the order of ``strands``, no strand beginning before the one before it has ended."""
    busy: list[tuple[float, float]] = []
    now = 0.0
    for x in strands:
        done = _Lanes([x], "first", 1.0).run(x.compute_s) if x.filler_s or not x.collective_s else _alone(x)
        busy += [(now + a, now + b) for a, b in done.collectives]
        now += done.seconds
    return Woven(now, compute_s, merged(busy))


class _Lanes:
    """List scheduling over the units of all strands."""

    def __init__(self, strands: Sequence[Strand], first: str, reach: float) -> None:
        self.strands, self.first, self.reach = strands, first, reach
        self.next = [0 if x.chain_s or x.collective_s else x.units for x in strands]
        self.ready = [0.0] * len(strands)
        self.pool = [unit for x, k in zip(strands, self.next, strict=True) if k for unit in _fillers(x) * x.units]
        self.now = self.lane_free = 0.0
        self.busy: list[tuple[float, float]] = []

    def run(self, compute_s: float) -> Woven:
        while waiting := [k for k, x in enumerate(self.strands) if self.next[k] < x.units]:
            soonest = min(self.ready[k] for k in waiting)
            able = [k for k in waiting if at_most(self.ready[k], self.now)]
            if able:
                self._unit(max(able, key=self._preference))
            # filler runs where it delays the next unit by no more than ``reach`` of its own length
            elif self.pool and self.now + self.pool[0] <= soonest * (1 + TIME) + self.reach * self.pool[0]:
                self.now += self.pool.pop(0)
            else:
                self.now = soonest
        # filler that is left runs beside the last collective
        return Woven(max(self.now + sum(self.pool), self.lane_free), compute_s, merged(self.busy))

    def _preference(self, k: int) -> tuple[float, int]:
        x = self.strands[k]
        left = (x.chain_s + x.collective_s) * (x.units - self.next[k]) / x.units
        return (left if self.first == "longest" else 0.0, k if self.first == "last" else -k)

    def _unit(self, k: int) -> None:
        x = self.strands[k]
        self.now += x.chain_s / x.units
        begin = max(self.now, self.lane_free)
        self.ready[k] = self.lane_free = begin + x.collective_s / x.units
        if x.collective_s:
            self.busy.append((begin, self.lane_free))
        self.next[k] += 1
        self.pool += _fillers(x)


def _fillers(x: Strand) -> list[float]:
    """Return the filler that one unit sets free."""
    return [x.filler_s / x.units] if x.filler_s else []


def merged(busy: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Return intervals in the order of their beginnings, those that overlap or adjoin as one."""
    intervals: list[tuple[float, float]] = []
    for begin, end in busy:
        if intervals and at_most(begin, intervals[-1][1]):
            intervals[-1] = intervals[-1][0], max(end, intervals[-1][1])
        else:
            intervals.append((begin, end))
    return tuple(intervals)
