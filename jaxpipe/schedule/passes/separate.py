"""Gradient separation: each BW whose W would keep others waiting becomes B and, in a later bubble of its rank, W.

Source: FlexPipe (`flexpipe.txt`) section 5.2, "Bubble optimizations", which walks back from a bubble along what it waits for,
splits the backwards there, and stashes their W for the bubbles that follow. Here all are split at once, and W put where they
fit, in three steps that are repeated while they help:

1. *Fill*: everything but W keeps its order on its rank, and runs in order of time. A W runs where it fits into a bubble, or
   where its rank would otherwise become the idlest, or else run out of memory. Further passes know how many idle seconds the
   ranks had to spare. (The rule of :mod:`~jaxpipe.schedule.families.weight_filling`, on any dependency graph.)
2. *Fuse*: B and W become BW again, where B stands, as long as nothing takes longer: BW hides TP collectives that B exposes.
   All are tried at once, and by halves where that fails.
3. *Keep*: only what makes the makespan shorter, or the longest span, or splits less, and makes neither longer.

W's of a stage that the pass moves run in the order of their B's. Braids stay as they are, and their backwards too. Not
modelled in steps 1 and 2, and so judged in step 3 only: ranks that share their host lanes, and memory other than activations.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from graphlib import TopologicalSorter
from heapq import heappop, heappush
from itertools import chain, pairwise

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule.check import check_schedule
from jaxpipe.schedule.costs import CostProfile
from jaxpipe.schedule.deps import build_graph
from jaxpipe.schedule.ir import BW, Action, B, Schedule, Slot, W, op_spec
from jaxpipe.schedule.lanes import slot_lanes
from jaxpipe.schedule.memory import ACTIVATION_FIELDS, rank_share
from jaxpipe.schedule.passes.backwards import fused_backwards, with_fused
from jaxpipe.schedule.retime import nine_digits
from jaxpipe.schedule.simulate import simulate

_ROUNDING = 1e-9
_SLACK = 1 + _ROUNDING
_PASSES = 8
_NEVER = float("inf")
_Backward = tuple[int, int]
"""(stage, microbatch)."""


def separate_gradients(schedule: Schedule, costs: CostProfile, *, memory_limit: float = _NEVER) -> Schedule:
    """``schedule`` with B and W apart where that makes it shorter; the order of F, of backwards and of all but W stays.

    ``memory_limit``: peak activations that no rank may exceed, in units of one rank's share of a microbatch. A finite limit
    above what the schedule holds is used only where that makes it shorter; without a limit its own peak is the limit.
    Neither makespan nor longest span grow. The result of a result is itself.

    Raises:
        ScheduleError: the schedule is invalid, the costs are for another number of stages, or it holds more than the limit and
            moving W's does not mend that.
    """
    check_schedule(schedule)
    best, search = _Candidate(schedule, costs), _Search(schedule, costs, memory_limit)
    while (found := search.better(best)) is not best:
        best = found
    if not best.peak <= memory_limit * _SLACK:
        raise ScheduleError(
            f"schedule {schedule.name!r} holds {best.peak:g} activations on a rank, above the memory limit of {memory_limit:g}"
        )
    check_schedule(best.schedule)
    return best.schedule


class _Candidate:
    """A schedule, and what it is judged by."""

    def __init__(self, schedule: Schedule, costs: CostProfile) -> None:
        timeline = simulate(schedule, costs)
        self.schedule, self.peak = schedule, max(timeline.peak_activations, default=0.0)
        splits = sum(a.op == B.name for rank in range(schedule.num_ranks) for a in schedule.actions(rank))
        self.key = nine_digits(timeline.makespan), nine_digits(timeline.max_span), splits

    def no_longer_than(self, other: _Candidate) -> bool:
        return self.key[0] <= other.key[0] and self.key[1] <= other.key[1]


class _Search:
    """What filling makes of a schedule, by memory limit."""

    def __init__(self, schedule: Schedule, costs: CostProfile, memory_limit: float) -> None:
        slots = [(r, slot) for r, row in enumerate(schedule.rows) for slot in row]
        self.keep = frozenset(
            (a.stage, a.microbatch)
            for _, slot in slots
            if type(slot) is not Action
            for a in slot.actions
            if a.op == BW.name
        )
        self.costs, self.memory_limit = costs, memory_limit
        self.split = with_fused(schedule, self.keep)
        self.filled: dict[float, _Candidate] = {}

    def better(self, start: _Candidate) -> _Candidate:
        """``start``, or the best of what filling and fusing make of it."""
        low = min(start.peak, self.memory_limit)
        best = start
        for limit in (low, self.memory_limit) if low * _SLACK < self.memory_limit < _NEVER else (low,):
            if limit not in self.filled:
                self.filled[limit] = self._fused(_filled(self.split, self.costs, limit))
            found = [self.filled[limit]]
            if limit == low and start.key[2]:
                found.append(
                    self._fused(with_fused(start.schedule, self.keep), fused_backwards(start.schedule) - self.keep)
                )
            for x in found:
                shorter = x.key[:2] < best.key[:2] or best.peak > limit * _SLACK
                if (
                    x.peak <= limit * _SLACK
                    and x.no_longer_than(start)
                    and (shorter or limit == low and x.key < best.key)
                ):
                    best = x
        return best

    def _fused(self, split: Schedule, fused: frozenset[_Backward] = frozenset()) -> _Candidate:
        fusing = _Fusing(split, self.costs, fused)
        while fusing.take(
            [x for x in fusing.pairs if x not in fusing.fused and fusing._try(fusing.fused | {x}, keep=False)]
        ):
            pass
        return _Candidate(with_fused(split, self.keep | fusing.fused), self.costs)


class _Net:
    """A schedule as numbers: the dependency graph, with the order of every lane and link among what a node waits for.

    Nodes are slots, then transfers. Members of a joint computation wait for what any of them waits for.
    """

    def __init__(self, schedule: Schedule, costs: CostProfile) -> None:
        self.costs = costs
        graph = self.graph = build_graph(schedule)
        self.known: dict[object, float] = {}
        self.duration = [self.seconds(slot) for slot in graph.slots]
        self.duration += [costs.transfer_s(t.src, t.dst, t.stage) for t in graph.transfers]
        self.waits = [list(waits) for waits in graph.waits] + [[t.producer] for t in graph.transfers]
        self.queues = [
            [
                lanes["compute"],
                *(
                    [sorted(lanes["d2h"] + lanes["h2d"])]
                    if costs.host.mode == "shared"
                    else (lanes["d2h"], lanes["h2d"])
                ),
            ]
            for lanes in graph.lanes
        ]
        links: dict[tuple[int, int], list[int]] = {}
        for k in (k for n in sorted(graph.sends) for k in graph.sends[n]):
            links.setdefault((graph.transfers[k].src, graph.transfers[k].dst), []).append(len(graph.slots) + k)
        for queue in (*chain.from_iterable(self.queues), *links.values()):
            for one, two in pairwise(queue):
                self.waits[two].append(one)
        for joint in graph.joints:
            together = [x for n in joint for x in self.waits[n]]
            for n in joint:
                self.waits[n] = together
        self.after: list[list[int]] = [[] for _ in self.waits]
        for n, waits in enumerate(self.waits):
            for x in waits:
                self.after[x].append(n)

    def seconds(self, slot: Slot) -> float:
        key = tuple((a.op, a.stage) for a in slot.actions)
        if key not in self.known:
            self.known[key] = slot_lanes(self.costs, key).seconds
        return self.known[key]


def _filled(split: Schedule, costs: CostProfile, limit: float) -> Schedule:
    """``split`` with every W that is a slot of its own in the bubble where the rule puts it, within the limit if that works."""
    loose = {
        (r, slot) for r, row in enumerate(split.rows) for slot in row if type(slot) is Action and slot.op == W.name
    }
    rest = (tuple(slot for slot in row if (r, slot) not in loose) for r, row in enumerate(split.rows))
    filling = _Filling(_Net(replace(split, rows=tuple(rest)), costs), sorted(loose), limit)
    rows, idle = filling.run([0.0] * split.num_ranks)
    for _ in range(_PASSES):
        more, less = filling.run([max(idle) - x for x in idle])
        if max(less) + _ROUNDING * max(filling.work) >= max(idle):
            break
        rows, idle = more, less
    return replace(split, rows=rows)


class _Filling:
    """Bubbles of a schedule without the W's ``loose``, pairs of rank and action. One :meth:`run` per idea of who may idle."""

    def __init__(self, net: _Net, loose: Sequence[tuple[int, Slot]], limit: float) -> None:
        self.net, self.limit, graph = net, limit * _SLACK, net.graph
        self.known: dict[tuple[int, str, int, int], list[float]] = {}
        self.changes = [
            [sum(x) for x in zip(*(self._change(r, a) for a in slot.actions), strict=True)]
            for r, slot in zip(graph.rank_of, graph.slots, strict=True)
        ]
        stashed = {(r, w.actions[0].stage, w.actions[0].microbatch): w for r, w in loose}
        self.makes = [
            [w for a in slot.actions if a.op == B.name and (w := stashed.get((r, a.stage, a.microbatch)))]
            for r, slot in zip(graph.rank_of, graph.slots, strict=True)
        ]
        self.work = [sum(net.duration[n] for n in queues[0]) for queues in net.queues]
        for r, w in loose:
            self.work[r] += net.seconds(w)

    def _change(self, rank: int, action: Action) -> list[float]:
        """Activations that an action takes (or gives back: below 0) at its start and at its end."""
        placement, costs = self.net.graph.schedule.placement, self.net.costs
        key = rank, action.op, action.stage, action.microbatch % placement.num_flows
        if key not in self.known:
            share = rank_share(placement, costs, rank, key[3])
            effects = [e for e in op_spec(action.op).memory if share > 0 and e.field in ACTIVATION_FIELDS]
            self.known[key] = [
                sum(e.sign * costs.values(e.field)[action.stage] / share for e in effects if e.at == at)
                for at in ("start", "end")
            ]
        return self.known[key]

    def run(self, spare: Sequence[float]) -> tuple[tuple[tuple[Slot, ...], ...], list[float]]:
        """Rows with W, and the seconds that each rank idled, less what it works less than the rank with most work. A rank idles
        rather than run a W too long for its bubble while it has idled no more than the idlest rank, or than ``spare`` says."""
        net, graph, count, p = self.net, self.net.graph, len(self.net.graph.slots), len(spare)
        idle, most = [x - max(self.work) for x in self.work], 0.0
        free, last, level = [0.0] * p, [-1] * p, [0.0] * p
        changes: list[list[tuple[float, float]]] = [[] for _ in range(p)]
        stash: list[deque[Slot]] = [deque() for _ in range(p)]
        before: list[list[Slot]] = [[] for _ in graph.slots]
        ready, missing = [0.0] * len(net.waits), list(map(len, net.waits))
        heap = [(0.0, n) for n, waits in enumerate(net.waits) if not waits]

        def run_w() -> None:
            w = stash[r].popleft()
            before[n].append(w)
            free[r] += net.seconds(w)
            heappush(changes[r], (free[r], self._change(r, w.actions[0])[1]))

        while heap:
            begin, n = heappop(heap)
            if n < count:
                r, (taken, left) = graph.rank_of[n], self.changes[n]
                computes = op_spec(graph.slots[n].actions[0].op).lane == "compute"
                if last[r] < 0:
                    free[r] = begin
                while taken > 0 and stash[r] and last[r] < n:
                    while changes[r] and changes[r][0][0] <= max(begin, free[r]):
                        level[r] += heappop(changes[r])[1]
                    if level[r] + taken <= self.limit:
                        break
                    run_w()
                if computes:
                    tiny = _ROUNDING * begin
                    while stash[r] and (gap := begin - free[r]) > tiny:
                        idles = n in graph.joint_of or gap <= max(most, spare[r]) - idle[r] + tiny
                        if idles and net.seconds(stash[r][0]) > gap + tiny:
                            break
                        run_w()
                    idle[r] += max(0.0, begin - free[r])
                    most = max(most, idle[r])
                if last[r] < n:
                    begin = max(begin, free[r])
                if computes:
                    free[r], last[r] = begin + net.duration[n], n
                    stash[r] += self.makes[n]
                heappush(changes[r], (begin, taken))
                heappush(changes[r], (begin + net.duration[n], left))
            for x in net.after[n]:
                ready[x] = max(ready[x], begin + net.duration[n])
                missing[x] -= 1
                if not missing[x]:
                    heappush(heap, (ready[x], x))
        rows = (
            [x for n, slot in enumerate(row, graph.row_start[r]) for x in (*before[n], slot)]
            for r, row in enumerate(graph.schedule.rows)
        )
        return tuple((*row, *left) for row, left in zip(rows, stash, strict=True)), idle


class _Fusing:
    """The backwards of a split schedule that become BW. ``fused``: those taken so far."""

    def __init__(self, schedule: Schedule, costs: CostProfile, fused: frozenset[_Backward]) -> None:
        net = self.net = _Net(schedule, costs)
        self.order = tuple(TopologicalSorter(dict(enumerate(net.waits))).static_order())
        self.place = {n: at for at, n in enumerate(self.order)}
        alone: dict[str, dict[_Backward, list[int]]] = {B.name: {}, W.name: {}}
        self.earlier: dict[int, tuple[_Backward, int]] = {}
        done: dict[tuple[int, int], tuple[_Backward, int]] = {}
        for n, (r, slot) in enumerate(zip(net.graph.rank_of, net.graph.slots, strict=True)):
            for a in slot.actions:
                if type(slot) is Action and a.op in alone:
                    alone[a.op].setdefault((a.stage, a.microbatch), []).append(n)
                if W.name in op_spec(a.op).performs():
                    if (r, a.stage) in done:
                        self.earlier[n] = done[r, a.stage]
                    done[r, a.stage] = (a.stage, a.microbatch), n
        self.pairs = {
            k: (bs, ws)
            for k, bs in alone[B.name].items()
            if len(bs) == len(ws := alone[W.name].get(k, [])) == len(schedule.placement.ranks(*k))
        }
        self.fused: frozenset[_Backward] = frozenset()
        self.duration, self.end, self.latest = net.duration, [0.0] * len(self.order), [_NEVER] * len(self.order)
        self._try(fused, self.order)

    def take(self, pairs: Sequence[_Backward]) -> bool:
        """Fuse all of ``pairs`` whose W's stay in order, or those halves, quarters, … with which nothing takes longer."""
        fused = set(self.fused)
        for k in pairs:
            earlier = [(b, self.earlier.get(w)) for b, w in zip(*self.pairs[k], strict=True)]
            if all(x is None or x[0] in fused or x[1] < b for b, x in earlier):
                fused.add(k)
        if len(fused) == len(self.fused):
            return False
        if self._try(frozenset(fused)):
            return True
        middle = len(pairs) // 2
        return len(pairs) > 1 and any([self.take(pairs[:middle]), self.take(pairs[middle:])])

    def _try(self, fused: frozenset[_Backward], changed: Sequence[int] = (), keep: bool = True) -> bool:
        """Fuse these if nothing then ends too late. Only what moves is looked at."""
        duration, end, until = self.duration.copy(), self.end.copy(), -1
        pairs = [(k, self.pairs[k]) for k in fused - self.fused]
        for k, (bs, ws) in pairs:
            for b, w in zip(bs, ws, strict=True):
                duration[b], duration[w] = self.net.seconds(Action(BW.name, *k)), 0.0
                until = max(until, self.place[w])
        heap = sorted({self.place[n] for n in (*changed, *(n for _, x in pairs for n in chain(*x)))})
        queued = set(heap)
        while heap:
            at = heappop(heap)
            n = self.order[at]
            now = 0.0
            for x in self.net.waits[n]:
                if end[x] > now:
                    now = end[x]
            now += duration[n]
            if now == end[n]:
                continue
            if at > until and now > self.latest[n]:
                return False
            end[n] = now
            for x in self.net.after[n]:
                if self.place[x] not in queued:
                    queued.add(self.place[x])
                    heappush(heap, self.place[x])
        lasts = [n for queues in self.net.queues for queue in queues for n in queue[-1:]]
        if any(end[n] > self.latest[n] for n in lasts):
            return False
        if not keep:
            return True
        self.fused, self.duration, self.end = fused, duration, end
        first = [end[q[0]] - duration[q[0]] if q else _NEVER for q, *_ in self.net.queues]
        ends = [max((end[n] for queue in queues for n in queue[-1:]), default=-_NEVER) for queues in self.net.queues]
        makespan, span = max(ends), max(b - a for a, b in zip(first, ends, strict=True))
        self.latest = [_NEVER] * len(end)
        for a, queues in zip(first, self.net.queues, strict=True):
            for n in (n for queue in queues for n in queue[-1:]):
                self.latest[n] = min(makespan, a + span) * _SLACK
        for n in reversed(self.order):
            for x in self.net.after[n]:
                self.latest[n] = min(self.latest[n], self.latest[x] - duration[x])
        return True
