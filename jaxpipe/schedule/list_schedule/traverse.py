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

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule.costs import CostProfile
from jaxpipe.schedule.ir import Action, Schedule
from jaxpipe.schedule.list_schedule.actions import BACKWARD, FORWARD, Actions
from jaxpipe.schedule.list_schedule.clock import Clock
from jaxpipe.schedule.list_schedule.traversal import Traversal, View, name_of
from jaxpipe.schedule.placement import Placement

Rules = Traversal | Mapping[int | tuple[int, ...] | range, Traversal]


def traverse(placement: Placement, microbatches: int, rules: Rules, costs: CostProfile | None = None) -> Schedule:
    """The schedule of ``placement`` whose ranks choose by ``rules``: one for all, or one for each group of ranks.

    ``costs``: real times of actions and transfers, one entry a stage; None: the paper's steps, in which every action takes one
    step and no transfer takes any. Backwards are full (BW); :mod:`~jaxpipe.schedule.passes` split them.

    Raises:
        ScheduleError: the rules don't cover every rank once, a limit has the wrong length, a function fails, or nothing can go
            on: names a rank, the rule and the microbatch.
    """
    if type(microbatches) is not int or microbatches < 1:
        raise ScheduleError(
            f"traverse: the number of microbatches is {microbatches!r}; want a whole number of at least 1"
        )
    walk = _Walk(Actions.of(placement, microbatches, costs), rules)
    walk.run()
    rows = tuple(tuple(map(walk.actions.action, row)) for row in walk.clock.rows)
    return Schedule("traverse", placement, microbatches, rows)


class _Walk:
    """``waiting[kind]``: codes not chosen yet, ascending. ``held[kind]``: microbatches in flight, by kind of F; they come
    first, those of BW follow in the same order. ``stages[rank][op]``: kinds of each stage, the first to take at the front."""

    def __init__(self, actions: Actions, rules: Rules) -> None:
        self.actions, self.m, self.kinds = actions, actions.num_microbatches, actions.kinds
        placement = actions.placement
        ranks = range(placement.num_ranks)
        self.clock = Clock(actions.tables)
        self.rules, self.limits, self.stage_limits = zip(*_by_rank(rules, placement), strict=True)
        self.waiting = [
            [k * self.m + i for i in range(kind.flow, self.m, placement.num_flows)] for k, kind in enumerate(self.kinds)
        ]
        self.left = sum(map(len, self.waiting))
        self.replicas = placement.num_stages * placement.num_flows
        self.held = [0] * self.replicas
        # Without functions the microbatches of a flow pass every stage in order, so the first one decides.
        self.looked_at = None if any(rule.checks or rule.choose for rule in self.rules) else 1
        self.depth = {stage: at for at, stage in enumerate(placement.topological_order())}
        self.others = list(dict.fromkeys(kind.op for kind in self.kinds if kind.op not in (FORWARD, BACKWARD)))
        self.stages = [{op: self._in_order(rank, op) for op in (*self.others, FORWARD, BACKWARD)} for rank in ranks]
        self.forwards = [[k for kinds in self.stages[rank][FORWARD] for k in kinds] for rank in ranks]
        self.last = [("", 0) for _ in ranks]  # the type taken last, and how many of it in a row
        self.interval: list[dict[str, tuple[int, int]]] = [{} for _ in ranks]  # where, and how many were taken there
        seen, ended = [0] * len(ranks), [0] * len(self.kinds)
        self.views = [View(rank, actions, self.clock, self.held, seen, ended) for rank in ranks]

    def _in_order(self, rank: int, op: str) -> list[list[int]]:
        found: dict[int, list[int]] = {}
        for k, kind in enumerate(self.kinds):
            if kind.op == op and rank in kind.ranks:
                found.setdefault(self.depth[kind.stage], []).append(k)
        return [found[at] for at in sorted(found, reverse=self.rules[rank].stage_order(op)[0])]

    def run(self) -> None:
        """All actions in rows.

        Raises:
            ScheduleError: nothing can go on.
        """
        while self.left:
            before = self.left
            self.clock.run(self.choose, ask_all=True)
            if self.left == before:
                raise ScheduleError(self._why_stuck())
            for taken in self.interval:
                taken.clear()
            self.clock.wake()

    def choose(self, rank: int, now: float) -> int:
        rule = self.rules[rank]
        if rule.choose is not None:
            code = self._chosen(rank)
        else:
            code = next((c for op in self._types(rank) if (c := self._first(rank, op)) >= 0), -1)
        if code >= 0:
            self._take(code)
        return code

    def _types(self, rank: int) -> list[str]:
        rule, (last, row) = self.rules[rank], self.last[rank]
        first = BACKWARD if rule.first == "backward" else FORWARD
        if last and row < rule.units[last == BACKWARD]:
            first = last
        elif last and rule.first == "interleaved":
            first = FORWARD if last == BACKWARD else BACKWARD
        return [*self.others, first, FORWARD if first == BACKWARD else BACKWARD]

    def _first(self, rank: int, op: str) -> int:
        """What the stage order takes among actions of ``op``; -1: nothing yet."""
        order = self.stages[rank][op]
        interval = self.rules[rank].stage_order(op)[1]
        at, taken = self.interval[rank].get(op, (0, 0))
        if interval and taken:
            at += taken >= interval
            order = [kinds for kinds in order[at:] + order[:at] if any(self.waiting[k] for k in kinds)][:1]
        return next((code for kinds in order for code in self._open(rank, kinds)), -1)

    def _open(self, rank: int, kinds: Sequence[int]) -> Iterator[int]:
        """Codes of one stage that may start now, smaller microbatches first."""
        now = self.clock.now + self.clock.tiny
        codes = [code for k in kinds for code in self.waiting[k][: self.looked_at] if self.clock.ready[code] <= now]
        codes.sort(key=lambda code: code % self.m)
        return (code for code in codes if not any(self._against(code)))

    def _against(self, code: int) -> Iterator[tuple[int, str]]:
        """Ranks whose limits or checks keep ``code`` off, and why."""
        kind, i = self.kinds[code // self.m], code % self.m
        for rank in kind.ranks:
            if kind.op == FORWARD:
                mine, limit, of_stage = self.forwards[rank], self.limits[rank], self.stage_limits[rank][kind.stage]
                if limit:
                    heads = [self.waiting[k][0] for k in mine if self.waiting[k]]
                    room = sum(head % self.m <= i and head != code for head in heads)
                    need = sum(self.held[k] for k in mine) + room + 1
                    if need > limit:
                        yield rank, f"in-flight={limit} leaves it no room: raise it to at least {need}"
                if of_stage and self.held[code // self.m] >= of_stage:
                    yield rank, f"in-flight-per-stage={of_stage} leaves it no room: raise it"
            for check in self.rules[rank].checks:
                if not _called(check, self.views[rank], self.actions.action(code), bool):
                    yield rank, f"check {name_of(check)} vetoes it: let it pass some action that is ready"

    def _chosen(self, rank: int) -> int:
        """The answer of the rule's own chooser; -1 for None."""
        choose = self.rules[rank].choose
        assert choose is not None
        codes = [c for op in self._types(rank) for kinds in self.stages[rank][op] for c in self._open(rank, kinds)]
        if not codes:
            return -1
        ready = tuple(map(self.actions.action, codes))
        answer = _called(choose, self.views[rank], ready)
        if answer is None:
            return -1
        if not isinstance(answer, Action) or answer not in ready:
            raise ScheduleError(
                f"traverse: choose={name_of(choose)} answers {answer if isinstance(answer, Action) else type(answer).__name__} "
                f"on rank {rank}, and ready are {' '.join(map(str, ready[:9]))}: return one of them, or None to wait"
            )
        return codes[ready.index(answer)]

    def _take(self, code: int) -> None:
        k, op = code // self.m, self.kinds[code // self.m].op
        self.waiting[k].remove(code)
        self.left -= 1
        if op in (FORWARD, BACKWARD):
            self.held[k % self.replicas] += 1 if op == FORWARD else -1
        for rank in self.kinds[k].ranks:
            if op in (FORWARD, BACKWARD):
                last, row = self.last[rank]
                self.last[rank] = (op, row + 1 if op == last else 1)
            at = next(n for n, kinds in enumerate(self.stages[rank][op]) if k in kinds)
            before, taken = self.interval[rank].get(op, (-1, 0))
            going_on = at == before and taken < self.rules[rank].stage_order(op)[1]
            self.interval[rank][op] = (at, taken + 1 if going_on else 1)

    def _why_stuck(self) -> str:
        """What keeps the first microbatch that could go on."""
        ready, now = self.clock.ready, self.clock.now + self.clock.tiny
        depth = [self.depth[kind.stage] for kind in self.kinds]
        codes = [code for codes in self.waiting for code in codes]
        code = min(codes, key=lambda c: (ready[c] > now, c % self.m, depth[c // self.m], c))
        action, ranks = self.actions.action(code), self.kinds[code // self.m].ranks
        against = list(self._against(code))
        if ready[code] > now:
            against = [(ranks[0], f"it never gets what it waits for: do the waits of op {action.op} form a circle?")]
        choosers = [(rank, self.rules[rank].choose) for rank in ranks]
        against += [
            (rank, f"choose={name_of(choose)} takes nothing: let it return an action when all others wait")
            for rank, choose in choosers
            if choose
        ]
        rank, why = against[0]
        return f"traverse: microbatch {action.microbatch} can't go on: {action} is next on rank {rank}, and {why}"


def _by_rank(rules: Rules, placement: Placement) -> list[tuple[Traversal, int, Sequence[int]]]:
    """Of each rank: its rule, and its limits in all and by stage (0: none)."""
    ranks = range(placement.num_ranks)
    found: dict[int, tuple[Traversal, int, Sequence[int]]] = {}
    for group, rule in rules.items() if isinstance(rules, Mapping) else [(ranks, rules)]:
        members = tuple(group) if isinstance(group, tuple | range) else (group,)
        if not isinstance(rule, Traversal):
            raise ScheduleError(f"traverse: a rule is of type {type(rule).__name__}; want a Traversal")
        limits = _each("in-flight", rule.in_flight, len(members), "rank")
        by_stage = _each("in-flight-per-stage", rule.in_flight_per_stage, placement.num_stages, "stage")
        for rank, limit in zip(members, limits, strict=True):
            if rank in found or rank not in ranks:
                wrong = "twice" if rank in found else f"and the last one is {ranks[-1]}"
                raise ScheduleError(f"traverse: the rules name rank {rank!r}, {wrong}: give each rank one Traversal")
            found[rank] = (rule, limit, by_stage)
    missing = [rank for rank in ranks if rank not in found]
    if missing:
        raise ScheduleError(f"traverse: rank {missing[0]} has no rules: give each rank one Traversal")
    return [found[rank] for rank in ranks]


def _each(name: str, limit: int | Sequence[int] | None, count: int, what: str) -> Sequence[int]:
    if limit is None or isinstance(limit, int):
        return (limit or 0,) * count
    if len(limit) != count:
        shown = ",".join(map(str, limit))
        raise ScheduleError(
            f"traverse: {name}={shown} is for {len(limit)}, not {count}: give one a {what}, or one for all"
        )
    return limit


def _called(
    function: Callable[[View, Any], Any], view: View, argument: Any, convert: Callable[[Any], Any] = lambda x: x
) -> Any:
    """What a user's function answers, converted."""
    try:
        return convert(function(view, argument))
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        asked = argument if isinstance(argument, Action) else " ".join(map(str, argument))
        named = f"traverse: {name_of(function)} failed on rank {view.rank} for {asked}"
        raise ScheduleError(f"{named}: {reason}") from error
