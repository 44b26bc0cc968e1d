"""Place each W where the order of F and B is fixed: gaps are filled with real times, under a memory limit.

Input: F and B of all ranks as *one* list in which everything stands after what it waits for. :meth:`WeightFilling.fill`
walks it once. Before an action that can't start yet, W that fit into the gap are run; where a W is longer than the gap, either
the rank idles or the W runs and delays what follows. An :class:`IdleRule` decides that by the seconds a rank has idled so far:
it may idle, up to each action, what it idled in an earlier pass, plus what a target for its span and its end leaves to spare.
Ranks above the target fill more gaps, ranks below it fewer, so repeated passes move idle seconds between ranks. The longest
span *and* the makespan are targets.

Source: `controllable-memory.txt` section 3 and appendix C (W fills what F and B leave). Not modelled: workspace of a running
function, and ``cotangent_bytes``. W of one rank run in the order of their B.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from jaxpipe.schedule.clock import NEVER, ROUNDING
from jaxpipe.schedule.problem import Problem
from jaxpipe.search.retime import Draft, Extents, Retimer

_STEPS = (0.02, 0.05, 0.1, 0.2, 0.5)


@dataclass(frozen=True, slots=True)
class IdleRule:
    """When a W that is longer than the gap runs in it: when the rank would otherwise have idled more than it may.

    Rank r may idle ``profile_s[k] + spare_s[r]`` seconds up to action k of the order.
    """

    spare_s: Sequence[float]
    profile_s: Sequence[float]


@dataclass(frozen=True, slots=True)
class Filled(Extents):
    """Rows with W, and per action of the order the seconds its rank had idled when it started.

    ``idle_s``: seconds a rank idled, less what it works less than the rank with most work: the largest makes the span.
    """

    rows: list[list[int]]
    profile_s: list[float]
    idle_s: tuple[float, ...]

    def dominates(self, other: Filled) -> bool:
        """Return whether neither span nor makespan is longer, and one of them is shorter (beyond rounding)."""
        slack = 1 + ROUNDING
        if self.span > other.span * slack or self.makespan > other.makespan * slack:
            return False
        return self.span * slack < other.span or self.makespan * slack < other.makespan


class WeightFilling:
    """The tables of one problem and memory limit (units of one rank's share); :meth:`fill` for each order and rule."""

    __slots__ = ("_kinds", "_less_work", "_tiny", "limit", "problem", "retimer")

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

    def fill(self, order: Sequence[int], rule: IdleRule) -> Filled | None:
        """Return rows with every W of ``order``'s B; None if F and B alone exceed the memory limit."""
        t, n, m = self.problem.tables, self.problem.num_replicas, self.problem.num_microbatches
        kinds, seconds, change = self._kinds, t.seconds, t.change
        room, tiny = self.limit + ROUNDING, self._tiny
        spare, earlier = rule.spare_s, rule.profile_s
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
                    may = earlier[at] + spare[r]
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
        return Filled(tuple(first), tuple(free), rows, profile, tuple(idle))

    def draft(self, rows: Sequence[Sequence[int]]) -> Draft | None:
        """Return the draft of rows with W, timed by the retimer; None if they deadlock or exceed the limit."""
        draft = self.retimer.draft(rows)
        return draft if draft and draft.peak <= self.limit + ROUNDING else None


def order_of(problem: Problem, rows: Sequence[Sequence[int]], retimer: Retimer) -> list[int]:
    """Return F and B of ``rows`` as one list, by their start: everything stands after what it waits for.

    An action of no duration may start with what it feeds; ties go by direction (F ascending, B descending by stage).
    """
    n, m = problem.num_replicas, problem.num_microbatches
    start = retimer.times(rows).start_s
    position = {code: at for row in rows for at, code in enumerate(row)}
    codes = [code for row in rows for code in row if code < 2 * n * m]

    def key(code: int) -> tuple[float, int, int]:
        kind = code // m
        return start[code], kind if kind < n else 3 * n - kind, position[code]

    return sorted(codes, key=key)


def improved(
    filling: WeightFilling, order: Sequence[int], best: Filled, passes: int, start: Filled | None = None
) -> Filled:
    """Return ``best``, or a filling of ``order`` that dominates it, by passes toward targets between it and what none can beat.

    ``start``: a filling of ``order`` to begin with; by default every W runs in the first gap there is.
    """
    least_span, least_makespan = least(filling.problem)
    now = start or filling.fill(order, IdleRule((-NEVER,) * filling.problem.num_ranks, (0.0,) * len(order)))
    step, states = 0, set[tuple[object, ...]]()
    for _ in range(passes):
        if now is None:
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
        filled = filling.fill(order, IdleRule(filling.spare(now, span, makespan), now.profile_s))
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


def refilled(filling: WeightFilling, draft: Draft, passes: int) -> Draft | None:
    """Return the same order of F and B, W laid anew by passes of the profile rule, within the limit; None for fused
    backwards."""
    order = order_of(filling.problem, draft.rows, filling.retimer)
    if len(order) < 2 * filling.problem.num_replicas * filling.problem.num_microbatches:
        return None
    start = filling.fill(order, IdleRule((-NEVER,) * filling.problem.num_ranks, (0.0,) * len(order)))
    return filling.draft(improved(filling, order, start, passes, start).rows) if start else None
