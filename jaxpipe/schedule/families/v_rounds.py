"""The order of F and B behind the V-ZB heuristic: rounds of one B and one F on every rank of a V placement.

Each rank first runs forwards only: its first chunk until the first microbatch has come back up the V, then both chunks in turn
until memory is full. From then on a round gives every rank one B and one F, so that memory stays full. The flow down the V
(F of the first chunk, B of the second) runs through all ranks within a round, the flow up moves one rank a round; a rank takes
the flow up when it has something there. Times don't matter here: :mod:`~jaxpipe.schedule.list_schedule.weights` adds W by
real costs. Source: `controllable-memory.txt` section 3.2 (V-ZB) and Table 4, whose V-ZB is the authors' heuristic of this kind.
"""

from __future__ import annotations

from jaxpipe.schedule.problem import B, F, Problem

_ROUNDING = 1e-9
_F_DOWN, _F_UP, _B_DOWN, _B_UP = range(4)


class _Rounds:
    """Counts per flow and rank, memory of what is between F and B, and the order so far."""

    __slots__ = ("done", "held", "keep_room", "limit", "live", "m", "order", "p", "problem")

    def __init__(self, problem: Problem, limit: float, keep_room: bool) -> None:
        self.problem, self.limit = problem, limit + _ROUNDING
        self.p, self.m = problem.num_ranks, problem.num_microbatches
        self.held = problem.reserved
        self.keep_room = keep_room
        self.done = [[0] * self.p for _ in range(4)]
        self.live = [0.0] * self.p
        self.order: list[int] = []

    def stage(self, flow: int, r: int) -> int:
        return r if flow in (_F_DOWN, _B_UP) else 2 * self.p - 1 - r

    def ready(self, flow: int, r: int) -> bool:
        """Whether the next action of the flow has what it waits for."""
        done, k = self.done, self.done[flow][r]
        if flow == _F_DOWN:
            return k < (done[flow][r - 1] if r else self.m)
        if flow == _B_DOWN:
            return k < (min(done[flow][r - 1], done[_F_UP][r]) if r else done[_F_UP][0])
        below = done[flow][r + 1] if r < self.p - 1 else done[_F_DOWN if flow == _F_UP else _B_DOWN][r]
        return k < below

    def fits(self, flow: int, r: int) -> bool:
        need = self.held[self.stage(flow, r)]
        if self.keep_room and flow == _F_DOWN:
            need += self.held[self.stage(_F_UP, r)]
        return self.live[r] + need <= self.limit

    def run(self, flow: int, r: int) -> None:
        s = self.stage(flow, r)
        backward = flow >= _B_DOWN
        self.order.append(self.problem.code(B if backward else F, s, self.done[flow][r]))
        self.done[flow][r] += 1
        self.live[r] += -self.held[s] if backward else self.held[s]


def rounds_order(problem: Problem, limit: float, keep_room: bool = False) -> list[int] | None:
    """F and B of a V placement as one list in which everything stands after what it waits for; None if it gets stuck.

    ``keep_room``: a first-chunk F leaves room for a second-chunk F, so B of the second flow comes earlier.
    """
    s = _Rounds(problem, limit, keep_room)
    _warm_up(s)
    total = 4 * s.p * s.m
    while len(s.order) < total:
        before = len(s.order)
        _round(s)
        if len(s.order) == before:
            return None
    return s.order


def _warm_up(s: _Rounds) -> None:
    """Forwards of every rank until its memory is full or it has r + 1 microbatches on the second chunk."""
    flows = [_warm_up_flows(s, r) for r in range(s.p)]
    at = [0] * s.p
    moved = True
    while moved:
        moved = False
        for r in (*range(s.p), *reversed(range(s.p))):
            while at[r] < len(flows[r]) and s.ready(flows[r][at[r]], r) and s.fits(flows[r][at[r]], r):
                s.run(flows[r][at[r]], r)
                at[r] += 1
                moved = True


def _warm_up_flows(s: _Rounds, r: int) -> list[int]:
    down, up = s.held[r], s.held[2 * s.p - 1 - r]
    first = int((s.limit - up - r * (down + up)) / down) if down > 0 else s.m
    first = max(1, min(s.m, first))
    flows = [_F_DOWN] * first
    for k in range(min(r + 1, s.m)):
        flows += [_F_UP, _F_DOWN] if k < r and first + k < s.m else [_F_UP]
    return flows


def _round(s: _Rounds) -> None:
    """One B and one F on every rank that can; which flow is decided for all ranks before the first B runs."""
    up = [s.ready(_B_UP, r) or s.done[_B_DOWN][r] == s.m for r in range(s.p)]
    for r in reversed(range(s.p)):
        if up[r] and s.ready(_B_UP, r):
            s.run(_B_UP, r)
    for r in range(s.p):
        if not up[r] and s.ready(_B_DOWN, r):
            s.run(_B_DOWN, r)
    for r in range(s.p):
        flow = _F_UP if s.ready(_F_UP, r) else _F_DOWN
        if s.ready(flow, r) and s.fits(flow, r):
            s.run(flow, r)
