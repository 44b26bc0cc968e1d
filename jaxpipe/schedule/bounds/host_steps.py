"""One rank of a chain and its host lane by dynamic programming over time, where F, B and W take equally long: a step.

As in :mod:`~jaxpipe.schedule.bounds.host_orders` all other ranks only take time. All starts are whole steps, if copies and
trips are; else those are rounded down, which only makes the bound lower. What a rank holds is told by what becomes of it: it
stays for its trip, so its age counts; it waits to leave; it came back; it waits for W. Of what is on the host only the number
is known, not when its B may start; that makes the bound lower, too.

Which microbatch is meant does not matter, so a state is what a rank holds, and what is best in it is the most F's until then,
for each number on the host. Where the orders of ``host_orders.py`` come to no end, this takes seconds. Ages of many that stay
are too many states; then there is no bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

_MOST_STATES = 100_000  # bounds memory and the seconds until the first bound
NEVER = -9999
Number: TypeAlias = np.int16 | np.int32
Counts: TypeAlias = NDArray[Number]
NOTHING, F, B, W = range(4)  # what a rank starts in a step
NO_COPY, O, L = range(3)  # noqa: E741  # and its lane


class State(NamedTuple):
    """At the start of a step. ``copy`` runs for ``left`` steps more; ``leaving``, ``back``, ``w``: how many wait for O, for B
    after L, for W; ``ripe``: of those that stay, how many may run B; bit j of ``ages``: one that stays started j + 1 steps
    ago."""

    copy: int = NO_COPY
    left: int = 0
    leaving: int = 0
    back: int = 0
    w: int = 0
    ripe: int = 0
    ages: int = 0


class Moves(NamedTuple):
    """From a state to a state in one step, with one thing that the lane does, ordered by where they lead; ``first``: of each of
    ``reached``, where its moves begin. ``does``: what the rank starts."""

    source: NDArray[np.int64]
    does: NDArray[np.int64]
    reached: NDArray[np.int64]
    first: NDArray[np.int64]


class Phase(NamedTuple):
    """What a rank may hold at the start of steps that ``every`` divides with one remainder, and the moves in them, by what the
    lane does."""

    states: list[State]
    moves: list[Moves]


Graph: TypeAlias = list[Phase]


def start(graph: Graph, kind: type[Number] = np.int16) -> Counts:
    """What is known of the states before the first step."""
    begun = np.full((len(graph[0].states), 1), kind(NEVER))
    begun[0] = 0
    return begun


def size_of(graph: Graph) -> int:
    """Moves in a step, on average."""
    return sum(lane.source.size for phase in graph for lane in phase.moves) // len(graph)


def _moves(found: list[tuple[int, int, int]]) -> Moves:
    ordered = np.array(sorted(found), np.int64).reshape(-1, 3)
    return Moves(ordered[:, 1], ordered[:, 2], *np.unique(ordered[:, 0], return_index=True))


@dataclass(frozen=True, slots=True)
class HostSteps:
    """``count`` microbatches; steps of O and L (``back``), and ``trip`` from F's start to B's; ``room`` for activations.

    For who searches schedules, not bounds: bit j of ``apart``: no two that stay may start j + 1 steps apart; those that stay
    start only in steps that ``every`` divides; ``few``: at most two wait for W, and one for O and for B, after L and after a
    trip.
    """

    o: int
    back: int
    trip: int
    room: int
    count: int
    apart: int = 0
    every: int = 1
    few: bool = False

    def bounds(self, least: int, most: int, late: Callable[[int], bool]) -> Iterator[int]:
        """Numbers of steps that no schedule of the rank is below: better and better, from ``least`` (which is one) up to
        ``most``. ``late(n)`` is told of n moves that were looked at and says when to stop."""
        graph = self.graph(late)
        if graph is None:
            return
        size = size_of(graph)
        tail = self.trip + 2  # an F in the last steps would end too late
        steps = max(0, least - tail)
        begun = start(graph)
        for step in range(steps):
            begun = self.stepped(graph, begun, step, most, True)
            if late(size * begun.shape[1]):
                return
        while least < most:
            end = begun
            for step in range(steps, least):
                end = self.stepped(graph, end, step, least, step <= least - tail)
                if late(size * end.shape[1]):
                    return
            if end[0, 0] >= self.count:
                return
            begun = self.stepped(graph, begun, steps, most, True)
            steps, least = steps + 1, least + 1
            yield least

    def stepped(self, graph: Graph, begun: Counts, step: int, end: int, may_start: bool, worth: int = 1) -> Counts:
        """The most F's in each state (rows) after one more step, by number on the host: what has left by then and can come
        back before the ``end``. ``worth``: of an F."""
        kind = begun.dtype.type
        never = kind(NEVER)
        away = min(begun.shape[1] - 1, (end - step) // self.back)
        most = min(away + 1, step // self.o + 1)  # on the host after the step
        after = np.full((len(graph[(step + 1) % self.every].states), most + 1), never)
        gains = np.zeros(4, kind)
        gains[F] = worth if may_start else never
        gains[B] = 0 if step >= self.trip else never
        for move, (old, new) in zip(graph[step % self.every].moves, ((0, 0), (0, 1), (1, 0)), strict=True):
            if not move.source.size:
                continue
            found = begun[move.source, old : away + 1] + gains[move.does][:, None]
            best = np.maximum.reduceat(found, move.first, axis=0)
            into = after[move.reached, new : new + best.shape[1]]
            after[move.reached, new : new + best.shape[1]] = np.maximum(into, best[:, : into.shape[1]])
        return np.maximum(after, never)

    def graph(self, late: Callable[[int], bool], most: int = _MOST_STATES) -> Graph | None:
        """All states that can be reached and the moves between them, of ``every`` steps; None for more than ``most``."""
        phases = range(self.every)
        states = [[State()] for _ in phases]
        numbers = [{State(): 0} for _ in phases]
        found: list[list[list[tuple[int, int, int]]]] = [[[], [], []] for _ in phases]
        queue = [(phase, 0) for phase in phases]
        for n, (phase, i) in enumerate(queue):  # grows
            after = (phase + 1) % self.every
            for does, copies, then in self._next(states[phase][i], phase == 0):
                j = numbers[after].setdefault(then, len(states[after]))
                if j == len(states[after]):
                    states[after].append(then)
                    queue.append((after, j))
                found[phase][copies].append((j, i, does))
            if len(queue) > most or (n % 1000 == 0 and late(200_000)):
                return None
        return [Phase(some, [_moves(x) for x in lanes]) for some, lanes in zip(states, found, strict=True)]

    def _next(self, x: State, may_stay: bool) -> Iterator[tuple[int, int, State]]:
        """What may happen in a step: what the rank starts, what the lane does, and the state after it."""
        stay = x.ripe + x.ages.bit_count()
        lanes = [(NO_COPY, x)]
        if not x.left and x.leaving:
            lanes.append((O, x._replace(copy=O, left=self.o, leaving=x.leaving - 1)))
        if not x.left and x.leaving + x.back + x.w + stay < self.room:
            lanes.append((L, x._replace(copy=L, left=self.back)))
        for copies, y in lanes:
            for does, then in self._does(y, may_stay and not x.ages & self.apart):
                if not self.few or max(then.leaving, then.back, then.ripe, then.w - 1) <= 1:
                    yield does, copies, then

    def _does(self, y: State, may_stay: bool) -> Iterator[tuple[int, State]]:
        """What the rank may start once the lane has started what it does, and the state after the step."""
        if y.ripe:
            yield B, self._later(y._replace(ripe=y.ripe - 1, w=y.w + 1))
        if y.leaving + y.back + y.w + y.ripe + y.ages.bit_count() + (y.left > 0) < self.room:
            yield F, self._later(y._replace(leaving=y.leaving + 1))
            if may_stay:
                yield F, self._later(y, stays=True)
        if y.back:
            yield B, self._later(y._replace(back=y.back - 1, w=y.w + 1))
        if y.w:
            yield W, self._later(y._replace(w=y.w - 1))
        yield NOTHING, self._later(y)

    def _later(self, x: State, stays: bool = False) -> State:
        """The same at the end of the step; an F of this step may be one that ``stays``."""
        came = x.copy == L and x.left == 1
        ages = x.ages << 1 | stays
        ripe = ages >> (self.trip - 1) & 1
        left = max(0, x.left - 1)
        return State(
            x.copy if left else NO_COPY,
            left,
            x.leaving,
            x.back + came,
            x.w,
            x.ripe + ripe,
            ages - (ripe << (self.trip - 1)),
        )
