"""The rules of a schedule in one line: which type of action a free rank takes, of which stage, within which limits.

Source: FlexPipe (`flexpipe.txt`) section 4.2, table 2, section 5.2. :func:`~jaxpipe.schedule.rules.traverse.traverse`
makes schedules of these rules, and says how they are read.

:class:`Actions` holds every action of a placement as codes of the clock: any DAG of stages, groups of ranks and flows, and ops
as their specs say. What waits for what is read off the :func:`~jaxpipe.schedule.deps.build_graph` of a step with one microbatch
a flow. On a group an op that is joint is one action, and others run on each rank by themselves.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from math import lcm
from typing import Any, NamedTuple

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule.clock import Clock, Feed, Tables
from jaxpipe.schedule.costs import CostProfile
from jaxpipe.schedule.deps import build_graph
from jaxpipe.schedule.ir import Action, Schedule, op_spec, registered_ops
from jaxpipe.schedule.lanes import collectives_exposed
from jaxpipe.schedule.placement import Placement

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
        """F, BW and every other required op of ``placement``, with the seconds of ``costs``, TP collectives included.
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
