"""Fill the waits of a known order: a rank runs the next action of its row, and in its waits actions from later in the row.

Source: `controllable-memory.txt` section 2 and appendix C. There, cells of a squeezed grid are looked at from left to right,
and a vacant one takes the first action that may move there. Here time runs forward over all ranks at once, in seconds: a free
rank runs the next action of its row if that is ready; otherwise the first action from later in the row that is ready and that
memory leaves room for (F moves into the warm-up, B and W into the cool-down), or a W whose B has run.

Memory: an F moves up only if the row, with each W directly after its B, stays within the limit; Ws that were put off run
before an F that would not fit. So the result holds at most the limit, or what the given order needs at least if that is more,
and it never gets stuck. Each replica keeps its order of microbatches, and gradients add up in the order of the row.

Which rule fills best depends on costs, transfers and memory, and no rule wins everywhere, so a :class:`GapFiller` tries several
*recipes* (:data:`RECIPES`) and re-times each result with the real costs.

The same is done from the end (:func:`fill_from_the_end`): time runs backwards, and what can be later is. Read backwards
an order is an order: F of a stage follows F of the next one, the last F its B, B that of the stage before and its own W. So
a rank takes the next action of its row from the end if that is ready; otherwise the first of those that come after it
(earlier in the row) that is ready and that memory leaves room for. What filling does for the warm-up this does for the
cool-down: forwards a wait there is filled too late, since what would fill it follows F's that could have run before.

Memory: backwards W takes what is kept, B the rest of what is held, and F gives it back. What takes moves up only if the row
stays within the limit all the way. So the result holds at most the limit, or what the given order holds if that is more, and it
never gets stuck. Each replica keeps its order of microbatches.

Source: schedules of projects are justified to the right and then to the left, which shortens them (Wiest 1964; Valls,
Ballestín and Quintanilla 2005); list scheduling in both directions, and memory, are ours. Not modelled: BW.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Literal

from jaxpipe.schedule.clock import NEVER, Choose, Clock, Feed, Tables
from jaxpipe.schedule.problem import BW, B, CodeRows, Problem, W
from jaxpipe.schedule.timeline import nine_digits
from jaxpipe.search.retime import SLACK, Draft, Retimer, best_of, within

GAPS = ((1.0, 1.0), (0.5, 0.5), (1.0, 0.5))
"""How long a wait must be for an F or B to fill it, and for a W: × its seconds. Tried one after the other."""


def backward_tables(problem: Problem) -> Tables:
    """Build what the clock looks up where time runs backwards, each feed the other way round; codes are those of
    ``problem``, without BW."""
    forwards, n, m = problem.tables, problem.num_replicas, problem.num_microbatches
    sent = [(kind, kind + x.gaps[0] // m, x) for kind in range(W * n) for x in forwards.feeds[kind]]
    # forwards a row has each W behind its B; backwards B must be made to wait for it
    sent += [(B * n + k, W * n + k, Feed(problem.rank[k], -1, 0.0, 0.0, ())) for k in range(n)]
    feeds: list[tuple[Feed, ...]] = [()] * (3 * n)
    needs = [0] * (3 * n)
    for source, kind, feed in sent:
        feeds[kind] = (feed._replace(rank=problem.rank[source % n], gaps=((source - kind) * m,)),)
        needs[source] += 1
    rest = (held - residue for held, residue in zip(problem.held, problem.kept, strict=True))
    return replace(
        forwards,
        ranks=forwards.ranks[: 3 * n],
        seconds=forwards.seconds[: 3 * n],
        change=[*(-held for held in problem.held), *rest, *problem.kept],
        feeds=feeds,
        needs=needs,
    )


def fill_from_the_end(problem: Problem, rows: CodeRows, limit: float) -> Iterator[list[list[int]]]:
    """Yield ``rows`` (complete, free of deadlock, without BW) with waits filled from the end within ``limit`` (units of a
    rank's share), in each of the ways of :data:`GAPS`."""
    tables = backward_tables(problem)
    reversed_rows = [[*reversed(row)] for row in rows]
    for pull_gap, w_gap in GAPS:
        clock = Clock(tables)
        gaps = [w_gap if kind >= W * problem.num_replicas else pull_gap for kind in range(3 * problem.num_replicas)]
        clock.run(_fill_gaps_backwards(clock, reversed_rows, limit * SLACK, gaps))
        yield [[*reversed(row)] for row in clock.rows]


def _fill_gaps_backwards(clock: Clock, rows: CodeRows, room: float, gaps: list[float]) -> Choose:
    """Return the chooser that fills ``rows``, an order read backwards."""
    m, change = clock.tables.num_microbatches, clock.tables.change
    ready, memory, tiny = clock.ready, clock.memory, clock.tiny
    least = [gap * seconds - tiny for gap, seconds in zip(gaps, clock.tables.seconds, strict=True)]
    place = {code: k for row in rows for k, code in enumerate(row)}
    profiles: list[list[float]] = []  # memory once an action has started
    queues: list[dict[int, list[int]]] = [{} for _ in rows]  # by kind, the last is next
    for row, queue in zip(rows, queues, strict=True):
        live, profile = 0.0, []
        for code in row:
            live += change[code // m]
            profile.append(live)
        profiles.append(profile)
        for code in reversed(row):
            queue.setdefault(code // m, []).append(code)
    head, done = [0] * len(rows), set[int]()

    def filler(r: int, now: float, gap: float) -> int:
        """Return the code to run while the head of the row is ``gap`` seconds away."""
        best, at = -1, len(rows[r])
        for kind, queue in queues[r].items():
            if not queue or gap < least[kind] or place[queue[-1]] >= at or ready[queue[-1]] > now + tiny:
                continue
            free = room - change[kind]
            if change[kind] > 0 and max(memory[r], *profiles[r][head[r] : place[queue[-1]]]) > free:
                continue
            best, at = queue[-1], place[queue[-1]]
        return best

    def choose(r: int, now: float) -> int:
        row, at = rows[r], head[r]
        while at < len(row) and row[at] in done:
            at += 1
        head[r] = at
        if at == len(row):
            return -1
        code, gap = row[at], ready[row[at]] - now
        if gap > tiny and (code := filler(r, now, gap)) < 0:
            return -1
        done.add(code)
        queues[r][code // m].pop()
        for k in range(at, place[code]):
            profiles[r][k] += change[code // m]
        return code

    return choose


_STARTS, _FEWEST, _LEAST, _LARGE = 2, 10, 3, 1_000_000
_ACTIONS = 45_000  # placed for the first order, over all recipes; a recipe takes about 4 µs for each
_AGAIN = 8  # recipes for an order that was filled from its end; 20 found the same in the few cases that were tried
_MOST_DRAFTS = 500  # drafts that are remembered: bounds memory
ORDERS_UNTIL_STABLE = 42
"""Orders that :meth:`GapFiller.improve_until_stable` makes, roughly: by all recipes, then twice from the end and by some."""
CostView = Literal["real", "free transfers", "cells"]


@dataclass(frozen=True, slots=True)
class Rule:
    """How a rank fills time while the next action of its row is not ready.

    ``forward``, ``backward``: F, B (or BW) from later in the row may move up. ``pull_gap``: but only if the wait is at least
    this fraction of it. ``w_gap``: a waiting W runs if the wait is at least this fraction of it (0: always).
    ``lazy``: W loses its place in the row and runs only in waits, when memory needs it, and at the end.
    ``backlog``: with ``lazy``, the most Ws that may wait per rank. ``reserve``: before its first B a rank that moves up an F
    leaves room for those of its last chunk that can reach it until then, one for itself and one for each later stage, as far
    as half of the memory goes.
    """

    forward: bool = True
    backward: bool = True
    pull_gap: float = 0.0
    w_gap: float = 1.0
    lazy: bool = True
    backlog: float = NEVER
    reserve: bool = False


AS_GIVEN = Rule(forward=False, backward=False, w_gap=NEVER, lazy=False)


@dataclass(frozen=True, slots=True)
class Phases:
    """A rule for each phase: ``warm_up`` until stage 0 starts its first B, ``cool_down`` from its last F on."""

    warm_up: Rule
    steady: Rule
    cool_down: Rule


Recipes = Sequence[tuple[CostView, Rule | Phases]]


def _ends(warm_up: Rule, cool_down: Rule) -> Phases:
    return Phases(warm_up, AS_GIVEN, cool_down)


RECIPES: Recipes = (
    ("real", Rule(pull_gap=0.5, w_gap=0.5, reserve=True)),
    ("real", _ends(Rule(pull_gap=1.0, w_gap=0.5, lazy=False, reserve=True), Rule(pull_gap=1.0, w_gap=0.5))),
    ("free transfers", Rule(w_gap=0.5, reserve=True)),
    ("free transfers", Rule(w_gap=0.0, reserve=True)),
    ("real", Rule(pull_gap=0.5, reserve=True)),
    ("cells", _ends(Rule(backward=False, w_gap=0.5, lazy=False, reserve=True), Rule(w_gap=0.0))),
    ("free transfers", Rule(pull_gap=0.5, w_gap=0.5)),
    ("real", Rule(pull_gap=1.0, w_gap=0.0, reserve=True)),
    ("real", _ends(Rule(pull_gap=1.0, w_gap=0.5, reserve=True), Rule())),
    ("free transfers", Rule(pull_gap=0.5, reserve=True)),
    ("real", Rule(w_gap=0.5)),
    ("real", Rule(pull_gap=1.0, reserve=True)),
    ("real", Rule(w_gap=0.5, lazy=False, reserve=True)),
    ("free transfers", _ends(Rule(w_gap=0.5, reserve=True), Rule(w_gap=0.5))),
    ("real", _ends(Rule(backward=False, pull_gap=1.0, reserve=True), Rule(pull_gap=1.0, w_gap=0.5))),
    ("free transfers", _ends(Rule(w_gap=0.5, lazy=False, reserve=True), Rule())),
    ("free transfers", _ends(Rule(w_gap=0.5, lazy=False), Rule(pull_gap=0.5, w_gap=0.5))),
    ("cells", Rule(w_gap=0.0)),
    ("free transfers", _ends(Rule(pull_gap=1.0, w_gap=0.5, reserve=True), Rule(w_gap=0.5))),
    ("real", _ends(Rule(pull_gap=1.0, reserve=True), Rule(w_gap=0.0))),
)
"""A rule and the costs it looks at: the real ones, those with free transfers (looking too closely at short ones, a greedy rule
breaks the rhythm of the steady phase), or a grid of cells as in the paper. Found by greedy selection over random problems (p up
to 12, transfers 0 to 0.3 F): each improves most on those before it; the 20 come within 0.05% of all 600 tried."""

DOMINATING: Recipes = (
    ("real", Rule(pull_gap=0.5, w_gap=0.5, reserve=True)),
    ("real", Rule(pull_gap=1.0)),
    ("real", Rule(w_gap=0.5)),
    ("real", _ends(Rule(pull_gap=1.0, w_gap=0.5, reserve=True), Rule())),
    ("real", _ends(Rule(w_gap=0.5, lazy=False), Rule(pull_gap=0.5, w_gap=0.5))),
    ("real", Rule(pull_gap=1.0, w_gap=0.5)),
    ("free transfers", Rule(pull_gap=0.5, w_gap=0.0)),
    ("real", Rule(forward=False, backward=False, w_gap=0.5)),
    ("real", Rule(pull_gap=0.25)),
    ("free transfers", Rule(w_gap=0.5, reserve=True)),
    ("real", Rule(forward=False, backward=False, w_gap=0.25)),
)
"""Recipes that :func:`improve_order` tries, found so over the authors' tables of GIS and PO and 350 random problems: they
shorten the known orders by 5.2 to 6.3% on average, all 170 that were tried by 0.1 to 0.2% more."""


class _FixedOrder:
    """An order to be filled, the same for all rules and views; ``rows`` must be complete and free of deadlock.

    ``place[code]``: index in its row. ``queues``: codes of F, B and BW that keep their order, by the first kind among them:
    F of a replica; B and BW of all replicas of a stage on one rank, which add to the same gradients. ``on_rank[r]`` names a
    rank's queues. ``profile[r][k]``: memory once ``rows[r][k]`` has started, if each W came directly after its B.
    ``deepest[r]``: the last chunk of a rank.
    """

    def __init__(self, problem: Problem, rows: CodeRows) -> None:
        n, m, stages = problem.num_replicas, problem.num_microbatches, problem.placement.num_stages
        self.rows = rows
        self.place = {code: k for row in rows for k, code in enumerate(row)}
        self.queue_of = list(range(4 * n))
        self.queues: dict[int, list[int]] = {}
        self.on_rank: list[list[int]] = []
        self.deepest: list[int] = []
        self.profile: list[list[float]] = []
        for row in rows:
            live, profile = 0.0, []
            queues: dict[tuple[int, int], int] = {}
            for code in row:
                kind = code // m
                # W's keep no place here: they wait from their B on, and rules say when they run
                if not W * n <= kind < BW * n:
                    where = (0, kind) if kind < n else (1, kind % n % stages)
                    queue = self.queue_of[kind] = queues.setdefault(where, kind)
                    self.queues.setdefault(queue, []).append(code)
                    live += problem.reserved[kind] if kind < n else -problem.reserved[kind % n]
                profile.append(live)
            self.on_rank.append(list(queues.values()))
            self.deepest.append(max((queue for queue in self.on_rank[-1] if queue < n), default=0))
            self.profile.append(profile)


def fill_gaps(clock: Clock, problem: Problem, fixed: _FixedOrder, limit: float, rules: Rule | Phases) -> Choose:
    """Return the chooser that fills the ``fixed`` order by ``rules`` within ``limit`` (units of a rank's share)."""
    m, n, stages = problem.num_microbatches, problem.num_replicas, problem.placement.num_stages
    first_b, first_w, first_bw, to_w, to_b = B * n * m, W * n * m, BW * n * m, (W - B) * n * m, (B - BW) * n * m
    reserved, seconds, room = problem.reserved, clock.tables.seconds, limit * SLACK
    tiny, ready, memory = clock.tiny, clock.ready, clock.memory
    rows, place, queues, queue_of, on_rank = fixed.rows, fixed.place, fixed.queues, fixed.queue_of, fixed.on_rank
    profiles = [x.copy() for x in fixed.profile]
    done, head, started = bytearray(4 * n * m), [0] * len(rows), [0] * (4 * n)
    waiting: list[list[int]] = [[] for _ in rows]
    begun = [False] * len(rows)
    phases = rules if isinstance(rules, Phases) else Phases(rules, rules, rules)
    rule = phases.warm_up

    def left_to_last(r: int, kind: int) -> float:
        """Return the memory that an F of ``kind`` must leave to the last chunk."""
        last = fixed.deepest[r]
        if begun[r] or kind >= last or reserved[last] <= 0:
            return 0.0
        most = min(stages - last % stages, int(min(room / reserved[last], 2 * stages)) // 2)
        return max(0, most - started[last]) * reserved[last]

    def filler(r: int, now: float, gap: float) -> int:
        """Return the code to run while the head of the row is ``gap`` seconds away."""
        best, at, soon = -1, len(rows[r]), now + tiny
        for queue in on_rank[r]:
            if started[queue] == len(queues[queue]):
                continue
            code = queues[queue][started[queue]]
            kind = code // m
            if gap < rule.pull_gap * seconds[kind] - tiny:
                continue
            # of those that can run, the one that stands first in the row
            if place[code] >= at or ready[code if code < first_bw else code + to_b] > soon:
                continue
            if code >= first_b:
                if not rule.backward:
                    continue
            else:
                free = room - reserved[kind]
                if not rule.forward or memory[r] + (left_to_last(r, kind) if rule.reserve else 0.0) > free:
                    continue
                # an F pulled ahead lives through all that stands before its place
                if max(profiles[r][head[r] : place[code]], default=0.0) > free:
                    continue
            best, at = code, place[code]
        if best < 0 and waiting[r] and gap >= rule.w_gap * seconds[waiting[r][0] // m] - tiny:
            return waiting[r][0]
        return best

    def choose(r: int, now: float) -> int:
        nonlocal rule
        row, at, waits, lazy = rows[r], head[r], waiting[r], rule.lazy
        # past what was pulled ahead, and past W's where the rule places them itself
        while at < len(row) and (done[row[at]] or (lazy and first_w <= row[at] < first_bw)):
            at += 1
        head[r] = at
        if at == len(row):
            code = waits[0] if waits else -1
        else:
            code = row[at]
            gap = ready[code if code < first_bw else code + to_b] - now
            if gap > tiny:
                code = filler(r, now, gap)
            # the head can run, but W's go first where it lacks memory or too many wait
            elif waits and (
                (code < first_b and memory[r] + reserved[code // m] > room) or (lazy and len(waits) > rule.backlog)
            ):
                code = waits[0]
        if code < 0:
            return -1
        if code >= first_w and waits:  # a W that was put off adds to the same gradients first
            stage = code // m % n % stages
            code = next((w for w in waits if w // m % n % stages == stage), code)
        done[code] = 1
        if first_w <= code < first_bw:
            waits.remove(code)
            return code
        kind = code // m
        started[queue_of[kind]] += 1
        # what was pulled ahead takes or gives memory before its old place
        for k in range(at, place[code]):
            profiles[r][k] += reserved[kind] if code < first_b else -reserved[kind % n]
        if code >= first_b:
            begun[r] = True
            if code < first_w:
                waits.append(code + to_w)
            if code in (first_b, first_bw) and rule is phases.warm_up:
                rule = phases.steady
        elif code == m - 1:
            rule = phases.cool_down
        return code

    return choose


class GapFiller:
    """Recipes for one problem; its tables are made once."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.retimer = Retimer(problem)
        self._fixed: _FixedOrder | None = None
        self._drafts_by_recipe: dict[tuple[object, ...], Draft | None] = {}

    @cached_property
    def _views(self) -> dict[CostView, Problem]:
        free, one = self.problem.without_transfers(), (1.0,) * self.problem.num_replicas
        cells = replace(free, f_s=one, b_s=one, w_s=one, bw_s=tuple(2.0 for _ in one))
        same = free == self.problem
        return {"real": self.problem, "free transfers": self.problem if same else free, "cells": cells}

    def fill(self, rows: CodeRows, limit: float, rules: Rule | Phases, view: CostView = "real") -> list[list[int]]:
        """Return ``rows`` (complete, free of deadlock) with waits filled by one rule, within ``limit`` (units of a rank's
        share)."""
        # recipes for one order come in a row, so identity suffices
        if self._fixed is None or self._fixed.rows is not rows:
            self._fixed = _FixedOrder(self.problem, rows)
        problem = self._views[view]
        clock = Clock(problem.tables)
        clock.run(fill_gaps(clock, problem, self._fixed, limit, rules))
        return clock.rows

    def best(self, rows: CodeRows, limit: float, tries: int) -> Draft | None:
        """Return the best of ``rows`` squeezed, ``tries`` recipes on them, and on the best of what these gave; None if none
        is within ``limit`` (units of a rank's share). Best: by :func:`score`."""
        drafts = [*within([self.retimer.draft(rows)], limit), *self.drafts(rows, limit, tries)]
        left = tries - len(RECIPES)
        for draft in sorted(drafts, key=score)[:_STARTS]:
            if left > 0:
                drafts += self.drafts(draft.rows, limit, left)
                left -= len(RECIPES)
        return min(drafts, key=score, default=None)

    def improve_until_stable(self, rows: CodeRows, limit: float) -> Iterator[Draft]:
        """Yield the best of ``rows`` by all recipes; then, while that makes it better, of that filled from its end, and by some
        recipes again. Nothing if none is within ``limit`` (units of a rank's share). Best: by :func:`score`."""
        best, now = None, self.best(rows, limit, len(RECIPES))
        while now is not None and (best is None or score(now) < score(best)):
            yield (best := now)
            back = map(self.retimer.draft, fill_from_the_end(self.problem, best.rows, limit))
            drafts = [*within(back, limit)]
            drafts += self.drafts(min(drafts, key=score, default=best).rows, limit, _AGAIN)
            now = min(drafts, key=score, default=None)

    def drafts(self, rows: CodeRows, limit: float, tries: int, recipes: Recipes = RECIPES) -> Iterator[Draft]:
        """Return ``rows`` by the first ``tries`` recipes, those that keep within ``limit`` (units of a rank's share)."""
        # without transfers two views are one
        distinct = {(id(self._views[view]), rules): view for view, rules in recipes}
        order = tuple(map(tuple, rows))

        def draft_by(rules: Rule | Phases, view: CostView) -> Draft | None:
            at = order, limit, rules, view
            if len(self._drafts_by_recipe) > _MOST_DRAFTS:
                self._drafts_by_recipe.clear()
            if at not in self._drafts_by_recipe:
                self._drafts_by_recipe[at] = self.retimer.draft(self.fill(rows, limit, rules, view))
            return self._drafts_by_recipe[at]

        recipes_to_try = islice(distinct.items(), max(0, tries))
        return within((draft_by(rules, view) for (_, rules), view in recipes_to_try), limit)


def improve_order(problem: Problem, orders: Sequence[CodeRows]) -> Draft:
    """Return the best that recipes make of ``orders``, no worse than the first (which must run) in makespan, longest span
    and peak.

    Fewer recipes are tried on large problems.
    """
    gap_filler = GapFiller(problem)
    anchor = gap_filler.retimer.draft(orders[0])
    assert anchor is not None, "the known order deadlocks"
    # a filling takes time by actions, so all orders together take about the same at any size
    tries = max(_LEAST, _ACTIONS // sum(map(len, orders[0])))
    drafts = (draft for rows in orders for draft in gap_filler.drafts(rows, anchor.peak, tries, DOMINATING))
    return best_of(drafts, anchor) or anchor


def score(draft: Draft) -> tuple[float, float]:
    """Score a draft, smaller is better: makespan plus longest span, then peak. Both count: the span where no rank waits for
    the others' last actions before it steps, the makespan otherwise."""
    return nine_digits(draft.makespan + draft.span), draft.peak


def recipe_budget(problem: Problem, actions: int) -> int:
    """Return how many recipes may be tried if ``actions`` actions may be ordered in all; at least a few, or at a size at which
    these take long, one."""
    size = max(1, 3 * problem.num_replicas * problem.num_microbatches)
    return max(actions // size, min(_FEWEST, _LARGE // size), 1)
