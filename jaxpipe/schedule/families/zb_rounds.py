"""The zero-bubble heuristic in rounds: after the warm-up, each round runs at most one F and then exactly one B on every rank.

Source: Qi et al. 2023 (Zero Bubble), section 3.1, which describes it in words: as many warm-up forwards as memory allows before
the first B comes back; then F and B in turn; W where a wait is long enough, or where memory is needed, or where the rank
would otherwise become the one that idles longest; the three undecided points are tried both ways (:class:`Choices`).
It is the known answer that :mod:`~jaxpipe.schedule.families.zb_heuristic` must not fall behind. Its reach ends near 1F1B's
memory: below, the rounds often do not fit (None), and event by event is better.

One stage per rank. Times here serve decisions only (links are taken as free); the order is re-timed exactly afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from jaxpipe.schedule.problem import B, F, Problem, W

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Choices:
    """``full``: warm up with the F during which the first B comes back, too. ``hold_back``: leave out an F that would come
    early on the next rank. ``fill``: start a W that does not fit into a wait even when this rank is not the idlest."""

    full: bool
    hold_back: bool
    fill: bool


def round_rows(problem: Problem, limit: float) -> Iterator[list[list[int]]]:
    """The orders of all choices that stay within ``limit``."""
    for flags in product((False, True), (True, False), (True, False)):
        rows = _Rounds(problem, limit, Choices(*flags)).rows()
        if rows is not None:
            yield rows


class _NoRoomError(Exception):
    """A rank has no W left to make room with."""


class _Rounds:
    def __init__(self, problem: Problem, limit: float, choices: Choices) -> None:
        n, m = problem.num_ranks, problem.num_microbatches
        self.problem, self.choices, self.p, self.m = problem, choices, n, m
        self.limit = limit + _ROUNDING
        self.seconds = (problem.f_s, problem.b_s, problem.w_s)
        self.adds = (
            problem.held,
            [k - h for h, k in zip(problem.held, problem.kept, strict=True)],
            [-k for k in problem.kept],
        )
        self.count = ([0] * n, [0] * n, [0] * n)
        self.arrives = [[[0.0] * m for _ in range(n)] for _ in (F, B)]
        self.free, self.live, self.idle, self.most_idle = [0.0] * n, [0.0] * n, [0.0] * n, 0.0
        self.order: list[list[int]] = [[] for _ in range(n)]

    def rows(self) -> list[list[int]] | None:
        try:
            self._warm_up()
            for _ in range(1, self.m):
                self._round()
        except _NoRoomError:
            return None
        for r in range(self.p):
            while self.count[W][r] < self.m:
                self._run(W, r)
        return self.order

    def _run(self, op: int, r: int) -> None:
        i = self.count[op][r]
        start = self.free[r]
        if op != W:
            arrival = self.arrives[op][r][i]
            if arrival > start:
                if self.count[F][r]:
                    self.idle[r] += arrival - start
                    self.most_idle = max(self.most_idle, self.idle[r])
                start = arrival
        end = self.free[r] = start + self.seconds[op][r]
        self.live[r] += self.adds[op][r]
        self.count[op][r] = i + 1
        self.order[r].append((op * self.p + r) * self.m + i)
        if op == F and r + 1 < self.p:
            self.arrives[F][r + 1][i] = end + self.problem.down_s[r]
        elif op == B and r:
            self.arrives[B][r - 1][i] = end + self.problem.up_s[r]

    def _make_room(self, op: int, r: int) -> None:
        while self.live[r] + self.adds[op][r] > self.limit:
            if self.count[W][r] >= self.count[B][r]:
                raise _NoRoomError
            self._run(W, r)

    def _fill_wait(self, r: int, until: float) -> None:
        """W's before ``until``; also one that ends later, if waiting would make this rank the idlest (or ``fill``)."""
        w = self.problem.w_s[r]
        while self.count[W][r] < self.count[B][r] and self.free[r] + w <= until:
            self._run(W, r)
        wait = until - self.free[r]
        if (
            self.count[W][r] < self.count[B][r]
            and wait > 0
            and (self.choices.fill or wait > self.most_idle - self.idle[r])
        ):
            self._run(W, r)

    def _warm_up(self) -> None:
        f_s, up_s = self.problem.f_s, self.problem.up_s
        for r in range(self.p):
            self._make_room(F, r)
            self._run(F, r)
        more = [0] * self.p
        back = self.free[-1] + self.problem.b_s[-1]
        for r in range(self.p - 2, -1, -1):
            back += up_s[r + 1]
            now, live = self.free[r], self.live[r]
            while 1 + more[r] < self.m and live + self.problem.held[r] <= self.limit:
                if now >= back if self.choices.full else now + f_s[r] > back:
                    break
                live += self.problem.held[r]
                now += f_s[r]
                more[r] += 1
            back = max(now, back) + self.problem.b_s[r]
        for r in range(1, self.p):
            while more[r] > 0 and more[r] >= more[r - 1] and 1 + more[r] < self.m:
                more[r] -= 1
        for r in range(self.p):
            for _ in range(more[r]):
                self._run(F, r)
        for r in range(self.p - 1, -1, -1):
            self._run(B, r)

    def _round(self) -> None:
        forward = [self._wants_forward(r) for r in range(self.p)]
        for r in range(self.p - 2, -1, -1):
            forward[r] = forward[r] and forward[r + 1]
        for r in range(self.p):
            if forward[r]:
                self._make_room(F, r)
                if r:
                    self._fill_wait(r, self.arrives[F][r][self.count[F][r]])
                self._run(F, r)
        for r in range(self.p - 1, -1, -1):
            self._make_room(B, r)
            if r + 1 < self.p:
                self._fill_wait(r, self.arrives[B][r][self.count[B][r]])
            if r == 0 and self.count[F][r] == self.m:
                while self.count[W][r] < self.count[B][r]:
                    self._run(W, r)
            self._run(B, r)

    def _wants_forward(self, r: int) -> bool:
        """Whether F comes in time for the next rank's turn after this one, or can't be left out for idleness."""
        done = self.count[F]
        if done[r] >= self.m:
            return False
        if not self.choices.hold_back or r + 1 == self.p or done[r] < done[r + 1] + 2:
            return True
        needed = self.free[r + 1] + self.problem.f_s[r + 1] + self.problem.b_s[r + 1] + self.problem.down_s[r]
        if self.free[r] >= needed:
            return False
        over = self.live[r] + self.problem.held[r] - self.limit
        kept, waiting = self.problem.kept[r], self.count[B][r] - self.count[W][r]
        first = 0
        while over > first * kept and first < waiting:
            first += 1
        if self.free[r] + self.problem.f_s[r] + first * self.problem.w_s[r] <= needed:
            return True
        return needed - self.free[r] > self.most_idle - self.idle[r]
