"""A schedule by rules: the clock asks every free rank, and its :class:`Traversal` names the action.

Source: FlexPipe (`flexpipe.txt`) sections 4.2 and 5, algorithm 1. Works on any placement: DAGs of stages, stages on groups of
ranks, several flows, and every registered op that is required. Readings taken where the paper leaves room:

* Types: F and BW by ``first``. A unit that has begun goes on while it can; then ``forward`` and ``backward`` prefer their type,
  ``interleaved`` the other one. A type without an action that may run falls through. Other ops go before both.
* Stages count in topological order; of one stage the smaller microbatch goes first.
* Interval ``:k``: a rank *waits* for the actions of one stage until k have run, then for those of the next stage in the
  direction, cyclically; the type falls through meanwhile. An interval ends early when its stage has none left in the whole
  step. When everything in the pipeline waits, all intervals end, and one begins on the first stage that has an action to run.
* ``in_flight`` counts actions F whose BW has not run. A rank keeps room free for every other F that this microbatch, or an
  earlier one, still has to run on it, so a limit of at least a rank's stages never dead-locks.
* A joint action of a group is chosen by the first of its ranks that wants it, within the limits and checks of all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule.clock import NEVER, Clock
from jaxpipe.schedule.costs import CostProfile
from jaxpipe.schedule.ir import Action, Schedule
from jaxpipe.schedule.placement import Placement
from jaxpipe.schedule.rules.traversal import BACKWARD, FORWARD, Actions, Traversal, View, joined, name_of

_OTHER = {FORWARD: BACKWARD, BACKWARD: FORWARD}
Rules = Traversal | Mapping[int | tuple[int, ...] | range, Traversal]


def traverse(placement: Placement, microbatches: int, rules: Rules, costs: CostProfile | None = None) -> Schedule:
    """Return the schedule of ``placement`` whose ranks choose by ``rules``: one for all, or one for each group of ranks.

    ``costs``: real times of actions and transfers, one entry a stage; None: the paper's steps, in which every action takes one
    step and no transfer takes any. Backwards are full (BW); :mod:`~jaxpipe.schedule.passes` split them.

    Raises:
        ScheduleError: the rules don't cover every rank once, a limit has the wrong length, a function fails, or nothing can go
            on: names a rank, the rule and the microbatch.
    """
    if type(microbatches) is not int or microbatches < 1:
        raise ScheduleError(f"traverse: microbatches is {microbatches!r}; want a whole number of at least 1")
    walk = _Walk(Actions.of(placement, microbatches, costs), rules)
    walk.run()
    rows = tuple(tuple(map(walk.actions.action, row)) for row in walk.clock.rows)
    return Schedule("traverse", placement, microbatches, rows)


class _Walk:
    """``waiting[kind]``: codes not chosen yet, ascending. ``held[kind]``: microbatches in flight, by kind of F.
    ``stages[rank][op]``: kinds of each stage, the first to take at the front, and how many of a stage go in a row."""

    def __init__(self, actions: Actions, rules: Rules) -> None:
        self.actions, self.m, self.kinds = actions, actions.num_microbatches, actions.kinds
        ranks, self.flows = range(actions.placement.num_ranks), actions.placement.num_flows
        self.clock = Clock(actions.tables)
        self.rules, self.limits, self.stage_limits = zip(*_by_rank(rules, actions.placement), strict=True)
        steps = [max(self.flows, actions.placement.span[x.stage]) for x in self.kinds]
        self.waiting = [[*range(k * self.m + x.flow, (k + 1) * self.m, steps[k])] for k, x in enumerate(self.kinds)]
        self.held = [0] * len(self.kinds)
        # Without functions the microbatches of a flow pass every stage in order, so the first one decides.
        self.looked_at = None if any(rule.checks or rule.choose for rule in self.rules) else 1
        self.other_ops = list(dict.fromkeys(kind.op for kind in self.kinds if kind.op not in (FORWARD, BACKWARD)))
        self.stages = [{op: self._in_order(rank, op) for op in (*self.other_ops, FORWARD, BACKWARD)} for rank in ranks]
        self.last = [(BACKWARD, NEVER) for _ in ranks]  # the type taken last, and how many of it in a row
        self.interval: list[dict[str, tuple[int, int]]] = [{} for _ in ranks]  # where, and how many were taken there
        shared = (actions, self.clock, self.held, Counter[Any]())
        self.views = [View(rank, *shared) for rank in ranks]

    def _in_order(self, rank: int, op: str) -> tuple[list[list[int]], int]:
        mine = (k for k, kind in enumerate(self.kinds) if kind.op == op and rank in kind.ranks)
        by_stage = [list(kinds) for _, kinds in groupby(mine, lambda k: self.kinds[k].stage)]
        latest_first, interval = self.rules[rank].stage_order(op)
        return by_stage[::-1] if latest_first else by_stage, interval

    def run(self) -> None:
        """Run until all actions are in rows.

        Raises:
            ScheduleError: nothing can go on.
        """
        while left := sum(map(len, self.waiting)):
            self.clock.run(self.choose, ask_all=True)
            # A run in which nobody chose anything, intervals just reset: asking again would give the same answers.
            if left == sum(map(len, self.waiting)):
                raise ScheduleError(self._why_stuck())
            # An interval may hold a rank to a stage whose actions can't come; when all wait, each counts anew.
            self.interval = [{} for _ in self.rules]
            self.clock.wake()

    def choose(self, rank: int, now: float) -> int:
        """Return the first that may start, or what the rule's own chooser answers."""
        choose, codes = self.rules[rank].choose, self._ready(rank)
        if choose is not None and (ready := {self.actions.action(code): code for code in codes}):
            answer = _call_user_function(choose, self.views[rank], tuple(ready))
            if answer is not None and not (isinstance(answer, Action) and answer in ready):
                reply, shown = answer if isinstance(answer, Action) else type(answer).__name__, [*map(str, ready)][:9]
                reply = f"choose={name_of(choose)} answers {reply} on rank {rank}, and ready are {' '.join(shown)}"
                raise ScheduleError(f"traverse: {reply}: return one of them, or None to wait")
            codes = iter(() if answer is None else (ready[answer],))
        if (code := next(codes, -1)) >= 0:
            self._take(code)
        return code

    def _ready(self, rank: int) -> Iterator[int]:
        """Yield codes that may start now, by type, by stage, and smaller microbatches first. Choosers need no intervals."""
        rule, (last, row), now = self.rules[rank], self.last[rank], self.clock.now + self.clock.tiny
        # Units come first: a rank in the middle of its row of one type compares nothing.
        going_on = row < rule.units[last == BACKWARD]
        first = last if going_on else {"forward": FORWARD, "backward": BACKWARD}.get(rule.first, _OTHER[last])
        for op in (*self.other_ops, first, _OTHER[first]):
            order, interval = self.stages[rank][op]
            at, streak = self.interval[rank].get(op, (0, 0))
            if interval and streak and rule.choose is None:
                # The stage in turn is the only one to be looked at, even if it is not ready: so intervals work.
                at += streak >= interval
                order = [kinds for kinds in order[at:] + order[:at] if any(self.waiting[k] for k in kinds)][:1]
            for kinds in order:
                codes = (c for k in kinds for c in self.waiting[k][: self.looked_at] if self.clock.ready[c] <= now)
                yield from (c for c in sorted(codes, key=lambda c: c % self.m) if not any(self._against(c)))

    def _against(self, code: int) -> Iterator[tuple[int, str]]:
        """Return the ranks whose limits or checks keep ``code`` off, and why."""
        k, i = divmod(code, self.m)
        for rank in self.kinds[k].ranks:
            if self.kinds[k].op == FORWARD:
                mine = [x for kinds in self.stages[rank][FORWARD][0] for x in kinds]
                # Each stage keeps room for its next microbatch if that is no later: later ones could fill the rank.
                heads = (self.waiting[x][0] for x in mine if self.waiting[x])
                need = sum([self.held[x] for x in mine]) + sum(c % self.m <= i for c in heads if c != code) + 1
                if need > self.limits[rank]:
                    yield rank, f"in-flight={self.limits[rank]} leaves it no room: raise it to at least {need}"
                if self.held[k] >= (most := self.stage_limits[rank][self.kinds[k].stage]):
                    yield rank, f"in-flight-per-stage={most} leaves it no room: raise it"
            for check in self.rules[rank].checks:
                if not _call_user_function(check, self.views[rank], self.actions.action(code)):
                    yield rank, f"check {name_of(check)} vetoes it: let it pass some action that is ready"

    def _take(self, code: int) -> None:
        k, op = code // self.m, self.kinds[code // self.m].op
        self.waiting[k].remove(code)
        if op in self.other_ops:
            return
        self.held[k if op == FORWARD else k - self.flows] += 1 if op == FORWARD else -1
        for rank in self.kinds[k].ranks:
            last, row = self.last[rank]
            self.last[rank] = (op, row + 1 if op == last else 1)
            order, interval = self.stages[rank][op]
            at = next(n for n, kinds in enumerate(order) if k in kinds)
            before, streak = self.interval[rank].get(op, (-1, 0))
            self.interval[rank][op] = (at, streak + 1 if at == before and streak < interval else 1)

    def _why_stuck(self) -> str:
        """Explain what keeps the first microbatch that could go on."""
        ready, now = self.clock.ready, self.clock.now + self.clock.tiny
        code = min((c for codes in self.waiting for c in codes), key=lambda c: (ready[c] > now, c % self.m, c))
        action, ranks = self.actions.action(code), self.kinds[code // self.m].ranks
        rank, why = next(self._against(code), (-1, ""))
        if ready[code] > now:
            rank, why = ranks[0], f"it never gets what it waits for: do the waits of op {action.op} form a circle?"
        elif not why:
            rank, choose = next((r, self.rules[r].choose) for r in ranks if self.rules[r].choose)
            why = f"choose={name_of(choose)} takes nothing: let it return an action when all others wait"
        return f"traverse: microbatch {action.microbatch} can't go on: {action} is next on rank {rank}, and {why}"


def _by_rank(rules: Rules, placement: Placement) -> list[tuple[Traversal, float, Sequence[float]]]:
    """Return the rule of each rank with its limits, in all and by stage (inf: none)."""
    ranks = range(placement.num_ranks)
    rule_of: dict[int, tuple[Traversal, float, Sequence[float]]] = {}
    for group, rule in rules.items() if isinstance(rules, Mapping) else [(ranks, rules)]:
        members = tuple(group) if isinstance(group, tuple | range) else (group,)
        if not isinstance(rule, Traversal):
            raise ScheduleError(f"traverse: a rule is of type {type(rule).__name__}; want a Traversal")
        limits = _each("in-flight", rule.in_flight, len(members), "rank")
        by_stage = _each("in-flight-per-stage", rule.in_flight_per_stage, placement.num_stages, "stage")
        for rank, limit in zip(members, limits, strict=True):
            if rank in rule_of or rank not in ranks:
                wrong = "twice" if rank in rule_of else f"and the last one is {ranks[-1]}"
                raise ScheduleError(f"traverse: the rules name rank {rank!r}, {wrong}: give each rank one Traversal")
            rule_of[rank] = (rule, limit, by_stage)
    for rank in sorted({*ranks} - {*rule_of}):
        raise ScheduleError(f"traverse: rank {rank} has no rules: give each rank one Traversal")
    return [rule_of[rank] for rank in ranks]


def _each(name: str, limit: int | Sequence[int] | None, count: int, what: str) -> Sequence[float]:
    numbers = (limit or NEVER,) * count if limit is None or isinstance(limit, int) else limit
    if len(numbers) != count:
        setting = f"{name}={joined(numbers)} is for {len(numbers)}, not {count}"
        raise ScheduleError(f"traverse: {setting}: give one a {what}, or one for all")
    return numbers


def _call_user_function(function: Any, view: View, argument: Action | tuple[Action, ...]) -> Any:
    """Call a user's function; for one action it answers whether that may run."""
    try:
        answer = function(view, argument)
        return bool(answer) if isinstance(argument, Action) else answer
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        subject = argument if isinstance(argument, Action) else " ".join(map(str, argument))
        message = f"{name_of(function)} failed on rank {view.rank} for {subject}: {reason}"
        raise ScheduleError(f"traverse: {message}") from error
