"""Rank after rank at random, for fewer and fewer steps."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from math import ceil, floor
from typing import TypeAlias

from jaxpipe.schedule.bounds.few_ranks import MOVES_PER_S, FewRanks, late_for
from jaxpipe.schedule.budget import Budget
from jaxpipe.schedule.ir import Action
from jaxpipe.schedule.rank_by_rank.chain import Chain, Times, chain_of
from jaxpipe.schedule.rank_by_rank.first_rank import FirstRank
from jaxpipe.schedule.rank_by_rank.next_rank import NextRank

Beginning: TypeAlias = tuple[Times, ...]
Begun: TypeAlias = list[tuple[Action, int, float]]
"""What starts, on which rank, at how many seconds."""

_TRIES = 12  # of one number of steps, at first
_FAILS, _BACK = 3, 2  # of a try; each takes back so many ranks on average, the first one never
_LEAST_MOVES = 10_000  # that a try counts for
_ROUNDING = 1e-6


def begun_rank_by_rank(few: FewRanks, bound: float, value: float, budget: Budget, seed: int) -> Iterator[Begun]:
    """Schedules, each of less than the one before and than ``value`` seconds of what ``few`` bounds, until the budget ends or
    they are within a step of ``bound``. Nothing where the durations are not equal, or the first rank has too many states.

    Steps are rounded down where they are not whole, and transfers that queue are not seen: whoever simulates a schedule sees
    what it takes.
    """
    chain = chain_of(few)
    if chain is None:
        return
    late = late_for(budget, MOVES_PER_S, 1.0)
    least, most = ceil(bound / chain.step_s - _ROUNDING), floor(value / chain.step_s + _ROUNDING)
    for found in Search(chain, random.Random(seed), late).schedules(least, most):
        every = ((rank, *start) for rank, times in enumerate(found) for start in times.starts())
        yield [(Action(op, rank, i), rank, at * chain.step_s) for rank, op, i, at in every]


class Search:
    """Schedules of ``chain``. ``late(n)`` is told of n states or moves that were looked at and says when to stop."""

    def __init__(self, chain: Chain, rng: random.Random, late: Callable[[int], bool]) -> None:
        self.chain, self.rng, self.late = chain, rng, late

    def schedules(self, least: int, most: int) -> Iterator[Beginning]:
        """Times of all ranks, each time in fewer steps than before, at first in fewer than ``most``; none can have fewer than
        ``least``."""
        first, tries, failed = FirstRank(self.chain, most, self.late), _TRIES, least - 1
        while least < most and not self.late(_LEAST_MOVES):
            goal = (failed + most) // 2
            if goal == failed:  # all were tried
                tries, failed = 2 * tries, least - 1
            elif not first.solved(goal):
                failed, least = goal, goal + 1
            elif found := self._found(first, goal, tries):
                yield found
                most = max(self._steps(times) for times in found)
            else:
                failed = goal

    def _found(self, first: FirstRank, goal: int, tries: int) -> Beginning | None:
        """What is found in so many tries."""
        ranks, rng = len(self.chain.ranks), self.rng
        for _ in range(tries):
            times, fails = first.times(rng), 0
            begun = [] if times is None else [times]
            while begun and fails < _FAILS and not self.late(_LEAST_MOVES):
                following = NextRank(self.chain, len(begun), begun[-1], rng).times(goal, self.late)
                if following is None:
                    fails += 1
                    del begun[max(1, len(begun) - int(rng.expovariate(1 / _BACK))) :]
                else:
                    begun.append(following)
                if len(begun) == ranks:
                    return tuple(begun)
        return None

    def _steps(self, times: Times) -> int:
        return times.end - (times.first if self.chain.by_span else 0)
