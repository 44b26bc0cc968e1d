"""Where W goes when the order of F and B is fixed: gaps are filled with real times, under a memory limit.

Input: F and B of all ranks as *one* list in which everything stands after what it waits for. :meth:`WeightFilling.fill`
walks it once. Before an action that can't start yet, W that fit into the gap are run; where a W is longer than the gap, either
the rank idles or the W runs and delays what follows. A :class:`Rule` decides that by the seconds a rank has idled so far:

* *even*: a rank may idle as long as it does not become the idlest (Qi et al. 2023, section 3.1, for one chunk; the authors of
  `controllable-memory.txt` do the same on V). A second pass knows which ranks have idle seconds to spare at the end.
* *profile*: a rank may idle, up to each action, what it idled in an earlier pass, plus what a target for its span and its end
  leaves to spare. Ranks above the target fill more gaps, ranks below it fewer, so repeated passes move idle seconds between
  ranks. The longest span *and* the makespan are targets.

Source: `controllable-memory.txt` section 3 and appendix C (W fills what F and B leave). Not modelled: workspace of a running
function, and ``cotangent_bytes``. W of one rank run in the order of their B.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from jaxpipe.schedule.problem import Problem
from jaxpipe.schedule.retime import Draft, Retimer

Ties = Literal["idle", "run", "as computed"]
_NEVER = float("inf")
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Rule:
    """When a W that is longer than the gap runs in it: when the rank would otherwise have idled more than it may.

    ``spare_s[r]``: seconds. With ``profile_s`` (one entry an action of the order) the rank may idle
    ``profile_s[k] + spare_s[r]`` up to action k; without, as long as the idlest rank so far, or ``spare_s[r]`` if more.
    ``before``: per kind (F of each stage, then B), whether a W may delay it at all. ``ties``: what a rank does at exactly
    what it may: ``idle``, ``run`` the W, or whatever rounding makes of it (``as computed``; then W that fit exactly are as
    open, and equal ranks don't all do the same).
    """

    spare_s: Sequence[float]
    profile_s: Sequence[float] = ()
    before: Sequence[bool] = ()
    ties: Ties = "idle"


@dataclass(frozen=True, slots=True)
class Filled:
    """Rows with W, and per action of the order the seconds its rank had idled when it started; times per rank.

    ``idle_s``: seconds a rank idled, less what it works less than the rank with most work: the largest makes the span.
    """

    rows: list[list[int]]
    profile_s: list[float]
    idle_s: tuple[float, ...]
    first_s: tuple[float, ...]
    last_s: tuple[float, ...]

    @property
    def span(self) -> float:
        return max(last - first for first, last in zip(self.first_s, self.last_s, strict=True))

    @property
    def makespan(self) -> float:
        return max(self.last_s) - min(self.first_s)

    def dominates(self, other: Filled) -> bool:
        """Neither span nor makespan is longer, and one of them is shorter (beyond rounding)."""
        slack = 1 + _ROUNDING
        if self.span > other.span * slack or self.makespan > other.makespan * slack:
            return False
        return self.span * slack < other.span or self.makespan * slack < other.makespan


class WeightFilling:
    """The tables of one problem and memory limit (units of one rank's share); :meth:`fill` for each order and rule."""

    __slots__ = ("_held", "_kind", "_less_work", "_tiny", "limit", "problem", "retimer")

    def __init__(self, problem: Problem, limit: float, retimer: Retimer | None = None) -> None:
        self.problem, self.limit = problem, limit
        self.retimer = retimer or Retimer(problem)
        self._held = [max(h, k) for h, k in zip(problem.held, problem.kept, strict=True)]
        self._tiny = _ROUNDING * max((*problem.f_s, *problem.b_s, *problem.w_s), default=0.0)
        work = [0.0] * problem.num_ranks
        for q, r in enumerate(problem.rank):
            work[r] += problem.num_microbatches * (problem.f_s[q] + problem.b_s[q] + problem.w_s[q])
        self._less_work = [w - max(work) for w in work]
        links: dict[tuple[int, int], int] = {}
        # per kind (F of each replica, then B): rank, seconds, memory taken, code made ready less its own, link, its seconds
        self._kind = [_kind(problem, self._held, kind, links) for kind in range(2 * problem.num_replicas)]

    def spare(self, filled: Filled, span: float, makespan: float) -> list[float]:
        """Per rank, the idle seconds that ``filled`` leaves under a target for the span and for the makespan."""
        start = min(filled.first_s)
        return [
            min(span - (last - first), makespan - (last - start))
            for first, last in zip(filled.first_s, filled.last_s, strict=True)
        ]

    def fill(self, order: Sequence[int], rule: Rule) -> Filled | None:
        """Rows with every W of ``order``'s B; None if F and B alone exceed the memory limit."""
        pr = self.problem
        n, m, p = pr.num_replicas, pr.num_microbatches, pr.num_ranks
        kinds, kept, w_s, nm = self._kind, pr.kept, pr.w_s, pr.num_replicas * pr.num_microbatches
        room, tiny = self.limit + _ROUNDING, 0.0 if rule.ties == "as computed" else self._tiny
        spare, earlier = rule.spare_s, rule.profile_s
        before = rule.before or (True,) * (2 * n)
        ready = [0.0] * (2 * nm)
        link_free = [0.0] * (2 * n)
        free, first, idle, memory = [0.0] * p, [_NEVER] * p, self._less_work.copy(), [0.0] * p
        rows: list[list[int]] = [[] for _ in range(p)]
        pending: list[deque[int]] = [deque() for _ in range(p)]
        profile: list[float] = []
        most, tie = 0.0, -tiny if rule.ties == "run" else tiny
        for at, code in enumerate(order):
            kind = code // m
            r, seconds, taken, makes, link, link_s = kinds[kind]
            row, waiting, now = rows[r], pending[r], free[r]
            arrival = ready[code]
            if kind < n:
                while memory[r] + taken > room:
                    if not waiting:
                        return None
                    w = waiting.popleft()
                    row.append(w)
                    stage = w // m - n - n
                    memory[r] -= kept[stage]
                    now += w_s[stage]
            else:
                waiting.append(code + nm)
            if not row:
                now = first[r] = arrival
            elif arrival > now:
                if waiting and (len(waiting) > 1 or kind < n):
                    may = earlier[at] + spare[r] if earlier else (most if most > spare[r] else spare[r])
                    while waiting[0] != code + nm:
                        w = waiting[0]
                        stage = w // m - n - n
                        if arrival + tiny < now + w_s[stage]:
                            gap = arrival - now
                            if gap <= tiny or gap <= may - idle[r] + tie or not before[kind]:
                                break
                        waiting.popleft()
                        row.append(w)
                        memory[r] -= kept[stage]
                        now += w_s[stage]
                        if now + tiny >= arrival or not waiting:
                            break
                if arrival > now:
                    idle[r] += (arrival + seconds) - (now + seconds)
                    if idle[r] > most:
                        most = idle[r]
                    now = arrival
            profile.append(idle[r])
            row.append(code)
            memory[r] += taken
            free[r] = now = now + seconds
            if makes:
                if link >= 0:
                    sent = link_free[link]
                    link_free[link] = now = (sent if sent > now else now) + link_s
                ready[code + makes] = now
        for r, waiting in enumerate(pending):
            for w in waiting:
                rows[r].append(w)
                free[r] += w_s[w // m - n - n]
        return Filled(rows, profile, tuple(idle), tuple(first), tuple(free))

    def draft(self, rows: Sequence[Sequence[int]]) -> Draft | None:
        """The draft of rows with W, timed by the retimer; None if they deadlock or exceed the limit."""
        draft = self.retimer.draft(rows)
        return draft if draft and draft.peak <= self.limit + _ROUNDING else None


def _kind(
    problem: Problem, held: Sequence[float], kind: int, links: dict[tuple[int, int], int]
) -> tuple[int, float, float, int, int, float]:
    n, m, last = problem.num_replicas, problem.num_microbatches, problem.num_replicas - 1
    backward, stage = divmod(kind, n)
    rank = problem.rank[stage]
    seconds = problem.b_s[stage] if backward else problem.f_s[stage]
    taken = problem.kept[stage] - held[stage] if backward else held[stage]
    if backward:
        makes, to, transfer_s = (-m, stage - 1, problem.up_s[stage]) if stage else (0, stage, 0.0)
    else:
        makes, to, transfer_s = (m, stage + 1, problem.down_s[stage]) if stage < last else (n * m, stage, 0.0)
    there = problem.rank[to]
    if there == rank:
        return rank, seconds, taken, makes, -1, 0.0
    return rank, seconds, taken, makes, links.setdefault((rank, there), len(links)), transfer_s


def balanced(
    filling: WeightFilling,
    order: Sequence[int],
    before: Sequence[bool] = (),
    ties: Ties = "idle",
    passes: int = 8,
) -> Filled | None:
    """Passes of the *even* rule, each knowing what the ranks had to spare in the one before, while the span gets shorter."""
    best = filling.fill(order, Rule((0.0,) * filling.problem.num_ranks, (), before, ties))
    for _ in range(passes if best else 0):
        assert best is not None
        idlest = max(best.idle_s)
        filled = filling.fill(order, Rule([idlest - idle for idle in best.idle_s], (), before, ties))
        if filled is None or max(filled.idle_s) >= idlest:
            break
        best = filled
    return best


def order_of(problem: Problem, rows: Sequence[Sequence[int]], retimer: Retimer) -> list[int]:
    """F and B of ``rows`` as one list, by their start: everything stands after what it waits for.

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
