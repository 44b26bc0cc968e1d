"""Runs a dependency graph: every lane advances as far as it can, and what is left over is deadlocked.

One loop serves the checker (do the rows ever finish?), the simulator (when?) and replay (when, with given durations?), so
that they can't disagree. Semantics are those of :file:`jaxpipe/README.md`:

* A lane is a queue in row order: one compute lane per rank; host lanes per rank and direction, one for both directions
  where the host link is ``shared``.
* A slot starts when its lane is free and all it waits for has ended; slots that are joined start together.
* A host copy also waits until the compute slot that stands before it in its row has ended, whatever that slot computes
  (``deps.link``): that is how a row says when a copy may begin.
* A transfer starts when its producer has ended and the directed pair of ranks is free, in issue order. It occupies the pair
  for what its bytes take; the latency of the link comes after that and delays its arrival alone.
* Ranks of one PCIe group share their host lanes, first come first served; ties go to the lower rank.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule.costs import HostLink
from jaxpipe.schedule.deps import HOST_LANES, DependencyGraph


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
    graph: DependencyGraph, duration_s: Sequence[float], passages: Sequence[Passage], host: HostLink
) -> EngineRun:
    """Start every slot as early as its row, lanes and waits allow.

    ``duration_s[n]``: seconds of slot n. ``passages[k]``: of ``graph.transfers[k]``.

    Raises:
        ScheduleError: a PCIe group of ``host`` names a rank that does not exist, or a rank twice.
    """
    engine = _Engine(graph, duration_s, passages, host)
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
        self, graph: DependencyGraph, duration_s: Sequence[float], passages: Sequence[Passage], host: HostLink
    ) -> None:
        self.graph = graph
        self.duration = duration_s
        self.passages = passages
        total = len(graph.slots) + len(graph.transfers)
        self.start: list[float | None] = [None] * total
        self.end: list[float | None] = [None] * total
        self.queues: list[list[int]] = []
        self.shared_lane: dict[int, tuple[int, str]] = {}
        self._make_queues(host)
        self.head = [0] * len(self.queues)
        self.free = [0.0] * len(self.queues)
        self.waiters: dict[int, list[int]] = {}
        self.stack = list(range(len(self.queues)))
        self.pair_free: dict[tuple[int, int], float] = {}
        self.arrived: dict[int, list[tuple[int, float]]] = {}
        self.requests: dict[tuple[int, str], list[tuple[float, int, int, int]]] = {}
        self.lane_free: dict[tuple[int, str], float] = {}

    def _make_queues(self, host: HostLink) -> None:
        groups = host_groups(host, self.graph.schedule.num_ranks)
        for rank, lanes in enumerate(self.graph.lanes):
            split = [("compute", lanes["compute"])]
            if host.mode == "shared":
                # one lane for both directions runs O and L in the order of the row
                split.append(("host", sorted(n for lane in HOST_LANES for n in lanes[lane])))
            else:
                split += [(lane, lanes[lane]) for lane in HOST_LANES]
            for lane, slots in split:
                if not slots:
                    continue
                if lane != "compute" and rank in groups:
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
