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

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_MOST_STATES = 100_000  # bounds memory and the seconds until the first bound
_NEVER = np.int16(-9999)
_NOTHING, _F, _B, _W = range(4)  # what a rank starts in a step
_NO_COPY, _O, _L = range(3)  # and its lane


class _State(NamedTuple):
    """At the start of a step. ``copy`` runs for ``left`` steps more; ``leaving``, ``back``, ``w``: how many wait for O, for B
    after L, for W; ``ripe``: of those that stay, how many may run B; bit j of ``ages``: one that stays started j + 1 steps
    ago."""

    copy: int = _NO_COPY
    left: int = 0
    leaving: int = 0
    back: int = 0
    w: int = 0
    ripe: int = 0
    ages: int = 0


class _Moves(NamedTuple):
    """From a state to a state in one step, with one thing that the lane does, ordered by where they lead; ``first``: of each of
    ``reached``, where its moves begin. ``does``: what the rank starts."""

    source: NDArray[np.int64]
    does: NDArray[np.int64]
    reached: NDArray[np.int64]
    first: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class HostSteps:
    """``count`` microbatches; steps of O and L (``back``), and ``trip`` from F's start to B's; ``room`` for activations."""

    o: int
    back: int
    trip: int
    room: int
    count: int

    def bounds(self, least: int, most: int, late: Callable[[int], bool]) -> Iterator[int]:
        """Numbers of steps that no schedule of the rank is below: better and better, from ``least`` (which is one) up to
        ``most``. ``late(n)`` is told of n moves that were looked at and says when to stop."""
        found = self._moves(late)
        if found is None:
            return
        moves, states = found
        size = sum(x.source.size for x in moves)
        tail = self.trip + 2  # an F in the last steps would end too late
        steps = max(0, least - tail)
        begun = np.full((states, 1), _NEVER)
        begun[0] = 0
        for step in range(steps):
            begun = self._stepped(moves, begun, step, most, True)
            if late(size * begun.shape[1]):
                return
        while least < most:
            end = begun
            for step in range(steps, least):
                end = self._stepped(moves, end, step, least, step <= least - tail)
                if late(size * end.shape[1]):
                    return
            if end[0, 0] >= self.count:
                return
            begun = self._stepped(moves, begun, steps, most, True)
            steps, least = steps + 1, least + 1
            yield least

    def _stepped(
        self, moves: Sequence[_Moves], begun: NDArray[np.int16], step: int, end: int, may_start: bool
    ) -> NDArray[np.int16]:
        """The most F's in each state (rows) after one more step, by number on the host: what has left by then and can come
        back before the ``end``."""
        away = min(begun.shape[1] - 1, (end - step) // self.back)
        after = np.full((len(begun), away + 2), _NEVER)
        gains = np.zeros(4, np.int16)
        gains[_F] = 1 if may_start else _NEVER
        gains[_B] = 0 if step >= self.trip else _NEVER
        for move, (old, new) in zip(moves, ((0, 0), (0, 1), (1, 0)), strict=True):
            if not move.source.size:
                continue
            found = begun[move.source, old : away + 1] + gains[move.does][:, None]
            best = np.maximum.reduceat(found, move.first, axis=0)
            into = slice(new, new + best.shape[1])
            after[move.reached, into] = np.maximum(after[move.reached, into], best)
        return np.maximum(after, _NEVER)

    def _moves(self, late: Callable[[int], bool]) -> tuple[list[_Moves], int] | None:
        """All moves between states that can be reached, by what the lane does, and how many states; None for too many."""
        number = {_State(): 0}
        states = [_State()]
        found: list[list[tuple[int, int, int]]] = [[], [], []]
        for i, state in enumerate(states):  # grows
            for does, copies, then in self._next(state):
                j = number.setdefault(then, len(states))
                if j == len(states):
                    states.append(then)
                found[copies].append((j, i, does))
            if len(states) > _MOST_STATES or (i % 1000 == 0 and late(200_000)):
                return None
        moves = []
        for some in found:
            ordered = np.array(sorted(some), np.int64).reshape(-1, 3)
            moves.append(_Moves(ordered[:, 1], ordered[:, 2], *np.unique(ordered[:, 0], return_index=True)))
        return moves, len(states)

    def _next(self, x: _State) -> Iterator[tuple[int, int, _State]]:
        """What may happen in a step: what the rank starts, what the lane does, and the state after it."""
        stay = x.ripe + x.ages.bit_count()
        lanes = [(_NO_COPY, x)]
        if not x.left and x.leaving:
            lanes.append((_O, x._replace(copy=_O, left=self.o, leaving=x.leaving - 1)))
        if not x.left and x.leaving + x.back + x.w + stay < self.room:
            lanes.append((_L, x._replace(copy=_L, left=self.back)))
        for copies, y in lanes:
            full = y.leaving + y.back + y.w + stay + (y.left > 0) >= self.room
            if not full:
                yield _F, copies, self._later(y._replace(leaving=y.leaving + 1))
                yield _F, copies, self._later(y, stays=True)
            if y.ripe:
                yield _B, copies, self._later(y._replace(ripe=y.ripe - 1, w=y.w + 1))
            if y.back:
                yield _B, copies, self._later(y._replace(back=y.back - 1, w=y.w + 1))
            if y.w:
                yield _W, copies, self._later(y._replace(w=y.w - 1))
            yield _NOTHING, copies, self._later(y)

    def _later(self, x: _State, stays: bool = False) -> _State:
        """The same at the end of the step; an F of this step may be one that ``stays``."""
        came = x.copy == _L and x.left == 1
        ages = x.ages << 1 | stays
        ripe = ages >> (self.trip - 1) & 1
        left = max(0, x.left - 1)
        return _State(
            x.copy if left else _NO_COPY,
            left,
            x.leaving,
            x.back + came,
            x.w,
            x.ripe + ripe,
            ages - (ripe << (self.trip - 1)),
        )
