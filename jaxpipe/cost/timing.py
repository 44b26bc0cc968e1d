"""Median and spread of something timed several times."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds: the median of ``count`` samples, and the first and third quartile (``low_s``, ``high_s``)."""

    median_s: float
    low_s: float
    high_s: float
    count: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Timing:
        """Of at least one sample, in seconds."""
        assert samples, "a timing needs a sample"
        low, median, high = statistics.quantiles(samples, method="inclusive") if len(samples) > 1 else [samples[0]] * 3
        return cls(median, low, high, len(samples))

    @property
    def spread(self) -> float:
        """Distance of the quartiles ÷ the median: how far to trust it. 0 where nothing took any time."""
        return (self.high_s - self.low_s) / self.median_s if self.median_s > 0 else 0.0

    def __str__(self) -> str:
        """``12.34 ms ±3%`` (half the distance of the quartiles)."""
        half = f"{50 * self.spread:.0f}%" if math.isfinite(self.spread) else "?"
        return f"{self.median_s * 1e3:.3f} ms ±{half}"
