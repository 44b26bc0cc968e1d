"""Schedules with offload from list scheduling: many policies, played fast, the best kept.

A rank takes the next B, F or W of its stages (microbatches of a stage in order) as soon as inputs, residency and memory allow,
a W only where nothing else that could run arrives before its end. Its host lanes, which the clock
(:mod:`~jaxpipe.schedule.clock`) takes for ranks of their own, copy residuals out (O) and back (L). What is played
is start times; :func:`~jaxpipe.search.solve.actions.schedule_of` makes rows of them, with an S where an order must say that
an F waits for an O.

Which policy wins depends on how the host lane's capacity compares with what memory needs, so a fixed few are tried first, then
seeded sampler, then changes to the best. For chains with one stage a rank a lot of policies is scored at once, and what is best
played again. Where the lane keeps up, any activation may leave while memory is short. Where it does not, each rank lets only a
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
from dataclasses import replace
from itertools import islice, product
from math import ceil, inf
from typing import NamedTuple

import numpy as np

from jaxpipe.schedule.clock import NEVER, Clock, Feed
from jaxpipe.schedule.engine import host_groups
from jaxpipe.schedule.ir import Action, Schedule
from jaxpipe.schedule.problem import BW, B, F, Problem, W
from jaxpipe.schedule.timeline import MEMORY, Timeline, at_most
from jaxpipe.search.bounds import Flows, work_by_stage
from jaxpipe.search.list_schedule.many_policies import MOST_IN_FLIGHT, ChainWithHost, Flags, OffloadPolicy, Whole, play
from jaxpipe.search.solve.actions import ActionTable, Starts, schedule_within_limits, starts_at
from jaxpipe.search.solve.task import SolveTask

O, L = 4, 5  # noqa: E741
_OPS = ("F", "B", "W", "BW", "O", "L")
_HERE, _AWAY, _BACK = (F, True), (O, True), (L, True)  # where residuals are
MOST = 100_000
"""Policies tried at most."""
# Policies of a chain with one stage a rank and a shared lane are played together, in NumPy, and the winner again here;
# everything else (several chunks, a lane a direction) is played here alone. Both players stay: without the one in NumPy
# longest spans after 15 CPU seconds with k=2 are 1.0%, 5.0% and 1.8% longer (unit costs, p=8 at p/4 and p/2, p=16 at p/2; 194,
# 121, 225 with it), and 0.3%, 2.5% and 0% with Table 5's costs.
TOGETHER = 4096
"""Policies × ranks that are played at once, with equal durations in the time of a few policies alone
(:mod:`~jaxpipe.search.list_schedule.many_policies`)."""
_FEW_TICKS, _FEW_MICROBATCHES = 48, 300
"""Ticks of a microbatch's work on a rank, and microbatches times ranks, up to which lots gain: p=8, m=32 with Table 5's costs
takes 6 ms a policy for 34, but p=32, m=128 20 s a lot."""
_MOST_KEPT, _FIRST_LOTS = 32, 4  # how many of the best are changed, after how many lots of drawn ones; not tuned
_LOOSE = 1 + 1e-6  # more than what rounding to nine digits takes


def offload_candidates(
    task: SolveTask, target: float, deadline: Callable[[], bool], *, seed: int = 0, most: int = MOST
) -> Iterator[Schedule]:
    """Yield valid schedules of ``task`` that keep its limits, each better than the one before.

    Better: less of the task's objective (for ``lexicographic`` the makespan), or as much with less of the other of makespan and
    longest span. Ends when ``target`` seconds are reached, after ``most`` policies, or when ``deadline()`` says so; it is asked
    before each policy, or lot of policies that are played together (:data:`TOGETHER`). With a deadline that reads no clock the
    same task and seed give the same schedules. Yields nothing where no policy keeps the limits. A task without ``offload`` gets
    schedules without.

    Raises:
        ScheduleError: the placement's stages form no chain on single ranks, or the costs are for another number of stages or
            too uneven for a grid.
    """
    model = _OffloadModel(task)
    sampler = _PolicySampler(model, target, random.Random(seed))
    head_s = model.head_s if task.objective == "span" else 0.0
    best: tuple[float, ...] = inf, inf
    while sampler.kept < most and not deadline():
        policies = sampler.next_policies(most - sampler.kept)
        scores = model.scores(policies, sampler.give_up + head_s)
        sampler.keep(scores, policies)
        # scores are the clock's: a policy counts once its rows are checked and simulated
        for score, policy in sorted(zip(scores, policies, strict=True), key=lambda x: x[0].order):
            if score.order >= best:
                break
            solved = _Simulation(model, policy).result()
            if solved is not None and (value := task.order(solved[1].makespan, solved[1].max_span)) < best:
                best = value
                yield solved[0]
                if at_most(best[0], target):
                    return
                break


class _Score(NamedTuple):
    """``order``: as the task orders its answers. ``mean``: of the spans, the long ones above all; told apart by it, policies of
    one makespan lead to better ones."""

    order: tuple[float, ...]
    mean: float


class _OffloadModel:
    """The tables of a task, by replica and rank; codes are those of :mod:`~jaxpipe.schedule.problem`, with O and L as ops 4 and
    5. Each host lane is a rank of its own, number p + lane.

    ``codes``: of a replica's F's. ``replicas``: a rank's, those that have some; ``stage_works``: what it holds for them.
    ``lanes``: a rank's host lanes; ``ranks_of_lane``: by two lanes, the ranks that have them.
    """

    def __init__(self, task: SolveTask) -> None:
        self.task, self.actions = task, ActionTable(task)
        self.problem = problem = Problem.of(task.placement, task.num_microbatches, task.costs)
        costs, p, n, host = task.costs, problem.num_ranks, problem.num_replicas, task.costs.host
        self.codes = [[problem.code(F, k, i) for i in problem.microbatches(k)] for k in range(n)]
        self.replicas = [[k for k in problem.replicas_of(r) if self.codes[k]] for r in range(p)]
        flows = Flows(task.placement, task.num_microbatches, costs)
        self.stage_works = [work_by_stage(flows, r) for r in range(p)]
        may_leave, self.leaves = {self.actions.action[o].stage for o in self.actions.copies}, [0.0] * n
        for replicas, stage_works in zip(self.replicas, self.stage_works, strict=True):
            for k, x in zip(replicas, stage_works, strict=True):
                if k % task.placement.num_stages in may_leave:
                    self.leaves[k] = x.leaves
        self.room = [x * (1 + MEMORY) for x in task.safe_limits()]
        self.shared, groups = host.mode == "shared", host_groups(host, p)
        lane = [min((x for x in groups if groups[x] == groups[r]), default=r) if r in groups else r for r in range(p)]
        self.ranks_of_lane = [[r for r in range(p) if lane[r] == q] for q in range(p)]
        self.lanes = [(2 * q,) if self.shared else (2 * q, 2 * q + 1) for q in lane]
        # a BW that takes no less than B and W gains nothing
        self.split = all(at_most(b + c, w) for w, b, c in zip(costs.bw_s, costs.b_s, costs.w_s, strict=True))
        self.head_s = sum(problem.f_s) + sum(problem.down_s)
        plain, wakes = problem.tables, [(Feed(r, -1, 0.0, 0.0, ()),) for r in problem.rank]
        seconds = [
            values[k % task.placement.num_stages] for values in (costs.offload_s, costs.load_s) for k in range(n)
        ]
        # host lanes are ranks p to 3p - 1 of the clock; the end of an O or L wakes the rank it is for
        self.tables = replace(
            plain,
            num_ranks=3 * p,
            ranks=[*plain.ranks, *((p + self.lanes[r][which],) for which in (0, -1) for r in problem.rank)],
            seconds=[*plain.seconds, *seconds],
            change=[*plain.change, *(-x for x in self.leaves), *self.leaves],
            feeds=[*plain.feeds, *wakes, *wakes],
            needs=[*plain.needs, *([0] * (2 * n))],
        )

        is_chain = n == p == task.placement.num_stages and all(len(x) == 1 for x in self.ranks_of_lane)
        copies = [*costs.offload_s, *costs.load_s] if any(self.leaves) else []
        # what takes no time is followed by events of the same time
        each = min((*problem.f_s, *problem.b_s, *problem.w_s, *copies), default=0.0) > 0
        # Lots go from event to event, which equal durations share.
        work = self.actions.ticks.of(max(map(sum, zip(problem.f_s, problem.b_s, problem.w_s, strict=True))))
        quick = work <= _FEW_TICKS or p * problem.num_microbatches <= _FEW_MICROBATCHES
        room, out = [self.room[r] for r in problem.rank], task.offloads_in_flight
        plays_at_once = is_chain and each and quick and self.shared and self.split
        self.chain = ChainWithHost(problem, self.tables, self.leaves, room, out) if plays_at_once else None

    def scores(self, policies: Sequence[OffloadPolicy], give_up: float) -> list[_Score]:
        """Return the score of each policy; inf for one that gets stuck or takes longer than ``give_up`` seconds."""
        if self.chain is None:
            played = [_Simulation(self, x).run(give_up * _LOOSE) for x in policies]
        else:
            played = list(zip(*play(self.chain, policies, give_up * _LOOSE), strict=True))
        return [
            _Score(self.task.order(float(makespan), float(np.max(spans))), float(np.mean(np.power(spans, 4.0))))
            for makespan, spans in played
        ]

    def starts(self, begun: dict[int, float]) -> Starts:
        """Convert start times by code into those of actions."""
        begun_at = []
        for code, seconds in begun.items():
            op, k, i = self.problem.decode(code)
            begun_at.append((Action(_OPS[op], k % self.task.placement.num_stages, i), self.problem.rank[k], seconds))
        starts = starts_at(self.actions, begun_at)
        assert starts is not None, "a policy played what is not there"
        return starts


class _Simulation:
    """One run of a policy. Numbers of microbatches count within their flow.

    ``where[k][i]``: the last op that residuals have seen, and whether it has ended. ``memory``: what a rank holds; what an
    action takes it takes at its start, what it gives back at its end, which the clock's own account does not tell apart.
    ``fresh``: of that, what O's gave back since the rank was last idle. ``out``: microbatches on the host or under way.
    """

    def __init__(self, model: _OffloadModel, policy: OffloadPolicy) -> None:
        q = self.q = model.problem
        self.model, self.policy = model, policy
        self.caps, self.away = policy.caps.tolist(), policy.away.tolist()
        self.n, self.step, p = q.num_replicas, q.num_replicas * q.num_microbatches, q.num_ranks
        self.clock = Clock(model.tables)
        self.begun_f, self.begun_b, self.begun_w = ([0] * self.n for _ in range(3))
        self.where = [[(F, False)] * len(codes) for codes in model.codes]
        self.memory, self.fresh, self.out = [0.0] * p, [0.0] * p, [0] * p
        self.running: list[tuple[float, int, int, int]] = []
        self.started: dict[int, float] = {}

    def run(self, until: float = inf) -> tuple[float, Sequence[float]]:
        """Return the makespan and the ranks' spans; inf if it gets stuck, or takes longer than that."""
        self.clock.run(self._choose, until=until)
        p, clock, last = self.q.num_ranks, self.clock, self.begun_b if self.policy.fused else self.begun_w
        if sum(last) < sum(map(len, self.model.codes)):
            return inf, (inf,)
        return max(clock.free[:p]), [b - a for a, b in zip(clock.first[:p], clock.free[:p], strict=True)]

    def result(self) -> tuple[Schedule, Timeline] | None:
        """Return the schedule, if it keeps the limits."""
        if self.run()[0] == inf:
            return None
        return schedule_within_limits(self.model.actions, self.model.starts(self.started), "offload-list")

    def _choose(self, rank: int, now: float) -> int:
        """Choose what a rank or a host lane starts; lanes have the numbers from p on."""
        while self.running and self.running[0][0] <= now:
            self._end(*heapq.heappop(self.running)[1:])
        p, clock = self.q.num_ranks, self.clock
        if rank >= p:
            return self._copy(rank - p, now)
        self.fresh[rank] = 0.0
        if not self.model.shared:
            self._fill_lanes(rank, now)  # only now can an S go before an L
        code = self._compute(rank, now)
        if code >= 0:
            clock.start(rank, code, now)
        self._fill_lanes(rank, now)
        return -1

    def _fill_lanes(self, rank: int, now: float) -> None:
        p, clock = self.q.num_ranks, self.clock
        for lane in self.model.lanes[rank]:
            if clock.free[p + lane] <= now and (code := self._copy(lane, now)) >= 0:
                clock.start(p + lane, code, now)

    def _start(self, op: int, k: int, i: int, now: float) -> int:
        """Return the code of an action that starts."""
        kind, rank, tables = op * self.n + k, self.q.rank[k], self.model.tables
        code = self.model.codes[k][i] + op * self.step
        self.started[code] = now
        self.where[k][i] = op, False
        self.memory[rank] += max(0.0, tables.change[kind])
        self.out[rank] += op == O
        heapq.heappush(self.running, (now + tables.seconds[kind], op, k, i))
        return code

    def _end(self, op: int, k: int, i: int) -> None:
        rank, change = self.q.rank[k], min(0.0, self.model.tables.change[op * self.n + k])
        self.where[k][i] = op, True
        self.memory[rank] += change
        self.fresh[rank] -= change if op == O else 0.0
        self.out[rank] -= op == L

    # Compute.

    def _compute(self, r: int, now: float) -> int:
        """Return the code of what the policy takes next on idle rank ``r``, if anything can start."""
        replicas, policy = self.model.replicas[r], self.policy
        # the latest stage first: it gives memory back soonest
        back = next((k for k in reversed(replicas) if self._b_at(k) <= now), -1)
        ahead = next((k for k in reversed(replicas) if self._f_at(r, k) <= now), -1)
        weight = -1 if policy.fused else next((k for k in replicas if self.begun_w[k] < self.begun_b[k]), -1)
        if back >= 0 and not (policy.forward_first and ahead >= 0):
            return self._next(BW if policy.fused else B, self.begun_b, back, now)
        if ahead >= 0:
            return self._next(F, self.begun_f, ahead, now)
        # nobody waits for a W: it comes last, and only where it keeps nobody waiting
        if weight >= 0 and not self._better_wait(r, now + self.q.w_s[weight], now):
            return self._next(W, self.begun_w, weight, now)
        return -1

    def _next(self, op: int, begun: list[int], k: int, now: float) -> int:
        begun[k] += 1
        return self._start(op, k, begun[k] - 1, now)

    def _b_at(self, k: int) -> float:
        """Return when the next B of a replica can start at the earliest, as far as that is known."""
        i, codes = self.begun_b[k], self.model.codes[k]
        if i == len(codes) or self.where[k][i] not in (_HERE, _BACK):
            return NEVER
        return self.clock.ready[codes[i] + self.step]

    def _f_at(self, r: int, k: int) -> float:
        i, codes = self.begun_f[k], self.model.codes[k]
        if i == len(codes) or (at := self.clock.ready[codes[i]]) == NEVER or i - self.begun_b[k] >= self.caps[k]:
            return NEVER
        fits = self.memory[r] + self.q.reserved[k] + self._reserve(r) <= self.model.room[r]
        return at if fits else NEVER

    def _reserve(self, r: int) -> float:
        """Return the room that the next microbatch to turn back needs, if it is away."""
        if not self.policy.near:
            return 0.0
        turning = ((k, self.begun_b[k]) for k in self.model.replicas[r] if self.begun_b[k] < self.begun_f[k])
        return max((self.model.leaves[k] for k, i in turning if self.where[k][i][0] == O), default=0.0)

    def _better_wait(self, r: int, end: float, now: float) -> bool:
        """Return whether something that could run arrives before ``end``."""
        return any(now < at < end for k in self.model.replicas[r] for at in (self._b_at(k), self._f_at(r, k)))

    # Copies.

    def _copy(self, lane: int, now: float) -> int:
        """Return the code of what idle host lane ``lane`` does next for one of its ranks; -1 for nothing."""
        for r in self.model.ranks_of_lane[lane // 2]:
            # back before out: the next B waits for what comes back, nothing waits for what leaves
            code = self._copy_back(r, now) if self.model.shared or lane % 2 else -1
            if code < 0 and not lane % 2:
                code = self._copy_out(r, now)
            if code >= 0:
                return code
        return -1

    def _copy_back(self, r: int, now: float) -> int:
        model, near, away = self.model, max(1, self.policy.near), []
        for k in model.replicas[r]:
            turning = range(self.begun_b[k], min(self.begun_b[k] + near, self.begun_f[k]))
            away += [(i, k) for i in turning if self.where[k][i] == _AWAY]
        i, k = min(away, default=(-1, -1))
        unnamed = 0.0 if model.shared else self.fresh[r]  # an S for it would stand behind the running slot
        if k < 0 or self.memory[r] + model.leaves[k] + unnamed > model.room[r]:
            return -1
        return self._start(L, k, i, now)

    def _copy_out(self, r: int, now: float) -> int:
        """Return the one that turns back last: of each replica what began last, may leave and is still here."""
        model, policy, candidates = self.model, self.policy, []
        if self.out[r] == model.task.offloads_in_flight:
            return -1
        for k in model.replicas[r]:
            # with room for two more of these none has to leave
            if not model.leaves[k] or self.memory[r] + 2 * self.q.held[k] <= model.room[r]:
                continue
            low, away = self.begun_b[k] + policy.near, self.away[k]
            last = (i for i in reversed(range(low, self.begun_f[k])) if away[i] and self.where[k][i] == _HERE)
            candidates += [(i - low, k, i) for i in islice(last, 1)]
        if not candidates:
            return -1
        _, k, i = max(candidates, key=lambda x: x[0])
        return self._start(O, k, i, now)


class _PolicySampler:
    """Policies for one task: a fixed few, then drawn ones, and changes to those in ``best``."""

    def __init__(self, model: _OffloadModel, target: float, rng: random.Random) -> None:
        self.model, self.rng = model, rng
        q = model.problem
        work_s = max(sum(x.f_s + x.back_s for x in stage_works) for stage_works in model.stage_works)
        work_s /= model.task.placement.num_flows
        self.period_s = max(work_s, target / q.num_microbatches if 0 < target < inf else 0.0)
        self.fused = (False,) if model.split else (False, True)
        self.every = np.ones((q.num_replicas, q.num_microbatches), bool)
        self.best: list[tuple[_Score, int, OffloadPolicy]] = []
        self.size, self.most_kept, self.drawn = 1, 1, 0.5
        if model.chain is not None:
            self.size, self.most_kept, self.drawn = max(16, TOGETHER // q.num_ranks), _MOST_KEPT, 0.125
        self.kept = 0
        settings = product((1, 2, 3, 0), self.fused, (99.0, 1.0, 0.7))
        self.fixed = (
            OffloadPolicy(self._caps(factor), self.every, near, fused=fused) for near, fused, factor in settings
        )

    def next_policies(self, most: int) -> list[OffloadPolicy]:
        """Yield policies to play next: a few fixed ones, which suffice where the lane keeps up; then drawn ones and
        changes, without end."""
        size = min(self.size, most)
        drawn = 1.0 if not self.best or self.kept < _FIRST_LOTS * (self.size - 1) else self.drawn
        return list(islice(self.fixed, size)) or [
            self._draw() if self.rng.random() < drawn else self._mutate() for _ in range(size)
        ]

    @property
    def give_up(self) -> float:
        """Return the seconds after which a policy is given up."""
        return self.best[-1][0].order[0] if len(self.best) == self.most_kept else inf

    def keep(self, scores: Sequence[_Score], policies: Sequence[OffloadPolicy]) -> None:
        """Keep the best policies, of equal ones the latest."""
        for score, policy in zip(scores, policies, strict=True):
            self.kept += 1
            if score.order[0] < inf:
                self.best.append((score, -self.kept, policy))
        self.best.sort(key=lambda x: (x[0].order[0], x[0].mean, x[1]))
        del self.best[self.most_kept :]

    def _draw(self) -> OffloadPolicy:
        pick, few = self.rng.choice, self.rng.random() < 0.6
        return OffloadPolicy(
            self._caps(pick((0.7, 0.85, 1.0, 1.2, 1.4, 1.6, 2.0, 99.0))),
            self._away(self.period_s * pick((1.0, 1.05, 1.1, 1.15)), pick((0.7, 0.8, 0.9, 1.0))) if few else self.every,
            near=pick((0, 1, 2, 3)),
            forward_first=self.rng.random() < 0.4,
            fused=pick(self.fused),
        )

    def _mutate(self) -> OffloadPolicy:
        """Return one of the best with a few changes on some neighbouring replicas: caps; microbatches that leave, or stay,
        or change places with the next; now and then another preference."""
        rng, pick = self.rng, self.rng.choice
        # mostly one of the very best, now and then a worse one
        policy = self.best[min(int(rng.expovariate(4 / len(self.best))), len(self.best) - 1)][2]
        caps, away, near, first = policy.caps.copy(), policy.away.copy(), policy.near, policy.forward_first
        replicas, count = away.shape
        for _ in range(pick((1, 1, 2, 3))):
            at, kind = rng.randrange(replicas), rng.random()
            neighbours = slice(at, at + pick((1, 1, 2, 4, replicas)))
            if kind < 0.25:
                caps[neighbours] = (caps[neighbours] + pick((-2, -1, 1, 2))).clip(1, self.most)
            elif kind < 0.3:
                near = pick((0, 1, 2, 3))
            elif kind < 0.33:
                first = not first
            elif kind < 0.5:
                i = rng.randrange(count)
                away[neighbours, i : i + 2] = away[neighbours, i : i + 2][:, ::-1].copy()
            else:
                away[neighbours, rng.sample(range(count), min(count, pick((1, 1, 2, 4))))] = rng.random() < 0.5
        return OffloadPolicy(caps, away, near, first, policy.fused)

    @property
    def most(self) -> int:
        """Return how many microbatches of a replica any policy may have in flight."""
        count = self.model.task.num_microbatches
        return count if self.model.chain is None else min(count, MOST_IN_FLIGHT)

    def _caps(self, factor: float) -> Whole:
        """Return microbatches in flight: as many as keep the rank busy for a trip with F's and B's, times ``factor``."""
        model, caps = self.model, np.full(self.model.problem.num_replicas, self.most)
        for replicas, stage_works in zip(model.replicas, model.stage_works, strict=True):
            busy = sum(x.f_s + x.b_s for x in stage_works)
            for k, x in zip(replicas, stage_works, strict=True) if busy > 0 else ():
                caps[k] = max(1, min(self.most, ceil((x.trip_s / busy + 1) * factor)))
        return caps

    def _away(self, period_s: float, filled: float) -> Flags:
        """Return which microbatches may leave, evenly spread: the share that keeps ``filled`` × limit held on average."""
        model, numbers = self.model, np.arange(self.every.shape[1])
        share = np.array([self._share(r, period_s, filled) for r in model.problem.rank])[:, None]
        phase = self.rng.random()
        leaves: Flags = np.floor((numbers + 1) * share + phase) > np.floor(numbers * share + phase)
        return leaves

    def _share(self, r: int, period_s: float, filled: float) -> float:
        model, stage_works = self.model, self.model.stage_works[r]
        saved = sum(x.saved() for x in stage_works)
        # ranks that share a lane get equal parts of it
        lane = sum(x.together_s for x in stage_works) * len(model.ranks_of_lane[model.lanes[r][0] // 2])
        most = min(1.0, period_s / lane) if lane > 0 else 1.0
        # Little's law: memory × time of a microbatch, less what the limit has for it in a period
        short = sum(x.area() for x in stage_works) - filled * model.room[r] * period_s
        return min(most, max(0.0, short / saved)) if saved > 0 else 0.0
