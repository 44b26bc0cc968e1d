"""Reordering with real costs: bubbles are filled by passes from later in the row, and W moves to where it costs least.

Source: `controllable-memory.txt` section 2 and appendix C. There, cells of a squeezed grid are looked at from left to right,
and a vacant one takes the first pass that may move there. Here time runs forward over all ranks at once, in seconds: a rank
that is free runs the next pass of its row if that is ready; otherwise it fills the time with a pass from later in the row that
is ready and that memory leaves room for (F moves into the warm-up, B and W into the cool-down), or with a waiting W. One run
takes a few microseconds an action, so several :class:`Rule` s can be tried and the best kept.

Memory: an F may move to the front only if the row, with each W directly after its B, stays within the limit; Ws that were put
off are run before an F that would not fit. So the result holds at most the limit, or what the given order needs at least if
that is more, and it never gets stuck.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

from jaxpipe.schedule.problem import BW, B, CodeRows, F, Problem, W
from jaxpipe.schedule.retime import Draft, Retimer, best_of

_NEVER = float("inf")
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Rule:
    """How a rank fills time while the next pass of its row is not ready.

    ``forward``, ``backward``: F, B (or BW) from later in the row may move up. ``pull_gap``: but only if the wait is at least
    this fraction of it. ``w_gap``: a waiting W runs if the wait is at least this fraction of it (0: always).
    ``lazy``: W loses its place in the row and runs only in waits, when memory needs it, and at the end.
    ``backlog``: with ``lazy``, the most Ws that may wait per rank. ``reserve``: before its first B a rank that moves up an F
    leaves room for those of its last chunk that can reach it until then, one for itself and one for each later stage, as far
    as half of the memory goes.
    """

    forward: bool = True
    backward: bool = True
    pull_gap: float = 0.0
    w_gap: float = 1.0
    lazy: bool = True
    backlog: float = _NEVER
    reserve: bool = False


AS_GIVEN = Rule(forward=False, backward=False, w_gap=_NEVER, lazy=False)


@dataclass(frozen=True, slots=True)
class Phases:
    """A rule for each phase: ``warm_up`` until stage 0 starts its first B, ``cool_down`` from its last F on."""

    warm_up: Rule
    steady: Rule
    cool_down: Rule


RULES = (
    Rule(),
    Rule(w_gap=0.5),
    Rule(lazy=False),
    Rule(lazy=False, pull_gap=1.0),
    Rule(w_gap=0.0),
)
IN_PLACE = tuple(Rule(forward=False, backward=False, w_gap=g) for g in (1.0, 0.5, 0.25, 0.0))


class Reorderer:
    """The tables of one problem, made once; call :meth:`rows` for each order and rule, or :meth:`best` for several rules."""

    __slots__ = ("_hold", "_kept", "_links", "_seconds", "_tiny", "problem", "retimer")

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.retimer = Retimer(problem)
        n = problem.num_replicas
        self._seconds = [*problem.f_s, *problem.b_s, *problem.w_s, *problem.bw_s]
        self._tiny = _ROUNDING * max(self._seconds, default=0.0)
        # an F reserves what its activation takes at most, so that a B never has to wait for memory
        self._hold = [max(h, k) for h, k in zip(problem.held, problem.kept, strict=True)]
        self._kept = list(problem.kept)
        stages = problem.placement.num_stages
        self._links: list[tuple[int, int, float]] = [(-1, -1, 0.0)] * (
            4 * n
        )  # per kind: kind it makes ready, rank, seconds
        for k in range(n):
            s = k % stages
            if s < stages - 1:
                self._links[F * n + k] = (F * n + k + 1, problem.rank[k + 1], problem.down_s[k])
            else:
                self._links[F * n + k] = (B * n + k, problem.rank[k], 0.0)
            if s > 0:
                for op in (B, BW):
                    self._links[op * n + k] = (B * n + k - 1, problem.rank[k - 1], problem.up_s[k])

    def best(
        self, rows: CodeRows, limit: float, rules: Iterable[Rule | Phases] = RULES, anchor: Draft | None = None
    ) -> Draft | None:
        """The best draft of several rules that stays within ``limit``, no worse than ``anchor`` if one is given."""
        drafts = (self.retimer.draft(self.rows(rows, limit, rule)) for rule in rules)
        return best_of((d for d in drafts if d is not None and d.peak <= limit * (1 + _ROUNDING)), anchor)

    def rows(self, rows: CodeRows, limit: float, rule: Rule | Phases) -> list[list[int]]:
        """Rows in which bubbles are filled by ``rule``, within ``limit`` (units of :func:`~jaxpipe.schedule.retime.peaks`).

        ``rows`` must be complete and free of deadlock.
        """
        problem = self.problem
        m, n, p = problem.num_microbatches, problem.num_replicas, problem.num_ranks
        seconds, hold, kept, links, tiny = self._seconds, self._hold, self._kept, self._links, self._tiny
        room = limit * (1 + _ROUNDING)
        first_w = W * n
        ready = [_NEVER] * (3 * n * m)
        for first in range(0, n, problem.placement.num_stages):
            ready[first * m : (first + 1) * m] = [0.0] * m
        phases = rule if isinstance(rule, Phases) else Phases(rule, rule, rule)
        now_rule, first_b, last_f = phases.warm_up, {B * n * m, BW * n * m}, F * n * m + m - 1
        ranks = [_Rank(self, row) for row in rows]
        link_free: dict[tuple[int, int], float] = {}
        events = [(0.0, r) for r in range(p)]
        pop, push = heapq.heappop, heapq.heappush
        while events:
            now, r = pop(events)
            s = ranks[r]
            if s.free > now + tiny:
                continue
            if now < s.free:
                now = s.free
            row, done, head = s.row, s.done, s.head
            lazy = now_rule.lazy
            while head < len(row) and (done[head] or (lazy and first_w <= row[head] // m < BW * n)):
                head += 1
            s.head = head
            chosen = -1
            if head < len(row):
                code = row[head]
                kind = code // m
                at = 0.0 if first_w <= kind < BW * n else ready[code if kind < first_w else code - (BW - B) * n * m]
                if at <= now + tiny:
                    chosen = code
                    if s.waiting and (
                        (kind < n and s.live + hold[kind] > room) or (lazy and len(s.waiting) > now_rule.backlog)
                    ):
                        chosen = s.waiting[0]
                else:
                    chosen = s.filler(now, at - now, room, ready, now_rule, self)
            elif s.waiting:
                chosen = s.waiting[0]
            if chosen < 0:
                continue
            kind = chosen // m
            s.run(chosen, kind, hold, kept, n)
            s.free = end = now + seconds[kind]
            push(events, (end, r))
            if chosen in first_b and now_rule is phases.warm_up:
                now_rule = phases.steady
            if chosen == last_f:
                now_rule = phases.cool_down
            target, there, link_s = links[kind]
            if target >= 0:
                arrival = end
                if there != r:
                    lane = (r, there)
                    arrival = link_free[lane] = max(end, link_free.get(lane, 0.0)) + link_s
                    push(events, (arrival, there))
                ready[target * m + chosen % m] = arrival
        return [s.out for s in ranks]


class _Rank:
    """A rank's row and how far it has come.

    ``profile[k]``: memory once ``row[k]`` has started, if each W came directly after its B. ``waiting``: Ws whose B has run.
    """

    __slots__ = (
        "backward_begun",
        "deepest",
        "done",
        "free",
        "head",
        "live",
        "m",
        "n",
        "next",
        "out",
        "position",
        "profile",
        "queues",
        "row",
        "waiting",
    )

    def __init__(self, tables: Reorderer, row: Iterable[int]) -> None:
        problem = tables.problem
        m, n = problem.num_microbatches, problem.num_replicas
        self.m, self.n = m, n
        self.row = list(row)
        self.position = {code: k for k, code in enumerate(self.row)}
        self.queues: dict[int, list[int]] = {}
        self.profile = []
        live = 0.0
        for code in self.row:
            kind = code // m
            if not W * n <= kind < BW * n:
                self.queues.setdefault(kind, []).append(code)
                live += tables._hold[kind] if kind < n else -tables._hold[kind % n]
            self.profile.append(live)
        self.next = dict.fromkeys(self.queues, 0)
        self.deepest = max((kind for kind in self.queues if kind < n), default=0)
        self.backward_begun = False
        self.done = bytearray(len(self.row))
        self.waiting: list[int] = []
        self.out: list[int] = []
        self.head = 0
        self.free = self.live = 0.0

    def filler(self, now: float, gap: float, room: float, ready: list[float], rule: Rule, tables: Reorderer) -> int:
        """What to run while the head of the row is ``gap`` seconds away; -1 to wait."""
        m, n, tiny, seconds = self.m, self.n, tables._tiny, tables._seconds
        best, best_at = -1, len(self.row)
        for kind, queue in self.queues.items():
            k = self.next[kind]
            if k == len(queue):
                continue
            code = queue[k]
            at = self.position[code]
            if at >= best_at or gap < rule.pull_gap * seconds[kind] - tiny:
                continue
            if kind < n:
                if not rule.forward or ready[code] > now + tiny:
                    continue
                reserved = self._reserved(kind, tables, room) if rule.reserve else 0.0
                if not self._fits(at, tables._hold[kind], room, reserved):
                    continue
            elif not rule.backward or ready[code if kind < W * n else code - (BW - B) * n * m] > now + tiny:
                continue
            best, best_at = code, at
        if best < 0 and self.waiting and gap >= rule.w_gap * seconds[self.waiting[0] // m] - tiny:
            return self.waiting[0]
        return best

    def _reserved(self, kind: int, tables: Reorderer, room: float) -> float:
        """Memory that an F of ``kind`` must leave to the last chunk."""
        if self.backward_begun or kind >= self.deepest:
            return 0.0
        hold = tables._hold[self.deepest]
        stages = tables.problem.placement.num_stages
        most = min(stages - self.deepest % stages, int(min(room / hold, 2 * stages)) // 2 if hold > 0 else 0)
        return max(0, most - self.next[self.deepest]) * hold

    def _fits(self, at: int, hold: float, room: float, reserved: float) -> bool:
        """Whether the F at position ``at`` may run now: memory stays within ``room`` until it would have run."""
        if self.live + hold + reserved > room:
            return False
        profile = self.profile
        return all(profile[k] + hold <= room for k in range(self.head, at))

    def run(self, code: int, kind: int, hold: list[float], kept: list[float], n: int) -> None:
        """Take ``code`` out of the row."""
        self.out.append(code)
        replica = kind % n
        if W * n <= kind < BW * n:
            self.waiting.remove(code)
            self.live -= kept[replica]
            at = self.position.get(code, -1)
            if at >= 0:
                self.done[at] = 1
            return
        at = self.position[code]
        self.done[at] = 1
        self.next[kind] += 1
        change = hold[replica] if kind < n else -hold[replica]
        for k in range(self.head, at):
            self.profile[k] += change
        if kind < n:
            self.live += change
            return
        self.backward_begun = True
        if kind < W * n:
            self.live += kept[replica] - hold[replica]
            self.waiting.append(code + (W - B) * n * self.m)
        else:
            self.live += change


def place_weight_gradients(problem: Problem, rows: CodeRows, limit: float) -> Draft:
    """Moves W into gaps of ``rows``, the order of F and B fixed, within ``limit``; never worse than the given order.

    Several rules for when a gap is long enough are tried. The result is no worse in makespan, span and peak than ``rows``
    re-timed, except that the peak may rise up to ``limit``.
    """
    tables = Reorderer(problem)
    given = tables.retimer.draft(rows)
    assert given is not None, "an order that deadlocks"
    anchor = Draft(given.rows, given.makespan, given.span, max(given.peak, limit))
    best = tables.best(rows, limit, IN_PLACE, anchor)
    return given if best is None or best is anchor else best
