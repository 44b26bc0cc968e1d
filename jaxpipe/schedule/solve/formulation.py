"""The CP-SAT model of a schedule: one interval per action. The exact model and all neighbourhoods are uses of it.

Which actions are free, fixed or late is :mod:`.times`'s business; here is what holds between them. Without copies to the host,
memory is a *reservoir* of what the actions that are free take and give; with copies a *cumulative* of what is held from when to
when (README.md: measured).

A transfer occupies the directed pair of ranks in issue order. That only binds where one can take longer than the action that
issues the next; the exact model has variables for those, windows don't. Microbatches of a stage keep their order in each op
(constraint (1) of `optpipe.txt`); in a window all but O's, since at the start what is needed last leaves first.

``strict`` is for hosts with a lane per direction. There an L may be wanted just when an O of another microbatch ends, and
rows can't say that while a compute slot runs (an L waits for compute slots, its lane and its own O). Strict models count what
L takes from the last instant that rows can name: the end of its own O, or a moment when no compute slot runs. What they find
keeps the limit by order alone, however long anything takes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations, pairwise
from typing import Any

from jaxpipe.schedule.solve.actions import Actions, Event, MemoryLimit, Piece, Starts
from jaxpipe.schedule.solve.times import FAR, Times, Window

_Held = tuple[Piece, Any, Any, Any]


class Formulation(Times):
    """The model of ``actions``; with a ``window``, around the schedule ``now``.

    ``ordered``: microbatches keep their order. ``lower``, ``upper``: ticks known of the objective. ``prefer``: weights of
    starts by op and of choices to leave (``away``); of answers that are otherwise equal, that with the least sum is sought.
    """

    def __init__(
        self,
        actions: Actions,
        now: Starts | None = None,
        window: Window | None = None,
        *,
        ordered: bool = True,
        strict: bool = False,
        lower: int = 0,
        upper: int | None = None,
        prefer: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(actions, now, window, ordered=ordered, upper=upper)
        self.prefer = prefer or {}
        self.sends = {k: self.cp.new_int_var(0, self.latest, "") for k in self._queueing()}
        self._waits()
        self.idle: dict[int, int | None] = {}
        self.chained: set[tuple[int, int]] = set()
        for alike in self._alike() if ordered else ():
            self._in_order(alike)
        self.takes = dict(self._takes()) if strict and actions.task.costs.host.mode == "duplex" else {}
        for lane, parts in enumerate(self.parts):
            self._lane(lane, *parts)
        self._links()
        for limit in actions.limits:
            if window is None or not self.by_order or limit.rank in window.ranks:
                self._memory(limit)
        self.cost: Any = self.cp.new_int_var(lower, FAR if upper is None else upper, "cost")
        self._objective()

    def _add(self, constraint: Any, *numbers: int) -> None:
        """A constraint that holds if all of these actions take place."""
        made = self.cp.add(constraint)
        literals = {id(x): x for n in numbers if (x := self.absent.get(n)) is not None}
        if literals:
            made.only_enforce_if([~x for x in literals.values()])

    def _waits(self) -> None:
        """Every wait that touches what is inside; see :meth:`_shifts` for those past it."""
        actions, count = self.actions, len(self.actions.action)
        for n in self.at:
            for x in actions.waits[n]:
                s = x if x < count else actions.transfers[x - count].producer
                if s in self.at or (n in self.absent and self.window is not None and self.start[s] >= 0):
                    self._add(self.at[n] >= self._arrival(x), n, s)
            for then, lag in actions.followers[n] if self.late else ():
                if then in self.late:
                    self._add(self.at_of(then) >= self.end_of(n) + lag, n)
        for b, fusing in actions.fusing.items():
            self.cp.add(self.at[fusing.w] == self.ends[b]).only_enforce_if(self.choices[fusing.choice])
        for o in self.choices if self.window is not None else ():
            self.cp.add(self.at[o] == self.begin).only_enforce_if(self.absent[o])

    def _arrival(self, x: int) -> Any:
        """When what number ``x`` of what an action waits for is there."""
        k = x - len(self.actions.action)
        if k < 0:
            return self.end_of(x)
        sent = self.actions.transfers[k]
        return self.sends.get(k, self.end_of(sent.producer)) + sent.ticks

    def _alike(self) -> Iterator[list[int]]:
        """Those of one op and stage in the order that they keep: of microbatches, in a window the one they have."""
        if self.window is None:
            yield from map(list, self.actions.alike)
            return
        found: dict[int, list[int]] = defaultdict(list)
        for n in self.at:
            if self.actions.action[n].op != "O" and (not self.by_order or self.frees(n)):
                found[self.actions.kind[n]].append(n)
        for alike in found.values():
            by_now = all(n not in self.absent for n in alike)
            yield sorted(alike, key=lambda n: (self.start[n] if by_now else 0, self.actions.action[n].microbatch))

    def _in_order(self, alike: Sequence[int]) -> None:
        """One after the other. Copies that don't take place stand where the one before ends."""
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
                self.cp.add(self.at[n] >= free)
                self.cp.add(self.at[n] == free).only_enforce_if(stays)
                self.idle[n] = last
                free = self.at[n] + self.actions.size[n] * ~stays
            last = n

    # Lanes and links.

    def _lane(self, lane: int, before: Sequence[int], middle: Sequence[int], late: Sequence[int]) -> None:
        """One at a time: what is fixed, then what is inside, then what is late."""
        floor = self.start[before[-1]] + self.actions.size[before[-1]] if before else 0
        numbers = [*middle, *(n for n in self.absent if self.actions.host_lane.get(n) == lane and n not in self.inside)]
        firsts = self.firsts(lane, late)
        for n in numbers:
            if n in self.absent and floor > self.begin:
                self._add(self.at[n] >= floor, n)
            for first in firsts:
                self._add(self.end_of(n) <= self.at_of(first), n)
            if not self.by_order and self.actions.rank[n] in self.shift:
                self._add(self.at[n] <= self.end - self.shift[self.actions.rank[n]], n)
        for one, two in pairwise(n for n in middle if not self.frees(n)):
            self._add(self.at[two] >= self.end_of(one), one, two)
        if any(map(self.frees, numbers)):
            self.cp.add_no_overlap([*map(self._interval, numbers), *self._gaps(lane)])

    def _interval(self, n: int) -> Any:
        if n in self.ends:
            return self.cp.new_interval_var(self.at[n], self.length[n], self.ends[n], "")
        if n in self.absent:
            return self.cp.new_optional_fixed_size_interval_var(self.at[n], self.actions.size[n], ~self.absent[n], "")
        return self.cp.new_fixed_size_interval_var(self.at[n], self.actions.size[n], "")

    def _takes(self) -> Iterator[tuple[int, tuple[Any, Any]]]:
        """By L, a moment when no compute slot runs, and from when on it is counted."""
        for o, copies in self.actions.copies.items():
            gap, take = (self.cp.new_int_var(0, self.latest, "") for _ in range(2))
            self.cp.add_max_equality(take, [gap, self.end_of(o)])
            self.cp.add(take <= self.at[copies.load]).only_enforce_if(self.choices[o])
            yield copies.load, (gap, take)

    def _gaps(self, lane: int) -> Iterator[Any]:
        for load, (gap, _) in self.takes.items():
            if self.actions.rank[load] == lane:
                yield self.cp.new_optional_fixed_size_interval_var(gap, 0, ~self.absent[load], "")

    def _queueing(self) -> Iterator[int]:
        """Transfers that may have to wait for one another."""
        if self.window is not None:
            return
        size, fusing, of_link = self.actions.size, self.actions.fusing, self._of_link()
        for sent in of_link.values():
            producers = {self.actions.transfers[k].producer for k in sent}
            shortest = min(min(size[n], fusing[n].ticks if n in fusing else size[n]) for n in producers)
            if max(self.actions.transfers[k].ticks for k in sent) > shortest:
                yield from sent

    def _of_link(self) -> dict[tuple[int, int], list[int]]:
        of_link: dict[tuple[int, int], list[int]] = defaultdict(list)
        for k, sent in enumerate(self.actions.transfers):
            of_link[sent.link].append(k)
        return of_link

    def _links(self) -> None:
        """Transfers of a pair of ranks that may queue go in the order in which they are issued."""
        transfers, kind = self.actions.transfers, self.actions.kind
        for sent in self._of_link().values() if self.sends else ():
            if sent[0] not in self.sends:
                continue
            last: dict[int, int] = {}
            for k in sorted(sent, key=lambda k: (self.actions.action[transfers[k].producer].microbatch, k)):
                self.cp.add(self.sends[k] >= self.end_of(transfers[k].producer))
                before = last.get(kind[transfers[k].producer])
                if self.ordered and before is not None:
                    self.cp.add(self.sends[k] >= self.sends[before] + transfers[before].ticks)
                last[kind[transfers[k].producer]] = k
            for a, b in combinations(sent, 2):
                one, two = transfers[a].producer, transfers[b].producer
                if one != two and not (self.ordered and kind[one] == kind[two]):
                    first = self.cp.new_bool_var("")
                    for x, y, which in ((a, b, first), (b, a, ~first)):
                        ended = self.end_of(transfers[x].producer) <= self.at[transfers[y].producer]
                        self.cp.add(ended).only_enforce_if(which)
                        self.cp.add(self.sends[y] >= self.sends[x] + transfers[x].ticks).only_enforce_if(which)

    # Memory.

    def _memory(self, limit: MemoryLimit) -> None:
        held = [x for piece in limit.pieces if (x := self._held(piece)) is not None]
        if self.by_order:
            self._reservoir(limit.capacity, held)
        elif held:
            self._cumulative(limit.capacity, held)

    def _held(self, piece: Piece) -> _Held | None:
        """What of a piece falls into the window: from when, to when, and the literal on which it depends."""
        start, opened, closed = self.start, piece.opens, piece.closes
        if self.window is not None:
            if opened is not None and start[opened[0]] >= (self.end if self.by_order else self.end + self.longest):
                return None
            if closed is not None and 0 <= start[closed[0]] <= self.begin - self.actions.size[closed[0]]:
                return None
        literal = self.choices.get(piece.choice)
        if literal is None and piece.choice >= 0 and (start[piece.choice] >= 0) != piece.holds:
            return None
        if literal is not None and not piece.holds:
            literal = ~literal
        opens = self._when(opened)
        closes = None if closed is not None and self.by_order and closed[0] in self.late else self._when(closed)
        return piece, max(opens, self.begin) if isinstance(opens, int) else opens, closes, literal

    def _when(self, event: Event | None) -> Any:
        if event is None:
            return None
        n, end = event
        if not end and n in self.takes:
            return self.takes[n][1]
        return self.end_of(n) if end else self.at_of(n)

    def _reservoir(self, capacity: int, held: Iterable[_Held]) -> None:
        """Takes and gives at one time under one literal are merged."""
        events: dict[tuple[Any, Any], list[Any]] = {}
        for piece, opens, closes, literal in held:
            for event, time, amount in ((piece.opens, opens, piece.units), (piece.closes, closes, -piece.units)):
                if time is not None:
                    key = time if isinstance(time, int) else event, literal is None or (piece.choice, piece.holds)
                    events.setdefault(key, [time, 0, 1 if literal is None else literal])[1] += amount
        changes = [x for x in events.values() if x[1]]
        most = sum(amount for _, amount, _ in changes if amount > 0)
        if most > capacity:
            times, amounts, actives = zip(*changes, strict=True)
            self.cp.add_reservoir_constraint_with_active(times, amounts, actives, -most, capacity)

    def _cumulative(self, capacity: int, held: Iterable[_Held]) -> None:
        intervals, demands = [], []
        for piece, opens, closes, literal in held:
            start, end = self.begin if opens is None else opens, self.latest if closes is None else closes
            size = end - start if isinstance(start, int) and isinstance(end, int) else self.cp.new_int_var(0, FAR, "")
            if literal is None:
                intervals.append(self.cp.new_interval_var(start, size, end, ""))
            else:
                intervals.append(self.cp.new_optional_interval_var(start, size, end, literal, ""))
            demands.append(piece.units)
        self.cp.add_cumulative(intervals, demands, capacity)

    # What is sought.

    def _objective(self) -> None:
        """The end or the longest span; in windows, where pieces move apart, then the sum of ranks' ends; then ``prefer``."""
        cp, size = self.cp, self.actions.size
        apart = self.window is not None and not self.by_order
        far = self.latest + (max(map(int.__add__, self.start, size)) - self.begin if apart else 0)
        ends = []
        for before, middle, late in self.parts[: self.actions.num_ranks]:
            if not (before or middle or late):
                continue
            lasts = [self.end_of(n) for n in late[-1:] or self._outer(middle, first=False) or before[-1:]]
            if apart:
                ends.append(cp.new_int_var(0, far, ""))
                for end in lasts:
                    cp.add(ends[-1] >= end)
                lasts = ends[-1:]
            begin = self._begin(before, middle, late) if self.spans else 0
            for end in lasts:
                cp.add(self.cost >= end - begin)
        aim: Any = self.cost
        if apart:
            aim = aim * (len(ends) * (far + 1)) + sum(ends)
        total, spread = self._preferred()
        aim = aim * spread + total
        if self.spans and self.by_order and self.shift:
            aim = aim - next(iter(self.shift.values()))
        cp.minimize(aim)

    def _begin(self, before: Sequence[int], middle: Sequence[int], late: Sequence[int]) -> Any:
        """A time no later than a rank's first action."""
        if before or not middle:
            return self.at_of((*before, *late)[0])
        begin = self.cp.new_int_var(self.begin, self.latest, "")
        for n in self._outer(middle, first=True):
            if self.first and n in self.first:
                return self.first[n]
            self.cp.add(begin <= self.at[n])
        return begin

    def _outer(self, middle: Sequence[int], first: bool) -> list[int]:
        """Those of a rank's actions inside that no other of them is known to precede, or to follow."""
        rank, inner = self.actions.rank, set()
        waits = ((s, n) for n in middle for s, _ in self.actions.sources(n) if s in self.at and rank[s] == rank[n])
        for one, two in (*waits, *self.chained):
            if one not in self.absent and two not in self.absent:
                inner.add(two if first else one)
        return [n for n in middle if n not in inner]

    def _preferred(self) -> tuple[Any, int]:
        """What is minimised among equals, and a number that is more than all that it can differ by."""
        total: Any = 0
        spread = 1
        for n, at in self.at.items() if self.prefer else ():
            weight = self.prefer.get(self.actions.action[n].op, 0)
            total += weight * (at - self.begin)
            spread += abs(weight) * (self.latest - self.begin)
        for here in self.choices.values() if self.prefer else ():
            total += self.prefer.get("away", 0) * here
            spread += abs(self.prefer.get("away", 0))
        return total, spread

    # Answers.

    def hint(self, starts: Starts) -> None:
        """Look near ``starts`` first."""
        known: dict[int, int] = {}
        whole = {fusing.w: b for b, fusing in self.actions.fusing.items()}
        for n in sorted(self.at, key=lambda n: self.actions.action[n].microbatch):
            last = self.idle.get(n)
            if starts.start[n] >= 0:
                known[n] = starts.start[n]
            elif last is not None:
                known[n] = known[last] + (self.actions.size[last] if starts.start[last] >= 0 else 0)
            else:
                known[n] = self.actions.end(whole[n], starts) if n in whole else self.begin
            if n == self.actions.joint[n]:
                self.cp.add_hint(self.at[n], known[n])
        for choice, literal in self.choices.items():
            is_copy = choice in self.actions.copies
            self.cp.add_hint(literal, starts.start[choice] >= 0 if is_copy else choice in starts.fused)
        for shift in {id(x): x for x in self.shift.values()}.values():
            self.cp.add_hint(shift, 0)
