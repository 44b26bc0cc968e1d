"""Schedules with offload from list scheduling: many policies, played fast, the best kept.

Which policy wins depends on how the host lane's capacity compares with what memory needs, so a fixed few are tried first, then
seeded draws. Where the lane keeps up, any activation may leave while memory is short. Where it does not, each rank lets only a
share of the microbatches leave, evenly spread, so that the rest stays for its whole trip. The share follows from Little's law:
a microbatch that stays holds its memory for its trip, one that leaves only while it is copied; with one microbatch each
``period`` seconds, what is held on average must fit in the limit, and the copies in the lane. The engine:
:mod:`~jaxpipe.schedule.solve.offload_chooser`. Not tried: other orders than first come, first served among microbatches.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice, product
from math import ceil, floor, inf
from typing import Literal

from jaxpipe.schedule.check import check_schedule
from jaxpipe.schedule.ir import Schedule
from jaxpipe.schedule.simulate import simulate
from jaxpipe.schedule.solve.offload_chooser import run_policy
from jaxpipe.schedule.solve.offload_shop import GRID, Plan, Policy, Shop, Weights
from jaxpipe.schedule.solve.task import SolveTask

MOST = 2000
"""Policies tried at most."""
_FEW = 18
_SLACK = 1 + 1e-9
_LOOSE = 1.0 + 1e-6  # a plan that takes this much longer than the best is given up: simulated, a plan is no slower
Spread = Literal["even", "nested", "golden"]
_SPREADS: tuple[Spread, ...] = ("even", "nested", "golden")
_LANES: tuple[Literal["back", "out", "alternate"], ...] = ("back", "back", "out", "alternate")


def offload_candidates(
    task: SolveTask, target: float, deadline: Callable[[], bool], *, seed: int = 0, most: int = MOST
) -> Iterator[Schedule]:
    """Valid schedules of ``task`` that keep its limits, each better than the one before.

    Better: less of the task's objective (for ``lexicographic`` the makespan), or as much with less of the other of makespan and
    longest span. Ends when ``target`` seconds are reached, when ``deadline()`` says so, or after ``most`` policies; with a
    deadline that reads no clock the same task and seed give the same schedules. Yields nothing where no policy keeps the
    limits. A task without ``offload`` gets schedules without.

    Raises:
        ScheduleError: the placement's stages form no chain on single ranks, or the costs are for another number of stages.
    """
    shop = Shop(task)
    draws = _Draws(shop, target, random.Random(seed))
    best: tuple[float, float] = inf, inf
    for number, policy in enumerate(draws.all()):
        if number >= most or deadline():
            return
        plan = run_policy(shop, policy, draws.patience(best[0]))
        if plan is None or not _no_worse(_value(task, plan), best):
            continue
        draws.base = policy
        if not _is_less(_value(task, plan), best):
            continue
        schedule = shop.schedule("offload-list", plan)
        value = _checked(task, schedule)
        if value is not None and _is_less(value, best):
            best = value
            yield schedule
            if best[0] <= target * _SLACK:
                return


def _mirrored(i: int) -> float:
    """van der Corput's sequence: the binary digits of i behind the point, mirrored."""
    value, digit = 0.0, 0.5
    while i:
        value, digit, i = value + digit * (i & 1), digit / 2, i >> 1
    return value


def _golden(i: int) -> float:
    return i * 0.6180339887498949 % 1.0


def _value(task: SolveTask, plan: Plan) -> tuple[float, float]:
    return (plan.span, plan.makespan) if task.objective == "span" else (plan.makespan, plan.span)


def _checked(task: SolveTask, schedule: Schedule) -> tuple[float, float] | None:
    """(objective, the other time) as simulated; None if the limits are not kept."""
    check_schedule(schedule)
    timeline = simulate(schedule, task.costs)
    if not task.fits(timeline):
        return None
    times = timeline.max_span, timeline.makespan
    return times if task.objective == "span" else (times[1], times[0])


def _is_less(a: tuple[float, float], b: tuple[float, float]) -> bool:
    """Whether ``a`` is better by more than rounding."""
    return a[0] * _SLACK < b[0] or (a[0] <= b[0] * _SLACK and a[1] * _SLACK < b[1])


def _no_worse(a: tuple[float, float], b: tuple[float, float]) -> bool:
    return not _is_less(b, a)


class _Draws:
    """Policies for one task: a fixed few, then drawn ones, and changes to ``base``, the last that was as good as the best."""

    def __init__(self, shop: Shop, target: float, rng: random.Random) -> None:
        self.shop, self.rng = shop, rng
        self.base: Policy | None = None
        q, costs = shop.problem, shop.task.costs
        self.ranks = [shop.mine[r] for r in range(q.num_ranks)]
        flows = shop.task.placement.num_flows
        self.work_s = max(sum(q.f_s[k] + q.b_s[k] + q.w_s[k] for k in mine) for mine in self.ranks) / flows
        self.period_s = max(self.work_s, target / q.num_microbatches if 0 < target < inf else 0.0)
        self.head_s = sum(q.f_s) + sum(q.down_s)
        copies = shop.task.offload and any(shop.leaves)
        self.leave: tuple[Literal["none", "need", "all"], ...] = ("need", "all") if copies else ("none",)
        split = all(w >= b + c - 1e-9 * w for w, b, c in zip(costs.bw_s, costs.b_s, costs.w_s, strict=True))
        self.weights: tuple[Weights, ...] = ("gap", "half", "fill", "eager") + (() if split else ("fused",))

    def patience(self, best: float) -> float:
        """Seconds after which a plan can't beat ``best``: ranks begin to count when they begin to work."""
        late = self.head_s if self.shop.task.objective == "span" else 0.0
        return best * _LOOSE + late

    def all(self) -> Iterator[Policy]:
        """A few fixed ones, which suffice where the lane keeps up; then one fixed and one drawn in turn; then drawn ones."""
        fixed, drawn = self.fixed(), self.drawn()
        yield from islice(fixed, _FEW)
        for policy in fixed:
            yield policy
            yield next(drawn)
        yield from drawn

    def fixed(self) -> Iterator[Policy]:
        """What helped most often first."""
        depths = ((1, 1), (1, 2), (2, 2)) if self.leave[0] != "none" else ((1, 1),)
        for ahead, leave, weights in product((False, True), self.leave, self.weights):
            for (keep, prefetch), factor in product(depths, (99.0, 1.0, 1.5)):
                yield Policy(self._caps(factor), weights, ahead, leave, keep, prefetch)
        if self.leave[0] != "none":
            for ahead, weights, factor in product((False, True), self.weights, (1.0, 1.5)):
                yield Policy(self._caps(factor), weights, ahead, "none")

    def drawn(self) -> Iterator[Policy]:
        """Without end."""
        while True:
            yield self._anew()
            if self.base is not None:
                yield self._changed(self.base)

    def _anew(self) -> Policy:
        pick, leaves = self.rng.choice, self.rng.random() < 0.9
        policy = Policy(
            self._caps(pick((0.7, 0.85, 1.0, 1.2, 1.4, 1.6, 2.0, 99.0))),
            pick(self.weights),
            forward_first=self.rng.random() < 0.4,
            leave=pick(self.leave) if leaves else "none",
            keep=pick((0, 1, 1, 2)),
            prefetch=pick((1, 2, 3)),
            lane=pick(_LANES),
        )
        if policy.leave == "none":
            return policy
        policy = replace(policy, bold=policy.keep == 0 and self.rng.random() < 0.5)
        if self.rng.random() < 0.4:
            return policy
        period = self.period_s * pick((1.0, 1.05, 1.1, 1.15))
        return replace(policy, away=self._away(period, pick((0.7, 0.8, 0.9, 1.0)), pick(_SPREADS)))

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
        return replace(
            policy,
            weights=pick(self.weights),
            prefetch=pick((1, 2, 3)),
            keep=pick((0, 1, 2)),
            bold=False,
            lane=pick(_LANES),
        )

    def _caps(self, factor: float) -> tuple[int, ...]:
        """Microbatches in flight: as many as keep the rank busy for a trip with F's and B's, times ``factor``."""
        q, caps = self.shop.problem, [0] * self.shop.problem.num_replicas
        for mine in self.ranks:
            busy = sum(q.f_s[k] + q.b_s[k] for k in mine)
            for k in mine:
                full = self.shop.trip_s(k) / busy + 1 if busy > 0 else q.num_microbatches
                caps[k] = max(1, min(q.num_microbatches, ceil(full * factor)))
        return tuple(caps)

    def _away(self, period_s: float, filled: float, spread: Spread) -> tuple[tuple[bool, ...], ...]:
        """Which microbatches may leave, evenly spread: the share that keeps ``filled`` × limit held on average.

        ``spread``: ``even`` on each replica; ``nested``, ``golden``: what leaves where few do leaves where more do, too.
        """
        shares = [0.0] * self.shop.problem.num_replicas
        for r, mine in enumerate(self.ranks):
            share = self._share(r, mine, period_s, filled)
            for k in mine:
                shares[k] = share
        start, phase = self.rng.randrange(8), self.rng.random()
        away = []
        for x, n in zip(shares, self.shop.count, strict=True):
            if spread == "even":
                away.append(tuple(floor((i + 1) * x + phase) > floor(i * x + phase) for i in range(n)))
            else:
                place = _mirrored if spread == "nested" else _golden
                away.append(tuple(place(i + start) < x for i in range(n)))
        return tuple(away)

    def _share(self, r: int, mine: tuple[int, ...], period_s: float, filled: float) -> float:
        shop, q = self.shop, self.shop.problem
        area = saved = out = back = 0.0
        for k in mine:
            trip = shop.trip_s(k)
            held, leaves = shop.held[k] / GRID, shop.leaves[k] / GRID
            area += held * (trip + q.b_s[k]) + shop.kept[k] / GRID * q.w_s[k]
            saved += leaves * max(0.0, trip - q.f_s[k] - shop.out_s[k] - shop.back_s[k])
            out, back = out + shop.out_s[k], back + shop.back_s[k]
        lane = (out + back if shop.shared else max(out, back)) * len(shop.riders[shop.lane[r]])
        excess = area - filled * shop.room[r] / GRID * period_s
        most = min(1.0, period_s / lane) if lane > 0 else 1.0
        return min(most, max(0.0, excess / saved)) if saved > 0 else 0.0
