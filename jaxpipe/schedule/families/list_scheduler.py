"""List scheduling of F, B and W on a chain of ranks, under a memory limit and with real costs.

Time runs forward over all ranks at once. Whenever a rank is free it picks, among the next F, the next B and the next W (each
in microbatch order), by a :class:`Policy`; what can't start yet is known as soon as its producer starts, so a policy may
wait for it. Ideas: Qi et al. 2023, section 3.1 (W fills gaps; a rank may idle while it is not the idlest; the
depth of the warm-up is searched). It differs from theirs in working event by event instead of round by round, which
keeps the warm-up depth, the choice between F and B, and W's placement independent, and so also finds good orders far
below 1F1B's memory.

Memory is as in :class:`~jaxpipe.schedule.problem.Problem`; where more is kept for W than was held before, the larger is
reserved from F's start, so that B never has to wait for memory. Stage r runs on rank r.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from jaxpipe.schedule.problem import B, F, Problem, W
from jaxpipe.schedule.retime import Draft, peaks

Turn = Literal["backward", "forward", "alternate"]
_NEVER = float("inf")
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Policy:
    """How a free rank chooses.

    ``in_flight[r]``: most microbatches between F and B on rank r. ``turn``: which of F and B goes first when both can;
    ``alternate`` insists on F while fewer than ``in_flight`` are under way and on B otherwise. ``w_gap``: start W when at least
    this fraction of it fits before the next F or B arrives. ``balance``: when not all of W fits, also start it if waiting
    would make this rank the idlest. ``f_gap``: start F when at least this fraction of it fits before the next B arrives.
    """

    in_flight: tuple[int, ...]
    turn: Turn = "backward"
    w_gap: float = 0.5
    balance: bool = False
    f_gap: float = 0.0


@dataclass(frozen=True, slots=True)
class Bounded:
    """A problem and the most memory that a rank may hold, in units of its share of one microbatch."""

    problem: Problem
    limit: float

    @property
    def reserved(self) -> tuple[float, ...]:
        """Per rank, what an activation takes from F's start on."""
        return tuple(max(h, k) for h, k in zip(self.problem.held, self.problem.kept, strict=True))

    def fit(self, in_flight: Sequence[float]) -> tuple[int, ...]:
        """Depths usable in a :class:`Policy`: whole, within memory, at least 1, and never growing down the chain (a rank
        that waits for more forwards than the rank above may start would never run)."""
        fitted: list[int] = []
        for depth, held in zip(in_flight, self.reserved, strict=True):
            most = self.limit / held if held > 0 else self.problem.num_microbatches
            room = min(depth, most + _ROUNDING, fitted[-1] if fitted else self.problem.num_microbatches)
            fitted.append(max(1, int(room)))
        return tuple(fitted)


class _Ranks:
    """The clock and memory of every rank while a draft is built: starts ops and announces what they produce."""

    __slots__ = (
        "_b0",
        "_c",
        "_m",
        "_reserved",
        "_w0",
        "b",
        "b_ready",
        "down_free",
        "f",
        "f_ready",
        "first",
        "free",
        "memory",
        "peak",
        "rows",
        "up_free",
        "w",
    )

    def __init__(self, c: Bounded) -> None:
        p, m = c.problem.num_ranks, c.problem.num_microbatches
        self._c, self._m, self._b0, self._w0 = c.problem, m, B * p * m, W * p * m
        self._reserved = c.reserved
        self.f, self.b, self.w = [0] * p, [0] * p, [0] * p
        self.f_ready = [[0.0] * m] + [[_NEVER] * m for _ in range(p - 1)]
        self.b_ready = [[_NEVER] * m for _ in range(p)]
        self.free, self.first = [0.0] * p, [_NEVER] * p
        self.down_free, self.up_free = [0.0] * p, [0.0] * p
        self.memory, self.peak = [0.0] * p, 0.0
        self.rows: list[list[int]] = [[] for _ in range(p)]

    def start(self, rank: int, op: int, now: float) -> tuple[float, int]:
        """Run the next ``op`` of ``rank`` at ``now``. Returns when its result reaches a rank, and which (-1: none)."""
        c = self._c
        if op == W:
            self.rows[rank].append(self._w0 + rank * self._m + self.w[rank])
            self.free[rank] = now + c.w_s[rank]
            self.w[rank] += 1
            self.memory[rank] -= c.kept[rank]
            return 0.0, -1
        if op == B:
            i = self.b[rank]
            self.rows[rank].append(self._b0 + rank * self._m + i)
            self.b[rank] = i + 1
            self.memory[rank] += c.kept[rank] - self._reserved[rank]
            self.free[rank] = end = now + c.b_s[rank]
            if rank == 0:
                return 0.0, -1
            arrival = self.up_free[rank] = max(end, self.up_free[rank]) + c.up_s[rank]
            self.b_ready[rank - 1][i] = arrival
            return arrival, rank - 1
        i = self.f[rank]
        self.rows[rank].append(rank * self._m + i)
        if i == 0:
            self.first[rank] = now
        self.f[rank] = i + 1
        self.memory[rank] += self._reserved[rank]
        if self.memory[rank] > self.peak:
            self.peak = self.memory[rank]
        self.free[rank] = end = now + c.f_s[rank]
        if rank == c.num_ranks - 1:
            self.b_ready[rank][i] = end
            return 0.0, -1
        arrival = self.down_free[rank] = max(end, self.down_free[rank]) + c.down_s[rank]
        self.f_ready[rank + 1][i] = arrival
        return arrival, rank + 1

    def draft(self) -> Draft:
        span = max(end - first for end, first in zip(self.free, self.first, strict=True))
        most = self.peak if self._reserved == self._c.held else max(peaks(self._c, self.rows))
        return Draft(self.rows, max(self.free), span, most)


def list_schedule(bounded: Bounded, policy: Policy) -> Draft | None:
    """The order that ``policy`` leads to, with its times; None if it gets stuck (no policy made by ``Bounded.fit`` has)."""
    c, held = bounded.problem, bounded.reserved
    p, m = c.num_ranks, c.num_microbatches
    tiny = _ROUNDING * max(map(sum, zip(c.f_s, c.b_s, c.w_s, strict=True)))
    s = _Ranks(bounded)
    idle = [0.0] * p
    most_idle = 0.0
    in_flight, alternate, forward_first = policy.in_flight, policy.turn == "alternate", policy.turn == "forward"
    w_gap, f_gap, balance, room = policy.w_gap, policy.f_gap, policy.balance, bounded.limit + _ROUNDING
    left = 3 * p * m
    events = [(0.0, r) for r in range(p)]
    pop, push = heapq.heappop, heapq.heappush
    while events:
        now, r = pop(events)
        if s.free[r] > now + tiny:
            continue
        now = max(now, s.free[r])
        i, k = s.f[r], s.b[r]
        b_at = s.b_ready[r][k] if k < m else _NEVER
        f_at = _NEVER
        if i < m and i - k < in_flight[r]:
            full = s.memory[r] + held[r] > room
            if not full:
                f_at = s.f_ready[r][i]
            if alternate and (not full or s.w[r] < k):
                b_at = _NEVER
        soon = now + tiny
        if f_at <= soon and (forward_first or (b_at > soon and b_at >= now + f_gap * c.f_s[r])):
            op = F
        elif b_at <= soon:
            op = B
        elif s.w[r] < k:
            gap = min(b_at, f_at) + tiny - now
            w = c.w_s[r]
            if gap < w and gap < w_gap * w and not (balance and idle[r] + gap > most_idle):
                continue
            op = W
        else:
            continue
        if s.rows[r]:
            idle[r] += now - s.free[r]
            if idle[r] > most_idle:
                most_idle = idle[r]
        arrival, rank = s.start(r, op, now)
        if rank >= 0:
            push(events, (arrival, rank))
        push(events, (s.free[r], r))
        left -= 1
    return s.draft() if left == 0 else None
