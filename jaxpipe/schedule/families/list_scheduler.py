"""List scheduling of F, B and W on a chain of ranks, under a memory limit and with real costs.

Time runs forward over all ranks at once. Whenever a rank is free it picks, among the next F, the next B and the next W (each
in microbatch order), by a :class:`Policy`; what can't start yet is known as soon as its producer starts, so a policy may
wait for it. Ideas: Qi et al. 2023, section 3.1 (W fills gaps; a rank may idle while it is not the idlest; the
depth of the warm-up is searched). It differs from theirs in working event by event instead of round by round, which
keeps the warm-up depth, the choice between F and B, and W's placement independent, and so also finds good orders far
below 1F1B's memory.

Memory is counted in units of a rank's share: 1 from F's start, the fraction ``kept`` from B's end to W's end (a ``kept``
above 1 is reserved from F's start, so that B never has to wait for memory). Each rank has one stage.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from jaxpipe.schedule.costs import CostProfile

Rows = tuple[Sequence[str], ...]
Turn = Literal["backward", "forward", "alternate"]
_NEVER = float("inf")
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Chain:
    """One stage per rank: seconds of F, B, W, of transfers down (``down_s[r]``: r to r+1) and up (r+1 to r), and memory.

    ``held[r]``: units an activation takes from F's start to B's end; ``kept[r]``: from B's end to W's end; ``limit``: units.
    """

    f_s: tuple[float, ...]
    b_s: tuple[float, ...]
    w_s: tuple[float, ...]
    down_s: tuple[float, ...]
    up_s: tuple[float, ...]
    held: tuple[float, ...]
    kept: tuple[float, ...]
    num_microbatches: int
    limit: float

    @property
    def num_ranks(self) -> int:
        return len(self.f_s)

    @classmethod
    def of(cls, costs: CostProfile, microbatches: int, limit: float) -> Chain:
        """The chain of a one-to-one placement with these costs."""
        p = costs.num_stages
        kept = tuple(
            after / before if before > 0 else 1.0
            for before, after in zip(costs.residual_bytes, costs.w_residual_bytes, strict=True)
        )
        return cls(
            f_s=costs.f_s,
            b_s=costs.b_s,
            w_s=costs.w_s,
            down_s=tuple(costs.transfer_s(r, r + 1, r) for r in range(p - 1)),
            up_s=tuple(costs.transfer_s(r + 1, r, r) for r in range(p - 1)),
            held=tuple(max(1.0, k) for k in kept),
            kept=kept,
            num_microbatches=microbatches,
            limit=limit,
        )

    def least_makespan_and_span(self) -> tuple[float, float]:
        """What no order can beat: every rank does its work, none starts before the first microbatch reaches it."""
        reach = makespan = span = 0.0
        for r in range(self.num_ranks):
            work = self.num_microbatches * (self.f_s[r] + self.b_s[r] + self.w_s[r])
            makespan, span = max(makespan, reach + work), max(span, work)
            if r < self.num_ranks - 1:
                reach += self.f_s[r] + self.down_s[r]
        return makespan, span

    def fit(self, in_flight: Sequence[float]) -> tuple[int, ...]:
        """Depths usable in a :class:`Policy`: whole, within memory, at least 1, and never growing down the chain (a rank
        that waits for more forwards than the rank above may start would never run)."""
        fitted: list[int] = []
        for depth, held in zip(in_flight, self.held, strict=True):
            room = min(depth, self.limit / held + _ROUNDING, fitted[-1] if fitted else self.num_microbatches)
            fitted.append(max(1, int(room)))
        return tuple(fitted)


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
class Draft:
    """Op names per rank with what they take: seconds until the last end, longest rank span, peak memory units."""

    rows: Rows
    makespan: float
    span: float
    peak: float

    @property
    def rank_key(self) -> tuple[float, float, float]:
        """Smaller is better: makespan, then span, then peak, each compared at nine digits."""
        return _nine_digits(self.makespan), _nine_digits(self.span), _nine_digits(self.peak)


def _nine_digits(x: float) -> float:
    return float(f"{x:.9g}")


class _Ranks:
    """The clock and memory of every rank while a draft is built: starts ops and announces what they produce."""

    __slots__ = (
        "_c",
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

    def __init__(self, c: Chain) -> None:
        p, m = c.num_ranks, c.num_microbatches
        self._c = c
        self.f, self.b, self.w = [0] * p, [0] * p, [0] * p
        self.f_ready = [[0.0] * m] + [[_NEVER] * m for _ in range(p - 1)]
        self.b_ready = [[_NEVER] * m for _ in range(p)]
        self.free, self.first = [0.0] * p, [_NEVER] * p
        self.down_free, self.up_free = [0.0] * p, [0.0] * p
        self.memory, self.peak = [0.0] * p, 0.0
        self.rows: list[list[str]] = [[] for _ in range(p)]

    def start(self, rank: int, op: str, now: float) -> tuple[float, int]:
        """Run the next ``op`` of ``rank`` at ``now``. Returns when its result reaches a rank, and which (-1: none)."""
        c = self._c
        self.rows[rank].append(op)
        if op == "W":
            self.free[rank] = now + c.w_s[rank]
            self.w[rank] += 1
            self.memory[rank] -= c.kept[rank]
            return 0.0, -1
        if op == "B":
            i = self.b[rank]
            self.b[rank] = i + 1
            self.memory[rank] += c.kept[rank] - c.held[rank]
            self.free[rank] = end = now + c.b_s[rank]
            if rank == 0:
                return 0.0, -1
            arrival = self.up_free[rank] = max(end, self.up_free[rank]) + c.up_s[rank - 1]
            self.b_ready[rank - 1][i] = arrival
            return arrival, rank - 1
        i = self.f[rank]
        if i == 0:
            self.first[rank] = now
        self.f[rank] = i + 1
        self.memory[rank] += c.held[rank]
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
        return Draft(tuple(self.rows), max(self.free), span, self.peak)


def list_schedule(c: Chain, policy: Policy) -> Draft | None:
    """The order that ``policy`` leads to, with its times; None if it gets stuck (no policy made by ``Chain.fit`` has)."""
    p, m = c.num_ranks, c.num_microbatches
    tiny = _ROUNDING * max(map(sum, zip(c.f_s, c.b_s, c.w_s, strict=True)))
    s = _Ranks(c)
    idle = [0.0] * p
    most_idle = 0.0
    in_flight, alternate, forward_first = policy.in_flight, policy.turn == "alternate", policy.turn == "forward"
    w_gap, f_gap, balance, room = policy.w_gap, policy.f_gap, policy.balance, c.limit + _ROUNDING
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
            full = s.memory[r] + c.held[r] > room
            if not full:
                f_at = s.f_ready[r][i]
            if alternate and (not full or s.w[r] < k):
                b_at = _NEVER
        soon = now + tiny
        if f_at <= soon and (forward_first or (b_at > soon and b_at >= now + f_gap * c.f_s[r])):
            op = "F"
        elif b_at <= soon:
            op = "B"
        elif s.w[r] < k:
            gap = min(b_at, f_at) + tiny - now
            w = c.w_s[r]
            if gap < w and gap < w_gap * w and not (balance and idle[r] + gap > most_idle):
                continue
            op = "W"
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


def replay(c: Chain, rows: Rows) -> Draft | None:
    """The times of a fixed order; None if it needs more memory than the limit.

    The order must be complete and free of deadlock.
    """
    s = _Ranks(c)
    p = c.num_ranks
    position = [0] * p
    waiting = list(range(p))
    while waiting:
        r = waiting.pop()
        row = rows[r]
        while position[r] < len(row):
            op = row[position[r]]
            ready = s.f_ready[r][s.f[r]] if op == "F" else s.b_ready[r][s.b[r]] if op == "B" else 0.0
            if ready == _NEVER:
                break
            _, rank = s.start(r, op, max(s.free[r], ready))
            position[r] += 1
            if rank >= 0 and rank not in waiting:
                waiting.append(rank)
    assert all(position[r] == len(rows[r]) for r in range(p)), "replay of an order that deadlocks"
    return s.draft() if s.peak <= c.limit + _ROUNDING else None
