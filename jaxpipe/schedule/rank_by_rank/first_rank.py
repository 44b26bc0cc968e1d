"""The first rank of a chain alone, with as much parked on the host for as long as possible: what the other ranks have room for
depends on it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from jaxpipe.schedule.bounds.host_steps import NEVER, NO_COPY, B, Counts, F, Graph, L, O, State, W, start
from jaxpipe.schedule.rank_by_rank.chain import Chain, Times

_MORE_AWAY = 8  # at most on the host, beside what leaves within a trip; with more, fewer F's find room
_MOST_NUMBERS = 150_000_000  # that are kept: bounds memory, two bytes each
_WORTHS = (4, 8, 16, 32, 64, 128, 256)  # of an F, in steps on the host


def first_graph(chain: Chain, late: Callable[[int], bool]) -> Graph | None:
    """What the first rank may do, whatever the goal; None for too many states. What stays meets nothing on its way."""
    return replace(chain.ranks[0].alone, apart=chain.crossings(0)).graph(late)


class FirstRank:
    """Its schedules of ``end`` steps, by what :func:`first_graph` gave; ``found`` says whether there are any and few enough
    numbers to keep. Among those with all microbatches, or a few more, of which some are left out, those with most steps on the
    host.

    ``late(n)`` is told of n moves that were looked at and says when to stop.
    """

    def __init__(self, chain: Chain, graph: Graph, end: int, late: Callable[[int], bool]) -> None:
        self.chain, self.end, self.steps = chain, end, chain.ranks[0].alone
        self.moves, self.states = graph
        self.found, self.layers, self.worth = False, list[Counts](), 0
        self.most_away = self.steps.trip // self.steps.o + _MORE_AWAY
        if len(self.states) * self.most_away * end > _MOST_NUMBERS:
            return
        for worth in _WORTHS:
            most = worth * (end // 3) + self.most_away * end
            if most > np.iinfo(np.int16).max or not self._solve(worth, late):
                return
            if self.layers[-1][0, 0] >= 0:
                begun = sum(does == F for *_, does in self._path(random.Random(0)))
                if begun >= chain.count:
                    self.found = True
                    return

    def _solve(self, worth: int, late: Callable[[int], bool]) -> bool:
        """What each state is worth after each step; whether there was time."""
        size, self.worth = sum(x.source.size for x in self.moves), worth
        self.layers = [start(len(self.states))]
        for step in range(self.end):
            now = self.steps.stepped(self.moves, self.layers[-1], step, self.end, self._may_start(step), worth)
            now = now[:, : self.most_away]
            now = np.where(now >= 0, now + np.arange(now.shape[1], dtype=np.int16), np.int16(NEVER))
            self.layers.append(now)
            if late(size * now.shape[1]):
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
            for lane, less in ((NO_COPY, 0), (O, 1), (L, -1)):
                move, there = self.moves[lane], away - less
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
            path.append((self.states[source], self.states[number], lane, does))
            number, value = source, value - (self.worth if does == F else 0)
        return path[::-1]
