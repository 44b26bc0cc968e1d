"""Compare times and memory up to rounding, by one rule everywhere.

*Times* are sums of durations in double precision: 10⁶ terms in another order differ by 10⁻¹⁰ of the sum at most, and no cost
is measured to better than 10⁻⁴. *Memory* is sums and differences of sizes against a limit that people type with a few digits
(0.3 for three tenths): the same 10⁻⁹ of the limit lies far above rounding and far below the least activation of any schedule
here. Both are relative, so units don't matter.
"""

from __future__ import annotations

from math import floor
from typing import Literal

Objective = Literal["makespan", "span"]

TIME = 1e-9
"""Two orders of the same work may differ by this part of their time."""
MEMORY = 1e-9
"""A level may lie above its limit by this part of it and still keep it."""


def close(a: float, b: float) -> bool:
    """Return whether two times are the same up to rounding."""
    # the first part is for infinities, whose difference is no number
    return a == b or abs(a - b) <= TIME * max(abs(a), abs(b))


def at_most(x: float, most: float) -> bool:
    """Return whether ``x`` is no more than ``most``: a level and its limit, or a time and a bound (both ≥ 0)."""
    return x <= most * (1 + MEMORY)


def how_many(size: float, limit: float) -> int:
    """Return how many of ``size`` (> 0) fit into a finite ``limit``."""
    return floor(limit / size * (1 + MEMORY))


def nine_digits(x: float) -> float:
    """Return ``x`` as it is compared: equal but for rounding is equal. For sorting, where :func:`close` is not transitive."""
    return float(f"{x:.9g}")


def order_key(objective: Objective, makespan: float, span: float, peak: float) -> tuple[float, float, float]:
    """Return what is minimised: the objective, the other of makespan and span, the peak."""
    first, second = (makespan, span) if objective == "makespan" else (span, makespan)
    return nine_digits(first), nine_digits(second), nine_digits(peak)
