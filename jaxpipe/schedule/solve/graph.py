"""Orders of any graph of stages: DAGs, stages shared by ranks, several flows, spans, ops of the user's own.

The other engines know chains of stages, F, B, W and offload. Here what waits for what, what an action takes and what it holds
are read off a schedule by the rules of the simulator (:mod:`~jaxpipe.schedule.deps`, :mod:`~jaxpipe.schedule.memory`), so that
whatever can be simulated can be searched, but for copies to the host and braided slots. Its actions stay, their order changes.

One CP-SAT model, a variable for the start of each action, in three treatments: what starts before the neighbourhood is *fixed*,
what starts inside is *free* on the chosen ranks and in order on the others, what starts after *moves* as one piece, earlier by
a shift that is maximised. With everything free it is the exact model: its bound is that of all orders of these actions.
Microbatches of a stage keep their order in each op, which excludes no best schedule (the argument of :mod:`.model`). Not
modelled: links that are busy. Every order is simulated by whoever gets it.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any

from jaxpipe.errors import ScheduleError
from jaxpipe.schedule.costs import CostProfile
from jaxpipe.schedule.deps import build_graph
from jaxpipe.schedule.ir import Action, Schedule, op_spec
from jaxpipe.schedule.list_schedule.traversal import FIRST, Traversal
from jaxpipe.schedule.list_schedule.traverse import traverse
from jaxpipe.schedule.memory import UNIT, activation_units, rank_share
from jaxpipe.schedule.passes.backwards import split_backwards
from jaxpipe.schedule.passes.separate import separate_gradients
from jaxpipe.schedule.simulate import simulate
from jaxpipe.schedule.solve.cp_sat import LITE, WHOLE_RESERVOIRS, run
from jaxpipe.schedule.solve.search import Budget, some_neighbours, some_stretch
from jaxpipe.schedule.solve.task import SolveTask
from jaxpipe.schedule.solve.ticks import COARSE, FINE, time_grid
from jaxpipe.schedule.tolerance import MEMORY, at_most, nine_digits

_PARTS = 1 << 20  # of a unit of activation
_EDGE = 0.15  # of neighbourhoods are at the start, and as many at the end
_PULL_EARLY = 0.3  # of neighbourhoods prefer early starts among equals
_SEPARATED = 6  # of the schedules by rules; not tuned
_SIZES = 50.0, 240.0, 3000.0  # actions of a neighbourhood: fewest, at first, most

Rows = tuple[tuple[int, ...], ...]
"""Slots by rank, in order."""


def graph_starts(task: SolveTask) -> Iterator[tuple[Schedule, str]]:
    """Schedules by rules, the surest to keep the limits first; then the shortest of them with backwards separated.

    Raises:
        ScheduleError: the costs are for another number of stages.
    """
    found: list[tuple[bool, float, int, Schedule, str]] = []
    rules = (
        Traversal(first, forward=forward, backward=backward, **room)
        for room in _rooms(task)
        for first, forward, backward in product(reversed(FIRST), ("depth", "breadth"), ("depth", "breadth"))
    )
    for rule in rules:
        with suppress(ScheduleError):  # the limits of one stage or another leave no room
            schedule = traverse(task.placement, task.num_microbatches, rule, task.costs)
            timeline = simulate(schedule, task.costs)
            found.append((not task.fits(timeline), task.seconds(timeline), len(found), schedule, f"rules {rule}"))
            yield schedule, f"rules {rule}"
    for *_, schedule, name in sorted(found)[:_SEPARATED]:
        with suppress(ScheduleError):
            yield separate_gradients(schedule, task.costs, memory_limit=task.memory_limit), f"{name}, separated"


def _rooms(task: SolveTask) -> Iterator[dict[str, Any]]:
    """Limits on microbatches in flight: one at a time; for each stage what lies behind it, as in 1F1B; for each stage, and for
    each rank, what the limits allow. A stage that holds nothing has no limit."""
    placement, m = task.placement, task.num_microbatches
    most = [max(1, int(min(m, limit * (1 + MEMORY)))) for limit in task.limits()]
    behind: dict[int, int] = {}
    for s in reversed(placement.topological_order()):
        behind[s] = (task.costs.residual_bytes[s] > 0) + max((behind[t] for t in placement.successors(s)), default=0)
    flows = placement.num_flows  # a limit of a stage holds in each
    room = [
        max(1, min(most[r] for flow in placement.flows for r in flow[s]) // flows) for s in range(placement.num_stages)
    ]
    chunks = [len(placement.stages_of(rank)) for rank in range(placement.num_ranks)]
    holds = [x > 0 for x in task.costs.residual_bytes]
    yield {"in_flight": tuple(chunks)}
    yield {"in_flight_per_stage": tuple(max(1, min(x, behind[s])) if holds[s] else m for s, x in enumerate(room))}
    yield {"in_flight_per_stage": tuple(x if holds[s] else m for s, x in enumerate(room))}
    yield {"in_flight": tuple(n * x for n, x in zip(chunks, most, strict=True))}


@dataclass(frozen=True, slots=True)
class Slots:
    """The actions of a schedule, in any order. Ticks: ``size`` of each, ``waits[n]`` as (slot, ticks after its end).

    ``rank``: where each is. ``joint``: a number that those share which start together. ``change``: units of memory taken at
    the start and at the end, on the rank's own scale. ``limit``: units a rank may hold. ``kind``: equal for the microbatches
    of one op, stage, flow and rank.
    """

    actions: tuple[Action, ...]
    rank: tuple[int, ...]
    size: tuple[int, ...]
    waits: tuple[tuple[tuple[int, int], ...], ...]
    joint: tuple[int, ...]
    change: tuple[tuple[int, int], ...]
    limit: tuple[int, ...]
    kind: tuple[tuple[Any, ...], ...]
    step_s: float
    exact: bool

    @classmethod
    def of(cls, schedule: Schedule, costs: CostProfile, limits: Sequence[float], parts: int) -> Slots:
        """``limits``: activations by rank, in units of its share of a microbatch; ``parts`` of a mean duration to a tick where
        costs have no common step.

        Raises:
            ScheduleError: a slot is braided or runs on a host lane, or costs are too uneven for a grid.
        """
        graph, placement = build_graph(schedule), schedule.placement
        actions = tuple(slot for slot in graph.slots if type(slot) is Action and op_spec(slot.op).lane == "compute")
        if len(actions) < len(graph.slots):
            raise ScheduleError("only plain actions on compute lanes are searched on graphs of stages")
        first = len(actions)
        seconds = [costs.seconds(op_spec(a.op).cost, a.stage) for a in actions]
        moved = [transfer.seconds(costs) for transfer in graph.transfers]
        ticks = time_grid([*seconds, *moved], 2 * (sum(seconds) + sum(moved)), parts)
        lags = [ticks.of(x) for x in moved]

        def wait(x: int) -> tuple[int, int]:
            return graph.source(x), lags[x - first] if x >= first else 0

        flows, whole = placement.num_flows, UNIT / _PARTS

        def units(n: int) -> tuple[int, int]:
            a, r = actions[n], graph.rank_of[n]
            taken = activation_units(costs, a.op, a.stage, rank_share(placement, costs, r, a.microbatch % flows))
            start, end = (-int(-x // whole) for x in taken)
            return start, end

        room = [int(min(x, schedule.num_microbatches + 1.0) * _PARTS * (1 + MEMORY)) for x in limits]
        return cls(
            actions,
            tuple(graph.rank_of),
            tuple(ticks.of(x) for x in seconds),
            tuple(tuple(wait(x) for x in waits) for waits in graph.waits),
            tuple(graph.joints[graph.joint_of[n]][0] if n in graph.joint_of else n for n in range(first)),
            tuple(units(n) for n in range(first)),
            tuple(room),
            tuple((a.op, a.stage, a.microbatch % flows, r) for a, r in zip(actions, graph.rank_of, strict=True)),
            ticks.step_s,
            ticks.exact,
        )

    def starts(self, rows: Rows) -> list[int] | None:
        """Ticks at which each slot starts if its rank runs this row; None if they wait for one another."""
        at, before = [-1] * len(self.actions), [-1] * len(self.actions)
        for row in rows:
            for a, b in pairwise(row):
                before[b] = a
        members: dict[int, list[int]] = defaultdict(list)
        for n, joint in enumerate(self.joint):
            members[joint].append(n)
        heads = [0] * len(rows)
        active = set(range(len(rows)))
        while active:
            rank = active.pop()
            while heads[rank] < len(rows[rank]):
                group = members[self.joint[rows[rank][heads[rank]]]]
                fronts = (rows[self.rank[n]][heads[self.rank[n]] :][:1] == (n,) for n in group)
                if not all(fronts) or any(at[x] < 0 for n in group for x, _ in self.waits[n]):
                    break
                ready = [at[x] + self.size[x] + lag for n in group for x, lag in self.waits[n]]
                ready += [at[before[n]] + self.size[before[n]] for n in group if before[n] >= 0]
                for n in group:
                    at[n] = max(ready, default=0)
                    heads[self.rank[n]] += 1
                active.update(range(len(rows)))
        return at if min(at, default=0) >= 0 else None


@dataclass(frozen=True, slots=True)
class _Window:
    """What starts in ``begin <= t < end`` (ticks) on ``ranks`` is free."""

    begin: int
    end: int
    ranks: frozenset[int]


class _Model:
    """CP-SAT's variables for one neighbourhood of an order; ``solve`` proposes rows."""

    def __init__(
        self, slots: Slots, rows: Rows, starts: Sequence[int], window: _Window, by_span: bool, early: bool
    ) -> None:
        from ortools.sat.python import cp_model

        self.slots, self.starts, self.window, self.rows = slots, starts, window, rows
        self.cp: Any = cp_model.CpModel()
        where = [0 if t < window.begin else 1 if t < window.end else 2 for t in starts]
        self.parts = [[[n for n in row if where[n] == part] for part in range(3)] for row in rows]
        self.inside = {n for n, part in enumerate(where) if part == 1}
        self.late = {n for n, part in enumerate(where) if part == 2}
        self.last = window.end + max((slots.size[n] for n in self.inside), default=0)
        self.shift = self.cp.new_int_var(0, max(0, window.end - window.begin) if self.late else 0, "shift")
        heads = {slots.joint[n]: self.cp.new_int_var(window.begin, self.last, "") for n in sorted(self.inside)}
        self.at = {n: heads[slots.joint[n]] for n in self.inside}
        self.heads = heads
        self._order()
        self._memory()
        self._objective(by_span, early)

    def begins(self, n: int) -> Any:
        return self.at[n] if n in self.at else self.starts[n] - self.shift if n in self.late else self.starts[n]

    def ends(self, n: int) -> Any:
        return self.begins(n) + self.slots.size[n]

    def _order(self) -> None:
        cp, slots = self.cp, self.slots
        for n, waits in enumerate(slots.waits):
            for x, lag in waits:
                moves = n in self.inside or x in self.inside or (n in self.late and x not in self.late)
                if moves and not (
                    x not in self.inside
                    and n in self.inside
                    and self.starts[x] + slots.size[x] + lag <= self.window.begin
                ):
                    cp.add(self.begins(n) >= self.ends(x) + lag)
        for rank, (before, middle, late) in enumerate(self.parts):
            for n in middle if before else ():
                cp.add(self.at[n] >= self.ends(before[-1]))
            if late:
                for x in middle or before[-1:]:
                    cp.add(self.begins(late[0]) >= self.ends(x))
            if rank in self.window.ranks and len(middle) > 1:
                cp.add_no_overlap([cp.new_fixed_size_interval_var(self.at[n], slots.size[n], "") for n in middle])
                alike: dict[Any, int] = {}
                for n in sorted(middle, key=lambda n: slots.actions[n].microbatch):
                    if slots.kind[n] in alike:
                        cp.add(self.at[n] >= self.ends(alike[slots.kind[n]]))
                    alike[slots.kind[n]] = n
            else:
                for a, b in pairwise(middle):
                    cp.add(self.at[b] >= self.ends(a))

    def _memory(self) -> None:
        for rank in self.window.ranks:
            before, middle, _ = self.parts[rank]
            changes = [(self.window.begin, sum(sum(self.slots.change[n]) for n in before))]
            for n in before[-1:]:  # what it gives back when it ends, inside
                over, given = self.starts[n] + self.slots.size[n], self.slots.change[n][1]
                if over > self.window.begin:
                    changes += [(self.window.begin, -given), (over, given)]
            for n in middle:
                start, end = self.slots.change[n]
                changes += [(self.begins(n), start), (self.ends(n), end)]
            changes = [(t, x) for t, x in changes if x]
            limit = self.slots.limit[rank]
            if sum(x for _, x in changes if x > 0) > limit:
                self.cp.add_reservoir_constraint([t for t, _ in changes], [x for _, x in changes], -limit * 2, limit)

    def _objective(self, by_span: bool, early: bool) -> None:
        cp = self.cp
        total = sum(self.heads.values()) if early else 0
        weight = len(self.heads) * (self.last - self.window.begin + 1) + 1 if early else 1
        if self.late and not by_span:
            cp.maximize(self.shift * weight - total)
            return
        self.cost = cp.new_int_var(0, 1 << 40, "cost")
        for before, middle, late in self.parts:
            every = [*before, *middle, *late]
            if not every:
                continue
            first: Any = 0
            if by_span:
                first = self.starts[before[0]] if before else self.begins(late[0]) if not middle else None
                if first is None:
                    first = cp.new_int_var(self.window.begin, self.last, "")
                    for n in middle:
                        cp.add(first <= self.at[n])
            for n in late[-1:] or middle or before[-1:]:
                cp.add(self.cost >= self.ends(n) - first)
        cp.minimize(self.cost * weight + total - (self.shift if self.late else 0))

    def solve(self, budget: dict[str, Any], *more: dict[str, Any]) -> tuple[Rows | None, bool, float]:
        """Proposed rows, None if nothing was found; whether the search came to its end; and the bound of what is minimised."""
        for joint, at in self.heads.items():
            self.cp.add_hint(at, self.starts[joint])
        self.cp.add_hint(self.shift, 0)
        solver, found, done = run(self.cp, WHOLE_RESERVOIRS, budget, *more)
        if not found:
            return None, done, 0.0
        at = {n: solver.value(x) for n, x in self.at.items()}
        placed = ([*b, *sorted(m, key=lambda n: (at[n], self.starts[n], n)), *e] for b, m, e in self.parts)
        return tuple(map(tuple, placed)), done, solver.best_objective_bound


class GraphSearch:
    """The search from one schedule for a task; see the module."""

    def __init__(self, task: SolveTask, start: Schedule, seed: int, parts: int = COARSE) -> None:
        self.task, self.start, self.seed = task, start, seed
        self.slots = Slots.of(start, task.costs, task.safe_limits(), parts)
        self.random = random.Random(seed)
        self.size, self.tried = _SIZES[1], 0
        self.by_span = task.objective == "span"
        numbers = iter(range(len(self.slots.actions)))
        self.first: Rows = tuple(tuple(next(numbers) for _ in row) for row in start.rows)

    def schedule(self, rows: Rows) -> Schedule:
        return replace(self.start, name="solved", rows=tuple(tuple(self.slots.actions[n] for n in row) for row in rows))

    def run(self, budget: Budget, bound_s: float) -> Iterator[Schedule]:
        """Better and better schedules until the budget ends or the bound is met. Equal orders replace the one at hand."""
        rows, starts = self.first, self.slots.starts(self.first)
        best = self._merit(self.start)
        if starts is None or best is None:
            return
        current = self._ticks(rows, starts)
        while budget.left > 0 and not at_most(best[0], bound_s):
            self.tried += 1
            model = _Model(
                self.slots, rows, starts, self._window(rows, starts), self.by_span, self.random.random() < _PULL_EARLY
            )
            proposed, done, _ = model.solve(budget.parameters(2.0, self.seed + self.tried), dict(LITE))
            self.size = min(_SIZES[2], self.size * 1.15) if done else max(_SIZES[0], self.size * 0.9)
            again = None if proposed is None else self.slots.starts(proposed)
            if proposed is None or again is None or (found := self._ticks(proposed, again)) > current:
                continue
            better = found[:2] < current[:2]
            rows, starts, current = proposed, again, found
            if better and (merit := self._merit(made := self.schedule(rows))) is not None and merit < best:
                best = merit
                yield made

    def exact(self, budget: Budget, workers: int) -> tuple[Schedule | None, float]:
        """With everything free: a schedule, and the seconds that no order of these actions is below (0: none is known)."""
        starts = self.slots.starts(self.first)
        if starts is None:
            return None, 0.0
        end = max(t + s for t, s in zip(starts, self.slots.size, strict=True))
        window = _Window(0, end + 1, frozenset(range(len(self.first))))
        model = _Model(self.slots, self.first, starts, window, self.by_span, early=False)
        more = {"num_workers": workers, "interleave_search": budget.reproducible}
        rows, _, bound = model.solve(budget.parameters(budget.left, self.seed), more)
        ticks = max(0.0, bound if self.slots.exact or not self.by_span else bound - 1)
        return None if rows is None else self.schedule(rows), ticks * self.slots.step_s

    def _merit(self, schedule: Schedule) -> tuple[float, float] | None:
        """The objective and the other time, simulated; None if it breaks a limit."""
        timeline = simulate(schedule, self.task.costs)
        if not self.task.fits(timeline):
            return None
        times = nine_digits(timeline.makespan), nine_digits(timeline.max_span)
        return times[::-1] if self.by_span else times

    def _ticks(self, rows: Rows, starts: Sequence[int]) -> tuple[int, int, int]:
        """The objective, the other time, and the sum of starts, by which neighbourhoods make progress on plateaus."""
        ends = [starts[row[-1]] + self.slots.size[row[-1]] if row else 0 for row in rows]
        spans = [end - starts[row[0]] if row else 0 for row, end in zip(rows, ends, strict=True)]
        times = max(ends), max(spans)
        return (*(times[::-1] if self.by_span else times), sum(starts))

    def _window(self, rows: Rows, starts: Sequence[int]) -> _Window:
        """About ``size`` actions in a row on all ranks or on some neighbours; often at the start or the end."""
        rng, ranks = self.random, range(len(rows))
        if len(rows) > 4 and rng.random() < 0.5:
            ranks = some_neighbours(rng, len(rows))
        order = sorted(starts[n] for rank in ranks for n in rows[rank])
        begin, end = some_stretch(rng, order, int(self.size * rng.uniform(0.7, 1.2)), _EDGE)
        return _Window(begin, end, frozenset(ranks))


def split_is_free(costs: CostProfile) -> bool:
    """Whether B and W apart take no longer than BW on any stage: then what is proven of split orders holds for all."""
    return all(at_most(b + w, bw) for b, w, bw in zip(costs.b_s, costs.w_s, costs.bw_s, strict=True))


def exact_search(task: SolveTask, start: Schedule, seed: int) -> tuple[GraphSearch, bool]:
    """The search over all orders of ``start``'s actions, with backwards split where that is free, and whether its bound holds
    for every schedule of the task."""
    free = split_is_free(task.costs)
    return GraphSearch(task, split_backwards(start) if free else start, seed, FINE), free
