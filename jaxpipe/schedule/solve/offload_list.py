"""Schedules with offload from list scheduling: many policies, played fast, the best kept.

A rank takes the next B, F or W of its stages (microbatches of a stage in order) as soon as inputs, residency and memory allow;
its host lanes, which the clock (:mod:`~jaxpipe.schedule.list_schedule.clock`) takes for ranks of their own, copy residuals out
(O) and back (L). What is played is start times; :func:`~jaxpipe.schedule.solve.actions.schedule_of` makes rows of them, with
an S where an order must say that an F waits for an O.

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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from math import ceil, floor, inf
from typing import Literal

from jaxpipe.schedule.engine import host_groups
from jaxpipe.schedule.ir import Action, Schedule
from jaxpipe.schedule.list_schedule.clock import Clock, Feed
from jaxpipe.schedule.problem import BW, B, F, Problem, W, shares
from jaxpipe.schedule.solve.actions import Actions, Starts, fitting, starts_at
from jaxpipe.schedule.solve.task import SolveTask
from jaxpipe.schedule.tolerance import MEMORY, at_most

O, L = 4, 5  # noqa: E741
_OPS = ("F", "B", "W", "BW", "O", "L")
_HERE, _LEAVING, _AWAY, _COMING, _BACK = range(1, 6)  # where residuals are
MOST = 2000
"""Policies tried at most."""
_FEW = 18
_LOOSE = 1 + 1e-6  # more than what rounding to nine digits takes
Weights = Literal["fill", "gap", "eager", "fused"]
"""W when nothing else can run; not when something on its way arrives before it ends; right behind its B; or as one BW."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What a rank prefers.

    ``caps``: per replica, the most microbatches between the start of F and the start of B. ``weights``: when W's run.
    ``forward_first``: F before B where both can run. ``leave``: ``none``; ``need``, while memory is short; ``all``.
    ``keep``: the next so many microbatches of a stage to turn back don't leave. ``prefetch``: so many may come back early.
    ``away``: per replica, which microbatches may leave; None: any. ``bold``: F's may take the room that the next B's L needs
    (only an O can then go on).
    """

    caps: tuple[int, ...]
    weights: Weights = "fill"
    forward_first: bool = False
    leave: Literal["none", "need", "all"] = "need"
    keep: int = 1
    prefetch: int = 2
    away: tuple[tuple[bool, ...], ...] | None = None
    bold: bool = False


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
    5. Each host lane is a rank of its own, number p + lane."""

    def __init__(self, task: SolveTask) -> None:
        self.task, self.actions = task, Actions(task)
        self.problem = problem = Problem.of(task.placement, task.num_microbatches, task.costs)
        costs, p, m = task.costs, problem.num_ranks, task.num_microbatches
        stage = [k % task.placement.num_stages for k in range(problem.num_replicas)]
        self.flows, self.step = task.placement.num_flows, problem.num_replicas * m
        self.base = [k * m + k // task.placement.num_stages for k in range(problem.num_replicas)]
        self.count = [len(problem.microbatches(k)) for k in range(problem.num_replicas)]
        self.mine = [problem.replicas_of(r) for r in range(p)]
        may_leave = {self.actions.action[o].stage for o in self.actions.copies}
        share = zip(stage, shares(task.placement, costs), strict=True)
        self.leaves = [costs.offloadable_bytes[s] / x if s in may_leave and x > 0 else 0.0 for s, x in share]
        self.room = [x * (1 + MEMORY) for x in task.safe_limits()]
        self.out_s, self.back_s = ([seconds[s] for s in stage] for seconds in (costs.offload_s, costs.load_s))
        self.shared, groups = costs.host.mode == "shared", host_groups(costs.host, p)
        lane = [min((x for x in groups if groups[x] == groups[r]), default=r) if r in groups else r for r in range(p)]
        self.riders = [[r for r in range(p) if lane[r] == q] for q in range(p)]
        self.lanes = [(2 * q,) if self.shared else (2 * q, 2 * q + 1) for q in lane]
        self.head_s = sum(problem.f_s) + sum(problem.down_s)
        plain, wakes = problem.tables, [(Feed(r, -1, 0.0, ()),) for r in problem.rank]
        self.tables = replace(
            plain,
            num_ranks=3 * p,
            ranks=[*plain.ranks, *((p + self.lanes[r][which],) for which in (0, -1) for r in problem.rank)],
            seconds=[*plain.seconds, *self.out_s, *self.back_s],
            change=[0.0] * (6 * problem.num_replicas),  # memory is the chooser's business
            feeds=[*plain.feeds, *wakes, *wakes],
            needs=[*plain.needs, *([0] * (2 * problem.num_replicas))],
        )

    def code(self, op: int, k: int, i: int) -> int:
        """Of microbatch i of the flow of replica k."""
        return op * self.step + self.base[k] + i * self.flows

    def trip_s(self, replica: int) -> float:
        """Least seconds from the start of a replica's F to the start of its B."""
        q, stages = self.problem, self.task.placement.num_stages
        last = (replica // stages + 1) * stages - 1
        there = sum(q.f_s[k] + q.down_s[k] for k in range(replica, last))
        return there + q.f_s[last] + sum(q.b_s[k + 1] + q.up_s[k + 1] for k in range(replica, last))

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
    """One run of a policy. Numbers of microbatches count within their flow."""

    def __init__(self, shop: _Shop, policy: Policy) -> None:
        q = self.q = shop.problem
        self.shop, self.policy = shop, policy
        n, p = q.num_replicas, q.num_ranks
        self.clock = Clock(shop.tables)
        self.begun_f, self.begun_b, self.ended_b, self.begun_w = [0] * n, [0] * n, [0] * n, [0] * n
        self.begun = self.begun_f, self.begun_b, self.begun_w, self.begun_b
        self.given = [0.0] * n, [h - k for h, k in zip(q.held, q.kept, strict=True)], q.kept, q.held
        self.state = [[0] * c for c in shop.count]
        self.memory, self.fresh = [0.0] * p, [0.0] * p  # fresh: given back by O's since the rank was last idle
        self.running: list[tuple[float, int, int, int]] = []
        self.started: dict[int, float] = {}
        self.fused, self.copies = policy.weights == "fused", policy.leave != "none"
        self.out, self.most_out = [0] * p, shop.task.offloads_in_flight

    def run(self, give_up: float) -> tuple[tuple[float, ...], Starts] | None:
        """The objective and the other time, and when everything starts; None if it gets stuck, or takes longer than that."""
        self.clock.run(self._choose, until=give_up * _LOOSE)
        p, clock = self.q.num_ranks, self.clock
        if sum(map(len, clock.rows[:p])) < sum(self.shop.count) * (2 if self.fused else 3):
            return None
        spans = [b - a for a, b in zip(clock.first[:p], clock.free[:p], strict=True)]
        return self.shop.task.order(max(clock.free[:p]), max(spans)), self.shop.starts(self.started)

    def _choose(self, rank: int, now: float) -> int:
        """What a rank or a host lane starts; lanes have the numbers from p on."""
        while self.running and self.running[0][0] <= now:
            self._ended(*heapq.heappop(self.running))
        p, clock = self.q.num_ranks, self.clock
        if rank >= p:
            return self._copy(rank - p, now) if self.copies else -1
        if not self.copies:
            return self._compute(rank, now)
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
        code = self.shop.code(op, k, i)
        self.started[code] = now
        heapq.heappush(self.running, (now + self.shop.tables.seconds[code // self.q.num_microbatches], op, k, i))
        return code

    def _ended(self, end: float, op: int, k: int, i: int) -> None:
        rank = self.q.rank[k]
        if op == O:
            self.state[k][i] = _AWAY
            self.memory[rank] -= self.shop.leaves[k]
            self.fresh[rank] += self.shop.leaves[k]
        elif op == L:
            self.state[k][i] = _BACK
            self.out[rank] -= 1
        else:
            self.ended_b[k] += op == B
            self.memory[rank] -= self.given[op][k]

    # Compute.

    def _compute(self, r: int, now: float) -> int:
        """The code of what the policy takes next on idle rank ``r``, if anything can start."""
        mine, policy = self.shop.mine[r], self.policy
        back = next((k for k in reversed(mine) if self._can_b(k, now)), -1)
        ahead = next((k for k in reversed(mine) if self._can_f(r, k, now)), -1)
        weight = -1 if self.fused else next((k for k in mine if self.begun_w[k] < self.ended_b[k]), -1)
        if weight >= 0 and policy.weights == "eager":
            return self._run(W, weight, now)
        if back >= 0 and not (policy.forward_first and ahead >= 0):
            return self._run(BW if self.fused else B, back, now)
        if ahead >= 0:
            self.memory[r] += self.q.held[ahead]
            self.state[ahead][self.begun_f[ahead]] = _HERE
            return self._run(F, ahead, now)
        if weight >= 0 and not (policy.weights == "gap" and self._better_wait(r, now + self.q.w_s[weight], now)):
            return self._run(W, weight, now)
        return -1

    def _run(self, op: int, k: int, now: float) -> int:
        i = self.begun[op][k]
        self.begun[op][k] += 1
        return self._start(op, k, i, now)

    def _can_b(self, k: int, now: float, soon: float = -1.0) -> bool:
        """Whether the next B of a replica can start at ``now``, or with ``soon`` at some time before that."""
        i = self.begun_b[k]
        if i >= self.shop.count[k] or self.state[k][i] not in (_HERE, _BACK):
            return False
        arrives = self.clock.ready[self.shop.code(B, k, i)]
        return now < arrives < soon if soon >= 0 else arrives <= now

    def _can_f(self, r: int, k: int, now: float, soon: float = -1.0) -> bool:
        i = self.begun_f[k]
        if i >= self.shop.count[k] or i - self.begun_b[k] >= self.policy.caps[k]:
            return False
        arrives = self.clock.ready[self.shop.code(F, k, i)]
        if not (now < arrives < soon if soon >= 0 else arrives <= now):
            return False
        return self.memory[r] + self.q.held[k] + self._reserve(r) <= self.shop.room[r]

    def _reserve(self, r: int) -> float:
        """Room that the next microbatch to turn back needs, if it is away."""
        if not self.copies or self.policy.bold:
            return 0.0
        away = (k for k in self.shop.mine[r] if self.begun_b[k] < self.begun_f[k])
        return max(
            (self.shop.leaves[k] for k in away if _LEAVING <= self.state[k][self.begun_b[k]] <= _AWAY), default=0.0
        )

    def _better_wait(self, r: int, end: float, now: float) -> bool:
        """Whether something that could run arrives before ``end``."""
        return any(self._can_b(k, now, end) or self._can_f(r, k, now, end) for k in self.shop.mine[r])

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
        shop, found = self.shop, (self.q.num_microbatches, -1)
        for k in shop.mine[r]:
            low = self.begun_b[k]
            near = range(low, min(low + self.policy.prefetch, self.begun_f[k]))
            found = min(found, next(((i, k) for i in near if self.state[k][i] == _AWAY), found))
        i, k = found
        if k < 0:
            return -1
        unnamed = 0.0 if shop.shared else self.fresh[r]  # an S for it would stand behind the running slot
        if self.memory[r] + shop.leaves[k] + unnamed > shop.room[r]:
            return -1
        self.memory[r] += shop.leaves[k]
        self.state[k][i] = _COMING
        return self._start(L, k, i, now)

    def _copy_out(self, r: int, now: float) -> int:
        shop, policy = self.shop, self.policy
        longest, chosen, number = -1, -1, -1
        if self.out[r] == self.most_out:
            return -1
        for k in shop.mine[r]:
            need = self.memory[r] + 2 * self.q.held[k] > shop.room[r]
            if not shop.leaves[k] or (policy.leave == "need" and not need):
                continue
            low = self.begun_b[k] + policy.keep
            for i in range(self.begun_f[k] - 1, low - 1, -1):
                if self.state[k][i] == _HERE and (policy.away is None or policy.away[k][i]) and self._made(k, i, now):
                    if i - low > longest:
                        longest, chosen, number = i - low, k, i
                    break
        if chosen < 0:
            return -1
        self.state[chosen][number] = _LEAVING
        self.out[r] += 1
        return self._start(O, chosen, number, now)

    def _made(self, k: int, i: int, now: float) -> bool:
        """Whether an F has ended."""
        return self.started[self.shop.code(F, k, i)] + self.q.f_s[k] <= now


class _Draws:
    """Policies for one task: a fixed few, then drawn ones, and changes to ``base``, the last that was as good as the best."""

    def __init__(self, shop: _Shop, target: float, rng: random.Random) -> None:
        self.shop, self.rng = shop, rng
        self.base: Policy | None = None
        q, costs = shop.problem, shop.task.costs
        work_s = max(sum(q.f_s[k] + q.b_s[k] + q.w_s[k] for k in mine) for mine in shop.mine) / shop.flows
        self.period_s = max(work_s, target / q.num_microbatches if 0 < target < inf else 0.0)
        copies = any(shop.leaves)
        self.leave: tuple[Literal["none", "need", "all"], ...] = ("need", "all") if copies else ("none",)
        split = all(at_most(b + c, w) for w, b, c in zip(costs.bw_s, costs.b_s, costs.w_s, strict=True))
        self.weights: tuple[Weights, ...] = ("gap", "fill", "eager") + (() if split else ("fused",))

    def all(self) -> Iterator[Policy]:
        """A few fixed ones, which suffice where the lane keeps up; then one fixed and one drawn in turn; then drawn ones."""
        fixed, drawn = self._fixed(), self._drawn()
        yield from islice(fixed, _FEW)
        for policy in fixed:
            yield policy
            yield next(drawn)
        yield from drawn

    def _fixed(self) -> Iterator[Policy]:
        """What helped most often first."""
        copies = self.leave[0] != "none"
        depths = ((1, 1), (1, 2), (2, 2)) if copies else ((1, 1),)
        for ahead, leave, weights in product((False, True), self.leave, self.weights):
            for (keep, prefetch), factor in product(depths, (99.0, 1.0, 1.5)):
                yield Policy(self._caps(factor), weights, ahead, leave, keep, prefetch)
        for weights, factor in product(self.weights, (1.0, 1.5)) if copies else ():
            yield Policy(self._caps(factor), weights, leave="none")

    def _drawn(self) -> Iterator[Policy]:
        """Without end."""
        while True:
            yield self._anew()
            if self.base is not None:
                yield self._changed(self.base)

    def _anew(self) -> Policy:
        pick = self.rng.choice
        policy = Policy(
            self._caps(pick((0.7, 0.85, 1.0, 1.2, 1.4, 1.6, 2.0, 99.0))),
            pick(self.weights),
            forward_first=self.rng.random() < 0.4,
            leave=pick(self.leave),
            keep=pick((0, 1, 1, 2)),
            prefetch=pick((1, 2, 3)),
        )
        policy = replace(policy, bold=policy.keep == 0 and self.rng.random() < 0.5)
        if policy.leave == "none" or self.rng.random() < 0.4:
            return policy
        return replace(
            policy, away=self._away(self.period_s * pick((1.0, 1.05, 1.1, 1.15)), pick((0.7, 0.8, 0.9, 1.0)))
        )

    def _changed(self, policy: Policy) -> Policy:
        """Another cap or preference; more often, a few microbatches that stay on some neighbouring replicas, or leave."""
        pick, at = self.rng.choice, self.rng.randrange(len(policy.caps))
        if policy.leave != "none" and self.rng.random() < 0.7:
            away = [list(x) for x in policy.away or ([True] * n for n in self.shop.count)]
            leaves = self.rng.random() < 0.5
            for _ in range(pick((1, 1, 2, 4))):
                i = self.rng.randrange(max(self.shop.count))
                for row in away[at : at + pick((1, 1, 2, 4))]:
                    row[min(i, len(row) - 1)] = leaves
            return replace(policy, away=tuple(map(tuple, away)))
        if self.rng.random() < 0.7:
            caps = list(policy.caps)
            caps[at] = max(1, min(caps[at], self.shop.count[at]) + pick((-2, -1, 1, 2)))
            return replace(policy, caps=tuple(caps))
        return replace(policy, weights=pick(self.weights), prefetch=pick((1, 2, 3)), keep=pick((0, 1, 2)), bold=False)

    def _caps(self, factor: float) -> tuple[int, ...]:
        """Microbatches in flight: as many as keep the rank busy for a trip with F's and B's, times ``factor``."""
        q, caps = self.shop.problem, [0] * self.shop.problem.num_replicas
        for mine in self.shop.mine:
            busy = sum(q.f_s[k] + q.b_s[k] for k in mine)
            for k in mine:
                full = self.shop.trip_s(k) / busy + 1 if busy > 0 else q.num_microbatches
                caps[k] = max(1, min(q.num_microbatches, ceil(full * factor)))
        return tuple(caps)

    def _away(self, period_s: float, filled: float) -> tuple[tuple[bool, ...], ...]:
        """Which microbatches may leave, evenly spread: the share that keeps ``filled`` × limit held on average."""
        phase, mine = self.rng.random(), self.shop.mine
        share = {k: self._share(r, ks, period_s, filled) for r, ks in enumerate(mine) for k in ks}
        return tuple(
            tuple(floor((i + 1) * share[k] + phase) > floor(i * share[k] + phase) for i in range(n))
            for k, n in enumerate(self.shop.count)
        )

    def _share(self, r: int, mine: Sequence[int], period_s: float, filled: float) -> float:
        shop, q = self.shop, self.shop.problem
        area = saved = out = back = 0.0
        for k in mine:
            trip = shop.trip_s(k)
            area += q.held[k] * (trip + q.b_s[k]) + q.kept[k] * q.w_s[k]
            saved += shop.leaves[k] * max(0.0, trip - q.f_s[k] - shop.out_s[k] - shop.back_s[k])
            out, back = out + shop.out_s[k], back + shop.back_s[k]
        lane = (out + back if shop.shared else max(out, back)) * len(shop.riders[shop.lanes[r][0] // 2])
        most = min(1.0, period_s / lane) if lane > 0 else 1.0
        return min(most, max(0.0, (area - filled * shop.room[r] * period_s) / saved)) if saved > 0 else 0.0
