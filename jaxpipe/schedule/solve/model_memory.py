"""Memory of a rank as CP-SAT constraints: a reservoir of takes and gives, or a cumulative of what is held from when to when.

Both say what DESIGN.md section 4 says; events of one tick are judged together, gives included, as the simulator does. What
one microbatch of a replica holds, R = ``stays`` + ``leaves``, K = ``kept``:

    stays      F start ── B end             kept       B end ── W end           (one piece F start ── W end for what both share)
    leaves     F start ── O end, L start ── B end   if it goes away, else with ``stays``
    cotangent  B start ── B end             workspace  while its op runs

``strict`` is for hosts with a lane per direction. There an L may be wanted just when an O of another microbatch ends, and
rows can't say that while a compute slot runs (an L waits for compute slots, its lane and its own O). Strict models count
what L takes from the last instant that rows can name: the end of its own O, or a moment when no compute slot runs. What
they find keeps the limit by order alone, however long anything takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jaxpipe.schedule.solve.formulation import Formulation
from jaxpipe.schedule.solve.instance import Holding, Instance, MemoryLimit

Piece = tuple[int, Any, Any, int, tuple[Any, ...]]
"""Units, from when, to when, least ticks between the two, literals that must all hold (none or one, in fact)."""


def has_reservoirs(instance: Instance) -> bool:
    """Whether memory is a reservoir: faster without offload, a cumulative with (README.md: measured)."""
    return not any(instance.may_leave)


def add_memory(model: Formulation, *, strict: bool = False, peak: Any = None) -> None:
    """Add the limits of the instance. ``peak``: a variable that no limit of activations may exceed, in its largest
    units; that takes a cumulative."""
    takes = _take_times(model, strict)
    for limit in model.instance.memory_limits:
        pieces = list(_pieces(model, limit, takes))
        if peak is None and has_reservoirs(model.instance):
            _reservoir(model, limit, pieces)
        else:
            _cumulative(model, limit, pieces, peak)


def _take_times(model: Formulation, strict: bool) -> dict[tuple[int, int], Any]:
    """Per microbatch that may leave, from when on its L is counted."""
    takes: dict[tuple[int, int], Any] = {}
    for k, i in model.away:
        start = model.starts["L", k, i]
        if not strict or model.instance.task.costs.host.mode == "shared":
            takes[k, i] = start
            continue
        gap = model.cp.new_int_var(0, model.horizon, f"gap{k}.{i}")
        model.lanes[model.instance.problem.rank[k]].append(
            model.cp.new_optional_fixed_size_interval_var(gap, 0, model.away[k, i], "")
        )
        take = takes[k, i] = model.cp.new_int_var(0, model.horizon, f"take{k}.{i}")
        model.cp.add_max_equality(take, [gap, model.ends["O", k, i]])
        model.cp.add(take <= start).only_enforce_if(model.away[k, i])
    return takes


def _pieces(model: Formulation, limit: MemoryLimit, takes: dict[tuple[int, int], Any]) -> Iterator[Piece]:
    for k, holding in limit.holdings.items():
        for i in model.instance.problem.microbatches(k):
            yield from _residuals(model, k, i, holding, takes)
            yield from _others(model, k, i, holding)


def _residuals(model: Formulation, k: int, i: int, h: Holding, takes: dict[tuple[int, int], Any]) -> Iterator[Piece]:
    instance = model.instance
    f, b, w = model.starts["F", k, i], model.ends["B", k, i], model.ends["W", k, i]
    to_b = model.round_trips[k] + instance.back(k)
    to_w, rest = to_b + instance.rest(k), instance.rest(k)
    if (k, i) not in model.away:
        yield from _stay(h.stays + h.leaves, h.kept, (f, to_b, to_w), b, w, rest, ())
        return
    here, load = model.away[k, i], takes[k, i]
    back = instance.back(k) + instance.duration["L"][k]
    gone = instance.duration["F"][k] + instance.duration["O"][k]
    yield h.stays, f, b, to_b, ()
    yield h.leaves, f, model.ends["O", k, i], gone, (here,)
    if h.kept <= h.leaves:
        yield from _stay(h.leaves, h.kept, (f, to_b, to_w), b, w, rest, (~here,))
        yield from _stay(h.leaves, h.kept, (load, back, back + rest), b, w, rest, (here,))
    else:
        yield h.leaves, f, b, to_b, (~here,)
        yield h.leaves, load, b, back, (here,)
        yield h.kept, b, w, rest, ()


def _stay(
    held: int, kept: int, begin: tuple[Any, int, int], b: Any, w: Any, rest: int, when: tuple[Any, ...]
) -> Iterator[Piece]:
    """``held`` until B ends, then ``kept`` until W ends; ``begin``: when it starts, least ticks to B's and to W's end."""
    start, to_b, to_w = begin
    if kept <= held:
        yield held - kept, start, b, to_b, when
        yield kept, start, w, to_w, when
    else:
        yield held, start, b, to_b, when
        yield kept, b, w, rest, when


def _others(model: Formulation, k: int, i: int, h: Holding) -> Iterator[Piece]:
    fused = model.fused.get((k, i))
    split = () if fused is None else (~fused,)
    b, end = model.starts["B", k, i], model.ends["B", k, i]
    yield h.cotangent, b, end, model.instance.back(k), split
    for op, units in h.workspace:
        if op == "BW":
            if fused is not None:
                yield units, b, end, model.instance.back(k), (fused,)
        elif op in ("O", "L"):
            if (k, i) in model.away:
                start = model.starts[op, k, i]
                yield units, start, model.ends[op, k, i], model.instance.duration[op][k], (model.away[k, i],)
        elif op in ("F", "B", "W"):
            least = 0 if op != "F" else model.instance.duration["F"][k]
            when = split if op != "F" else ()
            yield units, model.starts[op, k, i], model.ends[op, k, i], least, when


def _reservoir(model: Formulation, limit: MemoryLimit, pieces: list[Piece]) -> None:
    """Takes and gives at one time under one literal are merged."""
    events: dict[tuple[str, str], list[Any]] = {}
    for units, start, end, _, when in pieces:
        if units:
            for time, amount in ((start, units), (end, -units)):
                event = events.setdefault((str(time), str(when)), [time, 0, when[0] if when else 1])
                event[1] += amount
    changes = [e for e in events.values() if e[1]]
    model.cp.add_reservoir_constraint_with_active(
        [e[0] for e in changes], [e[1] for e in changes], [e[2] for e in changes], 0, limit.capacity
    )


def _cumulative(model: Formulation, limit: MemoryLimit, pieces: list[Piece], peak: Any) -> None:
    intervals, demands = [], []
    for units, start, end, least, when in pieces:
        if not units:
            continue
        size = model.cp.new_int_var(least, model.horizon, "")
        model.derived.append((size, end - start))
        if when:
            intervals.append(model.cp.new_optional_interval_var(start, size, end, when[0], ""))
        else:
            intervals.append(model.cp.new_interval_var(start, size, end, ""))
        demands.append(units)
    capacity: Any = limit.capacity
    if peak is not None and limit.activations:
        capacity = model.cp.new_int_var(0, limit.capacity, "")
        model.cp.add(capacity <= peak)
        model.peaks.append(capacity)
    model.cp.add_cumulative(intervals, demands, capacity)
