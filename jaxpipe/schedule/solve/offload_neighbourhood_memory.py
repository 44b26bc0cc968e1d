"""Memory of a neighbourhood: what is held from when to when, a cumulative per limit (:mod:`.offload_neighbourhood_model`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jaxpipe.schedule.solve.instance import Holding
from jaxpipe.schedule.solve.offload_neighbourhood_times import NeighbourhoodTimes

_FAR = 1 << 40


def add_memory(model: NeighbourhoodTimes) -> None:
    """The limits of memory, for what is held from the neighbourhood's begin until its last actions end."""
    reach = model.end + model.longest
    for limit in model.instance.memory_limits:
        intervals, demands = [], []
        for k, holding in limit.holdings.items():
            for i in model.instance.problem.microbatches(k):
                if model.now["F", k, i] >= reach or _over(model, k, i):
                    continue
                for units, start, end, literal in _pieces(model, k, i, holding):
                    interval = _held(model, units, start, end, literal)
                    if interval is not None:
                        intervals.append(interval)
                        demands.append(units)
        if intervals:
            model.cp.add_cumulative(intervals, demands, limit.capacity)


def _over(model: NeighbourhoodTimes, k: int, i: int) -> bool:
    """Whether the microbatch is done when the neighbourhood begins."""
    last = ("B" if (k, i) in model.starts.fused else "W", k, i)
    return last not in model.at and last not in model.late and model.now[last] + model.length(last) <= model.begin


def _pieces(model: NeighbourhoodTimes, k: int, i: int, h: Holding) -> Iterator[tuple[int, Any, Any, Any]]:
    """(units, from when, to when, a literal or None), as in :mod:`.model_memory`."""
    f, b, w = model.at_of(("F", k, i)), model.end_of(("B", k, i)), model.end_of(("W", k, i))
    here = model.toggles.get((k, i))
    if here is None and (k, i) not in model.starts.away:
        yield from _stay(h.stays + h.leaves, h.kept, f, b, w, None)
        return
    yield h.stays, f, b, None
    yield h.leaves, f, model.end_of(("O", k, i)), here
    load = model.at_of(("L", k, i))
    rest = h.kept if h.kept <= h.leaves else 0
    if here is not None:
        yield from _stay(h.leaves, rest, f, b, w, ~here)
    yield from _stay(h.leaves, rest, load, b, w, here)
    yield h.kept - rest, b, w, None
    yield h.cotangent, model.at_of(("B", k, i)), b, None


def _held(model: NeighbourhoodTimes, units: int, start: Any, end: Any, literal: Any) -> Any:
    """The interval, if it has to do with the neighbourhood."""
    fixed = isinstance(start, int), isinstance(end, int)
    if not units or (fixed[1] and end <= model.begin):
        return None
    if fixed[0]:
        start = max(start, model.begin)
    size = end - start if fixed == (True, True) else model.cp.new_int_var(0, _FAR, "")
    if literal is None:
        return model.cp.new_interval_var(start, size, end, "")
    return model.cp.new_optional_interval_var(start, size, end, literal, "")


def _stay(held: int, kept: int, start: Any, b: Any, w: Any, literal: Any) -> Iterator[tuple[int, Any, Any, Any]]:
    """``held`` until B ends, then ``kept`` until W ends."""
    shared = min(held, kept)
    yield shared, start, w, literal
    yield held - shared, start, b, literal
    yield kept - shared, b, w, literal
