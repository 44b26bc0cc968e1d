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
    """Sizes, times and peaks of one schedule under given costs. Times are in the unit of the costs."""

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

    @classmethod
    def of(cls, schedule: Schedule, timeline: Timeline, costs: CostProfile) -> Record:
        from jaxpipe.schedule import lower_bound

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
            lower_bound=lower_bound(schedule.placement, schedule.num_microbatches, costs),
        )

    def json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}

    @property
    def above_bound(self) -> str:
        """How far the makespan lies above the lower bound, in percent."""
        return f"{self.makespan / self.lower_bound - 1:.1%}" if self.lower_bound > 0 else "-"


@dataclass(frozen=True, slots=True)
class Failure:
    """A family that can't be had at these sizes, and why."""

    name: str
    error: str

    def json(self) -> dict[str, Any]:
        return {"name": self.name, "error": self.error}


def print_json(document: object) -> None:
    """Print one JSON document; nothing else goes to stdout with ``--json``."""
    print(json.dumps(document, allow_nan=False))


def print_summary(record: Record, timeline: Timeline, units: Units) -> None:
    """The record for people, one quantity a line."""
    time = time_scale(record.makespan, units)
    rows = [
        ("makespan", f"{time.show(record.makespan)}"),
        ("lower bound", f"{time.show(record.lower_bound)} (makespan is {record.above_bound} above)"),
        ("longest rank span", time.show(record.max_span)),
        ("bubble", f"{record.bubble_rate:.1%}, by longest span {record.span_bubble_rate:.1%}"),
        ("peak activations", f"{number(max(record.peak_activations))} (by rank: {_each(record.peak_activations)})"),
    ]
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
    """All entries as an aligned table, the failures after it with their reasons."""
    records = [e for e in entries if isinstance(e, Record)]
    failures = [e for e in entries if isinstance(e, Failure)]
    time = time_scale(max((r.makespan for r in records), default=0.0), units)
    header = (
        "schedule",
        "chunks",
        "makespan",
        "above bound",
        "longest span",
        "bubble",
        "span bubble",
        "peak activations",
    )
    rows = [
        (
            r.name,
            str(r.chunks),
            time.show(r.makespan),
            r.above_bound,
            time.show(r.max_span),
            f"{r.bubble_rate:.1%}",
            f"{r.span_bubble_rate:.1%}",
            number(max(r.peak_activations)),
        )
        for r in records
    ]
    if rows:
        widths = [max(len(row[k]) for row in (header, *rows)) for k in range(len(header))]
        for row in (header, *rows):
            cells = (x.ljust(w) if k == 0 else x.rjust(w) for k, (x, w) in enumerate(zip(row, widths, strict=True)))
            print("  ".join(cells).rstrip())
    for failure in failures:
        print(f"{failure.name}: not possible: {failure.error}")


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
