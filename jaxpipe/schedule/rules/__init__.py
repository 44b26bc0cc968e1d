"""Schedules by rules: what a free rank runs next, as a value that prints and parses.

The rules stand in one line (:class:`Traversal`): which type of action a free rank takes, of which stage, within
which limits; and the schedule that follows them (:func:`traverse`): the clock asks every free rank, and the rules name the
action.

:class:`Actions` holds every action of a placement as codes of the clock: any DAG of stages, groups of ranks and flows, and ops
as their specs say. What waits for what is read off the :func:`~jaxpipe.schedule.deps.build_graph` of a step with one microbatch
a flow. On a group an op that is joint is one action, and others run on each rank by themselves.

Source: FlexPipe (`flexpipe.txt`) section 4.2, table 2, and section 5, algorithm 1. Works on any placement: DAGs of stages,
stages on groups of ranks, several flows, and every registered op that is required. Readings taken where the paper leaves room:

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

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import groupby
from math import lcm
from typing import Any, NamedTuple

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule.clock import NEVER, Clock, Feed, Tables
from jaxpipe.schedule.costs import CostProfile
from jaxpipe.schedule.deps import build_graph
from jaxpipe.schedule.engine import collectives_exposed
from jaxpipe.schedule.ir import Action, Schedule, op_spec, registered_ops
from jaxpipe.schedule.placement import Placement

__all__ = ["Actions", "Check", "Kind", "Traversal", "View", "traverse"]

FORWARD, BACKWARD = "F", "BW"


class Kind(NamedTuple):
    """Meaning of one block of codes: ``op`` of ``stage`` for the microbatches of ``flow``, on ``ranks``. An action
    of a stage with a span has the code of its first microbatch."""

    op: str
    stage: int
    flow: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Actions:
    """``kinds[code // num_microbatches]`` says what a code is, stages in topological order, F and BW of each first.
    ``tables`` is what the clock looks up."""

    placement: Placement
    num_microbatches: int
    kinds: tuple[Kind, ...]
    tables: Tables

    @classmethod
    def of(cls, placement: Placement, num_microbatches: int, costs: CostProfile | None = None) -> Actions:
        """F, BW and every other required op of ``placement``, with the seconds of ``costs``, collectives included.
        Without costs each action takes 1 s and no transfer takes time.

        Raises:
            ScheduleError: the costs are for another number of stages or lack those of an op, or an op waits for one that is
                not among these.
        """
        kinds = tuple(_kinds(placement))
        return cls(placement, num_microbatches, kinds, _tables(placement, num_microbatches, kinds, costs))

    def action(self, code: int) -> Action:
        """Return the action that ``code`` stands for."""
        op, stage, *_ = self.kinds[code // self.num_microbatches]
        return Action(op, stage, code % self.num_microbatches // self.placement.span[stage])


def _kinds(placement: Placement) -> Iterator[Kind]:
    names = (FORWARD, BACKWARD, *op_spec(BACKWARD).performs())
    specs = [op_spec(FORWARD), op_spec(BACKWARD), *(x for x in registered_ops() if x.required and x.name not in names)]
    for stage in placement.topological_order():
        for spec in specs:
            for k, flow in enumerate(placement.flows):
                groups = [flow[stage]] if spec.is_joint else [(r,) for r in flow[stage]]
                yield from (Kind(spec.name, stage, k, ranks) for ranks in groups)


def _tables(placement: Placement, m: int, kinds: Sequence[Kind], costs: CostProfile | None) -> Tables:
    if costs is not None:
        costs.require_stages(placement.num_stages, "the placement")
    costs = costs and collectives_exposed(costs)
    # Host lanes first: there a slot would wait for the compute slot that stands before it.
    order = sorted(range(len(kinds)), key=lambda k: op_spec(kinds[k].op).lane == "compute")
    span, few = placement.span, max(placement.num_flows, lcm(*placement.span))
    if wrong := [s for s, g in enumerate(span) if m % g]:
        raise ScheduleError(
            f"stage {wrong[0]} runs once per {span[wrong[0]]} microbatches, and {m} is no multiple of that"
        )
    # (kind, number) of every action of the fewest microbatches that all spans divide
    numbers = {k: range(x.flow, few // span[x.stage], placement.num_flows) for k, x in enumerate(kinds)}
    rows = [[(k, i) for k in order if r in kinds[k].ranks for i in numbers[k]] for r in range(placement.num_ranks)]
    actions = tuple(tuple(Action(*kinds[k][:2], i) for k, i in row) for row in rows)
    graph = build_graph(Schedule("", placement, few, actions))
    for _, action, ops, *_ in graph.unmet:
        raise ScheduleError(
            f"op {action.op} waits for {' or '.join(ops)}, and the schedule has only "
            f"{', '.join(dict.fromkeys(x.op for x in kinds))}: let it wait for one of those (BW stands for B and W)"
        )
    kind_of = [x for row in rows for x in row]
    links: dict[tuple[int, int], int] = {}
    # Of each kind, by boundary (-1: nothing moves), rank, link and seconds: what it makes ready.
    sent: list[dict[tuple[int, int, int, float, float], list[int]]] = [{} for _ in kinds]
    needs = [0] * len(kinds)
    for (k, i), rank, waits in zip(kind_of, graph.rank_of, graph.waits, strict=True):
        needs[k] += len(waits) if i == numbers[k][0] else 0
        for x in waits:
            (source, j), key = kind_of[graph.source(x)], (-1, rank, -1, 0.0, 0.0)
            if j != numbers[source][0]:
                continue
            if x >= len(graph.slots):
                moved = graph.transfers[x - len(graph.slots)]
                link = links.setdefault((moved.src, moved.dst), len(links))
                seconds = (moved.seconds(costs), moved.occupied_s(costs)) if costs else (0.0, 0.0)
                key = (moved.stage, moved.dst, link, *seconds)
            first = i * span[kinds[k].stage] - j * span[kinds[source].stage]
            sent[source].setdefault(key, []).append((k - source) * m + first)
    return Tables(
        num_ranks=placement.num_ranks,
        num_microbatches=m,
        ranks=[x.ranks for x in kinds],
        seconds=[costs.seconds(op_spec(x.op).cost, x.stage) if costs else 1.0 for x in kinds],
        change=[{FORWARD: 1.0, BACKWARD: -1.0}.get(x.op, 0.0) for x in kinds],
        feeds=[tuple(Feed(*key[1:], tuple(gaps)) for key, gaps in sorted(moved.items())) for moved in sent],
        needs=needs,
        num_links=len(links),
        span=[span[x.stage] for x in kinds] if placement.has_spans else (),
    )


FIRST = ("forward", "backward", "interleaved")
_ORDERS = ("forward", "backward")
_ORDER = re.compile(r"(breadth|depth)(:0*[1-9][0-9]{0,8})?")
_LIMITS = ("in_flight", "in_flight_per_stage")


@dataclass(frozen=True)
class View:
    """View of one rank for checks and choosers: what ``rank`` knows when it chooses.

    ``actions``: the placement and what codes mean. ``held[kind]``: microbatches in flight, by kind of F.
    ``_ended``: actions that have ended, on each rank, and of each op, stage and flow on it.
    """

    rank: int
    actions: Actions
    clock: Clock
    held: Sequence[int]
    _ended: Counter[int | tuple[tuple[str, int, int], int]]

    @property
    def now(self) -> float:
        """Return the seconds since the step began; steps where there are no costs."""
        return self.clock.now

    @property
    def row(self) -> tuple[Action, ...]:
        """Return the actions that the rank has started, in order."""
        return tuple(map(self.actions.action, self.clock.rows[self.rank]))

    def done(self, op: str, stage: int) -> int:
        """Return the microbatches whose ``op`` of ``stage`` has ended; on a group, on all its ranks. 0 if there is no such
        stage."""
        kinds, m, now = self.actions.kinds, self.actions.num_microbatches, self.clock.now + self.clock.tiny
        for rank, row in enumerate(self.clock.rows):
            for code in row[self._ended[rank] : len(row) - (self.clock.free[rank] > now)]:
                self._ended.update((rank, (kinds[code // m][:3], rank)))
        groups = ((k, flow[stage]) for k, flow in enumerate(self.actions.placement.flows) if stage < len(flow))
        return sum(min(self._ended[(op, stage, k), rank] for rank in group) for k, group in groups)

    def in_flight(self, stage: int | None = None) -> int:
        """Return the microbatches on the rank whose F was chosen and whose BW was not, of one stage or summed over its
        stages."""
        mine = (self.rank in kind.ranks and stage in (None, kind.stage) for kind in self.actions.kinds)
        return sum(held for held, counts in zip(self.held, mine, strict=True) if counts)


Check = Callable[[View, Action], bool]
Choose = Callable[[View, tuple[Action, ...]], Action | None]


@dataclass(frozen=True)
class Traversal:
    """How the free ranks choose. ``str()`` gives one line, :meth:`parse` reads it; functions print as their names.

    ``first``: the type that goes first: ``forward``, ``backward``, or ``interleaved``, each in turn. ``units``: how many
    forwards, and backwards, go in a row once one has started, before the types are compared again. ``forward`` and
    ``backward``: the stage that goes first: ``breadth`` the earliest, ``depth`` the latest; ``breadth:4``: four in a row of a
    stage, then the next one. ``in_flight``: microbatches a rank may hold between F and BW, each stage counts; one number or one
    a rank. ``in_flight_per_stage``: the same of each stage on it (in each flow); one number or one a stage. ``checks``:
    functions ``(view, action) -> bool`` that may veto. ``choose``: a function ``(view, ready) -> Action | None`` in place of
    the priorities; ``ready`` are the actions that may start now, in the order of the priorities; None waits until something
    happens.

    Raises:
        ScheduleError: a value is none of these.
    """

    first: str
    _: KW_ONLY
    forward: str = "breadth"
    backward: str = "breadth"
    in_flight: int | Sequence[int] | None = None
    in_flight_per_stage: int | Sequence[int] | None = None
    units: Sequence[int] = (1, 1)
    checks: Sequence[Check] = ()
    choose: Choose | None = None

    def __post_init__(self) -> None:
        for name in (*_LIMITS, "units", "checks"):
            value = getattr(self, name)
            if isinstance(value, list | range | tuple):
                object.__setattr__(self, name, value[0] if len(value) == 1 and name in _LIMITS else tuple(value))
        if problems := list(self._problems()):
            raise ScheduleError("traversal: " + "; ".join(problems), problems)

    def _problems(self) -> Iterator[str]:
        if self.first not in FIRST:
            yield f"the type that goes first is {self.first!r}; want {', '.join(FIRST[:-1])} or {FIRST[-1]}"
        for name in _ORDERS:
            order = getattr(self, name)
            if not (isinstance(order, str) and _ORDER.fullmatch(order)):
                yield f"{name} is {order!r}; want breadth, depth, breadth:K or depth:K with K at least 1"
        for name in _LIMITS:
            limit = getattr(self, name)
            if limit is not None and not _are_counts((limit,)) and not _are_counts(limit):
                yield f"{name} is {limit!r}; want a whole number of at least 1, or one for each"
        if not (_are_counts(self.units) and len(self.units) == 2):
            yield f"units is {self.units!r}; want two whole numbers of at least 1: forwards, backwards"
        if not (isinstance(self.checks, tuple) and all(map(callable, self.checks))):
            yield f"checks is {self.checks!r}; want functions (view, action) -> bool"
        if self.choose is not None and not callable(self.choose):
            yield f"choose is {self.choose!r}; want a function (view, ready) -> Action or None"

    def stage_order(self, op: str) -> tuple[bool, int]:
        """Return whether the latest stage goes first among actions of ``op``, and how many of a stage go in a row (0: no
        matter)."""
        direction, _, interval = {FORWARD: self.forward, BACKWARD: self.backward}.get(op, "breadth").partition(":")
        return direction == "depth", int(interval or 0)

    def __str__(self) -> str:
        values = {name: getattr(self, name) for name in (*_ORDERS, *_LIMITS)}
        values |= {"checks": ",".join(map(name_of, self.checks)), "choose": self.choose and name_of(self.choose)}
        words = [f"{name.replace('_', '-')}={joined(value)}" for name, value in values.items() if value]
        return " ".join([self.first, joined(self.units), *words])

    @classmethod
    def parse(cls, text: str) -> Traversal:
        """Return the rules that ``str()`` printed: ``interleaved 1,1 forward=breadth:4 backward=depth:4
        in-flight=4,3,2,1``. All but the first word may be left out.

        Raises:
            ScheduleError: it can't be read; functions have only their names in a line.
        """
        first, *words = text.split() or [""]
        values: dict[str, Any] = {}
        rules = f"rules {text!r}"
        for word in words:
            key, equals, value = word.partition("=")
            name = key.replace("-", "_") if equals else "units"
            if name in ("checks", "choose"):
                raise ScheduleError(
                    f"{rules}: {word} is a function, which a line can't hold; name a file, FILE.py:NAME"
                )
            if name not in (*_ORDERS, *_LIMITS, "units"):
                hint = "known: forward= backward= in-flight= in-flight-per-stage= units="
                raise ScheduleError(f"{rules}: {key!r} is unknown; {hint}")
            if name in values:
                raise ScheduleError(f"{rules} give {name.replace('_', '-')} twice; keep one")
            values[name] = value if name in _ORDERS else tuple(map(_number, (value or word).split(",")))
        return cls(first, **values)


def name_of(function: Callable[..., Any]) -> str:
    """Return how a function is called in messages and in print."""
    return getattr(function, "__name__", None) or type(function).__name__


def joined(value: object) -> str:
    """Return ``4,3,2,1``, or the value itself."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _number(text: str) -> int | str:
    return int(text) if text.isdecimal() and text.isascii() and len(text) < 10 else text


def _are_counts(values: object) -> bool:
    return isinstance(values, tuple) and values != () and all(type(x) is int and x >= 1 for x in values)


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
