"""What the schedule verbs report about a schedule: one record, as JSON or for people.

The JSON keys are fixed: benchmarks and checks outside the repository read them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxpipe.plot.units import Units, memory_scale, number, time_scale

if TYPE_CHECKING:
    from jaxpipe.schedule import CostProfile, Schedule, Timeline


_MOST_STEPS = 400
_MOST_RANKS = 16


@dataclass(frozen=True, slots=True)
class Record:
    """Sizes, times and peaks of one schedule under given costs. Times are in the unit of the costs.

    ``tp_exposed_s``: per rank, how long compute waits for TP collectives; empty where the costs have none.
    ``lower_bound`` ``span_lower_bound``: what no schedule of the same placement within ``memory_limit`` can be below.
    ``offloaded_share``: fraction of all residuals that are copied to the host. ``group`` and ``family_limit``: what the family
    was told, where it takes them.
    """

    name: str
    ranks: int
    microbatches: int
    chunks: int
    makespan: float
    max_span: float
    bubble_rate: float
    span_bubble_rate: float
    peak_activations: tuple[float, ...]
    lower_bound: float
    span_lower_bound: float
    offloaded_share: float
    memory_limit: float | None
    group: int | None
    family_limit: float | None
    tp_exposed_s: tuple[float, ...] = ()

    @classmethod
    def of(
        cls,
        schedule: Schedule,
        timeline: Timeline,
        costs: CostProfile,
        memory_limit: float | None = None,
        *,
        group: int | None = None,
        family_limit: float | None = None,
    ) -> Record:
        from jaxpipe.schedule.explore import bounds_within, offloaded_share

        offloaded = offloaded_share(schedule, costs)
        makespan, span = bounds_within(
            schedule.placement, schedule.num_microbatches, costs, memory_limit, offload=offloaded > 0
        )
        return cls(
            name=schedule.name,
            ranks=schedule.num_ranks,
            microbatches=schedule.num_microbatches,
            chunks=schedule.num_chunks,
            makespan=timeline.makespan,
            max_span=timeline.max_span,
            bubble_rate=timeline.bubble_rate,
            span_bubble_rate=timeline.span_bubble_rate,
            peak_activations=tuple(timeline.peak_activations),
            lower_bound=makespan,
            span_lower_bound=span,
            offloaded_share=offloaded,
            memory_limit=memory_limit,
            group=group,
            family_limit=family_limit,
            tp_exposed_s=tuple(timeline.tp_exposed_s),
        )

    def json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}

    @property
    def peak(self) -> float:
        """The highest peak over all ranks."""
        return max(self.peak_activations, default=0.0)

    @property
    def tp_exposed(self) -> float:
        """Part of all ranks' time in which compute waits for TP collectives; it is part of the bubble."""
        total = self.ranks * self.makespan
        return sum(self.tp_exposed_s) / total if total > 0 else 0.0

    @property
    def above_bound(self) -> str:
        """How far the makespan lies above the lower bound, in percent."""
        return _above(self.makespan, self.lower_bound)

    @property
    def span_above_bound(self) -> str:
        """How far the longest span lies above its lower bound, in percent."""
        return _above(self.max_span, self.span_lower_bound)


def _above(value: float, bound: float) -> str:
    return f"{max(0.0, value / bound - 1):.1%}" if bound > 0 else "-"


@dataclass(frozen=True, slots=True)
class Failure:
    """A family that can't be had at these sizes: ``error`` says why at length, ``reason`` in a few words.

    ``record``: what it would take, where it is only the memory limit that forbids it.
    """

    name: str
    error: str
    reason: str
    record: Record | None = None

    def json(self) -> dict[str, Any]:
        return {"name": self.name, "error": self.error, "reason": self.reason}


def print_json(document: object) -> None:
    """Print one JSON document; nothing else goes to stdout with ``--json``."""
    print(json.dumps(document, allow_nan=False))


def print_summary(record: Record, timeline: Timeline, units: Units) -> None:
    """The record for people, one quantity a line."""
    time = time_scale(record.makespan, units)
    limit = f" within {number(record.memory_limit)} activations" if record.memory_limit else ""
    span, span_bound = time.show(record.max_span), time.show(record.span_lower_bound)
    rows = [
        ("makespan", f"{time.show(record.makespan)}"),
        ("lower bound", f"{time.show(record.lower_bound)}{limit} (makespan is {record.above_bound} above)"),
        ("longest rank span", f"{span} (lower bound {span_bound}, {record.span_above_bound} above)"),
        ("bubble", f"{record.bubble_rate:.1%}, by longest span {record.span_bubble_rate:.1%}"),
        ("peak activations", f"{number(record.peak)} (by rank: {_each(record.peak_activations)})"),
    ]
    if record.tp_exposed_s:
        longest = time.show(max(record.tp_exposed_s))
        rows.append(
            ("TP exposed", f"{record.tp_exposed:.1%} of all time, part of the bubble (at most {longest} on a rank)")
        )
    if record.offloaded_share:
        rows.append(("offloaded", f"{record.offloaded_share:.0%} of all activations"))
    if units == "si":
        most = max(timeline.peak_bytes, default=0.0)
        rows.append(("peak memory", f"{memory_scale(most, units).show(most)} on the fullest rank"))
    plural = "s" if record.chunks > 1 else ""
    print(
        f"{record.name}: {record.ranks} ranks, {record.microbatches} microbatches, {record.chunks} chunk{plural} per rank"
    )
    for label, text in rows:
        print(f"  {label:<18} {text}")


def _each(values: Sequence[float], most: int = 16) -> str:
    shown = " ".join(number(v) for v in values[:most])
    return shown if len(values) <= most else f"{shown} …"


def print_table(entries: Sequence[Record | Failure], units: Units) -> None:
    """All entries as an aligned table, columns that say nothing left out; those not possible last, with the reason.

    ``front`` marks what no other row beats in bubble and peak both.
    """
    records = [e for e in entries if isinstance(e, Record)]
    time = time_scale(max((r.makespan for r in records), default=0.0), units)
    best = {id(r) for r in front(records)}
    columns: list[tuple[str, list[str]]] = [
        ("schedule", [r.name for r in records]),
        ("chunks", [str(r.chunks) for r in records]),
        ("group", ["" if r.group is None else str(r.group) for r in records]),
        ("limit", ["" if r.family_limit is None else number(r.family_limit) for r in records]),
        ("makespan", [time.show(r.makespan) for r in records]),
        ("above bound", [r.above_bound for r in records]),
        ("longest span", [time.show(r.max_span) for r in records]),
        ("bubble", [f"{r.bubble_rate:.1%}" for r in records]),
        ("span bubble", [f"{r.span_bubble_rate:.1%}" for r in records]),
        ("TP exposed", [f"{r.tp_exposed:.1%}" if r.tp_exposed_s else "" for r in records]),
        ("peak activations", [number(r.peak) for r in records]),
        ("offloaded", [f"{r.offloaded_share:.0%}" if r.offloaded_share else "" for r in records]),
        ("front", ["*" if id(r) in best else "" for r in records]),
    ]
    failures = [e for e in entries if isinstance(e, Failure)]
    names = max((len(e.name) for e in entries), default=0)
    if records:
        shown = [(head, cells) for head, cells in columns if any(cells)]
        widths = [max(len(head), *map(len, cells)) for head, cells in shown]
        widths[0] = max(widths[0], names)
        for row in zip(*((head, *cells) for head, cells in shown), strict=True):
            aligned = (x.ljust(w) if k == 0 else x.rjust(w) for k, (x, w) in enumerate(zip(row, widths, strict=True)))
            print("  ".join(aligned).rstrip())
    for failure in failures:
        print(f"{failure.name:<{names}}  not possible: {failure.reason}")


def front(records: Sequence[Record]) -> list[Record]:
    """The Pareto front: records that no other beats in makespan or peak without losing in the other, by rising peak."""
    found: list[Record] = []
    for record in sorted(records, key=lambda r: (_rounded(r.peak), _rounded(r.makespan))):
        if not found or _rounded(record.makespan) < _rounded(found[-1].makespan):
            found.append(record)
    return found


def _rounded(x: float) -> float:
    return float(f"{x:.9g}")


def sketch(timeline: Timeline, width: int) -> str | None:
    """The timeline as text (:func:`jaxpipe.schedule.picture.draw`), or None if it doesn't fit in ``width`` columns."""
    from jaxpipe.schedule.picture import draw

    if timeline.num_ranks > _MOST_RANKS:
        return None
    events = [e for e in timeline.events if e.lane == "compute"]
    step = _common_step([t for e in events for t in (e.start_s, e.end_s)])
    if step is None:
        return None
    picture = draw(timeline, step)
    return picture if max(map(len, picture.splitlines())) <= width else None


def _common_step(times: Sequence[float]) -> float | None:
    """The longest step of which all ``times`` are multiples; None if there is none, or more than ``_MOST_STEPS``."""
    longest = max(times, default=0.0)
    tolerance = longest * 1e-9
    step = 0.0
    for time in times:
        a, b = time, step
        while b > tolerance:
            a, b = b, math.fmod(a, b)
            if a - b < tolerance:  # the remainder is a whole step, less rounding
                b = 0.0
        step = a
        if step > tolerance and longest / step > _MOST_STEPS:
            return None
    return step if step > tolerance else None
