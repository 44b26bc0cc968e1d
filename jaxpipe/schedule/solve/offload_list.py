"""The tables of a scheduling task with offload, what a list scheduler may prefer, and the plan that comes of it.

Codes are those of :mod:`~jaxpipe.schedule.problem`, with O, L and S as ops 4, 5 and 6. Memory is counted in whole numbers on
the simulator's grid.

List scheduling in which activations may leave for host memory, and forwards wait for memory.

:func:`run_policy` plays one policy on the clock of :mod:`~jaxpipe.schedule.list_schedule.clock` and gives rows of codes with
their times. A rank takes the next B, F or W of its stages (microbatches of a stage in order) as soon as inputs, residency and
memory allow; its host lanes, which the clock takes for ranks of their own, copy residuals out (O) and back (L). Where an F
waits for the memory that an O gives back, an S goes before it: rows hold only the order (:mod:`~jaxpipe.schedule.ir`), and S is
how an order says so. The rows, simulated, run no later than the plan says.

Not modelled: in the simulator the ranks of a PCIe group get their lane in the order in which they could use it, here in the
order of their numbers; so what comes of groups must be simulated before it is believed. Source: `optpipe.txt` section 3 (what
is scheduled); the rule is our own.

Schedules with offload from list scheduling: many policies, played fast, the best kept.

Which policy wins depends on how the host lane's capacity compares with what memory needs, so a fixed few are tried first, then
seeded draws. Where the lane keeps up, any activation may leave while memory is short. Where it does not, each rank lets only a
share of the microbatches leave, evenly spread, so that the rest stays for its whole trip. The share follows from Little's law:
a microbatch that stays holds its memory for its trip, one that leaves only while it is copied; with one microbatch each
``period`` seconds, what is held on average must fit in the limit, and the copies in the lane. The engine:
:mod:`~jaxpipe.schedule.solve.offload_list`. Not tried: other orders than first come, first served among microbatches.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice, product
from math import ceil, floor, inf
from typing import Literal

from jaxpipe.schedule.check import check_schedule
from jaxpipe.schedule.engine import host_groups
from jaxpipe.schedule.ir import Action, Schedule
from jaxpipe.schedule.list_schedule.clock import Clock, Feed, Tables
from jaxpipe.schedule.problem import BW, B, F, Problem, W, shares
from jaxpipe.schedule.simulate import simulate
from jaxpipe.schedule.solve.task import SolveTask

OPS = ("F", "B", "W", "BW", "O", "L", "S")
O, L, S = 4, 5, 6  # noqa: E741
GRID = 2.0**50

Weights = Literal["fill", "gap", "half", "eager", "fused"]
"""W when nothing else can run; not when something that is on its way arrives before it ends, or before it is half done; right
behind its B; or as one BW."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What a rank prefers.

    ``caps``: per replica, the most microbatches between the start of F and the start of B. ``weights``: when W's run.
    ``forward_first``: F before B where both can run. ``leave``: ``none``; ``need``, while memory is short; ``all``.
    ``keep``: the next so many microbatches of a stage to turn back don't leave. ``prefetch``: so many may come back early.
    ``away``: per replica, which microbatches may leave; None: any. ``lane``: which a shared lane serves first, unless a B waits
    for its L. ``bold``: F's may take the room that the next B's L needs (only an O can then go on).
    """

    caps: tuple[int, ...]
    weights: Weights = "fill"
    forward_first: bool = False
    leave: Literal["none", "need", "all"] = "need"
    keep: int = 1
    prefetch: int = 2
    away: tuple[tuple[bool, ...], ...] | None = None
    lane: Literal["back", "out", "alternate"] = "back"
    bold: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """Rows of codes, with the times the engine gave them: makespan and longest span, seconds."""

    rows: tuple[list[int], ...]
    makespan: float
    span: float


class Shop:
    """The tables of a task, read only."""

    def __init__(self, task: SolveTask) -> None:
        self.task = task
        self.problem = problem = Problem.of(task.placement, task.num_microbatches, task.costs)
        n, stages = problem.num_replicas, task.placement.num_stages
        self.stages, self.flows = stages, task.placement.num_flows
        self.step = n * task.num_microbatches  # between the codes of one op and the next
        self.base = [k * task.num_microbatches + k // stages for k in range(n)]
        costs = task.costs
        self.count = [len(problem.microbatches(k)) for k in range(n)]
        self.mine = [problem.replicas_of(r) for r in range(problem.num_ranks)]
        units = [1 / x if x > 0 else 0.0 for x in shares(task.placement, costs)]
        self.held = [round(costs.residual_bytes[k % stages] * units[k] * GRID) for k in range(n)]
        self.kept = [round(costs.w_residual_bytes[k % stages] * units[k] * GRID) for k in range(n)]
        self.leaves = [round(costs.offloadable_bytes[k % stages] * units[k] * GRID) for k in range(n)]
        self.room = [floor(x * (1 + 1e-9) * GRID) if x < inf else 1 << 200 for x in task.safe_limits()]
        self.out_s = [costs.offload_s[k % stages] for k in range(n)]
        self.back_s = [costs.load_s[k % stages] for k in range(n)]
        self.shared = costs.host.mode == "shared"
        groups = host_groups(costs.host, problem.num_ranks)
        names = [("group", groups[r]) if r in groups else ("rank", r) for r in range(problem.num_ranks)]
        self.lane = [names.index(x) for x in names]
        self.riders = [[r for r in range(problem.num_ranks) if self.lane[r] == q] for q in range(problem.num_ranks)]
        self.lanes = [(2 * q,) if self.shared else (2 * q, 2 * q + 1) for q in self.lane]
        self.tables = self._tables()

    def _tables(self) -> Tables:
        """Those of the problem, where each host lane is a rank of its own (number p + lane): O's and L's run there. Memory is
        the chooser's business."""
        problem, plain = self.problem, self.problem.tables
        p, n = problem.num_ranks, problem.num_replicas
        back = [(Feed(r, -1, 0.0, ()),) for r in problem.rank]
        copies = [(p + self.lanes[r][which],) for which in (0, -1) for r in problem.rank]
        return replace(
            plain,
            num_ranks=3 * p,
            ranks=[*plain.ranks, *copies],
            seconds=[*plain.seconds, *self.out_s, *self.back_s],
            change=[0.0] * (6 * n),
            feeds=[*plain.feeds, *back, *back],
            needs=[*plain.needs, *([0] * (2 * n))],
        )

    def trip_s(self, replica: int) -> float:
        """Least seconds from the start of a replica's F to the start of its B."""
        q, stages = self.problem, self.task.placement.num_stages
        down = range(replica, (replica // stages + 1) * stages - 1)
        there = sum(q.f_s[k] + q.down_s[k] for k in down)
        last = (replica // stages + 1) * stages - 1
        return there + q.f_s[last] + sum(q.b_s[k + 1] + q.up_s[k + 1] for k in down)

    def schedule(self, name: str, plan: Plan) -> Schedule:
        """The schedule of a plan."""
        n, m, stages = self.problem.num_replicas, self.problem.num_microbatches, self.task.placement.num_stages
        kinds = [(op, k % stages) for op in OPS for k in range(n)]
        rows = tuple(tuple(Action(*kinds[c // m], c % m) for c in row) for row in plan.rows)
        return Schedule(name, self.task.placement, m, rows)


ABSENT, HERE, LEAVING, AWAY, COMING, BACK = range(6)
"""Where the residuals of a (replica, microbatch) are: not made, on the device, on their way out, on the host, on their way
back, back."""


def run_policy(shop: Shop, policy: Policy, give_up: float = inf) -> Plan | None:
    """The plan that ``policy`` leads to; None if it gets stuck, or passes ``give_up`` seconds."""
    return _Play(shop, policy).run(give_up)


class _Play:
    """The state of one run. Numbers of microbatches count within their flow."""

    def __init__(self, shop: Shop, policy: Policy) -> None:
        q = self.q = shop.problem
        self.shop, self.policy = shop, policy
        n, p = q.num_replicas, q.num_ranks
        self.clock = Clock(shop.tables)
        self.ready = self.clock.ready
        self.begun_f, self.begun_b, self.ended_b, self.begun_w = [0] * n, [0] * n, [0] * n, [0] * n
        self.state = [[ABSENT] * c for c in shop.count]
        self.memory = [0] * p
        self.rows: list[list[int]] = [[] for _ in range(p)]
        self.at = [0] * p  # where in its row the running slot of a rank stands; the row's end if it is idle
        self.busy = [False] * p
        self.running: list[tuple[float, int, int, int]] = []
        self.first, self.last = [inf] * p, [0.0] * p
        self.begun = self.begun_f, self.begun_b, self.begun_w, self.begun_b
        self.given = [0] * n, [h - k for h, k in zip(shop.held, shop.kept, strict=True)], shop.kept, shop.held
        # (which, code of S, size) of O's that ended and that no slot of the row waits for
        self.unsynced: list[list[tuple[int, int, int]]] = [[] for _ in range(p)]
        self.ended_o = [0] * p
        self.after_o: dict[tuple[int, int], int] = {}  # how many O's of the rank had ended when an L began
        self.fused, self.copies = policy.weights == "fused", policy.leave != "none"
        self.left = sum(shop.count) * (2 if self.fused else 3)
        self.lane_last = [L] * p
        self.out, self.most_out = [0] * p, shop.task.offloads_in_flight

    def run(self, give_up: float) -> Plan | None:
        self.clock.run(self.choose, until=give_up)
        if self.left:
            return None
        first = min(self.first)
        spans = (b - a for a, b in zip(self.first, self.last, strict=True))
        return Plan(tuple(self.rows), max(self.last) - first, max(spans))

    def choose(self, rank: int, now: float) -> int:
        """What a rank or a host lane starts; lanes have the numbers from p on."""
        running = self.running
        while running and running[0][0] <= now:
            self._ended(*heapq.heappop(running))
        p = self.q.num_ranks
        if rank >= p:
            return self._copy(rank - p, now) if self.copies else -1
        if not self.copies:
            return self._compute(rank, now)
        if not self.shop.shared:
            self._fill_lanes(rank, now)  # only now can an S go before an L
        code = self._compute(rank, now)
        self._fill_lanes(rank, now)
        return code

    def _fill_lanes(self, rank: int, now: float) -> None:
        p, clock = self.q.num_ranks, self.clock
        for lane in self.shop.lanes[rank]:
            if clock.free[p + lane] <= now and (code := self._copy(lane, now)) >= 0:
                clock.start(p + lane, code, now)

    # What ends.

    def _ended(self, end: float, kind: int, k: int, i: int) -> None:
        shop, rank = self.shop, self.q.rank[k]
        self.last[rank] = max(self.last[rank], end)
        if kind == O:
            self.state[k][i] = AWAY
            self.memory[rank] -= shop.leaves[k]
            self.ended_o[rank] += 1
            self.unsynced[rank].append((self.ended_o[rank], self._code(S, k, i), shop.leaves[k]))
        elif kind == L:
            self.state[k][i] = BACK
            self.out[rank] -= 1
        else:
            self.busy[rank] = False
            self.at[rank] = len(self.rows[rank])
            self.left -= 1
            self.ended_b[k] += kind == B
            self.memory[rank] -= self.given[kind][k]

    # Compute.

    def _compute(self, r: int, now: float) -> int:
        """The code of what the policy takes next on idle rank ``r``, if anything can start."""
        mine, policy = self.shop.mine[r], self.policy
        back = next((k for k in reversed(mine) if self._can_b(k, now)), -1)
        if back >= 0 and not policy.forward_first and (policy.weights != "eager" or not self._waiting_w(mine)):
            return self._start(r, BW if self.fused else B, back, now)
        if policy.weights == "eager" and (k := self._waiting_w(mine) - 1) >= 0:
            return self._start(r, W, k, now)
        ahead = next((k for k in reversed(mine) if self._can_f(r, k, now)), -1)
        if ahead >= 0:
            return self._start(r, F, ahead, now)
        if back >= 0:
            return self._start(r, BW if self.fused else B, back, now)
        if not self.fused and (k := self._waiting_w(mine) - 1) >= 0 and not self._better_wait(r, k, now):
            return self._start(r, W, k, now)
        return -1

    def _waiting_w(self, mine: tuple[int, ...]) -> int:
        """One more than the first replica with a W that can run; 0 if there is none."""
        for k in mine:
            if self.begun_w[k] < self.ended_b[k]:
                return k + 1
        return 0

    def _arrives(self, op: int, k: int, i: int) -> float:
        """When the input of an F or B arrives, known as soon as its producer starts."""
        shop = self.shop
        return self.ready[op * shop.step + shop.base[k] + i * shop.flows]

    def _can_b(self, k: int, now: float) -> bool:
        i = self.begun_b[k]
        return i < self.begun_f[k] and self._arrives(B, k, i) <= now and self.state[k][i] in (HERE, BACK)

    def _can_f(self, r: int, k: int, now: float) -> bool:
        i = self.begun_f[k]
        if i >= self.shop.count[k] or i - self.begun_b[k] >= self.policy.caps[k] or self._arrives(F, k, i) > now:
            return False
        return self.memory[r] + self.shop.held[k] + self._reserve(r) <= self.shop.room[r]

    def _reserve(self, r: int) -> int:
        """Room that the next microbatch to turn back needs, if it is away."""
        if not self.copies or self.policy.bold:
            return 0
        most = 0
        for k in self.shop.mine[r]:
            i = self.begun_b[k]
            if i < self.begun_f[k] and LEAVING <= self.state[k][i] <= AWAY and self.shop.leaves[k] > most:
                most = self.shop.leaves[k]
        return most

    def _better_wait(self, r: int, k: int, now: float) -> bool:
        """Whether W of replica k would hold up something that arrives before it ends (policies ``gap`` and ``half``)."""
        if self.policy.weights not in ("gap", "half"):
            return False
        end = now + self.q.w_s[k] * (1.0 if self.policy.weights == "gap" else 0.5)
        for j in self.shop.mine[r]:
            i, count = self.begun_b[j], self.shop.count[j]
            if i < count and now < self._arrives(B, j, i) < end and self.state[j][i] in (HERE, BACK):
                return True
            i = self.begun_f[j]
            if (
                i < count
                and now < self._arrives(F, j, i) < end
                and i - self.begun_b[j] < self.policy.caps[j]
                and self.memory[r] + self.shop.held[j] <= self.shop.room[r]
            ):
                return True
        return False

    def _start(self, r: int, op: int, k: int, now: float) -> int:
        i = self.begun[op][k]
        self.begun[op][k] += 1
        if op == F:
            self._sync(r, self.shop.held[k])
            self.memory[r] += self.shop.held[k]
            self.state[k][i] = HERE
        elif op != W and (k, i) in self.after_o:  # it waits for its L, which waited for what went before on its lane
            before = self.after_o[k, i]
            self.unsynced[r] = [x for x in self.unsynced[r] if x[0] > before]
        self.first[r] = min(self.first[r], now)
        self.at[r] = len(self.rows[r])
        self.busy[r] = True
        return self._run(r, op, k, i, now)

    def _run(self, r: int, op: int, k: int, i: int, now: float) -> int:
        """Put an action into the row of ``r``; its code."""
        code = self._code(op, k, i)
        self.rows[r].insert(self.at[r], code)
        seconds = self.shop.tables.seconds[op * self.q.num_replicas + k]
        heapq.heappush(self.running, (now + seconds, op, k, i))
        return code

    def _owed(self, r: int, size: int) -> bool:
        """Whether ``size`` more needs what O's gave back that no slot waited for."""
        return sum(s for _, _, s in self.unsynced[r]) > self.shop.room[r] - self.memory[r] - size

    def _sync(self, r: int, size: int) -> None:
        """Put an S before an F that needs the memory of O's that no earlier slot of the row waits for."""
        unsynced = self.unsynced[r]
        spare = self.shop.room[r] - self.memory[r] - size
        owed, code = sum(size for _, _, size in unsynced), -1
        while unsynced and owed > spare:
            _, code, size = unsynced.pop(0)
            owed -= size
        if code >= 0:
            self.rows[r].append(code)

    # Copies.

    def _copy(self, lane: int, now: float) -> int:
        """The code of what idle host lane ``lane`` does next for one of its ranks; -1 for nothing."""
        shared = self.shop.shared
        for r in self.shop.riders[lane // 2]:
            out_first = not shared and lane % 2 == 0
            if shared:
                rule = self.policy.lane
                out_first = rule == "out" or (rule == "alternate" and self.lane_last[r] == L)
                out_first = out_first and not self._stalled(r, now)
            code = self._copy_out(r, now) if out_first else -1
            if code < 0 and (shared or lane % 2):
                code = self._copy_back(r, now)
            if code < 0 and shared:
                code = self._copy_out(r, now)
            if code >= 0:
                return code
        return -1

    def _stalled(self, r: int, now: float) -> bool:
        """Whether a cotangent has arrived whose residuals are away."""
        for k in self.shop.mine[r]:
            i = self.begun_b[k]
            if i < self.begun_f[k] and self.state[k][i] == AWAY and self._arrives(B, k, i) <= now:
                return True
        return False

    def _copy_back(self, r: int, now: float) -> int:
        shop = self.shop
        best, chosen = shop.task.num_microbatches, -1
        for k in shop.mine[r]:
            state = self.state[k]
            low = self.begun_b[k]
            for i in range(low, min(low + self.policy.prefetch, self.begun_f[k])):
                if state[i] == AWAY:
                    if i < best:
                        best, chosen = i, k
                    break
        if chosen < 0 or self.memory[r] + shop.leaves[chosen] > shop.room[r]:
            return -1
        if not shop.shared and self._owed(r, shop.leaves[chosen]):
            if self.busy[r]:
                return -1
            self._sync(r, shop.leaves[chosen])
            self.at[r] = len(self.rows[r])
        if shop.shared:
            self.after_o[chosen, best] = self.ended_o[r]
        self.memory[r] += shop.leaves[chosen]
        mine = self._code(S, chosen, best)  # it takes what its own O gave, so no slot need wait for that O any more
        self.unsynced[r] = [x for x in self.unsynced[r] if x[1] != mine]
        return self._send_copy(r, L, chosen, best, COMING, now)

    def _copy_out(self, r: int, now: float) -> int:
        shop, policy = self.shop, self.policy
        longest, chosen, number = -1, -1, -1
        if self.out[r] == self.most_out:
            return -1
        for k in shop.mine[r]:
            if policy.leave == "need" and self.memory[r] + 2 * shop.held[k] <= shop.room[r]:
                continue
            state, away = self.state[k], policy.away
            low = self.begun_b[k] + policy.keep
            for i in range(self.begun_f[k] - 1, low - 1, -1):
                if state[i] == HERE and (away is None or away[k][i]) and self._f_ended(r, k, i):
                    if i - low > longest:
                        longest, chosen, number = i - low, k, i
                    break
        return self._send_copy(r, O, chosen, number, LEAVING, now) if chosen >= 0 else -1

    def _f_ended(self, r: int, k: int, i: int) -> bool:
        return not self.busy[r] or self.rows[r][self.at[r]] != self._code(F, k, i)

    def _send_copy(self, r: int, op: int, k: int, i: int, state: int, now: float) -> int:
        self.state[k][i] = state
        self.lane_last[r] = op
        self.out[r] += op == O
        code = self._run(r, op, k, i, now)
        self.at[r] += 1
        return code

    def _code(self, op: int, k: int, i: int) -> int:
        shop = self.shop
        return op * shop.step + shop.base[k] + i * shop.flows


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
