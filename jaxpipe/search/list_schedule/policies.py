"""Choose which of F, B and W a free rank of a chain starts, under a memory limit.

:func:`by_turn` picks among the next F and the next B of each chunk of the rank and its oldest W, by a :class:`Policy`. What
can't start yet is known as soon as its producer starts, so W fill the time until then. Ideas: Qi et al. 2023, section 3.1 (W
fills gaps; a rank may idle while it is not the idlest; the depth of the warm-up is searched). It differs from theirs in
working event by event instead of round by round, which keeps the warm-up depth, the choice between F and B, and W's
placement independent, and so also finds good orders far below 1F1B's memory.

It can't get stuck: an F leaves room for one later F of each later chunk on its rank, and takes
:attr:`~jaxpipe.schedule.problem.Problem.reserved`, so the oldest microbatch always gets through. One flow only.

The policies that are tried stand here as data (:data:`ONE_CHUNK`), most useful first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Literal

from jaxpipe.schedule.clock import NEVER, ROUNDING, Choose, Clock
from jaxpipe.schedule.problem import B, F, Problem
from jaxpipe.search.retime import Draft, peaks

Chooser = Callable[[Problem, Clock, float], Choose]
"""``chooser(problem, clock, limit)``: what the ranks of ``clock`` are asked. ``limit``: units of one rank's share."""


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


def run(problem: Problem, chooser: Chooser, limit: float = NEVER) -> Draft | None:
    """Return the order that ``chooser`` leads to, with its times; None if it gets stuck. ``limit``: units of one rank's
    share."""
    clock = Clock(problem.tables)
    clock.run(chooser(problem, clock, limit))
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
    """Return the chooser of ``policy``; ``partial(by_turn, policy)`` is a :data:`Chooser`."""
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
"""Found by greedy selection among 250 combinations (without no. 12's neighbour at 2 round trips, which trades the span for the
makespan on golden rows): first for no golden row of the paper's heuristic worse than before, then on 250 random chains (even,
jittered, one heavy stage, arbitrary; transfers 0-0.3 F; limits p/4-2p; p 3-16); each improves most on those before it. Mean
makespan 0.08% below that of the 41 policies used before, which had 16 ways to choose depths; selected on 100 of the chains
and judged on the other 150, 0.03% below; the other way round 0.02% above. With 12 rows: 0.07-0.11% above."""


def chain_drafts(problem: Problem, limit: float) -> Iterator[Draft]:
    """Return, for one chunk per rank, the draft of each policy under ``limit`` (units of one rank's share of one microbatch).

    Fewer policies above 11,000 actions, down to ten: each costs time that grows with the actions.
    """
    most = 10 + _ACTIONS // (3 * problem.num_ranks * problem.num_microbatches)
    return filter(None, (run(problem, partial(by_turn, policy), limit) for policy in ONE_CHUNK[:most]))
