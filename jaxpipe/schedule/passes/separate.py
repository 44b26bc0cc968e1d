"""Gradient separation: each BW whose W would keep others waiting becomes B and, in a later bubble of its rank, W.

Source: FlexPipe (`flexpipe.txt`) section 5.2, "Bubble optimizations", which walks back from a bubble along what it waits for,
splits the backwards there, and stashes their W for the bubbles that follow. Here all are split at once, and what did not help
is fused again:

1. *Fill*: everything but W keeps its order on its rank, and runs in order of time. A W runs where it fits into a bubble, or
   where its rank would otherwise become the idlest, or run out of memory. Further passes know how many idle seconds the ranks
   had to spare. (The rule of *even* filling, Qi et al. 2023, section 3.1, on any dependency graph.)
2. *Fuse*: B and W become BW again, where B stands, as long as nothing takes longer: BW hides collectives that B exposes.
3. *Keep* what makes the makespan shorter, then the longest span, then the number of splits, and makes neither time longer.
   Repeat while something does.

W's of a stage that are moved run in the order of their B's. Braids stay as they are. Steps 1 and 2 don't know of ranks that
share a host link, and step 1 of the time that an O needs; what they make is judged by the simulator.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from graphlib import TopologicalSorter
from heapq import heappop, heappush
from itertools import chain, pairwise

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule.check import check_schedule
from jaxpipe.schedule.costs import CostProfile
from jaxpipe.schedule.deps import build_graph
from jaxpipe.schedule.engine import slot_lanes
from jaxpipe.schedule.ir import BW, Action, B, Row, Schedule, Slot, W, op_spec
from jaxpipe.schedule.memory import UNIT, slot_units
from jaxpipe.schedule.passes.braid import fused_backwards, with_fused
from jaxpipe.schedule.passes.reductions import with_reductions_of, without_reductions
from jaxpipe.schedule.simulate import simulate
from jaxpipe.schedule.timeline import MEMORY, TIME, at_most, nine_digits

_PASSES = 8
_NEVER = float("inf")
_Backward = tuple[int, int]
"""(stage, microbatch)."""


def separate_gradients(schedule: Schedule, costs: CostProfile, *, memory_limit: float = _NEVER) -> Schedule:
    """Return ``schedule`` with B and W apart where that makes it shorter; on each rank the order of all but W stays.

    ``memory_limit``: peak activations that no rank may exceed, in units of one rank's share of a microbatch. More than the
    schedule's own peak is used only where that makes it shorter, and without a limit never. Neither makespan nor longest span
    grows. The result of a result is itself.

    Raises:
        ScheduleError: the schedule is invalid, the costs are for another number of stages, or it holds more than the limit and
            moving W's does not mend that.
    """
    check_schedule(schedule)
    like, schedule = schedule, without_reductions(schedule)
    slots = chain.from_iterable(schedule.rows)
    keep = frozenset(
        (a.stage, a.microbatch) for x in slots if type(x) is not Action for a in x.actions if a.op == BW.name
    )
    start = _Candidate(schedule, costs)

    @cache
    def filled(limit: float) -> _Candidate:
        return _Candidate(_fused(_filled(with_fused(schedule, keep), costs, limit), costs, keep), costs)

    while True:
        low = min(start.peak, memory_limit)
        tried = [(low, start), (low, _Candidate(_fused(start.schedule, costs, keep), costs)), (low, filled(low))]
        if low < memory_limit < _NEVER:
            tried.append((memory_limit, filled(memory_limit)))
        # the shortest, then the lowest limit, then the fewest B's apart
        fit = [(*x.times, limit, x.splits, k) for k, (limit, x) in enumerate(tried) if x.fits(limit, start)]
        if not fit:
            raise ScheduleError(
                f"separate gradients: {schedule.name} holds {start.peak:g} activations on a rank, limit {memory_limit:g}"
            )
        best = tried[min(fit)[-1]][1]
        if best is start:
            check_schedule(best.schedule)
            return with_reductions_of(best.schedule, like)
        start = best


class _Candidate:
    """A schedule, and what it is judged by. ``times``: makespan and longest span."""

    def __init__(self, schedule: Schedule, costs: CostProfile) -> None:
        timeline = simulate(schedule, costs)
        self.schedule, self.peak = schedule, max(timeline.peak_activations, default=0.0)
        self.times = nine_digits(timeline.makespan), nine_digits(timeline.max_span)
        self.splits = sum(a.op == B.name for a in schedule.actions())

    def fits(self, limit: float, start: _Candidate) -> bool:
        """Return whether it keeps the limit and takes no longer than ``start``."""
        return at_most(self.peak, limit) and all(a <= b for a, b in zip(self.times, start.times, strict=True))


class _Net:
    """A schedule as numbers: the dependency graph, with the order of every lane and link among what a node waits for.

    Nodes are slots, then the latencies of transfers, for which those wait that receive them, then the times in which transfers
    occupy their links. Members of a joint computation wait for what any of them waits for.
    """

    def __init__(self, schedule: Schedule, costs: CostProfile) -> None:
        graph = self.graph = build_graph(schedule)
        self.seconds = cache(lambda *actions: slot_lanes(costs, actions).seconds)
        self.duration = [self.seconds(*((a.op, a.stage) for a in slot.actions)) for slot in graph.slots]
        occupied_s = [t.occupied_s(costs) for t in graph.transfers]
        self.duration += [t.seconds(costs) - x for t, x in zip(graph.transfers, occupied_s, strict=True)]
        leaves = len(self.duration)
        self.duration += occupied_s
        self.queues = [list(lanes.values()) for lanes in graph.lanes]
        if costs.host.mode == "shared":
            self.queues = [[compute, sorted(chain(*host))] for compute, *host in self.queues]
        links: dict[tuple[int, int], list[int]] = {}
        for k in chain.from_iterable(graph.sends[n] for n in sorted(graph.sends)):
            links.setdefault((graph.transfers[k].src, graph.transfers[k].dst), []).append(leaves + k)
        self.waits = [*map(list, graph.waits), *([n] for n in range(leaves, len(self.duration)))]
        self.waits += [[t.producer] for t in graph.transfers]
        for queue in (*chain(*self.queues), *links.values()):
            for one, two in pairwise(queue):
                self.waits[two].append(one)
        for joint in graph.joints:
            group_waits = [x for n in joint for x in self.waits[n]]
            for n in joint:
                self.waits[n] = group_waits
        self.after: list[list[int]] = [[] for _ in self.waits]
        for n, waits in enumerate(self.waits):
            for x in waits:
                self.after[x].append(n)


def _filled(split: Schedule, costs: CostProfile, limit: float) -> Schedule:
    """Return ``split`` with every W that is a slot of its own where the rule puts it, within the limit if that works."""
    loose = [[x for x in row if type(x) is Action and x.op == W.name] for row in split.rows]
    rest = (tuple(x for x in row if x not in set(ws)) for row, ws in zip(split.rows, loose, strict=True))
    filling = _Filling(replace(split, rows=tuple(rest)), costs, [sorted(ws) for ws in loose], limit)
    rows, idle = filling.run([0.0] * split.num_ranks)
    # each pass lets a rank idle by what it idled less than the idlest rank of the pass before
    for _ in range(_PASSES):
        next_rows, less = filling.run([max(idle) - x for x in idle])
        if max(less) + TIME * max(filling.work) >= max(idle):
            break
        rows, idle = next_rows, less
    return replace(split, rows=rows)


class _Filling:
    """A schedule without the W's ``loose``, rank by rank. :meth:`run` puts them into its bubbles."""

    def __init__(self, schedule: Schedule, costs: CostProfile, loose: Sequence[Sequence[Action]], limit: float) -> None:
        net = self.net = _Net(schedule, costs)
        self.limit, self.loose = limit * (1 + MEMORY) * UNIT, [set(ws) for ws in loose]
        self.change = slot_units(schedule.placement, costs)
        self.work = [
            sum(net.duration[n] for n in queues[0]) + sum(net.seconds((w.op, w.stage)) for w in ws)
            for queues, ws in zip(net.queues, loose, strict=True)
        ]

    def run(self, spare: Sequence[float]) -> tuple[tuple[Row, ...], list[float]]:
        """Return rows with W, and the seconds that each rank idled, less what it works less than the rank with most work. A
        rank idles rather than run a W too long for its bubble while it has idled no more than the idlest rank, or than
        ``spare`` says."""
        net, graph, p = self.net, self.net.graph, len(spare)
        idle, most = [x - max(self.work) for x in self.work], 0.0
        free, last, level = [0.0] * p, [-1] * p, [0] * p
        changes: list[list[tuple[float, int]]] = [[] for _ in range(p)]
        stash: list[deque[Action]] = [deque() for _ in range(p)]
        rows: list[dict[int, list[Slot]]] = [{} for _ in range(p)]
        ready, missing = [0.0] * len(net.waits), list(map(len, net.waits))
        heap = [(0.0, n) for n, waits in enumerate(net.waits) if not waits]

        def run_w() -> None:
            w = stash[r].popleft()
            rows[r][n].append(w)
            free[r] += net.seconds((w.op, w.stage))
            heappush(changes[r], (free[r], self.change(r, w)[1]))

        while heap:
            begin, n = heappop(heap)
            if n < len(graph.slots):
                r, slot = graph.rank_of[n], graph.slots[n]
                rows[r][n] = []
                amount, left = self.change(r, slot)
                computes = op_spec(slot.actions[0].op).lane == "compute"
                free[r] = free[r] if last[r] >= 0 else begin
                # W's run first while the slot lacks memory
                while amount > 0 and stash[r] and last[r] < n:
                    while changes[r] and changes[r][0][0] <= max(begin, free[r]):
                        level[r] += heappop(changes[r])[1]
                    if level[r] + amount <= self.limit:
                        break
                    run_w()
                while computes and stash[r] and (gap := begin - free[r]) > TIME * begin:
                    may = max(most, spare[r]) - idle[r]
                    idles = n in graph.joint_of or gap <= may + TIME * begin
                    # a W longer than the bubble waits where the rank may idle
                    if idles and net.seconds((W.name, stash[r][0].stage)) > gap + TIME * begin:
                        break
                    run_w()
                if computes:
                    idle[r] += max(0.0, begin - free[r])
                    most = max(most, idle[r])
                begin = max(begin, free[r]) if last[r] < n else begin
                if computes:
                    free[r], last[r] = begin + net.duration[n], n
                    weights = (replace(a, op=W.name) for a in slot.actions if a.op == B.name)
                    stash[r] += (w for w in weights if w in self.loose[r])
                heappush(changes[r], (begin, amount))
                heappush(changes[r], (begin + net.duration[n], left))
                rows[r][n].append(slot)
            for x in net.after[n]:
                ready[x] = max(ready[x], begin + net.duration[n])
                missing[x] -= 1
                if not missing[x]:
                    heappush(heap, (ready[x], x))
        return tuple((*chain(*(row[n] for n in sorted(row))), *ws) for row, ws in zip(rows, stash, strict=True)), idle


def _fused(schedule: Schedule, costs: CostProfile, keep: frozenset[_Backward]) -> Schedule:
    """Return ``schedule`` with BW for every B and W with which nothing takes longer. ``keep``: the BW in braids."""
    fusing = _Fusing(with_fused(schedule, keep), costs, fused_backwards(schedule) - keep)
    while fusing.more():
        pass
    return with_fused(schedule, keep | fusing.fused)


class _Fusing:
    """The backwards of a split schedule that become BW: ``fused``. ``pairs``: slots of B and of W of those that may. ``order``:
    nodes as they end while nothing is fused, so that few lie between a B and its W. ``latest``: when a node may end, so that
    the node ``tight`` behind it, or with -1 the schedule, is not too late."""

    def __init__(self, schedule: Schedule, costs: CostProfile, fused: Iterable[_Backward]) -> None:
        net = self.net = _Net(schedule, costs)
        self.duration, self.end = net.duration, [0.0] * len(net.waits)
        order = tuple(TopologicalSorter(dict(enumerate(net.waits))).static_order())
        for n in order:
            self.end[n] = self.duration[n] + max((self.end[x] for x in net.waits[n]), default=0.0)
        self.order = sorted(order, key=self.end.__getitem__)
        self.place = {n: at for at, n in enumerate(self.order)}
        graph, pairs = net.graph, defaultdict[_Backward, list[tuple[int, int]]](list)
        for n, slot in enumerate(graph.slots):
            if type(slot) is Action and slot.op == B.name:
                w = graph.slot_of(W.name, slot.stage, slot.microbatch, graph.rank_of[n])
                if w is not None and type(graph.slots[w]) is Action:
                    pairs[slot.stage, slot.microbatch].append((n, w))
        self.pairs = {k: x for k, x in pairs.items() if len(x) == len(schedule.placement.ranks(*k))}
        self.fused: set[_Backward] = set()
        self.until: dict[int, float] = {}
        self.latest, self.tight = [_NEVER] * len(self.order), [-1] * len(self.order)
        self._try(fused, self.order)

    def more(self) -> bool:
        """Fuse what may be by itself: all at once, or one after another. False where there is nothing."""
        able = [k for k in self.pairs if k not in self.fused and self._try([k], keep=False)]
        return self._try(self._in_turn(able)) or sum(self._try(self._in_turn([k])) for k in able) > 0

    def _in_turn(self, pairs: Iterable[_Backward]) -> Iterator[_Backward]:
        """Yield those of ``pairs`` that overtake no W of their stage."""
        fused = self.fused.copy()
        for k in pairs:
            passed = (a for b, w in self.pairs[k] for slot in self.net.graph.slots[b:w] for a in slot.actions)
            if all((a.op, a.stage) != (W.name, k[0]) or (a.stage, a.microbatch) in fused for a in passed):
                fused.add(k)
                yield k

    def _try(self, fused: Iterable[_Backward], changed: Iterable[int] = (), keep: bool = True) -> bool:
        """Fuse these, too, if there are any and nothing then ends too late. Only what moves is looked at; without ``keep`` only
        as far as the last W: what is in time there delays nothing behind it too long."""
        duration, end, until, backwards = self.duration, self.end, -1, list(fused)
        place, queued = self.place, {self.place[n] for n in changed}
        before, gone = list[tuple[list[float], int, float]](), set[int]()
        for k in backwards:
            for b, w in self.pairs[k]:
                before += [(duration, b, duration[b]), (duration, w, duration[w])]
                duration[b], duration[w] = self.net.seconds((BW.name, k[0])), 0.0
                until = max(until, place[w])
                gone.add(w)
                queued |= {place[b], place[w]}
        heap = sorted(queued)
        fits = bool(heap)
        while heap:
            at = heappop(heap)
            n, now = self.order[at], 0.0
            for x in self.net.waits[n]:
                if end[x] > now:
                    now = end[x]
            now += duration[n]
            if now != end[n]:
                if now > self.latest[n]:
                    x = self.tight[n]
                    while x >= 0 and place[x] <= until and x not in gone:
                        x = self.tight[x]
                    if x not in gone:  # a W that is gone may make up for it
                        fits = False
                        break
                elif at > until and not keep:
                    continue
                before.append((end, n, end[n]))
                end[n] = now
                for x in self.net.after[n]:
                    if place[x] not in queued:
                        queued.add(place[x])
                        heappush(heap, place[x])
        ends = [[q[-1] for q in queues if q] for queues in self.net.queues]
        fits = fits and all(end[n] <= self.latest[n] for n in chain(*ends))
        if fits and keep:
            self.fused.update(backwards)
            self._bound(ends, {n for k in backwards for pair in self.pairs[k] for n in pair})
        else:
            # undone in reverse: a value may have been set more than once
            for values, n, value in reversed(before):
                values[n] = value
        return fits

    def _bound(self, ends: Sequence[Sequence[int]], moved: Iterable[int]) -> None:
        """Update when each node may end at the latest, now that nodes ``moved`` take other times; ``ends``: by rank, the
        last of each queue. Looked at again, from the last node on, is what comes before one whose bound or time is
        another."""
        duration, end, latest, place = self.duration, self.end, self.latest, self.place
        first = [min((end[q[0]] - duration[q[0]] for q in queues if q), default=0.0) for queues in self.net.queues]
        span = max(max((end[n] for n in last), default=a) - a for last, a in zip(ends, first, strict=True))
        last_end = max(end)
        until = {n: min(last_end, a + span) * (1 + TIME) for last, a in zip(ends, first, strict=True) for n in last}
        changed = {n for n, x in until.items() if self.until.get(n) != x}
        queued = {-place[n] for n in changed.union(*(self.net.waits[n] for n in moved))}
        self.until, heap = until, sorted(queued)
        while heap:
            n = self.order[-heappop(heap)]
            now, self.tight[n] = until.get(n, _NEVER), -1
            for x in self.net.after[n]:
                if latest[x] - duration[x] < now:
                    now, self.tight[n] = latest[x] - duration[x], x
            if now != latest[n]:
                latest[n] = now
                for x in self.net.waits[n]:
                    if -place[x] not in queued:
                        queued.add(-place[x])
                        heappush(heap, -place[x])
