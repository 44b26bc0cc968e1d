"""Choose which of F, B and W a free rank of a chain starts, under a memory limit.

:func:`by_turn` picks among the next F and the next B of each chunk of the rank and its oldest W, by a :class:`Policy`. What
can't start yet is known as soon as its producer starts, so W fill the time until then. Ideas: Qi et al. 2023, section 3.1 (W
fills gaps; a rank may idle while it is not the idlest; the depth of the warm-up is searched). It differs from theirs in
working event by event instead of round by round, which keeps the warm-up depth, the choice between F and B, and W's
placement independent, and so also finds good orders far below 1F1B's memory.

It can't get stuck: an F leaves room for one later F of each later chunk on its rank, and takes
:attr:`~jaxpipe.schedule.problem.Problem.reserved`, so the oldest microbatch always gets through. One flow only.

The policies that are tried stand here as data (:data:`ONE_CHUNK`), most useful first.

Place each W where the order of F and B is fixed: gaps are filled with real times, under a memory limit.

Input: F and B of all ranks as *one* list in which everything stands after what it waits for. :meth:`WeightFilling.fill`
walks it once. Before an action that can't start yet, W that fit into the gap are run; where a W is longer than the gap, either
the rank idles or the W runs and delays what follows. The seconds that a rank has idled so far decide that: it may idle, up to
each action, what it idled in an earlier pass, plus what a target for its span and its end leaves to spare.
Ranks above the target fill more gaps, ranks below it fewer, so repeated passes move idle seconds between ranks. The longest
span *and* the makespan are targets.

Source: `controllable-memory.txt` section 3 and appendix C (W fills what F and B leave). Not modelled: workspace of a running
function, and ``cotangent_bytes``. W of one rank run in the order of their B.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Literal

from jaxpipe.schedule.clock import NEVER, ROUNDING, Choose, Clock
from jaxpipe.schedule.problem import B, F, Problem
from jaxpipe.search.retime import Draft, Extents, Retimer, peaks


@dataclass(frozen=True, slots=True)
class Policy:
    """How a free rank chooses.

    ``round_trips``: a stage may have this many times as many microbatches between F and B as it needs to be busy when its
    first one comes back (:func:`depths`). ``turn``: which of F and B goes first when both can; ``alternate``: the one that
    did not go last. Of F and of B that can start the
    latest chunk's goes first. ``w_gap``: start W
    when at least this fraction of it fits before the next F or B arrives. ``balance``: also start it if waiting would make
    this rank the idlest. ``f_gap``: start F when at least this fraction of it fits before the next B arrives.
    """

    round_trips: float
    turn: Literal["backward", "forward", "alternate"]
    w_gap: float
    balance: bool
    f_gap: float = 0.0


def run(problem: Problem, policy: Policy, limit: float) -> Draft | None:
    """Return the order that ``policy`` leads to, with its times; None if it gets stuck. ``limit``: units of one rank's
    share."""
    clock = Clock(problem.tables)
    clock.run(by_turn(policy, problem, clock, limit))
    if sum(map(len, clock.rows)) < 3 * problem.num_replicas * problem.num_microbatches:
        return None
    span = max(end - first for end, first in zip(clock.free, clock.first, strict=True))
    # the clock counts what is reserved, which is more than what is held where w-residuals are larger
    peak = clock.peak if problem.reserved == problem.held else max(peaks(problem, clock.rows))
    return Draft(clock.rows, max(clock.free), span, peak)


def least_limit(problem: Problem) -> float:
    """Return what one microbatch needs on the rank where it needs most, in units of one rank's share: below it nothing fits."""
    return max(sum(problem.reserved[q] for q in problem.replicas_of(r)) for r in range(problem.num_ranks))


def full_limit(problem: Problem) -> float:
    """Return 1F1B's memory with backwards that are split: p microbatches at their largest, in units of one rank's share.
    Above p where w-residuals are larger than residuals: what B hands to W is more than what F kept."""
    return problem.num_ranks * least_limit(problem)


def depths(problem: Problem, round_trips: float) -> list[float]:
    """Return, per stage, the most microbatches between F and B: ``round_trips`` times the way to the last stage and back, in
    seconds of the rank with most work for one microbatch, rounded up."""
    c = problem
    work = max(sum(c.f_s[q] + c.b_s[q] + c.w_s[q] for q in c.replicas_of(r)) for r in range(c.num_ranks))
    if round_trips == NEVER or work <= 0:
        return [NEVER] * c.num_replicas
    return [max(1.0, ceil(round_trips * trip / work - ROUNDING)) for trip in c.round_trips]


def by_turn(policy: Policy, problem: Problem, clock: Clock, limit: float) -> Choose:
    """Return what the ranks of ``clock`` are asked, who choose by ``policy``. ``limit``: units of one rank's share."""
    n, m, ranks = problem.num_replicas, problem.num_microbatches, range(problem.num_ranks)
    all_f = n * m  # what lies between the codes of F, B and W of one stage and microbatch
    tiny, ready, memory, idle, seconds = clock.tiny, clock.ready, clock.memory, clock.idle, clock.tables.seconds
    forwards = [problem.replicas_of(r)[::-1] for r in ranks]
    # with room for an F of each later chunk the oldest microbatch always gets through
    needs = [sum(problem.reserved[k] for k in forwards[problem.rank[q]] if k >= q) for q in range(n)]
    lead, room = [depth - all_f for depth in depths(problem, policy.round_trips)], limit + ROUNDING
    f, b, end = ([(q + k) * m for q in range(n)] for k in (0, n, 1))  # the next F and B of each stage; where its F end
    last = [F for _ in ranks]
    pending: list[deque[int]] = [deque() for _ in ranks]
    forward_first, alternate = policy.turn == "forward", policy.turn == "alternate"
    w_gap, f_gap, balance = policy.w_gap, policy.f_gap, policy.balance

    def choose(r: int, now: float) -> int:
        soon, waiting = now + tiny, pending[r]
        b_at = f_at = NEVER
        b_stage = f_stage = -1
        full = False
        for q in forwards[r]:
            if b[q] - f[q] < all_f and (at := ready[b[q]]) < b_at:
                b_at, b_stage = at, q
                if at <= soon:
                    break
        for q in forwards[r]:
            if f[q] < end[q] and f[q] - b[q] < lead[q]:
                at = ready[f[q]]
                if memory[r] + needs[q] > room:
                    full = full or at <= soon
                elif at < f_at:
                    f_at, f_stage = at, q
                    if at <= soon:
                        break
        f_turn = forward_first or (alternate and last[r] == B)
        if f_at <= soon and (f_turn or (b_at > soon and b_at >= now + f_gap * seconds[f_stage])):
            last[r] = F
            f[f_stage] += 1
            return f[f_stage] - 1
        if alternate and f_turn and full and waiting:
            b_at = NEVER  # W make the room for the F whose turn it is
        if b_at <= soon:
            last[r] = B
            waiting.append(b[b_stage] + all_f)
            b[b_stage] += 1
            return b[b_stage] - 1
        if waiting:
            gap = min(b_at, f_at) + tiny - now
            if gap >= w_gap * seconds[waiting[0] // m] or (balance and idle[r] + gap > clock.idlest + 2 * tiny):
                return waiting.popleft()
        return -1

    return choose


_ACTIONS = 100_000
ONE_CHUNK = (
    # round trips, turn, w_gap, balance, f_gap
    Policy(2, "backward", 1, True),
    Policy(3, "backward", 0.5, True, 0.5),
    Policy(2.1, "alternate", 1, True),
    Policy(1, "backward", 1, False),
    Policy(1.75, "alternate", 0.5, False),
    Policy(2.75, "alternate", 0.5, True),
    Policy(2.5, "alternate", 0, False),
    Policy(1.3, "alternate", 0.5, True),
    Policy(3, "backward", 0.5, True),
    Policy(1.5, "forward", 1, True),
    Policy(1.75, "forward", 0.5, True),
    Policy(1.3, "alternate", 1, False),
    Policy(NEVER, "backward", 0, False, 0.5),
    Policy(2.5, "alternate", 0.5, False),
    Policy(2, "alternate", 1, False),
    Policy(2.5, "backward", 0.5, False),
    Policy(3, "alternate", 0, False),
    Policy(1, "backward", 1, False, 0.5),
    Policy(0.75, "backward", 1, False, 0.5),
)
"""Found by greedy selection among 250 combinations, on golden rows of the paper's heuristic and then on 250 random chains (p 3
to 16, limits p/4-2p, transfers 0-0.3 F): each improves most on those before it; the last seven bring 0.1% of the makespan."""


def chain_drafts(problem: Problem, limit: float) -> Iterator[Draft]:
    """Return, for one chunk per rank, the draft of each policy under ``limit`` (units of one rank's share of one microbatch).

    Fewer policies above 11,000 actions, down to ten: each costs time that grows with the actions.
    """
    most = 10 + _ACTIONS // (3 * problem.num_ranks * problem.num_microbatches)
    return filter(None, (run(problem, policy, limit) for policy in ONE_CHUNK[:most]))


_STEPS = (0.02, 0.05, 0.1, 0.2, 0.5)


@dataclass(frozen=True, slots=True)
class Filled(Extents):
    """Rows with W, and per action of the order the seconds its rank had idled when it started, less what the rank works less
    than the one with most work."""

    rows: list[list[int]]
    profile_s: list[float]

    def dominates(self, other: Filled) -> bool:
        """Return whether neither span nor makespan is longer, and one of them is shorter (beyond rounding)."""
        slack = 1 + ROUNDING
        if self.span > other.span * slack or self.makespan > other.makespan * slack:
            return False
        return self.span * slack < other.span or self.makespan * slack < other.makespan


class WeightFilling:
    """The tables of one problem and memory limit (units of one rank's share); :meth:`fill` for each order."""

    def __init__(self, problem: Problem, limit: float, retimer: Retimer | None = None) -> None:
        self.problem, self.limit = problem, limit
        self.retimer = retimer or Retimer(problem)
        t = problem.tables
        seconds = t.seconds[: 3 * problem.num_replicas]
        self._tiny = ROUNDING * max(seconds)
        work = [0.0] * problem.num_ranks
        for (r,), kind_s in zip(t.ranks, seconds, strict=False):
            work[r] += problem.num_microbatches * kind_s
        self._less_work = [w - max(work) for w in work]
        # per kind: rank, seconds, memory taken; the link of what it feeds, its seconds and those that occupy it, that code
        # less its own
        self._kinds = [
            (r, kind_s, change, *((*fed[0][1:4], fed[0].gaps[0]) if fed else (-1, 0.0, 0.0, 0)))
            for (r,), kind_s, change, fed in zip(t.ranks, t.seconds, t.change, t.feeds, strict=True)
        ]

    def spare(self, filled: Filled, span: float, makespan: float) -> list[float]:
        """Return, per rank, the idle seconds that ``filled`` leaves under a target for the span and for the makespan."""
        start = min(filled.first_s)
        return [
            min(span - (last - first), makespan - (last - start))
            for first, last in zip(filled.first_s, filled.last_s, strict=True)
        ]

    def fill(self, order: Sequence[int], spare_s: Sequence[float], profile_s: Sequence[float]) -> Filled | None:
        """Return rows with every W of ``order``'s B; None if F and B alone exceed the memory limit.

        Up to action k of the order rank r may idle ``profile_s[k] + spare_s[r]`` seconds. A W that is longer than a gap runs in
        it where the rank would otherwise idle more.
        """
        t, n, m = self.problem.tables, self.problem.num_replicas, self.problem.num_microbatches
        kinds, seconds, change = self._kinds, t.seconds, t.change
        room, tiny = self.limit + ROUNDING, self._tiny
        ready, link_free = [0.0] * (2 * n * m), [0.0] * t.num_links
        free, first, idle = [0.0] * t.num_ranks, [NEVER] * t.num_ranks, self._less_work.copy()
        memory = [0.0] * t.num_ranks
        rows: list[list[int]] = [[] for _ in free]
        pending: list[deque[int]] = [deque() for _ in free]
        profile: list[float] = []

        def run(code: int, r: int, now: float) -> float:
            rows[r].append(code)
            memory[r] += change[code // m]
            return now + seconds[code // m]

        for at, code in enumerate(order):
            kind = code // m
            r, spent, delta, link, link_s, occupied_s, gap = kinds[kind]
            arrival = ready[code]
            row, waiting, now = rows[r], pending[r], free[r]
            memory[r] += delta
            if kind < n:
                # an F without room: W's give memory back first
                while memory[r] > room:
                    if not waiting:
                        return None
                    now = run(waiting.popleft(), r, now)
            if not row:
                now = first[r] = arrival
            elif arrival > now:
                if waiting:
                    may = profile_s[at] + spare_s[r]
                while waiting and now + tiny < arrival:
                    # a W longer than the gap waits while the rank may still idle
                    longer = arrival + tiny < now + seconds[waiting[0] // m]
                    if longer and arrival - now <= may - idle[r] + tiny:
                        break
                    now = run(waiting.popleft(), r, now)
                if arrival > now:
                    idle[r] += (arrival + spent) - (now + spent)
                    now = arrival
            profile.append(idle[r])
            row.append(code)
            free[r] = now = now + spent
            if gap:
                if link >= 0:
                    sent = link_free[link]
                    if sent > now:
                        now = sent
                    link_free[link] = now + occupied_s
                    now += link_s
                ready[code + gap] = now
            if kind >= n:
                waiting.append(code + n * m)
        for r, waiting in enumerate(pending):
            for code in waiting:
                free[r] = run(code, r, free[r])
        return Filled(tuple(first), tuple(free), rows, profile)

    def draft(self, rows: Sequence[Sequence[int]]) -> Draft | None:
        """Return the draft of rows with W, timed by the retimer; None if they deadlock or exceed the limit."""
        draft = self.retimer.draft(rows)
        return draft if draft and draft.peak <= self.limit + ROUNDING else None


def order_of(problem: Problem, rows: Sequence[Sequence[int]], retimer: Retimer) -> list[int]:
    """Return F and B of ``rows`` as one list, by their start: everything stands after what it waits for.

    An action of no duration may start with what it feeds; ties go by direction (F ascending, B descending by stage).
    """
    import numpy as np  # here, as importing the families is to need no NumPy

    n, m = problem.num_replicas, problem.num_microbatches
    codes, position = np.concatenate(rows), np.concatenate([np.arange(len(row)) for row in rows])
    start = np.array(retimer.times(rows).start_s)[codes]
    by_stage = np.where(codes < n * m, codes // m, 3 * n - codes // m)
    order = codes[np.lexsort((position, by_stage, start))]
    in_order: list[int] = order[order < 2 * n * m].tolist()
    return in_order


def _improve_filling(filling: WeightFilling, order: Sequence[int], passes: int) -> Filled | None:
    """Return every W of ``order`` in the first gap there is, or a filling that dominates that, by passes toward targets between
    the best so far and what none can beat; None if F and B alone exceed the memory limit."""
    least_span, least_makespan = least(filling.problem)
    best = now = filling.fill(order, (-NEVER,) * filling.problem.num_ranks, (0.0,) * len(order))
    step, states = 0, set[tuple[object, ...]]()
    for _ in range(passes):
        if now is None or best is None:
            break
        if now.dominates(best):
            best = now
        state = step % len(_STEPS), best.span, best.makespan, *map(tuple, now.rows)
        if state in states:
            break  # from here on passes repeat
        states.add(state)
        share = _STEPS[step % len(_STEPS)]
        span = best.span - share * (best.span - least_span)
        makespan = best.makespan - share * (best.makespan - least_makespan)
        filled = filling.fill(order, filling.spare(now, span, makespan), now.profile_s)
        # the target was too near to move any W: the next one is farther
        if filled is not None and filled.rows == now.rows:
            step += 1
        now = filled
    return best


def least(problem: Problem) -> tuple[float, float]:
    """Return (span, makespan) that no order can beat: every rank does its work, none starts before the first microbatch
    reaches it."""
    m, reach = problem.num_microbatches, 0.0
    starts: dict[int, float] = {}
    work = [0.0] * problem.num_ranks
    for q, r in enumerate(problem.rank):
        starts.setdefault(r, reach)
        work[r] += m * (problem.f_s[q] + problem.b_s[q] + problem.w_s[q])
        reach += problem.f_s[q] + problem.down_s[q]
    return max(work), max(starts[r] + w for r, w in enumerate(work))


def refill_weights(filling: WeightFilling, draft: Draft, passes: int) -> Draft | None:
    """Return the same order of F and B, W laid anew by passes of the profile rule, within the limit; None for fused
    backwards."""
    order = order_of(filling.problem, draft.rows, filling.retimer)
    if len(order) < 2 * filling.problem.num_replicas * filling.problem.num_microbatches:
        return None
    filled = _improve_filling(filling, order, passes)
    return filling.draft(filled.rows) if filled else None
