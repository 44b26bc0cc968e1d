"""The next rank of a chain within the windows that the rank before it leaves."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np

from jaxpipe.schedule.bounds.host_steps import B, F, L, O, W
from jaxpipe.schedule.rank_by_rank.chain import Chain, Times
from jaxpipe.schedule.rank_by_rank.parked import Parked

_TRIES = 8  # with one microbatch more that stays
_NEAR = 0.5  # of them with one that is here when nothing goes any more


class NextRank:
    """Rank number ``rank``, from 1 on, after ``above``. What stayed there stays here, and goes straight down and back from here
    on; of what is parked some may, too."""

    def __init__(self, chain: Chain, rank: int, above: Times, rng: random.Random) -> None:
        here = chain.ranks[rank]
        self.alone, self.apart, self.by_span, self.rng = here.alone, chain.crossings(rank), chain.by_span, rng
        self.come = [at + here.down for at in above.forward]
        self.due = [at - here.up for at in above.backward]
        self.begin = min(self.come)
        self.parked = sorted(above.out, key=above.forward.__getitem__)
        self.straight = {i: at for i, at in enumerate(self.come) if i not in above.out}  # steps in which F's start
        for i in self.straight:
            self.straight[i] = rng.choice(self._ways(i))

    def _ways(self, i: int) -> list[int]:
        """Steps in which a microbatch may start to go straight and meet none of the others that do."""
        others = [at for j, at in self.straight.items() if j != i]
        steps = range(self.come[i], self.due[i] - self.alone.trip + 1)
        return [at for at in steps if not any(at == x or self.apart >> (abs(at - x) - 1) & 1 for x in others)]

    def times(self, goal: int, tell: Callable[[int], object]) -> Times | None:
        """What ends within ``goal`` steps and leaves much of the windows to the next rank; None if nothing is found.
        ``tell(n)`` is told of n moves that were looked at."""
        steps = range(self.begin, goal + (self.begin if self.by_span else 0))
        furthest, kept = -1, (self.straight, self.parked)
        for _ in range(_TRIES):
            windows = [(self.come[i], self.due[i]) for i in self.parked]
            plan = Parked(self.alone, steps, windows, self.straight.values(), self.rng)
            dead = plan.dead(tell)
            if dead is None:
                return self._times(*plan.starts())
            if dead > furthest:
                furthest, kept = dead, (self.straight, self.parked)
            self.straight, self.parked = kept
            if not self._one_more_stays(dead):
                return None
        return None

    def _one_more_stays(self, dead: int) -> bool:
        """Let one go straight that is parked above, while memory is least full; whether there is one."""
        trip, rng = self.alone.trip, self.rng
        used = np.zeros(max(self.due) + trip + 1, np.int64)
        for at in self.straight.values():
            used[at : at + trip + 1] += 1
        near = [i for i in self.parked if self.come[i] <= dead <= self.due[i]] if rng.random() < _NEAR else []
        for some in (near, self.parked):
            for i in rng.sample(some, len(some)):
                if ways := self._ways(i):
                    full = [used[at : at + trip + 1] for at in ways]
                    keys = [(int(x.max()), int(x.sum()), rng.random()) for x in full]
                    self.straight = {**self.straight, i: min(zip(keys, ways, strict=True))[1]}
                    self.parked = [j for j in self.parked if j != i]
                    return True
        return False

    def _times(self, ops: list[list[int]], copies: list[list[int]]) -> Times:
        """From the steps in which something starts."""
        trip, parked = self.alone.trip, self.parked
        turn = {i: at + trip for i, at in self.straight.items()}
        forward = dict(zip(parked, sorted(set(ops[F]) - {*self.straight.values()}), strict=True)) | self.straight
        backward = dict(zip(parked, sorted(set(ops[B]) - {*turn.values()}), strict=True)) | turn
        weight = dict(zip(sorted(backward, key=backward.__getitem__), ops[W], strict=True))
        out, back = (dict(zip(parked, copies[which], strict=True)) for which in (O, L))
        return Times.of(forward, backward, weight, out, back)
