"""The policies that the zero-bubble heuristic tries, most useful first.

A policy needs a depth per rank: how many microbatches may be between F and B there. ``_DEPTHS`` names several ways to choose
it; ``_GRID`` combines them with the other choices of a :class:`~jaxpipe.schedule.families.list_scheduler.Policy`. The grid's
order was found by greedy selection over random chains (even, jittered, one heavy stage, arbitrary; transfers 0-0.3 F; limits
p/2-2p; p <= 16): each row is the one that improves most on those before it. Two rows, "warm stepped" with balance and "eager"
with w_gap 0.75, were moved forward by hand for limits near 1.5p with slow transfers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import ceil, floor

from jaxpipe.schedule.families.list_scheduler import Bounded, Policy, Turn

Depths = list[float]


def _one_f_one_b(c: Bounded) -> Depths:
    return [c.problem.num_ranks - r for r in range(c.problem.num_ranks)]


def _eager(c: Bounded) -> Depths:
    return [2 * (c.problem.num_ranks - r) - 1 for r in range(c.problem.num_ranks)]


def _unbounded(c: Bounded) -> Depths:
    return [c.problem.num_microbatches] * c.problem.num_ranks


def _in_proportion(c: Bounded) -> Depths:
    """The limit on rank 0, falling evenly."""
    p = c.problem.num_ranks
    return [ceil(min(c.limit, 2 * p) * (p - r) / p) for r in range(p)]


def _round_trip(c: Bounded, factor: float) -> Depths:
    """``factor`` × what a rank must have under way not to wait for its first microbatch to come back."""
    period = max(map(sum, zip(c.problem.f_s, c.problem.b_s, c.problem.w_s, strict=True)))
    trip = 0.0
    depths: Depths = []
    for r in reversed(range(c.problem.num_ranks)):
        trip += c.problem.f_s[r] + c.problem.b_s[r]
        depths.append(
            ceil(min(factor * trip / period, c.problem.num_microbatches) - 1e-9) if period > 0 else c.problem.num_ranks
        )
        if r:
            trip += c.problem.down_s[r - 1] + c.problem.up_s[r]
    return depths[::-1]


def _warm_up(c: Bounded, rounded: Callable[[float], int]) -> Depths:
    """Forwards that fit before the first B comes back; the last one partly (``ceil``) or not at all (``floor``)."""
    p = c.problem.num_ranks
    reach = [0.0]
    for r in range(p - 1):
        reach.append(reach[r] + c.problem.f_s[r] + c.problem.down_s[r])
    depths = [1]
    most = floor(min(c.limit, c.problem.num_microbatches))
    back = reach[-1] + c.problem.f_s[-1] + c.problem.b_s[-1]
    for r in reversed(range(p - 1)):
        back += c.problem.up_s[r + 1]
        fits = min((back - reach[r]) / c.problem.f_s[r], most) if c.problem.f_s[r] > 0 else most
        depths.append(max(depths[-1], rounded(fits + 1e-9)))
        back = max(back, reach[r] + depths[-1] * c.problem.f_s[r]) + c.problem.b_s[r]
    return [float(d) for d in reversed(depths)]


def _stepped(depths: Depths, c: Bounded) -> Depths:
    """``depths``, but at least one less per rank than the limit leaves, so that memory fills from rank 0 down."""
    return [min(max(depths[r:]), max(1.0, c.limit - r)) for r in range(c.problem.num_ranks)]


def _falling(depths: Depths) -> Depths:
    """``depths``, but each at least one less than the one above."""
    fallen = depths[:1]
    for depth in depths[1:]:
        fallen.append(max(1.0, min(depth, fallen[-1] - 1)))
    return fallen


_DEPTHS: dict[str, Callable[[Bounded], Depths]] = {
    "1f1b": _one_f_one_b,
    "eager": _eager,
    "unbounded": _unbounded,
    "in proportion": _in_proportion,
    "trip": lambda c: _round_trip(c, 1.0),
    "trip 1.25": lambda c: _round_trip(c, 1.25),
    "trip 1.5": lambda c: _round_trip(c, 1.5),
    "trip 2": lambda c: _round_trip(c, 2.0),
    "trip 3": lambda c: _round_trip(c, 3.0),
    "warm": lambda c: _warm_up(c, floor),
    "warm+": lambda c: _warm_up(c, ceil),
    "warm stepped": lambda c: _stepped(_warm_up(c, floor), c),
    "warm+ stepped": lambda c: _stepped(_warm_up(c, ceil), c),
    "warm falling": lambda c: _falling(_warm_up(c, floor)),
    "warm+ falling": lambda c: _falling(_warm_up(c, ceil)),
    "limit falling": lambda c: _falling([c.limit] * c.problem.num_ranks),
}

_GRID: tuple[tuple[str, Turn, float, bool, float], ...] = (
    # depth, turn, w_gap, balance, f_gap
    ("eager", "forward", 0.5, True, 0),
    ("1f1b", "forward", 1, False, 0),
    ("in proportion", "backward", 0.5, False, 0.5),
    ("warm stepped", "forward", 1, True, 0),
    ("eager", "forward", 0.75, False, 0),
    ("in proportion", "alternate", 0, False, 0),
    ("trip 1.25", "forward", 0.5, True, 0),
    ("warm", "backward", 1, True, 0),
    ("warm stepped", "alternate", 0.5, True, 0),
    ("warm+", "forward", 0, False, 0),
    ("trip", "backward", 1, True, 0.5),
    ("trip 1.5", "forward", 0.5, False, 0),
    ("eager", "alternate", 0, False, 0),
    ("trip 3", "backward", 0.5, False, 0),
    ("unbounded", "backward", 0.5, True, 0.5),
    ("warm stepped", "forward", 0.5, True, 0),
    ("1f1b", "forward", 0.5, False, 0),
    ("trip", "forward", 0.5, False, 0),
    ("in proportion", "forward", 1, False, 0),
    ("trip 3", "backward", 0, False, 0),
    ("trip 1.5", "forward", 0, False, 0),
    ("trip 2", "forward", 0.5, True, 0),
    ("1f1b", "backward", 0.5, True, 0),
    ("in proportion", "backward", 1, True, 0),
    ("1f1b", "alternate", 1, False, 0),
    ("in proportion", "backward", 0, False, 1),
    ("warm+", "forward", 0.5, True, 0),
    ("trip 2", "backward", 1, True, 0.5),
    ("trip", "backward", 1, False, 1),
    ("1f1b", "forward", 1, True, 0),
    ("trip 2", "backward", 0.5, False, 0),
    ("trip 1.5", "backward", 0.5, True, 0),
    ("trip 3", "backward", 0.5, True, 0),
    ("trip", "backward", 1, False, 0.5),
    ("warm", "forward", 0, False, 0),
    ("unbounded", "backward", 0, False, 1),
    ("trip 3", "forward", 0, False, 0),
    ("eager", "forward", 1, True, 0),
    ("warm+ stepped", "backward", 0.5, True, 0),
    ("trip 1.5", "forward", 1, False, 0),
    ("warm", "backward", 0.5, False, 0),
)


def policies(c: Bounded) -> Iterator[Policy]:
    """All policies for ``c``, most useful first, each once."""
    fitted: dict[str, tuple[int, ...]] = {}
    seen: set[Policy] = set()
    for depth, turn, w_gap, balance, f_gap in _GRID:
        if depth not in fitted:
            fitted[depth] = c.fit(_DEPTHS[depth](c))
        policy = Policy(fitted[depth], turn, w_gap, balance, f_gap)
        if policy not in seen:
            seen.add(policy)
            yield policy
