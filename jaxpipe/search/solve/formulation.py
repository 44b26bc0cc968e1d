"""The CP-SAT model of a schedule, one interval per action. The exact model and all neighbourhoods are uses of it.

Each action is *free*, *fixed* or *late*. Without a :class:`Window` all are free: that is the exact model. With one, what starts
before it in the schedule at hand is fixed; what starts inside is free, or, on ranks and microbatches that the window leaves
out, keeps its order and not its times; what starts after it is late and moves earlier as a piece. Whether an activation leaves
is a choice where its O and L are, or could be, inside.

Without copies to the host the order of a rank's actions says what it holds, so late pieces move by one shift, and memory is a
*reservoir* of what the actions that are free take and give. With copies an O that ends gives room whatever stands around it:
each rank's piece has a shift of its own, and memory is a *cumulative* of what is held from when to when (measured).

A transfer occupies the directed pair of ranks in issue order. That only binds where one can do so for longer than the action
takes that issues the next; the exact model has variables for those, windows don't. Microbatches of a stage keep their order in
each op (constraint (1) of `optpipe.txt`), but for windows with copies to the host: what is away may come back last.

``strict`` is for hosts with a lane per direction. There an L may be wanted just when an O of another microbatch ends, and
rows can't say that while a compute slot runs (an L waits for compute slots, its lane and its own O). Strict models count what
L takes from the last instant that rows can name: the end of its own O, or a moment when no compute slot runs. What they find
keeps the limit by order alone, however long anything takes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, takewhile
from typing import Any

from jaxpipe.search.solve.actions import (
    ActionTable,
    Event,
    MemoryInterval,
    MemoryLimit,
    OffloadPair,
    Starts,
    TransferEdge,
)

FAR = 1 << 40
"""Ticks beyond any."""
_LARGEST = 1 << 61
"""Half of what an objective may be; CP-SAT calls a model with more invalid."""


@dataclass(frozen=True, slots=True)
class Window:
    """Part of a schedule that is solved anew: what starts in ``begin <= t < end`` (ticks) on ``ranks`` is free; with
    ``microbatches``, only those are."""

    begin: int
    end: int
    ranks: frozenset[int]
    microbatches: frozenset[int] | None = None


_WindowInterval = tuple[MemoryInterval, Any, Any, Any]


class Formulation:
    """The model of ``actions``; with a ``window``, around the schedule ``now``.

    ``ordered``: microbatches keep their order. ``lower``, ``upper``: ticks known of the objective. ``prefer``: weights of
    starts by op and of choices to leave (``away``); of answers that are otherwise equal, that with the least sum is sought.

    ``at``: start variables of what is inside or could be; ``ends``: of those whose length is a choice. ``late``: what moves by
    the ``shift`` of its rank. ``choices``: literals by number, ``absent``: of what may not take place, the literal of that.
    ``parts``: per lane what is fixed, inside and late; ``floors``: when what is fixed ends.
    """

    def __init__(
        self,
        actions: ActionTable,
        now: Starts | None = None,
        window: Window | None = None,
        *,
        ordered: bool = True,
        strict: bool = False,
        lower: int = 0,
        upper: int | None = None,
        prefer: Mapping[str, int] | None = None,
    ) -> None:
        from ortools.sat.python import cp_model

        self.cp: Any = cp_model.CpModel()
        self.actions, self.window, self.ordered = actions, window, ordered
        # where nothing may leave, windows keep lanes' order, one shift moves all that is late, and memory is a reservoir
        self.spans, self.by_order = actions.task.objective == "span", not actions.copies
        self.start: Starts = now or ()
        self.first = actions.first_starts if self.spans and ordered and window is None else None
        self.parts = [self._split(lane) for lane in actions.lanes]
        self.floors = [self.start[x[-1]] + actions.size[x[-1]] if x else 0 for x, _, _ in self.parts]
        self.inside = {n for _, middle, _ in self.parts for n in middle}
        self.late = {n for _, _, late in self.parts for n in late}
        if window is None:
            self.begin, self.end, self.longest = 0, self._horizon(upper), 0
        else:
            numbers = self.inside if self.by_order else range(len(actions.action))
            self.begin, self.end = window.begin, window.end
            self.longest = max((actions.size[n] for n in numbers), default=0)
        # what starts at the window's last tick ends no later
        self.latest = self.end + self.longest
        self.choices: dict[int, Any] = {choice: self.cp.new_bool_var("") for choice in sorted(self._free_choices())}
        self.absent = dict(self._literals())
        self.shift = self._shifts()
        self.at = self._start_variables()
        self.length = dict(self._lengths())
        self.ends = {n: self.cp.new_int_var(self.begin, self.latest, "") for n in self.length}
        # what holds between them, and what is sought
        self.prefer = prefer or {}
        # windows leave queues on links out: their answers are simulated, so at worst a proposal is lost
        self.links = list(self._queueing_links()) if window is None else []
        self.sends = {x: self.cp.new_int_var(0, self.latest, "") for link in self.links for x in link}
        self._add_waits()
        self.idle: dict[int, int | None] = {}
        self.chained: set[tuple[int, int]] = set()
        # microbatches are all alike: without an order every answer comes again with numbers exchanged
        for alike in self._alike_actions() if ordered else ():
            self._keep_order(alike)
        # before the lanes, which hold a gap for each take, and before memory, which counts from them
        self.takes = dict(self._counted_takes()) if strict and actions.task.costs.host.mode == "duplex" else {}
        for lane, (_, middle, late) in enumerate(self.parts):
            self._add_lane(lane, middle, late)
        for link in self.links:
            self._add_link(link)
        for limit in actions.limits:
            # where order alone says what is held, a rank that keeps its order holds what it held
            if window is None or not self.by_order or limit.rank in window.ranks:
                self._add_memory_limit(limit)
        self.far = FAR if upper is None else upper  # no end is later
        if window is not None:
            self.far = self.latest - self.begin + max(map(int.__add__, self.start, actions.size))
        self.cost: Any = self.cp.new_int_var(lower, self.far, "cost")
        self._set_objective()

    # When.

    def _split(self, lane: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
        """Split a lane into what is fixed, inside the window and late, each in order."""
        if self.window is None:
            return [], list(lane), []
        start, size = self.start, self.actions.size
        if self.by_order:
            in_order = sorted(lane, key=start.__getitem__)
        else:
            in_order = sorted((n for n in lane if start[n] >= 0), key=lambda n: (start[n], start[n] + size[n], n))
        # what starts exactly at the window's end is late
        i, j = (bisect_left(in_order, t, key=start.__getitem__) for t in (self.window.begin, self.window.end))
        return in_order[:i], in_order[i:j], in_order[j:]

    def _horizon(self, upper: int | None) -> int:
        # when ranks begin may depend on the order: then a bound on spans bounds no time
        if upper is None or (self.spans and self.first is None):
            return self.actions.horizon
        # a span counts from its rank's first start, so ends may lie that much past a bound on spans
        return upper + max(self.first.values()) if self.first else upper

    def is_free(self, n: int) -> bool:
        """Return whether the solver chooses when an action starts, if it is inside the window."""
        window = self.window
        if window is None:
            return True
        i = self.actions.action[n].microbatch
        return self.actions.rank[n] in window.ranks and (window.microbatches is None or i in window.microbatches)

    def _free_choices(self) -> set[int]:
        """Return the choices that are free: how a backward runs; whether an activation leaves, where O and L are inside or
        could be."""
        choices = {fusing.choice for fusing in self.actions.fusing.values()}
        for o, copies in self.actions.copies.items():
            if self.window is None or (self.is_free(o) and self._may_change(o, copies)):
                choices.add(o)
        return choices

    def _may_change(self, o: int, copies: OffloadPair) -> bool:
        start, size = self.start, self.actions.size
        if start[o] >= 0:
            # the choice takes both away: one that is fixed or late would be left over without the other
            return o in self.inside and copies.load in self.inside
        # an offload is offered only where O and L fit between F and B
        ready = max(self.begin, start[copies.f] + size[copies.f]) + size[o] + size[copies.load]
        return ready <= min(self.end, start[copies.b]) + self.longest and start[copies.b] >= self.begin

    def _literals(self) -> Iterator[tuple[int, Any]]:
        """Return what may not take place, and the literal of that: O and L of what stays, W of a full backward."""
        for o, copies in self.actions.copies.items():
            if o in self.choices:
                yield o, ~self.choices[o]
                yield copies.load, ~self.choices[o]
        for fusing in self.actions.fusing.values():
            yield fusing.w, self.choices[fusing.choice]

    def _shifts(self) -> dict[int, Any]:
        """Return, per rank that has something late, by how much that moves: no more than what is fixed leaves room for."""
        actions, start, size = self.actions, self.start, self.actions.size
        room = dict.fromkeys(sorted({actions.rank[n] for n in self.late}), self.end - self.begin)
        for floor, (before, _, late) in zip(self.floors, self.parts, strict=True):
            bounds = [(n, floor) for n in self.first_per_rank(late)]
            # results of what started earlier than that are everywhere: they hold nothing late back
            for s in takewhile(lambda s: start[s] > self.begin - actions.reach, reversed(before)):
                bounds += [(n, start[s] + size[s] + lag) for n, lag in actions.followers[s] if n in self.late]
            for n, least in bounds:
                room[actions.rank[n]] = min(room[actions.rank[n]], start[n] - least)
        # one variable for all ranks: late actions keep their distances, so no wait between them can break
        if self.by_order and room:
            return dict.fromkeys(room, self.cp.new_int_var(0, min(room.values()), "shift"))
        shift = {rank: self.cp.new_int_var(0, most, "") for rank, most in room.items()}
        for (one, two), slack in self._slacks().items():
            self.cp.add(shift[two] <= shift[one] + slack)
        return shift

    def _slacks(self) -> dict[tuple[int, int], int]:
        """Return by how much more the second of two ranks may move than the first, for what is late on both."""
        actions, start, size = self.actions, self.start, self.actions.size
        slacks: dict[tuple[int, int], int] = {}
        waits = [(s, n, lag) for s in self.late for n, lag in actions.followers[s] if n in self.late]
        # ranks that share a host lane hold one another back, too
        waits += [(one, two, 0) for _, _, late in self.parts for one, two in pairwise(late)]
        for one, two, lag in waits:
            pair = actions.rank[one], actions.rank[two]
            # within a rank all that is late moves by one shift
            if pair[0] != pair[1]:
                slacks[pair] = min(slacks.get(pair, FAR), start[two] - start[one] - size[one] - lag)
        return slacks

    def first_per_rank(self, late: Sequence[int]) -> list[int]:
        """Return the first of each rank; lanes beyond the ranks' own may serve several."""
        return list({self.actions.rank[n]: n for n in reversed(late)}.values())

    def _start_variables(self) -> dict[int, Any]:
        """Create the starts of what is inside or could be; those that start together share one."""
        actions, start, size = self.actions, self.start, self.actions.size
        least: dict[int, int] = {}
        for floor, (_, middle, _) in zip(self.floors, self.parts, strict=True):
            for n in middle:
                # tighter domains than the window's: behind what is fixed on the lane, and behind inputs that do not move
                times = [self.begin, floor, least.get(actions.joint[n], 0)]
                for s, lag in actions.sources(n):
                    if s not in self.inside and start[s] >= 0:
                        times.append(start[s] + size[s] + lag)
                least[actions.joint[n]] = max(times) if n not in self.absent else self.begin
        for n in self.absent:
            least.setdefault(n, self.begin)
        at = {joint: self.cp.new_int_var(low, self.latest, "") for joint, low in sorted(least.items())}
        # a rank's begin becomes a number, without which spans are hard to prove (ActionTable.first_starts)
        for n, t in (self.first or {}).items():
            self.cp.add(at[n] == t)
        return {n: at[actions.joint[n]] for n in sorted(self.inside | self.absent.keys())}

    def _lengths(self) -> Iterator[tuple[int, Any]]:
        """Yield the actions whose length depends on a choice, and that length: a B that may be a BW, and its W."""
        size = self.actions.size
        for b, fusing in self.actions.fusing.items():
            is_fused = self.choices[fusing.choice]
            yield b, size[b] + (fusing.ticks - size[b]) * is_fused
            # the W of a BW stays in the model without length: memory is given back at its end either way
            yield fusing.w, size[fusing.w] * (1 - is_fused)

    def start_of(self, n: int) -> Any:
        """Return when an action starts: a variable, a number, or a number less the shift."""
        if n in self.at:
            return self.at[n]
        return self.start[n] - self.shift[self.actions.rank[n]] if n in self.late else self.start[n]

    def end_of(self, n: int) -> Any:
        """Return when an action ends, likewise."""
        return self.ends[n] if n in self.ends else self.start_of(n) + self.actions.size[n]

    # What holds.

    def _add(self, constraint: Any, *numbers: int) -> None:
        """Add a constraint that holds if all of these actions take place."""
        handle = self.cp.add(constraint)
        literals = {id(x): x for n in numbers if (x := self.absent.get(n)) is not None}
        if literals:
            handle.only_enforce_if([~x for x in literals.values()])

    def _add_waits(self) -> None:
        """Add every wait that touches what is inside; see :meth:`_shifts` for those past it."""
        actions = self.actions
        for n in self.at:
            for x, (s, lag) in zip(actions.graph.waits[n], actions.sources(n), strict=True):
                # where links queue, a result starts its way with its transfer, not when its producer ends
                if s in self.at or (n in self.absent and self.start[s] >= 0):
                    self._add(self.at[n] >= self.sends.get(x, self.end_of(s)) + lag, n, s)
            # late actions have no entry in ``at``, and must not move past what they wait for
            for then, lag in actions.followers[n] if self.late else ():
                if then in self.late:
                    self._add(self.start_of(then) >= self.end_of(n) + lag, n)
        for b, fusing in actions.fusing.items():
            # the W of a BW has no length and stands at its end
            self.cp.add(self.at[fusing.w] == self.ends[b]).only_enforce_if(self.choices[fusing.choice])
        # an O that does not take place has one place, so that equal answers are not searched twice
        for o in self.choices if self.window is not None else ():
            self.cp.add(self.at[o] == self.begin).only_enforce_if(self.absent[o])

    def _alike_actions(self) -> Iterator[Sequence[int]]:
        """Yield those of one op and stage in the order that they keep: of microbatches, in a window the one they have."""
        if self.window is None:
            yield from self.actions.alike.values()
            return
        by_kind: dict[Any, list[int]] = defaultdict(list)
        # what is away may come back last, so windows with copies ask for no order
        for n in self.at if self.by_order else ():
            if self.is_free(n):
                by_kind[self.actions.kind[n]].append(n)
        for alike in by_kind.values():
            yield sorted(alike, key=self.start.__getitem__)

    def _keep_order(self, alike: Sequence[int]) -> None:
        """Run ``alike`` one after the other. Copies that don't take place stand where the one before ends."""
        free: Any = self.begin
        last: int | None = None
        for n in alike:
            stays = self.absent.get(n)
            if n in self.ends or stays is None:
                if last is not None:
                    self._add(self.at[n] >= free, n, last)
                    self.chained.add((last, n))
                free = self.end_of(n)
            else:
                # whether it takes place or not, so that order is passed on across copies that don't
                self.cp.add(self.at[n] >= free)
                self.cp.add(self.at[n] == free).only_enforce_if(stays)
                self.idle[n] = last
                free = self.at[n] + self.actions.size[n] * ~stays
            last = n

    # Lanes and links.

    def _add_lane(self, lane: int, middle: Sequence[int], late: Sequence[int]) -> None:
        """Run a lane's actions one at a time: what is fixed, then what is inside, then what is late."""
        floor, members = self.floors[lane], set(self.actions.lanes[lane])
        numbers = [*middle, *(n for n in self.absent if n in members and n not in self.inside)]
        firsts = self.first_per_rank(late)
        for n in numbers:
            if n in self.absent and floor > self.begin:
                self._add(self.at[n] >= floor, n)
            for first in firsts:
                self._add(self.end_of(n) <= self.start_of(first), n)
            if not self.by_order and self.actions.rank[n] in self.shift:
                self._add(self.at[n] <= self.end - self.shift[self.actions.rank[n]], n)
        # what the window covers but does not free keeps its order
        for one, two in pairwise(n for n in middle if not self.is_free(n)):
            self._add(self.at[two] >= self.end_of(one), one, two)
        # a lane that keeps its order is told by the pairs above; NoOverlap would only cost time
        if any(map(self.is_free, numbers)):
            intervals = [self._make_interval(n) for n in numbers]
            # an interval without length may not lie inside another: so NoOverlap says that no slot runs then
            intervals += [
                self.cp.new_optional_fixed_size_interval_var(gap, 0, ~self.absent[load], "")
                for load, (gap, _) in self.takes.items()
                if self.actions.rank[load] == lane
            ]
            self.cp.add_no_overlap(intervals)

    def _make_interval(self, n: int) -> Any:
        """Return the interval of an action: of chosen length, optional, or neither."""
        if n in self.ends:
            return self.cp.new_interval_var(self.at[n], self.length[n], self.ends[n], "")
        if n in self.absent:
            return self.cp.new_optional_fixed_size_interval_var(self.at[n], self.actions.size[n], ~self.absent[n], "")
        return self.cp.new_fixed_size_interval_var(self.at[n], self.actions.size[n], "")

    def _counted_takes(self) -> Iterator[tuple[int, tuple[Any, Any]]]:
        """Return, by L, a moment when no compute slot runs, and from when on it is counted."""
        for o, copies in self.actions.copies.items():
            gap, take = (self.cp.new_int_var(0, self.latest, "") for _ in range(2))
            self.cp.add_max_equality(take, [gap, self.end_of(o)])
            self.cp.add(take <= self.at[copies.load]).only_enforce_if(self.choices[o])
            yield copies.load, (gap, take)

    def _queueing_links(self) -> Iterator[Mapping[int, TransferEdge]]:
        """Yield the transfers of each pair of ranks where they may have to wait for one another, as they are waited for."""
        actions, size, fusing = self.actions, self.actions.size, self.actions.fusing
        links: dict[tuple[int, int], dict[int, TransferEdge]] = defaultdict(dict)
        for x, sent in enumerate(actions.transfers, len(actions.action)):
            links[sent.link][x] = sent
        for link in links.values():
            producers = {sent.producer for sent in link.values()}
            shortest = min(min(size[n], fusing[n].ticks if n in fusing else size[n]) for n in producers)
            # transfers shorter than what produces them never wait for one another
            if max(sent.occupied for sent in link.values()) > shortest:
                yield link

    def _add_link(self, link: Mapping[int, TransferEdge]) -> None:
        """Let transfers of a pair of ranks go in the order in which they are issued."""
        action, kind, sends = self.actions.action, self.actions.kind, self.sends
        last: dict[Any, int] = {}
        for x in sorted(link, key=lambda x: (action[link[x].producer].microbatch, x)):
            producer = link[x].producer
            self.cp.add(sends[x] >= self.end_of(producer))
            if self.ordered and kind[producer] in last:
                before = last[kind[producer]]
                self.cp.add(sends[x] >= sends[before] + link[before].occupied)
            last[kind[producer]] = x
        # of two producers in an order yet to be found, the one that ends first sends first
        for a, b in combinations(link, 2):
            one, two = link[a].producer, link[b].producer
            if one != two and not (self.ordered and kind[one] == kind[two]):
                first = self.cp.new_bool_var("")
                for x, y, which in ((a, b, first), (b, a, ~first)):
                    ended = self.end_of(link[x].producer) <= self.at[link[y].producer]
                    self.cp.add(ended).only_enforce_if(which)
                    self.cp.add(sends[y] >= sends[x] + link[x].occupied).only_enforce_if(which)

    # Memory.

    def _add_memory_limit(self, limit: MemoryLimit) -> None:
        held = [x for interval in limit.intervals if (x := self._interval_in_window(interval)) is not None]
        if self.by_order:
            self._add_reservoir(limit.capacity, held)
        elif held:
            self._add_cumulative(limit.capacity, held)

    def _interval_in_window(self, interval: MemoryInterval) -> _WindowInterval | None:
        """Return the part of an interval inside the window: from when, to when, and the literal on which it depends."""
        start, opened, closed = self.start, interval.opens, interval.closes
        if self.window is not None:
            # an interval that opens behind the window or closes before it holds nothing inside
            if opened is not None and start[opened[0]] >= (self.end if self.by_order else self.end + self.longest):
                return None
            if closed is not None and 0 <= start[closed[0]] <= self.begin - self.actions.size[closed[0]]:
                return None
        literal = self.choices.get(interval.choice)
        # what the window does not free is as in the schedule at hand
        if literal is None and interval.choice >= 0 and (start[interval.choice] >= 0) != interval.holds:
            return None
        if literal is not None and not interval.holds:
            literal = ~literal
        opens = self._time_of(opened)
        # late actions start behind all that is inside: no level in the window sees what they give back
        closes = None if closed is not None and self.by_order and closed[0] in self.late else self._time_of(closed)
        return interval, max(opens, self.begin) if isinstance(opens, int) else opens, closes, literal

    def _time_of(self, event: Event | None) -> Any:
        """Return when an event takes place, by the model; None for no event."""
        if event is None:
            return None
        n, end = event
        if not end and n in self.takes:
            return self.takes[n][1]
        return self.end_of(n) if end else self.start_of(n)

    def _add_reservoir(self, capacity: int, held: Iterable[_WindowInterval]) -> None:
        """Limit memory by a reservoir; takes and gives at one time under one literal are merged."""
        events: dict[tuple[Any, Any], list[Any]] = {}
        for interval, opens, closes, literal in held:
            for event, time, amount in (
                (interval.opens, opens, interval.units),
                (interval.closes, closes, -interval.units),
            ):
                if time is not None:
                    key = time if isinstance(time, int) else event, literal is None or (interval.choice, interval.holds)
                    events.setdefault(key, [time, 0, 1 if literal is None else literal])[1] += amount
        changes = [x for x in events.values() if x[1]]
        most = sum(amount for _, amount, _ in changes if amount > 0)
        # what could never exceed the capacity needs no constraint
        if most > capacity:
            times, amounts, actives = zip(*changes, strict=True)
            self.cp.add_reservoir_constraint_with_active(times, amounts, actives, -most, capacity)

    def _add_cumulative(self, capacity: int, held: Iterable[_WindowInterval]) -> None:
        """Limit memory by a cumulative: an interval for everything held, from when to when."""
        intervals, demands = [], []
        for interval, opens, closes, literal in held:
            start, end = self.begin if opens is None else opens, self.latest if closes is None else closes
            size = end - start if isinstance(start, int) and isinstance(end, int) else self.cp.new_int_var(0, FAR, "")
            if literal is None:
                intervals.append(self.cp.new_interval_var(start, size, end, ""))
            else:
                intervals.append(self.cp.new_optional_interval_var(start, size, end, literal, ""))
            demands.append(interval.units)
        self.cp.add_cumulative(intervals, demands, capacity)

    # What is sought.

    def _set_objective(self) -> None:
        """Minimise the end or the longest span; in windows, where pieces move apart, then the sum of ranks' ends; then
        ``prefer``."""
        cp = self.cp
        sums_ends = self.window is not None and not self.by_order
        ends = []
        for before, middle, late in self.parts[: self.actions.num_ranks]:
            if not (before or middle or late):
                continue
            # only what may be a rank's last: fewer rows bound the objective, and they propagate better
            lasts = [self.end_of(n) for n in late[-1:] or self._outermost(middle, first=False) or before[-1:]]
            if sums_ends:
                ends.append(cp.new_int_var(0, self.far, ""))
                for end in lasts:
                    cp.add(ends[-1] >= end)
                lasts = ends[-1:]
            begin = self._begin_of(before, middle, late) if self.spans else 0
            for end in lasts:
                cp.add(self.cost >= end - begin)
        aim: Any = self.cost
        # lexicographic in one number: the objective, then the sum of ends, then preferences
        weight = max(1, len(ends) * (self.latest - self.begin + 1))
        if sums_ends:
            aim = aim * weight + sum(ends)
        total, spread = self._weigh_preferences()
        if self.far * weight * spread < _LARGEST:  # else without
            aim = aim * spread + total
        if self.spans and self.by_order and self.shift:
            aim = aim - next(iter(self.shift.values()))
        cp.minimize(aim)

    def _begin_of(self, before: Sequence[int], middle: Sequence[int], late: Sequence[int]) -> Any:
        """Return a time no later than a rank's first action."""
        # what is fixed begins the rank; where all of it is late, the first of that stays the first
        if before or not middle:
            return self.start_of((*before, *late)[0])
        begin = self.cp.new_int_var(self.begin, self.latest, "")
        for n in self._outermost(middle, first=True):
            if self.first and n in self.first:
                return self.first[n]
            self.cp.add(begin <= self.at[n])
        return begin

    def _outermost(self, middle: Sequence[int], first: bool) -> list[int]:
        """Return those of a rank's actions inside that no other of them is known to precede, or to follow."""
        rank, inner = self.actions.rank, set()
        waits = ((s, n) for n in middle for s, _ in self.actions.sources(n) if s in self.at and rank[s] == rank[n])
        for one, two in (*waits, *self.chained):
            if one not in self.absent and two not in self.absent:
                inner.add(two if first else one)
        return [n for n in middle if n not in inner]

    def _weigh_preferences(self) -> tuple[Any, int]:
        """Return what is minimised among equals, and a number that is more than all that it can differ by."""
        if not self.prefer:
            return 0, 1
        room, op = self.latest - self.begin, [a.op for a in self.actions.action]
        weighed = [(self.prefer.get(op[n], 0), at - self.begin, room) for n, at in self.at.items()]
        weighed += [(self.prefer.get("away", 0), literal, 1) for literal in self.choices.values()]
        return sum(weight * x for weight, x, _ in weighed), 1 + sum(abs(weight) * most for weight, _, most in weighed)

    # Answers.

    def hint(self, starts: Starts) -> None:
        """Look near ``starts`` first."""
        hints: dict[int, int] = {}
        b_of_w = {fusing.w: b for b, fusing in self.actions.fusing.items()}
        # in order of microbatch: what does not take place stands where the one before it ends
        for n in sorted(self.at, key=lambda n: self.actions.action[n].microbatch):
            last = self.idle.get(n)
            if starts[n] >= 0:
                hints[n] = starts[n]
            elif last is not None:
                hints[n] = hints[last] + (self.actions.size[last] if starts[last] >= 0 else 0)
            else:
                hints[n] = self.actions.end(b_of_w[n], starts) if n in b_of_w else self.begin
            if n == self.actions.joint[n]:
                self.cp.add_hint(self.at[n], hints[n])
        for choice, literal in self.choices.items():
            self.cp.add_hint(literal, self.actions.chosen(choice, starts))
        # where the hint comes from nothing has moved; ranks may share one variable
        for shift in {id(x): x for x in self.shift.values()}.values():
            self.cp.add_hint(shift, 0)

    def answer(self, solver: Any) -> Starts:
        """Return when everything starts by the solver's values."""
        start = list(self.start) if self.window is not None else [-1] * len(self.actions.action)
        for n in (*self.late, *self.at):
            absent = n in self.absent and solver.boolean_value(self.absent[n])
            start[n] = -1 if absent else solver.value(self.start_of(n))
        return start
