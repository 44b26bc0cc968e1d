"""The next rank of a chain, by dynamic programming over time within the windows that the rank before it leaves."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence, Set
from heapq import nlargest
from typing import TypeAlias

from jaxpipe.schedule.bounds.host_steps import NO_COPY, NOTHING, B, F, L, O, W
from jaxpipe.schedule.rank_by_rank.chain import Chain, Times

_MOVES = 100  # of NumPy's take as long as one state
_NEVER = 1 << 60
_TIGHT, _WIDE, _PARKED = range(3)
_WORTHS = ((1, 1, 1), (2, 1, 1), (4, 2, 1), (4, 4, 1), (3, 1, 2))  # of a step between F and B, by class; not tuned

_Stays: TypeAlias = tuple[tuple[int, int], ...]
_State: TypeAlias = tuple[int, int, int, int, int, _Stays, int, int, int, int]
"""What the lane copies, and for how many steps more; how many parked ones wait for O, for B after L; how many of all wait for
W; the microbatches that stay, each with the step from which its B may start; F's that have started, of the tight, the wide and
the parked; B's of the parked."""
_Move: TypeAlias = tuple[_State, int, int, int]
"""The state before; what the lane starts; the op that the rank starts, and the microbatch, -1 for the next parked one."""
_START: _State = (NO_COPY, 0, 0, 0, 0, (), 0, 0, 0, 0)


class NextRank:
    """Rank number ``rank``, from 1 on, after ``above``. Microbatches have three classes: those that stayed ``above`` have
    little time (tight), ``parked`` are some of those that were parked there and are here, too; all others stay from here on
    (wide). Those of a class start in the order in which they come; what is parked comes back from the host in that order, too.
    """

    def __init__(self, chain: Chain, rank: int, above: Times, parked: Set[int]) -> None:
        here = chain.ranks[rank]
        self.chain, self.rank, self.alone = chain, rank, here.alone
        self.come = [at + here.down for at in above.forward]
        self.due = [at - here.up for at in above.backward]
        self.away = max(self.alone.trip, 1 + self.alone.o + self.alone.back)  # from F to B of a parked one, at least
        self.kind = [_PARKED if i in parked else _WIDE if i in above.out else _TIGHT for i in range(chain.count)]
        self.begin = min(self.come)
        every = sorted(range(chain.count), key=self.come.__getitem__)
        self.classes = [[i for i in every if self.kind[i] == kind] for kind in range(3)]
        trips = (self.alone.trip, self.alone.trip, self.away)
        self.last = [at - trips[kind] for at, kind in zip(self.due, self.kind, strict=True)]  # steps for F's
        self.comes = [[self.come[i] for i in some] for some in self.classes]
        self.must_start = [sorted(self.last[i] for i in some) for some in self.classes]
        self.may_turn = [at + self.away for at in self.comes[_PARKED]]
        self.must_turn = sorted(self.due[i] for i in self.classes[_PARKED])

    def times(
        self, end: int, width: int, rng: random.Random, straight: bool, tell: Callable[[int], object]
    ) -> Times | None:
        """What ends by the step ``end`` and leaves much of the windows to the next rank; None if nothing is found with
        ``width`` states a step. ``straight``: what starts here must meet nothing that comes straight back, if it goes straight
        down. ``tell(n)`` is told of n moves that were looked at."""
        if any(self.due[i] - self.come[i] < self.alone.trip for i in range(self.chain.count)):
            return None
        now, moves = {_START: 0}, list[dict[_State, _Move]]()
        base, apart = rng.choice(_WORTHS), self.chain.crossings(self.rank) if straight else 0
        for step in range(self.begin, end):
            tell(_MOVES * len(now))
            worth = [x * rng.randint(2, 6) for x in base]
            now, made = self._after(now, step, apart, worth)
            if len(now) > width:
                now = dict(nlargest(width, now.items(), key=lambda x: x[1]))
            moves.append(made)
        tight, wide, parked = map(len, self.classes)
        done = (NO_COPY, 0, 0, 0, 0, (), tight, wide, parked, parked)
        return self._traced(moves, done) if done in now else None

    def _after(
        self, now: dict[_State, int], step: int, apart: int, worth: Sequence[int]
    ) -> tuple[dict[_State, int], dict[_State, _Move]]:
        """States after a step with what they are worth: for each microbatch between F and B, by class; and their moves."""
        come = [bisect_right(x, step) for x in self.comes]
        least_tight, least_wide, least_parked = (bisect_right(x, step) for x in self.must_start)
        turning, turned = bisect_right(self.may_turn, step), bisect_right(self.must_turn, step)
        of_stay, of_parked = [worth[kind] for kind in self.kind], worth[_PARKED]
        after: dict[_State, int] = {}
        made: dict[_State, _Move] = {}
        for state, value in now.items():
            for reached, lane, op, i in self._moves(state, step, apart, come, turning):
                _, _, _, _, _, stays, tight, wide, parked, back = reached
                if tight < least_tight or wide < least_wide or parked < least_parked or back < turned:
                    continue
                gain = value + of_parked * (parked - back)
                for j, _ in stays:
                    gain += of_stay[j]
                if after.get(reached, -1) < gain:
                    after[reached], made[reached] = gain, (state, lane, op, i)
        return after, made

    def _moves(
        self, state: _State, step: int, apart: int, come: Sequence[int], turning: int
    ) -> Iterator[tuple[_State, int, int, int]]:
        """The states after a step, and how they are reached. ``come``: microbatches that are there by then, by class;
        ``turning``: of the parked, how many may have started B."""
        copy, left, leaving, back, w, stays, tight, wide, parked, turned = state
        trip, free = self.alone.trip, self.alone.room - leaving - back - w - len(stays)
        lanes = [(NO_COPY, copy, left, leaving)]
        if not left and leaving:
            lanes.append((O, O, self.alone.o, leaving - 1))
        if not left and free > 0 and parked - leaving - back - turned > 0:
            lanes.append((L, L, self.alone.back, leaving))
        turns, soonest, straight = -1, _NEVER, True
        for i, at in stays:
            due = self.due[i]
            if due == step and (at > step or soonest == step):
                return  # too late
            if at <= step and due < soonest:
                turns, soonest = i, due
            straight = straight and not apart >> (step - at + trip - 1) & 1
        others = tuple(x for x in stays if x[0] != turns) if turns >= 0 else ()
        for lane, copy, left, waits in lanes:
            loaded = back + (copy == L and left == 1)
            c, n = (copy, left - 1) if left > 1 else (NO_COPY, 0)
            if turns >= 0:
                yield (c, n, waits, loaded, w + 1, others, tight, wide, parked, turned), lane, B, turns
            if soonest == step:
                continue
            if free + leaving - waits > (left > 0):
                if straight and tight < come[_TIGHT] and step <= self.last[i := self.classes[_TIGHT][tight]]:
                    more = (*stays, (i, step + trip))
                    yield (c, n, waits, loaded, w, more, tight + 1, wide, parked, turned), lane, F, i
                if straight and wide < come[_WIDE] and step <= self.last[i := self.classes[_WIDE][wide]]:
                    more = (*stays, (i, step + trip))
                    yield (c, n, waits, loaded, w, more, tight, wide + 1, parked, turned), lane, F, i
                if parked < come[_PARKED] and step <= self.last[i := self.classes[_PARKED][parked]]:
                    yield (c, n, waits + 1, loaded, w, stays, tight, wide, parked + 1, turned), lane, F, i
            if back and turned < turning:
                yield (c, n, waits, loaded - 1, w + 1, stays, tight, wide, parked, turned + 1), lane, B, -1
            if w:
                yield (c, n, waits, loaded, w - 1, stays, tight, wide, parked, turned), lane, W, -1
            else:
                yield (c, n, waits, loaded, w, stays, tight, wide, parked, turned), lane, NOTHING, -1

    def _traced(self, moves: Sequence[dict[_State, _Move]], state: _State) -> Times | None:
        """The way to ``state``; None where the parked can't keep their windows so."""
        ops: list[list[tuple[int, int]]] = [[], [], [], []]
        copies: list[list[int]] = [[], [], []]
        for step, made in zip(range(self.begin + len(moves) - 1, -1, -1), reversed(moves), strict=False):
            state, starts, op, i = made[state]
            copies[starts].insert(0, step)
            ops[op].insert(0, (step, i))
        forward = {i: step for step, i in ops[F]}
        backward, waiting = dict[int, int](), set(self.classes[_PARKED])
        for step, i in ops[B]:
            if i < 0:
                i = min((j for j in waiting if forward[j] + self.away <= step), key=self.due.__getitem__, default=-1)
                if i < 0 or self.due[i] < step:
                    return None
                waiting.remove(i)
            backward[i] = step
        weight = dict(zip(sorted(backward, key=backward.__getitem__), (step for step, _ in ops[W]), strict=True))
        parked = self.classes[_PARKED]
        out = dict(zip(parked, copies[O], strict=True))
        back = dict(zip(sorted(parked, key=backward.__getitem__), copies[L], strict=True))
        if any(back[i] < out[i] + self.alone.o or backward[i] < back[i] + self.alone.back for i in parked):
            return None
        return Times.of(forward, backward, weight, out, back)
