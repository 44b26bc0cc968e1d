"""The best that the parked microbatches of a rank can do within windows, by dynamic programming over time.

They keep their order in all that they do, so that numbers of them tell where each is; that is why this is quick.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from jaxpipe.schedule.bounds.host_steps import NO_COPY, NOTHING, B, F, HostSteps, L, O, W

_MOST_LEAVING, _MOST_BACK, _MOST_W = 1, 1, 3  # that wait for O, B and W
_NEVER = np.int32(-(1 << 28))
_SHARES = 0.3, 0.7  # of a window's slack that is F's; the rest is B's
# Steps of a window that its F and its B may take each: with 16 rank 1 of p=8, p/4 never fits into 179, with all others fail.
_MOST_LOST = 24
_WEIGHTS = 2, 4  # of a step that a window leaves; drawn, so that each try finds something else
_CALLS = 2000  # moves of one step that take as long as calling NumPy for it

Values: TypeAlias = NDArray[np.int32]
"""By what the lane does (between steps: 0: nothing; j < o: O for j steps more; o - 1 + j: L for j more; within a step: 0:
nothing; j <= o: O for j steps from now; o + j: L for j), how many parked ones wait for O, for B after L, how many of all for W,
and F's and B's of parked ones that have started, beyond the least that must have."""


class _Op(NamedTuple):
    """What one does to these numbers."""

    does: int
    leaving: int = 0
    back: int = 0
    w: int = 0
    started: int = 0
    turned: int = 0


_NOTHING, _W = _Op(NOTHING), _Op(W, w=-1)
_F, _B = _Op(F, leaving=1, started=1), _Op(B, back=-1, w=1, turned=1)


class Parked:
    """A rank in ``steps``. ``windows``: of each parked microbatch, in order, the step from which its F may start, and the last
    in which its B may. ``straight``: the steps in which F's of those that stay start; their B's follow after the trip. F's get
    a part of each window and B's another, at random, so that B's come late enough. Early F's and late B's are worth most: they
    leave wide windows to the next rank."""

    def __init__(
        self,
        alone: HostSteps,
        steps: range,
        windows: Sequence[tuple[int, int]],
        straight: Collection[int],
        rng: random.Random,
    ) -> None:
        self.alone, self.steps, self.count = alone, steps, len(windows)
        self.come, self.due = ([x[i] for x in windows] for i in range(2))
        away, share = max(alone.trip, 1 + alone.o + alone.back), rng.uniform(*_SHARES)
        self.slack = [due - come - away for come, due in windows]
        last = [come + min(_MOST_LOST, int(share * slack)) for come, slack in zip(self.come, self.slack, strict=True)]
        last = list(accumulate(reversed(last), min))[::-1]  # step for each F
        turn = [max(at + away, due - _MOST_LOST) for at, due in zip(last, self.due, strict=True)]
        turn = list(accumulate(turn, max))  # the first step for each B
        # before each step, and after the last, F's and B's that have started: the least and the most
        every = range(steps.start, steps.stop + 1)
        self.least = [(bisect_left(last, step), bisect_left(self.due, step)) for step in every]
        self.most = [(bisect_left(self.come, step), bisect_left(turn, step)) for step in every]
        self.ops = {at: _Op(F) for at in straight} | {at + alone.trip: _Op(B, w=1) for at in straight}
        stay = np.zeros(len(steps), np.int64)
        for at in straight:
            stay[at + 1 - steps.start : at + 1 + alone.trip - steps.start] += 1
        self.free = np.maximum(alone.room - stay, 0).tolist()
        weights = np.array([[rng.randint(*_WEIGHTS) for _ in windows] + [0] for _ in range(2)], np.int32)
        self.worth_f, self.worth_b = weights
        leaving, back, w = np.indices((_MOST_LEAVING + 1, _MOST_BACK + 1, _MOST_W + 1))
        self.not_away, self.here = (leaving + back)[..., None, None], (leaving + back + w)[..., None, None]
        o, load = range(1, alone.o + 1), range(1, alone.back + 1)
        # by what the lane does within a step: what it does before with how many more leaving, and after with how many more back
        self.before = [(0, 0), *((j % alone.o, int(j == alone.o)) for j in o)]
        self.before += [((alone.o - 1 + j) * (j < alone.back), 0) for j in load]
        self.after = [(0, 0), *((j - 1, 0) for j in o), *(((alone.o - 2 + j) * (j > 1), int(j == 1)) for j in load)]
        copies = np.arange(len(self.before))[:, None, None, None, None, None] > 0
        self.room = [np.where(self.here + copies < free, np.int32(0), _NEVER) for free in range(alone.room + 1)]
        self.layers: list[Values] = []

    def dead(self, tell: Callable[[int], object]) -> int | None:
        """Solve it: the step after which nothing goes any more; None if all goes well. ``tell(n)`` is told of n moves that were
        looked at."""
        if min(self.slack, default=0) < 0:
            return self.come[self.slack.index(min(self.slack))]
        lanes = self.alone.o + self.alone.back - 1
        now = np.full((lanes, *self.here.shape[:3], *self._size(0)), _NEVER)
        now[:1, :1, :1, :1, :1, :1] = 0
        self.layers = [now]
        for n, step in enumerate(self.steps):
            self.layers.append(self._stepped(n))
            tell(_CALLS + self.layers[-1].size // 4)
            if self.layers[-1].max(initial=_NEVER) < 0:
                return step
        done = self.least[-1] == (self.count, self.count) and self.layers[-1][(0,) * 6] >= 0
        return None if done else self.steps[-1]

    def _size(self, n: int) -> tuple[int, ...]:
        """Numbers of F's and of B's that may have started before step number ``n``."""
        return tuple(max(0, b - a + 1) for a, b in zip(self.least[n], self.most[n], strict=True))

    def _within(self, n: int) -> Values:
        """What is in step number ``n`` once the lane has started."""
        now = self.layers[n]
        within = np.full((len(self.before), *now.shape[1:]), _NEVER)
        for lane, (index, leaving) in enumerate(self.before):
            within[lane, : _MOST_LEAVING + 1 - leaving] = now[index, leaving:]
        started, turned = (least + np.arange(x) for least, x in zip(self.least[n], self._size(n), strict=True))
        away = started[:, None] - turned - self.not_away
        within[-1] = np.where((self.here < self.free[n]) & (away > 0), within[-1], _NEVER)
        return within

    def _may_start(self, n: int) -> Iterator[tuple[_Op, Values]]:
        """What the rank may start in step number ``n``, and what that is worth by what there is within the step."""
        within, step = self._within(n), self.steps[n]
        op = self.ops.get(step)
        if op is not None:
            yield op, within + self.room[self.free[n]] if op.does == F else within
            return
        (a, c), (b, d) = self.least[n], self._size(n)
        yield _NOTHING, within
        yield _W, within
        yield _F, within + (self.room[self.free[n]] + self.worth_f[a : a + b, None] * (self.steps.stop - step))
        yield _B, within + self.worth_b[c : c + d] * (step - self.steps.start)

    def _stepped(self, n: int) -> Values:
        """The best after step number ``n``."""
        size = *self.here.shape[:3], *self._size(n + 1)
        then = np.full((len(self.after), *size), _NEVER)
        moved = np.subtract(self.least[n], self.least[n + 1])
        for op, values in self._may_start(n):
            by = (0, *op[1:4], *(moved + op[4:6]))
            ends = [(max(0, i), max(0, i, min(x, y + i))) for i, x, y in zip(by, then.shape, values.shape, strict=True)]
            into = tuple(slice(*x) for x in ends)
            out = tuple(slice(a - i, b - i) for (a, b), i in zip(ends, by, strict=True))
            then[into] = np.maximum(then[into], values[out])
        after = np.full((len(self.layers[0]), *size), _NEVER)
        for lane, (index, more) in enumerate(self.after):
            some = after[index, :, more:]
            np.maximum(some, then[lane, :, : _MOST_BACK + 1 - more], out=some)
        return after

    def starts(self) -> tuple[list[list[int]], list[list[int]]]:
        """The best after :meth:`dead` found one: of each op, and of each copy, the steps in which one starts."""
        ops: list[list[int]] = [[], [], [], []]
        copies: list[list[int]] = [[], [], []]
        at: tuple[int, ...] = (0,) * 6
        for n in reversed(range(len(self.steps))):
            op, (lane, *rest) = self._back(n, at)
            index, leaving = self.before[lane]
            starts = NO_COPY if index or not lane else O if leaving else L
            ops[op].append(self.steps[n])
            copies[starts].append(self.steps[n])
            at = (index, rest[0] + leaving, *rest[1:])
        return [x[::-1] for x in ops], [x[::-1] for x in copies]

    def _back(self, n: int, at: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        """What the rank starts in step number ``n`` on the best way to ``at``, and what there is within the step."""
        value = self.layers[n + 1][at]
        moved = np.subtract(self.least[n + 1], self.least[n])
        for op, values in self._may_start(n):
            for lane, (index, more) in enumerate(self.after):
                _, leaving, back, w, started, turned = at
                rest = leaving, back - more, w, started + int(moved[0]), turned + int(moved[1])
                within = (lane, *(x - by for x, by in zip(rest, op[1:6], strict=True)))
                inside = all(0 <= x < y for x, y in zip(within, values.shape, strict=True))
                if index == at[0] and inside and values[within] == value:
                    return op.does, within
        raise AssertionError(f"no way to {at} after step {n}")
