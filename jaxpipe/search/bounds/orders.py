"""A few ranks exactly, by dynamic programming over the orders of their actions; all other ranks only take time.

Keep the actions of some ranks of a chain, each with its rank to itself and its activations under the limit; between two of a
microbatch's actions that were kept, what lies on other ranks takes at least its own time. Every schedule stays one when
other ranks' actions are left out, so the least time of what is left bounds it. All microbatches are alike: name the j-th F, B
and W of each stage after microbatch j, and what waited for its own microbatch's action before waits for none later than then
(sorting both sides of s_i + lag ≤ t_i keeps it true). So an order is a row of (action, next microbatch), and each action
starts when its rank is free and its microbatch has come; memory is given back at ends on the same rank, so order alone tells
what fits.

A state is what has been started, how often, and: the time when each rank is free, and the times at which microbatches on their
way reach the next action. Of two states with the same counts one that is nowhere later is as good, so only states that no
other dominates are kept. The limit leaves few microbatches on their way, so there are few: tens per count where the limit
is tight. Where there are more than ``width`` with the same counts, neighbours become one state with the least of their
times, which bounds both. A state from which the work left on some rank ends too late is dropped.

Two ranks see what neither sees alone: a V at p/2 with uneven costs loses time because the actions of a microbatch on both can't
follow each other at once without idling one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf
from operator import le
from typing import Protocol, TypeVar

from jaxpipe.schedule.tolerance import MEMORY, at_most, how_many

C = TypeVar("C")
Late = Callable[[int], bool]
"""Told how many states come next: whether time is up."""
State = tuple[int, ...]
"""Least objective that is already sure; per rank, when it is free; per step but the first and per microbatch on its way to it,
when it is there."""


@dataclass(frozen=True, slots=True)
class Step:
    """An F or B of every microbatch on rank number ``rank``: ``ticks`` it takes, ``lag`` from its start to that of the next."""

    rank: int
    stage: int
    ticks: int
    lag: int


@dataclass(frozen=True, slots=True)
class Kept:
    """A stage on a rank that is kept: units ``held`` from F's start to B's end, ``kept`` from there to the end of its W, which
    takes ``w`` ticks."""

    held: float
    kept: float
    w: int


@dataclass(frozen=True, slots=True)
class Ends:
    """Ticks that a rank adds to the objective: from the end of its last B, and from the end of its last action, to the
    objective's; −inf where it is not measured by that."""

    after_b: float
    after_all: float


@dataclass(frozen=True, slots=True)
class Orders:
    """``count`` microbatches through ``steps`` (the F's of ``stages`` in order, then their B's) on ranks with ``limits``."""

    steps: tuple[Step, ...]
    stages: tuple[Kept, ...]
    limits: tuple[float, ...]
    ends: tuple[Ends, ...]
    count: int

    def least(self, most: float, width: int, late: Late) -> float:
        """Return the ticks from the first start that no order's objective is below: the least of what is at most ``most``,
        else infinite.

        0, which proves nothing, if ``late`` said so.
        """
        search = _OrderSearch(self)
        layer: dict[_Counts, list[State]] = {search.nothing: [(0,) * (1 + len(self.limits))]}
        return least_objective(search, layer, most, width, late)


class _Follows(Protocol[C]):
    """Successors of the states of a search; states are told apart by counts of what has started."""

    def ended(self, counts: C, /) -> bool:
        """Return whether no action is left to start."""

    def next(self, counts: C, states: Sequence[State], /) -> Iterator[tuple[C, list[State]]]:
        """Return every action that may follow, and the states after it."""

    def hopeful(self, counts: C, states: Sequence[State], most: float, /) -> list[State]:
        """Return the states that may still end by ``most``."""

    def objective(self, state: State) -> float:
        """Return the objective, in ticks, of a state without actions left."""


def least_objective(search: _Follows[C], layer: dict[C, list[State]], most: float, width: int, late: Late) -> float:
    """Search like :meth:`Orders.least`, from the states of ``layer``."""
    best = inf
    while layer:
        after: dict[C, list[State]] = {}
        for counts, states in layer.items():
            if search.ended(counts):
                best = min(best, *map(search.objective, states))
                continue
            if late(len(states)):
                return 0.0
            for then, successors in search.next(counts, states):
                after.setdefault(then, []).extend(successors)
        # states that end too late are dropped before others are merged, which then lose less
        hopeful = {counts: search.hopeful(counts, states, most) for counts, states in after.items()}
        layer = {counts: _narrowed(_undominated(states), width) for counts, states in hopeful.items() if states}
    return best


_Counts = tuple[int, ...]
"""How often each step, then each kind of W, has started."""


class _OrderSearch:
    """Successors of a state: the next F, B or W of any rank."""

    def __init__(self, orders: Orders) -> None:
        self.orders = orders
        steps, stages = orders.steps, orders.stages
        self.ranks = range(len(orders.limits))
        rank_of = {step.stage: step.rank for step in steps}
        # W's of one length and size are exchangeable: counted together they make fewer states
        kinds = [(rank_of[s], x.w, x.kept) for s, x in enumerate(stages)]
        self.kinds = sorted(set(kinds))  # W's that are alike on a rank
        self.kind_of = [self.kinds.index(x) for x in kinds]
        self.nothing = (0,) * (len(steps) + len(self.kinds))
        self.actions = orders.count * (len(steps) + len(stages))
        self.last_b = [max(k for k, step in enumerate(steps) if step.rank == rank) for rank in self.ranks]
        self.spare = [self._spare_weights(rank) for rank in self.ranks]

    def _spare_weights(self, rank: int) -> float:
        """Return the most ticks of W's that can wait when the last B of ``rank`` ends."""
        mine = [(w, residue) for r, w, residue in self.kinds if r == rank]
        limit = self.orders.limits[rank]
        # W's that hold nothing may all wait
        if limit == inf or any(w and not residue for w, residue in mine):
            return inf
        if len(mine) == 1:
            ((w, residue),) = mine
            return w * how_many(residue, limit) if residue else 0
        return max(w * limit / residue if residue else 0.0 for w, residue in mine) * (1 + MEMORY)

    def ended(self, counts: _Counts) -> bool:
        return sum(counts) == self.actions

    def objective(self, state: State) -> float:
        return max(state[0], *(state[1 + r] + self.orders.ends[r].after_all for r in self.ranks))

    def hopeful(self, counts: _Counts, states: Sequence[State], most: float) -> list[State]:
        orders, n = self.orders, len(self.orders.steps)
        latest = []
        for rank in self.ranks:
            # all that the rank has yet to run must fit before the latest end
            passes = sum(
                (orders.count - done) * step.ticks
                for step, done in zip(orders.steps, counts, strict=False)
                if step.rank == rank
            )
            wait = sum(
                (orders.count * self.kind_of.count(k) - counts[n + k]) * w
                for k, (r, w, _) in enumerate(self.kinds)
                if r == rank
            )
            ends = orders.ends[rank]
            ways = [passes + wait + ends.after_all]
            if counts[self.last_b[rank]] < orders.count:
                ways.append(passes + max(0.0, wait - self.spare[rank]) + ends.after_b)
            latest.append(most - max(ways))
        return [x for x in states if x[0] <= most and all(x[1 + r] <= t for r, t in enumerate(latest))]

    def next(self, counts: _Counts, states: Sequence[State]) -> Iterator[tuple[_Counts, list[State]]]:
        orders, n = self.orders, len(self.orders.steps)
        under_way = [a - b for a, b in pairwise(counts[:n])]
        first = 1 + len(self.ranks)
        at = [first, *accumulate(under_way, initial=first)]  # at[k]: where those stand that are on their way to step k
        waits = [0] * len(self.kinds)
        level = [0.0] * len(self.ranks)
        for s, stage in enumerate(orders.stages):
            kind, b = self.kind_of[s], counts[n - 1 - s]
            waits[kind] += b
            level[self.kinds[kind][0]] += stage.held * (counts[s] - b)
        for kind, (rank, _, residue) in enumerate(self.kinds):
            waits[kind] -= counts[n + kind]
            level[rank] += residue * waits[kind]
        mine: list[list[int]] = [
            [1 + r] for r in self.ranks
        ]  # entries of a state that are no earlier than the rank is free
        for k in range(1, n):
            mine[orders.steps[k].rank] += range(at[k], at[k + 1])
        # the next microbatch of each step that has one waiting
        for k, step in enumerate(orders.steps):
            if counts[k] == orders.count or (k and not under_way[k - 1]):
                continue
            # F's are the first half of the steps, and only they take memory
            if 2 * k < n and not at_most(level[step.rank] + orders.stages[step.stage].held, orders.limits[step.rank]):
                continue
            then = (*counts[:k], counts[k] + 1, *counts[k + 1 :])
            home = orders.ends[step.rank].after_b if k == self.last_b[step.rank] and then[k] == orders.count else -inf
            yield then, [self._after_step(x, k, at, mine[step.rank], home) for x in states]
        for kind, (rank, w, _) in enumerate(self.kinds):
            if waits[kind]:
                then = (*counts[: n + kind], counts[n + kind] + 1, *counts[n + kind + 1 :])
                yield then, [_busy_until(list(x), mine[rank], x[1 + rank] + w) for x in states]

    def _after_step(self, x: State, k: int, at: Sequence[int], mine: Sequence[int], home: float) -> State:
        """Return the state after step k of the next microbatch."""
        steps = self.orders.steps
        step, free = steps[k], 1 + steps[k].rank
        start = x[at[k]] if k else x[free]
        after = list(x)
        end = start + step.ticks
        # the last B fixes what must follow it on other ranks
        if home > -inf:
            after[0] = max(after[0], int(end + home))
        after = list(_busy_until(after, mine, end))
        if k + 1 < len(steps):
            arrival = start + step.lag
            after.insert(at[k + 2], max(arrival, after[1 + steps[k + 1].rank]))
        if k:
            del after[at[k]]
        return tuple(after)


def _busy_until(x: list[int], mine: Sequence[int], end: int) -> State:
    """Return the state with a rank busy until ``end``."""
    # what arrives while the rank is busy starts no earlier: raised, states that act alike are equal
    for i in mine:
        if x[i] < end:
            x[i] = end
    return tuple(x)


def _undominated(states: Sequence[State]) -> list[State]:
    """Return those that no other dominates."""
    best: list[State] = []
    # what dominates a state has no larger sum, so it was looked at before
    for x in sorted(set(states), key=sum):
        if not any(all(map(le, y, x)) for y in best):
            best.append(x)
    return best


def _narrowed(states: list[State], width: int) -> list[State]:
    """Return about ``width`` states, of which one is nowhere later, for each of these."""
    if len(states) <= width:
        return states
    # neighbours are alike, so their common minimum gives little away
    states.sort()
    size = -(-len(states) // width)
    return [tuple(map(min, zip(*states[i : i + size], strict=True))) for i in range(0, len(states), size)]
