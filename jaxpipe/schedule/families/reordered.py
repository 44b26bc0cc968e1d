"""Orders near a known one: the same actions on the same ranks, list-scheduled with real costs, taken only if they dominate.

A published order is drawn for equal stages and free transfers. :func:`improved` lets each rank deviate from it: whenever a
rank is free it starts the best of what has arrived, by one of a few :class:`Rule` s, and never holds more activations than
the known order's peak. Each stage keeps its own order of microbatches, so gradients add up in the same order. What comes
out replaces the known order only where makespan, longest span and peak are all no worse
(:func:`~jaxpipe.schedule.retime.best_of`). A rule that runs into a deadlock (the limit can cause one) is dropped.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

from jaxpipe.schedule.problem import BW, B, CodeRows, F, Problem, W
from jaxpipe.schedule.retime import Draft, Retimer, best_of

_NEVER = float("inf")
_LATER = 1 << 60
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Rule:
    """How a free rank picks among what has arrived.

    ``backward_first``: a backward before any forward; otherwise the known order decides. ``deep_first``: among forwards, the
    furthest stage, not the known order. ``patient``: rather than start a forward, wait for a backward that arrives before
    that forward would end. ``loose``: a stage may have more microbatches in flight than in the known order. ``reserve``: a
    forward leaves room on its rank for one microbatch of every later stage there that has none; then (if the limit is that
    large) what has gone furthest can always go on, and there is no deadlock.
    """

    backward_first: bool = False
    deep_first: bool = False
    patient: bool = False
    loose: bool = False
    reserve: bool = False


RULES = (
    Rule(),
    Rule(loose=True),
    Rule(loose=True, reserve=True),
    Rule(loose=True, patient=True),
    Rule(loose=True, patient=True, reserve=True),
    Rule(loose=True, backward_first=True, reserve=True),
    Rule(loose=True, backward_first=True, deep_first=True, reserve=True),
)
"""The rules worth trying: on 240 random problems all 24 combinations together gain 4.477% on average, these 4.475%."""


def improved(problem: Problem, rows: CodeRows, rules: Iterable[Rule] = RULES) -> Draft:
    """The best order that the rules find from ``rows`` (which must run), itself if none dominates it."""
    retimer = Retimer(problem)
    known = retimer.draft(rows)
    assert known is not None, "the known order deadlocks"
    tables = _Tables(problem, known)
    best = best_of((retimer.draft(found) for rule in rules if (found := _reordered(tables, rule))), known)
    assert best is not None
    return best


def reorder(problem: Problem, known: Draft, rule: Rule) -> list[list[int]] | None:
    """The order that ``rule`` makes of a known one; None if it runs into a deadlock."""
    return _reordered(_Tables(problem, known), rule)


def _reordered(tables: _Tables, rule: Rule) -> list[list[int]] | None:
    run = _Run(tables, rule)
    return run.rows if run.finished() else None


class _Tables:
    """What all rules look up. A kind is ``op * number of replicas + replica``; a code divided by m."""

    def __init__(self, problem: Problem, known: Draft) -> None:
        n, stages = problem.num_replicas, problem.placement.num_stages
        self.problem, self.known = problem, known
        self.seconds = (*problem.f_s, *problem.b_s, *problem.w_s, *problem.bw_s)
        self.queues = [_queues(problem, row) for row in known.rows]
        self.place = {code: k for row in known.rows for k, code in enumerate(row)}
        self.turn = _turns(problem, known.rows)
        self.cap = _in_flight(problem, known.rows)
        self.deeper = [
            [j for j in problem.replicas_of(rank) if (j % stages, j) > (k % stages, k) and problem.microbatches(j)]
            for k, rank in enumerate(problem.rank)
        ]
        held, kept = problem.held, problem.kept
        left = (k - h for h, k in zip(held, kept, strict=True))
        self.change = (*held, *left, *(-k for k in kept), *(-h for h in held))
        # per kind: the kind that its result makes ready, on which rank, and the seconds of the transfer
        self.feeds: list[tuple[int, int, float] | None] = [None] * (4 * n)
        for k, rank in enumerate(problem.rank):
            if k % stages < stages - 1:
                self.feeds[F * n + k] = k + 1, problem.rank[k + 1], problem.down_s[k]
            else:
                self.feeds[F * n + k] = B * n + k, rank, 0.0
            if k % stages:
                self.feeds[B * n + k] = self.feeds[BW * n + k] = B * n + k - 1, problem.rank[k - 1], problem.up_s[k]

    def priorities(self, rule: Rule) -> dict[int, int]:
        """Of every code; the smallest goes first."""
        if not rule.backward_first:
            return self.place
        n, m, stages = self.problem.num_replicas, self.problem.num_microbatches, self.problem.placement.num_stages
        later = max(self.place.values()) + stages + 1
        group = [later] * n + [0] * n + [2 * later] * n + [0] * n
        if not rule.deep_first:
            return {code: group[code // m] + place for code, place in self.place.items()}
        return {
            code: later + stages - code // m % stages if code < n * m else group[code // m] + place
            for code, place in self.place.items()
        }


class _Run:
    """One pass of list scheduling. Times are seconds, events are ``(time, rank)``: a rank is free or something arrives.

    ``ready[code]``: when what it waits for is there; a BW uses the entry of its B.
    """

    def __init__(self, tables: _Tables, rule: Rule) -> None:
        problem = tables.problem
        n, m, p, stages = (
            problem.num_replicas,
            problem.num_microbatches,
            problem.num_ranks,
            problem.placement.num_stages,
        )
        self.tables, self.patient, self.reserve, self.n, self.m = tables, rule.patient, rule.reserve, n, m
        self.priority = tables.priorities(rule)
        self.limit = tables.known.peak + _ROUNDING
        self.cap = [m] * n if rule.loose else tables.cap
        self.queues = [[queue.copy() for queue in queues] for queues in tables.queues]
        self.added = [0] * (p * stages)
        self.in_flight, self.live, self.free = [0] * n, [0.0] * p, [0.0] * p
        self.link_free: dict[tuple[int, int], float] = {}
        self.ready = [_NEVER] * (3 * n * m)
        for k in range(0, n, stages):
            self.ready[k * m : (k + 1) * m] = [0.0] * m
        self.rows: list[list[int]] = [[] for _ in range(p)]
        self.events = [(0.0, rank) for rank in range(p)]
        while self.events:
            now, rank = heapq.heappop(self.events)
            if now >= self.free[rank] and (queue := self._pick(rank, now)) is not None:
                self._start(rank, queue.pop(), now)

    def finished(self) -> bool:
        return all(not queue for queues in self.queues for queue in queues)

    def _pick(self, rank: int, now: float) -> list[int] | None:
        """The queue whose next action starts now."""
        m, n, turns, added = self.m, self.n, self.tables.turn, self.added
        best, best_priority, awaited = None, _LATER, _NEVER
        for queue in self.queues[rank]:
            if not queue:
                continue
            code = queue[-1]
            kind = code // m
            ready = self.ready[code - 2 * n * m if kind >= BW * n else code]
            if ready > now:
                if kind >= n and not W * n <= kind < BW * n:
                    awaited = min(awaited, ready)
            elif self.priority[code] < best_priority:
                in_turn = kind < W * n or turns[code][1] == added[turns[code][0]]
                if self._fits(rank, kind) if kind < n else in_turn:
                    best, best_priority = queue, self.priority[code]
        if self.patient and best is not None:
            kind = best[-1] // m
            if kind < n and now + self.tables.seconds[kind] > awaited:
                return None
        return best

    def _fits(self, rank: int, replica: int) -> bool:
        if self.in_flight[replica] >= self.cap[replica]:
            return False
        held = self.tables.problem.held
        taken = self.live[rank] + held[replica]
        if self.reserve:
            taken += sum(held[k] for k in self.tables.deeper[replica] if not self.in_flight[k])
        return taken <= self.limit

    def _start(self, rank: int, code: int, now: float) -> None:
        tables, n, m = self.tables, self.n, self.m
        kind, i = divmod(code, m)
        self.rows[rank].append(code)
        end = self.free[rank] = now + tables.seconds[kind]
        heapq.heappush(self.events, (end, rank))
        self.live[rank] += tables.change[kind]
        if kind < n:
            self.in_flight[kind] += 1
        elif not W * n <= kind < BW * n:
            self.in_flight[kind % n] -= 1
        if kind >= W * n:
            self.added[tables.turn[code][0]] += 1
        elif kind >= B * n:
            self.ready[code + n * m] = end
        feeds = tables.feeds[kind]
        if feeds is not None:
            made, there, seconds = feeds
            if there != rank:
                link = rank, there
                end = self.link_free[link] = max(end, self.link_free.get(link, 0.0)) + seconds
                heapq.heappush(self.events, (end, there))
            self.ready[made * m + i] = end


def _queues(problem: Problem, row: Iterable[int]) -> list[list[int]]:
    """The row's forwards, backwards and W of each replica, each in the row's order, next one last."""
    queues: dict[tuple[int, int], list[int]] = {}
    for code in row:
        op, replica, _ = problem.decode(code)
        queues.setdefault((B if op == BW else op, replica), []).append(code)
    return [queue[::-1] for queue in queues.values()]


def _turns(problem: Problem, rows: CodeRows) -> dict[int, tuple[int, int]]:
    """Of every W and BW: its accumulator and which of that accumulator's additions it is, as in the rows.

    Replicas of a stage on the same rank (the middle one of two opposite chains) share an accumulator.
    """
    stages = problem.placement.num_stages
    turns: dict[int, tuple[int, int]] = {}
    for rank, row in enumerate(rows):
        count = [0] * stages
        for code in row:
            op, replica, _ = problem.decode(code)
            if op in (W, BW):
                stage = replica % stages
                turns[code] = rank * stages + stage, count[stage]
                count[stage] += 1
    return turns


def _in_flight(problem: Problem, rows: CodeRows) -> list[int]:
    """Per replica, the most microbatches between their F and the end of their backward."""
    now, most = [0] * problem.num_replicas, [0] * problem.num_replicas
    for row in rows:
        for code in row:
            op, replica, _ = problem.decode(code)
            now[replica] += (op == F) - (op in (B, BW))
            most[replica] = max(most[replica], now[replica])
    return most
