"""List scheduling with offload under many policies at once: NumPy does for all of them what the clock does for one.

For a chain with one stage a rank, whose residuals leave and come back on the rank's own host lane, one copy at a time. The
rules are those of :mod:`~jaxpipe.search.solve.offload_list`, which plays the winner again; every policy has a clock of its
own, which goes from one event to the next.

Microbatches are in order, so what a rank has of those between F and B is told by bits: bit j is the j-th that turns back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from jaxpipe.schedule.clock import ROUNDING, Tables
from jaxpipe.schedule.problem import BW, B, F, Problem, W

Floats: TypeAlias = NDArray[np.float64]
Whole: TypeAlias = NDArray[np.int64]
Bits: TypeAlias = NDArray[np.uint64]
Flags: TypeAlias = NDArray[np.bool_]

MOST_IN_FLIGHT = 52
"""Microbatches between F and B on a rank at most: the highest bit is found through a float64."""

_IDLE, _O, _L = -1, 3, 4  # beside F, B and W
_ONE = np.uint64(1)


@dataclass(frozen=True, slots=True)
class OffloadPolicy:
    """Preferences of the ranks in a list schedule with offload.

    ``caps``: per replica, the most microbatches between the start of F and the start of B. ``away``: per replica and microbatch
    of it, whether it may leave while memory is short. ``near``: so many of a stage that turn back next don't leave, and come
    back as soon as there is room; with 0 even the next one may leave, and F's may take the room that its L needs.
    ``forward_first``: F before B where both can run. ``fused``: each backward is one BW.
    """

    caps: Whole
    away: Flags
    near: int = 1
    forward_first: bool = False
    fused: bool = False


class ChainWithHost:
    """A chain of S stages, each on a rank of its own; times in seconds and units of memory by stage, (S,).

    ``seconds``: of F, B, W, O and L, (5, S). ``down``, ``up``: transfers to the next stage and to the one before;
    ``occupied``: those of them in which their links start no other, (2, S). ``takes``,
    ``gives``: what F, B and W take when they start and give back when they end, (3, S). ``held``: what decides whether memory
    is short. ``leaves``: what a copy moves; 0: nothing may leave. ``most_out``: microbatches of a rank that may be on the host
    or on their way. ``tiny``: seconds that are rounding.
    """

    def __init__(
        self, q: Problem, tables: Tables, leaves: Sequence[float], room: Sequence[float], most_out: int | None
    ) -> None:
        """Build it from the tables of a problem, with O and L as its last two ops."""
        change, seconds = np.array(tables.change).reshape(6, -1), np.array(tables.seconds).reshape(6, -1)
        self.count, self.most_out = q.num_microbatches, q.num_microbatches if most_out is None else most_out
        self.seconds, self.tiny = np.delete(seconds, BW, axis=0), ROUNDING * float(seconds.max())
        self.down, self.up = np.array(q.down_s), np.array(q.up_s)
        self.occupied = np.array((q.down_occupied_s, q.up_occupied_s))
        self.takes, self.gives = (np.maximum(sign * change[[F, B, W]], 0.0) for sign in (1, -1))
        self.held, self.leaves, self.room = np.array(q.held), np.array(leaves), np.array(room)


def play(chain: ChainWithHost, policies: Sequence[OffloadPolicy], until: float) -> tuple[Floats, Floats]:
    """Return the makespans (P,) and spans of ranks (P, S) of policies with caps up to :data:`MOST_IN_FLIGHT`; inf for those
    that get stuck or take longer than ``until``."""
    state = _State(chain, policies)
    while state.step(until):
        pass
    done = (state.begun[W] == chain.count).all(axis=1) & (state.now[:, 0] < np.inf)
    return (
        np.where(done, state.last.max(axis=1), np.inf),
        np.where(done[:, None], state.last - state.first, np.inf),
    )


class _State:
    """State of the simulation of every policy. Arrays are (P, S), or (P, 1) for what a policy's ranks share.

    ``begun[op]``: actions that started. ``here``, ``back``: bits of what the rank holds since F, or again; ``gone``: of what
    the host has; ``may``: of what the policy lets leave. ``f_in``, ``b_in``: when the inputs of each microbatch arrive.
    """

    def __init__(self, chain: ChainWithHost, policies: Sequence[OffloadPolicy]) -> None:
        self.chain = chain
        self.caps, self.away = np.array([x.caps for x in policies]), np.array([x.away for x in policies])
        self.near = np.array([[x.near] for x in policies])
        self.forward_first = np.array([[x.forward_first] for x in policies])
        shape = p, s = self.caps.shape
        self.now = np.zeros((p, 1))
        self.begun = np.zeros((3, p, s), np.int64)
        self.op, self.copy = (np.full(shape, _IDLE, np.int8) for _ in range(2))
        self.free, self.lane_free, self.memory = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        self.first, self.last, self.link_free = np.zeros(shape), np.zeros(shape), np.zeros((2, p, s))
        self.copied, self.out = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        self.here, self.back, self.gone, self.may = (np.zeros(shape, np.uint64) for _ in range(4))
        self.f_in, self.b_in = (np.full((p, s, chain.count + 1), np.inf) for _ in range(2))
        self.f_in[:, 0, : chain.count] = 0.0
        self.at = np.arange(p * s).reshape(shape)
        self.not_near = ~((_ONE << self.near.astype(np.uint64)) - _ONE)
        self.turning = (_ONE << np.maximum(self.near, 1).astype(np.uint64)) - _ONE

    def step(self, until: float) -> bool:
        """Apply what happens now and move each clock to its next event; return whether any policy goes on."""
        self._end()
        self._compute()
        self._copies()
        times = np.concatenate([self.free, self.lane_free, *self._arrivals()], axis=1)
        times[times <= self.now] = np.inf
        soonest = times.min(axis=1, keepdims=True)
        # what is apart by rounding alone happens at once, as on the clock that plays one policy
        times[times > soonest + self.chain.tiny] = -np.inf
        following = times.max(axis=1, keepdims=True)
        stuck = (following > until) | (following == np.inf)
        over = (self.begun[W] == self.chain.count).all(axis=1, keepdims=True)
        self.now = np.where(stuck & over, self.now, np.where(stuck, np.inf, following))
        return not stuck.all()

    def _arrivals(self) -> tuple[Floats, Floats]:
        """Return when the input of the next F and of the next B arrives, as far as that is known."""
        at, count = self.at, self.chain.count + 1
        return (
            np.take(self.f_in.reshape(-1), at * count + self.begun[F]),
            np.take(self.b_in.reshape(-1), at * count + self.begun[B]),
        )

    def _end(self) -> None:
        now, chain = self.now, self.chain
        ended = (self.free <= now) & (self.op != _IDLE)
        forward = ended & (self.op == F)
        last = _ONE << (self.begun[F] - 1 - self.begun[B]).clip(0).astype(np.uint64)
        self.here |= np.where(forward, last, np.uint64(0))
        for op in (F, B, W):
            self.memory -= np.where(ended & (self.op == op), chain.gives[op], 0.0)
        self.op[ended] = _IDLE
        ended = (self.lane_free <= now) & (self.copy != _IDLE)
        bit = _ONE << self.copied.clip(0).astype(np.uint64)
        left, came = ended & (self.copy == _O), ended & (self.copy == _L)
        self.memory -= np.where(left, chain.leaves, 0.0)
        self.gone |= np.where(left, bit, np.uint64(0))
        self.back |= np.where(came, bit, np.uint64(0))
        self.out -= came
        self.copy[ended] = _IDLE

    def _compute(self) -> None:
        """Start B, F or W on every idle rank."""
        chain, now, (started_f, started_b) = self.chain, self.now, self.begun[: B + 1]
        idle = (self.free <= now) & (now < np.inf)
        f_at, b_at = self._arrivals()
        first_is_away = ((self.gone & _ONE) > 0) | ((self.copy == _O) & (self.copied == 0))
        reserve = np.where((self.near > 0) & first_is_away & (started_b < started_f), chain.leaves, 0.0)
        fits = (self.memory + chain.takes[F] + reserve <= chain.room) & (started_f - started_b < self.caps)
        f_at = np.where(fits, f_at, np.inf)
        b_at = np.where(((self.here | self.back) & _ONE) > 0, b_at, np.inf)
        can_f, can_b = idle & (f_at <= now), idle & (b_at <= now)
        end = now + chain.seconds[W]
        wait = ((f_at > now) & (f_at < end)) | ((b_at > now) & (b_at < end))
        b = can_b & ~(self.forward_first & can_f)
        f = can_f & ~b
        w = idle & ~b & ~f & (self.begun[W] < started_b) & ~wait
        self._start_b(b)
        self._start_f(f)
        self.last = np.where(w, end, self.last)
        for op, starts in ((F, f), (B, b), (W, w)):
            self.op[starts] = op
            self.free = np.where(starts, now + chain.seconds[op], self.free)
            self.begun[op] += starts
            self.memory += np.where(starts, chain.takes[op], 0.0)

    def _start_f(self, f: Flags) -> None:
        number, chain = self.begun[F], self.chain
        self.first = np.where(f & (number == 0), self.now, self.first)
        leaves = np.take(self.away.reshape(-1), self.at * chain.count + np.minimum(number, chain.count - 1))
        self.may |= np.where(f & leaves, _ONE << (number - self.begun[B]).astype(np.uint64), np.uint64(0))
        ends = np.broadcast_to(self.now + chain.seconds[F], f.shape)
        arrivals = self._send(0, f, ends) + chain.down
        p, s = np.nonzero(f)
        i, on = number[p, s], s < f.shape[1] - 1
        self.f_in[p[on], s[on] + 1, i[on]] = arrivals[p[on], s[on]]
        self.b_in[p[~on], s[~on], i[~on]] = ends[p[~on], s[~on]]

    def _start_b(self, b: Flags) -> None:
        ends = self.now + self.chain.seconds[B]
        arrivals = self._send(1, b, ends) + self.chain.up
        p, s = np.nonzero(b)
        i, on = self.begun[B][p, s], s > 0
        self.b_in[p[on], s[on] - 1, i[on]] = arrivals[p[on], s[on]]
        # bit 0 is always the next to turn back, so its B shifts all others
        for bits in (self.here, self.back, self.gone, self.may):
            bits >>= b.astype(np.uint64)
        self.copied -= b

    def _send(self, way: int, sends: Flags, ends: Floats) -> Floats:
        """Return when transfers down (0) or up (1) start, of ranks that ``sends``: once their links are free."""
        start: Floats = np.maximum(self.link_free[way], ends)
        self.link_free[way] = np.where(sends, start + self.chain.occupied[way], self.link_free[way])
        return start

    def _copies(self) -> None:
        """Start L of what turns back next, or O of what turns back last, on every idle lane."""
        chain, now = self.chain, self.now
        idle = (self.lane_free <= now) & (now < np.inf)
        away = self.gone & self.turning
        back = idle & (away > 0) & (self.memory + chain.leaves <= chain.room)
        can_leave = self.here & self.may & self.not_near
        short = self.memory + 2 * chain.held > chain.room
        leave = idle & ~back & (can_leave > 0) & short & (chain.leaves > 0) & (self.out < chain.most_out)
        which = np.where(back, away & (~away + _ONE), can_leave)
        copied = np.frexp(which.astype(np.float64))[1] - 1  # of the highest bit
        self.copied = np.where(back | leave, copied, self.copied)
        bit = _ONE << self.copied.clip(0).astype(np.uint64)
        self.gone &= ~np.where(back, bit, np.uint64(0))
        self.here &= ~np.where(leave, bit, np.uint64(0))
        self.memory += np.where(back, chain.leaves, 0.0)
        self.out += leave
        for op, starts in ((_L, back), (_O, leave)):
            self.copy[starts] = op
            self.lane_free = np.where(starts, now + chain.seconds[op], self.lane_free)
