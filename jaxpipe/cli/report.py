"""Print what schedule verbs say of a schedule, as JSON or as text.

The JSON keys are fixed: benchmarks and checks outside the repository read them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from jaxpipe.plot.figure import Units, memory_scale, number, time_scale
from jaxpipe.schedule import CostProfile, Schedule, Timeline
from jaxpipe.schedule.memory import offloaded_share, rank_share
from jaxpipe.schedule.simulate import StepsTimeline
from jaxpipe.schedule.text import draw
from jaxpipe.schedule.timeline import TIME, at_most, nine_digits
from jaxpipe.text import aligned

_MOST_STEPS = 400
_MOST_RANKS = 16
_FINER = (3, 2, 1)
"""Columns that the shortest action gets in a rounded picture, the best first."""


@dataclass(frozen=True, slots=True)
class Record:
    """A schedule simulated under some costs, with the figures that are printed of it. Times are in the unit of the costs.

    ``lower_bound`` and ``span_lower_bound``: no schedule of the same placement within ``memory_limit`` is shorter.
    ``offloaded_share``: fraction of all residuals that are copied to the host. ``group`` and ``family_limit``: options of the
    family, if it takes them. ``file``: where the schedule was read, if it was.
    """

    schedule: Schedule
    costs: CostProfile
    timeline: Timeline
    lower_bound: float
    span_lower_bound: float
    offloaded_share: float
    memory_limit: float | None
    group: int | None = None
    family_limit: float | None = None
    file: str | None = None

    @classmethod
    def of(
        cls, schedule: Schedule, costs: CostProfile, timeline: Timeline, memory_limit: float | None, **facts: Any
    ) -> Record:
        """Build the record; ``facts`` are the fields that have a default."""

        offloaded = offloaded_share(schedule, costs)
        sizes = schedule.placement, schedule.num_microbatches
        from jaxpipe.search.best import bounds_within

        bounds = bounds_within(*sizes, costs, memory_limit, offload=offloaded > 0)
        return cls(schedule, costs, timeline, *bounds, offloaded, memory_limit, **facts)

    def json(self) -> dict[str, Any]:
        """Return the record for JSON. ``tp_exposed_s``: per rank, how long compute waits for collectives; empty where
        the costs have none."""
        timed = ("makespan", "max_span", "bubble_rate", "span_bubble_rate", "peak_activations")
        optional_keys = ("lower_bound", "span_lower_bound", "offloaded_share", "memory_limit", "group", "family_limit")
        return {
            "name": self.schedule.name,
            "ranks": self.schedule.num_ranks,
            "microbatches": self.schedule.num_microbatches,
            "chunks": self.schedule.num_chunks,
            **{name: getattr(self.timeline, name) for name in timed},
            **{name: getattr(self, name) for name in optional_keys},
            "tp_exposed_s": self.timeline.tp_exposed_s,
            "rank_shares": self.rank_shares,
            "free_copies": self.free_copies,
            "file": self.file,
        }

    @property
    def label(self) -> str:
        """The name in tables and pictures."""
        return self.file or self.schedule.name

    @property
    def peak(self) -> float:
        """The highest peak over all ranks."""
        return max(self.timeline.peak_activations, default=0.0)

    @property
    def rank_shares(self) -> tuple[float, ...]:
        """The size of one activation on each rank: its residuals of one microbatch (of the first flow) in the unit of the
        costs."""

        return tuple(
            rank_share(self.schedule.placement, self.costs, rank, 0) for rank in range(self.schedule.num_ranks)
        )

    @property
    def free_copies(self) -> bool:
        """Whether the schedule offloads and its copies take no time."""
        return copies_are_free(self.schedule, self.costs)

    @property
    def above_bound(self) -> str:
        """How far the makespan lies above the lower bound, in percent."""
        return _above(self.timeline.makespan, self.lower_bound)

    @property
    def span_above_bound(self) -> str:
        """How far the longest span lies above its lower bound, in percent."""
        return _above(self.timeline.max_span, self.span_lower_bound)


def _above(value: float, bound: float) -> str:
    return f"{max(0.0, value / bound - 1):.1%}" if bound > 0 else "-"


@dataclass(frozen=True, slots=True)
class Infeasible:
    """A family that has no schedule at these sizes: ``error`` says why at length, ``reason`` in a few words.

    ``record``: the schedule's figures, if it is only the memory limit that forbids it. ``file``: as in :class:`Record`.
    """

    name: str
    error: str
    reason: str
    record: Record | None = None
    file: str | None = None

    @property
    def label(self) -> str:
        return self.file or self.name

    def json(self) -> dict[str, Any]:
        fields = {"name": self.name, "error": self.error, "reason": self.reason}
        return fields if self.file is None else {**fields, "file": self.file}


def copies_are_free(schedule: Schedule, costs: CostProfile) -> bool:
    """Return whether the schedule copies to the host and its copies take no time under these costs."""

    return not any(costs.offload_s) and not any(costs.load_s) and offloaded_share(schedule, costs) > 0


FREE_COPIES = "copies to the host take no time"


def print_summary(record: Record, units: Units, steps: StepsTimeline | None = None) -> None:
    """Print the record as text, one quantity a line; of several ``steps``, the time from one to the next too."""

    timeline, schedule = record.timeline, record.schedule
    time = time_scale(timeline.makespan, units)
    limit = f" within {number(record.memory_limit)} activations" if record.memory_limit else ""
    bound = f"{time.show(record.lower_bound)} of its placement{limit} (makespan is {record.above_bound} above)"
    span, span_bound = time.show(timeline.max_span), time.show(record.span_lower_bound)
    rows = [
        ("makespan", time.show(timeline.makespan)),
        ("lower bound", bound),
        ("longest rank span", f"{span} (lower bound {span_bound}, {record.span_above_bound} above)"),
        ("bubble", f"{timeline.bubble_rate:.1%}, by longest span {timeline.span_bubble_rate:.1%}"),
        ("peak activations", f"{number(record.peak)} (by rank: {_each(timeline.peak_activations)})"),
    ]
    # one activation is each rank's own share: where shares differ, equal counts are not equal bytes, which is said
    largest = max(record.rank_shares)
    if not at_most(largest, min(record.rank_shares)):
        memory = memory_scale(largest, units)
        each = _each([x * memory.factor for x in record.rank_shares])
        rows.append(("", f"each rank counts in its own share of a microbatch: {each} {memory.name}".rstrip()))
    if timeline.tp_exposed_s:
        longest = time.show(max(timeline.tp_exposed_s))
        exposed = f"{timeline.tp_exposed_rate:.1%} of all time, part of the bubble"
        rows.append(("comm exposed", f"{exposed} (at most {longest} on a rank)"))
    if record.offloaded_share:
        free = f"; {FREE_COPIES}" if record.free_copies else ""
        rows.append(("offloaded", f"{record.offloaded_share:.0%} of all activations{free}"))
    if units == "si":
        most = max(timeline.peak_bytes, default=0.0)
        rows.append(("peak memory", f"{memory_scale(most, units).show(most)} on the fullest rank"))
    if steps is not None:
        waiting = timeline.makespan + steps.update_s
        less = f", {time.show(waiting)} if ranks waited" if not at_most(waiting, steps.period_s) else ""
        rows.append((f"{len(steps.ends_s)} steps", f"{time.show(steps.period_s)} from step to step{less}"))
    chunks = f"{schedule.num_chunks} chunk{'s' if schedule.num_chunks > 1 else ''} per rank"
    print(f"{schedule.name}: {schedule.num_ranks} ranks, {schedule.num_microbatches} microbatches, {chunks}")
    for label, text in rows:
        print(f"  {label:<18} {text}")


def _each(values: Sequence[float], most: int = 16) -> str:
    shown = " ".join(number(v) for v in values[:most])
    return shown if len(values) <= most else f"{shown} …"


def print_table(entries: Sequence[Record | Infeasible], units: Units) -> None:
    """Print all entries as an aligned table without empty columns; failures come last, with the reason.

    ``front`` marks what no other row beats in bubble and peak both.
    """
    records = [e for e in entries if isinstance(e, Record)]
    time = time_scale(max((r.timeline.makespan for r in records), default=0.0), units)
    best = {id(r) for r in front(records)}
    columns: list[tuple[str, list[str]]] = [
        ("schedule", [r.label for r in records]),
        ("chunks", [str(r.schedule.num_chunks) for r in records]),
        ("group", ["" if r.group is None else str(r.group) for r in records]),
        ("limit", ["" if r.family_limit is None else number(r.family_limit) for r in records]),
        ("makespan", [time.show(r.timeline.makespan) for r in records]),
        ("above bound", [r.above_bound for r in records]),
        ("longest span", [time.show(r.timeline.max_span) for r in records]),
        ("bubble", [f"{r.timeline.bubble_rate:.1%}" for r in records]),
        ("span bubble", [f"{r.timeline.span_bubble_rate:.1%}" for r in records]),
        ("comm exposed", [f"{r.timeline.tp_exposed_rate:.1%}" if r.timeline.tp_exposed_s else "" for r in records]),
        ("peak activations", [number(r.peak) for r in records]),
        ("offloaded", [f"{r.offloaded_share:.0%}" if r.offloaded_share else "" for r in records]),
        ("front", ["*" if id(r) in best else "" for r in records]),
    ]
    failures = [e for e in entries if isinstance(e, Infeasible)]
    names = max((len(e.label) for e in entries), default=0)
    shown = [(head.ljust(names * (k == 0)), *cells) for k, (head, cells) in enumerate(columns) if any(cells)]
    for line in aligned([*zip(*shown, strict=True)], left=(0,)) if records else ():
        print(line)
    for failure in failures:
        print(f"{failure.label:<{names}}  not possible: {failure.reason}")


def front(records: Sequence[Record]) -> list[Record]:
    """Return the Pareto front: records that no other beats in makespan or peak without losing in the other, by rising peak."""

    def key(record: Record) -> tuple[float, float]:
        return nine_digits(record.peak), nine_digits(record.timeline.makespan)

    front_records: list[Record] = []
    for record in sorted(records, key=key):
        if not front_records or key(record)[1] < key(front_records[-1])[1]:
            front_records.append(record)
    return front_records


def sketch(timeline: Timeline, width: int, units: Units) -> str:
    """Draw the timeline as text (:func:`jaxpipe.schedule.text.draw`) in at most ``width`` columns: exactly where its
    times have a common step, else with times rounded, which its last line says. A line that says how to draw it where it
    does not fit."""

    too_large = "  (too large for a picture here; -o x.svg draws it)"
    events = [e for e in timeline.events if e.lane == "compute"]
    if not events or timeline.num_ranks > _MOST_RANKS or len(events) > width * timeline.num_ranks:
        return too_large
    step = _common_step([t for e in events for t in (e.start_s, e.end_s)])
    if step is not None and _fits(picture := draw(timeline, step), width):
        return picture
    shortest = min((e.end_s - e.start_s for e in events if e.end_s > e.start_s), default=0.0)
    for parts in _FINER:
        if timeline.makespan * parts <= shortest * width and _fits(picture := draw(timeline, shortest / parts), width):
            return f"{picture}\n  (times rounded to multiples of {time_scale(shortest, units).show(shortest / parts)})"
    return too_large


def _fits(picture: str, width: int) -> bool:
    return max(map(len, picture.splitlines())) <= width


def _common_step(times: Sequence[float]) -> float | None:
    """Return the longest step of which all ``times`` are multiples; None if there is none, or more than ``_MOST_STEPS``."""

    longest = max(times, default=0.0)
    if longest <= 0:
        return None
    # sums of decimal costs are no exact multiples: shares of the longest are read as fractions with small denominators,
    # and their common step is accepted only if all times lie on it within the tolerance of equal times
    shares = {time / longest for time in times}
    steps = math.lcm(*(Fraction(share).limit_denominator(_MOST_STEPS).denominator for share in shares))
    even = steps <= _MOST_STEPS and all(abs(share * steps - round(share * steps)) <= steps * TIME for share in shares)
    return longest / steps if even else None
