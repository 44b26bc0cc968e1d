"""Chunks of one microbatch that a rank holds at the same time: few microbatches may do so, so they take turns.

A rank runs the stages s_1 < … < s_c < … of a chain. From F of s_c to B of s_c a microbatch holds what s_1 … s_c left on the
rank: their F's come before, their B's after. So no more than q = ⌊limit / that⌋ microbatches may be on the way from s_c and
back, and the (j + q)-th F of s_c starts a whole way after the j-th. Memory × time does not see this: with room for three
activations and two chunks, half of the third can't be used, whatever the average is.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxpipe.schedule.bounds.resident import Confined, Resident
from jaxpipe.schedule.tolerance import at_most, how_many


def chunk_turns(stays: Sequence[Resident], limit: float) -> Confined:
    """Bounds of one rank that does ``stays`` (stages of one flow, ascending), from what its chunks hold together."""
    bound = Confined(0.0, 0.0)
    if len({x.flow for x in stays}) > 1:
        return bound
    for c in range(1, len(stays)):
        bound = bound.or_longer(_turns(stays[: c + 1], limit))
    return bound


def _turns(stays: Sequence[Resident], limit: float) -> Confined:
    """The last of ``stays`` takes turns.

    Order its F's by start. When the j-th (from 0) starts, at most q − 1 of those before it are still on their way; so of
    j + 1 − q that are not, one has an F no earlier than the (j − q)-th, and a way lies between. A way ends when the first of
    the held is given back: at B's end, or, if only W gives anything back, when W or the next stage's B has run too. What is
    left to do from the j-th F on: after a trip, the backwards of its microbatch and of all later ones, of this stage and those
    before it.
    """
    last, before = stays[-1], stays[-2]
    held = sum(x.held for x in stays)
    lanes = how_many(held, limit) if held > 0 else last.count
    if not 1 <= lanes < last.count:
        return Confined(0.0, 0.0)
    whole = at_most(last.held, last.kept)
    way = last.trip_s + last.b_s + (min(last.w_s, before.b_s) if whole else 0.0)
    back, passed = sum(x.back_s for x in stays), sum(x.b_s for x in stays)
    starts: list[float] = []
    own = through = 0.0
    for j in range(last.count):
        start = starts[-1] + last.f_s if j else 0.0
        if j >= lanes:
            start = max(start, starts[j - lanes] + way)
        starts.append(start)
        home = last.in_s + start + last.trip_s
        own = max(own, home + (last.count - j) * back)
        through = max(through, home + (last.count - j) * passed)
    return Confined(own, through)
