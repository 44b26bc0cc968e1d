"""The first rank of a chain alone, with as much parked on the host for as long as possible: what the other ranks have room for
depends on it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from math import comb

import numpy as np

from jaxpipe.schedule.bounds.host_steps import (
    NEVER,
    NO_COPY,
    B,
    Counts,
    F,
    HostSteps,
    L,
    O,
    State,
    W,
    size_of,
    start,
)
from jaxpipe.schedule.rank_by_rank.chain import Chain, Times

_MORE_AWAY = 8  # at most on the host, beside what leaves within a trip; with more, fewer F's find room
_MOST_NUMBERS = 200_000_000  # that are kept: bounds memory, two or four bytes each
_WORTHS = (2, 4, 8, 16, 32, 64, 128, 256, 512)  # of an F, in steps on the host
_LEAST_WORTH = 2  # part of the trip
_WAITING = [sum(x) for x in product(range(2), range(2), range(2), range(3))]  # for O, for B after L or a trip, for W


def _states(alone: HostSteps, every: int) -> int:
    """How many there may be in a step, roughly: which stay, what waits, and what the lane does."""
    ages = alone.trip // max(2, every)
    some = (comb(ages, n) * sum(n + x <= alone.room for x in _WAITING) for n in range(ages + 1))
    return (alone.o + alone.back - 1) * sum(some)


class FirstRank:
    """Schedules of the first rank of ``chain`` in fewer than ``most`` steps, in which few microbatches wait for anything. What
    stays, and goes straight down and back, meets nothing on its way. Where these are too many states, microbatches that stay
    may start only in every second step, every fourth, ...

    ``late(n)`` is told of n moves that were looked at and says when to stop.
    """

    def __init__(self, chain: Chain, most: int, late: Callable[[int], bool]) -> None:
        alone, every = chain.ranks[0].alone, 1
        self.chain, self.late, self.end, self.layers = chain, late, 0, list[Counts]()
        self.most_away, self.worth, self.least_worth = alone.trip // alone.o + _MORE_AWAY, 0, alone.trip // _LEAST_WORTH
        while every < alone.trip and _states(alone, every) * self.most_away * most > _MOST_NUMBERS:
            every += 2 - every % 2
        self.steps = replace(alone, apart=chain.crossings(0), every=every, few=True)
        self.graph = self.steps.graph(late, every * _MOST_NUMBERS // (self.most_away * most)) or []

    def solved(self, end: int) -> bool:
        """Whether there is a schedule of ``end`` steps. Among those with all microbatches, or a few more, of which some are
        left out, those with most steps on the host."""
        self.end = end
        for worth in (x for x in _WORTHS if x >= self.least_worth and self.graph):
            if not self._solve(worth):
                return False
            if self.layers[-1][0, 0] >= 0:
                begun = sum(does == F for *_, does in self._path(random.Random(0)))
                if begun >= self.chain.count:
                    self.least_worth = worth  # fewer steps need no less
                    return True
        return False

    def _solve(self, worth: int) -> bool:
        """What each state is worth after each step; whether there was time."""
        size, self.worth = size_of(self.graph), worth
        most = worth * (self.end // 3) + self.most_away * self.end
        self.layers = [start(self.graph, np.int16 if most <= np.iinfo(np.int16).max else np.int32)]
        for step in range(self.end):
            now = self.steps.stepped(self.graph, self.layers[-1], step, self.end, self._may_start(step), worth)
            now = now[:, : self.most_away]
            now = np.where(now >= 0, now + np.arange(now.shape[1], dtype=now.dtype), now.dtype.type(NEVER))
            self.layers.append(now)
            if self.late(size * now.shape[1]):
                return False
        return True

    def _may_start(self, step: int) -> bool:
        return step <= self.end - self.steps.trip - 2

    def times(self, rng: random.Random) -> Times | None:
        """One of them at random; None where it has too few microbatches, or one turns back before its trip is over."""
        steps, ops = self.steps, self._path(rng)
        forward, backward, weight, out, back = (dict[int, int]() for _ in range(5))
        leaving, away, loaded, stay, waiting = (list[int]() for _ in range(5))
        for step, (before, after, lane, does) in enumerate(ops):
            copy, left = {O: (O, steps.o), L: (L, steps.back)}.get(lane, (before.copy, before.left))
            came = copy == L and left == 1
            if lane == O:
                out[leaving[0]] = step
                away.append(leaving.pop(0))
            if lane == L:
                back[away[0]] = step
                loaded.append(away.pop(0))
            if does == F:
                i = len(forward)
                forward[i] = step
                (stay if after.ages & 1 else leaving).append(i)
            elif does == B:
                i = (loaded if after.back < before.back + came else stay).pop(0)
                backward[i] = step
                waiting.append(i)
            elif does == W:
                weight[waiting.pop(0)] = step
        if len(forward) < self.chain.count or any(backward[i] < forward[i] + steps.trip for i in forward):
            return None
        kept = sorted(rng.sample(sorted(forward), self.chain.count))
        first = forward[kept[0]]
        found = [
            {n: x[i] - first for n, i in enumerate(kept) if i in x} for x in (forward, backward, weight, out, back)
        ]
        return Times.of(*found)

    def _path(self, rng: random.Random) -> list[tuple[State, State, int, int]]:
        """The states before and after each step, what the lane starts in it and what the rank does."""
        path, number, away, value = list[tuple[State, State, int, int]](), 0, 0, int(self.layers[-1][0, 0])
        for step in reversed(range(self.end)):
            layer, value, ways = self.layers[step], value - away, list[tuple[int, int, int, int]]()
            phase, then = (self.graph[x % len(self.graph)] for x in (step, step + 1))
            for lane, less in ((NO_COPY, 0), (O, 1), (L, -1)):
                move, there = phase.moves[lane], away - less
                at = np.searchsorted(move.reached, number)
                if not 0 <= there < layer.shape[1] or at == move.reached.size or move.reached[at] != number:
                    continue
                last = move.first[at + 1] if at + 1 < move.first.size else move.source.size
                for source, does in zip(
                    move.source[move.first[at] : last], move.does[move.first[at] : last], strict=True
                ):
                    gain = self.worth if does == F else 0
                    early = (does == B and step < self.steps.trip) or (does == F and not self._may_start(step))
                    if not early and layer[source, there] == value - gain >= 0:
                        ways.append((int(source), there, lane, int(does)))
            source, away, lane, does = rng.choice(ways)
            path.append((phase.states[source], then.states[number], lane, does))
            number, value = source, value - (self.worth if does == F else 0)
        return path[::-1]
