"""Schedules with offload from list scheduling: many policies, played fast, the best kept.

A rank takes the next B, F or W of its stages (microbatches of a stage in order) as soon as inputs, residency and memory allow,
a W only where nothing else that could run arrives before its end. Its host lanes, which the clock
(:mod:`~jaxpipe.schedule.list_schedule.clock`) takes for ranks of their own, copy residuals out (O) and back (L). What is played
is start times; :func:`~jaxpipe.schedule.solve.actions.schedule_of` makes rows of them, with an S where an order must say that
an F waits for an O.

Which policy wins depends on how the host lane's capacity compares with what memory needs, so a fixed few are tried first, then
seeded draws. Where the lane keeps up, any activation may leave while memory is short. Where it does not, each rank lets only a
share of the microbatches leave, evenly spread, so that the rest stays for its whole trip. The share follows from Little's law:
a microbatch that stays holds its memory for its trip, one that leaves only while it is copied; with one microbatch each
``period`` seconds, what is held on average must fit in the limit, and the copies in the lane.

Not tried: other orders than first come, first served among microbatches. Not modelled: in the simulator the ranks of a PCIe
group get their lane in the order in which they could use it, here in the order of their numbers. Source: `optpipe.txt` section
3 (what is scheduled); the rules are our own.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice, product
from math import ceil, floor, inf

from jaxpipe.schedule.bounds.flows import Flows
from jaxpipe.schedule.bounds.ranks import residents
from jaxpipe.schedule.engine import host_groups
from jaxpipe.schedule.ir import Action, Schedule
from jaxpipe.schedule.list_schedule.clock import NEVER, Clock, Feed
from jaxpipe.schedule.problem import BW, B, F, Problem, W
from jaxpipe.schedule.solve.actions import Actions, Starts, fitting, starts_at
from jaxpipe.schedule.solve.task import SolveTask
from jaxpipe.schedule.tolerance import MEMORY, at_most

O, L = 4, 5  # noqa: E741
_OPS = ("F", "B", "W", "BW", "O", "L")
_HERE, _AWAY, _BACK = (F, True), (O, True), (L, True)  # where residuals are
MOST = 2000
"""Policies tried at most."""
_LOOSE = 1 + 1e-6  # more than what rounding to nine digits takes


@dataclass(frozen=True, slots=True)
class Policy:
    """What a rank prefers.

    ``caps``: per replica, the most microbatches between the start of F and the start of B. ``away``: per replica, which
    microbatches may leave while memory is short. ``near``: so many of a stage that turn back next don't leave, and come back as
    soon as there is room; with 0 even the next one may leave, and F's may take the room that its L needs. ``forward_first``: F
    before B where both can run. ``fused``: each backward is one BW.
    """

    caps: tuple[int, ...]
    away: tuple[tuple[bool, ...], ...]
    near: int = 1
    forward_first: bool = False
    fused: bool = False


def offload_candidates(
    task: SolveTask, target: float, deadline: Callable[[], bool], *, seed: int = 0, most: int = MOST
) -> Iterator[Schedule]:
    """Valid schedules of ``task`` that keep its limits, each better than the one before.

    Better: less of the task's objective (for ``lexicographic`` the makespan), or as much with less of the other of makespan and
    longest span. Ends when ``target`` seconds are reached, when ``deadline()`` says so, or after ``most`` policies; with a
    deadline that reads no clock the same task and seed give the same schedules. Yields nothing where no policy keeps the
    limits. A task without ``offload`` gets schedules without.

    Raises:
        ScheduleError: the placement's stages form no chain on single ranks, or the costs are for another number of stages or
            too uneven for a grid.
    """
    shop = _Shop(task)
    draws = _Draws(shop, target, random.Random(seed))
    best: tuple[float, ...] = inf, inf
    for number, policy in enumerate(draws.all()):
        if number >= most or deadline():
            return
        played = _Play(shop, policy).run(best[0] + (shop.head_s if task.objective == "span" else 0.0))
        if played is None or played[0] > best:
            continue
        draws.base = policy
        made = None if played[0] == best else fitting(shop.actions, played[1], "offload-list")
        if made is not None and (value := task.order(made[1].makespan, made[1].max_span)) < best:
            best = value
            yield made[0]
            if at_most(best[0], target):
                return


class _Shop:
    """The tables of a task, by replica and rank; codes are those of :mod:`~jaxpipe.schedule.problem`, with O and L as ops 4 and
    5. Each host lane is a rank of its own, number p + lane.

    ``codes``: of a replica's F's. ``mine``: a rank's replicas that have some; ``stays``: what it holds for them.
    ``lanes``: a rank's host lanes; ``riders``: by two lanes, the ranks that have them.
    """

    def __init__(self, task: SolveTask) -> None:
        self.task, self.actions = task, Actions(task)
        self.problem = problem = Problem.of(task.placement, task.num_microbatches, task.costs)
        costs, p, n, host = task.costs, problem.num_ranks, problem.num_replicas, task.costs.host
        self.codes = [[problem.code(F, k, i) for i in problem.microbatches(k)] for k in range(n)]
        self.mine = [[k for k in problem.replicas_of(r) if self.codes[k]] for r in range(p)]
        flows = Flows(task.placement, task.num_microbatches, costs)
        self.stays = [residents(flows, r) for r in range(p)]
        may_leave, self.leaves = {self.actions.action[o].stage for o in self.actions.copies}, [0.0] * n
        for k, stays in ((k, x) for r in range(p) for k, x in zip(self.mine[r], self.stays[r], strict=True)):
            if k % task.placement.num_stages in may_leave:
                self.leaves[k] = stays.leaves
        self.room = [x * (1 + MEMORY) for x in task.safe_limits()]
        self.shared, groups = host.mode == "shared", host_groups(host, p)
        lane = [min((x for x in groups if groups[x] == groups[r]), default=r) if r in groups else r for r in range(p)]
        self.riders = [[r for r in range(p) if lane[r] == q] for q in range(p)]
        self.lanes = [(2 * q,) if self.shared else (2 * q, 2 * q + 1) for q in lane]
        self.head_s = sum(problem.f_s) + sum(problem.down_s)
        plain, wakes = problem.tables, [(Feed(r, -1, 0.0, ()),) for r in problem.rank]
        seconds = [
            values[k % task.placement.num_stages] for values in (costs.offload_s, costs.load_s) for k in range(n)
        ]
        self.tables = replace(
            plain,
            num_ranks=3 * p,
            ranks=[*plain.ranks, *((p + self.lanes[r][which],) for which in (0, -1) for r in problem.rank)],
            seconds=[*plain.seconds, *seconds],
            change=[*plain.change, *(-x for x in self.leaves), *self.leaves],
            feeds=[*plain.feeds, *wakes, *wakes],
            needs=[*plain.needs, *([0] * (2 * n))],
        )

    def starts(self, begun: dict[int, float]) -> Starts:
        """Start times by code, as those of actions."""
        begun_at = []
        for code, seconds in begun.items():
            op, k, i = self.problem.decode(code)
            begun_at.append((Action(_OPS[op], k % self.task.placement.num_stages, i), self.problem.rank[k], seconds))
        starts = starts_at(self.actions, begun_at)
        assert starts is not None, "a policy played what is not there"
        return starts


class _Play:
    """One run of a policy. Numbers of microbatches count within their flow.

    ``where[k][i]``: the last op that residuals have seen, and whether it has ended. ``memory``: what a rank holds; what an
    action takes it takes at its start, what it gives back at its end, which the clock's own account does not tell apart.
    ``fresh``: of that, what O's gave back since the rank was last idle. ``out``: microbatches on the host or under way.
    """

    def __init__(self, shop: _Shop, policy: Policy) -> None:
        q = self.q = shop.problem
        self.shop, self.policy = shop, policy
        self.n, self.step, p = q.num_replicas, q.num_replicas * q.num_microbatches, q.num_ranks
        self.clock = Clock(shop.tables)
        self.begun_f, self.begun_b, self.begun_w = ([0] * self.n for _ in range(3))
        self.where = [[(F, False)] * len(codes) for codes in shop.codes]
        self.memory, self.fresh, self.out = [0.0] * p, [0.0] * p, [0] * p
        self.running: list[tuple[float, int, int, int]] = []
        self.started: dict[int, float] = {}

    def run(self, give_up: float) -> tuple[tuple[float, ...], Starts] | None:
        """The objective and the other time, and when everything starts; None if it gets stuck, or takes longer than that."""
        self.clock.run(self._choose, until=give_up * _LOOSE)
        p, clock, last = self.q.num_ranks, self.clock, self.begun_b if self.policy.fused else self.begun_w
        if sum(last) < sum(map(len, self.shop.codes)):
            return None
        spans = [b - a for a, b in zip(clock.first[:p], clock.free[:p], strict=True)]
        return self.shop.task.order(max(clock.free[:p]), max(spans)), self.shop.starts(self.started)

    def _choose(self, rank: int, now: float) -> int:
        """What a rank or a host lane starts; lanes have the numbers from p on."""
        while self.running and self.running[0][0] <= now:
            self._ended(*heapq.heappop(self.running)[1:])
        p, clock = self.q.num_ranks, self.clock
        if rank >= p:
            return self._copy(rank - p, now)
        self.fresh[rank] = 0.0
        if not self.shop.shared:
            self._fill_lanes(rank, now)  # only now can an S go before an L
        code = self._compute(rank, now)
        if code >= 0:
            clock.start(rank, code, now)
        self._fill_lanes(rank, now)
        return -1

    def _fill_lanes(self, rank: int, now: float) -> None:
        p, clock = self.q.num_ranks, self.clock
        for lane in self.shop.lanes[rank]:
            if clock.free[p + lane] <= now and (code := self._copy(lane, now)) >= 0:
                clock.start(p + lane, code, now)

    def _start(self, op: int, k: int, i: int, now: float) -> int:
        """The code of an action that starts."""
        kind, rank, tables = op * self.n + k, self.q.rank[k], self.shop.tables
        code = self.shop.codes[k][i] + op * self.step
        self.started[code] = now
        self.where[k][i] = op, False
        self.memory[rank] += max(0.0, tables.change[kind])
        self.out[rank] += op == O
        heapq.heappush(self.running, (now + tables.seconds[kind], op, k, i))
        return code

    def _ended(self, op: int, k: int, i: int) -> None:
        rank, change = self.q.rank[k], min(0.0, self.shop.tables.change[op * self.n + k])
        self.where[k][i] = op, True
        self.memory[rank] += change
        self.fresh[rank] -= change if op == O else 0.0
        self.out[rank] -= op == L

    # Compute.

    def _compute(self, r: int, now: float) -> int:
        """The code of what the policy takes next on idle rank ``r``, if anything can start."""
        mine, policy = self.shop.mine[r], self.policy
        back = next((k for k in reversed(mine) if self._b_at(k) <= now), -1)
        ahead = next((k for k in reversed(mine) if self._f_at(r, k) <= now), -1)
        weight = -1 if policy.fused else next((k for k in mine if self.begun_w[k] < self.begun_b[k]), -1)
        if back >= 0 and not (policy.forward_first and ahead >= 0):
            return self._next(BW if policy.fused else B, self.begun_b, back, now)
        if ahead >= 0:
            return self._next(F, self.begun_f, ahead, now)
        if weight >= 0 and not self._better_wait(r, now + self.q.w_s[weight], now):
            return self._next(W, self.begun_w, weight, now)
        return -1

    def _next(self, op: int, begun: list[int], k: int, now: float) -> int:
        begun[k] += 1
        return self._start(op, k, begun[k] - 1, now)

    def _b_at(self, k: int) -> float:
        """When the next B of a replica can start at the earliest, as far as that is known."""
        i, codes = self.begun_b[k], self.shop.codes[k]
        if i == len(codes) or self.where[k][i] not in (_HERE, _BACK):
            return NEVER
        return self.clock.ready[codes[i] + self.step]

    def _f_at(self, r: int, k: int) -> float:
        i, codes = self.begun_f[k], self.shop.codes[k]
        if i == len(codes) or (at := self.clock.ready[codes[i]]) == NEVER or i - self.begun_b[k] >= self.policy.caps[k]:
            return NEVER
        fits = self.memory[r] + self.q.reserved[k] + self._reserve(r) <= self.shop.room[r]
        return at if fits else NEVER

    def _reserve(self, r: int) -> float:
        """Room that the next microbatch to turn back needs, if it is away."""
        if not self.policy.near:
            return 0.0
        turning = ((k, self.begun_b[k]) for k in self.shop.mine[r] if self.begun_b[k] < self.begun_f[k])
        return max((self.shop.leaves[k] for k, i in turning if self.where[k][i][0] == O), default=0.0)

    def _better_wait(self, r: int, end: float, now: float) -> bool:
        """Whether something that could run arrives before ``end``."""
        return any(now < at < end for k in self.shop.mine[r] for at in (self._b_at(k), self._f_at(r, k)))

    # Copies.

    def _copy(self, lane: int, now: float) -> int:
        """The code of what idle host lane ``lane`` does next for one of its ranks; -1 for nothing."""
        for r in self.shop.riders[lane // 2]:
            code = self._copy_back(r, now) if self.shop.shared or lane % 2 else -1
            if code < 0 and not lane % 2:
                code = self._copy_out(r, now)
            if code >= 0:
                return code
        return -1

    def _copy_back(self, r: int, now: float) -> int:
        shop, near, away = self.shop, max(1, self.policy.near), []
        for k in shop.mine[r]:
            turning = range(self.begun_b[k], min(self.begun_b[k] + near, self.begun_f[k]))
            away += [(i, k) for i in turning if self.where[k][i] == _AWAY]
        i, k = min(away, default=(-1, -1))
        unnamed = 0.0 if shop.shared else self.fresh[r]  # an S for it would stand behind the running slot
        if k < 0 or self.memory[r] + shop.leaves[k] + unnamed > shop.room[r]:
            return -1
        return self._start(L, k, i, now)

    def _copy_out(self, r: int, now: float) -> int:
        """The one that turns back last: of each replica what began last, may leave and is still here."""
        shop, policy, found = self.shop, self.policy, []
        if self.out[r] == shop.task.offloads_in_flight:
            return -1
        for k in shop.mine[r]:
            if not shop.leaves[k] or self.memory[r] + 2 * self.q.held[k] <= shop.room[r]:
                continue
            low, away = self.begun_b[k] + policy.near, policy.away[k]
            last = (i for i in reversed(range(low, self.begun_f[k])) if away[i] and self.where[k][i] == _HERE)
            found += [(i - low, k, i) for i in islice(last, 1)]
        if not found:
            return -1
        _, k, i = max(found, key=lambda x: x[0])
        return self._start(O, k, i, now)


class _Draws:
    """Policies for one task: a fixed few, then drawn ones, and changes to ``base``, the last that was as good as the best."""

    def __init__(self, shop: _Shop, target: float, rng: random.Random) -> None:
        self.shop, self.rng = shop, rng
        self.base: Policy | None = None
        q, costs = shop.problem, shop.task.costs
        work_s = max(sum(x.f_s + x.back_s for x in stays) for stays in shop.stays) / shop.task.placement.num_flows
        self.period_s = max(work_s, target / q.num_microbatches if 0 < target < inf else 0.0)
        split = all(at_most(b + c, w) for w, b, c in zip(costs.bw_s, costs.b_s, costs.w_s, strict=True))
        self.fused = (False,) if split else (False, True)
        self.every = tuple((True,) * len(codes) for codes in shop.codes)

    def all(self) -> Iterator[Policy]:
        """A few fixed ones, which suffice where the lane keeps up; then drawn ones and changes, without end."""
        for near, fused, factor in product((1, 2, 3, 0), self.fused, (99.0, 1.0, 0.7)):
            yield Policy(self._caps(factor), self.every, near, fused=fused)
        while True:
            yield self._anew()
            if self.base is not None:
                yield self._changed(self.base)

    def _anew(self) -> Policy:
        pick, few = self.rng.choice, self.rng.random() < 0.6
        return Policy(
            self._caps(pick((0.7, 0.85, 1.0, 1.2, 1.4, 1.6, 2.0, 99.0))),
            self._away(self.period_s * pick((1.0, 1.05, 1.1, 1.15)), pick((0.7, 0.8, 0.9, 1.0))) if few else self.every,
            near=pick((0, 1, 2, 3)),
            forward_first=self.rng.random() < 0.4,
            fused=pick(self.fused),
        )

    def _changed(self, policy: Policy) -> Policy:
        """Another cap; more often, a few microbatches that stay on some neighbouring replicas, or leave."""
        pick, at = self.rng.choice, self.rng.randrange(len(policy.caps))
        if self.rng.random() < 0.3:
            caps = list(policy.caps)
            caps[at] = max(1, min(caps[at], len(self.shop.codes[at])) + pick((-2, -1, 1, 2)))
            return replace(policy, caps=tuple(caps))
        away, leaves = [list(x) for x in policy.away], self.rng.random() < 0.5
        for _ in range(pick((1, 1, 2, 4))):
            i = self.rng.randrange(max(map(len, self.shop.codes)))
            for row in filter(None, away[at : at + pick((1, 1, 2, 4))]):
                row[min(i, len(row) - 1)] = leaves
        return replace(policy, away=tuple(map(tuple, away)))

    def _caps(self, factor: float) -> tuple[int, ...]:
        """Microbatches in flight: as many as keep the rank busy for a trip with F's and B's, times ``factor``."""
        shop, most = self.shop, self.shop.task.num_microbatches
        caps = [most] * shop.problem.num_replicas
        for mine, stays in zip(shop.mine, shop.stays, strict=True):
            busy = sum(x.f_s + x.b_s for x in stays)
            for k, x in zip(mine, stays, strict=True) if busy > 0 else ():
                caps[k] = max(1, min(most, ceil((x.trip_s / busy + 1) * factor)))
        return tuple(caps)

    def _away(self, period_s: float, filled: float) -> tuple[tuple[bool, ...], ...]:
        """Which microbatches may leave, evenly spread: the share that keeps ``filled`` × limit held on average."""
        phase, shop = self.rng.random(), self.shop
        share = [self._share(r, period_s, filled) for r in range(shop.problem.num_ranks)]
        return tuple(
            tuple(floor((i + 1) * share[r] + phase) > floor(i * share[r] + phase) for i in range(len(codes)))
            for r, codes in zip(shop.problem.rank, shop.codes, strict=True)
        )

    def _share(self, r: int, period_s: float, filled: float) -> float:
        shop, stays = self.shop, self.shop.stays[r]
        saved = sum(x.saved() for x in stays)
        lane = sum(x.together_s for x in stays) * len(shop.riders[shop.lanes[r][0] // 2])
        most = min(1.0, period_s / lane) if lane > 0 else 1.0
        short = sum(x.area() for x in stays) - filled * shop.room[r] * period_s
        return min(most, max(0.0, short / saved)) if saved > 0 else 0.0
