"""List scheduling with several chunks per rank: F, B and W of any chain of stages, under a memory limit and with real costs.

Time runs forward over all ranks at once. Whenever a rank is free it picks, among the next F and the next B of each of its
chunks and the oldest W, by a :class:`Policy`; what can't start yet is known as soon as its producer starts, so W fill the time
until then. For one chunk per rank :mod:`~jaxpipe.schedule.families.list_scheduler` does more; the idea is the same (Qi et al.
2023, section 3.1). :func:`list_schedule_chunks` tries a grid of policies, then lays W anew into the best orders of F and B.

It can't get stuck for lack of memory: an F leaves room for one later F of each later chunk on its rank, so the oldest
microbatch always gets through. Placements: one flow (circular, V, wave, explicit chains). Memory as in
:class:`~jaxpipe.schedule.problem.Problem`; ``kept`` above ``held`` is reserved from F's start.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import ceil
from typing import Literal

from jaxpipe.schedule.families.weight_filling import WeightFilling, balanced, order_of
from jaxpipe.schedule.problem import B, F, Problem, W
from jaxpipe.schedule.retime import Draft, Retimer, best_of

Turn = Literal["backward", "forward", "alternate"]
Costs = Literal["real", "no transfers", "equal"]
_NEVER = float("inf")
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Policy:
    """How a free rank chooses.

    ``turn``: which of F and B goes first when both can; ``alternate``: the one that did not go last. Of F that can start the
    latest chunk's goes first; ``backward``: which chunk's B does. ``w_gap``: start W when at least this fraction of it fits
    before the next F or B arrives. ``balance``: also start it if waiting would make this rank the idlest. ``costs``: what
    the order is made for: real costs, those without transfers, or F = B = W = 1 without transfers. ``trips``: a stage may have
    this many times as many microbatches between F and B as it needs to be busy when its first one comes back (rounded up).
    """

    turn: Turn = "alternate"
    backward: Literal["late", "early"] = "late"
    w_gap: float = 1.0
    balance: bool = True
    costs: Costs = "real"
    trips: float = _NEVER


class _State:
    """Counters, arrivals, clocks and memory of all ranks while an order is made."""

    __slots__ = (
        "arrives",
        "b",
        "f",
        "free",
        "held",
        "idle",
        "last",
        "memory",
        "pending",
        "pr",
        "rows",
        "sent",
        "stages",
    )

    def __init__(self, problem: Problem) -> None:
        n, m, p = problem.num_replicas, problem.num_microbatches, problem.num_ranks
        self.pr = problem
        self.held = [max(h, k) for h, k in zip(problem.held, problem.kept, strict=True)]
        self.stages = [problem.replicas_of(r) for r in range(p)]
        self.f, self.b = [0] * n, [0] * n
        self.arrives = [0.0] * m + [_NEVER] * ((2 * n - 1) * m)
        self.free, self.idle, self.memory = [0.0] * p, [0.0] * p, [0.0] * p
        self.sent: dict[tuple[int, int], float] = {}
        self.rows: list[list[int]] = [[] for _ in range(p)]
        self.pending: list[deque[int]] = [deque() for _ in range(p)]
        self.last = [F] * p

    def run(self, rank: int, op: int, stage: int, now: float) -> tuple[float, int]:
        """Start the next ``op`` of ``stage``. Returns when its result reaches another rank, and which (-1: none)."""
        pr = self.pr
        n, m = pr.num_replicas, pr.num_microbatches
        if op == W:
            self.rows[rank].append(self.pending[rank].popleft())
            self.memory[rank] -= pr.kept[stage]
            self.free[rank] = now + pr.w_s[stage]
            return 0.0, -1
        self.last[rank] = op
        if op == F:
            code, to, transfer_s = stage * m + self.f[stage], stage + 1, pr.down_s[stage]
            self.f[stage] += 1
            self.memory[rank] += self.held[stage]
            self.free[rank] = end = now + pr.f_s[stage]
            made = code + m if to < n else code + n * m
        else:
            code, to, transfer_s = (n + stage) * m + self.b[stage], stage - 1, pr.up_s[stage]
            self.b[stage] += 1
            self.memory[rank] += pr.kept[stage] - self.held[stage]
            self.pending[rank].append(code + n * m)
            self.free[rank] = end = now + pr.b_s[stage]
            made = code - m
        self.rows[rank].append(code)
        if not 0 <= to < n or pr.rank[to] == rank:
            if to >= 0:
                self.arrives[made] = end
            return 0.0, -1
        there = pr.rank[to]
        arrival = self.sent[rank, there] = max(end, self.sent.get((rank, there), 0.0)) + transfer_s
        self.arrives[made] = arrival
        return arrival, there


def least_limit(problem: Problem) -> float:
    """What one microbatch needs on the rank where it needs most, in units of one rank's share: below it nothing fits."""
    need = [0.0] * problem.num_ranks
    for r, held, kept in zip(problem.rank, problem.held, problem.kept, strict=True):
        need[r] += max(held, kept)
    return max(need)


def list_order(problem: Problem, limit: float, policy: Policy) -> list[list[int]] | None:
    """The rows that ``policy`` leads to; None if one microbatch does not fit the limit (units of one rank's share)."""
    ideal = _ideal(problem, policy.costs)
    s = _State(ideal)
    n, m, p = ideal.num_replicas, ideal.num_microbatches, ideal.num_ranks
    if least_limit(problem) > limit + _ROUNDING:
        return None
    needs = [sum(s.held[k] for k in s.stages[ideal.rank[q]] if k >= q) for q in range(n)]
    forwards = [stages[::-1] for stages in s.stages]
    backwards = [stages[::-1] if policy.backward == "late" else stages for stages in s.stages]
    depth = _depths(ideal, policy.trips)
    tiny = _ROUNDING * max((*ideal.f_s, *ideal.b_s, *ideal.w_s))
    room, arrives, memory, free = limit + _ROUNDING, s.arrives, s.memory, s.free
    alternate, forward_first = policy.turn == "alternate", policy.turn == "forward"
    idlest = 0.0
    events = [(0.0, r) for r in range(p)]
    pop, push = heapq.heappop, heapq.heappush
    while events:
        now, r = pop(events)
        if free[r] > now + tiny:
            continue
        now = max(now, free[r])
        soon = now + tiny
        b_at, b_stage = _NEVER, -1
        for q in backwards[r]:
            if s.b[q] < s.f[q]:
                at = arrives[(n + q) * m + s.b[q]]
                if at < b_at and b_at > soon:
                    b_at, b_stage = at, q
        f_at, f_stage, full = _NEVER, -1, False
        for q in forwards[r]:
            if s.f[q] < m and s.f[q] - s.b[q] < depth[q]:
                at = arrives[q * m + s.f[q]]
                if memory[r] + needs[q] > room:
                    full = full or at <= soon
                elif at < f_at and f_at > soon:
                    f_at, f_stage = at, q
        f_turn = forward_first or (alternate and s.last[r] == B)
        waiting = s.pending[r]
        if f_at <= soon and (f_turn or b_at > soon):
            op, stage = F, f_stage
        elif b_at <= soon and not (full and f_turn and alternate and waiting):
            op, stage = B, b_stage
        elif waiting:
            op, stage = W, waiting[0] // m - n - n
            gap = min(b_at, f_at) + tiny - now
            fits = b_at <= soon or gap >= policy.w_gap * ideal.w_s[stage]
            if not fits and not (policy.balance and s.idle[r] + gap > idlest + 2 * tiny):
                continue
        else:
            continue
        if s.rows[r]:
            s.idle[r] += now - free[r]
            idlest = max(idlest, s.idle[r])
        arrival, there = s.run(r, op, stage, now)
        if there >= 0:
            push(events, (arrival, there))
        push(events, (free[r], r))
    return s.rows if sum(map(len, s.rows)) == 3 * n * m else None


def _depths(problem: Problem, trips: float) -> list[float]:
    """Per stage, the most microbatches between F and B: ``trips`` times the round trip to the last stage, in periods."""
    n = problem.num_replicas
    work = [0.0] * problem.num_ranks
    for q, r in enumerate(problem.rank):
        work[r] += problem.f_s[q] + problem.b_s[q] + problem.w_s[q]
    period, trip = max(work), 0.0
    if trips == _NEVER or period <= 0:
        return [_NEVER] * n
    depths = []
    for q in reversed(range(n)):
        trip += problem.f_s[q] + problem.b_s[q]
        depths.append(max(1.0, ceil(trips * trip / period - _ROUNDING)))
        if q:
            trip += problem.down_s[q - 1] + problem.up_s[q]
    return depths[::-1]


def _ideal(problem: Problem, costs: Costs) -> Problem:
    if costs == "real":
        return problem
    none = (0.0,) * problem.num_replicas
    ideal = replace(problem, down_s=none, up_s=none)
    if costs == "no transfers":
        return ideal
    one = (1.0,) * problem.num_replicas
    return replace(ideal, f_s=one, b_s=one, w_s=one)


_POLICIES = (
    Policy("alternate", "late", 0.5, True, "no transfers"),
    Policy("forward", "late", 0.5, True, "no transfers", 1.15),
    Policy("forward", "late", 0.5, True, "no transfers", 2.0),
    Policy("forward", "late", 1.0, False, "real", 1.0),
    Policy("alternate", "early", 0.5, True, "real"),
    Policy("forward", "early", 1.0, True, "equal", 1.3),
    Policy("backward", "early", 0.5, True, "no transfers", 0.8),
    Policy("forward", "early", 1.0, True, "equal", 2.5),
    Policy("forward", "early", 0.5, True, "real", 1.75),
    Policy("forward", "early", 0.5, True, "no transfers", 1.5),
)
"""Found by greedy selection on 60 random problems (V, circular, wave; p 3-8; costs even, from Table 5, random; transfers
0-0.2 F; limits 0.4p-1.3p): each improves most on those before it; together within 0.3% of all 648 that were tried."""


def list_schedule_chunks(problem: Problem, limit: float, policies: Iterable[Policy] = _POLICIES) -> Draft | None:
    """The best order found under ``limit`` (peak activations, units of one rank's share of a microbatch).

    None if one microbatch does not fit. For any one-flow chain of stages with any number of chunks per rank.
    """
    return best_of(chunk_drafts(problem, limit, policies))


def chunk_drafts(problem: Problem, limit: float, policies: Iterable[Policy] = _POLICIES) -> list[Draft]:
    """For each policy its draft, and the one with W laid anew where that gives another."""
    retimer = Retimer(problem)
    filling = WeightFilling(problem, limit, retimer)
    drafts = []
    for policy in policies:
        rows = list_order(problem, limit, policy)
        if rows is None:
            return []
        listed = retimer.draft(rows)
        assert listed is not None, "an order made by running it deadlocks"
        drafts.append(listed)
        filled = balanced(filling, order_of(problem, rows, retimer))
        again = filled and filling.draft(filled.rows)
        if again:
            drafts.append(again)
    return drafts
