"""Units that people read: µs, ms or s for measured times, bare numbers for unit costs; bytes or activations for memory.

A :class:`~jaxpipe.schedule.timeline.Timeline` holds bare floats; whether they are seconds and bytes is known by whoever made
it. Measured timelines always are; simulated ones only if their cost profile was.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from jaxpipe.schedule.timeline import Timeline

Units = Literal["si", "plain"]
_NOT_IN_XML = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True, slots=True)
class Scale:
    """A number ``x`` is shown as ``x * factor`` followed by ``name`` (empty for plain numbers)."""

    factor: float
    name: str

    def show(self, x: float) -> str:
        """``x`` with four significant digits and its unit."""
        return f"{number(x * self.factor)} {self.name}".rstrip()


_TIMES = ((1e-3, Scale(1e6, "µs")), (1.0, Scale(1e3, "ms")), (float("inf"), Scale(1.0, "s")))
_BYTES = (
    (1e3, Scale(1.0, "B")),
    (1e6, Scale(1e-3, "kB")),
    (1e9, Scale(1e-6, "MB")),
    (float("inf"), Scale(1e-9, "GB")),
)


def units_of(timelines: Sequence[Timeline]) -> Units:
    """``"si"`` when any of the timelines was measured."""
    return "si" if any(t.source == "measured" for t in timelines) else "plain"


def time_scale(longest: float, units: Units) -> Scale:
    """How to show times up to ``longest``."""
    return Scale(1.0, "") if units == "plain" else next(s for limit, s in _TIMES if longest < limit)


def memory_scale(largest: float, units: Units) -> Scale:
    """How to show amounts of memory up to ``largest``."""
    return Scale(1.0, "") if units == "plain" else next(s for limit, s in _BYTES if largest < limit)


def printable(text: str) -> str:
    """``text`` as SVG can hold it: control characters and halves of surrogate pairs (bytes of a file name that are not UTF-8)
    become ``?``."""
    return _NOT_IN_XML.sub("?", text)


def number(x: float) -> str:
    """``x`` with at most four significant digits, never in exponent form for 1e-4 <= |x| < 1e9."""
    if x == 0:
        return "0"
    if abs(x) >= 1000:
        return f"{x:.0f}" if abs(x) < 1e9 else f"{x:.3e}"
    return f"{x:.4g}"


def summary(timeline: Timeline, units: Units) -> str:
    """Makespan, both bubble rates and the peak of a timeline, on one line."""
    parts = [
        f"makespan {time_scale(timeline.makespan, units).show(timeline.makespan)}",
        f"bubble {timeline.bubble_rate:.1%}",
        f"bubble by longest span {timeline.span_bubble_rate:.1%}",
        f"peak {number(max(timeline.peak_activations, default=0.0))} activations",
    ]
    if timeline.tp_exposed_s:
        parts.insert(3, f"TP exposed {timeline.tp_exposed_rate:.1%}")
    if units == "si":
        most = max(timeline.peak_bytes, default=0.0)
        parts.append(f"{memory_scale(most, units).show(most)} a rank")
    return " · ".join(parts)
