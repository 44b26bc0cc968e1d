"""The clock of every list scheduler: time runs forward over all ranks at once, and a free rank is asked what to run.

:class:`Clock` pops the earliest (time, rank); if the rank is free its *chooser* names the code of an action, or -1 to wait for
the next arrival; the action starts, and what it feeds arrives over the links. Whatever decides an order by time (list
schedules, fillers of a known order, rules of a :class:`~jaxpipe.schedule.rules.Traversal`, offload) is a
chooser of this clock. The same loop with the answer "the head of my row" is :class:`~jaxpipe.search.retime.Retimer`.

An action on a group of ranks that start together is promised on all of them as soon as one rank chooses it, in one order for
all, and starts when the last of them is free; so groups that overlap can't wait for each other.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

NEVER = float("inf")
ROUNDING = 1e-9


class Feed(NamedTuple):
    """Message that the end of an action sends to ``rank``: the codes ``own code + gap`` for each of ``gaps`` are one input
    nearer.

    ``link``: number of the directed pair of ranks that the transfer occupies for ``occupied_s``; -1 where nothing is sent.
    ``seconds``: from its start until it has arrived.
    """

    rank: int
    link: int
    seconds: float
    occupied_s: float
    gaps: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tables:
    """Tables that the clock reads. A code is ``kind * num_microbatches + microbatch``; one entry a kind (op and replica).

    ``ranks``: who runs it, together if they are several. ``seconds``: how long. ``change``: memory that its rank holds more
    once it has started, what its end gives back already taken off. ``feeds``: what its end makes ready. ``needs``: inputs
    that must arrive before it can start. ``span``: microbatches that an action stands for, under the code of the first; empty:
    one each.
    """

    num_ranks: int
    num_microbatches: int
    ranks: Sequence[tuple[int, ...]]
    seconds: Sequence[float]
    change: Sequence[float]
    feeds: Sequence[tuple[Feed, ...]]
    needs: Sequence[int]
    num_links: int
    span: Sequence[int] = ()


Choose = Callable[[int, float], int]
"""``choose(rank, now)``: the code of the action that the free ``rank`` starts now, or -1 to wait."""


class Clock:
    """The state of all ranks while an order is made; lists are for choosers to read.

    ``ready[code]``: when all inputs of an action have arrived (inf while one has not been sent). ``rows[r]``: codes so far.
    ``free[r]``: when the rank's last action ends; ``first[r]``: when its first began. ``memory[r]``, ``peak``: units that are
    held, and the most that any rank held. ``idle[r]``: seconds a rank waited between actions; ``idlest``: the most of any.
    ``tiny``: seconds that are rounding.
    """

    __slots__ = (
        "_arrived", "_events", "_left", "_link_free", "_promised", "first", "free", "idle", "idlest", "memory", "now", "peak",
        "ready", "rows", "tables", "tiny",
    )  # fmt: skip

    def __init__(self, tables: Tables) -> None:
        p, m = tables.num_ranks, tables.num_microbatches
        self.tables = tables
        self.tiny = ROUNDING * max(tables.seconds, default=0.0)
        self.ready = [NEVER if needs else 0.0 for needs in tables.needs for _ in range(m)]
        # where every action has one input at most, its arrival is all there is to know
        self._left = [needs for needs in tables.needs for _ in range(m)] if max(tables.needs) > 1 else []
        self._arrived: dict[int, float] = {}
        self.rows: list[list[int]] = [[] for _ in range(p)]
        self.free, self.first = [0.0] * p, [NEVER] * p
        self.memory, self.peak = [0.0] * p, 0.0
        self.idle, self.idlest = [0.0] * p, 0.0
        self.now = 0.0
        self._events = [(0.0, r) for r in range(p)]
        self._link_free = [0.0] * tables.num_links
        self._promised: list[deque[int]] = [deque() for _ in range(p)]

    def run(self, choose: Choose, *, ask_all: bool = False, until: float = NEVER) -> None:
        """Run until nothing happens any more, or nothing up to the time ``until``.

        ``ask_all``: whenever something ends or arrives, idle ranks are asked again, too.
        """
        p, m = self.tables.num_ranks, self.tables.num_microbatches
        tiny, free, promised, events = self.tiny, self.free, self._promised, self._events
        ranks, has_groups = self.tables.ranks, any(len(x) > 1 for x in self.tables.ranks)
        pop = heapq.heappop
        while events:
            now, first = pop(events)
            if now > until:
                return
            if ask_all:
                while events and events[0][0] <= now + tiny:
                    pop(events)
            for rank in range(p) if ask_all else (first,):
                # busy: the end of what it runs is an event of its own, at which it is asked again
                if free[rank] > now + tiny:
                    continue
                if free[rank] > now:
                    now = free[rank]
                self.now = now
                # a promise binds: nothing else may run first, or two groups could each wait for the other
                if has_groups and promised[rank]:
                    self._start_together(promised[rank][0], now)
                    continue
                code = choose(rank, now)
                if code < 0:
                    continue
                if has_groups and len(ranks[code // m]) > 1:
                    for member in ranks[code // m]:
                        promised[member].append(code)
                    self._start_together(promised[rank][0], now)
                else:
                    self.start(rank, code, now)

    def wake(self) -> None:
        """Let the next run ask every rank again, after one in which nothing happened any more."""
        self._events += [(self.now, r) for r in range(self.tables.num_ranks)]

    def _start_together(self, code: int, now: float) -> None:
        """Start ``code`` if it is what every rank of its group has promised next, and all of them are free."""
        members = self.tables.ranks[code // self.tables.num_microbatches]
        if any(self._promised[r][0] != code or self.free[r] > now + self.tiny for r in members):
            return
        for r in members:
            self._promised[r].popleft()
        for r in members[1:]:
            self.start(r, code, now, sends=False)
        self.start(members[0], code, now)

    def start(self, rank: int, code: int, now: float, sends: bool = True) -> None:
        """Start ``code`` on a free rank; for choosers that start something on another rank than the one that is asked."""
        tables, events = self.tables, self._events
        kind = code // tables.num_microbatches
        row, push = self.rows[rank], heapq.heappush
        if row:
            self.idle[rank] += now - self.free[rank]
            if self.idle[rank] > self.idlest:
                self.idlest = self.idle[rank]
        else:
            self.first[rank] = now
        row.append(code)
        self.memory[rank] += tables.change[kind]
        if self.memory[rank] > self.peak:
            self.peak = self.memory[rank]
        end = self.free[rank] = now + tables.seconds[kind]
        push(events, (end, rank))
        # one member of a group sends for all
        if not sends:
            return
        for dst, link, seconds, occupied_s, gaps in tables.feeds[kind]:
            arrival = end
            if link >= 0:
                free = self._link_free[link]
                sent = free if free > end else end
                # latency delays the arrival alone; the next transfer waits only for the occupied part
                arrival, self._link_free[link] = sent + seconds, sent + occupied_s
            # the rank itself is asked anyhow when its action ends
            if dst != rank:
                push(events, (arrival, dst))
            for gap in gaps:
                if self._left:
                    self._arrive(code + gap, arrival)
                else:
                    self.ready[code + gap] = arrival

    def _arrive(self, code: int, at: float) -> None:
        """Note that one of the inputs of the action that stands for ``code`` arrives."""
        if self.tables.span:
            kind, microbatch = divmod(code, self.tables.num_microbatches)
            code -= microbatch % self.tables.span[kind]
        latest = self._arrived[code] = max(at, self._arrived.get(code, 0.0))
        self._left[code] -= 1
        if not self._left[code]:
            self.ready[code] = latest
