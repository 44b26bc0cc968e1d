"""Beginnings of schedules, the first few ranks, each tried with one rank more at random."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import ceil, floor
from typing import TypeAlias

from jaxpipe.schedule.bounds.few_ranks import MOVES_PER_S, FewRanks, late_for
from jaxpipe.schedule.budget import Budget
from jaxpipe.schedule.ir import Action
from jaxpipe.schedule.rank_by_rank.chain import Chain, Times, chain_of
from jaxpipe.schedule.rank_by_rank.first_rank import FirstRank, first_graph
from jaxpipe.schedule.rank_by_rank.next_rank import NextRank

Beginning: TypeAlias = tuple[Times, ...]
Begun: TypeAlias = list[tuple[Action, int, float]]
"""What starts, on which rank, at how many seconds."""

_MOST_KEPT = 40  # beginnings of so many ranks
_ANEW = 0.1  # of the tries start with the first rank
_BACK = 1.5  # ranks that a try goes back on average, of those that have beginnings
_MOST_TRIES = 5  # with one beginning
_TRIES = 48  # before the goal is eased, at first
_WIDTHS = {250: 48, 1000: 4, 4000: 1}
"""States a step, and how often so many, which gives each width as much time: p=8 gains by many, p=16 by few."""
_SLACK = 3  # steps of a window beyond its trip that count
_FEW, _FEW_MEAN = 0.7, 3  # of the tries stop parking few microbatches, so many on average
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


@dataclass(slots=True, eq=False)
class _Node:
    """A beginning, how many steps its windows have beyond trips, and how often it was tried."""

    beginning: Beginning
    slack: int
    tries: int = 0


class Search:
    """Schedules of ``chain``. ``late(n)`` is told of n states or moves that were looked at and says when to stop."""

    def __init__(self, chain: Chain, rng: random.Random, late: Callable[[int], bool]) -> None:
        self.chain, self.rng, self.late = chain, rng, late
        self.kept: list[list[_Node]] = []

    def schedules(self, least: int, most: int) -> Iterator[Beginning]:
        """Times of all ranks, each time in fewer steps than before, at first in fewer than ``most``; none can have fewer than
        ``least``."""
        ranks, patience = len(self.chain.ranks), _TRIES
        goal, graph = least + (most - least) * 2 // 3, first_graph(self.chain, self.late)
        while graph is not None and least < most and not self.late(_LEAST_MOVES):
            first = FirstRank(self.chain, graph, goal, self.late)
            self.kept = [[] for _ in range(ranks)]
            found, tries = None, 0
            goal += 0 if first.found else max(1, (most - goal) // 8)
            while first.found and found is None and goal < most and not self.late(_LEAST_MOVES):
                found, tries = self._longer(first, goal), tries + 1
                if found is None and tries % patience == 0:
                    goal += max(1, (most - goal) // 8)
            if found is not None:
                yield found
                most = max(self._steps(times) for times in found)
                goal = max(least, min(goal, most) - 1 - (most - least) // 8)
            elif goal >= most:
                patience *= 2
                goal = least + (most - least) * 2 // 3

    def _longer(self, first: FirstRank, goal: int) -> Beginning | None:
        """One try to make a beginning one rank longer, kept for further tries; the whole schedule if that was the last rank."""
        rng, filled = self.rng, [x for x in self.kept if x]
        if not filled or rng.random() < _ANEW:
            times = first.times(rng)
            if times is None:
                return None
            beginning: Beginning = (times,)
        else:
            some = filled[max(0, len(filled) - 1 - int(rng.expovariate(1 / _BACK)))]
            node = some[min(int(rng.expovariate(2 / len(some))), len(some) - 1)]
            node.tries += 1
            if node.tries == _MOST_TRIES:
                some.remove(node)
            beginning = node.beginning
        rank, above = len(beginning), beginning[-1]
        following = NextRank(self.chain, rank, above, self._parked(rank, above))
        end = goal + (following.begin if self.chain.by_span else 0)
        (width,) = rng.choices(list(_WIDTHS), list(_WIDTHS.values()))
        times = following.times(end, width, rng, rng.random() < 0.5, self.late)
        if times is None:
            return None
        longer = (*beginning, times)
        if len(longer) == len(self.chain.ranks):
            return longer
        trip, kept = self.chain.ranks[rank].alone.trip, self.kept[rank]
        windows = (b - f - trip for f, b in zip(times.forward, times.backward, strict=True))
        kept.append(_Node(longer, sum(min(x, _SLACK) for x in windows)))
        kept.sort(key=lambda x: -x.slack)
        del kept[_MOST_KEPT:]
        return None

    def _parked(self, rank: int, above: Times) -> set[int]:
        """What ``rank`` is to park, of what is parked above: mostly nearly all of it, on the last rank nothing."""
        rng, every = self.rng, sorted(above.out, key=above.forward.__getitem__)
        few = rng.random() < _FEW
        number = max(0, len(every) - int(rng.expovariate(1 / _FEW_MEAN))) if few else rng.randint(0, len(every))
        if rank == len(self.chain.ranks) - 1:
            number = 0
        if rng.random() < 0.3:
            return set(rng.sample(every, number))
        left_out = len(every) - number
        phase = rng.random()
        out = {every[min(len(every) - 1, int((n + phase) * len(every) / left_out))] for n in range(left_out)}
        return set(every) - out

    def _steps(self, times: Times) -> int:
        return times.end - (times.first if self.chain.by_span else 0)
