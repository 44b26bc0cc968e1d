"""When the actions of a model happen, as CP-SAT variables: each is *free*, *fixed* or *late*.

Without a :class:`Window` all are free: that is the exact model. With one, what starts before it in the schedule at hand is
fixed; what starts inside is free, or, on ranks and microbatches that the window leaves out, keeps its order and not its times;
what starts after it is late and moves earlier as a piece. Whether an activation leaves is a choice where its O and L are, or
could be, inside.

Without copies to the host the order of a rank's actions says what it holds, so late pieces move by one shift. With copies an O
that ends gives room whatever stands around it: each rank's piece has a shift of its own.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import Any

from jaxpipe.schedule.solve.actions import Actions, Copies, Starts

FAR = 1 << 40
"""Ticks beyond any."""


@dataclass(frozen=True, slots=True)
class Window:
    """What starts in ``begin <= t < end`` (ticks) on ``ranks`` is free; with ``microbatches``, only those are."""

    begin: int
    end: int
    ranks: frozenset[int]
    microbatches: frozenset[int] | None = None


class Times:
    """Starts and ends of ``actions``; with a ``window``, around the schedule ``now``.

    ``at``: variables of what is inside or could be. ``late``: what moves by the ``shift`` of its rank. ``choices``: literals by
    number, ``absent``: of what may not take place, the literal of that. ``parts``: per lane what is fixed, inside and late.
    ``upper``: ticks that the objective need not exceed.
    """

    def __init__(
        self, actions: Actions, now: Starts | None, window: Window | None, *, ordered: bool, upper: int | None
    ) -> None:
        from ortools.sat.python import cp_model

        self.cp: Any = cp_model.CpModel()
        self.actions, self.window, self.ordered = actions, window, ordered
        self.spans, self.by_order = actions.task.objective == "span", not actions.copies
        self.start: Sequence[int] = () if now is None else now.start
        self.first = actions.first_starts if self.spans and ordered and window is None else None
        self.parts = [self._split(lane) for lane in actions.lanes]
        self.inside = {n for _, middle, _ in self.parts for n in middle}
        self.late = {n for _, _, late in self.parts for n in late}
        if window is None:
            self.begin, self.end, self.longest = 0, self._horizon(upper), 0
        else:
            every = self.inside if self.by_order else range(len(actions.action))
            self.begin, self.end = window.begin, window.end
            self.longest = max((actions.size[n] for n in every), default=0)
        self.latest = self.end + self.longest
        self.choices: dict[int, Any] = {choice: self.cp.new_bool_var("") for choice in sorted(self._chosen())}
        self.absent = dict(self._literals())
        self.shift = self._shifts()
        self.at = self._variables()
        self.length = dict(self._lengths())
        self.ends = {n: self.cp.new_int_var(self.begin, self.latest, "") for n in self.length}

    def _split(self, lane: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
        """What of a lane is fixed, inside and late, each in order."""
        if self.window is None:
            return [], list(lane), []
        start, size = self.start, self.actions.size
        if self.by_order:
            there = sorted(lane, key=start.__getitem__)
        else:
            there = sorted((n for n in lane if start[n] >= 0), key=lambda n: (start[n], start[n] + size[n], n))
        i, j = (bisect_left(there, t, key=start.__getitem__) for t in (self.window.begin, self.window.end))
        return there[:i], there[i:j], there[j:]

    def _horizon(self, upper: int | None) -> int:
        if upper is None or (self.spans and self.first is None):
            return self.actions.horizon
        return upper + max(self.first.values()) if self.first else upper

    def frees(self, n: int) -> bool:
        window = self.window
        if window is None:
            return True
        i = self.actions.action[n].microbatch
        return self.actions.rank[n] in window.ranks and (window.microbatches is None or i in window.microbatches)

    def _chosen(self) -> set[int]:
        """Choices that are free: how a backward runs; whether an activation leaves, where O and L are inside or could be."""
        found = {fusing.choice for fusing in self.actions.fusing.values()}
        for o, copies in self.actions.copies.items():
            if self.window is None or (self.frees(o) and self._may_change(o, copies)):
                found.add(o)
        return found

    def _may_change(self, o: int, copies: Copies) -> bool:
        start, size = self.start, self.actions.size
        if start[o] >= 0:
            return o in self.inside and copies.load in self.inside
        ready = max(self.begin, start[copies.f] + size[copies.f]) + size[o] + size[copies.load]
        if ready > min(self.end, start[copies.b]) + self.longest or start[copies.b] < self.begin:
            return False
        loads = self.actions.alike[self.actions.kind[copies.load]]
        place = loads.index(copies.load)
        return not any(0 <= start[n] < self.begin for n in loads[place:]) and self.late.isdisjoint(loads[:place])

    def _literals(self) -> Iterator[tuple[int, Any]]:
        """What may not take place, and the literal of that: O and L of what stays, W of a full backward."""
        for o, copies in self.actions.copies.items():
            if o in self.choices:
                yield o, ~self.choices[o]
                yield copies.load, ~self.choices[o]
        for fusing in self.actions.fusing.values():
            yield fusing.w, self.choices[fusing.choice]

    def _shifts(self) -> dict[int, Any]:
        """Per rank that has something late, by how much that moves: no more than what is fixed leaves room for."""
        actions, start, size = self.actions, self.start, self.actions.size
        room = dict.fromkeys(sorted({actions.rank[n] for n in self.late}), self.end - self.begin)
        for lane, (before, _, late) in enumerate(self.parts):
            bounds = [(n, start[before[-1]] + size[before[-1]]) for n in self.firsts(lane, late) if before]
            for s in takewhile(lambda s: start[s] > self.begin - actions.reach, reversed(before)):
                bounds += [(n, start[s] + size[s] + lag) for n, lag in actions.followers[s] if n in self.late]
            for n, least in bounds:
                room[actions.rank[n]] = min(room[actions.rank[n]], start[n] - least)
        if self.by_order and room:
            return dict.fromkeys(room, self.cp.new_int_var(0, min(room.values()), "shift"))
        shift = {rank: self.cp.new_int_var(0, most, "") for rank, most in room.items()}
        for (one, two), slack in self._slacks().items():
            self.cp.add(shift[two] <= shift[one] + slack)
        return shift

    def _slacks(self) -> dict[tuple[int, int], int]:
        """By how much more the second of two ranks may move than the first, for what is late on both."""
        actions, start, size = self.actions, self.start, self.actions.size
        slacks: dict[tuple[int, int], int] = {}
        waits = [(s, n, lag) for s in self.late for n, lag in actions.followers[s] if n in self.late]
        waits += [(one, two, 0) for _, _, late in self.parts for one, two in pairwise(late)]
        for one, two, lag in waits:
            pair = actions.rank[one], actions.rank[two]
            if pair[0] != pair[1]:
                slacks[pair] = min(slacks.get(pair, FAR), start[two] - start[one] - size[one] - lag)
        return slacks

    def firsts(self, lane: int, late: Sequence[int]) -> list[int]:
        """The first of each rank; lanes beyond the ranks' own may serve several."""
        if lane < self.actions.num_ranks:
            return list(late[:1])
        return list({self.actions.rank[n]: n for n in reversed(late)}.values())

    def _variables(self) -> dict[int, Any]:
        """Starts of what is inside or could be; those that start together share one."""
        actions, start, size = self.actions, self.start, self.actions.size
        least: dict[int, int] = {}
        for before, middle, _ in self.parts:
            floor = start[before[-1]] + size[before[-1]] if before else 0
            for n in middle:
                times = [self.begin, floor, least.get(actions.joint[n], 0)]
                for s, lag in actions.sources(n) if self.window is not None else ():
                    if s not in self.inside and start[s] >= 0:
                        times.append(start[s] + size[s] + lag)
                least[actions.joint[n]] = max(times) if n not in self.absent else self.begin
        for n in self.absent:
            least.setdefault(n, self.begin)
        at = {joint: self.cp.new_int_var(low, self.latest, "") for joint, low in sorted(least.items())}
        for n, t in (self.first or {}).items():
            self.cp.add(at[n] == t)
        return {n: at[actions.joint[n]] for n in sorted(self.inside | self.absent.keys())}

    def _lengths(self) -> Iterator[tuple[int, Any]]:
        """What is as long as a choice says: a B that may be a BW, and its W."""
        size = self.actions.size
        for b, fusing in self.actions.fusing.items():
            whole = self.choices[fusing.choice]
            yield b, size[b] + (fusing.ticks - size[b]) * whole
            yield fusing.w, size[fusing.w] * (1 - whole)

    def at_of(self, n: int) -> Any:
        """When an action starts: a variable, a number, or a number less the shift."""
        if n in self.at:
            return self.at[n]
        return self.start[n] - self.shift[self.actions.rank[n]] if n in self.late else self.start[n]

    def end_of(self, n: int) -> Any:
        return self.ends[n] if n in self.ends else self.at_of(n) + self.actions.size[n]

    def answer(self, solver: Any) -> Starts:
        """When everything starts by the solver's values."""
        start = list(self.start) if self.window is not None else [-1] * len(self.actions.action)
        for n in (*self.late, *self.at):
            absent = n in self.absent and solver.boolean_value(self.absent[n])
            start[n] = -1 if absent else solver.value(self.at_of(n))
        whole = {fusing.choice for fusing in self.actions.fusing.values()}
        fused = {choice for choice in whole if solver.boolean_value(self.choices[choice])}
        return Starts(start, frozenset(fused))
